//! A store whose files vanish, tear, are swapped, or are all away.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use atoll_key::{BlockHash, BlockKind, KeyRange, SecretKey, SignedBlock};
use atoll_store::{BlockInfo, BlockStore, FileStore, Owner, StoreError, StoredBlock};

use crate::fixture::{Random, block, contents, file_config, key, open_files, owner, wait};

/// All block files, in no particular order.
fn files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir.join("blocks")).expect("there") {
        let path = entry.expect("readable").path();
        if path.is_dir() {
            let inside = fs::read_dir(path).expect("readable");
            found.extend(inside.map(|entry| entry.expect("readable").path()));
        }
    }
    found.sort();
    found
}

/// Goes through all files; returns how many blocks were found lost.
fn look_after(store: &FileStore) -> u64 {
    let (mut from, mut lost) = (None, 0);
    loop {
        let care = wait(store.look_after(from, 50)).expect("looked");
        assert!(care.checked <= 128);
        lost += care.lost;
        from = care.next;
        if from.is_none() {
            return lost;
        }
    }
}

/// The one thing a transparent store must never do is to return what it was not given.
#[test]
fn whatever_becomes_of_the_files_a_block_is_its_own_bytes_or_absent() {
    for seed in 0..20 {
        let mut random = Random(seed);
        let temp = tempfile::tempdir().expect("a directory");
        let store = open_files(temp.path());
        let lens = [0, 1, 4096, 8192, 20_000];
        let given: Vec<_> = (0..120)
            .map(|n| block(n, random.below(3), lens[random.below(5) as usize], 9))
            .collect();
        wait(store.put(given.clone())).expect("kept");
        let files = files(temp.path());
        assert_eq!(files.len(), 120);
        for path in &files {
            let other = &files[random.below(120) as usize];
            match random.below(8) {
                0 => fs::remove_file(path).expect("removed"),
                1 => fs::write(path, b"somebody else's").expect("written"),
                2 if path.exists() => {
                    let bytes = fs::read(path).expect("there");
                    fs::write(path, &bytes[..bytes.len() / 2]).expect("torn");
                }
                3 if path.exists() && other.exists() && path != other => {
                    fs::copy(other, path).map(drop).expect("swapped");
                }
                _ => {}
            }
        }
        let (mut whole, mut lost) = (0, 0);
        for block in &given {
            match wait(store.get(&block.info.key)).expect("answered") {
                Some(got) => {
                    assert_eq!(got, *block, "seed {seed}");
                    whole += 1;
                }
                None => {
                    lost += 1;
                    assert_eq!(store.info(&block.info.key), Ok(None), "known to be lost");
                }
            }
        }
        assert!(whole > 30 && lost > 10, "seed {seed}: {whole}, {lost}");
        assert_eq!(store.lost_blocks(), lost);
        let listed = store.list(KeyRange::full(), 1000).expect("readable");
        assert_eq!(listed.len(), whole, "no more is listed than is there");
        store.check_invariants();
        wait(store.put(given.clone())).expect("restored");
        for block in &given {
            assert_eq!(wait(store.get(&block.info.key)), Ok(Some(block.clone())));
        }
    }
}

#[test]
fn a_vanished_file_is_noticed_without_being_asked_for() {
    let temp = tempfile::tempdir().expect("a directory");
    let store = open_files(temp.path());
    wait(store.put((0..300).map(|n| block(n, 0, 3000, 9)).collect())).expect("kept");
    assert_eq!(look_after(&store), 0);
    for path in files(temp.path()).iter().step_by(3) {
        fs::remove_file(path).expect("removed");
    }
    assert_eq!(look_after(&store), 100);
    assert_eq!((look_after(&store), store.usage().blocks), (0, 200));
    // Only a scrub finds a file whose contents changed and whose length did not.
    let path = &files(temp.path())[0];
    fs::write(path, vec![1; 3000]).expect("written");
    assert_eq!(look_after(&store), 0);
    let step = wait(store.scrub(None, u64::MAX)).expect("read");
    assert_eq!((step.checked, step.damaged, step.next), (200, vec![], None));
    assert_eq!((store.usage().blocks, store.lost_blocks()), (199, 101));
    assert!(!path.exists(), "nothing is left of it");
}

/// The story: a node said that it held blocks, and renewed their leases, hours after their files
/// had vanished; neighbours dropped their copies on its word.
#[test]
fn nothing_is_vouched_for_or_renewed_whose_file_has_vanished() {
    for inline in [false, true] {
        let temp = tempfile::tempdir().expect("a directory");
        let mut store = open_files(temp.path());
        if inline {
            drop(store);
            let [index, blocks] = ["index", "blocks"].map(|name| temp.path().join(name));
            store = FileStore::open_inline(&index, &blocks, file_config()).expect("opens");
        }
        wait(store.put((0..200).map(|n| block(n, 0, 3000, 9)).collect())).expect("kept");
        let keys: Vec<_> = (0..200).map(key).collect();
        assert_eq!(store.renew(&keys, 10, Default::default()), Ok(vec![true; 200]));
        for (n, path) in files(temp.path()).iter().enumerate() {
            match n % 4 {
                0 => fs::remove_file(path).expect("removed"),
                1 => fs::write(path, b"torn").expect("written"),
                _ => {}
            }
        }
        let known = |key| store.info(key).expect("readable").is_some();
        let vouched: Vec<bool> = keys[..100].iter().map(known).collect();
        let renewed = store.renew(&keys, 11, Default::default()).expect("readable");
        assert_eq!(renewed[..100], vouched);
        assert_eq!(renewed.iter().filter(|renewed| **renewed).count(), 100);
        wait(store.flush()).expect("what was found has been noted");
        assert_eq!((store.usage().blocks, store.lost_blocks()), (100, 100));
        let leases = store.list(KeyRange::full(), 999).expect("readable");
        assert!(leases.iter().all(|info| info.expires_unix_secs == 11));
        store.check_invariants();
    }
}

#[test]
fn a_block_whose_file_has_vanished_is_written_when_it_is_put_again() {
    let temp = tempfile::tempdir().expect("a directory");
    let store = open_files(temp.path());
    let given: Vec<_> = (0..20).map(|n| block(n, n % 3, 3000, 9)).collect();
    wait(store.put(given.clone())).expect("kept");
    for path in files(temp.path()) {
        fs::remove_file(path).expect("removed");
    }
    wait(store.put(given.clone())).expect("kept");
    for block in given {
        assert_eq!(wait(store.get(&block.info.key)), Ok(Some(block)));
    }
    store.check_invariants();
}

#[test]
fn blocks_outlive_the_store_and_strays_do_not() {
    let temp = tempfile::tempdir().expect("a directory");
    let given: Vec<_> = (0..100).map(|n| block(n, n % 2, 500, 9)).collect();
    let store = open_files(temp.path());
    wait(store.put(given.clone())).expect("kept");
    wait(store.put(vec![block(7, 9, 100, 9)])).expect("replaced");
    assert_eq!(files(temp.path()).len(), 100, "the older version's file is gone");
    drop(store);
    // Of a batch whose writer crashed before the index knew of it.
    let known = files(temp.path());
    let content = known.iter().find(|path| path.extension().is_none()).expect("some");
    let stray = content.with_extension("0000000000000077");
    fs::write(&stray, b"stray").expect("written");
    let letter = known[0].with_file_name("letter.txt");
    fs::write(&letter, b"dear").expect("written");

    let store = open_files(temp.path());
    for given in given.iter().filter(|given| given.info.key != key(7)) {
        assert_eq!(wait(store.get(&given.info.key)), Ok(Some(given.clone())));
    }
    assert_eq!(wait(store.get(&key(7))), Ok(Some(block(7, 9, 100, 9))));
    wait(store.reclaim(0)).expect("swept");
    assert!(!stray.exists() && letter.exists(), "strangers' files stay");
    assert_eq!(files(temp.path()).len(), 101);
    assert_eq!(look_after(&store), 0);
}

#[test]
fn a_crash_loses_what_was_not_committed_and_nothing_else() {
    let temp = tempfile::tempdir().expect("a directory");
    let saved = temp.path().join("saved.redb");
    let index = temp.path().join("index/index.redb");
    let store = open_files(temp.path());
    wait(store.put((0..50).map(|n| block(n, 0, 500, 9)).collect())).expect("kept");
    wait(store.flush()).expect("committed");
    drop(store);
    fs::copy(&index, &saved).expect("copied");
    let store = open_files(temp.path());
    wait(store.put((50..60).map(|n| block(n, 0, 500, 9)).collect())).expect("kept");
    wait(store.remove((0..5).map(key).collect())).expect("removed");
    drop(store);
    fs::copy(&saved, &index).expect("as if it had not been committed");

    let store = open_files(temp.path());
    assert_eq!(store.usage().blocks, 50);
    assert_eq!(look_after(&store), 5, "files of what had been removed");
    wait(store.reclaim(0)).expect("swept");
    assert_eq!(files(temp.path()).len(), 45, "files of what had been put");
    for n in 5..50 {
        assert_eq!(wait(store.get(&key(n))), Ok(Some(block(n, 0, 500, 9))));
    }
    drop(store);
    fs::write(&index, b"rubbish").expect("written");
    let store = open_files(temp.path());
    assert_eq!(store.usage().blocks, 0, "without an index nothing is counted");
    wait(store.reclaim(0)).expect("swept");
    assert_eq!(files(temp.path()).len(), 0);
}

/// A TFS that is not mounted leaves an empty directory behind: that is no loss.
#[test]
fn a_directory_that_is_away_takes_nothing_and_loses_nothing() {
    let temp = tempfile::tempdir().expect("a directory");
    let [blocks, away] = ["blocks", "away"].map(|name| temp.path().join(name));
    let given: Vec<_> = (0..40).map(|n| block(n, 0, 500, 9)).collect();
    let store = open_files(temp.path());
    wait(store.put(given.clone())).expect("kept");

    fs::rename(&blocks, &away).expect("unmounted");
    fs::create_dir(&blocks).expect("an empty mount point");
    // Noticed by the first call.
    assert_eq!(wait(store.get(&key(0))), Ok(None));
    assert!(store.look().is_err());
    let away_now = wait(store.put(vec![block(99, 0, 10, 9)]));
    assert!(matches!(away_now, Err(StoreError::Away { .. })), "{away_now:?}");
    wait(store.flush()).expect("the index is still there");
    assert_eq!(store.list(KeyRange::full(), 9), Ok(vec![]));
    assert_eq!(wait(store.remove_expired(100)), Ok(0));
    assert_eq!((look_after(&store), store.lost_blocks()), (0, 0));
    wait(store.reclaim(0)).expect("nothing to do");
    assert_eq!(fs::read_dir(&blocks).expect("there").count(), 0, "nothing is written there");

    fs::remove_dir(&blocks).expect("removed");
    fs::rename(&away, &blocks).expect("mounted");
    store.look().expect("back");
    let held: BTreeSet<_> = given.iter().map(|block| block.info.key).collect();
    let listed = store.list(KeyRange::full(), 99).expect("readable");
    assert_eq!(listed.into_iter().map(|info| info.key).collect::<BTreeSet<_>>(), held);
    assert_eq!(wait(store.get(&key(3))), Ok(Some(given[3].clone())));

    drop(store);
    fs::rename(&blocks, &away).expect("unmounted");
    fs::create_dir(&blocks).expect("an empty mount point");
    let store = open_files(temp.path());
    assert_eq!(store.usage().blocks, 0, "it opens without its directory");
    fs::remove_dir(&blocks).expect("removed");
    fs::rename(&away, &blocks).expect("mounted");
    store.look().expect("back");
    assert_eq!(store.usage().blocks, 40);
}

/// The story: until the store had looked, blocks went into the empty directory under the mount.
#[test]
fn nothing_is_written_where_the_directory_was() {
    let temp = tempfile::tempdir().expect("a directory");
    let [blocks, away] = ["blocks", "away"].map(|name| temp.path().join(name));
    let store = open_files(temp.path());
    wait(store.put((0..10).map(|n| block(n, 0, 500, 9)).collect())).expect("kept");
    fs::rename(&blocks, &away).expect("unmounted");
    fs::create_dir(&blocks).expect("an empty mount point");
    let put = wait(store.put(vec![block(99, 0, 10, 9)]));
    assert!(matches!(put, Err(StoreError::Away { .. })), "{put:?}");
    assert_eq!(fs::read_dir(&blocks).expect("there").count(), 0);
    fs::remove_dir(&blocks).expect("removed");
    let put = wait(store.put(vec![block(99, 0, 10, 9)]));
    assert!(matches!(put, Err(StoreError::Away { .. })), "{put:?}");
}

/// What a user puts in the place of a block's file neither misleads nor stops the store.
#[test]
fn a_file_that_is_none_is_a_lost_block_and_no_more() {
    let temp = tempfile::tempdir().expect("a directory");
    let store = open_files(temp.path());
    let given: Vec<_> = (0..60).map(|n| block(n, 0, 500, 9)).collect();
    wait(store.put(given.clone())).expect("kept");
    let secret = temp.path().join("secret");
    fs::write(&secret, vec![1; 500]).expect("written");
    let files = files(temp.path());
    for (i, path) in files.iter().take(30).enumerate() {
        fs::remove_file(path).expect("removed");
        match i % 3 {
            0 => fs::create_dir(path).expect("made"),
            1 => std::os::unix::fs::symlink(&secret, path).expect("linked"),
            _ => {
                use rustix::fs::{CWD, FileType, Mode, mknodat};
                let mode = Mode::RUSR | Mode::WUSR;
                mknodat(CWD, path, FileType::Fifo, mode, 0).expect("made");
            }
        }
    }
    assert_eq!(look_after(&store), 30, "none keeps the others from being looked at");
    assert_eq!(store.usage().blocks, 30);
    let mut kept = 0;
    for block in &given {
        kept += usize::from(wait(store.put(vec![block.clone()])).is_ok());
    }
    assert_eq!(kept, 50, "in the place of all but the directories");
    assert_eq!(fs::read(&secret).expect("there"), vec![1; 500], "nothing goes through a link");
}

#[test]
fn a_directory_made_anew_is_taken_again_on_request() {
    let temp = tempfile::tempdir().expect("a directory");
    let blocks = temp.path().join("blocks");
    let store = open_files(temp.path());
    wait(store.put((0..40).map(|n| block(n, 0, 500, 9)).collect())).expect("kept");
    fs::remove_dir_all(&blocks).expect("the disk has died");
    assert!(store.look().is_err());
    assert!(store.take_again().is_err(), "there is none");
    fs::create_dir(&blocks).expect("made");
    assert!(store.look().is_err(), "it might be the wrong one");
    store.take_again().expect("taken");
    assert_eq!((look_after(&store), store.usage().blocks), (40, 0));
    wait(store.put(vec![block(1, 0, 500, 9)])).expect("kept");
}

#[test]
fn nothing_is_left_of_a_store_that_is_removed() {
    let temp = tempfile::tempdir().expect("a directory");
    let index = temp.path().join("index");
    let store = open_files(temp.path());
    wait(store.put((0..40).map(|n| block(n, 0, 500, 9)).collect())).expect("kept");
    let blocks = store.dir().to_path_buf();
    FileStore::check_fit(&blocks, file_config().flag).expect_err("it is taken");
    FileStore::check_reopen(&index, &blocks, file_config().flag).expect("it is ours");
    store.remove_all(&index).expect("removed");
    assert_eq!(fs::read_dir(&blocks).expect("there").count(), 0);
    assert!(!index.exists());
    FileStore::check_fit(&blocks, file_config().flag).expect("anybody's");
}

/// Blocks whose keys say what their bytes are, as on a ring: content, and volumes' roots.
fn true_blocks(count: u64) -> Vec<StoredBlock> {
    let block = |n: u64| {
        let content = contents(n, 0, 700);
        let (key, kind, version, bytes) = match n % 5 {
            0 => {
                let volume = SecretKey::from_seed(&[n as u8; 32]);
                let root = SignedBlock::sign(&volume, b"", 3 + n, &content);
                (root.key(), BlockKind::Signed, 3 + n, root.bytes().clone())
            }
            _ => (BlockHash::of(&content).key(), BlockKind::Content, 0, content),
        };
        let len_bytes = bytes.len() as u32;
        let info =
            BlockInfo { key, kind, version, expires_unix_secs: 9, len_bytes, owner: owner(1) };
        StoredBlock { info, bytes }
    };
    (0..count).map(block).collect()
}

/// The story: a damaged index took all blocks with it, though their files were whole: the next
/// sweep removed these.
#[test]
fn blocks_whose_index_is_damaged_are_found_in_their_files() {
    let temp = tempfile::tempdir().expect("a directory");
    let index = temp.path().join("index/index.redb");
    let mut given = true_blocks(60);
    let store = open_files(temp.path());
    wait(store.put(given.clone())).expect("kept");
    assert_eq!(store.adopted_blocks(), 0);
    drop(store);
    fs::write(&index, b"rubbish").expect("written");
    let paths = files(temp.path());
    fs::write(&paths[0], b"torn").expect("written");
    fs::copy(&paths[2], &paths[1]).expect("swapped");

    let store = open_files(temp.path());
    assert_eq!((store.adopted_blocks(), store.usage().blocks), (58, 58));
    assert_eq!(fs::read(index.with_extension("redb.damaged")).expect("kept"), b"rubbish");
    assert_eq!(files(temp.path()), paths[2..], "what is no block is swept away");
    let keys: Vec<_> = given.iter().map(|block| block.info.key).collect();
    let held = store.renew(&keys, 9, Default::default()).expect("readable");
    assert_eq!(held.iter().filter(|held| **held).count(), 58);
    for (block, held) in given.iter_mut().zip(held) {
        block.info.owner = Owner::NOBODY;
        assert_eq!(wait(store.get(&block.info.key)), Ok(held.then(|| block.clone())));
    }
    store.check_invariants();
    drop(store);
    assert_eq!(open_files(temp.path()).usage().blocks, 58);
}

/// Power was lost before the index knew of the blocks, or it was damaged while the file system
/// was not mounted.
#[test]
fn blocks_that_the_index_does_not_know_are_found_by_the_sweep() {
    let temp = tempfile::tempdir().expect("a directory");
    let [blocks, away] = ["blocks", "away"].map(|name| temp.path().join(name));
    let given = true_blocks(60);
    let store = open_files(temp.path());
    wait(store.put(given.clone())).expect("kept");
    drop(store);
    fs::write(temp.path().join("index/index.redb"), b"rubbish").expect("written");
    fs::rename(&blocks, &away).expect("unmounted");

    let store = open_files(temp.path());
    fs::rename(&away, &blocks).expect("mounted");
    store.look().expect("back");
    // An older version of a root whose newer one has come meanwhile.
    let volume = SecretKey::from_seed(&[0; 32]);
    let newer = SignedBlock::sign(&volume, b"", 99, b"newer");
    assert_eq!(newer.key(), given[0].info.key);
    let info = BlockInfo { version: 99, len_bytes: newer.bytes().len() as u32, ..given[0].info };
    wait(store.put(vec![StoredBlock { info, bytes: newer.bytes().clone() }])).expect("kept");
    wait(store.reclaim(0)).expect("swept");
    assert_eq!(store.usage().blocks, 1, "what a lease would be is not known yet");
    assert_eq!(files(temp.path()).len(), 60, "the older version is gone, and nothing else");
    assert_eq!(wait(store.remove_expired(5)), Ok(0));
    wait(store.reclaim(0)).expect("swept");
    assert_eq!(store.usage().blocks, 60);
    for block in &given[1..] {
        let got = wait(store.get(&block.info.key)).expect("answered").expect("held");
        assert_eq!((got.bytes, got.info.kind), (block.bytes.clone(), block.info.kind));
        assert!(got.info.expires_unix_secs > 24 * 3600);
    }
    assert_eq!(store.info(&newer.key()).expect("readable").expect("held").version, 99);
    store.check_invariants();
}
