//! Writing to standard output and standard error, whose readers may end before this process does.

use std::fmt;
use std::io::{ErrorKind, Write};

use super::failure::Failure;

/// Writes `text` to standard output. If the reader, such as `head`, has ended, that is no failure.
pub(super) fn print(text: &str) -> Result<(), Failure> {
    let mut output = std::io::stdout().lock();
    match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Failure::failed(format_args!(
            "cannot write to standard output: {error}"
        ))),
        _ => Ok(()),
    }
}

/// Writes a text for a person to standard error. If the reader has ended, nothing happens, whereas `eprint!` would
/// panic.
pub(crate) fn say(text: impl fmt::Display) {
    let _ = write!(std::io::stderr().lock(), "{text}");
}

/// Prints one JSON object and a line feed.
pub(super) fn print_json(value: &impl serde::Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string(value)
        .map_err(|error| Failure::failed(format_args!("cannot write the answer as JSON: {error}")))?;
    print(&format!("{text}\n"))
}
