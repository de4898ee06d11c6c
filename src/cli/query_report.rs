//! Answers to queries, as tables for people.

use kvatlas_core::wire::{DropOut, Gathered, HolderMatch, QueryOptions, QueryReply, QueryResult};

use super::failure::Failure;
use super::status_report::{describe_address, describe_state};
use super::table::TextTable;
use super::text::{counted, printable};

/// Returns the answer to one query as text for a person.
pub(super) fn render_reply(reply: &QueryReply, asked: &QueryOptions) -> String {
    let mut text = format!(
        "{} asked for\n",
        counted(reply.query_blocks.into(), "block", "blocks")
    );
    if reply.query_blocks == 0 {
        text += "nothing was looked up: give at least as many tokens as a block has\n";
    } else if !reply.holders.is_empty() {
        text += &holders_table(reply, asked).render();
    } else if reply.holders_total > 0 {
        text += &format!("{} found, none shown\n", reply.holders_total);
    } else {
        text += &describe_nobody(reply, asked);
    }
    let shown = u32::try_from(reply.holders.len()).unwrap_or(u32::MAX);
    if shown < reply.holders_total && shown > 0 {
        text += &format!("{shown} of {} shown\n", reply.holders_total);
    }
    if reply.unseen_blocks_max > 0 {
        let blocks = counted(reply.unseen_blocks_max.into(), "block", "blocks");
        text += &format!("whoever has none of the blocks sent is not shown, and holds at most {blocks}\n");
    }
    if reply.foreign_holders > 0 {
        text += &format!(
            "{} cannot be found this way, because their engines' hashes are not the contract's: \
             ask by the engines' own hashes, or set the namespace to recompute\n",
            reply.foreign_holders
        );
    }
    if reply.doubtful_holders > 0 {
        text += &format!(
            "{} not in this list may hold more than is known: kvatlas status says why; if not, ask again, as a daemon that has just \
             started has not heard of all\n",
            counted(reply.doubtful_holders.into(), "holder", "holders")
        );
    }
    text += &predicted_line(reply);
    text + &describe_gathered(reply.gathered.as_ref())
}

/// Returns a line for an answer without holders. It says whom the answer is about, and which blocks nobody holds.
fn describe_nobody(reply: &QueryReply, asked: &QueryOptions) -> String {
    let whom = match asked.workers {
        Some(_) => "none of these workers",
        None => "nobody",
    };
    let least = asked.min_blocks.max(1);
    // A holder without any of the blocks sent may still hold the blocks before the first of them.
    if reply.unseen_blocks_max >= least {
        return format!("{whom} is known to hold a block that was sent\n");
    }
    match least {
        1 => format!("{whom} holds the first block\n"),
        _ => format!("{whom} holds the first {least} blocks\n"),
    }
}

/// Returns a line about the shards that did not answer; empty if all answered.
pub(super) fn describe_gathered(gathered: Option<&Gathered>) -> String {
    let Some(gathered) = gathered.filter(|gathered| !gathered.missing.is_empty()) else {
        return String::new();
    };
    let their = if gathered.missing.len() == 1 {
        "its"
    } else {
        "their"
    };
    format!(
        "incomplete: {} did not answer; {their} workers are left out\n",
        gathered.missing_in_words()
    )
}

fn holders_table(reply: &QueryReply, asked: &QueryOptions) -> TextTable {
    let mut columns = vec!["WORKER", ">RANK", ">BLOCKS", ">OF QUERY"];
    // The column is shown only if a request cannot reuse all matched blocks of some holder, which is rare.
    let has_unusable = reply
        .holders
        .iter()
        .any(|holder| holder.usable() != holder.matched_blocks);
    if has_unusable {
        columns.push(">USABLE");
    }
    if asked.tiers {
        columns.extend([">ON DEVICE", ">AND HOST"]);
    }
    columns.push("STATE");
    let has_addresses = reply.holders.iter().any(|holder| holder.address.is_some());
    if has_addresses {
        columns.push("ADDRESS");
    }
    if asked.explain {
        columns.push("LIMITED BY");
        columns.push("DROPPED OUT");
    }
    let mut table = TextTable::new(&columns);
    for holder in &reply.holders {
        let mut row = vec![
            holder.worker.to_string(),
            holder.rank.to_string(),
            span(holder, |blocks| blocks.to_string()),
            span(holder, |blocks| percent(blocks, reply.query_blocks)),
        ];
        if has_unusable {
            row.push(holder.usable().to_string());
        }
        if asked.tiers {
            // An older daemon does not tell these numbers.
            let near = [holder.device_blocks, holder.host_blocks];
            row.extend(near.map(|blocks| blocks.map_or("-".to_owned(), |blocks| blocks.to_string())));
        }
        row.push(describe_state(holder.exact, holder.degraded));
        if has_addresses {
            row.push(describe_address(holder.address.as_ref()));
        }
        let limit = holder.limited_by;
        row.push(limit.map_or("-".to_owned(), |limit| limit.as_str().replace('_', " ")));
        let drop_out = holder.dropped_out.as_ref();
        row.push(drop_out.map_or("-".to_owned(), describe_drop_out));
        table.push(row);
    }
    table
}

/// Returns a line about the workers that routers expect to have more of the prompt soon; empty if there are none.
fn predicted_line(reply: &QueryReply) -> String {
    let each = reply.predicted.iter().map(|found| {
        let blocks = counted(found.blocks.into(), "block", "blocks");
        format!("{}/{} {blocks}", found.worker, found.rank)
    });
    match each.collect::<Vec<_>>().join(", ") {
        none if none.is_empty() => none,
        listed => format!("predicted, by what routers have hinted, and not known yet: {listed}\n"),
    }
}

/// Returns the holder's number of matched blocks as text. If the query gave only some of the blocks, returns the bounds
/// of that number. `show` formats a number.
fn span(holder: &HolderMatch, show: impl Fn(u32) -> String) -> String {
    match holder.matched_blocks_max {
        None => show(holder.matched_blocks),
        Some(most) => format!("{}–{}", show(holder.matched_blocks), show(most)),
    }
}

/// Returns the share of `part` in `whole` in whole percents. It is rounded down, so that only a full match is 100 %.
fn percent(part: u32, whole: u32) -> String {
    let percent = u64::from(part) * 100 / u64::from(whole.max(1));
    format!("{percent} %")
}

fn describe_drop_out(drop_out: &DropOut) -> String {
    format!(
        "at block {}, which {} ({})",
        drop_out.position,
        counted(drop_out.other_holders.into(), "other has", "others have"),
        drop_out.lineage_hash
    )
}

/// Returns the answers to a batch of queries as text for a person. `asked` has the options of each query.
pub(super) fn render_results(results: &[QueryResult], asked: &[QueryOptions]) -> String {
    let numbered = results.iter().zip(asked).zip(1_usize..);
    let texts: Vec<String> = numbered
        .map(|((result, asked), number)| match result {
            QueryResult::Reply(reply) => format!("query {number}: {}", render_reply(reply, asked)),
            QueryResult::Error(error) => format!(
                "query {number}: refused: {} (error {})\n",
                printable(&error.text),
                error.code
            ),
        })
        .collect();
    texts.join("\n")
}

/// Fails if a query was refused, or if the number of answers is not `asked`.
pub(super) fn check_results(results: &[QueryResult], asked: usize) -> Result<(), Failure> {
    if results.len() != asked {
        let answers = results.len();
        return Err(Failure::failed(format_args!(
            "the daemon gave {answers} answers to {asked} queries"
        )));
    }
    let refused = results
        .iter()
        .filter(|result| matches!(result, QueryResult::Error(_)))
        .count();
    match refused {
        0 => Ok(()),
        refused => Err(Failure::failed(format_args!(
            "{refused} of {asked} queries were refused; correct them"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use kvatlas_core::wire::{DegradedReason, DegradedReasons, ErrorBody, WorkerName};

    use super::*;

    fn reply() -> QueryReply {
        let holder = |worker: &str, matched_blocks, degraded: DegradedReasons| HolderMatch {
            exact: degraded.is_empty(),
            degraded,
            ..HolderMatch::new(WorkerName::new(worker).unwrap(), 0, matched_blocks)
        };
        let dropped_out = DropOut {
            position: 12,
            lineage_hash: "3fc91a2b3c4d5e6f785cba9876543210".parse().unwrap(),
            other_holders: 1,
        };
        QueryReply {
            v: 1,
            behind_us: 0,
            predicted: Vec::new(),
            query_blocks: 64,
            block_size: 16,
            holders: vec![
                holder("gpu-0", 64, DegradedReasons::default()),
                HolderMatch {
                    dropped_out: Some(dropped_out),
                    ..holder("gpu-1", 12, DegradedReasons::of(DegradedReason::Gap))
                },
            ],
            holders_total: 5,
            foreign_holders: 0,
            doubtful_holders: 0,
            gathered: None,
            unseen_blocks_max: 0,
        }
    }

    fn asked(explain: bool) -> QueryOptions {
        QueryOptions {
            explain,
            ..QueryOptions::default()
        }
    }

    #[test]
    fn people_get_a_table() {
        let expected = "\
64 blocks asked for
WORKER  RANK  BLOCKS  OF QUERY  STATE
gpu-0      0      64     100 %  exact
gpu-1      0      12      18 %  degraded: gap
2 of 5 shown
";
        assert_eq!(render_reply(&reply(), &asked(false)), expected);
        let explained = render_reply(&reply(), &asked(true));
        let drop_out = "at block 12, which 1 other has (3fc91a2b3c4d5e6f785cba9876543210)";
        assert!(explained.contains(drop_out), "{explained}");
    }

    #[test]
    fn addresses_have_a_column_where_one_is_known() {
        let mut reply = reply();
        reply.holders[0].address = Some("10.0.0.7:8000".parse().unwrap());
        let expected = "\
64 blocks asked for
WORKER  RANK  BLOCKS  OF QUERY  STATE          ADDRESS
gpu-0      0      64     100 %  exact          10.0.0.7:8000
gpu-1      0      12      18 %  degraded: gap  -
2 of 5 shown
";
        assert_eq!(render_reply(&reply, &asked(false)), expected);
        let explained = render_reply(&reply, &asked(true));
        assert!(
            explained.contains("-              -           at block 12"),
            "{explained}"
        );
    }

    #[test]
    fn what_is_not_usable_has_a_column_of_its_own() {
        let mut reply = reply();
        reply.holders[0].usable_blocks = Some(48);
        let expected = "\
64 blocks asked for
WORKER  RANK  BLOCKS  OF QUERY  USABLE  STATE
gpu-0      0      64     100 %      48  exact
gpu-1      0      12      18 %      12  degraded: gap
2 of 5 shown
";
        assert_eq!(render_reply(&reply, &asked(false)), expected);
    }

    #[test]
    fn what_lies_near_has_columns_of_its_own() {
        let mut reply = reply();
        (reply.holders[0].device_blocks, reply.holders[0].host_blocks) = (Some(16), Some(64));
        let asked = QueryOptions {
            tiers: true,
            ..QueryOptions::default()
        };
        let expected = "\
64 blocks asked for
WORKER  RANK  BLOCKS  OF QUERY  ON DEVICE  AND HOST  STATE
gpu-0      0      64     100 %         16        64  exact
gpu-1      0      12      18 %          -         -  degraded: gap
2 of 5 shown
";
        assert_eq!(render_reply(&reply, &asked), expected);
    }

    #[test]
    fn an_empty_answer_says_so() {
        let empty = QueryReply {
            holders: Vec::new(),
            holders_total: 0,
            foreign_holders: 2,
            doubtful_holders: 0,
            ..reply()
        };
        let text = render_reply(&empty, &asked(false));
        assert!(text.contains("nobody holds the first block"), "{text}");
        assert!(text.contains("2 cannot be found this way"), "{text}");
        let of_workers = QueryOptions {
            workers: Some(vec![WorkerName::new("gpu-5").unwrap()]),
            ..asked(false)
        };
        let text = render_reply(&empty, &of_workers);
        assert!(
            text.contains("none of these workers holds the first block\n"),
            "{text}"
        );
        // The query gave the positions 4 and 64.
        let sparse = QueryReply {
            unseen_blocks_max: 4,
            ..empty
        };
        let text = render_reply(&sparse, &asked(false));
        assert!(
            text.contains("nobody is known to hold a block that was sent\n"),
            "{text}"
        );
        let of_five = QueryOptions {
            min_blocks: 5,
            ..asked(false)
        };
        let text = render_reply(&sparse, &of_five);
        assert!(text.contains("nobody holds the first 5 blocks\n"), "{text}");
    }

    #[test]
    fn shards_that_did_not_answer_are_named() {
        let gathered = |missing| {
            let gathered = Gathered { shards: 3, missing };
            let reply = QueryReply {
                gathered: Some(gathered),
                ..reply()
            };
            render_reply(&reply, &asked(false))
        };
        for (missing, expected) in [
            (vec![2], "shard 2 of 3 did not answer; its workers are left out\n"),
            (
                vec![0, 2],
                "shards 0 and 2 of 3 did not answer; their workers are left out\n",
            ),
            (
                vec![0, 1, 2],
                "shards 0, 1 and 2 of 3 did not answer; their workers are left out\n",
            ),
        ] {
            let text = gathered(missing);
            assert!(text.ends_with(&format!("incomplete: {expected}")), "{text}");
        }
        assert!(!gathered(Vec::new()).contains("incomplete"));
    }

    #[test]
    fn bounds_are_shown_as_spans() {
        let mut bounded = reply();
        bounded.holders[1].matched_blocks_max = Some(16);
        bounded.unseen_blocks_max = 3;
        let text = render_reply(&bounded, &asked(false));
        assert!(
            text.contains("gpu-1      0   12–16  18 %–25 %  degraded: gap\n"),
            "{text}"
        );
        assert!(
            text.contains("is not shown, and holds at most 3 blocks\n"),
            "{text}"
        );
    }

    #[test]
    fn a_batch_has_an_answer_for_each_query() {
        let refused = ErrorBody {
            code: 400,
            text: "no\u{1b}".into(),
        };
        let results = [QueryResult::Reply(reply()), QueryResult::Error(refused)];
        let text = render_results(&results, &[asked(false), asked(false)]);
        assert!(text.starts_with("query 1: 64 blocks asked for\n"), "{text}");
        assert!(text.ends_with("\nquery 2: refused: no (error 400)\n"), "{text}");
        assert!(check_results(&results, 2).is_err());
        assert!(check_results(&results[..1], 2).is_err());
        assert!(check_results(&results[..1], 1).is_ok());
    }
}
