//! A whole file system on a hostile disk.
//!
//! An input is a list of changes to a small sound image that has one of everything, 8 bytes
//! each: which structure, where in it (2), how many bytes, whether checksums are made right
//! afterwards and whether all of it stands in the journal, and the new bytes (4); see `corrupt/mutate.rs` in the tests of `atoll-tfs`, whose
//! image, walk and changes these are. The target mounts the image, reads all of it, changes
//! files and names, unmounts it, checks and repairs it, on a device that panics when a call
//! reaches beyond its end.

use std::sync::{Arc, LazyLock};

use atoll_env::Env;
use atoll_sim::{Sim, SimConfig};

use super::{Target, target};

#[path = "../../../crates/tfs/tests/it/corrupt/image.rs"]
#[allow(dead_code, reason = "the catalogue of faults uses the rest")]
mod image;
#[path = "../../../crates/tfs/tests/it/corrupt/mutate.rs"]
mod mutate;
#[path = "../../../crates/tfs/tests/it/corrupt/walk.rs"]
#[allow(dead_code, reason = "tests look at what a walk met")]
mod walk;

static BASE: LazyLock<image::Base> = LazyLock::new(|| with_env(image::Base::new));
static TWO_GROUPS: LazyLock<image::Base> = LazyLock::new(|| with_env(image::Base::of_two_groups));

fn with_env<T>(work: impl FnOnce(&Env) -> T) -> T {
    let sim = Sim::new(SimConfig::default());
    work(&sim.outside())
}

/// A change of four bytes, with the checksums made right.
fn change(region: u8, offset: u16, value: u32) -> Vec<u8> {
    change_as(0x82, region, offset, value)
}

/// The same, of a file system that crashed: the change stands in the journal.
fn journaled(region: u8, offset: u16, value: u32) -> Vec<u8> {
    change_as(0xe2, region, offset, value)
}

/// A number that could be a block's or an inode's.
fn number(region: u8, offset: u16, value: u32) -> Vec<u8> {
    change_as(0x83, region, offset, value)
}

fn change_as(how: u8, region: u8, offset: u16, value: u32) -> Vec<u8> {
    let mut bytes = vec![region, offset as u8, (offset >> 8) as u8, how];
    bytes.extend_from_slice(&value.to_le_bytes());
    assert_eq!(bytes.len(), mutate::CHANGE_BYTES);
    bytes
}

pub(super) fn targets() -> Vec<Target> {
    let seeds = vec![
        Vec::new(),
        // The volume's name, an inode's owner, a directory's entry.
        [change(0, 120, 0x4141_4141), change(6, 2, 7), change(21, 40, 400)].concat(),
        // A summary, an extent, a map, a bitmap of transparent blocks.
        [change(13, 0, 3), change(14, 8, 4), change(15, 12, 9), change(11, 8, 0xff)].concat(),
        // A block of attributes, a block of pointers.
        [change(17, 34, 900), change(25, 16, 50), change(26, 0, 60)].concat(),
        [journaled(0, 120, 0x4141_4141), journaled(6, 2, 7), journaled(21, 40, 400)].concat(),
        [number(6, 40, 900), number(6, 256 + 44, 60), number(25, 16, 100)].concat(),
    ];
    let of_two_groups = vec![
        Vec::new(),
        // The second group: its descriptor, bitmap, summary and bitmap of transparent blocks.
        [change(29, 12, 0x0100_0100), change(32, 0, 3), change(33, 100, 0xff)].concat(),
        [number(30, 40, 9), journaled(31, 4, 1), number(34, 8, 0)].concat(),
    ];
    let one = image_target("tfs/image", seeds, &BASE);
    let two = image_target("tfs/groups", of_two_groups, &TWO_GROUPS);
    // Two copies of the image of 4 or of 12 MiB, what was written over it, the caches of mount
    // and check.
    vec![
        Target { fixed_bytes: 64 << 20, factor: 64, ..one },
        Target { fixed_bytes: 96 << 20, factor: 64, ..two },
    ]
}

fn image_target(
    name: &'static str,
    seeds: Vec<Vec<u8>>,
    base: &'static LazyLock<image::Base>,
) -> Target {
    target(name, seeds, |input| {
        let device = mutate::damaged(base, input);
        with_env(|env| mutate::try_device(env, &Arc::clone(&device)))
    })
}
