//! Points in time on the command line: `NAME@2026-11-20T12:00`. All are UTC.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

/// How to write one.
const FORMS: &str = "a time (UTC) is written 2026-11-20, 2026-11-20T12:00, 2026-11-20T12:00:05 or \
                     2026-11-20T12:00:05.678";

/// A point in time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Moment {
    /// Milliseconds since 1970.
    pub unix_ms: u64,
    /// Whether the milliseconds were written.
    is_exact: bool,
}

impl Moment {
    /// A time that is shown to the second.
    pub(crate) fn of(unix_ms: u64) -> Moment {
        Moment { unix_ms, is_exact: false }
    }

    /// The end of it, milliseconds since 1970: what was written within a second that is written is before that.
    pub(crate) fn after_ms(&self) -> u64 {
        match self.is_exact {
            true => self.unix_ms,
            false => self.unix_ms.saturating_add(self.unix_ms % 1000 / 999),
        }
    }

    /// Why nothing is kept of it.
    pub(crate) fn why_nothing_is_kept(&self) -> &'static str {
        let since = SystemTime::UNIX_EPOCH + Duration::from_millis(self.unix_ms);
        match since > SystemTime::now() {
            true => "that time is to come",
            false => "nothing is kept of that time",
        }
    }
}

impl FromStr for Moment {
    type Err = String;

    /// Seconds that are written are meant whole, so that what [`written`] shows of a time with
    /// milliseconds is not before it.
    fn from_str(text: &str) -> Result<Moment, String> {
        let wrong = || FORMS.to_string();
        let bare = text.strip_suffix('Z').unwrap_or(text);
        let (whole, last_ms) = match bare.len() {
            10 => (format!("{bare}T00:00:00Z"), 0),
            16 => (format!("{bare}:00Z"), 0),
            19 => (format!("{bare}Z"), 999),
            23 => (format!("{bare}Z"), 0),
            _ => return Err(wrong()),
        };
        let time = humantime::parse_rfc3339(&whole).map_err(|_| wrong())?;
        let since = time.duration_since(SystemTime::UNIX_EPOCH).map_err(|_| wrong())?;
        let whole_ms = u64::try_from(since.as_millis()).map_err(|_| wrong())?;
        Ok(Moment { unix_ms: whole_ms + last_ms, is_exact: bare.len() == 23 })
    }
}

impl fmt::Display for Moment {
    /// As it is read back.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = written(self.unix_ms);
        if self.is_exact {
            let seconds = text.trim_end_matches('Z');
            return write!(f, "{seconds}.{:03}Z", self.unix_ms % 1000);
        }
        match self.unix_ms % 1000 {
            0 => write!(f, "{}Z", text.trim_end_matches(":00Z")),
            _ => f.write_str(&text),
        }
    }
}

/// A time in milliseconds since 1970 to the second, as it can be written behind `@`.
pub(crate) fn written(unix_ms: u64) -> String {
    // What lies after the year 9999 cannot be formatted.
    let secs = (unix_ms / 1000).min(253_402_300_799);
    humantime::format_rfc3339_seconds(SystemTime::UNIX_EPOCH + Duration::from_secs(secs))
        .to_string()
}

/// What stands before and behind the last `@` of an argument.
pub(crate) fn split(text: &str) -> (&str, Option<&str>) {
    match text.rsplit_once('@') {
        Some((before, time)) => (before, Some(time)),
        None => (text, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_to_come_is_not_one_of_which_nothing_is_kept() {
        let why = |text: &str| text.parse::<Moment>().expect("a time").why_nothing_is_kept();
        assert_eq!(why("9999-01-01"), "that time is to come");
        assert_eq!(why("2001-01-01"), "nothing is kept of that time");
    }

    #[test]
    fn times_are_read_and_written() {
        let noon = 1_795_176_000_000;
        let cases = [
            ("2026-11-20", noon - 12 * 3_600_000, "2026-11-20T00:00Z"),
            ("2026-11-20Z", noon - 12 * 3_600_000, "2026-11-20T00:00Z"),
            ("2026-11-20T12:00", noon, "2026-11-20T12:00Z"),
            ("2026-11-20T12:00Z", noon, "2026-11-20T12:00Z"),
            ("2026-11-20T12:00:00", noon + 999, "2026-11-20T12:00:00Z"),
            ("2026-11-20T12:00:05Z", noon + 5999, "2026-11-20T12:00:05Z"),
            ("2026-11-20T12:00:05.678", noon + 5678, "2026-11-20T12:00:05.678Z"),
            ("2026-11-20T12:00:05.999Z", noon + 5999, "2026-11-20T12:00:05.999Z"),
            ("2026-11-20T12:00:00.000Z", noon, "2026-11-20T12:00:00.000Z"),
        ];
        for (text, unix_ms, shown) in cases {
            let moment: Moment = text.parse().expect(text);
            assert_eq!((moment.unix_ms, moment.to_string().as_str()), (unix_ms, shown), "{text}");
            assert_eq!(shown.parse(), Ok(moment), "{text}");
        }
        let wrong = [
            "",
            "yesterday",
            "2026-11-31",
            "2026-11-20T25:00",
            "2026-11-20T12",
            "2026-11-20 12:00+01:00",
            "1969-12-31",
            "20-11-2026",
            "2026–11–20",
            "2026-11-20T12:00:05.67",
        ];
        for text in wrong {
            assert_eq!(text.parse::<Moment>(), Err(FORMS.to_string()), "{text}");
        }
    }

    #[test]
    fn a_second_ends_after_it_and_a_millisecond_is_itself() {
        let noon = 1_795_176_000_000;
        let after = |text: &str| text.parse::<Moment>().expect("a time").after_ms();
        assert_eq!(after("2026-11-20T12:00"), noon);
        assert_eq!(after("2026-11-20T12:00:05"), noon + 6000);
        assert_eq!(after("2026-11-20T12:00:05.999"), noon + 5999);
    }

    #[test]
    fn a_shown_time_names_what_was_then() {
        for unix_ms in [1_795_176_000_000, 1_795_176_000_001, 1_795_176_059_999] {
            let read: Moment = written(unix_ms).parse().expect("a time");
            assert!((unix_ms..unix_ms + 1000).contains(&read.unix_ms), "{unix_ms}");
        }
        assert_eq!(written(u64::MAX), "9999-12-31T23:59:59Z");
    }
}
