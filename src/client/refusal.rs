//! A refusal by a NATS server: of a subscription, or of a message.
//!
//! The server reports a refusal in an error on the connection. The error comes when the client subscribes or publishes.
//! It also comes later, if the server reloads its configuration and the client has lost the right. The client library
//! only passes on the error's text, so that text is all that shows the refusal.

use std::fmt;

/// The subscription or the message that the server refused.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Refused {
    /// A subscription to this subject. `None` means any subscription: the client has as many as the server allows.
    Subscription(Option<String>),
    /// A message on this subject.
    Message(String),
}

impl Refused {
    /// Returns the subject that was refused; `None` for a subscription above the client's bound.
    pub fn subject(&self) -> Option<&str> {
        match self {
            Self::Subscription(subject) => subject.as_deref(),
            Self::Message(subject) => Some(subject),
        }
    }
}

/// A refusal, with the text of the server's error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The subscription or the message that was refused.
    pub refused: Refused,
    /// Text of the server's error.
    pub words: String,
}

impl Refusal {
    /// Reads the refusal in the server's error text `words`; `None` if the text reports no refusal.
    pub fn parse(words: &str) -> Option<Self> {
        // Versions of the server differ in upper and lower case.
        let lower = words.to_ascii_lowercase();
        let refused = if lower.contains("permissions violation for subscription to") {
            Refused::Subscription(quoted(words))
        } else if lower.contains("permissions violation for publish to") {
            Refused::Message(quoted(words)?)
        } else if lower.contains("maximum subscriptions exceeded") {
            Refused::Subscription(None)
        } else {
            return None;
        };
        Some(Self {
            refused,
            words: words.to_owned(),
        })
    }

    /// Whether the refusal is, or may be, about a subscription to one of `subjects`.
    pub fn is_subscription_to(&self, subjects: &[String]) -> bool {
        match &self.refused {
            Refused::Subscription(Some(subject)) => subjects.contains(subject),
            Refused::Subscription(None) => true,
            Refused::Message(_) => false,
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.words)
    }
}

/// Returns the first text in quotation marks; `None` if there is none.
fn quoted(words: &str) -> Option<String> {
    words.split('"').nth(1).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_refused_is_read_from_the_servers_words() {
        let refused = |words: &str| Refusal::parse(words).map(|refusal| refusal.refused);
        let subscription = |subject: &str| Some(Refused::Subscription(Some(subject.to_owned())));
        assert_eq!(
            refused(r#"nats: Permissions Violation for Subscription to "a.v1.events.>""#),
            subscription("a.v1.events.>")
        );
        assert_eq!(
            refused(r#"nats: Permissions Violation for Subscription to "a.>" using queue "q""#),
            subscription("a.>")
        );
        assert_eq!(
            refused(r#"nats: permissions violation for subscription to "a.>" (sid "7")"#),
            subscription("a.>")
        );
        assert_eq!(
            refused(r#"nats: Permissions Violation for Publish to "$JS.API.INFO""#),
            Some(Refused::Message("$JS.API.INFO".to_owned()))
        );
        assert_eq!(
            refused("nats: maximum subscriptions exceeded"),
            Some(Refused::Subscription(None))
        );
        assert_eq!(refused("nats: maximum payload violation"), None);
    }

    #[test]
    fn a_refusal_concerns_the_subjects_that_it_names() {
        let refusal = Refusal::parse(r#"Permissions Violation for Subscription to "a.>""#).unwrap();
        assert!(refusal.is_subscription_to(&["b".to_owned(), "a.>".to_owned()]));
        assert!(!refusal.is_subscription_to(&["b".to_owned()]));
        let any = Refusal::parse("maximum subscriptions exceeded").unwrap();
        assert!(any.is_subscription_to(&["b".to_owned()]));
    }
}
