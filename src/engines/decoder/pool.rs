//! Owners of objects in Mooncake Store: this file tells to which holder an object belongs. Models, tenants and shards share
//! one store.

use kvatlas_core::wire::{DEFAULT_TENANT, ModelKey};

use crate::reason::Reason;

/// The facts that an event tells about an object, other than the object's name.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Object<'a> {
    pub(super) model: Option<&'a str>,
    pub(super) tenant: Option<&'a str>,
    pub(super) salt: Option<&'a str>,
    /// Shard to which the object belongs, if a block is split into shards. Events don't tell how many shards a block
    /// has.
    pub(super) shard: Option<u64>,
}

impl Object<'_> {
    /// The reason why an object can't be matched to a block of the contract, although the event tells the object's
    /// name; `None` if it can be matched.
    pub(super) fn trouble(&self, lora_name: Option<&str>) -> Option<Reason> {
        if self.shard.is_some() {
            return Some(Reason::Unjoined);
        }
        // Events don't tell whether the name covers salt and adapter.
        (self.salt.is_some() || lora_name.is_some()).then_some(Reason::Untold)
    }
}

/// The objects of a store that belong to one holder.
#[derive(Debug, Default)]
pub(super) struct Pool {
    /// The model and tenant of the holder; `None` if objects of all models and tenants belong to the holder.
    pub(super) model: Option<ModelKey>,
    /// The backend that the first event has named. Objects of other backends belong to other holders.
    backend: Option<String>,
}

impl Pool {
    /// Whether an object of `backend` belongs to the holder.
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
