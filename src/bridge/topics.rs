//! The topics under which one engine publishes: another topic is another engine's.

use bytes::Bytes;

/// Knows the topic of one engine.
#[derive(Debug)]
pub(super) struct Topics {
    /// The beginning of the topic, as it was configured.
    prefix: Vec<u8>,
    /// The topic of the first batch; none before that, or where batches have none.
    own: Option<Vec<u8>>,
}

/// The part that has to stay the same. Of `kv@POD@MODEL` that is the model: the pod is another one after each restart.
fn lasting(topic: &[u8]) -> &[u8] {
    let mut parts = topic.splitn(3, |byte| *byte == b'@');
    match (parts.next(), parts.next(), parts.next()) {
        (Some(b"kv"), Some(_), Some(model)) => model,
        _ => topic,
    }
}

impl Topics {
    pub(super) fn new(prefix: &str) -> Self {
        Self {
            prefix: prefix.as_bytes().to_vec(),
            own: None,
        }
    }

    /// Whether a batch with this topic is another engine's. The first one decides; those without a topic do not tell.
    pub(super) fn is_other(&mut self, topic: &Bytes) -> bool {
        if topic.is_empty() {
            return false;
        }
        if !topic.starts_with(&self.prefix) {
            return true;
        }
        let topic = lasting(topic);
        match &self.own {
            Some(own) => own != topic,
            None => {
                self.own = Some(topic.to_vec());
                false
            }
        }
    }

    /// The engine's topic, where it is known.
    pub(super) fn own(&self) -> Option<Vec<u8>> {
        self.own.clone()
    }

    /// The engine's topic was known before.
    pub(super) fn remember(&mut self, own: Option<Vec<u8>>) {
        self.own = own;
    }

    /// Forgets what was known: it may have been another engine's.
    pub(super) fn forget(&mut self) {
        self.own = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_topic_is_the_engines() {
        let mut topics = Topics::new("");
        let mut is_other = |topic: &'static str| topics.is_other(&Bytes::from_static(topic.as_bytes()));
        let asked = [
            "",
            "kv@10.0.0.1:8000@m",
            "",
            "kv@10.0.0.9:8000@m",
            "kv@10.0.0.1:8000@n",
            "kv@a@m@b",
        ];
        let found: Vec<bool> = asked.into_iter().map(&mut is_other).collect();
        assert_eq!(found, [false, false, false, false, true, true]);
        topics.forget();
        assert!(!topics.is_other(&Bytes::from_static(b"kv-events")));
        assert!(topics.is_other(&Bytes::from_static(b"kv-event")));
    }

    #[test]
    fn a_topic_that_was_not_asked_for_is_another_engines() {
        let mut topics = Topics::new("kv-a");
        assert!(topics.is_other(&Bytes::from_static(b"kv-b")));
        assert!(!topics.is_other(&Bytes::from_static(b"kv-a0")));
    }
}
