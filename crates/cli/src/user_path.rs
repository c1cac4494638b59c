//! Paths that a user types, followed no further than the user alone says where they lead.
//!
//! Symbolic links outside of Atoll's mounts are the user's own, and are followed. In a mount others may have made a
//! link, or may put one in the place of a directory at any moment: it could lead a command to a file of this machine,
//! or to another mount. So each directory on the way is held open ([`crate::beneath`]), and no link in a mount is followed.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

use atoll_volume::shared::file_state::STATE_XATTR;
use rustix::fs::FileType;
use rustix::io::Errno;

use crate::beneath::{Directory, Held};

/// What the root of each mount of Atoll tells of it.
const MOUNT_XATTR: &str = "user.atoll.status";
/// How many links a path may lead through, as for the kernel.
const MAX_LINKS: usize = 40;

/// A mount of Atoll.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Mount {
    /// Of a shared volume.
    OfShared,
    /// Of any other, which says this of itself.
    Other(Vec<u8>),
}

/// A path in a mounted shared volume, of which nothing need be there.
pub(crate) struct PathInMount {
    /// Where the volume is mounted.
    pub(crate) root: Directory,
    /// The rest of the path: names alone.
    pub(crate) below: PathBuf,
}

/// A file, directory or device to which a path leads.
pub(crate) struct Found {
    /// The file itself.
    pub(crate) held: Held,
    /// The directory that it is in; `None` of the root directory.
    pub(crate) above: Option<Directory>,
    /// Its path without links.
    pub(crate) path: PathBuf,
    /// The mount that it is in.
    pub(crate) mount: Option<Mount>,
}

/// Opens a directory that the user has named.
pub(crate) fn open_directory(path: &Path) -> io::Result<Directory> {
    let found = find(path)?;
    match found.held.kind() {
        FileType::Directory => found.held.open_directory(path.to_owned()),
        FileType::Symlink => Err(in_a_mount(&found.path)),
        _ => Err(Errno::NOTDIR.into()),
    }
}

/// Makes the directory that the user has named, and opens it.
pub(crate) fn make_directory(path: &Path) -> io::Result<Directory> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let above = path.parent().filter(|above| !above.as_os_str().is_empty());
    open_directory(above.unwrap_or(Path::new(".")))?.make_child(name)
}

/// Finds what a path leads to. In a mount that may be a symbolic link.
pub(crate) fn find(path: &Path) -> io::Result<Found> {
    let mut way = Way::along(path)?;
    while let Some(name) = way.names.pop_front() {
        if let Some(held) = way.step(&name)? {
            let Step { directory, mount, .. } = way.steps.pop().expect("the root directory stays");
            let path = directory.path_of(&name);
            return match way.names.is_empty() {
                true => Ok(Found { held, above: Some(directory), path, mount }),
                false if held.kind() == FileType::Symlink => Err(in_a_mount(&path)),
                false => Err(Errno::NOTDIR.into()),
            };
        }
    }
    let Step { directory, mount, .. } = way.steps.pop().expect("the root directory stays");
    let held = directory.hold(OsStr::new("."))?;
    let above = way.steps.pop().map(|step| step.directory);
    Ok(Found { held, above, path: directory.path().to_owned(), mount })
}

/// Finds the mounted shared volume that a path leads into; `None` if it leads into none.
pub(crate) fn find_in_mount(path: &Path) -> io::Result<Option<PathInMount>> {
    let mut way = Way::along(path)?;
    // As far as there are directories. A mount may lie in another one.
    let mut ends_at = None;
    while let Some(name) = way.names.pop_front() {
        match way.step(&name) {
            Ok(None) => continue,
            Ok(Some(held)) => ends_at = Some(held.kind()),
            Err(error) if error.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => {
                return Err(error);
            }
            Err(_) => {}
        }
        way.names.push_front(name);
        break;
    }
    let last = way.steps.last().expect("the root directory stays");
    if last.mount != Some(Mount::OfShared) {
        return match (&last.mount, ends_at, way.names.front()) {
            (Some(_), Some(FileType::Symlink), Some(name)) => {
                Err(in_a_mount(&last.directory.path_of(name)))
            }
            _ => Ok(None),
        };
    }
    let (device, deepest) = (last.device, last.directory.path().to_owned());
    let inside = way.steps.iter().rev().take_while(|step| step.device == device).count();
    let Step { directory: root, .. } = way.steps.swap_remove(way.steps.len() - inside);
    let mut below = deepest.strip_prefix(root.path()).expect("it lies below").to_owned();
    below.extend(&way.names);
    Ok(Some(PathInMount { root, below }))
}

fn in_a_mount(link: &Path) -> io::Error {
    let told = format!(
        "{} is a symbolic link in a mount, where others may have made it: it is not followed",
        link.display()
    );
    io::Error::new(io::ErrorKind::InvalidInput, told)
}

/// A directory on the way.
struct Step {
    directory: Directory,
    device: u64,
    mount: Option<Mount>,
}

impl Step {
    /// The step into a directory, from `above`.
    fn into(held: &Held, path: PathBuf, above: Option<&Step>) -> io::Result<Step> {
        let device = held.stat().st_dev;
        let mount = match above.filter(|above| above.device == device) {
            Some(above) => above.mount.clone(),
            None if held.has_xattr(STATE_XATTR) => Some(Mount::OfShared),
            None => held.xattr(OsStr::new(MOUNT_XATTR)).ok().map(Mount::Other),
        };
        Ok(Step { directory: held.open_directory(path)?, device, mount })
    }
}

/// A path that is being followed.
struct Way {
    /// The directories from the root directory on.
    steps: Vec<Step>,
    /// Names that are left: plain ones, and `..`.
    names: VecDeque<OsString>,
    /// Links that were followed.
    links: usize,
}

impl Way {
    fn along(path: &Path) -> io::Result<Way> {
        let top = Directory::open(Path::new("/"))?;
        let root = Step::into(&top.hold(OsStr::new("."))?, "/".into(), None)?;
        let names = std::path::absolute(path)?.components().filter_map(name_of).collect();
        Ok(Way { steps: vec![root], names, links: 0 })
    }

    /// Goes on to a name: into a directory, or along a link. Anything else ends the way.
    fn step(&mut self, name: &OsStr) -> io::Result<Option<Held>> {
        if name == ".." {
            // The root directory is its own.
            self.steps.truncate((self.steps.len() - 1).max(1));
            return Ok(None);
        }
        let here = self.steps.last().expect("the root directory stays");
        let held = here.directory.hold(name)?;
        match held.kind() {
            FileType::Directory => {
                let step = Step::into(&held, here.directory.path_of(name), Some(here))?;
                self.steps.push(step);
                Ok(None)
            }
            FileType::Symlink if here.mount.is_none() => {
                self.links += 1;
                if self.links > MAX_LINKS {
                    return Err(Errno::LOOP.into());
                }
                let target = PathBuf::from(OsString::from_vec(held.target()?));
                if target.is_absolute() {
                    self.steps.truncate(1);
                }
                for component in target.components().rev() {
                    name_of(component).into_iter().for_each(|name| self.names.push_front(name));
                }
                Ok(None)
            }
            _ => Ok(Some(held)),
        }
    }
}

fn name_of(component: Component<'_>) -> Option<OsString> {
    match component {
        Component::Normal(_) | Component::ParentDir => Some(component.as_os_str().to_owned()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, symlink};

    use super::*;

    #[test]
    fn a_users_own_links_are_followed() -> io::Result<()> {
        let scratch = tempfile::tempdir()?;
        let top = fs::canonicalize(scratch.path())?;
        fs::create_dir_all(top.join("a/b"))?;
        fs::write(top.join("a/b/file"), "text")?;
        symlink("a/b", top.join("relative"))?;
        symlink(top.join("relative"), top.join("absolute"))?;
        symlink("../b/file", top.join("a/b/up"))?;
        symlink("round", top.join("round"))?;
        let is = |path: &str, what: &str| -> io::Result<()> {
            let found = find(&top.join(path))?;
            assert_eq!(found.path, top.join(what), "{path}");
            assert_eq!(found.held.stat().st_ino, fs::metadata(top.join(what))?.ino(), "{path}");
            let above = found.above.expect("it is not the root directory");
            assert_eq!(above.path(), top.join(what).parent().expect("above"), "{path}");
            Ok(())
        };
        for (path, what) in [
            ("a/b", "a/b"),
            ("a/./b/", "a/b"),
            ("relative", "a/b"),
            ("absolute/file", "a/b/file"),
            ("absolute/../b", "a/b"),
            ("relative/up", "a/b/file"),
        ] {
            is(path, what)?;
        }
        let opened = open_directory(&top.join("absolute"))?;
        assert_eq!((opened.path(), opened.names()?.len()), (&*top.join("absolute"), 2));
        let kind = |path: &str| open_directory(&top.join(path)).map(drop).map_err(|e| e.kind());
        assert_eq!(kind("none/file"), Err(io::ErrorKind::NotFound));
        assert_eq!(kind("a/b/file"), Err(io::ErrorKind::NotADirectory));
        assert_eq!(kind("a/b/file/x"), Err(io::ErrorKind::NotADirectory));
        let round = find(&top.join("round")).err().and_then(|error| error.raw_os_error());
        assert_eq!(round, Some(Errno::LOOP.raw_os_error()));
        make_directory(&top.join("relative/made"))?;
        assert!(top.join("a/b/made").is_dir());
        assert!(make_directory(&top.join("relative/made")).is_err(), "it is there");
        assert_eq!(find(Path::new("/../.."))?.path, Path::new("/"));
        assert!(find_in_mount(&top.join("absolute/none/file"))?.is_none());
        Ok(())
    }
}
