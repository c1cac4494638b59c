//! `atoll pool import` as its users meet it: in place, by copying, interrupted, and refused.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{MetadataExt, chown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::nfs::in_dir;
use crate::processes::{
    Ring, Said, assert_same, assert_same_below, assert_same_contents, atoll, can_mount, make_tree,
    run, until,
};

/// A pool `home` of its own, without a node, and a tree beside it.
struct Pool {
    temp: tempfile::TempDir,
}

impl Pool {
    /// None, said loudly, where the process is not root.
    fn new(test: &str) -> Option<Pool> {
        if !is_root(test) {
            return None;
        }
        let pool = Pool { temp: tempfile::tempdir().expect("a directory") };
        pool.pool(&["create", "home", &pool.text("files")]).ok();
        make_tree(&pool.path("tree"));
        let large = pool.path("tree/docs/deep/deeper/large.bin");
        fs::hard_link(&large, pool.path("tree/docs/second")).expect("linked");
        chown(&large, Some(1000), Some(1001)).expect("owned");
        run(std::process::Command::new("cp")
            .arg("-a")
            .args([pool.path("tree"), pool.path("same")]))
        .ok();
        Some(pool)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.temp.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().expect("a text").to_owned()
    }

    fn pool(&self, arguments: &[&str]) -> Said {
        run(in_dir(&self.path("dir"), &["pool"]).args(arguments))
    }

    /// Imports a directory, with these options.
    fn import(&self, source: &str, options: &[&str]) -> Said {
        self.pool(&[&["import", "home", &self.text(source)], options].concat())
    }

    /// Gives the pool's directory back, and compares what is left with a copy of the tree.
    #[track_caller]
    fn assert_has(&self, same: &Path) {
        let checked = self.pool(&["check", "home"]).ok().stdout;
        assert!(checked.contains("everything is in order"), "{checked}");
        self.pool(&["leave", "home", "--yes"]).ok();
        assert_same_below(same, &self.path("files"));
    }
}

fn is_root(test: &str) -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        let _ = writeln!(std::io::stderr(), "\nSKIPPED {test}: a pool needs root");
    }
    is_root
}

fn count(dir: &Path) -> usize {
    fs::read_dir(dir).expect("a directory").count()
}

#[test]
fn a_tree_is_imported_in_place_where_nobody_uses_the_pool() {
    let test = "a_tree_is_imported_in_place_where_nobody_uses_the_pool";
    let Some(pool) = Pool::new(test) else { return };
    let large = pool.path("tree/docs/deep/deeper/large.bin");
    let inode = fs::metadata(&large).expect("a file").ino();
    let tried = pool.import("tree", &["--dry-run"]).ok();
    assert!(tried.stdout.contains("nothing is in the way"), "{tried:?}");
    let said = pool.import("tree", &[]).ok();
    assert!(said.stderr.starts_with("in place: "), "{said:?}");
    assert_eq!(count(&pool.path("tree")), 0);
    let plain = pool.path("files/slots/000/0000000000000001/docs/deep/deeper/large.bin");
    assert_eq!(fs::metadata(plain).expect("a plain file").ino(), inode, "no byte was copied");
    // There is nothing left to take; what has a name that is taken is named.
    let said = pool.import("tree", &["--json"]).ok().json();
    assert_eq!((&said["in_place"], &said["files"]), (&true.into(), &0.into()));
    fs::write(pool.path("tree/run.sh"), "another").expect("written");
    fs::write(pool.path("tree/new"), "new").expect("written");
    pool.import("tree", &[]).failed(1, &["run.sh: the pool has a file of that name there"]);
    assert_eq!(count(&pool.path("tree")), 2, "nothing was changed");
    fs::remove_dir_all(pool.path("tree")).expect("removed");
    pool.assert_has(&pool.path("same"));
}

#[test]
fn a_tree_is_copied_into_a_pool_once_and_what_differs_is_named() {
    let test = "a_tree_is_copied_into_a_pool_once_and_what_differs_is_named";
    let Some(pool) = Pool::new(test) else { return };
    let said = pool.import("tree", &["--copy"]).ok();
    assert!(said.stderr.starts_with("by copying: --copy says so"), "{said:?}");
    assert_same(&pool.path("tree"), &pool.path("same"));
    let said = pool.import("tree", &["--copy", "--json"]).ok().json();
    assert_eq!((&said["files"], &said["bytes"]), (&0.into(), &0.into()), "{said}");
    assert!(said["passed_over"].as_u64().is_some_and(|count| count > 40), "{said}");
    fs::write(pool.path("tree/run.sh"), "another").expect("written");
    fs::write(pool.path("tree/new"), "new").expect("written");
    let said = pool.import("tree", &["--copy", "--json"]).failed_json(7);
    assert_eq!((&said["files"], &said["not_copied"]), (&1.into(), &1.into()), "{said}");
    assert_eq!(said["missing"][0]["path"], "run.sh", "{said}");
    pool.import("tree", &["--copy"]).failed(7, &["run.sh: the pool has another file there"]);
    fs::write(pool.path("same/new"), "new").expect("written");
    let time = fs::metadata(pool.path("tree/new")).expect("a file").modified().expect("a time");
    let file = fs::File::open(pool.path("same/new")).expect("opened");
    file.set_modified(time).expect("set");
    pool.pool(&["check", "home"]).ok();
    pool.pool(&["leave", "home", "--yes"]).ok();
    assert_same_contents(&pool.path("same"), &pool.path("files"));
    assert_same(&pool.path("same/docs"), &pool.path("files/docs"));
}

/// The import is killed while it copies, again and again, and then ends.
#[test]
fn an_import_that_is_killed_goes_on_when_it_is_run_again() {
    let test = "an_import_that_is_killed_goes_on_when_it_is_run_again";
    let Some(pool) = Pool::new(test) else { return };
    for dir in 0..20 {
        let dir = pool.path(&format!("tree/many-{dir}"));
        fs::create_dir(&dir).expect("made");
        for file in 0..40 {
            fs::write(dir.join(file.to_string()), format!("{file}\n").repeat(999))
                .expect("written");
        }
    }
    for way in [&["--copy"][..], &[]] {
        for pause in [40, 80, 160, 320] {
            let source = pool.path("tree");
            let mut command = in_dir(&pool.path("dir"), &["pool", "import", "home"]);
            let mut import = command.arg(&source).args(way).spawn().expect("it runs");
            std::thread::sleep(Duration::from_millis(pause));
            let _ = import.kill();
            import.wait().expect("it ends");
            if way.is_empty() {
                break;
            }
        }
        if !way.is_empty() {
            pool.import("tree", way).ok();
            pool.pool(&["check", "home"]).ok();
            let root = pool.path("files/slots/000/0000000000000001");
            for dir in 0..20 {
                let dir = format!("many-{dir}");
                assert_same_contents(
                    &pool.path("tree").join(&dir),
                    &fs::canonicalize(root.join(&dir)).expect("it leads there"),
                );
            }
            pool.pool(&["leave", "home", "--yes"]).ok();
            assert_same_below(&pool.path("tree"), &pool.path("files"));
            fs::remove_dir_all(pool.path("files")).expect("removed");
            pool.pool(&["create", "home", &pool.text("files")]).ok();
            run(std::process::Command::new("cp")
                .args(["-aT"])
                .args([pool.path("tree"), pool.path("same")]))
            .ok();
        }
    }
    pool.import("tree", &[]).ok();
    assert_eq!(count(&pool.path("tree")), 0);
    pool.assert_has(&pool.path("same"));
}

#[test]
fn an_import_that_makes_no_sense_is_refused_with_the_reason() {
    let test = "an_import_that_makes_no_sense_is_refused_with_the_reason";
    let Some(pool) = Pool::new(test) else { return };
    pool.import("nothing", &[]).failed(4, &["No such file"]);
    pool.import("tree/run.sh", &[]).failed(2, &["it is no directory"]);
    pool.import("tree", &["--into", "../x"]).failed(2, &["no path of a directory"]);
    pool.import("tree", &["--into", "/nothing"]).failed(4, &["no such directory"]);
    pool.import("tree", &["--copy", "--into", "/nothing"]).failed(4, &["/nothing"]);
    let in_it = "the pool's directory, is in it or above it";
    for source in ["files", "files/slots", ""] {
        for options in [&[][..], &["--copy"]] {
            pool.import(source, options).failed(2, &[in_it]);
        }
    }
    pool.pool(&["import", "home", "/"]).failed(2, &[in_it]);
    pool.pool(&["import", "none", &pool.text("tree")]).failed(4, &["no pool none"]);
    // Another pool's directory: above it, it, and in it.
    pool.pool(&["create", "other", &pool.text("tree/other")]).ok();
    pool.import("tree", &[]).failed(1, &["other/.atoll: it is a pool's directory"]);
    pool.import("tree", &["--copy"]).failed(1, &["other/.atoll: it is a pool's directory"]);
    for source in ["tree/other", "tree/other/slots/000"] {
        pool.import(source, &[]).failed(2, &["a pool's directory"]);
    }
    pool.pool(&["leave", "other", "--yes"]).ok();
    std::os::unix::fs::symlink("../../000/0000000000000001", pool.path("tree/like")).expect("made");
    pool.import("tree", &[]).failed(1, &["like: it is a symbolic link that reads like", "--copy"]);
    fs::remove_file(pool.path("tree/like")).expect("removed");
    let locked = fs::File::open(pool.path("tree")).expect("opened");
    rustix::fs::flock(&locked, rustix::fs::FlockOperation::LockExclusive).expect("locked");
    pool.import("tree", &[]).failed(1, &["has locked it"]);
    drop(locked);
    if !can_mount(test) {
        return;
    }
    // While it is mounted, its files cannot be reached beside the mount; nor is the mount a tree to take.
    let at = pool.path("mnt");
    fs::create_dir(&at).expect("made");
    run(in_dir(&pool.path("dir"), &["mount", "home"]).arg(&at)).ok();
    pool.import("tree", &[])
        .failed(1, &["a mount or an NFS server uses the pool", "atoll unmount"]);
    pool.import("mnt", &[]).failed(2, &["where this pool is mounted"]);
    run(atoll().arg("unmount").arg(&at)).ok();
    // Another file system is copied, and one that is mounted below is left out.
    let bound = pool.path("bound");
    fs::create_dir(&bound).expect("made");
    let mount = |from: &Path, to: &Path| {
        run(std::process::Command::new("mount").arg("--bind").arg(from).arg(to)).ok();
    };
    mount(&pool.path("tree"), &bound);
    let said = pool.import("bound", &["--into", "/", "--dry-run"]);
    run(std::process::Command::new("umount").arg(&bound)).ok();
    assert!(said.ok().stderr.starts_with("by copying: it is on another file system, or mount"));
    assert_same(&pool.path("tree/docs"), &pool.path("same/docs"));
}

/// A pool of several whose only member's node does not run: the tree is renamed, and a member that joins later has it.
#[test]
fn a_pool_of_several_takes_a_tree_in_place_as_long_as_it_has_one_member() {
    let test = "a_pool_of_several_takes_a_tree_in_place_as_long_as_it_has_one_member";
    if !is_root(test) {
        return;
    }
    let mut ring = Ring::of(2);
    let files = [0, 1].map(|node| ring.path(&format!("files-{node}")));
    let pool = |ring: &Ring, node: usize, arguments: &[&str]| {
        run(ring.nodes[node].command(["pool"]).args(arguments))
    };
    let text = |path: &Path| path.to_str().expect("a text").to_owned();
    pool(&ring, 0, &["create", "team", &text(&files[0])]).ok();
    pool(&ring, 0, &["invite", "team"]).ok();
    let (first, second) = (ring.path("first"), ring.path("second"));
    make_tree(&first.join("copied"));
    make_tree(&second.join("renamed"));
    // The node serves the pool: the files are copied through it.
    let said = pool(&ring, 0, &["import", "team", &text(&first)]).ok();
    assert!(said.stderr.contains("by copying: this machine's node serves the pool"), "{said:?}");
    ring.nodes[0].kill();
    let said = pool(&ring, 0, &["import", "team", &text(&second)]).ok();
    assert!(said.stderr.contains("in place: "), "{said:?}");
    assert_eq!(count(&second), 0);
    ring.nodes[0].restart();
    let mut code = String::new();
    until("the node serves the pool again", || {
        let invited = pool(&ring, 0, &["invite", "team"]);
        code = invited.stdout.trim().to_owned();
        invited.code == Some(0)
    });
    pool(&ring, 1, &["join", &code, "team", &text(&files[1])]).ok();
    until("both members have everything", || {
        let all = [0, 1].map(|node| {
            let told = pool(&ring, node, &["status", "--json"]).ok().json();
            told["group"]["groups"][0]["states"].as_array().cloned().unwrap_or_default()
        });
        let has_all = |one: &serde_json::Value| {
            one["is_member"] == true && one["problem"].is_null() && one["files_to_mend"] == 0
        };
        all.iter().any(|states| states.len() == 2 && states.iter().all(has_all))
    });
    let checked = pool(&ring, 0, &["check", "team"]).ok().stdout;
    assert!(
        checked.contains("in each of 2 copies") && checked.contains("are the same"),
        "{checked}"
    );
    assert_same_contents(&files[0].join("slots"), &files[1].join("slots"));
    let root = files[1].join("slots/000/0000000000000001");
    for name in ["copied", "renamed"] {
        assert_same_contents(
            &first.join("copied"),
            &fs::canonicalize(root.join(name)).expect("it is there"),
        );
    }
    // It is no longer the only one.
    ring.nodes[0].kill();
    pool(&ring, 0, &["import", "team", &text(&first)])
        .failed(3, &["other machines belong to the pool"]);
}
