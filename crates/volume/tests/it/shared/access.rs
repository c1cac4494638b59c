//! Who may write a shared volume: records, groups, certificates, rebinding.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_dht::{
    Blocks, GetError, HeldBlock, MemoryBlocks, NewBlock, OverMemory, PutError, Wanted,
};
use atoll_env::{BoxFuture, Env};
use atoll_key::kinds::certified::{Author, Binding, Certificate, CertifiedBlock, Dot, Sibling};
use atoll_key::{
    BlockHash, BlockId, BlockKind, GroupId, NotAdmitted, SecretKey, UserId, user_group,
    volume_group,
};
use atoll_vfs::FileKind;
use atoll_volume::format::FormatError;
use atoll_volume::keep::Keep;
use atoll_volume::shared::access::group_record::{MAX_MEMBER_LABEL_BYTES, MAX_MEMBERS};
use atoll_volume::shared::access::groups::{
    self, CERTIFICATE_SECS, add_member, begin_epoch, change_volume, new_member, put_group,
    remove_member, renew, renew_volume,
};
use atoll_volume::shared::access::rebind::{find, in_present_epoch};
use atoll_volume::shared::access::{
    AccessError, Credentials, GroupRecord, Member, NewVolume, NotAllowed, RebindReport, Renewal,
    TooLong, VolumeRecord, create, is_shared, read_group, read_volume, rebind,
};
use atoll_volume::shared::entries::{Entries, Leaves};
use atoll_volume::shared::inode::{Contents, Entry, FileData, Inode, InodeKey, Written};
use atoll_volume::shared::merged::{self, Merged};
use atoll_volume::shared::sealing::Sealing;
use bytes::Bytes;
use futures_util::FutureExt;

use super::{NOW_SECS, inode, secret, writer};
use crate::ring::clocked;

const DAY: u64 = 24 * 3600;

fn user(n: u8) -> UserId {
    secret(n).user_id()
}

pub(super) fn now_secs(env: &Env) -> u64 {
    env.unix_ms() / 1000
}

pub(super) async fn pass(secs: u64) {
    tokio::time::advance(Duration::from_secs(secs)).await;
}

// --- the records ------------------------------------------------------------------------

fn volume_records() -> Vec<VolumeRecord> {
    let plain = VolumeRecord {
        root: InodeKey([7; 32]),
        block_size_log2: 16,
        created_unix_ms: NOW_SECS * 1000,
        label: String::new(),
        group_epoch: 0,
        bound_epoch: 0,
        is_encrypted: false,
        keep: Keep::default(),
        has_keepers: false,
    };
    let label = "Größe".to_owned();
    let rebinding = VolumeRecord { label, group_epoch: 300, bound_epoch: 299, ..plain.clone() };
    vec![plain, rebinding]
}

fn group_records() -> Vec<GroupRecord> {
    let group = secret(100);
    let member = |n: u8, label: &str, until_secs| {
        let certificate = Certificate::issue(&group, user(n), NOW_SECS, NOW_SECS + 100);
        (user(n), Member { certificate, label: label.to_owned(), until_secs })
    };
    let members = [member(1, "alice", 0), member(2, "", NOW_SECS + 7), member(3, "ça", u64::MAX)];
    let label = "band".to_owned();
    vec![GroupRecord::default(), GroupRecord { label, members: members.into() }]
}

fn group_id() -> GroupId {
    secret(100).group_id()
}

#[test]
fn records_read_back_and_no_part_of_one_does() {
    for record in volume_records() {
        let bytes = Bytes::from(record.encode().expect("short"));
        assert_eq!(VolumeRecord::decode(&bytes), Ok(record.clone()));
        assert!(is_shared(&bytes) && !is_shared(&bytes[..3]));
        // A field that ends where the cut is may be one that is left out.
        let fixed = 47 + record.label.len();
        for cut in (0..bytes.len()).filter(|cut| *cut < fixed || (cut - fixed) % 7 != 0) {
            assert!(VolumeRecord::decode(&bytes.slice(..cut)).is_err(), "cut at {cut}");
        }
    }
    for record in group_records() {
        let bytes = Bytes::from(record.encode().expect("short"));
        assert_eq!(GroupRecord::decode(&bytes, group_id()), Ok(record));
        for cut in 0..bytes.len() {
            assert!(GroupRecord::decode(&bytes.slice(..cut), group_id()).is_err(), "cut at {cut}");
        }
        let longer = Bytes::from([&bytes[..], &[0]].concat());
        assert!(GroupRecord::decode(&longer, group_id()).is_err());
        assert!(!is_shared(&bytes));
    }
}

/// Volumes and groups are found again by newer programs only if the bytes stay as they are.
#[test]
fn the_bytes_of_records_never_change() {
    let mut bytes: Vec<u8> =
        volume_records().iter().flat_map(|record| record.encode().expect("short")).collect();
    bytes.extend(group_records().iter().flat_map(|record| record.encode().expect("short")));
    assert_eq!(BlockHash::of(&bytes).to_hex(), GOLDEN);
    let plain = volume_records()[0].encode().expect("short");
    assert_eq!(&plain[..6], b"ATSV\x01\x07");
    assert_eq!(plain.len(), 47);
    assert_eq!(group_records()[0].encode().expect("short"), b"ATGR\x01\0\0\0");
}

const GOLDEN: &str = "f7df9e4a1e70c501c5721b86918652d394b8a98a2a34b4e2d61025e84b037c45";

#[test]
fn hostile_volume_records_are_refused() {
    let record = volume_records().remove(1);
    let bytes = record.encode().expect("short");
    let changed = |at: usize, to: u8| {
        let mut bytes = bytes.clone();
        bytes[at] = to;
        VolumeRecord::decode(&bytes.into())
    };
    assert_eq!(changed(2, b'x'), Err(FormatError::WrongMagic("shared volume's root")));
    assert_eq!(changed(4, 2), Err(FormatError::UnknownLayout(2)));
    for size in [0, 11, 21, 255] {
        assert_eq!(changed(37, size), Err(FormatError::BadBlockSize(size)));
    }
    assert!(changed(46, 255).is_err(), "a label of more than there is");
    assert!(changed(47, 0xff).is_err(), "a label that is no text");
    let fields = 47 + record.label.len();
    assert!(changed(fields + 2, 3).is_err(), "an epoch of three bytes");
    assert!(changed(fields + 7, 1).is_err(), "one tag twice");
    assert!(changed(fields + 13, 0).is_ok());
    assert!(changed(fields + 12, 2).is_err(), "inodes bound to a group that is to come");
    let with = |tag: u8| {
        let field = [&bytes[..], &[tag, 0, 2, 9, 9]].concat();
        VolumeRecord::decode(&field.into())
    };
    assert_eq!(with(127), Ok(record.clone()));
    let with_keepers = |value: u8| {
        let field = [&bytes[..], &[4, 0, 1, value]].concat();
        VolumeRecord::decode(&field.into())
    };
    let kept = VolumeRecord { has_keepers: true, ..record };
    assert_eq!(with_keepers(1), Ok(kept.clone()));
    assert_eq!(VolumeRecord::decode(&kept.encode().expect("short").into()), Ok(kept));
    assert!(with_keepers(0).is_err() && with_keepers(2).is_err());
    assert_eq!(with(129), Err(FormatError::UnknownFeature(129)));
    assert!(with(128).is_err(), "two bytes");
    let label = "x".repeat(256);
    let record = VolumeRecord { label, ..volume_records().remove(0) };
    assert_eq!(record.encode(), Err(TooLong::Label(255)));
}

#[test]
fn hostile_group_records_are_refused() {
    let record = group_records().remove(1);
    let bytes = record.encode().expect("short");
    let changed = |at: usize, to: u8| {
        let mut bytes = bytes.clone();
        bytes[at] = to;
        GroupRecord::decode(&bytes.into(), group_id())
    };
    let first = 5 + 1 + 4 + 2;
    assert!(changed(0, b'x').is_err() && changed(4, 2).is_err());
    assert!(changed(first - 1, 2).is_err(), "fewer than there are");
    assert!(changed(first - 1, 4).is_err(), "more than there are");
    assert_eq!(changed(first - 2, 0x10), Err(FormatError::BadReference("it has too many members")));
    assert_eq!(
        changed(first, !bytes[first]),
        Err(FormatError::BadReference("a certificate is of another group"))
    );
    assert!(changed(first + 152, 6).is_err(), "a label that is longer");
    assert!(changed(first + 152, 65).is_err(), "a label that is too long");
    let wrong = GroupRecord::decode(&bytes.clone().into(), secret(99).group_id());
    assert!(wrong.is_err(), "another group's record");
    // The second and the third member change places.
    let mut unnamed = record.clone();
    unnamed.members.values_mut().for_each(|member| member.label.clear());
    let bytes = unnamed.encode().expect("short");
    let (second, third) = (first + 153, first + 2 * 153);
    let swapped = [&bytes[..second], &bytes[third..], &bytes[second..third]].concat();
    assert_eq!(
        GroupRecord::decode(&swapped.into(), group_id()),
        Err(FormatError::BadReference("the members are out of order"))
    );

    let mut record = record;
    record.members.get_mut(&user(1)).expect("a member").label = "x".repeat(65);
    assert_eq!(record.encode(), Err(TooLong::Label(MAX_MEMBER_LABEL_BYTES)));
}

/// The largest record fits a block.
#[test]
fn a_group_has_4096_members_and_no_more() {
    let mut bytes = Vec::new();
    Certificate::issue(&secret(100), user(1), 0, 0).encode(&mut bytes);
    let member = |n: usize| {
        let mut id = [0; 32];
        id[..8].copy_from_slice(&(n as u64).to_be_bytes());
        let mut bytes = bytes.clone();
        bytes[32..64].copy_from_slice(&id);
        let certificate = Certificate::decode(bytes[..].try_into().expect("so long"));
        let label = "x".repeat(MAX_MEMBER_LABEL_BYTES);
        (UserId(id), Member { certificate, label, until_secs: 0 })
    };
    let label = "x".repeat(255);
    let mut record = GroupRecord { label, members: (0..MAX_MEMBERS).map(member).collect() };
    let bytes = Bytes::from(record.encode().expect("so many"));
    assert!(bytes.len() < atoll_key::MAX_BLOCK_BYTES - 1000, "{}", bytes.len());
    assert_eq!(GroupRecord::decode(&bytes, group_id()).as_ref(), Ok(&record));
    record.members.extend([member(MAX_MEMBERS)]);
    assert_eq!(record.encode(), Err(TooLong::Members));
}

// --- groups -----------------------------------------------------------------------------

/// Blocks in memory that fail, or are overtaken by another writer.
#[derive(Default)]
pub(super) struct Ring {
    memory: MemoryBlocks,
    is_away: AtomicBool,
    /// So many puts of signed blocks are answered by somebody else's first.
    overtaken: AtomicUsize,
    /// What was put, in order.
    put: Mutex<Vec<BlockId>>,
    gets: AtomicUsize,
}

impl OverMemory for Ring {
    fn memory(&self) -> &MemoryBlocks {
        &self.memory
    }

    fn get_block(
        &self,
        id: BlockId,
        wanted: Wanted,
    ) -> BoxFuture<'static, Result<HeldBlock, GetError>> {
        self.gets.fetch_add(1, Ordering::Relaxed);
        if self.is_away.load(Ordering::Relaxed) {
            let error = GetError::Unavailable { key: id.key, told: "nobody answers".into() };
            return Box::pin(async { Err(error) });
        }
        self.memory.get_block(id, wanted)
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        if self.is_away.load(Ordering::Relaxed) {
            let error = Err(PutError::Unavailable("nobody answers".into()));
            return Box::pin(async { vec![error] });
        }
        let left = self.overtaken.load(Ordering::Relaxed);
        if left > 0 {
            self.overtaken.store(left - 1, Ordering::Relaxed);
            let error = Err(PutError::Superseded { offered: 1, held: 2 });
            return Box::pin(async { vec![error] });
        }
        self.put.lock().expect("a lock").extend(blocks.iter().map(|block| block.id));
        self.memory.put_blocks(blocks)
    }
}

impl Ring {
    pub(super) fn new() -> (Env, Arc<Ring>, Arc<dyn Blocks>) {
        let ring = Arc::new(Ring::default());
        (clocked(), ring.clone(), ring)
    }
}

async fn empty_group(env: &Env, blocks: &Arc<dyn Blocks>, group: &SecretKey) {
    let record = GroupRecord { label: "band".into(), ..GroupRecord::default() };
    put_group(env, blocks, group, &record).await.expect("is put");
}

async fn members(blocks: &Arc<dyn Blocks>, group: &SecretKey) -> Vec<Member> {
    let record = read_group(blocks, group.group_id()).await.expect("reads").expect("there");
    record.members.into_values().collect()
}

#[tokio::test(start_paused = true)]
async fn members_are_added_changed_and_removed() {
    let (env, ring, blocks) = Ring::new();
    let group = user_group(&secret(1), "band", 0);
    assert_eq!(read_group(&blocks, group.group_id()).await, Ok(None));
    let added = add_member(&env, &blocks, &group, user(2), "bob", 0).await;
    assert_eq!(added, Err(AccessError::NoGroup));
    empty_group(&env, &blocks, &group).await;
    let until_secs = now_secs(&env) + 3 * DAY;
    add_member(&env, &blocks, &group, user(2), "bob", 0).await.expect("is added");
    add_member(&env, &blocks, &group, user(3), "", until_secs).await.expect("is added");
    let of =
        |all: Vec<Member>, n: u8| all.into_iter().find(|member| member.certificate.user == user(n));
    let bob = of(members(&blocks, &group).await, 2).expect("a member");
    assert!(bob.certificate.is_signed() && bob.certificate.is_valid_at(now_secs(&env)));
    assert_eq!(bob.certificate.not_after_secs, now_secs(&env) + CERTIFICATE_SECS);
    assert!(bob.certificate.is_valid_at(now_secs(&env) - 600), "a replica's clock may be behind");
    let short = of(members(&blocks, &group).await, 3).expect("a member");
    assert_eq!(short.certificate.not_after_secs, until_secs, "not longer than was said");

    // Said anew, the label stays.
    add_member(&env, &blocks, &group, user(2), "", until_secs).await.expect("is changed");
    let bob = of(members(&blocks, &group).await, 2).expect("a member");
    assert_eq!((&bob.label[..], bob.until_secs), ("bob", until_secs));
    let past = add_member(&env, &blocks, &group, user(4), "", now_secs(&env) - 1).await;
    assert_eq!(past, Err(AccessError::Past));
    let long = add_member(&env, &blocks, &group, user(4), &"x".repeat(65), 0).await;
    assert_eq!(long, Err(AccessError::TooLong(TooLong::Label(64))));

    let removed = remove_member(&env, &blocks, &group, user(2)).await.expect("is removed");
    assert_eq!(removed.expect("it was one").label, "bob");
    let puts = ring.put.lock().expect("a lock").len();
    let again = remove_member(&env, &blocks, &group, user(2)).await;
    assert_eq!(again, Ok(None));
    assert_eq!(ring.put.lock().expect("a lock").len(), puts, "nothing has changed");
    assert_eq!(members(&blocks, &group).await.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_change_that_is_overtaken_begins_again() {
    let (env, ring, blocks) = Ring::new();
    let group = secret(100);
    empty_group(&env, &blocks, &group).await;
    ring.overtaken.store(3, Ordering::Relaxed);
    add_member(&env, &blocks, &group, user(2), "bob", 0).await.expect("is added");
    assert_eq!(members(&blocks, &group).await.len(), 1);
    ring.overtaken.store(usize::MAX, Ordering::Relaxed);
    let error = add_member(&env, &blocks, &group, user(3), "", 0).await.expect_err("overtaken");
    assert!(matches!(error, AccessError::Put(PutError::Superseded { .. })), "{error}");
    ring.overtaken.store(0, Ordering::Relaxed);
    ring.is_away.store(true, Ordering::Relaxed);
    let error = add_member(&env, &blocks, &group, user(3), "", 0).await.expect_err("away");
    assert!(matches!(error, AccessError::Get(GetError::Unavailable { .. })), "{error}");
}

/// "the owner of a file can remove write permission from a given user by not issuing a new certificate
/// for that user after the current certificate has expired" (Pastis §3.4).
#[tokio::test(start_paused = true)]
async fn certificates_are_renewed_once_a_day_until_the_membership_ends() {
    let (env, ring, blocks) = Ring::new();
    let group = secret(100);
    empty_group(&env, &blocks, &group).await;
    let begin = now_secs(&env);
    let until_secs = begin + 10 * DAY;
    add_member(&env, &blocks, &group, user(2), "", 0).await.expect("is added");
    add_member(&env, &blocks, &group, user(3), "", until_secs).await.expect("is added");
    let renewed = |renewed, dropped| Ok(Renewal { renewed, dropped });
    assert_eq!(renew(&env, &blocks, &group).await, renewed(0, 0));
    pass(DAY).await;
    assert_eq!(renew(&env, &blocks, &group).await, renewed(0, 0), "six days are left");
    let puts = ring.put.lock().expect("a lock").len();
    pass(1).await;
    assert_eq!(renew(&env, &blocks, &group).await, renewed(2, 0));
    assert_eq!(renew(&env, &blocks, &group).await, renewed(0, 0));
    assert_eq!(ring.put.lock().expect("a lock").len(), puts + 1);
    let ends = |all: Vec<Member>| -> BTreeSet<u64> {
        all.iter().map(|member| member.certificate.not_after_secs).collect()
    };
    let all = ends(members(&blocks, &group).await);
    assert_eq!(all, [begin + DAY + 1 + CERTIFICATE_SECS].into());
    pass(5 * DAY).await;
    assert_eq!(renew(&env, &blocks, &group).await, renewed(2, 0));
    let all = ends(members(&blocks, &group).await);
    assert_eq!(all, [begin + 6 * DAY + 1 + CERTIFICATE_SECS, until_secs].into());
    // The last certificate ends with the membership and is not issued again.
    pass(2 * DAY).await;
    assert_eq!(renew(&env, &blocks, &group).await, renewed(1, 0));
    pass(2 * DAY - 1).await;
    assert_eq!(now_secs(&env), until_secs, "the last second of the membership");
    assert_eq!(renew(&env, &blocks, &group).await, renewed(1, 0));
    pass(1).await;
    assert_eq!(renew(&env, &blocks, &group).await, renewed(0, 1));
    assert_eq!(members(&blocks, &group).await.len(), 1);
}

// --- volumes ----------------------------------------------------------------------------

pub(super) fn new_volume() -> NewVolume {
    NewVolume {
        label: "work".into(),
        member_label: "me".into(),
        block_size_log2: 16,
        owner: (1000, 100),
        mode: 0o755,
        is_encrypted: false,
        keep: Keep::default(),
    }
}

/// The key of the volumes here.
pub(super) fn volume() -> SecretKey {
    secret(50)
}

pub(super) async fn made(env: &Env, blocks: &Arc<dyn Blocks>) -> VolumeRecord {
    create(env, blocks, &volume(), &secret(1), &new_volume()).await.expect("is made")
}

pub(super) async fn held(blocks: &Arc<dyn Blocks>, inode: InodeKey) -> CertifiedBlock {
    let id = CertifiedBlock::id_at(inode.key());
    let held = blocks.get_block(id, Wanted::Newest).await.expect("there");
    CertifiedBlock::decode(&held.bytes).expect("verifies")
}

#[tokio::test(start_paused = true)]
async fn a_new_volume_has_a_root_directory_that_its_maker_may_write() {
    let (env, ring, blocks) = Ring::new();
    let record = made(&env, &blocks).await;
    let id = volume().volume_id();
    let (_, found) = read_volume(&blocks, id).await.expect("reads").expect("there");
    assert_eq!((&found, &found.label[..]), (&record, "work"));
    let group = volume_group(&volume(), 0).group_id();
    let root = held(&blocks, record.root).await;
    assert_eq!(root.groups(), [group]);
    let inode = merged::merge(&root, &Leaves::new(), &Sealing::none())
        .expect("an inode")
        .expect("there")
        .inode;
    let attributes = &inode.attributes;
    assert_eq!((attributes.uid, attributes.gid, attributes.mode), (1000, 100, 0o755));
    assert_eq!(attributes.mtime.secs as u64, now_secs(&env));
    assert_eq!(inode.contents, Contents::Directory(Entries::default()));
    // Whoever finds the record finds all.
    let order = [root.id(), GroupRecord::id(group), atoll_key::SignedBlock::id_at(id.root_key())];
    assert_eq!(ring.put.lock().expect("a lock")[..], order);
    let credentials = Credentials::new(env.clone(), blocks.clone(), Some(secret(1)));
    assert!(credentials.may_write(root.groups()).await);
    // A replica takes what the maker writes.
    let author = credentials.author(root.groups(), writer(1)).await.expect("a member");
    let payload = inode.encode().expect("short");
    let written = root.write(&author, env.unix_ms(), Some(&payload)).expect("a member");
    let admitted = BlockKind::Certified.admit(Some(root.bytes()), written.bytes(), env.unix_ms());
    assert_eq!(admitted, Ok(()));

    // Under the same key it can be made anew.
    let again = made(&env, &blocks).await;
    assert_ne!(again.root, record.root);
    let (_, found) = read_volume(&blocks, id).await.expect("reads").expect("there");
    assert_eq!(found, again);
}

#[tokio::test(start_paused = true)]
async fn what_is_no_shared_volume_is_told() {
    let (_, _, blocks) = Ring::new();
    let id = volume().volume_id();
    assert_eq!(read_volume(&blocks, id).await, Ok(None));
    let block = atoll_key::SignedBlock::sign(&volume(), b"", 1, b"ATVR\x01 and so on");
    blocks.put_signed(block).await.expect("is put");
    let error = read_volume(&blocks, id).await.expect_err("another kind of volume");
    assert!(error.to_string().contains("not a shared volume's root"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_volume_that_cannot_be_put_whole_is_not_found() {
    let (env, ring, blocks) = Ring::new();
    ring.is_away.store(true, Ordering::Relaxed);
    let made = create(&env, &blocks, &volume(), &secret(1), &new_volume()).await;
    assert!(matches!(made, Err(AccessError::Get(_))), "{made:?}");
    ring.is_away.store(false, Ordering::Relaxed);
    let long = NewVolume { label: "x".repeat(256), ..new_volume() };
    let made = create(&env, &blocks, &volume(), &secret(1), &long).await;
    assert_eq!(made, Err(AccessError::TooLong(TooLong::Label(255))));
    assert!(ring.put.lock().expect("a lock").is_empty());
}

// --- credentials ------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn the_certificate_that_lasts_longest_is_taken() {
    let (env, _, blocks) = Ring::new();
    let groups = [secret(100), secret(101), secret(102)];
    let ids: Vec<GroupId> = groups.iter().map(SecretKey::group_id).collect();
    let now = now_secs(&env);
    for (group, until) in groups.iter().zip([now + 2 * DAY, now + 5 * DAY, now + 3 * DAY]) {
        empty_group(&env, &blocks, group).await;
        add_member(&env, &blocks, group, user(2), "", until).await.expect("is added");
    }
    let credentials = Credentials::new(env.clone(), blocks.clone(), Some(secret(2)));
    let author = credentials.author(&ids, writer(2)).await.expect("a member");
    assert_eq!((author.certificate.group, author.writer), (ids[1], writer(2)));
    let author = credentials.author(&ids[2..], writer(2)).await.expect("a member");
    assert_eq!(author.certificate.group, ids[2], "only of a group that was asked for");
}

#[tokio::test(start_paused = true)]
async fn a_certificate_is_looked_for_anew_before_it_ends_and_not_too_often() {
    let (env, ring, blocks) = Ring::new();
    let group = secret(100);
    let ids = [group.group_id()];
    empty_group(&env, &blocks, &group).await;
    add_member(&env, &blocks, &group, user(2), "", 0).await.expect("is added");
    let credentials = Credentials::new(env.clone(), blocks.clone(), Some(secret(2)));
    let ends = async || {
        let author = credentials.author(&ids, writer(2)).await;
        author.map(|author| author.certificate.not_after_secs)
    };
    let asked = || ring.gets.swap(0, Ordering::Relaxed);
    let first = ends().await.expect("a member");
    asked();
    pass(6 * DAY).await;
    assert_eq!(ends().await, Ok(first));
    assert_eq!(asked(), 0, "a day is left");
    // Nobody renews it.
    pass(1).await;
    assert_eq!((ends().await, asked()), (Ok(first), 1));
    pass(59).await;
    assert_eq!((ends().await, asked()), (Ok(first), 0));
    ring.is_away.store(true, Ordering::Relaxed);
    pass(1).await;
    assert_eq!((ends().await, asked()), (Ok(first), 1), "what is known counts while it is valid");
    ring.is_away.store(false, Ordering::Relaxed);
    renew(&env, &blocks, &group).await.expect("renews");
    asked();
    pass(60).await;
    let second = ends().await.expect("a member");
    assert!(second > first + 5 * DAY && asked() == 1);

    // One who is removed can write until the certificate ends.
    remove_member(&env, &blocks, &group, user(2)).await.expect("is removed");
    pass(second - now_secs(&env)).await;
    assert_eq!(ends().await, Ok(second));
    pass(1).await;
    pass(1).await;
    assert_eq!(ends().await, Err(NotAllowed::NotMember));
}

#[tokio::test(start_paused = true)]
async fn a_user_who_may_not_write_is_told_why() {
    let (env, ring, blocks) = Ring::new();
    let (group, other) = (secret(100), secret(101));
    let ids = [group.group_id(), other.group_id()];
    empty_group(&env, &blocks, &group).await;
    let of = |n: u8| Credentials::new(env.clone(), blocks.clone(), Some(secret(n)));
    let nobody = Credentials::new(env.clone(), blocks.clone(), None);
    assert_eq!(nobody.author(&ids, writer(2)).await.expect_err("no key"), NotAllowed::NoKey);
    assert!(!nobody.may_write(&ids).await);

    // Somebody who is added need not wait.
    let bob = of(2);
    let refused = bob.author(&ids, writer(2)).await.expect_err("no member");
    assert_eq!(refused, NotAllowed::NotMember);
    let gets = ring.gets.load(Ordering::Relaxed);
    assert!(!bob.may_write(&ids).await);
    assert_eq!(ring.gets.load(Ordering::Relaxed), gets, "nor is the ring asked each time");
    let until_secs = now_secs(&env) + DAY;
    add_member(&env, &blocks, &group, user(2), "", until_secs).await.expect("is added");
    pass(2).await;
    assert!(bob.may_write(&ids).await);
    assert!(!bob.may_write(&ids[1..]).await, "the other group has no record");

    add_member(&env, &blocks, &group, user(3), "", 0).await.expect("is added");
    pass(7 * DAY + 1).await;
    let refused = bob.author(&ids, writer(2)).await.expect_err("it is over");
    assert_eq!(refused, NotAllowed::Ended { at_secs: until_secs });
    assert!(refused.to_string().contains("ended at 2023-11-15T22:13:20Z"), "{refused}");
    let refused = of(3).author(&ids, writer(3)).await.expect_err("it was not renewed");
    assert!(matches!(refused, NotAllowed::Expired { .. }), "{refused}");
    assert!(refused.to_string().contains("has renewed it"), "{refused}");
    ring.is_away.store(true, Ordering::Relaxed);
    let refused = of(3).author(&ids, writer(3)).await.expect_err("unknown");
    assert!(refused.to_string().contains("nobody answers"), "{refused}");
}

/// A group's owner could sign a record with certificates that are not his.
#[tokio::test(start_paused = true)]
async fn a_certificate_without_signature_is_not_taken() {
    let (env, _, blocks) = Ring::new();
    let group = secret(100);
    let member = new_member(&group, user(2), "", now_secs(&env), 0).expect("now");
    let mut bytes = Vec::new();
    member.certificate.encode(&mut bytes);
    bytes[72] = 0xff;
    let certificate = Certificate::decode(bytes[..].try_into().expect("so long"));
    let members = [(user(2), Member { certificate, ..member })].into();
    let record = GroupRecord { label: String::new(), members };
    put_group(&env, &blocks, &group, &record).await.expect("is put");
    let bob = Credentials::new(env, blocks, Some(secret(2)));
    let refused = bob.author(&[group.group_id()], writer(2)).await.expect_err("not signed");
    assert!(refused.to_string().contains("not signed by its owner"), "{refused}");
}

// --- rebinding --------------------------------------------------------------------------

/// What user `n` writes with now.
async fn author(env: &Env, blocks: &Arc<dyn Blocks>, n: u8, groups: &[GroupId]) -> Author {
    let credentials = Credentials::new(env.clone(), blocks.clone(), Some(secret(n)));
    credentials.author(groups, writer(n)).await.expect("a member")
}

async fn put(blocks: &Arc<dyn Blocks>, block: &CertifiedBlock) {
    let new = NewBlock { id: block.id(), bytes: block.bytes().clone(), lease_secs: None };
    assert_eq!(blocks.put_blocks(vec![new]).await, [Ok(())]);
}

/// User `n` makes something in a directory, as a mount does.
async fn make(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    n: u8,
    directory: InodeKey,
    name: &str,
    contents: Contents,
) -> InodeKey {
    let above = held(blocks, directory).await;
    let author = author(env, blocks, n, above.groups()).await;
    let number = BlockHash::of(name.as_bytes()).0[..16].try_into().expect("16 bytes");
    let binding = Binding::new(volume().volume_id(), number, above.groups()).expect("groups");
    let kind = contents.kind();
    let payload = inode(contents).encode().expect("short");
    let made = CertifiedBlock::create(binding, &author, env.unix_ms(), &payload).expect("member");
    put(blocks, &made).await;
    let key = InodeKey(made.key().as_hash().expect("hashed"));
    let entry = Entry::new(
        Bytes::copy_from_slice(name.as_bytes()),
        (key, kind),
        above.next_dot(author.writer),
        env.unix_ms(),
    );
    link(env, blocks, &author, directory, entry).await;
    key
}

async fn link(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    author: &Author,
    directory: InodeKey,
    entry: Entry,
) {
    let above = held(blocks, directory).await;
    let mut inode: Inode = merged::merge(&above, &Leaves::new(), &Sealing::none())
        .expect("an inode")
        .expect("there")
        .inode;
    let Contents::Directory(entries) = &mut inode.contents else { panic!("a directory") };
    entries.insert(entry);
    let payload = inode.encode().expect("short");
    let written = above.write(author, env.unix_ms(), Some(&payload)).expect("a member");
    put(blocks, &written).await;
}

pub(super) fn directory() -> Contents {
    Contents::Directory(Entries::default())
}

fn symlink(target: &'static str) -> Contents {
    Contents::Symlink(Bytes::from_static(target.as_bytes()))
}

pub(super) async fn rebind_all(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    top: InodeKey,
    groups: &(dyn Fn(&[GroupId]) -> Vec<GroupId> + Sync),
) -> RebindReport {
    let credentials = Credentials::new(env.clone(), blocks.clone(), Some(secret(1)));
    let mut seen = 0;
    let volume = volume();
    let mut progress = |report: &RebindReport| seen = report.inodes;
    let report =
        rebind(env, blocks, (&volume, &Sealing::none()), &credentials, top, groups, &mut progress)
            .await;
    assert_eq!(seen, report.inodes, "progress was told");
    report
}

/// A volume with `top/inner/file`, a second name of `top` inside itself, and `link`.
async fn tree(env: &Env, blocks: &Arc<dyn Blocks>) -> (VolumeRecord, Vec<InodeKey>) {
    let record = made(env, blocks).await;
    let group = volume_group(&volume(), 0);
    add_member(env, blocks, &group, user(2), "bob", 0).await.expect("is added");
    add_member(env, blocks, &group, user(3), "carol", 0).await.expect("is added");
    let top = make(env, blocks, 1, record.root, "top", directory()).await;
    let inner = make(env, blocks, 2, top, "inner", directory()).await;
    let file = make(env, blocks, 3, inner, "file", symlink("first")).await;
    let other = make(env, blocks, 2, record.root, "link", symlink("other")).await;
    // A member can write a directory that contains itself.
    let above = held(blocks, inner).await;
    let bob = author(env, blocks, 2, above.groups()).await;
    let names = (top, FileKind::Directory);
    let circle = Entry::new(Bytes::from_static(b"up"), names, above.next_dot(bob.writer), 1);
    link(env, blocks, &bob, inner, circle).await;
    let root = record.root;
    (record, vec![root, top, inner, file, other])
}

#[tokio::test(start_paused = true)]
async fn a_member_is_shut_out_of_everything_by_a_new_epoch() {
    let (env, _, blocks) = Ring::new();
    let (_, inodes) = tree(&env, &blocks).await;
    let before = held(&blocks, inodes[3]).await;
    let bob = author(&env, &blocks, 2, before.groups()).await;

    let (_, record) = begin_epoch(&env, &blocks, &volume(), user(2)).await.expect("begins");
    assert_eq!((record.group_epoch, record.bound_epoch, record.root), (1, 0, inodes[0]));
    let next = volume_group(&volume(), 1);
    let labels: Vec<String> =
        members(&blocks, &next).await.into_iter().map(|member| member.label).collect();
    assert_eq!(BTreeSet::from_iter(labels), BTreeSet::from(["me".into(), "carol".into()]));
    // Until the rebinding is through, certificates of both groups are renewed.
    pass(DAY + 1).await;
    let renewed = renew_volume(&env, &blocks, &volume(), &record).await.expect("renews");
    assert_eq!(renewed, Renewal { renewed: 4, dropped: 0 });

    let former = volume_group(&volume(), 0).group_id();
    let swap = |groups: &[GroupId]| -> Vec<GroupId> {
        let new = |group: &GroupId| if *group == former { next.group_id() } else { *group };
        groups.iter().map(new).collect()
    };
    let report = rebind_all(&env, &blocks, record.root, &swap).await;
    assert_eq!((report.inodes, report.changed, report.failed), (5, 5, 0), "{report:?}");
    for inode in &inodes {
        let block = held(&blocks, *inode).await;
        assert_eq!((block.groups(), block.binding_version()), (&[next.group_id()][..], 1));
        assert_eq!(block.siblings().len(), 1);
        assert_eq!(block.siblings()[0].certificate.group, next.group_id(), "it was written anew");
    }
    // A replica that holds it takes nothing of bob's.
    let after = held(&blocks, inodes[3]).await;
    let payload = inode(symlink("bob's")).encode().expect("short");
    let late = before.write(&bob, env.unix_ms(), Some(&payload)).expect("signed");
    let admitted = BlockKind::Certified.admit(Some(after.bytes()), late.bytes(), env.unix_ms());
    assert_eq!(admitted, Err(NotAdmitted::Outdated));
    // As a copy with whatever time, it does not cover what is there.
    let joined = after.join(&late).expect("one inode");
    assert!(joined.siblings().contains(&after.siblings()[0]));
    // Carol goes on.
    let carol = author(&env, &blocks, 3, after.groups()).await;
    let written = after.write(&carol, env.unix_ms(), Some(&payload)).expect("a member");
    let admitted = BlockKind::Certified.admit(Some(after.bytes()), written.bytes(), env.unix_ms());
    assert_eq!(admitted, Ok(()));

    // Again, it finds nothing to do.
    let report = rebind_all(&env, &blocks, record.root, &swap).await;
    assert_eq!((report.inodes, report.changed), (5, 0));
    let (_, record) =
        change_volume(&env, &blocks, &volume(), |record| record.bound_epoch = 1).await.expect("ok");
    let renewed = renew_volume(&env, &blocks, &volume(), &record).await.expect("renews");
    assert_eq!(renewed, Renewal::default(), "only the present group");
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_rebound_is_named_and_the_rest_is_done() {
    let (env, _, blocks) = Ring::new();
    let (record, _) = tree(&env, &blocks).await;
    let root = held(&blocks, record.root).await;
    let carol = author(&env, &blocks, 3, root.groups()).await;
    let dangling = (InodeKey([9; 32]), FileKind::Regular);
    let name = Bytes::from_static(b"lost");
    let entry = Entry::new(name, dangling, root.next_dot(carol.writer), 1);
    link(&env, &blocks, &carol, record.root, entry).await;
    let also = secret(101).group_id();
    let add_once = |groups: &[GroupId]| match groups.contains(&also) {
        true => groups.to_vec(),
        false => [groups, &[also]].concat(),
    };
    let report = rebind_all(&env, &blocks, record.root, &add_once).await;
    assert_eq!((report.inodes, report.changed, report.failed), (6, 5, 1));
    assert_eq!(report.named[0].0, "lost");
    assert!(report.named[0].1.contains("nowhere"), "{report:?}");
    // Of no groups, an inode could not be written by anybody.
    let report = rebind_all(&env, &blocks, record.root, &|_| Vec::new()).await;
    assert_eq!((report.inodes, report.failed), (1, 1), "{report:?}");
}

/// Files with contents in conflict keep them: the owner has not said which is right.
#[tokio::test(start_paused = true)]
async fn conflicts_survive_a_rebinding() {
    let (env, _, blocks) = Ring::new();
    let (record, inodes) = tree(&env, &blocks).await;
    let file = held(&blocks, inodes[3]).await;
    for (n, target) in [(2, "two"), (3, "three")] {
        let payload = inode(symlink(target)).encode().expect("short");
        let author = author(&env, &blocks, n, file.groups()).await;
        put(&blocks, &file.write(&author, env.unix_ms(), Some(&payload)).expect("signed")).await;
    }
    let both = held(&blocks, inodes[3]).await;
    let also = secret(101).group_id();
    let add = |groups: &[GroupId]| match groups.contains(&also) {
        true => groups.to_vec(),
        false => [groups, &[also]].concat(),
    };
    let report = rebind_all(&env, &blocks, record.root, &add).await;
    assert_eq!((report.changed, report.failed), (5, 0));
    let after = held(&blocks, inodes[3]).await;
    assert_eq!((after.siblings().len(), after.groups().len()), (2, 2));
    // Each was signed anew: nobody can cover them who does not write under the new binding.
    assert!(after.siblings().iter().all(|one| one.binding_version == after.binding_version()));
    let shown = |block: &CertifiedBlock| {
        let merged = merged::merge(block, &Leaves::new(), &Sealing::none());
        let Merged { inode, conflicts, .. } = merged.expect("inodes").expect("there");
        let beside: Vec<Contents> =
            conflicts.into_iter().map(|conflict| conflict.inode.contents).collect();
        (inode.contents, beside)
    };
    assert_eq!(shown(&after), shown(&both));
}

/// What somebody does on a ring each time that an inode was put, or is about to be.
type Deed = Box<dyn FnMut(&MemoryBlocks, &CertifiedBlock) + Send>;

/// A ring on which others go on while an inode is put.
#[derive(Default)]
struct Busy {
    memory: MemoryBlocks,
    before: Mutex<Option<Deed>>,
    after: Mutex<Option<Deed>>,
}

impl OverMemory for Busy {
    fn memory(&self) -> &MemoryBlocks {
        &self.memory
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let inodes = blocks.iter().filter(|block| block.id.kind.joins());
        let inodes: Vec<CertifiedBlock> =
            inodes.map(|new| CertifiedBlock::decode(&new.bytes).expect("signed")).collect();
        let deeds = |deed: &Mutex<Option<Deed>>| {
            if let Some(deed) = &mut *deed.lock().expect("a lock") {
                inodes.iter().for_each(|inode| deed(&self.memory, inode));
            }
        };
        deeds(&self.before);
        let put = now(self.memory.put_blocks(blocks));
        deeds(&self.after);
        Box::pin(async { put })
    }
}

/// Memory answers at once.
fn now<T>(future: BoxFuture<'static, T>) -> T {
    future.now_or_never().expect("at once")
}

fn put_now(memory: &MemoryBlocks, block: &CertifiedBlock) {
    let new = NewBlock { id: block.id(), bytes: block.bytes().clone(), lease_secs: None };
    assert_eq!(now(memory.put_blocks(vec![new])), [Ok(())]);
}

fn held_now(memory: &MemoryBlocks, inode: InodeKey) -> CertifiedBlock {
    let id = CertifiedBlock::id_at(inode.key());
    let held = now(memory.get_block(id, Wanted::Newest)).expect("there");
    CertifiedBlock::decode(&held.bytes).expect("verifies")
}

/// The next epoch of the volume's group, without bob.
async fn next_epoch(env: &Env, blocks: &Arc<dyn Blocks>) -> (VolumeRecord, [GroupId; 2]) {
    let (_, record) = begin_epoch(env, blocks, &volume(), user(2)).await.expect("begins");
    (record, [0, 1].map(|epoch| volume_group(&volume(), epoch).group_id()))
}

/// A file that `former` members may write, which carol names in the root directory.
fn make_meanwhile(
    memory: &MemoryBlocks,
    [old, carol]: [&Author; 2],
    (root, former): (InodeKey, GroupId),
    (number, time_ms): (u8, u64),
) -> InodeKey {
    let binding = Binding::new(volume().volume_id(), [number; 16], &[former]).expect("a group");
    let payload = inode(symlink("late")).encode().expect("short");
    let made = CertifiedBlock::create(binding, old, time_ms, &payload).expect("a member");
    put_now(memory, &made);
    let key = InodeKey::of(&made.key());
    let above = held_now(memory, root);
    let merged = merged::merge(&above, &Leaves::new(), &Sealing::none());
    let mut directory = merged.expect("an inode").expect("there").inode;
    let Contents::Directory(entries) = &mut directory.contents else { panic!("a directory") };
    let name = Bytes::from(format!("made meanwhile {number}"));
    let names = (key, FileKind::Symlink);
    entries.insert(Entry::new(name, names, above.next_dot(carol.writer), time_ms));
    let payload = directory.encode().expect("short");
    put_now(memory, &above.write(carol, time_ms, Some(&payload)).expect("a member"));
    key
}

/// The story: one walk left inodes to the former members that others had made meanwhile, in directories that they had read
/// before.
#[tokio::test(start_paused = true)]
async fn what_is_made_during_a_rebinding_is_found_by_another_walk() {
    for is_endless in [false, true] {
        let (env, ring) = (clocked(), Arc::new(Busy::default()));
        let blocks: Arc<dyn Blocks> = ring.clone();
        let (_, inodes) = tree(&env, &blocks).await;
        let old = author(&env, &blocks, 3, held(&blocks, inodes[0]).await.groups()).await;
        let (record, [former, present]) = next_epoch(&env, &blocks).await;
        let carol = author(&env, &blocks, 3, &[present]).await;
        let (root, last, time_ms) = (inodes[0], inodes[3], env.unix_ms());
        let made = Arc::new(Mutex::new(Vec::new()));
        let (mut number, all) = (100, made.clone());
        let deed = move |memory: &MemoryBlocks, put: &CertifiedBlock| {
            let is_due = match is_endless {
                true => put.groups() == [present],
                false => number == 100 && InodeKey::of(&put.key()) == last,
            };
            if is_due && held_now(memory, root).groups() == [present] {
                number += 1;
                let authors = [&old, &carol];
                let key = make_meanwhile(memory, authors, (root, former), (number, time_ms));
                all.lock().expect("a lock").push(key);
            }
        };
        *ring.after.lock().expect("a lock") = Some(Box::new(deed));
        let swap = in_present_epoch(&volume(), 1);
        let report = rebind_all(&env, &blocks, record.root, &swap).await;
        assert_eq!((report.is_unsettled, report.failed), (is_endless, 0), "{report:?}");
        if is_endless {
            // It says so. When nobody makes anything any more, it ends.
            *ring.after.lock().expect("a lock") = None;
            let report = rebind_all(&env, &blocks, record.root, &swap).await;
            assert_eq!((report.is_unsettled, report.failed), (false, 0), "{report:?}");
        } else {
            assert_eq!((report.inodes, report.changed), (6, 6));
        }
        let made = made.lock().expect("a lock").clone();
        assert!(!made.is_empty());
        for inode in inodes.iter().chain(&made) {
            let block = held(&blocks, *inode).await;
            assert_eq!(block.groups(), [present]);
            let is_new = |version| version == block.binding_version();
            assert!(block.siblings().iter().all(|one| is_new(one.binding_version)));
        }
    }
}

/// A member who remains writes at that moment, and so does the one who is shut out: replicas take both, since they have not
/// heard of the binding.
#[tokio::test(start_paused = true)]
async fn what_members_write_while_an_inode_is_rebound_counts_unless_they_are_shut_out() {
    for n in [2, 3] {
        let (env, ring) = (clocked(), Arc::new(Busy::default()));
        let blocks: Arc<dyn Blocks> = ring.clone();
        let (record, inodes) = tree(&env, &blocks).await;
        let file = |size_bytes: u64, dot: Dot| {
            let written = Written { dot, time_ms: 1 };
            let data = Some(FileData::Elsewhere(BlockHash([size_bytes as u8; 32])));
            Contents::Regular { size_bytes, blocks_512: 1, data, written }
        };
        let before = file(1, Dot { writer: writer(1), height: 1 });
        let key = make(&env, &blocks, 1, inodes[0], "report", before.clone()).await;
        let seen = held(&blocks, key).await;
        let theirs = author(&env, &blocks, n, seen.groups()).await;
        let contents = file(2, seen.next_dot(theirs.writer));
        let payload = inode(contents.clone()).encode().expect("short");
        let written = seen.write(&theirs, env.unix_ms(), Some(&payload)).expect("a member");
        let (_, [_, present]) = next_epoch(&env, &blocks).await;
        let mut is_due = true;
        let deed = move |memory: &MemoryBlocks, put: &CertifiedBlock| {
            if InodeKey::of(&put.key()) == key && std::mem::take(&mut is_due) {
                put_now(memory, &written);
            }
        };
        *ring.before.lock().expect("a lock") = Some(Box::new(deed));
        let swap = in_present_epoch(&volume(), 1);
        let report = rebind_all(&env, &blocks, record.root, &swap).await;
        assert_eq!((report.is_unsettled, report.failed), (false, 0), "{report:?}");
        let block = held(&blocks, key).await;
        assert_eq!(block.groups(), [present]);
        let merged = merged::merge(&block, &Leaves::new(), &Sealing::none());
        let merged = merged.expect("an inode").expect("there");
        let beside: Vec<&Contents> =
            merged.conflicts.iter().map(|one| &one.inode.contents).collect();
        match n {
            2 => assert_eq!((&merged.inode.contents, &beside[..]), (&before, &[&contents][..])),
            _ => assert_eq!((&merged.inode.contents, &beside[..]), (&contents, &[][..])),
        }
        // Who is shut out could cover nothing now, whatever he says.
        let is_new = |one: &&Sibling| one.binding_version == block.binding_version();
        let new = block.siblings().iter().filter(is_new).count();
        assert_eq!((new, block.siblings().len()), (1, if n == 2 { 2 } else { 1 }));
    }
}

#[tokio::test(start_paused = true)]
async fn an_inode_is_found_by_its_path() {
    let (env, _, blocks) = Ring::new();
    let (record, inodes) = tree(&env, &blocks).await;
    let at = async |path: &str| {
        let path: Vec<Vec<u8>> =
            path.split('/').filter(|n| !n.is_empty()).map(|n| n.as_bytes().to_vec()).collect();
        find(&blocks, record.root, &path, &Sealing::none()).await
    };
    assert_eq!(at("").await, Ok(Some(inodes[0])));
    assert_eq!(at("top/inner/file").await, Ok(Some(inodes[3])));
    assert_eq!(at("top/none").await, Ok(None));
    assert_eq!(at("link/below").await, Ok(None));
    assert_eq!(groups::RENEW_BELOW_SECS, 6 * DAY);
    let _ = env;
}
