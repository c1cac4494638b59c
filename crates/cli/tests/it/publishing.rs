//! A tree goes in through one node and comes out through another.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::symlink;
use std::process::Stdio;

use crate::processes::{Ring, assert_same, make_tree, noise, run, signal, unpublished, until};

#[test]
fn a_tree_published_by_one_node_is_read_through_another() {
    let ring = Ring::of(3);
    let source = ring.path("tree");
    make_tree(&source);
    let said = ring.nodes[0].command(["publish"]).arg(&source).output().expect("runs");
    let stdout = String::from_utf8(said.stdout).expect("text");
    let address = stdout.lines().last().expect("a last line").to_string();
    assert!(address.starts_with("atoll:") && !address.contains(' '), "{stdout}");
    assert!(stdout.contains("45 files"), "{stdout}");
    let other = &ring.nodes[2];

    let names = other.atoll(["ls", &address]).ok().stdout;
    for name in ["docs", "empty", "run.sh", "link"] {
        assert!(names.lines().any(|line| line == name), "{name}: {names}");
    }
    let long = other.atoll(["ls", "-l", &address]).ok().stdout;
    assert!(long.contains("-rwxr-xr-x") && long.contains("link -> docs/file07.txt"), "{long}");
    let items = other.atoll(["ls", "--json", &address]).ok().json_lines();
    let run_sh = items.iter().find(|item| item["name"] == "run.sh").expect("run.sh");
    assert_eq!((run_sh["kind"].as_str(), run_sh["mode"].as_str()), (Some("file"), Some("0755")));
    assert!(items.iter().any(|item| item["name_hex"] == "636166e9"), "bytes that are no text");

    let tree = other.atoll(["tree", &address]).ok().stdout;
    assert!(tree.contains("│   │   └── large.bin") || tree.contains("large.bin"), "{tree}");
    assert!(tree.contains("4 directories, 47 files"), "{tree}");
    let shallow = other.atoll(["tree", "--depth", "1", &address]).ok().stdout;
    assert!(!shallow.contains("large.bin") && shallow.contains("docs"), "{shallow}");

    let file = format!("{address}/docs/file07.txt");
    let link = format!("{address}/link");
    let both = other.atoll(["cat", &file, &link]).ok().stdout;
    assert_eq!(both, "this is file 7\nthis is file 7\n", "links are followed");
    let stat = other.atoll(["stat", "--json", &file]).ok().json();
    assert_eq!((stat["size_bytes"].as_u64(), stat["kind"].as_str()), (Some(15), Some("file")));
    let stat = other.atoll(["stat", &link]).ok().stdout;
    assert!(stat.contains("symlink") && stat.contains("docs/file07.txt"), "{stat}");

    let dest = ring.path("copy");
    run(other.command(["get", &address]).arg(&dest)).ok();
    assert_same(&source, &dest);
    let into = ring.path("into");
    fs::create_dir(&into).expect("a directory");
    run(other.command(["get", &file]).arg(&into)).ok();
    assert_eq!(fs::read(into.join("file07.txt")).expect("got"), b"this is file 7\n");
    run(other.command(["get", &file]).arg(into.join("renamed"))).ok();
    assert_eq!(fs::read(into.join("renamed")).expect("got"), b"this is file 7\n");
}

#[test]
fn files_that_have_not_changed_for_a_minute_are_not_read_again() {
    let ring = Ring::of(1);
    let node = &ring.nodes[0];
    // Files that have been there for a while.
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/src");
    let kind = rustix::fs::statfs(source).expect("is there").f_type as u64 & 0xffff_ffff;
    if ![0xef53, 0x5846_5342, 0x9123_683e].contains(&kind) {
        eprintln!("SKIPPED: the sources are not on ext4, XFS or Btrfs");
        return;
    }
    let publish =
        |flags: &[&str]| node.atoll([&["publish", "--json", source], flags].concat()).ok().json();
    publish(&[]);
    until("they are remembered", || {
        let again = publish(&[]);
        assert_eq!(again["unchanged"], true);
        again["unread_files"] == again["files"]
    });
    let said = node.atoll(["publish", source]).ok().stdout;
    assert!(said.contains("files not read: unchanged since an earlier publish"), "{said}");
    assert_eq!(publish(&["--checksum"])["unread_files"], 0);
    let cache = node.dir.join("stat-cache/src");
    let mode =
        std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&cache).expect("made").permissions());
    assert_eq!(mode & 0o777, 0o600);
    node.atoll(["volume", "forget", "--yes", "src"]).ok();
    assert!(!cache.exists());
}

/// A link to "." was taken for a file: `ls` showed its name instead of the directory.
#[test]
fn links_are_followed_within_the_volume() {
    let ring = Ring::of(1);
    let source = ring.path("tree");
    fs::create_dir_all(source.join("deep")).expect("made");
    fs::write(source.join("file"), "found").expect("written");
    let links = [
        ("here", "."),
        ("deep/back", ".."),
        ("far", "here/deep/back/file"),
        ("out", "/etc/hostname"),
        ("round", "round"),
    ];
    for (name, target) in links {
        symlink(target, source.join(name)).expect("linked");
    }
    let address = ring.publish(&source);
    let node = &ring.nodes[0];
    let at = |path: &str| format!("{address}/{path}");
    for directory in ["here", "deep/back", "here/here/deep/back"] {
        let names = node.atoll(["ls", &at(directory)]).ok().stdout;
        assert_eq!(names, "deep\nfar\nfile\nhere\nout\nround\n", "{directory}");
    }
    for file in ["far", "here/file", "deep/back/far"] {
        assert_eq!(node.atoll(["cat", &at(file)]).ok().stdout, "found", "{file}");
    }
    node.atoll(["cat", &at("out")]).failed(1, &["leads out of the volume"]);
    node.atoll(["cat", &at("round")]).failed(1, &["too many symbolic links"]);
}

#[test]
fn what_is_not_there_is_not_found() {
    let ring = Ring::of(2);
    let (_, address) = ring.publish_tree();
    let node = &ring.nodes[1];
    let at = |path: &str| format!("{address}/{path}");
    node.atoll(["ls", &at("docs/nothing")]).failed(4, &["docs/nothing", "no such file"]);
    node.atoll(["cat", &at("docs")]).failed(1, &["it is a directory", "atoll ls"]);
    node.atoll(["ls", &at("run.sh/x")]).failed(1, &["not a directory"]);
    node.atoll(["cat", &at("docs/dangling")]).failed(4, &["no such file"]);
    node.atoll(["tree", &at("run.sh")]).failed(1, &["not a directory"]);
    node.atoll(["ls", &unpublished()]).failed(4, &["cannot open", "nowhere on the ring"]);
    let dest = ring.path("run.sh-is-a-file");
    fs::write(&dest, "in the way").expect("a file");
    let said = run(node.command(["get", &address]).arg(&dest));
    said.failed(1, &["what is there is none"]);
    assert_eq!(fs::read(&dest).expect("there"), b"in the way", "nothing is overwritten");
    let deep = ring.path("not/made/yet");
    run(node.command(["get", &address]).arg(&deep)).failed(4, &["no directory", "mkdir -p"]);
}

#[test]
fn publishing_again_keeps_the_address_and_uploads_only_changes() {
    let ring = Ring::of(3);
    let source = ring.path("tree");
    make_tree(&source);
    fs::write(source.join("big"), noise(3 << 20, 9)).expect("a file");
    let publish = || run(ring.nodes[0].command(["publish", "--json"]).arg(&source)).ok().json();
    let first = publish();
    assert!(first["new_blocks"].as_u64() > Some(48), "{first}");
    let again = publish();
    assert_eq!(again["address"], first["address"]);
    assert_eq!((again["new_blocks"].as_u64(), again["unchanged"].as_bool()), (Some(0), Some(true)));
    fs::write(source.join("docs/file03.txt"), "changed\n").expect("a file");
    let changed = publish();
    assert_eq!(changed["address"], first["address"]);
    assert!(changed["version"].as_u64() > first["version"].as_u64(), "{changed}");
    let new_blocks = changed["new_blocks"].as_u64().expect("a number");
    assert!((1..10).contains(&new_blocks), "one file and its directories: {changed}");
    let address = first["address"].as_str().expect("text");
    let text = ring.nodes[1].atoll(["cat", &format!("{address}/docs/file03.txt")]).ok().stdout;
    assert_eq!(text, "changed\n");

    let volumes = ring.nodes[0].atoll(["volumes", "--json"]).ok().json();
    assert_eq!((volumes["name"].as_str(), &volumes["address"]), (Some("tree"), &first["address"]));
    assert_eq!(volumes["root_version"], changed["version"]);
}

#[test]
fn names_belong_to_directories_and_patterns_leave_out() {
    let ring = Ring::of(1);
    let (one, two) = (ring.path("one/docs"), ring.path("two/docs"));
    make_tree(&one);
    make_tree(&two);
    let first = ring.publish(&one);
    let said = run(ring.nodes[0].command(["publish"]).arg(&two));
    said.failed(1, &["docs", "--name", "--moved"]);
    fs::rename(&one, ring.path("one/elsewhere")).expect("renamed");
    let mut command = ring.nodes[0].command(["publish", "--moved", "--name", "docs"]);
    let moved = run(command.arg(ring.path("one/elsewhere"))).ok();
    assert_eq!(moved.last_line(), first, "a directory that has moved keeps its address");
    let mut command = ring.nodes[0].command(["publish", "--name", "other", "--exclude", "*.txt"]);
    let said = run(command.args(["--exclude", "/docs/deep"]).arg(&two)).ok();
    let second = said.last_line();
    assert_ne!(second, first);
    let tree = ring.nodes[0].atoll(["tree", second]).ok().stdout;
    assert!(!tree.contains("file08.txt") && !tree.contains("large.bin") && tree.contains("run.sh"));
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let ring = Ring::of(1);
    let source = ring.path("tree");
    make_tree(&source);
    fs::write(source.join("big"), noise(8 << 20, 4)).expect("a file");
    let address = ring.publish(&source);
    // Without what it says when it waits on a busy machine.
    let mut cat = ring.nodes[0].command(["cat", "-q", &format!("{address}/big")]);
    let mut cat = cat.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("runs");
    let mut some = [0; 1000];
    let mut pipe = cat.stdout.take().expect("piped");
    pipe.read_exact(&mut some).expect("its beginning");
    drop(pipe);
    let output = cat.wait_with_output().expect("ends");
    assert_eq!((output.status.code(), &output.stderr[..]), (Some(0), &b""[..]));
    assert_eq!(&some[..], &noise(1000, 4)[..]);
}

/// Names are escaped only for terminals: `script` gives the command one.
#[test]
fn a_hostile_name_reaches_a_pipe_but_not_a_terminal() {
    let ring = Ring::of(1);
    let (_, address) = ring.publish_tree();
    let raw = ring.nodes[0].atoll(["ls", &address]).ok().stdout;
    assert!(raw.contains("\u{1b}[31mred"), "{raw:?}");
    let inner = format!("{} ls {address}", env!("CARGO_BIN_EXE_atoll"));
    let mut script = std::process::Command::new("script");
    script.args(["-qec", &inner, "/dev/null"]).env("ATOLL_DIR", &ring.nodes[0].dir);
    let Ok(output) = script.stdin(Stdio::null()).output() else {
        let _ = writeln!(std::io::stderr(), "\nSKIPPED the terminal half: no script(1) here");
        return;
    };
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(shown.contains("\\x1b[31mred") && !shown.contains("\u{1b}[31mred"), "{shown:?}");
}

#[test]
fn an_interrupted_copy_goes_on_where_it_was() {
    let ring = Ring::of(3);
    let source = ring.path("tree");
    make_tree(&source);
    for i in 0..6 {
        fs::write(source.join(format!("big{i}")), noise(16 << 20, 100 + i)).expect("a file");
    }
    let address = ring.publish(&source);
    let dest = ring.path("copy");
    let mut get = ring.nodes[1].command(["get", "--json", &address]);
    let mut get =
        get.arg(&dest).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("runs");
    // Stopped once something has arrived; on a very fast machine it may all be there.
    until("the copy begins", || dest.join("docs").exists() || get.try_wait().unwrap().is_some());
    if get.try_wait().expect("waits").is_none() {
        signal(get.id(), "INT");
    }
    let output = get.wait_with_output().expect("ends");
    let stderr = String::from_utf8_lossy(&output.stderr);
    match output.status.code() {
        Some(130) => assert!(stderr.contains("the same command again goes on"), "{stderr}"),
        other => assert_eq!(other, Some(0), "{stderr}"),
    }
    run(ring.nodes[1].command(["get", &address]).arg(&dest)).ok();
    assert_same(&source, &dest);
    let third = run(ring.nodes[1].command(["get", "--json", &address]).arg(&dest)).ok().json();
    assert_eq!(third["files"].as_u64(), Some(0), "all is there: {third}");
}
