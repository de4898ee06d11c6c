//! Owners of a store's objects: of Mooncake's, which is shared by models, tenants and shards.

use kvatlas_core::wire::{DEFAULT_TENANT, ModelKey};

use crate::reason::Reason;

/// The facts that an event tells of an object, beside its name.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Object<'a> {
    pub(super) model: Option<&'a str>,
    pub(super) tenant: Option<&'a str>,
    pub(super) salt: Option<&'a str>,
    /// The shard; nobody says how many of them a block consists of.
    pub(super) shard: Option<u64>,
}

impl Object<'_> {
    /// Why it can't be told which block of the contract the object is, though it has a name.
    pub(super) fn trouble(&self, lora_name: Option<&str>) -> Option<Reason> {
        if self.shard.is_some() {
            return Some(Reason::Unjoined);
        }
        // Whether they are in the name, nobody says.
        (self.salt.is_some() || lora_name.is_some()).then_some(Reason::Untold)
    }
}

/// The objects of a store that belong to one holder.
#[derive(Debug, Default)]
pub(super) struct Pool {
    /// The model and tenant; any where it is absent.
    pub(super) model: Option<ModelKey>,
    /// The part of the store that was heard of first.
    backend: Option<String>,
}

impl Pool {
    /// Whether an object of `backend` is among them.
    pub(super) fn owns(&mut self, backend: Option<&str>, object: &Object<'_>) -> bool {
        let is_of_model = self.model.as_ref().is_none_or(|own| {
            let tenant = object.tenant.unwrap_or(DEFAULT_TENANT);
            object.model.is_none_or(|model| model == own.model) && tenant == own.tenant
        });
        let Some(backend) = backend.filter(|_| is_of_model) else {
            return is_of_model;
        };
        self.backend.get_or_insert_with(|| backend.to_owned()) == backend
    }
}
