//! Troubles that no row of `kvatlas top`'s table shows: outages of gateways, missing shards, events for namespaces that
//! do not exist, dropped batches, failing snapshots, holders with fewer blocks than exact answers promise, and wrong
//! clocks.

use kvatlas_daemon::runbook::{AdviceTable, mend_of};

use super::frames::{DaemonFrame, NamespaceFrame};
use crate::cli::text::{printable, since};
use crate::cli::trouble::Trouble;

/// Returns a text about the worst trouble in a message of the daemon, with the advice on it; `None` if the message has
/// no trouble.
pub(super) fn worst(frame: &DaemonFrame) -> Option<String> {
    let (mut all, namespaces) = (frame.troubles.told(frame.now_us), &frame.namespaces);
    all.extend(
        namespaces
            .iter()
            .flat_map(|namespace| dropped(namespace, frame.now_us)),
    );
    // Answers go on without snapshots.
    all.sort_by_key(|trouble| matches!(trouble.part, "snapshots" | "uploads"));
    all.extend(namespaces.iter().flat_map(promises));
    all.extend(
        namespaces
            .iter()
            .filter_map(|namespace| clock(namespace, frame.now_us)),
    );
    let (Trouble { what, mend, .. }, others) = all.split_first()?;
    let more = match others.len() {
        0 => String::new(),
        more => format!(" (and {more} more: kvatlas doctor)"),
    };
    Some(printable(&format!("{what}{more}. Mend: {mend}")).replace('\n', " "))
}

fn dropped(namespace: &NamespaceFrame, now_us: u64) -> impl Iterator<Item = Trouble> {
    let name = &namespace.name;
    namespace.refused.iter().map(move |refused| {
        let (worker, reason) = (&refused.worker, &refused.reason);
        let begun = since(refused.since_us, now_us);
        Trouble {
            part: "publishers",
            what: format!("all batches of {worker} of {name} are dropped ({reason}){begun}"),
            mend: refused.mend(name),
        }
    })
}

fn promises(namespace: &NamespaceFrame) -> impl Iterator<Item = Trouble> {
    namespace.broken_promises.iter().map(|broken| Trouble {
        part: "promises",
        what: broken.to_string(),
        mend: broken.mend(&namespace.name),
    })
}

/// Returns one trouble for all publishers of a namespace whose clocks run ahead; `None` if there are none.
fn clock(namespace: &NamespaceFrame, now_us: u64) -> Option<Trouble> {
    let first = namespace.ahead.first()?;
    let others = if namespace.ahead.len() > 1 {
        " and others"
    } else {
        ""
    };
    let begun = since(namespace.ahead_since_us, now_us);
    Some(Trouble {
        part: "clocks",
        what: format!(
            "the clock of {first}{others} of {} is ahead{begun}",
            namespace.name
        ),
        mend: mend_of(["KvatlasClockAhead"].into_iter(), AdviceTable::OtherTroubles),
    })
}
