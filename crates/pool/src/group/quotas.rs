//! Limits on what users and directories take ([`crate::quota`]), as the primary keeps them.
//!
//! It has all files counted when it begins and when that is due again, and tells the other members now and then what is used. The first
//! group's primary sets limits, and divides them among the groups, once a second; with one group that has all of each.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use atoll_env::{Env, Instant, sleep};
use atoll_key::PeerId;
use atoll_net::{CallError, Refusal, Request};
use atoll_vfs::Errno;
use futures_util::future::join_all;

use super::primary::Primary;
use crate::disk::{Disk, DiskResult};
use crate::fs::PoolFs;
use crate::layout::GroupNumber;
use crate::member::PoolMember;
use crate::messages::{self, QUOTAS, QuotaCall, QuotaReply, refused};
use crate::quota::shares::{GroupUse, QuotaGrant, QuotaShares};
use crate::quota::{GrantNumber, QuotaAmount, QuotaRow, QuotaSubject, QuotaTable};
use crate::remote::Route;
use crate::siblings::SiblingGroups;

/// How often limits are divided, and looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How often other members are told what is used: so much of what was made just before a primary died is not counted at first.
const RECORD_EVERY: Duration = Duration::from_secs(5);
/// How often other groups are asked again what is above directories.
const ABOVE_EVERY: Duration = Duration::from_secs(30);
/// How often all files are counted, also if nothing asks for it.
const COUNT_EVERY: Duration = Duration::from_secs(24 * 3600);
/// At most so many questions about files are under way at a time.
const ASKED_AT_ONCE: usize = 32;
/// How long another group may take to answer.
const ASK_LIMIT: Duration = Duration::from_secs(1);

/// Why limits are not known, or not set.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum QuotaError {
    /// Why it cannot be set, for people.
    #[error("{0}")]
    Refused(String),
    /// There may be another primary soon.
    #[error("{0}")]
    NoAnswer(CallError),
}

/// Asks a group's primary for its limits, by a way to it; or has the first group's set one before, or remove it where there is none.
///
/// # Errors
/// If there is no primary now that answers; if the limit cannot be set.
pub async fn ask_quotas(
    route: &dyn Route,
    set: Option<(QuotaSubject, Option<QuotaAmount>)>,
    limit: Duration,
) -> Result<QuotaTable, QuotaError> {
    let call = match set {
        Some((subject, limit)) => QuotaCall::Set { subject, limit },
        None => QuotaCall::Table,
    };
    let header = messages::encode(&call);
    let asked = route.call(Request { method: QUOTAS, header, parts: Vec::new() }, limit).await;
    let reply = asked.map_err(|error| match error {
        CallError::Refused(refusal) if refusal.code == refused::EDIT => {
            QuotaError::Refused(refusal.text)
        }
        error => QuotaError::NoAnswer(error),
    })?;
    match messages::decode(&reply.header) {
        Some(QuotaReply::Table(table)) => Ok(table),
        _ => Err(QuotaError::Refused("its answer cannot be read".into())),
    }
}

impl<D: Disk> Primary<D> {
    /// Answers a call about limits.
    pub(super) async fn answer_quotas(
        &self,
        from: PeerId,
        call: QuotaCall,
        siblings: Option<&Arc<dyn SiblingGroups>>,
    ) -> Result<QuotaReply, Refusal> {
        let failed = |errno: Errno| Refusal::new(Refusal::OVERLOADED, format!("its disk: {errno}"));
        let is_first = self.member.settings.group == GroupNumber::FIRST;
        match call {
            QuotaCall::Table => {}
            QuotaCall::Set { subject, limit } => {
                if !is_first {
                    let text = "the first group sets limits";
                    return Err(Refusal::new(refused::EDIT, text));
                }
                let is_only = !siblings.is_some_and(|siblings| siblings.are_several());
                let mut refusal = None;
                let set = self.member.edit_quotas(|quotas| {
                    let with = quotas.table().with(subject, limit, is_only);
                    with.map_err(|text| refusal = Some(text))
                        .unwrap_or_else(|()| quotas.table().clone())
                });
                set.await.map_err(failed)?;
                if let Some(text) = refusal {
                    return Err(Refusal::new(refused::EDIT, text));
                }
            }
            QuotaCall::Uses | QuotaCall::Grant { .. } => {
                let is_of_first = |siblings: &Arc<dyn SiblingGroups>| {
                    siblings.is_member_of(GroupNumber::FIRST, from)
                };
                if is_first || !siblings.is_some_and(is_of_first) {
                    let text = "only the first group divides limits";
                    return Err(Refusal::new(refused::EDIT, text));
                }
                if let QuotaCall::Grant { number, grants } = call {
                    self.take_grants(number, &grants).await.map_err(failed)?;
                }
                let (uses, are_counted) = self.uses();
                return Ok(QuotaReply::Uses { uses, are_counted });
            }
        }
        Ok(QuotaReply::Table(self.member.quotas().shown()))
    }

    /// How this group stands to all limits.
    fn uses(&self) -> (Vec<(QuotaSubject, GroupUse)>, bool) {
        let mut quotas = self.member.quotas();
        let wanted = quotas.take_wanted();
        let table = quotas.table();
        let uses = table.rows.iter().map(|(subject, row)| {
            let wants_more = wanted.contains_key(subject);
            // Calls under way may use what a smaller share does not allow any more.
            let share = row.share.at_least(quotas.least_share(*subject));
            (*subject, GroupUse { share, used: row.used, wants_more })
        });
        (uses.collect(), table.is_counted)
    }

    /// Takes limits and shares over: durably on all members if a share changes, or a grant was missed that may come late.
    async fn take_grants(&self, number: GrantNumber, grants: &[QuotaGrant]) -> DiskResult<()> {
        if number <= self.member.quotas().table().granted {
            return Err(Errno::ESTALE);
        }
        let taken = self.member.edit_quotas(|quotas| {
            let table = quotas.table();
            if number <= table.granted {
                return table.clone();
            }
            let rows: BTreeMap<QuotaSubject, QuotaRow> = grants
                .iter()
                .map(|grant| {
                    let QuotaGrant { subject, limit, share, elsewhere } = *grant;
                    let used =
                        table.rows.get(&subject).map_or(QuotaAmount::default(), |row| row.used);
                    let share = share.at_least(quotas.least_share(subject));
                    (subject, QuotaRow { limit, share, used, elsewhere })
                })
                .collect();
            let shares = |rows: &BTreeMap<QuotaSubject, QuotaRow>| -> Vec<_> {
                rows.iter().map(|(of, row)| (*of, row.limit, row.share)).collect()
            };
            let is_next = (number.epoch, number.count)
                == (table.granted.epoch, table.granted.count.saturating_add(1));
            let is_as_before = shares(&rows) == shares(&table.rows);
            let next = QuotaTable { rows, granted: number, is_counted: table.is_counted };
            if is_next && is_as_before {
                quotas.set_limits(next);
                return quotas.table().clone();
            }
            next
        });
        taken.await
    }
}

/// The state of the task that keeps a primary's limits.
struct QuotaKeeper {
    shares: QuotaShares,
    recorded: Instant,
    counted: Instant,
    is_counting: Arc<AtomicBool>,
}

/// Keeps limits as long as the primary is at work.
pub(super) async fn keep_quotas<D: Disk>(
    primary: Weak<Primary<D>>,
    siblings: Option<Arc<dyn SiblingGroups>>,
    env: Env,
) {
    if let Some(primary) = primary.upgrade() {
        primary.member.quotas().want_count();
    }
    let now = env.now();
    let mut keeper = QuotaKeeper {
        shares: QuotaShares::default(),
        recorded: now,
        counted: now,
        is_counting: Arc::default(),
    };
    loop {
        {
            let Some(primary) = primary.upgrade().filter(|own| !own.member.has_failed()) else {
                return;
            };
            // The next look tries again.
            if let Err(errno) = keeper.look(&primary, siblings.as_ref(), &env).await {
                tracing::debug!("limits: {errno}");
            }
        }
        sleep(&*env, LOOK_EVERY).await;
    }
}

impl QuotaKeeper {
    /// Counts, records, divides: whatever is due.
    async fn look<D: Disk>(
        &mut self,
        primary: &Arc<Primary<D>>,
        siblings: Option<&Arc<dyn SiblingGroups>>,
        env: &Env,
    ) -> DiskResult<()> {
        let (member, now) = (&primary.member, env.now());
        if member.settings.group == GroupNumber::FIRST
            && let Err(errno) = self.divide(primary, siblings).await
        {
            tracing::debug!("limits are not divided: {errno}");
        }
        if !member.has_quotas() {
            return Ok(());
        }
        if now.since(self.counted) > COUNT_EVERY {
            member.quotas().want_count();
        }
        if member.quotas().is_count_due() && !self.is_counting.swap(true, Ordering::SeqCst) {
            self.counted = now;
            let (member, is_counting) = (member.clone(), self.is_counting.clone());
            env.spawn(Box::pin(async move {
                if let Err(errno) = member.count_for_quotas().await {
                    tracing::debug!("files are not counted: {errno}");
                    member.quotas().want_count();
                }
                is_counting.store(false, Ordering::SeqCst);
            }));
        }
        if now.since(self.recorded) > RECORD_EVERY {
            self.recorded = now;
            member.record_quotas().await?;
        }
        Ok(())
    }

    /// The only group has all of each limit.
    async fn have_all<D: Disk>(&self, member: &Arc<PoolMember<D>>) -> DiskResult<()> {
        let has_all = {
            let quotas = member.quotas();
            quotas.table().rows.values().all(|row| row.share == row.limit)
        };
        if has_all {
            return Ok(());
        }
        let all = member.edit_quotas(|quotas| {
            let mut table = quotas.table().clone();
            table.rows.values_mut().for_each(|row| row.share = row.limit);
            table
        });
        all.await
    }

    /// Divides all limits among the groups.
    async fn divide<D: Disk>(
        &mut self,
        primary: &Arc<Primary<D>>,
        siblings: Option<&Arc<dyn SiblingGroups>>,
    ) -> DiskResult<()> {
        let (map, member) = (primary.backups.map(), &primary.member);
        let open = map.roster.groups().iter().filter(|(_, group)| group.is_open);
        let open = open.map(|(number, _)| *number);
        let known = siblings.map_or(Vec::new(), |siblings| siblings.in_use());
        let mut others: BTreeSet<GroupNumber> = open.chain(known).collect();
        others.remove(&GroupNumber::FIRST);
        let Some(siblings) = siblings.filter(|_| !others.is_empty()) else {
            return self.have_all(member).await;
        };
        let are_known = others.iter().all(|group| self.shares.knows(*group));
        if !member.has_quotas() && are_known && self.shares.are_empty() {
            return Ok(());
        }
        let limits: Vec<(QuotaSubject, QuotaAmount)> = {
            let quotas = member.quotas();
            quotas.table().rows.iter().map(|(subject, row)| (*subject, row.limit)).collect()
        };
        self.shares.note(GroupNumber::FIRST, primary.uses().0);
        let groups: Vec<GroupNumber> =
            [GroupNumber::FIRST].into_iter().chain(others.iter().copied()).collect();
        let mut grants = self.shares.grants(&limits, &groups);
        let number = self.shares.next_number(map.epoch);
        let own = grants.remove(&GroupNumber::FIRST).unwrap_or_default();
        primary.take_grants(number, &own).await?;
        self.shares.note(GroupNumber::FIRST, primary.uses().0);
        let asked = others.iter().map(|group| {
            let grants = match self.shares.knows(*group) {
                true => Some(grants.remove(group).unwrap_or_default()),
                false => None,
            };
            let siblings = siblings.clone();
            async move {
                let call = match &grants {
                    Some(grants) => QuotaCall::Grant { number, grants: grants.clone() },
                    None => QuotaCall::Uses,
                };
                let request =
                    Request { method: QUOTAS, header: messages::encode(&call), parts: Vec::new() };
                let reply = siblings.call(*group, request, ASK_LIMIT).await.ok();
                let uses = reply.and_then(|reply| match messages::decode(&reply.header)? {
                    QuotaReply::Uses { uses, are_counted } => Some((uses, are_counted)),
                    QuotaReply::Table(_) => None,
                });
                (*group, grants, uses)
            }
        });
        let mut are_all_counted = true;
        for (group, grants, uses) in join_all(asked.collect::<Vec<_>>()).await {
            are_all_counted &= uses.as_ref().is_some_and(|(_, are_counted)| *are_counted);
            match uses {
                Some((uses, _)) => self.shares.note(group, uses),
                None => self.shares.note_unanswered(group, &grants.unwrap_or_default()),
            }
        }
        member.quotas().note_elsewhere_counted(are_all_counted);
        Ok(())
    }
}

/// Learns what is above files of this group in other groups, as long as the primary is at work.
pub(super) async fn keep_above<D: Disk>(
    primary: Weak<Primary<D>>,
    siblings: Arc<dyn SiblingGroups>,
    env: Env,
) {
    let mut asked_all = env.now();
    loop {
        {
            let Some(primary) = primary.upgrade().filter(|own| !own.member.has_failed()) else {
                return;
            };
            let member = &primary.member;
            let asks_all = env.now().since(asked_all) > ABOVE_EVERY;
            if asks_all {
                asked_all = env.now();
            }
            let fs = PoolFs::of_primary(member.clone(), Some(siblings.clone()));
            let wanted = member.wanted_above(asks_all);
            for some in wanted.chunks(ASKED_AT_ONCE) {
                let asked = some.iter().map(|id| fs.learn_above(*id));
                // The next round asks again where a group has not answered.
                join_all(asked).await;
            }
        }
        sleep(&*env, LOOK_EVERY).await;
    }
}
