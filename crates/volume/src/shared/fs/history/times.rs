//! Times as names: `2026-11-24T05:00Z`; `2026-11-24T05:00:12.345Z` where they are not whole minutes. All are UTC.

use std::time::{Duration, UNIX_EPOCH};

/// The latest time that is written as a date, seconds since 1970: the end of the year 9999.
const LAST_DATE_SECS: u64 = 253_402_300_799;

/// The name of the state just before a time, milliseconds since 1970.
pub(in crate::shared) fn name(time_ms: u64) -> String {
    let time = UNIX_EPOCH + Duration::from_millis(time_ms.min(LAST_DATE_SECS * 1000));
    let time = humantime::format_rfc3339_millis(time).to_string();
    match time.strip_suffix(":00.000Z") {
        Some(whole) => format!("{whole}Z"),
        None => time,
    }
}

/// The time that a name says. Seconds that are written without their thousandths are meant whole: what was written within
/// them was there.
pub(super) fn parse(name: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(name).ok()?;
    let (whole, after_ms) = match text.len() {
        17 => (format!("{}:00Z", text.strip_suffix('Z')?), 0),
        20 => (text.to_owned(), 1000),
        24 => (text.to_owned(), 0),
        _ => return None,
    };
    let time = humantime::parse_rfc3339(&whole).ok()?;
    let since = u64::try_from(time.duration_since(UNIX_EPOCH).ok()?.as_millis()).ok()?;
    Some(since + after_ms)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for (name_, time_ms) in [("2026-11-20T12:00Z", 1_795_176_000_000), ("1970-01-01T00:00Z", 0)]
        {
            assert_eq!((name(time_ms).as_str(), parse(name_.as_bytes())), (name_, Some(time_ms)));
        }
        assert_eq!(parse(b"2026-11-20T12:00:05Z"), Some(1_795_176_006_000));
        for (name_, time_ms) in [
            ("2026-11-20T12:00:05.000Z", 1_795_176_005_000),
            ("2026-11-20T12:00:05.999Z", 1_795_176_005_999),
        ] {
            assert_eq!((name(time_ms).as_str(), parse(name_.as_bytes())), (name_, Some(time_ms)));
        }
        let wrong: [&[u8]; 11] = [
            b"2026-11-20T12:00:05.12Z",
            b"2026-11-20T12:00:05.12xZ",
            b"",
            b"history",
            b"2026-11-20T12:00",
            b"2026-11-20",
            b"2026-11-31T12:00Z",
            b"2026-11-20 12:00Z",
            b"1969-12-31T23:59Z",
            b"2026-11-20T12:00:xxZ",
            b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xffZ",
        ];
        for name in wrong {
            assert_eq!(parse(name), None, "{name:?}");
        }
    }

    #[test]
    fn no_time_cannot_be_named() {
        for time_ms in [0, 1, u64::MAX] {
            assert!(parse(name(time_ms).as_bytes()).is_some(), "{time_ms}");
        }
    }
}
