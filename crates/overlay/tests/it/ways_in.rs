//! The ways by which liars might come into tables, beside those that [`super::liars`] tries:
//! the peers of an invite, the nodes that peers name, rings that meet.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};

use atoll_key::{IdProfile, PeerId};
use atoll_net::Peer;
use atoll_overlay::chord::{Chord, ChordConfig};
use atoll_overlay::{Node, Overlay};
use atoll_sim::HostId;

use super::cluster::MINUTE;
use super::liars::{MAX_INDEX, Siege, config};

const PROFILES: [IdProfile; 2] = [IdProfile::Address, IdProfile::Identity];

impl Siege {
    fn liars_addresses(&self) -> Vec<Peer> {
        self.liars.iter().map(|(host, ..)| self.cluster.peer(*host)).collect()
    }

    /// The nodes in an honest node's tables that should not be there. Of next hops less is demanded
    /// than of neighbours where positions follow from keys: a node that has answered has the key,
    /// and with it the places of all its indices, whether it says that it runs them or not.
    fn admitted(&self, given: &[Peer]) -> BTreeSet<Node> {
        let may_answer = |node: &Node| {
            let is_its_own = self.liars_addresses().contains(&node.peer);
            is_its_own
                && node.virtual_server.profile == IdProfile::Identity
                && node.virtual_server.index < MAX_INDEX
        };
        let is_address = self.cluster.config.profile == IdProfile::Address;
        let mut admitted = self.neighbours_but(given);
        let next_hops = self.next_hops().into_iter();
        admitted.extend(next_hops.filter(|node| is_address || !may_answer(node)));
        admitted
    }

    /// Has the liars answer questions for the nodes they know.
    fn let_them_tell(&self) {
        *self.asked_for_nodes.lock().unwrap() = Some(0);
    }

    /// A node that remembers all liars, on no ring yet.
    fn newcomer(&self) -> HostId {
        let host = self.cluster.add();
        let (env, transport) = (self.cluster.sim.env(host), self.cluster.sim.transport(host));
        let remembered = self.liars_addresses();
        let config = ChordConfig { bootstrap: remembered, ..self.cluster.config.clone() };
        self.cluster.serve(host, Chord::new(env, transport, config));
        host
    }
}

#[test]
fn an_invite_that_names_liars_first_leads_onto_the_ring_and_admits_none() {
    for profile in PROFILES {
        let siege = Siege::lay(7, config(profile, true));
        siege.let_them_tell();
        let honest = siege.cluster.peer(siege.cluster.hosts()[3]);
        let ghost =
            Peer { id: PeerId([77; 32]), addr: SocketAddr::from((Ipv4Addr::new(10, 9, 0, 1), 1)) };
        let mut given = siege.liars_addresses();
        given.push(ghost);
        for round in 0..4 {
            let host = siege.newcomer();
            let mut invite = given.clone();
            invite.rotate_left(3 * round);
            invite.truncate(4);
            invite.push(honest);
            let chord = siege.cluster.chord(host);
            let join = async move { chord.join(invite).await };
            siege.cluster.sim.block_on(MINUTE * 5, join).unwrap().unwrap();
            siege.tell(round);
            siege.cluster.run_secs(1);
            assert_eq!(siege.admitted(&given), BTreeSet::new(), "{profile:?}");
        }
        // They look for other rings at those they remember.
        for _ in 0..20 {
            siege.cluster.run_secs(3);
            assert_eq!(siege.admitted(&given), BTreeSet::new(), "{profile:?}");
        }
        assert!(siege.is_at_rest(), "{profile:?}");
        siege.look_up_everywhere();
    }
}

#[test]
fn an_invite_that_names_liars_alone_leads_nowhere_and_admits_none() {
    for profile in PROFILES {
        let siege = Siege::lay(8, config(profile, true));
        siege.let_them_tell();
        let given = siege.liars_addresses();
        let host = siege.newcomer();
        let (chord, invite) = (siege.cluster.chord(host), given.clone());
        let join = async move { chord.join(invite).await };
        siege.cluster.sim.block_on(MINUTE * 5, join).unwrap().unwrap_err();
        assert!(!siege.cluster.chord(host).neighbourhood().joined);
        assert_eq!(siege.admitted(&given), BTreeSet::new(), "{profile:?}");
    }
}

/// Liars that can be reached lawfully are asked for the nodes they know, and name accomplices.
#[test]
fn nodes_that_liars_name_are_not_admitted() {
    for profile in PROFILES {
        let siege = Siege::lay(9, config(profile, true));
        siege.let_them_tell();
        for round in 0..60 {
            if round % 5 == 0 {
                siege.tell(round);
            }
            siege.cluster.run_secs(2);
            assert_eq!(siege.admitted(&[]), BTreeSet::new(), "{profile:?}, round {round}");
        }
        // Where positions follow from addresses, only checked nodes are asked.
        let asked = siege.asked_for_nodes.lock().unwrap().unwrap_or(0);
        assert!(asked > 0 || profile == IdProfile::Address, "no node asks them");
        siege.look_up_everywhere();
    }
}

#[test]
fn two_rings_merge_without_the_liars_that_flood_both() {
    for profile in PROFILES {
        let siege = Siege::lay(10, config(profile, true));
        siege.let_them_tell();
        let hosts = siege.cluster.hosts();
        let (left, right) = hosts.split_at(hosts.len() / 2);
        let (mut left, mut right) = (left.to_vec(), right.to_vec());
        for (n, (host, ..)) in siege.liars.iter().enumerate() {
            if n % 2 == 0 { left.push(*host) } else { right.push(*host) }
        }
        siege.cluster.sim.partition(&[&left, &right]);
        for round in 0..30 {
            siege.tell(round);
            siege.cluster.run_secs(2);
            assert_eq!(siege.admitted(&[]), BTreeSet::new(), "{profile:?}, apart, round {round}");
        }
        assert!(!siege.is_at_rest(), "the halves have given each other up");
        siege.cluster.sim.heal();
        for round in 0..30 {
            siege.tell(round);
            siege.cluster.run_secs(2);
            assert_eq!(siege.admitted(&[]), BTreeSet::new(), "{profile:?}, healed, round {round}");
        }
        siege.cluster.run_secs(60);
        assert!(siege.is_at_rest(), "{profile:?}");
        siege.look_up_everywhere();
    }
}
