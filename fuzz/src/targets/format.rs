//! The blocks of a volume, one at a time.

use atoll_key::kinds::certified::{Certificate, Dot, WriterId};
use atoll_key::{BlockHash, ReadKey, SecretKey, VolumeCipher, VolumeId};
use atoll_vfs::{FileKind, FileTime};
use atoll_volume::format::directory::{
    Child, Content, DirectoryBlock, DirectoryEntry, DirectoryRef, Nodes,
};
use atoll_volume::format::inode::{Data, InodeBlock, Shape};
use atoll_volume::format::{PointerBlock, xattrs};
use atoll_volume::keep::Keep;
use atoll_volume::owned::{Root, sealed_root};
use atoll_volume::shared::access::{
    GroupRecord, KeeperRecord, ListedMember, Member, Reader, ReaderRecord, VolumeRecord,
};
use atoll_volume::shared::entries::{Entries, Leaf};
use atoll_volume::shared::inode::{Attributes, Contents, Entry, Inode, InodeKey, Link};
use atoll_volume::shared::past::{Earlier, PastVersion, Span};
use atoll_volume::shared::sealing::Sealing;
use bytes::Bytes;

use super::{Target, round_trip, target};

pub(super) fn targets() -> Vec<Target> {
    let hash = Some(BlockHash([7; 32]));
    let directory = DirectoryRef { entries: 3, subdirectories: 1, hash };
    let plain = root(directory);
    let labelled =
        Root { label: Some("Größe".into()), xattrs: hash, ..root(DirectoryRef::default()) };
    let sealing = sealing();
    let holes = [hash, None, None, hash];
    let attributes = [(attribute("user.a"), attribute("1")), (attribute("user.b"), Bytes::new())];
    vec![
        // Not one encoding: a root may hold fields that only newer programs know.
        round_trip("volume/root", vec![plain, labelled], Root::encode, |input| {
            Root::decode(&Bytes::copy_from_slice(input))
        }),
        target("volume/encrypted-root", encrypted_roots(), |input| {
            sealed_root::decode(&Bytes::copy_from_slice(input), Some(&cipher())).is_ok()
        }),
        // Everything but the root itself is right.
        target("volume/root-inside", vec![root(directory).encode()], |input| {
            let mut payload = sealed_root::encode(&root(DirectoryRef::default()), Some(&cipher()));
            payload.truncate(5 + 16);
            if input.len() > 1 << 16 {
                return false;
            }
            payload.extend_from_slice(&cipher().seal_root(input));
            let read = sealed_root::decode(&payload.into(), Some(&cipher()));
            assert_eq!(read.ok(), Root::decode(&Bytes::copy_from_slice(input)).ok());
            Root::decode(&Bytes::copy_from_slice(input)).is_ok()
        }),
        block("volume/shared-inode", vec![shared_directory().encode().expect("short")], |block| {
            Inode::decode(block).ok().map(|inode| inode.encode().expect("it was one"))
        }),
        block("volume/shared-leaf", vec![shared_leaf()], |block| {
            Leaf::decode(block).ok().map(|leaf| leaf.encode())
        }),
        block("volume/past-version", vec![past_version()], |block| {
            let past = PastVersion::decode(block).ok()?;
            // A member can put anything there.
            let _ = (past.inode(), past.before(u64::MAX), past.after(0));
            Some(past.encode())
        }),
        round_trip("volume/shared-record", shared_records(), encode_shared, |input| {
            VolumeRecord::decode(&Bytes::copy_from_slice(input))
        }),
        block("volume/group-record", vec![group_record()], |block| {
            let record = GroupRecord::decode(block, group_key().group_id()).ok()?;
            Some(record.encode().expect("it came from a block"))
        }),
        block("volume/keeper-record", vec![keeper_record()], |block| {
            let record = KeeperRecord::decode(block).ok()?;
            Some(record.encode().expect("what was read is short enough"))
        }),
        block("volume/reader-record", vec![reader_record()], |block| {
            let record = ReaderRecord::decode(block).ok()?;
            Some(record.encode().expect("it came from a block"))
        }),
        // A node can say any epoch, and any bytes.
        target("volume/sealed-inode", vec![sealed_inode()], move |input| {
            let sealed = Bytes::copy_from_slice(input);
            assert!(sealing.open_block(&sealed).is_err(), "an inode passes for a block");
            sealing.open_inode(&sealed).is_ok_and(|inode| Inode::decode(&inode).is_ok())
        }),
        block("volume/directory", vec![leaf().encode(), interior().encode()], |block| {
            DirectoryBlock::decode(block).ok().map(|directory| directory.encode())
        }),
        block("volume/inode", inodes(), |block| {
            InodeBlock::decode(block).ok().map(|inode| inode.encode())
        }),
        block("volume/pointers", vec![PointerBlock::encode(1, &holes)], |block| {
            let decoded = PointerBlock::decode(block).ok()?;
            let pointers: Option<Vec<_>> =
                (0..decoded.count()).map(|i| decoded.pointer(i)).collect();
            Some(PointerBlock::encode(decoded.level, &pointers.expect("as many as counted")))
        }),
        block("volume/xattrs", vec![xattrs::encode(&attributes).expect("few")], |block| {
            let found = xattrs::decode(block).ok()?;
            Some(xattrs::encode(&found).expect("it came from a block"))
        }),
    ]
}

fn cipher() -> VolumeCipher {
    VolumeCipher::new(&ReadKey::from_bytes([7; 32]), &VolumeId([9; 32]))
}

fn shared_directory() -> Inode {
    let added = Dot { writer: WriterId::from_bytes([7; 16]), height: 9 };
    let entry = |name: &'static str, kind| {
        Entry::new(Bytes::from_static(name.as_bytes()), (InodeKey([1; 32]), kind), added, 1 << 40)
    };
    let entries = [entry("a", FileKind::Regular), entry("b", FileKind::Directory)];
    Inode {
        attributes: Attributes::default(),
        links: [Link { added, directory: InodeKey([2; 32]) }].into(),
        past: Some(BlockHash([3; 32])),
        contents: Contents::Directory(entries.into_iter().collect()),
    }
}

/// The same entries as the leaf of a large directory.
fn shared_leaf() -> Vec<u8> {
    let mut empty = shared_directory();
    empty.contents = Contents::Directory(Entries::default());
    let before = empty.encode().expect("short").len();
    let entries = &shared_directory().encode().expect("short")[before..];
    [b"ATSL\x01\x00\x02", entries].concat()
}

fn past_version() -> Vec<u8> {
    let span = Span { began_ms: 1, ended_ms: 2, kept_until_ms: 3 };
    let payload = shared_directory().encode().expect("short").into();
    let earlier = vec![Earlier { span, hash: BlockHash([5; 32]) }; 2];
    PastVersion { span, user: group_key().user_id(), earlier, payload }.encode()
}

fn shared_records() -> Vec<VolumeRecord> {
    let plain = VolumeRecord {
        root: InodeKey([7; 32]),
        block_size_log2: 16,
        created_unix_ms: 5,
        label: "Größe".into(),
        group_epoch: 0,
        bound_epoch: 0,
        is_encrypted: false,
        keep: Keep::default(),
        has_keepers: false,
    };
    let keep = "60m/28d".parse().expect("a policy");
    let encrypted = VolumeRecord { is_encrypted: true, keep, ..plain.clone() };
    vec![VolumeRecord { group_epoch: 3, bound_epoch: 2, ..plain.clone() }, plain, encrypted]
}

fn encode_shared(record: &VolumeRecord) -> Vec<u8> {
    record.encode().expect("its label is short")
}

fn group_key() -> SecretKey {
    SecretKey::from_seed(&[5; 32])
}

fn group_record() -> Vec<u8> {
    let member = |n: u8| {
        let user = SecretKey::from_seed(&[n; 32]).user_id();
        let certificate = Certificate::issue(&group_key(), user, 1, 2);
        (user, Member { certificate, label: "alice".into(), until_secs: n.into() })
    };
    let members = (1..4).map(member).collect();
    GroupRecord { label: "band".into(), members }.encode().expect("few members")
}

fn keeper_record() -> Vec<u8> {
    let user = |n: u8| SecretKey::from_seed(&[n; 32]).user_id();
    let member = |n: u8| (user(n), ListedMember { until_secs: n.into(), label: "alice".into() });
    let keepers = [(user(1), vec![[7; 56], [8; 56]])].into();
    let members = (1..4).map(member).collect();
    KeeperRecord { first_epoch: 3, keepers, members }.encode().expect("few members")
}

fn reader_record() -> Vec<u8> {
    let key = ReadKey::of_epoch(&group_key(), 3).expect("an epoch");
    let reader = |n: u8| {
        let user = SecretKey::from_seed(&[n; 32]).user_id();
        let sealed_key = key.seal_to(&user, &group_key(), 3).expect("a key");
        let group = (n == 2).then(|| group_key().group_id());
        (user, Reader { until_secs: n.into(), label: "alice".into(), group, sealed_key })
    };
    let readers = (1..4).map(reader).collect();
    let groups = [group_key().group_id()].into();
    ReaderRecord { epoch: 3, groups, readers }.encode().expect("few readers")
}

/// Of a reader who has the keys of epochs up to 3.
fn sealing() -> Sealing {
    let key = ReadKey::of_epoch(&group_key(), 3).expect("an epoch");
    Sealing::of_reader(group_key().volume_id(), 3, key)
}

fn sealed_inode() -> Vec<u8> {
    let payload = shared_directory().encode().expect("short");
    sealing().sealer().seal_inode(payload).expect("short")
}

fn encrypted_roots() -> Vec<Vec<u8>> {
    vec![sealed_root::encode(&root(DirectoryRef::default()), Some(&cipher()))]
}

/// Content blocks have one encoding: what is accepted is encoded to the same bytes.
fn block(
    name: &'static str,
    seeds: Vec<Vec<u8>>,
    again: impl Fn(&Bytes) -> Option<Vec<u8>> + 'static,
) -> Target {
    target(name, seeds, move |input| {
        let Some(encoded) = again(&Bytes::copy_from_slice(input)) else { return false };
        assert_eq!(encoded, input, "a block has two encodings");
        true
    })
}

pub(super) fn root(directory: DirectoryRef) -> Root {
    Root {
        block_size_log2: 12,
        mode: 0o755,
        mtime: FileTime { secs: -3, nanos: 5 },
        published_unix_ms: 1_750_000_000_000,
        files: 2,
        dirs: 1,
        symlinks: 1,
        bytes: 9000,
        directory,
        label: None,
        xattrs: None,
        mounted: Default::default(),
    }
}

pub(super) fn entry(name: &str, content: Content) -> DirectoryEntry {
    let mtime = FileTime { secs: 1_700_000_000, nanos: 999_999_999 };
    let name = Bytes::copy_from_slice(name.as_bytes());
    DirectoryEntry { name, mode: 0o4755, mtime, content, xattrs: None, owner: None }
}

pub(super) fn file(name: &str, size_bytes: u64, inode: Option<BlockHash>) -> DirectoryEntry {
    entry(name, Content::Regular { size_bytes, blocks_512: size_bytes.div_ceil(512), inode })
}

pub(super) fn attribute(text: &'static str) -> Bytes {
    Bytes::from_static(text.as_bytes())
}

fn leaf() -> DirectoryBlock {
    let hash = Some(BlockHash([1; 32]));
    let below = DirectoryRef { entries: 9, subdirectories: 2, hash };
    let nodes = Nodes::Leaf(vec![
        DirectoryEntry { xattrs: hash, ..file("a", 9000, hash) },
        entry("b", Content::Directory(below)),
        entry("c", Content::Directory(DirectoryRef::default())),
        file("empty", 0, None),
        entry("link", Content::Symlink(attribute("../target"))),
    ]);
    DirectoryBlock { level: 0, nodes }
}

fn interior() -> DirectoryBlock {
    let child = |n: u8, first_name| Child {
        hash: BlockHash([n; 32]),
        entries: 100,
        subdirectories: 3,
        first_name: attribute(first_name),
    };
    DirectoryBlock { level: 1, nodes: Nodes::Interior(vec![child(1, "a"), child(2, "m")]) }
}

fn inodes() -> Vec<Vec<u8>> {
    let inode = |size_bytes, data| {
        let shape = Shape::new(size_bytes, 12).expect("allowed");
        InodeBlock { shape, data }.encode()
    };
    let pointers = [[1; 32], [0; 32], [3; 32]].concat();
    vec![
        inode(5, Data::Inline(attribute("12345"))),
        inode(9000, Data::Pointers(Bytes::from(pointers))),
        // Its 300 blocks need one indirect block, and the inode one pointer.
        inode(300 << 12, Data::Pointers(Bytes::from(vec![9; 32]))),
    ]
}
