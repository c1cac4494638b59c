//! `atoll volume show`: all that is known of one of this node's volumes.

use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use atoll_dht::Blocks;
use atoll_key::{ReadAddress, UserAddress, UserId, VolumeAddress};
use atoll_node::VolumeStatus;
use atoll_volume::owned::{OpenError, Root, RootError, newest_root};
use serde::{Serialize, Serializer};

use crate::connection;
use crate::failure::Failure;
use crate::global::Global;
use crate::joined_volume::{self, JoinedStatus};
use crate::output::{self, json_list};
use crate::own_volume;
use crate::shared_volume::{self, JsonMember, JsonReader};
use crate::units;
use crate::user;

/// Arguments of `atoll volume show`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll volume show work
  atoll volume show work --json | jq .writer
  atoll volume show diary --read-key          the address as its readers need it")]
pub(super) struct Args {
    /// The volume's name on this node
    name: String,

    /// Show the address of an encrypted volume with its read key
    #[arg(long)]
    read_key: bool,

    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// A volume of this node, as JSON.
#[derive(Serialize)]
struct Shown {
    #[serde(flatten)]
    status: VolumeStatus,
    /// `published` from a directory, written by `mounts`, or `shared`.
    kind: &'static str,
    /// What the ring has; absent if it has nothing.
    root: Option<ShownRoot>,
    /// Why that cannot be said, or why it has nothing.
    unread: Option<String>,
    writer: Option<Writer>,
    /// The members of a shared volume's default group, who may write it.
    #[serde(skip_serializing_if = "Option::is_none")]
    members: Option<Vec<JsonMember>>,
    /// Who may read an encrypted shared volume, its members included.
    #[serde(skip_serializing_if = "Option::is_none")]
    readers: Option<Vec<JsonReader>>,
    /// Members whose nodes renew the members' certificates beside this one.
    #[serde(skip_serializing_if = "Option::is_none")]
    keepers: Option<Vec<String>>,
    /// Users in the group's record whom the owner has not put there.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    strangers: Vec<String>,
    #[serde(skip)]
    member_lines: Vec<String>,
    #[serde(skip)]
    keeper_lines: Vec<String>,
    #[serde(skip)]
    reader_lines: Vec<String>,
}

/// A volume of another node that was joined here, as JSON.
#[derive(Serialize)]
struct ShownJoined<'a> {
    name: &'a str,
    address: &'a str,
    kind: &'static str,
    encrypted: bool,
    joined: &'a JoinedStatus,
    members: Vec<JsonMember>,
}

impl ShownJoined<'_> {
    fn of(joined: &JoinedStatus) -> ShownJoined<'_> {
        ShownJoined {
            name: &joined.name,
            address: &joined.address,
            kind: "joined",
            encrypted: joined.is_encrypted,
            joined,
            members: joined.groups.iter().flat_map(shared_volume::json_members).collect(),
        }
    }
}

fn describe_joined(joined: &JoinedStatus) -> Vec<String> {
    let mut fields = vec![
        ("address", joined.address.clone()),
        ("kind", "shared, of another node".to_owned()),
        ("encrypted", if joined.is_encrypted { "yes" } else { "no" }.to_owned()),
        ("joined", format!("{}: {}", joined.member(), joined.user)),
        ("may write", joined.access()),
    ];
    let members = joined.groups.iter().flat_map(shared_volume::member_lines);
    fields.extend(members.map(|line| ("member", line)));
    fields.iter().map(|(name, value)| format!("{name:>10}  {value}")).collect()
}

#[derive(Serialize)]
struct ShownRoot {
    version: u64,
    written_unix_ms: u64,
    files: u64,
    dirs: u64,
    symlinks: u64,
    bytes: u64,
}

/// The mount that writes the volume.
#[derive(Serialize)]
struct Writer {
    /// For how long it has said so yet.
    left_secs: u64,
    /// Where it is, if it is on this machine.
    #[serde(flatten, serialize_with = "mounted_on_json")]
    mounted_on: Vec<PathBuf>,
}

fn mounted_on_json<S: Serializer>(paths: &[PathBuf], serializer: S) -> Result<S::Ok, S::Error> {
    json_list("mounted_on", paths.iter().map(|path| path.as_os_str().as_bytes()), serializer)
}

/// Shows it.
pub(super) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let name = &args.name;
    let (env, client) = connection::to_node(global).await?;
    let volumes = client.volumes().await.map_err(connection::failure)?;
    if volumes.iter().all(|volume| volume.name != *name)
        && let Some(joined) = user::joined(&global.dir()?, name)?
    {
        let blocks: Arc<dyn Blocks> = client;
        let joined = joined_volume::status(&env, &blocks, name, &joined).await;
        return output::show(args.json, &ShownJoined::of(&joined), describe_joined(&joined));
    }
    let mut status = own_volume::status(&client, name, &format!("cannot show {name}")).await?;
    let secret = client.volume_secret(name).await.map_err(connection::failure)?;
    let id = secret.key.volume_id();
    let found = newest_root(&*client, &id, secret.read_key.as_ref()).await;
    let claim = found.as_ref().ok().and_then(|(_, root)| own_volume::claim(&env, root));
    let writer = claim
        .map(|left| Writer { left_secs: left.as_secs(), mounted_on: own_volume::mounts(name, id) });
    if args.read_key {
        let volume = VolumeAddress(id);
        status.address = ReadAddress { volume, read_key: secret.read_key }.to_text();
    }
    let is_shared = matches!(found, Err(OpenError::Root(RootError::Shared)));
    let group = match is_shared {
        true => {
            let what = format!("cannot show who may write {name}");
            let owned = shared_volume::owned(client, name, &what).await?;
            status.encrypted = owned.record.is_encrypted;
            let keepers = owned.keepers(&what).await?;
            let (members, strangers) = owned.members_and_strangers(&what).await?;
            Some((members, owned.readers(&what).await?, keepers, strangers))
        }
        false => None,
    };
    let kind = match &status.source {
        Some(_) => "published",
        None if is_shared => "shared",
        None => "mounts",
    };
    let (root, unread) = match found {
        Ok((block, root)) => (Some(ShownRoot::of(block.version, &root)), None),
        Err(OpenError::Gone(_)) => (None, Some("nothing of it is on the ring".to_owned())),
        Err(OpenError::Root(RootError::Shared)) => (None, None),
        Err(error) => (None, Some(error.to_string())),
    };
    let mut shown = Shown { kind, root, unread, writer, ..Shown::of(status) };
    if let Some((group, record, keepers, strangers)) = &group {
        let text = |user: &UserId| UserAddress(*user).to_string();
        shown.members = Some(shared_volume::json_members(group));
        shown.member_lines = shared_volume::member_lines(group);
        shown.readers = shown.status.encrypted.then(|| shared_volume::json_readers(record));
        shown.reader_lines = shared_volume::reader_lines(record, group);
        shown.keepers = Some(keepers.iter().map(text).collect());
        shown.keeper_lines = shared_volume::keeper_lines(keepers, group);
        shown.strangers = strangers.iter().map(text).collect();
    }
    output::show(args.json, &shown, shown.describe())
}

impl ShownRoot {
    fn of(version: u64, root: &Root) -> ShownRoot {
        let Root { files, dirs, symlinks, bytes, published_unix_ms, .. } = *root;
        ShownRoot { version, written_unix_ms: published_unix_ms, files, dirs, symlinks, bytes }
    }
}

impl Shown {
    /// Of which nothing is known but what the node says.
    fn of(status: VolumeStatus) -> Shown {
        Shown {
            status,
            kind: "mounts",
            root: None,
            unread: None,
            writer: None,
            members: None,
            readers: None,
            keepers: None,
            strangers: Vec::new(),
            member_lines: Vec::new(),
            reader_lines: Vec::new(),
            keeper_lines: Vec::new(),
        }
    }

    fn describe(&self) -> Vec<String> {
        let status = &self.status;
        let mut fields = vec![
            ("address", status.address.clone()),
            (
                "kind",
                match &status.source {
                    Some(source) => format!("published from {source}"),
                    None if self.members.is_some() => "shared, written by its members".into(),
                    None => "written by mounts".into(),
                },
            ),
            ("encrypted", if status.encrypted { "yes" } else { "no" }.into()),
        ];
        if let Some(root) = &self.root {
            let written = units::unix_date(root.written_unix_ms / 1000);
            fields.push(("version", format!("{}, written {written} UTC", root.version)));
            let files = units::counted(root.files, "file", "files");
            let dirs = units::counted(root.dirs, "directory", "directories");
            let links = units::counted(root.symlinks, "link", "links");
            let size = units::size(root.bytes);
            fields.push(("holds", format!("{files}, {dirs}, {links}; {size}")));
        }
        let until = units::unix_date(status.lease_expires_unix_secs);
        match (status.root_version > 0, &self.members) {
            (true, None) => {
                let blocks = units::count(status.kept_blocks);
                let kept = format!("{blocks}, kept until {until} UTC without this node");
                fields.push(("blocks", kept));
            }
            // How many blocks members have written, only a walk of the whole volume would say.
            (true, Some(_)) => {
                let kept =
                    "by this node and those that have joined, which renew all leases each day";
                fields.push(("kept", kept.to_owned()));
            }
            (false, _) => {}
        }
        if status.lost_blocks > 0 {
            fields.push(("lost", units::counted(status.lost_blocks, "block", "blocks")));
        }
        match self.members {
            Some(_) => {
                fields.extend(self.member_lines.iter().map(|line| ("member", line.clone())));
                fields.extend(self.reader_lines.iter().map(|line| ("reader", line.clone())));
                fields.extend(self.keeper_lines.iter().map(|line| ("keeper", line.clone())));
                fields.extend(self.strangers.iter().map(|user| {
                    let why = "a keeper has put it into the group's record, and you have not";
                    ("stranger", format!("{user}: {why}"))
                }));
            }
            None => fields
                .push(("writer", self.writer.as_ref().map_or("none".into(), Writer::describe))),
        }
        if status.is_moved {
            let moved = "to another node, which has not taken over yet";
            fields.push(("moved", moved.into()));
        }
        let trouble = [&self.unread, &status.trouble].into_iter().flatten();
        fields.extend(trouble.map(|trouble| ("trouble", trouble.clone())));
        fields.iter().map(|(name, value)| format!("{name:>10}  {value}")).collect()
    }
}

impl Writer {
    fn describe(&self) -> String {
        let left = units::duration(Duration::from_secs(self.left_secs));
        match &self.mounted_on[..] {
            [] => format!("a mount on another machine, for {left} unless it says so again"),
            on => {
                let on: Vec<String> = on.iter().map(|path| path.display().to_string()).collect();
                format!("the mount on {}", on.join(", "))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_known_of_a_volume_is_shown() {
        let status = VolumeStatus {
            address: "atoll:abc".into(),
            lease_expires_unix_secs: 4_000_000_000,
            root_version: 3,
            kept_blocks: 12,
            lost_blocks: 1,
            trouble: Some("the ring is silent".into()),
            encrypted: true,
            is_moved: true,
            ..VolumeStatus::default()
        };
        let root = ShownRoot {
            version: 4,
            written_unix_ms: 4_000_000_000_000,
            files: 1,
            dirs: 2,
            symlinks: 0,
            bytes: 1 << 20,
        };
        let writer = |on: &[&str]| {
            let mounted_on = on.iter().map(PathBuf::from).collect();
            Some(Writer { left_secs: 90, mounted_on })
        };
        let shown = |writer| Shown { writer, ..Shown::of(status.clone()) };
        let whole = Shown { root: Some(root), ..shown(writer(&["/w"])) };
        let text = whole.describe().join("\n");
        for part in [
            "address  atoll:abc",
            "written by mounts",
            "encrypted  yes",
            "4, written 2096-10-02",
            "1 file, 2 directories, 0 links; 1.0 MiB",
            "12, kept until 2096-10-02",
            "1 block",
            "the mount on /w",
            "has not taken over yet",
            "the ring is silent",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let text = shown(writer(&[])).describe().join("\n");
        assert!(text.contains("on another machine, for 1m 30s"), "{text}");
        assert!(shown(None).describe().join("\n").contains("writer  none"));
    }
}
