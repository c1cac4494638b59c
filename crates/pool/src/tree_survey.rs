//! A tree of plain files that is to be taken into a pool: walked through, and looked at before anything is changed.
//!
//! It changes nothing, and follows no symbolic link.

use std::vec::IntoIter;

use atoll_vfs::{Errno, FileKind};
use bytes::Bytes;

use crate::disk::{Disk, DiskResult, Listed, Stat, missing_is_none};
use crate::layout::{MIN_PLACEHOLDER_BYTES, OWN_DIRECTORY, needs_escape};

/// How many paths of each kind a report lists.
pub(crate) const MAX_LISTED: usize = 20;

/// What a walk comes to.
pub(crate) enum TreeStep<N> {
    /// A name of the directory in which the walk is, and what stands there; [`Errno::EXDEV`] for another file system.
    Name(Bytes, DiskResult<(N, Stat)>),
    /// The walk has left the directory that was entered last.
    Left,
}

/// A walk through a tree. Directories are entered by [`ImportWalk::enter`] when the walk has come to their names.
pub(crate) struct ImportWalk<'a, D: Disk> {
    disk: &'a D,
    stack: Vec<(D::Node, IntoIter<Listed>)>,
    names: Vec<Bytes>,
}

impl<'a, D: Disk> ImportWalk<'a, D> {
    /// Begins a walk in a directory.
    pub(crate) async fn begin(disk: &'a D, top: &D::Node) -> DiskResult<ImportWalk<'a, D>> {
        let listed = disk.list(top).await?.into_iter();
        Ok(ImportWalk { disk, stack: vec![(top.clone(), listed)], names: Vec::new() })
    }

    /// The next step; none at the end.
    pub(crate) async fn next(&mut self) -> Option<TreeStep<D::Node>> {
        let (dir, listed) = self.stack.last_mut()?;
        let Some(Listed { name, .. }) = listed.next() else {
            self.stack.pop();
            self.names.pop();
            return (!self.stack.is_empty()).then_some(TreeStep::Left);
        };
        let node = match self.disk.node(dir, &name).await {
            Ok(node) => self.disk.stat(&node).await.map(|stat| (node, stat)),
            Err(errno) => Err(errno),
        };
        Some(TreeStep::Name(name, node))
    }

    /// Goes into the directory of this name, to which the walk has just come.
    pub(crate) async fn enter(&mut self, name: &Bytes, node: &D::Node) -> DiskResult<()> {
        let listed = self.disk.list(node).await?.into_iter();
        self.stack.push((node.clone(), listed));
        self.names.push(name.clone());
        Ok(())
    }

    /// How many directories below the first one the walk is.
    pub(crate) fn depth(&self) -> usize {
        self.stack.len().saturating_sub(1)
    }

    /// The path, from the first directory on, of a name in the directory in which the walk is.
    pub(crate) fn path(&self, name: &[u8]) -> Vec<u8> {
        let mut path = self.names.join(&b'/');
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(name);
        path
    }
}

/// Why a file of a tree cannot be taken into a pool, or only by copying it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TreeProblem {
    /// Another file system is mounted there.
    #[error("another file system is mounted there")]
    Mount,
    /// A directory that belongs to a pool.
    #[error("it is a pool's directory")]
    Pool,
    /// The walk has come to the directory into which the tree is to be taken.
    #[error("it is the pool's own directory, as a mount of the pool shows it")]
    Itself,
    /// A symbolic link that could be taken for one of Atoll's own.
    #[error("it is a symbolic link that reads like one of Atoll's own")]
    LikePlaceholder,
    /// A directory too far below the others.
    #[error("too many directories lie above each other")]
    Depth,
    /// The pool has the name already.
    #[error("the pool has a file of that name there")]
    NameTaken,
    /// It cannot be looked at.
    #[error("{0}")]
    Unreadable(Errno),
}

/// What a look at a tree has found.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TreeSurvey {
    /// Names, of directories and all other files.
    pub files: u64,
    /// Bytes of regular files, holes left out.
    pub bytes: u64,
    /// What is in the way, with the paths below the tree's directory: the first ones of each kind.
    pub problems: Vec<(Vec<u8>, TreeProblem)>,
    /// How many there are in all.
    pub problems_in_all: u64,
}

impl TreeSurvey {
    /// Notes a problem.
    pub(crate) fn note(&mut self, path: Vec<u8>, problem: TreeProblem) {
        self.problems_in_all += 1;
        let of_kind = |(_, other): &&(Vec<u8>, TreeProblem)| *other == problem;
        if self.problems.iter().filter(of_kind).count() < MAX_LISTED {
            self.problems.push((path, problem));
        }
    }
}

/// Looks at all files below a directory. A name `mark` is that of a file which stands in the directory into which the tree is to be taken.
pub(crate) async fn survey_tree<D: Disk>(
    disk: &D,
    top: &D::Node,
    mark: Option<&[u8]>,
) -> DiskResult<TreeSurvey> {
    let max_depth = disk.max_nodes() / 2;
    let mut survey = TreeSurvey::default();
    let mut walk = ImportWalk::begin(disk, top).await?;
    while let Some(step) = walk.next().await {
        let TreeStep::Name(name, found) = step else { continue };
        let (node, stat) = match found {
            Ok(found) => found,
            Err(Errno::ENOENT) => continue,
            Err(errno) => {
                let problem = match errno {
                    Errno::EXDEV => TreeProblem::Mount,
                    errno => TreeProblem::Unreadable(errno),
                };
                survey.note(walk.path(&name), problem);
                continue;
            }
        };
        survey.files += 1;
        let problem = match stat.kind {
            _ if mark == Some(&name[..]) => Some(TreeProblem::Itself),
            FileKind::Regular => {
                survey.bytes += stat.size_bytes.min(stat.blocks_512.saturating_mul(512));
                None
            }
            FileKind::Symlink if stat.size_bytes >= MIN_PLACEHOLDER_BYTES => {
                match disk.read_node(&node).await {
                    Ok(target) => needs_escape(&target).then_some(TreeProblem::LikePlaceholder),
                    Err(errno) => Some(TreeProblem::Unreadable(errno)),
                }
            }
            FileKind::Directory if walk.depth() >= max_depth => Some(TreeProblem::Depth),
            FileKind::Directory if is_pools(disk, &name, &node).await => Some(TreeProblem::Pool),
            FileKind::Directory => match walk.enter(&name, &node).await {
                Ok(()) => None,
                Err(errno) => Some(TreeProblem::Unreadable(errno)),
            },
            _ => None,
        };
        if let Some(problem) = problem {
            survey.note(walk.path(&name), problem);
        }
    }
    Ok(survey)
}

/// Whether a directory holds what a pool keeps beside its files.
async fn is_pools<D: Disk>(disk: &D, name: &[u8], node: &D::Node) -> bool {
    let stamp = async { missing_is_none(disk.node(node, b"stamp").await) };
    name == OWN_DIRECTORY.as_bytes() && !matches!(stamp.await, Ok(None))
}
