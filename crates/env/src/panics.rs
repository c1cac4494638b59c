//! Panics that are caught where they arise.
//!
//! A process that serves others may end at a panic, as a task that is gone leaves what it did undone. Where a panic of a
//! library is an answer like another, it is caught by [`catch`], and such a process goes on: its panic hook asks
//! [`are_caught`].

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    /// Calls of [`catch`] on this thread that have not returned.
    static CATCHING: Cell<usize> = const { Cell::new(0) };
}

/// Does `work`. If it panics, the result is what it panicked with; the caller has to drop what `work` may have left
/// half done.
pub fn catch<T>(work: impl FnOnce() -> T) -> std::thread::Result<T> {
    CATCHING.set(CATCHING.get() + 1);
    let outcome = catch_unwind(AssertUnwindSafe(work));
    CATCHING.set(CATCHING.get() - 1);
    outcome
}

/// Whether a panic on this thread is caught by [`catch`].
pub fn are_caught() -> bool {
    CATCHING.get() > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panics_are_caught_within_a_call_and_not_after_it() {
        assert!(!are_caught());
        let inner = || catch(|| panic!("caught")).is_err() && are_caught();
        assert_eq!(catch(inner).ok(), Some(true), "calls may be nested");
        assert!(!are_caught());
        let elsewhere =
            || std::thread::scope(|scope| scope.spawn(are_caught).join().expect("ends"));
        assert_eq!(catch(elsewhere).ok(), Some(false), "another thread's are not");
    }
}
