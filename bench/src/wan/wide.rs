//! Sites, each a network namespace, joined by the router.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::router::{Lines, MTU, Router};
use crate::tun;

/// How long a namespace may take to come up.
const UP_LIMIT: Duration = Duration::from_secs(10);

/// The network. Only inside the nest: see [`crate::nest`].
pub(crate) struct Wide {
    holders: Vec<Child>,
    pub router: Router,
}

impl Wide {
    /// Makes as many sites as `lines` has rows; site i has the address 10.99.0.(i + 1).
    pub(crate) fn new(lines: Lines) -> Wide {
        let holders: Vec<Child> = lines.delays.iter().map(|_| hold_namespace()).collect();
        let interfaces = (holders.iter().enumerate())
            .map(|(site, holder)| {
                let name = format!("wan{site}");
                let interface = tun::open(&name).expect("an interface of the bench's own");
                run(Command::new("ip")
                    .args(["link", "set", &name, "netns"])
                    .arg(holder.id().to_string()));
                let address = format!("{}/24", address(site));
                for args in [
                    &["addr", "add", &address, "dev", &name][..],
                    &["link", "set", &name, "mtu", &MTU.to_string(), "txqueuelen", "10000", "up"],
                    &["link", "set", "lo", "up"],
                ] {
                    run(enter(holder, Path::new("ip")).args(args));
                }
                interface
            })
            .collect();
        Wide { holders, router: Router::start(interfaces, lines) }
    }

    /// A command that will run at a site.
    pub(crate) fn command(&self, site: usize, program: &Path) -> Command {
        enter(&self.holders[site], program)
    }

    /// A setting of the system's TCP, as a site has it.
    pub(crate) fn setting(&self, name: &str) -> String {
        let path = PathBuf::from("/proc/sys/net/ipv4").join(name);
        let output = self.command(0, Path::new("cat")).arg(path).output().expect("cat runs");
        String::from_utf8_lossy(&output.stdout).trim().replace('\t', " ")
    }
}

impl Drop for Wide {
    fn drop(&mut self) {
        for holder in &mut self.holders {
            let _ = holder.kill();
            let _ = holder.wait();
        }
    }
}

pub(crate) fn address(site: usize) -> String {
    format!("10.99.0.{}", site + 1)
}

fn run(command: &mut Command) {
    let status = command.stdin(Stdio::null()).status().expect("it runs");
    assert!(status.success(), "{command:?}");
}

/// A process that does nothing in a new network namespace, which it keeps.
fn hold_namespace() -> Child {
    let mut command = Command::new("unshare");
    command.args(["--net", "sleep", "infinity"]).stdin(Stdio::null());
    let holder = command.spawn().expect("unshare runs");
    let namespace = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/net")).ok();
    let (own, began) = (namespace("self"), Instant::now());
    while namespace(&holder.id().to_string()).is_none_or(|its| Some(its) == own) {
        assert!(began.elapsed() < UP_LIMIT, "a namespace does not come up");
        std::thread::sleep(Duration::from_millis(1));
    }
    holder
}

fn enter(holder: &Child, program: &Path) -> Command {
    let mut command = Command::new("nsenter");
    command.arg(format!("--net=/proc/{}/ns/net", holder.id())).arg("--").arg(program);
    command
}
