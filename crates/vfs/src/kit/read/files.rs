//! Reading.

use atoll_env::BoxFuture;

use crate::kit::probe::{
    Dice, During, Outcome, Probe, ensure, me, refused, same, same_bytes, shown,
};
use crate::kit::tree::Content;
use crate::kit::{Check, checks};
use crate::{Errno, Handle, InodeNumber, OpenFlags, SeekTo};

pub(super) const CHECKS: &[Check] = checks![
    every_file_reads_as_it_was_written,
    the_size_of_reads_does_not_matter,
    reads_at_random_find_the_right_bytes,
    a_read_at_the_end_is_short_and_after_it_empty,
    a_read_of_nothing_is_empty,
    files_read_in_parallel_keep_their_bytes,
    one_handle_serves_many_readers,
    a_file_can_be_open_many_times,
    directories_do_not_open_as_files,
    holes_and_data_are_found,
];

fn content(probe: &Probe, path: &[u8]) -> Content {
    let node = probe.tree.get(path).expect("the path comes from the tree");
    node.content().expect("it is a regular file").clone()
}

async fn every_file_reads_as_it_was_written(probe: Probe) -> Outcome {
    for (path, node) in probe.tree.nodes() {
        if let Some(content) = node.content() {
            let inode = probe.inode(&path).await?;
            let found = probe.read_all(inode, 1 << 20).await?;
            same_bytes(shown(&path), &found, &content.read(0, found.len() + 1))?;
        }
    }
    Ok(())
}

async fn the_size_of_reads_does_not_matter(probe: Probe) -> Outcome {
    let path = b"sizes/65537";
    let inode = probe.inode(path).await?;
    let expected = content(&probe, path).read(0, usize::MAX >> 1);
    for chunk in [997, 4095, 4096, 65_536, 131_072, u32::MAX] {
        let found = probe.read_all(inode, chunk).await?;
        same_bytes(format!("{chunk} bytes at a time"), &found, &expected)?;
    }
    Ok(())
}

async fn reads_at_random_find_the_right_bytes(probe: Probe) -> Outcome {
    let mut dice = Dice::new(1);
    for path in ["sizes/5242883", "sizes/1048577", "sizes/100", "holes/hole in the middle"] {
        let content = content(&probe, path.as_bytes());
        let inode = probe.inode(path).await?;
        let handle = probe.open(inode, OpenFlags::READ).await?;
        for _ in 0..100 {
            let offset = dice.below(content.len_bytes() + 10);
            let len = dice.up_to_bits(19) as u32;
            let found = probe.fs.read(inode, handle, offset, len).await;
            let what = format!("{len} bytes at {offset} of {path}");
            let found = found.during(&what)?;
            same_bytes(what, &found, &content.read(offset, len as usize))?;
        }
        probe.close(inode, handle).await?;
    }
    Ok(())
}

async fn a_read_at_the_end_is_short_and_after_it_empty(probe: Probe) -> Outcome {
    for len_bytes in [0u64, 1, 4096, 65_536, 65_537] {
        let path = format!("sizes/{len_bytes}");
        let content = content(&probe, path.as_bytes());
        let inode = probe.inode(&path).await?;
        let handle = probe.open(inode, OpenFlags::READ).await?;
        for offset in
            [len_bytes.saturating_sub(1), len_bytes, len_bytes + 1, 1 << 40, i64::MAX as u64]
        {
            for len in [1, 4096, u32::MAX] {
                let what = format!("{len} bytes at {offset} of {len_bytes}");
                let found = probe.fs.read(inode, handle, offset, len).await.during(&what)?;
                same_bytes(what, &found, &content.read(offset, len as usize))?;
            }
        }
        probe.close(inode, handle).await?;
    }
    Ok(())
}

async fn a_read_of_nothing_is_empty(probe: Probe) -> Outcome {
    let inode = probe.inode("sizes/4096").await?;
    let handle = probe.open(inode, OpenFlags::READ).await?;
    for offset in [0, 1, 4096, 10_000] {
        let found = probe.fs.read(inode, handle, offset, 0).await.during("read of 0 bytes")?;
        same("bytes read", found.len(), 0)?;
    }
    probe.close(inode, handle).await
}

async fn files_read_in_parallel_keep_their_bytes(probe: Probe) -> Outcome {
    let paths =
        ["sizes/5242883", "sizes/1048575", "sizes/65536", "sizes/1", "holes/hole in the middle"];
    let jobs = (0..15).map(|job| {
        let probe = probe.clone();
        Box::pin(async move {
            let path = paths[job % paths.len()];
            let inode = probe.inode(path).await?;
            let found = probe.read_all(inode, 100_000 + job as u32).await?;
            same_bytes(path, &found, &content(&probe, path.as_bytes()).read(0, found.len() + 1))
        }) as BoxFuture<'static, Outcome>
    });
    probe.at_once(jobs.collect()).await
}

async fn one_handle_serves_many_readers(probe: Probe) -> Outcome {
    let path = "sizes/5242883";
    let inode = probe.inode(path).await?;
    let handle = probe.open(inode, OpenFlags::READ).await?;
    let jobs = (0..8u64).map(|job| {
        let probe = probe.clone();
        Box::pin(async move {
            let (content, mut dice) = (content(&probe, path.as_bytes()), Dice::new(job * 1000));
            for _ in 0..20 {
                let offset = dice.below(content.len_bytes());
                let found = probe.fs.read(inode, handle, offset, 70_000).await.during("read")?;
                let what = format!("70,000 bytes at {offset}");
                same_bytes(what, &found, &content.read(offset, 70_000))?;
            }
            Ok(())
        }) as BoxFuture<'static, Outcome>
    });
    probe.at_once(jobs.collect()).await?;
    probe.close(inode, handle).await
}

async fn a_file_can_be_open_many_times(probe: Probe) -> Outcome {
    let inode = probe.inode("file").await?;
    let expected = content(&probe, b"file").read(0, 100);
    let mut handles: Vec<Handle> = Vec::new();
    for _ in 0..100 {
        handles.push(probe.open(inode, OpenFlags::READ).await?);
    }
    // Closing some must not close the others.
    for (index, handle) in handles.iter().enumerate() {
        if index % 2 == 0 {
            probe.close(inode, *handle).await?;
        }
    }
    for handle in handles.iter().skip(1).step_by(2) {
        let found = probe.fs.read(inode, *handle, 0, 100).await.during("read")?;
        same_bytes("through a handle that is still open", &found, &expected)?;
        probe.close(inode, *handle).await?;
    }
    Ok(())
}

async fn directories_do_not_open_as_files(probe: Probe) -> Outcome {
    for path in ["", "directory"] {
        let inode = probe.inode(path).await?;
        let answer = probe.fs.open(me(), inode, OpenFlags::READ).await;
        refused(format!("open of {path:?}"), answer, &[Errno::EISDIR])?;
    }
    Ok(())
}

/// Every byte of data lies in what is reported as data; holes may be reported smaller
/// than they are.
async fn holes_and_data_are_found(probe: Probe) -> Outcome {
    for path in [
        "holes/nothing but a hole",
        "holes/hole at the start",
        "holes/hole in the middle",
        "sizes/65537",
    ] {
        let content = content(&probe, path.as_bytes());
        let (inode, end) = (probe.inode(path).await?, content.len_bytes());
        let handle = probe.open(inode, OpenFlags::READ).await?;
        if probe.fs.seek(inode, handle, 0, SeekTo::Data).await == Err(Errno::ENOSYS) {
            probe.close(inode, handle).await?;
            return probe.needs(false, "it does not tell holes from data");
        }
        let (mut at, mut seen) = (0, Vec::new());
        while at < end {
            let data = match probe.fs.seek(inode, handle, at, SeekTo::Data).await {
                Err(Errno::ENXIO) => break,
                data => data.during(format!("data after {at} of {path}"))?,
            };
            let hole = seek_hole(&probe, inode, handle, data).await?;
            ensure(at <= data && data < hole && hole <= end, || {
                format!("{path}: after {at} data at {data} and a hole at {hole}")
            })?;
            seen.push(data..hole);
            at = hole;
        }
        for range in content.data_ranges().into_iter().filter(|range| !range.is_empty()) {
            let within =
                |seen: &std::ops::Range<u64>| seen.start <= range.start && range.end <= seen.end;
            ensure(seen.iter().any(within), || format!("{path}: {range:?} is not in {seen:?}"))?;
        }
        let past = probe.fs.seek(inode, handle, end, SeekTo::Hole).await;
        refused("a hole past the end", past, &[Errno::ENXIO])?;
        probe.close(inode, handle).await?;
    }
    Ok(())
}

async fn seek_hole(probe: &Probe, inode: InodeNumber, handle: Handle, at: u64) -> Outcome<u64> {
    let hole = probe.fs.seek(inode, handle, at, SeekTo::Hole).await;
    hole.during(format!("the hole after {at}"))
}
