//! Pools of several machines as their users meet them: made, joined, mounted on each, killed and started again.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use crate::processes::{Ring, Said, assert_same_contents, atoll, can_mount, make_tree, run, until};

/// Three nodes with a member each of pool `team`, which node 0 made.
struct Team {
    ring: Ring,
    mounts: Vec<PathBuf>,
}

impl Team {
    fn new(test: &str) -> Option<Team> {
        if !rustix::process::geteuid().is_root() {
            let _ = writeln!(std::io::stderr(), "\nSKIPPED {test}: a pool needs root");
            return None;
        }
        if !can_mount(test) {
            return None;
        }
        let ring = Ring::of(3);
        let team = Team { ring, mounts: Vec::new() };
        let made = team.pool(0, &["create", "team", &team.files(0), "--members", "3"]).ok();
        let code = made.stdout.trim().to_owned();
        assert!(code.starts_with("atoll-pool:"), "{code}");
        assert!(made.stderr.contains("1 of 3 members have joined"), "{}", made.stderr);
        assert_eq!(team.pool(0, &["invite", "team"]).ok().stdout.trim(), code);
        for node in 1..3 {
            team.pool(node, &["join", &code, "team", &team.files(node)]).ok();
        }
        team.wait_until_whole();
        Some(team)
    }

    fn files(&self, node: usize) -> String {
        self.ring.path(&format!("files-{node}")).to_str().expect("a text").to_owned()
    }

    fn pool(&self, node: usize, arguments: &[&str]) -> Said {
        run(self.ring.nodes[node].command(["pool"]).args(arguments))
    }

    /// How the pool stands, as node 0 says.
    fn state(&self) -> serde_json::Value {
        self.pool(0, &["status", "--json"]).ok().json()["group"].clone()
    }

    fn wait_until_whole(&self) {
        until("all members take part, with all changes", || {
            let group = self.state();
            let states = group["states"].as_array().cloned().unwrap_or_default();
            states.len() == 3
                && states.iter().all(|state| {
                    state["problem"].is_null()
                        && state["applied"] == states[0]["applied"]
                        && state["files_to_mend"] == 0
                })
        });
    }

    fn mount(&mut self, node: usize) -> PathBuf {
        let at = self.ring.path(&format!("mnt-{node}"));
        fs::create_dir_all(&at).expect("a directory");
        run(self.ring.nodes[node].command(["mount", "team"]).arg(&at)).ok();
        self.mounts.push(at.clone());
        at
    }

    /// A file as it lies on a member's disk.
    fn plain(&self, node: usize, path: &str) -> PathBuf {
        Path::new(&self.files(node)).join("slots/000/0000000000000001").join(path)
    }

    fn assert_same_on_all(&self) {
        self.wait_until_whole();
        for node in 1..3 {
            let slots = |node| Path::new(&self.files(node)).join("slots");
            assert_same_contents(&slots(0), &slots(node));
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        for at in &self.mounts {
            let _ = run(atoll().arg("unmount").arg(at));
        }
    }
}

#[test]
fn a_pool_of_three_has_every_file_on_each_and_goes_on_after_each_dies() {
    let test = "a_pool_of_three_has_every_file_on_each_and_goes_on_after_each_dies";
    let Some(mut team) = Team::new(test) else { return };
    let (here, there) = (team.mount(0), team.mount(1));
    make_tree(&here.join("tree"));
    fs::create_dir(there.join("anna")).expect("made from another machine");
    fs::write(there.join("anna/file"), "text").expect("written");
    until("a machine sees what another has written", || {
        fs::read_to_string(here.join("anna/file")).is_ok_and(|text| text == "text")
    });
    for node in 0..3 {
        let plain = fs::read_to_string(team.plain(node, "anna/file"));
        assert_eq!(plain.expect("a plain file"), "text", "on node {node}");
    }
    team.assert_same_on_all();
    // A backup dies: files are read, and a change waits for it.
    team.ring.nodes[2].kill();
    assert_eq!(fs::read_to_string(here.join("anna/file")).expect("it is read"), "text");
    let waits = {
        let at = here.join("anna/late");
        std::thread::spawn(move || fs::write(at, "late"))
    };
    until("the status says who is missing", || {
        let told = team.pool(0, &["status"]).ok().stdout;
        told.contains("takes no part")
    });
    team.ring.nodes[2].restart();
    let waited = waits.join().expect("it ends");
    team.wait_until_whole();
    if waited.is_err() {
        // It was refused before it was begun, for the node was away for too long.
        fs::write(here.join("anna/late"), "late").expect("written");
    }
    // The primary dies: the mounts go on when it is back.
    team.ring.nodes[0].kill();
    team.ring.nodes[0].restart();
    until("the mount goes on", || fs::read_to_string(there.join("anna/late")).is_ok());
    fs::rename(there.join("anna"), there.join("tree/anna")).expect("moved");
    assert_eq!(fs::read_to_string(here.join("tree/anna/late")).expect("read"), "late");
    team.assert_same_on_all();
    let told = team.pool(1, &["status"]).ok().stdout;
    assert!(told.contains("3 machines, a copy on each; a backup"), "{told}");
    let all = team.ring.nodes[0].atoll(["status"]).ok().stdout;
    assert!(all.contains("pool team"), "{all}");
    // One member leaves, and has plain files.
    team.pool(2, &["leave", "team", "--yes"]).ok();
    let left = Path::new(&team.files(2)).join("tree/anna/late");
    assert_eq!(fs::read_to_string(left).expect("a plain file"), "late");
}

#[test]
fn codes_that_are_none_and_members_that_are_too_many_are_refused() {
    let test = "codes_that_are_none_and_members_that_are_too_many_are_refused";
    if !rustix::process::geteuid().is_root() {
        let _ = writeln!(std::io::stderr(), "\nSKIPPED {test}: a pool needs root");
        return;
    }
    let team = Team { ring: Ring::of(3), mounts: Vec::new() };
    let files = |node| team.files(node);
    team.pool(0, &["create", "team", &files(0), "--members", "17"])
        .failed(2, &["between 2 and 16 members"]);
    team.pool(0, &["create", "team", &files(0), "--members", "2", "--level", "17"])
        .failed(2, &["a distribution level is at most 16"]);
    assert!(!Path::new(&files(0)).exists(), "a directory that was made for nothing is gone");
    let code = team.pool(0, &["create", "team", &files(0), "--members", "2"]).ok().stdout;
    let code = code.trim();
    team.pool(1, &["join", &code[..code.len() - 1], "team", &files(1)])
        .failed(2, &["the code: ", "some are missing"]);
    team.pool(1, &["join", "atoll:abc", "team", &files(1)]).failed(2, &["atoll-pool:"]);
    fs::create_dir(files(1)).expect("made");
    fs::write(Path::new(&files(1)).join("full"), "x").expect("written");
    team.pool(1, &["join", code, "team", &files(1)]).failed(2, &["it is not empty: it holds full"]);
    fs::remove_file(Path::new(&files(1)).join("full")).expect("removed");
    team.pool(0, &["leave", "team", "--yes"]).failed(1, &["have not come together", "forget"]);
    let at = team.ring.path("mnt");
    fs::create_dir(&at).expect("made");
    run(team.ring.nodes[0].command(["mount", "team"]).arg(&at))
        .failed(5, &["1 of 2 members have joined"]);
    team.pool(1, &["join", code, "team", &files(1)]).ok();
    team.pool(1, &["join", code, "team", &files(2)]).failed(2, &["this node has a pool team"]);
    until("the pool has its two members", || {
        team.state()["states"].as_array().is_some_and(|states| states.len() == 2)
    });
    // A third one is not let in, and told so.
    team.pool(2, &["join", code, "team", &files(2)]).ok();
    until("the third is told", || {
        team.pool(2, &["status"]).ok().stdout.contains("has all its members already")
    });
    team.pool(2, &["forget", "team"]).ok();
    team.pool(0, &["invite", "team"]).failed(1, &["all its members already"]);
    team.pool(0, &["check", "team"]).failed(1, &["a node serves it"]);
}
