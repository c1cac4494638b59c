//! Volumes that only holders of a read key can read.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};

use atoll_dht::{
    Blocks, GetError, HeldBlock, LeaseRenewal, MemoryBlocks, NewBlock, OverMemory, PutError,
    Renewed, Wanted,
};
use atoll_env::BoxFuture;
use atoll_key::{BlockHash, BlockId, ReadKey, SealError, SecretKey, SignedBlock};
use atoll_vfs::kit;
use atoll_volume::format::FormatError;
use atoll_volume::owned::{
    GetOptions, NoLeaseRecorder, NoProgress, OpenError, PublishError, PublishOptions, Published,
    ReadError, Snapshot, Visibility, Volume, VolumeOptions, get_tree, publish,
};
use atoll_volume::owned::{RootError, sealed_root};
use bytes::Bytes;

use crate::mount::PublishedVolume;
use crate::ring::{env, open_with, publish_with, secret, small_blocks};
use crate::trees::patterned;

fn read_key() -> ReadKey {
    ReadKey::from_bytes([77; 32])
}

fn encrypted() -> PublishOptions {
    PublishOptions { read_key: Some(read_key()), ..small_blocks() }
}

fn with_key(key: ReadKey) -> VolumeOptions {
    VolumeOptions { read_key: Some(key), ..VolumeOptions::default() }
}

/// A ring whose every byte can be looked at, and changed behind the hash's back: blocks
/// are not verified, as if their hash were broken.
#[derive(Default)]
struct OpenRing {
    blocks: Mutex<BTreeMap<BlockId, Bytes>>,
}

impl OpenRing {
    fn content(&self) -> BTreeMap<BlockHash, Bytes> {
        let blocks = self.blocks.lock().expect("not poisoned").clone();
        let content = blocks.into_iter().filter(|(id, _)| !id.kind.is_mutable());
        let hash = |id: BlockId| BlockHash(*id.key.0.first_chunk().expect("64 bytes"));
        content.map(|(id, bytes)| (hash(id), bytes)).collect()
    }

    fn replace(&self, hash: BlockHash, bytes: Vec<u8>) {
        self.blocks.lock().expect("not poisoned").insert(hash.id(), bytes.into());
    }

    fn root(&self) -> SignedBlock {
        let blocks = self.blocks.lock().expect("not poisoned");
        let root = blocks.get(&SignedBlock::id_at(secret().volume_id().root_key()));
        SignedBlock::decode(root.expect("published")).expect("signed")
    }
}

impl Blocks for OpenRing {
    fn get_block(&self, id: BlockId, _: Wanted) -> BoxFuture<'static, Result<HeldBlock, GetError>> {
        let found = self.blocks.lock().expect("not poisoned").get(&id).cloned();
        let missing = GetError::NotFound { key: id.key, told: "nothing here".into() };
        Box::pin(async move { Ok(HeldBlock { version: 0, bytes: found.ok_or(missing)? }) })
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let count = blocks.len();
        let blocks = blocks.into_iter().map(|block| (block.id, block.bytes));
        self.blocks.lock().expect("not poisoned").extend(blocks);
        Box::pin(async move { vec![Ok(()); count] })
    }

    fn put_in_order(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        self.put_blocks(blocks)
    }

    fn renew_blocks(
        &self,
        renewal: LeaseRenewal,
    ) -> BoxFuture<'static, Vec<Result<Renewed, PutError>>> {
        let held = self.blocks.lock().expect("not poisoned");
        let has = |id| if held.contains_key(id) { Renewed::Held } else { Renewed::Lacking };
        let renewed: Vec<_> = renewal.ids.iter().map(|id| Ok(has(id))).collect();
        Box::pin(async move { renewed })
    }

    fn watch(&self, _: BlockId, _: u64) -> BoxFuture<'static, Result<Option<HeldBlock>, GetError>> {
        Box::pin(std::future::pending())
    }
}

async fn try_publish(
    blocks: &Arc<impl Blocks>,
    source: &Path,
    secret: &SecretKey,
    options: PublishOptions,
) -> Result<Published, PublishError> {
    let blocks: Arc<dyn Blocks> = blocks.clone();
    let progress = Arc::new(NoProgress);
    publish(env(), blocks, source, secret, options, progress, Arc::new(NoLeaseRecorder)).await
}

async fn open(blocks: &Arc<impl Blocks>, options: VolumeOptions) -> Result<Arc<Volume>, OpenError> {
    let blocks: Arc<dyn Blocks> = blocks.clone();
    Volume::open(env(), blocks, secret().volume_id(), options).await
}

async fn snapshot(blocks: &Arc<impl Blocks>) -> Arc<Snapshot> {
    open(blocks, with_key(read_key())).await.expect("opens").snapshot().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_encrypted_volume_conforms() {
    let subject = PublishedVolume { read_key: Some(read_key()) };
    kit::run_read_suite(&subject).await.assert_passes();
}

/// A tree with names and contents that nothing else has.
fn telling_tree() -> tempfile::TempDir {
    let source = tempfile::tempdir().expect("a directory");
    let top = source.path();
    fs::create_dir(top.join("a-telling-directory")).expect("makes");
    fs::write(top.join("a-telling-directory/a-telling-name"), "telling words ".repeat(3))
        .expect("writes");
    fs::write(top.join("large"), "telling words ".repeat(2000)).expect("writes");
    std::os::unix::fs::symlink("a-telling-target", top.join("link")).expect("links");
    source
}

#[tokio::test]
async fn what_was_encrypted_reads_back() {
    let source = telling_tree();
    let blocks = Arc::new(MemoryBlocks::new());
    let published = publish_with(&blocks, source.path(), encrypted()).await;
    assert_eq!((published.files, published.dirs, published.symlinks), (2, 2, 1));
    let snapshot = snapshot(&blocks).await;
    assert_eq!(snapshot.info().bytes, published.bytes);
    let dest = source.path().with_extension("copy");
    let (root, progress) = (snapshot.root(), Arc::new(NoProgress));
    get_tree(snapshot, &root, &dest, GetOptions::default(), progress).await.expect("copies");
    for file in ["a-telling-directory/a-telling-name", "large"] {
        let read = |top: &Path| fs::read(top.join(file)).expect("is there");
        assert_eq!(read(&dest), read(source.path()), "{file}");
    }
    fs::remove_dir_all(dest).expect("removes");
}

/// What is on the disk is in the clear, and the volume knows the hashes of sealed blocks.
#[tokio::test]
async fn an_interrupted_copy_of_an_encrypted_file_goes_on_where_it_was() {
    let source = tempfile::tempdir().expect("a directory");
    let bytes = patterned(4096 * 40, 8);
    fs::write(source.path().join("large"), &bytes).expect("writes");
    let blocks = Arc::new(MemoryBlocks::new());
    publish_with(&blocks, source.path(), encrypted()).await;
    let dir = tempfile::tempdir().expect("a directory");
    let dest = dir.path().join("copy");
    fs::create_dir(&dest).expect("makes");
    fs::write(dest.join(".large.atoll-part"), &bytes[..4096 * 30]).expect("writes");
    let snapshot = snapshot(&blocks).await;
    let (root, progress) = (snapshot.root(), Arc::new(NoProgress));
    let gotten = get_tree(snapshot, &root, &dest, GetOptions::default(), progress).await;
    assert_eq!(gotten.expect("copies").bytes_resumed, 4096 * 30);
    assert_eq!(fs::read(dest.join("large")).expect("is there"), bytes);
}

#[tokio::test]
async fn no_block_holds_a_name_or_content_in_the_clear() {
    let source = telling_tree();
    let label = Some("a-telling-label".to_string());
    let stored = |ring: &OpenRing| {
        let mut all: Vec<Bytes> = ring.content().into_values().collect();
        all.push(ring.root().bytes().clone());
        all
    };
    let told = |blocks: &[Bytes]| {
        let holds = |block: &Bytes| {
            [&b"telling"[..], b"ATDB", b"ATIN", b"ATXA"]
                .iter()
                .any(|words| block.windows(words.len()).any(|part| part == *words))
        };
        blocks.iter().filter(|block| holds(block)).count()
    };
    // The search finds them where they are: in a volume that is not encrypted.
    let plain = Arc::new(OpenRing::default());
    let options = PublishOptions { label: label.clone(), ..small_blocks() };
    publish_with(&plain, source.path(), options).await;
    assert_eq!(told(&stored(&plain)), stored(&plain).len());
    let sealed = Arc::new(OpenRing::default());
    let published =
        publish_with(&sealed, source.path(), PublishOptions { label, ..encrypted() }).await;
    let blocks = stored(&sealed);
    assert_eq!(blocks.len() as u64, published.blocks + 1);
    assert_eq!(told(&blocks), 0);
    // A root has the same length whether it tells of much or of little.
    let payload = sealed.root().payload;
    assert_eq!(payload.len(), 5 + 16 + 24 + 4 + 256);
}

/// The point of the deterministic seal.
#[tokio::test]
async fn equal_files_are_one_block_and_only_within_their_volume() {
    let source = tempfile::tempdir().expect("a directory");
    fs::write(source.path().join("one"), patterned(20_000, 3)).expect("writes");
    let blocks = Arc::new(MemoryBlocks::new());
    publish_with(&blocks, source.path(), encrypted()).await;
    let alone = blocks.len();
    fs::copy(source.path().join("one"), source.path().join("two")).expect("copies");
    let again = publish_with(&blocks, source.path(), encrypted()).await;
    assert_eq!(again.new_blocks, 1, "the directory, and nothing of the second file");
    assert_eq!(blocks.len(), alone + 1);
    let same = publish_with(&blocks, source.path(), encrypted()).await;
    assert!(same.unchanged && same.new_blocks == 0, "{same:?}");

    // Another volume, even with the same read key, and the same one in the clear.
    let other = SecretKey::from_seed(&[43; 32]);
    let published = try_publish(&blocks, source.path(), &other, encrypted()).await;
    let published = published.expect("publishes");
    assert_eq!(published.new_blocks, published.blocks);
    let plain = SecretKey::from_seed(&[44; 32]);
    let published = try_publish(&blocks, source.path(), &plain, small_blocks()).await;
    let published = published.expect("publishes");
    assert_eq!(published.new_blocks, published.blocks);
}

#[tokio::test]
async fn a_wrong_or_missing_or_needless_read_key_is_told_before_anything_is_fetched() {
    let source = telling_tree();
    let blocks = Arc::new(MemoryBlocks::new());
    publish_with(&blocks, source.path(), encrypted()).await;
    let fetched = blocks.counts().gets;
    let no_key = open(&blocks, VolumeOptions::default()).await.expect_err("it needs one");
    assert_eq!(no_key, OpenError::Root(RootError::Encrypted));
    assert!(no_key.to_string().contains("give its address with #READKEY"), "{no_key}");
    let wrong = with_key(ReadKey::from_bytes([78; 32]));
    let wrong = open(&blocks, wrong).await.expect_err("it is another one");
    assert_eq!(wrong, OpenError::Root(RootError::WrongReadKey));
    assert!(wrong.to_string().contains("the read key is wrong"), "{wrong}");
    assert_eq!(blocks.counts().gets, fetched);

    let plain = Arc::new(MemoryBlocks::new());
    publish_with(&plain, source.path(), small_blocks()).await;
    let needless = open(&plain, with_key(read_key())).await.expect_err("it has none");
    assert_eq!(needless, OpenError::Root(RootError::NotEncrypted));
}

/// Every stored block, damaged in each of these ways, is an error and never other bytes.
#[tokio::test]
async fn a_damaged_or_foreign_block_is_refused() {
    let source = tempfile::tempdir().expect("a directory");
    fs::write(source.path().join("file"), patterned(10_000, 5)).expect("writes");
    let ring = Arc::new(OpenRing::default());
    publish_with(&ring, source.path(), encrypted()).await;
    let read = async || {
        let snapshot = snapshot(&ring).await;
        let file = snapshot.resolve(b"file").await?;
        snapshot.read_range(&file, 0, 10_000).await
    };
    let whole = read().await.expect("reads");
    assert_eq!(whole, patterned(10_000, 5));
    let content = ring.content();
    assert_eq!(content.len(), 5, "a directory, an inode, three data blocks");
    let elsewhere =
        atoll_key::VolumeCipher::new(&ReadKey::from_bytes([1; 32]), &secret().volume_id());
    for (hash, bytes) in &content {
        let mut flipped = bytes.to_vec();
        *flipped.last_mut().expect("not empty") ^= 0x80;
        let cases = [
            (flipped, SealError::Tag),
            (bytes[..bytes.len() - 1].to_vec(), SealError::Tag),
            (bytes[..100].to_vec(), SealError::Length(100)),
            (Vec::new(), SealError::Length(0)),
            (elsewhere.seal(b"another volume's"), SealError::Tag),
        ];
        for (damaged, error) in cases {
            let len = damaged.len();
            ring.replace(*hash, damaged);
            let told = read().await.expect_err("damaged");
            let ReadError::Bad { hash: named, source: FormatError::Sealed(found), .. } = told
            else {
                panic!("{told:?}");
            };
            let short = len < 28 + 256;
            let expected = if short { SealError::Length(len) } else { error };
            assert_eq!((named, found), (*hash, expected));
        }
        ring.replace(*hash, bytes.to_vec());
    }
    assert_eq!(read().await.expect("reads again"), whole);
}

/// The publisher holds the keys, so only the format's own checks are left.
#[tokio::test]
async fn a_root_that_is_cut_or_sealed_around_nonsense_does_not_open() {
    let cipher = atoll_key::VolumeCipher::new(&read_key(), &secret().volume_id());
    let root = crate::ring::root_of(Default::default());
    let good = sealed_root::encode(&root, Some(&cipher));
    assert_eq!(sealed_root::decode(&good.clone().into(), Some(&cipher)), Ok(root));
    for len in 5..good.len() {
        let cut = Bytes::copy_from_slice(&good[..len]);
        let error = sealed_root::decode(&cut, Some(&cipher)).expect_err("cut");
        assert!(matches!(error, RootError::Bad(_)), "{len}: {error:?}");
    }
    let nonsense = [&good[..21], &cipher.seal_root(b"nonsense")].concat();
    let error = sealed_root::decode(&nonsense.into(), Some(&cipher)).expect_err("nonsense");
    assert_eq!(error, RootError::Bad(FormatError::WrongMagic("volume root")));
    let content = [&good[..21], &cipher.seal(b"a content block")].concat();
    let error = sealed_root::decode(&content.into(), Some(&cipher)).expect_err("no root");
    assert_eq!(error, RootError::Bad(FormatError::Sealed(SealError::Tag)));
}

#[tokio::test]
async fn a_volume_changes_who_can_read_it_only_when_told_to() {
    let source = telling_tree();
    let other_key =
        PublishOptions { read_key: Some(ReadKey::from_bytes([78; 32])), ..small_blocks() };
    use Visibility::{Encrypted, OtherReadKey, Plain};
    let cases = [
        (encrypted(), small_blocks(), Encrypted, Plain),
        (small_blocks(), encrypted(), Plain, Encrypted),
        (encrypted(), other_key, OtherReadKey, Encrypted),
    ];
    for (first, then, was, asks) in cases {
        let blocks = Arc::new(MemoryBlocks::new());
        publish_with(&blocks, source.path(), first).await;
        let stored = blocks.len();
        let key = then.read_key.clone();
        let error = try_publish(&blocks, source.path(), &secret(), then.clone()).await;
        let error = error.expect_err("refused");
        let PublishError::Converts { present, asked } = error else { panic!("{error:?}") };
        assert_eq!((present, asked, blocks.len()), (was, asks, stored), "nothing is uploaded");

        let converting = PublishOptions { convert: true, ..then };
        publish_with(&blocks, source.path(), converting).await;
        let ring: Arc<dyn Blocks> = blocks.clone();
        let now = Visibility::of(&ring, secret().volume_id(), key.as_ref()).await;
        assert_eq!(now, Ok(Some(asks)));
    }
}

/// A reader that holds a volume open goes on with what it has when the publisher takes
/// the read key away, and says why.
/// The ring could not be asked while the tree was uploaded; then the put was refused because
/// there is a root, which was encrypted. It was replaced by one in the clear.
#[tokio::test]
async fn a_root_that_turns_up_late_is_not_converted_either() {
    struct Late {
        ring: MemoryBlocks,
        asked: Mutex<u32>,
    }

    impl OverMemory for Late {
        fn memory(&self) -> &MemoryBlocks {
            &self.ring
        }

        fn get_block(
            &self,
            id: BlockId,
            wanted: Wanted,
        ) -> BoxFuture<'static, Result<HeldBlock, GetError>> {
            let mut asked = self.asked.lock().expect("not poisoned");
            *asked += u32::from(id.kind.is_mutable());
            if id.kind.is_mutable() && *asked <= 2 {
                let error = GetError::Unavailable { key: id.key, told: "no answer".into() };
                return Box::pin(async { Err(error) });
            }
            self.ring.get_block(id, wanted)
        }
    }

    let source = telling_tree();
    let blocks = Arc::new(Late { ring: MemoryBlocks::new(), asked: Mutex::new(10) });
    let first = try_publish(&blocks, source.path(), &secret(), encrypted()).await;
    let version = first.expect("publishes").version;
    // Its clock is ahead of the next publisher's.
    let sealed = blocks.ring.get_signed(secret().volume_id().root_key()).await.expect("is there");
    let ahead = SignedBlock::sign(&secret(), b"", version + 1_000_000_000, &sealed.payload);
    blocks.ring.put_signed(ahead.clone()).await.expect("higher");

    let forget = || *blocks.asked.lock().expect("not poisoned") = 0;
    forget();
    let plain = try_publish(&blocks, source.path(), &secret(), small_blocks()).await;
    assert!(matches!(plain, Err(PublishError::Converts { .. })), "{plain:?}");
    let present = blocks.ring.get_signed(secret().volume_id().root_key()).await;
    assert_eq!(present.as_ref(), Ok(&ahead), "untouched");
    forget();
    let convert = PublishOptions { convert: true, ..small_blocks() };
    let plain = try_publish(&blocks, source.path(), &secret(), convert).await.expect("is told to");
    assert_eq!(plain.version, ahead.version + 1);
}

#[tokio::test]
async fn a_reader_is_told_when_the_volume_is_converted() {
    let source = telling_tree();
    let blocks = Arc::new(MemoryBlocks::new());
    publish_with(&blocks, source.path(), encrypted()).await;
    let eager = VolumeOptions { max_age: std::time::Duration::ZERO, ..with_key(read_key()) };
    let volume = open_with(&blocks, eager).await;
    let held = volume.snapshot().await.version();
    let converting = PublishOptions { convert: true, ..small_blocks() };
    publish_with(&blocks, source.path(), converting).await;
    assert_eq!(volume.snapshot().await.version(), held);
    let stale = volume.status().stale.expect("it says so");
    assert!(stale.contains("not encrypted"), "{stale}");
}
