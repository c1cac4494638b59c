//! `atoll log`: the versions of files and directories of a mounted shared volume that are kept.
//!
//! The mount says them, as extended attributes: `user.atoll.log.NAME` of a directory, for all files that have had the name
//! there, and `user.atoll.log` of a file. `volume::shared::fs::history::log` has the format.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::beneath::Directory;
use crate::failure::{Exit, Failure};
use crate::moment;
use crate::mounted_past::InMount;
use crate::output::{Output, Part, json_text};
use crate::units;

/// The attribute of a file in a mount; with a dot and a name behind, that of a directory for the name.
const XATTR: &str = "user.atoll.log";
/// The kernel takes no longer one.
const MAX_BYTES: usize = 64 << 10;

/// Arguments of `atoll log`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll log ~/team/plan.txt
  atoll log --json ~/team/plans | jq -r .state

The present version comes first. An old one is kept if it was there at a full minute, ten minutes or hour (or what else the
volume's --keep says), for as long as that says, and some are that were replaced sooner. STATE is a time at which it
was there: `atoll restore PATH --at STATE` brings it back, and .atoll/history/STATE in the root of the mount shows all
that was there then. All times are UTC.
Versions are those of all files that have had the PATH: what was removed is found by it, and so is what an editor has
replaced by a new file. A file that was moved keeps its versions; those without a STATE had another name.")]
pub(crate) struct Args {
    /// Files or directories of mounted shared volumes
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<PathBuf>,

    /// One JSON object for each version, on a line of its own
    #[arg(long)]
    json: bool,
}

#[derive(Serialize, Debug, PartialEq)]
struct Version {
    path: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    path_hex: Option<String>,
    what: String,
    time: String,
    unix_ms: u64,
    user: String,
    label: Option<String>,
    state: Option<String>,
    kind: Option<String>,
    size: Option<u64>,
}

/// Lists them.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let mut output = Output::new();
    for path in &args.paths {
        let what = format!("cannot list the versions of {}", path.display());
        let versions = versions(path, &what)?;
        if args.paths.len() > 1 && !args.json {
            output.parts(&[Part::Name(path.as_os_str().as_bytes()), Part::Words(":")])?;
        }
        for version in &versions {
            if args.json { output.json(version)? } else { show(&mut output, version)? }
        }
    }
    output.flush()
}

fn versions(path: &Path, what: &str) -> Result<Vec<Version>, Failure> {
    let text = text_of(path, what)?;
    let lines = text.lines().map(|line| parse(path, line));
    let bad =
        || Failure::new(Exit::Failed, what).because("the mount is of another program version");
    lines.map(|line| line.ok_or_else(bad)).collect()
}

/// What the mount says of a path.
fn text_of(path: &Path, what: &str) -> Result<String, Failure> {
    let by_name = match path.file_name() {
        Some(name) => {
            let directory = there_or_then(directory_of(path), what)?;
            let xattr = [XATTR.as_bytes(), b".", name.as_bytes()].concat();
            let held = directory.hold(OsStr::new("."));
            let value = held.and_then(|held| held.xattr(OsStr::from_bytes(&xattr)));
            String::from_utf8_lossy(&value.unwrap_or_default()).into_owned()
        }
        None => String::new(),
    };
    if !by_name.is_empty() {
        return Ok(by_name);
    }
    // The root of a mount, a file that is just being made, or a name that is too long for an attribute.
    let mut value = vec![0; MAX_BYTES];
    let present = rustix::fs::lgetxattr(path, XATTR, &mut value).map_err(io::Error::from);
    let present = present.map(|len| String::from_utf8_lossy(&value[..len]).into_owned());
    present.map_err(|error| {
        if error.kind() == io::ErrorKind::NotFound {
            return match InMount::of(path, what) {
                Ok(_) => Failure::new(Exit::NotFound, what)
                    .because("it is not there, and in no state that is kept"),
                Err(failure) => failure,
            };
        }
        match error.raw_os_error() == Some(rustix::io::Errno::NODATA.raw_os_error()) {
            true => Failure::new(Exit::Usage, what)
                .because("it is not a file or directory of a mounted shared volume"),
            false => Failure::io(what, &error),
        }
    })
}

fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A directory, or where it was last.
fn there_or_then(directory: &Path, what: &str) -> Result<Directory, Failure> {
    if directory.is_dir() {
        return Directory::open(directory).map_err(|error| Failure::io(what, &error));
    }
    let place = InMount::of(directory, what)?;
    let text = text_of(directory, what)?;
    let versions = text.lines().filter_map(|line| parse(directory, line));
    let last = versions.filter(|version| version.kind.as_deref() == Some("directory"));
    let state = last.filter_map(|version| version.state).next().ok_or_else(|| {
        Failure::new(Exit::NotFound, what)
            .because(format!("{} is not there, and in no state that is kept", directory.display()))
    })?;
    place.in_state(&state).map_err(|error| Failure::io(what, &error))
}

fn parse(path: &Path, line: &str) -> Option<Version> {
    let fields: Vec<&str> = line.split('\t').collect();
    let [what, unix_ms, user, state, kind, size, label] = fields[..] else { return None };
    let unix_ms = unix_ms.parse().ok()?;
    let given = |field: &str| Some(field.to_owned()).filter(|field| field != "-");
    let (path, path_hex) = json_text(path.as_os_str().as_bytes());
    Some(Version {
        path,
        path_hex,
        what: what.to_owned(),
        time: moment::written(unix_ms),
        unix_ms,
        user: user.to_owned(),
        label: Some(label.to_owned()).filter(|label| !label.is_empty()),
        state: given(state),
        kind: given(kind),
        size: given(size).and_then(|size| size.parse().ok()),
    })
}

fn show(output: &mut Output, version: &Version) -> Result<(), Failure> {
    let size = match (version.kind.as_deref(), version.size) {
        (Some("directory"), Some(entries)) => units::counted(entries, "name", "names"),
        (_, Some(bytes)) => units::size(bytes),
        (_, None) => String::new(),
    };
    let who = version.label.clone().unwrap_or_else(|| version.user.chars().take(8).collect());
    let note = match (&*version.what, &version.state) {
        ("past", Some(state)) => format!("state {state}"),
        (what, _) => what.to_owned(),
    };
    output.parts(&[
        Part::Words(&format!("{}  {size:>10}  ", version.time)),
        Part::Name(format!("{who:<16}").as_bytes()),
        Part::Words(&format!("  {note}")),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_mount_are_read() {
        let path = Path::new("f");
        let past = "past\t1795176005000\t0123\t2026-11-20T13:00Z\tfile\t12\talice";
        let past = parse(path, past).expect("a line");
        assert_eq!((past.time.as_str(), past.size), ("2026-11-20T12:00:05Z", Some(12)));
        assert_eq!(past.state.as_deref(), Some("2026-11-20T13:00Z"));
        assert_eq!(past.label.as_deref(), Some("alice"));
        let removed = parse(path, "removed\t1\t0123\t-\t-\t-\t").expect("a line");
        assert_eq!((removed.state, removed.kind, removed.size), (None, None, None));
        assert_eq!(removed.label, None);
        for wrong in ["", "past", "past\tx\t0123\t-\tfile\t12\t", "past\t1\t2\t3\t4\t5\t6\t7"] {
            assert_eq!(parse(path, wrong), None, "{wrong}");
        }
    }
}
