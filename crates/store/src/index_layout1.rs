//! The index as layout 1 wrote it, and how it becomes layout 2: entries gain an owner,
//! nobody, and the sums over owners begin.
//!
//! It is one transaction, so power loss leaves either. Segments stay as they are; records of
//! layout 1 are records without an owner.

use atoll_key::{BlockKind, Key};
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition, TableError};

use crate::Owner;
use crate::index::{
    BLOCKS, Entry, IndexError, LAYOUT, META, OWNERS, be32, be64, encode_owner, entry_crc,
};

const LAYOUT_1: u64 = 1;
const ENTRY_1_BYTES: usize = 45;

const BLOCKS_1: TableDefinition<&[u8; 64], &[u8; ENTRY_1_BYTES]> = TableDefinition::new("blocks");

/// An entry of layout 1.
///
/// | offset | bytes | field |
/// |---|---|---|
/// | 0 | 8 | segment |
/// | 8 | 4 | offset of the record in it |
/// | 12 | 4 | length of the block |
/// | 16 | 1 | kind |
/// | 17 | 8 | version |
/// | 25 | 8 | end of the lease |
/// | 33 | 8 | sequence number |
/// | 41 | 4 | CRC-32 of the key and bytes 0..41 |
fn decode(key: &Key, bytes: &[u8; ENTRY_1_BYTES]) -> Result<Entry, IndexError> {
    let kind = BlockKind::from_u8(bytes[16]);
    let (Ok(kind), true) = (kind, be32(bytes, 41) == entry_crc(key, &bytes[..41])) else {
        return Err(IndexError::Damaged("an entry does not match its checksum".to_owned()));
    };
    Ok(Entry {
        segment: be64(bytes, 0),
        offset: be32(bytes, 8),
        len_bytes: be32(bytes, 12),
        kind,
        long_header: false,
        version: be64(bytes, 17),
        expires_unix_secs: be64(bytes, 25),
        sequence: be64(bytes, 33),
        owner: Owner::NOBODY,
    })
}

/// Whether the index is of layout 1. A new one is of none.
fn is_layout_1(database: &Database) -> Result<bool, IndexError> {
    let meta = match database.begin_read()?.open_table(META) {
        Err(TableError::TableDoesNotExist(_)) => return Ok(false),
        table => table?,
    };
    Ok(meta.get("layout")?.is_some_and(|layout| layout.value() == LAYOUT_1))
}

/// Makes an index of layout 1 one of the present layout.
pub(crate) fn bring_up(database: &Database) -> Result<(), IndexError> {
    if !is_layout_1(database)? {
        return Ok(());
    }
    let transaction = database.begin_write()?;
    {
        let mut meta = transaction.open_table(META)?;
        let number = |name: &str| meta.get(name).map(|value| value.map_or(0, |v| v.value()));
        let held = (number("blocks")?, number("block_bytes")?);
        if held.0 > 0 {
            transaction.open_table(OWNERS)?.insert(&encode_owner(&Owner::NOBODY), held)?;
        } else {
            transaction.open_table(OWNERS)?;
        }
        let old = transaction.open_table(BLOCKS_1)?;
        let mut new = transaction.open_table(BLOCKS)?;
        for item in old.iter()? {
            let (key, entry) = item?;
            let key = Key(*key.value());
            new.insert(&key.0, &decode(&key, entry.value())?.encode(&key))?;
        }
        meta.insert("layout", LAYOUT)?;
    }
    transaction.delete_table(BLOCKS_1)?;
    transaction.commit()?;
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::disk::{Disk, FaultyDisk};
    use crate::index::{Index, OWNERS, SEGMENTS};
    use crate::segment::{
        self, FIRST_RECORD_OFFSET, RecordBody, RecordHeader, SegmentHeader, encode_record_header,
    };
    use crate::{BlockStore, DiskConfig, DiskStore};
    use futures_util::FutureExt;

    const SALT: u64 = 77;

    fn encode(key: &Key, entry: &Entry) -> [u8; ENTRY_1_BYTES] {
        let mut out = [0; ENTRY_1_BYTES];
        out[..8].copy_from_slice(&entry.segment.to_be_bytes());
        out[8..12].copy_from_slice(&entry.offset.to_be_bytes());
        out[12..16].copy_from_slice(&entry.len_bytes.to_be_bytes());
        out[16] = entry.kind as u8;
        out[17..25].copy_from_slice(&entry.version.to_be_bytes());
        out[25..33].copy_from_slice(&entry.expires_unix_secs.to_be_bytes());
        out[33..41].copy_from_slice(&entry.sequence.to_be_bytes());
        let crc = entry_crc(key, &out[..41]);
        out[41..].copy_from_slice(&crc.to_be_bytes());
        out
    }

    fn key(n: u8) -> Key {
        Key([n; 64])
    }

    fn value(n: u8) -> Vec<u8> {
        vec![n; 100]
    }

    /// A store as the program before owners left it: ten blocks in one segment, of whose
    /// index the last two are missing; the lease of block 3 is only there.
    fn store_of_layout_1() -> FaultyDisk {
        let disk = FaultyDisk::new(1);
        let segment = SegmentHeader { layout: 1, number: 1, salt: SALT };
        let mut log = segment::encode_segment_start(&segment).to_vec();
        let mut entries = Vec::new();
        for n in 0..10u8 {
            let (offset, bytes) = (log.len() as u64, value(n));
            let body = RecordBody::Block {
                kind: BlockKind::Content,
                version: 0,
                expires_unix_secs: 9,
                len_bytes: 100,
                value_crc: crc32fast::hash(&bytes),
            };
            let sequence = u64::from(n) + 1;
            let header = RecordHeader { key: key(n), sequence, owner: Owner::NOBODY, body };
            log.extend(encode_record_header(&header, SALT));
            log.extend(bytes);
            log.resize(log.len().next_multiple_of(8), 0);
            let entry = Entry {
                segment: 1,
                offset: offset as u32,
                len_bytes: 100,
                kind: BlockKind::Content,
                long_header: false,
                version: 0,
                expires_unix_secs: if n == 3 { 50 } else { 9 },
                sequence,
                owner: Owner::NOBODY,
            };
            entries.push((entry, log.len() as u64));
        }
        disk.overwrite(&segment::file_name(1), log);
        let index = Index::create(Arc::new(disk.clone()), 1 << 20).expect("made");
        let database = index.database().expect("open");
        let transaction = database.begin_write().expect("begun");
        {
            let mut blocks = transaction.open_table(BLOCKS_1).expect("made");
            for (n, (entry, _)) in (0..8u8).zip(&entries) {
                blocks.insert(&key(n).0, &encode(&key(n), entry)).expect("inserted");
            }
            let end = entries[7].1;
            let live = end - FIRST_RECORD_OFFSET;
            let mut table = transaction.open_table(SEGMENTS).expect("made");
            table.insert(1, (SALT, end, live, 0)).expect("inserted");
            let mut meta = transaction.open_table(META).expect("made");
            for (name, number) in [
                ("layout", 1),
                ("segment", 1),
                ("offset", end),
                ("next_sequence", 9),
                ("blocks", 8),
                ("block_bytes", 800),
            ] {
                meta.insert(name, number).expect("inserted");
            }
        }
        transaction.commit().expect("committed");
        disk
    }

    fn open(disk: &FaultyDisk) -> DiskStore {
        let config = DiskConfig { capacity_bytes: 64 << 20, ..DiskConfig::default() };
        DiskStore::open_inline(Arc::new(disk.clone()), config).expect("opens")
    }

    fn now<T>(work: impl Future<Output = T>) -> T {
        work.now_or_never().expect("an inline store does not wait")
    }

    #[test]
    fn a_store_of_layout_1_opens_with_all_its_blocks_charged_to_nobody() {
        let disk = store_of_layout_1();
        for life in 0..2 {
            let store = open(&disk);
            assert!(!store.report().rebuilt_index, "renewed leases would be lost");
            store.check_invariants();
            for n in 0..10 {
                let block = now(store.get(&key(n))).expect("sound").expect("held");
                assert_eq!((&block.bytes[..], block.info.owner), (&value(n)[..], Owner::NOBODY));
            }
            let lease = store.info(&key(3)).expect("readable").map(|info| info.expires_unix_secs);
            assert_eq!(lease, Some(50), "life {life}");
            assert_eq!(store.usage_of(&Owner::NOBODY).publisher.blocks, 10);
        }
    }

    #[test]
    fn records_with_owners_are_never_added_to_a_segment_of_layout_1() {
        let disk = store_of_layout_1();
        let before = disk.contents(&segment::file_name(1)).expect("there");
        let owner = Owner { publisher: [1; 16], ip: [2; 16] };
        {
            let store = open(&disk);
            let held = now(store.get(&key(1))).expect("sound").expect("held");
            let info = crate::BlockInfo { key: key(77), owner, ..held.info };
            now(store.put(vec![crate::StoredBlock { info, ..held }])).expect("kept");
        }
        assert_eq!(disk.contents(&segment::file_name(1)), Some(before));
        disk.remove(crate::index::FILE_NAME).expect("removed");
        let store = open(&disk);
        assert_eq!(store.info(&key(77)).expect("readable").map(|info| info.owner), Some(owner));
        assert_eq!(store.usage().blocks, 11);
    }

    #[test]
    fn power_loss_while_an_index_is_brought_up_leaves_either_layout() {
        for after in 1..60 {
            let disk = store_of_layout_1();
            disk.fail_power_after(after);
            let config = DiskConfig { capacity_bytes: 64 << 20, ..DiskConfig::default() };
            drop(DiskStore::open_inline(Arc::new(disk.clone()), config));
            disk.power_cycle();
            let store = open(&disk);
            store.check_invariants();
            assert_eq!(store.usage().blocks, 10, "power lost after {after} changes");
            let lease = store.info(&key(3)).expect("readable").map(|info| info.expires_unix_secs);
            assert_eq!(lease, Some(50), "power lost after {after} changes");
        }
    }

    #[test]
    fn a_damaged_entry_of_layout_1_is_not_believed() {
        let disk = store_of_layout_1();
        {
            let index = Index::open(Arc::new(disk.clone()), 1 << 20);
            drop(index.expect("opens"));
        }
        // It is of layout 2 now; what was sound before is read back with its checksum.
        let (index, contents) = Index::open(Arc::new(disk), 1 << 20).expect("opens");
        assert_eq!(contents.expect("there").checkpoint.blocks, 8);
        let transaction = index.database().expect("open").begin_read().expect("begun");
        assert!(transaction.open_table(BLOCKS_1).is_err(), "the old table is gone");
        assert!(transaction.open_table(OWNERS).is_ok());
        let entry = [0; ENTRY_1_BYTES];
        assert!(decode(&key(1), &entry).is_err());
    }
}
