//! `atoll pool` as its users meet it: made, mounted, served, killed, checked, given back.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, MetadataExt, chown};
use std::path::{Path, PathBuf};

use nfs3_client::nfs3_types::nfs3::nfsstat3;

use crate::nfs::{Client, Served, in_dir};
use crate::processes::{Ring, assert_same, atoll, can_mount, make_tree, run, until};

/// A pool `home` of its own, without a node.
struct Pool {
    _temp: tempfile::TempDir,
    /// Of the node that would be.
    dir: PathBuf,
    /// Where the files lie.
    files: PathBuf,
}

impl Pool {
    /// None, said loudly, where the process is not root: a pool keeps owners.
    fn new(test: &str) -> Option<Pool> {
        if !rustix::process::geteuid().is_root() {
            let _ = writeln!(std::io::stderr(), "\nSKIPPED {test}: a pool needs root");
            return None;
        }
        let temp = tempfile::tempdir().expect("a directory");
        let (dir, files) = (temp.path().join("dir"), temp.path().join("files"));
        let pool = Pool { dir, files, _temp: temp };
        pool.pool(&["create", "home", pool.files.to_str().expect("a text")]).ok();
        Some(pool)
    }

    fn pool(&self, arguments: &[&str]) -> crate::processes::Said {
        run(in_dir(&self.dir, &["pool"]).args(arguments))
    }

    fn root(&self) -> PathBuf {
        self.files.join("slots/000/0000000000000001")
    }

    fn mount(&self, at: &Path) {
        fs::create_dir_all(at).expect("a directory");
        run(in_dir(&self.dir, &["mount", "home"]).arg(at)).ok();
    }
}

fn unmount(at: &Path) {
    run(atoll().arg("unmount").arg(at)).ok();
}

#[test]
fn a_pool_is_mounted_without_a_node_and_its_files_are_plain() {
    let test = "a_pool_is_mounted_without_a_node_and_its_files_are_plain";
    let Some(pool) = can_mount(test).then(|| Pool::new(test)).flatten() else { return };
    let at = pool.files.with_file_name("mnt");
    pool.mount(&at);
    make_tree(&at.join("tree"));
    fs::create_dir(at.join("anna")).expect("made");
    fs::write(at.join("anna/file"), "text").expect("written");
    chown(at.join("anna/file"), Some(1000), Some(1000)).expect("owned");
    // Plain files, under the names that users gave them.
    let plain = pool.root().join("anna/file");
    assert_eq!(fs::read_to_string(&plain).expect("a file"), "text");
    assert_eq!(fs::metadata(&plain).expect("a file").uid(), 1000);
    assert!(fs::symlink_metadata(pool.root().join("anna")).expect("a link").is_symlink());
    assert!(fs::metadata(at.join("anna")).expect("it is there").is_dir());
    // One process has it.
    let second = pool.files.with_file_name("second");
    fs::create_dir(&second).expect("made");
    run(in_dir(&pool.dir, &["mount", "home"]).arg(&second))
        .failed(1, &["another process serves it"]);
    pool.pool(&["check", "home"]).failed(1, &["another process serves it", "atoll unmount"]);
    let told = pool.pool(&["status"]).ok().stdout;
    assert!(told.contains("one machine, no copies; distribution level 1; served"), "{told}");
    // It goes on after a move, and after the unmount.
    fs::rename(at.join("anna"), at.join("tree/docs/anna")).expect("moved");
    unmount(&at);
    pool.mount(&at);
    assert_eq!(fs::read_to_string(at.join("tree/docs/anna/file")).expect("a file"), "text");
    assert_eq!(
        fs::read_to_string(pool.root().join("tree/docs/anna/file")).expect("by hand"),
        "text"
    );
    let copy = pool.files.with_file_name("copy");
    run(std::process::Command::new("cp").arg("-a").arg(at.join("tree")).arg(&copy)).ok();
    unmount(&at);
    let checked = pool.pool(&["check", "home"]).ok().stdout;
    assert!(checked.contains("everything is in order"), "{checked}");
    // What is left is the tree.
    pool.pool(&["leave", "home", "--yes"]).ok();
    assert_same(&copy, &pool.files.join("tree"));
    assert_eq!(fs::read_dir(&pool.files).expect("a directory").count(), 1);
    assert!(pool.pool(&["status"]).ok().stderr.contains("no pool"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_is_served_over_nfs_and_survives_kills() {
    let Some(pool) = Pool::new("a_pool_is_served_over_nfs_and_survives_kills") else { return };
    let served = Served::start(&pool.dir, &["home", "--squash", "none"]);
    let mut client = Client::mount(&served, "/home").await;
    let root = client.root();
    let file = client.write(&root, "file", b"some bytes").await;
    assert_eq!(client.names(&root).await, ["file"]);
    assert_eq!(fs::read(pool.root().join("file")).expect("a plain file"), b"some bytes");
    served.kill();
    let served = Served::start(&pool.dir, &["home", "--squash", "none"]);
    let mut client = Client::mount(&served, "/home").await;
    assert_eq!(client.read(&file).await, Ok(b"some bytes".to_vec()), "by the handle of before");
    fs::remove_file(pool.root().join("file")).expect("removed by hand");
    assert_eq!(client.lookup(&root, "file").await, Err(nfsstat3::NFS3ERR_NOENT));
    served.stop();
}

/// The name of one would hide the other.
#[test]
fn a_pool_and_a_volume_of_a_node_have_different_names() {
    let test = "a_pool_and_a_volume_of_a_node_have_different_names";
    let Some(pool) = Pool::new(test) else { return };
    drop(pool);
    let ring = Ring::of(1);
    let node = &ring.nodes[0];
    node.atoll(["volume", "create", "work"]).ok();
    let files = ring.path("files");
    let files = files.to_str().expect("a text");
    node.atoll(["pool", "create", "work", files]).failed(2, &["this node has a volume work"]);
    node.atoll(["pool", "create", "a@b", files]).failed(2, &["taken for an address or a time"]);
    node.atoll(["pool", "create", "home", files]).ok();
    node.atoll(["volume", "create", "home"]).failed(1, &["this node has a pool of that name"]);
    let home = ring.path("home");
    make_tree(&home);
    let home = home.to_str().expect("a text");
    node.atoll(["publish", home]).failed(1, &["this node has a pool of that name", "--name"]);
    node.atoll(["publish", home, "--name", "other"]).ok();
}

#[test]
fn a_mount_whose_process_was_killed_is_taken_away_and_the_next_goes_on() {
    let test = "a_mount_whose_process_was_killed_is_taken_away_and_the_next_goes_on";
    let Some(pool) = can_mount(test).then(|| Pool::new(test)).flatten() else { return };
    let at = pool.files.with_file_name("mnt");
    fs::create_dir(&at).expect("made");
    let mut server =
        in_dir(&pool.dir, &["mount", "home", "--foreground"]).arg(&at).spawn().expect("runs");
    let device = |path: &Path| fs::metadata(path).expect("it is there").dev();
    until("it is mounted", || device(&at) != device(&pool.files));
    fs::create_dir(at.join("anna")).expect("made");
    fs::write(at.join("anna/file"), "text").expect("written");
    server.kill().expect("it runs");
    server.wait().expect("it ends");
    let said = run(atoll().arg("unmount").arg(&at)).ok();
    assert!(said.stderr.contains("the next mount of the pool"), "{said:?}");
    pool.mount(&at);
    assert_eq!(fs::read_to_string(at.join("anna/file")).expect("a file"), "text");
    unmount(&at);
}

/// `df`, `du` and `atoll pool quota` say the same.
#[test]
fn a_limit_holds_and_df_and_du_agree_with_it() {
    let test = "a_limit_holds_and_df_and_du_agree_with_it";
    let Some(pool) = can_mount(test).then(|| Pool::new(test)).flatten() else { return };
    let at = pool.files.with_file_name("mnt");
    pool.mount(&at);
    fs::create_dir_all(at.join("atlas/maps")).expect("made");
    fs::write(at.join("atlas/first"), vec![1; 40 << 10]).expect("written");
    pool.pool(&["quota", "home"]).failed(1, &["another process serves it"]);
    unmount(&at);
    let limit = ["quota", "home", "--directory", "/atlas", "--size", "1MiB", "--files", "50"];
    let said = pool.pool(&limit).ok().stdout;
    assert_eq!(said, "/atlas: 48.0 KiB of 1.0 MiB and 3 files of 50\n");
    pool.pool(&["quota", "home", "--user", "1000", "--files", "2"]).ok();
    pool.mount(&at);
    // A file as long as there is room, and not a page more.
    let file = fs::File::create(at.join("atlas/maps/large")).expect("made");
    file.write_all_at(&vec![2; 976 << 10], 0).expect("there is room");
    let more = file.write_all_at(&[3], 976 << 10).expect_err("there is no more room");
    assert_eq!(more.raw_os_error(), Some(rustix::io::Errno::DQUOT.raw_os_error()), "{more}");
    file.sync_all().expect("synced");
    drop(file);
    let room = rustix::fs::statvfs(at.join("atlas")).expect("its room");
    assert_eq!((room.f_blocks * room.f_frsize, room.f_bavail), (1 << 20, 0));
    let du = run(std::process::Command::new("du").args(["-s", "-B1"]).arg(at.join("atlas"))).ok();
    assert!(du.stdout.starts_with("1048576\t"), "{du:?}");
    for name in ["a", "b", "c"] {
        fs::write(at.join(name), "").expect("made");
    }
    chown(at.join("a"), Some(1000), None).expect("given");
    chown(at.join("b"), Some(1000), None).expect("given");
    let refused = chown(at.join("c"), Some(1000), None).expect_err("he has two");
    assert_eq!(refused.raw_os_error(), Some(rustix::io::Errno::DQUOT.raw_os_error()));
    unmount(&at);
    let listed = pool.pool(&["quota", "home", "--json"]).ok().json_lines();
    assert_eq!(listed[0]["user"], 1000);
    assert_eq!((&listed[0]["used_files"], &listed[0]["limit_files"]), (&2.into(), &2.into()));
    assert_eq!(
        (&listed[1]["directory"], &listed[1]["used_bytes"]),
        (&"/atlas".into(), &1048576.into())
    );
    // The limit of a directory that is gone can be removed, too.
    pool.mount(&at);
    fs::remove_dir_all(at.join("atlas")).expect("removed");
    unmount(&at);
    let listed = pool.pool(&["quota", "home"]).ok().stdout;
    let gone = listed.lines().find_map(|line| line.split_once("{")?.1.split_once("}"));
    let number = format!("{{{}}}", gone.expect("it is listed by its number").0);
    pool.pool(&["quota", "home", "--directory", &number, "--none"]).ok();
    assert_eq!(pool.pool(&["quota", "home"]).ok().stdout, "user 1000: 0 B and 2 files of 2\n");
    for (arguments, why) in [
        (&["--size", "1MiB"][..], "--user or --directory"),
        (&["--directory", "/nowhere", "--size", "1MiB"], "/nowhere in the pool"),
        (&["--directory", "/a", "--size", "1MiB"], "Not a directory"),
        (&["--user", "nobody-of-this-name", "--none"], "knows no user"),
    ] {
        let said = pool.pool(&[&["quota", "home"], arguments].concat());
        assert!(said.code != Some(0) && said.stderr.contains(why), "{arguments:?}: {said:?}");
    }
}

#[test]
fn what_makes_no_sense_is_refused_with_the_reason() {
    let Some(pool) = Pool::new("what_makes_no_sense_is_refused_with_the_reason") else { return };
    let files = pool.files.to_str().expect("a text");
    let other = pool.files.with_file_name("other");
    let other = other.to_str().expect("a text");
    pool.pool(&["create", "home", other]).failed(2, &["this node has a pool home"]);
    pool.pool(&["create", "other", files]).failed(2, &["not empty", "atoll pool attach"]);
    pool.pool(&["create", "a/b", files]).failed(2, &[]);
    let deep = pool.files.with_file_name("deep");
    let deep = deep.to_str().expect("a text");
    pool.pool(&["create", "deep", deep, "--level", "17"]).failed(2, &["at most 16"]);
    assert!(!Path::new(deep).exists(), "nothing is left of what was refused");
    pool.pool(&["check", "nothing"]).failed(4, &["no pool nothing", "atoll pool status"]);
    pool.pool(&["leave", "home"]).failed(2, &["--yes"]);
    let at = pool.files.with_file_name("mnt");
    fs::create_dir(&at).expect("made");
    let at = at.to_str().expect("a text");
    for options in [["--take-over"], ["--sync"]] {
        run(in_dir(&pool.dir, &["mount", "home", at]).args(options)).failed(2, &["pool"]);
    }
    run(&mut in_dir(&pool.dir, &["nfs", "home@2026-11-20"])).failed(3, &[]);
    // Its disk is not mounted, or another one is.
    let away = pool.files.with_file_name("away");
    fs::rename(&pool.files, &away).expect("moved");
    fs::create_dir(&pool.files).expect("made");
    pool.pool(&["check", "home"]).failed(1, &["Is its disk mounted?"]);
    let told = pool.pool(&["status", "--json"]).ok().json();
    assert!(told["fault"].as_str().expect("a text").contains("Is its disk mounted?"), "{told}");
    assert_eq!(fs::read_dir(&pool.files).expect("a directory").count(), 0, "nothing is made there");
    pool.pool(&["forget", "home"]).ok();
    pool.pool(&["create", "home", files]).ok();
    fs::rename(&pool.files, away.with_file_name("new")).expect("moved");
    fs::rename(&away, &pool.files).expect("moved");
    pool.pool(&["check", "home"]).failed(1, &["holds another pool"]);
    pool.pool(&["forget", "home"]).ok();
    pool.pool(&["attach", "home", files]).ok();
    pool.pool(&["check", "home"]).ok();
}
