//! Feeds mutated bytes to every decoder of network or disk bytes.
//!
//! `make fuzz` gives each target a few seconds. A target starts from valid encodings and
//! mutates them; a finding is a panic, or a decoder that allocates far more than it was
//! given (see [`alloc`]). A finding is printed with the bytes in hexadecimal; the seed of
//! the run replays it. There is no coverage feedback: the seeds reach the deep code.
//!
//! Options: `--seconds N` for each target (3), `--seed N` (from the clock), `--only NAME`,
//! `--list`.

#![allow(clippy::disallowed_methods, reason = "a tool, not protocol code: it has a clock")]

mod alloc;
mod mutate;
mod targets;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use mutate::Random;
use targets::Target;

/// The longest input tried, bytes.
const MAX_INPUT_BYTES: usize = 1 << 16;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str| {
        arguments.iter().position(|a| a == name).and_then(|i| arguments.get(i + 1))
    };
    let number = |name: &str| value(name).and_then(|text| text.parse::<u64>().ok());
    let targets = targets::all();
    if arguments.iter().any(|a| a == "--list") {
        targets.iter().for_each(|target| println!("{}", target.name));
        return ExitCode::SUCCESS;
    }
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |d| d.as_nanos() as u64);
    let seed = number("--seed").unwrap_or(clock);
    let span = Duration::from_secs(number("--seconds").unwrap_or(3));
    println!("seed {seed}; {} s for each target", span.as_secs());
    // A panic is a finding and is reported once, by us.
    std::panic::set_hook(Box::new(|_| {}));
    let mut findings = 0;
    for target in &targets {
        if value("--only").is_none_or(|only| target.name == only) {
            findings += usize::from(!fuzz(target, seed, span));
        }
    }
    if findings > 0 {
        println!("{findings} targets failed");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

/// Runs one target; false if something was found.
fn fuzz(target: &Target, seed: u64, span: Duration) -> bool {
    let mut random = Random::new(seed);
    let began = Instant::now();
    let mut runs = 0u64;
    let mut accepted = 0u64;
    for input in &target.seeds {
        if !try_one(target, input).is_some_and(|ok| ok) {
            println!("{}: a valid encoding was refused: {}", target.name, hex(input));
            return false;
        }
    }
    while began.elapsed() < span {
        for _ in 0..64 {
            let mut input = mutate::mutant(&target.seeds, &mut random);
            input.truncate(MAX_INPUT_BYTES);
            match try_one(target, &input) {
                Some(ok) => accepted += u64::from(ok),
                None => return false,
            }
            runs += 1;
        }
    }
    println!("{:24} {runs:>9} inputs, {accepted} accepted", target.name);
    true
}

/// Whether the decoder accepted `input`; `None` after a finding, which is printed.
fn try_one(target: &Target, input: &[u8]) -> Option<bool> {
    alloc::start();
    let outcome = catch_unwind(AssertUnwindSafe(|| (target.decode)(input)));
    let peak_bytes = alloc::peak_bytes();
    let limit = target.fixed_bytes + target.factor * input.len();
    match outcome {
        Ok(_) if peak_bytes > limit => {
            println!(
                "{}: allocated {peak_bytes} bytes for {} bytes of input (limit {limit}): {}",
                target.name,
                input.len(),
                hex(input)
            );
            None
        }
        Ok(accepted) => Some(accepted),
        Err(panic) => {
            let text = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied())
                .unwrap_or("no message");
            println!("{}: panic \"{text}\" on {}", target.name, hex(input));
            None
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_survives_a_short_run() {
        for target in targets::all() {
            assert!(fuzz(&target, 1, Duration::from_millis(50)), "{}", target.name);
        }
    }

    #[test]
    fn a_panic_and_a_greedy_decoder_are_found() {
        let broken = |decode: fn(&[u8]) -> bool| Target {
            name: "broken",
            seeds: vec![b"abc".to_vec()],
            decode: Box::new(decode),
            fixed_bytes: 4096,
            factor: 16,
        };
        let panics = broken(|input| input[2] != b'x' || panic!("found"));
        assert!(!fuzz(&panics, 1, Duration::from_secs(5)));
        let greedy = broken(|input| {
            input.len() < 5 || !std::hint::black_box(vec![0u8; 1 << 20]).is_empty()
        });
        assert!(!fuzz(&greedy, 1, Duration::from_secs(5)));
    }
}
