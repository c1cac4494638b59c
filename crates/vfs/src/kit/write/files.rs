//! Writing.

use std::ops::Range;

use atoll_env::BoxFuture;
use bytes::Bytes;

use crate::kit::probe::{Dice, During, Outcome, Probe, ensure, me, refused, same, same_bytes};
use crate::kit::tree::Content;
use crate::kit::{Check, checks};
use crate::{
    Errno, FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FALLOC_ZERO_RANGE, Handle, InodeNumber, OpenFlags,
    SetAttr, Writer,
};

pub(super) const CHECKS: &[Check] = checks![
    what_is_written_is_read_back,
    writes_at_random_leave_the_right_bytes,
    a_write_past_the_end_leaves_zeros_between,
    truncation_cuts_and_extends_with_zeros,
    a_file_that_shrank_and_grew_shows_zeros,
    opening_with_truncate_empties,
    appends_go_to_the_end,
    pages_of_a_mapping_go_where_they_lie,
    a_file_opened_for_reading_takes_no_writes,
    a_file_opened_for_writing_gives_no_bytes,
    a_write_beyond_the_largest_file_is_efbig,
    a_hole_takes_no_space_until_written,
    a_punched_hole_shows_zeros_and_takes_no_space,
    reserved_and_zeroed_ranges_show_zeros,
    impossible_reservations_are_refused,
    writers_at_once_keep_to_their_ranges,
    creators_at_once_make_one_file,
    what_was_synced_is_read_by_others,
];

async fn create(probe: &Probe, name: &[u8]) -> Outcome<(InodeNumber, Handle)> {
    let flags = OpenFlags::READ_WRITE;
    let created = probe.fs.create(me(), InodeNumber::ROOT, name, 0o644, flags).await;
    let (entry, opened) = created.during("create")?;
    Ok((entry.attr.inode, opened.handle))
}

/// Writes all of `data`.
async fn write(
    probe: &Probe,
    (inode, handle): (InodeNumber, Handle),
    offset: u64,
    data: &[u8],
) -> Outcome {
    let mut at = 0;
    while at < data.len() {
        let rest = Bytes::copy_from_slice(&data[at..]);
        let taken = probe.fs.write(Writer::At(me()), inode, handle, offset + at as u64, rest).await;
        let what = format!("write of {} bytes at {offset}", data.len());
        let taken = taken.during(&what)? as usize;
        ensure(taken > 0 && taken <= data.len() - at, || format!("{what} took {taken}"))?;
        at += taken;
    }
    Ok(())
}

async fn resize(probe: &Probe, inode: InodeNumber, size_bytes: u64) -> Outcome {
    let change = SetAttr { size_bytes: Some(size_bytes), ..SetAttr::default() };
    let reply = probe.fs.setattr(me(), inode, None, change).await;
    same("size", reply.during(format!("resize to {size_bytes}"))?.attr.size_bytes, size_bytes)
}

async fn what_is_written_is_read_back(probe: Probe) -> Outcome {
    for len_bytes in [0u64, 1, 4095, 4096, 4097, 65_535, 65_536, 65_537, 3 << 20] {
        let content = Content::Pattern { seed: len_bytes, len_bytes }.read(0, 1 << 30);
        let (inode, handle) = create(&probe, format!("{len_bytes}").as_bytes()).await?;
        for (index, part) in content.chunks(50_000).enumerate() {
            write(&probe, (inode, handle), index as u64 * 50_000, part).await?;
        }
        let found = probe.fs.read(inode, handle, 0, u32::MAX).await.during("read before close")?;
        same_bytes("before close", &found, &content)?;
        probe.close(inode, handle).await?;
        same("size", probe.attr(inode).await?.size_bytes, len_bytes)?;
        same_bytes("after close", &probe.read_all(inode, 100_000).await?, &content)?;
    }
    Ok(())
}

async fn writes_at_random_leave_the_right_bytes(probe: Probe) -> Outcome {
    let mut dice = Dice::new(7);
    let mut model: Vec<u8> = Vec::new();
    let (inode, handle) = create(&probe, b"random").await?;
    for step in 0..150u64 {
        match dice.below(10) {
            0 => {
                let size = dice.below(400_000);
                resize(&probe, inode, size).await?;
                model.resize(size as usize, 0);
            }
            1 => {
                let found = probe.fs.read(inode, handle, 0, u32::MAX).await.during("read")?;
                same_bytes(format!("after {step} steps"), &found, &model)?;
            }
            _ => {
                let (at, len) = (dice.below(300_000), dice.up_to_bits(17) as usize);
                let data = Content::Pattern { seed: step, len_bytes: 1 << 20 }.read(0, len);
                write(&probe, (inode, handle), at, &data).await?;
                if len > 0 {
                    let end = at as usize + len;
                    model.resize(model.len().max(end), 0);
                    model[at as usize..end].copy_from_slice(&data);
                }
            }
        }
    }
    probe.close(inode, handle).await?;
    same_bytes("at the end", &probe.read_all(inode, 65_536).await?, &model)
}

async fn a_write_past_the_end_leaves_zeros_between(probe: Probe) -> Outcome {
    let (inode, handle) = create(&probe, b"gap").await?;
    write(&probe, (inode, handle), 0, b"start").await?;
    write(&probe, (inode, handle), 200_000, b"end").await?;
    probe.close(inode, handle).await?;
    let mut expected = vec![0; 200_003];
    expected[..5].copy_from_slice(b"start");
    expected[200_000..].copy_from_slice(b"end");
    same_bytes("with a gap", &probe.read_all(inode, 30_000).await?, &expected)
}

async fn truncation_cuts_and_extends_with_zeros(probe: Probe) -> Outcome {
    let content = Content::Pattern { seed: 1, len_bytes: 200_000 }.read(0, 200_000);
    let (inode, handle) = create(&probe, b"cut").await?;
    write(&probe, (inode, handle), 0, &content).await?;
    for size in [199_999, 131_072, 131_071, 65_537, 4096, 1, 0] {
        resize(&probe, inode, size).await?;
        let found = probe.read_all(inode, 70_000).await?;
        same_bytes(format!("cut to {size}"), &found, &content[..size as usize])?;
    }
    resize(&probe, inode, 100_000).await?;
    same_bytes("extended", &probe.read_all(inode, 70_000).await?, &[0; 100_000])?;
    let directory = probe.inode("directory").await?;
    let change = SetAttr { size_bytes: Some(0), ..SetAttr::default() };
    let answer = probe.fs.setattr(me(), directory, None, change).await;
    refused("truncation of a directory", answer, &[Errno::EISDIR, Errno::EINVAL])?;
    probe.close(inode, handle).await
}

async fn a_file_that_shrank_and_grew_shows_zeros(probe: Probe) -> Outcome {
    let (inode, handle) = create(&probe, b"breathes").await?;
    for (small, large) in [(10, 1000), (5000, 70_000), (65_536, 200_000)] {
        write(&probe, (inode, handle), 0, &vec![b'x'; large]).await?;
        resize(&probe, inode, small as u64).await?;
        resize(&probe, inode, large as u64).await?;
        let mut expected = vec![b'x'; large];
        expected[small..].fill(0);
        let found = probe.read_all(inode, 33_000).await?;
        same_bytes(format!("from {large} to {small} and back"), &found, &expected)?;
    }
    probe.close(inode, handle).await
}

async fn opening_with_truncate_empties(probe: Probe) -> Outcome {
    let inode = probe.inode("file").await?;
    let flags = OpenFlags(OpenFlags::WRITE.0 | OpenFlags::TRUNCATE);
    let handle = probe.open(inode, flags).await?;
    same("size", probe.attr(inode).await?.size_bytes, 0)?;
    write(&probe, (inode, handle), 0, b"new").await?;
    probe.close(inode, handle).await?;
    same_bytes("bytes", &probe.read_all(inode, 100).await?, b"new")?;
    // POSIX leaves it open what this does with O_RDONLY; Linux empties the file.
    let handle = probe.open(inode, OpenFlags(OpenFlags::READ.0 | OpenFlags::TRUNCATE)).await?;
    same("size", probe.attr(inode).await?.size_bytes, 0)?;
    probe.close(inode, handle).await
}

async fn appends_go_to_the_end(probe: Probe) -> Outcome {
    let inode = probe.inode("file").await?;
    let flags = OpenFlags(OpenFlags::WRITE.0 | OpenFlags::APPEND);
    let (first, second) = (probe.open(inode, flags).await?, probe.open(inode, flags).await?);
    // The kernel gives the offset it believes to be the end; another may have moved it.
    for (handle, offset, line) in
        [(first, 11, "one\n"), (second, 11, "two\n"), (first, 0, "three\n")]
    {
        let line = Bytes::from(line);
        let taken = probe.fs.write(Writer::AtEnd(me()), inode, handle, offset, line.clone()).await;
        same("bytes taken", taken.during("write")? as usize, line.len())?;
    }
    // A handle opened for appending writes elsewhere once a program has cleared the flag.
    write(&probe, (inode, second), 0, b"SOME").await?;
    probe.close(inode, first).await?;
    probe.close(inode, second).await?;
    let expected = b"SOME bytes\none\ntwo\nthree\n";
    same_bytes("bytes", &probe.read_all(inode, 100).await?, expected)
}

async fn pages_of_a_mapping_go_where_they_lie(probe: Probe) -> Outcome {
    let inode = probe.inode("file").await?;
    let flags = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::APPEND);
    let handle = probe.open(inode, flags).await?;
    let page = Bytes::from_static(b"SOME");
    let taken = probe.fs.write(Writer::Mapping, inode, handle, 0, page).await.during("write")?;
    same("bytes taken", taken, 4)?;
    probe.close(inode, handle).await?;
    same_bytes("bytes", &probe.read_all(inode, 100).await?, b"SOME bytes\n")
}

async fn a_file_opened_for_reading_takes_no_writes(probe: Probe) -> Outcome {
    let inode = probe.inode("file").await?;
    let handle = probe.open(inode, OpenFlags::READ).await?;
    let answer = probe.fs.write(Writer::At(me()), inode, handle, 0, Bytes::from_static(b"x")).await;
    refused("write", answer, &[Errno::EBADF])?;
    probe.close(inode, handle).await?;
    same_bytes("bytes", &probe.read_all(inode, 100).await?, b"some bytes\n")
}

async fn a_file_opened_for_writing_gives_no_bytes(probe: Probe) -> Outcome {
    let inode = probe.inode("file").await?;
    let handle = probe.open(inode, OpenFlags::WRITE).await?;
    refused("read", probe.fs.read(inode, handle, 0, 10).await, &[Errno::EBADF])?;
    probe.close(inode, handle).await
}

async fn a_write_beyond_the_largest_file_is_efbig(probe: Probe) -> Outcome {
    let (inode, handle) = create(&probe, b"huge").await?;
    let too_far = &[Errno::EFBIG, Errno::EINVAL];
    for offset in [i64::MAX as u64, u64::MAX - 1, u64::MAX] {
        let answer = probe
            .fs
            .write(Writer::At(me()), inode, handle, offset, Bytes::from_static(b"xx"))
            .await;
        refused(format!("write at {offset}"), answer, too_far)?;
    }
    let longest = probe.fs.statfs(inode).await.during("statfs")?.max_file_bytes;
    for size in [longest + 1, u64::MAX] {
        let change = SetAttr { size_bytes: Some(size), ..SetAttr::default() };
        let answer = probe.fs.setattr(me(), inode, None, change).await;
        refused(format!("resize to {size}"), answer, too_far)?;
    }
    same("size", probe.attr(inode).await?.size_bytes, 0)?;
    probe.close(inode, handle).await
}

async fn a_hole_takes_no_space_until_written(probe: Probe) -> Outcome {
    probe.needs(probe.features.holes, "its holes take space")?;
    let (inode, handle) = create(&probe, b"sparse").await?;
    resize(&probe, inode, 1 << 30).await?;
    let empty = probe.attr(inode).await?.blocks_512;
    ensure(empty * 512 <= 1 << 20, || format!("1 GiB of hole takes {empty} × 512 bytes"))?;
    write(&probe, (inode, handle), 1 << 29, &[b'x'; 1 << 20]).await?;
    probe.fs.fsync(inode, handle, false).await.during("fsync")?;
    let blocks = probe.attr(inode).await?.blocks_512;
    ensure(blocks * 512 >= 1 << 20, || format!("1 MiB of data takes {blocks} × 512 bytes"))?;
    ensure(blocks * 512 <= 8 << 20, || format!("1 MiB of data takes {blocks} × 512 bytes"))?;
    probe.close(inode, handle).await
}

async fn fallocate(
    probe: &Probe,
    (inode, handle): (InodeNumber, Handle),
    range: Range<u64>,
    mode: i32,
) -> Outcome {
    let len = range.end - range.start;
    let done = probe.fs.fallocate(me(), inode, handle, range.start, len, mode).await;
    done.during(format!("fallocate of {range:?} in mode {mode:#x}"))
}

async fn a_punched_hole_shows_zeros_and_takes_no_space(probe: Probe) -> Outcome {
    probe.needs(probe.features.fallocate, "it punches no holes")?;
    const LEN: usize = 300_000;
    const PUNCH: i32 = FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE;
    let mut model = Content::Pattern { seed: 5, len_bytes: LEN as u64 }.read(0, LEN);
    let (inode, handle) = create(&probe, b"punched").await?;
    write(&probe, (inode, handle), 0, &model).await?;
    for range in [
        0..1,
        4095..4097,
        8192..12_288,
        10_000..60_001,
        65_536..131_072,
        131_071..200_001,
        // Within and over the end, and behind it.
        299_990..299_995,
        299_999..400_000,
        1 << 20..1 << 21,
    ] {
        fallocate(&probe, (inode, handle), range.clone(), PUNCH).await?;
        let part = (range.start as usize).min(LEN)..(range.end as usize).min(LEN);
        model[part].fill(0);
        let found = probe.fs.read(inode, handle, 0, u32::MAX).await.during("read")?;
        same_bytes(format!("after a hole at {range:?}"), &found, &model)?;
    }
    same("size", probe.attr(inode).await?.size_bytes, LEN as u64)?;
    fallocate(&probe, (inode, handle), 0..u64::from(u32::MAX), PUNCH).await?;
    let blocks = probe.attr(inode).await?.blocks_512;
    let holes = probe.features.holes;
    ensure(blocks == 0 || !holes, || format!("nothing but a hole takes {blocks} × 512 bytes"))?;
    write(&probe, (inode, handle), 150_000, b"again").await?;
    model.fill(0);
    model[150_000..150_005].copy_from_slice(b"again");
    probe.close(inode, handle).await?;
    same_bytes("in the end", &probe.read_all(inode, 70_000).await?, &model)
}

async fn reserved_and_zeroed_ranges_show_zeros(probe: Probe) -> Outcome {
    probe.needs(probe.features.fallocate, "it reserves no space")?;
    let mut model = vec![b'x'; 100_000];
    let (inode, handle) = create(&probe, b"reserved").await?;
    write(&probe, (inode, handle), 0, &model).await?;
    for (range, mode) in [
        (50_000..150_001, 0),
        (20_000..30_001, FALLOC_ZERO_RANGE),
        (149_000..150_001, FALLOC_ZERO_RANGE | FALLOC_KEEP_SIZE),
        (140_000..200_003, FALLOC_ZERO_RANGE),
        (0..200_003, FALLOC_KEEP_SIZE),
    ] {
        fallocate(&probe, (inode, handle), range.clone(), mode).await?;
        model.resize(model.len().max(range.end as usize), 0);
        if mode & FALLOC_ZERO_RANGE != 0 {
            model[range.start as usize..range.end as usize].fill(0);
        }
        let found = probe.fs.read(inode, handle, 0, u32::MAX).await.during("read")?;
        same_bytes(format!("after {range:?} in mode {mode:#x}"), &found, &model)?;
    }
    probe.close(inode, handle).await?;
    same("size", probe.attr(inode).await?.size_bytes, 200_003)
}

async fn impossible_reservations_are_refused(probe: Probe) -> Outcome {
    probe.needs(probe.features.fallocate, "it reserves no space")?;
    let (inode, handle) = create(&probe, b"file of mine").await?;
    write(&probe, (inode, handle), 0, b"kept").await?;
    let unknown = &[Errno::EOPNOTSUPP, Errno::EINVAL];
    let both = FALLOC_PUNCH_HOLE | FALLOC_ZERO_RANGE | FALLOC_KEEP_SIZE;
    for (offset, len, mode, expected) in [
        (0, 0, 0, &[Errno::EINVAL][..]),
        (u64::MAX, 2, 0, &[Errno::EINVAL, Errno::EFBIG]),
        (0, 10, FALLOC_PUNCH_HOLE, unknown),
        (0, 10, both, unknown),
        (0, 10, 1 << 30, unknown),
    ] {
        let what = format!("{len} bytes at {offset} in mode {mode:#x}");
        let answer = probe.fs.fallocate(me(), inode, handle, offset, len, mode).await;
        refused(what, answer, expected)?;
    }
    probe.close(inode, handle).await?;
    let reader = probe.open(inode, OpenFlags::READ).await?;
    let punch = FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE;
    let answer = probe.fs.fallocate(me(), inode, reader, 0, 10, punch).await;
    refused("a hole through an open for reading", answer, &[Errno::EBADF])?;
    probe.close(inode, reader).await?;
    same_bytes("bytes", &probe.read_all(inode, 100).await?, b"kept")
}

async fn writers_at_once_keep_to_their_ranges(probe: Probe) -> Outcome {
    const WRITERS: u64 = 8;
    const RANGE_BYTES: u64 = 100_001;
    let (inode, handle) = create(&probe, b"shared").await?;
    let jobs = (0..WRITERS).map(|job| {
        let probe = probe.clone();
        Box::pin(async move {
            let len_bytes = RANGE_BYTES;
            let data = Content::Pattern { seed: job, len_bytes }.read(0, len_bytes as usize);
            for (index, part) in data.chunks(9_999).enumerate() {
                let at = job * RANGE_BYTES + index as u64 * 9_999;
                write(&probe, (inode, handle), at, part).await?;
            }
            Ok(())
        }) as BoxFuture<'static, Outcome>
    });
    probe.at_once(jobs.collect()).await?;
    probe.close(inode, handle).await?;
    let found = probe.read_all(inode, 1 << 20).await?;
    for (job, part) in (0..WRITERS).zip(found.chunks(RANGE_BYTES as usize)) {
        let expected = Content::Pattern { seed: job, len_bytes: RANGE_BYTES };
        let expected = expected.read(0, RANGE_BYTES as usize);
        same_bytes(format!("range of writer {job}"), part, &expected)?;
    }
    same("size", found.len() as u64, WRITERS * RANGE_BYTES)
}

async fn creators_at_once_make_one_file(probe: Probe) -> Outcome {
    let root = InodeNumber::ROOT;
    let jobs = (0..8).map(|job| {
        let probe = probe.clone();
        Box::pin(async move {
            for round in 0..20 {
                let name = format!("contended {round}");
                let flags = OpenFlags(OpenFlags::WRITE.0 | OpenFlags::EXCLUSIVE);
                match probe.fs.create(me(), root, name.as_bytes(), 0o644, flags).await {
                    Ok((entry, opened)) => {
                        let winner = format!("won by {job} {round}");
                        let name = winner.as_bytes();
                        let made = probe.fs.mkdir(me(), root, name, 0o755).await;
                        made.during("mkdir of the winner's sign")?;
                        probe.close(entry.attr.inode, opened.handle).await?;
                    }
                    Err(Errno::EEXIST) => {}
                    Err(errno) => return Err(errno).during("create"),
                }
            }
            Ok(())
        }) as BoxFuture<'static, Outcome>
    });
    probe.at_once(jobs.collect()).await?;
    let names = probe.names(root).await?;
    let count = |prefix: &[u8]| names.iter().filter(|name| name.starts_with(prefix)).count();
    same("files", count(b"contended"), 20)?;
    same("creators that won", count(b"won by"), 20)
}

async fn what_was_synced_is_read_by_others(probe: Probe) -> Outcome {
    let (inode, handle) = create(&probe, b"synced").await?;
    write(&probe, (inode, handle), 0, b"durable").await?;
    probe.fs.fsync(inode, handle, true).await.during("fdatasync")?;
    probe.fs.fsync(inode, handle, false).await.during("fsync")?;
    same_bytes("by another handle", &probe.read_all(inode, 100).await?, b"durable")?;
    probe.close(inode, handle).await?;
    let root = InodeNumber::ROOT;
    let directory = probe.opendir(root).await?;
    probe.fs.fsyncdir(root, directory, false).await.during("fsyncdir")?;
    probe.fs.closedir(root, directory).await.during("closedir")?;
    probe.fs.sync().await.during("sync")
}
