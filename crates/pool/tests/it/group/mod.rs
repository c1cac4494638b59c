//! Pools of several members, three where it is not said, in the simulator.
//!
//! ```text
//! seeds      clients of a pool whose network, processes, machines and disks fail
//! failover   members that die, come back, and take each other's place
//! changes    how many changes calls make
//! directed   one fault at the moment that matters, while one member is the primary
//! membership members that come and go
//! witness    a node without files that votes
//! copying    a member with a new disk is given all files
//! reading    reads that members answer from their own copies
//! locks      locks of mounts on different machines
//! counting   clients that count in a file under its lock, by seeds
//! quotas     limits on what users take
//! reviving   one copy becomes the group
//! importing  a tree that is taken in place by the only member
//! unlinked   files that are open and have no name
//! scrub      copies that differ by people's hands, or by rot
//! retries    clients over the network while the primary dies and returns, or another one is the primary
//! ```

mod changes;
mod copying;
mod counting;
mod directed;
mod failover;
mod importing;
mod locks;
mod membership;
mod quotas;
mod reading;
mod retries;
mod reviving;
mod scrub;
mod seeds;
mod unlinked;
mod witness;

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::{BoxFuture, Env, sleep};
use atoll_net::{CallError, Reply, Request, Router, Transport};
use atoll_pool::disk::simulated::{InFlight, Loss, SimulatedDisk};
use atoll_pool::map::PoolMap;
use atoll_pool::remote::{RemoteFs, Route};
use atoll_pool::{
    FAMILY, GroupMember, GroupStatus, OpenError, PoolEditError, PoolFs, PoolMembers, PoolRouter,
    PoolSettings, create_member,
};
use atoll_sim::{HostConfig, HostId, Latency, Sim, SimConfig};
use atoll_vfs::FileSystem;

use crate::workload::replicas::{Compared, differences, faults, plain_tree};

/// More than anything takes.
pub(crate) const LONG: Duration = Duration::from_secs(3600);
/// A change of who the members are is made within this time.
const EDIT_LIMIT: Duration = Duration::from_secs(8);
/// A group is quiet again so long after all faults have ended.
const QUIET_WITHIN: Duration = Duration::from_secs(60);

const MEMBERS: [usize; 3] = [0, 1, 2];
const POOL: [u8; 16] = [7; 16];

/// Machines, and the processes that run on them.
struct Group {
    sim: Sim,
    hosts: Vec<HostId>,
    disks: Vec<SimulatedDisk>,
    /// Where clients run. Their machine does not fail.
    clients: HostId,
    members: Members,
    /// Why members stopped by themselves.
    failed: Vec<String>,
    /// Those that are members no more.
    left: Vec<usize>,
}

/// The members' processes; none does not run.
type Members = Arc<Mutex<Vec<Option<Arc<GroupMember<SimulatedDisk>>>>>>;

/// A way to the pool through one member's node, as mounts on its machine have it.
struct OwnNode {
    sim: Sim,
    at: usize,
    host: HostId,
    members: Members,
    env: Env,
}

impl Route for OwnNode {
    fn call(
        &self,
        request: Request,
        limit: Duration,
    ) -> BoxFuture<'static, Result<Reply, CallError>> {
        let gone = |why: &str| CallError::Unreachable(why.to_owned());
        let env = self.env.clone();
        let Some(member) = self.members.lock().unwrap()[self.at].clone() else {
            return Box::pin(async move {
                sleep(&*env, Duration::from_millis(1)).await;
                Err(gone("the node does not run"))
            });
        };
        let (sender, answer) = futures_channel::oneshot::channel();
        self.sim.env(self.host).spawn(Box::pin(async move {
            let _ = sender.send(member.call(request, limit).await);
        }));
        Box::pin(async move {
            match atoll_env::timeout(&*env, limit, answer).await {
                Ok(Ok(answered)) => answered,
                Ok(Err(_)) => Err(gone("the member was killed")),
                Err(_) => Err(CallError::TimedOut),
            }
        })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Routes of mounts that end hold the simulation, which would last with all disks.
        if !std::thread::panicking() {
            self.sim.shut_down();
        }
    }
}

impl Group {
    /// A pool whose first `level` levels are distributed, at work.
    fn new(seed: u64, level: u8) -> Group {
        Group::of(MEMBERS.len(), seed, level)
    }

    /// A pool with so many founding members.
    fn of(founding: usize, seed: u64, level: u8) -> Group {
        let latency = Latency::Flat(Duration::from_millis(2));
        let sim = Sim::new(SimConfig { seed, latency, jitter: 1.0, ..SimConfig::default() });
        let hosts = sim.add_hosts(founding, &HostConfig::default());
        let list = PoolMembers::new(hosts.iter().map(|host| sim.peer(*host)).collect()).unwrap();
        let first = PoolMap::first(&list);
        let mut disks = Vec::new();
        for _ in &hosts {
            // A machine lives longer than its processes.
            let disk = SimulatedDisk::new(sim.outside());
            let settings = PoolSettings::new(POOL, level);
            sim.block_on(LONG, create_member(&disk, settings, Some(&first))).unwrap().unwrap();
            disks.push(disk);
        }
        let clients = sim.add_host(HostConfig::default());
        let members = Arc::new(Mutex::new(vec![None; founding]));
        let (failed, left) = (Vec::new(), Vec::new());
        let mut group = Group { sim, hosts, disks, clients, members, failed, left };
        for at in 0..founding {
            group.start(at).unwrap();
        }
        group.await_quiet().unwrap();
        group
    }

    /// All that are members.
    fn all(&self) -> Vec<usize> {
        (0..self.hosts.len()).filter(|at| !self.left.contains(at)).collect()
    }

    fn level(&self) -> u8 {
        self.some().settings().level
    }

    /// A member that runs.
    fn some(&self) -> Arc<GroupMember<SimulatedDisk>> {
        self.members().iter().flatten().next().expect("some member runs").clone()
    }

    /// Has another machine be a member, through one of them.
    fn join(&mut self, via: usize) -> Result<usize, String> {
        let at = self.hosts.len();
        self.hosts.push(self.sim.add_host(HostConfig::default()));
        self.disks.push(SimulatedDisk::new(self.sim.outside()));
        self.members().push(None);
        self.left.push(at);
        self.join_as(via, at)
    }

    /// Has a machine be a member whose disk is empty.
    fn join_as(&mut self, via: usize, at: usize) -> Result<usize, String> {
        let peer = self.sim.peer(self.hosts[at]);
        let map = self.edit(via, move |member| {
            Box::pin(async move { member.enrol(peer, EDIT_LIMIT).await })
        })?;
        let settings = PoolSettings::new(POOL, self.level());
        let made = create_member(&self.disks[at], settings, Some(&map));
        self.sim.block_on(LONG, made).unwrap().map_err(|error| error.to_string())?;
        self.left.retain(|left| *left != at);
        self.start(at).map_err(|error| error.to_string())?;
        Ok(at)
    }

    /// Has a member be none any more.
    fn remove(&mut self, via: usize, at: usize) -> Result<(), String> {
        let id = self.sim.peer(self.hosts[at]).id;
        let removed = self
            .edit(via, move |member| Box::pin(async move { member.remove(id, EDIT_LIMIT).await }));
        if removed.is_ok() {
            self.left.push(at);
        }
        removed.map(|_| ())
    }

    /// Asks through one member, until it is done or refused; members that take no part any more are opened again meanwhile.
    fn edit(
        &mut self,
        via: usize,
        ask: impl Fn(
            Arc<GroupMember<SimulatedDisk>>,
        ) -> BoxFuture<'static, Result<PoolMap, PoolEditError>>,
    ) -> Result<PoolMap, String> {
        let until = self.sim.now() + QUIET_WITHIN;
        while self.sim.now() < until {
            let member = self.members()[via].clone().expect("the member runs");
            let (sender, mut answer) = futures_channel::oneshot::channel();
            let asked = ask(member);
            self.sim.env(self.hosts[via]).spawn(Box::pin(async move {
                let _ = sender.send(asked.await);
            }));
            for _ in 0..40 {
                self.run_for(Duration::from_millis(250));
                match answer.try_recv() {
                    Ok(Some(Ok(map))) => return Ok(map),
                    Ok(Some(Err(PoolEditError::Refused(why)))) => return Err(why),
                    // It was opened again meanwhile, or its time has passed.
                    Ok(Some(Err(PoolEditError::NoAnswer))) | Err(_) => break,
                    Ok(None) => {}
                }
            }
        }
        Err("the time has passed".to_owned())
    }

    /// A member's machine gets a new, empty disk. Its process does not run, and it is no voter.
    fn wipe(&mut self, at: usize) {
        self.sim.crash_silently(self.hosts[at]);
        self.members()[at] = None;
        let disk = SimulatedDisk::new(self.sim.outside());
        let member = self.some();
        let mut map = member.map();
        map.members.remove(&self.sim.peer(self.hosts[at]).id);
        let made = create_member(&disk, member.settings(), Some(&map));
        self.sim.block_on(LONG, made).unwrap().unwrap();
        self.disks[at] = disk;
    }

    fn members(&self) -> MutexGuard<'_, Vec<Option<Arc<GroupMember<SimulatedDisk>>>>> {
        self.members.lock().unwrap()
    }

    fn start(&mut self, at: usize) -> Result<(), OpenError> {
        let env = self.sim.env(self.hosts[at]);
        let transport: Arc<dyn Transport> = self.sim.transport(self.hosts[at]);
        let start = GroupMember::start(env, transport.clone(), self.disks[at].clone(), None);
        let member = self.sim.block_on(LONG, start).unwrap()?;
        let pools = PoolRouter::default();
        pools.add(member.settings().pool, member.service());
        transport.serve(Arc::new(Router::new().route(FAMILY, Arc::new(pools))));
        self.members()[at] = Some(Arc::new(member));
        Ok(())
    }

    fn is_up(&self, at: usize) -> bool {
        self.members()[at].is_some()
    }

    /// As nodes do: opens what takes no part any more again.
    fn reopen_failed(&mut self) {
        for at in self.all() {
            if self.members()[at].as_ref().is_some_and(|member| member.has_failed()) {
                let problem = self.status(at).members[0].problem.clone();
                let is_usual = |problem: &String| {
                    let usual = ["another member", "this node", "it is copied"];
                    usual.iter().any(|why| problem.starts_with(why))
                };
                if problem.as_ref().is_some_and(|problem| !is_usual(problem)) {
                    self.failed.push(format!("{:?}: member {at}: {problem:?}", self.sim.now()));
                }
                self.members()[at] = None;
                // Nothing of it is left that could call its disk.
                self.disks[at].kill(InFlight::Late);
                self.disks[at] = self.disks[at].reopen();
                loop {
                    match self.start(at) {
                        Ok(()) => break,
                        // Calls that are under way hold its lock.
                        Err(OpenError::InUse) => self.sim.run_for(Duration::from_millis(10)),
                        // It was removed.
                        Err(OpenError::NotAMember) => break,
                        Err(error) => panic!("member {at} is not opened again: {error}"),
                    }
                }
            }
        }
    }

    /// Lets time pass.
    fn run_for(&mut self, time: Duration) {
        let until = self.sim.now() + time;
        while self.sim.now() < until {
            let step = until.since(self.sim.now()).min(Duration::from_millis(250));
            self.sim.run_for(step);
            self.reopen_failed();
        }
    }

    /// Kills a process; its machine runs on.
    fn kill(&mut self, at: usize, calls: InFlight) {
        self.sim.crash(self.hosts[at]);
        self.members()[at] = None;
        self.disks[at].kill(calls);
    }

    /// A machine loses power.
    fn lose_power(&mut self, at: usize, loss: Loss, seed: u64) {
        self.sim.crash_silently(self.hosts[at]);
        self.members()[at] = None;
        self.disks[at].crash_with(loss, seed);
    }

    /// Starts a member that was killed or lost power.
    fn restart(&mut self, at: usize) {
        self.sim.restart(self.hosts[at]);
        self.disks[at] = self.disks[at].reopen();
        loop {
            match self.start(at) {
                Ok(()) => return,
                // Late calls of the process before hold its lock.
                Err(OpenError::InUse) => self.sim.run_for(Duration::from_millis(100)),
                Err(error) => panic!("member {at} does not start: {error}"),
            }
        }
    }

    fn run<T>(&self, call: impl Future<Output = T>) -> T {
        self.sim.block_on(LONG, call).unwrap()
    }

    /// Who serves clients.
    fn primary(&self) -> Option<usize> {
        let serves = |at: &usize| {
            let status = self.members()[*at].as_ref().map(|member| member.status());
            status.is_some_and(|status| status.is_primary)
        };
        let newest = |at: &usize| self.status(*at).epoch;
        self.all().into_iter().filter(serves).max_by_key(newest)
    }

    /// The primary, and the two others.
    fn roles(&self) -> [usize; 3] {
        let primary = self.primary().expect("there is a primary");
        [primary, (primary + 1) % 3, (primary + 2) % 3]
    }

    /// The file system of the primary, as long as it is the primary.
    fn fs(&self) -> PoolFs<SimulatedDisk> {
        let at = self.primary().expect("there is a primary");
        self.members()[at].as_ref().and_then(|member| member.file_system()).expect("it serves")
    }

    /// The way to the primary that mounts on this member's machine have.
    fn route(&self, at: usize) -> Arc<OwnNode> {
        Arc::new(OwnNode {
            sim: self.sim.clone(),
            at,
            host: self.hosts[at],
            members: self.members.clone(),
            env: self.sim.env(self.clients),
        })
    }

    /// The pool as a mount on this member's machine has it.
    fn mount(&self, at: usize) -> Arc<RemoteFs> {
        let env = self.sim.env(self.clients);
        let begun = self.sim.block_on(LONG, RemoteFs::begin(env, self.route(at))).unwrap();
        Arc::new(begun.expect("the pool is served"))
    }

    fn status(&self, at: usize) -> GroupStatus {
        self.members()[at].as_ref().expect("the member runs").status()
    }

    /// Whether the primary knows that all members have everything.
    fn is_quiet(&self) -> bool {
        let Some(primary) = self.primary() else { return false };
        let members = self.status(primary).members;
        members.iter().all(|member| {
            member.problem.is_none()
                && member.is_member
                && member.applied == members[0].applied
                && member.files_to_mend == 0
        })
    }

    /// Waits until the group is quiet, as it is some time after all faults have ended.
    fn await_quiet(&mut self) -> Result<(), String> {
        let until = self.sim.now() + QUIET_WITHIN;
        // The primary first has to find out who was restarted.
        self.run_for(Duration::from_secs(1));
        while !self.is_quiet() {
            if self.sim.now() > until {
                let all: Vec<_> = self.all().iter().map(|at| self.status(*at)).collect();
                return Err(format!("not quiet after {QUIET_WITHIN:?}: {all:#?}"));
            }
            self.run_for(Duration::from_millis(100));
        }
        Ok(())
    }

    /// That all members have the same files, which are as they should be. Nothing is going on.
    fn compare(&self, compared: Compared) -> Result<(), String> {
        let mut trees = Vec::new();
        for at in self.all() {
            let disk = &self.disks[at];
            disk.set_latency(0, Duration::ZERO);
            let tree = self.sim.block_on(LONG, plain_tree(disk)).unwrap().expect("it can be read");
            trees.push((format!("member {at}"), tree));
        }
        let mut wrong = self.failed.clone();
        let (first, first_tree) = &trees[0];
        for (name, tree) in &trees {
            wrong.extend(faults(tree).into_iter().map(|fault| format!("{name}: {fault}")));
            wrong.extend(differences((first, first_tree), (name, tree), compared));
        }
        if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n")) }
    }

    /// Waits until the group is quiet, makes everything durable, and compares the members.
    fn settle_and_compare(&mut self) -> Result<(), String> {
        self.await_quiet()?;
        let synced = self.sim.block_on(LONG, self.fs().sync()).unwrap();
        synced.map_err(|errno| format!("sync: {errno}"))?;
        self.await_quiet()?;
        self.compare(Compared::default())
    }
}
