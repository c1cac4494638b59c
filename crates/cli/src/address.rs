//! `atoll:KEY/path` and `atoll:KEY#READKEY/path` on the command line; before the path may stand a
//! time, as in `atoll:KEY@2026-11-20T12:00/path`.

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;

use atoll_key::text::{ReadAddressError, TextError};
use atoll_key::{ReadAddress, ReadKey, VolumeAddress};
use clap::builder::TypedValueParser;
use clap::error::ErrorKind;

use crate::moment::{self, Moment};
use crate::output::escaped;

/// A volume and a path within it. Messages show it without its read key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    /// The volume.
    pub volume: VolumeAddress,
    /// The read key behind the `#`, if any.
    pub read_key: Option<ReadKey>,
    /// The newest state of this time or before is meant, not the present one.
    pub at: Option<Moment>,
    /// Names below its root, any bytes; empty for the root.
    pub path: Vec<Vec<u8>>,
}

impl Address {
    /// Reads an argument, for clap.
    pub(crate) fn parser() -> impl TypedValueParser<Value = Address> {
        AddressParser
    }

    /// Reads an argument.
    pub(crate) fn parse(text: &OsStr) -> Result<Address, AddressError> {
        let bytes = text.as_bytes();
        let end = bytes.iter().position(|byte| *byte == b'/').unwrap_or(bytes.len());
        let volume = std::str::from_utf8(&bytes[..end])
            .map_err(|_| AddressError::Volume(ReadAddressError::Volume(TextError::Encoding)))?;
        let (volume, time) = moment::split(volume);
        let ReadAddress { volume, read_key } = volume.parse().map_err(AddressError::Volume)?;
        let at = time.map(str::parse).transpose().map_err(AddressError::Time)?;
        let path: Vec<Vec<u8>> = bytes[end..]
            .split(|byte| *byte == b'/')
            .filter(|name| !name.is_empty() && *name != b".")
            .map(<[u8]>::to_vec)
            .collect();
        if path.iter().any(|name| name == b"..") {
            return Err(AddressError::DotDot);
        }
        Ok(Address { volume, read_key, at, path })
    }

    /// The last name of the path: how a copied file is called by default.
    pub(crate) fn file_name(&self) -> Option<&[u8]> {
        self.path.last().map(Vec::as_slice)
    }
}

/// Parses addresses for clap. Clap's own message would repeat a mistyped address with its read
/// key, and the key would end up in logs.
#[derive(Clone)]
struct AddressParser;

impl TypedValueParser for AddressParser {
    type Value = Address;

    fn parse_ref(
        &self,
        command: &clap::Command,
        _argument: Option<&clap::Arg>,
        text: &OsStr,
    ) -> Result<Address, clap::Error> {
        Address::parse(text).map_err(|why| {
            let shown = without_read_key(text.as_bytes());
            clap::Error::raw(ErrorKind::ValueValidation, format!("'{shown}' is {why}\n"))
                .with_cmd(command)
        })
    }
}

/// The text as typed but without its read key, for a message.
fn without_read_key(text: &[u8]) -> String {
    match text.iter().position(|byte| *byte == b'#') {
        Some(at) => format!("{}#…", escaped(&text[..at])),
        None => escaped(text),
    }
}

/// Why a text is not an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AddressError {
    /// The part before the first slash.
    Volume(ReadAddressError),
    /// The part behind the `@`.
    Time(String),
    /// A `..` that leads out of the volume.
    DotDot,
}

impl fmt::Display for AddressError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AddressError::Volume(error) => {
                write!(
                    f,
                    "not the address of a volume (atoll:KEY, as `atoll publish` prints): {error}"
                )
            }
            AddressError::Time(why) => write!(f, "not the address of a volume at a time: {why}"),
            AddressError::DotDot => {
                f.write_str("no path within a volume: it may not contain \"..\"")
            }
        }
    }
}

impl std::error::Error for AddressError {}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.volume)?;
        if let Some(at) = &self.at {
            write!(f, "@{at}")?;
        }
        for name in &self.path {
            write!(f, "/{}", escaped(name))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use atoll_key::VolumeId;

    fn parse(text: &str) -> Result<Address, AddressError> {
        Address::parse(OsStr::new(text))
    }

    #[test]
    fn slashes_that_mean_nothing_are_dropped() {
        let volume = VolumeAddress(VolumeId([7; 32]));
        let cases = [("", ""), ("/", ""), ("/a/b", "/a/b"), ("//a/./b/", "/a/b")];
        for (written, meant) in cases {
            let address = parse(&format!("{volume}{written}")).expect("valid");
            assert_eq!(address.to_string(), format!("{volume}{meant}"));
        }
    }

    #[test]
    fn what_is_wrong_with_an_address_is_told() {
        let volume = VolumeAddress(VolumeId([7; 32]));
        assert_eq!(parse(&format!("{volume}/a/../b")), Err(AddressError::DotDot));
        let text = parse("docs/readme").expect_err("no scheme").to_string();
        assert!(text.contains("atoll:KEY") && text.contains("should begin with"), "{text}");
    }

    #[test]
    fn a_read_key_is_taken_and_not_shown() {
        let key = ReadKey::from_bytes([9; 32]);
        let volume = VolumeAddress(VolumeId([7; 32]));
        let text = ReadAddress { volume, read_key: Some(key.clone()) }.to_text();
        let address = parse(&format!("{text}/a/b")).expect("valid");
        assert_eq!((address.read_key.as_ref(), address.path.len()), (Some(&key), 2));
        assert_eq!(address.to_string(), format!("{volume}/a/b"));
        let error = parse(&text[..text.len() - 4]).expect_err("cut short").to_string();
        assert!(error.contains("the read key behind the #"), "{error}");
        assert!(!error.contains(&text[70..90]), "{error}");
        let command = clap::Command::new("ls");
        let typed = OsStr::new(&text[..text.len() - 4]);
        let error = AddressParser.parse_ref(&command, None, typed).expect_err("cut short");
        assert_eq!(error.exit_code(), 2);
        let error = error.to_string();
        assert!(error.contains("#…' is not the address") && error.ends_with('\n'), "{error}");
        assert!(!error.contains(&text[70..90]), "{error}");
    }

    #[test]
    fn a_time_stands_before_the_path() {
        let key = ReadKey::from_bytes([9; 32]);
        let volume = VolumeAddress(VolumeId([7; 32]));
        for read_key in [None, Some(key)] {
            let text = ReadAddress { volume, read_key: read_key.clone() }.to_text();
            let address = parse(&format!("{text}@2026-11-20T12:00/a@b")).expect("valid");
            assert_eq!(address.at, Some("2026-11-20T12:00".parse().expect("a time")));
            assert_eq!((address.read_key, address.path), (read_key, vec![b"a@b".to_vec()]));
        }
        let address = parse(&format!("{volume}/a@2026")).expect("a name");
        assert_eq!((address.at, address.path.len()), (None, 1));
        let address = parse(&format!("{volume}@2026-11-20/a")).expect("valid");
        assert_eq!(parse(&address.to_string()), Ok(address));
        let error = parse(&format!("{volume}@noon")).expect_err("no time").to_string();
        assert!(error.contains("2026-11-20T12:00"), "{error}");
    }

    #[test]
    fn names_need_not_be_text() {
        let mut text = VolumeAddress(VolumeId([7; 32])).to_string().into_bytes();
        text.extend_from_slice(b"/caf\xe9");
        let address = Address::parse(OsStr::from_bytes(&text)).expect("valid");
        assert_eq!(address.file_name(), Some(&b"caf\xe9"[..]));
        assert!(address.to_string().ends_with("/caf\\xe9"));
    }
}
