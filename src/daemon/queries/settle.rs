//! Settling: the time from the start of a replica until it takes queries.
//!
//! A daemon that has just begun to follow the events knows its snapshot, or nothing. It asks for the roster of a
//! replica that serves ([`RosterReply`]):
//!
//! - A replica answers: wait until this daemon knows every holder as well as the other replica does, but for
//!   `ready.settle_ms` at most. Meanwhile the other replica's answers are better.
//! - No replica answers: take queries immediately. Any answer is better than none, and an answer says how certain it
//!   is.
//! - A replica takes queries, but has not sent its roster for a few seconds: take queries.

use std::sync::Arc;
use std::time::Duration;

use async_nats::{Client, RequestErrorKind};
use tokio::time::Instant;

use super::roster::{holders_behind, known_holders};
use kvatlas_core::index::Namespaces;
use kvatlas_core::stream::StreamTrust;
use kvatlas_core::wire::{RosterHolder, RosterReply, RosterRequest};

/// Pause between two requests for the other replica's roster (its list of known holders).
const INTERVAL: Duration = Duration::from_millis(100);
/// Time that the other replica may take to send a page of its roster (its list of known holders).
const PAGE_PATIENCE: Duration = Duration::from_secs(1);
/// Maximum number of holders in another replica's roster (its list of known holders). No daemon has so many.
const ROSTER_HOLDERS_MAX: usize = 1 << 20;
/// Maximum size of all pages of a roster (a list of known holders) together, in bytes.
const ROSTER_BYTES_MAX: usize = 128 << 20;
/// Time after which another replica no longer counts as serving if it sends no roster (list of known holders). That
/// replica may have ended without the broker noticing.
const SILENCE_MAX: Duration = Duration::from_secs(5);

/// Parts that a starting replica needs to compare its holders with those of another replica.
pub(super) struct Settling {
    pub(super) client: Client,
    /// Subject on which replicas that answer the same requests ask each other for their rosters.
    pub(super) roster_subject: String,
    pub(super) namespaces: Arc<Namespaces>,
    pub(super) trust: Arc<StreamTrust>,
    /// Maximum time to wait until this replica knows as much as another one (`ready.settle_ms`).
    pub(super) patience: Duration,
}

/// Roster (list of known holders) of another replica, or the reason why there is none.
enum OtherRoster {
    /// No other replica takes queries.
    Absent,
    /// Another replica takes queries, but did not send its roster this time.
    Silent,
    /// Another replica takes queries. The value is its whole roster.
    Knows(Vec<RosterHolder>),
}

impl Settling {
    /// Waits until it is time for this replica to take queries.
    pub(super) async fn settle(self) {
        let deadline = Instant::now() + self.patience;
        let mut silence_end = Instant::now() + SILENCE_MAX;
        loop {
            // The time limit is for all pages together. Without it, a roster whose pages come slowly could take for
            // ever.
            let asked = tokio::time::timeout(SILENCE_MAX, self.ask()).await;
            match asked.unwrap_or(OtherRoster::Silent) {
                OtherRoster::Absent => return tracing::info!("no other replica takes queries"),
                OtherRoster::Silent => {}
                OtherRoster::Knows(theirs) => {
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

    async fn ask(&self) -> OtherRoster {
        let mut known: Vec<RosterHolder> = Vec::new();
        let mut bytes = 0;
        loop {
            let after = known.last().map(|holder| holder.key.clone());
            let payload = RosterRequest { after }.encode();
            let request = async_nats::Request::new()
                .payload(payload.into())
                .timeout(Some(PAGE_PATIENCE));
            let page = match self
                .client
                .send_request(self.roster_subject.clone(), request)
                .await
            {
                Ok(message) => {
                    bytes += message.payload.len();
                    RosterReply::decode(&message.payload)
                }
                Err(error) if error.kind() == RequestErrorKind::NoResponders => return OtherRoster::Absent,
                Err(_) => return OtherRoster::Silent,
            };
            match page {
                // Each page must continue after the previous one, because the pages would otherwise never end.
                Ok(page)
                    if bytes <= ROSTER_BYTES_MAX
                        && known.len() + page.holders.len() <= ROSTER_HOLDERS_MAX
                        && (!page.more || goes_forward(&known, &page.holders)) =>
                {
                    known.extend(page.holders);
                    if !page.more {
                        return OtherRoster::Knows(known);
                    }
                }
                Ok(_) | Err(_) => return OtherRoster::Silent,
            }
        }
    }
}

fn goes_forward(known: &[RosterHolder], page: &[RosterHolder]) -> bool {
    page.last()
        .is_some_and(|last| known.last().is_none_or(|before| last.key > before.key))
}
