//! A volume as an argument of `atoll mount` and `atoll nfs`.

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;

use clap::builder::TypedValueParser;
use clap::error::ErrorKind;

use crate::address::Address;
use crate::moment::{self, Moment};
use crate::output::escaped;

/// A volume: any by its address, or one's own by its name, perhaps at a time.
#[derive(Clone, Debug)]
pub(crate) enum Target {
    /// Any volume, by its address.
    Address(Address),
    /// One of this node's, by its name.
    Name(String, Option<Moment>),
}

impl Target {
    /// Reads a target from the command line.
    pub(crate) fn parser() -> impl TypedValueParser<Value = Target> {
        TargetParser
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Address(address) => address.fmt(f),
            Target::Name(name, None) => f.write_str(name),
            Target::Name(name, Some(at)) => write!(f, "{name}@{at}"),
        }
    }
}

/// Parses what begins like an address as one; anything else is a name.
#[derive(Clone)]
struct TargetParser;

impl TypedValueParser for TargetParser {
    type Value = Target;

    fn parse_ref(
        &self,
        command: &clap::Command,
        argument: Option<&clap::Arg>,
        text: &OsStr,
    ) -> Result<Target, clap::Error> {
        let named = text.to_str().map(moment::split);
        let Some((name, time)) = named.filter(|(name, _)| !name.contains([':', '/', '#'])) else {
            return Address::parser().parse_ref(command, argument, text).map(Target::Address);
        };
        let at = time.map(str::parse).transpose().map_err(|why: String| {
            let why = format!("{} is no volume at a time: {why}\n", escaped(text.as_bytes()));
            clap::Error::raw(ErrorKind::ValueValidation, why).with_cmd(command)
        })?;
        Ok(Target::Name(name.to_owned(), at))
    }
}
