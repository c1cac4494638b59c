//! How the concurrent versions of an inode rank after it was rebound.
//!
//! A version is *late* if another one was written under a newer binding. Its writer has not known of that binding, or was shut
//! out by it: the node of a former member can take what replicas that know better refuse, and repair carries it to them, with
//! whatever time, height and context its writer has signed. So a late version says what it adds and takes nothing away, and
//! comes after the others in every order.
//!
//! A mount trusts its own user: what was written before the user knew of a binding is shown here as it was written, until it
//! is signed again under the newest binding, or always if the user may not write any more. The owner, who rebinds, trusts the
//! members who remain.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use atoll_key::UserId;
use atoll_key::kinds::certified::{CertifiedBlock, Sibling, WriterId};

/// Users whose late versions count as if they were written under the newest binding.
pub type Trusted = BTreeSet<UserId>;

/// How the siblings of a block rank.
#[derive(Clone, Copy, Debug)]
pub struct Standing<'a> {
    newest: u32,
    trusted: &'a Trusted,
}

impl<'a> Standing<'a> {
    /// Of the siblings of a block.
    pub fn of(block: &CertifiedBlock, trusted: &'a Trusted) -> Standing<'a> {
        let newest = block.siblings().iter().map(|sibling| sibling.binding_version).max();
        Standing { newest: newest.unwrap_or(0), trusted }
    }

    /// The newest version of a binding that a sibling was written under.
    pub fn newest(&self) -> u32 {
        self.newest
    }

    /// The version of the binding that a sibling counts as written under.
    pub fn binding_version(&self, sibling: &Sibling) -> u32 {
        match self.trusted.contains(&sibling.certificate.user) {
            true => self.newest,
            false => sibling.binding_version,
        }
    }

    /// Whether it was written under an older binding than another one.
    pub fn is_late(&self, sibling: &Sibling) -> bool {
        self.binding_version(sibling) < self.newest
    }

    /// Of two the greater leads: of two under one binding the higher, of two equal ones that written later.
    pub fn precedence(&self, sibling: &Sibling) -> (u32, u64, u64, WriterId) {
        let dot = sibling.dot;
        (self.binding_version(sibling), dot.height, sibling.time_ms, dot.writer)
    }

    /// The siblings of the block, the leading one first.
    pub fn leading_first<'b>(
        &self,
        block: &'b CertifiedBlock,
    ) -> impl Iterator<Item = &'b Sibling> + use<'b> {
        let mut siblings: Vec<&Sibling> = block.siblings().iter().collect();
        siblings.sort_by_key(|sibling| Reverse(self.precedence(sibling)));
        siblings.into_iter()
    }
}
