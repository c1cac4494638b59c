//! Old states that come back: whole, or a path of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use atoll_dht::MemoryBlocks;
use atoll_vfs::{Caller, FileSystem, InodeNumber, SetAttr, SetTime, XattrFlags};
use atoll_volume::owned::{CopyError, Snapshot};
use bytes::Bytes;

use super::history::{DAY, HOUR, MINUTE, START, Scene, noise, place, unlink, write};
use super::{Mortal, REGULAR};

#[tokio::test(start_paused = true)]
async fn a_restored_state_is_the_present_and_the_present_an_old_one() {
    let mut scene = Scene::new("24h/7d/4w").await;
    let mut trees = Vec::new();
    for hour in 1..4 {
        scene.set_clock(START + hour * HOUR);
        write(scene.fs(), &format!("dir/{hour}"), &noise(hour, 9000)).await;
        scene.write("file", &noise(hour, 20_000)).await;
        trees.push(scene.shown(None).await);
    }
    let newest = place(scene.fs(), "dir/3").await;
    let newest = scene.fs().lookup(Caller::default(), newest.0, newest.1).await.expect("is there");
    scene.set_clock(START + 3 * HOUR + MINUTE);
    let restored = scene.fs().restore(START + 2 * HOUR - 1).await.expect("restores");
    assert_eq!(restored.expect("another").unix_ms, START + HOUR);
    scene.mount(None).await;
    assert_eq!(scene.shown(None).await, trees[0]);
    assert_eq!(scene.shown(Some(START + 3 * HOUR)).await, trees[2]);
    assert_eq!(scene.fs().restore(START + DAY).await.expect("has nothing to do"), None);
    let made = scene.fs().mknod(Caller::default(), InodeNumber::ROOT, b"new", REGULAR, 0o644, 0);
    assert!(made.await.expect("makes").attr.inode > newest.attr.inode, "a number of its own");
    scene.fs().check_invariants();

    // It stays although it is not the last one of its hour, and goes when all others are newer.
    for hour in 4..30 * 24 {
        scene.set_clock(START + hour * HOUR);
        scene.write("file", &noise(hour, 10)).await;
        let times = scene.times().await;
        let oldest = times[0];
        assert_eq!(times.contains(&(START + 3 * HOUR)), oldest <= START + 3 * HOUR, "{hour}");
    }
    assert!(scene.times().await[0] > START + 3 * HOUR);
}

#[tokio::test(start_paused = true)]
async fn a_restore_that_dies_between_any_two_puts_leaves_the_present_or_the_old_state() {
    for lives_for in 0.. {
        let memory = MemoryBlocks::new();
        let ring = Arc::new(Mortal { blocks: memory.clone(), puts_left: AtomicU64::new(1000) });
        let scene = Scene::on(ring.clone(), memory, "24h", None).await;
        let mut trees = Vec::new();
        for hour in 1..4 {
            scene.set_clock(START + hour * HOUR);
            scene.write("dir/file", &noise(hour, 20_000)).await;
            trees.push(scene.shown(None).await);
        }
        let times = scene.times().await;
        ring.puts_left.store(lives_for, Ordering::Relaxed);
        // While the ring takes no root, a restore waits.
        let limit = std::time::Duration::from_secs(5);
        let restored = tokio::time::timeout(limit, scene.fs().restore(START + HOUR)).await;
        let found = (scene.shown(None).await, scene.times().await);
        if restored.is_ok_and(|restored| restored.is_ok()) {
            let added = [times, vec![START + 3 * HOUR]].concat();
            assert_eq!(found, (trees[0].clone(), added));
            assert_eq!(lives_for, 3, "a state, the history and the root");
            return;
        }
        assert_eq!(found, (trees[2].clone(), times), "{lives_for}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_path_of_an_old_state_is_copied_back() {
    let mut scene = Scene::new("24h").await;
    let me = Caller::default();
    scene.set_clock(START + HOUR);
    write(scene.fs(), "above/dir/file", &noise(1, 20_000)).await;
    write(scene.fs(), "above/dir/sub/other", b"other").await;
    write(scene.fs(), "above/single", b"single").await;
    let (dir, _) = place(scene.fs(), "above/dir/x").await;
    let link = scene.fs().symlink(me, dir, b"link", b"file").await.expect("links");
    scene.fs().forget(link.attr.inode, 1);
    let flags = XattrFlags::default();
    scene.fs().setxattr(me, dir, b"user.a", Bytes::from_static(b"1"), flags).await.expect("sets");
    let time = SetTime::To(atoll_vfs::FileTime::from_unix_ms(5000));
    let attributes = SetAttr {
        mode: Some(0o2751),
        uid: Some(7),
        gid: Some(8),
        size_bytes: None,
        atime: Some(time),
        mtime: Some(time),
    };
    scene.fs().setattr(me, dir, None, attributes).await.expect("sets");
    scene.fs().sync().await.expect("flushes");
    let entry = |snapshot: Arc<Snapshot>, path: &'static [u8]| async move {
        let mut entry = snapshot.resolve(path).await.expect("is there").entry;
        let owner = entry.owner.as_mut().expect("it has one");
        (owner.inode, owner.ctime) = (0, Default::default());
        entry
    };
    let old = entry(scene.volume(None).await.expect("opens").snapshot().await, b"above/single");
    let (old, before) = (old.await, scene.shown(None).await);

    scene.set_clock(START + 2 * HOUR);
    for path in ["above/dir/file", "above/dir/link", "above/dir/sub/other", "above/single"] {
        unlink(scene.fs(), path).await;
    }
    let (above, _) = place(scene.fs(), "above/x").await;
    scene.fs().rmdir(me, dir, b"sub").await.expect("removes");
    scene.fs().rmdir(me, above, b"dir").await.expect("removes");
    scene.fs().rmdir(me, InodeNumber::ROOT, b"above").await.expect("removes");
    scene.write("else", b"stays").await;

    let (from, fs) = (scene.old(START + HOUR).await, scene.fs().clone());
    let copied = fs.copy_from(&from, b"above/dir", false).await.expect("copies");
    assert_eq!((copied.files, copied.bytes), (3, 20_005));
    fs.copy_from(&from, b"/above/single/", false).await.expect("copies");
    let exists = fs.copy_from(&from, b"above/single", false).await.expect_err("is there");
    assert_eq!(exists, CopyError::Exists { path: "/above/single".into() });
    for missing in [&b"nothing"[..], b"above/no/file", b"above/single/file", b"above/.."] {
        let error = fs.copy_from(&from, missing, true).await.expect_err("is not there");
        assert!(matches!(error, CopyError::Call { .. }), "{error}");
    }
    fs.sync().await.expect("flushes");
    let mut expected = before.clone();
    expected.insert(b"else".to_vec(), (b"stays".to_vec(), Vec::new()));
    assert_eq!(scene.shown(None).await, expected);
    let snapshot = scene.volume(None).await.expect("opens").snapshot().await;
    let owner = snapshot.resolve(b"above/dir").await.expect("is there").entry;
    assert_eq!((owner.mode, owner.mtime.secs), (0o2751, 5));
    assert_eq!(owner.owner.map(|owner| (owner.uid, owner.gid)), Some((7, 8)));
    assert_eq!(entry(snapshot, b"above/single").await, old);

    // What is there now goes, whatever it is.
    write(scene.fs(), "above/dir/new", b"goes").await;
    unlink(scene.fs(), "above/single").await;
    write(scene.fs(), "above/single/is/a/directory", b"now").await;
    for path in [&b"above/dir"[..], b"above/single"] {
        fs.copy_from(&from, path, true).await.expect("replaces");
    }
    fs.sync().await.expect("flushes");
    assert_eq!(scene.shown(None).await, expected);
    scene.mount(None).await;
    scene.fs().check_invariants();
}
