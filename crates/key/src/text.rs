//! Text that people copy: `atoll:KEY`, `atoll:KEY#READKEY`, `atolluser:KEY` and other checked
//! base-32 strings.
//!
//! A checked string is lower-case base 32 (RFC 4648 alphabet, no padding) of the
//! payload followed by the first four bytes of its BLAKE3 hash, so that a mistyped
//! or truncated one is told from a wrong one. Upper case is accepted when reading.

use std::fmt;
use std::str::FromStr;

use data_encoding::{BASE32_NOPAD, Encoding, Specification};

use crate::identity::{GroupId, SecretKey, UserId, VolumeId};
use crate::read_key::ReadKey;

const CHECKSUM_BYTES: usize = 4;

/// Why a text is not what it should be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// It does not start with the scheme, e.g. `atoll:`.
    #[error("it should begin with {0:?}")]
    Scheme(&'static str),
    /// A character outside the alphabet, or a wrong length.
    #[error("it has characters that do not belong, or some are missing")]
    Encoding,
    /// The checksum does not match: mistyped or cut short.
    #[error("it is mistyped or cut short (its checksum does not match)")]
    Checksum,
    /// The right checksum around the wrong content.
    #[error("it is of a version this program does not know")]
    Version,
}

fn alphabet() -> Encoding {
    let mut spec = Specification::new();
    spec.symbols.push_str("abcdefghijklmnopqrstuvwxyz234567");
    spec.encoding().expect("32 distinct symbols")
}

fn checksum(scheme: &str, payload: &[u8]) -> [u8; CHECKSUM_BYTES] {
    let mut hasher = blake3::Hasher::new_derive_key("atoll v1 text checksum");
    hasher.update(scheme.as_bytes()).update(&[0]).update(payload);
    let hash = hasher.finalize();
    hash.as_bytes()[..CHECKSUM_BYTES].try_into().expect("4 bytes")
}

/// Writes `payload` as checked base 32 behind `scheme`.
pub fn encode_checked(scheme: &'static str, payload: &[u8]) -> String {
    let mut bytes = payload.to_vec();
    bytes.extend_from_slice(&checksum(scheme, payload));
    format!("{scheme}{}", alphabet().encode(&bytes))
}

/// Reads what [`encode_checked`] wrote.
pub fn decode_checked(scheme: &'static str, text: &str) -> Result<Vec<u8>, TextError> {
    let rest = text.strip_prefix(scheme).ok_or(TextError::Scheme(scheme))?;
    let mut bytes = BASE32_NOPAD
        .decode(rest.to_ascii_uppercase().as_bytes())
        .map_err(|_| TextError::Encoding)?;
    if bytes.len() < CHECKSUM_BYTES {
        return Err(TextError::Encoding);
    }
    let found = bytes.split_off(bytes.len() - CHECKSUM_BYTES);
    if found != checksum(scheme, &bytes) {
        return Err(TextError::Checksum);
    }
    Ok(bytes)
}

/// The first byte of each payload here.
const VERSION: u8 = 1;

fn encode_key(scheme: &'static str, key: &[u8; 32]) -> String {
    encode_checked(scheme, &[&[VERSION], &key[..]].concat())
}

/// The bytes behind the version, if they are so many.
fn decode_versioned<const N: usize>(
    scheme: &'static str,
    text: &str,
) -> Result<[u8; N], TextError> {
    match decode_checked(scheme, text)?.split_first() {
        Some((&VERSION, key)) => key.try_into().map_err(|_| TextError::Version),
        _ => Err(TextError::Version),
    }
}

const VOLUME_SCHEME: &str = "atoll:";

/// `atoll:KEY`, the address of a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct VolumeAddress(pub VolumeId);

impl VolumeAddress {
    /// Splits `atoll:KEY/some/path` into the volume and the path (without its first
    /// slash, empty for the root).
    pub fn parse_with_path(text: &str) -> Result<(VolumeAddress, &str), TextError> {
        let (volume, path) = text.split_once('/').unwrap_or((text, ""));
        Ok((volume.parse()?, path))
    }
}

impl fmt::Display for VolumeAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&encode_key(VOLUME_SCHEME, &self.0.0))
    }
}

impl FromStr for VolumeAddress {
    type Err = TextError;

    fn from_str(text: &str) -> Result<Self, TextError> {
        decode_versioned(VOLUME_SCHEME, text).map(|key| VolumeAddress(VolumeId(key)))
    }
}

const USER_SCHEME: &str = "atolluser:";

/// `atolluser:KEY`: a user, as people tell each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct UserAddress(pub UserId);

impl UserAddress {
    /// Six groups of four digits to compare by voice, computed from the key: 79 bits. To pass off
    /// another key as this one takes 2^79 attempts. Two keys with the same digits can be found with
    /// 2^40, but both belong to whoever searches.
    pub fn spoken(&self) -> String {
        let hash = blake3::derive_key("atoll v1 digits of a user", &self.0.0);
        let groups = hash.chunks_exact(4).take(6).map(|bytes| {
            let number = u32::from_be_bytes(bytes.try_into().expect("4 bytes"));
            format!("{:04}", number % 10_000)
        });
        groups.collect::<Vec<_>>().join(" ")
    }
}

impl fmt::Display for UserAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&encode_key(USER_SCHEME, &self.0.0))
    }
}

impl FromStr for UserAddress {
    type Err = TextError;

    fn from_str(text: &str) -> Result<Self, TextError> {
        decode_versioned(USER_SCHEME, text).map(|key| UserAddress(UserId(key)))
    }
}

const GROUP_SCHEME: &str = "atollgroup:";

/// `atollgroup:KEY`: a group of users.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct GroupAddress(pub GroupId);

impl fmt::Display for GroupAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&encode_key(GROUP_SCHEME, &self.0.0))
    }
}

impl FromStr for GroupAddress {
    type Err = TextError;

    fn from_str(text: &str) -> Result<Self, TextError> {
        decode_versioned(GROUP_SCHEME, text).map(|key| GroupAddress(GroupId(key)))
    }
}

const INVITATION_SCHEME: &str = "atoll-share:";

/// `atoll-share:CODE`: a shared volume, and the secret key of a user who may write it. The payload is
/// the volume's public key and the user's secret one, 32 bytes each.
///
/// Shown by [`VolumeInvitation::to_text`] only, so that no message contains it by accident.
#[derive(Clone, Debug)]
pub struct VolumeInvitation {
    /// The volume.
    pub volume: VolumeId,
    /// The user's key.
    pub user: SecretKey,
}

impl VolumeInvitation {
    /// The code. Whoever sees it can write the volume as this user.
    pub fn to_text(&self) -> String {
        let payload = [&[VERSION], &self.volume.0[..], &self.user.seed()].concat();
        encode_checked(INVITATION_SCHEME, &payload)
    }
}

impl FromStr for VolumeInvitation {
    type Err = TextError;

    fn from_str(text: &str) -> Result<Self, TextError> {
        let payload: [u8; 64] = decode_versioned(INVITATION_SCHEME, text)?;
        let (volume, user) = payload.split_at(32);
        Ok(VolumeInvitation {
            volume: VolumeId(volume.try_into().expect("32 bytes")),
            user: SecretKey::from_seed(user.try_into().expect("32 bytes")),
        })
    }
}

const READ_KEY_SCHEME: &str = "#";

impl ReadKey {
    /// `#READKEY`, as it stands behind a volume's address. Everybody who sees this text can read
    /// the volume.
    pub fn to_text(&self) -> String {
        encode_key(READ_KEY_SCHEME, self.bytes())
    }

    /// Reads [`ReadKey::to_text`], with or without its `#`.
    pub fn from_text(text: &str) -> Result<ReadKey, TextError> {
        ReadKey::after_scheme(text.strip_prefix(READ_KEY_SCHEME).unwrap_or(text))
    }

    fn after_scheme(rest: &str) -> Result<ReadKey, TextError> {
        let text = format!("{READ_KEY_SCHEME}{rest}");
        decode_versioned(READ_KEY_SCHEME, &text).map(ReadKey::from_bytes)
    }
}

/// `atoll:KEY` or `atoll:KEY#READKEY`: a volume, and what it takes to read it.
///
/// Shown by [`ReadAddress::to_text`], and not by `Display`, so that no message contains a
/// read key by accident.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReadAddress {
    /// The volume.
    pub volume: VolumeAddress,
    /// The key, if the address has one.
    pub read_key: Option<ReadKey>,
}

impl ReadAddress {
    /// The address with its read key.
    pub fn to_text(&self) -> String {
        let read_key = self.read_key.as_ref().map(ReadKey::to_text).unwrap_or_default();
        format!("{}{read_key}", self.volume)
    }
}

impl From<VolumeAddress> for ReadAddress {
    fn from(volume: VolumeAddress) -> ReadAddress {
        ReadAddress { volume, read_key: None }
    }
}

impl FromStr for ReadAddress {
    type Err = ReadAddressError;

    fn from_str(text: &str) -> Result<ReadAddress, ReadAddressError> {
        let (volume, read_key) = match text.split_once(READ_KEY_SCHEME) {
            Some((volume, read_key)) => (volume, Some(ReadKey::after_scheme(read_key))),
            None => (text, None),
        };
        Ok(ReadAddress {
            volume: volume.parse().map_err(ReadAddressError::Volume)?,
            read_key: read_key.transpose().map_err(ReadAddressError::ReadKey)?,
        })
    }
}

/// Which part of an address is wrong, and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadAddressError {
    /// The volume's key.
    #[error("{0}")]
    Volume(TextError),
    /// What stands behind the `#`.
    #[error("the read key behind the #: {0}")]
    ReadKey(TextError),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address() -> VolumeAddress {
        VolumeAddress(VolumeId(std::array::from_fn(|i| i as u8 * 7)))
    }

    #[test]
    fn an_address_reads_back_in_either_case() {
        let text = address().to_string();
        assert!(text.starts_with("atoll:") && text.len() == 66, "{text}");
        assert_eq!(text.parse(), Ok(address()));
        let shouted = format!("atoll:{}", text[6..].to_uppercase());
        assert_eq!(shouted.parse(), Ok(address()));
    }

    #[test]
    fn a_path_follows_the_key() {
        let text = format!("{}/usr/include/stdio.h", address());
        let (volume, path) = VolumeAddress::parse_with_path(&text).expect("valid");
        assert_eq!((volume, path), (address(), "usr/include/stdio.h"));
        let bare = address().to_string();
        assert_eq!(VolumeAddress::parse_with_path(&bare), Ok((address(), "")));
    }

    #[test]
    fn each_way_to_mistype_an_address_is_told() {
        let text = address().to_string();
        let mut swapped: Vec<char> = text.chars().collect();
        swapped.swap(8, 40);
        let mistyped: String = swapped.into_iter().collect();
        let cases = [
            ("", TextError::Scheme("atoll:")),
            ("ipfs:abc", TextError::Scheme("atoll:")),
            ("atoll:", TextError::Encoding),
            ("atoll:aaaa1", TextError::Encoding),
            (&mistyped[..], TextError::Checksum),
            (&text[..62], TextError::Checksum),
        ];
        for (wrong, error) in cases {
            assert_eq!(wrong.parse::<VolumeAddress>(), Err(error), "{wrong:?}");
        }
        let other_version = encode_checked("atoll:", &[2; 33]);
        assert_eq!(other_version.parse::<VolumeAddress>(), Err(TextError::Version));
        let too_long = encode_checked("atoll:", &[1; 40]);
        assert_eq!(too_long.parse::<VolumeAddress>(), Err(TextError::Version));
    }

    #[test]
    fn users_groups_and_invitations_read_back_and_are_told_apart() {
        let user = UserAddress(UserId([7; 32]));
        let group = GroupAddress(GroupId([7; 32]));
        assert_eq!(user.to_string().parse(), Ok(user));
        assert_eq!(group.to_string().parse(), Ok(group));
        let text = user.to_string();
        assert_eq!(text.parse::<GroupAddress>(), Err(TextError::Scheme("atollgroup:")));
        let swapped = text.replacen("atolluser", "atollgroup", 1);
        assert_eq!(swapped.parse::<GroupAddress>(), Err(TextError::Checksum));
        assert_eq!(text[..text.len() - 4].parse::<UserAddress>(), Err(TextError::Checksum));

        let invitation =
            VolumeInvitation { volume: VolumeId([8; 32]), user: SecretKey::from_seed(&[9; 32]) };
        let text = invitation.to_text();
        let back: VolumeInvitation = text.parse().expect("our own");
        assert_eq!((back.volume, back.user.seed()), (invitation.volume, [9; 32]));
        assert!(!format!("{invitation:?}").contains(&text[70..90]));
        let short = encode_checked(INVITATION_SCHEME, &[1; 64]);
        assert_eq!(short.parse::<VolumeInvitation>().expect_err("short"), TextError::Version);
    }

    /// Two people compare what two versions of this program show.
    #[test]
    fn the_digits_of_a_user_never_change() {
        assert_eq!(UserAddress(UserId([7; 32])).spoken(), "9987 8145 7468 2634 0068 0404");
        assert_ne!(UserAddress(UserId([8; 32])).spoken(), UserAddress(UserId([7; 32])).spoken());
    }

    fn encrypted() -> ReadAddress {
        let read_key = Some(ReadKey::from_bytes(std::array::from_fn(|i| i as u8 * 5)));
        ReadAddress { volume: address(), read_key }
    }

    #[test]
    fn an_address_with_a_read_key_reads_back_in_either_case() {
        let text = encrypted().to_text();
        let (volume, read_key) = text.split_once('#').expect("it has a read key");
        assert_eq!((volume, read_key.len()), (&address().to_string()[..], 60));
        assert_eq!(text.parse(), Ok(encrypted()));
        let shouted = format!("{volume}#{}", read_key.to_uppercase());
        assert_eq!(shouted.parse(), Ok(encrypted()));
        assert_eq!(address().to_string().parse(), Ok(ReadAddress::from(address())));
        for read_key in [&text[66..], read_key] {
            assert_eq!(ReadKey::from_text(read_key).ok(), encrypted().read_key);
        }
    }

    #[test]
    fn each_way_to_mistype_a_read_key_is_told() {
        let text = encrypted().to_text();
        let volume = address();
        let cases = [
            (format!("{volume}#"), TextError::Encoding),
            (format!("{volume}##{}", &text[67..]), TextError::Encoding),
            (text[..text.len() - 4].to_string(), TextError::Checksum),
            // The checksum is of a read key, so an address in its place is none.
            (format!("{volume}#{}", &volume.to_string()[6..]), TextError::Checksum),
            (format!("{volume}{}", encode_checked("#", &[2; 33])), TextError::Version),
            (format!("{volume}{}", encode_checked("#", &[1; 32])), TextError::Version),
        ];
        for (wrong, error) in cases {
            let told = Err(ReadAddressError::ReadKey(error));
            assert_eq!(wrong.parse::<ReadAddress>(), told, "{wrong:?}");
        }
        let wrong = text.replacen("atoll:", "ipfs:", 1);
        let told = ReadAddressError::Volume(TextError::Scheme("atoll:"));
        assert_eq!(wrong.parse::<ReadAddress>(), Err(told));
    }

    #[test]
    fn a_read_key_is_not_shown_by_accident() {
        let text = encrypted().to_text();
        assert!(!format!("{:?}", encrypted()).contains(&text[67..80]));
    }
}
