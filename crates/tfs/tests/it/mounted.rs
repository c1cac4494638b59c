//! Real mounts, used by other users with the usual tools: who is kept out, and what the kernel
//! makes of our answers.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use atoll_env::TokioRuntime;
use atoll_gateway::fuse;
use atoll_tfs::fs::{MountOptions, Tfs};
use atoll_vfs::{FileSystem, InodeNumber};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use crate::access::image;
use crate::acls::{said, tools_are_here};
use crate::dice::Dice;
use crate::e2fsck::{assert_image_clean, open_image};
use crate::kernel::{KernelMount, drivers, skipped};

/// A TFS that all users of this machine see, unmounted when this is dropped.
struct Mounted {
    mounted: fuse::Mounted,
    tfs: Tfs,
    runtime: Runtime,
    directory: TempDir,
}

impl Mounted {
    /// None where that is not possible, which is said loudly.
    fn new(image: &Path) -> Option<Mounted> {
        let here = fs::File::options().read(true).write(true).open("/dev/fuse").is_ok();
        if !here || !rustix::process::geteuid().is_root() {
            skipped("this needs root and /dev/fuse");
            return None;
        }
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let directory = TempDir::new().unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let env = Arc::new(TokioRuntime::new(runtime.handle().clone()));
        let quiet = MountOptions { background: false, ..MountOptions::default() };
        let (tfs, _) = Tfs::mount(env, open_image(image, false), &quiet).unwrap();
        let options = fuse::MountOptions { allow_other: true, ..fuse::MountOptions::default() };
        let fs = Arc::new(tfs.clone());
        let mounted = fuse::mount(fs, directory.path(), &options, runtime.handle()).unwrap();
        Some(Mounted { mounted, tfs, runtime, directory })
    }

    fn path(&self) -> PathBuf {
        self.directory.path().to_owned()
    }

    /// Unmounts, which fails if anything stays in use. (A program that another test starts holds,
    /// for a moment, all that this process has open.)
    fn unmount(mut self) {
        let not_used = |draining: fuse::Draining<'_>| {
            assert!(!matches!(draining, fuse::Draining::Lazily { .. }), "somebody uses it");
        };
        self.runtime.block_on(self.mounted.drain(Duration::from_secs(10), not_used)).unwrap();
        self.tfs.unmount().unwrap();
    }
}

/// Runs a shell command as a user of the groups given, the first of them its own; whether it
/// succeeded and what it said.
fn shell(user: u32, groups: &[u32], at: &Path, command: &str) -> (bool, String) {
    let (first, more) = groups.split_first().unwrap();
    let mut setpriv = Command::new("setpriv");
    setpriv.args(["--reuid", &user.to_string(), "--regid", &first.to_string()]);
    if more.is_empty() {
        setpriv.arg("--clear-groups");
    } else {
        let more: Vec<String> = more.iter().map(u32::to_string).collect();
        setpriv.args(["--groups", &more.join(",")]);
    }
    let output =
        setpriv.args(["sh", "-c", command]).env("LC_ALL", "C").current_dir(at).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

#[track_caller]
fn allowed(user: u32, groups: &[u32], at: &Path, command: &str) -> String {
    let (done, text) = shell(user, groups, at, command);
    assert!(done, "{user} {groups:?}: {command}: {text}");
    text
}

#[track_caller]
fn refused(user: u32, groups: &[u32], at: &Path, command: &str, why: &str) {
    let (done, text) = shell(user, groups, at, command);
    assert!(!done && text.contains(why), "{user} {groups:?}: {command}: {done}, {text}");
}

const DENIED: &str = "Permission denied";
const NOT_PERMITTED: &str = "Operation not permitted";

/// The story: lists of an image that the kernel had made counted for nothing: a member of the
/// group read what the mask forbids.
#[test]
fn lists_of_the_kernel_keep_out_and_let_in() {
    if !tools_are_here() {
        return;
    }
    for driver in drivers() {
        let image = image(16, &["-I", "256"]);
        let kernel = KernelMount::new(image.path(), driver, "acl");
        let at = kernel.path();
        fs::write(at.join("masked"), b"secret").unwrap();
        said("setfacl", &["-m", "u::rw,g::rw,u:1000:rw,m::-,o::-"], &at.join("masked"));
        fs::write(at.join("shared"), b"for two").unwrap();
        said("setfacl", &["-m", "u::rw,g::-,u:1000:rw,g:2000:r,o::-"], &at.join("shared"));
        kernel.unmount();
        let Some(mount) = Mounted::new(image.path()) else { return };
        let at = mount.path();
        refused(1001, &[0], &at, "cat masked", DENIED);
        refused(1000, &[1000], &at, "cat masked", DENIED);
        allowed(1000, &[1000], &at, "cat shared && echo more >> shared");
        allowed(1001, &[1001, 2000], &at, "cat shared");
        refused(1001, &[1001, 2000], &at, "echo more >> shared", DENIED);
        refused(1002, &[1002], &at, "cat shared", DENIED);
        // The kernel forgets what it cached when a list changes.
        said("setfacl", &["-x", "u:1000"], &at.join("shared"));
        refused(1000, &[1000], &at, "cat shared", DENIED);
        said("setfacl", &["-m", "m::r"], &at.join("masked"));
        allowed(1000, &[1000], &at, "cat masked");
        refused(1000, &[1000], &at, "echo more >> masked", DENIED);
        fs::set_permissions(at.join("masked"), fs::Permissions::from_mode(0o600)).unwrap();
        refused(1000, &[1000], &at, "cat masked", DENIED);
        mount.unmount();
        assert_image_clean(image.path(), driver);
    }
}

#[test]
fn lists_are_set_handed_on_and_shown_as_on_any_file_system() {
    if !tools_are_here() {
        return;
    }
    let image = image(16, &[]);
    let Some(mount) = Mounted::new(image.path()) else { return };
    let at = mount.path();
    fs::create_dir(at.join("own")).unwrap();
    allowed(0, &[0], &at, "chown 1000:1000 own");
    let own = at.join("own");
    // The umask counts where there is no default list, and only there.
    allowed(1000, &[1000], &own, "umask 027; mkdir d; touch f; mkfifo p; mkdir listed");
    assert_eq!(allowed(0, &[0], &own, "stat -c %a d f p"), "750\n640\n640\n");
    allowed(1000, &[1000], &own, "setfacl -d -m u:1001:rwx,g::r-x,o::- listed");
    allowed(1000, &[1000], &own, "umask 077; mkdir listed/d; touch listed/f; echo x > listed/e");
    assert_eq!(allowed(0, &[0], &own, "stat -c %a listed/d listed/f listed/e"), "770\n660\n660\n");
    assert_eq!(
        said("getfacl", &["-cpnE"], &own.join("listed/f")),
        "user::rw-\nuser:1001:rwx\ngroup::r-x\nmask::rw-\nother::---\n\n"
    );
    assert!(said("getfacl", &["-cpnE"], &own.join("listed/d")).contains("default:user:1001:rwx"));
    allowed(0, &[0], &at, "chmod 755 own own/listed");
    allowed(1001, &[1001], &own, "echo x >> listed/f && touch listed/d/new");
    refused(1002, &[1002], &own, "cat listed/f", DENIED);
    // Only the owner sets lists; copies and archives take them along.
    refused(1001, &[1001], &own, "setfacl -m u:1001:rwx f", NOT_PERMITTED);
    allowed(1000, &[1000], &own, "cp -a listed/f copied && chmod g=r copied");
    let copied = said("getfacl", &["-cpnE"], &own.join("copied"));
    assert!(copied.contains("user:1001:rwx") && copied.contains("mask::r--"), "{copied}");
    allowed(1000, &[1000], &own, "setfacl -b copied; setfacl -k listed; touch listed/plain");
    assert!(!allowed(0, &[0], &own, "ls -l copied listed/plain").contains('+'));
    mount.unmount();
    assert_image_clean(image.path(), "lists of setfacl");
}

/// The story: `stat` showed the time from before `chattr` until the kernel forgot the file, since
/// the kernel keeps attributes and no call of its own drops them after this one.
#[test]
fn chattr_changes_the_time_that_stat_shows() {
    let image = image(16, &["-I", "256"]);
    let Some(mount) = Mounted::new(image.path()) else { return };
    let at = mount.path();
    allowed(0, &[0], &at, "echo x > file; mkdir directory");
    for name in ["file", "directory"] {
        let shown = || fs::metadata(at.join(name)).unwrap();
        let inode = InodeNumber(shown().ino());
        allowed(0, &[0], &at, &format!("chattr +d {name}"));
        let kept = mount.runtime.block_on(mount.tfs.getattr(inode, None)).unwrap().attr.ctime;
        let shown = (shown().ctime(), shown().ctime_nsec());
        assert_eq!(shown, (kept.secs, i64::from(kept.nanos)), "{name}");
    }
    mount.unmount();
}

/// The story: everybody saw the names of attributes that only root may read.
#[test]
fn names_of_trusted_attributes_are_for_root() {
    let image = image(16, &[]);
    let Some(mount) = Mounted::new(image.path()) else { return };
    let at = mount.path();
    allowed(0, &[0], &at, "echo x > file; chmod 644 file");
    allowed(0, &[0], &at, "setfattr -n trusted.x -v 1 file; setfattr -n user.x -v 1 file");
    let listed = |user: u32| {
        let text = allowed(user, &[user], &at, "getfattr -m - file");
        let names = text.lines().filter(|line| line.contains('.'));
        names.map(str::to_owned).collect::<BTreeSet<_>>()
    };
    assert_eq!(listed(0), BTreeSet::from(["trusted.x", "user.x"].map(str::to_owned)));
    assert_eq!(listed(1000), BTreeSet::from(["user.x".to_owned()]));
    mount.unmount();
}

/// The story: `chattr +i` and `+a` were forgotten: `rm`, `mv`, `chmod` and writing went on.
#[test]
fn chattr_binds_and_lsattr_shows_it() {
    let image = image(16, &[]);
    let Some(mount) = Mounted::new(image.path()) else { return };
    let at = mount.path();
    let root = |command: &str| allowed(0, &[0], &at, command);
    let no = |command: &str| refused(0, &[0], &at, command, NOT_PERMITTED);
    root("echo kept > i; echo kept > a; mkdir di da; touch di/f da/f; chmod 666 i a");
    root("chattr +dAS i && chattr +i i di && chattr +a a da");
    let shown = root("lsattr -d i a di da");
    let flags: Vec<&str> = shown.lines().map(|line| line.split(' ').next().unwrap()).collect();
    let letters = |flags: &str| flags.replace('-', "");
    assert_eq!(flags.iter().map(|f| letters(f)).collect::<Vec<_>>(), ["SidA", "a", "i", "a"]);
    for command in [
        "rm -f i",
        "mv i j",
        "ln i j",
        "chmod 600 i",
        "chown 1 i",
        "touch -d 2000-01-01 i",
        "touch i",
        "truncate -s 0 i",
        "echo x >> i",
        "setfattr -n user.x -v 1 i",
        "touch di/new",
        "rm -f di/f",
        "mkdir di/d",
        "mv di/f g",
        "rmdir di",
        "rm -f a",
        "mv a b",
        "ln a b",
        "chmod 600 a",
        "truncate -s 0 a",
        "echo x > a",
        "touch -d 2000-01-01 a",
        "rm -f da/f",
        "mv da/f g",
        "mv a di",
    ] {
        no(command);
    }
    root("cat i && echo more >> a && touch a && touch da/new && echo x > di/f");
    assert_eq!(root("cat i a"), "kept\nkept\nmore\n");
    refused(1000, &[1000], &at, "chattr -i i", NOT_PERMITTED);
    refused(1000, &[1000], &at, "echo x >> i", NOT_PERMITTED);
    allowed(1000, &[1000], &at, "echo theirs >> a");
    root("touch own && chown 1000 own");
    allowed(1000, &[1000], &at, "chattr +d own");
    refused(1000, &[1000], &at, "chattr +i own", NOT_PERMITTED);
    refused(1001, &[1001], &at, "chattr -d own", NOT_PERMITTED);
    mount.unmount();
    assert_image_clean(image.path(), "flags");

    // They are kept, and the kernel knows them.
    if let Some(driver) = drivers().first() {
        let kernel = KernelMount::new(image.path(), driver, "rw");
        refused(0, &[0], &kernel.path(), "rm -f i", NOT_PERMITTED);
        allowed(0, &[0], &kernel.path(), "chattr -i i && chattr +i own");
        kernel.unmount();
    }
    let Some(mount) = Mounted::new(image.path()) else { return };
    let at = mount.path();
    refused(0, &[0], &at, "rm -f own", NOT_PERMITTED);
    allowed(0, &[0], &at, "rm -f i && chattr -i own di && chattr -a a da && rm -rf own di a da");
    mount.unmount();
    assert_image_clean(image.path(), "flags that are gone");
}

/// See `settings_of_tfs_are_their_owners`, and `the_reserve_is_for_those_who_write…`: here it is
/// the kernel that says who calls.
#[test]
fn the_kernel_says_who_writes_and_who_sets() {
    let image = image(8, &["-b", "1024", "-m", "20"]);
    let Some(mount) = Mounted::new(image.path()) else { return };
    let at = mount.path();
    allowed(
        0,
        &[0],
        &at,
        "chmod 755 .; touch of-root of-user; chmod 666 of-root of-user; mkdir -m 777 common",
    );
    allowed(0, &[0], &at, "chown 1000 of-user");
    refused(1000, &[1000], &at, "cat /dev/zero >> of-user", "No space left");
    refused(1000, &[1000], &at, "head -c 100000 /dev/zero >> of-root", "No space left");
    allowed(0, &[0], &at, "head -c 100000 /dev/zero >> of-user");
    refused(1000, &[1000], &at, "fallocate -o 0 -l 5000000 of-root", "No space left");
    if Command::new("setfattr").arg("--version").output().is_ok() {
        let set = |name: &str, on: &str| format!("setfattr -n user.tfs.{name} -v 1 {on}");
        refused(1000, &[1000], &at, &set("transparent", "common"), NOT_PERMITTED);
        allowed(0, &[0], &at, "chmod 777 .");
        refused(1000, &[1000], &at, &set("clean", "."), NOT_PERMITTED);
        refused(1000, &[1000], &at, &set("target_loss", "."), NOT_PERMITTED);
        allowed(0, &[0], &at, &set("clean", "."));
    } else {
        skipped("setfattr is not installed (package attr)");
    }
    mount.unmount();
    assert_image_clean(image.path(), "full");
}

/// See `a_page_of_a_mapping_is_written_where_it_lies`.
#[test]
fn a_mapping_of_a_file_opened_at_its_end_changes_it_where_it_is_mapped() {
    let image = image(8, &[]);
    let Some(mount) = Mounted::new(image.path()) else { return };
    fs::write(mount.path().join("file"), vec![b'a'; 5000]).unwrap();
    let script = "import mmap,os\n\
        f=os.open('file',os.O_RDWR|os.O_APPEND)\n\
        m=mmap.mmap(f,5000)\n\
        m[10:13]=b'xyz'\n\
        m.flush()\n\
        os.write(f,b'end')\n";
    fs::write(mount.directory.path().join("script"), script).unwrap();
    if Command::new("python3").arg("--version").output().is_err() {
        return skipped("python3 is not installed");
    }
    allowed(0, &[0], &mount.path(), "python3 script");
    let bytes = fs::read(mount.path().join("file")).unwrap();
    mount.unmount();
    assert_eq!((bytes.len(), &bytes[9..14], &bytes[4998..]), (5003, &b"axyza"[..], &b"aaend"[..]));
    let runtime = Runtime::new().unwrap();
    let _context = runtime.enter();
    let (tfs, _) = crate::kernel::mount(image.path());
    let kept = runtime.block_on(crate::calls::read(&tfs, crate::calls::ROOT, "file"));
    assert_eq!(kept.unwrap(), bytes);
    tfs.unmount().unwrap();
}

/// A command on a few names, by anybody.
fn any_command(dice: &mut Dice) -> (u32, String) {
    let names = ["a", "b", "d", "e", "d/a", "d/b", "d/f", "e/a", "e/f", "d/f/a"];
    let mut name = || *dice.pick(&names).unwrap();
    let (one, other) = (name(), name());
    let modes = ["777", "640", "g=rw", "o-rwx", "2755", "u+s,g+s", "1777", "600"];
    let lists = [
        "-m u:1000:rw",
        "-m u:1001:rwx,g:1000:r",
        "-m g:1001:-,m::rx",
        "-x u:1000",
        "-b",
        "-k",
        "-d -m u:1000:rwx,o::-",
        "-d -m u::rwx,g::rx,o::x",
        "-n -m u:1001:rw",
        "-m o::rwx",
    ];
    let flags = ["+i", "-i", "+a", "-a", "-a", "-i", "+d", "=", "+A"];
    let umask = ["022", "077", "002", "0"];
    let (mode, list) = (*dice.pick(&modes).unwrap(), *dice.pick(&lists).unwrap());
    let (flag, umask) = (*dice.pick(&flags).unwrap(), *dice.pick(&umask).unwrap());
    let command = match dice.below(18) {
        0..3 => format!("umask {umask}; mkdir {one}"),
        3..5 => format!("umask {umask}; touch {one}"),
        5 => format!("umask {umask}; mkfifo {one}"),
        6 => format!("umask {umask}; echo x >> {one}"),
        7 => format!("echo y 2>/dev/null 1<> {one}; test -f {one} && echo y > {one}"),
        8..10 => format!("chmod {mode} {one}"),
        10..12 => format!("setfacl {list} {one}"),
        12 => format!("mv -fT {one} {other}"),
        13 => format!("ln {one} {other}"),
        14 => format!("rm -rf {one}"),
        15 => format!("test -f {one} && test ! -e {other} && cp -p {one} {other}"),
        16 => "chattr -R -ia .".to_owned(),
        _ => format!("test -d {one} -o -f {one} && chattr {flag} {one}"),
    };
    // A FIFO without a writer would block its reader.
    (*dice.pick(&[0, 0, 1000, 1000, 1001]).unwrap(), format!("timeout 5 sh -c '{command}'"))
}

/// All that the tools show of the modes, owners, lists and flags below a directory.
fn shown(at: &Path) -> String {
    let command = "find . | sort | xargs getfacl -pn; \
        find . -type f -o -type d | sort | xargs lsattr -d; \
        find . -type f -exec stat -c '%n %s %h' {} + | sort";
    allowed(0, &[0], at, command)
}

/// The same commands of the same users end the same way under TFS and the kernel's own driver,
/// and leave the same modes, lists and flags.
#[test]
fn commands_end_as_under_the_kernel() {
    if !tools_are_here() {
        return;
    }
    let Some(driver) = drivers().last().copied() else { return };
    for seed in 0..2 {
        let (ours, theirs) = (image(16, &[]), image(16, &[]));
        let Some(mount) = Mounted::new(ours.path()) else { return };
        let kernel = KernelMount::new(theirs.path(), driver, "acl,user_xattr");
        let parent = kernel.path();
        fs::set_permissions(&parent, fs::Permissions::from_mode(0o777)).unwrap();
        fs::set_permissions(mount.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let mut dice = Dice::new(seed);
        let mut done = 0;
        for step in 0..150 {
            let (user, command) = any_command(&mut dice);
            let [a, b] =
                [mount.path(), parent.clone()].map(|at| shell(user, &[user], &at, &command));
            let story = format!("seed {seed}, step {step}: {user}: {command}");
            assert_eq!(a.0, b.0, "{story}: TFS said {}, {driver} {}", a.1, b.1);
            // Running the tools takes longer than the command.
            if step % 5 == 4 {
                assert_eq!(shown(&mount.path()), shown(&parent), "{story}");
            }
            done += u32::from(a.0);
        }
        assert!(done > 20, "{done} of 150 commands succeeded");
        mount.unmount();
        kernel.unmount();
        assert_image_clean(ours.path(), "after commands");
    }
}
