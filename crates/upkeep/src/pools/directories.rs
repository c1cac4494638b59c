//! The directories of this machine in a pool, one for each group of which it has a member.
//!
//! ```text
//! D/                 the first group's, if this machine joined while that lacked members
//! D/groups/N/        another group's, or the first one's on a machine that became a member of it later
//! D/groups/N.old/    what this machine had of a group that it has left: of the last time
//! D/groups/map       the newest map of the first group that is known, on a machine with directories of that kind
//! DIR/pools/NAME.groups  the groups whose directories were made, one number a line
//! ```
//!
//! **Invariant.** A directory is made once. One that was made and is gone, perhaps because its disk is not mounted, is not made anew.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use atoll_env::BoxFuture;
use atoll_pool::disk::directory::Directory;
use atoll_pool::{
    GroupNumber, MachineDisks, OWN_DIRECTORY, OpenError, PoolMap, PoolSettings, create_member,
    read_map, read_settings,
};

use super::records;

/// See the module.
pub(super) struct PoolDirectories {
    /// The node's own directory.
    node: PathBuf,
    /// The pool's name on it.
    name: String,
    /// D.
    dir: PathBuf,
    /// How many groups share its room.
    sharers: Arc<AtomicUsize>,
}

/// Directories of groups beside D.
const GROUPS: &str = "groups";
const MAP: &str = "map";
const SLOTS: &str = "slots";

/// The groups that have a directory in D, and where.
///
/// # Errors
/// If it cannot be read.
pub fn directories(dir: &Path) -> io::Result<Vec<(GroupNumber, PathBuf)>> {
    let mut all = Vec::new();
    if dir.join(OWN_DIRECTORY).exists() {
        all.push((GroupNumber::FIRST, dir.to_owned()));
    }
    let entries = match fs::read_dir(dir.join(GROUPS)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(all),
        entries => entries?,
    };
    for entry in entries {
        let path = entry?.path();
        let number = path.file_name().and_then(|name| name.to_str()?.parse().ok());
        if let Some(number) = number.and_then(GroupNumber::new) {
            all.push((number, path));
        }
    }
    all.sort_unstable();
    Ok(all)
}

/// Removes a directory, if there is one.
fn remove_all(dir: &Path) -> io::Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn sync(dir: &Path) -> io::Result<()> {
    fs::File::open(dir)?.sync_all()
}

impl PoolDirectories {
    pub(super) fn new(node: &Path, name: &str, dir: &Path) -> PoolDirectories {
        let (node, name, dir) = (node.to_owned(), name.to_owned(), dir.to_owned());
        PoolDirectories { node, name, dir, sharers: Arc::default() }
    }

    /// The newest map of the first group that this disk knows.
    ///
    /// # Errors
    /// Why it cannot be read, for people.
    pub(super) async fn kept(&self) -> Result<Option<PoolMap>, String> {
        let failed = |error: io::Error| format!("{}: {error}", self.dir.display());
        let mut newest: Option<PoolMap> = None;
        let mut note = |map: Option<PoolMap>| {
            let map = map.filter(|map| newest.as_ref().is_none_or(|known| known.epoch < map.epoch));
            newest = map.or(newest.take());
        };
        let path = self.dir.join(GROUPS).join(MAP);
        match fs::read_to_string(&path) {
            Ok(text) => {
                let map = PoolMap::from_text(&text);
                note(Some(map.ok_or_else(|| format!("{} is damaged", path.display()))?));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(error)),
        }
        for (group, path) in directories(&self.dir).map_err(failed)? {
            if group == GroupNumber::FIRST {
                let disk = Directory::open(&path).map_err(failed)?;
                note(read_map(&disk).await.map_err(|error| error.to_string())?);
            }
        }
        Ok(newest)
    }

    /// Makes the directory of the first group, in D; one that was made before a crash is there.
    ///
    /// # Errors
    /// Why not, for people.
    pub(super) async fn make_first(
        &self,
        settings: PoolSettings,
        map: &PoolMap,
    ) -> Result<(), String> {
        let failed = |error: io::Error| format!("{}: {error}", self.dir.display());
        let Some(path) = self.find(settings.group).map_err(failed)? else {
            return self.make_in(settings, map).await;
        };
        match read_settings(&Directory::open(&path).map_err(failed)?).await {
            Ok(found) if found == settings => Ok(()),
            // A crash came while it was made: it holds nothing yet.
            Err(OpenError::NoStamp) => {
                let half = [SLOTS, OWN_DIRECTORY].map(|name| remove_all(&path.join(name)));
                half.into_iter().collect::<io::Result<()>>().map_err(failed)?;
                self.make_in(settings, map).await
            }
            Ok(_) => Err(format!("{} holds another pool", path.display())),
            Err(error) => Err(format!("{}: {error}", path.display())),
        }
    }

    /// Keeps the map by which this node came to belong to the pool, before it has any directory.
    ///
    /// # Errors
    /// Why not, for people.
    pub(super) fn keep_first(&self, map: &PoolMap) -> Result<(), String> {
        self.keep_now(map).map_err(|error| format!("{}: {error}", self.dir.display()))
    }

    /// Whether D is this machine's part of a pool. It is not where its disk is not mounted.
    fn is_there(&self) -> bool {
        self.dir.join(OWN_DIRECTORY).exists() || self.dir.join(GROUPS).join(MAP).exists()
    }

    fn unmounted(&self) -> String {
        format!("{}: no pool is there. Is its disk mounted?", self.dir.display())
    }

    fn find(&self, group: GroupNumber) -> io::Result<Option<PathBuf>> {
        let all = directories(&self.dir)?;
        Ok(all.into_iter().find(|(number, _)| *number == group).map(|(_, path)| path))
    }

    fn change_made(&self, change: impl FnOnce(&mut BTreeSet<u8>) -> bool) -> Result<(), String> {
        let failed = |error: io::Error| format!("{}: {error}", self.node.display());
        let mut made = records::groups_made(&self.node, &self.name).map_err(failed)?;
        match change(&mut made) {
            true => records::keep_groups_made(&self.node, &self.name, &made).map_err(failed),
            false => Ok(()),
        }
    }

    async fn make_in(&self, settings: PoolSettings, map: &PoolMap) -> Result<(), String> {
        let failed = |error: io::Error| format!("{}: {error}", self.dir.display());
        let group = settings.group.number();
        let made = records::groups_made(&self.node, &self.name).map_err(failed)?;
        if made.contains(&group) {
            let text = "its directory was made, and is gone. Is its disk mounted?";
            return Err(format!("{}: {text}", self.dir.display()));
        }
        let is_free = fs::read_dir(&self.dir).map_err(failed)?.next().is_none();
        if settings.group == GroupNumber::FIRST && is_free {
            let disk = Directory::open(&self.dir).map_err(failed)?;
            let made = create_member(&disk, settings, Some(map)).await;
            return made.map_err(|error| format!("{}: {error}", self.dir.display()));
        }
        if !self.is_there() {
            return Err(self.unmounted());
        }
        let groups = self.dir.join(GROUPS);
        let (beside, path) = (groups.join(format!("{group}.new")), groups.join(group.to_string()));
        // A crash came while it was made.
        remove_all(&beside).map_err(failed)?;
        fs::create_dir_all(&beside).map_err(failed)?;
        let disk = Directory::open(&beside).map_err(failed)?;
        let made = create_member(&disk, settings, Some(map)).await;
        made.map_err(|error| format!("{}: {error}", beside.display()))?;
        fs::rename(&beside, &path).and_then(|()| sync(&groups)).map_err(failed)
    }

    fn retire_now(&self, group: GroupNumber) -> io::Result<()> {
        let Some(path) = self.find(group)? else { return Ok(()) };
        let groups = self.dir.join(GROUPS);
        fs::create_dir_all(&groups)?;
        let old = groups.join(format!("{group}.old"));
        if path == self.dir {
            // Last what says that it is a pool's: interrupted, it goes on.
            if path.join(SLOTS).exists() {
                remove_all(&old)?;
                fs::create_dir(&old)?;
                fs::rename(path.join(SLOTS), old.join(SLOTS))?;
            }
            fs::rename(path.join(OWN_DIRECTORY), old.join(OWN_DIRECTORY))?;
            sync(&path)?;
        } else {
            remove_all(&old)?;
            fs::rename(&path, &old)?;
        }
        sync(&groups)
    }

    fn keep_now(&self, first: &PoolMap) -> io::Result<()> {
        let groups = self.dir.join(GROUPS);
        if self.dir.join(OWN_DIRECTORY).exists() && !groups.exists() {
            // It is kept there.
            return Ok(());
        }
        fs::create_dir_all(&groups)?;
        let beside = groups.join("map.new");
        fs::write(&beside, first.to_text())?;
        fs::File::open(&beside)?.sync_all()?;
        fs::rename(&beside, groups.join(MAP))?;
        sync(&groups)
    }
}

impl MachineDisks<Directory> for PoolDirectories {
    fn open(&self, group: GroupNumber) -> BoxFuture<'_, Result<Option<Directory>, String>> {
        Box::pin(async move {
            let failed = |error: io::Error| format!("{}: {error}", self.dir.display());
            let Some(path) = self.find(group).map_err(failed)? else { return Ok(None) };
            let disk = Directory::open(&path);
            let disk = disk.map_err(|error| format!("{}: {error}", path.display()))?;
            let all = directories(&self.dir).map_err(failed)?.len();
            self.sharers.store(all, Ordering::Relaxed);
            self.change_made(|made| made.insert(group.number()))?;
            Ok(Some(disk.shared_by(self.sharers.clone())))
        })
    }

    fn make<'a>(
        &'a self,
        settings: PoolSettings,
        map: &'a PoolMap,
    ) -> BoxFuture<'a, Result<(), String>> {
        Box::pin(self.make_in(settings, map))
    }

    fn retire(&self, group: GroupNumber) -> BoxFuture<'_, Result<(), String>> {
        // First that it was made: if this is interrupted, opening it notes that again.
        let retired = self.change_made(|made| made.remove(&group.number())).and_then(|()| {
            let retired = self.retire_now(group);
            retired.map_err(|error| format!("{}: {error}", self.dir.display()))
        });
        let all = directories(&self.dir).map_or(0, |all| all.len());
        self.sharers.store(all, Ordering::Relaxed);
        Box::pin(async { retired })
    }

    fn keep(&self, first: &PoolMap) -> Result<(), String> {
        if !self.is_there() {
            return Err(self.unmounted());
        }
        self.keep_now(first).map_err(|error| format!("{}: {error}", self.dir.display()))
    }
}
