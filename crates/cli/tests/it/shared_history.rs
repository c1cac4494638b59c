//! Old versions of what is in a shared volume, with real mounts: `.atoll/history`, `atoll log`, `atoll restore`.

use std::fs;
use std::path::Path;

use crate::processes::{Ring, atoll, can_mount, run, unmount, until};

/// The times of the states that a mount lists, ascending.
fn states(mount: &Path) -> Vec<String> {
    let listed = fs::read_dir(mount.join(".atoll/history")).expect("lists");
    let name = |entry: std::io::Result<fs::DirEntry>| entry.expect("an entry").file_name();
    let mut names: Vec<String> =
        listed.map(|entry| name(entry).into_string().expect("a time")).collect();
    names.sort();
    names
}

#[test]
fn what_was_there_a_minute_ago_is_shown_logged_and_restored() {
    if !can_mount("what_was_there_a_minute_ago_is_shown_logged_and_restored") {
        return;
    }
    let mut ring = Ring::of(3);
    let create = ["volume", "create", "team", "--shared", "--keep", "60m"];
    let address = ring.nodes[0].atoll(create).ok().last_line().to_owned();
    let mount = ring.mount(0, "team", &[]);
    fs::create_dir(mount.join("plans")).expect("makes");
    fs::write(mount.join("plans/one"), "first").expect("writes");
    fs::write(mount.join("plans/two"), "stays").expect("writes");
    std::os::unix::fs::symlink("one", mount.join("plans/link")).expect("makes");
    let outside = ring.path("outside");
    fs::create_dir(&outside).expect("makes");
    fs::write(outside.join("secret"), "not of the volume").expect("writes");
    std::os::unix::fs::symlink(&outside, mount.join("out")).expect("makes");
    let before = states(&mount).len();
    until("a minute ends", || states(&mount).len() > before);
    let state = states(&mount).pop().expect("it has just come");
    let then = mount.join(".atoll/history").join(&state);
    // A link of then leads nowhere now: what it leads to is of this machine, and could be root's.
    fs::remove_file(mount.join("out")).expect("removes");
    fs::create_dir(mount.join("out")).expect("makes");
    let mut out = atoll();
    run(out.arg("restore").arg(mount.join("out/secret")).args(["--at", &state]))
        .failed(1, &["cannot be read"]);
    fs::remove_dir(mount.join("out")).expect("it is empty");
    let listed = ring.nodes[0].atoll(["volume", "history", "team"]).ok().stdout;
    assert!(listed.lines().any(|line| line == state), "{state}: {listed}");
    fs::write(mount.join("plans/one"), "second").expect("writes");
    fs::remove_file(mount.join("plans/two")).expect("removes");

    assert_eq!(fs::read_to_string(then.join("plans/one")).expect("reads"), "first");
    assert_eq!(fs::read_to_string(then.join("plans/two")).expect("reads"), "stays");
    assert_eq!(fs::read_to_string(then.join("plans/link")).expect("reads"), "first");
    let refused = fs::write(then.join("plans/one"), "x").expect_err("read-only");
    assert_eq!(refused.raw_os_error(), Some(30), "EROFS");
    let refused = fs::create_dir(mount.join(".atoll")).expect_err("it is there");
    assert_eq!(refused.kind(), std::io::ErrorKind::AlreadyExists);
    // An entry keeps its directory open.
    let shown = fs::read_dir(&mount).expect("lists").map(|entry| entry.expect("one").file_name());
    assert_eq!(shown.collect::<Vec<_>>(), ["plans"]);

    let log = |path: &str| {
        let said = run(atoll().arg("log").arg("--json").arg(mount.join(path))).ok();
        said.json_lines()
    };
    let versions = log("plans/one");
    assert_eq!((versions.len(), &versions[0]["what"]), (2, &"present".into()), "{versions:?}");
    assert_eq!((&versions[1]["size"], &versions[1]["label"]), (&5.into(), &"owner".into()));
    assert_eq!(versions[1]["state"].as_str(), Some(&state[..]), "{versions:?}");
    until("the removal is on the ring", || log("plans/two").len() == 2);
    let said = run(atoll().arg("log").arg(mount.join("plans/two"))).ok();
    assert!(said.stdout.contains("removed") && said.stdout.contains(&state), "{said:?}");

    let restore = |path: &str, options: &[&str]| {
        let mut command = atoll();
        run(command.arg("restore").arg(mount.join(path)).args(["--at", &state]).args(options))
    };
    restore("plans/one", &[]).failed(1, &["has that name now", "--force"]);
    restore("plans/one", &["--force"]).ok();
    assert_eq!(fs::read_to_string(mount.join("plans/one")).expect("reads"), "first");
    restore("plans/two", &[]).ok();
    assert_eq!(fs::read_to_string(mount.join("plans/two")).expect("reads"), "stays");
    fs::write(mount.join("plans/three"), "was not there").expect("writes");
    restore("plans/three", &["--force"]).failed(4, &["was not there at", "atoll log"]);
    restore("plans", &["--force"]).ok();
    let mut names: Vec<_> = fs::read_dir(mount.join("plans"))
        .expect("lists")
        .map(|entry| entry.expect("one").file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["link", "one", "two"]);
    assert_eq!(fs::read_dir(&mount).expect("lists").count(), 1, "nothing is left beside it");
    let mut early = atoll();
    let early = early.arg("restore").arg(mount.join("plans")).args(["--at", "2020-01-01"]);
    run(early).failed(4, &["nothing is kept of that time", ".atoll/history"]);
    run(atoll().arg("log").arg(ring.path("elsewhere"))).failed(2, &["a mounted shared volume"]);

    // The state as a mount of its own, by a node that may only read.
    let past = ring.mount(1, &format!("{address}@{state}"), &[]);
    assert_eq!(fs::read_to_string(past.join("plans/two")).expect("reads"), "stays");
    assert!(!past.join(".atoll").exists() && !past.join("plans/three").exists());
    unmount(atoll().arg("unmount").arg(&past));
    // From now on nothing is kept.
    unmount(atoll().arg("unmount").arg(&mount));
    let mount = ring.mount(0, "team", &["--keep", "none"]);
    assert!(states(&mount).is_empty());
    let shown = ring.nodes[0].atoll(["volume", "history", "team"]).ok();
    assert_eq!(shown.last_line(), "kept: none", "{shown:?}");
}
