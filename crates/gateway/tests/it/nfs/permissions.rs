//! Who may do what (Linux: `nfsd_permission`, `setattr_prepare`, `may_delete`).

use atoll_gateway::nfs::nfs3::{
    AccessArgs, Attributes, FileHandle, LinkArgs, MkNodArgs, MkNodData, Procedure, RenameArgs,
    Reply, SetAttributes, SetTime, SpecData, Stable, Status, Time, WccData, access,
};
use atoll_gateway::nfs::nfs3::{Created, FileType};
use atoll_gateway::nfs::{Export, Network};

use super::{ALICE, BOB, Client, ROOT, at, memory, serve, unchanged};

struct Scene {
    root: Client,
    alice: Client,
    bob: Client,
    top: FileHandle,
    /// Alice's, in which she has `f`.
    home: FileHandle,
    file: FileHandle,
}

async fn scene(mode: u32, file_mode: u32) -> Scene {
    let service = serve(memory());
    let [root, alice, bob] = [ROOT, ALICE, BOB].map(|uid| Client::new(&service, uid));
    let top = root.mount("/x").await.unwrap();
    let home = root.mkdir(&top, "home", 0o755).await.unwrap();
    let owner =
        SetAttributes { uid: Some(ALICE), gid: Some(ALICE), mode: Some(mode), ..unchanged() };
    root.setattr(&home, owner).await.unwrap();
    root.create(&home, "f", 0).await.unwrap();
    let file = root.lookup(&home, "f").await.unwrap().object;
    let owner =
        SetAttributes { uid: Some(ALICE), gid: Some(ALICE), mode: Some(file_mode), ..unchanged() };
    root.setattr(&file, owner).await.unwrap();
    Scene { root, alice, bob, top, home, file }
}

#[tokio::test]
async fn contents_are_for_those_whom_the_mode_lets() {
    let s = scene(0o755, 0o640).await;
    s.alice.write(&s.file, 0, b"abc", Stable::Unstable).await.unwrap();
    assert_eq!(s.bob.read(&s.file, 0, 3).await.unwrap_err(), Status::Acces);
    assert_eq!(s.bob.write(&s.file, 0, b"x", Stable::Unstable).await.unwrap_err(), Status::Acces);
    assert_eq!(
        s.bob.setattr(&s.file, SetAttributes { size: Some(0), ..unchanged() }).await,
        Err(Status::Acces)
    );
    s.alice.setattr(&s.file, SetAttributes { mode: Some(0o000), ..unchanged() }).await.unwrap();
    s.alice
        .write(&s.file, 0, b"ABC", Stable::Unstable)
        .await
        .expect("she may have opened it before");
    assert_eq!(s.alice.read(&s.file, 0, 3).await.unwrap().data, &b"ABC"[..]);
    s.root.setattr(&s.file, SetAttributes { mode: Some(0o711), ..unchanged() }).await.unwrap();
    assert_eq!(
        s.bob.read(&s.file, 0, 3).await.unwrap().data,
        &b"ABC"[..],
        "who executes a file reads it"
    );
}

#[tokio::test]
async fn names_are_made_and_removed_by_those_who_may_write_the_directory() {
    let s = scene(0o755, 0o666).await;
    assert_eq!(s.bob.create(&s.home, "g", 0o644).await, Err(Status::Acces));
    assert_eq!(s.bob.remove(&s.home, "f").await, Err(Status::Acces));
    let take = RenameArgs { from: at(&s.home, "f"), to: at(&s.top, "f") };
    let taken: Reply<(WccData, WccData), (WccData, WccData)> =
        s.alice.call(Procedure::Rename, &take).await;
    assert_eq!(taken.unwrap_err().0, Status::Acces, "not into another's directory");
    s.root.setattr(&s.home, SetAttributes { mode: Some(0o1777), ..unchanged() }).await.unwrap();
    assert_eq!(s.bob.remove(&s.home, "f").await, Err(Status::Perm), "a sticky directory");
    s.bob.create(&s.home, "g", 0o644).await.unwrap();
    assert_eq!(
        s.bob.getattr(&s.bob.lookup(&s.home, "g").await.unwrap().object).await.unwrap().uid,
        BOB
    );
    let replace = RenameArgs { from: at(&s.home, "g"), to: at(&s.home, "f") };
    let replaced: Reply<(WccData, WccData), (WccData, WccData)> =
        s.bob.call(Procedure::Rename, &replace).await;
    assert_eq!(replaced.unwrap_err().0, Status::Perm);
    s.alice.remove(&s.home, "g").await.expect("the directory is hers");
    s.root.setattr(&s.home, SetAttributes { mode: Some(0o700), ..unchanged() }).await.unwrap();
    assert_eq!(s.bob.lookup(&s.home, "f").await.unwrap_err(), Status::Acces);
    let link = LinkArgs { file: s.file.clone(), link: at(&s.home, "h") };
    type Linked = Reply<(Option<Attributes>, WccData), (Option<Attributes>, WccData)>;
    assert_eq!(s.bob.call::<_, Linked>(Procedure::Link, &link).await.unwrap_err().0, Status::Acces);
    assert!(s.alice.call::<_, Linked>(Procedure::Link, &link).await.is_ok());
}

#[tokio::test]
async fn attributes_are_the_owners_to_change() {
    let s = scene(0o755, 0o644).await;
    let set = |changes| s.bob.setattr(&s.file, changes);
    assert_eq!(set(SetAttributes { mode: Some(0o777), ..unchanged() }).await, Err(Status::Perm));
    assert_eq!(set(SetAttributes { uid: Some(BOB), ..unchanged() }).await, Err(Status::Perm));
    assert_eq!(set(SetAttributes { gid: Some(BOB), ..unchanged() }).await, Err(Status::Perm));
    let year_2000 = SetTime::To(Time { seconds: 946_684_800, nseconds: 0 });
    assert_eq!(
        set(SetAttributes { mtime: year_2000.clone(), ..unchanged() }).await,
        Err(Status::Perm)
    );
    assert_eq!(
        set(SetAttributes { mtime: SetTime::ServerTime, ..unchanged() }).await,
        Err(Status::Acces)
    );
    let own = |changes| s.alice.setattr(&s.file, changes);
    assert_eq!(
        own(SetAttributes { uid: Some(BOB), ..unchanged() }).await,
        Err(Status::Perm),
        "not given away"
    );
    assert_eq!(
        own(SetAttributes { gid: Some(BOB), ..unchanged() }).await,
        Err(Status::Perm),
        "not her group"
    );
    own(SetAttributes { mtime: year_2000, ..unchanged() }).await.unwrap();
    assert_eq!(s.alice.getattr(&s.file).await.unwrap().mtime.seconds, 946_684_800);
    s.root.setattr(&s.file, SetAttributes { gid: Some(BOB), ..unchanged() }).await.unwrap();
    own(SetAttributes { mode: Some(0o2755), ..unchanged() }).await.unwrap();
    assert_eq!(
        s.alice.getattr(&s.file).await.unwrap().mode,
        0o755,
        "no set-group-ID bit of a group that is not hers"
    );
}

#[tokio::test]
async fn a_write_and_a_new_owner_take_set_id_bits_away() {
    let s = scene(0o755, 0o6777).await;
    s.bob.write(&s.file, 0, b"x", Stable::Unstable).await.unwrap();
    assert_eq!(s.root.getattr(&s.file).await.unwrap().mode, 0o777);
    s.root.setattr(&s.file, SetAttributes { mode: Some(0o6777), ..unchanged() }).await.unwrap();
    s.bob.setattr(&s.file, SetAttributes { size: Some(0), ..unchanged() }).await.unwrap();
    assert_eq!(s.root.getattr(&s.file).await.unwrap().mode, 0o777);
    s.root.setattr(&s.file, SetAttributes { mode: Some(0o6777), ..unchanged() }).await.unwrap();
    s.root.setattr(&s.file, SetAttributes { uid: Some(BOB), ..unchanged() }).await.unwrap();
    assert_eq!(s.root.getattr(&s.file).await.unwrap().mode, 0o777);
}

#[tokio::test]
async fn rights_are_told_as_they_are_checked() {
    let s = scene(0o750, 0o640).await;
    let all = access::READ
        | access::LOOKUP
        | access::MODIFY
        | access::EXTEND
        | access::DELETE
        | access::EXECUTE;
    let rights = async |client: &Client, object: &FileHandle| {
        let args = AccessArgs { object: object.clone(), access: all };
        let told: Reply<(Option<Attributes>, u32), Option<Attributes>> =
            client.call(Procedure::Access, &args).await;
        told.unwrap().1
    };
    assert_eq!(rights(&s.alice, &s.home).await, all & !access::EXECUTE);
    assert_eq!(rights(&s.bob, &s.home).await, 0);
    assert_eq!(rights(&s.alice, &s.file).await, access::READ | access::MODIFY | access::EXTEND);
    assert_eq!(rights(&s.root, &s.file).await, access::READ | access::MODIFY | access::EXTEND);
    assert_eq!(rights(&s.bob, &s.top).await, access::READ | access::LOOKUP);
}

#[tokio::test]
async fn devices_are_made_by_root_alone() {
    let s = scene(0o777, 0o640).await;
    let device = SpecData { major: 0x1234, minor: 0x0005_6789 };
    let make = |name: &str| MkNodArgs {
        at: at(&s.home, name),
        what: MkNodData::Device(
            FileType::Chr,
            SetAttributes { mode: Some(0o600), ..unchanged() },
            device.clone(),
        ),
    };
    let made: Reply<Created, WccData> = s.alice.call(Procedure::MkNod, &make("a")).await;
    assert_eq!(made.unwrap_err().0, Status::Perm);
    let made: Reply<Created, WccData> = s.root.call(Procedure::MkNod, &make("b")).await;
    let attributes = made.unwrap().attributes.unwrap();
    assert_eq!((attributes.kind, attributes.rdev), (FileType::Chr, device.clone()));
    let fifo =
        MkNodArgs { at: at(&s.home, "p"), what: MkNodData::Plain(FileType::Fifo, unchanged()) };
    let made: Reply<Created, WccData> = s.alice.call(Procedure::MkNod, &fifo).await;
    assert_eq!(made.unwrap().attributes.unwrap().kind, FileType::Fifo);
    let regular = MkNodArgs { at: at(&s.home, "r"), what: MkNodData::Other(FileType::Reg) };
    let made: Reply<Created, WccData> = s.root.call(Procedure::MkNod, &regular).await;
    assert_eq!(made.unwrap_err().0, Status::BadType);
}

#[tokio::test]
async fn an_export_is_for_its_machines_also_with_a_handle_of_it() {
    let fs = memory();
    let service = serve(fs.clone());
    let client = Client::new(&service, ALICE);
    let top = client.mount("/x").await.unwrap();
    let elsewhere = Network::new("192.0.2.0".parse().unwrap(), 24).unwrap();
    service.add(Export { clients: vec![elsewhere], ..Export::local("/x", 9, fs) });
    assert_eq!(client.mount("/x").await, Err(13));
    assert_eq!(client.getattr(&top).await, Err(Status::Acces));
    let stranger = Client { address: ([192, 0, 2, 7], 5000).into(), ..Client::new(&service, ROOT) };
    assert!(stranger.getattr(&top).await.is_ok());
    assert_eq!(stranger.create(&top, "f", 0).await, Err(Status::Acces), "its root is nobody here");
    assert_eq!(stranger.mount("/y").await, Err(2));
}

/// Such a program would run with the rights of a group that its maker is not in.
#[tokio::test]
async fn a_new_program_has_no_set_group_id_of_a_group_that_is_not_its_makers() {
    let s = scene(0o2777, 0o644).await;
    let made = async |client: &Client, name: &str, mode| {
        let file = client.create(&s.home, name, mode).await.unwrap();
        let made = client.getattr(&file).await.unwrap();
        (made.gid, made.mode)
    };
    assert_eq!(made(&s.bob, "a", 0o2755).await, (ALICE, 0o755));
    assert_eq!(made(&s.bob, "b", 0o2745).await, (ALICE, 0o2745), "nobody of the group runs it");
    assert_eq!(made(&s.alice, "c", 0o2755).await, (ALICE, 0o2755));
    assert_eq!(made(&s.root, "d", 0o2755).await, (ALICE, 0o2755));
    let what =
        MkNodData::Plain(FileType::Fifo, SetAttributes { mode: Some(0o2755), ..unchanged() });
    let args = MkNodArgs { at: at(&s.home, "e"), what };
    let fifo: Reply<Created, WccData> = s.bob.call(Procedure::MkNod, &args).await;
    assert_eq!(fifo.unwrap().attributes.unwrap().mode, 0o755);
    // A directory hands its group on.
    let sub = s.bob.mkdir(&s.home, "g", 0o755).await.unwrap();
    assert_eq!(s.bob.getattr(&sub).await.unwrap().mode, 0o2755);
}
