//! Why a call on a mount failed.

use atoll_vfs::Errno;

use crate::blocks::error::{BlockError, LoadError};

/// See the module.
pub(crate) enum Fault {
    /// The program is told so, and nothing is to be logged.
    Errno(Errno),
    /// A block is missing or bad.
    Block(BlockError),
}

impl From<Errno> for Fault {
    fn from(errno: Errno) -> Fault {
        Fault::Errno(errno)
    }
}

impl From<BlockError> for Fault {
    fn from(error: BlockError) -> Fault {
        Fault::Block(error)
    }
}

impl From<LoadError> for Fault {
    fn from(error: LoadError) -> Fault {
        match error {
            LoadError::Block(error) => Fault::Block(error),
            LoadError::Swap(why) => {
                tracing::error!("{why}");
                Fault::Errno(Errno::EIO)
            }
        }
    }
}
