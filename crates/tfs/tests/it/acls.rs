//! POSIX access control lists: kept in step with the mode, handed on, and the same on disk as
//! the kernel's. Who is kept out by them is tested on real mounts (`mounted`).

use std::path::Path;
use std::process::Command;

use atoll_tfs::fs::Tfs;
use atoll_vfs::{
    Caller, Errno, FileKind, FileSystem, InodeNumber, OpenFlags, SetAttr, Writer, XattrFlags,
};
use bytes::Bytes;

use crate::access::{USER, image};
use crate::calls::{ME, ROOT, write};
use crate::e2fsck::assert_image_clean;
use crate::kernel::{KernelMount, drivers, mount, skipped};

pub(crate) const ACCESS: &[u8] = b"system.posix_acl_access";
pub(crate) const DEFAULT: &[u8] = b"system.posix_acl_default";

/// Tag, permissions, user or group.
type Entry = (u16, u16, u32);
const NOBODY: u32 = u32::MAX;
/// `u::rwx,u:1000:rw-,g::r-x,m::rw-,o::r--`.
const LIST: &[Entry] =
    &[(1, 7, NOBODY), (2, 6, 1000), (4, 5, NOBODY), (16, 6, NOBODY), (32, 4, NOBODY)];

fn encode(entries: &[Entry]) -> Bytes {
    let mut bytes = vec![2, 0, 0, 0];
    for (tag, permissions, id) in entries {
        bytes.extend_from_slice(&tag.to_le_bytes());
        bytes.extend_from_slice(&permissions.to_le_bytes());
        bytes.extend_from_slice(&id.to_le_bytes());
    }
    bytes.into()
}

async fn set(tfs: &Tfs, inode: InodeNumber, name: &[u8], list: &[Entry]) -> Result<(), Errno> {
    tfs.setxattr(ME, inode, name, encode(list), XattrFlags::default()).await
}

async fn mode(tfs: &Tfs, inode: InodeNumber) -> u32 {
    tfs.getattr(inode, None).await.unwrap().attr.mode
}

async fn chmod(tfs: &Tfs, inode: InodeNumber, mode: u32) {
    let changes = SetAttr { mode: Some(mode), ..SetAttr::default() };
    tfs.setattr(ME, inode, None, changes).await.unwrap();
}

#[tokio::test]
async fn list_and_mode_say_the_same() {
    let image = image(8, &["-b", "1024"]);
    let (tfs, _) = mount(image.path());
    let file = write(&tfs, ROOT, "file", b"x").await.unwrap();
    assert_eq!(tfs.getxattr(file, ACCESS).await, Err(Errno::ENODATA));
    chmod(&tfs, file, 0o4644).await;
    assert_eq!(set(&tfs, file, ACCESS, LIST).await, Ok(()));
    assert_eq!(tfs.getxattr(file, ACCESS).await, Ok(encode(LIST)));
    assert_eq!(mode(&tfs, file).await, 0o4764, "the mask is the group's");
    assert_eq!(tfs.listxattr(file).await, Ok(vec![Bytes::from_static(ACCESS)]));
    chmod(&tfs, file, 0o610).await;
    let mut changed = LIST.to_vec();
    (changed[0].1, changed[3].1, changed[4].1) = (6, 1, 0);
    assert_eq!(tfs.getxattr(file, ACCESS).await, Ok(encode(&changed)));
    // A list that says no more than a mode is one: nothing is kept.
    let minimal = [(1, 7, NOBODY), (4, 4, NOBODY), (32, 1, NOBODY)];
    assert_eq!(set(&tfs, file, ACCESS, &minimal).await, Ok(()));
    assert_eq!(mode(&tfs, file).await, 0o741);
    assert_eq!(tfs.getxattr(file, ACCESS).await, Err(Errno::ENODATA));
    assert_eq!(tfs.getattr(file, None).await.unwrap().attr.blocks_512, 2, "nor a block for it");
    // Taken away, the mode stays as the mask left it.
    set(&tfs, file, ACCESS, LIST).await.unwrap();
    assert_eq!(tfs.removexattr(ME, file, ACCESS).await, Ok(()));
    assert_eq!(mode(&tfs, file).await, 0o764);
    assert_eq!(tfs.removexattr(ME, file, ACCESS).await, Err(Errno::ENODATA));
    assert_eq!(set(&tfs, file, ACCESS, &[]).await, Ok(()), "no entries: none is kept");
    // One who is not in the group cannot keep a program running as it.
    for (caller, kept) in [(ME, 0o2000), (Caller { gid: 0, ..USER }, 0o2000), (USER, 0)] {
        chmod(&tfs, file, 0o2755).await;
        let flags = XattrFlags::default();
        tfs.setxattr(caller, file, ACCESS, encode(LIST), flags).await.unwrap();
        assert_eq!(mode(&tfs, file).await, kept | 0o764, "{caller:?}");
    }
    tfs.unmount().unwrap();
    drop(tfs);
    assert_image_clean(image.path(), "lists");
}

#[tokio::test]
async fn what_is_no_list_or_has_no_place_is_refused() {
    let image = image(8, &[]);
    let (tfs, _) = mount(image.path());
    let file = write(&tfs, ROOT, "file", b"x").await.unwrap();
    let flags = XattrFlags::default();
    for (story, value) in [
        ("nothing", Bytes::new()),
        ("another version", Bytes::from([&[1, 0, 0, 0], &encode(LIST)[4..]].concat())),
        ("half an entry", encode(LIST).slice(..20)),
        ("a user without a mask", encode(&[LIST[0], LIST[1], LIST[2], LIST[4]])),
    ] {
        for name in [ACCESS, DEFAULT] {
            let answer = tfs.setxattr(ME, file, name, value.clone(), flags).await;
            assert_eq!(answer, Err(Errno::EINVAL), "{story}");
        }
    }
    assert_eq!(set(&tfs, file, DEFAULT, LIST).await, Err(Errno::EACCES), "of no directory");
    let link = tfs.symlink(ME, ROOT, b"link", b"file").await.unwrap().attr.inode;
    assert_eq!(set(&tfs, link, ACCESS, LIST).await, Err(Errno::EOPNOTSUPP));
    tfs.unmount().unwrap();
}

#[tokio::test]
async fn what_is_made_in_a_directory_takes_its_default_list_in_place_of_the_umask() {
    let image = image(8, &["-b", "1024"]);
    let (tfs, _) = mount(image.path());
    let me = Caller { umask: 0o077, ..ME };
    let made = tfs.mkdir(me, ROOT, b"directory", 0o777).await.unwrap().attr;
    assert_eq!(made.mode, 0o700, "no list: the umask counts");
    let directory = made.inode;
    assert_eq!(set(&tfs, directory, DEFAULT, LIST).await, Ok(()));
    assert_eq!(mode(&tfs, directory).await, 0o700, "a default list is for what comes");

    let flags = OpenFlags::WRITE;
    let created = tfs.create(me, directory, b"created", 0o666, flags).await.unwrap().0.attr;
    let node = tfs.mknod(me, directory, b"fifo", FileKind::Fifo, 0o640, 0).await.unwrap().attr;
    let below = tfs.mkdir(me, directory, b"below", 0o755).await.unwrap().attr;
    let link = tfs.symlink(me, directory, b"link", &[b'x'; 200]).await.unwrap().attr;
    assert_eq!((created.mode, node.mode, below.mode, link.mode), (0o664, 0o640, 0o744, 0o777));
    let masked = |owner: u16, mask: u16, other: u16| {
        let mut list = LIST.to_vec();
        (list[0].1, list[3].1, list[4].1) = (owner, mask, other);
        Ok(encode(&list))
    };
    assert_eq!(tfs.getxattr(created.inode, ACCESS).await, masked(6, 6, 4));
    assert_eq!(tfs.getxattr(node.inode, ACCESS).await, masked(6, 4, 0));
    assert_eq!(tfs.getxattr(below.inode, ACCESS).await, masked(7, 4, 4));
    assert_eq!(tfs.getxattr(below.inode, DEFAULT).await, Ok(encode(LIST)), "handed on");
    for inode in [created.inode, node.inode] {
        assert_eq!(tfs.getxattr(inode, DEFAULT).await, Err(Errno::ENODATA));
    }
    assert_eq!(tfs.listxattr(link.inode).await, Ok(vec![]));
    // Through two levels, and with a list that is no more than a mode.
    let minimal = [(1, 7, NOBODY), (4, 4, NOBODY), (32, 0, NOBODY)];
    assert_eq!(set(&tfs, below.inode, DEFAULT, &minimal).await, Ok(()));
    let last = tfs.create(me, below.inode, b"file", 0o666, flags).await.unwrap().0.attr;
    assert_eq!(last.mode, 0o640);
    assert_eq!(tfs.getxattr(last.inode, ACCESS).await, Err(Errno::ENODATA));
    tfs.unmount().unwrap();
    drop(tfs);
    assert_image_clean(image.path(), "inherited lists");
}

/// Where there is a block for the list of a new directory but none for its entries, there is no
/// directory, and nothing is left of it.
#[tokio::test]
async fn a_directory_is_made_with_its_list_or_not_at_all() {
    // Each directory takes two blocks: it is the first or the second that is missing.
    for left in [0, 1] {
        let image = image(4, &["-b", "1024", "-m", "0", "-N", "2048"]);
        let (tfs, _) = mount(image.path());
        let directory = tfs.mkdir(ME, ROOT, b"directory", 0o777).await.unwrap().attr.inode;
        set(&tfs, directory, DEFAULT, LIST).await.unwrap();
        let full = tfs.create(ME, ROOT, b"full", 0o644, OpenFlags::WRITE).await.unwrap();
        let (inode, handle) = (full.0.attr.inode, full.1.handle);
        for at in 0.. {
            let bytes = Bytes::from(vec![1; 1024]);
            match tfs.write(Writer::At(ME), inode, handle, at * 1024, bytes).await {
                Ok(_) if tfs.usage().unwrap().free_blocks == left => break,
                Ok(_) => {}
                Err(errno) => panic!("{errno:?}: {:?}", tfs.usage()),
            }
        }
        let before = tfs.usage().unwrap();
        // Of another list than any block holds.
        for mode in [0o700, 0o710] {
            let made = tfs.mkdir(ME, directory, b"made", mode).await;
            assert_eq!(made.map(drop), Err(Errno::ENOSPC), "{left}");
        }
        let after = tfs.usage().unwrap();
        assert_eq!(
            (after.free_blocks, after.free_inodes),
            (before.free_blocks, before.free_inodes),
            "{left}"
        );
        tfs.unmount().unwrap();
        drop(tfs);
        assert_image_clean(image.path(), "full of lists");
    }
}

/// Files that inherit the same list share its block, as with the kernel's driver, and part when
/// one of them changes.
#[tokio::test]
async fn files_with_the_same_list_share_its_block() {
    let image = image(8, &["-b", "1024"]);
    let (tfs, _) = mount(image.path());
    let directory = tfs.mkdir(ME, ROOT, b"directory", 0o777).await.unwrap().attr.inode;
    set(&tfs, directory, DEFAULT, LIST).await.unwrap();
    let free = || tfs.usage().unwrap().free_blocks;
    let mut files = Vec::new();
    let before = free();
    for n in 0..1500u32 {
        let name = format!("{n}");
        let made = tfs.mknod(ME, directory, name.as_bytes(), FileKind::Regular, 0o666, 0).await;
        files.push(made.unwrap().attr.inode);
    }
    // Names of 12 bytes, two blocks of attributes for 1,024 sharers each, indirect blocks.
    assert!(before - free() < 40, "{} blocks", before - free());
    chmod(&tfs, files[3], 0o600).await;
    tfs.removexattr(ME, files[4], ACCESS).await.unwrap();
    for (n, inode) in files.iter().enumerate().take(1400).skip(5) {
        tfs.unlink(ME, directory, format!("{n}").as_bytes()).await.unwrap();
        tfs.forget(*inode, 1);
    }
    assert_eq!(mode(&tfs, files[2]).await, 0o664);
    assert_eq!(mode(&tfs, files[3]).await, 0o600);
    let mut alone = LIST.to_vec();
    (alone[0].1, alone[3].1, alone[4].1) = (6, 0, 0);
    assert_eq!(tfs.getxattr(files[3], ACCESS).await, Ok(encode(&alone)));
    alone[3].1 = 6;
    alone[4].1 = 4;
    for inode in [files[0], files[2], files[1450]] {
        assert_eq!(tfs.getxattr(inode, ACCESS).await, Ok(encode(&alone)));
    }
    tfs.unmount().unwrap();
    drop(tfs);
    assert_image_clean(image.path(), "shared lists");
}

/// Runs a program of the package `acl` or `attr`; what it says.
pub(crate) fn said(program: &str, arguments: &[&str], path: &Path) -> String {
    let output = Command::new(program).args(arguments).arg(path).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?} {}: {error}", path.display());
    String::from_utf8(output.stdout).unwrap()
}

/// Whether `setfacl` and `getfacl` are installed. Says loudly if not.
pub(crate) fn tools_are_here() -> bool {
    let here = Command::new("setfacl").arg("--version").output().is_ok();
    if !here {
        skipped("setfacl is not installed (package acl)");
    }
    here
}

const SET: &[&str] = &["-m", "u:1000:rw,g:50:r,g:0:rwx,m::rw"];
const SET_DEFAULT: &[&str] = &["-d", "-m", "u:7:rwx,g:8:-,o::-"];

async fn raw(tfs: &Tfs, name: &str, list: &[u8]) -> Result<Bytes, Errno> {
    let inode = tfs.lookup(ME, ROOT, name.as_bytes()).await.unwrap().attr.inode;
    tfs.getxattr(inode, list).await
}

fn kernel_raw(path: &Path, list: &[u8]) -> Bytes {
    let mut value = vec![0; 4096];
    let len = rustix::fs::getxattr(path, list, &mut value[..]).unwrap();
    Bytes::copy_from_slice(&value[..len])
}

/// Lists that the kernel wrote, in a block and (ext4) in the inode, are TFS's; those that TFS
/// changed and made are the kernel's; e2fsck takes both.
#[tokio::test]
async fn the_kernel_and_tfs_keep_the_same_lists() {
    if !tools_are_here() {
        return;
    }
    for driver in drivers() {
        let image = image(16, &["-b", "1024", "-I", "256"]);
        let kernel = KernelMount::new(image.path(), driver, "acl,user_xattr");
        let at = kernel.path();
        std::fs::write(at.join("file"), b"x").unwrap();
        std::fs::create_dir(at.join("directory")).unwrap();
        said("setfacl", SET, &at.join("file"));
        said("setfacl", &["-m", "u:1000:x"], &at.join("directory"));
        said("setfacl", SET_DEFAULT, &at.join("directory"));
        said("setfattr", &["-n", "user.here", "-v", "kernel's"], &at.join("file"));
        said("setfattr", &["-n", "user.there", "-v", "kernel's"], &at.join("file"));
        let lists = [("file", ACCESS), ("directory", ACCESS), ("directory", DEFAULT)];
        let written = lists.map(|(name, list)| kernel_raw(&at.join(name), list));
        kernel.unmount();
        assert_image_clean(image.path(), driver);

        let (tfs, _) = mount(image.path());
        for ((name, list), written) in lists.iter().zip(&written) {
            assert_eq!(raw(&tfs, name, list).await.as_ref(), Ok(written), "{driver}: {name}");
        }
        let file = tfs.lookup(ME, ROOT, b"file").await.unwrap().attr.inode;
        chmod(&tfs, file, 0o640).await;
        let ours = Bytes::from_static(b"ours");
        tfs.setxattr(ME, file, b"user.here", ours.clone(), XattrFlags::default()).await.unwrap();
        assert_eq!(tfs.getxattr(file, b"user.here").await, Ok(ours), "{driver}");
        let kept = Bytes::from_static(b"kernel's");
        assert_eq!(tfs.getxattr(file, b"user.there").await, Ok(kept), "{driver}");
        assert_eq!(tfs.listxattr(file).await.unwrap().len(), 3, "{driver}");
        let directory = tfs.lookup(ME, ROOT, b"directory").await.unwrap().attr.inode;
        tfs.mkdir(ME, directory, b"made", 0o777).await.unwrap();
        tfs.removexattr(ME, directory, ACCESS).await.unwrap();
        tfs.unmount().unwrap();
        drop(tfs);
        assert_image_clean(image.path(), &format!("TFS after {driver}"));

        let kernel = KernelMount::new(image.path(), driver, "acl,user_xattr");
        let at = kernel.path();
        let shown = |name: &str| said("getfacl", &["-cpnE"], &at.join(name));
        assert_eq!(
            shown("file"),
            "user::rw-\nuser:1000:rw-\ngroup::r--\ngroup:0:rwx\ngroup:50:r--\nmask::r--\nother::---\n\n"
        );
        assert_eq!(
            shown("directory/made"),
            "user::rwx\nuser:7:rwx\ngroup::r-x\ngroup:8:---\nmask::rwx\nother::---\n\
             default:user::rwx\ndefault:user:7:rwx\ndefault:group::r-x\ndefault:group:8:---\n\
             default:mask::rwx\ndefault:other::---\n\n"
        );
        assert!(!shown("directory").contains("user:1000"), "{}", shown("directory"));
        let here = said("getfattr", &["--absolute-names", "-d"], &at.join("file"));
        assert!(here.contains("user.here=\"ours\"\nuser.there=\"kernel's\"\n"), "{here}");
        kernel.unmount();
        assert_image_clean(image.path(), &format!("{driver} after TFS"));
    }
}

/// A list that cannot be read keeps everybody but the owner out: the kernel takes the error for
/// an answer. It is no reason to stop the file system.
#[tokio::test]
async fn a_damaged_list_is_an_error_and_no_missing_list() {
    let image = image(8, &["-b", "1024"]);
    let (tfs, _) = mount(image.path());
    let file = write(&tfs, ROOT, "file", b"x").await.unwrap();
    let directory = tfs.mkdir(ME, ROOT, b"directory", 0o755).await.unwrap().attr.inode;
    set(&tfs, file, ACCESS, LIST).await.unwrap();
    set(&tfs, directory, DEFAULT, LIST).await.unwrap();
    tfs.unmount().unwrap();
    drop(tfs);
    // The version of each list, as it stands on disk with its first entry.
    let mut bytes = std::fs::read(image.path()).unwrap();
    let disk = [1, 0, 0, 0, 1, 0, 7, 0, 2, 0, 6, 0, 0xe8, 3, 0, 0];
    let places: Vec<usize> =
        (0..bytes.len() - 16).step_by(4).filter(|at| bytes[*at..at + 16] == disk).collect();
    assert!(places.len() >= 2, "{places:?}");
    places.iter().for_each(|at| bytes[*at] = 3);
    std::fs::write(image.path(), bytes).unwrap();

    let (tfs, _) = mount(image.path());
    assert_eq!(raw(&tfs, "file", ACCESS).await, Err(Errno::EIO));
    assert_eq!(raw(&tfs, "directory", DEFAULT).await, Err(Errno::EIO));
    let made = tfs.mkdir(ME, directory, b"below", 0o755).await;
    assert_eq!(made.map(drop), Err(Errno::EIO), "not made without its list");
    let changes = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    assert_eq!(tfs.setattr(ME, file, None, changes).await.map(drop), Err(Errno::EIO));
    assert_eq!(set(&tfs, file, ACCESS, LIST).await, Ok(()), "a new one takes its place");
    tfs.mkdir(ME, ROOT, b"elsewhere", 0o755).await.unwrap();
    assert_eq!(tfs.failure(), None);
    tfs.unmount().unwrap();
}
