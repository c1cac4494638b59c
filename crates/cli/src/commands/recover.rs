//! `atoll volume recover`: what was written through a mount and is not in its volume.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use atoll_dht::Blocks;
use atoll_node::shell_word;
use atoll_upkeep::shared_spool;
use atoll_vfs::{Caller, Entry, Errno, FileKind, FileSystem, InodeNumber, OpenFlags};
use atoll_volume::owned::{WritableFs, WriteOptions};
use serde::{Serialize, Serializer};

use crate::beneath::Directory;
use crate::connection;
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::messages::note;
use crate::output::{Output, escaped, json_list};
use crate::own_volume;
use crate::spool::{self, JsonPending, Pending, SpoolOnDisk};
use crate::units;
use crate::user_path;

/// How much of a file is read at once.
const READ_BYTES: u32 = 1 << 20;

/// Arguments of `atoll volume recover`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll volume recover work
  atoll volume recover work ~/recovered
  atoll volume recover work --discard

Changes made through a mount wait in the node's directory until the ring has stored them; after the mount has
ended or died, the node brings them there, or the next `atoll mount NAME`. Where another writer has changed the
volume meanwhile (`atoll mount --take-over`), they are set aside instead: this command copies the files that were
written, each as it was then, into DIR, and says which names were removed.
The changes of a shared volume whose member was removed stay on this machine: a mount shows them.")]
pub(crate) struct Args {
    /// The volume's name on this node
    name: String,

    /// Copy the files that were written and set aside into this directory, which is made
    #[arg(value_name = "DIR")]
    destination: Option<PathBuf>,

    /// Remove for good what was set aside and, unless it is mounted, what waits for the ring
    #[arg(long, conflicts_with = "destination")]
    discard: bool,

    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// The files that were copied, and those that were not.
#[derive(Default, Serialize)]
struct Recovered {
    files: u64,
    bytes: u64,
    /// Names that were removed, relative to the volume.
    #[serde(flatten, serialize_with = "removed_json")]
    removed: Vec<Vec<u8>>,
    /// The paths that could not be copied, each with the reason.
    missing: Vec<String>,
}

fn removed_json<S: Serializer>(names: &[Vec<u8>], serializer: S) -> Result<S::Ok, S::Error> {
    json_list("removed", names.iter().map(Vec::as_slice), serializer)
}

/// Shows, copies or discards.
pub(crate) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let node = global.dir()?;
    if args.name.starts_with('.') || args.name.contains('/') || args.name.is_empty() {
        return Err(Failure::new(Exit::Usage, format!("cannot recover {:?}", args.name))
            .because("no volume has such a name"));
    }
    let shared = shared_spool::pending_of(&node, &args.name);
    if !shared.is_empty() {
        return recover_shared(args, &shared, &node);
    }
    let mut pending = spool::pending_of(&node, &args.name);
    if args.discard {
        return discard(args, &pending, &node);
    }
    let mut unknown = None;
    if pending.bytes > 0 && !pending.mounted {
        unknown = set_aside_overtaken(&args.name, global).await.err();
        pending = spool::pending_of(&node, &args.name);
    }
    let unknown = unknown.map(|failure| failure.to_string());
    match &args.destination {
        None => show(args, &pending, unknown.as_deref()),
        Some(destination) => copy(args, destination, (&pending, unknown.as_deref()), global).await,
    }
}

/// Sets aside what waits if another writer has changed the volume since, as the next mount would.
async fn set_aside_overtaken(name: &str, global: &Global) -> Result<(), Failure> {
    let what = format!("whether another writer has overtaken the changes to {name} is not known");
    let (env, client) = connection::to_node(global).await?;
    let volume = own_volume::find(&client, name, &what).await?;
    let read_key = client.read_key(name).await.map_err(connection::failure)?;
    // A mount that has come meanwhile does it itself.
    let Some(spool) = spool::open(&global.dir()?, name, &what)? else { return Ok(()) };
    let blocks: Arc<dyn Blocks> = client;
    let read_key = read_key.as_ref();
    WritableFs::set_aside_overtaken(&env, &blocks, &volume.key, read_key, spool)
        .await
        .map(drop)
        .map_err(|error| own_volume::failure(&what, error))
}

fn show(args: &Args, pending: &Pending, unknown: Option<&str>) -> Result<(), Failure> {
    let mut output = Output::new();
    if args.json {
        output.json(&JsonPending::from(pending))?;
        return output.flush();
    }
    for line in describe(pending, unknown) {
        output.line(line)?;
    }
    output.flush()
}

/// `unknown` is why it could not be found out whether another writer has overtaken what waits.
fn describe(pending: &Pending, unknown: Option<&str>) -> Vec<String> {
    let Pending { name, bytes, mounted, set_aside, .. } = pending;
    let mut lines = Vec::new();
    let (size, name) = (units::size(*bytes), shell_word(name));
    match (*bytes, mounted) {
        (0, _) => lines.push("nothing waits for the ring".to_owned()),
        (_, true) => {
            lines.push(format!("{size} of changes wait for the ring; the mount writes them, unless another mount has taken over"));
        }
        (_, false) => lines.push(format!(
            "{size} of changes wait for the ring; the node brings them there, or `atoll mount {name} DIR`"
        )),
    }
    if *bytes > 0 {
        lines.extend(unknown.map(str::to_owned));
    }
    for directory in set_aside {
        lines.push(format!(
            "changes that another writer has overtaken: {} (`atoll volume recover {name} DIR` copies \
             their files)",
            directory.display()
        ));
    }
    lines
}

/// Shows or discards what waits of a shared volume: a mount of it shows the files.
fn recover_shared(args: &Args, spools: &[Pending], node: &Path) -> Result<(), Failure> {
    let what = format!("cannot recover {}", args.name);
    if args.destination.is_some() {
        let name = shell_word(&args.name);
        let how = format!("`atoll mount {name} DIR` shows the files; copy them from there.");
        return Err(Failure::new(Exit::Usage, what).because("it is a shared volume").advice(how));
    }
    let mut output = Output::new();
    if args.discard {
        let bytes = shared_spool::discard(node, &args.name);
        let bytes = bytes.map_err(|error| Failure::io(what, &error))?;
        match args.json {
            true => output.json(&serde_json::json!({ "discarded_bytes": bytes }))?,
            false => output.line(format!("discarded {} of changes", units::size(bytes)))?,
        }
        return output.flush();
    }
    for pending in spools {
        if args.json {
            output.json(&JsonPending::from(pending))?;
            continue;
        }
        output.line(describe_shared(pending))?;
        for directory in &pending.set_aside {
            let aside = directory.display();
            output.line(format!("damaged files of the spool were set aside: {aside}"))?;
        }
    }
    output.flush()
}

fn describe_shared(pending: &Pending) -> String {
    let Pending { name, bytes, files, mounted, refused, .. } = pending;
    let name = shell_word(name);
    let files = units::counted(*files, "file", "files");
    let size = units::size(*bytes);
    match (mounted, refused) {
        (true, _) => format!(
            "{files} ({size}) wait for the ring; the mount brings them there, or says in `getfattr -n \
             user.atoll.status MNT` why the ring does not take them"
        ),
        (false, None) => format!(
            "{files} ({size}) wait for the ring; the node brings them there, or the next mount, which shows them"
        ),
        (false, Some(why)) => format!(
            "{files} ({size}) are on this machine only, and the ring does not take them: {why}. `atoll mount {name} \
             DIR` shows them: copy them from there, or ask the volume's owner for `atoll grant`; `atoll volume \
             recover {name} --discard` gives them up"
        ),
    }
}

fn discard(args: &Args, pending: &Pending, node: &Path) -> Result<(), Failure> {
    for directory in &pending.set_aside {
        let what = format!("cannot remove {}", directory.display());
        fs::remove_dir_all(directory).map_err(|error| Failure::io(what, &error))?;
    }
    let mut bytes = pending.set_aside_bytes;
    if pending.bytes > 0 && !pending.mounted {
        spool::remove_records(node, &args.name)
            .map_err(|error| Failure::io(format!("cannot discard {}", args.name), &error))?;
        bytes += pending.bytes;
    }
    let mut output = Output::new();
    if args.json {
        output.json(&serde_json::json!({ "discarded_bytes": bytes }))?;
    } else {
        output.line(format!("discarded {} of changes", units::size(bytes)))?;
    }
    output.flush()
}

async fn copy(
    args: &Args,
    destination: &Path,
    (pending, unknown): (&Pending, Option<&str>),
    global: &Global,
) -> Result<(), Failure> {
    let what = format!("cannot recover {}", args.name);
    if pending.set_aside.is_empty() {
        let failure = Failure::new(Exit::NotFound, what).because("nothing is set aside");
        return Err(match pending.bytes {
            0 => failure,
            _ => failure.advice(describe(pending, unknown).join("\n")),
        });
    }
    let (env, client) = connection::to_node(global).await?;
    let volume = own_volume::find(&client, &args.name, &what).await?;
    let options = WriteOptions {
        read_key: client.read_key(&args.name).await.map_err(connection::failure)?,
        owner: own_volume::owner(),
        ..WriteOptions::default()
    };
    let into = user_path::make_directory(destination)
        .map_err(|error| Failure::io(format!("{what} to {}", destination.display()), &error))?;
    let open = async |aside: &Path| {
        let spool = SpoolOnDisk::open(aside.to_owned()).map_err(|error| error.to_string())?;
        let spool = Arc::new(spool.ok_or("another command reads it")?);
        let (key, options) = (volume.key.clone(), options.clone());
        WritableFs::open_set_aside(env.clone(), client.clone(), key, options, spool)
            .await
            .map_err(|error| error.to_string())
    };
    let mut recovered = Recovered::default();
    for aside in &pending.set_aside {
        let name = aside.file_name().unwrap_or_default();
        let copied = match open(aside).await {
            Ok((fs, missing)) => {
                let missing = missing.map(|why| format!("later changes cannot be read: {why}"));
                recovered.missing.extend(missing);
                match into.make_child(name) {
                    Ok(into) => copy_all(&fs, &into, &mut recovered).await,
                    Err(error) => Err(error),
                }
                .map_err(|error| error.to_string())
            }
            Err(why) => Err(why),
        };
        let missing = copied.err().map(|why| format!("{}: {why}", aside.display()));
        recovered.missing.extend(missing);
    }
    tell(args, destination, recovered, global)
}

fn tell(
    args: &Args,
    destination: &Path,
    recovered: Recovered,
    global: &Global,
) -> Result<(), Failure> {
    let mut output = Output::new();
    let Recovered { files, bytes, removed, missing } = &recovered;
    if args.json {
        output.json(&recovered)?;
    } else {
        let files = units::counted(*files, "file", "files");
        output.line(format!("{files}, {} to {}", units::size(*bytes), destination.display()))?;
        for name in removed {
            output.line(format!("removed: {}", escaped(name)))?;
        }
    }
    output.flush()?;
    if !missing.is_empty() {
        let what = format!("cannot recover all of {}", args.name);
        return Err(Failure::new(Exit::Failed, what).because(missing.join("; ")));
    }
    if !args.json && !global.quiet {
        let name = shell_word(&args.name);
        note!("`atoll volume recover {name} --discard` removes them from the node");
    }
    Ok(())
}

/// Copies what was written through a mount; what cannot be copied is told.
async fn copy_all(fs: &WritableFs, into: &Directory, recovered: &mut Recovered) -> io::Result<()> {
    for (path, is_there) in fs.changed_names().await.map_err(os_error)? {
        if !is_there {
            recovered.removed.push(path.to_vec());
        } else if let Err(error) = copy_file(fs, &path, into, recovered).await {
            recovered.missing.push(format!("{}: {error}", escaped(&path)));
        }
    }
    Ok(())
}

fn os_error(errno: Errno) -> io::Error {
    io::Error::from_raw_os_error(errno.0)
}

async fn find(fs: &WritableFs, path: &[u8]) -> Result<Entry, Errno> {
    let mut at = InodeNumber::ROOT;
    let mut found = Err(Errno::ENOENT);
    for name in path.split(|byte| *byte == b'/') {
        let entry = fs.lookup(Caller::default(), at, name).await?;
        at = entry.attr.inode;
        found = Ok(entry);
    }
    found
}

/// Copies one file or link; of a directory, nothing.
async fn copy_file(
    fs: &WritableFs,
    path: &[u8],
    into: &Directory,
    recovered: &mut Recovered,
) -> io::Result<()> {
    let entry = find(fs, path).await.map_err(os_error)?;
    let inode = entry.attr.inode;
    match entry.attr.kind {
        FileKind::Regular => {
            let (above, name) = directory_above(into, path)?;
            let mut file = above.make_file(name)?;
            let opening = fs.open(Caller::default(), inode, OpenFlags::READ).await;
            let handle = opening.map_err(os_error)?.handle;
            let mut at = 0;
            loop {
                let bytes = fs.read(inode, handle, at, READ_BYTES).await.map_err(os_error)?;
                if bytes.is_empty() {
                    break;
                }
                file.write_all(&bytes)?;
                at += bytes.len() as u64;
            }
            fs.close(inode, handle).await.map_err(os_error)?;
            finish(&file, &entry)?;
            recovered.bytes += at;
        }
        FileKind::Symlink => {
            let link = fs.readlink(inode).await.map_err(os_error)?;
            let (above, name) = directory_above(into, path)?;
            above.make_link(name, &link)?;
        }
        _ => return Ok(()),
    }
    recovered.files += 1;
    Ok(())
}

/// Opens the directory that a file belongs into, and makes those that are missing; the file's name is the last one. A
/// link that has been put on the way is not followed.
fn directory_above<'a>(into: &Directory, path: &'a [u8]) -> io::Result<(Directory, &'a OsStr)> {
    let mut names = path.split(|byte| *byte == b'/').map(OsStr::from_bytes);
    let name = names.next_back().unwrap_or_default();
    let mut at = into.below(Path::new(""))?;
    for name in names {
        at = at.child_or_new(name)?;
    }
    Ok((at, name))
}

/// Gives a copied file its mode, without set-user-ID bits, and its time.
fn finish(file: &File, entry: &Entry) -> io::Result<()> {
    file.set_permissions(fs::Permissions::from_mode(entry.attr.mode & 0o777))?;
    file.set_modified(entry.attr.mtime.to_system_time())?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file that was recovered could be written through a link that somebody put in the place of its directory.
    #[test]
    fn a_recovered_file_stays_in_the_directory_it_belongs_into() -> io::Result<()> {
        let scratch = tempfile::tempdir()?;
        let place = |name: &str| scratch.path().join(name);
        fs::create_dir(place("outside"))?;
        let into = Directory::open(scratch.path())?.make_child(OsStr::new("into"))?;
        let (above, name) = directory_above(&into, b"a/b/file")?;
        above.make_file(name)?;
        assert!(place("into/a/b/file").is_file());
        std::os::unix::fs::symlink(place("outside"), place("into/a/link"))?;
        assert!(directory_above(&into, b"a/link/file").is_err());
        Ok(())
    }

    #[test]
    fn what_waits_is_described() {
        let mut pending = Pending { name: "work".into(), ..Pending::default() };
        assert_eq!(describe(&pending, None), ["nothing waits for the ring"]);
        pending.bytes = 2048;
        assert!(
            describe(&pending, None)[0]
                .contains("2.0 KiB of changes wait for the ring; the node brings them there")
        );
        assert_eq!(describe(&pending, Some("no node runs"))[1], "no node runs");
        pending.mounted = true;
        assert!(describe(&pending, None)[0].contains("the mount writes them"));
        pending.set_aside.push("/x/aside-1".into());
        assert!(
            describe(&pending, None)[1].contains("/x/aside-1 (`atoll volume recover work DIR`")
        );
    }
}
