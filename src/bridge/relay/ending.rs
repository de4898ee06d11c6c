//! End of the reports about an engine.

use kvatlas_client::publish::PublisherError;

use super::Relay;

impl Relay {
    /// Waits until all messages for daemons have been sent to the NATS server. If the server refuses messages, does not
    /// answer or was away, that is no error here: the bridge's status shows it.
    pub(in super::super) async fn flush(&mut self) -> Result<(), PublisherError> {
        self.tell().await?;
        of_publisher_alone(self.publisher.flush().await.map(|_| ()))
    }

    /// Ends the reports about the engine, and makes daemons forget the holder. If the NATS server refuses the goodbye
    /// or does not answer, that is no error here: the bridge's status shows it. If the server was away, no status shows
    /// that for an engine that is followed no longer, so it is an error.
    pub(in super::super) async fn say_goodbye(mut self) -> Result<(), PublisherError> {
        if let Some(tap) = &self.tap {
            tap.clear();
        }
        self.tell().await?;
        self.note_end();
        match self.publisher.say_goodbye().await {
            Err(error @ PublisherError::Connection(_)) => Err(error),
            sent => of_publisher_alone(sent),
        }
    }

    /// Ends the reports about the engine without a goodbye, and waits until the earlier messages have been sent. If
    /// this bridge reports the engine again, it begins a higher epoch.
    pub(in super::super) async fn fall_silent(mut self) -> Result<(), PublisherError> {
        self.tell().await?;
        self.publisher.set_heartbeats(false).await?;
        self.note_end();
        of_publisher_alone(self.publisher.flush().await.map(|_| ()))
    }

    /// Notes that the present epoch ends. If this bridge reports the engine again, it begins a higher one.
    pub(in super::super) fn note_end(&self) {
        self.farewell.note(self.publisher.cursor().epoch);
    }
}

/// Returns the result of the publisher. An error that only says that the NATS server has refused a message, has not answered,
/// or was away meanwhile, becomes `Ok`.
fn of_publisher_alone(sent: Result<(), PublisherError>) -> Result<(), PublisherError> {
    match sent {
        Err(
            PublisherError::Refused { .. }
            | PublisherError::Unanswered { .. }
            | PublisherError::Connection(_),
        ) => Ok(()),
        sent => sent,
    }
}
