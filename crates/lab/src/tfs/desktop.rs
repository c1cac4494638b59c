//! A computer with one modelled disk and Atoll's file system on it, and the files people have.
//!
//! Sizes of a disk's old files are those of N. Agrawal and others, "Generating realistic
//! impressions for file-system benchmarking" (FAST 2009): log-normal with μ = 9.48 and
//! σ = 2.4566 (bytes), ten files a directory; its rare huge files are left out, so that small
//! images are not one file. A source tree is log-normal with a mean of 12.7 KB, as the TFS
//! paper's Linux 2.6.14 ("249MB of data in 19577 files", §5.2.1), sixteen files a directory.
//!
//! All content is zeros: only where blocks lie is looked at.

use std::sync::Arc;
use std::time::Duration;

use atoll_env::Env;
use atoll_sim::{Sim, SimConfig};
use atoll_tfs::Progress;
use atoll_tfs::fs::{MountOptions, Tfs};
use atoll_tfs::mkfs::{MkfsOptions, mkfs};
use atoll_vfs::{
    Answer, Caller, Errno, FileSystem, Groups, InodeNumber, OpenFlags, RenameFlags, Writer,
    XattrFlags,
};
use bytes::Bytes;

use super::disk::ModelDisk;
use crate::LabError;
use crate::churn::LogNormal;

pub(crate) const BLOCK_BYTES: u32 = 4096;
const ME: Caller = Caller { uid: 0, gid: 0, pid: 0, umask: 0, groups: Groups::None };
/// One write of a program.
const WRITE_BYTES: u64 = 128 * 1024;
/// A call into the file system waits for nothing that takes simulated time.
const PATIENCE: Duration = Duration::from_secs(60);

/// Natural logarithms of bytes.
pub(crate) const OLD_FILES: LogNormal = LogNormal { mu: 9.48, sigma: 2.4566 };
const MAX_OLD_FILE_BYTES: u64 = 32 << 20;
const FILES_PER_DIRECTORY: usize = 10;
/// Mean exp(8.52 + 1.37²/2) = 12.8 KB.
const SOURCES: LogNormal = LogNormal { mu: 8.52, sigma: 1.37 };
const SOURCES_PER_DIRECTORY: usize = 16;
/// The paper's tree has 19,577 files.
const MAX_SOURCE_BYTES: u64 = 1 << 20;

/// A file and where it is.
#[derive(Clone, Debug)]
pub(crate) struct File {
    pub parent: InodeNumber,
    pub name: String,
    pub len_bytes: u64,
}

/// A tree of files: directories, each after the one it is in, and files.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tree {
    pub directories: Vec<InodeNumber>,
    /// In order of directories.
    pub files: Vec<File>,
}

/// A directory of a tree to be made: in which one before it, and how large its files are.
#[derive(Clone, Debug)]
pub(crate) struct Planned {
    /// `None`: in the tree's root.
    pub within: Option<usize>,
    pub files: Vec<u64>,
}

/// See the module.
pub(crate) struct Desktop {
    sim: Sim,
    pub disk: ModelDisk,
    pub tfs: Tfs,
}

fn failed(what: &str, errno: Errno) -> LabError {
    LabError::Failed(format!("{what}: {errno}"))
}

/// An empty file system of so many bytes.
pub(crate) fn made(len_bytes: u64) -> Result<ModelDisk, LabError> {
    let disk = ModelDisk::new(len_bytes);
    let options = MkfsOptions {
        block_bytes: BLOCK_BYTES,
        bytes_per_inode: 16384,
        reserved_percent: 5,
        label: String::new(),
        uuid: [7; 16],
        random: [9; 48],
        now_unix_secs: 0,
        root_owner: (0, 0),
        is_blank: true,
        progress: Progress::default(),
    };
    let device: Arc<dyn atoll_tfs::device::Device> = Arc::new(disk.clone());
    mkfs(&device, &options).map_err(|error| LabError::Failed(error.to_string()))?;
    Ok(disk)
}

/// A mount that does nothing by itself: a run's calls are all there is.
pub(crate) fn quiet() -> MountOptions {
    MountOptions { background: false, ..MountOptions::default() }
}

impl Desktop {
    /// Mounts the disk's file system.
    pub(super) fn mount(
        disk: &ModelDisk,
        seed: u64,
        options: &MountOptions,
    ) -> Result<Desktop, LabError> {
        let sim = Sim::new(SimConfig { seed, ..SimConfig::default() });
        let device: Arc<dyn atoll_tfs::device::Device> = Arc::new(disk.clone());
        let (tfs, _) = Tfs::mount(sim.outside(), device, options)
            .map_err(|error| LabError::Failed(error.to_string()))?;
        Ok(Desktop { sim, disk: disk.clone(), tfs })
    }

    /// Random numbers and the time.
    pub(super) fn env(&self) -> Env {
        self.sim.outside()
    }

    /// Lets time pass.
    pub(super) fn wait(&self, delay: Duration) {
        self.sim.run_for(delay);
    }

    /// One call.
    pub(super) fn call<T>(&self, answer: Answer<T>) -> Result<T, Errno> {
        match self.sim.block_on(PATIENCE, answer) {
            Ok(result) => result,
            Err(_) => Err(Errno::ETIMEDOUT),
        }
    }

    /// Unmounts.
    pub(super) fn unmount(self) -> Result<(), LabError> {
        self.tfs.unmount().map_err(|errno| failed("unmounting", errno))
    }

    /// Makes a directory.
    pub(super) fn directory(
        &self,
        parent: InodeNumber,
        name: &str,
    ) -> Result<InodeNumber, LabError> {
        self.call(self.tfs.mkdir(ME, parent, name.as_bytes(), 0o755))
            .map(|entry| entry.attr.inode)
            .map_err(|errno| failed(name, errno))
    }

    /// Makes new files of a directory transparent.
    pub(super) fn contribute(&self, directory: InodeNumber) -> Result<(), LabError> {
        let on = Bytes::from_static(b"1");
        let name = b"user.tfs.transparent";
        self.call(self.tfs.setxattr(ME, directory, name, on, XattrFlags::default()))
            .map_err(|errno| failed("user.tfs.transparent", errno))
    }

    /// Makes a file of zeros; an error leaves a part of it.
    pub(super) fn create(&self, file: &File) -> Result<(), Errno> {
        let File { parent, name, len_bytes } = file;
        let flags = OpenFlags(OpenFlags::WRITE.0 | OpenFlags::TRUNCATE);
        let (entry, opened) =
            self.call(self.tfs.create(ME, *parent, name.as_bytes(), 0o644, flags))?;
        let inode = entry.attr.inode;
        let written = self.write(inode, opened.handle, 0, *len_bytes);
        self.call(self.tfs.close(inode, opened.handle))?;
        self.tfs.forget(inode, 1);
        written
    }

    fn write(
        &self,
        inode: InodeNumber,
        handle: atoll_vfs::Handle,
        from: u64,
        len_bytes: u64,
    ) -> Result<(), Errno> {
        static ZEROS: [u8; WRITE_BYTES as usize] = [0; WRITE_BYTES as usize];
        let mut at = 0;
        while at < len_bytes {
            let len = WRITE_BYTES.min(len_bytes - at);
            let data = Bytes::from_static(&ZEROS[..len as usize]);
            at += u64::from(self.call(self.tfs.write(
                Writer::At(ME),
                inode,
                handle,
                from + at,
                data,
            ))?);
        }
        Ok(())
    }

    /// Appends zeros to a file.
    pub(super) fn append(&self, file: &mut File, len_bytes: u64) -> Result<(), Errno> {
        let entry = self.call(self.tfs.lookup(ME, file.parent, file.name.as_bytes()))?;
        let inode = entry.attr.inode;
        let opened = self.call(self.tfs.open(ME, inode, OpenFlags::WRITE))?;
        let written = self.write(inode, opened.handle, file.len_bytes, len_bytes);
        self.call(self.tfs.close(inode, opened.handle))?;
        self.tfs.forget(inode, 1);
        file.len_bytes += len_bytes;
        written
    }

    /// Reads a file to its end; how many bytes it has.
    pub(super) fn read(&self, file: &File) -> Result<u64, Errno> {
        let entry = self.call(self.tfs.lookup(ME, file.parent, file.name.as_bytes()))?;
        let inode = entry.attr.inode;
        let opened = self.call(self.tfs.open(ME, inode, OpenFlags::READ))?;
        let mut at = 0;
        loop {
            let len = WRITE_BYTES as u32;
            let bytes = self.call(self.tfs.read(inode, opened.handle, at, len))?;
            at += bytes.len() as u64;
            if bytes.is_empty() || at >= file.len_bytes {
                break;
            }
        }
        self.call(self.tfs.close(inode, opened.handle))?;
        self.tfs.forget(inode, 1);
        Ok(at)
    }

    /// Looks a file's attributes up.
    pub(super) fn stat(&self, file: &File) -> Result<(), Errno> {
        let entry = self.call(self.tfs.lookup(ME, file.parent, file.name.as_bytes()))?;
        self.tfs.forget(entry.attr.inode, 1);
        Ok(())
    }

    /// The number of a file's inode.
    pub(super) fn inode(&self, file: &File) -> Result<InodeNumber, LabError> {
        let entry = self
            .call(self.tfs.lookup(ME, file.parent, file.name.as_bytes()))
            .map_err(|errno| failed(&file.name, errno))?;
        self.tfs.forget(entry.attr.inode, 1);
        Ok(entry.attr.inode)
    }

    /// Deletes a file.
    pub(super) fn delete(&self, file: &File) -> Result<(), Errno> {
        self.call(self.tfs.unlink(ME, file.parent, file.name.as_bytes()))
    }

    /// Replaces a file by another, as programs save.
    pub(super) fn rename(&self, from: &File, to: &str) -> Result<(), Errno> {
        let flags = RenameFlags::default();
        let parent = from.parent;
        let (from, to) = (from.name.as_bytes(), to.as_bytes());
        self.call(self.tfs.rename(ME, parent, from, parent, to, flags))
    }

    /// Makes everything durable.
    pub(super) fn sync(&self) -> Result<(), LabError> {
        self.call(self.tfs.sync()).map_err(|errno| failed("sync", errno))
    }

    /// Blocks that files could have now, and on an empty disk.
    pub(super) fn room(&self) -> Result<(u64, u64), LabError> {
        let stat = self
            .call(self.tfs.statfs(InodeNumber::ROOT))
            .map_err(|errno| failed("statfs", errno))?;
        Ok((stat.blocks_free, stat.blocks))
    }

    /// Makes the directories of a tree in `root`, with none of their files.
    pub(super) fn directories(
        &self,
        root: InodeNumber,
        plan: &[Planned],
    ) -> Result<Vec<InodeNumber>, LabError> {
        let mut made: Vec<InodeNumber> = Vec::with_capacity(plan.len());
        for (n, planned) in plan.iter().enumerate() {
            let parent = planned.within.map_or(root, |within| made[within]);
            made.push(self.directory(parent, &format!("d{n}"))?);
        }
        Ok(made)
    }

    /// Makes a whole tree in `root`.
    pub(super) fn tree(&self, root: InodeNumber, plan: &[Planned]) -> Result<Tree, LabError> {
        let directories = self.directories(root, plan)?;
        let mut files = Vec::new();
        for (parent, planned) in directories.iter().zip(plan) {
            for (n, len_bytes) in planned.files.iter().enumerate() {
                let file = File { parent: *parent, name: format!("f{n}"), len_bytes: *len_bytes };
                self.create(&file).map_err(|errno| failed(&file.name, errno))?;
                files.push(file);
            }
        }
        Ok(Tree { directories, files })
    }
}

/// A size from a distribution, from 1 to `most` bytes.
pub(crate) fn size(of: LogNormal, most: u64, random: &Env) -> u64 {
    (of.draw(random) as u64).clamp(1, most)
}

/// Blocks that a file of so many bytes takes, its pointers included.
pub(crate) fn blocks_of(len_bytes: u64) -> u64 {
    let data = len_bytes.div_ceil(u64::from(BLOCK_BYTES));
    let pointers = u64::from(BLOCK_BYTES / 4);
    data + data.saturating_sub(12).div_ceil(pointers)
}

/// Directories of old files that take about so many blocks.
pub(crate) fn old_files(blocks: u64, random: &Env) -> Vec<Planned> {
    let draw = || size(OLD_FILES, MAX_OLD_FILE_BYTES.min(blocks * 256), random);
    planned(FILES_PER_DIRECTORY, random, draw, |taken, _| taken < blocks)
}

/// The directories of a source tree of so many files.
pub(crate) fn sources(files: usize, random: &Env) -> Vec<Planned> {
    let draw = || size(SOURCES, MAX_SOURCE_BYTES, random);
    planned(SOURCES_PER_DIRECTORY, random, draw, |_, made| made < files)
}

/// Directories with `each` files, in one another at random, until `goes_on`, told the blocks
/// taken and the files, says no.
fn planned(
    each: usize,
    random: &Env,
    draw: impl Fn() -> u64,
    goes_on: impl Fn(u64, usize) -> bool,
) -> Vec<Planned> {
    let mut plan: Vec<Planned> = Vec::new();
    let (mut taken, mut made) = (0, 0);
    while goes_on(taken, made) {
        if made % each == 0 {
            let within = atoll_env::random_below(&**random, plan.len() as u64 + 1) as usize;
            plan.push(Planned { within: within.checked_sub(1), files: Vec::new() });
            taken += 1;
        }
        let len_bytes = draw();
        taken += blocks_of(len_bytes);
        made += 1;
        plan.last_mut().expect("the first file made one").files.push(len_bytes);
    }
    plan
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_is_as_large_as_it_was_to_be() {
        let disk = made(256 << 20).expect("large enough");
        let desktop = Desktop::mount(&disk, 1, &quiet()).expect("mounted");
        let random = desktop.env();
        let (before, blocks) = desktop.room().expect("counted");
        let plan = old_files(blocks / 4, &random);
        let tree = desktop.tree(InodeNumber::ROOT, &plan).expect("room enough");
        let (after, _) = desktop.room().expect("counted");
        let taken = (before - after) as f64 / blocks as f64;
        assert!((0.24..0.33).contains(&taken), "{taken}");
        let file = tree.files.iter().max_by_key(|file| file.len_bytes).expect("files");
        assert_eq!(desktop.read(file), Ok(file.len_bytes));
        desktop.unmount().expect("unmounted");
    }

    #[test]
    fn a_source_tree_is_like_the_papers() {
        let sim = Sim::new(SimConfig { seed: 3, ..SimConfig::default() });
        let plan = sources(19_577, &sim.outside());
        let files: Vec<u64> = plan.iter().flat_map(|planned| planned.files.clone()).collect();
        assert_eq!(files.len(), 19_577);
        let all = files.iter().sum::<u64>() as f64 / 1e6;
        assert!((220.0..280.0).contains(&all), "{all} MB");
    }
}
