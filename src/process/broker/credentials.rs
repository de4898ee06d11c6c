//! Our credentials for NATS. They are read anew for every connection, so that a change needs no restart.

use std::io;
use std::path::Path;

use async_nats::{Auth, AuthError};
use nkeys::KeyPair;

use kvatlas_config::Authentication;

/// Returns the credentials for one connection. `nonce` comes from the server and is signed.
///
/// # Errors
///
/// Errors of reading or using the file.
pub(super) fn present(how: &Authentication, nonce: &[u8]) -> io::Result<Auth> {
    let mut auth = Auth::new();
    match how {
        Authentication::Anonymous => {}
        Authentication::CredentialsFile(path) => {
            let (jwt, key) = read(path)?;
            auth.signature = Some(key.sign(nonce).map_err(io::Error::other)?);
            auth.jwt = Some(jwt);
        }
        Authentication::NkeySeedFile(path) => {
            let key = read_seed(path)?;
            auth.signature = Some(key.sign(nonce).map_err(io::Error::other)?);
            auth.nkey = Some(key.public_key());
        }
        Authentication::Token(token) => auth.token = Some(token.expose().to_owned()),
        Authentication::UserPassword { user, password } => {
            auth.username = Some(user.clone());
            auth.password = Some(password.expose().to_owned());
        }
    }
    Ok(auth)
}

/// As [`present`], with the client library's type of error.
pub(super) fn present_to_client(how: &Authentication, nonce: &[u8]) -> Result<Auth, AuthError> {
    present(how, nonce).map_err(AuthError::new)
}

/// Reads a key pair from a file with its seed, as `nk -gen user` writes it. The seed is the first line that is neither
/// empty nor a comment.
fn read_seed(path: &Path) -> io::Result<KeyPair> {
    let text = std::fs::read_to_string(path)?;
    let mut lines = text.lines().map(str::trim);
    let seed = lines.find(|line| !line.is_empty() && !line.starts_with(['#', '-']));
    let key = seed.and_then(|seed| KeyPair::from_seed(seed).ok());
    key.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "there is no usable NKey seed in it"))
}

/// Reads the JWT and the key pair of a credentials file.
fn read(path: &Path) -> io::Result<(String, KeyPair)> {
    let text = std::fs::read_to_string(path)?;
    let lacks = |what: &str| io::Error::new(io::ErrorKind::InvalidData, format!("there is no {what} in it"));
    let jwt = between_markers(&text, "NATS USER JWT").ok_or_else(|| lacks("NATS USER JWT"))?;
    let seed = between_markers(&text, "USER NKEY SEED").ok_or_else(|| lacks("USER NKEY SEED"))?;
    let key = KeyPair::from_seed(seed).map_err(|_| lacks("usable USER NKEY SEED"))?;
    Ok((jwt.to_owned(), key))
}

/// Returns the line between `-----BEGIN …-----` and `------END …------`.
fn between_markers<'a>(text: &'a str, what: &str) -> Option<&'a str> {
    let is_begin = |line: &&str| line.starts_with("---") && line.contains(&format!("BEGIN {what}"));
    let mut lines = text.lines().map(str::trim);
    lines.find(is_begin)?;
    lines
        .find(|line| !line.is_empty())
        .filter(|line| !line.starts_with("---"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvatlas_config::Secret;

    #[test]
    fn a_credentials_file_gives_the_token_and_signs_the_nonce() {
        let key = KeyPair::new_user();
        let text = format!(
            "-----BEGIN NATS USER JWT-----\r\neyJ0.abc\r\n------END NATS USER JWT------\r\n\r\n\
             -----BEGIN USER NKEY SEED-----\n{}\n------END USER NKEY SEED------\n",
            key.seed().unwrap()
        );
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let how = Authentication::CredentialsFile(file.path().to_owned());
        let auth = present(&how, b"nonce").unwrap();
        assert_eq!(auth.jwt.as_deref(), Some("eyJ0.abc"));
        key.verify(b"nonce", &auth.signature.unwrap()).unwrap();

        std::fs::write(
            file.path(),
            "-----BEGIN NATS USER JWT-----\n------END NATS USER JWT------\n",
        )
        .unwrap();
        let error = present(&how, b"nonce").err().unwrap();
        assert!(error.to_string().contains("NATS USER JWT"), "{error}");
    }

    #[test]
    fn a_seed_gives_the_public_key_and_signs_the_nonce() {
        let key = KeyPair::new_user();
        let file = tempfile::NamedTempFile::new().unwrap();
        let how = Authentication::NkeySeedFile(file.path().to_owned());
        std::fs::write(
            file.path(),
            format!("# of the daemon\n\n{}\n", key.seed().unwrap()),
        )
        .unwrap();
        let auth = present(&how, b"nonce").unwrap();
        assert_eq!(auth.nkey, Some(key.public_key()));
        key.verify(b"nonce", &auth.signature.unwrap()).unwrap();

        for text in ["", "SUAhunter2", &key.public_key()] {
            std::fs::write(file.path(), text).unwrap();
            let error = present(&how, b"nonce").err().unwrap().to_string();
            assert!(
                error.contains("NKey seed") && !error.contains("hunter2"),
                "{error}"
            );
        }
    }

    #[test]
    fn each_way_fills_its_own_fields() {
        let auth = present(&Authentication::Anonymous, b"").unwrap();
        assert_eq!((auth.username, auth.token, auth.jwt), (None, None, None));
        let auth = present(&Authentication::Token(Secret::new("t")), b"").unwrap();
        assert_eq!((auth.username, auth.token.as_deref()), (None, Some("t")));
        let password = Secret::new("p");
        let how = Authentication::UserPassword {
            user: "u".into(),
            password,
        };
        let auth = present(&how, b"").unwrap();
        assert_eq!(
            (auth.username.as_deref(), auth.password.as_deref()),
            (Some("u"), Some("p"))
        );
    }
}
