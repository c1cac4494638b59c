//! What a group's primary is asked about limits ([`crate::quota`]).

use minicbor::{Decode, Encode};

use crate::quota::shares::{GroupUse, QuotaGrant};
use crate::quota::{GrantNumber, MAX_QUOTAS, QuotaAmount, QuotaSubject, QuotaTable};

/// Asks a group's primary about limits, or sets one.
pub(crate) const QUOTAS: u16 = 0x050e;

/// The call.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) enum QuotaCall {
    /// The group's table.
    #[n(0)]
    Table,
    /// Sets a limit, or removes it where there is none. The first group alone does that.
    #[n(1)]
    Set {
        #[n(0)]
        subject: QuotaSubject,
        #[n(1)]
        limit: Option<QuotaAmount>,
    },
    /// How the group stands to all limits that it knows; the first group's primary asks.
    #[n(2)]
    Uses,
    /// All limits, and the group's shares; the first group's primary says so.
    #[n(3)]
    Grant {
        #[n(0)]
        number: GrantNumber,
        #[n(1)]
        grants: Vec<QuotaGrant>,
    },
}

impl QuotaCall {
    pub(crate) fn is_sound(&self) -> bool {
        match self {
            QuotaCall::Grant { grants, .. } => grants.len() <= MAX_QUOTAS,
            QuotaCall::Table | QuotaCall::Set { .. } | QuotaCall::Uses => true,
        }
    }
}

/// The answer.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) enum QuotaReply {
    #[n(0)]
    Table(#[n(0)] QuotaTable),
    /// How the group stands to each limit, and whether all its files are counted.
    #[n(1)]
    Uses {
        #[n(0)]
        uses: Vec<(QuotaSubject, GroupUse)>,
        #[n(1)]
        are_counted: bool,
    },
}

/// For fuzzing.
pub(super) fn examples() -> Vec<Vec<u8>> {
    let subject = QuotaSubject::Directory(40);
    let amount = QuotaAmount { bytes: 1 << 40, files: 7 };
    let grant = QuotaGrant { subject, limit: amount, share: amount, elsewhere: amount };
    let number = GrantNumber { epoch: 3, count: 4 };
    let calls = [
        QuotaCall::Set { subject: QuotaSubject::User(7), limit: Some(amount) },
        QuotaCall::Grant { number, grants: vec![grant] },
    ];
    let uses = vec![(subject, GroupUse { share: amount, used: amount, wants_more: true })];
    let replies =
        [QuotaReply::Uses { uses, are_counted: true }, QuotaReply::Table(QuotaTable::default())];
    let calls = calls.iter().map(|call| super::encode(call).to_vec());
    calls.chain(replies.iter().map(|reply| super::encode(reply).to_vec())).collect()
}
