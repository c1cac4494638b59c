//! Changes of files' bytes that the server has answered and that no `fsync` has followed: if the server dies, they are sent again.
//! Plain state.
//!
//! Kept are writes, and what else decides a file's bytes: lengths that were set, and ranges that were reserved or punched; beside
//! them times that were set, since sending bytes again changes them. The server may have any part of them after a crash; all of
//! them, in their order, make the file what it was.
//!
//! A change is kept with the write *verifier* of the server that answered it. A file's changes are *sent* to a verifier if the servers
//! that have it have all of them.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use atoll_env::Instant;
use atoll_vfs::SetAttr;
use bytes::Bytes;

/// The most bytes that are kept of all files, about.
pub(super) const MAX_UNSTABLE_BYTES: usize = 64 << 20;
/// How long a change is kept before the client has it made durable itself: as Linux writes back what is dirty. Until then the
/// bytes may be sent again, over those that another client wrote since.
pub(super) const MAX_UNSTABLE_TIME: Duration = Duration::from_secs(30);
/// What a change costs beside its bytes, about.
const CHANGE_BYTES: usize = 128;

/// A change of a file's bytes, or of times beside them.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum UnstableChange {
    /// Bytes at an offset.
    Write(u64, Bytes),
    /// A length, times.
    Set(SetAttr),
    /// `fallocate(2)`: offset, length, mode.
    Allocate(u64, u64, i32),
}

impl UnstableChange {
    fn bytes(&self) -> usize {
        CHANGE_BYTES + if let UnstableChange::Write(_, data) = self { data.len() } else { 0 }
    }
}

#[derive(Debug)]
struct KeptChange {
    number: u64,
    since: Instant,
    change: UnstableChange,
}

#[derive(Default, Debug)]
struct UnstableFile {
    changes: VecDeque<KeptChange>,
    bytes: usize,
    /// The verifier whose servers have the changes up to this number.
    sent: Option<(u64, u64)>,
    /// Changes were lost, and nobody was told.
    has_failed: bool,
}

impl UnstableFile {
    fn last(&self) -> Option<u64> {
        self.changes.back().map(|kept| kept.number)
    }

    fn is_sent(&self, verifier: u64) -> bool {
        match (self.last(), self.sent) {
            (None, _) => true,
            (Some(last), Some((to, up_to))) => to == verifier && up_to >= last,
            (Some(_), None) => false,
        }
    }
}

/// See the module.
#[derive(Default, Debug)]
pub(super) struct UnstableFiles {
    files: BTreeMap<u64, UnstableFile>,
    bytes: usize,
    last: u64,
}

impl UnstableFiles {
    /// Keeps a change that a server with this verifier has answered, which is not `current` if that one is gone by now.
    pub(super) fn keep(
        &mut self,
        inode: u64,
        (verifier, current): (u64, Option<u64>),
        change: UnstableChange,
        now: Instant,
    ) {
        self.last += 1;
        let number = self.last;
        let file = self.files.entry(inode).or_default();
        // Another server has the changes before, or this one has died: all of them must be sent.
        let is_lost = current.is_some_and(|current| current != verifier) || !file.is_sent(verifier);
        file.sent = if is_lost { None } else { Some((verifier, number)) };
        let bytes = change.bytes();
        file.bytes += bytes;
        self.bytes += bytes;
        file.changes.push_back(KeptChange { number, since: now, change });
    }

    /// Whether changes of a file are kept.
    pub(super) fn has(&self, inode: u64) -> bool {
        self.files.get(&inode).is_some_and(|file| !file.changes.is_empty())
    }

    /// If a server with this verifier has all kept changes of a file: the number of the last one.
    pub(super) fn sent_up_to(&self, inode: u64, verifier: u64) -> Option<u64> {
        match self.files.get(&inode) {
            None => Some(0),
            Some(file) => file.is_sent(verifier).then(|| file.last().unwrap_or(0)),
        }
    }

    /// The first change of a file that a server with this verifier does not have, and its number.
    pub(super) fn next_to_send(&self, inode: u64, verifier: u64) -> Option<(u64, UnstableChange)> {
        let file = self.files.get(&inode)?;
        let sent = file.sent.filter(|(to, _)| *to == verifier).map_or(0, |(_, up_to)| up_to);
        let at = file.changes.partition_point(|kept| kept.number <= sent);
        file.changes.get(at).map(|kept| (kept.number, kept.change.clone()))
    }

    /// A server with this verifier has the change after the one it had, unless a change was kept meanwhile that nobody has.
    pub(super) fn note_sent(&mut self, inode: u64, verifier: u64, number: u64) {
        if let Some(file) = self.files.get_mut(&inode) {
            file.sent = Some((verifier, number));
        }
    }

    /// The server that has a file's changes may have lost them.
    pub(super) fn distrust(&mut self, inode: u64) {
        if let Some(file) = self.files.get_mut(&inode) {
            file.sent = None;
        }
    }

    /// Changes of a file up to this number are durable.
    pub(super) fn end(&mut self, inode: u64, up_to: u64) {
        let Some(file) = self.files.get_mut(&inode) else { return };
        while let Some(first) = file.changes.front()
            && first.number <= up_to
        {
            let bytes = first.change.bytes();
            file.bytes -= bytes;
            self.bytes -= bytes;
            file.changes.pop_front();
        }
        if file.changes.is_empty() {
            file.sent = None;
            if !file.has_failed {
                self.files.remove(&inode);
            }
        }
    }

    /// Changes of a file are lost.
    pub(super) fn fail(&mut self, inode: u64) {
        self.files.entry(inode).or_default().has_failed = true;
        self.end(inode, u64::MAX);
    }

    /// Whether changes of a file were lost; says so once.
    pub(super) fn take_failure(&mut self, inode: u64) -> bool {
        let Some(file) = self.files.get_mut(&inode) else { return false };
        let has_failed = std::mem::take(&mut file.has_failed);
        self.end(inode, 0);
        has_failed
    }

    /// The file with the most, if too much is kept.
    pub(super) fn too_much(&self) -> Option<u64> {
        if self.bytes <= MAX_UNSTABLE_BYTES {
            return None;
        }
        self.files.iter().max_by_key(|(_, file)| file.bytes).map(|(inode, _)| *inode)
    }

    /// Files with a change that is kept for too long.
    pub(super) fn aged(&self, now: Instant) -> Vec<u64> {
        let is_aged = |file: &UnstableFile| {
            file.changes.front().is_some_and(|first| now.since(first.since) >= MAX_UNSTABLE_TIME)
        };
        self.files.iter().filter(|(_, file)| is_aged(file)).map(|(inode, _)| *inode).collect()
    }

    /// All files of which changes are kept.
    pub(super) fn all(&self) -> Vec<u64> {
        let kept = self.files.iter().filter(|(_, file)| !file.changes.is_empty());
        kept.map(|(inode, _)| *inode).collect()
    }

    #[cfg(test)]
    fn check_invariants(&self) {
        let of = |file: &UnstableFile| file.changes.iter().map(|one| one.change.bytes()).sum();
        for file in self.files.values() {
            assert_eq!(file.bytes, of(file));
            assert!(file.has_failed || !file.changes.is_empty());
        }
        assert_eq!(self.bytes, self.files.values().map(of).sum::<usize>());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: u64 = 7;
    const OLD: u64 = 100;
    const NEW: u64 = 200;

    fn at(secs: u64) -> Instant {
        Instant(0) + Duration::from_secs(secs)
    }

    fn write(byte: u8) -> UnstableChange {
        UnstableChange::Write(0, vec![byte; 10].into())
    }

    fn keep(files: &mut UnstableFiles, boot: u64, current: u64, byte: u8) {
        files.keep(FILE, (boot, Some(current)), write(byte), at(0));
        files.check_invariants();
    }

    /// The bytes that are sent to a boot.
    fn send_all(files: &mut UnstableFiles, boot: u64) -> Vec<u8> {
        let mut sent = Vec::new();
        while let Some((number, change)) = files.next_to_send(FILE, boot) {
            let UnstableChange::Write(_, data) = change else { unreachable!() };
            sent.push(data[0]);
            files.note_sent(FILE, boot, number);
        }
        assert!(files.sent_up_to(FILE, boot).is_some());
        sent
    }

    #[test]
    fn changes_are_sent_to_another_boot_in_their_order() {
        let mut files = UnstableFiles::default();
        (1..=3).for_each(|byte| keep(&mut files, OLD, OLD, byte));
        assert_eq!(send_all(&mut files, OLD), []);
        assert_eq!(files.sent_up_to(FILE, NEW), None);
        assert_eq!(send_all(&mut files, NEW), [1, 2, 3]);
        keep(&mut files, NEW, NEW, 4);
        assert_eq!(send_all(&mut files, NEW), []);
    }

    #[test]
    fn a_change_that_a_dead_server_has_answered_late_is_sent() {
        let mut files = UnstableFiles::default();
        keep(&mut files, OLD, OLD, 1);
        send_all(&mut files, NEW);
        keep(&mut files, OLD, NEW, 2);
        assert_eq!(send_all(&mut files, NEW), [1, 2]);
        // Also if nothing was kept before it, and whatever is kept after it.
        let mut files = UnstableFiles::default();
        keep(&mut files, OLD, NEW, 1);
        keep(&mut files, NEW, NEW, 2);
        assert_eq!(send_all(&mut files, NEW), [1, 2]);
    }

    #[test]
    fn sending_goes_on_where_it_was_cut_off_unless_the_server_is_another_one() {
        let mut files = UnstableFiles::default();
        (1..=3).for_each(|byte| keep(&mut files, OLD, OLD, byte));
        let (number, _) = files.next_to_send(FILE, NEW).unwrap();
        files.note_sent(FILE, NEW, number);
        assert_eq!(send_all(&mut files, NEW), [2, 3]);
        assert_eq!(send_all(&mut files, 300), [1, 2, 3]);
    }

    #[test]
    fn a_sync_ends_what_was_kept_before_it() {
        let mut files = UnstableFiles::default();
        keep(&mut files, OLD, OLD, 1);
        let up_to = files.sent_up_to(FILE, OLD).unwrap();
        keep(&mut files, OLD, OLD, 2);
        files.end(FILE, up_to);
        files.check_invariants();
        assert_eq!(send_all(&mut files, NEW), [2]);
        files.end(FILE, files.sent_up_to(FILE, NEW).unwrap());
        assert!(files.files.is_empty() && files.bytes == 0);
    }

    #[test]
    fn what_was_lost_is_said_once() {
        let mut files = UnstableFiles::default();
        keep(&mut files, OLD, OLD, 1);
        files.fail(FILE);
        files.check_invariants();
        assert_eq!(files.next_to_send(FILE, NEW), None);
        assert!(files.take_failure(FILE));
        assert!(!files.take_failure(FILE));
        assert!(files.files.is_empty());
    }

    #[test]
    fn the_file_with_the_most_goes_first() {
        let mut files = UnstableFiles::default();
        let big = |len: usize| UnstableChange::Write(0, vec![0; len].into());
        files.keep(1, (OLD, None), big(MAX_UNSTABLE_BYTES / 3), at(0));
        files.keep(2, (OLD, None), big(MAX_UNSTABLE_BYTES / 2), at(0));
        assert_eq!(files.too_much(), None);
        files.keep(3, (OLD, None), big(MAX_UNSTABLE_BYTES / 4), at(5));
        assert_eq!(files.too_much(), Some(2));
        assert_eq!(files.aged(at(30)), [1, 2]);
    }
}
