//! Inodes that the front end knows by a lookup, and the directory in which each was found last.
//!
//! There may be as many as the kernel has room for, and all go when it forgets them. Files of a
//! directory have neighbouring inodes, so those of a stretch stand together: 16 bytes each where
//! all are known.

use std::collections::BTreeMap;

/// Inodes of a stretch. One of which a single inode is known takes 256 bytes.
const STRETCH: u32 = 16;

#[derive(Clone, Copy, Default, Debug)]
struct Known {
    /// 0: it is not known.
    lookups: u64,
    parent: u32,
}

/// Lookups by inode.
#[derive(Debug, Default)]
pub(super) struct KnownInodes(BTreeMap<u32, Box<[Known; STRETCH as usize]>>);

impl KnownInodes {
    fn get(&self, inode: u32) -> Option<&Known> {
        let stretch = self.0.get(&(inode / STRETCH))?;
        Some(&stretch[(inode % STRETCH) as usize]).filter(|known| known.lookups > 0)
    }

    pub(super) fn is_known(&self, inode: u32) -> bool {
        self.get(inode).is_some()
    }

    pub(super) fn parent_of(&self, inode: u32) -> Option<u32> {
        self.get(inode).map(|known| known.parent)
    }

    pub(super) fn look_up(&mut self, inode: u32, parent: u32) {
        let stretch = self.0.entry(inode / STRETCH).or_default();
        let known = &mut stretch[(inode % STRETCH) as usize];
        known.lookups += 1;
        known.parent = parent;
    }

    /// Says that a known inode is in another directory now.
    pub(super) fn moved(&mut self, inode: u32, parent: u32) {
        if self.is_known(inode) {
            let stretch = self.0.entry(inode / STRETCH).or_default();
            stretch[(inode % STRETCH) as usize].parent = parent;
        }
    }

    /// Takes lookups back, at most those that there were.
    pub(super) fn forget(&mut self, inode: u32, lookups: u64) {
        let Some(stretch) = self.0.get_mut(&(inode / STRETCH)) else { return };
        let known = &mut stretch[(inode % STRETCH) as usize];
        known.lookups = known.lookups.saturating_sub(lookups);
        if stretch.iter().all(|known| known.lookups == 0) {
            self.0.remove(&(inode / STRETCH));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inode_is_known_until_all_its_lookups_are_taken_back() {
        let mut known = KnownInodes::default();
        for inode in [11, 12, 31, 32, u32::MAX] {
            assert!(!known.is_known(inode));
            known.look_up(inode, 2);
            known.look_up(inode, 7);
            assert_eq!(known.parent_of(inode), Some(7));
        }
        known.moved(12, 9);
        known.moved(13, 9);
        assert_eq!((known.parent_of(12), known.parent_of(13)), (Some(9), None));
        for inode in [11, 12, 31, 32, u32::MAX] {
            known.forget(inode, 1);
            assert!(known.is_known(inode));
        }
        known.forget(32, 1000);
        assert!(!known.is_known(32));
        known.forget(32, 1);
        known.look_up(32, 3);
        assert_eq!(known.parent_of(32), Some(3));
    }

    #[test]
    fn what_is_forgotten_takes_no_memory() {
        let mut known = KnownInodes::default();
        for inode in 1..=100_000 {
            known.look_up(inode, 2);
        }
        assert_eq!(known.0.len(), 100_000 / STRETCH as usize + 1, "neighbours stand together");
        for inode in (1..=100_000).rev() {
            known.forget(inode, 1);
        }
        assert!(known.0.is_empty());
    }
}
