//! What a long operation says while it runs.

/// What a publish or get is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Reading files and uploading blocks.
    Upload,
    /// Everything is read; waiting for the ring to acknowledge the rest.
    Flush,
    /// Replacing the root block.
    Root,
    /// Copying files to disk (get).
    Copy,
}

/// Hears how far a publish or a get has come. Called from many threads, often: it must
/// return at once. All numbers are increments.
pub trait Progress: Send + Sync + 'static {
    /// More work was found.
    fn discovered(&self, files: u64, bytes: u64) {
        let _ = (files, bytes);
    }

    /// All work is found: the totals are final.
    fn discovery_ended(&self) {}

    /// Work was done (of what was or will be discovered). A large file's bytes come as
    /// it goes, with `files` = 0, and then the file.
    fn done(&self, files: u64, bytes: u64) {
        let _ = (files, bytes);
    }

    /// The ring acknowledged blocks that it did not have (publish only).
    fn uploaded(&self, new_blocks: u64, new_bytes: u64) {
        let _ = (new_blocks, new_bytes);
    }

    /// Another phase began.
    fn phase(&self, phase: Phase) {
        let _ = phase;
    }
}

/// Shows no progress.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoProgress;

impl Progress for NoProgress {}
