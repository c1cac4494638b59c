//! The Andrew-style workload over every kind of files it is made for.

use std::sync::Arc;
use std::time::Duration;

use atoll_dht::{Blocks, MemoryBlocks};
use atoll_env::{Env, TokioRuntime};
use atoll_key::SecretKey;
use atoll_lab::andrew::{
    self, COPY, Done, Files, InDirectory, InFileSystem, Names, SOURCE, SourceTree, TreeSize,
};
use atoll_sim::{Sim, SimConfig};
use atoll_vfs::memory::MemoryFs;
use atoll_vfs::{Errno, FileSystem};
use atoll_volume::owned::{
    NoLeaseRecorder, NoProgress, PublishOptions, Volume, VolumeFs, VolumeOptions, publish,
};
use futures_util::FutureExt;

const LONG: Duration = Duration::from_secs(3600);

/// What each phase of a run did.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Run {
    planted: Done,
    made: Done,
    copied: Done,
    looked_at: Done,
    read: Done,
    compiled: Done,
    deleted: Done,
}

/// All phases; at the end the source alone is left, as it was.
async fn run(files: &impl Files, tree: &SourceTree) -> Result<Run, Errno> {
    let planted = andrew::plant(files, tree).await?;
    let source = Names::of(files, SOURCE).await?;
    let made = andrew::make_directories(files, &source).await?;
    let copied = andrew::copy(files, &source).await?;
    let (looked_at, names) = andrew::stat(files, COPY).await?;
    assert_eq!(names, source, "the copy has the names of the source");
    let read = andrew::read(files, COPY, &names).await?;
    for (path, text) in &tree.files {
        assert!(files.read(&format!("{COPY}/{path}")).await? == *text, "{path}");
        assert_eq!(files.stat(&format!("{COPY}/{path}")).await?, text.len() as u64, "{path}");
    }
    let compiled = andrew::compile(files, &names).await?;
    let deleted = andrew::delete(files).await?;
    assert_eq!(files.list("").await?.len(), 1, "the source is left");
    assert_eq!(Names::of(files, SOURCE).await?, source);
    Ok(Run { planted, made, copied, looked_at, read, compiled, deleted })
}

/// Over a file system in memory, in the simulator.
fn run_in_memory(size: TreeSize) -> Run {
    let sim = Sim::new(SimConfig::default());
    let fs = Arc::new(MemoryFs::new(sim.outside()));
    let files = InFileSystem::new(fs.clone());
    let done = sim.block_on(LONG, run(&files, &SourceTree::new(size))).unwrap().unwrap();
    drop(files);
    fs.check_invariants();
    done
}

/// Over a directory of this machine, whose calls wait for nothing.
fn run_in_directory(size: TreeSize) -> Run {
    let directory = tempfile::tempdir().unwrap();
    let files = InDirectory::new(directory.path());
    let tree = SourceTree::new(size);
    run(&files, &tree).now_or_never().expect("its calls are done when they return").unwrap()
}

#[test]
fn the_small_tree_is_worked_on_alike_in_memory_and_in_a_directory() {
    let done = run_in_memory(TreeSize::Small);
    let all = |count, bytes| Done { count, bytes };
    assert_eq!(done.planted, all(26, 190_000));
    assert_eq!(done.made, all(3, 0), "with the copy itself");
    assert_eq!(done.copied, all(26, 380_000));
    assert_eq!(done.looked_at, all(28, 0));
    assert_eq!(done.read, all(26, 190_000));
    // 26 files, as many object files as there are C files, a program; three directories.
    assert_eq!(done.deleted.count, 26 + 18 + 1 + 3);
    assert_eq!(done.compiled.count, 18 + 1);
    assert_eq!(run_in_directory(TreeSize::Small), done);
}

#[test]
fn the_large_tree_is_worked_on_alike_in_memory_and_in_a_directory() {
    let done = run_in_memory(TreeSize::Large);
    assert_eq!((done.planted.count, done.made.count), (4_560, 242));
    assert_eq!(run_in_directory(TreeSize::Large), done);
}

/// The source tree, published.
fn published(tree: &SourceTree, secret: &SecretKey) -> Arc<dyn Blocks> {
    let directory = tempfile::tempdir().unwrap();
    let files = InDirectory::new(directory.path());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let blocks: Arc<dyn Blocks> = Arc::new(MemoryBlocks::new());
    runtime.block_on(async {
        andrew::plant(&files, tree).await.unwrap();
        let env = Arc::new(TokioRuntime::current());
        let (progress, recorder) = (Arc::new(NoProgress), Arc::new(NoLeaseRecorder));
        let (source, options) = (directory.path(), PublishOptions::default());
        publish(env, blocks.clone(), source, secret, options, progress, recorder).await.unwrap();
    });
    blocks
}

#[test]
fn a_published_tree_is_looked_at_and_read_in_the_simulator_and_not_changed() {
    let (tree, secret) = (SourceTree::new(TreeSize::Small), SecretKey::from_seed(&[7; 32]));
    let blocks = published(&tree, &secret);
    let sim = Sim::new(SimConfig::default());
    let env: Env = sim.outside();
    let work = async {
        let options = VolumeOptions::default();
        let volume = Volume::open(env.clone(), blocks, secret.volume_id(), options).await.unwrap();
        let fs: Arc<dyn FileSystem> = Arc::new(VolumeFs::new(env, volume, 0, 0));
        let files = InFileSystem::new(fs);
        let (looked_at, names) = andrew::stat(&files, SOURCE).await.unwrap();
        let read = andrew::read(&files, SOURCE, &names).await.unwrap();
        for (path, text) in &tree.files {
            assert!(files.read(&format!("{SOURCE}/{path}")).await.unwrap() == *text, "{path}");
        }
        let refused = andrew::make_directories(&files, &names).await;
        (looked_at, read, refused)
    };
    let (looked_at, read, refused) = sim.block_on(LONG, work).unwrap();
    assert_eq!(looked_at, Done { count: 28, bytes: 0 });
    assert_eq!(read, Done { count: 26, bytes: 190_000 });
    assert_eq!(refused, Err(Errno::EROFS));
}
