//! File handles: what clients keep of a file, for as long as they like.
//!
//! | offset | bytes | |
//! |---|---|---|
//! | 0 | 8 | id of the export, big-endian |
//! | 8 | 16 | first half of a keyed hash (BLAKE3) of all the rest |
//! | 24 | up to 40 | the file system's [`PersistentHandle`] |
//!
//! The key is this server's secret, so a handle that a client makes up, or that it changes to name another file or
//! export, is none: whoever could guess handles would pass by the permissions of the directories above a file.

use atoll_vfs::PersistentHandle;
use bytes::{BufMut, Bytes, BytesMut};

use super::nfs3::{FileHandle, Status};
use super::xdr::Opaque;

const ID_BYTES: usize = 8;
const MAC_BYTES: usize = 16;

/// Makes handles and reads them.
#[derive(Clone)]
pub struct HandleKey([u8; 32]);

impl std::fmt::Debug for HandleKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("HandleKey")
    }
}

impl HandleKey {
    /// Of this secret. Handles stay good as long as it stays the same.
    pub fn new(secret: [u8; 32]) -> HandleKey {
        HandleKey(secret)
    }

    fn mac(&self, id: &[u8], handle: &[u8]) -> [u8; MAC_BYTES] {
        let hash = blake3::Hasher::new_keyed(&self.0).update(id).update(handle).finalize();
        *hash.as_bytes().first_chunk().expect("a hash has 32 bytes")
    }

    /// The handle of a file of an export.
    pub fn seal(&self, export: u64, handle: &PersistentHandle) -> FileHandle {
        let id = export.to_be_bytes();
        let mut bytes = BytesMut::with_capacity(ID_BYTES + MAC_BYTES + handle.as_bytes().len());
        bytes.put_slice(&id);
        bytes.put_slice(&self.mac(&id, handle.as_bytes()));
        bytes.put_slice(handle.as_bytes());
        Opaque(bytes.freeze())
    }

    /// Export and file of a handle.
    ///
    /// # Errors
    /// [`Status::BadHandle`] for one that this server has not made.
    pub fn open(&self, handle: &FileHandle) -> Result<(u64, PersistentHandle), Status> {
        let (id, rest) = handle.0.split_first_chunk::<ID_BYTES>().ok_or(Status::BadHandle)?;
        let (mac, file) = rest.split_first_chunk::<MAC_BYTES>().ok_or(Status::BadHandle)?;
        // Compared in constant time.
        let computed =
            self.mac(id, file).iter().zip(mac).fold(0, |differs, (a, b)| differs | (a ^ b));
        if computed != 0 {
            return Err(Status::BadHandle);
        }
        let file =
            PersistentHandle::new(Bytes::copy_from_slice(file)).map_err(|_| Status::BadHandle)?;
        Ok((u64::from_be_bytes(*id), file))
    }
}

#[cfg(test)]
mod tests {
    use atoll_vfs::{InodeNumber, MAX_PERSISTENT_HANDLE_BYTES};

    use super::*;

    #[test]
    fn the_longest_handle_fits_and_no_changed_one_is_taken() {
        let key = HandleKey::new([7; 32]);
        let long = PersistentHandle::new(vec![9; MAX_PERSISTENT_HANDLE_BYTES].into()).unwrap();
        let sealed = key.seal(3, &long);
        assert_eq!(sealed.0.len(), 64, "RFC 1813, NFS3_FHSIZE");
        assert_eq!(key.open(&sealed), Ok((3, long)));
        let sealed = key.seal(u64::MAX, &PersistentHandle::of_number(InodeNumber(5), 1)).0;
        for at in 0..sealed.len() {
            let mut changed = sealed.to_vec();
            changed[at] ^= 1;
            assert_eq!(key.open(&Opaque(changed.into())), Err(Status::BadHandle), "byte {at}");
            assert_eq!(key.open(&Opaque(sealed.slice(..at))), Err(Status::BadHandle), "{at} bytes");
        }
        assert_eq!(
            HandleKey::new([8; 32]).open(&Opaque(sealed)),
            Err(Status::BadHandle),
            "another server's"
        );
    }
}
