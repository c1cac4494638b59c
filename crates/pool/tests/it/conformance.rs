//! The conformance kit, over a pool of one on a directory of this machine.

use std::path::Path;
use std::sync::{Arc, Mutex};

use atoll_env::{BoxFuture, Env, TokioRuntime};
use atoll_pool::disk::directory::Directory;
use atoll_pool::{PoolFs, PoolSettings, create};
use atoll_vfs::FileSystem;
use atoll_vfs::kit::{
    Features, Restart, RestartSubject, Subject, Tree, run_read_suite, run_restart_suite,
    run_write_suite, write_tree_to_fs,
};
use tempfile::TempDir;

fn env() -> Env {
    Arc::new(TokioRuntime::current())
}

/// Owners can be set: without root there is no pool.
pub(crate) fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        eprintln!("SKIPPED: a pool needs root, which sets owners");
    }
    is_root
}

pub(crate) async fn opened(path: &Path) -> PoolFs<Directory> {
    PoolFs::open(env(), Directory::open(path).unwrap()).await.unwrap().0
}

/// New pools of one, with this distribution level.
struct Pools {
    level: u8,
    made: Mutex<Vec<(TempDir, PoolFs<Directory>)>>,
}

impl Pools {
    fn of_level(level: u8) -> Pools {
        Pools { level, made: Mutex::default() }
    }
}

/// One pool, opened again and again.
struct PoolLife {
    dir: TempDir,
    fs: Option<PoolFs<Directory>>,
}

impl Restart for PoolLife {
    fn fs(&self) -> Arc<dyn FileSystem> {
        Arc::new(self.fs.clone().expect("is open"))
    }

    fn restart(&mut self) -> BoxFuture<'_, Result<(), String>> {
        Box::pin(async move {
            drop(self.fs.take());
            self.fs = Some(opened(self.dir.path()).await);
            Ok(())
        })
    }
}

impl RestartSubject for Pools {
    fn start(&self, tree: Arc<Tree>) -> BoxFuture<'_, Result<Box<dyn Restart>, String>> {
        Box::pin(async move {
            self.make(tree).await?;
            let (dir, fs) = self.made.lock().unwrap().pop().expect("it was made");
            Ok(Box::new(PoolLife { dir, fs: Some(fs) }) as Box<dyn Restart>)
        })
    }
}

impl Subject for Pools {
    fn name(&self) -> String {
        format!("a pool of one, level {}", self.level)
    }

    fn features(&self) -> Features {
        Features::FULL
    }

    fn env(&self) -> Env {
        env()
    }

    fn make(&self, tree: Arc<Tree>) -> BoxFuture<'_, Result<Arc<dyn FileSystem>, String>> {
        Box::pin(async move {
            let dir = tempfile::tempdir().map_err(|error| error.to_string())?;
            let disk = Directory::open(dir.path()).map_err(|error| error.to_string())?;
            let settings = PoolSettings::new([7; 16], self.level);
            create(&disk, settings).await.map_err(|error| error.to_string())?;
            let (fs, _) = PoolFs::open(env(), disk).await.map_err(|error| error.to_string())?;
            write_tree_to_fs(&tree, &fs).await.map_err(|error| error.to_string())?;
            // The one of the check before is not used any more; each takes some room.
            *self.made.lock().unwrap() = vec![(dir, fs.clone())];
            Ok(Arc::new(fs) as Arc<dyn FileSystem>)
        })
    }
}

/// One test each, so that they run beside each other: no distribution, the usual level, and one at which most directories of
/// the kit's trees are distributed.
macro_rules! suites {
    ($($name:ident: $suite:ident at level $level:literal;)*) => {
        $(#[tokio::test(flavor = "multi_thread")]
        async fn $name() {
            if is_root() {
                $suite(&Pools::of_level($level)).await.assert_passes();
            }
        })*
    };
}

suites! {
    a_pool_that_distributes_nothing_reads_as_the_kit_says: run_read_suite at level 0;
    a_pool_reads_as_the_kit_says: run_read_suite at level 1;
    a_pool_that_distributes_all_reads_as_the_kit_says: run_read_suite at level 4;
    a_pool_that_distributes_nothing_changes_as_the_kit_says: run_write_suite at level 0;
    a_pool_changes_as_the_kit_says: run_write_suite at level 1;
    a_pool_that_distributes_all_changes_as_the_kit_says: run_write_suite at level 4;
    handles_of_a_pool_that_distributes_nothing_last_as_the_kit_says: run_restart_suite at level 0;
    handles_of_a_pool_last_as_the_kit_says: run_restart_suite at level 1;
    handles_of_a_pool_that_distributes_all_last_as_the_kit_says: run_restart_suite at level 4;
}
