//! Which peers may be connected with: the transport asks, the owner of the network's state answers.

use atoll_key::PeerId;

use crate::Peer;
use crate::hello::{Secret, Secrets, Verdict};

/// What a peer has proven by its hello.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Proven {
    /// Which of our secrets it knows.
    pub secret: Secret,
    /// The protocol version spoken with it: the highest that both speak.
    pub version: u16,
}

/// What becomes of a peer that proved a secret.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Admission {
    /// It is a member.
    Member,
    /// It was removed from the network.
    Removed,
    /// It knows only a secret that has been replaced, and that does not do for it.
    SecretReplaced,
}

/// The network's secrets and its members. Answers at once, from memory.
pub trait Members: Send + Sync + 'static {
    /// The secrets to prove and to recognise.
    fn secrets(&self) -> Secrets;

    /// Whether the network has removed this node: it is not dialled.
    fn is_removed(&self, id: &PeerId) -> bool;

    /// `peer` has proven a secret, and itself: whether calls may follow.
    fn admit(&self, peer: Peer, proven: Proven) -> Admission;

    /// A peer that proved a secret refuses this node: [`Verdict::Removed`] or
    /// [`Verdict::SecretReplaced`].
    fn refused_by(&self, by: Peer, verdict: Verdict);
}

/// A network whose secret never changes, and whose every holder is a member.
impl Members for [u8; 32] {
    fn secrets(&self) -> Secrets {
        Secrets::from(*self)
    }

    fn is_removed(&self, _: &PeerId) -> bool {
        false
    }

    fn admit(&self, _: Peer, _: Proven) -> Admission {
        Admission::Member
    }

    fn refused_by(&self, _: Peer, _: Verdict) {}
}
