//! The five states of a block and what may happen to it (§3.1, Figure 2).
//!
//! | allocated | transparent | overwritten | state |
//! |---|---|---|---|
//! | 0 | 0 | 0 | free |
//! | 1 | 0 | 0 | allocated |
//! | 0 | 1 | 0 | transparent |
//! | 1 | 1 | 1 | allocated and overwritten |
//! | 0 | 1 | 1 | free and overwritten |
//!
//! *Allocated* is ext2's own bitmap; the other two are TFS's.

use thiserror::Error;

/// The state of a block.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum BlockState {
    /// Holds nothing.
    Free,
    /// Holds ordinary data.
    Allocated,
    /// Holds transparent data.
    Transparent,
    /// Holds ordinary data, and a transparent file still counts it as its own.
    AllocatedAndOverwritten,
    /// Held ordinary data, and a transparent file still counts it as its own.
    FreeAndOverwritten,
}

/// What happens to a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BlockEvent {
    /// Ordinary data is written to it.
    OrdinaryWrite,
    /// The ordinary file lets it go.
    OrdinaryDelete,
    /// Transparent data is written to it.
    TransparentWrite,
    /// The transparent file that counts it as its own lets it go.
    TransparentDelete,
}

/// A transition that Figure 2 does not have.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("{event:?} cannot happen to a block that is {state:?}")]
pub struct Impossible {
    /// What the block was.
    pub state: BlockState,
    /// What should have happened to it.
    pub event: BlockEvent,
}

/// A block's bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BlockBits {
    /// In ext2's bitmap.
    pub allocated: bool,
    /// In TFS's first.
    pub transparent: bool,
    /// In TFS's second.
    pub overwritten: bool,
}

impl BlockState {
    /// All of them.
    pub const ALL: [BlockState; 5] = [
        BlockState::Free,
        BlockState::Allocated,
        BlockState::Transparent,
        BlockState::AllocatedAndOverwritten,
        BlockState::FreeAndOverwritten,
    ];

    /// The state bits stand for. Three combinations arise from no transition, only from
    /// other software or damage; each is read as the state that trusts nothing.
    pub fn of(bits: BlockBits) -> BlockState {
        match (bits.allocated, bits.transparent, bits.overwritten) {
            (false, false, _) => BlockState::Free,
            (true, false, _) => BlockState::Allocated,
            (false, true, false) => BlockState::Transparent,
            // Other software that allocated a transparent block did not know the other maps.
            (true, true, _) => BlockState::AllocatedAndOverwritten,
            (false, true, true) => BlockState::FreeAndOverwritten,
        }
    }

    /// Its bits.
    pub fn bits(self) -> BlockBits {
        let (allocated, transparent, overwritten) = match self {
            BlockState::Free => (false, false, false),
            BlockState::Allocated => (true, false, false),
            BlockState::Transparent => (false, true, false),
            BlockState::AllocatedAndOverwritten => (true, true, true),
            BlockState::FreeAndOverwritten => (false, true, true),
        };
        BlockBits { allocated, transparent, overwritten }
    }

    /// The state after `event`.
    ///
    /// # Errors
    /// [`Impossible`], where Figure 2 has no arrow.
    pub fn after(self, event: BlockEvent) -> Result<BlockState, Impossible> {
        use BlockEvent::*;
        use BlockState::*;
        Ok(match (self, event) {
            (Free, OrdinaryWrite) => Allocated,
            (Transparent | FreeAndOverwritten, OrdinaryWrite) => AllocatedAndOverwritten,
            (Allocated, OrdinaryDelete) => Free,
            (AllocatedAndOverwritten, OrdinaryDelete) => FreeAndOverwritten,
            (Free, TransparentWrite) => Transparent,
            (Transparent | FreeAndOverwritten, TransparentDelete) => Free,
            (AllocatedAndOverwritten, TransparentDelete) => Allocated,
            (state, event) => return Err(Impossible { state, event }),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::BlockEvent::*;
    use super::BlockState::*;
    use super::*;

    #[test]
    fn ordinary_data_can_be_written_over_free_or_transparent_blocks() {
        // "If the block was previously used by transparent data, the file system marks these
        // blocks as allocated-and-overwritten" (§3.1).
        assert_eq!(Free.after(OrdinaryWrite), Ok(Allocated));
        assert_eq!(Transparent.after(OrdinaryWrite), Ok(AllocatedAndOverwritten));
        assert_eq!(FreeAndOverwritten.after(OrdinaryWrite), Ok(AllocatedAndOverwritten));
    }

    #[test]
    fn transparent_data_can_only_be_written_to_free_blocks() {
        // "It cannot overwrite allocated blocks, other transparent blocks, or overwritten
        // blocks of any sort" (§3.1).
        for state in BlockState::ALL {
            assert_eq!(state.after(TransparentWrite).is_ok(), state == Free, "{state:?}");
        }
    }

    #[test]
    fn a_deleted_transparent_file_leaves_its_blocks_free_or_allocated() {
        // "marks all of the blocks of the file as free, or allocated" (§3.1).
        assert_eq!(Transparent.after(TransparentDelete), Ok(Free));
        assert_eq!(FreeAndOverwritten.after(TransparentDelete), Ok(Free));
        assert_eq!(AllocatedAndOverwritten.after(TransparentDelete), Ok(Allocated));
        assert!(Free.after(TransparentDelete).is_err());
        assert!(Allocated.after(TransparentDelete).is_err());
    }

    #[test]
    fn a_deleted_ordinary_file_leaves_the_mark_of_what_it_overwrote() {
        assert_eq!(Allocated.after(OrdinaryDelete), Ok(Free));
        assert_eq!(AllocatedAndOverwritten.after(OrdinaryDelete), Ok(FreeAndOverwritten));
        for state in [Free, Transparent, FreeAndOverwritten] {
            assert!(state.after(OrdinaryDelete).is_err(), "{state:?}");
        }
    }

    #[test]
    fn what_ext2_sees_depends_on_ordinary_events_alone() {
        for state in BlockState::ALL {
            assert_eq!(BlockState::of(state.bits()), state);
            for event in [TransparentWrite, TransparentDelete] {
                if let Ok(after) = state.after(event) {
                    assert_eq!(after.bits().allocated, state.bits().allocated);
                }
            }
        }
    }

    #[test]
    fn bits_that_arise_from_no_transition_trust_nothing() {
        let read = |allocated, transparent, overwritten| {
            BlockState::of(BlockBits { allocated, transparent, overwritten })
        };
        assert_eq!(read(true, true, false), AllocatedAndOverwritten);
        assert_eq!(read(false, false, true), Free);
        assert_eq!(read(true, false, true), Allocated);
    }
}
