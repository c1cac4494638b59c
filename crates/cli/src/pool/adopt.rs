//! `atoll pool adopt`: take over what was changed behind a pool's back on this machine, and was set aside.
//!
//! A scrub (`atoll pool check`) undoes such changes, and puts what was changed under `FILES/.atoll/aside`, at the path that it had in the
//! pool. Taking a file over writes its bytes to that path as any program does it, so all members get them.

use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Component, Path, PathBuf};

use atoll_pool::{ASIDE_DIRECTORY, OWN_DIRECTORY};
use atoll_upkeep::pools;
use atoll_vfs::{
    Caller, Errno, FileKind, FileSystem, Handle, InodeNumber, OpenFlags, SetAttr, Writer,
};
use bytes::Bytes;
use serde::Serialize;

use super::records::PoolRecord;
use super::{begin_remote, known};
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::messages::note;
use crate::output::{Output, escaped, json_text};
use crate::units;

/// Bytes of one write.
const PIECE_BYTES: usize = 1 << 20;

/// Arguments of `atoll pool adopt`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll pool adopt home
  atoll pool adopt home alice/notes.txt
  atoll pool adopt home alice/notes.txt~2 --to /alice/notes.txt

Nodes compare the copies of a pool's files (`atoll pool check`). A file that was changed, added or replaced in a member's directory by hand is
not what the pool has: it is set aside on that machine, under FILES/.atoll/aside, and never removed. This command lists what this machine
has set aside, or gives the pool one of these files; then it is set aside no more. What nobody wants can be removed there as any file.")]
pub(super) struct Args {
    /// The pool's name on this node
    name: String,

    /// A file that was set aside, as the list shows it
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,

    /// The path in the pool that gets its bytes, if that is another one
    #[arg(long, value_name = "PATH", requires = "file")]
    to: Option<PathBuf>,

    /// One JSON object a line
    #[arg(long, conflicts_with = "file")]
    json: bool,
}

/// A file that was set aside.
struct FileAside {
    /// Below the directory of what is set aside.
    path: PathBuf,
    /// The path of the file on this machine's disk.
    at: PathBuf,
    size_bytes: u64,
    /// When its bytes were changed last, seconds since 1970.
    modified_secs: i64,
}

/// The same, as JSON.
#[derive(Serialize)]
struct ListedAside {
    path: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    path_hex: Option<String>,
    at: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    at_hex: Option<String>,
    size_bytes: u64,
    modified_secs: i64,
}

impl From<FileAside> for ListedAside {
    fn from(file: FileAside) -> ListedAside {
        let FileAside { path, at, size_bytes, modified_secs } = file;
        let (path, path_hex) = json_text(path.as_os_str().as_bytes());
        let (at, at_hex) = json_text(at.as_os_str().as_bytes());
        ListedAside { path, path_hex, at, at_hex, size_bytes, modified_secs }
    }
}

/// Lists them, or takes one over.
pub(super) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let what = format!("cannot adopt files of pool {}", args.name);
    let record = known(&args.name, global, &what)?;
    if record.group.is_none() {
        return Err(Failure::new(Exit::Usage, what)
            .because("a pool of one machine has what is in its directory: nothing is set aside"));
    }
    match &args.file {
        None => list(args, &record, &what),
        Some(file) => adopt((args, file), &record, global, &what).await,
    }
}

/// The directories of this machine, one for each group, that hold what is set aside.
fn asides(record: &PoolRecord, what: &str) -> Result<Vec<PathBuf>, Failure> {
    let directories = pools::directories(&record.dir);
    let directories = directories.map_err(|error| Failure::io(what, &error))?;
    Ok(directories
        .into_iter()
        .map(|(_, dir)| dir.join(OWN_DIRECTORY).join(ASIDE_DIRECTORY))
        .collect())
}

fn list(args: &Args, record: &PoolRecord, what: &str) -> Result<(), Failure> {
    let mut found = Vec::new();
    for aside in asides(record, what)? {
        let listed = files_below(&aside, &mut found);
        listed.map_err(|error| Failure::io(what, &error))?;
    }
    let mut output = Output::new();
    if args.json {
        for file in found {
            output.json(&ListedAside::from(file))?;
        }
        return output.flush();
    }
    if found.is_empty() {
        note!("nothing is set aside on this machine");
    }
    for FileAside { path, at, size_bytes, modified_secs } in found {
        let bytes = |path: PathBuf| escaped(path.as_os_str().as_bytes());
        let (size, date) = (units::size(size_bytes), units::date(modified_secs));
        output.line(format!("{}  {size}, changed {date}  {}", bytes(path), bytes(at)))?;
    }
    output.flush()
}

/// All that is no directory below one.
fn files_below(top: &Path, found: &mut Vec<FileAside>) -> io::Result<()> {
    let mut directories = vec![top.to_owned()];
    while let Some(dir) = directories.pop() {
        let entries = match fs::read_dir(&dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            entries => entries?,
        };
        let mut entries = entries.collect::<Result<Vec<_>, _>>()?;
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            let (at, meta) = (entry.path(), entry.metadata()?);
            if meta.is_dir() {
                directories.push(at);
                continue;
            }
            let path = at.strip_prefix(top).unwrap_or(&at).to_owned();
            let (size_bytes, modified_secs) = (meta.len(), meta.mtime());
            found.push(FileAside { path, at, size_bytes, modified_secs });
        }
    }
    Ok(())
}

/// The names of a path, from the top on; none if there is none, or one is not a name.
pub(super) fn names(path: &Path) -> Option<Vec<&[u8]>> {
    let mut names = Vec::new();
    for component in path.components() {
        match component {
            Component::RootDir | Component::CurDir => {}
            Component::Normal(name) => names.push(name.as_bytes()),
            Component::ParentDir | Component::Prefix(_) => return None,
        }
    }
    (!names.is_empty()).then_some(names)
}

async fn adopt(
    (args, file): (&Args, &Path),
    record: &PoolRecord,
    global: &Global,
    what: &str,
) -> Result<(), Failure> {
    let no_path = |path: &Path| {
        let path = escaped(path.as_os_str().as_bytes());
        Failure::new(Exit::Usage, what).because(format!("{path} is no path of a file"))
    };
    let names_aside = names(file).ok_or_else(|| no_path(file))?;
    let below: PathBuf = names_aside.iter().map(|name| std::ffi::OsStr::from_bytes(name)).collect();
    let is_there = |aside: &PathBuf| aside.join(&below).symlink_metadata().is_ok();
    let aside = asides(record, what)?.into_iter().find(is_there).ok_or_else(|| {
        Failure::new(Exit::NotFound, what)
            .because(format!(
                "{} is not set aside on this machine",
                escaped(file.as_os_str().as_bytes())
            ))
            .advice(format!("`atoll pool adopt {}` lists what is.", args.name))
    })?;
    let at = aside.join(&below);
    let meta = at.symlink_metadata().map_err(|error| Failure::io(what, &error))?;
    if !meta.is_file() {
        return Err(Failure::new(Exit::Usage, what)
            .because(format!("{} is no regular file", at.display()))
            .advice("Copy it into a mount of the pool as any file."));
    }
    // A link that was set aside leads nowhere.
    let mut dir = aside.clone();
    for name in &names_aside[..names_aside.len() - 1] {
        dir.push(std::ffi::OsStr::from_bytes(name));
        let is_directory = dir.symlink_metadata().is_ok_and(|meta| meta.is_dir());
        if !is_directory {
            return Err(no_path(file));
        }
    }
    let full: Vec<Vec<u8>> = names_aside.iter().map(|name| name.to_vec()).collect();
    let own = without_number(names_aside);
    let to = match &args.to {
        Some(to) => names(to).ok_or_else(|| no_path(to))?.into_iter().map(<[u8]>::to_vec).collect(),
        None => own,
    };
    let from = File::open(&at).map_err(|error| Failure::io(what, &error))?;
    let remote = begin_remote((&args.name, record), global, what).await?;
    if args.to.is_none() && full != to && exists(&remote, &full).await {
        return Err(Failure::new(Exit::Usage, what)
            .because("the pool has files of both names, with the number and without it")
            .advice("Say with --to which of them gets the bytes."));
    }
    let written = write_to(&remote, &to, (&from, &meta)).await;
    let path = escaped(&[b"/", &to.join(&b'/')[..]].concat());
    written.map_err(|errno| {
        Failure::new(Exit::Failed, what).because(format!("{path}: {errno}")).advice(format!(
            "It is still at {}; what was written of it can be written again.",
            at.display()
        ))
    })?;
    fs::remove_file(&at).map_err(|error| Failure::io(what, &error))?;
    // Directories that hold nothing any more; the others stay.
    let mut dir = at.parent();
    while let Some(empty) = dir.filter(|dir| *dir != aside && fs::remove_dir(dir).is_ok()) {
        dir = empty.parent();
    }
    if !global.quiet {
        note!("{path} has these bytes now, on all machines");
    }
    Ok(())
}

/// The names of the path that a file had in the pool: the later ones of the same path have a number behind it.
fn without_number(names: Vec<&[u8]>) -> Vec<Vec<u8>> {
    let mut names: Vec<Vec<u8>> = names.into_iter().map(<[u8]>::to_vec).collect();
    if let Some(last) = names.last_mut()
        && let Some(at) = last.iter().rposition(|byte| *byte == b'~')
        && at > 0
        && last.len() > at + 1
        && last[at + 1..].iter().all(u8::is_ascii_digit)
    {
        last.truncate(at);
    }
    names
}

/// Whether the pool has a file of this path.
async fn exists(remote: &dyn FileSystem, path: &[Vec<u8>]) -> bool {
    let mut inode = InodeNumber::ROOT;
    for name in path {
        match remote.lookup(Caller::default(), inode, name).await {
            Ok(found) => inode = found.attr.inode,
            Err(_) => return false,
        }
    }
    true
}

/// Gives a file of the pool these bytes; makes it if there is none.
async fn write_to(
    remote: &dyn FileSystem,
    to: &[Vec<u8>],
    (from, meta): (&File, &fs::Metadata),
) -> Result<(), Errno> {
    let me = Caller::default();
    let (name, above) = to.split_last().ok_or(Errno::EINVAL)?;
    let mut dir = InodeNumber::ROOT;
    for name in above {
        dir = remote.lookup(me, dir, name).await?.attr.inode;
    }
    let (inode, opened) = match remote.lookup(me, dir, name).await {
        Ok(found) if found.attr.kind == FileKind::Regular => {
            let inode = found.attr.inode;
            (inode, remote.open(me, inode, OpenFlags::WRITE).await?)
        }
        Ok(_) => return Err(Errno::EEXIST),
        Err(Errno::ENOENT) => {
            let mode = meta.mode() & 0o7777;
            let (made, opened) = remote.create(me, dir, name, mode, OpenFlags::WRITE).await?;
            let inode = made.attr.inode;
            let owner =
                SetAttr { uid: Some(meta.uid()), gid: Some(meta.gid()), ..SetAttr::default() };
            remote.setattr(me, inode, None, owner).await?;
            (inode, opened)
        }
        Err(errno) => return Err(errno),
    };
    let handle = opened.handle;
    let written = fill(remote, (inode, handle), from).await;
    let closed = remote.close(inode, handle).await;
    written.and(closed)
}

async fn fill(
    remote: &dyn FileSystem,
    (inode, handle): (InodeNumber, Handle),
    from: &File,
) -> Result<(), Errno> {
    let me = Caller::default();
    let mut offset = 0;
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        let read = from.read_at(&mut piece, offset).map_err(|_| Errno::EIO)?;
        if read == 0 {
            break;
        }
        let mut at = 0;
        while at < read {
            let bytes = Bytes::copy_from_slice(&piece[at..read]);
            let to = offset + at as u64;
            at += remote.write(Writer::At(me), inode, handle, to, bytes).await? as usize;
        }
        offset += read as u64;
    }
    let changes = SetAttr { size_bytes: Some(offset), ..SetAttr::default() };
    remote.setattr(me, inode, Some(handle), changes).await?;
    remote.fsync(inode, handle, false).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_behind_a_name_is_that_of_a_later_one() {
        let path = |text: &'static str| without_number(vec![b"dir~3", text.as_bytes()]);
        for (aside, own) in [("a~2", "a"), ("a", "a"), ("~2", "~2"), ("a~", "a~"), ("a~b", "a~b")] {
            assert_eq!(path(aside), [b"dir~3".to_vec(), own.as_bytes().to_vec()], "{aside}");
        }
    }

    #[test]
    fn paths_stay_below() {
        assert_eq!(names(Path::new("/a/./b")), Some(vec![&b"a"[..], b"b"]));
        for path in ["", "/", "..", "a/../../b", "/.."] {
            assert_eq!(names(Path::new(path)), None, "{path}");
        }
    }
}
