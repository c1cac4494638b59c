//! "This policy allows block allocation for ordinary files to proceed exactly as it would if
//! there were no transparent files present" (§3.1): the same calls on two disks, one empty of
//! and one full of transparent data, put ordinary files into the same inodes and blocks, but
//! for the few that transparent files' directories take (§3.2).

use std::collections::BTreeMap;
use std::sync::Arc;

use atoll_env::TokioRuntime;
use atoll_tfs::device::Device;
use atoll_tfs::ext2::Ext2;
use atoll_tfs::format::inode::{DIRECT, Inode, SHORT_TARGET_BYTES};
use atoll_tfs::fs::{MountOptions, Tfs, read_superblock};
use atoll_tfs::meta::Meta;
use atoll_tfs::mkfs::mkfs;
use atoll_vfs::{
    Errno, FileKind, FileSystem, Handle, InodeNumber, OpenFlags, RenameFlags, SetAttr, Writer,
    XattrFlags,
};
use bytes::Bytes;

use crate::calls::{ME, ROOT, contribution, write};
use crate::dice::Dice;
use crate::e2fsck::assert_image_clean;
use crate::mkfs::options;
use crate::sparse::SparseDevice;

/// Bytes of transparent files lie below, those of ordinary ones are this.
const ORDINARY_BYTE: u8 = 250;
/// Calls of a workload.
const CALLS: usize = 1500;

fn mount(device: &SparseDevice) -> Tfs {
    let env = Arc::new(TokioRuntime::current());
    let quiet = MountOptions { background: false, ..MountOptions::default() };
    Tfs::mount(env, Arc::new(device.clone()), &quiet).unwrap().0
}

/// Two disks with a directory of transparent files, empty on the one; on the other they fill
/// the disk.
pub(crate) async fn pair(block_bytes: u32, groups: usize) -> (SparseDevice, SparseDevice) {
    let group_bytes = 8 * block_bytes as usize * block_bytes as usize;
    let empty = SparseDevice::new(groups * group_bytes);
    mkfs(&(Arc::new(empty.clone()) as Arc<dyn Device>), &options(block_bytes)).unwrap();
    let tfs = mount(&empty);
    contribution(&tfs).await;
    tfs.unmount().unwrap();
    let full = empty.copy();
    let tfs = mount(&full);
    fill_with_transparent_files(&tfs, block_bytes as usize).await;
    tfs.unmount().unwrap();
    (empty, full)
}

/// Files of many sizes, in directories of a hundred, until not even a small one finds room.
async fn fill_with_transparent_files(tfs: &Tfs, block_bytes: usize) {
    let top = tfs.lookup(ME, ROOT, b"contributed").await.unwrap().attr.inode;
    let mut dice = Dice::new(1);
    let mut directory = top;
    let mut number = 0u64;
    for largest in [400, 20, 1] {
        loop {
            if number.is_multiple_of(100) {
                let name = format!("d{}", number / 100);
                directory = tfs.mkdir(ME, top, name.as_bytes(), 0o755).await.unwrap().attr.inode;
            }
            let len = (dice.below(largest) as usize + 1) * block_bytes;
            let name = format!("t{number}");
            let bytes = vec![(number % 200 + 1) as u8; len];
            number += 1;
            match write(tfs, directory, &name, &bytes).await {
                Ok(_) => {}
                Err(Errno::ENOSPC) => {
                    tfs.unlink(ME, directory, name.as_bytes()).await.unwrap();
                    break;
                }
                Err(errno) => panic!("{errno:?}"),
            }
        }
    }
}

/// A workload of ordinary files: what it does follows from the seed and from what the calls
/// answer.
struct Workload<'a> {
    tfs: &'a Tfs,
    dice: Dice,
    block_bytes: u64,
    directories: Vec<(InodeNumber, Option<(InodeNumber, String)>)>,
    files: Vec<(InodeNumber, String)>,
    named: u64,
}

impl<'a> Workload<'a> {
    fn new(tfs: &'a Tfs, seed: u64, block_bytes: u32) -> Workload<'a> {
        Workload {
            tfs,
            dice: Dice::new(seed),
            block_bytes: u64::from(block_bytes),
            directories: vec![(ROOT, None)],
            files: Vec::new(),
            named: 0,
        }
    }

    fn name(&mut self) -> String {
        self.named += 1;
        // Some long, so that directories grow.
        let tail = if self.dice.one_in(3) { "x".repeat(60) } else { String::new() };
        format!("n{}{tail}", self.named)
    }

    fn directory(&mut self) -> InodeNumber {
        // Directories at the top are spread over the disk, those below stay near.
        if self.dice.one_in(8) { ROOT } else { self.dice.pick(&self.directories).unwrap().0 }
    }

    /// A length as users have them: most are short, most bytes are in long ones.
    fn len_bytes(&mut self) -> u64 {
        let blocks = match self.dice.below(100) {
            0..60 => self.dice.below(12),
            60..92 => self.dice.below(200),
            _ => self.dice.below(1600),
        };
        blocks * self.block_bytes + self.dice.below(self.block_bytes)
    }

    async fn put(
        &self,
        number: InodeNumber,
        handle: Handle,
        at: u64,
        len: u64,
    ) -> Result<u64, Errno> {
        let mut done = 0;
        while done < len {
            // As much as the kernel hands over at once.
            let part = (len - done).min(128 << 10);
            let bytes = Bytes::from(vec![ORDINARY_BYTE; part as usize]);
            done +=
                u64::from(self.tfs.write(Writer::At(ME), number, handle, at + done, bytes).await?);
        }
        Ok(done)
    }

    async fn open(
        &self,
        parent: InodeNumber,
        name: &str,
    ) -> Result<(InodeNumber, Handle, u64), Errno> {
        let flags = OpenFlags::READ_WRITE;
        let (entry, opened) = self.tfs.create(ME, parent, name.as_bytes(), 0o644, flags).await?;
        Ok((entry.attr.inode, opened.handle, entry.attr.size_bytes))
    }

    async fn close(&self, number: InodeNumber, handle: Handle) -> Result<(), Errno> {
        self.tfs.close(number, handle).await?;
        self.tfs.forget(number, 1);
        Ok(())
    }

    /// Writes at `at` of a file, or at its end.
    async fn write_file(
        &self,
        (parent, name): &(InodeNumber, String),
        at: Option<u64>,
        len: u64,
    ) -> Result<u64, Errno> {
        let (number, handle, size) = self.open(*parent, name).await?;
        let done = self.put(number, handle, at.unwrap_or(size), len).await;
        self.close(number, handle).await?;
        done
    }

    /// Several files that grow at the same time.
    async fn write_in_turns(&mut self) -> Result<u64, Errno> {
        let parent = self.directory();
        let mut open = Vec::new();
        for _ in 0..2 + self.dice.below(3) {
            let file = (parent, self.name());
            open.push(self.open(file.0, &file.1).await?);
            self.files.push(file);
        }
        let mut done = 0;
        for _ in 0..self.dice.below(40) {
            let which = self.dice.below(open.len() as u64) as usize;
            let len = (self.dice.below(16) + 1) * self.block_bytes;
            let (number, handle, size) = open[which];
            done += self.put(number, handle, size, len).await?;
            open[which].2 += len;
        }
        for (number, handle, _) in open {
            self.close(number, handle).await?;
        }
        Ok(done)
    }

    /// One call, or a few that belong together; what it answered.
    async fn call(&mut self) -> Result<u64, Errno> {
        let old = self.dice.pick(&self.files).cloned();
        match (self.dice.below(100), old) {
            (0..10, _) => {
                let (parent, name) = (self.directory(), self.name());
                let entry = self.tfs.mkdir(ME, parent, name.as_bytes(), 0o755).await?;
                self.directories.push((entry.attr.inode, Some((parent, name))));
                Ok(entry.attr.inode.0)
            }
            (10..45, _) | (_, None) => {
                let file = (self.directory(), self.name());
                let len = self.len_bytes();
                self.files.push(file.clone());
                self.write_file(&file, None, len).await
            }
            (45..57, Some(file)) => {
                let len = self.len_bytes();
                self.write_file(&file, None, len).await
            }
            (57..62, Some(file)) => {
                let at = self.dice.below(3000 * self.block_bytes);
                let len = self.len_bytes() / 8;
                self.write_file(&file, Some(at), len).await
            }
            (62..67, _) => self.write_in_turns().await,
            (67..74, Some(file)) => {
                let size = self.len_bytes();
                let (number, handle, _) = self.open(file.0, &file.1).await?;
                let changes = SetAttr { size_bytes: Some(size), ..SetAttr::default() };
                let set = self.tfs.setattr(ME, number, None, changes).await;
                self.close(number, handle).await?;
                set.map(|reply| reply.attr.blocks_512)
            }
            (74..86, Some(file)) => {
                self.files.retain(|other| *other != file);
                self.tfs.unlink(ME, file.0, file.1.as_bytes()).await.map(|()| 0)
            }
            (86..91, Some(file)) => {
                let to = (self.directory(), self.name());
                self.rename(&file, &to).await?;
                self.files.retain(|other| *other != file);
                self.files.push(to);
                Ok(0)
            }
            (91..93, _) => {
                let (parent, name) = (self.directory(), self.name());
                let target = vec![b'l'; self.dice.below(200) as usize + 1];
                let entry = self.tfs.symlink(ME, parent, name.as_bytes(), &target).await?;
                Ok(entry.attr.inode.0)
            }
            (93..95, Some(file)) => {
                let number = self.tfs.lookup(ME, file.0, file.1.as_bytes()).await?.attr.inode;
                let value = Bytes::from(vec![7; self.dice.below(300) as usize]);
                let flags = XattrFlags::default();
                let set = self.tfs.setxattr(ME, number, b"user.note", value, flags).await;
                self.tfs.forget(number, 1);
                set.map(|()| 0)
            }
            (95..97, _) => {
                let Some(last) = self.directories.last().cloned() else { return Ok(0) };
                let Some((parent, name)) = last.1 else { return Ok(0) };
                self.tfs.forget(last.0, 1);
                self.tfs.rmdir(ME, parent, name.as_bytes()).await?;
                self.directories.pop();
                Ok(0)
            }
            _ => self.tfs.sync().await.map(|()| 0),
        }
    }

    async fn rename(
        &self,
        from: &(InodeNumber, String),
        to: &(InodeNumber, String),
    ) -> Result<(), Errno> {
        let (old, new) = (from.1.as_bytes(), to.1.as_bytes());
        self.tfs.rename(ME, from.0, old, to.0, new, RenameFlags::default()).await
    }
}

/// Runs a workload on a disk, unmounts it, and says what each call answered.
pub(crate) async fn run(
    device: &SparseDevice,
    seed: u64,
    block_bytes: u32,
) -> Vec<Result<u64, Errno>> {
    let tfs = mount(device);
    let mut workload = Workload::new(&tfs, seed, block_bytes);
    let mut answers = Vec::new();
    for _ in 0..CALLS {
        answers.push(workload.call().await);
    }
    assert_eq!(tfs.failure(), None);
    tfs.unmount().unwrap();
    answers
}

/// Where everything of an ordinary file lies: "inode", "xattrs", or the way to a block.
type FileMap = BTreeMap<String, u32>;

/// The maps of all ordinary files, by path.
struct Maps {
    ext2: Ext2,
    device: SparseDevice,
    block_bytes: usize,
    files: BTreeMap<String, FileMap>,
}

impl Maps {
    fn of(device: &SparseDevice) -> BTreeMap<String, FileMap> {
        let superblock = read_superblock(device).unwrap();
        let shared: Arc<dyn Device> = Arc::new(device.clone());
        let block_bytes = superblock.block_bytes() as usize;
        let ext2 = Ext2::new(Meta::unjournaled(shared, &superblock, 4096), superblock, None);
        let mut maps = Maps { ext2, device: device.clone(), block_bytes, files: BTreeMap::new() };
        maps.directory(String::new(), 2);
        maps.files
    }

    fn directory(&mut self, path: String, number: u32) {
        let inode = self.ext2.inode(number).unwrap();
        self.file(path.clone(), number, &inode);
        let mut from = 0;
        loop {
            let listed = self.ext2.list_entries(number, &inode, from, 64).unwrap();
            let Some(last) = listed.last() else { return };
            from = last.next;
            for entry in listed.iter().filter(|e| !matches!(&e.name[..], b"." | b"..")) {
                let path = format!("{path}/{}", String::from_utf8_lossy(&entry.name));
                let inode = self.ext2.inode(entry.inode).unwrap();
                if path == "/contributed" {
                    continue;
                }
                match inode.kind().unwrap() {
                    FileKind::Directory => self.directory(path, entry.inode),
                    _ => self.file(path, entry.inode, &inode),
                }
            }
        }
    }

    fn file(&mut self, path: String, number: u32, inode: &Inode) {
        let mut map = FileMap::from([("inode".to_owned(), number)]);
        if inode.xattr_block != 0 {
            map.insert("xattrs".to_owned(), inode.xattr_block);
        }
        let short =
            inode.kind() == Ok(FileKind::Symlink) && inode.size_bytes <= SHORT_TARGET_BYTES as u64;
        if !short {
            for (index, pointer) in inode.pointers.iter().enumerate() {
                let depth = index.saturating_sub(DIRECT - 1);
                self.tree(&mut map, format!("{index}"), *pointer, depth);
            }
        }
        self.files.insert(path, map);
    }

    fn tree(&self, map: &mut FileMap, way: String, block: u32, depth: usize) {
        if block == 0 {
            return;
        }
        map.insert(way.clone(), block);
        if depth > 0 {
            let mut bytes = vec![0; self.block_bytes];
            self.device.read_at(u64::from(block) * bytes.len() as u64, &mut bytes).unwrap();
            for (index, pointer) in bytes.chunks_exact(4).enumerate() {
                let pointer = u32::from_le_bytes(pointer.try_into().unwrap());
                self.tree(map, format!("{way}.{index}"), pointer, depth - 1);
            }
        }
    }
}

/// How many inodes and blocks there are, and how many lie elsewhere than in the other maps.
fn differences(
    one: &BTreeMap<String, FileMap>,
    other: &BTreeMap<String, FileMap>,
) -> (usize, usize, Vec<String>) {
    assert!(one.keys().eq(other.keys()), "the same paths");
    let (mut all, mut moved, mut which) = (0, 0, Vec::new());
    for (path, map) in one {
        let theirs = &other[path];
        assert!(map.keys().eq(theirs.keys()), "{path}: the same shape");
        all += map.len();
        let differ: Vec<_> = map.iter().filter(|(way, block)| theirs[*way] != **block).collect();
        moved += differ.len();
        if let Some((way, block)) = differ.first() {
            let count = differ.len();
            which.push(format!("{path}: {count}, from {way} at {block}, there {}", theirs[*way]));
        }
    }
    (all, moved, which)
}

/// How many transparent files are left, and how many were lost.
async fn transparent_files(device: &SparseDevice) -> (u64, u64) {
    let tfs = mount(device);
    let top = tfs.lookup(ME, ROOT, b"contributed").await.unwrap().attr.inode;
    let (mut left, mut lost) = (0, 0);
    for directory in list(&tfs, top).await {
        for file in list(&tfs, directory).await {
            match tfs.open(ME, file, OpenFlags::READ).await {
                Ok(_) => left += 1,
                Err(errno) => {
                    assert_eq!(errno, Errno::ENOENT);
                    lost += 1;
                }
            }
        }
    }
    (left, lost)
}

async fn list(tfs: &Tfs, directory: InodeNumber) -> Vec<InodeNumber> {
    let handle = tfs.opendir(ME, directory).await.unwrap().handle;
    let entries = tfs.readdir(directory, handle, 0, 10_000, false).await.unwrap();
    tfs.closedir(directory, handle).await.unwrap();
    entries.into_iter().map(|entry| entry.inode).collect()
}

/// Blocks that are free for ordinary files in the group that has fewest.
fn least_free(tfs: &Tfs) -> u64 {
    let groups = tfs.usage().unwrap().groups;
    let free = |group| {
        let counts = tfs.group_bitmaps(group).unwrap().counts();
        counts.free + counts.transparent + counts.free_and_overwritten
    };
    (0..groups).map(free).min().unwrap()
}

/// As [`run`], but for at most `calls`, and until a group has fewer than `least` free blocks;
/// with other transparent files coming and going `beside`. A commit follows each call: freed
/// blocks are given out again after the next one, whatever caused it.
async fn run_until(
    device: &SparseDevice,
    seed: u64,
    (calls, least): (usize, u64),
    beside: bool,
) -> Vec<Result<u64, Errno>> {
    let tfs = mount(device);
    let top = tfs.lookup(ME, ROOT, b"contributed").await.unwrap().attr.inode;
    let mut workload = Workload::new(&tfs, seed, 1024);
    let mut answers = Vec::new();
    while answers.len() < calls && least_free(&tfs) >= least {
        answers.push(workload.call().await);
        tfs.sync().await.unwrap();
        let n = answers.len();
        if beside && n.is_multiple_of(7) {
            tfs.clean().unwrap();
            let written = write(&tfs, top, &format!("beside{n}"), &vec![7; n * 500]).await;
            assert!(written.is_ok() || written == Err(Errno::ENOSPC), "{written:?}");
            tfs.sync().await.unwrap();
        }
    }
    assert_eq!(tfs.failure(), None);
    tfs.unmount().unwrap();
    answers
}

/// The blocks of transparent files' directories stand at the end of groups, and are met where a
/// group is filled to its last block; until then nothing is displaced, whatever transparent
/// files come and go.
#[tokio::test(start_paused = true)]
async fn nothing_is_displaced_before_a_group_is_full() {
    let (empty, full) = pair(1024, 6).await;
    for seed in 30..33 {
        // All but the call that filled a group.
        let calls = run_until(&empty.copy(), seed, (CALLS, 30), false).await.len() - 1;
        let without = empty.copy();
        let answers = run_until(&without, seed, (calls, 0), false).await;
        let maps = Maps::of(&without);
        for beside in [false, true] {
            let with = full.copy();
            let theirs = run_until(&with, seed, (calls, 0), beside).await;
            assert!(answers == theirs, "seed {seed}, {beside}: every call answers the same");
            let (all, moved, which) = differences(&maps, &Maps::of(&with));
            assert!(all > 10_000, "seed {seed}: a workload that matters: {all}");
            assert_eq!(moved, 0, "seed {seed}, {beside}, of {all}: {which:#?}");
            let image = with.image_without(|byte| byte <= 200 || byte == ORDINARY_BYTE);
            assert_image_clean(image.path(), &format!("seed {seed}"));
        }
    }
}

async fn check(block_bytes: u32, groups: usize, seeds: std::ops::Range<u64>) {
    let (empty, full) = pair(block_bytes, groups).await;
    for seed in seeds {
        let (empty, full) = (empty.copy(), full.copy());
        let answers = run(&empty, seed, block_bytes).await;
        let beside = run(&full, seed, block_bytes).await;
        assert!(answers == beside, "seed {seed}: every call answers the same");
        let (all, moved, which) = differences(&Maps::of(&empty), &Maps::of(&full));
        let image = full.image_without(|byte| (1..=200).contains(&byte) || byte == ORDINARY_BYTE);
        assert_image_clean(image.path(), &format!("seed {seed}"));
        let (left, lost) = transparent_files(&full).await;
        println!(
            "blocks of {block_bytes}, seed {seed}: {moved} of {all} elsewhere, {lost} transparent \
             files lost, {left} left"
        );
        assert!(left > 0 && lost > 0, "seed {seed}: they stood in the way");
        let blocks = groups * 8 * block_bytes as usize;
        assert!(all > blocks / 5, "a workload that matters: {all} of {blocks}");
        assert!(moved * 1000 < all, "seed {seed}: {moved} of {all} elsewhere: {which:#?}");
    }
}

#[tokio::test(start_paused = true)]
async fn ordinary_files_lie_where_they_would_without_transparent_data_1k() {
    check(1024, 20, 0..4).await;
}

#[tokio::test(start_paused = true)]
async fn ordinary_files_lie_where_they_would_without_transparent_data_2k() {
    check(2048, 8, 10..12).await;
}

#[tokio::test(start_paused = true)]
async fn ordinary_files_lie_where_they_would_without_transparent_data_4k() {
    check(4096, 5, 20..22).await;
}
