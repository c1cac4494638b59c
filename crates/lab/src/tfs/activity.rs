//! What a person does on a computer all day, as far as a disk notices.
//!
//! The TFS paper recorded the block allocations of two workstations for 27 and 13 days (§3.3);
//! the traces were not published. Here a user works from nine to six: looks at pages through
//! a browser whose cache is bounded, makes and removes temporary files ("the trace includes
//! many short-lived allocations such as temporary lock files"), saves documents (a new file
//! renamed over the old one), gets mail (appended to one file), keeps a few new files, and once
//! a week a fiftieth of the old files is updated; a log is appended to around the clock. The
//! numbers are guesses about such a person, chosen before anything was measured with them; the
//! busy person of *machine 1* does everything four times as often as that of *machine 2*.
//! Sizes are log-normal.
//!
//! It is the allocator that says where the blocks lie: that part is no model.

use std::collections::VecDeque;
use std::time::Duration;

use atoll_env::{Env, Runtime, random_below};
use atoll_vfs::{Errno, InodeNumber};

use super::desktop::{Desktop, File, OLD_FILES, Planned, Tree, old_files, size};
use crate::LabError;
use crate::churn::LogNormal;

const DAY_SECS: f64 = 86_400.0;
const WORK_BEGINS_SECS: f64 = 9.0 * 3600.0;
const WORK_SECS: f64 = 9.0 * 3600.0;

/// In a day of the quiet person.
const PAGES: usize = 500;
const TEMPORARY: usize = 400;
const SAVES: usize = 20;
const MAILS: usize = 20;
const KEPT: usize = 4;
const LOG_EVERY_SECS: f64 = 300.0;
/// Every so many days...
const UPDATE_DAYS: usize = 7;
/// ... one of so many old files.
const UPDATED: u64 = 50;

/// Median 8 KB, mean 25 KB.
const PAGE: LogNormal = LogNormal { mu: 9.0, sigma: 1.5 };
/// Median 2 KB.
const TEMPORARY_FILE: LogNormal = LogNormal { mu: 7.6, sigma: 1.5 };
const MAIL: LogNormal = LogNormal { mu: 9.0, sigma: 1.5 };
const MOST_BYTES: u64 = 4 << 20;
const LOG_BYTES: u64 = 4096;
/// A log so long is begun anew; so many old ones are kept.
const LOG_FILE_BYTES: u64 = 1 << 20;
const OLD_LOGS: usize = 4;
const CACHE_DIRECTORIES: usize = 16;
/// The cache's share of the disk.
const CACHE_SHARE: f64 = 0.005;

/// One thing done.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Deed {
    Page,
    Temporary,
    Save,
    Mail,
    Keep,
    Log,
    Update,
}

/// Whether old files are updated on a day, which counts from zero.
pub(super) fn is_update_day(day: usize) -> bool {
    day % UPDATE_DAYS == UPDATE_DAYS - 1
}

/// A person at a computer.
pub(crate) struct Person<'a> {
    desktop: &'a Desktop,
    random: Env,
    /// How many times as often as the quiet one.
    zeal: usize,
    old: Tree,
    caches: Vec<InodeNumber>,
    cache: VecDeque<File>,
    cached_bytes: u64,
    cache_bytes: u64,
    /// Where temporary files go.
    temporary: InodeNumber,
    temporary_file: Option<File>,
    documents: Tree,
    mail: File,
    logs: InodeNumber,
    log: File,
    old_logs: VecDeque<File>,
    made: u64,
}

fn ended(what: &'static str) -> impl Fn(Errno) -> LabError {
    move |errno| LabError::Failed(format!("{what}: {errno}"))
}

impl<'a> Person<'a> {
    /// Fills half of an empty disk with old files and sits down.
    pub(super) fn new(desktop: &'a Desktop, zeal: usize) -> Result<Person<'a>, LabError> {
        let random = desktop.env();
        let (_, blocks) = desktop.room()?;
        let root = InodeNumber::ROOT;
        let directory = |name: &str| desktop.directory(root, name);
        let old = desktop.tree(directory("usr")?, &old_files(blocks / 2, &random))?;
        let home = directory("home")?;
        let plan = Planned {
            within: None,
            files: (0..100).map(|_| size(OLD_FILES, MOST_BYTES, &random)).collect(),
        };
        let documents = desktop.tree(desktop.directory(home, "documents")?, &[plan])?;
        let cache = desktop.directory(home, "cache")?;
        let caches = (0..CACHE_DIRECTORIES)
            .map(|n| desktop.directory(cache, &format!("{n:x}")))
            .collect::<Result<_, _>>()?;
        let mail = File { parent: home, name: "mail".into(), len_bytes: 1 << 20 };
        desktop.create(&mail).map_err(ended("mail"))?;
        let logs = directory("log")?;
        let log = File { parent: logs, name: "log".into(), len_bytes: 0 };
        desktop.create(&log).map_err(ended("log"))?;
        let disk_bytes = blocks * u64::from(super::desktop::BLOCK_BYTES);
        Ok(Person {
            desktop,
            random,
            zeal,
            old,
            caches,
            cache: VecDeque::new(),
            cached_bytes: 0,
            cache_bytes: (disk_bytes as f64 * CACHE_SHARE) as u64,
            temporary: directory("tmp")?,
            temporary_file: None,
            documents,
            mail,
            logs,
            log,
            old_logs: VecDeque::new(),
            made: 0,
        })
    }

    /// Lives a day, which counts from zero; `look` is called after each deed.
    pub(super) fn live(
        &mut self,
        day: usize,
        look: &mut dyn FnMut(&dyn Runtime),
    ) -> Result<(), LabError> {
        let mut now = 0.0;
        for (at, deed) in self.deeds(day) {
            self.desktop.wait(Duration::from_secs_f64(at - now));
            now = at;
            self.act(deed).map_err(ended("a day's work"))?;
            look(&*self.random);
        }
        self.desktop.wait(Duration::from_secs_f64(DAY_SECS - now));
        Ok(())
    }

    /// The deeds of a day, in order of time.
    fn deeds(&self, day: usize) -> Vec<(f64, Deed)> {
        let share = || (self.random.random_u64() >> 11) as f64 / (1u64 << 53) as f64;
        let mut deeds = Vec::new();
        for (times, deed) in [
            (PAGES, Deed::Page),
            (TEMPORARY, Deed::Temporary),
            (SAVES, Deed::Save),
            (MAILS, Deed::Mail),
            (KEPT, Deed::Keep),
        ] {
            let at = || WORK_BEGINS_SECS + WORK_SECS * share();
            deeds.extend((0..times * self.zeal).map(|_| (at(), deed)));
        }
        let logged = (DAY_SECS / LOG_EVERY_SECS) as usize;
        deeds.extend((0..logged).map(|n| (n as f64 * LOG_EVERY_SECS, Deed::Log)));
        if is_update_day(day) {
            deeds.push((WORK_BEGINS_SECS, Deed::Update));
        }
        deeds.sort_by(|a, b| a.0.total_cmp(&b.0));
        deeds
    }

    fn act(&mut self, deed: Deed) -> Result<(), Errno> {
        match deed {
            Deed::Page => self.page(),
            Deed::Temporary => self.temporary(),
            Deed::Save => {
                let at = self.below(self.documents.files.len());
                let len_bytes = size(OLD_FILES, MOST_BYTES, &self.random);
                let mut document = self.documents.files[at].clone();
                self.save(&mut document, len_bytes)?;
                self.documents.files[at] = document;
                Ok(())
            }
            Deed::Mail => {
                let len_bytes = size(MAIL, MOST_BYTES, &self.random);
                self.desktop.append(&mut self.mail, len_bytes)
            }
            Deed::Keep => {
                let parent = self.documents.directories[0];
                let len_bytes = size(OLD_FILES, MOST_BYTES, &self.random);
                let file = File { parent, name: self.fresh(), len_bytes };
                self.desktop.create(&file)?;
                self.documents.files.push(file);
                Ok(())
            }
            Deed::Log => self.log(),
            Deed::Update => self.update(),
        }
    }

    fn below(&self, bound: usize) -> usize {
        random_below(&*self.random, bound as u64) as usize
    }

    /// A name that was never used.
    fn fresh(&mut self) -> String {
        self.made += 1;
        format!("n{}", self.made)
    }

    fn page(&mut self) -> Result<(), Errno> {
        let parent = self.caches[self.below(self.caches.len())];
        let file =
            File { parent, name: self.fresh(), len_bytes: size(PAGE, MOST_BYTES, &self.random) };
        self.desktop.create(&file)?;
        self.cached_bytes += file.len_bytes;
        self.cache.push_back(file);
        while self.cached_bytes > self.cache_bytes {
            let Some(oldest) = self.cache.pop_front() else { break };
            self.desktop.delete(&oldest)?;
            self.cached_bytes -= oldest.len_bytes;
        }
        Ok(())
    }

    /// The temporary file before is gone when the next one is made.
    fn temporary(&mut self) -> Result<(), Errno> {
        if let Some(before) = self.temporary_file.take() {
            self.desktop.delete(&before)?;
        }
        let len_bytes = size(TEMPORARY_FILE, MOST_BYTES, &self.random);
        let file = File { parent: self.temporary, name: self.fresh(), len_bytes };
        self.desktop.create(&file)?;
        self.temporary_file = Some(file);
        Ok(())
    }

    /// A new file, renamed over the old one.
    fn save(&mut self, file: &mut File, len_bytes: u64) -> Result<(), Errno> {
        let new = File { parent: file.parent, name: self.fresh(), len_bytes };
        self.desktop.create(&new)?;
        self.desktop.rename(&new, &file.name)?;
        file.len_bytes = len_bytes;
        Ok(())
    }

    fn log(&mut self) -> Result<(), Errno> {
        if self.log.len_bytes >= LOG_FILE_BYTES {
            let old = self.fresh();
            self.desktop.rename(&self.log, &old)?;
            self.old_logs.push_back(File { name: old, ..self.log.clone() });
            self.log = File { parent: self.logs, name: "log".into(), len_bytes: 0 };
            self.desktop.create(&self.log)?;
            if self.old_logs.len() > OLD_LOGS {
                let oldest = self.old_logs.pop_front().expect("there are some");
                self.desktop.delete(&oldest)?;
            }
        }
        self.desktop.append(&mut self.log, LOG_BYTES)
    }

    fn update(&mut self) -> Result<(), Errno> {
        for at in 0..self.old.files.len() {
            if random_below(&*self.random, UPDATED) == 0 {
                let mut file = self.old.files[at].clone();
                let len_bytes = file.len_bytes;
                self.save(&mut file, len_bytes)?;
            }
        }
        Ok(())
    }
}
