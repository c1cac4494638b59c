//! What a mount says of its files to people who ask: versions, writers, what is pending, who may write.

use std::sync::Arc;

use atoll_dht::{Blocks, MemoryBlocks, Wanted};
use atoll_key::BlockHash;
use atoll_vfs::{Caller, Errno, FileKind, FileSystem, InodeNumber, OpenFlags, RenameFlags, Writer};
use atoll_volume::shared::file_state::{
    BLOCKS_XATTR, CONFLICTS_XATTR, DirectoryConflicts, FileState, NAMES_AT_ONCE, STATE_XATTR,
};
use atoll_volume::shared::{SharedFs, SharedOptions};
use bytes::Bytes;

use super::mounts::{created, env, mounted, user, volume};

const ROOT: InodeNumber = InodeNumber::ROOT;

async fn state(fs: &SharedFs, inode: InodeNumber) -> FileState {
    let value = fs.getxattr(inode, STATE_XATTR.as_bytes()).await.expect("is said");
    FileState::decode(&value).expect("reads back")
}

#[tokio::test]
async fn a_file_says_who_wrote_it_and_what_is_not_on_the_ring() {
    let (env, memory) = (env(), MemoryBlocks::new());
    let blocks: Arc<dyn Blocks> = Arc::new(memory);
    created(&env, &blocks).await;
    let (one, two) = (mounted(&env, &blocks, 1).await, mounted(&env, &blocks, 2).await);
    let (me, rw) = (Caller::default(), OpenFlags::READ_WRITE);
    let (entry, opened) = one.create(me, ROOT, b"file", 0o644, rw).await.expect("made");
    let inode = entry.attr.inode;
    let words = Bytes::from_static(b"words");
    one.write(Writer::At(me), inode, opened.handle, 0, words).await.expect("written");

    let young = state(&one, inode).await;
    assert!(young.pending.is_changed && young.pending.is_unnamed, "{young:?}");
    assert_eq!((young.pending.changed_bytes > 0, young.opens), (true, 1));
    assert_eq!(young.pending.mount_changes, 1);
    one.flush(inode, opened.handle).await.expect("closed");
    let stored = state(&one, inode).await;
    assert_eq!(stored.pending, Default::default());
    one.close(inode, opened.handle).await.expect("closed");
    assert_eq!(state(&one, inode).await.opens, 0);

    let other = two.lookup(me, ROOT, b"file").await.expect("found").attr.inode;
    let seen = state(&two, other).await;
    assert_eq!((seen.version, seen.inode), (stored.version, stored.inode));
    assert_eq!(seen.label, "test");
    assert_eq!(seen.volume, volume().volume_id().0);
    let [written] = &seen.siblings[..] else { panic!("{seen:?}") };
    assert_eq!((written.user, &written.label[..]), (user(1).user_id().0, "1"));
    let [group] = &seen.groups[..] else { panic!("{seen:?}") };
    assert_eq!((group.members, &group.label[..], &group.trouble), (9, "test", &None));
    let now_secs = env.unix_ms() / 1000;
    assert_eq!(seen.user, Some(user(2).user_id().0));
    assert!(seen.certificate_until_secs.expect("a member") > now_secs + 6 * 24 * 3600);

    let root = state(&two, ROOT).await;
    assert_eq!(root.siblings[0].user, user(1).user_id().0, "who named the file");
    let id = volume().volume_id();
    let stranger =
        SharedFs::open(env.clone(), blocks.clone(), id, Some(user(50)), SharedOptions::default());
    let stranger = state(&stranger.await.expect("everybody reads it"), ROOT).await;
    assert_eq!(stranger.certificate_until_secs, None);
    assert!(stranger.why_not.expect("no member").contains("not a member"));
}

#[tokio::test]
async fn contents_of_the_same_time_are_counted_and_their_writers_named() {
    let (env, memory) = (env(), MemoryBlocks::new());
    let blocks: Arc<dyn Blocks> = Arc::new(memory);
    created(&env, &blocks).await;
    let mounts = [mounted(&env, &blocks, 1).await, mounted(&env, &blocks, 2).await];
    let (me, rw) = (Caller::default(), OpenFlags::READ_WRITE);
    let (entry, opened) = mounts[0].create(me, ROOT, b"file", 0o644, rw).await.expect("made");
    mounts[0].flush(entry.attr.inode, opened.handle).await.expect("closed");
    mounts[0].close(entry.attr.inode, opened.handle).await.expect("closed");
    let mut open = Vec::new();
    for fs in &mounts {
        let inode = fs.lookup(me, ROOT, b"file").await.expect("found").attr.inode;
        open.push((inode, fs.open(me, inode, rw).await.expect("opens").handle));
    }
    for (fs, (inode, handle)) in mounts.iter().zip(&open) {
        let text = Bytes::from(format!("of {inode:?} by {:p}", fs));
        fs.write(Writer::At(me), *inode, *handle, 0, text).await.expect("written");
    }
    for (fs, (inode, handle)) in mounts.iter().zip(&open) {
        fs.flush(*inode, *handle).await.expect("closed");
    }
    let said = state(&mounts[0], open[0].0).await;
    assert_eq!(said.conflicts, 1, "{said:?}");
    let mut users: Vec<[u8; 32]> = said.siblings.iter().map(|one| one.user).collect();
    users.sort_unstable();
    let mut both = [1, 2].map(|number| user(number).user_id().0);
    both.sort_unstable();
    assert_eq!(users, both);
}

#[tokio::test]
async fn the_blocks_of_a_file_are_named_a_thousand_at_a_time() {
    let (env, memory) = (env(), MemoryBlocks::new());
    let blocks: Arc<dyn Blocks> = Arc::new(memory.clone());
    created(&env, &blocks).await;
    let fs = mounted(&env, &blocks, 1).await;
    let (me, rw) = (Caller::default(), OpenFlags::READ_WRITE);
    let (entry, opened) = fs.create(me, ROOT, b"large", 0o644, rw).await.expect("made");
    let (inode, handle) = (entry.attr.inode, opened.handle);
    // 1,100 blocks of 64 KiB, each with something of its own and holes between.
    for n in 0..1100_u64 {
        let word = Bytes::copy_from_slice(&n.to_be_bytes());
        fs.write(Writer::At(me), inode, handle, n << 16, word).await.expect("written");
    }
    fs.flush(inode, handle).await.expect("closed");
    let hashes = async |from: usize| {
        let name = format!("{BLOCKS_XATTR}{from}");
        let value = fs.getxattr(inode, name.as_bytes()).await.expect("is said");
        value.chunks(32).map(|hash| BlockHash(hash.try_into().expect("32"))).collect::<Vec<_>>()
    };
    let (first, rest) = (hashes(0).await, hashes(1024).await);
    assert_eq!(first.len(), 1024);
    // The word of the first one is zeros: a hole. The others have blocks, and these have blocks of pointers.
    assert!(rest.len() > 1099 - 1024, "{}", rest.len());
    for hash in first.iter().chain(&rest) {
        let held = memory.get_block(hash.inode_content_id(), Wanted::Newest).await;
        held.expect("is on the ring");
    }
    let mut all: Vec<BlockHash> = first.into_iter().chain(rest).collect();
    all.sort();
    all.dedup();
    assert!(all.len() > 1099, "each once: {}", all.len());
    assert_eq!(hashes(all.len()).await, []);
    let wrong = fs.getxattr(inode, b"user.atoll.blocks.x").await;
    assert_eq!(wrong, Err(Errno::ENODATA));
}

/// All that a mount says of the conflicts of the root directory: kept names, and files with contents that nobody was shown.
async fn conflicts(fs: &SharedFs) -> (Vec<String>, Vec<String>) {
    let (mut kept, mut unopened, mut from) = (Vec::new(), Vec::new(), 0);
    let text = |name: Vec<u8>| String::from_utf8(name).expect("ours");
    loop {
        let value = fs.getxattr(ROOT, format!("{CONFLICTS_XATTR}{from}").as_bytes()).await;
        let found = DirectoryConflicts::decode(&value.expect("is said")).expect("reads back");
        kept.extend(found.kept.into_iter().map(text));
        unopened.extend(found.unopened.into_iter().map(|one| text(one.name)));
        from += NAMES_AT_ONCE;
        if found.names < NAMES_AT_ONCE as u64 {
            return (kept, unopened);
        }
    }
}

#[tokio::test]
async fn a_directory_tells_its_conflicts_and_no_names_that_programs_gave() {
    let blocks: Arc<dyn Blocks> = Arc::new(MemoryBlocks::new());
    created(&env(), &blocks).await;
    let mounts = [mounted(&env(), &blocks, 1).await, mounted(&env(), &blocks, 2).await];
    let (me, rw) = (Caller::default(), OpenFlags::READ_WRITE);
    let like_one = "file~0a1b2c3d~20261123T135501Z";
    let names = (0..NAMES_AT_ONCE + 6).map(|n| format!("a{n:02}"));
    for name in names.chain(["file".into(), like_one.into()]) {
        let made = mounts[0].mknod(me, ROOT, name.as_bytes(), FileKind::Regular, 0o644, 0);
        made.await.expect("made");
    }
    let mut open = Vec::new();
    for fs in &mounts {
        let inode = fs.lookup(me, ROOT, b"file").await.expect("found").attr.inode;
        open.push((inode, fs.open(me, inode, rw).await.expect("opens").handle));
        let text = Bytes::from(format!("by {:p}", fs));
        let (inode, handle) = *open.last().expect("just opened");
        fs.write(Writer::At(me), inode, handle, 0, text).await.expect("written");
    }
    for (fs, (inode, handle)) in mounts.iter().zip(&open) {
        fs.flush(*inode, *handle).await.expect("closed");
        fs.close(*inode, *handle).await.expect("it is open");
    }
    let none = Vec::<String>::new();
    for fs in &mounts {
        assert_eq!(conflicts(fs).await, (none.clone(), vec!["file".to_owned()]));
    }
    // Asking changes nothing; opening does.
    let inode = mounts[1].lookup(me, ROOT, b"file").await.expect("found").attr.inode;
    let handle = mounts[1].open(me, inode, OpenFlags::READ).await.expect("opens").handle;
    mounts[1].close(inode, handle).await.expect("it is open");
    let (kept, unopened) = conflicts(&mounts[0]).await;
    assert_eq!((kept.len(), unopened), (1, none.clone()), "{kept:?}");
    assert!(kept[0].starts_with("file~") && kept[0] != like_one, "{kept:?}");
    // A person who gives it a name, even such a one, has looked at it.
    let to = "file~0a1b2c3d~20261124T135501Z";
    let renamed =
        mounts[0].rename(me, ROOT, kept[0].as_bytes(), ROOT, to.as_bytes(), RenameFlags::default());
    renamed.await.expect("renames");
    assert_eq!(conflicts(&mounts[1]).await, (none.clone(), none));
    let name = format!("{CONFLICTS_XATTR}0");
    assert_eq!(mounts[0].getxattr(open[0].0, name.as_bytes()).await, Err(Errno::ENODATA));
    let set = mounts[0].setxattr(me, ROOT, name.as_bytes(), Bytes::new(), Default::default());
    assert_eq!(set.await, Err(Errno::EPERM));
}
