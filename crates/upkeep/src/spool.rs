//! The spools of this node's volumes on disk: `DIR/spool/NAME`, each with a lock that the mount which
//! writes it holds.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use atoll_env::BoxFuture;
use atoll_volume::SpoolDirectory;
use atoll_volume::owned::{SPOOL_BASE, SPOOL_RECORDS};
use atoll_volume::shared::{SPOOL_BLOCK, SPOOL_INODE};
use bytes::Bytes;
use rustix::fs::FlockOperation;
use rustix::io::Errno;

const LOCK: &str = "lock";
const ASIDE: &str = "aside-";
/// Where files are moved that are set aside, until it has all of them.
const MOVING: &str = "moving";

/// What of a volume is not on the ring.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pending {
    /// The volume's name.
    pub name: String,
    /// Bytes of recorded changes that the next flush, or the next mount, brings to the ring.
    pub bytes: u64,
    /// Of a shared volume, how many files and directories these are changes of.
    pub files: u64,
    /// Whether a mount of this machine writes the volume now.
    pub mounted: bool,
    /// Why the ring did not take some of the files of a shared volume when that was tried last.
    pub refused: Option<String>,
    /// Directories with changes that another writer has overtaken.
    pub set_aside: Vec<PathBuf>,
    /// Their bytes.
    pub set_aside_bytes: u64,
}

/// Where the spool of a volume is.
pub fn directory(node: &Path, name: &str) -> PathBuf {
    node.join("spool").join(name)
}

/// The spool of a volume; `None` if a mount of this machine has it.
///
/// # Errors
/// If the disk fails, or the spool has something and cannot be used.
pub fn open(node: &Path, name: &str) -> io::Result<Option<Arc<dyn SpoolDirectory>>> {
    let opened = SpoolOnDisk::open(directory(node, name))?;
    Ok(opened.map(|spool| Arc::new(spool) as Arc<dyn SpoolDirectory>))
}

/// What waits in each spool, of volumes of which something does.
pub fn pending(node: &Path) -> Vec<Pending> {
    let Ok(spools) = fs::read_dir(node.join("spool")) else { return Vec::new() };
    let names = spools.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let mut pending: Vec<Pending> = names.map(|name| pending_of(node, &name)).collect();
    pending.retain(|spool| spool.bytes > 0 || !spool.set_aside.is_empty());
    pending.sort_by(|a, b| a.name.cmp(&b.name));
    pending
}

/// What waits in the spool of a volume.
pub fn pending_of(node: &Path, name: &str) -> Pending {
    pending_at(&directory(node, name), name)
}

/// What waits in the spool at a path.
pub fn pending_at(path: &Path, name: &str) -> Pending {
    let (files, bytes) = files_in(path);
    let mut pending = Pending { name: name.to_owned(), files, bytes, ..Pending::default() };
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        let file = entry.file_name();
        let file = file.to_string_lossy();
        if file.starts_with(ASIDE) {
            pending.set_aside_bytes += bytes_in(&entry.path());
            pending.set_aside.push(entry.path());
        }
    }
    pending.set_aside.sort();
    let lock = File::open(path.join(LOCK));
    pending.mounted = lock.is_ok_and(|file| lock_now(&file).is_err());
    pending
}

/// Of a spool at a path the number of files of a shared volume, and the bytes of all that waits.
pub fn files_in(path: &Path) -> (u64, u64) {
    let (mut files, mut bytes) = (0, 0);
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if waits(&name) {
            files += u64::from(name.ends_with(SPOOL_INODE));
            bytes += entry.metadata().map_or(0, |metadata| metadata.len());
        }
    }
    (files, bytes)
}

/// Whether a file has something that the ring does not have.
fn waits(name: &str) -> bool {
    [SPOOL_RECORDS, SPOOL_INODE, SPOOL_BLOCK].iter().any(|end| name.ends_with(end))
}

fn bytes_in(path: &Path) -> u64 {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    entries.map(|entry| entry.metadata().map_or(0, |metadata| metadata.len())).sum()
}

/// Removes what waits for the ring; fails if a mount has the spool.
pub fn remove_records(node: &Path, name: &str) -> io::Result<()> {
    let path = directory(node, name);
    let Some(_lock) = SpoolOnDisk::open(path.clone())? else {
        return Err(io::ErrorKind::ResourceBusy.into());
    };
    remove_files(&path)
}

/// Removes what waits for the ring. The caller has the spool's lock.
pub fn remove_files(path: &Path) -> io::Result<()> {
    for name in names_in(path)?.iter().filter(|name| waits(name)) {
        fs::remove_file(path.join(name))?;
    }
    Ok(())
}

/// Removes the spool of a volume that this node has forgotten.
pub fn remove(node: &Path, name: &str) {
    // A file that cannot be removed belongs to no volume any more and does no harm.
    let _ = fs::remove_dir_all(directory(node, name));
}

fn lock_now(file: &File) -> Result<(), Errno> {
    rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive)
}

/// Locks a file that commands which look at it may have locked for a moment.
pub fn lock_soon(file: &File) -> Result<(), Errno> {
    for _ in 0..10 {
        match lock_now(file) {
            Err(Errno::WOULDBLOCK) => std::thread::sleep(Duration::from_millis(20)),
            done => return done,
        }
    }
    lock_now(file)
}

#[derive(Default)]
struct Files {
    /// The file that was appended to last.
    open: Mutex<Option<(String, File)>>,
    /// Without a name: it goes with this process. Reads of it do not wait for syncs of the other.
    swap: Mutex<Option<Arc<File>>>,
}

/// A spool's directory, in the use of this process alone.
pub struct SpoolOnDisk {
    path: PathBuf,
    files: Arc<Files>,
    /// Or why it cannot be used.
    lock: Result<File, String>,
}

/// Locks a directory, which is made if it is not there. `None` if another process uses it.
fn lock_directory(path: &Path) -> io::Result<Option<File>> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)?;
    // Files in a directory whose name a crash takes away are gone, too.
    path.ancestors().skip(1).take(2).try_for_each(sync_directory)?;
    let mut options = OpenOptions::new();
    let lock = options.create(true).append(true).mode(0o600).open(path.join(LOCK))?;
    match lock_soon(&lock) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => return Ok(None),
        Err(error) => return Err(error.into()),
    }
    if path.join(MOVING).exists() {
        // A crash has ended the mount that was about to.
        let mut names = names_in(path)?;
        names.retain(|name| name.ends_with(SPOOL_RECORDS) || name == SPOOL_BASE);
        move_aside(path, &names)?;
    }
    Ok(Some(lock))
}

/// Whether a directory has no records, and none that are being set aside.
fn has_no_records(path: &Path) -> bool {
    match names_in(path) {
        Ok(names) => !names.iter().any(|name| waits(name) || name == MOVING),
        Err(error) => {
            matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
        }
    }
}

impl SpoolOnDisk {
    /// Opens a directory, which is made if it is not there. `None` if another process uses it. If the
    /// disk fails, and no records are there, it is empty and cannot be written.
    pub fn open(path: PathBuf) -> io::Result<Option<SpoolOnDisk>> {
        let lock = match lock_directory(&path) {
            Ok(Some(lock)) => Ok(lock),
            Ok(None) => return Ok(None),
            Err(error) if has_no_records(&path) => Err(error.to_string()),
            Err(error) => return Err(error),
        };
        Ok(Some(SpoolOnDisk { path, files: Arc::default(), lock }))
    }

    fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Path, &Files) -> io::Result<T> + Send + 'static,
    ) -> BoxFuture<'static, io::Result<T>> {
        if let Err(why) = &self.lock {
            let error = io::Error::other(why.clone());
            return Box::pin(async { Err(error) });
        }
        let (path, files) = (self.path.clone(), self.files.clone());
        let work = tokio::task::spawn_blocking(move || work(&path, &files));
        Box::pin(async move { work.await.map_err(io::Error::other)? })
    }
}

fn locked<T>(file: &Mutex<T>) -> MutexGuard<'_, T> {
    file.lock().expect("no holder of this lock panics")
}

fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// A file that is gone when it is closed.
fn nameless_file(path: &Path) -> io::Result<File> {
    let name = path.join("swap");
    let mut options = OpenOptions::new();
    options.create(true).read(true).write(true).truncate(true).mode(0o600);
    let file = options.open(&name)?;
    fs::remove_file(name)?;
    Ok(file)
}

fn names_in(path: &Path) -> io::Result<Vec<String>> {
    let entries = fs::read_dir(path)?.collect::<io::Result<Vec<_>>>()?;
    Ok(entries.into_iter().filter_map(|entry| entry.file_name().into_string().ok()).collect())
}

/// Moves files into a directory of their own, which has its name when it has all of them.
fn move_aside(path: &Path, names: &[String]) -> io::Result<String> {
    let moving = path.join(MOVING);
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&moving)?;
    sync_directory(path)?;
    for name in names {
        match fs::rename(path.join(name), moving.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    sync_directory(&moving)?;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let name = format!("{ASIDE}{}", now.map_or(0, |since| since.as_millis()));
    fs::rename(&moving, path.join(&name))?;
    sync_directory(path)?;
    Ok(name)
}

impl SpoolDirectory for SpoolOnDisk {
    fn list(&self) -> BoxFuture<'static, io::Result<Vec<String>>> {
        match self.lock {
            Ok(_) => self.run(|path, _| names_in(path)),
            Err(_) => Box::pin(async { Ok(Vec::new()) }),
        }
    }

    fn read(&self, name: String) -> BoxFuture<'static, io::Result<Bytes>> {
        self.run(move |path, _| fs::read(path.join(name)).map(Bytes::from))
    }

    fn append(&self, name: String, bytes: Bytes) -> BoxFuture<'static, io::Result<()>> {
        self.run(move |path, files| {
            let open = &mut *locked(&files.open);
            if open.as_ref().is_none_or(|(opened, _)| *opened != name) {
                let mut options = OpenOptions::new();
                let file = options.create(true).append(true).mode(0o600).open(path.join(&name))?;
                sync_directory(path)?;
                *open = Some((name, file));
            }
            let (_, file) = open.as_mut().expect("it was opened above");
            file.write_all(&bytes)
        })
    }

    fn sync(&self, name: String) -> BoxFuture<'static, io::Result<()>> {
        self.run(move |path, files| match &*locked(&files.open) {
            Some((opened, file)) if *opened == name => file.sync_data(),
            _ => File::open(path.join(name))?.sync_data(),
        })
    }

    fn replace(&self, name: String, bytes: Bytes) -> BoxFuture<'static, io::Result<()>> {
        self.run(move |path, _| {
            let new = path.join(format!("{name}.new"));
            let mut options = OpenOptions::new();
            let mut file =
                options.create(true).write(true).truncate(true).mode(0o600).open(&new)?;
            file.write_all(&bytes)?;
            file.sync_data()?;
            fs::rename(new, path.join(name))?;
            sync_directory(path)
        })
    }

    fn remove(&self, name: String) -> BoxFuture<'static, io::Result<()>> {
        self.run(move |path, files| {
            let open = &mut *locked(&files.open);
            if open.as_ref().is_some_and(|(opened, _)| *opened == name) {
                *open = None;
            }
            match fs::remove_file(path.join(name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                _ => Ok(()),
            }
        })
    }

    fn swap_out(&self, bytes: Bytes) -> BoxFuture<'static, io::Result<u64>> {
        self.run(move |path, files| {
            let swap = &mut *locked(&files.swap);
            let swap = match swap {
                Some(swap) => swap,
                None => swap.insert(Arc::new(nameless_file(path)?)),
            };
            let at = swap.metadata()?.len();
            swap.write_all_at(&bytes, at)?;
            Ok(at)
        })
    }

    fn swap_in(&self, offset: u64, len: u32) -> BoxFuture<'static, io::Result<Bytes>> {
        self.run(move |_, files| {
            let swap = locked(&files.swap).clone().ok_or(io::ErrorKind::NotFound)?;
            let mut bytes = vec![0; len as usize];
            swap.read_exact_at(&mut bytes, offset)?;
            Ok(bytes.into())
        })
    }

    fn swap_clear(&self) -> BoxFuture<'static, io::Result<()>> {
        self.run(|_, files| {
            *locked(&files.swap) = None;
            Ok(())
        })
    }

    fn set_aside(&self, names: Vec<String>) -> BoxFuture<'static, io::Result<String>> {
        self.run(move |path, files| {
            *locked(&files.open) = None;
            move_aside(path, &names)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a device that cannot make anything durable the system says so: the error is proof that it was asked.
    #[tokio::test]
    async fn what_is_to_be_durable_is_synced() -> io::Result<()> {
        let node = tempfile::tempdir()?;
        let path = directory(node.path(), "work");
        let spool = SpoolOnDisk::open(path.clone())?.expect("nobody uses it");
        for name in ["open", "closed", "base.new"] {
            std::os::unix::fs::symlink("/dev/null", path.join(name))?;
        }
        spool.append("open".into(), Bytes::from_static(b"x")).await?;
        let refused = [
            spool.sync("open".into()).await,
            spool.sync("closed".into()).await,
            spool.replace("base".into(), Bytes::from_static(b"x")).await,
        ];
        for refused in refused {
            assert_eq!(refused.expect_err("synced").kind(), io::ErrorKind::InvalidInput);
        }
        Ok(())
    }

    #[tokio::test]
    async fn a_directory_keeps_what_it_is_given() -> io::Result<()> {
        let node = tempfile::tempdir()?;
        let path = directory(node.path(), "work");
        let spool = SpoolOnDisk::open(path.clone())?.expect("nobody uses it");
        assert!(SpoolOnDisk::open(path.clone())?.is_none());
        spool.replace("base".into(), Bytes::from_static(b"1")).await?;
        spool.replace("base".into(), Bytes::from_static(b"2")).await?;
        for name in ["a.records", "b.records", "a.records"] {
            spool.append(name.into(), Bytes::from_static(b"xy")).await?;
            spool.sync(name.into()).await?;
        }
        spool.sync("b.records".into()).await?;
        assert_eq!(spool.read("base".into()).await?, "2");
        assert_eq!(spool.read("a.records".into()).await?, "xyxy");
        let waits = pending(node.path());
        assert_eq!((waits.len(), waits[0].bytes, waits[0].mounted), (1, 6, true));
        spool.remove("a.records".into()).await?;
        spool.remove("a.records".into()).await?;
        spool.append("a.records".into(), Bytes::from_static(b"z")).await?;
        assert_eq!(spool.swap_out(Bytes::from_static(b"one")).await?, 0);
        assert_eq!(spool.swap_out(Bytes::from_static(b"two")).await?, 3);
        assert_eq!(spool.swap_in(2, 2).await?, "et");
        spool.swap_clear().await?;
        assert!(spool.swap_in(0, 1).await.is_err());
        assert_eq!(spool.swap_out(Bytes::from_static(b"three")).await?, 0);
        let aside = spool.set_aside(vec!["a.records".into(), "no".into()]).await?;
        assert_eq!(fs::read(path.join(&aside).join("a.records"))?, b"z");
        let mut names = spool.list().await?;
        names.sort();
        assert_eq!(names, [&aside, "b.records", "base", LOCK]);
        drop(spool);
        let waits = pending_of(node.path(), "work");
        assert_eq!((waits.bytes, waits.mounted, waits.set_aside.len()), (2, false, 1));
        Ok(())
    }

    /// A crash may leave files in either place. A part of them is of no use.
    #[test]
    fn what_is_set_aside_stays_together() -> io::Result<()> {
        let node = tempfile::tempdir()?;
        let path = directory(node.path(), "work");
        drop(SpoolOnDisk::open(path.clone())?.expect("nobody uses it"));
        fs::create_dir(path.join(MOVING))?;
        for name in ["id", "b.records", "base", "moving/a.records"] {
            fs::write(path.join(name), name)?;
        }
        drop(SpoolOnDisk::open(path.clone())?.expect("nobody uses it"));
        let pending = pending_of(node.path(), "work");
        assert_eq!((pending.bytes, pending.set_aside.len()), (0, 1));
        for name in ["a.records", "b.records", "base"] {
            assert!(pending.set_aside[0].join(name).exists(), "{name}");
        }
        assert!(path.join("id").exists() && !path.join(MOVING).exists());
        Ok(())
    }

    /// A disk without room, or that takes nothing, keeps nobody from the volume; unless there is
    /// something in the spool that would be passed over.
    #[tokio::test]
    async fn a_directory_that_cannot_be_made_is_empty_and_cannot_be_written() -> io::Result<()> {
        let node = tempfile::tempdir()?;
        fs::write(node.path().join("spool"), "in the way")?;
        let spool = SpoolOnDisk::open(directory(node.path(), "work"))?.expect("nobody uses it");
        assert_eq!(spool.list().await?, Vec::<String>::new());
        assert!(spool.append("a.records".into(), Bytes::from_static(b"x")).await.is_err());

        let path = node.path().join("other");
        fs::create_dir_all(path.join(LOCK))?;
        assert!(SpoolOnDisk::open(path.clone())?.expect("nobody uses it").lock.is_err());
        fs::write(path.join("a.records"), "x")?;
        assert!(SpoolOnDisk::open(path).is_err());
        Ok(())
    }

    /// `atoll status` looks at spools while a mount begins.
    #[test]
    fn a_look_at_a_spool_keeps_no_mount_out() -> io::Result<()> {
        let node = tempfile::tempdir()?;
        let path = directory(node.path(), "work");
        drop(SpoolOnDisk::open(path.clone())?);
        let looking = File::open(path.join(LOCK))?;
        assert!(lock_now(&looking).is_ok());
        let ends = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(30));
            drop(looking);
        });
        assert!(SpoolOnDisk::open(path)?.is_some());
        ends.join().expect("does not panic");
        Ok(())
    }
}
