//! What this node holds in a range, as repair compares it: blocks in its store, and blocks that
//! other nodes keep for it (*Diversion* in `docs/design/dht.md`), which it lists as its own.
//!
//! Blocks whose lease has ended are left out: copies of them would outlive the lease.

use std::cmp::Reverse;

use atoll_key::{Key, KeyRange};
use atoll_store::{BlockInfo, Merged, Part, StoreError, Summary};

use crate::holdings::Holdings;
use crate::holdings::pointers::Pointers;
use crate::rpc::{Item, MAX_ITEMS};

/// Items read from the store at once.
const PAGE_ITEMS: usize = 1024;
/// What one summary is taken to cost, in blocks looked at: the leaves of the store's tree at both
/// ends of the range, of up to 256 blocks, half full.
pub(crate) const SUMMARY_LOOKS: u64 = 256;
/// What cutting a range is taken to cost: a walk through the tree for each part.
pub(crate) const CUT_LOOKS: u64 = 1024;

/// The store and the pointers as one set, if there are pointers.
fn merged(holdings: &Holdings) -> Option<Merged<'_>> {
    let (store, now) = (&*holdings.store, holdings.lease_now());
    holdings.pointers.merged_with(store, now)
}

/// What this node holds in each of `ranges`.
pub(crate) async fn summaries(
    holdings: &Holdings,
    ranges: Vec<KeyRange>,
) -> Result<Vec<Summary>, StoreError> {
    let Some(merged) = merged(holdings) else {
        return holdings.store.summaries(ranges, holdings.lease_now()).await;
    };
    let mut summaries = Vec::with_capacity(ranges.len());
    for range in ranges {
        summaries.push(merged.summary(range).await?);
    }
    Ok(summaries)
}

/// What this node holds in `range`, and what finding it is taken to cost, in blocks looked at.
pub(crate) async fn summary(
    holdings: &Holdings,
    range: KeyRange,
) -> Result<(Summary, u64), StoreError> {
    let summary = summaries(holdings, vec![range]).await?.into_iter().next();
    let summary = summary.expect("a summary for each range");
    // Around each pointer, a leaf's worth of blocks is read.
    let (pointers, _) = holdings.pointers.counts();
    let read = pointers.saturating_mul(SUMMARY_LOOKS).min(summary.count);
    Ok((summary, SUMMARY_LOOKS + read))
}

/// Parts that make up `range`, with what this node holds in each; one only if it is not much.
pub(crate) async fn cut(holdings: &Holdings, range: KeyRange) -> Result<Vec<Part>, StoreError> {
    match merged(holdings) {
        Some(merged) => merged.cut(range).await,
        None => holdings.store.cut(range, holdings.lease_now()).await,
    }
}

/// A page of the items of `range`, and what is left of the range after it.
pub(crate) fn page(
    holdings: &Holdings,
    range: KeyRange,
) -> Result<(Vec<Item>, Option<KeyRange>), StoreError> {
    let infos = holdings.store.list(range, PAGE_ITEMS)?;
    let records = holdings.pointers.list(range, PAGE_ITEMS)?;
    let place = |key: &Key| key.distance_from(&range.after.next());
    // A list that is full says nothing of what comes after its last.
    let is_full = |list: &&Vec<BlockInfo>| list.len() == PAGE_ITEMS;
    let ends = [&infos, &records].into_iter().filter(is_full).filter_map(|list| list.last());
    let mut upto = ends.map(|last| last.key).min_by_key(place).unwrap_or(range.upto);
    let now = holdings.lease_now();
    let live = |info: &&BlockInfo| info.expires_unix_secs > now && place(&info.key) <= place(&upto);
    let item = |info: &BlockInfo| Item { key: info.key, version: info.version };
    let mut items: Vec<Item> = infos.iter().filter(live).map(item).collect();
    let pointers = Pointers::pointers(&records).filter(live).map(item);
    let here = items.len();
    items.extend(pointers);
    if items.len() > here {
        items.sort_by_key(|item| (place(&item.key), Reverse(item.version)));
        items.dedup_by_key(|item| item.key);
        items.truncate(PAGE_ITEMS);
        upto = items.last().filter(|_| items.len() == PAGE_ITEMS).map_or(upto, |last| last.key);
    }
    let rest = (upto != range.upto).then(|| KeyRange::new(upto, range.upto));
    Ok((items, rest))
}

/// As many items of `range` as go into one answer, and what is left of the range after them.
pub(crate) fn first_items(
    holdings: &Holdings,
    range: KeyRange,
) -> Result<(Vec<Item>, Option<KeyRange>), StoreError> {
    let (mut items, mut rest) = (Vec::new(), Some(range));
    while let Some(range) = rest.filter(|_| items.len() + PAGE_ITEMS <= MAX_ITEMS) {
        let (page, after) = page(holdings, range)?;
        items.extend(page);
        rest = after;
    }
    Ok((items, rest))
}
