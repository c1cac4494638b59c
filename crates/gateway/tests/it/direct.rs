//! Direct input and output (`O_DIRECT`) beside the kernel's cache.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::thread;

use atoll_gateway::fuse::MountOptions;

use crate::concurrency::{Script, scripted};
use crate::raw::{Page, write_asynchronously};

fn open_direct(path: &std::path::Path) -> File {
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path).unwrap()
}

/// The story (xfstests generic/451): a reader brought a page into the cache while an asynchronous
/// direct write of it was under way, and all readers were given that page from then on. The kernel
/// takes what direct writes replace out of its cache when a synchronous one ends, and when an
/// asynchronous one begins, but not when that ends.
#[test]
fn an_asynchronous_direct_write_is_seen_by_who_read_meanwhile() {
    let Some(Script { place, gate, mut waiting, .. }) = scripted(&MountOptions::default()) else {
        return;
    };
    let path = place.join("held");
    let writer = open_direct(&path);
    let writing = thread::spawn(move || write_asynchronously(&writer, &Page([7; 4096]), 0));
    place.runtime().block_on(waiting.wait_for(|begun| *begun >= 1)).unwrap();
    let reader = File::open(&path).unwrap();
    let mut byte = [1];
    reader.read_exact_at(&mut byte, 0).unwrap();
    assert_eq!(byte, [0], "not yet written");
    gate.send(true).unwrap();
    assert_eq!(writing.join().unwrap().unwrap(), 4096);
    reader.read_exact_at(&mut byte, 0).unwrap();
    assert_eq!(byte, [7], "through the file that was open");
    File::open(&path).unwrap().read_exact_at(&mut byte, 0).unwrap();
    assert_eq!(byte, [7], "through a new one");
    drop(reader);
    place.unmount();
}

/// The story (xfstests generic/299): a direct write that a full disk had room for a part of was
/// `EIO`, because the kernel takes a short answer to a write that it sent asynchronously for one.
#[test]
fn a_direct_write_that_fills_the_disk_is_short_and_the_next_is_enospc() {
    let Some(Script { place, .. }) = scripted(&MountOptions::default()) else { return };
    let file = open_direct(&place.join("one page"));
    let pages = [Page([7; 4096]), Page([8; 4096])];
    let bytes: Vec<_> = pages.iter().map(|page| std::io::IoSlice::new(&page.0)).collect();
    assert_eq!(rustix::io::pwritev(&file, &bytes, 0), Ok(4096));
    let full = file.write_at(&pages[1].0, 4096).unwrap_err();
    assert_eq!(full.raw_os_error(), Some(libc::ENOSPC));
    let full = write_asynchronously(&file, &pages[1], 4096).unwrap_err();
    assert_eq!(full.raw_os_error(), Some(libc::ENOSPC));
    drop(file);
    place.unmount();
}
