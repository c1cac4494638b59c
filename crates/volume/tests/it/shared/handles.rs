//! File handles of shared volumes and of what they were: a handle is a key, or a time and a key.

use std::sync::Arc;

use atoll_dht::{Blocks, MemoryBlocks};
use atoll_env::{BoxFuture, Env};
use atoll_vfs::kit::{self, Features, Restart, RestartSubject, Subject, Tree, write_tree_to_fs};
use atoll_vfs::{Caller, Errno, FileSystem, InodeNumber, PersistentHandle};
use atoll_volume::shared::{PastFs, SharedFs};

use super::mounts::{created_with, env, mounted};
use super::past::{HOUR, START, Scene, mkdir, put, read, walk};

const ROOT: InodeNumber = InodeNumber::ROOT;

fn me() -> Caller {
    Caller::default()
}

struct Shared {
    is_encrypted: bool,
}

struct SharedLife {
    blocks: Arc<dyn Blocks>,
    fs: Option<SharedFs>,
}

impl Restart for SharedLife {
    fn fs(&self) -> Arc<dyn FileSystem> {
        Arc::new(self.fs.clone().expect("is mounted"))
    }

    fn restart(&mut self) -> BoxFuture<'_, Result<(), String>> {
        Box::pin(async move {
            let fs = self.fs.take().expect("is mounted");
            fs.end().await.map_err(|error| error.to_string())?;
            self.fs = Some(mounted(&env(), &self.blocks, 1).await);
            Ok(())
        })
    }
}

impl Subject for Shared {
    fn name(&self) -> String {
        "a shared volume".into()
    }

    fn features(&self) -> Features {
        Features::FULL
    }

    fn env(&self) -> Env {
        env()
    }

    fn make(&self, tree: Arc<Tree>) -> BoxFuture<'_, Result<Arc<dyn FileSystem>, String>> {
        Box::pin(async move { Ok(self.start(tree).await?.fs()) })
    }
}

impl RestartSubject for Shared {
    fn start(&self, tree: Arc<Tree>) -> BoxFuture<'_, Result<Box<dyn Restart>, String>> {
        Box::pin(async move {
            let blocks: Arc<dyn Blocks> = Arc::new(MemoryBlocks::new());
            created_with(&env(), &blocks, self.is_encrypted).await;
            let fs = mounted(&env(), &blocks, 1).await;
            write_tree_to_fs(&tree, &fs).await.map_err(|error| format!("{error:?}"))?;
            Ok(Box::new(SharedLife { blocks, fs: Some(fs) }) as Box<dyn Restart>)
        })
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handles_last_over_restarts() {
    for is_encrypted in [false, true] {
        let report = kit::run_restart_suite(&Shared { is_encrypted }).await;
        report.assert_passes();
        let checks = report.checks.len();
        assert!(report.passed() == checks, "nothing is skipped\n{report}");
    }
}

/// A state of a shared volume, as a file system of its own.
struct State;

struct StateLife {
    scene: Scene,
    fs: SharedFs,
    then: PastFs,
}

impl Restart for StateLife {
    fn fs(&self) -> Arc<dyn FileSystem> {
        Arc::new(self.then.clone())
    }

    fn restart(&mut self) -> BoxFuture<'_, Result<(), String>> {
        Box::pin(async move {
            self.fs.end().await.map_err(|error| error.to_string())?;
            self.fs = self.scene.mount(1).await;
            self.then = self.fs.at(START + HOUR).await?.expect("is kept");
            Ok(())
        })
    }
}

impl Subject for State {
    fn name(&self) -> String {
        "a state of a shared volume".into()
    }

    fn features(&self) -> Features {
        Features { read_only: true, ..Features::FULL }
    }

    fn env(&self) -> Env {
        env()
    }

    fn make(&self, tree: Arc<Tree>) -> BoxFuture<'_, Result<Arc<dyn FileSystem>, String>> {
        Box::pin(async move { Ok(self.start(tree).await?.fs()) })
    }
}

impl RestartSubject for State {
    fn start(&self, tree: Arc<Tree>) -> BoxFuture<'_, Result<Box<dyn Restart>, String>> {
        Box::pin(async move {
            let scene = Scene::new("24h", false).await;
            let fs = scene.mount(1).await;
            write_tree_to_fs(&tree, &fs).await.map_err(|error| format!("{error:?}"))?;
            fs.sync().await.map_err(|errno| errno.to_string())?;
            scene.at(61).await;
            // What the state shows is not there any more.
            fs.unlink(me(), ROOT, b"file").await.map_err(|errno| errno.to_string())?;
            fs.sync().await.map_err(|errno| errno.to_string())?;
            let then = fs.at(START + HOUR).await?.expect("is kept");
            Ok(Box::new(StateLife { scene, fs, then }) as Box<dyn Restart>)
        })
    }
}

#[tokio::test(start_paused = true)]
async fn handles_of_a_state_last_over_restarts() {
    let report = kit::run_restart_suite(&State).await;
    report.assert_passes();
    assert!(report.passed() >= 2, "{report}");
}

/// The number and the handle of a path.
async fn kept(fs: &dyn FileSystem, path: &str) -> (InodeNumber, PersistentHandle) {
    let number = walk(fs, path).await.expect("is there");
    (number, fs.handle_of(number).await.expect("has a handle"))
}

async fn find(fs: &dyn FileSystem, handle: &PersistentHandle) -> Result<InodeNumber, Errno> {
    Ok(fs.by_handle(me(), handle).await?.attr.inode)
}

/// Another mount finds all directories above a file of the past by its handle, and the file as it was.
#[tokio::test(start_paused = true)]
async fn a_handle_leads_another_mount_to_a_file_of_the_past() {
    let scene = Scene::new("24h", false).await;
    let fs = scene.mount(1).await;
    let directory = mkdir(&fs, "d").await;
    put(&fs, directory, "f", "then").await;
    scene.at(61).await;
    put(&fs, directory, "f", "now").await;
    scene.at(121).await;
    put(&fs, directory, "f", "newest").await;
    let state = |hour: u64| {
        let time = std::time::UNIX_EPOCH + std::time::Duration::from_millis(START + hour * HOUR);
        let name = humantime::format_rfc3339_seconds(time).to_string().replace(":00Z", "Z");
        format!(".atoll/history/{name}")
    };
    let (first, second) = (state(1), state(2));
    let paths = [
        format!("{first}/d/f"),
        format!("{first}/d"),
        first,
        ".atoll/history".into(),
        ".atoll".into(),
    ];
    let mut all = Vec::new();
    for path in &paths {
        all.push(kept(&fs, path).await);
    }
    let later = kept(&fs, &format!("{second}/d/f")).await;
    let present = kept(&fs, "d/f").await;
    assert!(later.0 != all[0].0 && later.1 != all[0].1 && present.1 != all[0].1);

    let two = scene.mount(2).await;
    for (path, (number, handle)) in paths.iter().zip(&all) {
        assert_eq!(find(&two, handle).await, Ok(*number), "{path}");
        assert_eq!(two.handle_of(*number).await.as_ref(), Ok(handle), "{path}");
    }
    assert_eq!(find(&two, &later.1).await, Ok(later.0));
    // From the file's directory up to the root of the mount.
    for (above, (below, _)) in all[2..].iter().zip(&all[1..]) {
        assert_eq!(two.parent(me(), *below).await.expect("is there").attr.inode, above.0);
    }
    assert_eq!(two.parent(me(), all[4].0).await.expect("is there").attr.inode, ROOT);
    assert_eq!(read(&two, &paths[0]).await.as_deref(), Ok("then"));
    let size = two.getattr(later.0, None).await.expect("is held").attr.size_bytes;
    assert_eq!(size, "now".len() as u64);
    two.forget(all[0].0, 1000);
    assert_eq!(find(&two, &all[0].1).await, Ok(all[0].0), "a number is the same again");

    // A state alone has its own files, and no others.
    let then = two.at(START + HOUR).await.expect("reads").expect("is kept");
    let (number, handle) = kept(&then, "d/f").await;
    assert_eq!(handle, all[0].1);
    assert_eq!(find(&then, &handle).await, Ok(number));
    assert_eq!(find(&then, &all[2].1).await, Ok(ROOT));
    for (_, other) in [&later, &present, &all[3], &all[4]] {
        assert_eq!(find(&then, other).await, Err(Errno::ESTALE));
    }

    // A time that the volume does not keep any more.
    scene.at(26 * 60).await;
    for (_, handle) in &all[..3] {
        assert_eq!(find(&scene.mount(3).await, handle).await, Err(Errno::ESTALE));
    }
}

/// Handles are the same in all mounts, and a removal is seen by all.
#[tokio::test(start_paused = true)]
async fn what_another_mount_has_removed_is_stale() {
    let blocks: Arc<dyn Blocks> = Arc::new(MemoryBlocks::new());
    created_with(&env(), &blocks, false).await;
    let (one, two) = (mounted(&env(), &blocks, 1).await, mounted(&env(), &blocks, 2).await);
    let directory = mkdir(&one, "d").await;
    put(&one, directory, "f", "text").await;
    put(&one, directory, "g", "text").await;
    let (file, of_file) = kept(&one, "d/f").await;
    let (_, of_other) = kept(&one, "d/g").await;
    assert_eq!(find(&two, &of_file).await, Ok(file));
    two.forget(file, 1);
    two.rename(
        me(),
        walk(&two, "d").await.expect("is there"),
        b"g",
        ROOT,
        b"h",
        Default::default(),
    )
    .await
    .expect("renames");
    one.unlink(me(), directory, b"f").await.expect("removes");
    one.sync().await.expect("is on the ring");
    assert_eq!(find(&two, &of_file).await, Err(Errno::ESTALE));
    let three = mounted(&env(), &blocks, 3).await;
    assert_eq!(find(&three, &of_file).await, Err(Errno::ESTALE));
    assert_eq!(find(&three, &of_other).await, Ok(walk(&three, "h").await.expect("is there")));
}
