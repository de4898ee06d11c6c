//! The other side of the contract: a client for routers, and a publisher for engines.

mod error;
mod gather;
mod publisher;
mod query;

pub use error::ClientError;
pub use gather::{Gatherer, Merged};
pub use publisher::Publisher;
pub use query::QueryClient;
