//! `atoll compare`.
use crate::arguments::Global;
use crate::failure::Failure;
/// Arguments.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll compare a b")]
pub struct Args {}
/// Run.
pub fn run(_: &Args, _: &Global) -> Result<(), Failure> {
    Ok(())
}
