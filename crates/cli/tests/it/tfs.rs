//! Transparent file systems end to end: made, mounted, filled, contributed, checked.

use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::processes::{
    Ring, assert_same, atoll, can_mount, make_tree, noise, run, unmount, until,
};

/// A mount that goes away with its test.
pub(crate) struct Mounted(PathBuf);

impl Mounted {
    pub(crate) fn new(image: &Path, at: &Path) -> Mounted {
        fs::create_dir_all(at).expect("a directory");
        run(atoll().args(["tfs", "mount"]).arg(image).arg(at)).ok();
        Mounted(at.to_path_buf())
    }

    pub(crate) fn unmount(self) {
        unmount(atoll().args(["tfs", "unmount"]).arg(&self.0));
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = atoll().args(["unmount", "--lazy"]).arg(&self.0).output();
    }
}

/// `e2fsck`, where there is one.
fn e2fsck_finds_nothing(image: &Path) {
    let said = Command::new("e2fsck").arg("-fn").arg(image).output();
    let Ok(said) = said else {
        eprintln!("SKIPPED: e2fsck is not installed");
        return;
    };
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stdout));
}

fn json(text: &str) -> serde_json::Value {
    serde_json::from_str(text).expect("one JSON object")
}

#[test]
fn a_tree_with_transparent_files_costs_no_room_and_leaves_a_clean_disk() {
    if !can_mount("a_tree_with_transparent_files_costs_no_room_and_leaves_a_clean_disk") {
        return;
    }
    let temp = tempfile::tempdir().expect("a directory");
    let [image, source, at] = ["disk.img", "tree", "mnt"].map(|name| temp.path().join(name));
    make_tree(&source);
    run(atoll().args(["tfs", "mkfs", "--size", "64MiB", "--label", "test"]).arg(&image)).ok();
    let again = run(atoll().args(["tfs", "mkfs", "--size", "64MiB"]).arg(&image));
    again.failed(2, &["exists", "--force"]);
    let mount = Mounted::new(&image, &at);
    let status = Command::new("cp").arg("-a").arg(&source).arg(at.join("tree")).status();
    assert!(status.expect("cp runs").success());
    assert_same(&source, &at.join("tree"));

    // A file made in a transparent directory, or that becomes transparent, counts as free. (The
    // file's own inode and name are ordinary.)
    let free = || rustix::fs::statvfs(&at).expect("mounted").f_bfree;
    let given = at.join("given");
    fs::create_dir(&given).expect("a directory");
    run(atoll().args(["tfs", "set", "--transparent"]).arg(&given)).ok();
    fs::write(given.join("first"), b"").expect("a file");
    let before = free();
    let large = noise(8 << 20, 3);
    fs::write(given.join("large"), &large).expect("a transparent file");
    assert!(before - free() <= 2, "{before} blocks were free, {} are", free());
    fs::write(at.join("moved"), &large).expect("an ordinary file");
    assert!(before - free() >= 2048, "an ordinary file takes room");
    let owner = fs::metadata(at.join("moved")).expect("there").uid();
    run(atoll().args(["tfs", "set", "--transparent"]).arg(at.join("moved"))).ok();
    // Freed blocks rest until it is safe to use them again.
    fs::File::open(&at).and_then(|top| top.sync_all()).expect("synced");
    assert!(before - free() <= 6, "{before} blocks were free, {} are", free());
    assert_eq!(fs::metadata(at.join("moved")).expect("there").uid(), owner);
    for path in [given.join("large"), at.join("moved")] {
        assert!(fs::read(&path).expect("reads") == large, "its own bytes");
    }
    run(atoll().args(["tfs", "set", "--ordinary"]).arg(at.join("moved"))).ok();
    assert!(before - free() >= 2048, "and ordinary again");

    fs::File::open(&at).and_then(|top| top.sync_all()).expect("synced");
    let stat = run(atoll().args(["tfs", "stat", "--json"]).arg(&at)).ok().stdout;
    let stat = json(&stat);
    assert_eq!(stat["transparent_blocks"], 2048);
    assert_eq!(stat["transparent_files"], 2);
    let shown = run(atoll().args(["tfs", "stat"]).arg(&at)).ok().stdout;
    assert!(shown.contains("8.0 MiB in 2 files"), "{shown}");
    let cleaned = run(atoll().args(["tfs", "clean", "--json"]).arg(&at)).ok().stdout;
    assert_eq!(json(&cleaned)["files"], 0, "nothing was lost");
    let map = run(atoll().args(["tfs", "map", "--json", "--cells", "50"]).arg(&at)).ok().stdout;
    let map = json(&map);
    let transparent = map["cells"].as_array().expect("cells").iter();
    let transparent: u64 = transparent.map(|c| c["transparent"].as_u64().expect("a number")).sum();
    assert_eq!(transparent, 2048);

    let busy = run(atoll().args(["tfs", "check"]).arg(&image));
    busy.failed(1, &["in use", "unmount"]);
    mount.unmount();
    // The next program need not wait: unmounted is closed.
    let check = ["tfs", "check", "--tags", "--json"];
    let sound = json(&run(atoll().args(check).arg(&image)).ok().stdout);
    assert_eq!((&sound["sound"], &sound["lost_files"]), (&true.into(), &0.into()), "{sound}");
    assert_eq!(sound["transparent_files"], 2);
    e2fsck_finds_nothing(&image);
    let unmounted = json(&run(atoll().args(["tfs", "stat", "--json"]).arg(&image)).ok().stdout);
    assert_eq!(unmounted["free_blocks"], stat["free_blocks"]);
    let svg = temp.path().join("map.svg");
    run(atoll().args(["tfs", "map", "--out"]).arg(&svg).arg(&image)).ok();
    assert!(fs::read_to_string(&svg).expect("drawn").starts_with("<"), "a picture");

    let mount = Mounted::new(&image, &at);
    assert_same(&source, &at.join("tree"));
    assert!(fs::read(given.join("large")).expect("reads") == large, "it was not lost");
    mount.unmount();
}

#[test]
fn what_is_no_tfs_is_told_so() {
    let temp = tempfile::tempdir().expect("a directory");
    let file = temp.path().join("file");
    fs::write(&file, vec![7; 1 << 20]).expect("a file");
    run(atoll().args(["tfs", "check"]).arg(&file)).failed(1, &["cannot check"]);
    run(atoll().args(["tfs", "stat"]).arg(&file)).failed(1, &["cannot use"]);
    run(atoll().args(["tfs", "stat"]).arg(temp.path())).failed(4, &["not on a mounted TFS"]);
    run(atoll().args(["tfs", "set", "--transparent"]).arg(&file))
        .failed(1, &["cannot make", "not on a mounted TFS"]);
    run(atoll().args(["tfs", "set"]).arg(&file)).failed(2, &["--transparent"]);
    run(atoll().args(["tfs", "mkfs"]).arg(&file)).failed(2, &["something on it", "--force"]);
    run(atoll().args(["tfs", "mkfs"]).arg(temp.path().join("none"))).failed(2, &["--size"]);
    assert!(fs::read(&file).expect("there") == vec![7; 1 << 20], "nothing was written");
    run(atoll().args(["tfs", "stat"]).arg(temp.path().join("none"))).failed(4, &["cannot open"]);
    let map = ["tfs", "map", "--out", "map.pdf"];
    run(atoll().args(map).arg(&file)).failed(2, &[".svg", ".png"]);
}

/// The story: `unmount` came back while its server still wrote; a check of the image then found
/// it in use, or damaged.
#[test]
fn an_image_is_closed_when_unmount_comes_back() {
    if !can_mount("an_image_is_closed_when_unmount_comes_back") {
        return;
    }
    let temp = tempfile::tempdir().expect("a directory");
    // The kernel's table has names of its own for these.
    let [image, at] = ["a disk\t.img", "a mount"].map(|name| temp.path().join(name));
    run(atoll().args(["tfs", "mkfs", "--size", "64MiB"]).arg(&image)).ok();
    for (round, command) in
        [&["tfs", "unmount"][..], &["unmount"], &["tfs", "umount"]].iter().enumerate()
    {
        let mount = Mounted::new(&image, &at);
        for n in 0..400 {
            fs::write(at.join(format!("{round} {n}")), noise(20_000, n)).expect("written");
        }
        unmount(atoll().args(*command).arg(&at));
        e2fsck_finds_nothing(&image);
        run(atoll().args(["tfs", "check"]).arg(&image)).ok();
        drop(mount);
    }
    run(atoll().args(["tfs", "unmount"]).arg(&at)).failed(4, &["nothing is mounted"]);
}

/// One whose server was killed is taken away all the same, and says that it is not whole.
#[test]
fn a_mount_whose_server_died_is_taken_away_and_mounts_again() {
    if !can_mount("a_mount_whose_server_died_is_taken_away_and_mounts_again") {
        return;
    }
    let temp = tempfile::tempdir().expect("a directory");
    let [image, at] = ["disk.img", "mnt"].map(|name| temp.path().join(name));
    run(atoll().args(["tfs", "mkfs", "--size", "64MiB"]).arg(&image)).ok();
    fs::create_dir(&at).expect("made");
    let mut server =
        atoll().args(["tfs", "mount", "--foreground"]).arg(&image).arg(&at).spawn().expect("runs");
    until("it is mounted", || is_mounted(&at));
    fs::write(at.join("kept"), b"kept").expect("written");
    fs::File::open(&at).and_then(|top| top.sync_all()).expect("synced");
    server.kill().expect("killed");
    server.wait().expect("dead");
    run(atoll().args(["tfs", "unmount"]).arg(&at)).failed(1, &["not closed in order", "mount"]);
    let mount = Mounted::new(&image, &at);
    assert_eq!(fs::read(at.join("kept")).expect("there"), b"kept");
    mount.unmount();
    e2fsck_finds_nothing(&image);
}

fn is_mounted(at: &Path) -> bool {
    let table = fs::read_to_string("/proc/self/mountinfo").expect("there");
    table.lines().any(|line| line.split(' ').nth(4) == at.to_str())
}

#[test]
fn the_target_loss_rate_is_set_on_a_mount_and_on_an_image() {
    let temp = tempfile::tempdir().expect("a directory");
    let [image, at] = ["disk.img", "mnt"].map(|name| temp.path().join(name));
    run(atoll().args(["tfs", "mkfs", "--size", "64MiB"]).arg(&image)).ok();
    let set =
        |rate: &str, of: &Path| run(atoll().args(["tfs", "set", "--target-loss", rate]).arg(of));
    let rate = |of: &Path| {
        let stat = json(&run(atoll().args(["tfs", "stat", "--json"]).arg(of)).ok().stdout);
        stat["target_loss_bytes_per_sec"].as_f64()
    };
    assert_eq!(rate(&image), Some(100.0), "as the design says");
    set("2KiB/s", &image).ok();
    assert_eq!(rate(&image), Some(2048.0));
    set("-5", &image).failed(2, &["a rate is"]);
    run(atoll().args(["tfs", "set", "--target-loss", "1", "--ordinary"]).arg(&image))
        .failed(2, &["cannot be used with"]);
    set("1", temp.path()).failed(4, &["not on a mounted TFS"]);
    if !can_mount("the_target_loss_rate_is_set_on_a_mount_and_on_an_image") {
        return;
    }
    let mount = Mounted::new(&image, &at);
    assert_eq!(rate(&at), Some(2048.0), "it is kept");
    set("0", &at).ok();
    assert_eq!(rate(&at), Some(0.0));
    let shown = run(atoll().args(["tfs", "stat"]).arg(&at)).ok().stdout;
    assert!(shown.contains("0 B/s may be lost"), "{shown}");
    fs::create_dir(at.join("below")).expect("made");
    set("7", &at.join("below")).failed(2, &["Name the mount point"]);
    mount.unmount();
    assert_eq!(rate(&image), Some(0.0));
}

/// An error number says nothing; `stat` says what was meant.
#[test]
fn what_is_damaged_is_told_by_stat() {
    if !can_mount("what_is_damaged_is_told_by_stat") {
        return;
    }
    let temp = tempfile::tempdir().expect("a directory");
    let [image, at] = ["disk.img", "mnt"].map(|name| temp.path().join(name));
    run(atoll().args(["tfs", "mkfs", "--size", "64MiB"]).arg(&image)).ok();
    let mount = Mounted::new(&image, &at);
    fs::write(at.join("victim"), noise(200_000, 5)).expect("written");
    let number = fs::metadata(at.join("victim")).expect("there").ino();
    let told = json(&run(atoll().args(["tfs", "stat", "--json"]).arg(&at)).ok().stdout);
    assert!(told.get("met").is_none(), "{told}");
    mount.unmount();
    // Its first pointer leads out of the file system.
    let bytes = fs::read(&image).expect("read");
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four"));
    let per_group = u64::from(word(1024 + 40));
    assert!(number <= per_group, "in the first group");
    let table = u64::from(word(4096 + 8)) * 4096;
    let inode_bytes = u64::from(word(1024 + 88) & 0xffff);
    let pointer = table + (number - 1) * inode_bytes + 40;
    let file = fs::File::options().write(true).open(&image).expect("opens");
    std::os::unix::fs::FileExt::write_all_at(&file, &u32::MAX.to_le_bytes(), pointer)
        .expect("broken");
    drop(file);

    let mount = Mounted::new(&image, &at);
    fs::read(at.join("victim")).expect_err("it is damaged");
    let shown = run(atoll().args(["tfs", "stat"]).arg(&at)).ok().stdout;
    let trouble = shown.lines().find(|line| line.contains("trouble")).expect(&shown);
    assert!(trouble.contains("damaged") && trouble.contains("e2fsck"), "{trouble}");
    assert!(trouble.contains(&u32::MAX.to_string()), "it says which block: {trouble}");
    let told = json(&run(atoll().args(["tfs", "stat", "--json"]).arg(&at)).ok().stdout);
    assert_eq!(told["met"].as_array().map(Vec::len), Some(1), "{told}");
    mount.unmount();
}

/// They were left out of listings with attributes: a backup lost files and said nothing.
#[test]
fn programs_name_the_damaged_files_that_they_cannot_read() {
    if !can_mount("programs_name_the_damaged_files_that_they_cannot_read") {
        return;
    }
    if Command::new("debugfs").arg("-V").output().is_err() {
        eprintln!("SKIPPED: debugfs is not installed");
        return;
    }
    let temp = tempfile::tempdir().expect("a directory");
    let [image, at] = ["disk.img", "mnt"].map(|name| temp.path().join(name));
    run(atoll().args(["tfs", "mkfs", "--size", "64MiB"]).arg(&image)).ok();
    let mount = Mounted::new(&image, &at);
    fs::create_dir_all(at.join("top/damaged-directory")).expect("directories");
    for name in ["top/sound", "top/damaged-file", "top/damaged-directory/below"] {
        fs::write(at.join(name), noise(20_000, 3)).expect("written");
    }
    mount.unmount();
    let commands = temp.path().join("commands");
    let damage = "sif /top/damaged-file size 0xffffffffffff\n\
                  sif /top/damaged-directory block[0] 99999999\n";
    fs::write(&commands, damage).expect("written");
    let done = Command::new("debugfs").arg("-w").arg("-f").arg(&commands).arg(&image).status();
    assert!(done.expect("it runs").success(), "debugfs");

    let mount = Mounted::new(&image, &at);
    // In one shell: each process that a test starts holds, for a moment, what others have open.
    let script = format!(
        "cd {0}/mnt
         ls -l top 2> ../said.ls || touch ../failed.ls
         find top 2> ../said.find || touch ../failed.find
         tar cf ../copy.tar top 2> ../said.tar || touch ../failed.tar
         cp -a top ../copy 2> ../said.cp || touch ../failed.cp",
        temp.path().display()
    );
    assert!(Command::new("sh").args(["-c", &script]).output().expect("it runs").status.success());
    for program in ["ls", "find", "tar", "cp"] {
        let said = fs::read_to_string(temp.path().join(format!("said.{program}")));
        let said = said.expect("written");
        assert!(temp.path().join(format!("failed.{program}")).exists(), "{program} fails: {said}");
        assert!(said.contains("damaged-directory"), "{program}: {said}");
        // `find` looks at no file, only at its kind in the directory.
        assert!(program == "find" || said.contains("damaged-file"), "{program}: {said}");
    }
    assert!(fs::read(temp.path().join("copy/sound")).expect("copied") == noise(20_000, 3));
    mount.unmount();
}

/// The paper's use of it (§1): what the owner writes takes the room back, and the ring goes on.
#[test]
fn a_node_gives_all_that_is_free_and_its_owner_takes_it_back() {
    if !can_mount("a_node_gives_all_that_is_free_and_its_owner_takes_it_back") {
        return;
    }
    let temp = tempfile::tempdir().expect("a directory");
    let [image, source, at] = ["disk.img", "tree", "mnt"].map(|name| temp.path().join(name));
    let ring = Ring::of(3);
    make_tree(&source);
    fs::write(source.join("big"), noise(4 << 20, 9)).expect("a file");
    run(atoll().args(["tfs", "mkfs", "--size", "48MiB"]).arg(&image)).ok();
    let mount = Mounted::new(&image, &at);
    let (ordinary, given) = (at.join("ordinary"), at.join("given"));
    fs::create_dir(&ordinary).expect("a directory");
    fs::create_dir(&given).expect("a directory");
    run(atoll().args(["tfs", "set", "--transparent"]).arg(&given)).ok();
    let address = ring.publish(&source);

    let node = &ring.nodes[2];
    let contribute = |dir: &Path| run(node.command(["contribute", "transparent"]).arg(dir));
    contribute(&ordinary).failed(2, &["is not transparent", "atoll tfs set --transparent"]);
    let status = || json(&run(&mut node.command(["contribute", "--json"])).ok().stdout);
    until("all copies have come to node 2", || status()["blocks"].as_u64() > Some(50));
    contribute(&given).ok();
    until("they have been moved", || status()["moving"].is_null());
    let held = status()["blocks"].as_u64().expect("a number");
    let stat = || json(&run(atoll().args(["tfs", "stat", "--json"]).arg(&at)).ok().stdout);
    assert!(stat()["transparent_files"].as_u64() >= Some(held), "{}", stat());

    // The owner fills the disk, and does not notice that it was full of something.
    let mut hoard = fs::File::create(ordinary.join("hoard")).expect("a file");
    let megabyte = noise(1 << 20, 1);
    let written = (0..100).take_while(|_| hoard.write_all(&megabyte).is_ok()).count();
    assert!(written >= 40, "{written} MiB of 48");
    until("the node notices", || status()["lost_blocks"].as_u64() > Some(0));
    let copy = ring.path("copy");
    run(node.command(["get", &address]).arg(&copy)).ok();
    assert_same(&source, &copy);

    drop(hoard);
    drop(ring);
    mount.unmount();
    let check = ["tfs", "check", "--tags", "--json"];
    let sound = json(&run(atoll().args(check).arg(&image)).ok().stdout);
    assert_eq!(sound["sound"], true, "{sound}");
    e2fsck_finds_nothing(&image);
}
