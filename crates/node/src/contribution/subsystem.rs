//! The contribution as a subsystem: its control calls, and what a person sees of it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use atoll_dht::Share;
use atoll_env::BoxFuture;
use atoll_store::{Backend, Space};

use super::controller::{AWAY_ADVICE, ContributionController, is_away};
use crate::config::StartError;
use crate::control::body::Json;
use crate::control::calls::{AbandonFormer, SetContribution, ShowContribution};
use crate::control::message::Empty;
use crate::control::server::Calls;
use crate::policy::{Place, Policy};
use crate::status::{ContributionStatus, Moving, Status};
use crate::subsystem::Subsystem;

impl Subsystem for ContributionController {
    fn control_calls(self: Arc<Self>, calls: &mut Calls) {
        let controller = self.clone();
        calls.on_blocking::<ShowContribution>(move |Empty {}| Ok(Json(controller.status())));
        let controller = self.clone();
        calls.on_blocking::<SetContribution>(move |call| {
            controller.change(&call.policy)?;
            controller.ring.follow_settings();
            Ok(Json(controller.status()))
        });
        calls.on_blocking::<AbandonFormer>(move |Empty {}| {
            self.abandon_former()?;
            Ok(Json(self.status()))
        });
    }

    fn start(self: Arc<Self>) -> BoxFuture<'static, Result<(), StartError>> {
        let env = self.env.clone();
        env.spawn(Box::pin(self.run()));
        Box::pin(async { Ok(()) })
    }

    fn report(&self, status: &mut Status) {
        let contribution = self.status();
        let nearly_full_bytes = contribution.offered_bytes / 20 * 19;
        // Only a fixed size can be enlarged: elsewhere a full store is as it should be.
        if contribution.size_bytes.is_some() && contribution.used_bytes > nearly_full_bytes {
            let advice =
                "the store is nearly full; give it more with `atoll contribute fixed SIZE`";
            status.warnings.push(advice.into());
        }
        status.warnings.extend(contribution.warnings);
    }
}

impl ContributionController {
    /// How disk is given, for people and programs. Looks at the disk.
    pub(crate) fn status(&self) -> ContributionStatus {
        let policy = self.policy();
        let present = self.store.present();
        let space = match &present {
            Backend::Log(_) => Space::of(self.dir.root()).map_err(|error| error.to_string()),
            Backend::Files(files) => files.look(),
        };
        // After looking: the usage depends on whether the directory is present.
        let usage = present.store().usage();
        let place = Place::of_backend(&present);
        let part = |share: Share| f64::from(share.millionths()) / 1e6;
        let mut status = ContributionStatus {
            policy: policy.name().to_owned(),
            dir: place.path(&self.dir).display().to_string(),
            offered_bytes: usage.capacity_bytes,
            used_bytes: usage.disk_bytes,
            blocks: usage.blocks,
            dropped_blocks: self.state.dropped_blocks.load(Ordering::Relaxed),
            ..ContributionStatus::default()
        };
        match &policy {
            Policy::Fixed { size_bytes } => status.size_bytes = Some(*size_bytes),
            Policy::Dynamic { low, high } => {
                (status.low, status.high) = (Some(part(*low)), Some(part(*high)));
            }
            Policy::Transparent { .. } => {}
        }
        if let Backend::Files(files) = &present {
            status.lost_blocks = files.lost_blocks();
        }
        match space {
            Ok(space) => {
                status.disk_total_bytes = space.total_bytes;
                status.disk_free_bytes = space.free_bytes;
                let more = usage.capacity_bytes.saturating_sub(usage.disk_bytes);
                if matches!(policy, Policy::Fixed { .. }) && more > space.free_bytes {
                    status.warnings.push("more is offered than the disk has free".to_owned());
                }
            }
            Err(away) => status.warnings.push(away),
        }
        let (moving, warning) = self.moving();
        status.moving = moving;
        status.warnings.extend(warning);
        if matches!(policy, Policy::Transparent { .. }) && self.is_only_holder() {
            let why = "no other node holds copies: what vanishes here is gone";
            status.warnings.push(why.to_owned());
        }
        let trouble = self.state.trouble.lock().expect("no holder of this lock panics");
        status.warnings.extend(trouble.clone());
        status
    }

    /// The blocks that still move from where an earlier policy kept them, and a warning if they
    /// cannot. Looks at the disk.
    fn moving(&self) -> (Option<Moving>, Option<String>) {
        let Some(former) = self.store.former() else { return (None, None) };
        let from = Place::of_backend(&former).path(&self.dir).display().to_string();
        let warning = is_away(&former).then(|| {
            format!("the blocks in {from} cannot be moved, for it is not there: {AWAY_ADVICE}")
        });
        let left = former.store().usage();
        let moving = Moving {
            from,
            moved_blocks: self.state.moved_blocks.load(Ordering::Relaxed),
            left_blocks: left.blocks,
            left_bytes: left.block_bytes,
        };
        (Some(moving), warning)
    }
}
