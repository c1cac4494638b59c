//! The versions of one file or directory, as an extended attribute: for `atoll log`.
//!
//! `user.atoll.log` of a file or directory has the versions of its inode. `user.atoll.log.NAME` of a directory has those of
//! all inodes that have had the name there, as far as the directory's own versions are there: editors save a file by
//! giving a new one its name. One line for each version, the newest first; fields are divided by tabs:
//!
//! | field | |
//! |---|---|
//! | what | `present`, `past`, or `removed`: that comes first, if it is there, and says when and by whom |
//! | written | milliseconds since 1970 |
//! | user | the public key of the user who wrote it, 64 hexadecimal digits |
//! | state | of a past one: a time at which it was there, under the name that was asked for, the newest that `.atoll/history` lists if there is one; `-` if it had another name |
//! | kind | `file`, `directory`, `symlink` or `other`; `-` of a removal |
//! | size | bytes; of a directory, its entries; `-` of a removal |
//! | label | what the user is called in the record of a group; may be empty. Control characters are left out |

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use atoll_key::{GroupId, UserId};
use bytes::Bytes;

use super::times;
use crate::shared::access::read_group;
use crate::shared::fault::Fault;
use crate::shared::fs::Shared;
use crate::shared::inode::{Contents, InodeKey};
use crate::shared::inodes::{Meaning, PastInode};

/// The attribute.
pub(in crate::shared::fs) const LOG_XATTR: &[u8] = b"user.atoll.log";
/// The kernel takes values of 64 KiB.
const MAX_BYTES: usize = 60 << 10;

/// Whose log an attribute is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in crate::shared::fs) enum LogOf {
    /// The inode's that has the attribute.
    Inode,
    /// That of a name in the directory.
    Name(Bytes),
}

impl LogOf {
    /// Reads the name of an attribute.
    pub(in crate::shared::fs) fn parse(xattr: &[u8]) -> Option<LogOf> {
        match xattr.strip_prefix(LOG_XATTR)? {
            [] => Some(LogOf::Inode),
            [b'.', name @ ..] if !name.is_empty() => {
                Some(LogOf::Name(Bytes::copy_from_slice(name)))
            }
            _ => None,
        }
    }
}

/// A time for which a name meant an inode.
struct Spell {
    inode: InodeKey,
    from_ms: u64,
    /// `u64::MAX`: it means it still.
    until_ms: u64,
}

impl Spell {
    /// One after the other, the newest first.
    fn all_of(meanings: &[Meaning]) -> Vec<Spell> {
        let mut spells: Vec<Spell> = Vec::new();
        for Meaning { shown_ms: (from_ms, until_ms), inode, .. } in meanings {
            let Some(inode) = inode else { continue };
            match spells.last_mut() {
                Some(last) if last.inode == *inode && last.from_ms == *until_ms => {
                    last.from_ms = *from_ms;
                }
                _ => spells.push(Spell { inode: *inode, from_ms: *from_ms, until_ms: *until_ms }),
            }
        }
        spells
    }

    /// The times at which a version was there under the name: after the first, up to the second.
    fn shows(&self, version: &PastInode) -> Option<(u64, u64)> {
        let from_ms = self.from_ms.max(version.began_ms);
        let until_ms = self.until_ms.min(version.ended_ms.unwrap_or(u64::MAX));
        (from_ms < until_ms).then_some((from_ms, until_ms))
    }
}

/// A line of the log.
struct Line {
    what: &'static str,
    time_ms: u64,
    user: UserId,
    /// State, kind and size.
    rest: String,
}

impl Shared {
    /// The log of an inode, or of a name in a directory.
    pub(in crate::shared::fs) async fn log(
        &self,
        key: InodeKey,
        of: LogOf,
    ) -> Result<Bytes, Fault> {
        match of {
            LogOf::Inode => {
                let spell = Spell { inode: key, from_ms: 0, until_ms: u64::MAX };
                self.log_of(&[spell], None).await
            }
            LogOf::Name(name) => {
                let meanings = self.inodes.meanings(key, &name).await?;
                // By whose version of the directory the name went.
                let went = meanings.iter().take_while(|meaning| meaning.inode.is_none()).last();
                self.log_of(&Spell::all_of(&meanings), went).await
            }
        }
    }

    /// The log of what a name has meant, the newest spell first; the oldest versions are left out if it would be too
    /// long.
    async fn log_of(&self, spells: &[Spell], went: Option<&Meaning>) -> Result<Bytes, Fault> {
        let states = self.keep.states(self.created_unix_ms, self.env.unix_ms());
        let mut groups = BTreeSet::new();
        let (mut lines, mut seen) = (Vec::new(), BTreeSet::new());
        let mut removed = went.map(|went| (went.began_ms, went.user));
        let mut unread = None;
        for Spell { inode: key, until_ms, .. } in spells {
            let is_newest = seen.is_empty();
            if !seen.insert(*key) {
                continue;
            }
            let log = match self.inodes.log(*key).await {
                Ok(log) => log,
                Err(fault) => {
                    tracing::debug!("the versions of an inode cannot be read: {fault:?}");
                    unread = Some(fault);
                    continue;
                }
            };
            groups.extend(log.groups);
            if is_newest {
                removed = log.removed.or(removed);
            }
            let is_current = is_newest && *until_ms == u64::MAX;
            for version in &log.versions {
                let its = spells.iter().filter(|spell| spell.inode == *key);
                let shown = its.filter_map(|spell| spell.shows(version)).next();
                let state = match shown {
                    _ if is_current && version.ended_ms.is_none() => "-".into(),
                    Some((from_ms, until_ms)) => {
                        let listed = states.range(from_ms + 1..=until_ms).next_back();
                        times::name(*listed.unwrap_or(&until_ms))
                    }
                    // It had another name before.
                    None if is_current => "-".into(),
                    None => continue,
                };
                let what = match version.ended_ms {
                    None if is_current => "present",
                    _ => "past",
                };
                let (kind, size) = match &version.inode.contents {
                    Contents::Regular { size_bytes, .. } => ("file", *size_bytes),
                    Contents::Directory(entries) => ("directory", entries.len() as u64),
                    Contents::Unread { entries, .. } => ("directory", *entries as u64),
                    Contents::Symlink(target) => ("symlink", target.len() as u64),
                    Contents::Special { .. } => ("other", 0),
                };
                let rest = format!("{state}\t{kind}\t{size}");
                lines.push(Line { what, time_ms: version.began_ms, user: version.user, rest });
            }
        }
        if let (true, Some(fault)) = (lines.is_empty(), unread) {
            return Err(fault);
        }
        // Inodes that had the name in turns are mixed.
        if seen.len() > 1 {
            lines.sort_by_key(|line| (line.what != "present", Reverse(line.time_ms)));
        }
        let removed = removed.filter(|_| !lines.is_empty()).map(|(time_ms, user)| Line {
            what: "removed",
            time_ms,
            user,
            rest: "-\t-\t-".into(),
        });
        let labels = self.labels(groups).await;
        let mut text = String::new();
        for Line { what, time_ms, user, rest } in removed.into_iter().chain(lines) {
            let (key, label) = (hex(&user), labels.get(&user).map_or("", String::as_str));
            let line = format!("{what}\t{time_ms}\t{key}\t{rest}\t{label}\n");
            if text.len() + line.len() > MAX_BYTES {
                break;
            }
            text += &line;
        }
        Ok(text.into())
    }

    /// What the members of groups are called, as far as that can be read.
    async fn labels(&self, groups: BTreeSet<GroupId>) -> BTreeMap<UserId, String> {
        let mut labels = BTreeMap::new();
        for group in groups {
            let Ok(Some(record)) = read_group(&self.blocks, group).await else { continue };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_name_an_inode_or_a_name() {
        let name = |name: &'static str| Some(LogOf::Name(Bytes::from_static(name.as_bytes())));
        let cases = [
            ("user.atoll.log", Some(LogOf::Inode)),
            ("user.atoll.log.plan.txt", name("plan.txt")),
            ("user.atoll.log..x", name(".x")),
            ("user.atoll.log.", None),
            ("user.atoll.logs", None),
            ("user.atoll.lo", None),
        ];
        for (xattr, expected) in cases {
            assert_eq!(LogOf::parse(xattr.as_bytes()), expected, "{xattr}");
        }
    }

    #[test]
    fn what_a_name_means_to_the_next_version_too_is_one_spell() {
        let key = |n| InodeKey([n; 32]);
        let meaning = |began_ms, until_ms, inode: Option<u8>| Meaning {
            began_ms,
            shown_ms: (began_ms, until_ms),
            user: UserId([0; 32]),
            inode: inode.map(key),
        };
        let meanings = [
            meaning(90, u64::MAX, None),
            meaning(80, 90, Some(2)),
            meaning(70, 80, Some(2)),
            meaning(50, 70, Some(1)),
            meaning(40, 50, None),
            meaning(30, 40, Some(1)),
            meaning(20, 28, Some(1)),
        ];
        let found = Spell::all_of(&meanings);
        let found: Vec<_> = found.iter().map(|s| (s.inode, s.from_ms, s.until_ms)).collect();
        let expected = [(2, 70, 90), (1, 50, 70), (1, 30, 40), (1, 20, 28)];
        assert_eq!(found, expected.map(|(n, from_ms, until_ms)| (key(n), from_ms, until_ms)));
    }
}
