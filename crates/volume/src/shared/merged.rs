//! What the siblings of an inode say together, as a mount shows it.
//!
//! Pastis keeps the version with the later time (§3.1). Here, of versions that were written at the
//! same time:
//!
//! | | |
//! |---|---|
//! | entries of a directory, links of a file | merge as [add-wins sets](super::add_wins); a removal of the inode takes all away that its writer had seen |
//! | attributes, past versions | those of the *leading* sibling: the highest, of two equal ones that written later, then that of the greater writer |
//! | contents of a file | merge as an add-wins set that each write replaces by its own: contents that no other writer had seen. Of several, those of the write that leads in the same order are shown, and each other one is a [`Conflict`] beside them, if it differs |
//! | a removal | counts only if nobody wrote at the same time |
//! | [*late*](super::standing) siblings: of writers who did not know that the inode was rebound, and may have been shut out | come last in every order, and stand beside what others wrote: they take no contents, name or place of a directory away, whatever their contexts say. A name of theirs that another file has is `NAME~USER~TIME`. One that is no inode is left out |
//!
//! A directory has one name in another: of several that writers gave it at the same time, the one that leads, in that order,
//! counts, and the others are gone. Any writer who has seen both leaves them out.
//!
//! If two entries of a directory have one name, the one that was added first has it, and the other
//! appears as `NAME~USER~TIME` ([`names`]). Both follow from the entries alone, so that all mounts that
//! see the same siblings show the same.
//!
//! A sibling that is no inode does not hide the others, since a member may write any bytes. It is not hidden by late ones.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, UNIX_EPOCH};

use atoll_key::kinds::certified::{CertifiedBlock, Dot, Sibling};
use atoll_vfs::{FileKind, MAX_NAME_BYTES};
use bytes::Bytes;

use super::add_wins::{self, Version};
use super::entries::{Entries, Leaves};
use super::inode::{Contents, Entry, Inode, InodeKey, Written};
use super::sealing::Sealing;
use super::standing::{Standing, Trusted};
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
    /// An inode that has them.
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

/// What the siblings of `block` say together; `None` if the inode has been removed. Entries that lie in
/// leaves are taken from `leaves`, in the clear.
///
/// # Errors
/// If none of them is an inode: why the leading one is not.
pub fn merge(
    block: &CertifiedBlock,
    leaves: &Leaves,
    sealing: &Sealing,
) -> Result<Option<Merged>, FormatError> {
    merge_trusting(block, leaves, sealing, &Trusted::new())
}

/// The same as those see it who take the late versions of `trusted` users for others.
///
/// # Errors
/// Also if only late siblings are inodes, and others are neither inodes nor removals.
pub fn merge_trusting(
    block: &CertifiedBlock,
    leaves: &Leaves,
    sealing: &Sealing,
    trusted: &Trusted,
) -> Result<Option<Merged>, FormatError> {
    let standing = Standing::of(block, trusted);
    let decode = |payload: &Bytes| {
        let mut inode = sealing.inode(payload)?;
        if let Contents::Unread { entries, leaves: hashes } = &inode.contents {
            inode.contents = Contents::Directory(Entries::in_leaves(hashes, *entries, leaves)?);
        }
        Ok(inode)
    };
    let (mut read, mut unreadable) = (Vec::new(), Vec::new());
    for sibling in standing.leading_first(block).filter(|sibling| !sibling.is_removal) {
        match decode(&sibling.payload) {
            Ok(inode) => read.push((sibling, inode)),
            // Nobody has to wait for what a member has left who was shut out.
            Err(_) if standing.is_late(sibling) => {}
            Err(error) => unreadable.push((sibling.dot, error)),
        }
    }
    let Some((leader, leading)) = read.first() else {
        return unreadable.into_iter().next().map_or(Ok(None), |(_, error)| Err(error));
    };
    if standing.is_late(leader)
        && let Some((_, error)) = unreadable.first()
    {
        return Err(error.clone());
    }
    let (attributes, past) = (leading.attributes.clone(), leading.past);
    // A removal does not count for the inode, which somebody wrote at the same time; that names are gone does.
    let removals: Vec<&Sibling> = block.siblings().iter().filter(|one| one.is_removal).collect();
    let links = read.iter().map(|(sibling, inode)| (*sibling, &inode.links));
    let mut links = merged_sets(&standing, links, &removals);
    let contents = match &leading.contents {
        // As in most cases: nothing is to be merged, and no leaf to be made anew.
        Contents::Directory(entries) if read.len() == 1 && removals.is_empty() => {
            Contents::Directory(with_one_name_each(entries.clone()))
        }
        Contents::Directory(_) => {
            let sets: Vec<(&Sibling, BTreeSet<Entry>)> = read
                .iter()
                .filter_map(|(sibling, inode)| match &inode.contents {
                    Contents::Directory(entries) => {
                        Some((*sibling, entries.iter().cloned().collect()))
                    }
                    _ => None,
                })
                .collect();
            let sets = sets.iter().map(|(sibling, elements)| (*sibling, elements));
            let merged = merged_sets(&standing, sets, &removals);
            Contents::Directory(directory(merged, standing.newest()))
        }
        contents => contents.clone(),
    };
    if matches!(contents, Contents::Directory(_)) {
        // A directory has one place, which nobody takes away who may have been shut out.
        let newest = links.values().max().copied();
        links.retain(|_, binding| Some(*binding) == newest);
    }
    let links = links.into_keys().collect();
    let (contents, conflicts) = match contents {
        Contents::Regular { .. } => files(&standing, &read, contents),
        Contents::Directory(_) => (contents, Vec::new()),
        contents => {
            let conflict = |(sibling, inode): &(&Sibling, Inode)| Conflict {
                dot: sibling.dot,
                time_ms: sibling.time_ms,
                inode: inode.clone(),
            };
            let others = read[1..].iter().map(conflict).collect();
            let others = different(&contents, others);
            (contents, others)
        }
    };
    let inode = Inode { attributes, links, past, contents };
    Ok(Some(Merged { inode, conflicts, unreadable }))
}

/// Sets of several siblings, and the empty ones of removals.
fn merged_sets<'a, T: add_wins::Element + 'a>(
    standing: &Standing<'_>,
    sets: impl Iterator<Item = (&'a Sibling, &'a BTreeSet<T>)>,
    removals: &[&'a Sibling],
) -> BTreeMap<T, u32> {
    let version = |sibling: &'a Sibling, elements| Version {
        dot: sibling.dot,
        binding: standing.binding_version(sibling),
        context: &sibling.context,
        elements,
    };
    let nothing = BTreeSet::new();
    let mut versions: Vec<Version<'_, T>> =
        sets.map(|(sibling, elements)| version(sibling, elements)).collect();
    versions.extend(removals.iter().map(|removal| version(removal, &nothing)));
    add_wins::merge(&versions)
}

/// Entries of which one names each directory.
fn with_one_name_each(mut entries: Entries) -> Entries {
    for surplus in entries.surplus_names() {
        entries.remove(&surplus);
    }
    entries
}

/// A directory of entries, each of which comes with the newest binding under which a version with it was written. Those that
/// late versions alone have take nobody's name.
fn directory(merged: BTreeMap<Entry, u32>, newest: u32) -> Entries {
    let (entries, late): (Vec<_>, Vec<_>) =
        merged.into_iter().partition(|(_, binding)| *binding == newest);
    let entries = entries.into_iter().map(|(entry, _)| entry).collect();
    let mut entries = with_one_name_each(entries);
    if late.is_empty() {
        return entries;
    }
    let directories = entries.iter().filter(|entry| entry.file_kind() == FileKind::Directory);
    let mut directories: BTreeSet<InodeKey> = directories.map(|entry| entry.inode).collect();
    let mut shown: BTreeSet<Bytes> = names(&entries).into_keys().collect();
    for (late, _) in late {
        // Of the same file the name is there already.
        let is_there = |entries: &Entries, name: &[u8]| {
            entries.of_name(name).any(|entry| entry.inode == late.inode)
        };
        if directories.contains(&late.inode) {
            continue;
        }
        let (mut name, mut number) = (late.name.clone(), 0);
        while shown.contains(&name) && !is_there(&entries, &name) {
            number += 1;
            name = conflict_name(&late.name, &late.added, late.time_ms, number);
        }
        if shown.insert(name.clone()) {
            if late.file_kind() == FileKind::Directory {
                directories.insert(late.inode);
            }
            entries.insert(Entry { name, ..late });
        }
    }
    entries
}

/// The contents of a file that are shown, and those beside them.
fn files(
    standing: &Standing<'_>,
    read: &[(&Sibling, Inode)],
    leading: Contents,
) -> (Contents, Vec<Conflict>) {
    let mut writes: Vec<(&Sibling, BTreeSet<Written>, &Inode)> = Vec::new();
    for (sibling, inode) in read {
        if let Contents::Regular { written, .. } = &inode.contents {
            writes.push((sibling, BTreeSet::from([*written]), inode));
        }
    }
    let sets = writes.iter().map(|(sibling, elements, _)| (*sibling, elements));
    let merged = merged_sets(standing, sets, &[]);
    let mut left: Vec<(Written, u32)> = merged.into_iter().collect();
    left.sort_by_key(|(written, binding)| {
        std::cmp::Reverse((*binding, written.dot.height, written.time_ms, written.dot.writer))
    });
    let mut found: Vec<Conflict> = Vec::new();
    for (written, _) in left {
        // Of several that claim one write, the leading one.
        let of = writes.iter().find(|(_, writes, _)| writes.contains(&written));
        let (_, _, inode) = of.expect("it came from there");
        let Written { dot, time_ms } = written;
        found.push(Conflict { dot, time_ms, inode: (*inode).clone() });
    }
    if found.is_empty() {
        // Only contexts that name each other can do that: they are false.
        return (leading, Vec::new());
    }
    let shown = found.remove(0).inode.contents;
    let others = different(&shown, found);
    (shown, others)
}

/// Those whose contents are not shown, nor those of one before.
fn different(shown: &Contents, others: Vec<Conflict>) -> Vec<Conflict> {
    let mut conflicts: Vec<Conflict> = Vec::new();
    for other in others {
        let kept = conflicts.iter().map(|conflict| &conflict.inode.contents);
        if kept.chain([shown]).all(|shown| !shown.is_same(&other.inode.contents)) {
            conflicts.push(other);
        }
    }
    conflicts
}

/// The entries that one name of a directory stands for, as [`names`] has them.
pub fn named(entries: &Entries, name: &[u8]) -> Option<Vec<Entry>> {
    let plain: Vec<&Entry> = entries.of_name(name).collect();
    match plain.first() {
        Some(first) if plain.iter().all(|entry| entry.inode == first.inode) => {
            Some(plain.into_iter().cloned().collect())
        }
        // Neither a name that was given nor one of a conflict.
        None if !name.contains(&b'~') => None,
        _ => names(entries).remove(name),
    }
}

/// A directory as it is listed: each name, and the entries that it stands for: several if two writers gave
/// one inode the same name.
pub fn names(entries: &Entries) -> BTreeMap<Bytes, Vec<Entry>> {
    let mut by_name: BTreeMap<&Bytes, Vec<&Entry>> = BTreeMap::new();
    for entry in entries.iter() {
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
/// names collide a number above 1 follows. A name that would be too long is cut before the first `~`. Beside
/// `NAME~USER~TIME` there are no longer ones: what conflicts with that conflicts with `NAME`.
pub fn conflict_name(name: &[u8], dot: &Dot, time_ms: u64, number: u32) -> Bytes {
    let mut name = name;
    while let Some(ConflictName { beside, .. }) = ConflictName::parse(name) {
        name = beside;
    }
    let (user, time) = (conflict_user(dot), conflict_time(time_ms));
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

/// The user who made a write, as [`conflict_name`] has it.
pub fn conflict_user(dot: &Dot) -> String {
    dot.writer.user_prefix()[..4].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A time, milliseconds since 1970, as [`conflict_name`] has it.
pub fn conflict_time(time_ms: u64) -> String {
    let secs = (time_ms / 1000).min(LAST_DATE_SECS);
    let time = humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(secs));
    time.to_string().replace(['-', ':'], "")
}

/// Whether a mount has given a name to what it stands for, since that was written at the same time as something else:
/// the name and the entry say the same time. A program that makes a file of such a name, or moves one there, makes an entry
/// of its own time.
pub fn is_conflict(shown: &[u8], entry: &Entry) -> bool {
    ConflictName::parse(shown).is_some_and(|name| name.time == conflict_time(entry.time_ms))
}

/// What a name of a conflict says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConflictName<'a> {
    /// The name that it appears beside: its beginning, if it was too long.
    pub beside: &'a [u8],
    /// The first 8 hexadecimal digits of its writer's public key.
    pub user: &'a str,
    /// When it was written: `20261123T135501Z`.
    pub time: &'a str,
}

impl ConflictName<'_> {
    /// Takes a name apart that [`conflict_name`] may have made. Whoever may write a directory can give such
    /// names to files of their own.
    pub fn parse(name: &[u8]) -> Option<ConflictName<'_>> {
        let mut parts: Vec<&[u8]> = name.rsplitn(4, |byte| *byte == b'~').collect();
        let is_number = |part: &[u8]| part.iter().all(u8::is_ascii_digit) && !part.is_empty();
        if is_number(parts[0]) {
            parts.remove(0);
        } else {
            parts = name.rsplitn(3, |byte| *byte == b'~').collect();
        }
        let [time, user, beside] = parts[..] else { return None };
        let is_time = time.len() == 16
            && time.iter().enumerate().all(|(at, byte)| match at {
                8 => *byte == b'T',
                15 => *byte == b'Z',
                _ => byte.is_ascii_digit(),
            });
        let is_user =
            user.len() == 8 && user.iter().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        let text = |part| std::str::from_utf8(part).ok();
        let (user, time) = (text(user)?, text(time)?);
        (is_time && is_user && !beside.is_empty()).then_some(ConflictName { beside, user, time })
    }
}
