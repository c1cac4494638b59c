//! The node's settings: what later starts take over, and what can be changed while it runs.
//!
//! [`SettingsStore`] is the only one that reads, checks, writes and watches them. A change is
//! checked first, then on disk, then visible, then told to the parts of the node that follow it.
//! A change that fails leaves the settings as they were.

use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard};

use atoll_dht::{QuotaConfig, Share};
use atoll_overlay::MAX_VIRTUAL_SERVERS;
use minicbor::{Decode, Encode};

use crate::config::{
    DEFAULT_CACHE_BYTES, DEFAULT_LISTEN, DEFAULT_STORAGE_BYTES, MIN_STORAGE_BYTES, NodeConfig,
    StartError, VirtualServers,
};
use crate::control::message::ChangeQuota;
use crate::dir::{self, DirError, NodeDir};
use crate::memory;
use crate::policy::{Place, Policy};

/// Called with the settings after each change. It must not change them itself.
type Watcher = Box<dyn Fn(&Settings) + Send + Sync>;

/// The settings of a running node and their file.
pub(crate) struct SettingsStore {
    dir: NodeDir,
    present: Mutex<Settings>,
    /// What the file holds. Held during a change: the file and the watchers see changes in order.
    written: Mutex<Settings>,
    watchers: Mutex<Vec<Watcher>>,
}

impl SettingsStore {
    /// Reads the settings in `dir` and applies `config` to them. Nothing is written before the
    /// first [`SettingsStore::change`].
    ///
    /// # Errors
    /// If the file is damaged, or `config` makes no sense.
    pub(crate) fn open(dir: &NodeDir, config: &NodeConfig) -> Result<SettingsStore, StartError> {
        let written = Settings::load(dir)?;
        let mut present = written.clone();
        present.apply(config)?;
        Ok(SettingsStore {
            dir: dir.clone(),
            present: Mutex::new(present),
            written: Mutex::new(written),
            watchers: Mutex::default(),
        })
    }

    /// The settings that hold now.
    pub(crate) fn present(&self) -> Settings {
        self.lock().clone()
    }

    /// Changes the settings; they are on disk when this returns. Waits for the disk, unless
    /// nothing differs from the file: a node on a full disk can start.
    ///
    /// # Errors
    /// Why `change` refuses, or why the file cannot be written, for people.
    pub(crate) fn change(
        &self,
        change: impl FnOnce(&mut Settings) -> Result<(), String>,
    ) -> Result<(), String> {
        let mut written = self.written.lock().expect("no holder of this lock panics");
        let mut settings = self.present();
        change(&mut settings)?;
        if *written != settings {
            settings.write(&self.dir).map_err(|error| error.to_string())?;
            *written = settings.clone();
        }
        *self.lock() = settings.clone();
        let watchers = self.watchers.lock().expect("no holder of this lock panics");
        watchers.iter().for_each(|watcher| watcher(&settings));
        Ok(())
    }

    /// Calls `watcher` after each later change.
    pub(crate) fn watch(&self, watcher: impl Fn(&Settings) + Send + Sync + 'static) {
        let mut watchers = self.watchers.lock().expect("no holder of this lock panics");
        watchers.push(Box::new(watcher));
    }

    fn lock(&self) -> MutexGuard<'_, Settings> {
        self.present.lock().expect("no holder of this lock panics")
    }
}

/// The file `settings.cbor`: what later starts take over.
///
/// CBOR map: 0 listen, 1 advertise (both text), 2 storage in bytes, 3 whether the node
/// has ever had a place on the ring, 4 virtual servers (0 for `auto`), 5 cache in bytes,
/// 6 quotas, 7 how disk is given (absent: by the fixed size of 2), both as in the control
/// protocol, 8 where blocks are still to be moved from: `[0, []]` the log, `[1, [path]]` a
/// directory of files, 9 the address that others were told last (text).
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct Settings {
    #[n(0)]
    listen: Option<String>,
    #[n(1)]
    advertise: Option<String>,
    #[n(2)]
    storage_bytes: Option<u64>,
    #[n(3)]
    has_joined: Option<bool>,
    #[n(4)]
    virtual_servers: Option<u16>,
    #[n(5)]
    cache_bytes: Option<u64>,
    #[n(6)]
    quota: Option<ChangeQuota>,
    #[n(7)]
    policy: Option<Policy>,
    #[n(8)]
    former: Option<Place>,
    #[n(9)]
    told: Option<String>,
}

impl Settings {
    fn load(dir: &NodeDir) -> Result<Settings, DirError> {
        let path = dir.settings();
        let Some(bytes) = dir::read_small(&path)? else { return Ok(Settings::default()) };
        let settings: Settings =
            minicbor::decode(&bytes).map_err(|error| DirError::damaged(&path, error))?;
        let addresses = [&settings.listen, &settings.advertise, &settings.told];
        for text in addresses.into_iter().flatten() {
            text.parse::<SocketAddr>().map_err(|error| DirError::damaged(&path, error))?;
        }
        Ok(settings)
    }

    fn write(&self, dir: &NodeDir) -> Result<(), DirError> {
        let bytes = minicbor::to_vec(self).expect("a vector takes all that is written");
        dir::write_atomically(&dir.settings(), &bytes)
    }

    /// What the configuration says, else what is remembered, else the defaults.
    fn apply(&mut self, config: &NodeConfig) -> Result<(), StartError> {
        if let Some(listen) = config.listen {
            self.listen = Some(listen.to_string());
        }
        if let Some(advertise) = config.advertise {
            if advertise.ip().is_unspecified() || advertise.port() == 0 {
                return Err(StartError::Config(format!(
                    "{advertise} is no address others could connect to"
                )));
            }
            self.advertise = Some(advertise.to_string());
        }
        if let Some(bytes) = config.storage_bytes {
            if bytes < MIN_STORAGE_BYTES {
                return Err(StartError::Config(format!(
                    "{bytes} bytes of storage are too few; give at least {} MiB",
                    MIN_STORAGE_BYTES >> 20
                )));
            }
            self.storage_bytes = Some(bytes);
        }
        if let Some(virtual_servers) = config.virtual_servers {
            self.set_virtual_servers(virtual_servers).map_err(StartError::Config)?;
        }
        if let Some(bytes) = config.cache_bytes {
            self.set_cache_bytes(bytes).map_err(StartError::Config)?;
        }
        Ok(())
    }

    pub(crate) fn virtual_servers(&self) -> VirtualServers {
        match self.virtual_servers {
            None | Some(0) => VirtualServers::Auto,
            Some(count) => VirtualServers::Count(count.min(MAX_VIRTUAL_SERVERS)),
        }
    }

    pub(crate) fn set_virtual_servers(&mut self, wanted: VirtualServers) -> Result<(), String> {
        self.virtual_servers = Some(match wanted {
            VirtualServers::Auto => 0,
            VirtualServers::Count(count @ 1..=MAX_VIRTUAL_SERVERS) => count,
            VirtualServers::Count(count) => {
                return Err(format!("a node cannot have {count} virtual servers"));
            }
        });
        Ok(())
    }

    pub(crate) fn cache_bytes(&self) -> u64 {
        self.cache_bytes.unwrap_or(DEFAULT_CACHE_BYTES)
    }

    pub(crate) fn set_cache_bytes(&mut self, bytes: u64) -> Result<(), String> {
        check_cache(bytes)?;
        self.cache_bytes = Some(bytes);
        Ok(())
    }

    /// How much publishers may use of this node.
    pub(crate) fn quota(&self) -> QuotaConfig {
        let set = self.quota.unwrap_or_default();
        let share = |millionths: Option<u32>| {
            millionths.filter(|share| *share > 0).map(Share::from_millionths)
        };
        let default = QuotaConfig::default();
        QuotaConfig {
            key_share: share(set.key_share),
            address_share: share(set.address_share),
            publisher_nodes: set.publisher_nodes.unwrap_or(default.publisher_nodes),
            floor_share: set.floor_share.map_or(default.floor_share, Share::from_millionths),
            ..default
        }
    }

    pub(crate) fn change_quota(&mut self, change: ChangeQuota) -> Result<(), String> {
        if change.publisher_nodes == Some(0) {
            return Err("a publisher may use at least one node's worth of storage".into());
        }
        let before = self.quota.unwrap_or_default();
        self.quota = Some(ChangeQuota {
            key_share: change.key_share.or(before.key_share),
            address_share: change.address_share.or(before.address_share),
            publisher_nodes: change.publisher_nodes.or(before.publisher_nodes),
            floor_share: change.floor_share.or(before.floor_share),
        });
        Ok(())
    }

    pub(crate) fn listen(&self) -> SocketAddr {
        self.listen
            .as_ref()
            .map_or(DEFAULT_LISTEN, |text| text.parse().expect("checked when it was loaded"))
    }

    /// Remembers the port that was in fact taken.
    pub(crate) fn set_listen(&mut self, bound: SocketAddr) {
        self.listen = Some(bound.to_string());
    }

    pub(crate) fn advertise(&self) -> Option<SocketAddr> {
        self.advertise.as_ref().map(|text| text.parse().expect("checked when it was loaded"))
    }

    /// The address that others were told last: another process may use a copy of the directory there.
    pub(crate) fn told_address(&self) -> Option<SocketAddr> {
        self.told.as_ref().map(|text| text.parse().expect("checked when it was loaded"))
    }

    pub(crate) fn set_told_address(&mut self, told: SocketAddr) {
        self.told = Some(told.to_string());
    }

    pub(crate) fn storage_bytes(&self) -> u64 {
        self.storage_bytes.unwrap_or(DEFAULT_STORAGE_BYTES)
    }

    /// How disk is given.
    pub(crate) fn policy(&self) -> Policy {
        match &self.policy {
            Some(policy) => policy.clone(),
            None => Policy::Fixed { size_bytes: self.storage_bytes() },
        }
    }

    pub(crate) fn set_policy(&mut self, policy: &Policy) {
        self.policy = match policy {
            Policy::Fixed { size_bytes } => {
                self.storage_bytes = Some(*size_bytes);
                None
            }
            other => Some(other.clone()),
        };
    }

    /// Where blocks are still to be moved from.
    pub(crate) fn former(&self) -> Option<Place> {
        self.former.clone()
    }

    pub(crate) fn set_former(&mut self, former: Option<Place>) {
        self.former = former;
    }

    pub(crate) fn has_joined(&self) -> bool {
        self.has_joined.unwrap_or(false)
    }

    pub(crate) fn set_joined(&mut self) {
        self.has_joined = Some(true);
    }
}

/// Refuses a cache that is larger than the machine's memory.
fn check_cache(bytes: u64) -> Result<(), String> {
    match memory::total_bytes() {
        Some(total) if bytes > total => Err(format!(
            "a cache of {} does not fit the {} of memory of this machine",
            gib(bytes),
            gib(total)
        )),
        _ => Ok(()),
    }
}

/// In GiB, which memory is thought of in.
fn gib(bytes: u64) -> String {
    format!("{:.0} GiB", (bytes as f64 / f64::from(1 << 30)).ceil())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    fn open(config: &NodeConfig) -> Result<SettingsStore, StartError> {
        SettingsStore::open(&NodeDir::at(&config.dir), config)
    }

    #[test]
    fn what_is_not_said_is_remembered_from_the_last_start() {
        let temp = tempfile::tempdir().expect("temp");
        let unsaid = NodeConfig::new(temp.path());
        let fresh = open(&unsaid).expect("nothing said").present();
        assert_eq!(
            (fresh.listen(), fresh.storage_bytes()),
            (DEFAULT_LISTEN, DEFAULT_STORAGE_BYTES)
        );
        let listen: SocketAddr = "127.0.0.1:4000".parse().expect("address");
        let said =
            NodeConfig { listen: Some(listen), storage_bytes: Some(1 << 30), ..unsaid.clone() };
        open(&said).expect("sensible").change(|_| Ok(())).expect("written");
        let second = open(&unsaid).expect("nothing said").present();
        assert_eq!((second.listen(), second.storage_bytes()), (listen, 1 << 30));
    }

    #[test]
    fn senseless_settings_are_refused() {
        let temp = tempfile::tempdir().expect("temp");
        let refused = |config: NodeConfig| match open(&config) {
            Err(StartError::Config(why)) => why,
            _ => panic!("{config:?} is taken"),
        };
        let unsaid = || NodeConfig::new(temp.path());
        refused(NodeConfig { advertise: "0.0.0.0:5".parse().ok(), ..unsaid() });
        refused(NodeConfig { storage_bytes: Some(5), ..unsaid() });
        let why = refused(NodeConfig { cache_bytes: Some(100 << 50), ..unsaid() });
        assert!(why.starts_with("a cache of 104857600 GiB does not fit the "), "{why}");
    }

    #[test]
    fn a_change_is_on_disk_before_watchers_hear_of_it_and_a_refused_one_changes_nothing() {
        let temp = tempfile::tempdir().expect("temp");
        let config = NodeConfig::new(temp.path());
        let settings = open(&config).expect("nothing said");
        let heard = Arc::new(AtomicU64::new(0));
        let (told, dir) = (heard.clone(), NodeDir::at(temp.path()));
        settings.watch(move |settings| {
            assert_eq!(Settings::load(&dir).expect("written"), *settings);
            told.store(settings.cache_bytes(), Ordering::Relaxed);
        });
        settings.change(|settings| settings.set_cache_bytes(7)).expect("written");
        assert_eq!(heard.load(Ordering::Relaxed), 7);
        let refused = settings.change(|settings| {
            settings.set_cache_bytes(8)?;
            settings.set_virtual_servers(VirtualServers::Count(0))
        });
        assert_eq!(refused, Err("a node cannot have 0 virtual servers".into()));
        assert_eq!((settings.present().cache_bytes(), heard.load(Ordering::Relaxed)), (7, 7));
        assert_eq!(open(&config).expect("reopened").present().cache_bytes(), 7);
    }

    #[test]
    fn a_damaged_file_is_told() {
        let temp = tempfile::tempdir().expect("temp");
        let dir = NodeDir::at(temp.path());
        let settings = Settings { listen: Some("nonsense".into()), ..Settings::default() };
        settings.write(&dir).expect("written");
        let config = NodeConfig::new(temp.path());
        assert!(matches!(open(&config), Err(StartError::Dir(DirError::Damaged { .. }))));
    }
}
