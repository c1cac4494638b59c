//! Pools that grow and shrink by machines, in the simulator: groups come, and their members change.
//!
//! ```text
//! directed  one thing after the other
//! seeds     clients of a pool whose machines come, go and fail
//! limits    how many copies changes need, and the level
//! without_files  machines that vote, and have no files
//! ```

mod directed;
mod limits;
mod seeds;
mod without_files;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use atoll_env::{BoxFuture, Env, sleep};
use atoll_net::{CallError, Peer, Refusal, Reply, Request, Router, Service, Transport};
use atoll_pool::disk::simulated::{InFlight, Loss, SimulatedDisk};
use atoll_pool::remote::{RemoteFs, Route, SpreadFs};
use atoll_pool::{
    FAMILY, GroupNumber, MachineDisks, MachineStatus, OpenRemote, PoolEditError, PoolMachine,
    PoolMap, PoolMembers, PoolRouter, PoolSettings, VoteDirectories, Witness, create_member,
};
use atoll_sim::{HostConfig, HostId, Latency, Sim, SimConfig};
use atoll_vfs::FileSystem;

use crate::spread::{ShutDown, answered_by_node, cut_referrals, unmatched};
use crate::workload::replicas::{Compared, PlainTree, differences, plain_tree};

/// More than anything takes.
const LONG: Duration = Duration::from_secs(7200);
/// All is quiet again so long after all faults have ended, and machines have come and gone.
const QUIET_WITHIN: Duration = Duration::from_secs(120);
const POOL: PoolSettings = PoolSettings { pool: [9; 16], group: GroupNumber::FIRST, level: 1 };

/// What is on a machine's disk.
#[derive(Default)]
struct Kept {
    disks: BTreeMap<GroupNumber, SimulatedDisk>,
    /// Groups whose directories were made.
    made: BTreeSet<GroupNumber>,
    first: Option<PoolMap>,
    retired: usize,
    /// Of a machine without files: its incarnation, and the directories of its votes.
    incarnation: Option<u64>,
    votes: BTreeMap<GroupNumber, SimulatedDisk>,
}

/// The directories of a simulated machine.
#[derive(Clone)]
struct SimulatedDisks {
    sim: Sim,
    kept: Arc<Mutex<Kept>>,
    has_files: bool,
}

impl SimulatedDisks {
    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap()
    }
}

impl MachineDisks<SimulatedDisk> for SimulatedDisks {
    fn open(&self, group: GroupNumber) -> BoxFuture<'_, Result<Option<SimulatedDisk>, String>> {
        let disk = self.kept().disks.get_mut(&group).map(|disk| {
            *disk = disk.reopen();
            disk.clone()
        });
        Box::pin(async { Ok(disk) })
    }

    fn make<'a>(
        &'a self,
        settings: PoolSettings,
        map: &'a PoolMap,
    ) -> BoxFuture<'a, Result<(), String>> {
        Box::pin(async move {
            if !self.kept().made.insert(settings.group) {
                return Err("it was made before".to_owned());
            }
            let disk = SimulatedDisk::new(self.sim.outside());
            create_member(&disk, settings, Some(map)).await.map_err(|error| error.to_string())?;
            self.kept().disks.insert(settings.group, disk);
            Ok(())
        })
    }

    fn retire(&self, group: GroupNumber) -> BoxFuture<'_, Result<(), String>> {
        let mut kept = self.kept();
        kept.disks.remove(&group);
        kept.made.remove(&group);
        kept.retired += 1;
        Box::pin(async { Ok(()) })
    }

    fn keep(&self, first: &PoolMap) -> Result<(), String> {
        self.kept().first = Some(first.clone());
        Ok(())
    }

    fn votes(&self) -> Option<&dyn VoteDirectories<SimulatedDisk>> {
        (!self.has_files).then_some(self)
    }
}

impl VoteDirectories<SimulatedDisk> for SimulatedDisks {
    fn incarnation(&self) -> Result<u64, String> {
        self.kept().incarnation.ok_or_else(|| "nothing is there".to_owned())
    }

    fn open(&self, group: GroupNumber) -> Result<SimulatedDisk, String> {
        let mut kept = self.kept();
        let disk =
            kept.votes.entry(group).or_insert_with(|| SimulatedDisk::new(self.sim.outside()));
        *disk = disk.reopen();
        Ok(disk.clone())
    }

    fn discard(&self, group: GroupNumber) -> Result<(), String> {
        self.kept().votes.remove(&group);
        Ok(())
    }

    fn renew(&self) -> Result<(), String> {
        let mut kept = self.kept();
        kept.incarnation = Some(kept.incarnation.unwrap_or(0) + 1);
        kept.votes.clear();
        Ok(())
    }
}

type Machine = Arc<PoolMachine<SimulatedDisk>>;

struct Host {
    id: HostId,
    disks: SimulatedDisks,
    /// As long as its process lives.
    machine: Option<Machine>,
}

/// A pool, and the machines that are there.
#[derive(Clone)]
struct Pool {
    sim: Sim,
    clients: HostId,
    hosts: Arc<Mutex<Vec<Host>>>,
}

/// What serves the calls about a pool.
struct PoolService(Weak<PoolMachine<SimulatedDisk>>);

impl Service for PoolService {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        match self.0.upgrade() {
            Some(machine) => machine.handle(from, request),
            None => Box::pin(async { Err(Refusal::new(Refusal::OVERLOADED, "it has ended")) }),
        }
    }
}

/// A way to a group through one machine's node, as mounts on it have it.
struct HostRoute {
    pool: Pool,
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
        let env = self.pool.sim.env(self.pool.clients);
        let (id, machine) = {
            let hosts = self.pool.hosts();
            (hosts[self.at].id, hosts[self.at].machine.clone())
        };
        let Some(machine) = machine else {
            return Box::pin(async move {
                sleep(&*env, Duration::from_millis(1)).await;
                Err(gone("the node does not run"))
            });
        };
        let group = self.group;
        let called = Box::pin(async move { machine.call(group, request, limit).await });
        Box::pin(answered_by_node((env, self.pool.sim.env(id)), called, limit))
    }
}

impl Pool {
    /// A pool of one machine, of `machines` that there are.
    fn new(machines: usize, seed: u64) -> Pool {
        let latency = Latency::Flat(Duration::from_millis(1));
        let sim = Sim::new(SimConfig { seed, latency, jitter: 1.0, ..SimConfig::default() });
        let clients = sim.add_host(HostConfig::default());
        let hosts = sim.add_hosts(machines, &HostConfig::default()).into_iter();
        let host = |id| {
            let disks = SimulatedDisks { sim: sim.clone(), kept: Arc::default(), has_files: true };
            Host { id, disks, machine: None }
        };
        let hosts = Arc::new(Mutex::new(hosts.map(host).collect()));
        let pool = Pool { sim, clients, hosts };
        let founding = PoolMembers::new(vec![pool.peer(0)]).unwrap();
        pool.begin(0, PoolMap::first(&founding));
        let disks = pool.hosts()[0].disks.clone();
        let first = disks.kept().first.clone().unwrap();
        pool.sim.block_on(LONG, disks.make(POOL, &first)).unwrap().unwrap();
        pool
    }

    fn hosts(&self) -> MutexGuard<'_, Vec<Host>> {
        self.hosts.lock().unwrap()
    }

    fn host(&self, at: usize) -> HostId {
        self.hosts()[at].id
    }

    fn count(&self) -> usize {
        self.hosts().len()
    }

    fn peer(&self, at: usize) -> Peer {
        self.sim.peer(self.host(at))
    }

    fn at(&self, peer: &Peer) -> usize {
        (0..self.count()).find(|at| self.peer(*at).id == peer.id).expect("a machine")
    }

    fn machine(&self, at: usize) -> Option<Machine> {
        self.hosts()[at].machine.clone()
    }

    fn status(&self, at: usize) -> MachineStatus {
        self.machine(at).expect("it runs").status()
    }

    /// A machine has this map, and begins its work.
    fn begin(&self, at: usize, first: PoolMap) {
        self.hosts()[at].disks.kept().first = Some(first);
        self.start(at);
    }

    /// Starts the node of a machine.
    fn start(&self, at: usize) {
        let (id, disks) = (self.host(at), self.hosts()[at].disks.clone());
        let Some(first) = disks.kept().first.clone() else { return };
        let (env, transport) = (self.sim.env(id), self.sim.transport(id));
        let router = Arc::new(PoolRouter::default());
        let transport: Arc<dyn Transport> = transport;
        let machine = PoolMachine::start(
            (env, transport.clone()),
            POOL,
            (first, Arc::new(disks)),
            router.clone(),
        );
        router.add(POOL.address(), Arc::new(PoolService(Arc::downgrade(&machine))));
        transport.serve(Arc::new(Router::new().route(FAMILY, router)));
        self.hosts()[at].machine = Some(machine);
    }

    /// Runs something in the process of a machine; none if it does not end.
    fn run_at<T: Send + 'static>(
        &self,
        at: usize,
        work: impl FnOnce(Machine) -> BoxFuture<'static, T>,
    ) -> Option<T> {
        let machine = self.machine(at).expect("it runs");
        let (sender, answer) = futures_channel::oneshot::channel();
        let work = work(machine);
        self.sim.env(self.host(at)).spawn(Box::pin(async move {
            let _ = sender.send(work.await);
        }));
        self.sim.block_on(LONG, answer).ok()?.ok()
    }

    /// A machine has the code of another one, and joins.
    fn join(&self, via: usize, at: usize) -> Result<(), PoolEditError> {
        let peer = self.peer(at);
        let admit = move |machine: Machine| -> BoxFuture<'static, _> {
            Box::pin(async move { machine.admit(peer).await })
        };
        loop {
            match self.run_at(via, admit).unwrap_or(Err(PoolEditError::NoAnswer)) {
                Ok(first) => {
                    self.begin(at, first);
                    return Ok(());
                }
                // It asks again, until the roster lists it.
                Err(why) if why.to_string().contains("takes it up") => {
                    self.run_for(Duration::from_secs(1));
                }
                Err(why) => return Err(why),
            }
        }
    }

    /// A machine joins without a directory.
    fn join_without_files(&self, via: usize, at: usize) {
        let incarnation = {
            let disks = &mut self.hosts()[at].disks;
            disks.has_files = false;
            disks.renew().unwrap();
            disks.incarnation().unwrap()
        };
        let witness = Witness { peer: self.peer(at), incarnation };
        let admitted = self.run_at(via, move |machine| {
            Box::pin(async move { machine.admit_without_files(witness).await })
        });
        self.begin(at, admitted.expect("it ends").expect("it is listed"));
    }

    fn remove(&self, via: usize, at: usize) -> Result<(), PoolEditError> {
        let id = self.peer(at).id;
        let removed = self.run_at(via, move |machine| {
            Box::pin(async move { machine.remove(id, Duration::from_secs(30)).await })
        });
        removed.unwrap_or(Err(PoolEditError::NoAnswer))
    }

    fn let_go(&self, via: usize, at: usize) -> Result<(), PoolEditError> {
        let id = self.peer(at).id;
        let asked = self
            .run_at(via, move |machine| Box::pin(async move { machine.let_go(id, true).await }));
        asked.unwrap_or(Err(PoolEditError::NoAnswer))
    }

    /// Machines of which the first `joined` have files, each on `copies` of them; the others are strangers.
    fn with_copies(count: usize, seed: u64, copies: u8, joined: usize) -> Pool {
        let pool = Pool::new(count, seed);
        pool.set_copies(0, copies).unwrap();
        for at in 1..joined {
            pool.join(0, at).unwrap();
        }
        pool.settle();
        pool
    }

    fn set_copies(&self, via: usize, copies: u8) -> Result<(), PoolEditError> {
        let asked = self
            .run_at(via, move |machine| Box::pin(async move { machine.set_copies(copies).await }));
        asked.unwrap_or(Err(PoolEditError::NoAnswer))
    }

    fn set_min_copies(&self, via: usize, least: u8) -> Result<(), PoolEditError> {
        let asked = self.run_at(via, move |machine| {
            Box::pin(async move { machine.set_min_copies(least).await })
        });
        asked.unwrap_or(Err(PoolEditError::NoAnswer))
    }

    fn set_level(&self, via: usize, level: u8) -> Result<(), PoolEditError> {
        let asked = self
            .run_at(via, move |machine| Box::pin(async move { machine.set_level(level).await }));
        asked.unwrap_or(Err(PoolEditError::NoAnswer))
    }

    /// Kills a node; its machine runs on.
    fn kill(&self, at: usize, calls: InFlight) {
        self.sim.crash(self.host(at));
        let mut hosts = self.hosts();
        hosts[at].machine = None;
        let kept = hosts[at].disks.kept();
        kept.disks.values().chain(kept.votes.values()).for_each(|disk| disk.kill(calls));
    }

    /// A machine loses power.
    fn lose_power(&self, at: usize, loss: Loss, seed: u64) {
        self.sim.crash_silently(self.host(at));
        let mut hosts = self.hosts();
        hosts[at].machine = None;
        hosts[at].disks.kept().disks.values().for_each(|disk| disk.crash_with(loss, seed));
    }

    fn is_up(&self, at: usize) -> bool {
        self.hosts()[at].machine.is_some()
    }

    fn restart(&self, at: usize) {
        self.sim.restart(self.host(at));
        self.start(at);
    }

    /// The pool as a mount on this machine has it.
    async fn mount(&self, at: usize) -> Arc<dyn FileSystem> {
        let env = self.sim.env(self.clients);
        let pool = self.clone();
        let route = move |group| {
            let route = HostRoute { pool: pool.clone(), at, group };
            Arc::new(route) as Arc<dyn Route>
        };
        let first = RemoteFs::begin(env.clone(), route(GroupNumber::FIRST)).await;
        let open = OpenRemote { env: env.clone(), route: Box::new(route) };
        Arc::new(SpreadFs::new(env, Arc::new(first.expect("the pool is served")), Arc::new(open)))
    }

    fn env(&self) -> Env {
        self.sim.env(self.clients)
    }

    /// The newest map of the first group that a machine knows.
    fn first(&self) -> PoolMap {
        let up = (0..self.count()).filter_map(|at| self.machine(at));
        let maps = up.map(|machine| machine.status().first);
        maps.max_by_key(|map| map.epoch).expect("a machine runs")
    }

    /// The map of a group and how its members stand, as its primary knows.
    fn stands(&self, group: GroupNumber) -> Option<atoll_pool::GroupStatus> {
        let statuses = (0..self.count()).filter_map(|at| self.machine(at)).filter_map(|machine| {
            let groups = machine.status().groups;
            groups.into_iter().find(|(number, _)| *number == group)?.1.ok()
        });
        statuses.filter(|status| status.is_primary).max_by_key(|status| status.epoch)
    }

    fn groups(&self) -> Vec<GroupNumber> {
        let first = self.first();
        [GroupNumber::FIRST].into_iter().chain(first.roster.groups().keys().copied()).collect()
    }

    /// The machines of a group's members.
    fn members_of(&self, group: GroupNumber) -> BTreeSet<usize> {
        let stands = self.stands(group).expect("it has a primary");
        stands.enrolled.peers().iter().map(|peer| self.at(peer)).collect()
    }

    /// Why it is not settled, if it is not: each group has its copies, all members have everything, and the roster says so.
    fn unsettled(&self) -> Option<String> {
        let first = self.first();
        for group in self.groups() {
            let Some(stands) = self.stands(group) else {
                return Some(format!("{group}: no primary"));
            };
            let open = first.roster.groups().get(&group);
            if open.is_some_and(|group| !group.is_open) {
                let of_group = |at: usize| {
                    let groups = self.machine(at)?.status().groups;
                    groups.into_iter().find(|(number, _)| *number == group).map(|own| (at, own))
                };
                let all: Vec<_> = (0..self.count()).filter_map(of_group).collect();
                return Some(format!("{group} is not open: {:?}: {all:?}", first.roster));
            }
            let all: BTreeSet<_> = self
                .groups()
                .iter()
                .filter_map(|g| self.stands(*g))
                .flat_map(|stands| {
                    stands.enrolled.peers().iter().map(|peer| peer.id).collect::<Vec<_>>()
                })
                .filter(|id| !first.roster.to_go().contains(id))
                .collect();
            let wanted = first.roster.copies().min(all.len());
            let listed = open.is_none_or(|known| {
                known.members.peers().len() == stands.enrolled.peers().len().min(5)
            });
            if stands.enrolled.peers().len() < wanted || !listed {
                return Some(format!("{group}: {} members", stands.enrolled.peers().len()));
            }
            for member in &stands.members {
                let is_whole = member.problem.is_none()
                    && member.is_member
                    && member.applied == stands.members[0].applied
                    && member.files_to_mend == 0;
                if !is_whole {
                    let at = self.at(&member.peer);
                    let own = self.machine(at).map(|machine| machine.status().groups);
                    return Some(format!("{group}: {member:?}; it says {own:?}"));
                }
            }
        }
        first.roster.to_go().iter().next().map(|id| format!("{id} is to go"))
    }

    fn run_for(&self, time: Duration) {
        self.sim.run_for(time);
    }

    #[track_caller]
    fn settle(&self) {
        self.try_to_settle().unwrap();
    }

    fn try_to_settle(&self) -> Result<(), String> {
        let until = self.sim.now() + QUIET_WITHIN;
        loop {
            self.run_for(Duration::from_secs(4));
            match self.unsettled() {
                None => return Ok(()),
                Some(why) if self.sim.now() > until => return Err(why),
                Some(_) => {}
            }
        }
    }

    /// That all members of each group have the same files, and that names and files of different groups belong together. Nothing is
    /// going on.
    fn compare(&self) -> Result<(), String> {
        let synced = async {
            let at = (0..self.count()).find(|at| self.is_up(*at)).expect("one runs");
            self.mount(at).await.sync().await
        };
        let synced = self.sim.block_on(LONG, synced).unwrap();
        synced.map_err(|errno| format!("sync: {errno}"))?;
        self.try_to_settle()?;
        let mut wrong = Vec::new();
        let mut trees = BTreeMap::new();
        for group in self.groups() {
            let mut of_group: Vec<(String, PlainTree)> = Vec::new();
            for at in self.members_of(group) {
                let disk = self.hosts()[at].disks.kept().disks.get(&group).cloned();
                let disk = disk.ok_or_else(|| format!("machine {at} lacks group {group}"))?;
                disk.set_latency(0, Duration::ZERO);
                let mut tree = self.sim.block_on(LONG, plain_tree(&disk)).unwrap().unwrap();
                cut_referrals(&mut tree);
                of_group.push((format!("group {group} on machine {at}"), tree));
            }
            let (first, first_tree) = &of_group[0];
            for (name, tree) in &of_group[1..] {
                let compared = Compared::default();
                wrong.extend(differences((first, first_tree), (name, tree), compared));
            }
            trees.insert(usize::from(group.number()), of_group.swap_remove(0).1);
        }
        wrong.extend(unmatched(&trees));
        if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n")) }
    }
}
