//! Sessions: whose they are, when they end; calls that are given up, slow, or not answered.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_net::{CallError, Refusal};
use atoll_pool::remote::{METHODS, Route};
use atoll_sim::HostConfig;
use atoll_vfs::{Errno, FileKind, FileSystem, OpenFlags, RenameFlags, Writer};
use bytes::Bytes;
use futures_util::future::join_all;

use super::{Behind, ROOT, Recorder, World, file, me};

#[test]
fn nobody_else_may_use_a_session() {
    let world = World::new(1, Behind::Memory);
    let stranger = world.sim.add_host(HostConfig::default());
    world.block_on(async {
        world.start(None).await;
        let recorder = Arc::new(Recorder { inner: world.route(), sent: Mutex::default() });
        let fs = world.mount_over(recorder.clone()).await;
        let (inode, handle) = file(&*fs, "secret").await;
        fs.write(Writer::At(me()), inode, handle, 0, Bytes::from_static(b"secret")).await.unwrap();
        assert_eq!(fs.read(inode, handle, 0, 9).await, Ok(Bytes::from_static(b"secret")));
        let sent = recorder.sent.lock().unwrap().clone();
        assert!(sent.len() >= 4);
        let transport = world.sim.transport(stranger);
        for request in &sent {
            let to = world.sim.peer(world.server);
            let answer = transport.call(to, request.clone(), Duration::from_secs(9)).await;
            match answer {
                Err(CallError::Refused(Refusal { code: 100, .. })) => {}
                // Its beginning says no more than that there is one.
                Ok(reply) if request.method == *METHODS.start() => {
                    assert!(reply.header.len() < 8, "{:?}", reply.header);
                }
                answer => panic!("{answer:?}"),
            }
        }
        assert_eq!(world.served().remote.counts(), (1, 1));
        // Its own peer may repeat all of it: nothing is done twice, or is told that it is not waited for.
        let before = fs.getattr(inode, None).await.unwrap();
        for request in sent {
            match world.route().call(request, Duration::from_secs(9)).await {
                Ok(_) | Err(CallError::Refused(Refusal { code: 102, .. })) => {}
                answer => panic!("{answer:?}"),
            }
        }
        assert_eq!(fs.getattr(inode, None).await, Ok(before));
        assert_eq!(world.served().remote.counts(), (1, 1));
    });
}

#[test]
fn the_session_of_a_dead_client_ends_and_closes_what_it_had_open() {
    let world = World::new(1, Behind::Memory);
    world.block_on(async {
        world.start(None).await;
        let fs = world.mount().await;
        let (inode, _) = file(&*fs, "removed").await;
        fs.opendir(me(), ROOT).await.unwrap();
        fs.unlink(me(), ROOT, b"removed").await.unwrap();
        let served = world.served();
        world.sim.crash_silently(world.client);
        drop(fs);
        world.pause(Duration::from_secs(500)).await;
        assert_eq!(served.remote.counts(), (1, 2));
        assert!(served.fs.getattr(inode, None).await.is_ok());
        world.pause(Duration::from_secs(200)).await;
        assert_eq!(served.remote.counts(), (0, 0));
        // Nobody holds it, and so it is gone.
        assert!(served.fs.getattr(inode, None).await.is_err());
    });
}

#[test]
fn an_idle_client_keeps_its_session() {
    let world = World::new(1, Behind::Memory);
    world.block_on(async {
        world.start(None).await;
        let fs = world.mount().await;
        let (inode, handle) = file(&*fs, "removed").await;
        fs.unlink(me(), ROOT, b"removed").await.unwrap();
        world.pause(Duration::from_secs(5000)).await;
        assert_eq!(fs.read(inode, handle, 0, 10).await, Ok(Bytes::new()));
        assert_eq!(world.served().remote.counts(), (1, 1));
        // One that was cut off for long begins anew.
        world.sim.partition(&[&[world.server], &[world.client]]);
        world.pause(Duration::from_secs(700)).await;
        world.sim.heal();
        assert_eq!(world.served().remote.counts(), (0, 0));
        let root = fs.lookup(me(), ROOT, b"removed").await;
        assert_eq!(root, Err(Errno::ENOENT));
        assert_eq!(world.served().remote.counts(), (1, 0));
    });
}

#[test]
fn what_a_caller_has_given_up_is_given_back() {
    let world = World::new(1, Behind::Memory);
    world.block_on(async {
        world.start(None).await;
        let fs = world.mount().await;
        let (inode, handle) = file(&*fs, "file").await;
        let env = world.sim.outside();
        let moment = Duration::from_micros(150);
        for _ in 0..10 {
            let opened = fs.open(me(), inode, OpenFlags::READ);
            assert!(atoll_env::timeout(&*env, moment, opened).await.is_err());
            let found = fs.lookup(me(), ROOT, b"file");
            assert!(atoll_env::timeout(&*env, moment, found).await.is_err());
        }
        world.pause(Duration::from_secs(1)).await;
        assert_eq!(world.served().remote.counts(), (1, 1));
        fs.close(inode, handle).await.unwrap();
        fs.unlink(me(), ROOT, b"file").await.unwrap();
        fs.forget(inode, 1);
        world.pause(Duration::from_secs(1)).await;
        assert!(world.served().fs.getattr(inode, None).await.is_err(), "somebody holds it");
    });
}

#[test]
fn a_change_that_is_given_up_is_made_whole_and_its_number_is_free() {
    let world = World::new(1, Behind::Pool(1));
    world.block_on(async {
        world.start(None).await;
        let fs = world.mount().await;
        world.served().disk.set_latency(1, Duration::from_secs(2));
        let env = world.sim.outside();
        let name = |number: u32| format!("name-{number}").into_bytes();
        for number in 0..5 {
            let name = name(number);
            let made = fs.mkdir(me(), ROOT, &name, 0o755);
            assert!(atoll_env::timeout(&*env, Duration::from_millis(1), made).await.is_err());
        }
        world.pause(Duration::from_secs(60)).await;
        world.served().disk.set_latency(1, Duration::ZERO);
        for number in 0..5 {
            let name = name(number);
            let found = fs.lookup(me(), ROOT, &name).await;
            assert_eq!(found.map(|entry| entry.attr.kind), Ok(FileKind::Directory));
        }
        drop(fs);
    });
    world.check_ended();
}

#[test]
fn a_slow_disk_is_waited_for() {
    let world = World::new(1, Behind::Pool(1));
    world.block_on(async {
        world.start(None).await;
        let fs = world.mount().await;
        let (inode, handle) = file(&*fs, "file").await;
        world.served().disk.set_latency(1, Duration::from_secs(4));
        let written = fs.write(Writer::At(me()), inode, handle, 0, vec![1; 9].into()).await;
        assert_eq!(written, Ok(9));
        // Longer than a change may take, while the server says that it is at it.
        world.served().disk.set_latency(1, Duration::from_secs(50));
        let began = world.sim.now();
        assert_eq!(fs.fsync(inode, handle, false).await, Ok(()));
        let took = world.sim.now().since(began);
        assert!(took > Duration::from_secs(31), "{took:?}");
        let began = world.sim.now();
        world.served().disk.set_latency(1, Duration::from_secs(500));
        let renamed = fs.rename(me(), ROOT, b"file", ROOT, b"other", RenameFlags::default()).await;
        assert_eq!(renamed, Err(Errno::EIO));
        assert!(world.sim.now().since(began) < Duration::from_secs(31));
    });
}

#[test]
fn calls_end_in_time_without_a_server() {
    let world = World::new(1, Behind::Memory);
    world.block_on(async {
        world.start(None).await;
        let fs = world.mount().await;
        let (inode, handle) = file(&*fs, "file").await;
        for is_silent in [false, true] {
            match is_silent {
                true => world.sim.crash_silently(world.server),
                false => world.sim.crash(world.server),
            }
            let began = world.sim.now();
            assert_eq!(fs.getattr(inode, None).await.map(|_| ()), Err(Errno::ETIMEDOUT));
            assert_eq!(fs.lookup(me(), ROOT, b"x").await, Err(Errno::ETIMEDOUT));
            assert!(world.sim.now().since(began) < Duration::from_secs(21));
            let began = world.sim.now();
            assert_eq!(fs.unlink(me(), ROOT, b"x").await, Err(Errno::EIO));
            assert!(world.sim.now().since(began) < Duration::from_secs(31));
            // Many at once wait no longer than one.
            let began = world.sim.now();
            let reads = join_all((0..100).map(|_| fs.read(inode, handle, 0, 10))).await;
            assert!(reads.iter().all(|read| *read == Err(Errno::ETIMEDOUT)));
            assert!(world.sim.now().since(began) < Duration::from_secs(31));
        }
    });
}
