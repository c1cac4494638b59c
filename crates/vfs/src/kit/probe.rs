//! What checks have in common: finding, listing and reading, with errors that say what
//! was being done.

use std::fmt::{Debug, Display};
use std::sync::Arc;

use atoll_env::{BoxFuture, Env};
use bytes::Bytes;
use futures_channel::oneshot;

use super::tree::Tree;
use super::{Features, tree::mix};
use crate::{Attr, Caller, DirEntry, Entry, Errno, FileSystem, Handle, InodeNumber, OpenFlags};

/// More entries than any directory of the kit has: a listing that goes on is endless.
const ENDLESS: usize = 100_000;

/// Why a check ended early.
#[derive(Debug)]
pub(super) enum Stop {
    Skipped(&'static str),
    Failed(String),
}

pub(super) type Outcome<T = ()> = Result<T, Stop>;

/// Gives an error its place.
pub(super) trait During<T> {
    fn during(self, what: impl Display) -> Outcome<T>;
}

impl<T> During<T> for Result<T, Errno> {
    fn during(self, what: impl Display) -> Outcome<T> {
        self.map_err(|errno| Stop::Failed(format!("{what}: {errno:?}")))
    }
}

pub(super) fn fail<T>(reason: impl Into<String>) -> Outcome<T> {
    Err(Stop::Failed(reason.into()))
}

pub(super) fn ensure(holds: bool, reason: impl FnOnce() -> String) -> Outcome {
    if holds { Ok(()) } else { fail(reason()) }
}

/// That `found` is `expected`.
pub(super) fn same<A: PartialEq<B> + Debug, B: Debug>(
    what: impl Display,
    found: A,
    expected: B,
) -> Outcome {
    if found == expected {
        return Ok(());
    }
    fail(format!("{what}: found {found:?}, expected {expected:?}"))
}

/// That bytes are the same, without printing them all.
pub(super) fn same_bytes(what: impl Display, found: &[u8], expected: &[u8]) -> Outcome {
    if found == expected {
        return Ok(());
    }
    let at = found.iter().zip(expected).take_while(|(a, b)| a == b).count();
    fail(format!(
        "{what}: {} bytes found, {} expected, the first difference at {at}",
        found.len(),
        expected.len()
    ))
}

/// That a call failed, with one of these.
pub(super) fn refused<T: Debug>(
    what: impl Display,
    answer: Result<T, Errno>,
    expected: &[Errno],
) -> Outcome {
    match answer {
        Err(errno) if expected.contains(&errno) => Ok(()),
        Err(errno) => fail(format!("{what}: {errno:?}, expected {expected:?}")),
        Ok(value) => fail(format!("{what}: succeeded with {value:?}, expected {expected:?}")),
    }
}

/// A path as a person reads it.
pub(super) fn shown(path: &[u8]) -> String {
    format!("{:?}", String::from_utf8_lossy(path))
}

/// The file system under test and what it should hold.
#[derive(Clone)]
pub(super) struct Probe {
    pub(super) fs: Arc<dyn FileSystem>,
    pub(super) tree: Arc<Tree>,
    pub(super) features: Features,
    pub(super) env: Env,
}

/// The caller that the kit's calls name.
pub(super) fn me() -> Caller {
    Caller::default()
}

impl Probe {
    /// Skips the check unless the file system has what it needs.
    pub(super) fn needs(&self, has: bool, reason: &'static str) -> Outcome {
        if has { Ok(()) } else { Err(Stop::Skipped(reason)) }
    }

    pub(super) async fn lookup(&self, parent: InodeNumber, name: &[u8]) -> Result<Entry, Errno> {
        self.fs.lookup(me(), parent, name).await
    }

    /// The attributes at `path`; the number is held.
    pub(super) async fn find(&self, path: impl AsRef<[u8]>) -> Outcome<Attr> {
        let path = path.as_ref();
        let root = self.fs.getattr(InodeNumber::ROOT, None).await;
        let mut at = root.during("getattr of the root")?.attr;
        for name in path.split(|&b| b == b'/').filter(|name| !name.is_empty()) {
            let entry = self.lookup(at.inode, name).await;
            let entry = entry.during(format_args!(
                "lookup of {} on the way to {}",
                shown(name),
                shown(path)
            ))?;
            if at.inode != InodeNumber::ROOT {
                self.fs.forget(at.inode, 1);
            }
            at = entry.attr;
        }
        Ok(at)
    }

    pub(super) async fn inode(&self, path: impl AsRef<[u8]>) -> Outcome<InodeNumber> {
        Ok(self.find(path).await?.inode)
    }

    pub(super) async fn attr(&self, inode: InodeNumber) -> Outcome<Attr> {
        Ok(self.fs.getattr(inode, None).await.during("getattr")?.attr)
    }

    pub(super) async fn open(&self, inode: InodeNumber, flags: OpenFlags) -> Outcome<Handle> {
        Ok(self.fs.open(me(), inode, flags).await.during("open")?.handle)
    }

    pub(super) async fn close(&self, inode: InodeNumber, handle: Handle) -> Outcome {
        match self.fs.flush(inode, handle).await {
            Err(Errno::ENOSYS) => {}
            flushed => flushed.during("flush")?,
        }
        self.fs.close(inode, handle).await.during("close")
    }

    pub(super) async fn opendir(&self, inode: InodeNumber) -> Outcome<Handle> {
        Ok(self.fs.opendir(me(), inode).await.during("opendir")?.handle)
    }

    /// What follows `cookie` in an open directory.
    pub(super) async fn list_from(
        &self,
        inode: InodeNumber,
        handle: Handle,
        mut cookie: u64,
        limit: usize,
        with_entries: bool,
    ) -> Outcome<Vec<DirEntry>> {
        let mut all = Vec::new();
        loop {
            let page = self.fs.readdir(inode, handle, cookie, limit, with_entries).await;
            let page = page.during(format_args!("readdir from {cookie} with limit {limit}"))?;
            ensure(page.len() <= limit, || {
                format!("readdir gave {} entries, more than the limit {limit}", page.len())
            })?;
            let Some(last) = page.last() else { return Ok(all) };
            cookie = last.cookie;
            all.extend(page);
            ensure(all.len() < ENDLESS, || "a listing without end".to_owned())?;
        }
    }

    /// All entries of a directory.
    pub(super) async fn list(
        &self,
        inode: InodeNumber,
        limit: usize,
        with_entries: bool,
    ) -> Outcome<Vec<DirEntry>> {
        let handle = self.opendir(inode).await?;
        let all = self.list_from(inode, handle, 0, limit, with_entries).await?;
        self.fs.closedir(inode, handle).await.during("closedir")?;
        Ok(all)
    }

    /// All names of a directory, sorted.
    pub(super) async fn names(&self, inode: InodeNumber) -> Outcome<Vec<Bytes>> {
        let mut names: Vec<Bytes> =
            self.list(inode, 100, false).await?.into_iter().map(|entry| entry.name).collect();
        names.sort();
        Ok(names)
    }

    /// All bytes of a file, `chunk` at a time.
    pub(super) async fn read_all(&self, inode: InodeNumber, chunk: u32) -> Outcome<Vec<u8>> {
        let size_bytes = self.attr(inode).await?.size_bytes;
        let handle = self.open(inode, OpenFlags::READ).await?;
        let mut all = Vec::new();
        loop {
            let part = self.fs.read(inode, handle, all.len() as u64, chunk).await;
            let part = part.during(format_args!("read of {chunk} bytes at {}", all.len()))?;
            ensure(part.len() <= chunk as usize, || {
                format!("a read of {chunk} bytes gave {}", part.len())
            })?;
            if part.is_empty() {
                break;
            }
            all.extend_from_slice(&part);
            ensure(all.len() as u64 <= size_bytes, || {
                format!("more than the {size_bytes} bytes of the file were read")
            })?;
            ensure(part.len() == chunk as usize || all.len() as u64 == size_bytes, || {
                format!("a short read of {} bytes before the end, at {}", part.len(), all.len())
            })?;
        }
        self.close(inode, handle).await?;
        same("bytes read from start to end", all.len() as u64, size_bytes)?;
        Ok(all)
    }

    /// Runs all as tasks at the same time.
    pub(super) async fn at_once(&self, jobs: Vec<BoxFuture<'static, Outcome>>) -> Outcome {
        let mut outcomes = Vec::new();
        for job in jobs {
            let (tell, told) = oneshot::channel();
            self.env.spawn(Box::pin(async move {
                // The receiver is gone once another part has failed.
                let _ = tell.send(job.await);
            }));
            outcomes.push(told);
        }
        for told in outcomes {
            told.await.unwrap_or_else(|_| fail("a task panicked or was dropped"))?;
        }
        Ok(())
    }
}

/// Numbers that look random, the same in each run.
pub(super) struct Dice(u64);

impl Dice {
    pub(super) fn new(seed: u64) -> Dice {
        Dice(seed)
    }

    /// A number below `bound`.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.0 += 1;
        mix(self.0) % bound.max(1)
    }
    /// A number of less than `bits` bits, small ones as often as large.
    pub(super) fn up_to_bits(&mut self, bits: u64) -> u64 {
        let bound = 1 << self.below(bits);
        self.below(bound)
    }
}
