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
    // Another volume keeps nothing of this minute.
    ring.nodes[0].atoll(["volume", "create", "weeks", "--shared", "--keep", "4w"]).ok();
    let weeks = ring.mount(0, "weeks", &[]);
    fs::create_dir(weeks.join("plans")).expect("makes");
    fs::write(weeks.join("plans/one"), "first").expect("writes");
    fs::write(weeks.join("plans/two"), "stays").expect("writes");
    fs::File::open(weeks.join("plans")).and_then(|plans| plans.sync_all()).expect("is on the ring");
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

    // `restore` leaves out a file that is not kept, and names it.
    fs::write(weeks.join("plans/one"), "second").expect("writes");
    unmount(atoll().arg("unmount").arg(&weeks));
    let weeks = ring.mount(0, "weeks", &["--keep", "60m"]);
    let restore = |options: &[&str]| {
        let mut command = atoll();
        run(command.arg("restore").arg(weeks.join("plans")).args(["--at", &state]).args(options))
    };
    let unread = "1 file or directory of that state cannot be read";
    restore(&["--force"]).failed(7, &["plans/one cannot be read", unread, "Nothing was changed"]);
    assert_eq!(fs::read_to_string(weeks.join("plans/one")).expect("reads"), "second");
    fs::rename(weeks.join("plans"), weeks.join("now")).expect("renames");
    restore(&[]).failed(7, &["plans/one cannot be read", unread, "not all of it"]);
    assert_eq!(fs::read_to_string(weeks.join("plans/two")).expect("reads"), "stays");
    assert_eq!(fs::read_dir(weeks.join("plans")).expect("lists").count(), 1);
    assert_eq!(fs::read_dir(&weeks).expect("lists").count(), 2, "nothing is left beside it");

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

/// The README's example failed: nothing was kept of the newest hour, the log of a file ended where an editor had saved it
/// by renaming a new one, and what `restore --force` had replaced was gone.
#[test]
fn what_was_saved_a_moment_ago_is_logged_by_its_path_and_had_back() {
    if !can_mount("what_was_saved_a_moment_ago_is_logged_by_its_path_and_had_back") {
        return;
    }
    let mut ring = Ring::of(3);
    ring.nodes[0].atoll(["volume", "create", "team", "--shared"]).ok();
    let mount = ring.mount(0, "team", &[]);
    let path = mount.join("plan.txt");
    fs::write(&path, "first\n").expect("writes");
    fs::write(mount.join(".plan.txt.new"), "saved text\n").expect("writes");
    // As a user types it, and as an editor saves it.
    fs::write(&path, "second\n").expect("writes");
    fs::rename(mount.join(".plan.txt.new"), &path).expect("renames");
    let log = |path: &Path| run(atoll().arg("log").arg("--json").arg(path)).ok().json_lines();
    let state_of = |path: &Path, size: u64| {
        let versions = log(path);
        let is_it = |version: &&serde_json::Value| {
            version["size"] == size && version["state"] != serde_json::Value::Null
        };
        let found = versions.iter().find(is_it).map(|version| version["state"].clone());
        found.and_then(|state| Some(state.as_str()?.to_owned()))
    };
    let restore = |path: &Path, state: &str| {
        run(atoll().arg("restore").arg(path).args(["--force", "--at", state]))
    };
    until("the replaced file is removed", || state_of(&path, 7).is_some());
    assert_eq!(log(&path)[0]["what"], "present");
    let first = state_of(&path, 6).expect("the first text is 6 bytes long");
    restore(&path, &first).ok();
    assert_eq!(fs::read_to_string(&path).expect("reads"), "first\n");
    until("what was replaced is kept", || state_of(&path, 11).is_some());
    let later = state_of(&path, 11).expect("it was there");
    restore(&path, &later).ok();
    assert_eq!(fs::read_to_string(&path).expect("reads"), "saved text\n");
    // Removed, with its directory.
    fs::create_dir(mount.join("d")).expect("makes");
    fs::write(mount.join("d/note"), "short-lived").expect("writes");
    fs::remove_dir_all(mount.join("d")).expect("removes");
    let note = mount.join("d/note");
    until("the removal is on the ring", || {
        let listed = run(atoll().arg("log").arg("--json").arg(&note));
        listed.code == Some(0) && !listed.json_lines().is_empty() && state_of(&note, 11).is_some()
    });
    run(atoll().arg("log").arg(mount.join("never"))).failed(4, &["in no state that is kept"]);
}

/// A member put a link in the place of a directory. `atoll restore` followed it into another volume that the user had mounted,
/// and replaced a file there.
#[test]
fn no_link_that_a_member_has_made_leads_a_command_out_of_a_mount() {
    if !can_mount("no_link_that_a_member_has_made_leads_a_command_out_of_a_mount") {
        return;
    }
    use std::os::unix::fs::symlink;
    let mut ring = Ring::of(1);
    for name in ["team", "other"] {
        ring.nodes[0].atoll(["volume", "create", name, "--shared"]).ok();
    }
    let (team, other) = (ring.mount(0, "team", &[]), ring.mount(0, "other", &[]));
    for text in ["first\n", "second\n"] {
        fs::write(other.join("plan"), text).expect("writes");
        fs::write(other.join("new"), text).expect("writes");
        fs::rename(other.join("new"), other.join("plan")).expect("renames");
    }
    let log = |path: &Path| run(atoll().arg("log").arg("--json").arg(path));
    let state_of_first = || {
        let versions = log(&other.join("plan")).ok().json_lines();
        let first = versions.into_iter().find(|one| one["size"] == 6 && one["state"].is_string());
        Some(first?["state"].as_str()?.to_owned())
    };
    until("the first text is kept", || state_of_first().is_some());
    let state = state_of_first().expect("it is kept");
    let restore =
        |path: &Path| run(atoll().arg("restore").arg(path).args(["--force", "--at", &state]));
    let conflicts = |path: &Path| run(atoll().arg("conflicts").arg(path));

    // From one mount into another, and into a mount from one that nobody writes.
    symlink(&other, team.join("away")).expect("links");
    symlink(other.join("plan"), team.join("file")).expect("links");
    let source = ring.path("source");
    fs::create_dir(&source).expect("makes");
    symlink(&other, source.join("away")).expect("links");
    let published = ring.publish(&source);
    let read_only = ring.mount(0, &published, &[]);
    let why = |path: &Path| run(ring.nodes[0].command(["why", "--json"]).arg(path));
    let in_a_mount = "is a symbolic link in a mount";
    restore(&team.join("away/plan")).failed(1, &["links below a mount are not followed"]);
    log(&team.join("away/plan")).failed(4, &["links in a mount are not followed"]);
    restore(&read_only.join("away/plan")).failed(1, &[in_a_mount]);
    log(&read_only.join("away/plan")).failed(1, &[in_a_mount]);
    for mount in [&team, &read_only] {
        why(&mount.join("away/plan")).failed(1, &[in_a_mount]);
        conflicts(&mount.join("away")).failed(1, &[in_a_mount]);
    }
    why(&team.join("file")).failed(2, &["regular files and directories alone"]);
    assert_eq!(fs::read_to_string(other.join("plan")).expect("reads"), "second\n");

    // The user's own links are followed.
    let (mine, deep) = (ring.path("mine"), ring.path("deep"));
    symlink(&other, &mine).expect("links");
    symlink("mine/plan", &deep).expect("links");
    conflicts(&mine).ok();
    assert_eq!(
        why(&deep).ok().json()["path"],
        fs::canonicalize(other.join("plan")).expect("there").to_str().expect("text")
    );
    assert!(log(&mine.join("plan")).ok().json_lines().len() > 1);
    assert!(log(&mine.join("../mine/../mount1/plan")).ok().json_lines().len() > 1);
    log(&mine.join("none/../plan")).failed(2, &["without `..`"]);
    restore(&deep).ok();
    assert_eq!(fs::read_to_string(other.join("plan")).expect("reads"), "first\n");
}

/// `tail -f` on another mount never followed.
#[test]
fn a_file_that_is_open_on_one_mount_shows_what_another_appends() {
    if !can_mount("a_file_that_is_open_on_one_mount_shows_what_another_appends") {
        return;
    }
    use std::io::{Read, Write};
    let mut ring = Ring::of(3);
    let address = ring.nodes[0].atoll(["volume", "create", "team", "--shared"]);
    let address = address.ok().last_line().to_owned();
    let one = ring.mount(0, "team", &[]);
    fs::write(one.join("log"), "begins\n").expect("writes");
    let two = ring.mount(1, &address, &[]);
    let mut tail = fs::File::open(two.join("log")).expect("opens");
    let mut text = String::new();
    tail.read_to_string(&mut text).expect("reads");
    let mut expected = "begins\n".to_owned();
    for line in ["one\n", "another\n", "the last\n"] {
        let mut log = fs::OpenOptions::new().append(true).open(one.join("log")).expect("opens");
        log.write_all(line.as_bytes()).expect("writes");
        drop(log);
        expected += line;
        until("the line is shown", || {
            tail.read_to_string(&mut text).expect("reads");
            text.len() >= expected.len()
        });
        assert_eq!(text, expected, "no zeros where the kernel had a page that ended");
    }
}
