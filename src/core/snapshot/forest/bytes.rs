//! Integers in an encoding of variable length.

use super::ForestError;

/// Appends an integer to `bytes`: 7 bits in each byte, the lowest bits first.
pub(super) fn put(bytes: &mut Vec<u8>, mut number: u64) {
    loop {
        let [lowest, ..] = number.to_le_bytes();
        number >>= 7;
        if number == 0 {
            bytes.push(lowest);
            return;
        }
        bytes.push(lowest | 0x80);
    }
}

/// Reader of variable-length integers from untrusted bytes.
#[derive(Debug)]
pub(super) struct Bytes<'a>(pub(super) &'a [u8]);

impl Bytes<'_> {
    pub(super) fn byte(&mut self) -> Result<u8, ForestError> {
        let (first, rest) = self.0.split_first().ok_or(ForestError::Cut)?;
        self.0 = rest;
        Ok(*first)
    }

    pub(super) fn number(&mut self) -> Result<u64, ForestError> {
        let mut number = 0;
        for shift in (0..u64::BITS).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                break;
            }
            number |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(ForestError::NumberTooLarge)
    }

    /// Takes the next integer, which must be at most `most`. `what` is the integer's name in error messages.
    pub(super) fn at_most(&mut self, most: usize, what: &'static str) -> Result<usize, ForestError> {
        let number = self.number()?;
        usize::try_from(number)
            .ok()
            .filter(|small| *small <= most)
            .ok_or(ForestError::OutOfRange { what, number, most })
    }
}
