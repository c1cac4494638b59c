//! `--json`: each command that has it gives JSON, and of what goes wrong too; bytes that are no text are in it.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;

use crate::processes::{Ring, Said, atoll, can_mount, make_tree, run};
use crate::tfs::Mounted;

/// The commands whose help has `--json`. Those below one that has it share it.
fn commands_with_json() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut waiting: Vec<Vec<String>> = vec![Vec::new()];
    while let Some(command) = waiting.pop() {
        let help = run(atoll().args(&command).arg("--help")).ok().stdout;
        if help.lines().any(|line| line.trim_start().starts_with("--json")) {
            found.insert(command.join(" "));
            continue;
        }
        let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1);
        for line in listed.take_while(|line| !line.is_empty()) {
            let name = line.split_whitespace().next().expect("a name");
            if line.starts_with("  ") && !line.starts_with("   ") && name != "help" {
                waiting.push([&command[..], &[name.to_owned()]].concat());
            }
        }
    }
    found
}

/// What a command says that ended: JSON, a value on each line, or what went wrong as the last line of standard error.
#[track_caller]
fn check(command: &str, said: &Said) {
    if matches!(said.code, Some(0 | 7 | 8 | 9)) {
        said.json_lines();
        return;
    }
    assert_eq!(said.stdout, "", "{command}: {said:?}");
    let last = said.stderr.lines().last().unwrap_or_default();
    let failure: serde_json::Value =
        serde_json::from_str(last).unwrap_or_else(|_| panic!("{command}: {said:?}"));
    let failure = failure.as_object().expect("an object");
    assert_eq!(failure.keys().collect::<Vec<_>>(), ["error", "exit", "next", "why"], "{command}");
    assert_eq!(failure["exit"].as_i64(), said.code.map(i64::from), "{command}");
}

#[test]
fn every_command_that_has_json_gives_it_also_of_what_goes_wrong() {
    if !can_mount("every_command_that_has_json_gives_it_also_of_what_goes_wrong") {
        return;
    }
    let mut ring = Ring::of(2);
    let (source, address) = ring.publish_tree();
    let create = ["volume", "create", "team", "--shared"];
    ring.nodes[0].atoll(create).ok();
    let mount = ring.mount(0, "team", &[]);
    make_tree(&mount.join("tree"));
    let odd = mount.join("tree").join(OsStr::from_bytes(b"caf\xe9"));
    let code = ring.nodes[0].atoll(["volume", "invite", "team"]).ok().last_line().to_owned();
    let other = ring.nodes[1].atoll(["id", "--json"]).ok().json();
    let alice = format!("alice={}", other["user"].as_str().expect("a key"));
    let peer = ring.nodes[1].atoll(["status", "--json"]).ok().json();
    let peer = peer["peer_id"].as_str().expect("a key").to_owned();
    let [image, at] = ["disk.img", "tfs"].map(|name| ring.path(name));
    run(atoll().args(["tfs", "mkfs", "--size", "64MiB"]).arg(&image)).ok();
    let idle = ring.path("idle.img");
    run(atoll().args(["tfs", "mkfs", "--size", "64MiB"]).arg(&idle)).ok();
    let tfs = Mounted::new(&image, &at);

    let plain = ring.path("plain");
    let made = run(ring.nodes[0].command(["pool", "create", "plain"]).arg(&plain));
    // A pool keeps owners.
    assert!(made.code == Some(0) || !rustix::process::geteuid().is_root(), "{made:?}");
    if made.code == Some(0) {
        // One of several has a state that the node reports.
        run(ring.nodes[0].command(["pool", "create", "pair"]).arg(ring.path("pair0"))).ok();
        let invited = run(&mut ring.nodes[0].command(["pool", "invite", "pair"])).ok();
        let join = ["pool", "join", invited.last_line(), "pair"];
        run(ring.nodes[1].command(join).arg(ring.path("pair1"))).ok();
    }

    let taken = ring.path("taken");
    fs::create_dir(&taken).expect("made");
    fs::write(taken.join(OsStr::from_bytes(b"caf\xe9")), "text").expect("written");

    let path = |path: &std::path::Path| path.as_os_str().to_owned();
    let text = |text: &str| OsString::from(text);
    let file = format!("{address}/docs/file07.txt");
    // In this order: a node, a command, and its arguments.
    let table: Vec<(usize, &str, Vec<OsString>)> = vec![
        (0, "status", vec![]),
        (0, "id", vec![]),
        (0, "invite", vec![]),
        (0, "settings", vec![]),
        (0, "quota", vec![]),
        (0, "contribute", vec![]),
        (0, "gc", vec![]),
        (0, "publish", vec![path(&source)]),
        (0, "volumes", vec![]),
        (0, "ls", vec![text(&address)]),
        (0, "tree", vec![text(&address)]),
        (0, "stat", vec![text(&file)]),
        (1, "get", vec![text(&address), path(&ring.path("copy"))]),
        (0, "volume create", vec![text("work")]),
        (0, "volume list", vec![]),
        (0, "volume show", vec![text("work")]),
        (0, "volume show", vec![text("team")]),
        (0, "volume history", vec![text("work")]),
        (0, "volume history", vec![text("team")]),
        (0, "volume recover", vec![text("work")]),
        (0, "volume invite", vec![text("team")]),
        (1, "volume join", vec![text(&code), text("ours")]),
        (1, "volume show", vec![text("ours")]),
        (0, "group create", vec![text("band")]),
        (0, "group list", vec![text("band")]),
        (0, "grant", vec![text("team"), text(&alice)]),
        (0, "revoke", vec![text("team"), text("alice")]),
        (0, "renew", vec![]),
        (0, "why", vec![path(&odd)]),
        (0, "log", vec![path(&odd)]),
        (0, "nfs", vec![]),
        (0, "pool status", vec![]),
        (0, "pool check", vec![text("plain")]),
        (0, "pool adopt", vec![text("pair")]),
        (0, "pool revive", vec![text("pair"), text("--list")]),
        (
            0,
            "pool quota",
            vec![text("plain"), text("--user"), text("7"), text("--files"), text("9")],
        ),
        (0, "pool import", vec![text("plain"), path(&taken)]),
        (0, "conflicts", vec![path(&mount)]),
        (0, "tfs stat", vec![path(&at)]),
        (0, "tfs clean", vec![path(&at)]),
        (0, "tfs map", vec![path(&idle)]),
        (0, "tfs check", vec![path(&idle)]),
        (0, "lab list", vec![]),
        (
            0,
            "lab run",
            ["cfs-fig10", "--quick", "--runs", "1", "--out"]
                .map(text)
                .into_iter()
                .chain([path(&ring.path("lab"))])
                .collect(),
        ),
        (0, "member list", vec![]),
        (0, "secret rotate", vec![]),
        (0, "member remove", vec![text(&peer)]),
    ];
    let tested = table.iter().map(|(_, command, _)| (*command).to_owned()).collect();
    assert_eq!(commands_with_json(), tested, "a row for each command");
    let nowhere = ring.path("nowhere");
    for (node, command, arguments) in &table {
        let words = || command.split(' ').chain(["--json"]);
        let said = run(ring.nodes[*node].command(words()).args(arguments));
        let is_missing = matches!(
            *command,
            "pool check" | "pool adopt" | "pool import" | "pool quota" | "pool revive"
        ) && made.code != Some(0);
        assert!(matches!(said.code, Some(0 | 8 | 9)) || is_missing, "{command}: {said:?}");
        check(command, &said);
        if matches!(*command, "why" | "log") {
            let hex =
                said.json_lines()[0]["path_hex"].as_str().map(|hex| hex.ends_with("636166e9"));
            assert_eq!(hex, Some(true), "{command}: {said:?}");
        }
        // Where no node runs, and with an option that there is not.
        let mut without_node = atoll();
        without_node.args(words()).args(arguments).arg("--dir").arg(&nowhere);
        check(command, &run(&mut without_node));
        let said = run(ring.nodes[*node].command(words()).arg("--nonsense"));
        assert_eq!(said.code, Some(2), "{command}: {said:?}");
        check(command, &said);
    }
    assert!(!fs::exists(nowhere).expect("is asked"));
    tfs.unmount();
}
