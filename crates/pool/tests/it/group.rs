//! A pool of three members in the simulator.

use std::sync::Arc;
use std::time::Duration;

use atoll_net::{Router, Transport};
use atoll_pool::disk::simulated::SimulatedDisk;
use atoll_pool::{
    FAMILY, GroupMember, PoolFs, PoolMembers, PoolRouter, PoolSettings, create_member,
};
use atoll_sim::{HostConfig, HostId, Sim, SimConfig};
use atoll_vfs::{Caller, FileSystem, InodeNumber, OpenFlags, Writer};
use bytes::Bytes;

const LIMIT: Duration = Duration::from_secs(600);

struct Group {
    sim: Sim,
    hosts: Vec<HostId>,
    disks: Vec<SimulatedDisk>,
    members: Vec<Option<GroupMember<SimulatedDisk>>>,
}

impl Group {
    fn new(seed: u64) -> Group {
        let sim = Sim::new(SimConfig { seed, ..SimConfig::default() });
        let hosts = sim.add_hosts(3, &HostConfig::default());
        let list = PoolMembers::new(hosts.iter().map(|host| sim.peer(*host)).collect()).unwrap();
        let mut disks = Vec::new();
        for host in &hosts {
            let disk = SimulatedDisk::new(sim.env(*host));
            let settings = PoolSettings { pool: [7; 16], level: 1 };
            sim.block_on(LIMIT, create_member(&disk, settings, Some(&list))).unwrap().unwrap();
            disks.push(disk);
        }
        let mut group = Group { sim, hosts, disks, members: vec![None, None, None] };
        for at in 0..3 {
            group.start(at);
        }
        group
    }

    fn start(&mut self, at: usize) {
        let env = self.sim.env(self.hosts[at]);
        let transport: Arc<dyn Transport> = self.sim.transport(self.hosts[at]);
        let start = GroupMember::start(env, transport.clone(), self.disks[at].clone());
        let (member, _) = self.sim.block_on(LIMIT, start).unwrap().expect("it opens");
        if let Some(service) = member.service() {
            let pools = PoolRouter::default();
            pools.add(member.settings().pool, service);
            transport.serve(Arc::new(Router::new().route(FAMILY, Arc::new(pools))));
        }
        self.members[at] = Some(member);
    }

    fn fs(&self) -> PoolFs<SimulatedDisk> {
        self.members[0].as_ref().unwrap().file_system().expect("the primary")
    }
}

#[test]
fn what_is_written_is_on_all_members() {
    let group = Group::new(1);
    let fs = group.fs();
    let me = Caller { uid: 1000, gid: 1000, ..Caller::default() };
    let work = async {
        let home = fs.mkdir(me, InodeNumber::ROOT, b"home", 0o755).await.unwrap();
        let (file, opened) =
            fs.create(me, home.attr.inode, b"file", 0o644, OpenFlags::READ_WRITE).await.unwrap();
        let inode = file.attr.inode;
        let data = Bytes::from_static(b"some bytes");
        assert_eq!(fs.write(Writer::At(me), inode, opened.handle, 0, data).await, Ok(10));
        fs.fsync(inode, opened.handle, false).await.unwrap();
        fs.close(inode, opened.handle).await.unwrap();
    };
    let worked = group.sim.block_on(Duration::from_secs(20), work);
    println!("{:?}", group.members[0].as_ref().unwrap().status());
    println!("{:?}", group.members[1].as_ref().unwrap().status());
    worked.unwrap();
    println!("{:?}", group.members[0].as_ref().unwrap().status());
    println!("{:?}", group.sim.now());
}
