//! `atoll unpublish`: stop keeping a volume alive.
//!
//! CFS §3.1: "CFS has no explicit delete operation: instead, a publisher can simply stop
//! asking for extensions." The ring drops the blocks when their leases have run out.

use atoll_node::Client;

use crate::connection;
use crate::failure::Failure;
use crate::global::Global;
use crate::output::Output;
use crate::units;

/// Arguments of `atoll unpublish`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll unpublish docs

The ring drops the blocks when their leases have run out: at most 30 days from now, or as long as
`atoll publish --lease` said at most; until then readers still find them. They cannot go sooner: another volume
may have the same blocks. Only volumes made by `atoll volume create` give their room back within minutes. The volume's key stays here:
publishing the directory again brings the same address back.")]
pub(crate) struct Args {
    /// Names of volumes, as `atoll volumes` lists them
    #[arg(value_name = "NAME", required = true)]
    names: Vec<String>,
}

/// Stops keeping them.
pub(crate) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let client = connection::impatient(global).await?;
    let mut output = Output::new();
    for name in &args.names {
        let until = stop(&client, name).await?;
        output.line(format!(
            "{name}: no longer kept; its blocks may go from {until} UTC on, when their leases end (other volumes may have them \
             too, so they cannot go sooner)"
        ))?;
        output.flush()?;
    }
    Ok(())
}

/// Stops keeping a volume; until when its leases last.
pub(super) async fn stop(client: &Client, name: &str) -> Result<String, Failure> {
    let volumes = client.volumes().await.map_err(connection::failure)?;
    client.unpublish_volume(name).await.map_err(connection::failure)?;
    let expiry = volumes.iter().find(|volume| volume.name == name);
    Ok(units::unix_date(expiry.map_or(0, |volume| volume.lease_expires_unix_secs)))
}
