//! Lines of a file or of standard input.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use super::failure::Failure;

/// The longest line read, in bytes: more than the largest message that any configuration allows takes as JSON.
const LINE_BYTES_MAX: u64 = 256 << 20;

/// Opens `path`; `-` is standard input.
pub(super) fn open(path: &Path) -> Result<Box<dyn BufRead>, Failure> {
    if path == Path::new("-") {
        return Ok(Box::new(BufReader::new(io::stdin())));
    }
    let opened = match path.is_dir() {
        // It could be opened, but not read.
        true => Err(io::ErrorKind::IsADirectory.into()),
        false => File::open(path),
    };
    let file = opened.map_err(|error| {
        Failure::usage(format_args!(
            "cannot open {path:?}: {error}; name a readable file, or - for standard input"
        ))
    })?;
    Ok(Box::new(BufReader::new(file)))
}

/// One line that is not empty, with its number from 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NumberedLine {
    /// The number in its file, empty lines counted.
    pub(super) number: u64,
    /// The line, without spaces around it.
    pub(super) text: String,
}

/// Reads `input` line by line; blank lines are passed over. Ends after the first line that cannot be read.
pub(super) fn numbered(mut input: Box<dyn BufRead>) -> impl Iterator<Item = Result<NumberedLine, Failure>> {
    let mut number = 0;
    let mut has_ended = false;
    std::iter::from_fn(move || {
        while !has_ended {
            number += 1;
            match read_line(&mut input) {
                Ok(None) => return None,
                Ok(Some(text)) if text.trim().is_empty() => {}
                Ok(Some(text)) => {
                    let text = text.trim().to_owned();
                    return Some(Ok(NumberedLine { number, text }));
                }
                Err(error) => {
                    has_ended = true;
                    let failure = Failure::failed(format_args!("line {number}: cannot be read: {error}"));
                    return Some(Err(failure));
                }
            }
        }
        None
    })
}

fn read_line(input: &mut Box<dyn BufRead>) -> io::Result<Option<String>> {
    let mut line = String::new();
    let bytes = input.by_ref().take(LINE_BYTES_MAX).read_line(&mut line)?;
    if bytes as u64 == LINE_BYTES_MAX && !line.ends_with('\n') {
        let rule = format!("a line may have {LINE_BYTES_MAX} bytes, at most; split it");
        return Err(io::Error::new(io::ErrorKind::InvalidData, rule));
    }
    Ok((bytes > 0).then_some(line))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blank_lines_count_but_are_passed_over() {
        let input = Box::new("one\n\n  two  \r\n\n".as_bytes());
        let lines: Vec<_> = numbered(input).collect::<Result<_, _>>().unwrap();
        let line = |number, text: &str| NumberedLine {
            number,
            text: text.to_owned(),
        };
        assert_eq!(lines, [line(1, "one"), line(3, "two")]);
    }

    #[test]
    fn what_is_not_text_ends_the_reading_with_its_line() {
        let input = Box::new(&b"one\n\xff\nthree\n"[..]);
        let lines: Vec<_> = numbered(input).collect();
        assert_eq!(lines.len(), 2);
        assert!(lines[1].as_ref().unwrap_err().to_string().starts_with("line 2: "));
    }

    #[test]
    fn what_is_no_file_is_wrong_usage() {
        for path in ["no/such/file", "/"] {
            let failure = open(Path::new(path)).err().unwrap();
            assert_eq!(failure.status, super::super::ExitStatus::Usage, "{path}");
            assert!(failure.to_string().contains(path), "{failure}");
        }
    }
}
