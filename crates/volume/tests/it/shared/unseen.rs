//! Contents that were written at the same time, and whose file loses its name or contents before anybody opens it: what
//! the caller was not shown is kept, however the file goes.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use atoll_dht::{Blocks, MemoryBlocks};
use atoll_env::sleep;
use atoll_sim::{Latency, SimConfig};
use atoll_vfs::{
    Caller, Errno, FileKind, FileSystem, Handle, InodeNumber, OpenFlags, RenameFlags, SetAttr,
    Writer,
};
use atoll_volume::shared::merged::ConflictName;
use atoll_volume::shared::{Consistency, SharedFs};
use bytes::Bytes;
use futures_util::future::join;

use super::conflicts::Failing;
use super::locks::Mounts;
use super::mounts::{created_with, env, mounted};
use super::offline::Setting;

const ROOT: InodeNumber = InodeNumber::ROOT;
const RW: OpenFlags = OpenFlags::READ_WRITE;

fn me() -> Caller {
    Caller::default()
}

async fn find(fs: &SharedFs, parent: InodeNumber, name: &str) -> InodeNumber {
    fs.lookup(me(), parent, name.as_bytes()).await.expect("there").attr.inode
}

type Opened = (InodeNumber, Handle);

async fn open(fs: &SharedFs, parent: InodeNumber, name: &str) -> Opened {
    let number = find(fs, parent, name).await;
    (number, fs.open(me(), number, RW).await.expect("opens").handle)
}

async fn close(fs: &SharedFs, (number, handle): Opened) -> Result<(), Errno> {
    let flushed = fs.flush(number, handle).await;
    fs.close(number, handle).await.expect("it was open");
    flushed
}

async fn write(fs: &SharedFs, (number, handle): Opened, text: &str) {
    let empty = SetAttr { size_bytes: Some(0), ..SetAttr::default() };
    fs.setattr(me(), number, Some(handle), empty).await.expect("cut");
    let data = Bytes::copy_from_slice(text.as_bytes());
    fs.write(Writer::At(me()), number, handle, 0, data).await.expect("written");
}

async fn put(fs: &SharedFs, parent: InodeNumber, name: &str, text: &str) {
    let made = fs.create(me(), parent, name.as_bytes(), 0o644, RW).await.expect("made");
    let file = (made.0.attr.inode, made.1.handle);
    write(fs, file, text).await;
    close(fs, file).await.expect("the ring takes it");
}

/// What is in all files of a directory, and of the directories in it; kept contents with `~` before.
async fn texts(fs: &SharedFs, directory: InodeNumber) -> BTreeSet<String> {
    let handle = fs.opendir(me(), directory).await.expect("opens").handle;
    let listed = fs.readdir(directory, handle, 0, 1000, true).await.expect("lists");
    fs.closedir(directory, handle).await.expect("it is open");
    let mut all = BTreeSet::new();
    for entry in listed {
        let attr = entry.entry.expect("its attributes are known").attr;
        if attr.kind == FileKind::Directory {
            all.extend(Box::pin(texts(fs, attr.inode)).await);
            continue;
        }
        assert_eq!(attr.nlink, 1, "{:?}", entry.name);
        let handle = fs.open(me(), attr.inode, RW).await.expect("opens").handle;
        let read = fs.read(attr.inode, handle, 0, 1000).await.expect("reads");
        fs.close(attr.inode, handle).await.expect("it is open");
        let mark = if ConflictName::parse(&entry.name).is_some() { "~" } else { "" };
        all.insert(format!("{mark}{}", String::from_utf8_lossy(&read)));
    }
    all
}

fn set(texts: &[&str]) -> BTreeSet<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

/// Both mounts write the file before either sees the other's contents, and nobody opens it after that. The second one's
/// are shown: they were written later.
async fn write_at_once(one: &SharedFs, two: &SharedFs, parents: [InodeNumber; 2], name: &str) {
    put(one, parents[0], name, "before").await;
    let (mine, theirs) = (open(one, parents[0], name).await, open(two, parents[1], name).await);
    write(one, mine, "one").await;
    write(two, theirs, "number two").await;
    close(one, mine).await.expect("the ring takes it");
    // These mounts go by the machine's clock, which stands still for no test.
    std::thread::sleep(Duration::from_millis(3));
    close(two, theirs).await.expect("the ring takes it");
}

/// The ways in which a file loses its name or its contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// `rm`
    Unlink,
    /// `mv` over it, from the same directory or another
    Replace,
    ReplaceFromElsewhere,
    /// `tar x`, `install`, `cp --remove-destination`
    UnlinkAndCreate,
    /// A shell's `>`
    OpenEmptied,
    /// `truncate`, which opens nothing
    Truncate,
    /// `mv --exchange`, and then `rm` of what was exchanged
    ExchangeAndUnlink,
}

const WAYS: [Way; 7] = [
    Way::Unlink,
    Way::Replace,
    Way::ReplaceFromElsewhere,
    Way::UnlinkAndCreate,
    Way::OpenEmptied,
    Way::Truncate,
    Way::ExchangeAndUnlink,
];

impl Way {
    /// Whether it reads what is in the file.
    fn looks(self) -> bool {
        matches!(self, Way::OpenEmptied | Way::Truncate | Way::ExchangeAndUnlink)
    }

    /// Loses `plan`; what is in it afterwards, if it is there.
    async fn lose(self, fs: &SharedFs, elsewhere: InodeNumber) -> &'static [&'static str] {
        let no_flags = RenameFlags::default();
        match self {
            Way::Unlink => fs.unlink(me(), ROOT, b"plan").await.expect("removes"),
            Way::Replace | Way::ReplaceFromElsewhere => {
                let from = if self == Way::Replace { ROOT } else { elsewhere };
                put(fs, from, "new", "replaced").await;
                fs.rename(me(), from, b"new", ROOT, b"plan", no_flags).await.expect("renames");
            }
            Way::UnlinkAndCreate => {
                fs.unlink(me(), ROOT, b"plan").await.expect("removes");
                put(fs, ROOT, "plan", "replaced").await;
            }
            Way::OpenEmptied => {
                let number = find(fs, ROOT, "plan").await;
                let flags = OpenFlags(RW.0 | OpenFlags::TRUNCATE);
                let handle = fs.open(me(), number, flags).await.expect("opens").handle;
                write(fs, (number, handle), "replaced").await;
                close(fs, (number, handle)).await.expect("the ring takes it");
            }
            Way::Truncate => {
                let number = find(fs, ROOT, "plan").await;
                let size = SetAttr { size_bytes: Some(0), ..SetAttr::default() };
                fs.setattr(me(), number, None, size).await.expect("cuts");
                return &[""];
            }
            Way::ExchangeAndUnlink => {
                put(fs, elsewhere, "new", "replaced").await;
                let flags = RenameFlags { exchange: true, ..no_flags };
                fs.rename(me(), elsewhere, b"new", ROOT, b"plan", flags).await.expect("exchanges");
                fs.unlink(me(), elsewhere, b"new").await.expect("removes");
            }
        }
        if self == Way::Unlink { &[] } else { &["replaced"] }
    }
}

/// Two members write a file at the same time, and before anybody opens it somebody replaces or removes it. The contents
/// that were not shown were gone, although their close had succeeded: `rm` left them in an inode without a name.
#[tokio::test(start_paused = true)]
async fn contents_that_nobody_was_shown_outlive_their_file() {
    for is_encrypted in [false, true] {
        for way in WAYS {
            // The writers themselves, or somebody else; after a look at the file, or without one.
            for (who, looks) in [(0, true), (1, true), (2, true), (0, false), (2, false)] {
                let blocks: Arc<dyn Blocks> = Arc::new(MemoryBlocks::new());
                created_with(&env(), &blocks, is_encrypted).await;
                let mut all = Vec::new();
                for user in 1..=3 {
                    all.push(mounted(&env(), &blocks, user).await);
                }
                let fs = &all[who];
                let elsewhere = fs.mkdir(me(), ROOT, b"dir", 0o755).await.expect("made").attr.inode;
                write_at_once(&all[0], &all[1], [ROOT; 2], "plan").await;
                if looks {
                    let shown = fs.lookup(me(), ROOT, b"plan").await.expect("there").attr;
                    assert_eq!(shown.size_bytes, 10, "the later ones");
                }
                let left = way.lose(fs, elsewhere).await;
                fs.sync().await.expect("is on the ring");
                sleep(&*env(), Duration::from_secs(20)).await;
                let told = format!("{way:?} by {who}, who looks: {looks}");
                // Without a look the first writer has seen its own contents alone.
                let kept = if who == 0 && !looks && !way.looks() { "~number two" } else { "~one" };
                let expected = set(&[left, &[kept]].concat());
                for fs in &all {
                    assert_eq!(texts(fs, ROOT).await, expected, "{told}");
                }
            }
        }
    }
}

/// What is known to be in the file is kept before the name goes.
#[tokio::test(start_paused = true)]
async fn a_mount_that_dies_after_a_removal_loses_nothing_that_was_not_shown() {
    let memory = MemoryBlocks::new();
    let failing = Failing::over(&memory);
    let (over, blocks): (Arc<dyn Blocks>, Arc<dyn Blocks>) =
        (Arc::new(failing.clone()), Arc::new(memory));
    created_with(&env(), &blocks, false).await;
    let (one, two) = (mounted(&env(), &over, 1).await, mounted(&env(), &blocks, 2).await);
    write_at_once(&one, &two, [ROOT; 2], "plan").await;
    find(&one, ROOT, "plan").await;
    one.unlink(me(), ROOT, b"plan").await.expect("removes");
    // Its node has not heard of anything that it does after the call.
    failing.refuse_all(true);
    drop(one);
    sleep(&*env(), Duration::from_secs(20)).await;
    let left = texts(&two, ROOT).await;
    assert!(left.contains("~one"), "{left:?}");
}

/// `rm -r` of the directory that the file is in: what was not shown is in it still, or in the one above.
#[tokio::test(start_paused = true)]
async fn a_directory_that_is_removed_leaves_what_was_not_shown_in_it() {
    for looks in [false, true] {
        let blocks: Arc<dyn Blocks> = Arc::new(MemoryBlocks::new());
        created_with(&env(), &blocks, false).await;
        let (one, two) = (mounted(&env(), &blocks, 1).await, mounted(&env(), &blocks, 2).await);
        let made = one.mkdir(me(), ROOT, b"dir", 0o755).await.expect("made").attr.inode;
        let theirs = find(&two, ROOT, "dir").await;
        write_at_once(&one, &two, [made, theirs], "plan").await;
        if looks {
            find(&one, made, "plan").await;
        }
        one.unlink(me(), made, b"plan").await.expect("removes");
        let removed = one.rmdir(me(), ROOT, b"dir").await;
        assert!(matches!(removed, Ok(()) | Err(Errno::ENOTEMPTY)), "{removed:?}");
        one.sync().await.expect("is on the ring");
        sleep(&*env(), Duration::from_secs(30)).await;
        let kept = if looks { "~one" } else { "~number two" };
        for fs in [&one, &two] {
            assert_eq!(texts(fs, ROOT).await, set(&[kept]), "looks: {looks}");
        }
    }
}

/// The second contents come to the ring before, while and after a third mount removes or replaces the file.
#[test]
fn contents_that_arrive_while_their_file_goes_are_kept() {
    for seed in 0..24 {
        let latency = Latency::Flat(Duration::from_millis(50));
        let sim = SimConfig { seed: 9500 + seed, latency, ..SimConfig::default() };
        let all = Mounts::with(sim, 7, 3, Consistency::CloseToOpen);
        let [one, two, three] = [&all.mounts[0], &all.mounts[1], &all.mounts[2]];
        let env = all.ring.sim.outside();
        let opened = all.run(async {
            put(one, ROOT, "plan", "before").await;
            put(three, ROOT, "new", "replaced").await;
            let opened = (open(one, ROOT, "plan").await, open(two, ROOT, "plan").await);
            write(one, opened.0, "one").await;
            write(two, opened.1, "number two").await;
            opened
        });
        let removes = async {
            sleep(&*env, Duration::from_millis(300)).await;
            match seed % 2 {
                0 => three.unlink(me(), ROOT, b"plan").await.expect("removes"),
                _ => {
                    let renamed =
                        three.rename(me(), ROOT, b"new", ROOT, b"plan", RenameFlags::default());
                    renamed.await.expect("renames");
                }
            }
            three.sync().await.expect("is on the ring");
        };
        let writes = async {
            let first = close(one, opened.0).await;
            sleep(&*env, Duration::from_millis(40 * seed)).await;
            (first, close(two, opened.1).await)
        };
        let (closed, ()) = all.run(join(writes, removes));
        all.ring.sim.run_for(Duration::from_secs(40));
        let left = all.run(texts(three, ROOT));
        assert_eq!(all.run(texts(one, ROOT)), left, "seed {seed}");
        assert_eq!(closed.0, Ok(()), "seed {seed}");
        // Of the two one was removed; none, if the removal came first.
        let kept = left.iter().filter(|text| text.starts_with('~')).count();
        assert!(kept >= 1 || closed.1.is_err(), "seed {seed}: {left:?}");
        assert_eq!(left.len() - kept, 1, "seed {seed}: {left:?}");
    }
}

/// Both writers remove the file at the same time: neither has been shown the other's contents, or both have.
#[test]
fn two_mounts_that_remove_a_file_at_once_keep_what_was_not_shown_once() {
    for seed in 0..8 {
        let sim = SimConfig { seed: 9540 + seed, jitter: 0.3, ..SimConfig::default() };
        let all = Mounts::with(sim, 7, 2, Consistency::CloseToOpen);
        let [one, two] = [&all.mounts[0], &all.mounts[1]];
        let env = all.ring.sim.outside();
        all.run(async {
            put(one, ROOT, "plan", "before").await;
            let opened = (open(one, ROOT, "plan").await, open(two, ROOT, "plan").await);
            write(one, opened.0, "one").await;
            write(two, opened.1, "number two").await;
            close(one, opened.0).await.expect("the ring takes it");
            sleep(&*env, Duration::from_millis(50)).await;
            close(two, opened.1).await.expect("the ring takes it");
            for fs in [one, two] {
                find(fs, ROOT, "plan").await;
            }
        });
        let removed = all.run(join(one.unlink(me(), ROOT, b"plan"), async {
            sleep(&*env, Duration::from_millis(30 * seed)).await;
            two.unlink(me(), ROOT, b"plan").await
        }));
        assert!(removed.0.is_ok() || removed.1.is_ok(), "seed {seed}: {removed:?}");
        all.ring.sim.run_for(Duration::from_secs(40));
        for fs in [one, two] {
            assert_eq!(all.run(texts(fs, ROOT)), set(&["~one"]), "seed {seed}");
        }
    }
}

/// A removal offline counts for what was shown then: neither for what was known to stand beside that, nor for what somebody
/// wrote meanwhile.
#[test]
fn a_removal_offline_keeps_what_was_not_shown() {
    for (seed, meanwhile) in [(9560, false), (9561, true)] {
        let all = Setting::new(seed);
        let (one, two) = (all.mounted(), &all.others[0]);
        let opened = all.run(async {
            put(&one, ROOT, "plan", "before").await;
            let opened = (open(&one, ROOT, "plan").await, open(two, ROOT, "plan").await);
            write(&one, opened.0, "one").await;
            write(two, opened.1, "number two").await;
            opened
        });
        if !meanwhile {
            all.run(close(&one, opened.0)).expect("the ring takes it");
            all.wait(Duration::from_secs(1));
            all.run(close(two, opened.1)).expect("the ring takes it");
            all.run(find(&one, ROOT, "plan"));
        }
        all.machine.node.stop();
        if meanwhile {
            all.run(close(&one, opened.0)).expect("is spooled");
            all.run(close(two, opened.1)).expect("the ring takes it");
        }
        all.run(one.unlink(me(), ROOT, b"plan")).expect("removes");
        all.wait(Duration::from_secs(60));
        all.reconnect();
        let kept = if meanwhile { "~number two" } else { "~one" };
        for fs in [&one, two] {
            assert_eq!(all.run(texts(fs, ROOT)), set(&[kept]), "meanwhile: {meanwhile}");
        }
    }
}
