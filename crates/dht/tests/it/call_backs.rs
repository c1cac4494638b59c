//! Call-back promises: a reader asks nobody while they last, and sees each write that was acknowledged
//! before it read.

use std::time::Duration;

use atoll_dht::rpc::{CHANGED, PUT, READ};
use atoll_dht::{Blocks, Mechanisms, Wanted};
use atoll_env::Instant;
use atoll_key::KeyRange;
use atoll_key::kinds::certified::CertifiedBlock;
use atoll_net::{PROBE, Request};
use atoll_sim::{Latency, SimConfig};

use crate::certified::{Inode, new_block};
use crate::ring::{MINUTE, Ring, prompt};

/// The longest promise.
const LONGEST: Duration = Duration::from_secs(15);
/// How long promises last on a ring of [`Ring::new`]: a hundred round trips of 40 ms.
const PROMISE: Duration = Duration::from_secs(4);
/// How long one lasts to a reader that is near, or that the replica has not measured.
const SHORTEST: Duration = Duration::from_secs(2);

/// A ring whose nodes are so far from each other that promises last as long as any, once the replicas know it.
fn far(seed: u64) -> Ring {
    let latency = Latency::Flat(Duration::from_millis(100));
    let ring = Ring::with(SimConfig { seed, latency, ..SimConfig::default() }, prompt(), 8);
    let all = || ring.members.iter().map(|member| member.host);
    for (from, to) in all().flat_map(|from| all().map(move |to| (from, to))) {
        let question = Request { method: PROBE, ..Request::default() };
        let asked = ring.sim.transport(from).call(ring.sim.peer(to), question, MINUTE);
        let _ = ring.sim.block_on(MINUTE, asked).expect("it ends");
    }
    ring
}

fn now(ring: &Ring) -> Instant {
    ring.sim.outside().now()
}

/// How long a put takes, which succeeds.
fn time_of_put(inode: &Inode<'_>, at: usize, block: &CertifiedBlock) -> Duration {
    let began = now(inode.ring);
    assert_eq!(inode.put(at, block), Ok(()));
    now(inode.ring).since(began)
}

/// Nodes outside the block's replica set.
fn outside(inode: &Inode<'_>) -> Vec<usize> {
    let set = inode.ring.replica_set(&inode.key());
    (0..inode.ring.members.len()).filter(|at| !set.contains(at)).collect()
}

#[test]
fn a_block_is_read_again_without_a_call_until_it_changes() {
    for seed in 0..10 {
        let ring = Ring::new(seed, 8);
        let inode = Inode::on(&ring, 1);
        let (reader, writer) = (seed as usize % 8, (seed as usize + 3) % 8);
        inode.put(writer, &inode.first).expect("all are there");
        assert_eq!(inode.get(reader).expect("held"), inode.first);
        let (mut reads, mut last) = (ring.calls_of(READ), inode.first.clone());
        for n in 0..4 {
            for at in [reader, writer] {
                assert_eq!(inode.get(at).expect("held"), last, "at {at}, seed {seed}");
            }
            assert_eq!(ring.calls_of(READ), reads, "round {n}, seed {seed}");
            last = inode.written(&last, writer, &format!("{n}"));
            inode.put(writer, &last).expect("all are there");
            assert_eq!(inode.get(writer).expect("held"), last, "its own");
            assert_eq!(ring.calls_of(READ), reads, "the writer asks nobody, seed {seed}");
            assert_eq!(inode.get(reader).expect("held"), last);
            assert!(ring.calls_of(READ) > reads, "the reader was told, seed {seed}");
            reads = ring.calls_of(READ);
        }
        ring.sim.run_for(LONGEST);
        assert_eq!(inode.get(reader).expect("held"), last);
        assert!(ring.calls_of(READ) > reads, "promises have ended, seed {seed}");
    }
}

#[test]
fn a_writer_tells_each_reader_once() {
    let ring = Ring::new(5, 8);
    let inode = Inode::on(&ring, 1);
    let [reader, writer] = outside(&inode)[..2] else { panic!("eight nodes") };
    inode.put(writer, &inode.first).expect("all are there");
    inode.get(reader).expect("held");
    let mut last = inode.first.clone();
    for n in 0..5 {
        last = inode.written(&last, writer, &format!("{n}"));
        inode.put(writer, &last).expect("all are there");
        assert_eq!(ring.calls_of(CHANGED), 1, "it has not read again, write {n}");
    }
    inode.get(reader).expect("held");
    inode.put(writer, &inode.written(&last, writer, "last")).expect("all are there");
    assert_eq!(ring.calls_of(CHANGED), 2);
}

/// A new inode and its name go to their nodes in one message each.
#[test]
fn readers_of_a_directory_are_told_of_a_name_that_is_put_with_its_inode() {
    let mut near = 0;
    for seed in 0..10 {
        let ring = Ring::new(60 + seed, 8);
        let above = Inode::on(&ring, 0);
        let [reader, writer] = outside(&above)[..2] else { panic!("eight nodes") };
        above.put(writer, &above.first).expect("all are there");
        assert_eq!(above.get(reader).expect("held"), above.first);
        let until = ring.members[writer].dht.same_set_until(above.key());
        let until = ring.sim.block_on(MINUTE, until).expect("it ends").expect("a small ring");
        let range = KeyRange::new(above.key().previous(), until);
        let below = (1..=255).map(|number| Inode::on(&ring, number));
        // In some rings the directory lies close to its root.
        let Some(below) = below.into_iter().find(|inode| range.contains(&inode.key())) else {
            continue;
        };
        near += 1;
        let (puts, named) = (ring.calls_of(PUT), above.written(&above.first, writer, "named"));
        let both = [&below.first, &named].map(new_block);
        let put = ring.members[writer].dht.put_in_order(both.into());
        let outcomes = ring.sim.block_on(MINUTE, put).expect("it ends");
        assert_eq!(outcomes, [Ok(()), Ok(())], "seed {seed}");
        assert_eq!(ring.calls_of(PUT) - puts, 3, "one for each replica, seed {seed}");
        assert_eq!(ring.calls_of(CHANGED), 1, "the reader was told, seed {seed}");
        let reads = ring.calls_of(READ);
        for (inode, last) in [(&above, &named), (&below, &below.first)] {
            assert_eq!(inode.get(writer).as_ref(), Ok(last), "seed {seed}");
        }
        assert_eq!(ring.calls_of(READ), reads, "the writer is promised both, seed {seed}");
        assert_eq!(above.get(reader).expect("held"), named, "seed {seed}");
        assert_eq!(below.get(reader).expect("held"), below.first, "seed {seed}");
        let second = below.written(&below.first, writer, "second");
        below.put(writer, &second).expect("all are there");
        assert_eq!(below.get(reader).expect("held"), second, "seed {seed}");
        assert_eq!(above.get(reader).expect("held"), named, "seed {seed}");
    }
    assert!(near >= 7, "{near} rings");
}

#[test]
fn a_reader_that_crashed_delays_one_write_until_its_promise_has_ended() {
    let ring = Ring::new(6, 8);
    let inode = Inode::on(&ring, 1);
    let [reader, writer] = outside(&inode)[..2] else { panic!("eight nodes") };
    inode.put(writer, &inode.first).expect("all are there");
    inode.get(reader).expect("held");
    ring.crash(reader);
    let second = inode.written(&inode.first, writer, "second");
    let took = time_of_put(&inode, writer, &second);
    let least = SHORTEST * 3 / 4;
    assert!(took > least && took <= PROMISE + Duration::from_secs(1), "{took:?}");
    let took = time_of_put(&inode, writer, &inode.written(&second, writer, "third"));
    assert!(took < Duration::from_secs(2), "{took:?}");
}

#[test]
fn a_reader_whom_the_writer_cannot_reach_sees_what_was_acknowledged() {
    for seed in 0..10 {
        let ring = Ring::new(20 + seed, 8);
        let inode = Inode::on(&ring, 1);
        let [reader, writer] = outside(&inode)[..2] else { panic!("eight nodes") };
        inode.put(writer, &inode.first).expect("all are there");
        assert_eq!(inode.get(reader).expect("held"), inode.first);
        // The replicas reach both, and the two not each other.
        let host = |at: usize| ring.members[at].host;
        ring.sim.cut(&[host(reader)], &[host(writer)]);
        ring.sim.cut(&[host(writer)], &[host(reader)]);
        let second = inode.written(&inode.first, writer, "second");
        inode.put(writer, &second).expect("a majority has it");
        assert_eq!(inode.get(reader).expect("held"), second, "seed {seed}");
    }
}

#[test]
fn replicas_that_restarted_know_what_they_have_promised_or_that_they_may_have() {
    for (seed, crashes) in (0..6).flat_map(|seed| [(seed, false), (seed, true)]) {
        let mut ring = far(40 + seed);
        let first = {
            let inode = Inode::on(&ring, 1);
            inode.put(0, &inode.first).expect("all are there");
            inode.first
        };
        let at = |ring: &Ring, f: &mut dyn FnMut(&Inode<'_>)| {
            let mut inode = Inode::on(ring, 1);
            inode.first = first.clone();
            f(&inode);
        };
        let (mut set, mut free) = (Vec::new(), Vec::new());
        at(&ring, &mut |inode| {
            (set, free) = (ring.replica_set(&inode.key()), outside(inode));
            assert_eq!(inode.get(free[0]).expect("held"), first);
        });
        for replica in set {
            ring.crash(replica);
            ring.sim.run_for(Duration::from_secs(1));
            if crashes {
                ring.members[replica].durable.crash_machine();
            }
            ring.restart(replica);
            ring.sim.run_for(Duration::from_secs(1));
        }
        at(&ring, &mut |inode| {
            let second = inode.written(&first, free[1], "second");
            let took = time_of_put(inode, free[1], &second);
            assert_eq!(inode.get(free[0]).expect("held"), second, "seed {seed}");
            assert_eq!(took > Duration::from_secs(4), crashes, "{took:?}, seed {seed}");
        });
    }
}

/// Nodes read and write at random times, some crash and come back, lines are cut and mended: each read has
/// what was acknowledged before it began.
#[test]
fn reads_have_what_was_acknowledged_before_they_began() {
    for seed in 0..30 {
        let mut ring = Ring::new(60 + seed, 8);
        let env = ring.sim.outside();
        let random = |below: usize| (env.random_u64() % below as u64) as usize;
        let (first, set) = {
            let inode = Inode::on(&ring, 1);
            inode.put(0, &inode.first).expect("all are there");
            let set = ring.replica_set(&inode.key());
            (inode.first, set)
        };
        let free: Vec<usize> = (0..8).filter(|at| !set.contains(at)).collect();
        let (mut acknowledged, mut writes) = (vec![first.clone()], 0);
        let mut is_down: Option<usize> = None;
        for _ in 0..60 {
            match random(12) {
                // One that is no replica: the replica set stays as it is.
                0 => match is_down.take() {
                    Some(victim) => {
                        ring.sim.heal();
                        ring.restart(victim);
                    }
                    None => {
                        let victim = free[random(free.len())];
                        ring.crash(victim);
                        is_down = Some(victim);
                    }
                },
                1 => {
                    let [a, b] = [0, 0].map(|_| ring.members[free[random(free.len())]].host);
                    if a != b {
                        ring.sim.cut(&[a], &[b]);
                        ring.sim.cut(&[b], &[a]);
                    }
                }
                2 => ring.sim.heal(),
                3 => ring.sim.run_for(Duration::from_secs(random(20) as u64)),
                _ => {}
            }
            let at = random(8);
            if !ring.sim.is_up(ring.members[at].host) {
                continue;
            }
            let mut inode = Inode::on(&ring, 1);
            inode.first = first.clone();
            let Ok(seen) = inode.get(at) else { continue };
            for block in &acknowledged {
                assert!(seen.includes(block), "seed {seed}: a read at {at} misses a write");
            }
            // Two readers and a writer at once, at most.
            let others: Vec<_> = (0..random(3)).map(|_| random(8)).collect();
            let others = others.into_iter().filter(|at| ring.sim.is_up(ring.members[*at].host));
            let gets =
                others.map(|at| ring.members[at].dht.get_block(inode.first.id(), Wanted::Newest));
            let gets: Vec<_> = gets.collect();
            if random(2) == 0 {
                writes += 1;
                let block = inode.written(&seen, at, &format!("{writes}"));
                let both = async {
                    futures_util::join!(
                        inode.putting(at, &block),
                        futures_util::future::join_all(gets)
                    )
                };
                let (mut put, _) = ring.sim.block_on(MINUTE * 5, both).expect("they end");
                if put.remove(0).is_ok() {
                    acknowledged.push(block);
                }
            }
        }
        assert!(acknowledged.len() > 5, "seed {seed}: hardly any write succeeds");
    }
}

#[test]
fn without_call_backs_each_read_asks() {
    let mechanisms = Mechanisms { call_backs: false, ..Mechanisms::default() };
    let ring = Ring::configured(7, atoll_dht::DhtConfig { mechanisms, ..prompt() }, 6);
    let inode = Inode::on(&ring, 1);
    inode.put(0, &inode.first).expect("all are there");
    inode.get(1).expect("held");
    let reads = ring.calls_of(READ);
    inode.get(1).expect("held");
    assert!(ring.calls_of(READ) > reads);
}

/// A node that was stopped goes by its clocks when it goes on, whatever it was promised.
#[test]
fn a_reader_that_was_stopped_shows_nothing_that_has_changed_meanwhile() {
    for seed in 0..10 {
        for ring in [Ring::new(80 + seed, 8), far(80 + seed)] {
            let inode = Inode::on(&ring, 1);
            let [reader, writer] = outside(&inode)[..2] else { panic!("eight nodes") };
            inode.put(writer, &inode.first).expect("all are there");
            assert_eq!(inode.get(reader).expect("held"), inode.first);
            let reads = ring.calls_of(READ);
            assert_eq!(inode.get(reader).expect("held"), inode.first);
            assert_eq!(ring.calls_of(READ), reads, "it is promised, seed {seed}");
            let host = ring.members[reader].host;
            ring.sim.freeze(host);
            let second = inode.written(&inode.first, writer, "second");
            let took = time_of_put(&inode, writer, &second);
            assert!(took > Duration::from_secs(1), "the writer has waited, {took:?}, seed {seed}");
            ring.sim.thaw(host);
            // Before anybody has told it.
            assert_eq!(inode.get(reader).expect("held"), second, "seed {seed}");
        }
    }
}
