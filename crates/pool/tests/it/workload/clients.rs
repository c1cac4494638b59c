//! Clients that change files beside each other, and the judge of what they were told and what is there in the end.
//!
//! ```text
//! /own-N               a directory for each client, whose files it alone changes
//! /shared/N-...        names of a directory of all clients, of which each client changes those with its number
//! /shared/plain/N-...  names of a directory below that
//! /fight-K             names that all clients make, move and remove
//! ```
//!
//! Paths of the middle two begin with their client's number, so that each of these is an [`Arena`]. In fights no bytes are
//! written: it is the names that count.

use std::sync::Arc;
use std::time::Duration;

use atoll_env::{Env, sleep};
use atoll_vfs::{Errno, FileSystem};

use super::history::{Arena, History, RecordedFs, make_ground};
use super::steps::{Stamp, Step, take};
use super::tree::tree;
use super::{Dice, ROOT, contents, names};

/// Most clients of a workload.
pub(crate) const MAX_CLIENTS: usize = 4;
/// The first letters of their names in shared directories.
const PREFIXES: [&str; MAX_CLIENTS] = ["0-", "1-", "2-", "3-"];
/// Whoever looks at everything in the end.
const LAST_CLIENT: u32 = 999;

/// The arenas of a workload.
#[derive(Clone, Debug)]
pub(crate) struct Grounds {
    /// Of each client those that it alone changes.
    own: Vec<Vec<Arena>>,
    fights: Vec<Arena>,
}

impl Grounds {
    /// Makes the directories.
    pub(crate) async fn make(fs: &dyn FileSystem, clients: usize, fights: usize) -> Grounds {
        assert!(clients <= MAX_CLIENTS, "at most {MAX_CLIENTS} clients");
        let mut number = 0;
        let mut arena = |dir, prefix| {
            number += 1;
            Arena { number, dir, prefix }
        };
        let shared = make_ground(fs, ROOT, "shared").await;
        let plain = make_ground(fs, shared, "plain").await;
        let mut own = Vec::new();
        for (client, prefix) in PREFIXES.iter().enumerate().take(clients) {
            let dir = make_ground(fs, ROOT, &format!("own-{client}")).await;
            own.push(vec![arena(dir, ""), arena(shared, prefix), arena(plain, prefix)]);
        }
        let mut all = Vec::new();
        for fight in 0..fights {
            all.push(arena(make_ground(fs, ROOT, &format!("fight-{fight}")).await, ""));
        }
        fs.persist(&[]).await.expect("it can be made durable");
        Grounds { own, fights: all }
    }

    fn arenas(&self) -> impl Iterator<Item = &Arena> {
        self.own.iter().flatten().chain(&self.fights)
    }
}

/// What a client does.
#[derive(Clone)]
pub(crate) struct Client {
    pub(crate) number: u32,
    pub(crate) grounds: Arc<Grounds>,
    pub(crate) history: History,
    /// Another one for each life of a client.
    pub(crate) seed: u64,
    pub(crate) steps: u64,
    /// It waits up to this between steps, and longer where something has failed.
    pub(crate) pause: Duration,
    /// All it is told survives a loss of power: [`RecordedFs::persisting`].
    pub(crate) persists: bool,
}

impl Client {
    /// Makes all steps. Dropped, it may have a call in flight.
    pub(crate) async fn run(self, fs: Arc<dyn FileSystem>, env: Env) {
        let mut dice = Dice(self.seed);
        for step in 0..self.steps {
            let arena = self.arena(&mut dice, step);
            let recorded = RecordedFs::new(fs.clone(), &self.history, self.number, arena);
            let recorded = if self.persists { recorded.persisting() } else { recorded };
            let is_fight = self.grounds.fights.contains(arena);
            let next = match is_fight {
                true => dice.name_step(),
                false => {
                    let number = self.history.next_stamp();
                    dice.own_step(Stamp { client: self.number, number })
                }
            };
            let mut taken = take(&recorded, &next).await;
            // As programs do, so that there is something to work on.
            if let (Err(Errno::ENOENT), false, Some(before)) = (taken, is_fight, before(&next)) {
                taken = take(&recorded, &before).await;
            }
            let has_failed = matches!(taken, Err(Errno::EIO | Errno::ETIMEDOUT | Errno::EAGAIN));
            let pause = self.pause * if has_failed { 20 } else { 1 };
            let micros = u64::try_from(pause.as_micros()).expect("a short pause");
            sleep(&*env, Duration::from_micros(dice.below(micros + 1))).await;
        }
    }

    fn arena(&self, dice: &mut Dice, step: u64) -> &Arena {
        let Grounds { own, fights } = &*self.grounds;
        // All clients fight over the same names at about the same time.
        if dice.below(3) == 0 && !fights.is_empty() {
            return &fights[(step * fights.len() as u64 / self.steps) as usize];
        }
        let own = &own[self.number as usize];
        &own[dice.below(own.len() as u64) as usize]
    }
}

/// What a step needs whose path is missing.
fn before(step: &Step) -> Option<Step> {
    let parent = |path: &str| path.rsplit_once('/').map(|(parent, _)| parent.to_owned());
    match step {
        Step::Stamp { path, .. } => Some(Step::Create(path.clone())),
        Step::Create(path) | Step::Mkdir(path) => {
            parent(path).filter(|parent| !parent.is_empty()).map(Step::Mkdir)
        }
        _ => None,
    }
}

/// Looks at every file: what is there is judged as part of the history. Nothing else goes on then.
pub(crate) async fn look_at_everything(
    fs: &Arc<dyn FileSystem>,
    history: &History,
    grounds: &Grounds,
) {
    for arena in grounds.arenas() {
        tree(&RecordedFs::new(fs.clone(), history, LAST_CLIENT, arena)).await;
    }
}

/// That all answers are right. `refusals` are errors that may be answered to any call, which then changes nothing.
pub(crate) fn judge(
    history: &History,
    grounds: &Grounds,
    refusals: &[Errno],
) -> Result<(), String> {
    let (calls, moments) = history.read();
    for arena in grounds.arenas() {
        names::explain(arena.number, (&calls, &moments), refusals)?;
    }
    contents::explain((&calls, &moments))
}

mod tests {
    use atoll_pool::disk::simulated::{InFlight, Loss, SimulatedDisk};
    use atoll_pool::{PoolFs, PoolSettings, create};
    use atoll_sim::{HostConfig, HostId, Sim, SimConfig};
    use atoll_vfs::memory::MemoryFs;
    use atoll_vfs::{FileKind, OpenFlags, Writer};
    use bytes::Bytes;

    use super::*;
    use crate::workload::history::{Called, Reply};
    use crate::workload::steps::CELL_BYTES;
    use crate::workload::tree::Seen;
    use crate::workload::{for_each_seed, me};

    const STEPS: u64 = 300;
    const LONG: Duration = Duration::from_secs(3600);

    /// Starts all clients on a host.
    fn start(
        (sim, host): (&Sim, HostId),
        fs: &Arc<dyn FileSystem>,
        (grounds, history): (&Arc<Grounds>, &History),
        seed: u64,
        persists: bool,
    ) {
        for number in 0..grounds.own.len() {
            let client = Client {
                number: number as u32,
                grounds: grounds.clone(),
                history: history.clone(),
                seed: seed * 1000 + number as u64,
                steps: STEPS,
                pause: Duration::from_millis(5),
                persists,
            };
            let env = sim.env(host);
            env.spawn(Box::pin(client.run(fs.clone(), env.clone())));
        }
    }

    fn new_sim(seed: u64) -> (Sim, HostId) {
        let sim = Sim::new(SimConfig { seed, ..SimConfig::default() });
        let host = sim.add_host(HostConfig::default());
        (sim, host)
    }

    /// Clients on a pool of one, whose process is killed three times, or whose machine loses power.
    fn clients_of_a_pool(seed: u64, loss: Option<Loss>, persists: bool) -> Result<(), String> {
        let (sim, host) = new_sim(seed);
        let outside = sim.outside();
        let history = History::new(outside.clone());
        let mut disk = SimulatedDisk::new(outside.clone());
        let (first, env) = (disk.clone(), sim.env(host));
        let (mut fs, grounds) = sim
            .block_on(LONG, async {
                let settings = PoolSettings::new([7; 16], (seed % 4) as u8);
                create(&first, settings).await.unwrap();
                let fs: Arc<dyn FileSystem> = Arc::new(PoolFs::open(env, first).await.unwrap().0);
                let grounds = Grounds::make(&*fs, 3, 4).await;
                (fs, Arc::new(grounds))
            })
            .unwrap();
        disk.set_latency(seed, Duration::from_millis(2));
        let mut dice = Dice(seed);
        for life in 0..4 {
            start((&sim, host), &fs, (&grounds, &history), seed * 10 + life, persists);
            if life == 3 {
                // These make all their steps.
                sim.run_for(Duration::from_secs(60));
                break;
            }
            sim.run_for(Duration::from_millis(dice.below(2000)));
            sim.crash(host);
            drop(fs);
            match loss {
                Some(loss) => {
                    disk.crash_with(loss, seed);
                    history.power_lost();
                }
                None => disk.kill(if dice.below(2) == 0 { InFlight::Lost } else { InFlight::Late }),
            }
            // Late calls arrive.
            sim.run_for(Duration::from_secs(1));
            let (env, _) = sim.restart(host);
            disk = disk.reopen();
            let opened = sim.block_on(LONG, PoolFs::open(env, disk.clone()));
            fs = Arc::new(opened.unwrap().unwrap().0);
            // Opening it has made what the journal had.
            history.settled();
        }
        history.settled();
        sim.block_on(LONG, look_at_everything(&fs, &history, &grounds)).unwrap();
        judge(&history, &grounds, &[])
    }

    #[test]
    fn clients_of_a_pool_whose_process_is_killed_are_told_the_truth() {
        for_each_seed(20, |seed| clients_of_a_pool(seed, None, false));
    }

    #[test]
    fn clients_of_a_pool_whose_machine_loses_power_are_told_the_truth() {
        for_each_seed(20, |seed| clients_of_a_pool(seed, Some(Loss::Ordered), true));
    }

    /// Without [`FileSystem::persist`] a loss of power takes changes that were answered: that is found.
    #[test]
    fn a_lost_change_is_found() {
        let judged = (0..10).map(|seed| clients_of_a_pool(seed, Some(Loss::Ordered), false));
        let found = judged.filter(Result::is_err).count();
        assert!(found >= 5, "found in {found} of 10 histories");
    }

    /// A history of a file system in memory, which `spoil` then changes behind the clients' backs.
    fn judged_after(
        seed: u64,
        spoil: impl AsyncFnOnce(&dyn FileSystem, &History),
    ) -> Result<(), String> {
        let (sim, host) = new_sim(seed);
        let history = History::new(sim.outside());
        let fs: Arc<dyn FileSystem> = Arc::new(MemoryFs::new(sim.env(host)));
        let grounds = Arc::new(sim.block_on(LONG, Grounds::make(&*fs, 3, 4)).unwrap());
        start((&sim, host), &fs, (&grounds, &history), seed, false);
        sim.run_for(Duration::from_secs(60));
        let work = async {
            spoil(&*fs, &history).await;
            look_at_everything(&fs, &history, &grounds).await;
        };
        sim.block_on(LONG, work).unwrap();
        judge(&history, &grounds, &[])
    }

    #[test]
    fn clients_of_a_file_system_in_memory_are_told_the_truth() {
        for_each_seed(20, |seed| judged_after(seed, async |_, _| {}));
    }

    /// A file of client 0, as it is in the end.
    async fn some_file(fs: &dyn FileSystem, kind: FileKind) -> (String, Seen) {
        let is_some = |path: &str, seen: &Seen| {
            path.starts_with("/own-0/")
                && seen.kind == kind
                && (kind != FileKind::Regular || seen.text.len() > 100)
        };
        let mut tree = tree(fs).await.into_iter();
        tree.find(|(path, seen)| is_some(path, seen)).expect("the seed leaves such a file")
    }

    async fn rename(fs: &dyn FileSystem, from: &str, to: &str) {
        take(fs, &Step::Rename(from.to_owned(), to.to_owned())).await.unwrap();
    }

    /// Changes a file behind the clients' backs.
    async fn spoil(fs: &dyn FileSystem, what: &str) {
        let (path, seen) = some_file(fs, FileKind::Regular).await;
        let step = match what {
            "nothing" => Step::Persist,
            "a file is removed" => Step::Unlink(path),
            "a file is moved" => Step::Rename(path.clone(), path + "-moved"),
            "a file is linked" => Step::Link(path.clone(), path + "-linked"),
            "a file is made" => Step::Create(path + "-made"),
            "a name that was fought over is made" => Step::Create("/fight-2/made".to_owned()),
            "a name in a shared directory is made" => {
                Step::Create("/shared/plain/0-made".to_owned())
            }
            "a file is another one" => {
                rename(fs, &path, "/old").await;
                take(fs, &Step::Create(path.clone())).await.unwrap();
                return;
            }
            "a mode is set" => Step::Chmod(path, 0o111),
            "an owner is set" => Step::Chown(path, 7),
            "a file is cut off" => Step::Truncate(path, 1),
            "a cell is another client's" => Step::Stamp {
                path,
                first_cell: seen.text.len() as u64 / CELL_BYTES - 1,
                cells: 1,
                stamp: Stamp { client: 1, number: 1 },
            },
            "a byte is changed" => {
                let handle = fs.open(me(), seen.inode, OpenFlags::WRITE).await.unwrap().handle;
                let byte = Bytes::from_static(b"!");
                fs.write(Writer::At(me()), seen.inode, handle, 70, byte).await.unwrap();
                return;
            }
            "an attribute is set" => Step::SetXattr(path, "user.first", "wrong".to_owned()),
            "an unknown attribute is set" => Step::SetXattr(path, "user.third", "wrong".to_owned()),
            _ => panic!("no way to spoil it: {what}"),
        };
        take(fs, &step).await.unwrap();
    }

    #[test]
    fn a_file_that_is_not_as_it_was_left_is_found() {
        let names = "nothing explains this answer";
        for (what, expected) in [
            ("nothing", ""),
            ("a file is removed", names),
            ("a file is moved", names),
            ("a file is linked", names),
            ("a file is made", names),
            ("a name that was fought over is made", names),
            ("a name in a shared directory is made", names),
            ("a file is another one", names),
            ("a mode is set", "its mode is 111 (octal)"),
            ("an owner is set", "its owner is 7 (octal)"),
            ("a file is cut off", "it has 64 bytes, and not"),
            ("a cell is another client's", "is \"client 001 file"),
            ("a byte is changed", "cell 1 is \""),
            ("an attribute is set", "its attribute b\"user.first\" is none of"),
            ("an unknown attribute is set", "its attribute b\"user.third\" is none of"),
        ] {
            let judged = judged_after(1, async |fs, _| spoil(fs, what).await);
            match judged {
                Ok(()) => assert_eq!(expected, "", "{what} is not found"),
                Err(wrong) => {
                    let first = wrong.lines().next().unwrap();
                    assert!(!expected.is_empty() && first.contains(expected), "{what}: {wrong}");
                }
            }
        }
    }

    /// The last call of client 0 that `is_it`, with another answer.
    fn falsify(
        history: &History,
        is_it: impl Fn(&Called, &Result<Reply, Errno>) -> bool,
        answer: Option<Result<Reply, Errno>>,
    ) {
        let mut last = None;
        history.falsify(|call| {
            let is_it = call.answer.as_ref().is_some_and(|answer| is_it(&call.called, answer));
            if call.client == 0 && is_it {
                last = Some(call.begun);
            }
        });
        let last = last.expect("the seed has such a call");
        history.falsify(|call| {
            if call.begun == last {
                call.answer = answer.clone();
                call.ended = answer.as_ref().and(call.ended);
            }
        });
    }

    /// "Answered means there, refused means not there, and without an answer it may be or not".
    #[test]
    fn an_answer_that_is_not_true_is_found() {
        let is_unlink = |called: &Called| matches!(called, Called::Unlink(_));
        for seed in 0..10 {
            let lost = judged_after(seed, async |_, history| {
                let refused = |called: &Called, answer: &Result<Reply, Errno>| {
                    is_unlink(called) && answer.is_err()
                };
                falsify(history, refused, Some(Ok(Reply::Nothing)));
            });
            assert!(lost.is_err(), "seed {seed}: a file that was said to be removed is not missed");
            let done = |called: &Called, answer: &Result<Reply, Errno>| {
                is_unlink(called) && answer.is_ok()
            };
            let made = judged_after(seed, async |_, history| {
                falsify(history, done, Some(Err(Errno::ENOSPC)));
            });
            assert!(made.is_err(), "seed {seed}: that a refused call removed a file is not seen");
            for answer in [None, Some(Err(Errno::EIO))] {
                let judged = judged_after(seed, async |_, history| {
                    falsify(history, done, answer.clone());
                    history.settled();
                });
                judged.unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
            }
        }
    }
}
