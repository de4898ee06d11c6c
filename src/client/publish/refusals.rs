//! Refusals by the NATS server that concern a publisher.
//!
//! If a client publishes or subscribes without the right to do so, NATS reports an error on the connection. The client library
//! hands the error to the connection's event callback, and nowhere else. [`Refusals`] receives it there, and each publisher
//! watches for refusals on its own subjects.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use async_nats::{Client, ConnectError, ConnectOptions, Event, ToServerAddrs};
use futures_util::StreamExt;
use parking_lot::Mutex;
use tokio::sync::watch;

use super::error::PublisherError;
use crate::reconnect_pause;
use crate::refusal::{Refusal, Refused};

/// Longest wait in `Watches::look` for the messages that it sends to itself through the server.
const LOOK_PATIENCE: Duration = Duration::from_secs(4);

/// Number of messages that `Watches::look` sends to itself through the server, after the published messages. The client
/// library delivers errors by another path than messages, so an error may come later than the first of these messages.
/// The second message gives the error time to arrive.
const ECHOES: usize = 2;

/// A connection to publish on, which reports the server's refusals. Clones share the connection.
#[derive(Debug, Clone)]
pub struct PublishConnection {
    pub(super) nats: Client,
    pub(super) refusals: Option<Refusals>,
}

impl PublishConnection {
    /// Connects. Replaces the event callback that `options` may have, and the pauses between attempts to connect again:
    /// [`reconnect_pause`] returns them. A caller with an event callback of its own uses [`Self::new`] instead, passes all
    /// events to [`Refusals::hear`], and sets [`reconnect_pause`] as
    /// [`reconnect_delay_callback`](ConnectOptions::reconnect_delay_callback).
    ///
    /// # Errors
    ///
    /// The errors of [`ConnectOptions::connect`].
    pub async fn connect(options: ConnectOptions, servers: impl ToServerAddrs) -> Result<Self, ConnectError> {
        let refusals = Refusals::default();
        let hearing = refusals.clone();
        let options = options
            .event_callback(move |event| {
                hearing.hear(&event);
                std::future::ready(())
            })
            .reconnect_delay_callback(reconnect_pause);
        let nats = options.connect(servers).await?;
        Ok(Self::new(nats, refusals))
    }

    /// Makes a connection from `nats`, whose event callback hands all events to `refusals`.
    pub fn new(nats: Client, refusals: Refusals) -> Self {
        let refusals = Some(refusals);
        Self { nats, refusals }
    }

    /// Returns the NATS client of the connection. Errors of this client's methods do not show refusals by the server.
    pub fn nats(&self) -> &Client {
        &self.nats
    }
}

/// Makes a connection that does not report refusals.
impl From<Client> for PublishConnection {
    fn from(nats: Client) -> Self {
        Self { nats, refusals: None }
    }
}

/// Record of the server's refusals on one connection. It has only refusals for which a publisher watches. Clones share the
/// record.
#[derive(Debug, Clone, Default)]
pub struct Refusals(Arc<Mutex<HashMap<Refused, RefusalWatch>>>);

/// A subject or a subscription that publishers watch for refusals: the number of these publishers, and the channel that
/// tells them how often it was refused.
#[derive(Debug)]
struct RefusalWatch {
    watchers: usize,
    told: watch::Sender<RefusalTally>,
}

/// Number of refusals of one watched subject or subscription, and the text of the server's last error about it.
#[derive(Debug, Clone, Default)]
struct RefusalTally {
    times: u64,
    words: String,
}

impl Refusals {
    /// Records the refusal that an event of the connection reports. Ignores all other events.
    pub fn hear(&self, event: &Event) {
        if let Event::ServerError(error) = event
            && let Some(refusal) = Refusal::parse(&error.to_string())
        {
            self.note(&refusal);
        }
    }

    /// Records a refusal if a publisher watches for it. Returns whether it was recorded.
    pub fn note(&self, refusal: &Refusal) -> bool {
        let watched = self.0.lock();
        let mut is_watched = false;
        let any_subscription = refusal.refused == Refused::Subscription(None);
        let concerned = watched.iter().filter(|(refused, _)| {
            **refused == refusal.refused || any_subscription && matches!(refused, Refused::Subscription(_))
        });
        for (refused, watched) in concerned {
            is_watched = true;
            watched.told.send_modify(|told| {
                told.times += 1;
                told.words.clone_from(&refusal.words);
                // A publisher goes on publishing; its log must not fill up.
                if told.times.is_power_of_two() {
                    let times = told.times;
                    tracing::warn!(
                        ?refused,
                        times,
                        words = told.words,
                        "the NATS server refuses this publisher"
                    );
                }
            });
        }
        is_watched
    }

    /// Waits until the server refuses a message on `subject`, and returns the text of its error. Earlier refusals do not count.
    pub async fn of_message(&self, subject: &str) -> String {
        let mut watch = self.watch_one(Refused::Message(subject.to_owned()));
        match watch.told.changed().await {
            Ok(()) => watch.told.borrow().words.clone(),
            // The channel cannot close, because this watch keeps its sender alive.
            Err(_) => std::future::pending().await,
        }
    }

    /// Watches for refusals of messages on `events` and of a subscription to `questions`.
    pub(super) fn watch(&self, events: &str, questions: Option<&str>) -> Watches {
        let subscription = |subject: &str| Refused::Subscription(Some(subject.to_owned()));
        Watches {
            refusals: self.clone(),
            messages: self.watch_one(Refused::Message(events.to_owned())),
            questions: questions.map(|subject| self.watch_one(subscription(subject))),
            asked_again: Mutex::new((0, Instant::now())),
        }
    }

    fn watch_one(&self, refused: Refused) -> Watch {
        let mut watched = self.0.lock();
        let entry = watched.entry(refused.clone()).or_insert_with(|| RefusalWatch {
            watchers: 0,
            told: watch::Sender::default(),
        });
        entry.watchers += 1;
        Watch {
            refusals: self.clone(),
            told: entry.told.subscribe(),
            reported: AtomicU64::new(entry.told.borrow().times),
            refused,
        }
    }
}

/// One publisher's watch for refusals of its messages on one subject, or of one subscription.
#[derive(Debug)]
struct Watch {
    refusals: Refusals,
    refused: Refused,
    told: watch::Receiver<RefusalTally>,
    /// Number of refusals that [`Self::report`] has reported so far.
    reported: AtomicU64,
}

impl Watch {
    fn times(&self) -> u64 {
        self.told.borrow().times
    }

    /// Returns the text of the server's error if there was a refusal since the last call; `None` otherwise.
    fn report(&self) -> Option<String> {
        let told = self.told.borrow();
        let reported = self.reported.swap(told.times, Ordering::AcqRel);
        (told.times > reported).then(|| told.words.clone())
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut watched = self.refusals.0.lock();
        if let Some(entry) = watched.get_mut(&self.refused) {
            entry.watchers -= 1;
            if entry.watchers == 0 {
                watched.remove(&self.refused);
            }
        }
    }
}

/// One publisher's watches for refusals of its messages, and of its subscription to daemons' questions.
#[derive(Debug)]
pub(super) struct Watches {
    refusals: Refusals,
    messages: Watch,
    questions: Option<Watch>,
    /// Number of refusals of the subscription to daemons' questions when it was last retried, and the time of that
    /// retry.
    asked_again: Mutex<(u64, Instant)>,
}

impl Watches {
    /// Returns the number of this publisher's messages that the server has refused.
    pub(super) fn messages(&self) -> u64 {
        self.messages.times()
    }

    /// Waits until the server has processed everything that was published before this call. `is_asked` is `false` after
    /// a goodbye: daemons then ask this publisher no questions, so a refused subscription to questions is no error.
    ///
    /// # Errors
    ///
    /// - [`PublisherError::Refused`] if the server has refused a message or the subscription since the last call;
    /// - [`PublisherError::Unanswered`] if the server does not answer within [`LOOK_PATIENCE`].
    pub(super) async fn look(&self, nats: &Client, is_asked: bool) -> Result<(), PublisherError> {
        let echoes = async {
            for _ in 0..ECHOES {
                self.echo(nats).await;
            }
        };
        let echoed = tokio::time::timeout(LOOK_PATIENCE, echoes).await;
        let questions = self
            .questions
            .as_ref()
            .and_then(Watch::report)
            .filter(|_| is_asked);
        match self.messages.report().or(questions) {
            Some(words) => Err(PublisherError::Refused { words }),
            None => echoed.map_err(|_| PublisherError::Unanswered {
                waited: LOOK_PATIENCE,
            }),
        }
    }

    /// Sends a message to this client through the server, and waits until the server delivers or refuses it. The server
    /// reports earlier refusals before that.
    async fn echo(&self, nats: &Client) -> Option<()> {
        let inbox = nats.new_inbox();
        let listening = Refused::Subscription(Some(inbox.clone()));
        let watches =
            [Refused::Message(inbox.clone()), listening].map(|refused| self.refusals.watch_one(refused));
        let [mut message, mut subscription] = watches.each_ref().map(|watch| watch.told.clone());
        let mut echo = nats.subscribe(inbox.clone()).await.ok()?;
        nats.publish(inbox, bytes::Bytes::new()).await.ok()?;
        nats.flush().await.ok()?;
        tokio::select! {
            _ = echo.next() => {}
            _ = message.wait_for(|told| told.times > 0) => {}
            _ = subscription.wait_for(|told| told.times > 0) => {}
        }
        Some(())
    }

    /// Returns the subject of daemons' questions if it is time to subscribe to it again. That is the case if the server
    /// has refused the subscription since the last retry, and if this retry was at least `pause` ago.
    pub(super) fn refused_questions(&self, pause: Duration) -> Option<String> {
        let watch = self.questions.as_ref()?;
        let times = watch.times();
        let mut asked_again = self.asked_again.lock();
        if times <= asked_again.0 || asked_again.1.elapsed() < pause {
            return None;
        }
        *asked_again = (times, Instant::now());
        match &watch.refused {
            Refused::Subscription(subject) => subject.clone(),
            Refused::Message(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(words: &str) -> Refusal {
        Refusal::parse(words).unwrap()
    }

    #[test]
    fn a_publisher_hears_of_its_own_subjects_alone() {
        let refusals = Refusals::default();
        let [ours, others] = ["a.gpu-0", "a.gpu-1"].map(|events| refusals.watch(events, Some("q.0")));
        refusals.note(&refusal(r#"Permissions Violation for Publish to "a.gpu-0""#));
        assert_eq!((ours.messages(), others.messages()), (1, 0));
        assert!(ours.messages.report().is_some());
        assert_eq!(ours.messages.report(), None, "it has been reported");
        refusals.note(&refusal(r#"Permissions Violation for Subscription to "q.0""#));
        assert_eq!(ours.refused_questions(Duration::ZERO).as_deref(), Some("q.0"));
        assert_eq!(ours.refused_questions(Duration::ZERO), None, "asked for again");
        refusals.note(&refusal("maximum subscriptions exceeded"));
        assert_eq!(
            others.refused_questions(Duration::from_secs(3600)),
            None,
            "too soon"
        );
        assert_eq!(others.refused_questions(Duration::ZERO).as_deref(), Some("q.0"));
    }

    #[test]
    fn what_nobody_watches_for_is_not_remembered() {
        let refusals = Refusals::default();
        let first = refusals.watch("a", None);
        let second = refusals.watch("a", None);
        assert!(!refusals.note(&refusal(r#"Permissions Violation for Publish to "b""#)));
        assert_eq!(refusals.0.lock().len(), 1);
        drop(first);
        assert!(refusals.note(&refusal(r#"Permissions Violation for Publish to "a""#)));
        assert_eq!(second.messages(), 1);
        drop(second);
        assert!(refusals.0.lock().is_empty());
    }
}
