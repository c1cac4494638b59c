//! Bytes of files: what is in memory, and what is read ahead from the ring.

use atoll_vfs::{Errno, SeekTo};
use bytes::{Bytes, BytesMut};

use super::{Fault, WritableFs};
use crate::blocks::ahead::ReadAhead;
use crate::blocks::content::{Piece, Stored};
use crate::blocks::error::{BlockError, LoadError};
use crate::blocks::file::File;
use crate::owned::write::tree::Layout;

/// Blocks that a search for data or a hole passes over; a program that is told of none reads what is there,
/// which is as right. A few blocks can describe endless data.
const SEEK_BLOCKS: u32 = 4096;

/// The stored file that an open one is read from.
pub(super) struct Reader {
    stored: Stored,
    file: File,
    ahead: ReadAhead,
}

impl WritableFs {
    /// The bytes of pieces, in order; `handle` is read ahead of. `None` if some are not where they
    /// were.
    pub(super) async fn assemble(
        &self,
        (pieces, stored): (Vec<Piece>, Stored),
        handle: u64,
        len: u32,
    ) -> Result<Option<Bytes>, Fault> {
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
                    let found =
                        self.shared.swap().swap_in(swapped).await.map_err(LoadError::Swap)?;
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
    ) -> Result<File, Fault> {
        let known = {
            let readers = self.readers.lock().expect("no holder of this lock panics");
            readers.get(&handle).filter(|r| r.stored == stored).map(|r| r.file.clone())
        };
        let file = match known {
            Some(file) => file,
            None => File::open(&self.shared.cache, stored.inode, stored.size_bytes).await?,
        };
        let Some(shape) = file.shape().filter(|shape| !shape.is_inline()) else { return Ok(file) };
        let options = &self.shared.options;
        // Twice the window, as a reader of a published volume has it.
        let limit = options
            .read_ahead_bytes
            .min(options.cache_bytes / 4)
            .min(file.window_bytes().saturating_mul(2));
        let plan = {
            let mut readers = self.readers.lock().expect("no holder of this lock panics");
            let fresh = || Reader { stored, file: file.clone(), ahead: ReadAhead::default() };
            let reader = readers.entry(handle).or_insert_with(fresh);
            if reader.stored != stored {
                *reader = fresh();
            }
            reader.ahead.on_read(offset, u64::from(len), limit, shape.size_bytes)
        };
        if let Some((from, upto)) = plan {
            let size = shape.block_size_bytes();
            file.prefetch(from / size, upto.div_ceil(size));
        }
        Ok(file)
    }

    /// The first offset at or after `offset` with data, or with a hole.
    pub(super) async fn seek_to(
        &self,
        inode: u64,
        handle: u64,
        offset: u64,
        to: SeekTo,
    ) -> Result<u64, Fault> {
        let mut at = offset;
        for _ in 0..SEEK_BLOCKS {
            let layout = self.on_tree(|tree, _| tree.layout(inode, handle, at)).await?;
            if offset >= layout.size_bytes {
                return Err(Errno::ENXIO.into());
            }
            if at >= layout.size_bytes {
                return match to {
                    SeekTo::Data => Err(Errno::ENXIO.into()),
                    SeekTo::Hole => Ok(layout.size_bytes),
                };
            }
            let is_data = self.is_data(&layout).await?;
            if is_data == (to == SeekTo::Data) {
                return Ok(at);
            }
            at = match to {
                SeekTo::Hole => layout.end,
                SeekTo::Data => self.next_data(&layout).await?,
            };
        }
        // No hole is found, or data that is zeros.
        match to {
            SeekTo::Hole => {
                Ok(self.on_tree(|tree, _| tree.layout(inode, handle, at)).await?.size_bytes)
            }
            SeekTo::Data => Ok(at),
        }
    }

    /// Whether the block of a layout has data.
    async fn is_data(&self, layout: &Layout) -> Result<bool, Fault> {
        for piece in &layout.pieces {
            match piece {
                Piece::Data(..) | Piece::Swapped(..) => return Ok(true),
                Piece::Zeros(_) => {}
                Piece::Stored(range) => {
                    let file = self.stored_file(layout.stored).await?;
                    if file.seek(range.start, true).await? < range.end {
                        return Ok(true);
                    }
                }
            }
        }
        Ok(false)
    }

    /// Where data may follow a block that has none.
    async fn next_data(&self, layout: &Layout) -> Result<u64, Fault> {
        let stored = match layout.end < layout.stored.size_bytes {
            true => match self.stored_file(layout.stored).await?.seek(layout.end, true).await? {
                none if none >= layout.stored.size_bytes => u64::MAX,
                next => next,
            },
            false => u64::MAX,
        };
        let unstored = layout.next_unstored.max(layout.end);
        Ok(stored.min(unstored).min(layout.size_bytes))
    }

    async fn stored_file(&self, stored: Stored) -> Result<File, BlockError> {
        File::open(&self.shared.cache, stored.inode, stored.size_bytes).await
    }
}
