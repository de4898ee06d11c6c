//! The ways to reach NATS.

pub mod embedded;
