//! A half-read directory whose cookies mean nothing after it was opened again. Plain state.
//!
//! The client numbers the names that it has listed, from 1: its cookies. While the directory stays open at the server, each of them
//! stands for a cookie of the server. After it was opened again, the names before are known by their hashes, and left out.

use std::collections::BTreeSet;

use atoll_vfs::DirEntry;

/// A name, for comparison: 128 bits of a hash, so that no other name is left out for it.
type NameHash = [u8; 16];

fn hash(name: &[u8]) -> NameHash {
    let mut hash = [0; 16];
    hash.copy_from_slice(&blake3::hash(name).as_bytes()[..16]);
    hash
}

/// See the module.
#[derive(Default, Debug)]
pub(super) struct HalfRead {
    /// The names in the order in which they were listed, with the server's cookies.
    listed: Vec<(NameHash, u64)>,
    /// So many of them were listed when the directory was opened the last time.
    before: usize,
    /// Their hashes.
    left_out: BTreeSet<NameHash>,
}

impl HalfRead {
    /// The directory was opened again.
    pub(super) fn reopen(&mut self) {
        self.begin_at(self.listed.len());
    }

    fn begin_at(&mut self, count: usize) {
        self.listed.truncate(count);
        self.before = count;
        self.left_out = self.listed.iter().map(|(name, _)| *name).collect();
    }

    /// Where the server goes on after one of the client's cookies. None if there was no such.
    pub(super) fn seek(&mut self, cookie: u64) -> Option<u64> {
        let position = usize::try_from(cookie).ok().filter(|at| *at <= self.listed.len())?;
        if position < self.before || position == 0 {
            // The server lists from the start; from its own start a directory is listed as it is by now.
            self.begin_at(position);
        }
        if position == self.before { Some(0) } else { Some(self.listed[position - 1].1) }
    }

    /// Gives an entry after the client's cookie its own cookie. None if it was listed before.
    pub(super) fn list(&mut self, after: u64, entry: DirEntry) -> Option<DirEntry> {
        let name = hash(&entry.name);
        if self.left_out.contains(&name) {
            return None;
        }
        let position = usize::try_from(after).expect("a cookie that was found");
        match self.listed.get_mut(position) {
            Some(listed) => *listed = (name, entry.cookie),
            None => self.listed.push((name, entry.cookie)),
        }
        Some(DirEntry { cookie: after + 1, ..entry })
    }
}

#[cfg(test)]
mod tests {
    use atoll_vfs::{FileKind, InodeNumber};

    use super::*;

    fn entry(name: &str, cookie: u64) -> DirEntry {
        let name = bytes::Bytes::copy_from_slice(name.as_bytes());
        DirEntry { name, kind: FileKind::Regular, inode: InodeNumber(9), cookie, entry: None }
    }

    /// Reads up to `limit` names after `cookie` from a directory whose cookies are positions.
    fn read(half: &mut HalfRead, names: &[&str], cookie: u64, limit: usize) -> Vec<String> {
        let mut from = half.seek(cookie).expect("a cookie that was given") as usize;
        let mut listed = Vec::new();
        while listed.len() < limit && from < names.len() {
            from += 1;
            let after = cookie + listed.len() as u64;
            if let Some(entry) = half.list(after, entry(names[from - 1], from as u64)) {
                assert_eq!(entry.cookie, after + 1);
                listed.push(String::from_utf8(entry.name.to_vec()).unwrap());
            }
        }
        listed
    }

    #[test]
    fn a_directory_that_stays_open_is_read_by_the_servers_cookies() {
        let mut half = HalfRead::default();
        let names = ["a", "b", "c", "d"];
        assert_eq!(read(&mut half, &names, 0, 2), ["a", "b"]);
        assert_eq!(read(&mut half, &names, 2, 9), ["c", "d"]);
        assert_eq!(read(&mut half, &names, 1, 2), ["b", "c"]);
        assert_eq!(half.seek(5), None);
    }

    #[test]
    fn one_that_was_opened_again_goes_on_with_what_was_not_listed() {
        let mut half = HalfRead::default();
        assert_eq!(read(&mut half, &["a", "b", "c", "d"], 0, 2), ["a", "b"]);
        half.reopen();
        let names = ["0", "a", "c", "d", "e"];
        assert_eq!(read(&mut half, &names, 2, 2), ["0", "c"]);
        assert_eq!(read(&mut half, &names, 4, 9), ["d", "e"]);
        assert_eq!(read(&mut half, &names, 3, 2), ["c", "d"]);
        half.reopen();
        assert_eq!(read(&mut half, &names, 6, 9), [""; 0]);
        // Back to before it was opened again, and to the start.
        assert_eq!(read(&mut half, &["a", "b", "x"], 1, 9), ["b", "x"]);
        assert_eq!(read(&mut half, &names, 0, 9), names);
    }
}
