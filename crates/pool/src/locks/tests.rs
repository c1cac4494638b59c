use proptest::prelude::*;

use super::*;

const FILE: InodeNumber = InodeNumber(7);

fn client(number: u8) -> ClientKey {
    client_of(1, number)
}

fn client_of(peer: u8, number: u8) -> ClientKey {
    ClientKey::new(&PeerId([peer; 32]), &[number; 16])
}

fn lock(kind: LockKind, first: u64, last: u64) -> FileLock {
    FileLock { kind, range: LockRange { first, last }, pid: 1, through: Some(Handle(3)) }
}

fn exclusive() -> FileLock {
    lock(LockKind::Exclusive, 0, 9)
}

fn begun(locks: &mut PoolLocks, number: u8) -> LockHolder {
    begun_by(locks, client(number))
}

fn begun_by(locks: &mut PoolLocks, client: ClientKey) -> LockHolder {
    let (session, _) = locks.begin(client, 0).unwrap();
    LockHolder { client, session, owner: 5 }
}

#[test]
fn processes_of_two_clients_are_others_whatever_their_numbers() {
    let mut locks = PoolLocks::default();
    let (one, two) = (begun(&mut locks, 1), begun(&mut locks, 2));
    assert!(locks.lock(FILE, one, exclusive()).unwrap().is_some());
    assert_eq!(locks.lock(FILE, one, exclusive()), Ok(None), "it is held");
    assert_eq!(locks.lock(FILE, two, exclusive()), Err(Errno::EAGAIN));
    assert_eq!(locks.conflict(FILE, two, exclusive()), Some(exclusive()));
    // The other kind of lock of one process, through one open file.
    let other_kind = LockHolder { owner: 6, ..one };
    assert!(locks.lock(FILE, other_kind, exclusive()).unwrap().is_some());
    locks.keep(FILE, one, &[]).unwrap();
    locks.keep(FILE, other_kind, &[]).unwrap();
    assert!(locks.lock(FILE, two, exclusive()).unwrap().is_some());
    locks.check_invariants();
}

#[test]
fn a_retired_session_keeps_others_out_until_it_ends_and_its_client_begins_another() {
    let mut locks = PoolLocks::default();
    let one = begun(&mut locks, 1);
    locks.lock(FILE, one, exclusive()).unwrap();
    assert!(locks.retire(one.client, one.session));
    assert!(!locks.retire(one.client, one.session));
    assert_eq!(locks.session_of(one.client), None);
    let again = begun(&mut locks, 1);
    assert_eq!(locks.session_of(one.client), Some(again.session));
    assert_eq!(locks.lock(FILE, again, exclusive()), Err(Errno::EAGAIN));
    assert_eq!(locks.superseded(), [(one.client, one.session)]);
    let (_, freed) = locks.end(one.client, one.session);
    assert_eq!(freed, [FILE]);
    assert!(locks.lock(FILE, again, exclusive()).unwrap().is_some());
    locks.check_invariants();
}

#[test]
fn what_is_kept_is_never_more_than_is_held() {
    let mut locks = PoolLocks::default();
    let (one, two) = (begun(&mut locks, 1), begun(&mut locks, 2));
    locks.lock(FILE, one, exclusive()).unwrap();
    assert_eq!(locks.keep(FILE, two, &[exclusive()]), Err(Errno::EINVAL));
    assert_eq!(locks.keep(InodeNumber(8), two, &[exclusive()]), Err(Errno::EINVAL), "free");
    let longer = lock(LockKind::Shared, 0, 10);
    assert_eq!(locks.keep(FILE, one, &[longer]), Err(Errno::EINVAL));
    let left = lock(LockKind::Shared, 0, 3);
    assert!(locks.keep(FILE, one, &[left]).unwrap().is_some());
    let stronger = lock(LockKind::Exclusive, 0, 3);
    assert_eq!(locks.keep(FILE, one, &[stronger]), Err(Errno::EINVAL));
    assert!(locks.lock(FILE, two, lock(LockKind::Shared, 0, 9)).unwrap().is_some());
    assert_eq!(locks.keep(FILE, one, &[left]), Ok(None), "a retry");
    // One lock may be kept of two.
    locks.lock(FILE, one, lock(LockKind::Exclusive, 20, 24)).unwrap();
    locks.lock(FILE, one, lock(LockKind::Shared, 25, 29)).unwrap();
    assert!(locks.keep(FILE, one, &[lock(LockKind::Shared, 22, 27)]).unwrap().is_some());
    locks.check_invariants();
}

#[test]
fn a_session_begins_after_those_that_are_over_to_its_client() {
    let mut locks = PoolLocks::after(40);
    assert_eq!(locks.begin(client(1), 7).unwrap().0, 41);
    assert_eq!(locks.begin(client(2), 90).unwrap().0, 91);
    assert_eq!(locks.begin(client(3), u64::MAX - 1), Err(Errno::ENOLCK));
    assert_eq!(locks.begin(client(3), 0).unwrap().0, 92, "it has taken no number from others");
    locks.check_invariants();
}

#[test]
fn locks_are_few_and_fit_into_one_message() {
    let mut locks = PoolLocks::after(u64::MAX / 2);
    let spread = |at: u64| FileLock {
        pid: u32::MAX,
        through: Some(Handle(u64::MAX)),
        ..lock(LockKind::Exclusive, u64::MAX / 4 + 2 * at, u64::MAX / 4 + 2 * at)
    };
    for number in 0..5 {
        // Two clients of each peer.
        let holder = begun_by(&mut locks, client_of(number, 1));
        let other = begun_by(&mut locks, client_of(number, 2));
        let mut taken = 0;
        // Each by an owner of its own, on a file of its own.
        let take = |locks: &mut PoolLocks, at: u64| {
            let holder = if at.is_multiple_of(2) { holder } else { other };
            let holder = LockHolder { owner: u64::MAX - at, ..holder };
            locks.lock(InodeNumber(u64::MAX - at), holder, spread(u64::from(number) * 10_000 + at))
        };
        while take(&mut locks, taken).is_ok() {
            taken += 1;
        }
        assert_eq!(take(&mut locks, taken), Err(Errno::ENOLCK));
        let of_peer = if number < 4 { MAX_LOCKS_OF_PEER } else { 0 };
        assert_eq!(taken as usize, of_peer);
    }
    locks.check_invariants();
    assert_eq!(locks.counts().1, MAX_LOCKS);
    for number in 0..MAX_SESSIONS - 10 {
        begun_by(&mut locks, client_of((number / 250) as u8 + 10, (number % 250) as u8));
    }
    let bytes = encode_whole(&locks);
    assert!(bytes.len() <= crate::messages::MAX_ITEM_BYTES, "{}", bytes.len());
    let mut copy = LockCopy::default();
    let place = |sequence, is_whole| LockPlace { sequence, last_session: 0, is_whole };
    assert_eq!(copy.take(9, place(1, true), &bytes), Ok(CopyOutcome::Made));
    // What begins before another one ends is no more afterwards.
    let began = LockChange::Began { client: client_of(99, 1), session: 1 };
    let holder = *locks.sessions.keys().next().unwrap();
    let ended = LockChange::Ended { client: holder.0, session: holder.1 };
    let more = encode(std::slice::from_ref(&began));
    assert_eq!(copy.take(9, place(2, false), &more), Err(ImpossibleChange));
    let both = encode(&[began, ended]);
    assert_eq!(copy.take(9, place(2, false), &both), Ok(CopyOutcome::Made));
    // And of one owner on one file.
    let mut locks = PoolLocks::default();
    let holder = begun(&mut locks, 1);
    let taken = (0..5000).take_while(|at| locks.lock(FILE, holder, spread(*at)).is_ok());
    assert_eq!(taken.count(), MAX_LOCKS_OF_OWNER);
}

#[test]
fn a_copy_takes_changes_in_order_and_once_from_a_whole_state_on() {
    let mut locks = PoolLocks::after(40);
    let place = |sequence, is_whole| LockPlace { sequence, last_session: 41, is_whole };
    let one = begun(&mut locks, 1);
    let whole = encode_whole(&locks);
    let taken = encode(&[locks.lock(FILE, one, exclusive()).unwrap().unwrap()]);
    let given_up = encode(&[locks.keep(FILE, one, &[]).unwrap().unwrap()]);
    let mut copy = LockCopy::default();
    assert_eq!(copy.take(9, place(6, false), &taken), Ok(CopyOutcome::TooEarly));
    assert_eq!(copy.take(9, place(5, true), &whole), Ok(CopyOutcome::Made));
    assert_eq!(copy.take(9, place(7, false), &given_up), Ok(CopyOutcome::TooEarly));
    assert_eq!(copy.take(9, place(6, false), &taken), Ok(CopyOutcome::Made));
    assert_eq!(copy.counts(), (1, 1));
    // Late: they change nothing.
    assert_eq!(copy.take(9, place(5, true), &whole), Ok(CopyOutcome::Made));
    assert_eq!(copy.take(9, place(6, false), &taken), Ok(CopyOutcome::Made));
    assert_eq!(copy.take(9, place(7, false), &given_up), Ok(CopyOutcome::Made));
    assert_eq!(copy.take(9, place(6, false), &taken), Ok(CopyOutcome::Made));
    assert_eq!(copy.counts(), (1, 0));
    // Another primary may count otherwise.
    assert_eq!(copy.take(8, place(8, false), &taken), Ok(CopyOutcome::TooEarly));
    assert_eq!(copy.take(8, place(3, true), &whole), Ok(CopyOutcome::Made));
    assert_eq!(copy.take(8, place(4, false), &taken), Ok(CopyOutcome::Made));
    let (mut after, sequence) = copy.for_primary(9);
    assert_eq!((after.counts(), sequence), ((1, 1), 4));
    assert_eq!(after.begin(client(2), 0).unwrap().0, 42, "no number is given twice");
}

#[test]
fn changes_that_cannot_be_are_refused() {
    let mut locks = PoolLocks::default();
    let one = begun(&mut locks, 1);
    let held = |last| {
        let lock = WireLock { is_exclusive: true, first: 5, last, pid: 0, through: None };
        encode(&[LockChange::Held { inode: 7, holder: one, locks: vec![lock].into() }])
    };
    let place = LockPlace { sequence: 1, last_session: 1, is_whole: true };
    let mut copy = LockCopy::default();
    assert_eq!(copy.take(9, place, &held(9)), Err(ImpossibleChange), "of no session");
    assert_eq!(copy.take(9, place, b"?"), Err(ImpossibleChange));
    copy.take(9, place, &encode_whole(&locks)).unwrap();
    let place = LockPlace { sequence: 2, is_whole: false, ..place };
    for last in [4, u64::MAX] {
        assert_eq!(copy.take(9, place, &held(last)), Err(ImpossibleChange));
    }
    assert_eq!(copy.counts(), (1, 0), "nothing of it is made");
    copy.take(9, place, &held(9)).unwrap();
    assert_eq!(copy.counts(), (1, 1));
}

/// What a random client does.
#[derive(Clone, Copy, Debug)]
enum Step {
    Lock { holder: (u8, u64), inode: u64, is_exclusive: bool, range: (u64, u64) },
    Unlock { holder: (u8, u64), inode: u64, range: (u64, u64) },
    End(u8),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let holder = || (0u8..3, 0u64..3);
    let range = || (0u64..12, 0u64..6).prop_map(|(first, more)| (first, first + more));
    let lock = (holder(), 0u64..2, any::<bool>(), range());
    let lock = lock.prop_map(|(holder, inode, is_exclusive, range)| Step::Lock {
        holder,
        inode,
        is_exclusive,
        range,
    });
    let unlock = (holder(), 0u64..2, range()).prop_map(|(holder, inode, range)| Step::Unlock {
        holder,
        inode,
        range,
    });
    let step = prop_oneof![6 => lock, 3 => unlock, 1 => (0u8..3).prop_map(Step::End)];
    proptest::collection::vec(step, 1..80)
}

/// Per byte of each file: who holds it, and how.
type Model = BTreeMap<(u64, u64), BTreeMap<(u8, u64), bool>>;

proptest! {
    /// Every byte has one exclusive holder or shared ones, as a model byte by byte says; and a copy is the same all the time.
    #[test]
    fn no_two_holders_conflict(steps in steps()) {
        let mut locks = PoolLocks::default();
        let mut copy = LockCopy::default();
        let whole = LockPlace { sequence: 1, last_session: 0, is_whole: true };
        copy.take(1, whole, &encode_whole(&locks)).unwrap();
        let mut model = Model::new();
        for (sequence, step) in (2..).zip(steps) {
            let mut changes = Vec::new();
            let mut holder_of = |locks: &mut PoolLocks, (number, owner): (u8, u64)| {
                let client = client(number);
                let session = locks.session_of(client).unwrap_or_else(|| {
                    let (session, change) = locks.begin(client, 0).unwrap();
                    changes.push(change);
                    session
                });
                LockHolder { client, session, owner }
            };
            match step {
                Step::Lock { holder, inode, is_exclusive, range: (first, last) } => {
                    let of = holder_of(&mut locks, holder);
                    let kind = if is_exclusive { LockKind::Exclusive } else { LockKind::Shared };
                    // Without a process: each owner is another one.
                    let range = LockRange { first, last };
                    let wanted = FileLock { kind, range, pid: 0, through: None };
                    let taken = locks.lock(InodeNumber(inode), of, wanted);
                    let is_free = (first..=last).all(|byte| {
                        model.get(&(inode, byte)).is_none_or(|holders| holders.iter().all(
                            |(other, other_is)| *other == holder || !(is_exclusive || *other_is),
                        ))
                    });
                    prop_assert_eq!(taken.is_ok(), is_free);
                    changes.extend(taken.unwrap_or(None));
                    if is_free {
                        for byte in first..=last {
                            model.entry((inode, byte)).or_default().insert(holder, is_exclusive);
                        }
                    }
                }
                Step::Unlock { holder, inode, range: (first, last) } => {
                    let of = holder_of(&mut locks, holder);
                    let mut kept = RangeLocks::default();
                    kept.replace(of, locks.of(InodeNumber(inode), of));
                    kept.cut(of, LockRange { first, last });
                    let kept: Vec<FileLock> = kept.of(of).collect();
                    changes.extend(locks.keep(InodeNumber(inode), of, &kept).unwrap());
                    for byte in first..=last {
                        if let Some(holders) = model.get_mut(&(inode, byte)) {
                            holders.remove(&holder);
                        }
                    }
                }
                Step::End(number) => {
                    if let Some(session) = locks.session_of(client(number)) {
                        prop_assert!(locks.retire(client(number), session));
                        changes.push(locks.end(client(number), session).0);
                        for holders in model.values_mut() {
                            holders.retain(|(other, _), _| *other != number);
                        }
                    }
                }
            }
            locks.check_invariants();
            for inode in 0..2 {
                for byte in 0..20 {
                    let held = locks.files.get(&InodeNumber(inode));
                    let held = held.into_iter().flat_map(RangeLocks::iter);
                    let held = held.filter(|(_, lock)| (lock.range.first..=lock.range.last).contains(&byte));
                    let held: std::collections::BTreeSet<(u64, bool)> = held
                        .map(|(holder, lock)| (holder.owner, lock.kind == LockKind::Exclusive))
                        .collect();
                    let wanted = model.get(&(inode, byte)).into_iter().flatten();
                    let wanted = wanted.map(|((_, owner), is)| (*owner, *is)).collect();
                    prop_assert_eq!(held, wanted);
                }
            }
            let last_session = locks.last_session();
            let place = LockPlace { sequence, last_session, is_whole: false };
            prop_assert_eq!(copy.take(1, place, &encode(&changes)), Ok(CopyOutcome::Made));
            prop_assert_eq!(copy.locks.whole(), locks.whole());
            // And a copy that begins now is the same.
            let mut late = LockCopy::default();
            late.take(2, LockPlace { is_whole: true, ..place }, &encode_whole(&locks)).unwrap();
            prop_assert_eq!(late.locks.whole(), locks.whole());
        }
    }
}
