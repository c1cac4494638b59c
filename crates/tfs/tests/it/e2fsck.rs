//! The judgement of the real e2fsprogs.

use std::io::Write;
use std::path::Path;
use std::process::Command;

/// # Panics
/// If e2fsck finds anything, with what it says.
pub fn assert_clean(image: &[u8], story: &str) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(image).unwrap();
    assert_image_clean(file.path(), story);
}

/// # Panics
/// If e2fsck finds anything, with what it says.
pub fn assert_image_clean(image: &Path, story: &str) {
    let output = Command::new("e2fsck").arg("-fn").arg(image).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{story}: {said}{}", String::from_utf8_lossy(&output.stderr));
}
