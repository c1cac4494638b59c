//! `atoll nfs` as its users meet it: what is served, by whom it is used, how it ends; a client that others wrote reads and
//! writes.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use nfs3_client::nfs3_types::nfs3::{
    COMMIT3args, CREATE3args, LOOKUP3args, Nfs3Option, Nfs3Result, READ3args, READDIR3args,
    WRITE3args, cookieverf3, createhow3, diropargs3, nfs_fh3, nfsstat3, sattr3, stable_how,
};
use nfs3_client::nfs3_types::rpc::{auth_unix, opaque_auth};
use nfs3_client::nfs3_types::xdr_codec::Opaque;
use nfs3_client::tokio::{TokioConnector, TokioIo};
use nfs3_client::{Nfs3Connection, Nfs3ConnectionBuilder};
use tokio::net::TcpStream;

use crate::processes::{Ring, atoll, run, signal, until};

/// A server in the foreground, until the test ends.
pub(crate) struct Served {
    process: Child,
    port: u16,
    dir: PathBuf,
}

impl Served {
    /// Runs `atoll nfs` from a node's directory.
    pub(crate) fn start(dir: &Path, arguments: &[&str]) -> Served {
        let mut command =
            in_dir(dir, &["nfs", "--foreground", "--any-port", "--listen", "127.0.0.1:0"]);
        let process = command.args(arguments).spawn().expect("runs");
        let mut served = Served { process, port: 0, dir: dir.to_owned() };
        until("it is served", || {
            let ended = served.process.try_wait().expect("a child");
            assert!(ended.is_none(), "{arguments:?} ended: {ended:?}");
            let told = run(&mut in_dir(dir, &["nfs", "--json"])).ok().json();
            let servers = told.as_array().expect("a list").iter();
            let own = servers.filter(|server| server["pid"] == served.process.id());
            let port = |server: &serde_json::Value| {
                server["listen"].as_str()?.rsplit_once(':')?.1.parse().ok()
            };
            served.port = own.filter_map(port).next().unwrap_or(0);
            served.port != 0 && std::net::TcpStream::connect(("127.0.0.1", served.port)).is_ok()
        });
        served
    }

    fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Ends it at once, as a crash does.
    pub(crate) fn kill(mut self) {
        self.process.kill().expect("it runs");
        self.process.wait().expect("it ends");
    }

    /// Ends it as users do.
    pub(crate) fn stop(mut self) {
        run(&mut in_dir(&self.dir, &["nfs", "--stop", "--listen", &self.address()])).ok();
        assert_eq!(self.process.wait().expect("it ends").code(), Some(0));
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

pub(crate) fn in_dir(dir: &Path, arguments: &[&str]) -> Command {
    let mut command = atoll();
    command.env("ATOLL_DIR", dir).args(arguments);
    command
}

/// A client machine's root.
pub(crate) struct Client(Nfs3Connection<TokioIo<TcpStream>>);

impl Client {
    pub(crate) async fn mount(served: &Served, path: &str) -> Client {
        let user = auth_unix { uid: 0, gid: 0, ..auth_unix::default() };
        // A volume may still be being opened.
        for attempt in 0.. {
            let mounted = Nfs3ConnectionBuilder::new(TokioConnector, "127.0.0.1", path)
                .connect_from_privileged_port(false)
                .mount_port(served.port)
                .nfs3_port(served.port)
                .credential(opaque_auth::auth_unix(&user))
                .mount()
                .await;
            match mounted {
                Ok(connection) => return Client(connection),
                Err(error) => assert!(attempt < 2400, "{path}: {error:?}"),
            }
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
        unreachable!("it returns or fails")
    }

    pub(crate) fn root(&self) -> nfs_fh3 {
        self.0.root_nfs_fh3()
    }

    pub(crate) async fn lookup(&mut self, dir: &nfs_fh3, name: &str) -> Result<nfs_fh3, nfsstat3> {
        let what = diropargs3 { dir: dir.clone(), name: name.as_bytes().into() };
        match self.0.lookup(&LOOKUP3args { what }).await.expect("a reply") {
            Nfs3Result::Ok(found) => Ok(found.object),
            Nfs3Result::Err((status, _)) => Err(status),
        }
    }

    /// Makes a file with these bytes, and has them made durable.
    pub(crate) async fn write(&mut self, dir: &nfs_fh3, name: &str, bytes: &[u8]) -> nfs_fh3 {
        let mode = sattr3 { mode: Nfs3Option::Some(0o644), ..sattr3::default() };
        let where_ = diropargs3 { dir: dir.clone(), name: name.as_bytes().into() };
        let how = createhow3::GUARDED(mode);
        let made = self.0.create(&CREATE3args { where_, how }).await.expect("a reply");
        let file = made.unwrap().obj.unwrap();
        let write = WRITE3args {
            file: file.clone(),
            offset: 0,
            count: u32::try_from(bytes.len()).expect("small"),
            stable: stable_how::UNSTABLE,
            data: Opaque::borrowed(bytes),
        };
        let written = self.0.write(&write);
        assert_eq!(written.await.expect("a reply").unwrap().count as usize, bytes.len());
        let commit = COMMIT3args { file: file.clone(), offset: 0, count: 0 };
        self.0.commit(&commit).await.expect("a reply").unwrap();
        file
    }

    pub(crate) async fn read(&mut self, file: &nfs_fh3) -> Result<Vec<u8>, nfsstat3> {
        let args = READ3args { file: file.clone(), offset: 0, count: 1 << 20 };
        match self.0.read(&args).await.expect("a reply") {
            Nfs3Result::Ok(read) => Ok(read.data.into_owned()),
            Nfs3Result::Err((status, _)) => Err(status),
        }
    }

    pub(crate) async fn names(&mut self, dir: &nfs_fh3) -> Vec<String> {
        let (mut names, mut cookie) = (Vec::new(), 0);
        loop {
            let args = READDIR3args {
                dir: dir.clone(),
                cookie,
                cookieverf: cookieverf3([0; 8]),
                count: 500,
            };
            let part = self.0.readdir(&args).await.expect("a reply").unwrap().reply;
            for entry in part.entries.into_inner() {
                cookie = entry.cookie;
                names.push(String::from_utf8_lossy(&entry.name.0).into_owned());
            }
            if part.eof {
                names.retain(|name| name != "." && name != "..");
                names.sort();
                return names;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tfs_is_served_without_a_node_and_its_handles_last() {
    let temp = tempfile::tempdir().expect("a directory");
    // A home in which no program has kept anything yet.
    let (image, dir) = (temp.path().join("disk.img"), temp.path().join("new/share/dir"));
    run(atoll().args(["tfs", "mkfs", "--size", "64MiB"]).arg(&image)).ok();
    let image = image.to_str().expect("a text");
    let served = Served::start(&dir, &[image, "--squash", "none"]);
    let mut client = Client::mount(&served, "/disk.img").await;
    let root = client.root();
    let file = client.write(&root, "file", b"some bytes").await;
    let other = client.write(&root, "other", b"others").await;
    assert_eq!(client.names(&root).await, ["file", "lost+found", "other"]);
    let told = run(&mut in_dir(&dir, &["nfs"])).ok().stdout;
    let what = format!("/disk.img on {} is {image} (process ", served.address());
    assert!(told.contains(&what), "{told}");
    until("the client is told of", || {
        let told = run(&mut in_dir(&dir, &["nfs"])).ok().stdout;
        told.contains("  127.0.0.1 has /disk.img mounted: ")
    });
    // Not with a copy of it, which has its identity.
    let copy = temp.path().join("copy.img");
    fs::copy(image, &copy).expect("copied");
    let second = temp.path().join("second.img");
    fs::copy(image, &second).expect("copied");
    run(in_dir(&dir, &["nfs", "--foreground", "--listen", "127.0.0.1:0"]).arg(&copy).arg(&second))
        .failed(1, &["same volume or TFS as /copy.img"]);
    // It is one process' alone.
    run(in_dir(&dir, &["nfs", "--foreground", "--listen", "127.0.0.1:0"]).arg(image))
        .failed(1, &["in use", "disk.img"]);
    run(in_dir(&dir, &["nfs", "--listen", &served.address()]).arg(image))
        .failed(1, &["serves /disk.img there already", "--stop"]);
    served.stop();
    assert!(run(&mut in_dir(&dir, &["nfs"])).ok().stdout.contains("nothing is served"));
    run(&mut in_dir(&dir, &["nfs", "--stop"])).failed(4, &["nothing is served on 127.0.0.1:2049"]);
    run(atoll().args(["tfs", "check"]).arg(image)).ok();

    let served = Served::start(&dir, &[image, "--read-only", "--as", "/else"]);
    let mut client = Client::mount(&served, "/else").await;
    assert_eq!(client.read(&file).await, Ok(b"some bytes".to_vec()), "by the handle of before");
    assert_eq!(client.read(&other).await, Ok(b"others".to_vec()));
    let mode = sattr3::default();
    let where_ = diropargs3 { dir: client.root(), name: b"new".as_slice().into() };
    let how = createhow3::GUARDED(mode);
    let refused = client.0.create(&CREATE3args { where_, how }).await.expect("a reply");
    assert!(matches!(refused, Nfs3Result::Err((nfsstat3::NFS3ERR_ROFS, _))));
}

#[tokio::test(flavor = "multi_thread")]
async fn each_kind_of_volume_is_served_and_written_and_handles_last() {
    let ring = Ring::of(2);
    let node = &ring.nodes[0];
    node.atoll(["volume", "create", "work"]).ok();
    node.atoll(["id"]).ok();
    node.atoll(["volume", "create", "--shared", "team"]).ok();
    let (_, published) = ring.publish_tree();
    let short = &published["atoll:".len()..][..12];
    let served = Served::start(&node.dir, &["work", "team", &published]);
    let mut handles = Vec::new();
    for volume in ["/work", "/team"] {
        let mut client = Client::mount(&served, volume).await;
        let root = client.root();
        // Root of a client is nobody, and these volumes are somebody's.
        let where_ = diropargs3 { dir: root.clone(), name: b"new".as_slice().into() };
        let how = createhow3::GUARDED(sattr3::default());
        let create = CREATE3args { where_, how };
        let refused = client.0.create(&create);
        let refused = refused.await.expect("a reply");
        assert!(matches!(refused, Nfs3Result::Err((nfsstat3::NFS3ERR_ACCES, _))), "{volume}");
    }
    served.stop();

    let served = Served::start(&node.dir, &["work", "team", &published, "--squash", "none"]);
    for volume in ["/work", "/team"] {
        let mut client = Client::mount(&served, volume).await;
        let root = client.root();
        let file = client.write(&root, "file", volume.as_bytes()).await;
        let gone = client.write(&root, "gone", b"x").await;
        let where_ = diropargs3 { dir: root.clone(), name: b"gone".as_slice().into() };
        let removed = nfs3_client::nfs3_types::nfs3::REMOVE3args { object: where_ };
        client.0.remove(&removed).await.expect("a reply").unwrap();
        assert_eq!(client.names(&root).await, ["file"], "{volume}");
        handles.push((volume, file, gone));
    }
    let path = format!("/{short}");
    let mut client = Client::mount(&served, &path).await;
    let root = client.root();
    let docs = client.lookup(&root, "docs").await.expect("it is there");
    assert_eq!(client.names(&docs).await.len(), 43);
    let seven = client.lookup(&docs, "file07.txt").await.expect("it is there");
    assert_eq!(client.read(&seven).await, Ok(b"this is file 7\n".to_vec()));
    let told = node.atoll(["status"]).ok().stdout;
    assert!(told.contains("/work on 127.0.0.1:") && told.contains("/team on 127.0.0.1:"), "{told}");
    // What a volume says of itself, where a mount would say it.
    until("each volume says how it is", || {
        let told = node.atoll(["nfs", "--json"]).ok().json();
        let exports = told[0]["exports"].as_array().expect("a list");
        exports.iter().all(|export| export["status"].is_string())
    });
    served.stop();

    let served = Served::start(&node.dir, &["work", "team", &published]);
    for (volume, file, gone) in handles {
        let mut client = Client::mount(&served, volume).await;
        assert_eq!(client.read(&file).await, Ok(volume.as_bytes().to_vec()), "{volume}");
        assert_eq!(client.read(&gone).await, Err(nfsstat3::NFS3ERR_STALE), "{volume}");
    }
    let mut client = Client::mount(&served, &path).await;
    assert_eq!(client.read(&seven).await, Ok(b"this is file 7\n".to_vec()));
    // A client that is killed leaves nothing, and neither does a server.
    signal(served.process.id(), "KILL");
    until("nobody tells of it", || node.atoll(["nfs"]).ok().stdout.contains("nothing is served"));
}

#[test]
fn a_server_runs_in_the_background_until_it_is_stopped() {
    let temp = tempfile::tempdir().expect("a directory");
    let (image, dir) = (temp.path().join("disk.img"), temp.path().join("dir"));
    run(atoll().args(["tfs", "mkfs", "--size", "64MiB"]).arg(&image)).ok();
    let image = image.to_str().expect("a text");
    // A port that is free now; another program may take it, and then the next one is tried.
    let mut listen = String::new();
    until("a port is free", || {
        let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        listen = free.local_addr().expect("bound").to_string();
        drop(free);
        let said = run(in_dir(&dir, &["nfs", "--listen", &listen]).arg(image));
        let mounts = said.stderr.contains(&format!("/disk.img is served on {listen}"))
            && said.stderr.contains(",nolock 127.0.0.1:/disk.img MNT");
        assert!(said.code != Some(0) || mounts, "{said:?}");
        said.code == Some(0)
    });
    let told = run(&mut in_dir(&dir, &["nfs"])).ok().stdout;
    assert!(told.contains(&format!("/disk.img on {listen}")), "{told}");
    run(&mut in_dir(&dir, &["nfs", "--stop", "--listen", "127.0.0.1:1"]))
        .failed(4, &["nothing is served on 127.0.0.1:1", &listen]);
    run(&mut in_dir(&dir, &["nfs", "--stop", "--listen", &listen])).ok();
    run(atoll().args(["tfs", "check"]).arg(image)).ok();
}

/// In a network of its own, where ports 111 and 2049 are free.
#[test]
fn clients_that_are_given_no_port_ask_the_port_mapper() {
    let has = |program: &str| {
        Command::new("sh")
            .args(["-c", &format!("command -v {program}")])
            .output()
            .is_ok_and(|found| found.status.success())
    };
    let own_network = Command::new("unshare").args(["--net", "true"]).output();
    if !["ip", "nfs-ls", "setpriv"].iter().all(|program| has(program))
        || !own_network.is_ok_and(|made| made.status.success())
    {
        let _ = writeln!(
            std::io::stderr(),
            "\nSKIPPED clients_that_are_given_no_port_ask_the_port_mapper: it needs root, iproute2 and libnfs-utils"
        );
        return;
    }
    let temp = tempfile::tempdir().expect("a directory");
    let image = temp.path().join("disk.img");
    run(atoll().args(["tfs", "mkfs", "--size", "64MiB"]).arg(&image)).ok();
    let script = r#"
        ip link set lo up
        "$ATOLL" nfs "$IMAGE" --port-mapper --squash none --foreground &
        server=$!
        until nfs-ls nfs://127.0.0.1/disk.img; do kill -0 $server || exit 3; sleep 0.2; done
        # A user's programs have no port below 1024.
        ! setpriv --reuid 65534 --clear-groups nfs-ls nfs://127.0.0.1/disk.img || exit 4
        kill $server
        wait $server
    "#;
    let mut command = Command::new("unshare");
    command.args(["--net", "sh", "-c", script]).env("ATOLL", env!("CARGO_BIN_EXE_atoll"));
    command.env("IMAGE", &image).env("ATOLL_DIR", temp.path().join("dir"));
    let said = run(&mut command).ok();
    assert!(said.stdout.contains("lost+found"), "{said:?}");
    assert!(said.stderr.contains("Permission denied"), "{said:?}");
}

#[test]
fn what_makes_no_sense_is_refused() {
    let temp = tempfile::tempdir().expect("a directory");
    fs::write(temp.path().join("disk.img"), b"no file system").expect("written");
    let refused = |arguments: &[&str], code: i32, words: &[&str]| {
        let mut command = in_dir(&temp.path().join("dir"), &["nfs"]);
        run(command.current_dir(temp.path()).args(arguments)).failed(code, words);
    };
    refused(&["work"], 3, &["no node runs"]);
    refused(&["./disk.img", "--listen", "127.0.0.1:0"], 2, &["--foreground"]);
    let free = ["--listen", "127.0.0.1:0", "--foreground"];
    refused(&[&["./disk.img"], &free[..]].concat(), 1, &["disk.img"]);
    refused(&[&["./none.img"], &free[..]].concat(), 4, &["none.img"]);
    refused(&["./a", "./b/a"], 2, &["two would be mounted as /a"]);
    refused(&["./a", "./b", "--as", "/x"], 2, &["--as"]);
    refused(&["./a", "--as", "x"], 2, &["no path"]);
    refused(&["./a", "--listen", "0.0.0.0:2049"], 2, &["none of them is allowed", "--allow"]);
    refused(&["./a", "--allow", "192.0.2.0/24"], 2, &["loopback", "--listen"]);
    refused(&["./a", "--sync"], 2, &["it is a TFS"]);
    refused(&["./a", "--allow", "host"], 2, &["192.0.2.0/24"]);
    refused(&["./a", "--stop"], 2, &["--stop"]);
    refused(&["--install", "/srv/x"], 2, &["WHAT"]);
    refused(&["atoll:nonsense"], 2, &["not the address of a volume"]);
}

#[test]
fn a_line_of_fstab_is_installed() {
    let temp = tempfile::tempdir().expect("a directory");
    let table = temp.path().join("fstab");
    fs::write(&table, "proc /proc proc defaults 0 0\n").expect("written");
    let mut install =
        in_dir(&temp.path().join("dir"), &["nfs", "work", "--install", "/srv/my work"]);
    let said = run(install.arg("--fstab").arg(&table)).ok();
    let line = "127.0.0.1:/work /srv/my\\040work nfs vers=3,proto=tcp,mountproto=tcp,port=2049,\
                mountport=2049,nolock,_netdev,nofail,x-systemd.automount 0 0";
    assert!(said.stderr.contains(line), "{said:?}");
    let installed = fs::read_to_string(&table).expect("there");
    assert_eq!(installed, format!("proc /proc proc defaults 0 0\n{line}\n"));
    run(in_dir(&temp.path().join("dir"), &["nfs", "team", "--install", "/srv/my work"])
        .arg("--fstab")
        .arg(&table))
    .failed(1, &["another line is for /srv/my work"]);
    let mut other = in_dir(&temp.path().join("dir"), &["nfs", "work", "--install", "/proc"]);
    run(other.arg("--fstab").arg(&table)).failed(1, &["another line is for /proc"]);
}
