//! Asking a mounted TFS, through its mount: attributes that every file on it answers and no
//! file has (see [`atoll_tfs::stat`]).

use std::path::Path;

use rustix::fs::getxattr;
use rustix::io::Errno;

use crate::failure::{Exit, Failure};

/// The longest answer, bytes: the kernel takes no longer one.
const MAX_ANSWER_BYTES: usize = 64 << 10;

/// Asks the TFS that `path` is on.
pub(super) fn ask(path: &Path, question: &str) -> Result<Vec<u8>, Failure> {
    let mut answer = vec![0; MAX_ANSWER_BYTES];
    match getxattr(path, question, &mut answer[..]) {
        Ok(len) => {
            answer.truncate(len);
            Ok(answer)
        }
        Err(Errno::NODATA | Errno::OPNOTSUPP) => {
            Err(Failure::new(Exit::NotFound, format!("{} is not on a mounted TFS", path.display()))
                .advice("`atoll tfs mount DEVICE MNT` mounts one."))
        }
        Err(error) => {
            Err(Failure::io(format!("{} does not answer", path.display()), &error.into()))
        }
    }
}

/// The same in text.
pub(super) fn ask_text(path: &Path, question: &str) -> Result<String, Failure> {
    Ok(String::from_utf8_lossy(&ask(path, question)?).into_owned())
}

/// What to say of an answer that makes no sense.
pub(super) fn nonsense(path: &Path) -> Failure {
    Failure::new(Exit::Failed, format!("{} answered nonsense", path.display()))
        .because("another version of atoll may serve it")
}
