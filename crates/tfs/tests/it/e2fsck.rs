//! The judgement of the real e2fsprogs, and of our own check.

use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use atoll_tfs::check::{CheckOptions, check};
use atoll_tfs::device::{Device, ImageDevice, OpenDeviceError};
use atoll_vfs::{FileKind, FileSystem};

use crate::access::image;
use crate::calls::{ME, ROOT, write};
use crate::kernel::mount;

/// An image, as soon as no other process has it: a tool that another test starts holds, for a
/// moment, all that this process has open.
#[allow(clippy::disallowed_methods)]
pub(crate) fn open_image(image: &Path, read_only: bool) -> Arc<ImageDevice> {
    for _ in 0..1000 {
        match ImageDevice::open(image, read_only) {
            Ok(device) => return Arc::new(device),
            Err(OpenDeviceError::Busy { .. }) => {
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
            Err(error) => panic!("{error}"),
        }
    }
    panic!("{} stays in use", image.display());
}

/// Whether e2fsck finds nothing.
pub(crate) fn is_clean(image: &[u8]) -> bool {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(image).unwrap();
    Command::new("e2fsck").arg("-fn").arg(file.path()).output().unwrap().status.success()
}

/// # Panics
/// If e2fsck or our own check find anything, with what they say.
pub(crate) fn assert_clean(image: &[u8], story: &str) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(image).unwrap();
    assert_image_clean(file.path(), story);
}

/// # Panics
/// If e2fsck or our own check find anything, with what they say.
pub(crate) fn assert_image_clean(image: &Path, story: &str) {
    let output = Command::new("e2fsck").arg("-fn").arg(image).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{story}: {said}{}", String::from_utf8_lossy(&output.stderr));
    let device: Arc<dyn Device> = open_image(image, true);
    let report = check(&device, &CheckOptions::default()).unwrap();
    assert_eq!(report.findings, [], "{story}");
}

/// The story: `atoll tfs check` called a file system sound that e2fsck rejects. Each case is a
/// field that debugfs sets in an inode, and the message of our check.
#[tokio::test]
async fn fields_of_inodes_that_e2fsck_rejects_our_check_rejects_too() {
    let cases = [
        ("file flags 0x80000", "has a tree of extents, which this file system has not"),
        ("directory flags 0x80000", "has a tree of extents, which this file system has not"),
        ("file flags 0x10000000", "keeps its data in the inode, which this file system does not"),
        ("file flags 0x1000", "is no directory and has the flag of an index"),
        ("fifo size 44", "is a special file of 44 bytes"),
        ("device size 1", "is a special file of 1 bytes"),
        ("short size 3", "of 3 bytes has an impossible target"),
        ("long size 50", "of 50 bytes has an impossible target"),
        ("long size 199", "of 199 bytes has an impossible target"),
        ("file frag 5", "has the high half of a number of blocks"),
        ("file faddr 7", "has the address of a fragment"),
        ("file file_acl 0x700000000", "has the high half of a block of attributes"),
        ("file extra_isize 200", "uses 200 bytes beyond the first 128"),
        ("file extra_isize 3", "uses 3 bytes beyond the first 128"),
        ("file extra_isize 6", "uses 6 bytes beyond the first 128"),
    ];
    let image = image(8, &["-b", "1024", "-I", "256"]);
    let (tfs, _) = mount(image.path());
    write(&tfs, ROOT, "file", &[1; 5000]).await.unwrap();
    tfs.mkdir(ME, ROOT, b"directory", 0o755).await.unwrap();
    tfs.mknod(ME, ROOT, b"fifo", FileKind::Fifo, 0o644, 0).await.unwrap();
    tfs.mknod(ME, ROOT, b"device", FileKind::CharDevice, 0o644, 0x103).await.unwrap();
    tfs.symlink(ME, ROOT, b"short", b"target").await.unwrap();
    tfs.symlink(ME, ROOT, b"long", &[b'x'; 200]).await.unwrap();
    // The longest of each kind.
    tfs.symlink(ME, ROOT, b"59 bytes", &[b'x'; 59]).await.unwrap();
    tfs.symlink(ME, ROOT, b"1023 bytes", &[b'x'; 1023]).await.unwrap();
    tfs.unmount().unwrap();
    drop(tfs);
    assert_image_clean(image.path(), "before");
    for (change, finding) in cases {
        let changed = tempfile::NamedTempFile::new().unwrap();
        std::fs::copy(image.path(), changed.path()).unwrap();
        let command = format!("set_inode_field {change}");
        let output =
            Command::new("debugfs").args(["-w", "-R", &command]).arg(changed.path()).output();
        let said = output.unwrap();
        assert!(said.status.success(), "{change}: {said:?}");
        assert!(!is_clean(&std::fs::read(changed.path()).unwrap()), "{change}: e2fsck");
        let device: Arc<dyn Device> = open_image(changed.path(), true);
        let findings = check(&device, &CheckOptions::default()).unwrap().findings;
        let texts: Vec<String> = findings.iter().map(|finding| format!("{finding:?}")).collect();
        assert!(texts.iter().any(|text| text.contains(finding)), "{change}: {texts:?}");
    }
}
