//! The network's state as its administrator signs it, and as nodes hand it on.
//!
//! Byte for byte in `docs/design/membership.md`:
//!
//! ```text
//! offset   size
//!      0      1  layout: 1
//!      1     32  the administrator's public key
//!     33      8  epoch, from 1
//!     41      8  when it was issued, milliseconds since 1970
//!     49      8  until when the former secret admits members, the same
//!     57     32  the secret
//!     89     32  the former secret
//!    121      2  how many nodes are removed: n, at most 256
//!    123   32 n  their public keys, each once, in the order of removal
//!              64  Ed25519 signature of all before it, after a context
//! ```

use std::collections::BTreeSet;
use std::time::Duration;

use atoll_key::{PeerId, SecretKey, VolumeId};
use atoll_net::Secrets;

/// The most removed nodes that a record names. The oldest are forgotten beyond it, which
/// readmits no node: a removed node never learns a secret that is newer than its removal.
pub(crate) const MAX_REMOVED: usize = 256;
/// The shortest time that a former secret stays good: members hear of the new one over the
/// connections they have, and then over those they make.
pub(crate) const MIN_OVERLAP: Duration = Duration::from_secs(60);
/// The longest.
pub(crate) const MAX_OVERLAP: Duration = Duration::from_secs(90 * 24 * 3600);

const LAYOUT: u8 = 1;
const HEAD_BYTES: usize = 123;
const SIGNATURE_BYTES: usize = 64;
const CONTEXT: &[u8] = b"atoll 2026 network state\0";

/// What holds in a network from one rotation of its secret to the next. Printed without
/// its secrets.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Record {
    pub epoch: u64,
    pub issued_unix_ms: u64,
    pub former_until_unix_ms: u64,
    pub secret: [u8; 32],
    pub former: [u8; 32],
    /// In the order of their removal, at most [`MAX_REMOVED`].
    pub removed: Vec<PeerId>,
    /// The record as it was signed.
    bytes: Vec<u8>,
}

/// Why bytes are not a record of this network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RecordError {
    #[error("it is not laid out as a record of the network's state")]
    Form,
    #[error("it is not signed by the network's administrator")]
    Signature,
}

/// What a new record says.
pub(crate) struct Content {
    pub epoch: u64,
    pub issued_unix_ms: u64,
    pub overlap: Duration,
    pub secret: [u8; 32],
    pub former: [u8; 32],
    /// In the order of their removal, at most [`MAX_REMOVED`].
    pub removed: Vec<PeerId>,
}

impl Record {
    /// Signs a record.
    pub(crate) fn sign(admin: &SecretKey, content: Content) -> Record {
        let Content { epoch, issued_unix_ms, overlap, secret, former, removed } = content;
        assert!(removed.len() <= MAX_REMOVED, "the caller forgets the oldest");
        let overlap_ms = u64::try_from(overlap.as_millis()).unwrap_or(u64::MAX);
        let former_until_unix_ms = issued_unix_ms.saturating_add(overlap_ms);
        let mut bytes = vec![LAYOUT];
        bytes.extend_from_slice(&admin.public());
        for number in [epoch, issued_unix_ms, former_until_unix_ms] {
            bytes.extend_from_slice(&number.to_be_bytes());
        }
        bytes.extend_from_slice(&secret);
        bytes.extend_from_slice(&former);
        bytes.extend_from_slice(&(removed.len() as u16).to_be_bytes());
        removed.iter().for_each(|id| bytes.extend_from_slice(&id.0));
        let signature = admin.sign(&message(&bytes));
        bytes.extend_from_slice(&signature);
        Record { epoch, issued_unix_ms, former_until_unix_ms, secret, former, removed, bytes }
    }

    /// Reads a record that `admin` signed.
    pub(crate) fn decode(bytes: &[u8], admin: &[u8; 32]) -> Result<Record, RecordError> {
        let body = parse(bytes).ok_or(RecordError::Form)?;
        let (signed, signature) = bytes.split_last_chunk().ok_or(RecordError::Form)?;
        // Ed25519 keys are of one kind, whatever they sign.
        if admin_of(bytes) != Some(*admin) || !VolumeId(*admin).verify(&message(signed), signature)
        {
            return Err(RecordError::Signature);
        }
        Ok(body)
    }

    /// The record as it was signed.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The secrets that it names.
    pub(crate) fn secrets(&self) -> Secrets {
        Secrets { current: self.secret, former: Some(self.former) }
    }

    /// What decides between two records: the later epoch and, should an administrator have
    /// signed two of one epoch, the bytes, so that all nodes end with the same one.
    pub(crate) fn rank(&self) -> (u64, &[u8]) {
        (self.epoch, &self.bytes)
    }
}

impl std::fmt::Debug for Record {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Record(epoch {}, {} removed)", self.epoch, self.removed.len())
    }
}

/// Which administrator a record says that it is of.
pub(crate) fn admin_of(bytes: &[u8]) -> Option<[u8; 32]> {
    bytes.get(1..33)?.try_into().ok()
}

/// Which epoch a record says that it is of.
pub(crate) fn epoch_of(bytes: &[u8]) -> Option<u64> {
    bytes.get(33..41)?.try_into().ok().map(u64::from_be_bytes)
}

fn message(signed: &[u8]) -> Vec<u8> {
    [CONTEXT, signed].concat()
}

fn parse(bytes: &[u8]) -> Option<Record> {
    let number = |at: usize| bytes[at..].first_chunk().copied().map(u64::from_be_bytes);
    let key = |at: usize| bytes[at..].first_chunk::<32>().copied();
    if bytes.len() < HEAD_BYTES + SIGNATURE_BYTES || bytes[0] != LAYOUT {
        return None;
    }
    let count = usize::from(u16::from_be_bytes([bytes[121], bytes[122]]));
    if count > MAX_REMOVED || bytes.len() != HEAD_BYTES + 32 * count + SIGNATURE_BYTES {
        return None;
    }
    let (removed, _) = bytes[HEAD_BYTES..HEAD_BYTES + 32 * count].as_chunks::<32>();
    let (epoch, issued_unix_ms, former_until_unix_ms) = (number(33)?, number(41)?, number(49)?);
    let overlap_ms = former_until_unix_ms.checked_sub(issued_unix_ms)?;
    if epoch == 0
        || removed.iter().collect::<BTreeSet<_>>().len() != removed.len()
        || u128::from(overlap_ms) > MAX_OVERLAP.as_millis()
    {
        return None;
    }
    Some(Record {
        epoch,
        issued_unix_ms,
        former_until_unix_ms,
        secret: key(57)?,
        former: key(89)?,
        removed: removed.iter().map(|id| PeerId(*id)).collect(),
        bytes: bytes.to_vec(),
    })
}

/// The seed of the key that signs [`example_record`].
pub(crate) const EXAMPLE_ADMIN: [u8; 32] = [1; 32];

/// A record for fuzzing and tests, issued `epoch` seconds after 1970 for a minute.
pub(crate) fn example_record(epoch: u8, removed: u8) -> Record {
    let content = Content {
        epoch: epoch.into(),
        issued_unix_ms: 1000 * u64::from(epoch),
        overlap: MIN_OVERLAP,
        secret: [epoch; 32],
        former: [epoch.saturating_sub(1); 32],
        removed: (0..removed).map(|n| PeerId([n; 32])).collect(),
    };
    Record::sign(&SecretKey::from_seed(&EXAMPLE_ADMIN), content)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn admin() -> SecretKey {
        SecretKey::from_seed(&EXAMPLE_ADMIN)
    }

    fn record(epoch: u8, removed: u8) -> Record {
        example_record(epoch, removed)
    }

    #[test]
    fn a_record_reads_back_under_its_administrators_key_only() {
        for removed in [0, 1, 200] {
            let signed = record(3, removed);
            assert_eq!(Record::decode(signed.bytes(), &admin().public()), Ok(signed.clone()));
            let other = SecretKey::from_seed(&[2; 32]);
            let read = Record::decode(signed.bytes(), &other.public());
            assert_eq!(read, Err(RecordError::Signature));
        }
    }

    #[test]
    fn no_byte_of_a_record_can_be_changed_and_none_left_out() {
        let signed = record(3, 2);
        for at in 0..signed.bytes().len() {
            let mut forged = signed.bytes().to_vec();
            forged[at] ^= 1;
            assert!(Record::decode(&forged, &admin().public()).is_err(), "byte {at}");
            assert!(Record::decode(&forged[..at], &admin().public()).is_err(), "cut at {at}");
        }
    }

    #[test]
    fn a_list_beyond_its_maximum_is_refused_from_its_count() {
        let mut long = record(3, 0).bytes()[..HEAD_BYTES].to_vec();
        long[121..].copy_from_slice(&(MAX_REMOVED as u16 + 1).to_be_bytes());
        for n in 0..=MAX_REMOVED as u16 {
            long.extend_from_slice(&[n.to_be_bytes(); 16].concat());
        }
        let signature = admin().sign(&message(&long));
        long.extend_from_slice(&signature);
        assert_eq!(Record::decode(&long, &admin().public()), Err(RecordError::Form));
        long[121..123].copy_from_slice(&[0xff, 0xff]);
        assert_eq!(Record::decode(&long, &admin().public()), Err(RecordError::Form));
    }

    #[test]
    fn of_two_records_of_one_epoch_all_prefer_the_same() {
        let (one, other) = (record(3, 0), record(3, 1));
        assert_ne!(one.rank().cmp(&other.rank()), std::cmp::Ordering::Equal);
        assert!(record(4, 0).rank() > one.rank() && record(4, 0).rank() > other.rank());
    }

    #[test]
    fn secrets_are_not_printed() {
        let shown = format!("{:?}", record(0x5a, 0));
        assert!(!shown.contains("5a5a") && !shown.contains("90, 90"), "{shown}");
    }

    proptest! {
        #[test]
        fn noise_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            prop_assert!(Record::decode(&bytes, &admin().public()).is_err());
        }
    }
}
