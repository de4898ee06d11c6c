//! Bearer tokens: reading them from files, and checking requests for them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderMap, HeaderValue};
use parking_lot::Mutex;

use kvatlas_config::{Live, Secret};

/// Maximum length of a token in a file, in bytes.
const TOKEN_BYTES_MAX: usize = 4096;

/// Reason why no token can be read from a file.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// Reading the file failed.
    #[error("cannot read {setting} {}: {source}", path.display())]
    Read {
        /// Name of the setting that gives the path of the token file.
        setting: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// Content of the file is not a token.
    #[error(
        "{setting} {} must have one line of 1 to {TOKEN_BYTES_MAX} visible ASCII characters",
        path.display()
    )]
    NoToken {
        /// Name of the setting that gives the path of the token file.
        setting: &'static str,
        /// Path of the file.
        path: PathBuf,
    },
}

/// Token of a file, which can be read again. Clones share the token.
#[derive(Debug, Clone)]
pub struct TokenFile {
    setting: &'static str,
    path: PathBuf,
    token: Live<Secret>,
}

impl TokenFile {
    /// Reads the token from the file that `setting` names. The file has one line. `None` if no file is named.
    ///
    /// # Errors
    ///
    /// [`TokenError`] if the file cannot be read, or its content is not a token.
    pub fn read(setting: &'static str, path: Option<&Path>) -> Result<Option<Self>, TokenError> {
        let Some(path) = path else {
            return Ok(None);
        };
        Ok(Some(Self {
            setting,
            path: path.to_owned(),
            token: Live::new(read_token(setting, path)?),
        }))
    }

    /// Makes a token that is in no file.
    #[cfg(all(test, feature = "redis"))]
    pub(crate) fn of(token: &str) -> Self {
        Self {
            setting: "test",
            path: PathBuf::new(),
            token: Live::new(Secret::new(token)),
        }
    }

    /// Lets `token` count from now on, as a reload does.
    #[cfg(all(test, feature = "redis"))]
    pub(crate) fn replace(&self, token: &str) {
        self.token.replace(Secret::new(token));
    }

    /// Whether a request has the token.
    pub(crate) fn allows(&self, headers: &HeaderMap) -> bool {
        is_allowed(headers, &self.token.now())
    }

    /// Returns the token if `given` equals it. [`Self::is_present`] tells later whether the token still counts.
    #[cfg(any(test, feature = "redis"))]
    pub(crate) fn accept(&self, given: &[u8]) -> Option<Arc<Secret>> {
        let token = Arc::clone(&self.token.now());
        is_same(given, token.expose().as_bytes()).then_some(token)
    }

    /// Whether no other token has replaced `token`, which [`Self::accept`] has returned.
    #[cfg(feature = "redis")]
    pub(crate) fn is_present(&self, token: &Arc<Secret>) -> bool {
        Arc::ptr_eq(&self.token.now(), token)
    }
}

/// Files with the tokens of a process's listeners.
#[derive(Debug, Clone, Default)]
pub struct TokenFiles(Arc<Mutex<Vec<TokenFile>>>);

impl TokenFiles {
    /// Reads a token as [`TokenFile::read`] does, and adds its file.
    ///
    /// # Errors
    ///
    /// As [`TokenFile::read`].
    pub fn read(&self, setting: &'static str, path: Option<&Path>) -> Result<Option<TokenFile>, TokenError> {
        let file = TokenFile::read(setting, path)?;
        self.0.lock().extend(file.clone());
        Ok(file)
    }

    /// Reads all files again, for [`ReadTokens::replace`].
    ///
    /// # Errors
    ///
    /// As [`TokenFile::read`].
    pub fn read_again(&self) -> Result<ReadTokens, TokenError> {
        self.read_again_except(&[])
    }

    /// Reads the files again as [`Self::read_again`] does, except those of the settings `moved`. These settings name
    /// other files now, which count after a restart, so the earlier files may be gone.
    ///
    /// # Errors
    ///
    /// As [`TokenFile::read`].
    pub fn read_again_except(&self, moved: &[&str]) -> Result<ReadTokens, TokenError> {
        let mut files = self.0.lock().clone();
        files.retain(|file| !moved.contains(&file.setting));
        let read = files.into_iter().map(|file| {
            let token = read_token(file.setting, &file.path)?;
            Ok((file, token))
        });
        Ok(ReadTokens(read.collect::<Result<_, _>>()?))
    }
}

/// Tokens that have been read again, and do not count yet.
#[derive(Debug)]
pub struct ReadTokens(Vec<(TokenFile, Secret)>);

impl ReadTokens {
    /// Lets these tokens count in place of the earlier ones. Returns the names of the settings whose tokens have
    /// changed.
    pub fn replace(self) -> Vec<&'static str> {
        let is_new = |(file, token): &(TokenFile, Secret)| **file.token.now() != *token;
        let changed = self.0.into_iter().filter(is_new);
        let replaced = changed.map(|(file, token)| {
            file.token.replace(token);
            file.setting
        });
        replaced.collect()
    }
}

fn read_token(setting: &'static str, path: &Path) -> Result<Secret, TokenError> {
    let text = std::fs::read_to_string(path).map_err(|source| TokenError::Read {
        setting,
        path: path.to_owned(),
        source,
    })?;
    let token = text.trim_end_matches(['\r', '\n']);
    let is_sound =
        (1..=TOKEN_BYTES_MAX).contains(&token.len()) && token.bytes().all(|byte| byte.is_ascii_graphic());
    if !is_sound {
        return Err(TokenError::NoToken {
            setting,
            path: path.to_owned(),
        });
    }
    Ok(Secret::new(token.to_owned()))
}

/// Scheme that stands before the token, compared without regard to case (RFC 9110, 11.1).
const SCHEME: &[u8] = b"Bearer ";

/// Whether a request has the token.
pub(crate) fn is_allowed(headers: &HeaderMap, token: &Secret) -> bool {
    let given = headers.get(AUTHORIZATION).map(HeaderValue::as_bytes);
    let given = given.and_then(|given| given.split_at_checked(SCHEME.len()));
    given.is_some_and(|(scheme, given)| {
        scheme.eq_ignore_ascii_case(SCHEME) && is_same(given.trim_ascii_start(), token.expose().as_bytes())
    })
}

/// Compares two texts in constant time: the time depends on their lengths only.
fn is_same(given: &[u8], token: &[u8]) -> bool {
    let differing = given
        .iter()
        .zip(token)
        .fold(0, |bits, (one, other)| bits | (one ^ other));
    given.len() == token.len() && std::hint::black_box(differing) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_token_opens() {
        let token = Secret::new("s3cret".to_owned());
        let asked = |value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(AUTHORIZATION, HeaderValue::from_static(value));
            is_allowed(&headers, &token)
        };
        for right in ["Bearer s3cret", "bearer s3cret", "BEARER  s3cret"] {
            assert!(asked(right), "{right}");
        }
        for wrong in [
            "Bearer s3cre",
            "Bearer s3creT",
            "Bearer s3cret ",
            "s3cret",
            "Basic s3cret",
            "",
        ] {
            assert!(!asked(wrong), "{wrong:?}");
        }
        assert!(!is_allowed(&HeaderMap::new(), &token));
    }

    #[test]
    fn a_token_is_one_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        let read = || read_token("http.token_file", &path);
        std::fs::write(&path, "abc\n").unwrap();
        assert_eq!(read().unwrap().expose(), "abc");
        for wrong in ["", "\n", "a b", "a\nb", "ä"] {
            std::fs::write(&path, wrong).unwrap();
            assert!(matches!(read(), Err(TokenError::NoToken { .. })), "{wrong:?}");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(read(), Err(TokenError::Read { .. })));
    }

    #[test]
    fn tokens_that_are_read_again_count_together_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let paths = ["one", "other"].map(|name| folder.path().join(name));
        let write = |tokens: [&str; 2]| {
            for (path, token) in paths.iter().zip(tokens) {
                std::fs::write(path, token).unwrap();
            }
        };
        write(["a", "b"]);
        let files = TokenFiles::default();
        let one = files.read("http.token_file", Some(&paths[0])).unwrap().unwrap();
        let other = files.read("redis.token_file", Some(&paths[1])).unwrap().unwrap();
        assert!(files.read("grpc.token_file", None).unwrap().is_none());
        write(["c", "no token"]);
        assert!(matches!(files.read_again(), Err(TokenError::NoToken { .. })));
        assert!(one.accept(b"a").is_some() && other.accept(b"b").is_some());
        write(["c", "b"]);
        assert_eq!(files.read_again().unwrap().replace(), ["http.token_file"]);
        assert!(one.accept(b"c").is_some() && one.accept(b"a").is_none() && other.accept(b"b").is_some());
        // A file may go when its setting names another.
        write(["c", "d"]);
        std::fs::remove_file(&paths[0]).unwrap();
        assert!(matches!(files.read_again(), Err(TokenError::Read { .. })));
        let read = files.read_again_except(&["http.token_file"]).unwrap();
        assert_eq!(read.replace(), ["redis.token_file"]);
        assert!(one.accept(b"c").is_some() && other.accept(b"d").is_some());
    }
}
