//! Labels of the listener for Dynamo's routers.

use super::LabelValue;

label_values! {
    /// Outcome of a request from one of Dynamo's routers.
    DynamoOutcome: "outcome" {
        /// The router has its answer.
        Answered => "answered",
        /// The request cannot be read, or asks for an endpoint that is not served.
        Unreadable => "unreadable",
        /// The answer could not be sent to the router, or not in time.
        NotTaken => "not_taken",
        /// The answer was thrown away: too many answers were on their way to the router's address, or to addresses
        /// that had taken none.
        NotSent => "not_sent",
        /// The bodies of all requests took too much room.
        NoRoom => "no_room",
        /// The reply subject is a subject of kvatlas or of the NATS server, so the acknowledgement would reach others
        /// than the router.
        ForbiddenReplySubject => "forbidden_reply_subject",
    }
}
