//! A volume as a [`FileSystem`](atoll_vfs::FileSystem).

use std::sync::Arc;

use atoll_env::Env;

use super::read::Volume;

/// A volume, as the kernel sees it. Read-only.
pub struct VolumeFs {
    _volume: Arc<Volume>,
}

impl VolumeFs {
    /// Serves `volume`; all files appear as owned by `uid` and `gid`.
    pub fn new(env: Env, volume: Arc<Volume>, uid: u32, gid: u32) -> VolumeFs {
        let _ = (env, uid, gid);
        VolumeFs { _volume: volume }
    }
}
