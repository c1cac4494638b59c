//! An open file that this mount has not changed shows what others have closed since it was opened, as with NFS: whenever
//! a program asks for its attributes, or reads at its end, which has the kernel ask for them, and what is known is older
//! than names and attributes may be.
//!
//! A file that has changes here stays as it is: they are for what its programs have read. So does one that is locked:
//! under a lock nobody else writes it, and [`locks`](super::locks) shows the newest version when the lock is taken.
//! A program that then writes what it has not read covers nothing unseen ([`conflicts`](super::conflicts)).
//! What is read in the middle of a file asks nobody, so that a program which copies a file reads one version of it.

use std::time::Duration;

use atoll_env::timeout;
use atoll_vfs::Errno;

use super::Shared;
use crate::shared::fault::Fault;
use crate::shared::inode::InodeKey;
use crate::shared::table::Node;

/// How long a call waits for the ring before it shows what is known. A guess.
const FOLLOW_LIMIT: Duration = Duration::from_secs(2);
/// How long nobody waits for it again then. A guess.
const PAUSE: Duration = Duration::from_secs(15);

impl Shared {
    /// Brings an open file up to date, if that is due.
    pub(super) async fn follow(&self, number: u64) {
        if self.has_lock(number) {
            return;
        }
        let due = {
            let (now, age) = (self.env.now(), self.options.names_max_age);
            let mut table = self.table();
            let is_open = table.opens(number) > 0;
            let Ok(node) = table.node_mut(number) else { return };
            let is_here = is_open && follows(node);
            let Some(view) = node.view.as_mut().filter(|_| is_here) else { return };
            let is_due = now.since(view.checked_at) >= age;
            if is_due {
                view.checked_at = now;
            }
            is_due.then_some(node.key)
        };
        let Some(key) = due else { return };
        match timeout(&*self.env, FOLLOW_LIMIT, self.try_follow(number, key)).await {
            // Another mount has removed it: it is as it was.
            Ok(Ok(()) | Err(Fault { errno: Errno::ESTALE, .. })) => {}
            Ok(Err(fault)) => tracing::debug!("an open file is shown as it was: {fault:?}"),
            Err(_) => {
                let until = self.env.now() + PAUSE;
                // It may have been closed meanwhile.
                let _ = self.table().on_view(number, |view| view.checked_at = until);
            }
        }
    }

    async fn try_follow(&self, number: u64, key: InodeKey) -> Result<(), Fault> {
        let mut version = self.inodes.read(key, self.names_age()).await?;
        if !version.merged.conflicts.is_empty() {
            version = self.read_without_conflicts(key).await?;
        }
        let turn = self.table().node(number)?.turn.clone();
        {
            // Whoever has the turn writes it, or opens it and shows the newest.
            let Some(_turn) = turn.try_lock() else { return Ok(()) };
            if self.has_lock(number) {
                return Ok(());
            }
            let mut table = self.table();
            let node = table.node(number)?;
            let is_open = table.opens(number) > 0;
            let shown = node.view.as_ref().filter(|_| is_open && follows(node));
            let is_newer = shown.is_some_and(|view| {
                let shown = &view.version.block;
                version.block != *shown && version.block.includes(shown)
            });
            if !is_newer {
                return Ok(());
            }
            table.set_view(number, self.view(version)?)?;
            self.drop_pages(&mut table, number)?;
        }
        // Not within the turn, as with locks. The program reads what the attributes say that come now.
        self.kernel_has_dropped().await;
        Ok(())
    }
}

/// Whether an open file shows what others write: it has its inode on the ring, and no changes.
fn follows(node: &Node) -> bool {
    let is_clean = node.view.as_ref().is_some_and(|view| !view.has_changes());
    is_clean && node.orphan.is_none() && node.birthplace.is_none()
}
