//! Mounts of transparent file systems as their users meet them: options, signals, unmounting.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::processes::{atoll, can_mount, run, signal, unmount, until};

/// A new image and the process that serves it, until the test ends.
struct Served {
    image: PathBuf,
    at: PathBuf,
    /// The file that takes what the server process prints.
    log: PathBuf,
    server: Child,
    _temp: tempfile::TempDir,
}

impl Served {
    fn new(options: &[&str]) -> Served {
        let temp = tempfile::tempdir().expect("a directory");
        let [image, at, log] = ["disk.img", "mnt", "log"].map(|name| temp.path().join(name));
        run(atoll().args(["tfs", "mkfs", "--size", "64MiB"]).arg(&image)).ok();
        fs::create_dir(&at).expect("made");
        let mut command = atoll();
        command.args(["tfs", "mount", "--foreground"]).args(options).arg(&image).arg(&at);
        let server = command.stderr(File::create(&log).expect("a file")).spawn().expect("runs");
        until("it is mounted", || mount_options(&at).is_some());
        Served { image, at, log, server, _temp: temp }
    }

    /// Tells the server to end, and waits until it says that the mount is in use.
    fn terminate_in_use(&self) {
        signal(self.server.id(), "TERM");
        let said = || fs::read_to_string(&self.log).expect("there");
        until("it has seen the signal", || said().contains("in use: waiting up to 8 s"));
    }

    /// The code it ended with.
    fn ended(&mut self) -> Option<i32> {
        self.server.wait().expect("it ends").code()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
        let _ = atoll().args(["unmount", "--lazy"]).arg(&self.at).output();
    }
}

/// The options of the mount at this place, if there is one.
fn mount_options(at: &Path) -> Option<String> {
    let table = fs::read_to_string("/proc/self/mountinfo").expect("there");
    let mut lines = table.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    lines.find(|fields| Some(fields[4]) == at.to_str()).map(|fields| fields[5].to_owned())
}

/// The story: `mkdir a; sync` and a crash lost the directory. The kernel does not tell FUSE servers
/// of sync(2), so `sync` with the name of anything on the mount is what the help advises.
#[test]
fn sync_with_the_name_of_the_mount_point_makes_everything_durable() {
    if !can_mount("sync_with_the_name_of_the_mount_point_makes_everything_durable") {
        return;
    }
    let mut served = Served::new(&[]);
    fs::create_dir(served.at.join("a")).expect("made");
    fs::write(served.at.join("a/file"), "text").expect("written");
    let synced = Command::new("sync").arg(&served.at).status();
    assert!(synced.expect("sync runs").success());
    served.server.kill().expect("killed");
    served.ended();
    run(atoll().args(["tfs", "unmount"]).arg(&served.at)).failed(1, &["not closed in order"]);
    run(atoll().args(["tfs", "mount"]).arg(&served.image).arg(&served.at)).ok();
    let kept = fs::read(served.at.join("a/file"));
    unmount(atoll().args(["tfs", "unmount"]).arg(&served.at));
    assert_eq!(kept.expect("there"), b"text");
}

/// The story: at the end of a service, or of the machine, writing processes got ENOTCONN.
#[test]
fn a_writer_can_finish_when_the_server_is_told_to_end() {
    if !can_mount("a_writer_can_finish_when_the_server_is_told_to_end") {
        return;
    }
    let mut served = Served::new(&[]);
    let mut file = File::create(served.at.join("file")).expect("a file");
    file.write_all(b"before").expect("written");
    served.terminate_in_use();
    file.write_all(b" and after").expect("written");
    file.sync_all().expect("synced");
    drop(file);
    assert_eq!(served.ended(), Some(0));
    assert_eq!(mount_options(&served.at), None);
    run(atoll().args(["tfs", "check"]).arg(&served.image)).ok();
    run(atoll().args(["tfs", "mount"]).arg(&served.image).arg(&served.at)).ok();
    let kept = fs::read(served.at.join("file")).expect("there");
    unmount(atoll().args(["tfs", "unmount"]).arg(&served.at));
    assert_eq!(kept, b"before and after");
}

#[test]
fn a_second_signal_ends_a_server_at_once() {
    if !can_mount("a_second_signal_ends_a_server_at_once") {
        return;
    }
    let mut served = Served::new(&[]);
    let file = File::create(served.at.join("file")).expect("a file");
    served.terminate_in_use();
    signal(served.server.id(), "TERM");
    assert_eq!(served.ended(), Some(130));
    assert_eq!(file.set_len(7).map_err(|error| error.raw_os_error()), Err(Some(107)), "cut off");
    drop(file);
    assert_eq!(mount_options(&served.at), None, "no dead mount is left");
    let sound = run(atoll().args(["tfs", "check", "--json"]).arg(&served.image)).ok().json();
    assert_eq!((&sound["sound"], &sound["files"]), (&true.into(), &1.into()), "{sound}");
}

/// The story: `atoll tfs unmount` advised to run `atoll unmount --lazy`.
#[test]
fn an_unmount_of_a_busy_mount_says_which_command_does_not_wait() {
    if !can_mount("an_unmount_of_a_busy_mount_says_which_command_does_not_wait") {
        return;
    }
    let served = Served::new(&[]);
    let _file = File::create(served.at.join("file")).expect("a file");
    run(atoll().args(["tfs", "unmount"]).arg(&served.at))
        .failed(1, &["in use", "`atoll tfs unmount --lazy`"]);
    run(atoll().arg("unmount").arg(&served.at)).failed(1, &["in use", "`atoll unmount --lazy`"]);
}

/// The story: an unmount waited two minutes for a container that had a copy of the mount, and
/// said nothing of it.
#[test]
fn an_unmount_says_that_another_mount_namespace_keeps_the_mount() {
    if !can_mount("an_unmount_says_that_another_mount_namespace_keeps_the_mount") {
        return;
    }
    let mut served = Served::new(&[]);
    let apart = ["--mount", "--propagation", "private", "sleep", "3600"];
    let root = rustix::process::geteuid().is_root();
    let Some(mut other) = root.then(|| Command::new("unshare").args(apart).spawn().ok()).flatten()
    else {
        let _ = writeln!(std::io::stderr(), "\nSKIPPED: namespaces need root and unshare");
        return;
    };
    let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/mnt")).expect("runs");
    let number = other.id().to_string();
    until("it has its own", || namespace(&number) != namespace("self"));
    let log = served.image.with_extension("unmount");
    let unmount = atoll()
        .args(["tfs", "unmount"])
        .arg(&served.at)
        .stderr(Stdio::from(File::create(&log).expect("a file")))
        .spawn();
    let expected = format!("still mounted in the mount namespace of process {number}");
    until("it says so", || fs::read_to_string(&log).expect("there").contains(&expected));
    other.kill().and_then(|()| other.wait()).expect("killed");
    assert!(unmount.expect("runs").wait().expect("ends").success());
    assert_eq!(served.ended(), Some(0));
}

#[test]
fn mount_options_are_what_the_kernel_shows_and_what_happens() {
    if !can_mount("mount_options_are_what_the_kernel_shows_and_what_happens") {
        return;
    }
    for (options, shown, kept) in [
        (&[][..], "rw,nosuid,nodev,relatime", false),
        (&["-o", "noatime,nosuid", "-o", "nodev"], "rw,nosuid,nodev,noatime", true),
        (&["-o", "noatime,relatime"], "rw,nosuid,nodev,relatime", false),
    ] {
        let served = Served::new(options);
        assert_eq!(mount_options(&served.at).as_deref(), Some(shown));
        let file = served.at.join("file");
        fs::write(&file, "text").expect("written");
        let long_ago = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000_000);
        let times = fs::FileTimes::new().set_accessed(long_ago);
        let open = File::options().write(true).open(&file).expect("opens");
        open.set_times(times).expect("set");
        drop(open);
        let cached = File::open(&file).expect("opens");
        rustix::fs::fadvise(&cached, 0, None, rustix::fs::Advice::DontNeed).expect("dropped");
        fs::read(&file).expect("read");
        let atime = fs::metadata(&file).expect("there").atime();
        assert_eq!(atime == 1_000_000_000, kept, "{options:?}");
    }
    if !rustix::process::geteuid().is_root() {
        let _ = writeln!(std::io::stderr(), "\nSKIPPED: only root mounts with suid and dev");
        return;
    }
    let served = Served::new(&["-o", "suid,dev"]);
    assert_eq!(mount_options(&served.at).as_deref(), Some("rw,relatime"));
}
