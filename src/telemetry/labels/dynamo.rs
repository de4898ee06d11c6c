//! Labels of the way of Dynamo's routers.

use super::LabelValue;

label_values! {
    /// How a request of a router of Dynamo ended.
    DynamoOutcome: "outcome" {
        /// The router has its answer.
        Answered => "answered",
        /// The request cannot be read.
        Unreadable => "unreadable",
        /// The router did not take the answer.
        NotTaken => "not_taken",
        /// Requests took too much room.
        NoRoom => "no_room",
    }
}
