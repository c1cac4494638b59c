//! The list of what a command could not do, at its end.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use serde::Serialize;

use crate::messages::note;
use crate::output::{escaped, json_text};

/// Lines shown to people; JSON has more.
const MAX_SHOWN: usize = 20;

/// Says on standard error each thing that is missing, and how many more there are.
pub(crate) fn say(lines: impl ExactSizeIterator<Item = String>, count: u64) {
    let shown = lines.len().min(MAX_SHOWN) as u64;
    lines.take(MAX_SHOWN).for_each(|line| note!("{line}"));
    if count > shown {
        note!(
            "… and {} more; --json names up to {}",
            count - shown,
            atoll_volume::owned::MAX_LISTED
        );
    }
}

/// A path for a terminal.
pub(crate) fn shown(path: &Path) -> String {
    escaped(path.as_os_str().as_bytes())
}

/// One thing in JSON. The path is text, and its exact bytes in hexadecimal where text cannot
/// hold them.
#[derive(Serialize)]
pub(crate) struct JsonMissing {
    /// What has become of it.
    what: &'static str,
    path: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    path_hex: Option<String>,
    reason: String,
}

impl JsonMissing {
    /// Of this path.
    pub(crate) fn new(what: &'static str, path: &[u8], reason: impl ToString) -> JsonMissing {
        let (path, path_hex) = json_text(path);
        JsonMissing { what, path, path_hex, reason: reason.to_string() }
    }
}
