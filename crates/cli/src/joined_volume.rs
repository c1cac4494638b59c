//! Shared volumes of other nodes that have a name on this one: what the ring says of them.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use atoll_dht::Blocks;
use atoll_env::Env;
use atoll_key::{UserAddress, VolumeAddress};
use atoll_node::shell_word;
use atoll_upkeep::user::UserError;
use atoll_volume::shared::access::rebind::groups_of;
use atoll_volume::shared::access::{
    Credentials, GroupRecord, NotAllowed, read_group, read_keepers, read_volume,
};
use futures_util::future::join_all;
use serde::Serialize;

use crate::output::escaped;
use crate::units;
use crate::user::{self, Joined};

/// How long the ring may take to say what is known of a volume.
const RING_LIMIT: Duration = Duration::from_secs(5);

/// A volume that was joined, for people and as JSON.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct JoinedStatus {
    #[serde(skip)]
    pub name: String,
    #[serde(skip)]
    pub address: String,
    #[serde(skip)]
    pub is_encrypted: bool,
    /// The member as whom this node writes it.
    pub user: String,
    /// What the volume's owner calls that member.
    pub label: String,
    /// Whether the member's key came with an invitation; else it is that of this node's user.
    pub invited: bool,
    /// Whether the member may write the root directory now; absent if that is not known.
    pub may_write: Option<bool>,
    /// Until when, if that is not renewed.
    pub certified_until_unix_secs: Option<u64>,
    /// Whether the member is a keeper: then this node renews the members' certificates.
    pub keeper: bool,
    /// Why the member may not, or why that is not known.
    pub why_not: Option<String>,
    /// The records of the groups that may write the root directory.
    #[serde(skip)]
    pub groups: Vec<GroupRecord>,
}

/// What is known of all volumes that were joined on this node.
pub(crate) async fn all(env: &Env, blocks: &Arc<dyn Blocks>, dir: &Path) -> Vec<JoinedStatus> {
    let names = user::joined_names(dir);
    join_all(names.iter().map(|name| async move {
        match user::joined(dir, name) {
            Ok(Some(joined)) => Some(status(env, blocks, name, &joined).await),
            Ok(None) => None,
            Err(error) => Some(JoinedStatus::unknown(name, &error)),
        }
    }))
    .await
    .into_iter()
    .flatten()
    .collect()
}

/// What is known of a volume that was joined under a name.
pub(crate) async fn status(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    name: &str,
    joined: &Joined,
) -> JoinedStatus {
    let mut status = JoinedStatus {
        name: name.to_owned(),
        address: VolumeAddress(joined.volume).to_string(),
        user: UserAddress(joined.user.user_id()).to_string(),
        invited: joined.is_invited,
        ..JoinedStatus::default()
    };
    let looked = tokio::time::timeout(RING_LIMIT, look(env, blocks, joined, &mut status)).await;
    match looked {
        Ok(Ok(())) => {}
        Ok(Err(why)) => status.why_not = Some(why),
        Err(_) => status.why_not = Some("the ring does not answer".into()),
    }
    status
}

async fn look(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    joined: &Joined,
    status: &mut JoinedStatus,
) -> Result<(), String> {
    let found = read_volume(blocks, joined.volume).await.map_err(|error| error.to_string())?;
    let (_, record) = found.ok_or("nothing of it is on the ring")?;
    status.is_encrypted = record.is_encrypted;
    let groups = groups_of(blocks, record.root).await.map_err(|error| error.to_string())?;
    let records = join_all(groups.iter().map(|group| read_group(blocks, *group))).await;
    status.groups = records.into_iter().filter_map(|record| record.ok().flatten()).collect();
    let user = joined.user.user_id();
    let member = status.groups.iter().find_map(|record| record.members.get(&user));
    status.label = member.map(|member| member.label.clone()).unwrap_or_default();
    if record.has_keepers
        && let Ok(Some(keepers)) = read_keepers(blocks, joined.volume).await
    {
        status.keeper = keepers.keepers.contains_key(&user);
    }
    let credentials = Credentials::new(env.clone(), blocks.clone(), Some(joined.user.clone()));
    match credentials.valid_until(&groups).await {
        Ok(until_secs) => {
            (status.may_write, status.certified_until_unix_secs) = (Some(true), Some(until_secs));
        }
        Err(NotAllowed::Unknown { told }) => return Err(told),
        Err(why) => (status.may_write, status.why_not) = (Some(false), Some(why.to_string())),
    }
    Ok(())
}

impl JoinedStatus {
    fn unknown(name: &str, error: &UserError) -> JoinedStatus {
        let (name, why_not) = (name.to_owned(), Some(error.to_string()));
        JoinedStatus { name, why_not, ..JoinedStatus::default() }
    }

    /// As whom this node writes the volume.
    pub(crate) fn member(&self) -> String {
        let how = if self.invited { "by an invitation" } else { "as the user of this node" };
        let keeps = if self.keeper { ", a keeper" } else { "" };
        match &self.label[..] {
            "" => format!("{how}{keeps}"),
            label => format!("{how}, {}{keeps}", escaped(label.as_bytes())),
        }
    }

    /// Whether the member may write, and what to do if not.
    pub(crate) fn access(&self) -> String {
        let name = shell_word(&self.name);
        let why = self.why_not.as_deref().unwrap_or("that is not known");
        match (self.may_write, self.certified_until_unix_secs) {
            (Some(true), Some(until_secs)) => {
                format!("yes, until {} UTC at least", units::unix_date(until_secs))
            }
            (Some(_), _) if self.invited => format!(
                "no, {why}; with a new code of its owner `atoll volume join - {name}` joins it anew"
            ),
            (Some(_), _) => format!("no, {why}; its owner can `atoll grant` it to {}", self.user),
            (None, _) => format!("it is not known: {why}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_known_of_a_joined_volume_says_what_to_do() {
        let status = JoinedStatus {
            name: "team".into(),
            user: "atolluser:abc".into(),
            invited: true,
            ..JoinedStatus::default()
        };
        assert_eq!(status.access(), "it is not known: that is not known");
        let refused =
            JoinedStatus { may_write: Some(false), why_not: Some("x".into()), ..status.clone() };
        assert!(refused.access().contains("no, x; with a new code"), "{}", refused.access());
        assert!(refused.access().contains("`atoll volume join - team`"), "{}", refused.access());
        let own = JoinedStatus { invited: false, label: "\x1b[2J".into(), ..refused };
        assert!(own.access().contains("can `atoll grant` it to atolluser:abc"), "{}", own.access());
        assert!(!own.member().contains(char::is_control), "{}", own.member());
        let (may_write, certified_until_unix_secs) = (Some(true), Some(4_000_000_000));
        let may = JoinedStatus { may_write, certified_until_unix_secs, ..status };
        assert_eq!(may.access(), "yes, until 2096-10-02 07:06:40 UTC at least");
    }
}
