//! Machines whose addresses change, one of them while its node runs, or all at once.

use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};

use crate::processes::{NodeProcess, Ring, assert_same, make_tree, run, until};

/// What a node's status warns of.
fn warnings(node: &NodeProcess) -> String {
    let said = node.atoll(["status", "--json"]);
    if said.code == Some(3) { String::new() } else { said.ok().json()["warnings"].to_string() }
}

fn advertised(node: &NodeProcess) -> String {
    let said = node.atoll(["status", "--json"]);
    if said.code == Some(3) {
        return String::new();
    }
    said.ok().json()["advertise"].as_str().expect("an address").to_owned()
}

/// Every node was alone for ever, with or without a join code: the peers that it remembered at
/// their former addresses came before the code's, and replaced them.
#[test]
fn nodes_whose_addresses_have_all_changed_find_each_other_by_a_new_code() {
    let mut ring = Ring::of(4);
    let (source, address) = ring.publish_tree();
    for node in &ring.nodes {
        node.wait_for(&["nodes=4", "replicated"]);
    }
    ring.nodes.iter_mut().for_each(NodeProcess::kill);
    let listen: Vec<String> = (2..6).map(|i| format!("127.0.0.{i}:0")).collect();
    // Two start without a code, and find no other node.
    for (node, listen) in ring.nodes.iter_mut().zip(&listen).take(2) {
        node.restart_with(&["--listen", listen], "");
    }
    for node in &ring.nodes[..2] {
        until("it serves alone", || warnings(node).contains("serving alone"));
    }
    let code = ring.nodes[0].atoll(["invite"]).ok().stdout;
    assert_eq!(ring.nodes[1].stop(), Some(0));
    for (node, listen) in ring.nodes.iter_mut().zip(&listen).skip(1) {
        node.restart_with(&["--listen", listen, "--join", "-"], &code);
    }
    let whole = |ring: &Ring, what: &str| {
        for (i, node) in ring.nodes.iter().enumerate() {
            node.wait_for(&["nodes=4"]);
            assert!(advertised(node).starts_with(&format!("127.0.0.{}:", 2 + i)));
            let dest = node.dir.with_extension(what);
            run(node.command(["get", &address]).arg(&dest)).ok();
            assert_same(&source, &dest);
        }
    };
    whole(&ring, "moved");
    // The code is not needed again.
    ring.nodes.iter_mut().for_each(NodeProcess::kill);
    for node in &mut ring.nodes {
        node.restart_with(&[], "");
    }
    whole(&ring, "again");
}

/// A network of its own, whose addresses a test may change.
struct Machine(Child);

impl Machine {
    /// Two with a cable, `here` and `away`. None where they cannot be made; says so loudly.
    fn pair(test: &str) -> Option<[Machine; 2]> {
        let pair = Machine::new().zip(Machine::new()).filter(|(here, away)| {
            let pid = away.0.id();
            here.try_ip(&format!("link add here type veth peer name away netns {pid}"))
        });
        if let Some((here, away)) = pair {
            for (machine, cable) in [(&here, "here"), (&away, "away")] {
                machine.ip("link set lo up");
                machine.ip(&format!("link set {cable} up"));
            }
            return Some([here, away]);
        }
        // Past the test harness, which would keep it to itself.
        let _ = writeln!(std::io::stderr(), "\nSKIPPED {test}: no network namespaces here");
        None
    }

    fn new() -> Option<Machine> {
        let mut held = Command::new("unshare")
            .args(["--net", "--", "sh", "-c", "echo made; exec sleep 600"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .ok()?;
        let mut said = [0; 5];
        let made = held.stdout.as_mut().expect("piped").read_exact(&mut said);
        let machine = Machine(held);
        made.is_ok().then_some(machine)
    }

    fn inside(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/proc/{}/ns/net", self.0.id())).arg("--").arg(program);
        command
    }

    fn try_ip(&self, arguments: &str) -> bool {
        let mut command = self.inside("ip");
        command.args(arguments.split(' ')).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    }

    #[track_caller]
    fn ip(&self, arguments: &str) {
        assert!(self.try_ip(arguments), "ip {arguments}");
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A node on a laptop that changed networks went on telling others where it had been.
#[test]
fn a_running_node_notices_that_its_machine_has_another_address() {
    let test = "a_running_node_notices_that_its_machine_has_another_address";
    let Some([here, away]) = Machine::pair(test) else { return };
    here.ip("addr add 10.77.0.9/24 dev here");
    let move_to = |address: &str| {
        away.ip(&format!("addr add {address}/24 dev away"));
        away.ip("route add default via 10.77.0.9");
    };
    move_to("10.77.0.1");
    let temp = tempfile::tempdir().expect("a temporary directory");
    let start = |machine: &Machine, name: &str, listen: &str, code: &str| {
        let join: &[&str] = if code.is_empty() { &[] } else { &["--join", "-"] };
        let arguments = [&["--listen", listen], join].concat();
        NodeProcess::start_by(machine.inside("env"), temp.path().join(name), &arguments, code)
    };
    let still = start(&here, "still", "10.77.0.9:0", "");
    still.wait_for(&["joined"]);
    let code = still.atoll(["invite"]).ok().stdout;
    let moving = start(&away, "moving", "0.0.0.0:0", &code);
    let other = start(&here, "other", "10.77.0.9:0", &code);
    let nodes = [still, moving, other];
    for node in &nodes {
        node.wait_for(&["nodes=3"]);
    }
    let source = temp.path().join("docs");
    make_tree(&source);
    let said = run(nodes[1].command(["publish"]).arg(&source)).ok();
    assert!(advertised(&nodes[1]).starts_with("10.77.0.1:"));

    away.ip("addr del 10.77.0.1/24 dev away");
    move_to("10.77.0.2");
    until("it notices", || advertised(&nodes[1]).starts_with("10.77.0.2:"));
    assert!(nodes[1].log().contains("this machine's address is 10.77.0.2 now"));
    let moved = advertised(&nodes[1]);
    for node in &nodes {
        let knows = || node.atoll(["status", "--json"]).ok().json()["successors"].to_string();
        until("all see it there", || node.dir == nodes[1].dir || knows().contains(&moved));
        node.wait_for(&["nodes=3"]);
        let dest = node.dir.with_extension("copy");
        run(node.command(["get", said.last_line()]).arg(&dest)).ok();
        assert_same(&source, &dest);
    }
}
