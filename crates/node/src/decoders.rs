//! All decoders of foreign bytes at once, for fuzzing.
//!
//! "Foreign" is whatever arrives on the control socket or is found in the node's
//! directory. Each function answers whether any decoder took the bytes; none may panic or
//! hold much more memory than it was given. Join codes are decoded by their own `FromStr`.

use std::path::Path;

use atoll_dht::rpc::Lock;
use atoll_dht::{
    LeaseRenewal, LockGrant, LockMode, LockRefusal, LockStep, PutError, Share, Wanted,
};
use atoll_key::{BlockHash, IdProfile, SecretKey, SignedBlock};
use atoll_overlay::chord::RememberedPeer;
use minicbor::Decode;

use crate::control::blocks::{AskSameSet, Get, Outcomes, Renew, SameSet, Watch};
use crate::control::calls;
use crate::control::message::{
    self, Answer, ChangeQuota, ChangeSettings, Contribute, Empty, GetFailed, HeldReadKey, Invited,
    KeepAdd, KeepCommit, Never, OpenVolume, OpenedVolume, Rotate, Unfit, VolumeKeys,
};
use crate::control::volume_error::VolumeError;
use crate::membership::{EXAMPLE_ADMIN, KnownList, Record};
use crate::network::{Network, StoredNetwork};
use crate::peers::{PeerList, PeerMemory};
use crate::policy::Policy;
use crate::settings::Settings;
use crate::volumes::manifest::{Manifest, PartialManifest};
use crate::volumes::{Info, Kept};

/// Whether `bytes` are a header of the control protocol, of a call or of a reply.
pub fn control_header(bytes: &[u8]) -> bool {
    let decoders = calls::TABLE.iter().flat_map(|row| row.decoders);
    decoders.fold(false, |taken, decoder| decoder(bytes) | taken)
}

/// Whether `bytes` are one of the small files of a node's directory.
pub fn node_file(bytes: &[u8]) -> bool {
    let takes = [
        takes::<StoredNetwork>,
        takes::<Settings>,
        takes::<PeerMemory>,
        takes::<Info>,
        takes::<Kept>,
        takes::<KnownList>,
    ];
    takes.into_iter().fold(false, |taken, decoder| decoder(bytes) | taken)
}

/// Whether `bytes` are a record of a network's state, signed by the administrator of
/// [`example_records`].
pub fn network_record(bytes: &[u8]) -> bool {
    Record::decode(bytes, &SecretKey::from_seed(&EXAMPLE_ADMIN).public()).is_ok()
}

/// Whether the file at `path` is a manifest, its checksum included.
pub fn manifest_file(path: &Path) -> bool {
    let Ok(Some(manifest)) = Manifest::open(path) else { return false };
    manifest.hashes(0, manifest.count()).is_ok() && manifest.check().is_ok()
}

/// Valid headers of the control protocol.
pub fn example_headers() -> Vec<Vec<u8>> {
    let volume = || "docs".to_owned();
    let failed = GetFailed::NotFound { key: [1; 64], told: "no".into() };
    let id = BlockHash::of(b"block").id();
    let renewal = LeaseRenewal { ids: vec![id; 3], lease_secs: Some(60), will_be_put: true };
    let superseded = PutError::Superseded { offered: 3, held: u64::MAX };
    let outcomes = Outcomes::of_put(vec![Ok(()), Err(superseded)]);
    let bad_name = VolumeError::BadName { name: volume(), why: "so".into() };
    let source = Some(b"/srv".to_vec());
    let read_key = HeldReadKey { read_key: Some([3; 32]) };
    let settings = ChangeSettings { virtual_servers: Some(8), cache_bytes: Some(1 << 40) };
    let policy = Policy::Dynamic {
        low: Share::from_millionths(800_000),
        high: Share::from_millionths(850_000),
    };
    let invited = Invited { code: "atoll-join:abc".into(), warning: Some("so".into()) };
    let headers = [
        message::encode(&Empty {}),
        message::encode(&Get::new(id, Wanted::AtLeast(7))),
        message::encode(&Watch { id: id.into(), seen: 7 }),
        message::encode(&AskSameSet { key: [5; 64] }),
        message::encode(&SameSet { until: Some([6; 64]) }),
        message::encode(&Lock {
            key: id.key,
            holder: [1; 16],
            number: 7,
            step: LockStep::Take,
            mode: LockMode::Exclusive,
        }),
        message::encode(&Renew::from(renewal)),
        message::encode(&Answer::<_, Never>::Done(outcomes)),
        message::encode(&KeepAdd { volume: volume(), session: 1 << 60, offset: 3 }),
        message::encode(&KeepCommit {
            volume: volume(),
            session: 1 << 60,
            count: 3,
            lease_secs: Some(86_400),
        }),
        message::encode(&OpenVolume { name: volume(), source: source.clone() }),
        message::encode(&VolumeKeys {
            name: volume(),
            source,
            seed: [1; 32],
            read_key: Some([2; 32]),
            token: Some([3; 16]),
        }),
        message::encode(&settings),
        message::encode(&quota()),
        message::encode(&Contribute { policy }),
        message::encode(&Rotate { remove: vec![1; 64], overlap_secs: 60 }),
        message::encode(&Answer::<_, Never>::Done(invited)),
        message::encode(&Answer::<Empty, GetFailed>::Failed(failed)),
        message::encode(&Answer::<_, LockRefusal>::Done(LockGrant { is_wanted: true })),
        message::encode(&Answer::<LockGrant, _>::Failed(LockRefusal::NoMajority("no".into()))),
        message::encode(&Answer::<OpenedVolume, VolumeError>::Failed(bad_name)),
        message::encode(&Answer::<Empty, Unfit>::Failed("too small".to_owned().into())),
        message::encode(&Answer::<_, VolumeError>::Done(read_key)),
    ];
    headers.iter().map(|bytes| bytes.to_vec()).collect()
}

fn quota() -> ChangeQuota {
    ChangeQuota {
        key_share: Some(1000),
        address_share: Some(0),
        publisher_nodes: Some(3),
        floor_share: Some(u32::MAX),
    }
}

/// Valid small files of a node's directory.
pub fn example_files() -> Vec<Vec<u8>> {
    let network =
        Network { secret: [7; 32], epoch: 1, ..Network::generate(IdProfile::Identity, 3, [8; 32]) };
    let peers = ["127.0.0.1:4000", "[fe80::1]:9"].map(|addr| atoll_net::Peer {
        id: SecretKey::from_seed(&[addr.len() as u8; 32]).peer_id(),
        addr: addr.parse().expect("an address"),
    });
    let bootstrap = PeerList::new(peers);
    let known = |peer: &atoll_net::Peer| RememberedPeer { peer: *peer, failures: 17_520 };
    let memory = PeerMemory(peers.iter().map(known).collect());
    let mut settings = Settings::default();
    settings.set_listen(peers[0].addr);
    settings.set_cache_bytes(1 << 20).expect("a small cache");
    settings.change_quota(quota()).expect("a quota");
    let files = [
        message::encode(&memory),
        message::encode(&StoredNetwork { network, bootstrap }),
        message::encode(&settings),
        message::encode(&Info::default()),
        message::encode(&Kept { trouble: Some("none".into()), ..Kept::default() }),
    ];
    files.iter().map(|bytes| bytes.to_vec()).collect()
}

/// Valid records of a network's state.
pub fn example_records() -> Vec<Vec<u8>> {
    [0, 1, 200].map(|removed| crate::membership::example_record(3, removed).bytes().to_vec()).into()
}

/// Writes a valid manifest to `path`, by way of a file beside it.
pub fn write_example_manifest(path: &Path) -> Result<(), VolumeError> {
    let root = SignedBlock::sign(&SecretKey::from_seed(&[1; 32]), b"", 3, b"payload");
    let partial = PartialManifest::at(path.parent().unwrap_or(Path::new(".")), 7);
    partial.add(0, &[9; 5 * 32])?;
    partial.commit(5, &root, path)
}

fn takes<T: for<'b> Decode<'b, ()>>(bytes: &[u8]) -> bool {
    message::decode::<T>(bytes).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn valid() -> Vec<Vec<u8>> {
        [example_headers(), example_files()].concat()
    }

    #[test]
    fn what_is_valid_is_taken() {
        assert!(example_headers().iter().all(|bytes| control_header(bytes)));
        assert!(example_files().iter().all(|bytes| node_file(bytes)));
        assert!(!control_header(b"") && !node_file(b""));
        let temp = tempfile::tempdir().expect("temp");
        let path = temp.path().join("manifest");
        assert!(!manifest_file(&path));
        write_example_manifest(&path).expect("a manifest");
        assert!(manifest_file(&path));
    }

    proptest! {
        #[test]
        fn any_bytes_are_taken_or_not_without_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..300),
        ) {
            control_header(&bytes);
            node_file(&bytes);
        }

        #[test]
        fn changed_messages_are_taken_or_not_without_panic(
            which in any::<prop::sample::Index>(),
            at in any::<prop::sample::Index>(),
            by in any::<u8>(),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut bytes = which.get(&valid()).clone();
            let at = at.index(bytes.len());
            bytes[at] ^= by;
            bytes.truncate(cut.index(bytes.len()) + 1);
            control_header(&bytes);
            node_file(&bytes);
        }
    }
}
