//! Giving the inodes of a volume other groups, from a directory down.
//!
//! Only the volume's owner can, and only as a member of the new groups: an inode is read, what its siblings say is
//! signed anew under a [`Rebinding`], and a directory's entries follow. A replica that holds a newer binding takes no more
//! fresh siblings of an older one, so a member of a group that is left out is shut out of the inode from then on. What the
//! node of that member takes all the same is [late](crate::shared::standing): it stands beside what is signed anew.
//!
//! | the siblings of an inode | what is signed |
//! |---|---|
//! | can be merged without conflict | one version in the place of all |
//! | cannot | each anew, in its own place. Late ones stay as they are |
//! | of members who remain, written at the same time under the former binding | the same once more, when the inode is read again after it was put |
//!
//! That it was signed anew is not a version of its own: its payload says who has written it, and when ([`Origin`]).
//!
//! Inodes that have the right groups are left alone, so that a rebinding which was interrupted is run
//! again. The walk is repeated until one changes nothing: others go on writing, and what they make in a directory
//! that they have read before it was rebound is bound to the former groups.
//!
//! It remembers the keys of the inodes it has seen, 32 bytes each, since directories that members write
//! may name each other in circles.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use atoll_dht::{Blocks, GetError, NewBlock, PutError, Wanted};
use atoll_env::Env;
use atoll_key::kinds::certified::{
    Author, CertifiedBlock, Dot, MAX_ADMITTED_SIBLINGS, Rebinding, Sibling, WriterId,
};
use atoll_key::{BlockHash, BlockId, GroupId, SecretKey, UserId, volume_group};
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::credentials::Credentials;
use super::groups::read_group;
use super::{ATTEMPTS, AccessError};
use crate::shared::entries;
use crate::shared::inode::{Contents, Inode, InodeKey};
use crate::shared::merged::{self, Merged, names};
use crate::shared::origin::Origin;
use crate::shared::past;
use crate::shared::sealing::{ContentSealer, Sealing};
use crate::shared::standing::{Standing, Trusted};

/// Inodes that are read or put at once. A guess.
const WINDOW: usize = 16;
/// How many inodes that failed are named; others are counted.
const MAX_NAMED: usize = 20;

/// Walks through the volume. Others may go on making files for as long as their mounts do not read the directories anew: a
/// few seconds. A guess.
const MAX_PASSES: usize = 8;

/// How far a rebinding has come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RebindReport {
    /// Inodes that were found; by the last walk.
    pub inodes: u64,
    /// Inodes that have other groups now, or were written anew.
    pub changed: u64,
    /// Those that could not be read or put; by the last walk.
    pub failed: u64,
    /// Paths of the first of these, and why.
    pub named: Vec<(Bytes, String)>,
    /// Whether the last walk has found more to change: others go on writing what is bound to former groups.
    pub is_unsettled: bool,
}

/// What is at hand for each inode.
struct Rebinder<'a> {
    env: &'a Env,
    blocks: &'a Arc<dyn Blocks>,
    volume: &'a SecretKey,
    sealing: &'a Sealing,
    credentials: &'a Credentials,
    groups: &'a (dyn Fn(&[GroupId]) -> Vec<GroupId> + Sync),
    /// The members of groups that were read.
    members: Mutex<BTreeMap<GroupId, Trusted>>,
}

/// An inode to be visited.
struct Visit {
    inode: InodeKey,
    path: Bytes,
}

/// What a visit found: whether the inode was changed, and the directory's entries.
type Visited = Result<(bool, Vec<(Bytes, InodeKey)>), String>;

/// Binds `top` and all inodes below it to what `groups` makes of their groups. The volume's owner is,
/// as a user, the one of `credentials`; an encrypted volume's inodes are written anew as `sealing` seals
/// them. `progress` is called after each inode.
pub async fn rebind(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    (volume, sealing): (&SecretKey, &Sealing),
    credentials: &Credentials,
    top: InodeKey,
    groups: &(dyn Fn(&[GroupId]) -> Vec<GroupId> + Sync),
    progress: &mut (dyn FnMut(&RebindReport) + Send),
) -> RebindReport {
    let members = Mutex::default();
    let rebinder = Rebinder { env, blocks, volume, sealing, credentials, groups, members };
    let mut report = RebindReport::default();
    let mut changed = BTreeSet::new();
    for _ in 0..MAX_PASSES {
        report = RebindReport { changed: report.changed, ..RebindReport::default() };
        if !rebinder.walk(top, &mut report, &mut changed, progress).await {
            return report;
        }
    }
    report.is_unsettled = true;
    report
}

/// Binds what is bound to former epochs of groups to the present ones, as [`rebind`] does: what members have made since who
/// had not heard of an epoch, without the ring for example, and what was made below it. `bound` are the groups
/// that inodes of the volume are bound to: without a former one among them nothing is read.
pub async fn rebind_former(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    (volume, sealing, root): (&SecretKey, &Sealing, InodeKey),
    credentials: &Credentials,
    in_present_epochs: &(dyn Fn(&[GroupId]) -> Vec<GroupId> + Sync),
    bound: &BTreeSet<GroupId>,
) -> RebindReport {
    if bound.iter().all(|group| in_present_epochs(&[*group]) == [*group]) {
        return RebindReport::default();
    }
    let owner = (volume, sealing);
    rebind(env, blocks, owner, credentials, root, in_present_epochs, &mut |_| {}).await
}

/// The groups of an inode with the present epoch of the default group in the place of former ones.
pub fn in_present_epoch(
    volume: &SecretKey,
    epoch: u32,
) -> impl Fn(&[GroupId]) -> Vec<GroupId> + Sync + use<> {
    let former: BTreeSet<GroupId> =
        (0..epoch).map(|epoch| volume_group(volume, epoch).group_id()).collect();
    let present = volume_group(volume, epoch).group_id();
    move |groups| {
        let of = |group: &GroupId| if former.contains(group) { present } else { *group };
        let groups: BTreeSet<GroupId> = groups.iter().map(of).collect();
        groups.into_iter().collect()
    }
}

fn joined(path: &[u8], name: &[u8]) -> Bytes {
    [path, b"/", name].concat().into()
}

impl Rebinder<'_> {
    /// Visits all inodes from `top` down; whether one was changed.
    async fn walk(
        &self,
        top: InodeKey,
        report: &mut RebindReport,
        all_changed: &mut BTreeSet<InodeKey>,
        progress: &mut (dyn FnMut(&RebindReport) + Send),
    ) -> bool {
        let mut has_changed = false;
        let mut seen = BTreeSet::from([top]);
        let mut waiting = VecDeque::from([Visit { inode: top, path: Bytes::new() }]);
        let mut running = FuturesUnordered::new();
        loop {
            while running.len() < WINDOW
                && let Some(visit) = waiting.pop_front()
            {
                running.push(self.visit(visit));
            }
            let Some((Visit { inode, path }, visited)) = running.next().await else {
                return has_changed;
            };
            report.inodes += 1;
            match visited {
                Ok((changed, entries)) => {
                    has_changed |= changed;
                    if changed && all_changed.insert(inode) {
                        report.changed += 1;
                    }
                    for (name, inode) in entries {
                        if seen.insert(inode) {
                            let path = if path.is_empty() { name } else { joined(&path, &name) };
                            waiting.push_back(Visit { inode, path });
                        }
                    }
                }
                Err(told) => {
                    report.failed += 1;
                    if report.named.len() < MAX_NAMED {
                        report.named.push((path, told));
                    }
                }
            }
            progress(report);
        }
    }

    async fn visit(&self, visit: Visit) -> (Visit, Visited) {
        let visited = self.try_visit(visit.inode).await;
        (visit, visited)
    }

    async fn try_visit(&self, inode: InodeKey) -> Visited {
        let id = CertifiedBlock::id_at(inode.key());
        let mut changed = false;
        // What was signed here is part of all that is signed later.
        let mut signed: Option<CertifiedBlock> = None;
        let mut told = "others write it all the time".to_owned();
        for _ in 0..ATTEMPTS {
            let held = match self.blocks.get_block(id, Wanted::Newest).await {
                Ok(held) => held,
                // Removed: nobody can write it.
                Err(GetError::Removed { .. }) => return Ok((changed, Vec::new())),
                Err(error) => return Err(error.to_string()),
            };
            let block = CertifiedBlock::decode(&held.bytes).map_err(|error| error.to_string())?;
            let block = signed.as_ref().and_then(|mine| mine.join(&block)).unwrap_or(block);
            let leaves = entries::fetch(self.blocks, &block, self.sealing).await;
            let leaves = leaves.map_err(|error| error.to_string())?;
            let wanted = (self.groups)(block.groups());
            let trusted = self.members_of(&wanted).await;
            let merged = merged::merge_trusting(&block, &leaves, self.sealing, &trusted);
            let merged = merged.ok().flatten();
            let is_bound = BTreeSet::from_iter(&wanted) == BTreeSet::from_iter(block.groups());
            if is_bound && is_written_under(&block, &trusted) {
                return Ok((changed, merged.map(named).unwrap_or_default()));
            }
            let rebound = match is_bound {
                true => Some(block.clone()),
                false => self.rebound(&block, &wanted),
            };
            let why = "it belongs to another volume, or would have no group or too many";
            let rebound = rebound.ok_or(why)?;
            let next = match self.credentials.author(&wanted, self.new_writer()).await {
                Ok(author) => self.written(&rebound, author, merged.as_ref(), &trusted).await?,
                // It has its groups; somebody else has to write it.
                Err(_) if is_bound => {
                    return Ok((changed, merged.map(named).unwrap_or_default()));
                }
                Err(error) => return Err(format!("it cannot be written anew: {error}")),
            };
            let mine = signed.take().and_then(|mine| mine.join(&next));
            signed = mine.or_else(|| Some(next.clone()));
            let new = NewBlock { id, bytes: next.bytes().clone(), lease_secs: None };
            match self.blocks.put_blocks(vec![new]).await.pop().unwrap_or(Ok(())) {
                Ok(()) => changed = true,
                Err(error @ (PutError::Superseded { .. } | PutError::NotAdmitted(_))) => {
                    self.credentials.forget(&wanted);
                    told = error.to_string();
                }
                Err(error) => return Err(error.to_string()),
            }
        }
        Err(told)
    }

    /// The members of groups, as far as their records can be read.
    async fn members_of(&self, groups: &[GroupId]) -> Trusted {
        let mut all = Trusted::new();
        for group in groups {
            let known = self.members().get(group).cloned();
            let members = match known {
                Some(members) => members,
                None => {
                    let record = read_group(self.blocks, *group).await.ok().flatten();
                    let members = record.map(|record| record.members.into_keys().collect());
                    let members: Trusted = members.unwrap_or_default();
                    self.members().insert(*group, members.clone());
                    members
                }
            };
            all.extend(members);
        }
        all
    }

    fn members(&self) -> MutexGuard<'_, BTreeMap<GroupId, Trusted>> {
        self.members.lock().expect("no holder of this lock panics")
    }

    /// A name under which one version is written, so that no two of a writer's have one height.
    fn new_writer(&self) -> WriterId {
        let user = self.credentials.user().unwrap_or(UserId([0; 32]));
        WriterId::new(&user, self.env.random_u64().to_be_bytes())
    }

    /// The block under a new binding.
    fn rebound(&self, block: &CertifiedBlock, groups: &[GroupId]) -> Option<CertifiedBlock> {
        let version = block.binding_version().checked_add(1)?;
        block.rebound(Rebinding::sign(self.volume, &block.key(), version, groups)?)
    }

    /// What the siblings of a block say, written under its binding.
    async fn written(
        &self,
        block: &CertifiedBlock,
        author: Author,
        merged: Option<&Merged>,
        trusted: &Trusted,
    ) -> Result<CertifiedBlock, String> {
        let is_plain = |it: &&Merged| it.conflicts.is_empty() && it.unreadable.is_empty();
        let one = match merged.filter(is_plain) {
            Some(merged) => self.written_as_one(block, &author, &merged.inode, trusted).await,
            None => None,
        };
        // A version that covers others would take their contents away.
        let written = one.or_else(|| self.written_each(block, &author, trusted));
        written.ok_or_else(|| "it cannot be signed".to_owned())
    }

    /// Each sibling that is not late, in the place of itself; those that lead, if there are too many.
    fn written_each(
        &self,
        block: &CertifiedBlock,
        author: &Author,
        trusted: &Trusted,
    ) -> Option<CertifiedBlock> {
        let standing = Standing::of(block, trusted);
        let is_former = |one: &&Sibling| one.binding_version < block.binding_version();
        let siblings = standing.leading_first(block).filter(|one| !standing.is_late(one));
        let former: Vec<&Sibling> =
            siblings.take(MAX_ADMITTED_SIBLINGS).filter(is_former).collect();
        let mut all: Option<CertifiedBlock> = None;
        // Of two of one height that written later leads.
        for (time_ms, sibling) in (self.env.unix_ms()..).zip(former.into_iter().rev()) {
            let author = Author { writer: self.new_writer(), ..author.clone() };
            let payload = self.said(block, sibling, author.writer);
            let payload = payload.unwrap_or_else(|| sibling.payload.clone());
            let next = block.say_again(sibling, &author, time_ms, &payload)?;
            all = match all {
                Some(all) => Some(all.join(&next)?),
                None => Some(next),
            };
        }
        all
    }

    /// The payload of a sibling as `writer` signs it anew; `None` if it is no inode.
    fn said(&self, block: &CertifiedBlock, sibling: &Sibling, writer: WriterId) -> Option<Bytes> {
        let inode = self.sealing.inode(&sibling.payload).ok().filter(|_| !sibling.is_removal)?;
        let dot = Dot { writer, height: sibling.dot.height + 1 };
        let written = Origin::of(inode.attributes.origin, block, sibling);
        let inode = self.with_origin(&inode, block, dot, written);
        Some(self.sealing.sealer().seal_inode(inode.encode().ok()?).ok()?.into())
    }

    /// One version in the place of all siblings, which show `inode`.
    async fn written_as_one(
        &self,
        block: &CertifiedBlock,
        author: &Author,
        inode: &Inode,
        trusted: &Trusted,
    ) -> Option<CertifiedBlock> {
        let sealer = self.sealing.sealer();
        let content = sealer.of_inode(InodeKey::of(&block.key()));
        for leaf in inode.leaves().iter().filter(|leaf| !leaf.is_named()) {
            leaf.name(self.put_content(&content, &leaf.encode()).await?);
        }
        let user = past::author(block, inode, trusted)?;
        let began_ms = past::began_ms(block, Some(inode));
        let inode = self.with_origin(inode, block, block.next_dot(author.writer), (user, began_ms));
        let payload = sealer.seal_inode(inode.encode().ok()?).ok()?;
        block.write(author, self.env.unix_ms(), Some(&payload))
    }

    /// An inode as the version `dot` has it, which is signed here and was written by somebody else.
    fn with_origin(
        &self,
        inode: &Inode,
        block: &CertifiedBlock,
        dot: Dot,
        (user, time_ms): (UserId, u64),
    ) -> Inode {
        let mut inode = inode.clone();
        let origin = Origin::sign(self.volume, &block.key(), &dot, user, time_ms);
        inode.attributes.origin = Some(origin);
        inode
    }

    /// Puts a content block; its hash, if the ring has it.
    async fn put_content(&self, content: &ContentSealer<'_>, block: &[u8]) -> Option<BlockHash> {
        let bytes = Bytes::from(content.seal(block));
        let hash = BlockHash::of_inode_content(&bytes);
        let new = NewBlock { id: hash.inode_content_id(), bytes, lease_secs: None };
        self.blocks.put_all(vec![new]).await.ok()?;
        Some(hash)
    }
}

/// Whether what counts of a block was written under its newest binding: one of its siblings, and all of users who may write
/// it under that.
fn is_written_under(block: &CertifiedBlock, trusted: &Trusted) -> bool {
    let is_new = |one: &Sibling| one.binding_version == block.binding_version();
    let is_trusted = |one: &&Sibling| trusted.contains(&one.certificate.user);
    let mut siblings = block.siblings().iter();
    siblings.any(is_new) && block.siblings().iter().filter(is_trusted).all(is_new)
}

/// What a directory names; nothing for other files.
fn named(merged: Merged) -> Vec<(Bytes, InodeKey)> {
    match merged.inode.contents {
        Contents::Directory(entries) => {
            let shown = names(&entries).into_iter();
            shown
                .flat_map(|(name, same)| same.into_iter().map(move |e| (name.clone(), e.inode)))
                .collect()
        }
        _ => Vec::new(),
    }
}

/// An inode as the ring has it.
async fn read(blocks: &Arc<dyn Blocks>, inode: InodeKey) -> Result<CertifiedBlock, AccessError> {
    let id = CertifiedBlock::id_at(inode.key());
    let held = blocks.get_block(id, Wanted::Newest).await?;
    CertifiedBlock::decode(&held.bytes).map_err(|error| unreadable(&id, &error))
}

fn unreadable(id: &BlockId, told: &dyn fmt::Display) -> AccessError {
    GetError::Unavailable { key: id.key, told: told.to_string() }.into()
}

/// The groups that may write an inode.
///
/// # Errors
/// If it cannot be read.
pub async fn groups_of(
    blocks: &Arc<dyn Blocks>,
    inode: InodeKey,
) -> Result<Vec<GroupId>, AccessError> {
    Ok(read(blocks, inode).await?.groups().to_vec())
}

/// The inode at a path below `top`; `None` if there is none.
///
/// # Errors
/// If a directory on the way cannot be read.
pub async fn find(
    blocks: &Arc<dyn Blocks>,
    top: InodeKey,
    path: &[Vec<u8>],
    sealing: &Sealing,
) -> Result<Option<InodeKey>, AccessError> {
    let mut at = top;
    for name in path {
        let block = read(blocks, at).await?;
        let leaves = entries::fetch(blocks, &block, sealing).await?;
        let merged = merged::merge(&block, &leaves, sealing);
        let merged = merged.map_err(|error| unreadable(&block.id(), &error))?;
        let Some(Contents::Directory(entries)) = merged.map(|merged| merged.inode.contents) else {
            return Ok(None);
        };
        let shown = names(&entries);
        let Some(entry) = shown.get(&name[..]).and_then(|same| same.first()) else {
            return Ok(None);
        };
        at = entry.inode;
    }
    Ok(Some(at))
}
