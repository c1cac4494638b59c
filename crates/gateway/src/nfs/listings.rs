//! Listings with cookies that last, of file systems whose own do not.
//!
//! NFS lists a directory call by call, without opening it, and a client goes on after a cookie that it got before a restart or
//! before the directory changed. Where a file system counts names, a cookie means another place once a name is gone. Here a cookie
//! is a hash of the name before it, and names are listed in the order of their hashes; so a name that is there all the time is
//! listed once, whatever happens to others. Names whose hashes are equal (2⁻⁶² for each pair) follow each other with consecutive
//! cookies; one of them can be missed when the other goes during a listing.
//!
//! The names of a directory are read as a whole, and kept for the calls that follow: [`KEPT_FOR`], [`MAX_NAMES`].

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use atoll_vfs::{Attr, Caller, Errno, FileKind, FileSystem, FileTime, InodeNumber, MAX_COOKIE};
use bytes::Bytes;

/// How long names may be listed after they were read, if the directory's times are the same. A guess at a slow listing.
const KEPT_FOR: Duration = Duration::from_secs(30);
/// Names that are kept in all; about a hundred bytes each. The listing in use is kept whatever its size.
const MAX_NAMES: usize = 1_000_000;
/// Names that are read at a time.
const AT_A_TIME: usize = 4096;

/// A name of a directory.
#[derive(Clone, Debug)]
pub(super) struct ListedName {
    pub(super) cookie: u64,
    pub(super) name: Bytes,
    pub(super) kind: FileKind,
    pub(super) inode: InodeNumber,
}

/// The names of a directory, by cookie.
#[derive(Debug, Default)]
pub(super) struct Listing {
    names: Vec<ListedName>,
}

impl Listing {
    fn of(names: impl IntoIterator<Item = (Bytes, FileKind, InodeNumber)>) -> Listing {
        let mut names: Vec<ListedName> = names
            .into_iter()
            .map(|(name, kind, inode)| ListedName { cookie: hash(&name), name, kind, inode })
            .collect();
        names.sort_unstable_by(|one, other| {
            (one.cookie, &one.name).cmp(&(other.cookie, &other.name))
        });
        names.dedup_by(|one, other| one.name == other.name);
        let mut next = 1;
        for name in &mut names {
            name.cookie = name.cookie.max(next);
            next = name.cookie + 1;
        }
        Listing { names }
    }

    /// The names after a cookie, at most so many.
    pub(super) fn after(&self, cookie: u64, limit: usize) -> &[ListedName] {
        let from = self.names.partition_point(|name| name.cookie <= cookie);
        &self.names[from..][..limit.min(self.names.len() - from)]
    }
}

/// Of a name: at least 1, and far enough below [`MAX_COOKIE`] that names with equal hashes have cookies of their own.
fn hash(name: &[u8]) -> u64 {
    let hash = blake3::hash(name);
    let word = u64::from_be_bytes(*hash.as_bytes().first_chunk().expect("a hash has 32 bytes"));
    (word % (MAX_COOKIE - (1 << 32))).max(1)
}

#[derive(Debug)]
struct Kept {
    listing: Arc<Listing>,
    read_at: Instant,
    times: (FileTime, FileTime),
}

/// The listings of one gateway, by export and directory.
#[derive(Debug, Default)]
pub(super) struct Listings(Mutex<BTreeMap<(u64, InodeNumber), Kept>>);

impl Listings {
    fn locked(&self) -> MutexGuard<'_, BTreeMap<(u64, InodeNumber), Kept>> {
        self.0.lock().expect("no holder of this lock panics")
    }

    /// The names of a directory: as they are now at the beginning of a listing, and as they were read then for as long as
    /// the directory has not changed.
    pub(super) async fn get(
        &self,
        export: u64,
        fs: &dyn FileSystem,
        caller: Caller,
        dir: &Attr,
        is_beginning: bool,
    ) -> Result<Arc<Listing>, Errno> {
        let (at, times) = ((export, dir.inode), (dir.mtime, dir.ctime));
        if !is_beginning
            && let Some(kept) = self.locked().get(&at)
            && kept.times == times
            && kept.read_at.elapsed() < KEPT_FOR
        {
            return Ok(kept.listing.clone());
        }
        let read_at = Instant::now();
        let listing = Arc::new(Listing::of(read(fs, caller, dir.inode).await?));
        let mut kept = self.locked();
        kept.retain(|_, kept| kept.read_at.elapsed() < KEPT_FOR);
        let mut names: usize = kept.values().map(|kept| kept.listing.names.len()).sum();
        while names > MAX_NAMES
            && let Some(oldest) =
                kept.iter().min_by_key(|(_, kept)| kept.read_at).map(|(at, _)| *at)
        {
            names -= kept.remove(&oldest).map_or(0, |kept| kept.listing.names.len());
        }
        kept.insert(at, Kept { listing: listing.clone(), read_at, times });
        Ok(listing)
    }
}

async fn read(
    fs: &dyn FileSystem,
    caller: Caller,
    dir: InodeNumber,
) -> Result<Vec<(Bytes, FileKind, InodeNumber)>, Errno> {
    let handle = fs.opendir(caller, dir).await?.handle;
    let (mut names, mut cookie) = (Vec::new(), 0);
    let read = loop {
        match fs.readdir(dir, handle, cookie, AT_A_TIME, false).await {
            Err(error) => break Err(error),
            Ok(part) => {
                let Some(last) = part.last() else { break Ok(()) };
                cookie = last.cookie;
                // A name may be a part of a larger block, which is not to be kept with it.
                let own = |name: &Bytes| Bytes::copy_from_slice(name);
                names.extend(part.iter().map(|entry| (own(&entry.name), entry.kind, entry.inode)));
            }
        }
    };
    let _ = fs.closedir(dir, handle).await;
    read.map(|()| names)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listing(names: &[&str]) -> Listing {
        let named = |name: &&str| {
            (Bytes::copy_from_slice(name.as_bytes()), FileKind::Regular, InodeNumber(2))
        };
        Listing::of(names.iter().map(named))
    }

    #[test]
    fn a_name_has_its_cookie_whatever_other_names_there_are() {
        let all: Vec<String> = (0..2000).map(|n| format!("name{n}")).collect();
        let all: Vec<&str> = all.iter().map(String::as_str).collect();
        let (whole, half) = (listing(&all), listing(&all[..1000]));
        for name in &half.names {
            let same = whole.names.iter().find(|other| other.name == name.name).unwrap();
            assert_eq!(same.cookie, name.cookie);
            assert!((1..=MAX_COOKIE).contains(&name.cookie));
        }
        let (mut cookie, mut seen) = (0, 0);
        loop {
            let part = whole.after(cookie, 7);
            let Some(last) = part.last() else { break };
            (cookie, seen) = (last.cookie, seen + part.len());
        }
        assert_eq!(seen, 2000);
        assert!(whole.after(MAX_COOKIE, 1).is_empty() && whole.after(u64::MAX, 1).is_empty());
    }

    #[test]
    fn a_name_that_is_listed_twice_is_one() {
        assert_eq!(listing(&["a", "b", "a"]).names.len(), 2);
    }
}
