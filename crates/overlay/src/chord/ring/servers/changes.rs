//! The consequences of changes of the tables: nudges to other nodes, and rounds of this one.

use atoll_env::Instant;

use super::Servers;
use crate::Node;

/// The nodes that recent changes concern.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct News {
    /// Whether any neighbourhood changed.
    pub changed: bool,
    /// Virtual servers, by index, and the other nodes that each should nudge.
    pub nudges: Vec<(u16, Node)>,
    /// Virtual servers that should stabilise before the next period.
    pub to_stabilize: Vec<u16>,
    /// Whether a virtual server has just become its own successor.
    pub alone: bool,
}

impl Servers {
    /// Numbers the changes since it was last called and says which nodes they concern.
    pub fn settle(&mut self, now: Instant) -> News {
        let mut news = News::default();
        let me = self.peer.id;
        for index in 0..self.count() {
            let server = &mut self.servers[usize::from(index)];
            let state = &mut server.state;
            if state.epoch() == server.published_epoch {
                continue;
            }
            news.changed = true;
            self.epoch += 1;
            // A list that was rebuilt in this change still is the successor's.
            if let Some((_, _, own)) = &mut server.seen
                && *own == state.epoch()
            {
                *own = self.epoch;
            }
            state.set_epoch(self.epoch);
            server.published_epoch = self.epoch;
            let told = state.told();
            let before = std::mem::replace(&mut server.published, told);
            let (told, joined) = (&server.published, state.joined());
            if told.predecessor != before.predecessor {
                server.predecessor_heard = now;
                // It has to learn of the node between it and this one.
                let admission = &self.admission;
                let lives = |node: &Node| !admission.is_suspected(node, now);
                news.nudges.extend(before.predecessor.filter(lives).map(|n| (index, n)));
            }
            if told.successors != before.successors {
                news.nudges.extend(told.predecessor.map(|node| (index, node)));
            }
            if told.successors.first() != before.successors.first() {
                news.to_stabilize.push(index);
                news.alone |= joined && told.successors.is_empty();
            }
        }
        news.nudges.sort_unstable();
        news.nudges.dedup();
        // A nudge to oneself takes no call.
        let own = |node: &Node| node.peer.id == me;
        let count = self.count();
        let woken = news.nudges.iter().filter(|(_, n)| own(n)).map(|(_, n)| n.virtual_server.index);
        news.to_stabilize.extend(woken.filter(|index| *index < count));
        news.nudges.retain(|(_, node)| !own(node));
        news
    }
}
