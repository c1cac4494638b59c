//! What a node does for its own clients: get, put and renew (CFS §4.1, Table 1).

pub(crate) mod ack_verification;
pub(crate) mod block_times;
pub(crate) mod get;
pub(crate) mod put;
pub(crate) mod replica_selection;
pub(crate) mod seen;
pub(crate) mod votes;
