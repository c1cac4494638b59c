//! Reading inodes ahead of a program that looks up the names of a directory one after another, as `ls -l`,
//! `git status`, `cp -r` and compilers do.
//!
//! Each lookup costs a round trip to the ring, and programs wait for one before they begin the next. The
//! names of a directory have an order, in which it is listed and most programs go through it. So once two
//! lookups were of neighbours, the inodes after them are read at the same time: four, and more with
//! each that is used. A program that opens files in this order gains as well, since an inode that was read a moment
//! ago is promised ([`Consistency`](super::Consistency)).
//!
//! Invariants: what is shown is no older than without it, since a lookup decides itself whether what is known is new
//! enough; of one mount one run of names is read ahead of, the newest; no more than [`MOST`] inodes
//! are read for nothing at the end of a run.

use std::sync::Arc;
use std::time::Duration;

use atoll_env::Instant;
use bytes::Bytes;
use futures_util::future::join_all;

use super::Shared;
use crate::shared::entries::Entries;
use crate::shared::inode::{Contents, InodeKey};
use crate::shared::inodes::Version;

/// Inodes that are read at once at the beginning of a run, and at most. A guess: what a directory's replicas answer
/// in one round trip.
const FIRST: usize = 4;
const MOST: usize = 64;
/// A lookup so many names after the one before belongs to its run: programs leave some names out.
const NEAR: usize = 8;

/// The run of lookups that is read ahead of.
#[derive(Default)]
pub(super) struct LookupAhead {
    run: Option<Run>,
}

struct Run {
    directory: InodeKey,
    /// The name that was looked up last.
    at: Bytes,
    /// How many names after it were asked for, and when the last of them was.
    ahead: usize,
    asked_at: Instant,
    /// How many are asked for next.
    next: usize,
}

impl LookupAhead {
    /// A lookup of `name`, whose inode is not known newly enough if `is_old`; the inodes to be read with it.
    fn on_lookup(
        &mut self,
        (key, entries): (InodeKey, &Entries),
        name: &Bytes,
        is_old: bool,
        (now, age): (Instant, Duration),
    ) -> Vec<InodeKey> {
        let run = self.run.take().filter(|run| run.directory == key);
        let steps = run.as_ref().and_then(|run| {
            let mut near = entries.starting_at(&run.at).take(NEAR);
            near.position(|near| near.name == *name).filter(|steps| *steps > 0)
        });
        let (Some(run), Some(steps)) = (run, steps) else {
            self.run = Some(Run {
                directory: key,
                at: name.clone(),
                ahead: 0,
                asked_at: now,
                next: FIRST,
            });
            return Vec::new();
        };
        // What was asked for too long ago is too old by now.
        let is_lapsed = now.since(run.asked_at) >= age;
        let ahead = if is_lapsed { 0 } else { run.ahead.saturating_sub(steps) };
        let mut run = Run { at: name.clone(), ahead, ..run };
        let mut wanted = Vec::new();
        // Before the last of those that were asked for is used, so that no lookup waits.
        if (is_old || run.ahead > 0) && run.ahead <= run.next / 4 {
            let next = entries.starting_at(name).skip(1 + run.ahead).take(run.next);
            wanted.extend(next.map(|entry| entry.inode));
            (run.ahead, run.asked_at) = (run.ahead + wanted.len(), now);
            run.next = (2 * run.next).min(MOST);
        }
        self.run = Some(run);
        wanted
    }
}

impl Shared {
    /// A program looks up a name of a directory: reads the inodes of those that it may look up next, in the
    /// background.
    pub(super) fn read_ahead(
        self: &Arc<Self>,
        (key, directory): (InodeKey, &Version),
        name: &Bytes,
        inode: InodeKey,
    ) {
        let (age, now) = (self.options.names_max_age, self.env.now());
        if !self.options.read_inodes_ahead || age.is_zero() {
            return;
        }
        let Contents::Directory(entries) = &directory.inode().contents else { return };
        let is_old = |inode| !self.inodes.is_known_within(inode, age, now);
        let wanted = {
            let mut ahead = self.ahead.lock().expect("no holder of this lock panics");
            ahead.on_lookup((key, entries), name, is_old(inode), (now, age))
        };
        let wanted: Vec<InodeKey> = wanted.into_iter().filter(|inode| is_old(*inode)).collect();
        if wanted.is_empty() {
            return;
        }
        let shared = self.clone();
        self.env.spawn(Box::pin(async move {
            // What cannot be read is told when it is looked up.
            join_all(wanted.into_iter().map(|inode| shared.inodes.read(inode, shared.names_age())))
                .await;
        }));
    }
}

#[cfg(test)]
mod tests {
    use atoll_key::kinds::certified::{Dot, WriterId};
    use atoll_vfs::FileKind;

    use super::*;
    use crate::shared::inode::Entry;

    const AGE: Duration = Duration::from_secs(1);

    fn inode(n: usize) -> InodeKey {
        InodeKey([n as u8; 32])
    }

    fn name(n: usize) -> Bytes {
        format!("{n:03}").into()
    }

    fn directory() -> Entries {
        let dot = Dot { writer: WriterId::from_bytes([1; 16]), height: 1 };
        let entry = |n| Entry::new(name(n), (inode(n), FileKind::Regular), dot, 0);
        (0..200).map(entry).collect()
    }

    /// What is read with each of these lookups.
    fn read(ahead: &mut LookupAhead, is_old: bool, at_ms: u64, names: &[usize]) -> Vec<Vec<u8>> {
        let (entries, now) = (directory(), Instant::default() + Duration::from_millis(at_ms));
        let mut look = |n: &usize| {
            let wanted = ahead.on_lookup((inode(250), &entries), &name(*n), is_old, (now, AGE));
            wanted.into_iter().map(|inode| inode.0[0]).collect()
        };
        names.iter().map(&mut look).collect()
    }

    #[test]
    fn the_second_neighbour_begins_a_run_and_nothing_is_read_twice() {
        let ahead = &mut LookupAhead::default();
        assert_eq!(read(ahead, true, 0, &[3, 4]), [vec![], vec![5, 6, 7, 8]]);
        // Two of the four are left when the next eight are asked for.
        assert_eq!(read(ahead, false, 10, &[5]), [vec![]; 1]);
        assert_eq!(read(ahead, false, 20, &[6])[0], (9..17).collect::<Vec<u8>>());
        let all: Vec<u8> =
            read(ahead, false, 30, &(7..150).collect::<Vec<_>>()).into_iter().flatten().collect();
        assert_eq!(all, (17..17 + all.len() as u8).collect::<Vec<u8>>());
    }

    #[test]
    fn what_is_known_already_is_not_read_ahead_of() {
        let ahead = &mut LookupAhead::default();
        assert!(read(ahead, false, 0, &[3, 4, 5, 6]).concat().is_empty());
    }

    #[test]
    fn a_jump_ends_a_run_and_so_does_a_pause() {
        let ahead = &mut LookupAhead::default();
        assert_eq!(read(ahead, true, 0, &[3, 4, 40, 39, 38]).concat(), [5, 6, 7, 8]);
        assert_eq!(read(ahead, true, 0, &[39]), [[40, 41, 42, 43]]);
        // After a second all is too old that was read with it.
        assert_eq!(read(ahead, true, 1_500, &[40]), [(41..49).collect::<Vec<u8>>()]);
    }
}
