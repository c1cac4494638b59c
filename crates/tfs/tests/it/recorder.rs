//! Crashes at any moment of one recorded run: what the device was told is kept, and the disk
//! as it may stand after each operation is made from it, without running anything again.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};

use atoll_tfs::device::Device;

use crate::dice::Dice;

/// What survives power loss as a whole or not at all.
pub(crate) const SECTOR: usize = 512;

/// What a device was told.
#[derive(Clone, Debug)]
pub(crate) enum Operation {
    Write { offset: usize, bytes: Vec<u8> },
    Sync,
}

/// A device in memory that keeps what it is told.
#[derive(Clone, Debug)]
pub(crate) struct Recorder {
    state: Arc<Mutex<(Vec<u8>, Vec<Operation>)>>,
}

impl Recorder {
    pub(crate) fn of(image: Vec<u8>) -> Recorder {
        Recorder { state: Arc::new(Mutex::new((image, Vec::new()))) }
    }

    pub(crate) fn count(&self) -> usize {
        self.state.lock().unwrap().1.len()
    }

    pub(crate) fn operations(&self) -> Vec<Operation> {
        self.state.lock().unwrap().1.clone()
    }
}

impl Device for Recorder {
    fn len_bytes(&self) -> u64 {
        self.state.lock().unwrap().0.len() as u64
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let at = offset as usize;
        buffer.copy_from_slice(&self.state.lock().unwrap().0[at..at + buffer.len()]);
        Ok(())
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        let at = offset as usize;
        state.0[at..at + data.len()].copy_from_slice(data);
        state.1.push(Operation::Write { offset: at, bytes: data.to_vec() });
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.state.lock().unwrap().1.push(Operation::Sync);
        Ok(())
    }
}

/// A disk on which a recorded run is played back, operation by operation.
#[derive(Debug)]
pub(crate) struct Playback {
    durable: Arc<Vec<u8>>,
    current: Vec<u8>,
    /// Sectors that were written and not synced: all that they held since, oldest first.
    unsynced: BTreeMap<usize, Vec<[u8; SECTOR]>>,
}

fn sector_of(bytes: &[u8], sector: usize) -> [u8; SECTOR] {
    bytes[sector * SECTOR..][..SECTOR].try_into().unwrap()
}

impl Playback {
    pub(crate) fn of(image: Vec<u8>) -> Playback {
        Playback { current: image.clone(), durable: Arc::new(image), unsynced: BTreeMap::new() }
    }

    pub(crate) fn play(&mut self, operation: &Operation) {
        match operation {
            Operation::Write { offset, bytes } => {
                self.current[*offset..offset + bytes.len()].copy_from_slice(bytes);
                for sector in offset / SECTOR..(offset + bytes.len()).div_ceil(SECTOR) {
                    let now = sector_of(&self.current, sector);
                    self.unsynced.entry(sector).or_default().push(now);
                }
            }
            Operation::Sync => {
                let durable = Arc::make_mut(&mut self.durable);
                for (sector, versions) in std::mem::take(&mut self.unsynced) {
                    let newest = versions.last().unwrap();
                    durable[sector * SECTOR..][..SECTOR].copy_from_slice(newest);
                }
            }
        }
    }

    /// The disk after a crash now: of what was not synced any part survives, in any order.
    pub(crate) fn crashed(&self, dice: &mut Dice) -> Remains {
        // All, none, most, few, or any version of each.
        let (mode, odds) = (dice.below(6), 2 + dice.below(30));
        let mut changed = BTreeMap::new();
        for (sector, versions) in &self.unsynced {
            let newest = Some(versions.len() - 1);
            let survivor = match mode {
                0 => newest,
                1 => None,
                2 => newest.filter(|_| !dice.one_in(odds)),
                3 => newest.filter(|_| dice.one_in(odds)),
                _ => (dice.below(versions.len() as u64 + 1) as usize).checked_sub(1),
            };
            if let Some(survivor) = survivor {
                changed.insert(*sector, versions[survivor]);
            }
        }
        Remains { durable: self.durable.clone(), changed: Mutex::new(changed) }
    }
}

/// A disk after a crash, to be used again.
#[derive(Debug)]
pub(crate) struct Remains {
    durable: Arc<Vec<u8>>,
    changed: Mutex<BTreeMap<usize, [u8; SECTOR]>>,
}

impl Remains {
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.durable.to_vec();
        for (sector, held) in &*self.changed.lock().unwrap() {
            bytes[sector * SECTOR..][..SECTOR].copy_from_slice(held);
        }
        bytes
    }
}

impl Device for Remains {
    fn len_bytes(&self) -> u64 {
        self.durable.len() as u64
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let (at, end) = (offset as usize, offset as usize + buffer.len());
        buffer.copy_from_slice(&self.durable[at..end]);
        let changed = self.changed.lock().unwrap();
        for (sector, held) in changed.range(at / SECTOR..end.div_ceil(SECTOR)) {
            let (from, to) = ((sector * SECTOR).max(at), ((sector + 1) * SECTOR).min(end));
            buffer[from - at..to - at]
                .copy_from_slice(&held[from - sector * SECTOR..to - sector * SECTOR]);
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let (at, end) = (offset as usize, offset as usize + data.len());
        let mut changed = self.changed.lock().unwrap();
        for sector in at / SECTOR..end.div_ceil(SECTOR) {
            let held = changed.entry(sector).or_insert_with(|| sector_of(&self.durable, sector));
            let (from, to) = ((sector * SECTOR).max(at), ((sector + 1) * SECTOR).min(end));
            held[from - sector * SECTOR..to - sector * SECTOR]
                .copy_from_slice(&data[from - at..to - at]);
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}
