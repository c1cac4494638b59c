//! Everything of a volume leaves the ring, after its root was removed.

use std::sync::Arc;
use std::time::Duration;

use atoll_dht::{Blocks, GetError, PutError};
use atoll_env::{Env, sleep};
use atoll_key::kinds::{MAX_RELEASED, VolumeRelease};
use atoll_key::{BlockHash, NotAdmitted, ReadKey, SecretKey, SignedBlock};
use futures_util::stream::{self, StreamExt};

use super::reachable::blocks_below;
use super::root::Root;

/// Releases sent at once.
const AT_ONCE: usize = 8;

/// How often blocks are tried again of which not all replicas have heard.
const ATTEMPTS: u32 = 4;

/// The pause before that. What was put in the second of a release stays.
const PAUSE: Duration = Duration::from_secs(2);

/// All blocks of a version that the volume's owner can release; `None` if they are plain content blocks, which other
/// volumes may have too. An error is for people.
pub async fn releasable_blocks(
    env: Env,
    blocks: Arc<dyn Blocks>,
    (block, root): (SignedBlock, &Root),
    secret: &SecretKey,
    read_key: Option<ReadKey>,
) -> Result<Option<Vec<BlockHash>>, String> {
    if !root.mounted.has_own_blocks {
        return Ok(None);
    }
    let all = blocks_below(env, blocks, secret.volume_id(), block, read_key).await?;
    Ok(Some(all))
}

/// Releases blocks of the volume of `secret`, which needs none of them any more; how many of them not all replicas have
/// heard of. `told` hears how many are done. Nothing is released while the ring has a root of the volume.
pub async fn release_blocks(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    secret: &SecretKey,
    mut all: Vec<BlockHash>,
    told: &(dyn Fn(u64) + Sync),
) -> u64 {
    all.sort_unstable();
    all.dedup();
    let (count, mut ahead_ms) = (all.len() as u64, 0);
    for attempt in 0..ATTEMPTS {
        if all.is_empty() {
            break;
        }
        if attempt > 0 {
            sleep(&**env, PAUSE).await;
        }
        let some: Vec<_> = all.chunks(MAX_RELEASED).map(<[_]>::to_vec).collect();
        let sends = some.into_iter().map(|some| async move {
            // A second earlier: the two clocks tell it at different moments.
            let now_unix_secs = env.unix_ms().saturating_sub(ahead_ms) / 1000;
            let as_of_unix_secs = now_unix_secs.saturating_sub(1);
            // Asked after that moment: the volume may have been made anew, perhaps on another node, with the same contents.
            if let Err(error) = check_removed(blocks, secret).await {
                let all = vec![Err(error); some.len()];
                return (some, all);
            }
            let release = VolumeRelease::sign(secret, as_of_unix_secs, &some);
            let release = release.expect("no more than a release has room for");
            (some, blocks.release_blocks(release.into()).await)
        });
        let (mut left, mut done) = (Vec::new(), count - all.len() as u64);
        let mut ahead = None;
        let mut sends = stream::iter(sends).buffer_unordered(AT_ONCE);
        while let Some((some, outcomes)) = sends.next().await {
            for (hash, outcome) in some.into_iter().zip(outcomes) {
                match outcome {
                    Ok(()) => done += 1,
                    Err(error) => {
                        left.push(hash);
                        ahead = clock_ahead_ms(env, &error).or(ahead);
                    }
                }
            }
            told(done);
        }
        drop(sends);
        ahead_ms = ahead.unwrap_or(ahead_ms);
        left.sort_unstable();
        all = left;
    }
    all.len() as u64
}

/// How far this machine's clock is ahead of the node's, milliseconds and rounded up, if the node refused a release
/// as one of a time to come.
pub(super) fn clock_ahead_ms(env: &Env, error: &PutError) -> Option<u64> {
    match error {
        PutError::NotAdmitted(NotAdmitted::Clock { now_ms, .. }) => {
            Some(env.unix_ms().saturating_sub(*now_ms) + 1000)
        }
        _ => None,
    }
}

/// That the ring has no root of the volume.
async fn check_removed(blocks: &Arc<dyn Blocks>, secret: &SecretKey) -> Result<(), PutError> {
    match blocks.get_signed(secret.volume_id().root_key()).await {
        Err(GetError::Removed { .. }) => Ok(()),
        Ok(_) => Err(PutError::Unavailable("the volume is there again".into())),
        Err(error) => Err(PutError::Unavailable(error.to_string())),
    }
}
