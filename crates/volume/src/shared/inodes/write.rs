//! Writing inodes: making and signing their next versions, and putting these.
//!
//! A version is signed under the inode's turn to sign, over all that this mount has signed of it, and put under its
//! turn to be put; what is put before it, its leaves and past versions, is put first.
//!
//! It does not know when the ring has the versions that are shown before they are put ([`super::behind`]).

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;

use atoll_dht::PutError;
use atoll_env::Instant;
use atoll_key::kinds::certified::{Binding, CertifiedBlock, Dot, WriterId};
use atoll_key::{BlockHash, GroupId, NotAdmitted};
use atoll_vfs::{Errno, FileKind};

use super::together::{Child, Unrecorded};
use super::{Base, Freshness, Inodes, Known, MAX_ATTEMPTS, ReplacedLeaves, State, Version};
use crate::blocks::outbox::{NewContent, Outbox};
use crate::shared::entries::Leaves;
use crate::shared::fault::Fault;
use crate::shared::inode::{Contents, Inode, InodeKey};
use crate::shared::merged::{Conflict, Merged};
use crate::shared::past::{Replaced, left_by_removal};

/// What becomes of what a version replaces.
#[derive(Clone, Copy, Default)]
pub(super) struct Over<'a> {
    /// Other contents that are kept elsewhere, or that nobody has to keep: the version may cover them.
    pub(super) covered: Option<&'a BTreeSet<Dot>>,
    /// How long it is kept at least as a past version, seconds.
    pub(super) kept_secs: u64,
}

/// What the next version of an inode is made of.
pub(super) struct Next<'a> {
    pub(super) version: &'a Version,
    /// The version that the caller's change was for, if replicas hold newer ones.
    pub(super) refused_base: Option<&'a Version>,
    pub(super) over: Over<'a>,
    /// Whether later versions cover it in any case. Else the caller says so when the ring has it.
    pub(super) is_recorded: bool,
}

/// A version that was signed.
pub(super) struct Signed<T> {
    pub(super) block: CertifiedBlock,
    pub(super) inode: Inode,
    pub(super) leaves: Leaves,
    /// What the edit has answered.
    pub(super) value: T,
    pub(super) is_removed: bool,
}

impl Inodes {
    /// Makes an inode that members of `groups` may write.
    pub(in crate::shared) async fn create(
        &self,
        groups: &[GroupId],
        number: [u8; 16],
        inode: impl FnOnce(Dot) -> Inode,
    ) -> Result<(InodeKey, Arc<Version>), Fault> {
        let (key, state, made) = self.sign_first(groups, number, inode).await?;
        let _turn = state.turn.lock().await;
        self.put(&made).await?;
        let version = self.learn(&state, &made, self.env.now()).await?.ok_or(Errno::ESTALE)?;
        Ok((key, version))
    }

    /// The same, in memory alone: the next version is the first that is put.
    pub(in crate::shared) async fn begin(
        &self,
        groups: &[GroupId],
        number: [u8; 16],
        inode: impl FnOnce(Dot) -> Inode,
    ) -> Result<(InodeKey, Arc<Version>), Fault> {
        let (key, state, made) = self.sign_first(groups, number, inode).await?;
        let version = self.learn(&state, &made, self.env.now()).await?.ok_or(Errno::ESTALE)?;
        Ok((key, version))
    }

    pub(super) async fn sign_first(
        &self,
        groups: &[GroupId],
        number: [u8; 16],
        inode: impl FnOnce(Dot) -> Inode,
    ) -> Result<(InodeKey, Arc<State>, CertifiedBlock), Fault> {
        let binding = Binding::new(self.volume, number, groups).ok_or(Errno::EIO)?;
        let key = InodeKey::of(&binding.key());
        let state = self.state(key);
        let turn = state.turn.lock().await;
        let author = self.credentials.author(groups, state.writer()).await?;
        let sealer = self.reading.sealer().await?;
        let mut inode = inode(Dot { writer: state.writer(), height: 1 });
        inode.attributes.origin = None;
        let payload = sealer.seal_inode(inode.encode()?)?;
        let made = CertifiedBlock::create(binding, &author, self.env.unix_ms(), &payload);
        let made = made.ok_or(Fault::new(Errno::EIO, "a new inode cannot be signed"))?;
        state.known().signed = Some(made.clone());
        drop(turn);
        Ok((key, state, made))
    }

    /// Writes the next version of an inode: what `edit` makes of it. `edit` is given the name of the
    /// version, and may be called several times.
    pub(in crate::shared) async fn update<T>(
        &self,
        key: InodeKey,
        base: Base<'_>,
        mut edit: impl FnMut(&mut Inode, Dot) -> Result<T, Errno>,
    ) -> Result<(T, Arc<Version>), Fault> {
        let made = self.write(key, base, |inode, dot| Ok((edit(inode, dot)?, false))).await?;
        let (value, version) = made;
        Ok((value, version.ok_or(Errno::ESTALE)?))
    }

    /// The same; the inode is removed if `edit` says so.
    pub(in crate::shared) async fn write<T>(
        &self,
        key: InodeKey,
        base: Base<'_>,
        edit: impl FnMut(&mut Inode, Dot) -> Result<(T, bool), Errno>,
    ) -> Result<(T, Option<Arc<Version>>), Fault> {
        self.write_over(key, base, Over::default(), edit).await
    }

    /// The same; what is replaced is kept as a past version for so many seconds at least.
    pub(in crate::shared) async fn replace<T>(
        &self,
        key: InodeKey,
        base: Base<'_>,
        kept_secs: u64,
        edit: impl FnMut(&mut Inode, Dot) -> Result<(T, bool), Errno>,
    ) -> Result<(T, Option<Arc<Version>>), Fault> {
        self.write_over(key, base, Over { kept_secs, ..Over::default() }, edit).await
    }

    /// Writes what `version` shows in place of all its siblings, whose other contents have been kept. A conflict, if there
    /// are others by now.
    pub(in crate::shared) async fn cover(
        &self,
        key: InodeKey,
        version: &Arc<Version>,
    ) -> Result<Arc<Version>, Fault> {
        let kept = version.merged.conflicts.iter().map(|conflict| conflict.dot).collect();
        let over = Over { covered: Some(&kept), ..Over::default() };
        let written = self.write_over(key, Base::Version(version), over, |_, _| Ok(((), false)));
        Ok(written.await?.1.ok_or(Errno::ESTALE)?)
    }

    async fn write_over<T>(
        &self,
        key: InodeKey,
        base: Base<'_>,
        over: Over<'_>,
        edit: impl FnMut(&mut Inode, Dot) -> Result<(T, bool), Errno>,
    ) -> Result<(T, Option<Arc<Version>>), Fault> {
        let state = self.state(key);
        let _turn = state.turn.lock().await;
        self.write_in_turn((key, &state), (base, None), over, edit).await
    }

    /// The same; the caller holds the inode's turn. The first version that is put goes after `child`, if there is
    /// one.
    pub(super) async fn write_in_turn<T>(
        &self,
        (key, state): (InodeKey, &State),
        (base, mut child): (Base<'_>, Option<&mut Child<'_>>),
        over: Over<'_>,
        mut edit: impl FnMut(&mut Inode, Dot) -> Result<(T, bool), Errno>,
    ) -> Result<(T, Option<Arc<Version>>), Fault> {
        let (mut refused, mut is_stale) = (None, false);
        for _ in 0..MAX_ATTEMPTS {
            let version = match &base {
                Base::Version(version) if !is_stale => (*version).clone(),
                _ => self.read_state(state, key, Freshness::Newest).await?,
            };
            let refused_base = match &base {
                Base::Version(base) if is_stale => Some(&***base),
                _ => None,
            };
            let began = self.env.now();
            let signing = state.signing.lock().await;
            // A version that names a child counts only if the ring has the child; none is signed over it before.
            let tried = child.as_ref().filter(|child| child.is_to_be_put());
            let tried = tried.map(|_| Unrecorded::of(self, state));
            let is_recorded = tried.is_none();
            let next = Next { version: &version, refused_base, over, is_recorded };
            let Signed { block, inode, leaves, value, is_removed } =
                self.sign_next(state, next, &mut edit).await?;
            let unsent: Vec<NewContent> = {
                let known = state.known();
                let leaves = known.unsent.values().map(|(_, content)| content);
                leaves.chain(known.unsent_past.values()).cloned().collect()
            };
            let signing = Some(signing).filter(|_| tried.is_some());
            self.check_reused(state, &leaves).await?;
            self.put_leaves(state, unsent).await?;
            let put = self.put_after(child.as_deref_mut(), &block).await;
            if child.as_ref().is_some_and(|child| child.is_refused()) {
                return Err(put.err().map_or(Errno::EIO.into(), Fault::from));
            }
            if let Some(tried) = tried {
                tried.record(&block);
            }
            drop(signing);
            match put {
                Ok(()) => {
                    let merged = Merged { inode, conflicts: Vec::new(), unreadable: Vec::new() };
                    let written = Version::of(block, merged, leaves);
                    self.wrote(key, state, &written, is_removed, began).await?;
                    return Ok((value, Some(written).filter(|_| !is_removed)));
                }
                // Replicas hold versions that this one has to include, or newer groups of writers.
                Err(
                    why @ (PutError::NotAdmitted(NotAdmitted::Outdated)
                    | PutError::Superseded { .. }),
                ) => (refused, is_stale) = (Some(why), true),
                Err(PutError::NotAdmitted(why @ NotAdmitted::Expired { .. })) => {
                    self.credentials.forget(block.groups());
                    refused = Some(PutError::NotAdmitted(why));
                }
                Err(error) => return Err(error.into()),
            }
        }
        Err(refused.map_or(Errno::EIO.into(), Fault::from))
    }

    /// Signs the next version of an inode, while the caller holds its turn to sign.
    pub(super) async fn sign_next<T>(
        &self,
        state: &State,
        Next { version, refused_base, over: Over { covered, kept_secs }, is_recorded }: Next<'_>,
        edit: &mut impl FnMut(&mut Inode, Dot) -> Result<(T, bool), Errno>,
    ) -> Result<Signed<T>, Fault> {
        let over = match &state.known().signed {
            Some(signed) => version.block.join(signed).ok_or(Errno::EIO)?,
            None => version.block.clone(),
        };
        // The leaves that are referred to already: they are on the ring, or unsent.
        let (merged, referred) = match over == version.block {
            true => (version.merged.clone(), Cow::Borrowed(&version.leaves)),
            false => {
                let leaves = self.read_leaves(state, &over, Some(version)).await?;
                let merged = self.merged(&over, &leaves)?;
                (merged.ok_or(Errno::ESTALE)?, Cow::Owned(leaves))
            }
        };
        if let Some((_, error)) = merged.unreadable.first() {
            let why = format!("the inode has a version that cannot be read: {error}");
            return Err(Fault { why: Some(why), ..Fault::from(error.clone()) });
        }
        // A base that was refused gives way to the newest version: other contents of that are kept
        // elsewhere before anything covers them.
        let is_unseen = refused_base
            .is_some_and(|base| self.has_other_contents(base, &merged, &over, state.writer()));
        let is_kept = |one: &Conflict| covered.is_some_and(|covered| covered.contains(&one.dot));
        if is_unseen || !merged.conflicts.iter().all(is_kept) {
            return Err(Fault::conflict());
        }
        let author = self.credentials.author(over.groups(), state.writer()).await?;
        let sealer = self.reading.sealer().await?;
        let time_ms = self.env.unix_ms();
        let mut inode = merged.inode.clone();
        inode.attributes.origin = None;
        let (value, is_removed) = edit(&mut inode, over.next_dot(state.writer()))?;
        let replaced = Replaced {
            block: &over,
            trusted: &self.own,
            inode: &merged.inode,
            ended_ms: time_ms,
            kept_secs,
            is_lost: self.is_lost(state, (&over, &merged.inode), (&inode, is_removed)).await,
        };
        let kept = self.keep_replaced(state, replaced, &sealer).await;
        inode.past = kept.past;
        {
            let mut known = state.known();
            known.unsent_past.extend(kept.blocks.into_iter().map(|block| (block.hash, block)));
            // The new one lists it.
            known.dropped.extend(merged.inode.past.filter(|before| kept.past != Some(*before)));
        }
        let mut leaves = Leaves::new();
        let block = if is_removed {
            state.known().dropped.extend(version.leaves.keys());
            over.remove(&author, time_ms, &left_by_removal(inode.past))
        } else {
            let content = sealer.of_inode(InodeKey::of(&version.block.key()));
            let outbox = Outbox::new(&self.blocks, &self.cache, Some(&content));
            let mut known = state.known();
            if let Contents::Directory(entries) = &mut inode.contents {
                entries.forget_names(|hash| {
                    referred.contains_key(hash)
                        || known.unsent.contains_key(hash)
                        || known.unsent_past.contains_key(hash)
                });
            }
            for leaf in inode.leaves() {
                if !leaf.is_named() {
                    let content = outbox.seal(leaf.encode());
                    leaf.name(content.hash);
                    known.unsent.insert(content.hash, (leaf.clone(), content));
                }
                leaves.insert(leaf.hash(), leaf.clone());
            }
            let Known { unsent, dropped, .. } = &mut *known;
            let is_sent = |hash: &&BlockHash| !unsent.contains_key(hash);
            dropped.extend(version.leaves.keys().filter(is_sent));
            dropped.retain(|hash| !leaves.contains_key(hash) && inode.past != Some(*hash));
            // A version that is not recorded may be forgotten: then the next one follows the last that was.
            if is_recorded {
                unsent.retain(|hash, _| leaves.contains_key(hash));
            }
            drop(known);
            over.write(&author, time_ms, Some(&sealer.seal_inode(inode.encode()?)?))
        };
        let block = block.ok_or(Fault::new(Errno::EIO, "the inode cannot be signed"))?;
        if is_recorded {
            state.known().signed = Some(block.clone());
        }
        Ok(Signed { block, inode, leaves, value, is_removed })
    }

    /// Notes a version that was written.
    pub(super) async fn wrote(
        &self,
        key: InodeKey,
        state: &State,
        written: &Arc<Version>,
        is_removed: bool,
        at: Instant,
    ) -> Result<(), Fault> {
        self.note_put(key, state, written);
        let leaves = std::mem::take(&mut state.known().dropped);
        if !leaves.is_empty() {
            let replaced = ReplacedLeaves { key, block: written.block.clone(), leaves };
            self.replaced_leaves().push(replaced);
        }
        {
            let mut known = state.known();
            let covers = |version: &Version| written.block.includes(&version.block);
            if known.version().is_none_or(|version| covers(version)) {
                known.version = Some((written.clone(), at)).filter(|_| !is_removed);
                return Ok(());
            }
        }
        self.learn(state, &written.block, at).await.map(drop)
    }

    /// Brings leaves and past versions to the ring that are not there.
    pub(super) async fn put_leaves(
        &self,
        state: &State,
        unsent: Vec<NewContent>,
    ) -> Result<(), Fault> {
        let sent: Vec<BlockHash> = unsent.iter().map(|content| content.hash).collect();
        // They are sealed already.
        let mut outbox = Outbox::new(&self.blocks, &self.cache, None);
        unsent.into_iter().for_each(|content| outbox.push(content));
        outbox.finish().await?;
        let mut known = state.known();
        for hash in sent {
            let is_past = known.unsent_past.remove(&hash).is_some();
            // What was signed meanwhile may not refer to it any more.
            if known.unsent.remove(&hash).is_none() && !is_past {
                known.dropped.insert(hash);
            }
        }
        Ok(())
    }

    pub(super) async fn put(&self, block: &CertifiedBlock) -> Result<(), PutError> {
        let put = self.blocks.put_blocks(vec![block.into()]);
        let none = || Err(PutError::Unavailable("the put has no outcome".into()));
        put.await.pop().unwrap_or_else(none)
    }

    /// Whether a file has contents that are neither those of `base` nor its writer's own.
    fn has_other_contents(
        &self,
        base: &Version,
        merged: &Merged,
        block: &CertifiedBlock,
        writer: WriterId,
    ) -> bool {
        let contents = &merged.inode.contents;
        let mut siblings = self.standing(block).leading_first(block);
        let leading = siblings.find(|sibling| !sibling.is_removal);
        contents.kind() != FileKind::Directory
            && *contents != base.inode().contents
            && leading.is_some_and(|leading| leading.dot.writer != writer)
    }
}
