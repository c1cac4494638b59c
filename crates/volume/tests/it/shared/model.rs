//! Several mounts of one volume on a whole ring in the simulator, with partitions, and mounts that
//! crash or whose nodes are stopped for a while: what opens show is checked against what the consistency models promise (Pastis §3.2), and
//! after everything nothing that a close has answered for is lost.
//!
//! Each write replaces a file by a *token*, which says what its writer had seen when the file was
//! opened. So the tokens of a file are a graph, and
//!
//! - close-to-open: no open shows a token that is an ancestor of one whose close had ended before the
//!   open began;
//! - read-your-writes: the same, of the mount's own tokens;
//! - what a mount closes while its node is stopped is spooled: only that mount is to see it until it is back;
//! - nothing is lost: each token whose close has ended is there in the end, or was seen by the writer of
//!   one that is.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_dht::{Blocks, DhtConfig};
use atoll_env::Env;
use atoll_sim::{HostId, SimConfig};
use atoll_vfs::{Caller, Errno, FileSystem, Handle, InodeNumber, OpenFlags, Writer, XattrFlags};
use atoll_volume::shared::consistency::CONSISTENCY_XATTR;
use atoll_volume::shared::{Consistency, SharedFs, SharedOptions};
use bytes::Bytes;

use super::mounts::created;
use super::offline::Machine;
use crate::simulated_ring::Ring;
use crate::write::spool::Life;

const NODES: usize = 7;
const FILES: usize = 2;

/// Longer than any call takes: calls have deadlines.
const LONG: Duration = Duration::from_secs(1800);

/// After a partition has healed: the ring has merged and repaired by then.
const SETTLED: Duration = Duration::from_secs(1200);

/// A number and its file's name, always as long.
fn text(token: usize) -> String {
    format!("token {token:06}")
}

#[derive(Clone, Debug)]
struct Token {
    file: usize,
    /// What its writer had seen.
    seen: Option<usize>,
    by: usize,
    /// In which part of the story its close has ended, and on which side; [`SPOOLED`] if that was offline.
    closed: Option<(usize, usize)>,
}

/// A part that never comes, and a side that nobody is on.
const SPOOLED: (usize, usize) = (usize::MAX, usize::MAX);

#[derive(Clone, PartialEq, Eq, Debug)]
enum Doing {
    Nothing,
    /// Tokens whose close had ended before, as far as they are to be seen.
    Open {
        file: usize,
        part: usize,
        before: Vec<usize>,
    },
    Close {
        token: usize,
        part: usize,
    },
}

/// What a call has brought: of an open the file, its handle and what it shows.
type Outcome = Arc<Mutex<Option<Result<(InodeNumber, Handle, usize), Errno>>>>;

struct Mount {
    member: usize,
    machine: Machine,
    /// Of its process.
    life: Arc<Life>,
    fs: SharedFs,
    doing: Doing,
    outcome: Outcome,
    opened: Option<(usize, InodeNumber, Handle, usize)>,
    /// Which mount it is of all that there were.
    id: usize,
}

struct Story {
    seed: u64,
    dice: u64,
    ring: Ring,
    consistency: Consistency,
    /// What files say themselves.
    chosen: [Option<Consistency>; FILES],
    mounts: Vec<Mount>,
    mounts_made: usize,
    tokens: Vec<Token>,
    /// Parts end where the ring is divided, is healed, or has settled.
    part: usize,
    /// Whether the ring knows in this part who belongs to it, and has repaired its blocks.
    is_settled: bool,
    /// How many members are on the first side.
    divided: Option<usize>,
    opens: usize,
    /// How often a close has ended offline.
    spooled: usize,
}

impl Story {
    fn new(
        seed: u64,
        mounts: usize,
        consistency: Consistency,
        chosen: [Option<Consistency>; FILES],
    ) -> Story {
        let sim = SimConfig { seed, jitter: 0.3, ..SimConfig::default() };
        let ring = Ring::with(sim, DhtConfig::default(), NODES);
        let mut story = Story {
            seed,
            dice: seed,
            ring,
            consistency,
            chosen,
            mounts: Vec::new(),
            mounts_made: 0,
            tokens: Vec::new(),
            part: 0,
            is_settled: true,
            divided: None,
            opens: 0,
            spooled: 0,
        };
        let (env, blocks) = story.at(0);
        story.block_on(created(&env, &blocks));
        for number in 0..mounts {
            let member = number * NODES / mounts;
            let options = SharedOptions {
                names_max_age: Duration::ZERO,
                consistency,
                ..SharedOptions::default()
            };
            let machine = Machine::at(&story.ring, member, number as u8 + 1, options);
            story.mount(member, machine);
        }
        let fs = story.mounts[0].fs.clone();
        for file in 0..FILES {
            let token = story.tokens.len();
            story.tokens.push(Token { file, seen: None, by: 0, closed: Some((0, 0)) });
            let made = async {
                let name = format!("f{file}");
                let made = fs.create(me(), InodeNumber::ROOT, name.as_bytes(), 0o644, RW).await;
                let (entry, opened) = made.expect("the ring is whole");
                if let Some(chosen) = chosen[file] {
                    let value = Bytes::from_static(chosen.name().as_bytes());
                    let (name, flags) = (CONSISTENCY_XATTR.as_bytes(), XattrFlags::default());
                    let set = fs.setxattr(me(), entry.attr.inode, name, value, flags).await;
                    set.expect("the ring is whole");
                }
                write_and_close(&fs, entry.attr.inode, opened.handle, token).await
            };
            story.block_on(made).expect("the ring is whole");
        }
        story
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.dice = self.dice.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.dice;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }

    fn at(&self, member: usize) -> (Env, Arc<dyn Blocks>) {
        let member = &self.ring.members[member];
        (self.ring.sim.env(member.host), member.dht.clone())
    }

    fn block_on<T>(&self, work: impl Future<Output = T>) -> T {
        let done = self.ring.sim.block_on(LONG, work);
        done.unwrap_or_else(|stuck| panic!("seed {}: {stuck}", self.seed))
    }

    fn mount(&mut self, member: usize, machine: Machine) {
        let (fs, life) = self.block_on(machine.mount());
        let fs = fs.unwrap_or_else(|error| panic!("seed {}: {error}", self.seed));
        let id = self.mounts_made;
        self.mounts_made += 1;
        let (doing, outcome, opened) = (Doing::Nothing, Outcome::default(), None);
        self.mounts.push(Mount { member, machine, life, fs, doing, outcome, opened, id });
    }

    fn side(&self, member: usize) -> usize {
        self.divided.map_or(0, |first| usize::from(member >= first))
    }

    /// Whether what was seen of `token` includes `earlier`.
    fn descends(&self, token: usize, earlier: usize) -> bool {
        let mut at = Some(token);
        while let Some(token) = at {
            if token == earlier {
                return true;
            }
            at = self.tokens[token].seen;
        }
        false
    }

    /// Begins the next call of a mount, or ends the last one.
    fn go_on(&mut self, which: usize) {
        let done = self.mounts[which].outcome.lock().expect("one thread").take();
        let doing = std::mem::replace(&mut self.mounts[which].doing, Doing::Nothing);
        match (doing, done) {
            (Doing::Nothing, _) => self.begin(which),
            (doing, None) => self.mounts[which].doing = doing,
            (Doing::Open { file, part, before }, Some(Ok((number, handle, shown)))) => {
                self.opens += 1;
                self.check_open(which, file, shown, part, &before);
                self.mounts[which].opened = Some((file, number, handle, shown));
            }
            (Doing::Close { token, part }, Some(Ok(_))) => {
                // If the ring was divided or healed meanwhile, nobody can say who sees it yet.
                let side = self.side(self.mounts[which].member);
                let side = if part == self.part { side } else { usize::MAX };
                let is_spooled = self.mounts[which].fs.spooled().is_some();
                self.spooled += usize::from(is_spooled);
                let closed = if is_spooled { SPOOLED } else { (self.part, side) };
                self.tokens[token].closed = Some(closed);
            }
            (_, Some(Err(_))) => {}
        }
    }

    fn begin(&mut self, which: usize) {
        let writes = self.below(4) > 0;
        let file = self.below(FILES as u64) as usize;
        let (part, token) = (self.part, self.tokens.len());
        let before = self.closed_before(which, file);
        let mount = &mut self.mounts[which];
        let (fs, outcome) = (mount.fs.clone(), mount.outcome.clone());
        let env = self.ring.sim.env(self.ring.members[mount.member].host);
        match mount.opened.take() {
            None => {
                mount.doing = Doing::Open { file, part, before };
                env.spawn(Box::pin(async move {
                    let opened = open_and_read(&fs, &format!("f{file}")).await;
                    *outcome.lock().expect("one thread") = Some(opened);
                }));
            }
            Some((_, number, handle, _)) if !writes => {
                // What was only read is closed without a word.
                env.spawn(Box::pin(async move {
                    let _ = fs.close(number, handle).await;
                }));
            }
            Some((file, number, handle, shown)) => {
                mount.doing = Doing::Close { token, part };
                let by = mount.id;
                self.tokens.push(Token { file, seen: Some(shown), by, closed: None });
                env.spawn(Box::pin(async move {
                    let closed = write_and_close(&fs, number, handle, token).await;
                    let closed = closed.map(|()| (number, handle, token));
                    *outcome.lock().expect("one thread") = Some(closed);
                }));
            }
        }
    }

    fn consistency_of(&self, file: usize) -> Consistency {
        self.chosen[file].unwrap_or(self.consistency)
    }

    /// Tokens of a file that an open of a mount may not be older than.
    fn closed_before(&self, which: usize, file: usize) -> Vec<usize> {
        let mount = &self.mounts[which];
        let side = self.side(mount.member);
        let is_offline = mount.fs.spooled().is_some();
        let counts = |token: &Token| {
            token.closed.is_some_and(|(part, on)| match self.consistency_of(file) {
                Consistency::CloseToOpen if !self.is_settled || is_offline => false,
                Consistency::CloseToOpen if (part, on) == SPOOLED => token.by == mount.id,
                Consistency::CloseToOpen if part == self.part => on == side,
                Consistency::CloseToOpen => self.divided.is_none(),
                Consistency::ReadYourWrites => token.by == mount.id,
            })
        };
        let tokens = self.tokens.iter().enumerate();
        let tokens = tokens.filter(|(_, token)| token.file == file && counts(token));
        tokens.map(|(number, _)| number).collect()
    }

    /// What an open has shown, which began in `part`.
    fn check_open(&self, which: usize, file: usize, shown: usize, part: usize, before: &[usize]) {
        let (seed, token) = (self.seed, &self.tokens[shown]);
        assert_eq!(token.file, file, "seed {seed}: another file's bytes");
        // Across a change of the ring only what a mount has written itself is promised; and what it has
        // written and not closed, it shows itself.
        let is_own = token.by == self.mounts[which].id && token.closed.is_none();
        let is_offline = self.mounts[which].fs.spooled().is_some();
        let is_promised = part == self.part && !is_offline
            || self.consistency_of(file) == Consistency::ReadYourWrites;
        if is_own || !is_promised {
            return;
        }
        for earlier in before {
            let is_older = *earlier != shown && self.descends(*earlier, shown);
            assert!(
                !is_older,
                "seed {seed}: mount {which} sees {shown}, {earlier} was closed before"
            );
        }
    }

    fn divide(&mut self) {
        let hosts: Vec<HostId> = self.ring.members.iter().map(|member| member.host).collect();
        let first = 2 + self.below(NODES as u64 - 3) as usize;
        self.ring.sim.partition(&[&hosts[..first], &hosts[first..]]);
        (self.divided, self.is_settled) = (Some(first), false);
        self.part += 1;
        self.settle_perhaps();
    }

    /// While replica sets change, no open is promised what others have closed.
    fn settle_perhaps(&mut self) {
        if self.below(2) == 0 {
            self.ring.sim.run_for(SETTLED);
            self.is_settled = true;
            self.part += 1;
        }
    }

    fn heal(&mut self) {
        self.ring.sim.heal();
        (self.divided, self.is_settled) = (None, false);
        self.part += 1;
        self.settle_perhaps();
    }

    /// A mount is gone from one moment to the next, and its user mounts again.
    fn crash(&mut self, which: usize) {
        let Mount { member, machine, life, .. } = self.mounts.remove(which);
        life.ends_after(0);
        let percent = self.below(101);
        machine.disk.crash(percent);
        // Without its node nothing can be mounted.
        machine.node.start();
        self.mount(member, machine);
    }

    /// A node stops, or all that have stopped run again.
    fn stop_or_start(&mut self) {
        if self.mounts.iter().any(|mount| mount.machine.node.is_stopped()) {
            self.start_all();
        } else {
            let which = self.below(self.mounts.len() as u64) as usize;
            self.mounts[which].machine.node.stop();
        }
    }

    fn start_all(&self) {
        self.mounts.iter().for_each(|mount| mount.machine.node.start());
    }

    fn run(&mut self, steps: usize) {
        for _ in 0..steps {
            let count = self.mounts.len() as u64;
            match self.below(100) {
                0 if self.divided.is_none() => self.divide(),
                1..=3 if self.divided.is_some() => self.heal(),
                // A side may have nothing of the volume's record: nobody can mount it there.
                4 if self.divided.is_none() && self.is_settled => {
                    let which = self.below(count) as usize;
                    self.crash(which);
                }
                5 => self.stop_or_start(),
                _ => {
                    let which = self.below(count) as usize;
                    self.go_on(which);
                }
            }
            let millis = self.below(120);
            self.ring.sim.run_for(Duration::from_millis(millis));
        }
    }

    /// All meet again: everything that a close has answered for is there, and all list the same.
    fn end(&mut self) {
        self.heal();
        self.start_all();
        self.ring.sim.run_for(SETTLED);
        for which in 0..self.mounts.len() {
            // What a close was answered for by now counts as well.
            while self.mounts[which].doing != Doing::Nothing {
                self.ring.sim.run_for(Duration::from_secs(60));
                let (seen, before) = (self.mounts[which].opened.is_some(), self.tokens.len());
                self.go_on(which);
                assert!(seen || self.tokens.len() == before);
            }
            if let Some((_, number, handle, _)) = self.mounts[which].opened.take() {
                let _ = self.block_on(self.mounts[which].fs.close(number, handle));
            }
        }
        self.ring.sim.run_for(SETTLED);
        let listed = |story: &Story, which: usize| {
            let fs = story.mounts[which].fs.clone();
            story.block_on(async move {
                // Whoever opens a file makes files of what was written at the same time.
                for file in 0..FILES {
                    let opened = open_and_read(&fs, &format!("f{file}")).await;
                    let (number, handle, _) = opened.expect("the ring is whole");
                    fs.close(number, handle).await.expect("only read");
                }
                contents(&fs).await
            })
        };
        let all = listed(self, 0);
        for which in 0..self.mounts.len() {
            assert_eq!(self.mounts[which].fs.spooled(), None, "seed {}", self.seed);
            assert_eq!(listed(self, which), all, "seed {}: mount {which}", self.seed);
        }
        let there: BTreeSet<usize> = all.values().copied().collect();
        for (number, token) in self.tokens.iter().enumerate() {
            let is_there = || there.iter().any(|one| self.descends(*one, number));
            let seed = self.seed;
            assert!(
                token.closed.is_none() || is_there(),
                "seed {seed}: token {number} is lost: {token:?}, there are {all:?}"
            );
        }
        for (name, token) in &all {
            let file = format!("f{}", self.tokens[*token].file);
            assert!(name.starts_with(&file), "seed {}: {token} in {name}", self.seed);
        }
    }
}

const RW: OpenFlags = OpenFlags::READ_WRITE;

fn me() -> Caller {
    Caller::default()
}

async fn open_and_read(fs: &SharedFs, name: &str) -> Result<(InodeNumber, Handle, usize), Errno> {
    let number = fs.lookup(me(), InodeNumber::ROOT, name.as_bytes()).await?.attr.inode;
    let opened = fs.open(me(), number, RW).await;
    let handle = opened.inspect_err(|_| fs.forget(number, 1))?.handle;
    match fs.read(number, handle, 0, 100).await {
        Ok(bytes) => Ok((number, handle, token(&bytes))),
        Err(errno) => {
            fs.close(number, handle).await?;
            fs.forget(number, 1);
            Err(errno)
        }
    }
}

fn token(bytes: &[u8]) -> usize {
    let text = std::str::from_utf8(bytes).expect("nothing else was written");
    let number = text.strip_prefix("token ").and_then(|number| number.parse().ok());
    number.unwrap_or_else(|| panic!("{text:?}"))
}

/// Replaces what is in a file, and closes it as programs do.
async fn write_and_close(
    fs: &SharedFs,
    number: InodeNumber,
    handle: Handle,
    token: usize,
) -> Result<(), Errno> {
    let data = Bytes::from(text(token));
    let written = fs.write(Writer::At(me()), number, handle, 0, data).await;
    let flushed = match written {
        Ok(_) => fs.flush(number, handle).await,
        Err(errno) => Err(errno),
    };
    fs.close(number, handle).await?;
    fs.forget(number, 1);
    flushed
}

/// All files of the root directory, and the token that each has.
async fn contents(fs: &SharedFs) -> BTreeMap<String, usize> {
    let root = InodeNumber::ROOT;
    let handle = fs.opendir(me(), root).await.expect("the ring is whole").handle;
    let listed = fs.readdir(root, handle, 0, 1000, false).await.expect("the ring is whole");
    fs.closedir(root, handle).await.expect("it is open");
    let mut all = BTreeMap::new();
    for entry in listed {
        let name = String::from_utf8_lossy(&entry.name).into_owned();
        let (number, handle, token) = open_and_read(fs, &name).await.expect("the ring is whole");
        fs.close(number, handle).await.expect("only read");
        fs.forget(number, 1);
        all.insert(name, token);
    }
    all
}

fn stories(seeds: std::ops::Range<u64>, mounts: usize, consistency: Consistency) {
    stories_of(seeds, mounts, consistency, [None; FILES]);
}

fn stories_of(
    seeds: std::ops::Range<u64>,
    mounts: usize,
    consistency: Consistency,
    chosen: [Option<Consistency>; FILES],
) {
    let mut spooled = 0;
    // In about every second story a close ends offline.
    for seed in seeds.start..seeds.end + 20 {
        if seed >= seeds.end && spooled > 0 {
            break;
        }
        let mut story = Story::new(seed, mounts, consistency, chosen);
        story.run(400);
        story.end();
        assert!(story.opens > 20, "seed {seed}: {} opens", story.opens);
        spooled += story.spooled;
    }
    assert!(spooled > 0, "no close has ended offline");
}

/// Pastis §3.2: "retrieving the latest inode from network when the file is opened".
#[test]
fn an_open_shows_what_was_closed_before() {
    stories(seeds(45..48), 2, Consistency::CloseToOpen);
    stories(seeds(45..48), 4, Consistency::CloseToOpen);
}

/// Pastis §3.2: "read operations always reflects all previous local writes, even if the file is closed
/// and later reopened".
#[test]
fn an_open_shows_what_this_mount_has_closed() {
    stories(seeds(101..103), 2, Consistency::ReadYourWrites);
    stories(seeds(103..105), 5, Consistency::ReadYourWrites);
}

/// Each file keeps what it promises itself, whatever the mount's default is.
#[test]
fn an_open_shows_what_the_file_itself_promises() {
    let (cto, ryw) = (Consistency::CloseToOpen, Consistency::ReadYourWrites);
    stories_of(seeds(201..203), 3, ryw, [Some(cto), None]);
    stories_of(seeds(203..205), 3, cto, [Some(ryw), None]);
}

/// `ATOLL_SEEDS=FROM-TO` runs others.
fn seeds(usual: std::ops::Range<u64>) -> std::ops::Range<u64> {
    let asked = std::env::var("ATOLL_SEEDS").ok();
    let asked = asked.as_deref().and_then(|seeds| seeds.split_once('-'));
    asked.map_or(usual, |(from, to)| from.parse().expect("FROM")..to.parse().expect("TO"))
}
