//! All decoders of foreign bytes at once, for fuzzing: whether any of them takes the bytes. What they take is checked as its reader
//! does.

use atoll_net::header::{from_header, to_header};
use atoll_vfs::{
    Attr, AttrReply, Caller, DirEntry, Entry, FileKind, FileLock, FileTime, Groups, Handle,
    InodeNumber, LockKind, LockRange, SetAttr, SetTime, StatFs,
};

use super::wire::{
    Answer, Begin, Begun, CallHeader, FileCall, FileReply, Forgotten, SessionCall, SessionId,
    WireCaller, WireName, WireOpened, WireWriter,
};

/// The header of a call.
pub fn call(bytes: &[u8]) -> bool {
    let call = from_header::<CallHeader>(bytes).map(|header| match header.call {
        FileCall::SetAttr { caller, changes, .. } => {
            caller.caller();
            SetAttr::try_from(changes).is_ok()
        }
        FileCall::Lock { wanted, .. } => FileLock::try_from(wanted).is_ok(),
        FileCall::KeepLocks { kept, .. } => {
            kept.0.into_iter().all(|lock| FileLock::try_from(lock).is_ok())
        }
        _ => true,
    });
    call.is_ok() | from_header::<SessionCall>(bytes).is_ok() | from_header::<Begin>(bytes).is_ok()
}

/// The header of a reply.
pub fn reply(bytes: &[u8]) -> bool {
    let reply = from_header::<Answer<FileReply>>(bytes);
    if let Ok(Answer::Done(reply)) = &reply {
        let _ = match reply {
            FileReply::Entry(entry) | FileReply::Created(entry, _) => {
                Entry::try_from(entry).map(drop)
            }
            FileReply::Attr(reply) => AttrReply::try_from(reply).map(drop),
            FileReply::Found(found) => found.0.iter().try_for_each(|one| match one {
                Answer::Done(entry) => Entry::try_from(entry).map(drop),
                Answer::Failed(_) => Ok(()),
            }),
            FileReply::Listing(list) => {
                list.0.iter().cloned().try_for_each(|entry| DirEntry::try_from(entry).map(drop))
            }
            _ => Ok(()),
        };
    }
    reply.is_ok() | from_header::<Answer<Begun>>(bytes).is_ok()
}

/// Headers of calls.
pub fn example_calls() -> Vec<Vec<u8>> {
    let caller = Caller { uid: 1, groups: Groups::listed(&[2, 3]), ..Caller::default() };
    let caller = WireCaller::with_groups(&caller);
    let name = b"name".to_vec();
    let mtime = Some(SetTime::To(FileTime { secs: -1, nanos: 7 }));
    let changes =
        SetAttr { size_bytes: Some(7), atime: Some(SetTime::Now), mtime, ..SetAttr::default() };
    let lock = FileLock {
        kind: LockKind::Exclusive,
        range: LockRange { first: 1, last: 1 << 40 },
        pid: 5,
        through: Some(Handle(3)),
    };
    let wanted = lock.into();
    let calls = [
        FileCall::Lookup { caller: caller.clone(), parent: 1, name: name.clone() },
        FileCall::LookupAll {
            caller: caller.clone(),
            parent: 1,
            names: vec![WireName(name.clone()); 2].into(),
        },
        FileCall::SetAttr {
            caller: caller.clone(),
            inode: 2,
            handle: 0,
            changes: changes.into(),
            under: None,
        },
        FileCall::Write {
            writer: WireWriter::AtEnd(caller.clone()),
            inode: 2,
            handle: 1,
            offset: 0,
            under: None,
        },
        FileCall::Write {
            writer: WireWriter::AtEndIf(caller.clone()),
            inode: 2,
            handle: 1,
            offset: 8,
            under: Some(4),
        },
        FileCall::Write {
            writer: WireWriter::AtEndAgain(caller),
            inode: 2,
            handle: 1,
            offset: 8,
            under: None,
        },
        FileCall::Persist { inodes: vec![1, 2].into() },
        FileCall::Sync,
        FileCall::GetXattr { inode: 2, name },
        FileCall::FindLock { inode: 2, owner: 3, wanted },
        FileCall::Lock { session: Some(4), inode: 2, owner: 3, wanted, waits: true, over: 3 },
        FileCall::KeepLocks { session: Some(4), inode: 2, owner: 3, kept: vec![wanted; 2].into() },
        FileCall::StopWaiting { inode: 2, owner: 3, keeps_place: true },
        FileCall::KeepSession { session: 4 },
    ];
    let (session, boot, lowest) = (SessionId([7; 16]), u64::MAX, 3);
    let of = SessionCall { session, boot, lowest };
    let begin = Begin { session, client: [9; 16], lowest };
    let mut all = vec![to_header(&of).to_vec(), to_header(&begin).to_vec()];
    for call in calls {
        let forgotten = vec![Forgotten { inode: 4, count: 2 }].into();
        all.push(
            to_header(&CallHeader { of: of.clone(), number: Some(5), call, forgotten }).to_vec(),
        );
    }
    all
}

/// Headers of replies.
pub fn example_replies() -> Vec<Vec<u8>> {
    let time = FileTime { secs: 1, nanos: 2 };
    let attr = Attr {
        inode: InodeNumber(7),
        kind: FileKind::Regular,
        mode: 0o644,
        nlink: 1,
        uid: 1,
        gid: 1,
        rdev: 0,
        size_bytes: 1 << 40,
        blocks_512: 9,
        block_size_bytes: 4096,
        atime: time,
        mtime: time,
        ctime: time,
    };
    let ttl = std::time::Duration::from_secs(1);
    let entry = Entry { attr, generation: 0, name_ttl: ttl, attr_ttl: ttl };
    let listed = DirEntry {
        name: b"name"[..].into(),
        kind: attr.kind,
        inode: attr.inode,
        cookie: 9,
        entry: Some(entry),
    };
    let opened = WireOpened { handle: 7, direct_io: false };
    let (kind, range) = (LockKind::Shared, LockRange::WHOLE);
    let wanted = FileLock { kind, range, pid: 5, through: None }.into();
    let replies = [
        FileReply::Nothing,
        FileReply::Created((&entry).into(), opened),
        FileReply::Attr((&AttrReply { attr, ttl }).into()),
        FileReply::Found(vec![Answer::Done((&entry).into()), Answer::Failed(2)].into()),
        FileReply::Listing(vec![(&listed).into(); 3].into()),
        FileReply::StatFs((&StatFs::default()).into()),
        FileReply::Written(7, Some(8)),
        FileReply::Handle(vec![1; 16]),
        FileReply::EndsAt(9),
        FileReply::Locked(4),
        FileReply::FoundLock(Some(wanted)),
        FileReply::LocksLost,
    ];
    let begun = Begun {
        boot: 1,
        has_acls: true,
        has_stateless_directories: false,
        has_lasting_cookies: true,
        missing_ttl_nanos: 5,
        remembers_calls: true,
        verifier: 2,
    };
    let mut all: Vec<Vec<u8>> =
        replies.map(|reply| to_header(&Answer::Done(reply)).to_vec()).into();
    all.push(to_header(&Answer::Done(begun)).to_vec());
    all.push(to_header(&Answer::<FileReply>::Failed(5)).to_vec());
    all
}
