//! The calls on transparent files.

use atoll_vfs::{Errno, FileSystem, Handle, InodeNumber, OpenFlags, SetAttr, Writer};

use super::{Fsx, MAX_TRANSPARENT, MAX_TRANSPARENT_OPEN, Transparent};
use crate::calls::ME;

impl Fsx {
    /// One call on transparent files.
    pub(super) async fn churn(&mut self) {
        let names = self.transparent.len() as u64;
        let at = self.dice.below(names.max(1)) as usize;
        let name = self.transparent.keys().nth(at).cloned();
        match (self.dice.below(10), name) {
            (0..5, _) | (_, None) => self.new_transparent().await,
            (5..8, Some(name)) => self.read_transparent(&name).await,
            (8, Some(name)) => self.change_transparent(&name).await,
            (_, Some(name)) => {
                let file = self.transparent.remove(&name).unwrap();
                let number = self.ours.lookup(ME, self.contributed, name.as_bytes()).await;
                if let (Some(handle), Ok(entry)) = (file.open, &number) {
                    self.ours.close(entry.attr.inode, handle).await.unwrap();
                    // The lookup of its open.
                    self.ours.forget(entry.attr.inode, 1);
                }
                if let Ok(entry) = number {
                    self.ours.forget(entry.attr.inode, 1);
                }
                match self.ours.unlink(ME, self.contributed, name.as_bytes()).await {
                    Ok(()) => {}
                    Err(errno) => panic!("{}: unlink {name}: {errno:?}", self.place()),
                }
            }
        }
    }

    async fn new_transparent(&mut self) {
        if self.transparent.len() >= MAX_TRANSPARENT {
            return;
        }
        self.transparent_named += 1;
        let name = format!("t{}", self.transparent_named);
        let bytes = self.bytes(100_000);
        let made = self.ours.create(ME, self.contributed, name.as_bytes(), 0o600, OpenFlags::WRITE);
        let (entry, opened) = match made.await {
            Ok(made) => made,
            Err(Errno::ENOSPC) => return,
            Err(errno) => panic!("{}: a transparent file: {errno:?}", self.place()),
        };
        let number = entry.attr.inode;
        let written =
            self.ours.write(Writer::At(ME), number, opened.handle, 0, bytes.clone()).await;
        self.ours.close(number, opened.handle).await.unwrap();
        self.ours.forget(number, 1);
        let done = match written {
            Ok(done) => done as usize,
            Err(Errno::ENOSPC) => 0,
            Err(errno) => panic!("{}: writing a transparent file: {errno:?}", self.place()),
        };
        self.transparent.insert(name, Transparent { bytes: bytes[..done].to_vec(), open: None });
    }

    /// Opens a transparent file, or finds it lost, and then it is gone.
    async fn open_transparent(&mut self, name: &str) -> Option<(InodeNumber, Handle)> {
        let (parent, place) = (self.contributed, self.place());
        let entry = self.ours.lookup(ME, parent, name.as_bytes()).await;
        let entry =
            entry.unwrap_or_else(|errno| panic!("{place}: {name} was not opened: {errno:?}"));
        let number = entry.attr.inode;
        match self.ours.open(ME, number, OpenFlags::READ_WRITE).await {
            Ok(opened) => Some((number, opened.handle)),
            Err(Errno::ENOENT) => {
                self.ours.forget(number, 1);
                assert!(self.transparent[name].open.is_none(), "{place}: {name} was open");
                let again = self.ours.lookup(ME, parent, name.as_bytes()).await;
                assert_eq!(again.map(|_| ()), Err(Errno::ENOENT), "{place}: {name} is gone");
                self.transparent.remove(name);
                self.transparent_lost += 1;
                None
            }
            Err(errno) => panic!("{place}: opening {name}: {errno:?}"),
        }
    }

    async fn read_transparent(&mut self, name: &str) {
        let Some((number, handle)) = self.open_transparent(name).await else { return };
        let (at, len) = (self.dice.below(20_000), self.dice.below(100_000));
        let read = self.ours.read(number, handle, at, len as u32).await;
        let file = &self.transparent[name];
        let size = file.bytes.len();
        let expected = &file.bytes[(at as usize).min(size)..((at + len) as usize).min(size)];
        assert!(read.unwrap() == expected, "{}: {name} has other bytes", self.place());
        self.transparent_reads += 1;
        let open = self.transparent.values().filter(|file| file.open.is_some()).count();
        if open < MAX_TRANSPARENT_OPEN && file.open.is_none() {
            // It stays open for a while, and ordinary files keep off it.
            self.transparent.get_mut(name).unwrap().open = Some(handle);
            return;
        }
        self.ours.close(number, handle).await.unwrap();
        self.ours.forget(number, 1);
        if let Some(handle) = self.transparent.get_mut(name).unwrap().open.take() {
            self.ours.close(number, handle).await.unwrap();
            self.ours.forget(number, 1);
        }
    }

    async fn change_transparent(&mut self, name: &str) {
        let Some((number, handle)) = self.open_transparent(name).await else { return };
        let at = self.dice.below(60_000) as usize;
        let bytes = self.bytes(9000);
        let place = self.place();
        let file = self.transparent.get_mut(name).unwrap();
        if self.dice.one_in(3) {
            let to = SetAttr { size_bytes: Some(at as u64), ..SetAttr::default() };
            match self.ours.setattr(ME, number, Some(handle), to).await {
                Ok(_) => file.bytes.resize(at, 0),
                Err(errno) => panic!("{place}: truncating {name}: {errno:?}"),
            }
        } else {
            match self.ours.write(Writer::At(ME), number, handle, at as u64, bytes.clone()).await {
                Ok(done) => {
                    let end = at + done as usize;
                    file.bytes.resize(file.bytes.len().max(end), 0);
                    file.bytes[at..end].copy_from_slice(&bytes[..done as usize]);
                }
                Err(Errno::ENOSPC) => {}
                Err(errno) => panic!("{place}: writing {name}: {errno:?}"),
            }
        }
        self.ours.close(number, handle).await.unwrap();
        self.ours.forget(number, 1);
    }
}
