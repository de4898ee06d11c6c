//! The other side of the contract: a client for routers, and a publisher for engines.

mod error;
mod publisher;
mod query;

pub use error::ClientError;
pub use publisher::Publisher;
pub use query::QueryClient;
