//! The process that serves a mount.
//!
//! It outlives the command, the terminal and restarts of the node. The command starts this
//! program once more with `--foreground --announce`, waits until that one says on its standard
//! output that the mount is there (or why not), and ends.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use atoll_gateway::fuse::{Draining, Mounted, UnmountError};

use crate::failure::{Exit, Failure};
use crate::interrupt::Signals;
use crate::messages::note;
use crate::output::escaped;
use crate::runtime::until_done;

/// The server writes this line when the mount is there; any other line is an exit code and a
/// reason.
const MOUNTED: &str = "mounted";
/// How long a server that is told to end waits for programs that use its mount (systemd kills
/// after 90 s, Docker after 10).
const PATIENCE: Duration = Duration::from_secs(8);

// --- in the server ---------------------------------------------------------------------

/// Serves a mount in this process. With `announces`, the process that started it is told of a
/// failure.
pub(crate) fn run(
    announces: bool,
    serve: impl Future<Output = Result<(), Failure>>,
) -> Result<(), Failure> {
    if announces {
        // Fails only for a process that leads its group, which then keeps its terminal.
        let _ = rustix::process::setsid();
    }
    let result = until_done(serve);
    if let (true, Err(failure)) = (announces, &result) {
        announce(&format!("{} {failure}", failure.exit as u8));
    }
    result
}

/// Says that the mount is there, and serves it until it is unmounted or a signal ends it.
pub(crate) async fn serve(
    mounted: &mut Mounted,
    mountpoint: &Path,
    announces: bool,
) -> Result<(), Failure> {
    if announces {
        announce_ready();
    } else {
        note!("mounted on {}; Ctrl-C unmounts", mountpoint.display());
    }
    let mut signals = Signals::new();
    tokio::select! {
        ended = mounted.wait() => ended.map_err(|error| {
            Failure::io(format!("serving {} failed", mountpoint.display()), &error)
        }),
        () = signals.next() => take_away(mounted, signals).await,
    }
}

/// Says that what is to be served is there.
pub(crate) fn announce_ready() {
    announce(MOUNTED);
}

/// Tells the parent process, which may have ended: then the message is dropped.
fn announce(text: &str) {
    let mut stdout = io::stdout();
    let _ = writeln!(stdout, "{text}").and_then(|()| stdout.flush());
}

/// Ends a mount after the first signal: no file that is open is cut off before a second one.
async fn take_away(mounted: &mut Mounted, mut signals: Signals) -> Result<(), Failure> {
    let say = |draining: Draining<'_>| note!("{draining}; a second signal ends it at once");
    tokio::select! {
        drained = mounted.drain(PATIENCE, say) => {
            drained.map_err(|error| unmount_failure(error, "atoll unmount"))
        }
        () = signals.next() => {
            signals.exit_at_next();
            // Otherwise the mount's name would stay, without a server.
            let _ = mounted.unmount(true).await;
            Err(Failure::new(Exit::Interrupted, "ended while the mount was in use"))
        }
    }
}

// --- in the command --------------------------------------------------------------------

/// Starts a server, gives it `input`, and waits until the mount is there. `what` says what has
/// failed if it never is, and `advice` where to look then.
pub(crate) fn start(
    mut server: Command,
    input: &[u8],
    what: &str,
    advice: &str,
) -> Result<(), Failure> {
    let failed = |error: io::Error| Failure::io(what, &error);
    server.stdin(Stdio::piped()).stdout(Stdio::piped()).current_dir("/");
    let mut server = server.spawn().map_err(failed)?;
    // If the input does not arrive, the server itself says so.
    let mut stdin = server.stdin.take().expect("it was asked for");
    let _ = stdin.write_all(input);
    drop(stdin);
    let mut pipe = server.stdout.take().expect("it was asked for");
    let said = read_announcement(&mut pipe).map_err(failed)?;
    if said == MOUNTED {
        return Ok(());
    }
    let failure = match said.split_once(' ') {
        Some((code, text)) => announced(code, text),
        // The server's messages, if any, are in its log only.
        None => {
            Failure::new(Exit::Failed, what).because("the mount's process ended").advice(advice)
        }
    };
    let _ = server.wait();
    Err(failure)
}

/// `DIR/logs/KIND-PLACE.log`, for this user only: where a server's later messages go.
pub(crate) fn open_log(dir: &Path, kind: &str, place: &[u8]) -> (PathBuf, io::Result<File>) {
    let logs = dir.join("logs");
    let path = logs.join(log_name(kind, place));
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&logs);
    let mut options = OpenOptions::new();
    let log = made.and_then(|()| options.append(true).create(true).mode(0o600).open(&path));
    (path, log)
}

/// A name that tells what is served where, short enough for any file system.
fn log_name(kind: &str, place: &[u8]) -> String {
    let name: String = escaped(place).trim_matches('/').replace(['/', '\\', ' '], "-");
    let tail: Vec<char> = name.chars().rev().take(60).collect();
    format!("{kind}-{}.log", tail.into_iter().rev().collect::<String>())
}

/// What a mount says of itself.
pub(crate) fn status(mountpoint: &Path) -> Option<String> {
    let mut status = vec![0; 64 << 10];
    let len = rustix::fs::getxattr(mountpoint, "user.atoll.status", &mut status).ok()?;
    Some(String::from_utf8_lossy(&status[..len]).into_owned())
}

/// Reads until the line that says the mount is there, or to the end.
fn read_announcement(pipe: &mut impl Read) -> io::Result<String> {
    let mut said = String::new();
    let mut buffer = [0; 512];
    loop {
        let len = pipe.read(&mut buffer)?;
        said.push_str(&String::from_utf8_lossy(&buffer[..len]));
        if len == 0 || said.trim_end() == MOUNTED {
            return Ok(said.trim_end().to_owned());
        }
    }
}

/// The failure that the server announced.
fn announced(code: &str, text: &str) -> Failure {
    let exits = [Exit::Usage, Exit::NoNode, Exit::NotFound, Exit::Unavailable, Exit::Full];
    let exit = exits.into_iter().find(|exit| code == (*exit as u8).to_string());
    Failure::new(exit.unwrap_or(Exit::Failed), text)
}

/// The error message for an unmount that failed; advice names `command`, which the user typed.
pub(crate) fn unmount_failure(error: UnmountError, command: &str) -> Failure {
    let exit = match &error {
        UnmountError::NotMounted { .. } => Exit::NotFound,
        UnmountError::Unreadable { source, .. } if source.kind() == io::ErrorKind::NotFound => {
            Exit::NotFound
        }
        _ => Exit::Failed,
    };
    let busy = matches!(error, UnmountError::Busy { .. });
    let failure = Failure::new(exit, error.to_string());
    match busy {
        true => failure.advice(format!("`{command} --lazy` does not wait for them.")),
        false => failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_are_named_after_what_they_are_of() {
        assert_eq!(log_name("mount", b"/home/me/my docs"), "mount-home-me-my-docs.log");
        let long = format!("/{}", "x".repeat(500));
        assert!(log_name("mount", long.as_bytes()).len() < 80);
    }

    #[test]
    fn an_announcement_may_come_in_pieces() {
        struct Slow<'a>(&'a [u8]);
        impl Read for Slow<'_> {
            fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
                let n = self.0.len().min(3);
                into[..n].copy_from_slice(&self.0[..n]);
                self.0 = &self.0[n..];
                Ok(n)
            }
        }
        for (sent, heard) in [("mounted\n", "mounted"), ("4 no such\nthing\n", "4 no such\nthing")]
        {
            let said = read_announcement(&mut Slow(sent.as_bytes())).expect("reads");
            assert_eq!(said, heard);
        }
        let failure = announced("4", "no such\nthing");
        assert_eq!((failure.exit, failure.to_string()), (Exit::NotFound, "no such\nthing".into()));
        assert_eq!(announced("99", "x").exit, Exit::Failed);
    }
}
