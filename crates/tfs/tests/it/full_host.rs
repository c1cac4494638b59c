//! Images with holes, on a disk that is full.

use std::io;
use std::sync::{Arc, Mutex};

use atoll_env::TokioRuntime;
use atoll_tfs::device::Device;
use atoll_tfs::fs::{MountError, MountOptions, Tfs};
use atoll_tfs::mkfs::mkfs;
use atoll_vfs::{Errno, FileSystem, OpenFlags, Writer};
use bytes::Bytes;

use crate::calls::{ME, ROOT, owned, read, write};
use crate::e2fsck::assert_clean;
use crate::mkfs::options;

/// What the host gives room to at a time.
const CHUNK_BYTES: usize = 4096;

/// An image with holes in memory. Clones are handles to the same one.
#[derive(Clone, Debug)]
struct HoleyImage(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    bytes: Vec<u8>,
    has_room: Vec<bool>,
    /// How many holes the host has room for.
    room: usize,
}

impl State {
    /// Gives room to the chunk at this place.
    fn fill(&mut self, at: usize) -> io::Result<()> {
        let chunk = at / CHUNK_BYTES;
        if !self.has_room[chunk] {
            self.room = self.room.checked_sub(1).ok_or(io::ErrorKind::StorageFull)?;
            self.has_room[chunk] = true;
        }
        Ok(())
    }
}

impl HoleyImage {
    fn new(len_bytes: usize) -> HoleyImage {
        let has_room = vec![false; len_bytes / CHUNK_BYTES];
        let state = State { bytes: vec![0; len_bytes], has_room, room: usize::MAX };
        HoleyImage(Arc::new(Mutex::new(state)))
    }

    /// Leaves the host room for so many chunks.
    fn leave_room(&self, chunks: usize) {
        self.0.lock().unwrap().room = chunks;
    }

    fn mount(&self) -> Result<Tfs, MountError> {
        let options = MountOptions { background: false, ..MountOptions::default() };
        let env = Arc::new(TokioRuntime::current());
        Tfs::mount(env, Arc::new(self.clone()), &options).map(|mounted| mounted.0)
    }

    fn assert_clean(&self, story: &str) {
        assert_clean(&self.0.lock().unwrap().bytes, story);
    }
}

impl Device for HoleyImage {
    fn len_bytes(&self) -> u64 {
        self.0.lock().unwrap().bytes.len() as u64
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let at = offset as usize;
        buffer.copy_from_slice(&self.0.lock().unwrap().bytes[at..at + buffer.len()]);
        Ok(())
    }

    /// As a file system does: what there is room for is written.
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut state = self.0.lock().unwrap();
        let (mut at, mut rest) = (offset as usize, data);
        while !rest.is_empty() {
            let (part, later) = rest.split_at(rest.len().min(CHUNK_BYTES - at % CHUNK_BYTES));
            state.fill(at)?;
            state.bytes[at..at + part.len()].copy_from_slice(part);
            at += part.len();
            rest = later;
        }
        Ok(())
    }

    fn reserve(&self, offset: u64, len: u64) -> io::Result<()> {
        let mut state = self.0.lock().unwrap();
        (offset..offset + len).step_by(512).try_for_each(|at| state.fill(at as usize))
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

fn image() -> HoleyImage {
    let image = HoleyImage::new(32 << 20);
    mkfs(&(Arc::new(image.clone()) as Arc<dyn Device>), &options(4096)).unwrap();
    image
}

/// The story: the journal was a hole like any other. When the host was full no commit was possible
/// any more, and what had been written until then was lost with the process.
#[tokio::test]
async fn what_is_committed_while_the_host_is_full_is_there_after_a_crash() {
    let image = image();
    let tfs = image.mount().unwrap();
    for n in 0..20 {
        write(&tfs, ROOT, &format!("file{n}"), &owned(n, 30_000)).await.unwrap();
    }
    image.leave_room(0);
    // It stands in the journal, if not at home: then nothing more is changed.
    let committed = tfs.commit();
    assert_eq!(committed.is_err(), tfs.failure().is_some());
    if let Some(failure) = tfs.failure() {
        assert!(failure.contains("storage"), "it says why: {failure}");
        assert_eq!(tfs.unlink(ME, ROOT, b"file0").await, Err(Errno::EROFS));
    }
    drop(tfs);
    image.leave_room(usize::MAX);
    let tfs = image.mount().unwrap();
    for n in 0..20 {
        let bytes = read(&tfs, ROOT, &format!("file{n}")).await.unwrap();
        assert!(bytes == owned(n, 30_000), "file{n}");
    }
    tfs.unmount().unwrap();
    image.assert_clean("after a crash on a full host");
}

/// The story: one write for which the host had no room ended all changes, and what had not been
/// committed by then was lost.
#[tokio::test]
async fn a_write_that_the_host_has_no_room_for_is_enospc_and_harms_nothing() {
    let image = image();
    let tfs = image.mount().unwrap();
    write(&tfs, ROOT, "before", &owned(1, 100_000)).await.unwrap();
    let number = write(&tfs, ROOT, "sparse", &owned(2, 50_000)).await.unwrap();
    let handle = tfs.open(ME, number, OpenFlags::READ_WRITE).await.unwrap().handle;
    let put =
        |at: u64, bytes: Vec<u8>| tfs.write(Writer::At(ME), number, handle, at, Bytes::from(bytes));
    put(9_000_000, vec![7; 10]).await.unwrap();
    let free = tfs.statfs(ROOT).await.unwrap().blocks_free;
    for room in [0, 1, 3, 20] {
        image.leave_room(room);
        // At the end, within a hole, and reserved.
        assert_eq!(put(10_000_000, vec![9; 200_000]).await, Err(Errno::ENOSPC), "{room}");
        image.leave_room(room);
        assert_eq!(put(5_000_000, vec![9; 200_000]).await, Err(Errno::ENOSPC), "{room}");
        image.leave_room(room);
        let reserved = tfs.fallocate(ME, number, handle, 3_000_000, 1 << 20, 0).await;
        assert_eq!(reserved, Err(Errno::ENOSPC), "{room}");
    }
    image.leave_room(usize::MAX);
    assert_eq!(tfs.failure(), None);
    tfs.commit().unwrap();
    // But for indirect blocks, which stay with the file, and what was reserved.
    let now = tfs.statfs(ROOT).await.unwrap().blocks_free;
    assert!(free - now <= 40, "{free} blocks were free, {now} are");
    assert_eq!(tfs.read(number, handle, 5_000_000, 200_000).await.unwrap(), vec![0; 200_000]);
    put(5_000_000, vec![9; 200_000]).await.unwrap();
    assert_eq!(tfs.read(number, handle, 5_000_000, 200_000).await.unwrap(), vec![9; 200_000]);
    assert_eq!(tfs.read(number, handle, 9_000_000, 10).await.unwrap(), vec![7; 10]);
    tfs.close(number, handle).await.unwrap();
    assert!(read(&tfs, ROOT, "before").await.unwrap() == owned(1, 100_000));
    tfs.unmount().unwrap();
    image.assert_clean("after writes without room");
}

#[tokio::test]
async fn an_image_whose_journal_has_no_room_is_not_mounted() {
    let image = image();
    image.leave_room(10);
    let refused = image.mount().unwrap_err();
    assert!(matches!(refused, MountError::NoRoom(_)), "{refused}");
    image.leave_room(usize::MAX);
    image.mount().unwrap().unmount().unwrap();
    image.assert_clean("mounted at last");
}
