//! All files of a checkpoint in the order in which another member can make them.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use atoll_vfs::FileKind;

use crate::change::PoolPlace;
use crate::index::{FileRecord, PoolIndexError, WrittenTables};
use crate::layout::FileId;

/// Files that are read from the index at once.
pub(super) const PAGE: usize = 256;
/// More directories above each other than any path has: an index that says so is damaged.
const MAX_DEPTH: usize = 1 << 16;

/// All files as of a checkpoint, each directory before what is in it.
pub(super) struct NamesWalk {
    tables: Arc<WrittenTables>,
    page: VecDeque<(FileId, FileRecord)>,
    /// The file that is the next in the order of numbers: all before it are given.
    at: FileId,
    /// Directories beyond it that are given.
    early: BTreeSet<FileId>,
    /// Directories without names, which are not given, nor what is in them.
    lost: BTreeSet<FileId>,
    /// A file and directories above it that are to be given before it.
    stack: Vec<(FileId, FileRecord)>,
}

/// A file with its names.
pub(super) type NamedFile = (FileId, FileRecord, Vec<PoolPlace>);

impl NamesWalk {
    pub(super) fn new(tables: Arc<WrittenTables>) -> NamesWalk {
        NamesWalk {
            tables,
            page: VecDeque::new(),
            at: FileId(0),
            early: BTreeSet::new(),
            lost: BTreeSet::new(),
            stack: Vec::new(),
        }
    }

    fn is_given(&self, dir: FileId) -> bool {
        dir.is_fixed() || dir < self.at || self.early.contains(&dir)
    }

    /// The next file; none at the end.
    pub(super) fn next(&mut self) -> Result<Option<NamedFile>, PoolIndexError> {
        loop {
            let Some((id, record)) = self.stack.last().copied() else {
                match self.next_in_order()? {
                    Some(next) => self.stack.push(next),
                    None => return Ok(None),
                }
                continue;
            };
            let mut places = self.tables.places(id)?;
            places.retain(|place| !self.lost.contains(&place.parent));
            if let Some(place) = places.iter().find(|place| !self.is_given(place.parent)) {
                let parent = place.parent;
                match self.tables.file(parent)? {
                    Some(record) if self.stack.len() < MAX_DEPTH => {
                        self.stack.push((parent, record))
                    }
                    _ => {
                        self.lost.insert(parent);
                    }
                }
                continue;
            }
            self.stack.pop();
            if places.is_empty() {
                if record.kind == FileKind::Directory {
                    self.lost.insert(id);
                }
                continue;
            }
            if id > self.at {
                self.early.insert(id);
            }
            return Ok(Some((id, record, places)));
        }
    }

    fn next_in_order(&mut self) -> Result<Option<(FileId, FileRecord)>, PoolIndexError> {
        loop {
            if self.page.is_empty() {
                self.page = self.tables.files_after(self.at, PAGE)?.into();
            }
            let Some((id, record)) = self.page.pop_front() else { return Ok(None) };
            self.at = id;
            if !id.is_fixed() && !self.early.remove(&id) && !self.lost.contains(&id) {
                return Ok(Some((id, record)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::{GroupEntries, IndexMeta, PoolIndex};
    use crate::layout::Slot;

    /// A number, what it is, and directories with its names in them.
    type TestFile<'a> = (u64, FileKind, &'a [(u64, &'a str)]);

    fn tables(files: &[TestFile<'_>]) -> (PoolIndex, Arc<WrittenTables>) {
        let file = Arc::new(tempfile::tempfile().unwrap());
        let (index, _) = PoolIndex::open(file).unwrap();
        for (id, kind, places) in files {
            let slot = (*id == 1).then_some(Slot::ROOT);
            let (ino, kind, leads_to) = (*id, *kind, None);
            let record = FileRecord { ino, generation: 0, slot, placeholders: 0, kind, leads_to };
            index.put_file(FileId(*id), record);
            for (parent, name) in *places {
                index.add_place(FileId(*id), &PoolPlace::new(FileId(*parent), name.as_bytes()));
            }
        }
        let meta = IndexMeta { sequence: 1, order: 1, next: 1 };
        let tables = index.write(&index.freeze(meta, GroupEntries::default())).unwrap();
        (index, tables)
    }

    fn walked(walk: &mut NamesWalk) -> Vec<u64> {
        let mut all = Vec::new();
        while let Some((id, _, _)) = walk.next().unwrap() {
            all.push(id.0);
        }
        all
    }

    #[test]
    fn each_directory_comes_before_what_is_in_it_and_each_file_once() {
        use FileKind::{Directory, Regular};
        let (_index, tables) = tables(&[
            (1, Directory, &[]),
            (4, Regular, &[(9, "in two"), (7, "directories")]),
            (3, Directory, &[(8, "below younger ones")]),
            (7, Directory, &[(1, "seven")]),
            (8, Directory, &[(9, "eight")]),
            (9, Directory, &[(1, "nine")]),
            (10, Directory, &[]),
            (11, Regular, &[(10, "in a directory without names")]),
            (12, Regular, &[(10, "there"), (3, "and here")]),
            (13, Regular, &[(99, "nowhere")]),
        ]);
        let mut walk = NamesWalk::new(tables);
        assert_eq!(walked(&mut walk), [9, 8, 3, 7, 4, 12]);
        assert!(walk.early.is_empty());
    }

    /// However many files there are.
    #[test]
    fn a_walk_remembers_directories_beyond_its_place_alone() {
        let names: Vec<String> = (0..3000).map(|number| format!("{number}")).collect();
        let places: Vec<[(u64, &str); 1]> = (0..3000)
            .map(|number| [(if number < 2990 { 4000 } else { 1 }, &*names[number])])
            .collect();
        let mut files: Vec<TestFile<'_>> = vec![(1, FileKind::Directory, &[])];
        for (number, places) in places.iter().enumerate() {
            files.push((number as u64 + 16, FileKind::Regular, places));
        }
        files.push((4000, FileKind::Directory, &[(1, "younger than what is in it")]));
        let (_index, tables) = tables(&files);
        let mut walk = NamesWalk::new(tables);
        let mut given = 0;
        while walk.next().unwrap().is_some() {
            given += 1;
            assert!(walk.early.len() <= 1 && walk.page.len() <= PAGE && walk.stack.len() <= 1);
        }
        assert_eq!(given, 3001);
    }

    #[test]
    fn a_directory_in_itself_is_an_error_and_no_endless_walk() {
        let (_index, tables) = tables(&[
            (1, FileKind::Directory, &[]),
            (5, FileKind::Directory, &[(6, "a")]),
            (6, FileKind::Directory, &[(5, "b")]),
            (7, FileKind::Regular, &[(1, "file")]),
        ]);
        assert_eq!(walked(&mut NamesWalk::new(tables)), [7]);
    }
}
