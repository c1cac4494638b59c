//! Many requests at a time, and file systems that misbehave.

use std::fs::{self, File};
use std::os::unix::fs::{DirEntryExt, FileExt};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use atoll_gateway::fuse::MountOptions;
use atoll_vfs::kit::Content;
use tokio::sync::watch;

use crate::place::Place;
use crate::scripted::{FILES, Scripted};

pub(crate) struct Script {
    pub place: Place,
    pub gate: watch::Sender<bool>,
    pub waiting: watch::Receiver<usize>,
    pub lengths: Arc<Mutex<Vec<&'static str>>>,
}

pub(crate) fn scripted(options: &MountOptions) -> Option<Script> {
    let (gate, opened) = watch::channel(false);
    let (begun, waiting) = watch::channel(0);
    let lengths: Arc<Mutex<Vec<&'static str>>> = Arc::default();
    let (held, told) = (Arc::default(), lengths.clone());
    let fs = Scripted { gate: opened, waiting: begun, held, lengths: told };
    let place = Place::with(options, |_| Arc::new(fs))?;
    Some(Script { place, gate, waiting, lengths })
}

fn errno_of<T: std::fmt::Debug>(result: std::io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error().unwrap()
}

#[test]
fn a_slow_read_does_not_block_others() {
    let Some(Script { place, gate, mut waiting, .. }) = scripted(&MountOptions::default()) else {
        return;
    };
    // More slow reads than there are threads of any kind.
    let slow: Vec<_> = (0..40)
        .map(|_| {
            let path = place.join("slow");
            thread::spawn(move || fs::read(path).unwrap().len())
        })
        .collect();
    place.runtime().block_on(waiting.wait_for(|count| *count >= 40)).unwrap();
    for _ in 0..20 {
        assert_eq!(fs::read(place.join("quick")).unwrap().len(), 4096);
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), FILES.len());
    }
    assert!(slow.iter().all(|thread| !thread.is_finished()), "the gate is shut");
    gate.send(true).unwrap();
    for thread in slow {
        assert_eq!(thread.join().unwrap(), 4096);
    }
    place.unmount();
}

/// As a disk or a lock does. One thread is enough for the others' requests, whichever it is.
#[test]
fn reads_that_keep_all_threads_but_one_waiting_do_not_block_others() {
    let options = MountOptions { threads: 4.try_into().unwrap(), ..MountOptions::default() };
    let Some(Script { place, gate, mut waiting, .. }) = scripted(&options) else { return };
    let mut blocked = Vec::new();
    while blocked.len() < 3 {
        assert_eq!(fs::read(place.join("quick")).unwrap().len(), 4096);
        let path = place.join("blocking");
        blocked.push(thread::spawn(move || fs::read(path).unwrap().len()));
        let count = blocked.len();
        place.runtime().block_on(waiting.wait_for(|begun| *begun >= count)).unwrap();
    }
    for _ in 0..20 {
        assert_eq!(fs::read(place.join("quick")).unwrap().len(), 4096);
    }
    assert!(blocked.iter().all(|thread| !thread.is_finished()), "the gate is shut");
    gate.send(true).unwrap();
    for thread in blocked {
        assert_eq!(thread.join().unwrap(), 4096);
    }
    place.unmount();
}

#[test]
fn a_file_system_that_never_answers_is_etimedout() {
    let limit = Duration::from_millis(50);
    let options = MountOptions { request_limit: limit, ..MountOptions::default() };
    let Some(Script { place, gate: _gate, .. }) = scripted(&options) else { return };
    assert_eq!(errno_of(fs::read(place.join("slow"))), 110);
    assert_eq!(fs::read(place.join("quick")).unwrap().len(), 4096);
    place.unmount();
}

#[test]
fn a_panic_is_eio_and_the_mount_goes_on() {
    let Some(Script { place, .. }) = scripted(&MountOptions::default()) else { return };
    for _ in 0..20 {
        assert_eq!(errno_of(fs::metadata(place.join("panics in lookup"))), 5);
        assert_eq!(errno_of(fs::read(place.join("panics"))), 5);
        assert_eq!(errno_of(fs::read(place.join("panics later"))), 5);
    }
    assert_eq!(fs::read(place.join("quick")).unwrap().len(), 4096);
    place.unmount();
}

#[test]
fn a_file_system_that_delays_no_errors_is_asked_for_them_once() {
    let Some(Script { place, waiting, .. }) = scripted(&MountOptions::default()) else { return };
    for _ in 0..5 {
        let file = File::options().write(true).open(place.join("writable")).unwrap();
        file.write_all_at(b"whatever", 0).unwrap();
    }
    assert_eq!(*waiting.borrow(), 1);
    place.unmount();
}

/// The story: the kernel truncated a file after the open, as truncate(2) does. A file system that writes such a change at
/// once showed others an empty file until the writer had closed it, for ever if that was killed.
#[test]
fn a_file_is_emptied_by_the_open_that_says_so() {
    let Some(Script { place, lengths, .. }) = scripted(&MountOptions::default()) else { return };
    let path = place.join("writable");
    drop(File::create(&path).unwrap());
    assert_eq!(*lengths.lock().unwrap(), ["open that empties"]);
    File::options().write(true).open(&path).unwrap().set_len(5).unwrap();
    assert_eq!(*lengths.lock().unwrap(), ["open that empties", "ftruncate"]);
    place.unmount();
}

#[test]
fn errors_arrive_with_their_numbers() {
    let Some(Script { place, .. }) = scripted(&MountOptions::default()) else { return };
    let of = |number: i32| errno_of(fs::metadata(place.join(&format!("errno {number}"))));
    for number in [1, 2, 5, 11, 12, 13, 28, 30, 36, 71, 95, 110, 113, 116, 122, 511] {
        assert_eq!(of(number), number);
    }
    for unusable in [0, -5, 512, 4095, 100_000] {
        assert_eq!(of(unusable), 5, "{unusable}");
    }
    place.unmount();
}

/// The kernel would refuse these replies and leave the process waiting for ever.
#[test]
fn replies_the_kernel_would_refuse_are_not_sent() {
    let Some(Script { place, .. }) = scripted(&MountOptions::default()) else { return };
    let mut buffer = [0; 1000];
    let len = File::open(place.join("generous")).unwrap().read_at(&mut buffer, 0).unwrap();
    assert_eq!((len, buffer), (1000, [b'g'; 1000]));
    assert_eq!(errno_of(fs::read_link(place.join("long link"))), 36);
    let mut names: Vec<_> =
        fs::read_dir(place.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    let mut expected = FILES.map(|(name, _)| name);
    expected.sort_unstable();
    assert_eq!(names, expected);
    place.unmount();
}

/// It was left out of listings with attributes, so that a copy of the directory lacked it and
/// nobody was told.
#[test]
fn what_cannot_be_looked_up_is_listed_and_its_use_fails() {
    let Some(Script { place, .. }) = scripted(&MountOptions::default()) else { return };
    for _ in 0..5 {
        let listed = fs::read_dir(place.path()).unwrap().map(|entry| entry.unwrap());
        let listed: Vec<_> = listed.filter(|entry| entry.file_name() == "unreadable").collect();
        let [entry] = &listed[..] else { panic!("it is listed once: {listed:?}") };
        assert!(entry.file_type().unwrap().is_file());
        assert_ne!(entry.ino(), 0, "programs pass over such a number");
        assert_eq!(errno_of(entry.metadata()), 5);
        assert_eq!(fs::metadata(place.join("quick")).unwrap().len(), 4096);
    }
    for program in ["ls -l .", "find . -size +0", "ls -ld *"] {
        let mut shell = Command::new("sh");
        let said = shell.args(["-c", program]).current_dir(place.path()).output().unwrap();
        assert!(!said.status.success(), "{program} fails");
        let said = String::from_utf8_lossy(&said.stderr).into_owned();
        assert!(said.contains("unreadable"), "{program} names the file: {said}");
    }
    place.unmount();
}

#[test]
fn requests_beyond_the_limit_wait_their_turn() {
    let options = MountOptions { max_requests: 3, ..MountOptions::default() };
    let Some(Script { place, gate, mut waiting, .. }) = scripted(&options) else { return };
    let slow: Vec<_> = (0..12)
        .map(|_| {
            let path = place.join("slow");
            thread::spawn(move || fs::read(path).unwrap().len())
        })
        .collect();
    place.runtime().block_on(waiting.wait_for(|count| *count >= 3)).unwrap();
    assert_eq!(*waiting.borrow(), 3, "the gate admits three");
    gate.send(true).unwrap();
    for thread in slow {
        assert_eq!(thread.join().unwrap(), 4096);
    }
    place.unmount();
}

#[test]
fn thirty_two_threads_read_what_was_written() {
    const LEN_BYTES: u64 = 3 << 20;
    let Some(place) = Place::memory() else { return };
    for seed in 0..4 {
        let content = Content::Pattern { seed, len_bytes: LEN_BYTES };
        fs::write(place.join(&seed.to_string()), content.read(0, LEN_BYTES as usize)).unwrap();
    }
    thread::scope(|scope| {
        for job in 0..32u64 {
            let place = &place;
            scope.spawn(move || {
                let seed = job % 4;
                let content = Content::Pattern { seed, len_bytes: LEN_BYTES };
                let file = File::open(place.join(&seed.to_string())).unwrap();
                for step in 0..20 {
                    let at = (job * 7919 + step * 104_729 * 13) % LEN_BYTES;
                    let mut buffer = vec![0; 100_000];
                    let len = file.read_at(&mut buffer, at).unwrap();
                    assert!(buffer[..len] == content.read(at, 100_000), "{seed} at {at}");
                    // Half of them without what others have brought into the cache.
                    if job % 2 == 0 {
                        let advice = rustix::fs::Advice::DontNeed;
                        rustix::fs::fadvise(&file, 0, None, advice).unwrap();
                    }
                }
            });
        }
    });
    place.unmount();
}
