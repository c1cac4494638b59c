//! What is written offline while another member removes it, or the directory that it is in: it has a name afterwards.

use std::collections::BTreeMap;
use std::time::Duration;

use atoll_vfs::{Caller, FileSystem, InodeNumber, RenameFlags, SetAttr};
use atoll_volume::shared::SharedFs;
use atoll_volume::shared::merged::ConflictName;
use bytes::Bytes;

use super::offline::{Setting, names, read, tree, write};

const ROOT: InodeNumber = InodeNumber::ROOT;
const MINUTE: Duration = Duration::from_secs(60);

fn me() -> Caller {
    Caller::default()
}

async fn mkdir(fs: &SharedFs, parent: InodeNumber, name: &str) -> InodeNumber {
    fs.mkdir(me(), parent, name.as_bytes(), 0o755).await.expect("is made").attr.inode
}

async fn find(fs: &SharedFs, path: &[&str]) -> InodeNumber {
    let mut at = ROOT;
    for name in path {
        at = fs.lookup(me(), at, name.as_bytes()).await.expect("is there").attr.inode;
    }
    at
}

/// Removes a directory with all that is in it, as `rm -r`.
async fn remove_all(fs: &SharedFs, parent: InodeNumber, name: &str) {
    let directory = fs.lookup(me(), parent, name.as_bytes()).await.expect("is there").attr.inode;
    for below in names(fs, directory).await.expect("lists") {
        let found = fs.lookup(me(), directory, below.as_bytes()).await.expect("is there");
        match found.attr.kind {
            atoll_vfs::FileKind::Directory => Box::pin(remove_all(fs, directory, &below)).await,
            _ => fs.unlink(me(), directory, below.as_bytes()).await.expect("is removed"),
        }
    }
    fs.rmdir(me(), parent, name.as_bytes()).await.expect("is removed");
    fs.sync().await.expect("the ring knows");
}

/// All files, the names of conflicts without their ends; each as it was shown.
fn beside(tree: &BTreeMap<String, Bytes>) -> BTreeMap<String, Bytes> {
    let plain = |path: &str| {
        let parts = path.split('/').map(|name| match ConflictName::parse(name.as_bytes()) {
            Some(conflict) => format!("{}~", String::from_utf8_lossy(conflict.beside)),
            None => name.to_owned(),
        });
        parts.collect::<Vec<_>>().join("/")
    };
    tree.iter().map(|(path, bytes)| (plain(path), bytes.clone())).collect()
}

fn files(expected: &[(&str, &str)]) -> BTreeMap<String, Bytes> {
    let file =
        |(path, text): &(&str, &str)| ((*path).to_owned(), Bytes::copy_from_slice(text.as_bytes()));
    expected.iter().map(file).collect()
}

/// Both mounts show these files, and nothing waits.
fn check(all: &Setting, fs: &SharedFs, expected: &[(&str, &str)]) {
    all.reconnect();
    all.wait(MINUTE);
    assert_eq!(all.status(fs), "ok");
    assert!(all.is_spool_empty(), "{:?}", all.machine.disk.names());
    for fs in [fs, &all.others[0]] {
        let shown = all.run(tree(fs, ROOT, String::new()));
        assert_eq!(beside(&shown), files(expected), "{shown:?}");
    }
}

/// A directory `d` with `sub/deep`, a file in each.
fn with_tree(seed: u64) -> (Setting, SharedFs, [InodeNumber; 3]) {
    let all = Setting::new(seed);
    let fs = all.mounted();
    let made = all.run(async {
        let d = mkdir(&fs, ROOT, "d").await;
        let sub = mkdir(&fs, d, "sub").await;
        let deep = mkdir(&fs, sub, "deep").await;
        for directory in [d, sub, deep] {
            write(&fs, directory, "s", "old").await.expect("is written");
            read(&fs, directory, "s").await.expect("reads");
        }
        [d, sub, deep]
    });
    (all, fs, made)
}

#[test]
fn a_file_that_is_edited_offline_outlives_its_directory() {
    let (all, fs, [_, sub, deep]) = with_tree(9700);
    all.machine.node.stop();
    all.run(write(&fs, sub, "s", "edited")).expect("is spooled");
    all.run(write(&fs, deep, "s", "too")).expect("is spooled");
    let theirs = &all.others[0];
    let d = all.run(find(theirs, &["d"]));
    all.run(remove_all(theirs, d, "sub"));
    // The nearest directory above that is there.
    all.reconnect();
    all.wait(MINUTE);
    let shown = all.run(tree(theirs, ROOT, String::new()));
    let texts: Vec<&[u8]> = shown.values().map(|bytes| &bytes[..]).collect();
    assert!(shown.len() == 3 && texts.contains(&&b"edited"[..]), "{shown:?}");
    assert!(texts.contains(&&b"too"[..]), "{shown:?}");
    let kept = shown.keys().filter(|path| path.starts_with("/d/s~"));
    assert_eq!(kept.count(), 2, "{shown:?}");
    assert_eq!(all.run(tree(&fs, ROOT, String::new())), shown);
}

#[test]
fn a_file_that_is_made_offline_outlives_its_directory() {
    let (all, fs, [_, _, deep]) = with_tree(9701);
    all.machine.node.stop();
    all.run(write(&fs, deep, "new", "mine")).expect("is spooled");
    let theirs = &all.others[0];
    let d = all.run(find(theirs, &["d"]));
    all.run(remove_all(theirs, d, "sub"));
    // With the directory that it is in, and without what was removed there.
    check(&all, &fs, &[("/d/s", "old"), ("/d/deep~/new", "mine")]);
}

#[test]
fn a_directory_that_is_left_gets_its_own_name_back() {
    let (all, fs, [_, sub, _]) = with_tree(9702);
    all.machine.node.stop();
    all.run(write(&fs, sub, "new", "mine")).expect("is spooled");
    let theirs = &all.others[0];
    let d = all.run(find(theirs, &["d"]));
    all.run(remove_all(theirs, d, "sub"));
    all.wait(MINUTE);
    check(&all, &fs, &[("/d/s", "old"), ("/d/sub/new", "mine")]);
}

/// A removal covered whatever the ring had when it heard of it, also what was written hours after the call.
#[test]
fn a_removal_offline_keeps_what_others_have_written_meanwhile() {
    let all = Setting::new(9706);
    let (fs, theirs) = (all.mounted(), &all.others[0]);
    let d = all.run(async {
        let d = mkdir(&fs, ROOT, "d").await;
        for name in ["removed", "replaced", "before", "replacing", "unchanged"] {
            write(&fs, d, name, "old").await.expect("is written");
        }
        d
    });
    all.wait(MINUTE);
    let there = all.run(async {
        for name in ["removed", "replaced", "before", "replacing", "unchanged"] {
            read(&fs, d, name).await.expect("reads");
        }
        find(theirs, &["d"]).await
    });
    all.machine.node.stop();
    all.run(write(theirs, there, "before", "new")).expect("is written");
    all.run(async {
        for name in ["removed", "before", "unchanged"] {
            fs.unlink(me(), d, name.as_bytes()).await.expect("is removed here");
        }
        let plain = RenameFlags::default();
        let replaced = fs.rename(me(), d, b"replacing", d, b"replaced", plain).await;
        replaced.expect("is renamed here");
    });
    all.wait(MINUTE);
    all.run(write(theirs, there, "removed", "new")).expect("is written");
    all.run(write(theirs, there, "replaced", "new")).expect("is written");
    check(
        &all,
        &fs,
        &[
            ("/d/removed~", "new"),
            ("/d/before~", "new"),
            ("/d/replaced", "old"),
            ("/d/replaced~", "new"),
        ],
    );
}

/// Its directory is at hand when it is brought, and in nobody's memory: the root is what is left.
#[test]
fn a_later_mount_names_what_was_written_in_a_directory_that_is_gone() {
    let (all, fs, [_, sub, deep]) = with_tree(9703);
    all.machine.node.stop();
    all.run(write(&fs, sub, "s", "edited")).expect("is spooled");
    all.run(write(&fs, deep, "new", "mine")).expect("is spooled");
    drop(fs);
    let theirs = &all.others[0];
    let d = all.run(find(theirs, &["d"]));
    all.run(remove_all(theirs, d, "sub"));
    all.machine.node.start();
    let fs = all.mounted();
    check(&all, &fs, &[("/d/s", "old"), ("/file~", "edited"), ("/directory~/new", "mine")]);
}

/// A change of attributes alone brings nothing back, as online.
#[test]
fn what_was_only_touched_offline_goes_with_its_directory() {
    let (all, fs, [_, sub, deep]) = with_tree(9704);
    all.machine.node.stop();
    let private = SetAttr { mode: Some(0o700), ..SetAttr::default() };
    let file = all.run(find(&fs, &["d", "sub", "s"]));
    for inode in [file, sub, deep] {
        all.run(fs.setattr(me(), inode, None, private)).expect("is spooled");
    }
    let theirs = &all.others[0];
    let d = all.run(find(theirs, &["d"]));
    all.run(remove_all(theirs, d, "sub"));
    check(&all, &fs, &[("/d/s", "old")]);
}

/// Its inode had lost its last link, as the member who removed it has seen it.
#[test]
fn a_file_that_is_renamed_offline_and_removed_elsewhere_has_one_link() {
    let (all, fs, [d, ..]) = with_tree(9705);
    all.machine.node.stop();
    let renamed = fs.rename(me(), d, b"s", d, b"renamed", RenameFlags::default());
    all.run(renamed).expect("is spooled");
    let theirs = &all.others[0];
    all.run(async {
        let d = find(theirs, &["d"]).await;
        theirs.unlink(me(), d, b"s").await.expect("is removed");
        theirs.sync().await.expect("the ring knows");
    });
    let left = [("/d/renamed", "old"), ("/d/sub/deep/s", "old"), ("/d/sub/s", "old")];
    check(&all, &fs, &left);
    for fs in [&fs, theirs] {
        let file = all.run(find(fs, &["d", "renamed"]));
        let attr = all.run(fs.getattr(file, None)).expect("is there").attr;
        assert_eq!(attr.nlink, 1);
    }
    all.run(theirs.unlink(me(), all.run(find(theirs, &["d"])), b"renamed")).expect("is removed");
    all.run(theirs.sync()).expect("the ring knows");
    check(&all, &fs, &left[1..]);
}
