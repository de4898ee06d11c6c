//! Functions for a program that was built without the feature `nkeys`. They refuse all credentials that have to sign
//! the server's nonce.

use std::io;
use std::path::Path;

use async_nats::Auth;

pub(super) use by_credentials as by_seed;

pub(super) fn by_credentials(_: &Path, _: &[u8]) -> io::Result<Auth> {
    let said = "this program was built without the feature nkeys";
    Err(io::Error::new(io::ErrorKind::Unsupported, said))
}
