//! A network that loses, repeats and delays.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_env::{BoxFuture, Env};
use atoll_net::{CallError, Reply, Request};
use atoll_pool::remote::{PeerRoute, RemoteFs, Route};
use atoll_vfs::{
    CreateVerifier, Errno, FileKind, FileSystem, InodeNumber, OpenFlags, RenameFlags, Writer,
    XattrFlags,
};
use bytes::Bytes;
use futures_util::future::join_all;

use super::{Behind, Dice, ROOT, Seed, World, file, lines, me, seeds, until_answered};

/// A message that is late arrives by then.
pub(super) const LATEST: Duration = Duration::from_secs(20);

/// Of a hundred calls so many meet with a fault.
pub(super) struct FaultyRoute {
    inner: PeerRoute,
    env: Env,
    dice: Mutex<Dice>,
    percent: u64,
}

impl FaultyRoute {
    pub(super) fn new(world: &World, seed: u64, percent: u64) -> Arc<FaultyRoute> {
        let (inner, env) = (world.route(), world.sim.env(world.client));
        Arc::new(FaultyRoute { inner, env, dice: Mutex::new(Dice(seed)), percent })
    }

    /// Sends a request after a while; nobody hears of the answer.
    fn send_unheard(&self, request: &Request, after: Duration) {
        let wait = atoll_env::sleep(&*self.env, after);
        let (inner, request) = (self.inner.clone(), request.clone());
        self.env.spawn(Box::pin(async move {
            wait.await;
            let _ = inner.call(request, Duration::from_secs(600)).await;
        }));
    }
}

impl Route for FaultyRoute {
    fn call(
        &self,
        request: Request,
        limit: Duration,
    ) -> BoxFuture<'static, Result<Reply, CallError>> {
        let mut dice = self.dice.lock().unwrap();
        let broken = || CallError::Unreachable("it broke".to_owned());
        let times_out = |env: &Env| {
            let wait = atoll_env::sleep(&**env, limit);
            Box::pin(async move {
                wait.await;
                Err(CallError::TimedOut)
            })
        };
        if dice.below(100) >= self.percent {
            return self.inner.call(request, limit);
        }
        match dice.below(6) {
            // The request is lost.
            0 => times_out(&self.env),
            // The reply is lost.
            1 => {
                self.send_unheard(&request, Duration::ZERO);
                times_out(&self.env)
            }
            // The request is late.
            2 => {
                self.send_unheard(&request, dice.millis(LATEST.as_millis() as u64));
                times_out(&self.env)
            }
            // The connection breaks, before and after the request.
            3 => Box::pin(async move { Err(broken()) }),
            4 => {
                self.send_unheard(&request, Duration::ZERO);
                let wait = atoll_env::sleep(&*self.env, dice.millis(3));
                Box::pin(async move {
                    wait.await;
                    Err(broken())
                })
            }
            // The request arrives once more, later.
            _ => {
                self.send_unheard(&request, dice.millis(LATEST.as_millis() as u64));
                self.inner.call(request, limit)
            }
        }
    }
}

/// What changes have come to.
#[derive(Default)]
pub(super) struct Changed {
    /// So many had no answer.
    pub(super) unanswered: u64,
    /// The lines that were appended.
    pub(super) lines: BTreeSet<String>,
}

/// Changes of which each shows if it was made twice, or not at all.
pub(super) async fn change_once(
    fs: Arc<RemoteFs>,
    worker: u64,
    mut dice: Dice,
    shared: InodeNumber,
) -> Changed {
    let (mut unanswered, mut lines) = (0, BTreeSet::new());
    let open = OpenFlags::READ_WRITE;
    let shared_handle = until_answered(|| fs.open(me(), shared, open)).await.handle;
    let name = |number: u64| format!("chain-{worker}-{number}").into_bytes();
    let mut at = 0;
    let kind = FileKind::Regular;
    match fs.mknod(me(), ROOT, &name(0), kind, 0o644, 0).await {
        Ok(_) => {}
        Err(Errno::EIO) => {
            unanswered += 1;
            until_answered(|| async {
                let verifier = CreateVerifier([1; 8]);
                match fs.lookup(me(), ROOT, &name(0)).await {
                    Err(Errno::ENOENT) => {
                        fs.create_exclusive(me(), ROOT, &name(0), 0o644, verifier).await
                    }
                    found => found,
                }
            })
            .await;
        }
        Err(errno) => panic!("mknod: {errno}"),
    }
    for step in 0..40 {
        match dice.below(4) {
            // Another name for one file: a second time there is none.
            0 => {
                let flags = RenameFlags::default();
                match fs.rename(me(), ROOT, &name(at), ROOT, &name(at + 1), flags).await {
                    Ok(()) => at += 1,
                    Err(Errno::EIO) => {
                        unanswered += 1;
                        let there = until_answered(|| async {
                            match fs.lookup(me(), ROOT, &name(at + 1)).await {
                                Err(Errno::ENOENT) => Ok(false),
                                found => found.map(|_| true),
                            }
                        });
                        at += u64::from(there.await);
                    }
                    Err(errno) => panic!("rename {at}: {errno}"),
                }
            }
            // A name that nobody else makes.
            1 => {
                let own = format!("own-{worker}-{step}").into_bytes();
                match fs
                    .create(me(), ROOT, &own, 0o644, OpenFlags(open.0 | OpenFlags::EXCLUSIVE))
                    .await
                {
                    Ok((entry, opened)) => {
                        let mut possibly_gone = false;
                        loop {
                            match fs.unlink(me(), ROOT, &own).await {
                                Ok(()) => break,
                                Err(Errno::EIO) => {
                                    unanswered += 1;
                                    possibly_gone = true;
                                }
                                Err(Errno::ENOENT) if possibly_gone => break,
                                Err(errno) => panic!("unlink: {errno}"),
                            }
                        }
                        let _ = fs.close(entry.attr.inode, opened.handle).await;
                    }
                    Err(Errno::EIO) => unanswered += 1,
                    Err(errno) => panic!("create: {errno}"),
                }
            }
            // A line in a file that others write, too.
            _ => {
                let line = format!("{worker:04} {step:04}");
                let bytes = Bytes::from(format!("{line}\n"));
                match fs.write(Writer::AtEnd(me()), shared, shared_handle, 0, bytes).await {
                    Ok(written) => {
                        assert_eq!(written, 10);
                        lines.insert(line);
                    }
                    Err(Errno::EIO) => unanswered += 1,
                    Err(errno) => panic!("append: {errno}"),
                }
            }
        }
    }
    until_answered(|| fs.lookup(me(), ROOT, &name(at))).await;
    Changed { unanswered, lines }
}

/// That a file has each of these lines, and no line twice.
pub(super) fn check_lines(there: &[String], all: &[Changed]) {
    let different: BTreeSet<&String> = there.iter().collect();
    assert_eq!(different.len(), there.len(), "a line was written twice");
    for line in all.iter().flat_map(|changed| &changed.lines) {
        assert!(different.contains(line), "the line {line} is lost");
    }
}

#[test]
fn each_change_is_made_once_however_often_its_call_arrives() {
    let mut unanswered = 0;
    for seed in seeds(12) {
        let _seed = Seed(seed);
        let world = World::new(seed, Behind::Pool(1));
        unanswered += world.block_on(async {
            world.start(None).await;
            let (shared, handle) = file(&*world.served().fs, "shared").await;
            let mut clients = Vec::new();
            for number in 0..2 {
                clients
                    .push(world.mount_over(FaultyRoute::new(&world, 2 * seed + number, 25)).await);
            }
            let work = (0..6).map(|worker| {
                let dice = Dice(seed * 100 + worker);
                change_once(clients[worker as usize % 2].clone(), worker, dice, shared)
            });
            let all = join_all(work).await;
            // What is late arrives.
            world.pause(Duration::from_secs(60)).await;
            let served = world.served();
            check_lines(&lines(&*served.fs, shared).await, &all);
            served.remote.check_invariants();
            served.fs.close(shared, handle).await.unwrap();
            all.iter().map(|changed| changed.unanswered).sum::<u64>()
        });
    }
    // Most are answered, or the test shows little.
    assert!(unanswered < seeds(12).end * 10, "{unanswered} calls without an answer");
}

/// Answered appends are there.
#[test]
fn what_was_answered_was_made() {
    for seed in seeds(6) {
        let _seed = Seed(seed);
        let world = World::new(seed, Behind::Memory);
        world.block_on(async {
            world.start(None).await;
            let fs = world.mount_over(FaultyRoute::new(&world, seed, 30)).await;
            let (inode, handle) = file(&*world.served().fs, "log").await;
            let own = until_answered(|| fs.open(me(), inode, OpenFlags::WRITE)).await.handle;
            let mut answered = BTreeSet::new();
            for number in 0..60 {
                let line = Bytes::from(format!("{number:09}\n"));
                if fs.write(Writer::AtEnd(me()), inode, own, 0, line).await.is_ok() {
                    answered.insert(format!("{number:09}"));
                }
            }
            world.pause(Duration::from_secs(60)).await;
            let there = lines(&*world.served().fs, inode).await;
            let unique: BTreeSet<String> = there.iter().cloned().collect();
            assert_eq!(unique.len(), there.len(), "a line was written twice");
            assert!(answered.is_subset(&unique) && answered.len() > 50, "{}", answered.len());
            world.served().fs.close(inode, handle).await.unwrap();
        });
    }
}

/// A relay that does not tell an empty part from none.
struct PartlessRoute(PeerRoute);

impl Route for PartlessRoute {
    fn call(
        &self,
        mut request: Request,
        limit: Duration,
    ) -> BoxFuture<'static, Result<Reply, CallError>> {
        request.parts.retain(|part| !part.is_empty());
        let answer = self.0.call(request, limit);
        Box::pin(async move {
            let mut reply = answer.await?;
            reply.parts.retain(|part| !part.is_empty());
            Ok(reply)
        })
    }
}

#[test]
fn no_bytes_may_travel_as_no_part() {
    let world = World::new(1, Behind::Memory);
    world.block_on(async {
        world.start(None).await;
        let fs = world.mount_over(Arc::new(PartlessRoute(world.route()))).await;
        let (inode, handle) = file(&*fs, "empty").await;
        assert_eq!(fs.read(inode, handle, 0, 10).await, Ok(Bytes::new()));
        assert_eq!(fs.write(Writer::At(me()), inode, handle, 0, Bytes::new()).await, Ok(0));
        assert_eq!(fs.listxattr(inode).await, Ok(Vec::new()));
        let flags = XattrFlags::default();
        assert_eq!(fs.setxattr(me(), inode, b"user.a", Bytes::new(), flags).await, Ok(()));
        assert_eq!(fs.getxattr(inode, b"user.a").await, Ok(Bytes::new()));
    });
}
