//! How fast the file-system layer alone is: publishes to blocks in memory and copies
//! back, so that neither ring nor network is measured. Usage:
//!
//! ```text
//! cargo run --release -p atoll-volume --example speed [DIRECTORY_ON_A_FAST_DISK]
//! ```

// It measures this machine; a real clock is what it is for.
#![allow(clippy::disallowed_methods)]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use atoll_dht::{Blocks, MemoryBlocks};
use atoll_env::{Env, TokioRuntime};
use atoll_key::SecretKey;
use atoll_volume::owned::{
    GetOptions, NoLeaseRecorder, NoProgress, PublishOptions, Volume, VolumeOptions, get_tree,
    publish,
};
use futures_util::TryStreamExt;

const SMALL_FILES: usize = 20_000;
const SMALL_FILE_BYTES: usize = 4000;
const LARGE_FILE_BYTES: usize = 512 << 20;

/// Bytes that repeat nowhere.
fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(len);
    out
}

fn make_small(top: &Path) -> std::io::Result<()> {
    for dir in 0..SMALL_FILES / 100 {
        let dir_path = top.join(format!("dir-{dir}"));
        std::fs::create_dir_all(&dir_path)?;
        for file in 0..100 {
            let seed = (dir * 100 + file) as u64;
            std::fs::write(dir_path.join(format!("f{file}")), noise(SMALL_FILE_BYTES, seed))?;
        }
    }
    Ok(())
}

fn report(what: &str, files: u64, bytes: u64, began: Instant) {
    let secs = began.elapsed().as_secs_f64();
    println!(
        "{what:32} {secs:7.3} s  {:9.0} files/s  {:8.1} MB/s",
        files as f64 / secs,
        bytes as f64 / secs / 1e6
    );
}

async fn measure(env: &Env, what: &str, source: PathBuf, dest: PathBuf) {
    let blocks: Arc<dyn Blocks> = Arc::new(MemoryBlocks::new());
    let secret = SecretKey::from_seed(&[1; 32]);
    for again in ["", " again"] {
        let began = Instant::now();
        let (progress, recorder) = (Arc::new(NoProgress), Arc::new(NoLeaseRecorder));
        let options = PublishOptions::default();
        let (env, blocks) = (env.clone(), blocks.clone());
        let done = publish(env, blocks, &source, &secret, options, progress, recorder).await;
        let done = done.expect("publishes");
        report(&format!("publish {what}{again}"), done.files, done.bytes, began);
    }
    let id = secret.volume_id();
    let volume = Volume::open(env.clone(), blocks, id, VolumeOptions::default()).await;
    let snapshot = volume.expect("opens").snapshot().await;
    for again in ["", " again"] {
        let began = Instant::now();
        let (progress, root) = (Arc::new(NoProgress), snapshot.root());
        let options = GetOptions::default();
        get_tree(snapshot.clone(), &root, &dest, options, progress).await.expect("copies");
        let info = snapshot.info();
        report(&format!("get {what}{again}"), info.files, info.bytes, began);
    }
    if let Ok(item) = snapshot.resolve(b"large").await {
        let began = Instant::now();
        let read = snapshot
            .read_stream(&item)
            .try_fold(0, |sum, part| async move { Ok(sum + part.len() as u64) });
        report(&format!("stream {what}"), 1, read.await.expect("reads"), began);
    }
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let env: Env = Arc::new(TokioRuntime::current());
    let base = std::env::args_os().nth(1).map_or_else(std::env::temp_dir, PathBuf::from);
    let dir = tempfile::tempdir_in(base).expect("a directory to work in");
    let small = dir.path().join("small");
    make_small(&small).expect("makes files");
    measure(&env, "small files", small, dir.path().join("small-copy")).await;
    let large = dir.path().join("large");
    std::fs::create_dir(&large).expect("makes a directory");
    std::fs::write(large.join("large"), noise(LARGE_FILE_BYTES, 1)).expect("writes");
    measure(&env, "one large file", large, dir.path().join("large-copy")).await;
}
