//! Pools of three members in the simulator.
//!
//! ```text
//! seeds      clients of a pool whose network, processes, machines and disks fail
//! failover   members that die, come back, and take each other's place
//! directed   one fault at the moment that matters, while one member is the primary
//! retries    clients over the network while the primary dies and returns, or another one is the primary
//! ```

mod directed;
mod failover;
mod retries;
mod seeds;

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::{BoxFuture, Env, sleep};
use atoll_net::{CallError, Reply, Request, Router, Transport};
use atoll_pool::disk::simulated::{InFlight, Loss, SimulatedDisk};
use atoll_pool::remote::{RemoteFs, Route};
use atoll_pool::{
    FAMILY, GroupMember, GroupStatus, OpenError, PoolFs, PoolMembers, PoolRouter, PoolSettings,
    create_member,
};
use atoll_sim::{HostConfig, HostId, Latency, Sim, SimConfig};
use atoll_vfs::FileSystem;

use crate::workload::replicas::{Compared, differences, faults, plain_tree};

/// More than anything takes.
const LONG: Duration = Duration::from_secs(3600);
/// A group is quiet again so long after all faults have ended.
const QUIET_WITHIN: Duration = Duration::from_secs(60);

const MEMBERS: [usize; 3] = [0, 1, 2];
const POOL: [u8; 16] = [7; 16];

/// Three machines, and the processes that run on them.
struct Group {
    sim: Sim,
    hosts: Vec<HostId>,
    disks: Vec<SimulatedDisk>,
    /// Where clients run. Their machine does not fail.
    clients: HostId,
    members: Members,
    /// Why members stopped by themselves.
    failed: Vec<String>,
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

impl Group {
    /// A pool whose first `level` levels are distributed, at work.
    fn new(seed: u64, level: u8) -> Group {
        let latency = Latency::Flat(Duration::from_millis(2));
        let sim = Sim::new(SimConfig { seed, latency, jitter: 1.0, ..SimConfig::default() });
        let hosts = sim.add_hosts(MEMBERS.len(), &HostConfig::default());
        let list = PoolMembers::new(hosts.iter().map(|host| sim.peer(*host)).collect()).unwrap();
        let mut disks = Vec::new();
        for _ in &hosts {
            // A machine lives longer than its processes.
            let disk = SimulatedDisk::new(sim.outside());
            let settings = PoolSettings { pool: POOL, level };
            sim.block_on(LONG, create_member(&disk, settings, Some(&list))).unwrap().unwrap();
            disks.push(disk);
        }
        let clients = sim.add_host(HostConfig::default());
        let members = Arc::new(Mutex::new(vec![None, None, None]));
        let mut group = Group { sim, hosts, disks, clients, members, failed: Vec::new() };
        for at in MEMBERS {
            group.start(at).unwrap();
        }
        group.await_quiet().unwrap();
        group
    }

    fn members(&self) -> MutexGuard<'_, Vec<Option<Arc<GroupMember<SimulatedDisk>>>>> {
        self.members.lock().unwrap()
    }

    fn start(&mut self, at: usize) -> Result<(), OpenError> {
        let env = self.sim.env(self.hosts[at]);
        let transport: Arc<dyn Transport> = self.sim.transport(self.hosts[at]);
        let start = GroupMember::start(env, transport.clone(), self.disks[at].clone());
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
        for at in MEMBERS {
            if self.members()[at].as_ref().is_some_and(|member| member.has_failed()) {
                let problem = self.status(at).members[0].problem.clone();
                if problem.as_ref().is_some_and(|problem| !problem.starts_with("another member")) {
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

    /// Who serves clients.
    fn primary(&self) -> Option<usize> {
        let serves = |at: &usize| {
            let status = self.members()[*at].as_ref().map(|member| member.status());
            status.is_some_and(|status| status.is_primary)
        };
        let newest = |at: &usize| self.status(*at).epoch;
        MEMBERS.into_iter().filter(serves).max_by_key(newest)
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

    /// The pool as a mount on this member's machine has it.
    fn mount(&self, at: usize) -> Arc<RemoteFs> {
        let env = self.sim.env(self.clients);
        let route = OwnNode {
            sim: self.sim.clone(),
            at,
            host: self.hosts[at],
            members: self.members.clone(),
            env: env.clone(),
        };
        let begun = self.sim.block_on(LONG, RemoteFs::begin(env, Arc::new(route))).unwrap();
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
                let all: Vec<_> = MEMBERS.iter().map(|at| self.status(*at)).collect();
                return Err(format!("not quiet after {QUIET_WITHIN:?}: {all:#?}"));
            }
            self.run_for(Duration::from_millis(100));
        }
        Ok(())
    }

    /// That all members have the same files, which are as they should be. Nothing is going on.
    fn compare(&self, compared: Compared) -> Result<(), String> {
        let mut trees = Vec::new();
        for disk in &self.disks {
            disk.set_latency(0, Duration::ZERO);
            trees.push(self.sim.block_on(LONG, plain_tree(disk)).unwrap().expect("it can be read"));
        }
        let mut wrong = self.failed.clone();
        for (at, tree) in trees.iter().enumerate() {
            wrong.extend(faults(tree).into_iter().map(|fault| format!("member {at}: {fault}")));
            let name = format!("member {at}");
            wrong.extend(differences(("member 0", &trees[0]), (&name, tree), compared));
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
