//! The fields with which batches and answers send a profile: an address and labels.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};

use super::entries::Entries;
use super::error::DecodeError;
use super::profile::{
    ADDRESS_BYTES_MAX, Address, LABEL_KEY_BYTES_MAX, LABEL_VALUE_BYTES_MAX, LABELS_MAX, Labels, Profile,
    ProfileError,
};
use super::reader::{Reader, Value};

impl Profile {
    /// Returns the profile that a batch sends in the fields `address` and `labels`. `None` if the batch has neither
    /// field. Otherwise the two fields are the whole profile: an absent or empty field means that the holder has no
    /// address, or no labels.
    pub(super) fn told(
        address: Option<&str>,
        labels: Option<BTreeMap<String, String>>,
    ) -> Result<Option<Self>, ProfileError> {
        if address.is_none() && labels.is_none() {
            return Ok(None);
        }
        let address = address.filter(|text| !text.is_empty()).map(Address::new);
        Ok(Some(Self {
            address: address.transpose()?,
            labels: Labels::new(labels.unwrap_or_default())?,
        }))
    }

    /// Writes the fields in which a batch sends the profile. An empty profile is written as an empty address.
    pub(super) fn write_told<E: Entries>(&self, entries: &mut E) -> Result<(), E::Error> {
        match self.is_empty() {
            true => entries.text("address", ""),
            false => write_profile(self.address.as_ref(), &self.labels, entries),
        }
    }
}

/// Writes a holder's address and labels as the fields of an answer.
pub(super) fn write_profile<E: Entries>(
    address: Option<&Address>,
    labels: &Labels,
    entries: &mut E,
) -> Result<(), E::Error> {
    if let Some(address) = address {
        entries.text("address", address.as_str())?;
    }
    match labels.is_empty() {
        true => Ok(()),
        false => entries.text_map("labels", labels.iter()),
    }
}

/// Reads the address in a batch. `None` for nil.
pub(super) fn decode_address(reader: &mut Reader<'_>) -> Result<Option<String>, DecodeError> {
    let text = reader.optional_text("address", ADDRESS_BYTES_MAX)?;
    Ok(text.map(str::to_owned))
}

/// Reads the labels in a batch. `None` for nil.
pub(super) fn decode_labels(
    reader: &mut Reader<'_>,
) -> Result<Option<BTreeMap<String, String>>, DecodeError> {
    let labels = match reader.value()? {
        Value::Nil => return Ok(None),
        Value::Map(labels) => reader.checked_count("labels", labels, LABELS_MAX)?,
        other => return Err(DecodeError::wrong_type("labels", "a map of texts, or nil", other)),
    };
    let mut map = BTreeMap::new();
    for _ in 0..labels {
        let key = reader.text("labels", LABEL_KEY_BYTES_MAX)?.to_owned();
        let value = reader.text("labels", LABEL_VALUE_BYTES_MAX)?.to_owned();
        if map.insert(key, value).is_some() {
            return Err(DecodeError::Repeated { field: "labels" });
        }
    }
    Ok(Some(map))
}

/// Reads the address in an answer. A later version may send another form of address. That form is read as no address.
pub(super) fn lenient_address<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Address>, D::Error> {
    let text = Option::<String>::deserialize(deserializer)?;
    Ok(text.and_then(|text| Address::new(&text).ok()))
}

/// Reads the labels in an answer. As with [`lenient_address`], an unknown form is read as no labels.
pub(super) fn lenient_labels<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Labels, D::Error> {
    let map = Option::<BTreeMap<String, String>>::deserialize(deserializer)?;
    Ok(Labels::new(map.unwrap_or_default()).unwrap_or_default())
}
