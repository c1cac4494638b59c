//! Directories: entries, circles, numbers of names.

use std::collections::BTreeSet;

use atoll_vfs::FileKind;

use super::{CheckError, Checker};
use crate::format::entry;
use crate::format::superblock::ROOT_INODE;

/// The most names of one directory that are compared with each other.
const MAX_COMPARED_NAMES: usize = 1 << 20;

impl Checker {
    pub(super) fn check_names(&mut self) -> Result<(), CheckError> {
        let is_directory = |kind| kind == Some(FileKind::Directory);
        let directories: Vec<u32> =
            self.known.iter().filter(|(_, k)| is_directory(k.kind)).map(|(n, _)| *n).collect();
        if !directories.contains(&ROOT_INODE) {
            self.found("there is no root directory");
        }
        self.progress.expect(directories.len() as u64);
        for directory in &directories {
            self.check_directory(*directory)?;
            self.progress.done(1);
        }
        self.check_circles(&directories);
        self.check_links();
        Ok(())
    }

    fn check_directory(&mut self, directory: u32) -> Result<(), CheckError> {
        let inode = self.ext2.inode(directory);
        let Some(inode) = self.noted(inode)? else { return Ok(()) };
        let block_bytes = self.ext2.meta.block_bytes() as u64;
        // A length that cannot be was found with the inode.
        let most = u64::from(self.superblock.blocks());
        let blocks = (inode.size_bytes / block_bytes).min(most) as u32;
        let mut names = BTreeSet::new();
        for number in 0..blocks {
            let block = self.ext2.block_of(&inode, number);
            // Holes and impossible pointers were found with the inode.
            let Ok(block) = block else { continue };
            if block == 0 {
                continue;
            }
            let read = self.ext2.meta.read(block).map_err(Into::into);
            let Some(bytes) = self.noted(read)? else { continue };
            if number == 0 {
                self.check_dots(directory, &bytes);
            }
            for found in entry::entries(&bytes) {
                let found = match found {
                    Ok(found) => found,
                    Err(error) => {
                        self.found(format!("directory {directory}, block {number}: {error}"));
                        break;
                    }
                };
                if found.inode == 0 || (number == 0 && found.at < 24 && is_dot(found.name)) {
                    continue;
                }
                self.check_entry(directory, &found);
                if names.len() < MAX_COMPARED_NAMES && !names.insert(found.name.to_vec()) {
                    let name = String::from_utf8_lossy(found.name).into_owned();
                    self.found(format!("directory {directory} has the name `{name}` twice"));
                }
            }
        }
        Ok(())
    }

    /// `.` and `..` come first.
    fn check_dots(&mut self, directory: u32, bytes: &[u8]) {
        let mut entries = entry::entries(bytes).map_while(Result::ok);
        let dot = entries.next().filter(|e| e.at == 0 && e.name == b"." && e.inode != 0);
        let up = entries.next().filter(|e| e.name == b".." && e.inode != 0);
        let (dot, up) = (dot.map(|e| e.inode), up.map(|e| e.inode));
        match dot {
            Some(number) if number == directory => {}
            Some(number) => {
                self.found(format!("`.` of directory {directory} is inode {number}"));
            }
            None => self.found(format!("directory {directory} does not begin with `.`")),
        }
        if up.is_none() {
            self.found(format!("directory {directory} has no `..` behind `.`"));
        }
        if dot == Some(directory) {
            self.count_name(directory);
        }
        if let Some(up) = up {
            self.count_name(up);
            if let Some(known) = self.known.get_mut(&directory) {
                known.up = up;
            }
        }
    }

    fn count_name(&mut self, number: u32) {
        if let Some(known) = self.known.get_mut(&number) {
            known.names = known.names.saturating_add(1);
        }
    }

    fn check_entry(&mut self, directory: u32, entry: &entry::Entry<'_>) {
        let number = entry.inode;
        let name = String::from_utf8_lossy(entry.name).into_owned();
        let here = format!("`{name}` in directory {directory}");
        if is_dot(entry.name) {
            return self.found(format!("{here} stands where it must not"));
        }
        if number < self.superblock.first_inode() || number > self.superblock.inodes() {
            return self.found(format!("{here} names inode {number}, which no file can have"));
        }
        let has_kinds = self.superblock.features().has_filetype();
        let Some(known) = self.known.get_mut(&number) else {
            return self.found(format!("{here} names inode {number}, which is not in use"));
        };
        known.names = known.names.saturating_add(1);
        let is_directory = known.kind == Some(FileKind::Directory);
        let named_in = known.parent;
        if named_in == 0 {
            known.parent = directory;
        }
        let wrong_kind = has_kinds && known.kind.is_some() && entry.kind != known.kind;
        if is_directory && named_in != 0 {
            self.found(format!("{here} is a directory that is also named in {named_in}"));
        }
        if wrong_kind {
            self.found(format!("{here} says of inode {number} that it is another kind of file"));
        }
    }

    /// Every directory must lead to the root, and its `..` to the directory that names it.
    fn check_circles(&mut self, directories: &[u32]) {
        let mut reached = BTreeSet::from([ROOT_INODE]);
        for directory in directories {
            let known = &self.known[directory];
            let (parent, up) = (known.parent, known.up);
            if parent != 0 && up != 0 && parent != up {
                self.found(format!(
                    "`..` of directory {directory} is {up}, but it is named in {parent}"
                ));
            }
            let mut way = BTreeSet::new();
            let mut at = *directory;
            let end = loop {
                if reached.contains(&at) {
                    break None;
                }
                if at == 0 {
                    break Some("leads to no root: it, or one above it, has no name");
                }
                if !way.insert(at) {
                    break Some("leads to no root: directories above it are in a circle");
                }
                at = self.known.get(&at).map_or(0, |known| known.parent);
            };
            if let Some(end) = end {
                self.found(format!("directory {directory} {end}"));
            }
            // Found or not, no way is walked twice.
            way.remove(&0);
            reached.extend(way);
        }
    }

    fn check_links(&mut self) {
        let wrong: Vec<String> = self
            .known
            .iter()
            .filter(|(number, _)| **number == ROOT_INODE || !self.is_nameless(**number))
            .filter(|(_, known)| u32::from(known.links) != known.names)
            .map(|(number, known)| match known.names {
                0 => format!("inode {number} is in use and has no name"),
                names => {
                    format!("inode {number} says that it has {} names, it has {names}", known.links)
                }
            })
            .collect();
        wrong.into_iter().for_each(|text| self.found(text));
    }
}

fn is_dot(name: &[u8]) -> bool {
    name == b"." || name == b".."
}
