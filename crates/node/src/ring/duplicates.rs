//! Copies of the node's directory that run elsewhere, for people and for later starts.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use atoll_env::{Env, Instant, sleep};
use atoll_overlay::chord::{Chord, Duplicate};

use crate::settings::SettingsStore;

/// How long `status` warns of a copy.
const SHOWN_FOR: Duration = Duration::from_secs(3600);
/// How often a copy is looked for that the log does not say yet.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Remembers where a process with the node's key is told to be, for the next start. Waits for the disk.
pub(crate) fn remember_address(settings: &SettingsStore, told: SocketAddr) {
    let remembered = settings.change(|settings| {
        settings.set_told_address(told);
        Ok(())
    });
    if let Err(error) = remembered {
        tracing::warn!("cannot remember this node's address: {error}");
    }
}

/// The warning of the process that goes on.
pub(super) fn warning(duplicate: Option<Duplicate>, now: Instant) -> Option<String> {
    let found = duplicate.filter(|d| !d.prevails && now.since(d.found) < SHOWN_FOR)?;
    Some(format!(
        "a copy of this node's directory was started at {}, {} min ago; it was told to end, since both would \
         count as one node: run a second node there in a directory of its own",
        found.addr,
        now.since(found.found).as_secs() / 60
    ))
}

/// Writes to the log what `status` says of a copy, once for each that is found.
pub(super) async fn watch(env: Env, chord: Arc<Chord>) {
    let mut said = None;
    loop {
        let duplicate = chord.duplicate();
        if duplicate != said {
            warning(duplicate, env.now()).into_iter().for_each(|text| tracing::warn!("{text}"));
            said = duplicate;
        }
        sleep(&*env, LOOK_EVERY).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_that_goes_on_warns_of_the_other_for_an_hour() {
        let found = Instant(5_000_000_000);
        let addr = SocketAddr::from(([10, 0, 0, 7], 7543));
        let duplicate = |prevails| Some(Duplicate { addr, found, prevails });
        let later = |secs| found + Duration::from_secs(secs);
        let said = warning(duplicate(false), later(150)).expect("a warning");
        assert!(said.contains("10.0.0.7:7543, 2 min ago"), "{said}");
        assert_eq!(warning(duplicate(false), later(3600)), None);
        assert_eq!(warning(duplicate(true), later(0)), None);
        assert_eq!(warning(None, later(0)), None);
    }
}
