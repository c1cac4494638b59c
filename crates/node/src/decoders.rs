//! All decoders of foreign bytes at once, for fuzzing.
//!
//! "Foreign" is whatever arrives on the control socket or is found in the node's
//! directory. Each function answers whether any decoder took the bytes; none may panic or
//! hold much more memory than it was given. Join codes are decoded by their own `FromStr`,
//! manifests from files.

use minicbor::Decode;

use crate::config::Settings;
use crate::control::message::{
    self, Answer, Empty, Get, GetFailed, GetSigned, Hashes, Invited, KeepAdd, KeepCommit,
    OpenVolume, OpenedVolume, PutFailed,
};
use crate::network::StoredNetwork;
use crate::peers::PeerList;
use crate::volumes::{Info, Kept, VolumeError};

/// Whether `bytes` are a header of the control protocol, of a call or of a reply.
pub fn control_header(bytes: &[u8]) -> bool {
    let takes = [
        takes::<Empty>,
        takes::<Get>,
        takes::<GetSigned>,
        takes::<Hashes>,
        takes::<OpenVolume>,
        takes::<KeepAdd>,
        takes::<KeepCommit>,
        takes::<Invited>,
        takes::<Answer<Empty, GetFailed>>,
        takes::<Answer<Empty, PutFailed>>,
        takes::<Answer<Hashes, PutFailed>>,
        takes::<Answer<OpenedVolume, VolumeError>>,
    ];
    takes.into_iter().fold(false, |taken, decoder| decoder(bytes) | taken)
}

/// Whether `bytes` are one of the small files of a node's directory.
pub fn node_file(bytes: &[u8]) -> bool {
    let takes = [
        takes::<StoredNetwork>,
        takes::<Settings>,
        takes::<PeerList>,
        takes::<Info>,
        takes::<Kept>,
    ];
    takes.into_iter().fold(false, |taken, decoder| decoder(bytes) | taken)
}

fn takes<T: for<'b> Decode<'b, ()>>(bytes: &[u8]) -> bool {
    message::decode::<T>(bytes).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn valid() -> Vec<Vec<u8>> {
        let volume = || "docs".to_owned();
        let failed = GetFailed::NotFound { key: [1; 64], told: "no".into() };
        let bad_name = VolumeError::BadName { name: volume(), why: "so".into() };
        let source = Some(b"/srv".to_vec());
        [
            message::encode(&Get { hash: [1; 32] }),
            message::encode(&Hashes { hashes: vec![1; 96] }),
            message::encode(&KeepAdd { volume: volume(), session: 1 << 60, offset: 3 }),
            message::encode(&OpenVolume { name: volume(), source, seed: Some([1; 32]) }),
            message::encode(&Answer::<Empty, GetFailed>::Failed(failed)),
            message::encode(&Answer::<OpenedVolume, VolumeError>::Failed(bad_name)),
            message::encode(&Kept { trouble: Some("none".into()), ..Kept::default() }),
        ]
        .into_iter()
        .map(|bytes| bytes.to_vec())
        .collect()
    }

    #[test]
    fn what_is_valid_is_taken() {
        assert!(valid().iter().all(|bytes| control_header(bytes) || node_file(bytes)));
        assert!(!control_header(b"") && !node_file(b""));
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
            which in 0..7usize,
            at in any::<prop::sample::Index>(),
            by in any::<u8>(),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut bytes = valid()[which].clone();
            let at = at.index(bytes.len());
            bytes[at] ^= by;
            bytes.truncate(cut.index(bytes.len()) + 1);
            control_header(&bytes);
            node_file(&bytes);
        }
    }
}
