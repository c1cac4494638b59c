//! Members that have maps decided, in the simulator, while their network, processes, machines and disks fail.
//!
//! ```text
//! seeds      proposers everywhere, and faults by seeds
//! directed   one fault at the moment that matters
//! history    what members were told, and whether all of it can be true
//! ```

mod directed;
mod history;
mod seeds;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use atoll_env::{BoxFuture, sleep};
use atoll_net::{Peer, Refusal, Reply, Request, Router, Service, Transport};
use atoll_pool::disk::Disk;
use atoll_pool::disk::simulated::{InFlight, Loss, SimulatedDisk};
use atoll_pool::map::{MapSeat, MapVoter, MapVoters, PoolMap, VoterError};
use atoll_pool::{
    FAMILY, OWN_DIRECTORY, PoolMembers, PoolRouter, PoolSettings, create_member, read_map,
};
use atoll_sim::{HostConfig, HostId, Latency, Sim, SimConfig};
use atoll_vfs::Errno;

/// More than anything takes.
const LONG: Duration = Duration::from_secs(3600);
const POOL: [u8; 16] = [9; 16];

/// Calls of other members.
struct SeatService(Arc<MapSeat<SimulatedDisk>>);

impl Service for SeatService {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        self.0.handle(from, request)
    }
}

/// What runs on a machine.
struct Process {
    seat: Arc<MapSeat<SimulatedDisk>>,
    /// Its disk failed: it takes no part any more.
    has_failed: Arc<AtomicBool>,
}

/// The machines of a pool, and what runs on them.
struct Pool {
    sim: Sim,
    hosts: Vec<HostId>,
    founding: PoolMembers,
    disks: Vec<SimulatedDisk>,
    /// None: the process does not run.
    processes: Vec<Option<Process>>,
}

impl Pool {
    fn new(seed: u64, members: usize) -> Pool {
        let latency = Latency::Flat(Duration::from_millis(1));
        let sim = Sim::new(SimConfig { seed, latency, jitter: 1.0, ..SimConfig::default() });
        let hosts = sim.add_hosts(members, &HostConfig::default());
        let peers = hosts.iter().map(|host| sim.peer(*host)).collect();
        let founding = PoolMembers::new(peers).unwrap();
        let first = PoolMap::first(&founding);
        let mut disks = Vec::new();
        for _ in &hosts {
            // A machine lives longer than its processes.
            let disk = SimulatedDisk::new(sim.outside());
            let settings = PoolSettings::new(POOL, 1);
            let made = create_member(&disk, settings, Some(&first));
            sim.block_on(LONG, made).unwrap().unwrap();
            disk.set_latency(seed, Duration::from_millis(2));
            disks.push(disk);
        }
        let processes = hosts.iter().map(|_| None).collect();
        let mut pool = Pool { sim, hosts, founding, disks, processes };
        for at in 0..members {
            pool.start(at).unwrap();
        }
        pool
    }

    fn start(&mut self, at: usize) -> Result<(), VoterError> {
        let env = self.sim.env(self.hosts[at]);
        let transport: Arc<dyn Transport> = self.sim.transport(self.hosts[at]);
        let disk = Arc::new(self.disks[at].clone());
        let start = {
            let transport = transport.clone();
            async move {
                let own = disk.node(&disk.top(), OWN_DIRECTORY.as_bytes()).await?;
                disk.lock(&own, b"lock").await?;
                let map = read_map(&*disk).await.unwrap().expect("there are several members");
                MapSeat::start(env, transport, (disk, own), (POOL, map)).await
            }
        };
        let seat = Arc::new(self.sim.block_on(LONG, start).unwrap()?);
        let pools = PoolRouter::default();
        pools.add(POOL, Arc::new(SeatService(seat.clone())));
        transport.serve(Arc::new(Router::new().route(FAMILY, Arc::new(pools))));
        self.processes[at] = Some(Process { seat, has_failed: Arc::default() });
        Ok(())
    }

    /// Has a process do what maps want of it, as long as it lives.
    fn follow(&self, at: usize) {
        let process = self.processes[at].as_ref().expect("the process runs");
        let (seat, has_failed) = (process.seat.clone(), process.has_failed.clone());
        let env = self.sim.env(self.hosts[at]);
        env.clone().spawn(Box::pin(async move {
            while seat.follow().await.is_ok() {
                sleep(&*env, Duration::from_millis(20)).await;
            }
            has_failed.store(true, Ordering::SeqCst);
        }));
    }

    fn is_up(&self, at: usize) -> bool {
        self.processes[at].is_some()
    }

    /// Kills a process; its machine runs on.
    fn kill(&mut self, at: usize, calls: InFlight) {
        self.sim.crash(self.hosts[at]);
        self.processes[at] = None;
        self.disks[at].kill(calls);
    }

    /// A machine loses power.
    fn lose_power(&mut self, at: usize, loss: Loss, seed: u64) {
        self.sim.crash_silently(self.hosts[at]);
        self.processes[at] = None;
        self.disks[at].crash_with(loss, seed);
    }

    /// Starts a process that was killed, or whose machine lost power.
    fn restart(&mut self, at: usize) -> Result<(), VoterError> {
        self.sim.restart(self.hosts[at]);
        self.disks[at] = self.disks[at].reopen();
        loop {
            match self.start(at) {
                // Late calls of the process before hold its lock.
                Err(VoterError::Disk(Errno::EAGAIN)) => {
                    self.sim.run_for(Duration::from_millis(20));
                }
                started => return started,
            }
        }
    }

    fn seat(&self, at: usize) -> Arc<MapSeat<SimulatedDisk>> {
        self.processes[at].as_ref().expect("the process runs").seat.clone()
    }

    fn voters(&self) -> impl Iterator<Item = (usize, Arc<MapVoter>)> {
        let up = self.processes.iter().enumerate();
        up.filter_map(|(at, process)| Some((at, process.as_ref()?.seat.voter()?)))
    }

    fn leader(&self) -> Option<usize> {
        let leaders = self.voters().filter(|(_, voter)| voter.is_leader());
        leaders.max_by_key(|(_, voter)| voter.generation()).map(|(at, _)| at)
    }

    /// Waits for a leader.
    fn await_leader(&self) -> usize {
        let until = self.sim.now() + Duration::from_secs(2);
        while self.sim.now() < until {
            if let Some(leader) = self.leader() {
                return leader;
            }
            self.sim.run_for(Duration::from_millis(1));
        }
        panic!("nobody leads");
    }

    /// The map after `map` that makes a member the primary, with these members beside it.
    fn map_after(&self, map: &PoolMap, primary: usize, others: &[usize]) -> PoolMap {
        let id = |at: &usize| self.founding.peers()[*at].id;
        let members = others.iter().chain([&primary]).map(id).collect();
        PoolMap { epoch: map.epoch + 1, primary: id(&primary), members, ..map.clone() }
    }

    /// The map after `map` by which these members vote.
    fn with_voters(&self, map: &PoolMap, voters: &[usize]) -> PoolMap {
        let keys = voters.iter().map(|at| self.founding.peers()[*at].id).collect();
        let voters = MapVoters { generation: map.voters.generation + 1, keys };
        PoolMap { epoch: map.epoch + 1, voters, ..map.clone() }
    }

    /// A member asks which map holds.
    fn ask(&self, at: usize, limit: Duration) -> Result<PoolMap, atoll_pool::map::AskError> {
        let seat = self.seat(at);
        self.sim.block_on(LONG, async move { seat.ask(limit).await }).unwrap()
    }

    fn propose(
        &self,
        at: usize,
        map: &PoolMap,
        limit: Duration,
    ) -> Result<PoolMap, atoll_pool::map::AskError> {
        let (seat, map) = (self.seat(at), map.clone());
        self.sim.block_on(LONG, async move { seat.propose(&map, limit).await }).unwrap()
    }
}
