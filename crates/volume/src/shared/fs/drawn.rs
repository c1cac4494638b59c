//! Numbers of directories that are drawn before they are needed.
//!
//! A directory lies anywhere. A mount draws its number before it is made, so that `mkdir` does not wait for the lookup of its
//! replica set. The mount keeps a number only if the directory shares its set with enough keys, so that files can lie near it
//! ([`super::near`]). It draws numbers when it begins, and after each directory that it has made.
//!
//! It does not know when a directory will be made. A replica set is remembered for a minute, so after a longer pause the
//! first directory waits for a lookup.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::sleep;
use atoll_key::{GroupId, Key};

use super::{Shared, near};

/// Numbers that are kept. A guess: a tree that is copied begins with a few directories, and each takes two round trips,
/// as long as a lookup.
const MAX_DRAWN: usize = 4;
/// The most draws for one number. On 32,768 nodes some three are needed in the mean.
const MAX_DRAWS: usize = 8;
/// How often it is asked whether a lookup has ended, and how many times.
const LOOK_EVERY: Duration = Duration::from_millis(250);
const MAX_LOOKS: usize = 40;

/// See the module.
#[derive(Default)]
pub(super) struct Drawn {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// They may write what gets these numbers.
    groups: Vec<GroupId>,
    numbers: Vec<[u8; 16]>,
    /// How many are being drawn.
    under_way: usize,
}

impl Drawn {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }
}

impl Shared {
    /// The number of a directory's inode that is to be made, which `groups` may write.
    pub(super) fn number_of_directory(&self, groups: &[GroupId]) -> [u8; 16] {
        let mut drawn = self.drawn.state();
        let number = if drawn.groups == groups { drawn.numbers.pop() } else { None };
        number.unwrap_or_else(|| self.random_number())
    }

    /// Draws numbers of directories that `groups` may write, in the background.
    pub(super) fn draw_directories(self: &Arc<Self>, groups: &[GroupId]) {
        let mut drawn = self.drawn.state();
        if drawn.groups != groups {
            (drawn.groups, drawn.numbers) = (groups.to_vec(), Vec::new());
        }
        while drawn.numbers.len() + drawn.under_way < MAX_DRAWN {
            drawn.under_way += 1;
            let (shared, groups) = (self.clone(), groups.to_vec());
            self.env.spawn(Box::pin(async move {
                let number = shared.drawn_far_from_its_root(&groups).await;
                let mut drawn = shared.drawn.state();
                drawn.under_way -= 1;
                if drawn.groups == groups {
                    drawn.numbers.extend(number);
                }
            }));
        }
    }

    async fn drawn_far_from_its_root(&self, groups: &[GroupId]) -> Option<[u8; 16]> {
        for _ in 0..MAX_DRAWS {
            let number = self.random_number();
            let key = self.inodes.block_of(groups, number)?.key;
            if near::are_enough(&key, &self.looked_up_until(key).await?) {
                return Some(number);
            }
        }
        None
    }

    /// The last key that has the replica set of this one, once that was looked up.
    async fn looked_up_until(&self, key: Key) -> Option<Key> {
        for _ in 0..MAX_LOOKS {
            if let Some(until) = self.blocks.same_set_until(key).await {
                return Some(until);
            }
            sleep(&*self.env, LOOK_EVERY).await;
        }
        None
    }
}
