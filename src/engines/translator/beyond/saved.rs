//! Saves and restores the knowledge about tiers beyond the device.

use super::super::forms::{SavedBeyond, SavedError};
use super::super::past::Past;
use super::Beyond;
use super::chunks::OwnChunks;

impl Beyond {
    /// Returns the knowledge about tiers beyond the device in saved form. Call it between two batches.
    pub(in super::super) fn save(&self) -> SavedBeyond {
        SavedBeyond {
            doubts: self.doubts,
            chunks: self.chunks,
            past: self.past.iter().collect(),
            is_used: self.is_used,
            has_kinds: self.has_kinds,
            has_ends: self.has_ends,
            has_parts: self.has_parts,
            has_salts: self.has_salts,
            has_objects: self.has_objects,
            own_chunks: self.own_chunks.save(),
        }
    }

    /// Restores the saved knowledge about tiers beyond the device.
    pub(in super::super) fn restore(saved: SavedBeyond) -> Result<Self, SavedError> {
        let mut past = Past::default();
        for (name, block) in saved.past {
            past.remember(name, block.checked()?);
        }
        Ok(Self {
            doubts: saved.doubts,
            chunks: saved.chunks,
            past,
            is_used: saved.is_used,
            has_kinds: saved.has_kinds,
            has_ends: saved.has_ends,
            has_parts: saved.has_parts,
            has_salts: saved.has_salts,
            has_objects: saved.has_objects,
            own_chunks: OwnChunks::restore(saved.own_chunks, saved.has_parts),
            ..Self::default()
        })
    }
}
