//! Pools of several groups, whose files lie in different ones, in the simulator.
//!
//! ```text
//! kit      the conformance kit over a pool of three groups
//! directed one change over several groups after the other, and what lies where then
//! room     groups whose disks are full
//! quotas   limits that groups have shares of
//! leaving  what members of groups leave behind
//! seeds    clients of a pool whose network, processes and machines fail
//! storm    clients that rename directories into each other
//! ```

mod directed;
mod kit;
mod leaving;
mod quotas;
mod room;
mod seeds;
mod storm;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::{BoxFuture, Env, sleep};
use atoll_net::{CallError, Reply, Request, Router, Transport};
use atoll_pool::disk::simulated::{InFlight, Loss, SimulatedDisk};
use atoll_pool::remote::{RemoteFs, Route, SpreadFs};
use atoll_pool::{
    FAMILY, GroupMember, GroupNumber, LocalGroup, OpenError, OpenRemote, PoolGroups, PoolMap,
    PoolMembers, PoolRouter, PoolSettings, SiblingGroups, create_member,
};
use atoll_sim::{HostConfig, HostId, Latency, Sim, SimConfig};
use atoll_vfs::FileSystem;

use crate::workload::replicas::{Compared, PlainTree, differences, plain_tree};

/// More than anything takes.
const LONG: Duration = Duration::from_secs(3600);
/// All is quiet again so long after all faults have ended.
const QUIET_WITHIN: Duration = Duration::from_secs(60);
/// How often nodes ask groups what room they have.
const REFRESH_EVERY: Duration = Duration::from_secs(20);
const POOL: [u8; 16] = [7; 16];
/// The machines of each group's members, of four.
const GROUPS: [[usize; 3]; 3] = [[0, 1, 2], [1, 2, 3], [2, 3, 0]];
const MACHINES: usize = 4;

type Member = Arc<GroupMember<SimulatedDisk>>;

/// What runs on a machine: the node, as long as its process lives.
struct Node {
    groups: Arc<PoolGroups>,
    members: BTreeMap<GroupNumber, Member>,
    /// So that the node's routes lead to its members.
    _local: Vec<Arc<dyn LocalGroup>>,
}

type Nodes = Arc<Mutex<Vec<Option<Node>>>>;

/// Machines, and the processes that run on them.
#[derive(Clone)]
pub(super) struct Machines {
    sim: Sim,
    hosts: Vec<HostId>,
    /// Where clients run. Their machine does not fail.
    clients: HostId,
    disks: Arc<Mutex<BTreeMap<(GroupNumber, usize), SimulatedDisk>>>,
    nodes: Nodes,
    /// Why members stopped by themselves.
    failed: Arc<Mutex<Vec<String>>>,
}

fn group(number: usize) -> GroupNumber {
    GroupNumber::new(number as u8).expect("there are more")
}

/// A way to a group through one machine's node, as mounts on it have it.
struct HostRoute {
    machines: Machines,
    at: usize,
    group: GroupNumber,
}

impl Route for HostRoute {
    fn call(
        &self,
        request: Request,
        limit: Duration,
    ) -> BoxFuture<'static, Result<Reply, CallError>> {
        let gone = |why: &str| CallError::Unreachable(why.to_owned());
        let env = self.machines.sim.env(self.machines.clients);
        let groups = self.machines.nodes()[self.at].as_ref().map(|node| node.groups.clone());
        let Some(groups) = groups else {
            return Box::pin(async move {
                sleep(&*env, Duration::from_millis(1)).await;
                Err(gone("the node does not run"))
            });
        };
        let called = groups.route(self.group).call(request, limit);
        let node = self.machines.sim.env(self.machines.hosts[self.at]);
        Box::pin(answered_by_node((env, node), called, limit))
    }
}

/// The answer to a call that a node makes for a client on another host; none comes from a node that is killed meanwhile.
pub(crate) async fn answered_by_node(
    (client, node): (Env, Env),
    called: BoxFuture<'static, Result<Reply, CallError>>,
    limit: Duration,
) -> Result<Reply, CallError> {
    let (sender, answer) = futures_channel::oneshot::channel();
    node.spawn(Box::pin(async move {
        let _ = sender.send(called.await);
    }));
    match atoll_env::timeout(&*client, limit, answer).await {
        Ok(Ok(answered)) => answered,
        Ok(Err(_)) => Err(CallError::Unreachable("the node was killed".to_owned())),
        Err(_) => Err(CallError::TimedOut),
    }
}

/// Ends a simulation when it is dropped: routes of mounts hold it, and all disks.
pub(crate) struct ShutDown(pub(crate) Sim);

impl Drop for ShutDown {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.0.shut_down();
        }
    }
}

impl Machines {
    /// Pools are made of them by [`Machines::make`].
    fn new(seed: u64) -> Machines {
        Machines::at_distance(seed, Duration::from_millis(2))
    }

    /// Messages take so long, or up to twice as long.
    fn at_distance(seed: u64, latency: Duration) -> Machines {
        let latency = Latency::Flat(latency);
        let sim = Sim::new(SimConfig { seed, latency, jitter: 1.0, ..SimConfig::default() });
        let hosts = sim.add_hosts(MACHINES, &HostConfig::default());
        let clients = sim.add_host(HostConfig::default());
        let nodes = Arc::new(Mutex::new((0..MACHINES).map(|_| None).collect()));
        let (disks, failed) = (Arc::default(), Arc::default());
        Machines { sim, hosts, clients, disks, nodes, failed }
    }

    fn nodes(&self) -> MutexGuard<'_, Vec<Option<Node>>> {
        self.nodes.lock().unwrap()
    }

    fn disk(&self, group: GroupNumber, at: usize) -> SimulatedDisk {
        self.disks.lock().unwrap()[&(group, at)].clone()
    }

    fn list(&self, number: usize) -> PoolMembers {
        let peers = GROUPS[number].iter().map(|at| self.sim.peer(self.hosts[*at])).collect();
        PoolMembers::new(peers).unwrap()
    }

    /// Makes a pool on new disks, and starts all.
    async fn make(&self, level: u8) {
        for (number, machines) in GROUPS.iter().enumerate() {
            let first = PoolMap::first(&self.list(number));
            for at in machines {
                let disk = SimulatedDisk::new(self.sim.outside());
                let settings =
                    PoolSettings { group: group(number), ..PoolSettings::new(POOL, level) };
                create_member(&disk, settings, Some(&first)).await.unwrap();
                self.disks.lock().unwrap().insert((group(number), *at), disk);
            }
        }
        for at in 0..MACHINES {
            self.nodes()[at] = None;
            self.start(at).await.unwrap();
        }
    }

    /// Starts the node of a machine.
    async fn start(&self, at: usize) -> Result<(), OpenError> {
        let env = self.sim.env(self.hosts[at]);
        let transport: Arc<dyn Transport> = self.sim.transport(self.hosts[at]);
        let groups = PoolGroups::new(env.clone(), transport.clone(), POOL);
        let router = PoolRouter::default();
        let (mut members, mut local) = (BTreeMap::new(), Vec::new());
        for (number, machines) in GROUPS.iter().enumerate() {
            groups.set_members(group(number), self.list(number));
            if machines.contains(&at) {
                let disk = self.disk(group(number), at);
                let siblings: Arc<dyn SiblingGroups> = Arc::new(groups.clone());
                let member =
                    GroupMember::start(env.clone(), transport.clone(), disk, Some(siblings))
                        .await?;
                router.add(member.settings().address(), member.service());
                let member = Arc::new(member);
                let as_local: Arc<dyn LocalGroup> = member.clone();
                groups.set_local(group(number), &as_local);
                local.push(as_local);
                members.insert(group(number), member);
            }
        }
        let (asking, clock) = (Arc::downgrade(&groups), env.clone());
        env.spawn(Box::pin(async move {
            while let Some(groups) = asking.upgrade() {
                groups.refresh_rooms().await;
                drop(groups);
                sleep(&*clock, REFRESH_EVERY).await;
            }
        }));
        transport.serve(Arc::new(Router::new().route(FAMILY, Arc::new(router))));
        self.nodes()[at] = Some(Node { groups, members, _local: local });
        Ok(())
    }

    fn is_up(&self, at: usize) -> bool {
        self.nodes()[at].is_some()
    }

    fn disks_of(&self, at: usize) -> Vec<GroupNumber> {
        let disks = self.disks.lock().unwrap();
        disks.keys().filter(|(_, of)| *of == at).map(|(group, _)| *group).collect()
    }

    fn reopen_disks(&self, at: usize) {
        for group in self.disks_of(at) {
            let disk = self.disk(group, at).reopen();
            self.disks.lock().unwrap().insert((group, at), disk);
        }
    }

    /// As nodes do: opens what takes no part any more again. Here the node starts anew.
    fn reopen_failed(&self) {
        for at in 0..MACHINES {
            let problems: Vec<Option<String>> = match &self.nodes()[at] {
                Some(node) => {
                    let failed = node.members.values().filter(|member| member.has_failed());
                    failed.map(|member| member.status().members[0].problem.clone()).collect()
                }
                None => continue,
            };
            if problems.is_empty() {
                continue;
            }
            for problem in problems.into_iter().flatten() {
                let usual = ["another member", "this node", "it is copied"];
                if !usual.iter().any(|why| problem.starts_with(why)) {
                    let line = format!("{:?}: machine {at}: {problem}", self.sim.now());
                    self.failed.lock().unwrap().push(line);
                }
            }
            self.kill(at, InFlight::Late);
            self.restart(at);
        }
    }

    /// Lets time pass.
    fn run_for(&self, time: Duration) {
        let until = self.sim.now() + time;
        while self.sim.now() < until {
            let step = until.since(self.sim.now()).min(Duration::from_millis(250));
            self.sim.run_for(step);
            self.reopen_failed();
        }
    }

    /// Kills a node; its machine runs on.
    fn kill(&self, at: usize, calls: InFlight) {
        self.sim.crash(self.hosts[at]);
        self.nodes()[at] = None;
        for group in self.disks_of(at) {
            self.disk(group, at).kill(calls);
        }
    }

    /// A machine loses power.
    fn lose_power(&self, at: usize, loss: Loss, seed: u64) {
        self.sim.crash_silently(self.hosts[at]);
        self.nodes()[at] = None;
        for group in self.disks_of(at) {
            self.disk(group, at).crash_with(loss, seed);
        }
    }

    /// Starts a node that was killed, or whose machine lost power.
    fn restart(&self, at: usize) {
        self.sim.restart(self.hosts[at]);
        self.reopen_disks(at);
        loop {
            match self.sim.block_on(LONG, self.start(at)).unwrap() {
                Ok(()) => return,
                // Late calls of the process before hold a lock.
                Err(OpenError::InUse) => self.sim.run_for(Duration::from_millis(100)),
                Err(error) => panic!("machine {at} does not start: {error}"),
            }
        }
    }

    /// The pool as a mount on this machine has it.
    async fn mount(&self, at: usize) -> Arc<dyn FileSystem> {
        let env = self.sim.env(self.clients);
        let machines = self.clone();
        let route = move |group| {
            let route = HostRoute { machines: machines.clone(), at, group };
            Arc::new(route) as Arc<dyn Route>
        };
        let first = RemoteFs::begin(env.clone(), route(GroupNumber::FIRST)).await;
        let open = OpenRemote { env: env.clone(), route: Box::new(route) };
        Arc::new(SpreadFs::new(env, Arc::new(first.expect("the pool is served")), Arc::new(open)))
    }

    /// The machine on which a group's primary is, as long as it serves.
    fn primary(&self, group: GroupNumber) -> Option<usize> {
        let nodes = self.nodes();
        let standing = |at: usize| {
            let status = nodes[at].as_ref()?.members.get(&group)?.status();
            status.is_primary.then_some((status.epoch, at))
        };
        (0..MACHINES).filter_map(standing).max().map(|(_, at)| at)
    }

    /// Whether the primaries know that all members have everything.
    fn is_quiet(&self) -> bool {
        (0..GROUPS.len()).map(group).all(|group| {
            let Some(at) = self.primary(group) else { return false };
            let members = {
                let nodes = self.nodes();
                nodes[at].as_ref().expect("it runs").members[&group].status().members
            };
            members.iter().all(|member| {
                member.problem.is_none()
                    && member.is_member
                    && member.applied == members[0].applied
                    && member.files_to_mend == 0
            })
        })
    }

    fn await_quiet(&self) -> Result<(), String> {
        let until = self.sim.now() + QUIET_WITHIN;
        self.run_for(Duration::from_secs(2));
        while !self.is_quiet() {
            if self.sim.now() > until {
                return Err(format!("not quiet after {QUIET_WITHIN:?}"));
            }
            self.run_for(Duration::from_millis(100));
        }
        Ok(())
    }

    /// That all members of each group have the same files, and that names and files of different groups belong together. Nothing is
    /// going on.
    fn compare(&self) -> Result<(), String> {
        let mut wrong = self.failed.lock().unwrap().clone();
        let mut trees = BTreeMap::new();
        for (number, machines) in GROUPS.iter().enumerate() {
            let mut of_group: Vec<(String, PlainTree)> = Vec::new();
            for at in machines {
                let disk = self.disk(group(number), *at);
                disk.set_latency(0, Duration::ZERO);
                let tree = self.sim.block_on(LONG, plain_tree(&disk)).unwrap();
                let mut tree = tree.unwrap();
                cut_referrals(&mut tree);
                of_group.push((format!("group {number} on machine {at}"), tree));
            }
            let (first, first_tree) = &of_group[0];
            for (name, tree) in &of_group[1..] {
                let compared = Compared::default();
                wrong.extend(differences((first, first_tree), (name, tree), compared));
            }
            trees.insert(number, of_group.swap_remove(0).1);
        }
        wrong.extend(unmatched(&trees));
        if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n")) }
    }

    /// Waits until all is quiet, makes everything durable, and compares.
    fn settle_and_compare(&self) -> Result<(), String> {
        self.await_quiet()?;
        let synced = async {
            let fs = self.mount(0).await;
            fs.sync().await
        };
        let synced = self.sim.block_on(LONG, synced).unwrap();
        synced.map_err(|errno| format!("sync: {errno}"))?;
        self.await_quiet()?;
        self.compare()
    }
}

/// How far up a referral leads is wrong below a directory that was moved to another depth, until it is made again.
pub(crate) fn cut_referrals(tree: &mut PlainTree) {
    for file in tree.values_mut() {
        while file.target.starts_with(b"../") {
            file.target = file.target.slice(3..);
        }
    }
}

/// The directory of outside names in a group's slots.
fn outside(number: usize) -> String {
    format!("{:03x}/{:03x}0000000000002", number * 64, number * 64)
}

/// Referrals without an outside name, and outside names without a referral, by the plain files alone.
pub(crate) fn unmatched(trees: &BTreeMap<usize, PlainTree>) -> Vec<String> {
    let mut names = BTreeSet::new();
    let mut referrals = BTreeSet::new();
    let mut wrong = Vec::new();
    for (number, tree) in trees {
        for (path, file) in tree {
            if let Some(name) = path.strip_prefix(&format!("{}/", outside(*number)))
                && !name.contains('/')
                // Of a file that may be open, and has no other name.
                && !name.starts_with("open-")
            {
                names.insert((*number, name.to_owned()));
            }
            let target = String::from_utf8_lossy(&file.target).into_owned();
            for other in trees.keys() {
                if let Some(name) = target.strip_prefix(&format!("{}/", outside(*other))) {
                    let is_new = referrals.insert((*other, name.to_owned()));
                    if !is_new {
                        wrong.push(format!("group {number}: {path}: a second one to {name}"));
                    }
                }
            }
        }
    }
    let line =
        |what: &str, (number, name): &(usize, String)| format!("{what}: {name} of group {number}");
    wrong.extend(names.difference(&referrals).map(|name| line("a file without its name", name)));
    wrong.extend(referrals.difference(&names).map(|name| line("a name without its file", name)));
    wrong
}
