//! Notes that a holder stores with its blocks. A note tells how the engine names a block, and whether the block's
//! whole hash is known. A block that is named by its whole hash has the note 0. So blocks of publishers that use the
//! contract's hashes need no notes.

use crate::index::share::Attributes;

/// Form: how the engine names a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// The block is named by its sequence hash.
    Hash,
    /// The block has no name: events give only its lineage hash.
    Nameless,
    /// The block has one name other than its hash, which is in the holder's table of names.
    Own,
    /// The block has several names, which are in the holder's table of names.
    Many,
}

/// Bits of a note that tell how the engine names the block: its [`Form`].
const FORM: u8 = 0b11;
/// Bit of a note that says that the holder knows only a fragment of the sequence hash.
const SHORT: u8 = 0b100;

/// Access to the notes in the attributes of blocks: how the engine names a block, and whether its whole hash is known.
pub(super) trait NameNotes: Copy {
    fn form(self) -> Form;
    fn with_form(self, form: Form) -> Self;
    /// Whether the holder knows the whole sequence hash.
    fn is_whole(self) -> bool;
    /// Returns the note with the mark that the whole hash is known, if `is_whole` is true. Otherwise returns the note
    /// unchanged.
    fn with_whole(self, is_whole: bool) -> Self;
}

/// Returns the attributes of blocks in `tiers` that the engine names in this form.
pub(super) fn held(tiers: u8, form: Form, is_whole: bool) -> Attributes {
    Attributes::new(tiers, form as u8 | if is_whole { 0 } else { SHORT })
}

impl NameNotes for Attributes {
    fn form(self) -> Form {
        match self.note() & FORM {
            0 => Form::Hash,
            1 => Form::Nameless,
            2 => Form::Own,
            _ => Form::Many,
        }
    }

    fn with_form(self, form: Form) -> Self {
        self.with_note(self.note() & !FORM | form as u8)
    }

    fn is_whole(self) -> bool {
        self.note() & SHORT == 0
    }

    fn with_whole(self, is_whole: bool) -> Self {
        match is_whole {
            true => self.with_note(self.note() & !SHORT),
            false => self,
        }
    }
}
