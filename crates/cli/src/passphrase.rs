//! Where the passphrase comes from that seals a volume's keys: a file or standard input, the
//! environment, the terminal, in this order. Never an argument: every user of the machine can see
//! those (`ps`), and shells keep them in their history.

use std::io;
use std::path::PathBuf;

use crate::failure::{Exit, Failure};
use crate::read_key::read_text;
use crate::terminal;

/// The variable that may hold a passphrase.
const VARIABLE: &str = "ATOLL_PASSPHRASE";

/// The option of commands that seal or open keys.
#[derive(clap::Args, Debug)]
pub(crate) struct PassphraseArgs {
    /// The passphrase is the first line of this file, or of standard input if it is -; also taken
    /// from ATOLL_PASSPHRASE; asked for on the terminal otherwise
    #[arg(long, value_name = "FILE")]
    passphrase_file: Option<PathBuf>,
}

impl PassphraseArgs {
    /// Whether it takes standard input for itself.
    pub(crate) fn is_standard_input(&self) -> bool {
        self.passphrase_file.as_ref().is_some_and(|path| path.as_os_str() == "-")
    }

    /// The passphrase. One that `is_new` is asked for twice.
    pub(crate) fn take(&self, what: &str, is_new: bool) -> Result<String, Failure> {
        let failed = |why: &str| Failure::new(Exit::Usage, what).because(why);
        let passphrase = if let Some(path) = &self.passphrase_file {
            let text = read_text(path).map_err(|error| {
                Failure::io(format!("{what}: no passphrase in {}", path.display()), &error)
            })?;
            text.lines().next().unwrap_or_default().to_owned()
        } else if let Some(text) = std::env::var(VARIABLE).ok().filter(|text| !text.is_empty()) {
            text
        } else {
            let first = asked(what, "Passphrase")?;
            if is_new && first != asked(what, "The same again")? {
                return Err(failed("the two passphrases differ"));
            }
            first
        };
        match passphrase.is_empty() {
            true => Err(failed("the passphrase is empty")),
            false => Ok(passphrase),
        }
    }
}

fn asked(what: &str, question: &str) -> Result<String, Failure> {
    match terminal::ask(question, true) {
        Ok(Some(line)) => Ok(line),
        Ok(None) => Err(Failure::new(Exit::Usage, what)
            .because("there is no terminal to ask for the passphrase on")
            .advice(format!("Give it by --passphrase-file or {VARIABLE}."))),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => {
            Err(Failure::new(Exit::Interrupted, what).because("no passphrase was typed"))
        }
        Err(error) => Err(Failure::io(what, &error)),
    }
}
