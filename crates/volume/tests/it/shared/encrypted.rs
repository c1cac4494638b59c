//! Encrypted shared volumes: members and readers read them, and nobody else; a member who was shut out
//! reads nothing that is written afterwards.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_dht::{
    Blocks, DhtConfig, GetError, HeldBlock, LeaseRenewal, LockGrant, LockLease, LockRefusal,
    MemoryBlocks, NewBlock, OverMemory, PutError, Renewed, Wanted,
};
use atoll_env::{BoxFuture, Env};
use atoll_key::kinds::certified::{CertifiedBlock, WriterId};
use atoll_key::{BlockHash, BlockId, GroupId, Key, KeyRange, SignedBlock, volume_group};
use atoll_sim::SimConfig;
use atoll_vfs::{Caller, Errno, FileSystem, InodeNumber, OpenFlags, RenameFlags, Writer};
use atoll_volume::shared::access::groups::{
    add_member, add_volume_member, begin_epoch, change_volume, put_group, remove_member,
    renew_volume,
};
use atoll_volume::shared::access::readers::{
    add_reader, add_reading_group, read_readers, remove_reader, remove_reading_group,
};
use atoll_volume::shared::access::{
    AccessError, Credentials, GroupRecord, NotReader, ReaderRecord, Renewal, VolumeRecord, rebind,
};
use atoll_volume::shared::sealing::Sealing;
use atoll_volume::shared::{OpenError, SharedFs, SharedOptions, upkeep};
use bytes::Bytes;

use super::mounts::{created_with, env, mounted, user, volume};
use crate::ring::clocked;
use crate::simulated_ring::Ring;

const ROOT: InodeNumber = InodeNumber::ROOT;
/// Longer than a writer relies on the read key that it knows.
const NEXT_KEY: Duration = Duration::from_secs(6);

fn me() -> Caller {
    Caller::default()
}

/// Blocks in memory that remembers what was put and renewed, and may refuse to show the readers.
#[derive(Default)]
struct Noted {
    memory: MemoryBlocks,
    put: Mutex<Vec<(BlockId, Bytes)>>,
    renewed: Mutex<BTreeSet<BlockId>>,
    hides_readers: AtomicBool,
    locked: Mutex<BTreeSet<Key>>,
    /// Puts of it fail.
    denied: Mutex<Option<BlockId>>,
}

impl Noted {
    fn new() -> (Arc<Noted>, Arc<dyn Blocks>) {
        let noted = Arc::new(Noted::default());
        (noted.clone(), noted)
    }

    /// What was put since the last call.
    fn put_since(&self) -> Vec<(BlockId, Bytes)> {
        std::mem::take(&mut self.put.lock().expect("one thread"))
    }
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
        let is_hidden = self.hides_readers.load(Ordering::Relaxed);
        if is_hidden && id == ReaderRecord::id(volume().volume_id()) {
            let error = GetError::Unavailable { key: id.key, told: "nobody answers".into() };
            return Box::pin(async { Err(error) });
        }
        self.memory.get_block(id, wanted)
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let denied = *self.denied.lock().expect("one thread");
        if blocks.iter().any(|block| Some(block.id) == denied) {
            let error = Err(PutError::Unavailable("nobody answers".into()));
            return Box::pin(async { vec![error] });
        }
        let new = blocks.iter().map(|block| (block.id, block.bytes.clone()));
        self.put.lock().expect("one thread").extend(new);
        self.memory.put_blocks(blocks)
    }

    fn renew_blocks(
        &self,
        renewal: LeaseRenewal,
    ) -> BoxFuture<'static, Vec<Result<Renewed, PutError>>> {
        self.renewed.lock().expect("one thread").extend(&renewal.ids);
        self.memory.renew_blocks(renewal)
    }

    fn lock_lease(&self, ask: LockLease) -> BoxFuture<'static, Result<LockGrant, LockRefusal>> {
        self.locked.lock().expect("one thread").insert(ask.key);
        self.memory.lock_lease(ask)
    }
}

/// What `number` opens the volume with; not all of them are readers.
async fn opened(env: &Env, blocks: &Arc<dyn Blocks>, number: u8) -> Result<SharedFs, OpenError> {
    let options = SharedOptions { names_max_age: Duration::ZERO, ..SharedOptions::default() };
    let (id, user) = (volume().volume_id(), Some(user(number)));
    SharedFs::open(env.clone(), blocks.clone(), id, user, options).await
}

async fn put(fs: &SharedFs, name: &str, data: &[u8]) -> Result<(), Errno> {
    let (number, handle) = match fs.lookup(me(), ROOT, name.as_bytes()).await {
        Ok(entry) => {
            let number = entry.attr.inode;
            (number, fs.open(me(), number, OpenFlags::READ_WRITE).await?.handle)
        }
        Err(_) => {
            let made = fs.create(me(), ROOT, name.as_bytes(), 0o644, OpenFlags::READ_WRITE).await?;
            (made.0.attr.inode, made.1.handle)
        }
    };
    let data = Bytes::copy_from_slice(data);
    fs.write(Writer::At(me()), number, handle, 0, data).await?;
    let flushed = fs.flush(number, handle).await;
    fs.close(number, handle).await?;
    flushed
}

async fn write_at(fs: &SharedFs, name: &str, offset: u64, data: &[u8]) {
    let number = fs.lookup(me(), ROOT, name.as_bytes()).await.expect("there").attr.inode;
    let handle = fs.open(me(), number, OpenFlags::READ_WRITE).await.expect("opens").handle;
    let data = Bytes::copy_from_slice(data);
    fs.write(Writer::At(me()), number, handle, offset, data).await.expect("written");
    fs.flush(number, handle).await.expect("the ring takes it");
    fs.close(number, handle).await.expect("it is open");
}

async fn content(fs: &SharedFs, name: &str) -> Result<Vec<u8>, Errno> {
    let attr = fs.lookup(me(), ROOT, name.as_bytes()).await?.attr;
    let handle = fs.open(me(), attr.inode, OpenFlags::READ).await?.handle;
    let read = fs.read(attr.inode, handle, 0, 4 << 20).await;
    fs.close(attr.inode, handle).await?;
    Ok(read?.to_vec())
}

/// Shuts a user out, as `atoll revoke --now` does.
pub(super) async fn shut_out(env: &Env, blocks: &Arc<dyn Blocks>, whom: u8) -> VolumeRecord {
    let (volume, whom) = (volume(), user(whom).user_id());
    let (_, record) = begin_epoch(env, blocks, &volume, whom).await.expect("begins");
    let id = |epoch| volume_group(&volume, epoch).group_id();
    let present = id(record.group_epoch);
    let former: Vec<GroupId> = (0..record.group_epoch).map(id).collect();
    let swap = |groups: &[GroupId]| -> Vec<GroupId> {
        let of = |group: &GroupId| if former.contains(group) { present } else { *group };
        groups.iter().map(of).collect()
    };
    let credentials = Credentials::new(env.clone(), blocks.clone(), Some(user(1)));
    let sealing = Sealing::of_owner(&volume, record.read_epoch());
    let (owner, root) = ((&volume, &sealing), record.root);
    let report = rebind(env, blocks, owner, &credentials, root, &swap, &mut |_| {}).await;
    assert_eq!((report.failed, report.changed), (0, report.inodes), "{report:?}");
    let bound = |record: &mut VolumeRecord| record.bound_epoch = record.group_epoch;
    change_volume(env, blocks, &volume, bound).await.expect("changes").1
}

/// Bytes that occur nowhere by chance.
fn bytes(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at / 7) as u8 ^ (at >> 11) as u8 ^ seed).collect()
}

#[tokio::test(start_paused = true)]
async fn a_reader_reads_and_writes_nothing_and_an_outsider_cannot_mount() {
    let blocks: Arc<dyn Blocks> = Arc::new(MemoryBlocks::new());
    created_with(&env(), &blocks, true).await;
    let one = mounted(&env(), &blocks, 1).await;
    put(&one, "small", b"secret words").await.expect("written");
    put(&one, "large", &bytes(300_000, 3)).await.expect("written");
    assert!(one.may_write().await);

    let refused = opened(&env(), &blocks, 20).await.err();
    assert_eq!(refused, Some(OpenError::NotReader(NotReader::NotListed)));
    let id = volume().volume_id();
    let nobody = SharedFs::open(env(), blocks.clone(), id, None, SharedOptions::default()).await;
    assert_eq!(nobody.err(), Some(OpenError::NotReader(NotReader::NoKey)));

    let alice = (user(20).user_id(), "alice");
    add_reader(&env(), &blocks, &volume(), alice, 0).await.expect("is added");
    let reader = opened(&env(), &blocks, 20).await.expect("mounts");
    assert!(!reader.may_write().await);
    assert_eq!(content(&reader, "small").await.expect("reads"), b"secret words");
    assert_eq!(content(&reader, "large").await.expect("reads"), bytes(300_000, 3));
    let made = reader.mkdir(me(), ROOT, b"directory", 0o755).await;
    assert_eq!(made.err(), Some(Errno::EACCES));
    put(&one, "small", b"SECRET").await.expect("written");
    assert_eq!(content(&reader, "small").await.expect("reads"), b"SECRET words");
}

/// A group's members read as long as they are members: who joins does so from the next renewal on, who leaves gets no
/// key of a later epoch.
#[tokio::test(start_paused = true)]
async fn members_of_a_reading_group_read_and_those_who_leave_get_no_later_key() {
    let blocks: Arc<dyn Blocks> = Arc::new(MemoryBlocks::new());
    let env = env();
    let record = created_with(&env, &blocks, true).await;
    let one = mounted(&env, &blocks, 1).await;
    put(&one, "plan", b"secret words").await.expect("written");
    let group = user(60);
    let none = add_reading_group(&env, &blocks, &volume(), group.group_id()).await;
    assert_eq!(none, Err(AccessError::NoGroup));
    put_group(&env, &blocks, &group, &GroupRecord::default()).await.expect("memory takes it");
    let join = async |number: u8| {
        let who = user(number).user_id();
        add_member(&env, &blocks, &group, who, &format!("{number}"), 0).await.expect("is added");
    };
    join(20).await;
    join(21).await;
    let added = add_reading_group(&env, &blocks, &volume(), group.group_id()).await;
    assert_eq!(added, Ok((2, 0)));
    let reader = opened(&env, &blocks, 20).await.expect("mounts");
    assert_eq!(content(&reader, "plan").await.expect("reads"), b"secret words");

    // The group is another's: its changes are followed once a day.
    join(22).await;
    assert!(opened(&env, &blocks, 22).await.is_err());
    renew_volume(&env, &blocks, &volume(), &record).await.expect("renewed");
    assert!(opened(&env, &blocks, 22).await.is_ok());
    let readers = async || {
        let readers = read_readers(&blocks, volume().volume_id()).await.expect("reads");
        readers.expect("there")
    };
    let of = async |number: u8| readers().await.readers.remove(&user(number).user_id());
    assert_eq!(
        of(22).await.map(|one| (one.label, one.group)),
        Some(("22".into(), Some(group.group_id())))
    );

    // One who is named besides stays, whatever becomes of the group.
    add_reader(&env, &blocks, &volume(), (user(22).user_id(), ""), 0).await.expect("is added");
    for number in [21, 22] {
        let who = user(number).user_id();
        remove_member(&env, &blocks, &group, who).await.expect("removed").expect("a member");
    }
    assert!(of(21).await.is_some(), "nobody has looked yet");
    shut_out(&env, &blocks, 9).await;
    assert!(of(20).await.is_some() && of(21).await.is_none() && of(22).await.is_some());
    tokio::time::sleep(NEXT_KEY).await;
    put(&one, "late", b"not for everybody").await.expect("written");
    assert_eq!(content(&reader, "late").await.expect("reads"), b"not for everybody");

    let removed = remove_reading_group(&env, &blocks, &volume(), group.group_id()).await;
    assert_eq!(removed, Ok(true));
    assert!(of(20).await.is_none() && of(22).await.is_some());
    let again = remove_reading_group(&env, &blocks, &volume(), group.group_id()).await;
    assert_eq!(again, Ok(false));
    shut_out(&env, &blocks, 9).await;
    tokio::time::sleep(NEXT_KEY).await;
    put(&one, "later", b"for those who are left").await.expect("written");
    assert_eq!(content(&reader, "later").await, Err(Errno::EACCES));
    // A group whose record cannot be read keeps its readers.
    let gone = user(61);
    put_group(&env, &blocks, &gone, &GroupRecord::default()).await.expect("memory takes it");
    add_member(&env, &blocks, &gone, user(23).user_id(), "", 0).await.expect("is added");
    add_reading_group(&env, &blocks, &volume(), gone.group_id()).await.expect("is added");
    let tombstone = SignedBlock::sign_tombstone(&gone, b"members", u64::MAX);
    blocks.remove_blocks(vec![tombstone.into()]).await.remove(0).expect("removed");
    renew_volume(&env, &blocks, &volume(), &record).await.expect("renewed");
    assert!(of(23).await.is_some());
}

/// Stands for all who hold blocks: the bytes of every store of the ring are searched.
#[test]
fn no_node_of_the_ring_holds_a_name_or_contents() {
    let ring = Ring::with(SimConfig::default(), DhtConfig::default(), 5);
    let (env, blocks) = (ring.sim.outside(), ring.members[0].dht.clone());
    let blocks: Arc<dyn Blocks> = blocks;
    let long = Duration::from_secs(600);
    let run = |is_encrypted| {
        let work = async {
            created_with(&env, &blocks, is_encrypted).await;
            let one = mounted(&env, &blocks, 1).await;
            put(&one, "name-of-a-file", b"contents-of-a-small-file").await.expect("written");
            let long = b"contents-of-a-large-file".repeat(20_000);
            put(&one, "name-of-another", &long).await.expect("written");
            let target = b"target-of-a-link";
            one.symlink(me(), ROOT, b"name-of-a-link", target).await.expect("made");
            let attribute = Bytes::from_static(b"value-of-an-attribute");
            one.setxattr(
                me(),
                ROOT,
                b"user.name-of-it",
                attribute,
                atoll_vfs::XattrFlags::default(),
            )
            .await
            .expect("set");
            let many = one.mkdir(me(), ROOT, b"name-of-many", 0o755).await.expect("made");
            for number in 0..300 {
                let name = format!("name-of-number-{number}");
                let kind = atoll_vfs::FileKind::Fifo;
                one.mknod(me(), many.attr.inode, name.as_bytes(), kind, 0o644, 0)
                    .await
                    .expect("made");
            }
            let two = mounted(&env, &blocks, 2).await;
            assert_eq!(content(&two, "name-of-another").await.expect("reads"), long);
            let many = two.lookup(me(), ROOT, b"name-of-many").await.expect("there").attr;
            assert_eq!(many.size_bytes, 300);
        };
        ring.sim.block_on(long, work).expect("calls have deadlines");
        ring.until_replicated();
        let mut found = BTreeSet::new();
        for member in 0..5 {
            let infos = ring.members[member].store.list(KeyRange::full(), usize::MAX);
            for info in infos.expect("memory does not fail") {
                let held = ring.held(member, &info.key).expect("listed").bytes;
                for word in ["name-of-", "contents-of-", "target-of-", "value-of-"] {
                    if held.windows(word.len()).any(|part| part == word.as_bytes()) {
                        found.insert(word);
                    }
                }
            }
        }
        found
    };
    assert_eq!(run(true), BTreeSet::new());
    // The same finds all of it in a volume that is not encrypted.
    assert_eq!(run(false).len(), 4);
}

/// Whether what was put can be read with these keys, block by block.
fn can_read(sealing: &Sealing, put: &[(BlockId, Bytes)]) -> Vec<bool> {
    let mut can = Vec::new();
    for (id, bytes) in put {
        if id.kind.joins() {
            let block = CertifiedBlock::decode(bytes).expect("a block");
            let opens = block.siblings().iter().map(|one| sealing.open_inode(&one.payload).is_ok());
            can.extend(opens);
        } else if !id.kind.is_mutable() {
            can.push(sealing.open_block(bytes).is_ok());
        }
    }
    can
}

#[tokio::test(start_paused = true)]
async fn a_member_who_was_shut_out_reads_nothing_that_is_written_afterwards() {
    let (noted, blocks) = Noted::new();
    created_with(&env(), &blocks, true).await;
    let (one, two) = (mounted(&env(), &blocks, 1).await, mounted(&env(), &blocks, 2).await);
    let three = mounted(&env(), &blocks, 3).await;
    let large = bytes(300_000, 1);
    put(&one, "small", b"before").await.expect("written");
    put(&one, "large", &large).await.expect("written");
    assert_eq!(content(&three, "large").await.expect("reads"), large);
    let id = volume().volume_id();
    let held = read_readers(&blocks, id).await.expect("reads").expect("there");
    let theirs = Sealing::of_reader(id, 0, held.key_of(&user(3), &id).expect("a reader"));
    assert!(can_read(&theirs, &noted.put_since()).iter().all(|can| *can));
    // A file that is open all the time.
    let made = two.create(me(), ROOT, b"open", 0o644, OpenFlags::READ_WRITE).await.expect("made");
    let (number, handle) = (made.0.attr.inode, made.1.handle);
    two.flush(number, handle).await.expect("the ring takes it");

    // Nobody of the others has to wait.
    put(&two, "moment", b"before").await.expect("written");
    let record = shut_out(&env(), &blocks, 3).await;
    assert_eq!((record.group_epoch, record.bound_epoch), (1, 1));
    assert_eq!(content(&two, "small").await.expect("reads"), b"before");
    tokio::time::sleep(NEXT_KEY).await;
    noted.put_since();
    let data = Bytes::from(bytes(100_000, 5));
    two.write(Writer::At(me()), number, handle, 0, data).await.expect("written");
    two.flush(number, handle).await.expect("the ring takes it");
    put(&two, "small", b"after!").await.expect("written");
    write_at(&two, "large", 70_000, b"after").await;
    two.mkdir(me(), ROOT, b"directory", 0o755).await.expect("made");
    let put_after = noted.put_since();
    let can = can_read(&theirs, &put_after);
    assert!(can.len() >= 8 && can.iter().all(|can| !can), "{can:?}");
    assert!(can_read(&Sealing::of_owner(&volume(), Some(1)), &put_after).iter().all(|can| *can));

    let mut changed = large.clone();
    changed[70_000..70_005].copy_from_slice(b"after");
    for fs in [&one, &two] {
        assert_eq!(content(fs, "small").await.expect("reads"), b"after!");
        assert_eq!(content(fs, "large").await.expect("reads"), changed);
        assert_eq!(content(fs, "open").await.expect("reads"), bytes(100_000, 5));
    }
    // Mounted since before, and mounted anew.
    for name in ["small", "large"] {
        assert_eq!(content(&three, name).await.err(), Some(Errno::EACCES), "{name}");
    }
    assert_eq!(put(&three, "other", b"x").await.err(), Some(Errno::EACCES));
    let refused = opened(&env(), &blocks, 3).await.err();
    assert_eq!(refused, Some(OpenError::NotReader(NotReader::NotListed)));
}

/// The first attempt to shut somebody out gives a key of the next epoch to all others, and ends there.
#[tokio::test(start_paused = true)]
async fn a_key_that_an_interrupted_change_gave_away_is_not_used() {
    let (noted, blocks) = Noted::new();
    created_with(&env(), &blocks, true).await;
    let one = mounted(&env(), &blocks, 1).await;
    let next = volume_group(&volume(), 1).group_id();
    *noted.denied.lock().expect("one thread") = Some(GroupRecord::id(next));
    let began = begin_epoch(&env(), &blocks, &volume(), user(3).user_id()).await;
    assert!(matches!(began, Err(AccessError::Put(_))), "{began:?}");
    *noted.denied.lock().expect("one thread") = None;
    let id = volume().volume_id();
    let held = read_readers(&blocks, id).await.expect("reads").expect("there");
    let theirs = Sealing::of_reader(id, 1, held.key_of(&user(4), &id).expect("a reader"));
    // What is sealed meanwhile is sealed with it.
    tokio::time::sleep(NEXT_KEY).await;
    noted.put_since();
    put(&one, "file", b"first").await.expect("written");
    assert!(can_read(&theirs, &noted.put_since()).iter().all(|can| *can));

    let (_, record) = begin_epoch(&env(), &blocks, &volume(), user(4).user_id()).await.expect("ok");
    assert_eq!((record.group_epoch, record.bound_epoch), (2, 0));
    let renewed = renew_volume(&env(), &blocks, &volume(), &record).await;
    assert_eq!(renewed, Ok(Renewal::default()), "there is no group of epoch 1");
    let record = shut_out(&env(), &blocks, 5).await;
    assert_eq!((record.group_epoch, record.bound_epoch), (3, 3));
    tokio::time::sleep(NEXT_KEY).await;
    noted.put_since();
    put(&one, "file", b"FIRST").await.expect("written");
    assert!(can_read(&theirs, &noted.put_since()).iter().all(|can| !can));
}

#[tokio::test(start_paused = true)]
async fn files_of_earlier_epochs_are_read_and_changed_by_new_members() {
    let (_, blocks) = Noted::new();
    created_with(&env(), &blocks, true).await;
    let one = mounted(&env(), &blocks, 1).await;
    let mut large = bytes(400_000, 1);
    for name in ["appended", "changed", "moved"] {
        put(&one, name, &large).await.expect("written");
    }
    let many = one.mkdir(me(), ROOT, b"many", 0o755).await.expect("made").attr.inode;
    for number in 0..500 {
        let (name, kind) = (format!("name {number}"), atoll_vfs::FileKind::Fifo);
        one.mknod(me(), many, name.as_bytes(), kind, 0o644, 0).await.expect("made");
    }
    shut_out(&env(), &blocks, 3).await;
    let record = shut_out(&env(), &blocks, 4).await;
    assert_eq!(record.group_epoch, 2);
    let alice = (user(20).user_id(), "alice");
    let owner = (&volume(), &record);
    add_volume_member(&env(), &blocks, owner, alice, 0).await.expect("is added");

    let new = mounted(&env(), &blocks, 20).await;
    assert_eq!(content(&new, "changed").await.expect("reads"), large);
    write_at(&new, "appended", 400_000, b"the end").await;
    write_at(&new, "changed", 200_000, b"the middle").await;
    let (from, to) = (&b"moved"[..], &b"elsewhere"[..]);
    new.rename(me(), ROOT, from, ROOT, to, RenameFlags::default()).await.expect("renamed");
    let many = new.lookup(me(), ROOT, b"many").await.expect("there").attr;
    assert_eq!(many.size_bytes, 500);
    // One leaf is of the new epoch, the others of the first.
    new.unlink(me(), many.inode, b"name 250").await.expect("removed");

    let two = mounted(&env(), &blocks, 2).await;
    assert_eq!(content(&two, "elsewhere").await.expect("reads"), large);
    let appended = [&large[..], b"the end"].concat();
    assert_eq!(content(&two, "appended").await.expect("reads"), appended);
    large[200_000..200_010].copy_from_slice(b"the middle");
    assert_eq!(content(&two, "changed").await.expect("reads"), large);
    let many = two.lookup(me(), ROOT, b"many").await.expect("there").attr;
    assert_eq!(many.size_bytes, 499);
}

/// A reader gets no key of an epoch that begins after its time.
#[tokio::test(start_paused = true)]
async fn a_reader_reads_until_an_epoch_begins_after_it_was_removed_or_its_time_is_over() {
    let (env, (_, blocks)) = (clocked(), Noted::new());
    let record = created_with(&env, &blocks, true).await;
    let one = mounted(&env, &blocks, 1).await;
    put(&one, "file", b"first").await.expect("written");
    let until_secs = env.unix_ms() / 1000 + 1;
    for (number, until_secs) in [(20, 0), (21, until_secs), (22, 0)] {
        let reader = (user(number).user_id(), "");
        add_reader(&env, &blocks, &volume(), reader, until_secs).await.expect("is added");
    }
    let mut mounts = Vec::new();
    for number in [20, 21, 22] {
        mounts.push(opened(&env, &blocks, number).await.expect("mounts"));
    }
    let removed = remove_reader(&env, &blocks, &volume(), user(20).user_id()).await;
    assert!(removed.expect("is removed").is_some());
    put(&one, "file", b"second").await.expect("written");
    for fs in &mounts {
        assert_eq!(content(fs, "file").await.expect("reads"), b"second");
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    let renewed = renew_volume(&env, &blocks, &volume(), &record).await.expect("renews");
    assert_eq!(renewed, Renewal::default());
    let readers = read_readers(&blocks, volume().volume_id()).await.expect("reads").expect("there");
    assert!(!readers.readers.contains_key(&user(21).user_id()));
    shut_out(&env, &blocks, 20).await;
    put(&one, "file", b"third!").await.expect("written");
    assert_eq!(content(&mounts[0], "file").await.err(), Some(Errno::EACCES));
    assert_eq!(content(&mounts[1], "file").await.err(), Some(Errno::EACCES));
    assert_eq!(content(&mounts[2], "file").await.expect("reads"), b"third!");
}

/// As long as the readers cannot be read, a mount does not know whether its key is the newest.
#[tokio::test(start_paused = true)]
async fn a_writer_relies_on_its_key_for_ten_minutes() {
    let (noted, blocks) = Noted::new();
    created_with(&env(), &blocks, true).await;
    let one = mounted(&env(), &blocks, 1).await;
    noted.hides_readers.store(true, Ordering::Relaxed);
    for _ in 0..9 {
        tokio::time::sleep(Duration::from_secs(60)).await;
        put(&one, "file", b"contents").await.expect("written");
    }
    tokio::time::sleep(Duration::from_secs(61)).await;
    assert_eq!(put(&one, "file", b"CONTENTS").await.err(), Some(Errno::ETIMEDOUT));
    assert_eq!(content(&one, "file").await.expect("its own"), b"CONTENTS");
    noted.hides_readers.store(false, Ordering::Relaxed);
    tokio::time::sleep(NEXT_KEY).await;
    put(&one, "file", b"Contents").await.expect("written");
    let two = mounted(&env(), &blocks, 2).await;
    assert_eq!(content(&two, "file").await.expect("reads"), b"Contents");
}

/// A member who signs an inode in the clear, as a program would that does not know encryption.
#[tokio::test(start_paused = true)]
async fn an_inode_in_the_clear_is_not_shown() {
    let (_, blocks) = Noted::new();
    let record = created_with(&env(), &blocks, true).await;
    let id = CertifiedBlock::id_at(record.root.key());
    let held = blocks.get_block(id, Wanted::Newest).await.expect("there");
    let root = CertifiedBlock::decode(&held.bytes).expect("a block");
    let credentials = Credentials::new(env(), blocks.clone(), Some(user(2)));
    let writer = WriterId::new(&user(2).user_id(), [2; 8]);
    let author = credentials.author(root.groups(), writer).await.expect("a member");
    let sealing = Sealing::of_owner(&volume(), Some(0));
    let clear = sealing.open_inode(&root.siblings()[0].payload).expect("opens");
    let written = root.write(&author, env().unix_ms(), Some(&clear)).expect("a member");
    let new = NewBlock { id, bytes: written.bytes().clone(), lease_secs: None };
    assert_eq!(blocks.put_blocks(vec![new]).await, [Ok(())]);
    let refused = opened(&env(), &blocks, 1).await.err().expect("it cannot be read");
    assert!(refused.to_string().contains("it is not encrypted, and its volume is"), "{refused}");
}

/// Nodes that keep locks see a hash of each name that is locked.
#[tokio::test(start_paused = true)]
async fn the_lock_of_a_name_is_one_for_all_members_and_does_not_tell_it() {
    for is_encrypted in [false, true] {
        let (noted, blocks) = Noted::new();
        let record = created_with(&env(), &blocks, is_encrypted).await;
        let locked = || std::mem::take(&mut *noted.locked.lock().expect("one thread"));
        let one = mounted(&env(), &blocks, 1).await;
        one.mkdir(me(), ROOT, b"secret", 0o755).await.expect("made");
        let first = locked();
        let plain = BlockHash::of(b"atoll v1 name locksecret").0;
        let guessed = Key([record.root.0, plain].concat().try_into().expect("64 bytes"));
        assert_eq!((first.len(), first.contains(&guessed)), (1, !is_encrypted));
        one.rmdir(me(), ROOT, b"secret").await.expect("removed");
        shut_out(&env(), &blocks, 3).await;
        locked();
        let two = mounted(&env(), &blocks, 2).await;
        two.mkdir(me(), ROOT, b"secret", 0o755).await.expect("made");
        assert_eq!(locked(), first, "also in another epoch");
    }
}

#[tokio::test(start_paused = true)]
async fn the_leases_of_an_encrypted_volume_are_extended() {
    let (noted, blocks) = Noted::new();
    let record = created_with(&env(), &blocks, true).await;
    let one = mounted(&env(), &blocks, 1).await;
    put(&one, "small", b"contents").await.expect("written");
    put(&one, "large", &bytes(300_000, 3)).await.expect("written");
    put(&one, "far", &bytes(100, 4)).await.expect("written");
    write_at(&one, "far", 1 << 30, b"away").await;
    let id = volume().volume_id();
    let sealing = Sealing::of_owner(&volume(), record.read_epoch());
    let kept = upkeep::keep(&env(), &blocks, id, &record, &sealing).await.expect("renewed");
    assert_eq!((kept.inodes, kept.lacking, kept.unread), (4, 0, 0), "{kept:?}");
    let renewed = noted.renewed.lock().expect("one thread").clone();
    assert!(renewed.contains(&ReaderRecord::id(id)));
    let data = |id: &&BlockId| !id.kind.is_mutable();
    let is_put: BTreeSet<BlockId> = noted.put_since().into_iter().map(|(id, _)| id).collect();
    // Five data blocks and an inode block; one data block, two of pointers and an inode block. The block of
    // what `far` was before is put as well, and needs no renewal.
    assert_eq!(renewed.iter().filter(data).count() + 1, is_put.iter().filter(data).count());
    // Without the keys, not much is found.
    let none = Sealing::none();
    let kept = upkeep::keep(&env(), &blocks, id, &record, &none).await.expect("renewed");
    assert_eq!((kept.inodes, kept.unread), (1, 1), "{kept:?}");
}
