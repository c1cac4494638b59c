//! Sees decoders that do not come back: a thread that looks at what the others decode.

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// How long one input may take. The slowest targets take a few milliseconds, on a busy
/// machine a hundred times that.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// What is being decoded.
#[derive(Default)]
pub(crate) struct Watch {
    present: Mutex<Option<Present>>,
}

struct Present {
    since: Instant,
    name: &'static str,
    input: Vec<u8>,
}

impl Watch {
    /// A decoder begins with an input.
    pub(crate) fn begin(&self, name: &'static str, input: &[u8]) {
        *self.lock() = Some(Present { since: Instant::now(), name, input: input.to_vec() });
    }

    /// It came back.
    pub(crate) fn end(&self) {
        *self.lock() = None;
    }

    /// The target and the input that have taken longer than `patience`.
    pub(crate) fn overdue(&self, patience: Duration) -> Option<(&'static str, Vec<u8>)> {
        let present = self.lock();
        let late = present.as_ref().filter(|present| present.since.elapsed() > patience)?;
        Some((late.name, late.input.clone()))
    }

    fn lock(&self) -> MutexGuard<'_, Option<Present>> {
        self.present.lock().expect("no holder of this lock panics")
    }
}
