//! The catalogue: one fault each, and what is said about it.

use super::image::{BLOCK, Image};
use atoll_vfs::Errno;

/// How a fault shows.
#[derive(Clone, Copy)]
pub(super) enum Shows {
    /// The file system is not mounted, for this reason.
    AtMount(&'static str),
    /// The check says so; e2fsck finds damage too.
    InExt2(&'static str),
    /// The check says so; e2fsck puts it right without a word.
    Quietly(&'static str),
    /// As [`Shows::InExt2`], and so is reading a path an error.
    AtPath(&'static str, &'static str, Errno),
    /// The check says so of the records, and repairs them; ext2 is sound.
    InRecords(&'static str),
    /// As [`Shows::InRecords`], and a transparent file is gone.
    Lost(&'static str, &'static str, Errno),
}

use Shows::*;

pub(super) struct Fault {
    pub name: &'static str,
    pub shows: Shows,
    pub make: fn(&mut Image<'_>),
}

const fn fault(name: &'static str, shows: Shows, make: fn(&mut Image<'_>)) -> Fault {
    Fault { name, shows, make }
}

/// All faults.
pub(super) fn all() -> impl Iterator<Item = &'static Fault> {
    SUPERBLOCK.iter().chain(GROUP).chain(INODES).chain(DIRECTORIES).chain(RECORDS)
}

fn put_superblock(image: &mut Image<'_>, at: usize, value: u32) {
    let at = image.superblock(at);
    image.put32(at, value);
}

fn add_feature(image: &mut Image<'_>, at: usize, bit: u32) {
    let at = image.superblock(at);
    let set = image.u32(at);
    image.put32(at, set | bit);
}

const SUPERBLOCK: &[Fault] = &[
    fault("no magic", AtMount("not an ext2 file system"), |i| i.put16(1024 + 56, 0)),
    fault("blocks of 8 KiB", AtMount("block size 2^3 KiB"), |i| put_superblock(i, 24, 3)),
    fault("blocks of 2^4 GiB", AtMount("block size"), |i| put_superblock(i, 24, 0xffff_ffff)),
    fault("fragments", AtMount("fragments differ"), |i| put_superblock(i, 28, 1)),
    fault("first block", AtMount("first block is 0"), |i| put_superblock(i, 20, 0)),
    fault("too many blocks", AtMount("the device only"), |i| put_superblock(i, 4, 4097)),
    fault("2^32 blocks", AtMount("the device only"), |i| put_superblock(i, 4, u32::MAX)),
    fault("no blocks", AtMount("no file system"), |i| put_superblock(i, 4, 3)),
    fault("empty groups", AtMount("0 blocks in a group"), |i| put_superblock(i, 32, 0)),
    fault("large groups", AtMount("blocks in a group"), |i| put_superblock(i, 32, 8200)),
    fault("fragments of groups", AtMount("fragments in a group"), |i| put_superblock(i, 36, 8)),
    fault("no inodes", AtMount("0 inodes in a group"), |i| put_superblock(i, 40, 0)),
    fault("odd inodes", AtMount("inodes in a group"), |i| put_superblock(i, 40, 513)),
    fault("table too long", AtMount("inodes in a group"), |i| put_superblock(i, 40, 1 << 20)),
    fault("sum of inodes", AtMount("inodes in 1 groups"), |i| put_superblock(i, 0, 77)),
    fault("inode size 0", AtMount("inodes of 0 bytes"), |i| i.put16(1024 + 88, 0)),
    fault("inode size 100", AtMount("inodes of 100 bytes"), |i| i.put16(1024 + 88, 100)),
    fault("inode size 32 KiB", AtMount("inodes of 32768"), |i| i.put16(1024 + 88, 0x8000)),
    fault("first inode", AtMount("first of ordinary files"), |i| put_superblock(i, 84, 2)),
    fault("kept descriptors", AtMount("kept for descriptors"), |i| i.put16(1024 + 206, 60_000)),
    fault("free blocks", AtMount("more blocks are free"), |i| put_superblock(i, 12, 5000)),
    fault("free inodes", AtMount("more inodes are free"), |i| put_superblock(i, 16, 5000)),
    fault("reserved", AtMount("more blocks are reserved"), |i| put_superblock(i, 8, 5000)),
    fault("revision", AtMount("revision 7 is unknown"), |i| put_superblock(i, 76, 7)),
    fault("has_journal", AtMount("has_journal"), |i| add_feature(i, 92, 0x4)),
    fault("sparse_super2", AtMount("sparse_super2"), |i| add_feature(i, 92, 0x200)),
    fault("extent", AtMount("extent"), |i| add_feature(i, 96, 0x40)),
    fault("64bit", AtMount("64bit"), |i| add_feature(i, 96, 0x80)),
    fault("flex_bg", AtMount("flex_bg"), |i| add_feature(i, 96, 0x200)),
    fault("inline_data", AtMount("inline_data"), |i| add_feature(i, 96, 0x8000)),
    fault("encrypt", AtMount("encrypt"), |i| add_feature(i, 96, 0x1_0000)),
    fault("needs_recovery", AtMount("needs_recovery"), |i| add_feature(i, 96, 0x4)),
    fault("metadata_csum", AtMount("metadata_csum"), |i| add_feature(i, 100, 0x400)),
    fault("bigalloc", AtMount("bigalloc"), |i| add_feature(i, 100, 0x200)),
    fault("unheard of", AtMount("feature 0x40000000"), |i| add_feature(i, 96, 1 << 30)),
    fault("errors found", AtMount("run e2fsck"), |i| i.put16(1024 + 58, 3)),
    fault("not unmounted by others", AtMount("run e2fsck"), |i| {
        i.put16(1024 + 58, 0);
        i.put32(1024 + 44, 1_800_000_000);
    }),
    fault("cut short", AtMount("the device only 2048"), |i| i.bytes.truncate(2 << 20)),
    fault("cut at the superblock", AtMount("not an ext2"), |i| i.bytes.truncate(1500)),
    fault("empty", AtMount("not an ext2"), |i| i.bytes.clear()),
    fault("orphan that is none", AtMount("run e2fsck"), |i| put_superblock(i, 232, 400)),
    fault("orphan beyond all", AtMount("run e2fsck"), |i| put_superblock(i, 232, u32::MAX)),
    fault("orphans in a circle", AtMount("run e2fsck"), |i| {
        let number = i.number("dir/small");
        let (links, next) = (i.inode(number, 26), i.inode(number, 20));
        i.put16(links, 0);
        i.put32(next, number);
        put_superblock(i, 232, number);
    }),
];

const GROUP: &[Fault] = &[
    fault("block bitmap outside", AtMount("descriptor of group 0"), |i| {
        let at = i.descriptor(0);
        i.put32(at, 5000);
    }),
    fault("inode bitmap in the table", AtMount("descriptor of group 0"), |i| {
        let (at, table) = (i.descriptor(4), i.u32(i.descriptor(8)));
        i.put32(at, table + 3);
    }),
    fault("table over the superblock", AtMount("descriptor of group 0"), |i| {
        let at = i.descriptor(8);
        i.put32(at, 1);
    }),
    fault("bitmap over the descriptors", AtMount("descriptor of group 0"), |i| {
        let at = i.descriptor(0);
        i.put32(at, 2);
    }),
    fault("one bitmap for both", AtMount("descriptor of group 0"), |i| {
        let (at, other) = (i.descriptor(4), i.u32(i.descriptor(0)));
        i.put32(at, other);
    }),
    fault("table beyond the end", AtMount("descriptor of group 0"), |i| {
        let at = i.descriptor(8);
        i.put32(at, 4090);
    }),
    fault("table at 2^32", AtMount("descriptor of group 0"), |i| {
        let at = i.descriptor(8);
        i.put32(at, u32::MAX);
    }),
    fault("free blocks of the group", AtMount("descriptor of group 0"), |i| {
        let at = i.descriptor(12);
        i.put16(at, 60_000);
    }),
    fault("one free block more", InExt2("blocks are free"), |i| {
        let at = i.descriptor(12);
        i.put16(at, i.u16(at) + 1);
    }),
    fault("one free inode less", InExt2("inodes are free"), |i| {
        let at = i.descriptor(14);
        i.put16(at, i.u16(at) - 1);
    }),
    fault("directories", InExt2("directories, it has"), |i| {
        let at = i.descriptor(16);
        i.put16(at, 1);
    }),
    fault("sum of free blocks", Quietly("the superblock says"), |i| {
        let at = i.superblock(12);
        i.put32(at, i.u32(at) - 1);
    }),
    fault("metadata marked free", InExt2("used and marked as free"), |i| {
        let bitmap = i.block_bitmap();
        i.put_bit(bitmap, 1, false);
    }),
    fault("a file's block marked free", InExt2("used and marked as free"), |i| {
        let (bitmap, block) = (i.block_bitmap(), i.u32(i.pointer("dir/file", 3)));
        i.put_bit(bitmap, block - 1, false);
    }),
    fault("a free block marked used", InExt2("marked as used and belong to no file"), |i| {
        let bitmap = i.block_bitmap();
        let free = (0..4000).rev().find(|bit| !i.is_set(bitmap, *bit)).unwrap();
        i.put_bit(bitmap, free, true);
    }),
    fault("the end of the block bitmap", InExt2("does not end in ones"), |i| {
        let bitmap = i.block_bitmap();
        i.put_bit(bitmap, 4096, false);
    }),
    fault("a file's inode marked free", InExt2("inodes are used and marked as free"), |i| {
        let (bitmap, number) = (i.inode_bitmap(), i.number("dir/small"));
        i.put_bit(bitmap, number - 1, false);
    }),
    fault("a free inode marked used", InExt2("inodes are marked as used and are not"), |i| {
        let bitmap = i.inode_bitmap();
        i.put_bit(bitmap, 450, true);
    }),
    fault("the end of the inode bitmap", InExt2("inode bitmap of group 0 does not"), |i| {
        let bitmap = i.inode_bitmap();
        i.put_bit(bitmap, 512, false);
    }),
];

const INODES: &[Fault] = &[
    fault("a block outside", AtPath("which does not exist", "dir/file", Errno::EIO), |i| {
        let at = i.pointer("dir/file", 2);
        i.put32(at, 9999);
    }),
    fault("a block at 2^32", AtPath("which does not exist", "dir/file", Errno::EIO), |i| {
        let at = i.pointer("dir/file", 2);
        i.put32(at, u32::MAX);
    }),
    fault("a block of metadata", AtPath("which is metadata", "dir/file", Errno::EIO), |i| {
        let (at, table) = (i.pointer("dir/file", 2), i.u32(i.descriptor(8)));
        i.put32(at, table);
    }),
    fault("the superblock's block", AtPath("which is metadata", "dir/file", Errno::EIO), |i| {
        let at = i.pointer("dir/file", 2);
        i.put32(at, 1);
    }),
    fault("another file's block", InExt2("another file's"), |i| {
        let (at, other) = (i.pointer("dir/file", 2), i.u32(i.pointer("dir/small", 0)));
        i.put32(at, other);
    }),
    fault("a directory's block", InExt2("another file's"), |i| {
        let (at, other) = (i.pointer("dir/file", 2), i.u32(i.pointer("many", 0)));
        i.put32(at, other);
    }),
    fault("a block of the records", InExt2("another file's"), |i| {
        let (at, other) = (i.pointer("dir/file", 2), i.records_block(0));
        i.put32(at, other);
    }),
    fault("indirect block of itself", InExt2("twice its own"), |i| {
        let block = i.u32(i.pointer("dir/large", 12));
        let at = i.block(block);
        i.put32(at, block);
    }),
    fault("doubly indirect is simple", InExt2("twice its own"), |i| {
        let (at, block) = (i.pointer("dir/large", 13), i.u32(i.pointer("dir/large", 12)));
        i.put32(at, block);
    }),
    fault("indirect metadata", AtPath("which is metadata", "dir/large", Errno::EIO), |i| {
        let (at, table) = (i.pointer("dir/large", 12), i.u32(i.descriptor(8)));
        i.put32(at, table + 1);
    }),
    fault("triply indirect outside", InExt2("which does not exist"), |i| {
        let at = i.pointer("dir/large", 14);
        i.put32(at, 1 << 30);
    }),
    fault("length of 2^63", AtPath("impossible length", "dir/file", Errno::EIO), |i| {
        let at = i.inode_of("dir/file", 108);
        i.put32(at, 1 << 31);
    }),
    fault("blocks beyond the end", InExt2("has blocks beyond its end"), |i| {
        let at = i.inode_of("dir/file", 4);
        i.put32(at, 100);
    }),
    fault("blocks of a terabyte", AtPath("half kilobytes", "dir/file", Errno::EIO), |i| {
        let at = i.inode_of("dir/file", 28);
        i.put32(at, u32::MAX);
    }),
    fault("a wrong number of blocks", InExt2("half kilobytes of blocks, it has"), |i| {
        let at = i.inode_of("dir/file", 28);
        i.put32(at, 2);
    }),
    fault("no kind", AtPath("of no kind of file", "dir/file", Errno::EIO), |i| {
        let at = i.inode_of("dir/file", 0);
        i.put16(at, 0o644);
    }),
    fault("no links", AtPath("which is not in use", "dir/file", Errno::EIO), |i| {
        let at = i.inode_of("dir/file", 26);
        i.put16(at, 0);
    }),
    fault("too many links", InExt2("says that it has 7 names, it has 1"), |i| {
        let at = i.inode_of("dir/file", 26);
        i.put16(at, 7);
    }),
    fault("too few links", InExt2("says that it has 1 names, it has 3"), |i| {
        let at = i.inode_of("dir", 26);
        i.put16(at, 1);
    }),
    fault("deleted with a name", InExt2("has a name and was deleted"), |i| {
        let at = i.inode_of("dir/file", 20);
        i.put32(at, 1_700_000_000);
    }),
    fault("attributes without magic", AtPath("attributes of inode", "attr", Errno::EIO), |i| {
        let at = i.block(i.u32(i.inode_of("attr", 104)));
        i.put32(at, 0);
    }),
    fault("attributes outside", AtPath("does not exist", "attr", Errno::EIO), |i| {
        let at = i.inode_of("attr", 104);
        i.put32(at, 77_777);
    }),
    fault("attributes in metadata", AtPath("belong to the file system", "attr", Errno::EIO), |i| {
        let at = i.inode_of("attr", 104);
        i.put32(at, 1);
    }),
    fault("a value outside its block", AtPath("attributes of inode", "attr", Errno::EIO), |i| {
        let at = i.block(i.u32(i.inode_of("attr", 104))) + 32;
        i.put32(at + 8, 70_000);
    }),
    fault("a name outside its block", AtPath("attributes of inode", "attr", Errno::EIO), |i| {
        let start = i.block(i.u32(i.inode_of("attr", 104)));
        let at = start + 32;
        i.bytes.copy_within(at..at + 24, start + BLOCK - 24);
        i.bytes[at..start + BLOCK - 24].fill(1);
    }),
    fault("shared attributes", InExt2("say that 5 files have them"), |i| {
        let at = i.block(i.u32(i.inode_of("attr", 104)));
        i.put32(at + 4, 5);
    }),
    fault("a link to nowhere", AtPath("impossible target", "short", Errno::EIO), |i| {
        let at = i.inode_of("short", 4);
        i.put32(at, 0);
    }),
    fault("a link longer than it is", AtPath("impossible target", "short", Errno::EIO), |i| {
        let at = i.inode_of("short", 4);
        i.put32(at, 40);
    }),
    fault("a link beyond its block", AtPath("impossible target", "long", Errno::EIO), |i| {
        let at = i.inode_of("long", 4);
        i.put32(at, 5000);
    }),
    fault("a link in metadata", AtPath("which is metadata", "long", Errno::EIO), |i| {
        let at = i.pointer("long", 0);
        i.put32(at, 2);
    }),
];

const DIRECTORIES: &[Fault] = &[
    fault("an odd length", AtPath("of 1000 bytes has", "dir", Errno::EIO), |i| {
        let at = i.inode_of("dir", 4);
        i.put32(at, 1000);
    }),
    fault("longer than the disk", AtPath("bytes has 1 blocks", "dir", Errno::EIO), |i| {
        let at = i.inode_of("dir", 4);
        i.put32(at, 1 << 30);
    }),
    fault("a hole", AtPath("blocks", "many", Errno::EIO), |i| {
        let at = i.pointer("many", 1);
        i.put32(at, 0);
    }),
    fault("a block outside", AtPath("which does not exist", "many", Errno::EIO), |i| {
        let at = i.pointer("many", 1);
        i.put32(at, 4096);
    }),
    fault("rec_len 0", AtPath("is impossible", "dir", Errno::EIO), |i| {
        let at = i.entry("dir", "small") + 4;
        i.put16(at, 0);
    }),
    fault("rec_len odd", AtPath("is impossible", "dir", Errno::EIO), |i| {
        let at = i.entry("dir", "small") + 4;
        i.put16(at, 17);
    }),
    fault("rec_len beyond the block", AtPath("is impossible", "dir", Errno::EIO), |i| {
        let at = i.entry("dir", "small") + 4;
        i.put16(at, 1024);
    }),
    fault("rec_len too short", AtPath("is impossible", "dir", Errno::EIO), |i| {
        let at = i.entry("dir", "small") + 4;
        i.put16(at, 8);
    }),
    fault("name_len too long", AtPath("is impossible", "dir", Errno::EIO), |i| {
        let at = i.entry("dir", "small") + 6;
        i.bytes[at] = 200;
    }),
    fault("name_len 0", AtPath("is impossible", "dir", Errno::EIO), |i| {
        let at = i.entry("dir", "small") + 6;
        i.bytes[at] = 0;
    }),
    fault("a slash", AtPath("is impossible", "dir", Errno::EIO), |i| {
        let at = i.entry("dir", "small") + 9;
        i.bytes[at] = b'/';
    }),
    fault("inode outside", AtPath("no file can have", "dir/small", Errno::EIO), |i| {
        let at = i.entry("dir", "small");
        i.put32(at, 5000);
    }),
    fault("the records' inode", AtPath("no file can have", "dir/small", Errno::EIO), |i| {
        let at = i.entry("dir", "small");
        i.put32(at, 5);
    }),
    fault("the root's inode", AtPath("no file can have", "dir/small", Errno::EIO), |i| {
        let at = i.entry("dir", "small");
        i.put32(at, 2);
    }),
    fault("inode not in use", AtPath("which is not in use", "dir/small", Errno::EIO), |i| {
        let at = i.entry("dir", "small");
        i.put32(at, 440);
    }),
    fault("no `.`", InExt2("does not begin with `.`"), |i| {
        let at = i.entry("dir", ".");
        i.bytes[at + 8] = b'x';
    }),
    fault("`.` is another", InExt2("`.` of directory"), |i| {
        let (at, other) = (i.entry("dir", "."), i.number("other"));
        i.put32(at, other);
    }),
    fault("no `..`", AtPath("has no `..`", "dir/small", Errno::EIO), |i| {
        let at = i.entry("dir", "..");
        i.put32(at, 0);
    }),
    fault("`..` is another", AtPath("but it is named in", "dir/sub/deep", Errno::EIO), |i| {
        let (at, other) = (i.entry("dir/sub", ".."), i.number("other"));
        i.put32(at, other);
    }),
    fault(
        "a circle",
        AtPath("is a directory that is also named", "dir/sub/deep", Errno::EIO),
        |i| {
            let (at, up) = (i.entry("dir/sub", "deep"), i.number("dir"));
            i.put32(at, up);
            i.bytes[at + 7] = 2;
        },
    ),
    fault("a circle apart", InExt2("are in a circle"), |i| {
        let (top, up) = (i.entry("", "dir"), i.entry("dir", ".."));
        let (deep, dir, sub) = (i.entry("dir/sub", "deep"), i.number("dir"), i.number("dir/sub"));
        i.put32(top, 0);
        i.put32(up, sub);
        i.put32(deep, dir);
        i.bytes[deep + 7] = 2;
    }),
    fault("a directory without a name", InExt2("leads to no root"), |i| {
        let at = i.entry("", "other");
        i.put32(at, 0);
    }),
    fault("a file without a name", InExt2("is in use and has no name"), |i| {
        let at = i.entry("dir", "small");
        i.put32(at, 0);
    }),
    fault("another kind", InExt2("that it is another kind of file"), |i| {
        let at = i.entry("dir", "small") + 7;
        i.bytes[at] = 7;
    }),
    fault("a name twice", InExt2("has the name `small` twice"), |i| {
        let at = i.entry("dir", "large") + 8;
        i.bytes[at..at + 5].copy_from_slice(b"small");
    }),
    fault("the root is a file", AtMount("run e2fsck"), |i| {
        let at = i.inode(2, 0);
        i.put16(at, 0o100644);
    }),
];

const RECORDS: &[Fault] = &[
    fault("both headers", AtMount("no copy of their header is whole"), |i| {
        for copy in 0..2 {
            let at = i.header(copy) + 40;
            i.put32(at, 77);
        }
    }),
    fault("one header", InRecords("copy 1 of the records' header is damaged"), |i| {
        let at = i.header(1);
        i.put32(at, 0);
    }),
    fault("a later version", AtMount("of version 9"), |i| {
        i.change_headers(|i, at| i.put32(at + 8, 9));
    }),
    fault("another size", AtMount("before the file system was resized"), |i| {
        i.change_headers(|i, at| i.put32(at + 16, 8192));
    }),
    fault("a journal of no length", AtMount("no copy of their header is whole"), |i| {
        i.change_headers(|i, at| i.put32(at + 28, 5));
    }),
    fault("a longer journal", AtMount("bytes where"), |i| {
        i.change_headers(|i, at| i.put32(at + 28, 129));
    }),
    fault("the last header of all", AtMount("no copy of their header is whole"), |i| {
        i.change_headers(|i, at| i.put64(at + 80, u64::MAX));
    }),
    fault("the last transaction of all", AtMount("no copy of their header is whole"), |i| {
        i.change_headers(|i, at| i.put64(at + 184, u64::MAX));
    }),
    fault("a length of the file", AtMount("bytes where"), |i| {
        let at = i.inode(5, 4);
        i.put32(at, 500_000);
    }),
    fault("a directory instead", AtMount("is no regular file"), |i| {
        let at = i.inode(5, 0);
        i.put16(at, 0o040700);
    }),
    fault("a hole in the journal", AtMount("is missing"), |i| {
        let at = i.inode(5, 40 + 4 * 3);
        i.put32(at, 0);
    }),
    fault("the journal in metadata", AtMount("which is metadata"), |i| {
        let (at, table) = (i.inode(5, 40 + 4 * 3), i.u32(i.descriptor(8)));
        i.put32(at, table);
    }),
    fault("the journal outside", AtMount("which does not exist"), |i| {
        let at = i.inode(5, 40 + 4 * 3);
        i.put32(at, 123_456);
    }),
    fault("a summary", InRecords("the summary of group 0 is damaged"), |i| {
        let at = i.place(i.layout().summary(0));
        i.put32(at + 4, 17);
    }),
    fault("impossible counts", InRecords("the summary of group 0 is damaged"), |i| {
        i.change_summary(0, u32::MAX);
    }),
    fault("wrong blocks", InRecords("transparent blocks, it has"), |i| i.change_summary(0, 3)),
    fault("wrong inodes", InRecords("transparent inodes, it has"), |i| i.change_summary(8, 40)),
    fault("a bitmap's checksum", InRecords("not as TFS wrote it last"), |i| {
        i.change_summary(16, 0);
    }),
    fault("a map", Lost("the map of transparent file", "contributed/t0", Errno::ENOENT), |i| {
        let at = i.map_entry("contributed/t0") + 12;
        i.put32(at, 1);
    }),
    fault("a map's length", Lost("impossible length", "contributed/t0", Errno::ENOENT), |i| {
        i.change_map_entry("contributed/t0", 20, u32::MAX);
    }),
    fault("a map's blocks", Lost("extents that cannot be", "contributed/t0", Errno::ENOENT), |i| {
        i.change_map_entry("contributed/t0", 12, 1000);
    }),
    fault("a map's start", Lost("extents that cannot be", "contributed/t0", Errno::ENOENT), |i| {
        i.change_map_entry("contributed/t0", 8, u32::MAX);
    }),
    fault("an older file's map", Lost("of an older file", "contributed/t0", Errno::ENOENT), |i| {
        i.change_map_entry("contributed/t0", 0, 3);
    }),
    fault("a map's directory", InRecords("its map says 2"), |i| {
        i.change_map_entry("contributed/t0", 4, 2);
    }),
    fault("an owner", Lost("extents that cannot be", "contributed/t0", Errno::ENOENT), |i| {
        let at = i.extent_head("contributed/t0");
        i.put32(at, 300);
    }),
    fault("a circle", Lost("extents that cannot be", "contributed/t0", Errno::ENOENT), |i| {
        let (at, first) = (i.extent_head("contributed/t0"), i.first_extent("contributed/t0"));
        i.put32(at + 12, first);
    }),
    fault("a long extent", Lost("extents that cannot be", "contributed/t0", Errno::ENOENT), |i| {
        let at = i.extent_head("contributed/t0");
        i.put32(at + 8, u32::MAX);
    }),
    fault("two owners", Lost("not marked transparent", "contributed/t0", Errno::ENOENT), |i| {
        // As long as it was, but from a free block on.
        let (from, first) = (i.extent_head("contributed/t0"), i.first_extent("contributed/t0"));
        let head = i.bytes[from..from + 16].to_vec();
        let to = i.place(i.layout().extent_head(first - 200));
        i.bytes[to..to + 16].copy_from_slice(&head);
        i.change_map_entry("contributed/t0", 8, first - 200);
    }),
    fault(
        "a block not its own",
        Lost("not marked transparent", "contributed/t0", Errno::ENOENT),
        |i| {
            let (first, block) =
                (i.first_extent("contributed/t0"), i.layout().transparent_bitmap(0));
            let bitmap = i.block(i.records_block(block));
            i.put_bit(bitmap, first - 1, false);
        },
    ),
    fault("a transparent block of no file", InRecords("and of no file"), |i| {
        let block = i.layout().transparent_bitmap(0);
        let bitmap = i.block(i.records_block(block));
        let allocated = i.block_bitmap();
        let is_free = |bit: &u32| !i.is_set(allocated, *bit) && !i.is_set(bitmap, *bit);
        let free = (0..4000).find(is_free).unwrap();
        i.put_bit(bitmap, free, true);
    }),
    fault("transparent metadata", InRecords("and not marked so"), |i| {
        let block = i.layout().transparent_bitmap(0);
        let bitmap = i.block(i.records_block(block));
        i.put_bit(bitmap, 3, true);
    }),
    fault("overwritten without being", InRecords("are not transparent"), |i| {
        let block = i.layout().overwritten_bitmap(0);
        let bitmap = i.block(i.records_block(block));
        i.put_bit(bitmap, 3, true);
    }),
    fault("beyond the group", InRecords("reaches beyond the group"), |i| {
        let block = i.layout().transparent_bitmap(0);
        let bitmap = i.block(i.records_block(block));
        i.put_bit(bitmap, 5000, true);
    }),
    fault("a tag", Lost("other bytes than the file's", "contributed/t0", Errno::EIO), |i| {
        let first = i.first_extent("contributed/t0");
        let at = i.place(i.layout().tag(first + 2));
        i.put32(at, 0);
    }),
    fault("the data", Lost("other bytes than the file's", "contributed/t0", Errno::EIO), |i| {
        let at = i.block(i.first_extent("contributed/t0") + 1);
        i.put32(at, 0x4141_4141);
    }),
];
