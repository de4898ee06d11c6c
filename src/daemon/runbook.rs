//! The runbook: explanations of words (names of reasons, metrics, settings and fields of replies) from the pages for operators.
//! It reads the pages' Markdown, so that each sentence is written in one place only.

use kvatlas_core::wire::{DegradedReason, DegradedReasons};

/// Pages for operators, in which words are looked up. The page with advice comes first.
const PAGES: [&str; 4] = [
    include_str!("runbook/operating.md"),
    include_str!("runbook/metrics.md"),
    include_str!("runbook/settings.md"),
    include_str!("runbook/wire-contract.md"),
];

/// Explanation of a word: a table row or a section of one of the pages for operators.
#[derive(Debug, PartialEq, Eq)]
pub struct Entry {
    /// Heading of the section that has the explanation.
    pub section: String,
    /// Sentences about the word, each with the title of the table column that has them. If the explanation is a section
    /// of text, there is a single pair with an empty title.
    pub said: Vec<(String, String)>,
}

/// Returns all entries of the pages about `word`: the table rows that begin with the word, and the sections with the word as
/// heading.
pub fn entries(word: &str) -> Vec<Entry> {
    PAGES.iter().flat_map(|page| entries_of(page, word)).collect()
}

/// Table of the page for operators that has advice. One word may stand in several tables, with different advice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdviceTable {
    /// Preconditions of readiness (latches).
    Latches,
    /// Reasons for which a holder is not exact.
    DegradedReasons,
    /// Words in which bridges say why they doubt an engine.
    BridgeWords,
    /// Reasons for which batches are dropped.
    DropReasons,
    /// Troubles that concern no holder and no batch, each by the name of its alert.
    OtherTroubles,
}

impl AdviceTable {
    /// Returns the heading of the table's section, and the title of the column with the advice.
    fn place(self) -> (&'static str, &'static str) {
        match self {
            Self::Latches => ("Readiness", "if it stays unset"),
            Self::DegradedReasons => ("Degraded holders", "what to do"),
            Self::BridgeWords => ("What bridges say", "what to do"),
            Self::DropReasons => ("Dropped batches", "what to do"),
            Self::OtherTroubles => ("Other troubles", "what to do"),
        }
    }

    /// Returns the advice about `word` in this table.
    pub fn advice(self, word: &str) -> Option<String> {
        let (section, title) = self.place();
        let entries = entries_of(PAGES[0], word).into_iter();
        let mut said = entries
            .filter(|entry| entry.section == section)
            .flat_map(|entry| entry.said);
        said.find(|(column, _)| column == title).map(|(_, text)| text)
    }
}

/// Returns the advice about `words` in a table. If the table has no advice about a word, the advice is the command that
/// explains the word. Repeated advice is given once.
pub fn mend_of<'a>(words: impl Iterator<Item = &'a str>, table: AdviceTable) -> String {
    joined(words.map(|word| {
        let advice = table.advice(word);
        advice.unwrap_or_else(|| format!("kvatlas explain {word}"))
    }))
}

/// Returns pieces of advice as one. Repeated advice is given once.
pub fn joined(advice: impl Iterator<Item = String>) -> String {
    let mut mends: Vec<String> = Vec::new();
    for mend in advice {
        if !mends.contains(&mend) {
            mends.push(mend);
        }
    }
    mends.join("; ")
}

/// Returns the advice on one of the reasons for which a holder is in doubt. The commands in the advice are about the
/// `culprit`, as [`named`] has it. `detail` has the words of the bridge that follows the holder's engine, if it says
/// any: they tell more than the reason does.
///
/// Returns `None` for most reasons of a holder whose engine is out of sight: first see to the engine. Also for
/// `unverified` beside `stale`.
pub fn mend_of_doubt(
    reason: DegradedReason,
    all: DegradedReasons,
    detail: Option<&str>,
    culprit: [&str; 3],
) -> Option<String> {
    let is_of_bridge = matches!(
        reason,
        DegradedReason::UpstreamGap | DegradedReason::UnknownGroups
    );
    let is_silence = matches!(reason, DegradedReason::Stale | DegradedReason::Unverified);
    if (is_of_bridge || is_silence) && all.contains(DegradedReason::UpstreamLost) {
        return None;
    }
    // Whoever is silent proves nothing: the end of the silence ends both.
    if reason == DegradedReason::Unverified && all.contains(DegradedReason::Stale) {
        return None;
    }
    // Where it is asked and there are other reasons, it may go on for long.
    if reason == DegradedReason::Resyncing && all != DegradedReasons::of(reason) {
        return None;
    }
    let is_refused =
        |detail: &str| reason == DegradedReason::UpstreamLost && detail.starts_with(NOT_FOLLOWED);
    let detail = detail.filter(|detail| is_of_bridge || is_refused(detail));
    let word = detail.and_then(|detail| detail.split(':').next());
    let told = word.and_then(|word| AdviceTable::BridgeWords.advice(word));
    let general = || mend_of([reason.as_str()].into_iter(), AdviceTable::DegradedReasons);
    Some(named(&told.unwrap_or_else(general), culprit))
}

/// Words with which bridges begin to say why they refuse an engine.
const NOT_FOLLOWED: &str = "it is not followed";
/// Placeholder in the commands on the pages for operators. It stands for a holder's namespace, worker and rank.
const CULPRIT: &str = "NAMESPACE WORKER RANK";
/// Command on the pages for operators with a placeholder, which stands for an engine of a bridge.
const ENGINE: &str = "admin reset ENGINE";

/// Returns the advice of [`mend_of`] for one holder. The commands in the advice are about the `culprit`, as
/// [`named`] has it.
pub fn mend_for<'a>(words: impl Iterator<Item = &'a str>, table: AdviceTable, culprit: [&str; 3]) -> String {
    named(&mend_of(words, table), culprit)
}

/// Returns `advice` with commands that name the holder's namespace, worker and rank. With an empty `rank`, the commands
/// are about all ranks. A command about an engine names its worker, which bridges know as well.
pub fn named(advice: &str, [namespace, worker, rank]: [&str; 3]) -> String {
    let culprit = format!("{namespace} {worker} {rank}");
    let advice = advice.replace(CULPRIT, culprit.trim_end());
    advice.replace(ENGINE, &format!("admin reset {worker}"))
}

/// Returns all words that the pages for operators explain, in the order of the pages.
pub fn words() -> Vec<&'static str> {
    let mut words: Vec<&str> = Vec::new();
    for line in PAGES.iter().flat_map(|page| page.lines()) {
        let explained = match line.strip_prefix("### ") {
            Some(title) if !title.contains(' ') => vec![title],
            _ => cells(line).first().map(|cell| names(cell)).unwrap_or_default(),
        };
        let new = explained.into_iter().filter(|word| !word.contains(' '));
        words.extend(new);
    }
    let mut seen = std::collections::BTreeSet::new();
    words.retain(|word| seen.insert(*word));
    words
}

fn entries_of(page: &'static str, word: &str) -> Vec<Entry> {
    let (mut section, mut titles) = ("", Vec::new());
    let mut entries: Vec<Entry> = Vec::new();
    // Text of the section that is headed by the word, while that section is being read.
    let mut paragraphs: Option<String> = None;
    for line in page.lines() {
        if line.starts_with('#') {
            entries.extend(paragraphs.take().map(|text| of_section(section, &text)));
            section = line.strip_prefix("## ").unwrap_or(section);
            paragraphs = (line.strip_prefix("### ") == Some(word)).then(String::new);
        } else if let Some(text) = &mut paragraphs {
            text.push_str(line);
            text.push(' ');
        } else if !line.starts_with('|') {
            titles.clear();
        } else if titles.is_empty() {
            titles = cells(line);
        } else {
            let cells = cells(line);
            let is_asked = cells.first().is_some_and(|cell| names(cell).contains(&word));
            entries.extend(is_asked.then(|| of_row(section, &titles, &cells)));
        }
    }
    entries.extend(paragraphs.map(|text| of_section(section, &text)));
    entries
}

fn of_section(section: &str, text: &str) -> Entry {
    Entry {
        section: section.to_owned(),
        said: vec![(String::new(), plain(text))],
    }
}

fn of_row(section: &str, titles: &[&str], cells: &[&str]) -> Entry {
    let said = titles.iter().zip(cells).skip(1);
    Entry {
        section: section.to_owned(),
        said: said
            .map(|(title, cell)| (plain(title), plain(cell)))
            .filter(|(_, text)| !text.is_empty())
            .collect(),
    }
}

/// Returns the cells of a table row. Empty if the line is not a table row.
fn cells(line: &'static str) -> Vec<&'static str> {
    let Some(row) = line.strip_prefix("| ").and_then(|row| row.strip_suffix(" |")) else {
        return Vec::new();
    };
    row.split(" | ").collect()
}

/// Returns the words in backticks in a table cell. Empty if the cell does not begin with a backtick.
fn names(cell: &'static str) -> Vec<&'static str> {
    if !cell.starts_with('`') {
        return Vec::new();
    }
    cell.split('`').skip(1).step_by(2).collect()
}

/// Returns a text without Markdown's marks. A link is replaced by its text.
fn plain(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text.trim();
    while let Some((before, link)) = rest.split_once('[') {
        plain.push_str(before);
        rest = match link.split_once("](").and_then(|(label, target)| {
            let (_, behind) = target.split_once(')')?;
            (!label.contains('[')).then_some((label, behind))
        }) {
            Some((label, behind)) => {
                plain.push_str(label);
                behind
            }
            None => {
                plain.push('[');
                link
            }
        };
    }
    plain.push_str(rest);
    plain.replace(['`', '*'], "").replace("<br>", ", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvatlas_telemetry::labels::{DropReason, LabelValue};

    #[test]
    fn a_row_a_section_and_a_link_are_read() {
        let page = "# Page\n\n## Reasons\n\n| word | what happened | what to do |\n|---|---|---|\n\
            | `a`, `b` | see [there](x.md#y) and `z` | nothing [yet] |\n\n## Alerts\n\n### Loud\n\nIt is *loud*:\nlisten.\n\n## Rest\n\ntext";
        let said = |word: &str| entries_of(page, word);
        let row = |title: &str, text: &str| (title.to_owned(), text.to_owned());
        let expected = Entry {
            section: "Reasons".to_owned(),
            said: vec![
                row("what happened", "see there and z"),
                row("what to do", "nothing [yet]"),
            ],
        };
        assert_eq!(said("b"), [expected]);
        let loud = Entry {
            section: "Alerts".to_owned(),
            said: vec![row("", "It is loud: listen.")],
        };
        assert_eq!(said("Loud"), [loud]);
        assert_eq!(said("z"), []);
    }

    #[test]
    fn every_reason_says_what_to_do() {
        for reason in DegradedReason::ALL {
            let word = reason.as_str();
            let mend = AdviceTable::DegradedReasons.advice(word);
            assert!(mend.is_some_and(|mend| mend.len() > 10), "{word}");
            assert!(words().contains(&word), "{word}");
        }
    }

    #[test]
    fn what_several_words_need_is_said_once() {
        let mend = mend_of(
            ["disk_gap", "changing", "external_gap", "none"].into_iter(),
            AdviceTable::DegradedReasons,
        );
        let expected =
            "deploy/engines.md says which connectors tell what; nothing: ask again; kvatlas explain none";
        assert_eq!(mend, expected);
    }

    #[test]
    fn the_words_of_a_bridge_say_more_than_the_reason() {
        let gap = DegradedReasons::of(DegradedReason::UpstreamGap);
        let mend =
            |detail| mend_of_doubt(DegradedReason::UpstreamGap, gap, detail, ["demo", "gpu-0", "1"]).unwrap();
        let size = mend(Some("block_size: its blocks have 16 tokens; give block_size=16"));
        assert!(
            size.contains("--block-size") && size.contains("another model") && !size.contains("replay"),
            "{size}"
        );
        assert!(mend(Some("malformed")).contains("--format"));
        for detail in [None, Some("lost_batches"), Some("an error in words")] {
            assert!(mend(detail).contains("replay socket"), "{detail:?}");
        }
    }

    #[test]
    fn of_an_engine_that_is_away_nothing_else_is_advised() {
        let all = [
            DegradedReason::Stale,
            DegradedReason::Unverified,
            DegradedReason::UpstreamLost,
        ];
        let lost = all
            .into_iter()
            .fold(DegradedReasons::default(), DegradedReasons::with);
        let culprit = ["demo", "gpu-0", "1"];
        let mend = |reason, all| mend_of_doubt(reason, all, None, culprit);
        assert_eq!(mend(DegradedReason::Stale, lost), None);
        assert_eq!(mend(DegradedReason::Unverified, lost), None);
        assert_eq!(mend(DegradedReason::UpstreamGap, lost), None);
        let away = mend(DegradedReason::UpstreamLost, lost).unwrap();
        assert!(away.contains("kvatlas admin forget demo gpu-0 1"), "{away}");
        // Before that, no bridge may tell of the engine any more.
        assert!(away.contains("POST /unregister"), "{away}");
        let stale = DegradedReasons::of(DegradedReason::Stale);
        assert!(mend(DegradedReason::Stale, stale).unwrap().contains("heartbeat"));
        assert_eq!(
            mend(DegradedReason::Unverified, stale.with(DegradedReason::Unverified)),
            None
        );
    }

    #[test]
    fn an_engine_that_is_refused_has_advice_of_its_own() {
        let lost = DegradedReasons::of(DegradedReason::UpstreamLost);
        let mend = |detail| {
            mend_of_doubt(
                DegradedReason::UpstreamLost,
                lost,
                Some(detail),
                ["demo", "gpu-0", "1"],
            )
            .unwrap()
        };
        let refused =
            mend("it is not followed: block_size is 32, but its model has blocks of 16 tokens here");
        assert!(refused.contains("the block size of the others"), "{refused}");
        assert!(!refused.contains("engine lives"), "{refused}");
        // The engine may be gone whatever it was doubted for before.
        assert!(mend("lost_batches").contains("engine lives"));
    }

    #[test]
    fn commands_name_the_culprit() {
        let mend = |word: &str, culprit| mend_for([word].into_iter(), AdviceTable::DegradedReasons, culprit);
        let gap = mend("gap", ["demo", "gpu-0", "1"]);
        assert!(gap.contains("kvatlas admin resync demo gpu-0 1"), "{gap}");
        let stale = mend("stale", ["demo", "gpu-0", ""]);
        assert!(stale.ends_with("kvatlas admin forget demo gpu-0"), "{stale}");
    }

    #[test]
    fn a_word_of_two_tables_has_the_advice_of_each() {
        let mend = |table| mend_of(["undecodable"].into_iter(), table);
        let of_holder = mend(AdviceTable::DegradedReasons);
        assert!(of_holder.contains("kvatlas admin resync"), "{of_holder}");
        // A publisher whose batches are all dropped has no holder that could be resynchronised.
        let of_batch = mend(AdviceTable::DropReasons);
        assert!(of_batch.starts_with("correct the publisher"), "{of_batch}");
        assert!(!of_batch.contains("kvatlas admin"), "{of_batch}");
        assert_eq!(mend(AdviceTable::Latches), "kvatlas explain undecodable");
    }

    #[test]
    fn every_reason_for_which_batches_are_dropped_says_what_to_do() {
        for reason in DropReason::ALL {
            let mend = AdviceTable::DropReasons.advice(reason.as_str());
            assert!(mend.is_some_and(|mend| mend.len() > 10), "{reason}");
        }
    }

    #[test]
    fn every_value_of_a_label_is_explained() {
        let metrics = kvatlas_telemetry::groups()
            .into_iter()
            .flat_map(|group| group.metrics);
        for label in metrics.flat_map(|metric| metric.labels) {
            for value in label.values.into_iter().flatten() {
                let found = entries(value.word);
                assert!(!found.is_empty() && value.meaning.len() > 10, "{}", value.word);
            }
        }
    }

    #[test]
    fn what_a_user_meets_is_explained() {
        for word in [
            "KvatlasIndexFull",
            "settled",
            "superseded",
            "kvatlas_ready",
            "events.lanes",
            "doubtful_holders",
            "last_token",
            "full_attention",
        ] {
            assert!(!entries(word).is_empty(), "{word}");
            assert!(words().contains(&word), "{word}");
        }
    }
}
