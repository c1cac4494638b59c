//! `atoll log`: the versions of files and directories of a mounted shared volume that are kept.
//!
//! The mount says them, as extended attributes: `user.atoll.log.NAME` of a directory, for all files that have had the name
//! there, and `user.atoll.log` of a file. `volume::shared::fs::history::log` has the format.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use serde::Serialize;

use crate::beneath::Directory;
use crate::failure::{Exit, Failure};
use crate::moment;
use crate::mounted_past::InMount;
use crate::output::{Output, Part, json_text};
use crate::units;

/// The attribute of a file in a mount; with a dot and a name behind, that of a directory for the name.
const XATTR: &str = "user.atoll.log";

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
    let mount = InMount::of(path, what)?;
    let text = text_of(&mount, mount.path(), what)?;
    let lines = text.lines().map(|line| parse(path, line));
    let bad =
        || Failure::new(Exit::Failed, what).because("the mount is of another program version");
    lines.map(|line| line.ok_or_else(bad)).collect()
}

/// What the mount says of a path below its root.
fn text_of(mount: &InMount, below: &Path, what: &str) -> Result<String, Failure> {
    let failed = |error: &io::Error| Failure::io(what, error);
    let (Some(above), Some(name)) = (below.parent(), below.file_name()) else {
        let root = mount.directory(below).map_err(|error| failed(&error))?;
        return said_of(&root, OsStr::new("."), XATTR.as_ref()).map_err(|error| failed(&error));
    };
    let (directory, is_there) = there_or_then(mount, above, what)?;
    let xattr = [XATTR.as_bytes(), b".", name.as_bytes()].concat();
    let by_name = said_of(&directory, OsStr::new("."), OsStr::from_bytes(&xattr));
    let by_name = by_name.unwrap_or_default();
    if !by_name.is_empty() {
        return Ok(by_name);
    }
    // A file that is just being made, or a name that is too long for an attribute.
    let present = match is_there {
        true => said_of(&directory, name, XATTR.as_ref()),
        false => Err(io::ErrorKind::NotFound.into()),
    };
    present.map_err(|error| match Errno::from_io_error(&error) {
        _ if error.kind() == io::ErrorKind::NotFound => Failure::new(Exit::NotFound, what)
            .because("it is not there, and in no state that is kept"),
        Some(Errno::NODATA) => Failure::new(Exit::Usage, what)
            .because("it is not a file or directory of a mounted shared volume"),
        _ => failed(&error),
    })
}

/// An attribute of what has a name in a directory.
fn said_of(directory: &Directory, name: &OsStr, xattr: &OsStr) -> io::Result<String> {
    let value = directory.hold(name)?.xattr(xattr)?;
    Ok(String::from_utf8_lossy(&value).into_owned())
}

/// A directory of the mount and whether it is there, or where it was last.
fn there_or_then(mount: &InMount, below: &Path, what: &str) -> Result<(Directory, bool), Failure> {
    let error = match mount.directory(below) {
        Ok(directory) => return Ok((directory, true)),
        Err(error) => error,
    };
    let why = match Errno::from_io_error(&error) {
        Some(Errno::NOENT) => "is not there, and in no state that is kept",
        Some(Errno::NOTDIR | Errno::LOOP) => {
            "is no directory, nor was it one in a state that is kept; links in a mount are not followed"
        }
        _ => return Err(Failure::io(what, &error)),
    };
    let text = text_of(mount, below, what)?;
    let versions = text.lines().filter_map(|line| parse(below, line));
    let last = versions.filter(|version| version.kind.as_deref() == Some("directory"));
    let state = last.filter_map(|version| version.state).next().ok_or_else(|| {
        Failure::new(Exit::NotFound, what)
            .because(format!("{} {why}", mount.shown(below).display()))
    })?;
    let then = mount.in_state(&state, below).map_err(|error| Failure::io(what, &error))?;
    Ok((then, false))
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
