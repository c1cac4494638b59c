//! A subsystem that is one task, from the node's start to its stop.

use std::sync::{Arc, Mutex};

use atoll_env::{BoxFuture, Env, Task};
use atoll_node::{StartError, Subsystem};

/// Work that goes on until the node stops.
pub(crate) struct Background {
    env: Env,
    phase: Mutex<Phase>,
}

enum Phase {
    New(BoxFuture<'static, ()>),
    Running(Task),
    Stopped,
}

impl Background {
    /// Work to be begun when the node starts. It is dropped, where it waits, when the node stops.
    pub(crate) fn new(env: Env, work: impl Future<Output = ()> + Send + 'static) -> Background {
        Background { env, phase: Mutex::new(Phase::New(Box::pin(work))) }
    }

    fn enter(&self, next: impl FnOnce(Phase) -> Phase) {
        let phase = &mut *self.phase.lock().expect("no holder of this lock panics");
        *phase = next(std::mem::replace(phase, Phase::Stopped));
    }
}

impl Subsystem for Background {
    fn start(self: Arc<Self>) -> BoxFuture<'static, Result<(), StartError>> {
        self.enter(|phase| match phase {
            Phase::New(work) => Phase::Running(self.env.spawn(work)),
            phase => phase,
        });
        Box::pin(async { Ok(()) })
    }

    fn stop(self: Arc<Self>) -> BoxFuture<'static, ()> {
        self.enter(|phase| {
            if let Phase::Running(task) = &phase {
                task.abort();
            }
            Phase::Stopped
        });
        Box::pin(async {})
    }
}

#[cfg(test)]
mod tests {
    use atoll_env::TokioRuntime;
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn work_begins_with_the_node_and_is_dropped_with_it() {
        let (begun, begins) = oneshot::channel();
        let (held, dropped) = oneshot::channel::<()>();
        let work = async move {
            let _held = held;
            begun.send(()).expect("it is waited for");
            std::future::pending::<()>().await;
        };
        let background = Arc::new(Background::new(Arc::new(TokioRuntime::current()), work));
        background.clone().start().await.expect("starts");
        begins.await.expect("it has begun");
        background.stop().await;
        dropped.await.expect_err("nobody says anything");
    }

    #[tokio::test]
    async fn work_of_a_node_that_never_starts_is_dropped_unbegun() {
        let (held, dropped) = oneshot::channel::<()>();
        let work = async move { held.send(()).expect("it is waited for") };
        let background = Arc::new(Background::new(Arc::new(TokioRuntime::current()), work));
        background.stop().await;
        dropped.await.expect_err("it has not begun");
    }
}
