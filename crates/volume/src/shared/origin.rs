//! Who wrote a version, and when, that the volume's owner has signed anew when its inode was rebound.
//!
//! | bytes | field |
//! |---|---|
//! | 32 | public key of the user who wrote it |
//! | 8 | when, milliseconds since 1970 |
//! | 64 | signature by the volume's key of `"atoll v1 origin of a version\0"`, the inode's key (32 bytes), the dot of the version (16 writer, 8 height) and the fields above |
//!
//! The signature names the version, so that nobody can give another one to a user who has not written it.

use atoll_key::kinds::certified::{CertifiedBlock, Dot, Sibling};
use atoll_key::{Key, SecretKey, UserId};

use crate::format::FormatError;
use crate::format::cursor::{Cursor, put_u64};

const CONTEXT: &[u8] = b"atoll v1 origin of a version\0";

/// See the module.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Origin {
    /// Who wrote it.
    pub user: UserId,
    /// When, milliseconds since 1970.
    pub time_ms: u64,
    signature: [u8; 64],
}

impl Origin {
    /// Of the version `dot` of an inode.
    pub fn sign(volume: &SecretKey, inode: &Key, dot: &Dot, user: UserId, time_ms: u64) -> Origin {
        let origin = Origin { user, time_ms, signature: [0; 64] };
        Origin { signature: volume.sign(&origin.message(inode, dot)), ..origin }
    }

    /// Of a sibling of `block` whose inode says that it has this origin.
    pub fn of(origin: Option<Origin>, block: &CertifiedBlock, sibling: &Sibling) -> (UserId, u64) {
        let signed = origin.filter(|origin| {
            let message = origin.message(&block.key(), &sibling.dot);
            block.volume().verify(&message, &origin.signature)
        });
        let written = (sibling.certificate.user, sibling.time_ms);
        signed.map_or(written, |origin| (origin.user, origin.time_ms))
    }

    fn message(&self, inode: &Key, dot: &Dot) -> Vec<u8> {
        let mut message = [CONTEXT, &inode.0[..32], dot.writer.as_bytes()].concat();
        put_u64(&mut message, dot.height);
        self.put_unsigned(&mut message);
        message
    }

    fn put_unsigned(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.user.0);
        put_u64(out, self.time_ms);
    }

    pub(super) fn put(&self, out: &mut Vec<u8>) {
        self.put_unsigned(out);
        out.extend_from_slice(&self.signature);
    }

    pub(super) fn take(cursor: &mut Cursor) -> Result<Origin, FormatError> {
        let (user, time_ms) = (UserId(cursor.array()?), cursor.u64()?);
        Ok(Origin { user, time_ms, signature: cursor.array()? })
    }
}
