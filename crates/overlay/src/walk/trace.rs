//! The trace of a walk: the nodes asked, their answers, and the errors of a walk.

use std::fmt;

use atoll_key::Key;
use atoll_net::CallError;

use crate::Node;

/// A question of a walk, and its answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Asked {
    /// The node that was asked.
    pub node: Node,
    /// Whether it was asked as the key's root.
    pub as_root: bool,
    /// Whether it is this very node, so that the question crossed no network.
    pub local: bool,
    /// Its answer.
    pub said: Said,
}

/// An answer, in short.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Said {
    /// Had it.
    Done,
    /// Is the root and does not have it.
    Absent,
    /// Named this many nodes nearer to the key.
    Closer(usize),
    /// Named the root.
    Root(Node),
    /// Named its predecessor.
    NotRoot(Node),
    /// Named no node, or none of use.
    Nowhere,
    /// Did not answer, or refused.
    Failed(CallError),
    /// Was not asked, having left an earlier call unanswered.
    Silent,
}

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Said::Done => f.write_str("has it"),
            Said::Absent => f.write_str("should have it and does not"),
            Said::Closer(count) => write!(f, "named {count} nearer nodes"),
            Said::Root(node) => write!(f, "named {node:?} as the root"),
            Said::NotRoot(node) => write!(f, "named its predecessor {node:?}"),
            Said::Nowhere => f.write_str("named no nearer node"),
            Said::Failed(error) => error.fmt(f),
            Said::Silent => f.write_str("did not answer of late and was not asked again"),
        }
    }
}

/// Everything a walk asked, in the order in which the answers came.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Trace(pub Vec<Asked>);

impl Trace {
    /// Calls that were answered. As in CFS Figure 14, attempts to reach failed nodes do
    /// not count, nor does asking this node itself.
    pub fn calls(&self) -> usize {
        let answered = |a: &&Asked| !matches!(a.said, Said::Failed(_) | Said::Silent);
        self.0.iter().filter(|a| !a.local).filter(answered).count()
    }

    /// Calls that brought no answer (CFS Figure 15).
    pub fn failures(&self) -> usize {
        self.0.iter().filter(|a| matches!(a.said, Said::Failed(_))).count()
    }

    /// Whether all nodes answered that were asked or should have been.
    pub fn all_answered(&self) -> bool {
        !self.0.iter().any(|a| matches!(a.said, Said::Failed(_) | Said::Silent))
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("no node was asked");
        }
        for (i, asked) in self.0.iter().enumerate() {
            let separator = if i == 0 { "" } else { "; " };
            write!(f, "{separator}{:?} {}", asked.node, asked.said)?;
        }
        Ok(())
    }
}

/// Why a walk did not find its key.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum WalkError {
    /// The root and those of its successors that answered do not have it.
    #[error("key {key} is absent: {trace}")]
    Absent {
        /// The key.
        key: Key,
        /// The live root, then its successors as far as they are known.
        roots: Vec<Node>,
        /// The nodes asked, and their answers.
        trace: Trace,
    },
    /// The root of the key was not reached.
    #[error("no way to the root of key {key}: {trace}")]
    NoWay {
        /// The key.
        key: Key,
        /// The nodes asked, and their answers.
        trace: Trace,
    },
    /// This node is not on a ring, or has just lost all its successors.
    #[error("this node is not on a ring (yet)")]
    NotJoined,
    /// The walk's deadline passed or its questions ran out.
    #[error("gave up the way to key {key}: {trace}")]
    GaveUp {
        /// The key.
        key: Key,
        /// The nodes asked, and their answers.
        trace: Trace,
    },
}

impl WalkError {
    /// The nodes asked, and their answers.
    pub fn trace(&self) -> Option<&Trace> {
        match self {
            WalkError::Absent { trace, .. }
            | WalkError::NoWay { trace, .. }
            | WalkError::GaveUp { trace, .. } => Some(trace),
            WalkError::NotJoined => None,
        }
    }
}
