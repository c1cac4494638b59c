//! TFS §2 and §5, Figures 1, 8, 9 and 10: an Andrew-style benchmark beside contributed files.
//!
//! "a disk is filled to 50% with ordinary file data. … After this, files are added to the
//! system to represent the contributed storage. We considered four cases: no contribution,
//! small contribution, large contribution, and TFS. … The small contribution is 5% of the file
//! system. … The large contribution is 35% of the file system. … With TFS, the disk is filled
//! completely with transparent data" (§5.2). The benchmark has six phases: mkdir, copy, stat,
//! read, compile, delete (§5.2.1). For Figure 9 contributed files are first deleted and made
//! anew 200 times, a twentieth of the target each time.
//!
//! Ext2 is Atoll's own with the contributed files as ordinary ones: what is compared is where
//! files lie, not two programs. Times are those of a modelled disk ([`crate::tfs::disk`]); each phase
//! ends with a sync, and begins with nothing in memory, as the paper's machines were restarted.
//! A processor's time is not in them: "compile" reads every source and writes an object of its
//! size. The disk is 1/80 of the paper's and the source tree 1/20.
//!
//! Figure 10 shows where the copied files' blocks lie.

mod bench;
mod views;

use std::collections::BTreeMap;

use crate::LabError;
use crate::experiment::{Context, Experiment, Group};
use crate::outcome::Outcome;
use bench::{BAD, LARGE, Prepared, SMALL, Sizes, System};
use views::Told;

pub(crate) const GROUP: Group = Group {
    experiments: &[
        Experiment {
            name: "tfs-fig1",
            title: "time to copy a source tree against the share contributed",
            source: "TFS §2, Figure 1",
            nodes: None,
        },
        Experiment {
            name: "tfs-fig8",
            title: "an Andrew-style benchmark beside contributed files",
            source: "TFS §5.2.1, Figure 8",
            nodes: None,
        },
        Experiment {
            name: "tfs-fig9",
            title: "the same benchmark on aged file systems",
            source: "TFS §5.2.1, Figure 9",
            nodes: None,
        },
        Experiment {
            name: "tfs-fig10",
            title: "where the blocks of copied files lie",
            source: "TFS §5.3, Figure 10",
            nodes: None,
        },
    ],
    run,
};

/// "After repeating this 200 times".
const AGED_TIMES: usize = 200;
/// Of the disk, hundredths: the points of Figure 1.
const SHARES: [u32; 10] = [0, 5, 10, 15, 20, 25, 30, 35, 40, 45];
fn run(context: &Context<'_>) -> Result<Vec<Outcome>, LabError> {
    let sizes = Sizes {
        disk_bytes: context.size(2 << 30, 512 << 20) as u64,
        source_files: context.size(1000, 200),
        aged_times: context.size(AGED_TIMES, 10),
        shares: if context.options.quick { vec![0, SMALL, 20, LARGE, BAD] } else { SHARES.into() },
    };
    let seeds = context.seeds(3, 1);
    let mut parts: Vec<(System, bool, u64)> = Vec::new();
    for seed in &seeds {
        for system in [System::Ext2(0), System::Ext2(SMALL), System::Ext2(LARGE), System::Tfs(None)]
        {
            parts.push((system, true, *seed));
        }
        parts.push((System::Tfs(None), false, *seed));
        for share in &sizes.shares {
            parts.push((System::Ext2(*share), false, *seed));
            if *share > 0 {
                parts.push((System::Tfs(Some(*share)), false, *seed));
            }
        }
    }
    let prepared: BTreeMap<u64, Prepared> = context
        .each(&seeds, |seed| Ok((*seed, Prepared::new(&sizes, *seed)?)))?
        .into_iter()
        .collect();
    let found = context.each(&parts, |(system, aged, seed)| {
        prepared[seed].measure(*system, aged.then_some(sizes.aged_times), *seed)
    })?;
    let setup = format!(
        "a disk of {} MiB (modelled, 7,200 rpm), half full; a source tree of {} files",
        sizes.disk_bytes >> 20,
        sizes.source_files
    );
    let told = Told { found: &found, seeds: &seeds, setup: &setup };
    Ok(vec![
        told.copying(&sizes.shares),
        told.phases(false, sizes.aged_times),
        told.phases(true, sizes.aged_times),
        told.layout(),
    ])
}
