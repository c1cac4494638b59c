//! One run, one number: a hash over every event, and the last events in words.

use std::collections::VecDeque;
use std::fmt;

use crate::HostId;

/// What happened.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(u8)]
pub enum EventKind {
    /// A request was handed to a host's service.
    Request = 1,
    /// A reply reached its caller.
    Reply,
    /// A caller learned that no host is there.
    Reset,
    /// A callee learned that its reply is not wanted any more.
    Cancel,
    /// A message was lost: by chance, on a cut link, or with its sender.
    Lost,
    /// A call's deadline passed.
    TimedOut,
    /// A sleep ended.
    Timer,
    /// A host crashed.
    Crash,
    /// A host came back.
    Restart,
    /// A link was cut or the network healed.
    Cut,
}

/// An event of the run, as [`crate::Sim::trace`] keeps the last ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TraceEvent {
    /// Virtual time, nanoseconds.
    pub at_ns: u64,
    /// What happened.
    pub kind: EventKind,
    /// The host whose message or timer it was.
    pub from: HostId,
    /// Where it went.
    pub to: HostId,
    /// The call's method; 0 without a call.
    pub method: u16,
    /// Bytes of header and parts.
    pub len_bytes: u32,
}

impl fmt::Display for TraceEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.at_ns as f64 / 1e9;
        write!(f, "{seconds:.6}s {:?} {} -> {}", self.kind, self.from, self.to)?;
        write!(f, " method {:#06x}, {} bytes", self.method, self.len_bytes)
    }
}

#[derive(Debug)]
pub(crate) struct Trace {
    lanes: [u64; 2],
    event_count: u64,
    last: VecDeque<TraceEvent>,
    last_count: usize,
}

fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product as u64) ^ (product >> 64) as u64
}

impl Trace {
    pub(crate) fn new(seed: u64, last_count: usize) -> Trace {
        let lanes = [seed ^ 0xa076_1d64_78bd_642f, seed ^ 0xe703_7ed1_a0b4_28db];
        Trace { lanes, event_count: 0, last: VecDeque::new(), last_count }
    }

    pub(crate) fn record(&mut self, event: TraceEvent) {
        let ends = u64::from(event.from.0) << 32 | u64::from(event.to.0);
        let what =
            (event.kind as u64) << 56 | u64::from(event.method) << 32 | u64::from(event.len_bytes);
        let [a, b] = self.lanes;
        // wyhash's mixing step, twice with other constants. The additions keep a lane
        // from getting stuck at zero.
        self.lanes[0] = fold(a ^ event.at_ns ^ 0x8ebc_6af0_9c88_c6e3, ends ^ 0x5899_65cc_7537_4cc3)
            .wrapping_add(fold(what ^ 0x1d8e_4e27_c47d_124f, a | 1))
            .wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.lanes[1] = fold(b ^ what ^ 0xeb44_acca_b455_d165, event.at_ns ^ 0x2d35_8dcc_aa6c_78a5)
            .wrapping_add(fold(ends ^ 0x8bb8_4b93_962e_acc9, b | 1))
            .wrapping_add(0xd6e8_feb8_6659_fd93);
        self.event_count += 1;
        if self.last_count > 0 {
            if self.last.len() == self.last_count {
                self.last.pop_front();
            }
            self.last.push_back(event);
        }
    }

    pub(crate) fn hash(&self) -> u128 {
        u128::from(self.lanes[0]) << 64 | u128::from(self.lanes[1])
    }

    pub(crate) fn event_count(&self) -> u64 {
        self.event_count
    }

    pub(crate) fn last(&self) -> Vec<TraceEvent> {
        self.last.iter().copied().collect()
    }
}
