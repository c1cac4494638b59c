//! `atoll why`: what is known of one file of a mounted shared volume, and what to do if something is not well.
//!
//! Three are asked: the mount for what it knows and has not brought to the ring (a virtual attribute), the node for
//! what each replica says and which nodes use the file (control calls), and the directory for names of
//! conflicts. What the replicas say is their word: nothing is read or repaired for it.

mod advice;
mod report;

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use atoll_key::kinds::certified::CertifiedBlock;
use atoll_key::{BlockHash, BlockId, Key};
use atoll_node::{Client, ReplicaReport, UsesReport};
use atoll_volume::shared::file_state::{BLOCKS_AT_ONCE, BLOCKS_XATTR, FileState, STATE_XATTR};
use atoll_volume::shared::inode::InodeKey;
use atoll_volume::shared::merged::ConflictName;
use rustix::io::Errno;

use self::report::Report;
use crate::connection;
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::output::{Output, escaped};

/// The longest value of an attribute that the kernel passes on.
const MAX_XATTR_BYTES: usize = 64 << 10;
/// Blocks of a file that are looked at unless all are asked for: those of some hundred megabytes.
const BLOCKS_LOOKED_AT: usize = BLOCKS_AT_ONCE;

/// Arguments of `atoll why`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll why ~/team/plans/budget.ods
  atoll why --json ~/team/plans | jq -r '.todo[]'
  atoll why --all ~/team/video.mkv

Shows of a file or directory in a mounted shared volume: its newest version, who wrote it and when; the nodes that
should hold it, and what each of them has; what this mount has not brought to the ring; who may write it,
and until when you may; which nodes have read or written it in the last 15 seconds, and which have it locked. The
last lines say what to do, if something is not well.
The node of --dir is asked, which should be the one of the mount.")]
pub(crate) struct Args {
    /// A file or directory in a mounted shared volume; of a symbolic link, what it leads to
    #[arg(value_name = "PATH")]
    path: PathBuf,

    /// Look at all blocks of a large file, and not at the first 1,024
    #[arg(long)]
    all: bool,

    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// What was found out; see the module.
struct Found {
    path: PathBuf,
    state: FileState,
    /// Names of versions that were kept beside it.
    beside: Vec<Vec<u8>>,
    /// The file's content blocks that were looked at, and whether there are more; or why they are not known.
    blocks: Result<(Vec<BlockId>, bool), String>,
    ring: Result<Ring, String>,
}

/// What the node says.
struct Ring {
    own_id: String,
    /// How many nodes should hold each block.
    replicas: usize,
    /// Whether the node has a place on the ring.
    joined: bool,
    /// Of the inode first, then of the content blocks.
    copies: ReplicaReport,
    uses: UsesReport,
}

/// Shows it.
pub(crate) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let what = format!("cannot say anything of {}", escaped(args.path.as_os_str().as_bytes()));
    let path = fs::canonicalize(&args.path).map_err(|error| Failure::io(&what, &error))?;
    let state = state_of(&path, &what)?;
    let blocks = blocks_of(&path, if args.all { usize::MAX } else { BLOCKS_LOOKED_AT });
    let ring = match connection::to_node(global).await {
        Ok((_, client)) => ask_ring(&client, &state, blocks.as_ref().ok()).await,
        // The first line is the error, the next ones advise.
        Err(failure) => Err(failure.to_string().lines().take(1).collect()),
    };
    let beside = beside(&path);
    let report = Report::of(Found { path, state, beside, blocks, ring });
    let mut output = Output::new();
    match args.json {
        true => output.json(&report)?,
        false => report.write(&mut output)?,
    }
    output.flush()
}

/// What the mount knows of a file.
fn state_of(path: &Path, what: &str) -> Result<FileState, Failure> {
    let mut value = vec![0; MAX_XATTR_BYTES];
    let read = rustix::fs::getxattr(path, STATE_XATTR, &mut value);
    let failed = |why: &str| Failure::new(Exit::Failed, what).because(why);
    match read {
        Ok(len) => FileState::decode(&value[..len]).map_err(|told| {
            failed(&format!("the mount's answer cannot be read: {told}"))
                .advice("If atoll was upgraded, mount the volume anew.")
        }),
        Err(Errno::NODATA | Errno::NOTSUP) => Err(refused(path, what)),
        Err(errno) => Err(Failure::io(what, &errno.into())),
    }
}

/// Why there is no answer for a file that is in no mount of a shared volume.
fn refused(path: &Path, what: &str) -> Failure {
    let Ok(meta) = fs::symlink_metadata(path) else {
        return Failure::new(Exit::NotFound, what).because("it is gone");
    };
    let mut top = path;
    while let Some(above) = top.parent()
        && fs::symlink_metadata(above).is_ok_and(|above| above.dev() == meta.dev())
    {
        top = above;
    }
    let mut status = vec![0; MAX_XATTR_BYTES];
    let failure = Failure::new(Exit::Usage, what);
    match rustix::fs::getxattr(top, "user.atoll.status", &mut status) {
        Ok(_) if rustix::fs::getxattr(top, STATE_XATTR, &mut status).is_ok() => failure
            .because("the kernel passes such questions on for regular files and directories alone")
            .advice("Ask about the directory that it is in."),
        Ok(len) => {
            let status = escaped(&status[..len]);
            failure
                .because(format!(
                    "it is in a volume that is not shared; the mount's own state: {status}"
                ))
                .advice(
                    "One publisher writes that volume as a whole: `atoll volume show NAME` and `atoll \
                     volumes` tell of it, `atoll status` of its node.",
                )
        }
        Err(_) => failure
            .because("it is in no mount of Atoll")
            .advice("`atoll mount NAME MNT` mounts a shared volume."),
    }
}

/// The file's content blocks, at most `most`, and whether there are more.
fn blocks_of(path: &Path, most: usize) -> Result<(Vec<BlockId>, bool), String> {
    let mut blocks = Vec::new();
    loop {
        let mut hashes = vec![0; MAX_XATTR_BYTES];
        let name = format!("{BLOCKS_XATTR}{}", blocks.len());
        let len = rustix::fs::getxattr(path, name.as_str(), &mut hashes)
            .map_err(|errno| std::io::Error::from(errno).to_string())?;
        let hashes = hashes[..len].chunks_exact(32);
        let count = hashes.len();
        let id = |hash: &[u8]| BlockHash(hash.try_into().expect("32 bytes")).inode_content_id();
        blocks.extend(hashes.map(id));
        if blocks.len() > most {
            blocks.truncate(most);
            return Ok((blocks, true));
        }
        if count < BLOCKS_AT_ONCE {
            return Ok((blocks, false));
        }
    }
}

/// What the ring says of a file.
async fn ask_ring(
    client: &Client,
    state: &FileState,
    blocks: Option<&(Vec<BlockId>, bool)>,
) -> Result<Ring, String> {
    let told = |error: atoll_node::ClientError| error.to_string();
    let inode = CertifiedBlock::id_at(InodeKey(state.inode).key());
    let lock = Key::from_slice(&state.lock).ok_or("the mount names no lock")?;
    let status = client.status().await.map_err(told)?;
    let replicas = client.settings().await.map_err(told)?.replicas as usize;
    let uses = client.uses(inode, lock).await.map_err(told)?;
    let mut ids = vec![inode];
    ids.extend(blocks.iter().flat_map(|(blocks, _)| blocks));
    let mut copies = ReplicaReport::default();
    for chunk in ids.chunks(BLOCKS_AT_ONCE) {
        let more = client.replicas(chunk).await.map_err(told)?;
        merge(&mut copies, more);
    }
    Ok(Ring { own_id: status.peer_id, replicas, joined: status.joined, copies, uses })
}

/// Adds a report to another one, whose nodes have other numbers.
fn merge(all: &mut ReplicaReport, more: ReplicaReport) {
    let place = |nodes: &mut Vec<atoll_node::AskedNode>, node: &atoll_node::AskedNode| {
        let known = nodes.iter().position(|known| known.peer_id == node.peer_id);
        known.unwrap_or_else(|| {
            nodes.push(node.clone());
            nodes.len() - 1
        })
    };
    let numbers: Vec<usize> = more.nodes.iter().map(|node| place(&mut all.nodes, node)).collect();
    for (number, node) in numbers.iter().zip(more.nodes) {
        all.nodes[*number].trouble = all.nodes[*number].trouble.take().or(node.trouble);
    }
    for mut block in more.blocks {
        block.copies.iter_mut().for_each(|copy| copy.node = numbers[copy.node]);
        all.blocks.push(block);
    }
}

/// Names in the same directory of versions of this file that were kept beside it.
fn beside(path: &Path) -> Vec<Vec<u8>> {
    let (Some(above), Some(name)) = (path.parent(), path.file_name()) else { return Vec::new() };
    let entries = fs::read_dir(above).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name());
    let is_beside = |other: &OsStr| {
        ConflictName::parse(other.as_bytes()).is_some_and(|one| one.beside == name.as_bytes())
    };
    let mut found: Vec<Vec<u8>> =
        names.filter(|other| is_beside(other)).map(|other| other.as_bytes().to_vec()).collect();
    found.sort();
    found
}
