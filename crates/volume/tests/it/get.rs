//! Copying out: equal trees, resumed copies, and a destination that no volume escapes from.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use atoll_dht::{Blocks, MemoryBlocks};
use atoll_key::BlockHash;
use atoll_volume::format::{Content, DirectoryBlock, Nodes};
use atoll_volume::owned::{GetOptions, GetTreeError, Gotten, NoProgress, get_tree};
use bytes::Bytes;

use crate::ring::{WatchedBlocks, publish_with, small_blocks, snapshot};
use crate::trees::{Tree, assert_same, on_disk, patterned, set_mtime, variety};

async fn get(
    blocks: &Arc<impl Blocks>,
    path: &str,
    dest: &Path,
    options: GetOptions,
) -> Result<Gotten, GetTreeError> {
    let snapshot = snapshot(blocks).await;
    let item = snapshot.resolve(path.as_bytes()).await.expect("is there");
    get_tree(snapshot, &item, dest, options, Arc::new(NoProgress)).await
}

fn with_set_id() -> GetOptions {
    GetOptions { set_id: true, ..GetOptions::default() }
}

async fn published() -> (tempfile::TempDir, Arc<MemoryBlocks>) {
    let source = tempfile::tempdir().expect("a directory");
    variety(source.path());
    let blocks = Arc::new(MemoryBlocks::new());
    publish_with(&blocks, source.path(), small_blocks()).await;
    (source, blocks)
}

#[tokio::test]
async fn a_copied_tree_equals_the_published_one() {
    let (source, blocks) = published().await;
    let dir = tempfile::tempdir().expect("a directory");
    let dest = dir.path().join("copy");
    let gotten = get(&blocks, "", &dest, with_set_id()).await.expect("copies");
    assert_same(&on_disk(&dest), &on_disk(source.path()));
    assert_eq!((gotten.files, gotten.dirs, gotten.symlinks, gotten.files_kept), (9, 5, 2, 0));
}

#[tokio::test]
async fn a_second_copy_fetches_no_file_and_mends_modes() {
    let (source, blocks) = published().await;
    let dir = tempfile::tempdir().expect("a directory");
    let dest = dir.path().join("copy");
    get(&blocks, "", &dest, with_set_id()).await.expect("copies");
    fs::set_permissions(dest.join("large"), fs::Permissions::from_mode(0o777)).expect("sets");
    let before = blocks.counts().gets;
    let gotten = get(&blocks, "", &dest, with_set_id()).await.expect("copies");
    assert_eq!((gotten.files_kept, gotten.bytes), (9, 0));
    // The directories and the two xattr blocks at most.
    assert!(blocks.counts().gets - before <= 4 + 2);
    assert_same(&on_disk(&dest), &on_disk(source.path()));
}

#[tokio::test]
async fn set_id_bits_are_dropped_unless_asked_for() {
    let (_source, blocks) = published().await;
    let dir = tempfile::tempdir().expect("a directory");
    let dest = dir.path().join("small");
    get(&blocks, "small", &dest, GetOptions::default()).await.expect("copies");
    assert_eq!(fs::metadata(&dest).expect("is there").mode() & 0o7777, 0o711);
}

#[tokio::test]
async fn one_file_or_link_is_copied_to_the_name_given() {
    let (_source, blocks) = published().await;
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("renamed");
    get(&blocks, "a/b/c/deep", &file, GetOptions::default()).await.expect("copies");
    assert_eq!(fs::read(&file).expect("reads"), b"deep");
    let link = dir.path().join("link");
    get(&blocks, "a/link", &link, GetOptions::default()).await.expect("copies");
    assert_eq!(fs::read_link(&link).expect("reads"), Path::new("../small"));
}

#[tokio::test]
async fn holes_stay_holes() {
    let source = tempfile::tempdir().expect("a directory");
    let sparse = fs::File::create(source.path().join("sparse")).expect("makes");
    sparse.set_len(50 << 20).expect("grows");
    std::os::unix::fs::FileExt::write_all_at(&sparse, &patterned(9000, 4), 20 << 20)
        .expect("writes");
    let blocks = Arc::new(MemoryBlocks::new());
    let published = publish_with(&blocks, source.path(), small_blocks()).await;
    assert!(published.new_bytes < 200_000, "{} bytes uploaded", published.new_bytes);
    let dir = tempfile::tempdir().expect("a directory");
    let dest = dir.path().join("copy");
    get(&blocks, "", &dest, GetOptions::default()).await.expect("copies");
    assert_same(&on_disk(&dest), &on_disk(source.path()));
    let taken = fs::metadata(dest.join("sparse")).expect("is there").blocks() * 512;
    assert!(taken < 1 << 20, "{taken} bytes taken");
}

/// An interrupted copy: finished files stay, and of an unfinished one the blocks that
/// are right; a wrong one is fetched again.
#[tokio::test]
async fn an_interrupted_copy_goes_on_where_it_was() {
    let source = tempfile::tempdir().expect("a directory");
    let bytes = patterned(4096 * 100, 8);
    fs::write(source.path().join("large"), &bytes).expect("writes");
    fs::write(source.path().join("done"), patterned(4096 * 10, 9)).expect("writes");
    let blocks = Arc::new(MemoryBlocks::new());
    publish_with(&blocks, source.path(), small_blocks()).await;

    let dir = tempfile::tempdir().expect("a directory");
    let dest = dir.path().join("copy");
    get(&blocks, "done", &dest.with_extension("x"), GetOptions::default()).await.expect("copies");
    fs::create_dir(&dest).expect("makes");
    fs::rename(dest.with_extension("x"), dest.join("done")).expect("moves");
    // Sixty blocks of the large one are there; of these the tenth is damaged.
    let mut part = bytes[..4096 * 60].to_vec();
    part[4096 * 10 + 7] ^= 1;
    fs::write(dest.join(".large.atoll-part"), &part).expect("writes");

    let before = blocks.counts().gets;
    let gotten = get(&blocks, "", &dest, GetOptions::default()).await.expect("copies");
    assert_eq!((gotten.files, gotten.files_kept), (1, 1));
    assert_eq!(gotten.bytes_resumed, 4096 * 59);
    assert_eq!(gotten.bytes, 4096 * 41);
    // 41 data blocks, the inode, the directory.
    assert_eq!(blocks.counts().gets - before, 43);
    assert_same(&on_disk(&dest), &on_disk(source.path()));
}

/// Takes blocks off the ring; they can be put back.
async fn take(blocks: &MemoryBlocks, hashes: &[BlockHash]) -> Vec<(BlockHash, Bytes)> {
    let mut taken = Vec::new();
    for hash in hashes {
        taken.push((*hash, blocks.get(*hash).await.expect("is there")));
        blocks.lose(hash);
    }
    taken
}

/// Forty files of twenty blocks and a bit, some of them in a directory.
fn many(top: &Path) {
    fs::create_dir(top.join("dir")).expect("makes");
    for i in 0..40 {
        let name = if i % 10 == 0 { format!("dir/file-{i}") } else { format!("file-{i}") };
        fs::write(top.join(name), patterned(4096 * 20 + i, i as u64)).expect("writes");
    }
}

/// A copy ended at the first block that no node had, though all others could be copied.
#[tokio::test]
async fn a_copy_goes_on_past_what_is_missing_says_so_and_resumes() {
    let source = tempfile::tempdir().expect("a directory");
    many(source.path());
    let blocks = Arc::new(MemoryBlocks::new());
    publish_with(&blocks, source.path(), small_blocks()).await;
    let whole = on_disk(source.path());
    let snapshot = snapshot(&blocks).await;
    let entry = |path: &'static [u8]| async { snapshot.resolve(path).await.expect("there").entry };
    let Content::Regular { inode: Some(inode), .. } = entry(b"file-7").await.content else {
        panic!("a file")
    };
    let Content::Directory(directory) = entry(b"dir").await.content else { panic!("a directory") };
    let data = BlockHash::of(&patterned(4096 * 20 + 33, 33)[4096 * 5..4096 * 6]);
    let lost = take(&blocks, &[data, inode, directory.hash.expect("not empty")]).await;

    let dir = tempfile::tempdir().expect("a directory");
    let dest = dir.path().join("copy");
    let gotten = get(&blocks, "", &dest, GetOptions::default()).await.expect("copies the rest");
    let unread: Vec<_> = gotten.unread.iter().map(|u| (&u.path[..], u.hidden_entries)).collect();
    assert_eq!(unread, [(&b"dir"[..], 4), (b"file-33", 0), (b"file-7", 0)]);
    assert_eq!((gotten.unread_count, gotten.files, gotten.gave_up), (6, 34, false));
    let text = gotten.unread[1].error.to_string();
    assert!(text.contains("/file-33") && text.contains(&data.to_string()), "{text}");
    for (path, seen) in on_disk(&dest) {
        if !path.ends_with(b".atoll-part") && seen.kind == atoll_vfs::FileKind::Regular {
            assert!(seen == whole[&path], "half of {}", String::from_utf8_lossy(&path));
        }
    }

    blocks.put(lost).await.expect("memory takes it");
    let again = get(&blocks, "", &dest, GetOptions::default()).await.expect("copies");
    assert_eq!((again.unread_count, again.files, again.files_kept), (0, 6, 34));
    // All but the lost block and the last, short one, which has other bytes behind it.
    assert!(again.bytes_resumed >= 4096 * 19, "{again:?}");
    assert_same(&on_disk(&dest), &whole);
}

/// A block of a large directory hides the names in it, and none of the others.
#[tokio::test]
async fn a_missing_part_of_a_directory_hides_only_its_own_names() {
    let source = tempfile::tempdir().expect("a directory");
    for i in 0..2000 {
        let name = format!("a name that is long enough to make several blocks {i:04}");
        fs::write(source.path().join(name), i.to_string()).expect("writes");
    }
    let blocks = Arc::new(MemoryBlocks::new());
    publish_with(&blocks, source.path(), small_blocks()).await;
    let Content::Directory(top) = snapshot(&blocks).await.root().entry.content else {
        panic!("a directory")
    };
    let top = blocks.get(top.hash.expect("not empty")).await.expect("is there");
    let Nodes::Interior(leaves) = DirectoryBlock::decode(&top).expect("a block").nodes else {
        panic!("several blocks")
    };
    assert!(leaves.len() >= 4, "{}", leaves.len());
    let lost = take(&blocks, &[leaves[1].hash, leaves[leaves.len() - 1].hash]).await;
    let hidden = leaves[1].entries + leaves[leaves.len() - 1].entries;
    let dir = tempfile::tempdir().expect("a directory");
    let dest = dir.path().join("copy");
    let gotten = get(&blocks, "", &dest, GetOptions::default()).await.expect("copies the rest");
    assert_eq!((gotten.unread_count, gotten.unread.len()), (hidden, 2));
    assert_eq!(gotten.files, 2000 - hidden);
    blocks.put(lost).await.expect("memory takes it");
    get(&blocks, "", &dest, GetOptions::default()).await.expect("copies");
    assert_same(&on_disk(&dest), &on_disk(source.path()));
}

/// Each block that the ring does not answer for costs a deadline: a tree of them would take
/// for ever.
#[tokio::test(start_paused = true)]
async fn a_copy_from_a_ring_that_is_silent_is_given_up() {
    let source = tempfile::tempdir().expect("a directory");
    for i in 0..400 {
        fs::write(source.path().join(i.to_string()), patterned(100, i)).expect("writes");
    }
    let blocks = WatchedBlocks::new();
    publish_with(&blocks, source.path(), small_blocks()).await;
    let snapshot = snapshot(&blocks).await;
    let top = snapshot.root();
    snapshot.list(&top).expect("a directory").next_page(400).await.expect("is read");
    blocks.0.delay_ms.store(20_000, Ordering::Relaxed);
    blocks.0.cut_off.store(1, Ordering::Relaxed);
    let dir = tempfile::tempdir().expect("a directory");
    let dest = dir.path().join("copy");
    let progress = Arc::new(NoProgress);
    let gotten = get_tree(snapshot, &top, &dest, GetOptions::default(), progress).await;
    let gotten = gotten.expect("is told what could not be read");
    assert!(gotten.gave_up && (1..400).contains(&gotten.unread_count), "{}", gotten.unread_count);
}

#[tokio::test]
async fn links_in_the_destination_are_replaced_and_never_followed() {
    let (source, blocks) = published().await;
    let dir = tempfile::tempdir().expect("a directory");
    let outside = dir.path().join("outside");
    fs::create_dir(&outside).expect("makes");
    fs::write(outside.join("victim"), b"untouched").expect("writes");
    let dest = dir.path().join("copy");
    fs::create_dir(&dest).expect("makes");
    symlink(&outside, dest.join("a")).expect("links");
    symlink(outside.join("victim"), dest.join("small")).expect("links");
    symlink(outside.join("victim"), dest.join(".large.atoll-part")).expect("links");
    fs::hard_link(outside.join("victim"), dest.join(".zeros.atoll-part")).expect("links");
    fs::write(dest.join("empty-dir"), b"a file in the way").expect("writes");
    fs::write(dest.join("mine"), b"not of the volume").expect("writes");
    get(&blocks, "", &dest, with_set_id()).await.expect("copies");

    let names: Vec<_> = on_disk(&outside).keys().cloned().collect();
    assert_eq!(names, [b"".to_vec(), b"victim".to_vec()]);
    assert_eq!(fs::read(outside.join("victim")).expect("reads"), b"untouched");
    let mut copied: Tree = on_disk(&dest);
    assert_eq!(copied.remove(&b"mine"[..]).expect("stays").bytes, b"not of the volume");
    assert_same(&copied, &on_disk(source.path()));
}

#[tokio::test]
async fn a_directory_in_place_of_a_file_is_an_error_that_names_it() {
    let (_source, blocks) = published().await;
    let dir = tempfile::tempdir().expect("a directory");
    let dest = dir.path().join("copy");
    fs::create_dir_all(dest.join("small/inner")).expect("makes");
    let error = get(&blocks, "", &dest, GetOptions::default()).await.expect_err("is in the way");
    let GetTreeError::Write { path, .. } = &error else { panic!("{error}") };
    assert_eq!(*path, dest.join("small"));
    assert!(dest.join("small/inner").is_dir());
}

/// A part's name may be a file's of the volume: neither takes the other's place.
#[tokio::test]
async fn a_published_part_file_survives_beside_its_namesake() {
    let source = tempfile::tempdir().expect("a directory");
    fs::write(source.path().join("x"), patterned(20_000, 1)).expect("writes");
    fs::write(source.path().join(".x.atoll-part"), patterned(30_000, 2)).expect("writes");
    fs::write(source.path().join("..x.atoll-part.atoll-part"), b"third").expect("writes");
    let blocks = Arc::new(MemoryBlocks::new());
    publish_with(&blocks, source.path(), small_blocks()).await;
    let dir = tempfile::tempdir().expect("a directory");
    let dest = dir.path().join("copy");
    for _ in 0..2 {
        get(&blocks, "", &dest, GetOptions::default()).await.expect("copies");
        assert_same(&on_disk(&dest), &on_disk(source.path()));
    }
}

#[tokio::test]
async fn an_updated_file_replaces_the_older_one() {
    let source = tempfile::tempdir().expect("a directory");
    let file = source.path().join("file");
    fs::write(&file, patterned(20_000, 1)).expect("writes");
    let blocks = Arc::new(MemoryBlocks::new());
    publish_with(&blocks, source.path(), small_blocks()).await;
    let dir = tempfile::tempdir().expect("a directory");
    let dest = dir.path().join("copy");
    get(&blocks, "", &dest, GetOptions::default()).await.expect("copies");
    fs::write(&file, patterned(20_000, 2)).expect("writes");
    set_mtime(&file, 1_700_000_000, 3);
    publish_with(&blocks, source.path(), small_blocks()).await;
    get(&blocks, "", &dest, GetOptions::default()).await.expect("copies");
    assert_same(&on_disk(&dest), &on_disk(source.path()));
}

/// CFS §7.1 chose the number of blocks under way by hand; here the path does. On a clock
/// that runs: files are written by threads that a paused one would not wait for.
#[tokio::test]
async fn a_copy_over_a_long_path_has_more_on_its_way_the_longer_it_goes_on() {
    let source = tempfile::tempdir().expect("a directory");
    fs::write(source.path().join("file"), patterned(4096 * 4096, 5)).expect("writes");
    let blocks = WatchedBlocks::new();
    publish_with(&blocks, source.path(), small_blocks()).await;
    blocks.0.delay_ms.store(200, Ordering::Relaxed);
    let dir = tempfile::tempdir().expect("a directory");
    get(&blocks, "", &dir.path().join("copy"), GetOptions::default()).await.expect("copies");
    // The window begins with 128 of these blocks, and 512 are the most.
    let most = blocks.0.most_gets_in_flight.load(Ordering::SeqCst);
    assert!((400..=520).contains(&most), "{most} fetches at once");
    assert_same(&on_disk(&dir.path().join("copy")), &on_disk(source.path()));
}

#[tokio::test]
async fn no_more_blocks_are_asked_for_than_the_budget_allows() {
    let source = tempfile::tempdir().expect("a directory");
    for i in 0..8 {
        fs::write(source.path().join(format!("{i}")), patterned(4096 * 50, i)).expect("writes");
    }
    let blocks = WatchedBlocks::new();
    publish_with(&blocks, source.path(), small_blocks()).await;
    blocks.0.delay_ms.store(1, Ordering::Relaxed);
    let dir = tempfile::tempdir().expect("a directory");
    let limit = 16 * 4096;
    let options = GetOptions { max_in_flight_bytes: limit, ..GetOptions::default() };
    get(&blocks, "", &dir.path().join("copy"), options).await.expect("copies");
    let most = blocks.0.most_gets_in_flight.load(Ordering::SeqCst);
    // Besides, directories and their prefetch, which have no file's bytes.
    assert!((8..=17).contains(&most), "{most} fetches at once");
}
