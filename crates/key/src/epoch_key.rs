//! The read keys of a shared volume: one for each epoch, and how the owner gives them to users.
//!
//! A member who is removed at once must not read what is written afterwards, so the volume gets a new
//! [`ReadKey`] then: a new *epoch*. The keys are a chain of hashes, the last one first: the key of an
//! epoch gives those of all epochs before it, and none after it (key regression: Fu, Kamara and Kohno,
//! "Key Regression: Enabling Efficient Key Distribution for Secure Distributed Storage", NDSS 2006). So a
//! reader needs one key, a new reader can read what is old, and the owner keeps nothing but the volume's
//! secret key, from which the last key of the chain follows.
//!
//! A key is sealed to a user with what the volume's key and the user's key agree on (X25519):
//!
//! | bytes | field |
//! |---|---|
//! | 24 | tag: the first bytes of BLAKE3, keyed with the tag key, of the read key |
//! | 32 | the read key, encrypted by XChaCha20 with the cipher key and the tag as nonce |
//!
//! Both keys are BLAKE3 in key-derivation mode, each under its own context, of the agreed secret (32
//! bytes), the volume's and the user's public key (32 bytes each) and the epoch (4 bytes, big-endian).
//! Nobody else can make or open it. The secret key of a volume's default group is sealed to a keeper in the same way, under
//! contexts of its own.

use crate::identity::{SecretKey, UserId, VolumeId};
use crate::read_key::{Keys, ReadKey, TAG_BYTES};

/// How many epochs a volume has: epochs 0 to 4,095. A guess: a removal a day for eleven years; a key is
/// found in as many hashes at most.
pub const MAX_EPOCHS: u32 = 4096;

/// Bytes of a read key that is sealed to a user.
pub const SEALED_KEY_BYTES: usize = TAG_BYTES + 32;

const LAST: &str = "atoll v1 last read key of a shared volume";
const BEFORE: &str = "atoll v1 read key of the epoch before";
const USER_TAG: &str = "atoll v1 tag of a read key for a user";
const USER_CIPHER: &str = "atoll v1 cipher of a read key for a user";
const GROUP_TAG: &str = "atoll v1 tag of a group's key for a keeper";
const GROUP_CIPHER: &str = "atoll v1 cipher of a group's key for a keeper";

impl ReadKey {
    /// The read key of an epoch of a shared volume, for its owner. `None` for epochs from [`MAX_EPOCHS`]
    /// on.
    pub fn of_epoch(volume: &SecretKey, epoch: u32) -> Option<ReadKey> {
        let steps = (MAX_EPOCHS - 1).checked_sub(epoch)?;
        let last = ReadKey::from_bytes(blake3::derive_key(LAST, &volume.seed()));
        Some(last.back(steps))
    }

    /// The read key of so many epochs before this one's.
    pub fn back(&self, epochs: u32) -> ReadKey {
        let before = blake3::Hasher::new_derive_key(BEFORE);
        let step = |key: [u8; 32], _| *before.clone().update(&key).finalize().as_bytes();
        ReadKey::from_bytes((0..epochs).fold(*self.bytes(), step))
    }

    /// Seals the read key of an epoch to a user. `None` if the user's key is no key.
    pub fn seal_to(
        &self,
        user: &UserId,
        volume: &SecretKey,
        epoch: u32,
    ) -> Option<[u8; SEALED_KEY_BYTES]> {
        let agreed = volume.agree(&user.0)?;
        let contexts = [USER_TAG, USER_CIPHER];
        let sealed = keys(contexts, &agreed, &volume.volume_id(), user, epoch);
        Some(sealed.seal_inner(self.bytes()).try_into().expect("so long"))
    }

    /// Opens what the volume's owner has sealed to this user. `None` if it is not that.
    pub fn open_sealed(
        sealed: &[u8; SEALED_KEY_BYTES],
        user: &SecretKey,
        volume: &VolumeId,
        epoch: u32,
    ) -> Option<ReadKey> {
        let agreed = user.agree(&volume.0)?;
        let keys = keys([USER_TAG, USER_CIPHER], &agreed, volume, &user.user_id(), epoch);
        let opened = keys.open_inner(sealed).ok()?;
        Some(ReadKey::from_bytes(opened[..].try_into().expect("so long")))
    }
}

/// Seals the secret key of a group, of an epoch of the volume, to a user. `None` if the user's key is no key.
pub fn seal_group_key(
    group: &SecretKey,
    user: &UserId,
    volume: &SecretKey,
    epoch: u32,
) -> Option<[u8; SEALED_KEY_BYTES]> {
    let agreed = volume.agree(&user.0)?;
    let keys = keys([GROUP_TAG, GROUP_CIPHER], &agreed, &volume.volume_id(), user, epoch);
    Some(keys.seal_inner(&group.seed()).try_into().expect("so long"))
}

/// Opens the secret key of a group that the volume's owner has sealed to this user. `None` if it is not that.
pub fn open_group_key(
    sealed: &[u8; SEALED_KEY_BYTES],
    user: &SecretKey,
    volume: &VolumeId,
    epoch: u32,
) -> Option<SecretKey> {
    let agreed = user.agree(&volume.0)?;
    let keys = keys([GROUP_TAG, GROUP_CIPHER], &agreed, volume, &user.user_id(), epoch);
    let opened = keys.open_inner(sealed).ok()?;
    Some(SecretKey::from_seed(opened[..].try_into().expect("so long")))
}

fn keys(
    [tag, cipher]: [&str; 2],
    agreed: &[u8; 32],
    volume: &VolumeId,
    user: &UserId,
    epoch: u32,
) -> Keys {
    let derive = |context| {
        let mut hasher = blake3::Hasher::new_derive_key(context);
        hasher.update(agreed).update(&volume.0).update(&user.0).update(&epoch.to_be_bytes());
        *hasher.finalize().as_bytes()
    };
    Keys::new(derive(tag), derive(cipher))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(n: u8) -> SecretKey {
        SecretKey::from_seed(&[n; 32])
    }

    #[test]
    fn a_key_gives_those_before_it_and_epochs_end() {
        let key = |epoch| ReadKey::of_epoch(&secret(1), epoch).expect("an epoch");
        assert_eq!(key(7).back(0), key(7));
        assert_eq!(key(7).back(7), key(0));
        assert_eq!(key(MAX_EPOCHS - 1).back(MAX_EPOCHS - 1), key(0));
        assert_ne!(key(7), key(8));
        assert_eq!(ReadKey::of_epoch(&secret(1), MAX_EPOCHS), None);
        assert_ne!(ReadKey::of_epoch(&secret(2), 0).expect("an epoch"), key(0));
    }

    #[test]
    fn a_sealed_key_opens_to_its_user_alone() {
        let (volume, alice, bob) = (secret(1), secret(2), secret(3));
        let key = ReadKey::from_bytes([7; 32]);
        let sealed = key.seal_to(&alice.user_id(), &volume, 4).expect("a key");
        let open =
            |sealed: &[u8; SEALED_KEY_BYTES], user: &SecretKey, volume: &SecretKey, epoch| {
                ReadKey::open_sealed(sealed, user, &volume.volume_id(), epoch)
            };
        assert_eq!(open(&sealed, &alice, &volume, 4), Some(key.clone()));
        assert_eq!(open(&sealed, &bob, &volume, 4), None, "another user");
        assert_eq!(open(&sealed, &alice, &secret(4), 4), None, "another volume");
        assert_eq!(open(&sealed, &alice, &volume, 5), None, "another epoch");
        // The owner is no reader by being the owner.
        assert_eq!(open(&sealed, &volume, &volume, 4), None);
        for bit in 0..SEALED_KEY_BYTES * 8 {
            let mut changed = sealed;
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(open(&changed, &alice, &volume, 4), None, "bit {bit}");
        }
        assert_eq!(key.seal_to(&UserId([0; 32]), &volume, 4), None, "no key");
    }

    #[test]
    fn a_group_key_opens_to_its_keeper_alone_and_is_no_read_key() {
        let (volume, alice, bob, group) = (secret(1), secret(2), secret(3), secret(7));
        let sealed = seal_group_key(&group, &alice.user_id(), &volume, 4).expect("a key");
        let open =
            |sealed: &[u8; SEALED_KEY_BYTES], user: &SecretKey, volume: &SecretKey, epoch| {
                open_group_key(sealed, user, &volume.volume_id(), epoch).map(|key| key.seed())
            };
        assert_eq!(open(&sealed, &alice, &volume, 4), Some(group.seed()));
        assert_eq!(open(&sealed, &bob, &volume, 4), None, "another user");
        assert_eq!(open(&sealed, &alice, &secret(4), 4), None, "another volume");
        assert_eq!(open(&sealed, &alice, &volume, 5), None, "another epoch");
        assert_eq!(ReadKey::open_sealed(&sealed, &alice, &volume.volume_id(), 4), None);
        let mut changed = sealed;
        changed[30] ^= 1;
        assert_eq!(open(&changed, &alice, &volume, 4), None, "damaged");
        assert_eq!(seal_group_key(&group, &UserId([0; 32]), &volume, 4), None, "no key");
    }

    /// Volumes are read again by newer programs only if these bytes stay as they are.
    #[test]
    fn keys_and_sealed_keys_never_change() {
        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
        let key = ReadKey::of_epoch(&secret(1), 0).expect("an epoch");
        assert_eq!(hex(key.bytes()), FIRST);
        let sealed = key.seal_to(&secret(2).user_id(), &secret(1), 0).expect("a key");
        assert_eq!(hex(&sealed), SEALED);
    }

    const FIRST: &str = "75b7a2e6e9bd69ab54a3656bb46f6b8910d19327cdf948dd06ec407a215b1619";
    const SEALED: &str = "8eaa77153681f7135843bf150ae310a622c04db51bd462d0706980499e08e8573003fe372c072d406542b1d2f84f94f276cb08da41d9d37b";
}
