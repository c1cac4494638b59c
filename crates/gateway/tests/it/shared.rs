//! Two mounts of the same files, whose kernel caches believe what they have for an hour: only
//! invalidations let one see what the other does.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::time::Duration;

use atoll_gateway::fuse::MountOptions;
use atoll_vfs::{FileSystem, InodeNumber, Invalidation};
use bytes::Bytes;

use crate::place::{Two, until};

const HOUR: Duration = Duration::from_secs(3600);

fn two() -> Option<Two> {
    Two::new(|fs| fs.caching(HOUR, true), &MountOptions::default())
}

#[test]
fn bytes_that_one_writes_the_other_reads() {
    let Some(two) = two() else { return };
    let (a, b) = (two.places[0].join("f"), two.places[1].join("f"));
    fs::write(&a, vec![b'a'; 300_000]).unwrap();
    assert_eq!(fs::read(&b).unwrap(), vec![b'a'; 300_000]);
    let (writer, reader) = (File::options().write(true).open(&a).unwrap(), File::open(&b).unwrap());
    let mut found = [0; 3];
    reader.read_exact_at(&mut found, 200_000).unwrap();
    writer.write_all_at(b"xyz", 200_000).unwrap();
    until(|| {
        reader.read_exact_at(&mut found, 200_000).unwrap();
        found == *b"xyz"
    });
    writer.set_len(10).unwrap();
    until(|| reader.metadata().unwrap().len() == 10);
    assert_eq!(fs::read(&b).unwrap(), b"aaaaaaaaaa");
    drop((writer, reader));
    two.unmount();
}

#[test]
fn attributes_that_one_sets_the_other_sees() {
    let Some(two) = two() else { return };
    let (a, b) = (two.places[0].join("f"), two.places[1].join("f"));
    fs::write(&a, "x").unwrap();
    assert_eq!(fs::metadata(&b).unwrap().mode() & 0o777, 0o644);
    fs::set_permissions(&a, fs::Permissions::from_mode(0o600)).unwrap();
    until(|| fs::metadata(&b).unwrap().mode() & 0o777 == 0o600);
    fs::hard_link(&a, two.places[0].join("g")).unwrap();
    until(|| fs::metadata(&b).unwrap().nlink() == 2);
    two.unmount();
}

#[test]
fn names_that_one_makes_moves_and_removes_the_other_sees() {
    let Some(two) = two() else { return };
    let [a, b] = &two.places;
    let names = || {
        let mut names: Vec<_> = fs::read_dir(b.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    assert_eq!(names(), Vec::<String>::new());
    fs::create_dir(a.join("d")).unwrap();
    fs::write(a.join("d/f"), "first").unwrap();
    until(|| names() == ["d"]);
    assert_eq!(fs::read(b.join("d/f")).unwrap(), b"first");
    fs::rename(a.join("d/f"), a.join("moved")).unwrap();
    until(|| fs::metadata(b.join("d/f")).is_err() && names() == ["d", "moved"]);
    fs::write(a.join("new"), "second").unwrap();
    fs::rename(a.join("new"), a.join("moved")).unwrap();
    until(|| fs::read(b.join("moved")).unwrap() == b"second");
    fs::remove_dir(a.join("d")).unwrap();
    fs::remove_file(a.join("moved")).unwrap();
    until(|| fs::metadata(b.join("moved")).is_err() && names().is_empty());
    two.unmount();
}

#[test]
fn a_file_that_one_deletes_the_other_keeps_open() {
    let Some(two) = two() else { return };
    let [a, b] = &two.places;
    fs::write(a.join("f"), "still here").unwrap();
    let open = File::open(b.join("f")).unwrap();
    fs::remove_file(a.join("f")).unwrap();
    until(|| fs::metadata(b.join("f")).is_err());
    assert_eq!(std::io::read_to_string(&open).unwrap(), "still here");
    until(|| open.metadata().unwrap().nlink() == 0);
    drop(open);
    two.unmount();
}

/// A pool has the kernel ask again for names when a lock is taken, also for those to which nothing happened. `make` in a directory
/// failed then, and so did `git`: "getcwd: No such file or directory".
#[test]
fn a_directory_whose_name_is_asked_for_again_keeps_its_path() {
    let Some(two) = two() else { return };
    let place = &two.places[0];
    fs::create_dir(place.join("d")).unwrap();
    let directory = File::open(place.join("d")).unwrap();
    // getcwd(2) gives a program this path of its working directory.
    let path = || fs::read_link(format!("/proc/self/fd/{}", directory.as_raw_fd())).unwrap();
    assert_eq!(path(), place.join("d"));
    let queue = two.fs.invalidations().expect("it has several mounts");
    until(|| queue.is_served());
    queue.push(Invalidation::Name { parent: InodeNumber::ROOT, name: Bytes::from_static(b"d") });
    place.runtime().block_on(queue.settled());
    assert_eq!(path(), place.join("d"));
    drop(directory);
    two.unmount();
}

/// Each notification waits for requests in the kernel, and requests come from both sides.
#[test]
fn both_sides_write_at_a_time_and_end_with_the_same() {
    let Some(two) = two() else { return };
    std::thread::scope(|scope| {
        for (side, place) in two.places.iter().enumerate() {
            scope.spawn(move || {
                for n in 0..200 {
                    let name = format!("{}", n % 7);
                    let _ = fs::write(place.join(&name), format!("{side} {n}"));
                    let _ = fs::read(place.join(&name));
                    let _ = fs::read_dir(place.path()).unwrap().count();
                    let _ = fs::remove_file(place.join(&format!("{}", (n + 3) % 7)));
                }
            });
        }
    });
    let state = |place: &crate::place::Place| {
        let mut files: Vec<_> = fs::read_dir(place.path())
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .map(|path| (path.file_name().unwrap().to_owned(), fs::read(&path).ok()))
            .collect();
        files.sort();
        files
    };
    until(|| state(&two.places[0]) == state(&two.places[1]));
    two.unmount();
}
