//! Saying what a command waits for: after two seconds that it waits for the ring, after ten which
//! nodes stand in the way and what to do about it, as the local node sees it.

use std::time::{Duration, Instant};

use atoll_node::Status;

use crate::connection;
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::messages::note;
use crate::output;
use crate::units;

/// When it is said that a command waits.
const TELL_AFTER: Duration = Duration::from_secs(2);
/// When it is said why, and how often again if that has changed.
const EXPLAIN_AFTER: Duration = Duration::from_secs(10);
/// How long the node may take to say why.
const STATUS_LIMIT: Duration = Duration::from_secs(2);

/// Does `work`, which `what` names (e.g. "store the volume work"), and says on standard error why it
/// takes long. A failure that came after a long wait says so too.
pub(crate) async fn told<T>(
    global: &Global,
    what: &str,
    work: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    let began = Instant::now();
    let mut notices = Box::pin(notices(global, what, began));
    let result = tokio::select! {
        biased;
        result = work => result,
        never = &mut notices => never,
    };
    match result {
        Err(failure) if failure.exit == Exit::Unavailable && began.elapsed() >= TELL_AFTER => {
            Err(failure.also(&reasons(global).await))
        }
        result => result,
    }
}

/// Says what is waited for, for ever.
async fn notices<T>(global: &Global, what: &str, began: Instant) -> T {
    tokio::time::sleep(TELL_AFTER).await;
    say(global, &format!("waiting for the ring to {what}"));
    tokio::time::sleep(EXPLAIN_AFTER - TELL_AFTER).await;
    let mut said = Vec::new();
    loop {
        let why = reasons(global).await;
        if why != said {
            let waited = units::duration(Duration::from_secs(began.elapsed().as_secs()));
            say(global, &format!("still waiting for the ring to {what} ({waited}):"));
            why.iter().for_each(|reason| say(global, &format!("  {reason}")));
            said = why;
        }
        tokio::time::sleep(EXPLAIN_AFTER).await;
    }
}

fn say(global: &Global, text: &str) {
    if !global.quiet {
        note!("{}", output::safe_message(text));
    }
}

/// What the local node knows that may keep the ring from answering.
async fn reasons(global: &Global) -> Vec<String> {
    match tokio::time::timeout(STATUS_LIMIT, connection::status(global)).await {
        Ok(Ok(status)) => reasons_of(&status),
        Ok(Err(failure)) => vec![failure.to_string()],
        Err(_) => vec!["the local node does not answer: is the machine overloaded?".into()],
    }
}

fn reasons_of(status: &Status) -> Vec<String> {
    let mut reasons = status.health_reasons.clone();
    for warning in &status.warnings {
        if !reasons.contains(warning) {
            reasons.push(warning.clone());
        }
    }
    if !status.away.is_empty() {
        reasons.push(
            "if the nodes that are away are gone for good, `atoll settings --forget-absent` lets \
             writes go on without them"
                .into(),
        );
    }
    if reasons.is_empty() {
        reasons.push(
            "this node sees nothing wrong: another node may be slow; see `atoll status --watch`"
                .into(),
        );
    }
    reasons
}

#[cfg(test)]
mod tests {
    use super::*;
    use atoll_node::AwayNode;

    #[test]
    fn what_stands_in_the_way_is_said_once_with_what_to_do() {
        let why = reasons_of(&Status::default());
        assert!(why.len() == 1 && why[0].contains("nothing wrong"), "{why:?}");
        let status = Status {
            health_reasons: vec!["away is bb at 10.0.0.1:9".into()],
            warnings: vec!["away is bb at 10.0.0.1:9".into(), "the clock is ahead".into()],
            away: vec![AwayNode::default()],
            ..Status::default()
        };
        let why = reasons_of(&status);
        assert_eq!(why[..2], ["away is bb at 10.0.0.1:9", "the clock is ahead"]);
        assert!(why.len() == 3 && why[2].contains("--forget-absent"), "{why:?}");
    }
}
