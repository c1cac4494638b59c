//! Numbers of inodes that are drawn before they are needed, so that it is known where the inodes go.
//!
//! An inode's place on the ring follows from its number, which is random, so in a large network each new inode
//! costs a lookup before it can be written: a file that is made takes twice as long as one that is written again.
//! A program that has made a file will probably make another. So a mount draws numbers ahead, as many as were made
//! in a row, at most [`MAX_PREPARED`], and has the places of their inodes looked up meanwhile.
//!
//! **Invariant:** the numbers are used in the order in which they were drawn, and none is passed over for its
//! place: whoever chooses a number chooses whose disk holds the inode. One that grows too old is dropped.
//!
//! It does not know what is looked up.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_dht::MAX_PREPARED;
use atoll_env::Instant;
use atoll_key::GroupId;

use super::Shared;

/// A number that was not used for so long is dropped: what was looked up is not believed for ever. Files that are
/// made with longer pauses are not made in a row. A guess: less than a node remembers a replica set for.
const KEPT: Duration = Duration::from_secs(30);
/// Sets of groups that numbers are drawn for at a time: of the directories that files are made in.
const MAX_GROUPS: usize = 8;

/// See the module.
#[derive(Default)]
pub(super) struct DrawnNumbers {
    /// The sets of groups used last come last.
    rows: Mutex<Vec<Row>>,
}

/// The numbers for inodes that the same groups may write.
struct Row {
    groups: Vec<GroupId>,
    /// How many were taken in a row.
    taken: usize,
    last_taken: Instant,
    drawn: VecDeque<Drawn>,
}

struct Drawn {
    number: [u8; 16],
    at: Instant,
    /// Its place is known.
    is_ready: Arc<AtomicBool>,
}

impl Shared {
    /// The number of a new inode that `groups` may write.
    pub(super) fn next_number(&self, groups: &[GroupId]) -> [u8; 16] {
        let now = self.env.now();
        let mut rows = self.drawn.rows.lock().expect("no holder of this lock panics");
        let mut row = match rows.iter().position(|row| row.groups == groups) {
            Some(at) => rows.remove(at),
            None => {
                Row { groups: groups.to_vec(), taken: 0, last_taken: now, drawn: VecDeque::new() }
            }
        };
        let number = row.take(now).unwrap_or_else(|| self.random_number());
        let lacking = row.taken.min(MAX_PREPARED).saturating_sub(row.drawn.len());
        // Not one at a time: each call to the node has its price.
        if 2 * lacking >= row.taken.min(MAX_PREPARED) {
            self.draw(&mut row, lacking, now);
        }
        rows.push(row);
        if rows.len() > MAX_GROUPS {
            rows.remove(0);
        }
        number
    }

    fn draw(&self, row: &mut Row, count: usize, now: Instant) {
        let numbers: Vec<[u8; 16]> = (0..count).map(|_| self.random_number()).collect();
        let blocks = numbers.iter().filter_map(|number| self.inodes.block_of(&row.groups, *number));
        let prepared = self.blocks.prepare(blocks.collect());
        let is_ready = Arc::<AtomicBool>::default();
        let drawn = |number| Drawn { number, at: now, is_ready: is_ready.clone() };
        row.drawn.extend(numbers.into_iter().map(drawn));
        self.env.spawn(Box::pin(async move {
            prepared.await;
            is_ready.store(true, Ordering::Release);
        }));
    }
}

impl Row {
    /// The number drawn first, if its place is known; the next one may be taken then.
    fn take(&mut self, now: Instant) -> Option<[u8; 16]> {
        if now.since(self.last_taken) >= KEPT {
            self.taken = 0;
        }
        self.taken += 1;
        self.last_taken = now;
        while self.drawn.front().is_some_and(|drawn| now.since(drawn.at) >= KEPT) {
            self.drawn.pop_front();
        }
        self.drawn.front().filter(|drawn| drawn.is_ready.load(Ordering::Acquire))?;
        self.drawn.pop_front().map(|drawn| drawn.number)
    }
}
