//! Limits of a pool of several groups: each has a share.

use atoll_pool::{QuotaAmount, QuotaRow, QuotaSubject, ask_quotas};
use atoll_vfs::{Caller, Errno, InodeNumber, OpenFlags, Writer};
use bytes::Bytes;

use super::directed::Spread;
use super::*;
use crate::workload::steps::{Step, find, take};

const ANN: QuotaSubject = QuotaSubject::User(7);
const PAGE: u64 = 4096;
const ASKED: Duration = Duration::from_secs(5);
/// Limits are divided, and files are counted.
const SETTLED: Duration = Duration::from_secs(8);
/// Directories that were moved over groups are noticed.
const NOTICED: Duration = Duration::from_secs(45);

fn ann() -> Caller {
    Caller { uid: 7, gid: 7, ..Caller::default() }
}

impl Spread {
    fn set_limit(&self, subject: QuotaSubject, pages: u64) {
        let limit = Some(QuotaAmount { bytes: pages * PAGE, files: 10_000 });
        let route = HostRoute { machines: self.machines.clone(), at: 1, group: group(0) };
        self.run(ask_quotas(&route, Some((subject, limit)), ASKED)).unwrap();
    }

    /// How a group stands to a limit.
    fn row(&self, number: usize, subject: QuotaSubject) -> Option<QuotaRow> {
        let route = HostRoute { machines: self.machines.clone(), at: 1, group: group(number) };
        self.run(ask_quotas(&route, None, ASKED)).unwrap().rows().get(&subject).copied()
    }

    fn used(&self, subject: QuotaSubject) -> u64 {
        (0..3).filter_map(|number| self.row(number, subject)).map(|row| row.used.bytes).sum()
    }

    async fn inode(&self, path: &str) -> InodeNumber {
        find(&*self.fs, path).await.unwrap()
    }

    /// A file of Ann's with one page.
    async fn put_page(&self, path: &str) -> Result<(), Errno> {
        let (dir, name) = path.rsplit_once('/').unwrap();
        let parent = self.inode(dir).await;
        let made = self.fs.create(ann(), parent, name.as_bytes(), 0o644, OpenFlags::WRITE).await;
        let (entry, opened) = made?;
        let (inode, bytes) = (entry.attr.inode, Bytes::from(vec![1; PAGE as usize]));
        let written = self.fs.write(Writer::At(ann()), inode, opened.handle, 0, bytes).await;
        self.fs.close(inode, opened.handle).await?;
        written.map(|_| ())
    }
}

/// Limits that nobody reaches: on what clients have.
pub(super) fn set_high_limits(machines: &Machines) {
    let limit = Some(QuotaAmount { bytes: 1 << 40, files: 1 << 30 });
    let route = HostRoute { machines: machines.clone(), at: 1, group: group(0) };
    for subject in [7, 1000, 1001].map(QuotaSubject::User) {
        let set = ask_quotas(&route, Some((subject, limit)), ASKED);
        machines.sim.block_on(LONG, set).unwrap().unwrap();
    }
    machines.run_for(Duration::from_secs(3));
}

/// That calls have kept in step with what files take, in all groups.
pub(super) fn check_used(machines: &Machines) -> Result<(), String> {
    for number in 0..GROUPS.len() {
        let at = machines.primary(group(number)).ok_or("a group has no primary")?;
        let fs = {
            let nodes = machines.nodes();
            let member = &nodes[at].as_ref().expect("it runs").members[&group(number)];
            member.file_system().ok_or("a primary does not serve")?
        };
        let kept = fs.quotas_as_kept();
        let counted = machines.sim.block_on(LONG, fs.quotas()).unwrap().unwrap();
        for (subject, row) in counted.rows() {
            let kept = kept.rows()[subject].used;
            if kept != row.used {
                return Err(format!("group {number}, {subject:?}: {kept:?}, but {:?}", row.used));
            }
        }
    }
    Ok(())
}

#[test]
fn all_groups_together_use_what_a_limit_allows_and_no_more() {
    let pool = Spread::new(1);
    pool.set_limit(ANN, 60);
    pool.machines.run_for(SETTLED);
    let shares: Vec<u64> =
        (0..3).map(|number| pool.row(number, ANN).unwrap().share.bytes / PAGE).collect();
    assert_eq!(shares, [20, 20, 20]);
    // All in one group, beyond its share: the others have no use for theirs.
    let made = pool.run(async {
        let mut made = 0;
        for number in 0..70 {
            match pool.put_page(&format!("{}/{number}", pool.homes[2])).await {
                Ok(()) => made += 1,
                Err(errno) => {
                    assert_eq!(errno, Errno::EDQUOT);
                    break;
                }
            }
        }
        made
    });
    assert!((50..=60).contains(&made), "{made} of 60");
    assert_eq!(pool.used(ANN), made * PAGE);
    // Then in all of them until none has room: never more than the limit.
    pool.run(async {
        for number in 0..20 {
            for home in &pool.homes {
                let _ = pool.put_page(&format!("{home}/more-{number}")).await;
            }
        }
    });
    pool.machines.run_for(SETTLED);
    let used = pool.used(ANN) / PAGE;
    assert!((58..=60).contains(&used), "{used} of 60");
    // What is removed in one group may be used in another one.
    pool.run(async {
        for number in 0..made {
            let path = format!("{}/{number}", pool.homes[2]);
            take(&*pool.fs, &Step::Unlink(path)).await.unwrap();
        }
    });
    pool.machines.run_for(SETTLED);
    pool.run(async {
        for number in 0..25 {
            pool.put_page(&format!("{}/again-{number}", pool.homes[0])).await.unwrap();
        }
    });
    assert!(pool.used(ANN) <= 60 * PAGE);
    pool.machines.settle_and_compare().unwrap();
}

/// The primary of the first group dies, and another group's, while clients take all that they can get.
#[test]
fn no_primary_that_dies_lets_groups_use_more() {
    let pool = Spread::new(1);
    pool.set_limit(ANN, 90);
    pool.machines.run_for(SETTLED);
    let mut made = 0;
    for round in 0..4 {
        made += pool.run(async {
            let mut made = 0;
            for number in 0..12 {
                for home in &pool.homes {
                    let path = format!("{home}/{round}-{number}");
                    made += u64::from(pool.put_page(&path).await.is_ok());
                }
            }
            made
        });
        assert!(made <= 90, "round {round}: {made}");
        pool.machines.run_for(SETTLED);
        assert!(pool.used(ANN) <= 90 * PAGE);
        let of = pool.machines.primary(group(round % 3)).unwrap();
        pool.machines.kill(of, InFlight::Late);
        pool.machines.restart(of);
        pool.machines.await_quiet().unwrap();
    }
    assert!(made >= 85, "{made} of 90");
    pool.machines.settle_and_compare().unwrap();
}

/// A limited directory and what is below it in other groups, also when that is moved there as a whole.
#[test]
fn a_directory_limits_what_is_below_it_in_other_groups() {
    let pool = Spread::new(2);
    let Spread { homes, fs, .. } = &pool;
    let limited = QuotaSubject::Directory(pool.run(pool.inode(&homes[1])).0);
    pool.set_limit(limited, 40);
    pool.machines.run_for(SETTLED);
    // The second level is spread, too.
    let below: Vec<String> = (0..6).map(|number| format!("{}/{number}", homes[1])).collect();
    let groups = pool.run(async {
        let mut groups = BTreeSet::new();
        for path in &below {
            take(&**fs, &Step::Mkdir(path.clone())).await.unwrap();
            groups.insert(pool.group_of(path).await);
        }
        groups
    });
    assert_eq!(groups.len(), 3);
    pool.machines.run_for(NOTICED);
    assert_eq!(pool.used(limited), 7 * PAGE);
    let made = pool.run(async {
        let mut made = 0;
        for number in 0..10 {
            for path in &below {
                made += u64::from(pool.put_page(&format!("{path}/{number}")).await.is_ok());
            }
        }
        made
    });
    assert!((28..=33).contains(&made), "{made} of 33");
    assert_eq!(pool.used(limited), (7 + made) * PAGE);
    // One of them leaves with its files, and comes back.
    let (inside, outside) = (&below[0], format!("{}/away", homes[0]));
    let files = pool.run(async {
        let mut files = 0;
        for number in 0..10 {
            // One whose first page was refused is empty.
            if let Ok(inode) = find(&**fs, &format!("{inside}/{number}")).await {
                files += fs.getattr(inode, None).await.unwrap().attr.size_bytes / PAGE;
            }
        }
        take(&**fs, &Step::Rename(inside.clone(), outside.clone())).await.unwrap();
        files
    });
    pool.machines.run_for(NOTICED);
    assert_eq!(pool.used(limited), (7 + made - files - 1) * PAGE);
    pool.run(take(&**fs, &Step::Rename(outside, inside.clone()))).unwrap();
    pool.machines.run_for(NOTICED);
    assert_eq!(pool.used(limited), (7 + made) * PAGE);
    pool.machines.settle_and_compare().unwrap();
}

/// Files that come from other groups, and directories that are made there.
#[test]
fn what_comes_from_other_groups_counts_for_a_directory() {
    let pool = Spread::new(2);
    let Spread { homes, fs, .. } = &pool;
    let limited = QuotaSubject::Directory(pool.run(pool.inode(&homes[1])).0);
    pool.set_limit(limited, 20);
    pool.machines.run_for(SETTLED);
    let (from, to) = (format!("{}/file", homes[0]), format!("{}/got", homes[1]));
    pool.run(async {
        pool.put_page(&from).await.unwrap();
        take(&**fs, &Step::Rename(from.clone(), to.clone())).await.unwrap();
    });
    pool.machines.run_for(SETTLED);
    assert_eq!(pool.used(limited), 2 * PAGE, "the directory and the file");
    let grown = pool.run(async {
        let inode = pool.inode(&to).await;
        let handle = fs.open(ann(), inode, OpenFlags::WRITE).await.unwrap().handle;
        let bytes = Bytes::from(vec![1; 30 * PAGE as usize]);
        let written = fs.write(Writer::At(ann()), inode, handle, 0, bytes).await;
        fs.close(inode, handle).await.unwrap();
        written
    });
    assert_eq!(grown, Err(Errno::EDQUOT));
    // Directories of any group, and what is in them at once.
    let made = pool.run(async {
        let mut made = 0;
        for number in 0..30 {
            let path = format!("{}/{number}", homes[1]);
            if take(&**fs, &Step::Mkdir(path.clone())).await.is_err() {
                continue;
            }
            made += 1;
            made += u64::from(pool.put_page(&format!("{path}/file")).await.is_ok());
        }
        made
    });
    pool.machines.run_for(SETTLED);
    assert_eq!(pool.used(limited), (2 + made) * PAGE);
    // Of directories the group of the limited one hears within a second.
    assert!((14..=30).contains(&made), "{made} of 18");
    pool.machines.settle_and_compare().unwrap();
}
