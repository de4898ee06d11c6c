//! `kvatlas snapshot verify`: tells which snapshot files can be used.

use std::io::BufReader;
use std::path::{Path, PathBuf};

use clap::Args;
use kvatlas_core::snapshot::{SnapshotContent, SnapshotError};

use super::super::failure::Failure;
use super::super::output::print;
use super::super::text::counted;
use super::files::{cannot_open, file_limits, snapshots_in};
use kvatlas_process::storage::open_regular;

#[derive(Debug, Args)]
pub(super) struct VerifyArguments {
    /// Snapshots, or directories of them.
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<PathBuf>,
}

/// Checks each snapshot that is named or in a named directory, and prints a line about it. Fails if any of them cannot be used.
pub(super) fn verify(arguments: &VerifyArguments) -> Result<(), Failure> {
    let mut files = Vec::new();
    for path in &arguments.paths {
        if !path.is_dir() {
            files.push(path.clone());
            continue;
        }
        let found = snapshots_in(path)?;
        if found.is_empty() {
            // A directory without snapshots is no failure, as in `inspect`.
            print(&format!("there are no snapshots in {}\n", path.display()))?;
        }
        files.extend(found);
    }
    let mut damaged = 0;
    for path in &files {
        let checked = match open_regular(path) {
            // If the only path that was named cannot be opened, the command fails with that error.
            Err(error) if arguments.paths == [path.clone()] => return Err(cannot_open(path, &error)),
            Err(error) => Err(SnapshotError::Io(error)),
            Ok(file) => {
                let reader = BufReader::with_capacity(1 << 20, file);
                kvatlas_core::snapshot::verify(reader, &file_limits())
            }
        };
        damaged += usize::from(checked.is_err());
        print(&verdict(path, &checked))?;
    }
    if damaged == 0 {
        return Ok(());
    }
    Err(Failure::failed(format_args!(
        "{damaged} of {} cannot be used; remove or replace what is damaged",
        counted(files.len() as u64, "snapshot", "snapshots")
    )))
}

fn verdict(path: &Path, checked: &Result<SnapshotContent, SnapshotError>) -> String {
    match checked {
        Ok(content) => format!(
            "{}: whole, {}, {}\n",
            path.display(),
            counted(content.totals.holders, "holder", "holders"),
            counted(content.totals.blocks, "block", "blocks")
        ),
        Err(error) => format!("{}: {error}\n", path.display()),
    }
}

#[cfg(test)]
mod tests {
    use kvatlas_core::snapshot::SnapshotTotals;

    use super::*;

    fn verified(paths: &[&Path]) -> Result<(), Failure> {
        let paths = paths.iter().map(|path| path.to_path_buf()).collect();
        verify(&VerifyArguments { paths })
    }

    #[test]
    fn nothing_is_damaged_in_an_empty_directory() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(verified(&[folder.path()]), Ok(()));
    }

    #[test]
    fn a_file_that_cannot_be_opened_does_not_hide_the_others() {
        let folder = tempfile::tempdir().unwrap();
        // A name that leads nowhere.
        std::os::unix::fs::symlink("nowhere", folder.path().join("b.kvs")).unwrap();
        std::fs::write(folder.path().join("a.kvs"), "damaged").unwrap();
        let failure = verified(&[folder.path()]).unwrap_err();
        assert!(failure.to_string().starts_with("2 of 2 snapshots"), "{failure}");
        let alone = verified(&[&folder.path().join("b.kvs")]).unwrap_err();
        assert_eq!(alone.status, super::super::super::ExitStatus::Usage);
    }

    #[test]
    fn the_verdict_is_a_line() {
        let content = SnapshotContent {
            version: 3,
            created_us: 1,
            streams: Vec::new(),
            totals: SnapshotTotals {
                holders: 1,
                batches: 2,
                blocks: 3,
                ..SnapshotTotals::default()
            },
        };
        assert_eq!(
            verdict(Path::new("a.kvs"), &Ok(content)),
            "a.kvs: whole, 1 holder, 3 blocks\n"
        );
        assert_eq!(
            verdict(Path::new("b.kvs"), &Err(SnapshotError::HeaderChecksum)),
            "b.kvs: the header's checksum does not match\n"
        );
    }
}
