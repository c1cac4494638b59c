//! How a node gives disk: carrying a [`Policy`](crate::Policy) out.
//!
//! There are three, after §2 and §3 of the TFS paper:
//!
//! | policy | what the store may take |
//! |---|---|
//! | fixed | so much, whatever happens on the disk |
//! | dynamic | what keeps the file system at most `low` full; while others fill it up to `high` nothing changes, and beyond that blocks go until it is `low` full again |
//! | transparent | all that is free of a transparent file system, which takes it back as it needs it |
//!
//! The watermarks are those of Elastic Quotas and FS² as the paper describes them ("whenever
//! the current allocation exceeds the maximum watermark ... delete contributory files until the
//! contribution level falls below a lower watermark"). Between the two the store neither
//! grows nor shrinks, so that its own growth never makes it shrink.
//!
//! Fixed and dynamic keep blocks in the log in the node's directory, transparent in files of
//! the directory named; `controller` carries a change out.

mod backends;
mod check;
mod controller;
mod subsystem;

use atoll_dht::Share;
use atoll_store::Space;

pub(crate) use backends::Opened;
pub(crate) use controller::{ContributionController, State};

/// What a store of `own_bytes` may take of a file system that is so full.
pub(crate) fn dynamic_capacity(space: &Space, own_bytes: u64, low: Share, high: Share) -> u64 {
    let used_bytes = space.total_bytes.saturating_sub(space.free_bytes);
    let low_bytes = low.of(space.total_bytes);
    if used_bytes <= low_bytes {
        own_bytes + (low_bytes - used_bytes)
    } else if used_bytes <= high.of(space.total_bytes) {
        own_bytes
    } else {
        own_bytes.saturating_sub(used_bytes - low_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// §2 of the TFS paper.
    #[test]
    fn between_the_watermarks_a_store_neither_grows_nor_shrinks() {
        let (low, high) = (Share::from_millionths(800_000), Share::from_millionths(850_000));
        let capacity = |used_bytes, own_bytes| {
            let free_bytes = 1000 - used_bytes;
            let space = Space { total_bytes: 1000, free_bytes, unit_bytes: 1 };
            dynamic_capacity(&space, own_bytes, low, high)
        };
        assert_eq!(capacity(500, 100), 400, "up to the lower watermark");
        assert_eq!(capacity(800, 400), 400);
        assert_eq!(capacity(820, 400), 400, "the owner has begun to fill the disk");
        assert_eq!(capacity(850, 400), 400);
        assert_eq!(capacity(851, 400), 349, "so that 800 are used");
        assert_eq!(capacity(1000, 100), 0);
        // Its own growth never makes it shrink.
        let grown = capacity(500, 100);
        assert_eq!(capacity(500 - 100 + grown, grown), grown);
    }
}
