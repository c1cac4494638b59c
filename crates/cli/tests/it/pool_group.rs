//! Pools of several machines as their users meet them: made, joined, mounted on each, killed and started again.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;

use crate::processes::{
    Ring, Said, assert_holds, assert_same_below, assert_same_contents, atoll, can_mount, make_tree,
    run, until,
};

/// Three nodes with a member each of pool `team`, which node 0 made.
struct Team {
    ring: Ring,
    mounts: Vec<PathBuf>,
}

impl Team {
    fn new(test: &str) -> Option<Team> {
        if !rustix::process::geteuid().is_root() {
            let _ = writeln!(std::io::stderr(), "\nSKIPPED {test}: a pool needs root");
            return None;
        }
        if !can_mount(test) {
            return None;
        }
        let ring = Ring::of(3);
        let team = Team { ring, mounts: Vec::new() };
        team.pool(0, &["create", "team", &team.files(0)]).ok();
        let invited = team.pool(0, &["invite", "team"]).ok();
        let code = invited.stdout.trim().to_owned();
        assert!(code.starts_with("atoll-pool:"), "{code}");
        assert!(invited.stderr.contains("pool team has 1 machine;"), "{}", invited.stderr);
        assert_eq!(team.pool(0, &["invite", "team"]).ok().stdout.trim(), code);
        for node in 1..3 {
            team.pool(node, &["join", &code, "team", &team.files(node)]).ok();
        }
        team.wait_until_whole();
        Some(team)
    }

    fn files(&self, node: usize) -> String {
        self.ring.path(&format!("files-{node}")).to_str().expect("a text").to_owned()
    }

    fn pool(&self, node: usize, arguments: &[&str]) -> Said {
        run(self.ring.nodes[node].command(["pool"]).args(arguments))
    }

    /// How the pool stands, as a node says; null if it does not run.
    fn pool_at(&self, node: usize) -> serde_json::Value {
        self.pool(node, &["status", "--json"]).ok().json()["group"].clone()
    }

    /// How the pool's first group stands, as a node says.
    fn state_at(&self, node: usize) -> serde_json::Value {
        self.pool_at(node)["groups"][0].clone()
    }

    /// Which of these nodes says that it is the primary, and how the pool stands, as that one says.
    fn primary_of(&self, nodes: &[usize]) -> Option<(usize, serde_json::Value)> {
        let states = nodes.iter().map(|node| (*node, self.state_at(*node)));
        states.into_iter().find(|(_, state)| state["is_primary"] == true)
    }

    /// Waits until one of these nodes is the primary; which.
    #[track_caller]
    fn wait_for_primary(&self, nodes: &[usize]) -> usize {
        let mut found = None;
        until("one is the primary", || {
            found = self.primary_of(nodes);
            found.is_some()
        });
        found.expect("it was found").0
    }

    /// Waits until all members take part, and their nodes agree who the primary is; which.
    #[track_caller]
    fn wait_until_all_take_part(&self) -> usize {
        let mut primary = None;
        until("all members take part", || {
            let all = [0, 1, 2].map(|node| self.state_at(node));
            let is_agreed = all.iter().all(|state| {
                state["epoch"] == all[0]["epoch"] && state["primary"] == all[0]["primary"]
            });
            let leads: Vec<usize> =
                (0..3).filter(|node| all[*node]["is_primary"] == true).collect();
            let [leader] = leads[..] else { return false };
            primary = Some(leader);
            let states = all[leader]["states"].as_array().cloned().unwrap_or_default();
            let takes_part = |state: &serde_json::Value| {
                state["is_member"] == true && state["problem"].is_null()
            };
            is_agreed && states.len() == 3 && states.iter().all(takes_part)
        });
        primary.expect("it was found")
    }

    /// The same, when nothing is under way: until all have made all changes.
    #[track_caller]
    fn wait_until_whole(&self) {
        until("all members have all changes", || {
            let primary = self.wait_until_all_take_part();
            let states = self.state_at(primary)["states"].as_array().cloned().unwrap_or_default();
            states.len() == 3
                && states.iter().all(|state| {
                    state["applied"] == states[0]["applied"] && state["files_to_mend"] == 0
                })
        });
    }

    /// Waits until these nodes are all members, and take part.
    #[track_caller]
    fn wait_until_these_take_part(&self, nodes: &[usize]) {
        until("these take part", || {
            let Some((_, state)) = self.primary_of(nodes) else { return false };
            let states = state["states"].as_array().cloned().unwrap_or_default();
            states.len() == nodes.len() && states.iter().all(|one| one["is_member"] == true)
        });
    }

    /// Waits until so many groups have as many members each, of these nodes, and all of them take part.
    #[track_caller]
    fn wait_until_settled(&self, nodes: &[usize], groups: usize, members: usize) {
        until("all groups have their members", || {
            let all: Vec<_> = nodes.iter().map(|node| self.pool_at(*node)).collect();
            let open = |group: &serde_json::Value| group["is_open"] == true;
            let machines = all.iter().all(|pool| {
                pool["groups"].as_array().is_some_and(|groups| groups.iter().all(open))
            });
            let machines = machines
                && all.iter().all(|pool| {
                    pool["machines"].as_array().is_some_and(|all| all.len() == nodes.len())
                });
            let stands = |number: usize| {
                let state = all.iter().map(|pool| &pool["groups"][number]);
                let mut state = state.filter(|state| state["is_primary"] == true);
                state.next().is_some_and(|state| {
                    let states = state["states"].as_array().cloned().unwrap_or_default();
                    let takes_part = |one: &serde_json::Value| {
                        one["is_member"] == true
                            && one["problem"].is_null()
                            && one["applied"] == states[0]["applied"]
                    };
                    state["is_open"] == true
                        && states.len() == members
                        && states.iter().all(takes_part)
                })
            };
            let count = all[0]["groups"].as_array().map_or(0, Vec::len);
            machines && count == groups && (0..groups).all(stands)
        });
    }

    fn mount(&mut self, node: usize) -> PathBuf {
        let at = self.ring.path(&format!("mnt-{node}"));
        fs::create_dir_all(&at).expect("a directory");
        run(self.ring.nodes[node].command(["mount", "team"]).arg(&at)).ok();
        self.mounts.push(at.clone());
        at
    }

    /// A file as it lies on a member's disk.
    fn plain(&self, node: usize, path: &str) -> PathBuf {
        Path::new(&self.files(node)).join("slots/000/0000000000000001").join(path)
    }

    #[track_caller]
    fn assert_same_on_all(&self) {
        self.wait_until_whole();
        for node in 1..3 {
            let slots = |node| Path::new(&self.files(node)).join("slots");
            assert_same_contents(&slots(0), &slots(node));
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        for at in &self.mounts {
            let _ = run(atoll().arg("unmount").arg(at));
        }
    }
}

/// The text that a [`Writer`] puts into each of its files.
fn contents_of(file: usize) -> String {
    format!("this is file {file}\n").repeat(1 + file % 400)
}

/// The state that a [`Writer`] shares with the test: how far it is, and when it is to end.
#[derive(Default)]
struct Written {
    /// Files 0 to this one, without it, were written and synced.
    files: AtomicUsize,
    /// How long one took at most, since that was asked.
    longest: Mutex<Duration>,
    is_to_end: AtomicBool,
}

/// A program that writes files, syncs and reads them in a new directory, and takes no error.
struct Writer {
    at: PathBuf,
    written: Arc<Written>,
    thread: JoinHandle<()>,
}

impl Writer {
    fn begin(at: PathBuf) -> Writer {
        let written = Arc::new(Written::default());
        let thread = {
            let (at, written) = (at.clone(), written.clone());
            std::thread::spawn(move || {
                fs::create_dir(&at).expect("made");
                let mut log = fs::File::options()
                    .append(true)
                    .create(true)
                    .open(at.join("log"))
                    .expect("a file to append to");
                for file in 0.. {
                    if written.is_to_end.load(Ordering::Acquire) {
                        return;
                    }
                    let began = Instant::now();
                    write_one(&at, &mut log, file);
                    written.files.store(file + 1, Ordering::Release);
                    let mut longest = written.longest.lock().expect("nobody panics with it");
                    *longest = began.elapsed().max(*longest);
                }
            })
        };
        Writer { at, written, thread }
    }

    /// Waits until it has written so many more files.
    #[track_caller]
    fn goes_on_for(&self, files: usize) {
        let upto = self.written.files.load(Ordering::Acquire) + files;
        until("it goes on", || {
            assert!(!self.thread.is_finished(), "it has failed");
            self.written.files.load(Ordering::Acquire) >= upto
        });
    }

    /// How long a file took at most, since that was asked.
    fn longest(&self) -> Duration {
        std::mem::take(&mut *self.written.longest.lock().expect("nobody panics with it"))
    }

    /// Ends it; how many files it has written.
    #[track_caller]
    fn end(self) -> usize {
        self.written.is_to_end.store(true, Ordering::Release);
        self.thread.join().expect("it has met no error");
        self.written.files.load(Ordering::Acquire)
    }
}

/// Writes a file and a line of the log, moves every seventh file to where it belongs, and reads one that is older.
fn write_one(at: &Path, log: &mut fs::File, file: usize) {
    let path = at.join(file.to_string());
    let first = if file.is_multiple_of(7) { at.join("new") } else { path.clone() };
    let mut out = fs::File::create_new(&first).unwrap_or_else(|error| panic!("{file}: {error}"));
    out.write_all(contents_of(file).as_bytes()).expect("written");
    out.sync_all().expect("synced");
    drop(out);
    if first != path {
        fs::rename(&first, &path).expect("moved");
    }
    writeln!(log, "{file}").expect("appended");
    log.sync_all().expect("synced");
    let older = file * 5 / 8;
    let read = fs::read_to_string(at.join(older.to_string()));
    assert!(
        read.expect("read") == contents_of(older),
        "file {older}, read when {file} was written"
    );
}

/// That a directory holds what a [`Writer`] has written, each file and each line once.
#[track_caller]
fn assert_written(at: &Path, files: usize) {
    for file in 0..files {
        let read = fs::read_to_string(at.join(file.to_string()));
        let read = read.unwrap_or_else(|error| panic!("{}, {file}: {error}", at.display()));
        assert!(read == contents_of(file), "{}, {file}: {} bytes", at.display(), read.len());
    }
    let lines: String = (0..files).map(|file| format!("{file}\n")).collect();
    assert_eq!(fs::read_to_string(at.join("log")).expect("the log"), lines);
    assert_eq!(fs::read_dir(at).expect("a directory").count(), files + 1);
}

/// Past the test harness, which would keep it to itself.
fn tell(what: &str, writers: &[Writer]) {
    for writer in writers {
        let longest = writer.longest();
        let at = writer.at.display();
        let _ = writeln!(std::io::stderr(), "\n{what}: {at} stood still for {longest:?}");
    }
}

#[test]
fn a_pool_of_three_has_every_file_on_each_and_goes_on_after_each_dies() {
    let test = "a_pool_of_three_has_every_file_on_each_and_goes_on_after_each_dies";
    let Some(mut team) = Team::new(test) else { return };
    let (here, there) = (team.mount(0), team.mount(1));
    make_tree(&here.join("tree"));
    fs::create_dir(there.join("anna")).expect("made from another machine");
    fs::write(there.join("anna/file"), "text").expect("written");
    until("a machine sees what another has written", || {
        fs::read_to_string(here.join("anna/file")).is_ok_and(|text| text == "text")
    });
    for node in 0..3 {
        let plain = fs::read_to_string(team.plain(node, "anna/file"));
        assert_eq!(plain.expect("a plain file"), "text", "on node {node}");
    }
    team.assert_same_on_all();
    // One dies, on which nothing is mounted: all goes on, also the files that it was the primary for.
    team.ring.nodes[2].kill();
    assert_eq!(fs::read_to_string(here.join("anna/file")).expect("it is read"), "text");
    fs::write(here.join("anna/late"), "late").expect("written without it");
    let primary = team.wait_for_primary(&[0, 1]);
    until("the status says who is away", || {
        let told = team.pool(primary, &["status"]).ok().stdout;
        told.contains("is away") && told.contains("this node is the primary")
    });
    let all = team.ring.nodes[primary].atoll(["status"]).ok();
    assert!(all.stdout.contains("2 of 3 members take part"), "{all:?}");
    team.ring.nodes[2].restart();
    team.assert_same_on_all();
    let plain = fs::read_to_string(team.plain(2, "anna/late"));
    assert_eq!(plain.expect("it was brought up to date"), "late");
    // The primary's machine is started again at once.
    let primary = team.wait_until_all_take_part();
    team.ring.nodes[primary].kill();
    team.ring.nodes[primary].restart();
    fs::rename(there.join("anna"), there.join("tree/anna")).expect("moved");
    until("a machine sees what another has moved", || {
        fs::read_to_string(here.join("tree/anna/late")).is_ok_and(|text| text == "late")
    });
    team.assert_same_on_all();
    let primary = team.wait_until_all_take_part();
    let other = (primary + 1) % 3;
    let told = team.pool(other, &["status"]).ok().stdout;
    let name = team.state_at(primary)["primary"].as_str().expect("a name").to_owned();
    assert!(told.contains("3 machines, a copy on each; epoch "), "{told}");
    assert!(told.contains(&format!("the primary is {name}")), "{told}");
    let all = team.ring.nodes[other].atoll(["status"]).ok().stdout;
    assert!(all.contains("pool team"), "{all}");
    // One member leaves, and has plain files.
    team.pool(2, &["leave", "team", "--yes"]).ok();
    let left = Path::new(&team.files(2)).join("tree/anna/late");
    assert_eq!(fs::read_to_string(left).expect("a plain file"), "late");
}

#[test]
fn programs_meet_no_error_when_the_primary_or_a_backup_is_killed() {
    let test = "programs_meet_no_error_when_the_primary_or_a_backup_is_killed";
    let Some(mut team) = Team::new(test) else { return };
    let killed = team.wait_until_all_take_part();
    let others: Vec<usize> = (0..3).filter(|node| *node != killed).collect();
    let mounts = [team.mount(others[0]), team.mount(others[1])];
    let writers = [mounts[0].join("one"), mounts[1].join("another")].map(Writer::begin);
    writers.iter().for_each(|writer| writer.goes_on_for(20));
    tell("before anything", &writers);
    // The primary is killed: another member takes its place.
    team.ring.nodes[killed].kill();
    team.wait_for_primary(&others);
    writers.iter().for_each(|writer| writer.goes_on_for(20));
    tell("when the primary was killed", &writers);
    team.ring.nodes[killed].restart();
    let primary = team.wait_until_all_take_part();
    writers.iter().for_each(|writer| writer.goes_on_for(20));
    tell("when it came back", &writers);
    // It is killed again, now a backup (unless the machine is so busy that another one stood still).
    team.ring.nodes[killed].kill();
    writers.iter().for_each(|writer| writer.goes_on_for(20));
    let what = if killed == primary { "the primary" } else { "a backup" };
    tell(&format!("when {what} was killed"), &writers);
    team.ring.nodes[killed].restart();
    team.wait_until_all_take_part();
    let written = writers.map(|writer| (writer.at.clone(), writer.end()));
    for (at, files) in &written {
        assert_written(at, *files);
    }
    team.assert_same_on_all();
    for node in 0..3 {
        for (at, files) in &written {
            let name = at.file_name().expect("a name").to_str().expect("a text");
            assert_written(&team.plain(node, name), *files);
        }
    }
}

#[test]
fn a_primary_that_stood_still_gives_no_stale_answers() {
    let test = "a_primary_that_stood_still_gives_no_stale_answers";
    let Some(mut team) = Team::new(test) else { return };
    let frozen = team.wait_until_all_take_part();
    let others: Vec<usize> = (0..3).filter(|node| *node != frozen).collect();
    let (there, here) = (team.mount(others[0]), team.mount(frozen));
    let writer = Writer::begin(there.join("new"));
    writer.goes_on_for(5);
    // The mount beside the primary reads each file that it finds written: it has never asked for its name before, so
    // nothing but the primary can answer.
    let reader = {
        let (written, at) = (writer.written.clone(), here.join("new"));
        std::thread::spawn(move || {
            let mut read = 0;
            while !written.is_to_end.load(Ordering::Acquire) {
                let newest = written.files.load(Ordering::Acquire);
                if newest == read {
                    std::thread::sleep(Duration::from_millis(1));
                    continue;
                }
                read = newest;
                assert_holds(
                    &at.join((newest - 1).to_string()),
                    contents_of(newest - 1).as_bytes(),
                );
            }
        })
    };
    for round in 0..2 {
        // The second one stands still as a backup: the primary goes on without it.
        writer.goes_on_for(10);
        team.ring.nodes[frozen].freeze();
        team.wait_for_primary(&others);
        writer.goes_on_for(10);
        team.ring.nodes[frozen].signal("CONT");
        writer.goes_on_for(10);
        assert!(!reader.is_finished(), "round {round}: the reader has failed");
        team.wait_until_all_take_part();
        tell("when a member stood still", std::slice::from_ref(&writer));
    }
    let (at, files) = (writer.at.clone(), writer.end());
    reader.join().expect("it has met no error, and nothing that was stale");
    assert_written(&at, files);
    team.assert_same_on_all();
}

/// Through any node of three; what is there already is passed over, also by way of another node.
#[test]
fn a_tree_is_imported_into_a_pool_of_three_and_is_on_each() {
    let test = "a_tree_is_imported_into_a_pool_of_three_and_is_on_each";
    let Some(mut team) = Team::new(test) else { return };
    let at = team.mount(1);
    let tree = team.ring.path("tree");
    make_tree(&tree);
    fs::hard_link(tree.join("run.sh"), tree.join("docs/run")).expect("linked");
    fs::create_dir(at.join("into")).expect("made");
    let source = tree.to_str().expect("a text");
    let said = team.pool(0, &["import", "team", source, "--into", "into"]).ok();
    assert!(said.stderr.contains("by copying: other machines belong to the pool"), "{said:?}");
    assert_same_below(&tree, &at.join("into"));
    let said = team.pool(2, &["import", "team", source, "--into", "/into", "--json"]).ok().json();
    assert_eq!((&said["files"], &said["bytes"]), (&0.into(), &0.into()), "{said}");
    // A mount of the pool is no tree to take.
    let mounted = at.to_str().expect("a text");
    team.pool(1, &["import", "team", mounted, "--into", "into"])
        .failed(2, &["where this pool is mounted"]);
    team.assert_same_on_all();
}

/// Takes a lock on a file in one of the two ways.
fn lock_by(file: &fs::File, by_process: bool, operation: FlockOperation) -> rustix::io::Result<()> {
    match by_process {
        true => rustix::fs::fcntl_lock(file, operation),
        false => rustix::fs::flock(file, operation),
    }
}

/// Counts in a file under a lock, so many times; another file has as many lines then, which are appended under the same lock.
fn count_under_lock(at: &Path, by_process: bool, times: usize) {
    let open = |name: &str| {
        fs::File::options().read(true).write(true).open(at.join(name)).expect("it is opened")
    };
    let (counter, list) = (open("counter"), open("list"));
    for _ in 0..times {
        lock_by(&counter, by_process, FlockOperation::LockExclusive).expect("locked");
        let mut text = [0; 8];
        let read = counter.read_at(&mut text, 0).expect("read");
        let before = if read < 8 { 0 } else { u64::from_be_bytes(text) };
        // Both are open all the time: the kernel has pages of them.
        assert_eq!(list.metadata().expect("its length").len(), before * 8, "as counted");
        if before > 0 {
            let mut last = [0; 8];
            list.read_exact_at(&mut last, (before - 1) * 8).expect("read");
            assert_eq!(u64::from_be_bytes(last), before);
        }
        list.write_all_at(&(before + 1).to_be_bytes(), before * 8).expect("written");
        counter.write_all_at(&(before + 1).to_be_bytes(), 0).expect("written");
        lock_by(&counter, by_process, FlockOperation::Unlock).expect("unlocked");
    }
}

fn counted(at: &Path) -> u64 {
    let text = fs::read(at.join("counter")).expect("read");
    u64::from_be_bytes(text[..].try_into().expect("8 bytes"))
}

#[test]
fn programs_of_two_machines_lock_each_other_out_also_when_the_primary_dies() {
    let test = "programs_of_two_machines_lock_each_other_out_also_when_the_primary_dies";
    let Some(mut team) = Team::new(test) else { return };
    let primary = team.wait_until_all_take_part();
    let others: Vec<usize> = (0..3).filter(|node| *node != primary).collect();
    let mounts = [team.mount(others[0]), team.mount(others[1])];
    for name in ["counter", "list"] {
        fs::File::create(mounts[0].join(name)).expect("made");
    }
    until("the other machine sees it", || mounts[1].join("list").exists());
    // A lock of one machine is seen on the other, and so is that the program has ended.
    let open =
        |at: &PathBuf| fs::File::options().write(true).open(at.join("counter")).expect("open");
    let (here, there) = (open(&mounts[0]), open(&mounts[1]));
    for by_process in [false, true] {
        let refused = |file: &fs::File| {
            let taken = lock_by(file, by_process, FlockOperation::NonBlockingLockExclusive);
            matches!(taken, Err(rustix::io::Errno::AGAIN | rustix::io::Errno::ACCESS))
        };
        lock_by(&here, by_process, FlockOperation::LockExclusive).expect("locked");
        assert!(refused(&there));
        lock_by(&here, by_process, FlockOperation::Unlock).expect("unlocked");
        assert!(!refused(&there));
        lock_by(&there, by_process, FlockOperation::Unlock).expect("unlocked");
    }
    rustix::fs::flock(&here, FlockOperation::LockExclusive).expect("locked");
    let told = team.pool(primary, &["status"]).ok().stdout;
    assert!(told.contains("1 lock on files, of "), "{told}");
    drop((here, there));
    let mut sum = 0;
    for (by_process, is_killed) in [(false, false), (true, false), (false, true)] {
        let times = if is_killed { 150 } else { 60 };
        let began = Instant::now();
        let counting = mounts
            .clone()
            .map(|at| std::thread::spawn(move || count_under_lock(&at, by_process, times)));
        if is_killed {
            std::thread::sleep(Duration::from_millis(300));
            team.ring.nodes[primary].kill();
        }
        for one in counting {
            one.join().expect("it has met no error");
        }
        sum += 2 * times as u64;
        let took = began.elapsed();
        let _ = writeln!(std::io::stderr(), "\n{} locks in {took:?}", 2 * times);
        for at in &mounts {
            assert_eq!(counted(at), sum, "{}", at.display());
        }
    }
    team.ring.nodes[primary].restart();
    team.assert_same_on_all();
    // A file that another machine has put in another's place is what is opened, whatever was seen of its name before.
    for round in 0..20 {
        let text = format!("round {round}");
        fs::write(mounts[0].join("new"), &text).expect("written");
        let _ = fs::read(mounts[1].join("replaced"));
        fs::rename(mounts[0].join("new"), mounts[0].join("replaced")).expect("moved");
        assert_holds(&mounts[1].join("replaced"), text.as_bytes());
    }
    databases(&mounts);
}

/// SQLite on both machines at a time.
fn databases(mounts: &[PathBuf; 2]) {
    let sqlite = |at: &Path, sql: &str| {
        let mut command = std::process::Command::new("sqlite3");
        command.args(["-cmd", ".timeout 120000"]).arg(at.join("database")).arg(sql);
        command.output()
    };
    let made = match sqlite(&mounts[0], "create table t (at integer, number integer)") {
        Ok(made) => made,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "\nSKIPPED the part with SQLite: {error}");
            return;
        }
    };
    assert!(made.status.success(), "{made:?}");
    let inserting = [0, 1].map(|at| {
        let mount = mounts[at].clone();
        std::thread::spawn(move || {
            for number in 0..30 {
                let insert = format!("insert into t values ({at}, {number})");
                let done = sqlite(&mount, &insert).expect("it runs");
                assert!(done.status.success(), "{insert}: {done:?}");
            }
        })
    });
    for one in inserting {
        one.join().expect("it has met no error");
    }
    for at in mounts {
        let sql =
            "select count(*), count(distinct at * 100 + number) from t; pragma integrity_check";
        let told = sqlite(at, sql).expect("it runs");
        assert_eq!(String::from_utf8_lossy(&told.stdout), "60|60\nok\n", "{told:?}");
    }
}

#[test]
fn codes_that_are_none_and_nodes_that_are_strangers_are_refused() {
    let test = "codes_that_are_none_and_nodes_that_are_strangers_are_refused";
    if !rustix::process::geteuid().is_root() {
        let _ = writeln!(std::io::stderr(), "\nSKIPPED {test}: a pool needs root");
        return;
    }
    let team = Team { ring: Ring::of(3), mounts: Vec::new() };
    let files = |node| team.files(node);
    team.pool(0, &["create", "team", &files(0), "--level", "17"])
        .failed(2, &["a distribution level is at most 16"]);
    team.pool(0, &["create", "team", &files(0), "--copies", "6"]).failed(2, &["6 is not in 1..=5"]);
    team.pool(0, &["create", "team", &files(0), "--copies", "2", "--min-copies", "3"])
        .failed(2, &["changes cannot need 3 copies where files have 2"]);
    assert!(!Path::new(&files(0)).exists(), "a directory that was made for nothing is gone");
    team.pool(0, &["invite", "team"]).failed(4, &["no pool team"]);
    team.pool(0, &["create", "team", &files(0)]).ok();
    team.pool(0, &["remove", "team", "abcdef"]).failed(2, &["a pool of one machine"]);
    let code = team.pool(0, &["invite", "team"]).ok().stdout;
    let code = code.trim();
    team.pool(1, &["join", &code[..code.len() - 1], "team", &files(1)])
        .failed(2, &["the code: ", "some are missing"]);
    team.pool(1, &["join", "atoll:abc", "team", &files(1)]).failed(2, &["atoll-pool:"]);
    fs::create_dir(files(1)).expect("made");
    fs::write(Path::new(&files(1)).join("full"), "x").expect("written");
    team.pool(1, &["join", code, "team", &files(1)]).failed(2, &["it is not empty: it holds full"]);
    fs::remove_file(Path::new(&files(1)).join("full")).expect("removed");
    team.pool(1, &["join", code, "team", &files(1)]).ok();
    team.pool(1, &["join", code, "team", &files(2)]).failed(2, &["this node has a pool team"]);
    until("the pool has its two members", || {
        let stands = team.primary_of(&[0, 1]);
        let states = stands.and_then(|(_, state)| state["states"].as_array().cloned());
        states.is_some_and(|all| all.len() == 2 && all.iter().all(|one| one["is_member"] == true))
    });
    let primary = team.wait_for_primary(&[0, 1]);
    for warned in [team.pool(primary, &["status"]), team.ring.nodes[1].atoll(["status"])] {
        assert!(warned.stdout.contains("it stops while"), "{warned:?}");
    }
    // Node 1 has lost its directory and does not vote: the pool gives it all files again.
    team.pool(1, &["forget", "team"]).ok();
    team.pool(1, &["join", code, "team", &files(2)]).ok();
    team.wait_until_these_take_part(&[0, 1]);
    assert!(team.pool(0, &["check", "team"]).ok().stdout.contains("in each of 2 copies"));
    team.pool(0, &["remove", "team", "ffffffffffff"]).failed(4, &["it has no machine"]);
    team.pool(0, &["drain", "team", "ffffffffffff"]).failed(4, &["it has no machine"]);
    team.pool(0, &["drain", "tean"]).failed(4, &["no pool tean"]);
    team.pool(0, &["copies", "team", "0"]).failed(2, &["0 is not in 1..=5"]);
    team.pool(2, &["leave", "team", "--yes"]).failed(4, &["no pool team"]);
}

/// Two machines stop when the one that votes dies, but not with a third one without files, which votes, too.
#[test]
fn a_pool_of_two_with_a_witness_goes_on_after_each_dies() {
    let test = "a_pool_of_two_with_a_witness_goes_on_after_each_dies";
    if !rustix::process::geteuid().is_root() || !can_mount(test) {
        let _ = writeln!(std::io::stderr(), "\nSKIPPED {test}: it needs root and FUSE");
        return;
    }
    let mut team = Team { ring: Ring::of(3), mounts: Vec::new() };
    team.pool(0, &["create", "team", &team.files(0)]).ok();
    let code = team.pool(0, &["invite", "team"]).ok().stdout.trim().to_owned();
    team.pool(1, &["join", &code, "team", &team.files(1)]).ok();
    team.wait_until_these_take_part(&[0, 1]);
    let told = team.pool(0, &["status"]).ok().stdout;
    assert!(told.contains("it stops while") && told.contains("as a witness"), "{told}");
    let joined = team.pool(2, &["join", &code, "team"]).ok().stderr;
    assert!(joined.contains("2 machines with files, and this one without"), "{joined}");
    let votes = |team: &Team| {
        let here = team.pool_at(2)["witnesses"][0].clone();
        here["is_here"] == true && here["votes"] == true && here["problem"].is_null()
    };
    until("the third machine votes", || votes(&team));
    until("two may do without each other", || {
        let primary = team.wait_for_primary(&[0, 1]);
        let told = team.pool(primary, &["status"]).ok().stdout;
        told.contains("has no files, and votes as a witness") && !told.contains("it stops while")
    });
    let told = team.pool(2, &["status"]).ok().stdout;
    assert!(told.contains("(this machine) has no files, and votes"), "{told}");
    team.pool(2, &["join", &code, "again"]).failed(2, &["this node has that pool"]);
    let at = team.mount(2);
    let writer = Writer::begin(at.join("work"));
    writer.goes_on_for(10);
    for node in [0, 1, 0] {
        team.ring.nodes[node].kill();
        writer.goes_on_for(10);
        team.ring.nodes[node].restart();
        team.wait_until_these_take_part(&[0, 1]);
    }
    // And the witness: two machines do not wait for it, and it votes again when it is back.
    let (here, files) = (writer.at.clone(), writer.end());
    assert_written(&here, files);
    let there = team.mount(0);
    team.ring.nodes[2].kill();
    fs::write(there.join("without"), "text").expect("written without the witness");
    let primary = team.wait_for_primary(&[0, 1]);
    until("the primary says that it is away", || {
        team.pool(primary, &["status"]).ok().stdout.contains("votes as a witness; it is away")
    });
    team.ring.nodes[2].restart();
    until("it votes again", || votes(&team));
    team.ring.nodes[1].kill();
    fs::write(there.join("alone"), "text").expect("written by one");
    team.ring.nodes[1].restart();
    team.wait_until_these_take_part(&[0, 1]);
    assert_eq!(fs::read_to_string(at.join("alone")).expect("it is read"), "text");
    // From now on no change is acknowledged that one machine alone has.
    team.pool(0, &["copies", "team", "--min-copies", "4"]).failed(1, &["no more than files are"]);
    let said = team.pool(2, &["copies", "team", "--min-copies", "2"]).ok().stderr;
    assert!(said.contains("while at least 2 machines have everything"), "{said}");
    until("another node knows it, too", || {
        let told = team.pool(0, &["status"]).ok().stdout;
        told.contains("changes need 2 machines that have everything")
    });
    team.ring.nodes[1].kill();
    until("changes are refused", || {
        let made = fs::write(there.join("refused"), "text");
        made.is_err_and(|error| error.kind() == std::io::ErrorKind::ReadOnlyFilesystem)
    });
    assert_eq!(fs::read_to_string(there.join("alone")).expect("it is read"), "text");
    until("the primary says so", || {
        let told = team.pool(0, &["status"]).ok().stdout;
        told.contains("it refuses changes: 1 of the 2 copies")
    });
    team.ring.nodes[1].restart();
    team.wait_until_these_take_part(&[0, 1]);
    until("changes are taken", || fs::write(there.join("taken"), "text").is_ok());
    assert_eq!(team.pool_at(0)["min_copies"], 2);
    // Only what is made later obeys another level.
    let said = team.pool(1, &["level", "team", "3"]).ok().stderr;
    assert!(said.contains("from now on are distributed down to level 3"), "{said}");
    until("the status says so", || {
        let told = team.pool(0, &["status"]).ok().stdout;
        told.contains("distribution level 3 for new directories, it was 1")
    });
    team.pool(0, &["level", "team", "17"]).failed(2, &["17 is not in 0..=16"]);
    // Only the node's own directory has something of it.
    assert!(!Path::new(&team.files(2)).exists());
    run(atoll().arg("unmount").arg(&at)).ok();
    let left = team.pool(2, &["leave", "team"]).ok().stderr;
    assert!(left.contains("had no files"), "{left}");
    until("the one that votes is needed", || {
        let primary = team.wait_for_primary(&[0, 1]);
        team.pool(primary, &["status"]).ok().stdout.contains("it stops while")
    });
    team.pool(2, &["status", "--json"]).ok();
    assert!(team.pool(2, &["status"]).ok().stderr.contains("this node has no pool"));
}

/// A pool with files, of one machine, becomes one of four; members go, the one that made it and the primary too.
#[test]
fn machines_come_and_go_while_a_program_works() {
    let test = "machines_come_and_go_while_a_program_works";
    if !rustix::process::geteuid().is_root() || !can_mount(test) {
        let _ = writeln!(std::io::stderr(), "\nSKIPPED {test}: it needs root and FUSE");
        return;
    }
    let mut team = Team { ring: Ring::of(4), mounts: Vec::new() };
    team.pool(0, &["create", "team", &team.files(0)]).ok();
    let at = team.mount(0);
    make_tree(&at.join("tree"));
    run(atoll().arg("unmount").arg(&at)).ok();
    let code = team.pool(0, &["invite", "team"]).ok().stdout;
    team.pool(1, &["join", code.trim(), "team", &team.files(1)]).ok();
    let at = team.mount(1);
    let writer = Writer::begin(at.join("work"));
    writer.goes_on_for(10);
    // Any member lets others in.
    let code = team.pool(1, &["invite", "team"]).ok().stdout;
    for node in [2, 3] {
        team.pool(node, &["join", code.trim(), "team", &team.files(node)]).ok();
        writer.goes_on_for(10);
    }
    // The fourth has begun a group of its own, with two of the others.
    team.wait_until_settled(&[0, 1, 2, 3], 2, 3);
    let told = team.pool(0, &["leave", "team", "--yes"]).ok().stderr;
    assert!(told.contains("others take the place of this machine"), "{told}");
    assert_same_contents(&at.join("tree"), &Path::new(&team.files(0)).join("tree"));
    assert!(!Path::new(&team.files(0)).join("groups").exists());
    team.wait_until_settled(&[1, 2, 3], 2, 3);
    writer.goes_on_for(10);
    // One that does not come back.
    team.ring.nodes[3].kill();
    writer.goes_on_for(10);
    let primary = team.wait_for_primary(&[1, 2]);
    let mut away = None;
    until("the primary says who is away", || {
        let states = team.state_at(primary)["states"].as_array().cloned().unwrap_or_default();
        let found = states.into_iter().find(|one| !one["problem"].is_null());
        away = found.and_then(|one| one["node"].as_str().map(str::to_owned));
        away.is_some()
    });
    let away = away.expect("it was found");
    team.pool(1, &["remove", "team", away.split('@').next().expect("a key")]).ok();
    team.wait_until_settled(&[1, 2], 2, 2);
    writer.goes_on_for(10);
    let (at, files) = (writer.at.clone(), writer.end());
    assert_written(&at, files);
    assert_same_contents(
        &at.parent().expect("the mount").join("tree"),
        &Path::new(&team.files(0)).join("tree"),
    );
}

/// The texts of all files below a directory that begin with `file`, once for each file.
fn texts_below(dir: &Path) -> BTreeMap<u64, String> {
    let mut texts = BTreeMap::new();
    for entry in fs::read_dir(dir).expect("a directory") {
        let path = entry.expect("an entry").path();
        let stat = path.symlink_metadata().expect("a file");
        if stat.is_dir() {
            texts.extend(texts_below(&path));
        } else if stat.is_file() {
            let text = String::from_utf8_lossy(&fs::read(&path).expect("read")).into_owned();
            texts.extend(text.starts_with("file ").then_some((stat.ino(), text)));
        }
    }
    texts
}

/// With one copy each machine has files of its own, and the pool has the room of all.
#[test]
fn directories_are_spread_over_machines_and_go_where_others_are() {
    let test = "directories_are_spread_over_machines_and_go_where_others_are";
    if !rustix::process::geteuid().is_root() || !can_mount(test) {
        let _ = writeln!(std::io::stderr(), "\nSKIPPED {test}: it needs root and FUSE");
        return;
    }
    let mut team = Team { ring: Ring::of(3), mounts: Vec::new() };
    team.pool(0, &["create", "team", &team.files(0), "--copies", "1"]).ok();
    let code = team.pool(0, &["invite", "team"]).ok().stdout;
    for node in [1, 2] {
        team.pool(node, &["join", code.trim(), "team", &team.files(node)]).ok();
    }
    team.wait_until_settled(&[0, 1, 2], 3, 1);
    let told = team.pool(1, &["status"]).ok().stdout;
    assert!(told.contains("3 machines in 3 groups, each file on 1 of them"), "{told}");
    let (here, there) = (team.mount(0), team.mount(2));
    for number in 0..12 {
        let dir = here.join(format!("dir-{number}"));
        fs::create_dir(&dir).expect("made");
        fs::write(dir.join("file"), format!("file {number}")).expect("written");
    }
    // A name in another machine's directory, and a file that moves there.
    fs::hard_link(here.join("dir-0/file"), here.join("dir-1/other")).expect("linked");
    for number in 2..12 {
        let to = here.join(format!("dir-{}/moved", (number + 1) % 12));
        fs::rename(here.join(format!("dir-{number}/file")), to).expect("moved");
    }
    until("the other machine sees it", || there.join("dir-0/moved").exists());
    let text = |path: &str| fs::read_to_string(there.join(path)).expect(path);
    assert_eq!((text("dir-1/other"), text("dir-0/moved")), ("file 0".into(), "file 11".into()));
    let files = |node: usize| texts_below(Path::new(&team.files(node))).len();
    let counts = [files(0), files(1), files(2)];
    assert_eq!(counts.iter().sum::<usize>(), 12, "{counts:?}");
    assert!(counts.iter().filter(|count| **count > 0).count() >= 2, "{counts:?}");
    // The only copies do not go, but are moved before.
    let key = team.pool_at(0)["machines"].as_array().cloned().unwrap_or_default();
    let gone = key.iter().find(|one| one["is_here"] == true).expect("this one")["key"]
        .as_str()
        .expect("a text")
        .to_owned();
    team.pool(1, &["remove", "team", &gone]).failed(1, &["no other member has everything"]);
    // A mount on a machine that goes is of no use afterwards.
    run(atoll().arg("unmount").arg(&here)).ok();
    team.pool(0, &["drain", "team"]).ok();
    team.wait_until_settled(&[1, 2], 3, 1);
    for number in 2..12 {
        assert_eq!(text(&format!("dir-{}/moved", (number + 1) % 12)), format!("file {number}"));
    }
    team.pool(1, &["copies", "team", "2"]).ok();
    team.wait_until_settled(&[1, 2], 3, 2);
    // One that leaves has a plain tree of what it had.
    team.pool(1, &["leave", "team", "--yes"]).ok();
    let left = PathBuf::from(team.files(1));
    assert!(!left.join(".atoll").exists() && !left.join("groups").exists());
    assert_eq!(texts_below(&left).len(), 12, "it had a copy of each");
    team.wait_until_settled(&[2], 3, 1);
    assert_eq!(text("dir-1/other"), "file 0");
}

/// A scrub undoes what somebody has done to a member's plain files and sets it aside; `adopt` gives it to the pool.
#[test]
fn a_file_that_was_changed_by_hand_is_healed_set_aside_and_adopted() {
    let Some(mut team) = Team::new("a_file_that_was_changed_by_hand") else { return };
    let mount = team.mount(2);
    for name in ["notes", "other"] {
        let file = fs::File::create(mount.join(name)).expect("a file");
        file.write_all_at(b"as the pool has it\n", 0).expect("written");
        file.sync_all().expect("synced");
    }
    team.wait_until_whole();
    assert!(team.pool(0, &["check", "team"]).ok().stdout.contains("all copies are the same"));
    fs::write(team.plain(1, "notes"), "by hand\n").expect("written");
    fs::remove_file(team.plain(0, "other")).expect("removed");
    fs::write(team.plain(0, "strange"), "put there\n").expect("written");
    let said = team.pool(2, &["check", "team", "--json"]).ok().json();
    let found = &said["groups"][0];
    assert_eq!(found["healed"], 1, "{said}");
    assert_eq!((&found["restored"], &found["unhealed"]), (&1.into(), &0.into()), "{said}");
    team.assert_same_on_all();
    let read = |name: &str| fs::read_to_string(mount.join(name)).expect("it is read");
    assert_eq!((read("notes"), read("other")), ("as the pool has it\n".into(), read("notes")));
    let listed = |node: usize| -> Vec<String> {
        let said = team.pool(node, &["adopt", "team", "--json"]).ok();
        let path = |line: serde_json::Value| line["path"].as_str().map(str::to_owned);
        said.json_lines().into_iter().filter_map(path).collect()
    };
    assert_eq!((listed(0), listed(1)), (vec!["strange".to_owned()], vec!["notes".to_owned()]));
    assert_eq!(listed(2), [""; 0]);
    for file in ["nothing", "../notes", "/"] {
        let said = team.pool(1, &["adopt", "team", file]);
        assert!(matches!(said.code, Some(2 | 4)), "{file}: {said:?}");
    }
    team.pool(1, &["adopt", "team", "notes"]).ok();
    team.pool(0, &["adopt", "team", "strange", "--to", "/known"]).ok();
    assert_eq!((listed(0), listed(1)), (Vec::new(), Vec::new()));
    until("the mount shows what was adopted", || read("notes") == "by hand\n");
    assert_eq!(read("known"), "put there\n");
    team.assert_same_on_all();
}

/// A limit that is set while programs work holds for them at once, on all mounts, and after the primary was killed.
#[test]
fn a_limit_holds_for_all_mounts_also_when_the_primary_dies() {
    let Some(mut team) = Team::new("a_limit_holds_for_all_mounts") else { return };
    let mounts = [team.mount(1), team.mount(2)];
    fs::create_dir(mounts[0].join("atlas")).expect("made");
    fs::write(mounts[0].join("atlas/first"), vec![1; 100 << 10]).expect("written");
    let limit = ["quota", "team", "--directory", "/atlas", "--size", "512KiB", "--files", "100"];
    team.pool(1, &limit).ok();
    let shown = || -> serde_json::Value {
        let said = team.pool(2, &["quota", "team", "--json"]).ok();
        said.json_lines().into_iter().next().expect("a limit")
    };
    until("all files are counted", || shown()["is_counted"] == true);
    assert_eq!(
        (&shown()["directory"], &shown()["used_bytes"]),
        (&"/atlas".into(), &(104 << 10).into())
    );
    let write = |mount: &Path, name: &str, kib: usize| {
        fs::write(mount.join("atlas").join(name), vec![2; kib << 10])
    };
    write(&mounts[1], "second", 200).expect("there is room");
    let is_refused = |written: std::io::Result<()>| {
        let refused = written.expect_err("there is no room for that");
        refused.raw_os_error() == Some(rustix::io::Errno::DQUOT.raw_os_error())
    };
    assert!(is_refused(write(&mounts[0], "third", 300)));
    fs::remove_file(mounts[0].join("atlas/third")).expect("removed");
    until("what is used was told to all", || shown()["used_bytes"] == 304 << 10);
    std::thread::sleep(std::time::Duration::from_secs(6));
    let primary = team.wait_for_primary(&[0, 1, 2]);
    team.ring.nodes[primary].kill();
    let other = &mounts[usize::from(primary == 1)];
    assert!(is_refused(write(other, "fourth", 300)));
    fs::remove_file(other.join("atlas/fourth")).expect("removed");
    write(other, "fifth", 200).expect("there is room");
    let room = rustix::fs::statvfs(other.join("atlas")).expect("its room");
    assert_eq!(room.f_blocks * room.f_frsize, 512 << 10);
    assert_eq!(room.f_bavail * room.f_frsize, 8 << 10);
    team.ring.nodes[primary].restart();
    team.wait_until_whole();
    team.assert_same_on_all();
}

/// Two of three machines are lost for good: the third one's copy is what the pool has, when people say so.
#[test]
fn the_last_copy_is_made_the_pool_when_the_others_are_lost() {
    let Some(mut team) = Team::new("the_last_copy_is_made_the_pool") else { return };
    let mount = team.mount(2);
    let write = |name: &str, text: &str| {
        let file = fs::File::create(mount.join(name)).expect("a file");
        file.write_all_at(text.as_bytes(), 0).expect("written");
        file.sync_all().expect("synced");
    };
    write("notes", "as it was\n");
    team.wait_until_whole();
    let said = team.pool(2, &["revive", "team", "--yes"]).ok();
    assert!(said.stderr.contains("nothing is to be done"), "{said:?}");
    for node in [0, 1] {
        team.ring.nodes[node].kill();
    }
    let said = team.pool(2, &["revive", "team", "--list", "--json"]).ok();
    let listed = said.json_lines().into_iter().next().expect("it has no primary");
    assert_eq!(
        (&listed["group"], &listed["is_incomplete"]),
        (&0.into(), &false.into()),
        "{listed}"
    );
    assert_eq!(listed["members"].as_array().map(Vec::len), Some(3), "{listed}");
    team.pool(2, &["revive", "team", "--yes"]).ok();
    until("its copy is served", || team.primary_of(&[2]).is_some());
    until("the mount goes on", || fs::read_to_string(mount.join("notes")).is_ok());
    assert_eq!(fs::read_to_string(mount.join("notes")).expect("read"), "as it was\n");
    write("after", "more\n");
    // The others come back after all, and are given what it has.
    for node in [0, 1] {
        team.ring.nodes[node].restart();
    }
    team.wait_until_whole();
    assert_eq!(fs::read_to_string(mount.join("after")).expect("read"), "more\n");
    team.assert_same_on_all();
}
