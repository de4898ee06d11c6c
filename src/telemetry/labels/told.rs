//! Labels of the messages that routers send about their requests: outcomes and hints.

use super::LabelValue;

label_values! {
    /// Reason why reported outcomes were not counted. An outcome tells how many blocks a request really found.
    OutcomeRefusal: "reason" {
        /// The payload is no report of outcomes, or the subject is not one for such reports.
        Undecodable => "undecodable",
        /// The report has a version of kvatlas's message format that the daemon does not support.
        UnsupportedVersion => "unsupported_version",
        /// The report has more outcomes than one report may have.
        TooMany => "too_many",
        /// The namespace is not known.
        UnknownNamespace => "unknown_namespace",
        /// The index does not know the holder that the outcome names.
        UnknownHolder => "unknown_holder",
        /// Too many holders already have outcome metrics of their own. The outcome is counted for the namespace only, not for its
        /// holder.
        NoRoom => "no_room",
    }
}

label_values! {
    /// Reason why a hint was not kept, or was dropped before its time ended. A hint is a router's report of where it has sent
    /// a request.
    HintDrop: "reason" {
        /// The payload, the subject or the prompt of the hint is not valid, or is larger than allowed.
        Undecodable => "undecodable",
        /// The namespace that the hint names is not known.
        UnknownNamespace => "unknown_namespace",
        /// The hint was dropped to make room for newer hints, or is larger than the whole memory for hints.
        NoRoom => "no_room",
    }
}
