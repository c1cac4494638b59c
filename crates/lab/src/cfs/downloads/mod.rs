//! CFS §7.1, Figures 6, 7 and 8: how fast a file comes over the Internet.
//!
//! "The servers held a one megabyte CFS file split into 8K blocks. To test download speed,
//! client software on each machine fetched the entire file. The machines fetched the file
//! one at a time. … The client initially issues a window of some number of parallel block
//! fetches; as each fetch completes, the client starts a new one." Figure 6 shows the mean
//! speed against the window, Figure 7 how it is distributed over the machines, Figure 8
//! the speed of "ordinary TCP between each pair of hosts".
//!
//! In the paper's settings an RPC is one message each way, as over CFS's UDP, and shares
//! the links; as shipped, RPCs travel on TCP connections with TLS, kept open, over the
//! same links. The sites are those of [`super::sites`].

mod views;

use std::time::Duration;

use atoll_dht::{Blocks, Dht, GetError};
use atoll_env::Runtime;
use atoll_sim::{Connections, Latency, TcpModel};
use atoll_volume::blocks::window;
use bytes::Bytes;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt, TryStreamExt, stream};

use super::sites;
use crate::LabError;
use crate::experiment::{Context, Experiment, Group};
use crate::ring::{Network, Plan, Ring, block};
use crate::setting::Setting;

pub(crate) const GROUP: Group = Group {
    experiments: &[
        Experiment {
            name: "cfs-fig6",
            title: "mean download speed against the prefetch window",
            source: "CFS §7.1, Figure 6",
            nodes: None,
        },
        Experiment {
            name: "cfs-fig7",
            title: "distribution of download speeds over twelve sites",
            source: "CFS §7.1, Figure 7",
            nodes: None,
        },
        Experiment {
            name: "cfs-fig8",
            title: "distribution of the speeds of TCP between each two sites",
            source: "CFS §7.1, Figure 8",
            nodes: None,
        },
    ],
    run,
};

pub(super) const BLOCK_BYTES: usize = 8192;
const FILE_BYTES: usize = 1 << 20;
/// Windows of Figure 6, in blocks.
const WINDOWS: [usize; 12] = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24];
const QUICK_WINDOWS: [usize; 5] = [1, 3, 5, 10, 24];
/// The files of Figure 8.
pub(super) const TRANSFERS: [u64; 3] = [8 << 10, 64 << 10, 1_100_000];
/// Tables, latencies and connections settle before the first download...
const REST: Duration = Duration::from_secs(120);
/// ... and links drain between two.
const PAUSE: Duration = Duration::from_secs(10);

/// TCP, and TLS 1.3 with our greeting; the first requests go along.
const HANDSHAKE_ROUND_TRIPS: u32 = 2;

/// How a client prefetches.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Window {
    /// So many blocks at a time.
    Blocks(usize),
    /// As many as seem useful, by `atoll_volume::blocks::window`.
    Adaptive,
}

/// Curves of Figure 6.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Case {
    PaperPlain,
    PaperSelecting,
    Default,
}

impl Case {
    pub(super) const ALL: [Case; 3] = [Case::PaperPlain, Case::PaperSelecting, Case::Default];

    pub(super) fn name(self) -> &'static str {
        match self {
            Case::PaperPlain => "paper",
            Case::PaperSelecting => "paper-server-selection",
            Case::Default => "default",
        }
    }

    fn plan(self, context: &Context<'_>, seed: u64) -> Result<Plan, LabError> {
        let setting = if self == Case::Default { Setting::Default } else { Setting::Paper };
        let connections = match setting {
            Setting::Paper => Connections::Instant,
            Setting::Default => {
                Connections::Tcp(TcpModel::today().with_handshake(HANDSHAKE_ROUND_TRIPS))
            }
        };
        let (mut chord, mut dht) = (setting.chord(sites::COUNT), setting.dht());
        if self == Case::PaperSelecting {
            crate::setting::select_servers(&mut chord, &mut dht);
        }
        let latency =
            Latency::Matrix(sites::round_trips(context.options.latency.as_deref(), seed)?);
        Ok(Plan {
            seed,
            nodes: sites::COUNT,
            chord,
            dht,
            upkeep: true,
            virtual_servers: Vec::new(),
            network: Network { latency: Some(latency), connections, links: sites::hosts() },
        })
    }
}

/// One download.
#[derive(Clone, Debug)]
pub(super) struct Download {
    pub case: Case,
    pub window: Window,
    pub seed: u64,
    pub site: usize,
    /// Of 1,024 bytes a second, as the paper's.
    pub kib_per_sec: f64,
    pub rpcs_per_block: f64,
}

/// One file over one TCP connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transfer {
    pub len_bytes: u64,
    pub seed: u64,
    pub from: usize,
    pub to: usize,
    pub kib_per_sec: f64,
}

/// What is said of distances that no file gave.
pub(super) const MODELLED: &str = "modelled";

/// Everything that was measured.
pub(super) struct Found {
    pub downloads: Vec<Download>,
    pub transfers: Vec<Transfer>,
    pub windows: Vec<usize>,
    pub seeds: Vec<u64>,
    pub sites: &'static str,
}

#[derive(Clone, Copy)]
enum Part {
    Downloads(Case, Window, u64),
    Transfers(u64, u64),
}

enum Measured {
    Downloads(Vec<Download>),
    Transfers(Vec<Transfer>),
}

fn run(context: &Context<'_>) -> Result<Vec<crate::Outcome>, LabError> {
    let seeds = context.seeds(5, 1);
    let windows = if context.options.quick { QUICK_WINDOWS.to_vec() } else { WINDOWS.to_vec() };
    let mut parts = Vec::new();
    for seed in &seeds {
        for case in Case::ALL {
            parts.extend(windows.iter().map(|w| Part::Downloads(case, Window::Blocks(*w), *seed)));
        }
        parts.push(Part::Downloads(Case::Default, Window::Adaptive, *seed));
        // Without a file, distances do not depend on the seed.
        if context.options.latency.is_some() || *seed == seeds[0] {
            parts.extend(TRANSFERS.map(|len_bytes| Part::Transfers(len_bytes, *seed)));
        }
    }
    let mut found = Found {
        downloads: Vec::new(),
        transfers: Vec::new(),
        windows,
        seeds: seeds.clone(),
        sites: if context.options.latency.is_some() { "of the latency file" } else { MODELLED },
    };
    let measured = context.each(&parts, |part| match part {
        Part::Downloads(case, window, seed) => {
            Ok(Measured::Downloads(download_everywhere(context, *case, *window, *seed)?))
        }
        Part::Transfers(len_bytes, seed) => {
            Ok(Measured::Transfers(transfer_everywhere(context, *len_bytes, *seed)?))
        }
    })?;
    for part in measured {
        match part {
            Measured::Downloads(downloads) => found.downloads.extend(downloads),
            Measured::Transfers(transfers) => found.transfers.extend(transfers),
        }
    }
    Ok(views::outcomes(&found))
}

fn download_everywhere(
    context: &Context<'_>,
    case: Case,
    window: Window,
    seed: u64,
) -> Result<Vec<Download>, LabError> {
    let ring = Ring::new(&case.plan(context, seed)?);
    let blocks = FILE_BYTES / BLOCK_BYTES;
    ring.put(blocks, BLOCK_BYTES)?;
    ring.sim.run_for(REST);
    let mut downloads = Vec::new();
    for site in 0..sites::COUNT {
        let before = ring.members[site].dht.stats().get_calls;
        let began = ring.sim.now();
        fetch_file(&ring, site, window, blocks)?;
        let secs = ring.sim.now().since(began).as_secs_f64();
        let calls = ring.members[site].dht.stats().get_calls - before;
        downloads.push(Download {
            case,
            window,
            seed,
            site,
            kib_per_sec: FILE_BYTES as f64 / 1024.0 / secs,
            rpcs_per_block: calls as f64 / blocks as f64,
        });
        ring.sim.run_for(PAUSE);
    }
    Ok(downloads)
}

fn fetch_file(ring: &Ring, site: usize, window: Window, blocks: usize) -> Result<(), LabError> {
    let dht = &ring.members[site].dht;
    let got = match window {
        Window::Blocks(at_once) => {
            let fetches = stream::iter((0..blocks).map(|n| dht.get(block(n, BLOCK_BYTES).0)));
            ring.block_on(fetches.buffer_unordered(at_once).try_collect::<Vec<Bytes>>())?
        }
        Window::Adaptive => {
            let env = ring.sim.env(ring.members[site].host);
            ring.block_on(fetch_adaptively(dht, &*env, blocks))?
        }
    };
    let got = got.map_err(|error| LabError::Failed(format!("a download broke off: {error}")))?;
    assert_eq!(got.len(), blocks, "every block was asked for");
    Ok(())
}

/// As `atoll_volume` reads ahead: as many blocks under way as its window allows.
async fn fetch_adaptively(
    dht: &Dht,
    env: &dyn Runtime,
    blocks: usize,
) -> Result<Vec<Bytes>, GetError> {
    let size = BLOCK_BYTES as u64;
    let mut window = window::Window::new(window::Limits::default());
    let mut under_way = FuturesUnordered::new();
    let mut got = Vec::with_capacity(blocks);
    let mut next = 0;
    loop {
        while next < blocks && window.may_start(size) {
            let began = env.now();
            window.started(size, began);
            let fetch = dht.get(block(next, BLOCK_BYTES).0);
            under_way.push(fetch.map(move |got| (got, began)));
            next += 1;
        }
        let Some((fetched, began)) = under_way.next().await else { return Ok(got) };
        let now = env.now();
        match fetched {
            Ok(bytes) => {
                window.completed(size, bytes.len() as u64, now.since(began), now);
                got.push(bytes);
            }
            Err(error) => return Err(error),
        }
    }
}

fn transfer_everywhere(
    context: &Context<'_>,
    len_bytes: u64,
    seed: u64,
) -> Result<Vec<Transfer>, LabError> {
    // Hosts and links as for downloads; the nodes on them are idle.
    let plan = Plan { upkeep: false, ..Case::PaperPlain.plan(context, seed)? };
    let ring = Ring::new(&plan);
    let mut transfers = Vec::new();
    for from in 0..sites::COUNT {
        for to in (0..sites::COUNT).filter(|to| *to != from) {
            let [server, client] = [from, to].map(|site| ring.members[site].host);
            let model = TcpModel::of_2001();
            let taken = ring.block_on(ring.sim.transfer(server, client, len_bytes, &model))?;
            let kib_per_sec = len_bytes as f64 / 1024.0 / taken.as_secs_f64();
            transfers.push(Transfer { len_bytes, seed, from, to, kib_per_sec });
        }
    }
    Ok(transfers)
}
