//! Calls of a pool's file system.

use atoll_pool::remote::decoders;

use super::{Target, target};

pub(super) fn targets() -> Vec<Target> {
    vec![
        target("pool/call", decoders::example_calls(), decoders::call),
        target("pool/reply", decoders::example_replies(), decoders::reply),
    ]
}
