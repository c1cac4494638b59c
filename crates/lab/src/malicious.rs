//! Lookups among liars (CFS §8: "it does not specifically defend against malicious
//! participants … it could incorrectly claim that a document did not exist").
//!
//! After 1,000 blocks were put, a share of the nodes begins to lie, a quarter of them in
//! each of four ways; then blocks are looked up from honest nodes. The liars keep their
//! part in the upkeep of the ring, as an attacker would:
//!
//! - *deniers* say that a block they hold does not exist, and name their successors;
//! - *forgers* send other bytes;
//! - *circlers* name nodes behind the key and themselves, and as a root another liar;
//! - *lurers* lead ever nearer to the key, from liar to liar, and end in a set of liars that
//!   they call its root and replicas.
//!
//! In the paper's settings a lookup has one route and believes that the node named as the root is
//! the root; it goes on to the next replica as CFS's did. As shipped it doubts roots that stand too
//! far from the key, and takes other routes. Both verify blocks, and both ask nodes that were
//! caught lying last: that is no switch.
//!
//! Wanted: with a fifth of the nodes lying and six copies, 99.9 % of lookups succeed.

use std::sync::Arc;

use atoll_dht::rpc::{self, LookupReply, LookupStep, from_header, to_header};
use atoll_env::BoxFuture;
use atoll_key::Key;
use atoll_net::{Peer, Refusal, Reply, Request, Service};
use atoll_overlay::{MAX_CLOSER, Node, Overlay, Route};
use bytes::Bytes;

use crate::LabError;
use crate::chart::{Axis, Chart, Ink, Mark, Point, Series, highest};
use crate::experiment::{Context, Experiment, Group, crossed, runs};
use crate::outcome::{Comparison, Csv, Outcome};
use crate::ring::{Network, Plan, Ring};
use crate::setting::Setting;
use crate::statistics::{Summary, summary};

pub(crate) const GROUP: Group = Group {
    experiments: &[Experiment {
        name: "malicious",
        title: "failed lookups against the share of nodes that lie",
        source: "CFS §8",
        nodes: Some(30..=20_000),
    }],
    run,
};

const BLOCK_BYTES: usize = 64;
const REPLICAS: usize = 6;
/// So many liars are named as a root and its successors.
const SET: usize = 16;
/// Lookups under way at a time.
const PARALLEL: usize = 10;
/// At least 99.9 % are to succeed.
const WANTED: f64 = 0.001;
const SHARES: [usize; 6] = [0, 5, 10, 20, 30, 40];
const QUICK_SHARES: [usize; 3] = [0, 20, 40];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Lie {
    Deny,
    Forge,
    Circle,
    Lure,
}

const LIES: [Lie; 4] = [Lie::Deny, Lie::Forge, Lie::Circle, Lie::Lure];

/// Answers lookups with a lie and everything else honestly.
struct Liar {
    lie: Lie,
    me: Node,
    honest: Arc<dyn Service>,
    overlay: Arc<dyn Overlay>,
    /// All liars, by position.
    ring: Arc<Vec<Node>>,
}

impl Service for Liar {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        if request.method != rpc::LOOKUP_STEP {
            return self.honest.handle(from, request);
        }
        match self.lie {
            Lie::Circle | Lie::Lure => {
                let lie = self.lead_astray(&request);
                Box::pin(async move { lie })
            }
            Lie::Deny | Lie::Forge => self.spoil(from, request),
        }
    }
}

impl Liar {
    /// A way to other liars.
    fn lead_astray(&self, request: &Request) -> Result<Reply, Refusal> {
        let LookupStep { key, as_root, .. } = from_header(&request.header)?;
        let route = match self.lie {
            Lie::Circle if as_root => Route::NotRoot(self.ring[0]),
            Lie::Circle => {
                let behind = liars_after(&self.ring, &key).take(MAX_CLOSER - 1);
                Route::closer(behind.chain([self.me]))
            }
            _ if as_root => return Ok(reply(&self.false_absence(&key), Vec::new())),
            _ => {
                let nearer = |node: &Node| node.id.key().strictly_between(self.me.id.key(), &key);
                let nearer: Vec<Node> =
                    liars_before(&self.ring, &key).into_iter().filter(nearer).collect();
                match nearer.is_empty() {
                    true => Route::Root(liars_after(&self.ring, &key).take(SET).collect()),
                    false => Route::closer(nearer),
                }
            }
        };
        Ok(reply(&LookupReply::Route(route), Vec::new()))
    }

    /// As a root that does not have the block, nor have those named after it.
    fn false_absence(&self, key: &Key) -> LookupReply {
        let others = liars_after(&self.ring, key).filter(|node| *node != self.me);
        LookupReply::Absent(others.take(SET).collect())
    }

    /// Lets the honest node answer, and spoils the block if there is one.
    fn spoil(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let (lie, honest) = (self.lie, self.honest.handle(from, request));
        let successors = self.overlay.successors_of(&self.me);
        Box::pin(async move {
            let mut answer = honest.await?;
            let said: LookupReply = from_header(&answer.header)?;
            if !matches!(said, LookupReply::Found(_) | LookupReply::Cached { .. }) {
                return Ok(answer);
            }
            if lie == Lie::Deny {
                return Ok(reply(&LookupReply::Absent(successors), Vec::new()));
            }
            for part in &mut answer.parts {
                *part = Bytes::from(vec![0xff; part.len()]);
            }
            Ok(answer)
        })
    }
}

fn reply(said: &LookupReply, parts: Vec<Bytes>) -> Reply {
    Reply { header: to_header(said), parts }
}

/// The liars at and after a key, around the ring.
fn liars_after<'a>(ring: &'a [Node], key: &Key) -> impl Iterator<Item = Node> + 'a {
    let at = ring.partition_point(|liar| liar.id.key() < key);
    (0..ring.len()).map(move |n| ring[(at + n) % ring.len()])
}

/// The liars nearest before a key, nearest first.
fn liars_before(ring: &[Node], key: &Key) -> Vec<Node> {
    let at = ring.partition_point(|liar| liar.id.key() < key);
    let count = ring.len().min(MAX_CLOSER);
    (1..=count).map(|back| ring[(at + ring.len() - back) % ring.len()]).collect()
}

struct Found {
    setting: Setting,
    liars_percent: usize,
    failed: f64,
    rpcs: f64,
}

fn run(context: &Context<'_>) -> Result<Vec<Outcome>, LabError> {
    let nodes = context.nodes(1000, 300);
    let blocks = context.size(1000, 200);
    let seeds = context.seeds(5, 2);
    let shares = if context.options.quick { &QUICK_SHARES[..] } else { &SHARES[..] };
    let parts = crossed(&Setting::BOTH, shares, &seeds);
    let found = context.each(&parts, |(setting, share, seed)| {
        let mut dht = setting.dht();
        dht.replicas = REPLICAS;
        let plan = Plan {
            seed: *seed,
            nodes,
            chord: setting.chord(nodes),
            dht,
            upkeep: true,
            virtual_servers: Vec::new(),
            network: Network::plain(context.options.latency.clone()),
        };
        look_up_among_liars(&plan, *setting, *share, blocks)
    })?;
    Ok(vec![outcome(&found, shares, nodes, blocks, &seeds)])
}

/// From now on these nodes lie, in turn in each of the four ways.
pub(crate) fn let_lie(ring: &Ring, liars: &[usize]) {
    let position = |n: &usize| Node::of(ring.sim.peer(ring.members[*n].host));
    let mut positions: Vec<Node> = liars.iter().map(position).collect();
    positions.sort_by_key(|node| node.id);
    let positions = Arc::new(positions);
    for (nth, at) in liars.iter().enumerate() {
        let (lie, me) = (LIES[nth % LIES.len()], position(at));
        ring.disguise(*at, |honest, overlay| {
            Arc::new(Liar { lie, me, honest, overlay, ring: positions.clone() })
        });
    }
}

fn look_up_among_liars(
    plan: &Plan,
    setting: Setting,
    liars_percent: usize,
    blocks: usize,
) -> Result<Found, LabError> {
    let ring = Ring::new(plan);
    ring.put(blocks, BLOCK_BYTES)?;
    let mut members: Vec<usize> = (0..plan.nodes).collect();
    let liars = plan.nodes * liars_percent / 100;
    for n in 0..liars {
        let chosen = n + ring.random_below(members.len() - n);
        members.swap(n, chosen);
    }
    let (liars, honest) = members.split_at(liars);
    let_lie(&ring, liars);
    let asked: Vec<(usize, usize)> = (0..blocks)
        .map(|_| (honest[ring.random_below(honest.len())], ring.random_below(blocks)))
        .collect();
    let found = ring.look_up_from(&asked, BLOCK_BYTES, PARALLEL)?;
    let done: Vec<f64> = found.iter().flatten().map(|f| f.trace.calls() as f64).collect();
    Ok(Found {
        setting,
        liars_percent,
        failed: 1.0 - done.len() as f64 / found.len() as f64,
        rpcs: summary(done).mean,
    })
}

/// The runs of one point.
fn over_runs(found: &[Found], setting: Setting, percent: usize, of: fn(&Found) -> f64) -> Summary {
    let runs = found.iter().filter(|f| f.setting == setting && f.liars_percent == percent);
    summary(runs.map(of))
}

fn csv(found: &[Found], shares: &[usize]) -> Csv {
    let mut csv =
        Csv::new(&["setting", "liars_percent", "failed_lookups", "failed_most", "rpcs", "runs"]);
    for (setting, share, _) in crossed(&Setting::BOTH, shares, &[0]) {
        let failed = over_runs(found, setting, share, |f| f.failed);
        let rpcs = over_runs(found, setting, share, |f| f.rpcs);
        let [mean, most, rpcs] = [failed.mean, failed.most, rpcs.mean].map(|n| format!("{n:.5}"));
        csv.row(&[&setting, &share, &mean, &most, &rpcs, &failed.count]);
    }
    csv
}

fn outcome(
    found: &[Found],
    shares: &[usize],
    nodes: usize,
    blocks: usize,
    seeds: &[u64],
) -> Outcome {
    let said = |setting, share| {
        let failed = over_runs(found, setting, share, |f| f.failed).mean;
        let rpcs = over_runs(found, setting, share, |f| f.rpcs).mean;
        format!("{:.2} % ({rpcs:.1} RPCs)", failed * 100.0)
    };
    let compared = |share: &usize| {
        let paper = if *share == 0 { "0" } else { "no defence (§8)" };
        let [ours, shipped] = Setting::BOTH.map(|setting| said(setting, *share));
        Comparison::new(format!("lookups that fail, {share} % liars"), paper, ours, shipped)
    };
    Outcome {
        name: "malicious",
        title: "lookups among liars".into(),
        source: "CFS §8",
        setup: format!(
            "{nodes} nodes, six copies of {blocks} blocks, {blocks} lookups from honest nodes"
        ),
        comparison: shares.iter().map(compared).collect(),
        notes: vec![
            "A quarter of the liars each denies blocks, sends other bytes, leads in circles, lures \
             lookups to a false root. In the paper's settings a lookup has one route and believes \
             whoever is named the root."
                .into(),
        ],
        csv: csv(found, shares),
        chart: chart(found, shares, nodes, seeds),
        seeds: seeds.to_vec(),
    }
}

fn chart(found: &[Found], shares: &[usize], nodes: usize, seeds: &[u64]) -> Chart {
    let last = shares.last().copied().unwrap_or(0) as f64;
    let wanted = [0.0, last].map(|x| Point::new(x, WANTED * 100.0));
    let mut series = vec![Series::new("wanted: at most 0.1 %", Ink::Grey, Mark::Dashed, wanted)];
    series.extend(Setting::BOTH.map(|setting| {
        let points = shares.iter().map(|share| {
            let failed = over_runs(found, setting, *share, |f| f.failed * 100.0);
            Point::spread(*share as f64, failed.mean, failed.least, failed.most)
        });
        let routes = if setting.dht().routes == 1 { "one route" } else { "other routes" };
        setting.line(&format!(": {routes}, six copies"), points)
    }));
    Chart {
        title: "Lookups that fail among liars".into(),
        subtitle: format!("{nodes} nodes, six copies, {}; bars: least and most", runs(seeds)),
        x: Axis::linear("nodes that lie (%)", 0.0, last + 2.0),
        y: Axis::up_to("failed lookups (%)", highest(&series)),
        series,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use atoll_sim::{HostConfig, Sim, SimConfig};

    #[test]
    fn a_lurer_names_the_liars_just_before_the_key_and_those_after_it_as_its_root() {
        let sim = Sim::new(SimConfig::default());
        let hosts = sim.add_hosts(20, &HostConfig::default());
        let mut ring: Vec<Node> = hosts.iter().map(|host| Node::of(sim.peer(*host))).collect();
        ring.sort_by_key(|node| node.id);
        let named = liars_before(&ring, ring[3].id.key());
        assert_eq!(named.len(), MAX_CLOSER);
        assert_eq!(named[..4], [ring[2], ring[1], ring[0], ring[19]]);
        assert!(liars_before(&[], &Key::MIN).is_empty());
        let named: Vec<Node> = liars_after(&ring, ring[18].id.key()).take(3).collect();
        assert_eq!(named, [ring[18], ring[19], ring[0]]);
    }
}
