//! A device in memory that loses power and fails on purpose, the same way for the same
//! seed.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use super::{Device, check_range};

/// What survives power loss as a whole or not at all.
const SECTOR_BYTES: usize = 512;

/// A device in memory. Clones are handles to the same one.
///
/// Writes that were not synced live apart from what is durable: when the power goes, each
/// of their sectors survives or not by itself, and of several writes of a sector any may
/// be the one that survives.
#[derive(Clone, Debug)]
pub struct FaultyDevice {
    state: Arc<Mutex<State>>,
    len_bytes: u64,
}

#[derive(Debug)]
struct State {
    durable: Vec<u8>,
    /// Sectors that were written and not synced, oldest version first.
    unsynced: BTreeMap<usize, Vec<[u8; SECTOR_BYTES]>>,
    powered: bool,
    random: u64,
    /// Calls of `write_at` and `sync` so far.
    operations: u64,
    power_fails_at: Option<u64>,
    reads_fail: bool,
    writes_fail: bool,
}

impl State {
    fn random(&mut self) -> u64 {
        // SplitMix64 (Steele, Lea, Flood 2014).
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn current(&self, sector: usize) -> [u8; SECTOR_BYTES] {
        if let Some(versions) = self.unsynced.get(&sector) {
            return *versions.last().expect("a sector is listed with its first version");
        }
        let start = sector * SECTOR_BYTES;
        self.durable[start..start + SECTOR_BYTES].try_into().expect("of a sector's length")
    }

    /// Counts an operation that changes something; false when the power is off, or goes
    /// off at this one.
    fn operate(&mut self) -> io::Result<()> {
        if self.powered && self.power_fails_at == Some(self.operations) {
            self.powered = false;
        }
        self.operations += 1;
        if self.powered { Ok(()) } else { Err(io::Error::other("the power is off")) }
    }
}

impl FaultyDevice {
    /// A device of zeros.
    ///
    /// # Panics
    /// If `len_bytes` is not a multiple of [`SECTOR_BYTES`].
    pub fn new(len_bytes: usize, seed: u64) -> FaultyDevice {
        FaultyDevice::holding(vec![0; len_bytes], seed)
    }

    /// A device that durably holds `bytes`.
    ///
    /// # Panics
    /// If their length is not a multiple of [`SECTOR_BYTES`].
    pub fn holding(bytes: Vec<u8>, seed: u64) -> FaultyDevice {
        assert_eq!(bytes.len() % SECTOR_BYTES, 0, "whole sectors");
        let len_bytes = bytes.len() as u64;
        let state = State {
            durable: bytes,
            unsynced: BTreeMap::new(),
            powered: true,
            random: seed,
            operations: 0,
            power_fails_at: None,
            reads_fail: false,
            writes_fail: false,
        };
        FaultyDevice { state: Arc::new(Mutex::new(state)), len_bytes }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// Writes and syncs asked for so far.
    pub fn operations(&self) -> u64 {
        self.state().operations
    }

    /// Cuts the power at operation number `at` (that one no longer happens).
    pub fn cut_power_at(&self, at: u64) {
        self.state().power_fails_at = Some(at);
    }

    /// Takes the power away, lets a random part of what was not synced survive, and gives
    /// the power back.
    pub fn power_cycle(&self) {
        let mut state = self.state();
        for (sector, versions) in std::mem::take(&mut state.unsynced) {
            let choice = state.random() as usize % (versions.len() + 1);
            if let Some(survivor) = versions.get(choice) {
                let start = sector * SECTOR_BYTES;
                state.durable[start..start + SECTOR_BYTES].copy_from_slice(survivor);
            }
        }
        state.powered = true;
        state.power_fails_at = None;
    }

    /// Makes reads fail, or no longer.
    pub fn fail_reads(&self, fail: bool) {
        self.state().reads_fail = fail;
    }

    /// Makes writes and syncs fail, or no longer.
    pub fn fail_writes(&self, fail: bool) {
        self.state().writes_fail = fail;
    }

    /// What a read of everything would give now.
    pub fn bytes(&self) -> Vec<u8> {
        let state = self.state();
        let mut bytes = state.durable.clone();
        for (sector, versions) in &state.unsynced {
            let newest = versions.last().expect("a sector is listed with its first version");
            bytes[sector * SECTOR_BYTES..][..SECTOR_BYTES].copy_from_slice(newest);
        }
        bytes
    }
}

impl Device for FaultyDevice {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        check_range(self.len_bytes, offset, buffer.len())?;
        let state = self.state();
        if !state.powered || state.reads_fail {
            return Err(io::Error::other("the device fails reads"));
        }
        let mut at = usize::try_from(offset).expect("within a device in memory");
        let mut rest = buffer;
        while !rest.is_empty() {
            let within = at % SECTOR_BYTES;
            let len = rest.len().min(SECTOR_BYTES - within);
            let (part, later) = rest.split_at_mut(len);
            part.copy_from_slice(&state.current(at / SECTOR_BYTES)[within..within + len]);
            rest = later;
            at += len;
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        check_range(self.len_bytes, offset, data.len())?;
        let mut state = self.state();
        state.operate()?;
        if state.writes_fail {
            return Err(io::Error::other("the device fails writes"));
        }
        let mut at = usize::try_from(offset).expect("within a device in memory");
        let mut rest = data;
        while !rest.is_empty() {
            let within = at % SECTOR_BYTES;
            let (part, later) = rest.split_at(rest.len().min(SECTOR_BYTES - within));
            let mut sector = state.current(at / SECTOR_BYTES);
            sector[within..within + part.len()].copy_from_slice(part);
            state.unsynced.entry(at / SECTOR_BYTES).or_default().push(sector);
            rest = later;
            at += part.len();
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let mut state = self.state();
        state.operate()?;
        if state.writes_fail {
            return Err(io::Error::other("the device fails writes"));
        }
        for (sector, versions) in std::mem::take(&mut state.unsynced) {
            let newest = versions.last().expect("a sector is listed with its first version");
            state.durable[sector * SECTOR_BYTES..][..SECTOR_BYTES].copy_from_slice(newest);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(device: &FaultyDevice, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        device.read_at(offset, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn what_was_synced_survives_and_sectors_survive_whole() {
        let mut outcomes = std::collections::BTreeSet::new();
        for seed in 0..64 {
            let device = FaultyDevice::new(4 * SECTOR_BYTES, seed);
            device.write_at(0, &[1; 3 * SECTOR_BYTES]).unwrap();
            device.sync().unwrap();
            device.write_at(100, &[2; SECTOR_BYTES]).unwrap();
            device.write_at(100, &[3; SECTOR_BYTES]).unwrap();
            assert_eq!(read(&device, 99, 2), [1, 3]);
            device.power_cycle();
            let (first, second) = (read(&device, 100, 1)[0], read(&device, 600, 1)[0]);
            assert_eq!(read(&device, 511, 1)[0], first, "a sector survives whole");
            assert_eq!(read(&device, 3 * SECTOR_BYTES as u64 - 1, 1)[0], 1);
            outcomes.insert((first, second));
        }
        assert_eq!(outcomes.len(), 9, "each of three versions of each of two sectors");
    }

    #[test]
    fn the_power_goes_at_the_operation_asked_for() {
        let device = FaultyDevice::new(SECTOR_BYTES, 1);
        device.cut_power_at(1);
        device.write_at(0, &[1]).unwrap();
        assert!(device.sync().is_err());
        assert!(device.read_at(0, &mut [0]).is_err());
        device.power_cycle();
        device.write_at(0, &[5]).unwrap();
        device.sync().unwrap();
        assert_eq!(read(&device, 0, 1), [5]);
        assert_eq!(device.operations(), 4);
    }
}
