//! One fault at the moment that matters.

use atoll_vfs::{InodeNumber, OpenFlags, Writer};
use bytes::Bytes;

use super::*;
use crate::workload::me;

#[test]
fn what_is_written_is_on_all_members() {
    let group = Group::new(1, 1);
    let fs = group.fs();
    let work = async {
        let home = fs.mkdir(me(), InodeNumber::ROOT, b"home", 0o755).await.unwrap();
        let flags = OpenFlags::READ_WRITE;
        let (file, opened) =
            fs.create(me(), home.attr.inode, b"file", 0o644, flags).await.unwrap();
        let inode = file.attr.inode;
        let data = Bytes::from_static(b"some bytes");
        assert_eq!(fs.write(Writer::At(me()), inode, opened.handle, 0, data).await, Ok(10));
        fs.fsync(inode, opened.handle, false).await.unwrap();
        fs.close(inode, opened.handle).await.unwrap();
    };
    group.sim.block_on(LONG, work).unwrap();
    group.settle_and_compare().unwrap();
}
