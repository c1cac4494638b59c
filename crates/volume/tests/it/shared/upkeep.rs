//! All that can be reached of a volume is renewed, and nothing else.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_dht::{
    Blocks, DhtConfig, LeaseRenewal, MemoryBlocks, NewBlock, OverMemory, PutError, Renewed,
};
use atoll_env::BoxFuture;
use atoll_key::{BlockId, SignedBlock, volume_group};
use atoll_sim::SimConfig;
use atoll_vfs::{Caller, FileSystem, InodeNumber, OpenFlags, Writer};
use atoll_volume::shared::access::{GroupRecord, read_volume};
use atoll_volume::shared::sealing::Sealing;
use atoll_volume::shared::{SharedFs, upkeep};
use bytes::Bytes;

use super::mounts::{created, env, mounted, volume};
use crate::simulated_ring::Ring;

const ROOT: InodeNumber = InodeNumber::ROOT;

/// Remembers what was put and what was renewed.
#[derive(Default)]
struct Noted {
    memory: MemoryBlocks,
    put: Mutex<BTreeSet<BlockId>>,
    renewed: Mutex<BTreeSet<BlockId>>,
}

impl OverMemory for Noted {
    fn memory(&self) -> &MemoryBlocks {
        &self.memory
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let mut put = self.put.lock().expect("one thread");
        put.extend(
            blocks
                .iter()
                .map(|block| block.id)
                .filter(|id| id.kind.joins() || !id.kind.is_mutable()),
        );
        self.memory.put_blocks(blocks)
    }

    fn renew_blocks(
        &self,
        renewal: LeaseRenewal,
    ) -> BoxFuture<'static, Vec<Result<Renewed, PutError>>> {
        self.renewed.lock().expect("one thread").extend(&renewal.ids);
        assert!(renewal.ids.len() <= 1024);
        self.memory.renew_blocks(renewal)
    }
}

async fn put(fs: &SharedFs, name: &str, offset: u64, data: Vec<u8>) {
    let (me, rw) = (Caller::default(), OpenFlags::READ_WRITE);
    let (entry, opened) = fs.create(me, ROOT, name.as_bytes(), 0o644, rw).await.expect("made");
    let (number, handle) = (entry.attr.inode, opened.handle);
    let wrote = fs.write(Writer::At(me), number, handle, offset, Bytes::from(data)).await;
    wrote.expect("written");
    fs.flush(number, handle).await.expect("the ring takes it");
    fs.close(number, handle).await.expect("it is open");
}

fn bytes(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at / 7) as u8 ^ (at >> 11) as u8 ^ seed).collect()
}

#[tokio::test(start_paused = true)]
async fn the_leases_of_all_that_is_there_are_extended() {
    let noted = Arc::new(Noted::default());
    let blocks: Arc<dyn Blocks> = noted.clone();
    created(&env(), &blocks).await;
    let (one, two) = (mounted(&env(), &blocks, 1).await, mounted(&env(), &blocks, 2).await);
    let me = Caller::default();
    put(&one, "small", 0, bytes(100, 1)).await;
    put(&one, "in a block", 0, bytes(40_000, 2)).await;
    put(&one, "in several", 0, bytes(1_000_000, 3)).await;
    // Far away, so that there are indirect blocks.
    put(&one, "with holes", 1 << 30, bytes(200_000, 4)).await;
    one.symlink(me, ROOT, b"link", b"small").await.expect("made");
    let directory = one.mkdir(me, ROOT, b"many", 0o755).await.expect("made").attr.inode;
    for number in 0..300 {
        let name = format!("name {number}");
        let kind = atoll_vfs::FileKind::Regular;
        one.mknod(me, directory, name.as_bytes(), kind, 0o644, 0).await.expect("made");
    }
    // What two have written at the same time, and nobody has kept yet.
    put(&one, "both", 0, bytes(50_000, 5)).await;
    let mut open = Vec::new();
    for (fs, seed) in [(&one, 6), (&two, 7)] {
        let number = fs.lookup(me, ROOT, b"both").await.expect("there").attr.inode;
        let handle = fs.open(me, number, OpenFlags::READ_WRITE).await.expect("opens").handle;
        let data = Bytes::from(bytes(50_000, seed));
        fs.write(Writer::At(me), number, handle, 0, data).await.expect("written");
        open.push((fs, number, handle));
    }
    for (fs, number, handle) in open {
        fs.flush(number, handle).await.expect("the ring takes it");
    }
    let is_put = noted.put.lock().expect("one thread").clone();
    // Removed, and written anew.
    put(&one, "gone", 0, bytes(300_000, 8)).await;
    one.unlink(me, ROOT, b"gone").await.expect("removed");
    one.sync().await.expect("is on the ring");
    let gone = noted.put.lock().expect("one thread").len() - is_put.len();
    assert!(gone >= 5, "{gone} blocks");

    let (_, record) =
        read_volume(&blocks, volume().volume_id()).await.expect("reads").expect("there");
    let kept = upkeep::keep(&env(), &blocks, volume().volume_id(), &record, &Sealing::none()).await;
    let kept = kept.expect("renewed");
    let renewed = noted.renewed.lock().expect("one thread").clone();
    let lost: Vec<&BlockId> = is_put.difference(&renewed).collect();
    // Leaves of the large directory that later ones have replaced, and the file's first contents.
    let inodes = |ids: &BTreeSet<BlockId>| ids.iter().filter(|id| id.kind.joins()).count() as u64;
    assert_eq!((kept.inodes, inodes(&renewed)), (308, 308), "{kept:?}");
    assert!(lost.iter().all(|id| !id.kind.is_mutable()), "{lost:?}");
    assert_eq!((kept.lacking, kept.unread), (0, 0), "{kept:?}");
    let superfluous: BTreeSet<BlockId> = renewed.difference(&is_put).copied().collect();
    let group = volume_group(&volume(), 0).group_id();
    let records = [SignedBlock::id_at(volume().volume_id().root_key()), GroupRecord::id(group)];
    assert_eq!(superfluous, records.into(), "the records of the volume and its group");
    // Everything can be read of what was renewed alone.
    for id in lost {
        noted.memory.lose_block(id);
    }
    let three = mounted(&env(), &blocks, 3).await;
    let listed = three.opendir(me, directory).await;
    assert!(listed.is_err(), "a number of another mount");
    for name in ["small", "in a block", "in several", "with holes", "both"] {
        let attr = three.lookup(me, ROOT, name.as_bytes()).await.expect("there").attr;
        let handle = three.open(me, attr.inode, OpenFlags::READ).await.expect("opens").handle;
        let from = attr.size_bytes.saturating_sub(1_000_000);
        let read = three.read(attr.inode, handle, from, 1_000_000).await.expect("reads");
        assert_eq!(read.len() as u64, attr.size_bytes - from);
    }
    let many = three.lookup(me, ROOT, b"many").await.expect("there").attr;
    assert_eq!(many.size_bytes, 300);
}

#[tokio::test(start_paused = true)]
async fn what_is_lost_is_told_and_the_rest_is_kept() {
    let noted = Arc::new(Noted::default());
    let blocks: Arc<dyn Blocks> = noted.clone();
    created(&env(), &blocks).await;
    let one = mounted(&env(), &blocks, 1).await;
    put(&one, "several", 0, bytes(1_000_000, 3)).await;
    put(&one, "small", 0, bytes(100, 1)).await;
    let data = noted.put.lock().expect("one thread").clone();
    let data = data.into_iter().find(|id| !id.kind.is_mutable()).expect("some data");
    noted.memory.lose_block(&data);
    let (_, record) =
        read_volume(&blocks, volume().volume_id()).await.expect("reads").expect("there");
    let kept = upkeep::keep(&env(), &blocks, volume().volume_id(), &record, &Sealing::none()).await;
    let kept = kept.expect("renewed");
    assert_eq!((kept.inodes, kept.lacking, kept.unread), (3, 1, 0), "{kept:?}");
}

/// On a whole ring: replicas extend the leases of inodes as of other blocks.
#[test]
fn replicas_extend_the_leases_of_inodes() {
    let ring = Ring::with(SimConfig::default(), DhtConfig::default(), 5);
    let (env, blocks) = (ring.sim.outside(), ring.members[0].dht.clone());
    let blocks: Arc<dyn Blocks> = blocks;
    let long = Duration::from_secs(600);
    let record = ring.sim.block_on(long, async {
        created(&env, &blocks).await;
        let one = mounted(&env, &blocks, 1).await;
        put(&one, "in a block", 0, bytes(40_000, 2)).await;
        let read = read_volume(&blocks, volume().volume_id()).await;
        read.expect("reads").expect("there").1
    });
    let record = record.expect("calls have deadlines");
    let root = record.root;
    let expires = |ring: &Ring| -> Vec<u64> {
        let of = |member| ring.info(member, &root.key()).map(|info| info.expires_unix_secs);
        (0..5).filter_map(of).collect()
    };
    ring.until_replicated();
    let before = expires(&ring);
    ring.sim.run_for(Duration::from_secs(3600));
    let sealing = Sealing::none();
    let kept = upkeep::keep(&env, &blocks, volume().volume_id(), &record, &sealing);
    let kept = ring.sim.block_on(long, kept).expect("ends").expect("renewed");
    assert_eq!((kept.inodes, kept.renewed, kept.lacking), (2, 5, 0));
    let after = expires(&ring);
    assert!(before.len() == 3 && after.len() == 3, "{before:?} {after:?}");
    for (before, after) in before.iter().zip(after) {
        assert!(after >= before + 3000, "{before} {after}");
    }
}

/// Every member's node could walk the volume: who has done it leaves a mark for a day.
#[test]
fn a_mark_says_on_all_nodes_that_a_volume_was_walked_today() {
    let ring = Ring::with(SimConfig::default(), DhtConfig::default(), 5);
    let env = ring.sim.outside();
    let (id, other) = (volume().volume_id(), atoll_key::SecretKey::from_seed(&[8; 32]).volume_id());
    let long = Duration::from_secs(600);
    let asked = |member: usize, volume| {
        let blocks: Arc<dyn Blocks> = ring.members[member].dht.clone();
        let asked = async { upkeep::was_kept_today(&env, &blocks, volume).await };
        ring.sim.block_on(long, asked).expect("calls have deadlines")
    };
    // Not at the end of a day.
    let left = 86_400 - env.unix_ms() / 1000 % 86_400;
    ring.sim.run_for(Duration::from_secs(left + 3600));
    assert!(!asked(1, id));
    let blocks: Arc<dyn Blocks> = ring.members[0].dht.clone();
    let marked = ring.sim.block_on(long, upkeep::mark_kept(&env, &blocks, id));
    marked.expect("ends").expect("the ring takes it");
    assert!((0..5).all(|member| asked(member, id)) && !asked(2, other));
    ring.sim.run_for(Duration::from_secs(12 * 3600));
    assert!(asked(3, id));
    ring.sim.run_for(Duration::from_secs(12 * 3600));
    assert!((0..5).all(|member| !asked(member, id)), "another day");
}
