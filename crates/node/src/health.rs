//! Whether a node's blocks have the copies that the network was made for, from what its status says.
//!
//! A node knows of the blocks of which it is the root. It counts what it has against what the network
//! was made for, never against the nodes that happen to be left.

use std::collections::BTreeSet;

use crate::counted::counted;
use crate::status::{AwayNode, Health, Status};

/// Decides [`Status::health`] and says why; leaves out of [`Status::away`] who is on the ring.
pub(crate) fn judge(status: &mut Status) {
    name_the_away(status);
    let lacking = lacking(status);
    let unknown = unknown(status);
    status.health = match (lacking.is_empty(), unknown.is_empty()) {
        (false, _) => Health::Degraded,
        (true, false) => Health::Unknown,
        (true, true) => Health::Healthy,
    };
    status.health_reasons = lacking.into_iter().chain(unknown).collect();
}

/// Who is away is known only where all of the ring is: a node has connections to part of a large one.
fn name_the_away(status: &mut Status) {
    if status.known_nodes.is_none() || !status.joined {
        status.away.clear();
        return;
    }
    let on_ring: BTreeSet<&String> =
        status.successors.iter().chain(&status.predecessor).map(|node| &node.peer_id).collect();
    status.away.retain(|node| !node.addr.is_empty() && !on_ring.contains(&node.peer_id));
    status.away.sort_by_key(|node| std::cmp::Reverse(node.last_seen_unix_secs));
}

/// What is known to be lacking.
fn lacking(status: &Status) -> Vec<String> {
    let repair = &status.repair;
    let mut reasons = Vec::new();
    reasons.extend(status.not_member.clone());
    if let Some(why) = &status.disk_trouble {
        reasons.push(format!("this node's disk does not take blocks: {why}"));
    }
    if repair.vanished_nodes > 0 {
        reasons.push(format!(
            "{} neighbours disappeared together: blocks that only they had cannot be read",
            repair.vanished_nodes
        ));
    }
    if status.joined && (1..repair.replicas_wanted).contains(&repair.replicas_present) {
        reasons.push(too_few(status));
    }
    if repair.stage == "differing" {
        reasons.extend(repair.open.iter().map(|open| {
            format!(
                "{} not in step with the node at {}: {}",
                counted(open.blocks, "block is", "blocks are"),
                open.addr,
                open.why
            )
        }));
        if repair.open.is_empty() {
            reasons.push("copies are being made".into());
        }
    }
    reasons
}

/// Fewer nodes than copies wanted.
fn too_few(status: &Status) -> String {
    let (has, wanted) = (status.repair.replicas_present, status.repair.replicas_wanted);
    let missing = wanted - has;
    let copies = format!(
        "{has} of {wanted} copies of each block can be kept, because the ring has too few nodes"
    );
    let away: Vec<String> = status.away.iter().take(missing as usize).map(named).collect();
    let more = counted(u64::from(missing), "node", "nodes");
    match away.as_slice() {
        [] => format!("{copies}: add {more} (`atoll invite`)"),
        away => format!(
            "{copies}: away {} {}; start what is away, or add {more} (`atoll invite`)",
            if away.len() == 1 { "is" } else { "are" },
            away.join(" and ")
        ),
    }
}

fn named(node: &AwayNode) -> String {
    let id = node.peer_id.get(..12).unwrap_or(&node.peer_id);
    format!("{id} at {}", node.addr)
}

/// What this node does not know yet.
fn unknown(status: &Status) -> Vec<String> {
    if !status.joined {
        return vec!["this node has no place on the ring yet".into()];
    }
    let why = match status.repair.stage.as_str() {
        "no_place" => "this node does not know yet which blocks it sees to",
        "not_compared" => {
            "this node has not compared its blocks with the others since it started: that takes \
             some seconds"
        }
        "new_neighbours" => "the nodes around this one have changed, and are being compared",
        "requested" => "blocks were found missing, and are being looked for",
        _ => return Vec::new(),
    };
    vec![why.into()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::{OpenReplica, Repair, RingNode};

    fn judged(change: impl Fn(&mut Status)) -> (Health, String) {
        let repair = Repair {
            replicas_wanted: 3,
            replicas_present: 3,
            stage: "in_step".into(),
            fully_replicated: true,
            ..Repair::default()
        };
        let mut status = Status { joined: true, known_nodes: Some(3), repair, ..Status::default() };
        change(&mut status);
        judge(&mut status);
        (status.health, status.health_reasons.join("; "))
    }

    #[test]
    fn what_is_had_is_counted_against_what_is_wanted() {
        assert_eq!(judged(|_| {}), (Health::Healthy, String::new()));
        let (health, why) = judged(|status| status.repair.replicas_present = 1);
        assert_eq!(health, Health::Degraded);
        let said = "1 of 3 copies of each block can be kept, because the ring has too few nodes: \
                    add 2 nodes (`atoll invite`)";
        assert_eq!(why, said);
    }

    #[test]
    fn the_nodes_that_are_away_are_named() {
        let node = |id: &str, last_seen_unix_secs| AwayNode {
            peer_id: id.into(),
            addr: format!("10.0.0.1:{last_seen_unix_secs}"),
            last_seen_unix_secs,
        };
        let away = vec![node("aa", 1), node("bb", 9), node("on-the-ring", 7)];
        let two_left = |known_nodes: Option<u64>| {
            let away = away.clone();
            judged(move |status| {
                status.repair.replicas_present = 2;
                status.known_nodes = known_nodes;
                status.away = away.clone();
                status.successors =
                    vec![RingNode { peer_id: "on-the-ring".into(), ..RingNode::default() }];
            })
        };
        let (_, why) = two_left(Some(2));
        assert!(
            why.contains("away is bb at 10.0.0.1:9; start what is away, or add 1 node"),
            "{why}"
        );
        let (_, why) = two_left(None);
        assert!(!why.contains("away"), "not known of a large ring: {why}");
    }

    #[test]
    fn what_is_not_known_yet_is_neither_healthy_nor_degraded() {
        for stage in ["no_place", "not_compared", "new_neighbours", "requested"] {
            let (health, why) = judged(|status| status.repair.stage = stage.into());
            assert!(health == Health::Unknown && !why.is_empty(), "{stage}");
        }
        assert_eq!(judged(|status| status.joined = false).0, Health::Unknown);
        // What is known to be lacking counts more.
        let both = judged(|status| {
            status.repair.stage = "new_neighbours".into();
            status.repair.replicas_present = 2;
        });
        assert_eq!(both.0, Health::Degraded);
    }

    #[test]
    fn what_keeps_replicas_apart_is_said() {
        let open = OpenReplica {
            addr: "10.0.0.7:1".into(),
            blocks: 2,
            why: "it has no room".into(),
            ..OpenReplica::default()
        };
        let differing = judged(|status| {
            status.repair.stage = "differing".into();
            status.repair.open = vec![open.clone()];
        });
        let said = "2 blocks are not in step with the node at 10.0.0.7:1: it has no room";
        assert_eq!(differing, (Health::Degraded, said.into()));
        for change in [
            (|status| status.not_member = Some("removed".into())) as fn(&mut Status),
            |status| status.disk_trouble = Some("full of holes".into()),
            |status| status.repair.vanished_nodes = 3,
            |status| status.repair.stage = "differing".into(),
        ] {
            assert_eq!(judged(change).0, Health::Degraded);
        }
    }
}
