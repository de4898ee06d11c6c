//! Ports at which the bridge receives workers' answers: any free ports, or a few ports that a firewall lets through.

use std::str::FromStr;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Ports for answers of Dynamo's workers; by default any free port. Clones share the ports. A question waits while all of
/// them are taken.
#[derive(Debug, Clone, Default)]
pub struct AnswerPorts(Option<Arc<PortPool>>);

/// Error for a text that is no range of ports.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no port and no range of ports, such as 7300-7315")]
pub struct NoPorts(String);

#[derive(Debug)]
struct PortPool {
    free: Mutex<Vec<u16>>,
    permits: Arc<Semaphore>,
}

/// A port for one answer, given back when the value is dropped.
#[derive(Debug, Default)]
pub(super) struct Port {
    /// The port; 0 for any that is free.
    pub(super) number: u16,
    taken: Option<(Arc<PortPool>, OwnedSemaphorePermit)>,
}

impl AnswerPorts {
    /// Waits until a port is free, and takes it.
    pub(super) async fn take(&self) -> Port {
        let Some(pool) = &self.0 else {
            return Port::default();
        };
        let permit = Arc::clone(&pool.permits).acquire_owned().await.ok();
        let number = permit.as_ref().and_then(|_| pool.free.lock().pop());
        Port {
            number: number.unwrap_or_default(),
            taken: permit.map(|permit| (Arc::clone(pool), permit)),
        }
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        // The port is given back before its permit.
        if let Some((pool, _)) = &self.taken {
            pool.free.lock().push(self.number);
        }
    }
}

impl FromStr for AnswerPorts {
    type Err = NoPorts;

    fn from_str(text: &str) -> Result<Self, NoPorts> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let port = |text: &str| text.parse::<u16>().ok().filter(|port| *port > 0);
        let (Some(first), Some(last)) = (port(first), port(last)) else {
            return Err(NoPorts(text.to_owned()));
        };
        let free: Vec<u16> = (first..=last).rev().collect();
        if free.is_empty() {
            return Err(NoPorts(text.to_owned()));
        }
        Ok(Self(Some(Arc::new(PortPool {
            permits: Arc::new(Semaphore::new(free.len())),
            free: Mutex::new(free),
        }))))
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn a_port_is_taken_by_one_question_at_a_time() {
        let ports: AnswerPorts = "7300-7301".parse().unwrap();
        let (one, other) = (ports.take().await, ports.clone().take().await);
        assert_eq!((one.number, other.number), (7300, 7301));
        assert!(ports.take().now_or_never().is_none());
        drop(one);
        assert_eq!(ports.take().await.number, 7300);
        assert_eq!(AnswerPorts::default().take().await.number, 0);
    }

    #[test]
    fn a_range_has_a_port_at_least() {
        for text in ["", "0", "x", "70000", "7301-7300", "7300-", "1-2-3"] {
            assert!(text.parse::<AnswerPorts>().is_err(), "{text}");
        }
        assert!("7300".parse::<AnswerPorts>().is_ok());
    }
}
