//! `kvatlas snapshot verify`: tells which snapshot files can be used.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use clap::Args;
use kvatlas_core::snapshot::{SnapshotContent, SnapshotError};

use super::super::failure::Failure;
use super::super::output::print;
use super::super::text::counted;
use super::files::{cannot_open, file_limits, open_listed, snapshots_in};
use kvatlas_process::storage::open_regular;

#[derive(Debug, Args)]
pub(super) struct VerifyArguments {
    /// Snapshots, or directories of them.
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<PathBuf>,
}

/// Checks each snapshot that is named or in a named directory, and prints a line about it. Fails if any of them cannot
/// be used, or if a named directory has none.
pub(super) fn verify(arguments: &VerifyArguments) -> Result<(), Failure> {
    let mut counts = VerifiedCounts::default();
    for path in &arguments.paths {
        if path.is_dir() {
            counts.check_directory(path)?;
            continue;
        }
        match open_regular(path) {
            // If the only path that was named cannot be opened, the command fails with that error.
            Err(error) if arguments.paths.len() == 1 => return Err(cannot_open(path, &error)),
            opened => counts.check(path, opened.map_err(SnapshotError::Io))?,
        }
    }
    counts.check_all()
}

/// Numbers of the snapshots and directories that were checked.
#[derive(Debug, Default)]
struct VerifiedCounts {
    snapshots: u64,
    /// Snapshots that cannot be used.
    damaged: u64,
    /// Directories without snapshots.
    empty: u64,
}

impl VerifiedCounts {
    fn check_directory(&mut self, directory: &Path) -> Result<(), Failure> {
        let before = self.snapshots;
        for path in snapshots_in(directory)? {
            if let Some(opened) = open_listed(&path) {
                self.check(&path, opened)?;
            }
        }
        if self.snapshots == before {
            self.empty += 1;
            print(&format!("there are no snapshots in {}\n", directory.display()))?;
        }
        Ok(())
    }

    fn check(&mut self, path: &Path, opened: Result<File, SnapshotError>) -> Result<(), Failure> {
        let checked = opened.and_then(|file| {
            let reader = BufReader::with_capacity(1 << 20, file);
            kvatlas_core::snapshot::verify(reader, &file_limits())
        });
        self.snapshots += 1;
        self.damaged += u64::from(checked.is_err());
        print(&verdict(path, &checked))
    }

    fn check_all(&self) -> Result<(), Failure> {
        if self.damaged > 0 {
            return Err(Failure::failed(format_args!(
                "{} of {} cannot be used; remove or replace what is damaged",
                self.damaged,
                counted(self.snapshots, "snapshot", "snapshots")
            )));
        }
        match self.empty {
            0 => Ok(()),
            empty => Err(Failure::failed(format_args!(
                "{} no snapshots; name where a daemon writes them (snapshots.directory)",
                counted(empty, "directory has", "directories have")
            ))),
        }
    }
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
    fn a_directory_without_snapshots_fails() {
        let folder = tempfile::tempdir().unwrap();
        let failure = verified(&[folder.path()]).unwrap_err();
        assert!(
            failure.to_string().starts_with("1 directory has no snapshots"),
            "{failure}"
        );
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
