//! The user's groups for commands.

use atoll_env::Env;
use atoll_upkeep::own_group::GroupError;
pub(crate) use atoll_upkeep::own_group::{MAX_NAME_BYTES, OwnGroup, path_group};

use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::shared_volume;
use crate::user;

/// The group of this name, whether or not it was made; the user's key is made if there is none.
pub(crate) fn open(name: &str, env: &Env, global: &Global) -> Result<OwnGroup, Failure> {
    let dir = user::directory(global)?;
    Ok(OwnGroup::of(&dir, &user::key_or_new(&dir, env)?, name)?)
}

/// The failure to show for `error`.
pub(crate) fn failure(what: &str, error: GroupError) -> Failure {
    match error {
        GroupError::User(error) => error.into(),
        GroupError::Access(error) => shared_volume::failure(what, error),
        GroupError::NoEpoch => Failure::new(Exit::Failed, what).because(error),
    }
}
