//! What a user may write: the certificates that were found so far.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, UNIX_EPOCH};

use atoll_dht::Blocks;
use atoll_env::{Env, Instant};
use atoll_key::kinds::certified::{Author, Certificate, WriterId};
use atoll_key::{GroupId, SecretKey, UserId};
use futures_util::future::join_all;

use super::groups::read_group;

/// A certificate that is valid for less than this is looked for anew; its group's owner has issued
/// another one days ago.
const FRESH_SECS: u64 = 24 * 3600;
/// How long a group whose certificate is still valid is not asked for again.
const LOOK_AGAIN: Duration = Duration::from_secs(60);
/// How long a group without a valid certificate is not asked for again: whoever has just been added
/// does not wait for long, and a program that tries again and again does not ask each time. A guess.
const LOOK_AGAIN_WITHOUT: Duration = Duration::from_secs(2);

/// Sets of groups whose certificates are looked for ahead. A guess: more than a volume has.
const MAX_UNKNOWN: usize = 64;

/// A user's key and certificates. Calls may run at the same time.
pub struct Credentials {
    env: Env,
    blocks: Arc<dyn Blocks>,
    user: Option<SecretKey>,
    looks: Mutex<BTreeMap<GroupId, Look>>,
    /// Sets of groups that may write what was read, of whose certificates nothing is known yet.
    unknown: Mutex<BTreeSet<Vec<GroupId>>>,
}

/// What the last look at a group's record gave.
#[derive(Clone, Debug)]
struct Look {
    at: Instant,
    /// The newest certificate that was found, perhaps on an earlier look.
    certificate: Option<Certificate>,
    /// Why there is none that is valid.
    why_not: NotAllowed,
}

/// Why a user may not write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotAllowed {
    /// The user has no key here.
    NoKey,
    /// None of the groups that may write has the user.
    NotMember,
    /// The membership has ended.
    Ended {
        /// When, seconds since 1970.
        at_secs: u64,
    },
    /// The certificate has run out, and the group's owner has not issued another one.
    Expired {
        /// When, seconds since 1970.
        at_secs: u64,
    },
    /// The record of a group cannot be read, or is not what it should be.
    Unknown {
        /// Why, for people.
        told: String,
    },
}

impl fmt::Display for NotAllowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NotAllowed::NoKey => f.write_str("there is no key of a user on this node"),
            NotAllowed::NotMember => {
                f.write_str("you are not a member of a group that may write it")
            }
            NotAllowed::Ended { at_secs } => {
                write!(f, "your membership ended at {}", date(*at_secs))
            }
            NotAllowed::Expired { at_secs } => write!(
                f,
                "your certificate ran out at {}, and neither the owner's node nor a keeper's has renewed it",
                date(*at_secs)
            ),
            NotAllowed::Unknown { told } => {
                write!(f, "the group's record cannot be read: {told}")
            }
        }
    }
}

impl std::error::Error for NotAllowed {}

fn date(secs: u64) -> impl fmt::Display {
    // The last second of the year 9999 is the latest that has a name.
    humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(secs.min(253_402_300_799)))
}

impl Credentials {
    /// Those of a user, of whom nothing is known yet.
    pub fn new(env: Env, blocks: Arc<dyn Blocks>, user: Option<SecretKey>) -> Credentials {
        Credentials { env, blocks, user, looks: Mutex::default(), unknown: Mutex::default() }
    }

    /// The user, if there is a key.
    pub fn user(&self) -> Option<UserId> {
        self.user.as_ref().map(SecretKey::user_id)
    }

    /// What `writer`, a mount of the user's, signs with where members of `groups` may write: a
    /// certificate that is valid now, and of several the one that lasts longest. Groups' records are
    /// read if none is known, or it does not last for a day.
    ///
    /// # Errors
    /// If the user may not write there.
    pub async fn author(&self, groups: &[GroupId], writer: WriterId) -> Result<Author, NotAllowed> {
        let secret = self.user.as_ref().ok_or(NotAllowed::NoKey)?;
        let certificate = self.certificate(secret.user_id(), groups).await?;
        Ok(Author { secret: secret.clone(), certificate, writer })
    }

    /// That the user may write where members of `groups` may.
    ///
    /// # Errors
    /// If the user may not.
    pub async fn check(&self, groups: &[GroupId]) -> Result<(), NotAllowed> {
        let user = self.user().ok_or(NotAllowed::NoKey)?;
        self.certificate(user, groups).await.map(drop)
    }

    /// Until when the user may write where members of `groups` may, as far as is known now: the end of the
    /// certificate, seconds since 1970.
    ///
    /// # Errors
    /// If the user may not.
    pub async fn valid_until(&self, groups: &[GroupId]) -> Result<u64, NotAllowed> {
        let user = self.user().ok_or(NotAllowed::NoKey)?;
        Ok(self.certificate(user, groups).await?.not_after_secs)
    }

    /// A replica has refused what was signed with a certificate of one of these groups: they are asked
    /// again.
    pub fn forget(&self, groups: &[GroupId]) {
        let mut looks = self.lock();
        for group in groups {
            looks.remove(group);
        }
    }

    /// Something was read that members of `groups` may write: the user may want to, when their records cannot be read.
    pub fn saw(&self, groups: &[GroupId]) {
        let is_known =
            |looks: &BTreeMap<GroupId, Look>| groups.iter().all(|of| looks.contains_key(of));
        if self.user.is_none() || is_known(&self.lock()) {
            return;
        }
        let mut unknown = self.unknown();
        if unknown.len() < MAX_UNKNOWN {
            unknown.insert(groups.to_vec());
        }
    }

    /// Looks for the certificates of groups that [`Credentials::saw`] has been told of.
    pub async fn look_ahead(&self) {
        let unknown = self.unknown().clone();
        let looks = unknown.into_iter().map(|groups| async move {
            let found = self.check(&groups).await;
            if !matches!(found, Err(NotAllowed::Unknown { .. })) {
                self.unknown().remove(&groups);
            }
        });
        join_all(looks).await;
    }

    /// Whether the user may write where members of `groups` may, as far as is known now.
    pub async fn may_write(&self, groups: &[GroupId]) -> bool {
        self.check(groups).await.is_ok()
    }

    async fn certificate(
        &self,
        user: UserId,
        groups: &[GroupId],
    ) -> Result<Certificate, NotAllowed> {
        let now_secs = self.env.unix_ms() / 1000;
        let held = self.best(groups, now_secs);
        if let Some(held) = held
            && held.not_after_secs >= now_secs + FRESH_SECS
        {
            return Ok(held);
        }
        let pause = if held.is_some() { LOOK_AGAIN } else { LOOK_AGAIN_WITHOUT };
        let now = self.env.now();
        let is_due = |group: &&GroupId| {
            self.lock().get(group).is_none_or(|look| now.since(look.at) >= pause)
        };
        let due: Vec<GroupId> = groups.iter().filter(is_due).copied().collect();
        join_all(due.into_iter().map(|group| self.look(user, group))).await;
        let best = self.best(groups, self.env.unix_ms() / 1000);
        best.ok_or_else(|| self.why_not(groups))
    }

    /// Of the known certificates that are valid the one that lasts longest.
    fn best(&self, groups: &[GroupId], now_secs: u64) -> Option<Certificate> {
        let looks = self.lock();
        let certificates = groups.iter().filter_map(|group| looks.get(group)?.certificate);
        let valid = certificates.filter(|certificate| certificate.is_valid_at(now_secs));
        valid.max_by_key(|certificate| certificate.not_after_secs)
    }

    /// Reads a group's record. What was known stays if it cannot be read.
    async fn look(&self, user: UserId, group: GroupId) {
        let found = read_group(&self.blocks, group).await;
        let now_secs = self.env.unix_ms() / 1000;
        let (certificate, why_not) = match found {
            Ok(record) => match record.and_then(|mut record| record.members.remove(&user)) {
                None => (None, NotAllowed::NotMember),
                Some(member) if !member.certificate.is_signed() => {
                    let told = "your certificate is not signed by its owner".to_owned();
                    (None, NotAllowed::Unknown { told })
                }
                Some(member) if member.has_ended(now_secs) => {
                    (None, NotAllowed::Ended { at_secs: member.until_secs })
                }
                Some(member) => {
                    let at_secs = member.certificate.not_after_secs;
                    (Some(member.certificate), NotAllowed::Expired { at_secs })
                }
            },
            Err(error) => (None, NotAllowed::Unknown { told: error.to_string() }),
        };
        let mut looks = self.lock();
        let former = looks.get(&group).and_then(|look| look.certificate);
        // One who was removed may write until the certificate ends; so may one whose group cannot be
        // read now.
        let certificate = certificate.or(former);
        looks.insert(group, Look { at: self.env.now(), certificate, why_not });
    }

    /// Of several reasons the one that says most.
    fn why_not(&self, groups: &[GroupId]) -> NotAllowed {
        let looks = self.lock();
        let reasons = groups.iter().filter_map(|group| Some(looks.get(group)?.why_not.clone()));
        let telling = |reason: &NotAllowed| match reason {
            NotAllowed::NoKey | NotAllowed::NotMember => 0,
            NotAllowed::Ended { .. } => 1,
            NotAllowed::Expired { .. } => 2,
            // It may have the user.
            NotAllowed::Unknown { .. } => 3,
        };
        reasons.max_by_key(telling).unwrap_or(NotAllowed::NotMember)
    }

    fn unknown(&self) -> MutexGuard<'_, BTreeSet<Vec<GroupId>>> {
        self.unknown.lock().expect("no holder of this lock panics")
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<GroupId, Look>> {
        self.looks.lock().expect("no holder of this lock panics")
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("user", &self.user()).finish_non_exhaustive()
    }
}
