//! Credentials with which this process authenticates to NATS. They are read anew for every connection, so that a change needs no
//! restart.

use std::io;

use async_nats::{Auth, AuthError};

use kvatlas_config::Authentication;

use super::signed;

/// Returns the credentials with which a connection authenticates. `nonce` is the server's text for this connection,
/// which some credentials have to sign.
///
/// # Errors
///
/// Errors of reading or using the file with the credentials.
pub(super) fn present(how: &Authentication, nonce: &[u8]) -> io::Result<Auth> {
    let mut auth = Auth::new();
    match how {
        Authentication::Anonymous => {}
        Authentication::CredentialsFile(path) => return signed::by_credentials(path, nonce),
        Authentication::NkeySeedFile(path) => return signed::by_seed(path, nonce),
        Authentication::Token(token) => auth.token = Some(token.expose().to_owned()),
        Authentication::UserPassword { user, password } => {
            auth.username = Some(user.clone());
            auth.password = Some(password.expose().to_owned());
        }
    }
    Ok(auth)
}

/// Returns the credentials for one connection as [`present`] does, with the client library's type of error.
pub(super) fn present_to_client(how: &Authentication, nonce: &[u8]) -> Result<Auth, AuthError> {
    present(how, nonce).map_err(AuthError::new)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvatlas_config::Secret;

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
