//! Has the primary remove open names of files that are not open any more (`member/unlinked.rs`).

use std::sync::Weak;
use std::time::Duration;

use atoll_env::{Env, sleep};

use super::primary::Primary;
use crate::disk::Disk;

/// How often it looks. Names of files that are closed go at once; these are left: those that could not be removed then, and those that an
/// earlier primary gave.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// Works as long as this member is the primary.
pub(super) async fn keep_open_names<D: Disk>(primary: Weak<Primary<D>>, env: Env) {
    loop {
        sleep(&*env, LOOK_EVERY).await;
        let Some(primary) = primary.upgrade().filter(|own| !own.member.has_failed()) else {
            return;
        };
        primary.member.end_all_unlinked().await;
    }
}
