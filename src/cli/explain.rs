//! `kvatlas explain`: what a word of answers, alerts, metrics or settings means, and what to do.

use clap::Args;
use kvatlas_config::meant;

use super::failure::Failure;
use super::output::print;
use kvatlas_daemon::runbook::{AdviceTable, Entry, entries, mend_of, words};

pub(super) const EXAMPLES: &str = "\
Examples:
  kvatlas explain stale
  kvatlas explain KvatlasHoldersDegraded
  kvatlas explain events.lanes
  kvatlas explain                    the words that are explained";

/// Word to explain.
#[derive(Debug, Args)]
pub(crate) struct ExplainArguments {
    /// A reason, an alert, a latch, a metric, a setting or a word of a reply; without one, all words are listed.
    #[arg(value_name = "WORD", allow_hyphen_values = true)]
    word: Option<String>,
}

/// Prints the meaning of a word and the advice for it, with the texts of the page for operators. Without a word, lists
/// all words.
pub(crate) fn explain(arguments: &ExplainArguments) -> Result<(), Failure> {
    let Some(word) = &arguments.word else {
        return print(&format!("{}\n", words().join("\n")));
    };
    let found = entries(word);
    if found.is_empty() {
        return Err(Failure::usage(unknown(word)));
    }
    let texts: Vec<String> = found.iter().map(|entry| text_of(word, entry)).collect();
    print(&texts.join("\n"))
}

/// Returns the advice on the trouble that an alert reports, and the command that says more about the alert.
pub(super) fn mend_of_alert(alert: &str) -> String {
    let mend = mend_of([alert].into_iter(), AdviceTable::OtherTroubles);
    format!("{mend}; kvatlas explain {alert} says more")
}

/// Returns an entry of the page for operators as text: a heading, then one line for each statement.
fn text_of(word: &str, entry: &Entry) -> String {
    let mut text = format!("{word} ({})\n", entry.section);
    for (title, said) in &entry.said {
        match title.is_empty() {
            true => text += &format!("  {said}\n"),
            false => text += &format!("  {title}: {said}\n"),
        }
    }
    text
}

fn unknown(word: &str) -> String {
    match meant(word, words().into_iter()) {
        Some(known) => format!("nothing explains {word:?}: did you mean {known}?"),
        None => format!("nothing explains {word:?}: kvatlas explain lists all words"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_with_a_mistake_is_guessed() {
        assert!(unknown("stalle").ends_with("did you mean stale?"));
        assert!(unknown("xyzzy").ends_with("lists all words"));
    }

    #[test]
    fn an_entry_is_a_heading_and_what_is_said() {
        let text = text_of("stale", &entries("stale")[0]);
        assert!(
            text.starts_with("stale (Degraded holders)\n  what happened: "),
            "{text}"
        );
        assert!(text.contains("\n  what to do: "), "{text}");
    }
}
