//! The segment log's headers, and a whole store on a disk that an attacker has edited.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use atoll_key::{BlockKind, Key, KeyRange};
use atoll_store::disk::{Disk, FaultyDisk};
use atoll_store::segment::{
    self, FIRST_RECORD_OFFSET, RECORD_HEADER_BYTES, RecordBody, RecordHeader, SECOND_HEADER_OFFSET,
    SEGMENT_HEADER_BYTES, SegmentHeader,
};
use atoll_store::{BlockInfo, BlockStore, DiskConfig, DiskStore, Owner, StoreError, StoredBlock};
use bytes::Bytes;
use futures_util::FutureExt;

use super::{Target, key, target};

const SALT: u64 = 5;
const OWNER: Owner = Owner { publisher: [7; 16], ip: [8; 16] };

pub(super) fn targets() -> Vec<Target> {
    let start = segment::encode_segment_start(&SegmentHeader { number: 7, salt: SALT }).to_vec();
    let header = start[..SEGMENT_HEADER_BYTES].to_vec();
    let mut targets = vec![
        target("store/segment-start", vec![start], |input| {
            segment::decode_segment_start(input).is_ok()
        }),
        target("store/segment-header", vec![header], |input| {
            // Once as it is, once with the checksum made right.
            let mut repaired = input.to_vec();
            repair_segment_header(&mut repaired);
            let _ = segment::decode_segment_header(&repaired);
            segment::decode_segment_header(input).is_ok()
        }),
        target("store/record-header", record_headers(), |input| {
            let mut repaired = input.to_vec();
            repair_record(&mut repaired, SALT);
            if let Ok(header) = segment::decode_record_header(&repaired, SALT) {
                let len_bytes = header.value_bytes() as usize;
                assert!(len_bytes <= atoll_key::MAX_BLOCK_BYTES, "a length beyond the limit");
            }
            segment::decode_record_header(input, SALT).is_ok()
        }),
    ];
    targets.extend(whole());
    targets
}

fn record_headers() -> Vec<Vec<u8>> {
    let block = RecordBody::Block {
        kind: BlockKind::Signed,
        version: 3,
        expires_unix_secs: 99,
        len_bytes: 500,
        value_crc: 0xdead_beef,
    };
    let lease = RecordBody::Lease { expires_unix_secs: 8 };
    let removal = RecordBody::Removal { target_segment: 4 };
    // What is removed has no owner.
    let owned = [(block, OWNER), (lease, OWNER)];
    let bodies = [block, removal, lease].map(|body| (body, Owner::NOBODY)).into_iter().chain(owned);
    bodies
        .map(|(body, owner)| RecordHeader { key: key(1), sequence: 12, owner, body })
        .map(|header| segment::encode_record_header(&header, SALT).to_vec())
        .collect()
}

fn repair_segment_header(header: &mut [u8]) {
    if header.len() >= SEGMENT_HEADER_BYTES {
        let crc = crc32fast::hash(&header[..32]);
        header[32..36].copy_from_slice(&crc.to_be_bytes());
    }
}

/// Makes a record's checksums right: that of its value, if that is there, and its header's.
fn repair_record(record: &mut [u8], salt: u64) {
    if record.len() < RECORD_HEADER_BYTES {
        return;
    }
    let (header, rest) = record.split_at_mut(RECORD_HEADER_BYTES);
    let len = u32::from_be_bytes(header[12..16].try_into().expect("4 bytes")) as usize;
    if let Some(value) = rest.get(..len) {
        header[8..12].copy_from_slice(&crc32fast::hash(value).to_be_bytes());
    }
    let mut crc = crc32fast::Hasher::new();
    crc.update(&salt.to_be_bytes());
    crc.update(&header[8..]);
    header[4..8].copy_from_slice(&crc.finalize().to_be_bytes());
}

fn repair_segment(bytes: &mut [u8]) {
    for at in [0, SECOND_HEADER_OFFSET] {
        if let Some(header) = bytes.get_mut(at..) {
            repair_segment_header(header);
        }
    }
    let Ok(SegmentHeader { salt, .. }) = segment::decode_segment_start(bytes) else { return };
    for at in (FIRST_RECORD_OFFSET as usize..bytes.len()).step_by(segment::ALIGNMENT) {
        if bytes[at..].starts_with(b"ATRC") {
            repair_record(&mut bytes[at..], salt);
        }
    }
}

/// Make the checksums of the mutated segments right, as no accident would.
const REPAIR: u8 = 1;
/// Leave the index away, so that all is read from the segments.
const NO_INDEX: u8 = 2;

/// A whole store on a disk that was edited: its segments, or its index.
fn whole() -> Vec<Target> {
    let original = Arc::new(Original::new());
    let valid = |flags| original.input(flags);
    let seeds = vec![valid(0), valid(REPAIR), valid(NO_INDEX), valid(NO_INDEX | REPAIR)];
    let segments = {
        let original = original.clone();
        target("store/segments", seeds, move |input| original.survives_in_segments(input))
    };
    // A few changes that change nothing, for mutations to work on.
    let seeds = [1, 6].map(|count| (0..count).flat_map(|n| [n, n, n * 40, 0]).collect()).into();
    let index = target("store/index", seeds, move |input| original.survives_in_index(input));
    // The disk is in memory: the index (the database's smallest file), kept twice over by
    // the disk and once by the database's own cache; the walk's buffer.
    [segments, index].map(|target| Target { fixed_bytes: 32 << 20, ..target }).into()
}

/// A small store, as its files and as what was put into it.
struct Original {
    index_name: String,
    index: Vec<u8>,
    /// Where the index has something other than zeros.
    index_places: Vec<usize>,
    segments: Vec<(String, Vec<u8>)>,
    /// Whatever was ever put under a key.
    put: BTreeMap<Key, BTreeSet<Bytes>>,
    live: BTreeSet<Key>,
}

fn config() -> DiskConfig {
    DiskConfig {
        capacity_bytes: 8 << 20,
        segment_bytes: 8 << 10,
        index_cache_bytes: 1 << 20,
        free_reserve_bytes: 0,
        ..DiskConfig::default()
    }
}

fn stored(n: u8, kind: BlockKind, version: u64, bytes: Vec<u8>) -> StoredBlock {
    let len_bytes = bytes.len() as u32;
    let owner = if n.is_multiple_of(2) { Owner::NOBODY } else { OWNER };
    let info = BlockInfo { key: key(n), kind, version, expires_unix_secs: 1000, len_bytes, owner };
    StoredBlock { info, bytes: Bytes::from(bytes) }
}

/// The store is opened inline: its futures do their work when first polled.
fn now<T>(work: impl Future<Output = T>) -> T {
    work.now_or_never().expect("an inline store does not wait")
}

impl Original {
    fn new() -> Original {
        let disk = FaultyDisk::new(1);
        let mut put: BTreeMap<Key, BTreeSet<Bytes>> = BTreeMap::new();
        let mut live = BTreeSet::new();
        {
            let store = DiskStore::open_inline(Arc::new(disk.clone()), config()).expect("opens");
            let mut keep = |block: StoredBlock| {
                put.entry(block.info.key).or_default().insert(block.bytes.clone());
                live.insert(block.info.key);
                now(store.put(vec![block])).expect("there is room");
            };
            for n in 0..20 {
                keep(stored(n, BlockKind::Content, 0, vec![n; 37 * usize::from(n)]));
            }
            for version in [1, 2, 3] {
                keep(stored(99, BlockKind::Signed, version, vec![version as u8; 400]));
            }
            store.renew(&[key(3), key(4)], 2000, OWNER).expect("held");
            now(store.remove(vec![key(5)])).expect("removed");
            live.remove(&key(5));
            now(store.flush()).expect("flushed");
        }
        let mut files: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        for name in disk.list().expect("powered") {
            let bytes = disk.contents(&name).expect("it was listed");
            files.insert(name, bytes);
        }
        let (segments, rest): (Vec<_>, Vec<_>) =
            files.into_iter().partition(|(name, _)| segment::parse_file_name(name).is_some());
        let (index_name, index) = rest.into_iter().next().expect("a store has an index");
        let index_places = (0..index.len()).filter(|at| index[*at] != 0).collect();
        Original { index_name, index, index_places, segments, put, live }
    }

    /// One byte of flags and the segments: each 4 bytes length and its bytes, in the order
    /// of their names.
    fn input(&self, flags: u8) -> Vec<u8> {
        let mut out = vec![flags];
        for (_, bytes) in &self.segments {
            out.extend_from_slice(&(bytes.len() as u32).to_be_bytes());
            out.extend_from_slice(bytes);
        }
        out
    }

    fn survives_in_segments(&self, input: &[u8]) -> bool {
        let Some((&flags, mut rest)) = input.split_first() else { return false };
        let disk = FaultyDisk::new(1);
        if flags & NO_INDEX == 0 {
            disk.overwrite(&self.index_name, self.index.clone());
        }
        for (name, _) in &self.segments {
            let Some((len, bytes)) = rest.split_first_chunk::<4>() else { break };
            let len = (u32::from_be_bytes(*len) as usize).min(bytes.len());
            let (bytes, behind) = bytes.split_at(len);
            let mut bytes = bytes.to_vec();
            rest = behind;
            if flags & REPAIR != 0 {
                repair_segment(&mut bytes);
            }
            disk.overwrite(name, bytes);
        }
        self.survives(disk, flags & REPAIR == 0)
    }

    /// Changes bytes of the index: each change is 3 bytes place, 1 byte to XOR.
    fn survives_in_index(&self, input: &[u8]) -> bool {
        let disk = FaultyDisk::new(1);
        let mut index = self.index.clone();
        for change in input.chunks_exact(4) {
            let place = u32::from_be_bytes([0, change[0], change[1], change[2]]) as usize;
            index[self.index_places[place % self.index_places.len()]] ^= change[3];
        }
        disk.overwrite(&self.index_name, index);
        for (name, bytes) in &self.segments {
            disk.overwrite(name, bytes.clone());
        }
        self.survives(disk, true)
    }

    /// Opens and reads a store of mutated files; true if everything put is there. With
    /// right checksums around wrong bytes (not `is_checked`) a store cannot know better.
    fn survives(&self, disk: FaultyDisk, is_checked: bool) -> bool {
        let Ok(store) = DiskStore::open_inline(Arc::new(disk), config()) else { return false };
        let mut whole = self.read(&store, is_checked);
        let listed = store.list(KeyRange::full(), 1000);
        whole &= listed.is_ok_and(|listed| {
            listed.iter().map(|info| info.key).collect::<BTreeSet<_>>() == self.live
        });
        let mut from = None;
        for _ in 0..100 {
            let Ok(step) = now(store.scrub(from, 4096)) else { break };
            from = step.next;
            if from.is_none() {
                break;
            }
        }
        let new = stored(200, BlockKind::Content, 0, vec![200; 50]);
        if now(store.put(vec![new.clone()])).is_ok() {
            let got = now(store.get(&new.info.key));
            let damaged = matches!(got, Err(StoreError::Corrupted { .. }));
            assert!(damaged || got == Ok(Some(new)), "what was just put is something else");
        }
        let _ = now(store.remove_expired(1500));
        let _ = now(store.reclaim(1 << 20));
        self.read(&store, is_checked);
        whole
    }

    /// Whether every block that is live is there; those that are there must be right.
    fn read(&self, store: &DiskStore, is_checked: bool) -> bool {
        let mut whole = true;
        for (key, put) in &self.put {
            match now(store.get(key)) {
                Ok(Some(block)) => {
                    let is_right = put.contains(&block.bytes) && block.info.key == *key;
                    assert!(is_right || !is_checked, "bytes that nobody put under {key}");
                }
                Ok(None) => whole &= !self.live.contains(key),
                Err(_) => whole = false,
            }
        }
        whole
    }
}
