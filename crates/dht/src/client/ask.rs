//! Asking one node for a block once, and verifying what it sends.

use std::sync::Arc;

use atoll_key::Key;
use atoll_net::{CallError, Refusal};
use atoll_overlay::peer_book::Misdeed;
use atoll_overlay::walk::Step;
use atoll_overlay::{Node, Route};
use bytes::Bytes;

use super::Client;
use crate::diversion::follow;
use crate::rpc::{Block, BlockHeader, LookupReply, LookupStep};

/// A refusal's code for bytes that are not what their key says; made here, never sent.
const BAD_BLOCK: u16 = 100;

/// What one node answered.
pub(crate) enum Answer {
    /// As the walk understands it.
    Plain(Step<Block>),
    /// It had it in its cache.
    Cached(Block),
    /// It does not have it, and would cache it.
    Wanted(Route),
}

impl Answer {
    pub(super) fn into_step(self) -> Step<Block> {
        match self {
            Answer::Plain(step) => step,
            Answer::Cached(block) => Step::Done(block),
            Answer::Wanted(route) => Step::Route(route),
        }
    }
}

/// Asks one node once, and verifies what it sends.
pub(crate) async fn ask(
    client: Arc<Client>,
    node: Node,
    key: Key,
    as_root: bool,
    may_be_cached: bool,
) -> Result<Answer, CallError> {
    let step = LookupStep { key, as_root, may_be_cached };
    let (answer, parts) = client.call(&node, &step, Vec::new()).await?;
    Ok(match answer {
        LookupReply::Absent(successors) => Answer::Plain(Step::Absent(successors)),
        LookupReply::Route(route) => Answer::Plain(Step::Route(route)),
        LookupReply::Wanted(route) => Answer::Wanted(route),
        LookupReply::Found(header) => {
            Answer::Plain(Step::Done(verified(&client, &node, key, header, parts)?))
        }
        LookupReply::There(holder) => {
            let (header, parts) = follow::ask_holder(&client, &node, holder, key).await?;
            let block = verified(&client, &Node::of(holder), key, header, parts)?;
            Answer::Plain(Step::Done(block))
        }
        LookupReply::Cached(header) if may_be_cached && !header.kind.is_mutable() => {
            Answer::Cached(verified(&client, &node, key, header, parts)?)
        }
        LookupReply::Cached(_) => {
            return Err(Refusal::new(BAD_BLOCK, "it sent a copy from its cache").into());
        }
    })
}

/// The block that `node` sent, if it is what its key says.
pub(super) fn verified(
    client: &Client,
    node: &Node,
    key: Key,
    header: BlockHeader,
    parts: Vec<Bytes>,
) -> Result<Block, CallError> {
    let bytes = parts.into_iter().next().unwrap_or_default();
    if let Err(error) = header.kind.verify(&key, &bytes) {
        tracing::warn!(%key, from = ?node, %error, "dropped a bad block");
        client.counters.mark(node.peer.id);
        client.overlay.peer_book().lied(&node.peer.id, Misdeed::BadBlock, client.env.now());
        return Err(Refusal::new(BAD_BLOCK, format!("it sent a bad block: {error}")).into());
    }
    Ok(Block { header: BlockHeader { key, ..header }, bytes })
}
