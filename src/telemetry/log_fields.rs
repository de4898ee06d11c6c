//! The fields of a log line as text. Fields contain names and texts from outside. No field can end its line, steer a
//! terminal, or fill the log.

use std::fmt::{self, Debug, Write};

use tracing::field::Field;
use tracing_subscriber::fmt::format::Writer;

/// Largest length of a field's value, in bytes. A longer value is cut.
const VALUE_BYTES_MAX: usize = 4096;

/// Writes a field as `name=value`, and the message without its name.
pub(super) fn write_field(writer: &mut Writer<'_>, field: &Field, value: &dyn Debug) -> fmt::Result {
    let name = field.name();
    if name != "message" {
        match writer.has_ansi_escapes() {
            true => write!(writer, "\u{1b}[3m{name}\u{1b}[0m\u{1b}[2m=\u{1b}[0m")?,
            false => write!(writer, "{name}=")?,
        }
    }
    let mut bounded = Bounded {
        writer,
        room: VALUE_BYTES_MAX,
    };
    match write!(bounded, "{value:?}") {
        Err(_) if bounded.room == 0 => writer.write_char('…'),
        written => written,
    }
}

/// Writer that cuts off a text. `room` is the number of bytes that it may still write. It writes characters that are
/// not plain (see [`is_plain`]) as escapes.
struct Bounded<'a, W> {
    writer: &'a mut W,
    room: usize,
}

impl<W: Write> Write for Bounded<'_, W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for character in text.chars() {
            let length = match is_plain(character) {
                true => character.len_utf8(),
                false => character.escape_default().len(),
            };
            if length > self.room {
                // Whatever follows is cut too, even if it is shorter.
                self.room = 0;
                return Err(fmt::Error);
            }
            self.room -= length;
            match is_plain(character) {
                true => self.writer.write_char(character)?,
                false => write!(self.writer, "{}", character.escape_default())?,
            }
        }
        Ok(())
    }
}

/// Whether a character is plain: visible, and without effect on other text. Control characters, ends of lines,
/// invisible characters and characters that turn the direction of text are not plain.
fn is_plain(character: char) -> bool {
    let is_hidden = matches!(
        character,
        '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
    );
    !character.is_control() && !is_hidden
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(text: &str, room: usize) -> (String, bool) {
        let mut writer = String::new();
        let is_whole = Bounded {
            writer: &mut writer,
            room,
        }
        .write_str(text)
        .is_ok();
        (writer, is_whole)
    }

    #[test]
    fn what_steers_is_written_out_and_the_rest_as_it_is() {
        let (text, is_whole) = written("a\nb\u{1b}[2Jc\r\u{9b}\u{202e}\u{2028}é模 \"\\", 1000);
        assert_eq!(text, "a\\nb\\u{1b}[2Jc\\r\\u{9b}\\u{202e}\\u{2028}é模 \"\\");
        assert!(is_whole);
    }

    #[test]
    fn a_value_is_cut_between_characters() {
        assert_eq!(written("模模模", 7), ("模模".to_owned(), false));
        assert_eq!(written("ab\ncd", 3), ("ab".to_owned(), false));
        assert_eq!(written("ab\ncd", 6), ("ab\\ncd".to_owned(), true));
    }
}
