//! Redis's protocol, versions 2 and 3: decodes commands and encodes replies.
//!
//! In both versions a command is a list of texts. Only such lists are read here, without recursion and within bounds.
//! The existing crates for the protocol are made for clients, so they read every form of a reply. `redis-protocol`
//! 6.0.0 recurses into nested lists to any depth, so that 80 kB of input can end the process.

use std::io::Write;

/// Maximum number of texts in one command.
const WORDS_MAX: usize = 4096;
/// Maximum length of a line, in bytes. A line is a length, or a command that a person has typed.
const LINE_BYTES_MAX: usize = 1024;
/// Minimum length of an encoded text, in bytes: its head `$0`, the end of that line, and `\r\n`.
const WORD_BYTES_MIN: usize = 5;

/// Reason why bytes are not a command. The connection ends after this error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum ProtocolError {
    #[error("Protocol error: too big mbulk count string")]
    LongLine,
    #[error("Protocol error: invalid multibulk length")]
    Words,
    #[error("Protocol error: expected '$'")]
    NoText,
    #[error("Protocol error: invalid bulk length")]
    TextLength,
    #[error("Protocol error: a text does not end with its length")]
    TextEnd,
}

/// Result of [`read_command`].
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ReadCommand<'a> {
    Whole(ParsedCommand<'a>),
    /// Beginning of a command, of which more has to arrive.
    Part {
        /// Number of bytes without which the command cannot be whole. Until they have arrived, there is no need to read
        /// the command again.
        bytes_min: usize,
    },
}

/// Command that has been read.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ParsedCommand<'a> {
    /// Name and arguments of the command. If there are none, the command is empty and must be ignored.
    pub(super) words: Vec<&'a [u8]>,
    /// Number of bytes that the encoded command takes up.
    pub(super) bytes: usize,
}

/// Reads the command at the beginning of `bytes`.
pub(super) fn read_command(bytes: &[u8]) -> Result<ReadCommand<'_>, ProtocolError> {
    let part = |bytes_min: usize| ReadCommand::Part {
        bytes_min: bytes_min.max(bytes.len() + 1),
    };
    let Some((line, mut at)) = read_line(bytes, 0)? else {
        return Ok(part(0));
    };
    let Some(count) = line.strip_prefix(b"*") else {
        // A line that is not a list comes from a person who types, or from a prober that checks whether the server
        // answers.
        let words = line.split(u8::is_ascii_whitespace);
        let words = words.filter(|word| !word.is_empty()).collect();
        return Ok(ReadCommand::Whole(ParsedCommand { words, bytes: at }));
    };
    let count = match number(count) {
        Some(..=0) => 0,
        Some(count) => usize::try_from(count).unwrap_or(usize::MAX),
        None => return Err(ProtocolError::Words),
    };
    if count > WORDS_MAX {
        return Err(ProtocolError::Words);
    }
    let mut words = Vec::with_capacity(count.min(8));
    for missing in (0..count).rev() {
        let rest_bytes_min = missing * WORD_BYTES_MIN;
        let Some((line, text)) = read_line(bytes, at)? else {
            return Ok(part(at + WORD_BYTES_MIN + rest_bytes_min));
        };
        let length = line.strip_prefix(b"$").ok_or(ProtocolError::NoText)?;
        let length = number(length).and_then(|length| usize::try_from(length).ok());
        let length = length.ok_or(ProtocolError::TextLength)?;
        let end = text.checked_add(length).ok_or(ProtocolError::TextLength)?;
        let (Some(word), Some(behind)) = (
            bytes.get(text..end),
            bytes.get(end..).and_then(<[u8]>::first_chunk),
        ) else {
            return Ok(part(end.saturating_add(2 + rest_bytes_min)));
        };
        if behind != b"\r\n" {
            return Err(ProtocolError::TextEnd);
        }
        words.push(word);
        at = end + 2;
    }
    Ok(ReadCommand::Whole(ParsedCommand { words, bytes: at }))
}

/// Reads the line that begins at `from`. Returns the line without its end, and the position of the next line. `None` if
/// the end of the line has not arrived yet.
fn read_line(bytes: &[u8], from: usize) -> Result<Option<(&[u8], usize)>, ProtocolError> {
    let rest = bytes.get(from..).unwrap_or_default();
    let end = rest.iter().take(LINE_BYTES_MAX).position(|byte| *byte == b'\n');
    let Some(end) = end else {
        return match rest.len() < LINE_BYTES_MAX {
            true => Ok(None),
            false => Err(ProtocolError::LongLine),
        };
    };
    let line = rest.get(..end).unwrap_or_default();
    Ok(Some((line.strip_suffix(b"\r").unwrap_or(line), from + end + 1)))
}

fn number(digits: &[u8]) -> Option<i64> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// Buffer of encoded replies, each after the previous one.
#[derive(Debug, Default)]
pub(super) struct ReplyBuffer {
    bytes: Vec<u8>,
    /// Whether the client has asked for version 3 of the protocol.
    pub(super) is_third: bool,
}

impl ReplyBuffer {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Empties the buffer. Keeps up to `bytes_max` bytes of its memory.
    pub(super) fn clear(&mut self, bytes_max: usize) {
        self.bytes.clear();
        self.bytes.shrink_to(bytes_max);
    }

    pub(super) fn simple(&mut self, text: &str) {
        self.line('+', text);
    }

    /// Writes an error. Control characters become spaces, because the text may repeat bytes of the client.
    pub(super) fn error(&mut self, text: &str) {
        let text: String = text
            .chars()
            .map(|character| if character.is_control() { ' ' } else { character })
            .collect();
        self.line('-', &text);
    }

    pub(super) fn number(&mut self, number: u64) {
        self.line(':', number);
    }

    pub(super) fn text(&mut self, text: &[u8]) {
        self.line('$', text.len());
        self.raw(text);
        self.raw(b"\r\n");
    }

    /// Writes the head of a list with `count` items.
    pub(super) fn list(&mut self, count: usize) {
        self.line('*', count);
    }

    /// Writes the head of a map with `entries` entries. In version 2 of the protocol, a map is a list.
    pub(super) fn map(&mut self, entries: usize) {
        match self.is_third {
            true => self.line('%', entries),
            false => self.list(entries * 2),
        }
    }

    /// Writes bytes that are already encoded as a reply.
    pub(super) fn raw(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    fn line(&mut self, kind: char, content: impl std::fmt::Display) {
        // Writing to memory cannot fail.
        let _ = write!(self.bytes, "{kind}{content}\r\n");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn command(words: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
        for word in words {
            bytes.extend(format!("${}\r\n", word.len()).bytes());
            bytes.extend(word);
            bytes.extend(b"\r\n");
        }
        bytes
    }

    #[test]
    fn lines_are_commands_too() {
        for (line, words) in [
            (&b"PING\r\n"[..], vec![&b"PING"[..]]),
            (b"  hkeys  1 \n", vec![b"hkeys", b"1"]),
            (b"\r\n", vec![]),
            (b"*0\r\n", vec![]),
            (b"*-1\r\n", vec![]),
        ] {
            let bytes = line.len();
            let command = ParsedCommand { words, bytes };
            assert_eq!(read_command(line), Ok(ReadCommand::Whole(command)));
        }
    }

    #[test]
    fn what_is_no_command_is_refused() {
        let long = vec![b'a'; LINE_BYTES_MAX];
        for (bytes, error) in [
            (&b"*x\r\n"[..], ProtocolError::Words),
            (b"*4097\r\n", ProtocolError::Words),
            (b"*99999999999999999999\r\n", ProtocolError::Words),
            // A list within a list.
            (b"*1\r\n*1\r\n", ProtocolError::NoText),
            (b"*1\r\n:1\r\n", ProtocolError::NoText),
            (b"*1\r\n$-1\r\n", ProtocolError::TextLength),
            (b"*1\r\n$x\r\n", ProtocolError::TextLength),
            (b"*1\r\n$1\r\nabc", ProtocolError::TextEnd),
            (&long, ProtocolError::LongLine),
        ] {
            let shown = String::from_utf8_lossy(bytes);
            assert_eq!(read_command(bytes), Err(error), "{shown:?}");
        }
        let endless = read_command(b"*1\r\n$9223372036854775807\r\n").unwrap();
        assert!(matches!(endless, ReadCommand::Part { bytes_min } if bytes_min > 1 << 62));
    }

    #[test]
    fn a_command_that_comes_byte_by_byte_is_read_few_times() {
        let bytes = command(&vec![b"x".to_vec(); WORDS_MAX]);
        let (mut bytes_min, mut reads) = (0, 0);
        for come in 1..bytes.len() {
            if come < bytes_min {
                continue;
            }
            reads += 1;
            match read_command(&bytes[..come]).unwrap() {
                ReadCommand::Part { bytes_min: next } => bytes_min = next,
                ReadCommand::Whole(command) => panic!("{command:?}"),
            }
        }
        assert!(reads < 40, "{reads}");
    }

    #[test]
    fn replies_have_the_form_of_their_version() {
        let mut replies = ReplyBuffer::default();
        replies.map(1);
        replies.error("ERR a\r\nb");
        replies.text(b"\0");
        replies.number(3);
        assert_eq!(replies.bytes(), b"*2\r\n-ERR a  b\r\n$1\r\n\0\r\n:3\r\n");
        replies.clear(0);
        replies.is_third = true;
        replies.map(1);
        assert_eq!(replies.bytes(), b"%1\r\n");
    }

    proptest! {
        #[test]
        fn a_command_is_read_when_its_end_has_come(
            words in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 1..6),
            behind in prop::collection::vec(any::<u8>(), 0..5),
        ) {
            let bytes = command(&words);
            for cut in 0..bytes.len() {
                let read = read_command(&bytes[..cut]).unwrap();
                let ReadCommand::Part { bytes_min } = read else {
                    panic!("{read:?}");
                };
                prop_assert!(cut < bytes_min && bytes_min <= bytes.len());
            }
            let with_more = [bytes.clone(), behind].concat();
            let words: Vec<&[u8]> = words.iter().map(Vec::as_slice).collect();
            let bytes = bytes.len();
            let command = ParsedCommand { words, bytes };
            prop_assert_eq!(read_command(&with_more), Ok(ReadCommand::Whole(command)));
        }

        #[test]
        fn any_bytes_give_an_answer(bytes in prop::collection::vec(any::<u8>(), 0..200), changed: u8, place: prop::sample::Index) {
            let _ = read_command(&bytes);
            let mut changed_one = command(&[bytes, b"x".to_vec()]);
            let place = place.index(changed_one.len());
            changed_one[place] = changed;
            if let Ok(ReadCommand::Whole(command)) = read_command(&changed_one) {
                prop_assert!(command.bytes <= changed_one.len());
            }
        }
    }
}
