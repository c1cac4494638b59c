//! What the primary asks members about their copies, itself included.

use std::sync::Arc;
use std::time::Duration;

use atoll_net::{CallError, Peer, Request};
use atoll_vfs::Errno;
use bytes::Bytes;
use futures_util::future::join_all;

use super::Scrub;
use crate::backups::BackupLink;
use crate::change::FileBirth;
use crate::disk::Disk;
use crate::layout::FileId;
use crate::member::PoolMember;
use crate::messages::{
    self, GroupSession, NamesOutcome, RestoreStep, SCRUB, ScrubAsk, ScrubCall, ScrubReply, refused,
};
use crate::routing::addressed;
use crate::scrub::{CopyLook, FileLook, LookAt};

/// How long a member may take to look at files.
const LOOK_LIMIT: Duration = Duration::from_secs(30);
/// The same, while clients wait for a lock.
pub(super) const LOCKED_LIMIT: Duration = Duration::from_millis(400);
/// How long it may take to copy a file to the side.
const ASIDE_LIMIT: Duration = Duration::from_secs(300);
/// One member's copies.
pub(super) enum MemberCopies<D: Disk> {
    Own(Arc<PoolMember<D>>),
    Other(Arc<BackupLink>, GroupSession),
}

/// Why a file was not compared to the end.
#[derive(Debug, thiserror::Error)]
pub(super) enum Passed {
    /// Clients write to it, or it is being made or removed.
    #[error("clients work on it")]
    InUse,
    /// A member does not answer, or says why it cannot.
    #[error("a member does not answer: {0}")]
    Away(String),
    /// A member's disk does not do it.
    #[error("{0}")]
    Refused(String),
    /// The primary's own disk.
    #[error("the primary's disk: {0}")]
    Disk(Errno),
}

impl From<Errno> for Passed {
    fn from(errno: Errno) -> Passed {
        Passed::Disk(errno)
    }
}

impl<D: Disk> Scrub<'_, D> {
    /// This member's copies and those of the others that can be spoken to; this one's are the first.
    pub(super) fn copies(&self) -> Vec<MemberCopies<D>> {
        let links = self.primary.backups.links();
        let others = links
            .iter()
            .filter(|link| link.is_member())
            .filter_map(|link| Some(MemberCopies::Other(link.clone(), link.session()?)));
        std::iter::once(MemberCopies::Own(self.member.clone())).chain(others).collect()
    }

    /// Whether these are all that there are, and no member is away.
    pub(super) fn are_all(&self, copies: &[MemberCopies<D>]) -> bool {
        let map = self.primary.backups.map();
        map.is_whole() && map.members.len() == copies.len()
    }

    pub(super) fn name_of(&self, copies: &MemberCopies<D>) -> String {
        let Peer { id, addr } = match copies {
            MemberCopies::Own(_) => self.primary.transport.local(),
            MemberCopies::Other(link, _) => link.peer(),
        };
        format!("{id} at {addr}")
    }

    pub(super) async fn ask(
        &self,
        copies: &MemberCopies<D>,
        after: u64,
        ask: ScrubAsk,
    ) -> Result<(ScrubReply, Bytes), Passed> {
        let limit = match ask {
            ScrubAsk::SetAside(_) => ASIDE_LIMIT,
            _ => LOOK_LIMIT,
        };
        self.ask_within(copies, after, (ask, Bytes::new()), limit).await
    }

    pub(super) async fn ask_within(
        &self,
        copies: &MemberCopies<D>,
        after: u64,
        (ask, bytes): (ScrubAsk, Bytes),
        limit: Duration,
    ) -> Result<(ScrubReply, Bytes), Passed> {
        let (link, session) = match copies {
            MemberCopies::Own(member) => return Ok(member.answer_scrub(&ask, &bytes).await?),
            MemberCopies::Other(link, session) => (link, *session),
        };
        let header = messages::encode(&ScrubCall { session, after, ask });
        let header = addressed(&self.primary.pool, &header);
        let request = Request { method: SCRUB, header, parts: vec![bytes] };
        let reply = self.primary.transport.call(link.peer(), request, limit).await;
        let reply = reply.map_err(|error| match error {
            CallError::Refused(refusal) if refusal.code == refused::COPY => {
                Passed::Refused(format!("{}: {}", self.name_of(copies), refusal.text))
            }
            error => Passed::Away(error.to_string()),
        })?;
        let unreadable = || Passed::Away("its answer cannot be read".into());
        let answer = messages::decode(&reply.header).ok_or_else(unreadable)?;
        Ok((answer, reply.parts.into_iter().next().unwrap_or_default()))
    }

    /// Asks while clients wait for a lock.
    pub(super) async fn ask_locked(
        &self,
        copies: &MemberCopies<D>,
        after: u64,
        ask: ScrubAsk,
    ) -> Result<(ScrubReply, Bytes), Passed> {
        self.ask_within(copies, after, (ask, Bytes::new()), LOCKED_LIMIT).await
    }

    pub(super) async fn mend_names(
        &self,
        copies: &MemberCopies<D>,
        id: FileId,
    ) -> Result<NamesOutcome, Passed> {
        let after = self.primary.backups.released();
        match self.ask(copies, after, ScrubAsk::MendNames(id)).await? {
            (ScrubReply::Names(outcome), _) => Ok(outcome),
            _ => Err(other_answer()),
        }
    }

    pub(super) async fn set_aside(
        &self,
        copies: &MemberCopies<D>,
        id: FileId,
    ) -> Result<bool, Passed> {
        let after = self.primary.backups.released();
        match self.ask(copies, after, ScrubAsk::SetAside(id)).await? {
            (ScrubReply::SetAside(is_kept), _) => Ok(is_kept),
            _ => Err(other_answer()),
        }
    }

    pub(super) async fn look(
        &self,
        copies: &[MemberCopies<D>],
        files: &[LookAt],
    ) -> Result<Vec<Vec<CopyLook>>, Passed> {
        let after = self.primary.backups.released();
        let looks = copies.iter().map(|of| async {
            match self.ask(of, after, ScrubAsk::Look(files.to_vec())).await? {
                (ScrubReply::Looks(looks), _) if looks.len() == files.len() => Ok(looks),
                _ => Err(other_answer()),
            }
        });
        join_all(looks).await.into_iter().collect()
    }

    /// Has a member make a step of making a file again.
    pub(super) async fn restore_step(
        &self,
        to: &MemberCopies<D>,
        (id, after): (FileId, u64),
        step: RestoreStep,
        bytes: Bytes,
    ) -> Result<(), Passed> {
        // Others wait for the file's lock meanwhile.
        let limit = if matches!(step, RestoreStep::End(_)) { LOCKED_LIMIT } else { ASIDE_LIMIT };
        let ask = ScrubAsk::Restore { id, step };
        match self.ask_within(to, after, (ask, bytes), limit).await? {
            (ScrubReply::Done, _) => Ok(()),
            _ => Err(other_answer()),
        }
    }

    pub(super) async fn read(
        &self,
        from: &MemberCopies<D>,
        id: FileId,
        (offset, len): (u64, u64),
    ) -> Result<(u64, FileBirth, Bytes), Passed> {
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        let ask = ScrubAsk::Read { id, offset, len };
        match self.ask(from, self.primary.backups.released(), ask).await? {
            (ScrubReply::Bytes { size_bytes, birth }, bytes) => Ok((size_bytes, birth, bytes)),
            _ => Err(other_answer()),
        }
    }

    /// The extended attributes of a file.
    pub(super) async fn read_xattrs(
        &self,
        from: &MemberCopies<D>,
        id: FileId,
    ) -> Result<Vec<(Vec<u8>, Bytes)>, Passed> {
        let after = self.primary.backups.released();
        let (_, list) = self.ask(from, after, ScrubAsk::XattrNames(id)).await?;
        let mut all = Vec::new();
        for name in list.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
            let name = name.to_vec();
            let ask = ScrubAsk::Xattr { id, name: name.clone() };
            if let (ScrubReply::Attribute(true), value) = self.ask(from, after, ask).await? {
                all.push((name, value));
            }
        }
        Ok(all)
    }
}

pub(super) fn other_answer() -> Passed {
    Passed::Away("another answer than was asked for".into())
}

pub(super) fn there(look: &CopyLook) -> Option<&FileLook> {
    match look {
        CopyLook::There(look) => Some(look),
        CopyLook::Unknown | CopyLook::Lost => None,
    }
}
