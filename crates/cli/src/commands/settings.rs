//! `atoll settings`: what can be changed while a node runs.

use atoll_node::{NodeSettings, SettingsChange, VirtualServers};

use crate::connection;
use crate::failure::Failure;
use crate::global::Global;
use crate::output;
use crate::units;

/// Arguments of `atoll settings`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll settings
  atoll settings --virtual-servers 8
  atoll settings --virtual-servers auto --cache 256MiB

A change holds at once and for later starts. Fewer virtual servers: their blocks go to
the nodes that take over before they are dropped here.

A node that has lost the other nodes takes no writes until a majority of the nodes that keep a block
together is back, however long that takes, and it reads no version of a volume that is older
than one it has read before. Only --forget-absent changes that: use it when the others, or
the newer version, will never come back.")]
pub(crate) struct Args {
    /// How many places on the ring to have, and so what share of all blocks to hold:
    /// a number, or `auto` for one per 10 GiB of storage
    #[arg(long, value_name = "N|auto")]
    virtual_servers: Option<VirtualServers>,

    /// Memory for blocks cached for other nodes; 0 for no cache
    #[arg(long, value_name = "SIZE", value_parser = units::parse_size)]
    cache: Option<u64>,

    /// Treat the nodes and updates that cannot be found now as gone for good: the nodes that
    /// are there count as the whole ring, older versions of volumes can be read again, and the
    /// warning about nodes that disappeared together ends
    #[arg(long)]
    forget_absent: bool,

    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// Makes the changes that are given and shows the result.
pub(crate) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let client = connection::impatient(global).await?;
    let change = SettingsChange { virtual_servers: args.virtual_servers, cache_bytes: args.cache };
    let settings = match change == SettingsChange::default() {
        true => client.settings().await,
        false => client.change_settings(change).await,
    };
    let settings = settings.map_err(connection::failure)?;
    if args.forget_absent {
        client.forget_absent().await.map_err(connection::failure)?;
    }
    let lines = describe(&settings).into_iter().map(|(name, value)| format!("{name:>15}  {value}"));
    output::show(args.json, &settings, lines)
}

fn describe(settings: &NodeSettings) -> Vec<(&'static str, String)> {
    let positions = units::counted(settings.positions.into(), "place", "places");
    vec![
        ("virtual servers", format!("{} ({positions} on the ring)", settings.virtual_servers)),
        ("cache", units::size(settings.cache_bytes)),
        ("storage", format!("{} (see `atoll contribute`)", units::size(settings.storage_bytes))),
        ("node IDs", format!("from the {} (of the network)", source_of_ids(&settings.node_ids))),
        ("copies", format!("{} of each block (of the network)", settings.replicas)),
    ]
}

fn source_of_ids(profile: &str) -> &str {
    match profile {
        "identity" => "node's key",
        "address" => "node's address",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_is_shown_with_its_unit() {
        let settings = NodeSettings {
            virtual_servers: "auto".into(),
            positions: 5,
            cache_bytes: 64 << 20,
            storage_bytes: 50 << 30,
            node_ids: "identity".into(),
            replicas: 3,
        };
        let all: Vec<String> = describe(&settings).into_iter().map(|(_, value)| value).collect();
        let all = all.join("\n");
        for part in ["auto (5 places", "64.0 MiB", "50.0 GiB", "node's key", "3 of each"] {
            assert!(all.contains(part), "{part}: {all}");
        }
    }
}
