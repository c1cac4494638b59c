//! Trees on a real disk, and comparing them.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use atoll_vfs::kit::{
    CompareOptions, Comparison, MAX_DIFFERENCES, Tree, compare_trees, write_tree_to_disk,
};

const ALL: CompareOptions = CompareOptions { modes: true, mtimes: true, xattrs: true };

fn compare(a: &Path, b: &Path) -> Comparison {
    compare_trees(a, b, ALL, |_| {}).unwrap()
}

/// Two copies of `tree` in a new directory.
fn twice(tree: &Tree) -> tempfile::TempDir {
    let place = tempfile::tempdir().unwrap();
    for name in ["a", "b"] {
        write_tree_to_disk(tree, &place.path().join(name)).unwrap();
    }
    place
}

#[test]
fn the_fixture_survives_a_disk() {
    let tree = Tree::fixture();
    let place = twice(&tree);
    let (a, b) = (place.path().join("a"), place.path().join("b"));
    let mut calls = 0;
    let found = compare_trees(&a, &b, ALL, |_| calls += 1).unwrap();
    assert!(found.is_same(), "{:#?}", found.differences);
    let nodes = tree.nodes();
    let files: Vec<_> = nodes.iter().filter_map(|(_, node)| node.content()).collect();
    let directories = nodes.iter().filter(|(_, node)| node.children().is_some()).count();
    assert_eq!(found.files as usize, files.len());
    assert_eq!(found.directories as usize, directories);
    assert_eq!((found.files + found.directories + found.symlinks) as usize, nodes.len());
    assert_eq!(found.bytes, files.iter().map(|content| content.len_bytes()).sum::<u64>());
    assert!(calls >= files.len());
    for (path, content) in [("sizes/65537", 65_537), ("holes/nothing but a hole", 3 << 20)] {
        let bytes = fs::read(a.join(path)).unwrap();
        assert_eq!(bytes.len(), content);
        assert_eq!(bytes, tree.get(path).unwrap().content().unwrap().read(0, usize::MAX >> 1));
    }
    let early = fs::metadata(a.join("times/just before 1970")).unwrap();
    assert_eq!((early.mtime(), early.mtime_nsec()), (-1, 999_999_999));
}

/// Makes one change in the second of two equal trees; `expected` is what is then said.
fn check_difference(path: &str, change: impl Fn(&Path), expected: &str) {
    let place = twice(&Tree::small());
    let b = place.path().join("b");
    change(&b);
    let options = CompareOptions { mtimes: false, ..ALL };
    let found = compare_trees(&place.path().join("a"), &b, options, |_| {}).unwrap();
    assert!(!found.is_same());
    let difference = found.differences.iter().find(|d| d.path == Path::new(path));
    let difference = difference.unwrap_or_else(|| panic!("nothing about {path}: {found:#?}"));
    assert!(difference.what.contains(expected), "{difference:?}");
    assert_eq!(found.difference_count, found.differences.len() as u64);
}

#[test]
fn every_kind_of_difference_is_found() {
    check_difference("file", |b| fs::write(b.join("file"), "SOME bytes\n").unwrap(), "offset 0");
    check_difference("file", |b| fs::write(b.join("file"), "some bytes!").unwrap(), "offset 10");
    check_difference("file", |b| fs::write(b.join("file"), "some").unwrap(), "11 bytes");
    check_difference("file", |b| fs::remove_file(b.join("file")).unwrap(), "only in the first");
    check_difference("new", |b| fs::write(b.join("new"), "").unwrap(), "only in the second");
    check_difference(
        "directory/below/new",
        |b| fs::create_dir(b.join("directory/below/new")).unwrap(),
        "only in the second",
    );
    let relink = |b: &Path| {
        fs::remove_file(b.join("link")).unwrap();
        symlink("elsewhere", b.join("link")).unwrap();
    };
    check_difference("link", relink, "elsewhere");
    let replace = |b: &Path| {
        fs::remove_dir(b.join("empty")).unwrap();
        fs::write(b.join("empty"), "").unwrap();
    };
    check_difference("empty", replace, "a directory in the first tree");
    for path in ["file", "directory", ""] {
        let chmod = |b: &Path| {
            let place = if path.is_empty() { b.to_owned() } else { b.join(path) };
            fs::set_permissions(place, fs::Permissions::from_mode(0o711)).unwrap();
        };
        check_difference(path, chmod, "711");
    }
    let set = |b: &Path| {
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(b.join("file"), "user.x", b"1", flags).unwrap();
    };
    check_difference("file", set, "user.x");
}

#[test]
fn times_differ_by_a_nanosecond() {
    let place = twice(&Tree::small());
    let b = place.path().join("b");
    let mtime = fs::metadata(b.join("file")).unwrap().modified().unwrap();
    let later = mtime + std::time::Duration::from_nanos(1);
    fs::File::open(b.join("file")).unwrap().set_modified(later).unwrap();
    let found = compare(&place.path().join("a"), &b);
    assert_eq!(found.difference_count, 1);
    assert!(found.differences[0].what.contains("mtime"), "{found:?}");
}

#[test]
fn differences_beyond_the_first_hundred_are_counted() {
    let place = twice(&Tree::new());
    for index in 0..MAX_DIFFERENCES + 50 {
        fs::write(place.path().join(format!("b/{index}")), "").unwrap();
    }
    let options = CompareOptions { mtimes: false, ..ALL };
    let (a, b) = (place.path().join("a"), place.path().join("b"));
    let found = compare_trees(&a, &b, options, |_| {}).unwrap();
    assert_eq!(found.difference_count as usize, MAX_DIFFERENCES + 50);
    assert_eq!(found.differences.len(), MAX_DIFFERENCES);
    assert!(compare_trees(&a, &place.path().join("missing"), options, |_| {}).is_err());
}
