//! Locks that the file system keeps: between processes, and between two mounts of the same files.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};

use atoll_gateway::fuse::MountOptions;
use atoll_vfs::memory::MemoryFs;
use libc::{F_RDLCK, F_UNLCK, F_WRLCK};
use rustix::fs::FlockOperation;
use rustix::process::{Pid, Signal, kill_process};

use crate::concurrency::{Script, scripted};
use crate::place::{Two, until};
use crate::raw::{LockBy, conflict, set_lock};

/// A file system in memory, mounted twice, with a file.
fn two_with_a_file() -> Option<(Two, [PathBuf; 2])> {
    let two = Two::new(|fs| fs, &MountOptions::default())?;
    fs::write(two.places[0].join("f"), "some bytes").unwrap();
    let paths = [0, 1].map(|n| two.places[n].join("f"));
    Some((two, paths))
}

fn open(path: &Path) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}

fn is_refused(outcome: std::io::Result<()>) -> bool {
    match outcome {
        Ok(()) => false,
        Err(error) => {
            assert!(matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)), "{error}");
            true
        }
    }
}

/// This test binary again, as another process that locks.
struct Other {
    child: Child,
    /// It ends when this is closed.
    stdin: Option<ChildStdin>,
    said: BufReader<std::process::ChildStdout>,
}

const WISH: &str = "ATOLL_TEST_LOCK";

impl Other {
    /// Waits for an exclusive lock on one byte, by the process, and keeps it.
    fn lock(path: &Path, byte: i64) -> Other {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "locks::another_process", "--ignored", "--nocapture"]);
        command.env(WISH, format!("{byte} {}", path.display()));
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take().unwrap());
        let mut other = Other { child, stdin, said: BufReader::new(stdout) };
        other.wait_until("opened");
        other
    }

    fn wait_until(&mut self, what: &str) {
        let mut line = String::new();
        while !line.contains(what) {
            line.clear();
            assert_ne!(self.said.read_line(&mut line).unwrap(), 0, "it ended before: {what}");
        }
    }

    fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.pid()).unwrap(), signal).unwrap();
    }

    fn end(mut self) -> ExitStatus {
        drop(self.stdin.take());
        self.child.wait().unwrap()
    }
}

/// Not a test: the other process of the tests.
#[test]
#[ignore = "no test: the other process of these"]
fn another_process() {
    let Ok(wish) = std::env::var(WISH) else { return };
    let (byte, path) = wish.split_once(' ').unwrap();
    let file = open(Path::new(path));
    let mut out = std::io::stdout();
    writeln!(out, "opened").unwrap();
    set_lock(&file, LockBy::ProcessWaiting, F_WRLCK, byte.parse().unwrap(), 1).unwrap();
    writeln!(out, "locked").unwrap();
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// Waits until a process is seen waiting within the kernel for FUSE.
fn wait_until_it_waits(fs: &MemoryFs, waiting: usize) {
    until(|| fs.lock_table().waiting() >= waiting);
}

#[test]
fn locks_of_processes_exclude_each_other() {
    let Some((two, [path, _])) = two_with_a_file() else { return };
    let file = open(&path);
    let mut other = Other::lock(&path, 5);
    other.wait_until("locked");
    assert!(is_refused(set_lock(&file, LockBy::Process, F_WRLCK, 0, 100)));
    assert_eq!(conflict(&file, F_RDLCK, 0, 100), Some((F_WRLCK, 5, 1, other.pid())));
    set_lock(&file, LockBy::Process, F_WRLCK, 6, 100).unwrap();
    set_lock(&file, LockBy::Process, F_RDLCK, 0, 5).unwrap();
    assert_eq!(conflict(&file, F_WRLCK, 0, 5), None, "its own");
    assert!(other.end().success());
    set_lock(&file, LockBy::Process, F_WRLCK, 0, 0).unwrap();
    drop(file);
    assert!(two.fs.lock_table().is_empty());
    two.unmount();
}

#[test]
fn locks_of_two_mounts_exclude_each_other() {
    let Some((two, paths)) = two_with_a_file() else { return };
    let [a, b] = paths.each_ref().map(|path| open(path));
    for by in [LockBy::Process, LockBy::OpenFile] {
        set_lock(&a, by, F_RDLCK, 0, 10).unwrap();
        set_lock(&b, by, F_RDLCK, 5, 10).unwrap();
        assert!(is_refused(set_lock(&a, by, F_WRLCK, 0, 10)));
        set_lock(&a, by, F_WRLCK, 0, 5).unwrap();
        assert!(is_refused(set_lock(&b, by, F_WRLCK, 4, 1)));
        for file in [&a, &b] {
            set_lock(file, by, F_UNLCK, 0, 0).unwrap();
        }
    }
    rustix::fs::flock(&a, FlockOperation::LockExclusive).unwrap();
    let refused = rustix::fs::flock(&b, FlockOperation::NonBlockingLockShared);
    assert_eq!(refused, Err(rustix::io::Errno::WOULDBLOCK));
    drop(a);
    // Waits: the last close is not waited for, and a process that another test is starting holds
    // `a` open until it runs its program.
    rustix::fs::flock(&b, FlockOperation::LockExclusive).unwrap();
    drop(b);
    // The last close is not waited for.
    until(|| two.fs.lock_table().is_empty());
    two.unmount();
}

/// `flock -n FILE true` in the shell; whether it got the lock.
fn flock_program(options: &[&str], path: &Path) -> bool {
    let mut command = Command::new("flock");
    let status = command.args(options).arg(path).arg("true").status().unwrap();
    assert!(matches!(status.code(), Some(0 | 1)), "{status}");
    status.success()
}

#[test]
fn the_program_flock_waits_gives_up_and_gets_its_lock() {
    let Some((two, [path, other])) = two_with_a_file() else { return };
    let file = open(&path);
    assert!(flock_program(&["-n"], &other));
    rustix::fs::flock(&file, FlockOperation::LockShared).unwrap();
    assert!(flock_program(&["-n", "--shared"], &other));
    assert!(!flock_program(&["-n"], &other));
    // An alarm interrupts it, in its own time.
    assert!(!flock_program(&["-w", "0.1"], &other));
    assert!(!flock_program(&["-w", "0.1"], &path));
    let waits = std::thread::spawn(move || flock_program(&["-w", "3600"], &other));
    wait_until_it_waits(&two.fs, 1);
    drop(file);
    assert!(waits.join().unwrap());
    two.unmount();
}

#[test]
fn a_process_that_waits_for_a_lock_can_be_killed_and_leaves_none() {
    let Some((two, [path, second])) = two_with_a_file() else { return };
    let file = open(&path);
    set_lock(&file, LockBy::Process, F_WRLCK, 0, 0).unwrap();
    // Not SIGINT, which a shell makes the tests ignore that it runs in the background.
    for signal in [Signal::TERM, Signal::USR1, Signal::KILL] {
        let waits = Other::lock(&second, 7);
        wait_until_it_waits(&two.fs, 1);
        waits.signal(signal);
        assert!(!waits.end().success());
        assert_eq!(two.fs.lock_table().waiting(), 0);
    }
    set_lock(&file, LockBy::Process, F_UNLCK, 0, 0).unwrap();
    assert!(two.fs.lock_table().is_empty());
    drop(file);
    two.unmount();
}

#[test]
fn the_locks_of_a_process_that_dies_are_free() {
    let Some((two, [path, second])) = two_with_a_file() else { return };
    let mut dies = Other::lock(&path, 0);
    dies.wait_until("locked");
    let mut next = Other::lock(&second, 0);
    wait_until_it_waits(&two.fs, 1);
    dies.signal(Signal::KILL);
    next.wait_until("locked");
    assert!(!dies.end().success());
    assert!(next.end().success());
    two.unmount();
}

#[test]
fn a_process_loses_its_locks_with_any_close_and_an_open_file_keeps_them() {
    let Some((two, [path, second])) = two_with_a_file() else { return };
    let (file, other_mount) = (open(&path), open(&second));
    set_lock(&file, LockBy::Process, F_WRLCK, 0, 1).unwrap();
    set_lock(&file, LockBy::OpenFile, F_WRLCK, 1, 1).unwrap();
    // Opened for reading alone.
    drop(File::open(&path).unwrap());
    set_lock(&other_mount, LockBy::Process, F_WRLCK, 0, 1).unwrap();
    assert!(is_refused(set_lock(&other_mount, LockBy::Process, F_WRLCK, 1, 1)));
    drop(file);
    set_lock(&other_mount, LockBy::ProcessWaiting, F_WRLCK, 1, 1).unwrap();
    drop(other_mount);
    two.unmount();
}

#[test]
fn more_processes_wait_than_requests_are_allowed_and_others_go_on() {
    const WAITING: usize = 12;
    let options =
        MountOptions { threads: 2.try_into().unwrap(), max_requests: 2, ..MountOptions::default() };
    let Some(two) = Two::new(|fs| fs, &options) else { return };
    let path = two.places[0].join("f");
    fs::write(&path, "some bytes").unwrap();
    let file = open(&path);
    rustix::fs::flock(&file, FlockOperation::LockExclusive).unwrap();
    let waiting: Vec<_> = (0..WAITING)
        .map(|_| {
            let path = path.clone();
            std::thread::spawn(move || {
                let file = open(&path);
                rustix::fs::flock(&file, FlockOperation::LockShared).unwrap();
            })
        })
        .collect();
    wait_until_it_waits(&two.fs, WAITING);
    for n in 0..20 {
        fs::write(two.places[0].join(&format!("{n}")), "others").unwrap();
    }
    drop(file);
    waiting.into_iter().for_each(|waits| waits.join().unwrap());
    two.unmount();
}

/// SQLite's protocol (its `os_unix.c`): readers share a range; a writer reserves a byte beside
/// them, then keeps new readers out, then waits until the old ones are gone.
#[test]
fn readers_and_a_writer_lock_as_sqlite_does() {
    const PENDING: i64 = 0x4000_0000;
    const RESERVED: i64 = PENDING + 1;
    const SHARED: i64 = PENDING + 2;
    const SHARED_LEN: i64 = 510;
    let Some((two, paths)) = two_with_a_file() else { return };
    let [reader, writer] = paths.each_ref().map(|path| open(path));
    let set = |file: &File, kind, first, len| set_lock(file, LockBy::Process, kind, first, len);
    let starts_to_read = |file: &File| {
        let pending = set(file, F_RDLCK, PENDING, 1);
        let shared = pending.and_then(|()| set(file, F_RDLCK, SHARED, SHARED_LEN));
        set(file, F_UNLCK, PENDING, 1).unwrap();
        shared
    };
    starts_to_read(&reader).unwrap();
    starts_to_read(&writer).unwrap();
    set(&writer, F_WRLCK, RESERVED, 1).unwrap();
    assert!(is_refused(set(&reader, F_WRLCK, RESERVED, 1)), "there is one writer");
    starts_to_read(&reader).unwrap();
    set(&writer, F_WRLCK, PENDING, 1).unwrap();
    assert!(is_refused(starts_to_read(&reader)), "no reader begins");
    assert!(is_refused(set(&writer, F_WRLCK, SHARED, SHARED_LEN)), "one still reads");
    set(&reader, F_UNLCK, 0, 0).unwrap();
    set(&writer, F_WRLCK, SHARED, SHARED_LEN).unwrap();
    assert!(is_refused(starts_to_read(&reader)), "it writes");
    set(&writer, F_UNLCK, PENDING, 2).unwrap();
    set(&writer, F_RDLCK, SHARED, SHARED_LEN).unwrap();
    starts_to_read(&reader).unwrap();
    drop((reader, writer));
    two.unmount();
}

#[test]
fn a_mount_that_is_cut_off_leaves_no_locks() {
    let Some((two, [path, second])) = two_with_a_file() else { return };
    if !rustix::process::geteuid().is_root() {
        crate::place::skipped("cutting a mount off needs root");
        return;
    }
    let (cut_off, other) = (open(&path), open(&second));
    rustix::fs::flock(&cut_off, FlockOperation::LockExclusive).unwrap();
    let flags = rustix::mount::UnmountFlags::FORCE | rustix::mount::UnmountFlags::DETACH;
    rustix::mount::unmount(two.places[0].path(), flags).unwrap();
    rustix::fs::flock(&other, FlockOperation::LockExclusive).unwrap();
    drop((cut_off, other));
}

/// One that leaves locks to the kernel is asked nothing about them.
#[test]
fn a_file_system_without_locks_leaves_them_to_the_kernel() {
    let Some(Script { place, .. }) = scripted(&MountOptions::default()) else { return };
    let path = place.join("writable");
    let [a, b] = [open(&path), open(&path)];
    rustix::fs::flock(&a, FlockOperation::LockExclusive).unwrap();
    assert!(rustix::fs::flock(&b, FlockOperation::NonBlockingLockShared).is_err());
    // Unlike those of `Locks`, the two kinds do not meet.
    set_lock(&b, LockBy::OpenFile, F_WRLCK, 0, 0).unwrap();
    drop((a, b));
    place.unmount();
}
