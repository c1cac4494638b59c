//! Mounts of shared volumes whose node is gone: what is closed meanwhile survives, and other members see it later.

use std::fs;
use std::path::PathBuf;

use crate::processes::{
    Ring, assert_holds, assert_same_contents, atoll, can_mount, make_tree, noise, run, unmount,
    until,
};
use crate::volumes::{kill_server, status_of};

/// A ring with a volume that its first two nodes have mounted.
fn mounted() -> (Ring, PathBuf, PathBuf) {
    let mut ring = Ring::of(3);
    ring.nodes[0].atoll(["volume", "create", "team", "--shared"]).ok();
    let code = ring.nodes[0].atoll(["volume", "invite", "team"]).ok().last_line().to_owned();
    ring.nodes[1].atoll(["volume", "join", &code, "ours"]).ok();
    let mine = ring.mount(1, "ours", &[]);
    let theirs = ring.mount(0, "team", &[]);
    (ring, mine, theirs)
}

#[test]
fn what_was_closed_without_a_node_survives_the_mount_and_is_seen_by_others() {
    if !can_mount("what_was_closed_without_a_node_survives_the_mount_and_is_seen_by_others") {
        return;
    }
    let (mut ring, mine, theirs) = mounted();
    fs::write(mine.join("before"), "online").expect("is written");
    let tree = ring.path("tree");
    make_tree(&tree);
    ring.nodes[1].kill();
    make_tree(&mine.join("tree"));
    let exclusive = fs::File::options().write(true).create_new(true).open(mine.join("lock"));
    assert_eq!(exclusive.err().and_then(|error| error.raw_os_error()), Some(37), "ENOLCK");
    fs::write(mine.join("big"), noise(3 << 20, 5)).expect("is spooled");
    fs::write(mine.join("before"), "offline").expect("is spooled");
    assert_eq!(fs::read(mine.join("before")).expect("is known"), b"offline");
    // While a call waits for the ring, the mount says that instead.
    let told = || status_of(&mine);
    until("it says what waits", || told().contains("files wait in the spool"));
    assert!(told().contains("offline since"), "{}", told());
    kill_server(&mine);
    run(atoll().arg("unmount").arg(&mine)).ok();
    fs::write(theirs.join("before"), "theirs").expect("is written");
    let again = ring.path("again");
    fs::create_dir(&again).expect("a directory");
    let mount = || run(ring.nodes[1].command(["mount", "ours"]).arg(&again));
    mount().failed(3, &["not on the ring yet"]);
    ring.nodes[1].restart();
    let status = ring.nodes[1].atoll(["status"]).ok().stdout;
    assert!(status.contains("files of ours") && status.contains("it is not mounted"), "{status}");

    let mine = ring.mount(1, "ours", &[]);
    assert_same_contents(&tree, &mine.join("tree"));
    assert_holds(&mine.join("big"), &noise(3 << 20, 5));
    until("it is on the ring", || status_of(&mine) == "ok");
    until("another member sees it", || theirs.join("tree/docs").exists());
    assert_same_contents(&tree, &theirs.join("tree"));
    assert_holds(&theirs.join("big"), &noise(3 << 20, 5));
    // Both have written it.
    let texts = || {
        let names = fs::read_dir(&theirs).expect("lists").flatten().map(|entry| entry.path());
        let both = names.filter(|path| path.to_string_lossy().contains("before"));
        let mut texts: Vec<Vec<u8>> = both.filter_map(|path| fs::read(path).ok()).collect();
        texts.sort();
        texts
    };
    until("both contents are there", || texts() == [b"offline".to_vec(), b"theirs".to_vec()]);
    let pending = ring.nodes[1].atoll(["status", "--json"]).ok().json();
    assert_eq!(pending["pending"].as_array().map(Vec::len), Some(0));
}

#[test]
fn a_node_brings_to_the_ring_what_an_ended_mount_has_left() {
    if !can_mount("a_node_brings_to_the_ring_what_an_ended_mount_has_left") {
        return;
    }
    let (mut ring, mine, theirs) = mounted();
    ring.nodes[1].kill();
    fs::create_dir(mine.join("new")).expect("is spooled");
    fs::write(mine.join("new/file"), noise(1 << 20, 6)).expect("is spooled");
    let mut command = atoll();
    unmount(command.arg("unmount").arg(&mine));
    until("the mount has ended", || {
        let processes = fs::read_dir("/proc").expect("processes").flatten();
        let arguments = processes.map(|process| fs::read(process.path().join("cmdline")));
        let mine = mine.to_string_lossy().into_owned();
        !arguments.flatten().any(|line| String::from_utf8_lossy(&line).contains(&mine))
    });
    // Said of what is on disk: once it runs, the node has brought it there within a minute.
    let recover = ring.nodes[1].atoll(["volume", "recover", "ours"]).ok().stdout;
    assert!(recover.contains("the node brings them there"), "{recover}");
    ring.nodes[1].restart();
    until("another member sees it", || theirs.join("new/file").exists());
    assert_holds(&theirs.join("new/file"), &noise(1 << 20, 6));
    let pending = || ring.nodes[1].atoll(["status", "--json"]).ok().json();
    until("nothing waits", || pending()["pending"].as_array().is_some_and(Vec::is_empty));
}

/// The story: it was said that the node would bring to the ring what a mount had left whose member was removed meanwhile.
#[test]
fn what_a_removed_member_has_left_stays_and_says_so() {
    if !can_mount("what_a_removed_member_has_left_stays_and_says_so") {
        return;
    }
    let (mut ring, mine, theirs) = mounted();
    fs::write(mine.join("before"), "online").expect("is written");
    until("another member sees it", || theirs.join("before").exists());
    ring.nodes[1].kill();
    fs::write(mine.join("before"), "offline").expect("is spooled");
    ring.nodes[0].atoll(["revoke", "team", "invited", "--now"]).ok();
    let code = ring.nodes[0].atoll(["volume", "invite", "team"]).ok().last_line().to_owned();
    ring.nodes[1].restart();
    until("the ring does not take it", || status_of(&mine).contains("the ring does not take 1"));
    let join = |ring: &Ring| ring.nodes[1].atoll(["volume", "join", &code, "ours"]);
    join(&ring).failed(1, &["it is mounted on", "Unmount it first"]);
    let mut command = atoll();
    unmount(command.arg("unmount").arg(&mine));
    let recover = |ring: &Ring| ring.nodes[1].atoll(["volume", "recover", "ours"]).ok().stdout;
    until("the mount has ended", || recover(&ring).contains("on this machine only"));
    let said = recover(&ring);
    assert!(said.contains("not a member") && said.contains("--discard"), "{said}");
    let status = ring.nodes[1].atoll(["status"]).ok().stdout;
    assert!(status.contains("which does not take them"), "{status}");
    // The files are not lost by joining anew.
    join(&ring).failed(1, &["wait on this node", "atoll volume recover ours"]);
    let again = ring.mount(1, "ours", &[]);
    assert_holds(&again.join("before"), b"offline");
    let mut command = atoll();
    unmount(command.arg("unmount").arg(&again));
    let discard = ["volume", "recover", "ours", "--discard", "--json"];
    let discard = || ring.nodes[1].atoll(discard);
    until("it is given up", || discard().ok().json()["discarded_bytes"].as_u64() > Some(0));
    join(&ring).ok();
    let anew = ring.mount(1, "ours", &[]);
    fs::write(anew.join("after"), "by the new code").expect("is written");
    until("another member sees it", || theirs.join("after").exists());
}
