//! What a person meets who types something wrong, or asks for help.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use crate::processes::{NodeProcess, atoll, run, unpublished};

const COMMANDS: [&str; 29] = [
    "up",
    "invite",
    "member",
    "secret",
    "publish",
    "volume",
    "volumes",
    "renew",
    "unpublish",
    "id",
    "grant",
    "revoke",
    "group",
    "conflicts",
    "ls",
    "tree",
    "cat",
    "stat",
    "get",
    "mount",
    "unmount",
    "status",
    "settings",
    "quota",
    "contribute",
    "tfs",
    "lab",
    "completions",
    "man",
];

#[test]
fn every_command_explains_itself() {
    for command in COMMANDS {
        let help = run(atoll().args([command, "--help"])).ok().stdout;
        assert!(help.contains("Examples:") && help.contains("--dir"), "{command}: {help}");
    }
    let help = run(atoll().arg("--help")).ok().stdout;
    for command in COMMANDS {
        assert!(help.contains(&format!("\n  {command} ")), "{command} is not in the help");
    }
    assert!(help.contains("Exit codes:"));
}

#[test]
fn every_command_has_a_manual_page() {
    let temp = tempfile::tempdir().expect("temp");
    let dir = temp.path().join("man1");
    run(atoll().arg("man").arg(&dir)).ok();
    for command in COMMANDS {
        let page = fs::read_to_string(dir.join(format!("atoll-{command}.1"))).expect(command);
        assert!(page.contains(".TH") && page.contains(".SH EXAMPLES"), "{command}: {page}");
    }
    let whole = run(atoll().arg("man")).ok().stdout;
    assert!(whole.contains(".TH atoll 1") || whole.contains(".TH ATOLL 1"), "{whole}");
    assert!(whole.contains("EXIT STATUS"));
}

#[test]
fn every_shell_has_completions_for_every_command() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = run(atoll().args(["completions", shell])).ok().stdout;
        for command in COMMANDS {
            assert!(script.contains(command), "{shell}: {command}");
        }
    }
}

/// Each row: what is typed, the exit code, and words of the explanation.
#[test]
fn wrong_input_is_explained() {
    let temp = tempfile::tempdir().expect("temp");
    let dir = temp.path().join("none").display().to_string();
    let a_file = temp.path().join("file");
    fs::write(&a_file, "x").expect("a file");
    let a_file = a_file.display().to_string();
    let nowhere = unpublished();
    let short = &nowhere[..38];
    let with_dots = format!("{nowhere}/a/../b");
    let below = format!("{nowhere}/sub");
    let at_noon = format!("{nowhere}@noon");
    let table: &[(&[&str], i32, &[&str])] = &[
        (&[], 2, &["Usage"]),
        (&["pubish", "x"], 2, &["unrecognized", "publish"]),
        (&["publish"], 2, &["<DIR>"]),
        (&["ls"], 2, &["<ADDR"]),
        (&["ls", "docs"], 2, &["atoll:KEY", "should begin with"]),
        (&["ls", "atoll:"], 2, &["some are missing"]),
        (&["ls", short], 2, &["mistyped or cut short"]),
        (&["cat", "atoll:aaaa!aaa"], 2, &["do not belong"]),
        (&["cat", &with_dots], 2, &["\"..\""]),
        (&["up", "--listen", "here"], 2, &["--listen", "an IP address and a port"]),
        (&["up", "--storage", "lots"], 2, &["a number and a unit"]),
        (&["up", "--join", "atoll-join:xyz"], 2, &["--join", "atoll invite"]),
        (&["up", "--join", "-"], 2, &["no join code on standard input"]),
        (&["up", "--join", "hello"], 2, &["should begin with", "atoll-join:"]),
        (&["mount", "atoll:x", "/mnt"], 2, &["atoll:KEY"]),
        (&["mount", "work@noon", "/mnt"], 2, &["work@noon", "2026-11-20T12:00"]),
        (&["mount", &at_noon, "/mnt"], 2, &["2026-11-20T12:00"]),
        (&["mount", "work", "/mnt", "--keep", "24x"], 2, &["--keep", "24h/7d/4w"]),
        (&["mount", "work@2026-11-20", "/mnt", "--keep", "1h"], 2, &["writes nothing"]),
        (&["mount", &nowhere, "/mnt", "--keep", "1h"], 2, &["writes nothing"]),
        (&["volume", "create", "work", "--keep", "0h"], 2, &["--keep", "24h/7d/4w"]),
        (&["volume", "restore", "work"], 2, &["needs a time", "work@2026-11-20T12:00"]),
        (&["volume", "restore", "work@noon"], 2, &["2026-11-20T12:00"]),
        (&["volume", "restore", "work@2026-11-20", "--force"], 2, &["PATH"]),
        (&["mount", &below, "/mnt"], 2, &["only whole volumes"]),
        (&["mount", &nowhere, "/mnt", "--max-age", "soon"], 2, &["30s"]),
        (&["publish", &dir], 4, &["cannot publish", "No such file"]),
        (&["publish", &a_file], 1, &["not a directory"]),
        (&["tree", &nowhere, "--depth", "0"], 2, &["--depth"]),
        (&["publish", "/", "--block-size", "5000"], 2, &["power of two"]),
        (&["publish", "/", "--block-size", "2MiB"], 2, &["1MiB"]),
        (&["publish", "/", "--exclude", "a{"], 2, &["--exclude"]),
        (&["status", "--wait", "dinner"], 2, &["joined, replicated, nodes=N"]),
        (&["completions", "csh"], 2, &["bash"]),
        (&["unmount", &dir], 4, &["none"]),
        (&["unmount", "/"], 1, &["not a mount of atoll"]),
        (&["unmount", temp.path().to_str().expect("text")], 4, &["nothing is mounted"]),
    ];
    for (arguments, code, words) in table {
        run(atoll().args(*arguments).args(["--dir", &dir]).stdin(std::process::Stdio::null()))
            .failed(*code, words);
    }
}

#[test]
fn without_a_node_every_command_says_how_to_start_one() {
    let temp = tempfile::tempdir().expect("temp");
    let dir = temp.path().join("none");
    let dest = temp.path().join("dest").display().to_string();
    let source = temp.path().display().to_string();
    let nowhere = unpublished();
    let table: &[&[&str]] = &[
        &["status"],
        &["status", "--json"],
        &["invite"],
        &["member", "list"],
        &["secret", "rotate"],
        &["volumes"],
        &["volume", "show", "work"],
        &["volume", "delete", "work"],
        &["publish", &source],
        &["ls", &nowhere],
        &["tree", &nowhere],
        &["cat", &nowhere],
        &["stat", &nowhere],
        &["get", &nowhere, &dest],
        &["mount", &nowhere, &source],
        &["mount", "work@2026-11-20", &source],
        &["volume", "history", "work"],
        &["volume", "restore", "work@2026-11-20"],
    ];
    for arguments in table {
        let said = run(atoll().args(*arguments).arg("--dir").arg(&dir));
        let said = said.failed(3, &["no node runs in", "atoll up --dir", "none"]);
        assert_eq!(said.stdout, "", "{arguments:?}: nothing on standard output");
    }
    assert!(!dir.exists(), "looking for a node must not make its directory");
}

#[test]
fn what_goes_wrong_is_json_for_a_program_that_asks_for_it() {
    let temp = tempfile::tempdir().expect("temp");
    let dir = temp.path().join("no node").display().to_string();
    let table: [(&[&str], i32, &str); 4] = [
        (&["status", "--json"], 3, "no node runs in"),
        (&["get", "--json"], 2, "the command line makes no sense"),
        (&["conflicts", "--json", "/nowhere/at/all"], 4, "cannot read /nowhere/at/all"),
        (&["publish", "--json", "/nowhere/at/all"], 4, "cannot publish /nowhere/at/all"),
    ];
    for (arguments, code, what) in table {
        let said = run(atoll().args(arguments).args(["--dir", &dir])).failed(code, &[]);
        assert_eq!((&said.stdout[..], said.stderr.lines().count()), ("", 1), "{said:?}");
        let failure: serde_json::Value = serde_json::from_str(&said.stderr).expect("JSON");
        assert!(failure["error"].as_str().is_some_and(|it| it.starts_with(what)), "{failure}");
        assert_eq!(failure["exit"], code);
        let next = failure["next"].as_str().unwrap_or_default();
        assert!(code != 3 || next.contains(&format!("--dir '{dir}'")), "{failure}");
    }
    // A name, here.
    run(atoll().args(["get", "--", "--json"])).failed(2, &["error: "]);
}

#[test]
fn the_directory_is_named_before_or_after_or_by_the_environment() {
    let temp = tempfile::tempdir().expect("temp");
    let node = NodeProcess::start(temp.path().join("n"), None);
    node.wait_for(&["joined"]);
    let here = node.dir.display().to_string();
    for arguments in [["--dir", &here, "status"], ["status", "--dir", &here]] {
        let status = run(atoll().env("ATOLL_DIR", "/nowhere").args(arguments).arg("--json")).ok();
        assert_eq!(status.json()["dir"], here.as_str());
    }
    let by_environment = run(atoll().env("ATOLL_DIR", &here).args(["status", "--json"])).ok();
    assert_eq!(by_environment.json()["dir"], here.as_str());
    let default = temp.path().join("data");
    let said = run(atoll().env("XDG_DATA_HOME", &default).arg("status"));
    said.failed(3, &[&default.join("atoll").display().to_string()]);
}

#[test]
fn keys_and_sockets_are_for_their_owner_only() {
    let temp = tempfile::tempdir().expect("temp");
    let mut node = NodeProcess::start(temp.path().join("n"), None);
    node.wait_for(&["joined"]);
    let mode = |name: &str| {
        let metadata = fs::symlink_metadata(node.dir.join(name)).expect(name);
        metadata.permissions().mode() & 0o777
    };
    assert_eq!(mode("identity.key"), 0o600);
    assert_eq!(mode("control.sock"), 0o600);
    assert_eq!(mode(""), 0o700);
    let second = run(atoll().args(["up", "--listen", "127.0.0.1:0", "--dir"]).arg(&node.dir));
    second.failed(1, &["a node runs in", "already"]);
    assert_eq!(node.stop(), Some(0), "SIGTERM is a clean end");
    let one = node.dir.join("identity.key");
    fs::set_permissions(&one, fs::Permissions::from_mode(0o644)).expect("chmod");
    let said = run(atoll().args(["up", "--dir"]).arg(&node.dir));
    said.failed(1, &["can be read by others", "chmod 600"]);
}

#[test]
fn a_directory_from_the_environment_is_not_shown_as_required() {
    let said = run(atoll().env("ATOLL_DIR", "/nowhere").arg("publish")).failed(2, &["<DIR>"]);
    assert!(!said.stderr.contains("--dir"), "{}", said.stderr);
}

#[test]
fn a_full_disk_behind_standard_output_is_told() {
    let full = fs::OpenOptions::new().write(true).open("/dev/full").expect("Linux has it");
    let mut command = atoll();
    let said = command.args(["completions", "bash"]).stdout(full).output().expect("runs");
    assert_eq!(said.status.code(), Some(6));
    assert!(String::from_utf8_lossy(&said.stderr).contains("standard output"), "{said:?}");
}
