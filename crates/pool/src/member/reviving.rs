//! A member whose copy becomes the group, when the others are lost (POOL: *accept-loss*, *revive*).
//!
//! A group serves nothing when no majority of its voters lives, or no member of its last epoch. People may then decide that one copy is what
//! the group has from now on, and look before at how each stands ([`copy_stand`]). What that copy lacks is lost.
//!
//! The copy's member gets a map of which it is the primary, the only one that has everything, and the only voter, of a later generation:
//! that is all that is written here, so whatever is interrupted can be done again. The upper bits of the map's epoch name the *revival*
//! ([`revived`]). Members whose last epoch is of another one, whatever they have, are given all files when they come
//! back. Of two copies that were revived the later one counts. When the member begins as the primary it makes its journal whole, and gives no number to a file that the
//! lost ones may have given ([`PoolMember::skip_numbers`]).
//!
//! The map is newer than any that others can have come to meanwhile, so they follow this member when it reaches them. Until then such
//! members that are a majority of the voters of before would go on beside it: nobody can tell them.

use atoll_env::Env;
use atoll_net::Peer;

use super::{CopyStage, OpenError, PoolMember};
use crate::disk::Disk;
use crate::layout::{GroupNumber, OWN_DIRECTORY};
use crate::map::{MapVoters, PoolMap, make_votes, members_file, revival, revived};
use crate::members::PoolMembers;

/// A generation of voters has the number of its revival in the bits above these.
const GENERATION_BITS: u32 = 16;

/// How a member's copy stands, for people who decide which one is to be the group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CopyStand {
    /// Of which group.
    pub group: GroupNumber,
    /// The last epoch of which it has a change: of two copies that with the greater one is newer.
    pub epoch: u64,
    /// The last change that it has: of two copies of the same epoch that with the greater one is newer.
    pub last_change: u64,
    /// It was being given all files, and has not got them: names, or bytes, are missing.
    pub is_incomplete: bool,
    /// The members of the group, as far as this one knew.
    pub members: PoolMembers,
}

/// Why a copy does not become the group.
#[derive(Debug, thiserror::Error)]
pub enum ReviveError {
    /// It cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// It has no copy: it was being given the names of all files.
    #[error("it was being given all files, and has not got their names")]
    NoFiles,
    /// It lacks bytes of files, which nobody has said to be willing to lose.
    #[error("it was being given all files, and lacks bytes of some")]
    Incomplete,
    /// It is a pool of one.
    #[error("it is a pool of one machine: nothing is missing")]
    OfOne,
}

/// How the copy on a disk stands that nobody uses.
///
/// # Errors
/// As when it is opened; if it is a pool of one.
pub async fn copy_stand<D: Disk>(env: Env, disk: D) -> Result<CopyStand, ReviveError> {
    let unrecovered = PoolMember::open_unrecovered(env, disk).await?;
    let map = unrecovered.map().ok_or(ReviveError::OfOne)?;
    let stands = unrecovered.stands()?;
    Ok(CopyStand {
        group: unrecovered.settings().group,
        epoch: stands.epoch,
        last_change: stands.last,
        is_incomplete: unrecovered.copy_stage().is_some(),
        members: map.enrolled.clone(),
    })
}

/// Makes the copy on a disk that nobody uses, of this node, `local`, what the group has from now on. One that lacks bytes only if
/// `also_incomplete`.
///
/// # Errors
/// As when it is opened; if it has no files, or lacks bytes.
pub async fn revive<D: Disk>(
    env: Env,
    disk: D,
    local: Peer,
    also_incomplete: bool,
) -> Result<(), ReviveError> {
    let random = env.random_u64();
    let unrecovered = PoolMember::open_unrecovered(env, disk).await?;
    let known = unrecovered.map().ok_or(ReviveError::OfOne)?.clone();
    match unrecovered.copy_stage() {
        None => {}
        Some(CopyStage::Names) => return Err(ReviveError::NoFiles),
        Some(CopyStage::Bytes(_)) if !also_incomplete => return Err(ReviveError::Incomplete),
        Some(CopyStage::Bytes(_)) => {}
    }
    let disk = unrecovered.disk();
    let epoch = known.epoch.max(unrecovered.stands()?.epoch);
    let now_secs = u64::try_from(disk.now().secs).unwrap_or(0);
    let enrolled = known.enrolled.with(local);
    let enrolled =
        enrolled.unwrap_or_else(|| PoolMembers::new(vec![local]).expect("one is enough"));
    let epoch = revived(epoch, now_secs, random);
    let generation =
        known.voters.generation.saturating_add(1).max(revival(epoch) << GENERATION_BITS);
    let map = PoolMap {
        epoch,
        primary: local.id,
        run: 0,
        verifier: random,
        members: [local.id].into(),
        enrolled,
        voters: MapVoters { generation, keys: [local.id].into() },
        roster: known.roster,
        witnesses: known.witnesses.without(local.id),
    };
    let failed = |errno| OpenError::Disk("cannot become the only copy", errno);
    let own = disk.node(&disk.top(), OWN_DIRECTORY.as_bytes()).await.map_err(failed)?;
    make_votes(&*disk, &own, &map).await.map_err(failed)?;
    members_file::write(&*disk, &own, &map).await.map_err(failed)?;
    unrecovered.take_as_complete().await.map_err(failed)?;
    Ok(())
}
