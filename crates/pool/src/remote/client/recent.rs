//! Attributes and names that the front end was told a moment ago, and believes for a while yet. Plain state.
//!
//! Under a lock a program sees what others did before: the front end is to forget them when a lock is taken. There is room
//! for so many; what is told beyond is not to be believed at all.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use atoll_env::Instant;
use atoll_vfs::{InodeNumber, Invalidation};
use bytes::Bytes;

/// The most that are remembered; a guess at what a listing of a large directory tells in a second.
const MAX_REMEMBERED: usize = 65_536;

/// What the front end was told.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Told {
    /// The attributes of a file.
    Attributes(InodeNumber),
    /// What a name in a directory stands for.
    Name(InodeNumber, Bytes),
}

/// See the module.
#[derive(Default, Debug)]
pub(super) struct RecentlyTold {
    /// With the time until which they are believed.
    told: VecDeque<(Instant, Told)>,
}

impl RecentlyTold {
    /// Something is told, to be believed for `ttl`. Returns for how long it may be.
    pub(super) fn tell(&mut self, what: Told, ttl: Duration, now: Instant) -> Duration {
        // All are believed for about as long: those that were told first go first.
        while self.told.front().is_some_and(|(until, _)| *until <= now) {
            self.told.pop_front();
        }
        if ttl.is_zero() || self.told.len() >= MAX_REMEMBERED {
            return Duration::ZERO;
        }
        self.told.push_back((now + ttl, what));
        ttl
    }

    /// What is to be forgotten of all that is still believed; nothing of it is remembered here.
    pub(super) fn take(&mut self, now: Instant) -> Vec<Invalidation> {
        let told = std::mem::take(&mut self.told);
        let told: BTreeSet<Told> =
            told.into_iter().filter(|(until, _)| *until > now).map(|(_, told)| told).collect();
        let forget = |told: Told| match told {
            Told::Attributes(inode) => Invalidation::Attributes(inode),
            Told::Name(parent, name) => Invalidation::Name { parent, name },
        };
        told.into_iter().map(forget).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn at(secs: u64) -> Instant {
        Instant(0) + Duration::from_secs(secs)
    }

    fn attributes(inode: u64) -> Told {
        Told::Attributes(InodeNumber(inode))
    }

    #[test]
    fn what_is_believed_no_more_is_forgotten() {
        let mut recent = RecentlyTold::default();
        let (parent, name) = (InodeNumber(1), Bytes::from_static(b"name"));
        let named = Told::Name(parent, name.clone());
        let all = [(attributes(1), 0), (attributes(2), 5), (named, 5), (attributes(2), 5)];
        for (told, secs) in all {
            assert_eq!(recent.tell(told, SECOND, at(secs)), SECOND);
        }
        assert_eq!(recent.told.len(), 3);
        let wanted =
            [Invalidation::Attributes(InodeNumber(2)), Invalidation::Name { parent, name }];
        assert_eq!(recent.take(at(5)), wanted);
        assert_eq!(recent.take(at(5)), []);
    }

    #[test]
    fn what_there_is_no_room_for_is_not_to_be_believed() {
        let mut recent = RecentlyTold::default();
        for inode in 0..MAX_REMEMBERED as u64 {
            recent.tell(attributes(inode), SECOND, at(0));
        }
        assert_eq!(recent.tell(attributes(7), SECOND, at(0)), Duration::ZERO);
        assert_eq!(recent.tell(attributes(7), SECOND, at(1)), SECOND);
    }
}
