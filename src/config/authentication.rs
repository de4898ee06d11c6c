//! Reading of the way to authenticate to NATS from its settings.

use super::declare::{Setting, SettingTable};
use super::effective::Values;
use super::error::ConfigError;
use super::live::Live;
use super::settings::Credentials;
use super::types::Authentication;

impl SettingTable for Live<Authentication> {
    fn settings() -> Vec<Setting> {
        Credentials::settings()
    }

    fn read(values: Values<'_>) -> Result<Self, ConfigError> {
        let Credentials {
            credentials_file,
            nkey_seed_file,
            token,
            user,
            password,
        } = Credentials::read(values)?;
        // `combinations` has checked that at most one way is given.
        let ways = [
            credentials_file.map(Authentication::CredentialsFile),
            nkey_seed_file.map(Authentication::NkeySeedFile),
            token.map(Authentication::Token),
            password.map(|password| Authentication::UserPassword { user, password }),
        ];
        let given = ways.into_iter().flatten().next();
        Ok(Live::new(given.unwrap_or(Authentication::Anonymous)))
    }

    fn take_live(&mut self, other: &Self) {
        self.clone_from(other);
    }
}
