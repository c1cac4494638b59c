//! What a mount does while the ring cannot be reached, and when it is back.
//!
//! What programs write goes to the spool, durably, before the call returns. A task brings it to the ring: it tries
//! every few seconds, less often the longer that fails. What needs to see what others have done meanwhile
//! waits for it: inodes that have lost their last names are removed, directories that were removed are looked at
//! again, and what others have removed while it was written here is [named again](super::lost), when the mount is online.
//!
//! It does not know files on disk, nor in which order inodes reach the ring.

use std::sync::Weak;
use std::sync::atomic::Ordering;
use std::time::{Duration, UNIX_EPOCH};

use atoll_env::sleep;

use super::Shared;
use crate::counted::counted;
use crate::shared::inodes::OutOfReach;
use crate::shared::spool::SpoolStatus;

/// The pause before the first attempt, which doubles with each that fails. A guess.
const FIRST_PAUSE: Duration = Duration::from_secs(2);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// The pause when only such files are left as the ring does not take. A guess.
const PAUSE_WHEN_REFUSED: Duration = Duration::from_secs(60);

/// What waits in a mount's spool for the ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spooled {
    /// Files and directories of which the ring does not have the last version.
    pub files: usize,
    /// Bytes on disk.
    pub bytes: u64,
    /// The reason, for people.
    pub why: String,
    /// Why the ring does not take some of the files, for people: nobody brings those there while that is so.
    pub refused: Option<String>,
}

/// Brings to the ring what is spooled, until the mount ends.
pub(super) async fn run(shared: Weak<Shared>) {
    let mut pause = FIRST_PAUSE;
    loop {
        let Some(env) = shared.upgrade().map(|shared| shared.env.clone()) else { return };
        sleep(&*env, pause).await;
        let Some(shared) = shared.upgrade() else { return };
        if shared.has_ended.load(Ordering::Acquire) {
            return;
        }
        pause = match shared.bring_spooled().await {
            Ok(true) if shared.spool.has_work() => PAUSE_WHEN_REFUSED,
            Ok(true) => FIRST_PAUSE,
            Ok(false) | Err(OutOfReach) => (pause * 2).min(LONGEST_PAUSE),
        };
    }
}

impl Shared {
    /// Brings to the ring what is spooled; whether nothing is left that the ring could take.
    pub(super) async fn bring_spooled(&self) -> Result<bool, OutOfReach> {
        let _turn = self.bringing.lock().await;
        if !self.spool.has_work() {
            return Ok(true);
        }
        if self.spool.is_out_of_reach() && !self.spool.probe().await {
            return Err(OutOfReach);
        }
        let brought = self.inodes.bring_spooled().await;
        // What others have removed meanwhile needs a name.
        self.note_brought();
        self.check_written().await;
        brought
    }

    /// What waits in the spool, if anything does.
    pub(super) fn spooled(&self) -> Option<Spooled> {
        let SpoolStatus { inodes, bytes, damaged, offline, refused } = self.spool.status()?;
        let mut why = Vec::new();
        if let Some((since_ms, told)) = offline {
            let since =
                humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_millis(since_ms));
            why.push(format!("offline since {since}, what is shown may be old: {told}"));
        }
        if let Some((count, told)) = &refused {
            let keep = "copy them out of this mount to keep them elsewhere";
            why.push(format!("the ring does not take {count} of them, {keep}: {told}"));
        }
        if damaged > 0 {
            let files =
                ("file of the spool was damaged and is", "files of the spool were damaged and are");
            why.push(format!("{} set aside", counted(damaged as u64, files.0, files.1)));
        }
        let is_empty = inodes == 0 && bytes == 0 && why.is_empty();
        let refused = refused.map(|(_, told)| told);
        (!is_empty).then(|| Spooled { files: inodes, bytes, why: why.join("; "), refused })
    }
}
