//! Programs that people run on a mount.

use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

use crate::place::Place;

/// Runs a program in `directory` and returns what it printed.
fn run(directory: &Path, program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program)
        .args(arguments)
        .current_dir(directory)
        .env("HOME", directory)
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("LC_ALL", "C")
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn git_works_on_a_mount() {
    let Some(place) = Place::memory() else { return };
    let git = |arguments: &[&str]| run(place.path(), "git", arguments);
    git(&["init", "-q", "-b", "main", "repository"]);
    let repository = place.join("repository");
    let git = |arguments: &[&str]| {
        let who = ["-c", "user.name=A", "-c", "user.email=a@b"];
        run(&repository, "git", &[&who, arguments].concat())
    };
    for index in 0..200 {
        let directory = repository.join(format!("d{}", index % 7));
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join(format!("f{index}")), format!("{index}\n").repeat(50)).unwrap();
    }
    git(&["add", "-A"]);
    git(&["commit", "-q", "-m", "first"]);
    assert_eq!(git(&["status", "--porcelain"]), "");
    fs::write(repository.join("d0/f0"), "changed\n").unwrap();
    fs::remove_file(repository.join("d1/f1")).unwrap();
    assert_eq!(git(&["status", "--porcelain"]), " M d0/f0\n D d1/f1\n");
    git(&["commit", "-q", "-a", "-m", "second"]);
    git(&["gc", "-q"]);
    git(&["fsck", "--strict"]);
    run(place.path(), "git", &["clone", "-q", "repository", "clone"]);
    assert_eq!(fs::read_to_string(place.join("clone/d0/f0")).unwrap(), "changed\n");
    assert_eq!(git(&["rev-list", "--count", "HEAD"]).trim(), "2");
    git(&["checkout", "-q", "HEAD~1"]);
    assert!(repository.join("d1/f1").exists());
    place.unmount();
}

#[test]
fn make_sees_what_is_newer() {
    let Some(place) = Place::memory() else { return };
    if Command::new("make").arg("--version").output().is_err() {
        crate::place::skipped("make is not installed");
        return;
    }
    fs::write(place.join("Makefile"), "out: in\n\tcat in >> out\n").unwrap();
    fs::write(place.join("in"), "1\n").unwrap();
    let past = SystemTime::now() - Duration::from_secs(100);
    File::options().write(true).open(place.join("in")).unwrap().set_modified(past).unwrap();
    run(place.path(), "make", &["-s"]);
    run(place.path(), "make", &["-s"]);
    assert_eq!(fs::read_to_string(place.join("out")).unwrap(), "1\n", "made once");
    let later = SystemTime::now() + Duration::from_secs(1);
    File::options().write(true).open(place.join("in")).unwrap().set_modified(later).unwrap();
    run(place.path(), "make", &["-s"]);
    assert_eq!(fs::read_to_string(place.join("out")).unwrap(), "1\n1\n", "made again");
    place.unmount();
}

/// The loader maps a program into memory.
#[test]
fn a_program_runs_from_a_mount() {
    let Some(place) = Place::memory() else { return };
    fs::copy("/bin/true", place.join("true")).unwrap();
    assert!(fs::metadata(place.join("true")).unwrap().permissions().mode() & 0o111 != 0);
    run(place.path(), "./true", &[]);
    place.unmount();
}

#[test]
fn copies_keep_times_and_holes() {
    let Some(place) = Place::memory() else { return };
    let sparse = File::create(place.join("sparse")).unwrap();
    sparse.set_len(1 << 30).unwrap();
    let early = SystemTime::UNIX_EPOCH - Duration::new(86_400, 5);
    sparse.set_modified(early).unwrap();
    drop(sparse);
    run(place.path(), "cp", &["-a", "sparse", "copy"]);
    let copy = fs::metadata(place.join("copy")).unwrap();
    assert_eq!(copy.len(), 1 << 30);
    assert_eq!(copy.blocks(), 0, "the hole was copied as a hole");
    assert_eq!(copy.modified().unwrap(), early);
    place.unmount();
}

#[test]
fn df_and_direct_reads_work() {
    let Some(place) = Place::memory() else { return };
    let shown = run(place.path(), "df", &["--output=source,fstype", "."]);
    assert_eq!(
        shown.lines().nth(1).unwrap().split_whitespace().collect::<Vec<_>>(),
        ["atoll", "fuse.atoll"]
    );
    fs::write(place.join("f"), vec![b'x'; 3 << 20]).unwrap();
    run(
        place.path(),
        "dd",
        &["if=f", "of=g", "bs=1M", "iflag=direct", "oflag=direct", "status=none"],
    );
    assert_eq!(fs::read(place.join("g")).unwrap(), vec![b'x'; 3 << 20]);
    place.unmount();
}
