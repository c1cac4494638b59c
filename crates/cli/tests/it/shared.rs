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
    assert_eq!(owner.atoll(["renew", "work", "--json"]).ok().json()["lost_blocks"], 0);
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
    owner.atoll(["grant", "work/none", &bob]).failed(2, &["a whole volume", "group create"]);
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
    guest.atoll(["volume", "join", &other, "team"]).failed(1, &["another volume of that name"]);

    owner.atoll(["revoke", "work", "carol", "--now"]).ok();
    until("the guest may not write", || join("team").ok().json()["may_write"] == false);
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
        (&["volume", "create", "a", "--shared", "--encrypt"], "--encrypt"),
        (&["volume", "join", "hello", "a"], "should begin with"),
    ] {
        run(atoll().args(arguments).arg("--dir").arg(&dir)).failed(2, &[words]);
    }
}
