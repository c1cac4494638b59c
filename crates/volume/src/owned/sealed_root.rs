//! The payload of a signed root block, in the clear or encrypted.
//!
//! In the clear it is a [`Root`], which begins with `ATVR` and layout 1. An encrypted
//! volume's says no more than that it is one and which read key it takes:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 4 | magic `ATVR` |
//! | 4 | 1 | layout, 2 |
//! | 5 | 16 | check of the read key (`VolumeCipher::check`) |
//! | 21 | … | a root of layout 1, sealed (`VolumeCipher::seal_root`) |
//!
//! Programs that know only layout 1 say that a newer one may read it.

use atoll_key::VolumeCipher;
use atoll_key::read_key::CHECK_BYTES;
use bytes::Bytes;

use super::root::{MAGIC, Root};
use crate::format::{FormatError, SHARED_VOLUME_MAGIC};

/// The layout of an encrypted volume's root.
const ENCRYPTED_LAYOUT: u8 = 2;

const HEADER_BYTES: usize = 4 + 1;

/// Why a root's payload could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RootError {
    /// The publisher signed something that is not a volume's root.
    #[error("the volume's root block is bad: {0}")]
    Bad(#[from] FormatError),
    /// A volume that many people write: another file system reads it.
    #[error("it is a shared volume, which is read through a mount: `atoll mount`")]
    Shared,
    /// A read key is needed.
    #[error("this volume is encrypted: give its address with #READKEY")]
    Encrypted,
    /// It is encrypted for another read key.
    #[error("the read key is wrong: it is not this volume's")]
    WrongReadKey,
    /// A read key was given for a volume that has none.
    #[error("this volume is not encrypted: give its address without #READKEY")]
    NotEncrypted,
}

/// Writes a root; with a cipher, encrypted.
pub fn encode(root: &Root, cipher: Option<&VolumeCipher>) -> Vec<u8> {
    let Some(cipher) = cipher else { return root.encode() };
    let mut out = MAGIC.to_vec();
    out.push(ENCRYPTED_LAYOUT);
    out.extend_from_slice(&cipher.check());
    out.extend_from_slice(&cipher.seal_root(&root.encode()));
    out
}

/// Reads a root. A cipher must be given if and only if it is encrypted.
pub fn decode(payload: &Bytes, cipher: Option<&VolumeCipher>) -> Result<Root, RootError> {
    if payload.starts_with(SHARED_VOLUME_MAGIC) {
        return Err(RootError::Shared);
    }
    match (is_encrypted(payload), cipher) {
        (false, None) => Ok(Root::decode(payload)?),
        // Nonsense is told as that, whatever key was given.
        (false, Some(_)) => Root::decode(payload)
            .map_or_else(|error| Err(RootError::Bad(error)), |_| Err(RootError::NotEncrypted)),
        (true, None) => Err(RootError::Encrypted),
        (true, Some(cipher)) => open(&payload[HEADER_BYTES..], cipher),
    }
}

/// Whether a payload says that it is an encrypted volume's.
pub fn is_encrypted(payload: &[u8]) -> bool {
    payload.starts_with(MAGIC) && payload.get(4) == Some(&ENCRYPTED_LAYOUT)
}

fn open(rest: &[u8], cipher: &VolumeCipher) -> Result<Root, RootError> {
    let (check, sealed) = rest.split_first_chunk::<CHECK_BYTES>().ok_or(FormatError::Truncated)?;
    if *check != cipher.check() {
        return Err(RootError::WrongReadKey);
    }
    let root = cipher.open_root(sealed).map_err(FormatError::Sealed)?;
    Ok(Root::decode(&root)?)
}
