//! Bearer tokens: reading them from files, and checking requests for them.

use std::path::{Path, PathBuf};

use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderMap, HeaderValue};

use kvatlas_config::Secret;

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

/// Reads the token from the file that `setting` names. The file has one line. `None` if no file is named.
///
/// # Errors
///
/// [`TokenError`] if the file cannot be read, or its content is not a token.
pub fn read_token(setting: &'static str, path: Option<&Path>) -> Result<Option<Secret>, TokenError> {
    let Some(path) = path else {
        return Ok(None);
    };
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
    Ok(Some(Secret::new(token.to_owned())))
}

/// Scheme that stands before the token, compared without regard to case (RFC 9110, 11.1).
const SCHEME: &[u8] = b"Bearer ";

/// Whether a request has the right token. Always true if `token` is `None`, since no token is needed then.
pub(crate) fn is_allowed(headers: &HeaderMap, token: Option<&Secret>) -> bool {
    let Some(token) = token else {
        return true;
    };
    let given = headers.get(AUTHORIZATION).map(HeaderValue::as_bytes);
    let given = given.and_then(|given| given.split_at_checked(SCHEME.len()));
    given.is_some_and(|(scheme, given)| {
        scheme.eq_ignore_ascii_case(SCHEME) && is_same(given.trim_ascii_start(), token.expose().as_bytes())
    })
}

/// Compares two texts in constant time: the time depends on their lengths only.
pub(crate) fn is_same(given: &[u8], token: &[u8]) -> bool {
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
            is_allowed(&headers, Some(&token))
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
        assert!(!is_allowed(&HeaderMap::new(), Some(&token)));
        assert!(is_allowed(&HeaderMap::new(), None));
    }

    #[test]
    fn a_token_is_one_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        let read = || read_token("http.token_file", Some(&path));
        std::fs::write(&path, "abc\n").unwrap();
        assert_eq!(read().unwrap().unwrap().expose(), "abc");
        for wrong in ["", "\n", "a b", "a\nb", "ä"] {
            std::fs::write(&path, wrong).unwrap();
            assert!(matches!(read(), Err(TokenError::NoToken { .. })), "{wrong:?}");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(read(), Err(TokenError::Read { .. })));
    }
}
