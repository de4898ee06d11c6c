//! State that `kvatlas top` shows, and how events and keys change it.

use std::collections::{HashMap, VecDeque};

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::widgets::TableState;

use kvatlas_core::wire::TROUBLE_LABEL;
use kvatlas_daemon::runbook::named;

use super::frames::{DaemonFrame, FrameRates, Hello, NamespaceFrame};
use super::trouble::worst;
use crate::cli::text::{SECOND_US, lasted, printable};

/// Maximum number of seconds for which the rate of queries is kept.
const HISTORY_MAX: usize = 240;
/// Maximum length of the filter text, in bytes.
const FILTER_MAX: usize = 64;
const PAGE: isize = 10;

/// Whether the display continues after a key was pressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    Go,
    End,
}

/// Holder as the table shows it.
#[derive(Debug, Clone)]
pub(super) struct ShownHolder {
    pub(super) namespace: String,
    pub(super) worker: String,
    pub(super) rank: u32,
    pub(super) address: String,
    /// Text in which the holder's publisher says why its own blocks are in doubt; empty if it says nothing.
    told: String,
    pub(super) blocks: u64,
    pub(super) lag_us: u64,
    reasons: u32,
    /// Time at which the holder became doubtful, in microseconds since the Unix epoch; 0 if the holder is exact, or if
    /// the time is not known.
    since_us: u64,
    /// Share of queries that the doubtful holder affects, in words. The daemon sends it only for the holders that
    /// affect the most queries; it is empty for all others.
    cost: String,
}

impl ShownHolder {
    /// Returns the key by which the table is sorted. Degraded holders come first; among equals, holders are sorted by
    /// name. A number at the end of a name is compared as a number.
    fn place(&self) -> (bool, (&str, u64), &str, u32, &str) {
        (
            self.reasons == 0,
            natural(&self.worker),
            &self.worker,
            self.rank,
            &self.namespace,
        )
    }
}

/// State of the display.
#[derive(Debug)]
pub(super) struct Model {
    pub(super) authority: String,
    pub(super) hello: Hello,
    pub(super) is_connected: bool,
    pub(super) is_ready: bool,
    pub(super) reasons: Vec<String>,
    pub(super) rates: Option<FrameRates>,
    /// Worst trouble among those that concern no row of the table, in words.
    pub(super) worst: Option<String>,
    /// Queries a second for the last [`HISTORY_MAX`] seconds, the newest last.
    pub(super) queries: VecDeque<u64>,
    pub(super) filter: String,
    pub(super) is_typing: bool,
    pub(super) only_degraded: bool,
    pub(super) table: TableState,
    namespaces: Vec<NamespaceFrame>,
    holders: HashMap<u64, ShownHolder>,
    /// Time of the last frame, in microseconds since the Unix epoch.
    now_us: u64,
    /// Namespace that is shown; `None` if all namespaces are shown.
    namespace: Option<String>,
}

impl Model {
    /// Creates the state before the first event.
    pub(super) fn new(authority: &str) -> Self {
        Self {
            authority: authority.to_owned(),
            hello: Hello::default(),
            is_connected: true,
            is_ready: false,
            reasons: Vec::new(),
            rates: None,
            worst: None,
            queries: VecDeque::new(),
            filter: String::new(),
            is_typing: false,
            only_degraded: false,
            table: TableState::default().with_selected(0),
            namespaces: Vec::new(),
            holders: HashMap::new(),
            now_us: 0,
            namespace: None,
        }
    }

    /// Updates the state by an event of the stream. An event that cannot be read changes nothing, because a newer
    /// daemon may send other events.
    pub(super) fn take(&mut self, name: &str, data: &str) {
        self.is_connected = true;
        match name {
            "hello" => self.hello = serde_json::from_str(data).unwrap_or_default(),
            "frame" => {
                if let Ok(frame) = serde_json::from_str(data) {
                    self.take_frame(frame);
                }
            }
            _ => {}
        }
    }

    /// Notes that the connection is lost.
    pub(super) fn lose(&mut self) {
        self.is_connected = false;
    }

    fn take_frame(&mut self, mut frame: DaemonFrame) {
        self.worst = worst(&frame);
        for namespace in &mut frame.namespaces {
            namespace.name = tidy(&namespace.name);
        }
        let change = frame.fleet;
        if change.whole {
            self.holders.clear();
        }
        for (number, namespace, worker, rank) in change.added {
            let holder = ShownHolder {
                namespace: tidy(&namespace),
                worker: tidy(&worker),
                rank,
                address: String::new(),
                told: String::new(),
                blocks: 0,
                lag_us: 0,
                reasons: 0,
                since_us: 0,
                cost: String::new(),
            };
            self.holders.entry(number).or_insert(holder);
        }
        for (number, address, labels) in change.profiles {
            if let Some(holder) = self.holders.get_mut(&number) {
                let told = labels.get(TROUBLE_LABEL).and_then(|told| told.as_str());
                holder.address = tidy(&address);
                holder.told = tidy(told.unwrap_or_default());
            }
        }
        for (number, since_us) in change.since {
            if let Some(holder) = self.holders.get_mut(&number) {
                holder.since_us = since_us;
            }
        }
        for (number, blocks, reasons, lag_us, ..) in change.facts {
            if let Some(holder) = self.holders.get_mut(&number) {
                (holder.blocks, holder.reasons, holder.lag_us) = (blocks, reasons, lag_us);
            }
        }
        for number in change.gone {
            self.holders.remove(&number);
        }
        self.holders.values_mut().for_each(|holder| holder.cost.clear());
        for (number, cost) in frame.costs {
            if let Some(holder) = self.holders.get_mut(&number) {
                holder.cost = printable(&cost);
            }
        }
        if let Some(rates) = &frame.rates {
            #[allow(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a rate is a small positive number"
            )]
            self.queries.push_back(rates.queries.round() as u64);
            while self.queries.len() > HISTORY_MAX {
                self.queries.pop_front();
            }
        }
        self.now_us = frame.now_us;
        self.is_ready = frame.ready;
        self.reasons = frame.reasons;
        self.rates = frame.rates;
        self.namespaces = frame.namespaces;
        self.keep_selection();
    }

    /// Whether the daemon has said anything yet.
    pub(super) fn has_heard(&self) -> bool {
        self.now_us > 0
    }

    /// Returns the name of the namespace that is shown; `all` if all namespaces are shown.
    pub(super) fn namespace(&self) -> &str {
        self.namespace.as_deref().unwrap_or("all")
    }

    fn is_of_namespace(&self, name: &str) -> bool {
        self.namespace.as_deref().is_none_or(|shown| shown == name)
    }

    /// Returns the counts of the shown namespaces: exact holders, degraded holders, distinct blocks, held blocks.
    pub(super) fn totals(&self) -> (usize, usize, u64, u64) {
        let holders = self.holders.values();
        let (mut exact, mut degraded) = (0, 0);
        for holder in holders.filter(|holder| self.is_of_namespace(&holder.namespace)) {
            *(if holder.reasons == 0 {
                &mut exact
            } else {
                &mut degraded
            }) += 1;
        }
        let shown = || {
            self.namespaces
                .iter()
                .filter(|one| self.is_of_namespace(&one.name))
        };
        // The daemon sends a limited number of holders, and counts all of them.
        let counted = |one: &NamespaceFrame| one.exact.zip(one.degraded);
        if let Some(counts) = shown().map(counted).collect::<Option<Vec<_>>>() {
            exact = counts.iter().map(|(exact, _)| exact).sum();
            degraded = counts.iter().map(|(_, degraded)| degraded).sum();
        }
        let blocks = shown().map(|namespace| namespace.distinct_blocks).sum();
        let copies = shown().map(|namespace| namespace.held_blocks).sum();
        (exact, degraded, blocks, copies)
    }

    /// Returns the holders that are shown: degraded ones first, then by name.
    pub(super) fn rows(&self) -> Vec<&ShownHolder> {
        let wanted = self.filter.to_lowercase();
        let is_wanted = |holder: &&ShownHolder| {
            self.is_of_namespace(&holder.namespace)
                && (!self.only_degraded || holder.reasons != 0)
                && holder.worker.to_lowercase().contains(&wanted)
        };
        let mut rows: Vec<&ShownHolder> = self.holders.values().filter(is_wanted).collect();
        rows.sort_unstable_by(|one, other| one.place().cmp(&other.place()));
        rows
    }

    /// Returns the words for the reasons why a holder is not exact.
    fn words(&self, holder: &ShownHolder) -> impl Iterator<Item = &str> {
        let reasons = holder.reasons;
        let of_holder = self
            .hello
            .reasons
            .iter()
            .filter(move |(bit, _)| reasons & bit != 0);
        of_holder.map(|(_, word)| word.as_str())
    }

    /// Returns a text about the selected holder: its name, why its publisher says it is in doubt, the share of queries
    /// that it affects, and what to do. `None` while the holder is exact.
    pub(super) fn trouble(&self) -> Option<String> {
        let holder = *self.rows().get(self.table.selected()?)?;
        if holder.reasons == 0 {
            return None;
        }
        let ShownHolder {
            namespace,
            worker,
            rank,
            ..
        } = holder;
        let culprit: [&str; 3] = [namespace, worker, &rank.to_string()];
        let mend = |word: &str| {
            let known = self.hello.mends.iter().find(|(known, _)| known == word);
            let explained = || format!("kvatlas explain {word}");
            known.map_or_else(explained, |(_, mend)| named(&printable(mend), culprit))
        };
        let mends: Vec<String> = self.words(holder).map(mend).collect();
        let sentence = |before: &str, text: &str| match text {
            "" => String::new(),
            text => format!("{before}{text}. "),
        };
        let (told, cost) = (sentence("", &holder.told), sentence("Cost: ", &holder.cost));
        Some(format!(
            "{worker}/{rank} of {namespace}: {told}{cost}Mend: {}",
            mends.join("; ")
        ))
    }

    /// Returns a holder's state in words: `exact`, or the reasons for doubt and how long the doubt has lasted.
    pub(super) fn state(&self, holder: &ShownHolder) -> String {
        if holder.reasons == 0 {
            return "exact".to_owned();
        }
        let words = self.words(holder).collect::<Vec<_>>().join(", ");
        match holder.since_us {
            0 => words,
            since_us => {
                let seconds = self.now_us.saturating_sub(since_us) / SECOND_US;
                format!("{words} ({})", lasted(seconds))
            }
        }
    }

    /// Changes the state when a key is pressed. Returns whether the display continues.
    pub(super) fn press(&mut self, key: KeyEvent) -> Next {
        let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('c') if is_control => return Next::End,
            _ if self.is_typing => self.press_in_filter(key.code),
            KeyCode::Char('q') | KeyCode::Esc if self.filter.is_empty() => return Next::End,
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Char('q') => return Next::End,
            KeyCode::Char('/') => self.is_typing = true,
            KeyCode::Char('d') => self.only_degraded = !self.only_degraded,
            KeyCode::Char('n') => self.take_next_namespace(),
            KeyCode::Down | KeyCode::Char('j') => self.go(1),
            KeyCode::Up | KeyCode::Char('k') => self.go(-1),
            KeyCode::PageDown => self.go(PAGE),
            KeyCode::PageUp => self.go(-PAGE),
            KeyCode::Home => self.table.select(Some(0)),
            KeyCode::End => self.table.select(Some(self.rows().len().saturating_sub(1))),
            _ => {}
        }
        self.keep_selection();
        Next::Go
    }

    fn press_in_filter(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.is_typing = false,
            KeyCode::Esc => {
                self.is_typing = false;
                self.filter.clear();
            }
            KeyCode::Backspace => {
                self.filter.pop();
            }
            KeyCode::Char(character) if self.filter.len() < FILTER_MAX => self.filter.push(character),
            _ => {}
        }
    }

    fn take_next_namespace(&mut self) {
        let mut names = self.namespaces.iter().map(|namespace| namespace.name.as_str());
        let next = match &self.namespace {
            None => names.next(),
            Some(shown) => names.skip_while(|name| name != shown).nth(1),
        };
        self.namespace = next.map(str::to_owned);
    }

    fn go(&mut self, step: isize) {
        let now = self.table.selected().unwrap_or_default();
        self.table.select(Some(now.saturating_add_signed(step)));
    }

    fn keep_selection(&mut self) {
        let last = self.rows().len().saturating_sub(1);
        let selected = self.table.selected().unwrap_or_default();
        self.table.select(Some(selected.min(last)));
    }
}

/// Returns a text from elsewhere without characters that could steer the terminal or end the line.
fn tidy(text: &str) -> String {
    printable(text).replace('\n', "")
}

/// Splits a name into its letters and the number at its end, so that `gpu-2` comes before `gpu-10`.
fn natural(name: &str) -> (&str, u64) {
    let letters = name.trim_end_matches(|character: char| character.is_ascii_digit());
    let number = name.get(letters.len()..).and_then(|digits| digits.parse().ok());
    (letters, number.unwrap_or_default())
}
