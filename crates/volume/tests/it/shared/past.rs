//! Past versions of files and directories: their bytes, which are kept, and what a mount shows of them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_dht::{
    Blocks, GetError, HeldBlock, MemoryBlocks, NewBlock, OverMemory, PutError, Wanted,
};
use atoll_env::{BoxFuture, Env, Instant, Runtime, Task, TokioRuntime};
use atoll_key::kinds::INODE_PREFIX_BYTES;
use atoll_key::{BlockHash, BlockId, UserId};
use atoll_sim::SimConfig;
use atoll_vfs::{
    Caller, Errno, FileKind, FileSystem, Handle, InodeNumber, OpenFlags, RenameFlags, SetAttr,
    Writer, XattrFlags,
};
use atoll_volume::keep::Keep;
use atoll_volume::shared::access::{VolumeRecord, groups};
use atoll_volume::shared::inode::{Contents, Inode};
use atoll_volume::shared::past::{
    Earlier, MAX_EARLIER, MAX_WITHIN_A_MINUTE, PastVersion, Place, Replaced, Span, began_ms,
    decode_left,
};
use atoll_volume::shared::standing::Trusted;
use atoll_volume::shared::{Consistency, PastFs, SharedFs, SharedOptions};
use bytes::Bytes;
use futures_util::future::join;
use proptest::prelude::*;

use super::encrypted::shut_out;
use super::locks::Mounts;
use super::mounts::{created_keeping, user, volume};
use super::{NOW_MS, create, inode, joined, write};

pub(super) const ROOT: InodeNumber = InodeNumber::ROOT;
pub(super) const MINUTE: u64 = 60_000;
pub(super) const HOUR: u64 = 60 * MINUTE;
const DAY: u64 = 24 * HOUR;
/// Monday, 2026-11-16, 00:00.
pub(super) const START: u64 = 1_794_787_200_000;

pub(super) fn me() -> Caller {
    Caller::default()
}

fn symlink(target: &'static str) -> Inode {
    inode(Contents::Symlink(Bytes::from_static(target.as_bytes())))
}

fn span(began_ms: u64, ended_ms: u64, kept_until_ms: u64) -> Span {
    Span { began_ms, ended_ms, kept_until_ms }
}

fn past_version(earlier: usize) -> PastVersion {
    let earlier = (0..earlier as u64)
        .map(|n| Earlier { span: span(n, n + 1, n + 2), hash: BlockHash::of(&n.to_be_bytes()) });
    let payload = symlink("before").encode().expect("short").into();
    let span = span(7, 8, 9);
    PastVersion { span, user: UserId([3; 32]), earlier: earlier.collect(), payload }
}

// The bytes.

#[test]
fn a_past_version_is_read_as_it_was_written() {
    for earlier in [0, 1, MAX_EARLIER] {
        let past = past_version(earlier);
        let block = Bytes::from(past.encode());
        assert_eq!(PastVersion::decode(&block), Ok(past.clone()), "{earlier}");
        assert_eq!(past.inode(), Ok(symlink("before")));
    }
    let mut known = b"ATPV\x01".to_vec();
    [7_u64, 8, 9].iter().for_each(|time| known.extend(time.to_be_bytes()));
    known.extend([3; 32]);
    known.extend([0, 0]);
    known.extend(symlink("before").encode().expect("short"));
    assert_eq!(past_version(0).encode(), known);
}

#[test]
fn an_inode_refers_to_its_newest_past_version() {
    let mut link = symlink("now");
    let without = link.encode().expect("short").len();
    link.past = Some(BlockHash([6; 32]));
    let encoded = Bytes::from(link.encode().expect("short"));
    assert_eq!((encoded.len(), Inode::decode(&encoded)), (without, Ok(link)));
}

#[test]
fn a_block_that_says_more_than_it_has_is_refused() {
    let whole = past_version(3).encode();
    let decode = |block: &[u8]| PastVersion::decode(&Bytes::copy_from_slice(block));
    let entries_end = 5 + 24 + 32 + 2 + 3 * 56;
    for len in 0..entries_end {
        assert!(decode(&whole[..len]).is_err(), "{len}");
    }
    let mut many = whole.clone();
    many[5 + 24 + 32..][..2].copy_from_slice(&(MAX_EARLIER as u16 + 1).to_be_bytes());
    many.resize(100_000, 0);
    assert!(decode(&many).is_err(), "more earlier ones than there may be");
    let mut long = past_version(0).encode();
    long.resize(5 + 24 + 32 + 2 + (60 << 10) + 1, 0);
    assert!(decode(&long).is_err(), "more than an inode has");
    let mut other = whole;
    other[4] = 2;
    assert!(decode(&other).is_err(), "a layout of the future");
}

proptest! {
    #[test]
    fn any_bytes_are_refused_or_have_one_encoding(tail in prop::collection::vec(any::<u8>(), 0..300)) {
        let block = Bytes::from([b"ATPV\x01", &tail[..]].concat());
        if let Ok(past) = PastVersion::decode(&block) {
            prop_assert_eq!(past.encode(), block);
            let _ = (past.inode(), past.before(u64::MAX), past.after(0));
        }
    }

    #[test]
    fn what_a_removal_leaves_is_nothing_or_a_hash(payload in prop::collection::vec(any::<u8>(), 0..64)) {
        match decode_left(&Bytes::from(payload.clone())) {
            Ok(None) => prop_assert!(payload.is_empty()),
            Ok(Some(hash)) => prop_assert_eq!([&[1], &hash.0[..]].concat(), payload),
            Err(_) => {}
        }
    }
}

// Which are kept.

fn replaced<'a>(
    block: &'a atoll_key::kinds::certified::CertifiedBlock,
    inode: &'a Inode,
    ended_ms: u64,
) -> Replaced<'a> {
    static NOBODY: Trusted = Trusted::new();
    Replaced { block, trusted: &NOBODY, inode, ended_ms, kept_secs: 0, is_lost: false }
}

#[test]
fn a_version_lists_those_before_it_as_long_as_they_are_kept() {
    let (block, inode) = (create(&symlink("now")), symlink("now"));
    let keep: Keep = "24h/7d/4w".parse().expect("a policy");
    let hash = BlockHash([9; 32]);
    let mut before = past_version(0);
    before.span = span(1, 2, NOW_MS + HOUR + 1);
    let over = Earlier { span: span(0, 1, NOW_MS + HOUR), hash: BlockHash([8; 32]) };
    let lasts = Earlier { span: span(0, 1, NOW_MS + DAY), hash: BlockHash([7; 32]) };
    before.earlier = vec![over, lasts];
    assert_eq!(replaced(&block, &inode, NOW_MS + MINUTE).past(keep, None), None, "13:56");
    let past = replaced(&block, &inode, NOW_MS + HOUR).past(keep, Some((hash, before.clone())));
    let past = past.expect("14:55 is another hour");
    assert_eq!(past.span, span(NOW_MS, NOW_MS + HOUR, NOW_MS + HOUR + DAY));
    assert_eq!(past.user, super::secret(1).user_id());
    assert_eq!(past.earlier, [Earlier { span: before.span, hash }, lasts]);
    assert_eq!(past.inode().as_ref(), Ok(&inode));
    // As many as a block can list.
    before.span = lasts.span;
    before.earlier = vec![lasts; MAX_EARLIER];
    let past = replaced(&block, &inode, NOW_MS + HOUR).past(keep, Some((hash, before)));
    let past = past.expect("kept");
    assert_eq!((past.earlier.len(), past.earlier[0].hash), (MAX_EARLIER, hash));
    assert_eq!(replaced(&block, &inode, NOW_MS + 9 * DAY).past(Keep::NONE, None), None);
}

/// A version that no full minute has seen is kept if the next one lacks something of it, as long as there are not too many
/// like it.
#[test]
fn of_the_versions_within_a_minute_some_are_kept() {
    let (block, inode) = (create(&symlink("now")), symlink("now"));
    let keep = Keep::default();
    let lost = |ended_ms| Replaced { is_lost: true, ..replaced(&block, &inode, ended_ms) };
    let within =
        Earlier { span: span(NOW_MS - 9, NOW_MS - 3, NOW_MS + HOUR), hash: BlockHash([1; 32]) };
    let other =
        Earlier { span: span(NOW_MS - HOUR, NOW_MS, NOW_MS + DAY), hash: BlockHash([2; 32]) };
    let before = |count: usize| {
        let mut before = past_version(0);
        before.span = other.span;
        before.earlier = [vec![within; count], vec![other; 100]].concat();
        Some((BlockHash([9; 32]), before))
    };
    let soon = NOW_MS + 10;
    assert_eq!(replaced(&block, &inode, soon).past(keep, before(0)), None, "nothing is lost");
    let past = lost(soon).past(keep, before(MAX_WITHIN_A_MINUTE - 1)).expect("kept");
    assert_eq!(past.span, span(NOW_MS, soon, soon + HOUR));
    assert_eq!(lost(soon).past(keep, before(MAX_WITHIN_A_MINUTE)), None, "there are enough");
    // They do not count for others, nor when their time is over.
    let past = lost(NOW_MS + MINUTE).past(keep, before(MAX_WITHIN_A_MINUTE)).expect("kept");
    assert_eq!(past.span.kept_until_ms, NOW_MS + MINUTE + HOUR);
    assert!(lost(NOW_MS + HOUR).past(keep, before(MAX_WITHIN_A_MINUTE)).is_some());
    let hours: Keep = "24h/7d/4w".parse().expect("a policy");
    assert_eq!(lost(soon).past(hours, before(0)), None, "a policy that counts no minutes");
}

/// An hour of versions does not drive those of days and weeks out of the list.
#[test]
fn of_too_many_versions_those_go_that_are_kept_for_the_shortest_time() {
    let (block, inode) = (create(&symlink("now")), symlink("now"));
    let keep: Keep = "1000m/4w".parse().expect("a policy");
    let base = NOW_MS - HOUR;
    let at = |n: u64, kept: u64| span(base + n, base + n + 1, base + n + 1 + kept);
    let week = Earlier { span: at(0, 3 * DAY), hash: BlockHash([7; 32]) };
    let mut before = past_version(0);
    before.span = at(2000, DAY);
    let minutes = (1..=MAX_EARLIER as u64).rev();
    let hash = |n: u64| BlockHash([(n % 251) as u8; 32]);
    before.earlier = minutes.map(|n| Earlier { span: at(n, DAY), hash: hash(n) }).collect();
    before.earlier.push(week);
    let first = before.earlier[0];
    let past = replaced(&block, &inode, NOW_MS + MINUTE).past(keep, Some((hash(0), before)));
    let past = past.expect("kept");
    assert_eq!(past.earlier.len(), MAX_EARLIER);
    assert_eq!((past.earlier[1], past.earlier[MAX_EARLIER - 1]), (first, week));
    let oldest = past.earlier[MAX_EARLIER - 2].span.began_ms;
    assert_eq!(oldest, base + 3, "two minutes are gone, not the week");
    // The block lasts as long as what it lists, and two days.
    let last_secs = (week.span.kept_until_ms - (NOW_MS + MINUTE)) / 1000;
    assert_eq!(past.lease_secs(), last_secs + 2 * DAY / 1000);
}

/// What two have written at the same time is one version, from when the later one was written.
#[test]
fn a_version_begins_with_its_latest_sibling() {
    let first = create(&symlink("first"));
    let (one, two) = (write(&first, 1, &symlink("one")), write(&first, 2, &symlink("two")));
    assert_eq!(began_ms(&joined(&one, &two), None), NOW_MS);
    let late = first.write(&super::author(2), NOW_MS + HOUR, Some(&[])).expect("a member");
    assert_eq!(began_ms(&joined(&one, &late), None), NOW_MS + HOUR);
}

#[test]
fn the_newest_version_that_began_before_is_found() {
    let hash = |n| BlockHash([n; 32]);
    let mut past = past_version(0);
    past.span = span(100, 200, 1000);
    past.earlier = vec![
        Earlier { span: span(50, 100, 900), hash: hash(1) },
        // Its writer's clock was ahead.
        Earlier { span: span(60, 50, 1000), hash: hash(2) },
        Earlier { span: span(10, 40, 300), hash: hash(3) },
    ];
    let cases = [
        (200, Some(Place::Here), None),
        (101, Some(Place::Here), None),
        (100, Some(Place::Earlier(hash(1))), Some(Place::Here)),
        (61, Some(Place::Earlier(hash(1))), Some(Place::Here)),
        (50, Some(Place::Earlier(hash(3))), Some(Place::Earlier(hash(2)))),
        (10, None, Some(Place::Earlier(hash(3)))),
    ];
    for (time_ms, before, after) in cases {
        let found = [past.before(time_ms), past.after(time_ms)];
        assert_eq!(found.map(|found| Some(found?.1)), [before, after], "{time_ms}");
    }
}

// What a mount shows.

/// A wall clock set by hand.
struct Clock {
    real: TokioRuntime,
    unix_ms: AtomicU64,
}

impl Runtime for Clock {
    fn now(&self) -> Instant {
        self.real.now()
    }

    fn unix_ms(&self) -> u64 {
        self.unix_ms.load(Ordering::Relaxed)
    }

    fn sleep_until(&self, at: Instant) -> BoxFuture<'static, ()> {
        self.real.sleep_until(at)
    }

    fn spawn(&self, task: BoxFuture<'static, ()>) -> Task {
        self.real.spawn(task)
    }

    fn random_u64(&self) -> u64 {
        self.real.random_u64()
    }
}

/// Blocks in memory; counts content blocks that are put, can take them late, and can fail to show some.
#[derive(Default)]
struct Noted {
    memory: MemoryBlocks,
    put: Mutex<Vec<Bytes>>,
    shows_no_past: AtomicBool,
    is_slow: AtomicBool,
}

/// A content block begins with its inode.
fn is_past(bytes: &[u8]) -> bool {
    bytes.get(INODE_PREFIX_BYTES..).is_some_and(|content| content.starts_with(b"ATPV"))
}

fn content_id(bytes: &[u8]) -> BlockId {
    BlockHash::of_inode_content(bytes).inode_content_id()
}

impl OverMemory for Noted {
    fn memory(&self) -> &MemoryBlocks {
        &self.memory
    }

    fn get_block(
        &self,
        id: BlockId,
        wanted: Wanted,
    ) -> BoxFuture<'static, Result<HeldBlock, GetError>> {
        let found = self.memory.get_block(id, wanted);
        let hides = self.shows_no_past.load(Ordering::Relaxed);
        Box::pin(async move {
            match found.await {
                Ok(held) if hides && is_past(&held.bytes) => {
                    Err(GetError::Unavailable { key: id.key, told: "nobody answers".into() })
                }
                found => found,
            }
        })
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let content = blocks.iter().filter(|block| !block.id.kind.is_mutable());
        self.put.lock().expect("one thread").extend(content.map(|block| block.bytes.clone()));
        let (memory, is_slow) = (self.memory.clone(), self.is_slow.load(Ordering::Relaxed));
        Box::pin(async move {
            if is_slow {
                tokio::time::sleep(Duration::from_secs(3)).await;
            }
            memory.put_blocks(blocks).await
        })
    }
}

pub(super) struct Scene {
    clock: Arc<Clock>,
    noted: Arc<Noted>,
    record: VolumeRecord,
}

impl Scene {
    pub(super) async fn new(keep: &str, is_encrypted: bool) -> Scene {
        let unix_ms = AtomicU64::new(START);
        let clock = Arc::new(Clock { real: TokioRuntime::current(), unix_ms });
        let noted = Arc::new(Noted::default());
        let keep = keep.parse().expect("a policy");
        let (env, blocks): (Env, Arc<dyn Blocks>) = (clock.clone(), noted.clone());
        let record = created_keeping(&env, &blocks, is_encrypted, keep).await;
        Scene { clock, noted, record }
    }

    fn env(&self) -> Env {
        self.clock.clone()
    }

    fn blocks(&self) -> Arc<dyn Blocks> {
        self.noted.clone()
    }

    pub(super) async fn mount(&self, number: u8) -> SharedFs {
        super::mounts::mounted(&self.env(), &self.blocks(), number).await
    }

    /// Somebody who is no member.
    async fn reader(&self) -> SharedFs {
        let options = SharedOptions { names_max_age: Duration::ZERO, ..SharedOptions::default() };
        let id = volume().volume_id();
        SharedFs::open(self.env(), self.blocks(), id, None, options).await.expect("mounts")
    }

    /// `minutes` after the volume was made. Certificates are renewed as each day.
    pub(super) async fn at(&self, minutes: u64) {
        let before = self.clock.unix_ms.swap(START + minutes * MINUTE, Ordering::Relaxed);
        if before / DAY != (START + minutes * MINUTE) / DAY {
            // Mounts look for new certificates once a minute.
            tokio::time::advance(Duration::from_secs(61)).await;
            groups::renew_volume(&self.env(), &self.blocks(), &volume(), &self.record)
                .await
                .expect("renews");
        }
    }

    /// The same, to the millisecond, on the first day.
    pub(super) fn at_ms(&self, ms: u64) {
        self.clock.unix_ms.store(START + ms, Ordering::Relaxed);
    }

    /// Content blocks that were put since the last call: past versions, and others.
    fn puts(&self) -> (usize, usize) {
        let put = std::mem::take(&mut *self.noted.put.lock().expect("one thread"));
        let past = put.iter().filter(|bytes| is_past(bytes)).count();
        (past, put.len() - past)
    }
}

/// Writes a whole file, or makes it.
pub(super) async fn put(fs: &SharedFs, parent: InodeNumber, name: &str, data: &str) {
    let flags = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::TRUNCATE);
    let made = fs.create(me(), parent, name.as_bytes(), 0o644, flags).await;
    let (made, opened) = made.unwrap_or_else(|errno| panic!("{name}: {errno}"));
    let (number, handle) = (made.attr.inode, opened.handle);
    let data = Bytes::copy_from_slice(data.as_bytes());
    fs.write(Writer::At(me()), number, handle, 0, data).await.expect("writes");
    fs.flush(number, handle).await.expect("the ring takes it");
    fs.close(number, handle).await.expect("it is open");
    fs.forget(number, 1);
}

pub(super) async fn mkdir(fs: &SharedFs, name: &str) -> InodeNumber {
    fs.mkdir(me(), ROOT, name.as_bytes(), 0o755).await.expect("is made").attr.inode
}

pub(super) async fn walk(fs: &dyn FileSystem, path: &str) -> Result<InodeNumber, Errno> {
    let mut at = ROOT;
    for name in path.split('/').filter(|name| !name.is_empty()) {
        at = fs.lookup(me(), at, name.as_bytes()).await?.attr.inode;
    }
    Ok(at)
}

pub(super) async fn read(fs: &dyn FileSystem, path: &str) -> Result<String, Errno> {
    let inode = walk(fs, path).await?;
    let handle = fs.open(me(), inode, OpenFlags::READ).await?.handle;
    let read = fs.read(inode, handle, 0, 1 << 20).await?;
    fs.close(inode, handle).await.expect("it is open");
    Ok(String::from_utf8(read.to_vec()).expect("a test's"))
}

/// The names of a directory, listed a few at a time with their attributes.
pub(super) async fn list(fs: &dyn FileSystem, path: &str) -> Result<BTreeSet<String>, Errno> {
    let inode = walk(fs, path).await?;
    let handle = fs.opendir(me(), inode).await?.handle;
    let mut names = BTreeSet::new();
    let mut cookie = 0;
    loop {
        let page = fs.readdir(inode, handle, cookie, 7, true).await?;
        let Some(last) = page.last() else { break };
        cookie = last.cookie;
        names.extend(page.iter().map(|entry| String::from_utf8_lossy(&entry.name).into_owned()));
    }
    fs.closedir(inode, handle).await.expect("it is open");
    Ok(names)
}

/// The name of a time so many minutes after the volume was made.
fn name(minutes: u64) -> String {
    let time = std::time::UNIX_EPOCH + Duration::from_millis(START + minutes * MINUTE);
    humantime::format_rfc3339_seconds(time).to_string().replace(":00Z", "Z")
}

async fn then(fs: &SharedFs, minutes: u64, path: &str) -> Result<String, Errno> {
    read(fs, &format!(".atoll/history/{}/{path}", name(minutes))).await
}

async fn names_then(fs: &SharedFs, minutes: u64, path: &str) -> Vec<String> {
    let path = format!(".atoll/history/{}/{path}", name(minutes));
    list(fs, &path).await.unwrap_or_else(|errno| panic!("{path}: {errno}")).into_iter().collect()
}

/// A file that is rewritten each seven minutes for five weeks, in a directory that changes once a day.
#[tokio::test(start_paused = true)]
async fn each_state_shows_what_was_written_last_before_it() {
    let scene = Scene::new("24h/7d/4w", false).await;
    let mut fs = scene.mount(1).await;
    let directory = mkdir(&fs, "d").await;
    let mut written: BTreeMap<u64, String> = BTreeMap::new();
    let weeks = 5;
    for minutes in (1..weeks * 7 * 24 * 60).step_by(7) {
        scene.at(minutes).await;
        let text = format!("written at {minutes}");
        put(&fs, directory, "f", &text).await;
        if minutes % (24 * 60) < 7 {
            put(&fs, directory, &format!("day {}", minutes / (24 * 60)), "a day").await;
        }
        written.insert(minutes, text);
    }
    scene.at(weeks * 7 * 24 * 60 + 30).await;
    let states = list(&fs, ".atoll/history").await.expect("lists");
    // 24 hours, 6 other midnights, 3 other weeks, of which the newest is today.
    assert_eq!(states.len(), 24 + 6 + 3, "{states:?}");
    for fs in [&fs, &scene.reader().await] {
        for state in &states {
            let time = humantime::parse_rfc3339(&state.replace("Z", ":00Z")).expect("a time");
            let unix_ms = time.duration_since(std::time::UNIX_EPOCH).expect("after 1970");
            let minutes = (unix_ms.as_millis() as u64 - START) / MINUTE;
            let (_, text) = written.range(..minutes).next_back().expect("it was there");
            assert_eq!(then(fs, minutes, "d/f").await.as_ref(), Ok(text), "{state}");
            let names = names_then(fs, minutes, "d").await;
            let days = minutes.div_ceil(24 * 60) as usize;
            assert_eq!(names.len(), 1 + days, "{state}: {names:?}");
        }
    }
    // A mount that remembers nothing shows the same, and the table does not grow.
    fs = scene.mount(2).await;
    let newest = written.last_key_value().expect("some").1;
    assert_eq!(then(&fs, weeks * 7 * 24 * 60, "d/f").await.as_ref(), Ok(newest));
    // Of another time the newest version that is kept: the one that was there at the full hour before.
    let noon = (weeks * 7 - 1) * 24 * 60 + 12 * 60;
    let (_, text) = written.range(..noon).next_back().expect("some");
    assert_eq!(then(&fs, noon + 30, "d/f").await.as_ref(), Ok(text));
    for not_kept in [0, (weeks * 7 + 1) * 24 * 60] {
        assert_eq!(then(&fs, not_kept, "d/f").await, Err(Errno::ENOENT), "{not_kept}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_write_within_the_hour_puts_not_one_block_more() {
    let scene = Scene::new("24h/7d/4w", false).await;
    let fs = scene.mount(1).await;
    let long = "x".repeat(200_000);
    put(&fs, ROOT, "small", "1").await;
    put(&fs, ROOT, "long", &long).await;
    scene.puts();
    for minutes in [10, 59] {
        scene.at(minutes).await;
        put(&fs, ROOT, "small", &format!("{minutes}")).await;
        assert_eq!(scene.puts(), (0, 0), "it lies in its inode");
        put(&fs, ROOT, "long", &format!("{minutes}{long}")).await;
        assert_eq!(scene.puts(), (0, 3), "its data, of which two pieces are the same");
    }
    // One block once an hour.
    for (minutes, more) in [(60, 1), (61, 0), (119, 0), (121, 1)] {
        scene.at(minutes).await;
        put(&fs, ROOT, "small", &format!("{minutes}")).await;
        assert_eq!(scene.puts(), (more, 0), "{minutes}");
    }
    // Without a policy never.
    let scene = Scene::new("none", false).await;
    let fs = scene.mount(1).await;
    for days in 0..4 {
        scene.at(days * 24 * 60).await;
        put(&fs, ROOT, "small", "1").await;
    }
    assert_eq!(scene.puts(), (0, 0));
    assert!(list(&fs, ".atoll/history").await.expect("lists").is_empty());
}

#[tokio::test(start_paused = true)]
async fn what_was_removed_is_in_the_states_before_and_what_has_its_name_now_is_not() {
    for is_encrypted in [false, true] {
        let scene = Scene::new("24h/7d/4w", is_encrypted).await;
        let fs = scene.mount(1).await;
        let directory = mkdir(&fs, "d").await;
        scene.at(30).await;
        put(&fs, directory, "f", "first").await;
        put(&fs, directory, "short", "it lives for some minutes").await;
        scene.at(40).await;
        fs.unlink(me(), directory, b"short").await.expect("is removed");
        fs.sync().await.expect("is on the ring");
        scene.at(70).await;
        fs.unlink(me(), directory, b"f").await.expect("is removed");
        fs.sync().await.expect("is on the ring");
        scene.at(130).await;
        put(&fs, directory, "f", "second").await;
        scene.at(200).await;
        fs.unlink(me(), directory, b"f").await.expect("is removed");
        fs.sync().await.expect("is on the ring");
        fs.rmdir(me(), ROOT, b"d").await.expect("is removed");
        scene.at(250).await;
        for fs in [&fs, &scene.mount(2).await] {
            assert_eq!(names_then(fs, 60, "").await, ["d"], "encrypted: {is_encrypted}");
            assert_eq!(names_then(fs, 60, "d").await, ["f"]);
            assert_eq!(then(fs, 60, "d/f").await.as_deref(), Ok("first"));
            assert_eq!(names_then(fs, 120, "d").await, [""; 0]);
            assert_eq!(then(fs, 180, "d/f").await.as_deref(), Ok("second"));
            assert_eq!(names_then(fs, 240, "").await, [""; 0]);
            assert_eq!(then(fs, 240, "d").await, Err(Errno::ENOENT));
        }
    }
}

/// The tombstone of what was never kept is as short as before.
#[tokio::test(start_paused = true)]
async fn a_file_that_lived_for_less_than_an_hour_leaves_nothing() {
    let scene = Scene::new("24h/7d/4w", false).await;
    let fs = scene.mount(1).await;
    scene.at(10).await;
    put(&fs, ROOT, "f", "text").await;
    scene.at(50).await;
    scene.puts();
    fs.unlink(me(), ROOT, b"f").await.expect("is removed");
    fs.sync().await.expect("is on the ring");
    assert_eq!(scene.puts(), (0, 0));
    put(&fs, ROOT, "g", "text").await;
    scene.at(70).await;
    fs.unlink(me(), ROOT, b"g").await.expect("is removed");
    fs.sync().await.expect("is on the ring");
    // The root's and the file's.
    assert_eq!(scene.puts(), (2, 0));
}

/// A name is removed in memory first, and a state showed its directory only when the ring had that.
#[tokio::test(start_paused = true)]
async fn a_state_is_shown_while_what_has_changed_since_is_on_its_way() {
    let scene = Scene::new("24h", false).await;
    let fs = scene.mount(1).await;
    let directory = mkdir(&fs, "d").await;
    put(&fs, directory, "f", "first").await;
    put(&fs, directory, "g", "gone").await;
    scene.at(70).await;
    scene.noted.is_slow.store(true, Ordering::Relaxed);
    fs.unlink(me(), directory, b"g").await.expect("removes");
    for _ in 0..2 {
        assert_eq!(names_then(&fs, 60, "d").await, ["f", "g"]);
        assert_eq!(then(&fs, 60, "d/g").await.as_deref(), Ok("gone"));
        tokio::time::sleep(Duration::from_secs(60)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn names_are_those_of_their_time() {
    let scene = Scene::new("24h/7d/4w", false).await;
    let (fs, other) = (scene.mount(1).await, scene.mount(2).await);
    let directory = mkdir(&fs, "d").await;
    put(&fs, ROOT, "a", "text").await;
    fs.symlink(me(), directory, b"link", b"../a").await.expect("is made");
    scene.at(70).await;
    let rename = RenameFlags::default();
    fs.rename(me(), ROOT, b"a", directory, b"b", rename).await.expect("is renamed");
    let inode = walk(&fs, "d/b").await.expect("there");
    let mode = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    other.lookup(me(), ROOT, b"d").await.expect("there");
    let same = walk(&other, "d/b").await.expect("there");
    other.setattr(me(), same, None, mode).await.expect("is changed");
    scene.at(130).await;
    fs.rename(me(), ROOT, b"d", ROOT, b"e", rename).await.expect("is renamed");
    fs.setxattr(me(), inode, b"user.x", "1".into(), XattrFlags::default()).await.expect("is set");
    scene.at(190).await;
    assert_eq!(names_then(&fs, 60, "").await, ["a", "d"]);
    assert_eq!(names_then(&fs, 60, "d").await, ["link"]);
    assert_eq!(then(&fs, 60, "a").await.as_deref(), Ok("text"));
    assert_eq!(names_then(&fs, 120, "").await, ["d"]);
    assert_eq!(names_then(&fs, 120, "d").await, ["b", "link"]);
    assert_eq!(names_then(&fs, 180, "").await, ["e"]);
    assert_eq!(then(&fs, 180, "e/b").await.as_deref(), Ok("text"));
    let state = |minutes, path: &str| format!(".atoll/history/{}/{path}", name(minutes));
    for (minutes, path, mode, xattrs) in
        [(60, "a", 0o644, 0), (120, "d/b", 0o600, 0), (180, "e/b", 0o600, 1)]
    {
        let inode = walk(&fs, &state(minutes, path)).await.expect("there");
        let attr = fs.getattr(inode, None).await.expect("there").attr;
        assert_eq!((attr.mode, attr.size_bytes, attr.kind), (mode, 4, FileKind::Regular), "{path}");
        assert_eq!(fs.listxattr(inode).await.expect("lists").len(), xattrs, "{path}");
    }
    let link = walk(&fs, &state(120, "d/link")).await.expect("there");
    assert_eq!(fs.readlink(link).await.as_deref(), Ok(&b"../a"[..]));
    let above = fs.parent(me(), link).await.expect("a directory").attr.inode;
    assert_eq!(above, walk(&fs, &state(120, "d")).await.expect("there"));
}

/// Some leaves are not on the ring yet when the next change replaces them.
#[tokio::test(start_paused = true)]
async fn large_directories_keep_their_leaves() {
    let scene = Scene::new("24h", false).await;
    let fs = scene.mount(1).await;
    let directory = mkdir(&fs, "d").await;
    for n in 0..400 {
        let name = format!("{n:03} {}", "x".repeat(60));
        let made = fs.mknod(me(), directory, name.as_bytes(), FileKind::Regular, 0o644, 0).await;
        fs.forget(made.expect("is made").attr.inode, 1);
    }
    let remove = async |n: u64| {
        let name = format!("{n:03} {}", "x".repeat(60));
        fs.unlink(me(), directory, name.as_bytes()).await.expect("is removed");
    };
    for hour in 1..4 {
        // Names go behind: those of the last minute are not on the ring at the full hour.
        scene.at(hour * 60 - 1).await;
        for n in 0..20 {
            remove(hour * 60 + n).await;
        }
        scene.at(hour * 60 + 1).await;
        for n in 20..40 {
            remove(hour * 60 + n).await;
        }
        fs.sync().await.expect("is on the ring");
    }
    scene.at(4 * 60).await;
    for fs in [&fs, &scene.mount(2).await] {
        for hour in 1..4 {
            let names = names_then(fs, hour * 60, "d").await;
            assert_eq!(names.len() as u64, 400 - (hour - 1) * 40 - 20, "{hour}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn both_of_two_who_write_at_the_same_time_are_in_the_states_after() {
    for is_encrypted in [false, true] {
        let scene = Scene::new("24h", is_encrypted).await;
        let (one, two) = (scene.mount(1).await, scene.mount(2).await);
        put(&one, ROOT, "f", "before").await;
        for hour in 1..5 {
            scene.at(hour * 60 + 10).await;
            join(
                put(&one, ROOT, &format!("one {hour}"), "1"),
                put(&two, ROOT, &format!("two {hour}"), "2"),
            )
            .await;
            scene.at(hour * 60 + 20).await;
            put(if hour % 2 == 0 { &one } else { &two }, ROOT, "f", &format!("{hour}")).await;
        }
        scene.at(5 * 60 + 30).await;
        for fs in [&one, &two, &scene.mount(3).await] {
            for hour in 1..=5 {
                let names = names_then(fs, hour * 60, "").await;
                assert_eq!(names.len() as u64, 1 + 2 * (hour - 1), "{hour}: {names:?}");
                let text = if hour == 1 { "before".to_owned() } else { format!("{}", hour - 1) };
                assert_eq!(then(fs, hour * 60, "f").await, Ok(text), "{hour}");
            }
        }
    }
}

/// All inodes are written anew when a member is shut out, which is no version of its own.
#[tokio::test(start_paused = true)]
async fn the_states_before_a_rebinding_stay() {
    for is_encrypted in [false, true] {
        let scene = Scene::new("24h", is_encrypted).await;
        let fs = scene.mount(1).await;
        let directory = mkdir(&fs, "d").await;
        put(&fs, directory, "f", "0").await;
        scene.at(61).await;
        put(&fs, directory, "f", "1").await;
        scene.at(130).await;
        shut_out(&scene.env(), &scene.blocks(), 9).await;
        scene.at(190).await;
        let fs = scene.mount(2).await;
        for (minutes, text) in [(60, "0"), (120, "1"), (180, "1")] {
            assert_eq!(then(&fs, minutes, "d/f").await.as_deref(), Ok(text), "{minutes}");
        }
    }
}

/// The story: after `atoll revoke --now` the owner had written everything.
#[tokio::test(start_paused = true)]
async fn the_log_says_who_has_written_what_was_signed_anew() {
    for is_encrypted in [false, true] {
        let scene = Scene::new("60m/144t/24h/7d/4w", is_encrypted).await;
        let fs = scene.mount(2).await;
        let directory = mkdir(&fs, "d").await;
        put(&fs, directory, "f", "1").await;
        scene.at(61).await;
        let put_by = async |n, text| {
            let fs = scene.mount(n).await;
            let directory = walk(&fs, "d").await.expect("there");
            put(&fs, directory, "f", text).await;
        };
        put_by(3, "12").await;
        scene.at(130).await;
        let log = async || {
            let fs = scene.mount(4).await;
            let mut logs = Vec::new();
            for path in ["d/f", "d", ""] {
                let inode = walk(&fs, path).await.expect("there");
                let text = fs.getxattr(inode, b"user.atoll.log").await.expect("a log");
                logs.push(String::from_utf8(text.to_vec()).expect("text"));
            }
            logs
        };
        let before = log().await;
        let key =
            |n| user(n).user_id().0.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        assert!(before[0].contains(&key(3)) && before[1].contains(&key(2)), "{before:?}");
        for whom in [9, 8] {
            shut_out(&scene.env(), &scene.blocks(), whom).await;
            assert_eq!(log().await, before);
            scene.at(130 + u64::from(whom)).await;
        }
        // The next version is its writer's.
        put_by(5, "123").await;
        let after = log().await;
        assert!(
            after[0].starts_with("present")
                && after[0].lines().next().is_some_and(|line| line.contains(&key(5)))
        );
        assert_eq!(after[0].lines().count(), before[0].lines().count() + 1);
        let past = |log: &str| log.lines().find(|line| line.contains(&key(3))).map(str::to_owned);
        let (was, is) = (past(&before[0]).expect("there"), past(&after[0]).expect("there"));
        assert_eq!(was.split('\t').nth(1), is.split('\t').nth(1), "when it was written");
    }
}

/// Keeping what was is not worth an error to those who write now.
#[tokio::test(start_paused = true)]
async fn a_write_succeeds_though_the_past_cannot_be_read() {
    let scene = Scene::new("24h", false).await;
    put(&scene.mount(1).await, ROOT, "f", "0").await;
    for hour in 1..4 {
        scene.at(hour * 60 + 1).await;
        scene.noted.shows_no_past.store(hour == 2, Ordering::Relaxed);
        // It has nothing in memory.
        put(&scene.mount(1).await, ROOT, "f", &format!("{hour}")).await;
    }
    scene.at(4 * 60 + 1).await;
    let fs = scene.mount(1).await;
    assert_eq!(then(&fs, 60, "f").await.as_deref(), Ok("0"));
    assert_eq!(then(&fs, 120, "f").await.as_deref(), Ok("0"), "that one could not be kept");
    assert_eq!(then(&fs, 180, "f").await.as_deref(), Ok("2"));
    assert_eq!(then(&fs, 240, "f").await.as_deref(), Ok("3"));
    // A block that the ring has lost.
    let lost = scene.noted.put.lock().expect("one thread").clone();
    for block in lost.iter().filter(|block| is_past(block)) {
        assert!(scene.noted.memory.lose_block(&content_id(block)));
    }
    scene.at(5 * 60 + 1).await;
    let fs = scene.mount(1).await;
    put(&fs, ROOT, "f", "5").await;
    scene.at(6 * 60).await;
    assert_eq!(then(&fs, 300, "f").await.as_deref(), Ok("3"));
}

/// It is named in the directory of that time, so it is listed: a copy of the state fails, and is not
/// incomplete without a word.
#[tokio::test(start_paused = true)]
async fn a_file_that_is_lost_is_listed_and_cannot_be_read() {
    let scene = Scene::new("24h", false).await;
    let fs = scene.mount(1).await;
    let directory = mkdir(&fs, "d").await;
    put(&fs, directory, "f", "0").await;
    put(&fs, directory, "g", "g").await;
    scene.at(61).await;
    scene.puts();
    put(&fs, directory, "f", "1").await;
    let blocks = scene.noted.put.lock().expect("one thread").clone();
    assert_eq!(blocks.len(), 1);
    assert!(scene.noted.memory.lose_block(&content_id(&blocks[0])));
    let fs = scene.mount(2).await;
    assert_eq!(names_then(&fs, 60, "d").await, ["f", "g"]);
    assert_eq!(then(&fs, 60, "d/f").await, Err(Errno::EIO));
    assert_eq!(then(&fs, 60, "d/g").await.as_deref(), Ok("g"));
}

#[tokio::test(start_paused = true)]
async fn the_past_is_found_by_its_name_and_nothing_changes_it() {
    let scene = Scene::new("24h", false).await;
    let fs = scene.mount(1).await;
    put(&fs, ROOT, "f", "text").await;
    scene.at(61).await;
    put(&fs, ROOT, "g", "text").await;
    assert_eq!(list(&fs, "").await.expect("lists").into_iter().collect::<Vec<_>>(), ["f", "g"]);
    assert_eq!(
        list(&fs, ".atoll").await.expect("lists").into_iter().collect::<Vec<_>>(),
        ["history"]
    );
    let top = walk(&fs, ".atoll").await.expect("there");
    let attr = fs.getattr(top, None).await.expect("there").attr;
    assert_eq!((attr.kind, attr.mode), (FileKind::Directory, 0o555));
    let state = format!(".atoll/history/{}", name(60));
    let (then, file) = (walk(&fs, &state).await, walk(&fs, &format!("{state}/f")).await);
    let (then, file) = (then.expect("there"), file.expect("there"));
    // Nobody makes, moves or removes the name.
    let (flags, name, rename) = (OpenFlags::READ_WRITE, b".atoll", RenameFlags::default());
    let exists = Some(Errno::EEXIST);
    assert_eq!(fs.create(me(), ROOT, name, 0o644, flags).await.err(), exists);
    assert_eq!(fs.mkdir(me(), ROOT, name, 0o755).await.err(), exists);
    assert_eq!(fs.symlink(me(), ROOT, name, b"f").await.err(), exists);
    assert_eq!(fs.mknod(me(), ROOT, name, FileKind::Fifo, 0o644, 0).await.err(), exists);
    let live = walk(&fs, "f").await.expect("there");
    assert_eq!(fs.link(me(), live, ROOT, name).await.err(), exists);
    assert_eq!(fs.rmdir(me(), ROOT, name).await, Err(Errno::EPERM));
    assert_eq!(fs.unlink(me(), ROOT, name).await, Err(Errno::EPERM));
    assert_eq!(fs.rename(me(), ROOT, name, ROOT, b"x", rename).await, Err(Errno::EPERM));
    assert_eq!(fs.rename(me(), ROOT, b"f", ROOT, name, rename).await, Err(Errno::EPERM));
    // Below another directory it is a name as any other.
    let directory = mkdir(&fs, "d").await;
    put(&fs, directory, ".atoll", "mine").await;
    assert_eq!(read(&fs, "d/.atoll").await.as_deref(), Ok("mine"));
    // Nothing below it can be changed.
    let read_only = Err(Errno::EROFS);
    assert_eq!(fs.open(me(), file, flags).await.map(drop), read_only);
    assert_eq!(fs.create(me(), then, b"x", 0o644, flags).await.map(drop), read_only);
    assert_eq!(fs.mkdir(me(), then, b"x", 0o755).await.map(drop), read_only);
    assert_eq!(fs.unlink(me(), then, b"f").await, read_only);
    assert_eq!(fs.rename(me(), then, b"f", ROOT, b"x", rename).await, read_only);
    assert_eq!(fs.rename(me(), ROOT, b"f", then, b"x", rename).await, read_only);
    assert_eq!(fs.link(me(), file, ROOT, b"x").await.map(drop), read_only);
    assert_eq!(fs.setattr(me(), file, None, SetAttr::default()).await.map(drop), read_only);
    let flags = XattrFlags::default();
    assert_eq!(fs.setxattr(me(), file, b"user.x", "1".into(), flags).await, read_only);
    assert_eq!(
        fs.write(Writer::At(me()), file, Handle(1), 0, "x".into()).await.map(drop),
        read_only
    );
    // What the kernel forgets is forgotten.
    fs.forget(file, 100);
    assert_eq!(fs.getattr(file, None).await.map(drop), Err(Errno::ESTALE));
}

#[tokio::test(start_paused = true)]
async fn a_state_is_a_file_system_of_its_own() {
    let scene = Scene::new("24h", false).await;
    let fs = scene.mount(1).await;
    let directory = mkdir(&fs, "d").await;
    put(&fs, directory, "f", "then").await;
    scene.at(61).await;
    put(&fs, directory, "f", "now").await;
    put(&fs, directory, "g", "now").await;
    let then: PastFs = fs.at(START + HOUR).await.expect("reads").expect("is kept");
    assert_eq!(read(&then, "d/f").await.as_deref(), Ok("then"));
    assert_eq!(list(&then, "d").await.expect("lists").len(), 1);
    assert_eq!(walk(&then, ".atoll").await, Err(Errno::ENOENT));
    assert!(then.statfs(ROOT).await.is_ok());
    assert_eq!(then.getxattr(ROOT, b"user.atoll.status").await.as_deref(), Ok(&b"ok"[..]));
    assert!(fs.at(START + 2 * HOUR).await.expect("reads").is_none(), "it has not come");
    assert!(fs.at(START - HOUR).await.expect("reads").is_none(), "it was not made");
    assert_eq!(fs.states(), BTreeSet::from([START, START + HOUR]));
}

/// On a whole ring, with clocks of its own: a tombstone comes from replicas.
#[test]
fn a_ring_shows_what_was_removed_an_hour_ago() {
    let config = SimConfig { seed: 9300, jitter: 0.3, ..SimConfig::default() };
    let all = Mounts::with(config, 5, 2, Consistency::CloseToOpen);
    let [one, two] = [&all.mounts[0], &all.mounts[1]];
    let long = "x".repeat(50_000);
    all.run(async {
        put(one, ROOT, "short", "text").await;
        put(one, ROOT, "long", &long).await;
    });
    all.ring.sim.run_for(Duration::from_secs(3600));
    let state = one.states().last().copied().expect("an hour has ended");
    all.run(async {
        let rename = RenameFlags::default();
        two.rename(me(), ROOT, b"long", ROOT, b"other", rename).await.expect("is renamed");
        two.unlink(me(), ROOT, b"short").await.expect("is removed");
        two.unlink(me(), ROOT, b"other").await.expect("is removed");
        two.sync().await.expect("is on the ring");
    });
    all.ring.sim.run_for(Duration::from_secs(60));
    for fs in [one, two] {
        let time = std::time::UNIX_EPOCH + Duration::from_millis(state);
        let name = humantime::format_rfc3339_seconds(time).to_string().replace(":00Z", "Z");
        let path = |name_: &str| format!(".atoll/history/{name}/{name_}");
        assert_eq!(all.run(read(fs, &path("short"))).as_deref(), Ok("text"));
        assert_eq!(all.run(read(fs, &path("long"))).as_deref(), Ok(&long[..]));
        assert_eq!(all.run(list(fs, "")).expect("lists").len(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn the_log_says_what_was_written_when_and_by_whom() {
    let scene = Scene::new("24h", false).await;
    let (one, two) = (scene.mount(1).await, scene.mount(2).await);
    put(&one, ROOT, "f", "1").await;
    scene.at(61).await;
    put(&two, ROOT, "f", "12").await;
    scene.at(130).await;
    put(&one, ROOT, "f", "123").await;
    let log = async |path: &str| {
        let inode = walk(&two, path).await.expect("there");
        let text = two.getxattr(inode, b"user.atoll.log").await.expect("a log");
        let text = String::from_utf8(text.to_vec()).expect("text");
        text.lines().map(str::to_owned).collect::<Vec<String>>()
    };
    let key = |n| user(n).user_id().0.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let line = |what: &str, minutes: u64, n: u8, rest: &str| {
        format!("{what}\t{}\t{}\t{rest}", START + minutes * MINUTE, key(n))
    };
    let (first, second) = (name(60), name(120));
    let expected = [
        line("present", 130, 1, "-\tfile\t3\t1"),
        line("past", 61, 2, &format!("{second}\tfile\t2\t")),
        line("past", 0, 1, &format!("{first}\tfile\t1\t1")),
    ];
    assert_eq!(log("f").await, expected);
    // Of what was removed, through a state that has it.
    scene.at(140).await;
    one.unlink(me(), ROOT, b"f").await.expect("is removed");
    one.sync().await.expect("is on the ring");
    let removed = log(&format!(".atoll/history/{second}/f")).await;
    assert_eq!(removed, [&[line("removed", 140, 1, "-\t-\t-\t1")][..], &expected[1..]].concat());
    assert_eq!(log("").await.len(), 2, "the root is a directory as others");
}

/// The lines of the log of a name, without who wrote them: what, seconds since the beginning, state, kind, size.
async fn log_of(fs: &SharedFs, parent: InodeNumber, name: &str) -> Vec<String> {
    let xattr = format!("user.atoll.log.{name}");
    let text = fs.getxattr(parent, xattr.as_bytes()).await.expect("a log");
    let text = String::from_utf8(text.to_vec()).expect("text");
    let line = |line: &str| {
        let fields: Vec<&str> = line.split('\t').collect();
        let [what, unix_ms, _, state, kind, size, _] = fields[..] else { panic!("{line}") };
        let secs = (unix_ms.parse::<u64>().expect("a time") - START) as f64 / 1000.0;
        format!("{what} {secs} {state} {kind} {size}")
    };
    text.lines().map(line).collect()
}

async fn rename(fs: &SharedFs, from: &str, to: &str) {
    let flags = RenameFlags::default();
    fs.rename(me(), ROOT, from.as_bytes(), ROOT, to.as_bytes(), flags).await.expect("renames");
}

const FIRST_DAY: &str = "2026-11-16T";

/// Nothing was kept of the newest hour: a file that was overwritten or removed within its first could not be had
/// back.
#[tokio::test(start_paused = true)]
async fn what_was_overwritten_or_removed_within_its_first_minute_can_be_had_back() {
    for is_encrypted in [false, true] {
        let scene = Scene::new("60m/144t/24h/7d/4w", is_encrypted).await;
        let fs = scene.mount(1).await;
        scene.at_ms(1000);
        put(&fs, ROOT, "f", "one").await;
        scene.at_ms(2000);
        put(&fs, ROOT, "f", "second").await;
        scene.at_ms(3500);
        fs.unlink(me(), ROOT, b"f").await.expect("is removed");
        fs.sync().await.expect("is on the ring");
        scene.at_ms(3600);
        for fs in [&fs, &scene.mount(2).await] {
            assert_eq!(walk(fs, "f").await, Err(Errno::ENOENT));
            let log = log_of(fs, ROOT, "f").await;
            let expected = [
                "removed 3.5 - - -".to_owned(),
                format!("past 2 {FIRST_DAY}00:00:03.500Z file 6"),
                format!("past 1 {FIRST_DAY}00:00:02.000Z file 3"),
            ];
            assert_eq!(log, expected, "encrypted: {is_encrypted}");
            for (time, text) in [("02.000", "one"), ("03.500", "second")] {
                let path = format!(".atoll/history/{FIRST_DAY}00:00:{time}Z/f");
                assert_eq!(read(fs, &path).await.as_deref(), Ok(text));
            }
        }
        // An hour later they are gone.
        scene.at(70).await;
        assert_eq!(log_of(&fs, ROOT, "f").await, [""; 0]);
    }
}

/// Editors save a file by giving a new one its name; some keep the former one under another name, or remove it first.
#[tokio::test(start_paused = true)]
async fn the_log_of_a_name_has_what_a_file_was_before_another_one_was_renamed_to_it() {
    let scene = Scene::new("60m/144t/24h/7d/4w", false).await;
    let fs = scene.mount(1).await;
    scene.at_ms(1000);
    put(&fs, ROOT, "f", "1").await;
    // A new file with its name.
    scene.at_ms(2000);
    put(&fs, ROOT, ".f.new", "22").await;
    scene.at_ms(3000);
    rename(&fs, ".f.new", "f").await;
    fs.sync().await.expect("is on the ring");
    // The former one moves aside.
    scene.at_ms(130_000);
    rename(&fs, "f", "f~").await;
    scene.at_ms(131_000);
    put(&fs, ROOT, "f", "333").await;
    // It is removed first.
    scene.at_ms(300_000);
    fs.unlink(me(), ROOT, b"f").await.expect("is removed");
    fs.sync().await.expect("is on the ring");
    scene.at_ms(301_000);
    put(&fs, ROOT, "f", "4444").await;
    scene.at_ms(302_000);
    for fs in [&fs, &scene.mount(2).await] {
        let log = log_of(fs, ROOT, "f").await;
        let states: Vec<(&str, &str)> = log
            .iter()
            .map(|line| {
                let fields: Vec<&str> = line.split(' ').collect();
                (fields[2], fields[4])
            })
            .collect();
        let states: Vec<_> = states.into_iter().collect();
        let [now, third, second @ .., first] = &states[..] else { panic!("{log:?}") };
        assert_eq!(*now, ("-", "4"), "{log:?}");
        assert!(second.iter().all(|(_, size)| *size == "2") && !second.is_empty(), "{log:?}");
        for ((state, _), text) in [(third, "333"), (&second[0], "22"), (first, "1")] {
            let path = format!(".atoll/history/{state}/f");
            assert_eq!(read(fs, &path).await.as_deref(), Ok(text), "{path}: {log:?}");
        }
        // Where the former one is now, it is the present.
        let aside = log_of(fs, ROOT, "f~").await;
        assert!(aside[0].starts_with("present") && aside[0].ends_with("file 2"), "{aside:?}");
        assert_eq!(log_of(fs, ROOT, "never").await, [""; 0]);
    }
}

/// A removed directory has the log of what was in it.
#[tokio::test(start_paused = true)]
async fn what_was_in_a_removed_directory_is_found_through_a_state() {
    let scene = Scene::new("60m/144t/24h/7d/4w", false).await;
    let fs = scene.mount(1).await;
    let directory = mkdir(&fs, "d").await;
    scene.at_ms(1000);
    put(&fs, directory, "f", "text").await;
    scene.at_ms(2000);
    fs.unlink(me(), directory, b"f").await.expect("is removed");
    fs.sync().await.expect("is on the ring");
    scene.at_ms(3000);
    fs.rmdir(me(), ROOT, b"d").await.expect("is removed");
    fs.sync().await.expect("is on the ring");
    scene.at_ms(4000);
    let other = scene.mount(2).await;
    let log = log_of(&other, ROOT, "d").await;
    let state = log[1].split(' ').nth(2).expect("a state").to_owned();
    let then = walk(&other, &format!(".atoll/history/{state}/d")).await.expect("is there");
    let log = log_of(&other, then, "f").await;
    assert_eq!(log.len(), 2, "{log:?}");
    let state = log[1].split(' ').nth(2).expect("a state").to_owned();
    let path = format!(".atoll/history/{state}/d/f");
    assert_eq!(read(&other, &path).await.as_deref(), Ok("text"), "{log:?}");
}

/// Making files, first contents and changed attributes cost no block more: nothing is lost by them.
#[tokio::test(start_paused = true)]
async fn what_loses_nothing_keeps_nothing_within_a_minute() {
    let scene = Scene::new("60m/144t/24h/7d/4w", false).await;
    let fs = scene.mount(1).await;
    scene.puts();
    for number in 0..20 {
        put(&fs, ROOT, &format!("f{number}"), "").await;
        put(&fs, ROOT, &format!("f{number}"), "text").await;
    }
    let file = walk(&fs, "f1").await.expect("is there");
    let mode = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    fs.setattr(me(), file, None, mode).await.expect("changes");
    assert_eq!(scene.puts(), (0, 0));
    // Overwritten, removed with its directory's name, renamed away.
    scene.at_ms(1000);
    put(&fs, ROOT, "f1", "other").await;
    assert_eq!(scene.puts(), (1, 0));
    scene.at_ms(2000);
    fs.unlink(me(), ROOT, b"f2").await.expect("is removed");
    fs.sync().await.expect("is on the ring");
    assert_eq!(scene.puts(), (2, 0));
    scene.at_ms(3000);
    rename(&fs, "f3", "g").await;
    assert_eq!(scene.puts(), (1, 0));
}

/// A program that writes a file every two seconds for an hour, in place and by renaming another one.
#[tokio::test(start_paused = true)]
async fn a_file_that_is_written_all_the_time_costs_one_block_a_minute() {
    for by_rename in [false, true] {
        let mut costs = Vec::new();
        for keep in ["24h/7d/4w", "60m/144t/24h/7d/4w"] {
            let scene = Scene::new(keep, false).await;
            let fs = scene.mount(1).await;
            put(&fs, ROOT, "f", "0").await;
            scene.puts();
            for secs in (1..3600).step_by(2) {
                scene.at_ms(secs * 1000);
                match by_rename {
                    false => put(&fs, ROOT, "f", &format!("{secs}")).await,
                    true => {
                        put(&fs, ROOT, "f.new", &format!("{secs}")).await;
                        rename(&fs, "f.new", "f").await;
                        fs.sync().await.expect("is on the ring");
                    }
                }
            }
            let put = std::mem::take(&mut *scene.noted.put.lock().expect("one thread"));
            let past: Vec<_> = put.iter().filter(|block| is_past(block)).collect();
            let bytes: usize = past.iter().map(|block| block.len()).sum();
            println!("by rename: {by_rename}, {keep}: {} blocks, {bytes} bytes", past.len());
            costs.push(past.len());
        }
        // Of the file, or of the directory and of the file that is replaced.
        let (most, each) = (if by_rename { 3 } else { 1 }, MAX_WITHIN_A_MINUTE + 59);
        assert_eq!(costs[0], 0, "by rename: {by_rename}");
        assert!((60..=most * each).contains(&costs[1]), "by rename: {by_rename}: {costs:?}");
    }
}
