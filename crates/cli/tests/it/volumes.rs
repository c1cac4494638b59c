//! Volumes of one's own: made, written through a mount, read anywhere.

use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;

use atoll_dht::{Blocks, PutError};
use atoll_key::{SignedBlock, VolumeCipher};
use atoll_volume::owned::sealed_root;

use crate::processes::{
    Ring, assert_holds, assert_same, atoll, can_mount, make_tree, noise, run, unmount, until,
};

/// Reads the status attribute of a mount's root.
pub(crate) fn status_of(mount: &Path) -> String {
    let mut text = [0; 1000];
    let len = rustix::fs::getxattr(mount, "user.atoll.status", &mut text[..]).expect("is said");
    String::from_utf8_lossy(&text[..len]).into_owned()
}

fn sync(path: &Path) -> std::io::Result<()> {
    File::open(path).and_then(|file| file.sync_all())
}

/// SIGKILL for the process that serves a mount.
pub(crate) fn kill_server(mount: &Path) {
    let serves = |process: &fs::DirEntry| {
        let arguments = fs::read(process.path().join("cmdline")).unwrap_or_default();
        let arguments: Vec<&[u8]> = arguments.split(|byte| *byte == 0).collect();
        arguments.contains(&mount.as_os_str().as_bytes()) && arguments.contains(&&b"--announce"[..])
    };
    let processes = fs::read_dir("/proc").expect("processes").flatten();
    let server = processes.into_iter().find(serves).expect("it runs");
    let pid = server.file_name().to_string_lossy().parse().expect("a number");
    let pid = rustix::process::Pid::from_raw(pid).expect("a process");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("is killed");
}

#[test]
fn a_volume_is_written_through_a_mount_and_read_through_another_node() {
    if !can_mount("a_volume_is_written_through_a_mount_and_read_through_another_node") {
        return;
    }
    let mut ring = Ring::of(3);
    let create =
        |name: &str| run(&mut ring.nodes[0].command(["volume", "create", "--encrypt", name]));
    let address = create("work").ok().last_line().to_owned();
    assert!(address.starts_with("atoll:") && address.contains('#'), "{address}");
    create("work").failed(1, &["has a volume of that name"]);
    create("a:b").failed(2, &["taken for an address"]);

    let tree = ring.path("tree");
    make_tree(&tree);
    fs::write(tree.join("big"), noise(3 << 20, 7)).expect("a file");
    let mount = ring.mount(0, "work", &[]);
    run(std::process::Command::new("cp").arg("-a").arg(&tree).arg(mount.join("tree"))).ok();
    fs::hard_link(mount.join("tree/big"), mount.join("linked")).expect("links");
    symlink("linked", mount.join("link")).expect("links");
    sync(&mount).expect("is on the ring");
    assert_eq!(status_of(&mount), "ok");
    assert_same(&tree, &mount.join("tree"));
    assert_eq!(fs::metadata(mount.join("linked")).expect("there").nlink(), 2);

    let reader = ring.mount(2, &address, &[]);
    assert_same(&tree, &reader.join("tree"));
    assert_holds(&reader.join("linked"), &noise(3 << 20, 7));
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(mount.join("linked"), Some(12), Some(34)).expect("changes");
        sync(&mount).expect("is on the ring");
        let of = |mount: &Path| fs::metadata(mount.join("linked")).map(|m| (m.uid(), m.gid()));
        let fresh = ring.mount(1, &address, &[]);
        assert_eq!(of(&fresh).expect("there"), (12, 34));
        let mapped = ring.mount(1, &address, &["--map-owners"]);
        assert_eq!(of(&mapped).expect("there"), (0, 0));
    }
    let elsewhere = ring.path("elsewhere");
    fs::create_dir(&elsewhere).expect("a directory");
    let second = || ring.nodes[0].command(["mount", "work"]);
    run(second().arg(&elsewhere)).failed(5, &["on this machine writes it", "unmount"]);
    run(ring.nodes[1].command(["mount", "work"]).arg(&elsewhere)).failed(4, &["volume create"]);

    // Unmounted and mounted again, all of it is there, and its leases are the node's to renew.
    fs::write(mount.join("last"), "not synced").expect("writes");
    unmount(atoll().arg("unmount").arg(&mount));
    until("the node keeps the volume", || {
        let volumes = run(&mut ring.nodes[0].command(["volume", "list", "--json"])).ok();
        volumes.json()["kept_blocks"].as_u64() > Some(50)
    });
    until("the mount has ended", || run(second().arg(&mount)).code == Some(0));
    assert_eq!(fs::read(mount.join("last")).expect("reads"), b"not synced");
    assert_same(&tree, &mount.join("tree"));
    unmount(atoll().arg("unmount").arg(&mount));
}

#[test]
fn what_was_synced_survives_the_death_of_mount_and_node() {
    if !can_mount("what_was_synced_survives_the_death_of_mount_and_node") {
        return;
    }
    let mut ring = Ring::of(3);
    run(&mut ring.nodes[0].command(["volume", "create", "work"])).ok();
    let mount = ring.mount(0, "work", &[]);
    fs::write(mount.join("synced"), noise(1 << 20, 1)).expect("writes");
    sync(&mount.join("synced")).expect("is on the ring");

    // While the node is away, what is written waits in the spool, and fsync says that it does.
    ring.nodes[0].kill();
    fs::write(mount.join("waits"), "x").expect("is in the spool");
    sync(&mount.join("waits")).expect_err("the ring cannot be asked");
    ring.nodes[0].restart();
    until("the ring has it", || sync(&mount.join("waits")).is_ok());

    // Its node finds what it put after the last list that it gave.
    fs::write(mount.join("last"), noise(1 << 20, 2)).expect("writes");
    sync(&mount.join("last")).expect("is on the ring");
    let listed = || run(&mut ring.nodes[0].command(["volume", "list", "--json"])).ok().json();
    let before = listed();
    kill_server(&mount);
    fs::read_dir(&mount).map(drop).expect_err("its process is gone");
    run(&mut ring.nodes[0].command(["renew", "work"])).ok();
    let of = |list: &serde_json::Value, field: &str| list[field].as_u64().expect("a number");
    let after = listed();
    assert!(of(&after, "root_version") > of(&before, "root_version"), "{before} {after}");
    assert!(of(&after, "kept_blocks") >= of(&before, "kept_blocks") + 16, "{before} {after}");
    assert_eq!(of(&after, "lost_blocks"), 0, "{after}");
    run(atoll().arg("unmount").arg(&mount)).ok();
    let mount = ring.mount(0, "work", &[]);
    assert_holds(&mount.join("synced"), &noise(1 << 20, 1));
    assert_eq!(fs::read(mount.join("waits")).expect("reads"), b"x");
}

#[test]
fn what_was_closed_survives_the_death_of_mount_and_node() {
    if !can_mount("what_was_closed_survives_the_death_of_mount_and_node") {
        return;
    }
    let mut ring = Ring::of(3);
    run(&mut ring.nodes[0].command(["volume", "create", "work"])).ok();
    let mount = ring.mount(0, "work", &[]);
    let tree = ring.path("tree");
    make_tree(&tree);
    sync(&mount).expect("is on the ring");
    ring.nodes[0].kill();
    run(std::process::Command::new("cp").arg("-a").arg(&tree).arg(mount.join("tree"))).ok();
    fs::write(mount.join("big"), noise(3 << 20, 5)).expect("is in the spool");
    kill_server(&mount);
    run(atoll().arg("unmount").arg(&mount)).ok();
    ring.nodes[0].restart();

    let status = run(&mut ring.nodes[0].command(["status"])).ok();
    assert!(status.stdout.contains("changes to work wait for the ring, and it is not mounted"));
    let pending = || run(&mut ring.nodes[0].command(["status", "--json"])).ok().json();
    assert!(pending()["pending"][0]["bytes"].as_u64() > Some(3 << 20));
    run(&mut ring.nodes[0].command(["volume", "recover", "work", "/nowhere"]))
        .failed(4, &["nothing is set aside", "atoll mount work"]);

    let mount = ring.mount(0, "work", &[]);
    assert_same(&tree, &mount.join("tree"));
    assert_holds(&mount.join("big"), &noise(3 << 20, 5));
    sync(&mount).expect("is on the ring");
    let pending = || run(&mut ring.nodes[0].command(["status", "--json"])).ok().json();
    until("nothing waits", || pending()["pending"].as_array().is_some_and(|all| all.is_empty()));
}

#[test]
fn a_node_brings_to_the_ring_what_a_dead_mount_has_left() {
    if !can_mount("a_node_brings_to_the_ring_what_a_dead_mount_has_left") {
        return;
    }
    let mut ring = Ring::of(3);
    let create = run(&mut ring.nodes[0].command(["volume", "create", "--encrypt", "work"])).ok();
    let address = create.last_line().to_owned();
    let mount = ring.mount(0, "work", &[]);
    ring.nodes[0].kill();
    fs::write(mount.join("big"), noise(3 << 20, 5)).expect("is in the spool");
    kill_server(&mount);
    run(atoll().arg("unmount").arg(&mount)).ok();
    ring.nodes[0].restart();
    let pending = || run(&mut ring.nodes[0].command(["status", "--json"])).ok().json();
    until("nothing waits", || pending()["pending"].as_array().is_some_and(|all| all.is_empty()));
    let copy = ring.path("copy");
    let file = format!("{address}/big");
    run(ring.nodes[2].command(["get", &file]).arg(&copy)).ok();
    assert_holds(&copy, &noise(3 << 20, 5));
    let mount = ring.mount(0, "work", &[]);
    assert_holds(&mount.join("big"), &noise(3 << 20, 5));
}

/// The same volume written by two nodes: the second one takes over while the first is cut off. What the
/// first one has written is not in the volume, and not lost.
#[test]
fn what_another_node_has_overtaken_is_recovered() {
    if !can_mount("what_another_node_has_overtaken_is_recovered") {
        return;
    }
    let mut ring = Ring::of(3);
    run(&mut ring.nodes[0].command(["volume", "create", "--encrypt", "work"])).ok();
    ring.nodes[1].stop();
    let keys = |node: &crate::processes::NodeProcess| node.dir.join("volumes/work");
    let copy = run(std::process::Command::new("cp")
        .arg("-a")
        .arg(keys(&ring.nodes[0]))
        .arg(keys(&ring.nodes[1])));
    copy.ok();
    ring.nodes[1].restart();

    let mount = ring.mount(0, "work", &[]);
    fs::write(mount.join("old"), "both have it").expect("writes");
    sync(&mount).expect("is on the ring");
    let elsewhere = ring.path("elsewhere");
    fs::create_dir(&elsewhere).expect("a directory");
    run(ring.nodes[1].command(["mount", "work"]).arg(&elsewhere))
        .failed(5, &["another mount writes the volume", "--take-over"]);
    ring.nodes[0].freeze();
    fs::create_dir(mount.join("dir")).expect("is in the spool");
    fs::write(mount.join("dir/mine"), "not on the ring").expect("is in the spool");
    fs::remove_file(mount.join("old")).expect("is in the spool");
    fs::write(mount.join("empty"), "").expect("is in the spool");
    let other = ring.mount(1, "work", &["--take-over"]);
    fs::write(other.join("theirs"), "x").expect("writes");
    sync(&other).expect("is on the ring");

    ring.nodes[0].signal("CONT");
    sync(&mount).expect_err("it is fenced");
    assert!(status_of(&mount).contains("another writer"), "{}", status_of(&mount));
    fs::write(mount.join("more"), "x").expect_err("it is fenced");
    unmount(atoll().arg("unmount").arg(&mount));
    // The other mount still writes, and this one's process has ten seconds to end.
    let told =
        || run(&mut ring.nodes[0].command(["volume", "recover", "work", "--json"])).ok().json();
    until("it is found without another mount", || told()["set_aside"][0].is_string());
    let early = ring.path("early");
    run(ring.nodes[0].command(["volume", "recover", "work"]).arg(&early)).ok();
    let aside = fs::read_dir(&early).expect("is made").next().expect("one").expect("reads").path();
    assert_eq!(fs::read(aside.join("dir/mine")).expect("reads"), b"not on the ring");
    unmount(atoll().arg("unmount").arg(&other));
    let second = || ring.nodes[0].command(["mount", "work"]);
    let mut said = String::new();
    until("the other mount has ended", || {
        let mounted = run(second().arg(&mount));
        said = mounted.stderr;
        mounted.code == Some(0)
    });
    assert!(said.contains("atoll volume recover work"), "{said}");
    assert_eq!(fs::read(mount.join("theirs")).expect("reads"), b"x");
    assert!(!mount.join("dir").exists());

    let saved = ring.path("saved");
    run(&mut ring.nodes[0].command(["volume", "recover", "work"])).ok();
    let recovered = run(ring.nodes[0].command(["volume", "recover", "work"]).arg(&saved)).ok();
    assert!(recovered.stdout.contains("removed: old"), "{}", recovered.stdout);
    let aside = fs::read_dir(&saved).expect("is made").next().expect("one").expect("reads").path();
    assert_eq!(fs::read(aside.join("dir/mine")).expect("reads"), b"not on the ring");
    assert_eq!(fs::read(aside.join("empty")).expect("reads"), b"");
    run(ring.nodes[0].command(["volume", "recover", "work"]).arg(&saved)).failed(1, &["saved"]);
    unmount(atoll().arg("unmount").arg(&mount));
    for lets_go in [["volume", "forget", "work", "--yes"], ["volume", "move", "work", "-q"]] {
        run(&mut ring.nodes[0].command(lets_go)).failed(1, &["not in the volume", "--discard"]);
    }
    run(&mut ring.nodes[0].command(["volume", "recover", "../work", "--discard"])).failed(2, &[]);
    run(&mut ring.nodes[0].command(["volume", "recover", "work", "--discard"])).ok();
    let told = run(&mut ring.nodes[0].command(["volume", "recover", "work", "--json"])).ok().json();
    assert_eq!(told["set_aside"].as_array().map(Vec::len), Some(0));
}

/// As if the present state of an own volume had been written so much earlier.
fn age(node: &Path, name: &str, hours: u64) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let client = atoll_node::Client::connect(node).await.expect("connects");
        let key = client.named_volume(name).await.expect("is there").key;
        let read_key = client.read_key(name).await.expect("is told");
        let cipher = read_key.map(|read_key| VolumeCipher::new(&read_key, &key.volume_id()));
        // The process of a mount that has ended may put its last root meanwhile.
        for _ in 0..20 {
            let block = client.get_signed(key.volume_id().root_key()).await.expect("is there");
            let mut root = sealed_root::decode(&block.payload, cipher.as_ref()).expect("a root");
            root.published_unix_ms -= hours * 3_600_000;
            let payload = sealed_root::encode(&root, cipher.as_ref());
            let block = SignedBlock::sign(&key, b"", block.version + 1, &payload);
            match client.put_signed(block).await {
                Err(PutError::Superseded { .. }) => {}
                put => return put.expect("is put"),
            }
        }
        panic!("others put roots all the time");
    });
}

/// Writes a file of the volume `work` through a mount, and waits until that has ended.
fn write(ring: &mut Ring, content: &str) {
    let mount = ring.mount(0, "work", &[]);
    fs::create_dir_all(mount.join("dir")).expect("a directory");
    fs::write(mount.join("dir/file"), content).expect("writes");
    unmount(atoll().arg("unmount").arg(&mount));
    until("the mount has ended", || {
        let probe = ring.path("probe");
        fs::create_dir_all(&probe).expect("a directory");
        let mounted = run(ring.nodes[0].command(["mount", "work"]).arg(&probe)).code;
        if mounted == Some(0) {
            unmount(atoll().arg("unmount").arg(&probe));
        }
        mounted == Some(0)
    });
}

#[test]
fn an_old_state_is_mounted_listed_and_restored() {
    if !can_mount("an_old_state_is_mounted_listed_and_restored") {
        return;
    }
    let mut ring = Ring::of(3);
    let atoll_of = |ring: &Ring, node: usize, arguments: &[&str]| {
        run(&mut ring.nodes[node].command(arguments))
    };
    let create = ["volume", "create", "--encrypt", "--keep", "5m/24h", "work"];
    let address = atoll_of(&ring, 0, &create).ok().last_line().to_owned();
    atoll_of(&ring, 0, &["volume", "create", "a@b"]).failed(2, &["'@'"]);
    age(&ring.nodes[0].dir, "work", 5);
    write(&mut ring, "old");
    age(&ring.nodes[0].dir, "work", 2);
    let mount = ring.mount(0, "work", &["--keep", "5m/24h/3d"]);
    fs::write(mount.join("dir/file"), "new").expect("writes");
    sync(&mount).expect("is on the ring");

    let history = atoll_of(&ring, 0, &["volume", "history", "work", "--json"]).ok().json_lines();
    let [present, old, empty] = &history[..] else { panic!("{history:?}") };
    let is_present = |state: &serde_json::Value| state["present"].as_bool().expect("is said");
    assert!(is_present(present) && !is_present(old) && !is_present(empty), "{history:?}");
    assert_eq!((&old["files"], &old["bytes"], &empty["files"]), (&1.into(), &3.into(), &0.into()));
    let table = atoll_of(&ring, 0, &["volume", "history", "work"]).ok().stdout;
    assert!(table.contains("1 file") && table.contains("kept: 5m/24h/3d"), "{table}");
    let time = old["time"].as_str().expect("a time").to_owned();
    assert!(table.contains(&time), "{table}");

    // By name on the node that has it, beside the mount that writes; by address on any.
    let named = format!("work@{time}");
    for (node, target) in [(0, named.clone()), (2, format!("{address}@{time}"))] {
        let old = ring.mount(node, &target, &[]);
        assert_eq!(fs::read(old.join("dir/file")).expect("reads"), b"old");
        fs::write(old.join("dir/file"), "x").expect_err("it is read-only");
    }
    let file = format!("{address}@{time}/dir/file");
    assert_eq!(atoll_of(&ring, 1, &["cat", &file]).ok().stdout, "old");
    let oldest = empty["time"].as_str().expect("a time");
    let elsewhere = ring.path("elsewhere");
    fs::create_dir(&elsewhere).expect("a directory");
    let early = run(ring.nodes[0].command(["mount", "work@2020-01-01"]).arg(&elsewhere));
    early.failed(4, &["no state that old is kept", oldest]);
    atoll_of(&ring, 1, &["volume", "history", "work"]).failed(4, &["no volume of that name"]);

    // A published volume has no old states, and is not written otherwise.
    let source = ring.path("docs");
    fs::create_dir(&source).expect("a directory");
    run(ring.nodes[0].command(["publish"]).arg(&source)).ok();
    let history = atoll_of(&ring, 0, &["volume", "history", "docs", "--json"]).ok();
    assert_eq!(history.json()["present"], true);
    atoll_of(&ring, 0, &["volume", "restore", "docs@2030-01-01"]).failed(1, &["published from"]);
    let early = run(ring.nodes[0].command(["mount", "docs@2020-01-01"]).arg(&elsewhere));
    early.failed(4, &["no state that old is kept"]);

    let restore = |ring: &Ring, more: &[&str]| {
        atoll_of(ring, 0, &[&["volume", "restore", &named], more].concat())
    };
    let advice = format!("Mount {named} elsewhere and copy");
    restore(&ring, &[]).failed(5, &["on this machine writes", &advice]);
    unmount(atoll().arg("unmount").arg(&mount));
    until("the mount has ended", || restore(&ring, &["dir/none"]).code == Some(4));
    restore(&ring, &["dir"]).failed(1, &["/dir", "--force"]);
    let copied = restore(&ring, &["--force", "dir"]).ok();
    assert!(copied.stderr.contains("1 file restored"), "{copied:?}");
    let read =
        |ring: &Ring| atoll_of(ring, 1, &["cat", &format!("{address}/dir/file")]).ok().stdout;
    assert_eq!(read(&ring), "old");
    write(&mut ring, "newer");
    let whole = restore(&ring, &[]).ok();
    assert!(whole.stderr.contains("as it was on"), "{whole:?}");
    assert_eq!(read(&ring), "old");
    let history = atoll_of(&ring, 0, &["volume", "history", "work", "--json"]).ok().json_lines();
    assert!(history.iter().any(|state| state["bytes"] == 5), "{history:?}");
}
