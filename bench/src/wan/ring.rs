//! A ring of `atoll` processes, one at each site.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use atoll_key::PeerId;

use crate::wide::{Wide, address};
use atoll_bench::start_node;

const PORT: u16 = 7543;

/// The processes; killed when dropped.
pub(crate) struct Ring {
    program: PathBuf,
    dirs: Vec<PathBuf>,
    processes: Vec<Child>,
}

impl Ring {
    /// Starts a node at each of `count` sites, with `options` for `atoll up`; returns when
    /// all know of all.
    pub(crate) fn start(
        wide: &Wide,
        program: &Path,
        temp: &Path,
        count: usize,
        options: &[String],
    ) -> Ring {
        Ring::found(wide, program, temp, count, (options, &[]))
    }

    /// The same; the first node, which makes the network, has options of its own besides.
    pub(crate) fn found(
        wide: &Wide,
        program: &Path,
        temp: &Path,
        count: usize,
        (options, founder): (&[String], &[String]),
    ) -> Ring {
        let program = program.to_path_buf();
        let mut ring = Ring { program, dirs: Vec::new(), processes: Vec::new() };
        let mut code = String::new();
        for site in 0..count {
            let dir = temp.join(format!("node{site}"));
            let mut up = wide.command(site, &ring.program);
            up.arg("--dir").arg(&dir).args([
                "up",
                "--listen",
                &format!("{}:{PORT}", address(site)),
            ]);
            let log = std::fs::File::create(temp.join(format!("node{site}.log"))).expect("a log");
            up.args(options).args(if site == 0 { founder } else { &[] }).stderr(log);
            ring.processes.push(start_node(up, &code));
            ring.dirs.push(dir);
            if site == 0 {
                ring.run(0, &["status", "--wait", "joined"]);
                code = ring.run(0, &["invite"]).0;
            }
        }
        for site in 0..count {
            let wish = format!("nodes={count}");
            ring.run(site, &["status", "--wait", &wish, "--timeout", "2min"]);
        }
        ring
    }

    /// A command through the node of a site; what it printed, and how long it took.
    pub(crate) fn run(&self, site: usize, arguments: &[&str]) -> (String, Duration) {
        let mut command = Command::new(&self.program);
        command.env("ATOLL_DIR", &self.dirs[site]).args(arguments);
        let began = Instant::now();
        let output = command.stdin(Stdio::null()).stderr(Stdio::piped()).output();
        let output = output.expect("it runs");
        let took = began.elapsed();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{command:?}: {said}");
        (String::from_utf8(output.stdout).expect("text"), took)
    }

    fn status(&self, site: usize) -> serde_json::Value {
        // Waiting for what is so already keeps its exit code from telling of copies.
        let said = self.run(site, &["status", "--wait", "joined", "--json"]).0;
        serde_json::from_str(&said).expect("status prints JSON")
    }

    /// A node's public key.
    pub(crate) fn identity(&self, site: usize) -> PeerId {
        let status = self.status(site);
        let hex = status["peer_id"].as_str().expect("a string");
        let byte = |at: usize| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16);
        PeerId(std::array::from_fn(|at| byte(at).expect("64 hexadecimal digits")))
    }

    /// What a node has received from its peers since it started.
    pub(crate) fn received_bytes(&self, site: usize) -> u64 {
        self.status(site)["received_bytes"].as_u64().expect("a number")
    }

    /// Writes a file of a volume through the node of a site; how long that took, from the
    /// start of the command to its end.
    pub(crate) fn cat(&self, site: usize, path: &str, copy: &Path) -> Duration {
        let mut command = Command::new(&self.program);
        command.env("ATOLL_DIR", &self.dirs[site]).args(["cat", path]);
        let output = std::fs::File::create(copy).expect("a file");
        let began = Instant::now();
        let status = command.stdin(Stdio::null()).stdout(output).status().expect("it runs");
        let took = began.elapsed();
        assert!(status.success(), "{command:?}");
        took
    }

    /// Publishes a directory; its address, when all copies are where they belong.
    pub(crate) fn publish(&self, site: usize, name: &str, source: &Path) -> String {
        let source = source.to_str().expect("a path of the bench's own");
        let said = self.run(site, &["publish", "-q", "--name", name, source]).0;
        self.run(site, &["status", "--wait", "replicated", "--timeout", "10min"]);
        said.lines().last().expect("an address").to_string()
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}
