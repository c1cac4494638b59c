//! NFS over the file system in memory, by a client that is only a codec.

mod changes;
mod files;
mod listing;
mod peer;
mod permissions;
mod server;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use atoll_env::TokioRuntime;
use atoll_gateway::nfs::nfs3::{
    self, CreateHow, Created, DirOp, FileHandle, LookupOk, Name, Procedure, Reply, SetAttributes,
    SetTime, Status, WccData,
};
use atoll_gateway::nfs::rpc::{AuthSys, Call, OpaqueAuth};
use atoll_gateway::nfs::xdr::{List, Opaque, Reader, Writer, Xdr};
use atoll_gateway::nfs::{Export, HandleKey, Options, Service, Squash};
use atoll_vfs::FileSystem;
use atoll_vfs::memory::MemoryFs;
use bytes::Bytes;

pub(crate) const ROOT: u32 = 0;
pub(crate) const ALICE: u32 = 1000;
pub(crate) const BOB: u32 = 1001;

/// Another restart's verifier.
pub(crate) fn options(verifier: u64) -> Options {
    Options { key: HandleKey::new([7; 32]), verifier, limit: Duration::from_secs(10) }
}

pub(crate) fn memory() -> Arc<MemoryFs> {
    Arc::new(MemoryFs::new(Arc::new(TokioRuntime::current())).only_view())
}

/// Serves `fs` as `/x`, believing root.
pub(crate) fn serve(fs: Arc<dyn FileSystem>) -> Arc<Service> {
    let service = Service::new(options(1));
    service.add(Export { squash: Squash::None, ..Export::local("/x", 9, fs) });
    service
}

/// A user of a client machine.
pub(crate) struct Client {
    pub(crate) service: Arc<Service>,
    pub(crate) uid: u32,
    pub(crate) address: SocketAddr,
    xids: AtomicU32,
}

impl Client {
    pub(crate) fn new(service: &Arc<Service>, uid: u32) -> Client {
        let address = SocketAddr::from(([127, 0, 0, 1], 999));
        Client { service: service.clone(), uid, address, xids: AtomicU32::new(uid << 16) }
    }

    /// The record of a call.
    pub(crate) fn record<A: Xdr>(
        &self,
        xid: u32,
        program: (u32, u32),
        procedure: u32,
        arguments: &A,
    ) -> Bytes {
        let sys = AuthSys {
            stamp: 0,
            machine: Opaque::from(&b"client"[..]),
            uid: self.uid,
            gid: self.uid,
            gids: List(vec![]),
        };
        let mut body = Writer::default();
        body.put(&sys);
        let mut call = Writer::default();
        call.put(&xid).put(&0u32).put(&2u32).put(&program.0).put(&program.1).put(&procedure);
        call.put(&OpaqueAuth { flavor: 1, body: Opaque(body.into_bytes()) });
        call.put(&OpaqueAuth { flavor: 0, body: Opaque::default() });
        call.put(arguments);
        call.into_bytes()
    }

    /// What the service says to a record.
    pub(crate) async fn send(&self, record: Bytes) -> Reader {
        let call = Call::read(record).expect("a call").expect("one that is made");
        let pieces = self.service.answer(self.address, call).await.expect("a reply");
        let mut reply = Reader::new(Bytes::from(pieces.concat()));
        let head: [u32; 6] = std::array::from_fn(|_| reply.take().unwrap());
        assert_eq!(head[1..], [1, 0, 0, 0, 0], "accepted, and the arguments were read");
        reply
    }

    /// Makes a call; with the same number it is a retransmission.
    pub(crate) async fn call_as<A: Xdr, R: Xdr>(
        &self,
        xid: u32,
        procedure: Procedure,
        arguments: &A,
    ) -> R {
        let mut reply = self.send(self.record(xid, nfs3::NFS, procedure as u32, arguments)).await;
        let value = reply.take().expect("a reply of this procedure");
        reply.end().expect("nothing after it");
        value
    }

    pub(crate) async fn call<A: Xdr, R: Xdr>(&self, procedure: Procedure, arguments: &A) -> R {
        self.call_as(self.xids.fetch_add(1, Ordering::Relaxed), procedure, arguments).await
    }

    /// The handle of a path, by the mount protocol; or its status.
    pub(crate) async fn mount(&self, path: &str) -> Result<FileHandle, u32> {
        let path = Opaque::<1024>::from(path.as_bytes());
        let mut reply = self.send(self.record(0, nfs3::MOUNT, 1, &path)).await;
        match reply.take::<u32>().unwrap() {
            0 => Ok(reply.take().unwrap()),
            status => Err(status),
        }
    }

    pub(crate) async fn lookup(&self, dir: &FileHandle, name: &str) -> Result<LookupOk, Status> {
        let found: Reply<LookupOk, Option<nfs3::Attributes>> =
            self.call(Procedure::Lookup, &at(dir, name)).await;
        found.map_err(|(status, _)| status)
    }

    pub(crate) async fn create(
        &self,
        dir: &FileHandle,
        name: &str,
        mode: u32,
    ) -> Result<FileHandle, Status> {
        let how = CreateHow::Guarded(SetAttributes { mode: Some(mode), ..unchanged() });
        let args = nfs3::CreateArgs { at: at(dir, name), how };
        let made: Reply<Created, WccData> = self.call(Procedure::Create, &args).await;
        made.map(|made| made.object.unwrap()).map_err(|(status, _)| status)
    }

    pub(crate) async fn mkdir(
        &self,
        dir: &FileHandle,
        name: &str,
        mode: u32,
    ) -> Result<FileHandle, Status> {
        let attributes = SetAttributes { mode: Some(mode), ..unchanged() };
        let args = nfs3::MkDirArgs { at: at(dir, name), attributes };
        let made: Reply<Created, WccData> = self.call(Procedure::MkDir, &args).await;
        made.map(|made| made.object.unwrap()).map_err(|(status, _)| status)
    }

    pub(crate) async fn remove(&self, dir: &FileHandle, name: &str) -> Result<WccData, Status> {
        let removed: Reply<WccData, WccData> = self.call(Procedure::Remove, &at(dir, name)).await;
        removed.map_err(|(status, _)| status)
    }

    pub(crate) async fn getattr(&self, file: &FileHandle) -> Result<nfs3::Attributes, Status> {
        let found: Reply<nfs3::Attributes, ()> = self.call(Procedure::GetAttr, file).await;
        found.map_err(|(status, ())| status)
    }

    pub(crate) async fn setattr(
        &self,
        file: &FileHandle,
        changes: SetAttributes,
    ) -> Result<WccData, Status> {
        let args = nfs3::SetAttrArgs { object: file.clone(), changes, guard: None };
        let set: Reply<WccData, WccData> = self.call(Procedure::SetAttr, &args).await;
        set.map_err(|(status, _)| status)
    }

    pub(crate) async fn write(
        &self,
        file: &FileHandle,
        offset: u64,
        data: &[u8],
        stable: nfs3::Stable,
    ) -> Result<nfs3::WriteOk, Status> {
        let count = u32::try_from(data.len()).unwrap();
        let args =
            nfs3::WriteArgs { file: file.clone(), offset, count, stable, data: Opaque::from(data) };
        let written: Reply<nfs3::WriteOk, WccData> = self.call(Procedure::Write, &args).await;
        written.map_err(|(status, _)| status)
    }

    pub(crate) async fn read(
        &self,
        file: &FileHandle,
        offset: u64,
        count: u32,
    ) -> Result<nfs3::ReadOk, Status> {
        let args = nfs3::ReadArgs { file: file.clone(), offset, count };
        let read: Reply<nfs3::ReadOk, Option<nfs3::Attributes>> =
            self.call(Procedure::Read, &args).await;
        read.map_err(|(status, _)| status)
    }

    pub(crate) async fn commit(&self, file: &FileHandle) -> Result<nfs3::CommitOk, Status> {
        let args = nfs3::CommitArgs { file: file.clone(), offset: 0, count: 0 };
        let done: Reply<nfs3::CommitOk, WccData> = self.call(Procedure::Commit, &args).await;
        done.map_err(|(status, _)| status)
    }
}

pub(crate) fn at(dir: &FileHandle, name: &str) -> DirOp {
    DirOp { dir: dir.clone(), name: Name::from(name.as_bytes()) }
}

pub(crate) fn unchanged() -> SetAttributes {
    SetAttributes {
        mode: None,
        uid: None,
        gid: None,
        size: None,
        atime: SetTime::Leave,
        mtime: SetTime::Leave,
    }
}
