//! The kit's tree through the kernel, both ways.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use atoll_gateway::fuse::MountOptions;
use atoll_vfs::kit::{CompareOptions, Tree, compare_trees, write_tree_to_disk, write_tree_to_fs};

use crate::place::{Place, memory};

fn assert_same(a: &std::path::Path, b: &std::path::Path) {
    let options = CompareOptions { modes: true, mtimes: true, xattrs: true };
    let found = compare_trees(a, b, options, |_| {}).unwrap();
    assert!(found.is_same(), "{} differences: {:#?}", found.difference_count, found.differences);
    assert!(found.files > 3000);
}

#[test]
fn a_tree_reads_through_the_kernel_as_it_is() {
    let tree = Tree::fixture();
    let disk = tempfile::tempdir().unwrap();
    write_tree_to_disk(&tree, disk.path()).unwrap();
    // With caching as for contents that never change: read twice, the second time cached.
    let options = MountOptions { read_only: true, ..MountOptions::default() };
    let place = Place::with(&options, |runtime| {
        let fs = memory(runtime).caching(Duration::from_secs(3600), true);
        runtime.block_on(write_tree_to_fs(&tree, &fs)).unwrap();
        fs.set_read_only(true);
        Arc::new(fs)
    });
    let Some(place) = place else { return };
    assert_same(disk.path(), place.path());
    assert_same(disk.path(), place.path());
    let refused = fs::write(place.join("file"), "x").unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(30));
    let refused = fs::create_dir(place.join("new")).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(30));
    place.unmount();
}

#[test]
fn a_tree_written_through_the_kernel_is_kept() {
    let tree = Tree::fixture();
    let disk = tempfile::tempdir().unwrap();
    write_tree_to_disk(&tree, disk.path()).unwrap();
    let Some(place) = Place::memory() else { return };
    write_tree_to_disk(&tree, place.path()).unwrap();
    assert_same(disk.path(), place.path());
    place.unmount();
}
