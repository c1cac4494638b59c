//! The rules of admission, at times of the tests' choosing.

use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use atoll_env::{BoxFuture, Instant, Runtime, Task};
use atoll_key::{IdProfile, SecretKey};

use super::record::Content;
use super::*;

/// A runtime whose wall clock is set by hand.
struct Clock(AtomicU64);

impl Runtime for Clock {
    fn now(&self) -> Instant {
        Instant::default()
    }
    fn unix_ms(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
    fn sleep_until(&self, _: Instant) -> BoxFuture<'static, ()> {
        Box::pin(std::future::pending())
    }
    fn spawn(&self, _: BoxFuture<'static, ()>) -> Task {
        panic!("nothing here starts a task")
    }
    fn random_u64(&self) -> u64 {
        4
    }
}

const ISSUED_MS: u64 = 1_000_000;
const OVERLAP: Duration = Duration::from_secs(3600);

struct Scene {
    clock: Arc<Clock>,
    members: Membership,
    dir: NodeDir,
    admin: SecretKey,
    network: Network,
    _temp: tempfile::TempDir,
}

impl Scene {
    fn new() -> Scene {
        let temp = tempfile::tempdir().expect("temp");
        let dir = NodeDir::at(temp.path());
        let admin = SecretKey::from_seed(&[1; 32]);
        let network = Network::generate(IdProfile::Identity, 3, admin.public());
        let clock = Arc::new(Clock(AtomicU64::new(ISSUED_MS)));
        let members = open(&clock, &dir, &network);
        Scene { clock, members, dir, admin, network, _temp: temp }
    }

    fn at(&self, unix_ms: u64) -> &Scene {
        self.clock.0.store(unix_ms, Ordering::Relaxed);
        self
    }

    /// A record after the one of this scene.
    fn record(&self, epoch: u64, removed: &[Peer]) -> Record {
        let content = Content {
            epoch,
            issued_unix_ms: ISSUED_MS,
            overlap: OVERLAP,
            secret: [epoch as u8; 32],
            former: self.members.network().secret,
            removed: removed.iter().map(|peer| peer.id).collect(),
        };
        Record::sign(&self.admin, content)
    }

    fn admit(&self, number: u8, secret: Secret) -> Admission {
        self.members.admit(peer(number), Proven { secret, version: 1 })
    }
}

fn open(clock: &Arc<Clock>, dir: &NodeDir, network: &Network) -> Membership {
    Membership::open(clock.clone(), dir, PeerId([0; 32]), network.clone()).expect("opens")
}

fn peer(number: u8) -> Peer {
    Peer { id: PeerId([number; 32]), addr: ([10, 0, 0, number], 7543).into() }
}

/// A thief that came with the old code while the record was on its way was taken for a
/// member that had been away, and given the new secret.
#[test]
fn the_former_secret_admits_those_met_before_it_was_replaced_for_a_time() {
    let scene = Scene::new();
    assert_eq!(scene.at(ISSUED_MS - 1).admit(1, Secret::Current), Admission::Member);
    // The record is issued here; before it arrives another node comes.
    assert_eq!(scene.at(ISSUED_MS + 1).admit(2, Secret::Current), Admission::Member);
    let record = scene.record(1, &[]);
    assert_eq!(scene.members.take_over(record.bytes()), Ok(true));
    assert!(scene.members.may_know(&peer(1).id) && !scene.members.may_know(&peer(2).id));
    assert!(!scene.members.may_know(&peer(3).id), "never met");
    for (number, expected) in
        [(1, Admission::Member), (2, Admission::SecretReplaced), (3, Admission::SecretReplaced)]
    {
        assert_eq!(scene.admit(number, Secret::Former), expected, "{number}");
    }
    // A new code makes any node a member.
    assert_eq!(scene.admit(3, Secret::Current), Admission::Member);
    assert!(scene.members.may_know(&peer(3).id));
    let end = ISSUED_MS + OVERLAP.as_millis() as u64;
    assert_eq!(scene.at(end - 1).admit(1, Secret::Former), Admission::Member);
    assert_eq!(scene.at(end).admit(1, Secret::Former), Admission::SecretReplaced);
}

#[test]
fn a_removed_node_is_a_member_by_no_secret() {
    let scene = Scene::new();
    assert_eq!(scene.admit(1, Secret::Current), Admission::Member);
    let record = scene.record(1, &[peer(1)]);
    assert_eq!(scene.members.take_over(record.bytes()), Ok(true));
    for secret in [Secret::Current, Secret::Former] {
        assert_eq!(scene.admit(1, secret), Admission::Removed);
    }
    assert!(scene.members.is_removed(&peer(1).id) && !scene.members.may_know(&peer(1).id));
    let list = scene.members.list(peer(0), &[], &[]);
    let states: Vec<&str> = list.members.iter().map(|member| member.status.as_str()).collect();
    assert_eq!(states, ["this node", "removed"]);
}

/// A record of 1970 would have every member met too late.
#[test]
fn nothing_is_issued_by_a_clock_that_was_never_set() {
    let scene = Scene::new();
    std::fs::write(scene.dir.admin_key(), scene.admin.seed()).expect("write");
    std::fs::set_permissions(scene.dir.admin_key(), std::fs::Permissions::from_mode(0o600))
        .expect("chmod");
    let issue = |unix_ms| scene.at(unix_ms).members.issue(&[], OVERLAP);
    assert!(issue(ISSUED_MS).is_err_and(|why| why.contains("clock")));
    let now = 2_000_000_000_000;
    assert_eq!(issue(now), Ok(now + OVERLAP.as_millis() as u64));
    assert!(issue(now - 1).is_err_and(|why| why.contains("clock")), "before the last record");
}

#[test]
fn beyond_its_maximum_the_list_of_removed_nodes_forgets_the_earliest() {
    let scene = Scene::new();
    std::fs::write(scene.dir.admin_key(), scene.admin.seed()).expect("write");
    std::fs::set_permissions(scene.dir.admin_key(), std::fs::Permissions::from_mode(0o600))
        .expect("chmod");
    scene.at(2_000_000_000_000);
    let first: Vec<PeerId> =
        (0..200).map(|n| PeerId([n, 1, 0, 0].repeat(8).try_into().expect("32"))).collect();
    let then: Vec<PeerId> =
        (0..100).map(|n| PeerId([n, 2, 0, 0].repeat(8).try_into().expect("32"))).collect();
    scene.members.issue(&first, OVERLAP).expect("issued");
    scene.members.issue(&then, OVERLAP).expect("issued");
    scene.members.issue(&first[150..], OVERLAP).expect("once more");
    let gone = |ids: &[PeerId]| ids.iter().filter(|id| scene.members.is_removed(id)).count();
    assert_eq!((gone(&first[..44]), gone(&first[44..]), gone(&then)), (0, 156, 100));
}

/// A member that sends the same record, or older ones, again and again costs a comparison;
/// one that sends forged ones cannot fill the log.
#[test]
fn records_that_are_not_newer_are_seen_by_their_epoch() {
    let scene = Scene::new();
    let (second, third) = (scene.record(2, &[]), scene.record(3, &[]));
    assert!(scene.members.may_be_newer(second.bytes()));
    assert_eq!(scene.members.take_over(second.bytes()), Ok(true));
    for old in [second.bytes(), scene.record(1, &[]).bytes(), b""] {
        assert!(!scene.members.may_be_newer(old));
    }
    assert!(scene.members.may_be_newer(third.bytes()));
    let logged = (0..1000).filter(|_| scene.members.count_refused_record()).count();
    assert_eq!(logged, 10);
}

#[test]
fn older_and_foreign_records_change_nothing_and_the_newest_is_found_again() {
    let scene = Scene::new();
    let (second, third) = (scene.record(2, &[]), scene.record(3, &[peer(7)]));
    assert_eq!(scene.members.take_over(third.bytes()), Ok(true));
    for replayed in [&second, &third] {
        assert_eq!(scene.members.take_over(replayed.bytes()), Ok(false));
    }
    let thief = SecretKey::from_seed(&[9; 32]);
    let content = Content {
        epoch: 9,
        issued_unix_ms: ISSUED_MS,
        overlap: OVERLAP,
        secret: [9; 32],
        former: [8; 32],
        removed: Vec::new(),
    };
    let forged = Record::sign(&thief, content);
    assert!(scene.members.take_over(forged.bytes()).is_err_and(|why| why.contains("signed")));
    let again = open(&scene.clock, &scene.dir, &scene.network);
    assert_eq!(again.network(), scene.members.network());
    assert_eq!(again.network().secret, [3; 32]);
    assert!(again.is_removed(&peer(7).id));
    std::fs::write(scene.dir.membership(), &third.bytes()[..150]).expect("damage it");
    let clock: Env = scene.clock.clone();
    let damaged = Membership::open(clock, &scene.dir, PeerId([0; 32]), scene.network);
    assert!(matches!(damaged, Err(DirError::Damaged { .. })), "{damaged:?}");
}

/// A node left behind by two rotations has a record, and a code that is newer.
#[test]
fn a_code_newer_than_the_record_counts_until_its_record_comes() {
    let scene = Scene::new();
    assert_eq!(scene.members.take_over(scene.record(1, &[]).bytes()), Ok(true));
    let code = Network { secret: [3; 32], epoch: 3, ..scene.network.clone() };
    let network = scene.network.joined_with(&code).expect("the same administrator");
    let members = open(&scene.clock, &scene.dir, &network);
    assert_eq!(members.network(), network);
    assert!(members.secrets() == Secrets::from([3; 32]), "what it had before is worth nothing");
    assert_eq!(members.take_over(scene.record(3, &[]).bytes()), Ok(true));
    assert_eq!(members.network().secret, [3; 32]);
    assert!(members.secrets().former.is_some());
}

#[test]
fn what_another_says_of_this_node_is_told_until_it_is_admitted() {
    let scene = Scene::new();
    assert_eq!(scene.members.warning(), None);
    scene.members.refused_by(peer(5), Verdict::SecretReplaced);
    let told = scene.members.warning().expect("told");
    assert!(told.contains("10.0.0.5:7543") && told.contains("--join CODE"), "{told}");
    assert_eq!(scene.admit(5, Secret::Current), Admission::Member);
    assert_eq!(scene.members.warning(), None);
}
