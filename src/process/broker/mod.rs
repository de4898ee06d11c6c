//! Connections to NATS that reconnect by themselves, and the development broker.

mod credentials;
pub mod embedded;
mod intake;
mod lasting;
mod nats;
#[cfg_attr(not(feature = "nkeys"), path = "left_out.rs")]
mod signed;

pub use intake::{Intake, bytes_of};
pub use kvatlas_client::{Refusal, Refused};
pub use lasting::{LastingSubscription, RefusedSubscriptions, mend_requests};
pub use nats::{Buffer, SubscribeError, check_credentials, connect_counted, follow_connection, is_confirmed};
pub use nats::{
    ConnectError, ConnectPatience, ConnectionNotice, RoundTripError, connect, places_of, round_trip,
};
