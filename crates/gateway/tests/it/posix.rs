//! System calls whose meaning is easy to get wrong.

use std::collections::BTreeSet;
use std::ffi::CStr;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;

use atoll_gateway::fuse::MountOptions;
use rustix::fs::{
    AtFlags, CWD, FallocateFlags, OFlags, RenameFlags, SeekFrom as RawSeek, StatxFlags, XattrFlags,
    statx,
};
use rustix::io::Errno;

use crate::place::{Place, memory, skipped};

#[test]
fn an_unlinked_file_lives_while_open() {
    let Some(place) = Place::memory() else { return };
    let path = place.join("f");
    let mut file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
    file.write_all(b"before").unwrap();
    fs::remove_file(&path).unwrap();
    assert!(!path.exists());
    file.write_all(b" after").unwrap();
    file.rewind().unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "before after");
    assert_eq!(file.metadata().unwrap().nlink(), 0);
    drop(file);
    place.unmount();
}

/// What was opened for appending was written at its end for ever.
#[test]
fn a_file_that_appends_no_longer_is_written_where_the_program_says() {
    let Some(place) = Place::memory() else { return };
    let path = place.join("file");
    fs::write(&path, "hello world").unwrap();
    let file = OpenOptions::new().append(true).open(&path).unwrap();
    (&file).write_all(b"!").unwrap();
    rustix::fs::fcntl_setfl(&file, OFlags::empty()).unwrap();
    file.write_all_at(b"J", 0).unwrap();
    rustix::fs::fcntl_setfl(&file, OFlags::APPEND).unwrap();
    (&file).write_all(b"!").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"Jello world!!");
    drop(file);
    place.unmount();
}

#[test]
fn renames_replace_refuse_and_exchange() {
    let Some(place) = Place::memory() else { return };
    let (a, b) = (place.join("a"), place.join("b"));
    fs::write(&a, "a").unwrap();
    fs::write(&b, "b").unwrap();
    let with = |flags| rustix::fs::renameat_with(CWD, &a, CWD, &b, flags);
    assert_eq!(with(RenameFlags::NOREPLACE), Err(Errno::EXIST));
    with(RenameFlags::EXCHANGE).unwrap();
    assert_eq!(fs::read(&a).unwrap(), b"b");
    assert_eq!(with(RenameFlags::WHITEOUT), Err(Errno::INVAL));
    fs::rename(&a, &b).unwrap();
    assert!(!a.exists());
    assert_eq!(fs::read(&b).unwrap(), b"b");
    fs::create_dir_all(place.join("d/e")).unwrap();
    let into_itself = fs::rename(place.join("d"), place.join("d/e/f")).unwrap_err();
    assert_eq!(into_itself.raw_os_error(), Some(22));
    place.unmount();
}

#[test]
fn truncation_and_append_are_seen_by_others() {
    let Some(place) = Place::memory() else { return };
    let path = place.join("f");
    fs::write(&path, vec![b'x'; 100_000]).unwrap();
    let reader = File::open(&path).unwrap();
    let mut byte = [0; 1];
    assert_eq!(reader.read_at(&mut byte, 99_999).unwrap(), 1);
    File::options().write(true).open(&path).unwrap().set_len(10).unwrap();
    assert_eq!(reader.read_at(&mut byte, 99_999).unwrap(), 0);
    File::options().append(true).open(&path).unwrap().write_all(b"end").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"xxxxxxxxxxend");
    fs::write(&path, "new").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"new", "opened with O_TRUNC");
    drop(reader);
    place.unmount();
}

#[test]
fn extended_attributes_answer_probes_and_small_buffers() {
    let Some(place) = Place::memory() else { return };
    let path = place.join("f");
    fs::write(&path, "").unwrap();
    let value = vec![b'v'; 3000];
    rustix::fs::setxattr(&path, "user.long", &value, XattrFlags::CREATE).unwrap();
    rustix::fs::setxattr(&path, "user.empty", b"", XattrFlags::empty()).unwrap();
    let again = rustix::fs::setxattr(&path, "user.long", b"", XattrFlags::CREATE);
    assert_eq!(again, Err(Errno::EXIST));
    let missing = rustix::fs::setxattr(&path, "user.no", b"", XattrFlags::REPLACE);
    assert_eq!(missing, Err(Errno::NODATA));
    assert_eq!(rustix::fs::getxattr_query(&path, "user.long"), Ok(3000));
    let mut small = [0; 2999];
    assert_eq!(rustix::fs::getxattr(&path, "user.long", &mut small[..]), Err(Errno::RANGE));
    let mut enough = vec![0; 4000];
    assert_eq!(rustix::fs::getxattr(&path, "user.long", &mut enough[..]), Ok(3000));
    assert_eq!(enough[..3000], value);
    assert_eq!(rustix::fs::getxattr_query(&path, "user.empty"), Ok(0));
    let len = rustix::fs::listxattr_query(&path).unwrap();
    let mut list = vec![0; len];
    assert_eq!(rustix::fs::listxattr(&path, &mut list[..]), Ok(len));
    assert_eq!(list, b"user.empty\0user.long\0");
    assert_eq!(rustix::fs::listxattr(&path, &mut list[..5]), Err(Errno::RANGE));
    rustix::fs::removexattr(&path, "user.long").unwrap();
    assert_eq!(rustix::fs::getxattr_query(&path, "user.long"), Err(Errno::NODATA));
    place.unmount();
}

#[test]
fn a_big_directory_lists_every_name_once() {
    const COUNT: usize = 10_000;
    let Some(place) = Place::memory() else { return };
    for index in 0..COUNT {
        File::create(place.join(&format!("a name of some length {index}"))).unwrap();
    }
    let listed: Vec<_> = fs::read_dir(place.path()).unwrap().map(|entry| entry.unwrap()).collect();
    assert_eq!(listed.len(), COUNT);
    let names: BTreeSet<_> = listed.iter().map(|entry| entry.file_name()).collect();
    assert_eq!(names.len(), COUNT);
    assert!(listed.iter().all(|entry| entry.metadata().unwrap().is_file()));
    // Each entry keeps the directory open.
    drop(listed);
    // The C library reads `.` and `..` too.
    let raw = rustix::fs::Dir::new(File::open(place.path()).unwrap()).unwrap();
    let all: Vec<_> = raw.map(|entry| entry.unwrap().file_name().to_owned()).collect();
    assert_eq!(all.len(), COUNT + 2);
    let begins: [&CStr; 2] = [c".", c".."];
    assert_eq!([&*all[0], &*all[1]], begins);
    place.unmount();
}

#[test]
fn holes_are_found_and_read_as_zeros() {
    let Some(place) = Place::memory() else { return };
    let mut file =
        OpenOptions::new().read(true).write(true).create_new(true).open(place.join("f")).unwrap();
    file.seek(SeekFrom::Start(10 << 20)).unwrap();
    file.write_all(b"data").unwrap();
    assert_eq!(rustix::fs::seek(&file, RawSeek::Data(0)), Ok(10 << 20));
    assert_eq!(rustix::fs::seek(&file, RawSeek::Hole(0)), Ok(0));
    assert_eq!(rustix::fs::seek(&file, RawSeek::Data((10 << 20) + 4)), Err(Errno::NXIO));
    let mut byte = [1; 4096];
    file.read_exact_at(&mut byte, 5 << 20).unwrap();
    assert_eq!(byte, [0; 4096]);
    drop(file);
    place.unmount();
}

/// The kernel has read the bytes before, and knows the size.
#[test]
fn a_punched_hole_is_seen_at_once() {
    let Some(place) = Place::memory() else { return };
    let path = place.join("f");
    fs::write(&path, vec![b'x'; 300_000]).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let mut expected = vec![b'x'; 300_000];
    let read = || fs::read(&path).unwrap();
    assert!(read() == expected);
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, punch, 10_001, 200_000).unwrap();
    expected[10_001..210_001].fill(0);
    assert!(read() == expected);
    assert!(fs::metadata(&path).unwrap().blocks() * 512 < 300_000);
    rustix::fs::fallocate(&file, FallocateFlags::ZERO_RANGE, 290_000, 20_000).unwrap();
    expected.resize(310_000, 0);
    expected[290_000..].fill(0);
    assert!(read() == expected);
    let refused = rustix::fs::fallocate(&file, FallocateFlags::COLLAPSE_RANGE, 0, 4096);
    assert_eq!(refused, Err(Errno::OPNOTSUPP));
    drop(file);
    place.unmount();
}

#[test]
fn special_files_links_and_modes_are_kept() {
    let Some(place) = Place::memory() else { return };
    fs::write(place.join("f"), "linked").unwrap();
    fs::hard_link(place.join("f"), place.join("g")).unwrap();
    assert_eq!(fs::metadata(place.join("g")).unwrap().nlink(), 2);
    std::os::unix::fs::symlink("f", place.join("s")).unwrap();
    assert_eq!(fs::read(place.join("s")).unwrap(), b"linked");
    let fifo = rustix::fs::FileType::Fifo;
    let mode = rustix::fs::Mode::from_raw_mode(0o640);
    rustix::fs::mknodat(CWD, place.join("p"), fifo, mode, 0).unwrap();
    let kept = fs::metadata(place.join("p")).unwrap();
    assert_eq!(kept.mode(), 0o010_640 & !umask());
    fs::set_permissions(place.join("f"), fs::Permissions::from_mode(0o4711)).unwrap();
    assert_eq!(fs::metadata(place.join("g")).unwrap().mode() & 0o7777, 0o4711);
    std::os::unix::fs::chown(place.join("f"), Some(12), Some(34)).unwrap();
    let owned = fs::metadata(place.join("f")).unwrap();
    assert_eq!((owned.uid(), owned.gid()), (12, 34));
    place.unmount();
}

/// The mask as the process has it, without changing it (proc(5)).
fn umask() -> u32 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("Umask:")).unwrap();
    u32::from_str_radix(line.trim(), 8).unwrap()
}

/// The kernel leaves it to the server, and believes the modes that it knows.
#[test]
fn set_id_bits_go_when_a_file_is_written_cut_off_or_given_away() {
    if !rustix::process::geteuid().is_root() {
        return skipped("writing as another user needs root");
    }
    let options = MountOptions { allow_other: true, ..MountOptions::default() };
    let Some(place) = Place::with(&options, |runtime| Arc::new(memory(runtime))) else { return };
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let file = place.join("f");
    let mode_after = |mode: u32, change: &dyn Fn()| {
        fs::write(&file, "contents").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
        // The kernel knows the mode, and asks for it alone after the change, as `stat -c %a` does:
        // it showed the bits for as long as it kept attributes.
        let shown = || {
            let wanted = StatxFlags::MODE;
            let answer = statx(CWD, &file, AtFlags::empty(), wanted).unwrap();
            u32::from(answer.stx_mode) & 0o7777
        };
        assert_eq!(shown(), mode);
        change();
        shown()
    };
    let as_user = |gid: u32, script: &str| {
        let mut shell = Command::new("sh");
        shell.args(["-c", script, "sh"]).arg(&file).uid(65534).gid(gid);
        assert!(shell.status().unwrap().success(), "{script}");
    };
    let group = fs::metadata(place.path()).unwrap().gid();
    let as_member = |groups: &str, script: &str| {
        let mut setpriv = Command::new("setpriv");
        setpriv.args(["--reuid", "65534", "--regid", "65534", "--groups", groups]);
        let status = setpriv.args(["sh", "-c", script, "sh"]).arg(&file).status();
        assert!(status.unwrap().success(), "{script}");
    };
    for (groups, expected) in [(format!("7,{group},9"), 0o2767), ("7,9".to_owned(), 0o767)] {
        let by_other_group = || as_member(&groups, "echo x >> \"$1\"");
        assert_eq!(mode_after(0o6767, &by_other_group), expected, "as a member of {groups}");
    }
    for change in [
        "echo x >> \"$1\"",
        ": > \"$1\"",
        "truncate -s 3 \"$1\"",
        "fallocate -l 5000 \"$1\"",
        "fallocate -p -l 5 \"$1\"",
        "fallocate -z -l 5 \"$1\"",
    ] {
        assert_eq!(mode_after(0o6777, &|| as_user(65534, change)), 0o777, "{change}");
        // Without the group's right to execute it is a mark for others than a program's loader,
        // which the group's members may keep.
        assert_eq!(mode_after(0o6767, &|| as_user(65534, change)), 0o767, "{change}");
        assert_eq!(mode_after(0o6767, &|| as_user(group, change)), 0o2767, "{change}");
    }
    let chown = || std::os::unix::fs::chown(&file, Some(12), Some(34)).unwrap();
    assert_eq!(mode_after(0o6777, &chown), 0o777);
    let by_root = || {
        let mut opened = fs::File::options().append(true).open(&file).unwrap();
        opened.write_all(b"x").unwrap();
        opened.set_len(3).unwrap();
        rustix::fs::fallocate(&opened, FallocateFlags::empty(), 0, 5000).unwrap();
    };
    assert_eq!(mode_after(0o6777, &by_root), 0o6777, "the superuser keeps them");
    fs::create_dir(place.join("d")).unwrap();
    fs::set_permissions(place.join("d"), fs::Permissions::from_mode(0o6777)).unwrap();
    std::os::unix::fs::chown(place.join("d"), Some(12), Some(34)).unwrap();
    assert_eq!(fs::metadata(place.join("d")).unwrap().mode() & 0o7777, 0o6777);
    place.unmount();
}

/// The open failed, and the program that ran lost its pages all the same.
#[test]
fn a_program_that_runs_is_not_emptied() {
    let Some(place) = Place::memory() else { return };
    let program = place.join("sleep");
    fs::copy("/bin/sleep", &program).unwrap();
    let size = fs::metadata(&program).unwrap().len();
    let mut running = std::process::Command::new(&program).arg("60").spawn().unwrap();
    let open = fs::OpenOptions::new().write(true).truncate(true).open(&program);
    assert_eq!(open.unwrap_err().raw_os_error(), Some(26), "ETXTBSY");
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::TRUNC;
    let open = rustix::fs::open(&program, flags, rustix::fs::Mode::empty());
    assert_eq!(open.unwrap_err(), rustix::io::Errno::TXTBSY);
    assert_eq!(fs::metadata(&program).unwrap().len(), size);
    running.kill().unwrap();
    running.wait().unwrap();
    place.unmount();
}
