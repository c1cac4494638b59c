//! One direction of a connection, as its sender sees it: how much may be in flight.
//!
//! [`TcpModel`] says which kind of TCP. Slow start, congestion avoidance, HyStart and the
//! reduction after losses follow the RFCs named there; BBR follows Linux' first version:
//! starting up, draining, cycling, the round trip it looks for every ten seconds, and the
//! round of conservation after a loss. The rate of an application
//! that pauses is not used as an estimate of the path's bandwidth.
//!
//! Invariants: what is in flight is never more than what was sent; the window is at least
//! one segment and at most what the receiver allows. Time is passed in.

use crate::tcp::{Control, TcpModel};

/// A window is sent in about so many chunks...
const CHUNKS_PER_WINDOW: u64 = 32;
/// ... none of which is larger than this.
const MAX_CHUNK_SEGMENTS: u64 = 4;
/// HyStart is not used below this window, in segments (Linux).
const HYSTART_LOW_WINDOW: u64 = 16;
/// Acknowledgements closer than this belong to one train (Linux: 2 ms).
const HYSTART_TRAIN_GAP_NS: u64 = 2_000_000;
/// HyStart takes a queue for congestion when it delays by an eighth of the round trip,
/// but by no less and no more than this.
const HYSTART_DELAY_NS: std::ops::RangeInclusive<u64> = 4_000_000..=16_000_000;
/// What the retransmission timeout is beyond the round trip, at least (Linux).
const MIN_RTO_NS: u64 = 200_000_000;
/// CUBIC's constants (RFC 9438 §5).
const CUBIC_C: f64 = 0.4;
const CUBIC_BETA: f64 = 0.7;
/// BBR's gains (Linux): 2/ln 2 while starting, then the cycle's.
const BBR_HIGH_GAIN: f64 = 2.885;
const BBR_WINDOW_GAIN: f64 = 2.0;
const BBR_CYCLE: [f64; 8] = [1.25, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0];
/// BBR forgets bandwidths after so many round trips.
const BBR_BANDWIDTH_ROUNDS: u64 = 10;
/// BBR takes the pipe for full after so many rounds without a quarter more bandwidth.
const BBR_FULL_ROUNDS: u32 = 3;
/// BBR looks for the least round trip so often, for so long, with so many segments.
const BBR_MIN_RTT_NS: u64 = 10_000_000_000;
const BBR_PROBE_NS: u64 = 200_000_000;
const BBR_PROBE_SEGMENTS: f64 = 4.0;
/// BBR allows three bursts beyond its window; a guess at their size.
const BBR_BURST_SEGMENTS: f64 = 4.0;

/// One direction of a connection, as its sender sees it.
#[derive(Clone, Debug)]
pub(crate) struct Flow {
    window: f64,
    threshold: f64,
    flight: u64,
    /// Bytes ever sent and ever acknowledged (or lost).
    sent: u64,
    done: u64,
    /// Bytes ever acknowledged.
    delivered: u64,
    /// Until so much is delivered the rate of delivery is the application's (Linux:
    /// `app_limited`).
    limited_until: Option<u64>,
    /// The round ends when this much is done.
    round_end: u64,
    round_began_at: u64,
    round_count: u64,
    /// The greatest flight of this round and of the last: an application that sends
    /// little does not earn a greater window.
    round_flights: [u64; 2],
    last_sent_at: u64,
    last_acked_at: u64,
    train_since: u64,
    min_rtt_ns: u64,
    smoothed_rtt_ns: u64,
    /// No second reduction until this much is done.
    recover: u64,
    cubic_max: f64,
    cubic_epoch: Option<CubicEpoch>,
    bbr: Bbr,
}

/// A time of congestion avoidance without loss.
#[derive(Clone, Copy, Debug)]
struct CubicEpoch {
    since: u64,
    /// In segments.
    max: f64,
    k_secs: f64,
}

#[derive(Clone, Debug, Default)]
struct Bbr {
    /// Bytes a second, with the round in which each was seen.
    bandwidths: Vec<(u64, f64)>,
    /// Bytes a second at which it sends; 0 when nothing is known.
    pace: f64,
    /// When the next chunk may leave.
    next_at: u64,
    full_bandwidth: f64,
    stalled_rounds: u32,
    is_full: bool,
    is_recovering: bool,
    window_before: f64,
    /// What was sent when less than this was delivered is of the first round of recovery.
    conserves_until: u64,
    /// When the least round trip was seen, or looked for.
    min_rtt_at: u64,
    /// While it is looked for: the window before, and how long.
    probes_from: Option<f64>,
    probes_until: Option<u64>,
    /// What starting up left in the queue is gone.
    is_drained: bool,
    cycle: usize,
    cycle_since: u64,
}

impl Bbr {
    /// Linux guesses the bandwidth from the handshake's round trip.
    fn starting(model: &TcpModel, round_trip_ns: u64, now: u64) -> Bbr {
        let guess = model.initial_window_bytes() as f64 * 1e9 / round_trip_ns.max(1) as f64;
        Bbr { pace: BBR_HIGH_GAIN * guess, min_rtt_at: now, ..Bbr::default() }
    }

    fn bandwidth(&self) -> f64 {
        self.bandwidths.iter().map(|(_, bandwidth)| *bandwidth).fold(0.0, f64::max)
    }
}

/// What a chunk that is sent takes with it, to measure by when it is acknowledged.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark {
    bytes: u64,
    sent_at: u64,
    /// What had been delivered then, and when the last of it was.
    delivered: u64,
    delivered_at: u64,
    /// The application, not the network, kept more from being on its way.
    is_app_limited: bool,
}

impl Flow {
    pub(crate) fn new(model: &TcpModel, now: u64, round_trip_ns: u64) -> Flow {
        Flow {
            window: model.initial_window_bytes() as f64,
            threshold: f64::INFINITY,
            flight: 0,
            sent: 0,
            done: 0,
            delivered: 0,
            limited_until: None,
            round_end: 0,
            round_began_at: now,
            round_count: 0,
            round_flights: [0; 2],
            last_sent_at: now,
            last_acked_at: now,
            train_since: now,
            // The handshake has measured it.
            min_rtt_ns: round_trip_ns.max(1),
            smoothed_rtt_ns: round_trip_ns,
            recover: 0,
            cubic_max: 0.0,
            cubic_epoch: None,
            bbr: Bbr::starting(model, round_trip_ns, now),
        }
    }

    /// How many bytes may be sent now.
    pub(crate) fn room(&self) -> u64 {
        (self.window as u64).saturating_sub(self.flight)
    }

    /// Whether nothing is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.flight == 0
    }

    /// How many bytes are best sent at once: fine enough to follow the window, coarse
    /// enough to be cheap.
    pub(crate) fn chunk_bytes(&self, model: &TcpModel) -> u64 {
        let segment = u64::from(model.segment_bytes.max(1));
        let share = self.window as u64 / CHUNKS_PER_WINDOW / segment;
        share.clamp(1, MAX_CHUNK_SEGMENTS) * segment
    }

    /// When the sender's pace lets it send again.
    pub(crate) fn paced_until(&self, model: &TcpModel) -> u64 {
        if model.control == Control::Bbr { self.bbr.next_at } else { 0 }
    }

    /// The application sends after a pause, perhaps: an idle window decays.
    pub(crate) fn resume(&mut self, model: &TcpModel, now: u64) {
        // A sender that paces itself keeps what it knows (Linux: `cong_control`).
        if self.flight > 0 || !model.restarts_after_idle || model.control == Control::Bbr {
            return;
        }
        let timeout = self.smoothed_rtt_ns + MIN_RTO_NS;
        let initial = model.initial_window_bytes() as f64;
        let mut idle = now.saturating_sub(self.last_sent_at);
        if idle > timeout && self.window > initial {
            self.threshold = self.threshold.max(self.window * 0.75);
            while idle > timeout && self.window > initial {
                self.window /= 2.0;
                idle -= timeout;
            }
            self.window = self.window.max(initial);
            self.cubic_epoch = None;
        }
    }

    /// `has_more` says that only the window or the pace keeps more from being sent.
    pub(crate) fn on_sent(&mut self, bytes: u64, has_more: bool, now: u64) -> Mark {
        if self.flight == 0 {
            // Deliveries before a pause say nothing about the rate after it.
            self.last_acked_at = now;
            self.limited_until = Some(self.delivered);
        }
        let is_app_limited = self.limited_until.is_some();
        self.flight += bytes;
        if !has_more {
            self.limited_until = Some(self.delivered + self.flight);
        }
        self.sent += bytes;
        self.last_sent_at = now;
        self.round_flights[0] = self.round_flights[0].max(self.flight);
        if self.bbr.pace > 0.0 {
            let takes = (bytes as f64 * 1e9 / self.bbr.pace) as u64;
            self.bbr.next_at = self.bbr.next_at.max(now) + takes;
        }
        Mark {
            bytes,
            sent_at: now,
            delivered: self.delivered,
            delivered_at: self.last_acked_at,
            is_app_limited,
        }
    }

    pub(crate) fn on_acked(&mut self, model: &TcpModel, mark: &Mark, now: u64) {
        let segment = f64::from(model.segment_bytes);
        let rtt = now.saturating_sub(mark.sent_at).max(1);
        self.min_rtt_ns = self.min_rtt_ns.min(rtt);
        self.smoothed_rtt_ns = self.smoothed_rtt_ns - self.smoothed_rtt_ns / 8 + rtt / 8;
        self.take_off(mark.bytes);
        self.delivered += mark.bytes;
        if self.limited_until.is_some_and(|until| self.delivered > until) {
            self.limited_until = None;
        }
        let gap = now.saturating_sub(self.last_acked_at);
        self.last_acked_at = now;
        if gap > HYSTART_TRAIN_GAP_NS * mark.bytes.div_ceil(u64::from(model.segment_bytes)) {
            self.train_since = now;
        }
        let is_new_round = self.done >= self.round_end;
        if is_new_round {
            self.round_end = self.sent;
            self.round_count += 1;
            self.round_flights = [self.flight, self.round_flights[0]];
        }
        if model.control == Control::Bbr {
            self.bbr_acked(model, mark, now, is_new_round);
        } else if self.done > self.recover {
            let flown = self.round_flights[0].max(self.round_flights[1]) as f64;
            if self.window < self.threshold {
                if self.window < 2.0 * flown {
                    self.window += mark.bytes as f64 * (model.slow_start_growth - 1.0);
                }
                if model.control == Control::Cubic && self.hystart_ends(model, rtt, now) {
                    self.threshold = self.window;
                    self.cubic_epoch = None;
                }
            } else if self.window <= flown + segment {
                self.avoid(model, mark.bytes as f64, now);
            }
        }
        if is_new_round {
            self.round_began_at = now;
        }
        self.window = self.window.clamp(segment, (model.max_window_bytes as f64).max(segment));
    }

    fn take_off(&mut self, bytes: u64) {
        assert!(bytes <= self.flight, "{bytes} bytes are done and {} in flight", self.flight);
        self.flight -= bytes;
        self.done += bytes;
    }

    /// A train of acknowledgements half a round trip long, or a delay: the pipe is full.
    fn hystart_ends(&self, model: &TcpModel, rtt: u64, now: u64) -> bool {
        if self.window < (HYSTART_LOW_WINDOW * u64::from(model.segment_bytes)) as f64 {
            return false;
        }
        let began = self.train_since.max(self.round_began_at);
        let is_train = began == self.round_began_at && now - began > self.min_rtt_ns / 2;
        let (least, most) = HYSTART_DELAY_NS.into_inner();
        is_train || rtt > self.min_rtt_ns + (self.min_rtt_ns / 8).clamp(least, most)
    }

    /// Congestion avoidance.
    fn avoid(&mut self, model: &TcpModel, acked: f64, now: u64) {
        let segment = f64::from(model.segment_bytes);
        let reno = segment * acked / self.window;
        if model.control == Control::Reno {
            self.window += reno;
            return;
        }
        let epoch = *self.cubic_epoch.get_or_insert_with(|| {
            let max = self.cubic_max.max(self.window) / segment;
            let k_secs = ((max - self.window / segment).max(0.0) / CUBIC_C).cbrt();
            CubicEpoch { since: now, max, k_secs }
        });
        let secs = (now - epoch.since + self.min_rtt_ns) as f64 / 1e9;
        let target = (CUBIC_C * (secs - epoch.k_secs).powi(3) + epoch.max) * segment;
        let cubic = ((target - self.window) / self.window).clamp(0.0, 0.5) * acked;
        let friendly = 3.0 * (1.0 - CUBIC_BETA) / (1.0 + CUBIC_BETA) * reno;
        self.window += cubic.max(friendly);
    }

    fn bbr_acked(&mut self, model: &TcpModel, mark: &Mark, now: u64, is_new_round: bool) {
        let secs = (now.saturating_sub(mark.delivered_at)).max(1) as f64 / 1e9;
        let sample = (self.delivered - mark.delivered) as f64 / secs;
        let round = self.round_count;
        let bbr = &mut self.bbr;
        // An application that pauses proves nothing against what was seen before.
        if !mark.is_app_limited || sample >= bbr.bandwidth() {
            let counts = |(seen, larger): &(u64, f64)| {
                seen + BBR_BANDWIDTH_ROUNDS >= round && *larger > sample
            };
            bbr.bandwidths.retain(counts);
            bbr.bandwidths.push((round, sample));
        }
        let bandwidth = bbr.bandwidth();
        if is_new_round && !mark.is_app_limited && !bbr.is_full {
            if bandwidth >= bbr.full_bandwidth * 1.25 {
                (bbr.full_bandwidth, bbr.stalled_rounds) = (bandwidth, 0);
            } else {
                bbr.stalled_rounds += 1;
                bbr.is_full = bbr.stalled_rounds >= BBR_FULL_ROUNDS;
            }
        }
        let pipe = bandwidth * self.min_rtt_ns as f64 / 1e9;
        bbr.is_drained |= bbr.is_full && self.flight as f64 <= pipe;
        if bbr.is_drained && now.saturating_sub(bbr.cycle_since) > self.min_rtt_ns {
            bbr.cycle = (bbr.cycle + 1) % BBR_CYCLE.len();
            bbr.cycle_since = now;
        }
        let gain = match (bbr.is_full, bbr.is_drained) {
            (false, _) => BBR_HIGH_GAIN,
            (true, false) => 1.0 / BBR_HIGH_GAIN,
            (true, true) => BBR_CYCLE[bbr.cycle],
        };
        let pace = gain * bandwidth;
        if bbr.is_full || pace > bbr.pace {
            bbr.pace = pace;
        }
        if self.bbr_probes_round_trip(model, mark, now) {
            return;
        }
        let bbr = &mut self.bbr;
        if bbr.is_recovering && self.done >= self.recover {
            bbr.is_recovering = false;
            self.window = self.window.max(bbr.window_before);
        }
        if bbr.is_recovering && mark.delivered < bbr.conserves_until {
            self.window = self.window.max((self.flight + mark.bytes) as f64);
            return;
        }
        let slack = 3.0 * BBR_BURST_SEGMENTS * f64::from(model.segment_bytes);
        if bbr.is_full {
            let target = BBR_WINDOW_GAIN * pipe + slack;
            self.window = (self.window + mark.bytes as f64).min(target);
        } else if self.window < BBR_HIGH_GAIN * pipe + slack {
            self.window += mark.bytes as f64;
        }
    }

    /// Every ten seconds BBR all but stops, to see the round trip without its own queue.
    fn bbr_probes_round_trip(&mut self, model: &TcpModel, mark: &Mark, now: u64) -> bool {
        let least = BBR_PROBE_SEGMENTS * f64::from(model.segment_bytes);
        let bbr = &mut self.bbr;
        let Some(window_before) = bbr.probes_from else {
            let is_due = now.saturating_sub(bbr.min_rtt_at) > BBR_MIN_RTT_NS;
            if is_due {
                bbr.min_rtt_at = now;
            }
            // A pause has emptied the queue anyway.
            if is_due && !mark.is_app_limited {
                bbr.probes_from = Some(self.window);
                bbr.probes_until = None;
                self.window = least;
            }
            return bbr.probes_from.is_some();
        };
        if bbr.probes_until.is_none() && self.flight as f64 <= least {
            bbr.probes_until = Some(now + BBR_PROBE_NS.max(self.min_rtt_ns));
        }
        if bbr.probes_until.is_some_and(|until| now >= until) {
            bbr.probes_from = None;
            bbr.min_rtt_at = now;
            self.window = self.window.max(window_before);
            return false;
        }
        self.window = least;
        true
    }

    /// Bytes were lost, one round trip ago.
    pub(crate) fn on_lost(&mut self, model: &TcpModel, mark: &Mark, now: u64) {
        let was_recovering = self.done < self.recover;
        self.take_off(mark.bytes);
        if model.control == Control::Bbr {
            self.bbr_lost(model, mark, was_recovering);
            return;
        }
        if was_recovering {
            return;
        }
        let keep = if model.control == Control::Reno { 0.5 } else { CUBIC_BETA };
        let least = 2.0 * f64::from(model.segment_bytes);
        self.cubic_max = self.window;
        self.cubic_epoch = None;
        self.threshold = (self.window * keep).max(least);
        self.window = self.threshold;
        self.recover = self.sent;
        self.round_began_at = now;
    }

    /// For a round trip only as much is sent as arrives; afterwards it is as before.
    fn bbr_lost(&mut self, model: &TcpModel, mark: &Mark, was_recovering: bool) {
        let least = f64::from(model.segment_bytes);
        if was_recovering {
            self.window = (self.window - mark.bytes as f64).max(least);
            return;
        }
        self.bbr.is_recovering = true;
        self.bbr.window_before = self.window;
        self.bbr.conserves_until = self.delivered;
        self.window = (self.flight as f64).max(least);
        self.recover = self.sent;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn exchange(flow: &mut Flow, model: &TcpModel, bytes: u64, now: &mut u64, rtt_ns: u64) {
        let mut left = bytes;
        while left > 0 {
            flow.resume(model, *now);
            let sent = left.min(flow.room());
            let mark = flow.on_sent(sent, sent < left, *now);
            *now += rtt_ns;
            flow.on_acked(model, &mark, *now);
            left -= sent;
        }
    }

    #[test]
    fn an_idle_window_halves_with_each_timeout_down_to_the_initial_one() {
        let model = TcpModel { control: Control::Reno, ..TcpModel::today() };
        let mut now = 0;
        let mut flow = Flow::new(&model, 0, 100 * MS);
        exchange(&mut flow, &model, 1 << 20, &mut now, 100 * MS);
        let grown = flow.room();
        assert!(grown >= 40 * model.initial_window_bytes(), "{grown}");
        // The timeout is 300 ms; two of them have passed since the last byte was sent.
        flow.resume(&model, now - 100 * MS + 650 * MS);
        assert_eq!(flow.room(), grown / 4);
        flow.resume(&model, now + 60_000 * MS);
        assert_eq!(flow.room(), model.initial_window_bytes());
        let mut kept = Flow::new(&model, 0, 100 * MS);
        let keeps = TcpModel { restarts_after_idle: false, ..model };
        exchange(&mut kept, &keeps, 1 << 20, &mut now, 100 * MS);
        kept.resume(&keeps, now + 60_000 * MS);
        assert_eq!(kept.room(), grown);
    }

    #[test]
    fn short_messages_do_not_earn_a_greater_window() {
        let model = TcpModel::today();
        let mut flow = Flow::new(&model, 0, 10 * MS);
        let mut now = 0;
        for _ in 0..100 {
            exchange(&mut flow, &model, 500, &mut now, 10 * MS);
        }
        assert_eq!(flow.room(), model.initial_window_bytes());
    }

    #[test]
    fn a_round_trip_with_losses_costs_one_reduction() {
        for (control, keep) in [(Control::Reno, 0.5), (Control::Cubic, 0.7)] {
            let model = TcpModel { control, ..TcpModel::today() };
            let mut flow = Flow::new(&model, 0, 100 * MS);
            let mut now = 0;
            exchange(&mut flow, &model, 200_000, &mut now, 100 * MS);
            let before = flow.room() as f64;
            let marks: Vec<Mark> = (0..4).map(|_| flow.on_sent(5000, true, now)).collect();
            now += 100 * MS;
            flow.on_lost(&model, &marks[0], now);
            flow.on_lost(&model, &marks[1], now);
            marks[2..].iter().for_each(|mark| flow.on_acked(&model, mark, now));
            let after = flow.room() as f64;
            assert!((after / before - keep).abs() < 0.01, "{control:?}: {before} to {after}");
        }
    }

    /// Cardwell et al. §"Steady-state": it sends at the bottleneck's rate, whatever the
    /// queue would take.
    #[test]
    fn bbr_finds_the_rate_at_which_its_bytes_are_acknowledged() {
        let model = TcpModel { control: Control::Bbr, ..TcpModel::today() };
        let (rate, rtt_ns) = (10_000_000.0, 50 * MS);
        let mut flow = Flow::new(&model, 0, rtt_ns);
        let (mut now, mut link_free_at) = (0u64, 0u64);
        let mut flying: std::collections::VecDeque<(u64, Mark)> = Default::default();
        let mut acked_late = 0;
        while now < 5_000 * MS {
            let segment = u64::from(model.segment_bytes);
            if flow.room() >= segment && flow.paced_until(&model) <= now {
                let mark = flow.on_sent(segment, true, now);
                link_free_at = link_free_at.max(now) + (segment as f64 * 1e9 / rate) as u64;
                flying.push_back((link_free_at + rtt_ns, mark));
                continue;
            }
            let ack_at = flying.front().map_or(u64::MAX, |(at, _)| *at);
            let paced = if flow.room() >= segment { flow.paced_until(&model) } else { u64::MAX };
            now = ack_at.min(paced);
            if ack_at == now {
                let (_, mark) = flying.pop_front().expect("it was just seen");
                flow.on_acked(&model, &mark, now);
                acked_late += if now > 2_000 * MS { segment } else { 0 };
            }
        }
        let share = acked_late as f64 / 3.0 / rate;
        assert!((0.9..=1.01).contains(&share), "{share} of the link");
        let pipe = rate * 0.05;
        assert!(flow.flight as f64 <= 2.2 * pipe, "{} in flight, {pipe} fit", flow.flight);
    }
}
