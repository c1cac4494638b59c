//! Mounts an empty file system in memory until it is unmounted: `memory_mount MNT`.

use std::sync::Arc;

use atoll_env::TokioRuntime;
use atoll_gateway::fuse::{MountOptions, mount};
use atoll_vfs::memory::MemoryFs;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args_os().nth(1).ok_or("usage: memory_mount MOUNTPOINT")?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let fs = Arc::new(MemoryFs::new(Arc::new(TokioRuntime::new(runtime.handle().clone()))));
    let options = MountOptions { fs_name: "atoll:memory".to_owned(), ..MountOptions::default() };
    let mut mounted = mount(fs, path.as_ref(), &options, runtime.handle())?;
    println!("mounted at {}", mounted.path().display());
    runtime.block_on(mounted.wait())?;
    Ok(())
}
