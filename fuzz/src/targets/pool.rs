//! Calls of a pool's file system, and between its members.

use atoll_pool::map::{example_map_messages, is_map_message};
use atoll_pool::remote::decoders;
use atoll_pool::{example_member_messages, is_member_message};

use super::{Target, target};

pub(super) fn targets() -> Vec<Target> {
    vec![
        target("pool/call", decoders::example_calls(), decoders::call),
        target("pool/map", example_map_messages(), is_map_message),
        target("pool/member", example_member_messages(), is_member_message),
        target("pool/reply", decoders::example_replies(), decoders::reply),
    ]
}
