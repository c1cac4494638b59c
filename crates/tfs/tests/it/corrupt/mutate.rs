//! Mutated images: bytes are changed at random where something is read, checksums are put right
//! again or not, the changes put into the journal of a file system that crashed or not; then the
//! image is mounted, walked through and checked.

use std::sync::Arc;

use atoll_env::Env;
use atoll_tfs::check::{CheckOptions, check};
use atoll_tfs::device::Device;

use super::image::{BLOCK, Base, Image, mount};
use super::walk::walk;

/// Bytes of one change: where (region, offset), how, and what.
pub(super) const CHANGE_BYTES: usize = 8;

/// Where something is read, as ranges of the image.
fn regions(image: &Image<'_>) -> Vec<(usize, usize)> {
    let layout = image.layout();
    let block = |number: u32| (image.block(number), BLOCK);
    let record = |number: u32| block(image.records_block(number));
    let mut regions = vec![
        (1024, 400),
        (image.descriptor(0), 32),
        (image.block_bitmap(), 512),
        (image.inode_bitmap(), 64),
        (image.inode(2, 0), 128),
        (image.inode(5, 0), 128),
        (image.inode(11, 0), 20 * 256),
        record(0),
        record(1),
        record(layout.journal_area(0)),
        record(layout.journal_area(1)),
        record(layout.transparent_bitmap(0)),
        record(layout.overwritten_bitmap(0)),
        (image.place(layout.summary(0)), 64),
        (image.extent_head("contributed/t0"), 16),
        (image.map_entry("contributed/t0"), 32),
        (image.map_entry("contributed/t1"), 32),
        block(image.u32(image.inode_of("attr", 104))),
        block(image.u32(image.inode(5, 40 + 48))),
        block(image.u32(image.inode(5, 40 + 52))),
    ];
    for path in ["", "dir", "dir/sub", "many", "contributed"] {
        regions.push(block(image.u32(image.pointer(path, 0))));
    }
    for index in [12, 13] {
        regions.push(block(image.u32(image.pointer("dir/large", index))));
    }
    regions.push(record(layout.tag(image.first_extent("contributed/t0")).block));
    regions.push((image.extent_head("contributed/t1"), 16));
    if image.groups() > 1 {
        regions.push((image.descriptor(32), 32));
        regions.push((image.block(image.u32(image.descriptor(32))), BLOCK));
        regions.push((image.block(image.u32(image.descriptor(36))), 64));
        regions.push((image.place(layout.summary(1)), 64));
        regions.push(record(layout.transparent_bitmap(1)));
        regions.push(record(layout.overwritten_bitmap(1)));
    }
    regions
}

/// Applies changes of [`CHANGE_BYTES`] each to a copy of the image.
pub(super) fn damaged(base: &Base, changes: &[u8]) -> Arc<dyn Device> {
    let mut image = base.image();
    let regions = regions(&image);
    let mut right_again = false;
    let mut journaled = false;
    let mut cut = None;
    for change in changes.chunks_exact(CHANGE_BYTES) {
        let offset = usize::from(u16::from_le_bytes([change[1], change[2]]));
        if change[0] == 0xff {
            cut = Some(offset * 64);
            continue;
        }
        let (start, len) = regions[usize::from(change[0]) % regions.len()];
        let at = start + offset % len;
        match change[3] & 3 {
            // A number that may be a block's, or an inode's, where one may stand.
            3 => {
                let value = u32::from_le_bytes([change[4], change[5], change[6], change[7]]);
                let blocks = (image.bytes.len() / BLOCK) as u32;
                image.put32(at & !3, value % blocks);
            }
            log => {
                let width = 1 << log;
                image.bytes[at..at + width].copy_from_slice(&change[4..4 + width]);
            }
        }
        right_again |= change[3] & 0x80 != 0;
        journaled |= change[3] & 0x60 == 0x60;
    }
    if right_again {
        put_checksums_right(base, &mut image);
    }
    if journaled {
        image.journaled();
    }
    if let Some(len) = cut {
        image.bytes.truncate(len);
    }
    image.device()
}

/// As an attacker would who knows the format. Places are those of the sound image.
fn put_checksums_right(base: &Base, image: &mut Image<'_>) {
    let sound = base.image();
    for copy in 0..2 {
        let at = sound.header(copy);
        let checksum = crc32fast::hash(&image.bytes[at..at + 508]);
        image.put32(at + 508, checksum);
    }
    for group in 0..sound.groups() {
        let summary = sound.place(sound.layout().summary(group));
        let checksum = crc32fast::hash(&image.bytes[summary..summary + 60]);
        image.put32(summary + 60, checksum);
    }
    for path in ["contributed/t0", "contributed/t1"] {
        let entry = sound.map_entry(path);
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&sound.number(path).to_le_bytes());
        hasher.update(&image.bytes[entry..entry + 28]);
        image.put32(entry + 28, hasher.finalize());
    }
}

/// Mounts, walks, checks and repairs; whether it could be mounted. The test is that it
/// returns.
pub(super) fn try_device(env: &Env, device: &Arc<dyn Device>) -> bool {
    let mounted = mount(env, device.clone());
    let accepted = mounted.is_ok();
    if let Ok(tfs) = mounted {
        walk(&tfs);
        let _ = tfs.unmount();
    }
    let options = CheckOptions {
        repair: true,
        compare_tags: true,
        random: [3; 32],
        now_unix_secs: 1_700_000_000,
        ..CheckOptions::default()
    };
    let _ = check(device, &options);
    accepted
}
