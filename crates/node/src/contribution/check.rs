//! Whether this node can give disk as a policy says.

use atoll_dht::Share;
use atoll_store::{BlockStore, FileStore, Space};

use super::controller::ContributionController;
use crate::config::MIN_STORAGE_BYTES;
use crate::policy::{Place, Policy};

impl ContributionController {
    /// Why this node cannot give disk by `policy`, for people. Waits for the disk.
    pub(super) fn check_policy(&self, policy: &Policy, place: &Place) -> Result<(), String> {
        let space = Space::of(self.dir.root()).map_err(|error| error.to_string())?;
        match policy {
            Policy::Fixed { size_bytes } => {
                if *size_bytes < MIN_STORAGE_BYTES {
                    let least = MIN_STORAGE_BYTES >> 20;
                    return Err(format!(
                        "{} is too little; give at least {least} MiB",
                        size(*size_bytes)
                    ));
                }
                if *size_bytes > space.total_bytes {
                    return Err(format!(
                        "{} is more than the disk has: {}",
                        size(*size_bytes),
                        size(space.total_bytes)
                    ));
                }
                let held_bytes = self.store.usage().block_bytes;
                if self.is_only_holder() && held_bytes > *size_bytes {
                    return Err(format!(
                        "{} of blocks are held here and nowhere else; give at least that",
                        size(held_bytes)
                    ));
                }
                Ok(())
            }
            Policy::Dynamic { low, high } => {
                if low.millionths() == 0 || low > high {
                    return Err(format!(
                        "the lower watermark ({}) must be above 0 and at most the upper one ({})",
                        percent(*low),
                        percent(*high)
                    ));
                }
                Ok(())
            }
            Policy::Transparent { dir } => {
                if !dir.is_absolute() {
                    return Err(format!("{} is no absolute path", dir.display()));
                }
                if Place::of_backend(&self.store.present()) == *place {
                    return Ok(());
                }
                FileStore::check_reopen(&place.index_dir(&self.dir), dir, self.flag)
                    .map_err(|error| error.to_string())
            }
        }
    }
}

/// A size for a person.
fn size(bytes: u64) -> String {
    match bytes {
        0..0x400 => format!("{bytes} bytes"),
        0x400..0x10_0000 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        0x10_0000..0x4000_0000 => format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
        _ => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

fn percent(share: Share) -> String {
    format!("{}%", f64::from(share.millionths()) / 1e4)
}
