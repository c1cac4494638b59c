//! Listings.

use std::collections::BTreeSet;

use atoll_env::BoxFuture;
use bytes::Bytes;

use crate::kit::probe::{During, Outcome, Probe, ensure, fail, same, shown};
use crate::kit::tree::BIG_DIRECTORY_ENTRIES;
use crate::kit::{Check, checks};
use crate::{DirEntry, InodeNumber, MAX_COOKIE};

pub(super) const CHECKS: &[Check] = checks![
    every_listing_is_complete,
    a_listing_is_the_same_with_every_limit,
    a_big_directory_is_listed_in_pages,
    a_listing_goes_on_after_every_cookie,
    cookies_are_sound,
    an_empty_directory_has_no_entries,
    after_the_end_nothing_follows,
    two_listings_do_not_disturb_each_other,
    many_listings_at_once_are_complete,
    an_open_directory_outlives_forget,
];

fn expected(probe: &Probe, path: &[u8]) -> Vec<Bytes> {
    let node = probe.tree.get(path).expect("the path comes from the tree");
    node.children().expect("it is a directory").keys().cloned().collect()
}

/// Sorted, and none twice.
fn names(listed: &[DirEntry]) -> Outcome<Vec<Bytes>> {
    let names: BTreeSet<Bytes> = listed.iter().map(|entry| entry.name.clone()).collect();
    if names.len() < listed.len() {
        return fail(format!("{} entries with {} names", listed.len(), names.len()));
    }
    Ok(names.into_iter().collect())
}

async fn every_listing_is_complete(probe: Probe) -> Outcome {
    for (path, node) in probe.tree.nodes() {
        if node.children().is_some() {
            let inode = probe.inode(&path).await?;
            let listed = probe.list(inode, 1000, false).await?;
            let what = format!("names in {}", shown(&path));
            same(what, names(&listed)?, expected(&probe, &path))?;
        }
    }
    Ok(())
}

async fn a_listing_is_the_same_with_every_limit(probe: Probe) -> Outcome {
    let inode = probe.inode("paged").await?;
    let whole = probe.list(inode, usize::MAX, false).await?;
    same("names", names(&whole)?, expected(&probe, b"paged"))?;
    for limit in 1..=whole.len() + 2 {
        for with_entries in [false, true] {
            let mut listed = probe.list(inode, limit, with_entries).await?;
            for entry in &mut listed {
                if let Some(found) = entry.entry.take() {
                    probe.fs.forget(found.attr.inode, 1);
                }
            }
            same(format!("listing with limit {limit}"), &listed, &whole)?;
        }
    }
    Ok(())
}

async fn a_big_directory_is_listed_in_pages(probe: Probe) -> Outcome {
    let inode = probe.inode("big").await?;
    for limit in [7, 64, 97, 1000, BIG_DIRECTORY_ENTRIES, usize::MAX] {
        let listed = probe.list(inode, limit, limit == 97).await?;
        let what = format!("names with limit {limit}");
        let names = names(&listed)?;
        same(format!("number of {what}"), names.len(), BIG_DIRECTORY_ENTRIES)?;
        ensure(names == expected(&probe, b"big"), || format!("{what} are not those put there"))?;
    }
    Ok(())
}

async fn a_listing_goes_on_after_every_cookie(probe: Probe) -> Outcome {
    let inode = probe.inode("paged").await?;
    let handle = probe.opendir(inode).await?;
    let whole = probe.list_from(inode, handle, 0, usize::MAX, false).await?;
    // Backwards too: a program may seek to where it was before.
    for index in (0..whole.len()).chain((0..whole.len()).rev()) {
        let cookie = whole[index].cookie;
        let rest = probe.list_from(inode, handle, cookie, 5, false).await?;
        same(format!("after cookie {cookie}"), &rest[..], &whole[index + 1..])?;
    }
    same("from the start again", probe.list_from(inode, handle, 0, 4, false).await?, whole)?;
    probe.fs.closedir(inode, handle).await.during("closedir")
}

async fn cookies_are_sound(probe: Probe) -> Outcome {
    for path in ["paged", "big", "names", ""] {
        let inode = probe.inode(path).await?;
        let mut seen = BTreeSet::new();
        for entry in probe.list(inode, 50, false).await? {
            let shown = || format!("cookie {} of {} in {path:?}", entry.cookie, shown(&entry.name));
            ensure((1..=MAX_COOKIE).contains(&entry.cookie), || {
                format!("{} out of range", shown())
            })?;
            ensure(seen.insert(entry.cookie), || format!("{} used twice", shown()))?;
        }
    }
    Ok(())
}

async fn an_empty_directory_has_no_entries(probe: Probe) -> Outcome {
    let inode = probe.inode("empty").await?;
    for limit in [1, 100, usize::MAX] {
        same("entries", probe.list(inode, limit, true).await?.len(), 0)?;
    }
    Ok(())
}

async fn after_the_end_nothing_follows(probe: Probe) -> Outcome {
    let inode = probe.inode("paged").await?;
    let handle = probe.opendir(inode).await?;
    let whole = probe.list_from(inode, handle, 0, 10, false).await?;
    let last = whole.last().map_or(0, |entry| entry.cookie);
    for _ in 0..3 {
        let more = probe.fs.readdir(inode, handle, last, 10, false).await.during("readdir")?;
        same("entries after the end", more.len(), 0)?;
    }
    let none = probe.fs.readdir(inode, handle, 0, 0, false).await.during("readdir, limit 0")?;
    same("entries with limit 0", none.len(), 0)?;
    probe.fs.closedir(inode, handle).await.during("closedir")
}

async fn two_listings_do_not_disturb_each_other(probe: Probe) -> Outcome {
    let inode = probe.inode("paged").await?;
    let whole = probe.list(inode, usize::MAX, false).await?;
    let handles = [probe.opendir(inode).await?, probe.opendir(inode).await?];
    let mut listed = [Vec::new(), Vec::new()];
    for turn in 0..whole.len() * 2 {
        let which = turn % 2;
        let cookie = listed[which].last().map_or(0, |entry: &DirEntry| entry.cookie);
        let limit = 1 + which * 2;
        let page = probe.fs.readdir(inode, handles[which], cookie, limit, false).await;
        listed[which].extend(page.during("readdir")?);
    }
    for (listed, handle) in listed.iter().zip(handles) {
        same("listing in turns with another", listed, &whole)?;
        probe.fs.closedir(inode, handle).await.during("closedir")?;
    }
    Ok(())
}

async fn many_listings_at_once_are_complete(probe: Probe) -> Outcome {
    let jobs = (0..8).map(|job| {
        let probe = probe.clone();
        Box::pin(async move {
            let path: &[u8] = if job % 2 == 0 { b"big" } else { b"names" };
            let inode = probe.inode(path).await?;
            let listed = probe.list(inode, 50 + job, job % 3 == 0).await?;
            ensure(names(&listed)? == expected(&probe, path), || {
                format!("the listing of {} is not complete", shown(path))
            })
        }) as BoxFuture<'static, Outcome>
    });
    probe.at_once(jobs.collect()).await
}

async fn an_open_directory_outlives_forget(probe: Probe) -> Outcome {
    let inode = probe.inode("paged").await?;
    let handle = probe.opendir(inode).await?;
    ensure(inode != InodeNumber::ROOT, || "a directory with the root's number".to_owned())?;
    probe.fs.forget(inode, 1);
    let listed = probe.list_from(inode, handle, 0, 10, false).await?;
    same("names after forget", names(&listed)?, expected(&probe, b"paged"))?;
    probe.fs.closedir(inode, handle).await.during("closedir")
}
