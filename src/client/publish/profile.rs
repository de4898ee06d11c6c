//! The holder's address and labels, and when daemons are told.

use kvatlas_core::wire::Profile;

/// The address and labels of a holder that daemons are told.
#[derive(Debug)]
pub(super) struct ToldProfile {
    profile: Profile,
    /// Whether the next batch has to tell: the first of an epoch, and the first since a change.
    is_owed: bool,
    /// Whether the epoch has told any. Only then a profile without anything says something.
    was_told: bool,
}

impl ToldProfile {
    /// A profile that has not been told yet.
    pub(super) fn new(profile: Profile) -> Self {
        Self {
            profile,
            is_owed: true,
            was_told: false,
        }
    }

    /// Another profile from now on. Says whether it is another one.
    pub(super) fn replace(&mut self, profile: Profile) -> bool {
        let is_new = self.profile != profile;
        self.profile = profile;
        self.is_owed |= is_new;
        is_new
    }

    /// A new epoch begins, in which nothing has been told.
    pub(super) fn begin_epoch(&mut self) {
        (self.is_owed, self.was_told) = (true, false);
    }

    /// The profile that the next batch tells. Heartbeats, and batches that clear, `repeat` it: for daemons that have missed it and are not
    /// answered.
    pub(super) fn take(&mut self, repeats: bool) -> Option<Profile> {
        let is_due = std::mem::take(&mut self.is_owed) || repeats;
        let told = self.all().filter(|_| is_due).cloned();
        self.was_told |= told.is_some();
        told
    }

    /// The profile that a full state tells; none where there has never been anything to tell.
    pub(super) fn all(&self) -> Option<&Profile> {
        (self.was_told || !self.profile.is_empty()).then_some(&self.profile)
    }

    /// Bytes that it takes in a batch, at most.
    pub(super) fn bytes(&self) -> usize {
        self.all().map_or(0, Profile::bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_told_first_with_every_heartbeat_and_when_it_changes() {
        let at = |address: &str| Profile {
            address: address.parse().ok(),
            ..Profile::default()
        };
        let (here, there, none) = (at("10.0.0.7:8000"), at("10.0.0.8:8000"), Profile::default());
        let mut told = ToldProfile::new(here.clone());
        assert_eq!(told.take(false), Some(here.clone()));
        assert_eq!((told.take(false), told.take(true)), (None, Some(here)));
        assert!(told.replace(there.clone()) && !told.replace(there.clone()));
        assert_eq!((told.take(false), told.take(false)), (Some(there.clone()), None));
        // It is taken back in words, and the next epoch has none to take back.
        assert!(told.replace(none.clone()));
        assert_eq!((told.take(false), told.all()), (Some(none.clone()), Some(&none)));
        told.begin_epoch();
        assert_eq!((told.take(true), told.all(), told.bytes()), (None, None, 0));
        told.replace(there.clone());
        told.begin_epoch();
        assert_eq!(told.take(false), Some(there));
    }
}
