//! Why a call on a shared volume failed: what the kernel is told, and what people are told.

use atoll_dht::{GetError, PutError};
use atoll_vfs::Errno;

use super::access::{NotAllowed, NotReader};
use super::inode::TooLarge;
use crate::blocks::error::{BlockError, EditError, LoadError};
use crate::format::FormatError;

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(super) errno: Errno,
    /// For the log, unless the errno says all.
    pub(super) why: Option<String>,
    /// Whether contents that were written at the same time have to be kept elsewhere first.
    pub(super) is_conflict: bool,
}

impl Fault {
    pub(super) fn new(errno: Errno, why: impl ToString) -> Fault {
        Fault { errno, why: Some(why.to_string()), is_conflict: false }
    }

    pub(super) fn conflict() -> Fault {
        let why = "other contents were written at the same time, and cannot be kept as a file of \
                   their own";
        Fault { is_conflict: true, ..Fault::new(Errno::EACCES, why) }
    }

    /// What a program is told; people find the rest in the log.
    pub(super) fn logged(self) -> Errno {
        let Fault { errno, why, .. } = self;
        if let Some(why) = why {
            tracing::warn!("{errno}: {why}");
        }
        errno
    }
}

impl From<Errno> for Fault {
    fn from(errno: Errno) -> Fault {
        Fault { errno, why: None, is_conflict: false }
    }
}

impl From<GetError> for Fault {
    fn from(error: GetError) -> Fault {
        match error {
            GetError::Removed { .. } => Errno::ESTALE.into(),
            GetError::NotFound { .. } => Fault::new(Errno::EIO, error),
            GetError::Unavailable { .. } => Fault::new(Errno::ETIMEDOUT, error),
        }
    }
}

impl From<PutError> for Fault {
    fn from(error: PutError) -> Fault {
        let errno = match error {
            PutError::Full(_) => Errno::ENOSPC,
            PutError::OverQuota { .. } => Errno::EDQUOT,
            PutError::Unavailable(_) => Errno::ETIMEDOUT,
            PutError::NotAdmitted(_) => Errno::EACCES,
            PutError::Superseded { .. } | PutError::Invalid(_) => Errno::EIO,
        };
        Fault::new(errno, error)
    }
}

impl From<TooLarge> for Fault {
    fn from(error: TooLarge) -> Fault {
        let errno = match error {
            TooLarge::Links => Errno::EMLINK,
            TooLarge::Xattrs | TooLarge::Payload => Errno::ENOSPC,
        };
        Fault::new(errno, error)
    }
}

impl From<NotAllowed> for Fault {
    fn from(error: NotAllowed) -> Fault {
        let errno = match error {
            NotAllowed::NoKey => Errno::EROFS,
            NotAllowed::Unknown { .. } => Errno::ETIMEDOUT,
            _ => Errno::EACCES,
        };
        Fault::new(errno, error)
    }
}

impl From<NotReader> for Fault {
    fn from(error: NotReader) -> Fault {
        let errno = match error {
            NotReader::NoKey | NotReader::NotListed => Errno::EACCES,
            NotReader::Unknown { .. } => Errno::ETIMEDOUT,
        };
        Fault::new(errno, error)
    }
}

impl From<FormatError> for Fault {
    fn from(error: FormatError) -> Fault {
        let errno = match error {
            FormatError::NoReadKey(_) => Errno::EACCES,
            _ => Errno::EIO,
        };
        Fault::new(errno, error)
    }
}

impl From<BlockError> for Fault {
    fn from(error: BlockError) -> Fault {
        let error = error.at(b"");
        Fault::new(error.errno(), error)
    }
}

impl From<LoadError> for Fault {
    fn from(error: LoadError) -> Fault {
        match error {
            LoadError::Block(error) => error.into(),
            LoadError::Swap(why) => Fault::new(Errno::EIO, why),
        }
    }
}

impl From<EditError> for Fault {
    fn from(error: EditError) -> Fault {
        match error {
            EditError::Read(error) => error.into(),
            EditError::Format(error) => Fault::new(Errno::EFBIG, error),
            EditError::Swap(why) => Fault::new(Errno::EIO, why),
            EditError::Refused => Fault::new(Errno::EIO, "new blocks are not taken"),
        }
    }
}
