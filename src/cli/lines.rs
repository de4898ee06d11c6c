//! Lines of a file or of standard input.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use super::failure::Failure;

/// Length of a line's text, in bytes, from which on the line is refused as too long. The largest message that a
/// configuration can allow is shorter than this, even as JSON.
const LINE_BYTES_MAX: u64 = 256 << 20;

/// Opens the file at `path`, or standard input if `path` is `-`.
pub(super) fn open(path: &Path) -> Result<Box<dyn BufRead>, Failure> {
    if path == Path::new("-") {
        return Ok(Box::new(BufReader::new(io::stdin())));
    }
    let opened = match path.is_dir() {
        // A directory can be opened as a file, but reading it fails.
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

/// Line that is not blank, with its number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NumberedLine {
    /// Number of the line in the input, from 1. Blank lines count.
    pub(super) number: u64,
    /// Text of the line, without spaces around it.
    pub(super) text: String,
}

/// Error that takes the place of a line of the input.
#[derive(Debug, thiserror::Error)]
pub(super) enum LineError {
    /// The line is not UTF-8.
    #[error("line {number}: is not UTF-8")]
    NotText {
        /// Number of the line in the input, from 1.
        number: u64,
    },
    /// The input cannot be read from this line on.
    #[error("line {number}: cannot be read: {source}")]
    Unreadable {
        /// Number of the line in the input, from 1.
        number: u64,
        /// The operating system's error.
        source: io::Error,
    },
    /// The line is too long.
    #[error("line {number}: a line may have {LINE_BYTES_MAX} bytes, at most; split it")]
    TooLong {
        /// Number of the line in the input, from 1.
        number: u64,
    },
}

impl LineError {
    /// Whether the error concerns one line only, so that the following lines can still be read.
    pub(super) fn is_of_one_line(&self) -> bool {
        matches!(self, Self::NotText { .. })
    }
}

impl From<LineError> for Failure {
    fn from(error: LineError) -> Self {
        Self::failed(error)
    }
}

/// Returns the lines of `input` that are not blank. Ends after the first error that concerns more than one line.
pub(super) fn numbered(mut input: Box<dyn BufRead>) -> impl Iterator<Item = Result<NumberedLine, LineError>> {
    let mut number = 0;
    let mut has_ended = false;
    std::iter::from_fn(move || {
        while !has_ended {
            number += 1;
            match read_line(&mut input, number) {
                Ok(None) => return None,
                Ok(Some(text)) if text.trim().is_empty() => {}
                Ok(Some(text)) => {
                    let text = text.trim().to_owned();
                    return Some(Ok(NumberedLine { number, text }));
                }
                Err(error) => {
                    has_ended = !error.is_of_one_line();
                    return Some(Err(error));
                }
            }
        }
        None
    })
}

fn read_line(input: &mut Box<dyn BufRead>, number: u64) -> Result<Option<String>, LineError> {
    let mut line = Vec::new();
    let read = input.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line);
    let bytes = read.map_err(|source| LineError::Unreadable { number, source })?;
    if bytes as u64 == LINE_BYTES_MAX && !line.ends_with(b"\n") {
        return Err(LineError::TooLong { number });
    }
    let text = String::from_utf8(line).map_err(|_| LineError::NotText { number })?;
    Ok((bytes > 0).then_some(text))
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
    fn a_line_that_is_not_text_is_the_only_one_that_is_lost() {
        let input = Box::new(&b"one\n\xff\nthree\n"[..]);
        let lines: Vec<_> = numbered(input).collect();
        assert_eq!(lines.len(), 3);
        let error = lines[1].as_ref().unwrap_err();
        assert!(matches!(error, LineError::NotText { number: 2 }), "{error}");
        assert!(error.is_of_one_line());
        assert_eq!(lines[2].as_ref().unwrap().number, 3);
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
