//! What must not grow with the tree: memory, and the blocks an update touches.

use std::fs;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use atoll_dht::{Blocks, MemoryBlocks, NewBlock, OverMemory, PutError};
use atoll_env::BoxFuture;
use atoll_volume::owned::{PublishOptions, VolumeOptions};
use bytes::Bytes;

use crate::ring::{WatchedBlocks, open_with, publish_with, small_blocks, snapshot};
use crate::trees::patterned;

/// A ring with room for everything that forgets data blocks: it keeps what is needed to
/// walk a tree, counts the rest, and gives data back from a rule.
#[derive(Default)]
struct Forgetful {
    kept: MemoryBlocks,
    forgotten: AtomicU64,
}

impl OverMemory for Forgetful {
    fn memory(&self) -> &MemoryBlocks {
        &self.kept
    }

    fn put_blocks(
        &self,
        mut blocks: Vec<NewBlock>,
    ) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let count = blocks.len();
        blocks.retain(|block| block.id.kind.is_mutable() || block.bytes.starts_with(b"AT"));
        self.forgotten.fetch_add((count - blocks.len()) as u64, Ordering::Relaxed);
        let kept = self.kept.put_blocks(blocks);
        Box::pin(async move {
            assert!(kept.await.iter().all(Result::is_ok));
            vec![Ok(()); count]
        })
    }
}

/// Twenty-one gibibytes, nearly all of them holes, with data at the beginning, around
/// every gibibyte and at the very end.
#[tokio::test]
async fn a_file_of_twenty_gibibytes_is_published_and_read_by_what_it_has_of_data() {
    let source = tempfile::tempdir().expect("a directory");
    let file = fs::File::create(source.path().join("file")).expect("makes");
    let size = (21u64 << 30) + 12_345;
    file.set_len(size).expect("grows");
    let mut wanted = Vec::new();
    for i in 0..=21u64 {
        let bytes = patterned(100_000, i);
        let at = (i << 30).saturating_sub(50_000).min(size - 100_000);
        file.write_all_at(&bytes, at).expect("writes");
        wanted.push((at, bytes));
    }
    file.write_all_at(b"the end", size - 7).expect("writes");
    let blocks = Arc::new(Forgetful::default());
    let published = publish_with(&blocks, source.path(), PublishOptions::default()).await;
    assert_eq!(published.bytes, size);
    let data_blocks = blocks.forgotten.load(Ordering::Relaxed);
    assert!((44..=80).contains(&data_blocks), "{data_blocks} data blocks");
    let snapshot = snapshot(&blocks).await;
    let item = snapshot.resolve(b"file").await.expect("is there");
    assert_eq!(item.entry.size_bytes(), size);
    // The data is forgotten; what is known of it is where it must be asked for.
    let at = wanted[5].0;
    assert!(snapshot.read_range(&item, at, 10).await.is_err());
    let hole = snapshot.read_range(&item, at + (512 << 20), 200_000).await.expect("a hole");
    assert!(hole.len() == 200_000 && hole.iter().all(|byte| *byte == 0));
    let kept = blocks.kept.counts().put_bytes;
    // A directory, an inode of 169 pointers, 64 KiB of indirect block on each side of 21
    // boundaries and at both ends.
    assert!(kept < 45 * 65_542, "{kept} bytes of metadata");

    // And with real blocks, every byte of data comes back.
    let blocks = Arc::new(MemoryBlocks::new());
    publish_with(&blocks, source.path(), PublishOptions::default()).await;
    let snapshot = crate::ring::snapshot(&blocks).await;
    for (at, bytes) in &wanted[..wanted.len() - 1] {
        let back = snapshot.read_range(&item, *at, bytes.len() as u32).await.expect("reads");
        assert!(back == bytes[..], "at {at}");
    }
    assert_eq!(snapshot.read_range(&item, size - 7, 100).await.expect("reads"), "the end");
}

#[tokio::test]
async fn no_more_bytes_are_on_their_way_than_allowed_whatever_the_size_of_the_tree() {
    let source = tempfile::tempdir().expect("a directory");
    for i in 0..30 {
        let name = source.path().join(format!("{i}"));
        fs::write(name, patterned(500_000, i)).expect("writes");
    }
    let limit = 256 << 10;
    let blocks = WatchedBlocks::new();
    blocks.0.delay_ms.store(1, Ordering::Relaxed);
    let options = PublishOptions { max_in_flight_bytes: limit, ..small_blocks() };
    let published = publish_with(&blocks, source.path(), options).await;
    assert_eq!(published.bytes, 15_000_000);
    let most = blocks.0.most_in_flight_bytes.load(Ordering::SeqCst);
    assert!(most <= limit && most > limit / 4, "{most} bytes at once");
}

/// One directory of 100,000 entries: a change of one uploads one leaf and what is above
/// it, a lookup fetches one block per level, and a listing comes in pages.
#[tokio::test]
async fn a_directory_of_a_hundred_thousand_entries_is_updated_and_read_by_a_few_blocks() {
    // In memory where there is such a place: a disk takes seconds for so many names.
    let source = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
    let source = source.expect("a directory");
    let top = source.path().join("many");
    fs::create_dir(&top).expect("makes");
    let original = top.join("entry-000000");
    fs::write(&original, b"").expect("writes");
    for i in 1..100_000 {
        let name = top.join(format!("entry-{i:06}"));
        // Links to one empty file: quicker to make than so many inodes.
        if i % 50_000 == 0 || fs::hard_link(&original, &name).is_err() {
            fs::write(&name, b"").expect("writes");
        }
    }
    let blocks = WatchedBlocks::new();
    let first = publish_with(&blocks, source.path(), PublishOptions::default()).await;
    assert_eq!(first.files, 100_000);
    assert!((80..=500).contains(&first.blocks), "{} blocks", first.blocks);

    fs::write(top.join("entry-050000"), b"changed").expect("writes");
    fs::remove_file(top.join("entry-020000")).expect("removes");
    let second = publish_with(&blocks, source.path(), PublishOptions::default()).await;
    // Two leaves (or a few, where a cut moved), the interior block above, the root
    // directory, the changed file's inode.
    assert!(second.new_blocks <= 12, "{} new blocks", second.new_blocks);
    assert!(second.new_bytes < 600_000, "{} new bytes", second.new_bytes);

    let gets = || blocks.0.gets.load(Ordering::Relaxed);
    let volume = open_with(&blocks, VolumeOptions::default()).await;
    let snapshot = volume.snapshot().await;
    let before = gets();
    snapshot.resolve(b"many/entry-077777").await.expect("is there");
    assert_eq!(gets() - before, 3, "the root directory, an interior block, a leaf");
    assert!(snapshot.resolve(b"many/entry-020000").await.is_err());

    let many = snapshot.resolve(b"many").await.expect("is there");
    let mut listing = snapshot.list(&many).expect("is a directory");
    let (mut count, mut last) = (0, Bytes::new());
    loop {
        let page = listing.next_page(1000).await.expect("lists");
        let Some(end) = page.last() else { break };
        assert!(page.len() <= 1000 && page[0].entry.name > last);
        last = end.entry.name.clone();
        count += page.len();
    }
    assert_eq!(count, 99_999);
}

/// Entries put in and taken out anywhere: the cuts depend on the names alone, so two
/// directories with the same entries are the same blocks however they came about.
#[tokio::test]
async fn a_directory_is_cut_the_same_way_whatever_its_history() {
    let source = tempfile::tempdir().expect("a directory");
    let name = |i: u32| source.path().join(format!("name-{}", i.wrapping_mul(2_654_435_761)));
    for i in 0..3000 {
        fs::write(name(i), b"").expect("writes");
        crate::trees::set_mtime(&name(i), 1, 1);
    }
    let blocks = Arc::new(MemoryBlocks::new());
    let first = publish_with(&blocks, source.path(), small_blocks()).await;
    let hash = |snapshot: Arc<atoll_volume::owned::Snapshot>| snapshot.info().directory.hash;
    let before = hash(snapshot(&blocks).await);
    fs::write(name(3000), b"").expect("writes");
    let second = publish_with(&blocks, source.path(), small_blocks()).await;
    assert!(
        second.new_blocks <= 4 && first.blocks > 6,
        "{} of {}",
        second.new_blocks,
        first.blocks
    );
    fs::remove_file(name(3000)).expect("removes");
    let third = publish_with(&blocks, source.path(), small_blocks()).await;
    assert_eq!(third.new_blocks, 0);
    assert_eq!(hash(snapshot(&blocks).await), before);
}
