//! Volumes and mounts of several users, for tests.

use std::sync::Arc;
use std::time::Duration;

use atoll_dht::Blocks;
use atoll_env::{Env, TokioRuntime};
use atoll_key::SecretKey;
use atoll_volume::keep::Keep;
use atoll_volume::shared::access::{self, NewVolume, VolumeRecord, groups};
use atoll_volume::shared::{SharedFs, SharedOptions};

pub(super) fn env() -> Env {
    Arc::new(TokioRuntime::current())
}

pub(super) fn volume() -> SecretKey {
    SecretKey::from_seed(&[7; 32])
}

pub(super) fn user(number: u8) -> SecretKey {
    SecretKey::from_seed(&[number; 32])
}

/// Makes a volume that users 1 to 9 may write.
pub(super) async fn created(env: &Env, blocks: &Arc<dyn Blocks>) {
    created_with(env, blocks, false).await;
}

/// The same; only they can read an encrypted one.
pub(super) async fn created_with(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    is_encrypted: bool,
) -> VolumeRecord {
    created_keeping(env, blocks, is_encrypted, Keep::default()).await
}

/// The same; old versions are kept as `keep` says.
pub(super) async fn created_keeping(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    is_encrypted: bool,
    keep: Keep,
) -> VolumeRecord {
    let options = NewVolume {
        label: "test".into(),
        member_label: "1".into(),
        block_size_log2: 16,
        owner: (0, 0),
        mode: 0o755,
        is_encrypted,
        keep,
    };
    let (volume, maker) = (volume(), user(1));
    let made = access::create(env, blocks, &volume, &maker, &options).await;
    let record = made.expect("memory takes it");
    for number in 2..=9 {
        let member = (user(number).user_id(), "");
        let added = groups::add_volume_member(env, blocks, (&volume, &record), member, 0).await;
        added.expect("memory takes it");
    }
    record
}

/// A mount of a user that shows nothing old.
pub(super) async fn mounted(env: &Env, blocks: &Arc<dyn Blocks>, number: u8) -> SharedFs {
    let options = SharedOptions { names_max_age: Duration::ZERO, ..SharedOptions::default() };
    mounted_with(env, blocks, number, options).await
}

pub(super) async fn mounted_with(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    number: u8,
    options: SharedOptions,
) -> SharedFs {
    let (id, user) = (volume().volume_id(), Some(user(number)));
    SharedFs::open(env.clone(), blocks.clone(), id, user, options).await.expect("mounts")
}
