//! What a call brings back, and when.

use std::sync::Arc;
use std::time::Duration;

use atoll_net::{
    CallError, MAX_HEADER_BYTES, MAX_MESSAGE_BYTES, MAX_PARTS, Peer, Refusal, Reply, Request,
    Service,
};
use atoll_sim::{HostConfig, HostId, Sim};
use bytes::Bytes;

use crate::ping::{Echo, PING, flat, millis, pair, request, secs, timed_call};

#[test]
fn a_call_takes_a_round_trip_and_the_handlers_time() {
    let sim = Sim::new(flat(10));
    let hosts = sim.add_hosts(2, &HostConfig::default());
    let echo = Echo::serve(&sim, hosts[1], millis(5));
    let (reply, took) = timed_call(&sim, hosts[0], hosts[1], request("hello"), secs(1));
    assert_eq!(reply.unwrap().header, "hello");
    assert_eq!(took, millis(25));
    assert_eq!(*echo.heard.lock().unwrap(), [(sim.peer(hosts[0]), Bytes::from("hello"))]);
}

#[test]
fn bulk_bytes_are_shared_and_not_copied() {
    let (sim, a, b) = pair(flat(10));
    let part = Bytes::from(vec![7; 1 << 20]);
    let sent = Request { method: PING, header: Bytes::new(), parts: vec![part.clone()] };
    let (reply, _) = timed_call(&sim, a, b, sent, secs(1));
    assert_eq!(reply.unwrap().parts[0].as_ptr(), part.as_ptr());
}

#[test]
fn a_host_reaches_itself_at_once() {
    let (sim, _, b) = pair(flat(10));
    let (reply, took) = timed_call(&sim, b, b, request("me"), secs(1));
    assert_eq!((reply.is_ok(), took), (true, Duration::ZERO));
}

#[test]
fn a_slow_answer_is_a_timeout_at_the_deadline_exactly() {
    let sim = Sim::new(flat(10));
    let hosts = sim.add_hosts(2, &HostConfig::default());
    Echo::serve(&sim, hosts[1], secs(60));
    let (reply, took) = timed_call(&sim, hosts[0], hosts[1], request("x"), millis(700));
    assert_eq!((reply, took), (Err(CallError::TimedOut), millis(700)));
    assert_eq!(sim.stats().timed_out_count, 1);
}

#[test]
fn the_handler_is_dropped_when_the_caller_gives_up() {
    let sim = Sim::new(flat(10));
    let hosts = sim.add_hosts(2, &HostConfig::default());
    Echo::serve(&sim, hosts[1], secs(60));
    // By its deadline, and by dropping the future.
    let _ = timed_call(&sim, hosts[0], hosts[1], request("x"), millis(100));
    let call = sim.transport(hosts[0]).call(sim.peer(hosts[1]), request("y"), secs(50));
    let env = sim.env(hosts[0]);
    let dropped = atoll_env::timeout(&*env, millis(100), call);
    assert!(sim.block_on(secs(1), dropped).unwrap().is_err());
    assert!(sim.task_count() > 0, "the handler learns of it later");
    sim.run_for(millis(10));
    assert_eq!(sim.task_count(), 0);
    assert!(sim.now().as_nanos() < 1_000_000_000);
}

#[test]
fn before_a_service_is_set_calls_are_refused_as_overloaded() {
    let sim = Sim::new(flat(10));
    let hosts = sim.add_hosts(2, &HostConfig::default());
    let (reply, took) = timed_call(&sim, hosts[0], hosts[1], request("x"), secs(1));
    let Err(CallError::Refused(refusal)) = reply else { panic!("{reply:?}") };
    assert_eq!((refusal.code, took), (Refusal::OVERLOADED, millis(20)));
}

#[test]
fn a_reply_is_only_taken_from_the_holder_of_the_identity() {
    let (sim, a, b) = pair(flat(10));
    let impostor = Peer { id: sim.peer(a).id, addr: sim.peer(b).addr };
    let call = sim.transport(a).call(impostor, request("secret"), secs(1));
    let result = sim.block_on(secs(2), call).unwrap();
    assert!(matches!(result, Err(CallError::Unreachable(_))), "{result:?}");
    assert_eq!(sim.stats().methods[&PING].delivered_count, 0);
}

#[test]
fn an_address_of_nobody_is_silence() {
    let (sim, a, b) = pair(flat(10));
    for addr in ["10.0.9.9:1", "10.0.0.2:99", "192.168.0.1:1", "[::1]:1"] {
        let nobody = Peer { id: sim.peer(b).id, addr: addr.parse().unwrap() };
        let call = sim.transport(a).call(nobody, request("x"), secs(1));
        assert_eq!(sim.block_on(secs(2), call).unwrap(), Err(CallError::TimedOut), "{addr}");
    }
}

#[test]
fn messages_over_the_limits_are_too_large() {
    let (sim, a, b) = pair(flat(10));
    let long = Bytes::from(vec![0; MAX_MESSAGE_BYTES]);
    let cases = [
        (Bytes::from(vec![0; MAX_HEADER_BYTES + 1]), vec![]),
        (Bytes::new(), vec![Bytes::new(); MAX_PARTS + 1]),
        (Bytes::from_static(b"x"), vec![long.clone()]),
    ];
    for (header, parts) in cases {
        let sent = Request { method: PING, header, parts };
        let (reply, took) = timed_call(&sim, a, b, sent, secs(1));
        assert_eq!((reply, took), (Err(CallError::TooLarge), Duration::ZERO));
    }
    assert_eq!(sim.stats().sent_count, 0);
    let fitting = Request { method: PING, header: Bytes::new(), parts: vec![long] };
    assert!(timed_call(&sim, a, b, fitting, secs(1)).0.is_ok());
}

struct Answer(Result<Reply, Refusal>);

impl Service for Answer {
    fn handle(&self, _: Peer, _: Request) -> atoll_env::BoxFuture<'static, Result<Reply, Refusal>> {
        let answer = self.0.clone();
        Box::pin(async move { answer })
    }
}

fn answered(answer: Result<Reply, Refusal>) -> Refusal {
    let (sim, a, b) = pair(flat(10));
    sim.transport(b).serve(Arc::new(Answer(answer)));
    match timed_call(&sim, a, b, request("x"), secs(1)).0 {
        Err(CallError::Refused(refusal)) => refusal,
        other => panic!("{other:?}"),
    }
}

#[test]
fn refusals_arrive_shortened_and_oversized_replies_as_refusals() {
    let refusal = answered(Err(Refusal::new(123, "ä".repeat(5000))));
    assert_eq!((refusal.code, refusal.text.len()), (123, 1024));
    let oversized = Reply { header: Bytes::from(vec![0; MAX_HEADER_BYTES + 1]), parts: vec![] };
    assert_eq!(answered(Ok(oversized)).code, Refusal::INTERNAL);
}

#[test]
fn the_round_trip_is_measured_without_the_handlers_time() {
    let sim = Sim::new(flat(10));
    let hosts = sim.add_hosts(2, &HostConfig::default());
    Echo::serve(&sim, hosts[1], millis(500));
    let transport = sim.transport(hosts[0]);
    let id = sim.peer(hosts[1]).id;
    assert_eq!(transport.round_trip(&id), None);
    let _ = timed_call(&sim, hosts[0], hosts[1], request("x"), secs(1));
    assert_eq!(transport.round_trip(&id), Some(millis(20)));
    let other = sim.transport(hosts[1]).round_trip(&sim.peer(hosts[0]).id);
    assert_eq!(other, Some(millis(20)), "either side measures their connection");
}

#[test]
fn counts_are_kept_by_method() {
    let (sim, a, b) = pair(flat(10));
    let _ = timed_call(&sim, a, b, request("four"), secs(1));
    let stats = sim.stats();
    let method = stats.methods[&PING];
    assert_eq!((method.call_count, method.delivered_count, method.reply_count), (1, 1, 1));
    assert_eq!((method.request_bytes, method.reply_bytes, stats.sent_count), (4, 4, 2));
    assert_eq!(stats.sent_bytes, 2 * (4 + 96));
    assert_eq!(sim.host_of(&sim.peer(b).id), Some(HostId(1)));
}

#[test]
fn round_trips_are_remembered_for_a_bounded_number_of_peers() {
    let sim = Sim::new(flat(10));
    let hosts = sim.add_hosts(700, &HostConfig::default());
    let transport = sim.transport(hosts[0]);
    for host in &hosts[1..] {
        sim.transport(*host).serve(Arc::new(Answer(Ok(Reply::default()))));
        let _ = timed_call(&sim, hosts[0], *host, request("x"), secs(1));
        assert_eq!(transport.round_trip(&sim.peer(*host).id), Some(millis(20)), "{host}");
    }
    let known = |host: &HostId| transport.round_trip(&sim.peer(*host).id).is_some();
    assert_eq!(hosts.iter().filter(|host| known(host)).count(), 512);
}
