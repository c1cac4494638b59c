//! A ring on this machine, node by node a process, and what it costs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use crate::process::start_node;

/// Nodes on loopback; killed when dropped.
#[derive(Debug)]
pub struct LocalRing {
    binary: PathBuf,
    dirs: Vec<PathBuf>,
    processes: Vec<Child>,
}

impl LocalRing {
    /// Starts `nodes` nodes of the program `binary` in directories below `temp`, which is made.
    pub fn start(binary: PathBuf, temp: &Path, nodes: usize) -> LocalRing {
        let mut ring = LocalRing { binary, dirs: Vec::new(), processes: Vec::new() };
        fs::create_dir(temp).expect("a directory");
        let mut code = String::new();
        for i in 0..nodes {
            let dir = temp.join(format!("node{i}"));
            let mut up = Command::new(&ring.binary);
            up.arg("--dir").arg(&dir).args(["up", "--listen", "127.0.0.1:0"]);
            up.stderr(Stdio::null());
            ring.processes.push(start_node(up, &code));
            ring.dirs.push(dir);
            if i == 0 {
                timed(ring.atoll(0).args(["status", "--wait", "joined"]));
                code = timed(ring.atoll(0).arg("invite")).1;
            }
        }
        for i in 0..nodes {
            timed(ring.atoll(i).args(["status", "--wait", &format!("nodes={nodes}")]));
        }
        ring
    }

    /// The program, about to talk to a node.
    pub fn atoll(&self, node: usize) -> Command {
        let mut command = Command::new(&self.binary);
        command.env("ATOLL_DIR", &self.dirs[node]);
        command
    }

    /// The nodes' process numbers.
    pub fn process_ids(&self) -> impl Iterator<Item = u32> {
        self.processes.iter().map(Child::id)
    }
}

impl Drop for LocalRing {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// Runs a command that must succeed; seconds and standard output.
pub fn timed(command: &mut Command) -> (f64, String) {
    let began = Instant::now();
    let output = command.stderr(Stdio::inherit()).output().expect("it runs");
    let secs = began.elapsed().as_secs_f64();
    assert!(output.status.success(), "{command:?}");
    (secs, String::from_utf8(output.stdout).expect("text"))
}

/// The middle one of some values; of two, the greater.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}
