//! The bytes of encrypted shared volumes: sealed inodes and blocks, the record of the readers.

use std::sync::Arc;

use atoll_dht::{Blocks, MemoryBlocks};
use atoll_key::epoch_key::MAX_EPOCHS;
use atoll_key::{BlockHash, GroupId, ReadKey, SealError, UserId, volume_group};
use atoll_volume::format::FormatError;
use atoll_volume::keep::Keep;
use atoll_volume::shared::access::group_record::{MAX_MEMBER_LABEL_BYTES, MAX_MEMBERS};
use atoll_volume::shared::access::groups::{begin_epoch, change_volume, put_group};
use atoll_volume::shared::access::readers::{add_reader, remove_reader};
use atoll_volume::shared::access::{
    AccessError, GroupRecord, Reader, ReaderRecord, TooLong, VolumeRecord, read_readers,
};
use atoll_volume::shared::inode::{Contents, InodeKey, TooLarge};
use atoll_volume::shared::sealing::Sealing;
use bytes::Bytes;

use super::mounts::{created_with, env, volume};
use super::{NOW_MS, NOW_SECS, inode, secret};

fn owner(epoch: u32) -> Sealing {
    Sealing::of_owner(&volume(), Some(epoch))
}

/// Somebody who was given the read key of this epoch.
fn reader(epoch: u32) -> Sealing {
    let key = ReadKey::of_epoch(&volume(), epoch).expect("an epoch");
    Sealing::of_reader(volume().volume_id(), epoch, key)
}

fn symlink() -> Vec<u8> {
    inode(Contents::Symlink(Bytes::from_static(b"target"))).encode().expect("short")
}

fn sealed_symlink(sealing: &Sealing) -> Bytes {
    sealing.sealer().seal_inode(symlink()).expect("short").into()
}

#[test]
fn a_reader_opens_the_epochs_so_far_and_no_later_one() {
    for (epoch, theirs) in [(0, 0), (0, 3), (2, 3), (3, 3)] {
        let sealed = sealed_symlink(&owner(epoch));
        assert_eq!(reader(theirs).open_inode(&sealed), Ok(symlink().into()), "{epoch} {theirs}");
        assert_eq!(owner(0).open_inode(&sealed), Ok(symlink().into()));
    }
    let later = sealed_symlink(&owner(3));
    assert_eq!(reader(2).open_inode(&later), Err(FormatError::NoReadKey(3)));
    let beyond = Bytes::from([&[2, 0xff, 0xff, 0xff, 0xff], &later[5..]].concat());
    assert_eq!(owner(3).open_inode(&beyond), Err(FormatError::NoReadKey(u32::MAX)));
    // A reader seals as the owner does.
    assert_eq!(sealed_symlink(&reader(3)), later);
    let other = Sealing::of_owner(&secret(8), Some(3));
    assert_eq!(other.open_inode(&later), Err(FormatError::Sealed(SealError::Tag)));
}

#[test]
fn every_changed_bit_of_a_sealed_inode_is_refused() {
    let sealed = sealed_symlink(&owner(1));
    for bit in 0..sealed.len() * 8 {
        let mut changed = sealed.to_vec();
        changed[bit / 8] ^= 1 << (bit % 8);
        assert!(owner(1).open_inode(&changed.into()).is_err(), "bit {bit}");
    }
    for cut in 0..sealed.len() {
        assert!(owner(1).open_inode(&sealed.slice(..cut)).is_err(), "cut at {cut}");
    }
}

/// A node, or a member of another volume, cannot make an encrypted volume a plain one.
#[test]
fn what_is_in_the_clear_is_refused_in_an_encrypted_volume_and_the_other_way_round() {
    let plain = Bytes::from(symlink());
    assert_eq!(owner(0).open_inode(&plain), Err(FormatError::NotSealed));
    assert_eq!(owner(0).open_inode(&Bytes::new()), Err(FormatError::NotSealed));
    assert!(owner(0).open_block(&plain).is_err());
    assert_eq!(Sealing::none().open_inode(&plain), Ok(plain.clone()));
    assert_eq!(Sealing::none().sealer().seal_inode(symlink()).expect("short"), plain);
    let sealed = sealed_symlink(&owner(0));
    let read = atoll_volume::shared::inode::Inode::decode(&sealed);
    assert_eq!(read, Err(FormatError::UnknownLayout(2)));
}

#[test]
fn an_inode_that_is_too_long_when_it_is_sealed_is_not_written() {
    let sealer = owner(0).sealer();
    let longest = vec![7; 58 << 10];
    let sealed = sealer.seal_inode(longest.clone()).expect("it fits");
    assert_eq!(owner(0).open_inode(&sealed.into()), Ok(longest.into()));
    assert_eq!(sealer.seal_inode(vec![7; (58 << 10) + 1]), Err(TooLarge::Payload));
}

fn records() -> Vec<ReaderRecord> {
    let reader = |n: u8, label: &str, until_secs| {
        let key = ReadKey::of_epoch(&volume(), 7).expect("an epoch");
        let user = secret(n).user_id();
        let sealed_key = key.seal_to(&user, &volume(), 7).expect("a key");
        // As a member of the second group, or named as a reader.
        let group = (n == 2).then_some(GroupId([9; 32]));
        (user, Reader { until_secs, label: label.to_owned(), group, sealed_key })
    };
    let readers = [reader(1, "alice", 0), reader(2, "", NOW_SECS), reader(3, "ça", u64::MAX)];
    let groups = [GroupId([3; 32]), GroupId([9; 32])].into();
    vec![ReaderRecord::default(), ReaderRecord { epoch: 7, groups, readers: readers.into() }]
}

#[test]
fn a_record_of_readers_reads_back_and_no_part_of_one_does() {
    for record in records() {
        let bytes = Bytes::from(record.encode().expect("short"));
        assert_eq!(ReaderRecord::decode(&bytes), Ok(record));
        for cut in 0..bytes.len() {
            assert!(ReaderRecord::decode(&bytes.slice(..cut)).is_err(), "cut at {cut}");
        }
        assert!(ReaderRecord::decode(&Bytes::from([&bytes[..], &[0]].concat())).is_err());
    }
    let record = records().remove(1);
    let id = volume().volume_id();
    let key = record.key_of(&secret(2), &id).expect("a reader");
    assert_eq!(key, ReadKey::of_epoch(&volume(), 7).expect("an epoch"));
    assert_eq!(record.key_of(&secret(4), &id), None);
}

#[test]
fn hostile_records_of_readers_are_refused() {
    let record = records().remove(1);
    let bytes = record.encode().expect("short");
    let changed = |at: usize, to: u8| {
        let mut bytes = bytes.clone();
        bytes[at] = to;
        ReaderRecord::decode(&bytes.into())
    };
    assert_eq!(changed(0, b'x'), Err(FormatError::WrongMagic("readers'")));
    assert_eq!(changed(4, 2), Err(FormatError::UnknownLayout(2)));
    assert_eq!(changed(7, 0x10), Err(FormatError::BadReference("there is no such epoch")));
    assert!(changed(9, 1).is_err() && changed(9, 3).is_err(), "more or fewer groups");
    assert_eq!(changed(10, 0xff), Err(FormatError::BadReference("the groups are out of order")));
    assert_eq!(changed(74, 0x10), Err(FormatError::BadReference("it has too many readers")));
    assert!(changed(75, 2).is_err() && changed(75, 4).is_err(), "more or fewer than there are");
    assert_eq!(changed(76, 0xff), Err(FormatError::BadReference("the readers are out of order")));
    assert!(changed(76 + 40, 65).is_err(), "a label that is too long");
    let unnamed = FormatError::BadReference("a reader is of a group that is not named");
    assert_eq!(changed(76 + 41, 3), Err(unnamed));
}

/// The largest record fits a block.
#[test]
fn a_volume_has_4096_readers_and_no_more() {
    let reader = |n: usize| {
        let mut id = [0; 32];
        id[..8].copy_from_slice(&(n as u64).to_be_bytes());
        let label = "x".repeat(MAX_MEMBER_LABEL_BYTES);
        (UserId(id), Reader { until_secs: 0, label, group: None, sealed_key: [7; 56] })
    };
    let readers = (0..MAX_MEMBERS).map(reader).collect();
    let groups = (0..255).map(|n| GroupId([n; 32])).collect();
    let mut record = ReaderRecord { epoch: MAX_EPOCHS - 1, groups, readers };
    let bytes = Bytes::from(record.encode().expect("so many"));
    assert!(bytes.len() < atoll_key::MAX_BLOCK_BYTES - 1000, "{}", bytes.len());
    assert_eq!(ReaderRecord::decode(&bytes).as_ref(), Ok(&record));
    record.readers.extend([reader(MAX_MEMBERS)]);
    assert_eq!(record.encode(), Err(TooLong::Readers));
}

/// Volumes are read again by newer programs only if the bytes stay as they are.
#[test]
fn the_bytes_of_encrypted_volumes_never_change() {
    let record = VolumeRecord {
        root: InodeKey([7; 32]),
        block_size_log2: 16,
        created_unix_ms: NOW_MS,
        label: "x".to_owned(),
        group_epoch: 2,
        bound_epoch: 0,
        is_encrypted: true,
        keep: Keep::default(),
        has_keepers: false,
    };
    let encoded = Bytes::from(record.encode().expect("short"));
    assert_eq!(&encoded[48..], [1, 0, 4, 0, 0, 0, 2, 128, 0, 1, 1]);
    assert_eq!(VolumeRecord::decode(&encoded).as_ref(), Ok(&record));
    let other = Bytes::from([&encoded[..encoded.len() - 1], &[2]].concat());
    assert_eq!(VolumeRecord::decode(&other), Err(FormatError::UnknownLayout(2)));
    let ended = VolumeRecord { group_epoch: MAX_EPOCHS, ..record };
    assert!(VolumeRecord::decode(&ended.encode().expect("short").into()).is_err());

    let mut all = encoded.to_vec();
    for record in records() {
        all.extend(record.encode().expect("short"));
    }
    all.extend(sealed_symlink(&owner(0)));
    all.extend(sealed_symlink(&owner(5)));
    assert_eq!(BlockHash::of(&all).to_hex(), GOLDEN);
}

const GOLDEN: &str = "09d0edadae6b91cc04a666a1fd89d62d01b9fa8d52369f26a5b0b59d44787e7a";

#[test]
fn a_volume_says_which_versions_it_keeps_and_none_for_too_long() {
    let record = |keep: &str| VolumeRecord {
        root: InodeKey([7; 32]),
        block_size_log2: 16,
        created_unix_ms: NOW_MS,
        label: "x".to_owned(),
        group_epoch: 0,
        bound_epoch: 0,
        is_encrypted: false,
        keep: keep.parse().expect("a policy"),
        has_keepers: false,
    };
    let policies = ["none", "24h/7d/4w", "60m/28d", "672h"].map(|keep| (keep, 3 + 10));
    for (keep, bytes) in [&[("60m/144t/24h/7d/4w", 0)][..], &policies].concat() {
        let encoded = Bytes::from(record(keep).encode().expect("short"));
        assert_eq!(encoded.len(), 48 + bytes, "{keep}");
        assert_eq!(VolumeRecord::decode(&encoded), Ok(record(keep)));
        let longer = [&encoded[..48], &[3, 0, 10, 0, 0, 0, 0, 0, 0, 0, 29, 0, 0]].concat();
        assert!(VolumeRecord::decode(&longer.into()).is_err(), "29 days");
    }
    for keep in ["5w", "29d", "673h"] {
        assert_eq!(record(keep).encode(), Err(TooLong::Kept), "{keep}");
    }
}

#[tokio::test(start_paused = true)]
async fn after_4095_new_epochs_there_is_none() {
    let blocks: Arc<dyn Blocks> = Arc::new(MemoryBlocks::new());
    let (env, volume) = (env(), volume());
    created_with(&env, &blocks, true).await;
    let nearly = |record: &mut VolumeRecord| record.group_epoch = MAX_EPOCHS - 2;
    change_volume(&env, &blocks, &volume, nearly).await.expect("changes");
    let group = volume_group(&volume, MAX_EPOCHS - 2);
    put_group(&env, &blocks, &group, &GroupRecord::default()).await.expect("is put");
    let whom = secret(3).user_id();
    let (_, record) = begin_epoch(&env, &blocks, &volume, whom).await.expect("the last one");
    assert_eq!(record.group_epoch, MAX_EPOCHS - 1);
    let refused = begin_epoch(&env, &blocks, &volume, whom).await;
    assert_eq!(refused.err(), Some(AccessError::NoEpoch));
    let id = volume.volume_id();
    let readers = read_readers(&blocks, id).await.expect("reads").expect("there");
    assert!(readers.epoch == MAX_EPOCHS - 1 && readers.key_of(&secret(2), &id).is_some());
}

#[tokio::test(start_paused = true)]
async fn readers_are_added_changed_and_removed() {
    let blocks: Arc<dyn Blocks> = Arc::new(MemoryBlocks::new());
    let (env, volume, id) = (env(), volume(), volume().volume_id());
    let alice = secret(20).user_id();
    let added = add_reader(&env, &blocks, &volume, (alice, "alice"), 0).await;
    assert_eq!(added, Err(AccessError::NoReaders), "of a volume that is not encrypted");
    created_with(&env, &blocks, true).await;
    add_reader(&env, &blocks, &volume, (alice, "alice"), 0).await.expect("is added");
    let until_secs = env.unix_ms() / 1000 + 10;
    add_reader(&env, &blocks, &volume, (alice, ""), until_secs).await.expect("is changed");
    let record = read_readers(&blocks, id).await.expect("reads").expect("there");
    assert_eq!(record.readers.len(), 10);
    let reader = &record.readers[&alice];
    assert_eq!((&reader.label[..], reader.until_secs), ("alice", until_secs));
    assert!(record.key_of(&secret(20), &id).is_some());
    let past = add_reader(&env, &blocks, &volume, (alice, ""), 1).await;
    assert_eq!(past, Err(AccessError::Past));
    let no_key = add_reader(&env, &blocks, &volume, (UserId([0; 32]), ""), 0).await;
    assert_eq!(no_key, Err(AccessError::BadUser));
    let removed = remove_reader(&env, &blocks, &volume, alice).await.expect("is removed");
    assert_eq!(removed.expect("a reader").label, "alice");
    let again = remove_reader(&env, &blocks, &volume, alice).await.expect("reads");
    assert_eq!(again, None);
}
