//! The published volumes as a subsystem: their names, keys and manifests on disk, and the
//! renewal of their leases.
//!
//! It does not know files: to it a volume is a key, a source directory's name, and a list of
//! blocks to keep alive. A volume without a source is written by mounts.

mod follow;
mod keys;
mod lease_renewer;
pub(crate) mod manifest;
mod on_disk;

use std::sync::Arc;
use std::time::Duration;

use atoll_dht::Blocks;
use atoll_env::{BoxFuture, Env};
use atoll_key::{SignedBlock, VolumeAddress, VolumeSecret};

use self::lease_renewer::LeaseRenewer;
pub(crate) use self::on_disk::{Info, Kept, Volumes, name_of};
pub use self::on_disk::{MAX_NAME_BYTES, check_name};
use crate::config::StartError;
use crate::control::body::{Json, WithPart, malformed};
use crate::control::calls::{
    self, ControlCall, ForgetReadKey, KeepAdding, KeepCommitting, MakeReadKey, ReadKey, SourceMove,
    VolumeExport, VolumeForget, VolumeImport, VolumeMoved, VolumeOpen, VolumeRenew,
    VolumeUnpublish,
};
use crate::control::message::{Empty, HeldReadKey, OpenVolume, OpenedVolume};
use crate::control::server::{Calls, Handled, off_thread};
use crate::control::volume_error::VolumeError;
use crate::counted::counted;
use crate::dir::path_from_bytes;
use crate::status::{Status, VolumeStatus};
use crate::subsystem::Subsystem;
use crate::tree_walk::TreeWalk;

/// The volumes published from this node, kept alive.
pub(crate) struct PublishedVolumes {
    /// Its wall clock is the network's: leases end by that.
    env: Env,
    volumes: Arc<Volumes>,
    renewer: Arc<LeaseRenewer>,
    lease: Duration,
}

impl PublishedVolumes {
    /// The volumes on disk, whose blocks are leased for `lease` at a time. With a `walk`, what
    /// mounts have written is found when they are gone.
    pub(crate) fn new(
        env: Env,
        blocks: Arc<dyn Blocks>,
        volumes: Arc<Volumes>,
        lease: Duration,
        walk: Option<Arc<dyn TreeWalk>>,
    ) -> PublishedVolumes {
        let renewer = LeaseRenewer::new(env.clone(), blocks, volumes.clone(), lease, walk);
        PublishedVolumes { env, volumes, renewer: Arc::new(renewer), lease }
    }

    fn list(&self) -> Vec<VolumeStatus> {
        let names = self.volumes.names().unwrap_or_default();
        names.iter().map(|name| volume_status(&self.volumes, name, self.lease)).collect()
    }

    fn now_unix_secs(&self) -> u64 {
        self.env.unix_ms() / 1000
    }

    /// Opens a volume, or makes one.
    fn open(&self, call: OpenVolume, moves: bool) -> Result<OpenedVolume, VolumeError> {
        let now = self.now_unix_secs();
        let source = call.source.map(path_from_bytes);
        if let Some(source) = source.as_deref().filter(|_| moves) {
            self.volumes.set_source(&call.name, source)?;
        }
        let (key, is_new) = self.volumes.open_or_create(&call.name, source.as_deref(), now)?;
        let lease_secs = self.volumes.lease(&call.name)?.map(|lease| lease.as_secs());
        Ok(OpenedVolume { seed: key.seed(), is_new, lease_secs })
    }

    fn opening_calls(self: &Arc<Self>, calls: &mut Calls) {
        fn on<C>(volumes: Arc<PublishedVolumes>, calls: &mut Calls, moves: bool)
        where
            C: ControlCall<Request = OpenVolume, Reply = OpenedVolume, Error = VolumeError>,
        {
            calls.on::<C>(move |call| -> BoxFuture<'static, Handled<C>> {
                let volumes = volumes.clone();
                Box::pin(async move {
                    let source = call.source.clone().map(path_from_bytes);
                    if source.as_ref().is_some_and(|path| !path.is_absolute()) {
                        return Err(malformed("the source is not an absolute path"));
                    }
                    if moves && source.is_none() {
                        return Err(malformed("a move says where to"));
                    }
                    off_thread(move || volumes.open(call, moves)).await
                })
            });
        }
        on::<VolumeOpen>(self.clone(), calls, false);
        on::<SourceMove>(self.clone(), calls, true);
    }

    fn secret_calls(self: &Arc<Self>, calls: &mut Calls) {
        let published = self.clone();
        calls.on_blocking::<VolumeImport>(move |keys| {
            let secret = VolumeSecret::from(keys);
            let is_new = published.volumes.import(&secret, published.now_unix_secs())?;
            Ok(OpenedVolume { seed: secret.key.seed(), is_new, lease_secs: None })
        });
        let volumes = self.volumes.clone();
        calls.on_blocking::<VolumeExport>(move |call| Ok(volumes.secret(&call.name)?.into()));
        let volumes = self.volumes.clone();
        calls.on_blocking::<VolumeMoved>(move |call| {
            volumes.set_moved(&call.name, call.is_moved)?;
            Ok(volumes.secret(&call.name)?.into())
        });
        let volumes = self.volumes.clone();
        calls
            .on_blocking::<VolumeForget>(move |call| volumes.forget(&call.name).map(|()| Empty {}));
    }

    fn manifest_calls(self: &Arc<Self>, calls: &mut Calls) {
        let volumes = self.volumes.clone();
        calls.on::<KeepAdding>(move |WithPart(call, hashes)| {
            let volumes = volumes.clone();
            Box::pin(async move {
                if hashes.len() % 32 != 0 {
                    return Err(malformed("part of a hash"));
                }
                let add = move || {
                    volumes.keep_add(&call.volume, call.session, call.offset, &hashes)?;
                    Ok(Empty {})
                };
                off_thread(add).await
            })
        });
        let published = self.clone();
        calls.on_blocking::<KeepCommitting>(move |WithPart(call, root)| {
            let root = SignedBlock::decode(&root)
                .map_err(|error| VolumeError::WrongRoot { why: error.to_string() })?;
            let now = published.now_unix_secs();
            let volumes = &published.volumes;
            // First: a tree that is as it was is not put again, but renewed for as long.
            if let Some(secs) = call.lease_secs {
                volumes.set_lease(&call.volume, Duration::from_secs(secs), now)?;
            }
            volumes.keep_commit(&call.volume, call.session, call.count, &root, now)?;
            Ok(Empty {})
        });
    }

    fn read_key_calls(&self, calls: &mut Calls) {
        let volumes = self.volumes.clone();
        calls.on_blocking::<ReadKey>(move |call| {
            let held = volumes.read_key(&call.name)?;
            Ok(HeldReadKey { read_key: held.map(|key| *key.bytes()) })
        });
        let volumes = self.volumes.clone();
        calls.on_blocking::<MakeReadKey>(move |call| {
            let made = volumes.make_read_key(&call.name)?;
            Ok(HeldReadKey { read_key: Some(*made.bytes()) })
        });
        let volumes = self.volumes.clone();
        calls.on_blocking::<ForgetReadKey>(move |call| {
            volumes.forget_read_key(&call.name).map(|()| Empty {})
        });
    }

    async fn renew_now(&self, name: String) -> Handled<VolumeRenew> {
        if let Err(error) = self.renewer.refresh(&name).await {
            return Ok(Err(error));
        }
        let (volumes, lease) = (self.volumes.clone(), self.lease);
        let status = off_thread(move || volume_status(&volumes, &name, lease)).await?;
        Ok(Ok(Json(status)))
    }
}

impl Subsystem for PublishedVolumes {
    fn control_calls(self: Arc<Self>, calls: &mut Calls) {
        let published = self.clone();
        calls.on_blocking::<calls::Volumes>(move |Empty {}| Ok(Json(published.list())));
        self.opening_calls(calls);
        self.manifest_calls(calls);
        self.read_key_calls(calls);
        self.secret_calls(calls);
        let published = self.clone();
        calls.on::<VolumeRenew>(move |call| {
            let published = published.clone();
            Box::pin(async move { published.renew_now(call.name).await })
        });
        let volumes = self.volumes.clone();
        calls.on_blocking::<VolumeUnpublish>(move |call| {
            volumes.unpublish(&call.name).map(|()| Empty {})
        });
    }

    fn start(self: Arc<Self>) -> BoxFuture<'static, Result<(), StartError>> {
        self.env.spawn(Box::pin(self.renewer.clone().run()));
        Box::pin(async { Ok(()) })
    }

    fn report(&self, status: &mut Status) {
        status.volumes = self.list();
        let now_secs = self.now_unix_secs();
        let warnings = status.volumes.iter().flat_map(|volume| volume_warnings(volume, now_secs));
        status.warnings.extend(warnings);
    }
}

/// Warnings about a volume, for people.
fn volume_warnings(volume: &VolumeStatus, now_secs: u64) -> Vec<String> {
    let name = &volume.name;
    let mut warnings = Vec::new();
    if volume.lost_blocks > 0 {
        let lost = counted(volume.lost_blocks, "block", "blocks");
        let were = if volume.lost_blocks == 1 { "was" } else { "were" };
        let source = volume.source.as_deref().unwrap_or("its directory");
        warnings.push(format!(
            "{lost} of volume {name} {were} on no node that answered at the last renewal: if \
             no node is missing, publish {source} again"
        ));
    }
    let left_secs = volume.lease_expires_unix_secs.saturating_sub(now_secs);
    // Renewal is due when two thirds are left; by half something has gone wrong.
    if volume.root_version > 0 && left_secs < volume.lease_secs / 2 {
        warnings.push(format!(
            "volume {name} has not been renewed; its blocks may go in {}",
            counted(left_secs / 3600, "hour", "hours")
        ));
    }
    if let Some(trouble) = &volume.trouble {
        warnings.push(format!("volume {name} could not be renewed: {trouble}"));
    }
    warnings
}

fn volume_status(volumes: &Volumes, name: &str, lease: Duration) -> VolumeStatus {
    let kept = volumes.kept(name);
    let mut status = VolumeStatus {
        name: name.to_owned(),
        refreshed_unix_secs: kept.refreshed_unix_secs,
        lost_blocks: kept.lost_blocks,
        trouble: kept.trouble,
        renewing_blocks: kept.pass.map(|pass| pass.next),
        lease_secs: lease.as_secs(),
        ..VolumeStatus::default()
    };
    let mut trouble = Vec::new();
    match volumes.key(name) {
        Ok(key) => status.address = VolumeAddress(key.volume_id()).to_string(),
        Err(error) => trouble.push(error.to_string()),
    }
    match volumes.read_key(name) {
        Ok(read_key) => status.encrypted = read_key.is_some(),
        Err(error) => trouble.push(error.to_string()),
    }
    match volumes.info(name) {
        Ok(info) => {
            status.lease_secs = info.lease_secs.unwrap_or(status.lease_secs);
            status.is_moved = info.move_token.is_some();
            let source = info.source.map(path_from_bytes);
            status.source = source.map(|path| path.display().to_string());
        }
        Err(error) => trouble.push(error.to_string()),
    }
    // A volume that was kept until it was unpublished still has its last leases.
    status.lease_expires_unix_secs =
        on_disk::lease_end(kept.refreshed_unix_secs, Duration::from_secs(status.lease_secs));
    match volumes.manifest(name) {
        Ok(Some(manifest)) => {
            status.root_version = manifest.root().version;
            status.kept_blocks = manifest.count();
        }
        Ok(None) => {
            status.lost_blocks = 0;
            status.trouble = None;
        }
        Err(error) => trouble.push(error.to_string()),
    }
    if !trouble.is_empty() {
        status.trouble = Some(trouble.join("; "));
    }
    status
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_blocks_say_what_to_do() {
        let volume = VolumeStatus {
            name: "docs".into(),
            source: Some("/srv/docs".into()),
            lost_blocks: 3,
            ..VolumeStatus::default()
        };
        let warnings = volume_warnings(&volume, 0);
        let expected = "3 blocks of volume docs were on no node that answered at the last renewal: \
                        if no node is missing, publish /srv/docs again";
        assert_eq!(warnings, [expected]);
    }

    #[test]
    fn a_volume_about_to_expire_is_told() {
        let day = 24 * 3600;
        let volume = VolumeStatus {
            name: "docs".into(),
            root_version: 1,
            lease_expires_unix_secs: 130 * day,
            lease_secs: 30 * day,
            ..VolumeStatus::default()
        };
        assert!(volume_warnings(&volume, 110 * day).is_empty());
        let late = volume_warnings(&volume, 128 * day);
        assert!(late[0].contains("48 hours"), "{late:?}");
    }
}
