//! The judgement of the real e2fsprogs, and of our own check.

use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use atoll_tfs::check::{CheckOptions, check};
use atoll_tfs::device::{Device, ImageDevice, OpenDeviceError};

/// An image, as soon as nobody else has it: a tool that another test starts holds, for a moment,
/// all that this process has open.
#[allow(clippy::disallowed_methods)]
pub fn open_image(image: &Path, read_only: bool) -> Arc<ImageDevice> {
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
pub fn is_clean(image: &[u8]) -> bool {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(image).unwrap();
    Command::new("e2fsck").arg("-fn").arg(file.path()).output().unwrap().status.success()
}

/// # Panics
/// If e2fsck or our own check find anything, with what they say.
pub fn assert_clean(image: &[u8], story: &str) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(image).unwrap();
    assert_image_clean(file.path(), story);
}

/// # Panics
/// If e2fsck or our own check find anything, with what they say.
pub fn assert_image_clean(image: &Path, story: &str) {
    let output = Command::new("e2fsck").arg("-fn").arg(image).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{story}: {said}{}", String::from_utf8_lossy(&output.stderr));
    let device: Arc<dyn Device> = open_image(image, true);
    let report = check(&device, &CheckOptions::default()).unwrap();
    assert_eq!(report.findings, [], "{story}");
}
