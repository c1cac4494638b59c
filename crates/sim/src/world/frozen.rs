//! Hosts whose process is stopped (SIGSTOP) and later continued.
//!
//! The machine lives: connections stay open and messages to the process arrive. The process runs nothing: its
//! tasks, timers and deadlines, and what has arrived for it, wait until it goes on. Then it reads what has arrived
//! before it looks at its clock, as a process does that polls its sockets first. Its clocks have gone on meanwhile.

use super::World;
use crate::schedule::{Entry, What};
use crate::tasks::TaskId;

/// What waits for stopped processes.
#[derive(Default)]
pub(crate) struct Frozen {
    /// With the host of each.
    entries: Vec<(u32, Entry)>,
    tasks: Vec<(u32, TaskId)>,
}

impl Frozen {
    /// Every event that waits, those that count no more too.
    pub(crate) fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().map(|(_, entry)| entry)
    }
}

impl World {
    /// Stops a host's process.
    pub(crate) fn freeze(&mut self, index: u32) {
        self.hosts[index as usize].is_frozen = true;
    }

    /// Lets it go on; returns its tasks that are to run.
    pub(crate) fn thaw(&mut self, index: u32) -> Vec<TaskId> {
        self.hosts[index as usize].is_frozen = false;
        let entries = std::mem::take(&mut self.frozen.entries);
        let (its, others) = entries.into_iter().partition(|(host, _)| *host == index);
        self.frozen.entries = others;
        for (_, entry) in its {
            let has_arrived = matches!(entry.what, What::Arrive(..));
            let at = self.now + u64::from(!has_arrived);
            self.schedule.put_back(Entry { at, ..entry });
        }
        let tasks = std::mem::take(&mut self.frozen.tasks);
        let (its, others) = tasks.into_iter().partition(|(host, _)| *host == index);
        self.frozen.tasks = others;
        its.into_iter().map(|(_, task): (u32, TaskId)| task).collect()
    }

    /// Whether the task is one of a stopped process; it waits then.
    pub(super) fn waits_task(&mut self, id: TaskId) -> bool {
        let Some(host) = self.tasks.host_of(id).filter(|host| self.host(*host).is_frozen) else {
            return false;
        };
        self.frozen.tasks.push((host, id));
        true
    }

    /// Whether an event that is due is one of a stopped process; it waits then.
    pub(super) fn waits_event(&mut self, entry: Entry) -> bool {
        let host = match entry.what {
            What::Timer(slot) => self.timers.find(slot).map(|timer| timer.host),
            What::Limit(slot) => self.calls.find(slot).map(|call| call.from),
            What::Arrive(slot, leg) => Some(self.receiver(slot, leg)),
            // The machine's part: lines and connections.
            What::Head(..) | What::Send(..) | What::Chunk(..) | What::Pump(..) => None,
        };
        let Some(host) = host.filter(|host| self.host(*host).is_frozen) else { return false };
        self.frozen.entries.push((host, entry));
        true
    }
}
