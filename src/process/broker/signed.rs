//! Credentials that sign the server's nonce, the text that it sends to each new connection.

use std::io;
use std::path::Path;

use async_nats::Auth;
use nkeys::KeyPair;

/// Returns the credentials of a file with a JWT and a seed.
pub(super) fn by_credentials(path: &Path, nonce: &[u8]) -> io::Result<Auth> {
    let (jwt, key) = read(path)?;
    let mut auth = Auth::new();
    auth.signature = Some(key.sign(nonce).map_err(io::Error::other)?);
    auth.jwt = Some(jwt);
    Ok(auth)
}

/// Returns the credentials of a file with a seed.
pub(super) fn by_seed(path: &Path, nonce: &[u8]) -> io::Result<Auth> {
    let key = read_seed(path)?;
    let mut auth = Auth::new();
    auth.signature = Some(key.sign(nonce).map_err(io::Error::other)?);
    auth.nkey = Some(key.public_key());
    Ok(auth)
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
        let auth = by_credentials(file.path(), b"nonce").unwrap();
        assert_eq!(auth.jwt.as_deref(), Some("eyJ0.abc"));
        key.verify(b"nonce", &auth.signature.unwrap()).unwrap();

        std::fs::write(
            file.path(),
            "-----BEGIN NATS USER JWT-----\n------END NATS USER JWT------\n",
        )
        .unwrap();
        let error = by_credentials(file.path(), b"nonce").err().unwrap();
        assert!(error.to_string().contains("NATS USER JWT"), "{error}");
    }

    #[test]
    fn a_seed_gives_the_public_key_and_signs_the_nonce() {
        let key = KeyPair::new_user();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(
            file.path(),
            format!("# of the daemon\n\n{}\n", key.seed().unwrap()),
        )
        .unwrap();
        let auth = by_seed(file.path(), b"nonce").unwrap();
        assert_eq!(auth.nkey, Some(key.public_key()));
        key.verify(b"nonce", &auth.signature.unwrap()).unwrap();

        for text in ["", "SUAhunter2", &key.public_key()] {
            std::fs::write(file.path(), text).unwrap();
            let error = by_seed(file.path(), b"nonce").err().unwrap().to_string();
            assert!(
                error.contains("NKey seed") && !error.contains("hunter2"),
                "{error}"
            );
        }
    }
}
