//! Methods and messages, byte for byte in `docs/design/pool-calls.md`.
//!
//! Headers are CBOR; bulk bytes (what is read and written, values of attributes, targets of links) travel beside the header as the
//! only part. Every list has a cap that is checked before it is read, and values that a file system could not mean (a kind, a
//! name, a time) are refused where they are decoded.

mod calls;
mod values;

use std::ops::RangeInclusive;

use atoll_net::header::{Capped, from_header, to_header};
use atoll_net::{Reply, Request};
use atoll_vfs::InodeNumber;
use bytes::Bytes;
use minicbor::{Decode, Encode};

pub(super) use calls::{CallClass, FileCall, FileReply, Forgotten, WireName, WireOpened};
pub(super) use values::{
    Meaningless, WireCaller, WireDirEntry, WireWriter, kind, kind_number, nanos,
};

/// The methods of this module; others of the pools' family `0x05` are another's.
pub const METHODS: RangeInclusive<u16> = 0x0540..=0x054f;

/// Begins a session: [`Begin`], answered by [`Begun`].
pub(super) const BEGIN: u16 = 0x0540;
/// Keeps a session: [`SessionCall`], answered by an empty header.
pub(super) const RENEW: u16 = 0x0541;
/// Ends a session: [`SessionCall`], answered by an empty header.
pub(super) const END: u16 = 0x0542;
/// A call of the file system: [`CallHeader`], answered by [`Answer`] of [`FileReply`].
pub(super) const CALL: u16 = 0x0543;

/// Refusal: the server has no such session of this peer.
pub(super) const UNKNOWN_SESSION: u16 = 100;
/// Refusal: the numbered call has arrived and is not done yet; ask again.
pub(super) const AT_WORK: u16 = 101;
/// Refusal: the client has said that it waits for no such number any more.
pub(super) const GIVEN_UP: u16 = 102;

/// Refusal: the server has ended while the call was at work, which may have been made.
pub(super) const ENDED: u16 = 103;

/// The most bytes that one call reads or writes.
pub(super) const MAX_DATA_BYTES: usize = 1 << 20;
/// The most entries of a directory in one reply: with their attributes they fit into a header (a test).
pub(super) const MAX_LISTED: usize = 512;
/// The most elements of other lists.
pub(super) const MAX_LIST: usize = 1024;

/// A session: random, chosen by the client.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Encode, Decode)]
#[cbor(transparent)]
pub(super) struct SessionId(#[cbor(n(0), with = "minicbor::bytes")] pub(super) [u8; 16]);

/// What was asked, or why the file system refused.
#[derive(Clone, PartialEq, Debug, Encode, Decode)]
pub(super) enum Answer<T> {
    #[n(0)]
    Done(#[n(0)] T),
    #[n(1)]
    Failed(#[n(0)] i32),
}

#[derive(Clone, PartialEq, Debug, Encode, Decode)]
#[cbor(map)]
pub(super) struct Begin {
    #[n(0)]
    pub(super) session: SessionId,
    /// Who begins it: random bits, the same in all sessions of the client. Its numbers of calls are the same in all of them, too.
    #[cbor(n(1), with = "minicbor::bytes")]
    pub(super) client: [u8; 16],
    /// As in [`SessionCall`].
    #[n(2)]
    pub(super) lowest: u64,
}

#[derive(Clone, PartialEq, Debug, Encode, Decode)]
#[cbor(map)]
pub(super) struct Begun {
    /// Of this run of the server: random.
    #[n(0)]
    pub(super) boot: u64,
    #[n(1)]
    pub(super) has_acls: bool,
    #[n(2)]
    pub(super) has_stateless_directories: bool,
    #[n(3)]
    pub(super) has_lasting_cookies: bool,
    #[n(4)]
    pub(super) missing_ttl_nanos: u64,
    /// Calls that are made once ([`FileCall::is_made_once`]) are so over restarts, and whichever member serves.
    #[n(5)]
    pub(super) remembers_calls: bool,
    /// The write verifier: the same as that of another run if bytes which that one answered are all here.
    #[n(6)]
    pub(super) verifier: u64,
}

/// What each call of a session begins with.
#[derive(Clone, PartialEq, Debug, Encode, Decode)]
#[cbor(map)]
pub(super) struct SessionCall {
    #[n(0)]
    pub(super) session: SessionId,
    #[n(1)]
    pub(super) boot: u64,
    /// The lowest number whose answer the client still waits for.
    #[n(2)]
    pub(super) lowest: u64,
}

#[derive(Clone, PartialEq, Debug, Encode, Decode)]
#[cbor(map)]
pub(super) struct CallHeader {
    #[n(0)]
    pub(super) of: SessionCall,
    /// Which call of the client it is: one for all attempts. None: it may be done twice.
    #[n(1)]
    pub(super) number: Option<u64>,
    #[n(2)]
    pub(super) call: FileCall,
    /// Lookups that the session takes back before a numbered call.
    #[n(3)]
    pub(super) forgotten: Capped<Forgotten, MAX_LIST>,
}

/// A read that members may answer that are not the primary.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ReplicaRead {
    /// The run of the server that has the client's session.
    pub(crate) boot: u64,
    pub(crate) inode: InodeNumber,
    pub(crate) offset: u64,
    pub(crate) len: usize,
}

impl ReplicaRead {
    /// The read that a request asks for; none if it asks for something else, or cannot be read, which is the server's to say.
    pub(crate) fn of(request: &Request) -> Option<ReplicaRead> {
        if request.method != CALL || !request.parts.is_empty() {
            return None;
        }
        let CallHeader { of, number, call, .. } = from_header(&request.header).ok()?;
        let FileCall::Read { inode, offset, len, anywhere: true, .. } = call else { return None };
        let len = (len as usize).min(MAX_DATA_BYTES);
        number.is_none().then_some(ReplicaRead {
            boot: of.boot,
            inode: InodeNumber(inode),
            offset,
            len,
        })
    }

    /// The answer to it.
    pub(crate) fn reply(bytes: Bytes) -> Reply {
        Reply { header: to_header(&Answer::Done(FileReply::Bytes)), parts: vec![bytes] }
    }
}

#[cfg(test)]
mod tests {
    use atoll_vfs::{Caller, FileLock, Handle, LockKind, LockRange, SetAttr, SetTime};
    use proptest::prelude::*;

    use super::*;

    fn messages() -> Vec<CallHeader> {
        let caller = WireCaller::alone(&Caller::default());
        let of = SessionCall { session: SessionId([7; 16]), boot: 9, lowest: 3 };
        let name = b"name".to_vec();
        let changes =
            SetAttr { size_bytes: Some(7), mtime: Some(SetTime::Now), ..SetAttr::default() };
        let range = LockRange { first: 1, last: 2 };
        let (kind, through) = (LockKind::Exclusive, Some(Handle(3)));
        let wanted = FileLock { kind, range, pid: 1, through }.into();
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
                writer: WireWriter::AtEnd(caller),
                inode: 2,
                handle: 1,
                offset: 0,
                under: Some(7),
            },
            FileCall::Forget,
            FileCall::Sync,
            FileCall::GetXattr { inode: 2, name },
            FileCall::Lock { session: None, inode: 2, owner: 3, wanted, waits: true, over: 6 },
            FileCall::KeepLocks { session: Some(7), inode: 2, owner: 3, kept: vec![wanted].into() },
        ];
        let forgotten = Capped(vec![Forgotten { inode: 4, count: 2 }]);
        let message = |call| {
            let (of, forgotten) = (of.clone(), forgotten.clone());
            CallHeader { of, number: Some(5), call, forgotten }
        };
        calls.map(message).to_vec()
    }

    #[test]
    fn messages_read_back_and_cut_ones_are_refused() {
        for message in messages() {
            let header = to_header(&message);
            assert_eq!(from_header(&header), Ok(message));
            for cut in 0..header.len() {
                assert!(from_header::<CallHeader>(&header[..cut]).is_err());
            }
        }
    }

    proptest! {
        #[test]
        fn foreign_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = from_header::<CallHeader>(&bytes);
            let _ = from_header::<Answer<FileReply>>(&bytes);
            let _ = from_header::<Answer<Begun>>(&bytes);
            let _ = from_header::<SessionCall>(&bytes);
        }

        #[test]
        fn damaged_messages_are_read_or_refused(which in 0usize..8, at in any::<prop::sample::Index>(), byte: u8) {
            let mut bytes = to_header(&messages()[which]).to_vec();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            let _ = from_header::<CallHeader>(&bytes);
        }
    }
}
