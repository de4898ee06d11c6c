//! Engines in files: in one file, or in all `*.toml` of a folder, in the form of `--engines-file`.
//!
//! Files are polled rather than watched. This works with every file system, and with a ConfigMap, whose files are links to a
//! folder that is replaced as a whole. If a file cannot be used, the known engines stay.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use kvatlas_process::registry::GivenEngine;

use super::super::spec::{EngineDefaults, SpecError, parse_engines_file};
use super::reports::Reports;

/// Maximum number of files of a folder.
const FILES_MAX: usize = 1024;
/// Age from which a file's [`FileMark`] can be trusted. A younger file may change again and keep its mark, because file
/// systems have coarse clocks.
const SETTLED_AFTER: Duration = Duration::from_secs(2);

#[derive(Debug, thiserror::Error)]
enum EngineFileError {
    #[error("cannot look at {}: {source}", path.display())]
    Look { path: PathBuf, source: io::Error },
    #[error("{} is no regular file", path.display())]
    Irregular { path: PathBuf },
    #[error("{} is being written", path.display())]
    Changing { path: PathBuf },
    #[error("{} has more than {FILES_MAX} files", path.display())]
    TooMany { path: PathBuf },
    #[error(transparent)]
    Spec(#[from] SpecError),
}

/// Mark (path, device, inode, size, time of change) by which versions of a file are told apart. A changed or replaced file has
/// another mark.
#[derive(Debug, Clone, PartialEq, Eq)]
struct FileMark {
    path: PathBuf,
    device: u64,
    inode: u64,
    bytes: u64,
    changed: (i64, i64),
}

impl FileMark {
    /// Makes the [`FileMark`] of a regular file, by which changes of the file are noticed. Other files are refused: for example,
    /// reading a pipe waits for a writer, and the bridge could not end meanwhile.
    fn new(path: PathBuf, metadata: &Metadata) -> Result<Self, EngineFileError> {
        if !metadata.is_file() {
            return Err(EngineFileError::Irregular { path });
        }
        Ok(Self {
            path,
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.len(),
            changed: (metadata.mtime(), metadata.mtime_nsec()),
        })
    }

    /// Whether the file was changed more than [`SETTLED_AFTER`] before the time `now_s`, which counts seconds since the
    /// Unix epoch.
    fn is_settled(&self, now_s: i64) -> bool {
        let settled_after = i64::try_from(SETTLED_AFTER.as_secs()).unwrap_or(i64::MAX);
        now_s.saturating_sub(self.changed.0) > settled_after
    }
}

/// Looks at `path` every `interval`, for ever, and reports its engines.
pub(super) async fn run(path: &Path, defaults: &EngineDefaults, interval: Duration, reports: &Reports) {
    let mut seen = None;
    loop {
        let (path, defaults) = (path.to_owned(), defaults.clone());
        let looked = tokio::task::spawn_blocking(move || {
            let found = look(&path, &defaults, seen.as_deref());
            (found, seen)
        });
        // An error here means that the runtime is ending.
        let Ok((found, before)) = looked.await else {
            return;
        };
        seen = match found {
            Ok(None) => before,
            Ok(Some((marks, engines))) => {
                reports.know(engines);
                marks
            }
            Err(error) => {
                reports.fail(&error);
                None
            }
        };
        tokio::time::sleep(interval).await;
    }
}

/// Marks ([`FileMark`]) and engines of all files that were read. The marks are `None` if a file is so new that it may
/// change and keep its mark.
type MarkedEngines = (Option<Vec<FileMark>>, Vec<GivenEngine>);

/// Reads the engines of all files. Returns `None` if no file has changed since the reading with the marks `seen`.
///
/// Returns an error if files change during the reading, or a file has just become empty: a program that rewrites a file
/// empties it first.
fn look(
    path: &Path,
    defaults: &EngineDefaults,
    seen: Option<&[FileMark]>,
) -> Result<Option<MarkedEngines>, EngineFileError> {
    let marks = marks(path)?;
    if seen == Some(&marks) {
        return Ok(None);
    }
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let now_s = i64::try_from(now.unwrap_or_default().as_secs()).unwrap_or(i64::MAX);
    let mut engines = Vec::new();
    for mark in &marks {
        if mark.bytes == 0 && !mark.is_settled(now_s) {
            return Err(EngineFileError::Changing {
                path: mark.path.clone(),
            });
        }
        engines.extend(parse_engines_file(&mark.path, defaults)?);
    }
    if self::marks(path)? != marks {
        return Err(EngineFileError::Changing {
            path: path.to_owned(),
        });
    }
    let marks = marks.iter().all(|mark| mark.is_settled(now_s)).then_some(marks);
    Ok(Some((marks, engines)))
}

fn marks(path: &Path) -> Result<Vec<FileMark>, EngineFileError> {
    let failed = |path: &Path, source| EngineFileError::Look {
        path: path.to_owned(),
        source,
    };
    let metadata = fs::metadata(path).map_err(|error| failed(path, error))?;
    if !metadata.is_dir() {
        return Ok(vec![FileMark::new(path.to_owned(), &metadata)?]);
    }
    let mut files = Vec::new();
    for entry in fs::read_dir(path).map_err(|error| failed(path, error))? {
        let file = entry.map_err(|error| failed(path, error))?.path();
        let is_hidden = file
            .file_name()
            .is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
        if !is_hidden && file.extension().is_some_and(|extension| extension == "toml") {
            files.push(file);
        }
        if files.len() > FILES_MAX {
            return Err(EngineFileError::TooMany {
                path: path.to_owned(),
            });
        }
    }
    files.sort();
    let mark = |file: PathBuf| match fs::metadata(&file) {
        Ok(metadata) => FileMark::new(file, &metadata),
        Err(error) => Err(failed(&file, error)),
    };
    files.into_iter().map(mark).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(path: &Path) -> Vec<String> {
        let (_, engines) = look(path, &EngineDefaults::default(), None).unwrap().unwrap();
        engines
            .iter()
            .map(|engine| engine.instance().to_owned())
            .collect()
    }

    fn text(name: &str) -> String {
        format!("[[engine]]\nname = \"{name}\"\nendpoint = \"http://h:1\"\n")
    }

    #[test]
    fn a_folder_has_the_engines_of_its_files() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("b.toml"), text("b")).unwrap();
        fs::write(folder.path().join("a.toml"), text("a")).unwrap();
        fs::write(folder.path().join(".c.toml"), "no TOML").unwrap();
        fs::write(folder.path().join("d.txt"), "no TOML").unwrap();
        assert_eq!(names(folder.path()), ["a", "b"]);
        assert_eq!(names(&folder.path().join("b.toml")), ["b"]);
        fs::write(folder.path().join("e.toml"), "no TOML").unwrap();
        let error = look(folder.path(), &EngineDefaults::default(), None).unwrap_err();
        assert!(
            matches!(&error, EngineFileError::Spec(SpecError::File { path, .. }) if path.ends_with("e.toml")),
            "{error}"
        );
        let missing = look(&folder.path().join("none"), &EngineDefaults::default(), None);
        assert!(matches!(missing, Err(EngineFileError::Look { .. })));
    }

    #[test]
    fn a_file_that_has_just_become_empty_is_being_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.toml");
        let file = fs::File::create(&path).unwrap();
        let error = look(&path, &EngineDefaults::default(), None).unwrap_err();
        assert!(matches!(error, EngineFileError::Changing { .. }), "{error}");
        file.set_modified(SystemTime::now() - 2 * SETTLED_AFTER).unwrap();
        assert_eq!(names(&path), [""; 0]);
    }

    #[test]
    fn only_regular_files_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("a.toml");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        for path in [folder.path(), &socket] {
            let error = look(path, &EngineDefaults::default(), None).unwrap_err();
            assert!(matches!(error, EngineFileError::Irregular { .. }), "{error}");
        }
    }

    /// A test that changes files as the kubelet changes a ConfigMap: it replaces the link to the folder, and leaves the
    /// files' own links as they are.
    #[test]
    fn files_behind_links_that_are_replaced_have_changed() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for (version, engine) in [("..1", "a"), ("..2", "b")] {
            fs::create_dir(at(version)).unwrap();
            fs::write(at(version).join("engines.toml"), text(engine)).unwrap();
        }
        std::os::unix::fs::symlink("..1", at("..data")).unwrap();
        std::os::unix::fs::symlink("..data/engines.toml", at("engines.toml")).unwrap();
        let seen = marks(folder.path()).unwrap();
        assert_eq!(names(folder.path()), ["a"]);
        assert!(
            look(folder.path(), &EngineDefaults::default(), Some(&seen))
                .unwrap()
                .is_none()
        );
        std::os::unix::fs::symlink("..2", at("..data_tmp")).unwrap();
        fs::rename(at("..data_tmp"), at("..data")).unwrap();
        let looked = look(folder.path(), &EngineDefaults::default(), Some(&seen)).unwrap();
        assert_eq!(looked.unwrap().1[0].instance(), "b");
    }

    #[test]
    fn what_was_changed_just_now_is_looked_at_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("engines.toml");
        fs::write(&path, text("a")).unwrap();
        let marks_of = || look(&path, &EngineDefaults::default(), None).unwrap().unwrap().0;
        assert_eq!(marks_of(), None);
        let old = SystemTime::now() - Duration::from_secs(60);
        fs::File::open(&path).unwrap().set_modified(old).unwrap();
        assert!(marks_of().is_some());
    }
}
