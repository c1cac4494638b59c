//! Who may do what on a mounted TFS: the permissions of images, immutable files, POSIX ACLs and
//! the blocks reserved for root, as the usual tools and other users meet them.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use crate::processes::{atoll, run};

/// The story: images were made with mode 0644, so that every user of the machine could read
/// every file in them, whatever its own mode.
#[test]
fn a_new_image_is_for_its_owner_only() {
    let temp = tempfile::tempdir().expect("a directory");
    let image = temp.path().join("disk.img");
    let mode = || fs::metadata(&image).expect("it is there").permissions().mode() & 0o777;
    run(atoll().args(["tfs", "mkfs", "--size", "16MiB"]).arg(&image)).ok();
    assert_eq!(mode(), 0o600);
    // The owner may change it, and keeps the choice.
    fs::set_permissions(&image, fs::Permissions::from_mode(0o640)).expect("changed");
    run(atoll().args(["tfs", "mkfs", "--size", "16MiB", "--force"]).arg(&image)).ok();
    assert_eq!(mode(), 0o640);
}
