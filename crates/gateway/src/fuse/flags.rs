//! Inode flags over `ioctl(2)`: what `chattr(1)` and `lsattr(1)` ask for. Since Linux 5.13 the
//! kernel checks who may set flags before it asks; the file system checks too.
//!
//! | command | data |
//! |---|---|
//! | `FS_IOC_GETFLAGS`, `FS_IOC_SETFLAGS` | the flags, 4 bytes |
//! | `FS_IOC_FSGETXATTR`, `FS_IOC_FSSETXATTR` | `struct fsxattr`, below |
//!
//! | offset | bytes | `struct fsxattr` |
//! |---|---|---|
//! | 0 | 4 | flags, numbered another way (`FS_XFLAG_…`) |
//! | 4 | 4 | extent size hint |
//! | 8 | 4 | extents |
//! | 12 | 4 | project |
//! | 16 | 4 | copy-on-write extent size hint |
//! | 20 | 8 | 0 |
//!
//! Hints and projects are kept by no file system here: setting one is refused.

use atoll_vfs::{Caller, Errno, FileSystem, InodeFlags, InodeNumber};
use fuser::Notifier;

use super::invalidations::forget_attributes;

/// Linux `include/uapi/linux/fs.h`. The two old commands say that they carry a `long`.
const GET_FLAGS: u32 = command(READ, b'f', 1, size_of::<usize>());
const SET_FLAGS: u32 = command(WRITE, b'f', 2, size_of::<usize>());
const GET_EXTENDED: u32 = command(READ, b'X', 31, EXTENDED_BYTES);
const SET_EXTENDED: u32 = command(WRITE, b'X', 32, EXTENDED_BYTES);
const EXTENDED_BYTES: usize = 28;

/// `_IOC_READ` and `_IOC_WRITE` of the architectures we build for (x86-64, ARM, RISC-V).
const READ: u32 = 2;
const WRITE: u32 = 1;

/// Flags and the bits that `struct fsxattr` has for them.
const EXTENDED: [(u32, u32); 5] = [
    (InodeFlags::IMMUTABLE, 0x8),
    (InodeFlags::APPEND_ONLY, 0x10),
    (InodeFlags::SYNC, 0x20),
    (InodeFlags::NO_ATIME, 0x40),
    (InodeFlags::NO_DUMP, 0x80),
];

const fn command(direction: u32, kind: u8, number: u32, len: usize) -> u32 {
    direction << 30 | (len as u32) << 16 | (kind as u32) << 8 | number
}

/// One of the four calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FlagsCall {
    Get,
    Set(InodeFlags),
    GetExtended,
    /// Sets those flags that `struct fsxattr` has, in its numbering.
    SetExtended(u32),
}

impl FlagsCall {
    /// What the kernel asks for; `ENOTTY` for anything else.
    pub(super) fn decode(command: u32, data: &[u8]) -> Result<FlagsCall, Errno> {
        let word = |at: usize| match data.get(at..at + 4) {
            Some(bytes) => Ok(u32::from_ne_bytes(bytes.try_into().expect("four bytes"))),
            None => Err(Errno::EINVAL),
        };
        match command {
            GET_FLAGS => Ok(FlagsCall::Get),
            SET_FLAGS => word(0).map(|flags| FlagsCall::Set(InodeFlags(flags))),
            GET_EXTENDED => Ok(FlagsCall::GetExtended),
            SET_EXTENDED => {
                let known = EXTENDED.iter().fold(0, |known, (_, bit)| known | bit);
                let has_others = word(0)? & !known != 0;
                if has_others || word(4)? != 0 || word(12)? != 0 || word(16)? != 0 {
                    return Err(Errno::EOPNOTSUPP);
                }
                word(0).map(FlagsCall::SetExtended)
            }
            _ => Err(Errno::ENOTTY),
        }
    }

    /// Makes the call; the bytes that the kernel gets.
    pub(super) async fn make(
        self,
        fs: &dyn FileSystem,
        notifier: Option<&Notifier>,
        caller: Caller,
        inode: InodeNumber,
    ) -> Result<Vec<u8>, Errno> {
        let flags = match self {
            FlagsCall::Get => return Ok(fs.inode_flags(inode).await?.0.to_ne_bytes().to_vec()),
            FlagsCall::GetExtended => {
                let mut answer = vec![0; EXTENDED_BYTES];
                let bits = to_extended(fs.inode_flags(inode).await?);
                answer[..4].copy_from_slice(&bits.to_ne_bytes());
                return Ok(answer);
            }
            FlagsCall::Set(flags) => flags,
            FlagsCall::SetExtended(bits) => with_extended(fs.inode_flags(inode).await?, bits),
        };
        fs.set_inode_flags(caller, inode, flags).await?;
        // The kernel keeps the old time of the last change (Linux 6.18).
        forget_attributes(notifier, inode);
        Ok(Vec::new())
    }
}

fn to_extended(flags: InodeFlags) -> u32 {
    EXTENDED.iter().filter(|(flag, _)| flags.has(*flag)).fold(0, |bits, (_, bit)| bits | bit)
}

/// `flags`, but those that `struct fsxattr` has as `bits` say.
fn with_extended(flags: InodeFlags, bits: u32) -> InodeFlags {
    EXTENDED.iter().fold(flags, |InodeFlags(flags), (flag, bit)| {
        InodeFlags(if bits & bit != 0 { flags | flag } else { flags & !flag })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_numbered_as_the_kernel_numbers_them() {
        // `chattr` and `xfs_io` on x86-64, as strace shows them.
        assert_eq!((GET_FLAGS, SET_FLAGS), (0x8008_6601, 0x4008_6602));
        assert_eq!((GET_EXTENDED, SET_EXTENDED), (0x801c_581f, 0x401c_5820));
    }

    #[test]
    fn both_numberings_name_the_same_flags() {
        let all = InodeFlags(0x8 | 0x10 | 0x20 | 0x40 | 0x80);
        assert_eq!(to_extended(all), 0xf8);
        assert_eq!(to_extended(InodeFlags(0x1000)), 0, "has no number there");
        let kept = with_extended(InodeFlags(0x1000 | InodeFlags::IMMUTABLE), 0x10);
        assert_eq!(kept, InodeFlags(0x1000 | InodeFlags::APPEND_ONLY));
    }

    #[test]
    fn what_is_not_kept_is_refused_by_name() {
        let mut data = [0; EXTENDED_BYTES];
        data[0] = 0x8;
        assert_eq!(FlagsCall::decode(SET_EXTENDED, &data), Ok(FlagsCall::SetExtended(0x8)));
        for at in [2, 4, 12, 16] {
            let mut data = data;
            data[at] = 1;
            assert_eq!(FlagsCall::decode(SET_EXTENDED, &data), Err(Errno::EOPNOTSUPP), "{at}");
        }
        for short in [0, 3] {
            assert_eq!(FlagsCall::decode(SET_FLAGS, &data[..short]), Err(Errno::EINVAL));
        }
        assert_eq!(FlagsCall::decode(SET_EXTENDED, &data[..12]), Err(Errno::EINVAL));
        assert_eq!(FlagsCall::decode(0x5401, &data), Err(Errno::ENOTTY));
    }
}
