//! A disk of 2004 as a model: how long it would take, not a clock.
//!
//! The TFS paper's machines had "a 160GB SATA 7200RPM disk with 8MB of cache" (§5.2). The
//! model: a request that begins where the last one ended costs its transfer alone; one a
//! little further on, the transfer of what lies between, for that passes under the head; any
//! other a seek, half a turn and its transfer. A seek takes `1 ms + 14.06 ms · √x` over the
//! share `x` of the disk, which is 8.5 ms on average between random places, as such disks
//! had; they read and wrote about 55 MB/s. The disk is as large as the image: a small image
//! has the seeks of a whole disk.
//!
//! Writes wait in memory, as in a kernel's page cache, until there are 8 MiB of them or a sync
//! comes, and are then written upwards from where the head is, and around. Data read or
//! written lately is in memory, 64 MiB of it: reading it again costs nothing.
//!
//! Blocks of zeros are not kept, so that a large image of files of zeros needs little memory.
//!
//! It does not model the processor, the bus, queues of the disk or zones of its surface.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use atoll_tfs::device::Device;

/// What is kept and remembered in units of this size.
const PAGE_BYTES: u64 = 4096;
static ZEROS: [u8; PAGE_BYTES as usize] = [0; PAGE_BYTES as usize];
/// Half a turn at 7,200 a minute.
const HALF_TURN_SECS: f64 = 60.0 / 7200.0 / 2.0;
const LEAST_SEEK_SECS: f64 = 0.001;
/// So that a seek between random places takes 8.5 ms: the mean of √x there is 8/15.
const SEEK_SECS: f64 = (0.0085 - LEAST_SEEK_SECS) * 15.0 / 8.0;
const BYTES_PER_SEC: f64 = 55e6;
/// What lies between is let pass under the head up to so many bytes.
const SKIP_BYTES: u64 = 256 * 1024;
/// Writes that wait.
const WAITING_PAGES: usize = (8 << 20) / PAGE_BYTES as usize;
/// Pages in memory.
const CACHED_PAGES: usize = (64 << 20) / PAGE_BYTES as usize;

/// See the module. Clones are the same disk.
#[derive(Clone, Debug)]
pub(crate) struct ModelDisk {
    state: Arc<Mutex<State>>,
    len_bytes: u64,
}

#[derive(Clone, Debug, Default)]
struct State {
    /// Pages that are not all zeros.
    pages: BTreeMap<u64, Box<[u8]>>,
    /// Pages that wait to be written.
    waiting: BTreeSet<u64>,
    memory: Memory,
    /// Where the head is, bytes.
    head: u64,
    busy_secs: f64,
}

/// Which pages are in memory: the last ones used, roughly.
#[derive(Clone, Debug, Default)]
struct Memory {
    /// How often each stands in the queue.
    known: BTreeMap<u64, u32>,
    queue: VecDeque<u64>,
}

impl Memory {
    fn holds(&self, page: u64) -> bool {
        self.known.contains_key(&page)
    }

    fn note(&mut self, page: u64) {
        *self.known.entry(page).or_default() += 1;
        self.queue.push_back(page);
        while self.known.len() > CACHED_PAGES || self.queue.len() > 4 * CACHED_PAGES {
            let oldest = self.queue.pop_front().expect("what is known is in the queue");
            if let Some(times) = self.known.get_mut(&oldest) {
                *times -= 1;
                if *times == 0 {
                    self.known.remove(&oldest);
                }
            }
        }
    }
}

impl State {
    /// Moves the head to `from` and past `len` bytes.
    fn work(&mut self, from: u64, len: u64, disk_bytes: u64) {
        let ahead = from.checked_sub(self.head).filter(|ahead| *ahead <= SKIP_BYTES);
        self.busy_secs += match ahead {
            Some(ahead) => ahead as f64 / BYTES_PER_SEC,
            None => {
                let share = from.abs_diff(self.head) as f64 / disk_bytes as f64;
                LEAST_SEEK_SECS + SEEK_SECS * share.sqrt() + HALF_TURN_SECS
            }
        };
        self.busy_secs += len as f64 / BYTES_PER_SEC;
        self.head = from + len;
    }

    /// Writes what waits: upwards from the head, then from the beginning.
    fn write_waiting(&mut self, disk_bytes: u64) {
        let waiting = std::mem::take(&mut self.waiting);
        let here = self.head / PAGE_BYTES;
        let (above, below) = (waiting.range(here..), waiting.range(..here));
        let order: Vec<u64> = above.chain(below).copied().collect();
        for page in order {
            self.work(page * PAGE_BYTES, PAGE_BYTES, disk_bytes);
        }
    }
}

fn pages(offset: u64, len: usize) -> std::ops::Range<u64> {
    offset / PAGE_BYTES..(offset + len as u64).div_ceil(PAGE_BYTES)
}

/// The part of a page that `offset..offset + len` covers: in the page, and in the buffer.
fn overlap(page: u64, offset: u64, len: usize) -> (std::ops::Range<usize>, std::ops::Range<usize>) {
    let start = (page * PAGE_BYTES).max(offset);
    let end = ((page + 1) * PAGE_BYTES).min(offset + len as u64);
    let within = (start - page * PAGE_BYTES) as usize..(end - page * PAGE_BYTES) as usize;
    (within, (start - offset) as usize..(end - offset) as usize)
}

impl ModelDisk {
    /// A disk of so many bytes, all zero.
    pub(super) fn new(len_bytes: u64) -> ModelDisk {
        ModelDisk { state: Arc::default(), len_bytes }
    }

    /// Another disk with the same content, nothing of it in memory, and no time passed.
    pub(super) fn copied(&self) -> ModelDisk {
        let pages = self.state().pages.clone();
        let state = State { pages, ..State::default() };
        ModelDisk { state: Arc::new(Mutex::new(state)), len_bytes: self.len_bytes }
    }

    /// How long the disk has worked, seconds.
    pub(super) fn busy_secs(&self) -> f64 {
        self.state().busy_secs
    }

    /// Forgets what is in memory, as a restart does.
    pub(super) fn forget(&self) {
        self.state().memory = Memory::default();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }

    fn check(&self, offset: u64, len: usize) -> io::Result<()> {
        match offset.checked_add(len as u64) {
            Some(end) if end <= self.len_bytes => Ok(()),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

impl Device for ModelDisk {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.check(offset, buffer.len())?;
        let mut state = self.state();
        for page in pages(offset, buffer.len()) {
            let (within, there) = overlap(page, offset, buffer.len());
            match state.pages.get(&page) {
                Some(bytes) => buffer[there].copy_from_slice(&bytes[within]),
                None => buffer[there].fill(0),
            }
            if !state.memory.holds(page) {
                state.work(page * PAGE_BYTES, PAGE_BYTES, self.len_bytes);
            }
            state.memory.note(page);
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.check(offset, data.len())?;
        let mut state = self.state();
        for page in pages(offset, data.len()) {
            let (within, there) = overlap(page, offset, data.len());
            let data = &data[there];
            let zeros = *data == ZEROS[..data.len()];
            if zeros && within.len() == PAGE_BYTES as usize {
                state.pages.remove(&page);
            } else if !zeros || state.pages.contains_key(&page) {
                let blank = || vec![0; PAGE_BYTES as usize].into_boxed_slice();
                state.pages.entry(page).or_insert_with(blank)[within].copy_from_slice(data);
            }
            state.memory.note(page);
            state.waiting.insert(page);
        }
        if state.waiting.len() >= WAITING_PAGES {
            state.write_waiting(self.len_bytes);
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.state().write_waiting(self.len_bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: u64 = 1 << 30;

    fn read(disk: &ModelDisk, offset: u64, len: usize) -> (Vec<u8>, f64) {
        let before = disk.busy_secs();
        let mut buffer = vec![9; len];
        disk.read_at(offset, &mut buffer).expect("in range");
        (buffer, disk.busy_secs() - before)
    }

    #[test]
    fn it_reads_what_was_written_and_zeros_elsewhere() {
        let disk = ModelDisk::new(DISK);
        disk.write_at(4090, b"across two pages").expect("in range");
        assert_eq!(read(&disk, 4090, 16).0, b"across two pages");
        assert_eq!(read(&disk, 4080, 10).0, [0; 10]);
        disk.write_at(4090, &[0; 16]).expect("in range");
        assert_eq!(read(&disk, 4090, 16).0, [0; 16]);
        assert!(disk.write_at(DISK - 1, b"ab").is_err());
        assert!(disk.read_at(u64::MAX, &mut [0]).is_err());
    }

    #[test]
    fn a_row_is_cheaper_than_the_same_scattered() {
        let disk = ModelDisk::new(DISK);
        let row: f64 = (0..100).map(|n| read(&disk, 8192 + n * 4096, 4096).1).sum();
        let scattered: f64 =
            (0..100).map(|n| read(&disk, (n * 7919 % 251) * 4_194_304, 4096).1).sum();
        assert!(scattered > 20.0 * row, "{scattered} against {row}");
        // Seek, half a turn, transfer: what such a disk did to a random page.
        assert!((0.010..0.015).contains(&(scattered / 100.0)), "{scattered}");
        assert_eq!(read(&disk, 8192, 4096).1, 0.0, "it is in memory");
        disk.forget();
        assert!(read(&disk, 8192, 4096).1 > 0.0);
    }

    #[test]
    fn writes_wait_and_are_sorted() {
        let disk = ModelDisk::new(DISK);
        for n in (0..100).rev() {
            disk.write_at(n * 4096, &[1; 4096]).expect("in range");
        }
        assert_eq!(disk.busy_secs(), 0.0);
        disk.sync().expect("it never fails");
        let transfer = 100.0 * 4096.0 / BYTES_PER_SEC;
        assert!((disk.busy_secs() - transfer).abs() < 1e-9, "one row from the head on");
        assert_eq!(disk.copied().busy_secs(), 0.0);
        assert_eq!(read(&disk.copied(), 99 * 4096, 4096).0, [1; 4096]);
    }

    #[test]
    fn memory_is_bounded() {
        let mut memory = Memory::default();
        (0..3 * CACHED_PAGES as u64).for_each(|page| memory.note(page));
        assert_eq!(memory.known.len(), CACHED_PAGES);
        assert!(!memory.holds(0) && memory.holds(3 * CACHED_PAGES as u64 - 1));
        (0..9 * CACHED_PAGES as u64).for_each(|_| memory.note(7));
        assert!(memory.queue.len() <= 4 * CACHED_PAGES && memory.holds(7));
    }
}
