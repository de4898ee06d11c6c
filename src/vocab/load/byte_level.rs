//! The alphabet of GPT-2, which has a printable character for each byte.
//!
//! Bytes that are printable in Latin-1 are written as themselves. The other 68 bytes, in order, are written as the
//! characters from U+0100 on. See `bytes_to_unicode` in OpenAI's `gpt-2/src/encoder.py`.

use std::ops::RangeInclusive;

/// Bytes that are written as themselves.
const PRINTABLE: [RangeInclusive<u8>; 3] = [b'!'..=b'~', 0xa1..=0xac, 0xae..=0xff];

/// Returns the byte that a character stands for. `None` if the character stands for no byte.
pub(super) fn byte_of(character: char) -> Option<u8> {
    match u8::try_from(character) {
        Ok(byte) => is_printable(byte).then_some(byte),
        Err(_) => {
            let place = u32::from(character).checked_sub(0x100)?;
            (0..=u8::MAX)
                .filter(|byte| !is_printable(*byte))
                .nth(usize::try_from(place).ok()?)
        }
    }
}

fn is_printable(byte: u8) -> bool {
    PRINTABLE.iter().any(|range| range.contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_one_character() {
        let mut bytes: Vec<u8> = (0..0x200)
            .filter_map(char::from_u32)
            .filter_map(byte_of)
            .collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=u8::MAX).collect::<Vec<_>>());
        assert_eq!(
            [byte_of('Ġ'), byte_of('Ċ'), byte_of('Ń')],
            [Some(b' '), Some(b'\n'), Some(0xad)]
        );
        assert_eq!([byte_of(' '), byte_of('ń'), byte_of('▁')], [None; 3]);
    }
}
