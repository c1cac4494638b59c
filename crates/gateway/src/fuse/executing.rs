//! Programs that run from a mount, and may not be emptied.
//!
//! With `FUSE_ATOMIC_O_TRUNC` an open empties the file. The kernel refuses before it sends one for writing if
//! the file is a program that runs (`ETXTBSY`), but one for reading with `O_TRUNC` it refuses only after that. The
//! kernel marks the opens of programs that it loads, and keeps such a file open while the program runs.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use atoll_vfs::{InodeNumber, OpenFlags};

/// `__FMODE_EXEC` of Linux, among the flags of an open.
const EXECUTES: i32 = 0x20;

/// How often each file is open to be executed. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(super) struct Executing(Arc<Mutex<BTreeMap<InodeNumber, usize>>>);

impl Executing {
    /// An open with these flags has succeeded.
    pub(super) fn note_open(&self, inode: InodeNumber, flags: OpenFlags) {
        if flags.has(EXECUTES) {
            *self.0.lock().expect("no holder of this lock panics").entry(inode).or_default() += 1;
        }
    }

    /// It has ended.
    pub(super) fn note_close(&self, inode: InodeNumber, flags: OpenFlags) {
        if flags.has(EXECUTES) {
            let mut open = self.0.lock().expect("no holder of this lock panics");
            match open.get_mut(&inode) {
                Some(1) | None => drop(open.remove(&inode)),
                Some(count) => *count -= 1,
            }
        }
    }

    /// Whether an open with these flags would empty a program that runs.
    pub(super) fn forbids(&self, inode: InodeNumber, flags: OpenFlags) -> bool {
        flags.has(OpenFlags::TRUNCATE)
            && self.0.lock().expect("no holder of this lock panics").contains_key(&inode)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_not_emptied_until_the_last_program_has_ended() {
        let (executing, file) = (Executing::default(), InodeNumber(7));
        let (runs, empties) = (OpenFlags(EXECUTES), OpenFlags(OpenFlags::TRUNCATE));
        executing.note_open(file, OpenFlags::READ);
        assert!(!executing.forbids(file, empties));
        executing.note_open(file, runs);
        executing.note_open(file, runs);
        executing.note_close(file, OpenFlags::READ);
        executing.note_close(file, runs);
        assert!(executing.forbids(file, empties) && !executing.forbids(file, OpenFlags::READ));
        assert!(!executing.forbids(InodeNumber(8), empties));
        executing.note_close(file, runs);
        assert!(!executing.forbids(file, empties));
    }
}
