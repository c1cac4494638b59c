//! Where the read key of an encrypted volume comes from: the address, a file or standard
//! input, the environment, in this order.
//!
//! Every user of the machine can see arguments (`ps`), and shells keep them in their history; so
//! the key can be given apart from the address.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use atoll_key::{ReadAddress, ReadKey, VolumeAddress};

use crate::address::Address;
use crate::failure::{Exit, Failure};

/// The variable that may hold a read key.
pub(crate) const VARIABLE: &str = "ATOLL_READ_KEY";

/// An upper bound on the length of an address with a read key, bytes.
const MAX_TEXT_BYTES: u64 = 4096;

/// The option of commands that read.
#[derive(clap::Args, Debug, Clone)]
pub(crate) struct ReadKeyArgs {
    /// The read key of an encrypted volume is in this file (its address will do), or on
    /// standard input if it is -; also taken from ATOLL_READ_KEY
    #[arg(long, value_name = "FILE")]
    read_key: Option<PathBuf>,

    /// Not an error if the volume is not encrypted
    #[arg(long, hide = true)]
    read_key_optional: bool,
}

/// The source of a read key besides the address.
#[derive(Debug, Clone, Default)]
pub(crate) struct Given {
    of: Option<VolumeAddress>,
    key: Option<ReadKey>,
    optional: bool,
}

/// A read key to try.
#[derive(Debug, Clone, Default)]
pub(crate) struct Found {
    /// The key.
    pub key: Option<ReadKey>,
    /// Whether a volume that is not encrypted may be opened without it.
    pub optional: bool,
}

impl ReadKeyArgs {
    /// Reads what was given. Once: standard input cannot be read again.
    pub(crate) fn given(&self) -> Result<Given, Failure> {
        if let Some(path) = &self.read_key {
            let what = || match path.as_os_str() == "-" {
                true => "cannot take the read key from standard input".to_string(),
                false => format!("cannot take the read key from {}", path.display()),
            };
            let text = read_text(path).map_err(|error| match error.kind() {
                io::ErrorKind::InvalidData => {
                    Failure::new(Exit::Usage, what()).because("what is in it is no text")
                }
                _ => Failure::io(what(), &error),
            })?;
            return parse(&text, self.read_key_optional)
                .map_err(|why| Failure::new(Exit::Usage, what()).because(why));
        }
        match std::env::var(VARIABLE) {
            Ok(text) if !text.is_empty() => parse(&text, true).map_err(|why| {
                Failure::new(Exit::Usage, format!("{VARIABLE} holds no read key")).because(why)
            }),
            _ => Ok(Given { of: None, key: None, optional: true }),
        }
    }
}

impl Given {
    /// The key to read `address` with.
    pub(crate) fn key_for(&self, address: &Address) -> Result<Found, Failure> {
        if let Some(key) = &address.read_key {
            return Ok(Found { key: Some(key.clone()), optional: false });
        }
        match self.of {
            Some(of) if of != address.volume && self.optional => Ok(Found::default()),
            Some(of) if of != address.volume => {
                let what = format!("cannot open {}", address.volume);
                Err(Failure::new(Exit::Usage, what)
                    .because(format!("the read key given is that of {of}")))
            }
            _ => Ok(Found { key: self.key.clone(), optional: self.optional }),
        }
    }
}

/// The text in a file, or on standard input if it is `-`.
pub(crate) fn read_text(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    if path.as_os_str() == "-" {
        io::stdin().take(MAX_TEXT_BYTES).read_to_string(&mut text)?;
    } else {
        File::open(path)?.take(MAX_TEXT_BYTES).read_to_string(&mut text)?;
    }
    Ok(text)
}

/// A read key, or an address with one.
fn parse(text: &str, optional: bool) -> Result<Given, String> {
    let text = text.trim();
    if text.is_empty() {
        return Err("there is nothing in it".into());
    }
    if !text.starts_with("atoll:") {
        let key = ReadKey::from_text(text).map_err(|error| error.to_string())?;
        return Ok(Given { of: None, key: Some(key), optional });
    }
    let address: ReadAddress = text.parse().map_err(|error| format!("{error}"))?;
    match address.read_key {
        Some(key) => Ok(Given { of: Some(address.volume), key: Some(key), optional }),
        None => Err("it is an address without a read key".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use atoll_key::VolumeId;

    const VOLUME: VolumeAddress = VolumeAddress(VolumeId([7; 32]));

    fn key(byte: u8) -> ReadKey {
        ReadKey::from_bytes([byte; 32])
    }

    fn address(read_key: Option<ReadKey>) -> Address {
        Address { volume: VOLUME, read_key, at: None, path: Vec::new() }
    }

    #[test]
    fn a_key_is_taken_alone_or_with_its_address() {
        let whole = ReadAddress { volume: VOLUME, read_key: Some(key(1)) }.to_text();
        for text in [format!("{}\n", key(1).to_text()), key(1).to_text()[1..].into(), whole] {
            let given = parse(&text, false).expect("a key");
            assert_eq!(given.key_for(&address(None)).expect("fits").key, Some(key(1)), "{text}");
            let found = given.key_for(&address(Some(key(2)))).expect("fits");
            assert_eq!(found.key, Some(key(2)), "the address comes first");
        }
    }

    #[test]
    fn what_is_no_key_or_of_another_volume_is_told() {
        for text in ["", "\n", "hello", &VOLUME.to_string()] {
            assert!(parse(text, false).is_err(), "{text:?}");
        }
        let other = VolumeAddress(VolumeId([8; 32]));
        let text = ReadAddress { volume: other, read_key: Some(key(1)) }.to_text();
        let wrong = parse(&text, false).expect("a key").key_for(&address(None));
        assert_eq!(wrong.expect_err("another volume's").exit, Exit::Usage);
        let optional = parse(&text, true).expect("a key").key_for(&address(None));
        assert_eq!(optional.expect("tried without").key, None);
    }
}
