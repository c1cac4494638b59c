//! Names of files that outlive what a front end remembers of them: the file handles of NFS and
//! of `open_by_handle_at(2)`.

use bytes::Bytes;

use crate::types::{Errno, InodeNumber};

/// The longest handle, bytes. NFSv3 has 64 (RFC 1813, `NFS3_FHSIZE`); its front end needs 24 of
/// them to tell its file systems apart, and handles that clients make up from its own.
pub const MAX_PERSISTENT_HANDLE_BYTES: usize = 40;

/// Names a file for as long as it exists, over mounts and restarts, and never another one.
///
/// The file system decides what it consists of. One whose inode numbers last, and are used again,
/// can take [`PersistentHandle::of_number`]:
///
/// | offset | bytes | |
/// |---|---|---|
/// | 0 | 8 | inode number, big-endian |
/// | 8 | 8 | its generation, big-endian |
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PersistentHandle(Bytes);

impl PersistentHandle {
    /// A handle of these bytes; [`Errno::ESTALE`] for more than
    /// [`MAX_PERSISTENT_HANDLE_BYTES`].
    pub fn new(bytes: Bytes) -> Result<PersistentHandle, Errno> {
        if bytes.len() > MAX_PERSISTENT_HANDLE_BYTES {
            return Err(Errno::ESTALE);
        }
        Ok(PersistentHandle(bytes))
    }

    /// The handle of a file by its number and how often that was used before.
    pub fn of_number(inode: InodeNumber, generation: u64) -> PersistentHandle {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&inode.0.to_be_bytes());
        bytes[8..].copy_from_slice(&generation.to_be_bytes());
        PersistentHandle(Bytes::copy_from_slice(&bytes))
    }

    /// Number and generation of a handle made by [`PersistentHandle::of_number`];
    /// [`Errno::ESTALE`] for any other.
    pub fn number(&self) -> Result<(InodeNumber, u64), Errno> {
        let (number, generation) = self.0.split_at_checked(8).ok_or(Errno::ESTALE)?;
        let word = |bytes: &[u8]| Some(u64::from_be_bytes(bytes.try_into().ok()?));
        match (word(number), word(generation)) {
            (Some(number), Some(generation)) => Ok((InodeNumber(number), generation)),
            _ => Err(Errno::ESTALE),
        }
    }

    /// The bytes, for the wire.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_of_a_number_leads_back_to_it_and_other_bytes_to_nothing() {
        let handle = PersistentHandle::of_number(InodeNumber(u64::MAX - 1), 7);
        assert_eq!(handle.number(), Ok((InodeNumber(u64::MAX - 1), 7)));
        let again = PersistentHandle::new(Bytes::copy_from_slice(handle.as_bytes()));
        assert_eq!(again, Ok(handle));
        for len in [0, 7, 8, 15, 17, MAX_PERSISTENT_HANDLE_BYTES] {
            let other = PersistentHandle::new(vec![0; len].into()).unwrap();
            assert_eq!(other.number(), Err(Errno::ESTALE), "{len} bytes");
        }
        let long = vec![0; MAX_PERSISTENT_HANDLE_BYTES + 1];
        assert_eq!(PersistentHandle::new(long.into()), Err(Errno::ESTALE));
    }
}
