//! How fast a TCP connection may send: its window, as plain data.
//!
//! CFS §7.1 compares downloads with "ordinary TCP", "one whole file per TCP connection",
//! and a message over a real transport pays the same: a handshake, then slow start. What
//! is modelled is the sender's window, after Jacobson ("Congestion Avoidance and
//! Control", 1988), RFC 5681 and RFC 6928: an initial window, slow start, a limit by the
//! receiver, congestion avoidance and one reduction in a round trip with losses, and the
//! window's decay while the connection is idle (RFC 2861). [`Control::Cubic`] leaves slow
//! start as HyStart does (Ha and Rhee, 2011) and grows as RFC 9438 says; [`Control::Bbr`]
//! paces by the bandwidth it has seen (Cardwell et al., "BBR: Congestion-Based Congestion
//! Control", 2016).
//!
//! Deliberately left out: timeouts (a loss is always noticed one round trip later, as
//! with selective acknowledgements in mid-stream), delayed acknowledgements other than by
//! [`TcpModel::slow_start_growth`], and the queue of acknowledgements. Hosts, links and
//! messages are not known here.

use std::time::Duration;

/// How a sender's window reacts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Control {
    /// RFC 5681: one segment more in a round trip, half the window at a loss.
    Reno,
    /// RFC 9438 with HyStart: what most systems have by default today.
    Cubic,
    /// Paced by the greatest bandwidth seen; a loss holds it back for a round trip.
    Bbr,
}

/// A kind of TCP.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TcpModel {
    /// Bytes of the stream in a full segment.
    pub segment_bytes: u32,
    /// Bytes of headers that each segment takes on a link besides.
    pub segment_overhead_bytes: u32,
    /// What may be sent before the first acknowledgement, in segments.
    pub initial_window_segments: u32,
    /// What the receiver, or the sender's buffer, allows to be in flight.
    pub max_window_bytes: u64,
    /// By how much slow start multiplies the window in a round trip: 2 if every segment
    /// is acknowledged, 1.5 if every other one is.
    pub slow_start_growth: f64,
    /// How the window reacts to losses and delays.
    pub control: Control,
    /// Whether an idle connection's window decays to the initial one.
    pub restarts_after_idle: bool,
    /// Round trips before the side that connects may send: 1 for TCP itself, and what
    /// the protocol above adds.
    pub handshake_round_trips: u32,
    /// What may wait at a host's link of limited rate before segments are dropped there;
    /// `None` is unlimited.
    pub queue_bytes: Option<u64>,
    /// The chance that a segment is lost elsewhere.
    pub segment_loss: f64,
}

impl TcpModel {
    /// Linux of today on Ethernet: an initial window of 10 (RFC 6928), timestamps in
    /// each segment, CUBIC, about 3 MiB in flight (half of the default `tcp_rmem`).
    pub fn today() -> TcpModel {
        TcpModel {
            segment_bytes: 1448,
            segment_overhead_bytes: 52,
            initial_window_segments: 10,
            max_window_bytes: 3 << 20,
            slow_start_growth: 2.0,
            control: Control::Cubic,
            restarts_after_idle: true,
            handshake_round_trips: 1,
            queue_bytes: Some(256 << 10),
            segment_loss: 0.0,
        }
    }

    /// TCP when CFS was measured: an initial window of 2 segments (RFC 2581), delayed
    /// acknowledgements, at most 65,535 bytes in flight, the most without window scaling
    /// (many systems defaulted to 16 KiB or 32 KiB).
    pub fn of_2001() -> TcpModel {
        TcpModel {
            segment_bytes: 1460,
            segment_overhead_bytes: 40,
            initial_window_segments: 2,
            max_window_bytes: 65_535,
            slow_start_growth: 1.5,
            control: Control::Reno,
            restarts_after_idle: true,
            handshake_round_trips: 1,
            queue_bytes: Some(64 << 10),
            segment_loss: 0.0,
        }
    }

    /// The same with so many round trips before the first request.
    pub fn with_handshake(self, round_trips: u32) -> TcpModel {
        TcpModel { handshake_round_trips: round_trips, ..self }
    }

    /// The window before anything is acknowledged.
    pub fn initial_window_bytes(&self) -> u64 {
        let initial = u64::from(self.initial_window_segments) * u64::from(self.segment_bytes);
        initial.clamp(u64::from(self.segment_bytes), self.max_window_bytes.max(1))
    }

    /// Bytes on a link for so many of the stream.
    pub fn wire_bytes(&self, stream_bytes: u64) -> u64 {
        let segments = stream_bytes.div_ceil(u64::from(self.segment_bytes.max(1)));
        stream_bytes + segments * u64::from(self.segment_overhead_bytes)
    }

    /// The textbook time to get `len_bytes` over a fresh connection and a path without
    /// loss: the handshake, then windows that grow by [`TcpModel::slow_start_growth`] a
    /// round trip until the rate (bytes a second on the link; `None` is unlimited) or the
    /// greatest window holds them, and half a round trip for the last byte.
    ///
    /// The side that connects is the receiver: its first byte tells the sender to begin.
    pub fn transfer_time(
        &self,
        len_bytes: u64,
        round_trip: Duration,
        rate_bytes_per_sec: Option<u64>,
    ) -> Duration {
        let rtt = round_trip.as_secs_f64();
        let wire_secs = |bytes: u64| {
            rate_bytes_per_sec
                .map_or(0.0, |rate| self.wire_bytes(bytes) as f64 / rate.max(1) as f64)
        };
        let mut secs = (f64::from(self.handshake_round_trips) + 0.5) * rtt;
        let mut left = len_bytes;
        let mut window = self.initial_window_bytes();
        loop {
            // A window that takes the link longer than a round trip never pauses.
            let greatest = window >= self.max_window_bytes;
            if left <= window || (wire_secs(window) >= rtt && rate_bytes_per_sec.is_some()) {
                return Duration::from_secs_f64(secs + wire_secs(left) + rtt / 2.0);
            }
            let rounds = if greatest { (left - 1) / window } else { 1 };
            secs += rtt * rounds as f64;
            left -= window * rounds;
            window = ((window as f64 * self.slow_start_growth) as u64).min(self.max_window_bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rtt(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// RFC 6928: ten segments in the first round trip, then 20, 40, 80.
    #[test]
    fn slow_start_from_ten_segments_doubles_each_round_trip() {
        let model = TcpModel::today();
        let rounds = |segments: u64| {
            let time = model.transfer_time(segments * 1448, rtt(100), None);
            (time.as_secs_f64() / 0.1).round() as u64
        };
        // One for the handshake, half for the request, half for the last byte.
        assert_eq!([1, 10, 11, 30, 31, 70, 71, 150].map(rounds), [2, 2, 3, 3, 4, 4, 5, 5]);
        // ssthresh is infinite, so a mebibyte takes log2(725/10 + 1) = 6.2 windows.
        assert_eq!(rounds(725), 8);
    }

    #[test]
    fn two_segments_and_delayed_acknowledgements_take_the_rounds_of_2001() {
        let model = TcpModel::of_2001();
        // 2, 3, 4.5, 6.75: 8 KiB are 5.6 segments, 64 KiB 44.9.
        assert_eq!(model.transfer_time(8 << 10, rtt(80), None), rtt(80 * 4));
        assert_eq!(model.transfer_time(64 << 10, rtt(80), None), rtt(80 * 8));
    }

    #[test]
    fn a_window_without_scaling_limits_a_long_transfer() {
        let model = TcpModel::of_2001();
        let secs = model.transfer_time(10_000_000, rtt(100), None).as_secs_f64();
        assert!((secs / (10_000_000.0 / 655_350.0) - 1.0).abs() < 0.1, "{secs}");
    }

    #[test]
    fn a_link_limits_a_long_transfer_by_its_rate_with_headers() {
        let model = TcpModel::today();
        let secs = model.transfer_time(100 << 20, rtt(50), Some(12_500_000)).as_secs_f64();
        let least = (100 << 20) as f64 * 1500.0 / 1448.0 / 12_500_000.0;
        assert!(secs > least && secs < least + 0.5, "{secs} against {least}");
    }
}
