//! Which old states of a volume are kept: of each unit of time, the last state of each of the
//! newest so many minutes, ten minutes, hours, days or weeks that have one.
//!
//! A volume that one mount writes has states of its whole tree, and drops some of them later
//! ([`crate::owned::history`]). In a shared volume each inode has versions of its own, and when one is
//! replaced it is known already how long it is kept ([`Keep::kept_secs_after`]): until the state of
//! the last full unit at which it was the present one is not kept any more. Under a policy that counts minutes, some of
//! the versions that no full minute has seen are kept as long as those of a minute
//! ([`Keep::kept_secs_within_a_minute`]).

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use crate::format::FormatError;
use crate::format::cursor::Cursor;

const MINUTE_MS: u64 = 60_000;
const DAY_MS: u64 = 24 * 60 * MINUTE_MS;

/// The units, the finest first: letter, length, and what is added to a time so that the first of
/// all began when 1970 did. That was a Thursday; weeks begin with Monday. Each is a multiple of the first.
const UNITS: [(char, u64, u64); 5] = [
    ('m', MINUTE_MS, 0),
    ('t', 10 * MINUTE_MS, 0),
    ('h', 60 * MINUTE_MS, 0),
    ('d', DAY_MS, 0),
    ('w', 7 * DAY_MS, 3 * DAY_MS),
];

/// The most states of one unit: all units together stay below
/// [`MAX_STATES`](crate::owned::history::MAX_STATES).
pub const MAX_COUNT: u16 = 1000;

/// How many states of each unit are kept, as `60m/144t/24h/7d/4w`; `none` keeps nothing. A minute, ten minutes (`t`),
/// an hour, day or week without a state does not count. Times are UTC.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Keep([u16; UNITS.len()]);

impl Keep {
    /// Nothing.
    pub const NONE: Keep = Keep([0; UNITS.len()]);

    /// The field of a root.
    pub(crate) fn to_bytes(self) -> Vec<u8> {
        self.0.iter().flat_map(|count| count.to_be_bytes()).collect()
    }

    /// Reads the field of a root.
    pub(crate) fn take(cursor: &mut Cursor) -> Result<Keep, FormatError> {
        let mut keep = Keep::NONE;
        for count in &mut keep.0 {
            *count = cursor.u16()?.min(MAX_COUNT);
        }
        Ok(keep)
    }

    /// Whether a state of one time is the last one of its minute, or what else the finest unit is,
    /// if the next one is of the other time.
    pub(crate) fn separates(self, one_unix_ms: u64, other_unix_ms: u64) -> bool {
        let finest = (0..UNITS.len()).find(|unit| self.0[*unit] > 0);
        finest.is_some_and(|unit| bucket(unit, one_unix_ms) != bucket(unit, other_unix_ms))
    }

    /// Those of `times` that are kept. Times after `now` are of a clock that was ahead: they are
    /// kept until they have come, and take no place of others.
    pub(crate) fn kept(self, times: &BTreeSet<u64>, now_unix_ms: u64) -> BTreeSet<u64> {
        if self == Keep::NONE {
            return BTreeSet::new();
        }
        let (past, coming): (BTreeSet<u64>, _) =
            times.iter().partition(|time| **time <= now_unix_ms);
        let mut kept: BTreeSet<u64> = coming;
        for (unit, count) in self.0.into_iter().enumerate() {
            let mut buckets = BTreeSet::new();
            for time in past.iter().rev() {
                if buckets.len() == usize::from(count) {
                    break;
                }
                if buckets.insert(bucket(unit, *time)) {
                    kept.insert(*time);
                }
            }
        }
        kept
    }

    /// How long a version of an inode is kept after another one has replaced it, seconds; 0: not at all.
    /// `began` is when it was written, `ended` when it was replaced, milliseconds since 1970. It is kept for
    /// the longest unit whose states show it, those that were the present one when such a unit ended.
    pub fn kept_secs_after(self, began_unix_ms: u64, ended_unix_ms: u64) -> u64 {
        let spanned = (0..UNITS.len())
            .filter(|unit| bucket(*unit, began_unix_ms) != bucket(*unit, ended_unix_ms));
        spanned.map(|unit| self.unit_ms(unit) / 1000).max().unwrap_or(0)
    }

    /// How long a version of an inode may be kept after another one has replaced it that no full minute has seen,
    /// seconds; 0: not at all, which is so of policies that do not count minutes.
    pub fn kept_secs_within_a_minute(self) -> u64 {
        self.unit_ms(0) / 1000
    }

    /// Whether one minute, the finest unit that a policy can have, saw both times.
    pub fn is_within_a_minute(one_unix_ms: u64, other_unix_ms: u64) -> bool {
        bucket(0, one_unix_ms) == bucket(0, other_unix_ms)
    }

    /// When the minute began that saw a time.
    pub(crate) fn minute_began_ms(unix_ms: u64) -> u64 {
        unix_ms - unix_ms % MINUTE_MS
    }

    /// Whether all is there still that was kept of the minute that saw a time.
    pub(crate) fn has_whole_minute(self, unix_ms: u64, now_unix_ms: u64) -> bool {
        Keep::minute_began_ms(unix_ms).saturating_add(self.unit_ms(0)) > now_unix_ms
    }

    /// For how long the states of the longest unit are kept, seconds.
    pub fn longest_secs(self) -> u64 {
        (0..UNITS.len()).map(|unit| self.unit_ms(unit) / 1000).max().unwrap_or(0)
    }

    /// The times of the states that a shared volume keeps now, milliseconds since 1970: the beginnings of
    /// the newest so many units, as far as the volume is that old.
    pub fn states(self, created_unix_ms: u64, now_unix_ms: u64) -> BTreeSet<u64> {
        let mut times = BTreeSet::new();
        for (unit, count) in self.0.into_iter().enumerate() {
            let (_, length_ms, shift_ms) = UNITS[unit];
            let newest = bucket(unit, now_unix_ms);
            let starts = (0..u64::from(count)).filter_map(|back| newest.checked_sub(back));
            let starts = starts.filter_map(|number| (number * length_ms).checked_sub(shift_ms));
            times.extend(starts.take_while(|start| *start >= created_unix_ms));
        }
        times
    }

    fn unit_ms(self, unit: usize) -> u64 {
        u64::from(self.0[unit]) * UNITS[unit].1
    }
}

/// The number of the minute, or what else the unit is.
fn bucket(unit: usize, unix_ms: u64) -> u64 {
    let (_, length_ms, shift_ms) = UNITS[unit];
    unix_ms.saturating_add(shift_ms) / length_ms
}

impl Default for Keep {
    fn default() -> Keep {
        Keep([60, 144, 24, 7, 4])
    }
}

impl fmt::Display for Keep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<String> = UNITS
            .iter()
            .zip(self.0)
            .filter(|(_, count)| *count > 0)
            .map(|((letter, ..), count)| format!("{count}{letter}"))
            .collect();
        f.write_str(if parts.is_empty() { "none" } else { "" })?;
        f.write_str(&parts.join("/"))
    }
}

impl FromStr for Keep {
    type Err = String;

    fn from_str(text: &str) -> Result<Keep, String> {
        let mut keep = Keep::NONE;
        if text == "none" {
            return Ok(keep);
        }
        let wrong = || {
            format!(
                "it is `none`, or counts of minutes, ten minutes, hours, days and weeks as in \
                 60m/144t/24h/7d/4w, each from 1 to {MAX_COUNT}"
            )
        };
        for part in text.split('/') {
            let letter = part.chars().next_back().ok_or_else(wrong)?;
            let unit = UNITS.iter().position(|(known, ..)| *known == letter).ok_or_else(wrong)?;
            let count = part[..part.len() - 1].parse().ok();
            let count = count.filter(|count| (1..=MAX_COUNT).contains(count)).ok_or_else(wrong)?;
            if std::mem::replace(&mut keep.0[unit], count) > 0 {
                return Err(wrong());
            }
        }
        Ok(keep)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `D-HH:MM`, of day D since Monday, 2026-11-16, as milliseconds since 1970.
    fn at(text: &str) -> u64 {
        let (day, time) = text.split_once('-').expect("a day");
        let (hour, minute) = time.split_once(':').expect("a time");
        let [day, hour, minute] = [day, hour, minute].map(|n| n.parse::<u64>().expect("a number"));
        1_794_787_200_000 + day * DAY_MS + (hour * 60 + minute) * MINUTE_MS
    }

    #[test]
    fn the_last_state_of_each_of_the_newest_buckets_is_kept() {
        let cases: [(&str, &str, &[&str], &[&str]); 8] = [
            ("nothing", "none", &["0-10:00", "0-11:00"], &[]),
            (
                "the last of each hour",
                "2h",
                &["0-08:59", "0-09:10", "0-09:59", "0-10:00", "0-10:01"],
                &["0-09:59", "0-10:01"],
            ),
            (
                "hours without a state do not count",
                "2h",
                &["0-01:00", "3-05:00"],
                &["0-01:00", "3-05:00"],
            ),
            (
                "one state may stand for several units",
                "1m/1h/1d",
                &["0-10:00", "0-23:58", "0-23:59"],
                &["0-23:59"],
            ),
            (
                "days end at midnight",
                "2d",
                &["0-23:59", "1-00:00", "1-23:59", "2-00:00"],
                &["1-23:59", "2-00:00"],
            ),
            (
                "weeks begin with Monday",
                "2w",
                &["6-23:59", "7-00:00", "13-12:00", "14-00:00"],
                &["13-12:00", "14-00:00"],
            ),
            (
                "units together",
                "2h/2d",
                &["0-10:00", "0-12:00", "1-08:00", "1-09:00", "1-10:00"],
                &["0-12:00", "1-09:00", "1-10:00"],
            ),
            (
                "times to come take no place",
                "1h",
                &["0-10:00", "0-11:00", "50-10:00", "50-11:00"],
                &["0-11:00", "50-10:00", "50-11:00"],
            ),
        ];
        for (what, keep, times, expected) in cases {
            let keep: Keep = keep.parse().expect("a policy");
            let set = |times: &[&str]| times.iter().copied().map(at).collect::<BTreeSet<u64>>();
            assert_eq!(keep.kept(&set(times), at("20-00:00")), set(expected), "{what}");
        }
    }

    #[test]
    fn the_finest_unit_separates_states() {
        let cases = [
            ("none", "0-10:00", "9-10:00", false),
            ("24h", "0-10:00", "0-10:59", false),
            ("24h", "0-10:59", "0-11:00", true),
            ("7d/4w", "0-10:59", "0-11:00", false),
            ("5m/7d", "0-10:59", "0-11:00", true),
            // A clock that went back.
            ("24h", "0-11:00", "0-10:59", true),
        ];
        for (keep, one, other, expected) in cases {
            let keep: Keep = keep.parse().expect("a policy");
            assert_eq!(keep.separates(at(one), at(other)), expected, "{keep} {one} {other}");
        }
    }

    #[test]
    fn a_version_is_kept_for_the_longest_unit_whose_end_it_has_seen() {
        const HOUR: u64 = 3600;
        const DAY: u64 = 24 * HOUR;
        let cases = [
            ("24h/7d/4w", "0-10:00", "0-10:59", 0),
            ("24h/7d/4w", "0-10:59", "0-11:00", DAY),
            ("24h/7d/4w", "0-23:59", "1-00:00", 7 * DAY),
            ("24h/7d/4w", "6-23:59", "7-00:00", 28 * DAY),
            ("24h/7d/4w", "0-10:00", "9-10:00", 28 * DAY),
            ("none", "0-10:00", "9-10:00", 0),
            ("7d", "0-10:00", "0-23:59", 0),
            ("5m/2h", "0-10:00", "0-10:01", 5 * 60),
            // The longer of both, not the coarser.
            ("48h/1d", "0-23:00", "1-01:00", 2 * DAY),
            // A clock that went back.
            ("24h", "0-11:00", "0-10:59", DAY),
        ];
        for (keep, began, ended, secs) in cases {
            let keep: Keep = keep.parse().expect("a policy");
            assert_eq!(keep.kept_secs_after(at(began), at(ended)), secs, "{keep} {began} {ended}");
        }
        // The default: what a full minute, ten minutes, an hour and a week have seen.
        let default = Keep::default();
        assert_eq!(default.kept_secs_after(at("0-10:00"), at("0-10:00") + 59_999), 0);
        assert_eq!(default.kept_secs_after(at("0-10:01"), at("0-10:02")), HOUR);
        assert_eq!(default.kept_secs_after(at("0-10:09"), at("0-10:10")), DAY);
        assert_eq!(default.kept_secs_after(at("6-23:59"), at("7-00:00")), 28 * DAY);
        assert_eq!(default.kept_secs_within_a_minute(), HOUR);
        assert_eq!("24h/7d".parse::<Keep>().expect("a policy").kept_secs_within_a_minute(), 0);
        assert_eq!(Keep::default().longest_secs(), 28 * DAY);
        assert_eq!("1000m/3d".parse::<Keep>().expect("a policy").longest_secs(), 3 * DAY);
        assert_eq!(Keep::NONE.longest_secs(), 0);
        assert_eq!(Keep::default().kept_secs_after(u64::MAX, 0), 28 * DAY);
    }

    #[test]
    fn states_are_the_beginnings_of_the_newest_units() {
        let states = |keep: &str, created, now| {
            keep.parse::<Keep>().expect("a policy").states(at(created), at(now))
        };
        let set = |times: &[&str]| times.iter().copied().map(at).collect::<BTreeSet<u64>>();
        let found = states("2h/2d/2w", "0-00:00", "9-10:30");
        assert_eq!(found, set(&["7-00:00", "8-00:00", "9-00:00", "9-09:00", "9-10:00", "0-00:00"]));
        // Not before the volume was made.
        assert_eq!(states("24h/7d/4w", "9-08:15", "9-10:30"), set(&["9-09:00", "9-10:00"]));
        assert_eq!(states("3m", "9-10:30", "9-10:30"), set(&["9-10:30"]));
        let tens = states("2m/3t", "9-10:00", "9-10:35");
        assert_eq!(tens, set(&["9-10:10", "9-10:20", "9-10:30", "9-10:34", "9-10:35"]));
        assert!(states("none", "0-00:00", "9-10:30").is_empty());
        assert!(states("24h/7d/4w", "9-10:30", "9-08:00").is_empty(), "a clock that is behind");
    }

    /// Each state that is listed was kept: the version that it shows is kept until then, whenever
    /// it was replaced.
    #[test]
    fn what_a_listed_state_shows_is_kept() {
        let keep: Keep = "7m/8t/5h/3d/2w".parse().expect("a policy");
        let mut random = 1_u64;
        let mut below = |limit: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % limit
        };
        for _ in 0..2000 {
            let now = at("30-00:00") + below(7 * DAY_MS);
            for state in keep.states(0, now) {
                let began = state - below(20 * DAY_MS);
                let ended = state + 1 + below(now - state + 1);
                let until = ended + keep.kept_secs_after(began, ended) * 1000;
                assert!(until > now || began == state, "{state} {began} {ended} {now}");
            }
        }
    }

    #[test]
    fn policies_are_read_and_written() {
        for text in ["none", "24h/7d/4w", "1m", "1000m/3w", "60m/144t/24h/7d/4w"] {
            assert_eq!(text.parse::<Keep>().expect("a policy").to_string(), text);
        }
        assert_eq!("4w/24h/144t/7d/60m".parse(), Ok(Keep::default()));
        for wrong in ["", "h", "0h", "24", "24x", "1001h", "24h/", "24h/7h", "-1d", "1.5d", "24é"]
        {
            let error = wrong.parse::<Keep>().expect_err(wrong);
            assert!(error.contains("24h/7d/4w"), "{error}");
        }
    }
}
