//! The threads of a command.

use crate::crash;
use crate::failure::{Exit, Failure};

/// Runs one command to its end. Work that it left on other threads is not waited for.
pub(crate) fn until_done<T>(
    command: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::new(Exit::Failed, "cannot start threads").because(error))?;
    let result = runtime.block_on(command);
    crash::work_is_over();
    runtime.shutdown_background();
    result
}
