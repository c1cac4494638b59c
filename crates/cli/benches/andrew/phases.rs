//! The phases. Each file system has done what it was asked to at the end of each; that it is
//! on the disk as well is a phase of its own ("sync"), because a FUSE file system is told of
//! `fsync` and not of `syncfs`.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use crate::tree::C_DIRECTORY;

/// Names of the phases, in order.
pub const PHASES: [&str; 7] = ["mkdir", "copy", "sync", "stat", "read", "compile", "delete"];

/// The one that is the compiler's work more than the file system's.
const COMPILE: usize = 5;

/// Seconds of each phase.
#[derive(Clone, Copy, Debug, Default)]
pub struct Times {
    pub phases: [f64; 7],
    /// CPU time of the process that serves the file system, over all of them.
    pub server_cpu_secs: f64,
}

impl Times {
    pub fn total(&self) -> f64 {
        self.phases.iter().sum()
    }

    /// All but the compiler's.
    pub fn without_compiler(&self) -> f64 {
        self.total() - self.phases[COMPILE]
    }
}

fn timed<T>(work: impl FnOnce() -> T) -> (f64, T) {
    let began = Instant::now();
    let done = work();
    (began.elapsed().as_secs_f64(), done)
}

/// What a tree holds, relative to its root.
#[derive(Default)]
struct Names {
    directories: Vec<PathBuf>,
    files: Vec<PathBuf>,
}

impl Names {
    fn of(root: &Path) -> Names {
        let mut names = Names::default();
        let mut pending = vec![PathBuf::new()];
        while let Some(relative) = pending.pop() {
            for entry in fs::read_dir(root.join(&relative)).expect("a directory") {
                let entry = entry.expect("an entry");
                let path = relative.join(entry.file_name());
                if entry.file_type().expect("a kind").is_dir() {
                    names.directories.push(path.clone());
                    pending.push(path);
                } else {
                    names.files.push(path);
                }
            }
        }
        names
    }
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
    let some = root.join("source").join(C_DIRECTORY).join("part0.c");
    File::options().append(true).open(some).and_then(|file| file.sync_all()).expect("fsync");
}

/// The first half of a round on the file system at `root`: mkdir, copy, sync.
pub fn write_half(root: &Path, times: &mut Times) {
    let (source, copy) = (root.join("source"), root.join("copy"));
    let names = Names::of(&source);
    times.phases[0] = timed(|| {
        fs::create_dir(&copy).expect("a directory");
        for directory in &names.directories {
            fs::create_dir(copy.join(directory)).expect("a directory");
        }
    })
    .0;
    times.phases[1] = timed(|| {
        let mut buffer = Vec::new();
        for file in &names.files {
            // As `cp` does: read and write, not `copy_file_range`, which FUSE may hand back.
            buffer.clear();
            File::open(source.join(file))
                .and_then(|mut file| file.read_to_end(&mut buffer))
                .expect("a file of the source");
            fs::write(copy.join(file), &buffer).expect("a copy");
        }
        write_back(root);
    })
    .0;
    times.phases[2] = timed(|| sync(root)).0;
}

/// The second half: stat, read, compile, delete.
pub fn read_half(root: &Path, times: &mut Times) {
    let copy = root.join("copy");
    let (secs, names) = timed(|| {
        let names = Names::of(&copy);
        for path in names.directories.iter().chain(&names.files) {
            fs::symlink_metadata(copy.join(path)).expect("attributes");
        }
        names
    });
    times.phases[3] = secs;
    times.phases[4] = timed(|| {
        let mut buffer = Vec::new();
        for file in &names.files {
            buffer.clear();
            File::open(copy.join(file))
                .and_then(|mut file| file.read_to_end(&mut buffer))
                .expect("a file of the copy");
        }
    })
    .0;
    times.phases[COMPILE] = timed(|| compile(&copy.join(C_DIRECTORY), &names)).0;
    times.phases[6] = timed(|| {
        fs::remove_dir_all(&copy).expect("deleted");
        sync(root);
    })
    .0;
}

fn compile(directory: &Path, names: &Names) {
    let ours = names.files.iter().filter(|file| file.starts_with(C_DIRECTORY));
    let files: Vec<_> = ours.filter_map(|file| file.file_name()).collect();
    // A few at a time: each writes its object file beside it.
    for part in files.chunks(10) {
        run(Command::new("cc").args(["-O1", "-c"]).args(part).current_dir(directory));
    }
    let objects: Vec<_> = files.iter().map(|file| Path::new(file).with_extension("o")).collect();
    run(Command::new("cc").args(["-o", "program"]).args(objects).current_dir(directory));
}

fn run(command: &mut Command) {
    let status = command.status().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(status.success(), "{command:?}");
}
