//! Failures of commands: the message for people and the exit code for scripts.
//!
//! A message says what failed and on what, why, and what to do next. Exit codes differ
//! by what the caller can do about it; they are listed in `atoll --help`, and so they
//! never change their meaning.

use std::fmt;
use std::io;

use atoll_dht::{GetError, PutError};

use crate::units;

/// How a command ended, for scripts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Exit {
    /// The work could not be done.
    Failed = 1,
    /// The command line makes no sense.
    Usage = 2,
    /// No node runs in this directory.
    NoNode = 3,
    /// There is no such volume, file or directory.
    NotFound = 4,
    /// The ring could not answer in time; trying again later may help.
    Unavailable = 5,
    /// There is no room.
    Full = 6,
    /// It was done in part: what is missing or old is named.
    Incomplete = 7,
    /// `atoll status`: blocks have fewer copies than the network was made for.
    Degraded = 8,
    /// `atoll status`: the node cannot tell whether they have.
    Unknown = 9,
    /// Stopped by a signal; running it again goes on.
    Interrupted = 130,
}

/// The table in `atoll --help` and in the manual.
pub(crate) const EXIT_CODES: &str = "\
Exit codes:
  0    done
  1    the work could not be done
  2    the command line makes no sense, or a key or code in it is mistyped
  3    no node runs in this directory
  4    there is no such volume, file or directory
  5    the ring could not answer in time; try again
  6    there is no room
  7    done, but not all of it: what is left out, old or not copied is named
  8    `atoll status`: some blocks have fewer copies than the network was made for
  9    `atoll status`: the node cannot tell yet whether they have
  130  interrupted; run it again to go on
With --json the last line of standard error is then {\"error\", \"why\", \"next\", \"exit\"}.";

/// Why a command did not do its work.
#[derive(Debug)]
pub(crate) struct Failure {
    /// The exit code.
    pub exit: Exit,
    what: String,
    why: Option<String>,
    next: Option<String>,
}

impl Failure {
    /// `what` failed and on what, e.g. "cannot list atoll:…/usr".
    pub(crate) fn new(exit: Exit, what: impl Into<String>) -> Failure {
        Failure { exit, what: what.into(), why: None, next: None }
    }

    /// Only an exit code: everything has been said.
    pub(crate) fn silent(exit: Exit) -> Failure {
        Failure::new(exit, String::new())
    }

    /// Whether there is nothing to say.
    pub(crate) fn is_silent(&self) -> bool {
        self.what.is_empty()
    }

    /// The reason.
    #[must_use]
    pub(crate) fn because(mut self, why: impl fmt::Display) -> Failure {
        self.why = Some(why.to_string());
        self
    }

    /// The reason that was given, or else what failed.
    pub(crate) fn reason(self) -> String {
        self.why.unwrap_or(self.what)
    }

    /// What to do next.
    #[must_use]
    pub(crate) fn advice(mut self, next: impl Into<String>) -> Failure {
        self.next = Some(next.into());
        self
    }

    /// A command line that cannot be read.
    pub(crate) fn usage(refusal: &clap::Error) -> Failure {
        let text = refusal.render().to_string();
        let why = text.trim().trim_start_matches("error: ");
        Failure::new(Exit::Usage, "the command line makes no sense").because(why)
    }

    /// The failure as one line of JSON, for those who ask for `--json`.
    pub(crate) fn to_json(&self) -> String {
        let Failure { exit, what, why, next } = self;
        serde_json::json!({ "error": what, "why": why, "next": next, "exit": *exit as u8 })
            .to_string()
    }

    /// What else may be the reason, a line each.
    #[must_use]
    pub(crate) fn also(mut self, reasons: &[String]) -> Failure {
        let lines = self.next.into_iter().chain(reasons.iter().cloned());
        self.next = Some(lines.collect::<Vec<_>>().join("\n"));
        self
    }

    /// A failed operation on local files.
    pub(crate) fn io(what: impl Into<String>, error: &io::Error) -> Failure {
        let exit = match error.kind() {
            io::ErrorKind::NotFound => Exit::NotFound,
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Exit::Full,
            _ => Exit::Failed,
        };
        Failure::new(exit, what).because(error)
    }

    /// A block that could not be fetched.
    pub(crate) fn get(what: impl Into<String>, error: &GetError) -> Failure {
        let failure = Failure::new(get_exit(error), what).because(error);
        match error {
            GetError::NotFound { .. } => failure.advice(
                "The address may be of another network, or its publisher's leases have run out; \
                 publishing it again brings it back.",
            ),
            GetError::Unavailable { .. } => failure.advice(TRY_AGAIN),
            GetError::Removed { .. } => failure,
        }
    }

    /// Blocks that could not be stored.
    pub(crate) fn put(what: impl Into<String>, error: &PutError) -> Failure {
        let failure = Failure::new(put_exit(error), what).because(error);
        match error {
            PutError::Full(_) => failure.advice(
                "Give nodes more disk (`atoll contribute`), or publish less; running it again goes on \
                 from here.",
            ),
            PutError::Unavailable(_) => failure.advice(TRY_AGAIN),
            PutError::OverQuota { used_bytes, allowed_bytes, who } => failure
                .because(format!(
                    "over quota: {who} uses {} of the {} allowed",
                    units::size(*used_bytes),
                    units::size(*allowed_bytes)
                ))
                .advice(
                    "Publish less, let old volumes' leases run out, or ask the owners of the nodes \
                 for a larger share; `atoll quota` shows what a node keeps for whom.",
                ),
            PutError::Superseded { .. } => failure.advice(
                "This volume was published with the same key from elsewhere; publish from \
                 there, or under another --name.",
            ),
            PutError::NotAdmitted(_) => failure.advice(
                "Ask the owner of the group for a new certificate, and see `atoll status` for clocks.",
            ),
            PutError::Invalid(_) => failure,
        }
    }
}

/// What to do when the ring did not answer.
pub(crate) const TRY_AGAIN: &str =
    "See `atoll status` for the ring's state; running the same command again goes on.";

fn get_exit(error: &GetError) -> Exit {
    match error {
        GetError::NotFound { .. } | GetError::Removed { .. } => Exit::NotFound,
        GetError::Unavailable { .. } => Exit::Unavailable,
    }
}

fn put_exit(error: &PutError) -> Exit {
    match error {
        PutError::Full(_) | PutError::OverQuota { .. } => Exit::Full,
        PutError::Unavailable(_) => Exit::Unavailable,
        PutError::Superseded { .. } | PutError::Invalid(_) | PutError::NotAdmitted(_) => {
            Exit::Failed
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        if let Some(why) = &self.why {
            write!(f, ": {why}")?;
        }
        if let Some(next) = &self.next {
            write!(f, "\n{next}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_says_what_why_and_what_next() {
        let failure = Failure::new(Exit::NoNode, "cannot list x")
            .because("no node runs")
            .advice("Start one with `atoll up`.");
        assert_eq!(failure.to_string(), "cannot list x: no node runs\nStart one with `atoll up`.");
    }

    #[test]
    fn a_failure_is_one_line_of_json_for_programs() {
        let failure = Failure::new(Exit::NotFound, "cannot read \u{1b}[2J").because("two\nlines");
        let line = failure.to_json();
        assert!(!line.contains(char::is_control), "{line}");
        let read: serde_json::Value = serde_json::from_str(&line).expect("JSON");
        assert_eq!((&read["why"], &read["exit"]), (&"two\nlines".into(), &4.into()));
        assert!(read["next"].is_null() && read["error"] == "cannot read \u{1b}[2J");
    }

    #[test]
    fn who_is_over_quota_and_by_how_much_is_said_in_units_of_people() {
        let error = PutError::OverQuota {
            used_bytes: 5 << 30,
            allowed_bytes: 3 << 29,
            who: "this node at 10.0.0.7".into(),
        };
        let failure = Failure::put("cannot publish /srv", &error);
        assert_eq!(failure.exit, Exit::Full);
        let text = failure.to_string();
        let expected = "cannot publish /srv: over quota: this node at 10.0.0.7 uses 5.0 GiB of the \
                        1.5 GiB allowed\n";
        assert!(text.starts_with(expected) && text.contains("atoll quota"), "{text}");
    }

    #[test]
    fn every_exit_code_is_in_the_table_people_read() {
        let all = [
            Exit::Failed,
            Exit::Usage,
            Exit::NoNode,
            Exit::NotFound,
            Exit::Unavailable,
            Exit::Full,
            Exit::Incomplete,
            Exit::Degraded,
            Exit::Unknown,
            Exit::Interrupted,
        ];
        for exit in all {
            let line = format!("\n  {:<5}", exit as u8);
            assert!(EXIT_CODES.contains(&line), "{exit:?}");
        }
        assert_eq!(EXIT_CODES.lines().count(), all.len() + 3, "0, the title and --json besides");
    }

    #[test]
    fn errors_of_one_class_share_an_exit_code() {
        let key = atoll_key::BlockHash::of(b"lost").key();
        let lost = GetError::Unavailable { key, told: "2 silent".into() };
        assert_eq!(Failure::get("x", &lost).exit, Exit::Unavailable);
        let lost = GetError::NotFound { key, told: "nobody".into() };
        assert_eq!(Failure::get("x", &lost).exit, Exit::NotFound);
        assert_eq!(Failure::put("x", &PutError::Unavailable("y".into())).exit, Exit::Unavailable);
        assert_eq!(Failure::put("x", &PutError::Full("y".into())).exit, Exit::Full);
        let gone = io::Error::from(io::ErrorKind::NotFound);
        assert_eq!(Failure::io("x", &gone).exit, Exit::NotFound);
    }
}
