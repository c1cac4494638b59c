//! What concurrent versions of an inode say together.

use std::collections::{BTreeMap, BTreeSet};

use atoll_key::BlockHash;
use atoll_key::kinds::certified::CertifiedBlock;
use atoll_vfs::FileKind;
use atoll_volume::shared::entries::{Entries, Leaves};
use atoll_volume::shared::inode::{Contents, Entry, FileData, Inode, InodeKey, Link, Written};
use atoll_volume::shared::merged::{self, ConflictName, Merged, conflict_name, names};
use atoll_volume::shared::sealing::Sealing;
use bytes::Bytes;
use proptest::prelude::*;

use super::{NOW_MS, author, create, dot, entry, inode, joined, write, writer};

fn merge(block: &CertifiedBlock) -> Merged {
    merged::merge(block, &Leaves::new(), &Sealing::none()).expect("inodes").expect("not removed")
}

fn symlink(target: &str) -> Inode {
    inode(Contents::Symlink(Bytes::copy_from_slice(target.as_bytes())))
}

fn entries(merged: &Merged) -> &Entries {
    match &merged.inode.contents {
        Contents::Directory(entries) => entries,
        other => panic!("{other:?}"),
    }
}

/// What user `n` leaves who sees `seen`, and adds or removes a name.
fn change(seen: &CertifiedBlock, n: u8, change: impl FnOnce(&mut Entries)) -> CertifiedBlock {
    let mut inode = merge(seen).inode;
    let Contents::Directory(entries) = &mut inode.contents else { panic!("a directory") };
    change(entries);
    write(seen, n, &inode)
}

fn listed(block: &CertifiedBlock) -> Vec<String> {
    let shown = names(entries(&merge(block)));
    shown.into_keys().map(|name| String::from_utf8_lossy(&name).into_owned()).collect()
}

/// Pastis §3.1: "directory conflicts cannot be automatically solved".
#[test]
fn names_added_and_removed_at_the_same_time_all_count() {
    let empty = create(&inode(Contents::Directory(Entries::default())));
    let add = |seen: &CertifiedBlock, n: u8, name: &str, number: u8| {
        let added = seen.next_dot(writer(n));
        change(seen, n, |entries| {
            entries.insert(entry(name, number, added));
        })
    };
    let remove = |seen: &CertifiedBlock, n: u8, name: &str| {
        change(seen, n, |entries| {
            let gone: Vec<Entry> = entries.iter().filter(|e| e.name == name).cloned().collect();
            gone.iter().for_each(|entry| assert!(entries.remove(entry)));
        })
    };
    let two = add(&add(&empty, 1, "one", 1), 1, "two", 2);
    let (left, right) = (add(&two, 2, "left", 3), add(&remove(&two, 3, "one"), 3, "right", 4));
    let both = joined(&left, &right);
    assert_eq!(listed(&both), ["left", "right", "two"]);
    // One who removes a name and one who makes it anew: the new one stays.
    let anew = add(&remove(&both, 1, "two"), 1, "two", 9);
    let gone = remove(&both, 2, "two");
    let both = joined(&anew, &gone);
    assert_eq!(listed(&both), ["left", "right", "two"]);
    let shown = names(entries(&merge(&both)));
    assert_eq!(shown[&b"two"[..]][0].inode, InodeKey([9; 32]));
    // Who has seen both leaves one version.
    let seen = add(&both, 3, "last", 5);
    assert_eq!(listed(&joined(&seen, &both)), ["last", "left", "right", "two"]);
}

/// The story: a directory that two mounts renamed at the same time had both names, and `rm -r` of one emptied the other.
#[test]
fn a_directory_renamed_twice_at_the_same_time_has_one_name_and_a_file_both() {
    let of = |name: &'static str, kind, added| {
        Entry::new(Bytes::from_static(name.as_bytes()), (InodeKey([1; 32]), kind), added, NOW_MS)
    };
    for kind in [FileKind::Directory, FileKind::Regular] {
        let before = [of("a", kind, dot(1, 1))].into_iter().collect::<Entries>();
        let before = create(&inode(Contents::Directory(before)));
        let rename = |seen: &CertifiedBlock, n: u8, to: &'static str| {
            let added = seen.next_dot(writer(n));
            change(seen, n, |entries| {
                let gone: Vec<Entry> = entries.iter().cloned().collect();
                gone.iter().for_each(|entry| assert!(entries.remove(entry)));
                entries.insert(of(to, kind, added));
            })
        };
        let (left, right) = (rename(&before, 2, "left"), rename(&before, 3, "right"));
        let both = joined(&left, &right);
        let expected: &[&str] = match kind {
            FileKind::Directory if writer(3) > writer(2) => &["right"],
            FileKind::Directory => &["left"],
            _ => &["left", "right"],
        };
        assert_eq!(listed(&both), expected);
        assert_eq!(listed(&joined(&right, &left)), expected, "whoever joins them");
        if kind == FileKind::Directory {
            // One who has seen one name only goes on: the later name counts for all.
            let third = rename(&left, 2, "third");
            let seen_both = change(&both, 4, |_| {});
            assert_eq!(listed(&joined(&third, &seen_both)), ["third"]);
            assert_eq!(listed(&joined(&third, &both)), ["third"]);
        }
    }
}

#[test]
fn files_keep_what_both_wrote_and_clocks_do_not_decide() {
    let first = create(&symlink("first"));
    let earlier = first.write(&author(2), NOW_MS - 500_000, Some(&payload("earlier")));
    let earlier = earlier.expect("a member");
    let higher = write(&earlier, 2, &symlink("higher"));
    let other = write(&first, 3, &symlink("other"));
    for both in [joined(&higher, &other), joined(&other, &higher)] {
        let merged = merge(&both);
        assert_eq!(merged.inode, symlink("higher"));
        let conflicts: Vec<&Inode> = merged.conflicts.iter().map(|one| &one.inode).collect();
        assert_eq!(conflicts, [&symlink("other")]);
        assert_eq!(merged.conflicts[0].dot.writer, writer(3));
    }
    // The same contents are no conflict, whatever the attributes.
    let mut same = symlink("other");
    same.attributes.mode = 0o600;
    assert_eq!(merge(&joined(&other, &write(&first, 4, &same))).conflicts, []);
}

/// A change of attributes does not compete with contents that somebody wrote at the same time, however
/// high it is.
#[test]
fn contents_are_not_lost_to_a_change_of_attributes() {
    let file = |size_bytes, dot| {
        let written = Written { dot, time_ms: NOW_MS };
        let data = Some(FileData::Elsewhere(BlockHash([size_bytes as u8; 32])));
        inode(Contents::Regular { size_bytes, blocks_512: 1, data, written })
    };
    let first = create(&file(1, dot(1, 1)));
    let new = write(&first, 2, &file(2, first.next_dot(writer(2))));
    let mut private = file(1, dot(1, 1));
    private.attributes.mode = 0o600;
    let mut changed = write(&first, 3, &private);
    changed = write(&changed, 3, &private);
    for both in [joined(&new, &changed), joined(&changed, &new)] {
        let merged = merge(&both);
        assert_eq!(merged.inode.contents, file(2, first.next_dot(writer(2))).contents);
        assert_eq!(merged.inode.attributes.mode, 0o600);
        assert_eq!(merged.conflicts, []);
    }
    // Contents that nobody had seen who wrote others stay beside them.
    let third = write(&changed, 4, &file(3, changed.next_dot(writer(4))));
    let merged = merge(&joined(&new, &third));
    assert_eq!(merged.inode.contents, file(3, changed.next_dot(writer(4))).contents);
    let beside: Vec<&Contents> = merged.conflicts.iter().map(|one| &one.inode.contents).collect();
    assert_eq!(beside, [&file(2, first.next_dot(writer(2))).contents]);
    assert_eq!(merged.conflicts[0].dot, first.next_dot(writer(2)));
}

fn payload(target: &str) -> Vec<u8> {
    symlink(target).encode().expect("short")
}

#[test]
fn a_removal_does_not_take_away_what_was_written_meanwhile() {
    let first = create(&symlink("first"));
    let removed = first.write(&author(2), NOW_MS, None).expect("a member");
    assert_eq!(merged::merge(&removed, &Leaves::new(), &Sealing::none()), Ok(None));
    let written = write(&first, 3, &symlink("written"));
    assert_eq!(merge(&joined(&removed, &written)).inode, symlink("written"));
}

/// A file was removed that got another name at the same time: it showed two links, with one name.
#[test]
fn a_removal_takes_the_links_away_that_its_writer_had_seen() {
    let link = |n: u8, height| Link { added: dot(n, height), directory: InodeKey([1; 32]) };
    let with = |links: &[Link]| Inode { links: links.iter().copied().collect(), ..symlink("x") };
    let first = create(&with(&[link(1, 1)]));
    let linked = write(&first, 2, &with(&[link(1, 1), link(2, 2)]));
    let removed = first.write(&author(3), NOW_MS, None).expect("a member");
    let merged = merge(&joined(&linked, &removed));
    assert_eq!(merged.inode.links, BTreeSet::from([link(2, 2)]));
}

#[test]
fn names_of_one_file_are_a_set() {
    let link = |n: u8, height| Link { added: dot(n, height), directory: InodeKey([n; 32]) };
    let with = |links: &[Link]| Inode { links: links.iter().copied().collect(), ..symlink("x") };
    let first = create(&with(&[link(1, 1)]));
    let linked = write(&first, 2, &with(&[link(1, 1), link(2, 2)]));
    let moved = write(&first, 3, &with(&[link(3, 2)]));
    let merged = merge(&joined(&linked, &moved));
    assert_eq!(merged.inode.links, BTreeSet::from([link(2, 2), link(3, 2)]));
}

/// A member can write nonsense; it must not make the file unreadable for others who write.
#[test]
fn nonsense_beside_an_inode_is_told_and_hides_nothing() {
    let first = create(&symlink("first"));
    let nonsense = first.write(&author(2), NOW_MS, Some(b"nonsense")).expect("a member");
    let merged = merge(&joined(&nonsense, &write(&first, 3, &symlink("sense"))));
    assert_eq!(merged.inode, symlink("sense"));
    assert_eq!(merged.unreadable[0].0.writer, writer(2));
    assert!(merged::merge(&nonsense, &Leaves::new(), &Sealing::none()).is_err());
    let covered = write(&nonsense, 3, &symlink("again"));
    assert_eq!(merge(&covered).inode, symlink("again"));
}

#[test]
fn of_two_files_of_one_name_the_earlier_keeps_it() {
    let (early, late) = (entry("plan", 1, dot(2, 5)), entry("plan", 2, dot(1, 6)));
    let again = entry("plan", 1, dot(3, 9));
    let shown = names(&[late.clone(), early.clone(), again.clone()].into_iter().collect());
    let other = conflict_name(b"plan", &late.added, NOW_MS, 1);
    let text = String::from_utf8_lossy(&other);
    assert!(text.starts_with("plan~") && text.ends_with("~20261123T135501Z"), "{text}");
    let expected = [
        (Bytes::from_static(b"plan"), vec![early.clone(), again]),
        (other.clone(), vec![late.clone()]),
    ];
    assert_eq!(shown, BTreeMap::from(expected));
    // A name that somebody gave is not taken from him.
    let given = Entry { name: other.clone(), ..entry("", 3, dot(1, 7)) };
    let shown = names(&[late.clone(), early, given.clone()].into_iter().collect());
    assert_eq!(shown[&other], [given]);
    assert_eq!(shown[&conflict_name(b"plan", &late.added, NOW_MS, 2)], [late]);
}

#[test]
fn names_of_conflicts_fit_a_directory() {
    for name in ["x".repeat(255), "é".repeat(127), "日".repeat(85)] {
        let made = conflict_name(name.as_bytes(), &dot(1, 1), u64::MAX, 12);
        assert!(made.len() <= 255, "{}", made.len());
        let text = std::str::from_utf8(&made).expect("cut between characters");
        assert!(text.contains('~'), "{text}");
    }
    assert_eq!(conflict_name(&[0xff; 255], &dot(1, 1), 0, 1).len(), 255);
}

#[test]
fn names_of_conflicts_are_taken_apart() {
    for (name, number) in [(&b"plan"[..], 1), (b"a~b", 2), (b"\xff", 34), (b"12", 1), (b"~", 1)] {
        let made = conflict_name(name, &dot(1, 1), NOW_MS, number);
        let parsed = ConflictName::parse(&made).expect("one of a conflict");
        assert_eq!((parsed.beside, parsed.user.len()), (name, 8));
        assert!(made.windows(16).any(|part| part == parsed.time.as_bytes()), "{}", parsed.time);
        // Names do not grow with each conflict.
        let again = conflict_name(&made, &dot(2, 1), NOW_MS, 1);
        assert_eq!(again, conflict_name(name, &dot(2, 1), NOW_MS, 1));
    }
    for other in ["", "~", "~~", "~~~", "plan~", "plan~7", "a~0a1b2c3d~20261123T135501Z~"] {
        assert_eq!(ConflictName::parse(other.as_bytes()), None, "{other}");
    }
}

proptest! {
    /// Users that add, remove and exchange in any order: in the end all list the names that nobody has
    /// removed who had seen them.
    #[test]
    fn directories_that_exchange_all_they_hold_list_the_same(
        steps in proptest::collection::vec((0usize..3, 0u8..3, 0usize..5), 0..30)
    ) {
        let first = create(&inode(Contents::Directory(Entries::default())));
        let mut replicas = vec![first; 3];
        let (mut added, mut removed) = (BTreeSet::new(), BTreeSet::new());
        for (number, (at, what, which)) in steps.into_iter().enumerate() {
            let seen = replicas[at].clone();
            let n = at as u8 + 1;
            let new = match what {
                0 => {
                    let name = format!("{}", number % 7);
                    let entry = entry(&name, number as u8, seen.next_dot(writer(n)));
                    added.insert(entry.clone());
                    change(&seen, n, |entries| entries.insert(entry))
                }
                1 => {
                    let gone = entries(&merge(&seen)).iter().nth(which).cloned();
                    let Some(gone) = gone else { continue };
                    removed.insert(gone.clone());
                    change(&seen, n, |entries| {
                        let _ = entries.remove(&gone);
                    })
                }
                _ => replicas[which % 3].clone(),
            };
            replicas[at] = joined(&seen, &new);
        }
        let all = joined(&joined(&replicas[0], &replicas[1]), &replicas[2]);
        let expected: Entries = added.difference(&removed).cloned().collect();
        let merged = merge(&all);
        prop_assert_eq!(entries(&merged), &expected);
        let shown = names(&expected);
        prop_assert_eq!(shown.values().flatten().count(), expected.len());
        for replica in &replicas {
            prop_assert_eq!(merge(&joined(replica, &all)), merge(&all));
        }
    }
}
