//! Messages and transfers over TCP connections.

use std::time::Duration;

use atoll_env::{BoxFuture, sleep};
use atoll_net::{Peer, Refusal, Reply, Request, Service};
use atoll_sim::{Connections, Control, HostConfig, HostId, Sim, SimConfig, TcpModel};
use bytes::Bytes;
use futures_util::future::join_all;
use proptest::prelude::*;

use crate::ping::{Echo, PING, flat, millis, request, secs, timed_call};

/// Answers with as many bytes as the header says.
struct Bulk;

impl Service for Bulk {
    fn handle(&self, _: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let len = u32::from_be_bytes(request.header[..4].try_into().expect("four bytes"));
        let parts = vec![Bytes::from(vec![0; len as usize])];
        Box::pin(async move { Ok(Reply { header: Bytes::new(), parts }) })
    }
}

fn ask(len: u32) -> Request {
    let header = Bytes::copy_from_slice(&len.to_be_bytes());
    Request { method: PING, header, parts: Vec::new() }
}

fn over_tcp(one_way_ms: u64, model: TcpModel) -> SimConfig {
    let connections = Connections::Tcp(model);
    SimConfig { connections, message_overhead_bytes: 0, ..flat(one_way_ms) }
}

fn hosts(config: SimConfig, rate: Option<u64>, count: usize) -> (Sim, Vec<HostId>) {
    let sim = Sim::new(config);
    let limits = HostConfig {
        upload_bytes_per_sec: rate,
        download_bytes_per_sec: rate,
        ..HostConfig::default()
    };
    let hosts = sim.add_hosts(count, &limits);
    hosts.iter().for_each(|host| sim.transport(*host).serve(std::sync::Arc::new(Bulk)));
    (sim, hosts)
}

fn transfer(sim: &Sim, from: HostId, to: HostId, len: u64, model: &TcpModel) -> Duration {
    sim.block_on(secs(3600), sim.transfer(from, to, len, model)).expect("it arrives")
}

#[test]
fn a_transfer_takes_the_textbooks_time() {
    for model in [TcpModel::today(), TcpModel::of_2001()] {
        for len in [1, 14_480, 14_481, 43_440, 64 << 10, 1 << 20] {
            let (sim, h) = hosts(flat(50), None, 2);
            let expected = model.transfer_time(len, millis(100), None);
            let taken = transfer(&sim, h[0], h[1], len, &model);
            assert!(taken.abs_diff(expected) <= millis(100), "{len}: {taken:?}, not {expected:?}");
            if model.slow_start_growth == 2.0 {
                assert_eq!(taken, expected, "{len}");
            }
        }
    }
}

/// TCP, TLS 1.3 and our hello are three round trips; the request and 64 KiB of reply,
/// which is 46 segments after ten and twenty, three more.
#[test]
fn a_block_over_a_cold_path_takes_its_round_trips_and_over_a_grown_one_a_single() {
    let model = TcpModel::today().with_handshake(3);
    let (sim, h) = hosts(over_tcp(50, model), None, 2);
    let call = |len| timed_call(&sim, h[0], h[1], ask(len), secs(10)).1;
    assert_eq!(call(64 << 10), millis(600));
    // The window has grown beyond 64 KiB by now.
    assert_eq!(call(64 << 10), millis(100));
    assert_eq!(sim.stats().connection_count, 1);
    // A minute later it is at its beginning again, and the connection still open.
    sim.run_for(secs(60));
    assert_eq!(timed_call(&sim, h[0], h[1], ask(64 << 10), secs(10)).1, millis(300));
}

#[test]
fn both_hosts_know_the_address_at_the_other_end_while_a_connection_is_open() {
    let model = TcpModel::today().with_handshake(3);
    let (sim, h) = hosts(over_tcp(50, model), None, 3);
    let knows = |a: usize, b: usize| sim.transport(h[a]).remote_ip(&sim.peer(h[b]).id);
    let ip = |host: usize| Some(sim.peer(h[host]).addr.ip());
    assert_eq!(knows(0, 1), None);
    let call = sim.transport(h[0]).call(sim.peer(h[1]), ask(10), secs(10));
    sim.env(h[0]).spawn(Box::pin(async move { drop(call.await) }));
    sim.run_for(millis(299));
    assert_eq!((knows(0, 1), knows(1, 0)), (None, None), "the handshake is under way");
    sim.run_for(millis(101));
    assert_eq!((knows(0, 1), knows(1, 0)), (ip(1), ip(0)), "whichever side made it");
    assert_eq!(knows(0, 2), None);
    sim.crash(h[1]);
    assert_eq!(knows(0, 1), None);
}

#[test]
fn connections_that_take_no_time_are_always_there() {
    let (sim, h) = hosts(SimConfig::default(), None, 2);
    let knows = || sim.transport(h[0]).remote_ip(&sim.peer(h[1]).id);
    assert_eq!(knows(), Some(sim.peer(h[1]).addr.ip()));
    sim.crash(h[1]);
    assert_eq!(knows(), None);
}

#[test]
fn a_long_transfer_fills_the_link_whatever_the_control() {
    let len = 60_000_000;
    for control in [Control::Reno, Control::Cubic, Control::Bbr] {
        // A queue as long as the pipe.
        let queue_bytes = Some(500_000);
        let model = TcpModel { control, queue_bytes, ..TcpModel::today() };
        let (sim, h) = hosts(flat(20), Some(12_500_000), 2);
        let taken = transfer(&sim, h[0], h[1], len, &model).as_secs_f64();
        let least = len as f64 * 1500.0 / 1448.0 / 12_500_000.0;
        // HyStart leaves slow start at half the pipe, and CUBIC takes a while from there.
        assert!(taken > least && taken < 1.3 * least, "{control:?}: {taken} s, least {least}");
        if control == Control::Reno {
            assert!(sim.stats().lost_chunk_count > 0, "slow start overruns the queue");
        }
    }
}

/// Mathis et al., "The Macroscopic Behavior of the TCP Congestion Avoidance Algorithm"
/// (1997): a Reno sender gets 1.22 segments a round trip over the root of the loss rate.
#[test]
fn random_losses_slow_reno_down_as_mathis_says() {
    let loss = 0.001;
    let control = Control::Reno;
    let model = TcpModel { control, segment_loss: loss, ..TcpModel::today() };
    let (sim, h) = hosts(flat(50), None, 2);
    let len = 40_000_000;
    let taken = transfer(&sim, h[0], h[1], len, &model).as_secs_f64();
    let expected = 1448.0 / 0.1 * 1.22 / loss.sqrt();
    let share = len as f64 / taken / expected;
    assert!((0.75..1.35).contains(&share), "{share} of what the formula says");
}

#[test]
fn transfers_at_one_time_share_the_receivers_link() {
    let model = TcpModel { control: Control::Bbr, ..TcpModel::today() };
    let (sim, h) = hosts(flat(20), Some(2_500_000), 4);
    let work = join_all((1..4).map(|i| sim.transfer(h[i], h[0], 5_000_000, &model)));
    let taken = sim.block_on(secs(100), work).expect("they arrive");
    let all = 15_000_000.0 * 1500.0 / 1448.0 / 2_500_000.0;
    let last = taken.iter().max().expect("three").as_secs_f64();
    let first = taken.iter().min().expect("three").as_secs_f64();
    assert!(last > all && last < 1.2 * all, "{last} s, least {all}");
    assert!(first > 0.5 * all, "one of them had the link to itself: {first} of {all} s");
}

#[test]
fn a_small_message_passes_bulk_that_has_not_begun() {
    let model = TcpModel::today();
    let (sim, h) = hosts(over_tcp(10, model), Some(1_000_000), 2);
    let calls = [1_000_000, 1_000_000, 100].map(|len| {
        let call = sim.transport(h[0]).call(sim.peer(h[1]), ask(len), secs(100));
        let env = sim.outside();
        async move {
            call.await.expect("it is answered");
            env.now().as_nanos() as f64 / 1e9
        }
    });
    let ended = sim.block_on(secs(100), join_all(calls)).expect("they end");
    assert!(ended[2] < ended[1] - 0.9, "{ended:?}");
}

#[test]
fn a_reply_given_up_before_it_began_is_not_sent() {
    let model = TcpModel::today();
    let (sim, h) = hosts(over_tcp(10, model), Some(1_000_000), 2);
    let first = sim.transport(h[0]).call(sim.peer(h[1]), ask(1_000_000), secs(100));
    let second = sim.transport(h[0]).call(sim.peer(h[1]), ask(3_000_000), millis(500));
    let (first, second) =
        sim.block_on(secs(100), futures_util::future::join(first, second)).expect("they end");
    assert!(first.is_ok() && second.is_err());
    sim.check_invariants();
    let before = sim.now();
    assert!(timed_call(&sim, h[0], h[1], ask(1), secs(100)).0.is_ok());
    assert!(sim.now().since(before) < secs(1), "the link is free");
}

#[test]
fn a_crash_ends_connections_and_the_next_call_makes_another() {
    let model = TcpModel::today().with_handshake(3);
    let (sim, h) = hosts(over_tcp(50, model), None, 2);
    assert_eq!(timed_call(&sim, h[0], h[1], ask(10), secs(9)).1, millis(400));
    sim.crash(h[1]);
    let (refused, taken) = timed_call(&sim, h[0], h[1], ask(10), secs(9));
    assert!(refused.is_err_and(|error| error.is_failure_of_peer()));
    assert_eq!(taken, millis(100));
    sim.restart(h[1]);
    Echo::serve(&sim, h[1], Duration::ZERO);
    let (_, taken) = timed_call(&sim, h[0], h[1], request("x"), secs(9));
    assert!(taken >= millis(100));
    sim.check_invariants();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Every call ends, whatever is lost, cut short or crashes, and nothing is left behind.
    #[test]
    fn connections_lose_no_message_and_leave_nothing(
        seed in any::<u64>(),
        loss in prop_oneof![Just(0.0), Just(0.02), Just(0.3)],
        control in prop_oneof![Just(Control::Reno), Just(Control::Cubic), Just(Control::Bbr)],
        calls in proptest::collection::vec((0u32..4, 0u32..4, 0u32..300_000, 1u64..3000), 1..20),
        crash_ms in proptest::option::of(0u64..2000),
    ) {
        let model = TcpModel { segment_loss: loss, control, ..TcpModel::today() };
        let config = SimConfig { seed, jitter: 0.2, ..over_tcp(20, model) };
        let run = || {
            let (sim, h) = hosts(config.clone(), Some(1_000_000), 4);
            let all: Vec<_> = calls.iter().map(|(from, to, len, limit)| {
                let to = sim.peer(h[*to as usize]);
                let call = sim.transport(h[*from as usize]).call(to, ask(*len), millis(*limit));
                async move { call.await.is_ok() }
            }).collect();
            let crash = { let (sim, h, env) = (sim.clone(), h.clone(), sim.outside()); async move {
                if let Some(at) = crash_ms {
                    sleep(&*env, millis(at)).await;
                    sim.crash(h[1]);
                    sim.restart(h[1]);
                }
            }};
            let both = futures_util::future::join(join_all(all), crash);
            let (outcomes, ()) = sim.block_on(secs(1000), both).expect("every call ends");
            sim.check_invariants();
            sim.run_until_idle_or(secs(1000));
            sim.check_invariants();
            assert!(sim.pending_calls().is_empty());
            (outcomes, sim.trace_hash(), sim.now())
        };
        prop_assert_eq!(run(), run());
    }
}
