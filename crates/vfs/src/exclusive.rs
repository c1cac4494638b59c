//! Exclusive creation that a client can repeat without knowing whether its first call was made (RFC 1813, CREATE with `EXCLUSIVE`).

use crate::{Attr, FileKind, FileTime, SetAttr, SetTime};

/// Chosen by the creator of a file and kept with the file, so that the creator recognises it when it repeats the call, also after
/// a restart of the server.
///
/// The verifier is kept in the new file's times, which its creator sets next (RFC 1813, section 3.3.8); setting one of them, or
/// writing, ends the creator's claim. All 64 bits survive where times are signed 32-bit seconds, as in ext2's smallest inodes:
///
/// | bytes of the verifier | kept in |
/// |---|---|
/// | 0..4, big-endian, signed | seconds of the access time; 0 nanoseconds |
/// | 4..8, big-endian, signed | seconds of the modification time; 0 nanoseconds |
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CreateVerifier(pub [u8; 8]);

impl CreateVerifier {
    /// Access and modification time of a file that is made with this verifier.
    pub fn times(self) -> (FileTime, FileTime) {
        let [a, b, c, d, e, f, g, h] = self.0;
        let time = |secs| FileTime { secs: i64::from(i32::from_be_bytes(secs)), nanos: 0 };
        (time([a, b, c, d]), time([e, f, g, h]))
    }

    /// The change that gives a new file these times.
    pub fn changes(self) -> SetAttr {
        let (atime, mtime) = self.times();
        let (atime, mtime) = (Some(SetTime::To(atime)), Some(SetTime::To(mtime)));
        SetAttr { atime, mtime, ..SetAttr::default() }
    }

    /// Whether a file was made with this verifier and not changed since.
    pub fn has_made(self, attr: &Attr) -> bool {
        attr.kind == FileKind::Regular
            && attr.size_bytes == 0
            && (attr.atime, attr.mtime) == self.times()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_of_a_verifier_changes_a_time_that_ext2_can_keep() {
        for verifier in [0, u64::MAX, 0x8000_0000_7fff_ffff, 0x7fff_ffff_8000_0000u64] {
            let times = |bits: u64| CreateVerifier(bits.to_be_bytes()).times();
            for bit in 0..64 {
                assert_ne!(times(verifier ^ 1 << bit), times(verifier), "bit {bit}");
            }
            let (atime, mtime) = times(verifier);
            for time in [atime, mtime] {
                assert!(i32::try_from(time.secs).is_ok() && time.nanos == 0, "{time:?}");
            }
        }
    }
}
