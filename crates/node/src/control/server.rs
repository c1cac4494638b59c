//! The node's side of the control socket.
//!
//! Whoever can open the socket is the node's owner, so nothing is authorised here; but
//! what arrives is still checked like bytes from anywhere.

use std::sync::Arc;
use std::time::Duration;

use atoll_dht::{Blocks, PutError};
use atoll_env::{BoxFuture, Env};
use atoll_key::{BlockHash, Key, PeerId, SecretKey, SignedBlock};
use atoll_net::{Peer, Refusal, Reply, Request, Service};
use bytes::Bytes;
use tokio::sync::watch;

use super::message::{self, Answer, Empty, GetFailed, Invited, PutFailed, ReadKeyWish};
use crate::contribution::{ContributionStatus, Policy};
use crate::status::{
    MemberList, NodeSettings, QuotaStatus, Reclaimed, Rotated, Status, VolumeStatus,
};
use crate::volumes::lease_renewer::LeaseRenewer;
use crate::volumes::{self, VolumeError, Volumes};

/// The most keys renewed by one call.
const MAX_RENEW: usize = 1024;

/// What the control socket can tell about the node. Called off the async threads; may
/// read the disk.
pub(crate) trait About: Send + Sync + 'static {
    fn status(&self) -> Status;
    fn volumes(&self) -> Vec<VolumeStatus>;
    fn invite(&self) -> Invited;
    /// Changes what can be set while the node runs; what holds then, or what is wrong.
    fn change_settings(&self, change: message::ChangeSettings) -> Result<NodeSettings, String>;
    /// Changes what publishers may use, and says what they do.
    fn quota(&self, change: message::ChangeQuota) -> Result<QuotaStatus, String>;
    /// Changes how disk is given, if a policy is named, or gives up a directory that is gone,
    /// and says what has become of it.
    fn contribute(
        &self,
        policy: Option<Policy>,
        abandon: bool,
    ) -> Result<ContributionStatus, String>;
    /// The members of the network that this node knows.
    fn members(&self) -> MemberList;
    /// Replaces the network's secret and removes nodes.
    fn rotate(
        &self,
        remove: Vec<PeerId>,
        overlap: Duration,
    ) -> BoxFuture<'static, Result<Rotated, String>>;
    /// Gives back some of the disk space that no block needs.
    fn reclaim(&self) -> BoxFuture<'static, Result<Reclaimed, String>>;
}

/// Answers the calls of the control socket.
#[derive(Clone)]
pub(crate) struct Control {
    pub env: Env,
    pub blocks: Arc<dyn Blocks>,
    pub volumes: Arc<Volumes>,
    pub about: Arc<dyn About>,
    pub renewer: Arc<LeaseRenewer>,
    /// Set when a client asks the node to stop.
    pub stop: watch::Sender<bool>,
}

impl Service for Control {
    fn handle(&self, _: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let control = self.clone();
        Box::pin(async move { control.answer(request).await })
    }
}

impl Control {
    async fn answer(self, request: Request) -> Result<Reply, Refusal> {
        match request.method {
            message::PING => bare(&request).map(|()| reply(&Empty {})),
            message::GET => self.get(request).await,
            message::GET_SIGNED => self.get_signed(request).await,
            message::PUT => self.put(request).await,
            message::PUT_SIGNED => self.put_signed(request).await,
            message::RENEW | message::RENEW_OR_LACK => self.renew(request).await,
            message::STATUS => {
                bare(&request)?;
                let about = self.about;
                json(&off_thread(move || about.status()).await?)
            }
            message::VOLUMES => {
                bare(&request)?;
                let about = self.about;
                json(&off_thread(move || about.volumes()).await?)
            }
            message::INVITE => {
                bare(&request)?;
                let about = self.about;
                Ok(reply(&off_thread(move || about.invite()).await?))
            }
            message::SHUTDOWN => {
                bare(&request)?;
                self.stop.send_replace(true);
                Ok(reply(&Empty {}))
            }
            message::VOLUME_OPEN | message::VOLUME_IMPORT | message::VOLUME_MOVE => {
                self.open_volume(request).await
            }
            message::QUOTA => {
                let change = message::decode(&request.header)?;
                let about = self.about.clone();
                let changed = off_thread(move || about.quota(change)).await?;
                json(&changed.map_err(unfit)?)
            }
            message::CONTRIBUTE => {
                let message::Contribute { policy, abandon } = message::decode(&request.header)?;
                let (about, abandon) = (self.about.clone(), abandon.unwrap_or_default());
                let policy = policy.map(Policy::from);
                let changed = off_thread(move || about.contribute(policy, abandon)).await?;
                json(&changed.map_err(unfit)?)
            }
            message::MEMBERS => {
                bare(&request)?;
                let about = self.about;
                json(&off_thread(move || about.members()).await?)
            }
            message::ROTATE => {
                let call: message::Rotate = message::decode(&request.header)?;
                let (keys, rest) = call.remove.as_chunks::<32>();
                if !rest.is_empty() {
                    return Err(malformed("part of a key"));
                }
                let remove = keys.iter().map(|key| PeerId(*key)).collect();
                let overlap = Duration::from_secs(call.overlap_secs);
                json(&self.about.rotate(remove, overlap).await.map_err(unfit)?)
            }
            message::RECLAIM => {
                bare(&request)?;
                let reclaimed = self.about.reclaim().await;
                json(&reclaimed.map_err(|why| Refusal::new(Refusal::INTERNAL, why))?)
            }
            message::VOLUME_UNPUBLISH => {
                let call: message::VolumeName = message::decode(&request.header)?;
                let done = off_thread(move || self.volumes.unpublish(&call.name)).await?;
                Ok(volume_reply(done.map(|()| Empty {})))
            }
            message::VOLUME_RENEW => self.renew_volume(request).await,
            message::SETTINGS => {
                let change = message::decode(&request.header)?;
                let about = self.about.clone();
                let changed = off_thread(move || about.change_settings(change)).await?;
                json(&changed.map_err(unfit)?)
            }
            message::VOLUME_READ_KEY => self.read_key(request).await,
            message::KEEP_ADD => self.keep_add(request).await,
            message::KEEP_COMMIT => self.keep_commit(request).await,
            method => {
                let text = format!("method {method:#06x} is not known to this version of the node");
                Err(Refusal::new(Refusal::UNKNOWN_METHOD, text))
            }
        }
    }

    async fn get(self, request: Request) -> Result<Reply, Refusal> {
        let call: message::Get = message::decode(&request.header)?;
        Ok(block_reply(self.blocks.get(BlockHash(call.hash)).await))
    }

    async fn get_signed(self, request: Request) -> Result<Reply, Refusal> {
        let call: message::GetSigned = message::decode(&request.header)?;
        let found = self.blocks.get_signed(Key(call.key)).await;
        Ok(block_reply(found.map(|block| block.bytes().clone())))
    }

    async fn put(self, request: Request) -> Result<Reply, Refusal> {
        let hashes = hashes(&request.header)?;
        if hashes.len() != request.parts.len() {
            let (hashes, parts) = (hashes.len(), request.parts.len());
            return Err(malformed(format!("{hashes} hashes for {parts} blocks")));
        }
        let blocks = hashes.into_iter().zip(request.parts).collect();
        Ok(put_reply(self.blocks.put(blocks).await))
    }

    async fn put_signed(self, request: Request) -> Result<Reply, Refusal> {
        let _: Empty = message::decode(&request.header)?;
        let [bytes] = one_part(request.parts)?;
        let stored = match SignedBlock::decode(&bytes) {
            Ok(block) => self.blocks.put_signed(block).await,
            Err(error) => Err(PutError::Invalid(error)),
        };
        Ok(put_reply(stored))
    }

    async fn renew(self, request: Request) -> Result<Reply, Refusal> {
        let hashes = hashes(&request.header)?;
        if hashes.len() > MAX_RENEW {
            return Err(malformed(format!("{} keys to renew at once", hashes.len())));
        }
        let lacking = match request.method {
            message::RENEW_OR_LACK => self.blocks.renew_or_lack(hashes).await,
            _ => self.blocks.renew(hashes).await,
        };
        let answer: Answer<message::Hashes, PutFailed> = lacking
            .map(|lacking| message::Hashes { hashes: message::join_hashes(lacking.iter()) })
            .map_err(PutFailed::from)
            .into();
        Ok(reply(&answer))
    }

    async fn open_volume(self, request: Request) -> Result<Reply, Refusal> {
        let call: message::OpenVolume = message::decode(&request.header)?;
        let source = call.source.map(volumes::path_from_bytes);
        if source.as_ref().is_some_and(|path| !path.is_absolute()) {
            return Err(malformed("the source is not an absolute path"));
        }
        let importing = request.method == message::VOLUME_IMPORT;
        if importing != call.seed.is_some() {
            return Err(malformed("a key belongs to an import and to nothing else"));
        }
        let moving = request.method == message::VOLUME_MOVE;
        if moving && source.is_none() {
            return Err(malformed("a move says where to"));
        }
        let now = self.now_unix_secs();
        let opened = off_thread(move || match call.seed {
            Some(seed) => {
                let key = SecretKey::from_seed(&seed);
                let is_new = self.volumes.import(&call.name, &key, source.as_deref(), now)?;
                Ok(message::OpenedVolume { seed, is_new })
            }
            None => {
                if let Some(source) = source.as_deref().filter(|_| moving) {
                    self.volumes.set_source(&call.name, source)?;
                }
                let (key, is_new) =
                    self.volumes.open_or_create(&call.name, source.as_deref(), now)?;
                Ok(message::OpenedVolume { seed: key.seed(), is_new })
            }
        });
        Ok(volume_reply(opened.await?))
    }

    async fn renew_volume(self, request: Request) -> Result<Reply, Refusal> {
        let call: message::VolumeName = message::decode(&request.header)?;
        let outcome = self.renewer.refresh(&call.name).await;
        let about = self.about.clone();
        let volumes = off_thread(move || about.volumes()).await?;
        let renewed = outcome.and_then(|_| {
            let found = volumes.into_iter().find(|volume| volume.name == call.name);
            found.ok_or(VolumeError::Unknown { name: call.name })
        });
        match renewed {
            Ok(volume) => {
                let json = json(&volume)?;
                let answer: Answer<Empty, VolumeError> = Answer::Done(Empty {});
                Ok(Reply { header: message::encode(&answer), ..json })
            }
            Err(error) => Ok(volume_reply::<Empty>(Err(error))),
        }
    }

    async fn read_key(self, request: Request) -> Result<Reply, Refusal> {
        let call: message::VolumeReadKey = message::decode(&request.header)?;
        let held = off_thread(move || match call.wish {
            ReadKeyWish::Tell => self.volumes.read_key(&call.volume),
            ReadKeyWish::Make => self.volumes.make_read_key(&call.volume).map(Some),
            ReadKeyWish::Forget => self.volumes.forget_read_key(&call.volume).map(|()| None),
        });
        let held = held.await?.map(|key| key.map(|key| *key.bytes()));
        Ok(volume_reply(held.map(|read_key| message::HeldReadKey { read_key })))
    }

    async fn keep_add(self, request: Request) -> Result<Reply, Refusal> {
        let call: message::KeepAdd = message::decode(&request.header)?;
        let [hashes] = one_part(request.parts)?;
        if hashes.len() % 32 != 0 {
            return Err(malformed("part of a hash"));
        }
        let added = off_thread(move || {
            self.volumes
                .keep_add(&call.volume, call.session, call.offset, &hashes)
                .map(|()| Empty {})
        });
        Ok(volume_reply(added.await?))
    }

    async fn keep_commit(self, request: Request) -> Result<Reply, Refusal> {
        let call: message::KeepCommit = message::decode(&request.header)?;
        let [root] = one_part(request.parts)?;
        let now = self.now_unix_secs();
        let kept = off_thread(move || {
            let root = SignedBlock::decode(&root)
                .map_err(|error| VolumeError::WrongRoot { why: error.to_string() })?;
            self.volumes
                .keep_commit(&call.volume, call.session, call.count, &root, now)
                .map(|()| Empty {})
        });
        Ok(volume_reply(kept.await?))
    }

    fn now_unix_secs(&self) -> u64 {
        self.env.unix_ms() / 1000
    }
}

/// Runs what may wait for the disk on a thread that may.
async fn off_thread<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Refusal> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|_| Refusal::new(Refusal::INTERNAL, "the node is stopping, or failed here"))
}

fn malformed(what: impl Into<String>) -> Refusal {
    Refusal::new(Refusal::MALFORMED, what)
}

fn unfit(why: String) -> Refusal {
    Refusal::new(message::UNFIT, why)
}

/// A call that carries nothing.
fn bare(request: &Request) -> Result<(), Refusal> {
    message::decode::<Empty>(&request.header).map(|_| ())
}

fn hashes(header: &[u8]) -> Result<Vec<BlockHash>, Refusal> {
    let call: message::Hashes = message::decode(header)?;
    message::split_hashes(&call.hashes).ok_or_else(|| malformed("part of a hash"))
}

fn one_part(parts: Vec<Bytes>) -> Result<[Bytes; 1], Refusal> {
    parts.try_into().map_err(|parts: Vec<_>| malformed(format!("{} parts, not one", parts.len())))
}

fn reply(header: &impl minicbor::Encode<()>) -> Reply {
    Reply { header: message::encode(header), parts: Vec::new() }
}

fn block_reply(found: Result<Bytes, atoll_dht::GetError>) -> Reply {
    let (answer, parts): (Answer<Empty, GetFailed>, _) = match found {
        Ok(bytes) => (Answer::Done(Empty {}), vec![bytes]),
        Err(error) => (Answer::Failed(error.into()), Vec::new()),
    };
    Reply { header: message::encode(&answer), parts }
}

fn put_reply(stored: Result<(), PutError>) -> Reply {
    let answer: Answer<Empty, PutFailed> =
        stored.map(|()| Empty {}).map_err(PutFailed::from).into();
    reply(&answer)
}

fn volume_reply<T: minicbor::Encode<()>>(result: Result<T, VolumeError>) -> Reply {
    reply(&Answer::from(result))
}

fn json(value: &impl serde::Serialize) -> Result<Reply, Refusal> {
    let json = serde_json::to_vec(value)
        .map_err(|error| Refusal::new(Refusal::INTERNAL, error.to_string()))?;
    Ok(Reply { header: message::encode(&Empty {}), parts: vec![json.into()] })
}

#[cfg(test)]
mod tests {
    use super::*;
    use atoll_dht::{GetError, MemoryBlocks};
    use atoll_env::TokioRuntime;
    use atoll_key::InvalidBlock;
    use atoll_net::LOCAL_CALLER;

    use crate::dir::NodeDir;

    struct Nothing;

    impl About for Nothing {
        fn status(&self) -> Status {
            Status { version: "test".into(), ..Status::default() }
        }
        fn volumes(&self) -> Vec<VolumeStatus> {
            Vec::new()
        }
        fn invite(&self) -> Invited {
            Invited { code: "code".into(), warning: None }
        }
        fn change_settings(&self, _: message::ChangeSettings) -> Result<NodeSettings, String> {
            Err("not here".into())
        }
        fn quota(&self, _: message::ChangeQuota) -> Result<QuotaStatus, String> {
            Err("not here".into())
        }
        fn reclaim(&self) -> BoxFuture<'static, Result<Reclaimed, String>> {
            Box::pin(std::future::ready(Err("not here".into())))
        }
        fn contribute(&self, _: Option<Policy>, _: bool) -> Result<ContributionStatus, String> {
            Err("not here".into())
        }
        fn members(&self) -> MemberList {
            MemberList::default()
        }
        fn rotate(
            &self,
            _: Vec<PeerId>,
            _: Duration,
        ) -> BoxFuture<'static, Result<Rotated, String>> {
            Box::pin(async { Err("not here".into()) })
        }
    }

    fn control() -> (Control, tempfile::TempDir) {
        let temp = tempfile::tempdir().expect("temp");
        let dir = NodeDir::at(temp.path());
        dir.prepare().expect("fresh");
        let env: Env = Arc::new(TokioRuntime::current());
        let blocks = Arc::new(MemoryBlocks::new());
        let volumes = Arc::new(Volumes::open(&dir).expect("open"));
        let lease = std::time::Duration::from_secs(1000);
        let renewer = LeaseRenewer::new(env.clone(), blocks.clone(), volumes.clone(), lease);
        let control = Control {
            env,
            blocks,
            volumes,
            renewer: Arc::new(renewer),
            about: Arc::new(Nothing),
            stop: watch::Sender::new(false),
        };
        (control, temp)
    }

    async fn call(
        control: &Control,
        method: u16,
        header: impl Into<Bytes>,
        parts: &[Bytes],
    ) -> Result<Reply, Refusal> {
        let request = Request { method, header: header.into(), parts: parts.to_vec() };
        control.handle(LOCAL_CALLER, request).await
    }

    #[tokio::test]
    async fn bad_calls_are_refused_and_nothing_else_happens() {
        let (control, _temp) = control();
        let empty = || message::encode(&Empty {});
        let part = Bytes::from_static(b"block");
        let hashes = |hashes: &[u8]| message::encode(&message::Hashes { hashes: hashes.to_vec() });
        let open = |source: Option<&[u8]>, seed| {
            message::encode(&message::OpenVolume {
                name: "docs".into(),
                source: source.map(<[u8]>::to_vec),
                seed,
            })
        };
        let add =
            message::encode(&message::KeepAdd { volume: "docs".into(), session: 1, offset: 0 });
        let cases: Vec<(&str, u16, Bytes, Vec<Bytes>)> = vec![
            ("no such method", 0x03ff, empty(), vec![]),
            ("no header", message::PING, Bytes::new(), vec![]),
            ("garbage", message::GET, Bytes::from_static(&[0xff; 40]), vec![]),
            (
                "a hash of 31 bytes",
                message::GET,
                Bytes::from([&b"\xa1\x00\x58\x1f"[..], &[0; 31]].concat()),
                vec![],
            ),
            (
                "a key of 32 bytes",
                message::GET_SIGNED,
                message::encode(&message::Get { hash: [0; 32] }),
                vec![],
            ),
            ("more hashes than blocks", message::PUT, hashes(&[0; 64]), vec![part.clone()]),
            (
                "more blocks than hashes",
                message::PUT,
                hashes(&[0; 32]),
                vec![part.clone(), part.clone()],
            ),
            ("part of a hash", message::PUT, hashes(&[0; 33]), vec![part.clone()]),
            ("no signed block", message::PUT_SIGNED, empty(), vec![]),
            ("two signed blocks", message::PUT_SIGNED, empty(), vec![part.clone(), part.clone()]),
            ("too many to renew", message::RENEW, hashes(&[0; 32 * 1025]), vec![]),
            ("a relative source", message::VOLUME_OPEN, open(Some(b"docs"), None), vec![]),
            ("a key where none belongs", message::VOLUME_OPEN, open(None, Some([1; 32])), vec![]),
            ("an import without a key", message::VOLUME_IMPORT, open(None, None), vec![]),
            ("part of a hash to keep", message::KEEP_ADD, add, vec![Bytes::from_static(&[0; 40])]),
        ];
        for (what, method, header, parts) in cases {
            let refusal = call(&control, method, header, &parts).await.expect_err(what);
            let unknown = method == 0x03ff;
            let code = if unknown { Refusal::UNKNOWN_METHOD } else { Refusal::MALFORMED };
            assert_eq!(refusal.code, code, "{what}: {refusal}");
        }
        assert_eq!(control.volumes.names().expect("list"), Vec::<String>::new());
        assert!(!*control.stop.borrow());
    }

    #[tokio::test]
    async fn blocks_that_are_not_what_they_say_are_the_operations_own_error() {
        let (control, _temp) = control();
        let header = message::encode(&message::Hashes { hashes: vec![7; 32] });
        let reply = call(&control, message::PUT, header, &[Bytes::from_static(b"x")]).await;
        let answer: Answer<Empty, PutFailed> =
            message::decode(&reply.expect("answered").header).expect("decodes");
        assert_eq!(answer, Answer::Failed(PutError::Invalid(InvalidBlock::WrongHash).into()));

        let forged = [Bytes::from(vec![b'A'; 200])];
        let reply = call(&control, message::PUT_SIGNED, message::encode(&Empty {}), &forged).await;
        let answer: Answer<Empty, PutFailed> =
            message::decode(&reply.expect("answered").header).expect("decodes");
        let error = PutError::Invalid(InvalidBlock::Malformed("no magic"));
        assert_eq!(answer, Answer::Failed(error.into()));
    }

    #[tokio::test]
    async fn what_was_put_is_got_without_a_copy() {
        let (control, _temp) = control();
        let bytes = Bytes::from(vec![5; 10_000]);
        let hash = BlockHash::of(&bytes);
        let header = message::encode(&message::Hashes { hashes: hash.0.to_vec() });
        call(&control, message::PUT, header, std::slice::from_ref(&bytes)).await.expect("put");
        let header = message::encode(&message::Get { hash: hash.0 });
        let reply = call(&control, message::GET, header, &[]).await.expect("get");
        assert_eq!(reply.parts[0].as_ptr(), bytes.as_ptr());

        let header = message::encode(&message::Get { hash: [0; 32] });
        let reply = call(&control, message::GET, header, &[]).await.expect("answered");
        let answer: Answer<Empty, GetFailed> = message::decode(&reply.header).expect("decodes");
        let Answer::Failed(error) = answer else { panic!("there is no such block") };
        assert!(matches!(GetError::from(error), GetError::NotFound { .. }));
    }

    #[tokio::test]
    async fn a_manifest_is_only_committed_with_a_root_of_the_volume() {
        let (control, _temp) = control();
        let (key, _) = control.volumes.open_or_create("docs", None, 1).expect("create");
        let commit = |count| {
            message::encode(&message::KeepCommit { volume: "docs".into(), session: 1, count })
        };
        let stranger = SecretKey::from_seed(&[9; 32]);
        let wrong = [
            Bytes::from_static(b"no block"),
            SignedBlock::sign(&stranger, b"", 1, b"").bytes().clone(),
            SignedBlock::sign(&key, b"another name", 1, b"").bytes().clone(),
        ];
        for root in wrong {
            let reply = call(&control, message::KEEP_COMMIT, commit(0), &[root]).await;
            let answer: Answer<Empty, VolumeError> =
                message::decode(&reply.expect("answered").header).expect("decodes");
            assert!(matches!(answer, Answer::Failed(VolumeError::WrongRoot { .. })), "{answer:?}");
        }
        assert!(control.volumes.manifest("docs").expect("open").is_none());
        let right = SignedBlock::sign(&key, b"", 1, b"").bytes().clone();
        for attempt in ["first", "repeated"] {
            let reply =
                call(&control, message::KEEP_COMMIT, commit(0), std::slice::from_ref(&right)).await;
            let answer: Answer<Empty, VolumeError> =
                message::decode(&reply.expect("answered").header).expect("decodes");
            assert_eq!(answer, Answer::Done(Empty {}), "{attempt}");
        }
        let older = SignedBlock::sign(&key, b"", 0, b"").bytes().clone();
        let reply = call(&control, message::KEEP_COMMIT, commit(0), &[older]).await;
        let answer: Answer<Empty, VolumeError> =
            message::decode(&reply.expect("answered").header).expect("decodes");
        assert_eq!(answer, Answer::Failed(VolumeError::Superseded { offered: 0, held: 1 }));
    }
}
