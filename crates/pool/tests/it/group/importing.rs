//! A tree that is taken in place into a pool of several that has one member by now: members that join later have all of it.

use atoll_pool::disk::Disk;
use atoll_pool::{ImportError, import_in_place};

use super::*;
use crate::importing::make_source;
use crate::workload::{ROOT, read_file_in, write_file_in};

/// A group of one that was killed, with a tree beside its slots.
fn group_of_one(seed: u64) -> Group {
    let mut group = Group::of(1, seed, 1);
    let fs = group.fs();
    group.sim.block_on(LONG, write_file_in(&fs, ROOT, "before", "the pool's")).unwrap();
    drop(fs);
    group.await_quiet().unwrap();
    group.kill(0, InFlight::Lost);
    let disk = group.disks[0].reopen();
    group.sim.block_on(LONG, make_source(&disk)).unwrap();
    disk.kill(InFlight::Lost);
    group
}

/// Has a process import the tree, whose member's node does not run. It dies after so many calls that change the disk, if that is said.
fn import(group: &Group, at: usize, cut: Option<u64>) -> Result<bool, ImportError> {
    let disk = group.disks[at].reopen();
    let env = group.sim.outside();
    let imported = group.sim.block_on(LONG, async {
        let source = disk.node(&disk.top(), b"source").await.unwrap();
        if let Some(cut) = cut {
            disk.stop_after(cut);
        }
        import_in_place(env, disk.clone(), &source, &[], false).await
    });
    let is_cut = disk.is_stopped();
    disk.kill(InFlight::Lost);
    if is_cut {
        return Ok(true);
    }
    let report = imported.unwrap()?;
    assert_eq!(report.survey.problems_in_all, 0, "{report:?}");
    Ok(false)
}

#[test]
fn members_that_join_after_an_import_in_place_have_all_of_it() {
    // Also when it was interrupted: whoever opens the member ends it.
    let mut cuts = 0;
    for cut in (0..).step_by(9) {
        let mut group = group_of_one(cut);
        let is_cut = import(&group, 0, Some(cut)).unwrap();
        cuts += usize::from(is_cut);
        group.restart(0);
        group.await_quiet().unwrap();
        let report = group.scrub();
        let wrong = (report.set_aside, report.moved_back, report.unhealed);
        assert_eq!(wrong, (0, 0, 0), "cut off after {cut} calls: {report:?}");
        if is_cut {
            group.kill(0, InFlight::Lost);
            assert_eq!(import(&group, 0, None), Ok(false));
            group.restart(0);
            group.await_quiet().unwrap();
        }
        group.join(0).unwrap();
        group.await_quiet().unwrap();
        let fs = group.fs();
        for (name, text) in [("file", "some bytes"), ("before", "the pool's")] {
            let read = group.sim.block_on(LONG, read_file_in(&fs, ROOT, name)).unwrap();
            assert_eq!(read, text, "cut off after {cut} calls");
        }
        drop(fs);
        group
            .settle_and_compare()
            .unwrap_or_else(|wrong| panic!("cut off after {cut} calls: {wrong}"));
        if !is_cut {
            // It is no longer the only one that has the files.
            group.kill(0, InFlight::Lost);
            assert_eq!(import(&group, 0, None), Err(ImportError::HasOthers));
            break;
        }
    }
    assert!(cuts > 3, "an import calls the disk");
}
