//! Other software writes: what it does counts, and nothing transparent is trusted before it
//! has been looked at again.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use atoll_env::{Runtime, TokioRuntime};
use atoll_tfs::check::{CheckOptions, check};
use atoll_tfs::device::{Device, FaultyDevice, ImageDevice};
use atoll_tfs::fs::{MountError, MountOptions, MountReport, Tfs, read_superblock};
use atoll_tfs::mkfs::mkfs;
use atoll_vfs::{Errno, FileSystem, InodeNumber, XattrFlags};
use tempfile::TempDir;

use crate::calls::{ME, ROOT, contribution, fill, owned, read, write};
use crate::e2fsck::{assert_image_clean, open_image};
use crate::mkfs::options;
use crate::recorder::{Operation, Playback, Recorder};

const LEN: usize = 100_000;

/// An image whose free space is full of transparent files, and how many there are.
struct Image {
    place: TempDir,
    count: u64,
}

impl Image {
    fn path(&self) -> PathBuf {
        self.place.path().join("image")
    }

    async fn full(mib: u64, block_bytes: u32) -> Image {
        let image = Image { place: TempDir::new().unwrap(), count: 0 };
        std::fs::File::create(image.path()).unwrap().set_len(mib << 20).unwrap();
        let device = image.open();
        mkfs(&(device.clone() as _), &options(block_bytes)).unwrap();
        drop(device);
        let (tfs, _) = image.mount();
        let parent = contribution(&tfs).await;
        let count = fill(&tfs, parent, LEN).await;
        write(&tfs, ROOT, "ordinary", &owned(7000, LEN)).await.unwrap();
        unmount(tfs);
        Image { count, ..image }
    }

    fn open(&self) -> Arc<ImageDevice> {
        open_image(&self.path(), false)
    }

    fn mount(&self) -> (Tfs, MountReport) {
        mount_on(self.open()).unwrap()
    }

    fn run(&self, tool: &str, arguments: &[&str], allowed: &[i32]) {
        let output = Command::new(tool).args(arguments).arg(self.path()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(allowed.contains(&output.status.code().unwrap()), "{tool}: {said}");
    }

    fn debugfs(&self, command: &str) {
        self.run("debugfs", &["-w", "-R", command], &[0]);
    }

    /// A file of other software's own, to copy from.
    fn source(&self, name: &str, bytes: &[u8]) -> String {
        let path = self.place.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    }
}

fn mount_on(device: Arc<dyn atoll_tfs::device::Device>) -> Result<(Tfs, MountReport), MountError> {
    let env = Arc::new(TokioRuntime::current());
    let options = MountOptions { background: false, ..MountOptions::default() };
    Tfs::mount(env, device, &options)
}

/// Ends the mount and lets the image go.
fn unmount(tfs: Tfs) {
    tfs.unmount().unwrap();
}

async fn contributed(tfs: &Tfs) -> InodeNumber {
    tfs.lookup(ME, ROOT, b"contributed").await.unwrap().attr.inode
}

/// Reads all transparent files but `others`: their own, or gone. How many are there.
async fn check_all(tfs: &Tfs, count: u64, others: &[u64]) -> u64 {
    let parent = contributed(tfs).await;
    let mut whole = 0;
    for n in (0..count).filter(|n| !others.contains(n)) {
        match read(tfs, parent, &format!("t{n}")).await {
            Ok(bytes) => {
                assert!(bytes == owned(n, LEN), "t{n} has its own bytes");
                whole += 1;
            }
            Err(errno) => assert_eq!(errno, Errno::ENOENT, "t{n}"),
        }
    }
    whole
}

/// Mounts an image for as long as it takes to count the transparent files that are whole.
async fn whole_files(image: &Image) -> u64 {
    let (tfs, _) = image.mount();
    let whole = check_all(&tfs, image.count, &[]).await;
    unmount(tfs);
    whole
}

#[tokio::test]
async fn what_debugfs_wrote_over_transparent_data_is_noticed() {
    for block_bytes in [1024, 4096] {
        let image = Image::full(32, block_bytes).await;
        let bytes = owned(9000, 4_000_000);
        let source = image.source("source", &bytes);
        // Within the second in which TFS wrote last.
        image.debugfs(&format!("write {source} foreign"));
        let (tfs, report) = image.mount();
        assert!(report.foreign && !report.recovered);
        let verified = report.verified.unwrap();
        assert!(verified.overwritten_blocks > 0 && verified.maps > 0, "{verified:?}");
        let whole = check_all(&tfs, image.count, &[]).await;
        assert!(whole > 0 && whole + 30 <= image.count, "{whole} of {}", image.count);
        assert!(read(&tfs, ROOT, "foreign").await.unwrap() == bytes);
        assert!(read(&tfs, ROOT, "ordinary").await.unwrap() == owned(7000, LEN));
        tfs.clean().unwrap();
        assert_eq!(tfs.usage().unwrap().overwritten_blocks, 0);
        assert_eq!(check_all(&tfs, image.count, &[]).await, whole);
        unmount(tfs);
        assert_image_clean(&image.path(), "after debugfs and TFS");
        let (tfs, report) = image.mount();
        assert!(!report.foreign && report.verified.is_none(), "once is enough");
        drop(tfs);
    }
}

/// What was freed again shows in no bitmap: only the bytes tell.
#[tokio::test]
async fn what_debugfs_wrote_and_removed_again_is_noticed() {
    let image = Image::full(16, 1024).await;
    let source = image.source("source", &owned(9000, 3_000_000));
    image.debugfs(&format!("write {source} foreign"));
    image.debugfs("rm foreign");
    let (tfs, report) = image.mount();
    assert!(report.foreign);
    // No more than those of the ordinary file that TFS wrote, and of its directory.
    let overwritten = report.verified.unwrap().overwritten_blocks;
    assert!(overwritten <= LEN.div_ceil(1024) as u64 + 8, "{overwritten}");
    let whole = check_all(&tfs, image.count, &[]).await;
    assert!(whole > 0 && whole + 20 <= image.count, "{whole} of {}", image.count);
    unmount(tfs);
    assert_image_clean(&image.path(), "after debugfs and TFS");
}

#[tokio::test]
async fn an_inode_that_others_changed_is_ordinary_or_gone_and_its_blocks_are_free() {
    let image = Image::full(16, 1024).await;
    let source = image.source("source", b"written by another");
    image.debugfs("rm contributed/t3");
    image.debugfs("rm contributed/t4");
    image.debugfs(&format!("write {source} contributed/t4"));
    // Blocks and a length for an inode that was transparent, as a write by the kernel.
    image.debugfs("sif contributed/t5 generation 77");
    image.debugfs("sif contributed/t6 size 10");
    let (tfs, report) = image.mount();
    let verified = report.verified.unwrap();
    assert!(report.foreign);
    assert_eq!(verified.stale_maps, 4, "{verified:?}");
    assert_eq!(verified.ordinary, 2, "{verified:?}");
    assert_eq!(verified.ownerless_blocks, 0, "{verified:?}");
    let usage = tfs.usage().unwrap();
    assert_eq!(usage.transparent_files, image.count - 4);
    let parent = contributed(&tfs).await;
    assert_eq!(read(&tfs, parent, "t3").await, Err(Errno::ENOENT));
    assert_eq!(read(&tfs, parent, "t5").await.unwrap(), b"", "an ordinary file of no bytes");
    assert_eq!(read(&tfs, parent, "t6").await.unwrap(), [0; 10], "an ordinary file with a hole");
    let name = b"user.tfs.transparent";
    for slot in ["t5", "t6"] {
        let number = tfs.lookup(ME, parent, slot.as_bytes()).await.unwrap().attr.inode;
        assert_eq!(tfs.getxattr(number, name).await, Err(Errno::ENODATA), "{slot}");
    }
    assert_eq!(read(&tfs, parent, "t4").await.unwrap(), b"written by another");
    check_all(&tfs, image.count, &[3, 4, 5, 6]).await;
    unmount(tfs);
    assert_image_clean(&image.path(), "after debugfs and TFS");
}

#[tokio::test]
async fn tune2fs_and_e2fsck_lose_nothing() {
    let image = Image::full(16, 1024).await;
    let before = whole_files(&image).await;
    image.run("tune2fs", &["-L", "other"], &[0]);
    let (tfs, report) = image.mount();
    assert!(report.foreign, "tune2fs writes");
    assert_eq!(check_all(&tfs, image.count, &[]).await, before);
    unmount(tfs);
    image.run("e2fsck", &["-fy"], &[0]);
    let (tfs, report) = image.mount();
    assert!(report.foreign, "e2fsck -fy writes");
    assert_eq!(check_all(&tfs, image.count, &[]).await, before);
    unmount(tfs);
    image.run("e2fsck", &["-fn"], &[0]);
    let (_tfs, report) = image.mount();
    assert!(!report.foreign, "e2fsck -n does not");
}

/// A second name, as the kernel gives it to what is an empty file to it. The file was lost, one
/// name was removed and the inode given back, and the other name stood for nothing.
#[tokio::test]
async fn a_lost_file_that_others_gave_a_second_name_leaves_no_name_without_a_file() {
    let image = Image::full(16, 1024).await;
    for (name, link) in [("t1", "second"), ("t2", "contributed/second")] {
        image.debugfs(&format!("ln contributed/{name} {link}"));
        image.debugfs(&format!("sif contributed/{name} links_count 2"));
    }
    image.run("e2fsck", &["-fn"], &[0]);
    assert!(whole_files(&image).await > 100);
    assert_image_clean(&image.path(), "second names");
    let (tfs, _) = image.mount();
    // All there is room for: nothing transparent is left.
    let mut n = 0;
    while write(&tfs, ROOT, &format!("o{n}"), &owned(n, 200_000)).await.is_ok() {
        n += 1;
    }
    let parent = contributed(&tfs).await;
    for (parent, name) in [(parent, "t1"), (ROOT, "second"), (parent, "second"), (parent, "t2")] {
        assert_eq!(read(&tfs, parent, name).await, Err(Errno::ENOENT), "{name}");
        let found = tfs.lookup(ME, parent, name.as_bytes()).await.map(|e| e.attr.inode);
        assert_eq!(found, Err(Errno::ENOENT), "{name}");
    }
    tfs.clean().unwrap();
    assert_eq!(tfs.failure(), None);
    unmount(tfs);
    assert_image_clean(&image.path(), "second names of lost files");
}

/// The clock says what it said when TFS wrote last, or less.
#[tokio::test]
async fn others_are_noticed_whatever_the_clock_says() {
    for earlier_secs in [0u64, 1, 2, 3600] {
        let image = Image::full(16, 1024).await;
        let source = image.source("source", &owned(9000, 3_000_000));
        let superblock = read_superblock(&*image.open()).unwrap();
        let then = u64::from(superblock.write_time()) - earlier_secs;
        let output = Command::new("debugfs")
            .env("E2FSPROGS_FAKE_TIME", then.to_string())
            .args(["-w", "-R", &format!("write {source} foreign")])
            .arg(image.path())
            .output();
        assert!(output.unwrap().status.success());
        let (tfs, report) = image.mount();
        // Of a clock that was set back to the very second, nothing shows but the bitmaps.
        assert_eq!(report.foreign, earlier_secs != 0, "{earlier_secs}");
        let whole = check_all(&tfs, image.count, &[]).await;
        assert!(whole > 0 && whole + 20 <= image.count, "{whole} of {}", image.count);
        assert!(read(&tfs, ROOT, "foreign").await.unwrap() == owned(9000, 3_000_000));
        unmount(tfs);
        assert_image_clean(&image.path(), "a clock that was set back");
    }
}

/// What other tools take for the time may be that of the kernel's last tick, which is still in
/// the second before for some milliseconds.
#[tokio::test]
async fn others_are_noticed_whose_clock_is_a_tick_behind_ours() {
    let image = Image::full(16, 1024).await;
    let unix_secs = || TokioRuntime::current().unix_ms() / 1000;
    let behind = loop {
        let before = unix_secs();
        unmount(image.mount().0);
        if unix_secs() == before {
            break before - 1;
        }
    };
    let output = Command::new("debugfs")
        .env("E2FSPROGS_FAKE_TIME", behind.to_string())
        .args(["-w", "-R", "set_super_value volume_name other"])
        .arg(image.path())
        .output();
    assert!(output.unwrap().status.success());
    assert!(image.mount().1.foreign);
}

/// Whatever an administrator changes, transparent files are their own or gone.
#[tokio::test]
async fn what_tune2fs_changes_is_noticed_and_survived() {
    let cases: &[(&[&str], bool)] = &[
        (&["-U", "00112233-4455-6677-8899-aabbccddeeff"], true),
        (&["-m", "1"], true),
        (&["-c", "20", "-C", "7"], true),
        (&["-O", "^dir_index"], true),
        (&["-O", "^large_file"], true),
        // Inode tables grow over what follows them.
        (&["-I", "512"], false),
    ];
    for (arguments, keeps_all) in cases {
        let image = Image::full(16, 1024).await;
        let before = whole_files(&image).await;
        // It wants to see one before it moves inode tables.
        image.run("e2fsck", &["-fy"], &[0, 1]);
        image.run("tune2fs", arguments, &[0]);
        image.run("e2fsck", &["-fy"], &[0, 1]);
        let (tfs, report) = image.mount();
        assert!(report.foreign && report.verified.is_some(), "{arguments:?}");
        let whole = check_all(&tfs, image.count, &[]).await;
        assert!(whole <= before && whole > before / 2, "{arguments:?}: {whole} of {before}");
        assert!(whole == before || !keeps_all, "{arguments:?}: {whole} of {before}");
        assert!(read(&tfs, ROOT, "ordinary").await.unwrap() == owned(7000, LEN));
        unmount(tfs);
        assert_image_clean(&image.path(), &format!("tune2fs {arguments:?}"));
        let (_, report) = image.mount();
        assert!(!report.foreign, "{arguments:?}: noticed once");
    }
}

/// Records are made for one size of file system.
#[tokio::test]
async fn a_file_system_that_was_resized_has_its_records_made_anew() {
    for (before, after) in [(16, 40), (40, 24)] {
        let image = Image::full(before, 1024).await;
        let path = image.path();
        image.run("e2fsck", &["-fy"], &[0, 1]);
        if after > before {
            std::fs::OpenOptions::new()
                .write(true)
                .open(&path)
                .unwrap()
                .set_len(after << 20)
                .unwrap();
        }
        let size = format!("{after}M");
        let resized = Command::new("resize2fs").arg(&path).arg(size).output().unwrap();
        assert!(resized.status.success(), "{}", String::from_utf8_lossy(&resized.stderr));
        let error = mount_on(image.open()).unwrap_err().to_string();
        assert!(error.contains("resized"), "{error}");
        image.run("e2fsck", &["-fn"], &[0]);

        let device: Arc<dyn Device> = image.open();
        let options = CheckOptions { repair: true, random: [4; 32], ..CheckOptions::default() };
        let report = check(&device, &options).unwrap();
        assert!(!report.is_clean() && report.is_sound(), "{report:?}");
        drop(device);
        assert_image_clean(&path, "with new records");
        let (tfs, _) = image.mount();
        assert!(read(&tfs, ROOT, "ordinary").await.unwrap() == owned(7000, LEN));
        assert_eq!(check_all(&tfs, image.count, &[]).await, 0, "none has kept its bytes");
        let parent = contributed(&tfs).await;
        let again = fill(&tfs, parent, LEN).await;
        assert!(again * LEN as u64 > (after << 20) / 2, "{again}");
        assert_eq!(check_all(&tfs, again, &[]).await, again);
        unmount(tfs);
        assert_image_clean(&path, "resized and filled again");
    }
}

/// What a mount has found out is not forgotten when it ends in a crash.
#[tokio::test]
async fn a_changed_bitmap_is_not_forgotten_in_a_crash() {
    let image = Image::full(16, 1024).await;
    let (tfs, _) = image.mount();
    let parent = contributed(&tfs).await;
    let mut first = Vec::new();
    for name in ["t5", "t7"] {
        let number = tfs.lookup(ME, parent, name.as_bytes()).await.unwrap().attr.inode;
        first.push(tfs.file_extents(number).unwrap()[0].start);
        tfs.forget(number, 1);
    }
    unmount(tfs);
    set_bit_of(&image.path(), first[0]);
    let device = FaultyDevice::holding(std::fs::read(image.path()).unwrap(), 1);
    let (tfs, report) = mount_on(Arc::new(device.clone())).unwrap();
    assert!(!report.foreign, "nothing shows");
    assert_eq!(read(&tfs, parent, "t5").await, Err(Errno::ENOENT), "its block is another's now");
    assert!(read(&tfs, parent, "t7").await.unwrap() == owned(7, LEN));
    tfs.sync().await.unwrap();
    drop(tfs);
    device.power_cycle();
    // Data that was on its way when the power went.
    device.write_at(u64::from(first[1]) * 1024, &[1; 1024]).unwrap();
    let (tfs, report) = mount_on(Arc::new(device.clone())).unwrap();
    assert!(report.recovered && report.verified.is_some(), "{report:?}");
    assert_eq!(read(&tfs, parent, "t7").await, Err(Errno::ENOENT), "open finds out, not read");
}

/// The root may be a transparent directory too, and is counted again as one.
#[tokio::test]
async fn a_transparent_root_is_counted_as_before_when_others_have_written() {
    let image = Image::full(16, 1024).await;
    let (tfs, _) = image.mount();
    let on = bytes::Bytes::from_static(b"1");
    tfs.setxattr(ME, ROOT, b"user.tfs.transparent", on, XattrFlags::default()).await.unwrap();
    let before = tfs.usage().unwrap();
    assert_eq!(before.transparent_directories, 2);
    unmount(tfs);
    assert_image_clean(&image.path(), "a transparent root");
    image.run("tune2fs", &["-L", "other"], &[0]);
    let (tfs, report) = image.mount();
    assert!(report.verified.is_some());
    let after = tfs.usage().unwrap();
    assert_eq!(after.transparent_directories, before.transparent_directories);
    assert_eq!(after.transparent_files, before.transparent_files);
    unmount(tfs);
    assert_image_clean(&image.path(), "a transparent root, counted again");
}

#[tokio::test]
async fn what_the_kernel_does_on_a_loop_mount_counts() {
    let image = Image::full(16, 1024).await;
    let place = image.place.path().join("mounted");
    std::fs::create_dir(&place).unwrap();
    let Some(mounted) = LoopMount::of(&image.path(), &place) else {
        eprintln!("SKIPPED: this machine or user cannot mount an image through a loop device");
        return;
    };
    let there = |name: &str| place.join("contributed").join(name);
    assert_eq!(std::fs::read(there("t1")).unwrap(), b"", "others see empty files");
    assert!(std::fs::read(place.join("ordinary")).unwrap() == owned(7000, LEN));
    let bytes = owned(9000, 2_000_000);
    std::fs::write(place.join("foreign"), &bytes).unwrap();
    std::fs::write(there("t2"), b"ordinary now").unwrap();
    std::fs::remove_file(there("t3")).unwrap();
    std::fs::rename(there("t4"), place.join("moved")).unwrap();
    drop(mounted);
    let (tfs, report) = image.mount();
    assert!(report.foreign);
    let verified = report.verified.unwrap();
    assert_eq!((verified.stale_maps, verified.ordinary), (2, 1), "{verified:?}");
    assert!(read(&tfs, ROOT, "foreign").await.unwrap() == bytes);
    let parent = contributed(&tfs).await;
    assert_eq!(read(&tfs, parent, "t2").await.unwrap(), b"ordinary now");
    assert_eq!(read(&tfs, parent, "t3").await, Err(Errno::ENOENT));
    let moved = read(&tfs, ROOT, "moved").await;
    assert!(moved == Err(Errno::ENOENT) || moved == Ok(owned(4, LEN)), "its own, or gone");
    assert!(check_all(&tfs, image.count, &[2, 3, 4]).await > 0);
    unmount(tfs);
    assert_image_clean(&image.path(), "after the kernel and TFS");
}

/// A loop mount by the kernel's own driver, ended when it is dropped.
struct LoopMount<'a>(&'a Path);

impl LoopMount<'_> {
    fn of<'a>(image: &Path, place: &'a Path) -> Option<LoopMount<'a>> {
        let status =
            Command::new("mount").args(["-t", "ext2", "-o", "loop"]).args([image, place]).status();
        status.is_ok_and(|status| status.success()).then_some(LoopMount(place))
    }
}

impl Drop for LoopMount<'_> {
    fn drop(&mut self) {
        assert!(crate::kernel::unmount(self.0), "umount {}", self.0.display());
    }
}

/// TFS crashes, e2fsck puts the file system right, TFS goes on and crashes again: what stands
/// in the journal from before must not come back.
#[tokio::test]
async fn the_journal_of_before_e2fsck_does_not_come_back() {
    let image = Image::full(16, 1024).await;
    let recorder = Recorder::of(std::fs::read(image.path()).unwrap());
    {
        let (tfs, _) = mount_on(Arc::new(recorder.clone())).unwrap();
        for n in 0..12 {
            write(&tfs, ROOT, &format!("before{n}"), &owned(n, 5000)).await.unwrap();
            tfs.sync().await.unwrap();
        }
        // Not unmounted: it crashes.
    }
    let mut playback = Playback::of(std::fs::read(image.path()).unwrap());
    recorder.operations().iter().for_each(|operation| playback.play(operation));
    playback.play(&Operation::Sync);
    let mut dice = crate::dice::Dice::new(1);
    std::fs::write(image.path(), playback.crashed(&mut dice).bytes()).unwrap();
    image.run("e2fsck", &["-fy"], &[0, 1]);
    image.debugfs("rm before3");
    let base = std::fs::read(image.path()).unwrap();
    let recorder = Recorder::of(base.clone());
    {
        let (tfs, report) = mount_on(Arc::new(recorder.clone())).unwrap();
        assert!(report.foreign);
        assert_eq!(read(&tfs, ROOT, "before3").await, Err(Errno::ENOENT));
        write(&tfs, ROOT, "after", &owned(77, 5000)).await.unwrap();
        tfs.sync().await.unwrap();
    }
    // A crash after each operation: before3 never comes back, and its blocks belong to no file.
    let mut playback = Playback::of(base);
    for (at, operation) in recorder.operations().iter().enumerate() {
        playback.play(operation);
        let remains = Arc::new(playback.crashed(&mut dice));
        match mount_on(remains.clone()) {
            Ok((tfs, _)) => {
                let found = read(&tfs, ROOT, "before3").await;
                assert_eq!(found, Err(Errno::ENOENT), "crash at {at}");
                for n in (0..12).filter(|n| *n != 3) {
                    let found = read(&tfs, ROOT, &format!("before{n}")).await.unwrap();
                    assert!(found == owned(n, 5000), "before{n}, crash at {at}");
                }
                if at % 8 == 0 {
                    check_all(&tfs, image.count, &[]).await;
                }
            }
            Err(error) => panic!("crash at {at}: {error}"),
        }
    }
}

/// Where in the image the two copies of the header stand.
fn headers(image: &Path) -> Vec<usize> {
    let bytes = std::fs::read(image).unwrap();
    let at = bytes.chunks(1024).enumerate().filter(|(_, block)| block.starts_with(b"AtollTFS"));
    at.map(|(block, _)| block * 1024).collect()
}

fn spoil(image: &Path, at: usize) {
    let file = std::fs::OpenOptions::new().read(true).write(true).open(image).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at as u64).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], at as u64).unwrap();
}

#[tokio::test]
async fn one_copy_of_the_header_is_enough_and_none_is_refused_by_name() {
    let image = Image::full(16, 1024).await;
    let copies = headers(&image.path());
    assert_eq!(copies.len(), 2);
    for copy in &copies {
        spoil(&image.path(), copy + 100);
        let (tfs, _) = image.mount();
        assert!(check_all(&tfs, image.count, &[]).await > 0);
        // Each mount and unmount writes one of the two anew.
        unmount(tfs);
    }
    copies.iter().for_each(|copy| spoil(&image.path(), copy + 100));
    let device = image.open();
    let error = mount_on(device).unwrap_err().to_string();
    assert!(error.contains("header"), "{error}");
}

#[tokio::test]
async fn a_damaged_summary_is_counted_again() {
    let image = Image::full(16, 1024).await;
    let (tfs, _) = image.mount();
    let before = tfs.usage().unwrap();
    unmount(tfs);
    // After the header copies and the journal areas of 128 blocks, in the first blocks of the
    // records' file: found by what stands there.
    let bytes = std::fs::read(image.path()).unwrap();
    let is_summary = |at: usize| {
        let stored = u32::from_le_bytes(bytes[at + 60..at + 64].try_into().unwrap());
        stored != 0 && crc32fast::hash(&bytes[at..at + 60]) == stored
    };
    let found: Vec<usize> = (0..bytes.len()).step_by(64).filter(|at| is_summary(*at)).collect();
    assert!(!found.is_empty());
    found.iter().for_each(|at| spoil(&image.path(), at + 2));
    let (tfs, report) = image.mount();
    assert!(report.damaged_summaries && !report.foreign);
    let after = tfs.usage().unwrap();
    assert_eq!(after.transparent_blocks, before.transparent_blocks);
    assert_eq!(after.transparent_files, before.transparent_files);
    assert_eq!(after.transparent_directories, before.transparent_directories);
    assert!(check_all(&tfs, image.count, &[]).await > 0);
    unmount(tfs);
    assert_image_clean(&image.path(), "after counting again");
}

/// Marks a block as allocated in ext2's bitmap of an image in blocks of 1 KiB.
fn set_bit_of(image: &Path, block: u32) {
    // Bit n of the group's bitmap, whose block its descriptor names; blocks of a group: 8192.
    let bytes = std::fs::read(image).unwrap();
    let group = ((block - 1) / 8192) as usize;
    let descriptor = &bytes[2048 + 32 * group..];
    let bitmap = u32::from_le_bytes(descriptor[..4].try_into().unwrap()) as usize;
    let bit = ((block - 1) % 8192) as usize;
    let at = bitmap * 1024 + bit / 8;
    let file = std::fs::OpenOptions::new().write(true).open(image).unwrap();
    file.write_all_at(&[bytes[at] | 1 << (bit % 8)], at as u64).unwrap();
}

/// Another program writes to a bitmap without a trace in the superblock.
#[tokio::test]
async fn a_bitmap_that_changed_behind_the_superblock_is_noticed() {
    let image = Image::full(16, 1024).await;
    let (tfs, _) = image.mount();
    let parent = contributed(&tfs).await;
    let number = tfs.lookup(ME, parent, b"t5").await.unwrap().attr.inode;
    let block = tfs.file_extents(number).unwrap()[0].start;
    tfs.forget(number, 1);
    unmount(tfs);
    set_bit_of(&image.path(), block);
    let (tfs, report) = image.mount();
    assert!(!report.foreign, "nothing shows");
    assert_eq!(read(&tfs, parent, "t5").await, Err(Errno::ENOENT), "its block is another's now");
    check_all(&tfs, image.count, &[5]).await;
    unmount(tfs);
    let (_tfs, report) = image.mount();
    assert!(report.verified.is_some(), "the next mount goes through the records");
}

/// Mounting a file system of other software for the first time makes the records; a file
/// system that others did not unmount is refused.
#[tokio::test]
async fn what_others_left_dirty_is_refused() {
    let image = Image::full(16, 1024).await;
    image.debugfs("ssv state 0");
    let device = image.open();
    assert!(matches!(mount_on(device).unwrap_err(), MountError::NeedsCheck));
    image.run("e2fsck", &["-fy"], &[0, 1]);
    let (tfs, _) = image.mount();
    assert!(check_all(&tfs, image.count, &[]).await > 0);
}
