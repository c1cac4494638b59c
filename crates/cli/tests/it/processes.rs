//! Nodes as processes in directories of their own, and commands run against them.
//! Everything is killed and removed when a test ends, also when it fails.

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub(crate) use atoll_bench::noise;

/// How long anything may take on a busy machine before a test gives up.
pub(crate) const PATIENCE: Duration = Duration::from_secs(240);

/// `ETIMEDOUT`: what a call of a mount is told that the ring has not answered in time, as may be on a busy machine.
pub(crate) const TIMED_OUT: i32 = 110;

/// What a command said and how it ended.
#[derive(Debug)]
pub(crate) struct Said {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Said {
    /// Fails the test unless the command succeeded; 8 and 9 are what `atoll status` has found.
    #[track_caller]
    pub(crate) fn ok(self) -> Said {
        assert!(matches!(self.code, Some(0 | 8 | 9)), "{self:?}");
        self
    }

    /// Fails the test unless the command ended with this code and these words.
    #[track_caller]
    pub(crate) fn failed(self, code: i32, words: &[&str]) -> Said {
        assert_eq!(self.code, Some(code), "{self:?}");
        for word in words {
            assert!(self.stderr.contains(word), "no {word:?} in {self:?}");
        }
        self
    }

    /// Fails the test unless the command ended with this code and one JSON value.
    #[track_caller]
    pub(crate) fn failed_json(self, code: i32) -> serde_json::Value {
        self.failed(code, &[]).json()
    }

    pub(crate) fn last_line(&self) -> &str {
        self.stdout.lines().last().unwrap_or_default()
    }

    /// Standard output as JSON, one value a line.
    #[track_caller]
    pub(crate) fn json_lines(&self) -> Vec<serde_json::Value> {
        let parse = |line| serde_json::from_str(line).expect("valid JSON");
        self.stdout.lines().map(parse).collect()
    }

    /// Standard output as one JSON value.
    #[track_caller]
    pub(crate) fn json(&self) -> serde_json::Value {
        let mut values = self.json_lines();
        assert_eq!(values.len(), 1, "one value: {self:?}");
        values.remove(0)
    }
}

/// The binary, without anything the environment says about it.
pub(crate) fn atoll() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_atoll"));
    command.env_remove("ATOLL_DIR").env_remove("ATOLL_LOG").stdin(Stdio::null());
    command
}

/// Runs a command to its end.
pub(crate) fn run(command: &mut Command) -> Said {
    let output = command.output().expect("the binary runs");
    Said {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// Runs a command that unmounts, until nothing uses the mount: a program that another test starts
/// holds, for a moment, all files that this process has open.
#[track_caller]
pub(crate) fn unmount(command: &mut Command) {
    run_until("nothing uses the mount", command, |said| !said.stderr.contains("is in use")).ok();
}

/// Waits until `done` says so.
#[track_caller]
pub(crate) fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < PATIENCE, "gave up waiting: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Runs a command until `done` says so of it; what it said then.
#[track_caller]
pub(crate) fn run_until(what: &str, command: &mut Command, done: impl Fn(&Said) -> bool) -> Said {
    let mut last = None;
    until(what, || done(last.insert(run(command))));
    last.expect("it ran")
}

/// A node and its directory. The directory outlives the process.
pub(crate) struct NodeProcess {
    pub dir: PathBuf,
    process: Option<Child>,
}

impl NodeProcess {
    /// Runs `atoll up` in `dir`.
    pub(crate) fn start(dir: PathBuf, join: Option<&str>) -> NodeProcess {
        let listen = ["--listen", "127.0.0.1:0", "--storage", "2GiB"];
        let mut arguments: Vec<&str> = listen.to_vec();
        if join.is_some() {
            arguments.extend(["--join", "-"]);
        }
        NodeProcess::start_by(Command::new("env"), dir, &arguments, join.unwrap_or_default())
    }

    /// The same with arguments of `atoll up`, and by `env` or a command that ends in it.
    pub(crate) fn start_by(
        by: Command,
        dir: PathBuf,
        arguments: &[&str],
        input: &str,
    ) -> NodeProcess {
        let mut node = NodeProcess { dir, process: None };
        node.up(by, arguments, input);
        node
    }

    /// Starts it again where it was.
    pub(crate) fn restart(&mut self) {
        self.restart_with(&[], "");
        self.wait_for(&["joined"]);
    }

    /// Starts it again with arguments of `atoll up`.
    pub(crate) fn restart_with(&mut self, arguments: &[&str], input: &str) {
        assert!(self.process.is_none(), "it runs");
        self.up(Command::new("env"), arguments, input);
    }

    fn up(&mut self, mut by: Command, arguments: &[&str], input: &str) {
        let log = self.dir.with_extension("log");
        let log = fs::File::options().append(true).create(true).open(log).expect("a log");
        let mut child = by
            .args(["-u", "ATOLL_DIR", "-u", "ATOLL_LOG", env!("CARGO_BIN_EXE_atoll"), "--dir"])
            .arg(&self.dir)
            .arg("up")
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("the binary runs");
        let mut stdin = child.stdin.take().expect("piped");
        stdin.write_all(input.as_bytes()).expect("the node reads its code");
        self.process = Some(child);
    }

    /// Runs a command of this node's directory.
    pub(crate) fn atoll<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Said {
        run(&mut self.command(arguments))
    }

    /// The same, not started yet.
    pub(crate) fn command<S: AsRef<OsStr>>(
        &self,
        arguments: impl IntoIterator<Item = S>,
    ) -> Command {
        let mut command = atoll();
        command.env("ATOLL_DIR", &self.dir).args(arguments);
        command
    }

    /// Waits until the node is in these states.
    #[track_caller]
    pub(crate) fn wait_for(&self, states: &[&str]) {
        let patience = format!("{}s", PATIENCE.as_secs());
        let mut arguments = vec!["status", "--timeout", &patience];
        arguments.extend(states.iter().flat_map(|state| ["--wait", state]));
        let said = self.atoll(&arguments);
        assert_eq!(said.code, Some(0), "{states:?}: {said:?}\n{}", self.log());
    }

    /// What the node said on standard error.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.dir.with_extension("log")).unwrap_or_default()
    }

    /// SIGSTOP, and waits until every thread stands (`kill` comes back before that): the
    /// node answers nothing, and its connections stay open.
    pub(crate) fn freeze(&self) {
        self.signal("STOP");
        let tasks = format!("/proc/{}/task", self.process.as_ref().expect("it runs").id());
        let stands = |task: std::io::Result<fs::DirEntry>| {
            let status = task.and_then(|task| fs::read_to_string(task.path().join("status")));
            status.is_ok_and(|status| status.contains("State:\tT"))
        };
        until("every thread stands", || fs::read_dir(&tasks).expect("tasks").all(stands));
    }

    /// SIGKILL.
    pub(crate) fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    /// Sends a signal to the daemon.
    pub(crate) fn signal(&self, name: &str) {
        signal(self.process.as_ref().expect("it runs").id(), name);
    }

    /// Waits until the daemon ends by itself: its exit code, and what is left of it.
    #[track_caller]
    pub(crate) fn ended(mut self) -> (Option<i32>, NodeProcess) {
        let mut ended = None;
        until("the daemon ends", || {
            ended = self.process.as_mut().expect("it runs").try_wait().expect("a child");
            ended.is_some()
        });
        self.process = None;
        (ended.expect("it was waited for").code(), self)
    }

    /// SIGTERM, and the exit code.
    pub(crate) fn stop(&mut self) -> Option<i32> {
        let mut process = self.process.take().expect("it runs");
        signal(process.id(), "TERM");
        process.wait().expect("it ends").code()
    }
}

impl Drop for NodeProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Sends a signal to a process that the test started.
pub(crate) fn signal(process: u32, name: &str) {
    let sent = Command::new("kill").arg(format!("-{name}")).arg(process.to_string()).status();
    assert!(sent.expect("kill runs").success(), "SIG{name} to {process}");
}

/// Some nodes of one network, and a directory for everything else.
pub(crate) struct Ring {
    pub nodes: Vec<NodeProcess>,
    mounts: Vec<PathBuf>,
    pub temp: tempfile::TempDir,
}

impl Ring {
    /// Starts a network of `count` nodes and waits until each sees all.
    #[track_caller]
    pub(crate) fn of(count: usize) -> Ring {
        let temp = tempfile::tempdir().expect("a temporary directory");
        let first = NodeProcess::start(temp.path().join("node0"), None);
        first.wait_for(&["joined"]);
        let code = first.atoll(["invite"]).ok().stdout;
        let mut nodes = vec![first];
        for i in 1..count {
            nodes.push(NodeProcess::start(temp.path().join(format!("node{i}")), Some(&code)));
        }
        let whole = format!("nodes={count}");
        nodes.iter().for_each(|node| node.wait_for(&[&whole]));
        Ring { nodes, mounts: Vec::new(), temp }
    }

    /// A path for the test's own use.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.temp.path().join(name)
    }

    /// Makes a tree and publishes it through the first node; where it is, and the address.
    #[track_caller]
    pub(crate) fn publish_tree(&self) -> (PathBuf, String) {
        let source = self.path("tree");
        make_tree(&source);
        let address = self.publish(&source);
        (source, address)
    }

    /// Publishes through the first node; the address.
    #[track_caller]
    pub(crate) fn publish(&self, source: &Path) -> String {
        run(self.nodes[0].command(["publish"]).arg(source)).ok().last_line().to_string()
    }

    /// Mounts through a node, on a new directory; gone when the ring is.
    #[track_caller]
    pub(crate) fn mount(&mut self, node: usize, address: &str, options: &[&str]) -> PathBuf {
        let mountpoint = self.path(&format!("mount{}", self.mounts.len()));
        fs::create_dir(&mountpoint).expect("a mount point");
        self.mounts.push(mountpoint.clone());
        let mut command = self.nodes[node].command(["mount", address]);
        run(command.arg(&mountpoint).args(options)).ok();
        mountpoint
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        for mountpoint in &self.mounts {
            let _ = atoll().args(["unmount", "--lazy"]).arg(mountpoint).output();
        }
    }
}

/// The address of a volume that was never published.
pub(crate) fn unpublished() -> String {
    let key = atoll_key::SecretKey::from_seed(&[77; 32]).volume_id();
    atoll_key::VolumeAddress(key).to_string()
}

/// The same command by a process that may not read everything, as root may: it ignores no
/// mode of a file.
pub(crate) fn unprivileged(command: &Command) -> Command {
    let mut wrapped = match rustix::process::geteuid().is_root() {
        true => {
            let mut wrapped = Command::new("setpriv");
            wrapped.arg("--bounding-set=-dac_override,-dac_read_search").arg(command.get_program());
            wrapped
        }
        false => Command::new(command.get_program()),
    };
    wrapped.args(command.get_args()).stdin(Stdio::null());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => wrapped.env(name, value),
            None => wrapped.env_remove(name),
        };
    }
    wrapped
}

/// Whether file systems can be mounted here; says loudly if not.
pub(crate) fn can_mount(test: &str) -> bool {
    let device = fs::File::options().read(true).write(true).open("/dev/fuse").is_ok();
    let root = rustix::process::geteuid().is_root();
    let helper = ["/usr/bin", "/bin"].iter().any(|d| Path::new(d).join("fusermount3").exists());
    if device && (root || helper) {
        return true;
    }
    // Past the test harness, which would keep it to itself.
    let _ = writeln!(std::io::stderr(), "\nSKIPPED {test}: FUSE cannot be used here");
    false
}

/// Makes a tree with a little of everything: small, empty and large files, links,
/// modes, directories, names that are no text.
pub(crate) fn make_tree(top: &Path) {
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::{PermissionsExt, symlink};
    for dir in ["", "docs", "docs/deep/deeper", "empty"] {
        fs::create_dir_all(top.join(dir)).expect("a directory");
    }
    for i in 0..40 {
        fs::write(top.join(format!("docs/file{i:02}.txt")), format!("this is file {i}\n"))
            .expect("a file");
    }
    fs::write(top.join("docs/empty.txt"), "").expect("a file");
    fs::write(top.join("docs/deep/deeper/large.bin"), noise(700_001, 1)).expect("a file");
    fs::write(top.join("run.sh"), "#!/bin/sh\necho hello\n").expect("a file");
    fs::set_permissions(top.join("run.sh"), fs::Permissions::from_mode(0o755)).expect("chmod");
    fs::write(top.join(OsStr::from_bytes(b"caf\xe9")), "latin 1\n").expect("a file");
    fs::write(top.join("\u{1b}[31mred"), "escape\n").expect("a file");
    symlink("docs/file07.txt", top.join("link")).expect("a link");
    symlink("nowhere", top.join("docs/dangling")).expect("a link");
}

/// Compares two trees with the program's own comparison.
#[track_caller]
pub(crate) fn assert_same(a: &Path, b: &Path) {
    let mut compare = atoll();
    assert_reads_the_same(compare.arg("compare").arg(a).arg(b));
}

/// As [`assert_same`], but for the time of the topmost directory.
#[track_caller]
pub(crate) fn assert_same_below(a: &Path, b: &Path) {
    let time = fs::metadata(a).and_then(|top| top.modified()).expect("a directory");
    fs::File::open(b).and_then(|top| top.set_modified(time)).expect("a directory");
    assert_same(a, b);
}

/// Compares trees by their names, links and contents.
#[track_caller]
pub(crate) fn assert_same_contents(a: &Path, b: &Path) {
    let mut diff = Command::new("diff");
    assert_reads_the_same(diff.args(["-r", "--no-dereference"]).arg(a).arg(b));
}

#[track_caller]
fn assert_reads_the_same(compare: &mut Command) {
    let is_read = |said: &Said| !said.stderr.contains("Connection timed out");
    run_until("both can be read", compare, is_read).ok();
}

/// That a file has these bytes.
#[track_caller]
pub(crate) fn assert_holds(file: &Path, bytes: &[u8]) {
    let mut read = None;
    until("it can be read", || {
        let attempt = read.insert(fs::read(file));
        !attempt.as_ref().is_err_and(|error| error.raw_os_error() == Some(TIMED_OUT))
    });
    let shown = file.display();
    let read = read.expect("it was tried").unwrap_or_else(|error| panic!("{shown}: {error}"));
    if read != bytes {
        let same = read.iter().zip(bytes).take_while(|(is, should)| is == should).count();
        let (is, should) = (read.len(), bytes.len());
        panic!("{shown}: {is} bytes instead of {should}; the first {same} are as they should be");
    }
}
