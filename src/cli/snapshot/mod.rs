//! `kvatlas snapshot`: looking into snapshot files.

mod export;
mod inspect;
mod verify;

use std::fmt::Display;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use kvatlas_core::wire::WireLimits;

use self::export::ExportArguments;
use self::inspect::InspectArguments;
use self::verify::VerifyArguments;
use super::failure::Failure;

const INSPECT_EXAMPLES: &str = "\
Every checksum and every event is checked. The command fails if a snapshot is damaged.

Examples:
  kvatlas snapshot inspect /var/lib/kvatlas
  kvatlas snapshot inspect /var/lib/kvatlas/snapshot-00001767225600000000.kvs --json";

const VERIFY_EXAMPLES: &str = "\
Every frame is read and every event decoded. Prints a line for each snapshot, and fails if
one is damaged or a directory has none.

Examples:
  kvatlas snapshot verify /var/lib/kvatlas
  kvatlas snapshot verify /backup/*.kvs && echo usable";

const EXPORT_EXAMPLES: &str = "\
The first line is {\"snapshot\":...}, then come {\"stream\":...} for each JetStream stream,
and {\"holder\":...} for each holder, followed by its batches: lines that `kvatlas publish`
takes. Batches of holders that were written together come later, each behind a line
{\"continued\":...} that says whose it is. A holder that comes again replaces what came
before. The last line is {\"end\":...}; without it the snapshot is not whole.

Examples:
  kvatlas snapshot export /var/lib/kvatlas/snapshot-00001767225600000000.kvs
  kvatlas snapshot export a.kvs --worker gpu-0 | jq -c .holder.blocks?";

/// What names of snapshots end with.
const EXTENSION: &str = "kvs";

/// What to do with snapshots.
#[derive(Debug, Args)]
pub(crate) struct SnapshotArguments {
    #[command(subcommand)]
    command: SnapshotCommand,
}

#[derive(Debug, Subcommand)]
enum SnapshotCommand {
    /// Check snapshots, and print what they hold.
    #[command(after_help = INSPECT_EXAMPLES)]
    Inspect(InspectArguments),
    /// Check snapshots, and say which can be used.
    #[command(after_help = VERIFY_EXAMPLES)]
    Verify(VerifyArguments),
    /// Print all that a snapshot holds as JSON lines.
    #[command(after_help = EXPORT_EXAMPLES)]
    Export(ExportArguments),
}

/// Does it.
pub(crate) fn snapshot(arguments: &SnapshotArguments) -> Result<(), Failure> {
    match &arguments.command {
        SnapshotCommand::Inspect(arguments) => inspect::inspect(arguments),
        SnapshotCommand::Verify(arguments) => verify::verify(arguments),
        SnapshotCommand::Export(arguments) => export::export(arguments),
    }
}

fn cannot_open(path: &Path, error: &dyn Display) -> Failure {
    Failure::usage(format_args!(
        "cannot open {path:?}: {error}; name a snapshot or a directory of them"
    ))
}

/// The files of a directory that are named like snapshots, newest first.
fn snapshots_in(directory: &Path) -> Result<Vec<PathBuf>, Failure> {
    let unreadable = |error| Failure::usage(format_args!("cannot read the directory {directory:?}: {error}"));
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        if path.extension().is_some_and(|extension| extension == EXTENSION) {
            paths.push(path);
        }
    }
    // Names carry the time in a fixed width.
    paths.sort_unstable_by(|one, other| other.cmp(one));
    Ok(paths)
}

/// The daemon's limits don't matter: what a snapshot holds is to be seen in any case. A frame is bounded all the same.
fn file_limits() -> WireLimits {
    WireLimits {
        message_bytes_max: usize::MAX,
        events_max: usize::MAX,
        blocks_per_event_max: usize::MAX,
        ..WireLimits::default()
    }
}
