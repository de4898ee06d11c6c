//! Troubles that no row of `kvatlas top`'s table shows: outages of gateways, missing shards, events for namespaces that
//! do not exist, dropped batches, failing snapshots, holders with fewer blocks than exact answers promise, and wrong
//! clocks.

use kvatlas_daemon::runbook::{AdviceTable, mend_of};

use super::frames::{DaemonFrame, NamespaceFrame};
use crate::cli::missing::GatewayOutage;
use crate::cli::text::{printable, since};

/// Returns a text about the worst trouble in a message of the daemon, with the advice on it; `None` if the message has
/// no trouble.
pub(super) fn worst(frame: &DaemonFrame) -> Option<String> {
    let silence = frame.silence.told().into_iter().map(|what| Trouble {
        what,
        mend: frame.silence.mend().to_owned(),
    });
    let outage = frame.shard_outage.iter().map(|outage| Trouble {
        what: outage.describe(frame.now_us),
        mend: GatewayOutage::mend(),
    });
    let shards = frame.missing_shards.iter().map(|missing| {
        let what = format!("{missing} {}", missing.describe(frame.now_us));
        let mend = missing.mend();
        Trouble { what, mend }
    });
    let strays = frame.strays.iter().map(|stray| Trouble {
        what: stray.describe(frame.now_us),
        mend: stray.mend(),
    });
    let dropped = frame
        .namespaces
        .iter()
        .flat_map(|namespace| dropped(namespace, frame.now_us));
    let snapshots = frame.snapshots.iter().map(|failing| {
        let begun = since(Some(failing.since_us), frame.now_us);
        let what = format!("snapshots are not written{begun}: {}", failing.error);
        Trouble::new(what, "KvatlasSnapshotsFail")
    });
    let uploads = frame.uploads.iter().map(|failing| {
        let begun = since(Some(failing.since_us), frame.now_us);
        let what = format!(
            "snapshots are not sent to the Object Store{begun}: {}",
            failing.error
        );
        Trouble::new(what, "KvatlasSnapshotUploadsFail")
    });
    let promises = frame.namespaces.iter().flat_map(promises);
    let clocks = frame
        .namespaces
        .iter()
        .flat_map(|namespace| clock(namespace, frame.now_us));
    let mut all = silence
        .chain(outage)
        .chain(shards)
        .chain(strays)
        .chain(dropped)
        .chain(snapshots)
        .chain(uploads)
        .chain(promises)
        .chain(clocks);
    let Trouble { what, mend } = all.next()?;
    let more = match all.count() {
        0 => String::new(),
        more => format!(" (and {more} more: kvatlas doctor)"),
    };
    Some(printable(&format!("{what}{more}. Mend: {mend}")).replace('\n', " "))
}

struct Trouble {
    what: String,
    mend: String,
}

impl Trouble {
    /// Makes a trouble that concerns no single worker. The runbook's advice on it stands at the alert with this name.
    fn new(what: String, alert: &str) -> Self {
        let mend = mend_of([alert].into_iter(), AdviceTable::OtherTroubles);
        Self { what, mend }
    }
}

fn dropped(namespace: &NamespaceFrame, now_us: u64) -> impl Iterator<Item = Trouble> {
    let name = &namespace.name;
    namespace.refused.iter().map(move |refused| {
        let (worker, reason) = (&refused.worker, &refused.reason);
        let begun = since(refused.since_us, now_us);
        Trouble {
            what: format!("all batches of {worker} of {name} are dropped ({reason}){begun}"),
            mend: refused.mend(name),
        }
    })
}

fn promises(namespace: &NamespaceFrame) -> impl Iterator<Item = Trouble> {
    namespace.broken_promises.iter().map(|broken| Trouble {
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
    let what = format!(
        "the clock of {first}{others} of {} is ahead{begun}",
        namespace.name
    );
    Some(Trouble::new(what, "KvatlasClockAhead"))
}
