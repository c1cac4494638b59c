//! What a call answered with `EIO`, in words: an error number says nothing of which inode or
//! block was meant. The attribute `user.tfs.trouble` (see [`crate::stat`]) shows the last ones.
//!
//! They are this process's: one that serves several file systems has them in one list.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard};

/// How many are kept.
const MOST: usize = 8;

static TROUBLE: Mutex<VecDeque<String>> = Mutex::new(VecDeque::new());

fn list() -> MutexGuard<'static, VecDeque<String>> {
    TROUBLE.lock().expect("no holder of this lock panics")
}

/// Notes what was met, once for as long as it is among the last.
pub(super) fn note(what: &dyn std::fmt::Display) {
    let what = what.to_string();
    {
        let mut list = list();
        if list.contains(&what) {
            return;
        }
        if list.len() == MOST {
            list.pop_front();
        }
        list.push_back(what.clone());
    }
    tracing::error!("{what}");
}

/// The last ones, the oldest first.
pub(crate) fn met() -> Vec<String> {
    list().iter().cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_ones_are_kept_and_each_once() {
        for n in 0..2 * MOST {
            note(&format!("test block {n}"));
            note(&format!("test block {n}"));
        }
        // Other tests of this process may have met something as well.
        let met = met();
        assert!(met.len() <= MOST);
        let of_last = met.iter().filter(|what| **what == format!("test block {}", 2 * MOST - 1));
        assert_eq!(of_last.count(), 1);
        assert!(!met.contains(&"test block 0".to_owned()));
    }
}
