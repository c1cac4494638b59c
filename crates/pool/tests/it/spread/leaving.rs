//! What is left of a pool of several groups when their members leave it.

use atoll_pool::disk::simulated::InFlight;
use atoll_pool::disk::{Disk, DiskResult};
use atoll_pool::{LeaveReport, leave};
use atoll_vfs::FileKind;
use bytes::Bytes;

use super::directed::Spread;
use super::*;
use crate::workload::steps::{Step, take};

/// A file that is left: its kind, the target of a link, bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
struct LeftFile {
    kind: FileKind,
    target: String,
    bytes: Bytes,
}

/// Everything in a directory of a disk, by paths.
async fn all_left(disk: &SimulatedDisk) -> DiskResult<BTreeMap<String, LeftFile>> {
    let mut all = BTreeMap::new();
    let mut open = vec![(disk.top(), String::new())];
    while let Some((dir, path)) = open.pop() {
        for listed in disk.list(&dir).await? {
            let path = format!("{path}/{}", String::from_utf8_lossy(&listed.name));
            let node = disk.node(&dir, &listed.name).await?;
            let (mut target, mut bytes) = (String::new(), Bytes::new());
            match listed.kind {
                FileKind::Directory => open.push((node, path.clone())),
                FileKind::Symlink => {
                    target = String::from_utf8_lossy(&disk.read_node(&node).await?).into_owned();
                }
                _ => bytes = disk.read(&disk.open(&node).await?, 0, 1 << 20).await?,
            }
            all.insert(path, LeftFile { kind: listed.kind, target, bytes });
        }
    }
    Ok(all)
}

/// Follows links as the kernel does: the path without any; none if it leads nowhere.
fn resolve(all: &BTreeMap<String, LeftFile>, path: &str) -> Option<String> {
    let mut rest: Vec<String> = path.split('/').rev().map(str::to_owned).collect();
    let mut at: Vec<String> = Vec::new();
    for _ in 0..1000 {
        match rest.pop() {
            None => return Some(at.iter().map(|name| format!("/{name}")).collect()),
            Some(name) if name.is_empty() => {}
            Some(name) if name == ".." => {
                at.pop()?;
            }
            Some(name) => {
                at.push(name);
                let path: String = at.iter().map(|name| format!("/{name}")).collect();
                let file = all.get(&path)?;
                if file.kind == FileKind::Symlink {
                    at.pop();
                    rest.extend(file.target.split('/').rev().map(str::to_owned));
                }
            }
        }
    }
    None
}

/// One member of each group leaves: together they have all files, and names lead to them where the three directories are put into one.
#[test]
fn members_that_leave_have_the_files_of_their_groups_and_names_lead_through_all_of_them() {
    let pool = Spread::new(2);
    let Spread { fs, homes, machines, .. } = &pool;
    let mut expected = BTreeMap::new();
    pool.run(async {
        let write = async |path: String, byte: u8| {
            take(&**fs, &Step::Create(path.clone())).await.unwrap();
            take(&**fs, &Step::Write(path, byte)).await.unwrap();
        };
        for (number, home) in homes.iter().enumerate() {
            let byte = number as u8 * 10;
            take(&**fs, &Step::Mkdir(format!("{home}/deep"))).await.unwrap();
            take(&**fs, &Step::Mkdir(format!("{home}/deep/plain"))).await.unwrap();
            write(format!("{home}/file"), byte + 1).await;
            write(format!("{home}/moves"), byte + 2).await;
            write(format!("{home}/deep/plain/far"), byte + 3).await;
            expected.insert(format!("{home}/file"), byte + 1);
            expected.insert(format!("{home}/deep/plain/far"), byte + 3);
        }
        for (number, home) in homes.iter().enumerate() {
            let next = &homes[(number + 1) % 3];
            let steps = [
                Step::Rename(format!("{home}/moves"), format!("{next}/deep/plain/moved")),
                Step::Link(format!("{home}/file"), format!("{next}/deep/link")),
            ];
            for step in &steps {
                take(&**fs, step).await.unwrap();
            }
            let byte = number as u8 * 10;
            expected.insert(format!("{next}/deep/plain/moved"), byte + 2);
            expected.insert(format!("{next}/deep/link"), byte + 1);
        }
        let step = Step::Rename(homes[2].clone(), format!("{}/below", homes[1]));
        take(&**fs, &step).await.unwrap();
        let (from, to) = (format!("{}/", homes[2]), format!("{}/below/", homes[1]));
        let moved = |(path, byte): (&String, &u8)| (path.replace(&from, &to), *byte);
        expected = expected.iter().map(moved).collect();
    });
    machines.settle_and_compare().unwrap();
    for at in 0..MACHINES {
        machines.kill(at, InFlight::Lost);
        machines.reopen_disks(at);
    }
    let mut together = BTreeMap::new();
    let mut reports = Vec::new();
    for (number, of_group) in GROUPS.iter().enumerate() {
        let disk = machines.disk(group(number), of_group[0]);
        let left = pool.run(leave(machines.sim.env(machines.clients), disk.clone())).unwrap();
        let all = pool.run(all_left(&disk)).unwrap();
        assert!(left.names_taken.is_empty(), "{left:?}");
        let links = all.iter().filter(|(_, file)| file.kind == FileKind::Symlink);
        let links: BTreeSet<String> = links.map(|(path, _)| path[1..].to_owned()).collect();
        assert_eq!(links, left.names_elsewhere.iter().cloned().collect());
        let in_outside = |path: &&String| {
            let below = path.strip_prefix(&format!("/outside-{number}/"));
            below.is_some_and(|below| !below.contains('/'))
        };
        assert_eq!(all.keys().filter(in_outside).count() as u64, left.outside_names);
        for (path, file) in all {
            assert!(!path.starts_with("/.atoll") && !path.starts_with("/slots"), "{path}");
            assert!(together.insert(path.clone(), file).is_none(), "two of {path}");
        }
        reports.push(left);
    }
    let of_all = |count: fn(&LeaveReport) -> u64| reports.iter().map(count).sum::<u64>();
    assert_eq!(
        of_all(|left| left.names_elsewhere.len() as u64),
        of_all(|left| left.outside_names),
        "each name has its file"
    );
    for (path, byte) in &expected {
        let found = resolve(&together, path).unwrap_or_else(|| panic!("{path}: {together:#?}"));
        assert_eq!(together[&found].bytes, vec![*byte; 1500], "{path}");
    }
}

/// Leaving that is cut off anywhere goes on, and leaves the same.
#[test]
fn leaving_a_group_that_is_cut_off_anywhere_goes_on() {
    let pool = Spread::new(1);
    let Spread { fs, homes, machines, .. } = &pool;
    pool.run(async {
        for (number, home) in homes.iter().enumerate() {
            let (file, next) = (format!("{home}/file"), &homes[(number + 1) % 3]);
            take(&**fs, &Step::Create(file.clone())).await.unwrap();
            take(&**fs, &Step::Write(file.clone(), 7)).await.unwrap();
            take(&**fs, &Step::Link(file, format!("{next}/link"))).await.unwrap();
        }
    });
    machines.settle_and_compare().unwrap();
    for at in 0..MACHINES {
        machines.kill(at, InFlight::Lost);
        machines.reopen_disks(at);
    }
    let env = || machines.sim.env(machines.clients);
    for (number, of_group) in GROUPS.iter().enumerate() {
        let disk = machines.disk(group(number), of_group[0]);
        let (before, mut expected) = (disk.snapshot(), None);
        for cut in 0.. {
            disk.rollback(&before);
            let first = disk.reopen();
            first.stop_after(if expected.is_none() { u64::MAX } else { cut * 7 });
            let left = pool.run(leave(env(), first.clone()));
            let was_stopped = first.is_stopped();
            first.kill(InFlight::Lost);
            let found = pool.run(all_left(&disk.reopen())).unwrap();
            let is_begun = |name: &str| found.contains_key(&format!("/.atoll/{name}"));
            if !was_stopped {
                left.unwrap();
            } else if is_begun("slots") || is_begun("stamp") {
                pool.run(leave(env(), disk.reopen())).unwrap();
            }
            let mut all = pool.run(all_left(&disk.reopen())).unwrap();
            // All but an empty directory may be done.
            all.remove("/.atoll");
            match &expected {
                None => expected = Some(all),
                Some(expected) => assert_eq!(&all, expected, "group {number}, {cut}"),
            }
            if !was_stopped && cut > 0 {
                assert!(cut > 10, "{cut}");
                break;
            }
        }
    }
}
