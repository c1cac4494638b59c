//! Listings of open directories, which go on after the directory was opened again.

use std::sync::Arc;

use atoll_vfs::{DirEntry, Errno, Handle, InodeNumber};

use super::super::wire::{CallClass, FileCall, FileReply, MAX_LISTED};
use super::attempt::{Asked, errno};
use super::exchange::Stop;
use super::{Client, OpenAtClient, WAIT_LIMIT};

/// The most entries that one call lists, whatever its caller would take.
const MAX_ENTRIES: usize = 1 << 20;

impl Client {
    pub(super) async fn list(
        self: &Arc<Self>,
        inode: InodeNumber,
        handle: Handle,
        cookie: u64,
        limit: usize,
        with_entries: bool,
    ) -> Result<Vec<DirEntry>, Errno> {
        let open = match handle == Handle::NONE && self.features.has_stateless_directories {
            true => None,
            false => Some(self.opened_directory(inode, handle)?),
        };
        let _alone = match &open {
            Some(open) => {
                let alone = self.within(WAIT_LIMIT, open.listing.lock()).await;
                Some(alone.map_err(|_| Errno::ETIMEDOUT)?)
            }
            None => None,
        };
        let limit = limit.min(MAX_ENTRIES);
        let mut listed = Vec::new();
        let mut after = cookie;
        // Where the server goes on, of the session of this serial number, if all it has listed was listed before.
        let mut go_on = None;
        let mut left_out = 0;
        while listed.len() < limit {
            let wanted = (limit - listed.len()).min(MAX_LISTED) as u32;
            let place = (inode.0, after, go_on);
            let piece = match self.list_piece(open.clone(), place, wanted, with_entries).await {
                Ok(piece) => piece,
                Err(errno) if listed.is_empty() => return Err(errno),
                // The next call says it.
                Err(_) => break,
            };
            let (asked, entries) = piece;
            let Some(last) = entries.last() else { break };
            go_on = Some((asked.session.serial, last.cookie));
            if left_out > cookie {
                // More than were listed before.
                return Err(Errno::EPROTO);
            }
            for mut entry in entries {
                if let Some(found) = &mut entry.entry {
                    self.look_up(&asked.session, found);
                    self.refresh(&asked, found).await;
                    self.tell_entry(Some((inode.0, entry.name.clone())), found);
                }
                let lookup = entry.entry.map(|found| found.attr.inode);
                match self.cookie(open.as_deref(), after, entry) {
                    Some(entry) => {
                        after = entry.cookie;
                        listed.push(entry);
                    }
                    None => {
                        lookup.into_iter().for_each(|inode| self.forget(inode, 1));
                        left_out += 1;
                    }
                }
            }
        }
        Ok(listed)
    }

    /// Gives an entry the cookie that the front end sees. None if it was listed before the directory was opened again.
    fn cookie(&self, open: Option<&OpenAtClient>, after: u64, entry: DirEntry) -> Option<DirEntry> {
        match open {
            Some(open) if !self.features.has_lasting_cookies => {
                let mut half_read = open.half_read.lock().expect("no holder of this lock panics");
                half_read.1.list(after, entry)
            }
            _ => Some(entry),
        }
    }

    pub(super) async fn list_piece(
        self: &Arc<Self>,
        open: Option<Arc<OpenAtClient>>,
        (inode, after, go_on): (u64, u64, Option<(u64, u64)>),
        limit: u32,
        with_entries: bool,
    ) -> Result<(Asked, Vec<DirEntry>), Errno> {
        let lasting = self.features.has_lasting_cookies;
        let asked = self.run(CallClass::Reads, true, move |attempt| {
            let open = open.clone();
            async move {
                let (mut handle, mut cookie) = (0, after);
                if let Some(open) = open {
                    let (serial, number) = attempt.handle(&open).await?;
                    handle = number;
                    let mut half_read =
                        open.half_read.lock().expect("no holder of this lock panics");
                    let (opened_in, half_read) = &mut *half_read;
                    if std::mem::replace(opened_in, serial) != serial {
                        half_read.reopen();
                    }
                    cookie = match go_on {
                        Some((of, cookie)) if of == serial => cookie,
                        _ if lasting => after,
                        _ => half_read.seek(after).ok_or(Errno::EINVAL)?,
                    };
                }
                let list = FileCall::ReadDirectory { inode, handle, cookie, limit, with_entries };
                let (reply, data) = attempt.call(list, None).await?;
                Ok(Asked { reply, data, session: attempt.session.clone(), up_to: 0 })
            }
        });
        let mut asked = asked.await.map_err(|stop: Stop| errno(stop, CallClass::Reads))?;
        let reply = std::mem::replace(&mut asked.reply, FileReply::Nothing);
        let FileReply::Listing(entries) = reply else { return Err(Errno::EPROTO) };
        let entries: Result<Vec<DirEntry>, _> =
            entries.0.into_iter().map(DirEntry::try_from).collect();
        Ok((asked, entries?))
    }
}
