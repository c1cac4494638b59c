//! A mount that is gone when its test ends, however it ends.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use atoll_env::TokioRuntime;
use atoll_gateway::fuse::{Draining, MountOptions, Mounted, mount};
use atoll_vfs::FileSystem;
use atoll_vfs::memory::MemoryFs;
use tempfile::TempDir;
use tokio::runtime::Runtime;

/// Whether this machine lets us mount. Says loudly if not.
pub(crate) fn fuse_is_here() -> bool {
    let here = std::fs::File::options().read(true).write(true).open("/dev/fuse").is_ok()
        && (rustix::process::geteuid().is_root() || Path::new("/usr/bin/fusermount3").exists());
    if !here {
        skipped("FUSE is not available here (/dev/fuse, root or fusermount3)");
    }
    here
}

/// Says loudly that a test cannot run: past the harness, which keeps to itself what a
/// passing test prints.
pub(crate) fn skipped(why: &str) {
    let _ = writeln!(std::io::stderr(), "\nSKIPPED: {why}");
}

pub(crate) fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// A file system, mounted. Dropping it unmounts lazily, then removes the directory.
pub(crate) struct Place {
    pub mounted: Option<Mounted>,
    pub runtime: Option<Runtime>,
    directory: TempDir,
}

impl Place {
    /// Mounts what `make` makes on a new directory; nothing where there is no FUSE.
    pub(crate) fn with(
        options: &MountOptions,
        make: impl FnOnce(&Runtime) -> Arc<dyn FileSystem>,
    ) -> Option<Place> {
        if !fuse_is_here() {
            return None;
        }
        let (runtime, directory) = (runtime(), tempfile::tempdir().unwrap());
        let fs = make(&runtime);
        let mounted = mount(fs, directory.path(), options, runtime.handle()).unwrap();
        Some(Place { mounted: Some(mounted), runtime: Some(runtime), directory })
    }

    /// An empty file system in memory.
    pub(crate) fn memory() -> Option<Place> {
        Place::with(&MountOptions::default(), |runtime| Arc::new(memory(runtime)))
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    pub(crate) fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().unwrap()
    }

    /// Unmounts, which fails if anything stays in use.
    pub(crate) fn unmount(mut self) {
        let mut mounted = self.mounted.take().unwrap();
        unmount_unused(self.runtime(), &mut mounted);
    }
}

/// Two mounts of one file system in memory.
pub(crate) struct Two {
    pub fs: Arc<MemoryFs>,
    pub places: [Place; 2],
}

impl Two {
    /// Of what `with` makes of an empty one; nothing where there is no FUSE.
    pub(crate) fn new(
        with: impl FnOnce(MemoryFs) -> MemoryFs,
        options: &MountOptions,
    ) -> Option<Two> {
        let mut made = None;
        let first = Place::with(options, |runtime| {
            let fs = Arc::new(with(memory(runtime)));
            made = Some(fs.clone());
            fs
        })?;
        let fs = made.expect("it was made for the first mount");
        let second = Place::with(options, |_| Arc::new(fs.another_view()))?;
        Some(Two { fs, places: [first, second] })
    }

    pub(crate) fn unmount(self) {
        self.places.into_iter().for_each(Place::unmount);
    }
}

/// Waits until `seen` is so; for ever, if that does not come. It looks seldom: looking without a pause keeps locks of the
/// kernel for which invalidations wait, and a processor that the mounts may need.
pub(crate) fn until(mut seen: impl FnMut() -> bool) {
    while !seen() {
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Unmounts, which fails if anything stays in use. (A program that another test starts holds, for a
/// moment, all that this process has open.)
pub(crate) fn unmount_unused(runtime: &Runtime, mounted: &mut Mounted) {
    let not_used = |draining: Draining<'_>| {
        assert!(!matches!(draining, Draining::Lazily { .. }), "somebody uses it");
    };
    runtime.block_on(mounted.drain(Duration::from_secs(10), not_used)).unwrap();
}

impl Drop for Place {
    fn drop(&mut self) {
        drop(self.mounted.take());
        // Requests that never end must not keep the test.
        self.runtime.take().unwrap().shutdown_background();
    }
}

pub(crate) fn memory(runtime: &Runtime) -> MemoryFs {
    MemoryFs::new(Arc::new(TokioRuntime::new(runtime.handle().clone())))
}
