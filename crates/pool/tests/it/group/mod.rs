//! Pools of three members in the simulator: one primary, two backups.
//!
//! ```text
//! seeds      clients of a pool whose network, processes, machines and disks fail
//! directed   one fault at the moment that matters
//! retries    clients over the network while the primary dies and returns, or another one is the primary
//! ```

mod directed;
mod retries;
mod seeds;

use std::sync::Arc;
use std::time::Duration;

use atoll_net::{Router, Transport};
use atoll_pool::disk::simulated::{InFlight, Loss, SimulatedDisk};
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

const PRIMARY: usize = 0;
const MEMBERS: [usize; 3] = [0, 1, 2];
const POOL: [u8; 16] = [7; 16];

/// Three machines, and the processes that run on them.
struct Group {
    sim: Sim,
    hosts: Vec<HostId>,
    disks: Vec<SimulatedDisk>,
    /// None: the process does not run.
    members: Vec<Option<GroupMember<SimulatedDisk>>>,
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
        let mut group = Group { sim, hosts, disks, members: vec![None, None, None] };
        for at in MEMBERS {
            group.start(at).unwrap();
        }
        group.await_quiet().unwrap();
        group
    }

    fn start(&mut self, at: usize) -> Result<(), OpenError> {
        let env = self.sim.env(self.hosts[at]);
        let transport: Arc<dyn Transport> = self.sim.transport(self.hosts[at]);
        let start = GroupMember::start(env, transport.clone(), self.disks[at].clone());
        let (member, _) = self.sim.block_on(LONG, start).unwrap()?;
        if let Some(service) = member.service() {
            let pools = PoolRouter::default();
            pools.add(member.settings().pool, service);
            transport.serve(Arc::new(Router::new().route(FAMILY, Arc::new(pools))));
        }
        self.members[at] = Some(member);
        Ok(())
    }

    fn is_up(&self, at: usize) -> bool {
        self.members[at].is_some()
    }

    /// Kills a process; its machine runs on.
    fn kill(&mut self, at: usize, calls: InFlight) {
        self.sim.crash(self.hosts[at]);
        self.members[at] = None;
        self.disks[at].kill(calls);
    }

    /// A machine loses power.
    fn lose_power(&mut self, at: usize, loss: Loss, seed: u64) {
        self.sim.crash_silently(self.hosts[at]);
        self.members[at] = None;
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

    fn fs(&self) -> PoolFs<SimulatedDisk> {
        self.members[PRIMARY].as_ref().and_then(GroupMember::file_system).expect("the primary runs")
    }

    fn status(&self, at: usize) -> GroupStatus {
        self.members[at].as_ref().expect("the member runs").status()
    }

    /// Whether the primary knows that all members have everything.
    fn is_quiet(&self) -> bool {
        let members = self.status(PRIMARY).members;
        members.iter().all(|member| {
            member.problem.is_none()
                && member.applied == members[PRIMARY].applied
                && member.files_to_mend == 0
        })
    }

    /// Waits until the group is quiet, as it is some time after all faults have ended.
    fn await_quiet(&self) -> Result<(), String> {
        let until = self.sim.now() + QUIET_WITHIN;
        // The primary first has to find out who was restarted.
        self.sim.run_for(Duration::from_secs(1));
        while !self.is_quiet() {
            if self.sim.now() > until {
                let all: Vec<_> = MEMBERS.iter().map(|at| self.status(*at)).collect();
                return Err(format!("not quiet after {QUIET_WITHIN:?}: {all:#?}"));
            }
            self.sim.run_for(Duration::from_millis(100));
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
        let mut wrong = Vec::new();
        for (at, tree) in trees.iter().enumerate() {
            wrong.extend(faults(tree).into_iter().map(|fault| format!("member {at}: {fault}")));
            let name = format!("member {at}");
            wrong.extend(differences(("primary", &trees[PRIMARY]), (&name, tree), compared));
        }
        if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n")) }
    }

    /// Waits until the group is quiet, makes everything durable, and compares the members.
    fn settle_and_compare(&self) -> Result<(), String> {
        self.await_quiet()?;
        let synced = self.sim.block_on(LONG, self.fs().sync()).unwrap();
        synced.map_err(|errno| format!("sync: {errno}"))?;
        self.await_quiet()?;
        self.compare(Compared::default())
    }
}
