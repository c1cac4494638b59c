//! What no front end checks: inode flags, the reserved blocks, TFS's own settings.

use std::path::Path;
use std::process::Command;

use atoll_tfs::fs::Tfs;
use atoll_tfs::stat::{CLEAN_XATTR, TARGET_LOSS_XATTR};
use atoll_vfs::{
    Caller, Errno, FileKind, FileSystem, FileTime, Groups, Handle, InodeFlags, InodeNumber,
    OpenFlags, RenameFlags, SetAttr, SetTime, Writer, XattrFlags,
};
use bytes::Bytes;
use tempfile::NamedTempFile;

use crate::calls::{ME, ROOT, write};
use crate::e2fsck::assert_image_clean;
use crate::kernel::mount;

pub(crate) const USER: Caller =
    Caller { uid: 1000, gid: 1000, pid: 0, umask: 0, groups: Groups::None };
const OTHER: Caller = Caller { uid: 1001, gid: 1001, pid: 0, umask: 0, groups: Groups::None };
const WRITE_AT_END: OpenFlags = OpenFlags(OpenFlags::WRITE.0 | OpenFlags::APPEND);

/// An image of mke2fs.
pub(crate) fn image(mib: u64, options: &[&str]) -> NamedTempFile {
    let image = NamedTempFile::new().unwrap();
    image.as_file().set_len(mib << 20).unwrap();
    tool("mke2fs", &[&["-q", "-F", "-t", "ext2"], options].concat(), image.path());
    image
}

/// Runs a program of e2fsprogs on an image.
fn tool(program: &str, options: &[&str], image: &Path) {
    let output = Command::new(program).args(options).arg(image).output().unwrap();
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A new file of a user, and an open of it for writing at its end.
async fn file(tfs: &Tfs, owner: Caller, name: &str) -> (InodeNumber, Handle) {
    let made = tfs.create(owner, ROOT, name.as_bytes(), 0o666, WRITE_AT_END).await.unwrap();
    (made.0.attr.inode, made.1.handle)
}

async fn append(
    tfs: &Tfs,
    writer: Writer,
    (inode, handle): (InodeNumber, Handle),
) -> Result<u32, Errno> {
    let at = tfs.getattr(inode, None).await?.attr.size_bytes;
    tfs.write(writer, inode, handle, at, Bytes::from(vec![7; 4096])).await
}

async fn append_until_full(tfs: &Tfs, caller: Caller, to: (InodeNumber, Handle)) {
    while let Ok(taken) = append(tfs, Writer::AtEnd(caller), to).await {
        assert!(taken > 0);
    }
}

/// The story: the file's owner decided. On a disk that was full but for the reserve a user
/// appended to a file of root's, and root could not append to one of a user's.
#[tokio::test]
async fn the_reserve_is_for_those_who_write_not_for_those_who_own() {
    let image = image(8, &["-b", "1024", "-m", "10"]);
    tool("tune2fs", &["-u", "70", "-g", "80"], image.path());
    let (tfs, _) = mount(image.path());
    let (of_root, of_user) = (file(&tfs, ME, "root's").await, file(&tfs, USER, "user's").await);
    append_until_full(&tfs, USER, of_user).await;
    let reserved = tfs.usage().unwrap().reserved_blocks;
    let free = || tfs.usage().unwrap().free_blocks;
    assert!(reserved > 100 && free() >= reserved && free() < reserved + 8, "{}", free());

    assert_eq!(
        append(&tfs, Writer::AtEnd(USER), of_root).await,
        Err(Errno::ENOSPC),
        "a user to root's"
    );
    assert_eq!(append(&tfs, Writer::AtEnd(ME), of_user).await, Ok(4096), "root to a user's");
    let by_uid = Caller { uid: 70, ..USER };
    let by_gid = Caller { gid: 80, ..USER };
    assert_eq!(
        append(&tfs, Writer::AtEnd(by_uid), of_user).await,
        Ok(4096),
        "the user of the superblock"
    );
    assert_eq!(
        append(&tfs, Writer::AtEnd(by_gid), of_root).await,
        Ok(4096),
        "the group of the superblock"
    );
    // The kernel does not know who changed a page of a mapping: the opener answers for it.
    assert_eq!(append(&tfs, Writer::Mapping, of_user).await, Err(Errno::ENOSPC));
    assert_eq!(append(&tfs, Writer::Mapping, of_root).await, Ok(4096));
    // Blocks of names, of attributes and of an allocation in advance follow the same rule.
    let long = vec![b'x'; 1000];
    let made = tfs.symlink(USER, ROOT, b"long", &long).await;
    assert_eq!(made.map(drop), Err(Errno::ENOSPC));
    tfs.symlink(ME, ROOT, b"long", &long).await.unwrap();
    let end = tfs.getattr(of_root.0, None).await.unwrap().attr.size_bytes;
    let reserve = |caller| tfs.fallocate(caller, of_root.0, of_root.1, end, 8192, 0);
    assert_eq!(reserve(USER).await, Err(Errno::ENOSPC));
    assert_eq!(reserve(ME).await, Ok(()));
    let value = Bytes::from(vec![1; 600]);
    let set =
        |caller| tfs.setxattr(caller, of_user.0, b"user.x", value.clone(), XattrFlags::default());
    assert_eq!(set(USER).await, Err(Errno::ENOSPC));
    assert_eq!(set(ME).await, Ok(()));
    append_until_full(&tfs, ME, of_user).await;
    assert!(free() < 8, "{}", free());
    tfs.unmount().unwrap();
    drop(tfs);
    assert_image_clean(image.path(), "full");
}

/// The story: a page of a mapping of a file that was opened with `O_APPEND` was written behind
/// the end of the file, not where it lies.
#[tokio::test]
async fn a_page_of_a_mapping_is_written_where_it_lies() {
    let image = image(8, &[]);
    let (tfs, _) = mount(image.path());
    let (inode, handle) = file(&tfs, ME, "file").await;
    append(&tfs, Writer::AtEnd(ME), (inode, handle)).await.unwrap();
    let page = Bytes::from(vec![9; 100]);
    assert_eq!(tfs.write(Writer::Mapping, inode, handle, 50, page).await, Ok(100));
    assert_eq!(tfs.getattr(inode, None).await.unwrap().attr.size_bytes, 4096);
    let bytes = crate::calls::read(&tfs, ROOT, "file").await.unwrap();
    assert_eq!(bytes[49..151], [&[7][..], &[9; 100], &[7]].concat());
    tfs.unmount().unwrap();
}

async fn set_flags(tfs: &Tfs, inode: InodeNumber, flags: u32) {
    tfs.set_inode_flags(ME, inode, InodeFlags(flags)).await.unwrap();
}

/// Every change of a file that its flags could refuse: its name and the answer.
async fn changes_of(tfs: &Tfs, inode: InodeNumber, name: &[u8]) -> Vec<(&'static str, Errno)> {
    let mut refused = Vec::new();
    let mut note = |what, outcome: Result<(), Errno>| {
        if let Err(errno) = outcome {
            refused.push((what, errno));
        }
    };
    let open = async |flags: i32| {
        let opened = tfs.open(ME, inode, OpenFlags(flags)).await?;
        tfs.close(inode, opened.handle).await
    };
    note("read", open(0).await);
    note("write", open(1).await);
    note("append", open(1 | OpenFlags::APPEND).await);
    note("empty", open(1 | OpenFlags::TRUNCATE).await);
    let set = async |changes: SetAttr| tfs.setattr(ME, inode, None, changes).await.map(drop);
    let old = tfs.getattr(inode, None).await.unwrap().attr;
    note("truncate", set(SetAttr { size_bytes: Some(10), ..SetAttr::default() }).await);
    note("chmod", set(SetAttr { mode: Some(old.mode), ..SetAttr::default() }).await);
    note("chown", set(SetAttr { uid: Some(old.uid), ..SetAttr::default() }).await);
    let time = SetTime::To(FileTime { secs: 5, nanos: 0 });
    note("utimes", set(SetAttr { mtime: Some(time), ..SetAttr::default() }).await);
    note("touch", set(SetAttr { mtime: Some(SetTime::Now), ..SetAttr::default() }).await);
    let value = Bytes::from_static(b"1");
    let flags = XattrFlags::default();
    note("setxattr", tfs.setxattr(ME, inode, b"user.x", value.clone(), flags).await);
    note("removexattr", tfs.removexattr(ME, inode, b"user.x").await);
    note("transparent", tfs.setxattr(ME, inode, b"user.tfs.transparent", "0".into(), flags).await);
    let acl = [&[2u8, 0, 0, 0][..], &entry(1), &entry(4), &entry(32)].concat();
    note("setfacl", tfs.setxattr(ME, inode, b"system.posix_acl_access", acl.into(), flags).await);
    match tfs.link(ME, inode, ROOT, b"linked").await {
        Ok(_) => tfs.unlink(ME, ROOT, b"linked").await.unwrap(),
        Err(errno) => note("link", Err(errno)),
    }
    let plain = RenameFlags::default();
    note("rename", tfs.rename(ME, ROOT, name, ROOT, b"renamed", plain).await);
    let _ = tfs.rename(ME, ROOT, b"renamed", ROOT, name, plain).await;
    write(tfs, ROOT, "other", b"x").await.unwrap();
    let exchange = RenameFlags { exchange: true, ..plain };
    note("exchange", tfs.rename(ME, ROOT, b"other", ROOT, name, exchange).await);
    let _ = tfs.rename(ME, ROOT, b"other", ROOT, name, exchange).await;
    note("replace", tfs.rename(ME, ROOT, b"other", ROOT, name, plain).await);
    note("unlink", tfs.unlink(ME, ROOT, name).await);
    refused
}

/// An entry of a list that names no user.
fn entry(tag: u8) -> [u8; 8] {
    [tag, 0, 6, 0, 255, 255, 255, 255]
}

#[tokio::test]
async fn an_immutable_file_refuses_every_change_and_an_append_only_one_all_but_growing() {
    let image = image(8, &[]);
    let (tfs, _) = mount(image.path());
    let all = [
        "write",
        "append",
        "empty",
        "truncate",
        "chmod",
        "chown",
        "utimes",
        "touch",
        "setxattr",
        "removexattr",
        "transparent",
        "setfacl",
        "link",
        "rename",
        "exchange",
        "replace",
        "unlink",
    ];
    let but = |left: &[&str]| -> Vec<(&str, Errno)> {
        let kept = all.iter().filter(|name| !left.contains(name));
        kept.map(|name| (*name, Errno::EPERM)).collect()
    };
    let immutable = write(&tfs, ROOT, "immutable", b"kept").await.unwrap();
    set_flags(&tfs, immutable, InodeFlags::IMMUTABLE).await;
    assert_eq!(changes_of(&tfs, immutable, b"immutable").await, but(&[]));
    let log = write(&tfs, ROOT, "log", b"kept").await.unwrap();
    set_flags(&tfs, log, InodeFlags::APPEND_ONLY).await;
    assert_eq!(changes_of(&tfs, log, b"log").await, but(&["append", "touch"]));
    for name in ["immutable", "log"] {
        assert_eq!(crate::calls::read(&tfs, ROOT, name).await.unwrap(), b"kept");
    }
    // Without the flags nothing is refused, or this test would say nothing.
    set_flags(&tfs, log, 0).await;
    assert_eq!(changes_of(&tfs, log, b"log").await, []);
    tfs.unmount().unwrap();
    drop(tfs);
    assert_image_clean(image.path(), "flags");
}

#[tokio::test]
async fn an_open_from_before_the_flag_changes_nothing_either() {
    let image = image(8, &[]);
    let (tfs, _) = mount(image.path());
    let (inode, at_end) = file(&tfs, ME, "file").await;
    let anywhere = tfs.open(ME, inode, OpenFlags::WRITE).await.unwrap().handle;
    let write = |writer, handle| tfs.write(writer, inode, handle, 0, Bytes::from_static(b"x"));
    set_flags(&tfs, inode, InodeFlags::APPEND_ONLY).await;
    assert_eq!(write(Writer::At(ME), anywhere).await, Err(Errno::EPERM));
    assert_eq!(write(Writer::At(ME), at_end).await, Err(Errno::EPERM), "by F_SETFL");
    assert_eq!(write(Writer::AtEnd(ME), at_end).await, Ok(1));
    set_flags(&tfs, inode, InodeFlags::IMMUTABLE).await;
    assert_eq!(write(Writer::AtEnd(ME), at_end).await, Err(Errno::EPERM));
    // The program that changed a page of a mapping was told that it may, and must not lose it.
    assert_eq!(write(Writer::Mapping, at_end).await, Ok(1));
    assert_eq!(tfs.fallocate(ME, inode, at_end, 0, 4096, 0).await, Err(Errno::EPERM));
    tfs.unmount().unwrap();
}

#[tokio::test]
async fn a_directory_keeps_its_names_by_its_flags() {
    let image = image(8, &[]);
    let (tfs, _) = mount(image.path());
    let directory = tfs.mkdir(ME, ROOT, b"directory", 0o755).await.unwrap().attr.inode;
    write(&tfs, directory, "kept", b"x").await.unwrap();
    write(&tfs, ROOT, "outside", b"x").await.unwrap();
    let outside = tfs.lookup(ME, ROOT, b"outside").await.unwrap().attr.inode;
    let plain = RenameFlags::default();
    for (flag, additions) in
        [(InodeFlags::IMMUTABLE, Err(Errno::EPERM)), (InodeFlags::APPEND_ONLY, Ok(()))]
    {
        set_flags(&tfs, directory, flag).await;
        let name = |text: &str| format!("{text}{flag}").into_bytes();
        let made = [
            tfs.mkdir(ME, directory, &name("d"), 0o755).await.map(drop),
            tfs.mknod(ME, directory, &name("n"), FileKind::Fifo, 0o644, 0).await.map(drop),
            tfs.symlink(ME, directory, &name("s"), b"x").await.map(drop),
            tfs.create(ME, directory, &name("c"), 0o644, OpenFlags::WRITE).await.map(drop),
            tfs.link(ME, outside, directory, &name("l")).await.map(drop),
        ];
        assert_eq!(made, [additions; 5], "{flag:#x}");
        assert_eq!(tfs.unlink(ME, directory, b"kept").await, Err(Errno::EPERM));
        let out = tfs.rename(ME, directory, b"kept", ROOT, b"moved", plain).await;
        assert_eq!(out, Err(Errno::EPERM));
        let over = tfs.rename(ME, ROOT, b"outside", directory, b"kept", plain).await;
        assert_eq!(over, Err(Errno::EPERM));
        assert_eq!(tfs.rmdir(ME, ROOT, b"directory").await, Err(Errno::EPERM));
        // A file in it may still be written: its own flags decide.
        let kept = tfs.lookup(ME, directory, b"kept").await.unwrap().attr.inode;
        tfs.open(ME, kept, OpenFlags::WRITE).await.unwrap();
        set_flags(&tfs, directory, 0).await;
    }
    tfs.unlink(ME, directory, b"kept").await.unwrap();
    tfs.unmount().unwrap();
}

#[tokio::test]
async fn flags_are_set_by_the_owner_and_the_two_that_bind_by_root() {
    let image = image(8, &[]);
    let (tfs, _) = mount(image.path());
    let (inode, _) = file(&tfs, USER, "file").await;
    let set = |caller, flags| tfs.set_inode_flags(caller, inode, InodeFlags(flags));
    assert_eq!(set(OTHER, InodeFlags::NO_DUMP).await, Err(Errno::EPERM));
    assert_eq!(set(USER, InodeFlags::NO_DUMP).await, Ok(()));
    for flag in [InodeFlags::IMMUTABLE, InodeFlags::APPEND_ONLY] {
        assert_eq!(set(USER, flag).await, Err(Errno::EPERM));
        assert_eq!(set(ME, flag).await, Ok(()));
        assert_eq!(set(USER, 0).await, Err(Errno::EPERM), "nor may the owner take it away");
        assert_eq!(set(ME, flag).await, Ok(()), "nothing changes");
        let other = match flag {
            InodeFlags::IMMUTABLE => Err(Errno::EPERM),
            _ => Ok(()),
        };
        assert_eq!(set(USER, flag | InodeFlags::NO_ATIME).await, other, "{flag:#x}");
        assert_eq!(set(ME, 0).await, Ok(()));
    }
    // Flags that no caller sets stay: the index of a directory, what TFS keeps there.
    assert_eq!(set(ME, 0x1000 | 0x0080_0000 | InodeFlags::SYNC).await, Ok(()));
    assert_eq!(tfs.inode_flags(inode).await, Ok(InodeFlags(InodeFlags::SYNC)));
    let link = tfs.symlink(ME, ROOT, b"link", b"file").await.unwrap().attr.inode;
    assert_eq!(tfs.set_inode_flags(ME, link, InodeFlags(0)).await, Err(Errno::ENOTTY));

    // As the kernel's `EXT2_FL_INHERITED` and `ext2_mask_flags`; +D is for directories.
    let directory = tfs.mkdir(ME, ROOT, b"directory", 0o755).await.unwrap().attr.inode;
    let given = InodeFlags::NO_DUMP | InodeFlags::SYNC | InodeFlags::APPEND_ONLY | 0x10000;
    set_flags(&tfs, directory, given).await;
    let below = tfs.mkdir(ME, directory, b"below", 0o755).await.unwrap().attr.inode;
    let file = tfs.mknod(ME, directory, b"file", FileKind::Regular, 0o644, 0).await.unwrap();
    let (binding, file) = (InodeFlags::APPEND_ONLY, file.attr.inode);
    assert_eq!(tfs.inode_flags(below).await, Ok(InodeFlags(given & !binding)));
    assert_eq!(tfs.inode_flags(file).await, Ok(InodeFlags(given & !binding & !0x10000)));
    tfs.unmount().unwrap();
    drop(tfs);
    assert_image_clean(image.path(), "flags");
}

/// The story: anybody made root's directory of mode 0777 transparent, so that what others
/// wrote there could vanish, and ran the cleaner over the whole disk.
#[tokio::test]
async fn settings_of_tfs_are_their_owners() {
    let image = image(8, &[]);
    let (tfs, _) = mount(image.path());
    let set = |caller, inode, name: &'static str, value: &'static str| {
        let value = Bytes::from_static(value.as_bytes());
        tfs.setxattr(caller, inode, name.as_bytes(), value, XattrFlags::default())
    };
    let transparent = "user.tfs.transparent";
    let common = tfs.mkdir(ME, ROOT, b"common", 0o777).await.unwrap().attr.inode;
    assert_eq!(set(USER, common, transparent, "1").await, Err(Errno::EPERM));
    let own = tfs.mkdir(USER, ROOT, b"own", 0o755).await.unwrap().attr.inode;
    assert_eq!(set(USER, own, transparent, "1").await, Ok(()));
    assert_eq!(set(OTHER, own, transparent, "0").await, Err(Errno::EPERM));
    assert_eq!(tfs.removexattr(OTHER, own, transparent.as_bytes()).await, Err(Errno::EPERM));
    assert_eq!(set(ME, own, transparent, "0").await, Ok(()));

    for (name, value) in [(CLEAN_XATTR, "1"), (TARGET_LOSS_XATTR, "7")] {
        assert_eq!(set(USER, ROOT, name, value).await, Err(Errno::EPERM), "{name}");
        assert_eq!(set(USER, own, name, value).await, Err(Errno::EINVAL), "{name}");
        assert_eq!(set(ME, ROOT, name, value).await, Ok(()), "{name}");
    }
    let give = SetAttr { uid: Some(USER.uid), ..SetAttr::default() };
    tfs.setattr(ME, ROOT, None, give).await.unwrap();
    assert_eq!(set(USER, ROOT, CLEAN_XATTR, "1").await, Ok(()), "the topmost directory's owner");
    tfs.unmount().unwrap();
}
