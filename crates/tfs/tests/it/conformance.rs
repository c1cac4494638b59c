//! The conformance kit, and e2fsck's judgement of what it leaves.

use std::path::Path;
use std::sync::{Arc, Mutex};

use atoll_env::{BoxFuture, Env, TokioRuntime};
use atoll_tfs::fs::{MountOptions, Tfs};
use atoll_tfs::mkfs::mkfs;
use atoll_vfs::kit::{
    Features, Restart, RestartSubject, Subject, Tree, run_read_suite, run_restart_suite,
    run_write_suite, write_tree_to_fs,
};
use atoll_vfs::{Caller, FileSystem, InodeNumber};
use tempfile::NamedTempFile;

use crate::e2fsck::{assert_image_clean, open_image};
use crate::mkfs::options;

/// New file systems on images, which are checked in the end.
struct Images {
    block_bytes: u32,
    made: Mutex<Vec<(NamedTempFile, Tfs)>>,
}

impl Images {
    fn of_blocks(block_bytes: u32) -> Images {
        Images { block_bytes, made: Mutex::new(Vec::new()) }
    }

    fn check(&self) {
        for (image, tfs) in self.made.lock().unwrap().drain(..) {
            assert_eq!(tfs.failure(), None);
            tfs.unmount().unwrap();
            drop(tfs);
            assert_image_clean(image.path(), "after the kit");
        }
    }
}

fn mounted(image: &Path, block_bytes: u32) -> Tfs {
    let device = open_image(image, false);
    mkfs(&(device as _), &options(block_bytes)).unwrap();
    mounted_again(image)
}

fn mounted_again(image: &Path) -> Tfs {
    let device = open_image(image, false);
    let env = Arc::new(TokioRuntime::current());
    // Upkeep would hold the device for a moment after the end.
    let options = MountOptions { background: false, ..MountOptions::default() };
    Tfs::mount(env, device, &options).unwrap().0
}

/// One image, mounted again and again.
struct ImageLife {
    image: NamedTempFile,
    tfs: Option<Tfs>,
}

impl Restart for ImageLife {
    fn fs(&self) -> Arc<dyn FileSystem> {
        Arc::new(self.tfs.clone().expect("is mounted"))
    }

    fn restart(&mut self) -> BoxFuture<'_, Result<(), String>> {
        Box::pin(async move {
            let tfs = self.tfs.take().expect("is mounted");
            tfs.unmount().map_err(|error| error.to_string())?;
            drop(tfs);
            self.tfs = Some(mounted_again(self.image.path()));
            Ok(())
        })
    }
}

impl RestartSubject for Images {
    fn start(&self, tree: Arc<Tree>) -> BoxFuture<'_, Result<Box<dyn Restart>, String>> {
        Box::pin(async move {
            self.make(tree).await?;
            let (image, tfs) = self.made.lock().unwrap().pop().expect("it was made");
            Ok(Box::new(ImageLife { image, tfs: Some(tfs) }) as Box<dyn Restart>)
        })
    }
}

impl Subject for Images {
    fn name(&self) -> String {
        format!("TFS in blocks of {}", self.block_bytes)
    }

    fn features(&self) -> Features {
        // A block of 1 KiB does not hold the attributes that the kit sets.
        Features { xattrs: self.block_bytes == 4096, ..Features::FULL }
    }

    fn env(&self) -> Env {
        Arc::new(TokioRuntime::current())
    }

    fn make(&self, tree: Arc<Tree>) -> BoxFuture<'_, Result<Arc<dyn FileSystem>, String>> {
        Box::pin(async move {
            let image = NamedTempFile::new().unwrap();
            image.as_file().set_len(256 << 20).unwrap();
            let tfs = mounted(image.path(), self.block_bytes);
            let me = Caller::default();
            tfs.rmdir(me, InodeNumber::ROOT, b"lost+found").await.unwrap();
            write_tree_to_fs(&tree, &tfs).await.map_err(|error| format!("{error:?}"))?;
            self.made.lock().unwrap().push((image, tfs.clone()));
            Ok(Arc::new(tfs) as Arc<dyn FileSystem>)
        })
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tfs_passes_the_read_suite() {
    let images = Images::of_blocks(4096);
    let report = run_read_suite(&images).await;
    report.assert_passes();
    images.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tfs_passes_the_write_suite() {
    for block_bytes in [1024, 4096] {
        let images = Images::of_blocks(block_bytes);
        let report = run_write_suite(&images).await;
        report.assert_passes();
        images.check();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tfs_passes_the_restart_suite() {
    let report = run_restart_suite(&Images::of_blocks(4096)).await;
    report.assert_passes();
    assert_eq!(report.passed(), report.checks.len(), "nothing is skipped\n{report}");
}
