//! Checks of file systems that several front ends use at a time: two views of the same files, as
//! two nodes mount one volume.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use atoll_env::BoxFuture;
use bytes::Bytes;

use super::probe::{During, Outcome, Probe, Stop, ensure, me, refused, same};
use super::tree::Tree;
use super::{Checked, Report, Subject, Verdict, judge};
use crate::{
    Errno, FileLock, FileSystem, InodeNumber, Invalidation, LockKind, LockOwner, LockRange,
    OpenFlags, RenameFlags, SetAttr, Writer, XattrFlags,
};

/// How long a change may take to be told. Far beyond what any needs on a busy machine.
const TOLD_WITHIN: Duration = Duration::from_secs(60);

/// A kind of file system of which there can be two views.
pub trait SharedSubject: Subject {
    /// Two views of a new file system that holds exactly `tree`.
    fn make_two(&self, tree: Arc<Tree>) -> BoxFuture<'_, Result<[Arc<dyn FileSystem>; 2], String>>;
}

/// The view in which something is changed, and the one that is to hear of it.
struct Two {
    changing: Probe,
    hearing: Probe,
}

type SharedCheck = (&'static str, fn(Two) -> BoxFuture<'static, Outcome>);

macro_rules! shared_checks {
    ($($name:ident),* $(,)?) => {
        &[$((stringify!($name), |two| Box::pin($name(two)))),*]
    };
}

const CHECKS: &[SharedCheck] = shared_checks![
    a_write_is_told_with_its_bytes,
    a_truncation_is_told_from_the_new_end,
    changed_attributes_are_told,
    a_new_name_is_told,
    a_deleted_file_is_told_by_its_name,
    a_rename_is_told_by_both_names,
    a_name_that_is_not_the_last_is_told_with_the_file,
    a_views_own_changes_are_not_told_to_it,
    a_lock_of_one_view_keeps_the_other_out,
    a_handle_of_one_view_leads_the_other_to_the_file,
];

/// Runs the checks that need two views, each over a new file system that holds [`Tree::small`].
pub async fn run_shared_suite(subject: &dyn SharedSubject) -> Report {
    let mut report = Report { subject: subject.name(), checks: Vec::new() };
    let tree = Arc::new(Tree::small());
    for (name, check) in CHECKS {
        let verdict = match subject.make_two(tree.clone()).await {
            Ok(views) => {
                let [changing, hearing] = views.map(|fs| {
                    let (features, env) = (subject.features(), subject.env());
                    Probe { fs, tree: tree.clone(), features, env }
                });
                let env = subject.env();
                let work = async move {
                    let two = Two { changing, hearing };
                    two.forget_the_past();
                    check(two).await
                };
                judge(&env, work).await
            }
            Err(reason) => Verdict::Failed(format!("no file system was made: {reason}")),
        };
        report.checks.push(Checked { name, verdict });
    }
    report
}

/// What has been told of a change.
#[derive(Default)]
struct Told(Vec<Invalidation>);

impl Told {
    fn data(&self, inode: InodeNumber, first: u64, last: u64) -> bool {
        self.0.iter().any(|told| match told {
            Invalidation::Data { inode: of, bytes } => {
                *of == inode && bytes.start <= first && last < bytes.end
            }
            _ => false,
        })
    }

    fn attributes(&self, inode: InodeNumber) -> bool {
        self.0.iter().any(|told| match told {
            Invalidation::Attributes(of) | Invalidation::Data { inode: of, .. } => *of == inode,
            _ => false,
        })
    }

    fn name(&self, of: InodeNumber, wanted: &[u8]) -> bool {
        self.0.iter().any(|told| match told {
            Invalidation::Name { parent, name } | Invalidation::Deleted { parent, name, .. } => {
                *parent == of && name == wanted
            }
            _ => false,
        })
    }

    fn deleted(&self, wanted: InodeNumber) -> bool {
        let is_it =
            |told: &_| matches!(told, Invalidation::Deleted { inode, .. } if *inode == wanted);
        self.0.iter().any(is_it)
    }
}

impl Two {
    /// Takes what was told while the file system was made.
    fn forget_the_past(&self) {
        for probe in [&self.changing, &self.hearing] {
            if let Some(queue) = probe.fs.invalidations() {
                while queue.try_next().is_some() {}
            }
        }
    }

    /// Waits until `all` has been told.
    async fn until(&self, what: &str, all: impl Fn(&Told) -> bool) -> Outcome {
        let Some(queue) = self.hearing.fs.invalidations() else {
            return Err(Stop::Skipped("it tells of no changes"));
        };
        let mut told = Told::default();
        let listen = async {
            while !all(&told) {
                told.0.push(queue.next().await);
            }
        };
        let heard = atoll_env::timeout(&*self.hearing.env, TOLD_WITHIN, listen).await.is_ok();
        ensure(heard, || format!("{what} was not told, but {:?}", told.0))
    }

    async fn inode(&self, path: &str) -> Outcome<InodeNumber> {
        let inode = self.changing.inode(path).await?;
        same(
            format!("number of {path} in the other view"),
            self.hearing.inode(path).await?,
            inode,
        )?;
        Ok(inode)
    }
}

async fn a_write_is_told_with_its_bytes(two: Two) -> Outcome {
    let inode = two.inode("file").await?;
    let handle = two.changing.open(inode, OpenFlags::WRITE).await?;
    let data = Bytes::from_static(b"changed");
    let fs = &two.changing.fs;
    fs.write(Writer::At(me()), inode, handle, 1000, data).await.during("write")?;
    two.changing.close(inode, handle).await?;
    two.until("a write", |told| told.data(inode, 1000, 1006)).await?;
    let read = two.hearing.read_all(inode, 65_536).await?;
    same("bytes read by the other", read.get(1000..1007), Some(&b"changed"[..]))
}

async fn a_truncation_is_told_from_the_new_end(two: Two) -> Outcome {
    let inode = two.inode("file").await?;
    let change = SetAttr { size_bytes: Some(3), ..SetAttr::default() };
    two.changing.fs.setattr(me(), inode, None, change).await.during("truncate")?;
    two.until("a truncation", |told| told.data(inode, 3, 1 << 40)).await?;
    same("size", two.hearing.attr(inode).await?.size_bytes, 3)
}

async fn changed_attributes_are_told(two: Two) -> Outcome {
    let inode = two.inode("file").await?;
    let change = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    two.changing.fs.setattr(me(), inode, None, change).await.during("chmod")?;
    two.until("a mode", |told| told.attributes(inode)).await?;
    same("mode", two.hearing.attr(inode).await?.mode, 0o600)?;
    if !two.changing.features.xattrs {
        return Ok(());
    }
    let (value, flags) = (Bytes::from_static(b"x"), XattrFlags::default());
    two.changing.fs.setxattr(me(), inode, b"user.x", value, flags).await.during("setxattr")?;
    two.until("an extended attribute", |told| told.attributes(inode)).await
}

async fn a_new_name_is_told(two: Two) -> Outcome {
    let parent = two.inode("directory").await?;
    two.changing.fs.mkdir(me(), parent, b"new", 0o755).await.during("mkdir")?;
    let all = |told: &Told| told.name(parent, b"new") && told.attributes(parent);
    two.until("a new name and its directory", all).await?;
    two.hearing.lookup(parent, b"new").await.during("lookup in the other view").map(drop)
}

async fn a_deleted_file_is_told_by_its_name(two: Two) -> Outcome {
    let inode = two.inode("file").await?;
    two.changing.fs.unlink(me(), InodeNumber::ROOT, b"file").await.during("unlink")?;
    let all = |told: &Told| told.name(InodeNumber::ROOT, b"file") && told.deleted(inode);
    two.until("a deleted file", all).await?;
    let gone = two.hearing.lookup(InodeNumber::ROOT, b"file").await;
    refused("its lookup in the other view", gone, &[Errno::ENOENT])
}

async fn a_rename_is_told_by_both_names(two: Two) -> Outcome {
    let (root, directory) = (InodeNumber::ROOT, two.inode("directory").await?);
    let flags = RenameFlags::default();
    let fs = &two.changing.fs;
    fs.rename(me(), root, b"file", directory, b"moved", flags).await.during("rename")?;
    let all = |told: &Told| told.name(root, b"file") && told.name(directory, b"moved");
    two.until("both names", all).await
}

async fn a_name_that_is_not_the_last_is_told_with_the_file(two: Two) -> Outcome {
    two.changing.needs(two.changing.features.hard_links, "it has no hard links")?;
    let inode = two.inode("file").await?;
    two.changing.fs.link(me(), inode, InodeNumber::ROOT, b"second").await.during("link")?;
    let named = |told: &Told| told.name(InodeNumber::ROOT, b"second") && told.attributes(inode);
    two.until("a second name", named).await?;
    two.changing.fs.unlink(me(), InodeNumber::ROOT, b"second").await.during("unlink")?;
    two.until("that it is gone", named).await?;
    let told = two.hearing.fs.invalidations().and_then(|queue| queue.try_next());
    let deleted = matches!(told, Some(Invalidation::Deleted { .. }));
    ensure(!deleted, || "the file has another name".to_owned())
}

async fn a_views_own_changes_are_not_told_to_it(two: Two) -> Outcome {
    let root = InodeNumber::ROOT;
    let own = two.changing.fs.invalidations();
    two.changing.fs.mkdir(me(), root, b"own", 0o755).await.during("mkdir")?;
    two.until("a new name", |told| told.name(root, b"own")).await?;
    let told: BTreeSet<String> =
        own.iter().flat_map(|own| own.try_next()).map(|told| format!("{told:?}")).collect();
    same("told to the view that made the change", told, BTreeSet::new())
}

async fn a_lock_of_one_view_keeps_the_other_out(two: Two) -> Outcome {
    let inode = two.inode("file").await?;
    let (Some(ours), Some(theirs)) = (two.changing.fs.locks(), two.hearing.fs.locks()) else {
        return Err(Stop::Skipped("it leaves locks to the front end"));
    };
    let (kind, range) = (LockKind::Exclusive, LockRange::WHOLE);
    let wanted = FileLock { kind, range, pid: 1, through: None };
    let (us, them) = (LockOwner(1), LockOwner(2));
    ours.lock(inode, us, wanted, false).await.during("lock")?;
    let refused_lock = theirs.lock(inode, them, wanted, false).await;
    refused("a lock in the other view", refused_lock, &[Errno::EAGAIN])?;
    let waiting = theirs.lock(inode, them, wanted, true);
    ours.unlock(inode, us, LockRange::WHOLE).await.during("unlock")?;
    waiting.await.during("the lock that waited")?;
    theirs.unlock(inode, them, LockRange::WHOLE).await.during("unlock")
}

async fn a_handle_of_one_view_leads_the_other_to_the_file(two: Two) -> Outcome {
    let attr = two.changing.find("file").await?;
    let handle = match two.changing.fs.handle_of(attr.inode).await {
        Err(Errno::EOPNOTSUPP) => return Err(Stop::Skipped("it has no persistent handles")),
        handle => handle.during("handle_of")?,
    };
    let found = two.hearing.fs.by_handle(me(), &handle).await.during("by_handle")?;
    same("found", found.attr, attr)
}
