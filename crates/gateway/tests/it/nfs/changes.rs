//! Changes: made once, seen before and after, refused where they must be.

use atoll_gateway::nfs::nfs3::{
    CreateArgs, CreateHow, Created, FileHandle, MkDirArgs, Procedure, RenameArgs, Reply,
    SetAttrArgs, SetAttributes, SetTime, Status, Time, WccData,
};
use atoll_gateway::nfs::{Export, Service, Squash};

use super::{Client, ROOT, at, memory, options, serve, unchanged};

#[tokio::test]
async fn a_change_that_is_sent_twice_is_made_once() {
    let client = Client::new(&serve(memory()), ROOT);
    let root = client.mount("/x").await.unwrap();
    let make = MkDirArgs { at: at(&root, "d"), attributes: unchanged() };
    let first: Reply<Created, WccData> = client.call_as(7, Procedure::MkDir, &make).await;
    let again: Reply<Created, WccData> = client.call_as(7, Procedure::MkDir, &make).await;
    assert!(first.is_ok());
    assert_eq!(again, first);
    let other: Reply<Created, WccData> = client.call_as(8, Procedure::MkDir, &make).await;
    assert_eq!(other.unwrap_err().0, Status::Exist, "another call");
    // A client that has begun anew uses a number again for another call.
    let reused: Reply<WccData, WccData> =
        client.call_as(7, Procedure::RmDir, &at(&root, "d")).await;
    assert!(reused.is_ok());
    let other_user = Client::new(&client.service, super::ALICE);
    let made: Reply<Created, WccData> = other_user.call_as(7, Procedure::MkDir, &make).await;
    assert_eq!(made.unwrap_err().0, Status::Acces, "another user's call of that number");
}

#[tokio::test]
async fn an_exclusive_creation_is_known_again_by_all_of_its_verifier_after_a_restart() {
    let fs = memory();
    let client = Client::new(&serve(fs.clone()), ROOT);
    let root = client.mount("/x").await.unwrap();
    let create =
        |verifier| CreateArgs { at: at(&root, "lock"), how: CreateHow::Exclusive(verifier) };
    let verifier = [0xff, 2, 3, 4, 0x85, 6, 7, 0xf8];
    let made: Reply<Created, WccData> = client.call(Procedure::Create, &create(verifier)).await;
    let made = made.unwrap().object.unwrap();
    // Another server, as after a restart, without the cache of replies.
    let service = Service::new(options(2));
    service.add(Export { squash: Squash::None, ..Export::local("/x", 9, fs) });
    let client = Client::new(&service, ROOT);
    let again: Reply<Created, WccData> = client.call(Procedure::Create, &create(verifier)).await;
    assert_eq!(again.unwrap().object.unwrap(), made);
    for bit in 0..64 {
        let other = (u64::from_be_bytes(verifier) ^ 1 << bit).to_be_bytes();
        let refused: Reply<Created, WccData> = client.call(Procedure::Create, &create(other)).await;
        assert_eq!(refused.unwrap_err().0, Status::Exist, "bit {bit}");
    }
}

#[tokio::test]
async fn attributes_change_only_under_the_time_that_the_client_has_seen() {
    let client = Client::new(&serve(memory()), ROOT);
    let root = client.mount("/x").await.unwrap();
    let file = client.create(&root, "f", 0o600).await.unwrap();
    let seen = client.getattr(&file).await.unwrap().ctime;
    let set = |guard: Time| SetAttrArgs {
        object: file.clone(),
        changes: SetAttributes { mode: Some(0o640), ..unchanged() },
        guard: Some(guard),
    };
    let other = Time { seconds: seen.seconds ^ 1, ..seen.clone() };
    let refused: Reply<WccData, WccData> = client.call(Procedure::SetAttr, &set(other)).await;
    assert_eq!(refused.unwrap_err().0, Status::NotSync);
    assert_eq!(client.getattr(&file).await.unwrap().mode, 0o600);
    let wcc: Reply<WccData, WccData> = client.call(Procedure::SetAttr, &set(seen.clone())).await;
    let wcc = wcc.unwrap();
    assert_eq!(wcc.before.unwrap().ctime, seen);
    assert_eq!(wcc.after.unwrap().mode, 0o640);
}

#[tokio::test]
async fn a_directory_is_shown_before_and_after_a_change_of_its_names() {
    let client = Client::new(&serve(memory()), ROOT);
    let root = client.mount("/x").await.unwrap();
    let before = client.getattr(&root).await.unwrap();
    let create = CreateArgs { at: at(&root, "f"), how: CreateHow::Unchecked(unchanged()) };
    let made: Reply<Created, WccData> = client.call(Procedure::Create, &create).await;
    let dir = made.unwrap().dir;
    assert_eq!(dir.before.unwrap().ctime, before.ctime);
    assert_eq!(dir.after.unwrap(), client.getattr(&root).await.unwrap());
    let refused: Reply<Created, WccData> = client
        .call(Procedure::MkDir, &MkDirArgs { at: at(&root, "f"), attributes: unchanged() })
        .await;
    let (status, dir) = refused.unwrap_err();
    assert_eq!(status, Status::Exist);
    assert_eq!(dir.before.unwrap().ctime, dir.after.unwrap().ctime);
}

#[tokio::test]
async fn a_renamed_file_keeps_its_handle_and_a_removed_one_loses_it() {
    let client = Client::new(&serve(memory()), ROOT);
    let root = client.mount("/x").await.unwrap();
    let dir = client.mkdir(&root, "d", 0o755).await.unwrap();
    let file = client.create(&root, "f", 0o644).await.unwrap();
    let replaced = client.create(&dir, "g", 0o644).await.unwrap();
    client.write(&replaced, 0, b"old", atoll_gateway::nfs::nfs3::Stable::Unstable).await.unwrap();
    client.write(&file, 0, b"new", atoll_gateway::nfs::nfs3::Stable::Unstable).await.unwrap();
    let rename = RenameArgs { from: at(&root, "f"), to: at(&dir, "g") };
    let renamed: Reply<(WccData, WccData), (WccData, WccData)> =
        client.call(Procedure::Rename, &rename).await;
    renamed.unwrap();
    assert_eq!(client.read(&file, 0, 10).await.unwrap().data, &b"new"[..]);
    assert_eq!(client.lookup(&dir, "g").await.unwrap().object, file);
    closed().await;
    assert_eq!(
        client.getattr(&replaced).await,
        Err(Status::Stale),
        "although it was open here a moment ago"
    );
    client.remove(&dir, "g").await.unwrap();
    closed().await;
    assert_eq!(client.read(&file, 0, 10).await, Err(Status::Stale));
    assert_eq!(client.lookup(&dir, "..").await.unwrap().object, root);
    assert_eq!(
        client.lookup(&root, "..").await.unwrap().object,
        root,
        "nothing leads out of an export"
    );
}

/// Opens are closed by tasks.
async fn closed() {
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn dots_are_no_names_to_make_or_remove() {
    let client = Client::new(&serve(memory()), ROOT);
    let root = client.mount("/x").await.unwrap();
    for name in [".", ".."] {
        assert_eq!(client.create(&root, name, 0).await, Err(Status::Exist));
        assert_eq!(client.mkdir(&root, name, 0).await, Err(Status::Exist));
        assert!(client.remove(&root, name).await.is_err());
    }
    for (name, status) in [("", Status::Inval), ("a/b", Status::Inval), ("a\0b", Status::Inval)] {
        assert_eq!(client.create(&root, name, 0).await, Err(status), "{name:?}");
        assert_eq!(client.lookup(&root, name).await.unwrap_err(), status, "{name:?}");
    }
    let long = "x".repeat(256);
    assert_eq!(client.create(&root, &long, 0).await, Err(Status::NameTooLong));
    client.create(&root, "d", 0).await.unwrap();
    let removed: Reply<WccData, WccData> = client.call(Procedure::RmDir, &at(&root, "d")).await;
    assert_eq!(removed.unwrap_err().0, Status::NotDir);
    client.mkdir(&root, "dir", 0).await.unwrap();
    assert_eq!(client.remove(&root, "dir").await, Err(Status::IsDir));
}

#[tokio::test]
async fn nobody_makes_a_handle_up() {
    let fs = memory();
    let service = serve(fs.clone());
    service.add(Export { squash: Squash::None, ..Export::local("/y", 10, memory()) });
    let client = Client::new(&service, ROOT);
    let root = client.mount("/x").await.unwrap();
    let mut changed = root.0.to_vec();
    *changed.last_mut().unwrap() ^= 1;
    let forged = FileHandle::from(&changed[..]);
    assert_eq!(client.getattr(&forged).await, Err(Status::BadHandle));
    let mut other_export = root.0.to_vec();
    other_export[7] = 10;
    assert_eq!(client.getattr(&FileHandle::from(&other_export[..])).await, Err(Status::BadHandle));
    assert_eq!(client.getattr(&FileHandle::default()).await, Err(Status::BadHandle));
    service.remove("/x");
    assert_eq!(client.getattr(&root).await, Err(Status::Stale));
    service.add(Export { squash: Squash::None, ..Export::local("/x", 9, fs) });
    assert!(client.getattr(&root).await.is_ok(), "served again");
}

#[tokio::test]
async fn a_read_only_export_changes_nothing() {
    let fs = memory();
    let service = serve(fs.clone());
    let client = Client::new(&service, ROOT);
    let root = client.mount("/x").await.unwrap();
    let file = client.create(&root, "f", 0o644).await.unwrap();
    service.add(Export { squash: Squash::None, read_only: true, ..Export::local("/x", 9, fs) });
    assert_eq!(client.create(&root, "g", 0).await, Err(Status::RoFs));
    assert_eq!(client.remove(&root, "f").await, Err(Status::RoFs));
    assert_eq!(
        client.setattr(&file, SetAttributes { mtime: SetTime::ServerTime, ..unchanged() }).await,
        Err(Status::RoFs)
    );
    assert!(client.read(&file, 0, 1).await.unwrap().is_end);
}
