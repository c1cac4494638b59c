//! Mounts an empty file system in memory until it is unmounted: `memory_mount MNT`, and
//! `memory_mount --unmount MNT`. For trying out and measuring the FUSE layer alone.

use std::sync::Arc;

use atoll_env::TokioRuntime;
use atoll_gateway::fuse::{MountOptions, mount, unmount};
use atoll_vfs::memory::MemoryFs;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args_os().skip(1);
    let path = arguments.next().ok_or("usage: memory_mount [--unmount] MOUNTPOINT")?;
    if path == "--unmount" {
        let path = arguments.next().ok_or("which mount point?")?;
        return Ok(unmount(path.as_ref(), false)?);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let fs = Arc::new(MemoryFs::new(Arc::new(TokioRuntime::new(runtime.handle().clone()))));
    let options = MountOptions { fs_name: "atoll:memory".to_owned(), ..MountOptions::default() };
    let mut mounted = mount(fs, path.as_ref(), &options, runtime.handle())?;
    println!("mounted at {}", mounted.path().display());
    runtime.block_on(mounted.wait())?;
    Ok(())
}
