//! A simulated fleet on a real daemon, over a real NATS server. `kvatlas replay` and `kvatlas demo` run it.
//!
//! Requests come from a [trace](read_trace) or are [synthetic](SyntheticLoad). For each request, a router asks the daemon which
//! workers hold leading blocks of the prompt, and picks a worker. The worker admits the prompt to its bounded
//! [cache](PrefixCache), and publishes events about the blocks that were stored and removed. So the daemon learns no more about
//! the fleet than a daemon in production. The simulation itself knows what every worker holds, without using the index. So
//! every reply can be [compared](difference) with the truth.
//!
//! | module | subject |
//! |---|---|
//! | `request`, `trace`, `synthetic` | the requests that arrive |
//! | `attention`, `cache`, `router`, `fleet` | the fleet that serves them, and the truth about its caches |
//! | `random_routing` | the hit rate of a router without knowledge |
//! | `session` | the connection to the daemon, in this process or elsewhere |
//! | `replay`, `check`, `report` | sending the requests, comparing the replies, counting |
//! | `steady` | a fleet that runs for ever, to try out deployments |
//! | `error` | the errors that end a simulation |
//! | `policies` | whether routing on exact answers pays, in virtual time |

mod attention;
mod cache;
mod check;
mod error;
mod fleet;
#[cfg(feature = "compare")]
pub mod policies;
mod random_routing;
mod replay;
mod report;
mod request;
mod router;
mod session;
mod steady;
mod synthetic;
mod trace;

pub use attention::{Attention, CacheModel, Retention};
pub use cache::{Admission, PrefixCache};
pub use check::difference;
pub use error::SimulationError;
pub use fleet::{ExpectedHolder, Fleet, FleetSize, ServedRequest};
pub use replay::{FinalCheck, Replay, ReplayOptions};
pub use report::{QueryLatency, Report, Tally};
pub use request::{Request, chain_of};
pub use router::Router;
pub use session::{Session, embedded_config};
pub use steady::{SteadyFleet, SteadyOptions, SteadyTally};
pub use synthetic::SyntheticLoad;
pub use trace::{TraceError, parse_trace, read_trace};
