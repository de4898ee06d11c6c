//! Part of `kvatlas status` about one namespace.

use std::collections::BTreeMap;

use kvatlas_daemon::costs::Cost;
use kvatlas_daemon::runbook::mend_of_doubt;
use serde::{Deserialize, Serialize};

use crate::cli::doctor::Hashed;
use crate::cli::doubted::DoubtedHolder;
use crate::cli::promises::BrokenPromise;
use crate::cli::refused::PublisherRefusal;
use crate::cli::text::{counted, since};

/// Maximum number of degraded holders of a namespace that are named on the screen.
const NAMED_MAX: usize = 10;

/// Status of a namespace. An older daemon leaves some fields out.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub(in crate::cli) struct NamespaceStatus {
    pub(in crate::cli) namespace: String,
    pub(in crate::cli) holders: u64,
    #[serde(skip_deserializing)]
    pub(in crate::cli) degraded: u64,
    /// Number of degraded holders, by reason. A holder with several reasons is counted under each of them.
    #[serde(skip_deserializing)]
    reasons: BTreeMap<&'static str, u64>,
    pub(in crate::cli) distinct_blocks: u64,
    pub(in crate::cli) held_blocks: u64,
    /// Number of holders whose block size is guessed, because nobody tells it.
    pub(in crate::cli) unsized_holders: u64,
    /// Number of holders whose epoch, read as a time, is later than the daemon's clock.
    pub(in crate::cli) epochs_ahead: u64,
    /// Names of some holders whose epoch, read as a time, is later than the daemon's clock. The names are sorted.
    pub(in crate::cli) ahead: Vec<String>,
    /// Some publishers whose batches are dropped, each with the reason. The daemon keeps no holder for them.
    pub(in crate::cli) refused: Vec<PublisherRefusal>,
    /// Number of all publishers whose batches are dropped, including those that `refused` does not name.
    pub(in crate::cli) refused_total: u64,
    /// Numbers of recent answers about the namespace: all of them, and those that were not exact.
    pub(in crate::cli) cost: Option<Cost>,
    /// Names of some degraded holders, in the order of their names.
    #[serde(skip_deserializing)]
    named: Vec<String>,
    /// Details about each holder in `named`, in the same order: the reasons for doubt, the time at which the doubt
    /// began, and the share of queries that it affects.
    #[serde(skip)]
    doubts: Vec<DoubtedHolder>,
    /// Holders of which exact answers promise more blocks than requests find.
    pub(in crate::cli) broken_promises: Vec<BrokenPromise>,
    /// Settings that decide how the daemon hashes the namespace.
    #[serde(flatten, skip_serializing)]
    pub(in crate::cli) hashed: Option<Hashed>,
}

/// Returns the text `: ` and the names, joined by commas. Empty if there are no names, because an older daemon sends
/// none.
fn listed(names: &[String]) -> String {
    match names.is_empty() {
        true => String::new(),
        false => format!(": {}", names.join(", ")),
    }
}

impl NamespaceStatus {
    pub(super) fn note(&mut self, holder: DoubtedHolder) {
        self.degraded += 1;
        for reason in holder.degraded.iter() {
            *self.reasons.entry(reason.as_str()).or_default() += 1;
        }
        if self.named.len() < NAMED_MAX {
            self.named.push(format!("{}/{}", holder.worker, holder.rank));
            self.doubts.push(holder);
        }
    }

    /// Returns lines about troubles of the namespace that do not make any holder degraded.
    pub(super) fn render_notes(&self) -> String {
        let mut text = String::new();
        let name = &self.namespace;
        if self.epochs_ahead > 0 {
            let holders = counted(self.epochs_ahead, "holder has", "holders have");
            let names = listed(&self.ahead);
            text += &format!("clocks in {name}: {holders} an epoch ahead of the daemon's clock{names}\n");
        }
        if !self.refused.is_empty() {
            text += &format!("{}\n", self.render_refused());
            let cost = self.cost.map(|cost| format!("    {}\n", cost.of_all()));
            text += &cost.unwrap_or_default();
            for refusal in &self.refused {
                text += &format!("    mend {}: {}\n", refusal.worker, refusal.mend(name));
            }
        }
        if self.unsized_holders > 0 {
            let holders = counted(self.unsized_holders, "holder does", "holders do");
            text += &format!("block size in {name}: guessed, {holders} not say it\n");
        }
        for broken in &self.broken_promises {
            text += &format!("promises in {name}: {broken}\n");
        }
        text
    }

    /// Returns the number of publishers whose batches are dropped and that are not named.
    pub(in crate::cli) fn unnamed_refused(&self) -> u64 {
        self.refused_total.saturating_sub(self.refused.len() as u64)
    }

    pub(super) fn render_refused(&self) -> String {
        let refused = self.refused.iter();
        let named = refused.map(|refusal| format!("{} ({})", refusal.worker, refusal.reason));
        let (name, named) = (&self.namespace, named.collect::<Vec<_>>().join(", "));
        let more = match self.unnamed_refused() {
            0 => String::new(),
            unnamed => format!(" and {unnamed} more"),
        };
        format!("publishers in {name}: all batches are dropped of {named}{more}")
    }

    pub(super) fn render_degraded(&self, now_us: u64) -> String {
        let reasons: Vec<String> = self
            .reasons
            .iter()
            .map(|(reason, count)| format!("{reason} {count}"))
            .collect();
        let mut text = format!("degraded in {}: {}\n", self.namespace, reasons.join(", "));
        for (name, holder) in self.named.iter().zip(&self.doubts) {
            let words: Vec<&str> = holder.degraded.iter().map(|reason| reason.as_str()).collect();
            let since = since(holder.since_us, now_us);
            text += &format!("  {name} {}{since}\n", words.join(", "));
            for said in holder
                .detail
                .iter()
                .chain(&holder.cost.map(|cost| cost.to_string()))
            {
                text += &format!("    {said}\n");
            }
        }
        let unnamed = self.degraded.saturating_sub(self.named.len() as u64);
        if unnamed > 0 {
            text += &format!("  and {unnamed} more\n");
        }
        text + &self.render_mends()
    }

    /// Returns the runbook's advice on each reason. The advice names the first holder that has the reason.
    fn render_mends(&self) -> String {
        let mut mends: Vec<(String, String)> = Vec::new();
        for reason in self.reasons.keys() {
            let mend = self.doubts.iter().find_map(|holder| {
                let one = holder.degraded.iter().find(|one| one.as_str() == *reason)?;
                let culprit = [&*holder.namespace, &*holder.worker, &holder.rank.to_string()];
                mend_of_doubt(one, holder.degraded, holder.detail.as_deref(), culprit)
            });
            let Some(mend) = mend else { continue };
            match mends.iter_mut().find(|(_, said)| *said == mend) {
                Some((reasons, _)) => *reasons += &format!(", {reason}"),
                None => mends.push(((*reason).to_owned(), mend)),
            }
        }
        let lines = mends
            .iter()
            .map(|(reasons, mend)| format!("  mend {reasons}: {mend}\n"));
        lines.collect()
    }
}
