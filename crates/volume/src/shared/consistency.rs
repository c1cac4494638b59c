//! When a mount sees what others have written (Pastis §3.2), chosen for a mount and for each file.
//!
//! A mount has a default. A file or directory that has the attribute [`CONSISTENCY_XATTR`] is read as that says, by
//! all mounts, and what is made in such a directory gets the attribute too. The attribute is stored in the inode as any
//! other; a mount goes by it as it knows the inode, so a change counts from the first version on that a mount
//! reads which has it.

use atoll_vfs::Errno;
use bytes::Bytes;

use super::inode::Attributes;

/// The attribute that says how a file is read: `cto` or `ryw`.
pub const CONSISTENCY_XATTR: &str = "user.atoll.consistency";

/// When a mount sees what others have written (Pastis §3.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Consistency {
    /// Whoever opens a file sees what was closed before, wherever that was.
    #[default]
    CloseToOpen,
    /// Whoever opens a file sees at least what this mount has seen and written; what others have closed
    /// before, most probably.
    ReadYourWrites,
}

impl Consistency {
    /// The attribute's value.
    pub fn name(self) -> &'static str {
        match self {
            Consistency::CloseToOpen => "cto",
            Consistency::ReadYourWrites => "ryw",
        }
    }

    /// Reads the attribute's value.
    pub fn parse(value: &[u8]) -> Option<Consistency> {
        let all = [Consistency::CloseToOpen, Consistency::ReadYourWrites];
        all.into_iter().find(|one| one.name().as_bytes() == value)
    }

    /// What a file's own attribute says, if it has one. A value that is none says nothing.
    pub fn chosen(attributes: &Attributes) -> Option<Consistency> {
        Consistency::parse(xattr(attributes)?)
    }
}

fn xattr(attributes: &Attributes) -> Option<&Bytes> {
    let all = &attributes.xattrs;
    let at = all.binary_search_by(|(name, _)| (**name).cmp(CONSISTENCY_XATTR.as_bytes())).ok()?;
    Some(&all[at].1)
}

/// The attribute as what is made in a directory gets it.
pub(super) fn inherited(directory: &Attributes) -> Vec<(Bytes, Bytes)> {
    let name = Bytes::from_static(CONSISTENCY_XATTR.as_bytes());
    let chosen = Consistency::chosen(directory).map(|chosen| chosen.name());
    chosen.map(|value| (name, Bytes::from_static(value.as_bytes()))).into_iter().collect()
}

/// Refuses a value that the attribute cannot have.
pub(super) fn check(name: &[u8], value: &[u8]) -> Result<(), Errno> {
    match name == CONSISTENCY_XATTR.as_bytes() && Consistency::parse(value).is_none() {
        true => Err(Errno::EINVAL),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_attribute_is_read_inherited_and_checked() {
        let mut attributes = Attributes::default();
        assert_eq!((Consistency::chosen(&attributes), inherited(&attributes)), (None, vec![]));
        for (value, expected) in [
            ("cto", Some(Consistency::CloseToOpen)),
            ("ryw", Some(Consistency::ReadYourWrites)),
            ("CTO", None),
            ("", None),
        ] {
            let bytes = Bytes::from_static(value.as_bytes());
            let other = |name: &'static str| (Bytes::from_static(name.as_bytes()), Bytes::new());
            attributes.xattrs = vec![
                other("user.a"),
                (Bytes::from_static(CONSISTENCY_XATTR.as_bytes()), bytes.clone()),
                other("user.z"),
            ];
            assert_eq!(Consistency::chosen(&attributes), expected, "{value}");
            let child = inherited(&attributes);
            assert_eq!(child.len(), usize::from(expected.is_some()), "{value}");
            assert!(child.iter().all(|(_, its)| *its == bytes));
            let checked = check(CONSISTENCY_XATTR.as_bytes(), value.as_bytes());
            assert_eq!(checked.is_ok(), expected.is_some(), "{value}");
        }
        assert_eq!(check(b"user.other", b"anything"), Ok(()));
    }
}
