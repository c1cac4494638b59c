//! `atoll why`: what is known of one file of a mounted shared volume, and what to do if something is not well.
//!
//! Three are asked: the mount for what it knows and has not brought to the ring (a virtual attribute), the node for
//! what each replica says and which nodes use the file (control calls), and the directory for names of
//! conflicts. What the replicas say is their word: nothing is read or repaired for it.

mod advice;
mod report;

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use atoll_key::kinds::certified::CertifiedBlock;
use atoll_key::{BlockHash, BlockId, Key};
use atoll_node::{Client, ReplicaReport, UsesReport};
use atoll_volume::shared::file_state::{BLOCKS_AT_ONCE, BLOCKS_XATTR, FileState, STATE_XATTR};
use atoll_volume::shared::inode::InodeKey;
use atoll_volume::shared::merged::ConflictName;
use rustix::io::Errno;

use self::report::Report;
use crate::beneath::Held;
use crate::connection;
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::output::{Output, escaped};
use crate::user_path::{self, Mount};

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
    /// A file or directory in a mounted shared volume; of a symbolic link outside of mounts, what it leads to
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
    let file = user_path::find(&args.path).map_err(|error| Failure::io(&what, &error))?;
    let state = state_of(&file, &what)?;
    let blocks = blocks_of(&file.held, if args.all { usize::MAX } else { BLOCKS_LOOKED_AT });
    let ring = match connection::to_node(global).await {
        Ok((_, client)) => ask_ring(&client, &state, blocks.as_ref().ok()).await,
        // The first line is the error, the next ones advise.
        Err(failure) => Err(failure.to_string().lines().take(1).collect()),
    };
    let beside = beside(&file);
    let report = Report::of(Found { path: file.path, state, beside, blocks, ring });
    let mut output = Output::new();
    match args.json {
        true => output.json(&report)?,
        false => report.write(&mut output)?,
    }
    output.flush()
}

/// What the mount knows of a file.
fn state_of(file: &user_path::Found, what: &str) -> Result<FileState, Failure> {
    let value =
        file.held.xattr(STATE_XATTR.as_ref()).map_err(|error| {
            match Errno::from_io_error(&error) {
                Some(Errno::NODATA | Errno::NOTSUP) => refused(file, what),
                _ => Failure::io(what, &error),
            }
        })?;
    FileState::decode(&value).map_err(|told| {
        Failure::new(Exit::Failed, what)
            .because(format!("the mount's answer cannot be read: {told}"))
            .advice("If atoll was upgraded, mount the volume anew.")
    })
}

/// Why there is no answer for a file that is in no mount of a shared volume.
fn refused(file: &user_path::Found, what: &str) -> Failure {
    let failure = Failure::new(Exit::Usage, what);
    match &file.mount {
        Some(Mount::OfShared) => failure
            .because("the kernel passes such questions on for regular files and directories alone")
            .advice("Ask about the directory that it is in."),
        Some(Mount::Other(status)) => failure
            .because(format!(
                "it is in a volume that is not shared; the mount's own state: {}",
                escaped(status)
            ))
            .advice(
                "One publisher writes that volume as a whole: `atoll volume show NAME` and `atoll \
                 volumes` tell of it, `atoll status` of its node.",
            ),
        None => failure
            .because("it is in no mount of Atoll")
            .advice("`atoll mount NAME MNT` mounts a shared volume."),
    }
}

/// The file's content blocks, at most `most`, and whether there are more.
fn blocks_of(file: &Held, most: usize) -> Result<(Vec<BlockId>, bool), String> {
    let mut blocks = Vec::new();
    loop {
        let name = format!("{BLOCKS_XATTR}{}", blocks.len());
        let hashes = file.xattr(name.as_ref()).map_err(|error| error.to_string())?;
        let hashes = hashes.chunks_exact(32);
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
fn beside(file: &user_path::Found) -> Vec<Vec<u8>> {
    let (Some(above), Some(name)) = (&file.above, file.path.file_name()) else { return Vec::new() };
    let is_beside = |other: &&OsString| {
        ConflictName::parse(other.as_bytes()).is_some_and(|one| one.beside == name.as_bytes())
    };
    let names = above.names().unwrap_or_default();
    names.iter().filter(is_beside).map(|other| other.as_bytes().to_vec()).collect()
}
