//! What clients of NFS send.

use atoll_gateway::nfs::nfs3::{
    AccessArgs, CommitArgs, CreateArgs, CreateHow, DirOp, LinkArgs, MkDirArgs, MkNodArgs,
    MkNodData, ReadArgs, ReadDirArgs, ReadDirPlusArgs, RenameArgs, SetAttrArgs, SetAttributes,
    SetTime, SpecData, Stable, SymLinkArgs, Time, WriteArgs,
};
use atoll_gateway::nfs::nfs3::{FileHandle, FileType, Name};
use atoll_gateway::nfs::rpc::{AuthSys, Call, OpaqueAuth, Records, record_mark};
use atoll_gateway::nfs::xdr::{List, Opaque, Reader, Writer, Xdr};
use bytes::Bytes;
use futures_util::FutureExt;

use super::{Target, target};

pub(super) fn targets() -> Vec<Target> {
    let time = Time { seconds: 1, nseconds: 2 };
    let attributes = SetAttributes {
        mode: Some(0o644),
        uid: None,
        gid: Some(7),
        size: Some(1 << 40),
        atime: SetTime::ServerTime,
        mtime: SetTime::To(time.clone()),
    };
    let handle = FileHandle::from(&[7; 40][..]);
    let at = DirOp { dir: handle.clone(), name: Name::from(&b"name"[..]) };
    let data = Opaque::from(&[1; 99][..]);
    let device = SpecData { major: 8, minor: 1 };
    let create = |how| CreateArgs { at: at.clone(), how };
    let special = |what| MkNodArgs { at: at.clone(), what };
    vec![
        target("nfs/call", vec![call()], |input| {
            matches!(Call::read(Bytes::copy_from_slice(input)), Ok(Ok(_)))
        }),
        records(),
        arguments("nfs/lookup", vec![at.clone()]),
        arguments("nfs/access", vec![AccessArgs { object: handle.clone(), access: 0x3f }]),
        arguments(
            "nfs/setattr",
            vec![SetAttrArgs {
                object: handle.clone(),
                changes: attributes.clone(),
                guard: Some(time),
            }],
        ),
        arguments("nfs/read", vec![ReadArgs { file: handle.clone(), offset: 5, count: 6 }]),
        arguments(
            "nfs/write",
            vec![WriteArgs {
                file: handle.clone(),
                offset: 5,
                count: 99,
                stable: Stable::DataSync,
                data,
            }],
        ),
        arguments(
            "nfs/create",
            vec![
                create(CreateHow::Exclusive([9; 8])),
                create(CreateHow::Guarded(attributes.clone())),
                create(CreateHow::Unchecked(attributes.clone())),
            ],
        ),
        arguments("nfs/mkdir", vec![MkDirArgs { at: at.clone(), attributes: attributes.clone() }]),
        arguments(
            "nfs/symlink",
            vec![SymLinkArgs {
                at: at.clone(),
                attributes: attributes.clone(),
                target: Opaque::from(&b"../x"[..]),
            }],
        ),
        arguments(
            "nfs/mknod",
            vec![
                special(MkNodData::Device(FileType::Blk, attributes.clone(), device)),
                special(MkNodData::Plain(FileType::Fifo, attributes)),
                special(MkNodData::Other(FileType::Lnk)),
            ],
        ),
        arguments("nfs/rename", vec![RenameArgs { from: at.clone(), to: at.clone() }]),
        arguments("nfs/link", vec![LinkArgs { file: handle.clone(), link: at }]),
        arguments(
            "nfs/readdir",
            vec![ReadDirArgs { dir: handle.clone(), cookie: 3, verifier: [0; 8], count: 4096 }],
        ),
        arguments(
            "nfs/readdirplus",
            vec![ReadDirPlusArgs {
                dir: handle.clone(),
                cookie: 3,
                verifier: [0; 8],
                dir_count: 512,
                max_count: 4096,
            }],
        ),
        arguments("nfs/commit", vec![CommitArgs { file: handle, offset: 0, count: 0 }]),
    ]
}

/// A connection: records in fragments.
fn records() -> Target {
    const MAX_BYTES: usize = 1 << 20;
    let record = |bytes: &[u8]| [&record_mark(bytes.len())[..], bytes].concat();
    // The first bit of a mark says that a fragment is the last.
    let fragment = |bytes: &[u8]| {
        let mut marked = record(bytes);
        marked[0] &= 0x7f;
        marked
    };
    let whole = record(&call());
    let seeds = vec![
        [&whole[..], &whole].concat(),
        [fragment(&[1; 5]), fragment(&[]), record(&[2; 9]), record(&[])].concat(),
    ];
    let target = target("nfs/records", seeds, |input| {
        let mut records = Records::new(input, MAX_BYTES);
        let mut found_bytes = 0;
        loop {
            match records.next().now_or_never().expect("bytes in memory do not wait") {
                Ok(Some(record)) => {
                    found_bytes += 4 + record.len();
                    assert!(record.len() <= MAX_BYTES && found_bytes <= input.len());
                }
                Ok(None) => return found_bytes > 0,
                Err(_) => return false,
            }
        }
    });
    // What is read at a time.
    Target { fixed_bytes: 256 << 10, ..target }
}

/// A call of GETATTR.
fn call() -> Vec<u8> {
    let sys = AuthSys {
        stamp: 1,
        machine: Opaque::from(&b"client"[..]),
        uid: 1000,
        gid: 100,
        gids: List(vec![4, 24, 27]),
    };
    let mut call = Writer::default();
    call.put(&7u32).put(&0u32).put(&2u32).put(&100_003u32).put(&3u32).put(&1u32);
    call.put(&OpaqueAuth { flavor: 1, body: Opaque(written(&sys).into()) });
    call.put(&OpaqueAuth { flavor: 0, body: Opaque::default() });
    call.put(&FileHandle::from(&[7; 64][..]));
    call.into_bytes().to_vec()
}

fn written<T: Xdr>(value: &T) -> Vec<u8> {
    let mut writer = Writer::default();
    writer.put(value);
    writer.into_bytes().to_vec()
}

/// Arguments of a procedure, which have one encoding.
fn arguments<T: Xdr + 'static>(name: &'static str, values: Vec<T>) -> Target {
    target(name, values.iter().map(written).collect(), |input| {
        let mut reader = Reader::new(Bytes::copy_from_slice(input));
        let Ok(value) = reader.take::<T>() else { return false };
        if reader.end().is_err() {
            return false;
        }
        assert_eq!(written(&value), input, "arguments have one encoding");
        true
    })
}
