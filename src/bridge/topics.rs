//! Topic under which one engine publishes. A batch with another topic comes from another engine.

use bytes::Bytes;

/// Topic of one engine, taken from the engine's first batch.
#[derive(Debug)]
pub(super) struct Topics {
    /// Configured beginning of the topic.
    prefix: Vec<u8>,
    /// Lasting part of the first batch's topic; `None` before that batch, or if batches have no topic.
    own: Option<Vec<u8>>,
}

/// Returns the part of a topic that has to stay the same. For `kv@POD@MODEL` the part is the model, as the pod changes with
/// each restart.
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

    /// Whether a batch with this topic is another engine's. The first batch with a topic decides the engine's topic. A batch
    /// without a topic tells nothing.
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

    /// Returns the lasting part of the engine's topic; `None` if it is not known.
    pub(super) fn own(&self) -> Option<Vec<u8>> {
        self.own.clone()
    }

    /// Sets the engine's topic to one that was known before.
    pub(super) fn remember(&mut self, own: Option<Vec<u8>>) {
        self.own = own;
    }

    /// Forgets the engine's topic, which may have been another engine's.
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
