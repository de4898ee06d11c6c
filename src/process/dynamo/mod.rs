//! The parts of Dynamo's protocols that daemon and bridge share: frames of its request plane, and questions to etcd.

mod etcd;
mod frames;

pub use etcd::{EtcdError, ask_etcd};
pub use frames::{HEAD_BYTES, Lengths, two_parts};
