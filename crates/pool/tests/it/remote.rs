//! Calls over the network: the conformance kit, lost calls, broken connections, restarts of the server.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_env::{BoxFuture, Env};
use atoll_net::Transport;
use atoll_pool::disk::simulated::SimulatedDisk;
use atoll_pool::remote::{PeerRoute, RemoteFs, RemoteServer};
use atoll_pool::{PoolFs, PoolSettings, create};
use atoll_sim::{HostConfig, HostId, Latency, Sim, SimConfig};
use atoll_vfs::FileSystem;
use atoll_vfs::kit::{
    Features, Report, Restart, RestartSubject, Subject, Tree, run_read_suite, run_restart_suite,
    run_write_suite, write_tree_to_fs,
};
use atoll_vfs::memory::MemoryFs;

/// What stands behind the server.
#[derive(Clone, Copy, PartialEq)]
enum Behind {
    Memory,
    /// A pool of this distribution level.
    Pool(u8),
}

/// A server and a client on two hosts.
struct Subjects {
    sim: Sim,
    server: HostId,
    client: HostId,
    behind: Behind,
    /// What stands behind the server by now.
    served: Mutex<Vec<(SimulatedDisk, RemoteServer)>>,
}

impl Subjects {
    fn new(seed: u64, behind: Behind) -> Subjects {
        // A network of one room: the kit makes thousands of calls, one after another.
        let latency = Latency::Flat(Duration::from_micros(100));
        let sim = Sim::new(SimConfig { seed, latency, ..SimConfig::default() });
        let (server, client) =
            (sim.add_host(HostConfig::default()), sim.add_host(HostConfig::default()));
        Subjects { sim, server, client, behind, served: Mutex::default() }
    }

    async fn mounted(&self) -> Result<Arc<dyn FileSystem>, String> {
        let route = PeerRoute::new(self.sim.transport(self.client), self.sim.peer(self.server));
        let fs = RemoteFs::begin(self.sim.env(self.client), Arc::new(route)).await;
        Ok(Arc::new(fs.map_err(|errno| errno.to_string())?))
    }

    fn serve(&self, disk: SimulatedDisk, fs: Arc<dyn FileSystem>) {
        let remote = RemoteServer::new(self.sim.env(self.server), fs);
        self.sim.transport(self.server).serve(Arc::new(remote.clone()));
        *self.served.lock().unwrap() = vec![(disk, remote)];
    }

    async fn behind(&self, disk: &SimulatedDisk) -> Result<Arc<dyn FileSystem>, String> {
        let env = self.sim.env(self.server);
        Ok(match self.behind {
            Behind::Memory => Arc::new(MemoryFs::new(env)),
            Behind::Pool(_) => {
                let opened = PoolFs::open(env, disk.clone()).await;
                Arc::new(opened.map_err(|error| error.to_string())?.0)
            }
        })
    }

    fn run(&self, suite: impl Future<Output = Report>) {
        let report = self.sim.block_on(Duration::from_secs(1 << 20), suite).expect("it ends");
        assert!(report.passed() > 5, "{report}");
        report.assert_passes();
        self.sim.run_for(Duration::from_secs(700));
        for (_, remote) in &*self.served.lock().unwrap() {
            remote.check_invariants();
            assert_eq!(remote.counts(), (0, 0), "the client has ended");
        }
    }
}

impl Subject for Subjects {
    fn name(&self) -> String {
        "a remote file system".to_owned()
    }

    fn features(&self) -> Features {
        Features::FULL
    }

    fn env(&self) -> Env {
        self.sim.env(self.client)
    }

    fn make(&self, tree: Arc<Tree>) -> BoxFuture<'_, Result<Arc<dyn FileSystem>, String>> {
        Box::pin(async move {
            let disk = SimulatedDisk::new(self.sim.env(self.server));
            if let Behind::Pool(level) = self.behind {
                let settings = PoolSettings { pool: [7; 16], level };
                create(&disk, settings).await.map_err(|error| error.to_string())?;
            }
            let fs = self.behind(&disk).await?;
            write_tree_to_fs(&tree, &*fs).await.map_err(|error| error.to_string())?;
            self.serve(disk, fs);
            self.mounted().await
        })
    }
}

#[test]
fn a_remote_file_system_reads_as_the_kit_says() {
    let subject = Subjects::new(1, Behind::Memory);
    subject.run(run_read_suite(&subject));
}

#[test]
fn a_remote_file_system_changes_as_the_kit_says() {
    let subject = Subjects::new(2, Behind::Memory);
    subject.run(run_write_suite(&subject));
}

#[test]
fn a_remote_pool_reads_as_the_kit_says() {
    let subject = Subjects::new(3, Behind::Pool(1));
    subject.run(run_read_suite(&subject));
}

#[test]
fn a_remote_pool_changes_as_the_kit_says() {
    let subject = Subjects::new(4, Behind::Pool(1));
    subject.run(run_write_suite(&subject));
}
