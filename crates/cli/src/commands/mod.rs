//! The commands, one module each.

pub(crate) mod cat;
pub(crate) mod compare;
pub(crate) mod completions;
pub(crate) mod contribute;
pub(crate) mod gc;
pub(crate) mod get;
pub(crate) mod invite;
pub(crate) mod lab;
pub(crate) mod ls;
pub(crate) mod man;
pub(crate) mod member;
pub(crate) mod mount;
pub(crate) mod publish;
pub(crate) mod quota;
pub(crate) mod renew;
pub(crate) mod secret;
pub(crate) mod settings;
pub(crate) mod stat;
pub(crate) mod status;
pub(crate) mod tree;
pub(crate) mod unmount;
pub(crate) mod unpublish;
pub(crate) mod up;
pub(crate) mod volumes;

use std::future::Future;

use tracing::level_filters::LevelFilter;

use crate::arguments::{Arguments, Command};
use crate::failure::{Exit, Failure};
use crate::{logging, tfs};

/// Runs what was typed.
pub(crate) fn run(arguments: Arguments) -> Result<(), Failure> {
    let Arguments { global, command } = arguments;
    let quietest = match &command {
        // What runs for long has its standard error read as a log.
        Command::Up(_) | Command::Mount(_) => LevelFilter::INFO,
        Command::Tfs(args) if tfs::is_served(args) => LevelFilter::INFO,
        _ => LevelFilter::ERROR,
    };
    logging::start(global.verbose, quietest)?;
    match &command {
        Command::Up(args) => up::run(args, &global),
        Command::Mount(args) => mount::run(args, &global),
        Command::Unmount(args) => unmount::run(args),
        Command::Completions(args) => completions::run(args),
        Command::Man(args) => man::run(args),
        Command::Tfs(args) => tfs::run(args, &global),
        Command::Contribute(args) => until_done(contribute::run(args, &global)),
        Command::Lab(args) => lab::run(args, &global),
        Command::Compare(args) => compare::run(args, &global),
        Command::Invite(args) => until_done(invite::run(args, &global)),
        Command::Member(args) => until_done(member::run(args, &global)),
        Command::Secret(args) => until_done(secret::run(args, &global)),
        Command::Publish(args) => until_done(publish::run(args, &global)),
        Command::Unpublish(args) => until_done(unpublish::run(args, &global)),
        Command::Renew(args) => until_done(renew::run(args, &global)),
        Command::Gc(args) => until_done(gc::run(args, &global)),
        Command::Quota(args) => until_done(quota::run(args, &global)),
        Command::Settings(args) => until_done(settings::run(args, &global)),
        Command::Volumes(args) => until_done(volumes::run(args, &global)),
        Command::Ls(args) => until_done(ls::run(args, &global)),
        Command::Tree(args) => until_done(tree::run(args, &global)),
        Command::Cat(args) => until_done(cat::run(args, &global)),
        Command::Stat(args) => until_done(stat::run(args, &global)),
        Command::Get(args) => until_done(get::run(args, &global)),
        Command::Status(args) => until_done(status::run(args, &global)),
    }
}

/// Runs one command to its end. Work that it left on other threads is not waited for.
pub(crate) fn until_done<T>(
    command: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    let runtime = runtime()?;
    let result = runtime.block_on(command);
    runtime.shutdown_background();
    result
}

fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::new(Exit::Failed, "cannot start threads").because(error))
}
