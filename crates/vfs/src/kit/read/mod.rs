//! Checks that change nothing.

mod attributes;
mod directories;
mod files;
mod names;
mod refusals;

use super::Check;

/// All of them, in the order of the floors: what later ones use, earlier ones check.
pub(super) fn suite() -> impl Iterator<Item = &'static Check> {
    [names::CHECKS, attributes::CHECKS, directories::CHECKS, files::CHECKS, refusals::CHECKS]
        .into_iter()
        .flatten()
}
