//! A pool of several members that do not change: one is the *primary*, the others are its *backups* (primary and backups as in
//! PacificA, MSR-TR-2008-25; Kosha §4.2 keeps replicas of each directory in the same way, without an order).
//!
//! ```text
//! primary   its links to the backups: begun, watched, mended
//! backup    a member that follows: its answers to the primary
//! ```
//!
//! The primary decides every change and gives it its place in one order. A change of names or attributes is answered when all
//! members have it durably in their journals and the primary has made it; backups make it when they hear that. Bytes go to all
//! members in place, and are durable on all after a sync. Clients work with the primary alone.
//!
//! **Invariants.** What a backup has made, all members have durably. What was answered survives the loss of all disks but one.
//! When nothing is under way, all members have the same files, with the same bytes.
//!
//! **It does not know** what to do without a member: while one cannot be reached, changes wait (reads go on), and while the primary
//! is away there is no file system. Nobody else becomes primary.

mod backup;
mod primary;

use std::sync::Arc;
use std::time::Duration;

use atoll_env::{Env, timeout};
use atoll_net::{Peer, Service, Transport};
use atoll_vfs::Errno;

use self::backup::Backup;
use self::primary::Primary;
use crate::disk::Disk;
use crate::fs::PoolFs;
use crate::member::{Makes, OpenError, OpenReport, PoolMember, PoolSettings};
use crate::members::PoolMembers;

/// How long changes that are under way may take when a primary ends its work.
const END_LIMIT: Duration = Duration::from_secs(3);

/// A member of a pool of several, at work in a node.
pub struct GroupMember<D: Disk> {
    settings: PoolSettings,
    members: PoolMembers,
    role: MemberRole<D>,
}

enum MemberRole<D: Disk> {
    Primary(Arc<Primary<D>>),
    Backup(Arc<Backup<D>>),
}

/// How a member stands.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemberStatus {
    /// Which.
    pub peer: Peer,
    /// Why it does not take part, for people; none if it does.
    pub problem: Option<String>,
    /// The last change that it has made.
    pub applied: u64,
    /// Room on its disk, bytes; none if that is not known.
    pub free_bytes: Option<u64>,
    /// Files of which it gets ranges again, since it may have lost them.
    pub files_to_mend: usize,
}

/// How a pool of several stands, as one member knows it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupStatus {
    /// Whether this member decides changes.
    pub is_primary: bool,
    /// The members that it knows the state of: on the primary all, itself first; on a backup that one alone.
    pub members: Vec<MemberStatus>,
}

impl<D: Disk> GroupMember<D> {
    /// Opens a member's disk, and begins its work: the primary's file system can be used at once, and its changes wait for the
    /// backups; a backup waits for the primary.
    ///
    /// # Errors
    /// As for a pool of one; [`OpenError::NotAMember`] if this node is not in the list, or there is none.
    pub async fn start(
        env: Env,
        transport: Arc<dyn Transport>,
        disk: D,
    ) -> Result<(GroupMember<D>, OpenReport), OpenError> {
        let own = transport.local().id;
        let unrecovered = PoolMember::open_unrecovered(env.clone(), disk).await?;
        let members = unrecovered.members().cloned().ok_or(OpenError::NotAMember)?;
        if !members.contains(own) {
            return Err(OpenError::NotAMember);
        }
        let settings = unrecovered.settings();
        if members.primary().id != own {
            let backup = Backup::new(env, transport.local(), members.primary().id, unrecovered)?;
            let role = MemberRole::Backup(backup);
            return Ok((GroupMember { settings, members, role }, OpenReport::default()));
        }
        let (member, report) = unrecovered.recover(Makes::All).await?;
        let primary = Primary::start(&env, &transport, member, members.backups());
        Ok((GroupMember { settings, members, role: MemberRole::Primary(primary) }, report))
    }

    /// What the pool was made with.
    pub fn settings(&self) -> PoolSettings {
        self.settings
    }

    /// Who its members are.
    pub fn members(&self) -> &PoolMembers {
        &self.members
    }

    /// Answers calls of the family `0x05` that are the pool's members'.
    pub fn service(&self) -> Option<Arc<dyn Service>> {
        match &self.role {
            MemberRole::Primary(_) => None,
            MemberRole::Backup(backup) => Some(backup.clone()),
        }
    }

    /// The file system; on the primary alone.
    pub fn file_system(&self) -> Option<PoolFs<D>> {
        match &self.role {
            MemberRole::Primary(primary) => Some(PoolFs::of_primary(primary.member.clone())),
            MemberRole::Backup(_) => None,
        }
    }

    /// How the pool stands.
    pub fn status(&self) -> GroupStatus {
        match &self.role {
            MemberRole::Primary(primary) => {
                GroupStatus { is_primary: true, members: primary.status() }
            }
            MemberRole::Backup(backup) => {
                GroupStatus { is_primary: false, members: vec![backup.status()] }
            }
        }
    }

    /// Whether its disk has failed: it takes no part until it is opened again.
    pub fn has_failed(&self) -> bool {
        match &self.role {
            MemberRole::Primary(primary) => primary.member.has_failed(),
            MemberRole::Backup(backup) => backup.has_failed(),
        }
    }

    /// Makes everything durable that this member has, so that the next start has little to do, and stops its work: calls that are
    /// under way fail, and the disk is free when this and all file systems of it are dropped.
    ///
    /// # Errors
    /// What the disk says; [`Errno::ETIMEDOUT`] if changes wait for a backup that is away. The next start makes them again.
    pub async fn end(&self) -> Result<(), Errno> {
        match &self.role {
            MemberRole::Primary(primary) => {
                let member = &primary.member;
                let ended = timeout(&*member.env, END_LIMIT, member.checkpoint()).await;
                member.close();
                ended.unwrap_or(Err(Errno::ETIMEDOUT))
            }
            MemberRole::Backup(backup) => backup.end().await,
        }
    }
}
