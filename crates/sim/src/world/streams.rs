//! Connections of the simulated network: messages as bytes of a TCP stream.
//!
//! With [`crate::Connections::Tcp`] two hosts share one connection, opened by the first
//! message between them. Its bytes leave in chunks of a few segments as the sender's
//! window ([`crate::flow`]) and pace allow, queue at the sender's uplink and the receiver's
//! downlink in order of arrival, are dropped there when too much waits, and are
//! acknowledged half a round trip after they arrive.
//!
//! ```text
//! queue ─pump─► uplink ─latency─► Down: downlink ─► Arrive ─latency─► Acked
//!                  └─ full ────────────└─ full ──────────────────────► Lost: again
//! ```
//!
//! Invariants: a message arrives when all bytes before it on its connection have; small
//! messages pass large ones that have not begun, as in `net`'s multiplexer; a chunk in
//! flight is a slot of `World::chunks` until it is acknowledged.
//!
//! A crash ends the connections of a host: the next message opens a new one. Messages
//! under way still travel, and are void where they arrive. Cuts and chance apply to whole
//! messages, as without connections.

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use super::network::transmission_ns;
use super::{Grave, Shared, World};
use crate::Connections;
use crate::flow::{Flow, Mark};
use crate::schedule::{Hop, Leg, What};
use crate::tcp::TcpModel;

/// Messages up to this size go before larger ones.
const SMALL_BYTES: u64 = atoll_net::mux::SMALL_BYTES as u64;

/// What is over when its last byte has arrived.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Cargo {
    Message(u32, Leg),
    Transfer(u32),
}

#[derive(Debug)]
struct Queued {
    cargo: Cargo,
    left_bytes: u64,
    is_small: bool,
}

/// A piece of a stream.
#[derive(Debug)]
struct Piece {
    number: u64,
    bytes: u64,
    /// What ends with it.
    ends: Option<Cargo>,
}

/// A piece under way.
#[derive(Debug)]
pub(crate) struct Chunk {
    connection: u32,
    side: u8,
    piece: Piece,
    mark: Mark,
    /// When the last byte is through the uplink, latency added.
    tail_at: u64,
    has_arrived: bool,
}

/// One direction of a connection.
#[derive(Debug)]
struct Side {
    from: u32,
    to: u32,
    flow: Flow,
    /// When the handshake lets it send.
    opens_at: u64,
    /// A message of which some has been sent.
    begun: Option<Queued>,
    small: VecDeque<Queued>,
    bulk: VecDeque<Queued>,
    /// Lost pieces.
    again: VecDeque<Piece>,
    /// When a pump is scheduled; none if zero.
    pump_at: u64,
    next_number: u64,
    next_arrival: u64,
    /// What has arrived before something that was sent earlier.
    early: BTreeMap<u64, Option<Cargo>>,
    chunk_count: u32,
}

/// A TCP connection.
#[derive(Debug)]
pub(crate) struct Connection {
    model: TcpModel,
    sides: [Side; 2],
    /// Whether it is the one of its two hosts' calls.
    is_shared: bool,
}

/// A raw stream of bytes, as FTP would send a file.
#[derive(Debug)]
pub(crate) struct Transfer {
    arrived_at: Option<u64>,
    waker: Option<Waker>,
}

impl Side {
    fn new(model: &TcpModel, (from, to): (u32, u32), now: u64, opens_at: u64, rtt: u64) -> Side {
        Side {
            from,
            to,
            flow: Flow::new(model, now, rtt),
            opens_at,
            begun: None,
            small: VecDeque::new(),
            bulk: VecDeque::new(),
            again: VecDeque::new(),
            pump_at: 0,
            next_number: 0,
            next_arrival: 0,
            early: BTreeMap::new(),
            chunk_count: 0,
        }
    }

    fn queue(&mut self, cargo: Cargo, len_bytes: u64) {
        let is_small = len_bytes <= SMALL_BYTES;
        let queue = if is_small { &mut self.small } else { &mut self.bulk };
        queue.push_back(Queued { cargo, left_bytes: len_bytes.max(1), is_small });
    }

    fn has_queued(&self) -> bool {
        self.begun.is_some()
            || !(self.small.is_empty() && self.bulk.is_empty() && self.again.is_empty())
    }

    fn is_idle(&self) -> bool {
        !self.has_queued() && self.chunk_count == 0 && self.pump_at == 0
    }

    /// Takes back a message of which nothing has been sent.
    fn unqueue(&mut self, cargo: Cargo) -> bool {
        for queue in [&mut self.small, &mut self.bulk] {
            if let Some(at) = queue.iter().position(|queued| queued.cargo == cargo) {
                queue.remove(at);
                return true;
            }
        }
        false
    }

    /// The next piece that may be sent, if the window has room for one.
    fn next_piece(&mut self, model: &TcpModel) -> Option<Piece> {
        let room = if self.flow.is_idle() { u64::MAX } else { self.flow.room() };
        if let Some(lost) = self.again.front() {
            return if lost.bytes <= room { self.again.pop_front() } else { None };
        }
        if self.begun.is_none() {
            self.begun = self.small.pop_front().or_else(|| self.bulk.pop_front());
        }
        let message = self.begun.as_mut()?;
        let segment = u64::from(model.segment_bytes.max(1));
        let most = self.flow.chunk_bytes(model).min(room.max(segment) / segment * segment);
        let bytes = message.left_bytes.min(most);
        if bytes > room {
            return None;
        }
        message.left_bytes -= bytes;
        let ends = (message.left_bytes == 0).then_some(message.cargo);
        if ends.is_some() {
            self.begun = None;
        }
        let number = self.next_number;
        self.next_number += 1;
        Some(Piece { number, bytes, ends })
    }

    /// Puts back a message that was taken up and not begun: smaller ones may pass it.
    fn put_back(&mut self) {
        if let Some(message) = self.begun.take() {
            let queue = if message.is_small { &mut self.small } else { &mut self.bulk };
            queue.push_front(message);
        }
    }

    fn cargoes(&self) -> impl Iterator<Item = Cargo> {
        let queued = self.begun.iter().chain(&self.small).chain(&self.bulk);
        let early = self.early.values().chain(self.again.iter().map(|piece| &piece.ends));
        queued.map(|queued| queued.cargo).chain(early.filter_map(|ends| *ends))
    }
}

fn sorted(a: u32, b: u32) -> (u32, u32) {
    (a.min(b), a.max(b))
}

impl World {
    // ---- connections ----

    /// Opens a connection; the handshake begins now.
    fn connect(&mut self, from: u32, to: u32, model: TcpModel, is_shared: bool) -> u32 {
        let there = self.base_latency_ns(from, to);
        let rtt = there.saturating_add(self.base_latency_ns(to, from));
        // Where no host listens the first segment is refused.
        let rounds = if self.host(to).is_up { model.handshake_round_trips } else { 0 };
        let opens_at = self.now.saturating_add(rtt.saturating_mul(u64::from(rounds)));
        let heard_at = opens_at.saturating_add(there);
        let side = |ends, opens_at| Side::new(&model, ends, self.now, opens_at, rtt);
        let sides = [side((from, to), opens_at), side((to, from), heard_at)];
        let connection = self.connections.insert(Connection { model, sides, is_shared });
        self.stats.connection_count += 1;
        if is_shared {
            self.connection_of.insert(sorted(from, to), connection);
        }
        connection
    }

    /// Puts a leg of a call on the connection of its hosts.
    pub(crate) fn send_by_tcp(&mut self, slot: u32, leg: Leg, len_bytes: u64, model: TcpModel) {
        let (from, to) = self.hosts_of(slot, leg);
        let known = self.connection_of.get(&sorted(from, to)).copied();
        let connection = known.unwrap_or_else(|| self.connect(from, to, model, true));
        let cargo = Cargo::Message(slot, leg);
        let side = self.connection(connection).side_from(from);
        self.connection(connection).sides[side].queue(cargo, len_bytes);
        self.pump(connection, side);
    }

    fn connection(&mut self, connection: u32) -> &mut Connection {
        self.connections.find_mut(connection).expect("its chunks and pumps keep it")
    }

    /// Whether `host` has an open connection with `other`, whose handshake is over.
    pub(crate) fn is_connected(&self, host: u32, other: u32) -> bool {
        if self.config.connections == Connections::Instant {
            return self.host(host).is_up && self.host(other).is_up;
        }
        let known = self.connection_of.get(&sorted(host, other));
        known.and_then(|connection| self.connections.find(*connection)).is_some_and(|known| {
            let side = &known.sides[known.side_from(host)];
            side.opens_at <= self.now
        })
    }

    /// Forgets the connections of a host that crashed.
    pub(crate) fn break_connections_of(&mut self, host: u32) {
        let broken = |(a, b): &(u32, u32)| *a == host || *b == host;
        let gone: Vec<_> = self.connection_of.keys().copied().filter(broken).collect();
        for pair in gone {
            let connection = self.connection_of.remove(&pair).expect("it was just found");
            self.connection(connection).is_shared = false;
            self.drop_if_over(connection);
        }
    }

    fn drop_if_over(&mut self, connection: u32) {
        let known = self.connection(connection);
        if !known.is_shared && known.sides.iter().all(Side::is_idle) {
            self.connections.remove(connection);
        }
    }

    /// Takes back a message of which nothing has been sent; its hold on the call goes to
    /// the caller of this.
    pub(crate) fn unsend(&mut self, slot: u32, leg: Leg) -> bool {
        if self.connection_of.is_empty() {
            return false;
        }
        let (from, to) = self.hosts_of(slot, leg);
        let Some(connection) = self.connection_of.get(&sorted(from, to)).copied() else {
            return false;
        };
        let side = self.connection(connection).side_from(from);
        self.connection(connection).sides[side].unqueue(Cargo::Message(slot, leg))
    }

    // ---- sending ----

    /// Sends what the window and the pace allow.
    pub(crate) fn pump(&mut self, connection: u32, side: usize) {
        let now = self.now;
        loop {
            let Connection { model, sides, .. } = self.connection(connection);
            let (model, side_state) = (*model, &mut sides[side]);
            if !side_state.has_queued() {
                return;
            }
            let free_at = side_state.opens_at.max(side_state.flow.paced_until(&model));
            if free_at > now {
                if side_state.pump_at == 0 {
                    side_state.pump_at = free_at;
                    self.schedule.push(free_at, What::Pump(connection, side as u8));
                }
                return;
            }
            side_state.flow.resume(&model, now);
            let had_begun = side_state.begun.is_some();
            let Some(piece) = side_state.next_piece(&model) else {
                if !had_begun {
                    side_state.put_back();
                }
                return;
            };
            let has_more = side_state.has_queued();
            let mark = side_state.flow.on_sent(piece.bytes, has_more, now);
            side_state.chunk_count += 1;
            let chunk =
                Chunk { connection, side: side as u8, piece, mark, tail_at: 0, has_arrived: false };
            self.transmit(chunk, &model);
        }
    }

    pub(crate) fn pump_due(&mut self, connection: u32, side: u8) -> u32 {
        let known = &mut self.connection(connection).sides[usize::from(side)];
        known.pump_at = 0;
        let from = known.from;
        self.pump(connection, usize::from(side));
        self.drop_if_over(connection);
        from
    }

    /// Through the uplink, if there is room in its queue.
    fn transmit(&mut self, mut chunk: Chunk, model: &TcpModel) {
        let now = self.now;
        let side = &self.connection(chunk.connection).sides[usize::from(chunk.side)];
        let (from, to) = (side.from, side.to);
        let wire_bytes = model.wire_bytes(chunk.piece.bytes);
        let latency = self.latency_ns(from, to);
        let back = self.base_latency_ns(to, from);
        let uplink = &mut self.hosts[from as usize];
        let rate = uplink.upload_bytes_per_sec;
        let free_at = if rate.is_some() { uplink.uplink_free_at } else { now };
        let start = now.max(free_at);
        let is_lost =
            overflows(start - now, rate, wire_bytes, model) || self.chance_loses(model, &chunk);
        if is_lost {
            let slot = self.chunks.insert(chunk);
            let noticed_at = start.saturating_add(latency).saturating_add(back);
            self.schedule.push(noticed_at, What::Chunk(slot, Hop::Lost));
            return;
        }
        let sent = start.saturating_add(transmission_ns(wire_bytes as usize, rate));
        let uplink = &mut self.hosts[from as usize];
        if rate.is_some() {
            uplink.uplink_free_at = sent;
        }
        chunk.tail_at = sent.saturating_add(latency);
        let (head_at, tail_at) = (start.saturating_add(latency), chunk.tail_at);
        let slot = self.chunks.insert(chunk);
        if self.hosts[to as usize].download_bytes_per_sec.is_some() {
            self.schedule.push(head_at, What::Chunk(slot, Hop::Down));
        } else {
            self.schedule.push(tail_at, What::Chunk(slot, Hop::Arrive));
        }
    }

    fn chance_loses(&mut self, model: &TcpModel, chunk: &Chunk) -> bool {
        if model.segment_loss <= 0.0 {
            return false;
        }
        let segments = chunk.piece.bytes.div_ceil(u64::from(model.segment_bytes.max(1)));
        let kept = (1.0 - model.segment_loss).powi(i32::try_from(segments).unwrap_or(i32::MAX));
        self.network_random.unit() >= kept
    }

    // ---- under way ----

    /// A chunk is somewhere; returns the host it happened to.
    pub(crate) fn chunk_is_at(&mut self, slot: u32, hop: Hop) -> u32 {
        let chunk = self.chunks.find(slot).expect("a chunk is kept until it is done");
        let (connection, side) = (chunk.connection, usize::from(chunk.side));
        let known = &self.connection(connection).sides[side];
        let (from, to) = (known.from, known.to);
        match hop {
            Hop::Down => {
                self.chunk_at_downlink(slot, to, from);
                to
            }
            Hop::Arrive => {
                let chunk = self.chunks.find_mut(slot).expect("it was just found");
                chunk.has_arrived = true;
                let (number, ends) = (chunk.piece.number, chunk.piece.ends.take());
                self.piece_arrived(connection, side, number, ends);
                let acked_at = self.now.saturating_add(self.base_latency_ns(to, from));
                self.schedule.push(acked_at, What::Chunk(slot, Hop::Acked));
                to
            }
            Hop::Acked | Hop::Lost => {
                let chunk = self.chunks.remove(slot).expect("it was just found");
                let now = self.now;
                let Connection { model, sides, .. } = self.connection(connection);
                let side_state = &mut sides[side];
                side_state.chunk_count -= 1;
                if hop == Hop::Acked {
                    side_state.flow.on_acked(model, &chunk.mark, now);
                } else {
                    side_state.flow.on_lost(model, &chunk.mark, now);
                    side_state.again.push_back(chunk.piece);
                    self.stats.lost_chunk_count += 1;
                }
                self.pump(connection, side);
                self.drop_if_over(connection);
                from
            }
        }
    }

    fn chunk_at_downlink(&mut self, slot: u32, to: u32, from: u32) {
        let now = self.now;
        let chunk = self.chunks.find(slot).expect("a chunk is kept until it is done");
        let (tail_at, bytes, connection) = (chunk.tail_at, chunk.piece.bytes, chunk.connection);
        let model = self.connection(connection).model;
        let wire_bytes = model.wire_bytes(bytes);
        let back = self.base_latency_ns(to, from);
        let host = &mut self.hosts[to as usize];
        let rate = host.download_bytes_per_sec;
        let start = now.max(host.downlink_free_at);
        if overflows(start - now, rate, wire_bytes, &model) {
            self.schedule.push(start.saturating_add(back), What::Chunk(slot, Hop::Lost));
            return;
        }
        let taken = start.saturating_add(transmission_ns(wire_bytes as usize, rate));
        let arrives = taken.max(tail_at);
        host.downlink_free_at = taken;
        self.schedule.push(arrives, What::Chunk(slot, Hop::Arrive));
    }

    /// Delivers what is complete, in the order in which it was sent.
    fn piece_arrived(&mut self, connection: u32, side: usize, number: u64, ends: Option<Cargo>) {
        let state = &mut self.connection(connection).sides[side];
        state.early.insert(number, ends);
        let mut complete = Vec::new();
        while let Some(ends) = state.early.remove(&state.next_arrival) {
            state.next_arrival += 1;
            complete.extend(ends);
        }
        let now = self.now;
        for cargo in complete {
            match cargo {
                Cargo::Message(slot, leg) => {
                    self.schedule.push(now, What::Arrive(slot, leg));
                }
                Cargo::Transfer(transfer) => {
                    if let Some(transfer) = self.transfers.find_mut(transfer) {
                        transfer.arrived_at = Some(now);
                        let waker = transfer.waker.take();
                        self.wakes.extend(waker);
                    }
                }
            }
        }
    }

    /// Messages that connections hold.
    pub(crate) fn messages_on_connections(&self) -> impl Iterator<Item = u32> {
        let sides = self.connections.iter().flat_map(|(_, known)| &known.sides);
        let held = sides.flat_map(Side::cargoes);
        let flying = self.chunks.iter().filter_map(|(_, chunk)| chunk.piece.ends);
        held.chain(flying).filter_map(|cargo| match cargo {
            Cargo::Message(slot, _) => Some(slot),
            Cargo::Transfer(_) => None,
        })
    }

    // ---- transfers ----

    fn start_transfer(&mut self, server: u32, client: u32, len: u64, model: TcpModel) -> u32 {
        let transfer = self.transfers.insert(Transfer { arrived_at: None, waker: None });
        let connection = self.connect(client, server, model, false);
        // The side that was connected to.
        self.connection(connection).sides[1].queue(Cargo::Transfer(transfer), len);
        self.pump(connection, 1);
        transfer
    }
}

impl Connection {
    fn side_from(&self, host: u32) -> usize {
        usize::from(self.sides[0].from != host)
    }
}

/// Whether a link's queue has no room for so many bytes more.
fn overflows(waiting_ns: u64, rate: Option<u64>, wire_bytes: u64, model: &TcpModel) -> bool {
    let (Some(rate), Some(most)) = (rate, model.queue_bytes) else { return false };
    let waiting = u128::from(waiting_ns) * u128::from(rate) / 1_000_000_000;
    waiting > 0 && waiting + u128::from(wire_bytes) > u128::from(most)
}

/// A transfer under way: see [`crate::Sim::transfer`].
pub(crate) struct Fetch {
    pub(crate) shared: Arc<Shared>,
    /// Server, client, bytes and model, until it has begun.
    pub(crate) wanted: Option<(u32, u32, u64, TcpModel)>,
    pub(crate) began: u64,
    pub(crate) transfer: u32,
}

impl Future for Fetch {
    type Output = Duration;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Duration> {
        let this = &mut *self;
        this.shared.with(|world| {
            if let Some((server, client, len, model)) = this.wanted.take() {
                this.began = world.now;
                this.transfer = world.start_transfer(server, client, len, model);
            }
            let known = world.transfers.find_mut(this.transfer).expect("held until dropped");
            if let Some(at) = known.arrived_at {
                return Poll::Ready(Duration::from_nanos(at - this.began));
            }
            let old = known.waker.replace(cx.waker().clone());
            world.graves.extend(old.map(Grave::Waker));
            Poll::Pending
        })
    }
}

impl Drop for Fetch {
    fn drop(&mut self) {
        if self.wanted.is_none() {
            self.shared.with(|world| {
                let gone = world.transfers.remove(self.transfer);
                world.graves.extend(gone.and_then(|gone| gone.waker).map(Grave::Waker));
            });
        }
    }
}
