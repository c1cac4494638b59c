//! Foreign bytes, both ways.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_env::BoxFuture;
use atoll_net::{Peer, Refusal, Reply, Request, Service};
use atoll_pool::remote::{METHODS, RemoteServer, Route};
use atoll_vfs::{FileSystem, OpenFlags, Writer, XattrFlags};
use bytes::Bytes;

use super::{Behind, Dice, ROOT, Recorder, Seed, World, file, me, seeds};

#[test]
fn a_server_refuses_what_it_does_not_understand() {
    let world = World::new(1, Behind::Memory);
    world.block_on(async {
        world.start(None).await;
        let recorder = Arc::new(Recorder { inner: world.route(), sent: Mutex::default() });
        let fs = world.mount_over(recorder.clone()).await;
        let (inode, handle) = file(&*fs, "file").await;
        fs.write(Writer::At(me()), inode, handle, 0, Bytes::from_static(b"text")).await.unwrap();
        fs.setxattr(me(), inode, b"user.a", Bytes::from_static(b"b"), XattrFlags::default())
            .await
            .unwrap();
        fs.readdir(ROOT, handle, 0, 10, true).await.unwrap_err();
        let sent = recorder.sent.lock().unwrap().clone();
        let mut dice = Dice(1);
        for round in 0..5000 {
            let mut request = sent[dice.below(sent.len() as u64) as usize].clone();
            let mut header = request.header.to_vec();
            match dice.below(5) {
                0 => header = (0..dice.below(100)).map(|_| dice.below(256) as u8).collect(),
                1 => request.method = METHODS.start() + dice.below(16) as u16,
                2 => request.parts = (0..dice.below(3)).map(|_| vec![0; 2 << 20].into()).collect(),
                _ => {
                    for _ in 0..=dice.below(3) {
                        let at = dice.below(header.len() as u64) as usize;
                        header[at] = dice.below(256) as u8;
                    }
                }
            }
            request.header = header.into();
            if request.parts.len() > 1 && round % 20 > 0 {
                continue;
            }
            let _ = world.route().call(request, Duration::from_secs(5)).await;
        }
        world.served().remote.check_invariants();
        assert_eq!(fs.statfs(ROOT).await.map(|_| ()), Ok(()));
    });
}

/// Answers with damaged replies.
struct Liar {
    inner: RemoteServer,
    dice: Mutex<Dice>,
    honest: u64,
}

impl Service for Liar {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let answer = self.inner.handle(from, request);
        let mut dice = Dice(self.dice.lock().unwrap().below(u64::MAX));
        let honest = self.honest;
        Box::pin(async move {
            let mut reply = answer.await?;
            if dice.below(100) < honest {
                return Ok(reply);
            }
            let mut header = reply.header.to_vec();
            match dice.below(6) {
                0 => header = (0..dice.below(60)).map(|_| dice.below(256) as u8).collect(),
                1 => reply.parts = vec![Bytes::from(vec![0; dice.below(2 << 20) as usize])],
                2 => reply.parts.clear(),
                3 => return Err(Refusal::new(99 + dice.below(5) as u16, "no")),
                _ if header.is_empty() => {}
                _ => {
                    let at = dice.below(header.len() as u64) as usize;
                    header[at] = dice.below(256) as u8;
                }
            }
            reply.header = header.into();
            Ok(reply)
        })
    }
}

#[test]
fn a_client_survives_a_server_that_lies() {
    for seed in seeds(10) {
        let _seed = Seed(seed);
        let world = World::new(seed, Behind::Memory);
        world.block_on(async {
            world.start(None).await;
            let fs = world.mount().await;
            let liar = Liar {
                inner: world.served().remote,
                dice: Mutex::new(Dice(seed)),
                honest: 30 + 5 * (seed % 10),
            };
            world.sim.transport(world.server).serve(Arc::new(liar));
            for number in 0..30 {
                let name = format!("name-{number}").into_bytes();
                let flags = OpenFlags::READ_WRITE;
                let made = fs.create(me(), ROOT, &name, 0o644, flags).await;
                let _ = fs.lookup(me(), ROOT, &name).await;
                let _ = fs.listxattr(ROOT).await;
                let _ = fs.statfs(ROOT).await;
                if let Ok(opened) = fs.opendir(me(), ROOT).await {
                    let _ = fs.readdir(ROOT, opened.handle, 0, 100, true).await;
                    let _ = fs.closedir(ROOT, opened.handle).await;
                }
                let Ok((entry, opened)) = made else { continue };
                let (inode, handle) = (entry.attr.inode, opened.handle);
                let data = Bytes::from(vec![1; 3000]);
                let _ = fs.write(Writer::AtEnd(me()), inode, handle, 0, data).await;
                let read = fs.read(inode, handle, 0, 3_000_000).await;
                assert!(read.is_err() || read.is_ok_and(|read| read.len() <= 3_000_000));
                let _ = fs.fsync(inode, handle, false).await;
                let _ = fs.close(inode, handle).await;
                fs.forget(inode, 1);
            }
        });
    }
}
