//! The table of control calls: number, name, who may call, request, reply and error of each.
//!
//! [`super::server::Calls`] dispatches by it, [`crate::Client`] calls by it, the fuzz target
//! decodes by it, and a test compares the table in `docs/design/control.md` with it. To add a
//! call, add a row here and to that page, register its handler in the subsystem it belongs to
//! ([`crate::subsystem::Subsystem::control_calls`]), and add a method to the client.

use atoll_dht::rpc::{Lock as LockRequest, ReleaseBlocks};
use atoll_dht::{LockGrant, LockRefusal};
use minicbor::{Decode, Encode};

use super::blocks::{self, BlockList, Changed, Outcomes};
use super::body::{Block, Body, Json, WithPart};
use super::message::{
    self, Answer, ChangeQuota, ChangeSettings, Contribute, Empty, GetFailed, HeldReadKey, Invited,
    KeepAdd, KeepCommit, MarkMoved, Never, OpenVolume, OpenedVolume, Rotate, Unfit, VolumeKeys,
    VolumeName,
};
use super::volume_error::VolumeError;
use crate::status::{
    ContributionStatus, MemberList, NodeSettings, QuotaStatus, Reclaimed, ReplicaReport, RingCount,
    Rotated, Status, UsesReport, VolumeStatus,
};

/// The users who may make a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Caller {
    /// The user whose node it is: the socket refuses all others but root.
    Owner,
    /// The same, on the node that holds the key of the network's administrator. The operation
    /// needs that key, and fails without it.
    Administrator,
}

/// One control call. Its types are never values: a call is named by its type.
pub(crate) trait ControlCall: 'static {
    const ROW: Row;
    type Request: Body;
    type Reply: Body;
    /// The operation's own error.
    type Error: CallError;
}

/// An operation's own error, as the page names it.
pub(crate) trait CallError: Encode<()> + for<'b> Decode<'b, ()> + Send + 'static {
    const NAME: &'static str;
}

impl CallError for Never {
    const NAME: &'static str = "–";
}

impl CallError for GetFailed {
    const NAME: &'static str = "get";
}

impl CallError for LockRefusal {
    const NAME: &'static str = "lock";
}

impl CallError for VolumeError {
    const NAME: &'static str = "volume";
}

impl CallError for Unfit {
    const NAME: &'static str = "unfit";
}

/// A row of the table.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(test), expect(dead_code, reason = "the page is compared with all of it"))]
pub(crate) struct Row {
    pub(crate) number: u16,
    pub(crate) name: &'static str,
    pub(crate) caller: Caller,
    /// Header and parts of the request, then of the reply, in words.
    pub(crate) fields: [&'static str; 4],
    pub(crate) error: &'static str,
    /// Whether bytes are a header of the request, and of the reply.
    pub(crate) decoders: [fn(&[u8]) -> bool; 2],
}

fn is_request<C: ControlCall>(header: &[u8]) -> bool {
    message::decode::<<C::Request as Body>::Header>(header).is_ok()
}

fn is_reply<C: ControlCall>(header: &[u8]) -> bool {
    message::decode::<Answer<<C::Reply as Body>::Header, C::Error>>(header).is_ok()
}

/// Defines a type for each call, and [`TABLE`].
macro_rules! calls {
    ($(
        $call:ident = $number:literal $name:literal $caller:ident
        $request:ty [$header:literal, $parts:literal]
        => $reply:ty [$reply_header:literal, $reply_parts:literal] or $error:ty;
    )*) => {
        $(
            #[doc = $name]
            pub(crate) enum $call {}

            impl ControlCall for $call {
                const ROW: Row = Row {
                    number: $number,
                    name: $name,
                    caller: Caller::$caller,
                    fields: [$header, $parts, $reply_header, $reply_parts],
                    error: <$error as CallError>::NAME,
                    decoders: [is_request::<$call>, is_reply::<$call>],
                };
                type Request = $request;
                type Reply = $reply;
                type Error = $error;
            }
        )*

        /// All control calls, by number.
        pub(crate) const TABLE: &[Row] = &[$($call::ROW),*];
    };
}

calls! {
    Ping = 0x0300 "ping" Owner
        Empty ["–", "–"] => Empty ["–", "–"] or Never;
    Get = 0x0301 "get" Owner
        blocks::Get ["0 name, 1 least version (absent: the newest)", "–"]
        => Block ["–", "the block"] or GetFailed;
    Put = 0x0302 "put" Owner
        BlockList ["array, for each block: 0 name, 1 lease in seconds (may be absent)", "the blocks"]
        => Outcomes ["outcomes", "–"] or Never;
    Renew = 0x0303 "renew" Owner
        blocks::Renew ["0 names (at most 1,024), 1 lease in seconds (may be absent), 2 whether those lacking will be put", "–"]
        => Outcomes ["outcomes", "–"] or Never;
    Watch = 0x0304 "watch" Owner
        blocks::Watch ["0 name, 1 version seen", "–"]
        => Changed ["–", "the newer block; none if none has come for a while"] or GetFailed;
    Lock = 0x0305 "lock" Owner
        LockRequest ["as `Lock` (`wire.md`)", "–"]
        => LockGrant ["0 whether another holder has asked for it in vain a short while ago", "–"] or LockRefusal;
    Replicas = 0x0306 "replicas" Owner
        blocks::AskReplicas ["0 names (at most 1,024)", "–"]
        => Json<ReplicaReport> ["–", "JSON: what each node that should hold them says"] or Never;
    Uses = 0x0307 "uses" Owner
        blocks::AskUses ["0 name of a mutable block, 1 key of a lock (64 bytes)", "–"]
        => Json<UsesReport> ["–", "JSON: which nodes have read the block of late, and which have the lock"] or Never;
    SameSet = 0x0308 "same set" Owner
        blocks::AskSameSet ["0 key (64 bytes)", "–"]
        => blocks::SameSet ["0 the last of the keys that have the replica set of this one, beginning with it (absent if that is not known)", "–"] or Never;
    Release = 0x0309 "release" Owner
        ReleaseBlocks ["as `ReleaseBlocks` (`wire.md`); 1 counts for nothing", "–"]
        => Outcomes ["outcomes", "–"] or Never;
    PutInOrder = 0x030A "put in order" Owner
        BlockList ["as put, of mutable blocks: none is stored without those before it", "the blocks"]
        => Outcomes ["outcomes", "–"] or Never;
    Room = 0x030B "room" Owner
        Empty ["–", "–"]
        => blocks::Room ["0 bytes of files that the ring holds and could hold, 1 bytes free, 2 bytes that this node's quota leaves (all absent if not known)", "–"] or Never;
    NodeStatus = 0x0310 "status" Owner
        Empty ["–", "–"] => Json<Status> ["–", "JSON"] or Never;
    Invite = 0x0311 "invite" Owner
        Empty ["–", "–"] => Invited ["0 join code, 1 warning (text, may be absent)", "–"] or Never;
    Shutdown = 0x0312 "shutdown" Owner
        Empty ["–", "–"] => Empty ["–", "–"] or Never;
    ShowSettings = 0x0313 "settings" Owner
        Empty ["–", "–"] => Json<NodeSettings> ["–", "JSON"] or Never;
    SetSettings = 0x0314 "change settings" Owner
        ChangeSettings ["what to change, absent to leave it: 0 virtual servers (0 for `auto`), 1 cache in bytes", "–"]
        => Json<NodeSettings> ["–", "JSON: the settings after the change"] or Unfit;
    ForgetAbsent = 0x0315 "forget absent" Owner
        Empty ["–: what is absent now is gone for good (`dht.md`)", "–"]
        => Empty ["–", "–"] or Unfit;
    ShowQuota = 0x0316 "quota" Owner
        Empty ["–", "–"] => Json<QuotaStatus> ["–", "JSON: quotas, and what each publisher uses"] or Never;
    SetQuota = 0x0317 "change quota" Owner
        ChangeQuota ["what to change, absent to leave it: 0 share of a publishing node, 1 of an address (millionths; 0 to follow the network's size), 2 nodes' worth of storage a publisher may use, 3 least share", "–"]
        => Json<QuotaStatus> ["–", "JSON: as quota, after the change"] or Unfit;
    ShowContribution = 0x0318 "contribution" Owner
        Empty ["–", "–"]
        => Json<ContributionStatus> ["–", "JSON: how disk is given, and which blocks still move"] or Never;
    SetContribution = 0x0319 "contribute" Owner
        Contribute ["0 how disk is to be given: `[0, [bytes]]` fixed, `[1, [low, high]]` dynamic (millionths), `[2, [path]]` transparent (bytes)", "–"]
        => Json<ContributionStatus> ["–", "JSON: as contribution, after the change"] or Unfit;
    AbandonFormer = 0x031a "abandon former" Owner
        Empty ["–: do not wait any longer for blocks in a directory that is gone", "–"]
        => Json<ContributionStatus> ["–", "JSON: as contribution, after the change"] or Unfit;
    Members = 0x031b "members" Owner
        Empty ["–", "–"] => Json<MemberList> ["–", "JSON"] or Never;
    RotateSecret = 0x031c "replace the secret" Administrator
        Rotate ["0 nodes to remove (32 bytes each), 1 seconds for which the former secret stays good", "–"]
        => Json<Rotated> ["–", "JSON: what it did"] or Unfit;
    Reclaim = 0x031d "reclaim" Owner
        Empty ["–", "–"]
        => Json<Reclaimed> ["–", "JSON: bytes given back (0 if there is no more to gain), bytes of blocks, bytes on disk. The node copies some 64 MiB at most"] or Never;
    CountNodes = 0x031e "count nodes" Owner
        Empty ["–", "–"]
        => Json<RingCount> ["–", "JSON: nodes met on a walk around the ring, and whether they are all; 4,096 positions at most"] or Unfit;
    Volumes = 0x0320 "volumes" Owner
        Empty ["–", "–"] => Json<Vec<VolumeStatus>> ["–", "JSON"] or Never;
    VolumeOpen = 0x0321 "open volume" Owner
        OpenVolume ["0 name, 1 source (bytes, may be absent)", "–"]
        => OpenedVolume ["0 secret key (32 bytes), 1 whether it is new, 2 lease of its blocks in seconds (may be absent)", "–"] or VolumeError;
    VolumeImport = 0x0322 "import volume" Owner
        VolumeKeys ["0 name, 1 source (bytes, may be absent), 2 secret key, 3 read key (may be absent)", "–"]
        => OpenedVolume ["as open volume", "–"] or VolumeError;
    SourceMove = 0x0323 "move source" Owner
        OpenVolume ["as open volume, the source present; the volume must be there", "–"]
        => OpenedVolume ["as open volume", "–"] or VolumeError;
    VolumeRenew = 0x0324 "renew volume" Owner
        VolumeName ["0 name", "–"] => Json<VolumeStatus> ["–", "JSON: the volume"] or VolumeError;
    VolumeUnpublish = 0x0325 "unpublish volume" Owner
        VolumeName ["0 name", "–"] => Empty ["–", "–"] or VolumeError;
    VolumeExport = 0x0326 "export volume" Owner
        VolumeName ["0 name", "–"]
        => VolumeKeys ["as the request of import volume, and 4 the move's token (16 bytes, absent if it was not moved)", "–"] or VolumeError;
    VolumeMoved = 0x0327 "mark volume as moved" Owner
        MarkMoved ["0 name, 1 whether it was moved to another node", "–"]
        => VolumeKeys ["as of export volume", "–"] or VolumeError;
    ReadKey = 0x0328 "read key" Owner
        VolumeName ["0 name", "–"]
        => HeldReadKey ["0 read key (32 bytes, absent if there is none)", "–"] or VolumeError;
    MakeReadKey = 0x0329 "make read key" Owner
        VolumeName ["0 name: a key is made unless there is one", "–"]
        => HeldReadKey ["0 read key (32 bytes)", "–"] or VolumeError;
    ForgetReadKey = 0x032a "forget read key" Owner
        VolumeName ["0 name", "–"] => Empty ["–", "–"] or VolumeError;
    VolumeForget = 0x032b "forget volume" Owner
        VolumeName ["0 name: its keys go too", "–"] => Empty ["–", "–"] or VolumeError;
    KeepAdding = 0x0330 "keep: add" Owner
        WithPart<KeepAdd> ["0 volume, 1 session, 2 offset in hashes", "hashes (32 bytes each)"]
        => Empty ["–", "–"] or VolumeError;
    KeepCommitting = 0x0331 "keep: commit" Owner
        WithPart<KeepCommit> ["0 volume, 1 session, 2 count of hashes, 3 lease seconds from now on (may be absent)", "the signed root"]
        => Empty ["–", "–"] or VolumeError;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::outside::OUTSIDE_CALLS;

    fn markdown(row: &Row) -> String {
        let caller = match row.caller {
            Caller::Owner => "owner",
            Caller::Administrator => "administrator",
        };
        let [header, parts, reply_header, reply_parts] = row.fields;
        format!(
            "| {:#06x} {} | {caller} | {header} | {parts} | {reply_header} | {reply_parts} | {} |",
            row.number, row.name, row.error
        )
    }

    #[test]
    fn the_page_lists_exactly_the_calls_of_the_table() {
        let page = include_str!("../../../../docs/design/control.md");
        let listed: Vec<&str> = page.lines().filter(|line| line.starts_with("| 0x")).collect();
        let table: Vec<String> = TABLE.iter().map(markdown).collect();
        assert_eq!(listed, table, "write to docs/design/control.md:\n{}", table.join("\n"));
    }

    #[test]
    fn numbers_rise_and_stay_in_the_control_family_below_those_of_others() {
        assert!(TABLE.windows(2).all(|rows| rows[0].number < rows[1].number));
        assert!(TABLE.iter().all(|row| row.number >> 8 == 0x03));
        assert!(TABLE.iter().all(|row| row.number < *OUTSIDE_CALLS.start()));
    }
}
