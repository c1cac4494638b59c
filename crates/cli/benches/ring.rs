//! What a ring of five on this machine does, beside what the machine does by itself.
//!
//! Five nodes as five processes on loopback, k = 3: publishing and getting a file of
//! 100 MiB and a real tree, timed as a person would, whole commands from start to end.
//! Beside them, in the same run, `cp` of the same bytes and one plain TCP stream over
//! loopback. Writes `docs/results/ring.md`.
//!
//! With `-- --against BINARY` a ring of another build does the same by turns, and the ratios are
//! printed: whether a change made Atoll slower is seen only in one run on one machine.

// A benchmark reads the real clock.
#![allow(clippy::disallowed_methods)]

use std::fmt::Write as _;
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use atoll_bench::{LocalRing, machine, median, noise, timed, today};

const NODES: usize = 5;
const FILE_BYTES: usize = 100 << 20;
const RUNS: u64 = 5;
const IDLE_SECS: f64 = 20.0;
const MIB: f64 = 1_048_576.0;

/// Fewest and most files of the tree, as in the demo.
const TREE_FILES: std::ops::RangeInclusive<usize> = 2_000..=12_000;

fn main() {
    let temp = tempfile::tempdir().expect("a temporary directory");
    let own = LocalRing::start(env!("CARGO_BIN_EXE_atoll").into(), &temp.path().join("own"), NODES);
    let other = against().map(|binary| LocalRing::start(binary, &temp.path().join("other"), NODES));
    let rings: Vec<LocalRing> = std::iter::once(own).chain(other).collect();
    std::thread::sleep(Duration::from_secs(5));
    let idle_mib = resident_mib(&rings[0]);
    let cpu = || rings.iter().map(cpu_secs).collect::<Vec<f64>>();
    let before = cpu();
    let percent = |(after, before): (f64, f64)| (after - before) / IDLE_SECS / NODES as f64 * 100.0;
    std::thread::sleep(Duration::from_secs_f64(IDLE_SECS));
    let idle_cpu_percent: Vec<f64> = cpu().into_iter().zip(before).map(percent).collect();

    let mut files: Vec<Figures> = rings.iter().map(|_| Figures::default()).collect();
    let dest = temp.path().join("out");
    for run in 0..RUNS {
        eprintln!("a file of 100 MiB, run {} of {RUNS}", run + 1);
        let source = temp.path().join(format!("file{run}"));
        fs::create_dir(&source).expect("a directory");
        fs::write(source.join("data"), noise(FILE_BYTES, run + 1)).expect("a file");
        by_turns(&rings, run, |i, ring| files[i].measure(ring, &source, &dest));
        fs::remove_dir_all(source).expect("removed");
        files[0].tcp.push(tcp_stream(FILE_BYTES));
    }
    let mut trees: Vec<Figures> = rings.iter().map(|_| Figures::default()).collect();
    let tree_source = real_tree();
    let (tree_files, tree_bytes) = measure_tree(&tree_source);
    for run in 0..RUNS {
        eprintln!("{}, run {} of {RUNS}", tree_source.display(), run + 1);
        // A copy with one more byte in each file, so that the ring has none of its blocks.
        let source = temp.path().join(format!("tree{run}"));
        copy_changed(&tree_source, &source, run as u8);
        by_turns(&rings, run, |i, ring| trees[i].measure(ring, &source, &dest));
        fs::remove_dir_all(source).expect("removed");
        trees[0].tcp.push(tcp_stream(tree_bytes as usize));
    }
    let busy_mib = resident_mib(&rings[0]);

    let name = tree_source.display().to_string();
    if let ([_, _], [file, other_file], [tree, other_tree]) = (&rings[..], &files[..], &trees[..]) {
        print!("{}", compared("a file of 100 MiB", file, other_file));
        print!("{}", compared(&name, tree, other_tree));
        println!("CPU of an idle node, %: {idle_cpu_percent:.2?}\n");
    }
    let text = report(&Report {
        file: files.swap_remove(0),
        tree: trees.swap_remove(0),
        tree_source,
        tree_files,
        tree_bytes,
        idle_mib,
        idle_cpu_percent: idle_cpu_percent[0],
        busy_mib,
    });
    print!("{text}");
    let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results");
    fs::create_dir_all(&results).expect("docs/results");
    fs::write(results.join("ring.md"), text).expect("docs/results/ring.md");
}

/// The other build to compare with.
fn against() -> Option<PathBuf> {
    let mut args = std::env::args().skip_while(|arg| arg != "--against");
    args.next()?;
    Some(args.next().expect("--against BINARY").into())
}

/// Measures each ring; which is first changes from run to run.
fn by_turns(rings: &[LocalRing], run: u64, mut measure: impl FnMut(usize, &LocalRing)) {
    let first = run as usize % rings.len();
    for i in (first..rings.len()).chain(0..first) {
        measure(i, &rings[i]);
    }
}

/// Lines that say what this build takes, what the other one does, and the ratio.
fn compared(what: &str, own: &Figures, other: &Figures) -> String {
    let line = |of: &str, own: &[f64], other: &[f64]| {
        let (own, other) = (median(own), median(other));
        format!("{of} {what}: {own:.2} s, other build {other:.2} s, ratio {:.2}\n", own / other)
    };
    line("publish", &own.publish, &other.publish)
        + &line("CPU of publishing", &own.publish_cpu, &other.publish_cpu)
        + &line("get", &own.get, &other.get)
        + &line("CPU of getting", &own.get_cpu, &other.get_cpu)
}

/// Seconds of each run, and CPU seconds of all processes of ours together.
#[derive(Default)]
struct Figures {
    publish: Vec<f64>,
    publish_cpu: Vec<f64>,
    get: Vec<f64>,
    get_cpu: Vec<f64>,
    cp: Vec<f64>,
    tcp: Vec<f64>,
}

impl Figures {
    fn measure(&mut self, ring: &LocalRing, source: &Path, dest: &Path) {
        let cpu = || cpu_secs(ring) + children_cpu_secs();
        let before = cpu();
        let (secs, said) = timed(ring.atoll(0).args(["publish", "-q"]).arg(source));
        self.publish.push(secs);
        self.publish_cpu.push(cpu() - before);
        let address = said.lines().last().expect("an address").to_string();
        // The copies that repair still has to make are not the reader's work.
        timed(ring.atoll(0).args(["status", "--wait", "replicated"]));
        let before = cpu();
        let (secs, _) = timed(ring.atoll(2).args(["get", "-q", &address]).arg(dest));
        self.get.push(secs);
        self.get_cpu.push(cpu() - before);
        fs::remove_dir_all(dest).expect("removed");
        let (secs, _) = timed(Command::new("cp").arg("-a").arg(source).arg(dest));
        self.cp.push(secs);
        fs::remove_dir_all(dest).expect("removed");
    }
}

/// One TCP connection over loopback, memory to memory: the least any protocol pays.
fn tcp_stream(bytes: usize) -> f64 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let began = Instant::now();
    let receiver = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a connection");
        let mut buffer = vec![0; 1 << 16];
        let mut total = 0;
        loop {
            match stream.read(&mut buffer).expect("bytes") {
                0 => return total,
                n => total += n,
            }
        }
    });
    let mut stream = TcpStream::connect(address).expect("connects");
    let buffer = vec![7; 1 << 16];
    let mut left = bytes;
    while left > 0 {
        let n = left.min(buffer.len());
        stream.write_all(&buffer[..n]).expect("sent");
        left -= n;
    }
    drop(stream);
    assert_eq!(receiver.join().expect("no panic"), bytes);
    began.elapsed().as_secs_f64()
}

/// Resident memory of each node.
fn resident_mib(ring: &LocalRing) -> Vec<f64> {
    let of = |process: u32| {
        let status = fs::read_to_string(format!("/proc/{process}/status"));
        let status = status.expect("the node runs");
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("VmRSS");
        let kib = line.split_whitespace().nth(1).expect("a number");
        kib.parse::<f64>().expect("a number") / 1024.0
    };
    ring.process_ids().map(of).collect()
}

/// CPU time all nodes have used.
fn cpu_secs(ring: &LocalRing) -> f64 {
    let of = |process: u32| cpu_ticks(&process.to_string(), [13, 14]);
    ring.process_ids().map(of).sum::<f64>() / TICKS_PER_SEC
}

/// Linux counts CPU time for user programs in hundredths of a second (`USER_HZ`).
const TICKS_PER_SEC: f64 = 100.0;

/// The sum of two fields of `/proc/PID/stat`, numbered from 0.
fn cpu_ticks(process: &str, fields: [usize; 2]) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).expect("it runs");
    // The name in parentheses may have blanks; it is fields 0 and 1 together.
    let after_name = stat.rsplit_once(") ").expect("a name").1;
    let values: Vec<&str> = after_name.split(' ').collect();
    fields.iter().map(|i| values[i - 2].parse::<f64>().expect("a number")).sum()
}

/// CPU time of the commands run so far.
fn children_cpu_secs() -> f64 {
    cpu_ticks("self", [15, 16]) / TICKS_PER_SEC
}

/// The tree the demo would take.
fn real_tree() -> PathBuf {
    let places = ["/usr/include", "/usr/share/doc", "/usr/share/man", "/usr/lib/python3"];
    let fits = |dir: &PathBuf| TREE_FILES.contains(&measure_tree(dir).0);
    places.iter().map(PathBuf::from).find(fits).expect("a tree of 2,000 to 12,000 files")
}

/// Files and bytes below a directory.
fn measure_tree(dir: &Path) -> (usize, u64) {
    let (mut files, mut bytes) = (0, 0);
    let Ok(entries) = fs::read_dir(dir) else { return (0, 0) };
    for entry in entries.flatten() {
        let Ok(metadata) = entry.metadata() else { continue };
        if metadata.is_dir() {
            let below = measure_tree(&entry.path());
            files += below.0;
            bytes += below.1;
        } else if metadata.is_file() {
            files += 1;
            bytes += metadata.len();
        }
    }
    (files, bytes)
}

/// Copies regular files, each with one byte in front.
fn copy_changed(from: &Path, to: &Path, mark: u8) {
    fs::create_dir(to).expect("a directory");
    for entry in fs::read_dir(from).expect("readable").flatten() {
        let metadata = entry.metadata().expect("there");
        let dest = to.join(entry.file_name());
        if metadata.is_dir() {
            copy_changed(&entry.path(), &dest, mark);
        } else if metadata.is_file() {
            let mut bytes = vec![mark];
            bytes.extend(fs::read(entry.path()).expect("readable"));
            fs::write(dest, bytes).expect("written");
        }
    }
}

struct Report {
    file: Figures,
    tree: Figures,
    tree_source: PathBuf,
    tree_files: usize,
    tree_bytes: u64,
    idle_mib: Vec<f64>,
    idle_cpu_percent: f64,
    busy_mib: Vec<f64>,
}

fn report(r: &Report) -> String {
    let mut out = String::new();
    let file_mib = FILE_BYTES as f64 / MIB;
    let tree_mib = r.tree_bytes as f64 / MIB;
    let line = |out: &mut String, text: String| writeln!(out, "{text}").expect("a String");
    line(&mut out, "# A ring of five on one machine\n".into());
    line(&mut out, format!("Measured {} by `make bench` on {}.\n", today(), machine()));
    line(
        &mut out,
        format!(
            "{NODES} nodes as {NODES} processes on loopback, three copies of every block, \
             acknowledged when two are\ndurable. Whole commands, start to end; medians of {RUNS} \
             runs, each with bytes the ring has not\nseen. `get` runs through a node that did not \
             publish; with three copies on five nodes it holds\n60 % of the blocks itself and \
             fetches the rest. CPU is that of all nodes and the command together.\nThe last \
             column is the time as a multiple of `cp -a`.\n"
        ),
    );
    line(&mut out, "| what | seconds | MiB/s | files/s | CPU s | × `cp -a` |".into());
    line(&mut out, "|---|---|---|---|---|---|".into());
    let name = r.tree_source.display();
    let rows = [
        (
            "publish a file of 100 MiB",
            &r.file.publish,
            Some(&r.file.publish_cpu),
            1,
            file_mib,
            &r.file.cp,
        ),
        ("get it", &r.file.get, Some(&r.file.get_cpu), 1, file_mib, &r.file.cp),
        ("`cp -a` of it", &r.file.cp, None, 1, file_mib, &r.file.cp),
        ("one TCP stream of as many bytes", &r.file.tcp, None, 1, file_mib, &r.file.cp),
    ];
    let tree_rows = [
        (format!("publish {name}"), &r.tree.publish, Some(&r.tree.publish_cpu)),
        ("get it".to_string(), &r.tree.get, Some(&r.tree.get_cpu)),
        ("`cp -a` of it".to_string(), &r.tree.cp, None),
        ("one TCP stream of as many bytes".to_string(), &r.tree.tcp, None),
    ];
    let rows = rows
        .into_iter()
        .map(|(what, secs, cpu, files, mib, cp)| (what.to_string(), secs, cpu, files, mib, cp))
        .chain(
            tree_rows
                .into_iter()
                .map(|(what, secs, cpu)| (what, secs, cpu, r.tree_files, tree_mib, &r.tree.cp)),
        );
    for (what, secs, cpu, files, mib, cp) in rows {
        let secs = median(secs);
        let cpu = cpu.map_or(String::new(), |cpu| format!("{:.2}", median(cpu)));
        let per_sec = if files > 1 { format!("{:.0}", files as f64 / secs) } else { String::new() };
        let ratio = secs / median(cp);
        line(
            &mut out,
            format!("| {what} | {secs:.2} | {:.0} | {per_sec} | {cpu} | {ratio:.1} |", mib / secs),
        );
    }
    line(&mut out, format!("\n{name}: {} files, {tree_mib:.1} MiB.", r.tree_files));
    let list = |values: &[f64]| {
        let texts: Vec<String> = values.iter().map(|value| format!("{value:.1}")).collect();
        texts.join(", ")
    };
    line(
        &mut out,
        format!(
            "\nResident memory of a node, MiB: idle in a new ring {}; after all of the above {}.\n\
             CPU of an idle node: {:.2} % of a core.",
            list(&r.idle_mib),
            list(&r.busy_mib),
            r.idle_cpu_percent,
        ),
    );
    out
}
