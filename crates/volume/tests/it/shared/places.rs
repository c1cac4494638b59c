//! Directories that two mounts rename or move at the same time: one name stays, and all that is below it.

use std::collections::BTreeMap;
use std::time::Duration;

use atoll_env::sleep;
use atoll_vfs::{Caller, Errno, FileSystem, InodeNumber, RenameFlags};
use atoll_volume::shared::SharedFs;
use bytes::Bytes;
use futures_util::future::join;

use super::offline::{Setting, read, tree, write};

const ROOT: InodeNumber = InodeNumber::ROOT;
const MINUTE: Duration = Duration::from_secs(60);

fn me() -> Caller {
    Caller::default()
}

async fn mkdir(fs: &SharedFs, parent: InodeNumber, name: &str) -> InodeNumber {
    fs.mkdir(me(), parent, name.as_bytes(), 0o755).await.expect("makes").attr.inode
}

async fn find(fs: &SharedFs, parent: InodeNumber, name: &str) -> Result<InodeNumber, Errno> {
    Ok(fs.lookup(me(), parent, name.as_bytes()).await?.attr.inode)
}

async fn rename(
    fs: &SharedFs,
    (from, name): (InodeNumber, &str),
    (to, new_name): (InodeNumber, &str),
) -> Result<(), Errno> {
    let flags = RenameFlags::default();
    find(fs, from, name).await?;
    fs.rename(me(), from, name.as_bytes(), to, new_name.as_bytes(), flags).await
}

/// All mounts show one name of the directory and what is in it, and nothing else; that name.
fn settled(all: &Setting, mounts: &[&SharedFs], names: &[&str], context: &str) -> String {
    for fs in mounts {
        all.run(tree_of_what_is_there(fs));
    }
    all.wait(MINUTE);
    let trees = mounts.iter().map(|fs| all.run(tree(fs, ROOT, String::new())));
    let trees: Vec<BTreeMap<String, Bytes>> = trees.collect();
    assert!(trees.iter().all(|tree| *tree == trees[0]), "{context}: {trees:?}");
    let paths: Vec<&String> = trees[0].keys().collect();
    assert_eq!(paths.len(), 1, "{context}: {paths:?}");
    let name = names.iter().find(|name| *paths[0] == format!("/{name}/f"));
    (*name.unwrap_or_else(|| panic!("{context}: {paths:?}"))).to_owned()
}

/// Looks up what is listed, as `ls -R` does. Names that do not count any more may be listed for a moment.
async fn tree_of_what_is_there(fs: &SharedFs) {
    let mut waiting = vec![ROOT];
    while let Some(directory) = waiting.pop() {
        let handle = fs.opendir(me(), directory).await.expect("opens").handle;
        let listed = fs.readdir(directory, handle, 0, 1000, false).await.expect("lists");
        fs.closedir(directory, handle).await.expect("it is open");
        for entry in listed {
            let found = fs.lookup(me(), directory, &entry.name).await;
            let found = found.ok().filter(|it| it.attr.kind == atoll_vfs::FileKind::Directory);
            waiting.extend(found.map(|found| found.attr.inode));
        }
    }
}

#[test]
fn two_mounts_that_rename_one_directory_at_once_leave_it_one_name() {
    for seed in 0..6 {
        let all = Setting::new(9700 + seed);
        let [one, two] = [&all.others[0], &all.others[1]];
        let inside = all.run(mkdir(one, ROOT, "a"));
        all.run(write(one, inside, "f", "x")).expect("is written");
        let renames =
            join(rename(one, (ROOT, "a"), (ROOT, "one")), rename(two, (ROOT, "a"), (ROOT, "two")));
        let renamed = all.run(renames);
        assert!(renamed.0.is_ok() || renamed.1.is_ok(), "seed {seed}: {renamed:?}");
        settled(&all, &[one, two], &["one", "two"], &format!("seed {seed}, {renamed:?}"));
    }
}

#[test]
fn a_directory_renamed_offline_and_elsewhere_keeps_one_name() {
    for seed in 0..3 {
        let all = Setting::new(9710 + seed);
        let (fs, other) = (all.mounted(), &all.others[0]);
        let inside = all.run(mkdir(&fs, ROOT, "a"));
        all.run(write(&fs, inside, "f", "x")).expect("is written");
        all.run(find(other, ROOT, "a")).expect("is seen");
        all.machine.node.stop();
        all.run(rename(&fs, (ROOT, "a"), (ROOT, "off"))).expect("is spooled");
        all.run(rename(other, (ROOT, "a"), (ROOT, "on"))).expect("is renamed");
        all.reconnect();
        settled(&all, &[&fs, other], &["off", "on"], &format!("seed {seed}"));
    }
}

#[test]
fn a_directory_renamed_offline_that_was_moved_elsewhere_is_where_it_was_moved_to() {
    for seed in 0..3 {
        let all = Setting::new(9720 + seed);
        let (fs, other) = (all.mounted(), &all.others[0]);
        let inside = all.run(mkdir(&fs, ROOT, "a"));
        all.run(write(&fs, inside, "f", "x")).expect("is written");
        all.run(mkdir(&fs, ROOT, "b"));
        let b = all.run(find(other, ROOT, "b")).expect("is seen");
        all.run(find(&fs, ROOT, "b")).expect("is seen");
        all.machine.node.stop();
        all.run(rename(&fs, (ROOT, "a"), (ROOT, "off"))).expect("is spooled");
        all.run(rename(other, (ROOT, "a"), (b, "on"))).expect("is moved");
        all.reconnect();
        let gone = all.run(find(other, ROOT, "off"));
        assert_eq!(gone, Err(Errno::ENOENT), "seed {seed}: it is elsewhere");
        let name = settled(&all, &[&fs, other], &["off", "b/on"], &format!("seed {seed}"));
        assert_eq!(name, "b/on");
    }
}

#[test]
fn two_mounts_that_move_one_directory_to_two_places_leave_it_in_one() {
    for seed in 0..6 {
        let all = Setting::new(9730 + seed);
        let [one, two] = [&all.others[0], &all.others[1]];
        let inside = all.run(mkdir(one, ROOT, "a"));
        all.run(write(one, inside, "f", "x")).expect("is written");
        let into = ["b", "c"].map(|name| {
            all.run(mkdir(one, ROOT, name));
            [one, two].map(|fs| all.run(find(fs, ROOT, name)).expect("there"))
        });
        let moved = all.run(join(
            rename(one, (ROOT, "a"), (into[0][0], "one")),
            rename(two, (ROOT, "a"), (into[1][1], "two")),
        ));
        let is_one = matches!(moved, (Ok(()), Err(Errno::ENOENT)) | (Err(Errno::ENOENT), Ok(())));
        assert!(is_one, "seed {seed}: {moved:?}");
        settled(&all, &[one, two], &["b/one", "c/two"], &format!("seed {seed}"));
    }
}

/// The one that renames does not wait for the lock of those that move.
#[test]
fn a_directory_renamed_where_it_was_while_it_moves_is_in_one_place() {
    for seed in 0..8 {
        let all = Setting::new(9740 + seed);
        let [one, two] = [&all.others[0], &all.others[1]];
        let inside = all.run(mkdir(one, ROOT, "a"));
        all.run(write(one, inside, "f", "x")).expect("is written");
        all.run(mkdir(one, ROOT, "b"));
        let into = all.run(find(one, ROOT, "b")).expect("there");
        all.run(find(two, ROOT, "a")).expect("there");
        let done = all.run(join(
            rename(one, (ROOT, "a"), (into, "one")),
            rename(two, (ROOT, "a"), (ROOT, "two")),
        ));
        assert!(done.0.is_ok() || done.1.is_ok(), "seed {seed}: {done:?}");
        settled(&all, &[one, two], &["b/one", "two"], &format!("seed {seed}, {done:?}"));
    }
}

/// `mv f n` on one mount and `rm f` on another could both succeed, and leave a name without a file.
#[test]
fn a_file_that_is_renamed_while_another_mount_removes_it_stays() {
    let mut both = 0;
    for seed in 0..6 {
        let all = Setting::new(9740 + seed);
        let [one, two] = [&all.others[0], &all.others[1]];
        let mut done = Vec::new();
        for n in 0..25u64 {
            let (name, new) = (format!("f{n}"), format!("n{n}"));
            all.run(write(one, ROOT, &name, "x")).expect("is written");
            all.run(find(two, ROOT, &name)).expect("is seen");
            let env = &all.machine.env;
            let removing = async {
                sleep(&**env, Duration::from_millis(150)).await;
                two.unlink(me(), ROOT, name.as_bytes()).await
            };
            let renaming = async {
                sleep(&**env, Duration::from_millis(12 * n)).await;
                rename(one, (ROOT, &name), (ROOT, &new)).await
            };
            let (renamed, removed) = all.run(join(renaming, removing));
            both += u32::from(renamed.is_ok() && removed.is_ok());
            done.push((new, renamed, removed));
        }
        all.wait(MINUTE);
        for (name, renamed, removed) in done {
            let expected = if renamed.is_ok() { Ok("x".into()) } else { Err(Errno::ENOENT) };
            for fs in [one, two] {
                let found = all.run(read(fs, ROOT, &name));
                assert_eq!(found, expected, "seed {seed}, {name}: {renamed:?}, {removed:?}");
            }
        }
    }
    assert!(both > 0, "no race");
}

/// All mounts show these names of one file, and as many links; each can be removed without the others.
fn each_name_has_its_link(all: &Setting, mounts: &[&SharedFs], names: &[(InodeNumber, &str)]) {
    let there: Vec<_> = names
        .iter()
        .filter(|(directory, name)| all.run(find(mounts[0], *directory, name)).is_ok())
        .collect();
    for (removed, (directory, name)) in there.iter().enumerate() {
        let left = &there[removed..];
        for fs in mounts {
            for (directory, name) in left {
                let found = all.run(find(fs, *directory, name));
                let file =
                    found.unwrap_or_else(|error| panic!("{name}, {removed} removed: {error}"));
                let attr = all.run(fs.getattr(file, None)).expect("is there").attr;
                assert_eq!(attr.nlink as usize, left.len(), "{name} of {there:?}");
                assert_eq!(all.run(read(fs, *directory, name)), Ok("x".into()), "{name}");
            }
        }
        let fs = mounts[removed % mounts.len()];
        all.run(fs.unlink(me(), *directory, name.as_bytes())).expect("is removed");
        all.run(fs.sync()).expect("the ring knows");
        all.wait(MINUTE);
    }
}

/// `mv d/f d/g` of one mount left the file with the link that it had, which `mv d/f e/h` of another took away. Both names were
/// there, and whoever removed `e/h` removed the file.
#[test]
fn a_file_renamed_where_it_was_while_it_moves_has_a_link_for_each_name() {
    for seed in 0..3 {
        let all = Setting::new(9760 + seed);
        let (fs, other) = (all.mounted(), &all.others[0]);
        let [d, e] = ["d", "e"].map(|name| all.run(mkdir(&fs, ROOT, name)));
        all.run(write(&fs, d, "f", "x")).expect("is written");
        let [theirs_d, theirs_e] =
            ["d", "e"].map(|name| all.run(find(other, ROOT, name)).expect("is seen"));
        all.run(find(other, theirs_d, "f")).expect("is seen");
        all.run(find(&fs, e, "h")).expect_err("is not there yet");
        all.machine.node.stop();
        all.run(rename(&fs, (d, "f"), (d, "g"))).expect("is spooled");
        all.run(rename(other, (theirs_d, "f"), (theirs_e, "h"))).expect("is moved");
        all.reconnect();
        all.wait(MINUTE);
        let names = [(theirs_e, "h"), (theirs_d, "g")];
        assert!(names.iter().all(|(at, name)| all.run(find(other, *at, name)).is_ok()));
        // All mounts give a directory the same number.
        for (name, number) in [("d", theirs_d), ("e", theirs_e)] {
            assert_eq!(all.run(find(&all.others[1], ROOT, name)), Ok(number));
        }
        each_name_has_its_link(&all, &[other, &all.others[1]], &names);
    }
}

/// The same on a healthy ring.
#[test]
fn a_file_renamed_and_moved_at_once_has_a_link_for_each_name() {
    let mut both = 0;
    for seed in 0..4 {
        let all = Setting::new(9770 + seed);
        let [one, two] = [&all.others[0], &all.others[1]];
        let [d, _] = ["d", "e"].map(|name| all.run(mkdir(one, ROOT, name)));
        let [theirs_d, theirs_e] =
            ["d", "e"].map(|name| all.run(find(two, ROOT, name)).expect("is seen"));
        let names: Vec<_> =
            (0..25u64).map(|n| ["f", "g", "h"].map(|l| format!("{l}{n}"))).collect();
        for (n, [name, renamed, moved]) in (0..).zip(&names) {
            all.run(write(one, d, name, "x")).expect("is written");
            all.run(find(two, theirs_d, name)).expect("is seen");
            let env = &all.machine.env;
            let moving = async {
                sleep(&**env, Duration::from_millis(150)).await;
                rename(two, (theirs_d, name), (theirs_e, moved)).await
            };
            let renaming = async {
                sleep(&**env, Duration::from_millis(12 * n)).await;
                rename(one, (d, name), (d, renamed)).await
            };
            let done = all.run(join(renaming, moving));
            both += u32::from(done == (Ok(()), Ok(())));
        }
        all.wait(MINUTE);
        for [_, renamed, moved] in &names {
            each_name_has_its_link(&all, &[one, two], &[(theirs_e, moved), (theirs_d, renamed)]);
        }
    }
    assert!(both > 0, "no race");
}

/// `mv d n` on one mount and `rmdir d` on another could both succeed, and leave a name without a directory.
#[test]
fn a_directory_that_is_renamed_while_another_mount_removes_it_stays() {
    let mut both = [0, 0];
    for seed in 0..6 {
        let all = Setting::new(9760 + seed);
        let [one, two] = [&all.others[0], &all.others[1]];
        let into = all.run(mkdir(one, ROOT, "into"));
        let mut done = Vec::new();
        for n in 0..24u64 {
            let moves = n % 2 == 1;
            let (name, new) = (format!("d{n}"), format!("n{n}"));
            all.run(mkdir(one, ROOT, &name));
            all.run(find(two, ROOT, &name)).expect("is seen");
            let env = &all.machine.env;
            let removing = async {
                sleep(&**env, Duration::from_millis(150)).await;
                two.rmdir(me(), ROOT, name.as_bytes()).await
            };
            let renaming = async {
                sleep(&**env, Duration::from_millis(15 * n)).await;
                let to = if moves { into } else { ROOT };
                rename(one, (ROOT, &name), (to, &new)).await?;
                if n % 3 == 0 {
                    let inside = find(one, to, &new).await?;
                    write(one, inside, "f", "x").await?;
                }
                Ok::<_, Errno>(())
            };
            let (renamed, removed) = all.run(join(renaming, removing));
            both[usize::from(moves)] += u32::from(renamed.is_ok() && removed.is_ok());
            done.push((n, moves, new, renamed, removed));
        }
        all.wait(MINUTE);
        for fs in [one, two] {
            let there = all.run(tree(fs, ROOT, String::new()));
            let into = all.run(find(fs, ROOT, "into")).expect("there");
            for (n, moves, name, renamed, removed) in &done {
                let context = format!("seed {seed}, {name}: {renamed:?}, {removed:?}, {there:?}");
                let to = if *moves { into } else { ROOT };
                let found = all.run(find(fs, to, name)).map(drop);
                assert_eq!(found.is_ok(), renamed.is_ok(), "{found:?}, {context}");
                let old = all.run(find(fs, ROOT, &format!("d{n}"))).map(drop);
                let stays = renamed.is_err() && removed.is_err();
                assert_eq!(old.is_ok(), stays, "old name: {old:?}, {context}");
                let path = format!("{}/{name}/f", if *moves { "/into" } else { "" });
                assert_eq!(there.contains_key(&path), renamed.is_ok() && n % 3 == 0, "{context}");
            }
        }
    }
    assert!(both.iter().all(|both| *both > 0), "no race: {both:?}");
}
