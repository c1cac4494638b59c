//! The mount protocol (RFC 1813, appendix I): the handle of an export's root, or of a directory below it.
//!
//! No answer depends on who has mounted what: a client that dies does not say so.

use std::net::SocketAddr;
use std::sync::Arc;

use atoll_vfs::{Errno, InodeNumber};

use super::exports::Export;
use super::nfs3::{FileHandle, MountProcedure};
use super::procedures::names;
use super::replies::Pieces;
use super::rpc::{Call, Refusal, accepted};
use super::service::{File, Service, Session};
use super::xdr::{Opaque, Reader};

/// The longest path (`MNTPATHLEN`).
const MAX_PATH_BYTES: usize = 1024;
/// Credentials that are taken.
const AUTH_SYS: u32 = 1;
/// `mountstat3`.
const OK: u32 = 0;
const NO_ENT: u32 = 2;
const IO: u32 = 5;
const ACCES: u32 = 13;
const NOT_DIR: u32 = 20;
const NAME_TOO_LONG: u32 = 63;

/// The reply to a call of the mount program.
pub(super) async fn answer(service: &Arc<Service>, client: SocketAddr, call: Call) -> Pieces {
    let xid = call.xid;
    let number = call.procedure.to_be_bytes();
    let procedure = Reader::new(bytes::Bytes::copy_from_slice(&number)).take::<MountProcedure>();
    let Ok(procedure) = procedure else { return Refusal::Procedure.reply(xid).into_pieces() };
    let mut reply = accepted(xid);
    match procedure {
        MountProcedure::Null => {}
        MountProcedure::UmntAll => service.clients.unmounted(client.ip(), None),
        MountProcedure::Umnt => {
            let mut from = call.arguments.clone();
            let Ok(Opaque(path)) = from.take::<Opaque<MAX_PATH_BYTES>>() else {
                return Refusal::Arguments.reply(xid).into_pieces();
            };
            service.clients.unmounted(client.ip(), Some(&path));
        }
        MountProcedure::Dump => {
            reply.put(&false);
        }
        MountProcedure::Export => {
            for export in
                service.exports().iter().filter(|export| export.admits_machine(client.ip()))
            {
                reply
                    .put(&true)
                    .put(&Opaque::<MAX_PATH_BYTES>::from(export.path.as_bytes()))
                    .put(&false);
            }
            reply.put(&false);
        }
        MountProcedure::Mnt => {
            let mut from = call.arguments.clone();
            let Ok(Opaque(path)) = from.take::<Opaque<MAX_PATH_BYTES>>() else {
                return Refusal::Arguments.reply(xid).into_pieces();
            };
            let session = Session { service: service.clone(), client, credential: call.credential };
            match root(&session, &path).await {
                Ok(handle) => {
                    service.clients.mounted(client.ip(), &path);
                    reply.put(&OK).put(&handle).put(&1u32).put(&AUTH_SYS);
                }
                Err(status) => {
                    reply.put(&status);
                }
            }
        }
    }
    reply.into_pieces()
}

async fn root(session: &Session, path: &[u8]) -> Result<FileHandle, u32> {
    let (export, below) = find(&session.service.exports(), path).ok_or(NO_ENT)?;
    if !export.admits(session.client.ip(), session.client.port()) {
        return Err(ACCES);
    }
    let caller = export.caller(&session.credential);
    let found = async {
        let handle = export.fs.handle_of(InodeNumber::ROOT).await?;
        let entry = export.fs.by_handle(caller, &handle).await?;
        let root = File::new(export.clone(), caller, entry.attr);
        names::walk(session, root, &below).await
    };
    found.await.map_err(|error| match error {
        Errno::ENOENT => NO_ENT,
        Errno::EACCES | Errno::EPERM => ACCES,
        Errno::ENOTDIR => NOT_DIR,
        Errno::ENAMETOOLONG => NAME_TOO_LONG,
        _ => IO,
    })
}

/// The export with the longest path that is the beginning of this one, and the rest.
fn find(exports: &[Arc<Export>], path: &[u8]) -> Option<(Arc<Export>, Vec<u8>)> {
    let below = |export: &Arc<Export>| {
        let rest = path.strip_prefix(export.path.trim_end_matches('/').as_bytes())?;
        let is_whole = rest.is_empty() || rest[0] == b'/';
        is_whole.then(|| (export.clone(), rest.to_vec()))
    };
    exports.iter().filter_map(below).min_by_key(|(_, rest)| rest.len())
}
