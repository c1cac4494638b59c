//! What to do about what is not well with a file: one or two sentences for each thing.

use atoll_volume::shared::merged::ConflictName;

use super::report::{ReplicaState, Report, short};
use crate::units;

/// How often replicas compare what they hold: the node's own setting, which nobody changes.
const REPAIR_SECS: u64 = 60;
/// A certificate that ends before this was not renewed when it should have been: it is renewed when less than six days
/// are left.
const CERTIFICATE_LEFT_SECS: u64 = 5 * 24 * 3600;
/// A lease that ends before this was not renewed for weeks: leases last 30 days, and are renewed each day.
const LEASE_LEFT_SECS: u64 = 7 * 24 * 3600;

/// What to do; nothing if all is well. `name` is the file's; `joined` says that the node has a place on the ring.
pub(super) fn todo(report: &Report, name: &[u8], joined: bool) -> Vec<String> {
    let mut todo = Vec::new();
    ring(report, joined, &mut todo);
    replicas(report, &mut todo);
    data(report, &mut todo);
    pending(report, &mut todo);
    conflicts(report, name, &mut todo);
    access(report, &mut todo);
    todo
}

fn ring(report: &Report, joined: bool, todo: &mut Vec<String>) {
    if let Some(trouble) = &report.ring_trouble {
        todo.push(format!(
            "The ring could not be asked ({trouble}), so what is shown may be old. `atoll status` shows how the \
             node stands."
        ));
    } else if !joined {
        todo.push(
            "This node has no place on the ring yet. `atoll status` shows how it stands.".into(),
        );
    }
}

fn replicas(report: &Report, todo: &mut Vec<String>) {
    let with = |state| {
        let such = report.replicas.iter().filter(move |one| one.state == state);
        such.map(|one| short(&one.node)).collect::<Vec<_>>()
    };
    let is_one = |nodes: &[&str]| nodes.len() == 1;
    let silent = with(ReplicaState::Silent);
    if !silent.is_empty() {
        let (does, it) = if is_one(&silent) { ("does", "it") } else { ("do", "they") };
        todo.push(format!(
            "{} {does} not answer: see to the node if {it} should be running. If {it} stay{} away, the ring leaves {} out, and \
             repair makes the copies anew elsewhere.",
            silent.join(", "),
            if is_one(&silent) { "s" } else { "" },
            if is_one(&silent) { "it" } else { "them" },
        ));
    }
    let behind: Vec<&str> = [with(ReplicaState::Behind), with(ReplicaState::Missing)].concat();
    let newest = with(ReplicaState::Newest);
    if !behind.is_empty() && !newest.is_empty() {
        todo.push(format!(
            "Wait: {} {} not have the newest version. Replicas compare what they hold every {} s, and opening the \
             file brings it there too.",
            behind.join(", "),
            if is_one(&behind) { "does" } else { "do" },
            REPAIR_SECS
        ));
    }
    if !report.replicas.is_empty() && newest.is_empty() && !report.pending.unnamed {
        todo.push(
            "No replica that answered has the version that this mount shows. If nodes are away, bring them back; what \
             this mount has is put again when the file is written."
                .into(),
        );
    }
    let leases = report.replicas.iter().filter(|one| one.state == ReplicaState::Newest);
    let lease = leases.map(|one| one.lease_secs).chain(report.data.lease_secs).min();
    if let Some(left) = lease.filter(|left| *left < LEASE_LEFT_SECS) {
        todo.push(format!(
            "The leases end in {}: nobody has renewed them for weeks. A member's node has to run for a day, or the owner \
             says `atoll renew`.",
            units::whole_secs(left)
        ));
    }
}

fn data(report: &Report, todo: &mut Vec<String>) {
    if report.data.absent > 0 {
        todo.push(format!(
            "{} of the contents {} on no node that answered, so the file cannot be read in whole. Bring back nodes that \
             are away, or copy the file here again.",
            units::counted(report.data.absent, "block", "blocks"),
            if report.data.absent == 1 { "is" } else { "are" }
        ));
    }
    if report.data.degraded > 0 {
        todo.push(format!(
            "Wait: {} of the contents lack copies. Replicas compare what they hold every {REPAIR_SECS} s, and copy what is \
             missing.",
            units::counted(report.data.degraded, "block", "blocks")
        ));
    }
}

fn pending(report: &Report, todo: &mut Vec<String>) {
    let pending = &report.pending;
    if let Some(trouble) = &pending.trouble {
        todo.push(format!(
            "Keep the volume mounted: changes are not on the ring ({trouble}), and the mount tries again every five \
             seconds."
        ));
    }
    if let Some(why) = &pending.spool_refused {
        todo.push(format!(
            "Copy it elsewhere if it is needed: the ring does not take what waits in the spool ({why}). `atoll grant`, by the \
             volume's owner, lets you write; `atoll volume recover NAME --discard` gives up what waits."
        ));
    }
    if pending.removed {
        todo.push(
            "Copy it elsewhere if it is needed: its last name was removed, and it ends when it is closed.".into(),
        );
    }
}

fn conflicts(report: &Report, name: &[u8], todo: &mut Vec<String>) {
    if report.conflicts > 0 {
        todo.push(
            "Open the file once: what was written at the same time then becomes a file of its own, NAME~USER~TIME, if you \
             may write the directory."
                .into(),
        );
    }
    if let Some(first) = report.beside.first() {
        todo.push(format!(
            "Compare it with {}, which was written at the same time, keep what you want under the plain name, and \
             remove the other.",
            crate::output::escaped(first)
        ));
    }
    if let Some(conflict) = ConflictName::parse(name) {
        let beside = crate::output::escaped(conflict.beside);
        todo.push(format!(
            "This is a version that {} wrote at the same time as {beside}. Compare the two, keep what you want under the \
             plain name, and remove this one.",
            conflict.user
        ));
    }
    if report.unreadable.is_some() {
        todo.push(
            "A version cannot be read, and so the file cannot be written. If the volume is encrypted, ask its owner whether \
             you are still a reader; else ask who wrote it to write it anew."
                .into(),
        );
    }
}

fn access(report: &Report, todo: &mut Vec<String>) {
    let access = &report.access;
    if let Some(group) = access.groups.iter().find(|group| group.trouble.is_some()) {
        todo.push(format!(
            "The record of {} cannot be read. If its lease has run out, its owner has to make the group again.",
            group.group
        ));
    }
    let now_secs = std::time::SystemTime::now()
        .duration_since(std::time::SystemTime::UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    match (&access.user, access.certificate_until_unix_secs) {
        (None, _) => todo.push(
            "To write it, make a key with `atoll id`, give it to the volume's owner, and mount the volume anew.".into(),
        ),
        (Some(user), None) => todo.push(format!(
            "To write it, ask the owner of the volume for `atoll grant NAME {user}`. If you were a member, the owner's \
             node may have been away: it renews certificates every day."
        )),
        (Some(_), Some(until)) if until < now_secs + CERTIFICATE_LEFT_SECS => todo.push(format!(
            "Your certificate ends {} UTC and was not renewed. Either your membership ends then, or the owner's node is \
             away: ask the owner.",
            units::unix_date(until)
        )),
        _ => {}
    }
}
