//! The node's part in the ring: joining it, the peers it remembers, open connections, clocks.

pub(crate) mod clock;
pub(crate) mod join;
pub(crate) mod peers;
pub(crate) mod warm_up;
