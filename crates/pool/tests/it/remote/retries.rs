//! A call whose reply is lost, and whose server is started again before the client makes it again: it is answered as done, and not
//! done a second time, whatever others have made of its files meanwhile.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_env::{BoxFuture, Notify};
use atoll_net::{CallError, Refusal, Reply, Request};
use atoll_pool::disk::simulated::SimulatedDisk;
use atoll_pool::remote::{METHODS, PeerRoute, RemoteFs, Route};
use atoll_pool::{CallOrigin, ClientKey, PoolFs, PoolSettings, RemembersCalls, create};
use atoll_sim::HostConfig;
use atoll_vfs::{
    Attr, Errno, FileKind, FileSystem, Handle, InodeNumber, OpenFlags, RenameFlags, Writer,
    XattrFlags,
};
use bytes::Bytes;

use super::{Behind, ROOT, Recorder, World, file, me, read_all};

const CALL: u16 = *METHODS.start() + 3;
const EXCHANGE: RenameFlags = RenameFlags { no_replace: false, exchange: true };
const CREATE: XattrFlags = XattrFlags { create: true, replace: false };
const REPLACE: XattrFlags = XattrFlags { create: false, replace: true };
const NO_FLAGS: XattrFlags = XattrFlags { create: false, replace: false };

/// Loses the reply of one call.
struct LosingRoute {
    inner: PeerRoute,
    /// So many calls go through before it; none is lost if it is 0.
    lose: AtomicUsize,
    /// The reply was on its way.
    is_lost: Arc<Notify>,
    /// The server is another one by now.
    is_restarted: Arc<Notify>,
}

impl LosingRoute {
    fn new(world: &World) -> Arc<LosingRoute> {
        Arc::new(LosingRoute {
            inner: world.route(),
            lose: AtomicUsize::new(0),
            is_lost: Arc::default(),
            is_restarted: Arc::default(),
        })
    }
}

impl Route for LosingRoute {
    fn call(
        &self,
        request: Request,
        limit: Duration,
    ) -> BoxFuture<'static, Result<Reply, CallError>> {
        let is_it = request.method == CALL
            && self.lose.load(Ordering::SeqCst) > 0
            && self.lose.fetch_sub(1, Ordering::SeqCst) == 1;
        let answer = self.inner.call(request, limit);
        let (is_lost, is_restarted) = (self.is_lost.clone(), self.is_restarted.clone());
        Box::pin(async move {
            let reply = answer.await;
            if !is_it {
                return reply;
            }
            reply.expect("the server has answered");
            is_lost.notify();
            is_restarted.notified().await;
            Err(CallError::Unreachable("the reply is lost".to_owned()))
        })
    }
}

/// What happens between the two attempts, beside a restart.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Between {
    /// The process is killed.
    Kill,
    /// The machine loses power.
    Power,
    /// The journal is begun anew, the process is killed, and the next one, too.
    CheckpointAndTwoKills,
}

const ALL_BETWEEN: [Between; 3] = [Between::Kill, Between::Power, Between::CheckpointAndTwoKills];

/// Which call. Each works on names of its own in the root.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Kind {
    Mknod,
    MkdirDistributed,
    Mkdir,
    Symlink,
    Link,
    Unlink,
    Rmdir,
    Rename,
    RenameOver,
    RenameExchange,
    Create,
    CreateExclusive,
    SetXattr,
    ReplaceXattr,
    RemoveXattr,
}

const ALL_KINDS: [Kind; 15] = [
    Kind::Mknod,
    Kind::MkdirDistributed,
    Kind::Mkdir,
    Kind::Symlink,
    Kind::Link,
    Kind::Unlink,
    Kind::Rmdir,
    Kind::Rename,
    Kind::RenameOver,
    Kind::RenameExchange,
    Kind::Create,
    Kind::CreateExclusive,
    Kind::SetXattr,
    Kind::ReplaceXattr,
    Kind::RemoveXattr,
];

/// A client, and somebody else beside it.
struct Scene {
    world: World,
    fs: Arc<RemoteFs>,
    route: Arc<LosingRoute>,
    /// A directory below one that lies in a slot.
    dir: InodeNumber,
}

impl Scene {
    async fn new(world: &World) -> Scene {
        world.start(None).await;
        let route = LosingRoute::new(world);
        let fs = world.mount_over(route.clone()).await;
        let dir = fs.mkdir(me(), ROOT, b"dir", 0o755).await.unwrap().attr.inode;
        for name in ["one", "two"] {
            let (inode, handle) = file(&*fs, name).await;
            fs.setxattr(me(), inode, b"user.old", Bytes::from_static(b"1"), NO_FLAGS)
                .await
                .unwrap();
            fs.close(inode, handle).await.unwrap();
        }
        fs.mkdir(me(), dir, b"empty", 0o755).await.unwrap();
        fs.sync().await.unwrap();
        Scene { world: world.clone(), fs, route, dir }
    }

    /// Makes a call whose reply is lost, does something else, and has the server started again before the client makes it again.
    async fn lose_reply<T>(
        &self,
        between: Between,
        call: impl Future<Output = T>,
        meanwhile: impl Future<Output = ()>,
    ) -> T {
        self.route.lose.store(1, Ordering::SeqCst);
        let restart = async {
            self.route.is_lost.notified().await;
            meanwhile.await;
            match between {
                Between::Kill => self.world.restart(None, Duration::from_secs(1)).await,
                Between::Power => self.world.restart(Some(5), Duration::from_secs(1)).await,
                Between::CheckpointAndTwoKills => {
                    self.world.served().fs.sync().await.unwrap();
                    self.world.restart(None, Duration::from_secs(1)).await;
                    self.world.restart(None, Duration::from_secs(1)).await;
                }
            }
            self.route.is_restarted.notify();
        };
        futures_util::future::join(call, restart).await.0
    }

    /// The inode under a name, as somebody else sees it.
    async fn inode(&self, parent: InodeNumber, name: &str) -> Option<InodeNumber> {
        let fs = self.world.served().fs;
        match fs.lookup(me(), parent, name.as_bytes()).await {
            Ok(entry) => {
                fs.forget(entry.attr.inode, 1);
                Some(entry.attr.inode)
            }
            Err(Errno::ENOENT) => None,
            Err(errno) => panic!("lookup {name}: {errno}"),
        }
    }

    async fn there(&self, parent: InodeNumber, name: &str) -> InodeNumber {
        self.inode(parent, name).await.unwrap_or_else(|| panic!("{name} is not there"))
    }

    /// Somebody else makes a durable change.
    async fn rename(&self, from: &str, to: &str, flags: RenameFlags) {
        let fs = self.world.served().fs;
        fs.rename(me(), ROOT, from.as_bytes(), ROOT, to.as_bytes(), flags).await.unwrap();
        fs.persist(&[]).await.unwrap();
    }

    async fn make(&self, parent: InodeNumber, name: &str, kind: FileKind) -> InodeNumber {
        let fs = self.world.served().fs;
        let made = match kind {
            FileKind::Directory => fs.mkdir(me(), parent, name.as_bytes(), 0o755).await,
            kind => fs.mknod(me(), parent, name.as_bytes(), kind, 0o644, 0).await,
        };
        fs.persist(&[]).await.unwrap();
        made.unwrap().attr.inode
    }

    async fn set(&self, inode: InodeNumber, name: &[u8], value: &'static [u8]) {
        let fs = self.world.served().fs;
        fs.setxattr(me(), inode, name, Bytes::from_static(value), NO_FLAGS).await.unwrap();
        fs.persist(&[]).await.unwrap();
    }

    async fn attribute(&self, inode: InodeNumber, name: &[u8]) -> Result<Bytes, Errno> {
        self.world.served().fs.getxattr(inode, name).await
    }

    /// Makes a file whose name is `new` under `parent`; somebody else gives it the name `moved` meanwhile. That it was made once.
    async fn check_made(
        &self,
        (parent, between): (InodeNumber, Between),
        make: impl Future<Output = Result<Attr, Errno>>,
        kind: FileKind,
    ) -> InodeNumber {
        let meanwhile = async {
            let fs = self.world.served().fs;
            let to = RenameFlags::default();
            fs.rename(me(), parent, b"new", parent, b"moved", to).await.unwrap();
            fs.persist(&[]).await.unwrap();
        };
        let made = self.lose_reply(between, make, meanwhile).await.unwrap();
        assert_eq!(made.kind, kind);
        assert_eq!(self.inode(parent, "new").await, None, "it was made twice");
        assert_eq!(self.there(parent, "moved").await, made.inode);
        let now = self.fs.getattr(made.inode, None).await.unwrap().attr;
        assert_eq!((now.mode, now.uid), (made.mode, made.uid));
        made.inode
    }

    async fn check(&self, kind: Kind, between: Between) {
        let (fs, dir) = (&self.fs, self.dir);
        let (one, two) = (self.there(ROOT, "one").await, self.there(ROOT, "two").await);
        let none = RenameFlags::default();
        match kind {
            Kind::Mknod => {
                let made = async {
                    let kind = FileKind::Regular;
                    Ok(fs.mknod(me(), ROOT, b"new", kind, 0o640, 0).await?.attr)
                };
                self.check_made((ROOT, between), made, FileKind::Regular).await;
            }
            Kind::MkdirDistributed | Kind::Mkdir => {
                let parent = if kind == Kind::Mkdir { dir } else { ROOT };
                let made = async { Ok(fs.mkdir(me(), parent, b"new", 0o750).await?.attr) };
                self.check_made((parent, between), made, FileKind::Directory).await;
            }
            Kind::Symlink => {
                let made = async { Ok(fs.symlink(me(), dir, b"new", b"target").await?.attr) };
                let made = self.check_made((dir, between), made, FileKind::Symlink).await;
                assert_eq!(fs.readlink(made).await, Ok(Bytes::from_static(b"target")));
            }
            Kind::Link => {
                let made = async { Ok(fs.link(me(), one, dir, b"new").await?.attr) };
                let made = self.check_made((dir, between), made, FileKind::Regular).await;
                assert_eq!(made, one);
                assert_eq!(fs.getattr(one, None).await.unwrap().attr.nlink, 2);
            }
            Kind::Unlink => {
                let again = async {
                    let _ = self.make(ROOT, "one", FileKind::Regular).await;
                };
                let unlinked = self.lose_reply(between, fs.unlink(me(), ROOT, b"one"), again).await;
                assert_eq!(unlinked, Ok(()));
                assert_ne!(self.there(ROOT, "one").await, one);
            }
            Kind::Rmdir => {
                let empty = self.there(dir, "empty").await;
                let again = async {
                    let _ = self.make(dir, "empty", FileKind::Directory).await;
                };
                let removed = self.lose_reply(between, fs.rmdir(me(), dir, b"empty"), again).await;
                assert_eq!(removed, Ok(()));
                assert_ne!(self.there(dir, "empty").await, empty);
            }
            Kind::Rename => {
                let renamed = fs.rename(me(), ROOT, b"one", dir, b"new", none);
                let again = async {
                    let _ = self.make(ROOT, "one", FileKind::Regular).await;
                };
                assert_eq!(self.lose_reply(between, renamed, again).await, Ok(()));
                assert_ne!(self.there(ROOT, "one").await, one);
                assert_eq!(self.there(dir, "new").await, one);
            }
            Kind::RenameOver => {
                let renamed = fs.rename(me(), ROOT, b"one", ROOT, b"two", none);
                let again = async {
                    let _ = self.make(ROOT, "one", FileKind::Regular).await;
                };
                assert_eq!(self.lose_reply(between, renamed, again).await, Ok(()));
                assert_ne!(self.there(ROOT, "one").await, one);
                assert_eq!(self.there(ROOT, "two").await, one);
            }
            Kind::RenameExchange => {
                let renamed = fs.rename(me(), ROOT, b"one", ROOT, b"two", EXCHANGE);
                let back = self.rename("one", "third", none);
                assert_eq!(self.lose_reply(between, renamed, back).await, Ok(()));
                assert_eq!(self.there(ROOT, "two").await, one);
                assert_eq!(self.there(ROOT, "third").await, two);
            }
            Kind::Create | Kind::CreateExclusive => {
                let flags = match kind {
                    Kind::Create => OpenFlags::READ_WRITE,
                    _ => OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::EXCLUSIVE),
                };
                let opened = Mutex::new(None);
                let made = async {
                    let (entry, is_open) = fs.create(me(), ROOT, b"new", 0o640, flags).await?;
                    *opened.lock().unwrap() = Some(is_open.handle);
                    Ok(entry.attr)
                };
                let made = self.check_made((ROOT, between), made, FileKind::Regular).await;
                let handle = opened.into_inner().unwrap().unwrap();
                let text = Bytes::from_static(b"text");
                let written = fs.write(Writer::At(me()), made, handle, 0, text.clone()).await;
                assert_eq!(written, Ok(4));
                assert_eq!(fs.read(made, handle, 0, 10).await, Ok(text));
            }
            Kind::SetXattr | Kind::ReplaceXattr => {
                let (name, flags): (&[u8], _) = match kind {
                    Kind::SetXattr => (b"user.new", CREATE),
                    _ => (b"user.old", REPLACE),
                };
                let set = fs.setxattr(me(), one, name, Bytes::from_static(b"2"), flags);
                assert_eq!(self.lose_reply(between, set, self.set(one, name, b"3")).await, Ok(()));
                assert_eq!(self.attribute(one, name).await, Ok(Bytes::from_static(b"3")));
            }
            Kind::RemoveXattr => {
                let removed = fs.removexattr(me(), one, b"user.old");
                let again = self.set(one, b"user.old", b"3");
                assert_eq!(self.lose_reply(between, removed, again).await, Ok(()));
                let now = self.attribute(one, b"user.old").await;
                assert_eq!(now, Ok(Bytes::from_static(b"3")));
            }
        }
    }
}

#[test]
fn a_call_whose_reply_is_lost_in_a_restart_is_done_once() {
    for (at, kind) in ALL_KINDS.into_iter().enumerate() {
        for between in ALL_BETWEEN {
            let world = World::new(at as u64, Behind::Pool(1));
            world.block_on(async {
                let scene = Scene::new(&world).await;
                scene.check(kind, between).await;
                // And the next call of the client is another one.
                assert!(scene.fs.mkdir(me(), ROOT, b"next", 0o755).await.is_ok(), "{kind:?}");
            });
        }
    }
}

/// The first attempt was refused: nothing was done, and the second one is judged by what is there then.
#[test]
fn a_call_that_was_refused_is_made_anew_after_a_restart() {
    let world = World::new(1, Behind::Pool(1));
    world.block_on(async {
        let scene = Scene::new(&world).await;
        let fs = &scene.fs;
        let away = scene.rename("one", "away", RenameFlags::default());
        let made = fs.mkdir(me(), ROOT, b"one", 0o755);
        let made = scene.lose_reply(Between::Kill, made, away).await.unwrap().attr;
        assert_eq!(scene.there(ROOT, "one").await, made.inode);
        assert_eq!(made.kind, FileKind::Directory);
    });
}

/// The disk has refused it, so the change was withdrawn; the reply that says so is lost.
#[test]
fn a_call_that_was_withdrawn_is_made_anew_after_a_restart() {
    for between in ALL_BETWEEN {
        let world = World::new(1, Behind::Pool(1));
        world.block_on(async {
            let scene = Scene::new(&world).await;
            let call = atoll_pool::disk::simulated::DiskCall::Make;
            world.served().disk.fail_next(call, Errno::EDQUOT);
            let made = scene.fs.mkdir(me(), scene.dir, b"new", 0o755);
            let meanwhile = async { assert_eq!(scene.inode(scene.dir, "new").await, None) };
            let made = scene.lose_reply(between, made, meanwhile).await.unwrap().attr;
            assert_eq!(scene.there(scene.dir, "new").await, made.inode);
        });
    }
}

#[test]
fn what_was_made_and_is_gone_was_made_all_the_same() {
    for between in ALL_BETWEEN {
        let world = World::new(1, Behind::Pool(1));
        world.block_on(async {
            let scene = Scene::new(&world).await;
            let fs = &scene.fs;
            let served = world.served().fs;
            let gone = async {
                served.rmdir(me(), ROOT, b"new").await.unwrap();
                served.persist(&[]).await.unwrap();
            };
            let made = scene.lose_reply(between, fs.mkdir(me(), ROOT, b"new", 0o755), gone).await;
            let made = made.unwrap().attr;
            assert_eq!((made.kind, made.nlink), (FileKind::Directory, 0));
            assert_eq!(scene.inode(ROOT, "new").await, None);
            assert_eq!(fs.getattr(made.inode, None).await.map(drop), Err(Errno::ESTALE));
            let served = world.served().fs;
            let gone = async {
                served.unlink(me(), ROOT, b"file").await.unwrap();
                served.persist(&[]).await.unwrap();
            };
            let flags = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::EXCLUSIVE);
            let created = fs.create(me(), ROOT, b"file", 0o644, flags);
            let (entry, opened) = scene.lose_reply(between, created, gone).await.unwrap();
            assert_eq!(entry.attr.nlink, 0);
            assert_eq!(scene.inode(ROOT, "file").await, None);
            // As a file that is removed while it is open.
            let inode = entry.attr.inode;
            assert_eq!(fs.read(inode, opened.handle, 0, 10).await, Err(Errno::ESTALE));
            assert_eq!(fs.close(inode, opened.handle).await, Ok(()));
        });
    }
}

/// The file, and who has it open.
async fn appending(scene: &Scene) -> (InodeNumber, Handle) {
    let (inode, handle) = file(&*scene.fs, "log").await;
    let first = Bytes::from_static(b"first\n");
    scene.fs.write(Writer::AtEnd(me()), inode, handle, 0, first).await.unwrap();
    scene.fs.fsync(inode, handle, false).await.unwrap();
    (inode, handle)
}

#[test]
fn an_append_whose_reply_is_lost_in_a_restart_is_made_once() {
    for between in ALL_BETWEEN {
        for others in ["", "longer than the second line\n", "x\n"] {
            let world = World::new(1, Behind::Pool(1));
            world.block_on(async {
                let scene = Scene::new(&world).await;
                let (inode, handle) = appending(&scene).await;
                let line = Bytes::from_static(b"second\n");
                let append = scene.fs.write(Writer::AtEnd(me()), inode, handle, 0, line);
                let other = async {
                    let fs = world.served().fs;
                    let own = fs.open(me(), inode, OpenFlags::WRITE).await.unwrap().handle;
                    if !others.is_empty() {
                        let line = Bytes::from_static(others.as_bytes());
                        fs.write(Writer::AtEnd(me()), inode, own, 0, line).await.unwrap();
                        fs.fsync(inode, own, false).await.unwrap();
                    }
                    fs.close(inode, own).await.unwrap();
                };
                assert_eq!(scene.lose_reply(between, append, other).await, Ok(7));
                let now = read_all(&*scene.fs, inode, handle).await;
                assert_eq!(String::from_utf8(now).unwrap(), format!("first\nsecond\n{others}"));
            });
        }
    }
}

#[test]
fn an_append_that_did_not_arrive_is_made_after_what_others_appended() {
    for others in ["", "a longer line\n", "x\n"] {
        let world = World::new(1, Behind::Pool(1));
        world.block_on(async {
            let scene = Scene::new(&world).await;
            let (inode, handle) = appending(&scene).await;
            // It is written, and lost with the machine's power; then somebody else appends.
            let line = Bytes::from_static(b"second\n");
            let append = scene.fs.write(Writer::AtEnd(me()), inode, handle, 0, line);
            scene.route.lose.store(1, Ordering::SeqCst);
            let restart = async {
                scene.route.is_lost.notified().await;
                // A loss that takes all of it: the disk has no more than was synced.
                let synced = async {
                    let fs = world.served().fs;
                    let size_bytes = Some(6);
                    let cut = atoll_vfs::SetAttr { size_bytes, ..Default::default() };
                    fs.setattr(me(), inode, None, cut).await.unwrap();
                };
                synced.await;
                world.restart(None, Duration::from_secs(1)).await;
                let fs = world.served().fs;
                let own = fs.open(me(), inode, OpenFlags::WRITE).await.unwrap().handle;
                let line = Bytes::from_static(others.as_bytes());
                fs.write(Writer::AtEnd(me()), inode, own, 0, line).await.unwrap();
                fs.close(inode, own).await.unwrap();
                scene.route.is_restarted.notify();
            };
            let (appended, ()) = futures_util::future::join(append, restart).await;
            assert_eq!(appended, Ok(7));
            let now = read_all(&*scene.fs, inode, handle).await;
            assert_eq!(String::from_utf8(now).unwrap(), format!("first\n{others}second\n"));
        });
    }
}

#[test]
fn clients_that_append_to_one_file_lose_no_line() {
    let world = World::new(1, Behind::Pool(1));
    world.block_on(async {
        world.start(None).await;
        let (inode, handle) = file(&*world.served().fs, "log").await;
        let clients = (0..20).map(|client| {
            let world = &world;
            async move {
                let fs = world.mount().await;
                let own = fs.open(me(), inode, OpenFlags::WRITE).await.unwrap().handle;
                for line in 0..20 {
                    let line = Bytes::from(format!("{client:04} {line:04}\n"));
                    let written = fs.write(Writer::AtEnd(me()), inode, own, 0, line).await;
                    assert_eq!(written, Ok(10));
                }
            }
        });
        futures_util::future::join_all(clients).await;
        let mut lines = super::lines(&*world.served().fs, inode).await;
        lines.sort();
        lines.dedup();
        assert_eq!(lines.len(), 400);
        world.served().fs.close(inode, handle).await.unwrap();
    });
}

/// Replaces the eight bytes of one number by those of another.
fn patched(header: &Bytes, from: &[u8], to: &[u8]) -> Bytes {
    let at = header.windows(from.len()).position(|window| window == from).expect("it is in it");
    Bytes::from([&header[..at], to, &header[at + from.len()..]].concat())
}

/// The boot in a server's answer: the first number of eight bytes.
fn boot_of(reply: &Reply) -> Vec<u8> {
    let at = reply.header.iter().position(|byte| *byte == 0x1b).expect("a long number");
    reply.header[at + 1..at + 9].to_vec()
}

/// A stranger has read all that a client has sent, and sends it to the next server.
#[test]
fn nobody_else_learns_what_became_of_a_call() {
    let world = World::new(1, Behind::Pool(1));
    let stranger = world.sim.add_host(HostConfig::default());
    world.block_on(async {
        world.start(None).await;
        let recorder = Arc::new(Recorder { inner: world.route(), sent: Mutex::default() });
        let fs = world.mount_over(recorder.clone()).await;
        let made = fs.mkdir(me(), ROOT, b"secret", 0o755).await.unwrap().attr;
        let sent = recorder.sent.lock().unwrap().clone();
        let [begin, call] = &sent[..] else { panic!("{sent:?}") };
        let limit = Duration::from_secs(9);
        let old_boot = {
            // The recorder keeps no replies: the same client may ask again.
            boot_of(&world.route().call(begin.clone(), limit).await.unwrap())
        };
        let there = world.sim.peer(world.server);
        for (who, is_client) in [(stranger, false), (world.client, true)] {
            world.restart(None, Duration::from_secs(1)).await;
            let transport = world.sim.transport(who);
            let unchanged = transport.call(there, call.clone(), limit).await;
            assert!(matches!(unchanged, Err(CallError::Refused(Refusal { code: 100, .. }))));
            let begun = transport.call(there, begin.clone(), limit).await.unwrap();
            let header = patched(&call.header, &old_boot, &boot_of(&begun));
            let reply = transport.call(there, Request { header, ..call.clone() }, limit).await;
            let reply = reply.unwrap();
            let inode = made.inode.0.to_be_bytes();
            let says_inode = reply.header.windows(8).any(|window| window == inode);
            // To a stranger it is a call of its own, which finds the name taken.
            assert_eq!(says_inode, is_client, "{:?}", reply.header);
            assert_eq!(reply.header.len() < 8, !is_client);
        }
        assert_eq!(fs.lookup(me(), ROOT, b"secret").await.unwrap().attr.inode, made.inode);
    });
}

/// A client that has said it waits for a call no more asks the next server for it.
#[test]
fn a_call_that_nobody_waits_for_is_not_made_by_the_next_server() {
    let world = World::new(1, Behind::Pool(1));
    world.block_on(async {
        world.start(None).await;
        let recorder = Arc::new(Recorder { inner: world.route(), sent: Mutex::default() });
        let fs = world.mount_over(recorder.clone()).await;
        fs.mkdir(me(), ROOT, b"first", 0o755).await.unwrap();
        fs.mkdir(me(), ROOT, b"second", 0o755).await.unwrap();
        let sent = recorder.sent.lock().unwrap().clone();
        let [begin, first, _second] = &sent[..] else { panic!("{sent:?}") };
        let limit = Duration::from_secs(9);
        let old_boot = boot_of(&world.route().call(begin.clone(), limit).await.unwrap());
        let served = world.served().fs;
        served.rmdir(me(), ROOT, b"first").await.unwrap();
        drop(served);
        world.restart(None, Duration::from_secs(1)).await;
        let begun = world.route().call(begin.clone(), limit).await.unwrap();
        let header = patched(&first.header, &old_boot, &boot_of(&begun));
        let reply = world.route().call(Request { header, ..first.clone() }, limit).await.unwrap();
        // EIO, and nothing done.
        assert_eq!(reply.header[..], [0x82, 0x01, 0x81, 0x05]);
        assert_eq!(fs.lookup(me(), ROOT, b"first").await.map(drop), Err(Errno::ENOENT));
    });
}

/// A server that was taken for dead is still at the first attempt when the next one, on the same disk, gets the second; and somebody
/// else's change comes between them.
#[test]
fn two_attempts_at_the_same_time_are_one() {
    let world = World::new(1, Behind::Pool(1));
    world.block_on(async {
        let disk = SimulatedDisk::new(world.sim.outside());
        create(&disk, PoolSettings::new([7; 16], 1)).await.unwrap();
        let fs = PoolFs::open(world.sim.env(world.server), disk.clone()).await.unwrap().0;
        let made = fs.mknod(me(), ROOT, b"one", FileKind::Regular, 0o644, 0).await.unwrap();
        disk.set_latency(1, Duration::from_millis(5));
        let client = ClientKey::new(&world.sim.peer(world.client).id, &[1; 16]);
        let call = fs.for_call(CallOrigin { client, number: 5, lowest: 3 });
        let attempts = (0..10).map(|_| call.unlink(me(), ROOT, b"one"));
        let again = async {
            loop {
                match fs.mknod(me(), ROOT, b"one", FileKind::Regular, 0o644, 0).await {
                    Err(Errno::EEXIST) => {}
                    made => return made,
                }
            }
        };
        let attempts = futures_util::future::join_all(attempts);
        let (attempts, again) = futures_util::future::join(attempts, again).await;
        assert_eq!(attempts, [Ok(()); 10]);
        let now = fs.lookup(me(), ROOT, b"one").await.unwrap().attr.inode;
        assert_eq!(now, again.unwrap().attr.inode);
        assert_ne!(now, made.attr.inode);
        // One that its client waits for no more, and that was not done, is not done now.
        let call = fs.for_call(CallOrigin { client, number: 2, lowest: 2 });
        assert_eq!(call.unlink(me(), ROOT, b"one").await, Err(Errno::EIO));
        assert!(fs.lookup(me(), ROOT, b"one").await.is_ok());
    });
}
