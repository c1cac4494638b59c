//! What holds inside the world between two steps.

use std::collections::BTreeMap;

use crate::HostId;
use crate::schedule::What;
use crate::world::World;

impl World {
    /// Asserts it all; takes time in proportion to the world.
    pub(crate) fn check_invariants(&self) {
        self.check_schedule();
        self.check_calls();
        self.check_tasks();
    }

    /// Nothing is overdue; every timer and every open deadline has its one live entry.
    fn check_schedule(&self) {
        let mut live_count = 0;
        for entry in self.schedule.iter().chain(self.frozen.entries()) {
            match entry.what {
                What::Timer(slot) => {
                    let timer = self.timers.find(slot);
                    live_count += usize::from(timer.is_some_and(|timer| timer.seq == entry.seq));
                }
                What::Limit(slot) => {
                    let call = self.calls.find(slot);
                    live_count += usize::from(call.is_some_and(|c| c.limit_seq == entry.seq));
                }
                _ => {
                    let waits = self.frozen.entries().any(|waiting| waiting == entry);
                    assert!(entry.at >= self.now || waits, "{entry:?} is overdue at {}", self.now);
                }
            }
        }
        let open_count = self.calls.iter().filter(|(_, call)| call.limit_seq != 0).count();
        assert_eq!(live_count, self.timers.len() + open_count, "timers and deadlines to come");
    }

    /// A call is held by the messages under way, its server, and at most one caller.
    fn check_calls(&self) {
        let mut under_way = BTreeMap::new();
        for entry in self.schedule.iter().chain(self.frozen.entries()) {
            if let What::Head(slot, _) | What::Arrive(slot, _) | What::Send(slot, _) = entry.what {
                *under_way.entry(slot).or_insert(0u32) += 1;
            }
        }
        for slot in self.messages_on_connections() {
            *under_way.entry(slot).or_insert(0u32) += 1;
        }
        for (slot, call) in self.calls.iter() {
            let messages = under_way.remove(&slot).unwrap_or(0);
            let known = messages + u32::from(call.server.is_some());
            assert!(call.refs > 0, "call {slot} is held by nobody");
            assert!(
                call.refs == known || call.refs == known + 1,
                "call {slot} counts {} holders; {known} besides its caller are known",
                call.refs
            );
            if let Some(task) = call.server {
                assert_eq!(self.tasks.host_of(task), Some(call.to), "call {slot}'s server");
            }
        }
        assert!(under_way.is_empty(), "messages of freed calls: {under_way:?}");
    }

    /// Every task is in the list of its host, and hosts that are down have none.
    fn check_tasks(&self) {
        let mut listed_count = 0;
        for index in (0..self.hosts.len() as u32).chain([HostId::OUTSIDE.0]) {
            let host = self.host(index);
            let count = self.tasks.check_list(host.tasks, index);
            assert!(count == 0 || host.is_up, "host {index} is down and has {count} tasks");
            listed_count += count;
        }
        assert_eq!(listed_count, self.tasks.count(), "tasks in the lists of hosts");
    }
}
