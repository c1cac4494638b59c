//! Damaged images: each fault by itself gives its clear error, and none a panic, a hang or an
//! access outside the image.

mod faults;
mod image;
mod mutate;
mod walk;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, LazyLock};

use atoll_env::{Env, TokioRuntime};
use atoll_tfs::check::{CheckError, CheckOptions, CheckReport, Damaged, check};
use atoll_tfs::device::Device;
use atoll_tfs::fs::Tfs;
use atoll_vfs::{Errno, FileKind, FileSystem, InodeNumber, OpenFlags, SeekTo};

use crate::dice::Dice;
use crate::e2fsck::is_clean;
use faults::{Fault, Shows};
use image::{Base, Layered, ME, mount, now};
use walk::walk;

/// Mutated images tried; the fuzz target `tfs/image` tries more.
const MUTANTS: u32 = 2000;

static BASE: LazyLock<Base> = LazyLock::new(|| Base::new(&env()));
static TWO_GROUPS: LazyLock<Base> = LazyLock::new(|| Base::of_two_groups(&env()));

fn env() -> Env {
    Arc::new(TokioRuntime::current())
}

fn checked(device: &Arc<dyn Device>, repair: bool) -> Result<CheckReport, CheckError> {
    let options = CheckOptions {
        repair,
        compare_tags: true,
        random: [3; 32],
        now_unix_secs: 1_700_000_000,
        ..CheckOptions::default()
    };
    check(device, &options)
}

/// Reads a path: its attributes, its names or its first bytes.
fn read(tfs: &Tfs, path: &str) -> Result<(), Errno> {
    let mut at = InodeNumber::ROOT;
    let mut kind = FileKind::Directory;
    for name in path.split('/') {
        let entry = now(tfs.lookup(ME, at, name.as_bytes()))?;
        (at, kind) = (entry.attr.inode, entry.attr.kind);
    }
    now(tfs.listxattr(at))?;
    match kind {
        FileKind::Directory => {
            let opened = now(tfs.opendir(ME, at))?;
            now(tfs.readdir(at, opened.handle, 0, 1000, true)).map(drop)
        }
        FileKind::Symlink => now(tfs.readlink(at)).map(drop),
        _ => {
            let opened = now(tfs.open(ME, at, OpenFlags::READ))?;
            now(tfs.read(at, opened.handle, 0, 1 << 20)).map(drop)
        }
    }
}

fn says(report: &CheckReport, damaged: Damaged, text: &str) -> bool {
    report.findings.iter().any(|f| f.damaged == damaged && f.text.contains(text))
}

/// Everything that is expected of a fault.
fn try_fault(fault: &Fault) {
    let name = fault.name;
    let damaged = || {
        let mut image = BASE.image();
        (fault.make)(&mut image);
        image
    };
    let device = || damaged().device();
    // Whatever it is: mounted, read and changed, nothing panics.
    if let Ok(tfs) = mount(&env(), device()) {
        walk(&tfs);
        let _ = tfs.unmount();
    }
    match fault.shows {
        Shows::AtMount(text) => {
            let error = mount(&env(), device()).expect_err(name).to_string();
            assert!(error.contains(text), "{name}: {error}");
            let _ = checked(&device(), false);
        }
        Shows::Quietly(text) => {
            let report = checked(&device(), true).expect(name);
            assert!(says(&report, Damaged::Ext2, text), "{name}: {:#?}", report.findings);
        }
        Shows::InExt2(text) | Shows::AtPath(text, ..) => {
            let report = checked(&device(), true).expect(name);
            assert!(says(&report, Damaged::Ext2, text), "{name}: {:#?}", report.findings);
            assert!(report.findings.iter().all(|f| !f.repaired), "{name}: e2fsck's matter");
            assert!(!is_clean(&damaged().bytes), "{name}: e2fsck finds nothing");
        }
        Shows::InRecords(text) | Shows::Lost(text, ..) => {
            assert!(is_clean(&damaged().bytes), "{name}: ext2 is sound");
            let device = device();
            let report = checked(&device, true).expect(name);
            assert!(says(&report, Damaged::Records, text), "{name}: {:#?}", report.findings);
            assert!(report.is_sound(), "{name}: {:#?}", report.findings);
            let again = checked(&device, false).expect(name);
            assert_eq!(again.findings, [], "{name}: after a repair");
            let tfs = mount(&env(), device.clone()).expect(name);
            let walked = walk(&tfs);
            assert_eq!(tfs.failure(), None, "{name}: {walked:?}");
            tfs.unmount().unwrap();
            assert_eq!(checked(&device, false).expect(name).findings, [], "{name}: used");
        }
    }
    if let Shows::AtPath(_, path, errno) | Shows::Lost(_, path, errno) = fault.shows {
        let tfs = mount(&env(), device()).expect(name);
        assert_eq!(read(&tfs, path), Err(errno), "{name}");
    }
}

#[tokio::test]
async fn each_fault_gives_its_clear_error() {
    let (mut count, mut failed) = (0, Vec::new());
    for fault in faults::all() {
        // All of them are tried, each says for itself what is wrong.
        if catch_unwind(AssertUnwindSafe(|| try_fault(fault))).is_err() {
            failed.push(fault.name);
        }
        count += 1;
    }
    assert!(failed.is_empty(), "{failed:?}");
    assert!(count >= 100, "{count}");
}

#[tokio::test]
async fn the_sound_image_is_sound() {
    let device = BASE.image().device();
    let report = checked(&device, false).unwrap();
    assert_eq!(report.findings, []);
    assert_eq!((report.transparent_files, report.lost_files), (2, 0));
    assert!(report.has_records && !report.foreign);
    assert!(is_clean(&BASE.bytes) && is_clean(&TWO_GROUPS.bytes));
    let layered = Arc::new(Layered::over(BASE.bytes.clone()));
    let tfs = mount(&env(), layered.clone()).unwrap();
    let walked = walk(&tfs);
    assert!(walked.files > 130, "{walked:?}");
    assert_eq!(tfs.failure(), None);
    tfs.unmount().unwrap();
    assert_eq!(checked(&(layered.clone() as _), false).unwrap().findings, []);
    assert!(is_clean(&layered.bytes()), "after a walk");
}

/// Pointers that lead back to their own block reach as far as a length says, which would be all
/// of memory.
#[tokio::test]
async fn a_file_whose_pointers_lead_in_a_circle_is_no_longer_than_the_disk() {
    let mut image = BASE.image();
    let table = image.u32(image.pointer("dir/large", 12));
    let (at, triple) = (image.block(table), image.pointer("dir/large", 14));
    (0..256).for_each(|index| image.put32(at + 4 * index, table));
    image.put32(triple, table);
    let size = image.inode_of("dir/large", 4);
    image.put32(size, 0);
    image.put32(size + 104, 4);
    let tfs = mount(&env(), image.device()).unwrap();
    let dir = now(tfs.lookup(ME, InodeNumber::ROOT, b"dir")).unwrap().attr.inode;
    let large = now(tfs.lookup(ME, dir, b"large")).unwrap().attr;
    assert_eq!(large.size_bytes, 4 << 32);
    assert_eq!(tfs.file_extents(large.inode), Err(Errno::EIO));
    let handle = now(tfs.open(ME, large.inode, OpenFlags::READ)).unwrap().handle;
    assert_eq!(now(tfs.read(large.inode, handle, 3 << 32, 4096)).map(|b| b.len()), Ok(4096));
    let hole = now(tfs.seek(large.inode, handle, 3 << 32, SeekTo::Hole));
    assert_eq!(hole, Err(Errno::EIO), "data without end");
    now(tfs.close(large.inode, handle)).unwrap();
    assert_eq!(now(tfs.unlink(ME, dir, b"large")), Ok(()));
    tfs.forget(large.inode, 1);
    assert!(tfs.failure().is_some_and(|why| why.contains("damaged")), "{:?}", tfs.failure());
}

#[tokio::test]
async fn records_without_a_header_are_made_anew() {
    let mut image = BASE.image();
    for copy in 0..2 {
        let at = image.header(copy);
        image.put32(at, 0);
    }
    let device = image.device();
    let report = checked(&device, true).unwrap();
    assert!(says(&report, Damaged::Records, "no copy of their header") && report.is_sound());
    let again = checked(&device, false).unwrap();
    assert_eq!((&again.findings[..], again.lost_files), (&[][..], 2), "their data is gone");
    let tfs = mount(&env(), device.clone()).unwrap();
    assert_eq!(read(&tfs, "contributed/t0"), Err(Errno::ENOENT));
    assert_eq!(read(&tfs, "dir/large"), Ok(()));
    tfs.unmount().unwrap();
    assert_eq!(checked(&device, false).unwrap().findings, []);
}

#[tokio::test]
async fn what_was_not_unmounted_is_mounted_before_it_is_checked() {
    let device: Arc<dyn Device> = Arc::new(Layered::over(BASE.bytes.clone()));
    let tfs = mount(&env(), device.clone()).unwrap();
    now(tfs.mkdir(ME, InodeNumber::ROOT, b"new", 0o755)).unwrap();
    now(tfs.sync()).unwrap();
    drop(tfs);
    assert!(matches!(checked(&device, true), Err(CheckError::NeedsRecovery)));
    mount(&env(), device.clone()).unwrap().unmount().unwrap();
    assert_eq!(checked(&device, false).unwrap().findings, []);
}

/// What a crash left in the journal is brought home, and only then known: the records of before
/// were used for a file system of other size.
#[tokio::test]
async fn a_journal_that_changes_the_size_of_the_file_system_is_refused() {
    // Bytes of the superblock: the volume's name, blocks, blocks in a group with inodes. Of the
    // descriptor behind it: what is free in the group.
    let cases: [(&str, &[(usize, u32)]); 3] = [
        ("", &[(120, 0x4141_4141)]),
        ("size", &[(4, 3000), (12, 100), (1024 + 12, 100 << 16 | 100)]),
        ("size", &[(32, 2048), (36, 2048), (0, 1024), (1024 + 12, 100 << 16 | 100)]),
    ];
    for (expected, fields) in cases {
        let mut image = BASE.image();
        for (at, value) in fields {
            let at = image.superblock(*at);
            image.put32(at, *value);
        }
        image.journaled();
        match mount(&env(), image.device()) {
            Ok(tfs) => {
                assert_eq!(expected, "", "{fields:?}");
                assert_eq!(read(&tfs, "contributed/t0"), Ok(()));
                tfs.unmount().unwrap();
            }
            Err(error) => {
                let said = error.to_string();
                assert!(!expected.is_empty() && said.contains(expected), "{fields:?}: {said}");
            }
        }
    }
}

/// One to four changes, of numbers that lie.
fn changes(dice: &mut Dice) -> Vec<u8> {
    const LIES: [u32; 8] = [0, 1, 2, 0xff, 0x7fff, 0xffff, 0x7fff_ffff, u32::MAX];
    let mut bytes = Vec::new();
    for _ in 0..1 + dice.below(4) {
        let value = match dice.below(3) {
            0 => dice.next() as u32,
            1 => dice.below(5000) as u32,
            _ => LIES[dice.below(8) as usize],
        };
        bytes.extend_from_slice(&dice.next().to_le_bytes()[..4]);
        // A cut is rare.
        if dice.below(16) > 0 {
            let last = bytes.len() - 4;
            bytes[last] &= 0x7f;
        }
        bytes.extend_from_slice(&value.to_le_bytes());
    }
    bytes
}

#[tokio::test]
async fn mutated_images_are_walked_to_an_end() {
    let mut dice = Dice::new(1);
    let mut accepted = 0;
    for n in 0..MUTANTS {
        let changes = changes(&mut dice);
        let base = if n % 8 == 0 { &TWO_GROUPS } else { &BASE };
        accepted += u32::from(mutate::try_device(&env(), &mutate::damaged(base, &changes)));
    }
    assert!(accepted > MUTANTS / 4, "{accepted} of {MUTANTS} were mounted");
    assert!(accepted < MUTANTS, "some are damaged");
}
