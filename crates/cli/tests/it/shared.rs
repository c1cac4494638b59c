//! Volumes that many write: who is who, and who may.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use crate::processes::{NodeProcess, Ring, Said, atoll, can_mount, run, unmount, until};

/// Who the user of a node is.
fn user(node: &NodeProcess) -> String {
    node.atoll(["id", "--json"]).ok().json()["user"].as_str().expect("a text").to_owned()
}

/// The members of a volume's default group, by label.
fn members(node: &NodeProcess, volume: &str) -> Vec<String> {
    let shown = node.atoll(["volume", "show", volume, "--json"]).ok().json();
    let members = shown["members"].as_array().expect("members").iter();
    let mut labels: Vec<String> =
        members.map(|member| member["label"].as_str().expect("a text").to_owned()).collect();
    labels.sort();
    labels
}

#[test]
fn a_user_has_one_key_per_node_which_others_cannot_read() {
    let ring = Ring::of(1);
    let node = &ring.nodes[0];
    let said = node.atoll(["id"]).ok();
    let lines: Vec<&str> = said.stdout.lines().collect();
    assert!(lines[0].starts_with("atolluser:") && lines.len() == 2, "{said:?}");
    let digits: Vec<&str> = lines[1].split(' ').collect();
    assert!(digits.len() == 6 && digits.iter().all(|group| group.len() == 4), "{said:?}");
    let again = node.atoll(["id", "--json"]).ok().json();
    assert_eq!(
        (again["user"].as_str(), again["digits"].as_str()),
        (Some(lines[0]), Some(lines[1]))
    );
    let mode =
        |name: &str| fs::metadata(node.dir.join(name)).expect("there").permissions().mode() & 0o777;
    assert_eq!((mode("identity"), mode("identity/user.key")), (0o700, 0o600));
    let key = node.dir.join("identity/user.key");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o644)).expect("chmod");
    node.atoll(["id"]).failed(1, &["can be read by others", "chmod 600"]);
}

#[test]
fn a_shared_volume_is_granted_and_revoked() {
    let ring = Ring::of(3);
    let (owner, guest) = (&ring.nodes[0], &ring.nodes[1]);
    let created = owner.atoll(["volume", "create", "work", "--shared", "--json"]).ok().json();
    let address = created["address"].as_str().expect("a text").to_owned();
    assert!(address.starts_with("atoll:") && created["shared"] == true, "{created}");
    owner.atoll(["volume", "create", "work", "--shared"]).failed(1, &["has a volume of that name"]);
    let listed = owner.atoll(["volume", "list", "--json"]).ok().json();
    assert!(listed["root_version"].as_u64() > Some(0), "the node keeps it: {listed}");
    let renewed = owner.atoll(["renew", "work", "--json"]).ok().json();
    assert_eq!(renewed["lost_blocks"], 0);
    assert_eq!(renewed["shared"]["inodes"], 1, "it walks from the root directory: {renewed}");
    assert_eq!(members(owner, "work"), ["owner"]);

    let alice = user(guest);
    let grant = |options: &[&str]| {
        run(owner.command(["grant", "work", &format!("alice={alice}")]).args(options))
    };
    grant(&["--until", "2020-01-01"]).failed(2, &["has passed"]);
    let said = grant(&["--until", "2096-01-31"]).ok().stdout;
    assert!(said.contains("alice may write it until 2096-01-31"), "{said}");
    assert_eq!(members(owner, "work"), ["alice", "owner"]);
    let text = owner.atoll(["volume", "show", "work"]).ok().stdout;
    assert!(text.contains("shared") && text.contains(&alice), "{text}");
    grant(&[]).ok();
    let said = owner.atoll(["revoke", "work", "alice"]).ok().stdout;
    assert!(said.contains("removed; can write until 20"), "{said}");
    assert_eq!(members(owner, "work"), ["owner"]);
    owner.atoll(["revoke", "work", "alice"]).failed(4, &["no member is called alice"]);
    owner.atoll(["revoke", "work", &alice]).failed(4, &["not a member", "--now"]);

    // At once, also one whose certificate still lasts; and again, if it was interrupted.
    grant(&[]).ok();
    let shut_out = |who: &str| owner.atoll(["revoke", "work", who, "--now", "--json"]).ok().json();
    assert_eq!(shut_out("alice")["rebound"], 1, "the root directory");
    assert_eq!(members(owner, "work"), ["owner"]);
    assert_eq!(shut_out(&alice)["rebound"], 1, "a former member may have a certificate");
    let said = owner.atoll(["revoke", "work", &alice, "--now"]).ok().stdout;
    assert!(said.contains("no member has this key") && said.contains("these may write"), "{said}");
    assert!(said.contains("  owner"), "{said}");
    grant(&[]).ok();
    assert_eq!(members(owner, "work"), ["alice", "owner"], "of the new group");

    // Only its owner says who may write, and it is no volume of one publisher.
    guest.atoll(["grant", "work", &alice]).failed(4, &["no volume of that name"]);
    guest.atoll(["ls", &address]).failed(1, &["shared volume", "atoll mount"]);
    owner.atoll(["volume", "create", "mine"]).ok();
    owner.atoll(["grant", "mine", &alice]).failed(1, &["not a shared volume", "--shared"]);
    owner.atoll(["volume", "delete", "work", "--yes"]).ok();
    guest.atoll(["ls", &address]).failed(4, &["removed by its owner"]);
}

#[test]
fn a_group_is_made_and_granted() {
    let ring = Ring::of(2);
    let (owner, other) = (&ring.nodes[0], &ring.nodes[1]);
    owner.atoll(["volume", "create", "work", "--shared"]).ok();
    let (alice, bob) = (user(owner), user(other));
    let create = |name: &str| other.atoll(["group", "create", name, &format!("bob={bob}")]);
    let group = create("band").ok().last_line().to_owned();
    assert!(group.starts_with("atollgroup:"), "{group}");
    let again = create("band").ok();
    assert!(again.last_line() == group && again.stderr.contains("there already"), "{again:?}");
    create("../band").failed(2, &["a group's name"]);
    other.atoll(["group", "add", "band", &format!("alice={alice}"), "--until", "2096-01-31"]).ok();
    let listed = || other.atoll(["group", "list", "band", "--json"]).ok().json();
    assert_eq!(listed()["members"].as_array().map(Vec::len), Some(2));
    let text = other.atoll(["group", "list", "band"]).ok().stdout;
    assert!(text.contains("alice") && text.contains("until 2096-01-31"), "{text}");
    assert_eq!(other.atoll(["group", "list"]).ok().stdout, format!("band  {group}\n"));
    other.atoll(["group", "add", "choir", &alice]).failed(4, &["no group choir"]);
    other.atoll(["group", "add", "band", "alice"]).failed(2, &["LABEL=atolluser:KEY"]);
    other.atoll(["group", "remove", "band", "alice"]).ok();
    other.atoll(["group", "remove", "band", "alice"]).failed(4, &["no member is called alice"]);
    assert_eq!(listed()["members"].as_array().map(Vec::len), Some(1));
    // The list of groups is a convenience.
    fs::remove_dir_all(other.dir.join("identity/groups")).expect("removed");
    assert_eq!(create("band").ok().last_line(), group);

    let rebound = |said: Said| said.ok().json()["rebound"].as_u64();
    let grant = || owner.atoll(["grant", "work", &group, "--json"]);
    assert_eq!(rebound(grant()), Some(1));
    assert_eq!(rebound(grant()), Some(0), "it may already");
    owner.atoll(["grant", "work/none", &group]).failed(4, &["there is no none in work"]);
    owner.atoll(["grant", "work/none", &bob]).failed(4, &["there is no none in work"]);
    owner.atoll(["grant", "work", "band"]).failed(4, &["no group band", "atoll id"]);
    owner.atoll(["grant", "work", &group, "--until", "2096-01-31"]).failed(2, &["group add"]);
    // Somebody shut out who can still write by the group is told.
    owner.atoll(["grant", "work", &format!("bob={bob}")]).ok();
    let said = owner.atoll(["revoke", "work", "bob", "--now"]).ok();
    assert!(said.stderr.contains(&group), "{said:?}");
    assert_eq!(rebound(owner.atoll(["revoke", "work", &group, "--json"])), Some(1));
}

#[test]
fn an_invitation_is_joined_with_one_code() {
    let ring = Ring::of(2);
    let (owner, guest) = (&ring.nodes[0], &ring.nodes[1]);
    let address = owner.atoll(["volume", "create", "work", "--shared"]).ok().last_line().to_owned();
    let code = owner.atoll(["volume", "invite", "work", "--label", "carol"]).ok();
    let code = code.last_line().to_owned();
    assert!(code.starts_with("atoll-share:"), "{code}");
    assert_eq!(members(owner, "work"), ["carol", "owner"]);
    let join = |name: &str| guest.atoll(["volume", "join", &code, name, "--json"]);
    let joined = join("team").ok().json();
    assert_eq!(joined["address"].as_str(), Some(&address[..]));
    assert_eq!(joined["may_write"], true);
    join("team").ok();
    let file = guest.dir.join("shared/team");
    assert_eq!(fs::metadata(&file).expect("kept").permissions().mode() & 0o777, 0o600);
    guest.atoll(["volume", "create", "team"]).failed(1, &["joined a shared volume"]);
    guest.atoll(["volume", "create", "mine"]).ok();
    join("mine").failed(1, &["another volume of that name"]);
    join("a/b").failed(2, &["a volume's name"]);
    let cut = &code[..code.len() - 4];
    let said = guest
        .atoll(["volume", "join", cut, "x"])
        .failed(2, &["cannot be used", "atoll volume invite"]);
    assert!(!said.stderr.contains(&code[20..60]), "{said:?}");
    let other = owner.atoll(["volume", "invite", "work"]).ok().last_line().to_owned();
    // One list of all that this node knows.
    let listed = |name: &str| {
        let all = guest.atoll(["volume", "list", "--json"]).ok().stdout;
        let all = all.lines().map(|line| serde_json::from_str(line).expect("JSON"));
        all.into_iter().find(|one: &serde_json::Value| one["name"] == name)
    };
    let team = || listed("team").expect("it is listed");
    assert_eq!((&team()["address"], &team()["shared"]), (&address[..].into(), &true.into()));
    assert_eq!(
        (&team()["joined"]["may_write"], &team()["joined"]["label"]),
        (&true.into(), &"carol".into())
    );
    assert!(listed("mine").expect("it is listed")["joined"].is_null());
    let text = guest.atoll(["volumes"]).ok().stdout;
    assert!(
        text.contains(&format!("team  {address}")) && text.contains("may write: yes, until"),
        "{text}"
    );
    let text = guest.atoll(["status"]).ok().stdout;
    assert!(text.contains(&format!("joined  team {address}")), "{text}");
    let shown = guest.atoll(["volume", "show", "team", "--json"]).ok().json();
    assert_eq!(
        (&shown["kind"], shown["members"].as_array().map(Vec::len)),
        (&"joined".into(), Some(3))
    );
    let text = guest.atoll(["volume", "show", "team"]).ok().stdout;
    assert!(text.contains("by an invitation, carol") && text.contains("member  owner"), "{text}");
    for command in [&["volume", "delete", "team", "--yes"][..], &["grant", "team", &user(owner)]] {
        run(&mut guest.command(command)).failed(1, &["has joined it", "its owner"]);
    }
    run(guest.command(["publish", "--name", "team"]).arg("src"))
        .failed(1, &["joined a shared volume that is called team", "--name"]);
    let foreign =
        owner.atoll(["volume", "create", "other", "--shared"]).ok().last_line().to_owned();
    guest
        .atoll(["volume", "join", &foreign, "team"])
        .failed(1, &["another volume", "volume forget team"]);
    let again = owner.atoll(["volume", "invite", "work"]).ok();
    assert!(again.stderr.contains("atoll revoke work invited-2"), "{again:?}");
    assert_eq!(members(owner, "work"), labels(&["carol", "invited", "invited-2", "owner"]));
    owner
        .atoll(["volume", "invite", "work", "--label", "carol"])
        .failed(1, &["has that label already", "--label"]);

    owner.atoll(["revoke", "work", "carol", "--now"]).ok();
    until("the guest may not write", || join("team").ok().json()["may_write"] == false);
    assert_eq!(team()["joined"]["may_write"], false);
    let text = guest.atoll(["volumes"]).ok().stdout;
    assert!(text.contains("may write: no") && text.contains("volume join - team"), "{text}");
    // The story: the name stayed bound to the dead key, and a new code was refused.
    let again = guest.atoll(["volume", "join", &other, "team", "--json"]).ok().json();
    assert_eq!(again["may_write"], true);
    assert_eq!(team()["joined"]["label"], "invited");
    // The same volume by the node's own user.
    let granted = guest.atoll(["volume", "join", &address, "team", "--json"]).ok();
    assert_eq!(granted.json()["may_write"], false);
    owner.atoll(["grant", "work", &format!("dave={}", user(guest))]).ok();
    until("the guest may write", || team()["joined"]["may_write"] == true);
    assert_eq!(
        (&team()["joined"]["label"], &team()["joined"]["invited"]),
        (&"dave".into(), &false.into())
    );
    guest.atoll(["volume", "forget", "team"]).failed(2, &["--yes"]);
    guest.atoll(["volume", "forget", "team", "--yes"]).ok();
    assert!(listed("team").is_none() && !file.exists());
    guest.atoll(["volume", "show", "team"]).failed(4, &["no volume of that name"]);
    guest.atoll(["volume", "forget", "team", "--yes"]).failed(4, &["no volume of that name"]);
    owner.atoll(["volume", "invite", "mine"]).failed(4, &["no volume of that name"]);
}

#[test]
fn members_write_through_mounts_at_the_same_time_and_others_read() {
    if !can_mount("members_write_through_mounts_at_the_same_time_and_others_read") {
        return;
    }
    let mut ring = Ring::of(3);
    let address =
        ring.nodes[0].atoll(["volume", "create", "work", "--shared"]).ok().last_line().to_owned();
    let code = ring.nodes[1].atoll(["id", "--json"]).ok();
    let alice = code.json()["user"].as_str().expect("a text").to_owned();
    ring.nodes[0].atoll(["grant", "work", &format!("alice={alice}")]).ok();
    let owner = ring.mount(0, "work", &[]);
    let member = ring.mount(1, &address, &["--consistency", "cto"]);
    let stranger = ring.mount(2, &address, &["--consistency", "ryw"]);
    fs::create_dir(owner.join("plans")).expect("makes");
    fs::write(owner.join("plans/one"), "owner's").expect("writes");
    until("the member sees it", || member.join("plans/one").exists());
    assert_eq!(fs::read(member.join("plans/one")).expect("reads"), b"owner's");
    fs::write(member.join("plans/two"), "member's").expect("writes");
    until("the owner sees it", || owner.join("plans/two").exists());
    assert_eq!(fs::read(owner.join("plans/two")).expect("reads"), b"member's");
    until("the stranger sees it", || stranger.join("plans/two").exists());
    let refused = fs::write(stranger.join("mine"), "x").expect_err("read-only");
    assert_eq!(refused.raw_os_error(), Some(30), "EROFS");

    let revoke = ["revoke", "work", "alice", "--now", "--json"];
    let rebound = ring.nodes[0].atoll(revoke).ok().json()["rebound"].as_u64();
    assert_eq!(rebound, Some(4), "two files in a directory in the root");
    until("the member cannot write", || fs::write(member.join("plans/late"), "x").is_err());
    fs::write(owner.join("plans/three"), "goes on").expect("the owner writes");

    let code = ring.nodes[0].atoll(["volume", "invite", "work"]).ok().last_line().to_owned();
    ring.nodes[2].atoll(["volume", "join", &code, "team"]).ok();
    unmount(atoll().arg("unmount").arg(&stranger));
    let joined = ring.mount(2, "team", &[]);
    fs::write(joined.join("hello"), "by invitation").expect("writes");
    until("the owner sees it", || owner.join("hello").exists());
    let elsewhere = ring.path("elsewhere");
    fs::create_dir(&elsewhere).expect("a directory");
    run(ring.nodes[0].command(["mount", "work", "--take-over"]).arg(&elsewhere))
        .failed(2, &["a shared volume"]);
}

/// Grants, revocations and lists of an encrypted volume; the mounts are the next test's.
#[test]
fn the_readers_of_an_encrypted_volume_are_granted_listed_and_revoked() {
    let ring = Ring::of(2);
    let (owner, guest) = (&ring.nodes[0], &ring.nodes[1]);
    let create = ["volume", "create", "board", "--shared", "--encrypt", "--json"];
    let created = owner.atoll(create).ok().json();
    assert_eq!((&created["shared"], &created["encrypted"]), (&true.into(), &true.into()));
    let address = created["address"].as_str().expect("a text").to_owned();
    assert!(!address.contains('#'), "each reader has the key by the user's own: {address}");
    let readers = || -> Vec<String> {
        let shown = owner.atoll(["volume", "show", "board", "--json"]).ok().json();
        assert_eq!(shown["encrypted"], true);
        let readers = shown["readers"].as_array().expect("readers").iter();
        let mut labels: Vec<String> =
            readers.map(|reader| reader["label"].as_str().expect("a text").to_owned()).collect();
        labels.sort();
        labels
    };
    assert_eq!(readers(), ["owner"]);
    let alice = user(guest);
    let labelled = format!("alice={alice}");
    let said = owner.atoll(["grant", "board", &labelled, "--read"]).ok().stdout;
    assert!(said.contains("alice may read it without an end"), "{said}");
    assert_eq!(
        (readers(), members(owner, "board")),
        (labels(&["alice", "owner"]), labels(&["owner"]))
    );
    let text = owner.atoll(["volume", "show", "board"]).ok().stdout;
    assert!(text.contains("encrypted  yes") && text.contains("reader  alice"), "{text}");

    // Without --now the user keeps the key that is in use; a member is a reader too.
    let said = owner.atoll(["revoke", "board", "alice"]).ok().stdout;
    assert!(said.contains("can read what is written until somebody is revoked"), "{said}");
    assert_eq!(readers(), ["owner"]);
    let said = owner.atoll(["grant", "board", &labelled, "--write"]).ok().stdout;
    assert!(said.contains("alice may write it"), "{said}");
    assert_eq!(
        (readers(), members(owner, "board")),
        (labels(&["alice", "owner"]), labels(&["alice", "owner"]))
    );
    assert_eq!(
        owner.atoll(["revoke", "board", "alice", "--now", "--json"]).ok().json()["rebound"],
        1
    );
    assert_eq!((readers(), members(owner, "board")), (labels(&["owner"]), labels(&["owner"])));
    owner.atoll(["revoke", "board", "alice"]).failed(4, &["no member is called alice"]);
    owner.atoll(["volume", "invite", "board", "--label", "bob"]).ok();
    assert_eq!(readers(), ["bob", "owner"]);
    assert_eq!(owner.atoll(["renew", "board", "--json"]).ok().json()["lost_blocks"], 0);

    // A group's members are readers for as long as the group may use the volume.
    owner.atoll(["group", "create", "band", &labelled]).ok();
    let granted = owner.atoll(["grant", "board", "band", "--json"]).ok().json();
    assert_eq!((&granted["readers"], &granted["rebound"]), (&1.into(), &1.into()));
    assert_eq!(readers(), labels(&["alice", "bob", "owner"]));
    let text = owner.atoll(["volume", "show", "board"]).ok().stdout;
    assert!(text.contains("by atollgroup:"), "{text}");
    let said = owner.atoll(["revoke", "board", "band"]).ok().stdout;
    assert!(said.contains("can read what is written until"), "{said}");
    assert_eq!(readers(), labels(&["bob", "owner"]));
    owner.atoll(["grant", "board", "band", "--read"]).ok();
    assert_eq!(readers(), labels(&["alice", "bob", "owner"]));
    owner.atoll(["grant", "board/plans", "band", "--read"]).failed(2, &["for a whole volume"]);
    let volumes = owner.atoll(["volumes", "--json"]).ok().json();
    assert_eq!((&volumes["shared"], &volumes["encrypted"]), (&true.into(), &true.into()));
    let text = owner.atoll(["volumes"]).ok().stdout;
    assert!(text.contains("shared, encrypted") && !text.contains("0 blocks"), "{text}");
    owner.atoll(["volume", "create", "work", "--shared"]).ok();
    owner.atoll(["grant", "work", &labelled, "--read"]).failed(2, &["it is not encrypted"]);
    owner.atoll(["grant", "work", &labelled, "--read", "--write"]).failed(2, &["cannot be used"]);
}

fn labels(of: &[&str]) -> Vec<String> {
    of.iter().map(|label| (*label).to_owned()).collect()
}

#[test]
fn readers_of_an_encrypted_volume_mount_it_and_others_are_told_whom_to_ask() {
    if !can_mount("readers_of_an_encrypted_volume_mount_it_and_others_are_told_whom_to_ask") {
        return;
    }
    let mut ring = Ring::of(3);
    let create = ["volume", "create", "board", "--shared", "--encrypt"];
    let address = ring.nodes[0].atoll(create).ok().last_line().to_owned();
    let (alice, bob) = (user(&ring.nodes[1]), user(&ring.nodes[2]));
    let owner = ring.mount(0, "board", &[]);
    fs::write(owner.join("plan"), "words that only readers see").expect("writes");
    let here = ring.path("here");
    fs::create_dir(&here).expect("a directory");
    let ask = format!("atoll grant NAME {alice} --read");
    run(ring.nodes[1].command(["mount", &address]).arg(&here))
        .failed(1, &["not among its readers", &ask]);

    ring.nodes[0].atoll(["grant", "board", &format!("alice={alice}"), "--read"]).ok();
    ring.nodes[0].atoll(["grant", "board", &format!("bob={bob}")]).ok();
    let reader = ring.mount(1, &address, &[]);
    let member = ring.mount(2, &address, &[]);
    let words = fs::read(reader.join("plan")).expect("reads");
    assert_eq!(words, b"words that only readers see");
    let refused = fs::write(reader.join("mine"), "x").expect_err("read-only");
    assert_eq!(refused.raw_os_error(), Some(13), "EACCES");
    fs::write(member.join("more"), "written by a member").expect("writes");
    until("the reader sees it", || reader.join("more").exists());
    assert_eq!(fs::read(reader.join("more")).expect("reads"), b"written by a member");

    // Shut out, the reader reads nothing that is written from then on.
    ring.nodes[0].atoll(["revoke", "board", "alice", "--now"]).ok();
    fs::write(member.join("late"), "not for alice").expect("writes");
    until("the owner sees it", || owner.join("late").exists());
    assert_eq!(fs::read(owner.join("late")).expect("reads"), b"not for alice");
    let refused = fs::read(reader.join("late")).expect_err("sealed with another key");
    assert_eq!(refused.raw_os_error(), Some(13), "EACCES");
    unmount(atoll().arg("unmount").arg(&reader));
    run(ring.nodes[1].command(["mount", &address]).arg(&here))
        .failed(1, &["not among its readers", &ask]);

    let code = ring.nodes[0].atoll(["volume", "invite", "board"]).ok().last_line().to_owned();
    ring.nodes[1].atoll(["volume", "join", &code, "team"]).ok();
    let joined = ring.mount(1, "team", &[]);
    let words = fs::read(joined.join("plan")).expect("reads what is older");
    assert_eq!(words, b"words that only readers see");
    fs::write(joined.join("hello"), "by invitation").expect("writes");
    until("the owner sees it", || owner.join("hello").exists());
}

#[test]
fn a_user_needs_a_node() {
    let temp = tempfile::tempdir().expect("temp");
    let dir = temp.path().join("none");
    for arguments in [
        &["id"][..],
        &["group", "list"],
        &["group", "create", "band"],
        &["grant", "work", "band"],
        &["revoke", "work", "band"],
        &["volume", "invite", "work"],
    ] {
        run(atoll().args(arguments).arg("--dir").arg(&dir)).failed(3, &["no node runs in"]);
    }
    assert!(!dir.exists());
    for (arguments, words) in [
        (&["grant", "work"][..], "<USER|GROUP>"),
        (&["grant", "work", "atolluser:abc"], "missing"),
        (&["grant", "work", "alice=bob"], "atoll id"),
        (&["revoke", "work", "atollgroup:aaaa"], "missing"),
        (&["group", "add", "band"], "<USER>"),
        (&["volume", "create", "a", "--shared", "--keep", "5w"], "at most four weeks"),
        (&["volume", "join", "hello", "a"], "should begin with"),
    ] {
        run(atoll().args(arguments).arg("--dir").arg(&dir)).failed(2, &[words]);
    }
}

/// The names alone were looked at: a file that was named so by a program was listed, and contents were not which nobody had
/// opened; these were lost when the file was replaced.
#[test]
fn conflicts_are_those_that_the_mount_knows_of() {
    let temp = tempfile::tempdir().expect("temp");
    let top = temp.path();
    fs::write(top.join("plan~0a1b2c3d~20261123T135501Z"), "x").expect("writes");
    let conflicts = |options: &[&str]| run(atoll().arg("conflicts").args(options).current_dir(top));
    conflicts(&[]).failed(2, &["it is in no mount of a shared volume"]);
    conflicts(&["none"]).failed(4, &["cannot read none"]);
    conflicts(&["plan~0a1b2c3d~20261123T135501Z"]).failed(2, &["not a directory"]);
    if !can_mount("conflicts_are_those_that_the_mount_knows_of") {
        return;
    }
    let mut ring = Ring::of(3);
    let address =
        ring.nodes[0].atoll(["volume", "create", "work", "--shared"]).ok().last_line().to_owned();
    let alice = user(&ring.nodes[1]);
    ring.nodes[0].atoll(["grant", "work", &format!("alice={alice}")]).ok();
    let one = ring.mount(0, "work", &[]);
    let two = ring.mount(1, &address, &[]);
    fs::create_dir(one.join("plans")).expect("makes");
    fs::write(one.join("plans/plan"), "before").expect("writes");
    fs::write(one.join("plans/plan~0a1b2c3d~20261123T135501Z"), "a program's").expect("writes");
    until("the member sees it", || two.join("plans/plan").exists());
    let found = |paths: &[&str]| -> Vec<serde_json::Value> {
        let said = run(atoll().args(["conflicts", "--json"]).args(paths).current_dir(&one));
        said.ok().stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    };
    assert!(found(&[]).is_empty());

    // Both have it open, and write it at the same time.
    let open = |mount: &std::path::Path| {
        fs::File::options().write(true).open(mount.join("plans/plan")).expect("opens")
    };
    let (mut mine, mut theirs) = (open(&one), open(&two));
    std::io::Write::write_all(&mut mine, b"of one").expect("writes");
    std::io::Write::write_all(&mut theirs, b"of alice").expect("writes");
    drop((mine, theirs));
    let unopened = || found(&["plans"]).iter().filter(|one| one["unopened"] == true).count();
    until("the contents are told that nobody has opened", || unopened() == 1);
    let said = run(atoll().arg("conflicts").current_dir(&one)).ok().stdout;
    assert!(said.starts_with("plans/plan  has another version, written by "), "{said}");

    // One replaces the file, which nobody has opened.
    fs::write(one.join("new"), "new").expect("writes");
    fs::rename(one.join("new"), one.join("plans/plan")).expect("renames");
    let kept = || {
        let found = found(&[]);
        found.len() == 1 && found[0]["unopened"] == false && found[0]["beside"] == "plans/plan"
    };
    until("what was not shown is kept", kept);
    let kept = found(&[])[0]["path"].as_str().expect("a path").to_owned();
    let texts = [&kept[..], "plans/plan"].map(|name| fs::read(one.join(name)).expect("reads"));
    assert!([&b"of one"[..], b"of alice"].contains(&&texts[0][..]), "{texts:?}");
    assert_eq!(texts[1], b"new");
    let said = run(atoll().args(["conflicts", "plans"]).current_dir(&one)).ok().stdout;
    assert!(said.contains("  beside plan, written by "), "{said}");
}

/// Everything that can be asked of a file of two members, while all nodes are there and when one is gone.
#[test]
fn a_file_explains_its_replicas_its_writers_and_what_to_do() {
    if !can_mount("a_file_explains_its_replicas_its_writers_and_what_to_do") {
        return;
    }
    let mut ring = Ring::of(4);
    let address =
        ring.nodes[0].atoll(["volume", "create", "work", "--shared"]).ok().last_line().to_owned();
    let alice = user(&ring.nodes[1]);
    ring.nodes[0].atoll(["grant", "work", &format!("alice={alice}")]).ok();
    let owner = ring.mount(0, "work", &[]);
    let member = ring.mount(1, &address, &[]);
    fs::write(owner.join("plan"), vec![7; 300 << 10]).expect("writes");
    until("the member sees it", || member.join("plan").exists());
    fs::write(member.join("plan"), vec![8; 300 << 10]).expect("writes");
    // Acknowledged is what a majority has, and who has read it is known for 15 seconds.
    let mut told = serde_json::Value::Null;
    until("all replicas have it, and its readers are known", || {
        let _ = fs::read(owner.join("plan"));
        told = ask(&ring.nodes[0], &owner.join("plan"));
        let is_newest = |one: &serde_json::Value| one["state"] == "newest";
        let has_readers = told["open"]["readers"].as_array().is_some_and(|all| !all.is_empty());
        told["replicas"].as_array().is_some_and(|all| all.len() == 3 && all.iter().all(is_newest))
            && told["data"]["blocks"] == told["data"]["complete"]
            && has_readers
            && told["todo"] == serde_json::json!([])
    });
    assert_eq!(told["written"]["label"], "alice", "{told}");
    assert_eq!((&told["label"], &told["volume"]), (&"work".into(), &address[..].into()));
    assert!(told["data"]["blocks"].as_u64() >= Some(2), "{told}");
    assert_eq!(told["access"]["may_write"], true);
    assert_eq!(told["pending"]["changed"], false);
    let text = run(ring.nodes[0].command(["why"]).arg(owner.join("plan"))).ok().stdout;
    for part in ["3 of 3 have version", "by alice", "all of them on all nodes", "to do  nothing"] {
        assert!(text.contains(part), "{part}: {text}");
    }

    // An open file that is locked. A command that is started closes its copy of it: what was written goes to the ring.
    let mut file = fs::File::options().write(true).open(member.join("plan")).expect("opens");
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).expect("locks");
    std::io::Write::write_all(&mut file, b"more").expect("writes");
    let told = ask(&ring.nodes[1], &member.join("plan"));
    assert_eq!((&told["open"]["here"], &told["pending"]["changed"]), (&1.into(), &false.into()));
    let locks = told["open"]["locks"].as_array().expect("a list");
    assert!(locks.len() == 1 && locks[0]["exclusive"] == true, "{told}");
    let elsewhere = ask(&ring.nodes[0], &owner.join("plan"));
    assert_eq!(elsewhere["open"]["locks"][0]["node"], locks[0]["node"], "{elsewhere}");
    assert_eq!(elsewhere["open"]["locks"][0]["own"], false);
    drop(file);

    // A node that holds the file is gone.
    let told = ask(&ring.nodes[0], &owner.join("plan"));
    let own = |of: &serde_json::Value| of["own"] == true;
    let replicas = told["replicas"].as_array().expect("a list");
    let gone = replicas.iter().find(|one| !own(one) && one["addr"] != *ring_addr(&ring, 1));
    let gone =
        gone.expect("one that neither mount needs")["addr"].as_str().expect("text").to_owned();
    let at = (2..4).find(|at| ring_addr(&ring, *at) == gone).expect("one of the ring");
    ring.nodes[at].kill();
    // The node is silent until the ring has left it out; then another one lacks its copies.
    until("something is to be done", || {
        let todo = ask(&ring.nodes[0], &owner.join("plan"))["todo"].to_string();
        todo.contains("not answer") || todo.contains("Wait: ")
    });

    // What is no file of a shared volume is refused, and says why.
    run(ring.nodes[0].command(["why"]).arg(&ring.nodes[0].dir))
        .failed(2, &["in no mount of Atoll"]);
    ring.nodes[0].atoll(["volume", "create", "mine"]).ok();
    let mine = ring.mount(0, "mine", &[]);
    run(ring.nodes[0].command(["why"]).arg(&mine)).failed(2, &["is not shared", "ok"]);
    unmount(atoll().arg("unmount").arg(&mine));
    run(ring.nodes[0].command(["why"]).arg(owner.join("none"))).failed(4, &["cannot say anything"]);
}

/// What `atoll why` says of a file.
fn ask(node: &NodeProcess, path: &std::path::Path) -> serde_json::Value {
    run(node.command(["why", "--json"]).arg(path)).ok().json()
}

/// Where a node of the ring listens.
fn ring_addr(ring: &Ring, at: usize) -> String {
    ring.nodes[at].atoll(["status", "--json"]).ok().json()["advertise"]
        .as_str()
        .expect("text")
        .to_owned()
}

/// The story: a user who was shut out of a path went on writing files that were moved or linked out of it.
#[test]
fn a_user_is_shut_out_of_what_has_left_the_path() {
    if !can_mount("a_user_is_shut_out_of_what_has_left_the_path") {
        return;
    }
    let mut ring = Ring::of(3);
    let address = ring.nodes[0].atoll(["volume", "create", "work", "--shared"]).ok();
    let address = address.last_line().to_owned();
    let (alice, bob) = (user(&ring.nodes[1]), user(&ring.nodes[2]));
    let owner = ring.mount(0, "work", &[]);
    fs::create_dir_all(owner.join("plans/sub")).expect("makes");
    for name in ["plans/moved", "plans/linked", "plans/sub/deep"] {
        fs::write(owner.join(name), "owner's").expect("writes");
    }
    for (label, key) in [("alice", &alice), ("bob", &bob)] {
        ring.nodes[0].atoll(["grant", "work/plans", &format!("{label}={key}")]).ok();
    }
    let (one, two) = (ring.mount(1, &address, &[]), ring.mount(2, &address, &[]));
    fs::rename(owner.join("plans/moved"), owner.join("moved")).expect("moves");
    fs::rename(owner.join("plans/sub"), owner.join("out")).expect("moves");
    fs::hard_link(owner.join("plans/linked"), owner.join("linked")).expect("links");
    fs::remove_file(owner.join("plans/linked")).expect("removes");
    let outside = ["moved", "linked", "out/deep"];
    for name in outside {
        until("both see it", || one.join(name).exists() && two.join(name).exists());
        fs::write(one.join(name), "alice's").expect("its groups are as they were");
    }
    ring.nodes[0].atoll(["revoke", "work/plans", "alice", "--now"]).ok();
    for name in outside {
        until("alice cannot write", || fs::write(one.join(name), "late").is_err());
        until("bob can", || fs::write(two.join(name), "bob's").is_ok());
    }
    assert!(fs::write(one.join("out/new"), "late").is_err());
    ring.nodes[0].atoll(["revoke", "work/plans", "bob"]).ok();
    for name in outside {
        until("bob cannot write", || fs::write(two.join(name), "late").is_err());
        fs::write(owner.join(name), "owner's").expect("the owner can");
    }
    // A group that was made otherwise may have been granted elsewhere as well.
    ring.nodes[0].atoll(["group", "create", "band"]).ok();
    ring.nodes[0].atoll(["grant", "work/out", "band"]).ok();
    let said = ring.nodes[0].atoll(["revoke", "work/out", "band"]).ok().stdout;
    assert!(said.contains("moved or linked out of the path keeps the group"), "{said}");
}

/// A part of a volume is granted to a user by name, and taken away again.
#[test]
fn a_user_is_granted_a_path_and_writes_nothing_else() {
    if !can_mount("a_user_is_granted_a_path_and_writes_nothing_else") {
        return;
    }
    let mut ring = Ring::of(3);
    let create = ["volume", "create", "work", "--shared", "--encrypt"];
    let address = ring.nodes[0].atoll(create).ok().last_line().to_owned();
    let (alice, bob) = (user(&ring.nodes[1]), user(&ring.nodes[2]));
    let owner = ring.mount(0, "work", &[]);
    fs::create_dir_all(owner.join("plans/2026")).expect("makes");
    fs::write(owner.join("plans/2026/budget"), "owner's").expect("writes");
    let grant = |path: &str, who: &str, key: &str| {
        ring.nodes[0].atoll(["grant", path, &format!("{who}={key}"), "--json"])
    };
    let granted = grant("work/plans/2026", "alice", &alice).ok().json();
    assert_eq!((&granted["rebound"], &granted["access"]), (&2.into(), &"write".into()));
    assert_eq!(grant("work/plans/2026", "bob", &bob).ok().json()["rebound"], 0);
    grant("work/none", "bob", &bob).failed(4, &["there is no none"]);
    let listed = ring.nodes[0].atoll(["group", "list"]).ok().stdout;
    assert!(listed.starts_with("work:plans:2026  atollgroup:"), "{listed}");
    let listed = ring.nodes[0].atoll(["group", "list", "work:plans:2026", "--json"]).ok().json();
    assert_eq!(listed["members"].as_array().map(Vec::len), Some(2));

    let (one, two) = (ring.mount(1, &address, &[]), ring.mount(2, &address, &[]));
    fs::write(one.join("plans/2026/mine"), "alice's").expect("writes there");
    assert!(
        fs::write(one.join("plans/other"), "x").is_err() && fs::write(one.join("x"), "x").is_err()
    );
    until("the owner sees it", || owner.join("plans/2026/mine").exists());
    assert_eq!(fs::read(two.join("plans/2026/mine")).expect("reads"), b"alice's");
    let told = run(ring.nodes[1].command(["why", "--json"]).arg(one.join("plans"))).ok().json();
    assert_eq!(told["access"]["may_write"], false);
    assert!(told["todo"].to_string().contains("atoll grant NAME atolluser:"), "{told}");

    ring.nodes[0].atoll(["revoke", "work/plans", "alice"]).failed(4, &["no user was granted"]);
    ring.nodes[0].atoll(["revoke", "work/plans/2026", "carol"]).failed(4, &["called carol"]);
    let said = ring.nodes[0].atoll(["revoke", "work/plans/2026", "alice", "--now"]).ok().stdout;
    assert!(said.contains("shut out"), "{said}");
    until("alice cannot write", || fs::write(one.join("plans/2026/mine"), "late").is_err());
    until("bob still can", || fs::write(two.join("plans/2026/bobs"), "bob's").is_ok());
    fs::write(owner.join("plans/2026/secret"), "not for alice").expect("writes");
    until("bob reads it", || fs::read(two.join("plans/2026/secret")).is_ok());
    assert!(fs::read(one.join("plans/2026/secret")).is_err(), "she has no key of it");
    // The last one is shut out at once, and the path is the owner's alone.
    ring.nodes[0].atoll(["revoke", "work/plans/2026", "bob"]).ok();
    until("bob cannot write", || fs::write(two.join("plans/2026/bobs"), "late").is_err());
    let groups = run(ring.nodes[0].command(["why", "--json"]).arg(owner.join("plans/2026")));
    assert_eq!(groups.ok().json()["access"]["groups"].as_array().map(Vec::len), Some(1));
}

/// A member of a group of one's own loses the right at once, wherever the group was granted.
#[test]
fn a_member_is_removed_from_a_group_at_once() {
    let ring = Ring::of(2);
    let (owner, other) = (&ring.nodes[0], &ring.nodes[1]);
    owner.atoll(["volume", "create", "work", "--shared"]).ok();
    owner.atoll(["volume", "create", "mine"]).ok();
    let alice = user(other);
    let created = owner.atoll(["group", "create", "band", &format!("alice={alice}")]).ok();
    let first = created.last_line().to_owned();
    owner.atoll(["grant", "work", "band"]).ok();
    let said = owner.atoll(["group", "remove", "band", "alice", "--now"]).ok().stdout;
    assert!(said.contains("shut out, 1 changed; the group is atollgroup:"), "{said}");
    assert!(!said.contains(&first), "{said}");
    let listed = owner.atoll(["group", "list", "band", "--json"]).ok().json();
    assert_eq!(listed["members"], serde_json::json!([]));
    assert!(said.contains(listed["group"].as_str().expect("text")), "{listed}");
    owner.atoll(["group", "add", "band", &format!("alice={alice}")]).ok();
    owner.atoll(["group", "remove", "band", "alice"]).ok();
    // The list of groups is a convenience.
    fs::remove_dir_all(owner.dir.join("identity/groups")).expect("removed");
    let again = owner.atoll(["group", "create", "band"]).ok();
    assert_eq!(again.last_line(), listed["group"].as_str().expect("text"));
}

/// A member's node renews certificates as the owner's does; the key that takes is replaced when it is a keeper no more.
#[test]
fn a_keeper_is_named_listed_and_revoked() {
    let ring = Ring::of(2);
    let (owner, guest) = (&ring.nodes[0], &ring.nodes[1]);
    let address = owner.atoll(["volume", "create", "work", "--shared"]).ok().last_line().to_owned();
    let alice = user(guest);
    let labelled = format!("alice={alice}");
    owner.atoll(["grant", "work", "alice", "--keeper"]).failed(4, &["no member is called alice"]);
    let said = owner.atoll(["grant", "work", &labelled, "--keeper"]).ok();
    assert!(said.stderr.contains(&format!("atoll volume join {address} NAME")), "{said:?}");
    assert_eq!(members(owner, "work"), ["alice", "owner"]);
    let keepers =
        || owner.atoll(["volume", "show", "work", "--json"]).ok().json()["keepers"].clone();
    assert_eq!(keepers(), serde_json::json!([alice]));
    let text = owner.atoll(["volume", "show", "work"]).ok().stdout;
    assert!(text.contains("keeper  alice") && !text.contains("stranger"), "{text}");
    guest.atoll(["volume", "join", &address, "team"]).ok();
    let team = || guest.atoll(["volume", "list", "--json"]).ok().json()["joined"].clone();
    assert_eq!((&team()["keeper"], &team()["may_write"]), (&true.into(), &true.into()));
    let grant = |options: &[&str]| run(owner.command(["grant", "work", &labelled]).args(options));
    grant(&["--keeper", "--until", "2096-01-31"]).failed(2, &["cannot be used with"]);
    grant(&["--until", "2096-01-31"]).failed(1, &["is a keeper", "--keeper"]);
    owner.atoll(["grant", "work/plans", &labelled, "--keeper"]).failed(2, &["a whole volume"]);
    assert_eq!(owner.atoll(["renew", "work", "--json"]).ok().json()["lost_blocks"], 0);

    let revoke =
        |options: &[&str]| run(owner.command(["revoke", "work", "alice", "--json"]).args(options));
    assert_eq!(revoke(&["--keeper"]).ok().json()["rebound"], 1, "the root directory");
    assert_eq!(
        (keepers(), members(owner, "work")),
        (serde_json::json!([]), labels(&["alice", "owner"]))
    );
    until("it is seen on the other node", || {
        team()["keeper"] == false && team()["may_write"] == true
    });
    revoke(&["--keeper"]).failed(4, &["not a keeper"]);
    // A keeper is shut out at once, with --now or without.
    owner.atoll(["grant", "work", "alice", "--keeper"]).ok();
    assert_eq!(revoke(&[]).ok().json()["rebound"], 1);
    assert_eq!((keepers(), members(owner, "work")), (serde_json::json!([]), labels(&["owner"])));
    until("the guest may not write", || team()["may_write"] == false);
}
