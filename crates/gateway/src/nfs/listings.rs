//! Listings with cookies that last, of file systems whose own do not.
//!
//! NFS lists a directory call by call, without opening it, and a client goes on after a cookie that it got before a restart or
//! before the directory changed. Where a file system counts names, a cookie means another place once a name is gone. Here a cookie
//! is a hash of the name before it, and names are listed in the order of their hashes; so a name that is there all the time is
//! listed once, whatever happens to others. Names whose hashes are equal (2⁻⁶² for each pair) follow each other with consecutive
//! cookies; one of them can be missed when the other goes during a listing.
//!
//! The names of a directory are read as a whole, by a task that goes on when the call that began it is given up, so that the
//! client's next attempt finds them; and they are kept for the calls that follow: [`KEPT_FOR`], [`MAX_NAMES`].

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use atoll_vfs::{Attr, Caller, Errno, FileKind, FileSystem, FileTime, InodeNumber, MAX_COOKIE};
use bytes::Bytes;
use tokio::sync::watch;

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
pub(super) struct NameListing {
    names: Vec<ListedName>,
}

impl NameListing {
    fn of(names: impl IntoIterator<Item = (Bytes, FileKind, InodeNumber)>) -> NameListing {
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
        NameListing { names }
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

type ListingOutcome = Result<Arc<NameListing>, Errno>;
/// Times of a directory's last changes.
type Times = (FileTime, FileTime);

#[derive(Debug)]
struct KeptListing {
    /// The names, once they are read.
    listing: watch::Receiver<Option<ListingOutcome>>,
    began: Instant,
    times: Times,
    /// Whether a call was answered by it: the beginning of another listing is read anew.
    is_used: bool,
}

impl KeptListing {
    fn len(&self) -> usize {
        match &*self.listing.borrow() {
            Some(Ok(listing)) => listing.names.len(),
            _ => 0,
        }
    }

    /// Whether it serves a call: the directory is as it was before the names were read.
    fn serves(&self, times: Times, is_beginning: bool) -> bool {
        self.times == times && self.began.elapsed() < KEPT_FOR && !(is_beginning && self.is_used)
    }
}

/// The listings of one gateway, by export and directory.
#[derive(Debug, Default)]
pub(super) struct Listings(Mutex<BTreeMap<(u64, InodeNumber), KeptListing>>);

impl Listings {
    fn locked(&self) -> MutexGuard<'_, BTreeMap<(u64, InodeNumber), KeptListing>> {
        self.0.lock().expect("no holder of this lock panics")
    }

    /// The names of a directory of which the caller has just found these attributes: as they are now at the beginning of a
    /// listing, and as they were read then for as long as the directory has not changed.
    pub(super) async fn get(
        &self,
        export: u64,
        fs: &Arc<dyn FileSystem>,
        caller: Caller,
        dir: &Attr,
        is_beginning: bool,
    ) -> ListingOutcome {
        let mut listing = self.begin((export, dir.inode), fs, caller, dir, is_beginning);
        // None: its task has panicked.
        let done = listing.wait_for(Option::is_some).await.ok().and_then(|done| done.clone());
        let outcome = done.unwrap_or(Err(Errno::EIO));
        let mut kept = self.locked();
        let at = (export, dir.inode);
        let is_this = |kept: &&mut KeptListing| kept.listing.same_channel(&listing);
        if let Some(this) = kept.get_mut(&at).filter(is_this) {
            this.is_used = true;
            if outcome.is_err() {
                kept.remove(&at);
            }
        }
        outcome
    }

    fn begin(
        &self,
        at: (u64, InodeNumber),
        fs: &Arc<dyn FileSystem>,
        caller: Caller,
        dir: &Attr,
        is_beginning: bool,
    ) -> watch::Receiver<Option<ListingOutcome>> {
        let times = (dir.mtime, dir.ctime);
        let mut kept = self.locked();
        if let Some(kept) = kept.get(&at).filter(|kept| kept.serves(times, is_beginning)) {
            return kept.listing.clone();
        }
        kept.retain(|_, kept| kept.began.elapsed() < KEPT_FOR);
        let mut names: usize = kept.values().map(KeptListing::len).sum();
        while names > MAX_NAMES
            && let Some(oldest) = kept.iter().min_by_key(|(_, kept)| kept.began).map(|(at, _)| *at)
        {
            names -= kept.remove(&oldest).map_or(0, |kept| kept.len());
        }
        let (done, listing) = watch::channel(None);
        let (fs, inode) = (fs.clone(), dir.inode);
        tokio::spawn(async move {
            let names = read(&*fs, caller, inode).await;
            done.send_replace(Some(names.map(|names| Arc::new(NameListing::of(names)))));
        });
        let began = Instant::now();
        kept.insert(at, KeptListing { listing: listing.clone(), began, times, is_used: false });
        listing
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

    fn listing(names: &[&str]) -> NameListing {
        let named = |name: &&str| {
            (Bytes::copy_from_slice(name.as_bytes()), FileKind::Regular, InodeNumber(2))
        };
        NameListing::of(names.iter().map(named))
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
