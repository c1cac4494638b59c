//! Access control in the commands of `atoll tfs`: `mkfs` sets the mode of an image, `set` keeps
//! a file's lists and attributes, and where `clean` runs.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use crate::processes::{atoll, can_mount, run};
use crate::tfs::Mounted;

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

/// The story: `atoll tfs set` copied a file's mode without its access control list. The mask of
/// the list, shown as the group's permissions, became the group's.
#[test]
fn a_file_made_transparent_keeps_its_list_and_attributes() {
    let story = "a_file_made_transparent_keeps_its_list_and_attributes";
    if !can_mount(story) {
        return;
    }
    if Command::new("setfacl").arg("--version").output().is_err() {
        return eprintln!("SKIPPED: {story}: setfacl is not installed (package acl)");
    }
    let temp = tempfile::tempdir().expect("a directory");
    let [image, at] = ["disk.img", "mnt"].map(|name| temp.path().join(name));
    run(atoll().args(["tfs", "mkfs", "--size", "64MiB"]).arg(&image)).ok();
    let mount = Mounted::new(&image, &at);
    let file = at.join("file");
    fs::write(&file, b"contents").expect("written");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).expect("changed");
    run(Command::new("setfacl").args(["-m", "u:1000:rw"]).arg(&file)).ok();
    run(Command::new("setfattr").args(["-n", "user.colour", "-v", "blue"]).arg(&file)).ok();
    let list = || run(Command::new("getfacl").args(["-cpn"]).arg(&file)).ok().stdout;
    let before = list();
    assert!(before.contains("user:1000:rw-\ngroup::---\nmask::rw-"), "{before}");
    run(atoll().args(["tfs", "set", "--transparent"]).arg(&file)).ok();
    assert_eq!(list(), before);
    let shown = run(Command::new("getfattr").args(["--absolute-names", "-d"]).arg(&file)).ok();
    assert!(shown.stdout.contains("user.colour=\"blue\""), "{shown:?}");
    assert!(shown.stdout.contains("user.tfs.transparent=\"1\""), "{shown:?}");
    assert_eq!(fs::read(&file).expect("it is there"), b"contents");
    mount.unmount();
}

#[test]
fn a_file_system_is_cleaned_by_its_mount_point() {
    if !can_mount("a_file_system_is_cleaned_by_its_mount_point") {
        return;
    }
    let temp = tempfile::tempdir().expect("a directory");
    let [image, at] = ["disk.img", "mnt"].map(|name| temp.path().join(name));
    run(atoll().args(["tfs", "mkfs", "--size", "64MiB"]).arg(&image)).ok();
    run(atoll().args(["tfs", "clean"]).arg(temp.path())).failed(4, &["not on a mounted TFS"]);
    let mount = Mounted::new(&image, &at);
    run(atoll().args(["tfs", "clean"]).arg(&at)).ok();
    fs::create_dir(at.join("below")).expect("made");
    run(atoll().args(["tfs", "clean"]).arg(at.join("below"))).failed(2, &["Name the mount point"]);
    mount.unmount();
}
