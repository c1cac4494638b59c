//! TFS §2 and §5, Figures 1, 8, 9 and 10: an Andrew-style benchmark beside contributed files.
//!
//! "a disk is filled to 50% with ordinary file data. … After this, files are added to the
//! system to represent the contributed storage. We considered four cases: no contribution,
//! small contribution, large contribution, and TFS. … The small contribution is 5% of the file
//! system. … The large contribution is 35% of the file system. … With TFS, the disk is filled
//! completely with transparent data" (§5.2). The benchmark has six phases: mkdir, copy, stat,
//! read, compile, delete (§5.2.1). For Figure 9 contributed files are first deleted and made
//! anew 200 times, a twentieth of the target each time.
//!
//! Ext2 is Atoll's own with the contributed files as ordinary ones: what is compared is where
//! files lie, not two programs. Times are those of a modelled disk ([`super::disk`]); each phase
//! ends with a sync, and begins with nothing in memory, as the paper's machines were restarted.
//! A processor's time is not in them: "compile" reads every source and writes an object of its
//! size. The disk is 1/80 of the paper's and the source tree 1/20.
//!
//! Figure 10 shows where the copied files' blocks lie. What is told of all this is
//! [`super::copying_views`]'.

use std::collections::BTreeMap;

use atoll_tfs::device::Device as _;
use atoll_tfs::fs::Extent;
use atoll_vfs::{Errno, InodeNumber};

use super::copying_views::Told;
use super::desktop::{
    BLOCK_BYTES, Desktop, File, Planned, Tree, blocks_of, made, old_files, quiet, sources,
};
use super::disk::ModelDisk;
use crate::LabError;
use crate::experiment::{Context, Experiment, Group};
use crate::outcome::Outcome;

pub(crate) const GROUP: Group = Group {
    experiments: &[
        Experiment {
            name: "tfs-fig1",
            title: "time to copy a source tree against the share contributed",
            source: "TFS §2, Figure 1",
            nodes: None,
        },
        Experiment {
            name: "tfs-fig8",
            title: "an Andrew-style benchmark beside contributed files",
            source: "TFS §5.2.1, Figure 8",
            nodes: None,
        },
        Experiment {
            name: "tfs-fig9",
            title: "the same benchmark on aged file systems",
            source: "TFS §5.2.1, Figure 9",
            nodes: None,
        },
        Experiment {
            name: "tfs-fig10",
            title: "where the blocks of copied files lie",
            source: "TFS §5.3, Figure 10",
            nodes: None,
        },
    ],
    run,
};

/// A contributed file, as a node keeps a block: up to 256 KiB.
const CONTRIBUTED_BYTES: u64 = 256 << 10;
const CONTRIBUTED_PER_DIRECTORY: usize = 256;
/// "After repeating this 200 times".
const AGED_TIMES: usize = 200;
/// "always staying within 5% of the target disk utilization".
const AGED_SHARE: f64 = 0.05;
/// Of the disk, hundredths: the points of Figure 1.
const SHARES: [u32; 10] = [0, 5, 10, 15, 20, 25, 30, 35, 40, 45];
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
struct Sizes {
    disk_bytes: u64,
    source_files: usize,
    aged_times: usize,
    shares: Vec<u32>,
}

fn run(context: &Context<'_>) -> Result<Vec<Outcome>, LabError> {
    let sizes = Sizes {
        disk_bytes: context.size(2 << 30, 512 << 20) as u64,
        source_files: context.size(1000, 200),
        aged_times: context.size(AGED_TIMES, 10),
        shares: if context.options.quick { vec![0, SMALL, 20, LARGE, BAD] } else { SHARES.into() },
    };
    let seeds = context.seeds(3, 1);
    let mut parts: Vec<(System, bool, u64)> = Vec::new();
    for seed in &seeds {
        for system in [System::Ext2(0), System::Ext2(SMALL), System::Ext2(LARGE), System::Tfs(None)]
        {
            parts.push((system, true, *seed));
        }
        parts.push((System::Tfs(None), false, *seed));
        for share in &sizes.shares {
            parts.push((System::Ext2(*share), false, *seed));
            if *share > 0 {
                parts.push((System::Tfs(Some(*share)), false, *seed));
            }
        }
    }
    let prepared: BTreeMap<u64, Prepared> = context
        .each(&seeds, |seed| Ok((*seed, Prepared::new(&sizes, *seed)?)))?
        .into_iter()
        .collect();
    let found = context.each(&parts, |(system, aged, seed)| {
        prepared[seed].measure(*system, aged.then_some(sizes.aged_times), *seed)
    })?;
    let setup = format!(
        "a disk of {} MiB (modelled, 7,200 rpm), half full; a source tree of {} files",
        sizes.disk_bytes >> 20,
        sizes.source_files
    );
    let told = Told { found: &found, seeds: &seeds, setup: &setup };
    Ok(vec![
        told.copying(&sizes.shares),
        told.phases(false, sizes.aged_times),
        told.phases(true, sizes.aged_times),
        told.layout(),
    ])
}

/// A disk half full, with a source tree on it.
struct Prepared {
    disk: ModelDisk,
    plan: Vec<Planned>,
    sources: Tree,
}

fn ended(what: &'static str) -> impl Fn(Errno) -> LabError {
    move |errno| LabError::Failed(format!("{what}: {errno}"))
}

impl Prepared {
    fn new(sizes: &Sizes, seed: u64) -> Result<Prepared, LabError> {
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
    fn measure(
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
        // What was freed may be used again once that is on the disk.
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
