//! What a pool leaves on its disk: plain files in plain directories, readable without Atoll.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use atoll_env::TokioRuntime;
use atoll_pool::disk::directory::Directory;
use atoll_pool::{CreateError, OpenError, PoolFs, PoolSettings, check, create, leave};
use atoll_vfs::{
    Caller, Errno, FileSystem, FileTime, Handle, InodeNumber, OpenFlags, RenameFlags, SetAttr,
    SetTime, Writer, XattrFlags,
};
use bytes::Bytes;
use tempfile::TempDir;

use crate::conformance::{is_root, opened};

type Fs = PoolFs<Directory>;

const ROOT: InodeNumber = InodeNumber::ROOT;

fn me() -> Caller {
    Caller::default()
}

async fn new_pool(level: u8) -> (TempDir, Fs) {
    let dir = tempfile::tempdir().unwrap();
    create(&Directory::open(dir.path()).unwrap(), PoolSettings::new([7; 16], level)).await.unwrap();
    let fs = opened(dir.path()).await;
    (dir, fs)
}

async fn mkdir(fs: &Fs, parent: InodeNumber, name: &str) -> InodeNumber {
    fs.mkdir(me(), parent, name.as_bytes(), 0o755).await.unwrap().attr.inode
}

async fn write(fs: &Fs, parent: InodeNumber, name: &str, text: &str) -> InodeNumber {
    let (entry, opened) =
        fs.create(me(), parent, name.as_bytes(), 0o640, OpenFlags::WRITE).await.unwrap();
    let inode = entry.attr.inode;
    let bytes = Bytes::copy_from_slice(text.as_bytes());
    fs.write(Writer::At(me()), inode, opened.handle, 0, bytes).await.unwrap();
    fs.close(inode, opened.handle).await.unwrap();
    inode
}

async fn find(fs: &Fs, path: &str) -> Result<InodeNumber, Errno> {
    let mut at = ROOT;
    for name in path.split('/').filter(|name| !name.is_empty()) {
        at = fs.lookup(me(), at, name.as_bytes()).await?.attr.inode;
    }
    Ok(at)
}

async fn read(fs: &Fs, path: &str) -> String {
    let inode = find(fs, path).await.unwrap();
    let handle = fs.open(me(), inode, OpenFlags::READ).await.unwrap().handle;
    let bytes = fs.read(inode, handle, 0, 1 << 20).await.unwrap();
    fs.close(inode, handle).await.unwrap();
    String::from_utf8(bytes.to_vec()).unwrap()
}

async fn rename(fs: &Fs, from: &str, to: &str) {
    let split = |path: &str| {
        path.rsplit_once('/').map(|(dir, name)| (dir.to_owned(), name.to_owned())).unwrap()
    };
    let ((from, name), (to, new_name)) = (split(from), split(to));
    let (from, to) = (find(fs, &from).await.unwrap(), find(fs, &to).await.unwrap());
    fs.rename(me(), from, name.as_bytes(), to, new_name.as_bytes(), RenameFlags::default())
        .await
        .unwrap();
}

/// Where the root directory lies.
fn root_of(dir: &Path) -> PathBuf {
    dir.join("slots/000/0000000000000001")
}

/// Path and text of every file, as a program sees them that follows symbolic links to directories.
fn files_below(dir: &Path) -> BTreeMap<PathBuf, String> {
    let mut all = BTreeMap::new();
    let mut open = vec![dir.to_owned()];
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            match fs::metadata(&path) {
                Ok(found) if found.is_dir() => open.push(path),
                Ok(_) => {
                    let text = fs::read_to_string(&path).unwrap();
                    all.insert(path.strip_prefix(dir).unwrap().to_owned(), text);
                }
                Err(error) => panic!("{}: {error}", path.display()),
            }
        }
    }
    all
}

fn expected(files: &[(&str, &str)]) -> BTreeMap<PathBuf, String> {
    files.iter().map(|(path, text)| (PathBuf::from(path), (*text).to_owned())).collect()
}

/// "all lower level subdirectories are stored on the same node as the node on which their parent directory is stored" (Kosha
/// §3.2).
#[tokio::test]
async fn directories_down_to_the_level_lie_in_slots_and_deeper_ones_in_their_parents() {
    if !is_root() {
        return;
    }
    let (dir, fs) = new_pool(2).await;
    let home = mkdir(&fs, ROOT, "home").await;
    let anna = mkdir(&fs, home, "anna").await;
    let work = mkdir(&fs, anna, "work").await;
    write(&fs, work, "report", "text").await;
    let placeholder = root_of(dir.path()).join("home");
    assert!(fs::symlink_metadata(&placeholder).unwrap().is_symlink());
    assert!(fs::symlink_metadata(placeholder.join("anna")).unwrap().is_symlink());
    assert!(fs::symlink_metadata(placeholder.join("anna/work")).unwrap().is_dir());
    let report = placeholder.join("anna/work/report");
    assert_eq!(fs::read_to_string(&report).unwrap(), "text");
    assert_eq!(fs::metadata(&report).unwrap().permissions().mode() & 0o7777, 0o640);
    // A client sees directories, each with its subdirectories counted.
    assert_eq!(fs.getattr(ROOT, None).await.unwrap().attr.nlink, 3);
    assert_eq!(fs.getattr(anna, None).await.unwrap().attr.nlink, 3);
}

/// A copy by hand works, also after directories were renamed to other depths.
#[tokio::test]
async fn the_tree_reads_by_hand_also_after_renames_to_other_depths() {
    if !is_root() {
        return;
    }
    let (dir, fs) = new_pool(1).await;
    let a = mkdir(&fs, ROOT, "a").await;
    let b = mkdir(&fs, ROOT, "b").await;
    let deep = mkdir(&fs, a, "deep").await;
    mkdir(&fs, deep, "deeper").await;
    write(&fs, b, "file", "of b").await;
    rename(&fs, "/b", "/a/deep/deeper/b").await;
    let files = files_below(&root_of(dir.path()));
    assert_eq!(files, expected(&[("a/deep/deeper/b/file", "of b")]));
    // A plain directory with a placeholder in it goes up: check lets the placeholder go up as far.
    rename(&fs, "/a/deep/deeper", "/a/deeper").await;
    assert_eq!(read(&fs, "/a/deeper/b/file").await, "of b");
    fs.end().await.unwrap();
    drop(fs);
    let env = Arc::new(TokioRuntime::current());
    let report = check(env, Directory::open(dir.path()).unwrap()).await.unwrap();
    assert_eq!(
        (report.placeholders_mended, report.files_gone, report.files_added),
        (1, 0, 0),
        "{report:?}"
    );
    let files = files_below(&root_of(dir.path()));
    assert_eq!(files, expected(&[("a/deeper/b/file", "of b")]));
}

/// A link that a user has made like a placeholder is a link to the client, and leads by hand where it should.
#[tokio::test]
async fn a_users_link_like_a_placeholder_is_a_link() {
    if !is_root() {
        return;
    }
    let (dir, fs) = new_pool(1).await;
    mkdir(&fs, ROOT, "home").await;
    let target = fs::read_link(root_of(dir.path()).join("home")).unwrap();
    let target = target.to_str().unwrap();
    for (name, target) in [("like", target.to_owned()), ("escaped", format!("./{target}"))] {
        let made = fs.symlink(me(), ROOT, name.as_bytes(), target.as_bytes()).await.unwrap();
        assert_eq!(made.attr.size_bytes, target.len() as u64);
        assert_eq!(fs.readlink(made.attr.inode).await.unwrap(), target.as_bytes());
        let again = fs.lookup(me(), ROOT, name.as_bytes()).await.unwrap();
        assert_eq!((again.attr.inode, again.attr.kind), (made.attr.inode, made.attr.kind));
        assert_eq!(again.attr.size_bytes, made.attr.size_bytes);
    }
    assert!(fs.unlink(me(), ROOT, b"like").await.is_ok(), "it is no directory");
    assert_eq!(fs.unlink(me(), ROOT, b"home").await, Err(Errno::EISDIR));
}

/// Looking a symbolic link up is not reading it: its access time stays, however the disk renews those.
#[tokio::test]
async fn looking_links_up_leaves_their_access_times() {
    if !is_root() {
        return;
    }
    let (dir, fs) = new_pool(1).await;
    let target = b"a/target/as/long/as/a/placeholder";
    let link = fs.symlink(me(), ROOT, b"link", target).await.unwrap().attr.inode;
    let time = FileTime { secs: 1_960_000_000, nanos: 0 };
    let (atime, mtime) = (Some(SetTime::To(time)), Some(SetTime::To(time)));
    fs.setattr(me(), link, None, SetAttr { atime, mtime, ..SetAttr::default() }).await.unwrap();
    let seen = async |fs: &Fs| {
        assert_eq!(find(fs, "/link").await, Ok(link));
        fs.getattr(link, None).await.unwrap().attr.atime
    };
    assert_eq!(seen(&fs).await, time);
    fs.end().await.unwrap();
    drop(fs);
    let fs = opened(dir.path()).await;
    assert_eq!(seen(&fs).await, time);
    assert_eq!(fs.readlink(link).await.unwrap(), &target[..]);
}

/// Somebody edits D by hand: files that he puts there, moves and removes are what clients then see.
#[tokio::test]
async fn changes_by_hand_are_seen() {
    if !is_root() {
        return;
    }
    let (dir, fs) = new_pool(1).await;
    let home = mkdir(&fs, ROOT, "home").await;
    write(&fs, home, "old", "1").await;
    let kept = write(&fs, home, "kept", "2").await;
    let handle = fs.handle_of(kept).await.unwrap();
    let by_hand = root_of(dir.path()).join("home");
    fs::remove_file(by_hand.join("old")).unwrap();
    fs::rename(by_hand.join("kept"), by_hand.join("renamed")).unwrap();
    fs::write(by_hand.join("new"), "3").unwrap();
    fs::create_dir(by_hand.join("plain")).unwrap();
    symlink("new", by_hand.join("link")).unwrap();
    assert_eq!(find(&fs, "/home/old").await, Err(Errno::ENOENT));
    assert_eq!(read(&fs, "/home/new").await, "3");
    assert_eq!(find(&fs, "/home/renamed").await, Ok(kept), "it is the same file");
    write(&fs, find(&fs, "/home/plain").await.unwrap(), "below", "4").await;
    let link = find(&fs, "/home/link").await.unwrap();
    assert_eq!(fs.readlink(link).await.unwrap(), &b"new"[..]);
    let found = fs.by_handle(me(), &handle).await.unwrap();
    assert_eq!(found.attr.inode, kept);
    // The numbers last.
    let new = find(&fs, "/home/new").await.unwrap();
    fs.end().await.unwrap();
    drop(fs);
    let fs = opened(dir.path()).await;
    assert_eq!(find(&fs, "/home/new").await, Ok(new));
    assert_eq!(find(&fs, "/home/link").await, Ok(link));
}

/// The index can be thrown away: the same files have the same numbers.
#[tokio::test]
async fn without_its_index_a_pool_is_the_same() {
    if !is_root() {
        return;
    }
    let (dir, fs) = new_pool(1).await;
    let home = mkdir(&fs, ROOT, "home").await;
    let deep = mkdir(&fs, home, "deep").await;
    let file = write(&fs, deep, "file", "text").await;
    fs.link(me(), file, home, b"second").await.unwrap();
    let link = fs.symlink(me(), home, b"link", b"file").await.unwrap().attr.inode;
    fs.end().await.unwrap();
    drop(fs);
    fs::remove_file(dir.path().join(".atoll/index")).unwrap();
    let env = Arc::new(TokioRuntime::current());
    let (fs, report) = PoolFs::open(env, Directory::open(dir.path()).unwrap()).await.unwrap();
    assert_eq!(
        report.files_indexed, 7,
        "fixed two, home, deep, file by two names, link: {report:?}"
    );
    assert_eq!(report.changes_redone, 0, "the journal knows of the checkpoint: {report:?}");
    let paths =
        [("/home", home), ("/home/deep", deep), ("/home/deep/file", file), ("/home/second", file)];
    for (path, inode) in paths.into_iter().chain([("/home/link", link)]) {
        assert_eq!(find(&fs, path).await, Ok(inode), "{path}");
    }
    assert_eq!(fs.getattr(ROOT, None).await.unwrap().attr.nlink, 3);
}

#[tokio::test]
async fn leaving_leaves_one_plain_tree() {
    if !is_root() {
        return;
    }
    let (dir, fs) = new_pool(2).await;
    let home = mkdir(&fs, ROOT, "home").await;
    let anna = mkdir(&fs, home, "anna").await;
    write(&fs, anna, "file", "text").await;
    let slots = mkdir(&fs, ROOT, "slots").await;
    write(&fs, slots, "mine", "too").await;
    write(&fs, ROOT, "top", "of it").await;
    fs.end().await.unwrap();
    drop(fs);
    let env = Arc::new(TokioRuntime::current());
    let report = leave(env, Directory::open(dir.path()).unwrap()).await.unwrap();
    assert!(report.names_taken.is_empty(), "{report:?}");
    assert_eq!(
        files_below(dir.path()),
        expected(&[("home/anna/file", "text"), ("slots/mine", "too"), ("top", "of it")])
    );
    for path in ["home", "home/anna", "slots"] {
        assert!(fs::symlink_metadata(dir.path().join(path)).unwrap().is_dir(), "{path}");
    }
    assert!(!dir.path().join(".atoll").exists());
}

#[tokio::test]
async fn a_pool_is_made_in_an_empty_directory_and_never_anew() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let settings = PoolSettings::new([7; 16], 1);
    let disk = || Directory::open(dir.path()).unwrap();
    let env = || Arc::new(TokioRuntime::current());
    assert_eq!(PoolFs::open(env(), disk()).await.err(), Some(OpenError::NoStamp));
    fs::write(dir.path().join("mine"), "text").unwrap();
    assert_eq!(create(&disk(), settings).await, Err(CreateError::NotEmpty("mine".to_owned())));
    fs::remove_file(dir.path().join("mine")).unwrap();
    fs::create_dir(dir.path().join("lost+found")).unwrap();
    create(&disk(), settings).await.unwrap();
    assert!(matches!(create(&disk(), settings).await, Err(CreateError::NotEmpty(_))));
    let (fs, report) = PoolFs::open(env(), disk()).await.unwrap();
    assert_eq!(report.changes_redone, 0);
    assert_eq!(fs.settings(), settings);
    assert_eq!(PoolFs::open(env(), disk()).await.err(), Some(OpenError::InUse));
    let metadata = fs::metadata(root_of(dir.path())).unwrap();
    assert_eq!((metadata.uid(), metadata.mode() & 0o7777), (0, 0o755));
    drop(fs);
    fs::write(dir.path().join(".atoll/stamp"), "atoll pool 9\n").unwrap();
    assert_eq!(PoolFs::open(env(), disk()).await.err(), Some(OpenError::Stamp));
}

/// A file whose last name goes lives on while it is open, and so does a directory.
#[tokio::test]
async fn what_is_open_outlives_its_name() {
    if !is_root() {
        return;
    }
    let (_dir, fs) = new_pool(1).await;
    let home = mkdir(&fs, ROOT, "home").await;
    let file = write(&fs, ROOT, "file", "text").await;
    let handle = fs.open(me(), file, OpenFlags::READ).await.unwrap().handle;
    fs.unlink(me(), ROOT, b"file").await.unwrap();
    fs.rmdir(me(), ROOT, b"home").await.unwrap();
    assert_eq!(fs.read(file, handle, 0, 10).await.unwrap(), &b"text"[..]);
    assert_eq!(fs.getattr(file, None).await.unwrap().attr.nlink, 0);
    assert_eq!(fs.mkdir(me(), home, b"in", 0o755).await, Err(Errno::ENOENT));
    let listing = fs.opendir(me(), home).await.unwrap().handle;
    assert_eq!(fs.readdir(home, listing, 0, 10, false).await, Ok(Vec::new()));
    fs.closedir(home, listing).await.unwrap();
    fs.close(file, handle).await.unwrap();
    fs.forget(file, 1);
    assert_eq!(fs.getattr(file, None).await, Err(Errno::ESTALE));
    assert_eq!(fs.read(file, handle, 0, 1).await, Err(Errno::EBADF));
    assert_eq!(fs.read(file, Handle::NONE, 0, 1).await, Err(Errno::EBADF));
}

/// Somebody puts a file where a client has removed one; a process that dies takes neither it nor what he set.
#[tokio::test]
async fn a_kill_undoes_nothing_that_was_done_by_hand() {
    if !is_root() {
        return;
    }
    let (dir, fs) = new_pool(1).await;
    let by_hand = root_of(dir.path());
    write(&fs, ROOT, "removed", "by a client").await;
    fs.unlink(me(), ROOT, b"removed").await.unwrap();
    write(&fs, ROOT, "kept", "by a client").await;
    let mode = SetAttr { mode: Some(0o755), ..SetAttr::default() };
    let kept = find(&fs, "/kept").await.unwrap();
    fs.setattr(me(), kept, None, mode).await.unwrap();
    fs::write(by_hand.join("removed"), "by hand").unwrap();
    fs::set_permissions(by_hand.join("kept"), fs::Permissions::from_mode(0o600)).unwrap();
    drop(fs);
    let fs = opened(dir.path()).await;
    assert_eq!(read(&fs, "/removed").await, "by hand");
    assert_eq!(fs.getattr(find(&fs, "/kept").await.unwrap(), None).await.unwrap().attr.mode, 0o600);
}

/// A copy by hand with all attributes does not take the original's number, whichever a check comes across first.
#[tokio::test]
async fn a_copy_with_all_attributes_is_another_file() {
    if !is_root() {
        return;
    }
    let (dir, fs) = new_pool(1).await;
    let (first, last) = (mkdir(&fs, ROOT, "a").await, mkdir(&fs, ROOT, "z").await);
    let original = write(&fs, last, "original", "text").await;
    fs.end().await.unwrap();
    drop(fs);
    let by_hand = root_of(dir.path());
    let copied = std::process::Command::new("cp")
        .args(["-a", "--preserve=all"])
        .args([by_hand.join("z/original"), by_hand.join("a/copy")])
        .status();
    assert!(copied.unwrap().success());
    let env = Arc::new(TokioRuntime::current());
    check(env, Directory::open(dir.path()).unwrap()).await.unwrap();
    let fs = opened(dir.path()).await;
    assert_eq!(find(&fs, "/z/original").await, Ok(original));
    assert_ne!(find(&fs, "/a/copy").await, Ok(original));
    assert_eq!(find(&fs, "/a").await, Ok(first));
}

/// Directories far below each other, all of which the journal has: opening does not recurse.
#[tokio::test]
async fn a_deep_tree_is_opened_after_a_kill() {
    if !is_root() {
        return;
    }
    let (dir, fs) = new_pool(1).await;
    let mut at = ROOT;
    for _ in 0..6000 {
        at = mkdir(&fs, at, "d").await;
    }
    write(&fs, at, "file", "deep").await;
    drop(fs);
    let fs = opened(dir.path()).await;
    let entry = fs.lookup(me(), at, b"file").await.unwrap();
    assert_eq!(entry.attr.size_bytes, 4);
}

/// A directory that somebody puts back into its parent by hand is a plain one from then on.
#[tokio::test]
async fn a_distributed_directory_may_be_made_plain_by_hand() {
    if !is_root() {
        return;
    }
    let (dir, fs) = new_pool(1).await;
    let home = mkdir(&fs, ROOT, "home").await;
    write(&fs, home, "file", "text").await;
    fs.end().await.unwrap();
    drop(fs);
    let name = root_of(dir.path()).join("home");
    let place = fs::canonicalize(&name).unwrap();
    fs::remove_file(&name).unwrap();
    fs::rename(place, &name).unwrap();
    let fs = opened(dir.path()).await;
    assert_eq!(read(&fs, "/home/file").await, "text");
    rename(&fs, "/home/file", "/file").await;
    let root = find(&fs, "/").await.unwrap();
    fs.rmdir(me(), root, b"home").await.unwrap();
}

/// The root's protection is D's afterwards.
#[tokio::test]
async fn leaving_keeps_the_roots_owner_and_mode() {
    if !is_root() {
        return;
    }
    let (dir, fs) = new_pool(1).await;
    let private =
        SetAttr { mode: Some(0o700), uid: Some(1000), gid: Some(1000), ..SetAttr::default() };
    fs.setattr(me(), ROOT, None, private).await.unwrap();
    write(&fs, ROOT, ".atoll", "a user's").await;
    fs.end().await.unwrap();
    drop(fs);
    let env = || Arc::new(TokioRuntime::current());
    let report = leave(env(), Directory::open(dir.path()).unwrap()).await.unwrap();
    assert_eq!(report.names_taken, [".atoll"], "nothing is done yet");
    let fs = opened(dir.path()).await;
    fs.unlink(me(), ROOT, b".atoll").await.unwrap();
    fs.end().await.unwrap();
    drop(fs);
    leave(env(), Directory::open(dir.path()).unwrap()).await.unwrap();
    let top = fs::metadata(dir.path()).unwrap();
    assert_eq!((top.mode() & 0o7777, top.uid()), (0o700, 1000));
}

/// An access control list as Linux keeps it: version 2, then tag, permissions and number of each entry.
fn access_list(entries: &[(u16, u16, u32)]) -> Bytes {
    let mut list = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, number) in entries {
        list.extend(tag.to_le_bytes());
        list.extend(permissions.to_le_bytes());
        list.extend(number.to_le_bytes());
    }
    list.into()
}

const NOBODY: u32 = u32::MAX;
/// The owner and user 1000 everything, the group nothing, others nothing; the mask lets all through.
const LIST: [(u16, u16, u32); 5] =
    [(1, 7, NOBODY), (2, 7, 1000), (4, 0, NOBODY), (16, 7, NOBODY), (32, 0, NOBODY)];

/// A directory's default list goes on to what is made in it, wherever that lies.
#[tokio::test]
async fn a_distributed_directory_inherits_lists_as_a_plain_one_does() {
    if !is_root() {
        return;
    }
    let mut inherited = Vec::new();
    for level in [0, 1] {
        let (_dir, fs) = new_pool(level).await;
        let flags = XattrFlags::default();
        fs.setxattr(me(), ROOT, b"system.posix_acl_default", access_list(&LIST), flags)
            .await
            .unwrap();
        let caller = Caller { umask: 0o022, ..me() };
        let made = fs.mkdir(caller, ROOT, b"home", 0o750).await.unwrap().attr;
        let mut lists = Vec::new();
        for name in ["system.posix_acl_default", "system.posix_acl_access"] {
            lists.push(fs.getxattr(made.inode, name.as_bytes()).await.unwrap());
        }
        inherited.push((made.mode, lists));
    }
    assert_eq!(inherited[0], inherited[1]);
}

/// With a list a mode says less than it seems to: leaving must not open D to the group.
#[tokio::test]
async fn leaving_keeps_the_roots_access_list() {
    if !is_root() {
        return;
    }
    let (dir, fs) = new_pool(1).await;
    let flags = XattrFlags::default();
    fs.setxattr(me(), ROOT, b"system.posix_acl_access", access_list(&LIST), flags).await.unwrap();
    let list = fs.getxattr(ROOT, b"system.posix_acl_access").await.unwrap();
    fs.end().await.unwrap();
    drop(fs);
    leave(Arc::new(TokioRuntime::current()), Directory::open(dir.path()).unwrap()).await.unwrap();
    let mut kept = vec![0; 256];
    let len = rustix::fs::getxattr(dir.path(), "system.posix_acl_access", &mut kept[..]).unwrap();
    assert_eq!(&kept[..len], &list[..]);
}

/// What is in the index's place is no index: it is made again, and the numbers are those of before.
#[tokio::test]
async fn an_index_that_is_damaged_is_made_again() {
    if !is_root() {
        return;
    }
    let (dir, fs) = new_pool(1).await;
    let home = mkdir(&fs, ROOT, "home").await;
    let file = write(&fs, home, "file", "text").await;
    fs.end().await.unwrap();
    drop(fs);
    let index = dir.path().join(".atoll/index");
    for garbage in [vec![0x5a; 70_000], b"short".to_vec()] {
        fs::write(&index, garbage).unwrap();
        let fs = opened(dir.path()).await;
        assert_eq!(find(&fs, "/home/file").await, Ok(file));
        fs.end().await.unwrap();
    }
}
