//! The life of a call.
//!
//! ```text
//! caller   start ──Request──► arrive ─ service ─ task ─ done      callee
//!          outcome ◄──Reply── or ◄──Reset── (nobody there)
//!          limit passed or future dropped: ──Cancel──► task ended
//! ```
//!
//! A call is one slot with a count of who refers to it: the caller's future, the
//! callee's task, and every message under way. It is freed with the last of them.
//!
//! A message leaves when the sender's uplink is free and takes its bytes' time there;
//! its first byte then travels the latency, and the last byte is in when both the
//! uplink and the receiver's downlink, which serves messages in order of arrival, have
//! passed it. Resets and cancels take latency only.

use std::task::Waker;
use std::time::Duration;

use atoll_env::BoxFuture;
use atoll_net::{
    CallError, MAX_HEADER_BYTES, MAX_MESSAGE_BYTES, MAX_PARTS, Peer, Refusal, Reply, Request,
    Service,
};
use bytes::Bytes;
use std::sync::Arc;

use super::{Grave, World, host_at};
use crate::config::{Connections, Loss};
use crate::schedule::{Leg, What};
use crate::tasks::{Body, Ready, TaskId};
use crate::tcp::TcpModel;
use crate::trace::EventKind;

/// Losses in a row after which even a retransmitting sender gives up.
const MAX_RETRANSMISSIONS: u32 = 8;

/// Most round-trip times a host remembers.
const MAX_ROUND_TRIPS: usize = 512;

/// Longest text of a refusal that is sent (`net` says 1 KiB).
const MAX_REFUSAL_BYTES: usize = 1024;

pub(crate) struct CallSlot {
    pub(crate) refs: u32,
    pub(crate) from: u32,
    from_incarnation: u32,
    pub(crate) to: u32,
    /// Of the callee when the request arrived.
    to_incarnation: u32,
    pub(crate) method: u16,
    pub(crate) started_at: u64,
    /// The deadline's entry; 0 when it counts no more.
    pub(crate) limit_seq: u64,
    request_len: u32,
    reply_len: u32,
    /// When the last byte of the message under way passes the uplink, latency added.
    tail_at: u64,
    request_transit_ns: u64,
    reply_sent_at: u64,
    request: Option<Request>,
    reply: Option<Result<Reply, CallError>>,
    pub(crate) server: Option<TaskId>,
    is_given_up: bool,
    is_cancelled: bool,
    outcome: Option<Result<Reply, CallError>>,
    waker: Option<Waker>,
}

/// A request that has arrived: the caller of `World` hands it to the service.
pub(crate) struct Arrival {
    pub(crate) service: Arc<dyn Service>,
    pub(crate) from: Peer,
    pub(crate) request: Request,
    pub(crate) call: u32,
}

fn body_len(header: &Bytes, parts: &[Bytes]) -> usize {
    header.len() + parts.iter().map(Bytes::len).sum::<usize>()
}

/// Whether a message keeps the limits of `net`.
pub(crate) fn fits(header: &Bytes, parts: &[Bytes]) -> bool {
    header.len() <= MAX_HEADER_BYTES
        && parts.len() <= MAX_PARTS
        && body_len(header, parts) <= MAX_MESSAGE_BYTES
}

pub(crate) fn transmission_ns(len_bytes: usize, bytes_per_sec: Option<u64>) -> u64 {
    let Some(rate) = bytes_per_sec else { return 0 };
    let nanos = len_bytes as u128 * 1_000_000_000 / u128::from(rate.max(1));
    u64::try_from(nanos).unwrap_or(u64::MAX)
}

/// What a reply looks like on its way: refusals shortened, oversized replies refused.
fn outgoing(result: Result<Reply, Refusal>) -> Result<Reply, CallError> {
    match result {
        Ok(reply) if fits(&reply.header, &reply.parts) => Ok(reply),
        Ok(_) => {
            let text = "the reply exceeds the message limits";
            Err(CallError::Refused(Refusal::new(Refusal::INTERNAL, text)))
        }
        Err(mut refusal) => {
            let mut end = refusal.text.len().min(MAX_REFUSAL_BYTES);
            while !refusal.text.is_char_boundary(end) {
                end -= 1;
            }
            refusal.text.truncate(end);
            Err(CallError::Refused(refusal))
        }
    }
}

fn reply_len(reply: &Result<Reply, CallError>) -> usize {
    match reply {
        Ok(reply) => body_len(&reply.header, &reply.parts),
        Err(CallError::Refused(refusal)) => refusal.text.len(),
        Err(_) => 0,
    }
}

impl World {
    fn call(&mut self, slot: u32) -> &mut CallSlot {
        self.calls.find_mut(slot).expect("a call lives as long as a reference to it")
    }

    fn release(&mut self, slot: u32) {
        let call = self.call(slot);
        call.refs -= 1;
        if call.refs > 0 {
            return;
        }
        let call = self.calls.remove(slot).expect("it was just found");
        self.graves.extend(call.request.map(Grave::Request));
        self.graves.extend(call.reply.map(Grave::Reply));
        self.graves.extend(call.outcome.map(Grave::Reply));
        self.graves.extend(call.waker.map(Grave::Waker));
    }

    // ---- the caller's side ----

    /// Sends a request; the slot is held for the caller until [`World::leave_call`].
    pub(crate) fn start_call(
        &mut self,
        (from, from_incarnation): (u32, u32),
        to: Peer,
        request: Request,
        limit: Duration,
        waker: Waker,
    ) -> Result<u32, CallError> {
        if !self.is_current(from, from_incarnation) {
            self.graves.push(Grave::Request(request));
            self.graves.push(Grave::Waker(waker));
            return Err(CallError::Unreachable("the calling host has crashed".into()));
        }
        let host = host_at(&to.addr).filter(|host| (*host as usize) < self.hosts.len());
        let len = body_len(&request.header, &request.parts);
        let method = request.method;
        let slot = self.calls.insert(CallSlot {
            refs: 1,
            from,
            from_incarnation,
            to: host.unwrap_or(u32::MAX),
            to_incarnation: 0,
            method,
            started_at: self.now,
            limit_seq: 0,
            request_len: len as u32,
            reply_len: 0,
            tail_at: 0,
            request_transit_ns: 0,
            reply_sent_at: 0,
            request: Some(request),
            reply: None,
            server: None,
            is_given_up: false,
            is_cancelled: false,
            outcome: None,
            waker: Some(waker),
        });
        let limit_ns = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        let limit_at = self.now.saturating_add(limit_ns);
        let limit_seq = self.schedule.push(limit_at, What::Limit(slot));
        self.call(slot).limit_seq = limit_seq;
        self.stats.method(method).call_count += 1;
        match host {
            // No host has that address: silence until the deadline.
            None => {}
            Some(host) if self.hosts[host as usize].peer.id != to.id => {
                // The handshake shows another identity: a round trip without a call.
                self.call(slot).request_len = 0;
                let request = self.call(slot).request.take();
                self.graves.extend(request.map(Grave::Request));
                self.launch(slot, Leg::Request);
            }
            Some(_) => self.launch(slot, Leg::Request),
        }
        Ok(slot)
    }

    /// The outcome, if there is one; otherwise remembers the waker.
    pub(crate) fn poll_call(
        &mut self,
        slot: u32,
        waker: &Waker,
    ) -> Option<Result<Reply, CallError>> {
        let call = self.call(slot);
        if let Some(outcome) = call.outcome.take() {
            return Some(outcome);
        }
        if !call.waker.as_ref().is_some_and(|known| known.will_wake(waker)) {
            let old = call.waker.replace(waker.clone());
            self.graves.extend(old.map(Grave::Waker));
        }
        None
    }

    /// The caller's future is gone.
    pub(crate) fn leave_call(&mut self, slot: u32) {
        if self.call(slot).limit_seq != 0 {
            self.call(slot).limit_seq = 0;
            self.entry_cancelled();
            self.give_up(slot);
        }
        self.release(slot);
    }

    /// Tells the callee that the reply is not wanted.
    fn give_up(&mut self, slot: u32) {
        let call = self.call(slot);
        call.is_given_up = true;
        let (from, incarnation, to) = (call.from, call.from_incarnation, call.to);
        if to != u32::MAX && self.unsend(slot, Leg::Request) {
            return self.release(slot);
        }
        let is_up = self.is_current(from, incarnation);
        // A process that ends closes its connections; a machine that is gone does not.
        if to != u32::MAX && (is_up || !self.host(from).is_silent) {
            self.launch(slot, Leg::Cancel);
        }
    }

    pub(crate) fn limit_passed(&mut self, slot: u32) -> u32 {
        let call = self.call(slot);
        call.limit_seq = 0;
        call.outcome = Some(Err(CallError::TimedOut));
        let (from, to, method) = (call.from, call.to, call.method);
        let waker = call.waker.take();
        self.wakes.extend(waker);
        self.stats.timed_out_count += 1;
        self.record(EventKind::TimedOut, from, to, method, 0);
        self.give_up(slot);
        from
    }

    fn settle(&mut self, slot: u32, outcome: Result<Reply, CallError>) {
        let call = self.call(slot);
        if call.limit_seq == 0 {
            self.graves.push(Grave::Reply(outcome));
            return;
        }
        call.limit_seq = 0;
        call.outcome = Some(outcome);
        let waker = call.waker.take();
        self.wakes.extend(waker);
        self.entry_cancelled();
    }

    // ---- under way ----

    fn ends(&self, slot: u32, leg: Leg) -> (u32, u32, u16, usize) {
        let call = self.calls.find(slot).expect("a call lives as long as a reference to it");
        match leg {
            Leg::Request => (call.from, call.to, call.method, call.request_len as usize),
            Leg::Reply => (call.to, call.from, call.method, call.reply_len as usize),
            Leg::Reset => (call.to, call.from, call.method, 0),
            Leg::Cancel => (call.from, call.to, call.method, 0),
        }
    }

    /// The receiver of a leg.
    pub(crate) fn receiver(&self, slot: u32, leg: Leg) -> u32 {
        self.ends(slot, leg).1
    }

    /// The sender and the receiver of a leg.
    pub(crate) fn hosts_of(&self, slot: u32, leg: Leg) -> (u32, u32) {
        let (from, to, ..) = self.ends(slot, leg);
        (from, to)
    }

    fn is_cut(&self, from: u32, to: u32) -> bool {
        let group = |host: u32| self.hosts[host as usize].group;
        from != to
            && (group(from) != group(to)
                || self.cuts.iter().any(|(a, b)| a.contains(&from) && b.contains(&to)))
    }

    /// How much later chance makes a message; `None` if it is lost.
    fn chance_delay_ns(&mut self) -> Option<u64> {
        match self.config.loss {
            Loss::None => Some(0),
            Loss::Drop { chance } => (self.network_random.unit() >= chance).then_some(0),
            Loss::Retransmit { chance, first_timeout } => {
                let first = u64::try_from(first_timeout.as_nanos()).unwrap_or(u64::MAX);
                let mut delay = 0u64;
                for attempt in 0..MAX_RETRANSMISSIONS {
                    if self.network_random.unit() >= chance {
                        return Some(delay);
                    }
                    delay = delay.saturating_add(first.saturating_mul(1 << attempt));
                }
                None
            }
        }
    }

    /// Without jitter.
    pub(crate) fn base_latency_ns(&self, from: u32, to: u32) -> u64 {
        let (a, b) = (&self.hosts[from as usize], &self.hosts[to as usize]);
        if from == to {
            return 0;
        }
        let travel = self.config.latency.between((from, a.place), (to, b.place));
        travel.saturating_add(a.access_delay_ns).saturating_add(b.access_delay_ns)
    }

    pub(crate) fn latency_ns(&mut self, from: u32, to: u32) -> u64 {
        let mut delay = self.base_latency_ns(from, to);
        if self.config.jitter > 0.0 {
            let share = self.config.jitter * self.network_random.unit();
            delay = delay.saturating_add((delay as f64 * share) as u64);
        }
        delay
    }

    /// Sends one leg of a call; holds the call while it is under way.
    fn launch(&mut self, slot: u32, leg: Leg) {
        let (from, to, method, len) = self.ends(slot, leg);
        let is_bulk = matches!(leg, Leg::Request | Leg::Reply) && from != to;
        let wire_len = len + self.config.message_overhead_bytes;
        self.count_sent(leg, method, len, wire_len);
        if let Connections::Tcp(model) = self.config.connections
            && is_bulk
        {
            return self.launch_by_tcp(slot, leg, wire_len, model);
        }
        let now = self.now;
        let uplink = &mut self.hosts[from as usize];
        let (mut start, mut sent) = (now, now);
        if is_bulk && uplink.upload_bytes_per_sec.is_some() {
            start = now.max(uplink.uplink_free_at);
            sent = start.saturating_add(transmission_ns(wire_len, uplink.upload_bytes_per_sec));
            uplink.uplink_free_at = sent;
        }
        let chance = if from == to { Some(0) } else { self.chance_delay_ns() };
        let delay = match chance.filter(|_| !self.is_cut(from, to)) {
            Some(extra) => extra.saturating_add(self.latency_ns(from, to)),
            None => return self.lost(from, to, method, len),
        };
        let call = self.call(slot);
        call.refs += 1;
        call.tail_at = sent.saturating_add(delay);
        let (head_at, tail_at) = (start.saturating_add(delay), call.tail_at);
        if is_bulk && self.hosts[to as usize].download_bytes_per_sec.is_some() {
            self.schedule.push(head_at, What::Head(slot, leg));
        } else {
            self.schedule.push(tail_at, What::Arrive(slot, leg));
        }
    }

    /// The same on a connection, which sees to rates, windows and order.
    fn launch_by_tcp(&mut self, slot: u32, leg: Leg, wire_len: usize, model: TcpModel) {
        let (from, to, method, len) = self.ends(slot, leg);
        let chance = self.chance_delay_ns().filter(|_| !self.is_cut(from, to));
        let Some(held_back_ns) = chance else { return self.lost(from, to, method, len) };
        self.call(slot).refs += 1;
        if held_back_ns > 0 {
            let at = self.now.saturating_add(held_back_ns);
            self.schedule.push(at, What::Send(slot, leg));
        } else {
            self.send_by_tcp(slot, leg, wire_len as u64, model);
        }
    }

    /// Chance has held the message back for long enough.
    pub(crate) fn send_due(&mut self, slot: u32, leg: Leg) -> u32 {
        let (from, _, _, len) = self.ends(slot, leg);
        let wire_len = len + self.config.message_overhead_bytes;
        if let Connections::Tcp(model) = self.config.connections {
            self.send_by_tcp(slot, leg, wire_len as u64, model);
        }
        from
    }

    fn count_sent(&mut self, leg: Leg, method: u16, len: usize, wire_len: usize) {
        self.stats.sent_count += 1;
        match leg {
            Leg::Request => self.stats.method(method).request_bytes += len as u64,
            Leg::Reply => {
                let stats = self.stats.method(method);
                stats.reply_count += 1;
                stats.reply_bytes += len as u64;
            }
            Leg::Reset | Leg::Cancel => return,
        }
        self.stats.sent_bytes += wire_len as u64;
    }

    fn lost(&mut self, from: u32, to: u32, method: u16, len: usize) {
        self.stats.lost_count += 1;
        self.record(EventKind::Lost, from, to, method, len);
    }

    /// The first byte is at the receiver's downlink: the message takes its turn there.
    pub(crate) fn head_arrived(&mut self, slot: u32, leg: Leg) {
        let (_, to, _, len) = self.ends(slot, leg);
        let wire_len = len + self.config.message_overhead_bytes;
        let tail_at = self.call(slot).tail_at;
        let now = self.now;
        let host = &mut self.hosts[to as usize];
        let start = now.max(host.downlink_free_at);
        let taken = start.saturating_add(transmission_ns(wire_len, host.download_bytes_per_sec));
        let arrives = taken.max(tail_at);
        host.downlink_free_at = arrives;
        self.schedule.push(arrives, What::Arrive(slot, leg));
    }

    /// The last byte is in. A request comes back for its service.
    pub(crate) fn arrived(&mut self, slot: u32, leg: Leg) -> Option<Arrival> {
        let (from, to, method, len) = self.ends(slot, leg);
        let arrival = if self.is_cut(from, to) {
            self.lost(from, to, method, len);
            None
        } else {
            match leg {
                Leg::Request => self.request_arrived(slot),
                Leg::Reply => {
                    self.reply_arrived(slot);
                    None
                }
                Leg::Reset => {
                    self.record(EventKind::Reset, from, to, method, 0);
                    let text = "nobody listens there (any more)".to_owned();
                    self.settle(slot, Err(CallError::Unreachable(text)));
                    None
                }
                Leg::Cancel => {
                    self.record(EventKind::Cancel, from, to, method, 0);
                    self.cancel_arrived(slot);
                    None
                }
            }
        };
        match arrival {
            // The message's hold on the call becomes the service's.
            Some(arrival) => Some(arrival),
            None => {
                self.release(slot);
                None
            }
        }
    }

    // ---- the callee's side ----

    fn request_arrived(&mut self, slot: u32) -> Option<Arrival> {
        let (from, to, method, len) = self.ends(slot, Leg::Request);
        let now = self.now;
        let call = self.call(slot);
        call.request_transit_ns = now - call.started_at;
        let from_incarnation = call.from_incarnation;
        let is_cancelled = call.is_cancelled;
        let request = call.request.take();
        if is_cancelled || !self.is_current(from, from_incarnation) {
            self.graves.extend(request.map(Grave::Request));
            self.lost(from, to, method, len);
            return None;
        }
        let host = &self.hosts[to as usize];
        let (is_up, is_silent) = (host.is_up, host.is_silent);
        let (incarnation, service) = (host.incarnation, host.service.clone());
        self.call(slot).to_incarnation = incarnation;
        // Without a request this was a handshake with the wrong identity.
        let (true, Some(request)) = (is_up, request) else {
            if !is_silent {
                self.launch(slot, Leg::Reset);
            }
            return None;
        };
        self.stats.method(method).delivered_count += 1;
        self.record(EventKind::Request, from, to, method, len);
        let Some(service) = service else {
            self.graves.push(Grave::Request(request));
            let refusal = Refusal::new(Refusal::OVERLOADED, "the node is still starting");
            self.send_reply(slot, Err(refusal));
            return None;
        };
        Some(Arrival { service, from: self.hosts[from as usize].peer, request, call: slot })
    }

    /// The service has taken the request: its future becomes a task of the callee.
    pub(crate) fn begin_serving(
        &mut self,
        ready: &Arc<Ready>,
        slot: u32,
        work: BoxFuture<'static, Result<Reply, Refusal>>,
    ) {
        let call = self.call(slot);
        let (to, incarnation) = (call.to, call.to_incarnation);
        match self.spawn(ready, to, incarnation, Body::Serve(work), Some(slot)) {
            Some(task) => self.call(slot).server = Some(task),
            // It crashed in the act.
            None => self.server_died(slot),
        }
    }

    /// The callee's task has its answer.
    pub(crate) fn finish_serving(&mut self, task: TaskId, result: Result<Reply, Refusal>) {
        match self.end_task(task) {
            Some(slot) => {
                self.call(slot).server = None;
                self.send_reply(slot, result);
                self.release(slot);
            }
            // Cancelled or crashed by its own doing.
            None => self.graves.push(Grave::Reply(result.map_err(CallError::Refused))),
        }
    }

    fn send_reply(&mut self, slot: u32, result: Result<Reply, Refusal>) {
        let reply = outgoing(result);
        let len = reply_len(&reply);
        let now = self.now;
        let call = self.call(slot);
        call.reply_len = len as u32;
        call.reply_sent_at = now;
        call.reply = Some(reply);
        self.launch(slot, Leg::Reply);
    }

    /// The callee's task was dropped with its host.
    pub(crate) fn server_died(&mut self, slot: u32) {
        let call = self.call(slot);
        call.server = None;
        let (to, is_given_up) = (call.to, call.is_given_up);
        if !self.hosts[to as usize].is_silent && !is_given_up {
            self.launch(slot, Leg::Reset);
        }
        self.release(slot);
    }

    fn cancel_arrived(&mut self, slot: u32) {
        self.call(slot).is_cancelled = true;
        if let Some(task) = self.call(slot).server.take() {
            self.end_task(task);
            self.release(slot);
        }
        if self.unsend(slot, Leg::Reply) {
            let reply = self.call(slot).reply.take();
            self.graves.extend(reply.map(Grave::Reply));
            self.release(slot);
        }
    }

    fn reply_arrived(&mut self, slot: u32) {
        let (callee, caller, method, len) = self.ends(slot, Leg::Reply);
        let now = self.now;
        let call = self.call(slot);
        let reply = call.reply.take().expect("a reply travels with its content");
        let mut transit_ns = call.request_transit_ns + (now - call.reply_sent_at);
        let (callee_incarnation, is_given_up) = (call.to_incarnation, call.is_given_up);
        let caller_incarnation = call.from_incarnation;
        if is_given_up || !self.is_current(caller, caller_incarnation) {
            self.graves.push(Grave::Reply(reply));
            return self.lost(callee, caller, method, len);
        }
        if !self.is_current(callee, callee_incarnation) {
            self.graves.push(Grave::Reply(reply));
            self.lost(callee, caller, method, len);
            if !self.hosts[callee as usize].is_silent {
                let text = "the connection broke".to_owned();
                self.settle(slot, Err(CallError::Unreachable(text)));
            }
            return;
        }
        self.record(EventKind::Reply, callee, caller, method, len);
        if self.config.connections != Connections::Instant {
            // `net` measures by pings, which neither windows nor handshakes delay.
            let there = self.base_latency_ns(caller, callee);
            transit_ns = there.saturating_add(self.base_latency_ns(callee, caller));
        }
        self.measured(caller, callee, transit_ns);
        self.settle(slot, reply);
    }

    // ---- round trips ----

    /// Smooths as TCP does (RFC 6298): an eighth of each new sample.
    fn measured(&mut self, caller: u32, callee: u32, transit_ns: u64) {
        let sample_us = u32::try_from(transit_ns / 1000).unwrap_or(u32::MAX);
        let table = &mut self.hosts[caller as usize].round_trips;
        match table.binary_search_by_key(&callee, |(host, _)| *host) {
            Ok(at) => {
                let smoothed = u64::from(table[at].1) * 7 + u64::from(sample_us);
                table[at].1 = (smoothed / 8) as u32;
            }
            Err(at) if table.len() < MAX_ROUND_TRIPS => table.insert(at, (callee, sample_us)),
            Err(_) => {
                // Full: another entry is forgotten, which the newcomer's number picks.
                let victim = (callee as usize).wrapping_mul(0x9e37_79b1) % table.len();
                table.remove(victim);
                let at = table.partition_point(|(host, _)| *host < callee);
                table.insert(at, (callee, sample_us));
            }
        }
    }

    pub(crate) fn round_trip(&self, caller: u32, callee: u32) -> Option<Duration> {
        let table = &self.hosts[caller as usize].round_trips;
        let at = table.binary_search_by_key(&callee, |(host, _)| *host).ok()?;
        Some(Duration::from_micros(u64::from(table[at].1)))
    }
}
