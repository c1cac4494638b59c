//! A place of its own for the benchmark: namespaces that go with its last process.
//!
//! The benchmark starts itself again under `unshare`, in network, mount and process
//! namespaces of its own. Inside it is process number 1: when it ends, for whatever
//! reason, the kernel kills every process it started, and with them go their network
//! namespaces and interfaces. Nothing has a name outside, and nothing of the machine's
//! own network is touched or seen. The outer process holds a pipe that the inner one
//! reads: if the outer one dies, so does the inner one.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};

/// The environment variable that tells the inner process where it may write.
const INSIDE: &str = "ATOLL_BENCH_WAN_INSIDE";
const UNSHARE: [&str; 6] = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"];

/// Where to write, if this is the inner process.
pub(crate) fn inside() -> Option<PathBuf> {
    let dir = PathBuf::from(std::env::var_os(INSIDE)?);
    std::thread::spawn(|| {
        let mut rest = Vec::new();
        // Ends when the outer process does.
        let _ = std::io::stdin().read_to_end(&mut rest);
        std::process::exit(130);
    });
    Some(dir)
}

/// What is missing for namespaces and interfaces, if anything.
pub(crate) fn missing() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("it needs root".into());
    }
    if !Path::new("/dev/net/tun").exists() {
        return Some("there is no /dev/net/tun".into());
    }
    for (program, argument) in [("ip", "-V"), ("nsenter", "-V")] {
        if !succeeds(Command::new(program).arg(argument)) {
            return Some(format!("there is no `{program}`"));
        }
    }
    let made = succeeds(Command::new("unshare").args(UNSHARE).arg("true"));
    (!made).then(|| "`unshare` cannot make namespaces here".into())
}

fn succeeds(command: &mut Command) -> bool {
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}

/// Runs this benchmark again inside, and waits for it.
pub(crate) fn run_inside() -> ExitCode {
    let temp = tempfile::Builder::new().prefix("atoll-wan-").tempdir();
    let temp = temp.expect("a temporary directory");
    let own = std::env::current_exe().expect("this program has a path");
    let mut command = Command::new("unshare");
    command.args(UNSHARE).arg(own).args(std::env::args_os().skip(1));
    let child = command.env(INSIDE, temp.path()).stdin(Stdio::piped()).spawn();
    let mut child = child.expect("unshare has just run");
    let ended = wait(&mut child);
    // Not until the inner process is gone: it writes there.
    let _ = child.kill();
    let _ = child.wait();
    match ended {
        Some(status) if status.success() => ExitCode::SUCCESS,
        Some(_) => ExitCode::FAILURE,
        None => ExitCode::from(130),
    }
}

/// Until the child ends or a signal interrupts.
fn wait(child: &mut Child) -> Option<std::process::ExitStatus> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        use tokio::signal::unix::{SignalKind, signal};
        let mut terminated = signal(SignalKind::terminate()).expect("a handler");
        let mut tick = tokio::time::interval(std::time::Duration::from_millis(100));
        loop {
            tokio::select! {
                _ = tokio::signal::ctrl_c() => return None,
                _ = terminated.recv() => return None,
                _ = tick.tick() => {}
            }
            if let Ok(Some(status)) = child.try_wait() {
                return Some(status);
            }
        }
    })
}
