//! Checks that change the file system, each over a new one.

mod attributes;
mod files;
mod locks;
mod names;
mod rename;

use super::Check;

/// All of them.
pub(super) fn suite() -> impl Iterator<Item = &'static Check> {
    [names::CHECKS, files::CHECKS, rename::CHECKS, attributes::CHECKS, locks::CHECKS]
        .into_iter()
        .flatten()
}
