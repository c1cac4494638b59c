//! How a mount begins: it takes the volume, and makes again what an earlier mount has left in the
//! spool.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use atoll_dht::Blocks;
use atoll_env::Env;
use atoll_key::{ReadKey, SecretKey, SignedBlock, VolumeCipher};

use super::fs::WritableFs;
use super::release::UnneededBlocks;
use super::spool::{self, Spool, SpoolError};
use super::tree::{self, Record, Tree};
use super::{FlushError, Head, LeaseKeeper, NoLeaseKeeper, Shared, WriteError, WriteOptions};
use super::{flush, keep, random_id};
use crate::blocks::cache::BlockCache;
use crate::blocks::error::BlockError;
use crate::owned::fault::Fault;
use crate::owned::root::Root;
use crate::owned::sealed_root;
use crate::room::LastRoom;
use crate::spool_directory::SpoolDirectory;

/// Why records were not made again.
enum Unmade {
    /// They, or the spool, are not what they were.
    Damaged(String),
    /// The mount cannot begin now.
    Failed(WriteError),
}

impl From<SpoolError> for Unmade {
    fn from(error: SpoolError) -> Unmade {
        Unmade::Damaged(error.to_string())
    }
}

impl From<SpoolError> for WriteError {
    fn from(error: SpoolError) -> WriteError {
        WriteError::Spool(error.to_string())
    }
}

/// What earlier mounts have left in a spool, beside the newest root.
#[derive(Default)]
struct Left {
    /// So many of its records the root has.
    merged: u64,
    /// The spool of the mount that has put the root.
    newest: Option<[u8; 16]>,
    /// Whether there are records that the root does not have, and that can be made again.
    has_more: bool,
    /// Where records lie that another writer has overtaken.
    set_aside: Option<String>,
}

impl Left {
    /// Compares a spool with the newest root, and sets its records aside if they were not made on that.
    async fn compare(spool: &Spool, root: &Root) -> Result<Left, SpoolError> {
        let merged = root.mounted.records_of(spool.former_ids());
        let newest = root.mounted.merged.first().map(|merged| merged.spool);
        let mut left = Left { merged, newest, ..Left::default() };
        left.has_more = spool.begin_at(merged).await;
        // Else nothing tells on which tree the records were made.
        let is_newest = newest.is_some_and(|newest| spool.former_ids().contains(&newest));
        if left.has_more && !is_newest {
            tracing::warn!("another writer has put a root since the spool was written");
            left.set_aside = Some(spool.set_aside().await?);
            left.has_more = false;
        }
        Ok(left)
    }
}

impl WritableFs {
    /// Opens the volume of `secret` for writing, and says on the ring that this mount writes it. What
    /// an earlier mount has left in the spool is made again, or set aside if another writer has
    /// put a root since.
    pub async fn open(
        env: Env,
        blocks: Arc<dyn Blocks>,
        secret: SecretKey,
        options: WriteOptions,
        keeper: Arc<dyn LeaseKeeper>,
        spool: Option<Arc<dyn SpoolDirectory>>,
    ) -> Result<WritableFs, WriteError> {
        let id = secret.volume_id();
        let cipher = options.read_key.as_ref().map(|key| VolumeCipher::new(key, &id));
        let block: SignedBlock = blocks.get_signed(id.root_key()).await?;
        let root = sealed_root::decode(&block.payload, cipher.as_ref())?;
        let mut spool = match spool {
            Some(directory) => Some(Spool::open(&env, directory, cipher.clone()).await?),
            None => None,
        };
        let former_ids = spool.as_ref().map_or(Vec::new(), |spool| spool.former_ids().to_vec());
        // Before the volume is found to be busy: what was overtaken can be recovered while another mount writes.
        let left = match &spool {
            Some(spool) => Some(Left::compare(spool, &root).await?),
            None => None,
        };
        let now = env.unix_ms();
        if let Some(writer) = root.mounted.writer.filter(|writer| writer.until_unix_ms > now)
            // An earlier mount of this spool has ended, or it would still hold the spool.
            && !former_ids.contains(&writer.spool)
            && !options.take_over
        {
            let left_secs = (writer.until_unix_ms - now).div_ceil(1000);
            return Err(WriteError::Busy { left_secs });
        }
        let Left { merged, newest, has_more, set_aside } = left.unwrap_or_default();
        if let Some(spool) = &mut spool {
            spool.keep_id(newest, has_more).await?;
        }
        let spool_id = spool.as_ref().map_or_else(|| random_id(&env), Spool::id);
        let spool = (spool.map(Arc::new), spool_id);
        // Its spool may have what was not flushed, and that follows this root.
        let is_taken_over =
            root.mounted.writer.is_some_and(|writer| !former_ids.contains(&writer.spool));
        let taken_over = is_taken_over.then(|| root.clone());
        let mut shared = Shared::new(env, blocks, (block, root), secret, options, keeper, spool);
        shared.set_aside = Mutex::new(set_aside);
        let next_inode = shared.claim(&former_ids, merged, taken_over).await?;
        let fs = WritableFs::of(Arc::new(shared));
        match fs.replay().await {
            Ok(()) => {}
            Err(Unmade::Failed(error)) => return Err(error),
            Err(Unmade::Damaged(why)) => fs.give_up_replay(&why).await?,
        }
        fs.shared().tree().pass_over_numbers(next_inode);
        fs.shared().begin();
        Ok(fs)
    }

    /// Sets aside what an earlier mount has left in the spool of the volume of `secret` if another writer has put a root
    /// since; the name of the directory below the spool that has it then. The ring is only read, so the volume may
    /// be in use.
    ///
    /// # Errors
    /// If the volume's root or the spool cannot be read.
    pub async fn set_aside_overtaken(
        env: &Env,
        blocks: &Arc<dyn Blocks>,
        secret: &SecretKey,
        read_key: Option<&ReadKey>,
        spool: Arc<dyn SpoolDirectory>,
    ) -> Result<Option<String>, WriteError> {
        let id = secret.volume_id();
        let cipher = read_key.map(|key| VolumeCipher::new(key, &id));
        let block: SignedBlock = blocks.get_signed(id.root_key()).await?;
        let root = sealed_root::decode(&block.payload, cipher.as_ref())?;
        let spool = Spool::open(env, spool, cipher).await?;
        Ok(Left::compare(&spool, &root).await?.set_aside)
    }

    /// What a mount has left in a spool that was set aside: the volume as that mount showed it,
    /// and why later changes are missing, if some are. Nothing can be changed.
    pub async fn open_set_aside(
        env: Env,
        blocks: Arc<dyn Blocks>,
        secret: SecretKey,
        options: WriteOptions,
        spool: Arc<dyn SpoolDirectory>,
    ) -> Result<(WritableFs, Option<String>), WriteError> {
        let id = secret.volume_id();
        let cipher = options.read_key.as_ref().map(|key| VolumeCipher::new(key, &id));
        let spool = Spool::open(&env, spool, cipher.clone()).await?;
        let block = spool.base().await?;
        let damaged = |why: &str| WriteError::Spool(format!("the spool is damaged: {why}"));
        if block.key() != id.root_key() {
            return Err(damaged("it is another volume's"));
        }
        let root = sealed_root::decode(&block.payload, cipher.as_ref())?;
        let merged = root.mounted.merged.first().ok_or(damaged("no mount has put its base"))?;
        spool.begin_at(root.mounted.records_of(&[merged.spool])).await;
        let spool = (Some(Arc::new(spool)), merged.spool);
        let keeper = Arc::new(NoLeaseKeeper);
        let shared = Shared::new(env, blocks, (block, root), secret, options, keeper, spool);
        let fs = WritableFs::of(Arc::new(shared));
        let missing = match fs.replay_segments().await {
            Ok(()) => None,
            Err(Unmade::Failed(error)) => Some(error.to_string()),
            Err(Unmade::Damaged(why)) => Some(why),
        };
        *fs.shared().fence.lock().expect("no holder of this lock panics") =
            Some(FlushError::SetAside);
        Ok((fs, missing))
    }

    /// What was made again so far is forgotten, and the spool set aside.
    async fn give_up_replay(&self, why: &str) -> Result<(), WriteError> {
        tracing::error!("what an earlier mount has left in the spool is set aside: {why}");
        let shared = self.shared();
        let spool = shared.spool.as_ref().expect("there was a spool to read");
        spool.finish().await;
        // What is set aside follows it.
        let base = spool.base().await.ok();
        let base =
            base.and_then(|block| sealed_root::decode(&block.payload, shared.cipher.as_ref()).ok());
        if let Some(base) = base {
            shared.keep_replaced(base).await?;
        }
        let name = spool.set_aside().await?;
        let (root, block) = {
            let head = shared.head.lock().await;
            (head.root.clone(), head.block.clone())
        };
        let records = root.mounted.records_of(&[shared.spool_id]);
        spool.begin_at(records).await;
        spool.merged(records, block, true);
        *shared.tree() = Tree::new(&root, shared.options.owner);
        *shared.set_aside.lock().expect("no holder of this lock panics") = Some(name);
        Ok(())
    }

    /// Makes again what is in the spool.
    async fn replay(&self) -> Result<(), Unmade> {
        let shared = self.shared();
        let Some(spool) = &shared.spool else { return Ok(()) };
        shared.env.spawn(Box::pin(spool::run(shared.env.clone(), Arc::downgrade(spool))));
        let head = shared.head.lock().await.block.clone();
        spool.merged(spool.cut(), head, false);
        self.replay_segments().await?;
        Ok(spool.end_reading().await?)
    }

    /// Nothing is asked of the ring: it may have no room, and files could not be removed.
    async fn replay_segments(&self) -> Result<(), Unmade> {
        let shared = self.shared();
        let Some(spool) = &shared.spool else { return Ok(()) };
        for part in spool.restated_parts() {
            self.replay_records(&spool.read_restated(part).await?).await?;
        }
        while let Some(records) = spool.read_next().await? {
            self.replay_records(&records).await?;
            spool.advance(records.len());
        }
        Ok(())
    }

    async fn replay_records(&self, records: &[Record]) -> Result<(), Unmade> {
        let shared = self.shared();
        for record in records {
            let made = self.on_tree(|tree, loaded| tree.replay(record, loaded)).await;
            made.map_err(|fault| match fault {
                Fault::Block(error @ BlockError::Fetch(_)) if !shared.options.take_over => {
                    Unmade::Failed(WriteError::Replay(error.at(b"").to_string()))
                }
                Fault::Block(error) => Unmade::Damaged(error.at(b"").to_string()),
                Fault::Errno(errno) => Unmade::Damaged(format!("a change fails: {errno:?}")),
            })?;
        }
        shared.tree().end_replay();
        if let Some(spool) = &shared.spool
            && shared.tree().changed_bytes() >= shared.options.max_changed_bytes / 2
        {
            // If the disk fails, the changes stay in memory.
            let _ = shared.swap_out(spool).await;
        }
        Ok(())
    }
}

impl Shared {
    fn new(
        env: Env,
        blocks: Arc<dyn Blocks>,
        (block, root): (SignedBlock, Root),
        secret: SecretKey,
        options: WriteOptions,
        keeper: Arc<dyn LeaseKeeper>,
        (spool, spool_id): (Option<Arc<Spool>>, [u8; 16]),
    ) -> Shared {
        let id = secret.volume_id();
        let cipher = options.read_key.as_ref().map(|key| VolumeCipher::new(key, &id));
        let form = root.form(id, cipher.clone());
        let ring = (blocks.clone(), form.clone());
        let cache = BlockCache::new(env.clone(), ring, options.cache_bytes);
        let tree = Mutex::new(Tree::new(&root, options.owner));
        let head = futures_util::lock::Mutex::new(Head { block, root, unsure: None });
        Shared {
            env,
            blocks,
            keeper,
            cache,
            cipher,
            form,
            secret,
            options,
            spool,
            spool_id,
            set_aside: Mutex::default(),
            tree,
            head,
            wake: Arc::default(),
            waiters: Mutex::default(),
            flush_ends: Mutex::default(),
            fence: Mutex::default(),
            trouble: Mutex::default(),
            left_out: Mutex::default(),
            listed: Mutex::default(),
            releases: UnneededBlocks::default(),
            // Until this mount writes, its caller is told why it cannot.
            has_ended: AtomicBool::new(true),
            last_room: LastRoom::default(),
        }
    }

    /// Says on the ring that this mount writes the volume, and that the root has so many records of
    /// its spool, which had other names before. The number of the next file that is new.
    async fn claim(
        &self,
        former_ids: &[[u8; 16]],
        records: u64,
        taken_over: Option<Root>,
    ) -> Result<u64, FlushError> {
        let mut head = self.head.lock().await;
        self.releases.begin(head.root.clone());
        let mut root = self.with_policy(head.root.clone()).await?;
        if let Some(taken_over) = taken_over {
            root = self.with_replaced(root, taken_over).await;
        }
        root.mounted.merged.retain(|merged| !former_ids.contains(&merged.spool));
        root.mounted.merge(self.spool_id, records);
        if root.mounted.writer.is_some() {
            root.mounted.next_inode = tree::numbers_after_crash(root.mounted.next_inode);
        }
        let next_inode = root.mounted.next_inode;
        let root = self.marked(root, true);
        self.put_root(&mut head, root).await?;
        Ok(next_inode)
    }

    /// Keeps what `replaced` needs, although newer versions do not.
    async fn keep_replaced(&self, replaced: Root) -> Result<(), FlushError> {
        let mut head = self.head.lock().await;
        let root = self.with_replaced(head.root.clone(), replaced).await;
        let root = self.marked(root, true);
        self.put_root(&mut head, root).await
    }

    /// Begins to record changes and to write them.
    fn begin(self: &Arc<Shared>) {
        if self.spool.is_some() {
            self.tree().keep_journal();
        }
        if self.options.handles.is_some() {
            self.tree().keep_moved();
        }
        self.has_ended.store(false, Ordering::Release);
        self.env.spawn(Box::pin(flush::run(Arc::downgrade(self))));
        self.env.spawn(Box::pin(keep::run(Arc::downgrade(self))));
    }
}
