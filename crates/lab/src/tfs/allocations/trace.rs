//! A machine's allocations, and the simulator of Figure 5 that goes through them.

use std::sync::{Arc, Mutex};

use atoll_env::Runtime;
use atoll_tfs::avoid::{aging, hottest, share_to_avoid};
use atoll_tfs::fs::{AllocationObserver, MountOptions};

use crate::LabError;
use crate::tfs::activity::{Person, is_update_day};
use crate::tfs::desktop::{BLOCK_BYTES, Desktop, made, quiet};

/// The two people: machine 1 and machine 2.
pub(super) const MACHINES: [(&str, usize); 2] = [("machine 1", 4), ("machine 2", 1)];
pub(super) const DAY_SECS: f64 = 86_400.0;
/// A block group of 128 MiB has eight chunks.
const CHUNK_BLOCKS: u64 = 4096;
/// How often chunks are chosen.
const CHOSEN_EVERY_SECS: f64 = 3600.0;
/// Nothing is counted before.
const LEARNING_SECS: f64 = DAY_SECS;
/// Ordinary blocks allocated in one go.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Allocation {
    at_secs: f64,
    first: u64,
    blocks: u64,
}

/// All of them, of one machine.
#[derive(Clone, Debug)]
pub(super) struct Trace {
    pub machine: usize,
    pub blocks: u64,
    pub secs: f64,
    allocations: Vec<Allocation>,
}

/// How chunks are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Choice {
    /// A fixed share of allocations is avoided; all of the past counts.
    Share(f64),
    /// A loss of so many bytes a second is aimed at, as shipped.
    Target(f64),
}

/// One point of Figure 5.
#[derive(Clone, Debug)]
pub(super) struct Kept {
    pub machine: usize,
    pub choice: Choice,
    /// The share of the disk that is not avoided, over the time.
    pub usable: f64,
    /// Transparent data overwritten on each day that counts.
    lost: Vec<Lost>,
}

/// On one day.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Lost {
    bytes: f64,
    is_update_day: bool,
}

impl Kept {
    /// Over all days.
    pub(super) fn loss_bytes_per_sec(&self) -> f64 {
        rate(self.lost.iter())
    }

    /// On the days with the weekly update; zero if there was none.
    pub(super) fn update_days_bytes_per_sec(&self) -> f64 {
        rate(self.lost.iter().filter(|lost| lost.is_update_day))
    }

    /// On all others.
    pub(super) fn other_days_bytes_per_sec(&self) -> f64 {
        rate(self.lost.iter().filter(|lost| !lost.is_update_day))
    }
}

fn rate<'a>(days: impl Iterator<Item = &'a Lost>) -> f64 {
    let (bytes, count) =
        days.fold((0.0, 0.0), |(bytes, count), lost| (bytes + lost.bytes, count + 1.0));
    if count > 0.0 { bytes / (count * DAY_SECS) } else { 0.0 }
}

/// Lets a person work for so many days and notes every allocation.
pub(super) fn recorded(
    machine: usize,
    disk_bytes: u64,
    days: usize,
    seed: u64,
) -> Result<Trace, LabError> {
    let disk = made(disk_bytes)?;
    let noted: Arc<Mutex<Vec<(u32, u32)>>> = Arc::default();
    let listener = noted.clone();
    let note = move |first, blocks| {
        listener.lock().expect("no holder panics").push((first, blocks));
    };
    let options = MountOptions { observer: Some(AllocationObserver(Arc::new(note))), ..quiet() };
    let desktop = Desktop::mount(&disk, seed, &options)?;
    let env = desktop.env();
    let mut person = Person::new(&desktop, MACHINES[machine].1)?;
    desktop.sync()?;
    let taken = || std::mem::take(&mut *noted.lock().expect("no holder panics"));
    drop(taken());
    let begun = env.now();
    let mut allocations = Vec::new();
    for day in 0..days {
        person.live(day, &mut |env: &dyn Runtime| {
            let at_secs = env.now().since(begun).as_secs_f64();
            allocations.extend(taken().into_iter().map(|(first, blocks)| {
                let (first, blocks) = (u64::from(first), u64::from(blocks));
                Allocation { at_secs, first, blocks }
            }));
        })?;
    }
    drop(person);
    desktop.unmount()?;
    let blocks = disk_bytes / u64::from(BLOCK_BYTES);
    Ok(Trace { machine, blocks, secs: days as f64 * DAY_SECS, allocations })
}

impl Trace {
    pub(super) fn bytes_per_sec(&self) -> f64 {
        let blocks: u64 = self.allocations.iter().map(|allocation| allocation.blocks).sum();
        blocks as f64 * f64::from(BLOCK_BYTES) / self.secs
    }

    /// How often each block was allocated, ascending.
    pub(super) fn counts(&self) -> Vec<u32> {
        let mut counts = vec![0; self.blocks as usize];
        for Allocation { first, blocks, .. } in &self.allocations {
            let end = (first + blocks).min(self.blocks);
            counts[*first as usize..end as usize].iter_mut().for_each(|count| *count += 1);
        }
        counts.sort_unstable();
        counts
    }

    fn chunks(&self) -> usize {
        self.blocks.div_ceil(CHUNK_BLOCKS) as usize
    }
}

/// Figure 5's simulator.
pub(super) fn simulated(trace: &Trace, choice: Choice) -> Kept {
    let mut histogram = vec![0f32; trace.chunks()];
    let mut observed_secs = 0.0;
    let mut avoided = vec![false; trace.chunks()];
    let (mut usable, mut counted) = (0.0, 0.0);
    let mut lost: Vec<Lost> = Vec::new();
    let mut next = trace.allocations.iter().peekable();
    let mut now = 0.0;
    while now < trace.secs {
        let end = now + CHOSEN_EVERY_SECS;
        let mut lost_blocks = 0u64;
        while let Some(allocation) = next.next_if(|allocation| allocation.at_secs < end) {
            for block in allocation.first..(allocation.first + allocation.blocks).min(trace.blocks)
            {
                let chunk = (block / CHUNK_BLOCKS) as usize;
                histogram[chunk] += 1.0;
                lost_blocks += u64::from(!avoided[chunk]);
            }
        }
        if now >= LEARNING_SECS {
            let used = avoided.iter().filter(|avoided| !**avoided).count();
            usable += used as f64 / avoided.len() as f64;
            counted += 1.0;
            let day = ((now - LEARNING_SECS) / DAY_SECS) as usize;
            if day == lost.len() {
                let is_update_day = is_update_day((now / DAY_SECS) as usize);
                lost.push(Lost { bytes: 0.0, is_update_day });
            }
            lost[day].bytes += lost_blocks as f64 * f64::from(BLOCK_BYTES);
        }
        now = end;
        observed_secs += CHOSEN_EVERY_SECS;
        avoided = match choice {
            Choice::Share(share) => hottest(&histogram, share),
            Choice::Target(target) => {
                let factor = aging(observed_secs);
                observed_secs *= factor;
                histogram.iter_mut().for_each(|count| *count *= factor as f32);
                let blocks: f64 = histogram.iter().map(|count| f64::from(*count)).sum();
                let rate = blocks * f64::from(BLOCK_BYTES) / observed_secs;
                hottest(&histogram, share_to_avoid(target, rate))
            }
        };
    }
    Kept { machine: trace.machine, choice, usable: usable / counted, lost }
}

/// The rate at which the coldest so many blocks together are allocated, bytes a second.
pub(super) fn coldest(counts: &[u32], blocks: usize, secs: f64) -> f64 {
    let sum: u64 = counts[..blocks.min(counts.len())].iter().map(|count| u64::from(*count)).sum();
    sum as f64 * f64::from(BLOCK_BYTES) / secs
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk of ten chunks: one is written a hundred times a day, another once.
    fn trace(days: usize) -> Trace {
        let allocation =
            |at_secs, chunk: u64| Allocation { at_secs, first: chunk * CHUNK_BLOCKS, blocks: 1 };
        let mut allocations = Vec::new();
        for day in 0..days {
            let begun = day as f64 * DAY_SECS;
            allocations.extend((0..100).map(|n| allocation(begun + f64::from(n) * 600.0, 3)));
            allocations.push(allocation(begun + 80_000.0, 7));
        }
        Trace { machine: 1, blocks: 10 * CHUNK_BLOCKS, secs: days as f64 * DAY_SECS, allocations }
    }

    #[test]
    fn avoiding_the_hot_chunk_loses_what_falls_elsewhere_only() {
        let day_bytes = f64::from(BLOCK_BYTES) / DAY_SECS;
        let all = simulated(&trace(10), Choice::Share(0.0));
        assert_eq!(all.usable, 1.0);
        assert!((all.loss_bytes_per_sec() - 101.0 * day_bytes).abs() < 1e-9);
        let hot = simulated(&trace(10), Choice::Share(0.9));
        assert!((hot.usable - 0.9).abs() < 1e-9);
        assert!((hot.loss_bytes_per_sec() - day_bytes).abs() < 1e-9);
        let both = simulated(&trace(10), Choice::Share(1.0));
        assert!((both.usable - 0.8).abs() < 1e-9);
        assert_eq!(both.loss_bytes_per_sec(), 0.0);
    }

    #[test]
    fn days_with_an_update_are_told_apart() {
        let day = |bytes, is_update_day| Lost { bytes, is_update_day };
        let mut kept = simulated(&trace(10), Choice::Share(0.0));
        assert_eq!(kept.lost.len(), 9, "the first day does not count");
        assert_eq!(kept.lost.iter().position(|lost| lost.is_update_day), Some(5), "day 6");
        kept.lost = vec![day(DAY_SECS, false), day(7.0 * DAY_SECS, true), day(DAY_SECS, false)];
        assert_eq!(kept.loss_bytes_per_sec(), 3.0);
        assert_eq!((kept.update_days_bytes_per_sec(), kept.other_days_bytes_per_sec()), (7.0, 1.0));
        kept.lost.remove(1);
        assert_eq!(kept.update_days_bytes_per_sec(), 0.0);
    }

    #[test]
    fn a_target_is_kept_with_the_least_space_avoided() {
        let day_bytes = f64::from(BLOCK_BYTES) / DAY_SECS;
        let kept = simulated(&trace(30), Choice::Target(2.0 * day_bytes));
        assert!((kept.usable - 0.9).abs() < 1e-9);
        assert!(kept.loss_bytes_per_sec() <= 2.0 * day_bytes);
        assert_eq!(simulated(&trace(30), Choice::Target(1e9)).usable, 1.0);
    }

    #[test]
    fn the_coldest_blocks_come_first() {
        let counts = trace(2).counts();
        assert_eq!(counts.len() as u64, 10 * CHUNK_BLOCKS);
        assert_eq!(counts[counts.len() - 3..], [0, 2, 200]);
        assert_eq!(coldest(&counts, counts.len() - 2, 1.0), 0.0);
        assert_eq!(coldest(&counts, counts.len() - 1, 2.0), f64::from(BLOCK_BYTES));
    }
}
