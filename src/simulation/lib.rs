//! A simulated fleet on a real daemon, over a real NATS server: what `replay` and `demo` run.
//!
//! Requests come from a [trace](read_trace) or are [synthetic](SyntheticLoad). For each, a router asks the daemon which
//! workers hold how much of the prompt and picks a worker; the worker admits the prompt to its bounded [cache](PrefixCache)
//! and publishes what that stored and removed. So the daemon hears of the fleet only what any daemon would. The simulation
//! knows by itself what every worker holds. Every reply can be [compared](difference) with the truth. Nothing here uses the
//! index.
//!
//! | module | subject |
//! |---|---|
//! | `request`, `trace`, `synthetic` | what arrives |
//! | `attention`, `cache`, `router`, `fleet` | what happens to it, and what is true |
//! | `random_routing` | what a router without knowledge would get |
//! | `session` | the daemon, in this process or elsewhere |
//! | `replay`, `check`, `report` | driving, comparing, counting |
//! | `steady` | a fleet that goes on, for deployments that are tried out |
//! | `error` | why a simulation cannot go on |
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
pub use check::{Difference, difference};
pub use error::SimulationError;
pub use fleet::{ExpectedHolder, Fleet, FleetSize, Served};
pub use replay::{FinalCheck, Replay, ReplayOptions};
pub use report::{QueryLatency, Report, Tally};
pub use request::{Request, chain_of};
pub use router::Router;
pub use session::{Session, embedded_config};
pub use steady::{SteadyFleet, SteadyOptions, SteadyTally};
pub use synthetic::SyntheticLoad;
pub use trace::{TraceError, parse_trace, read_trace};
