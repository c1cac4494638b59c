//! On whose behalf a call is made.

use std::fmt;

/// Most groups that a protocol lists (RFC 5531, `AUTH_SYS`).
const MAX_LISTED: usize = 16;

/// The user that a call is made for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Caller {
    /// User number.
    pub uid: u32,
    /// Number of the first group, which new files get.
    pub gid: u32,
    /// Process number, 0 if unknown.
    pub pid: u32,
    /// Permission bits that a new file shall not have, unless a default access control list
    /// of its directory says which it has. 0 where the front end has taken them away already.
    pub umask: u32,
    /// The other groups.
    pub groups: Groups,
}

impl Caller {
    /// Whether the caller is in this group. To be asked before the call is answered: see
    /// [`Groups::OnDemand`].
    pub fn is_member(&self, gid: u32) -> bool {
        self.gid == gid
            || match &self.groups {
                Groups::None => false,
                Groups::Listed(groups) => groups.as_slice().contains(&gid),
                Groups::OnDemand(find) => find(self).contains(&gid),
            }
    }
}

/// The groups of a caller beside the first.
#[derive(Clone, Copy, Default)]
pub enum Groups {
    /// None, or none that the front end can know.
    #[default]
    None,
    /// All of them, as the protocol named them (NFS: `AUTH_SYS`).
    Listed(ListedGroups),
    /// The front end finds them when asked, which takes a few system calls. The answer is right
    /// only until the call is answered: afterwards the process may have ended.
    OnDemand(fn(&Caller) -> Vec<u32>),
}

impl Groups {
    /// These groups; of more than 16 the first.
    pub fn listed(groups: &[u32]) -> Groups {
        let count = groups.len().min(MAX_LISTED);
        let mut listed = ListedGroups { count, groups: [0; MAX_LISTED] };
        listed.groups[..count].copy_from_slice(&groups[..count]);
        Groups::Listed(listed)
    }
}

/// As many groups as a protocol lists.
#[derive(Clone, Copy)]
pub struct ListedGroups {
    count: usize,
    groups: [u32; MAX_LISTED],
}

impl ListedGroups {
    /// The groups.
    pub fn as_slice(&self) -> &[u32] {
        &self.groups[..self.count]
    }
}

impl fmt::Debug for Groups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Groups::None => f.write_str("None"),
            Groups::Listed(groups) => groups.as_slice().fmt(f),
            Groups::OnDemand(_) => f.write_str("OnDemand"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_is_found_by_the_first_group_and_the_others() {
        let caller = |groups| Caller { gid: 5, groups, ..Caller::default() };
        let listed = caller(Groups::listed(&[7, 9]));
        let asked = caller(Groups::OnDemand(|caller| vec![caller.gid + 2, 9]));
        for caller in [&listed, &asked] {
            assert_eq!(
                [5, 6, 7, 8, 9].map(|gid| caller.is_member(gid)),
                [true, false, true, false, true]
            );
        }
        let alone = caller(Groups::None);
        assert!(alone.is_member(5) && !alone.is_member(7));
    }
}
