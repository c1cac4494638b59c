//! Which task runs next: tasks, their wakers and the ready queue.
//!
//! A waker holds its task's number and the ready queue, never the world; it may be
//! kept or used after the task's end, when its number names nothing any more.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};

use atoll_env::BoxFuture;
use atoll_net::{Refusal, Reply};

use crate::slab::Slab;

/// Locks whatever a panicking test left behind: the data is plain and stays usable.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A task's name. `serial` is never used twice.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TaskId {
    pub(crate) index: u32,
    pub(crate) serial: u64,
}

impl TaskId {
    /// The future given to `block_on`, which lives on the stack of its caller.
    pub(crate) const DRIVER: TaskId = TaskId { index: u32::MAX, serial: 0 };
}

/// The queue of tasks that have been woken.
#[derive(Debug, Default)]
pub(crate) struct Ready {
    queue: Mutex<VecDeque<TaskId>>,
}

impl Ready {
    pub(crate) fn push(&self, task: TaskId) {
        lock(&self.queue).push_back(task);
    }

    /// Takes the task at the place that `choose` picks among so many.
    pub(crate) fn pop(&self, choose: impl FnOnce(usize) -> usize) -> Option<TaskId> {
        let mut queue = lock(&self.queue);
        if queue.len() > 1 {
            let chosen = choose(queue.len());
            queue.swap(0, chosen);
        }
        queue.pop_front()
    }
}

/// What wakes a task.
#[derive(Debug)]
pub(crate) struct TaskWaker {
    ready: Arc<Ready>,
    task: TaskId,
    is_queued: AtomicBool,
}

impl TaskWaker {
    /// A waker of `task`, which stands in the queue already if `is_queued`.
    pub(crate) fn new(ready: Arc<Ready>, task: TaskId, is_queued: bool) -> Arc<TaskWaker> {
        Arc::new(TaskWaker { ready, task, is_queued: AtomicBool::new(is_queued) })
    }

    /// From now on a wake queues the task again.
    pub(crate) fn rearm(&self) {
        self.is_queued.store(false, Ordering::SeqCst);
    }
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.is_queued.swap(true, Ordering::SeqCst) {
            self.ready.push(self.task);
        }
    }
}

/// What a task does.
pub(crate) enum Body {
    /// Protocol code's own.
    Plain(BoxFuture<'static, ()>),
    /// Answering a call.
    Serve(BoxFuture<'static, Result<Reply, Refusal>>),
}

/// What is taken out of a slot while the task is polled.
pub(crate) struct Run {
    pub(crate) body: Body,
    pub(crate) flag: Arc<TaskWaker>,
    pub(crate) waker: Waker,
}

const NONE: u32 = u32::MAX;

struct TaskSlot {
    serial: u64,
    host: u32,
    // Neighbours in the list of the host's tasks.
    previous: u32,
    next: u32,
    /// The call that this task answers.
    call: Option<u32>,
    run: Option<Run>,
}

/// A task that has been taken out.
pub(crate) struct Ended {
    pub(crate) call: Option<u32>,
    pub(crate) run: Option<Run>,
}

/// The first of a host's tasks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TaskList(u32);

impl TaskList {
    pub(crate) const EMPTY: TaskList = TaskList(NONE);
}

pub(crate) struct Tasks {
    slots: Slab<TaskSlot>,
    next_serial: u64,
}

impl Tasks {
    pub(crate) fn new() -> Tasks {
        Tasks { slots: Slab::new(), next_serial: 1 }
    }

    pub(crate) fn count(&self) -> usize {
        self.slots.len()
    }

    /// Adds a task to a host's list and to the ready queue.
    pub(crate) fn add(
        &mut self,
        ready: &Arc<Ready>,
        host: u32,
        list: &mut TaskList,
        body: Body,
        call: Option<u32>,
    ) -> TaskId {
        let serial = self.next_serial;
        self.next_serial += 1;
        let slot = TaskSlot { serial, host, previous: NONE, next: list.0, call, run: None };
        let index = self.slots.insert(slot);
        if let Some(next) = self.slots.find_mut(list.0) {
            next.previous = index;
        }
        list.0 = index;
        let id = TaskId { index, serial };
        let flag = TaskWaker::new(ready.clone(), id, true);
        let waker = Waker::from(flag.clone());
        let slot = self.slots.find_mut(index).expect("it was just inserted");
        slot.run = Some(Run { body, flag, waker });
        ready.push(id);
        id
    }

    /// Takes out what is polled; `None` if the task has ended or is being polled.
    pub(crate) fn check_out(&mut self, id: TaskId) -> Option<(Run, u32)> {
        let slot = self.slots.find_mut(id.index).filter(|slot| slot.serial == id.serial)?;
        Some((slot.run.take()?, slot.host))
    }

    /// Puts it back after the poll; gives it back if the task was ended meanwhile.
    pub(crate) fn check_in(&mut self, id: TaskId, run: Run) -> Option<Run> {
        match self.slots.find_mut(id.index) {
            Some(slot) if slot.serial == id.serial => slot.run.replace(run),
            _ => Some(run),
        }
    }

    pub(crate) fn host_of(&self, id: TaskId) -> Option<u32> {
        self.slots.find(id.index).filter(|slot| slot.serial == id.serial).map(|slot| slot.host)
    }

    /// Takes a task out for good.
    pub(crate) fn remove(&mut self, id: TaskId, list: &mut TaskList) -> Option<Ended> {
        self.slots.find(id.index).filter(|slot| slot.serial == id.serial)?;
        Some(self.unlink(id.index, list))
    }

    /// Takes out the first task of a list.
    pub(crate) fn remove_first(&mut self, list: &mut TaskList) -> Option<Ended> {
        self.slots.find(list.0)?;
        Some(self.unlink(list.0, list))
    }

    fn unlink(&mut self, index: u32, list: &mut TaskList) -> Ended {
        let slot = self.slots.remove(index).expect("the caller found it");
        if let Some(next) = self.slots.find_mut(slot.next) {
            next.previous = slot.previous;
        }
        match self.slots.find_mut(slot.previous) {
            Some(previous) => previous.next = slot.next,
            None => list.0 = slot.next,
        }
        Ended { call: slot.call, run: slot.run }
    }

    /// Counts a host's list, asserting that it is well linked.
    pub(crate) fn check_list(&self, list: TaskList, host: u32) -> usize {
        let (mut count, mut previous, mut index) = (0, NONE, list.0);
        while let Some(slot) = self.slots.find(index) {
            assert_eq!((slot.host, slot.previous), (host, previous), "task {index}");
            (count, previous, index) = (count + 1, index, slot.next);
        }
        assert_eq!(index, NONE, "the list of host {host} ends in a freed slot");
        count
    }

    /// How many tasks each host has, hosts in order of their numbers.
    pub(crate) fn count_by_host(&self) -> Vec<(u32, usize)> {
        let mut counts = std::collections::BTreeMap::new();
        for (_, slot) in self.slots.iter() {
            *counts.entry(slot.host).or_insert(0) += 1;
        }
        counts.into_iter().collect()
    }
}
