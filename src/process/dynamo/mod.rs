//! Dynamo's planes, as far as daemon and bridge share them.

mod etcd;
mod frames;

pub use etcd::{EtcdError, ask_etcd};
pub use frames::{HEAD_BYTES, Lengths, two_parts};
