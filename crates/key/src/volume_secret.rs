//! A volume's keys as text that can be printed on paper, sealed with a passphrase.
//!
//! The text is checked base 32 ([`crate::text`]) behind `atoll-key:`, in lines of 64 characters;
//! white space in it does not count. Its bytes:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 1 | layout, 1 |
//! | 1 | 4 | memory of Argon2id (RFC 9106), KiB, big-endian |
//! | 5 | 1 | its passes; it has one lane |
//! | 6 | 16 | salt |
//! | 22 | 24 | tag: the first bytes of BLAKE3, keyed with the tag key, of all that follows, in the clear |
//! | 46 | … | the content, encrypted by XChaCha20 under the cipher key with the tag as nonce |
//!
//! The first 32 bytes that Argon2id makes of passphrase and salt are the tag key, the next 32 the
//! cipher key. The content:
//!
//! | bytes | field |
//! |---|---|
//! | 1 | flags: 1 a read key follows, 2 a move's token, 4 a source |
//! | 32 | the volume's secret key |
//! | 0 or 32 | its read key |
//! | 0 or 16 | the token of the move that this text is of |
//! | 1, n | length of its name, the name |
//! | the rest | the directory it is published from, if any |
//!
//! The checksum of the text tells damage from a wrong passphrase.

use std::fmt;

use argon2::{Algorithm, Argon2, Params, Version};

use crate::identity::SecretKey;
use crate::kinds::SignedBlock;
use crate::read_key::{Keys, ReadKey, TAG_BYTES};
use crate::text::{TextError, decode_checked, encode_checked};

const SCHEME: &str = "atoll-key:";
const LAYOUT: u8 = 1;
const LINE_CHARS: usize = 64;
const HEADER_BYTES: usize = 1 + 4 + 1 + SALT_BYTES;

/// Bytes of the salt.
pub const SALT_BYTES: usize = 16;

/// The longest text that is read, bytes: a name of 255 bytes and a source of 4 KiB fit in.
pub const MAX_SECRET_TEXT_BYTES: usize = 16 << 10;

const HAS_READ_KEY: u8 = 1;
const HAS_TOKEN: u8 = 2;
const HAS_SOURCE: u8 = 4;

/// How much work it is to try a passphrase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// Memory, KiB.
    pub memory_kib: u32,
    /// Passes over it.
    pub passes: u8,
}

impl Cost {
    /// The second choice of RFC 9106 §4, in one lane: 64 MiB, 3 passes; a fifth of a second.
    pub const DEFAULT: Cost = Cost { memory_kib: 64 << 10, passes: 3 };

    /// The most that is done for a text: whoever wrote it chose its cost.
    pub const MAX: Cost = Cost { memory_kib: 256 << 10, passes: 10 };
}

/// Names one move of a volume to another node.
pub type MoveToken = [u8; 16];

/// All that it takes to write a volume.
#[derive(Clone)]
pub struct VolumeSecret {
    /// What its roots are signed with.
    pub key: SecretKey,
    /// What it is read with, if it is encrypted.
    pub read_key: Option<ReadKey>,
    /// Its name on the node that it comes from.
    pub name: String,
    /// The directory it is published from there, the system's bytes.
    pub source: Option<Vec<u8>>,
    /// The move, if the volume is given away.
    pub token: Option<MoveToken>,
}

/// Neither keys nor token.
impl fmt::Debug for VolumeSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VolumeSecret").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Why a text does not give a volume's keys.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    /// It is no such text, or a damaged one.
    #[error("{0}")]
    Text(#[from] TextError),
    /// It asks for more work than any program of ours does.
    #[error(
        "it asks for {memory_mib} MiB of memory and {passes} passes to open it; at most {most} MiB \
         and {most_passes} are taken",
        most = Cost::MAX.memory_kib >> 10,
        most_passes = Cost::MAX.passes
    )]
    Cost {
        /// Memory asked for.
        memory_mib: u32,
        /// Passes asked for.
        passes: u8,
    },
    /// The text is whole, and another passphrase seals it.
    #[error("the passphrase is wrong")]
    Passphrase,
}

impl VolumeSecret {
    /// Seals the keys with a passphrase. `salt` is random.
    ///
    /// # Panics
    /// If the name is longer than 255 bytes, or the cost is more than [`Cost::MAX`].
    pub fn seal(&self, passphrase: &str, salt: [u8; SALT_BYTES], cost: Cost) -> String {
        let mut bytes = vec![LAYOUT];
        bytes.extend_from_slice(&cost.memory_kib.to_be_bytes());
        bytes.push(cost.passes);
        bytes.extend_from_slice(&salt);
        let keys = keys_of(passphrase, &salt, cost).expect("our own cost is allowed");
        bytes.extend_from_slice(&keys.seal_inner(&self.encode()));
        let text = encode_checked(SCHEME, &bytes);
        let lines: Vec<&str> = text
            .as_bytes()
            .chunks(LINE_CHARS)
            .map(|line| std::str::from_utf8(line).expect("base 32 is ASCII"))
            .collect();
        lines.join("\n")
    }

    /// Opens what [`VolumeSecret::seal`] made.
    pub fn open(text: &str, passphrase: &str) -> Result<VolumeSecret, SecretError> {
        let text: String = text.chars().filter(|c| !c.is_whitespace()).collect();
        let bytes = decode_checked(SCHEME, &text)?;
        let unknown = SecretError::Text(TextError::Version);
        if bytes.first() != Some(&LAYOUT) || bytes.len() < HEADER_BYTES + TAG_BYTES {
            return Err(unknown);
        }
        let (header, sealed) = bytes.split_at(HEADER_BYTES);
        let memory_kib = u32::from_be_bytes(header[1..5].try_into().expect("4 bytes"));
        let cost = Cost { memory_kib, passes: header[5] };
        let salt = &header[6..];
        let inner = keys_of(passphrase, salt, cost)?
            .open_inner(sealed)
            .map_err(|_| SecretError::Passphrase)?;
        VolumeSecret::decode(&inner).ok_or(unknown)
    }

    /// What is sealed.
    pub fn encode(&self) -> Vec<u8> {
        let flag = |flag: u8, is_set: bool| if is_set { flag } else { 0 };
        let mut out = vec![
            flag(HAS_READ_KEY, self.read_key.is_some())
                | flag(HAS_TOKEN, self.token.is_some())
                | flag(HAS_SOURCE, self.source.is_some()),
        ];
        out.extend_from_slice(&self.key.seed());
        out.extend(self.read_key.iter().flat_map(|key| *key.bytes()));
        out.extend(self.token.iter().flatten());
        out.push(u8::try_from(self.name.len()).expect("a volume's name is short"));
        out.extend_from_slice(self.name.as_bytes());
        out.extend(self.source.iter().flatten());
        out
    }

    /// Reads [`VolumeSecret::encode`].
    pub fn decode(bytes: &[u8]) -> Option<VolumeSecret> {
        let (flags, rest) = bytes.split_first()?;
        let (seed, mut rest) = rest.split_first_chunk()?;
        let mut read_key = None;
        if flags & HAS_READ_KEY != 0 {
            let (key, behind) = rest.split_first_chunk()?;
            (read_key, rest) = (Some(ReadKey::from_bytes(*key)), behind);
        }
        let mut token = None;
        if flags & HAS_TOKEN != 0 {
            let (bytes, behind) = rest.split_first_chunk()?;
            (token, rest) = (Some(*bytes), behind);
        }
        let (len, rest) = rest.split_first()?;
        let (name, source) = rest.split_at_checked(usize::from(*len))?;
        let has_source = flags & HAS_SOURCE != 0;
        let is_whole = flags & !(HAS_READ_KEY | HAS_TOKEN | HAS_SOURCE) == 0
            && (has_source || source.is_empty());
        is_whole.then_some(VolumeSecret {
            key: SecretKey::from_seed(seed),
            read_key,
            name: std::str::from_utf8(name).ok()?.to_owned(),
            source: has_source.then(|| source.to_vec()),
            token,
        })
    }
}

fn keys_of(passphrase: &str, salt: &[u8], cost: Cost) -> Result<Keys, SecretError> {
    let Cost { memory_kib, passes } = cost;
    let refused = SecretError::Cost { memory_mib: memory_kib >> 10, passes };
    if memory_kib > Cost::MAX.memory_kib || passes > Cost::MAX.passes {
        return Err(refused);
    }
    let mut keys = [0; 64];
    let params = Params::new(memory_kib, passes.into(), 1, Some(keys.len()));
    let argon2 =
        Argon2::new(Algorithm::Argon2id, Version::V0x13, params.map_err(|_| refused.clone())?);
    argon2.hash_password_into(passphrase.as_bytes(), salt, &mut keys).map_err(|_| refused)?;
    let (tag, cipher) = keys.split_at(32);
    Ok(Keys::new(tag.try_into().expect("32 bytes"), cipher.try_into().expect("32 bytes")))
}

/// The signed block by which a volume's new node tells the former one that it has taken over.
pub fn move_acceptance(key: &SecretKey, token: &MoveToken) -> SignedBlock {
    SignedBlock::sign(key, &[&b"moved "[..], token].concat(), 1, b"")
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHEAP: Cost = Cost { memory_kib: 8, passes: 1 };

    fn secret() -> VolumeSecret {
        VolumeSecret {
            key: SecretKey::from_seed(&[1; 32]),
            read_key: Some(ReadKey::from_bytes([2; 32])),
            name: "diary".into(),
            source: Some(b"/home/me/\xff".to_vec()),
            token: Some([3; 16]),
        }
    }

    fn sealed(secret: &VolumeSecret) -> String {
        secret.seal("correct horse", [7; SALT_BYTES], CHEAP)
    }

    #[test]
    fn what_was_sealed_opens_with_its_passphrase_and_no_other() {
        let whole = secret();
        let bare = VolumeSecret { read_key: None, source: None, token: None, ..whole.clone() };
        let empty = VolumeSecret { source: Some(Vec::new()), ..bare.clone() };
        for secret in [whole, bare, empty] {
            let text = sealed(&secret);
            assert!(text.lines().all(|line| line.len() <= 64), "{text}");
            let typed =
                format!("\n {} \r\n", text.to_uppercase().replacen("ATOLL-KEY", "atoll-key", 1));
            for text in [&text, &typed, &text.replace('\n', "")] {
                let back = VolumeSecret::open(text, "correct horse").expect("opens");
                assert_eq!(back.encode(), secret.encode());
            }
            for wrong in ["", "correct hors", "correct horse "] {
                let error = VolumeSecret::open(&text, wrong).expect_err("wrong");
                assert_eq!(error, SecretError::Passphrase);
            }
        }
    }

    #[test]
    fn every_mistyped_character_and_every_cut_is_told() {
        let text = sealed(&secret()).replace('\n', "");
        for at in SCHEME.len()..text.len() {
            let other = if &text[at..=at] == "a" { "b" } else { "a" };
            let mistyped = format!("{}{other}{}", &text[..at], &text[at + 1..]);
            for wrong in [&mistyped[..], &text[..at]] {
                let error = VolumeSecret::open(wrong, "correct horse").expect_err("damaged");
                let is_told =
                    matches!(error, SecretError::Text(TextError::Checksum | TextError::Encoding));
                assert!(is_told, "{at}: {error}");
            }
        }
        let error = VolumeSecret::open("atoll:abc", "x").expect_err("another text");
        assert_eq!(error, SecretError::Text(TextError::Scheme(SCHEME)));
    }

    /// Whoever hands over a text could make the reader allocate and work for ever.
    #[test]
    fn a_text_that_asks_for_too_much_is_refused_before_any_work() {
        let bytes = decode_checked(SCHEME, &sealed(&secret()).replace('\n', "")).expect("whole");
        let asking = |memory_kib: u32, passes: u8| {
            let mut bytes = bytes.clone();
            bytes[1..5].copy_from_slice(&memory_kib.to_be_bytes());
            bytes[5] = passes;
            VolumeSecret::open(&encode_checked(SCHEME, &bytes), "correct horse")
        };
        for (memory_kib, passes) in [
            (4 << 20, 1),
            (u32::MAX, 255),
            (Cost::MAX.memory_kib + 1, 1),
            (8, 11),
            (8, 0),
            (7, 1),
            (0, 1),
        ] {
            let error = asking(memory_kib, passes).expect_err("too much, or nothing");
            assert!(matches!(error, SecretError::Cost { .. }), "{memory_kib} {passes}: {error}");
        }
        assert_eq!(asking(16, 2).expect_err("another key"), SecretError::Passphrase);
    }

    /// Everybody who knows a passphrase can make a right tag of anything.
    #[test]
    fn a_right_tag_of_a_wrong_content_is_refused() {
        let content = secret().encode();
        let opens = |content: &[u8]| {
            let mut bytes = vec![LAYOUT, 0, 0, 0, 8, 1];
            bytes.extend_from_slice(&[7; SALT_BYTES]);
            let keys = keys_of("p", &[7; SALT_BYTES], CHEAP).expect("cheap");
            bytes.extend_from_slice(&keys.seal_inner(content));
            VolumeSecret::open(&encode_checked(SCHEME, &bytes), "p").is_ok()
        };
        assert!(opens(&content));
        let name_end = 1 + 32 + 32 + 16 + 1 + 5;
        for len in 0..name_end {
            assert!(!opens(&content[..len]), "{len}");
        }
        for (at, byte) in [(0, 8), (0, HAS_READ_KEY), (name_end - 1, 0xff), (81, 255)] {
            let mut content = content.clone();
            content[at] = byte;
            assert!(!opens(&content), "{at}");
        }
    }

    /// What stands on paper must open for ever.
    #[test]
    fn the_text_of_a_secret_never_changes() {
        let bare = VolumeSecret { read_key: None, source: None, token: None, ..secret() };
        assert_eq!(sealed(&bare), TEXT);
    }

    const TEXT: &str = "\
atoll-key:aeaaaaaiaedqobyha4dqobyha4dqobyha4d7avwfer37tjytjxy7ka
zucyo2onlce7bbxpfo36sxktz3yz5cyyvq477hnmdanbcq5tq6qiebmxzdc67rjp
m25mlnryd6mh3q5f7vxtavrvq";

    #[test]
    fn a_secret_is_not_printed() {
        assert_eq!(format!("{:?}", secret()), "VolumeSecret { name: \"diary\", .. }");
    }
}
