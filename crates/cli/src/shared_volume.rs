//! Code that all commands for shared volumes use: it finds a volume, reads the names of users and groups, and
//! gives inodes other groups.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use atoll_dht::Blocks;
use atoll_env::Env;
use atoll_key::{
    GroupAddress, GroupId, SecretKey, SignedBlock, UserAddress, UserId, VolumeId, volume_group,
};
use atoll_node::Client;
use atoll_volume::owned::LeaseKeeper;
use atoll_volume::shared::access::keepers::volume_members;
use atoll_volume::shared::access::{
    self, AccessError, Credentials, GroupRecord, ReaderRecord, RebindReport, VolumeRecord,
};
use atoll_volume::shared::inode::InodeKey;
use atoll_volume::shared::sealing::Sealing;

use crate::failure::{Exit, Failure, TRY_AGAIN};
use crate::messages::note;
use crate::moment::Moment;
use crate::output::escaped;
use crate::own_volume;
use crate::units;

/// Between two lines of progress.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// A shared volume whose key is on this node.
pub(crate) struct Owned {
    /// Its name here.
    pub name: String,
    /// Signs its record and rebindings.
    pub key: SecretKey,
    /// What the ring says of it.
    pub record: VolumeRecord,
    /// The same block on the node's way to the ring.
    pub blocks: Arc<dyn Blocks>,
    client: Arc<Client>,
}

/// The failure to show for `error`.
pub(crate) fn failure(what: &str, error: AccessError) -> Failure {
    match error {
        AccessError::Get(error) => Failure::get(what, &error),
        AccessError::Put(error) => Failure::put(what, &error),
        AccessError::NoGroup
        | AccessError::NoVolume
        | AccessError::NoReaders
        | AccessError::NoKeepers
        | AccessError::NotMember => Failure::new(Exit::NotFound, what).because(error),
        AccessError::TooLong(_) | AccessError::Past | AccessError::BadUser => {
            Failure::new(Exit::Usage, what).because(error)
        }
        AccessError::Bad { .. } | AccessError::NoEpoch | AccessError::IsKeeper => {
            Failure::new(Exit::Failed, what).because(error)
        }
    }
}

/// The shared volume of this name, which was made on this node.
pub(crate) async fn owned(client: Arc<Client>, name: &str, what: &str) -> Result<Owned, Failure> {
    let key = own_volume::find(&client, name, what).await?.key;
    let blocks: Arc<dyn Blocks> = client.clone();
    match access::read_volume(&blocks, key.volume_id()).await {
        Ok(Some((_, record))) => Ok(Owned { name: name.to_owned(), key, record, blocks, client }),
        Ok(None) => Err(failure(what, AccessError::NoVolume)),
        Err(AccessError::Bad { .. }) => Err(Failure::new(Exit::Failed, what)
            .because("it is not a shared volume: only you write it")
            .advice("`atoll volume create NAME --shared` makes one that others may write.")),
        Err(error) => Err(failure(what, error)),
    }
}

impl Owned {
    /// The key of the group that new members are added to.
    pub(crate) fn default_group(&self) -> SecretKey {
        volume_group(&self.key, self.record.group_epoch)
    }

    /// Who belongs to that group.
    pub(crate) async fn members(&self, what: &str) -> Result<GroupRecord, Failure> {
        Ok(self.members_and_strangers(what).await?.0)
    }

    /// Who belongs to that group; and users whom a keeper has put there, and not the owner.
    pub(crate) async fn members_and_strangers(
        &self,
        what: &str,
    ) -> Result<(GroupRecord, Vec<UserId>), Failure> {
        let found = volume_members(&self.blocks, &self.key, &self.record).await;
        found.map_err(|error| failure(what, error))
    }

    /// Who renews the members' certificates beside this node.
    pub(crate) async fn keepers(&self, what: &str) -> Result<Vec<UserId>, Failure> {
        if !self.record.has_keepers {
            return Ok(Vec::new());
        }
        let record = access::read_keepers(&self.blocks, self.key.volume_id()).await;
        let record = record
            .map_err(|error| failure(what, error))?
            .ok_or_else(|| failure(what, AccessError::NoKeepers))?;
        Ok(record.keepers.into_keys().collect())
    }

    /// Who may read it; none if it is not encrypted.
    pub(crate) async fn readers(&self, what: &str) -> Result<ReaderRecord, Failure> {
        if !self.record.is_encrypted {
            return Ok(ReaderRecord::default());
        }
        let record = access::read_readers(&self.blocks, self.key.volume_id()).await;
        record
            .map_err(|error| failure(what, error))?
            .ok_or_else(|| failure(what, AccessError::NoReaders))
    }

    /// Opens and seals its blocks.
    fn sealing(&self) -> Sealing {
        Sealing::of_owner(&self.key, self.record.read_epoch())
    }

    /// Makes the node renew the lease of the volume's new record.
    pub(crate) async fn keep(&self, record: SignedBlock, what: &str) -> Result<(), Failure> {
        let kept = own_volume::KeepVersions::new(self.client.clone(), &self.name);
        let kept = kept.keep(record, Vec::new()).await;
        kept.map_err(|error| Failure::new(Exit::Failed, what).because(error))
    }

    /// The inode at a path.
    pub(crate) async fn find(&self, path: &str, what: &str) -> Result<InodeKey, Failure> {
        let names = path.split('/').filter(|name| !name.is_empty() && *name != ".");
        let names: Vec<Vec<u8>> = names.map(|name| name.as_bytes().to_vec()).collect();
        let (root, sealing) = (self.record.root, self.sealing());
        let found = access::rebind::find(&self.blocks, root, &names, &sealing).await;
        found.map_err(|error| failure(what, error))?.ok_or_else(|| {
            Failure::new(Exit::NotFound, what)
                .because(format!("there is no {path} in {}", self.name))
        })
    }

    /// Gives everything from `top` down what `groups` makes of its groups, and says how far it is.
    ///
    /// # Errors
    /// If an inode could not be changed; the others were.
    pub(crate) async fn rebind(
        &self,
        env: &Env,
        user: Option<SecretKey>,
        top: InodeKey,
        groups: &(dyn Fn(&[GroupId]) -> Vec<GroupId> + Sync),
        (what, quiet): (&str, bool),
    ) -> Result<RebindReport, Failure> {
        let credentials = Credentials::new(env.clone(), self.blocks.clone(), user);
        let mut told = Instant::now();
        let mut progress = |report: &RebindReport| {
            if !quiet && told.elapsed() >= LINE_EVERY {
                told = Instant::now();
                note!("{} so far, {} changed", inodes(report.inodes), report.changed);
            }
        };
        let (blocks, sealing) = (&self.blocks, self.sealing());
        let owner = (&self.key, &sealing);
        let report =
            access::rebind(env, blocks, owner, &credentials, top, groups, &mut progress).await;
        if report.failed == 0 {
            if report.is_unsettled {
                return Err(Failure::new(Exit::Incomplete, what)
                    .because("members go on making files for those who may write now no more")
                    .advice(TRY_AGAIN));
            }
            return Ok(report);
        }
        for (path, why) in &report.named {
            note!("{}/{}: {why}", self.name, escaped(path));
        }
        let why = format!("{} of {} could not be changed", report.failed, inodes(report.inodes));
        Err(Failure::new(Exit::Incomplete, what).because(why).advice(TRY_AGAIN))
    }
}

/// So many files and directories.
pub(crate) fn inodes(count: u64) -> String {
    units::counted(count, "file or directory", "files and directories")
}

/// The groups that may write the root directory of a volume.
pub(crate) async fn root_groups(
    blocks: &Arc<dyn Blocks>,
    volume: VolumeId,
    what: &str,
) -> Result<Vec<GroupId>, Failure> {
    let found = access::read_volume(blocks, volume).await;
    let found = found.map_err(|error| failure(what, error))?;
    let (_, record) = found.ok_or_else(|| failure(what, AccessError::NoVolume))?;
    let groups = access::rebind::groups_of(blocks, record.root).await;
    groups.map_err(|error| failure(what, error))
}

/// A user or a group on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Grantee {
    /// `atolluser:KEY`, or `LABEL=atolluser:KEY`.
    User(UserId, String),
    /// `atollgroup:KEY`.
    Group(GroupId),
    /// A member's label, or the name of a group that the user has made.
    Name(String),
}

impl Grantee {
    /// Reads an argument, for clap.
    pub(crate) fn parse(text: &str) -> Result<Grantee, String> {
        if text.starts_with("atollgroup:") {
            let group: GroupAddress = text.parse().map_err(|error| format!("{error}"))?;
            return Ok(Grantee::Group(group.0));
        }
        let (label, user) = match text.split_once('=') {
            Some((label, user)) => (label, user),
            None => ("", text),
        };
        if user.starts_with("atolluser:") {
            let user: UserAddress = user.parse().map_err(|error| format!("{error}"))?;
            return Ok(Grantee::User(user.0, label.to_owned()));
        }
        match text.contains([':', '=', '/']) || text.is_empty() {
            true => {
                Err("a user is atolluser:KEY or LABEL=atolluser:KEY, as `atoll id` prints it; \
                         a group atollgroup:KEY, or the name of one of yours"
                    .to_owned())
            }
            false => Ok(Grantee::Name(text.to_owned())),
        }
    }
}

/// The member of a group that an argument means.
pub(crate) fn find_member(
    record: &GroupRecord,
    named: &Grantee,
    what: &str,
) -> Result<UserId, Failure> {
    find_user(record, &ReaderRecord::default(), named, what)
}

/// The same among the members of a volume's default group and its readers.
pub(crate) fn find_user(
    record: &GroupRecord,
    readers: &ReaderRecord,
    named: &Grantee,
    what: &str,
) -> Result<UserId, Failure> {
    let label = match named {
        Grantee::User(user, _) => return Ok(*user),
        Grantee::Group(_) => {
            return Err(Failure::new(Exit::Usage, what).because("a group is no member of a group"));
        }
        Grantee::Name(label) => label,
    };
    let members = record.members.iter().map(|(user, member)| (user, &member.label));
    // Members of a reading group are removed from that.
    let readers = readers.readers.iter().filter(|(_, reader)| reader.group.is_none());
    let readers = readers.map(|(user, reader)| (user, &reader.label));
    let labelled = members.chain(readers).filter(|(_, theirs)| *theirs == label);
    let mut found = labelled.map(|(user, _)| *user).collect::<BTreeSet<_>>().into_iter();
    match (found.next(), found.next()) {
        (Some(user), None) => Ok(user),
        (Some(_), Some(_)) => Err(Failure::new(Exit::Failed, what)
            .because(format!("several members are called {label}"))
            .advice("Name the one by atolluser:KEY.")),
        (None, _) => {
            Err(Failure::new(Exit::NotFound, what).because(format!("no member is called {label}")))
        }
    }
}

/// A moment as seconds since 1970; 0 if none was said.
pub(crate) fn until_secs(until: Option<Moment>) -> u64 {
    until.map_or(0, |until| (until.unix_ms / 1000).max(1))
}

/// Says until when somebody is a member.
pub(crate) fn until_text(until_secs: u64) -> String {
    match until_secs {
        0 => "without an end".to_owned(),
        secs => format!("until {} UTC", units::unix_date(secs)),
    }
}

/// A member in a list: label, end, key.
pub(crate) fn member_lines(record: &GroupRecord) -> Vec<String> {
    let members = record.members.iter();
    members.map(|(user, member)| user_line(user, &member.label, member.until_secs)).collect()
}

fn user_line(user: &UserId, label: &str, until_secs: u64) -> String {
    let label = match label {
        "" => "-".to_owned(),
        label => escaped(label.as_bytes()),
    };
    format!("{label:<16}  {:<28}  {}", until_text(until_secs), UserAddress(*user))
}

/// Those who may read a volume and are not among these members, in a list.
pub(crate) fn reader_lines(record: &ReaderRecord, members: &GroupRecord) -> Vec<String> {
    let readers = record.readers.iter().filter(|(user, _)| !members.members.contains_key(user));
    let group = |group| format!("  by {}", GroupAddress(group));
    let by = |reader: &access::Reader| reader.group.map(group).unwrap_or_default();
    let line = |(user, reader): (&UserId, &access::Reader)| {
        format!("{}{}", user_line(user, &reader.label, reader.until_secs), by(reader))
    };
    readers.map(line).collect()
}

/// The keepers of a volume, in a list.
pub(crate) fn keeper_lines(keepers: &[UserId], members: &GroupRecord) -> Vec<String> {
    let line = |user: &UserId| {
        let label = members.members.get(user).map_or("", |member| &member.label[..]);
        user_line(user, label, 0)
    };
    keepers.iter().map(line).collect()
}

/// A reader of an encrypted volume, as JSON.
#[derive(serde::Serialize)]
pub(crate) struct JsonReader {
    user: String,
    label: String,
    until_unix_secs: Option<u64>,
    /// The group whose member the user is, if that is why.
    group: Option<String>,
}

/// The readers of a volume, as JSON.
pub(crate) fn json_readers(record: &ReaderRecord) -> Vec<JsonReader> {
    let reader = |(user, reader): (&UserId, &access::Reader)| JsonReader {
        user: UserAddress(*user).to_string(),
        label: reader.label.clone(),
        until_unix_secs: Some(reader.until_secs).filter(|secs| *secs > 0),
        group: reader.group.map(|group| GroupAddress(group).to_string()),
    };
    record.readers.iter().map(reader).collect()
}

/// A member, as JSON.
#[derive(serde::Serialize)]
pub(crate) struct JsonMember {
    user: String,
    label: String,
    until_unix_secs: Option<u64>,
    certified_until_unix_secs: u64,
}

/// The members of a group, as JSON.
pub(crate) fn json_members(record: &GroupRecord) -> Vec<JsonMember> {
    let member = |(user, member): (&UserId, &access::Member)| JsonMember {
        user: UserAddress(*user).to_string(),
        label: member.label.clone(),
        until_unix_secs: Some(member.until_secs).filter(|secs| *secs > 0),
        certified_until_unix_secs: member.certificate.not_after_secs,
    };
    record.members.iter().map(member).collect()
}

#[cfg(test)]
mod tests {
    use atoll_key::kinds::certified::Certificate;

    use super::*;

    #[test]
    fn users_and_groups_are_told_apart() {
        let (user, group) = (UserId([7; 32]), GroupId([7; 32]));
        let (shown_user, shown_group) =
            (UserAddress(user).to_string(), GroupAddress(group).to_string());
        assert_eq!(Grantee::parse(&shown_user), Ok(Grantee::User(user, String::new())));
        let labelled = Grantee::parse(&format!("alice={shown_user}"));
        assert_eq!(labelled, Ok(Grantee::User(user, "alice".into())));
        assert_eq!(Grantee::parse(&shown_group), Ok(Grantee::Group(group)));
        assert_eq!(Grantee::parse("band"), Ok(Grantee::Name("band".into())));
        let cut = &shown_user[..shown_user.len() - 4];
        assert!(Grantee::parse(cut).expect_err("cut short").contains("mistyped"));
        for wrong in ["", "alice=bob", "atoll:abc", "a/b"] {
            assert!(Grantee::parse(wrong).expect_err("no user").contains("atoll id"), "{wrong}");
        }
    }

    #[test]
    fn a_member_is_found_by_a_label_that_one_has() {
        let group = SecretKey::from_seed(&[1; 32]);
        let member = |n: u8, label: &str| {
            let user = UserId([n; 32]);
            let certificate = Certificate::issue(&group, user, 0, 1);
            (user, access::Member { certificate, label: label.into(), until_secs: 0 })
        };
        let members = [member(1, "alice"), member(2, "bob"), member(3, "bob")].into();
        let record = GroupRecord { label: String::new(), members };
        let find = |name: &str| find_member(&record, &Grantee::Name(name.into()), "x");
        assert_eq!(find("alice").expect("one"), UserId([1; 32]));
        assert_eq!(find("bob").expect_err("two").exit, Exit::Failed);
        assert_eq!(find("carol").expect_err("none").exit, Exit::NotFound);
        let lines = member_lines(&record).join("\n");
        assert!(lines.contains("alice") && lines.contains("without an end"), "{lines}");
    }
}
