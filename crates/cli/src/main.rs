//! The `atoll` command: arguments, progress, tables and JSON over the node's client and
//! the volume code. One module per command; it knows no protocol and no format.

// A command is a real program on a real machine: clocks and threads are its own.
#![allow(clippy::disallowed_methods)]
// They panic where nothing can be written: `output` and `messages` do not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod address;
mod arguments;
mod beneath;
mod commands;
mod connection;
mod crash;
mod failure;
mod global;
mod heap;
mod incomplete;
mod interrupt;
mod joined_volume;
mod logging;
mod messages;
mod moment;
mod mount_server;
mod mounted_past;
mod nfs;
mod output;
mod own_group;
mod own_volume;
mod passphrase;
mod pool;
mod progress;
mod read_key;
mod reading;
mod runtime;
mod served_volume;
mod shared_volume;
mod source_filter;
mod spool;
mod stat_cache;
mod terminal;
mod tfs;
mod tree_copy;
mod units;
mod user;
mod user_path;
mod volume_target;
mod waiting;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use tracing::level_filters::LevelFilter;

use crate::arguments::{Arguments, Command};
use crate::failure::Failure;
use crate::messages::note;
use crate::runtime::until_done;
use crate::waiting::told;

fn main() -> ExitCode {
    let is_json = asks_for_json(std::env::args_os());
    let done = match Arguments::try_parse() {
        Ok(arguments) => run(arguments),
        Err(refusal) if is_json && refusal.use_stderr() => Err(Failure::usage(&refusal)),
        // Help and versions are asked for this way too.
        Err(refusal) => refusal.exit(),
    };
    let exit = match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            match is_json {
                _ if failure.is_silent() => {}
                true => note!("{}", failure.to_json()),
                false => note!("error: {}", output::safe_message(&failure.to_string())),
            }
            ExitCode::from(failure.exit as u8)
        }
    };
    messages::finish();
    exit
}

/// Whether what a command line says is for a program to read, also if it makes no sense.
fn asks_for_json(arguments: impl Iterator<Item = OsString>) -> bool {
    arguments.take_while(|argument| argument != "--").any(|argument| argument == "--json")
}

/// Runs what was typed.
fn run(arguments: Arguments) -> Result<(), Failure> {
    let Arguments { global, command } = arguments;
    let quietest = match &command {
        // The standard error of a command that runs for long is read as a log.
        Command::Up(_) | Command::Mount(_) | Command::Nfs(_) => LevelFilter::INFO,
        Command::Tfs(args) if tfs::is_mount(args) => LevelFilter::INFO,
        _ => LevelFilter::ERROR,
    };
    let serves = match &command {
        Command::Up(_) => true,
        Command::Mount(args) => args.is_served_here(),
        Command::Nfs(args) => args.is_served_here(),
        Command::Tfs(args) => tfs::is_served_here(args),
        _ => false,
    };
    if serves {
        messages::never_wait();
        crash::end_at_panics();
    }
    logging::start(global.verbose, quietest)?;
    match &command {
        Command::Up(args) => commands::up::run(args, &global),
        Command::Mount(args) => commands::mount::run(args, &global),
        Command::Nfs(args) => nfs::run(args, &global),
        Command::Unmount(args) => commands::unmount::run(args),
        Command::Conflicts(args) => commands::conflicts::run(args),
        Command::Log(args) => commands::log::run(args),
        Command::Restore(args) => commands::restore::run(args, global.quiet),
        Command::Completions(args) => commands::completions::run(args, &Arguments::command()),
        Command::Man(args) => commands::man::run(args, Arguments::command()),
        Command::Pool(args) => until_done(pool::run(args, &global)),
        Command::Tfs(args) => tfs::run(args, &global),
        Command::Contribute(args) => until_done(commands::contribute::run(args, &global)),
        #[cfg(feature = "lab")]
        Command::Lab(args) => commands::lab::run(args, &global),
        Command::Compare(args) => commands::compare::run(args, &global),
        Command::Invite(args) => until_done(commands::invite::run(args, &global)),
        Command::Member(args) => until_done(commands::member::run(args, &global)),
        Command::Secret(args) => until_done(commands::secret::run(args, &global)),
        Command::Id(args) => until_done(commands::id::run(args, &global)),
        Command::Group(args) => {
            until_done(told(&global, "change the group", commands::group::run(args, &global)))
        }
        Command::Grant(args) => {
            until_done(told(&global, "grant that", commands::grant::run(args, &global)))
        }
        Command::Revoke(args) => {
            until_done(told(&global, "revoke that", commands::grant::revoke(args, &global)))
        }
        Command::Publish(args) => until_done(commands::publish::run(args, &global)),
        Command::Unpublish(args) => {
            let unpublishing = commands::unpublish::run(args, &global);
            until_done(told(&global, "take the volume off", unpublishing))
        }
        Command::Renew(args) => until_done(commands::renew::run(args, &global)),
        Command::Gc(args) => until_done(commands::gc::run(args, &global)),
        Command::Quota(args) => until_done(commands::quota::run(args, &global)),
        Command::Settings(args) => until_done(commands::settings::run(args, &global)),
        Command::Volume(args) => until_done(commands::volume::run(args, &global)),
        Command::Why(args) => until_done(commands::why::run(args, &global)),
        Command::Volumes(args) => until_done(commands::volumes::run(args, &global)),
        Command::Ls(args) => {
            until_done(told(&global, "list the directory", commands::ls::run(args, &global)))
        }
        Command::Tree(args) => {
            until_done(told(&global, "list the tree", commands::tree::run(args, &global)))
        }
        Command::Cat(args) => until_done(commands::cat::run(args, &global)),
        Command::Stat(args) => {
            until_done(told(&global, "show the file", commands::stat::run(args, &global)))
        }
        Command::Get(args) => until_done(commands::get::run(args, &global)),
        Command::Status(args) => until_done(commands::status::run(args, &global)),
    }
}
