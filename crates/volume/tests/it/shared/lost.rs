//! Names without inodes, files without names, links that are too many, and directories that move into each other.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use atoll_dht::{Blocks, MemoryBlocks};
use atoll_env::sleep;
use atoll_sim::{Latency, SimConfig};
use atoll_vfs::{
    Caller, Errno, FileKind, FileSystem, Handle, InodeNumber, OpenFlags, RenameFlags, SetAttr,
    Writer,
};
use atoll_volume::shared::{Consistency, SharedFs};
use bytes::Bytes;
use futures_util::future::{join, join_all};

use super::conflicts::Failing;
use super::locks::Mounts;
use super::mounts::{created, env, mounted};

const ROOT: InodeNumber = InodeNumber::ROOT;
const RW: OpenFlags = OpenFlags::READ_WRITE;

fn me() -> Caller {
    Caller::default()
}

fn mounts(seed: u64) -> Mounts {
    let sim = SimConfig { seed, jitter: 0.3, ..SimConfig::default() };
    Mounts::with(sim, 7, 2, Consistency::CloseToOpen)
}

async fn open(fs: &SharedFs, name: &str) -> (InodeNumber, Handle) {
    let number = fs.lookup(me(), ROOT, name.as_bytes()).await.expect("there").attr.inode;
    (number, fs.open(me(), number, RW).await.expect("opens").handle)
}

async fn write(fs: &SharedFs, (number, handle): (InodeNumber, Handle), text: &str) {
    let data = Bytes::copy_from_slice(text.as_bytes());
    fs.write(Writer::At(me()), number, handle, 0, data).await.expect("written");
}

async fn close(fs: &SharedFs, (number, handle): (InodeNumber, Handle)) -> Result<(), Errno> {
    let flushed = fs.flush(number, handle).await;
    fs.close(number, handle).await.expect("it was open");
    flushed
}

async fn put(fs: &SharedFs, name: &str, text: &str) {
    let made = fs.create(me(), ROOT, name.as_bytes(), 0o644, RW).await.expect("made");
    let file = (made.0.attr.inode, made.1.handle);
    write(fs, file, text).await;
    close(fs, file).await.expect("the ring takes it");
}

/// Each name of a directory with its number of links, as `ls -l` reads them.
async fn links(fs: &SharedFs, directory: InodeNumber) -> BTreeMap<String, u32> {
    let handle = fs.opendir(me(), directory).await.expect("opens").handle;
    let listed = fs.readdir(directory, handle, 0, 1000, true).await.expect("lists");
    fs.closedir(directory, handle).await.expect("it is open");
    let listed = listed.into_iter().map(|one| {
        let links = one.entry.expect("its attributes are known").attr.nlink;
        (String::from_utf8_lossy(&one.name).into_owned(), links)
    });
    listed.collect()
}

async fn content(fs: &SharedFs, name: &str) -> String {
    let file = open(fs, name).await;
    let read = fs.read(file.0, file.1, 0, 1000).await.expect("reads");
    fs.close(file.0, file.1).await.expect("it is open");
    String::from_utf8_lossy(&read).into_owned()
}

/// A rename that failed was put with the next change of its directory, when another mount had removed the file: the
/// name was in no listing with attributes, and `rm` did not find it.
#[tokio::test(start_paused = true)]
async fn a_name_whose_file_is_gone_is_shown_and_can_be_removed() {
    let memory = MemoryBlocks::new();
    let failing = Failing::over(&memory);
    let (blocks, other): (Arc<dyn Blocks>, Arc<dyn Blocks>) =
        (Arc::new(failing.clone()), Arc::new(memory));
    created(&env(), &other).await;
    let (one, two) = (mounted(&env(), &blocks, 1).await, mounted(&env(), &other, 2).await);
    put(&one, "a", "text").await;
    failing.refuse_all(true);
    let renamed = one.rename(me(), ROOT, b"a", ROOT, b"b", RenameFlags::default()).await;
    assert_eq!(renamed, Err(Errno::ETIMEDOUT));
    failing.refuse_all(false);
    two.unlink(me(), ROOT, b"a").await.expect("removes");
    two.sync().await.expect("is on the ring");
    one.mkdir(me(), ROOT, b"c", 0o755).await.expect("makes");
    for fs in [&one, &two] {
        let shown = links(fs, ROOT).await;
        assert_eq!(shown, BTreeMap::from([("b".into(), 0), ("c".into(), 2)]));
        let found = fs.lookup(me(), ROOT, b"b").await.expect("it can be removed").attr;
        assert_eq!(fs.getattr(found.inode, None).await.expect("known").attr.nlink, 0);
        assert_eq!(fs.open(me(), found.inode, RW).await.err(), Some(Errno::ESTALE));
    }
    two.unlink(me(), ROOT, b"b").await.expect("removes");
    two.sync().await.expect("is on the ring");
    for fs in [&one, &two] {
        assert_eq!(fs.lookup(me(), ROOT, b"b").await.err(), Some(Errno::ENOENT));
        assert_eq!(links(fs, ROOT).await, BTreeMap::from([("c".into(), 2)]));
    }
}

/// Whichever comes first: the file is there, or the writer was told.
#[test]
fn a_file_that_is_written_while_it_is_removed_gets_a_name_again() {
    let mut kept = 0;
    for seed in 0..20 {
        let latency = Latency::Flat(Duration::from_millis(50));
        let sim = SimConfig { seed: 9300 + seed, latency, ..SimConfig::default() };
        let all = Mounts::with(sim, 7, 2, Consistency::CloseToOpen);
        let [one, two] = [&all.mounts[0], &all.mounts[1]];
        all.run(put(one, "plan", "before"));
        let file = all.run(async {
            let file = open(one, "plan").await;
            write(one, file, "after!").await;
            file
        });
        let env = all.ring.sim.outside();
        let removes = async {
            two.unlink(me(), ROOT, b"plan").await.expect("removes");
            two.sync().await.expect("is on the ring");
        };
        let writes = async {
            sleep(&*env, Duration::from_millis(40 * seed)).await;
            close(one, file).await
        };
        let (closed, ()) = all.run(join(writes, removes));
        all.ring.sim.run_for(Duration::from_secs(30));
        let shown = all.run(links(two, ROOT));
        assert_eq!(all.run(links(one, ROOT)), shown, "seed {seed}");
        match shown.first_key_value() {
            Some((name, count)) => {
                assert!(name.starts_with("plan~") && *count == 1, "seed {seed}: {shown:?}");
                assert_eq!(all.run(content(two, name)), "after!", "seed {seed}");
                kept += 1;
                all.run(two.unlink(me(), ROOT, name.as_bytes())).expect("removes");
                all.run(two.sync()).expect("is on the ring");
                assert!(all.run(links(one, ROOT)).is_empty(), "seed {seed}");
            }
            // The remover had seen it, or the close has failed.
            // The remover had seen what was written.
            None => assert!(closed.is_err() || seed < 14, "seed {seed}"),
        }
        assert!(shown.len() < 2, "seed {seed}: {shown:?}");
    }
    assert!(kept >= 4, "{kept} kept");
}

/// A change of attributes alone does not bring a file back that somebody removes.
#[test]
fn a_file_whose_mode_is_changed_while_it_is_removed_goes() {
    for seed in 0..6 {
        let all = mounts(9320 + seed);
        let [one, two] = [&all.mounts[0], &all.mounts[1]];
        all.run(put(one, "plan", "before"));
        let number = all.run(one.lookup(me(), ROOT, b"plan")).expect("there").attr.inode;
        let env = all.ring.sim.outside();
        let changes = async {
            sleep(&*env, Duration::from_millis(env.random_u64() % 150)).await;
            let private = SetAttr { mode: Some(0o600), ..SetAttr::default() };
            // It may be gone already.
            let _ = one.setattr(me(), number, None, private).await;
        };
        let removes = async {
            two.unlink(me(), ROOT, b"plan").await.expect("removes");
            two.sync().await.expect("is on the ring");
        };
        all.run(join(changes, removes));
        all.ring.sim.run_for(Duration::from_secs(30));
        for fs in [one, two] {
            assert!(all.run(links(fs, ROOT)).is_empty(), "seed {seed}");
        }
    }
}

#[test]
fn a_name_that_is_given_while_another_is_taken_away_is_the_only_link() {
    for seed in 0..8 {
        let all = mounts(9340 + seed);
        let [one, two] = [&all.mounts[0], &all.mounts[1]];
        all.run(put(one, "a", "text"));
        let number = all.run(one.lookup(me(), ROOT, b"a")).expect("there").attr.inode;
        let env = all.ring.sim.outside();
        let removes = async {
            sleep(&*env, Duration::from_millis(env.random_u64() % 200)).await;
            two.unlink(me(), ROOT, b"a").await.expect("removes");
            two.sync().await.expect("is on the ring");
        };
        let (linked, ()) = all.run(join(one.link(me(), number, ROOT, b"b"), removes));
        all.ring.sim.run_for(Duration::from_secs(30));
        let expected = match linked {
            Ok(_) => BTreeMap::from([("b".to_owned(), 1)]),
            Err(_) => BTreeMap::new(),
        };
        for fs in [one, two] {
            assert_eq!(all.run(links(fs, ROOT)), expected, "seed {seed}");
        }
    }
}

/// Both mounts meet the contents at the same time, and each makes them a file of its own.
#[test]
fn a_file_that_two_mounts_keep_at_the_same_time_shows_one_link() {
    for seed in 0..6 {
        let all = mounts(9360 + seed);
        let [one, two] = [&all.mounts[0], &all.mounts[1]];
        all.run(put(one, "plan", "before"));
        let opened = all.run(join(open(one, "plan"), open(two, "plan")));
        all.run(join(write(one, opened.0, "of one"), write(two, opened.1, "of two")));
        let closed = all.run(join(close(one, opened.0), close(two, opened.1)));
        assert_eq!(closed, (Ok(()), Ok(())));
        all.run(join(content(one, "plan"), content(two, "plan")));
        all.ring.sim.run_for(Duration::from_secs(10));
        for fs in [one, two] {
            let shown = all.run(links(fs, ROOT));
            assert_eq!(shown.len(), 2, "seed {seed}: {shown:?}");
            assert!(shown.values().all(|links| *links == 1), "seed {seed}: {shown:?}");
        }
    }
}

/// Both moves would make a circle which no path leads to.
#[test]
fn two_directories_are_not_moved_into_each_other() {
    for seed in 0..8 {
        let all = mounts(9380 + seed);
        let [one, two] = [&all.mounts[0], &all.mounts[1]];
        let [a, b] = [b"a", b"b"].map(|name| {
            all.run(one.mkdir(me(), ROOT, name, 0o755)).expect("makes");
            [one, two].map(|fs| all.run(fs.lookup(me(), ROOT, name)).expect("there").attr.inode)
        });
        let no_flags = RenameFlags::default();
        let moves = join(
            one.rename(me(), ROOT, b"a", b[0], b"a", no_flags),
            two.rename(me(), ROOT, b"b", a[1], b"b", no_flags),
        );
        let moved = all.run(moves);
        let is_one = matches!(moved, (Ok(()), Err(Errno::EINVAL)) | (Err(Errno::EINVAL), Ok(())));
        assert!(is_one, "seed {seed}: {moved:?}");
        for fs in [one, two] {
            let outer = all.run(links(fs, ROOT));
            let inner = if moved.0.is_ok() { ("b", b) } else { ("a", a) };
            assert!(outer.len() == 1 && outer.contains_key(inner.0), "seed {seed}: {outer:?}");
            let found = all.run(fs.lookup(me(), ROOT, inner.0.as_bytes())).expect("there");
            assert_eq!(all.run(links(fs, found.attr.inode)).len(), 1, "seed {seed}");
        }
    }
}

#[test]
fn directories_are_not_moved_where_locks_are_refused() {
    let all = Mounts::with(
        SimConfig { seed: 9399, ..SimConfig::default() },
        5,
        3,
        Consistency::CloseToOpen,
    );
    let [small, large] = [&all.mounts[0], &all.mounts[2]];
    for name in [b"a", b"b"] {
        all.run(large.mkdir(me(), ROOT, name, 0o755)).expect("makes");
    }
    let into = [small, large].map(|fs| all.run(fs.lookup(me(), ROOT, b"b")).expect("there"));
    all.ring.sim.partition(&[&all.hosts(0..2)]);
    all.ring.sim.run_for(Duration::from_secs(120));
    let rename = |fs: &SharedFs, into: InodeNumber| {
        fs.rename(me(), ROOT, b"a", into, b"a", RenameFlags::default())
    };
    let refused = all.run(rename(small, into[0].attr.inode));
    // All copies of a directory may be on the other side.
    assert!(matches!(refused, Err(Errno::ENOLCK | Errno::EIO | Errno::ETIMEDOUT)), "{refused:?}");
    all.run(rename(large, into[1].attr.inode)).expect("most of the nodes are here");
}

const SEEDS_OF_RENAMES: u64 = 6;

/// What one mount does: `mv` or an exchange of two paths.
type Step = (&'static str, &'static str, bool);

/// Renames and exchanges of three mounts at once, of files in several directories, and the count of files that show
/// another number of links than they have names.
fn miscounted(steps: &[Step], seed: u64) -> (usize, String) {
    let sim = SimConfig { seed, jitter: 0.3, ..SimConfig::default() };
    let all = Mounts::with(sim, 7, 3, Consistency::CloseToOpen);
    let one = &all.mounts[0];
    for directory in ["d", "e", "k"] {
        let made = all.run(one.mkdir(me(), ROOT, directory.as_bytes(), 0o755)).expect("makes");
        for file in ["f", "g"] {
            let mode = 0o644;
            let made =
                one.mknod(me(), made.attr.inode, file.as_bytes(), FileKind::Regular, mode, 0);
            all.run(made).expect("makes");
        }
    }
    all.run(one.sync()).expect("is on the ring");
    let find = async |fs: &SharedFs, path: &'static str| {
        let (directory, name) = path.split_once('/').expect("of a file");
        let above = fs.lookup(me(), ROOT, directory.as_bytes()).await.expect("there").attr.inode;
        let _ = fs.lookup(me(), above, name.as_bytes()).await;
        (above, name)
    };
    let renames = all.mounts.iter().zip(steps).map(|(fs, (from, to, exchange))| async {
        let ((from, name), (to, new_name)) = (find(fs, from).await, find(fs, to).await);
        let flags = RenameFlags { exchange: *exchange, ..RenameFlags::default() };
        fs.rename(me(), from, name.as_bytes(), to, new_name.as_bytes(), flags).await
    });
    let done = all.run(join_all(renames));
    all.ring.sim.run_for(Duration::from_secs(60));
    let shown = all.mounts.iter().map(|fs| {
        all.run(async {
            let mut files: BTreeMap<InodeNumber, (u32, Vec<String>)> = BTreeMap::new();
            for directory in ["d", "e", "k"] {
                let above = fs.lookup(me(), ROOT, directory.as_bytes()).await.expect("there");
                let above = above.attr.inode;
                let handle = fs.opendir(me(), above).await.expect("opens").handle;
                let listed = fs.readdir(above, handle, 0, 1000, true).await.expect("lists");
                fs.closedir(above, handle).await.expect("it is open");
                for listed in listed {
                    let attr = listed.entry.expect("its attributes are known").attr;
                    let name = format!("{directory}/{}", String::from_utf8_lossy(&listed.name));
                    let file = files.entry(attr.inode).or_default();
                    file.0 = attr.nlink;
                    file.1.push(name);
                }
            }
            files.into_values().collect::<Vec<_>>()
        })
    });
    let shown: Vec<_> = shown.collect();
    let wrong = shown[0].iter().filter(|(links, names)| *links as usize != names.len()).count();
    (wrong, format!("{done:?}: {shown:?}"))
}

/// A file that two mounts exchanged at once got a link from each. One that a mount renamed after it had seen another mount's
/// link, and not yet its name, had one link for two names.
#[test]
fn a_file_has_as_many_links_as_names_whatever_mounts_rename_at_once() {
    let cases: [&[Step]; 9] = [
        &[("d/f", "d/h", false), ("d/f", "d/h", false)],
        &[("d/f", "d/g", true), ("d/f", "d/g", true)],
        &[("d/f", "d/h", false), ("d/g", "d/f", false)],
        &[("d/f", "d/g", true), ("d/f", "d/h", false), ("d/g", "k/z", false)],
        &[("d/f", "d/g", true), ("d/g", "d/f", true), ("d/f", "d/z", false)],
        &[("d/f", "e/h", false), ("d/f", "e/h", false)],
        &[("d/f", "e/g", true), ("d/f", "e/g", true)],
        &[("d/f", "e/g", true), ("e/g", "k/f", true), ("d/f", "k/f", true)],
        &[("d/f", "e/g", true), ("d/f", "d/h", false), ("d/f", "k/h", false)],
    ];
    let mut wrong = Vec::new();
    for (number, steps) in cases.iter().enumerate() {
        let mut counted = 0;
        for seed in 0..SEEDS_OF_RENAMES {
            let (count, shown) = miscounted(steps, 9500 + seed);
            if count > 0 && counted < 2 {
                println!("case {number}, seed {seed}: {shown}");
            }
            counted += usize::from(count > 0);
        }
        println!("case {number}: {counted} of {SEEDS_OF_RENAMES}");
        wrong.push(counted);
    }
    assert_eq!(wrong, vec![0; cases.len()]);
}
