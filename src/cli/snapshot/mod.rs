//! `kvatlas snapshot`: commands that read snapshot files.

mod export;
mod files;
mod inspect;

use clap::{Args, Subcommand};

use self::export::ExportArguments;
use self::inspect::InspectArguments;
use super::failure::Failure;

const INSPECT_EXAMPLES: &str = "\
Every checksum and every event is checked. The command fails if a snapshot is damaged, or
a directory has none.

Examples:
  kvatlas snapshot inspect /var/lib/kvatlas
  kvatlas snapshot inspect /backup/*.kvs && echo usable
  kvatlas snapshot inspect /var/lib/kvatlas/snapshot-00001767225600000000.kvs --json";

const EXPORT_EXAMPLES: &str = "\
The first line is {\"snapshot\":...}, then come {\"stream\":...} for each JetStream stream,
and {\"holder\":...} for each holder, followed by its batches: lines that `kvatlas publish`
takes. Batches of holders that were written together come later, each behind a line
{\"continued\":...} that says whose it is. A holder that comes again replaces what came
before. The last line is {\"end\":...}; without it the snapshot is not whole.

Examples:
  kvatlas snapshot export /var/lib/kvatlas/snapshot-00001767225600000000.kvs
  kvatlas snapshot export a.kvs --worker gpu-0 | jq -c .holder.blocks?";

/// Command for snapshots.
#[derive(Debug, Args)]
pub(crate) struct SnapshotArguments {
    #[command(subcommand)]
    command: SnapshotCommand,
}

#[derive(Debug, Subcommand)]
enum SnapshotCommand {
    /// Check snapshots, and print what they hold.
    #[command(visible_alias = "verify", after_help = INSPECT_EXAMPLES)]
    Inspect(InspectArguments),
    /// Print all that a snapshot holds as JSON lines.
    #[command(after_help = EXPORT_EXAMPLES)]
    Export(ExportArguments),
}

/// Runs the chosen command.
pub(crate) fn snapshot(arguments: &SnapshotArguments) -> Result<(), Failure> {
    match &arguments.command {
        SnapshotCommand::Inspect(arguments) => inspect::inspect(arguments),
        SnapshotCommand::Export(arguments) => export::export(arguments),
    }
}
