//! Records of the NFS servers that run from a node's directory, in `DIR/nfs`:
//!
//! | file | |
//! |---|---|
//! | `ADDR-PORT.lock` | locked (`flock`) by the server on that address, for as long as it lives |
//! | `ADDR-PORT.json` | what it serves and who uses it, written again when that changes |
//! | `handles.key` | the secret with which all of them seal file handles |

use std::fs::{self, File, OpenOptions};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

use atoll_gateway::nfs::ClientMachine;
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use crate::failure::{Exit, Failure};
use crate::output::escaped;
use crate::spool;
use crate::units;

/// The record of one server.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub(crate) struct ServerRecord {
    /// Its process.
    pub(crate) pid: u32,
    /// Its address.
    pub(crate) listen: SocketAddr,
    /// Its exports.
    pub(crate) exports: Vec<ExportRecord>,
    /// Machines that use it, or have used it.
    pub(crate) clients: Vec<ClientRecord>,
}

/// An export in the record of its server.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub(crate) struct ExportRecord {
    /// The path by which clients mount it.
    pub(crate) path: String,
    /// The volume or TFS, as the user named it.
    pub(crate) what: String,
    /// Whether all changes are refused.
    pub(crate) read_only: bool,
    /// The volume's `user.atoll.status`; for a TFS that has failed, the reason.
    pub(crate) status: Option<String>,
}

/// A client machine in the record of a server.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub(crate) struct ClientRecord {
    address: IpAddr,
    connections: u64,
    calls: u64,
    last_call_unix_secs: u64,
    mounts: Vec<String>,
}

/// The directory of the records.
pub(crate) fn place(dir: &Path) -> PathBuf {
    dir.join("nfs")
}

fn file_of(dir: &Path, address: SocketAddr, ending: &str) -> PathBuf {
    place(dir).join(format!("{}.{ending}", address.to_string().replace(':', "-")))
}

fn unix_secs() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// The record of this process, and the lock that shows that the process lives.
pub(super) struct Server {
    state: PathBuf,
    listen: SocketAddr,
    told: Mutex<Option<ServerRecord>>,
    _lock: File,
}

impl Server {
    /// Locks the record of the server on an address, and writes it.
    pub(super) fn claim(
        dir: &Path,
        listen: SocketAddr,
        exports: Vec<ExportRecord>,
        what: &str,
    ) -> Result<Server, Failure> {
        super::make_place(dir, what)?;
        let path = file_of(dir, listen, "lock");
        let mut options = OpenOptions::new();
        let lock = options.create(true).append(true).mode(0o600).open(&path);
        let lock = lock.map_err(|error| Failure::io(what, &error))?;
        // A command that reads the records tests the lock for a moment.
        spool::lock_soon(&lock).map_err(|error| {
            Failure::new(Exit::Failed, what).because(format!("{}: {error}", path.display()))
        })?;
        let state = file_of(dir, listen, "json");
        let server = Server { state, listen, told: Mutex::default(), _lock: lock };
        server.tell(exports, &[]);
        Ok(server)
    }

    /// Writes the record if it has changed. A failure to write is logged.
    pub(super) fn tell(&self, exports: Vec<ExportRecord>, clients: &[ClientMachine]) {
        let mut told = self.told.lock().expect("no holder of this lock panics");
        let now = unix_secs();
        let client = |client: &ClientMachine| {
            let mut before = told.iter().flat_map(|told| &told.clients);
            let before = before.find(|before| before.address == client.address);
            ClientRecord {
                address: client.address,
                connections: client.connections,
                calls: client.calls,
                // The time of a call is that of when it was first told.
                last_call_unix_secs: match before.filter(|before| before.calls == client.calls) {
                    Some(before) => before.last_call_unix_secs,
                    None => now.saturating_sub(client.idle.as_secs()),
                },
                mounts: client.paths.clone(),
            }
        };
        let clients = clients.iter().map(client).collect();
        let running =
            ServerRecord { pid: std::process::id(), listen: self.listen, exports, clients };
        if told.as_ref() == Some(&running) {
            return;
        }
        let written = serde_json::to_vec(&running).map_err(io::Error::from).and_then(|bytes| {
            let beside = self.state.with_extension("new");
            fs::write(&beside, bytes)?;
            fs::rename(&beside, &self.state)
        });
        if let Err(error) = written {
            tracing::warn!("cannot write {}: {error}", self.state.display());
        }
        *told = Some(running);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.state);
    }
}

/// The servers that run.
pub(crate) fn running(dir: &Path) -> Vec<ServerRecord> {
    let Ok(entries) = fs::read_dir(place(dir)) else { return Vec::new() };
    let lives = |state: &Path| {
        let Ok(lock) = File::open(state.with_extension("lock")) else { return false };
        rustix::fs::flock(&lock, FlockOperation::NonBlockingLockShared).is_err()
    };
    let states = entries.flatten().map(|entry| entry.path());
    let states = states.filter(|path| path.extension().is_some_and(|ending| ending == "json"));
    let mut running: Vec<ServerRecord> = states
        .filter(|path| lives(path))
        .filter_map(|path| serde_json::from_slice(&fs::read(path).ok()?).ok())
        .collect();
    running.sort_by_key(|server| server.listen);
    running
}

impl ServerRecord {
    /// The paths that it serves.
    pub(super) fn paths(&self) -> String {
        let paths: Vec<String> =
            self.exports.iter().map(|export| escaped(export.path.as_bytes())).collect();
        paths.join(", ")
    }

    /// What is told of it, a line each.
    pub(crate) fn lines(&self) -> Vec<String> {
        let ServerRecord { pid, listen, exports, clients } = self;
        let mut lines = Vec::new();
        for export in exports {
            let ExportRecord { path, what, read_only, status } = export;
            let how = if *read_only { ", read-only" } else { "" };
            let status = status.as_ref().map(|status| format!(": {}", escaped(status.as_bytes())));
            lines.push(format!(
                "{} on {listen} is {}{how} (process {pid}){}",
                escaped(path.as_bytes()),
                escaped(what.as_bytes()),
                status.unwrap_or_default()
            ));
        }
        let now = unix_secs();
        for client in clients {
            // A server that was restarted is not told what is mounted.
            let mounts = match client.mounts.is_empty() {
                true => "uses it".to_owned(),
                false => format!("has {} mounted", escaped(client.mounts.join(", ").as_bytes())),
            };
            lines.push(format!(
                "  {} {mounts}: {}, {}, the last one {} ago",
                client.address,
                units::counted(client.connections, "connection", "connections"),
                units::counted(client.calls, "call", "calls"),
                units::whole_secs(now.saturating_sub(client.last_call_unix_secs)),
            ));
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_server_is_told_of_while_it_lives() {
        let dir = tempfile::tempdir().expect("a directory");
        let listen: SocketAddr = "127.0.0.1:2049".parse().expect("an address");
        assert_eq!(running(dir.path()), []);
        let export = ExportRecord {
            path: "/work".into(),
            what: "work".into(),
            read_only: false,
            status: Some("all is on the ring".into()),
        };
        let server = Server::claim(dir.path(), listen, vec![export.clone()], "x").expect("claimed");
        let told = running(dir.path());
        assert_eq!(told.len(), 1);
        assert_eq!(told[0].exports, std::slice::from_ref(&export));
        assert_eq!(told[0].paths(), "/work");
        let machine = ClientMachine {
            address: [192, 0, 2, 7].into(),
            connections: 1,
            calls: 3,
            idle: Duration::from_secs(5),
            paths: vec!["/work".into()],
        };
        server.tell(vec![export], &[machine]);
        let lines = running(dir.path())[0].lines().join("\n");
        assert!(lines.contains("/work on 127.0.0.1:2049 is work (process "), "{lines}");
        assert!(lines.contains("192.0.2.7 has /work mounted: 1 connection, 3 calls"), "{lines}");
        drop(server);
        assert_eq!(running(dir.path()), [], "it has ended");
        fs::write(place(dir.path()).join("127.0.0.1-2049.json"), b"{").expect("written");
        assert_eq!(running(dir.path()), [], "a crash has left it, or it is damaged");
    }
}
