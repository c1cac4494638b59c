//! Asking the person at the terminal, also when standard input is something else.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};

use rustix::termios::{LocalModes, OptionalActions, SpecialCodeIndex, Termios};
use rustix::termios::{tcgetattr, tcsetattr};

/// What Ctrl-C sends.
const INTERRUPT: u8 = 3;

/// Asks for a line; `None` if there is no terminal. What is typed is not shown if it `is_secret`.
pub(crate) fn ask(question: &str, is_secret: bool) -> io::Result<Option<String>> {
    let Ok(mut terminal) = File::options().read(true).write(true).open("/dev/tty") else {
        return Ok(None);
    };
    write!(terminal, "{question}: ")?;
    let silenced = if is_secret { Some(Silenced::new(&terminal)?) } else { None };
    let mut line = Vec::new();
    let mut reader = BufReader::new(&terminal);
    while !matches!(line.last(), Some(b'\n') | Some(&INTERRUPT)) {
        if reader.read_until(b'\n', &mut line)? == 0 {
            break;
        }
    }
    if silenced.is_some() {
        writeln!(&terminal)?;
    }
    let interrupted = || io::Error::from(io::ErrorKind::Interrupted);
    if line.contains(&INTERRUPT) || line.is_empty() {
        return Err(interrupted());
    }
    let not_text = |_| io::Error::new(io::ErrorKind::InvalidData, "what was typed is no text");
    let line = String::from_utf8(line).map_err(not_text)?;
    Ok(Some(line.trim_end_matches(['\n', '\r']).to_owned()))
}

/// A terminal that does not show what is typed, until this is dropped. Ctrl-C ends the line
/// instead of the process, which would leave the terminal like this.
struct Silenced<'a> {
    terminal: &'a File,
    before: Termios,
}

impl Silenced<'_> {
    fn new(terminal: &File) -> io::Result<Silenced<'_>> {
        let before = tcgetattr(terminal)?;
        let mut silent = before.clone();
        silent.local_modes.remove(LocalModes::ECHO | LocalModes::ISIG);
        silent.special_codes[SpecialCodeIndex::VEOL] = INTERRUPT;
        tcsetattr(terminal, OptionalActions::Now, &silent)?;
        Ok(Silenced { terminal, before })
    }
}

impl Drop for Silenced<'_> {
    fn drop(&mut self) {
        // If it fails there is no terminal any more.
        let _ = tcsetattr(self.terminal, OptionalActions::Now, &self.before);
    }
}
