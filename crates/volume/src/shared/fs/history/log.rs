//! The versions of one file or directory, as an extended attribute: for `atoll log`.
//!
//! One line for each, the newest first; fields are divided by tabs:
//!
//! | field | |
//! |---|---|
//! | what | `present`, `past`, or `removed`: that comes first, if it is there, and says when and by whom |
//! | written | milliseconds since 1970 |
//! | user | the public key of the user who wrote it, 64 hexadecimal digits |
//! | state | of a past one: the newest time that `.atoll/history` lists of which it is, else `-` |
//! | kind | `file`, `directory`, `symlink` or `other`; `-` of a removal |
//! | size | bytes; of a directory, its entries; `-` of a removal |
//! | label | what the user is called in the record of a group; may be empty. Control characters are left out |

use std::collections::BTreeMap;

use atoll_key::{GroupId, UserId};
use bytes::Bytes;

use super::times;
use crate::shared::access::read_group;
use crate::shared::fault::Fault;
use crate::shared::fs::Shared;
use crate::shared::inode::{Contents, InodeKey};
use crate::shared::inodes::PastInode;

/// The attribute.
pub(in crate::shared::fs) const LOG_XATTR: &[u8] = b"user.atoll.log";
/// The kernel takes values of 64 KiB.
const MAX_BYTES: usize = 60 << 10;

impl Shared {
    /// The log of an inode; the oldest versions are left out if it would be too long.
    pub(in crate::shared::fs) async fn log(&self, key: InodeKey) -> Result<Bytes, Fault> {
        let log = self.inodes.log(key).await?;
        let labels = self.labels(&log.groups).await;
        let states = self.keep.states(self.created_unix_ms, self.env.unix_ms());
        let mut text = String::new();
        let label = |user: &UserId| labels.get(user).map_or("", String::as_str);
        if let Some((time_ms, user)) = log.removed {
            text += &format!("removed\t{time_ms}\t{}\t-\t-\t-\t{}\n", hex(&user), label(&user));
        }
        for PastInode { inode, user, began_ms, ended_ms } in &log.versions {
            let (what, state) = match ended_ms {
                None => ("present", None),
                Some(ended_ms) => {
                    let shown = states.range(..=ended_ms).next_back();
                    ("past", shown.filter(|state| *state > began_ms))
                }
            };
            let state = state.map_or("-".into(), |state| times::name(*state));
            let (kind, size) = match &inode.contents {
                Contents::Regular { size_bytes, .. } => ("file", *size_bytes),
                Contents::Directory(entries) => ("directory", entries.len() as u64),
                Contents::Unread { entries, .. } => ("directory", *entries as u64),
                Contents::Symlink(target) => ("symlink", target.len() as u64),
                Contents::Special { .. } => ("other", 0),
            };
            let (user, label) = (hex(user), label(user));
            let line = format!("{what}\t{began_ms}\t{user}\t{state}\t{kind}\t{size}\t{label}\n");
            if text.len() + line.len() > MAX_BYTES {
                break;
            }
            text += &line;
        }
        Ok(text.into())
    }

    /// What the members of groups are called, as far as that can be read.
    async fn labels(&self, groups: &[GroupId]) -> BTreeMap<UserId, String> {
        let mut labels = BTreeMap::new();
        for group in groups {
            let Ok(Some(record)) = read_group(&self.blocks, *group).await else { continue };
            for (user, member) in record.members {
                let label: String = member.label.chars().filter(|c| !c.is_control()).collect();
                labels.entry(user).or_insert(label);
            }
        }
        labels
    }
}

fn hex(user: &UserId) -> String {
    user.0.iter().map(|byte| format!("{byte:02x}")).collect()
}
