//! `atoll id`: who the user of this node is to others.

use std::sync::Arc;

use atoll_env::{Env, TokioRuntime};
use atoll_key::UserAddress;
use serde::Serialize;

use crate::failure::Failure;
use crate::global::Global;
use crate::output;
use crate::user;

/// Arguments of `atoll id`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll id
  atoll id --json | jq -r .user

Give the first line to somebody who shares a volume with you: `atoll grant VOLUME atolluser:KEY`.
The digits are computed from the key. If they are the same when you read them to each other, nobody
has put another key in its place: a key with the same digits takes 2^79 attempts to find.
The secret key is in DIR/identity/user.key, made when it is first needed.")]
pub(crate) struct Args {
    /// One JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Shown {
    user: String,
    digits: String,
}

/// Shows it.
pub(crate) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let env: Env = Arc::new(TokioRuntime::current());
    let key = user::key_or_new(&user::directory(global)?, &env)?;
    let address = UserAddress(key.user_id());
    let shown = Shown { user: address.to_string(), digits: address.spoken() };
    let lines = [shown.user.clone(), shown.digits.clone()];
    output::show(args.json, &shown, lines)
}
