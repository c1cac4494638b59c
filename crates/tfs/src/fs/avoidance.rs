//! Choosing the chunks that transparent data keeps away from (§3.3): the arithmetic is in
//! [`crate::avoid`]; here it is fed with the histograms of the groups' summaries, and its choice
//! put there. Data in a chunk already stays until it is overwritten.

use atoll_env::Instant;
use atoll_vfs::Errno;

use super::{Core, Shared, Tfs, errno};
use crate::avoid::{aging, hottest, share_to_avoid};
use crate::ext2::Ext2Error;
use crate::records::summary::CHUNKS;

/// Groups whose summaries one step changes: each may lie in a block of its own.
const GROUPS_A_STEP: u32 = 16;

/// What is avoided, and why.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Avoidance {
    /// α: bytes a second that are allocated to ordinary files.
    pub rate_bytes_per_sec: f64,
    /// β: bytes a second of transparent data that may be overwritten.
    pub target_bytes_per_sec: f64,
    /// f: the share of the allocations that falls into avoided chunks.
    pub share: f64,
    /// Seconds that α is the mean of.
    pub observed_secs: f64,
    /// Chunks avoided.
    pub avoided_chunks: u64,
    /// Chunks in all.
    pub chunks: u64,
}

impl Core {
    /// Adds the time since this was asked last to what the histograms cover.
    pub(super) fn note_time(&mut self, now: Instant) {
        let passed = now.since(self.chosen_at).as_secs_f64();
        self.chosen_at = now;
        if let Some((records, _)) = self.ext2.records_and_meta() {
            records.header_mut().observed_secs += passed;
        }
    }

    /// The histograms of all groups.
    fn histogram(&mut self) -> Result<Vec<f32>, Ext2Error> {
        let groups = self.ext2.superblock().groups();
        let mut histogram = Vec::with_capacity(groups as usize * CHUNKS);
        let Some((records, meta)) = self.ext2.records_and_meta() else { return Ok(histogram) };
        for group in 0..groups {
            histogram.extend(records.summary(meta, group)?.histogram);
        }
        Ok(histogram)
    }
}

impl Shared {
    /// What would be avoided now, and for each chunk whether it is in the choice.
    fn choice(&self) -> Result<(Avoidance, Vec<bool>), Errno> {
        let mut core = self.core();
        core.note_time(self.env.now());
        let header = core.ext2.records().ok_or(Errno::EIO)?.header();
        let (observed_secs, target) = (header.observed_secs, header.target_loss_bytes_per_sec);
        let histogram = core.histogram().map_err(|error| errno(&error))?;
        let blocks: f64 = histogram.iter().map(|count| f64::from(*count)).sum();
        // The first second is a second.
        let rate = blocks * f64::from(self.block_bytes) / observed_secs.max(1.0);
        let share = share_to_avoid(target, rate);
        let avoided = hottest(&histogram, share);
        let avoidance = Avoidance {
            rate_bytes_per_sec: rate,
            target_bytes_per_sec: target,
            share,
            observed_secs,
            avoided_chunks: avoided.iter().filter(|avoided| **avoided).count() as u64,
            chunks: histogram.len() as u64,
        };
        Ok((avoidance, avoided))
    }

    /// Chooses anew, and lets the past count less when it is long.
    pub(super) fn choose_avoided(&self) -> Result<Avoidance, Errno> {
        let (avoidance, avoided) = self.choice()?;
        let factor = aging(avoidance.observed_secs);
        let groups = (avoided.len() / CHUNKS) as u32;
        for first in (0..groups).step_by(GROUPS_A_STEP as usize) {
            let _handle = self.join_transaction(GROUPS_A_STEP as usize)?;
            let mut core = self.core();
            let Some((records, meta)) = core.ext2.records_and_meta() else { break };
            for group in first..groups.min(first + GROUPS_A_STEP) {
                let chunks = &avoided[group as usize * CHUNKS..][..CHUNKS];
                let bits = (0..CHUNKS).fold(0, |bits, i| bits | u8::from(chunks[i]) << i);
                let changed = records.summary(meta, group).and_then(|summary| {
                    let ages = factor < 1.0 && summary.histogram != [0.0; CHUNKS];
                    if summary.avoided == bits && !ages {
                        return Ok(());
                    }
                    records.change_summary(meta, group, |summary| {
                        summary.avoided = bits;
                        summary.histogram.iter_mut().for_each(|count| *count *= factor as f32);
                    })
                });
                changed.map_err(|error| self.broken(&error))?;
            }
        }
        let now_unix_secs = self.env.unix_ms() / 1000;
        let mut core = self.core();
        if let Some((records, _)) = core.ext2.records_and_meta() {
            let header = records.header_mut();
            header.observed_secs *= factor;
            header.chosen_unix_secs = now_unix_secs;
        }
        self.write_header(&mut core).map_err(|error| self.fail(&error))?;
        Ok(avoidance)
    }
}

impl Tfs {
    /// Chooses the chunks to avoid anew, as the file system does by itself from time to time.
    ///
    /// # Errors
    /// `EROFS`, `EIO`.
    pub fn choose_avoided(&self) -> Result<Avoidance, Errno> {
        self.shared.choose_avoided()
    }

    /// What would be chosen now.
    ///
    /// # Errors
    /// `EIO`.
    pub fn avoidance(&self) -> Result<Avoidance, Errno> {
        self.shared.choice().map(|(avoidance, _)| avoidance)
    }

    /// Sets the target loss rate β, bytes a second; it counts from the next choice on.
    ///
    /// # Errors
    /// `EINVAL` for a rate that is none, `EROFS`, `EIO`.
    pub fn set_target_loss(&self, bytes_per_sec: f64) -> Result<(), Errno> {
        if !bytes_per_sec.is_finite() || bytes_per_sec < 0.0 {
            return Err(Errno::EINVAL);
        }
        let _handle = self.shared.join_transaction(0)?;
        let mut core = self.shared.core();
        let (records, _) = core.ext2.records_and_meta().ok_or(Errno::EIO)?;
        records.header_mut().target_loss_bytes_per_sec = bytes_per_sec;
        self.shared.write_header(&mut core).map_err(|error| self.shared.fail(&error))
    }
}
