//! The file systems under test: images, their mounts, and what fills them.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::phases::{self, Times};

/// Rounds of deleting and making transparent files (§5.2: "After repeating this 200 times").
const AGING_ROUNDS: usize = 200;
/// One in so many transparent files goes in each of them: 5 % (§5.2).
const AGING_SHARE: usize = 20;

/// Units of time in `/proc`, each second (Linux: 100 on all machines we build for).
const USER_HZ: f64 = 100.0;

/// What is tested.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Subject {
    /// TFS without transparent data.
    Tfs,
    /// TFS, all free space full of transparent data.
    TfsFull,
    /// The same after 200 rounds of deleting and making transparent files.
    TfsAged,
    /// e2fsprogs' file system in user space.
    Fuse2fs,
    /// The kernel's driver on a loop mount: the limit.
    Kernel,
}

impl Subject {
    pub(crate) const ALL: [Subject; 5] =
        [Subject::Tfs, Subject::TfsFull, Subject::TfsAged, Subject::Fuse2fs, Subject::Kernel];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Subject::Tfs => "TFS",
            Subject::TfsFull => "TFS, full",
            Subject::TfsAged => "TFS, full, aged",
            Subject::Fuse2fs => "fuse2fs",
            Subject::Kernel => "kernel",
        }
    }

    fn is_tfs(self) -> bool {
        matches!(self, Subject::Tfs | Subject::TfsFull | Subject::TfsAged)
    }

    fn is_full(self) -> bool {
        matches!(self, Subject::TfsFull | Subject::TfsAged)
    }

    /// Why it cannot be tested here.
    pub(crate) fn missing(self) -> Option<String> {
        let fuse = Path::new("/dev/fuse").exists();
        match self {
            Subject::Kernel => None,
            _ if !fuse => Some("there is no /dev/fuse".to_owned()),
            Subject::Fuse2fs => {
                let here = Command::new("fuse2fs").arg("-V").output().is_ok();
                (!here).then(|| "not installed (Debian: fuse2fs)".to_owned())
            }
            _ => None,
        }
    }
}

fn atoll() -> Command {
    Command::new(env!("CARGO_BIN_EXE_atoll"))
}

pub(crate) fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{command:?}: {said}");
}

/// A mounted image, and no longer when this is dropped.
pub(crate) struct Mount {
    pub place: PathBuf,
    server: Option<Child>,
    is_mounted: bool,
}

impl Mount {
    fn new(subject: Subject, image: &Path, place: &Path) -> Mount {
        let quiet = |command: &mut Command| {
            let server = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            server.spawn().expect("a server")
        };
        let server = match subject {
            Subject::Kernel => {
                run(Command::new("mount").args(["-t", "ext2", "-o", "loop"]).arg(image).arg(place));
                None
            }
            Subject::Fuse2fs => {
                let mut command = Command::new("fuse2fs");
                Some(quiet(command.args(["-f", "-o", "rw"]).arg(image).arg(place)))
            }
            _ => Some(quiet(atoll().args(["tfs", "mount", "--foreground"]).arg(image).arg(place))),
        };
        let mut mount = Mount { place: place.to_owned(), server, is_mounted: true };
        mount.wait_until_there();
        mount
    }

    fn wait_until_there(&mut self) {
        let until = Instant::now() + Duration::from_secs(60);
        let wanted = format!(" {} ", self.place.display());
        while !fs::read_to_string("/proc/mounts").expect("/proc/mounts").contains(&wanted) {
            assert!(Instant::now() < until, "{} is not mounted", self.place.display());
            let ended = self.server.as_mut().and_then(|server| server.try_wait().ok().flatten());
            assert!(ended.is_none(), "the server ended: {ended:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The most memory that the server has had, MiB.
    fn peak_mib(&self) -> Option<f64> {
        self.memory_mib("VmHWM:")
    }

    /// A figure of proc(5) about the server's memory, MiB.
    pub(crate) fn memory_mib(&self, figure: &str) -> Option<f64> {
        let server = self.server.as_ref()?;
        let status = fs::read_to_string(format!("/proc/{}/status", server.id())).ok()?;
        let line = status.lines().find(|line| line.starts_with(figure))?;
        let kib: f64 = line.split_whitespace().nth(1)?.parse().ok()?;
        Some(kib / 1024.0)
    }

    /// CPU time of the server by now, seconds.
    pub(crate) fn cpu_secs(&self) -> f64 {
        let Some(server) = &self.server else { return 0.0 };
        let stat = fs::read_to_string(format!("/proc/{}/stat", server.id())).unwrap_or_default();
        // After the name in parentheses: utime and stime are the 12th and 13th.
        let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
        let ticks: f64 =
            fields.skip(11).take(2).filter_map(|field| field.parse::<f64>().ok()).sum();
        ticks / USER_HZ
    }

    pub(crate) fn unmount(mut self) {
        run(Command::new("umount").arg(&self.place));
        self.is_mounted = false;
        if let Some(mut server) = self.server.take() {
            server.wait().expect("the server ends");
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if self.is_mounted {
            let _ = Command::new("umount").arg("-l").arg(&self.place).status();
            if let Some(server) = &mut self.server {
                let _ = server.wait();
            }
        }
    }
}

/// An image with the source tree.
pub(crate) struct Disk {
    pub subject: Subject,
    image: PathBuf,
    place: PathBuf,
    /// Transparent files made so far.
    made: usize,
    /// Bytes of the source tree.
    pub tree_bytes: u64,
    /// The most memory that a server has had, MiB.
    pub peak_mib: f64,
}

impl Disk {
    /// An empty image.
    pub(crate) fn blank(subject: Subject, temp: &Path, mib: u64) -> Disk {
        let number = Subject::ALL.iter().position(|other| *other == subject).expect("one of all");
        let (image, place) =
            (temp.join(format!("image{number}")), temp.join(format!("at{number}")));
        fs::create_dir(&place).expect("a mount point");
        if subject.is_tfs() {
            run(atoll().args(["tfs", "mkfs", "--size"]).arg(format!("{mib}MiB")).arg(&image));
        } else {
            let file = fs::File::create(&image).and_then(|file| file.set_len(mib << 20));
            file.expect("an image");
            // As many inodes and as large blocks as TFS has.
            let options = ["-q", "-F", "-t", "ext2", "-b", "4096", "-i", "8192"];
            run(Command::new("mke2fs").args(options).arg(&image));
        }
        Disk { subject, image, place, made: 0, tree_bytes: 0, peak_mib: 0.0 }
    }

    pub(crate) fn make(subject: Subject, temp: &Path, mib: u64) -> Disk {
        let mut disk = Disk::blank(subject, temp, mib);
        let mount = disk.mount();
        disk.tree_bytes = phases::plant(&disk.place);
        if subject.is_full() {
            let contributed = disk.contributed();
            fs::create_dir(&contributed).expect("a directory");
            run(atoll().args(["tfs", "set", "--transparent"]).arg(&contributed));
            disk.fill();
        }
        if subject == Subject::TfsAged {
            disk.age();
        }
        mount.unmount();
        disk
    }

    pub(crate) fn mount(&self) -> Mount {
        Mount::new(self.subject, &self.image, &self.place)
    }

    fn contributed(&self) -> PathBuf {
        self.place.join("contributed")
    }

    /// Fills the free space with transparent files.
    fn fill(&mut self) {
        for len in [1 << 20, 64 << 10, 4 << 10] {
            let bytes = vec![self.made as u8; len];
            loop {
                let path = self.contributed().join(format!("t{}", self.made));
                self.made += 1;
                let written = fs::File::create(&path).and_then(|mut file| file.write_all(&bytes));
                match written {
                    Ok(()) => {}
                    Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                        let _ = fs::remove_file(&path);
                        break;
                    }
                    Err(error) => panic!("{}: {error}", path.display()),
                }
            }
        }
    }

    /// Deletes and makes transparent files, always near full.
    fn age(&mut self) {
        for round in 0..AGING_ROUNDS {
            let listed = fs::read_dir(self.contributed()).expect("the directory");
            for (i, entry) in listed.enumerate() {
                // Another twentieth each time, mixed by a large prime.
                if (i + round * 7919) % AGING_SHARE == 0 {
                    let _ = fs::remove_file(entry.expect("an entry").path());
                }
            }
            self.fill();
        }
    }

    /// What the last round's copy overwrote is cleaned up and filled again.
    fn restore(&mut self) {
        if self.subject.is_full() {
            let mount = self.mount();
            run(atoll().args(["tfs", "clean"]).arg(&self.place));
            self.fill();
            mount.unmount();
        }
    }

    /// Waits until nothing is being written any more, and drops the image from memory.
    pub(crate) fn settle(&self) {
        rustix::fs::sync();
        let image = fs::File::open(&self.image).expect("the image");
        rustix::fs::fadvise(&image, 0, None, rustix::fs::Advice::DontNeed).expect("fadvise");
    }

    /// One round.
    pub(crate) fn round(&mut self) -> Times {
        let mut times = Times::default();
        self.restore();
        for half in [phases::write_half, phases::read_half] {
            self.settle();
            let mount = self.mount();
            let before = mount.cpu_secs();
            half(&self.place, &mut times);
            times.server_cpu_secs += mount.cpu_secs() - before;
            self.peak_mib = self.peak_mib.max(mount.peak_mib().unwrap_or(0.0));
            mount.unmount();
        }
        times
    }
}
