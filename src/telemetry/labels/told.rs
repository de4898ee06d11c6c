//! Labels of what routers tell: outcomes and hints.

use super::LabelValue;

label_values! {
    /// Why outcomes were not taken.
    OutcomeRefusal: "reason" {
        /// The payload or the subject is no report.
        Undecodable => "undecodable",
        /// The report speaks another version of the contract.
        UnsupportedVersion => "unsupported_version",
        /// The report has more outcomes than one may have.
        TooMany => "too_many",
        /// The namespace is not known.
        UnknownNamespace => "unknown_namespace",
        /// The holder is not known.
        UnknownHolder => "unknown_holder",
        /// So many holders have outcomes already that this one has none of its own; the namespace's sums have it.
        NoRoom => "no_room",
    }
}

label_values! {
    /// The reason why a hint was not kept, or went before its time.
    HintDrop: "reason" {
        /// The payload, the subject or the prompt is none, or says too much.
        Undecodable => "undecodable",
        /// The namespace is not known.
        UnknownNamespace => "unknown_namespace",
        /// There is no more room for hints.
        NoRoom => "no_room",
    }
}
