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

#[test]
fn an_installation_has_the_helper_that_runs_the_installed_program() {
    let temp = tempfile::tempdir().expect("temp");
    let (target, package) = (temp.path().join("target"), temp.path().join("package"));
    fs::create_dir_all(target.join("release")).expect("makes");
    symlink(env!("CARGO_BIN_EXE_atoll"), target.join("release/atoll")).expect("links");
    let mut install = Command::new(script("install"));
    install.arg("/opt/at & oll").env("CARGO_TARGET_DIR", &target).env("DESTDIR", &package);
    let said = run(install.env_remove("SBINDIR")).ok();
    assert!(said.stdout.contains("mount.fuse.atoll"), "{said:?}");
    let installed = package.join("opt/at & oll");
    for file in ["bin/atoll", "share/man/man1/atoll.1", "share/zsh/site-functions/_atoll"] {
        assert!(installed.join(file).is_file(), "{file}");
    }
    let helper = package.join("sbin/mount.fuse.atoll");
    let mode = fs::metadata(&helper).expect("is there").permissions().mode() & 0o777;
    assert_eq!(mode, 0o755);
    let text = fs::read_to_string(&helper).expect("reads");
    assert!(text.contains("program=${ATOLL_BIN:-/opt/at & oll/bin/atoll}"), "{text}");
}
