//! Machines that use a gateway, for people who ask who does.
//!
//! A client of NFS says when it mounts and, unless it dies, when it unmounts; neither decides anything here. What is told of a
//! machine is what was seen of it: connections, calls, and the paths that it has asked for.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Machines that are remembered; those without a connection are forgotten first.
const MAX_MACHINES: usize = 1024;
/// Paths that are remembered of a machine.
const MAX_PATHS: usize = 64;

/// A machine, as it is told.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClientMachine {
    /// Its address.
    pub address: IpAddr,
    /// Connections that it has now.
    pub connections: u64,
    /// Calls that it has made.
    pub calls: u64,
    /// How long ago the last one came.
    pub idle: Duration,
    /// What it has mounted, and not said to have unmounted.
    pub paths: Vec<String>,
}

/// What is counted of a machine.
#[derive(Debug)]
struct MachineCounts {
    connections: AtomicU64,
    calls: AtomicU64,
    /// Milliseconds after the beginning.
    last_ms: AtomicU64,
}

#[derive(Debug)]
struct Machine {
    counts: Arc<MachineCounts>,
    paths: BTreeSet<String>,
}

/// The machines of one gateway.
#[derive(Debug)]
pub(super) struct Clients {
    began: Instant,
    machines: Mutex<BTreeMap<IpAddr, Machine>>,
}

/// A connection of a machine, until it is dropped.
#[derive(Debug)]
pub(super) struct ClientConnection {
    began: Instant,
    counts: Arc<MachineCounts>,
}

impl ClientConnection {
    /// Connections that the machine has.
    pub(super) fn connections(&self) -> u64 {
        self.counts.connections.load(Ordering::Relaxed)
    }

    /// MachineCounts a call.
    pub(super) fn note_call(&self) {
        self.counts.calls.fetch_add(1, Ordering::Relaxed);
        self.counts.last_ms.store(ms_since(self.began), Ordering::Relaxed);
    }
}

impl Drop for ClientConnection {
    fn drop(&mut self) {
        self.counts.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

fn ms_since(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX)
}

impl Clients {
    pub(super) fn new() -> Clients {
        Clients { began: Instant::now(), machines: Mutex::default() }
    }

    fn locked(&self) -> MutexGuard<'_, BTreeMap<IpAddr, Machine>> {
        self.machines.lock().expect("no holder of this lock panics")
    }

    fn machine<T>(&self, address: IpAddr, with: impl FnOnce(&mut Machine) -> T) -> T {
        let mut machines = self.locked();
        if !machines.contains_key(&address) && machines.len() >= MAX_MACHINES {
            let last = |machine: &Machine| {
                let counts = &machine.counts;
                let is_connected = counts.connections.load(Ordering::Relaxed) > 0;
                (is_connected, counts.last_ms.load(Ordering::Relaxed))
            };
            let oldest = machines.iter().min_by_key(|(_, machine)| last(machine));
            if let Some(oldest) = oldest.map(|(address, _)| *address) {
                machines.remove(&oldest);
            }
        }
        with(machines.entry(address).or_insert_with(|| Machine {
            counts: Arc::new(MachineCounts {
                connections: AtomicU64::new(0),
                calls: AtomicU64::new(0),
                last_ms: AtomicU64::new(ms_since(self.began)),
            }),
            paths: BTreeSet::new(),
        }))
    }

    /// A new connection.
    pub(super) fn connect(&self, address: IpAddr) -> ClientConnection {
        let counts = self.machine(address, |machine| machine.counts.clone());
        counts.connections.fetch_add(1, Ordering::Relaxed);
        ClientConnection { began: self.began, counts }
    }

    /// A path was mounted.
    pub(super) fn mounted(&self, address: IpAddr, path: &[u8]) {
        let path = String::from_utf8_lossy(path).into_owned();
        self.machine(address, |machine| {
            if machine.paths.len() < MAX_PATHS {
                machine.paths.insert(path);
            }
        });
    }

    /// A path was unmounted; all of them, if none is named.
    pub(super) fn unmounted(&self, address: IpAddr, path: Option<&[u8]>) {
        self.machine(address, |machine| match path {
            Some(path) => {
                machine.paths.remove(&*String::from_utf8_lossy(path));
            }
            None => machine.paths.clear(),
        });
    }

    /// All machines, by address.
    pub(super) fn list(&self) -> Vec<ClientMachine> {
        let now = ms_since(self.began);
        let told = |(address, machine): (&IpAddr, &Machine)| {
            let count = |of: &AtomicU64| of.load(Ordering::Relaxed);
            ClientMachine {
                address: *address,
                connections: count(&machine.counts.connections),
                calls: count(&machine.counts.calls),
                idle: Duration::from_millis(now.saturating_sub(count(&machine.counts.last_ms))),
                paths: machine.paths.iter().cloned().collect(),
            }
        };
        self.locked().iter().map(told).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_are_told_with_what_they_have_mounted_and_their_number_is_bounded() {
        let clients = Clients::new();
        let ip = |n: u32| IpAddr::from(n.to_be_bytes());
        let one = clients.connect(ip(1));
        one.note_call();
        clients.mounted(ip(1), b"/work");
        clients.mounted(ip(1), b"/team");
        clients.unmounted(ip(1), Some(b"/work"));
        for n in 2..2000 {
            drop(clients.connect(ip(n)));
        }
        let told = clients.list();
        assert_eq!(told.len(), MAX_MACHINES);
        let first = &told[0];
        assert_eq!(
            (first.address, first.connections, first.calls),
            (ip(1), 1, 1),
            "it is connected"
        );
        assert_eq!(first.paths, ["/team"]);
        drop(one);
        clients.unmounted(ip(1), None);
        assert_eq!((clients.list()[0].connections, clients.list()[0].paths.len()), (0, 0));
    }
}
