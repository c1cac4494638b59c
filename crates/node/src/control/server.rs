//! The node's side of the control socket: dispatches each call to the handler that a subsystem
//! has registered for it.
//!
//! Only the node's owner can open the socket, so nothing is authorised here; but every request
//! is checked like bytes from anywhere.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::Arc;

use atoll_env::BoxFuture;
use atoll_net::{Peer, Refusal, Reply, Request, Service};

use super::body::Body;
use super::calls::{CallError, ControlCall, TABLE};
use super::message::{self, Answer};

/// What a handler resolves to: the reply or the operation's own error; or a refusal, if the
/// request breaks the protocol or the node itself fails.
pub(crate) type Handled<C> =
    Result<Result<<C as ControlCall>::Reply, <C as ControlCall>::Error>, Refusal>;

type Handler = Arc<dyn Fn(Request) -> BoxFuture<'static, Result<Reply, Refusal>> + Send + Sync>;

/// The handlers of the control calls.
#[derive(Default)]
pub struct Calls {
    handlers: BTreeMap<u16, Handler>,
    /// Numbers that subsystems made outside this crate have taken.
    pub(super) ranges: Vec<RangeInclusive<u16>>,
}

impl Calls {
    /// Registers the handler of `C`.
    pub(crate) fn on<C: ControlCall>(
        &mut self,
        handler: impl Fn(C::Request) -> BoxFuture<'static, Handled<C>> + Send + Sync + 'static,
    ) {
        self.insert::<C::Request, C::Reply, C::Error>(C::ROW.number, C::ROW.name, handler);
    }

    /// Registers the handler of a call, which is given requests that could be decoded.
    pub(super) fn insert<Q: Body, R: Body, E: CallError>(
        &mut self,
        number: u16,
        name: &str,
        handler: impl Fn(Q) -> BoxFuture<'static, Result<Result<R, E>, Refusal>> + Send + Sync + 'static,
    ) {
        let handle: Handler = Arc::new(move |request| match decode::<Q>(request) {
            Ok(request) => {
                let handled = handler(request);
                Box::pin(async move { encode::<R, E>(handled.await?) })
            }
            Err(refusal) => Box::pin(std::future::ready(Err(refusal))),
        });
        let before = self.handlers.insert(number, handle);
        assert!(before.is_none(), "{name} has one handler");
    }

    /// Registers a handler of `C` that may wait for the disk: it runs on a thread of its own.
    pub(crate) fn on_blocking<C: ControlCall>(
        &mut self,
        handler: impl Fn(C::Request) -> Result<C::Reply, C::Error> + Send + Sync + 'static,
    ) {
        let handler = Arc::new(handler);
        self.on::<C>(move |request| {
            let handler = handler.clone();
            Box::pin(off_thread(move || handler(request)))
        });
    }

    /// These handlers, which answer every call of the table.
    ///
    /// # Panics
    /// If no subsystem has registered a handler of some call.
    pub(crate) fn complete(self) -> Calls {
        for row in TABLE {
            assert!(self.handlers.contains_key(&row.number), "{} has no handler", row.name);
        }
        self
    }
}

impl Service for Calls {
    fn handle(&self, _: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        match self.handlers.get(&request.method) {
            Some(handler) => handler(request),
            None => {
                let method = request.method;
                let text = format!("method {method:#06x} is not known to this version of the node");
                Box::pin(async move { Err(Refusal::new(Refusal::UNKNOWN_METHOD, text)) })
            }
        }
    }
}

fn decode<Q: Body>(request: Request) -> Result<Q, Refusal> {
    Q::join(message::decode(&request.header)?, request.parts)
}

fn encode<R: Body, E: CallError>(handled: Result<R, E>) -> Result<Reply, Refusal> {
    let (answer, parts) = match handled {
        Ok(reply) => {
            let (header, parts) = reply.split()?;
            (Answer::Done(header), parts)
        }
        Err(error) => (Answer::Failed(error), Vec::new()),
    };
    Ok(Reply { header: message::encode(&answer), parts })
}

/// Runs `work` on a thread that may wait for the disk.
pub(crate) async fn off_thread<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Refusal> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|_| Refusal::new(Refusal::INTERNAL, "the node is stopping, or failed here"))
}

#[cfg(test)]
mod tests {
    use atoll_dht::{GetError, MemoryBlocks, NewBlock, PutError, Wanted};
    use atoll_env::{Env, TokioRuntime};
    use atoll_key::{BlockHash, InvalidBlock, SecretKey, SignedBlock};
    use atoll_net::LOCAL_CALLER;
    use bytes::Bytes;

    use super::*;
    use crate::blocks::block_calls;
    use crate::control::blocks::{self, BlockList, Outcomes, WireId};
    use crate::control::calls::{
        Get, KeepAdding, KeepCommitting, Put, Renew, VolumeImport, VolumeOpen, VolumeUnpublish,
    };
    use crate::control::message::{Empty, GetFailed, Never};
    use crate::control::volume_error::VolumeError;
    use crate::dir::NodeDir;
    use crate::subsystem::Subsystem;
    use crate::volumes::{PublishedVolumes, Volumes};

    struct Scene {
        calls: Calls,
        volumes: Arc<Volumes>,
        _temp: tempfile::TempDir,
    }

    /// The calls for blocks, over memory, and for volumes.
    fn scene() -> Scene {
        let temp = tempfile::tempdir().expect("temp");
        let dir = NodeDir::at(temp.path());
        dir.prepare().expect("fresh");
        let env: Env = Arc::new(TokioRuntime::current());
        let blocks = Arc::new(MemoryBlocks::new());
        let volumes = Arc::new(Volumes::open(&dir).expect("open"));
        let lease = std::time::Duration::from_secs(1000);
        let published = PublishedVolumes::new(env, blocks.clone(), volumes.clone(), lease, None);
        let mut calls = Calls::default();
        block_calls(blocks, &mut calls);
        Arc::new(published).control_calls(&mut calls);
        Scene { calls, volumes, _temp: temp }
    }

    async fn call<C: ControlCall>(
        scene: &Scene,
        header: impl Into<Bytes>,
        parts: &[Bytes],
    ) -> Result<Reply, Refusal> {
        send(scene, C::ROW.number, header.into(), parts).await
    }

    async fn send(
        scene: &Scene,
        method: u16,
        header: Bytes,
        parts: &[Bytes],
    ) -> Result<Reply, Refusal> {
        let request = Request { method, header, parts: parts.to_vec() };
        scene.calls.handle(LOCAL_CALLER, request).await
    }

    #[tokio::test]
    async fn bad_calls_are_refused_and_nothing_else_happens() {
        let scene = scene();
        let empty = || message::encode(&Empty {});
        let part = Bytes::from_static(b"block");
        let id = BlockHash::of(b"block").id();
        let names = |count: usize| {
            let block = NewBlock { id, bytes: part.clone(), lease_secs: None };
            message::encode(&BlockList(vec![block; count]).split().expect("no error").0)
        };
        let renewal = |count| {
            // Two lists in one: a sender of our own cannot make one that is too long.
            let ids = vec![message::encode(&WireId::from(id)); count].concat();
            let head = [&b"\xa2\x00\x99"[..], &u16::try_from(count).expect("few").to_be_bytes()];
            Bytes::from([&head.concat()[..], &ids, b"\x02\xf4"].concat())
        };
        let open = |source: Option<&[u8]>| {
            message::encode(&message::OpenVolume {
                name: "docs".into(),
                source: source.map(<[u8]>::to_vec),
            })
        };
        let add =
            message::encode(&message::KeepAdd { volume: "docs".into(), session: 1, offset: 0 });
        const NO_KEY: &[u8] = b"\xa1\x00\xa1\x00\x01";
        let unknown =
            Bytes::from([&b"\xa1\x00\xa2\x00\x18\x4d\x01\x58\x40"[..], &[0; 64]].concat());
        let cases: Vec<(&str, u16, Bytes, Vec<Bytes>)> = vec![
            ("no such method", 0x03ff, empty(), vec![]),
            ("no header", VolumeUnpublish::ROW.number, Bytes::new(), vec![]),
            ("garbage", Get::ROW.number, Bytes::from_static(&[0xff; 40]), vec![]),
            ("a name without a key", Get::ROW.number, Bytes::from_static(NO_KEY), vec![]),
            ("a kind that nobody knows", Get::ROW.number, unknown, vec![]),
            ("more names than blocks", Put::ROW.number, names(2), vec![part.clone()]),
            ("more blocks than names", Put::ROW.number, names(1), vec![part.clone(), part.clone()]),
            ("too many to renew", Renew::ROW.number, renewal(1025), vec![]),
            ("a relative source", VolumeOpen::ROW.number, open(Some(b"docs")), vec![]),
            ("an import without a key", VolumeImport::ROW.number, open(None), vec![]),
            (
                "part of a hash to keep",
                KeepAdding::ROW.number,
                add,
                vec![Bytes::from_static(&[0; 40])],
            ),
        ];
        for (what, method, header, parts) in cases {
            let refusal = send(&scene, method, header, &parts).await.expect_err(what);
            let unknown = method == 0x03ff;
            let code = if unknown { Refusal::UNKNOWN_METHOD } else { Refusal::MALFORMED };
            assert_eq!(refusal.code, code, "{what}: {refusal}");
        }
        assert_eq!(scene.volumes.names().expect("list"), Vec::<String>::new());
    }

    #[tokio::test]
    async fn blocks_that_are_not_what_they_say_are_the_operations_own_error() {
        let scene = scene();
        let block = |id| NewBlock { id, bytes: Bytes::from(vec![b'A'; 200]), lease_secs: None };
        let root = SignedBlock::sign(&SecretKey::from_seed(&[9; 32]), b"", 1, b"");
        let wrong = vec![block(BlockHash([7; 32]).id()), block(root.id())];
        let (header, parts) = BlockList(wrong).split().expect("no error");
        let reply = call::<Put>(&scene, message::encode(&header), &parts).await.expect("answered");
        let answer: Answer<Outcomes, Never> = message::decode(&reply.header).expect("decodes");
        let Answer::Done(outcomes) = answer;
        let errors = [InvalidBlock::WrongHash, InvalidBlock::Malformed("no magic")];
        let errors = errors.map(|error| Err(PutError::Invalid(error)));
        assert_eq!(outcomes.put(2), Ok(errors.to_vec()));
    }

    #[tokio::test]
    async fn what_was_put_is_got_without_a_copy() {
        let scene = scene();
        let bytes = Bytes::from(vec![5; 10_000]);
        let hash = BlockHash::of(&bytes);
        let list = BlockList(vec![(hash, bytes.clone()).into()]);
        let (header, parts) = list.split().expect("no error");
        call::<Put>(&scene, message::encode(&header), &parts).await.expect("put");
        let get = |hash: BlockHash| message::encode(&blocks::Get::new(hash.id(), Wanted::Newest));
        let reply = call::<Get>(&scene, get(hash), &[]).await.expect("get");
        assert_eq!(reply.parts[0].as_ptr(), bytes.as_ptr());

        let reply = call::<Get>(&scene, get(BlockHash([0; 32])), &[]).await.expect("answered");
        let answer: Answer<Empty, GetFailed> = message::decode(&reply.header).expect("decodes");
        let Answer::Failed(error) = answer else { panic!("there is no such block") };
        assert!(matches!(GetError::from(error), GetError::NotFound { .. }));
    }

    #[tokio::test]
    async fn a_manifest_is_only_committed_with_a_root_of_the_volume() {
        let scene = scene();
        let (key, _) = scene.volumes.open_or_create("docs", None, 1).expect("create");
        let commit = |count| {
            message::encode(&message::KeepCommit {
                volume: "docs".into(),
                session: 1,
                count,
                lease_secs: None,
            })
        };
        let stranger = SecretKey::from_seed(&[9; 32]);
        let wrong = [
            Bytes::from_static(b"no block"),
            SignedBlock::sign(&stranger, b"", 1, b"").bytes().clone(),
            SignedBlock::sign(&key, b"another name", 1, b"").bytes().clone(),
        ];
        for root in wrong {
            let reply = call::<KeepCommitting>(&scene, commit(0), &[root]).await;
            let answer: Answer<Empty, VolumeError> =
                message::decode(&reply.expect("answered").header).expect("decodes");
            assert!(matches!(answer, Answer::Failed(VolumeError::WrongRoot { .. })), "{answer:?}");
        }
        assert!(scene.volumes.manifest("docs").expect("open").is_none());
        let right = SignedBlock::sign(&key, b"", 1, b"").bytes().clone();
        for attempt in ["first", "repeated"] {
            let reply =
                call::<KeepCommitting>(&scene, commit(0), std::slice::from_ref(&right)).await;
            let answer: Answer<Empty, VolumeError> =
                message::decode(&reply.expect("answered").header).expect("decodes");
            assert_eq!(answer, Answer::Done(Empty {}), "{attempt}");
        }
        let older = SignedBlock::sign(&key, b"", 0, b"").bytes().clone();
        let reply = call::<KeepCommitting>(&scene, commit(0), &[older]).await;
        let answer: Answer<Empty, VolumeError> =
            message::decode(&reply.expect("answered").header).expect("decodes");
        assert_eq!(answer, Answer::Failed(VolumeError::Superseded { offered: 0, held: 1 }));
    }
}
