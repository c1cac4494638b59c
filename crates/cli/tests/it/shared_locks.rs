//! Locks of programs on two mounts of a shared volume.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::processes::{Ring, can_mount, until};

/// Two members' mounts of a volume.
fn two_mounts() -> (Ring, [PathBuf; 2]) {
    let mut ring = Ring::of(3);
    ring.nodes[0].atoll(["volume", "create", "work", "--shared"]).ok();
    let code = ring.nodes[0].atoll(["volume", "invite", "work"]).ok().last_line().to_owned();
    ring.nodes[1].atoll(["volume", "join", &code, "work"]).ok();
    let mounts = [0, 1].map(|node| ring.mount(node, "work", &[]));
    (ring, mounts)
}

/// Runs a shell script in a directory.
fn script(dir: &Path, script: &str) -> Child {
    let mut shell = Command::new("sh");
    shell.args(["-ec", script]).current_dir(dir).stdin(Stdio::null());
    shell.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("starts")
}

fn ends_well(child: Child) -> String {
    let output = child.wait_with_output().expect("ends");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Programs of two machines count in a file under `flock`, which opens it anew for each count.
#[test]
fn no_count_is_lost_between_two_mounts_that_lock() {
    if !can_mount("no_count_is_lost_between_two_mounts_that_lock") {
        return;
    }
    let (_ring, mounts) = two_mounts();
    fs::write(mounts[0].join("count"), "0\n").expect("writes");
    fs::write(mounts[0].join("lock"), "").expect("writes");
    until("the other sees both", || {
        ["count", "lock"].iter().all(|name| mounts[1].join(name).exists())
    });
    let counts = "for n in $(seq 12); do
        flock lock sh -ec 'n=$(cat count); echo $((n + 1)) > count'
    done";
    let programs = [0, 1, 1].map(|mount: usize| script(&mounts[mount], counts));
    programs.into_iter().for_each(|program| drop(ends_well(program)));
    assert_eq!(fs::read_to_string(mounts[0].join("count")).expect("reads"), "36\n");
}

/// A member who is shut out kept others from a file as long as his program held its lock.
#[test]
fn a_member_who_is_shut_out_loses_the_locks_that_he_has() {
    if !can_mount("a_member_who_is_shut_out_loses_the_locks_that_he_has") {
        return;
    }
    let (ring, mounts) = two_mounts();
    fs::write(mounts[0].join("lock"), "").expect("writes");
    until("the other sees it", || mounts[1].join("lock").exists());
    let mut holder = script(&mounts[1], "exec 9<lock; flock 9; touch held; exec sleep 600");
    until("it is locked", || mounts[0].join("held").exists());
    let is_free = || {
        let mut asked = Command::new("flock");
        asked.arg("-n").arg(mounts[0].join("lock")).arg("true");
        asked.status().expect("runs").success()
    };
    assert!(!is_free());
    let shown = ring.nodes[0].atoll(["volume", "show", "work", "--json"]).ok().json();
    let labels: Vec<&str> = shown["members"]
        .as_array()
        .expect("members")
        .iter()
        .filter_map(|member| member["label"].as_str())
        .collect();
    let member = labels.iter().find(|label| **label != "owner").expect("who was invited");
    ring.nodes[0].atoll(["revoke", "work", *member, "--now"]).ok();
    until("the owner can lock it", is_free);
    holder.kill().expect("it sleeps");
    holder.wait().expect("it was started here");
}

/// Two people commit to one repository: git locks by files that it creates exclusively.
#[test]
fn two_mounts_commit_to_one_repository() {
    if !can_mount("two_mounts_commit_to_one_repository") {
        return;
    }
    if Command::new("git").arg("--version").output().is_err() {
        eprintln!("SKIPPED two_mounts_commit_to_one_repository: there is no git");
        return;
    }
    let (_ring, mounts) = two_mounts();
    ends_well(script(&mounts[0], "git init -q --bare shared.git"));
    until("the other sees it", || mounts[1].join("shared.git/HEAD").exists());
    // Each in a clone of its own, since people edit their own files; a push that comes second pulls first.
    let commits = |who: &str| {
        format!(
            "work=$(mktemp -d); repository=$PWD/shared.git; cd \"$work\"
            export GIT_AUTHOR_NAME={who} GIT_AUTHOR_EMAIL=x GIT_COMMITTER_NAME={who} GIT_COMMITTER_EMAIL=x
            git init -q -b main . ; git remote add origin \"$repository\"
            for n in 1 2 3 4; do
                echo $n > {who}.$n; git add {who}.$n; git commit -qm \"{who} $n\"
                tries=0
                until git push -q origin main; do
                    tries=$((tries + 1)); test $tries -lt 100
                    git pull -q --no-edit --no-rebase --allow-unrelated-histories origin main || sleep 1
                done
            done
            rm -rf \"$work\""
        )
    };
    let people = [script(&mounts[0], &commits("ann")), script(&mounts[1], &commits("ben"))];
    people.into_iter().for_each(|person| drop(ends_well(person)));
    for mount in &mounts {
        let checks = "cd shared.git; git fsck --full --strict >&2; git ls-tree --name-only main";
        let files = ends_well(script(mount, checks));
        let all = "ann.1\nann.2\nann.3\nann.4\nben.1\nben.2\nben.3\nben.4\n";
        assert_eq!(files, all);
    }
}

/// Nodes are killed and started again, each sooner than a root is believed that is new to its keys: what needs
/// locks goes on, because a node knows what it has granted before.
#[test]
fn files_are_made_exclusively_while_one_node_after_the_other_is_killed_and_started_again() {
    if !can_mount(
        "files_are_made_exclusively_while_one_node_after_the_other_is_killed_and_started_again",
    ) {
        return;
    }
    let (mut ring, mounts) = two_mounts();
    ends_well(script(&mounts[0], "set -C; echo > lock"));
    until("the other sees it", || mounts[1].join("lock").exists());
    // Each says in a file of this machine how far it is.
    let done = ring.path("done");
    let makes = |who: &str| {
        format!(
            "set -C; for n in $(seq 12); do
                echo $n > {who}.$n; flock lock true; echo $n >> {}; sleep 1
            done",
            done.display()
        )
    };
    let mut programs = [script(&mounts[0], &makes("ann")), script(&mounts[1], &makes("ben"))];
    let mut kills = 0;
    let is_running = |programs: &mut [Child]| {
        programs.iter_mut().any(|program| program.try_wait().expect("ours").is_none())
    };
    while is_running(&mut programs) {
        let steps = || fs::read_to_string(&done).unwrap_or_default().lines().count();
        let before = steps();
        let node = &mut ring.nodes[kills % 3];
        node.kill();
        node.restart();
        kills += 1;
        std::thread::sleep(Duration::from_secs(4));
        until("the programs get on", || steps() > before || !is_running(&mut programs));
    }
    assert!(kills > 1, "nothing was tried");
    programs.into_iter().for_each(|program| drop(ends_well(program)));
}
