//! Why something cannot be done with a volume.

use std::io;
use std::path::Path;

use minicbor::{Decode, Encode};

use crate::dir::DirError;
use crate::shell_word::shell_word;

/// Why something could not be done with a volume.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Encode, Decode)]
pub enum VolumeError {
    /// Not a name for a volume.
    #[error(
        "{name:?} cannot be a volume's name: {why}; choose another (`--name` for a published directory)"
    )]
    #[n(0)]
    BadName {
        /// The name.
        #[n(0)]
        name: String,
        /// What is wrong with it.
        #[n(1)]
        why: String,
    },
    /// The name belongs to another directory.
    #[error(
        "the volume {name} is published from {source_dir}; choose another name with --name, \
         or say with --moved that the directory is here now"
    )]
    #[n(1)]
    NameTaken {
        /// The name.
        #[n(0)]
        name: String,
        /// The directory it is published from.
        #[n(1)]
        source_dir: String,
    },
    /// A volume of this name and another key is here already.
    #[error("a volume {name} with another key is here already")]
    #[n(2)]
    OtherKey {
        /// The name.
        #[n(0)]
        name: String,
    },
    /// No volume has this name.
    #[error("no volume {name} is published from this node")]
    #[n(3)]
    Unknown {
        /// The name.
        #[n(0)]
        name: String,
    },
    /// Part of the manifest is missing, e.g. after a power failure.
    #[error("the node lost what it was to keep ({has} of {expected} blocks noted); publish again")]
    #[n(4)]
    Gap {
        /// Hashes the node has.
        #[n(0)]
        has: u64,
        /// Hashes the client sent before.
        #[n(1)]
        expected: u64,
    },
    /// The root is not the volume's.
    #[error("not a root of this volume: {why}")]
    #[n(5)]
    WrongRoot {
        /// What is wrong with it.
        #[n(0)]
        why: String,
    },
    /// A higher version is kept already.
    #[error("version {held} of the volume is kept already, {offered} is older")]
    #[n(6)]
    Superseded {
        /// What was to be kept.
        #[n(0)]
        offered: u64,
        /// What is.
        #[n(1)]
        held: u64,
    },
    /// The node's directory failed.
    #[error("the node cannot use its directory: {what}")]
    #[n(7)]
    Disk {
        /// What happened.
        #[n(0)]
        what: String,
    },
    /// There is nothing to keep alive: not yet, or not any more.
    #[error("nothing is published as {name}")]
    #[n(8)]
    Unpublished {
        /// The name.
        #[n(0)]
        name: String,
    },
    /// The volume is written from another node from now on.
    #[error(
        "the volume {name} was moved to another node; `atoll volume move --cancel {}` keeps it \
         here, if no node has it yet",
        shell_word(name)
    )]
    #[n(9)]
    Moved {
        /// The name.
        #[n(0)]
        name: String,
    },
    /// The node to which the volume was moved has it now, and this one has forgotten it.
    #[error("another node writes the volume {name} now; it is forgotten here")]
    #[n(10)]
    TakenOver {
        /// The name.
        #[n(0)]
        name: String,
    },
}

impl From<DirError> for VolumeError {
    fn from(error: DirError) -> VolumeError {
        VolumeError::Disk { what: error.to_string() }
    }
}

pub(crate) fn io_error(path: &Path) -> impl FnOnce(io::Error) -> VolumeError {
    let path = path.display().to_string();
    move |error| VolumeError::Disk { what: format!("{path}: {error}") }
}
