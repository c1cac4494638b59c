//! What a mount says of its files to people who ask: versions, writers, what is pending, who may write.

use std::sync::Arc;

use atoll_dht::{Blocks, MemoryBlocks, Wanted};
use atoll_key::BlockHash;
use atoll_vfs::{Caller, Errno, FileSystem, InodeNumber, OpenFlags, Writer};
use atoll_volume::shared::file_state::{BLOCKS_XATTR, FileState, STATE_XATTR};
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
