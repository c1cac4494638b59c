//! The local node, as commands and mounts see it (CFS §6.3: the client layer asks the
//! DHash server of its own machine).
//!
//! A [`Client`] speaks the control protocol over the socket in the node's directory. It
//! is [`Blocks`], so file systems run on it as they would inside the node; it checks
//! what it gets, so not even its own node can hand it wrong bytes. With
//! [`ClientOptions::patience`] its calls wait for a node that is being restarted, as
//! mounts need; without, they fail at once and say how to start one.

mod blocks;
mod keep;
mod membership;
mod secrets;

pub use self::keep::Keep;

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use atoll_dht::Share;
use atoll_key::{ReadKey, SecretKey};
use atoll_net::{CallError, Refusal, Reply, Request, UnixClient, WhenAbsent};
use bytes::Bytes;

use crate::config::VirtualServers;
use crate::control::body::{Block, Body, Json, WithPart};
use crate::control::calls::{self, CallError as OwnError, ControlCall};
use crate::control::message::{self, Answer, Empty, Never, OpenVolume, OpenedVolume, Unfit};
use crate::control::volume_error::VolumeError;
use crate::dir::{self, DirError, NodeDir, SocketAddress};
use crate::join_code::JoinCode;
use crate::policy::Policy;
use crate::shell_word::shell_word;
use crate::status::{
    ContributionStatus, NodeSettings, QuotaStatus, Reclaimed, RingCount, Status, VolumeStatus,
};
use crate::volumes;

/// How long a call may take unless told otherwise: longer than the node's own deadlines,
/// so that its explanation arrives.
pub const DEFAULT_LIMIT: Duration = Duration::from_secs(120);

/// How a client behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientOptions {
    /// How long a call may take.
    pub limit: Duration,
    /// How long calls may wait for a node that does not run, from when it was first missed.
    /// Calls under way when the node stops are repeated when it is back.
    pub patience: Duration,
    /// A node that says nothing for this long counts as one that does not run.
    pub gone_when_silent_for: Option<Duration>,
}

impl Default for ClientOptions {
    fn default() -> Self {
        ClientOptions { limit: DEFAULT_LIMIT, patience: Duration::ZERO, gone_when_silent_for: None }
    }
}

/// Why the local node did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No node runs in the directory.
    #[error(
        "no node runs in {}; start one with: atoll up --dir {}",
        dir.display(),
        shell_word(&dir.display().to_string())
    )]
    NoNode {
        /// The directory.
        dir: PathBuf,
    },
    /// The directory or its socket cannot be used.
    #[error(transparent)]
    Dir(#[from] DirError),
    /// The node did not answer in time.
    #[error("the node in {dir} did not answer in time", dir = dir.display())]
    TimedOut {
        /// The directory.
        dir: PathBuf,
    },
    /// The node refused, or it answered what this program does not understand: they may
    /// be of different versions.
    #[error("the node in {dir} did not understand or refused: {reason}", dir = dir.display())]
    Refused {
        /// The directory.
        dir: PathBuf,
        /// What was said.
        reason: String,
    },
    /// A subsystem that was made outside this crate has not done what was asked: why.
    #[error("{0}")]
    Subsystem(String),
    /// A setting does not fit the node.
    #[error("{0}")]
    Unfit(String),
    /// Something about a volume.
    #[error(transparent)]
    Volume(#[from] VolumeError),
}

impl From<Unfit> for ClientError {
    fn from(Unfit::Unfit(why): Unfit) -> ClientError {
        ClientError::Unfit(why)
    }
}

impl From<Never> for ClientError {
    fn from(never: Never) -> ClientError {
        match never {}
    }
}

/// What to change of a running node's settings; `None` leaves it as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SettingsChange {
    /// How many ring positions to have.
    pub virtual_servers: Option<VirtualServers>,
    /// What blocks cached for others may take, bytes; 0 for no cache.
    pub cache_bytes: Option<u64>,
}

/// What to change of what publishers may use; `None` leaves it as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QuotaChange {
    /// The share of one publishing node.
    pub key_share: Option<QuotaShare>,
    /// The share of one address.
    pub address_share: Option<QuotaShare>,
    /// How many nodes' worth of storage a publisher may use in the whole network.
    pub publisher_nodes: Option<u32>,
    /// The least share, however large the network is.
    pub floor_share: Option<Share>,
}

/// A share of a node's storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuotaShare {
    /// It follows the network's size.
    Automatic,
    /// It is this.
    Fixed(Share),
}

/// A join code and what its giver should know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invitation {
    /// To be given to those who join, in confidence.
    pub code: JoinCode,
    /// E.g. that only this machine can reach the node.
    pub warning: Option<String>,
}

/// A volume published from this node.
#[derive(Clone, Debug)]
pub struct Volume {
    /// Its name on this node.
    pub name: String,
    /// What its roots are signed with.
    pub key: SecretKey,
    /// Whether it was made by this call.
    pub is_new: bool,
    /// How long its blocks are kept at a time; `None` for as long as the network keeps blocks.
    pub lease: Option<Duration>,
}

/// The local node. Cloning is cheap and shares the connection.
#[derive(Clone)]
pub struct Client {
    inner: Arc<Inner>,
}

struct Inner {
    dir: PathBuf,
    options: ClientOptions,
    socket: UnixClient,
    /// Keeps the socket's path valid where it goes through a handle.
    _address: SocketAddress,
}

/// A volume's name, by default its directory's, and the directory's absolute path.
fn named(name: Option<&str>, source: &Path) -> Result<(String, PathBuf), ClientError> {
    let source = std::fs::canonicalize(source).map_err(DirError::io("cannot find", source))?;
    let name = match name {
        Some(name) => name.to_owned(),
        None => volumes::name_of(&source)?,
    };
    Ok((name, source))
}

impl Client {
    /// A client of the node in `dir`, which must be running.
    pub async fn connect(dir: impl AsRef<Path>) -> Result<Client, ClientError> {
        Client::connect_with(dir, ClientOptions::default()).await
    }

    /// A client of the node in `dir`; the node may be waited for, see [`ClientOptions`].
    pub async fn connect_with(
        dir: impl AsRef<Path>,
        options: ClientOptions,
    ) -> Result<Client, ClientError> {
        let dir =
            std::path::absolute(dir.as_ref()).map_err(DirError::io("cannot find", dir.as_ref()))?;
        let no_node = || ClientError::NoNode { dir: dir.clone() };
        let address = match NodeDir::at(&dir).socket_address() {
            Err(DirError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                return Err(no_node());
            }
            other => other?,
        };
        let socket = UnixClient::new(address.path());
        let socket = match options.gone_when_silent_for {
            Some(limit) => socket.gone_when_silent_for(limit),
            None => socket,
        };
        let inner = Inner { dir, options, socket, _address: address };
        let client = Client { inner: Arc::new(inner) };
        client.ask::<calls::Ping>(Empty {}).await?;
        Ok(client)
    }

    /// The node's directory.
    pub fn dir(&self) -> &Path {
        &self.inner.dir
    }

    /// The node's state.
    pub async fn status(&self) -> Result<Status, ClientError> {
        self.ask::<calls::NodeStatus>(Empty {}).await.map(|Json(status)| status)
    }

    /// How many nodes the ring has, by walking around it.
    ///
    /// # Errors
    /// If the walk cannot go on.
    pub async fn count_nodes(&self) -> Result<RingCount, ClientError> {
        self.ask::<calls::CountNodes>(Empty {}).await.map(|Json(count)| count)
    }

    /// The volumes published from here.
    pub async fn volumes(&self) -> Result<Vec<VolumeStatus>, ClientError> {
        self.ask::<calls::Volumes>(Empty {}).await.map(|Json(volumes)| volumes)
    }

    /// A join code for the node's network.
    pub async fn invite(&self) -> Result<Invitation, ClientError> {
        let invited = self.ask::<calls::Invite>(Empty {}).await?;
        let code = JoinCode::from_str(&invited.code)
            .map_err(|error| self.inner.confused(error.to_string()))?;
        Ok(Invitation { code, warning: invited.warning })
    }

    /// Has the node leave the ring and stop; resolves when it has begun to.
    pub async fn shutdown(&self) -> Result<(), ClientError> {
        self.ask::<calls::Shutdown>(Empty {}).await.map(drop)
    }

    /// The volume that `source` is published as: `name`, or the directory's own name.
    /// Made, with a new key, if there is none; an error if the name belongs to another
    /// directory.
    pub async fn volume(&self, name: Option<&str>, source: &Path) -> Result<Volume, ClientError> {
        let (name, source) = named(name, source)?;
        self.open_volume::<calls::VolumeOpen>(name, Some(&source)).await
    }

    /// As [`Client::volume`], for a volume whose directory has moved to `source`. It must
    /// be there.
    pub async fn moved_volume(
        &self,
        name: Option<&str>,
        source: &Path,
    ) -> Result<Volume, ClientError> {
        let (name, source) = named(name, source)?;
        self.open_volume::<calls::SourceMove>(name, Some(&source)).await
    }

    /// The volume `name`, which need not be published from a directory; made if there
    /// is none.
    pub async fn named_volume(&self, name: &str) -> Result<Volume, ClientError> {
        self.open_volume::<calls::VolumeOpen>(name.to_owned(), None).await
    }

    /// Renews the leases of a published volume's blocks now; its state then.
    ///
    /// # Errors
    /// If there is no such volume or the node fails. That the ring did not answer is in
    /// the state's `trouble`.
    pub async fn renew_volume(&self, name: &str) -> Result<VolumeStatus, ClientError> {
        let call = message::VolumeName { name: name.to_owned() };
        self.ask::<calls::VolumeRenew>(call).await.map(|Json(volume)| volume)
    }

    /// Stops keeping a published volume alive. Its key stays.
    ///
    /// # Errors
    /// If there is no such volume, or nothing has been published under that name.
    pub async fn unpublish_volume(&self, name: &str) -> Result<(), ClientError> {
        let call = message::VolumeName { name: name.to_owned() };
        self.ask::<calls::VolumeUnpublish>(call).await.map(drop)
    }

    /// What can be set while the node runs.
    pub async fn settings(&self) -> Result<NodeSettings, ClientError> {
        self.ask::<calls::ShowSettings>(Empty {}).await.map(|Json(settings)| settings)
    }

    /// Changes what can be set while the node runs; the settings after that.
    ///
    /// # Errors
    /// If the node refuses the change.
    pub async fn change_settings(
        &self,
        change: SettingsChange,
    ) -> Result<NodeSettings, ClientError> {
        let call = message::ChangeSettings {
            virtual_servers: change.virtual_servers.map(|v| match v {
                VirtualServers::Auto => 0,
                VirtualServers::Count(count) => count,
            }),
            cache_bytes: change.cache_bytes,
        };
        self.ask::<calls::SetSettings>(call).await.map(|Json(settings)| settings)
    }

    /// Has the node treat the nodes and updates that are absent now as gone for good.
    ///
    /// # Errors
    /// If the node cannot write that down.
    pub async fn forget_absent(&self) -> Result<(), ClientError> {
        self.ask::<calls::ForgetAbsent>(Empty {}).await.map(drop)
    }

    /// The read key of a volume published from here, if it is encrypted.
    pub async fn read_key(&self, volume: &str) -> Result<Option<ReadKey>, ClientError> {
        let call = message::VolumeName { name: volume.to_owned() };
        let held = self.ask::<calls::ReadKey>(call).await?;
        Ok(held.read_key.map(ReadKey::from_bytes))
    }

    /// The same, made from the system's randomness unless there is one. It is on the
    /// node's disk when this resolves.
    pub async fn make_read_key(&self, volume: &str) -> Result<ReadKey, ClientError> {
        let call = message::VolumeName { name: volume.to_owned() };
        let made = self.ask::<calls::MakeReadKey>(call).await?;
        let key = made.read_key.map(ReadKey::from_bytes);
        key.ok_or_else(|| self.inner.confused("no read key was made".into()))
    }

    /// The volume is not encrypted any more. No reader can read its earlier versions with
    /// what is on this node then.
    pub async fn forget_read_key(&self, volume: &str) -> Result<(), ClientError> {
        let call = message::VolumeName { name: volume.to_owned() };
        self.ask::<calls::ForgetReadKey>(call).await.map(drop)
    }

    /// Gives back some of the disk space that no block needs: to be asked until nothing more is
    /// freed.
    ///
    /// # Errors
    /// If the node's disk fails.
    pub async fn reclaim(&self) -> Result<Reclaimed, ClientError> {
        self.ask::<calls::Reclaim>(Empty {}).await.map(|Json(reclaimed)| reclaimed)
    }

    /// What publishers may use of the node, and what they use.
    pub async fn quota(&self) -> Result<QuotaStatus, ClientError> {
        self.ask::<calls::ShowQuota>(Empty {}).await.map(|Json(quota)| quota)
    }

    /// Changes what publishers may use of the node; the quotas after that.
    ///
    /// # Errors
    /// If the node refuses the change.
    pub async fn change_quota(&self, change: QuotaChange) -> Result<QuotaStatus, ClientError> {
        let share = |share: Option<QuotaShare>| {
            share.map(|share| match share {
                QuotaShare::Automatic => 0,
                QuotaShare::Fixed(share) => share.millionths().max(1),
            })
        };
        let call = message::ChangeQuota {
            key_share: share(change.key_share),
            address_share: share(change.address_share),
            publisher_nodes: change.publisher_nodes,
            floor_share: change.floor_share.map(Share::millionths),
        };
        self.ask::<calls::SetQuota>(call).await.map(|Json(quota)| quota)
    }

    /// How the node gives disk.
    pub async fn contribution(&self) -> Result<ContributionStatus, ClientError> {
        self.ask::<calls::ShowContribution>(Empty {}).await.map(|Json(status)| status)
    }

    /// Changes how the node gives disk. Blocks move in the background; the status says how many
    /// are left.
    ///
    /// # Errors
    /// If the node refuses the change.
    pub async fn contribute(&self, policy: &Policy) -> Result<ContributionStatus, ClientError> {
        let call = message::Contribute { policy: policy.clone() };
        self.ask::<calls::SetContribution>(call).await.map(|Json(status)| status)
    }

    /// Waits no longer for the blocks of an earlier policy whose directory is gone.
    ///
    /// # Errors
    /// If there are none, or the directory is there.
    pub async fn abandon_former(&self) -> Result<ContributionStatus, ClientError> {
        self.ask::<calls::AbandonFormer>(Empty {}).await.map(|Json(status)| status)
    }

    /// Makes a call of a subsystem that was made outside this crate; the bytes of its reply.
    ///
    /// # Errors
    /// [`ClientError::Subsystem`] with what the subsystem said; [`ClientError::Refused`] if the
    /// node has none with such a call, or the request is longer than the call's may be.
    pub async fn outside_call(&self, number: u16, request: Bytes) -> Result<Bytes, ClientError> {
        let request = Block::of(request);
        match self.inner.exchange::<Block, Block, Unfit>(number, request).await? {
            Ok(WithPart(_, reply)) => Ok(reply),
            Err(Unfit::Unfit(why)) => Err(ClientError::Subsystem(why)),
        }
    }

    async fn open_volume<C>(
        &self,
        name: String,
        source: Option<&Path>,
    ) -> Result<Volume, ClientError>
    where
        C: ControlCall<Request = OpenVolume, Reply = OpenedVolume, Error = VolumeError>,
    {
        let source = source.map(dir::path_to_bytes);
        let opened = self.ask::<C>(OpenVolume { name: name.clone(), source }).await?;
        let key = SecretKey::from_seed(&opened.seed);
        let lease = opened.lease_secs.map(Duration::from_secs);
        Ok(Volume { name, key, is_new: opened.is_new, lease })
    }

    /// Makes a call, for people: all that can go wrong is one error.
    async fn ask<C: ControlCall>(&self, request: C::Request) -> Result<C::Reply, ClientError>
    where
        C::Error: Into<ClientError>,
    {
        self.inner.call::<C>(request).await?.map_err(Into::into)
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Client({})", self.inner.dir.display())
    }
}

impl Inner {
    fn confused(&self, reason: String) -> ClientError {
        ClientError::Refused { dir: self.dir.clone(), reason }
    }

    /// Why there is no answer: no node runs, or another user's.
    fn absent(&self) -> ClientError {
        let path = NodeDir::at(&self.dir).socket();
        match std::fs::symlink_metadata(&path) {
            Err(source) if source.kind() == std::io::ErrorKind::PermissionDenied => {
                DirError::io("cannot use", path)(source).into()
            }
            _ => ClientError::NoNode { dir: self.dir.clone() },
        }
    }

    /// Makes a call: the reply, or the operation's own error.
    async fn call<C: ControlCall>(
        &self,
        request: C::Request,
    ) -> Result<Result<C::Reply, C::Error>, ClientError> {
        self.exchange(C::ROW.number, request).await
    }

    /// The same of a call that has only a number.
    async fn exchange<Q: Body, R: Body, E: OwnError>(
        &self,
        number: u16,
        request: Q,
    ) -> Result<Result<R, E>, ClientError> {
        let confused = |refusal: Refusal| self.confused(refusal.text);
        let (header, parts) = request.split().map_err(confused)?;
        let reply = self.send(number, message::encode(&header), parts).await?;
        match message::decode(&reply.header).map_err(confused)? {
            Answer::Done(header) => R::join(header, reply.parts).map(Ok).map_err(confused),
            Answer::Failed(error) => Ok(Err(error)),
        }
    }

    async fn send(
        &self,
        method: u16,
        header: Bytes,
        parts: Vec<Bytes>,
    ) -> Result<Reply, ClientError> {
        let request = Request { method, header, parts };
        let ClientOptions { limit, patience, .. } = self.options;
        let (limit, absent) = if patience.is_zero() {
            (limit, WhenAbsent::Fail)
        } else {
            (limit.max(patience), WhenAbsent::Wait(patience))
        };
        self.socket.call(request, limit, absent).await.map_err(|error| match error {
            CallError::Unreachable(_) => self.absent(),
            CallError::TimedOut => ClientError::TimedOut { dir: self.dir.clone() },
            CallError::Refused(refusal) => self.confused(refusal.to_string()),
            CallError::TooLarge => self.confused("the message is too large".into()),
        })
    }
}
