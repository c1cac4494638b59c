//! Answers calls: which program and procedure, for whom, how long it may take, and whether it was asked before.
//!
//! A call that changes nothing is answered within [`LIMIT`](super::LIMIT), if only with `NFS3ERR_JUKEBOX`, after which clients wait and
//! try again. A change has no limit: a client that is told to try again sends a *new* call, and a `mkdir` that succeeded late would end
//! in "exists". Changes go through the cache of replies ([`Replies`](super::replies::Replies)).

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;

use super::mount;
use super::nfs3::{self, Procedure, Reply, Status};
use super::procedures::{attributes, directories, files, names};
use super::replies::{Identity, Pieces};
use super::rpc::{Call, Credential, Refusal, accepted};
use super::service::{Service, Session};
use super::xdr::{Reader, Writer, Xdr};

impl Service {
    /// The reply to a call, in pieces; none if it ended without one.
    pub async fn answer(self: &Arc<Service>, client: SocketAddr, call: Call) -> Option<Pieces> {
        let refused = |refusal: Refusal| Some(refusal.reply(call.xid).into_pieces());
        match call.program {
            nfs3::NFS => {}
            nfs3::MOUNT => return Some(mount::answer(self, client, call).await),
            (program, _) if program == nfs3::NFS.0 => return refused(Refusal::Version(3, 3)),
            (program, _) if program == nfs3::MOUNT.0 => return refused(Refusal::Version(3, 3)),
            _ => return refused(Refusal::Program),
        }
        let Ok(procedure) =
            Reader::new(Bytes::copy_from_slice(&call.procedure.to_be_bytes())).take::<Procedure>()
        else {
            return refused(Refusal::Procedure);
        };
        if procedure != Procedure::Null && call.credential == Credential::None {
            // Nobody without a number is nobody; a client that leaves it out is told to send one.
            return refused(Refusal::TooWeak);
        }
        let identity = Identity { client: client.ip(), xid: call.xid, checksum: checksum(&call) };
        let session = Session { service: self.clone(), client, credential: call.credential };
        let (xid, from) = (call.xid, call.arguments);
        macro_rules! look {
            ($call:path) => {
                Some(session.look(xid, from, $call).await)
            };
        }
        macro_rules! change {
            ($call:path) => {
                change!($call, Status::Io)
            };
            ($call:path, $unsure:expr) => {
                self.replies
                    .once(identity, async move { session.change(xid, from, $call, $unsure).await })
                    .await
            };
        }
        match procedure {
            Procedure::Null => Some(accepted(xid).into_pieces()),
            Procedure::GetAttr => look!(attributes::get),
            Procedure::SetAttr => change!(attributes::set),
            Procedure::Lookup => look!(names::lookup),
            Procedure::Access => look!(attributes::access),
            Procedure::ReadLink => look!(names::read_link),
            Procedure::Read => look!(files::read),
            Procedure::Write => change!(files::write, Status::Jukebox),
            Procedure::Create => change!(names::create),
            Procedure::MkDir => change!(names::make_directory),
            Procedure::SymLink => change!(names::make_link),
            Procedure::MkNod => change!(names::make_special),
            Procedure::Remove => change!(names::remove),
            Procedure::RmDir => change!(names::remove_directory),
            Procedure::Rename => change!(names::rename),
            Procedure::Link => change!(names::link),
            Procedure::ReadDir => look!(directories::read),
            Procedure::ReadDirPlus => look!(directories::read_plus),
            Procedure::FsStat => look!(attributes::file_system),
            Procedure::FsInfo => look!(attributes::limits),
            Procedure::PathConf => look!(attributes::path_limits),
            Procedure::Commit => change!(files::commit, Status::Jukebox),
        }
    }
}

/// Whether a file system that never waits may work long at a call: it moves bytes, or makes them durable.
pub(super) fn is_long(call: &Call) -> bool {
    [Procedure::Read, Procedure::Write, Procedure::Commit]
        .iter()
        .any(|long| *long as u32 == call.procedure)
}

/// Of procedure, credential and arguments. Of a WRITE its place and its first bytes, which is enough to tell calls of one number apart.
fn checksum(call: &Call) -> [u8; 16] {
    const BYTES: usize = 512;
    let mut hasher = blake3::Hasher::new();
    let arguments = call.arguments.rest();
    hasher.update(&call.procedure.to_be_bytes());
    if let Credential::Sys(sys) = &call.credential {
        hasher.update(&sys.uid.to_be_bytes()).update(&sys.gid.to_be_bytes());
    }
    hasher
        .update(&(arguments.len() as u64).to_be_bytes())
        .update(&arguments[..arguments.len().min(BYTES)]);
    *hasher.finalize().as_bytes().first_chunk().expect("a hash has 32 bytes")
}

impl Session {
    async fn look<A: Xdr, T: Xdr, F: Xdr + Default>(
        &self,
        xid: u32,
        from: Reader,
        call: impl AsyncFnOnce(&Session, A) -> Reply<T, F>,
    ) -> Pieces {
        let Some(arguments) = whole(from) else {
            return Refusal::Arguments.reply(xid).into_pieces();
        };
        let outcome = tokio::time::timeout(self.service.limit, call(self, arguments)).await;
        reply(
            xid,
            &match outcome {
                Err(_) => Err((Status::Jukebox, F::default())),
                // The file system gave up sooner.
                Ok(Err((Status::ServerFault, failed))) => Err((Status::Jukebox, failed)),
                Ok(outcome) => outcome,
            },
        )
    }

    /// Makes a change. Of one that the file system has given up, and may have made, the client is told `unsure`: to try again,
    /// where that does no harm.
    async fn change<A: Xdr, T: Xdr, F: Xdr + Default>(
        &self,
        xid: u32,
        from: Reader,
        call: impl AsyncFnOnce(&Session, A) -> Reply<T, F>,
        unsure: Status,
    ) -> Pieces {
        let Some(arguments) = whole(from) else {
            return Refusal::Arguments.reply(xid).into_pieces();
        };
        reply(
            xid,
            &match call(self, arguments).await {
                Err((Status::ServerFault, failed)) => Err((unsure, failed)),
                outcome => outcome,
            },
        )
    }
}

fn whole<A: Xdr>(mut from: Reader) -> Option<A> {
    let arguments = from.take().ok()?;
    from.end().ok()?;
    Some(arguments)
}

fn reply<T: Xdr, F: Xdr>(xid: u32, outcome: &Reply<T, F>) -> Pieces {
    let mut writer: Writer = accepted(xid);
    writer.put(outcome);
    writer.into_pieces()
}
