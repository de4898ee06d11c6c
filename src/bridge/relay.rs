//! From an engine's payloads to batches of the contract, with what is in doubt.

use std::sync::Arc;
use std::time::Duration;

use kvatlas_client::publish::{HolderPublisher, PublisherError};
use kvatlas_core::wire::{DegradedReason, DegradedReasons, Event, Tier};
use kvatlas_engines::{
    DecodeLimits, Decoder, EngineBatch, EngineEvent, Format, Reason, Translation, Translator,
    TranslatorSettings,
};

use crate::daemon::metrics::{BridgeMetrics, EngineMetrics};

/// Most events that are handed to the publisher at once; it has its own bounds on a batch.
const EVENTS_MAX: usize = 512;
/// About how many bytes of hashes are handed to it at once.
const BYTES_MAX: usize = 256 << 10;

/// Tells daemons what one engine says.
pub(super) struct Relay {
    /// For metrics and logs.
    name: String,
    publisher: HolderPublisher,
    decoder: Decoder,
    batch: EngineBatch,
    translator: Translator,
    translation: Translation,
    /// Whether the engine is out of sight.
    is_lost: bool,
    /// What daemons have been told to doubt.
    told: DegradedReasons,
    metrics: Arc<BridgeMetrics>,
    engine_metrics: EngineMetrics,
}

impl Relay {
    pub(super) fn new(
        format: Format,
        name: &str,
        settings: TranslatorSettings,
        publisher: HolderPublisher,
        metrics: Arc<BridgeMetrics>,
    ) -> Self {
        let engine_metrics = metrics.of_engine(name);
        Self {
            name: name.to_owned(),
            publisher,
            decoder: Decoder::new(format, DecodeLimits::default()),
            batch: EngineBatch::default(),
            translator: Translator::new(settings),
            translation: Translation::default(),
            is_lost: false,
            told: DegradedReasons::default(),
            metrics,
            engine_metrics,
        }
    }

    /// Whether what the engine has is known for certain.
    pub(super) fn is_exact(&self) -> bool {
        self.doubts().is_empty()
    }

    pub(super) fn metrics(&self) -> &EngineMetrics {
        &self.engine_metrics
    }

    pub(super) fn bridge_metrics(&self) -> &Arc<BridgeMetrics> {
        &self.metrics
    }

    /// Applies one payload, and tells daemons.
    pub(super) async fn apply(&mut self, payload: &[u8]) -> Result<(), PublisherError> {
        self.engine_metrics.received(payload.len());
        match self.decoder.decode(payload, &mut self.batch) {
            Ok(()) => self.translator.translate(&self.batch, &mut self.translation),
            Err(error) => {
                self.metrics.undecodable(&self.name, &error);
                self.translator.note_doubt(Reason::Malformed);
            }
        }
        self.tell_translation().await
    }

    /// Applies those events of a batch that was decoded elsewhere for which `is_ours` holds, and tells daemons. What the decoder has left
    /// out of the batch leaves its doubts here.
    pub(super) async fn apply_events(
        &mut self,
        batch: &EngineBatch,
        is_ours: impl Fn(&EngineEvent) -> bool,
    ) -> Result<(), PublisherError> {
        self.translator
            .note_reasons(&batch.reasons, &mut self.translation);
        for event in batch.events().iter().filter(|event| is_ours(event)) {
            self.translator
                .translate_event(batch, event, &mut self.translation);
        }
        self.tell_translation().await
    }

    async fn tell_translation(&mut self) -> Result<(), PublisherError> {
        for (reason, times) in self.translation.reasons.iter() {
            self.metrics.left_out(reason, times, &self.name);
        }
        let clears = |event: &Event| matches!(event, Event::Cleared);
        let has_cleared = self
            .translation
            .parts
            .iter()
            .any(|part| part.events.iter().any(clears));
        let doubts = self.doubts();
        // A new doubt comes before what is doubted.
        if !doubts.is_empty() && doubts != self.told {
            self.tell_doubts(doubts).await?;
        }
        self.publish().await?;
        if has_cleared {
            self.told = DegradedReasons::default();
        }
        self.translation.clear();
        self.tell().await
    }

    /// Publishes the translation, in pieces that the publisher takes.
    async fn publish(&mut self) -> Result<(), PublisherError> {
        for mut part in std::mem::take(&mut self.translation.parts) {
            let mut piece = Vec::new();
            let mut bytes = 0;
            for event in part.events.drain(..) {
                let more = event_bytes(&event);
                if !piece.is_empty() && (piece.len() >= EVENTS_MAX || bytes + more > BYTES_MAX) {
                    self.publisher
                        .publish(part.tier, std::mem::take(&mut piece))
                        .await?;
                    bytes = 0;
                }
                bytes += more;
                piece.push(event);
            }
            if !piece.is_empty() {
                self.publisher.publish(part.tier, piece).await?;
            }
            self.translation.recycle(part.events);
        }
        Ok(())
    }

    fn doubts(&self) -> DegradedReasons {
        let mut doubts = DegradedReasons::default();
        if self.translator.doubt().is_some() {
            doubts = doubts.with(DegradedReason::UpstreamGap);
        }
        if self.is_lost {
            doubts = doubts.with(DegradedReason::UpstreamLost);
        }
        doubts
    }

    /// Tells daemons what is in doubt, where they have been told otherwise.
    async fn tell(&mut self) -> Result<(), PublisherError> {
        let doubts = self.doubts();
        if doubts == self.told {
            return Ok(());
        }
        self.tell_doubts(doubts).await
    }

    async fn tell_doubts(&mut self, doubts: DegradedReasons) -> Result<(), PublisherError> {
        self.told = doubts;
        self.engine_metrics.set_exact(doubts.is_empty());
        self.publisher
            .publish(Tier::DEVICE, vec![Event::Doubted(doubts)])
            .await
    }

    /// Batches of the engine are lost for good.
    pub(super) async fn lose(&mut self) -> Result<(), PublisherError> {
        self.engine_metrics.lost_batches(&self.name);
        // The translator's doubt ends with a clear, as this one has to.
        self.translator.note_doubt(Reason::UnknownParent);
        self.tell().await
    }

    /// Whether the engine is in sight.
    pub(super) fn is_in_sight(&self) -> bool {
        !self.is_lost
    }

    /// The engine is out of sight.
    pub(super) async fn lost(&mut self) -> Result<(), PublisherError> {
        if self.is_lost {
            return Ok(());
        }
        self.is_lost = true;
        self.tell().await?;
        self.publisher.set_heartbeats(false).await
    }

    /// The engine is in sight, for now: heartbeats are sent for `time`, unless this is called again.
    pub(super) async fn seen(&mut self, time: Duration) -> Result<(), PublisherError> {
        self.is_lost = false;
        self.tell().await?;
        self.publisher.heartbeat_for(time).await
    }

    /// The engine is another process: a new epoch begins, and nothing of the old one is left.
    pub(super) async fn restart(&mut self) -> Result<(), PublisherError> {
        self.engine_metrics.restarted(&self.name);
        self.translator.reset();
        self.publisher.begin_epoch().await?;
        self.told = DegradedReasons::default();
        self.tell().await
    }

    /// Waits until all that was told has left for the broker.
    pub(super) async fn flush(&self) -> Result<(), PublisherError> {
        self.publisher.flush().await.map(|_| ())
    }

    /// Daemons forget the holder.
    pub(super) async fn say_goodbye(self) -> Result<(), PublisherError> {
        self.publisher.say_goodbye().await
    }
}

/// About how many bytes an event takes; a translator's events have sequence hashes only.
fn event_bytes(event: &Event) -> usize {
    let blocks = match event {
        Event::Stored(stored) => stored.names.len(),
        Event::Removed(removed) => removed.hashes.len(),
        Event::Cleared | Event::Doubted(_) | Event::Goodbye => 0,
    };
    128 + 8 * blocks
}
