//! The file systems that `atoll nfs` exports: volumes and transparent file systems.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use atoll_gateway::nfs::{self, Export};
use atoll_key::BlockHash;
use atoll_tfs::fs::{MountOptions, Tfs};
use atoll_vfs::{FileSystem, InodeNumber};
use clap::builder::TypedValueParser;

use super::servers::{self, ExportRecord};
use super::{Allowed, Anonymous, Args, Squash};
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::output::escaped;
use crate::read_key::{Given, ReadKeyArgs};
use crate::served_volume::ServedVolume;
use crate::tfs;
use crate::volume_target::Target;

/// Memory for a TFS' own blocks, as of `atoll tfs mount`.
const TFS_CACHE_BYTES: usize = 16 << 20;
/// How long a volume may take to say how it is.
const STATUS_LIMIT: Duration = Duration::from_secs(1);
/// Characters of a volume's key in the path of its export, as in the kernel's table of mounts.
const KEY_CHARS: usize = 12;

/// An argument of `atoll nfs`.
#[derive(Clone, Debug)]
pub(super) enum Exported {
    /// A volume.
    Volume(Target),
    /// The image or the device of a TFS.
    Tfs(PathBuf),
}

impl Exported {
    /// Reads an argument, for clap.
    pub(super) fn parser() -> impl TypedValueParser<Value = Exported> {
        ExportedParser
    }

    /// The path by which clients mount it; none if its name is no text.
    pub(super) fn path(&self) -> Option<String> {
        let name = match self {
            Exported::Volume(Target::Address(address)) => {
                let key = address.volume.to_string();
                let (_, key) = key.split_once(':').expect("an address has a scheme");
                let at = address.at.map(|at| format!("@{at}")).unwrap_or_default();
                format!("{}{at}", &key[..KEY_CHARS])
            }
            Exported::Volume(target @ Target::Name(..)) => target.to_string(),
            Exported::Tfs(path) => path.file_name()?.to_str()?.to_owned(),
        };
        Some(format!("/{name}"))
    }

    /// It as an argument, whatever the working directory is.
    pub(super) fn argument(&self) -> io::Result<OsString> {
        match self {
            Exported::Volume(target) => Ok(target.to_string().into()),
            Exported::Tfs(path) => std::path::absolute(path).map(PathBuf::into_os_string),
        }
    }
}

impl fmt::Display for Exported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Exported::Volume(target) => target.fmt(f),
            Exported::Tfs(path) => f.write_str(&escaped(path.as_os_str().as_bytes())),
        }
    }
}

/// Parses what has a slash and is no address as a path, anything else as a volume.
#[derive(Clone)]
struct ExportedParser;

impl TypedValueParser for ExportedParser {
    type Value = Exported;

    fn parse_ref(
        &self,
        command: &clap::Command,
        argument: Option<&clap::Arg>,
        text: &OsStr,
    ) -> Result<Exported, clap::Error> {
        let bytes = text.as_bytes();
        match bytes.contains(&b'/') && !bytes.starts_with(b"atoll:") {
            true => Ok(Exported::Tfs(text.into())),
            false => Target::parser().parse_ref(command, argument, text).map(Exported::Volume),
        }
    }
}

/// The read key that the process in the background is given: of at most one address.
pub(super) fn read_key_for(
    all: &[Exported],
    args: &ReadKeyArgs,
    what: &str,
) -> Result<Option<String>, Failure> {
    let addresses: Vec<_> = all
        .iter()
        .filter_map(|exported| match exported {
            Exported::Volume(Target::Address(address)) => Some(address),
            _ => None,
        })
        .collect();
    if addresses.is_empty() {
        // The node has the keys of its own volumes.
        return Ok(None);
    }
    let given = args.given()?;
    let mut keys = Vec::new();
    for address in addresses {
        keys.extend(given.key_for(address)?.key.map(|key| key.to_text()));
    }
    keys.dedup();
    match keys.len() {
        0 | 1 => Ok(keys.pop()),
        _ => Err(Failure::new(Exit::Usage, what)
            .because("two encrypted volumes are read with different keys")
            .advice("Serve each by its own command, with another --listen.")),
    }
}

/// A file system that is open to be served.
pub(super) struct OpenExport {
    export: Export,
    what: String,
    opened: OpenedFileSystem,
}

enum OpenedFileSystem {
    Volume(ServedVolume),
    Tfs(Tfs),
}

impl OpenExport {
    /// Opens a volume or a TFS.
    pub(super) async fn open(
        exported: &Exported,
        args: &Args,
        read_key: &Given,
        global: &Global,
    ) -> Result<OpenExport, Failure> {
        let what = format!("cannot serve {exported}");
        let (opened, fs, id, read_only): (_, Arc<dyn FileSystem>, _, _) = match exported {
            Exported::Volume(target) => {
                let handles = servers::place(&global.dir()?).join("handles");
                let place = (global, Some(&*handles));
                let volume = ServedVolume::open(target, &args.volume, read_key, place, &what).await;
                let volume = volume.map_err(|failure| file_of_that_name(failure, exported))?;
                let time = match target {
                    Target::Address(address) => address.at,
                    Target::Name(_, at) => *at,
                };
                let at_ms = time.map_or(0, |at| at.unix_ms).to_be_bytes();
                // A volume may be served by its name and by its address, too.
                let view = [u8::from(matches!(target, Target::Address(_)))];
                let id = export_id(&[&view, &volume.identity, &at_ms]);
                let (fs, read_only) = (volume.fs.clone(), volume.read_only);
                (OpenedFileSystem::Volume(volume), fs, id, read_only)
            }
            Exported::Tfs(path) => {
                let options = MountOptions {
                    read_only: args.read_only,
                    cache_bytes: TFS_CACHE_BYTES,
                    ..MountOptions::default()
                };
                let (tfs, report) = tfs::open(path, &options)?;
                tracing::info!(?report, "the file system is open");
                let id = export_id(&[&tfs.uuid()]);
                (OpenedFileSystem::Tfs(tfs.clone()), Arc::new(tfs), id, false)
            }
        };
        let Anonymous(uid, gid) = args.anonymous;
        let mut export = Export {
            read_only: read_only || args.read_only,
            squash: match args.squash {
                Squash::Root => nfs::Squash::Root,
                Squash::All => nfs::Squash::All,
                Squash::None => nfs::Squash::None,
            },
            anonymous: (uid, gid),
            privileged_ports: !args.any_port,
            answers_early: args.answers_early,
            ..Export::local(&args.path_of(exported)?, id, fs)
        };
        if !args.allow.is_empty() {
            export.clients = args.allow.iter().map(|Allowed(network)| *network).collect();
        }
        Ok(OpenExport { export, what: exported.to_string(), opened })
    }

    /// As the gateway serves it.
    pub(super) fn export(&self) -> Export {
        self.export.clone()
    }

    /// The export's number in file handles.
    pub(super) fn id(&self) -> u64 {
        self.export.id
    }

    /// The path by which clients mount it.
    pub(super) fn path(&self) -> &str {
        &self.export.path
    }

    /// The export's entry in the server's record.
    pub(super) async fn told(&self) -> ExportRecord {
        let status = match &self.opened {
            OpenedFileSystem::Tfs(tfs) => tfs.failure().map(str::to_owned),
            OpenedFileSystem::Volume(volume) => {
                let asked = volume.fs.getxattr(InodeNumber::ROOT, b"user.atoll.status");
                let status = tokio::time::timeout(STATUS_LIMIT, asked).await;
                status.ok().and_then(Result::ok).map(|s| String::from_utf8_lossy(&s).into_owned())
            }
        };
        ExportRecord {
            path: self.export.path.clone(),
            what: self.what.clone(),
            read_only: self.export.read_only,
            status,
        }
    }

    /// Stores what clients have written. Called once no call is made any more.
    pub(super) async fn end(self) -> Result<(), Failure> {
        let OpenExport { export, what, opened } = self;
        drop(export);
        match opened {
            OpenedFileSystem::Volume(volume) => volume.end().await,
            OpenedFileSystem::Tfs(tfs) => tfs.unmount().map_err(|errno| {
                Failure::new(Exit::Failed, format!("{what} was not closed in order"))
                    .because(tfs.failure().map_or_else(|| errno.to_string(), str::to_owned))
                    .advice("The next mount makes it whole.")
            }),
        }
    }
}

/// Tells clients' file systems apart, also after a restart.
fn export_id(parts: &[&[u8]]) -> u64 {
    let all = [&[&b"atoll nfs export"[..]], parts].concat().concat();
    let hash = BlockHash::of(&all).0;
    u64::from_be_bytes(*hash.first_chunk().expect("a hash has 32 bytes"))
}

/// Somebody may have meant a file by the name of a volume that is not there.
pub(super) fn file_of_that_name(failure: Failure, exported: &Exported) -> Failure {
    match exported {
        Exported::Volume(Target::Name(name, None))
            if matches!(failure.exit, Exit::NotFound | Exit::NoNode)
                && PathBuf::from(name).is_file() =>
        {
            failure.advice(format!("If you mean the file of that name: ./{name}"))
        }
        _ => failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Exported, clap::Error> {
        Exported::parser().parse_ref(&clap::Command::new("x"), None, OsStr::new(text))
    }

    #[test]
    fn what_has_a_slash_is_a_path_and_all_else_a_volume() {
        let path = |text| parse(text).expect("valid").path().expect("a text");
        assert_eq!(path("work"), "/work");
        assert_eq!(path("work@2026-11-20"), "/work@2026-11-20T00:00Z");
        assert_eq!(path("./disk.img"), "/disk.img");
        assert_eq!(path("/dev/sdb1"), "/sdb1");
        assert!(matches!(parse("./disk.img"), Ok(Exported::Tfs(_))));
        assert!(parse("atoll:nonsense").is_err() && parse("atoll:nonsense/x").is_err());
        assert_eq!(parse("..//").expect("a path").path(), None);
    }
}
