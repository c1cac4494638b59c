//! The phases of [`atoll_lab::andrew`] on a real mount, timed, with a real compiler. Each file system
//! has done what it was asked to at the end of each phase; that it is on the disk as well is a phase
//! of its own ("sync"), because a FUSE file system is told of `fsync` and not of `syncfs`.

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use atoll_lab::andrew::{
    self, C_DIRECTORY, COPY, InDirectory, Names, SOURCE, SourceTree, TreeSize,
};
use atoll_vfs::Errno;
use futures_util::FutureExt;

/// Names of the phases, in order.
pub(crate) const PHASES: [&str; 7] = ["mkdir", "copy", "sync", "stat", "read", "compile", "delete"];

/// The one that is the compiler's work more than the file system's.
const COMPILE: usize = 5;

/// Seconds of each phase.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Times {
    pub phases: [f64; 7],
    /// CPU time of the process that serves the file system, over all of them.
    pub server_cpu_secs: f64,
}

impl Times {
    pub(crate) fn total(&self) -> f64 {
        self.phases.iter().sum()
    }

    /// All but the compiler's.
    pub(crate) fn without_compiler(&self) -> f64 {
        self.total() - self.phases[COMPILE]
    }
}

fn timed<T>(work: impl FnOnce() -> T) -> (f64, T) {
    let began = Instant::now();
    let done = work();
    (began.elapsed().as_secs_f64(), done)
}

/// The result of one phase in one directory.
fn done<T>(work: impl Future<Output = Result<T, Errno>>) -> T {
    let outcome = work.now_or_never().expect("a directory's calls are done when they return");
    outcome.expect("the file system under test does as it is told")
}

/// Makes the source tree at `root`; how many bytes it has.
pub(crate) fn plant(root: &Path) -> u64 {
    done(andrew::plant(&InDirectory::new(root), &SourceTree::new(TreeSize::Large))).bytes
}

/// Waits until the file system has all that the kernel keeps for it.
fn write_back(root: &Path) {
    let root = File::open(root).expect("the mount point");
    rustix::fs::syncfs(&root).expect("syncfs");
}

/// Makes everything durable.
fn sync(root: &Path) {
    write_back(root);
    // A file system in user space hears of this one, and makes all of itself durable.
    let some = root.join(SOURCE).join(C_DIRECTORY).join("part0.c");
    File::options().append(true).open(some).and_then(|file| file.sync_all()).expect("fsync");
}

/// The first half of a round on the file system at `root`: mkdir, copy, sync.
pub(crate) fn write_half(root: &Path, times: &mut Times) {
    let files = InDirectory::new(root);
    let names = done(Names::of(&files, SOURCE));
    times.phases[0] = timed(|| done(andrew::make_directories(&files, &names))).0;
    times.phases[1] = timed(|| {
        done(andrew::copy(&files, &names));
        write_back(root);
    })
    .0;
    times.phases[2] = timed(|| sync(root)).0;
}

/// The second half: stat, read, compile, delete.
pub(crate) fn read_half(root: &Path, times: &mut Times) {
    let files = InDirectory::new(root);
    let (secs, (_, names)) = timed(|| done(andrew::stat(&files, COPY)));
    times.phases[3] = secs;
    times.phases[4] = timed(|| done(andrew::read(&files, COPY, &names))).0;
    times.phases[COMPILE] = timed(|| compile(&root.join(COPY).join(C_DIRECTORY), &names)).0;
    times.phases[6] = timed(|| {
        done(andrew::delete(&files));
        sync(root);
    })
    .0;
}

fn compile(directory: &Path, names: &Names) {
    let files: Vec<&Path> = names
        .files
        .iter()
        .filter_map(|file| Path::new(file).strip_prefix(C_DIRECTORY).ok())
        .collect();
    // A few at a time: each writes its object file beside it.
    for part in files.chunks(10) {
        run(Command::new("cc").args(["-O1", "-c"]).args(part).current_dir(directory));
    }
    let objects: Vec<_> = files.iter().map(|file| file.with_extension("o")).collect();
    run(Command::new("cc").args(["-o", "program"]).args(objects).current_dir(directory));
}

fn run(command: &mut Command) {
    let status = command.status().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(status.success(), "{command:?}");
}
