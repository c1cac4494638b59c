//! A member of the network, named on the command line by the first digits of its key.

use std::str::FromStr;

use atoll_key::PeerId;
use atoll_node::MemberList;

use crate::failure::{Exit, Failure};

/// The fewest digits by which a node may be named.
const LEAST_DIGITS: usize = 8;

/// The first hexadecimal digits of a node's key.
#[derive(Clone, Debug)]
pub(crate) struct NamedNode(String);

impl FromStr for NamedNode {
    type Err = String;

    fn from_str(text: &str) -> Result<NamedNode, String> {
        let digits = text.to_ascii_lowercase();
        let is_hex = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        if is_hex && (LEAST_DIGITS..=64).contains(&digits.len()) {
            return Ok(NamedNode(digits));
        }
        Err(format!("a node is named by {LEAST_DIGITS} to 64 hexadecimal digits of its key"))
    }
}

impl NamedNode {
    /// The node whose key begins so.
    ///
    /// # Errors
    /// If there is none, or more than one. A whole key need not be known here.
    pub(super) fn find(&self, list: &MemberList) -> Result<PeerId, Failure> {
        let NamedNode(digits) = self;
        let ids = list.members.iter().map(|member| &member.id);
        let found: Vec<&String> = ids.filter(|id| id.starts_with(digits)).collect();
        let id = match found[..] {
            [id] => id,
            [] if digits.len() == 64 => digits,
            [] => {
                return Err(Failure::new(Exit::NotFound, format!("no member {digits}"))
                    .because("this node knows none whose key begins so")
                    .advice("`atoll member list` lists those it knows; a whole key always does."));
            }
            _ => {
                return Err(Failure::new(Exit::Usage, format!("which member is {digits}?"))
                    .because(format!("the keys of {} members begin so", found.len()))
                    .advice("Give more digits; `atoll member list --json` shows all."));
            }
        };
        key_of(id).ok_or_else(|| Failure::new(Exit::Failed, format!("{id} is not a key")))
    }
}

fn key_of(hex: &str) -> Option<PeerId> {
    let (pairs, rest) = hex.as_bytes().as_chunks::<2>();
    let byte = |pair: &[u8; 2]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    let bytes: Option<Vec<u8>> = pairs.iter().map(byte).collect();
    bytes.filter(|_| rest.is_empty())?.try_into().ok().map(PeerId)
}

#[cfg(test)]
mod tests {
    use atoll_node::Member;

    use super::*;

    #[test]
    fn a_node_is_named_by_enough_digits_to_be_one() {
        for bad in ["", "abc", "xyzxyzxy", &"a".repeat(65)] {
            assert!(bad.parse::<NamedNode>().is_err(), "{bad}");
        }
        let ids = ["ab".repeat(32), format!("{}ff", "ab".repeat(31)), "cd".repeat(32)];
        let members = ids.map(|id| Member { id, ..Member::default() }).to_vec();
        let list = MemberList { members, ..MemberList::default() };
        let find = |text: &str| text.parse::<NamedNode>().expect("digits").find(&list);
        assert_eq!(find("CDCDCDCD").ok(), Some(PeerId([0xcd; 32])));
        assert_eq!(find("abababab").map_err(|failure| failure.exit), Err(Exit::Usage));
        assert_eq!(find(&"ab".repeat(32)).ok(), Some(PeerId([0xab; 32])));
        assert_eq!(find("01234567").map_err(|failure| failure.exit), Err(Exit::NotFound));
        assert_eq!(find(&"0e".repeat(32)).ok(), Some(PeerId([0x0e; 32])), "not known here");
    }
}
