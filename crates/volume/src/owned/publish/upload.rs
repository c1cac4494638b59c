//! From the outbox to the ring, in several batches of blocks at once. For each batch the ring is
//! first asked which of its blocks it lacks.
//!
//! A batch takes the blocks that wait when an earlier batch ends, so batches are small when
//! reading is slower than the ring, and full when the ring is slower.

use std::collections::BTreeSet;
use std::ops::AddAssign;
use std::sync::Arc;

use atoll_dht::{Blocks, PutError};
use atoll_env::BoxFuture;
use atoll_key::BlockHash;
use futures_channel::mpsc::UnboundedReceiver;
use futures_util::future::{Either, select};
use futures_util::stream::{FuturesUnordered, StreamExt};

use super::run::{Block, Outgoing, Run};
use super::{LeaseRecorder, PublishError};
use crate::blocks::outbox::{MAX_BATCH_BLOCKS, MAX_BATCH_BYTES, MAX_BATCHES};

/// Blocks that the ring is asked for at once, of which few need be put.
const MAX_ASKED: usize = 1024;

/// Hashes given to the recorder in one call.
const MAX_KEEP_HASHES: usize = 1024;

/// What the ring did not have before.
#[derive(Clone, Copy, Default)]
pub(super) struct Uploaded {
    pub(super) new_blocks: u64,
    pub(super) new_bytes: u64,
    /// Blocks of the previous version that are to stay and that the ring has lost.
    pub(super) lost_blocks: u64,
}

impl AddAssign for Uploaded {
    fn add_assign(&mut self, more: Uploaded) {
        self.new_blocks += more.new_blocks;
        self.new_bytes += more.new_bytes;
        self.lost_blocks += more.lost_blocks;
    }
}

/// A batch, or a call of the recorder, that has ended.
#[derive(Default)]
struct Done {
    uploaded: Uploaded,
    /// Blocks that the ring has, of which the recorder has not heard.
    stored: Vec<BlockHash>,
}

type Step = BoxFuture<'static, Result<Done, PublishError>>;

/// Uploads until the outbox is closed and everything is acknowledged and kept.
pub(super) async fn upload(
    run: &Arc<Run>,
    blocks: &Arc<dyn Blocks>,
    recorder: &Arc<dyn LeaseRecorder>,
    mut outbox: UnboundedReceiver<Outgoing>,
) -> Result<Uploaded, PublishError> {
    let mut steps: FuturesUnordered<Step> = FuturesUnordered::new();
    let (mut total, mut stored) = (Uploaded::default(), Vec::new());
    let mut carried = None;
    loop {
        while stored.len() >= MAX_KEEP_HASHES {
            steps.push(record(recorder, stored.drain(..MAX_KEEP_HASHES).collect()));
        }
        if steps.len() >= MAX_BATCHES {
            let done = steps.next().await.expect("there are steps");
            add(run, &mut total, &mut stored, done?);
            continue;
        }
        let first = match carried.take() {
            Some(block) => Some(block),
            None => match next(&mut outbox, &mut steps).await {
                Either::Left(block) => block,
                Either::Right(done) => {
                    add(run, &mut total, &mut stored, done?);
                    continue;
                }
            },
        };
        let Some(first) = first else { break };
        let batch = gather(first, &mut outbox, &mut carried);
        steps.push(Box::pin(store(run.clone(), blocks.clone(), batch)));
    }
    run.progress.phase(crate::owned::progress::Phase::Flush);
    loop {
        while let Some(done) = steps.next().await {
            add(run, &mut total, &mut stored, done?);
        }
        if stored.is_empty() {
            return Ok(total);
        }
        let calls = stored.chunks(MAX_KEEP_HASHES);
        steps.extend(calls.map(|hashes| record(recorder, hashes.to_vec())));
        stored.clear();
    }
}

/// The next block (`None` at the end), or the next finished step.
async fn next(
    outbox: &mut UnboundedReceiver<Outgoing>,
    steps: &mut FuturesUnordered<Step>,
) -> Either<Option<Outgoing>, Result<Done, PublishError>> {
    if steps.is_empty() {
        return Either::Left(outbox.next().await);
    }
    match select(outbox.next(), steps.next()).await {
        Either::Left((block, _)) => Either::Left(block),
        Either::Right((done, _)) => Either::Right(done.expect("there are steps")),
    }
}

/// The blocks that wait in the outbox, up to a batch; a block too many is carried to the next.
fn gather(
    first: Outgoing,
    outbox: &mut UnboundedReceiver<Outgoing>,
    carried: &mut Option<Outgoing>,
) -> Vec<Outgoing> {
    let mut bytes = first.block.len();
    let mut batch = vec![first];
    let is_read = |block: &Outgoing| usize::from(matches!(block.block, Block::Read(_)));
    let mut read = is_read(&batch[0]);
    while read < MAX_BATCH_BLOCKS && batch.len() < MAX_ASKED && bytes < MAX_BATCH_BYTES {
        let Ok(block) = outbox.try_recv() else { break };
        bytes += block.block.len();
        read += is_read(&block);
        if bytes > MAX_BATCH_BYTES {
            *carried = Some(block);
            break;
        }
        batch.push(block);
    }
    batch
}

fn add(run: &Run, total: &mut Uploaded, stored: &mut Vec<BlockHash>, done: Done) {
    let Uploaded { new_blocks, new_bytes, .. } = done.uploaded;
    *total += done.uploaded;
    stored.extend(done.stored);
    if new_blocks > 0 {
        run.progress.uploaded(new_blocks, new_bytes);
    }
}

fn record(recorder: &Arc<dyn LeaseRecorder>, hashes: Vec<BlockHash>) -> Step {
    let recorded = recorder.record(hashes);
    Box::pin(async move { recorded.await.map(|()| Done::default()).map_err(PublishError::Record) })
}

/// Gives the bytes back to the budget, also when the batch is dropped halfway.
struct Held {
    run: Arc<Run>,
    bytes: usize,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.run.release(self.bytes);
    }
}

/// Asks which blocks the ring lacks and puts those.
async fn store(
    run: Arc<Run>,
    blocks: Arc<dyn Blocks>,
    batch: Vec<Outgoing>,
) -> Result<Done, PublishError> {
    let bytes = batch.iter().map(|block| block.block.len()).sum();
    let _held = Held { run: run.clone(), bytes };
    let mut stored: Vec<BlockHash> = batch.iter().map(|block| block.hash).collect();
    let lacking = blocks.renew_or_lack(stored.clone()).await?;
    if lacking.is_empty() {
        return Ok(Done { stored, ..Done::default() });
    }
    let mut wanted = lacking.iter().peekable();
    let (mut uploaded, mut unread) = (Uploaded::default(), BTreeSet::new());
    let mut puts = Vec::new();
    for Outgoing { hash, block } in batch {
        if wanted.next_if_eq(&&hash).is_none() {
            continue;
        }
        match block {
            Block::Read(bytes) => puts.push((hash, bytes)),
            Block::Previous { .. } => uploaded.lost_blocks += 1,
            Block::Unread => {
                unread.insert(hash);
            }
        }
    }
    if wanted.next().is_some() {
        let told = "it says that it lacks blocks it was not asked about";
        return Err(PutError::Unavailable(told.into()).into());
    }
    if !puts.is_empty() {
        uploaded.new_blocks = puts.len() as u64;
        uploaded.new_bytes = puts.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        blocks.put(puts).await?;
    }
    stored.retain(|hash| !unread.contains(hash));
    run.lose(unread);
    Ok(Done { uploaded, stored })
}
