//! A member who was shut out can still write what nodes take as copies: those which have not heard of it, or his own. The story:
//! such a version was believed as any other, and took the place of what was there.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use atoll_dht::{Blocks, GetError, MemoryBlocks, NewBlock, Wanted};
use atoll_key::kinds::certified::{
    Author, Binding, Certificate, CertifiedBlock, Dot, Rebinding, WriterId,
};
use atoll_key::{BlockHash, SecretKey, volume_group};
use atoll_vfs::{Caller, Errno, FileKind, FileSystem, InodeNumber};
use atoll_volume::shared::access::{Credentials, RebindReport, groups, read_volume, rebind};
use atoll_volume::shared::entries::Leaves;
use atoll_volume::shared::inode::{Contents, Entry, FileData, Inode, InodeKey, Link, Written};
use atoll_volume::shared::merged::{self, Merged, names};
use atoll_volume::shared::sealing::Sealing;
use atoll_volume::shared::standing::Trusted;
use atoll_volume::shared::{SharedFs, access, upkeep};
use bytes::Bytes;

use super::mounts::{created_with, mounted, user, volume};
use super::offline::{self, Setting, read, rebind_all, write};
use super::{NOW_MS, inode, secret, writer};
use crate::ring::clocked;

const ROOT: InodeNumber = InodeNumber::ROOT;

// --- what siblings say ------------------------------------------------------------------

/// An inode that user 1 has made, and what was written of it since.
struct Story {
    first: CertifiedBlock,
}

fn owner() -> SecretKey {
    secret(101)
}

/// User `n`, with a certificate of the group of an epoch.
fn member(n: u8, epoch: u32) -> Author {
    let group = volume_group(&owner(), epoch);
    let certificate = Certificate::issue(&group, secret(n).user_id(), 0, u64::MAX);
    Author { secret: secret(n), certificate, writer: writer(n) }
}

fn signed(seen: &CertifiedBlock, author: &Author, inode: Option<&Inode>) -> CertifiedBlock {
    let payload = inode.map(|inode| inode.encode().expect("short"));
    seen.write(author, NOW_MS, payload.as_deref()).expect("a member")
}

impl Story {
    fn new(inode: &Inode) -> Story {
        let groups = [volume_group(&owner(), 0).group_id()];
        let binding = Binding::new(owner().volume_id(), [2; 16], &groups).expect("a group");
        let payload = inode.encode().expect("short");
        let first = CertifiedBlock::create(binding, &member(1, 0), NOW_MS, &payload);
        Story { first: first.expect("a member") }
    }

    /// What user 1 writes under the next epoch's binding, who has seen the first version.
    fn present(&self, inode: Option<&Inode>) -> CertifiedBlock {
        let groups = [volume_group(&owner(), 1).group_id()];
        let rebinding = Rebinding::sign(&owner(), &self.first.key(), 1, &groups).expect("a group");
        signed(&self.first.rebound(rebinding).expect("newer"), &member(1, 1), inode)
    }

    /// What user 2 writes, who was shut out: as somebody who has seen nothing newer, and as somebody who claims to have seen
    /// all that user 1 has written, and who is higher than any.
    fn late(&self, inode: Option<&Inode>) -> [CertifiedBlock; 2] {
        let honest = signed(&self.first, &member(2, 0), inode);
        let mut claimed = self.first.clone();
        for _ in 0..5 {
            // The names of user 1's writes are no secret.
            claimed = signed(&claimed, &member(1, 0), Some(&symlink("claimed")));
        }
        [honest, signed(&claimed, &member(2, 0), inode)]
    }
}

/// Blocks as nodes come to hold them that learn of the versions in any order.
fn in_all_orders(blocks: &[&CertifiedBlock]) -> Vec<CertifiedBlock> {
    let join = |order: &[usize]| {
        let mut order = order.iter().map(|at| blocks[*at].clone());
        let first = order.next().expect("some");
        order.fold(first, |all, one| all.join(&one).expect("one inode"))
    };
    let orders: [&[usize]; 6] =
        [&[0, 1, 2], &[0, 2, 1], &[1, 0, 2], &[1, 2, 0], &[2, 0, 1], &[2, 1, 0]];
    let joined: Vec<CertifiedBlock> = orders.iter().map(|order| join(order)).collect();
    assert!(joined.iter().all(|one| one.bytes() == joined[0].bytes()));
    joined
}

fn merge(block: &CertifiedBlock) -> Merged {
    merged::merge(block, &Leaves::new(), &Sealing::none()).expect("inodes").expect("not removed")
}

fn symlink(target: &str) -> Inode {
    inode(Contents::Symlink(Bytes::copy_from_slice(target.as_bytes())))
}

fn file(size_bytes: u64, dot: Dot) -> Inode {
    let written = Written { dot, time_ms: NOW_MS };
    let data = Some(FileData::Elsewhere(BlockHash([size_bytes as u8; 32])));
    inode(Contents::Regular { size_bytes, blocks_512: 1, data, written })
}

fn dot(n: u8, height: u64) -> Dot {
    Dot { writer: writer(n), height }
}

#[test]
fn late_contents_stand_beside_those_of_present_members() {
    let story = Story::new(&file(1, dot(1, 1)));
    let mut shown = file(1, dot(1, 1));
    shown.attributes.mode = 0o640;
    // The owner has written it anew as it was; or a member has written something.
    for present in [shown, file(2, dot(1, 2))] {
        let written = story.present(Some(&present));
        // The last claims to be what is there.
        for (late, kept) in [(file(9, dot(2, 7)), true), (file(9, dot(1, 2)), false)] {
            for late in story.late(Some(&late)) {
                for block in in_all_orders(&[&story.first, &written, &late]) {
                    let merged = merge(&block);
                    assert_eq!(merged.inode, present);
                    let beside: Vec<&Contents> =
                        merged.conflicts.iter().map(|one| &one.inode.contents).collect();
                    let expected = file(9, dot(2, 7)).contents;
                    assert!(beside.iter().all(|one| one.is_regular_of(9)), "{beside:?}");
                    assert!(!kept || beside == [&expected], "{beside:?}");
                    // Present members go on, and cover it.
                    let next = signed(&block, &member(1, 1), Some(&file(3, dot(1, 50))));
                    assert_eq!(next.join(&block).expect("one inode").siblings().len(), 1);
                }
            }
        }
    }
}

/// For the test above.
trait IsRegular {
    fn is_regular_of(&self, size: u64) -> bool;
}

impl IsRegular for Contents {
    fn is_regular_of(&self, size: u64) -> bool {
        matches!(self, Contents::Regular { size_bytes, .. } if *size_bytes == size)
    }
}

fn entry(name: &str, number: u8, kind: FileKind, added: Dot) -> Entry {
    let name = Bytes::copy_from_slice(name.as_bytes());
    Entry::new(name, (InodeKey([number; 32]), kind), added, NOW_MS)
}

fn listed(merged: &Merged) -> Vec<(String, u8)> {
    let Contents::Directory(entries) = &merged.inode.contents else { panic!("a directory") };
    let shown = names(entries).into_iter();
    shown
        .map(|(name, of)| (String::from_utf8_lossy(&name).into_owned(), of[0].inode.0[0]))
        .collect()
}

fn directory(entries: &[Entry]) -> Inode {
    inode(Contents::Directory(entries.iter().cloned().collect()))
}

#[test]
fn a_late_version_of_a_directory_takes_no_names_and_no_directories() {
    const FILE: FileKind = FileKind::Regular;
    const DIRECTORY: FileKind = FileKind::Directory;
    let there = [
        entry("docs", 1, DIRECTORY, dot(1, 1)),
        entry("plan", 2, FILE, dot(1, 1)),
        entry("list", 3, FILE, dot(1, 1)),
    ];
    let mut story = Story::new(&directory(&there));
    let link =
        |n, height, above: u8| Link { added: dot(n, height), directory: InodeKey([above; 32]) };
    let mut with_link = directory(&there);
    with_link.links = [link(1, 1, 7)].into();
    story.first = Story::new(&with_link).first;
    let written = story.present(Some(&with_link));
    // Everything is gone but one name, which is another file; the directory has another name and another place.
    let mut late = directory(&[
        entry("plan", 9, FILE, Dot { writer: WriterId::from_bytes([0; 16]), height: 1 }),
        entry("stolen", 1, DIRECTORY, dot(2, 1000)),
        entry("disguised", 1, FILE, dot(2, 1000)),
        entry("new", 8, FILE, dot(2, 7)),
    ]);
    late.links = [link(2, 1000, 9)].into();
    late.attributes.mode = 0o777;
    let (user, time) = (merged::conflict_user(&dot(0, 1)), merged::conflict_time(NOW_MS));
    assert_ne!(user, "00000000");
    for late in story.late(Some(&late)) {
        for block in in_all_orders(&[&story.first, &written, &late]) {
            let merged = merge(&block);
            let shown = [
                ("docs".to_owned(), 1),
                ("list".to_owned(), 3),
                ("new".to_owned(), 8),
                ("plan".to_owned(), 2),
                (format!("plan~00000000~{time}"), 9),
            ];
            assert_eq!(listed(&merged), shown);
            assert_eq!(merged.inode.links, with_link.links);
            assert_eq!(merged.inode.attributes, with_link.attributes);
            // A member has written what is shown, and another who was shut out writes: nothing is there twice.
            let next = signed(&block, &member(1, 1), Some(&merged.inode));
            let again = signed(&late, &member(3, 0), Some(&merge(&late).inode));
            assert_eq!(listed(&merge(&next.join(&again).expect("one inode"))), shown);
        }
        // The user who wrote it sees it as it was written.
        let block = written.join(&late).expect("one inode");
        let own = Trusted::from([secret(2).user_id()]);
        let merged = merged::merge_trusting(&block, &Leaves::new(), &Sealing::none(), &own);
        let seen = listed(&merged.expect("inodes").expect("there"));
        assert!(seen.contains(&("new".to_owned(), 8)), "{seen:?}");
    }
}

/// The inode stays, so that nothing is lost of somebody who had not heard of the removal, and nothing names it.
#[test]
fn a_late_write_brings_no_name_back_and_a_late_removal_takes_nothing_away() {
    let link = Link { added: dot(1, 1), directory: InodeKey([7; 32]) };
    let linked = |mut inode: Inode| {
        inode.links = [link].into();
        inode
    };
    let names = [entry("a", 1, FileKind::Regular, dot(1, 1))];
    let late_names =
        [entry("a", 1, FileKind::Regular, dot(1, 1)), entry("b", 2, FileKind::Regular, dot(2, 2))];
    let cases = [
        (linked(file(1, dot(1, 1))), linked(file(9, dot(2, 2)))),
        (linked(directory(&names)), linked(directory(&late_names))),
    ];
    for (first, late) in cases {
        let story = Story::new(&first);
        let removed = story.present(None);
        for late in story.late(Some(&late)) {
            for block in in_all_orders(&[&story.first, &removed, &late]) {
                let merged = merge(&block);
                assert_eq!(merged.inode.links, BTreeSet::new());
                if let Contents::Directory(entries) = &merged.inode.contents {
                    let left: Vec<&[u8]> = entries.iter().map(|entry| &entry.name[..]).collect();
                    assert_eq!(left, [b"b"]);
                }
            }
        }
        let written = story.present(Some(&first));
        for late in story.late(None) {
            for block in in_all_orders(&[&story.first, &written, &late]) {
                let merged = merge(&block);
                assert_eq!((merged.inode, merged.conflicts), (first.clone(), Vec::new()));
            }
        }
    }
}

/// Whoever was shut out could make a directory unreadable, or one that nobody could change.
#[test]
fn late_nonsense_is_left_out_and_late_inodes_do_not_stand_in_for_present_nonsense() {
    let story = Story::new(&symlink("first"));
    let written = story.present(Some(&symlink("second")));
    let nonsense = story.first.write(&member(2, 0), NOW_MS, Some(b"nonsense")).expect("signed");
    let merged = merge(&written.join(&nonsense).expect("one inode"));
    assert_eq!((merged.inode, merged.unreadable), (symlink("second"), Vec::new()));
    let groups = [volume_group(&owner(), 1).group_id()];
    let rebinding = Rebinding::sign(&owner(), &story.first.key(), 1, &groups).expect("a group");
    let rebound = story.first.rebound(rebinding).expect("newer");
    let nonsense = rebound.write(&member(1, 1), NOW_MS, Some(b"nonsense")).expect("signed");
    for late in story.late(Some(&symlink("late"))) {
        let block = nonsense.join(&late).expect("one inode");
        assert!(merged::merge(&block, &Leaves::new(), &Sealing::none()).is_err());
    }
}

// --- what mounts show -------------------------------------------------------------------

fn me() -> Caller {
    Caller::default()
}

async fn held(blocks: &Arc<dyn Blocks>, key: InodeKey) -> CertifiedBlock {
    let held = blocks.get_block(CertifiedBlock::id_at(key.key()), Wanted::Newest).await;
    CertifiedBlock::decode(&held.expect("is there").bytes).expect("signed")
}

/// Shuts user 2 out at once, as `atoll revoke --now` does.
async fn shut_out(env: &atoll_env::Env, blocks: &Arc<dyn Blocks>) {
    let begun = groups::begin_epoch(env, blocks, &volume(), user(2).user_id()).await;
    let (_, record) = begun.expect("begins");
    let sealing = match record.is_encrypted {
        true => Sealing::of_owner(&volume(), record.read_epoch()),
        false => Sealing::none(),
    };
    let credentials = Credentials::new(env.clone(), blocks.clone(), Some(user(1)));
    let owner = (&volume(), &sealing);
    let swap = access::rebind::in_present_epoch(&volume(), record.group_epoch);
    let report = rebind(env, blocks, owner, &credentials, record.root, &swap, &mut |_| {}).await;
    assert_eq!((report.failed, report.is_unsettled), (0, false), "{report:?}");
}

/// The keys of the root directory and of the file `f` in it.
async fn keys(blocks: &Arc<dyn Blocks>, sealing: &Sealing) -> (InodeKey, InodeKey) {
    let (_, record) =
        read_volume(blocks, volume().volume_id()).await.expect("reads").expect("there");
    let path = [b"f".to_vec()];
    let found = access::rebind::find(blocks, record.root, &path, sealing).await;
    (record.root, found.expect("reads").expect("there"))
}

/// What a removed member's node has taken meanwhile comes to the replicas as copies: in whatever order, before or after
/// somebody has read or written.
#[tokio::test(start_paused = true)]
async fn what_a_removed_member_wrote_takes_no_place_for_any_mount() {
    for is_encrypted in [false, true] {
        for (is_file_first, is_known, is_written) in
            [(true, false, false), (false, true, false), (true, true, true), (false, false, true)]
        {
            let case = format!("{is_encrypted} {is_file_first} {is_known} {is_written}");
            let env = clocked();
            let memory = Arc::new(MemoryBlocks::new());
            let blocks: Arc<dyn Blocks> = memory.clone();
            let record = created_with(&env, &blocks, is_encrypted).await;
            let sealing = match is_encrypted {
                true => Sealing::of_owner(&volume(), record.read_epoch()),
                false => Sealing::none(),
            };
            let [one, two, three]: [SharedFs; 3] = [
                mounted(&env, &blocks, 1).await,
                mounted(&env, &blocks, 2).await,
                mounted(&env, &blocks, 3).await,
            ];
            write(&one, ROOT, "f", "of members").await.expect("is written");
            write(&one, ROOT, "g", "of members").await.expect("is written");
            read(&two, ROOT, "f").await.expect("reads");
            // On the other side of a partition: a ring of the same blocks.
            let there = Arc::new(MemoryBlocks::new());
            let (root, file) = keys(&blocks, &sealing).await;
            let before = [held(&blocks, root).await, held(&blocks, file).await];
            for id in memory.ids() {
                let held = blocks.get_block(id, Wanted::Newest).await.expect("is there");
                let new = NewBlock { id, bytes: held.bytes, lease_secs: None };
                assert_eq!(there.put_blocks(vec![new]).await, [Ok(())]);
            }
            let cut_off: Arc<dyn Blocks> = there.clone();
            let away = mounted(&env, &cut_off, 2).await;

            shut_out(&env, &blocks).await;
            if is_known {
                assert_eq!(read(&three, ROOT, "f").await.expect("reads"), "of members");
            }
            // Several times: these versions are higher than those of the members.
            for n in 0..5 {
                write(&away, ROOT, "f", format!("of the removed member, {n}"))
                    .await
                    .expect("is written");
            }
            away.unlink(me(), ROOT, b"g").await.expect("is removed");
            write(&away, ROOT, "h", "another").await.expect("is written");
            away.sync().await.expect("is removed");
            if is_written {
                write(&three, ROOT, "f", "of members").await.expect("is written");
            }
            let late = [held(&cut_off, root).await, held(&cut_off, file).await];
            assert!(late[1].height() > held(&blocks, file).await.height());
            assert!(!late.iter().zip(&before).any(|(late, before)| before.includes(late)));
            let mut ids: Vec<_> = there.ids().into_iter().collect();
            ids.sort_by_key(|id| (*id == CertifiedBlock::id_at(file.key())) != is_file_first);
            for id in ids {
                let held = match cut_off.get_block(id, Wanted::Newest).await {
                    Ok(held) => held.bytes,
                    Err(GetError::Removed { tombstone, .. }) => *tombstone,
                    Err(error) => panic!("{error}"),
                };
                let new = NewBlock { id, bytes: held, lease_secs: None };
                match id.kind.joins() {
                    true => memory.take_copy(new).expect("is sound"),
                    // Data. Records are old there.
                    false => drop(memory.put_blocks(vec![new]).await),
                }
                // The inode of `g` is removed with its name, if replicas believe it.
                for fs in [&one, &three] {
                    let shown = read(fs, ROOT, "f").await.expect("reads");
                    assert_eq!(shown, "of members", "{case}");
                }
            }
            let fresh = mounted(&env, &blocks, 4).await;
            for fs in [&one, &three, &fresh] {
                for name in ["f", "g"] {
                    let shown = read(fs, ROOT, name).await.expect("reads");
                    assert_eq!(shown, "of members", "{case}: {name}");
                }
            }
            // It is kept beside: it could have been somebody's who had not heard of anything.
            let names = offline::names(&fresh, ROOT).await.expect("lists");
            assert_eq!(names.iter().filter(|name| name.starts_with("f~")).count(), 1, "{names:?}");
            // Nor can the member write now.
            let refused = write(&two, ROOT, "f", "more").await;
            assert!(
                matches!(refused, Err(Errno::EACCES | Errno::EPERM | Errno::ETIMEDOUT)),
                "{case}: {refused:?}"
            );
        }
    }
}

// --- in a ring --------------------------------------------------------------------------

/// The story: a member who was shut out wrote on the side of a partition that had not heard of it, and his version took the
/// place of what was there when both sides met.
#[test]
fn what_a_removed_member_wrote_on_the_other_side_of_a_partition_stands_beside() {
    let mut has_come_about = false;
    for seed in 9600..9612 {
        let all = Setting::new(seed);
        let (removed, present) = (&all.others[0], &all.others[1]);
        all.run(async {
            write(present, ROOT, "f", "of members").await.expect("is written");
            read(removed, ROOT, "f").await.expect("reads");
        });
        let hosts: Vec<_> = [0, 1, 2].map(|member| all.ring.members[member].host).into();
        all.ring.sim.partition(&[&hosts]);
        all.wait(Duration::from_secs(600));
        // For want of what it says there, the other side may not have the blocks.
        let mut wrote = false;
        for n in 0..4 {
            wrote |=
                all.run(write(removed, ROOT, "f", format!("of the removed member, {n}"))).is_ok();
        }
        let env = all.ring.sim.env(all.ring.members[6].host);
        let blocks: Arc<dyn Blocks> = all.ring.members[6].dht.clone();
        let shut_out = all.run(async {
            let begun = groups::begin_epoch(&env, &blocks, &volume(), user(2).user_id()).await;
            let Ok((_, record)) = begun else { return false };
            let group = |epoch| volume_group(&volume(), epoch).group_id();
            rebind_all(&all, group(0), group(record.group_epoch)).await;
            let (root, file) = keys(&blocks, &Sealing::none()).await;
            let bound = [held(&blocks, root).await, held(&blocks, file).await];
            bound.iter().all(|block| block.groups() == [group(record.group_epoch)])
        });
        all.ring.sim.heal();
        all.wait(Duration::from_secs(1800));
        if !(wrote && shut_out) {
            continue;
        }
        has_come_about = true;
        for fs in [&all.mounted(), present] {
            assert_eq!(all.run(read(fs, ROOT, "f")).expect("reads"), "of members", "seed {seed}");
        }
        let names = all.run(offline::names(present, ROOT)).expect("lists");
        assert!(names.iter().any(|name| name.starts_with("f~")), "seed {seed}: {names:?}");
        break;
    }
    assert!(has_come_about, "in no seed both sides took what was written");
}

/// The story: what a member had made without the ring before another was shut out stayed bound to the former members, with
/// all that was made below it.
#[test]
fn what_was_made_offline_before_a_revocation_is_bound_anew_on_the_owners_next_walk() {
    let all = Setting::new(9620);
    let fs = all.mounted();
    all.run(write(&fs, ROOT, "f", "x")).expect("is written");
    all.machine.node.stop();
    let made = all.run(async {
        write(&fs, ROOT, "g", "x").await.expect("is spooled");
        let made = fs.mkdir(me(), ROOT, b"d", 0o755).await.expect("is spooled").attr.inode;
        write(&fs, made, "h", "x").await.expect("is spooled");
        made
    });
    let env = all.ring.sim.env(all.ring.members[6].host);
    let blocks: Arc<dyn Blocks> = all.ring.members[6].dht.clone();
    let group = |epoch| volume_group(&volume(), epoch).group_id();
    all.run(async {
        let begun = groups::begin_epoch(&env, &blocks, &volume(), user(4).user_id()).await;
        let (_, record) = begun.expect("begins");
        rebind_all(&all, group(0), group(record.group_epoch)).await;
    });
    all.wait(Duration::from_secs(900));
    all.reconnect();
    all.run(write(&fs, made, "below", "x")).expect("is written");
    assert_eq!(all.status(&fs), "ok");
    let walk = || {
        all.run(async {
            let id = volume().volume_id();
            let (_, record) = read_volume(&blocks, id).await.expect("reads").expect("there");
            let none = Sealing::none();
            let kept = upkeep::keep(&env, &blocks, id, &record, &none).await.expect("renewed");
            let credentials = Credentials::new(env.clone(), blocks.clone(), Some(user(9)));
            let owner = (&volume(), &none, record.root);
            let epochs = access::rebind::in_present_epoch(&volume(), record.group_epoch);
            let report = access::rebind::rebind_former(
                &env,
                &blocks,
                owner,
                &credentials,
                &epochs,
                &kept.groups,
            )
            .await;
            (kept, report)
        })
    };
    let (kept, report) = walk();
    assert!(kept.groups.contains(&group(0)), "the situation has not come about");
    assert_eq!((report.failed, report.changed), (0, 4), "{report:?}");
    let (kept, report) = walk();
    assert_eq!(kept.groups, BTreeSet::from([group(1)]));
    assert_eq!(report, RebindReport::default(), "nothing is read again");
    let there = all.run(offline::tree(&all.others[0], ROOT, String::new()));
    assert_eq!(
        there.keys().map(String::as_str).collect::<Vec<_>>(),
        ["/d/below", "/d/h", "/f", "/g"]
    );
}
