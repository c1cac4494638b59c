//! Measures mounted volumes, one of one writer and one that many write, beside a directory of this
//! machine's file system, in the same run.
//!
//! Five nodes as five processes on loopback, k = 3. Each volume is mounted read-write through one
//! node and read through another. Writes `docs/results/volume.md`. Needs FUSE.

// A benchmark reads the real clock.
#![allow(clippy::disallowed_methods)]

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use atoll_bench::{LocalRing, machine, median, noise, timed, today};

const NODES: usize = 5;
const ROUNDS: u64 = 5;
const FILE_BYTES: usize = 100 << 20;
const SMALL_FILES: usize = 2_000;
const SMALL_BYTES: usize = 2_000;
const SYNCED_FILES: usize = 50;
const C_FILES: usize = 60;
/// Functions in each: a compiler is busy for some 50 ms.
const FUNCTIONS: usize = 60;
/// The version that a reader shows may be so old.
const MAX_AGE: &str = "1s";

/// The phases: name, amount of work, and the unit of its rate.
const PHASES: [(&str, f64, &str); 10] = [
    ("copy a source tree", 0.0, "files/s"),
    ("and sync it", 0.0, "files/s"),
    ("make a program of 60 C files", C_FILES as f64, "files/s"),
    ("write 2,000 files of 2,000 bytes", SMALL_FILES as f64, "files/s"),
    ("and sync them", SMALL_FILES as f64, "files/s"),
    ("write 50 files, each with fsync", SYNCED_FILES as f64, "files/s"),
    ("write 100 MiB, to close", 100.0, "MiB/s"),
    ("write 100 MiB, to fsync", 100.0, "MiB/s"),
    ("read 2,000 small files", SMALL_FILES as f64, "files/s"),
    ("read 100 MiB", 100.0, "MiB/s"),
];

fn main() {
    let temp = tempfile::tempdir().expect("a temporary directory");
    let binary = PathBuf::from(env!("CARGO_BIN_EXE_atoll"));
    let ring = LocalRing::start(binary, &temp.path().join("ring"), NODES);
    let (mount, reader) = (temp.path().join("mount"), temp.path().join("reader"));
    let (shared, member) = (temp.path().join("shared"), temp.path().join("member"));
    let local = temp.path().join("local");
    for dir in [&mount, &reader, &shared, &member, &local] {
        fs::create_dir(dir).expect("a directory");
    }
    let (_, address) = timed(ring.atoll(0).args(["-q", "volume", "create", "work"]));
    timed(ring.atoll(0).args(["-q", "mount", "work"]).arg(&mount));
    let of = ["-q", "mount", "--max-age", MAX_AGE, address.trim()];
    timed(ring.atoll(2).args(of).arg(&reader));
    timed(ring.atoll(0).args(["-q", "volume", "create", "team", "--shared"]));
    timed(ring.atoll(0).args(["-q", "mount", "team"]).arg(&shared));
    let (_, code) = timed(ring.atoll(0).args(["-q", "volume", "invite", "team"]));
    timed(ring.atoll(2).args(["-q", "volume", "join", code.trim(), "team"]));
    timed(ring.atoll(2).args(["-q", "mount", "team"]).arg(&member));
    let _mounts = Mounts(vec![mount.clone(), reader.clone(), shared.clone(), member.clone()]);

    let tree = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let files = count_files(&tree);
    let none = || vec![Vec::new(); PHASES.len()];
    let (mut volume, mut team, mut disk) = (none(), none(), none());
    for round in 0..ROUNDS {
        eprintln!("round {} of {ROUNDS}", round + 1);
        let mut sides = [
            (&mount, &reader, &mut volume),
            (&shared, &member, &mut team),
            (&local, &local, &mut disk),
        ];
        sides.rotate_left(round as usize % 3);
        for (write_to, read_from, seconds) in sides {
            for (phase, secs) in measure(write_to, read_from, &tree, round).into_iter().enumerate()
            {
                seconds[phase].push(secs);
            }
        }
    }
    let text = report(&volume, &team, &disk, files);
    print!("{text}");
    let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results");
    fs::write(results.join("volume.md"), text).expect("docs/results/volume.md");
}

/// Seconds of each phase.
fn measure(mount: &Path, reader: &Path, tree: &Path, round: u64) -> Vec<f64> {
    let place = mount.join(format!("round{round}"));
    let seen = reader.join(format!("round{round}"));
    fs::create_dir(&place).expect("a directory");
    let mut seconds = Vec::new();
    let mut time = |work: &mut dyn FnMut()| {
        let began = Instant::now();
        work();
        seconds.push(began.elapsed().as_secs_f64());
    };
    time(&mut || {
        let copied = Command::new("cp").arg("-r").arg(tree).arg(place.join("tree")).status();
        assert!(copied.expect("cp runs").success());
    });
    time(&mut || sync(&place));
    write_program(&place.join("program"));
    time(&mut || {
        let mut make = Command::new("make");
        let made = make.args(["-s", "-j2", "-C"]).arg(place.join("program")).status();
        assert!(made.expect("make and cc are installed").success());
    });
    let small = noise(SMALL_FILES * SMALL_BYTES, round + 100);
    fs::create_dir(place.join("small")).expect("a directory");
    time(&mut || {
        for (number, bytes) in small.chunks(SMALL_BYTES).enumerate() {
            fs::write(place.join(format!("small/{number}")), bytes).expect("writes");
        }
    });
    time(&mut || sync(&place));
    time(&mut || {
        for number in 0..SYNCED_FILES {
            write_synced(&place.join(format!("synced{number}")), &small[number..][..SMALL_BYTES]);
        }
    });
    let big = noise(FILE_BYTES, round + 200);
    time(&mut || fs::write(place.join("big"), &big).expect("writes"));
    sync(&place);
    let other = noise(FILE_BYTES, round + 300);
    time(&mut || write_synced(&place.join("other"), &other));
    // Readers ask for a newer version as often as they were told to.
    std::thread::sleep(Duration::from_secs(3));
    time(&mut || {
        for (number, bytes) in small.chunks(SMALL_BYTES).enumerate() {
            assert!(fs::read(seen.join(format!("small/{number}"))).expect("reads") == bytes);
        }
    });
    time(&mut || {
        let mut read = Vec::with_capacity(FILE_BYTES);
        File::open(seen.join("big")).expect("opens").read_to_end(&mut read).expect("reads");
        assert!(read == big);
    });
    seconds
}

/// Sources of a program, and how it is made.
fn write_program(place: &Path) {
    fs::create_dir(place).expect("a directory");
    let file = |name: &str, text: String| fs::write(place.join(name), text).expect("writes");
    let files = 0..C_FILES;
    file("all.h", files.clone().map(|n| format!("int f{n}(int);\n")).collect());
    for n in files.clone() {
        let mut text =
            String::from("#include <stdio.h>\n#include <stdlib.h>\n#include \"all.h\"\n");
        for k in 0..FUNCTIONS {
            write!(text, "static int g{k}(int a) {{ int i, s = {n}; for (i = 0; i < a; i++) ")
                .and_then(|()| writeln!(text, "s += rand() % (i + {k} + 1); return s; }}"))
                .expect("a string takes it");
        }
        let sum: Vec<String> = (0..FUNCTIONS).map(|k| format!("g{k}(a)")).collect();
        file(
            &format!("f{n}.c"),
            format!("{text}int f{n}(int a) {{ return {}; }}\n", sum.join("+")),
        );
    }
    let sum: Vec<String> = files.map(|n| format!("f{n}(1)")).collect();
    let main =
        format!("#include \"all.h\"\nint main(void) {{ return ({}) == 0; }}\n", sum.join("+"));
    file("main.c", main);
    let rules = "objects := $(patsubst %.c,%.o,$(wildcard *.c))\n\
                 program: $(objects) ; cc -o $@ $^\n%.o: %.c ; cc -MMD -O1 -c -o $@ $<\n";
    file("Makefile", rules.into());
}

/// Makes everything below `place` durable. What syncfs(2) does for a disk, FUSE file systems are
/// not asked for: there fsync(2) of any file does it.
fn sync(place: &Path) {
    let directory = File::open(place).expect("opens");
    directory.sync_all().expect("syncs");
    rustix::fs::syncfs(&directory).expect("syncs");
}

fn write_synced(path: &Path, bytes: &[u8]) {
    let mut file = File::create(path).expect("makes");
    file.write_all(bytes).expect("writes");
    file.sync_all().expect("syncs");
}

fn report(volume: &[Vec<f64>], team: &[Vec<f64>], disk: &[Vec<f64>], files: usize) -> String {
    let mut text = format!(
        "# A mounted volume\n\nMeasured {} by `cargo bench -p atoll-cli --bench volume` on {}.\n\n\
         {NODES} nodes as {NODES} processes on loopback, three copies of every block, each on the \
         same disk. The\nvolume of one writer is mounted read-write through one node; the last two \
         rows read through another. Beside it\na shared volume, where each close waits until the ring \
         has the file and its name, and a directory of the\nmachine's own file system, which makes one \
         copy and reads from memory. A round on each by turns, with\nbytes that none has seen; \
         medians of {ROUNDS} rounds. The source tree is this project's `crates`, {files}\n\
         files.\n\n| what | seconds | rate | local, seconds | × local | shared, seconds | × volume of \
         one writer |\n|---|---|---|---|---|---|---|\n",
        today(),
        machine(),
    );
    for (phase, (what, count, unit)) in PHASES.into_iter().enumerate() {
        let count = if count == 0.0 { files as f64 } else { count };
        let (own, local) = (median(&volume[phase]), median(&disk[phase]));
        let ratio = |side: &[Vec<f64>], to: &[Vec<f64>]| {
            let ratios = side[phase].iter().zip(&to[phase]).map(|(side, to)| side / to);
            median(&ratios.collect::<Vec<f64>>())
        };
        let rate = format!("{:.0} {unit}", count / own);
        let (to_local, many) = (ratio(volume, disk), median(&team[phase]));
        writeln!(
            text,
            "| {what} | {own:.2} | {rate} | {local:.2} | {to_local:.1} | {many:.2} | {:.1} |",
            ratio(team, volume)
        )
        .expect("a string takes it");
    }
    text
}

fn count_files(dir: &Path) -> usize {
    let entries = fs::read_dir(dir).expect("a directory").flatten();
    let count = |entry: fs::DirEntry| match entry.file_type().expect("a type").is_dir() {
        true => count_files(&entry.path()),
        false => 1,
    };
    entries.map(count).sum()
}

/// Taken away when dropped, before the ring is.
struct Mounts(Vec<PathBuf>);

impl Drop for Mounts {
    fn drop(&mut self) {
        for mount in &self.0 {
            let unmount = ["-q", "unmount", "--lazy"];
            let _ = Command::new(env!("CARGO_BIN_EXE_atoll")).args(unmount).arg(mount).status();
        }
    }
}
