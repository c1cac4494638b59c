//! Groups that the user of this node has made: their keys, and their epochs.
//!
//! A group's secret key follows from the user's, its name and its *epoch* (`docs/design/shared.md`); the node's
//! directory notes the present one's public key. A new epoch has another key, and so shuts out members of the one before at
//! once, in those volumes that are then bound to it: the user's own. It is noted before anything is bound to it, so that a
//! command which was interrupted goes on when it is run again.
//!
//! *Path groups* are made by `atoll grant NAME/PATH USER`: a group for the users who were granted that path by name. Their
//! names have a `:`, which no other group's has.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use atoll_dht::Blocks;
use atoll_env::Env;
use atoll_key::{BlockHash, GroupId, SecretKey, UserId, user_group};
use atoll_node::check_name;
use atoll_volume::shared::access::groups::{new_member, put_group};
use atoll_volume::shared::access::{AccessError, GroupRecord, Member, read_group};
use futures_util::future::join_all;

use crate::user::{self, Reason, UserError};

/// Epochs that a group can have. A guess: each is a command that somebody has typed.
const MAX_EPOCHS: u32 = 1_024;
/// Epochs that are looked for on the ring if the node has not noted any.
const SEARCHED: u32 = 16;
/// The longest name of a group, bytes.
pub const MAX_NAME_BYTES: usize = 64;

/// Why a group of the user's cannot be made or changed.
#[derive(Debug, thiserror::Error)]
pub enum GroupError {
    /// A file of the user's.
    #[error(transparent)]
    User(#[from] UserError),
    /// Its record on the ring.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// It has had all that it can have.
    #[error("members of a group can be shut out at once 1,023 times")]
    NoEpoch,
}

/// A group of the user's.
pub struct OwnGroup {
    /// Its name.
    pub name: String,
    /// Its key in the present epoch.
    pub key: SecretKey,
    user: SecretKey,
    epoch: u32,
    dir: PathBuf,
}

/// The group for the users who are granted a path of a volume by name. A path that does not fit a name is there as a
/// hash.
pub fn path_group(volume: &str, path: &str) -> String {
    let path: Vec<&str> = path.split('/').filter(|name| !matches!(*name, "" | ".")).collect();
    let name = format!("{volume}:{}", path.join(":"));
    let is_plain =
        path.iter().all(|name| !name.contains([':', '\\']) && !name.contains(char::is_control));
    if is_plain && name.len() <= MAX_NAME_BYTES && check_name(&name).is_ok() {
        return name;
    }
    let hash = BlockHash::of(format!("{volume}\0{}", path.join("\0")).as_bytes()).to_hex();
    let cut = (0..=volume.len().min(32)).rev().find(|at| volume.is_char_boundary(*at));
    format!("{}:{}", &volume[..cut.unwrap_or(0)], &hash[..24])
}

impl OwnGroup {
    /// The group of this name, whether or not it was made.
    pub fn of(dir: &Path, user: &SecretKey, name: &str) -> Result<OwnGroup, UserError> {
        let noted = user::noted_group(dir, name)?;
        let of = |epoch| user_group(user, name, epoch);
        let epoch = match noted {
            None => 0,
            Some(noted) => {
                (0..MAX_EPOCHS).find(|epoch| of(*epoch).group_id() == noted).ok_or_else(|| {
                    let why =
                        Reason::Contradiction("the key that is noted for it is not the user's");
                    UserError { what: format!("the group {name} cannot be used"), why }
                })?
            }
        };
        let (name, user, dir) = (name.to_owned(), user.clone(), dir.to_owned());
        Ok(OwnGroup { key: user_group(&user, &name, epoch), name, user, epoch, dir })
    }

    /// The group as others know it.
    pub fn id(&self) -> GroupId {
        self.key.group_id()
    }

    /// As it was known in former epochs.
    pub fn former(&self) -> Vec<GroupId> {
        (0..self.epoch).map(|epoch| user_group(&self.user, &self.name, epoch).group_id()).collect()
    }

    /// Its record on the ring.
    pub async fn read(&self, blocks: &Arc<dyn Blocks>) -> Result<Option<GroupRecord>, AccessError> {
        read_group(blocks, self.id()).await
    }

    /// Makes the group unless it is there, and notes it; whether it is new. If the node has noted none, the newest epoch
    /// that the ring has a record of goes on.
    pub async fn make(&mut self, env: &Env, blocks: &Arc<dyn Blocks>) -> Result<bool, GroupError> {
        if !user::has_group(&self.dir, &self.name) {
            let of = |epoch| user_group(&self.user, &self.name, epoch);
            let reads = (0..SEARCHED).map(|epoch| read_group(blocks, of(epoch).group_id()));
            let mut found = join_all(reads).await.into_iter().enumerate();
            let newest = found.rfind(|(_, record)| matches!(record, Ok(Some(_))));
            self.epoch = newest.map_or(0, |(epoch, _)| epoch as u32);
            self.key = of(self.epoch);
        }
        let is_new = self.read(blocks).await?.is_none();
        if is_new {
            let record = GroupRecord { label: self.name.clone(), ..GroupRecord::default() };
            self.put(env, blocks, &record).await?;
        }
        user::note_group(&self.dir, &self.name, self.id())?;
        Ok(is_new)
    }

    /// Begins a new epoch without a user: the other members have certificates of it.
    pub async fn begin_epoch(
        &mut self,
        env: &Env,
        blocks: &Arc<dyn Blocks>,
        without: UserId,
    ) -> Result<(), GroupError> {
        let before = self.read(blocks).await?.unwrap_or_default();
        if self.epoch + 1 >= MAX_EPOCHS {
            return Err(GroupError::NoEpoch);
        }
        self.epoch += 1;
        self.key = user_group(&self.user, &self.name, self.epoch);
        let now_secs = env.unix_ms() / 1000;
        let mut next = GroupRecord { label: before.label, ..GroupRecord::default() };
        for (user, Member { label, until_secs, .. }) in &before.members {
            // One whose time is over is not taken along.
            if let Ok(member) = new_member(&self.key, *user, label, now_secs, *until_secs)
                && *user != without
            {
                next.members.insert(*user, member);
            }
        }
        self.put(env, blocks, &next).await?;
        Ok(user::note_group(&self.dir, &self.name, self.id())?)
    }

    async fn put(
        &self,
        env: &Env,
        blocks: &Arc<dyn Blocks>,
        record: &GroupRecord,
    ) -> Result<(), AccessError> {
        put_group(env, blocks, &self.key, record).await
    }

    /// The groups of an inode with the present epoch in the place of former ones.
    pub fn renewed(&self, groups: &[GroupId]) -> Vec<GroupId> {
        let former = self.former();
        let of = |group: &GroupId| if former.contains(group) { self.id() } else { *group };
        let mut groups: Vec<GroupId> = groups.iter().map(of).collect();
        groups.sort_unstable();
        groups.dedup();
        groups
    }

    /// The groups of an inode without this one, in any epoch.
    pub fn without(&self, groups: &[GroupId]) -> Vec<GroupId> {
        let renewed = self.renewed(groups);
        renewed.into_iter().filter(|group| *group != self.id()).collect()
    }

    /// The groups of an inode with this one.
    pub fn with(&self, groups: &[GroupId]) -> Vec<GroupId> {
        let mut groups = [&self.renewed(groups)[..], &[self.id()]].concat();
        groups.sort_unstable();
        groups.dedup();
        groups
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_has_one_group_which_nobody_else_can_have_made() {
        assert_eq!(path_group("work", "plans/2026"), "work:plans:2026");
        assert_eq!(path_group("work", "/plans//./2026/"), "work:plans:2026");
        let long = path_group("work", &"x".repeat(80));
        assert!(long.starts_with("work:") && long.len() <= MAX_NAME_BYTES, "{long}");
        assert_ne!(path_group("work", "a:b"), path_group("work", "a/b"));
        assert_ne!(path_group("work", "a\n"), path_group("work", "a"));
        let volume = "ü".repeat(40);
        for name in [path_group("work", "a:b"), path_group(&volume, &"ä".repeat(90)), long] {
            assert!(check_name(&name).is_ok() && name.len() <= MAX_NAME_BYTES, "{name}");
        }
    }

    #[test]
    fn a_new_epoch_takes_the_place_of_former_ones_in_bindings() {
        let temp = tempfile::tempdir().expect("temp");
        let user = SecretKey::from_seed(&[1; 32]);
        let fresh = OwnGroup::of(temp.path(), &user, "band").expect("opens");
        assert!(fresh.former().is_empty() && fresh.id() == user_group(&user, "band", 0).group_id());
        let third = user_group(&user, "band", 2).group_id();
        user::note_group(temp.path(), "band", user_group(&user, "band", 1).group_id())
            .expect("noted");
        user::note_group(temp.path(), "band", third).expect("noted anew");
        let group = OwnGroup::of(temp.path(), &user, "band").expect("opens");
        assert_eq!((group.id(), group.former().len()), (third, 2));
        let other = GroupId([9; 32]);
        let mut both = vec![other, third];
        both.sort_unstable();
        assert_eq!(group.renewed(&[group.former()[0], other]), both);
        assert_eq!(group.renewed(&[other]), [other]);
        assert_eq!(group.with(&[other]), both);
        assert_eq!(group.without(&[group.former()[1], other, third]), [other]);
        user::note_group(temp.path(), "band", other).expect("noted");
        assert!(OwnGroup::of(temp.path(), &user, "band").is_err(), "it is somebody else's");
    }
}
