//! The reference implementation passes the kit.

use std::sync::Arc;

use atoll_env::{BoxFuture, Env, TokioRuntime};
use atoll_vfs::kit::{
    Features, SharedSubject, Subject, Tree, run_read_suite, run_shared_suite, run_write_suite,
    write_tree_to_fs,
};
use atoll_vfs::memory::MemoryFs;
use atoll_vfs::{Caller, Errno, FileSystem, InodeNumber, OpenFlags, Writer};
use bytes::Bytes;

/// [`MemoryFs`], read-only or not.
pub(crate) struct Memory {
    pub read_only: bool,
}

impl Subject for Memory {
    fn name(&self) -> String {
        "MemoryFs".to_owned()
    }

    fn features(&self) -> Features {
        Features { read_only: self.read_only, ..Features::FULL }
    }

    fn env(&self) -> Env {
        Arc::new(TokioRuntime::current())
    }

    fn make(&self, tree: Arc<Tree>) -> BoxFuture<'_, Result<Arc<dyn FileSystem>, String>> {
        Box::pin(async move { Ok(filled(&tree, self.read_only).await as Arc<dyn FileSystem>) })
    }
}

impl SharedSubject for Memory {
    fn make_two(&self, tree: Arc<Tree>) -> BoxFuture<'_, Result<[Arc<dyn FileSystem>; 2], String>> {
        Box::pin(async move {
            let fs = filled(&tree, false).await;
            Ok([Arc::new(fs.another_view()) as Arc<dyn FileSystem>, fs])
        })
    }
}

/// A [`MemoryFs`] that holds `tree`.
pub(crate) async fn filled(tree: &Tree, read_only: bool) -> Arc<MemoryFs> {
    let fs = Arc::new(MemoryFs::new(Arc::new(TokioRuntime::current())));
    write_tree_to_fs(tree, &*fs).await.expect("memory takes every tree");
    fs.check_invariants();
    fs.set_read_only(read_only);
    fs
}

/// Two mounts of one file system hung in tests: the kernel of one asked for a directory's time after it had opened it, and
/// kept the listing, which was older, with that time for ever.
#[tokio::test]
async fn a_directory_is_listed_as_it_is_when_it_is_read_from_its_beginning() {
    let fs = MemoryFs::new(Arc::new(TokioRuntime::current()));
    let opened = fs.opendir(Caller::default(), InodeNumber::ROOT).await.expect("opens");
    let list = || async {
        let listed = fs.readdir(InodeNumber::ROOT, opened.handle, 0, 10, false).await;
        listed.expect("lists").len()
    };
    assert_eq!(list().await, 0);
    fs.mkdir(Caller::default(), InodeNumber::ROOT, b"d", 0o755).await.expect("makes");
    assert_eq!(list().await, 1);
    fs.closedir(InodeNumber::ROOT, opened.handle).await.expect("closes");
}

/// The same, since the kernel told two changes within a millisecond not apart.
#[tokio::test]
async fn two_changes_of_a_directory_at_a_time_have_two_times() {
    let fs = MemoryFs::new(Arc::new(TokioRuntime::current()));
    let mut times = Vec::new();
    for n in 0..100 {
        let name = n.to_string();
        fs.mkdir(Caller::default(), InodeNumber::ROOT, name.as_bytes(), 0o755)
            .await
            .expect("makes");
        let attr = fs.getattr(InodeNumber::ROOT, None).await.expect("is there").attr;
        times.push(attr.mtime);
    }
    assert!(times.is_sorted_by(|before, after| before < after), "{times:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_passes_the_read_suite_read_only() {
    let report = run_read_suite(&Memory { read_only: true }).await;
    report.assert_passes();
    assert_eq!(report.passed(), report.checks.len(), "nothing is skipped\n{report}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_passes_the_read_suite_writable() {
    run_read_suite(&Memory { read_only: false }).await.assert_passes();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_passes_the_write_suite() {
    let report = run_write_suite(&Memory { read_only: false }).await;
    report.assert_passes();
    assert_eq!(report.passed(), report.checks.len(), "nothing is skipped\n{report}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_views_of_memory_pass_the_shared_suite() {
    let report = run_shared_suite(&Memory { read_only: false }).await;
    report.assert_passes();
    assert_eq!(report.passed(), report.checks.len(), "nothing is skipped\n{report}");
}

#[tokio::test]
async fn nothing_is_left_of_a_file_that_nobody_holds() {
    let fs = filled(&Tree::small(), false).await;
    let me = Caller::default();
    let file = fs.lookup(me, InodeNumber::ROOT, b"file").await.unwrap().attr.inode;
    let opened = fs.open(me, file, OpenFlags::READ).await.unwrap();
    fs.unlink(me, InodeNumber::ROOT, b"file").await.unwrap();
    fs.forget(file, 1);
    fs.check_invariants();
    assert!(fs.getattr(file, None).await.is_ok(), "it is open");
    fs.close(file, opened.handle).await.unwrap();
    fs.check_invariants();
    assert_eq!(fs.getattr(file, None).await.unwrap_err(), Errno::ESTALE);
}

#[tokio::test]
async fn a_full_file_system_is_enospc_and_keeps_what_it_has() {
    let env: Env = Arc::new(TokioRuntime::current());
    let fs = MemoryFs::new(env).capacity(1 << 20);
    let me = Caller::default();
    let (entry, opened) =
        fs.create(me, InodeNumber::ROOT, b"f", 0o644, OpenFlags::READ_WRITE).await.unwrap();
    let (inode, handle) = (entry.attr.inode, opened.handle);
    let data = Bytes::from(vec![b'x'; 1 << 20]);
    assert_eq!(fs.write(Writer::At(me), inode, handle, 0, data.clone()).await, Ok(1 << 20));
    assert_eq!(
        fs.write(Writer::At(me), inode, handle, 1 << 20, data.clone()).await,
        Err(Errno::ENOSPC)
    );
    assert_eq!(fs.statfs(inode).await.unwrap().blocks_free, 0);
    assert_eq!(
        fs.write(Writer::At(me), inode, handle, 0, data.clone()).await,
        Ok(1 << 20),
        "overwriting"
    );
    assert_eq!(fs.read(inode, handle, 0, 1 << 20).await, Ok(data));
}
