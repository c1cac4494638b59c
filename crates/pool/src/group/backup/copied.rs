//! A member that is given all files: its answers to the primary ([`crate::member::CopiedMember`]).

use std::sync::Arc;

use atoll_key::PeerId;
use atoll_net::{Refusal, Reply};

use super::{Backup, Phase, no_session};
use crate::disk::Disk;
use crate::member::{CopiedMember, CopyBatchError};
use crate::messages::{BeginCopy, CopyBatch, CopyHeader};

impl<D: Disk> Backup<D> {
    /// Discards what it has, to be given all files.
    pub(super) async fn begin_copy(
        self: Arc<Self>,
        from: PeerId,
        begin: BeginCopy,
    ) -> Result<Reply, Refusal> {
        let BeginCopy { session, map, .. } = &begin;
        let session = *session;
        if map.primary != from || !map.is_sound() || begin.epoch.0 > begin.order {
            return Err(Refusal::new(Refusal::MALFORMED, "a copy that cannot be"));
        }
        let _alone = self.under_way.write(0).await;
        let phase = {
            let mut state = self.state();
            self.hear(&mut state, map)?;
            if session.backup_run != self.run
                || session.number <= state.sessions
                || map.members.contains(&self.local.id)
                || matches!(state.phase, Phase::Recovering | Phase::Leading | Phase::Failed(_))
            {
                return Err(no_session());
            }
            state.sessions = session.number;
            state.session = None;
            std::mem::replace(&mut state.phase, Phase::Recovering)
        };
        let begun = match phase {
            Phase::Unrecovered(unrecovered) => unrecovered.begin_copy(begin).await,
            Phase::Copying(copied) => {
                match Arc::into_inner(copied).and_then(CopiedMember::into_parts) {
                    Some((member, sequence)) => {
                        CopiedMember::begin(member, (sequence, false), begin).await
                    }
                    None => return Err(self.fail("it is copied anew".into())),
                }
            }
            Phase::Serving(member) => {
                // Tasks may still work with its files: they end when the member is opened again.
                drop(member);
                return Err(self.fail("it is copied".into()));
            }
            Phase::Recovering | Phase::Leading | Phase::Failed(_) => return Err(no_session()),
        };
        match begun {
            Ok(copied) => {
                let mut state = self.state();
                state.phase = Phase::Copying(Arc::new(copied));
                state.session = Some(session);
                Ok(Reply::default())
            }
            Err(error) => Err(self.fail(error.to_string())),
        }
    }

    /// Takes names, and what goes with them.
    pub(super) async fn take_batch(
        self: Arc<Self>,
        header: CopyHeader,
        batch: CopyBatch,
    ) -> Result<Reply, Refusal> {
        let _under_way = self.under_way.read(0).await;
        let copied = {
            let mut state = self.state();
            state.heard = self.env.now();
            match &state.phase {
                Phase::Copying(copied) if state.session == Some(header.session) => copied.clone(),
                _ => return Err(no_session()),
            }
        };
        match copied.take(header.number, &batch).await {
            Ok(None) => {}
            Ok(Some(member)) => {
                self.state().session = None;
                self.serve(member);
            }
            Err(CopyBatchError::Wrong(why)) => {
                return Err(self.fail(format!("the primary sent {why}")));
            }
            Err(CopyBatchError::Disk(errno)) => return Err(self.fail(format!("its disk: {errno}"))),
        }
        Ok(Reply::default())
    }
}
