//! Reading a file that is being written: what is in memory, and what is read ahead from the ring.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use atoll_vfs::{Errno, SeekTo};
use bytes::{Bytes, BytesMut};

use super::ahead::ReadAhead;
use super::cache::BlockCache;
use super::content::{Layout, Piece, Stored};
use super::edit_file::SwapIn;
use super::error::{BlockError, LoadError};
use super::file::File;

/// Blocks that a search for data or a hole passes over; a program that is told of none reads what is there,
/// which is as right. A few blocks can describe endless data.
const SEEK_BLOCKS: u32 = 4096;

/// The stored files behind open ones, read ahead of.
pub(crate) struct Readers {
    cache: Arc<BlockCache>,
    /// How far to read ahead, at most.
    read_ahead_bytes: u64,
    /// By handle.
    readers: Mutex<BTreeMap<u64, Reader>>,
}

/// The stored file that an open one is read from.
struct Reader {
    stored: Stored,
    file: File,
    ahead: ReadAhead,
}

impl Readers {
    /// Readers of what `cache` fetches, which holds `cache_bytes`.
    pub(crate) fn new(cache: Arc<BlockCache>, read_ahead_bytes: u64, cache_bytes: u64) -> Readers {
        let read_ahead_bytes = read_ahead_bytes.min(cache_bytes / 4);
        Readers { cache, read_ahead_bytes, readers: Mutex::default() }
    }

    fn readers(&self) -> MutexGuard<'_, BTreeMap<u64, Reader>> {
        self.readers.lock().expect("no holder of this lock panics")
    }

    /// Forgets a handle that was closed.
    pub(crate) fn close(&self, handle: u64) {
        self.readers().remove(&handle);
    }

    /// The bytes of pieces, in order, `len` at most; `handle` is read ahead of. `None` if some are
    /// not where they were.
    pub(crate) async fn assemble(
        &self,
        pieces: Vec<Piece>,
        stored: Stored,
        handle: u64,
        len: u32,
        swap: &dyn SwapIn,
    ) -> Result<Option<Bytes>, LoadError> {
        if let [Piece::Stored(range)] = &pieces[..] {
            let len = (range.end - range.start) as u32;
            let file = self.reader(handle, stored, range.start, len).await?;
            return Ok(Some(file.read(range.start, len).await?));
        }
        let mut out = BytesMut::with_capacity(len as usize);
        for piece in pieces {
            match piece {
                Piece::Data(bytes, range) => out.extend_from_slice(&bytes[range]),
                Piece::Swapped(swapped, range) => {
                    let found = swap.swap_in(swapped).await.map_err(LoadError::Swap)?;
                    let Some(bytes) = found else { return Ok(None) };
                    out.extend_from_slice(&bytes[range]);
                }
                Piece::Zeros(len) => out.resize(out.len() + len, 0),
                Piece::Stored(range) => {
                    let len = (range.end - range.start) as u32;
                    let file = self.reader(handle, stored, range.start, len).await?;
                    out.extend_from_slice(&file.read(range.start, len).await?);
                }
            }
        }
        Ok(Some(out.freeze()))
    }

    /// The stored file behind an open one, read ahead of.
    async fn reader(
        &self,
        handle: u64,
        stored: Stored,
        offset: u64,
        len: u32,
    ) -> Result<File, BlockError> {
        let known = {
            let readers = self.readers();
            readers.get(&handle).filter(|r| r.stored == stored).map(|r| r.file.clone())
        };
        let file = match known {
            Some(file) => file,
            None => stored_file(&self.cache, stored).await?,
        };
        let Some(shape) = file.shape().filter(|shape| !shape.is_inline()) else { return Ok(file) };
        // Twice the window, as a reader of a published volume has it.
        let limit = self.read_ahead_bytes.min(file.window_bytes().saturating_mul(2));
        let plan = {
            let mut readers = self.readers();
            let fresh = || Reader { stored, file: file.clone(), ahead: ReadAhead::default() };
            let reader = readers.entry(handle).or_insert_with(fresh);
            if reader.stored != stored {
                *reader = fresh();
            }
            reader.ahead.on_read(offset, u64::from(len), limit, shape.size_bytes)
        };
        if let Some((from, upto)) = plan {
            let size = shape.block_size_bytes();
            file.prefetch(from / size..upto.div_ceil(size));
        }
        Ok(file)
    }
}

/// The first offset at or after `offset` with data, or with a hole; `layout` says how the file is
/// laid out at an offset now.
pub(crate) async fn seek_to<E, F>(
    cache: &Arc<BlockCache>,
    offset: u64,
    to: SeekTo,
    layout: impl Fn(u64) -> F,
) -> Result<u64, E>
where
    E: From<BlockError> + From<Errno>,
    F: Future<Output = Result<Layout, E>>,
{
    let mut at = offset;
    for _ in 0..SEEK_BLOCKS {
        let here = layout(at).await?;
        if offset >= here.size_bytes {
            return Err(Errno::ENXIO.into());
        }
        if at >= here.size_bytes {
            return match to {
                SeekTo::Data => Err(Errno::ENXIO.into()),
                SeekTo::Hole => Ok(here.size_bytes),
            };
        }
        let is_data = is_data(cache, &here).await?;
        if is_data == (to == SeekTo::Data) {
            return Ok(at);
        }
        at = match to {
            SeekTo::Hole => here.end,
            SeekTo::Data => next_data(cache, &here).await?,
        };
    }
    // No hole is found, or data that is zeros.
    match to {
        SeekTo::Hole => Ok(layout(at).await?.size_bytes),
        SeekTo::Data => Ok(at),
    }
}

/// Whether the block of a layout has data.
async fn is_data(cache: &Arc<BlockCache>, layout: &Layout) -> Result<bool, BlockError> {
    for piece in &layout.pieces {
        match piece {
            Piece::Data(..) | Piece::Swapped(..) => return Ok(true),
            Piece::Zeros(_) => {}
            Piece::Stored(range) => {
                let file = stored_file(cache, layout.stored).await?;
                if file.seek(range.start, true).await? < range.end {
                    return Ok(true);
                }
            }
        }
    }
    Ok(false)
}

/// Where data may follow a block that has none.
async fn next_data(cache: &Arc<BlockCache>, layout: &Layout) -> Result<u64, BlockError> {
    let stored = match layout.end < layout.stored.size_bytes {
        true => match stored_file(cache, layout.stored).await?.seek(layout.end, true).await? {
            none if none >= layout.stored.size_bytes => u64::MAX,
            next => next,
        },
        false => u64::MAX,
    };
    let unstored = layout.next_unstored.max(layout.end);
    Ok(stored.min(unstored).min(layout.size_bytes))
}

async fn stored_file(cache: &Arc<BlockCache>, stored: Stored) -> Result<File, BlockError> {
    File::open(cache, stored.inode, stored.size_bytes).await
}
