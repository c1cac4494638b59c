//! What can be said on the command line.

use std::path::PathBuf;

use crate::sites::Sites;

pub(crate) const USAGE: &str = "\
make bench-wan WAN='[OPTION]...'
  --quick            three readers, one run, 1 MiB and 16 MiB
  --large-mib N      size of the large file [100; quick: 16]
  --readers A,B,...  only these sites read
  --runs N           runs, each with files of its own from another publisher [3]
  --predict-only     no real nodes: what the simulator says, with BBR, of seeded places
  --places N         with it: which places the nodes have on the ring [1]
  --latency FILE     round trips between hosts (LATM, also as .xz, or text) [a sphere]
  --seed N           which hosts of the file, or points of the sphere [1]
  --mbit N           rate of the access lines, Mbit/s [100]
  --queue-kib N      what may wait at either end of an access line, KiB [256]
  --up OPTION        a further option for `atoll up`, besides --cache 0; may be repeated
  --atoll FILE       another program than the `atoll` beside this one
  --out DIR          where wan.csv and wan.md go [nowhere]";

#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub quick: bool,
    pub predict_only: bool,
    pub places: u64,
    pub runs: usize,
    pub large_mib: Option<u64>,
    pub readers: Option<Vec<usize>>,
    pub latency: Option<PathBuf>,
    pub seed: u64,
    pub mbit: f64,
    pub queue_kib: f64,
    pub up: Vec<String>,
    pub atoll: PathBuf,
    pub out: Option<PathBuf>,
}

/// As in CFS §7.1.
const SITES: usize = 12;

impl Options {
    pub(crate) fn parse() -> Result<Options, String> {
        let mut options = Options {
            quick: false,
            predict_only: false,
            places: 1,
            runs: 3,
            large_mib: None,
            readers: None,
            latency: None,
            seed: 1,
            mbit: 100.0,
            queue_kib: 256.0,
            up: ["--cache", "0"].map(String::from).to_vec(),
            atoll: program_beside_this_one(),
            out: None,
        };
        let mut arguments = std::env::args().skip(1);
        while let Some(name) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("{name} needs a value"));
            match name.as_str() {
                "--quick" => options.quick = true,
                "--predict-only" => options.predict_only = true,
                "--places" => options.places = number(&value()?)?,
                "--large-mib" => options.large_mib = Some(number(&value()?)?),
                "--readers" => {
                    let readers = value()?.split(',').map(number).collect::<Result<_, _>>()?;
                    options.readers = Some(readers);
                }
                "--runs" => options.runs = number(&value()?)?,
                "--latency" => options.latency = Some(value()?.into()),
                "--seed" => options.seed = number(&value()?)?,
                "--mbit" => options.mbit = number(&value()?)?,
                "--queue-kib" => options.queue_kib = number(&value()?)?,
                "--up" => options.up.push(value()?),
                "--atoll" => options.atoll = value()?.into(),
                "--out" => options.out = Some(value()?.into()),
                _ => return Err(format!("what is {name}?")),
            }
        }
        if options.quick {
            options.runs = 1;
        }
        if options.readers.iter().flatten().any(|reader| *reader >= SITES) {
            return Err(format!("there are {SITES} sites, from 0"));
        }
        if options.large_bytes() <= 1 << 20 || options.large_bytes() > 1 << 30 {
            return Err("a large file has 2 to 1024 MiB".into());
        }
        if options.runs == 0 || options.mbit <= 0.0 || options.queue_kib <= 0.0 {
            return Err("runs, rate and queue are above zero".into());
        }
        Ok(options)
    }

    pub(crate) fn sites(&self) -> Result<Sites, String> {
        match &self.latency {
            Some(path) => Sites::of_matrix(path, SITES, self.seed),
            None => Ok(Sites::on_a_sphere(SITES, self.seed)),
        }
    }

    pub(crate) fn rate_bytes_per_sec(&self) -> f64 {
        self.mbit * 1e6 / 8.0
    }

    pub(crate) fn queue_bytes(&self) -> f64 {
        self.queue_kib * 1024.0
    }

    pub(crate) fn large_bytes(&self) -> u64 {
        self.large_mib.unwrap_or(if self.quick { 16 } else { 100 }) << 20
    }

    /// Which sites read.
    pub(crate) fn readers(&self) -> Vec<usize> {
        match &self.readers {
            Some(readers) => readers.clone(),
            None if self.quick => vec![1, 4, 7],
            None => (0..SITES).collect(),
        }
    }
}

/// The `atoll` of the same build: it lies in the same directory.
pub(crate) fn program_beside_this_one() -> PathBuf {
    std::env::current_exe().expect("this program has a path").with_file_name("atoll")
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("{text} is no such number"))
}
