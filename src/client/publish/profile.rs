//! Profile of the holder (its address and labels), and the choice of the batches that tell the profile to daemons.

use kvatlas_core::wire::Profile;

/// Address and labels of a holder, with a record of whether batches have told them to daemons.
#[derive(Debug)]
pub(super) struct ToldProfile {
    profile: Profile,
    /// Whether the next batch has to tell the profile, because it is the first batch of an epoch or the first since a change.
    is_owed: bool,
    /// Whether a batch of this epoch has told a profile. If not, an empty profile need not be told.
    was_told: bool,
}

impl ToldProfile {
    /// Takes a profile that no batch has told yet.
    pub(super) fn new(profile: Profile) -> Self {
        Self {
            profile,
            is_owed: true,
            was_told: false,
        }
    }

    /// Replaces the profile. Returns whether the new profile differs from the old one.
    pub(super) fn replace(&mut self, profile: Profile) -> bool {
        let is_new = self.profile != profile;
        self.profile = profile;
        self.is_owed |= is_new;
        is_new
    }

    /// Notes that a new epoch begins, in which no batch has told the profile yet.
    pub(super) fn begin_epoch(&mut self) {
        (self.is_owed, self.was_told) = (true, false);
    }

    /// Returns the profile that the next batch tells; `None` if it tells none. The caller sets `repeats` for a
    /// heartbeat and for a batch that clears the holder's blocks. Such a batch repeats the profile, for daemons that
    /// missed it and get no answers to their questions.
    pub(super) fn take(&mut self, repeats: bool) -> Option<Profile> {
        let is_due = std::mem::take(&mut self.is_owed) || repeats;
        let told = self.all().filter(|_| is_due).cloned();
        self.was_told |= told.is_some();
        told
    }

    /// Returns the profile that a full state tells. `None` if the profile is empty, unless a batch of this epoch has
    /// told a profile.
    pub(super) fn all(&self) -> Option<&Profile> {
        (self.was_told || !self.profile.is_empty()).then_some(&self.profile)
    }

    /// Returns the maximum number of bytes that the profile takes in a batch.
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
        // An empty profile is told once, to take the old profile back. In the next epoch there is nothing to take back.
        assert!(told.replace(none.clone()));
        assert_eq!((told.take(false), told.all()), (Some(none.clone()), Some(&none)));
        told.begin_epoch();
        assert_eq!((told.take(true), told.all(), told.bytes()), (None, None, 0));
        told.replace(there.clone());
        told.begin_epoch();
        assert_eq!(told.take(false), Some(there));
    }
}
