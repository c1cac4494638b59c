//! A process that serves others, a node or a mount, ends at a panic.
//!
//! A task that panics would otherwise end alone and in silence, and what it did would never be done again: calls
//! wait, the status says `ok`, and locks stay held. A panic that unwinds a mount's own thread would even take the mount
//! away, and programs would go on writing into the directory below it. So the process says what has happened and
//! aborts, which runs no destructor: the kernel keeps the mount in its table, and each use of it fails with "Transport
//! endpoint is not connected" until `atoll unmount`. A supervisor sees SIGABRT. What
//! waited in a spool is brought to the ring as after any crash.
//!
//! Panics that are caught where they arise ([`atoll_env::panics`]) are not of that kind.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::panic::PanicHookInfo;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::messages::{self, note};

/// The work of this process is done; what its threads still do does not matter.
static IS_OVER: AtomicBool = AtomicBool::new(false);

/// From now on a panic of any thread ends the process.
pub(crate) fn end_at_panics() {
    std::panic::set_hook(Box::new(|panic| {
        if atoll_env::panics::are_caught() {
            return tracing::warn!("{panic}");
        }
        if IS_OVER.load(Ordering::Acquire) {
            return tracing::debug!("at the end of this process: {panic}");
        }
        tell(panic);
        messages::finish();
        std::process::abort();
    }));
}

/// The work is done. A thread that is cut off by the end of the runtime may panic.
pub(crate) fn work_is_over() {
    IS_OVER.store(true, Ordering::Release);
}

fn tell(panic: &PanicHookInfo<'_>) {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("without a name");
    let backtrace = Backtrace::capture();
    let trace = match backtrace.status() {
        BacktraceStatus::Captured => format!("\n{backtrace}"),
        _ => String::new(),
    };
    note!(
        "a fault of this program: thread {name} {panic}{trace}\n\
         The process ends here. A mount that it has served stays, and says \"Transport endpoint is not connected\" until \
         `atoll unmount`."
    );
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write};
    use std::os::unix::process::ExitStatusExt;
    use std::path::Path;
    use std::process::{Command, Output};
    use std::sync::Arc;

    use atoll_env::TokioRuntime;
    use atoll_gateway::fuse::{self, MountOptions};
    use atoll_vfs::memory::MemoryFs;

    use super::*;

    /// What the process that [`this_process_panics`] does, and where it mounts.
    const HOW: &str = "ATOLL_TEST_PANIC";
    const PLACE: &str = "ATOLL_TEST_MOUNT";
    const ABORTED: Option<i32> = Some(6);
    const NOT_CONNECTED: Option<i32> = Some(107);

    /// Runs only for the other tests, in a process of its own.
    #[test]
    #[ignore = "it ends its process"]
    fn this_process_panics() {
        let Ok(how) = std::env::var(HOW) else { return };
        messages::never_wait();
        end_at_panics();
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        let runtime = runtime.expect("a runtime");
        let _mounted = std::env::var_os(PLACE).map(|place| {
            let env = Arc::new(TokioRuntime::new(runtime.handle().clone()));
            let (fs, options) = (Arc::new(MemoryFs::new(env)), MountOptions::default());
            fuse::mount(fs, Path::new(&place), &options, runtime.handle()).expect("mounts")
        });
        match how.as_str() {
            "main" => panic!("here"),
            "task" => drop(runtime.spawn(async { panic!("here") })),
            "blocking" => drop(runtime.spawn_blocking(|| panic!("here"))),
            "thread" => drop(std::thread::spawn(|| panic!("here"))),
            "caught" => {
                assert!(atoll_env::panics::catch(|| panic!("here")).is_err());
                std::process::exit(0);
            }
            "over" => {
                work_is_over();
                assert!(std::thread::spawn(|| panic!("here")).join().is_err());
                std::process::exit(0);
            }
            how => unreachable!("{how}"),
        }
        std::thread::sleep(std::time::Duration::from_secs(600));
        std::process::exit(1);
    }

    fn panicking(how: &str, place: Option<&Path>) -> Output {
        let mut command = Command::new(std::env::current_exe().expect("it has a path"));
        command.args(["--exact", "crash::tests::this_process_panics", "--ignored", "--nocapture"]);
        if let Some(place) = place {
            command.env(PLACE, place);
        }
        command.env(HOW, how).output().expect("runs")
    }

    #[test]
    fn a_panic_of_any_thread_ends_the_process_and_is_told() {
        for how in ["main", "task", "blocking", "thread"] {
            let ended = panicking(how, None);
            let told = String::from_utf8_lossy(&ended.stderr).into_owned();
            assert_eq!(ended.status.signal(), ABORTED, "{how}: {told}");
            for part in ["a fault of this program", "crash.rs", "here", "atoll unmount"] {
                assert!(told.contains(part), "{how}: {told}");
            }
        }
    }

    #[test]
    fn panics_that_are_caught_or_come_when_all_is_done_end_nothing() {
        for how in ["caught", "over"] {
            let ended = panicking(how, None);
            assert_eq!(ended.status.code(), Some(0), "{how}: {ended:?}");
        }
    }

    /// The story: a panic unwound the thread that had the mount, which took it away, and programs wrote into the
    /// directory below it.
    #[test]
    fn a_panic_leaves_a_mount_that_fails_each_call_and_never_the_directory_below() {
        if std::fs::File::options().read(true).write(true).open("/dev/fuse").is_err() {
            let _ = writeln!(io::stderr(), "\nSKIPPED: FUSE cannot be used here");
            return;
        }
        for how in ["main", "task", "thread"] {
            let temp = tempfile::tempdir().expect("a directory");
            let place = temp.path().canonicalize().expect("a path");
            let ended = panicking(how, Some(&place));
            assert_eq!(ended.status.signal(), ABORTED, "{how}: {ended:?}");
            let failed = std::fs::write(place.join("new"), "x").err();
            let unmounted = fuse::unmount(&place, false);
            assert_eq!(failed.and_then(|error| error.raw_os_error()), NOT_CONNECTED, "{how}");
            unmounted.expect("a dead mount can be unmounted");
            assert_eq!(std::fs::read_dir(&place).expect("there").count(), 0);
        }
    }
}
