//! Blocks that were replaced are released, and none that a live version or an open file needs is lost.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use atoll_dht::{Blocks, DhtConfig, MemoryBlocks};
use atoll_env::Env;
use atoll_key::{BlockId, KeyRange};
use atoll_sim::{HostId, SimConfig};
use atoll_vfs::{Caller, Errno, FileKind, FileSystem, Handle, InodeNumber, OpenFlags, Writer};
use atoll_volume::keep::Keep;
use atoll_volume::shared::access::{groups, read_volume};
use atoll_volume::shared::sealing::Sealing;
use atoll_volume::shared::{SharedFs, SharedOptions, upkeep};
use bytes::Bytes;

use super::mounts::{created, created_keeping, env, mounted, mounted_with, volume};
use crate::simulated_ring::Ring;

const ROOT: InodeNumber = InodeNumber::ROOT;
const RW: OpenFlags = OpenFlags::READ_WRITE;
const TRUNCATING: OpenFlags = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::TRUNCATE);
const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);
/// Longer than any call takes: calls have deadlines.
const LONG: Duration = Duration::from_secs(1800);

fn me() -> Caller {
    Caller::default()
}

fn bytes(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..len).map(|_| next()).collect()
}

type Opened = (InodeNumber, Handle);

async fn open(fs: &SharedFs, name: &str, flags: OpenFlags) -> Result<Opened, Errno> {
    let number = fs.lookup(me(), ROOT, name.as_bytes()).await?.attr.inode;
    Ok((number, fs.open(me(), number, flags).await?.handle))
}

async fn create(fs: &SharedFs, name: &str) -> Result<Opened, Errno> {
    let made = fs.create(me(), ROOT, name.as_bytes(), 0o644, RW).await?;
    Ok((made.0.attr.inode, made.1.handle))
}

async fn write(fs: &SharedFs, (number, handle): Opened, at: u64, data: &[u8]) -> Result<(), Errno> {
    let data = Bytes::copy_from_slice(data);
    fs.write(Writer::At(me()), number, handle, at, data).await.map(drop)
}

async fn close(fs: &SharedFs, (number, handle): Opened) -> Result<(), Errno> {
    let flushed = fs.flush(number, handle).await;
    fs.close(number, handle).await.expect("it was open");
    flushed
}

async fn read(fs: &SharedFs, (number, handle): Opened) -> Result<Vec<u8>, Errno> {
    let mut all = Vec::new();
    loop {
        let more = fs.read(number, handle, all.len() as u64, 1 << 20).await?;
        if more.is_empty() {
            return Ok(all);
        }
        all.extend_from_slice(&more);
    }
}

async fn put(fs: &SharedFs, name: &str, data: &[u8]) -> Result<(), Errno> {
    let file = create(fs, name).await?;
    let written = write(fs, file, 0, data).await;
    close(fs, file).await.and(written)
}

async fn rewrite(fs: &SharedFs, name: &str, data: &[u8]) -> Result<(), Errno> {
    let file = open(fs, name, TRUNCATING).await?;
    let written = write(fs, file, 0, data).await;
    close(fs, file).await.and(written)
}

async fn content(fs: &SharedFs, name: &str) -> Result<Vec<u8>, Errno> {
    let file = open(fs, name, OpenFlags::READ).await?;
    let all = read(fs, file).await;
    fs.close(file.0, file.1).await.expect("it is open");
    all
}

async fn memory(is_encrypted: bool) -> (MemoryBlocks, Arc<dyn Blocks>) {
    let memory = MemoryBlocks::new();
    let blocks: Arc<dyn Blocks> = Arc::new(memory.clone());
    // Blocks of versions within a minute are not what these tests count.
    let keep = "24h/7d/4w".parse().expect("a policy");
    created_keeping(&env(), &blocks, is_encrypted, keep).await;
    (memory, blocks)
}

/// Longer than a mount waits with releases.
async fn pass_a_period() {
    tokio::time::sleep(Duration::from_secs(150)).await;
}

#[tokio::test(start_paused = true)]
async fn a_file_that_is_rewritten_a_thousand_times_takes_the_room_of_one_version() {
    for is_encrypted in [false, true] {
        let (memory, blocks) = memory(is_encrypted).await;
        let one = mounted(&env(), &blocks, 1).await;
        put(&one, "file", &bytes(200_000, 0)).await.expect("written");
        let before = memory.len();
        for version in 1..=1000 {
            rewrite(&one, "file", &bytes(200_000, version)).await.expect("written");
        }
        let after = memory.len();
        assert!(after >= before + 4000, "{before} blocks, {after} blocks");
        pass_a_period().await;
        assert_eq!(memory.released().len(), after - before);
        memory.lose_released();
        assert_eq!(memory.len(), before);
        let two = mounted(&env(), &blocks, 2).await;
        assert_eq!(content(&two, "file").await, Ok(bytes(200_000, 1000)));
    }
}

/// The file that keeps what a writer had not read shares blocks with what he has replaced: those were released.
#[tokio::test(start_paused = true)]
async fn contents_that_are_kept_beside_others_lose_none_of_their_blocks() {
    let (memory, blocks) = memory(false).await;
    let [one, two] = [mounted(&env(), &blocks, 1).await, mounted(&env(), &blocks, 2).await];
    put(&one, "file", b"first").await.expect("written");
    let file = open(&two, "file", RW).await.expect("opens");
    let theirs = bytes(300_000, 1);
    rewrite(&one, "file", &theirs).await.expect("written");
    two.getattr(file.0, None).await.expect("is there");
    write(&two, file, 0, b"mine").await.expect("written");
    close(&two, file).await.expect("written");
    pass_a_period().await;
    memory.lose_released();
    let three = mounted(&env(), &blocks, 3).await;
    let handle = three.opendir(me(), ROOT).await.expect("opens").handle;
    let listed = three.readdir(ROOT, handle, 0, 100, false).await.expect("lists");
    let names = listed.iter().map(|entry| String::from_utf8_lossy(&entry.name).into_owned());
    let kept = names.into_iter().find(|name| name != "file").expect("is kept");
    assert!(content(&three, &kept).await == Ok(theirs), "{kept}");
}

#[tokio::test(start_paused = true)]
async fn of_a_large_file_only_what_a_change_replaces_is_released() {
    let (memory, blocks) = memory(false).await;
    let one = mounted(&env(), &blocks, 1).await;
    let mut data = bytes(3_000_000, 1);
    put(&one, "file", &data).await.expect("written");
    // Far away, so that there are blocks of pointers.
    let file = open(&one, "file", RW).await.expect("opens");
    write(&one, file, 1 << 32, b"far away").await.expect("written");
    close(&one, file).await.expect("the ring takes it");
    pass_a_period().await;
    memory.lose_released();
    let held = memory.len();
    let file = open(&one, "file", RW).await.expect("opens");
    write(&one, file, 70_000, b"changed").await.expect("written");
    close(&one, file).await.expect("the ring takes it");
    data[70_000..70_007].copy_from_slice(b"changed");
    pass_a_period().await;
    let released = memory.lose_released();
    assert!((1..10).contains(&released), "{released}");
    assert_eq!(memory.len(), held);
    let two = mounted(&env(), &blocks, 2).await;
    let file = open(&two, "file", OpenFlags::READ).await.expect("opens");
    let found = two.read(file.0, file.1, 0, 3_000_000).await.expect("reads");
    assert!(found[..] == data[..found.len()] && found.len() > 70_007);
    assert_eq!(two.read(file.0, file.1, 1 << 32, 100).await.expect("reads"), &b"far away"[..]);
}

#[tokio::test(start_paused = true)]
async fn contents_that_come_back_are_not_released() {
    let (memory, blocks) = memory(false).await;
    let one = mounted(&env(), &blocks, 1).await;
    put(&one, "file", &bytes(300_000, 1)).await.expect("written");
    let held = memory.len();
    for version in [2, 1, 3, 1] {
        rewrite(&one, "file", &bytes(300_000, version)).await.expect("written");
    }
    pass_a_period().await;
    memory.lose_released();
    assert_eq!(memory.len(), held);
    let two = mounted(&env(), &blocks, 2).await;
    assert_eq!(content(&two, "file").await, Ok(bytes(300_000, 1)));
}

#[tokio::test(start_paused = true)]
async fn removed_files_and_replaced_leaves_of_directories_are_released() {
    let (memory, blocks) = memory(false).await;
    let one = mounted(&env(), &blocks, 1).await;
    let held = memory.len();
    put(&one, "file", &bytes(300_000, 1)).await.expect("written");
    let many = one.mkdir(me(), ROOT, b"many", 0o755).await.expect("made").attr.inode;
    for number in 0..400 {
        let name = format!("name {number}");
        one.mknod(me(), many, name.as_bytes(), FileKind::Fifo, 0o644, 0).await.expect("made");
    }
    one.unlink(me(), ROOT, b"file").await.expect("removed");
    one.sync().await.expect("is on the ring");
    pass_a_period().await;
    pass_a_period().await;
    memory.lose_released();
    // 28 kB of names, in leaves of at least 2 KiB.
    assert!(memory.len() <= held + 14, "{held} blocks, {} blocks", memory.len());
    let two = mounted(&env(), &blocks, 2).await;
    let found = two.lookup(me(), ROOT, b"many").await.expect("there").attr;
    assert_eq!(found.size_bytes, 400);
    for number in 0..400 {
        one.unlink(me(), many, format!("name {number}").as_bytes()).await.expect("removed");
    }
    one.rmdir(me(), ROOT, b"many").await.expect("removed");
    one.sync().await.expect("is on the ring");
    pass_a_period().await;
    memory.lose_released();
    assert_eq!(memory.len(), held);
}

#[tokio::test(start_paused = true)]
async fn an_open_file_that_was_removed_reads_whole_and_is_released_when_it_is_closed() {
    let (memory, blocks) = memory(false).await;
    let one = mounted(&env(), &blocks, 1).await;
    let held = memory.len();
    put(&one, "file", &bytes(300_000, 1)).await.expect("written");
    let file = open(&one, "file", OpenFlags::READ).await.expect("opens");
    one.unlink(me(), ROOT, b"file").await.expect("removed");
    one.sync().await.expect("is on the ring");
    pass_a_period().await;
    assert_eq!(memory.released(), Vec::<BlockId>::new());
    assert_eq!(read(&one, file).await, Ok(bytes(300_000, 1)));
    close(&one, file).await.expect("nothing is to be written");
    one.forget(file.0, 2);
    pass_a_period().await;
    memory.lose_released();
    assert_eq!(memory.len(), held);
}

/// Two write one file at the same time: a third mount keeps what is not shown as a file of its own, which refers to
/// blocks of the first inode.
#[tokio::test(start_paused = true)]
async fn contents_written_at_the_same_time_are_not_released() {
    let (memory, blocks) = memory(false).await;
    let (one, two) = (mounted(&env(), &blocks, 1).await, mounted(&env(), &blocks, 2).await);
    put(&one, "file", &bytes(300_000, 1)).await.expect("written");
    let both = [
        open(&one, "file", RW).await.expect("opens"),
        open(&two, "file", RW).await.expect("opens"),
    ];
    write(&one, both[0], 0, &bytes(300_000, 2)).await.expect("written");
    write(&two, both[1], 0, &bytes(300_000, 3)).await.expect("written");
    close(&one, both[0]).await.expect("the ring takes it");
    close(&two, both[1]).await.expect("the ring takes it");
    pass_a_period().await;
    memory.lose_released();
    let three = mounted(&env(), &blocks, 3).await;
    let shown = content(&three, "file").await.expect("reads");
    pass_a_period().await;
    memory.lose_released();
    let handle = three.opendir(me(), ROOT).await.expect("opens").handle;
    let listed = three.readdir(ROOT, handle, 0, 1000, false).await.expect("lists");
    let mut found = Vec::new();
    for entry in listed {
        let name = String::from_utf8(entry.name.to_vec()).expect("a name");
        found.push(content(&three, &name).await.expect("reads"));
    }
    found.sort();
    let mut all = vec![bytes(300_000, 2), bytes(300_000, 3)];
    all.sort();
    assert!(found == all && all.contains(&shown), "{} files", found.len());
}

/// A ring whose virtual days pass, and mounts on it.
struct World {
    ring: Ring,
    seed: u64,
}

impl World {
    fn new(seed: u64, nodes: usize) -> World {
        let sim = SimConfig { seed, jitter: 0.3, ..SimConfig::default() };
        let config = DhtConfig { expire_every: HOUR, ..DhtConfig::default() };
        let world = World { ring: Ring::with(sim, config, nodes), seed };
        let (env, blocks) = world.at(0);
        world.block_on(created(&env, &blocks));
        world
    }

    fn at(&self, member: usize) -> (Env, Arc<dyn Blocks>) {
        let member = &self.ring.members[member];
        (self.ring.sim.env(member.host), member.dht.clone())
    }

    fn block_on<T>(&self, work: impl Future<Output = T>) -> T {
        let done = self.ring.sim.block_on(LONG, work);
        done.unwrap_or_else(|stuck| panic!("seed {}: {stuck}", self.seed))
    }

    fn mount(&self, member: usize, user: u8) -> SharedFs {
        self.mount_with(member, user, true)
    }

    fn mount_with(&self, member: usize, user: u8, releases_replaced: bool) -> SharedFs {
        let (env, blocks) = self.at(member);
        // Next to nothing is read from memory.
        let (names_max_age, cache_bytes) = (Duration::ZERO, 64 << 10);
        let options = SharedOptions {
            names_max_age,
            cache_bytes,
            releases_replaced,
            ..SharedOptions::default()
        };
        self.block_on(mounted_with(&env, &blocks, user, options))
    }

    /// What renews the volume's leases once a day.
    fn keep(&self, member: usize) -> upkeep::Kept {
        let (env, blocks) = self.at(member);
        let keep = async {
            let id = volume().volume_id();
            let (_, record) = read_volume(&blocks, id).await.expect("reads").expect("there");
            groups::renew_volume(&env, &blocks, &volume(), &record).await.expect("certificates");
            upkeep::keep(&env, &blocks, id, &record, &Sealing::none()).await
        };
        self.block_on(keep).expect("leases are extended")
    }

    /// Bytes of content of inodes that the ring holds.
    fn held_bytes(&self) -> u64 {
        let all = self.ring.members.iter().flat_map(|member| {
            member.store.list(KeyRange::full(), usize::MAX).expect("memory does not fail")
        });
        let content = all.filter(|info| !info.kind.is_mutable());
        content.map(|info| u64::from(info.len_bytes)).sum()
    }

    /// Two days of lease and a day of grace, renewed each day.
    fn pass_leases(&self) {
        for _ in 0..3 {
            self.keep(0);
            self.ring.sim.run_for(DAY);
        }
        self.keep(0);
        self.ring.sim.run_for(HOUR * 3);
    }
}

/// What a file takes that was rewritten so many times: right after that, and after leases and grace; and what it takes
/// that was written once.
fn bytes_after(rewrites: u64, releases_replaced: bool) -> [u64; 3] {
    let world = World::new(1, 5);
    let one = world.mount_with(0, 1, releases_replaced);
    world.block_on(put(&one, "file", &bytes(100_000, 0))).expect("written");
    world.ring.until_replicated();
    let once = world.held_bytes();
    for version in 1..=rewrites {
        world.block_on(rewrite(&one, "file", &bytes(100_000, version))).expect("written");
    }
    world.ring.until_replicated();
    let rewritten = world.held_bytes();
    world.pass_leases();
    let two = world.mount(3, 2);
    assert_eq!(world.block_on(content(&two, "file")), Ok(bytes(100_000, rewrites)));
    [once, rewritten, world.held_bytes()]
}

#[test]
fn the_ring_holds_one_version_of_a_file_that_was_rewritten_a_thousand_times() {
    let [once, rewritten, after] = bytes_after(1000, true);
    println!("{once} bytes once, {rewritten} when it is rewritten, {after} after the leases");
    assert!(rewritten > once * 900, "{once} {rewritten}");
    // Blocks of past versions, which are kept for days, stay.
    assert!((once..once + (8 << 10)).contains(&after), "{once} {after}");
    let [once, rewritten, after] = bytes_after(20, false);
    assert!(after <= rewritten && after > once * 20, "{once} {rewritten} {after}");
}

/// What is kept of the past stays for as long as that is said, and what was not kept is gone by then.
#[test]
fn blocks_of_a_kept_version_stay_until_it_is_kept_no_more() {
    let world = World::new(4, 5);
    let one = world.mount(0, 1);
    let unix_ms = || world.at(0).0.unix_ms();
    let days = |days: u32| {
        for _ in 0..days {
            world.keep(0);
            world.ring.sim.run_for(DAY);
        }
    };
    world.block_on(put(&one, "file", &bytes(100_000, 0))).expect("written");
    world.ring.until_replicated();
    let (once, written_ms) = (world.held_bytes(), unix_ms());
    // It is there at a midnight, so it is kept for a week, or for four; the versions after it are not.
    days(1);
    let replaced_ms = unix_ms();
    for version in 1..=5 {
        world.block_on(rewrite(&one, "file", &bytes(100_000, version))).expect("written");
    }
    days(5);
    // The block of the past version is small.
    let held = world.held_bytes();
    assert!((once * 2..once * 2 + 10_000).contains(&held), "{once} {held}");
    let two = world.mount(3, 2);
    let state = two.states().into_iter().find(|state| (written_ms..replaced_ms).contains(state));
    let then = world.block_on(two.at(state.expect("a midnight"))).expect("reads").expect("is kept");
    let read = async {
        let inode = then.lookup(me(), ROOT, b"file").await?.attr.inode;
        let handle = then.open(me(), inode, OpenFlags::READ).await?.handle;
        then.read(inode, handle, 0, 1 << 20).await
    };
    assert!(world.block_on(read).as_deref() == Ok(&bytes(100_000, 0)[..]));
    // A day of grace follows the lease.
    let kept_secs = Keep::default().kept_secs_after(written_ms, replaced_ms);
    let kept_days = u32::try_from(kept_secs / DAY.as_secs()).expect("four weeks at most");
    assert!(kept_days >= 7, "it was there at a midnight");
    days(kept_days - 5 + 2);
    let held = world.held_bytes();
    assert!((once..once + 10_000).contains(&held), "{once} {held}");
    assert_eq!(world.block_on(content(&two, "file")), Ok(bytes(100_000, 5)));
}

/// A file that is written each minute puts a block each minute, which lists all that are kept: each is needed as long as
/// its own version, and not as long as what it lists.
#[test]
fn blocks_of_past_versions_that_another_one_lists_end_with_their_own_version() {
    let world = World::new(11, 5);
    let one = world.mount(0, 1);
    world.block_on(put(&one, "file", b"first")).expect("written");
    world.ring.until_replicated();
    let before = world.held_bytes();
    // A version that is kept for a week or four, so that all after it list one.
    world.keep(0);
    world.ring.sim.run_for(DAY);
    for minute in 0..60 {
        world.ring.sim.run_for(Duration::from_secs(60));
        world.block_on(rewrite(&one, "file", format!("{minute}").as_bytes())).expect("written");
    }
    world.ring.until_replicated();
    let all = world.held_bytes() - before;
    for _ in 0..5 {
        world.keep(0);
        world.ring.sim.run_for(DAY);
    }
    let left = world.held_bytes() - before;
    println!("{all} bytes of past versions, {left} five days later");
    assert!(left > 0 && left < all / 10, "{left} of {all}");
    let states = one.states();
    assert!(world.block_on(one.at(*states.first().expect("some"))).is_ok());
}

/// A file that others rewrite stays readable where it is open, for weeks.
#[test]
fn an_open_file_that_others_replace_reads_whole_for_weeks() {
    let world = World::new(2, 5);
    let (one, two) = (world.mount(0, 1), world.mount(1, 2));
    world.block_on(put(&one, "file", &bytes(300_000, 0))).expect("written");
    let held = world.block_on(open(&two, "file", OpenFlags::READ)).expect("opens");
    world.block_on(rewrite(&one, "file", &bytes(300_000, 1))).expect("written");
    for _ in 0..8 {
        world.keep(0);
        world.ring.sim.run_for(DAY);
    }
    assert!(world.block_on(read(&two, held)) == Ok(bytes(300_000, 0)));
    world.block_on(close(&two, held)).expect("nothing is to be written");
    let three = world.mount(2, 3);
    assert_eq!(world.block_on(content(&three, "file")), Ok(bytes(300_000, 1)));
}

/// A machine that slept for days writes over a version whose blocks are gone: it is told, and keeps its changes.
#[test]
fn a_write_over_blocks_that_are_gone_fails_and_keeps_its_changes() {
    let world = World::new(3, 5);
    let (one, two) = (world.mount(0, 1), world.mount(4, 2));
    world.block_on(put(&one, "file", &bytes(300_000, 0))).expect("written");
    let held = world.block_on(open(&two, "file", RW)).expect("opens");
    // It cannot reach the others, and so extends no lease.
    let hosts: Vec<HostId> = world.ring.members.iter().map(|member| member.host).collect();
    world.ring.sim.partition(&[&hosts[..4], &hosts[4..]]);
    world.ring.sim.run_for(HOUR);
    world.block_on(rewrite(&one, "file", &bytes(300_000, 1))).expect("written");
    for _ in 0..4 {
        world.keep(0);
        world.ring.sim.run_for(DAY);
    }
    // The node that was cut off has not heard that they were released, and would bring them back.
    let store = &world.ring.members[4].store;
    let all = store.list(KeyRange::full(), usize::MAX).expect("memory does not fail");
    let keys = all.iter().filter(|info| !info.kind.is_mutable()).map(|info| info.key).collect();
    world.block_on(store.remove(keys)).expect("memory does not fail");
    world.ring.sim.heal();
    world.ring.sim.run_for(HOUR / 60);
    let changed = bytes(1 << 16, 9);
    world.block_on(write(&two, held, 1 << 16, &changed)).expect("a whole block, in memory");
    let flushed = world.block_on(two.flush(held.0, held.1));
    assert_eq!(flushed, Err(Errno::EIO));
    let three = world.mount(2, 3);
    assert_eq!(world.block_on(content(&three, "file")), Ok(bytes(300_000, 1)));
    let kept = world.block_on(two.read(held.0, held.1, 1 << 16, 1 << 16)).expect("reads");
    assert_eq!(kept, changed, "the changes are kept");
}

/// What a mount has open, and what it shows there.
struct Held {
    file: Opened,
    data: Vec<u8>,
}

struct Race {
    world: World,
    dice: u64,
    mounts: Vec<(usize, u8, SharedFs)>,
    /// By mount.
    held: BTreeMap<usize, Vec<Held>>,
    is_divided: bool,
    writes: u64,
}

impl Race {
    fn below(&mut self, bound: u64) -> u64 {
        self.dice = self.dice.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.dice;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }

    fn new(seed: u64) -> Race {
        let world = World::new(seed, 5);
        let places = [(0, 1), (1, 2), (3, 3)];
        let mounts = places.map(|(member, user)| (member, user, world.mount(member, user))).into();
        Race { world, dice: seed, mounts, held: BTreeMap::new(), is_divided: false, writes: 0 }
    }

    /// New contents, or some that were there before.
    fn data(&mut self) -> Vec<u8> {
        let seed = match self.below(3) {
            0 => self.below(3),
            _ => 100 + self.writes,
        };
        self.writes += 1;
        bytes(50_000 + 40_000 * (seed as usize % 5), seed)
    }

    fn step(&mut self) {
        let which = self.below(self.mounts.len() as u64) as usize;
        let fs = self.mounts[which].2.clone();
        let name = format!("f{}", self.below(3));
        let (data, at) = (self.data(), self.below(100_000));
        // Calls may fail while the ring is divided; what counts is what is there in the end.
        match self.below(12) {
            0..=3 => {
                let _ = self.world.block_on(async {
                    match rewrite(&fs, &name, &data).await {
                        Err(Errno::ENOENT) => put(&fs, &name, &data).await,
                        done => done,
                    }
                });
            }
            4..=5 => {
                let _ = self.world.block_on(async {
                    let file = open(&fs, &name, RW).await?;
                    let written = write(&fs, file, at, &data[..10_000]).await;
                    close(&fs, file).await.and(written)
                });
            }
            6..=7 if !self.is_divided => {
                let opened = self.world.block_on(async {
                    let file = open(&fs, &name, OpenFlags::READ).await?;
                    Ok::<_, Errno>((file, read(&fs, file).await))
                });
                if let Ok((file, data)) = opened {
                    let data = data.unwrap_or_else(|error| {
                        panic!("seed {}: {name} cannot be read: {error}", self.world.seed)
                    });
                    // A second open of one file shows what is new to all opens.
                    let held = self.held.entry(which).or_default();
                    for one in held.iter_mut().filter(|one| one.file.0 == file.0) {
                        one.data.clone_from(&data);
                    }
                    held.push(Held { file, data });
                }
            }
            8 => {
                if let Some(one) = self.held.get_mut(&which).and_then(Vec::pop) {
                    let _ = self.world.block_on(close(&fs, one.file));
                }
            }
            9 => {
                let _ = self.world.block_on(fs.unlink(me(), ROOT, name.as_bytes()));
            }
            // Two write at the same time.
            10 => {
                let other = self.mounts[(which + 1) % 3].2.clone();
                let more = self.data();
                self.world.block_on(async {
                    let (Ok(mine), Ok(theirs)) =
                        (open(&fs, &name, RW).await, open(&other, &name, RW).await)
                    else {
                        return;
                    };
                    let _ = write(&fs, mine, 0, &data).await;
                    let _ = write(&other, theirs, 0, &more).await;
                    let _ = close(&fs, mine).await;
                    let _ = close(&other, theirs).await;
                });
            }
            _ if !self.is_divided => {
                // A mount is gone from one moment to the next.
                let (member, user, _) = self.mounts.remove(which);
                self.held.remove(&which);
                let fs = self.world.mount(member, user);
                self.mounts.insert(which, (member, user, fs));
            }
            _ => {}
        }
        // Writes of this mount show in what it has open.
        self.refresh();
    }

    /// What open files show changes when this mount writes them; other mounts' writes do not show.
    fn refresh(&mut self) {
        if self.is_divided {
            return;
        }
        for (which, held) in &mut self.held {
            let fs = &self.mounts[*which].2;
            for one in held {
                let now = self.world.block_on(read(fs, one.file));
                one.data = now.unwrap_or_else(|error| {
                    panic!("seed {}: an open file cannot be read: {error}", self.world.seed)
                });
            }
        }
    }

    fn day(&mut self) {
        for _ in 0..6 {
            self.step();
            let minutes = self.below(90);
            self.world.ring.sim.run_for(Duration::from_secs(60 * minutes));
        }
        match self.below(4) {
            0 if !self.is_divided => {
                let hosts: Vec<HostId> =
                    self.world.ring.members.iter().map(|member| member.host).collect();
                self.world.ring.sim.partition(&[&hosts[..3], &hosts[3..]]);
                self.is_divided = true;
            }
            _ if self.is_divided => {
                self.world.ring.sim.heal();
                self.world.ring.sim.run_for(HOUR);
                self.is_divided = false;
            }
            _ => {}
        }
        self.world.ring.sim.run_for(HOUR * 16);
        // On the side of most nodes.
        self.world.keep(0);
    }

    fn end(mut self) {
        if self.is_divided {
            self.world.ring.sim.heal();
            self.world.ring.sim.run_for(HOUR);
            self.is_divided = false;
        }
        self.world.pass_leases();
        let seed = self.world.seed;
        for (which, held) in &self.held {
            let fs = &self.mounts[*which].2;
            for one in held {
                let found = self.world.block_on(read(fs, one.file));
                assert!(found.as_ref() == Ok(&one.data), "seed {seed}: an open file has changed");
            }
        }
        let fs = self.world.mount(2, 4);
        self.world.block_on(async {
            let handle = fs.opendir(me(), ROOT).await.expect("opens").handle;
            let listed = fs.readdir(ROOT, handle, 0, 1000, false).await.expect("lists");
            for entry in listed {
                let name = String::from_utf8_lossy(&entry.name).into_owned();
                let found = content(&fs, &name).await;
                assert!(found.is_ok(), "seed {seed}: {name} cannot be read: {found:?}");
            }
        });
        let kept = self.world.keep(0);
        assert_eq!((kept.lacking, kept.unread), (0, 0), "seed {seed}: {kept:?}");
    }
}

#[test]
fn no_block_is_lost_that_a_live_version_or_an_open_file_needs() {
    for seed in 1..=2 {
        let mut race = Race::new(seed);
        for _ in 0..10 {
            race.day();
        }
        race.end();
    }
}
