//! The code by which a node joins a pool: `atoll-pool:` and checked base 32 ([`atoll_key::text`]) of
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 1 | layout, 2 |
//! | 1 | n | CBOR array: pool (16 bytes), token (16 bytes), level, key of the member that gave the code (32 bytes), its address as text |
//!
//! Who has it may join: it is secret.

use std::fmt;
use std::str::FromStr;

use atoll_key::PeerId;
use atoll_key::text::{self, TextError};
use atoll_net::Peer;
use atoll_pool::PoolId;
use minicbor::{Decode, Encode};

const SCHEME: &str = "atoll-pool:";
const LAYOUT: u8 = 2;
/// The longest text that is read as a code, bytes.
const MAX_CODE_BYTES: usize = 1024;

/// See the module.
#[derive(Clone, PartialEq, Eq)]
pub struct PoolInvitation {
    /// Which pool.
    pub pool: PoolId,
    /// Shows that this member has given the code.
    pub token: [u8; 16],
    /// Directories down to this level are distributed.
    pub level: u8,
    /// The member that gave it.
    pub member: Peer,
}

#[derive(Encode, Decode)]
struct Payload {
    #[cbor(n(0), with = "minicbor::bytes")]
    pool: [u8; 16],
    #[cbor(n(1), with = "minicbor::bytes")]
    token: [u8; 16],
    #[n(2)]
    level: u8,
    #[cbor(n(3), with = "minicbor::bytes")]
    key: [u8; 32],
    #[n(4)]
    addr: String,
}

/// The token does not enter logs.
impl fmt::Debug for PoolInvitation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PoolInvitation({})", self.member)
    }
}

impl fmt::Display for PoolInvitation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let payload = Payload {
            pool: self.pool,
            token: self.token,
            level: self.level,
            key: self.member.id.0,
            addr: self.member.addr.to_string(),
        };
        let body = minicbor::to_vec(payload).expect("a vector takes everything");
        f.write_str(&text::encode_checked(SCHEME, &[&[LAYOUT], &body[..]].concat()))
    }
}

impl FromStr for PoolInvitation {
    type Err = TextError;

    fn from_str(text: &str) -> Result<PoolInvitation, TextError> {
        let text = text.trim();
        if text.len() > MAX_CODE_BYTES {
            return Err(TextError::Encoding);
        }
        let bytes = text::decode_checked(SCHEME, text)?;
        let Some((&LAYOUT, body)) = bytes.split_first() else { return Err(TextError::Version) };
        let payload: Payload = minicbor::decode(body).map_err(|_| TextError::Version)?;
        let Payload { pool, token, level, key, addr } = payload;
        let addr = addr.parse().map_err(|_| TextError::Version)?;
        Ok(PoolInvitation { pool, token, level, member: Peer { id: PeerId(key), addr } })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_reads_back_and_a_mistyped_one_does_not() {
        let invitation = PoolInvitation {
            pool: [1; 16],
            token: [2; 16],
            level: 1,
            member: Peer { id: PeerId([3; 32]), addr: "[::1]:4711".parse().unwrap() },
        };
        let text = invitation.to_string();
        assert_eq!(format!(" {text}\n").parse(), Ok(invitation.clone()));
        assert!(!format!("{invitation:?}").contains(&text[20..40]), "the code is secret");
        let other = if &text[30..31] == "a" { "b" } else { "a" };
        let mistyped = format!("{}{other}{}", &text[..30], &text[31..]);
        assert_eq!(mistyped.parse::<PoolInvitation>(), Err(TextError::Checksum));
        assert!(text[..text.len() - 1].parse::<PoolInvitation>().is_err(), "it is cut short");
        assert_eq!("atoll:abc".parse::<PoolInvitation>(), Err(TextError::Scheme(SCHEME)));
    }
}
