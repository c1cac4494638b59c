//! A shared volume is a file system as any other.

use std::sync::Arc;

use atoll_dht::{Blocks, MemoryBlocks};
use atoll_env::{BoxFuture, Env};
use atoll_vfs::FileSystem;
use atoll_vfs::kit::{self, Features, Subject, Tree, write_tree_to_fs};

use super::mounts::{created_with, env, mounted};

struct Shared {
    /// Write the tree through one mount, and show it through another one.
    remounts: bool,
    is_encrypted: bool,
}

impl Subject for Shared {
    fn name(&self) -> String {
        "a shared volume".into()
    }

    fn features(&self) -> Features {
        Features::FULL
    }

    fn env(&self) -> Env {
        env()
    }

    fn make(&self, tree: Arc<Tree>) -> BoxFuture<'_, Result<Arc<dyn FileSystem>, String>> {
        Box::pin(async move {
            let blocks: Arc<dyn Blocks> = Arc::new(MemoryBlocks::new());
            created_with(&env(), &blocks, self.is_encrypted).await;
            let mut fs = mounted(&env(), &blocks, 1).await;
            write_tree_to_fs(&tree, &fs).await.map_err(|error| format!("{error:?}"))?;
            if self.remounts {
                fs.end().await.map_err(|error| error.to_string())?;
                fs = mounted(&env(), &blocks, 2).await;
            }
            Ok(Arc::new(fs) as Arc<dyn FileSystem>)
        })
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_conforms() {
    let subject = Shared { remounts: false, is_encrypted: false };
    kit::run_read_suite(&subject).await.assert_passes();
    kit::run_write_suite(&subject).await.assert_passes();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_conforms_through_another_mount() {
    let subject = Shared { remounts: true, is_encrypted: false };
    kit::run_read_suite(&subject).await.assert_passes();
    kit::run_write_suite(&subject).await.assert_passes();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_encrypted_one_conforms() {
    let subject = Shared { remounts: true, is_encrypted: true };
    kit::run_read_suite(&subject).await.assert_passes();
    kit::run_write_suite(&subject).await.assert_passes();
}
