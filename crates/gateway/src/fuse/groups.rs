//! The groups of the process that makes a request. The protocol names only the first of them.
//!
//! Linux shows the others in `/proc/PID/status`. That is sound here, though not in general:
//!
//! - *Process numbers are used again*, but not while a request of the process is under way: the
//!   thread that made it waits for its answer (once a request was read, not even a fatal signal
//!   ends that), and a thread changes its groups itself. After the answer nothing holds the number.
//! - *Credentials may be borrowed*: nfsd, overlayfs and io_uring make requests for others from
//!   threads of their own. Then user and first group of the request are not those of the thread,
//!   and nothing is said about the others. (Where both happen to agree, the thread acts for a user
//!   whom it could become anyway.)
//! - *Namespaces*: the number is that in the process namespace of the mount, 0 if it has none there;
//!   a request names users and groups as the process that mounted sees them, and `/proc` as the
//!   process that reads it does. Both are this process, so `/proc` must be that of its own
//!   namespaces, which it is unless another one was mounted there.
//!
//! It costs about 20 µs, as much as a small request in all, so it is done only when a group is asked
//! for that is not the first: for reserved blocks, and for set-group-ID bits. The kernel checks
//! access by all groups itself.

use atoll_vfs::Caller;

/// The caller's groups beside the first; none where that cannot be told.
pub(super) fn of_process(caller: &Caller) -> Vec<u32> {
    if caller.pid == 0 {
        return Vec::new();
    }
    let status = std::fs::read_to_string(format!("/proc/{}/status", caller.pid));
    status.ok().and_then(|status| groups(&status, caller)).unwrap_or_default()
}

/// What `status` (proc(5)) says of a thread that acts with this user and group.
fn groups(status: &str, caller: &Caller) -> Option<Vec<u32>> {
    let numbers = |name: &str| -> Option<Vec<u32>> {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_ascii_whitespace().map(|number| number.parse().ok()).collect()
    };
    // The last of the four is the one by which files are accessed.
    let acts_as = (numbers("Uid:")?.pop()?, numbers("Gid:")?.pop()?);
    if acts_as != (caller.uid, caller.gid) {
        return None;
    }
    numbers("Groups:")
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "Name:\tcat\nUid:\t1\t2\t3\t1000\nGid:\t5\t6\t7\t100\nFDSize:\t64\n\
                          Groups:\t4 24 100 \nNStgid:\t9\n";

    #[test]
    fn the_groups_are_those_of_a_thread_that_acts_as_the_caller() {
        let caller = Caller { uid: 1000, gid: 100, ..Caller::default() };
        assert_eq!(groups(STATUS, &caller), Some(vec![4, 24, 100]));
        for other in [Caller { uid: 1, ..caller }, Caller { gid: 5, ..caller }] {
            assert_eq!(groups(STATUS, &other), None, "borrowed credentials");
        }
        assert_eq!(groups("Name:\tcat\n", &caller), None);
        let none = STATUS.replace("4 24 100 ", "");
        assert_eq!(groups(&none, &caller), Some(vec![]));
    }

    #[test]
    fn a_caller_without_a_process_has_no_other_groups() {
        assert_eq!(of_process(&Caller::default()), Vec::<u32>::new());
        let ended = Caller { pid: u32::MAX, ..Caller::default() };
        assert_eq!(of_process(&ended), Vec::<u32>::new());
    }
}
