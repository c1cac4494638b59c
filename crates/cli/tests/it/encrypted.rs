//! Volumes that only who has the read key can read: through commands and mounts.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;

use crate::processes::{Ring, assert_same, atoll, can_mount, make_tree, run, unmount};

/// Publishes `source` encrypted; the address, in its two parts.
fn publish(ring: &Ring, source: &Path) -> (String, String) {
    let said = run(ring.nodes[0].command(["publish", "--encrypt"]).arg(source)).ok();
    let (volume, read_key) = said.last_line().split_once('#').expect("it has a read key");
    (volume.to_string(), read_key.to_string())
}

/// Whether any file below `dir` holds these bytes.
fn holds(dir: &Path, words: &[u8]) -> bool {
    let entries = fs::read_dir(dir).expect("a directory");
    entries.map(|entry| entry.expect("an entry")).any(|entry| {
        let kind = entry.file_type().expect("a kind");
        if kind.is_dir() {
            return holds(&entry.path(), words);
        }
        let bytes =
            if kind.is_file() { fs::read(entry.path()).unwrap_or_default() } else { vec![] };
        bytes.windows(words.len()).any(|part| part == words)
    })
}

#[test]
fn an_encrypted_tree_is_read_with_its_whole_address_and_not_without() {
    let ring = Ring::of(2);
    let source = ring.path("tree");
    make_tree(&source);
    fs::write(source.join("docs/a-telling-name"), "telling words").expect("a file");
    let (volume, read_key) = publish(&ring, &source);
    let address = format!("{volume}#{read_key}");
    let other = &ring.nodes[1];

    let names = other.atoll(["ls", &address]).ok().stdout;
    assert!(names.lines().any(|line| line == "run.sh"), "{names}");
    let file = format!("{address}/docs/file07.txt");
    assert_eq!(other.atoll(["cat", &file]).ok().stdout, "this is file 7\n");
    assert!(other.atoll(["tree", &address]).ok().stdout.contains("a-telling-name"));
    assert!(other.atoll(["stat", &file]).ok().stdout.contains("15 bytes"));
    let dest = ring.path("copy");
    run(other.command(["get", &address]).arg(&dest)).ok();
    assert_same(&source, &dest);

    // The key by other ways, so that `ps` and the shell's history do not have it.
    let key_file = ring.path("key");
    fs::write(&key_file, format!("{address}\n")).expect("a file");
    let key_path = key_file.display().to_string();
    other.atoll(["ls", &volume, "--read-key", &key_path]).ok();
    run(other.command(["ls", &volume]).env("ATOLL_READ_KEY", &read_key)).ok();
    let mut command = other.command(["ls", &volume, "--read-key", "-"]);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("the binary runs");
    let mut stdin = child.stdin.take().expect("piped");
    stdin.write_all(read_key.as_bytes()).expect("is read");
    drop(stdin);
    assert!(child.wait().expect("ends").success());

    for command in ["ls", "tree", "stat"] {
        other.atoll([command, &volume]).failed(2, &["is encrypted", "#READKEY", "--read-key"]);
    }
    let wrong = atoll_key::ReadKey::from_bytes([5; 32]).to_text();
    let said = other.atoll(["cat", &format!("{volume}{wrong}/run.sh")]);
    said.failed(2, &["the read key is wrong"]);
    let said = other.atoll(["ls", &address[..address.len() - 4]]);
    said.failed(2, &["the read key behind the #", "mistyped or cut short"]);

    // Nothing of the tree is in the clear in what the nodes keep; nor is the key, but in
    // the publisher's own file of it.
    for node in &ring.nodes {
        for words in ["a-telling-name", "telling words", "this is file 7"] {
            assert!(!holds(&node.dir.join("store"), words.as_bytes()), "{words}");
        }
        let status = node.atoll(["status", "--json"]).ok().stdout;
        let volumes = node.atoll(["volumes", "--json"]).ok().stdout;
        assert!(!status.contains(&read_key) && !volumes.contains(&read_key));
        assert!(!node.log().contains(&read_key));
    }
    assert!(!holds(&other.dir, read_key.as_bytes()));
    assert!(holds(&ring.nodes[0].dir.join("volumes"), read_key.as_bytes()));
}

#[test]
fn who_can_read_a_volume_changes_only_when_asked() {
    let ring = Ring::of(1);
    let source = ring.path("tree");
    make_tree(&source);
    let (volume, read_key) = publish(&ring, &source);
    let publish_with = |options: &[&str], name: &str| {
        run(ring.nodes[0].command(["publish"]).arg(&source).args(["--name", name]).args(options))
    };
    // It stays encrypted, under the same address, without being told again.
    fs::write(source.join("more"), "more").expect("a file");
    for options in [&[][..], &["--encrypt"]] {
        let said = publish_with(options, "tree").ok();
        assert_eq!(said.last_line(), format!("{volume}#{read_key}"));
    }
    publish_with(&["--plain"], "tree").failed(1, &["encrypted", "--plain --convert"]);
    publish_with(&["--plain", "--encrypt"], "tree").failed(2, &["--encrypt"]);
    publish_with(&["--convert"], "tree").failed(2, &["--encrypt"]);
    let said = publish_with(&["--plain", "--convert"], "tree").ok();
    assert_eq!(said.last_line(), volume);
    ring.nodes[0].atoll(["ls", &volume]).ok();
    let said = ring.nodes[0].atoll(["ls", &format!("{volume}#{read_key}")]);
    said.failed(2, &["not encrypted"]);
    // An environment that has a key for some other volume is no error.
    run(ring.nodes[0].command(["ls", &volume]).env("ATOLL_READ_KEY", &read_key)).ok();

    let said = publish_with(&["--encrypt"], "tree");
    said.failed(1, &["in the clear", "--encrypt --convert"]);
    assert_eq!(publish_with(&[], "tree").ok().last_line(), volume, "it made no read key");
    let said = publish_with(&["--encrypt", "--convert", "--json"], "tree").ok().json();
    let address = said["address"].as_str().expect("text");
    assert_eq!((said["encrypted"].as_bool(), address.starts_with(&volume)), (Some(true), true));
    assert!(!address.ends_with(&read_key), "a forgotten key is not used again");
    ring.nodes[0].atoll(["ls", address]).ok();
}

/// A mount lives long: neither its arguments, its environment, its log nor the list of
/// mounts may tell the read key.
#[test]
fn a_mount_of_an_encrypted_volume_does_not_show_its_key() {
    if !can_mount("a_mount_of_an_encrypted_volume_does_not_show_its_key") {
        return;
    }
    let mut ring = Ring::of(2);
    let source = ring.path("tree");
    make_tree(&source);
    let (volume, read_key) = publish(&ring, &source);
    let mount = ring.mount(1, &format!("{volume}#{read_key}"), &[]);
    assert_same(&source, &mount);
    let mounts = fs::read_to_string("/proc/self/mounts").expect("Linux has it");
    assert!(mounts.contains(&volume) && !mounts.contains(&read_key), "{mounts}");
    let mut servers = 0;
    for process in fs::read_dir("/proc").expect("Linux has it").flatten() {
        let read = |name: &str| fs::read(process.path().join(name)).unwrap_or_default();
        let (arguments, environment) = (read("cmdline"), read("environ"));
        let has = |bytes: &[u8], words: &str| {
            bytes.windows(words.len()).any(|part| part == words.as_bytes())
        };
        if has(&arguments, &volume) && has(&arguments, &mount.display().to_string()) {
            servers += 1;
            assert!(!has(&arguments, &read_key) && !has(&environment, &read_key));
        }
    }
    assert_eq!(servers, 1, "the mount's process was looked at");
    assert!(!holds(&ring.nodes[1].dir.join("logs"), read_key.as_bytes()));

    let empty = ring.path("empty");
    fs::create_dir(&empty).expect("a directory");
    let said = run(ring.nodes[1].command(["mount", &volume]).arg(&empty));
    said.failed(2, &["is encrypted", "#READKEY"]);
    let mut command = ring.nodes[1].command(["mount", &volume]);
    run(command.arg(&empty).env("ATOLL_READ_KEY", &read_key)).ok();
    assert_same(&source, &empty);
    unmount(atoll().arg("unmount").arg(&empty));
}
