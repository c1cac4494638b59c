//! Keepers of a shared volume: what their nodes do while the owner is away, and that nothing a keeper has done outlasts
//! its being one.

use std::sync::Arc;

use atoll_dht::Blocks;
use atoll_env::Env;
use atoll_key::kinds::certified::Certificate;
use atoll_key::{
    BlockHash, BlockKind, GroupId, NotAdmitted, SecretKey, SignedBlock, UserId, volume_group,
};
use atoll_volume::format::FormatError;
use atoll_volume::shared::access::group_record::RECORD_NAME;
use atoll_volume::shared::access::groups::{
    add_volume_member, begin_epoch, begin_epoch_without_keeper, change_group, change_volume,
    put_group, renew_volume,
};
use atoll_volume::shared::access::keepers::{
    add_keeper, follow_epochs, remove_volume_member, renew_as_keeper, volume_members,
};
use atoll_volume::shared::access::{
    AccessError, Credentials, GroupRecord, KeeperRecord, ListedMember, Member, NewVolume,
    NotAllowed, VolumeRecord, create, read_group, read_keepers, read_readers, read_volume,
};
use bytes::Bytes;

use super::access::{Ring, directory, held, made, new_volume, now_secs, pass, rebind_all, volume};
use super::{inode, secret, writer};

const DAY: u64 = 24 * 3600;
/// Users: the owner, a member, two keepers, and one whom nobody has granted anything.
const OWNER: u8 = 1;
const BOB: u8 = 2;
const CAROL: u8 = 3;
const DAVE: u8 = 4;
const MALLORY: u8 = 9;

fn user(n: u8) -> UserId {
    secret(n).user_id()
}

async fn add(env: &Env, blocks: &Arc<dyn Blocks>, n: u8, label: &str) {
    let (_, record) = newest(blocks).await;
    let volume = (&volume(), &record);
    add_volume_member(env, blocks, volume, (user(n), label), 0).await.expect("is added");
}

async fn newest(blocks: &Arc<dyn Blocks>) -> (SignedBlock, VolumeRecord) {
    read_volume(blocks, volume().volume_id()).await.expect("reads").expect("there")
}

async fn name_keeper(env: &Env, blocks: &Arc<dyn Blocks>, n: u8) {
    let (_, record) = newest(blocks).await;
    add_keeper(env, blocks, (&volume(), &record), user(n)).await.expect("is a keeper");
}

/// A volume with a member and two keepers.
async fn kept() -> (Env, Arc<dyn Blocks>, VolumeRecord) {
    let (env, _, blocks) = Ring::new();
    let record = made(&env, &blocks).await;
    for (n, label) in [(BOB, "bob"), (CAROL, "carol"), (DAVE, "dave")] {
        add(&env, &blocks, n, label).await;
    }
    for n in [CAROL, DAVE] {
        name_keeper(&env, &blocks, n).await;
    }
    (env, blocks, record)
}

async fn renewed_by(env: &Env, blocks: &Arc<dyn Blocks>, n: u8) -> Option<usize> {
    let renewed = renew_as_keeper(env, blocks, volume().volume_id(), &secret(n)).await;
    renewed.expect("the ring answers").map(|renewal| renewal.renewed)
}

/// The key that a keeper has.
async fn key_of(blocks: &Arc<dyn Blocks>, n: u8) -> Option<SecretKey> {
    let record = read_keepers(blocks, volume().volume_id()).await.expect("reads").expect("there");
    record.keys_of(&secret(n), &volume().volume_id()).pop()
}

/// A new mount of a user's writes the root directory, and a replica decides.
async fn writes(env: &Env, blocks: &Arc<dyn Blocks>, n: u8) -> Result<(), NotAllowed> {
    let (_, record) = newest(blocks).await;
    let root = held(blocks, record.root).await;
    let credentials = Credentials::new(env.clone(), blocks.clone(), Some(secret(n)));
    let author = credentials.author(root.groups(), writer(n)).await?;
    let payload = inode(directory()).encode().expect("short");
    let written = root.write(&author, env.unix_ms(), Some(&payload)).expect("a member");
    let admitted = BlockKind::Certified.admit(Some(root.bytes()), written.bytes(), env.unix_ms());
    assert_eq!(admitted, Ok(()), "user {n}");
    Ok(())
}

async fn labels(blocks: &Arc<dyn Blocks>, group: GroupId) -> Vec<String> {
    let record = read_group(blocks, group).await.expect("reads").expect("there");
    let mut labels: Vec<String> = record.members.into_values().map(|one| one.label).collect();
    labels.sort();
    labels
}

async fn listed(blocks: &Arc<dyn Blocks>) -> (Vec<String>, Vec<UserId>) {
    let (_, record) = newest(blocks).await;
    let (members, strangers) = volume_members(blocks, &volume(), &record).await.expect("reads");
    let mut labels: Vec<String> = members.members.into_values().map(|one| one.label).collect();
    labels.sort();
    (labels, strangers)
}

/// Binds everything to the present epoch, as `atoll revoke` does.
async fn bind(env: &Env, blocks: &Arc<dyn Blocks>) {
    let (_, record) = newest(blocks).await;
    let present = volume_group(&volume(), record.group_epoch).group_id();
    rebind_all(env, blocks, record.root, &|_| vec![present]).await;
    let (_, record) = change_volume(env, blocks, &volume(), |record| {
        record.bound_epoch = record.group_epoch;
    })
    .await
    .expect("is put");
    follow_epochs(env, blocks, &volume(), &record).await.expect("is put");
}

/// The story: a team whose owner was on holiday could not write after a week.
#[tokio::test(start_paused = true)]
async fn members_write_while_the_owner_is_away_for_three_weeks() {
    let (env, blocks, _) = kept().await;
    for day in 1..=21 {
        pass(DAY).await;
        // One keeper's node runs, another one's is away in the second week.
        let keeper = if (8..15).contains(&day) { DAVE } else { CAROL };
        let renewed = renewed_by(&env, &blocks, keeper).await;
        assert!(renewed.is_some(), "day {day}");
        assert_eq!(renewed_by(&env, &blocks, BOB).await, None, "a member is no keeper");
        for n in [OWNER, BOB, CAROL, DAVE] {
            writes(&env, &blocks, n).await.expect("a member");
        }
        assert!(writes(&env, &blocks, MALLORY).await.is_err());
    }
    // Nobody's node runs for a week.
    pass(7 * DAY + 1).await;
    let refused = writes(&env, &blocks, BOB).await.expect_err("it has run out");
    assert!(matches!(refused, NotAllowed::Expired { .. }), "{refused}");
    assert_eq!(renewed_by(&env, &blocks, CAROL).await, Some(4));
    writes(&env, &blocks, BOB).await.expect("again");
}

/// A keeper does not bring back whom the owner has removed, and drops who is not in the owner's list.
#[tokio::test(start_paused = true)]
async fn a_keeper_renews_listed_members_and_adds_none() {
    let (env, blocks, record) = kept().await;
    let group = volume_group(&volume(), 0);
    let before = read_group(&blocks, group.group_id()).await.expect("reads").expect("there");
    let owned = (&volume(), &record);
    let (_, record) = newest(&blocks).await;
    let removed = remove_volume_member(&env, &blocks, (owned.0, &record), user(BOB)).await;
    assert!(removed.expect("is removed") > Some(now_secs(&env)));
    pass(DAY + 1).await;
    assert_eq!(renewed_by(&env, &blocks, CAROL).await, Some(3), "the others");
    assert_eq!(labels(&blocks, group.group_id()).await, ["carol", "dave", "me"]);
    // The owner's command was interrupted after the list, or a keeper has put the record as it was.
    put_group(&env, &blocks, &group, &before).await.expect("is put");
    assert_eq!(renewed_by(&env, &blocks, CAROL).await, Some(3), "the others");
    assert_eq!(labels(&blocks, group.group_id()).await, ["carol", "dave", "me"]);
    let again = remove_volume_member(&env, &blocks, (&volume(), &record), user(BOB)).await;
    assert_eq!(again, Ok(None));
    let keeper = remove_volume_member(&env, &blocks, (&volume(), &record), user(DAVE)).await;
    assert_eq!(keeper, Err(AccessError::IsKeeper), "its key would stay good");
    let nobody = add_keeper(&env, &blocks, (&volume(), &record), user(MALLORY)).await;
    assert_eq!(nobody.map(drop), Err(AccessError::NotMember));
}

#[tokio::test(start_paused = true)]
async fn nothing_that_a_keeper_has_done_outlasts_the_epoch() {
    let (env, blocks, record) = kept().await;
    let key = key_of(&blocks, CAROL).await.expect("a keeper");
    assert_eq!(key.group_id(), volume_group(&volume(), 0).group_id());
    // It lets somebody in for years, renames and removes others.
    let (now, until) = (now_secs(&env), now_secs(&env) + 3650 * DAY);
    let certificate = Certificate::issue(&key, user(MALLORY), now, until);
    change_group(&env, &blocks, &key, |group, _| {
        let label = "bob".to_owned();
        group.members.insert(user(MALLORY), Member { certificate, label, until_secs: 0 });
        group.members.get_mut(&user(BOB)).expect("a member").label = "mallory".into();
        group.members.remove(&user(DAVE));
    })
    .await
    .expect("nobody hinders it");
    writes(&env, &blocks, MALLORY).await.expect("that is what a keeper can do");
    // The owner sees it, and the owner's node puts it right.
    let all = ["bob", "carol", "dave", "me"].map(str::to_owned).to_vec();
    assert_eq!(listed(&blocks).await, (all.clone(), vec![user(MALLORY)]));
    let (_, kept) = newest(&blocks).await;
    let renewed = renew_volume(&env, &blocks, &volume(), &kept).await.expect("renews");
    assert_eq!((renewed.dropped, renewed.renewed), (1, 1), "mallory goes, dave comes back");
    assert_eq!(listed(&blocks).await, (all.clone(), vec![]));
    // A certificate that lasts longer than an owner issues them is not left to its holder's record.
    let certificate = Certificate::issue(&key, user(BOB), now, until);
    change_group(&env, &blocks, &key, |group, _| {
        group.members.get_mut(&user(BOB)).expect("a member").certificate = certificate;
    })
    .await
    .expect("nobody hinders it");
    assert_eq!(renewed_by(&env, &blocks, DAVE).await, Some(1));

    // It puts mallory back just before it is taken the part away.
    let certificate = Certificate::issue(&key, user(MALLORY), now, until);
    let mallory = Member { certificate, label: "bob".into(), until_secs: 0 };
    change_group(&env, &blocks, &key, |group, _| {
        group.members.insert(user(MALLORY), mallory.clone())
    })
    .await
    .expect("nobody hinders it");
    let root = held(&blocks, record.root).await;
    let begun = begin_epoch_without_keeper(&env, &blocks, &volume(), user(CAROL)).await;
    assert_eq!(begun.expect("begins").1.group_epoch, 1);
    bind(&env, &blocks).await;
    let next = volume_group(&volume(), 1);
    assert_eq!(labels(&blocks, next.group_id()).await, all);
    assert!(key_of(&blocks, CAROL).await.is_none());
    assert_eq!(renewed_by(&env, &blocks, CAROL).await, None);
    assert_eq!(key_of(&blocks, DAVE).await.expect("a keeper").group_id(), next.group_id());
    for n in [OWNER, BOB, CAROL, DAVE] {
        writes(&env, &blocks, n).await.expect("a member");
    }
    assert!(writes(&env, &blocks, MALLORY).await.is_err());
    let author = atoll_key::kinds::certified::Author {
        secret: secret(MALLORY),
        certificate,
        writer: writer(MALLORY),
    };
    let payload = inode(directory()).encode().expect("short");
    let late = root.write(&author, env.unix_ms(), Some(&payload)).expect("signed");
    let bound = held(&blocks, record.root).await;
    let admitted = BlockKind::Certified.admit(Some(bound.bytes()), late.bytes(), env.unix_ms());
    assert_eq!(admitted, Err(NotAdmitted::Outdated));
    pass(DAY + 1).await;
    assert_eq!(renewed_by(&env, &blocks, DAVE).await, Some(4));
    // The last one: the list goes on to count.
    let begun = begin_epoch(&env, &blocks, &volume(), user(DAVE)).await.expect("begins");
    assert!(begun.1.has_keepers);
    assert_eq!(listed(&blocks).await.0, ["bob", "carol", "me"]);
    assert_eq!(renewed_by(&env, &blocks, DAVE).await, None);
}

/// A record of the group's that cannot be read, or replaced, stops the renewal and no new epoch.
#[tokio::test(start_paused = true)]
async fn a_keeper_cannot_keep_the_owner_from_a_new_epoch() {
    for (n, payload) in [b"nonsense".to_vec(), GroupRecord::default().encode().expect("short")]
        .into_iter()
        .enumerate()
    {
        let (env, blocks, _) = kept().await;
        let key = key_of(&blocks, CAROL).await.expect("a keeper");
        let hostile = SignedBlock::sign(&key, RECORD_NAME, u64::MAX, &payload);
        blocks.put_signed(hostile).await.expect("nobody hinders it");
        let (_, record) = newest(&blocks).await;
        renew_volume(&env, &blocks, &volume(), &record).await.expect_err("it cannot be replaced");
        assert_eq!(listed(&blocks).await.0, ["bob", "carol", "dave", "me"], "case {n}");
        begin_epoch(&env, &blocks, &volume(), user(CAROL)).await.expect("begins");
        // The former epoch's certificates are lost, and the present ones are not.
        pass(DAY + 1).await;
        assert_eq!(renewed_by(&env, &blocks, DAVE).await, Some(3), "case {n}");
        let (_, record) = newest(&blocks).await;
        renew_volume(&env, &blocks, &volume(), &record).await.expect("renews");
        bind(&env, &blocks).await;
        writes(&env, &blocks, BOB).await.expect("a member");
        assert!(writes(&env, &blocks, CAROL).await.is_err());
    }
}

/// While a rebinding is not through, members write what is bound to the former group too.
#[tokio::test(start_paused = true)]
async fn a_keeper_renews_the_former_epoch_until_all_is_bound() {
    let (env, blocks, _) = kept().await;
    begin_epoch(&env, &blocks, &volume(), user(BOB)).await.expect("begins");
    // The owner's node goes away before it has bound anything.
    for _ in 0..10 {
        pass(DAY).await;
        renewed_by(&env, &blocks, CAROL).await.expect("a keeper");
        writes(&env, &blocks, DAVE).await.expect("a member of the former group");
    }
    let record = read_keepers(&blocks, volume().volume_id()).await.expect("reads").expect("there");
    assert_eq!(record.keys_of(&secret(CAROL), &volume().volume_id()).len(), 2);
    bind(&env, &blocks).await;
    let record = read_keepers(&blocks, volume().volume_id()).await.expect("reads").expect("there");
    assert_eq!(
        (record.first_epoch, record.keys_of(&secret(CAROL), &volume().volume_id()).len()),
        (1, 1)
    );
    writes(&env, &blocks, DAVE).await.expect("a member of the present group");
}

/// The list of members counts for what the owner does, from the first keeper on.
#[tokio::test(start_paused = true)]
async fn what_the_owner_changes_is_in_the_list_first() {
    let (env, blocks, _) = kept().await;
    let until_secs = now_secs(&env) + 10 * DAY;
    let (_, record) = newest(&blocks).await;
    let owned = (&volume(), &record);
    let erin = (user(5), "erin");
    add_volume_member(&env, &blocks, owned, erin, until_secs).await.expect("is added");
    let past = add_volume_member(&env, &blocks, owned, (user(6), "x"), 1).await;
    assert_eq!(past, Err(AccessError::Past));
    add_volume_member(&env, &blocks, owned, (user(5), ""), until_secs).await.expect("again");
    assert_eq!(listed(&blocks).await.0, ["bob", "carol", "dave", "erin", "me"]);
    for day in 0..12 {
        pass(DAY).await;
        renewed_by(&env, &blocks, CAROL).await.expect("a keeper");
        assert_eq!(writes(&env, &blocks, 5).await.is_ok(), day < 10, "day {day}");
    }
    renew_volume(&env, &blocks, &volume(), &record).await.expect("renews");
    assert_eq!(listed(&blocks).await.0, ["bob", "carol", "dave", "me"]);
}

/// A keeper of an encrypted volume who becomes a mere member reads on.
#[tokio::test(start_paused = true)]
async fn a_former_keeper_of_an_encrypted_volume_still_reads() {
    let (env, _, blocks) = Ring::new();
    let options = NewVolume { is_encrypted: true, ..new_volume() };
    create(&env, &blocks, &volume(), &secret(OWNER), &options).await.expect("is made");
    add(&env, &blocks, CAROL, "carol").await;
    name_keeper(&env, &blocks, CAROL).await;
    begin_epoch_without_keeper(&env, &blocks, &volume(), user(CAROL)).await.expect("begins");
    let readers = read_readers(&blocks, volume().volume_id()).await.expect("reads").expect("there");
    assert_eq!(readers.epoch, 1);
    assert!(readers.key_of(&secret(CAROL), &volume().volume_id()).is_some());
    assert!(key_of(&blocks, CAROL).await.is_none());
    let never = made(&env, &blocks).await;
    assert!(!never.has_keepers, "made anew");
    let refused = begin_epoch_without_keeper(&env, &blocks, &volume(), user(CAROL)).await;
    assert_eq!(refused.map(drop), Err(AccessError::NoKeepers));
}

// --- the record -------------------------------------------------------------------------

fn records() -> Vec<KeeperRecord> {
    let member = |n: u8, label: &str, until_secs| {
        (user(n), ListedMember { until_secs, label: label.to_owned() })
    };
    let members = [member(1, "alice", 0), member(2, "", 7), member(3, "ça", u64::MAX)].into();
    let keepers = [(user(1), vec![[1; 56], [2; 56]]), (user(2), vec![[3; 56], [4; 56]])].into();
    vec![KeeperRecord::default(), KeeperRecord { first_epoch: 3, keepers, members }]
}

/// Records are read again by newer programs only if the bytes stay as they are.
#[test]
fn records_of_keepers_read_back_and_never_change() {
    let mut all = Vec::new();
    for record in records() {
        let bytes = Bytes::from(record.encode().expect("short"));
        assert_eq!(KeeperRecord::decode(&bytes), Ok(record));
        for cut in 0..bytes.len() {
            assert!(KeeperRecord::decode(&bytes.slice(..cut)).is_err(), "cut at {cut}");
        }
        assert!(KeeperRecord::decode(&[&bytes[..], &[0]].concat().into()).is_err());
        all.extend_from_slice(&bytes);
    }
    assert_eq!(records()[0].encode().expect("short"), b"ATKP\x01\0\0\0\0\0\0\0\0");
    assert_eq!(BlockHash::of(&all).to_hex(), GOLDEN);
}

const GOLDEN: &str = "f30bfc86e8145b932f2240a7a10c269b84da277729649e8eed2f321fcf7856cb";

#[test]
fn hostile_records_of_keepers_are_refused() {
    let bytes = records()[1].encode().expect("short");
    let changed = |at: usize, to: u8| {
        let mut bytes = bytes.clone();
        bytes[at] = to;
        KeeperRecord::decode(&bytes.into())
    };
    assert!(changed(0, b'x').is_err() && changed(4, 2).is_err());
    assert_eq!(changed(9, 17), Err(FormatError::BadReference("it has too many keepers or epochs")));
    assert!(changed(10, 17).is_err() && changed(9, 0).is_err(), "keepers without keys");
    let last = [&bytes[..5], &u32::MAX.to_be_bytes(), &bytes[9..]].concat();
    assert_eq!(
        KeeperRecord::decode(&last.into()),
        Err(FormatError::BadReference("there are no such epochs"))
    );
    let (first, second) = (11, 11 + 32 + 2 * 56);
    let swapped = [
        &bytes[..first],
        &bytes[second..second + 144],
        &bytes[first..second],
        &bytes[second + 144..],
    ];
    assert_eq!(
        KeeperRecord::decode(&swapped.concat().into()),
        Err(FormatError::BadReference("the keepers are out of order"))
    );
    let members = second + 144;
    assert!(changed(members, 0x10).is_err(), "more members than there may be");
    let mut long = records().remove(1);
    long.members.get_mut(&user(1)).expect("a member").label = "x".repeat(65);
    assert!(long.encode().is_err());
    let mut uneven = records().remove(1);
    uneven.keepers.get_mut(&user(1)).expect("a keeper").pop();
    assert!(uneven.encode().is_err());
}
