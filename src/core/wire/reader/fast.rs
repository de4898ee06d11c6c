//! Fast paths of the payload reader for common values. They read short keys, plain numbers and arrays of small numbers,
//! and skip values that are not needed.

use rmp::Marker;

use super::{DecodeError, Reader, Value};

/// Total length of a value in bytes, marker included. The index is the value's marker (its first byte). 0 if the marker
/// alone does not determine the length.
const WIDTHS: [u8; 256] = {
    let mut widths = [0; 256];
    let mut marker = 0;
    while marker < 256 {
        widths[marker] = match marker {
            0x00..=0x7f | 0xc0 | 0xc2 | 0xc3 | 0xe0..=0xff => 1,
            // The length of a short text is in its marker.
            0xa0..=0xbf => {
                let mut length = 1;
                let mut text = 0xa0;
                while text < marker {
                    text += 1;
                    length += 1;
                }
                length
            }
            0xcc | 0xd0 => 2,
            0xcd | 0xd1 | 0xd4 => 3,
            0xd5 => 4,
            0xca | 0xce | 0xd2 => 5,
            0xd6 => 6,
            0xcb | 0xcf | 0xd3 => 9,
            0xd7 => 10,
            0xd8 => 18,
            _ => 0,
        };
        marker += 1;
    }
    widths
};

/// Total length in bytes, marker included, of an unsigned integer of at most 32 bits. The index is the integer's marker
/// (its first byte). 0 for the markers of other values.
const NUMBER_WIDTHS: [u8; 256] = {
    let mut widths = [0; 256];
    let mut marker = 0;
    while marker < 256 {
        widths[marker] = match marker {
            0x00..=0x7f => 1,
            0xcc => 2,
            0xcd => 3,
            0xce => 5,
            _ => 0,
        };
        marker += 1;
    }
    widths
};

/// Number of bits by which the four bytes after a marker are shifted right to give the integer. The index is the
/// marker. An integer of one or two bytes fills only the upper part of the four bytes.
const NUMBER_SHIFTS: [u8; 256] = {
    let mut shifts = [0; 256];
    shifts[0xcc] = 24;
    shifts[0xcd] = 16;
    shifts
};

impl<'a> Reader<'a> {
    /// Reads the next value if it is a text of fewer than 32 bytes, which need not be UTF-8. Otherwise reads nothing
    /// and returns `None`.
    #[inline]
    pub(in crate::wire) fn short_text(&mut self) -> Option<&'a [u8]> {
        let (marker, rest) = self.input.get(self.offset..)?.split_first()?;
        if marker & 0xe0 != 0xa0 {
            return None;
        }
        let text = rest.get(..usize::from(marker & 0x1f))?;
        self.offset += 1 + text.len();
        Some(text)
    }

    /// Skips the bytes `expected` if they come next, and returns the reader, to read on. Otherwise reads nothing and
    /// returns `None`.
    #[inline]
    pub(in crate::wire) fn behind<const LENGTH: usize>(
        &mut self,
        expected: &[u8; LENGTH],
    ) -> Option<&mut Self> {
        let next = self.input.get(self.offset..)?.first_chunk::<LENGTH>()?;
        if next != expected {
            return None;
        }
        self.offset += LENGTH;
        Some(self)
    }

    /// Reads the head of a map with fewer than 16 entries, and returns their number. Before any other value, reads
    /// nothing and returns `None`.
    #[inline]
    pub(in crate::wire) fn short_map(&mut self) -> Option<usize> {
        self.short_count(Marker::FixMap(0).to_u8())
    }

    /// Reads the head of an array with fewer than 16 elements, and returns their number. Before any other value, reads
    /// nothing and returns `None`.
    #[inline]
    pub(in crate::wire) fn short_array(&mut self) -> Option<usize> {
        self.short_count(Marker::FixArray(0).to_u8())
    }

    #[inline]
    fn short_count(&mut self, empty: u8) -> Option<usize> {
        let marker = self.input.get(self.offset)?;
        let count = marker ^ empty;
        self.offset += usize::from(count < 16);
        (count < 16).then_some(usize::from(count))
    }

    /// Reads the next value if it is an unsigned integer below 128, or one encoded in 16, 32 or 64 bits. Otherwise
    /// reads nothing and returns `None`.
    #[inline]
    pub(in crate::wire) fn plain_number(&mut self) -> Option<u64> {
        let (marker, rest) = self.input.get(self.offset..)?.split_first()?;
        let (width, value) = match marker {
            0x00..=0x7f => (1, u64::from(*marker)),
            0xcd => (3, u64::from(u16::from_be_bytes(*rest.first_chunk()?))),
            0xce => (5, u64::from(u32::from_be_bytes(*rest.first_chunk()?))),
            0xcf => (9, u64::from_be_bytes(*rest.first_chunk()?)),
            _ => return None,
        };
        self.offset += width;
        Some(value)
    }
}

impl Reader<'_> {
    /// Skips one value with everything in it. Takes no memory and does not recurse, because it only counts the values
    /// that are left to skip. Each of them takes at least one byte of the payload.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] if the payload ends before the value does.
    pub fn skip(&mut self) -> Result<(), DecodeError> {
        let mut values_left: u64 = 1;
        while values_left > 0 {
            values_left -= 1;
            let marker = self
                .input
                .get(self.offset)
                .copied()
                .unwrap_or(Marker::Reserved.to_u8());
            let width = WIDTHS[usize::from(marker)];
            if width > 0 && usize::from(width) <= self.input.len() - self.offset {
                self.offset += usize::from(width);
                continue;
            }
            match self.value()? {
                Value::Array(count) => values_left += count as u64,
                Value::Map(count) => values_left += 2 * count as u64,
                _ => {}
            }
        }
        Ok(())
    }

    /// Appends `count` unsigned integers of 32 bits to `list`. They are the elements of an array whose head was already
    /// read.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] at the first value that is not an unsigned integer of at most 32 bits. The integers before it
    /// stay in the list.
    pub fn unsigned_32_list(
        &mut self,
        field: &'static str,
        count: usize,
        list: &mut Vec<u32>,
    ) -> Result<(), DecodeError> {
        // Each takes at least one byte.
        self.checked_by_bytes(count)?;
        let start = list.len();
        list.resize(start + count, 0);
        for (done, place) in list.iter_mut().skip(start).enumerate() {
            match self.small_number() {
                Some(value) => *place = value,
                None => match self.unsigned_32(field) {
                    Ok(value) => *place = value,
                    Err(error) => {
                        list.truncate(start + done);
                        return Err(error);
                    }
                },
            }
        }
        Ok(())
    }

    /// Reads the next value if it is an unsigned integer of at most 32 bits, and at least 5 bytes are left. Otherwise
    /// reads nothing and returns `None`. The code does not branch on the encoding, because a processor could not
    /// predict the encodings of tokens.
    #[inline]
    fn small_number(&mut self) -> Option<u32> {
        let bytes = self.input.get(self.offset..)?.first_chunk::<5>()?;
        let [marker, a, b, c, d] = *bytes;
        let width = NUMBER_WIDTHS[usize::from(marker)];
        if width == 0 {
            return None;
        }
        self.offset += usize::from(width);
        // A value of one byte is the marker itself. A longer value follows the marker, and the bytes after it are
        // shifted out.
        let following = u32::from_be_bytes([a, b, c, d]) >> NUMBER_SHIFTS[usize::from(marker)];
        Some(if width == 1 { u32::from(marker) } else { following })
    }
}
