//! Words for people, and what may not be in them.

use kvatlas_client::rfc3339;

/// `text` without control characters but line feeds: what others sent must not steer a terminal.
pub(super) fn printable(text: &str) -> String {
    text.chars()
        .filter(|character| *character == '\n' || !character.is_control())
        .collect()
}

pub(super) const SECOND_US: u64 = 1_000_000;
const DAY_S: u64 = 86_400;

/// Since when something lasts, by the clock of the world, and how long that is: ` since 01:58:12 UTC (4 min)`, to be put behind other words. Days ago,
/// with the date. Nothing where that is not known.
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

/// A time in seconds, in the unit that suits it.
pub(super) fn lasted(seconds: u64) -> String {
    match seconds {
        ..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / DAY_S),
    }
}

/// A number and what it counts.
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
