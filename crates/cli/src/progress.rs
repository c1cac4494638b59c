//! Progress on standard error: a bar on a terminal, a line now and then elsewhere.
//!
//! The code that does the work counts it in [`Counts`]; a [`Watch`] reads the counts a few times
//! a second and has a [`Meter`] show them with a rate and the time left.

use std::io::{IsTerminal, stderr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use atoll_volume::owned::{Phase, Progress};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::messages::note;
use crate::units;

/// Between two lines where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);
/// The period over which a rate is averaged: long enough to be steady, short enough to be
/// current. A guess.
const RATE_WINDOW: Duration = Duration::from_secs(3);

/// How often a watch looks.
const LOOK_EVERY: Duration = Duration::from_millis(125);

/// How far some work has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct State {
    /// Files finished.
    pub files: u64,
    /// Files in all, if known yet.
    pub files_total: Option<u64>,
    /// Bytes finished.
    pub bytes: u64,
    /// Bytes in all, if known yet.
    pub bytes_total: Option<u64>,
    /// Blocks the ring took that it did not have.
    pub new_blocks: u64,
    /// Everything is sent; the ring has not acknowledged all of it yet.
    pub flushing: bool,
}

/// Counts work as it is done, from any thread.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    files: AtomicU64,
    files_found: AtomicU64,
    bytes: AtomicU64,
    bytes_found: AtomicU64,
    new_blocks: AtomicU64,
    all_found: AtomicBool,
    flushing: AtomicBool,
}

impl Counts {
    /// How far the work has come.
    pub(crate) fn state(&self) -> State {
        let total = |found: &AtomicU64| self.all_found.load(Relaxed).then(|| found.load(Relaxed));
        State {
            files: self.files.load(Relaxed),
            files_total: total(&self.files_found),
            bytes: self.bytes.load(Relaxed),
            bytes_total: total(&self.bytes_found),
            new_blocks: self.new_blocks.load(Relaxed),
            flushing: self.flushing.load(Relaxed),
        }
    }
}

impl Progress for Counts {
    fn discovered(&self, files: u64, bytes: u64) {
        self.files_found.fetch_add(files, Relaxed);
        self.bytes_found.fetch_add(bytes, Relaxed);
    }

    fn discovery_ended(&self) {
        self.all_found.store(true, Relaxed);
    }

    fn done(&self, files: u64, bytes: u64) {
        self.files.fetch_add(files, Relaxed);
        self.bytes.fetch_add(bytes, Relaxed);
    }

    fn uploaded(&self, new_blocks: u64, _new_bytes: u64) {
        self.new_blocks.fetch_add(new_blocks, Relaxed);
    }

    fn phase(&self, phase: Phase) {
        self.flushing.store(matches!(phase, Phase::Flush | Phase::Root), Relaxed);
    }
}

/// Shows counts while work goes on; must be made within a tokio runtime.
pub(crate) struct Watch {
    counts: Arc<Counts>,
    meter: Arc<Meter>,
    looking: tokio::task::JoinHandle<()>,
}

impl Watch {
    /// Starts to look at new counts.
    pub(crate) fn start(verb: &'static str, quiet: bool) -> Watch {
        let counts = Arc::new(Counts::default());
        let meter = Arc::new(Meter::new(verb, quiet));
        let (seen, shown) = (counts.clone(), meter.clone());
        let looking = tokio::spawn(async move {
            loop {
                tokio::time::sleep(LOOK_EVERY).await;
                shown.show(seen.state());
            }
        });
        Watch { counts, meter, looking }
    }

    /// Where to count.
    pub(crate) fn progress(&self) -> Arc<Counts> {
        self.counts.clone()
    }

    /// Stops looking; returns how long it was.
    pub(crate) fn finish(self) -> Duration {
        self.looking.abort();
        self.meter.finish()
    }
}

/// A bar, on a terminal.
fn bar(verb: &'static str, template: &str) -> Option<ProgressBar> {
    stderr().is_terminal().then(|| {
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr_with_hz(8));
        let style = ProgressStyle::with_template(template).expect("the template is right");
        bar.set_style(style.progress_chars("█▉▊▋▌▍▎▏ "));
        bar.set_prefix(verb);
        bar
    })
}

/// Shows how far some work has come.
pub(crate) struct Meter {
    verb: &'static str,
    bar: Option<ProgressBar>,
    quiet: bool,
    inner: Mutex<Inner>,
}

struct Inner {
    began: Instant,
    last_line: Instant,
    /// A recent past state, for the rate.
    past: (Instant, u64),
    recent: (Instant, u64),
}

impl Meter {
    /// A meter for `verb`, e.g. "publishing".
    pub(crate) fn new(verb: &'static str, quiet: bool) -> Meter {
        let bar = if quiet { None } else { bar(verb, "{prefix} {bar:20} {wide_msg}") };
        let now = Instant::now();
        let inner = Inner { began: now, last_line: now, past: (now, 0), recent: (now, 0) };
        Meter { verb, bar, quiet, inner: Mutex::new(inner) }
    }

    /// Shows this state, if it is time to.
    pub(crate) fn show(&self, state: State) {
        if self.quiet {
            return;
        }
        let now = Instant::now();
        let mut inner = self.inner.lock().expect("no holder of this lock panics");
        if now - inner.recent.0 > RATE_WINDOW {
            inner.past = inner.recent;
            inner.recent = (now, state.bytes);
        }
        let per_sec = rate_per_sec(inner.past, (now, state.bytes));
        if let Some(bar) = &self.bar {
            bar.update(|shown| {
                // An empty bar until it is known how much there is.
                shown.set_len(state.bytes_total.unwrap_or(u64::MAX).max(1));
                shown.set_pos(state.bytes);
            });
            bar.set_message(describe(state, per_sec));
        } else if now - inner.last_line >= LINE_EVERY {
            inner.last_line = now;
            note!("{}: {}", self.verb, describe(state, per_sec));
        }
    }

    /// Takes the bar away; returns how long the work took.
    pub(crate) fn finish(&self) -> Duration {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        self.inner.lock().expect("no holder of this lock panics").began.elapsed()
    }
}

/// Shows what share of some work is done, called by the thread that works.
pub(crate) struct Share {
    verb: &'static str,
    bar: Option<ProgressBar>,
    began: Instant,
    last_line: Mutex<Instant>,
}

impl Share {
    /// For `verb`, e.g. "checking".
    pub(crate) fn new(verb: &'static str) -> Share {
        let bar = bar(verb, "{prefix} {bar:20} {percent} %{wide_msg}");
        let began = Instant::now();
        Share { verb, bar, began, last_line: Mutex::new(began) }
    }

    /// Shows that so many parts of so many are done, if it is time to.
    pub(crate) fn show(&self, done: u64, total: u64) {
        let left = left_of(self.began.elapsed(), done, total);
        if let Some(bar) = &self.bar {
            bar.update(|shown| {
                shown.set_len(total.max(1));
                shown.set_pos(done);
            });
            bar.set_message(left);
            return;
        }
        let mut last_line = self.last_line.lock().expect("no holder of this lock panics");
        if last_line.elapsed() >= LINE_EVERY {
            *last_line = Instant::now();
            note!("{}: {} %{left}", self.verb, done * 100 / total.max(1));
        }
    }

    /// Takes the bar away.
    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// The time left, in words, if it can be estimated.
fn left_of(elapsed: Duration, done: u64, total: u64) -> String {
    if done == 0 || done >= total {
        return String::new();
    }
    let secs = elapsed.as_secs_f64() * (total - done) as f64 / done as f64;
    format!(", {} left", units::whole_secs(secs.clamp(1.0, 1e7) as u64))
}

fn rate_per_sec(past: (Instant, u64), now: (Instant, u64)) -> f64 {
    let secs = (now.0 - past.0).as_secs_f64();
    if secs > 0.0 { now.1.saturating_sub(past.1) as f64 / secs } else { 0.0 }
}

/// The least important comes last: a narrow terminal cuts it off.
fn describe(state: State, per_sec: f64) -> String {
    let of = |done: String, total: Option<String>| match total {
        Some(total) => format!("{done} of {total}"),
        None => done,
    };
    let mut text = of(units::size(state.bytes), state.bytes_total.map(units::size));
    text += &format!(", {}/s", units::size(per_sec as u64));
    if state.flushing {
        text += ", waiting for the ring";
    } else if let Some(total) = state.bytes_total
        && per_sec > 0.0
        && total > state.bytes
    {
        // A stalled transfer would promise centuries.
        let left_secs = ((total - state.bytes) as f64 / per_sec).clamp(1.0, 1e7);
        text += &format!(", {} left", units::whole_secs(left_secs as u64));
    }
    let files = of(units::count(state.files), state.files_total.map(units::count));
    let is_one = state.files_total.unwrap_or(state.files) == 1;
    text += &format!("; {files} {}", if is_one { "file" } else { "files" });
    if state.new_blocks > 0 {
        text += &format!(", {} new", units::counted(state.new_blocks, "block", "blocks"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_names_what_is_done_and_what_is_left() {
        let state = State {
            files: 1200,
            files_total: Some(5000),
            bytes: 30 << 20,
            bytes_total: Some(120 << 20),
            ..State::default()
        };
        assert_eq!(
            describe(state, (10 << 20) as f64),
            "30.0 MiB of 120.0 MiB, 10.0 MiB/s, 9s left; 1,200 of 5,000 files"
        );
    }

    #[test]
    fn an_unknown_total_and_a_stalled_rate_are_not_guessed() {
        let state = State { files: 3, bytes: 1024, ..State::default() };
        assert_eq!(describe(state, 0.0), "1.0 KiB, 0 B/s; 3 files");
        let stalled = State { bytes_total: Some(1 << 60), ..state };
        assert!(describe(stalled, 0.001).contains("115d 17h left;"));
    }

    #[test]
    fn the_time_left_is_guessed_from_the_share_that_is_done() {
        assert_eq!(left_of(Duration::from_secs(10), 25, 100), ", 30s left");
        assert_eq!(left_of(Duration::from_secs(10), 0, 100), "");
        assert_eq!(left_of(Duration::from_secs(10), 100, 100), "");
        assert_eq!(left_of(Duration::from_secs(10), 101, 100), "");
    }

    #[test]
    fn totals_are_shown_only_once_they_are_final() {
        let counts = Counts::default();
        counts.discovered(10, 1000);
        counts.done(2, 100);
        assert_eq!((counts.state().files, counts.state().files_total), (2, None));
        counts.discovery_ended();
        counts.uploaded(7, 100);
        let state = counts.state();
        assert_eq!((state.files_total, state.bytes_total), (Some(10), Some(1000)));
        counts.phase(Phase::Flush);
        let text = describe(counts.state(), 1.0);
        assert!(text.contains("waiting for the ring; 2 of 10 files, 7 blocks new"), "{text}");
    }
}
