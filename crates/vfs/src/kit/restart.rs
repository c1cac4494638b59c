//! Checks of handles that last: the file system ends, and another process has the same files.

use std::sync::Arc;

use atoll_env::BoxFuture;

use super::probe::{During, Outcome, Probe, Stop, fail, me, refused, same};
use super::tree::Tree;
use super::{Checked, Report, Subject, Verdict, judge};
use crate::{Attr, Errno, FileKind, FileSystem, InodeNumber, PersistentHandle, RenameFlags};

/// A kind of file system that can be ended and begun again.
pub trait RestartSubject: Subject {
    /// A new file system that holds exactly `tree`.
    fn start(&self, tree: Arc<Tree>) -> BoxFuture<'_, Result<Box<dyn Restart>, String>>;
}

/// A file system that can be ended and begun again.
pub trait Restart: Send + Sync {
    /// The file system as it is served now.
    fn fs(&self) -> Arc<dyn FileSystem>;

    /// Ends the file system and begins it anew over what is stored, with nothing from memory. The
    /// kit has let go of what [`fs`](Self::fs) has returned.
    fn restart(&mut self) -> BoxFuture<'_, Result<(), String>>;
}

/// The file system of one check.
struct Life {
    probe: Probe,
    restart: Box<dyn Restart>,
}

type RestartCheck = (&'static str, fn(Life) -> BoxFuture<'static, Outcome>);

macro_rules! restart_checks {
    ($($name:ident),* $(,)?) => {
        &[$((stringify!($name), |life| Box::pin($name(life)))),*]
    };
}

const CHECKS: &[RestartCheck] = restart_checks![
    handles_lead_to_their_files_after_restarts,
    numbers_are_the_same_after_restarts,
    handles_of_removed_files_are_stale_after_restarts,
    handles_of_replaced_files_are_stale_after_restarts,
    a_new_file_under_a_removed_name_has_another_handle,
    handles_follow_renames_over_restarts,
    handles_follow_exchanged_names_over_restarts,
    a_handle_lasts_as_long_as_a_file_has_names,
];

/// Runs the checks of handles that last over restarts, each over a new file system that holds
/// [`Tree::small`].
pub async fn run_restart_suite(subject: &dyn RestartSubject) -> Report {
    let mut report = Report { subject: subject.name(), checks: Vec::new() };
    let tree = Arc::new(Tree::small());
    for (name, check) in CHECKS {
        let verdict = match subject.start(tree.clone()).await {
            Ok(restart) => {
                let (features, env) = (subject.features(), subject.env());
                let probe = Probe { fs: restart.fs(), tree: tree.clone(), features, env };
                let life = Life { probe, restart };
                judge(&subject.env(), async move { check(life).await }).await
            }
            Err(reason) => Verdict::Failed(format!("no file system was made: {reason}")),
        };
        report.checks.push(Checked { name, verdict });
    }
    report
}

/// What a client keeps of a file.
struct Kept {
    attr: Attr,
    handle: PersistentHandle,
}

const ROOT: InodeNumber = InodeNumber::ROOT;

impl Life {
    async fn restarted(self) -> Outcome<Life> {
        let Life { probe: Probe { fs, tree, features, env }, mut restart } = self;
        drop(fs);
        restart.restart().await.or_else(|reason| fail(format!("restart: {reason}")))?;
        Ok(Life { probe: Probe { fs: restart.fs(), tree, features, env }, restart })
    }

    fn needs_changes(&self) -> Outcome {
        self.probe.needs(!self.probe.features.read_only, "it is read-only")
    }

    /// The file at `path`. Its number is not held any more.
    async fn keep(&self, path: &str) -> Outcome<Kept> {
        let attr = self.probe.find(path).await?;
        let handle = match self.probe.fs.handle_of(attr.inode).await {
            Err(Errno::EOPNOTSUPP) => return Err(Stop::Skipped("it has no persistent handles")),
            handle => handle.during(format_args!("handle_of {path}"))?,
        };
        self.probe.fs.forget(attr.inode, 1);
        Ok(Kept { attr, handle })
    }

    async fn keep_all<const N: usize>(&self, paths: [&str; N]) -> Outcome<Vec<Kept>> {
        let mut all = Vec::new();
        for path in paths {
            all.push(self.keep(path).await?);
        }
        Ok(all)
    }

    /// That a handle leads to its file, with the number it had.
    async fn finds(&self, what: &str, kept: &Kept) -> Outcome<Attr> {
        let found = self.probe.fs.by_handle(me(), &kept.handle).await;
        let found = found.during(format_args!("by_handle of {what}"))?.attr;
        same(format_args!("number of {what}"), found.inode, kept.attr.inode)?;
        same(format_args!("kind of {what}"), found.kind, kept.attr.kind)?;
        if found.kind != FileKind::Directory {
            same(format_args!("size of {what}"), found.size_bytes, kept.attr.size_bytes)?;
        }
        let again = self.probe.fs.handle_of(found.inode).await;
        let again = again.during(format_args!("handle_of {what} by its number"))?;
        same(format_args!("handle of {what}"), again, kept.handle.clone())?;
        Ok(found)
    }

    /// That a handle leads to the file at `path`.
    async fn is_at(&self, path: &str, kept: &Kept) -> Outcome {
        let found = self.finds(path, kept).await?;
        same(path, self.probe.find(path).await?, found)?;
        self.probe.fs.forget(found.inode, 2);
        Ok(())
    }

    async fn is_stale(&self, what: &str, kept: &Kept) -> Outcome {
        let found = self.probe.fs.by_handle(me(), &kept.handle).await;
        refused(format_args!("by_handle of {what}"), found, &[Errno::ESTALE])
    }

    async fn rename(&self, from: &str, to: &str, flags: RenameFlags) -> Outcome {
        let ((parent, name), (new_parent, new_name)) =
            (self.place(from).await?, self.place(to).await?);
        let fs = &self.probe.fs;
        let renamed = fs.rename(me(), parent, name, new_parent, new_name, flags).await;
        renamed.during(format_args!("rename {from} {to}"))?;
        fs.forget(parent, 1);
        fs.forget(new_parent, 1);
        Ok(())
    }

    async fn unlink(&self, path: &str) -> Outcome {
        let (parent, name) = self.place(path).await?;
        self.probe.fs.unlink(me(), parent, name).await.during(format_args!("unlink {path}"))?;
        self.probe.fs.forget(parent, 1);
        Ok(())
    }

    /// The directory of a path, held, and the name there.
    async fn place<'p>(&self, path: &'p str) -> Outcome<(InodeNumber, &'p [u8])> {
        let (above, name) = path.rsplit_once('/').unwrap_or(("", path));
        Ok((self.probe.inode(above).await?, name.as_bytes()))
    }
}

/// Deep ones first: nothing above them has been looked up.
const PATHS: [&str; 7] = [
    "directory/below/deeper",
    "directory/inner",
    "directory/below",
    "link",
    "directory",
    "file",
    "",
];

async fn handles_lead_to_their_files_after_restarts(mut life: Life) -> Outcome {
    let all = life.keep_all(PATHS).await?;
    for _ in 0..2 {
        life = life.restarted().await?;
        for (path, kept) in PATHS.into_iter().zip(&all) {
            life.is_at(path, kept).await?;
        }
        life = life.restarted().await?;
        let below = life.finds("directory/below", &all[2]).await?.inode;
        let deeper = life.probe.lookup(below, b"deeper").await.during("lookup of deeper")?;
        same("number of deeper", deeper.attr.inode, all[0].attr.inode)?;
        match life.probe.fs.parent(me(), below).await {
            Err(Errno::EOPNOTSUPP) => {}
            parent => same("..", parent.during("parent")?.attr.inode, all[4].attr.inode)?,
        }
        let inner = life.finds("directory/inner", &all[1]).await?.inode;
        same("bytes", life.probe.read_all(inner, 100).await?, b"inner".to_vec())?;
    }
    Ok(())
}

async fn numbers_are_the_same_after_restarts(life: Life) -> Outcome {
    let all = life.keep_all(PATHS).await?;
    let life = life.restarted().await?;
    for (path, kept) in PATHS.into_iter().zip(&all) {
        same(path, life.probe.inode(path).await?, kept.attr.inode)?;
    }
    Ok(())
}

async fn handles_of_removed_files_are_stale_after_restarts(life: Life) -> Outcome {
    life.needs_changes()?;
    let all = life.keep_all(["file", "directory/inner", "empty", "link"]).await?;
    life.unlink("file").await?;
    life.is_stale("file", &all[0]).await?;
    let life = life.restarted().await?;
    life.is_stale("file", &all[0]).await?;
    life.is_at("directory/inner", &all[1]).await?;
    life.unlink("directory/inner").await?;
    life.unlink("link").await?;
    let fs = &life.probe.fs;
    fs.rmdir(me(), ROOT, b"empty").await.during("rmdir")?;
    for (what, kept) in ["file", "inner", "empty", "link"].into_iter().zip(&all) {
        life.is_stale(what, kept).await?;
    }
    let life = life.restarted().await?;
    for (what, kept) in ["file", "inner", "empty", "link"].into_iter().zip(&all) {
        life.is_stale(what, kept).await?;
    }
    Ok(())
}

async fn handles_of_replaced_files_are_stale_after_restarts(life: Life) -> Outcome {
    life.needs_changes()?;
    let all = life.keep_all(["file", "directory/inner", "empty", "directory/below"]).await?;
    life.rename("directory/inner", "file", RenameFlags::default()).await?;
    life.rename("directory/below", "empty", RenameFlags::default()).await?;
    let life = life.restarted().await?;
    life.is_stale("the replaced file", &all[0]).await?;
    life.is_at("file", &all[1]).await?;
    life.is_stale("the replaced directory", &all[2]).await?;
    life.is_at("empty", &all[3]).await
}

async fn a_new_file_under_a_removed_name_has_another_handle(life: Life) -> Outcome {
    life.needs_changes()?;
    let old = life.keep("file").await?;
    life.unlink("file").await?;
    let make = async |life: &Life| {
        let made = life.probe.fs.mknod(me(), ROOT, b"file", FileKind::Regular, 0o644, 0).await;
        life.probe.fs.forget(made.during("mknod")?.attr.inode, 1);
        life.keep("file").await
    };
    let second = make(&life).await?;
    life.is_stale("the first file", &old).await?;
    let life = life.restarted().await?;
    life.is_stale("the first file", &old).await?;
    life.is_at("file", &second).await?;
    life.unlink("file").await?;
    let life = life.restarted().await?;
    let third = make(&life).await?;
    for kept in [&old, &second] {
        life.is_stale("a file before", kept).await?;
    }
    life.is_at("file", &third).await
}

async fn handles_follow_renames_over_restarts(life: Life) -> Outcome {
    life.needs_changes()?;
    let paths = ["file", "directory/below/deeper", "directory/below", "directory", "empty", "link"];
    let all = life.keep_all(paths).await?;
    let plain = RenameFlags::default();
    life.rename("file", "directory/moved", plain).await?;
    life.rename("directory/below", "empty/lower", plain).await?;
    life.rename("link", "renamed", plain).await?;
    let paths =
        ["directory/moved", "empty/lower/deeper", "empty/lower", "directory", "empty", "renamed"];
    for (path, kept) in paths.into_iter().zip(&all) {
        life.is_at(path, kept).await?;
    }
    let life = life.restarted().await?;
    for (path, kept) in paths.into_iter().zip(&all) {
        life.is_at(path, kept).await?;
    }
    // Of names that this process has not found by handle before.
    let life = life.restarted().await?;
    life.rename("empty", "full", plain).await?;
    life.rename("full/lower/deeper", "directory/deep", plain).await?;
    life.rename("directory/moved", "full/lower/deeper", plain).await?;
    let life = life.restarted().await?;
    let paths =
        ["full/lower/deeper", "directory/deep", "full/lower", "directory", "full", "renamed"];
    for (path, kept) in paths.into_iter().zip(&all) {
        life.is_at(path, kept).await?;
    }
    Ok(())
}

async fn handles_follow_exchanged_names_over_restarts(life: Life) -> Outcome {
    life.needs_changes()?;
    life.probe.needs(life.probe.features.exchange, "it does not exchange names")?;
    let all = life.keep_all(["file", "directory/below", "directory/below/deeper"]).await?;
    let exchange = RenameFlags { exchange: true, ..RenameFlags::default() };
    life.rename("file", "directory/below", exchange).await?;
    let life = life.restarted().await?;
    life.is_at("file/deeper", &all[2]).await?;
    life.is_at("file", &all[1]).await?;
    life.is_at("directory/below", &all[0]).await
}

async fn a_handle_lasts_as_long_as_a_file_has_names(life: Life) -> Outcome {
    life.needs_changes()?;
    life.probe.needs(life.probe.features.hard_links, "it has no hard links")?;
    let (kept, directory) = (life.keep("file").await?, life.probe.inode("directory").await?);
    let file = life.probe.inode("file").await?;
    life.probe.fs.link(me(), file, directory, b"second").await.during("link")?;
    life.probe.fs.forget(file, 2);
    let life = life.restarted().await?;
    life.is_at("directory/second", &kept).await?;
    life.unlink("file").await?;
    life.is_at("directory/second", &kept).await?;
    let life = life.restarted().await?;
    life.is_at("directory/second", &kept).await?;
    life.rename("directory/second", "third", RenameFlags::default()).await?;
    let life = life.restarted().await?;
    life.is_at("third", &kept).await?;
    life.unlink("third").await?;
    life.is_stale("a file without names", &kept).await?;
    life.restarted().await?.is_stale("a file without names", &kept).await
}
