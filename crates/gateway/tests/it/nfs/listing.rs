//! READDIR and READDIRPLUS.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use atoll_gateway::nfs::nfs3::{
    Attributes, FileHandle, Procedure, ReadDirArgs, ReadDirPlusArgs, Status,
};
use atoll_gateway::nfs::xdr::Reader;
use atoll_vfs::FileSystem;

use super::files::failing;
use super::{ALICE, Client, ROOT, memory, serve};

/// One reply: names with their cookies and, of READDIRPLUS, handles; and whether the directory ends.
type Part = (Vec<(String, u64, Option<FileHandle>)>, bool);

fn part(mut reply: Reader, plus: bool) -> Result<Part, Status> {
    let status: Status = reply.take().unwrap();
    let _directory: Option<Attributes> = reply.take().unwrap();
    if status != Status::Ok {
        return Err(status);
    }
    let _verifier: [u8; 8] = reply.take().unwrap();
    let mut names = Vec::new();
    while reply.take().unwrap() {
        let _fileid: u64 = reply.take().unwrap();
        let name: atoll_gateway::nfs::nfs3::Name = reply.take().unwrap();
        let cookie = reply.take().unwrap();
        let handle = if plus {
            let _attributes: Option<Attributes> = reply.take().unwrap();
            reply.take().unwrap()
        } else {
            None
        };
        names.push((String::from_utf8(name.0.to_vec()).unwrap(), cookie, handle));
    }
    let is_end = reply.take().unwrap();
    reply.end().unwrap();
    Ok((names, is_end))
}

async fn read_dir(
    client: &Client,
    xid: u32,
    dir: &FileHandle,
    cookie: u64,
    count: u32,
) -> Result<Part, Status> {
    let args = ReadDirArgs { dir: dir.clone(), cookie, verifier: [0; 8], count };
    let reply =
        client.send(client.record(xid, (100_003, 3), Procedure::ReadDir as u32, &args)).await;
    assert!(reply.rest().len() <= count as usize, "as long as the client has room for");
    part(reply, false)
}

async fn read_dir_plus(
    client: &Client,
    dir: &FileHandle,
    cookie: u64,
    counts: (u32, u32),
) -> Result<Part, Status> {
    let args = ReadDirPlusArgs {
        dir: dir.clone(),
        cookie,
        verifier: [0; 8],
        dir_count: counts.0,
        max_count: counts.1,
    };
    let reply =
        client.send(client.record(1, (100_003, 3), Procedure::ReadDirPlus as u32, &args)).await;
    assert!(reply.rest().len() <= counts.1 as usize);
    part(reply, true)
}

#[tokio::test]
async fn a_listing_goes_on_through_changes_and_restarts() {
    let fs = memory();
    goes_on(fs).await;
}

/// Where a cookie is the number of names before it, as in volumes.
#[tokio::test]
async fn a_listing_goes_on_also_where_the_file_system_counts_names() {
    goes_on(failing()).await;
}

async fn goes_on(fs: Arc<dyn FileSystem>) {
    let client = Client::new(&serve(fs.clone()), ROOT);
    let root = client.mount("/x").await.unwrap();
    for n in 0..1000 {
        client.create(&root, &format!("file{n:04}"), 0).await.unwrap();
    }
    let (mut cookie, mut seen, mut calls) = (0, Vec::new(), 0);
    loop {
        // Each part is listed by another server.
        let client = Client::new(&serve(fs.clone()), ROOT);
        let (names, is_end) = match calls % 2 {
            0 => read_dir(&client, calls, &root, cookie, 2000).await.unwrap(),
            _ => read_dir_plus(&client, &root, cookie, (2000, 8000)).await.unwrap(),
        };
        cookie = names.last().map_or(cookie, |(_, cookie, _)| *cookie);
        seen.extend(names.into_iter().map(|(name, ..)| name));
        if is_end {
            break;
        }
        // What was listed is removed, and what was not is made, meanwhile.
        let last = seen.last().unwrap().clone();
        if last.starts_with("file") {
            client.remove(&root, &last).await.unwrap();
        }
        client.create(&root, &format!("new{calls}"), 0).await.unwrap();
        calls += 1;
    }
    assert!(calls > 10);
    let listed: BTreeSet<&String> = seen.iter().collect();
    assert_eq!(listed.len(), seen.len(), "no name twice");
    for n in 0..1000 {
        assert!(listed.contains(&format!("file{n:04}")), "{n}");
    }
    assert_eq!(&seen[..2], [".", ".."]);
}

#[tokio::test]
async fn entries_come_with_handles_for_those_who_may_look_up() {
    let client = Client::new(&serve(memory()), ROOT);
    let root = client.mount("/x").await.unwrap();
    let file = client.create(&root, "f", 0o600).await.unwrap();
    let names_only = client.mkdir(&root, "r", 0o744).await.unwrap();
    client.create(&names_only, "hidden", 0o600).await.unwrap();
    let (names, is_end) = read_dir_plus(&client, &root, 0, (8192, 8192)).await.unwrap();
    assert!(is_end);
    assert!(names.iter().any(|(name, _, handle)| name == "f" && handle.as_ref() == Some(&file)));
    let alice = Client::new(&client.service, ALICE);
    let (names, _) = read_dir_plus(&alice, &names_only, 0, (8192, 8192)).await.unwrap();
    assert!(names.iter().all(|(_, _, handle)| handle.is_none()), "may read it, but not search it");
    assert!(names.iter().any(|(name, ..)| name == "hidden"));
    assert_eq!(alice.lookup(&names_only, "hidden").await.unwrap_err(), Status::Acces);
    let closed = client.mkdir(&root, "c", 0o711).await.unwrap();
    assert_eq!(read_dir_plus(&alice, &closed, 0, (8192, 8192)).await.unwrap_err(), Status::Acces);
}

#[tokio::test]
async fn room_that_holds_no_entry_and_cookies_of_nothing_are_told() {
    let client = Client::new(&serve(memory()), ROOT);
    let root = client.mount("/x").await.unwrap();
    let file = client.create(&root, "f", 0o600).await.unwrap();
    for count in [0, 1, 100, 120] {
        let args = ReadDirArgs { dir: root.clone(), cookie: 0, verifier: [0; 8], count };
        let reply =
            client.send(client.record(count, (100_003, 3), Procedure::ReadDir as u32, &args)).await;
        assert_eq!(part(reply, false).unwrap_err(), Status::TooSmall, "{count}");
    }
    assert_eq!(read_dir(&client, 0, &root, u64::MAX, 4096).await.unwrap_err(), Status::BadCookie);
    let (names, is_end) = read_dir(&client, 0, &root, 1 << 40, 4096).await.unwrap();
    assert!(names.is_empty() && is_end);
    assert_eq!(read_dir(&client, 0, &file, 0, 4096).await.unwrap_err(), Status::NotDir);
    assert!(read_dir(&client, 0, &root, 0, u32::MAX).await.unwrap().1);
}

/// Of a directory whose names take longer to read than a call may take.
#[tokio::test(start_paused = true)]
async fn names_are_read_on_after_a_call_is_given_up() {
    let fs = failing();
    let client = Client::new(&serve(fs.clone()), ROOT);
    let root = client.mount("/x").await.unwrap();
    client.create(&root, "f", 0o644).await.unwrap();
    fs.holds_names.store(true, Ordering::SeqCst);
    assert_eq!(read_dir(&client, 1, &root, 0, 2000).await.unwrap_err(), Status::Jukebox);
    fs.holds_names.store(false, Ordering::SeqCst);
    let (names, is_end) = read_dir(&client, 2, &root, 0, 2000).await.unwrap();
    assert!(is_end && names.iter().any(|(name, ..)| name == "f"));
    assert_eq!(fs.opendirs.load(Ordering::SeqCst), 1, "they were read once");
    client.create(&root, "g", 0o644).await.unwrap();
    let (names, _) = read_dir(&client, 3, &root, 0, 2000).await.unwrap();
    assert!(names.iter().any(|(name, ..)| name == "g"), "another listing begins anew");
}
