//! Status of a namespace as text for people.

use kvatlas_core::wire::{
    Address, DegradedReason, DegradedReasons, HolderStatusReply, Labels, NamespaceName, StatusReply,
};

use super::query_report::describe_gathered;
use super::table::TextTable;
use super::text::{counted, since};

/// Returns a holder's state in words: `exact`, or `degraded` with the reasons.
pub(super) fn describe_state(exact: bool, degraded: DegradedReasons) -> String {
    let reasons: Vec<&str> = degraded.iter().map(DegradedReason::as_str).collect();
    match (exact, reasons.is_empty()) {
        (true, _) => "exact".to_owned(),
        (false, true) => "degraded".to_owned(),
        (false, false) => format!("degraded: {}", reasons.join(", ")),
    }
}

/// Returns the address of a holder; `-` if it has none.
pub(super) fn describe_address(address: Option<&Address>) -> String {
    address.map_or("-".to_owned(), Address::to_string)
}

fn describe_labels(labels: &Labels) -> String {
    match labels.is_empty() {
        true => "-".to_owned(),
        false => labels.to_string(),
    }
}

/// Returns the status as a heading and a table. `now_us` is the present time.
pub(super) fn render_status(namespace: &NamespaceName, status: &StatusReply, now_us: u64) -> String {
    let incomplete = describe_gathered(status.gathered.as_ref());
    let heading = format!(
        "namespace {namespace}: {} tokens a block{}, {} distinct blocks, {} batches waiting\n",
        status.block_size,
        describe_guess(status.unsized_holders),
        status.distinct_blocks,
        status.batches_waiting
    );
    let incomplete = describe_missing(status) + &incomplete;
    if status.holders.is_empty() {
        return heading + "no worker has been heard of\n" + &incomplete;
    }
    let has_profiles = status
        .holders
        .iter()
        .any(|holder| holder.address.is_some() || !holder.labels.is_empty());
    let mut columns = vec!["WORKER", ">RANK", ">EPOCH", ">SEQ", ">BLOCKS", ">PARKED", "STATE"];
    if has_profiles {
        columns.extend(["ADDRESS", "LABELS"]);
    }
    let mut table = TextTable::new(&columns);
    for holder in &status.holders {
        let mut row = row(holder, now_us);
        if has_profiles {
            row.extend([
                describe_address(holder.address.as_ref()),
                describe_labels(&holder.labels),
            ]);
        }
        table.push(row);
    }
    heading + &table.render() + &incomplete
}

/// Returns lines about holders that are not listed, though they may be there; empty if there are none.
fn describe_missing(status: &StatusReply) -> String {
    let refused = match status.refused_holders {
        0 => String::new(),
        holders => {
            let holders = counted(holders.into(), "holder's batches are", "holders' batches are");
            format!("{holders} dropped: blocks are missing\n")
        }
    };
    let unheard = match status.unheard_holders {
        0 => "",
        _ => "there may be workers that have not been heard of yet\n",
    };
    refused + unheard
}

/// Returns a remark that the block size is guessed for `unsized_holders` holders; empty if that is 0.
fn describe_guess(unsized_holders: u32) -> String {
    match unsized_holders {
        0 => String::new(),
        holders => {
            let holders = counted(holders.into(), "holder does", "holders do");
            format!(" (guessed: {holders} not say it)")
        }
    }
}

fn row(holder: &HolderStatusReply, now_us: u64) -> Vec<String> {
    let foreign = if holder.foreign_chain {
        ", foreign chain"
    } else {
        ""
    };
    let since = since(holder.since_us, now_us);
    let ahead = match holder.epoch_ahead_s {
        0 => String::new(),
        seconds => format!(", epoch {seconds} s ahead of the clock"),
    };
    vec![
        holder.worker.to_string(),
        holder.rank.to_string(),
        holder.epoch.to_string(),
        holder.seq.to_string(),
        holder.blocks.to_string(),
        holder.parked_events.to_string(),
        describe_state(holder.exact, holder.degraded) + &since + foreign + &ahead,
    ]
}

#[cfg(test)]
mod tests {
    use kvatlas_core::wire::WorkerName;

    use super::*;

    fn holder(worker: &str, degraded: DegradedReasons) -> HolderStatusReply {
        HolderStatusReply {
            worker: WorkerName::new(worker).unwrap(),
            rank: 0,
            epoch: 7,
            seq: 12,
            blocks: 1024,
            parked_events: 0,
            foreign_chain: false,
            epoch_ahead_s: 0,
            exact: degraded.is_empty(),
            address: None,
            labels: Labels::NONE,
            degraded,
            since_us: None,
        }
    }

    #[test]
    fn a_line_for_each_holder() {
        let gap = DegradedReasons::of(DegradedReason::Gap).with(DegradedReason::Unverified);
        let status = StatusReply {
            v: 1,
            behind_us: 0,
            block_size: 16,
            distinct_blocks: 2000,
            batches_waiting: 3,
            unsized_holders: 1,
            refused_holders: 0,
            unheard_holders: 0,
            holders: vec![
                holder("gpu-0", DegradedReasons::default()),
                HolderStatusReply {
                    since_us: Some(1_800_000_000_000_000),
                    foreign_chain: true,
                    epoch_ahead_s: 60,
                    ..holder("gpu-1", gap)
                },
            ],
            gathered: None,
        };
        let namespace = NamespaceName::new("llama").unwrap();
        let expected = "\
namespace llama: 16 tokens a block (guessed: 1 holder does not say it), 2000 distinct blocks, 3 batches waiting
WORKER  RANK  EPOCH  SEQ  BLOCKS  PARKED  STATE
gpu-0      0      7   12    1024       0  exact
gpu-1      0      7   12    1024       0  degraded: gap, unverified since 08:00:00 UTC (4 min), foreign chain, epoch 60 s ahead of the clock
";
        let now_us = 1_800_000_290_000_000;
        assert_eq!(render_status(&namespace, &status, now_us), expected);
        let mut labelled = status;
        labelled.holders.truncate(1);
        labelled.holders[0].labels = serde_json::from_str(r#"{"zone":"a","role":"prefill"}"#).unwrap();
        let row = "gpu-0      0      7   12    1024       0  exact  -        role=prefill,zone=a\n";
        assert!(render_status(&namespace, &labelled, now_us).ends_with(row));
    }

    #[test]
    fn an_empty_namespace_is_told() {
        let status = StatusReply {
            behind_us: 0,
            v: 1,
            block_size: 16,
            distinct_blocks: 0,
            batches_waiting: 0,
            unsized_holders: 0,
            refused_holders: 0,
            unheard_holders: 0,
            holders: Vec::new(),
            gathered: None,
        };
        let text = render_status(&NamespaceName::new("llama").unwrap(), &status, 0);
        assert!(text.ends_with("no worker has been heard of\n"), "{text}");
    }
}
