//! Functions that write numbers and times in words, and remove characters that must not reach a terminal.

use kvatlas_client::rfc3339;

/// Returns `text` without control characters except line feeds, so that texts from outside cannot steer a terminal.
pub(super) fn printable(text: &str) -> String {
    text.chars()
        .filter(|character| *character == '\n' || !character.is_control())
        .collect()
}

pub(super) const SECOND_US: u64 = 1_000_000;
const DAY_S: u64 = 86_400;

/// Returns a text about a time, to be appended to other words: ` since 01:58:12 UTC (4 min)`. The text has the date,
/// too, if the time is a day or more ago. Empty if the time is not known.
pub(super) fn since(since_us: Option<u64>, now_us: u64) -> String {
    let Some(since_us) = since_us else {
        return String::new();
    };
    let seconds = now_us.saturating_sub(since_us) / SECOND_US;
    let at = rfc3339(since_us);
    let (date, time) = at.trim_end_matches('Z').split_once('T').unwrap_or((&at, ""));
    let date = if seconds < DAY_S {
        String::new()
    } else {
        format!("{date} ")
    };
    format!(" since {date}{time} UTC ({})", lasted(seconds))
}

/// Returns a duration in seconds as text, in s, min, h or days.
pub(super) fn lasted(seconds: u64) -> String {
    match seconds {
        ..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / DAY_S),
    }
}

/// Returns a number with its noun, in the singular or the plural.
pub(super) fn counted(number: u64, one: &str, several: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { several })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_said_with_how_long_ago_they_are() {
        let since_us = 1_800_000_000_000_000;
        let said = |seconds: u64| since(Some(since_us), since_us + seconds * SECOND_US);
        assert_eq!(said(0), " since 08:00:00 UTC (0 s)");
        assert_eq!(said(119), " since 08:00:00 UTC (119 s)");
        assert_eq!(said(299), " since 08:00:00 UTC (4 min)");
        assert_eq!(said(7300), " since 08:00:00 UTC (2 h)");
        assert_eq!(said(90_000), " since 2027-01-15 08:00:00 UTC (25 h)");
        assert_eq!(said(400_000), " since 2027-01-15 08:00:00 UTC (4 days)");
        assert_eq!(
            since(Some(since_us), 0),
            " since 08:00:00 UTC (0 s)",
            "clocks differ"
        );
        assert_eq!(since(None, 0), "");
    }
}
