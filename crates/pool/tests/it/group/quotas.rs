//! Limits on what users take, over fail-overs.

use atoll_pool::{QuotaAmount, QuotaRow, QuotaSubject, QuotaTable, ask_quotas};
use atoll_vfs::{Caller, Errno, InodeNumber, OpenFlags, Writer};
use bytes::Bytes;

use super::*;
use crate::workload::ROOT;

const ANN: QuotaSubject = QuotaSubject::User(7);
const PAGE: u64 = 4096;
const ASKED: Duration = Duration::from_secs(5);
/// The primary has told the others what is used, and has counted.
const RECORDED: Duration = Duration::from_secs(8);

fn ann() -> Caller {
    Caller { uid: 7, gid: 7, ..Caller::default() }
}

impl Group {
    fn set_limit(&self, via: usize, subject: QuotaSubject, bytes: u64) -> QuotaTable {
        let limit = Some(QuotaAmount { bytes, files: 1 << 30 });
        let route = self.route(via);
        let set = ask_quotas(&*route, Some((subject, limit)), ASKED);
        self.sim.block_on(LONG, set).unwrap().unwrap()
    }

    /// That calls have kept in step with what files take.
    pub(super) fn check_used(&self) -> Result<(), String> {
        let fs = self.fs();
        let kept = fs.quotas_as_kept();
        let counted = self.run(fs.quotas()).unwrap();
        let used = |table: &QuotaTable| -> Vec<_> {
            table.rows().iter().map(|(subject, row)| (*subject, row.used)).collect()
        };
        match used(&kept) == used(&counted) {
            true => Ok(()),
            false => Err(format!("used: {:?}, but there are {:?}", used(&kept), used(&counted))),
        }
    }

    /// Limits that nobody reaches: on what clients have.
    pub(super) fn set_high_limits(&self) {
        for subject in [7, 1000, 1001].map(QuotaSubject::User) {
            self.set_limit(0, subject, 1 << 40);
        }
    }

    fn row(&self, via: usize) -> QuotaRow {
        let route = self.route(via);
        let asked = ask_quotas(&*route, None, ASKED);
        self.sim.block_on(LONG, asked).unwrap().unwrap().rows()[&ANN]
    }

    /// A file of Ann's with so many pages.
    fn put_pages(&self, name: &str, pages: u64) -> Result<InodeNumber, Errno> {
        let fs = self.fs();
        self.run(async {
            let flags = OpenFlags::WRITE;
            let (made, opened) = fs.create(ann(), ROOT, name.as_bytes(), 0o644, flags).await?;
            let (inode, handle) = (made.attr.inode, opened.handle);
            let bytes = Bytes::from(vec![1; (pages * PAGE) as usize]);
            let written = fs.write(Writer::At(ann()), inode, handle, 0, bytes).await;
            fs.close(inode, handle).await.unwrap();
            written.map(|_| inode)
        })
    }
}

#[test]
fn a_new_primary_knows_the_limits_and_what_was_used() {
    let mut group = Group::new(3, 1);
    let [primary, other, third] = group.roles();
    group.set_limit(other, ANN, 8 * PAGE);
    group.put_pages("before", 6).unwrap();
    group.run_for(RECORDED);
    assert_eq!(group.row(third).used.bytes, 6 * PAGE);
    group.kill(primary, InFlight::Late);
    while group.primary().is_none() {
        group.run_for(Duration::from_millis(10));
    }
    // At once: files may not be counted yet.
    assert_eq!(group.put_pages("after", 3).err(), Some(Errno::EDQUOT));
    group.put_pages("small", 2).unwrap();
    assert_eq!(group.put_pages("more", 1).err(), Some(Errno::EDQUOT));
    group.restart(primary);
    group.await_quiet().unwrap();
    group.run_for(RECORDED);
    let row = group.row(primary);
    assert_eq!((row.used.bytes, row.used.files), (8 * PAGE, 4));
    group.settle_and_compare().unwrap();
}

#[test]
fn a_member_that_was_given_all_files_has_the_limits_too() {
    let mut group = Group::new(4, 1);
    let [primary, other, third] = group.roles();
    group.set_limit(primary, ANN, 8 * PAGE);
    group.put_pages("before", 6).unwrap();
    group.run_for(RECORDED);
    let joined = group.join(primary).unwrap();
    group.await_quiet().unwrap();
    for away in [primary, other, third] {
        group.remove(joined, away).unwrap();
        group.await_quiet().unwrap();
    }
    assert_eq!(group.primary(), Some(joined));
    assert_eq!(group.put_pages("after", 3).err(), Some(Errno::EDQUOT));
    group.put_pages("small", 2).unwrap();
}

#[test]
fn limits_that_were_set_outlast_a_loss_of_power_of_all() {
    let mut group = Group::new(5, 1);
    group.set_limit(0, ANN, 8 * PAGE);
    group.put_pages("before", 6).unwrap();
    let fs = group.fs();
    group.run(async { fs.sync().await.unwrap() });
    drop(fs);
    for at in MEMBERS {
        group.lose_power(at, Loss::Ordered, at as u64);
    }
    for at in MEMBERS {
        group.restart(at);
    }
    group.await_quiet().unwrap();
    group.run_for(RECORDED);
    assert_eq!(group.row(1).used.bytes, 6 * PAGE);
    assert_eq!(group.put_pages("after", 3).err(), Some(Errno::EDQUOT));
    group.settle_and_compare().unwrap();
}
