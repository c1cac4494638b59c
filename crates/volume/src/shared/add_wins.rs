//! Sets whose concurrent versions merge: an element that one writer adds stays, even if another
//! removes its like at the same time (an *add-wins*, or *observed-remove*, set: Shapiro et al. 2011,
//! INRIA RR-7506, §3.3.5).
//!
//! Each element carries the dot of the write that added it. A version of the set comes with its own
//! dot and with its writer's context. If a version lacks an element, these tell why: its writer had
//! seen the element and has removed it, or had not seen it. Pastis resolves no conflicts of directories (§3.1: "directory conflicts cannot be automatically solved").
//!
//! A version that was written under an older binding than one which has an element does not remove that, whatever its
//! context says: its writer may have been shut out.
//!
//! **Invariants.** Merging does not depend on the order of versions. An element is in the merged set
//! if a version has it and each version that lacks it was written without having seen it, or under an older binding.

use std::collections::{BTreeMap, BTreeSet};

use atoll_key::kinds::certified::{Context, Dot};

/// An element of an add-wins set.
pub trait Element: Ord + Clone {
    /// The write that added it.
    fn added(&self) -> Dot;
}

/// One version of a set.
#[derive(Clone, Copy, Debug)]
pub struct Version<'a, T> {
    /// The write that made it.
    pub dot: Dot,
    /// The version of the binding that it counts as written under.
    pub binding: u32,
    /// What its writer had seen.
    pub context: &'a Context,
    /// What is in it.
    pub elements: &'a BTreeSet<T>,
}

impl<T: Element> Version<'_, T> {
    /// Whether its writer knew of the write, and so has removed the elements of it that are not here.
    fn has_seen(&self, dot: &Dot) -> bool {
        self.dot == *dot || self.context.includes(dot)
    }
}

/// What concurrent versions of one set say together: its elements, each with the newest binding of a version that has it.
pub fn merge<T: Element>(versions: &[Version<'_, T>]) -> BTreeMap<T, u32> {
    let mut all: BTreeMap<&T, u32> = BTreeMap::new();
    for version in versions {
        for element in version.elements {
            let binding = all.entry(element).or_default();
            *binding = version.binding.max(*binding);
        }
    }
    let stays = |(element, binding): &(&T, u32)| {
        versions.iter().all(|version| {
            version.elements.contains(*element)
                || version.binding < *binding
                || !version.has_seen(&element.added())
        })
    };
    all.into_iter().filter(stays).map(|(element, binding)| (element.clone(), binding)).collect()
}
