//! The conformance kit: what every implementation of [`FileSystem`] must do, as checks
//! that run against any of them.
//!
//! An implementation's tests provide a [`Subject`], which makes a file system that holds
//! a given [`Tree`], and run [`run_read_suite`] and, where it can be written,
//! [`run_write_suite`]; where several front ends share one, [`run_shared_suite`], and where handles
//! last over restarts, [`run_restart_suite`] as well:
//!
//! ```text
//! let report = kit::run_read_suite(&MySubject::new()).await;
//! report.assert_passes();
//! ```
//!
//! Each check has a name that states what holds, and a deadline: a file system that does
//! not answer, or that panics, fails the check and not the run. Checks that need what a
//! file system says it lacks ([`Features`]) are skipped, and the report says so.
//!
//! [`write_tree_to_disk`] makes a tree of real files of a [`Tree`] (to publish it), and
//! [`compare_trees`] compares two trees of real files (a mount with its source).

mod build;
mod compare;
mod probe;
mod read;
mod restart;
mod shared;
mod tree;
mod write;

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use atoll_env::{BoxFuture, Env};
use futures_util::FutureExt;

use crate::FileSystem;

pub use build::{Written, write_tree_to_disk, write_tree_to_fs};
pub use compare::{CompareOptions, Comparison, Difference, MAX_DIFFERENCES, compare_trees};
pub use restart::{Restart, RestartSubject, run_restart_suite};
pub use shared::{SharedSubject, run_shared_suite};
pub use tree::{BIG_DIRECTORY_ENTRIES, Body, Content, Node, Tree};

use probe::{Outcome, Probe, Stop};

/// How long one check may take. Far beyond what any needs on a busy machine.
const CHECK_LIMIT: Duration = Duration::from_secs(120);

/// What a file system has beside the least: directories, regular files and symbolic
/// links, with modes and times.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Features {
    /// It refuses every change with `EROFS`.
    pub read_only: bool,
    /// It keeps extended attributes of the `user` namespace.
    pub xattrs: bool,
    /// A file may have several names.
    pub hard_links: bool,
    /// Holes take no space.
    pub holes: bool,
    /// It has FIFOs, sockets and devices.
    pub special_files: bool,
    /// Two names can be exchanged.
    pub exchange: bool,
    /// It reserves space, punches holes and zeroes ranges (`fallocate(2)`).
    pub fallocate: bool,
}

impl Features {
    /// Everything, and it can be written.
    pub const FULL: Features = Features {
        read_only: false,
        xattrs: true,
        hard_links: true,
        holes: true,
        special_files: true,
        exchange: true,
        fallocate: true,
    };

    /// A published tree: read-only, with attributes and holes.
    pub const PUBLISHED: Features = Features {
        read_only: true,
        xattrs: true,
        hard_links: false,
        holes: true,
        special_files: false,
        exchange: false,
        fallocate: false,
    };
}

/// A kind of file system, as its tests show it to the kit.
pub trait Subject: Send + Sync {
    /// Its name, for reports.
    fn name(&self) -> String;

    /// What it has.
    fn features(&self) -> Features;

    /// Time and tasks for the kit; tasks should run in parallel where the file system's
    /// callers do.
    fn env(&self) -> Env;

    /// A new file system that holds exactly `tree`, or why none could be made.
    fn make(&self, tree: Arc<Tree>) -> BoxFuture<'_, Result<Arc<dyn FileSystem>, String>>;
}

/// How one check went.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// What it claims holds.
    Passed,
    /// It does not apply, for this reason.
    Skipped(&'static str),
    /// It does not hold, for this reason.
    Failed(String),
}

/// One check of a report.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Checked {
    /// What should hold.
    pub name: &'static str,
    /// How it went.
    pub verdict: Verdict,
}

/// What a suite found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Report {
    /// The file system's name.
    pub subject: String,
    /// All checks, in the order they ran.
    pub checks: Vec<Checked>,
}

impl Report {
    /// The checks that failed, with their reasons.
    pub fn failures(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.checks.iter().filter_map(|check| match &check.verdict {
            Verdict::Failed(reason) => Some((check.name, reason.as_str())),
            _ => None,
        })
    }

    /// How many checks passed.
    pub fn passed(&self) -> usize {
        self.checks.iter().filter(|check| check.verdict == Verdict::Passed).count()
    }

    /// # Panics
    /// If a check failed, with the whole report.
    pub fn assert_passes(&self) {
        assert!(self.failures().next().is_none(), "{self}");
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let failed = self.failures().count();
        let skipped = self.checks.len() - failed - self.passed();
        writeln!(
            f,
            "{}: {} passed, {failed} failed, {skipped} skipped",
            self.subject,
            self.passed()
        )?;
        for Checked { name, verdict } in &self.checks {
            match verdict {
                Verdict::Passed => {}
                Verdict::Skipped(reason) => writeln!(f, "  skipped {name}: {reason}")?,
                Verdict::Failed(reason) => writeln!(f, "  FAILED {name}: {reason}")?,
            }
        }
        Ok(())
    }
}

/// A check: its name, and what it does.
type Check = (&'static str, fn(Probe) -> BoxFuture<'static, Outcome>);

/// Checks by the names of their functions.
macro_rules! checks {
    ($($name:ident),* $(,)?) => {
        &[$((stringify!($name), |probe| Box::pin($name(probe)))),*]
    };
}
use checks;

/// Runs the checks that need no change, over one file system that holds
/// [`Tree::fixture`].
pub async fn run_read_suite(subject: &dyn Subject) -> Report {
    let mut report = Report { subject: subject.name(), checks: Vec::new() };
    let tree = Arc::new(Tree::fixture());
    match make(subject, &tree).await {
        Ok(probe) => {
            for check in read::suite() {
                report.checks.push(run(*check, probe.clone()).await);
            }
        }
        Err(verdict) => report.checks.push(Checked { name: "the_tree_can_be_made", verdict }),
    }
    report
}

/// Runs the checks that change something, each over a new file system that holds
/// [`Tree::small`].
pub async fn run_write_suite(subject: &dyn Subject) -> Report {
    let mut report = Report { subject: subject.name(), checks: Vec::new() };
    let tree = Arc::new(Tree::small());
    for check in write::suite() {
        let checked = match make(subject, &tree).await {
            Ok(probe) => run(*check, probe).await,
            Err(verdict) => Checked { name: check.0, verdict },
        };
        report.checks.push(checked);
    }
    report
}

async fn make(subject: &dyn Subject, tree: &Arc<Tree>) -> Result<Probe, Verdict> {
    let (features, env) = (subject.features(), subject.env());
    match subject.make(tree.clone()).await {
        Ok(fs) => Ok(Probe { fs, tree: tree.clone(), features, env }),
        Err(reason) => Err(Verdict::Failed(format!("no file system was made: {reason}"))),
    }
}

async fn run((name, check): Check, probe: Probe) -> Checked {
    let env = probe.env.clone();
    Checked { name, verdict: judge(&env, async move { check(probe).await }).await }
}

/// What a check comes to, whatever it does.
async fn judge(env: &Env, check: impl Future<Output = Outcome>) -> Verdict {
    let work = AssertUnwindSafe(check).catch_unwind();
    match atoll_env::timeout(&**env, CHECK_LIMIT, work).await {
        Ok(Ok(Ok(()))) => Verdict::Passed,
        Ok(Ok(Err(Stop::Skipped(reason)))) => Verdict::Skipped(reason),
        Ok(Ok(Err(Stop::Failed(reason)))) => Verdict::Failed(reason),
        Ok(Err(panic)) => {
            let owned = panic.downcast_ref::<String>().map(String::as_str);
            let text = owned.or_else(|| panic.downcast_ref::<&str>().copied());
            Verdict::Failed(format!("panicked: {}", text.unwrap_or("(no text)")))
        }
        Err(_) => Verdict::Failed(format!("no answer within {} s", CHECK_LIMIT.as_secs())),
    }
}
