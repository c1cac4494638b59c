//! Directory entries: a block of a directory is a chain of them that fills it.
//!
//! | offset | bytes | ext2's name |
//! |---|---|---|
//! | 0 | 4 | `inode`, 0: the room is free |
//! | 4 | 2 | `rec_len`, to the next entry, a multiple of 4 |
//! | 6 | 1 | `name_len` |
//! | 7 | 1 | `file_type`, or the name length's high byte without the feature `filetype` |
//! | 8 | | the name |

use atoll_vfs::FileKind;

use super::{put_u16, put_u32, u16_at, u32_at};

/// Length of an entry without its name.
const HEAD_BYTES: usize = 8;

/// Bytes an entry of a name of this length needs.
pub fn entry_bytes(name_len: usize) -> usize {
    (HEAD_BYTES + name_len).next_multiple_of(4)
}

/// An entry in a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry<'a> {
    /// Where it begins in the block.
    pub at: usize,
    /// To the next entry.
    pub len: usize,
    /// The file's inode, 0: free room.
    pub inode: u32,
    /// What the directory says the file is.
    pub kind: Option<FileKind>,
    /// The name.
    pub name: &'a [u8],
}

impl Entry<'_> {
    /// Bytes of its room that it does not need.
    pub fn spare_bytes(&self) -> usize {
        if self.inode == 0 { self.len } else { self.len - entry_bytes(self.name.len()) }
    }
}

/// A chain of entries that does not fill its block, or leads out of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the entry at byte {at} of a directory's block is impossible")]
pub struct BrokenChain {
    /// Where.
    pub at: usize,
}

/// The entries of a block, in order, free room included; ends after an error.
pub fn entries(block: &[u8]) -> impl Iterator<Item = Result<Entry<'_>, BrokenChain>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        if at >= block.len() {
            return None;
        }
        let entry = entry_at(block, at);
        at = entry.as_ref().map_or(block.len(), |entry| at + entry.len);
        Some(entry)
    })
}

fn entry_at(block: &[u8], at: usize) -> Result<Entry<'_>, BrokenChain> {
    let broken = BrokenChain { at };
    if block.len() - at < HEAD_BYTES {
        return Err(broken);
    }
    let inode = u32_at(block, at);
    let len = usize::from(u16_at(block, at + 4));
    let name_len = usize::from(block[at + 6]);
    if len < HEAD_BYTES || !len.is_multiple_of(4) || len > block.len() - at {
        return Err(broken);
    }
    let name = match inode {
        0 => &[],
        _ if name_len == 0 || entry_bytes(name_len) > len => return Err(broken),
        _ => &block[at + HEAD_BYTES..at + HEAD_BYTES + name_len],
    };
    if name.iter().any(|byte| matches!(byte, 0 | b'/')) {
        return Err(broken);
    }
    Ok(Entry { at, len, inode, kind: kind_of(block[at + 7]), name })
}

fn kind_of(byte: u8) -> Option<FileKind> {
    Some(match byte {
        1 => FileKind::Regular,
        2 => FileKind::Directory,
        3 => FileKind::CharDevice,
        4 => FileKind::BlockDevice,
        5 => FileKind::Fifo,
        6 => FileKind::Socket,
        7 => FileKind::Symlink,
        _ => return None,
    })
}

fn byte_of(kind: Option<FileKind>) -> u8 {
    match kind {
        None => 0,
        Some(FileKind::Regular) => 1,
        Some(FileKind::Directory) => 2,
        Some(FileKind::CharDevice) => 3,
        Some(FileKind::BlockDevice) => 4,
        Some(FileKind::Fifo) => 5,
        Some(FileKind::Socket) => 6,
        Some(FileKind::Symlink) => 7,
    }
}

/// Makes a block one piece of free room.
pub fn clear(block: &mut [u8]) {
    let len = block.len();
    block.fill(0);
    put_u16(block, 4, len as u16);
}

/// Puts an entry into room that was found large enough: behind the entry there, or in its
/// place if it is free. Without `kind`, the feature `filetype` is absent.
///
/// # Panics
/// If the room is too small.
pub fn insert(block: &mut [u8], room_at: usize, inode: u32, kind: Option<FileKind>, name: &[u8]) {
    let room = entry_at(block, room_at).expect("the caller found the room by walking the chain");
    assert!(room.spare_bytes() >= entry_bytes(name.len()), "the caller looked at its size");
    let (mut at, mut len) = (room.at, room.len);
    if room.inode != 0 {
        let used = entry_bytes(room.name.len());
        put_u16(block, at + 4, used as u16);
        at += used;
        len -= used;
    }
    put_u32(block, at, inode);
    put_u16(block, at + 4, len as u16);
    block[at + 6] = name.len() as u8;
    block[at + 7] = byte_of(kind);
    block[at + HEAD_BYTES..at + HEAD_BYTES + name.len()].copy_from_slice(name);
}

/// Removes the entry at `at`: its room joins the entry before it.
///
/// # Errors
/// [`BrokenChain`] if no entry begins there.
pub fn remove(block: &mut [u8], at: usize) -> Result<(), BrokenChain> {
    let mut before = None;
    let mut found = None;
    for entry in entries(block) {
        let entry = entry?;
        if entry.at == at {
            found = Some(entry.len);
            break;
        }
        before = Some((entry.at, entry.len));
    }
    let len = found.ok_or(BrokenChain { at })?;
    match before {
        Some((before_at, before_len)) => put_u16(block, before_at + 4, (before_len + len) as u16),
        None => put_u32(block, at, 0),
    }
    Ok(())
}

/// Makes the entry at `at` mean another file.
///
/// # Panics
/// If `at` is not in the block.
pub fn replace(block: &mut [u8], at: usize, inode: u32, kind: Option<FileKind>) {
    put_u32(block, at, inode);
    block[at + 7] = byte_of(kind);
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_bytes_are_walked_to_an_end(block in proptest::collection::vec(any::<u8>(), 1024)) {
            prop_assert!(entries(&block).count() <= 128);
        }

        #[test]
        fn a_block_is_a_map_from_names(
            steps in proptest::collection::vec((0u8..40, 1usize..30, any::<bool>()), 0..200),
        ) {
            let mut block = vec![0; 1024];
            clear(&mut block);
            let mut model = BTreeMap::new();
            for (name, len, add) in steps {
                let name = vec![b'a' + name; len];
                let found = entries(&block).map(Result::unwrap).find(|e| e.name == name && e.inode != 0);
                prop_assert_eq!(found.map(|e| e.inode), model.get(&name).copied());
                match (add, found.map(|e| e.at)) {
                    (true, None) => {
                        let room = entries(&block)
                            .map(Result::unwrap)
                            .find(|e| e.spare_bytes() >= entry_bytes(len))
                            .map(|e| e.at);
                        if let Some(at) = room {
                            insert(&mut block, at, len as u32, Some(FileKind::Fifo), &name);
                            model.insert(name, len as u32);
                        }
                    }
                    (false, Some(at)) => {
                        remove(&mut block, at).unwrap();
                        model.remove(&name);
                    }
                    _ => {}
                }
            }
            let listed: BTreeMap<Vec<u8>, u32> = entries(&block)
                .map(Result::unwrap)
                .filter(|e| e.inode != 0)
                .map(|e| (e.name.to_vec(), e.inode))
                .collect();
            prop_assert_eq!(listed, model);
        }
    }

    #[test]
    fn one_fault_one_error() {
        let sound = || {
            let mut block = vec![0; 1024];
            clear(&mut block);
            insert(&mut block, 0, 12, Some(FileKind::Regular), b"name");
            block
        };
        assert!(entries(&sound()).all(|entry| entry.is_ok()));
        type Fault = (&'static str, fn(&mut Vec<u8>));
        let faults: &[Fault] = &[
            ("no length", |b| put_u16(b, 4, 0)),
            ("too short", |b| put_u16(b, 4, 8)),
            ("not a multiple of 4", |b| put_u16(b, 4, 14)),
            ("beyond the block", |b| put_u16(b, 4, 1028)),
            ("no name", |b| b[6] = 0),
            ("a slash", |b| b[9] = b'/'),
            ("a NUL", |b| b[9] = 0),
            ("a rest too short for an entry", |b| put_u16(b, 4, 1020)),
        ];
        for (what, fault) in faults {
            let mut block = sound();
            fault(&mut block);
            assert!(entries(&block).any(|entry| entry.is_err()), "{what}");
        }
    }
}
