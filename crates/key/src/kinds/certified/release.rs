//! Releases: a writer of an inode says that blocks of its content are not needed for longer than a
//! time (Pastis leaves replaced blocks to a garbage collector that it does not describe).
//!
//! A release shortens leases and removes nothing. [`MIN_RELEASED_LEASE_SECS`] are left at least, so
//! that the node which renews the volume's leases, once a day whatever an inode refers to, finds a block
//! that was released by mistake while it is still there.
//!
//! What holds a block does not hold the inode. So the release brings the inode's binding, which its key
//! commits to, and the certificate of its signer. *Not covered*: a user whom a newer binding excludes
//! can show the older one until its certificate ends.

use bytes::Bytes;

use super::access::{Binding, CERTIFICATE_BYTES, Certificate, Rebinding};
use super::{Author, CLOCK_SLACK_MS, CertifiedBlock, Fields};
use crate::hash::BlockHash;
use crate::kinds::release::MAX_RELEASED;
use crate::kinds::{InvalidBlock, NotAdmitted};
use crate::ring::Key;

/// The shortest time that a release leaves a block, seconds: two daily renewals of the volume's leases.
pub const MIN_RELEASED_LEASE_SECS: u32 = 2 * 24 * 3600;

const CONTEXT: &[u8] = b"atoll v1 release\0";

/// Ends leases of blocks of one inode's content sooner.
///
/// | bytes | field |
/// |---|---|
/// | 49 + 32 n | [`Binding`] of the inode |
/// | 1 | number of rebindings, 0 or 1 |
/// | … | [`Rebinding`]: the certificate is of one of its groups then |
/// | 144 | [`Certificate`] |
/// | 8 | when it was signed, milliseconds since 1970 |
/// | 4 | how long the blocks are to stay from now on, seconds, at least two days |
/// | 1 | number *n* of blocks, 1 to 128 |
/// | 32 n | their hashes, ascending |
/// | 64 | signature by the certificate's user of `"atoll v1 release\0"` and all bytes before it |
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct InodeRelease {
    binding: Binding,
    rebinding: Option<Rebinding>,
    certificate: Certificate,
    /// When it was signed, milliseconds since 1970.
    pub time_ms: u64,
    /// How long the blocks are to stay from now on, seconds.
    pub lease_secs: u32,
    hashes: Vec<BlockHash>,
    encoded: Bytes,
}

impl InodeRelease {
    /// Releases blocks of the content of `inode`, which `author` may write. `None` if it may not, or
    /// there are no blocks, or too many. A shorter lease than two days counts as two days.
    pub fn sign(
        inode: &CertifiedBlock,
        author: &Author,
        time_ms: u64,
        lease_secs: u64,
        blocks: &[BlockHash],
    ) -> Option<InodeRelease> {
        let mut hashes = blocks.to_vec();
        hashes.sort_unstable();
        hashes.dedup();
        let is_member = inode.groups().contains(&author.certificate.group);
        if !is_member || !(1..=MAX_RELEASED).contains(&hashes.len()) {
            return None;
        }
        let lease_secs = u32::try_from(lease_secs).unwrap_or(u32::MAX);
        let mut release = InodeRelease {
            binding: inode.binding().clone(),
            rebinding: inode.newest_rebinding().cloned(),
            certificate: author.certificate,
            time_ms,
            lease_secs: lease_secs.max(MIN_RELEASED_LEASE_SECS),
            hashes,
            encoded: Bytes::new(),
        };
        let mut out = release.unsigned();
        out.extend_from_slice(&author.secret.sign(&message(&out)));
        release.encoded = out.into();
        Some(release)
    }

    fn unsigned(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.binding.encode(&mut out);
        out.push(u8::from(self.rebinding.is_some()));
        self.rebinding.iter().for_each(|rebinding| rebinding.encode(&mut out));
        self.certificate.encode(&mut out);
        out.extend_from_slice(&self.time_ms.to_be_bytes());
        out.extend_from_slice(&self.lease_secs.to_be_bytes());
        out.push(self.hashes.len() as u8);
        self.hashes.iter().for_each(|hash| out.extend_from_slice(&hash.0));
        out
    }

    /// Reads a release. Signatures are not checked, see [`InodeRelease::verify`].
    ///
    /// # Errors
    /// If it is malformed.
    pub fn decode(bytes: &Bytes) -> Result<InodeRelease, InvalidBlock> {
        let malformed = |what| Err(InvalidBlock::Malformed(what));
        let mut fields = Fields::new(bytes);
        let binding = Binding::decode(&mut fields)?;
        let rebinding = match fields.u8()? {
            0 => None,
            1 => Some(Rebinding::decode(&mut fields)?),
            _ => return malformed("too many rebindings"),
        };
        let certificate = Certificate::decode(&fields.array::<CERTIFICATE_BYTES>()?);
        let (time_ms, lease_secs) = (fields.u64()?, fields.u32()?);
        let count = usize::from(fields.u8()?);
        if lease_secs < MIN_RELEASED_LEASE_SECS || !(1..=MAX_RELEASED).contains(&count) {
            return malformed("a lease too short, no blocks, or too many");
        }
        let hashes: Result<Vec<BlockHash>, _> =
            (0..count).map(|_| fields.array().map(BlockHash)).collect();
        let (hashes, _signature) = (hashes?, fields.array::<64>()?);
        fields.end()?;
        if !hashes.windows(2).all(|pair| pair[0] < pair[1]) {
            return malformed("blocks not in order");
        }
        let encoded = bytes.clone();
        Ok(InodeRelease { binding, rebinding, certificate, time_ms, lease_secs, hashes, encoded })
    }

    /// Checks that a writer of the inode has signed it.
    ///
    /// # Errors
    /// If not.
    pub fn verify(&self) -> Result<(), InvalidBlock> {
        let inode = self.binding.key();
        let groups = match &self.rebinding {
            None => self.binding.groups(),
            Some(rebinding) if rebinding.is_signed_by(&self.binding.volume, &inode) => {
                rebinding.groups()
            }
            Some(_) => return Err(InvalidBlock::WrongSignature),
        };
        if !groups.contains(&self.certificate.group) {
            return Err(InvalidBlock::Malformed("a release of a group that may not write"));
        }
        let (signed, signature) = self.encoded.split_at(self.encoded.len() - 64);
        let signature = signature.try_into().expect("64 bytes");
        let is_signed = self.certificate.user.verify(&message(signed), signature);
        if is_signed && self.certificate.is_signed() {
            Ok(())
        } else {
            Err(InvalidBlock::WrongSignature)
        }
    }

    /// Whether a replica takes it now: it was signed now, by a user who may write now.
    ///
    /// # Errors
    /// Why not.
    pub fn admit(&self, now_ms: u64) -> Result<(), NotAdmitted> {
        if self.time_ms.abs_diff(now_ms) > CLOCK_SLACK_MS {
            return Err(NotAdmitted::Clock { time_ms: self.time_ms, now_ms });
        }
        match self.certificate.is_valid_at(now_ms / 1000) {
            true => Ok(()),
            false => Err(NotAdmitted::Expired { not_after_secs: self.certificate.not_after_secs }),
        }
    }

    /// The first half of the key of the inode whose content the blocks are.
    pub fn inode(&self) -> [u8; 32] {
        self.binding.key().as_hash().expect("it is hashed")
    }

    /// The keys of the blocks.
    pub fn keys(&self) -> impl ExactSizeIterator<Item = Key> {
        self.hashes.iter().map(BlockHash::key)
    }

    /// Its bytes, as the table says.
    pub fn bytes(&self) -> &Bytes {
        &self.encoded
    }
}

fn message(signed: &[u8]) -> Vec<u8> {
    [CONTEXT, signed].concat()
}
