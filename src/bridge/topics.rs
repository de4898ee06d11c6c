//! Topic under which one engine publishes. A batch with another topic comes from another engine.

use bytes::Bytes;

/// Topic of one engine, taken from the engine's first batch.
#[derive(Debug)]
pub(super) struct Topics {
    /// Configured beginning of the topic.
    prefix: Vec<u8>,
    /// Part of the first batch's topic that stays the same after a restart; `None` if no batch had a topic so far.
    own: Option<Vec<u8>>,
    /// Whether a batch with the engine's topic was published on the engine's own connection. A batch from the replay
    /// socket does not count, because the socket may belong to another engine.
    is_published: bool,
    /// Whether the last published batch with a topic came from another engine.
    hears_other: bool,
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
            is_published: false,
            hears_other: false,
        }
    }

    /// Whether a batch with this topic comes from another engine. The first batch with a topic decides the engine's
    /// topic. A batch without a topic is never taken for another engine's batch. `by_replay` says that the batch came
    /// from the replay socket.
    pub(super) fn is_other(&mut self, topic: &Bytes, by_replay: bool) -> bool {
        if topic.is_empty() {
            return false;
        }
        let is_other = !topic.starts_with(&self.prefix) || {
            let topic = lasting(topic);
            self.own.get_or_insert_with(|| topic.to_vec()) != topic
        };
        if !by_replay {
            self.is_published |= !is_other;
            self.hears_other = is_other;
        }
        is_other
    }

    /// Whether the last published batch with a topic came from another engine. In that case the bridge does not trust
    /// the replay socket either. The socket may belong to the other engine, too, and its batches may have no topic that
    /// shows this.
    pub(super) fn hears_other(&self) -> bool {
        self.hears_other
    }

    /// Forgets the topic if only the replay socket has told it, because the socket may belong to another engine.
    pub(super) fn forget_replayed(&mut self) {
        if !self.is_published {
            self.own = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_topic_is_the_engines() {
        let mut topics = Topics::new("");
        let mut is_other = |topic: &'static str| topics.is_other(&Bytes::from_static(topic.as_bytes()), true);
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
        topics.forget_replayed();
        assert!(!topics.is_other(&Bytes::from_static(b"kv-events"), false));
        assert!(topics.is_other(&Bytes::from_static(b"kv-event"), false));
        // The topic `kv-events` came on the engine's own connection, so it stays.
        topics.forget_replayed();
        assert!(topics.is_other(&Bytes::from_static(b"kv-event"), true));
    }

    #[test]
    fn a_topic_that_was_not_asked_for_is_another_engines() {
        let mut topics = Topics::new("kv-a");
        assert!(topics.is_other(&Bytes::from_static(b"kv-b"), false));
        assert!(!topics.is_other(&Bytes::from_static(b"kv-a0"), false));
    }
}
