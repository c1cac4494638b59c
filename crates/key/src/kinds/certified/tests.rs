//! What Pastis §3.4 asks of certificates, and what joining promises.

use bytes::Bytes;
use proptest::prelude::*;

use super::sibling::Said;
use super::sibling::{MAX_HEIGHT, MS_PER_HEIGHT};
use super::*;
use crate::hash::BlockHash;
use crate::identity::{GroupId, SecretKey, UserId, VolumeId};
use crate::kinds::{BlockKind, MAX_RELEASED};

const KIND: BlockKind = BlockKind::Certified;
/// Seconds since 1970, within all certificates that tests issue.
const NOW_SECS: u64 = 1_000_000;
const NOW_MS: u64 = NOW_SECS * 1000;

fn secret(n: u8) -> SecretKey {
    SecretKey::from_seed(&[n; 32])
}

fn group(n: u8) -> SecretKey {
    secret(100 + n)
}

fn group_id(n: u8) -> GroupId {
    GroupId(group(n).public())
}

fn volume() -> SecretKey {
    secret(200)
}

/// A member of group `of`, with a series of writes of its own.
fn author_in(n: u8, of: u8) -> Author {
    let user = UserId(secret(n).public());
    let certificate = Certificate::issue(&group(of), user, NOW_SECS - 1000, NOW_SECS + 1000);
    Author { secret: secret(n), certificate, writer: WriterId::new(&user, [n; 8]) }
}

fn author(n: u8) -> Author {
    author_in(n, 0)
}

fn binding() -> Binding {
    let volume = VolumeId(volume().public());
    Binding::new(volume, [7; 16], &[group_id(0)]).expect("one group")
}

fn create() -> CertifiedBlock {
    CertifiedBlock::create(binding(), &author(1), NOW_MS, b"first").expect("a member")
}

fn write(seen: &CertifiedBlock, n: u8, payload: &str) -> CertifiedBlock {
    seen.write(&author(n), NOW_MS, Some(payload.as_bytes())).expect("a member")
}

fn payloads(block: &CertifiedBlock) -> Vec<&[u8]> {
    let mut all: Vec<&[u8]> = block.siblings().iter().map(|one| &one.payload[..]).collect();
    all.sort_unstable();
    all
}

fn verify(block: &CertifiedBlock) -> Result<u64, InvalidBlock> {
    KIND.verify(&block.key(), block.bytes())
}

fn joined(a: &CertifiedBlock, b: &CertifiedBlock) -> CertifiedBlock {
    let joined = a.join(b).expect("one inode");
    assert_eq!(verify(&joined), Ok(joined.version()));
    let both = (joined.bytes().to_vec(), joined.version());
    assert_eq!(KIND.join(a.bytes(), b.bytes()), Some(both));
    joined
}

/// Pastis §3.4: a user signs the block "and provide\[s\] a certificate which proves that she has write
/// permission on that file"; both are checked.
#[test]
fn a_block_verifies_if_each_link_from_inode_to_writer_does() {
    let block = create();
    assert_eq!(verify(&block), Ok(block.version()));
    assert_eq!(CertifiedBlock::decode(block.bytes()), Ok(block.clone()));
    assert_eq!(payloads(&block), [b"first"]);

    let outsider = author_in(2, 1);
    assert_eq!(CertifiedBlock::create(binding(), &outsider, NOW_MS, b""), None);
    assert_eq!(block.write(&outsider, NOW_MS, Some(b"")), None);
    let forged = Certificate { group: group_id(0), ..outsider.certificate };
    assert_eq!(block.write(&Author { certificate: forged, ..outsider }, NOW_MS, Some(b"")), None);
    let stolen = Author { certificate: author(1).certificate, ..author(2) };
    assert_eq!(block.write(&stolen, NOW_MS, Some(b"")), None);
    let in_anothers_name = Author { writer: author(1).writer, ..author(2) };
    assert_eq!(block.write(&in_anothers_name, NOW_MS, Some(b"")), None);
    // Outside the certificate's time.
    for time_ms in [NOW_MS - 2_000_000, NOW_MS + 2_000_000] {
        assert_eq!(block.write(&author(1), time_ms, Some(b"")), None);
    }
    let elsewhere = Binding::new(VolumeId(volume().public()), [8; 16], &[group_id(0)]);
    let elsewhere = elsewhere.expect("one group").key();
    assert_eq!(KIND.verify(&elsewhere, block.bytes()), Err(InvalidBlock::WrongHash));
}

/// Every bit of a block is signed, named by the key, or fixed by the layout.
#[test]
fn no_bit_of_a_block_can_be_changed() {
    let old = write(&create(), 2, "two");
    let rebinding = Rebinding::sign(&volume(), &old.key(), 1, &[group_id(0)]).expect("one group");
    let new = write(&old.rebound(rebinding).expect("newer"), 3, "new");
    let block = joined(&new, &write(&old, 4, "concurrent"));
    assert_eq!(block.siblings().len(), 2);
    let bytes = block.bytes().to_vec();
    for at in 0..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 1 << (at % 8);
        assert!(KIND.verify(&block.key(), &changed).is_err(), "byte {at}");
    }
    for cut in [0, 1, 60, bytes.len() / 2, bytes.len() - 1] {
        assert!(KIND.verify(&block.key(), &bytes[..cut]).is_err(), "cut at {cut}");
    }
    assert!(KIND.verify(&block.key(), &[&bytes[..], &[0]].concat()).is_err());
}

/// Pastis §3.1: "if two or more clients update an inode concurrently, then a conflict will most
/// probably occur". There the last writer wins; here none loses.
#[test]
fn what_a_writer_has_seen_is_covered_and_concurrent_versions_stay() {
    let first = create();
    let second = write(&first, 2, "second");
    assert_eq!(payloads(&joined(&first, &second)), [b"second"]);
    assert!(second.includes(&first) && !first.includes(&second));

    let (a, b) = (write(&second, 1, "a"), write(&second, 2, "b"));
    let both = joined(&a, &b);
    assert_eq!(payloads(&both), [b"a", b"b"]);
    assert_eq!(both, joined(&b, &a));
    assert!(both.includes(&a) && both.includes(&b) && both.includes(&first));
    let merged = write(&both, 3, "merged");
    assert_eq!(payloads(&joined(&merged, &both)), [b"merged"]);
    // One who had seen only one of them covers only that one.
    let later = write(&a, 3, "later");
    assert_eq!(payloads(&joined(&later, &both)), [&b"b"[..], b"later"]);
    // A clock that is far behind does not decide.
    let slow = merged.write(&author(4), NOW_MS - 900_000, Some(b"slow")).expect("a member");
    assert_eq!(payloads(&joined(&slow, &merged)), [b"slow"]);
}

#[test]
fn a_removed_inode_is_a_tombstone_unless_somebody_wrote_meanwhile() {
    let block = create();
    let removed = block.write(&author(1), NOW_MS, None).expect("a member");
    assert!(KIND.is_tombstone(removed.bytes()) && !KIND.is_tombstone(block.bytes()));
    let both = joined(&removed, &write(&block, 2, "meanwhile"));
    assert!(!KIND.is_tombstone(both.bytes()));
    let left = [7; MAX_REMOVAL_PAYLOAD_BYTES];
    let removed = block.remove(&author(1), NOW_MS, &left).expect("a member");
    assert!(KIND.is_tombstone(removed.bytes()) && verify(&removed).is_ok());
    let decoded = CertifiedBlock::decode_verified(removed.bytes()).expect("it was just signed");
    assert_eq!(decoded.siblings()[0].payload[..], left);
    assert_eq!(block.remove(&author(1), NOW_MS, &[&left[..], b"1"].concat()), None);
}

/// A file would vanish when its last writer's certificate runs out; and a certificate that has run
/// out must be of no use.
#[test]
fn a_certificate_is_checked_against_the_clock_once_and_against_the_signed_time_for_ever() {
    let first = create();
    let second = write(&first, 2, "second");
    let admit = |now_ms| KIND.admit(Some(first.bytes()), second.bytes(), now_ms);
    assert_eq!(admit(NOW_MS), Ok(()));
    let not_after_secs = NOW_SECS + 1000;
    let late = not_after_secs * 1000 + 1000;
    assert!(matches!(admit(late), Err(NotAdmitted::Clock { .. })));
    // Written while it was valid, and sent a little too late.
    let last = first.write(&author(2), not_after_secs * 1000, Some(b"last")).expect("valid still");
    let refused = KIND.admit(Some(first.bytes()), last.bytes(), late);
    assert_eq!(refused, Err(NotAdmitted::Expired { not_after_secs }));
    assert!(verify(&last).is_ok(), "those that have it may keep it");
    // What is held already is not new.
    assert_eq!(KIND.admit(Some(last.bytes()), last.bytes(), late), Ok(()));
}

#[test]
fn a_member_who_is_shut_out_covers_nothing_written_since() {
    let first = create();
    let rebinding = Rebinding::sign(&volume(), &first.key(), 1, &[group_id(1)]).expect("a group");
    let forged = Rebinding::sign(&secret(9), &first.key(), 1, &[group_id(1)]).expect("a group");
    assert_eq!(first.rebound(forged), None);
    let rebound = first.rebound(rebinding.clone()).expect("the owner's");
    assert_eq!(rebound.groups(), [group_id(1)]);
    assert_eq!(rebound.rebound(rebinding), None, "not newer");
    assert_eq!(rebound.write(&author(2), NOW_MS, Some(b"")), None, "not in the new group");
    let owner = author_in(1, 1);
    let kept = rebound.write(&owner, NOW_MS, Some(b"kept")).expect("in the new group");

    // A replica that knows of the rebinding takes nothing fresh under the old one ...
    let late = write(&write(&first, 2, "late"), 2, "later");
    let refused = KIND.admit(Some(kept.bytes()), late.bytes(), NOW_MS);
    assert_eq!(refused, Err(NotAdmitted::Outdated));
    // ... and what comes from one that did not know is kept beside, not instead.
    assert_eq!(payloads(&joined(&late, &kept)), [&b"kept"[..], b"later"]);
    assert_eq!(joined(&late, &kept).binding_version(), 1);
    let seen = joined(&late, &kept).write(&owner, NOW_MS, Some(b"all")).expect("a member");
    assert_eq!(payloads(&joined(&late, &seen)), [b"all"]);
}

/// A removed member with the siblings of a whole block, each higher than what was written since, took
/// the place of that, and kept replicas from taking more of it.
#[test]
fn a_member_who_is_shut_out_does_not_crowd_out_the_others() {
    let first = create();
    let rebinding = Rebinding::sign(&volume(), &first.key(), 1, &[group_id(1)]).expect("a group");
    let rebound = first.rebound(rebinding).expect("newer");
    let kept = rebound.write(&author_in(1, 1), NOW_MS, Some(b"kept")).expect("a member");
    let crowd = (0..MAX_SIBLINGS as u8).map(|n| {
        let writer = WriterId::new(&UserId(secret(2).public()), [n; 8]);
        let author = Author { writer, ..author(2) };
        let late =
            |block: CertifiedBlock| block.write(&author, NOW_MS, Some(&[n])).expect("signed");
        late(late(first.clone()))
    });
    let crowd = crowd.reduce(|a, b| joined(&a, &b)).expect("some");
    let all = joined(&kept, &crowd);
    assert!(all.includes(&kept), "{:?}", payloads(&all));
    let concurrent = rebound.write(&author_in(3, 1), NOW_MS, Some(b"too")).expect("a member");
    assert_eq!(KIND.admit(Some(all.bytes()), concurrent.bytes(), NOW_MS), Ok(()));
}

/// Siblings under as many rebindings as there may be, and a newer one, made no block: replicas that
/// held them could not join what they held.
#[test]
fn blocks_are_joined_however_many_rebindings_they_name() {
    let first = create();
    let bound = |version: u32| {
        let rebinding = Rebinding::sign(&volume(), &first.key(), version, &[group_id(0)]);
        let rebound = first.rebound(rebinding.expect("one group")).expect("newer");
        (rebound.clone(), write(&rebound, version as u8, "under it"))
    };
    let all = (1..=MAX_SIBLINGS as u32).map(|version| bound(version).1);
    let all = all.reduce(|a, b| joined(&a, &b)).expect("some");
    assert_eq!(all.siblings().len(), MAX_SIBLINGS);
    assert_eq!(joined(&all, &bound(100).0).binding_version(), 100);
}

/// A member used up all heights with one sibling, which any node could bring as a copy; nobody could write
/// the inode again, not even after a rebinding.
#[test]
fn a_writer_climbs_no_higher_than_others_can_follow() {
    let first = create();
    let high = |height: u64, time_ms: u64| {
        let mut seen = first.siblings().to_vec();
        seen[0].dot.height = height - 1;
        let author = Author {
            certificate: Certificate::issue(&group(0), UserId(secret(2).public()), 0, u64::MAX),
            ..author(2)
        };
        let sibling =
            Sibling::sign(&author, &first.key(), (0, &seen[..]), time_ms, Said::Inode(b""));
        let bytes = first.bytes();
        let at = bytes.len() - first.siblings()[0].encoded().len();
        let block = Bytes::from([&bytes[..at], sibling.expect("a member").encoded()].concat());
        CertifiedBlock::decode(&block).expect("signed")
    };
    let highest = (NOW_MS + CLOCK_SLACK_MS) / MS_PER_HEIGHT;
    let admit = |block: &CertifiedBlock| KIND.admit(Some(first.bytes()), block.bytes(), NOW_MS);
    let block = high(highest, NOW_MS);
    assert_eq!((admit(&block), KIND.admit_copy(block.bytes(), NOW_MS)), (Ok(()), Ok(())));
    // Others go on from there, at that time or later.
    let next = joined(&block, &first).write(&author(3), NOW_MS, Some(b"next")).expect("a member");
    let a_moment_later = KIND.admit(Some(block.bytes()), next.bytes(), NOW_MS + MS_PER_HEIGHT);
    assert_eq!(a_moment_later, Ok(()));
    assert_eq!(payloads(&joined(&next, &block)), [b"next"]);
    for height in [highest + 1, MAX_HEIGHT - 1] {
        let block = high(height, NOW_MS);
        assert!(matches!(admit(&block), Err(NotAdmitted::Clock { .. })));
        let copy = KIND.admit_copy(block.bytes(), NOW_MS);
        assert!(matches!(copy, Err(NotAdmitted::Clock { .. })));
    }
}

#[test]
fn writers_read_before_they_add_a_ninth_sibling_and_both_sides_of_a_partition_are_kept() {
    let first = create();
    let side = |numbers: std::ops::Range<u8>| {
        let writes = numbers.map(|n| write(&first, n, &format!("{n:02}")));
        writes.reduce(|a, b| joined(&a, &b)).expect("some")
    };
    let (here, there) = (side(10..18), side(20..28));
    let ninth = write(&first, 18, "ninth");
    let refused = KIND.admit(Some(here.bytes()), ninth.bytes(), NOW_MS);
    assert_eq!(refused, Err(NotAdmitted::Outdated));
    let read = write(&here, 18, "after reading");
    assert_eq!(KIND.admit(Some(here.bytes()), read.bytes(), NOW_MS), Ok(()));
    let both = joined(&here, &there);
    assert_eq!(both.siblings().len(), MAX_SIBLINGS);
    assert_eq!(joined(&both, &ninth).siblings().len(), MAX_SIBLINGS);
    // What both have counts once: of a full block that met itself half of the siblings were dropped.
    assert_eq!(joined(&both, &both), both);
    assert_eq!(joined(&both, &here), both);
    assert_eq!(joined(&there, &both), both);
}

#[test]
fn the_largest_block_can_be_stored() {
    let (long, many) = (vec![7; MAX_PAYLOAD_BYTES], 2 * MAX_CONTEXT as u64);
    let mut block = create();
    for n in 0..many {
        let mut author = author(1);
        author.writer = WriterId::new(&author.certificate.user, n.to_be_bytes());
        block = block.write(&author, NOW_MS, Some(b"")).expect("a member");
    }
    let writes = (1..=MAX_SIBLINGS as u8)
        .map(|n| block.write(&author(n), NOW_MS, Some(&long)).expect("as long as may be"));
    let all = writes.reduce(|a, b| a.join(&b).expect("one inode")).expect("some");
    assert_eq!(all.siblings().len(), MAX_SIBLINGS);
    assert!(verify(&all).is_ok());
    assert_eq!(block.write(&author(1), NOW_MS, Some(&[&long[..], b"1"].concat())), None);
}

/// What was forgotten comes back as a conflict, and nothing else changes.
#[test]
fn a_context_forgets_the_lowest_writers_first() {
    let first = create();
    let mut block = first.clone();
    let mut states = vec![first];
    for n in 0..2 * MAX_CONTEXT as u64 {
        let mut author = author(2);
        author.writer = WriterId::new(&author.certificate.user, n.to_be_bytes());
        block = block.write(&author, NOW_MS, Some(b"x")).expect("a member");
        states.push(block.clone());
    }
    for (age, old) in states.iter().rev().enumerate() {
        let siblings = joined(&block, old).siblings().len();
        assert_eq!(siblings, if age <= MAX_CONTEXT { 1 } else { 2 }, "{age}");
    }
}

/// What a member writes who claims to have seen `claimed`.
fn claim(block: &CertifiedBlock, n: u8, claimed: &[Dot]) -> Vec<u8> {
    let honest = write(block, n, "claims").siblings()[0].clone();
    let (head, count) = (4 + 5 + 144 + 16 + 8 + 8, honest.encoded()[4 + 5 + 144 + 16 + 8 + 8]);
    let mut signed = honest.encoded()[4..head].to_vec();
    signed.push(claimed.len() as u8);
    for Dot { writer, height } in claimed {
        signed.extend_from_slice(writer.as_bytes());
        signed.extend_from_slice(&height.to_be_bytes());
    }
    let rest = head + 1 + 24 * usize::from(count);
    signed.extend_from_slice(&honest.encoded()[rest..honest.encoded().len() - 64]);
    let message = [&b"atoll v1 certified sibling\0"[..], &block.key().0[..32], &signed].concat();
    let len = (signed.len() as u32 + 64).to_be_bytes();
    let sibling = [&len[..], &signed, &secret(n).sign(&message)].concat();
    let at = block.bytes().len() - block.siblings()[0].encoded().len();
    [&block.bytes()[..at], &sibling].concat()
}

/// A member claimed to have seen 128 others, higher than what a reader saw. Writers took that over and
/// forgot instead the siblings that they replaced: these stayed, beside all that was written later,
/// until there were eight and no replica took a ninth.
#[test]
fn a_writer_covers_all_that_is_seen_whatever_others_claim() {
    let mut block = create();
    for n in 0..20 {
        block = write(&block, 1 + n % 2, "before");
    }
    let others = |height| -> Vec<Dot> {
        let writer = |n: u8| WriterId::new(&UserId([n; 32]), [0; 8]);
        (0..MAX_CONTEXT as u8).map(|n| Dot { writer: writer(n), height }).collect()
    };
    let height = block.height();
    let claimed = Bytes::from(claim(&block, 3, &others(height)));
    let claimed = CertifiedBlock::decode(&claimed).expect("a member may claim so much");
    let both = joined(&joined(&claimed, &create()), &write(&create(), 4, "low"));
    assert!(both.siblings().len() > 1);
    let mut newest = both.clone();
    for n in 0..20 {
        newest = joined(&newest, &write(&newest, 5 + n, "after"));
        assert_eq!(payloads(&newest), [b"after"], "{n}");
    }
    // Nobody has seen what is higher than his own, and others need not carry it on for ever.
    let above = claim(&block, 3, &others(height + 1));
    let refused = InvalidBlock::Malformed("a context above its writer");
    assert_eq!(KIND.verify(&block.key(), &above), Err(refused));
}

proptest! {
    /// Writers that write and exchange what they hold in any order: whoever has exchanged with all
    /// holds the same, no version was lost that nobody had seen, and heights never sink.
    #[test]
    fn replicas_that_exchange_all_they_hold_agree(
        steps in proptest::collection::vec((0usize..4, 0usize..4, any::<bool>()), 0..24)
    ) {
        let mut replicas = vec![create(); 4];
        let mut uncovered: Vec<(CertifiedBlock, String)> = Vec::new();
        for (number, (at, other, writes)) in steps.into_iter().enumerate() {
            let before = replicas[at].version() >> 24;
            if writes {
                let payload = format!("{number:03}");
                let new = write(&replicas[at], at as u8 + 1, &payload);
                uncovered.retain(|(old, _)| !replicas[at].includes(old));
                replicas[at] = joined(&replicas[at], &new);
                uncovered.push((new, payload));
            } else {
                replicas[at] = joined(&replicas[at], &replicas[other]);
            }
            prop_assert!(replicas[at].version() >> 24 >= before);
        }
        let forwards = replicas.iter().cloned().reduce(|a, b| joined(&a, &b)).expect("four");
        let backwards = replicas.iter().rev().cloned().reduce(|a, b| joined(&a, &b));
        prop_assert_eq!(&backwards.expect("four"), &forwards);
        for replica in &replicas {
            prop_assert_eq!(&joined(&forwards, replica), &forwards);
        }
        let mut expected: Vec<&[u8]> = uncovered.iter().map(|(_, text)| text.as_bytes()).collect();
        if expected.is_empty() {
            expected.push(b"first");
        }
        expected.sort_unstable();
        prop_assert_eq!(payloads(&forwards), expected);
    }

    #[test]
    fn any_bytes_are_refused_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let bytes = [&b"ATCB\x01"[..], &bytes].concat();
        prop_assert!(KIND.verify(&binding().key(), &bytes).is_err());
        let _ = KIND.join(&bytes, create().bytes());
        let _ = KIND.admit(Some(&bytes), create().bytes(), NOW_MS);
    }
}

fn release(inode: &CertifiedBlock, by: &Author) -> Option<InodeRelease> {
    let blocks = [BlockHash([2; 32]), BlockHash([1; 32])];
    InodeRelease::sign(inode, by, NOW_MS, 5, &blocks)
}

#[test]
fn a_release_by_a_writer_reads_back_and_leaves_two_days() {
    let one = release(&create(), &author(2)).expect("a member");
    assert_eq!(InodeRelease::decode(one.bytes()), Ok(one.clone()));
    assert_eq!((one.verify(), one.admit(NOW_MS)), (Ok(()), Ok(())));
    assert_eq!(one.lease_secs, MIN_RELEASED_LEASE_SECS);
    assert_eq!(one.inode()[..], create().key().0[..32]);
    let keys: Vec<Key> = one.keys().collect();
    assert_eq!(keys, [BlockHash([1; 32]).key(), BlockHash([2; 32]).key()]);
    assert_eq!(InodeRelease::sign(&create(), &author(2), NOW_MS, 5, &[]), None);
    let many: Vec<BlockHash> = (0..=MAX_RELEASED as u8).map(|n| BlockHash([n; 32])).collect();
    assert_eq!(InodeRelease::sign(&create(), &author(2), NOW_MS, 5, &many), None);
}

#[test]
fn only_writers_release_and_only_now() {
    let one = release(&create(), &author(2)).expect("a member");
    assert_eq!(release(&create(), &author_in(2, 1)), None, "of another group");
    // As a stranger would make it: bound to the own group, in place of the inode's.
    let strangers = Binding::new(VolumeId(volume().public()), [7; 16], &[group_id(1)]);
    let strangers = CertifiedBlock::create(strangers.expect("one"), &author_in(3, 1), NOW_MS, b"");
    let by_stranger = release(&strangers.expect("a member"), &author_in(3, 1)).expect("its own");
    assert_ne!(by_stranger.inode(), one.inode());

    let late = NOW_MS + 601_000;
    assert!(matches!(one.admit(late), Err(NotAdmitted::Clock { .. })), "a replay");
    let old =
        InodeRelease::sign(&create(), &author(2), NOW_MS + 2_000_000, 5, &[BlockHash([1; 32])]);
    let old = old.expect("a member").admit(NOW_MS + 2_000_000);
    assert!(matches!(old, Err(NotAdmitted::Expired { .. })), "{old:?}");
}

#[test]
fn a_changed_release_is_refused() {
    let rebinding = Rebinding::sign(&volume(), &create().key(), 1, &[group_id(0), group_id(1)]);
    let rebound = create().rebound(rebinding.expect("one group")).expect("newer");
    for one in [release(&create(), &author(2)), release(&rebound, &author_in(2, 1))] {
        let one = one.expect("a member");
        assert_eq!(one.verify(), Ok(()));
        for at in 0..one.bytes().len() {
            let mut bytes = one.bytes().to_vec();
            bytes[at] ^= 1;
            let changed = InodeRelease::decode(&bytes.into());
            assert!(changed.and_then(|changed| changed.verify()).is_err(), "byte {at}");
        }
        for len in 0..one.bytes().len() {
            assert!(InodeRelease::decode(&one.bytes().slice(..len)).is_err(), "{len} bytes");
        }
    }
}
