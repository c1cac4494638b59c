//! Membership of the network: its secret, which can be replaced while the network runs, and the
//! nodes that were removed from it. `docs/design/membership.md` says what that guarantees.
//!
//! - [`record`] is the state as the network's administrator signs it;
//! - [`known`] are the members that this node has met;
//! - [`spread`] hands the record from node to node;
//! - [`admin`] makes a new one, on the node that holds the administrator's key.
//!
//! The rules, which the transport asks for each connection ([`Members`]):
//!
//! 1. The record of the highest epoch counts. It is on disk before anything follows it.
//! 2. The current secret admits every node that was not removed.
//! 3. The former secret admits, for a time, only nodes that this one had met before the
//!    record was issued: a join code that leaked is worth nothing from then on.
//! 4. The record, which carries the new secret, is given only to nodes that 2 or 3 admit.

mod admin;
mod known;
mod record;
mod spread;
mod subsystem;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard};

use atoll_env::{Env, Notify};
use atoll_key::PeerId;
use atoll_net::{Admission, Members, Peer, Proven, Secret, Secrets, Verdict};

use self::known::KnownMembers;
use crate::dir::{self, DirError, NodeDir};
use crate::network::Network;
use crate::status::{Member, MemberList};

pub(crate) use admin::open_admin_key;
pub(crate) use known::KnownList;
pub(crate) use record::{EXAMPLE_ADMIN, MAX_OVERLAP, MIN_OVERLAP, Record, example_record};
pub(crate) use spread::{FAMILY, MembershipService};
pub(crate) use subsystem::NetworkMembers;

/// The network's state on this node.
pub(crate) struct Membership {
    env: Env,
    dir: NodeDir,
    me: PeerId,
    /// As the directory's `network.cbor` has it: a record may be newer.
    network: Network,
    state: Mutex<State>,
    /// One record is written at a time.
    writing: Mutex<()>,
    /// Notified when there is a new record, or a new peer to compare it with.
    news: Notify,
}

#[derive(Default)]
struct State {
    record: Option<Record>,
    known: KnownMembers,
    /// Whether `known` should be written down.
    is_unsaved: bool,
    /// Connected nodes that are known to have our record, or not to know of records.
    told: BTreeMap<PeerId, u64>,
    /// Records offered that are not the administrator's.
    refused_records: u64,
    /// The peer that refuses this node, and why.
    refused_by: Option<(Peer, Verdict)>,
}

impl State {
    /// Whether this node had met `id` before the present record was issued.
    fn met_before_issue(&self, id: &PeerId) -> bool {
        let Some(record) = &self.record else { return true };
        let known = self.known.get(id);
        known.is_some_and(|known| known.first_seen_unix_ms <= record.issued_unix_ms)
    }

    fn is_removed(&self, id: &PeerId) -> bool {
        self.record.as_ref().is_some_and(|record| record.removed.contains(id))
    }

    fn record_epoch(&self) -> u64 {
        self.record.as_ref().map_or(0, |record| record.epoch)
    }
}

impl Membership {
    /// Reads what the directory says.
    pub(crate) fn open(
        env: Env,
        dir: &NodeDir,
        me: PeerId,
        network: Network,
    ) -> Result<Membership, DirError> {
        let record = load_record(dir, &network)?;
        let known = KnownMembers::load(dir).unwrap_or_else(|error| {
            // Only a memory: peers that are connected are met again at once.
            tracing::warn!("{error}");
            KnownMembers::default()
        });
        let state = Mutex::new(State { record, known, ..State::default() });
        let (dir, writing, news) = (dir.clone(), Mutex::default(), Notify::default());
        Ok(Membership { env, dir, me, network, state, writing, news })
    }

    /// The network with the secret that counts now, for a join code.
    pub(crate) fn network(&self) -> Network {
        let state = self.lock();
        let Network { secret, epoch, .. } = self.network;
        let (epoch, secret) = match &state.record {
            Some(record) if record.epoch >= epoch => (record.epoch, record.secret),
            _ => (epoch, secret),
        };
        Network { secret, epoch, ..self.network.clone() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// Whether the record, and with it the secret, may be given to `id`.
    fn may_know(&self, id: &PeerId) -> bool {
        let epoch = self.network().epoch;
        let state = self.lock();
        let proven = state.known.get(id).is_some_and(|known| known.epoch >= epoch);
        let met = state.known.get(id).is_some() && state.met_before_issue(id);
        !state.is_removed(id) && (proven || met)
    }

    /// Takes a record over if the administrator signed it and it is newer than the present one;
    /// returns whether it did. The record is on disk then. Blocks on the disk.
    fn take_over(&self, bytes: &[u8]) -> Result<bool, String> {
        let record =
            Record::decode(bytes, &self.network.admin).map_err(|error| error.to_string())?;
        let _one_at_a_time = self.writing.lock().expect("no holder of this lock panics");
        if self.lock().record.as_ref().is_some_and(|held| held.rank() >= record.rank()) {
            return Ok(false);
        }
        dir::write_atomically(&self.dir.membership(), bytes).map_err(|error| error.to_string())?;
        let (epoch, removed) = (record.epoch, record.removed.len());
        let mut state = self.lock();
        state.record = Some(record);
        state.told.clear();
        state.refused_by = None;
        drop(state);
        tracing::info!(epoch, removed, "the network's secret was replaced");
        self.news.notify();
        Ok(true)
    }

    /// Whether an offered record may be newer than the present one, judged by its epoch alone:
    /// verifying its signature costs more.
    fn may_be_newer(&self, bytes: &[u8]) -> bool {
        let state = self.lock();
        let is_held = |held: &Record| {
            record::epoch_of(bytes).is_none_or(|epoch| epoch < held.epoch) || held.bytes() == bytes
        };
        !state.record.as_ref().is_some_and(is_held)
    }

    /// Counts a record that the administrator did not sign, and returns whether to log it: the
    /// 1st, 2nd, 4th, 8th and so on, so that no member can fill the disk with log lines.
    fn count_refused_record(&self) -> bool {
        let mut state = self.lock();
        state.refused_records += 1;
        state.refused_records.is_power_of_two()
    }

    /// Writes down which members are known and when they were seen. Blocks on the disk.
    pub(crate) fn save_all(&self) {
        self.lock().is_unsaved = true;
        self.save_known();
    }

    /// The same, if others are known than when it was last written. Blocks on the disk.
    fn save_known(&self) {
        let mut state = self.lock();
        if !std::mem::take(&mut state.is_unsaved) {
            return;
        }
        let known = state.known.clone();
        drop(state);
        if let Err(error) = known.save(&self.dir) {
            tracing::warn!("cannot remember the members: {error}");
        }
    }

    /// A warning for people, if this node is no longer a member.
    pub(crate) fn warning(&self) -> Option<String> {
        let state = self.lock();
        if state.is_removed(&self.me) {
            return Some("this node was removed from the network".into());
        }
        let (by, verdict) = state.refused_by?;
        Some(match verdict {
            Verdict::Removed => format!("the node at {} says that this one was removed", by.addr),
            _ => format!(
                "the node at {} says that the network's secret was replaced while this node was \
                 away: start it with a new code, `atoll up --join CODE`",
                by.addr
            ),
        })
    }

    /// The members, as far as this node knows them; `in_tables` are known to the overlay,
    /// `connected` have an open connection. Changes nothing.
    pub(crate) fn list(&self, me: Peer, in_tables: &[Peer], connected: &[PeerId]) -> MemberList {
        let now = self.env.unix_ms();
        let network = self.network();
        let is_admin = self.dir.admin_key().exists();
        let state = self.lock();
        let mut members: BTreeMap<PeerId, Member> = BTreeMap::new();
        for peer in in_tables {
            members.insert(peer.id, member(peer, "known", 0));
        }
        for known in state.known.iter() {
            let Peer { id, .. } = known.peer.0;
            let (status, seen_ms) = match connected.contains(&id) {
                true => ("connected", now),
                false => ("away", known.last_seen_unix_ms),
            };
            let seen_secs = seen_ms / 1000;
            let version = known.version;
            members.insert(id, Member { version, ..member(&known.peer.0, status, seen_secs) });
        }
        for id in state.record.iter().flat_map(|record| &record.removed) {
            let removed = members.entry(*id).or_insert_with(|| Member {
                id: data_encoding::HEXLOWER.encode(&id.0),
                ..Member::default()
            });
            removed.status = "removed".into();
        }
        members.insert(me.id, member(&me, "this node", now / 1000));
        let record = state.record.as_ref().filter(|record| record.epoch == network.epoch);
        let former = record.filter(|record| now < record.former_until_unix_ms);
        MemberList {
            network_id: network.id().to_string(),
            epoch: network.epoch,
            replaced_unix_secs: record.map(|record| record.issued_unix_ms / 1000),
            former_until_unix_secs: former.map(|record| record.former_until_unix_ms / 1000),
            is_admin,
            members: members.into_values().collect(),
        }
    }
}

fn member(peer: &Peer, status: &str, last_seen_unix_secs: u64) -> Member {
    Member {
        id: data_encoding::HEXLOWER.encode(&peer.id.0),
        addr: peer.addr.to_string(),
        status: status.into(),
        last_seen_unix_secs,
        version: 0,
    }
}

fn load_record(dir: &NodeDir, network: &Network) -> Result<Option<Record>, DirError> {
    let path = dir.membership();
    let Some(bytes) = dir::read_secret(&path)? else { return Ok(None) };
    if record::admin_of(&bytes) != Some(network.admin) {
        // The directory was given to another network before it held anything.
        return Ok(None);
    }
    let record = Record::decode(&bytes, &network.admin);
    record.map(Some).map_err(|error| DirError::damaged(path, error))
}

impl Members for Membership {
    fn secrets(&self) -> Secrets {
        let state = self.lock();
        match &state.record {
            Some(record) if record.epoch >= self.network.epoch => record.secrets(),
            // A join code brought a newer secret than the last record.
            _ => Secrets::from(self.network.secret),
        }
    }

    fn is_removed(&self, id: &PeerId) -> bool {
        self.lock().is_removed(id)
    }

    fn admit(&self, peer: Peer, proven: Proven) -> Admission {
        let now = self.env.unix_ms();
        let epoch = self.network().epoch;
        let mut state = self.lock();
        if state.is_removed(&peer.id) {
            return Admission::Removed;
        }
        let epoch = match proven.secret {
            Secret::Current => epoch,
            Secret::Former => {
                let in_time = |record: &Record| now < record.former_until_unix_ms;
                let in_time = state.record.as_ref().is_some_and(in_time);
                if !in_time || !state.met_before_issue(&peer.id) {
                    return Admission::SecretReplaced;
                }
                0
            }
        };
        // A copy of this node's directory has its key: no other member.
        if peer.id != self.me {
            let changed = state.known.note(peer, epoch, proven.version, now);
            state.is_unsaved |= changed;
        }
        if state.refused_by.is_some_and(|(by, _)| by.id == peer.id) {
            state.refused_by = None;
        }
        drop(state);
        self.news.notify();
        Admission::Member
    }

    fn refused_by(&self, by: Peer, verdict: Verdict) {
        let mut state = self.lock();
        let before = state.refused_by.replace((by, verdict));
        if before.is_none() {
            drop(state);
            self.warning().into_iter().for_each(|warning| tracing::warn!("{warning}"));
        }
    }
}

impl fmt::Debug for Membership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Membership({:?})", self.network())
    }
}
