//! A small file system with one of everything, places in it to damage, and a device that
//! tells of accesses beyond it.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use atoll_env::Env;
use atoll_tfs::Progress;
use atoll_tfs::device::{Device, FaultyDevice};
use atoll_tfs::format::superblock::Superblock;
use atoll_tfs::fs::{MountOptions, Tfs};
use atoll_tfs::mkfs::{MkfsOptions, mkfs};
use atoll_tfs::records::layout::{Place, RecordsLayout};
use atoll_vfs::{
    Answer, Caller, Errno, FileSystem, Groups, InodeNumber, OpenFlags, Writer, XattrFlags,
};
use bytes::Bytes;

pub(super) const ME: Caller = Caller { uid: 0, gid: 0, pid: 0, umask: 0, groups: Groups::None };
pub(super) const BLOCK: usize = 1024;
const LEN_BYTES: usize = 4 << 20;
const CHUNK: usize = 512;

/// The answer of a call that is ready at once.
pub(super) fn now<T>(answer: Answer<T>) -> Result<T, Errno> {
    match pin!(answer).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result,
        Poll::Pending => panic!("a call of TFS waits for nothing"),
    }
}

/// Mounts without anything in the background.
pub(super) fn mount(env: &Env, device: Arc<dyn Device>) -> Result<Tfs, atoll_tfs::fs::MountError> {
    let options =
        MountOptions { background: false, cache_bytes: 1 << 20, ..MountOptions::default() };
    Tfs::mount(env.clone(), device, &options).map(|(tfs, _)| tfs)
}

/// The sound image.
pub(super) struct Base {
    pub bytes: Arc<Vec<u8>>,
    /// Inodes by path.
    pub inodes: BTreeMap<String, u32>,
}

fn number(inode: InodeNumber) -> u32 {
    if inode == InodeNumber::ROOT { 2 } else { inode.0 as u32 }
}

struct Builder {
    tfs: Tfs,
    inodes: BTreeMap<String, u32>,
}

impl Builder {
    fn parent(&self, path: &str) -> (InodeNumber, Vec<u8>) {
        let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
        let parent = match self.inodes[parent] {
            2 => InodeNumber::ROOT,
            number => InodeNumber(u64::from(number)),
        };
        (parent, name.as_bytes().to_vec())
    }

    fn note(&mut self, path: &str, inode: InodeNumber) -> InodeNumber {
        self.inodes.insert(path.to_owned(), number(inode));
        self.tfs.forget(inode, 1);
        inode
    }

    fn directory(&mut self, path: &str) -> InodeNumber {
        let (parent, name) = self.parent(path);
        let entry = now(self.tfs.mkdir(ME, parent, &name, 0o755)).unwrap();
        self.note(path, entry.attr.inode)
    }

    fn file(&mut self, path: &str, len: usize) -> InodeNumber {
        let (parent, name) = self.parent(path);
        let create = self.tfs.create(ME, parent, &name, 0o644, OpenFlags::WRITE);
        let (entry, opened) = now(create).unwrap();
        let inode = entry.attr.inode;
        let bytes: Vec<u8> = (0..len).map(|i| (i / 7 + path.len()) as u8).collect();
        let written =
            now(self.tfs.write(Writer::At(ME), inode, opened.handle, 0, Bytes::from(bytes)))
                .unwrap();
        assert_eq!(written as usize, len);
        now(self.tfs.close(inode, opened.handle)).unwrap();
        self.note(path, inode)
    }

    fn symlink(&mut self, path: &str, target: &[u8]) {
        let (parent, name) = self.parent(path);
        let entry = now(self.tfs.symlink(ME, parent, &name, target)).unwrap();
        self.note(path, entry.attr.inode);
    }

    fn set(&self, inode: InodeNumber, name: &[u8], value: &'static [u8]) {
        let value = Bytes::from_static(value);
        now(self.tfs.setxattr(ME, inode, name, value, XattrFlags::default())).unwrap();
    }
}

impl Base {
    /// Makes it, in one group of blocks.
    pub(super) fn new(env: &Env) -> Base {
        Base::of_len(env, LEN_BYTES)
    }

    /// Makes it on a disk of two groups; transparent files lie in the second.
    pub(super) fn of_two_groups(env: &Env) -> Base {
        Base::of_len(env, 3 * LEN_BYTES)
    }

    fn of_len(env: &Env, len_bytes: usize) -> Base {
        let device = FaultyDevice::new(len_bytes, 1);
        let shared: Arc<dyn Device> = Arc::new(device.clone());
        let options = MkfsOptions {
            block_bytes: BLOCK as u32,
            bytes_per_inode: 8192,
            reserved_percent: 5,
            label: "corrupt".to_owned(),
            uuid: [7; 16],
            random: [9; 48],
            now_unix_secs: 1_700_000_000,
            root_owner: (0, 0),
            is_blank: true,
            progress: Progress::default(),
        };
        mkfs(&shared, &options).unwrap();
        let tfs = mount(env, shared).unwrap();
        let mut b = Builder { tfs, inodes: BTreeMap::from([(String::new(), 2)]) };
        b.directory("dir");
        b.directory("dir/sub");
        b.directory("other");
        b.file("dir/small", 3000);
        b.file("dir/file", 20_000);
        b.file("dir/large", 400_000);
        b.file("dir/sub/deep", 10);
        b.symlink("short", b"dir/small");
        b.symlink("long", &[b'x'; 200]);
        let attr = b.file("attr", 100);
        b.set(attr, b"user.colour", b"blue");
        b.directory("many");
        for n in 0..120 {
            let name = format!("many/a name of some length, number {n}");
            b.symlink(&name, b"target");
        }
        let contributed = b.directory("contributed");
        b.set(contributed, b"user.tfs.transparent", b"1");
        b.file("contributed/t0", 30_000);
        b.file("contributed/t1", 5000);
        b.tfs.unmount().unwrap();
        Base { bytes: Arc::new(device.bytes()), inodes: b.inodes }
    }

    /// A copy to damage.
    pub(super) fn image(&self) -> Image<'_> {
        Image { bytes: self.bytes.to_vec(), base: self }
    }
}

/// A copy of the image, to damage. Places are bytes of the image.
pub(super) struct Image<'a> {
    pub bytes: Vec<u8>,
    pub base: &'a Base,
}

impl Image<'_> {
    pub(super) fn u16(&self, at: usize) -> u16 {
        u16::from_le_bytes(self.bytes[at..at + 2].try_into().unwrap())
    }

    pub(super) fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.bytes[at..at + 4].try_into().unwrap())
    }

    pub(super) fn put16(&mut self, at: usize, value: u16) {
        self.bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
    }

    pub(super) fn put32(&mut self, at: usize, value: u32) {
        self.bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    pub(super) fn put64(&mut self, at: usize, value: u64) {
        self.bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }

    /// A field of the superblock.
    pub(super) fn superblock(&self, at: usize) -> usize {
        1024 + at
    }

    pub(super) fn groups(&self) -> u32 {
        (self.u32(self.superblock(4)) - 1).div_ceil(self.u32(self.superblock(32)))
    }

    /// A field of the descriptor of the first group.
    pub(super) fn descriptor(&self, at: usize) -> usize {
        2 * BLOCK + at
    }

    pub(super) fn block(&self, number: u32) -> usize {
        number as usize * BLOCK
    }

    pub(super) fn number(&self, path: &str) -> u32 {
        self.base.inodes[path]
    }

    /// A field of an inode.
    pub(super) fn inode(&self, number: u32, at: usize) -> usize {
        let per_group = self.u32(self.superblock(40));
        let (group, index) = ((number - 1) / per_group, (number - 1) % per_group);
        let table = self.u32(self.descriptor(32 * group as usize + 8));
        let inode_bytes = usize::from(self.u16(self.superblock(88)));
        self.block(table) + index as usize * inode_bytes + at
    }

    /// A field of the inode of a path.
    pub(super) fn inode_of(&self, path: &str, at: usize) -> usize {
        self.inode(self.number(path), at)
    }

    /// One of the fifteen pointers of a path's inode.
    pub(super) fn pointer(&self, path: &str, index: usize) -> usize {
        self.inode_of(path, 40 + 4 * index)
    }

    /// The entry of a name in the first block of a directory.
    pub(super) fn entry(&self, directory: &str, name: &str) -> usize {
        let start = self.block(self.u32(self.pointer(directory, 0)));
        let mut at = start;
        while at < start + BLOCK {
            let len = usize::from(self.bytes[at + 6]);
            if self.u32(at) != 0 && &self.bytes[at + 8..at + 8 + len] == name.as_bytes() {
                return at;
            }
            at += usize::from(self.u16(at + 4));
        }
        panic!("{directory} has no {name} in its first block");
    }

    /// The disk's block of a block of the records' file.
    pub(super) fn records_block(&self, block: u32) -> u32 {
        let pointers = self.inode(5, 40);
        let each = (BLOCK / 4) as u32;
        match block {
            0..12 => self.u32(pointers + 4 * block as usize),
            _ if block < 12 + each => {
                let table = self.block(self.u32(pointers + 48));
                self.u32(table + 4 * (block as usize - 12))
            }
            _ => {
                let rest = block - 12 - each;
                let top = self.block(self.u32(pointers + 52));
                let table = self.block(self.u32(top + 4 * (rest / each) as usize));
                self.u32(table + 4 * (rest % each) as usize)
            }
        }
    }

    pub(super) fn layout(&self) -> RecordsLayout {
        let bytes = self.bytes[1024..2048].try_into().unwrap();
        let superblock = Superblock::decode(bytes, self.bytes.len() as u64).unwrap();
        RecordsLayout::new(&superblock, RecordsLayout::journal_blocks_for(&superblock)).unwrap()
    }

    pub(super) fn place(&self, place: Place) -> usize {
        self.block(self.records_block(place.block)) + place.at
    }

    /// A copy of the records' header.
    pub(super) fn header(&self, copy: u32) -> usize {
        self.block(self.records_block(copy))
    }

    /// Changes both copies of the header, with the right checksums.
    pub(super) fn change_headers(&mut self, change: impl Fn(&mut Self, usize)) {
        for copy in 0..2 {
            let at = self.header(copy);
            change(self, at);
            let checksum = crc32fast::hash(&self.bytes[at..at + 508]);
            self.put32(at + 508, checksum);
        }
    }

    /// Changes the group's summary, with the right checksum.
    pub(super) fn change_summary(&mut self, at: usize, value: u32) {
        let summary = self.place(self.layout().summary(0));
        self.put32(summary + at, value);
        let checksum = crc32fast::hash(&self.bytes[summary..summary + 60]);
        self.put32(summary + 60, checksum);
    }

    pub(super) fn map_entry(&self, path: &str) -> usize {
        self.place(self.layout().map_entry(self.number(path)))
    }

    /// Changes a field of a map entry, with the right checksum.
    pub(super) fn change_map_entry(&mut self, path: &str, at: usize, value: u32) {
        let entry = self.map_entry(path);
        self.put32(entry + at, value);
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&self.number(path).to_le_bytes());
        hasher.update(&self.bytes[entry..entry + 28]);
        self.put32(entry + 28, hasher.finalize());
    }

    /// The first block of a transparent file.
    pub(super) fn first_extent(&self, path: &str) -> u32 {
        self.u32(self.map_entry(path) + 8)
    }

    pub(super) fn extent_head(&self, path: &str) -> usize {
        self.place(self.layout().extent_head(self.first_extent(path)))
    }

    /// Sets or clears a bit of a bitmap that begins at a byte.
    pub(super) fn put_bit(&mut self, bitmap: usize, bit: u32, value: bool) {
        let byte = &mut self.bytes[bitmap + bit as usize / 8];
        let mask = 1 << (bit % 8);
        *byte = if value { *byte | mask } else { *byte & !mask };
    }

    pub(super) fn is_set(&self, bitmap: usize, bit: u32) -> bool {
        self.bytes[bitmap + bit as usize / 8] & 1 << (bit % 8) != 0
    }

    /// ext2's block bitmap; bit n is block n + 1.
    pub(super) fn block_bitmap(&self) -> usize {
        self.block(self.u32(self.descriptor(0)))
    }

    /// ext2's inode bitmap; bit n is inode n + 1.
    pub(super) fn inode_bitmap(&self) -> usize {
        self.block(self.u32(self.descriptor(4)))
    }

    /// As after a crash behind a commit: what differs from the sound image, but for the header
    /// and the journal, stands in the journal and not yet at home.
    pub(super) fn journaled(&mut self) {
        let sound = self.base.image();
        let layout = sound.layout();
        let area = |area: u32| {
            let first = layout.journal_area(area);
            (first..first + layout.journal_blocks()).map(|block| sound.records_block(block))
        };
        let apart: BTreeSet<u32> =
            (0..2).map(|copy| sound.records_block(copy)).chain(area(0)).chain(area(1)).collect();
        let place = |number: u32| number as usize * BLOCK..(number as usize + 1) * BLOCK;
        // A descriptor block lists so many.
        let most = (BLOCK - 24) / 4;
        let changed: Vec<u32> = (0..(sound.bytes.len() / BLOCK) as u32)
            .filter(|number| !apart.contains(number))
            .filter(|number| self.bytes[place(*number)] != sound.bytes[place(*number)])
            .take(most.min(layout.journal_blocks() as usize - 2))
            .collect();
        let settled =
            |at: usize| u64::from_le_bytes(sound.bytes[at + 184..at + 192].try_into().unwrap());
        let number = settled(sound.header(0)).max(settled(sound.header(1))) + 1;
        let mut bytes = vec![0; BLOCK];
        bytes[..8].copy_from_slice(b"AtollTxn");
        bytes[8..16].copy_from_slice(&number.to_le_bytes());
        bytes[16..20].copy_from_slice(&(changed.len() as u32).to_le_bytes());
        for (i, home) in changed.iter().enumerate() {
            bytes[24 + 4 * i..28 + 4 * i].copy_from_slice(&home.to_le_bytes());
        }
        for home in &changed {
            bytes.extend_from_slice(&self.bytes[place(*home)]);
            self.bytes[place(*home)].copy_from_slice(&sound.bytes[place(*home)]);
        }
        let hash = blake3::hash(&bytes);
        bytes.extend_from_slice(b"AtollEnd");
        bytes.extend_from_slice(&number.to_le_bytes());
        bytes.extend_from_slice(hash.as_bytes());
        bytes.resize(bytes.len().next_multiple_of(BLOCK), 0);
        for (block, bytes) in area((number % 2) as u32).zip(bytes.chunks_exact(BLOCK)) {
            self.bytes[place(block)].copy_from_slice(bytes);
        }
        // Mounted, when the power went.
        for copy in 0..2 {
            let at = sound.header(copy);
            self.put32(at + 92, 1);
            let checksum = crc32fast::hash(&self.bytes[at..at + 508]);
            self.put32(at + 508, checksum);
        }
    }

    pub(super) fn device(self) -> Arc<dyn Device> {
        Arc::new(Layered::over(Arc::new(self.bytes)))
    }
}

/// A device whose writes lie over bytes that are shared; it panics when a call reaches
/// beyond its end.
#[derive(Debug)]
pub(super) struct Layered {
    below: Arc<Vec<u8>>,
    written: Mutex<BTreeMap<usize, [u8; CHUNK]>>,
}

impl Layered {
    pub(super) fn over(below: Arc<Vec<u8>>) -> Layered {
        Layered { below, written: Mutex::default() }
    }

    fn chunk(&self, written: &BTreeMap<usize, [u8; CHUNK]>, number: usize) -> [u8; CHUNK] {
        written.get(&number).copied().unwrap_or_else(|| {
            let mut bytes = [0; CHUNK];
            let start = (number * CHUNK).min(self.below.len());
            let end = (start + CHUNK).min(self.below.len());
            bytes[..end - start].copy_from_slice(&self.below[start..end]);
            bytes
        })
    }

    fn check(&self, offset: u64, len: usize) {
        let end = offset.checked_add(len as u64).expect("an offset of sense");
        assert!(end <= self.below.len() as u64, "{len} bytes at {offset} are outside the image");
    }

    /// All of it.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.below.len()];
        self.read_at(0, &mut bytes).unwrap();
        bytes
    }
}

impl Device for Layered {
    fn len_bytes(&self) -> u64 {
        self.below.len() as u64
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.check(offset, buffer.len());
        let written = self.written.lock().unwrap();
        let mut at = offset as usize;
        let mut rest = buffer;
        while !rest.is_empty() {
            let within = at % CHUNK;
            let (part, later) = rest.split_at_mut((CHUNK - within).min(rest.len()));
            let len = part.len();
            part.copy_from_slice(&self.chunk(&written, at / CHUNK)[within..within + len]);
            rest = later;
            at += len;
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.check(offset, data.len());
        let mut written = self.written.lock().unwrap();
        let mut at = offset as usize;
        let mut rest = data;
        while !rest.is_empty() {
            let within = at % CHUNK;
            let (part, later) = rest.split_at((CHUNK - within).min(rest.len()));
            let mut chunk = self.chunk(&written, at / CHUNK);
            chunk[within..within + part.len()].copy_from_slice(part);
            written.insert(at / CHUNK, chunk);
            rest = later;
            at += part.len();
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}
