//! Feeds mutated bytes to every decoder of network or disk bytes.
//!
//! `make fuzz` gives each target a few seconds. A target starts from valid encodings and
//! mutates them; a finding is a panic, a decoder that allocates far more than it was given
//! (see [`alloc`]), or one that does not come back (see [`watch`](mod@watch)). A finding
//! is printed and its input kept; there is no coverage feedback: the seeds reach the deep
//! code. `docs/fuzzing.md` has more.
//!
//! Options: `--seconds N` for each target (3), `--seed N` (from the clock), `--only PREFIX`
//! of names, `--input FILE` (decode it and no more; `--only` names the target), `--list`.

#![allow(clippy::disallowed_methods, reason = "a tool, not protocol code: it has a clock")]

mod alloc;
mod mutate;
mod targets;
mod watch;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::ExitCode;
use std::sync::LazyLock;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use mutate::Random;
use targets::Target;
use watch::Watch;

/// The longest input tried, bytes: room for a volume with two full indirect blocks.
const MAX_INPUT_BYTES: usize = 1 << 18;

/// Where the inputs of findings are written, from the top of the checkout.
const FINDINGS_DIR: &str = "target/fuzz";

/// The longest input printed besides, in hexadecimal digits.
const MAX_SHOWN_DIGITS: usize = 2000;

static WATCH: LazyLock<Watch> = LazyLock::new(Watch::default);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let value =
        |name: &str| arguments.iter().position(|a| a == name).and_then(|i| arguments.get(i + 1));
    let number = |name: &str| value(name).and_then(|text| text.parse::<u64>().ok());
    let targets = targets::all();
    if arguments.iter().any(|a| a == "--list") {
        targets.iter().for_each(|target| println!("{}", target.name));
        return ExitCode::SUCCESS;
    }
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |d| d.as_nanos() as u64);
    let seed = number("--seed").unwrap_or(clock);
    let span = Duration::from_secs(number("--seconds").unwrap_or(3));
    std::thread::spawn(watch);
    if let Some(file) = value("--input") {
        let target = targets.iter().find(|target| value("--only") == Some(&target.name.into()));
        return target.map_or(ExitCode::FAILURE, |target| replay(target, file));
    }
    std::panic::set_hook(Box::new(|panic| on_panic(&panic.to_string())));
    println!("seed {seed}; {} s for each target", span.as_secs());
    let mut failed = 0;
    for target in &targets {
        if value("--only").is_none_or(|only| target.name.starts_with(only.as_str())) {
            match fuzz(target, seed, span) {
                Ok(tried) => println!("{:24} {tried}", target.name),
                Err(finding) => {
                    failed += 1;
                    report(target.name, &finding);
                }
            }
        }
    }
    if failed > 0 {
        println!("{failed} targets failed");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

/// How many inputs were tried.
#[derive(Default)]
struct Tried {
    inputs: u64,
    accepted: u64,
}

impl fmt::Display for Tried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>9} inputs, {} accepted", self.inputs, self.accepted)
    }
}

/// What is wrong with a decoder, and the input that shows it.
#[derive(Debug)]
struct Finding {
    what: String,
    input: Vec<u8>,
}

/// Runs one target.
fn fuzz(target: &Target, seed: u64, span: Duration) -> Result<Tried, Finding> {
    for input in &target.seeds {
        if !try_one(target, input)? {
            let what = "a valid encoding was refused".to_owned();
            return Err(Finding { what, input: input.clone() });
        }
    }
    let mut random = Random::new(seed);
    let mut tried = Tried::default();
    let began = Instant::now();
    while began.elapsed() < span {
        let mut input = mutate::mutant(&target.seeds, &mut random);
        input.truncate(MAX_INPUT_BYTES);
        tried.accepted += u64::from(try_one(target, &input)?);
        tried.inputs += 1;
    }
    Ok(tried)
}

/// Prints a finding; its input goes into a file, from which `--input` reads it.
fn report(name: &str, finding: &Finding) {
    let digits: String = finding.input.iter().map(|b| format!("{b:02x}")).collect();
    let path = Path::new(FINDINGS_DIR).join(format!("{}.hex", name.replace('/', "-")));
    let written =
        std::fs::create_dir_all(FINDINGS_DIR).and_then(|()| std::fs::write(&path, &digits));
    println!("{name}: {}", finding.what);
    match written {
        Ok(()) => println!("  replay: --only {name} --input {}", path.display()),
        Err(error) => println!("  {} cannot be written: {error}", path.display()),
    }
    if digits.len() <= MAX_SHOWN_DIGITS {
        println!("  input: {digits}");
    }
}

/// A panic is a finding, which [`try_one`] reports once it has been caught; but not one
/// that cannot be caught, because it came while another was unwinding.
fn on_panic(text: &str) {
    let is_fatal = text.contains("panic in a destructor") || text.contains("cannot unwind");
    if is_fatal && let Some((name, input)) = WATCH.overdue(Duration::ZERO) {
        let what = format!("ends the process: {text}");
        report(name, &Finding { what, input });
    }
}

/// Ends the process when a decoder does not come back.
fn watch() {
    loop {
        std::thread::sleep(Duration::from_secs(1));
        if let Some((name, input)) = WATCH.overdue(watch::PATIENCE) {
            let what = format!("has not come back for {:?}", watch::PATIENCE);
            report(name, &Finding { what, input });
            std::process::exit(1);
        }
    }
}

/// Decodes one input, which a file holds in hexadecimal.
fn replay(target: &Target, file: &str) -> ExitCode {
    let Ok(text) = std::fs::read_to_string(file) else {
        println!("{file} cannot be read");
        return ExitCode::FAILURE;
    };
    let digits: Vec<u32> = text.chars().filter_map(|c| c.to_digit(16)).collect();
    let input: Vec<u8> = digits.chunks_exact(2).map(|d| (d[0] << 4 | d[1]) as u8).collect();
    match try_one(target, &input) {
        Ok(accepted) => println!("{}: no finding; accepted: {accepted}", target.name),
        Err(finding) => {
            println!("{}: {}", target.name, finding.what);
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

/// Whether the decoder accepted `input`.
fn try_one(target: &Target, input: &[u8]) -> Result<bool, Finding> {
    WATCH.begin(target.name, input);
    alloc::start();
    let outcome = catch_unwind(AssertUnwindSafe(|| (target.decode)(input)));
    let peak_bytes = alloc::peak_bytes();
    WATCH.end();
    let limit = target.fixed_bytes + target.factor * input.len();
    let len = input.len();
    let what = match outcome {
        Ok(_) if peak_bytes > limit => {
            format!("allocated {peak_bytes} bytes for {len} bytes of input (limit {limit})")
        }
        Ok(accepted) => return Ok(accepted),
        Err(panic) => {
            let text = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied())
                .unwrap_or("no message");
            format!("panic \"{text}\"")
        }
    };
    Err(Finding { what, input: input.to_vec() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_survives_a_short_run() {
        for target in targets::all() {
            if let Err(finding) = fuzz(&target, 1, Duration::from_millis(50)) {
                report(target.name, &finding);
                panic!("{}: {}", target.name, finding.what);
            }
        }
    }

    fn broken(decode: fn(&[u8]) -> bool) -> Finding {
        let target = Target {
            name: "broken",
            seeds: vec![b"abc".to_vec()],
            decode: Box::new(decode),
            fixed_bytes: 4096,
            factor: 16,
        };
        fuzz(&target, 1, Duration::from_secs(60)).err().expect("it is broken")
    }

    #[test]
    fn a_panic_is_found() {
        let finding = broken(|input| input.first() != Some(&b'x') || panic!("found"));
        assert_eq!((finding.what.as_str(), finding.input[0]), ("panic \"found\"", b'x'));
    }

    #[test]
    fn a_greedy_decoder_is_found() {
        let finding =
            broken(|input| input.len() < 5 || !std::hint::black_box(vec![0u8; 1 << 20]).is_empty());
        assert!(finding.what.starts_with("allocated 1048576 bytes"), "{}", finding.what);
    }

    #[test]
    fn a_refused_seed_is_found() {
        assert_eq!(broken(|_| false).input, b"abc");
    }

    #[test]
    fn a_decoder_that_does_not_come_back_is_overdue_until_it_does() {
        let watch = Watch::default();
        assert_eq!(watch.overdue(Duration::ZERO), None);
        watch.begin("slow", b"abc");
        assert_eq!(watch.overdue(Duration::from_secs(3600)), None);
        while watch.overdue(Duration::ZERO).is_none() {}
        assert_eq!(watch.overdue(Duration::ZERO), Some(("slow", b"abc".to_vec())));
        watch.end();
        assert_eq!(watch.overdue(Duration::ZERO), None);
    }
}
