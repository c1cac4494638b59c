//! Taking set-user-ID and set-group-ID bits away for the kernel.
//!
//! With `FUSE_HANDLE_KILLPRIV_V2` this is the server's part, and the kernel asks for the
//! attribute `security.capability` before the first write after an inode's attributes changed,
//! instead of before every write. (The kernel itself removes that attribute.)

use atoll_vfs::{Caller, Errno, FileSystem, InodeNumber, SetAttr};
use fuser::Notifier;

use super::invalidations::forget_attributes;
use crate::privileges::reduced_mode_of;

/// Takes the bits of a file away that is written, and tells the kernel, which after a write asks for
/// sizes and times again, but shows the mode that it knows.
pub(super) async fn take_away(
    fs: &dyn FileSystem,
    notifier: Option<&Notifier>,
    caller: Caller,
    inode: InodeNumber,
) -> Result<(), Errno> {
    if let mode @ Some(_) = reduced_mode_of(fs, caller, inode).await? {
        fs.setattr(caller, inode, None, SetAttr { mode, ..SetAttr::default() }).await?;
        forget_attributes(notifier, inode);
    }
    Ok(())
}
