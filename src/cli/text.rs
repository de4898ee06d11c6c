//! Words for people, and what may not be in them.

/// `text` without control characters but line feeds: what others sent must not steer a terminal.
pub(super) fn printable(text: &str) -> String {
    text.chars()
        .filter(|character| *character == '\n' || !character.is_control())
        .collect()
}

/// A number and what it counts.
pub(super) fn counted(number: u64, one: &str, several: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { several })
}
