//! The conformance kit over the network.

use std::sync::Arc;
use std::time::Duration;

use atoll_env::{BoxFuture, Env};
use atoll_pool::remote::RemoteFs;
use atoll_vfs::FileSystem;
use atoll_vfs::kit::{
    Features, Report, Restart, RestartSubject, Subject, Tree, run_read_suite, run_restart_suite,
    run_write_suite,
};

use super::{Behind, World};

impl World {
    fn run(&self, suite: impl Future<Output = Report>) {
        let report = self.block_on(suite);
        assert!(report.passed() > 5, "{report}");
        report.assert_passes();
        self.check_ended();
    }
}

impl Subject for World {
    fn name(&self) -> String {
        "a remote file system".to_owned()
    }

    fn features(&self) -> Features {
        Features::FULL
    }

    fn env(&self) -> Env {
        self.sim.env(self.client)
    }

    fn make(&self, tree: Arc<Tree>) -> BoxFuture<'_, Result<Arc<dyn FileSystem>, String>> {
        Box::pin(async move {
            self.start(Some(&tree)).await;
            Ok(self.mount().await as Arc<dyn FileSystem>)
        })
    }
}

/// A client that goes on while its server is started again.
struct Surviving {
    world: World,
    fs: Arc<RemoteFs>,
}

impl Restart for Surviving {
    fn fs(&self) -> Arc<dyn FileSystem> {
        self.fs.clone()
    }

    fn restart(&mut self) -> BoxFuture<'_, Result<(), String>> {
        Box::pin(async move {
            self.world.restart(None, Duration::from_secs(1)).await;
            Ok(())
        })
    }
}

impl RestartSubject for World {
    fn start(&self, tree: Arc<Tree>) -> BoxFuture<'_, Result<Box<dyn Restart>, String>> {
        Box::pin(async move {
            World::start(self, Some(&tree)).await;
            let fs = self.mount().await;
            Ok(Box::new(Surviving { world: self.clone(), fs }) as Box<dyn Restart>)
        })
    }
}

#[test]
fn a_remote_file_system_reads_as_the_kit_says() {
    let world = World::new(1, Behind::Memory);
    world.run(run_read_suite(&world));
}

#[test]
fn a_remote_file_system_changes_as_the_kit_says() {
    let world = World::new(2, Behind::Memory);
    world.run(run_write_suite(&world));
}

#[test]
fn a_remote_pool_reads_as_the_kit_says() {
    let world = World::new(3, Behind::Pool(1));
    world.run(run_read_suite(&world));
}

#[test]
fn a_remote_pool_changes_as_the_kit_says() {
    let world = World::new(4, Behind::Pool(1));
    world.run(run_write_suite(&world));
}

#[test]
fn handles_of_a_remote_pool_last_as_the_kit_says() {
    let world = World::new(5, Behind::Pool(1));
    world.run(run_restart_suite(&world));
}
