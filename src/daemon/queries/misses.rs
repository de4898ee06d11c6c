//! Counts of consecutive questions for which no holder is found. If there are many, the router probably hashes prompts
//! differently from the engines. No single answer shows such a difference, so a warning is logged.

use std::sync::atomic::{AtomicU64, Ordering};

use kvatlas_core::wire::NamespaceName;

use super::Source;

/// Number of consecutive questions without a holder after which a warning is logged. The warning is repeated each
/// time that the number has doubled.
const SUSPICIOUS: u64 = 100;

/// Counter of one listener's consecutive questions without a holder, that is, questions for which no holder was found
/// although there were holders.
#[derive(Debug)]
pub(crate) struct Misses {
    in_a_row: AtomicU64,
    /// Words for the routers that ask this listener. The log uses them.
    routers: &'static str,
    /// Words for the settings of the routers that an operator should compare with the settings of the namespace. The
    /// log uses them.
    compared: &'static str,
}

impl Misses {
    pub(crate) const fn new(routers: &'static str, compared: &'static str) -> Self {
        Self {
            in_a_row: AtomicU64::new(0),
            routers,
            compared,
        }
    }

    /// Notes a question for which a holder was found. The count of consecutive questions without a holder begins again
    /// at 0.
    pub(crate) fn found(&self) {
        self.in_a_row.store(0, Ordering::Relaxed);
    }

    /// Notes a question for which no holder was found in the namespaces `asked`. The question is not counted if these
    /// namespaces have no holders.
    pub(crate) fn missed(&self, source: &Source, asked: &[NamespaceName]) {
        let held = || asked.iter().filter_map(|name| described(source, name)).collect();
        if let Some((in_a_row, held)) = self.suspicious(held) {
            tracing::warn!(
                in_a_row, namespaces = ?held,
                "the last questions of {} found nobody. Unless their prompts are all new, they hash otherwise than the engines are \
                 followed: compare {}",
                self.routers, self.compared
            );
        }
    }

    /// Counts a question for which no holder was found. If it is time for a warning, returns the number of such
    /// questions in a row, and the namespaces that have holders. `held` lists these namespaces.
    fn suspicious(&self, held: impl FnOnce() -> Vec<String>) -> Option<(u64, Vec<String>)> {
        let in_a_row = self.in_a_row.fetch_add(1, Ordering::Relaxed) + 1;
        if !is_time(in_a_row) {
            return None;
        }
        let held = held();
        if held.is_empty() {
            self.found();
            return None;
        }
        Some((in_a_row, held))
    }
}

/// Whether a warning is due after `in_a_row` consecutive questions without a holder.
fn is_time(in_a_row: u64) -> bool {
    in_a_row.is_multiple_of(SUSPICIOUS) && (in_a_row / SUSPICIOUS).is_power_of_two()
}

/// Returns the name and block size of a namespace, for the log. `None` if the namespace has no holders. In a gateway,
/// returns only the name, because a gateway knows neither block sizes nor holders.
fn described(source: &Source, name: &NamespaceName) -> Option<String> {
    let Source::Here(index) = source else {
        return Some(name.to_string());
    };
    let namespace = index.answerer.namespaces().get(name)?;
    let tokens = namespace.indexer.settings().block_size.as_u32();
    (namespace.indexer.holder_count() > 0).then(|| format!("{name} (blocks of {tokens} tokens)"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_speaks_ever_more_rarely_and_only_of_what_is_held() {
        let misses = Misses::new("routers", "settings");
        let ask = |count: u64, held: &[&str]| -> Vec<u64> {
            let held = || held.iter().map(ToString::to_string).collect();
            let spoken = (0..count).filter_map(|_| misses.suspicious(held));
            spoken.map(|(in_a_row, _)| in_a_row).collect()
        };
        assert!(ask(150, &[]).is_empty());
        assert_eq!(ask(1000, &["m"]), [100, 200, 400, 800]);
        misses.found();
        assert_eq!(ask(100, &["m"]), [100]);
    }
}
