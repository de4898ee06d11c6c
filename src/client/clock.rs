//! Wall clock: the time in microseconds since the Unix epoch, as messages have it, and as a text for people.

use std::time::{SystemTime, UNIX_EPOCH};

/// Returns the time now, in microseconds since the Unix epoch; 0 before the epoch.
pub fn unix_time_us() -> u64 {
    unix_us_of(SystemTime::now())
}

/// Converts a time to microseconds since the Unix epoch; 0 before the epoch.
pub fn unix_us_of(time: SystemTime) -> u64 {
    let since_epoch = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_epoch.as_micros()).unwrap_or(u64::MAX)
}

const MICROSECONDS_PER_SECOND: u64 = 1_000_000;
const SECONDS_PER_DAY: u64 = 86_400;

/// Formats a time in microseconds since the Unix epoch in RFC 3339 (UTC), to the second.
pub fn rfc3339(time_us: u64) -> String {
    let seconds = time_us / MICROSECONDS_PER_SECOND;
    let (year, month, day) = civil_date(seconds / SECONDS_PER_DAY);
    let second = seconds % SECONDS_PER_DAY;
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Returns year, month and day of the Gregorian calendar, from days since 1970-01-01.
///
/// The algorithm is Howard Hinnant's `civil_from_days`, <https://howardhinnant.github.io/date_algorithms.html>, without
/// its part for days before 1970. In its arithmetic, a year begins in March, so that a leap day is the last day of a
/// year. An era has 400 years.
fn civil_date(days_since_1970: u64) -> (u64, u64, u64) {
    const DAYS_PER_ERA: u64 = 146_097;
    const DAYS_FROM_ERA_0_TO_1970: u64 = 719_468;
    let days = days_since_1970 + DAYS_FROM_ERA_0_TO_1970;
    let (era, day_of_era) = (days / DAYS_PER_ERA, days % DAYS_PER_ERA);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 {
        month_from_march + 3
    } else {
        month_from_march - 9
    };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn times_are_microseconds_since_1970_and_never_negative() {
        assert_eq!(unix_us_of(UNIX_EPOCH + Duration::from_millis(2500)), 2_500_000);
        assert_eq!(unix_us_of(UNIX_EPOCH - Duration::from_secs(1)), 0);
        let (before, now) = (SystemTime::now(), unix_time_us());
        assert!((unix_us_of(before)..=unix_us_of(SystemTime::now())).contains(&now));
    }

    #[test]
    fn known_times_are_written_as_others_write_them() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (1_704_067_199, "2023-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(rfc3339(seconds * MICROSECONDS_PER_SECOND + 999_999), text);
        }
        // The far end is a time too, and no panic.
        assert!(rfc3339(u64::MAX).ends_with('Z'));
    }
}
