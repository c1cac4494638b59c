//! TFS §3.3, Figures 4 and 5: where ordinary files are allocated, and what it costs to keep
//! away from there.
//!
//! Figure 4: "Cumulative histogram of two user machine's block allocations. 70% of the blocks on
//! machine 2's disk were never allocated during the test period, and 90% of the blocks were
//! allocated at a rate of 0.1kB/s or less."
//!
//! Figure 5: "The simulator processes the trace sequentially, and periodically picks a set of
//! chunks to avoid. Whenever the simulator sees an allocation to a chunk which is not being
//! avoided, it counts this as an overwrite. We ran this simulator with various fixed values of
//! f … and recorded the average amount of space contributed, and the rate of data being
//! overwritten."
//!
//! The paper's traces were never published: here two people ([`crate::tfs::activity`]) work on
//! Atoll's file system, whose allocator says where. The choice is the file system's own
//! ([`atoll_tfs::avoid`]), once an hour. Nothing is counted before the end of the first day:
//! until then it is not known where it is hot.
//!
//! In the paper's settings f is fixed and all of the past counts; as shipped f follows from a
//! target for the loss, and the past counts for two weeks.

mod trace;
mod views;

use atoll_tfs::records::header::DEFAULT_TARGET_LOSS_BYTES_PER_SEC;

use crate::LabError;
use crate::experiment::{Context, Experiment, Group};
use crate::outcome::Outcome;
use crate::tfs::capacity::{self, Given};
use trace::{Choice, Kept, MACHINES, recorded, simulated};
use views::{avoidance, histogram};

pub(crate) const GROUP: Group = Group {
    experiments: &[
        Experiment {
            name: "tfs-fig4",
            title: "where ordinary files are allocated, over the disk",
            source: "TFS §3.3, Figure 4",
            nodes: None,
        },
        Experiment {
            name: "tfs-fig5",
            title: "transparent data lost against usable space, avoiding hot spots",
            source: "TFS §3.3, Figure 5",
            nodes: None,
        },
        Experiment {
            name: "tfs-fig6",
            title: "storage against bandwidth, corporate network",
            source: "TFS §5.1, Figure 6",
            nodes: None,
        },
        Experiment {
            name: "tfs-fig7",
            title: "storage against bandwidth, Internet",
            source: "TFS §5.1, Figure 7",
            nodes: None,
        },
    ],
    run,
};

/// Fixed values of f: "the highest value for f we used in our test … was 0.99999".
const FIXED: [f64; 11] = [0.0, 0.3, 0.5, 0.7, 0.9, 0.95, 0.99, 0.999, 0.9999, 0.999_99, 1.0];
/// Targets for the loss, bytes a second.
const TARGETS: [f64; 7] = [10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0];

fn run(context: &Context<'_>) -> Result<Vec<Outcome>, LabError> {
    let disk_bytes = context.size(16 << 30, 1 << 30) as u64;
    let days = context.size(28, 3);
    let machines: Vec<usize> = (0..MACHINES.len()).collect();
    let seed = context.options.seed;
    let traces = context.each(&machines, |machine| recorded(*machine, disk_bytes, days, seed))?;
    let choices = FIXED.map(Choice::Share).into_iter().chain(TARGETS.map(Choice::Target));
    let kept: Vec<Kept> = choices
        .flat_map(|choice| traces.iter().map(move |trace| simulated(trace, choice)))
        .collect();
    let setup = format!("{} GiB, half full; {days} days", disk_bytes >> 30);
    let shipped = kept
        .iter()
        .find(|kept| {
            kept.machine == 1 && kept.choice == Choice::Target(DEFAULT_TARGET_LOSS_BYTES_PER_SEC)
        })
        .expect("the default is among the targets");
    // The disk is half full of ordinary data; what is avoided is taken from the free half, as
    // in the paper: 3 % avoided leave 47 %.
    let given = Given {
        share: (shipped.usable - 0.5).max(0.0),
        loss_bytes_per_sec: shipped.loss_bytes_per_sec(),
    };
    let mut outcomes = vec![histogram(&traces, &setup, seed), avoidance(&kept, &setup, seed)];
    outcomes.extend(capacity::outcomes(context, given)?);
    Ok(outcomes)
}
