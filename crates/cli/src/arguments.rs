//! The command line, as one tree: help, manual pages and completions are made from it.

use clap::{Parser, Subcommand};

use crate::failure::EXIT_CODES;
use crate::global::Global;
use crate::{commands, nfs, pool, tfs};

const ABOUT: &str = "\
Publish directory trees to a ring of nodes and read or mount them anywhere.

Start a node with `atoll up`; every other command talks to the node of the same
directory (--dir). Results go to standard output, progress and errors to standard error.";

/// What was typed.
#[derive(Parser, Debug)]
#[command(
    name = "atoll",
    version,
    about = "Pool the spare disk of many machines into file systems",
    long_about = ABOUT,
    after_help = "`atoll COMMAND --help` shows examples. Exit codes are listed by `atoll --help`.",
    after_long_help = EXIT_CODES,
    propagate_version = true,
    max_term_width = 100,
    subcommand_required = true,
    arg_required_else_help = true,
)]
pub(crate) struct Arguments {
    /// What every command takes.
    #[command(flatten)]
    pub global: Global,
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands, in the order a person meets them.
#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Run a node in the foreground; the first start makes its identity and a network
    Up(commands::up::Args),
    /// Print a code with which other nodes join this network
    Invite(commands::invite::Args),
    /// List the network's members, or remove a node
    Member(commands::member::Args),
    /// Replace the network's secret while it runs
    Secret(commands::secret::Args),
    /// Publish a directory tree, or update what was published
    Publish(commands::publish::Args),
    /// Make a volume of your own that is mounted read-write; show, copy, move or delete volumes
    Volume(commands::volume::Args),
    /// Show who you are to those who share volumes with you
    Id(commands::id::Args),
    /// Let a user or a group write a shared volume or a part of it, or read an encrypted one
    Grant(commands::grant::Args),
    /// Take the right to write a shared volume away
    Revoke(commands::grant::RevokeArgs),
    /// Make groups of users, and say who belongs to them
    Group(commands::group::Args),
    /// List the files of a mounted shared volume that were written twice at the same time
    Conflicts(commands::conflicts::Args),
    /// Explain a file of a mounted shared volume: its replicas, what is pending, who uses it, what to do
    Why(commands::why::Args),
    /// List the versions of files of a mounted shared volume that are kept
    Log(commands::log::Args),
    /// Bring a file or directory of a mounted shared volume back as it was
    Restore(commands::restore::Args),
    /// List the volumes published from this node, and until when the ring keeps them
    Volumes(commands::volumes::Args),
    /// Renew the leases of published volumes now
    Renew(commands::renew::Args),
    /// Stop keeping a published volume; the ring drops it when its leases run out
    Unpublish(commands::unpublish::Args),
    /// List a directory
    Ls(commands::ls::Args),
    /// Show a directory and everything below it
    Tree(commands::tree::Args),
    /// Write files to standard output
    Cat(commands::cat::Args),
    /// Show the attributes of a file
    Stat(commands::stat::Args),
    /// Copy a file or a tree out of a volume; run again, it goes on where it stopped
    Get(commands::get::Args),
    /// Mount a volume or a pool as a file system: your own read-write, any other read-only
    Mount(commands::mount::Args),
    /// Serve volumes, pools and transparent file systems to clients of NFS
    Nfs(nfs::Args),
    /// Unmount a mounted volume
    #[command(alias = "umount")]
    Unmount(commands::unmount::Args),
    /// Show the node's place on the ring, what it holds, and whether repair is done
    Status(commands::status::Args),
    /// Show or change the settings of the running node
    Settings(commands::settings::Args),
    /// Show or set how much of this node's storage publishers may use, and what each uses
    Quota(commands::quota::Args),
    /// Show or set how this node gives disk: a fixed size, up to a watermark, or transparently
    Contribute(commands::contribute::Args),
    /// Give back the disk space of blocks that are gone, at once
    Gc(commands::gc::Args),
    /// Make and look after pools: plain files of this machine's disk as one tree, served by `mount` and `nfs`
    Pool(pool::Args),
    /// Make, mount and look after transparent file systems
    Tfs(tfs::Args),
    /// Repeat the papers' experiments on a simulated network
    #[cfg(feature = "lab")]
    Lab(commands::lab::Args),
    /// Print a shell's completion script
    Completions(commands::completions::Args),
    /// Print the manual, or write one page per command into a directory
    Man(commands::man::Args),
    /// Compare two directory trees: bytes, names, links, modes and times
    #[command(hide = true)]
    Compare(commands::compare::Args),
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn every_command_shows_an_example() {
        for command in Arguments::command().get_subcommands() {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let example = format!("  atoll {}", command.get_name());
            assert!(
                help.starts_with("Examples:\n") && help.contains(&example),
                "{command}: {help}"
            );
        }
    }

    #[test]
    fn every_command_for_a_volume_shows_an_example() {
        let tree = Arguments::command();
        let volume = tree.find_subcommand("volume").expect("there is one");
        for command in volume.get_subcommands().filter(|command| command.get_name() != "list") {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let example = format!("atoll volume {}", command.get_name());
            assert!(
                help.starts_with("Examples:\n") && help.contains(&example),
                "{command}: {help}"
            );
        }
    }

    /// An argument of a command with a global one's name would hide it silently.
    #[test]
    fn every_command_takes_the_global_options() {
        let mut tree = Arguments::command();
        tree.build();
        for command in tree.get_subcommands().filter(|command| command.get_name() != "help") {
            for long in ["dir", "verbose", "quiet"] {
                let there = command.get_arguments().any(|arg| arg.get_long() == Some(long));
                assert!(there, "atoll {} has no --{long}", command.get_name());
            }
        }
    }

    #[test]
    fn the_directory_is_taken_before_and_after_the_command() {
        for line in [["atoll", "--dir", "/d", "status"], ["atoll", "status", "--dir", "/d"]] {
            let arguments = Arguments::try_parse_from(line).expect("valid");
            assert_eq!(arguments.global.dir().expect("absolute"), PathBuf::from("/d"));
        }
    }
}
