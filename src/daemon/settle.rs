//! When a starting replica takes queries.
//!
//! A daemon that has just followed the events knows what its snapshot knew, or nothing. While another replica answers, nobody gains
//! by its answers: it waits until it knows every holder as well as that one does, exactly where that one does, and at most
//! `ready.settle_ms`. Where nobody answers, any answer is better than none, and it says itself how certain it is: so it begins at
//! once; the same where somebody seems to be there but says nothing for a few seconds. Whether somebody answers, and what it knows,
//! its roster tells (see [`RosterReply`]).

use std::sync::Arc;
use std::time::Duration;

use async_nats::{Client, RequestErrorKind};
use tokio::time::Instant;

use crate::index::Namespaces;
use crate::query_service::{holders_behind, known_holders};
use crate::tracking::StreamTrust;
use crate::wire::{RosterHolder, RosterReply, RosterRequest};

/// Pause between two looks at the other's roster.
const INTERVAL: Duration = Duration::from_millis(100);
/// How long the other may take for a page.
const PAGE_PATIENCE: Duration = Duration::from_secs(1);
/// After so long without a word it does not count as serving: it may be gone without the broker having noticed.
const SILENCE_MAX: Duration = Duration::from_secs(5);

/// What a starting replica compares.
pub(super) struct Settling {
    pub(super) client: Client,
    /// Where those that answer the same requests tell what they know.
    pub(super) roster_subject: String,
    pub(super) namespaces: Arc<Namespaces>,
    pub(super) trust: Arc<StreamTrust>,
    /// How long to try, at most.
    pub(super) patience: Duration,
}

/// What another replica says.
enum Other {
    /// Nobody takes queries.
    Absent,
    /// Somebody does, but does not say what it knows, for now.
    Silent,
    /// This is what it knows.
    Knows(Vec<RosterHolder>),
}

impl Settling {
    /// Returns when it is time to take queries.
    pub(super) async fn settle(self) {
        let deadline = Instant::now() + self.patience;
        let mut silence_end = Instant::now() + SILENCE_MAX;
        loop {
            match self.ask().await {
                Other::Absent => return tracing::info!("no other replica takes queries"),
                Other::Silent => {}
                Other::Knows(theirs) => {
                    silence_end = Instant::now() + SILENCE_MAX;
                    let ours = known_holders(&self.namespaces, &self.trust, None);
                    let behind = holders_behind(&theirs, &ours);
                    if behind == 0 {
                        return tracing::info!(
                            holders = theirs.len(),
                            "knows as much as a replica that serves"
                        );
                    }
                    if Instant::now() >= deadline {
                        return tracing::warn!(
                            behind, holders = theirs.len(), patience = ?self.patience,
                            "takes queries although it knows less than a replica that serves (ready.settle_ms)"
                        );
                    }
                }
            }
            if Instant::now() >= deadline.min(silence_end) {
                return tracing::warn!(
                    "takes queries although a replica that serves did not say what it knows"
                );
            }
            tokio::time::sleep(INTERVAL).await;
        }
    }

    async fn ask(&self) -> Other {
        let mut known: Vec<RosterHolder> = Vec::new();
        loop {
            let after = known.last().map(|holder| holder.key.clone());
            let Ok(payload) = (RosterRequest { after }).encode() else {
                return Other::Silent;
            };
            let request = async_nats::Request::new()
                .payload(payload.into())
                .timeout(Some(PAGE_PATIENCE));
            let page = match self
                .client
                .send_request(self.roster_subject.clone(), request)
                .await
            {
                Ok(message) => RosterReply::decode(&message.payload),
                Err(error) if error.kind() == RequestErrorKind::NoResponders => return Other::Absent,
                Err(_) => return Other::Silent,
            };
            match page {
                // Pages go forward, or they would never end.
                Ok(page) if !page.more || goes_forward(&known, &page.holders) => {
                    known.extend(page.holders);
                    if !page.more {
                        return Other::Knows(known);
                    }
                }
                Ok(_) | Err(_) => return Other::Silent,
            }
        }
    }
}

fn goes_forward(known: &[RosterHolder], page: &[RosterHolder]) -> bool {
    page.last()
        .is_some_and(|last| known.last().is_none_or(|before| last.key > before.key))
}
