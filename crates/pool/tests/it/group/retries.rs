//! Clients over the network whose primary dies: each call is answered, and each change of names is made once.

use std::sync::atomic::{AtomicUsize, Ordering};

use atoll_pool::{CallOrigin, ClientKey, RemembersCalls};
use atoll_vfs::{Errno, FileKind, RenameFlags};

use super::*;
use crate::workload::clients::{Client, Grounds, judge, look_at_everything};
use crate::workload::history::History;
use crate::workload::{Dice, ROOT, for_each_seed, me};

const CLIENTS: u32 = 3;
const STEPS: u64 = 300;

impl Group {
    /// Has another member become the primary.
    fn depose(&mut self) {
        let [primary, ..] = self.roles();
        self.kill(primary, InFlight::Lost);
        self.run_for(Duration::from_secs(1));
        assert_ne!(self.roles()[0], primary);
        self.restart(primary);
        self.await_quiet().unwrap();
    }
}

/// Another member is told from its journal, or its index, what was done for a call.
#[test]
fn the_next_primary_knows_what_was_done_for_a_call() {
    for (seed, has_checkpoint) in [(1, false), (2, true)] {
        let mut group = Group::new(seed, 1);
        let fs = group.fs();
        let client = ClientKey::new(&group.sim.peer(group.hosts[1]).id, &[1; 16]);
        let call = |number| CallOrigin { client, number, lowest: 1 };
        let sim = group.sim.clone();
        let made = sim
            .block_on(LONG, async {
                for name in ["one", "two"] {
                    let kind = FileKind::Regular;
                    fs.mknod(me(), ROOT, name.as_bytes(), kind, 0o644, 0).await.unwrap();
                }
                let made = fs.for_call(call(1)).mkdir(me(), ROOT, b"new", 0o755).await.unwrap();
                fs.for_call(call(2)).unlink(me(), ROOT, b"one").await.unwrap();
                let (from, to, flags) = (b"two", b"three", RenameFlags::default());
                fs.for_call(call(3)).rename(me(), ROOT, from, ROOT, to, flags).await.unwrap();
                if has_checkpoint {
                    fs.sync().await.unwrap();
                }
                made
            })
            .unwrap();
        drop(fs);
        for round in [1, 2] {
            group.depose();
            if has_checkpoint && round == 1 {
                // The journals of all begin anew.
                group.settle_and_compare().unwrap();
            }
            let fs = group.fs();
            let again = async {
                let again = fs.for_call(call(1)).mkdir(me(), ROOT, b"new", 0o755).await.unwrap();
                assert_eq!(again.attr.inode, made.attr.inode);
                let unlinked = fs.for_call(call(2)).unlink(me(), ROOT, b"one").await;
                assert_eq!(unlinked, Ok(()));
                let (from, to, flags) = (b"two", b"three", RenameFlags::default());
                let renamed = fs.for_call(call(3)).rename(me(), ROOT, from, ROOT, to, flags).await;
                assert_eq!(renamed, Ok(()));
                let another = fs.for_call(call(4)).mkdir(me(), ROOT, b"new", 0o755).await;
                assert_eq!(another.map(drop), Err(Errno::EEXIST));
                let older = fs.for_call(call(0)).mkdir(me(), ROOT, b"older", 0o755).await;
                assert_eq!(older.map(drop), Err(Errno::EIO), "nobody waits for it");
            };
            group.sim.block_on(LONG, again).unwrap();
        }
    }
}

/// The primary's process ends in good order while a change waits for a backup that is away: the client does not hear of it.
#[test]
fn a_call_that_an_ending_primary_leaves_is_answered_by_the_next() {
    let mut group = Group::new(1, 1);
    let [primary, backup, other] = group.roles();
    let fs = group.mount(other);
    group.sim.partition(&[&[group.hosts[backup]]]);
    let answer = Arc::new(std::sync::Mutex::new(None));
    let (made, to) = (fs.mkdir(me(), ROOT, b"new", 0o755), answer.clone());
    group.sim.outside().spawn(Box::pin(async move {
        let made = made.await;
        *to.lock().unwrap() = Some(made);
    }));
    group.sim.run_for(Duration::from_millis(100));
    let member = group.members()[primary].take().unwrap();
    let _ = group.sim.block_on(LONG, member.end()).unwrap();
    drop(member);
    group.kill(primary, InFlight::Lost);
    group.sim.heal();
    group.run_for(Duration::from_secs(2));
    let made = answer.lock().unwrap().take().expect("it is answered").unwrap();
    let found = group.sim.block_on(LONG, fs.lookup(me(), ROOT, b"new")).unwrap().unwrap();
    assert_eq!(found.attr.inode, made.attr.inode);
}

/// Clients on machines of their own, while one member after the other is killed, or loses power, and returns within seconds.
fn survive(seed: u64, loses_power: bool) -> Result<(), String> {
    let mut group = Group::new(seed, (seed % 4) as u8);
    let history = History::new(group.sim.outside());
    let fs: Arc<dyn FileSystem> = group.mount(seed as usize % 3);
    let grounds = group.sim.block_on(LONG, Grounds::make(&*fs, CLIENTS as usize, 3)).unwrap();
    let grounds = Arc::new(grounds);
    for disk in &group.disks {
        disk.set_latency(seed, Duration::from_millis(2));
    }
    let running = Arc::new(AtomicUsize::new(CLIENTS as usize));
    let env = group.sim.env(group.clients);
    let mut mounts = Vec::new();
    for number in 0..CLIENTS {
        let fs: Arc<dyn FileSystem> = group.mount(number as usize);
        mounts.push(fs.clone());
        let work = Client {
            number,
            grounds: grounds.clone(),
            history: history.clone(),
            seed: seed * 10_000 + u64::from(number),
            steps: STEPS,
            pause: Duration::from_millis(20),
            persists: false,
        };
        let (work, running) = (work.run(fs, env.clone()), running.clone());
        env.spawn(Box::pin(async move {
            work.await;
            running.fetch_sub(1, Ordering::SeqCst);
        }));
    }
    let mut dice = Dice(seed);
    let until = group.sim.now() + Duration::from_secs(1200);
    while running.load(Ordering::SeqCst) > 0 {
        if group.sim.now() > until {
            return Err("clients have no answer".to_owned());
        }
        group.run_for(Duration::from_millis(dice.below(2500)));
        let at = match (dice.below(3), group.primary()) {
            (1 | 2, Some(primary)) => primary,
            _ => dice.below(3) as usize,
        };
        match loses_power && dice.below(2) == 0 {
            true => group.lose_power(at, Loss::Ordered, dice.below(1000)),
            false => group.kill(at, InFlight::Lost),
        }
        group.run_for(Duration::from_millis(dice.below(2000)));
        group.restart(at);
    }
    group.await_quiet()?;
    for mount in &mounts {
        // Bytes that the last member of an epoch has lost come again.
        group.sim.block_on(LONG, mount.sync()).unwrap().map_err(|errno| format!("{errno}"))?;
    }
    group.settle_and_compare()?;
    history.settled();
    group.sim.block_on(LONG, look_at_everything(&fs, &history, &grounds)).unwrap();
    let (calls, _) = history.read();
    for call in &calls {
        let is_unknown = matches!(call.answer, None | Some(Err(Errno::EIO | Errno::ETIMEDOUT)));
        if call.called.changes_names() && is_unknown {
            return Err(format!("a change of names has no answer: {}", call.line()));
        }
    }
    judge(&history, &grounds, &[Errno::EAGAIN])
}

#[test]
fn clients_hear_nothing_of_members_that_are_killed() {
    for_each_seed(4, |seed| survive(seed, false));
}

#[test]
fn clients_hear_nothing_of_machines_that_lose_power() {
    for_each_seed(4, |seed| survive(seed, true));
}
