//! From the outbox to the ring, in several batches of blocks at once. For each batch the ring is
//! first asked which of its blocks it lacks.
//!
//! A batch takes the blocks that wait when an earlier batch ends, so batches are small when
//! reading is slower than the ring, and full when the ring is slower.

use std::sync::Arc;

use atoll_dht::{Blocks, PutError};
use atoll_env::BoxFuture;
use atoll_key::BlockHash;
use futures_channel::mpsc::UnboundedReceiver;
use futures_util::future::{Either, select};
use futures_util::stream::{FuturesUnordered, StreamExt};

use super::run::{Block, Outgoing, Run};
use super::{LeaseRecorder, PublishError};

/// Batches on their way at once.
const MAX_BATCHES: usize = 8;

/// Blocks in a batch.
const MAX_BATCH_BLOCKS: usize = 64;

/// Bytes in a batch, unless one block alone has more.
const MAX_BATCH_BYTES: usize = 1 << 20;

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

type Step = BoxFuture<'static, Result<Uploaded, PublishError>>;

/// Uploads until the outbox is closed and everything is acknowledged and kept.
pub(super) async fn upload(
    run: &Arc<Run>,
    blocks: &Arc<dyn Blocks>,
    recorder: &Arc<dyn LeaseRecorder>,
    mut outbox: UnboundedReceiver<Outgoing>,
) -> Result<Uploaded, PublishError> {
    let mut steps: FuturesUnordered<Step> = FuturesUnordered::new();
    let mut total = Uploaded::default();
    let mut to_record = Vec::new();
    let mut carried = None;
    loop {
        if steps.len() >= MAX_BATCHES {
            let done = steps.next().await.expect("there are steps");
            add(run, &mut total, done?);
            continue;
        }
        let first = match carried.take() {
            Some(block) => Some(block),
            None => match next(&mut outbox, &mut steps).await {
                Either::Left(block) => block,
                Either::Right(done) => {
                    add(run, &mut total, done?);
                    continue;
                }
            },
        };
        let Some(first) = first else { break };
        let batch = gather(first, &mut outbox, &mut carried);
        to_record.extend(batch.iter().map(|block| block.hash));
        if to_record.len() + MAX_BATCH_BLOCKS > MAX_KEEP_HASHES {
            steps.push(record(recorder, std::mem::take(&mut to_record)));
        }
        steps.push(Box::pin(store(run.clone(), blocks.clone(), batch)));
    }
    if !to_record.is_empty() {
        steps.push(record(recorder, to_record));
    }
    run.progress.phase(crate::owned::progress::Phase::Flush);
    while let Some(done) = steps.next().await {
        add(run, &mut total, done?);
    }
    Ok(total)
}

/// The next block (`None` at the end), or the next finished step.
async fn next(
    outbox: &mut UnboundedReceiver<Outgoing>,
    steps: &mut FuturesUnordered<Step>,
) -> Either<Option<Outgoing>, Result<Uploaded, PublishError>> {
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
    while batch.len() < MAX_BATCH_BLOCKS && bytes < MAX_BATCH_BYTES {
        let Ok(block) = outbox.try_recv() else { break };
        bytes += block.block.len();
        if bytes > MAX_BATCH_BYTES {
            *carried = Some(block);
            break;
        }
        batch.push(block);
    }
    batch
}

fn add(run: &Run, total: &mut Uploaded, done: Uploaded) {
    total.new_blocks += done.new_blocks;
    total.new_bytes += done.new_bytes;
    total.lost_blocks += done.lost_blocks;
    if done.new_blocks > 0 {
        run.progress.uploaded(done.new_blocks, done.new_bytes);
    }
}

fn record(recorder: &Arc<dyn LeaseRecorder>, hashes: Vec<BlockHash>) -> Step {
    let recorded = recorder.record(hashes);
    Box::pin(
        async move { recorded.await.map(|()| Uploaded::default()).map_err(PublishError::Record) },
    )
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
) -> Result<Uploaded, PublishError> {
    let bytes = batch.iter().map(|block| block.block.len()).sum();
    let _held = Held { run, bytes };
    let lacking = blocks.renew_or_lack(batch.iter().map(|block| block.hash).collect()).await?;
    if lacking.is_empty() {
        return Ok(Uploaded::default());
    }
    let mut wanted = lacking.iter().peekable();
    let mut lost_blocks = 0;
    let mut puts = Vec::new();
    for Outgoing { hash, block } in batch {
        if wanted.next_if_eq(&&hash).is_none() {
            continue;
        }
        match block {
            Block::Read(bytes) => puts.push((hash, bytes)),
            Block::Previous { .. } => lost_blocks += 1,
        }
    }
    if wanted.next().is_some() {
        let told = "it says that it lacks blocks it was not asked about";
        return Err(PutError::Unavailable(told.into()).into());
    }
    if puts.is_empty() {
        return Ok(Uploaded { lost_blocks, ..Uploaded::default() });
    }
    let new_blocks = puts.len() as u64;
    let new_bytes = puts.iter().map(|(_, bytes)| bytes.len() as u64).sum();
    blocks.put(puts).await?;
    Ok(Uploaded { new_blocks, new_bytes, lost_blocks })
}
