//! Sizes and durations as people write and read them.

use std::time::Duration;

use bytesize::ByteSize;

/// Reads `64KiB`, `10 GiB`, `500MB` or a plain number of bytes.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    match text.trim().parse::<ByteSize>() {
        // The parser cuts every larger size to this one.
        Ok(ByteSize(u64::MAX)) => Err("a size is less than 16EiB".to_string()),
        Ok(size) => Ok(size.as_u64()),
        Err(_) => Err("a size is a number and a unit, e.g. 64KiB, 10GiB or 500MB".to_string()),
    }
}

/// Reads `30s`, `5min`, `1h 30m`.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .map_err(|_| "a duration is a number and a unit, e.g. 30s, 5min or 1h".to_string())
}

/// `1.5 MiB`.
pub(crate) fn size(bytes: u64) -> String {
    ByteSize(bytes).display().iec().to_string()
}

/// `12,345`.
pub(crate) fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// `1 file`, `12,345 files`.
pub(crate) fn counted(number: u64, one: &str, many: &str) -> String {
    format!("{} {}", count(number), if number == 1 { one } else { many })
}

/// `950ms`, `12s`, `3m 20s`: two figures are enough.
pub(crate) fn duration(time: Duration) -> String {
    let secs = time.as_secs();
    match secs {
        0 => format!("{}ms", time.as_millis()),
        1..=9 => format!("{:.1}s", time.as_secs_f64()),
        10..=59 => format!("{secs}s"),
        60..=3599 => format!("{}m {}s", secs / 60, secs % 60),
        3600..=86_399 => format!("{}h {}m", secs / 3600, secs % 3600 / 60),
        _ => format!("{}d {}h", secs / 86_400, secs % 86_400 / 3600),
    }
}

/// The same for what is known in seconds only.
pub(crate) fn whole_secs(secs: u64) -> String {
    if secs < 10 { format!("{secs}s") } else { duration(Duration::from_secs(secs)) }
}

/// Bytes per second, `0 B/s` for no time at all.
pub(crate) fn rate(bytes: u64, time: Duration) -> String {
    let secs = time.as_secs_f64();
    let per_sec = if secs > 0.0 { bytes as f64 / secs } else { 0.0 };
    format!("{}/s", size(per_sec as u64))
}

/// A time in seconds since 1970 as `2026-11-21 10:20:30` (UTC), for years of four digits; the
/// bare number otherwise.
pub(crate) fn date(unix_secs: i64) -> String {
    let Ok(secs) = u64::try_from(unix_secs) else { return format!("@{unix_secs}") };
    // humantime refuses to format what lies after the year 9999.
    if secs >= 253_402_300_800 {
        return format!("@{unix_secs}");
    }
    let time = std::time::UNIX_EPOCH + Duration::from_secs(secs);
    let text = humantime::format_rfc3339_seconds(time).to_string();
    text.trim_end_matches('Z').replace('T', " ")
}

/// The same for a time that cannot be before 1970.
pub(crate) fn unix_date(unix_secs: u64) -> String {
    date(i64::try_from(unix_secs).unwrap_or(i64::MAX))
}

/// `drwxr-xr-x`, as `ls -l` writes it.
pub(crate) fn mode(kind: atoll_vfs::FileKind, mode: u32) -> String {
    use atoll_vfs::FileKind;
    let mut out = String::with_capacity(10);
    out.push(match kind {
        FileKind::Regular => '-',
        FileKind::Directory => 'd',
        FileKind::Symlink => 'l',
        FileKind::Fifo => 'p',
        FileKind::Socket => 's',
        FileKind::CharDevice => 'c',
        FileKind::BlockDevice => 'b',
    });
    for (shift, special, letter) in [(6, 0o4000, 's'), (3, 0o2000, 's'), (0, 0o1000, 't')] {
        let bits = mode >> shift & 7;
        out.push(if bits & 4 != 0 { 'r' } else { '-' });
        out.push(if bits & 2 != 0 { 'w' } else { '-' });
        out.push(match (bits & 1 != 0, mode & special != 0) {
            (true, true) => letter,
            (false, true) => letter.to_ascii_uppercase(),
            (true, false) => 'x',
            (false, false) => '-',
        });
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use atoll_vfs::FileKind;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        let cases = [
            ("4096", 4096),
            ("64KiB", 65536),
            ("10 GiB", 10 << 30),
            ("1MB", 1_000_000),
            ("64k", 64_000),
        ];
        for (text, bytes) in cases {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for wrong in ["", "many", "-1", "10 apples", "16EiB", "17EiB", "1e30"] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn durations_are_read_and_written() {
        assert_eq!(parse_duration("30s"), Ok(Duration::from_secs(30)));
        assert!(parse_duration("soon").is_err());
        let cases = [(950, "950ms"), (2_500, "2.5s"), (59_999, "59s"), (200_000, "3m 20s")];
        for (ms, text) in cases {
            assert_eq!(duration(Duration::from_millis(ms)), text);
        }
        assert_eq!(duration(Duration::from_secs(90_000)), "1d 1h");
        assert_eq!((whole_secs(0), whole_secs(61)), ("0s".into(), "1m 1s".into()));
    }

    #[test]
    fn numbers_are_grouped() {
        for (number, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (1_234_567, "1,234,567")] {
            assert_eq!(count(number), text);
        }
        assert_eq!(counted(1, "file", "files"), "1 file");
    }

    #[test]
    fn dates_of_any_age_are_written() {
        assert_eq!(date(0), "1970-01-01 00:00:00");
        assert_eq!(date(-5), "@-5");
        assert_eq!(date(i64::MAX), format!("@{}", i64::MAX));
    }

    #[test]
    fn modes_read_as_in_ls() {
        assert_eq!(mode(FileKind::Directory, 0o755), "drwxr-xr-x");
        assert_eq!(mode(FileKind::Regular, 0o4755), "-rwsr-xr-x");
        assert_eq!(mode(FileKind::Regular, 0o2644), "-rw-r-Sr--");
        assert_eq!(mode(FileKind::Directory, 0o1777), "drwxrwxrwt");
        assert_eq!(mode(FileKind::Symlink, 0o777), "lrwxrwxrwx");
    }
}
