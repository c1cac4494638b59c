//! Calls and replies of Sun RPC, version 2 (RFC 5531).
//!
//! A connection carries records (section 11): each is one message, in fragments that begin with their length and
//! whether they are the last. [`Records`] joins them; a record beyond its limit, or of more fragments than a client makes, is an
//! error that ends the connection, and memory is taken as bytes arrive, never because a header promises them.
//!
//! [`Call`] is what a client asks, with the user that it says it asks for ([`Credential`], `AUTH_SYS`: section 14, appendix A);
//! [`accepted`] and [`Refusal`] are what it is told.

use std::io;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt};

use super::xdr::{List, Opaque, Reader, Writer, XdrError, xdr_struct};

const VERSION: u32 = 2;
const CALL: u32 = 0;
const REPLY: u32 = 1;
const LAST_FRAGMENT: u32 = 1 << 31;
/// Most fragments of a record. Clients send one; a guess at what others might.
const MAX_FRAGMENTS: usize = 64;
/// Space made at a time for bytes to come.
const READ_BYTES: usize = 64 << 10;

/// The longest body of credentials (section 8.2).
const MAX_AUTH_BYTES: usize = 400;

/// Flavors of credentials (section 8.2).
const AUTH_NONE: u32 = 0;
const AUTH_SYS: u32 = 1;

xdr_struct! {
    /// Body of `AUTH_SYS` credentials.
    AuthSys {
        /// Chosen by the client's machine.
        stamp: u32,
        /// The name that the client's machine gives itself.
        machine: Opaque<255>,
        /// User number.
        uid: u32,
        /// First group.
        gid: u32,
        /// The other groups.
        gids: List<u32, 16>,
    }
    /// Credentials or a verifier of any flavor.
    OpaqueAuth {
        /// Which flavor.
        flavor: u32,
        /// What that flavor has in it.
        body: Opaque<MAX_AUTH_BYTES>,
    }
}

/// On whose behalf a call is made, as the client says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Credential {
    /// Nobody's (`AUTH_NONE`).
    None,
    /// A user's of the client's machine.
    Sys(AuthSys),
}

/// A call.
#[derive(Clone, Debug)]
pub struct Call {
    /// Number by which the client knows the reply. The same in a retransmission.
    pub xid: u32,
    /// Which program is called, and which version of it.
    pub program: (u32, u32),
    /// Which procedure.
    pub procedure: u32,
    /// For whom.
    pub credential: Credential,
    /// The arguments.
    pub arguments: Reader,
}

/// Why a call was not made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// Another version of RPC.
    RpcVersion,
    /// Credentials that cannot be read (`AUTH_BADCRED`).
    BadCredential,
    /// Credentials that are not enough (`AUTH_TOOWEAK`).
    TooWeak,
    /// There is no such program here.
    Program,
    /// There are these versions of the program: from, to.
    Version(u32, u32),
    /// The program has no such procedure.
    Procedure,
    /// The arguments cannot be read.
    Arguments,
}

impl Call {
    /// Reads a record. `Err` with the number of the call and the refusal to send; [`XdrError`] if it is no call, or not even that can be
    /// told, which ends the connection.
    pub fn read(record: Bytes) -> Result<Result<Call, (u32, Refusal)>, XdrError> {
        let mut from = Reader::new(record);
        let xid = from.take()?;
        if from.take::<u32>()? != CALL {
            return Err(XdrError::Invalid);
        }
        if from.take::<u32>()? != VERSION {
            return Ok(Err((xid, Refusal::RpcVersion)));
        }
        let program = (from.take()?, from.take()?);
        let procedure = from.take()?;
        let (auth, _verifier): (OpaqueAuth, OpaqueAuth) = (from.take()?, from.take()?);
        let Some(credential) = Credential::read(auth) else {
            return Ok(Err((xid, Refusal::BadCredential)));
        };
        Ok(Ok(Call { xid, program, procedure, credential, arguments: from }))
    }
}

impl Credential {
    fn read(auth: OpaqueAuth) -> Option<Credential> {
        match auth.flavor {
            AUTH_NONE => Some(Credential::None),
            AUTH_SYS => {
                let mut body = Reader::new(auth.body.0);
                let sys = body.take().ok()?;
                body.end().ok()?;
                Some(Credential::Sys(sys))
            }
            _ => None,
        }
    }
}

/// The beginning of the reply to a call that was made; its results follow.
pub fn accepted(xid: u32) -> Writer {
    reply(xid, &[0, AUTH_NONE, 0, 0])
}

fn reply(xid: u32, words: &[u32]) -> Writer {
    let mut writer = Writer::default();
    writer.put(&xid).put(&REPLY);
    words.iter().for_each(|word| {
        writer.put(word);
    });
    writer
}

impl Refusal {
    /// The whole reply.
    pub fn reply(self, xid: u32) -> Writer {
        match self {
            Refusal::RpcVersion => reply(xid, &[1, 0, VERSION, VERSION]),
            Refusal::BadCredential => reply(xid, &[1, 1, 1]),
            Refusal::TooWeak => reply(xid, &[1, 1, 5]),
            Refusal::Program => reply(xid, &[0, AUTH_NONE, 0, 1]),
            Refusal::Version(from, to) => reply(xid, &[0, AUTH_NONE, 0, 2, from, to]),
            Refusal::Procedure => reply(xid, &[0, AUTH_NONE, 0, 3]),
            Refusal::Arguments => reply(xid, &[0, AUTH_NONE, 0, 4]),
        }
    }
}

/// The record mark of a message that is sent as one fragment.
pub fn record_mark(len: usize) -> [u8; 4] {
    let len = u32::try_from(len).expect("a record is shorter than 2 GiB");
    (LAST_FRAGMENT | len).to_be_bytes()
}

/// Takes records from a connection.
#[derive(Debug)]
pub struct Records<R> {
    from: R,
    max_bytes: usize,
    buffer: BytesMut,
}

impl<R: AsyncRead + Unpin> Records<R> {
    /// Of records of at most so many bytes.
    pub fn new(from: R, max_bytes: usize) -> Records<R> {
        Records { from, max_bytes, buffer: BytesMut::new() }
    }

    /// Whether nothing has come behind the last record, as far as this has read.
    pub fn is_at_end(&self) -> bool {
        self.buffer.is_empty()
    }

    /// The next record; none at the end of the connection.
    ///
    /// # Errors
    /// Those of the connection; [`io::ErrorKind::InvalidData`] for a record that is too long, or in too many fragments;
    /// [`io::ErrorKind::UnexpectedEof`] for one that does not end.
    pub async fn next(&mut self) -> io::Result<Option<Bytes>> {
        let mut joined = BytesMut::new();
        for fragment in 0..MAX_FRAGMENTS {
            if !self.fill(4).await? {
                let is_between = fragment == 0 && self.buffer.is_empty();
                return if is_between {
                    Ok(None)
                } else {
                    Err(io::ErrorKind::UnexpectedEof.into())
                };
            }
            let mark =
                u32::from_be_bytes(self.buffer.split_to(4)[..].try_into().expect("four bytes"));
            let len = usize::try_from(mark & !LAST_FRAGMENT).expect("at least 32 bits");
            if joined.len().saturating_add(len) > self.max_bytes {
                return Err(invalid("a record is too long"));
            }
            if !self.fill(len).await? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let bytes = self.buffer.split_to(len);
            let is_last = mark & LAST_FRAGMENT != 0;
            if is_last && joined.is_empty() {
                return Ok(Some(bytes.freeze()));
            }
            joined.extend_from_slice(&bytes);
            if is_last {
                return Ok(Some(joined.freeze()));
            }
        }
        Err(invalid("a record is in too many fragments"))
    }

    /// Reads until the buffer has so many bytes; whether it has.
    async fn fill(&mut self, len: usize) -> io::Result<bool> {
        while self.buffer.len() < len {
            self.buffer.reserve(READ_BYTES.min(len - self.buffer.len()).max(4096));
            if self.from.read_buf(&mut self.buffer).await? == 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nfs::xdr::Xdr;

    fn call(words: &[u32], after: &[u8]) -> Bytes {
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        bytes.extend_from_slice(after);
        bytes.into()
    }

    #[test]
    fn a_call_says_for_whom_it_is() {
        let sys = AuthSys {
            stamp: 1,
            machine: Opaque::from(&b"host"[..]),
            uid: 1000,
            gid: 100,
            gids: List(vec![4, 24]),
        };
        let mut body = Writer::default();
        sys.write(&mut body);
        let body = body.into_bytes();
        let len = u32::try_from(body.len()).unwrap();
        let mut rest = body.to_vec();
        rest.extend_from_slice(&[0; 8]);
        rest.extend_from_slice(b"args");
        let read = Call::read(call(&[7, 0, 2, 100_003, 3, 1, 1, len], &rest)).unwrap().unwrap();
        assert_eq!((read.xid, read.program, read.procedure), (7, (100_003, 3), 1));
        assert_eq!(read.credential, Credential::Sys(sys));
        assert_eq!(&read.arguments.rest()[..], b"args");
    }

    #[test]
    fn what_cannot_be_served_is_refused_with_the_number_of_the_call() {
        let refused = |words: &[u32]| Call::read(call(words, &[])).map(|read| read.map(|_| ()));
        assert_eq!(refused(&[7, 0, 3]), Ok(Err((7, Refusal::RpcVersion))));
        assert_eq!(
            refused(&[7, 0, 2, 1, 1, 1, 6, 0, 0, 0]),
            Ok(Err((7, Refusal::BadCredential))),
            "a flavor"
        );
        assert_eq!(
            refused(&[7, 0, 2, 1, 1, 1, 1, 4, 0, 0, 0]),
            Ok(Err((7, Refusal::BadCredential))),
            "cut off"
        );
        assert_eq!(refused(&[7, 1, 2]), Err(XdrError::Invalid), "a reply");
        assert_eq!(refused(&[7, 0]), Err(XdrError::Short));
        assert_eq!(refused(&[7, 0, 2, 1, 1, 1, 0, 401]), Err(XdrError::TooLong));
    }

    #[tokio::test]
    async fn fragments_are_joined_and_long_records_refused() {
        let bytes =
            [&[0, 0, 0, 2][..], b"ab", &[0x80, 0, 0, 1], b"c", &[0x80, 0, 0, 4], b"next"].concat();
        let mut records = Records::new(&bytes[..], 4);
        assert_eq!(records.next().await.unwrap().unwrap(), &b"abc"[..]);
        assert_eq!(records.next().await.unwrap().unwrap(), &b"next"[..]);
        assert!(records.next().await.unwrap().is_none());
        for (bytes, kind) in [
            (&[0xff, 0xff, 0xff, 0xff][..], io::ErrorKind::InvalidData),
            (&[0, 0, 0, 3, 1, 2, 3, 0x80, 0, 0, 2, 4, 5], io::ErrorKind::InvalidData),
            (&[0; 4 * (MAX_FRAGMENTS + 1)], io::ErrorKind::InvalidData),
            (&[0x80, 0, 0, 4, 1], io::ErrorKind::UnexpectedEof),
            (&[0x80, 0], io::ErrorKind::UnexpectedEof),
            (&[0, 0, 0, 1, 1], io::ErrorKind::UnexpectedEof),
        ] {
            assert_eq!(Records::new(bytes, 4).next().await.unwrap_err().kind(), kind, "{bytes:?}");
        }
    }
}
