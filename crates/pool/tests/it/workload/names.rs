//! Whether a history of names is linearizable: whether there is an order of its calls, in which each call lies between its
//! beginning and its end, such that a simple model of a file system gives each the answer that it had.
//!
//! Calls are put in order no earlier than an end forces it (Lowe, "Testing for linearizability", 2017): at each end, every
//! possible state is extended by every sequence of open calls that ends with this one. Calls whose outcome nobody knows stay open
//! until [`Mark::Settled`](super::history::Mark): they may have been made, at any time, or not.
//!
//! The model knows directories, names, which file has which names, and Linux' errors. Where several errors hold any is right.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use atoll_vfs::{Attr, Errno, FileKind, InodeNumber, RenameFlags};
use bytes::Bytes;

use super::ROOT;
use super::history::{Call, Called, Mark, Moment, Reply};

/// States that a history may be in at one time, before a test gives up.
const MAX_STATES: usize = 200_000;
/// Calls before a wrong one that a message lists.
const SHOWN: usize = 25;

/// A file of the model.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Node {
    Known(InodeNumber),
    /// Made by the call with this index, which had no answer; nobody has seen its number yet.
    Made(usize),
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Node::Known(inode) => write!(f, "{:x}", inode.0),
            Node::Made(call) => write!(f, "made by call {call}"),
        }
    }
}

/// All names of an arena.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Names {
    /// The files that have a name, and the root.
    kinds: BTreeMap<Node, FileKind>,
    names: BTreeMap<(Node, Bytes), Node>,
}

/// What the model says of a call: done, or refused with one of these.
type Verdict = Result<(), Vec<Errno>>;

const GONE: [Errno; 2] = [Errno::ENOENT, Errno::ESTALE];

impl Names {
    fn new() -> Names {
        let root = BTreeMap::from([(Node::Known(ROOT), FileKind::Directory)]);
        Names { kinds: root, names: BTreeMap::new() }
    }

    /// A line for each name.
    fn lines(&self) -> String {
        let line = |((dir, name), node): (&(Node, Bytes), &Node)| {
            format!("  {dir:?} {name:?}: {node:?} {:?}\n", self.kinds.get(node))
        };
        self.names.iter().map(line).collect()
    }

    /// Why nothing can be looked up in a directory.
    fn check_dir(&self, dir: Node) -> Verdict {
        match self.kinds.get(&dir) {
            Some(FileKind::Directory) => Ok(()),
            Some(_) => Err(vec![Errno::ENOTDIR]),
            // A file that is no directory may be open, and so live without a name.
            None => Err([&GONE[..], &[Errno::ENOTDIR]].concat()),
        }
    }

    fn find(&self, (dir, name): &(InodeNumber, Bytes)) -> Result<Option<Node>, Vec<Errno>> {
        let dir = Node::Known(*dir);
        self.check_dir(dir)?;
        Ok(self.names.get(&(dir, name.clone())).copied())
    }

    fn is_empty(&self, dir: Node) -> bool {
        self.names.range((dir, Bytes::new())..).next().is_none_or(|((other, _), _)| *other != dir)
    }

    fn link_count(&self, node: Node) -> u32 {
        self.names.values().filter(|other| **other == node).count() as u32
    }

    /// Whether `node` is `dir` or lies above it.
    fn is_above(&self, node: Node, mut dir: Node) -> bool {
        loop {
            if dir == node {
                return true;
            }
            match self.names.iter().find(|(_, other)| **other == dir) {
                Some(((parent, _), _)) => dir = *parent,
                None => return false,
            }
        }
    }

    fn remove(&mut self, (dir, name): &(InodeNumber, Bytes)) {
        let Some(node) = self.names.remove(&(Node::Known(*dir), name.clone())) else { return };
        if self.link_count(node) == 0 {
            self.kinds.remove(&node);
        }
    }

    /// A client has seen that `node` has this number; false if that cannot be.
    fn bind(&mut self, node: Node, inode: InodeNumber) -> bool {
        let known = Node::Known(inode);
        if let Node::Known(_) = node {
            return node == known;
        }
        if self.kinds.contains_key(&known) {
            return false;
        }
        let kind = self.kinds.remove(&node);
        self.kinds.extend(kind.map(|kind| (known, kind)));
        let rename = |other: Node| if other == node { known } else { other };
        let names = std::mem::take(&mut self.names);
        self.names = names
            .into_iter()
            .map(|((dir, name), node)| ((rename(dir), name), rename(node)))
            .collect();
        true
    }

    fn is_seen(&mut self, node: Node, attr: &Attr, is_alone: bool) -> bool {
        // Between the name and the attributes another call may have changed their number of names.
        let has_names =
            attr.kind == FileKind::Directory || !is_alone || attr.nlink == self.link_count(node);
        has_names && self.kinds.get(&node) == Some(&attr.kind) && self.bind(node, attr.inode)
    }

    /// The state after a call, if the model gives it its answer. A call of unknown outcome is made.
    fn after(&self, index: usize, call: &Call, is_alone: bool) -> Option<Names> {
        let mut next = self.clone();
        let made = next.make(index, call);
        match (made, call.outcome()) {
            (Err(errors), Some(Err(errno))) => errors.contains(errno).then_some(next),
            (Ok(()), Some(Ok(reply))) => next.explains(call, reply, is_alone).then_some(next),
            (Ok(()), None) => Some(next),
            _ => None,
        }
    }

    /// Whether the answer is right, in the state after the call.
    fn explains(&mut self, call: &Call, reply: &Reply, is_alone: bool) -> bool {
        match (&call.called, reply) {
            (Called::Lookup(at), Reply::Attr(attr)) => match self.find(at) {
                Ok(Some(node)) => self.is_seen(node, attr, is_alone),
                _ => false,
            },
            // It was made again, and the file is gone meanwhile: its number alone is known.
            (Called::Link { inode, .. }, Reply::Attr(attr)) if attr.nlink == 0 => {
                attr.inode == *inode
            }
            (Called::Link { inode, .. }, Reply::Attr(attr)) => {
                self.is_seen(Node::Known(*inode), attr, is_alone)
            }
            (Called::List(dir), Reply::Names(listed)) if is_alone => {
                let dir = Node::Known(*dir);
                let names: Vec<(Bytes, Node)> = self
                    .names
                    .iter()
                    .filter(|((of, _), _)| *of == dir)
                    .map(|((_, name), node)| (name.clone(), *node))
                    .collect();
                names.len() == listed.len()
                    && names.into_iter().all(|(name, node)| match listed.get(&name) {
                        Some((inode, kind)) => {
                            self.kinds.get(&node) == Some(kind) && self.bind(node, *inode)
                        }
                        None => false,
                    })
            }
            _ => true,
        }
    }

    /// Makes a call.
    fn make(&mut self, index: usize, call: &Call) -> Verdict {
        match &call.called {
            Called::Lookup(at) => match self.find(at)? {
                Some(_) => Ok(()),
                None => Err(vec![Errno::ENOENT]),
            },
            Called::List(dir) => self.check_dir(Node::Known(*dir)),
            Called::Make { at, kind, .. } => {
                if self.find(at)?.is_some() {
                    return Err(vec![Errno::EEXIST]);
                }
                let node = match call.outcome() {
                    Some(Ok(Reply::Attr(attr))) => Node::Known(attr.inode),
                    _ => Node::Made(index),
                };
                if self.kinds.insert(node, *kind).is_some() {
                    // Two files have one number: no answer is right.
                    return Err(Vec::new());
                }
                self.names.insert((Node::Known(at.0), at.1.clone()), node);
                Ok(())
            }
            Called::Link { inode, at } => {
                let node = Node::Known(*inode);
                let mut errors = match self.kinds.get(&node) {
                    None => GONE.to_vec(),
                    Some(FileKind::Directory) => vec![Errno::EPERM],
                    Some(_) => Vec::new(),
                };
                match self.find(at) {
                    Ok(Some(_)) => errors.push(Errno::EEXIST),
                    Ok(None) => {}
                    Err(more) => errors.extend(more),
                }
                refuse_by(errors)?;
                self.names.insert((Node::Known(at.0), at.1.clone()), node);
                Ok(())
            }
            Called::Unlink(at) => {
                let node = self.find(at)?.ok_or_else(|| vec![Errno::ENOENT])?;
                if self.kinds[&node] == FileKind::Directory {
                    return Err(vec![Errno::EISDIR, Errno::EPERM]);
                }
                self.remove(at);
                Ok(())
            }
            Called::Rmdir(at) => {
                let node = self.find(at)?.ok_or_else(|| vec![Errno::ENOENT])?;
                if self.kinds[&node] != FileKind::Directory {
                    return Err(vec![Errno::ENOTDIR]);
                }
                if !self.is_empty(node) {
                    return Err(vec![Errno::ENOTEMPTY]);
                }
                self.remove(at);
                Ok(())
            }
            Called::Rename { from, to, flags } => self.rename(from, to, *flags),
            // A call of a number is told that its file is gone.
            called => match called.inode() {
                Some(inode) if !self.kinds.contains_key(&Node::Known(inode)) => Err(GONE.to_vec()),
                _ => Ok(()),
            },
        }
    }

    fn rename(
        &mut self,
        from: &(InodeNumber, Bytes),
        to: &(InodeNumber, Bytes),
        flags: RenameFlags,
    ) -> Verdict {
        let (old, new) = match (self.find(from), self.find(to)) {
            (Ok(old), Ok(new)) => (old, new),
            (old, new) => {
                let missing = match &old {
                    Ok(None) => vec![Errno::ENOENT],
                    _ => Vec::new(),
                };
                let errors = [old.err(), new.err(), Some(missing)];
                return Err(errors.into_iter().flatten().flatten().collect());
            }
        };
        let Some(moved) = old else { return Err(vec![Errno::ENOENT]) };
        let (from_dir, to_dir) = (Node::Known(from.0), Node::Known(to.0));
        let is_dir = |node: Node| self.kinds[&node] == FileKind::Directory;
        let mut errors = Vec::new();
        if is_dir(moved) && self.is_above(moved, to_dir) {
            errors.push(Errno::EINVAL);
        }
        match new {
            None if flags.exchange => errors.push(Errno::ENOENT),
            Some(_) if flags.no_replace => errors.push(Errno::EEXIST),
            Some(other) if other == moved => return refuse_by(errors),
            Some(other) if flags.exchange && is_dir(other) && self.is_above(other, from_dir) => {
                errors.push(Errno::EINVAL);
            }
            Some(_) if flags.exchange => {}
            Some(other) => match (is_dir(moved), is_dir(other)) {
                (true, false) => errors.push(Errno::ENOTDIR),
                // The directory may be the one that the file is in.
                (false, true) if !self.is_empty(other) => {
                    errors.extend([Errno::EISDIR, Errno::ENOTEMPTY]);
                }
                (false, true) => errors.push(Errno::EISDIR),
                (true, true) if !self.is_empty(other) => errors.push(Errno::ENOTEMPTY),
                _ => {}
            },
            None => {}
        }
        refuse_by(errors)?;
        let (old_name, new_name) = ((from_dir, from.1.clone()), (to_dir, to.1.clone()));
        match new {
            Some(other) if flags.exchange => {
                self.names.insert(old_name, other);
            }
            _ => {
                self.remove(to);
                self.names.remove(&old_name);
            }
        }
        self.names.insert(new_name, moved);
        Ok(())
    }
}

fn refuse_by(errors: Vec<Errno>) -> Verdict {
    if errors.is_empty() { Ok(()) } else { Err(errors) }
}

/// A state that the history may be in, and which of the open calls have been made.
type Possible = (Names, BTreeSet<usize>);

/// The judge of one arena.
struct Search<'a> {
    calls: &'a [Call],
    /// Calls that overlap no change of names: what they see is one state.
    alone: BTreeSet<usize>,
    open: BTreeSet<usize>,
    possible: BTreeSet<Possible>,
}

impl Search<'_> {
    /// All states that the possible ones lead to by way of open calls. No call is made in a state where `is_end` holds.
    fn extend(&self, is_end: impl Fn(&Possible) -> bool) -> Result<BTreeSet<Possible>, String> {
        let mut seen = self.possible.clone();
        let mut left: Vec<Possible> = seen.iter().cloned().collect();
        while let Some(possible) = left.pop() {
            if is_end(&possible) {
                continue;
            }
            let (names, made) = &possible;
            for next in self.open.difference(made) {
                let is_alone = self.alone.contains(next);
                let Some(after) = names.after(*next, &self.calls[*next], is_alone) else {
                    continue;
                };
                let made = made.iter().chain([next]).copied().collect();
                let possible = (after, made);
                if seen.insert(possible.clone()) {
                    left.push(possible);
                }
            }
            if seen.len() > MAX_STATES {
                return Err(format!("more than {MAX_STATES} states are possible"));
            }
        }
        Ok(seen)
    }

    /// A call has ended: it has been made, by way of any other open calls.
    fn end(&mut self, index: usize) -> Result<(), String> {
        let extended = self.extend(|(_, made)| made.contains(&index))?;
        self.possible = extended
            .into_iter()
            .filter_map(|(names, mut made)| made.remove(&index).then_some((names, made)))
            .collect();
        self.open.remove(&index);
        match self.possible.is_empty() {
            true => Err("nothing explains this answer".to_owned()),
            false => Ok(()),
        }
    }

    /// Calls of unknown outcome have been made, or never will be.
    fn settle(&mut self) -> Result<(), String> {
        let calls = self.calls;
        let is_over = |index: &usize| calls[*index].outcome().is_none();
        if !self.open.iter().any(is_over) {
            return Ok(());
        }
        let extended = self.extend(|_| false)?;
        self.open.retain(|index| !is_over(index));
        self.possible = extended
            .into_iter()
            .map(|(names, mut made)| {
                made.retain(|index| !is_over(index));
                (names, made)
            })
            .collect();
        Ok(())
    }
}

/// Whether a call says something about names.
fn is_judged(call: &Call, refusals: &[Errno]) -> bool {
    match (&call.called, call.outcome()) {
        // As if it had not been made.
        (_, Some(Err(errno))) if refusals.contains(errno) => false,
        (called, None) => called.changes_names(),
        (called, Some(Err(errno))) if called.inode().is_some() => GONE.contains(errno),
        (called, Some(_)) => called.inode().is_none(),
    }
}

/// That an order of the calls of an arena explains their answers. `refusals` are errors that may be answered to any call, which
/// then changes nothing.
pub(crate) fn explain(
    arena: usize,
    (calls, moments): (&[Call], &[Moment]),
    refusals: &[Errno],
) -> Result<(), String> {
    let is_judged = |index: usize| {
        let call: &Call = &calls[index];
        call.arena == arena && is_judged(call, refusals)
    };
    let possible = BTreeSet::from([(Names::new(), BTreeSet::new())]);
    let alone = alone(calls, moments, is_judged);
    let mut search = Search { calls, alone, open: BTreeSet::new(), possible };
    for moment in moments {
        match *moment {
            Moment::Begin(index) if is_judged(index) => {
                search.open.insert(index);
            }
            Moment::End(index) if is_judged(index) && calls[index].outcome().is_some() => {
                let before = search.possible.clone();
                search.end(index).map_err(|why| {
                    let lines = calls
                        .iter()
                        .enumerate()
                        .filter(|(at, call)| is_judged(*at) && call.begun <= calls[index].begun)
                        .map(|(_, call)| format!("  {}\n", call.line()))
                        .collect::<Vec<_>>();
                    let last = lines[lines.len().saturating_sub(SHOWN)..].concat();
                    let state = before.first().map_or_else(String::new, |(names, _)| names.lines());
                    format!(
                        "arena {arena}: {why}:\n  {}\nthe calls before:\n{last}one of {} states before:\n{state}",
                        calls[index].line(),
                        before.len(),
                    )
                })?;
            }
            Moment::Mark(Mark::Settled) => search.settle()?,
            _ => {}
        }
    }
    Ok(())
}

/// The calls during which no other call changed names, or may have.
fn alone(calls: &[Call], moments: &[Moment], is_judged: impl Fn(usize) -> bool) -> BTreeSet<usize> {
    let mut alone = BTreeSet::new();
    let (mut open, mut changing) = (BTreeSet::new(), BTreeSet::new());
    for moment in moments {
        match *moment {
            Moment::Begin(index) if is_judged(index) => {
                if changing.is_empty() {
                    alone.insert(index);
                }
                if calls[index].called.changes_names() {
                    open.iter().for_each(|other| {
                        alone.remove(other);
                    });
                    changing.insert(index);
                }
                open.insert(index);
            }
            Moment::End(index) if calls[index].outcome().is_some() => {
                open.remove(&index);
                changing.remove(&index);
            }
            Moment::Mark(Mark::Settled) => {
                changing.retain(|index: &usize| calls[*index].outcome().is_some());
            }
            _ => {}
        }
    }
    alone
}

mod tests {
    use atoll_vfs::FileTime;

    use super::*;
    use crate::workload::history::History;
    use crate::workload::{env, run};

    const FILE: InodeNumber = InodeNumber(7);

    fn at(name: &'static str) -> (InodeNumber, Bytes) {
        (ROOT, Bytes::from_static(name.as_bytes()))
    }

    fn found(inode: InodeNumber, nlink: u32) -> Result<Reply, Errno> {
        let time = FileTime::default();
        Ok(Reply::Attr(Attr {
            inode,
            kind: FileKind::Regular,
            mode: 0o644,
            nlink,
            uid: 0,
            gid: 0,
            rdev: 0,
            size_bytes: 0,
            blocks_512: 0,
            block_size_bytes: 4096,
            atime: time,
            mtime: time,
            ctime: time,
        }))
    }

    fn create(name: &'static str) -> Called {
        let kind = FileKind::Regular;
        Called::Make { at: at(name), kind, mode: 0o644, target: Bytes::new() }
    }

    fn lookup(name: &'static str) -> Called {
        Called::Lookup(at(name))
    }

    fn unlink(name: &'static str) -> Called {
        Called::Unlink(at(name))
    }

    fn rename(from: &'static str, to: &'static str) -> Called {
        Called::Rename { from: at(from), to: at(to), flags: RenameFlags::default() }
    }

    /// One thing in a small history.
    enum Told {
        /// A call that ends before the next begins.
        Ended(Called, Result<Reply, Errno>),
        /// A call that never ends.
        Lost(Called),
        /// Calls at the same time.
        Together(Vec<(Called, Result<Reply, Errno>)>),
        Settled,
    }
    use Told::{Ended, Lost, Settled, Together};

    const NOTHING: Result<Reply, Errno> = Ok(Reply::Nothing);
    const MISSING: Result<Reply, Errno> = Err(Errno::ENOENT);

    fn is_explained(told: Vec<Told>) -> bool {
        run(async {
            let history = History::new(env());
            for told in told {
                match told {
                    Ended(called, answer) => history.end(history.begin(0, 1, called), answer),
                    Lost(called) => drop(history.begin(0, 1, called)),
                    Together(calls) => {
                        let begun: Vec<_> = calls
                            .into_iter()
                            .map(|(called, answer)| (history.begin(0, 1, called), answer))
                            .collect();
                        begun.into_iter().for_each(|(index, answer)| history.end(index, answer));
                    }
                    Settled => history.settled(),
                }
            }
            let (calls, moments) = history.read();
            explain(1, (&calls, &moments), &[]).is_ok()
        })
    }

    #[test]
    fn a_call_sees_all_that_ended_before_it() {
        let made = || Ended(create("a"), found(FILE, 1));
        assert!(is_explained(vec![made(), Ended(lookup("a"), found(FILE, 1))]));
        assert!(!is_explained(vec![made(), Ended(lookup("a"), MISSING)]));
        assert!(!is_explained(vec![made(), Ended(lookup("a"), found(InodeNumber(8), 1))]));
        assert!(!is_explained(vec![made(), Ended(lookup("a"), found(FILE, 2))]));
        let removed = || Ended(unlink("a"), NOTHING);
        assert!(is_explained(vec![made(), removed(), Ended(lookup("a"), MISSING)]));
        assert!(!is_explained(vec![made(), removed(), Ended(lookup("a"), found(FILE, 1))]));
        assert!(!is_explained(vec![made(), removed(), removed()]));
        // No number is another file's.
        assert!(!is_explained(vec![made(), Ended(create("b"), found(FILE, 1))]));
    }

    #[test]
    fn of_calls_at_the_same_time_one_is_first() {
        let other = InodeNumber(8);
        let exists = || Err(Errno::EEXIST);
        let race =
            |one, two| is_explained(vec![Together(vec![(create("a"), one), (create("a"), two)])]);
        assert!(race(found(FILE, 1), exists()));
        assert!(race(exists(), found(FILE, 1)));
        assert!(!race(found(FILE, 1), found(other, 1)), "exclusive means one of them");
        assert!(!race(exists(), exists()));
        // A name is moved to one place.
        let moves = |one, two| {
            is_explained(vec![
                Ended(create("a"), found(FILE, 1)),
                Together(vec![(rename("a", "b"), one), (rename("a", "c"), two)]),
            ])
        };
        assert!(moves(NOTHING, MISSING) && moves(MISSING, NOTHING));
        assert!(!moves(NOTHING, NOTHING) && !moves(MISSING, MISSING));
    }

    #[test]
    fn a_call_without_an_answer_is_made_once_at_any_time_or_never() {
        let lost = || Lost(create("a"));
        let (seen, missing) =
            (|| Ended(lookup("a"), found(FILE, 1)), || Ended(lookup("a"), MISSING));
        assert!(is_explained(vec![lost(), missing(), missing()]));
        assert!(is_explained(vec![lost(), missing(), seen(), seen()]));
        assert!(!is_explained(vec![lost(), seen(), missing()]));
        assert!(!is_explained(vec![lost(), seen(), Ended(unlink("a"), NOTHING), seen()]));
        assert!(is_explained(vec![lost(), Settled, seen()]));
        assert!(is_explained(vec![lost(), Settled, missing()]));
        assert!(!is_explained(vec![lost(), missing(), Settled, seen(), missing()]));
        assert!(
            !is_explained(vec![lost(), Settled, missing(), seen()]),
            "not after it was settled"
        );
        // It is refused like any other if its directory is gone.
        assert!(is_explained(vec![
            Lost(unlink("a")),
            Ended(create("a"), found(FILE, 1)),
            missing()
        ]));
    }

    #[test]
    fn a_refusal_has_a_reason() {
        assert!(!is_explained(vec![Ended(create("a"), Err(Errno::EEXIST))]));
        assert!(!is_explained(vec![Ended(create("a"), Err(Errno::ENOSPC))]));
        assert!(is_explained(vec![Ended(rename("a", "b"), MISSING)]));
        let made = || Ended(create("a"), found(FILE, 1));
        assert!(!is_explained(vec![made(), Ended(rename("a", "b"), MISSING)]));
        assert!(!is_explained(vec![
            made(),
            Ended(Called::Read { inode: FILE, offset: 0, len: 1 }, MISSING)
        ]));
        let gone = Ended(unlink("a"), NOTHING);
        let read = Called::Read { inode: FILE, offset: 0, len: 1 };
        assert!(is_explained(vec![made(), gone, Ended(read, Err(Errno::ESTALE))]));
    }
}
