//! Changed bytes that are too many for the memory of a mount: a file that dies with it.
//!
//! Blocks are appended; when none is needed any more the file is emptied, and the next *generation*
//! begins. A reader that finds another generation than the one it was told asks the tree again.
//! Blocks of an encrypted volume are sealed.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use atoll_env::BoxFuture;
use bytes::Bytes;

use super::Spool;
use crate::blocks::edit_file::{SwapIn, Swapped};

#[derive(Default)]
pub(super) struct Swap {
    /// Held while the file is appended to or emptied.
    writing: futures_util::lock::Mutex<()>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    generation: u64,
    bytes: u64,
}

impl Swap {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }

    pub(super) fn bytes(&self) -> u64 {
        self.state().bytes
    }
}

impl Spool {
    /// Held by whoever swaps out or clears.
    pub(in crate::owned::write) fn swapping(&self) -> futures_util::lock::MutexLockFuture<'_, ()> {
        self.swap.writing.lock()
    }

    /// Whether the swap file has anything.
    pub(in crate::owned::write) fn has_swap(&self) -> bool {
        self.swap.bytes() > 0
    }

    /// Writes blocks to the swap file. The caller holds [`swapping`](Self::swapping).
    pub(in crate::owned::write) async fn swap_out<'a>(
        &self,
        blocks: impl Iterator<Item = &'a Arc<Vec<u8>>>,
    ) -> io::Result<Vec<Swapped>> {
        let mut all = Vec::new();
        let mut swapped = Vec::new();
        let generation = self.swap.state().generation;
        for block in blocks {
            let offset = all.len() as u64;
            match &self.cipher {
                Some(cipher) => all.extend_from_slice(&cipher.seal_local(block)),
                None => all.extend_from_slice(block),
            }
            let stored_len = (all.len() as u64 - offset) as u32;
            swapped.push(Swapped { generation, offset, stored_len, len: block.len() as u32 });
        }
        let len = all.len() as u64;
        let start = self.directory.swap_out(all.into()).await?;
        self.swap.state().bytes += len;
        swapped.iter_mut().for_each(|block| block.offset += start);
        Ok(swapped)
    }

    /// Empties the swap file, of which no block is needed. The caller holds
    /// [`swapping`](Self::swapping).
    pub(in crate::owned::write) async fn swap_clear(&self) -> io::Result<()> {
        {
            let mut state = self.swap.state();
            if state.bytes == 0 {
                return Ok(());
            }
            state.generation += 1;
            state.bytes = 0;
        }
        self.directory.swap_clear().await
    }

    /// Reads a block; `None` if its generation is over: it is not needed, or somewhere else.
    async fn read_swapped(&self, swapped: Swapped) -> io::Result<Option<Bytes>> {
        let is_over = || self.swap.state().generation != swapped.generation;
        if is_over() {
            return Ok(None);
        }
        let read = self.directory.swap_in(swapped.offset, swapped.stored_len).await;
        // Else these may be bytes of the next generation.
        if is_over() {
            return Ok(None);
        }
        let mut bytes = match &self.cipher {
            Some(cipher) => cipher.open_local(&read?).map_err(io::Error::other)?,
            None => read?,
        };
        bytes.truncate(swapped.len as usize);
        Ok(Some(bytes))
    }
}

impl SwapIn for Spool {
    fn swap_in(&self, swapped: Swapped) -> BoxFuture<'_, Result<Option<Bytes>, String>> {
        Box::pin(async move {
            let why = |error| format!("what was swapped out cannot be read: {error}");
            self.read_swapped(swapped).await.map_err(why)
        })
    }
}
