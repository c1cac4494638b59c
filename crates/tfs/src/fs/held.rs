//! Inodes that are held: looked up by the front end, or open.
//!
//! An inode without a name lives on while it is held; until then it stands on ext2's list of
//! orphans (`s_last_orphan`, chained through `i_dtime`), so that after a crash the next mount,
//! or e2fsck, gives it back.

use std::sync::{Arc, RwLock};

use atoll_vfs::{
    Attr, AttrReply, Caller, Entry, Errno, FileKind, FileTime, Handle, InodeNumber, InodeTable,
    OpenFlags, TableInode,
};

use super::known::KnownInodes;
use super::{Core, FOR_EVER, Shared, TRANSPARENT_TTL, errno};
use crate::ext2::Ext2Error;
use crate::format::inode::{Inode, TRANSPARENT};
use crate::format::superblock::ROOT_INODE;

/// The lock of a file that is open, or was cut off while it was not.
///
/// Writers of data and length take it as writers, readers as readers; before the core.
#[derive(Debug, Default)]
struct FileLock(Arc<RwLock<()>>);

impl TableInode for FileLock {
    /// A call that holds the lock would not keep out one that got another.
    fn is_needed(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

/// An open file or directory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Open {
    pub(super) flags: OpenFlags,
    /// What is written through a mapping may use the reserved blocks: its opener may.
    pub(super) privileged: bool,
}

/// An inode that lost its last name and is to be given back. Another call may do it first, and
/// the number be another file's by then: the generation tells.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ending {
    number: u32,
    generation: u32,
}

impl Ending {
    pub(super) fn of(number: u32, inode: &Inode) -> Ending {
        Ending { number, generation: inode.generation }
    }
}

/// All that is held. Lookups are counted apart from opens, since there are far more of them.
#[derive(Debug)]
pub(super) struct HeldInodes {
    known: KnownInodes,
    open: InodeTable<FileLock, Open>,
}

impl Default for HeldInodes {
    fn default() -> HeldInodes {
        HeldInodes { known: KnownInodes::default(), open: InodeTable::without_root(1) }
    }
}

/// The inode behind a number of the front end.
pub(super) fn to_ext2(number: InodeNumber) -> Result<u32, Errno> {
    match number {
        InodeNumber::ROOT => Ok(ROOT_INODE),
        InodeNumber(number) => {
            // Reserved inodes are not shown; the root has a number of its own.
            u32::try_from(number).ok().filter(|n| *n > 10).ok_or(Errno::ESTALE)
        }
    }
}

/// The number the front end knows an inode by.
pub(super) fn to_vfs(inode: u32) -> InodeNumber {
    if inode == ROOT_INODE { InodeNumber::ROOT } else { InodeNumber(u64::from(inode)) }
}

impl HeldInodes {
    pub(super) fn is_held(&self, inode: u32) -> bool {
        self.known.is_known(inode) || self.is_open(inode)
    }

    pub(super) fn is_open(&self, inode: u32) -> bool {
        self.open.is_held(inode.into())
    }

    /// The directory in which a held inode was found last.
    pub(super) fn parent_of(&self, inode: u32) -> Option<u32> {
        self.known.parent_of(inode)
    }

    /// Says that a held inode is in another directory now.
    pub(super) fn moved(&mut self, inode: u32, parent: u32) {
        self.known.moved(inode, parent);
    }

    /// The file's lock.
    pub(super) fn lock_of(&mut self, inode: u32) -> Arc<RwLock<()>> {
        if !self.is_held(inode) {
            return Arc::default();
        }
        self.keep(inode).0.clone()
    }

    fn keep(&mut self, inode: u32) -> &FileLock {
        if !self.open.contains(inode.into()) {
            self.open.insert(inode.into(), None, FileLock::default());
        }
        &self.open[inode.into()]
    }

    fn open(&mut self, inode: u32, privileged: bool, flags: OpenFlags) -> Handle {
        self.keep(inode);
        let opened = self.open.open(inode.into(), Open { flags, privileged });
        Handle(opened.expect("it is in the table"))
    }

    pub(super) fn opened(&self, inode: u32, handle: Handle) -> Result<Open, Errno> {
        self.open.opened(inode.into(), handle.0).copied()
    }

    /// Takes back lookups; true if the inode is no longer held.
    fn forget(&mut self, inode: u32, lookups: u64) -> bool {
        let was_held = self.is_held(inode);
        self.known.forget(inode, lookups);
        self.open.reap(inode.into(), |_, _| {});
        was_held && !self.is_held(inode)
    }

    /// Ends an open; true if the inode is no longer held.
    fn close(&mut self, inode: u32, handle: Handle) -> Result<bool, Errno> {
        self.open.close(inode.into(), handle.0, |_, _| {})?;
        Ok(!self.is_held(inode))
    }
}

impl Core {
    /// An inode that is in use; `ESTALE` for one that is not.
    pub(super) fn live_inode(&mut self, number: u32) -> Result<Inode, Errno> {
        let inode = self.ext2.inode(number).map_err(|error| match error {
            Ext2Error::Damaged(_) => Errno::ESTALE,
            error => errno(&error),
        })?;
        let in_use = inode.mode != 0 && (inode.links > 0 || self.held.is_held(number));
        if !in_use {
            return Err(Errno::ESTALE);
        }
        self.ext2.check_sizes(number, &inode).map_err(|error| errno(&error))?;
        Ok(inode)
    }

    /// As [`Core::live_inode`], of a number that comes from outside: inodes that no name leads to,
    /// as the records', are not in use either.
    pub(super) fn inode_in_use(&mut self, number: u32) -> Result<Inode, Errno> {
        let inode = self.live_inode(number)?;
        match self.ext2.is_inode_in_use(number).map_err(|error| errno(&error))? {
            true => Ok(inode),
            false => Err(Errno::ESTALE),
        }
    }

    /// A directory that is in use.
    pub(super) fn live_directory(&mut self, number: u32) -> Result<Inode, Errno> {
        let inode = self.live_inode(number)?;
        match inode.kind() {
            Ok(FileKind::Directory) => Ok(inode),
            _ => Err(Errno::ENOTDIR),
        }
    }

    /// Writes an inode and returns it as it is kept: times may have been clamped.
    pub(super) fn keep_inode(&mut self, number: u32, inode: &Inode) -> Result<Inode, Ext2Error> {
        self.ext2.put_inode(number, inode)?;
        self.ext2.inode(number)
    }

    /// The attributes of an inode.
    pub(super) fn attr(&mut self, number: u32, inode: &Inode) -> Result<Attr, Errno> {
        let kind = inode.kind().map_err(|_| Errno::EIO)?;
        let device = matches!(kind, FileKind::CharDevice | FileKind::BlockDevice);
        let (mut size_bytes, mut blocks_512) = (inode.size_bytes, u64::from(inode.blocks_512));
        if inode.is_transparent_file()
            && let Some(entry) = self.map_entry(number, inode).map_err(|error| errno(&error))?
        {
            size_bytes = entry.size_bytes;
            let block_bytes = u64::from(self.ext2.superblock().block_bytes());
            blocks_512 += u64::from(entry.blocks) * (block_bytes / 512);
        }
        Ok(Attr {
            inode: to_vfs(number),
            kind,
            mode: u32::from(inode.mode & 0o7777),
            nlink: u32::from(inode.links),
            uid: inode.uid,
            gid: inode.gid,
            rdev: if device { inode.device() } else { 0 },
            size_bytes,
            blocks_512,
            block_size_bytes: self.ext2.superblock().block_bytes(),
            atime: inode.atime,
            mtime: inode.mtime,
            ctime: inode.ctime,
        })
    }

    pub(super) fn attr_reply(&mut self, number: u32, inode: &Inode) -> Result<AttrReply, Errno> {
        let ttl = if inode.is_transparent_file() { TRANSPARENT_TTL } else { FOR_EVER };
        Ok(AttrReply { attr: self.attr(number, inode)?, ttl })
    }

    /// The entry of an inode found in `parent`, counted as a lookup.
    pub(super) fn entry(
        &mut self,
        number: u32,
        inode: &Inode,
        parent: u32,
    ) -> Result<Entry, Errno> {
        let attr = self.attr(number, inode)?;
        self.held.known.look_up(number, parent);
        let generation = u64::from(inode.generation);
        let ttl = if inode.is_transparent_file() { TRANSPARENT_TTL } else { FOR_EVER };
        Ok(Entry { attr, generation, name_ttl: ttl, attr_ttl: ttl })
    }

    /// Opens an inode.
    pub(super) fn open(&mut self, number: u32, opener: Caller, flags: OpenFlags) -> Handle {
        let privileged = self.may_use_reserve(opener);
        self.held.open(number, privileged, flags)
    }

    /// Puts an inode without a name on the list of orphans.
    pub(super) fn add_orphan(&mut self, number: u32, inode: &mut Inode) -> Result<(), Ext2Error> {
        inode.dtime = self.ext2.superblock().last_orphan();
        self.ext2.change_superblock(|superblock| superblock.set_last_orphan(number))
    }

    /// Takes an inode off the list of orphans.
    pub(super) fn remove_orphan(&mut self, number: u32, next: u32) -> Result<(), Ext2Error> {
        if self.ext2.superblock().last_orphan() == number {
            return self.ext2.change_superblock(|superblock| superblock.set_last_orphan(next));
        }
        let mut before = self.ext2.superblock().last_orphan();
        // The list is as long as files are open without a name, or a loop on a damaged disk.
        for _ in 0..self.ext2.superblock().inodes() {
            if before == 0 {
                return Ok(());
            }
            let mut inode = self.ext2.inode(before)?;
            if inode.dtime == number {
                inode.dtime = next;
                return self.ext2.put_inode(before, &inode);
            }
            before = inode.dtime;
        }
        Ok(())
    }
}

/// Blocks that the end of an inode changes at most: its own, bitmap, descriptor, superblock,
/// an orphan before it, its attributes' block with bitmap and records.
const END_BLOCKS: usize = 12;
/// And a step of giving an inode back.
const END_STEP_BLOCKS: usize = crate::ext2::BLOCKS_A_STEP + END_BLOCKS;

impl Shared {
    pub(super) fn now(&self) -> FileTime {
        let ms = self.env.unix_ms();
        let secs = i64::try_from(ms / 1000).unwrap_or(i64::MAX);
        FileTime { secs, nanos: (ms % 1000) as u32 * 1_000_000 }
    }

    /// Takes back lookups; an inode that has no name and is no longer held ends.
    pub(super) fn forget(&self, number: u32, lookups: u64) -> Result<(), Errno> {
        let ending = {
            let mut core = self.core();
            if core.held.forget(number, lookups) { core.ending_of(number) } else { None }
        };
        self.end(ending)
    }

    /// Closes a handle.
    pub(super) fn close(&self, number: u32, handle: Handle) -> Result<(), Errno> {
        let ending = {
            let mut core = self.core();
            let is_let_go = core.held.close(number, handle)?;
            core.close_transparent(number);
            core.ext2.drop_window(number);
            if is_let_go { core.ending_of(number) } else { None }
        };
        self.end(ending)
    }

    fn end(&self, ending: Option<Ending>) -> Result<(), Errno> {
        match ending {
            Some(ending) if !self.read_only => self.end_inode(ending),
            _ => Ok(()),
        }
    }

    /// Gives back an orphan: its blocks step by step, then the inode.
    pub(super) fn end_inode(&self, ending: Ending) -> Result<(), Errno> {
        loop {
            let _handle = self.join_transaction(END_STEP_BLOCKS)?;
            if self.end_some(ending)? {
                return Ok(());
            }
        }
    }

    /// A step of that; whether nothing is left to do.
    fn end_some(&self, Ending { number, generation }: Ending) -> Result<bool, Errno> {
        let mut core = self.core();
        let mut inode = core.ext2.inode(number).map_err(|error| errno(&error))?;
        let in_use = core.ext2.is_inode_in_use(number).map_err(|error| errno(&error))?;
        if !in_use || inode.links > 0 || inode.generation != generation {
            return Ok(true);
        }
        let next = inode.dtime;
        let done = core.free_some(number, &mut inode).map_err(|error| self.broken(&error))?;
        if done {
            core.remove_orphan(number, next).map_err(|error| self.broken(&error))?;
            let end = core.finish_inode(number, inode, self.now());
            end.map_err(|error| self.broken(&error))?;
        }
        Ok(done)
    }

    /// Ends all orphans, held or not: at a mount those of a crash, at an unmount those that
    /// the front end has not taken back.
    pub(super) fn end_orphans(&self) -> Result<(), Errno> {
        loop {
            let (number, inodes) = {
                let core = self.core();
                let superblock = core.ext2.superblock();
                (superblock.last_orphan(), superblock.first_inode()..=superblock.inodes())
            };
            if number == 0 {
                return Ok(());
            }
            let ending = {
                let mut core = self.core();
                let sound = inodes.contains(&number)
                    && core.ext2.is_inode_in_use(number).is_ok_and(|in_use| in_use);
                if sound { core.ending_of(number) } else { None }
            };
            let Some(ending) = ending else {
                let what = format!("inode {number} on the list of orphans");
                return Err(self.broken(&Ext2Error::Damaged(what)));
            };
            while {
                let _handle = self.join_transaction_at_end(END_STEP_BLOCKS)?;
                !self.end_some(ending)?
            } {}
        }
    }

    /// Ends all changes because a call broke off in the middle, and what it did by then must
    /// not be committed.
    pub(super) fn broken(&self, error: &Ext2Error) -> Errno {
        self.fail(error)
    }
}

impl Core {
    /// What ends if an inode has no name.
    fn ending_of(&mut self, number: u32) -> Option<Ending> {
        let inode = self.ext2.inode(number).ok();
        inode.filter(|inode| inode.links == 0).map(|inode| Ending::of(number, &inode))
    }

    /// Gives back blocks of an inode that ends; true when none are left.
    pub(super) fn free_some(&mut self, number: u32, inode: &mut Inode) -> Result<bool, Ext2Error> {
        let done = match inode.kind() {
            Ok(FileKind::Regular) if inode.is_transparent_file() => self.ext2.drop_map(number)?,
            Ok(FileKind::Regular | FileKind::Directory) => self.ext2.cut_off(number, inode, 0)?,
            Ok(FileKind::Symlink) if !inode.is_short_link(self.ext2.superblock().block_bytes()) => {
                self.ext2.cut_off(number, inode, 0)?
            }
            _ => true,
        };
        self.ext2.put_inode(number, inode)?;
        Ok(done)
    }

    /// Gives back an inode whose blocks are gone.
    pub(super) fn finish_inode(
        &mut self,
        number: u32,
        mut inode: Inode,
        now: FileTime,
    ) -> Result<(), Ext2Error> {
        let directory = inode.kind() == Ok(FileKind::Directory);
        self.ext2.release_xattrs(&mut inode)?;
        if directory {
            self.ext2.forget_directory(number);
        }
        // As e2fsck wants it: deleted, and since when.
        inode.dtime = u32::try_from(now.secs.max(1)).unwrap_or(u32::MAX);
        inode.links = 0;
        self.ext2.put_inode(number, &inode)?;
        let transparent =
            inode.is_transparent_file() || (directory && inode.flags & TRANSPARENT != 0);
        self.ext2.release_inode(number, directory, transparent)
    }
}
