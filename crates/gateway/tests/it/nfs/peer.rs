//! Clients that others wrote: a crate by its codec, and libnfs' programs where they are installed.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write as _;
use std::process::{Command, Output};
use std::sync::Arc;

use atoll_gateway::nfs::Service;
use nfs3_client::nfs3_types::mount::{dirpath, mountstat3};
use nfs3_client::nfs3_types::nfs3::{
    self, ACCESS3args, COMMIT3args, CREATE3args, FSF3_CANSETTIME, FSF3_HOMOGENEOUS, FSF3_LINK,
    FSF3_SYMLINK, LINK3args, LOOKUP3args, MKDIR3args, MKNOD3args, Nfs3Option, Nfs3Result,
    READ3args, READDIR3args, READDIRPLUS3args, READLINK3args, REMOVE3args, RENAME3args, RMDIR3args,
    SETATTR3args, SYMLINK3args, WRITE3args, cookieverf3, createhow3, createverf3, devicedata3,
    diropargs3, fattr3, ftype3, mknoddata3, nfs_fh3, nfsstat3, nfstime3, sattr3, set_atime,
    set_mtime, specdata3, stable_how, symlinkdata3,
};
use nfs3_client::nfs3_types::rpc::{auth_unix, opaque_auth};
use nfs3_client::nfs3_types::xdr_codec::Opaque;
use nfs3_client::tokio::{TokioConnector, TokioIo};
use nfs3_client::{MountError, Nfs3Connection, Nfs3ConnectionBuilder};
use tokio::net::TcpStream;

use super::server::{Server, start};
use super::{ALICE, ROOT, memory, serve};

type Peer = Nfs3Connection<TokioIo<TcpStream>>;

async fn mount(server: &Server, path: &str, uid: u32) -> Peer {
    let port = server.address.port();
    let user = auth_unix { uid, gid: uid, gids: vec![uid, 5], ..auth_unix::default() };
    Nfs3ConnectionBuilder::new(TokioConnector, "127.0.0.1", path)
        .connect_from_privileged_port(false)
        .mount_port(port)
        .nfs3_port(port)
        .credential(opaque_auth::auth_unix(&user))
        .mount()
        .await
        .unwrap()
}

fn at<'a>(dir: &nfs_fh3, name: &'a str) -> diropargs3<'a> {
    diropargs3 { dir: dir.clone(), name: name.as_bytes().into() }
}

fn mode(mode: u32) -> sattr3 {
    sattr3 { mode: Nfs3Option::Some(mode), ..sattr3::default() }
}

/// The status of a failure.
fn refused<T, E>(result: Nfs3Result<T, E>) -> nfsstat3 {
    match result {
        Nfs3Result::Ok(_) => nfsstat3::NFS3_OK,
        Nfs3Result::Err((status, _)) => status,
    }
}

async fn attributes(peer: &mut Peer, file: &nfs_fh3) -> fattr3 {
    peer.getattr(&file.clone().into()).await.unwrap().unwrap().obj_attributes
}

async fn create(peer: &mut Peer, dir: &nfs_fh3, name: &str) -> nfs_fh3 {
    let how = createhow3::GUARDED(mode(0o640));
    let made = peer.create(&CREATE3args { where_: at(dir, name), how }).await.unwrap();
    made.unwrap().obj.unwrap()
}

async fn lookup(peer: &mut Peer, dir: &nfs_fh3, name: &str) -> Result<nfs_fh3, nfsstat3> {
    match peer.lookup(&LOOKUP3args { what: at(dir, name) }).await.unwrap() {
        Nfs3Result::Ok(found) => Ok(found.object),
        Nfs3Result::Err((status, _)) => Err(status),
    }
}

async fn write(peer: &mut Peer, file: &nfs_fh3, offset: u64, data: &[u8], stable: stable_how) {
    let count = u32::try_from(data.len()).unwrap();
    let data = Opaque::borrowed(data);
    let args = WRITE3args { file: file.clone(), offset, count, stable, data };
    let written = peer.write(&args).await.unwrap().unwrap();
    assert_eq!(written.count, count);
    assert!(written.committed as u32 >= stable as u32, "as durable as was asked for");
}

/// Of at most `count` bytes, and whether they end the file.
async fn read(peer: &mut Peer, file: &nfs_fh3, offset: u64, count: u32) -> (Vec<u8>, bool) {
    let args = READ3args { file: file.clone(), offset, count };
    let read = peer.read(&args).await.unwrap().unwrap();
    assert_eq!(read.count as usize, read.data.len());
    (read.data.into_owned(), read.eof)
}

#[tokio::test]
async fn another_client_makes_reads_and_writes_files() {
    let server = start(&serve(memory())).await;
    let mut peer = mount(&server, "/x", ROOT).await;
    let root = peer.root_nfs_fh3();
    peer.null().await.unwrap();
    assert_eq!(attributes(&mut peer, &root).await.type_, ftype3::NF3DIR);

    let file = create(&mut peer, &root, "file").await;
    write(&mut peer, &file, 0, b"some bytes", stable_how::UNSTABLE).await;
    write(&mut peer, &file, 5, b"words", stable_how::DATA_SYNC).await;
    let commit = COMMIT3args { file: file.clone(), offset: 0, count: 0 };
    let committed = peer.commit(&commit).await.unwrap().unwrap();
    assert_eq!(committed.file_wcc.after.unwrap().size, 10);
    assert_eq!(read(&mut peer, &file, 5, 100).await, (b"words".to_vec(), true));
    assert_eq!(read(&mut peer, &file, 0, 4).await, (b"some".to_vec(), false));

    let exclusive = |bytes| CREATE3args {
        where_: at(&root, "exclusive"),
        how: createhow3::EXCLUSIVE(createverf3(bytes)),
    };
    let made = peer.create(&exclusive([0xff; 8])).await.unwrap().unwrap().obj.unwrap();
    let again = peer.create(&exclusive([0xff; 8])).await.unwrap().unwrap().obj.unwrap();
    assert_eq!(again, made);
    let other = peer.create(&exclusive([0xfe; 8])).await.unwrap();
    assert_eq!(refused(other), nfsstat3::NFS3ERR_EXIST);
    let unchecked = CREATE3args {
        where_: at(&root, "file"),
        how: createhow3::UNCHECKED(sattr3 { size: Nfs3Option::Some(4), ..sattr3::default() }),
    };
    let emptied = peer.create(&unchecked).await.unwrap().unwrap();
    assert_eq!(emptied.obj.unwrap(), file, "the file that is there");
    assert_eq!(read(&mut peer, &file, 0, 100).await, (b"some".to_vec(), true));

    let time = |seconds| nfstime3 { seconds, nseconds: 123_456_789 };
    let changes = sattr3 {
        mode: Nfs3Option::Some(0o604),
        uid: Nfs3Option::Some(7),
        gid: Nfs3Option::Some(8),
        size: Nfs3Option::Some(6),
        atime: set_atime::SET_TO_CLIENT_TIME(time(5)),
        mtime: set_mtime::SET_TO_CLIENT_TIME(time(u32::MAX)),
    };
    let ctime = attributes(&mut peer, &file).await.ctime;
    let set = |seconds| SETATTR3args {
        object: file.clone(),
        new_attributes: changes.clone(),
        guard: Nfs3Option::Some(nfstime3 { seconds, ..ctime }),
    };
    let late = peer.setattr(&set(ctime.seconds ^ 1)).await.unwrap();
    assert_eq!(refused(late), nfsstat3::NFS3ERR_NOT_SYNC);
    let wcc = peer.setattr(&set(ctime.seconds)).await.unwrap().unwrap().obj_wcc;
    assert_eq!(wcc.before.unwrap().size, 4);
    let after = wcc.after.unwrap();
    assert_eq!((after.mode, after.uid, after.gid, after.size), (0o604, 7, 8, 6));
    assert_eq!((after.atime, after.mtime), (time(5), time(u32::MAX)));
    assert_eq!(read(&mut peer, &file, 0, 100).await, (b"some\0\0".to_vec(), true));

    let asked = ACCESS3args { object: file.clone(), access: 0x3f };
    let rights = nfs3::ACCESS3_READ | nfs3::ACCESS3_MODIFY | nfs3::ACCESS3_EXTEND;
    assert_eq!(peer.access(&asked).await.unwrap().unwrap().access, rights, "root");
    let mut alice = mount(&server, "/x", ALICE).await;
    let allowed = alice.access(&asked).await.unwrap().unwrap().access;
    assert_eq!(allowed, nfs3::ACCESS3_READ, "as all others");
    let made = CREATE3args { where_: at(&root, "hers"), how: createhow3::GUARDED(mode(0o644)) };
    assert_eq!(refused(alice.create(&made).await.unwrap()), nfsstat3::NFS3ERR_ACCES);
}

#[tokio::test]
async fn another_client_makes_names_of_every_kind() {
    let server = start(&serve(memory())).await;
    let mut peer = mount(&server, "/x", ROOT).await;
    let root = peer.root_nfs_fh3();
    let made = MKDIR3args { where_: at(&root, "dir"), attributes: mode(0o1770) };
    let dir = peer.mkdir(&made).await.unwrap().unwrap();
    assert_eq!(dir.obj_attributes.unwrap().mode, 0o1770);
    let dir = dir.obj.unwrap();
    assert_eq!(refused(peer.mkdir(&made).await.unwrap()), nfsstat3::NFS3ERR_EXIST);

    let target = "../no where/ütf-8".as_bytes();
    let symlink = symlinkdata3 { symlink_attributes: mode(0o777), symlink_data: target.into() };
    let made = SYMLINK3args { where_: at(&dir, "link"), symlink };
    let link = peer.symlink(&made).await.unwrap().unwrap().obj.unwrap();
    let found = peer.readlink(&READLINK3args { symlink: link.clone() }).await.unwrap().unwrap();
    assert_eq!(found.data.as_ref(), target);
    assert_eq!(found.symlink_attributes.unwrap().type_, ftype3::NF3LNK);

    let spec = || specdata3 { specdata1: 0x123, specdata2: 0x4_5678 };
    let device = || devicedata3 { dev_attributes: mode(0o600), spec: spec() };
    for (name, what, kind) in [
        ("char", mknoddata3::NF3CHR(device()), ftype3::NF3CHR),
        ("block", mknoddata3::NF3BLK(device()), ftype3::NF3BLK),
        ("socket", mknoddata3::NF3SOCK(mode(0o620)), ftype3::NF3SOCK),
        ("fifo", mknoddata3::NF3FIFO(mode(0o620)), ftype3::NF3FIFO),
    ] {
        let made = peer.mknod(&MKNOD3args { where_: at(&dir, name), what }).await.unwrap();
        let special = attributes(&mut peer, &made.unwrap().obj.unwrap()).await;
        assert_eq!(special.type_, kind);
        if matches!(kind, ftype3::NF3CHR | ftype3::NF3BLK) {
            let (major, minor) = (special.rdev.specdata1, special.rdev.specdata2);
            assert_eq!((major, minor), (0x123, 0x4_5678));
        }
    }

    let file = create(&mut peer, &dir, "file").await;
    let linked = LINK3args { file: file.clone(), link: at(&root, "other") };
    let linked = peer.link(&linked).await.unwrap().unwrap();
    assert_eq!(linked.file_attributes.unwrap().nlink, 2);
    assert_eq!(lookup(&mut peer, &root, "other").await, Ok(file.clone()));
    assert_eq!(lookup(&mut peer, &dir, "..").await, Ok(root.clone()));
    assert_eq!(lookup(&mut peer, &root, "none").await, Err(nfsstat3::NFS3ERR_NOENT));

    let renamed = RENAME3args { from: at(&root, "other"), to: at(&dir, "third") };
    let wcc = peer.rename(&renamed).await.unwrap().unwrap();
    assert!(wcc.fromdir_wcc.before.is_some() && wcc.todir_wcc.after.is_some());
    let full = peer.rmdir(&RMDIR3args { object: at(&root, "dir") }).await.unwrap();
    assert_eq!(refused(full), nfsstat3::NFS3ERR_NOTEMPTY);
    let names = ["link", "char", "block", "socket", "fifo", "file", "third"];
    let mut directory = mount(&server, "/x/dir", ROOT).await;
    assert_eq!(directory.root_nfs_fh3(), dir, "a directory below an export");
    assert_eq!(list(&mut directory, &dir).await, names.iter().map(ToString::to_string).collect());
    for name in names {
        peer.remove(&REMOVE3args { object: at(&dir, name) }).await.unwrap().unwrap();
    }
    peer.rmdir(&RMDIR3args { object: at(&root, "dir") }).await.unwrap().unwrap();
    for gone in [file, link, dir] {
        let found = peer.getattr(&gone.clone().into()).await.unwrap();
        assert_eq!(refused(found), nfsstat3::NFS3ERR_STALE);
        let mut forged = gone.data.to_vec();
        *forged.last_mut().unwrap() ^= 1;
        let forged = nfs_fh3 { data: Opaque::owned(forged) };
        let found = peer.getattr(&forged.into()).await.unwrap();
        assert_eq!(refused(found), nfsstat3::NFS3ERR_BADHANDLE);
    }
}

/// All names by READDIR, in replies of 4 KiB.
async fn list(peer: &mut Peer, dir: &nfs_fh3) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let (mut cookie, mut cookieverf) = (0, cookieverf3::default());
    loop {
        let args = READDIR3args { dir: dir.clone(), cookie, cookieverf, count: 4096 };
        let listed = peer.readdir(&args).await.unwrap().unwrap();
        cookieverf = listed.cookieverf;
        for entry in listed.reply.entries.into_inner() {
            cookie = entry.cookie;
            let name = String::from_utf8(entry.name.as_ref().to_vec()).unwrap();
            assert!(names.insert(name.clone()), "{name} is listed twice");
        }
        if listed.reply.eof {
            assert!(names.remove(".") && names.remove(".."));
            return names;
        }
    }
}

#[tokio::test]
async fn another_client_lists_three_thousand_names() {
    let server = start(&serve(memory())).await;
    let mut peer = mount(&server, "/x", ROOT).await;
    let root = peer.root_nfs_fh3();
    let mut expected = BTreeSet::new();
    for number in 0..3000 {
        let name = format!("{number:0width$}", width = 4 + number % 100);
        create(&mut peer, &root, &name).await;
        expected.insert(name);
    }
    assert_eq!(list(&mut peer, &root).await, expected);
    let mut found = BTreeSet::new();
    let (mut cookie, mut cookieverf) = (0, cookieverf3::default());
    loop {
        let (dir, dircount, maxcount) = (root.clone(), 8192, 32 << 10);
        let args = READDIRPLUS3args { dir, cookie, cookieverf, dircount, maxcount };
        let listed = peer.readdirplus(&args).await.unwrap().unwrap();
        cookieverf = listed.cookieverf;
        for entry in listed.reply.entries.into_inner() {
            cookie = entry.cookie;
            let name = String::from_utf8(entry.name.as_ref().to_vec()).unwrap();
            if name != "." && name != ".." {
                let shown = entry.name_attributes.unwrap();
                assert_eq!((shown.type_, shown.fileid), (ftype3::NF3REG, entry.fileid));
                assert!(entry.name_handle.is_some());
                assert!(found.insert(name.clone()), "{name} is listed twice");
            }
        }
        if listed.reply.eof {
            break;
        }
    }
    assert_eq!(found, expected);
}

#[tokio::test]
async fn another_client_reads_and_writes_a_mebibyte_at_a_time() {
    let server = start(&serve(memory())).await;
    let mut peer = mount(&server, "/x", ROOT).await;
    let root = peer.root_nfs_fh3();
    let file = create(&mut peer, &root, "big").await;
    let info = peer.fsinfo(&root.clone().into()).await.unwrap().unwrap();
    assert_eq!(info.properties, FSF3_LINK | FSF3_SYMLINK | FSF3_HOMOGENEOUS | FSF3_CANSETTIME);
    assert!(info.rtmax >= 1 << 20 && info.wtmax >= 1 << 20);
    let bytes: Vec<u8> = (0..5_000_003u32).map(|at| (at % 251) as u8).collect();
    for (index, part) in bytes.chunks(info.wtmax as usize).enumerate() {
        let offset = index as u64 * u64::from(info.wtmax);
        write(&mut peer, &file, offset, part, stable_how::UNSTABLE).await;
    }
    let commit = COMMIT3args { file: file.clone(), offset: 1, count: 1 };
    peer.commit(&commit).await.unwrap().unwrap();
    let mut found = Vec::new();
    loop {
        // More than the server gives at a time.
        let (part, is_end) = read(&mut peer, &file, found.len() as u64, 2 * info.rtmax).await;
        assert!(part.len() <= info.rtmax as usize);
        found.extend(part);
        if is_end {
            break;
        }
    }
    assert!(found == bytes);
    let stat = peer.fsstat(&root.clone().into()).await.unwrap().unwrap();
    assert!(stat.tbytes >= stat.fbytes && stat.fbytes >= stat.abytes && stat.tfiles > stat.ffiles);
    let limits = peer.pathconf(&root.into()).await.unwrap().unwrap();
    assert_eq!((limits.name_max, limits.no_trunc), (255, true));
    assert!(limits.case_preserving && !limits.case_insensitive && limits.chown_restricted);
    assert!(limits.linkmax > 1 && info.maxfilesize > bytes.len() as u64);
}

#[tokio::test]
async fn another_client_mounts_what_is_exported() {
    let server = start(&serve(memory())).await;
    let mut peer = mount(&server, "/x", ROOT).await;
    let mounts = &mut peer.mount_client;
    mounts.null().await.unwrap();
    let exports = mounts.export().await.unwrap().into_inner();
    assert_eq!(exports.iter().map(|export| &*export.ex_dir.0).collect::<Vec<_>>(), [b"/x"]);
    assert!(mounts.dump().await.unwrap().is_empty());
    for path in ["/y", "/x/none", "/xx", ""] {
        let refused = mounts.mnt(dirpath(Opaque::borrowed(path.as_bytes()))).await.unwrap_err();
        assert!(matches!(refused, MountError::Denied(mountstat3::MNT3ERR_NOENT)), "{path}");
    }
    mounts.umntall().await.unwrap();
    peer.unmount().await.unwrap();
}

/// Runs a program of libnfs, whose arguments name files of the server by `nfs:NAME`.
async fn libnfs(server: &Server, program: &str, arguments: &[&str]) -> Output {
    let port = server.address.port();
    let query = format!("?nfsport={port}&mountport={port}&version=3&uid=0&gid=0");
    let mut command = Command::new(program);
    for argument in arguments {
        match argument.strip_prefix("nfs:") {
            Some(name) => command.arg(format!("nfs://127.0.0.1/x/{name}{query}")),
            None => command.arg(argument),
        };
    }
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
    output
}

fn is_installed(program: &str) -> bool {
    std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())
        .any(|folder| folder.join(program).is_file())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn libnfs_copies_files_there_and_back() {
    let programs = ["nfs-ls", "nfs-cp", "nfs-cat"];
    if let Some(missing) = programs.iter().find(|program| !is_installed(program)) {
        // Past the capture of the test's output.
        let _ = writeln!(
            std::io::stderr(),
            "\nSKIPPED libnfs_copies_files_there_and_back: {missing} is not installed (package libnfs-utils)"
        );
        return;
    }
    let service: Arc<Service> = serve(memory());
    let server = start(&service).await;
    let folder = tempfile::tempdir().unwrap();
    let (source, copy) = (folder.path().join("source"), folder.path().join("copy"));
    let bytes: Vec<u8> = (0..3_000_001u32).map(|at| (at % 241) as u8).collect();
    fs::write(&source, &bytes).unwrap();
    let (source, copy) = (source.to_str().unwrap(), copy.to_str().unwrap());
    libnfs(&server, "nfs-cp", &[source, "nfs:there"]).await;
    let printed = libnfs(&server, "nfs-cat", &["nfs:there"]).await;
    assert!(printed.stdout == bytes, "{} bytes", printed.stdout.len());
    libnfs(&server, "nfs-cp", &["nfs:there", copy]).await;
    assert!(fs::read(copy).unwrap() == bytes);
    let listed = libnfs(&server, "nfs-ls", &["nfs:"]).await;
    let listed = String::from_utf8(listed.stdout).unwrap();
    let line = listed.lines().find(|line| line.ends_with(" there"));
    assert!(line.is_some_and(|line| line.contains("3000001")), "{listed}");
}
