//! What `make install` puts into place, and mount(8)'s helper among it.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::processes::run;

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts").join(name)
}

#[test]
fn options_of_fstab_become_those_of_the_command() {
    let helper = |line: &str| {
        let mut command = Command::new(script("mount.fuse.atoll"));
        run(command.args(line.split(' ')).env("ATOLL_BIN", "echo"))
    };
    let table = [
        ("work /m", "-q mount -- work /m"),
        ("work /m -o rw,nosuid,nodev,allow_other,_netdev", "-q mount --allow-other -- work /m"),
        (
            "team /m -t fuse.atoll -o dir=/var/lib/atoll,consistency=ryw",
            "-q mount --dir /var/lib/atoll --consistency ryw -- team /m",
        ),
        ("atoll:KEY /m -o ro,max_age=5s", "-q mount --max-age 5s -- atoll:KEY /m"),
        ("work@2026-11-20 /m -r", "-q mount -- work@2026-11-20 /m"),
        (
            "/d.img /m -o ro,noatime,x-systemd.automount",
            "-q tfs mount --allow-other --read-only -o noatime -- /d.img /m",
        ),
        ("work /m -f", ""),
    ];
    for (line, command) in table {
        assert_eq!(helper(line).ok().stdout.trim_end(), command, "{line}");
    }
    helper("work /m -o nonsense").failed(1, &["unknown option nonsense"]);
    helper("work /m -o max_age=5s,noexec").failed(1, &["unknown option noexec"]);
    helper("/d.img /m -o max_age=5s").failed(1, &["unknown option max_age=5s"]);
    helper("work /m -o ro").failed(1, &["work is mounted read-write", "its address"]);
}

/// `make install`, with an environment of the test's own.
fn install(prefix: &Path, variables: &[(&str, &Path)]) -> Command {
    let mut install = Command::new(script("install"));
    install.arg(prefix).env_remove("DESTDIR").env_remove("SBINDIR");
    install.envs(variables.iter().copied());
    install
}

/// The story: the helper had the program's path unquoted, and one with a brace in it was cut off there.
#[test]
fn an_installation_has_the_helper_that_runs_the_installed_program() {
    let temp = tempfile::tempdir().expect("temp");
    let path = |name: &str| temp.path().join(name);
    let target = path("target");
    fs::create_dir_all(target.join("release")).expect("makes");
    symlink(env!("CARGO_BIN_EXE_atoll"), target.join("release/atoll")).expect("links");
    let target = ("CARGO_TARGET_DIR", &*target);

    // As a package takes it.
    let package = path("a package");
    let prefix = Path::new("/opt/at & oll");
    let said = run(&mut install(prefix, &[target, ("DESTDIR", &package)])).ok();
    assert!(said.stdout.contains("mount.fuse.atoll"), "{said:?}");
    let installed = package.join("opt/at & oll");
    for file in ["bin/atoll", "share/man/man1/atoll.1", "share/zsh/site-functions/_atoll"] {
        assert!(installed.join(file).is_file(), "{file}");
    }
    let helper = package.join("sbin/mount.fuse.atoll");
    let mode = fs::metadata(&helper).expect("is there").permissions().mode() & 0o777;
    assert_eq!(mode, 0o755);
    // The path is what it will be, without the package's directory.
    let said = run(Command::new(&helper).args(["work", "/m"]).env_remove("ATOLL_BIN"));
    assert!(said.stderr.contains("/opt/at & oll/bin/atoll: No such file"), "{said:?}");

    // In place, with directories that are made.
    let (prefix, sbin) = (path("it's {a} $prefix | \"of\" mine"), path("s bin/deep"));
    run(&mut install(&prefix, &[target, ("SBINDIR", &sbin)])).ok();
    // Written by a process of its own: one that another test forks could hold the file open, which cannot be run then.
    let program = r#"printf '#!/bin/sh\necho "$0" "$@"\n' >"$1""#;
    run(Command::new("sh").args(["-c", program, "sh"]).arg(prefix.join("bin/atoll"))).ok();
    let helper = sbin.join("mount.fuse.atoll");
    let said = run(Command::new(&helper).args(["work", "/m"]).env_remove("ATOLL_BIN")).ok();
    let expected = format!("{} -q mount -- work /m\n", prefix.join("bin/atoll").display());
    assert_eq!(said.stdout, expected);

    // mount(8) has another directory than whoever installs.
    for (prefix, sbin) in [("usr", "/sbin"), ("/usr", "sbin")] {
        let variables = [target, ("SBINDIR", Path::new(sbin)), ("DESTDIR", &package)];
        run(&mut install(Path::new(prefix), &variables)).failed(1, &["not an absolute path"]);
    }
}
