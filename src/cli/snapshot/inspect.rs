//! `kvatlas snapshot inspect`: checks snapshot files, and prints a summary of their content.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use clap::Args;
use kvatlas_core::snapshot::{
    HolderSummary, SnapshotError, SnapshotSummary, SnapshotTotals, StreamCursor, summarise,
};
use kvatlas_core::wire::{DegradedReasons, NamespaceName};
use serde_json::{Value, json};

use super::super::failure::Failure;
use super::super::output::{print, print_json};
use super::super::status_report::describe_state;
use super::super::table::TextTable;
use super::super::text::{counted, printable};
use super::files::{cannot_open, file_limits, open_listed, snapshots_in};
use kvatlas_client::rfc3339;
use kvatlas_process::storage::open_regular;

#[derive(Debug, Args)]
pub(super) struct InspectArguments {
    /// Snapshots, or directories of them.
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Checks each snapshot that is named or in a named directory, and prints a summary. Fails if any of them cannot be
/// used, or if a named directory has none.
pub(super) fn inspect(arguments: &InspectArguments) -> Result<(), Failure> {
    match arguments.paths.as_slice() {
        [path] if !path.is_dir() => inspect_file(path, arguments.json),
        paths => inspect_all(paths, arguments.json),
    }
}

fn inspect_file(path: &Path, in_json: bool) -> Result<(), Failure> {
    let file = open_regular(path).map_err(|error| cannot_open(path, &error))?;
    let checked = check(file);
    if in_json {
        print_json(&inspection_json(path, &checked))?;
    } else if let Ok(summary) = &checked {
        print(&render_summary(path, summary))?;
    }
    checked
        .map(|_| ())
        .map_err(|error| Failure::failed(format_args!("{}: {error}", path.display())))
}

fn inspect_all(paths: &[PathBuf], in_json: bool) -> Result<(), Failure> {
    let mut checked: Vec<(PathBuf, Result<SnapshotSummary, SnapshotError>)> = Vec::new();
    let mut empty = None;
    for path in paths {
        if !path.is_dir() {
            checked.push((
                path.clone(),
                open_regular(path).map_err(SnapshotError::Io).and_then(check),
            ));
            continue;
        }
        let before = checked.len();
        for path in snapshots_in(path)? {
            if let Some(opened) = open_listed(&path) {
                checked.push((path, opened.and_then(check)));
            }
        }
        empty = empty.or((checked.len() == before).then_some(path));
    }
    if in_json {
        let snapshots: Vec<_> = checked
            .iter()
            .map(|(path, checked)| inspection_json(path, checked))
            .collect();
        print_json(&json!({ "snapshots": snapshots }))?;
    } else if !checked.is_empty() {
        print(&render_list(&checked, paths.len() > 1))?;
    }
    match (
        checked.iter().filter(|(_, checked)| checked.is_err()).count(),
        empty,
    ) {
        (0, None) => Ok(()),
        (0, Some(directory)) => Err(Failure::failed(format_args!(
            "there are no snapshots in {}; name where a daemon writes them (snapshots.directory)",
            directory.display()
        ))),
        (damaged, _) => Err(Failure::failed(format_args!(
            "{damaged} of {} cannot be used; remove or replace what is damaged",
            counted(checked.len() as u64, "snapshot", "snapshots")
        ))),
    }
}

fn check(file: File) -> Result<SnapshotSummary, SnapshotError> {
    summarise(BufReader::new(file), &file_limits())
}

fn render_summary(path: &Path, summary: &SnapshotSummary) -> String {
    let content = &summary.content;
    let totals = content.totals;
    let mut table = TextTable::new(&[
        "NAMESPACE",
        "WORKER",
        ">RANK",
        ">EPOCH",
        ">SEQ",
        ">BLOCKS",
        ">BATCHES",
        "STATE",
    ]);
    for holder in &summary.holders {
        let (frame, degraded) = (
            &holder.holder,
            DegradedReasons::from_bits(holder.holder.degraded_bits),
        );
        table.push(vec![
            frame.namespace.to_string(),
            frame.worker.to_string(),
            frame.rank.to_string(),
            frame.epoch.to_string(),
            frame.seq.to_string(),
            frame.blocks.to_string(),
            match frame.forest {
                Some(_) => "forest".to_owned(),
                None => holder.batches.to_string(),
            },
            describe_state(degraded.is_empty(), degraded),
        ]);
    }
    format!(
        "{}: format version {}, begun {}, all checksums right\n{}{}, {}, {}{}\n{}",
        path.display(),
        content.version,
        rfc3339(content.created_us),
        content.streams.iter().map(describe_stream).collect::<String>(),
        counted(totals.holders, "holder", "holders"),
        counted(totals.batches, "batch", "batches"),
        counted(totals.blocks, "block", "blocks"),
        describe_forests(totals),
        if summary.holders.is_empty() {
            String::new()
        } else {
            table.render()
        }
    )
}

fn describe_forests(totals: SnapshotTotals) -> String {
    match totals.forest_runs {
        0 => String::new(),
        runs => format!(
            "\nforests: {} of {}",
            counted(runs, "run", "runs"),
            counted(totals.forest_blocks, "distinct block", "distinct blocks")
        ),
    }
}

fn describe_stream(cursor: &StreamCursor) -> String {
    format!(
        "stream {} of {}, up to message {}\n",
        printable(&cursor.stream),
        rfc3339(cursor.created_us),
        cursor.sequence
    )
}

/// Renders a line for each snapshot. It begins with the snapshot's name, or with its path if `by_path` is set.
fn render_list(checked: &[(PathBuf, Result<SnapshotSummary, SnapshotError>)], by_path: bool) -> String {
    let mut table = TextTable::new(&["SNAPSHOT", "BEGUN", ">NAMESPACES", ">HOLDERS", ">BLOCKS", "STATE"]);
    for (path, checked) in checked {
        let name = path.file_name().filter(|_| !by_path).unwrap_or(path.as_os_str());
        let name = name.to_string_lossy().into_owned();
        table.push(match checked {
            Ok(summary) => vec![
                name,
                rfc3339(summary.content.created_us),
                namespaces(summary).to_string(),
                summary.content.totals.holders.to_string(),
                summary.content.totals.blocks.to_string(),
                "whole".to_owned(),
            ],
            Err(error) => {
                let unknown = || "-".to_owned();
                vec![
                    name,
                    unknown(),
                    unknown(),
                    unknown(),
                    unknown(),
                    error.to_string(),
                ]
            }
        });
    }
    table.render()
}

fn namespaces(summary: &SnapshotSummary) -> usize {
    let mut names: Vec<&NamespaceName> = summary
        .holders
        .iter()
        .map(|holder| &holder.holder.namespace)
        .collect();
    names.sort_unstable();
    names.dedup();
    names.len()
}

/// Returns one snapshot, as the JSON output shows it.
fn inspection_json(path: &Path, checked: &Result<SnapshotSummary, SnapshotError>) -> Value {
    let mut inspection = match checked {
        Ok(summary) => content_json(summary),
        Err(error) => json!({ "error": error.to_string() }),
    };
    inspection["path"] = path.display().to_string().into();
    inspection["whole"] = checked.is_ok().into();
    inspection
}

fn content_json(summary: &SnapshotSummary) -> Value {
    let content = &summary.content;
    let holders = summary.holders.iter().map(|HolderSummary { holder, batches }| {
        json!({
            "namespace": holder.namespace,
            "worker": holder.worker,
            "rank": holder.rank,
            "epoch": holder.epoch,
            "seq": holder.seq,
            "blocks": holder.blocks,
            "batches": batches,
            "in_forest": holder.forest.is_some(),
            "degraded": DegradedReasons::from_bits(holder.degraded_bits),
        })
    });
    json!({
        "version": content.version,
        "created_us": content.created_us,
        "streams": content.streams,
        "totals": content.totals,
        "holders": holders.collect::<Value>(),
    })
}

#[cfg(test)]
mod tests {
    use kvatlas_core::index::Hashing;
    use kvatlas_core::snapshot::{HolderFrame, InForest, SnapshotContent};
    use kvatlas_core::wire::{Labels, Tier, WorkerName};

    use super::*;

    fn summary() -> SnapshotSummary {
        let holder = HolderFrame {
            namespace: NamespaceName::new("llama").unwrap(),
            worker: WorkerName::new("gpu-0").unwrap(),
            rank: 1,
            epoch: 7,
            seq: 12,
            degraded_bits: 1,
            blocks: 1024,
            hashing: Hashing::Engine,
            block_size: 16,
            is_size_told: false,
            foreign_chain: false,
            made_us: None,
            seen_us: None,
            address: None,
            labels: Labels::NONE,
            forest: None,
        };
        SnapshotSummary {
            content: SnapshotContent {
                version: 3,
                created_us: 951_782_400_000_000,
                streams: vec![StreamCursor {
                    stream: "EVENTS".to_owned(),
                    created_us: 951_782_400_000_000,
                    sequence: 17,
                    digest: None,
                    intake: None,
                    has_all: true,
                    server: None,
                }],
                totals: SnapshotTotals {
                    holders: 1,
                    batches: 2,
                    blocks: 1024,
                    ..SnapshotTotals::default()
                },
            },
            holders: vec![HolderSummary { holder, batches: 2 }],
        }
    }

    #[test]
    fn a_snapshot_is_a_heading_and_its_holders() {
        let expected = "\
a.kvs: format version 3, begun 2000-02-29T00:00:00Z, all checksums right
stream EVENTS of 2000-02-29T00:00:00Z, up to message 17
1 holder, 2 batches, 1024 blocks
NAMESPACE  WORKER  RANK  EPOCH  SEQ  BLOCKS  BATCHES  STATE
llama      gpu-0      1      7   12    1024        2  degraded: gap
";
        assert_eq!(render_summary(Path::new("a.kvs"), &summary()), expected);
    }

    #[test]
    fn a_forest_is_counted_once() {
        let mut summary = summary();
        let totals = &mut summary.content.totals;
        (totals.forest_runs, totals.forest_blocks) = (1, 512);
        for summary in &mut summary.holders {
            summary.holder.forest = Some(InForest {
                number: 0,
                tier: Tier::DEVICE,
            });
        }
        let text = render_summary(Path::new("a.kvs"), &summary);
        assert!(text.contains("1024 blocks\nforests: 1 run of 512 distinct blocks\nNAMESPACE"));
        assert!(text.contains(" forest  degraded: gap\n"), "{text}");
    }

    #[test]
    fn a_list_names_the_damaged() {
        let checked = [
            (PathBuf::from("d/b.kvs"), Ok(summary())),
            (PathBuf::from("d/a.kvs"), Err(SnapshotError::NotASnapshot)),
        ];
        let expected = "\
SNAPSHOT  BEGUN                 NAMESPACES  HOLDERS  BLOCKS  STATE
b.kvs     2000-02-29T00:00:00Z           1        1    1024  whole
a.kvs     -                              -        -       -  this is not a kvatlas snapshot
";
        assert_eq!(render_list(&checked, false), expected);
        let by_path = render_list(&checked, true);
        assert!(
            by_path.contains("\nd/b.kvs   2000") && by_path.contains("\nd/a.kvs   - "),
            "{by_path}"
        );
    }

    fn inspected(paths: &[&Path]) -> Result<(), Failure> {
        let paths = paths.iter().map(|path| path.to_path_buf()).collect();
        inspect(&InspectArguments { paths, json: false })
    }

    #[test]
    fn a_directory_without_snapshots_fails() {
        let folder = tempfile::tempdir().unwrap();
        let failure = inspected(&[folder.path()]).unwrap_err().to_string();
        assert!(failure.starts_with("there are no snapshots in /"), "{failure}");
    }

    #[test]
    fn a_file_that_cannot_be_opened_does_not_hide_the_others() {
        let folder = tempfile::tempdir().unwrap();
        // A name that leads nowhere.
        let link = folder.path().join("b.kvs");
        std::os::unix::fs::symlink("nowhere", &link).unwrap();
        std::fs::write(folder.path().join("a.kvs"), "damaged").unwrap();
        for paths in [&[folder.path()][..], &[&link, &folder.path().join("a.kvs")]] {
            let failure = inspected(paths).unwrap_err();
            assert!(failure.to_string().starts_with("2 of 2 snapshots"), "{failure}");
        }
        let alone = inspected(&[&link]).unwrap_err();
        assert_eq!(alone.status, super::super::super::ExitStatus::Usage);
    }

    #[test]
    fn programs_get_reasons_as_words() {
        let checked = Ok(summary());
        let json = inspection_json(Path::new("a.kvs"), &checked);
        assert_eq!(json["whole"], true);
        assert_eq!(json["holders"][0]["degraded"], serde_json::json!(["gap"]));
        let checked = Err(SnapshotError::HeaderChecksum);
        let json = inspection_json(Path::new("a.kvs"), &checked);
        assert_eq!(json["whole"], false);
        assert!(json.get("version").is_none() && json["error"].is_string());
    }
}
