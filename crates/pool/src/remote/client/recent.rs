//! Files whose attributes the front end was told a moment ago, and believes for a while yet. Plain state.
//!
//! Under a lock a program sees what others did before: the front end is to forget these attributes when a lock is taken. There is room
//! for so many; what is told beyond is not to be believed at all.

use std::collections::VecDeque;
use std::time::Duration;

use atoll_env::Instant;
use atoll_vfs::InodeNumber;

/// The most attributes that are remembered; a guess at what a listing of a large directory tells in a second.
const MAX_REMEMBERED: usize = 65_536;

/// See the module.
#[derive(Default, Debug)]
pub(super) struct RecentAttributes {
    /// With the time until which they are believed.
    told: VecDeque<(Instant, InodeNumber)>,
}

impl RecentAttributes {
    /// Attributes are told, to be believed for `ttl`. Returns for how long they may be.
    pub(super) fn tell(&mut self, inode: InodeNumber, ttl: Duration, now: Instant) -> Duration {
        // All are believed for about as long: those that were told first go first.
        while self.told.front().is_some_and(|(until, _)| *until <= now) {
            self.told.pop_front();
        }
        if ttl.is_zero() || self.told.len() >= MAX_REMEMBERED {
            return Duration::ZERO;
        }
        self.told.push_back((now + ttl, inode));
        ttl
    }

    /// Those that are still believed; they are forgotten here.
    pub(super) fn take(&mut self, now: Instant) -> Vec<InodeNumber> {
        let told = std::mem::take(&mut self.told);
        let mut inodes: Vec<InodeNumber> =
            told.into_iter().filter(|(until, _)| *until > now).map(|(_, inode)| inode).collect();
        inodes.sort_unstable();
        inodes.dedup();
        inodes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn at(secs: u64) -> Instant {
        Instant(0) + Duration::from_secs(secs)
    }

    #[test]
    fn what_is_believed_no_more_is_forgotten() {
        let mut recent = RecentAttributes::default();
        for (inode, secs) in [(1, 0), (2, 5), (2, 5), (3, 5)] {
            assert_eq!(recent.tell(InodeNumber(inode), SECOND, at(secs)), SECOND);
        }
        assert_eq!(recent.told.len(), 3);
        assert_eq!(recent.take(at(5)), [InodeNumber(2), InodeNumber(3)]);
        assert_eq!(recent.take(at(5)), []);
    }

    #[test]
    fn what_there_is_no_room_for_is_not_to_be_believed() {
        let mut recent = RecentAttributes::default();
        for inode in 0..MAX_REMEMBERED as u64 {
            recent.tell(InodeNumber(inode), SECOND, at(0));
        }
        assert_eq!(recent.tell(InodeNumber(7), SECOND, at(0)), Duration::ZERO);
        assert_eq!(recent.tell(InodeNumber(7), SECOND, at(1)), SECOND);
    }
}
