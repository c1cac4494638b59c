//! Join codes, the files of a node's directory, and the control socket.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;

use atoll_key::text::{decode_checked, encode_checked};
use atoll_node::{IdProfile, JoinCode, Network, decoders};

use super::{Target, peer, target};

const SCHEME: &str = "atoll-join:";

pub(super) fn targets() -> Vec<Target> {
    let network = Network { epoch: 2, ..Network::generate(IdProfile::Identity, 3, [9; 32]) };
    let codes = [vec![peer(1)], vec![peer(2), peer(3), peer(4)]]
        .map(|peers| JoinCode::new(network.clone(), peers).to_string());
    let bytes = codes.iter().map(|code| decode_checked(SCHEME, code).expect("our own")).collect();
    vec![
        target("node/join-text", codes.map(String::into_bytes).into(), |input| {
            std::str::from_utf8(input).is_ok_and(|text| text.parse::<JoinCode>().is_ok())
        }),
        // The checksum is right, what it is of is not: the bytes behind it are the input.
        target("node/join-code", bytes, |input| {
            let Ok(code) = encode_checked(SCHEME, input).parse::<JoinCode>() else { return false };
            assert_eq!(code.to_string().parse(), Ok(code), "it does not survive being written");
            true
        }),
        target("node/control", decoders::example_headers(), decoders::control_header),
        target("node/file", decoders::example_files(), decoders::node_file),
        target("node/network-record", decoders::example_records(), decoders::network_record),
        manifest(),
    ]
}

/// A manifest is read from a file, because it may be larger than memory.
fn manifest() -> Target {
    let dir = tempfile::tempdir().expect("the temporary directory can be written");
    let path = dir.path().join("manifest");
    decoders::write_example_manifest(&path).expect("so can files in it");
    let seeds = vec![std::fs::read(&path).expect("it was written")];
    // Not truncated to nothing: some file systems write to the disk after that.
    let file = OpenOptions::new().write(true).open(&path).expect("it was written");
    let target = target("node/manifest", seeds, move |input| {
        let written = file.write_all_at(input, 0).and_then(|()| file.set_len(input.len() as u64));
        written.expect("there is room");
        decoders::manifest_file(&dir.path().join("manifest"))
    });
    // The checksum is taken through a buffer of 64 KiB.
    Target { fixed_bytes: 128 << 10, ..target }
}
