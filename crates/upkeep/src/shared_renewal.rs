//! Keeps what this node's user shares: the leases of its shared volumes and of those that were joined here, and the
//! certificates of those who may write its own, and of the user's groups. Runs beside the node, like the replay of spools.
//!
//! Leases are extended once a day by the owner's node. A node that has joined a volume does the same, at an hour of its own,
//! unless another one has left a mark that it was done today (`shared/upkeep.rs`). Anybody who knows the volume's
//! address can make such marks, so each node does it itself once a week. Certificates are renewed by the owner's node, and by
//! those of the volume's keepers which have joined it.
//!
//! All are due once a day. What cannot be renewed now is tried again at the next look: a certificate
//! lasts for six days more, a lease for weeks.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use atoll_dht::{Blocks, PutError};
use atoll_env::{Env, Instant, sleep};
use atoll_key::{GroupId, SecretKey, VolumeId};
use atoll_node::{ClientError, MakeSubsystem, counted};
use atoll_volume::shared::access::groups::{renew, renew_volume};
use atoll_volume::shared::access::keepers::renew_as_keeper;
use atoll_volume::shared::access::rebind::{in_present_epoch, rebind_former};
use atoll_volume::shared::access::{
    AccessError, Credentials, ReadAccess, RebindReport, Renewal, VolumeRecord, read_volume,
};
use atoll_volume::shared::sealing::Sealing;
use atoll_volume::shared::upkeep::{self, Kept};
use bytes::Bytes;
use tokio::sync::Mutex;

use crate::background::Background;
use crate::connection;
use crate::own_group::OwnGroup;
use crate::user::{self, Joined, UserError};

/// The first look: the node has joined the ring by then.
const FIRST_AFTER: Duration = Duration::from_secs(60);
/// How often it is looked which are due: one block is read for each volume and group.
const LOOK_EVERY: Duration = Duration::from_secs(3600);

/// How often the leases of a volume are extended: every inode of it is read.
const KEEP_EVERY: Duration = Duration::from_secs(24 * 3600);
const DAY_MS: u64 = 24 * 3600 * 1000;
/// A node that has joined a volume looks after it some time in the day before this. The rest of the day is for a walk.
const LATEST_HOUR: Duration = Duration::from_secs(20 * 3600);
/// For how long a node that has joined a volume goes by the marks of others.
const BELIEVE_MARKS: Duration = Duration::from_secs(7 * 24 * 3600);

/// What is known of the volumes whose leases this node extends.
struct LeaseSchedule {
    /// How far into the day (UTC) this node looks after the volumes that it has joined.
    hour: Duration,
    /// When each volume was walked, or found to be walked by another node.
    done: BTreeMap<VolumeId, Instant>,
    /// When this node has walked it itself.
    walked: BTreeMap<VolumeId, Instant>,
}

impl LeaseSchedule {
    fn new(env: &Env) -> LeaseSchedule {
        // Every node's own, so that the first one has left its mark before the others look.
        let hour = Duration::from_secs(env.random_u64() % LATEST_HOUR.as_secs());
        LeaseSchedule { hour, done: BTreeMap::new(), walked: BTreeMap::new() }
    }

    fn is_done(&self, volume: VolumeId, now: Instant) -> bool {
        self.done.get(&volume).is_some_and(|at| now.since(*at) < KEEP_EVERY)
    }

    /// Whether a volume that was joined here is to be looked at: not today yet, and the day is old enough.
    fn is_due(&self, volume: VolumeId, now: Instant, into_day: Duration) -> bool {
        into_day >= self.hour && !self.is_done(volume, now)
    }

    /// Whether others' marks of a volume count: this node has walked it itself, or known it, for less than a week.
    fn believes_marks(&mut self, volume: VolumeId, now: Instant) -> bool {
        let walked = self.walked.entry(volume).or_insert(now);
        now.since(*walked) < BELIEVE_MARKS
    }

    /// Extends the leases of a volume; what went wrong.
    async fn keep(
        &mut self,
        env: &Env,
        blocks: &Arc<dyn Blocks>,
        walk: &Walk,
    ) -> Result<(), String> {
        let (now, volume) = (env.now(), walk.volume);
        let kept = walk.keep(env, blocks).await;
        let kept = kept.map_err(|error| error.to_string())?;
        self.done.insert(volume, now);
        self.walked.insert(volume, now);
        let rebound = walk.rebind_former(env, blocks, &kept).await;
        let Kept { inodes, renewed, lacking, unread, named, .. } = kept;
        if (lacking, unread) != (0, 0) {
            let first = named.first().map(|why| format!(" ({why})")).unwrap_or_default();
            let blocks = counted(lacking, "block is", "blocks are");
            let inodes = counted(unread, "inode cannot", "inodes cannot");
            return Err(format!("{blocks} nowhere, {inodes} be read{first}"));
        }
        tracing::info!("leases of {renewed} blocks, {inodes} inodes renewed");
        rebound.map_err(|error| error.to_string())?;
        upkeep::mark_kept(env, blocks, volume).await.map_err(|error| error.to_string())
    }
}

/// A walk through a shared volume, from its root directory, with the keys that open its blocks.
pub struct Walk {
    volume: VolumeId,
    record: VolumeRecord,
    sealing: Sealing,
    /// If it is here.
    owner: Option<Owner>,
}

/// The owner of a volume.
struct Owner {
    key: SecretKey,
    /// As a user.
    user: Option<SecretKey>,
    /// The user's groups, which may have been granted the volume.
    groups: Vec<OwnGroup>,
}

impl Walk {
    /// Through a volume whose key is here.
    pub fn of_owner(
        node: &Path,
        key: &SecretKey,
        record: &VolumeRecord,
    ) -> Result<Walk, UserError> {
        let sealing = Sealing::of_owner(key, record.read_epoch());
        let user = user::key(node)?;
        let names = user::groups(node).into_iter();
        let groups = match &user {
            Some(user) => names.filter_map(|name| OwnGroup::of(node, user, &name).ok()).collect(),
            None => Vec::new(),
        };
        let owner = Some(Owner { key: key.clone(), user, groups });
        Ok(Walk { volume: key.volume_id(), record: record.clone(), sealing, owner })
    }

    /// Through a volume that was joined.
    pub async fn of_member(
        env: &Env,
        blocks: &Arc<dyn Blocks>,
        Joined { volume, user, .. }: Joined,
    ) -> Result<Walk, String> {
        let record = read_volume(blocks, volume).await.map_err(|error| error.to_string())?;
        let (_, record) = record.ok_or("it is not on the ring")?;
        let reading = ReadAccess::new(env.clone(), blocks.clone(), (volume, &record), Some(user));
        let reading = reading.await.map_err(|error| error.to_string())?;
        Ok(Walk { volume, sealing: reading.sealing().clone(), record, owner: None })
    }

    /// Extends the leases of all that it finds.
    pub async fn keep(&self, env: &Env, blocks: &Arc<dyn Blocks>) -> Result<Kept, PutError> {
        upkeep::keep(env, blocks, self.volume, &self.record, &self.sealing).await
    }

    /// Binds to the present members what is bound to former ones, if this is the owner's node: members have made it who
    /// had not heard that others were shut out.
    ///
    /// # Errors
    /// If some could not be changed; the others were.
    pub async fn rebind_former(
        &self,
        env: &Env,
        blocks: &Arc<dyn Blocks>,
        kept: &Kept,
    ) -> Result<(), StillWritable> {
        let Some(Owner { key, user, groups: own }) = &self.owner else { return Ok(()) };
        let credentials = Credentials::new(env.clone(), blocks.clone(), user.clone());
        let of_volume = in_present_epoch(key, self.record.group_epoch);
        let in_present_epochs = |groups: &[GroupId]| {
            own.iter().fold(of_volume(groups), |groups, own| own.renewed(&groups))
        };
        let owner = (key, &self.sealing, self.record.root);
        let (credentials, epochs) = (&credentials, &in_present_epochs);
        let RebindReport { changed, failed, named, .. } =
            rebind_former(env, blocks, owner, credentials, epochs, &kept.groups).await;
        if changed > 0 {
            tracing::info!(
                "{} can be written no more by members who were shut out",
                inodes(changed)
            );
        }
        if failed == 0 {
            return Ok(());
        }
        Err(StillWritable { inodes: failed, named })
    }
}

/// Members who were shut out can still write some files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StillWritable {
    /// How many files and directories.
    pub inodes: u64,
    /// The paths of the first of them, and why they could not be changed.
    pub named: Vec<(Bytes, String)>,
}

impl fmt::Display for StillWritable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "members who were shut out can still write {}: ", inodes(self.inodes))?;
        for (i, (path, why)) in self.named.iter().enumerate() {
            // Others have chosen the names.
            let path = String::from_utf8_lossy(path);
            write!(f, "{}{}: {why}", if i > 0 { "; " } else { "" }, path.escape_debug())?;
        }
        Ok(())
    }
}

impl std::error::Error for StillWritable {}

fn inodes(count: u64) -> String {
    counted(count, "file or directory", "files and directories")
}

/// The renewal as a subsystem.
pub(crate) fn subsystem() -> MakeSubsystem {
    // A node that starts anew goes on with what this one has done today.
    let kept = Arc::new(Mutex::new(None));
    Arc::new(move |node| {
        let work = run(node.env.clone(), node.dir, kept.clone());
        Arc::new(Background::new(node.env, work))
    })
}

/// Runs until it is dropped.
async fn run(env: Env, node: PathBuf, kept: Arc<Mutex<Option<LeaseSchedule>>>) {
    let mut kept = kept.lock().await;
    let kept = kept.get_or_insert_with(|| LeaseSchedule::new(&env));
    sleep(&*env, FIRST_AFTER).await;
    loop {
        match renew_all(&node, kept).await {
            Ok(failed) => failed.iter().for_each(|(of, why)| {
                tracing::warn!("certificates or leases of {of} were not renewed: {why}");
            }),
            Err(why) => tracing::warn!("nothing shared was renewed: {why}"),
        }
        sleep(&*env, LOOK_EVERY).await;
    }
}

/// Why nothing was renewed.
#[derive(Debug, thiserror::Error)]
enum NotRenewed {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(transparent)]
    User(#[from] UserError),
}

/// Renews what is due; says what could not be, and why.
async fn renew_all(
    node: &Path,
    kept: &mut LeaseSchedule,
) -> Result<BTreeMap<String, String>, NotRenewed> {
    let (env, client) = connection::to_node(node).await?;
    let blocks: Arc<dyn Blocks> = client.clone();
    let mut failed = BTreeMap::new();
    let mut note = |of: String, outcome: Result<Renewal, String>| match outcome {
        Ok(Renewal { renewed: 0, dropped: 0 }) => {}
        Ok(Renewal { renewed, dropped }) => {
            tracing::info!("certificates of {of}: {renewed} renewed, {dropped} ended");
        }
        Err(why) => drop(failed.insert(of, why)),
    };
    let volumes = client.volumes().await?;
    for volume in volumes.into_iter().filter(|volume| volume.source.is_none()) {
        let name = volume.name;
        let key = client.named_volume(&name).await?.key;
        let record = match read_volume(&blocks, key.volume_id()).await {
            Ok(Some((_, record))) => record,
            // Not a shared one, or none at all.
            Ok(None) | Err(AccessError::Bad { .. }) => continue,
            Err(error) => {
                note(format!("volume {name}"), Err(error.to_string()));
                continue;
            }
        };
        let outcome = renew_volume(&env, &blocks, &key, &record).await;
        note(format!("volume {name}"), outcome.map_err(|error| error.to_string()));
        if kept.is_done(key.volume_id(), env.now()) {
            continue;
        }
        let walk = Walk::of_owner(node, &key, &record)?;
        let outcome = kept.keep(&env, &blocks, &walk).await;
        note(format!("volume {name}"), outcome.map(|()| Renewal::default()));
    }
    for name in user::joined_names(node) {
        let outcome = keep_certificates(node, &name, &env, &blocks).await;
        note(format!("volume {name}"), outcome);
        let outcome = keep_joined(node, &name, &env, &blocks, kept).await;
        note(format!("volume {name}"), outcome.map(|()| Renewal::default()));
    }
    let names = user::groups(node);
    if let Some(user) = user::key(node)? {
        for name in names {
            let outcome = match OwnGroup::of(node, &user, &name) {
                Ok(group) => renew(&env, &blocks, &group.key).await.map_err(|e| e.to_string()),
                Err(failure) => Err(failure.to_string()),
            };
            note(format!("group {name}"), outcome);
        }
    }
    Ok(failed)
}

/// Renews the certificates of a volume that was joined on this node, if its member is a keeper.
async fn keep_certificates(
    node: &Path,
    name: &str,
    env: &Env,
    blocks: &Arc<dyn Blocks>,
) -> Result<Renewal, String> {
    let joined = user::joined(node, name).map_err(|failure| failure.to_string())?;
    let Some(Joined { volume, user, .. }) = joined else { return Ok(Renewal::default()) };
    let renewed = renew_as_keeper(env, blocks, volume, &user).await;
    Ok(renewed.map_err(|error| error.to_string())?.unwrap_or_default())
}

/// Extends the leases of a volume that was joined on this node, if that is due.
async fn keep_joined(
    node: &Path,
    name: &str,
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    kept: &mut LeaseSchedule,
) -> Result<(), String> {
    let joined = user::joined(node, name).map_err(|failure| failure.to_string())?;
    let Some(joined) = joined else { return Ok(()) };
    let volume = joined.volume;
    let (now, into_day) = (env.now(), Duration::from_millis(env.unix_ms() % DAY_MS));
    if !kept.is_due(volume, now, into_day) {
        return Ok(());
    }
    if kept.believes_marks(volume, now) && upkeep::was_kept_today(env, blocks, volume).await {
        kept.done.insert(volume, now);
        return Ok(());
    }
    kept.keep(env, blocks, &Walk::of_member(env, blocks, joined).await?).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_has_joined_looks_once_a_day_and_walks_once_a_week_whatever_others_say() {
        let volume = |n: u8| SecretKey::from_seed(&[n; 32]).volume_id();
        let at = |hours: u64| Instant::default() + Duration::from_secs(hours * 3600);
        let into = |hours: u64| Duration::from_secs(hours * 3600);
        let (done, walked) = (BTreeMap::new(), BTreeMap::new());
        let mut schedule = LeaseSchedule { hour: into(7), done, walked };
        assert!(!schedule.is_due(volume(1), at(0), into(6)), "not before its hour");
        assert!(schedule.is_due(volume(1), at(0), into(7)));
        assert!(schedule.believes_marks(volume(1), at(0)));
        schedule.done.insert(volume(1), at(0));
        assert!(!schedule.is_due(volume(1), at(12), into(19)), "today");
        assert!(schedule.is_due(volume(2), at(12), into(19)), "that is another one");
        assert!(schedule.is_due(volume(1), at(24), into(7)));
        assert!(schedule.believes_marks(volume(1), at(7 * 24 - 1)));
        assert!(!schedule.believes_marks(volume(1), at(7 * 24)));
        schedule.walked.insert(volume(1), at(7 * 24));
        assert!(schedule.believes_marks(volume(1), at(8 * 24)));
    }

    #[test]
    fn names_that_others_have_chosen_cannot_write_into_the_log() {
        let named = vec![
            (Bytes::from_static(b"a/b"), "full".to_owned()),
            (Bytes::from_static(b"\x1b[2J\n"), "no".to_owned()),
        ];
        let told = StillWritable { inodes: 2, named }.to_string();
        let begin =
            "members who were shut out can still write 2 files and directories: a/b: full; ";
        assert!(told.starts_with(begin) && !told.contains(char::is_control), "{told}");
    }
}
