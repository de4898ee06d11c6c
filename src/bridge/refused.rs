//! Refusals by the NATS server of messages that a bridge publishes, and of subscriptions that it makes.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use kvatlas_client::Refusal;
use kvatlas_client::publish::Refusals;
use kvatlas_core::wire::Subjects;

/// Time for which a refusal counts. Publishers repeat a refused message or subscription with each heartbeat. If the
/// server does not refuse it again within this time, the bridge has got the right.
const REFUSED_FOR: Duration = Duration::from_secs(10);

/// Maximum number of refused subjects that are remembered.
const SUBJECTS_MAX: usize = 1024;

/// Key under which a refusal that concerns all subscriptions is remembered. No subject is empty.
const ALL_SUBSCRIPTIONS: &str = "";

/// Subjects that the server has refused lately.
#[derive(Debug, Default)]
pub(super) struct RefusedSubjects {
    /// The text of the server's error and the time of the last refusal, by subject.
    last: Mutex<BTreeMap<String, (String, Instant)>>,
    /// Refusals as the publishers read them. A publisher repeats a subscription that was refused.
    pub(super) heard: Refusals,
}

impl RefusedSubjects {
    /// Records a refusal at the time `now`. Returns `false` if the bridge does not need the refused subject for its
    /// reports about engines. Questions that were refused do not count: `kvatlas up` asks on the bridge's connection.
    /// Answers do not count either, because the client that asked has chosen their subjects.
    pub(super) fn note(&self, subjects: &Subjects, refusal: &Refusal, now: Instant) -> bool {
        self.heard.note(refusal);
        let subject = refusal.refused.subject().unwrap_or(ALL_SUBSCRIPTIONS);
        if !subjects.is_of_publishers(subject) && subject != ALL_SUBSCRIPTIONS {
            return false;
        }
        let mut refused = self.last.lock();
        refused.retain(|_, (_, at)| now.duration_since(*at) < REFUSED_FOR);
        if refused.len() < SUBJECTS_MAX || refused.contains_key(subject) {
            refused.insert(subject.to_owned(), (refusal.words.clone(), now));
        }
        true
    }

    /// Returns the server's error texts for the refusals that still count at the time `now`.
    pub(super) fn words(&self, now: Instant) -> Vec<String> {
        self.find(now, |_| true)
    }

    /// Returns the server's error text for the first refused subject for which `is_meant` holds; `None` if no such
    /// subject was refused.
    pub(super) fn about(&self, now: Instant, is_meant: impl Fn(&str) -> bool) -> Option<String> {
        self.find(now, is_meant).into_iter().next()
    }

    /// Whether the server has refused events lately, as far as is known at the time `now`.
    pub(super) fn has_events(&self, subjects: &Subjects, now: Instant) -> bool {
        self.about(now, |subject| subjects.is_of_events(subject))
            .is_some()
    }

    fn find(&self, now: Instant, is_meant: impl Fn(&str) -> bool) -> Vec<String> {
        let refused = self.last.lock();
        let meant = refused
            .iter()
            .filter(|(subject, (_, at))| is_meant(subject) && now.duration_since(*at) < REFUSED_FOR);
        meant.map(|(_, (words, _))| words.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(words: &str) -> Refusal {
        Refusal::parse(words).unwrap()
    }

    #[test]
    fn a_refusal_of_what_reports_need_counts_until_it_is_not_repeated() {
        let (refused, subjects) = (RefusedSubjects::default(), Subjects::new("kvatlas").unwrap());
        let start = Instant::now();
        let events = refusal(r#"Permissions Violation for Publish to "kvatlas.v1.events.m.gpu-9""#);
        assert!(refused.note(&subjects, &events, start));
        assert_eq!(refused.words(start).first(), Some(&events.words));
        let of = |subject: &'static str| move |refused: &str| refused == subject;
        assert_eq!(
            refused.about(start, of("kvatlas.v1.events.m.gpu-9")),
            Some(events.words.clone())
        );
        assert_eq!(refused.about(start, of("kvatlas.v1.events.m.gpu-0")), None);
        assert!(refused.note(&subjects, &events, start + REFUSED_FOR));
        assert_eq!(refused.words(start + REFUSED_FOR).len(), 1, "repeated");
        assert!(refused.words(start + 2 * REFUSED_FOR).is_empty());
        let later = start + 2 * REFUSED_FOR;
        let questions = refusal(r#"Permissions Violation for Subscription to "kvatlas.v1.resync.m.gpu-9.0""#);
        assert!(refused.note(&subjects, &questions, later));
        assert!(!refused.has_events(&subjects, later));
        assert!(refused.note(&subjects, &events, later) && refused.has_events(&subjects, later));
        assert!(refused.note(&subjects, &refusal("maximum subscriptions exceeded"), start));
    }

    #[test]
    fn refused_questions_answers_services_and_commands_do_not_count() {
        let (refused, subjects) = (RefusedSubjects::default(), Subjects::new("kvatlas").unwrap());
        for words in [
            r#"Permissions Violation for Publish to "_INBOX.else.1""#,
            r#"Permissions Violation for Publish to "kvatlas.v1.status.m""#,
            r#"Permissions Violation for Publish to "kvatlas.v1.query.m""#,
            r#"Permissions Violation for Publish to "$JS.API.INFO""#,
            r#"Permissions Violation for Subscription to "$SRV.PING""#,
            r#"Permissions Violation for Subscription to "kvatlas.v1.admin.reset""#,
        ] {
            assert!(
                !refused.note(&subjects, &refusal(words), Instant::now()),
                "{words}"
            );
        }
        assert!(refused.words(Instant::now()).is_empty());
    }
}
