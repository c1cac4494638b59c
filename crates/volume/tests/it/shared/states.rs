//! States that the log lists: each can be shown and copied whole, whatever was done in one minute.

use std::collections::{BTreeMap, BTreeSet};

use atoll_vfs::{Errno, FileKind, FileSystem, RenameFlags, SetAttr};
use atoll_volume::shared::SharedFs;

use super::past::{MINUTE, ROOT, START, Scene, list, me, put, read, walk};
use crate::write::model::Dice;

/// A tree: the text of each file, and `None` for each directory.
type Tree = BTreeMap<String, Option<String>>;

/// All below a directory.
async fn tree(fs: &SharedFs, top: &str) -> Result<Tree, (String, Errno)> {
    let (mut tree, mut waiting) = (Tree::new(), vec![String::new()]);
    while let Some(directory) = waiting.pop() {
        let path = format!("{top}/{directory}");
        for name in list(fs, &path).await.map_err(|errno| (path, errno))? {
            let (below, path) = (format!("{directory}/{name}"), format!("{top}{directory}/{name}"));
            let text = match read(fs, &path).await {
                Err(Errno::EISDIR) => {
                    waiting.push(below.clone());
                    None
                }
                text => Some(text.map_err(|errno| (path, errno))?),
            };
            tree.insert(below, text);
        }
    }
    Ok(tree)
}

/// The states that a log lists, in milliseconds since the beginning.
async fn listed(fs: &SharedFs, path: &str) -> BTreeSet<(u64, String)> {
    let (above, name) = path.rsplit_once('/').unwrap_or(("", path));
    let above = walk(fs, above).await.expect("is there");
    let log = fs.getxattr(above, format!("user.atoll.log.{name}").as_bytes()).await.expect("a log");
    let log = String::from_utf8(log.to_vec()).expect("text");
    let states = log.lines().map(|line| line.split('\t').nth(3).expect("a state").to_owned());
    let states = states.filter(|state| state != "-");
    let time = |state: &str| {
        let whole = if state.len() == 17 { state.replace('Z', ":00Z") } else { state.to_owned() };
        let time = humantime::parse_rfc3339(&whole).expect("a time");
        let since = time.duration_since(std::time::UNIX_EPOCH).expect("after 1970");
        since.as_millis() as u64 - START
    };
    states.map(|state| (time(&state), state)).collect()
}

async fn rename(fs: &SharedFs, from: &str, to: &str, exchange: bool) -> Result<(), Errno> {
    let (above, name) = from.rsplit_once('/').expect("below the root");
    let (new_above, new_name) = to.rsplit_once('/').expect("below the root");
    let (above, new_above) = (walk(fs, above).await?, walk(fs, new_above).await?);
    let flags = RenameFlags { exchange, ..RenameFlags::default() };
    fs.rename(me(), above, name.as_bytes(), new_above, new_name.as_bytes(), flags).await
}

async fn write(fs: &SharedFs, path: &str, text: &str) -> Result<(), Errno> {
    let (above, name) = path.rsplit_once('/').expect("below the root");
    let above = walk(fs, above).await?;
    let kind = async |inode| fs.getattr(inode, None).await.map(|reply| reply.attr.kind);
    if kind(above).await? != FileKind::Directory {
        return Err(Errno::ENOTDIR);
    }
    if let Ok(inode) = walk(fs, path).await
        && kind(inode).await? == FileKind::Directory
    {
        return Err(Errno::EISDIR);
    }
    put(fs, above, name, text).await;
    Ok(())
}

async fn remove_all(fs: &SharedFs, path: &str) -> Result<(), Errno> {
    let there = tree(fs, path).await.map_err(|(_, errno)| errno)?;
    let top = (String::new(), None);
    for (below, text) in std::iter::once(top).chain(there).rev() {
        let path = format!("{path}{below}");
        let (above, name) = path.rsplit_once('/').expect("below the root");
        let above = walk(fs, above).await?;
        match text {
            Some(_) => fs.unlink(me(), above, name.as_bytes()).await?,
            None => fs.rmdir(me(), above, name.as_bytes()).await?,
        }
    }
    Ok(())
}

/// One thing that people and their programs do in a directory; it may be impossible now.
async fn something(fs: &SharedFs, dice: &mut Dice, number: usize) -> Result<String, Errno> {
    const PLACES: [&str; 5] = ["d/a", "d/b", "d/s", "d/s/a", "d/s/c"];
    let mut place = || PLACES[dice.below(PLACES.len() as u64) as usize];
    let (one, other) = (place(), place());
    let text = format!("text {number}");
    let done = match dice.below(10) {
        0 | 1 => {
            write(fs, one, &text).await?;
            "write"
        }
        // As editors do.
        2 | 3 => {
            let (above, name) = one.rsplit_once('/').expect("below the root");
            let new = format!("{above}/.{name}.new");
            write(fs, &new, &text).await?;
            rename(fs, &new, one, false).await?;
            "save"
        }
        4 => {
            rename(fs, one, other, false).await?;
            "rename"
        }
        5 => {
            rename(fs, one, other, true).await?;
            "exchange"
        }
        6 => {
            let mode = SetAttr { mode: Some(0o600 + number as u32 % 8), ..SetAttr::default() };
            fs.setattr(me(), walk(fs, one).await?, None, mode).await?;
            "chmod"
        }
        7 => {
            let (above, name) = one.rsplit_once('/').expect("below the root");
            fs.mkdir(me(), walk(fs, above).await?, name.as_bytes(), 0o755).await?;
            "mkdir"
        }
        8 if walk(fs, one).await.is_err() => {
            write(fs, one, "").await?;
            "empty"
        }
        _ => {
            remove_all(fs, one).await?;
            "rm -r"
        }
    };
    Ok(format!("{done} {one} {other}"))
}

const SEEDS: u64 = 40;

/// An editor's save gives a file a new link, so it replaced the version that the state before it had named: of five states
/// that `atoll log` listed three could not be restored. Versions that lose nothing are not kept within a minute, and those
/// after them stand for them.
#[tokio::test(start_paused = true)]
async fn each_state_that_the_log_lists_is_whole() {
    let (mut done, mut shown, mut shown_by_name) = (0, 0, 0);
    for seed in 0..SEEDS {
        let mut dice = Dice(seed);
        let scene = Scene::new("60m/144t/24h/7d/4w", seed % 4 == 0).await;
        let fs = scene.mount(1).await;
        let mut now_ms = 1000;
        scene.at_ms(now_ms);
        fs.mkdir(me(), ROOT, b"d", 0o755).await.expect("is made");
        // Before each time of the keys, the tree was so.
        let mut trees: BTreeMap<u64, Tree> = BTreeMap::new();
        let mut story = Vec::new();
        for number in 0..30 {
            if story.len() == 12 {
                break;
            }
            // Within a minute, or in several.
            let most = if dice.below(8) == 0 { 70_000 } else { 4_000 };
            now_ms += 1 + dice.below(most);
            trees.insert(now_ms, tree(&fs, "d").await.expect("is whole"));
            scene.at_ms(now_ms);
            if let Ok(did) = something(&fs, &mut dice, number).await {
                story.push((now_ms, did));
            }
            fs.sync().await.expect("is on the ring");
        }
        trees.insert(u64::MAX, tree(&fs, "d").await.expect("is whole"));
        done += story.len();
        scene.at_ms(now_ms + MINUTE);
        let context = format!("seed {seed}: {story:?}");
        let expected = |ms: u64| trees.range(ms..).next().expect("the last").1;
        for fs in [&fs, &scene.mount(2).await] {
            for (ms, state) in listed(fs, "d").await {
                let then = tree(fs, &format!(".atoll/history/{state}/d")).await;
                assert_eq!(then.as_ref(), Ok(expected(ms)), "{ms}: {context}");
                shown += 1;
            }
            for name in ["a", "b", "s"] {
                for (ms, state) in listed(fs, &format!("d/{name}")).await {
                    let then = tree(fs, &format!(".atoll/history/{state}/d")).await;
                    assert_eq!(then.as_ref(), Ok(expected(ms)), "{name} {ms}: {context}");
                    assert!(
                        expected(ms).contains_key(&format!("/{name}")),
                        "{name} {ms}: {context}"
                    );
                    shown_by_name += 1;
                }
            }
        }
    }
    println!("{done} changes, {shown} states of the directory, {shown_by_name} of what was in it");
    assert!(shown as u64 > SEEDS && shown_by_name as u64 > SEEDS);
}

/// What was kept of a minute for an hour is gone after it: that nothing is there between two versions says nothing any more
/// of what was.
#[tokio::test(start_paused = true)]
async fn a_state_within_a_minute_long_ago_lacks_no_name() {
    for policy in ["60m/144t/24h/7d/4w", "24h/7d/4w"] {
        let scene = Scene::new(policy, false).await;
        let fs = scene.mount(1).await;
        let at = 90 * MINUTE;
        scene.at_ms(1000);
        fs.mkdir(me(), ROOT, b"d", 0o755).await.expect("is made");
        write(&fs, "d/f", "one").await.expect("is written");
        fs.sync().await.expect("is on the ring");
        scene.at_ms(at + 10_000);
        write(&fs, "d/.f.new", "two").await.expect("is written");
        fs.sync().await.expect("is on the ring");
        scene.at_ms(at + 20_000);
        rename(&fs, "d/.f.new", "d/f", false).await.expect("is renamed");
        fs.sync().await.expect("is on the ring");
        scene.at_ms(at + 65 * MINUTE);
        write(&fs, "d/g", "three").await.expect("is written");
        fs.sync().await.expect("is on the ring");
        let time = std::time::Duration::from_millis(START + at + 15_000);
        let state = humantime::format_rfc3339_seconds(std::time::UNIX_EPOCH + time);
        let names = list(&fs, &format!(".atoll/history/{state}/d")).await.expect("lists");
        assert!(names.contains("f"), "{policy}: {names:?}");
    }
}
