//! Fetching blocks (CFS Figure 5, client side: `lookup`).
//!
//! A fetch looks into the node's own store, then walks the ring asking `lookup_step`; the
//! walk goes on to the root's replicas when the root fails, does not have the block, or
//! sends bytes that are not what the key names. What comes back is verified here. Every
//! fetch ends by its deadline, and a failure says who was asked and what each said.

use std::sync::Arc;
use std::time::Duration;

use atoll_env::sleep;
use atoll_key::{BlockKind, Key, SignedBlock};
use atoll_net::{CallError, Refusal, Request};
use atoll_overlay::Node;
use atoll_overlay::walk::{Said, Step, Trace, WalkError, WalkLimits, walk};
use bytes::Bytes;
use futures_util::future::join_all;

use crate::blocks::GetError;
use crate::inner::{Block, Inner, note_store_error};
use crate::messages::{self, BlockHeader, LookupReply, LookupStep, Put, from_header, to_header};
use crate::replicas::{expected_replicas, present_replicas, store_here};
use crate::stats::add;

/// The first pause before trying again; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// A refusal's code for bytes that are not what their key says; made here, never sent.
const BAD_BLOCK: u16 = 100;

/// A block that was fetched.
#[derive(Clone, Debug)]
pub struct Fetched {
    /// Its bytes, verified.
    pub bytes: Bytes,
    /// Who was asked on the way; empty if this node had it.
    pub trace: Trace,
}

/// Fetches a content block.
pub(crate) async fn get(inner: &Arc<Inner>, key: Key) -> Result<Fetched, GetError> {
    add(&inner.counters.gets, 1);
    if let Some(bytes) = local(inner, &key).await {
        return Ok(Fetched { bytes, trace: Trace::default() });
    }
    let (block, trace) = find(inner, key).await?;
    heal(inner, &block, &trace);
    Ok(Fetched { bytes: block.bytes, trace })
}

/// Fetches a block of any kind from another node.
pub(crate) async fn find(inner: &Arc<Inner>, key: Key) -> Result<(Block, Trace), GetError> {
    let deadline = inner.env.now() + inner.config.get_limit;
    let mut pause = FIRST_PAUSE;
    loop {
        let limits = WalkLimits {
            replicas: inner.config.replicas,
            deadline: deadline.since(inner.env.now()),
            ..WalkLimits::default()
        };
        let step = |node, as_root| -> atoll_env::BoxFuture<'static, _> {
            Box::pin(ask(inner.clone(), node, key, as_root))
        };
        let error = match walk(&*inner.env, &*inner.overlay, &key, limits, step).await {
            Ok(found) => {
                add(&inner.counters.get_calls, found.trace.calls() as u64);
                return Ok((found.value, found.trace));
            }
            Err(error) => error,
        };
        if let Some(trace) = error.trace() {
            add(&inner.counters.get_calls, trace.calls() as u64);
        }
        // Everybody who should have it has answered: asking again will not help.
        let all_answered =
            matches!(&error, WalkError::Absent { trace, .. } if trace.failures() == 0);
        if all_answered || inner.env.now() + pause >= deadline {
            add(&inner.counters.failed_gets, 1);
            let told = told(&error);
            // A node that is cut off speaks only for itself.
            let present = present_replicas(inner);
            return Err(if all_answered && present >= expected_replicas(inner) {
                GetError::NotFound { key, told }
            } else {
                GetError::Unavailable { key, told }
            });
        }
        sleep(&*inner.env, pause).await;
        pause *= 2;
    }
}

fn told(error: &WalkError) -> String {
    error.trace().map_or_else(|| error.to_string(), Trace::to_string)
}

/// The block from this node's own store, if it is there and sound.
async fn local(inner: &Inner, key: &Key) -> Option<Bytes> {
    match inner.store.get(key).await {
        Ok(Some(block)) if block.info.kind.verify(key, &block.bytes).is_ok() => Some(block.bytes),
        Ok(_) => None,
        Err(error) => {
            note_store_error(inner, &error);
            None
        }
    }
}

/// Asks one node once, and verifies what it sends.
async fn ask(
    inner: Arc<Inner>,
    node: Node,
    key: Key,
    as_root: bool,
) -> Result<Step<Block>, CallError> {
    if inner.is_me(&node) {
        let seat = inner.seat(&node);
        return Ok(Step::Absent(seat.map_or_else(Vec::new, |seat| seat.successors)));
    }
    let header = to_header(&LookupStep { key, as_root, cached_ms: None });
    let request = Request { method: messages::LOOKUP_STEP, header, parts: Vec::new() };
    let reply = inner.call(&node, request).await?;
    match from_header::<LookupReply>(&reply.header)? {
        LookupReply::Absent(successors) => Ok(Step::Absent(successors)),
        LookupReply::Route(route) => Ok(Step::Route(route)),
        LookupReply::Wanted(route) => Ok(Step::Route(route)),
        LookupReply::Cached { header, .. } | LookupReply::Found(header) => {
            let bytes = reply.parts.into_iter().next().unwrap_or_default();
            let checked =
                BlockKind::from_u8(header.kind).and_then(|kind| kind.verify(&key, &bytes));
            if let Err(error) = checked {
                tracing::warn!(%key, from = ?node, %error, "dropped a bad block");
                inner.counters.mark(node.peer.id);
                return Err(Refusal::new(BAD_BLOCK, format!("it sent a bad block: {error}")).into());
            }
            Ok(Step::Done(Block { header: BlockHeader { key, ..header }, bytes }))
        }
    }
}

/// The root did not have what a replica had: it gets it now, not at the next round of repair.
fn heal(inner: &Arc<Inner>, block: &Block, trace: &Trace) {
    let lacking: Vec<Node> = trace
        .0
        .iter()
        .filter(|asked| asked.said == Said::Absent)
        .map(|asked| asked.node)
        .take(inner.config.replicas)
        .collect();
    if lacking.is_empty() {
        return;
    }
    inner.env.spawn(Box::pin(send_copies(inner.clone(), lacking, block.clone())));
}

async fn send_copies(inner: Arc<Inner>, to: Vec<Node>, block: Block) {
    let header = to_header(&Put { blocks: vec![block.header].into(), as_root: false });
    let request = Request { method: messages::PUT, header, parts: vec![block.bytes.clone()] };
    for node in to {
        if inner.is_me(&node) {
            store_here(&inner, &node.peer, std::slice::from_ref(&block)).await;
        } else if let Err(error) = inner.call(&node, request.clone()).await {
            tracing::info!(key = %block.header.key, ?node, %error, "a replica could not be healed");
        }
    }
}

/// Fetches the newest signed block that the replicas which answer hold.
pub(crate) async fn get_signed(inner: &Arc<Inner>, key: Key) -> Result<SignedBlock, GetError> {
    add(&inner.counters.gets, 1);
    let deadline = inner.env.now() + inner.config.get_limit;
    let mut pause = FIRST_PAUSE;
    loop {
        let error = match ask_all_replicas(inner, key).await {
            Ok(block) => return Ok(block),
            Err(error) => error,
        };
        let final_answer = matches!(error, GetError::NotFound { .. });
        if final_answer || inner.env.now() + pause >= deadline {
            add(&inner.counters.failed_gets, 1);
            return Err(error);
        }
        sleep(&*inner.env, pause).await;
        pause *= 2;
    }
}

async fn ask_all_replicas(inner: &Arc<Inner>, key: Key) -> Result<SignedBlock, GetError> {
    let nodes = match inner.root_list(&key).await {
        Ok(nodes) => nodes,
        Err(told) => return Err(GetError::Unavailable { key, told }),
    };
    let replicas = &nodes[..nodes.len().min(inner.config.replicas)];
    let answers = join_all(replicas.iter().map(|node| ask_signed(inner, *node, key))).await;
    add(&inner.counters.get_calls, replicas.len() as u64);
    let newest = answers
        .iter()
        .filter_map(|answer| answer.as_ref().ok()?.as_ref())
        .max_by(|a, b| a.0.version.cmp(&b.0.version).then_with(|| a.0.bytes().cmp(b.0.bytes())));
    if let Some((newest, header)) = newest {
        let stale: Vec<Node> = replicas
            .iter()
            .zip(&answers)
            .filter(|(_, answer)| match answer {
                Ok(Some((held, _))) => held.version < newest.version,
                Ok(None) => true,
                Err(_) => false,
            })
            .map(|(node, _)| *node)
            .collect();
        if !stale.is_empty() {
            let block = Block { header: *header, bytes: newest.bytes().clone() };
            inner.env.spawn(Box::pin(send_copies(inner.clone(), stale, block)));
        }
        return Ok(newest.clone());
    }
    let said: Vec<String> = replicas
        .iter()
        .zip(&answers)
        .map(|(node, answer)| match answer {
            Ok(_) => format!("{node:?} does not have it"),
            Err(error) => format!("{node:?} {error}"),
        })
        .collect();
    let told = said.join("; ");
    if answers.iter().any(Result::is_err) {
        Err(GetError::Unavailable { key, told })
    } else {
        Err(GetError::NotFound { key, told })
    }
}

/// The signed block that one replica holds, verified.
async fn ask_signed(
    inner: &Arc<Inner>,
    node: Node,
    key: Key,
) -> Result<Option<(SignedBlock, BlockHeader)>, CallError> {
    let found = if inner.is_me(&node) {
        match inner.store.get(&key).await {
            Ok(Some(block)) => {
                let header = inner.header_of(&block.info);
                Some(Block { header, bytes: block.bytes })
            }
            Ok(None) => None,
            Err(error) => {
                note_store_error(inner, &error);
                None
            }
        }
    } else {
        match ask(inner.clone(), node, key, true).await? {
            Step::Done(block) => Some(block),
            Step::Absent(_) | Step::Route(_) => None,
        }
    };
    let Some(block) = found else { return Ok(None) };
    match SignedBlock::decode(&block.bytes) {
        Ok(signed) if signed.key() == key => Ok(Some((signed, block.header))),
        _ => Ok(None),
    }
}
