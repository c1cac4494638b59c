//! Clients that rename directories into each other, by seeds: whatever fails, they end in one tree.

use std::sync::atomic::{AtomicUsize, Ordering};

use atoll_sim::Loss as MessageLoss;
use atoll_vfs::{DirEntry, Errno, InodeNumber, OpenFlags, RenameFlags};
use futures_util::future::join_all;

use super::seeds::{Faults, disturb, thaw};
use super::*;
use crate::workload::history::History;
use crate::workload::{Dice, ROOT, for_each_seed, me};

const DIRECTORIES: u64 = 9;
const CLIENTS: usize = 3;
/// Of each client.
const RENAMES: usize = 160;
/// So many of them at once, of what a client has found at one time.
const AT_ONCE: usize = 4;

async fn listed(fs: &dyn FileSystem, inode: InodeNumber) -> Result<Vec<DirEntry>, Errno> {
    let opened = fs.opendir(me(), inode).await?;
    let names = fs.readdir(inode, opened.handle, 0, 1000, false).await;
    fs.closedir(inode, opened.handle).await?;
    names
}

/// All directories below the root: name, number, the directory that each is in.
async fn walked(fs: &dyn FileSystem) -> Result<Vec<(Vec<u8>, InodeNumber, InodeNumber)>, Errno> {
    let (mut all, mut open) = (Vec::new(), vec![ROOT]);
    while let Some(dir) = open.pop() {
        for entry in listed(fs, dir).await? {
            let found = fs.lookup(me(), dir, &entry.name).await?.attr.inode;
            all.push((entry.name.to_vec(), found, dir));
            open.push(found);
        }
        // Directories in each other have no end.
        if all.len() > 100 * DIRECTORIES as usize {
            return Err(Errno::ELOOP);
        }
    }
    Ok(all)
}

async fn rename_about(fs: Arc<dyn FileSystem>, env: Env, seed: u64) {
    let mut dice = Dice(seed);
    for _ in 0..RENAMES / AT_ONCE {
        // The tree changes while it is walked through.
        if let Ok(all) = walked(&*fs).await
            && !all.is_empty()
        {
            let mut renames = Vec::new();
            for _ in 0..AT_ONCE {
                let one = &all[dice.below(all.len() as u64) as usize];
                let into = match dice.below(all.len() as u64 + 1) as usize {
                    at if at == all.len() => ROOT,
                    at => all[at].1,
                };
                let flags = RenameFlags::default();
                renames.push(fs.rename(me(), one.2, &one.0, into, &one.0, flags));
            }
            let _ = join_all(renames).await;
        }
        sleep(&*env, Duration::from_millis(dice.below(10))).await;
    }
}

fn trial(seed: u64, faults: Faults) -> Result<(), String> {
    let machines = Machines::new(seed);
    let sim = machines.sim.clone();
    let _end = ShutDown(sim.clone());
    sim.block_on(LONG, machines.make(1)).unwrap();
    machines.await_quiet()?;
    let names: BTreeSet<Vec<u8>> =
        (0..DIRECTORIES).map(|number| format!("d{number}").into_bytes()).collect();
    let made = async {
        let fs = machines.mount(0).await;
        for name in &names {
            fs.mkdir(me(), ROOT, name, 0o755).await.expect("nothing fails yet");
        }
    };
    sim.block_on(LONG, made).unwrap();
    let running = Arc::new(AtomicUsize::new(CLIENTS));
    let env = sim.env(machines.clients);
    for client in 0..CLIENTS {
        let fs = sim.block_on(LONG, machines.mount(client)).unwrap();
        let work = rename_about(fs, env.clone(), seed * 10 + client as u64);
        let running = running.clone();
        env.spawn(Box::pin(async move {
            work.await;
            running.fetch_sub(1, Ordering::SeqCst);
        }));
    }
    let (mut dice, mut frozen) = (Dice(seed), [false; MACHINES]);
    let history = History::new(sim.outside());
    let until = sim.now() + Duration::from_secs(900);
    let mut rounds = 0;
    while running.load(Ordering::SeqCst) > 0 {
        if sim.now() > until {
            return Err("clients have no answer".to_owned());
        }
        machines.run_for(Duration::from_millis(dice.below(1000) + 100));
        rounds += 1;
        if faults != Faults::None && rounds < 12 {
            disturb(&machines, &mut dice, &mut frozen, (faults, &history));
            continue;
        }
        sim.heal();
        sim.set_loss(MessageLoss::None);
        thaw(&machines, &mut frozen);
        for at in 0..MACHINES {
            if !machines.is_up(at) {
                machines.restart(at);
            }
        }
    }
    machines.settle_and_compare()?;
    let found = async {
        let fs = machines.mount(1).await;
        walked(&*fs).await
    };
    let found = sim.block_on(LONG, found).unwrap().map_err(|errno| errno.to_string())?;
    let mut left = names;
    for (name, ..) in &found {
        if !left.remove(name) {
            return Err(format!("{} is there twice", String::from_utf8_lossy(name)));
        }
    }
    match left.is_empty() {
        true => Ok(()),
        false => Err(format!("{} directories are not in the tree: {left:?}", left.len())),
    }
}

#[test]
fn directories_that_are_renamed_into_each_other_make_one_tree() {
    for_each_seed(3, |seed| trial(seed, Faults::None));
}

#[test]
fn directories_that_are_renamed_into_each_other_make_one_tree_whatever_fails() {
    for_each_seed(4, |seed| trial(seed, Faults::Kills));
}

/// A file is created where another group's file has its name: that one is opened.
#[test]
fn a_name_of_another_groups_file_is_opened_by_create() {
    let machines = Machines::new(3);
    let _end = ShutDown(machines.sim.clone());
    let work = async {
        machines.make(1).await;
        let fs = machines.mount(0).await;
        let mut dirs = BTreeMap::new();
        for number in 0..40 {
            let name = format!("dir-{number}").into_bytes();
            let made = fs.mkdir(me(), ROOT, &name, 0o755).await.unwrap().attr.inode;
            dirs.insert(GroupNumber::of(made), made);
        }
        let dirs: Vec<InodeNumber> = dirs.into_values().collect();
        assert_eq!(dirs.len(), GROUPS.len(), "directories are spread");
        let flags = OpenFlags::WRITE;
        let (made, opened) = fs.create(me(), dirs[1], b"file", 0o644, flags).await.unwrap();
        fs.close(made.attr.inode, opened.handle).await.unwrap();
        let renamed = RenameFlags::default();
        fs.rename(me(), dirs[1], b"file", dirs[2], b"file", renamed).await.unwrap();
        let (found, opened) = fs.create(me(), dirs[2], b"file", 0o644, flags).await.unwrap();
        assert_eq!(found.attr.inode, made.attr.inode);
        fs.close(found.attr.inode, opened.handle).await.unwrap();
        let exclusive = OpenFlags(flags.0 | OpenFlags::EXCLUSIVE);
        let refused = fs.create(me(), dirs[2], b"file", 0o644, exclusive).await;
        assert_eq!(refused.map(|_| ()), Err(Errno::EEXIST));
    };
    machines.sim.block_on(LONG, work).unwrap();
    machines.settle_and_compare().unwrap();
}
