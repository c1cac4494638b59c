//! The conformance kit over pools of three groups.

use atoll_vfs::kit::{
    Features, Report, Subject, Tree, run_read_suite, run_write_suite, write_tree_to_fs,
};

use super::*;

/// New pools of this distribution level, on the same machines.
struct Pools {
    machines: Machines,
    level: u8,
}

impl Subject for Pools {
    fn name(&self) -> String {
        format!("a pool of three groups, level {}", self.level)
    }

    fn features(&self) -> Features {
        Features::FULL
    }

    fn env(&self) -> Env {
        self.machines.sim.env(self.machines.clients)
    }

    fn make(&self, tree: Arc<Tree>) -> BoxFuture<'_, Result<Arc<dyn FileSystem>, String>> {
        Box::pin(async move {
            self.machines.make(self.level).await;
            let fs = self.machines.mount(0).await;
            write_tree_to_fs(&tree, &*fs).await.map_err(|error| error.to_string())?;
            Ok(fs)
        })
    }
}

fn run<F: Future<Output = Report>>(level: u8, suite: impl FnOnce(Arc<Pools>) -> F) {
    let machines = Machines::at_distance(1, Duration::from_micros(50));
    let _end = ShutDown(machines.sim.clone());
    let pools = Arc::new(Pools { machines: machines.clone(), level });
    let report = machines.sim.block_on(LONG, suite(pools)).expect("it ends");
    assert!(report.passed() > 5, "{report}");
    report.assert_passes();
}

#[test]
fn a_pool_of_three_groups_reads_as_the_kit_says() {
    run(4, async |pools| run_read_suite(&*pools).await);
}

#[test]
fn a_pool_of_three_groups_changes_as_the_kit_says() {
    run(4, async |pools| run_write_suite(&*pools).await);
}
