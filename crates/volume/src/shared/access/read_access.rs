//! The read keys of a mount: fetching those of new epochs.
//!
//! What is written after a member was shut out must not be sealed with a key that the member has. So a
//! writer reads the record of the readers anew when it was read more than [`KEY_AGE`] ago. If it cannot be
//! read, the key that is known serves for [`KEY_LIMIT`].

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_dht::Blocks;
use atoll_env::{Env, Instant};
use atoll_key::kinds::certified::CertifiedBlock;
use atoll_key::{ReadKey, SecretKey, VolumeId};

use super::readers::read_readers;
use super::volume_record::VolumeRecord;
use crate::shared::sealing::{Sealer, Sealing};

/// How old the knowledge of the newest epoch may be with which something is sealed. A guess: a block is
/// read once in so long.
pub const KEY_AGE: Duration = Duration::from_secs(5);
/// The same while the record of the readers cannot be read. A guess: longer than most failures.
pub const KEY_LIMIT: Duration = Duration::from_secs(600);
/// How long a reader who has asked for a key in vain does not ask again. A guess.
const LOOK_AGAIN: Duration = Duration::from_secs(2);

/// Why a user cannot read an encrypted volume, or not write it now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotReader {
    /// The user has no key here.
    NoKey,
    /// The user is not among the readers.
    NotListed,
    /// The record of the readers cannot be read, or is not what it should be.
    Unknown {
        /// Why, for people.
        told: String,
    },
}

impl fmt::Display for NotReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NotReader::NoKey => {
                f.write_str("the volume is encrypted, and there is no key of a user on this node")
            }
            NotReader::NotListed => {
                f.write_str("the volume is encrypted, and you are not among its readers")
            }
            NotReader::Unknown { told } => {
                write!(f, "the record of the volume's readers cannot be read: {told}")
            }
        }
    }
}

impl std::error::Error for NotReader {}

/// See the module. Calls may run at the same time.
pub struct ReadAccess {
    env: Env,
    blocks: Arc<dyn Blocks>,
    volume: VolumeId,
    user: Option<SecretKey>,
    sealing: Sealing,
    /// Held while the record is read.
    turn: futures_util::lock::Mutex<()>,
    looks: Mutex<Looks>,
}

/// What looks at the record of the readers gave.
struct Looks {
    /// When the last one began.
    tried: Instant,
    /// When the last one began that could read it.
    read: Instant,
    /// Whether the user was not among the readers then.
    is_refused: bool,
    /// When a key was looked for that was not there.
    in_vain: Option<Instant>,
}

impl ReadAccess {
    /// What `user` can read of the volume that has this record. The owner of an encrypted volume is a user
    /// like others.
    ///
    /// # Errors
    /// If the volume is encrypted, and the user is not among its readers.
    pub async fn new(
        env: Env,
        blocks: Arc<dyn Blocks>,
        (volume, record): (VolumeId, &VolumeRecord),
        user: Option<SecretKey>,
    ) -> Result<ReadAccess, NotReader> {
        let now = env.now();
        let sealing = match (record.is_encrypted, &user) {
            (false, _) => Sealing::none(),
            (true, None) => return Err(NotReader::NoKey),
            (true, Some(user)) => {
                let (epoch, key) = read_key(&blocks, volume, user).await?;
                // The readers get a key before the record names its epoch.
                if epoch < record.group_epoch {
                    let told = format!("epoch {epoch} in place of {}", record.group_epoch);
                    return Err(NotReader::Unknown { told });
                }
                Sealing::of_reader(volume, epoch, key)
            }
        };
        let looks = Mutex::new(Looks { tried: now, read: now, is_refused: false, in_vain: None });
        let turn = futures_util::lock::Mutex::new(());
        Ok(ReadAccess { env, blocks, volume, user, sealing, turn, looks })
    }

    /// What opens the volume's blocks.
    pub fn sealing(&self) -> &Sealing {
        &self.sealing
    }

    /// What seals something that is written now.
    ///
    /// # Errors
    /// If the user is not a reader any more, or that cannot be said.
    pub async fn sealer(&self) -> Result<Sealer, NotReader> {
        if !self.sealing.is_encrypted() {
            return Ok(self.sealing.sealer());
        }
        let looked = self.look_unless_within(KEY_AGE).await;
        let looks = self.looks();
        if looks.is_refused {
            return Err(NotReader::NotListed);
        }
        match looked {
            Err(error) if self.env.now().since(looks.read) >= KEY_LIMIT => Err(error),
            _ => Ok(self.sealing.sealer()),
        }
    }

    /// Fetches the key of an inode's newest version, if there is one for this user.
    pub async fn prepare(&self, block: &CertifiedBlock) {
        let _turn = match self.sealing.lacks_key_of(block) {
            true => self.turn.lock().await,
            false => return,
        };
        let began = self.env.now();
        let is_in_vain = |at: Instant| began.since(at) < LOOK_AGAIN;
        // Another call may have fetched it meanwhile.
        if !self.sealing.lacks_key_of(block) || self.looks().in_vain.is_some_and(is_in_vain) {
            return;
        }
        // Why the version cannot be read is said by whoever opens it.
        let _ = self.look().await;
        self.looks().in_vain = self.sealing.lacks_key_of(block).then_some(began);
    }

    /// Reads the record of the readers, unless that was tried within `age`.
    async fn look_unless_within(&self, age: Duration) -> Result<(), NotReader> {
        let _turn = self.turn.lock().await;
        {
            let looks = self.looks();
            if self.env.now().since(looks.tried) < age {
                let told = || "it could not be read just now".to_owned();
                return match looks.read == looks.tried {
                    true => Ok(()),
                    false => Err(NotReader::Unknown { told: told() }),
                };
            }
        }
        self.look().await
    }

    /// Reads the record of the readers. The caller has the turn.
    async fn look(&self) -> Result<(), NotReader> {
        let user = self.user.as_ref().ok_or(NotReader::NoKey)?;
        let now = self.env.now();
        self.looks().tried = now;
        let found = read_key(&self.blocks, self.volume, user).await;
        if matches!(found, Ok(_) | Err(NotReader::NotListed)) {
            let mut looks = self.looks();
            looks.read = now;
            looks.is_refused = found.is_err();
        }
        let (epoch, key) = found?;
        self.sealing.learn(epoch, key);
        Ok(())
    }

    fn looks(&self) -> MutexGuard<'_, Looks> {
        self.looks.lock().expect("no holder of this lock panics")
    }
}

/// The newest epoch and its key, as the ring has it for this user.
async fn read_key(
    blocks: &Arc<dyn Blocks>,
    volume: VolumeId,
    user: &SecretKey,
) -> Result<(u32, ReadKey), NotReader> {
    let unknown = |told: String| NotReader::Unknown { told };
    let found = read_readers(blocks, volume).await.map_err(|error| unknown(error.to_string()))?;
    let record = found.ok_or_else(|| unknown("it is not on the ring".to_owned()))?;
    let key = record.key_of(user, &volume).ok_or(NotReader::NotListed)?;
    Ok((record.epoch, key))
}

impl fmt::Debug for ReadAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadAccess").field("sealing", &self.sealing).finish_non_exhaustive()
    }
}
