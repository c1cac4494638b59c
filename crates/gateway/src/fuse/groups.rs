//! The groups of the process that makes a request. The protocol names only the first of them.
//!
//! Linux shows the others in `/proc/PID/status` ([`ThreadStatus`] says why that can be believed): a
//! thread that waits for its answer does not change its groups. *Credentials may be borrowed*,
//! though: nfsd, overlayfs and io_uring make requests for others from threads of their own. Then
//! user and first group of the request are not those of the thread, and nothing is said about the
//! others. (Where both happen to agree, the thread acts for a user whom it could become anyway.)
//!
//! The file is read only when a group is asked for that is not the first: for reserved blocks, and
//! for set-group-ID bits. The kernel checks access by all groups itself.

use atoll_vfs::Caller;

use super::thread_status::ThreadStatus;

/// The caller's groups beside the first; none where that cannot be told.
pub(super) fn of_process(caller: &Caller) -> Vec<u32> {
    let status = ThreadStatus::of(caller.pid);
    status.and_then(|status| groups(&status, caller)).unwrap_or_default()
}

/// The groups of a thread that acts with the caller's user and group.
fn groups(status: &ThreadStatus, caller: &Caller) -> Option<Vec<u32>> {
    let numbers = |name: &str| -> Option<Vec<u32>> {
        status.field(name)?.split_ascii_whitespace().map(|number| number.parse().ok()).collect()
    };
    // The last of the four is the one by which files are accessed.
    let acts_as = (numbers("Uid")?.pop()?, numbers("Gid")?.pop()?);
    if acts_as != (caller.uid, caller.gid) {
        return None;
    }
    numbers("Groups")
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "Name:\tcat\nUid:\t1\t2\t3\t1000\nGid:\t5\t6\t7\t100\nFDSize:\t64\n\
                          Groups:\t4 24 100 \nNStgid:\t9\n";

    #[test]
    fn the_groups_are_those_of_a_thread_that_acts_as_the_caller() {
        let status = ThreadStatus::from_text;
        let caller = Caller { uid: 1000, gid: 100, ..Caller::default() };
        assert_eq!(groups(&status(STATUS), &caller), Some(vec![4, 24, 100]));
        for other in [Caller { uid: 1, ..caller }, Caller { gid: 5, ..caller }] {
            assert_eq!(groups(&status(STATUS), &other), None, "borrowed credentials");
        }
        assert_eq!(groups(&status("Name:\tcat\n"), &caller), None);
        let none = STATUS.replace("4 24 100 ", "");
        assert_eq!(groups(&status(&none), &caller), Some(vec![]));
    }

    #[test]
    fn a_caller_without_a_process_has_no_other_groups() {
        assert_eq!(of_process(&Caller::default()), Vec::<u32>::new());
        let ended = Caller { pid: u32::MAX, ..Caller::default() };
        assert_eq!(of_process(&ended), Vec::<u32>::new());
    }
}
