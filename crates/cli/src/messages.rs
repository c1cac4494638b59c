//! What a process says on standard error: its log, and lines for people.
//!
//! A terminal, a pipe that nobody reads and a file on a full disk are all the same here: no line ends
//! the process, and in a process that serves others (a node, a mount) none makes it wait either. There, lines go
//! into a queue in memory, which a thread writes. What finds the queue full, or what the file does not take, is
//! lost; the first line that is written afterwards says how much.
//!
//! It does not know which lines are worth being said.

use std::fmt;
use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tracing_subscriber::fmt::MakeWriter;

/// How many bytes of lines may wait. A guess: some thousand lines.
const MAX_WAITING_BYTES: usize = 256 << 10;

/// How long a process that ends waits until its last lines are written.
const LAST_LINES_LIMIT: Duration = Duration::from_secs(1);

/// The pause before a descriptor that does not wait (`O_NONBLOCK`) is tried again.
const RETRY_AFTER: Duration = Duration::from_millis(20);

/// The queue of a process that serves others.
static QUEUE: OnceLock<Arc<Queue>> = OnceLock::new();

/// Says a line to the person or the file behind standard error, as `note!` does, which panics where nothing
/// can be written.
macro_rules! note {
    ($($line:tt)*) => { $crate::messages::say(format_args!($($line)*)) };
}
pub(crate) use note;

/// Says a line.
pub(crate) fn say(line: fmt::Arguments<'_>) {
    // There is nobody else to tell.
    let _ = writeln!(Log, "{line}");
}

/// From now on no line is waited for.
pub(crate) fn never_wait() {
    QUEUE.get_or_init(|| {
        let queue = Arc::new(Queue::default());
        let its = queue.clone();
        let writer = move || its.write_to(&StandardError);
        // Without a thread all lines are lost, which ends nothing.
        let _ = std::thread::Builder::new().name("log".into()).spawn(writer);
        queue
    });
}

/// Waits a moment until what was said is written.
pub(crate) fn finish() {
    if let Some(queue) = QUEUE.get() {
        queue.finish(LAST_LINES_LIMIT);
    }
}

/// Standard error as a writer. An error of it is nobody's concern.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Log;

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match QUEUE.get() {
            Some(queue) => queue.push(bytes),
            None => io::stderr().write_all(bytes)?,
        }
        Ok(bytes.len())
    }

    /// As one line, which others do not come between.
    fn write_fmt(&mut self, line: fmt::Arguments<'_>) -> io::Result<()> {
        self.write_all(line.to_string().as_bytes())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Log {
    type Writer = Log;

    fn make_writer(&self) -> Log {
        Log
    }
}

/// Where a queue's lines go.
trait Sink {
    /// Writes a part of `bytes`, and says how long it is.
    fn write(&self, bytes: &[u8]) -> io::Result<usize>;
}

/// The descriptor itself: who waits here holds no lock of the library's standard error.
struct StandardError;

impl Sink for StandardError {
    fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::write(io::stderr(), bytes)?)
    }
}

/// Lines that are to be written.
#[derive(Default)]
struct Queue {
    state: Mutex<Waiting>,
    /// Lines have come.
    filled: Condvar,
    /// What was there is written, or lost.
    emptied: Condvar,
}

#[derive(Default)]
struct Waiting {
    bytes: Vec<u8>,
    /// The writer has taken lines and is not done with them.
    is_writing: bool,
    /// Lines that were lost since the last one that was written.
    lost: usize,
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, Waiting> {
        // A process that ends because of a panic says so here.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes lines, or loses them. Waits for nothing.
    fn push(&self, lines: &[u8]) {
        let mut state = self.state();
        if state.bytes.len() + lines.len() > MAX_WAITING_BYTES {
            state.lost += lines_in(lines);
            return;
        }
        state.bytes.extend_from_slice(lines);
        self.filled.notify_one();
    }

    /// Waits until all lines are written or lost, but not for longer than `limit`.
    fn finish(&self, limit: Duration) {
        let has_work = |state: &mut Waiting| state.is_writing || !state.bytes.is_empty();
        let waited = self.emptied.wait_timeout_while(self.state(), limit, has_work);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Writes lines for as long as the process lives.
    fn write_to(&self, sink: &impl Sink) {
        loop {
            self.write_next(sink);
        }
    }

    /// Waits for lines and writes them.
    fn write_next(&self, sink: &impl Sink) {
        let (lines, lost) = {
            let nothing = |state: &mut Waiting| state.bytes.is_empty();
            let state = self.filled.wait_while(self.state(), nothing);
            let mut state = state.unwrap_or_else(PoisonError::into_inner);
            state.is_writing = true;
            (std::mem::take(&mut state.bytes), std::mem::take(&mut state.lost))
        };
        let lost = if lost == 0 { 0 } else { lost - said_lost(sink, lost) };
        let lost = lost + if lost == 0 { write_all(sink, &lines) } else { lines_in(&lines) };
        let mut state = self.state();
        state.lost += lost;
        state.is_writing = false;
        self.emptied.notify_all();
    }
}

/// Says how many lines are missing; all of them if that could be said.
fn said_lost(sink: &impl Sink, lost: usize) -> usize {
    // A part of the first of them may be there.
    let told = format!("\n{lost} lines of this log are lost: they could not be written\n");
    if write_all(sink, told.as_bytes()) == 0 { lost } else { 0 }
}

/// Writes lines; how many of them could not be.
fn write_all(sink: &impl Sink, lines: &[u8]) -> usize {
    let mut rest = lines;
    while !rest.is_empty() {
        match sink.write(rest) {
            Ok(0) => return lines_in(rest),
            Ok(len) => rest = &rest[len..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                std::thread::sleep(RETRY_AFTER);
            }
            Err(_) => return lines_in(rest),
        }
    }
    0
}

fn lines_in(bytes: &[u8]) -> usize {
    bytes.iter().filter(|byte| **byte == b'\n').count().max(1)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// A disk that takes so many bytes.
    #[derive(Default)]
    struct Disk {
        written: RefCell<Vec<u8>>,
        room: RefCell<usize>,
    }

    impl Disk {
        fn text(&self) -> String {
            String::from_utf8(self.written.borrow().clone()).expect("text")
        }
    }

    impl Sink for Disk {
        fn write(&self, bytes: &[u8]) -> io::Result<usize> {
            let room = &mut *self.room.borrow_mut();
            let len = bytes.len().min(*room);
            if len == 0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            *room -= len;
            self.written.borrow_mut().extend_from_slice(&bytes[..len]);
            Ok(len)
        }
    }

    #[test]
    fn what_a_full_disk_does_not_take_is_counted_and_told_when_it_takes_lines_again() {
        let (queue, disk) = (Queue::default(), Disk::default());
        *disk.room.borrow_mut() = 6;
        queue.push(b"one\ntwo\nthree\n");
        queue.write_next(&disk);
        queue.push(b"four\n");
        queue.write_next(&disk);
        assert_eq!(disk.text(), "one\ntw");
        *disk.room.borrow_mut() = 1000;
        queue.push(b"five\n");
        queue.write_next(&disk);
        let told = "one\ntw\n3 lines of this log are lost: they could not be written\nfive\n";
        assert_eq!(disk.text(), told);
        queue.push(b"six\n");
        queue.write_next(&disk);
        assert_eq!(disk.text(), format!("{told}six\n"), "it is told once");
    }

    #[test]
    fn nobody_waits_for_a_writer_that_is_stuck() {
        // No thread writes at all.
        let queue = Queue::default();
        let line = [b'x'; 99].iter().chain(b"\n").copied().collect::<Vec<u8>>();
        for _ in 0..2 * MAX_WAITING_BYTES / line.len() {
            queue.push(&line);
        }
        queue.finish(Duration::from_millis(1));
        let disk = Disk::default();
        *disk.room.borrow_mut() = usize::MAX;
        queue.write_next(&disk);
        let kept = MAX_WAITING_BYTES / line.len();
        let lost = 2 * MAX_WAITING_BYTES / line.len() - kept;
        assert!(disk.text().starts_with(&format!("\n{lost} lines of this log are lost")));
        assert_eq!(disk.text().matches("xxx\n").count(), kept, "memory is bounded");
        queue.finish(Duration::from_secs(600));
    }
}
