//! Trees that cannot all be read, and volumes of which something is missing: what can be done
//! is done, and the rest is named, with an exit code of its own.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use atoll_key::BlockHash;
use atoll_store::{BlockStore, DiskConfig, DiskStore};

use crate::processes::{Ring, assert_same, make_tree, noise, run, unprivileged};

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("chmod");
}

/// `--skip-unreadable` took what it could not read out of the volume, with exit code 0.
#[test]
fn what_cannot_be_read_stays_as_it_was_published() {
    let ring = Ring::of(2);
    let (source, address) = ring.publish_tree();
    let before = ring.path("before");
    run(ring.nodes[1].command(["get", &address]).arg(&before)).ok();
    let publish = |options: &[&str]| {
        run(&mut unprivileged(ring.nodes[0].command(["publish"]).args(options).arg(&source)))
    };
    set_mode(&source.join("docs"), 0);
    fs::write(source.join("run.sh"), "#!/bin/sh\necho newer\n").expect("a file");
    fs::write(source.join("never readable"), "x").expect("a file");
    set_mode(&source.join("never readable"), 0);
    publish(&[]).failed(1, &["cannot read", "Permission denied", "--skip-unreadable"]);

    let said = publish(&["--skip-unreadable"]);
    assert_eq!(said.last_line(), address, "it is published: {said:?}");
    let said = said.failed(7, &["kept as it was: docs: ", "left out: never readable: "]);
    assert!(said.stderr.contains("1 kept as published before, 1 left out"), "{said:?}");
    let json = publish(&["--skip-unreadable", "--json"]).failed_json(7);
    assert_eq!((json["kept"].as_u64(), json["left_out"].as_u64()), (Some(1), Some(1)));
    assert_eq!(json["complete"].as_bool(), Some(false));
    assert_eq!(json["omissions"][0]["what"], "kept");
    assert_eq!(json["omissions"][0]["path"], "docs");
    assert_eq!(json["files"].as_u64(), Some(45), "what is kept counts: {json}");

    set_mode(&source.join("docs"), 0o755);
    fs::remove_file(source.join("never readable")).expect("removed");
    let after = ring.path("after");
    run(ring.nodes[1].command(["get", &address]).arg(&after)).ok();
    assert_same(&before.join("docs"), &after.join("docs"));
    assert!(fs::read_to_string(after.join("run.sh")).expect("reads").contains("newer"));
    let lost = ring.nodes[0].atoll(["renew", "--json"]).ok().json();
    assert_eq!(lost["lost_blocks"].as_u64(), Some(0), "every kept block is renewed: {lost}");
    let said = publish(&["--skip-unreadable", "--json"]).ok().json();
    assert_eq!(said["complete"].as_bool(), Some(true));
}

/// `get` ended at the first block that no node had.
#[test]
fn a_copy_goes_on_past_missing_blocks_and_resumes_when_they_are_back() {
    let mut ring = Ring::of(1);
    let source = ring.path("tree");
    make_tree(&source);
    fs::write(source.join("big"), noise(2 << 20, 7)).expect("a file");
    let address = ring.publish(&source);
    assert_eq!(ring.nodes[0].stop(), Some(0));
    let lost = BlockHash::of(&noise(2 << 20, 7)[5 * (64 << 10)..6 * (64 << 10)]);
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let dir = ring.nodes[0].dir.join("store");
        let store = DiskStore::open(&dir, DiskConfig::default()).expect("a store");
        let held = store.get(&lost.key()).await.expect("reads");
        assert!(held.is_some(), "the block is one of the file's");
        store.remove(vec![lost.key()]).await.expect("removes");
    });
    ring.nodes[0].restart();

    let dest = ring.path("copy");
    let get = |options: &[&str]| {
        let mut command = ring.nodes[0].command(["get", &address]);
        run(command.args(options).arg(&dest))
    };
    let said = get(&[]).failed(7, &["not copied: /big: ", "1 file or directory", "goes on"]);
    assert!(said.stdout.starts_with("copied 45 files"), "{said:?}");
    assert!(!dest.join("big").exists() && dest.join("docs/deep/deeper/large.bin").exists());
    let json = get(&["--json"]).failed_json(7);
    assert_eq!((json["unread"].as_u64(), json["complete"].as_bool()), (Some(1), Some(false)));
    assert_eq!(json["failures"][0]["path"], "big");
    assert_eq!(json["files_kept"].as_u64(), Some(45));
    let one = format!("{address}/big");
    let alone = ring.path("alone");
    let said = run(ring.nodes[0].command(["get", &one]).arg(&alone));
    said.failed(5, &["No node that can be reached has this block"]);
    assert!(!alone.exists());

    assert_eq!(ring.publish(&source), address);
    let json = get(&["--json"]).ok().json();
    assert_eq!(json["bytes_resumed"].as_u64(), Some((2 << 20) - (64 << 10)), "{json}");
    assert_same(&source, &dest);
}
