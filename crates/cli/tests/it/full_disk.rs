//! Logs that cannot be written and disks that are full: nodes and mounts go on, and say what is wrong.
//!
//! The story: a mount logs to a file in its node's directory. When that disk was full, the logger's own message
//! about it could not be written either, and panicked. A shared mount vanished, and programs went on writing into the
//! directory below; a mount that one writer has lost its task that writes the spool, and waited for it with each call.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::processes::{
    NodeProcess, Ring, assert_holds, assert_same, assert_same_contents, atoll, can_mount,
    make_tree, noise, run, signal, unmount, until,
};
use crate::volumes::status_of;

/// Each write to it finds the disk full.
const FULL: &str = "/dev/full";

/// Gives the log of the next mount at a place to a disk without room.
fn fill_log(node: &NodeProcess, mountpoint: &Path) {
    let name = String::from_utf8_lossy(mountpoint.as_os_str().as_bytes()).into_owned();
    let name: Vec<char> = name.trim_matches('/').replace(['/', ' '], "-").chars().collect();
    let tail: String = name[name.len().saturating_sub(60)..].iter().collect();
    fs::create_dir_all(node.dir.join("logs")).expect("a directory");
    symlink(FULL, node.dir.join(format!("logs/mount-{tail}.log"))).expect("a link");
}

/// The processes that serve a mount at a place.
fn servers(at: &Path) -> Vec<u32> {
    let serves = |process: &fs::DirEntry| {
        let arguments = fs::read(process.path().join("cmdline")).unwrap_or_default();
        let arguments: Vec<&[u8]> = arguments.split(|byte| *byte == 0).collect();
        arguments.contains(&at.as_os_str().as_bytes()) && arguments.contains(&&b"--announce"[..])
    };
    let processes = fs::read_dir("/proc").expect("processes").flatten().filter(serves);
    processes.filter_map(|process| process.file_name().to_str()?.parse().ok()).collect()
}

/// Unmounts; nothing is left of the mount, and nothing was written below it.
#[track_caller]
fn ends_clean(at: &Path) {
    unmount(atoll().arg("unmount").arg(at));
    assert_eq!(fs::read_dir(at).expect("there").count(), 0, "something lies below the mount");
    until("its process has ended", || servers(at).is_empty());
}

/// A ring whose first node has its log on a full disk, and says everything there.
fn ring_with_full_log(count: usize) -> Ring {
    let mut ring = Ring::of(count);
    let node = &mut ring.nodes[0];
    assert_eq!(node.stop(), Some(0));
    let log = node.dir.with_extension("log");
    fs::remove_file(&log).expect("a log");
    symlink(FULL, log).expect("a link");
    node.restart_with(&["-vvv"], "");
    node.wait_for(&["joined"]);
    ring
}

#[test]
fn no_mount_and_no_node_needs_its_log() {
    if !can_mount("no_mount_and_no_node_needs_its_log") {
        return;
    }
    let mut ring = ring_with_full_log(3);
    let (source, address) = ring.publish_tree();
    for (name, kind) in [("work", "--encrypt"), ("team", "--shared")] {
        ring.nodes[0].atoll(["volume", "create", kind, name]).ok();
    }
    let mut mounts = Vec::new();
    for target in [&address, "work", "team"] {
        // As `Ring::mount` names it.
        fill_log(&ring.nodes[0], &ring.path(&format!("mount{}", mounts.len())));
        // Without blocks in memory, a mount that reads asks its node each time.
        let cache = if target == address { "0" } else { "32MiB" };
        let mount = ring.mount(0, target, &["-vvv", "--cache", cache]);
        assert!(
            fs::read_dir(ring.nodes[0].dir.join("logs"))
                .expect("logs")
                .flatten()
                .all(|log| fs::symlink_metadata(log.path()).expect("there").is_symlink()),
            "its log is another"
        );
        mounts.push(mount);
    }
    assert_same(&source, &mounts[0]);
    for mount in &mounts[1..] {
        make_tree(&mount.join("tree"));
        fs::write(mount.join("big"), noise(3 << 20, 5)).expect("is written");
    }
    // All of them have something to say of that.
    ring.nodes[0].kill();
    fs::read(mounts[0].join("docs/deep/deeper/large.bin")).expect_err("nobody has it");
    for mount in &mounts[1..] {
        fs::write(mount.join("offline"), "is spooled").expect("is spooled");
    }
    ring.nodes[0].restart_with(&["-vvv"], "");
    ring.nodes[0].wait_for(&["joined"]);
    until("the first mount works again", || fs::read(mounts[0].join("run.sh")).is_ok());
    assert_same(&source, &mounts[0]);
    for mount in &mounts[1..] {
        until("all is on the ring", || status_of(mount) == "ok");
        assert_same_contents(&source, &mount.join("tree"));
        assert_holds(&mount.join("big"), &noise(3 << 20, 5));
        assert_holds(&mount.join("offline"), b"is spooled");
    }
    mounts.iter().for_each(|mount| ends_clean(mount));
    // Where there is no room even for the log's name.
    let logs = ring.nodes[0].dir.join("logs");
    fs::remove_dir_all(&logs).expect("removed");
    fs::write(&logs, "in the way").expect("a file");
    let said = run(ring.nodes[0].command(["mount", "work"]).arg(&mounts[1])).ok();
    assert!(said.stderr.contains("works without its log"), "{said:?}");
    assert_holds(&mounts[1].join("offline"), b"is spooled");
    ends_clean(&mounts[1]);
    assert_eq!(ring.nodes[0].stop(), Some(0));
}

#[test]
fn a_mount_of_a_tfs_needs_no_log() {
    if !can_mount("a_mount_of_a_tfs_needs_no_log") {
        return;
    }
    let temp = tempfile::tempdir().expect("a directory");
    let [image, at] = ["disk.img", "mnt"].map(|name| temp.path().join(name));
    run(atoll().args(["tfs", "mkfs", "--size", "64MiB"]).arg(&image)).ok();
    fs::create_dir(&at).expect("made");
    let mut mount = atoll();
    mount.args(["tfs", "mount", "-vvv", "--log", FULL]).arg(&image).arg(&at);
    run(&mut mount).ok();
    make_tree(&at.join("tree"));
    let other = temp.path().join("other");
    make_tree(&other);
    assert_same_contents(&other, &at.join("tree"));
    ends_clean(&at);
    run(atoll().args(["tfs", "check"]).arg(&image)).ok();
}

/// A supervisor that has died leaves a pipe that nobody reads, or that is closed.
#[test]
fn a_node_needs_nobody_who_reads_what_it_says() {
    let temp = tempfile::tempdir().expect("a directory");
    let pipe = temp.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs").success());
    let source = temp.path().join("tree");
    make_tree(&source);
    let pipe = pipe.to_str().expect("text");
    let outputs = [
        format!("exec \"$@\" >{FULL} 2>{FULL}"),
        "exec \"$@\" >&- 2>&-".to_owned(),
        // Opened for both, a pipe takes 64 KiB without a reader, and no more.
        format!("exec \"$@\" 1<>{pipe} 2<>{pipe}"),
    ];
    for (i, shell) in outputs.iter().enumerate() {
        let mut by = Command::new("sh");
        by.args(["-c", shell, "sh", "env"]);
        let arguments = ["-vvv", "--listen", "127.0.0.1:0", "--storage", "2GiB"];
        let dir = temp.path().join(format!("node{i}"));
        let mut node = NodeProcess::start_by(by, dir, &arguments, "");
        node.wait_for(&["joined"]);
        let address = run(node.command(["publish"]).arg(&source)).ok().last_line().to_owned();
        let copy = temp.path().join(format!("copy{i}"));
        run(node.command(["get", &address]).arg(&copy)).ok();
        assert_same(&source, &copy);
        assert_eq!(node.stop(), Some(0), "{shell}");
    }
}

#[test]
fn a_command_needs_nobody_who_reads_its_messages() {
    let temp = tempfile::tempdir().expect("a directory");
    let mut command = atoll();
    command.args(["tfs", "mkfs", "--size", "64MiB"]).arg(temp.path().join("disk.img"));
    let full = File::options().write(true).open(FULL).expect("there");
    let ended = command.stdout(Stdio::null()).stderr(full).status().expect("runs");
    assert_eq!(ended.code(), Some(0));
    let full = File::options().write(true).open(FULL).expect("there");
    let ended = command.stdout(Stdio::null()).stderr(full).status().expect("runs");
    assert_eq!(ended.code(), Some(2), "it is there already");
}

/// A small disk, until the test ends.
struct SmallDisk {
    at: PathBuf,
}

impl SmallDisk {
    /// `None` if this user may not make one; says so loudly.
    fn new(at: PathBuf, size: &str, test: &str) -> Option<SmallDisk> {
        fs::create_dir(&at).expect("a directory");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"]).arg(&at);
        if run(&mut mount).code == Some(0) {
            return Some(SmallDisk { at });
        }
        // Past the test harness, which would keep it to itself.
        let _ = writeln!(std::io::stderr(), "\nSKIPPED {test}: no tmpfs can be mounted here");
        None
    }

    fn filler(&self) -> PathBuf {
        self.at.join("filler")
    }

    /// Takes all room that is left.
    fn fill(&self) {
        let mut filler =
            File::options().create(true).append(true).open(self.filler()).expect("opens");
        for size in [1 << 16, 1 << 12, 1] {
            while filler.write_all(&vec![1; size]).is_ok() {}
        }
    }

    fn make_room(&self) {
        fs::remove_file(self.filler()).expect("removed");
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.at).status();
    }
}

/// Moves a node that is stopped, with all it has.
fn move_node(node: &mut NodeProcess, to: PathBuf) {
    run(Command::new("cp").arg("-a").arg(&node.dir).arg(&to)).ok();
    fs::remove_dir_all(&node.dir).expect("removed");
    node.dir = to;
}

#[test]
fn mounts_and_nodes_outlive_a_full_disk() {
    if !can_mount("mounts_and_nodes_outlive_a_full_disk") {
        return;
    }
    let mut ring = Ring::of(4);
    let small = ring.path("small");
    let Some(disk) = SmallDisk::new(small, "200m", "mounts_and_nodes_outlive_a_full_disk") else {
        return;
    };
    let (source, address) = ring.publish_tree();
    ring.nodes[0].atoll(["volume", "create", "--shared", "team"]).ok();
    let code = ring.nodes[0].atoll(["volume", "invite", "team"]).ok().last_line().to_owned();
    let theirs = ring.mount(0, "team", &[]);
    // With its log beside its directory.
    assert_eq!(ring.nodes[1].stop(), Some(0));
    move_node(&mut ring.nodes[1], disk.at.join("node"));
    ring.nodes[1].restart();
    ring.nodes[1].atoll(["volume", "join", &code, "ours"]).ok();
    let work = ring.nodes[1].atoll(["volume", "create", "work"]).ok().last_line().to_owned();
    let reads = ring.mount(1, &address, &["-vvv", "--cache", "0"]);
    let owned = ring.mount(1, "work", &["-vvv"]);
    let shared = ring.mount(1, "ours", &["-vvv"]);
    let (image, tfs) = (ring.path("disk.img"), ring.path("tfs"));
    run(atoll().args(["tfs", "mkfs", "--size", "64MiB"]).arg(&image)).ok();
    fs::create_dir(&tfs).expect("made");
    let mut mount = atoll();
    mount.args(["tfs", "mount", "-vvv", "--log"]).arg(disk.at.join("tfs.log"));
    run(mount.arg(&image).arg(&tfs)).ok();
    disk.fill();

    // What is closed without an error is there, whatever becomes of the rest.
    let mut closed = Vec::new();
    for (i, mount) in [&owned, &shared, &tfs].into_iter().cycle().take(30).enumerate() {
        let file = mount.join(format!("file{i}"));
        if fs::write(&file, noise(20_000, i as u64)).is_ok() {
            closed.push((file, noise(20_000, i as u64)));
        }
    }
    closed.iter().for_each(|(file, bytes)| assert_holds(file, bytes));
    assert!(closed.len() >= 10, "a TFS elsewhere has room");
    for mount in [&owned, &shared, &reads] {
        status_of(mount);
        assert_eq!(servers(mount).len(), 1, "{}", mount.display());
    }
    until("what is published can be read", || fs::read(reads.join("run.sh")).is_ok());
    disk.make_room();
    let sync = |mount: &Path| File::open(mount).and_then(|root| root.sync_all());
    for mount in [&owned, &shared] {
        let file = mount.join("later");
        until("it can be written again", || fs::write(&file, "later").is_ok());
        until("it is on the ring", || sync(mount).is_ok());
        closed.push((file, b"later".to_vec()));
    }
    closed.iter().for_each(|(file, bytes)| assert_holds(file, bytes));
    assert_same(&source, &reads);
    until("other members see it", || fs::read(theirs.join("later")).is_ok_and(|is| is == b"later"));
    let copy = ring.path("copy");
    run(ring.nodes[2].command(["get", &work]).arg(&copy)).ok();
    for (file, bytes) in closed.iter().filter(|(file, _)| file.starts_with(&owned)) {
        let name = file.file_name().expect("it has one");
        assert_holds(&copy.join(name), bytes);
    }
    [&owned, &shared, &reads].into_iter().for_each(|mount| ends_clean(mount));
    ends_clean(&tfs);
    run(atoll().args(["tfs", "check"]).arg(&image)).ok();
    assert_eq!(ring.nodes[1].stop(), Some(0));
}

/// The story: the directory of a node was moved while a shared volume was mounted. `atoll unmount` returned 0, and
/// what had been written since was gone.
#[test]
fn a_shared_volume_is_not_unmounted_over_files_that_are_in_memory_alone() {
    if !can_mount("a_shared_volume_is_not_unmounted_over_files_that_are_in_memory_alone") {
        return;
    }
    let mut ring = Ring::of(3);
    ring.nodes[0].atoll(["volume", "create", "team", "--shared"]).ok();
    let mine = ring.mount(0, "team", &[]);
    fs::create_dir(mine.join("docs")).expect("is made");
    fs::write(mine.join("before"), "online").expect("is written");
    ring.nodes[0].kill();
    let (here, away) = (ring.nodes[0].dir.clone(), ring.path("away"));
    fs::rename(&here, &away).expect("is moved");
    for name in ["docs/plan.txt", "before"] {
        let mut file = File::create(mine.join(name)).expect("is made in memory");
        file.write_all(b"in memory").expect("there is room in memory");
        file.sync_all().expect_err("it can be stored nowhere");
    }
    let unmounted = || run(atoll().arg("unmount").arg(&mine));
    let named = ["not stored yet", "in memory alone", "docs/plan.txt", "before", "--lazy", "Copy"];
    unmounted().failed(5, &named);
    assert_eq!(fs::read(mine.join("docs/plan.txt")).expect("it is mounted"), b"in memory");
    fs::rename(&away, &here).expect("is moved back");
    let said = unmounted().ok();
    assert!(said.stderr.contains("wait in the spool"), "{said:?}");
    assert_eq!(fs::read_dir(&mine).expect("there").count(), 0, "unmounted");
    until("its process has ended", || servers(&mine).is_empty());
    ring.nodes[0].restart();
    let again = ring.mount(0, "team", &[]);
    for name in ["docs/plan.txt", "before"] {
        assert_holds(&again.join(name), b"in memory");
    }
}

/// As a panic ends it. Nothing is written into the directory below, and nothing that was closed is lost.
#[test]
fn a_mount_whose_process_has_died_fails_each_call_until_it_is_unmounted() {
    if !can_mount("a_mount_whose_process_has_died_fails_each_call_until_it_is_unmounted") {
        return;
    }
    // ENOTCONN, and ECONNABORTED of a call that the kernel had begun to pass on.
    let is_dead = |error: std::io::Error| matches!(error.raw_os_error(), Some(103 | 107));
    let mut ring = Ring::of(1);
    ring.nodes[0].atoll(["volume", "create", "work"]).ok();
    ring.nodes[0].atoll(["volume", "create", "team", "--shared"]).ok();
    for name in ["work", "team"] {
        let mount = ring.mount(0, name, &[]);
        fs::write(mount.join("file"), "closed").expect("is written");
        servers(&mount).into_iter().for_each(|server| signal(server, "ABRT"));
        until("it has died", || servers(&mount).is_empty());
        let failed = fs::write(mount.join("more"), "x").expect_err("nobody serves it");
        assert!(is_dead(failed), "writing");
        assert!(fs::read_dir(&mount).is_err_and(is_dead), "listing");
        let said = run(atoll().arg("unmount").arg(&mount)).ok();
        assert!(said.stderr.contains("had died") && said.stderr.contains("spool"), "{said:?}");
        assert_eq!(fs::read_dir(&mount).expect("there").count(), 0);
        let again = ring.mount(0, name, &[]);
        assert_holds(&again.join("file"), b"closed");
    }
}
