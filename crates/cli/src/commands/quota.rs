//! `atoll quota`: how much of this node publishers may use, and who does (CFS §5.4).

use std::str::FromStr;

use atoll_node::{QuotaAccount, QuotaChange, QuotaShare, QuotaStatus, Share};

use crate::connection;
use crate::failure::Failure;
use crate::global::Global;
use crate::output;
use crate::units;

/// Arguments of `atoll quota`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll quota
  atoll quota --address-share 5%
  atoll quota --key-share auto --publisher-nodes 4
  atoll quota --json | jq '.keys[] | [.who, .used_bytes, .allowed_bytes]'

Each node keeps only so much for one publishing node and for one address. Unless shares
are set, they shrink as the network grows, so that a publisher may use as much as
--publisher-nodes whole nodes hold, wherever its blocks fall. Publishing may fill three
quarters of a share under 100%; the rest is for copies that repair brings. A change holds
at once and for later starts; what is kept already stays until its lease runs out.")]
pub(crate) struct Args {
    /// The share of this node's storage for one publishing node: a percentage, or `auto`
    #[arg(long, value_name = "PERCENT|auto")]
    key_share: Option<ShareOrAuto>,

    /// The share of this node's storage for one address: a percentage, or `auto`
    #[arg(long, value_name = "PERCENT|auto")]
    address_share: Option<ShareOrAuto>,

    /// How many nodes' worth of storage a publisher may use in the whole network, where a
    /// share is `auto` [default: 16]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    publisher_nodes: Option<u32>,

    /// The least an `auto` share is, however large the network [default: 0.1%]
    #[arg(long, value_name = "PERCENT", value_parser = parse_percent)]
    floor_share: Option<Share>,

    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// A percentage or `auto`.
#[derive(Clone, Copy, Debug)]
struct ShareOrAuto(QuotaShare);

impl FromStr for ShareOrAuto {
    type Err = String;

    fn from_str(text: &str) -> Result<ShareOrAuto, String> {
        if text == "auto" {
            return Ok(ShareOrAuto(QuotaShare::Automatic));
        }
        parse_percent(text).map(|share| ShareOrAuto(QuotaShare::Fixed(share)))
    }
}

pub(crate) fn parse_percent(text: &str) -> Result<Share, String> {
    let number = text.trim().trim_end_matches('%').trim_end();
    match number.parse::<f64>() {
        Ok(percent) if (0.0001..=100.0).contains(&percent) => {
            Ok(Share::from_millionths((percent * 10_000.0).round() as u32))
        }
        _ => Err("it is a percentage above 0 and up to 100, e.g. 5% or 0.1%".into()),
    }
}

/// Makes the changes that are given and shows the result.
pub(crate) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let client = connection::impatient(global).await?;
    let change = QuotaChange {
        key_share: args.key_share.map(|share| share.0),
        address_share: args.address_share.map(|share| share.0),
        publisher_nodes: args.publisher_nodes,
        floor_share: args.floor_share,
    };
    let quota = match change == QuotaChange::default() {
        true => client.quota().await,
        false => client.change_quota(change).await,
    };
    let quota = quota.map_err(connection::failure)?;
    output::show(args.json, &quota, describe(&quota))
}

fn percent(share: f64) -> String {
    let digits = if share < 0.001 { 4 } else { 2 };
    let text = format!("{:.digits$}", share * 100.0);
    format!("{}%", text.trim_end_matches('0').trim_end_matches('.'))
}

fn describe(quota: &QuotaStatus) -> Vec<String> {
    let offered = units::size(quota.capacity_bytes);
    let nodes = format!("{:.0}", quota.estimated_nodes.max(1.0));
    let why = |set: Option<f64>| match set {
        Some(_) => "as set".to_string(),
        None => format!(
            "{} worth in a network of about {nodes}, at least {}",
            units::counted(quota.publisher_nodes.into(), "node's", "nodes'"),
            percent(quota.floor_share)
        ),
    };
    let allowed = |what: &str, share: f64, bytes: u64, set: Option<f64>| {
        let rest = match share < 1.0 {
            true => "; a quarter of the share is left for copies",
            false => "",
        };
        let (most, share) = (units::size(bytes), percent(share));
        format!("{what:<20} at most {most} of {offered} ({share}: {}{rest})", why(set))
    };
    let mut lines = vec![
        allowed("a publishing node", quota.key_share, quota.key_allowed_bytes, quota.key_share_set),
        allowed(
            "an address",
            quota.address_share,
            quota.address_allowed_bytes,
            quota.address_share_set,
        ),
    ];
    if quota.refused_blocks > 0 {
        let blocks = units::counted(quota.refused_blocks, "block", "blocks");
        lines.push(format!("{blocks} refused over quota since the start"));
    }
    for (title, accounts) in
        [("kept for publishing nodes:", &quota.keys), ("kept for addresses:", &quota.addresses)]
    {
        if !accounts.is_empty() {
            lines.push(title.into());
            lines.extend(accounts.iter().map(account));
        }
    }
    lines
}

fn account(account: &QuotaAccount) -> String {
    let who = if account.brought {
        format!("{} (copies it brought)", account.who)
    } else {
        account.who.clone()
    };
    format!(
        "  {who:<40} {:>10} of {:>10}  {}",
        units::size(account.used_bytes),
        units::size(account.allowed_bytes),
        units::counted(account.blocks, "block", "blocks"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_percentages() {
        assert_eq!(parse_percent("5%").map(Share::millionths), Ok(50_000));
        assert_eq!(parse_percent("0.1").map(Share::millionths), Ok(1_000));
        for bad in ["0", "101%", "-1", "half", "", "NaN"] {
            assert!(parse_percent(bad).is_err(), "{bad}");
        }
        assert!(matches!("auto".parse(), Ok(ShareOrAuto(QuotaShare::Automatic))));
        assert_eq!((percent(1.0), percent(0.016)), ("100%".into(), "1.6%".into()));
        assert_eq!(percent(0.000_001), "0.0001%");
    }

    #[test]
    fn who_uses_what_is_shown_with_what_is_allowed() {
        let quota = QuotaStatus {
            estimated_nodes: 1000.2,
            capacity_bytes: 10 << 30,
            publisher_nodes: 16,
            floor_share: 0.001,
            key_share: 0.016,
            key_allowed_bytes: 160 << 20,
            address_share: 0.05,
            address_share_set: Some(0.05),
            address_allowed_bytes: 384 << 20,
            keys: vec![QuotaAccount {
                who: "92ba4aed9cf7".into(),
                used_bytes: 1 << 20,
                blocks: 64,
                allowed_bytes: 160 << 20,
                ..QuotaAccount::default()
            }],
            refused_blocks: 3,
            ..QuotaStatus::default()
        };
        let text = describe(&quota).join("\n");
        for part in [
            "160.0 MiB of 10.0 GiB (1.6%: 16 nodes' worth in a network of about 1000",
            "at most 384.0 MiB of 10.0 GiB (5%: as set; a quarter of the share is left for copies)",
            "3 blocks refused",
            "92ba4aed9cf7",
            "64 blocks",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
