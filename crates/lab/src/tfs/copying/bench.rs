//! The benchmark on one prepared disk: contributed files, and the six phases beside them.

use std::collections::BTreeMap;

use atoll_tfs::device::Device as _;
use atoll_tfs::fs::Extent;
use atoll_vfs::{Errno, InodeNumber};

use crate::LabError;
use crate::tfs::desktop::{
    BLOCK_BYTES, Desktop, File, Planned, Tree, blocks_of, made, old_files, quiet, sources,
};
use crate::tfs::disk::ModelDisk;

/// A contributed file, as a node keeps a block: up to 256 KiB.
const CONTRIBUTED_BYTES: u64 = 256 << 10;
const CONTRIBUTED_PER_DIRECTORY: usize = 256;
/// "always staying within 5% of the target disk utilization".
const AGED_SHARE: f64 = 0.05;
pub(super) const SMALL: u32 = 5;
pub(super) const LARGE: u32 = 35;
/// "0% and 40% were chosen as examples of good and bad Ext2 performance from Figure 1."
pub(super) const BAD: u32 = 40;
/// Cells of Figure 10's maps.
pub(super) const CELLS: usize = 256;

/// A file system and what is contributed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum System {
    /// Ordinary files on so many hundredths of the disk.
    Ext2(u32),
    /// Transparent files on so many hundredths of it; `None`: on all that is free.
    Tfs(Option<u32>),
}

impl System {
    pub(super) fn name(self) -> String {
        match self {
            System::Ext2(0) => "no contribution".into(),
            System::Ext2(share) => format!("ext2, {share} %"),
            System::Tfs(Some(share)) => format!("TFS, {share} %"),
            System::Tfs(None) => "TFS, all free space".into(),
        }
    }
}

/// The phases of the benchmark, in order.
pub(super) const PHASES: [&str; 6] = ["mkdir", "copy", "stat", "read", "compile", "delete"];
/// What is done in one of them.
type Deed = fn(&mut Bench<'_>) -> Result<(), LabError>;
const DEEDS: [Deed; PHASES.len()] = [
    |bench| bench.make_directories(),
    |bench| bench.copy(),
    |bench| bench.each(|file| bench.desktop.stat(file)),
    |bench| bench.each(|file| bench.desktop.read(file).map(drop)),
    |bench| bench.compile(),
    |bench| bench.delete(),
];
/// Which of them is looked at alone.
pub(super) const COPY: usize = 1;

/// One benchmark on one file system.
pub(super) struct Measured {
    pub system: System,
    pub aged: bool,
    pub seed: u64,
    /// By phase, seconds of the disk.
    pub secs: [f64; PHASES.len()],
    /// Blocks of the copied files in each cell of the disk.
    pub cells: Vec<u32>,
    /// Runs of blocks, and files, of the copy.
    pub fragments: usize,
    pub files: usize,
}

/// What is run in a row on one prepared disk.
pub(super) struct Sizes {
    pub disk_bytes: u64,
    pub source_files: usize,
    pub aged_times: usize,
    pub shares: Vec<u32>,
}

/// A disk half full, with a source tree on it.
pub(super) struct Prepared {
    disk: ModelDisk,
    plan: Vec<Planned>,
    sources: Tree,
}

fn ended(what: &'static str) -> impl Fn(Errno) -> LabError {
    move |errno| LabError::Failed(format!("{what}: {errno}"))
}

impl Prepared {
    pub(super) fn new(sizes: &Sizes, seed: u64) -> Result<Prepared, LabError> {
        let disk = made(sizes.disk_bytes)?;
        let desktop = Desktop::mount(&disk, seed, &quiet())?;
        let random = desktop.env();
        let (_, blocks) = desktop.room()?;
        let plan = sources(sizes.source_files, &random);
        let of_sources: u64 = plan.iter().flat_map(|p| &p.files).map(|len| blocks_of(*len)).sum();
        let usr = desktop.directory(InodeNumber::ROOT, "usr")?;
        desktop.tree(usr, &old_files((blocks / 2).saturating_sub(of_sources), &random))?;
        let src = desktop.directory(InodeNumber::ROOT, "src")?;
        let sources = desktop.tree(src, &plan)?;
        desktop.unmount()?;
        Ok(Prepared { disk, plan, sources })
    }

    /// Contributes to a copy of the disk, ages it, and runs the benchmark.
    pub(super) fn measure(
        &self,
        system: System,
        aged_times: Option<usize>,
        seed: u64,
    ) -> Result<Measured, LabError> {
        let disk = self.disk.copied();
        let options = quiet();
        let desktop = Desktop::mount(&disk, seed, &options)?;
        let mut contribution = Contribution::new(&desktop, system)?;
        contribution.fill()?;
        for _ in 0..aged_times.unwrap_or(0) {
            contribution.renew()?;
        }
        desktop.unmount()?;
        let desktop = Desktop::mount(&disk, seed, &options)?;
        let mut bench = Bench { desktop: &desktop, prepared: self, target: Tree::default() };
        let mut secs = [0.0; PHASES.len()];
        let (mut cells, mut fragments) = (Vec::new(), 0);
        for (n, deed) in DEEDS.into_iter().enumerate() {
            secs[n] = bench.timed(deed)?;
            if n == COPY {
                (cells, fragments) = bench.layout()?;
            }
        }
        let files = self.sources.files.len();
        desktop.unmount()?;
        Ok(Measured { system, aged: aged_times.is_some(), seed, secs, cells, fragments, files })
    }
}

/// Contributed files.
struct Contribution<'a> {
    desktop: &'a Desktop,
    root: InodeNumber,
    /// Blocks that it is to take; `None`: all there are.
    target: Option<u64>,
    taken: u64,
    files: Vec<File>,
    directories: Vec<InodeNumber>,
    made: usize,
}

impl<'a> Contribution<'a> {
    fn new(desktop: &'a Desktop, system: System) -> Result<Contribution<'a>, LabError> {
        let root = desktop.directory(InodeNumber::ROOT, "contributed")?;
        let (_, blocks) = desktop.room()?;
        let of = |share: u32| Some(blocks * u64::from(share) / 100);
        let target = match system {
            System::Ext2(share) => of(share),
            System::Tfs(share) => {
                desktop.contribute(root)?;
                share.and_then(of)
            }
        };
        let (files, directories) = (Vec::new(), Vec::new());
        Ok(Contribution { desktop, root, target, taken: 0, files, directories, made: 0 })
    }

    /// Makes files until the target is reached, or there is no room.
    fn fill(&mut self) -> Result<(), LabError> {
        let random = self.desktop.env();
        while self.target.is_none_or(|target| self.taken < target) {
            if self.made.is_multiple_of(CONTRIBUTED_PER_DIRECTORY) {
                let name = format!("d{}", self.directories.len());
                self.directories.push(self.desktop.directory(self.root, &name)?);
            }
            let parent = *self.directories.last().expect("the first file made one");
            let len_bytes = 1 + atoll_env::random_below(&*random, CONTRIBUTED_BYTES);
            let file = File { parent, name: format!("f{}", self.made), len_bytes };
            self.made += 1;
            match self.desktop.create(&file) {
                Ok(()) => {
                    self.taken += blocks_of(len_bytes);
                    self.files.push(file);
                }
                Err(Errno::ENOSPC) => {
                    self.desktop.delete(&file).map_err(ended("a file too many"))?;
                    break;
                }
                Err(errno) => return Err(ended("contributing")(errno)),
            }
        }
        Ok(())
    }

    /// Deletes some files at random and makes others.
    fn renew(&mut self) -> Result<(), LabError> {
        let random = self.desktop.env();
        let times = (self.files.len() as f64 * AGED_SHARE) as usize;
        for _ in 0..times {
            let at = atoll_env::random_below(&*random, self.files.len() as u64) as usize;
            let file = self.files.swap_remove(at);
            self.taken -= blocks_of(file.len_bytes);
            self.desktop.delete(&file).map_err(ended("ageing"))?;
        }
        // Freed blocks may be used again once that is on the disk.
        self.desktop.sync()?;
        self.fill()
    }
}

/// The benchmark, on one file system.
struct Bench<'a> {
    desktop: &'a Desktop,
    prepared: &'a Prepared,
    target: Tree,
}

impl Bench<'_> {
    /// The seconds that the disk works on `deed`, its sync included.
    fn timed(&mut self, deed: Deed) -> Result<f64, LabError> {
        self.desktop.disk.forget();
        let before = self.desktop.disk.busy_secs();
        deed(self)?;
        self.desktop.sync()?;
        Ok(self.desktop.disk.busy_secs() - before)
    }

    fn make_directories(&mut self) -> Result<(), LabError> {
        let root = self.desktop.directory(InodeNumber::ROOT, "copy")?;
        self.target.directories = self.desktop.directories(root, &self.prepared.plan)?;
        Ok(())
    }

    fn copy(&mut self) -> Result<(), LabError> {
        let sources = &self.prepared.sources;
        let to: BTreeMap<InodeNumber, InodeNumber> =
            sources.directories.iter().copied().zip(self.target.directories.clone()).collect();
        for file in &sources.files {
            self.desktop.read(file).map_err(ended("copy"))?;
            let copy = File { parent: to[&file.parent], ..file.clone() };
            self.desktop.create(&copy).map_err(ended("copy"))?;
            self.target.files.push(copy);
        }
        Ok(())
    }

    fn each(&self, what: impl Fn(&File) -> Result<(), Errno>) -> Result<(), LabError> {
        self.target.files.iter().try_for_each(what).map_err(ended("the benchmark"))
    }

    fn compile(&mut self) -> Result<(), LabError> {
        self.each(|file| {
            self.desktop.read(file)?;
            self.desktop.create(&File { name: format!("{}.o", file.name), ..file.clone() })
        })
    }

    fn delete(&mut self) -> Result<(), LabError> {
        self.each(|file| {
            self.desktop.delete(&File { name: format!("{}.o", file.name), ..file.clone() })?;
            self.desktop.delete(file)
        })
    }

    /// Where the copy lies: its blocks in each cell of the disk, and its runs of blocks.
    fn layout(&self) -> Result<(Vec<u32>, usize), LabError> {
        let blocks = self.desktop.disk.len_bytes() / u64::from(BLOCK_BYTES);
        let mut cells = vec![0; CELLS];
        let mut fragments = 0;
        for file in &self.target.files {
            let extents = self
                .desktop
                .tfs
                .file_extents(self.desktop.inode(file)?)
                .map_err(ended("where a file lies"))?;
            let mut before = None;
            for Extent { start, len, .. } in extents {
                fragments += usize::from(before != Some(start));
                before = Some(start + len);
                for block in u64::from(start)..u64::from(start) + u64::from(len) {
                    cells[(block * CELLS as u64 / blocks) as usize] += 1;
                }
            }
        }
        Ok((cells, fragments))
    }
}
