//! What the siblings of an inode say together, as a mount shows it.
//!
//! Pastis keeps the version with the later time (§3.1). Here, of versions that were written at the
//! same time:
//!
//! | | |
//! |---|---|
//! | entries of a directory, names of a file | merge as [add-wins sets](super::add_wins) |
//! | attributes | those of the *leading* sibling: the highest, then that of the greater writer; clocks do not decide |
//! | contents of a file | the leading sibling's, and each other one as a [`Conflict`] beside it, if they differ |
//! | a removal | counts only if nobody wrote at the same time |
//!
//! If two entries of a directory have one name, the one that was added first has it, and the other
//! appears as `NAME~USER~TIME` ([`names`]). Both follow from the entries alone, so that all mounts that
//! see the same siblings show the same.
//!
//! A sibling that is no inode does not hide the others, since a member may write any bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, UNIX_EPOCH};

use atoll_key::kinds::certified::{CertifiedBlock, Dot, Sibling};
use atoll_vfs::{FileKind, MAX_NAME_BYTES};
use bytes::Bytes;

use super::add_wins::{self, Element, Version};
use super::inode::{Contents, Entry, Inode};
use crate::format::FormatError;

/// The latest time that is written as a date, seconds since 1970: the end of the year 9999.
const LAST_DATE_SECS: u64 = 253_402_300_799;

/// Contents of a file that were written at the same time as those that are shown.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Conflict {
    /// The write that made them.
    pub dot: Dot,
    /// When, by the writer's clock, milliseconds since 1970.
    pub time_ms: u64,
    /// The inode as that writer left it.
    pub inode: Inode,
}

/// An inode as a mount shows it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Merged {
    /// The merged inode.
    pub inode: Inode,
    /// Other contents, the highest first; none of a directory.
    pub conflicts: Vec<Conflict>,
    /// Siblings that are no inodes, and why.
    pub unreadable: Vec<(Dot, FormatError)>,
}

/// What the siblings of `block` say together; `None` if the inode has been removed.
///
/// # Errors
/// If none of them is an inode: why the leading one is not.
pub fn merge(block: &CertifiedBlock) -> Result<Option<Merged>, FormatError> {
    let mut siblings: Vec<&Sibling> =
        block.siblings().iter().filter(|sibling| !sibling.is_removal).collect();
    siblings.sort_by_key(|sibling| std::cmp::Reverse((sibling.dot.height, sibling.dot.writer)));
    let (mut read, mut unreadable) = (Vec::new(), Vec::new());
    for sibling in siblings {
        match Inode::decode(&sibling.payload) {
            Ok(inode) => read.push((sibling, inode)),
            Err(error) => unreadable.push((sibling.dot, error)),
        }
    }
    let Some((_, leading)) = read.first() else {
        return unreadable.into_iter().next().map_or(Ok(None), |(_, error)| Err(error));
    };
    let attributes = leading.attributes.clone();
    let links = versions(&read, |inode| Some(&inode.links));
    let links = add_wins::merge(&links);
    let contents = match &leading.contents {
        Contents::Directory(_) => {
            let entries = versions(&read, |inode| match &inode.contents {
                Contents::Directory(entries) => Some(entries),
                _ => None,
            });
            Contents::Directory(add_wins::merge(&entries))
        }
        contents => contents.clone(),
    };
    let mut conflicts: Vec<Conflict> = Vec::new();
    if contents.kind() != FileKind::Directory {
        for (sibling, inode) in &read[1..] {
            let shown = conflicts.iter().map(|conflict| &conflict.inode.contents);
            if shown.chain([&contents]).all(|shown| *shown != inode.contents) {
                let (dot, time_ms) = (sibling.dot, sibling.time_ms);
                conflicts.push(Conflict { dot, time_ms, inode: inode.clone() });
            }
        }
    }
    let inode = Inode { attributes, links, contents };
    Ok(Some(Merged { inode, conflicts, unreadable }))
}

/// The versions of one set in all siblings that have it.
fn versions<'a, T: Element>(
    read: &'a [(&'a Sibling, Inode)],
    set: impl Fn(&'a Inode) -> Option<&'a BTreeSet<T>>,
) -> Vec<Version<'a, T>> {
    let version = |(sibling, inode): &'a (&'a Sibling, Inode)| {
        let (dot, context) = (sibling.dot, &sibling.context);
        set(inode).map(|elements| Version { dot, context, elements })
    };
    read.iter().filter_map(version).collect()
}

/// A directory as it is listed: each name, and the entries that it stands for: several if two writers gave
/// one inode the same name.
pub fn names(entries: &BTreeSet<Entry>) -> BTreeMap<Bytes, Vec<Entry>> {
    let mut by_name: BTreeMap<&Bytes, Vec<&Entry>> = BTreeMap::new();
    for entry in entries {
        by_name.entry(&entry.name).or_default().push(entry);
    }
    let mut shown: BTreeMap<Bytes, Vec<Entry>> = BTreeMap::new();
    let mut others: Vec<Vec<Entry>> = Vec::new();
    for (name, mut same_name) in by_name {
        same_name.sort_by_key(|entry| (entry.added.height, entry.added.writer, entry.inode));
        let mut by_inode: Vec<Vec<Entry>> = Vec::new();
        for entry in same_name {
            match by_inode.iter_mut().find(|same| same[0].inode == entry.inode) {
                Some(same) => same.push(entry.clone()),
                None => by_inode.push(vec![entry.clone()]),
            }
        }
        others.extend(by_inode.split_off(1));
        shown.extend(by_inode.pop().map(|first| (name.clone(), first)));
    }
    // After all plain names: a name that was given as such is nobody else's.
    for entries in others {
        let Entry { name, added, time_ms, .. } = &entries[0];
        let mut number = 1;
        let mut name_of_conflict = conflict_name(name, added, *time_ms, number);
        while shown.contains_key(&name_of_conflict) {
            number += 1;
            name_of_conflict = conflict_name(name, added, *time_ms, number);
        }
        shown.insert(name_of_conflict, entries);
    }
    shown
}

/// `NAME~USER~TIME`: the beginning of the public key of the user who wrote it, and when (UTC). Where
/// names collide a number above 1 follows. A name that would be too long is cut before the first `~`.
pub fn conflict_name(name: &[u8], dot: &Dot, time_ms: u64, number: u32) -> Bytes {
    let user: String =
        dot.writer.user_prefix()[..4].iter().map(|byte| format!("{byte:02x}")).collect();
    let secs = (time_ms / 1000).min(LAST_DATE_SECS);
    let time = humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(secs));
    let time = time.to_string().replace(['-', ':'], "");
    let number = if number > 1 { format!("~{number}") } else { String::new() };
    let suffix = format!("~{user}~{time}{number}");
    let room = MAX_NAME_BYTES - suffix.len();
    // Not within a character, if the name is text.
    let cut = match std::str::from_utf8(name) {
        Ok(text) => {
            let most = room.min(text.len());
            (0..=most).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)
        }
        Err(_) => name.len().min(room),
    };
    Bytes::from([&name[..cut], suffix.as_bytes()].concat())
}
