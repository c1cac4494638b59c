//! What a machine without files keeps of a pool, in the node's own directory: its votes ([`atoll_pool::WitnessSeat`]), and who the members are.
//!
//! ```text
//! DIR/pools/NAME.votes/incarnation  16 hexadecimal digits and a line's end: random bits, drawn when this was made
//! DIR/pools/NAME.votes/map          the newest map of the first group that is known
//! DIR/pools/NAME.votes/N/           votes in group N, and the newest map of it
//! ```

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use atoll_env::{BoxFuture, Env};
use atoll_pool::disk::directory::Directory;
use atoll_pool::{GroupNumber, MachineDisks, PoolMap, PoolSettings, VoteDirectories};

const INCARNATION: &str = "incarnation";
const MAP: &str = "map";

/// Where a node keeps its votes in a pool that it calls `name`.
#[must_use]
pub fn votes_path(node: &Path, name: &str) -> PathBuf {
    node.join("pools").join(format!("{name}.votes"))
}

/// See the module.
pub(super) struct PoolVotes {
    env: Env,
    dir: PathBuf,
}

impl PoolVotes {
    pub(super) fn new(env: Env, dir: &Path) -> PoolVotes {
        PoolVotes { env, dir: dir.to_owned() }
    }

    /// The newest map of the first group that is kept.
    ///
    /// # Errors
    /// Why it cannot be read, for people.
    pub(super) fn kept(&self) -> Result<Option<PoolMap>, String> {
        let path = self.dir.join(MAP);
        match fs::read_to_string(&path) {
            Ok(text) => {
                let map = PoolMap::from_text(&text);
                map.map(Some).ok_or_else(|| format!("{} is damaged", path.display()))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(format!("{}: {error}", path.display())),
        }
    }

    /// The incarnation of what is there; draws one where nothing is.
    ///
    /// # Errors
    /// Why it can be neither read nor made, for people.
    pub(super) fn begin(&self) -> Result<u64, String> {
        fs::create_dir_all(&self.dir).map_err(|error| self.failed(&error))?;
        if !self.dir.join(INCARNATION).exists() {
            self.renew()?;
        }
        self.incarnation()
    }

    fn failed(&self, error: &io::Error) -> String {
        format!("{}: {error}", self.dir.display())
    }

    fn write(&self, name: &str, text: &str) -> io::Result<()> {
        let beside = self.dir.join(format!("{name}.new"));
        fs::write(&beside, text)?;
        fs::File::open(&beside)?.sync_all()?;
        fs::rename(&beside, self.dir.join(name))?;
        fs::File::open(&self.dir)?.sync_all()
    }

    fn discard_all(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                fs::remove_dir_all(entry.path())?;
            }
        }
        fs::File::open(&self.dir)?.sync_all()
    }

    fn open_in(&self, group: GroupNumber) -> io::Result<Directory> {
        let dir = self.dir.join(group.to_string());
        fs::create_dir_all(&dir)?;
        fs::File::open(&self.dir)?.sync_all()?;
        Directory::open(&dir)
    }
}

impl VoteDirectories<Directory> for PoolVotes {
    fn incarnation(&self) -> Result<u64, String> {
        let path = self.dir.join(INCARNATION);
        let text = fs::read_to_string(&path).map_err(|error| self.failed(&error))?;
        let bits = text.strip_suffix('\n').filter(|text| text.len() == 16);
        let bits = bits.and_then(|text| u64::from_str_radix(text, 16).ok());
        bits.ok_or_else(|| format!("{} is damaged", path.display()))
    }

    fn open(&self, group: GroupNumber) -> Result<Directory, String> {
        self.open_in(group).map_err(|error| self.failed(&error))
    }

    fn discard(&self, group: GroupNumber) -> Result<(), String> {
        let discarded = match fs::remove_dir_all(self.dir.join(group.to_string())) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            discarded => discarded,
        };
        let synced = discarded.and_then(|()| fs::File::open(&self.dir)?.sync_all());
        synced.map_err(|error| self.failed(&error))
    }

    fn renew(&self) -> Result<(), String> {
        let drawn = format!("{:016x}\n", self.env.random_u64());
        // In this order: votes that a crash leaves there are of no incarnation that is listed.
        let renewed = self.write(INCARNATION, &drawn).and_then(|()| self.discard_all());
        renewed.map_err(|error| self.failed(&error))
    }
}

impl MachineDisks<Directory> for PoolVotes {
    fn open(&self, _: GroupNumber) -> BoxFuture<'_, Result<Option<Directory>, String>> {
        Box::pin(async { Ok(None) })
    }

    fn make<'a>(&'a self, _: PoolSettings, _: &'a PoolMap) -> BoxFuture<'a, Result<(), String>> {
        Box::pin(async { Err("this machine has no files of the pool".to_owned()) })
    }

    fn retire(&self, _: GroupNumber) -> BoxFuture<'_, Result<(), String>> {
        Box::pin(async { Ok(()) })
    }

    fn keep(&self, first: &PoolMap) -> Result<(), String> {
        self.write(MAP, &first.to_text()).map_err(|error| self.failed(&error))
    }

    fn votes(&self) -> Option<&dyn VoteDirectories<Directory>> {
        Some(self)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use atoll_env::TokioRuntime;

    use super::*;

    #[tokio::test]
    async fn what_is_made_again_is_of_another_incarnation_and_has_no_votes() {
        let temp = tempfile::tempdir().unwrap();
        let dir = votes_path(temp.path(), "home");
        let votes = PoolVotes::new(Arc::new(TokioRuntime::current()), &dir);
        assert!(votes.kept().unwrap().is_none());
        let first = votes.begin().unwrap();
        assert_eq!(votes.begin(), Ok(first), "it is kept");
        VoteDirectories::open(&votes, GroupNumber::FIRST).unwrap();
        assert!(dir.join("0").is_dir());
        let second = GroupNumber::new(1).unwrap();
        VoteDirectories::open(&votes, second).unwrap();
        votes.discard(second).unwrap();
        votes.discard(second).unwrap();
        assert!(dir.join("0").is_dir() && !dir.join("1").exists());
        votes.renew().unwrap();
        assert_ne!(votes.begin(), Ok(first));
        assert!(!dir.join("0").exists());
        fs::write(dir.join(INCARNATION), "12\n").unwrap();
        assert!(votes.begin().unwrap_err().contains("damaged"));
        fs::remove_dir_all(&dir).unwrap();
        assert_ne!(votes.begin().unwrap(), first);
    }
}
