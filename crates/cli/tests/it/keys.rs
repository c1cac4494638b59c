//! A volume's key: shown, copied onto paper, handed over, destroyed.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use atoll_key::VolumeSecret;
use atoll_key::volume_secret::{Cost, SALT_BYTES};

use crate::processes::{
    NodeProcess, Ring, Said, assert_same, atoll, can_mount, run, unmount, until,
};

const PASSPHRASE: &str = "five quiet walruses knit";

/// Runs a command that reads `input`, with the passphrase in its environment.
fn run_with(command: &mut Command, input: &str) -> Said {
    command.env("ATOLL_PASSPHRASE", PASSPHRASE);
    run_typing(command, input)
}

fn run_typing(command: &mut Command, input: &str) -> Said {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the binary runs");
    let mut stdin = child.stdin.take().expect("piped");
    // A command may fail before it reads.
    let _ = stdin.write_all(input.as_bytes());
    drop(stdin);
    let output = child.wait_with_output().expect("ends");
    Said {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

fn volume(node: &NodeProcess, arguments: &[&str]) -> Command {
    let mut command = node.command(["volume"]);
    command.args(arguments);
    command
}

fn export(node: &NodeProcess, name: &str) -> String {
    run_with(&mut volume(node, &["export", name]), "").ok().stdout
}

fn import(node: &NodeProcess, arguments: &[&str], key: &str) -> Said {
    run_with(volume(node, &["import"]).args(arguments), key)
}

/// The same command in a session of its own, which has no terminal.
fn without_terminal(command: &Command) -> Command {
    let mut wrapped = Command::new("setsid");
    wrapped.arg("--wait").arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => wrapped.env(name, value),
            None => wrapped.env_remove(name),
        };
    }
    wrapped.env_remove("ATOLL_PASSPHRASE").stdin(Stdio::null());
    wrapped
}

fn sync(path: &Path) {
    File::open(path).and_then(|file| file.sync_all()).expect("is on the ring");
}

fn show(node: &NodeProcess, name: &str) -> serde_json::Value {
    run(&mut volume(node, &["show", name, "--json"])).ok().json()
}

#[test]
fn an_exported_key_writes_the_volume_when_its_node_is_gone() {
    if !can_mount("an_exported_key_writes_the_volume_when_its_node_is_gone") {
        return;
    }
    let mut ring = Ring::of(3);
    let create = run(&mut volume(&ring.nodes[0], &["create", "--encrypt", "diary"])).ok();
    let address = create.last_line().to_owned();
    let mount = ring.mount(0, "diary", &[]);
    fs::write(mount.join("day"), "one").expect("writes");
    sync(&mount);
    let key = export(&ring.nodes[0], "diary");
    assert!(key.starts_with("atoll-key:") && key.lines().all(|line| line.len() <= 64), "{key}");
    let read_key = address.split_once('#').expect("encrypted").1;
    assert!(!key.contains(read_key), "{key}");
    assert_ne!(export(&ring.nodes[0], "diary"), key, "each has a salt of its own");
    let piped = &mut volume(&ring.nodes[0], &["export", "diary", "--passphrase-file", "-"]);
    let key = run_typing(piped, &format!("{PASSPHRASE}\n")).ok().stdout;
    let shown = run(&mut volume(&ring.nodes[0], &["show", "diary", "--read-key"])).ok().stdout;
    assert!(shown.contains(&address), "{shown}");
    unmount(atoll().arg("unmount").arg(&mount));
    until("the mount has ended", || show(&ring.nodes[0], "diary")["writer"].is_null());

    let node = &ring.nodes[1];
    let wrong = || volume(node, &["import"]);
    let passphrase = ring.path("passphrase");
    fs::write(&passphrase, "six loud walruses\n").expect("writes");
    let file = passphrase.to_str().expect("text");
    run_typing(wrong().args(["--passphrase-file", file]), &key)
        .failed(2, &["the passphrase is wrong"]);
    run_typing(wrong().args(["--passphrase-file", "-"]), &key).failed(2, &["standard input"]);
    let mistyped = key.replacen(&key[30..33], "222", 1);
    import(node, &[], &mistyped).failed(2, &["mistyped or cut short"]);
    for end in [key.len() - 9, key.len() / 2] {
        let said = import(node, &[], &key[..end]).failed(2, &[]).stderr;
        // The bits of its last character may fit by chance.
        assert!(said.contains("some are missing") || said.contains("cut short"), "{said}");
    }
    import(node, &[], "").failed(2, &["no key on standard input"]);
    import(node, &[], &address).failed(2, &["should begin with \"atoll-key:\""]);
    run(&mut without_terminal(&wrong())).failed(2, &["no key on standard input"]);
    assert_eq!(run(&mut volume(node, &["list"])).ok().stdout, "", "nothing came of these");

    // Another volume has the name; the same one may come again.
    run(&mut volume(node, &["create", "diary"])).ok();
    import(node, &[], &key).failed(1, &["another volume that is called diary", "OTHER-NAME"]);
    import(node, &["a:b"], &key).failed(2, &["taken for an address"]);
    let said = import(node, &["old-diary"], &key).ok();
    assert!(said.stdout.contains("imported") && said.stdout.contains("leases"), "{said:?}");
    let again = import(node, &["old-diary"], &key).ok();
    assert!(again.stdout.contains("here already"), "{again:?}");
    import(node, &["third"], &key).failed(1, &["it is called old-diary here"]);
    let shown = show(node, "old-diary");
    assert!(shown["kept_blocks"].as_u64() > Some(0), "{shown}");
    assert_eq!(shown["encrypted"].as_bool(), Some(true));

    ring.nodes[0].kill();
    let mount = ring.mount(1, "old-diary", &[]);
    assert_eq!(fs::read(mount.join("day")).expect("reads"), b"one");
    fs::write(mount.join("day"), "two").expect("writes");
    sync(&mount);
    let said = ring.nodes[2].atoll(["cat", &format!("{address}/day")]).ok();
    assert_eq!(said.stdout, "two");
    unmount(atoll().arg("unmount").arg(&mount));
}

#[test]
fn a_published_directory_goes_on_from_another_machine() {
    let ring = Ring::of(2);
    let (source, address) = ring.publish_tree();
    let key = export(&ring.nodes[0], "tree");
    let node = &ring.nodes[1];
    import(node, &[], &key).ok();
    let shown = show(node, "tree");
    assert_eq!(
        (shown["kind"].as_str(), shown["source"].as_str()),
        (Some("published"), source.to_str())
    );
    let kept = |node| show(node, "tree")["kept_blocks"].clone();
    assert_eq!(kept(node), kept(&ring.nodes[0]), "both renew the same blocks");
    let moved = ring.path("elsewhere");
    fs::rename(&source, &moved).expect("renames");
    fs::write(moved.join("new"), "new").expect("writes");
    let mut command = node.command(["publish", "--moved", "--name", "tree"]);
    assert_eq!(run(command.arg(&moved)).ok().last_line(), address);
    let dest = ring.path("copy");
    run(ring.nodes[0].command(["get", &address]).arg(&dest)).ok();
    assert_same(&moved, &dest);
}

/// Typed in the terminal, twice, and not shown.
#[test]
fn a_passphrase_is_asked_for_without_echo() {
    let ring = Ring::of(1);
    let node = &ring.nodes[0];
    run(&mut volume(node, &["create", "work"])).ok();
    run(&mut without_terminal(&volume(node, &["export", "work"])))
        .failed(2, &["no terminal", "--passphrase-file"]);
    let typed = |lines: &str| {
        let inner = format!("{} volume export work", env!("CARGO_BIN_EXE_atoll"));
        let mut script = Command::new("script");
        script.args(["-qec", &inner, "/dev/null"]).env("ATOLL_DIR", &node.dir);
        run_typing(script.env_remove("ATOLL_PASSPHRASE"), lines)
    };
    if Command::new("script").arg("--version").output().is_err() {
        let _ = writeln!(std::io::stderr(), "\nSKIPPED the terminal half: no script(1) here");
        return;
    }
    let two = typed("a walrus\nno walrus\n");
    assert!(two.stdout.contains("the two passphrases differ"), "{two:?}");
    let empty = typed("\n\n");
    assert!(empty.stdout.contains("the passphrase is empty"), "{empty:?}");
    let interrupted = typed("a wal\u{3}");
    assert_eq!(interrupted.code, Some(130), "{interrupted:?}");
    let said = typed("a walrus\na walrus\n");
    assert_eq!(said.code, Some(0), "{said:?}");
    let key = &said.stdout[said.stdout.find("atoll-key:").expect("a key")..];
    let file = ring.path("passphrase");
    fs::write(&file, "a walrus").expect("writes");
    let mut command = volume(node, &["import", "--passphrase-file"]);
    run_typing(command.arg(&file), key).ok();
}

#[test]
fn a_moved_volume_is_let_go_only_when_the_other_node_has_it() {
    if !can_mount("a_moved_volume_is_let_go_only_when_the_other_node_has_it") {
        return;
    }
    let mut ring = Ring::of(3);
    let address = run(&mut volume(&ring.nodes[0], &["create", "work"])).ok().last_line().to_owned();
    let mount = ring.mount(0, "work", &[]);
    fs::write(mount.join("file"), "one").expect("writes");
    let go = |node: &NodeProcess| run_with(&mut volume(node, &["move", "work"]), "");
    sync(&mount);
    go(&ring.nodes[0]).failed(1, &["a mount writes it", "Unmount"]);
    fs::write(mount.join("file"), "two").expect("the volume is not marked");
    unmount(atoll().arg("unmount").arg(&mount));
    until("the mount has ended", || go(&ring.nodes[0]).code == Some(0));

    // Marked: no mount, no publish, no delete; leases are renewed, also after a crash.
    let key = go(&ring.nodes[0]).ok().stdout;
    ring.nodes[0].kill();
    ring.nodes[0].restart();
    let node = &ring.nodes[0];
    run(node.command(["mount", "work"]).arg(&mount)).failed(1, &["was moved to another node"]);
    fs::create_dir(ring.path("tree")).expect("a directory");
    let mut publish = node.command(["publish", "--name", "work"]);
    run(publish.arg(ring.path("tree"))).failed(1, &["was moved to another node"]);
    run(&mut volume(node, &["delete", "work", "--yes"])).failed(1, &["moved", "volume forget"]);
    assert!(node.atoll(["renew", "work"]).ok().stdout.contains("kept until"));
    assert_eq!(show(node, "work")["is_moved"].as_bool(), Some(true));

    // It may stay after all.
    run(&mut volume(node, &["move", "--cancel", "work"])).ok();
    run(&mut volume(node, &["move", "--cancel", "work"])).failed(1, &["it was not moved"]);
    let mount = ring.mount(0, "work", &[]);
    assert_eq!(fs::read(mount.join("file")).expect("reads"), b"two");
    unmount(atoll().arg("unmount").arg(&mount));
    until("the mount has ended", || go(&ring.nodes[0]).code == Some(0));
    let second = go(&ring.nodes[0]).ok().stdout;

    // The key of the move that was cancelled is a copy; it takes nothing away.
    import(&ring.nodes[2], &[], &key).ok();
    ring.nodes[0].atoll(["renew", "work"]).ok();
    for _ in 0..2 {
        // As after a crash: each step may be repeated.
        let said = import(&ring.nodes[1], &[], &second).ok();
        assert!(said.stdout.contains("forgets it"), "{said:?}");
    }
    run(&mut volume(&ring.nodes[0], &["move", "--cancel", "work"]))
        .failed(1, &["another node has taken it over"]);
    let said = ring.nodes[0].atoll(["renew", "work"]).ok();
    assert!(said.stdout.contains("work: the node that it was moved to renews it"), "{said:?}");
    ring.nodes[0].atoll(["renew", "work"]).failed(4, &["no volume work"]);
    assert_eq!(run(&mut volume(&ring.nodes[0], &["list"])).ok().stdout, "");

    let mount = ring.mount(1, "work", &[]);
    assert_eq!(fs::read(mount.join("file")).expect("reads"), b"two");
    fs::write(mount.join("file"), "three").expect("writes");
    sync(&mount);
    assert_eq!(ring.nodes[0].atoll(["cat", &format!("{address}/file")]).ok().stdout, "three");
    unmount(atoll().arg("unmount").arg(&mount));
}

/// The import and its node are killed at many moments: one node always renews all of the leases,
/// and the same command goes on.
#[test]
fn a_move_that_is_interrupted_anywhere_loses_nothing() {
    let mut ring = Ring::of(3);
    let (_, address) = ring.publish_tree();
    let blocks = show(&ring.nodes[0], "tree")["kept_blocks"].clone();
    let key = run_with(&mut volume(&ring.nodes[0], &["move", "tree"]), "").ok().stdout;
    // Opened at once, so that most of the time is the import's.
    let secret = VolumeSecret::open(&key, PASSPHRASE).expect("opens");
    let key = secret.seal(PASSPHRASE, [1; SALT_BYTES], Cost { memory_kib: 8, passes: 1 });
    let renewed = |node: &NodeProcess| {
        let listed = run(&mut volume(node, &["list", "--json"])).ok().json_lines();
        let tree = listed.into_iter().find(|volume| volume["name"] == "tree");
        tree.is_some_and(|tree| tree["kept_blocks"] == blocks)
    };
    for round in 0..18 {
        let mut command = volume(&ring.nodes[1], &["import"]);
        command.env("ATOLL_PASSPHRASE", PASSPHRASE).stdin(Stdio::piped());
        let mut import = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("runs");
        let _ = import.stdin.take().expect("piped").write_all(key.as_bytes());
        std::thread::sleep(Duration::from_millis(5 + 3 * round));
        if round % 3 == 2 {
            ring.nodes[1].kill();
        }
        let _ = import.kill();
        import.wait().expect("ends");
        if round % 3 == 2 {
            ring.nodes[1].restart();
        }
        let is_here = renewed(&ring.nodes[0]);
        assert!(is_here || renewed(&ring.nodes[1]), "nobody renews the leases, round {round}");
        // Lets go if the other node has taken over.
        ring.nodes[0].atoll(["renew", "tree"]);
    }
    import(&ring.nodes[1], &[], &key).ok();
    let gone = ring.nodes[0].atoll(["renew", "tree"]);
    // One of the renewals above may have found that it is elsewhere.
    assert!(gone.stdout.contains("it is forgotten here") || gone.code == Some(4), "{gone:?}");
    assert!(renewed(&ring.nodes[1]));
    ring.nodes[0].atoll(["tree", &address]).ok();
}

#[test]
fn a_deleted_volume_is_removed_for_its_readers() {
    if !can_mount("a_deleted_volume_is_removed_for_its_readers") {
        return;
    }
    let mut ring = Ring::of(3);
    let address = run(&mut volume(&ring.nodes[0], &["create", "work"])).ok().last_line().to_owned();
    run(&mut volume(&ring.nodes[0], &["show", "wrok"])).failed(4, &["no volume of that name"]);
    let mount = ring.mount(0, "work", &[]);
    fs::write(mount.join("file"), "some").expect("writes");
    sync(&mount);
    let shown = show(&ring.nodes[0], "work");
    assert_eq!(shown["root"]["files"].as_u64(), Some(1), "{shown}");
    assert_eq!(shown["writer"]["mounted_on"][0].as_str(), mount.to_str(), "{shown}");
    let text = run(&mut volume(&ring.nodes[0], &["show", "work"])).ok().stdout;
    assert!(text.contains("the mount on") && text.contains("written by mounts"), "{text}");

    let delete = |options: &[&str]| {
        let mut command = volume(&ring.nodes[0], &["delete", "work"]);
        command.args(options);
        run(&mut without_terminal(&command))
    };
    delete(&["--yes"]).failed(1, &["a mount writes it", "--force"]);
    run(&mut volume(&ring.nodes[0], &["forget", "work", "--yes"])).failed(1, &["it is mounted on"]);
    delete(&["--force"]).failed(2, &["no terminal", "--yes"]);
    assert_eq!(fs::read(mount.join("file")).expect("it is still there"), b"some");
    let said = delete(&["--force", "--yes"]).ok();
    assert!(
        said.stdout.contains("work: deleted; its room on the ring is back within minutes"),
        "{said:?}"
    );
    delete(&["--yes"]).failed(4, &["no volume of that name"]);
    ring.nodes[2].atoll(["ls", &address]).failed(4, &["removed by its owner"]);
    fs::write(mount.join("file"), "more").expect("is in memory");
    File::open(&mount).and_then(|file| file.sync_all()).expect_err("another root is on the ring");
    unmount(atoll().args(["unmount", "--lazy"]).arg(&mount));
}

/// The import said that it renewed 0 blocks: the node walks trees of one writer only.
#[test]
fn the_import_of_a_shared_volume_renews_what_is_in_it() {
    let ring = Ring::of(2);
    let node = &ring.nodes[0];
    run(&mut volume(node, &["create", "our work", "--shared"])).ok();
    let key = export(node, "our work");
    let said = import(&ring.nodes[1], &[], &key).ok();
    assert!(said.stdout.contains(" of 1 file or directory"), "{said:?}");
    assert!(!said.stdout.contains(" 0 blocks"), "{said:?}");
    // It is too young for an old state, and says so.
    let said = run(&mut volume(node, &["history", "our work", "--json"])).ok();
    // Unless a minute of the clock has ended meanwhile, whose state is kept.
    if said.stdout.is_empty() {
        assert!(said.stderr.contains("no state is kept now"), "{said:?}");
    } else {
        assert_eq!(said.json_lines().len(), 1, "{said:?}");
    }
    // What is advised can be typed.
    let said = run(&mut volume(node, &["show", "their work"])).failed(4, &[]);
    assert!(said.stderr.contains("`atoll volume create 'their work'`"), "{said:?}");
}

#[test]
fn a_volume_deleted_or_forgotten_can_come_back_if_its_key_was_kept() {
    let ring = Ring::of(2);
    let (source, address) = ring.publish_tree();
    let node = &ring.nodes[0];
    let key = export(node, "tree");
    run(&mut volume(node, &["delete", "tree", "--yes", "--keep-key"])).ok();
    ring.nodes[1].atoll(["ls", &address]).failed(4, &["removed by its owner"]);
    let text = run(&mut volume(node, &["show", "tree"])).ok().stdout;
    assert!(text.contains("removed by its owner"), "{text}");
    assert_eq!(ring.publish(&source), address);
    ring.nodes[1].atoll(["ls", &address]).ok();

    run(&mut volume(node, &["forget", "tree", "--yes"])).ok();
    node.atoll(["ls", &address]).ok();
    let gone = run(&mut volume(node, &["show", "tree"]));
    gone.failed(4, &["no volume of that name"]);
    import(node, &[], &key).ok();
    assert_eq!(ring.publish(&source), address);

    run(&mut volume(node, &["delete", "tree", "--yes"])).ok();
    let said = import(node, &[], &key).ok();
    assert!(said.stdout.contains("no leases to renew"), "{said:?}");
    assert_eq!(ring.publish(&source), address, "an exported key brings it back");
    let own = |name: &str| run(&mut volume(node, &["create", name])).ok().last_line().to_owned();
    let work = own("work");
    run(&mut volume(node, &["delete", "work", "--yes", "--keep-key"])).ok();
    assert_eq!(own("work"), work);
}
