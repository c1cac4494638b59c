//! A regular file, block by block.

use std::sync::Arc;

use atoll_env::BoxFuture;
use atoll_key::BlockHash;
use bytes::{Bytes, BytesMut};
use futures_util::stream::{self, StreamExt, TryStreamExt};

use super::cache::BlockCache;
use super::error::BlockError;
use super::pace::Wanted;
use crate::format::inode::{Data, InodeBlock, Shape};
use crate::format::{FormatError, Pointer, PointerBlock};

/// Data blocks of one `read`, or of a file's beginning, fetched at once.
const BLOCKS_AT_ONCE: usize = 16;

/// Data blocks fetched ahead that may wait for room in the volume's window.
const BLOCKS_AHEAD: usize = 512;

/// About how long an inode block with pointers is, and an indirect block, bytes.
const INODE_BYTES: u64 = 4 << 10;
const INDIRECT_BYTES: u64 = 32 << 10;

/// Files up to this length usually lie in their inode block: the usual data block's.
const MAX_INLINE_BYTES: u64 = 64 << 10;

/// Blocks of data that a search for a hole passes over; then it finds none. A few blocks
/// can describe more than anybody can step over, and who is told of no hole reads zeros,
/// which is as right. Guess: 256 MiB of data at the usual block size.
const SEEK_BLOCKS: u32 = 4096;

/// A file whose inode block is read. Cheap to clone; never changes.
#[derive(Clone)]
pub(crate) struct File {
    cache: Arc<BlockCache>,
    /// `None` if the file is empty.
    inode: Option<(BlockHash, InodeBlock)>,
}

/// One data block of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Chunk {
    /// So many zeros.
    Hole(usize),
    /// These bytes.
    Data(Bytes),
}

impl Chunk {
    fn into_bytes(self) -> Bytes {
        match self {
            Chunk::Hole(len) => Bytes::from(vec![0; len]),
            Chunk::Data(bytes) => bytes,
        }
    }
}

/// Where one block of a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// In the block of this hash.
    Block(BlockHash),
    /// Nowhere, nor are the blocks after it up to (not including) this one.
    HoleUpto(u64),
}

impl File {
    /// Fetches the inode block of a file that its directory says has `size_bytes`.
    pub(crate) async fn open(
        cache: &Arc<BlockCache>,
        inode: Option<BlockHash>,
        size_bytes: u64,
    ) -> Result<File, BlockError> {
        File::open_kept(cache, inode, size_bytes, true).await
    }

    /// The same; `keep` says whether the inode block goes into the cache.
    pub(crate) async fn open_kept(
        cache: &Arc<BlockCache>,
        inode: Option<BlockHash>,
        size_bytes: u64,
        keep: bool,
    ) -> Result<File, BlockError> {
        let Some(hash) = inode else { return Ok(File { cache: cache.clone(), inode: None }) };
        let about = if size_bytes <= MAX_INLINE_BYTES { size_bytes } else { INODE_BYTES };
        let bytes = match keep {
            true => cache.get(hash, Wanted::Now(about)).await?,
            false => cache.get_once(hash, Wanted::Soon(about)).await?,
        };
        let block = InodeBlock::decode(&bytes).map_err(BlockError::bad(hash))?;
        block.check_size(size_bytes).map_err(BlockError::bad(hash))?;
        Ok(File { cache: cache.clone(), inode: Some((hash, block)) })
    }

    /// What may be on its way of the volume at once now, bytes.
    pub(crate) fn window_bytes(&self) -> u64 {
        self.cache.window_bytes()
    }

    /// Length and block size; `None` if the file is empty.
    pub(crate) fn shape(&self) -> Option<Shape> {
        self.inode.as_ref().map(|(_, inode)| inode.shape)
    }

    /// The whole file, if it lies in its inode block (or is empty).
    pub(crate) fn inline(&self) -> Option<Bytes> {
        match &self.inode {
            None => Some(Bytes::new()),
            Some((_, InodeBlock { data: Data::Inline(bytes), .. })) => Some(bytes.clone()),
            Some(_) => None,
        }
    }

    /// The pointer of `level` to what begins at data block `first`, if there is one that stands for
    /// as many blocks as it would in a file of shape `other`. The file must have pointers.
    pub(crate) async fn pointer(
        &self,
        level: u8,
        first: u64,
        other: Shape,
    ) -> Result<Option<Pointer>, BlockError> {
        let (_, inode) = self.inode.as_ref().expect("an empty file has no pointers");
        let shape = inode.shape;
        let covers = |shape: Shape| {
            let left = shape.data_blocks().saturating_sub(first);
            let blocks = left.min(Shape::span_blocks(level));
            (blocks, shape.block_len_bytes((first + blocks).saturating_sub(1)))
        };
        let mut at = shape.indirect_levels();
        if level > at || first >= shape.data_blocks() || covers(shape) != covers(other) {
            return Ok(None);
        }
        let mut pointer = inode.pointer(first / Shape::span_blocks(at)).flatten();
        while at > level
            && let Some(hash) = pointer
        {
            let start = first - first % Shape::span_blocks(at);
            let indirect = self.indirect(hash, at, shape.pointers_below(at, start)).await?;
            at -= 1;
            pointer = indirect.pointer((first - start) / Shape::span_blocks(at)).flatten();
        }
        Ok(Some(pointer))
    }

    /// Space, in units of 512 bytes, of the data that a pointer of `level` leads to. The file must
    /// have that pointer.
    pub(crate) fn space_below(
        &self,
        level: u8,
        first: u64,
    ) -> BoxFuture<'_, Result<u64, BlockError>> {
        Box::pin(async move {
            let (_, inode) = self.inode.as_ref().expect("an empty file has no pointers");
            let shape = inode.shape;
            let Some(Some(hash)) = self.pointer(level, first, shape).await? else { return Ok(0) };
            if level == 0 {
                return Ok(shape.block_len_bytes(first).div_ceil(512));
            }
            let pointers = shape.pointers_below(level, first);
            let indirect = self.indirect(hash, level, pointers).await?;
            let mut space = 0;
            for index in (0..pointers).filter(|index| indirect.pointer(*index).flatten().is_some())
            {
                let below = first + index * Shape::span_blocks(level - 1);
                space += match level {
                    1 => shape.block_len_bytes(below).div_ceil(512),
                    _ => self.space_below(level - 1, below).await?,
                };
            }
            Ok(space)
        })
    }

    /// Where data block `block` is. The file must have pointers, and that many blocks.
    pub(crate) async fn place(&self, block: u64) -> Result<Place, BlockError> {
        self.place_past(block).await.map_err(|(error, _)| error)
    }

    /// The same; an error comes with the first block that does not lie below the indirect
    /// block that could not be read.
    pub(crate) async fn place_past(&self, block: u64) -> Result<Place, (BlockError, u64)> {
        let (_, inode) = self.inode.as_ref().expect("an empty file has no blocks");
        let shape = inode.shape;
        let mut level = shape.indirect_levels();
        let mut first = block - block % Shape::span_blocks(level);
        let mut pointer = inode.pointer(block / Shape::span_blocks(level));
        loop {
            let pointer_here = pointer.expect("the number of pointers was checked");
            let Some(hash) = pointer_here else {
                let upto = first.saturating_add(Shape::span_blocks(level));
                return Ok(Place::HoleUpto(upto.min(shape.data_blocks())));
            };
            if level == 0 {
                return Ok(Place::Block(hash));
            }
            let read = self.indirect(hash, level, shape.pointers_below(level, first)).await;
            let past = first.saturating_add(Shape::span_blocks(level)).min(shape.data_blocks());
            let indirect = read.map_err(|error| (error, past))?;
            level -= 1;
            let span = Shape::span_blocks(level);
            let index = (block - first) / span;
            first += index * span;
            pointer = indirect.pointer(index);
        }
    }

    /// Fetches an indirect block of this level, which has so many pointers.
    async fn indirect(
        &self,
        hash: BlockHash,
        level: u8,
        pointers: u64,
    ) -> Result<PointerBlock, BlockError> {
        let bytes = self.cache.get(hash, Wanted::Now(INDIRECT_BYTES)).await?;
        let indirect = PointerBlock::decode(&bytes).map_err(BlockError::bad(hash))?;
        indirect.check_place(level, pointers).map_err(BlockError::bad(hash))?;
        Ok(indirect)
    }

    /// Fetches data block `block` from `hash`, without caching it.
    pub(crate) async fn fetch_once(
        &self,
        block: u64,
        hash: BlockHash,
    ) -> Result<Bytes, BlockError> {
        let wanted = Wanted::Soon(self.len_bytes(block));
        self.checked(block, hash, self.cache.get_once(hash, wanted).await?)
    }

    fn len_bytes(&self, block: u64) -> u64 {
        self.shape().map_or(0, |shape| shape.block_len_bytes(block))
    }

    /// A data block has the length that the inode says.
    fn checked(&self, block: u64, hash: BlockHash, bytes: Bytes) -> Result<Bytes, BlockError> {
        let stated = self.len_bytes(block);
        if bytes.len() as u64 != stated {
            let found = bytes.len() as u64;
            let source = FormatError::Mismatch { what: "bytes of a data block", stated, found };
            return Err(BlockError::Bad { hash, source });
        }
        Ok(bytes)
    }

    /// Data block `block`.
    async fn chunk(&self, block: u64, when: fn(u64) -> Wanted) -> Result<Chunk, BlockError> {
        let len = self.len_bytes(block);
        match self.place(block).await? {
            Place::Block(hash) => {
                let bytes = self.cache.get(hash, when(len)).await?;
                Ok(Chunk::Data(self.checked(block, hash, bytes)?))
            }
            Place::HoleUpto(_) => Ok(Chunk::Hole(len as usize)),
        }
    }

    /// Up to `len` bytes at `offset`; fewer only at the file's end.
    pub(crate) async fn read(&self, offset: u64, len: u32) -> Result<Bytes, BlockError> {
        if let Some(all) = self.inline() {
            let start = usize::try_from(offset).unwrap_or(usize::MAX).min(all.len());
            let end = start.saturating_add(len as usize).min(all.len());
            return Ok(all.slice(start..end));
        }
        let shape = self.shape().expect("a file without an inode is inline");
        let end = offset.saturating_add(u64::from(len)).min(shape.size_bytes);
        if offset >= end {
            return Ok(Bytes::new());
        }
        let first = offset >> shape.block_size_log2;
        let last = (end - 1) >> shape.block_size_log2;
        let skip = (offset - (first << shape.block_size_log2)) as usize;
        let wanted = (end - offset) as usize;
        if first == last {
            return Ok(match self.chunk(first, Wanted::Now).await? {
                Chunk::Data(bytes) => bytes.slice(skip..skip + wanted),
                Chunk::Hole(_) => Bytes::from(vec![0; wanted]),
            });
        }
        let mut chunks = stream::iter(first..=last)
            .map(|block| self.chunk(block, Wanted::Now))
            .buffered(BLOCKS_AT_ONCE);
        let mut out = BytesMut::with_capacity(wanted);
        let mut skip = skip;
        while let Some(chunk) = chunks.try_next().await? {
            let left = wanted - out.len();
            match chunk {
                Chunk::Data(bytes) => {
                    let end = (skip + left).min(bytes.len());
                    out.extend_from_slice(&bytes[skip..end]);
                }
                Chunk::Hole(len) => out.resize(out.len() + (len - skip).min(left), 0),
            }
            skip = 0;
        }
        Ok(out.freeze())
    }

    /// The whole file in order, at most `ahead_bytes` of it in memory; how much of that is
    /// on its way at once, the volume's window says. But its first blocks are asked for at
    /// once, as a `read` of as many: a window that has not grown yet costs a short file a
    /// round trip.
    pub(crate) fn stream(
        self,
        ahead_bytes: u64,
    ) -> impl stream::Stream<Item = Result<Bytes, BlockError>> + Send + 'static {
        let inline = self.inline();
        let shape = self.shape();
        let blocks = if inline.is_some() { 0 } else { shape.map_or(0, |s| s.data_blocks()) };
        let size = shape.map_or(1, |shape| shape.block_size_bytes());
        let at_once = (ahead_bytes / size).clamp(2, BLOCKS_AHEAD as u64) as usize;
        let whole = stream::iter(inline.filter(|bytes| !bytes.is_empty()).map(Ok));
        let parts = stream::iter(0..blocks).map(move |block| {
            let file = self.clone();
            let when = if block < BLOCKS_AT_ONCE as u64 { Wanted::Now } else { Wanted::Soon };
            async move { Ok(file.chunk(block, when).await?.into_bytes()) }
        });
        whole.chain(parts.buffered(at_once))
    }

    /// Begins to fetch these blocks, as the volume's window has room. The file must have pointers, and
    /// that many blocks.
    pub(crate) fn prefetch<I>(&self, blocks: I)
    where
        I: IntoIterator<Item = u64, IntoIter: Send + 'static>,
    {
        let blocks = blocks.into_iter();
        let file = self.clone();
        self.cache.spawn(Box::pin(async move {
            let fetches = stream::iter(blocks).map(|block| {
                let file = file.clone();
                // Errors are left to who reads these blocks.
                async move {
                    let _ = file.chunk(block, Wanted::Soon).await;
                }
            });
            fetches.buffer_unordered(BLOCKS_AHEAD).for_each(|()| async {}).await;
        }));
    }

    /// The first offset at or after `offset` that lies in data (or, if `data` is false,
    /// in a hole); the file's length if there is none, or no hole near enough.
    pub(crate) async fn seek(&self, offset: u64, data: bool) -> Result<u64, BlockError> {
        let size = self.shape().map_or(0, |shape| shape.size_bytes);
        if self.inline().is_some() {
            return Ok(if data { offset.min(size) } else { size });
        }
        let shape = self.shape().expect("a file without an inode is inline");
        let mut block = offset >> shape.block_size_log2;
        let mut passed = 0;
        while block < shape.data_blocks() {
            let next = match self.place(block).await? {
                Place::Block(_) if data => break,
                Place::HoleUpto(_) if !data => break,
                Place::Block(_) if passed == SEEK_BLOCKS => return Ok(size),
                Place::Block(_) => {
                    passed += 1;
                    block + 1
                }
                Place::HoleUpto(upto) => upto,
            };
            block = next;
        }
        Ok((block << shape.block_size_log2).max(offset).min(size))
    }
}

#[cfg(test)]
mod tests {
    use atoll_dht::{Blocks, MemoryBlocks};
    use atoll_env::TokioRuntime;

    use super::*;
    use crate::blocks::form::BlockForm;
    use crate::format::inode;

    async fn kept(blocks: &MemoryBlocks, block: Vec<u8>) -> BlockHash {
        let hash = BlockHash::of(&block);
        blocks.put(vec![(hash, block.into())]).await.expect("memory takes it");
        hash
    }

    /// Found by fuzzing: four blocks can describe a file of 4 TiB without a hole, and a
    /// search for one went from block to block for hours, without ever giving way.
    #[tokio::test]
    async fn a_search_for_a_hole_in_endless_data_ends() {
        let blocks = Arc::new(MemoryBlocks::new());
        let mut pointer = BlockHash::of(&[4; 4096]);
        for level in [1, 2] {
            pointer = kept(&blocks, PointerBlock::encode(level, &[Some(pointer); 2048])).await;
        }
        let size = 256 * 2048 * 2048 * 4096;
        let shape = Shape::new(size, 12).expect("allowed");
        let hash = kept(&blocks, inode::with_pointers(shape, &[Some(pointer); 256])).await;
        let cache = BlockCache::new(
            Arc::new(TokioRuntime::current()),
            (blocks, BlockForm::default()),
            1 << 20,
        );
        let file = File::open(&cache, Some(hash), size).await.expect("a good inode");
        assert_eq!(file.seek(1, true).await, Ok(1));
        assert_eq!(file.seek(1, false).await, Ok(size));
    }
}
