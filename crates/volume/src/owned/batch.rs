//! How blocks are put: several batches at once, so that neither the way to the ring nor its disks
//! wait for the other.

/// Batches on their way at once.
pub(super) const MAX_BATCHES: usize = 8;

/// Blocks in a batch.
pub(super) const MAX_BATCH_BLOCKS: usize = 64;

/// Bytes in a batch, unless one block alone has more.
pub(super) const MAX_BATCH_BYTES: usize = 1 << 20;
