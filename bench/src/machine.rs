//! Where and when something was measured, for the head of a page of results.

use std::fs;
use std::time::SystemTime;

const KIB_PER_GIB: f64 = 1024.0 * 1024.0;

/// The date.
pub fn today() -> String {
    let now = SystemTime::now();
    humantime::format_rfc3339_seconds(now).to_string()[..10].to_string()
}

/// The processor, memory, kernel and disk.
pub fn machine() -> String {
    let cpus = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpus.lines().find(|line| line.starts_with("model name"));
    let model = model.and_then(|line| line.split_once(": ")).map_or("an unnamed CPU", |m| m.1);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = memory.split_whitespace().nth(1).and_then(|kib| kib.parse::<f64>().ok());
    format!(
        "{model}, {cores} cores, {:.0} GiB of memory, Linux {}, temporary files on {}",
        kib.unwrap_or(0.0) / KIB_PER_GIB,
        kernel.trim(),
        temporary_file_system(),
    )
}

/// The kind of file system that temporary files are on.
fn temporary_file_system() -> String {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let temp = std::env::temp_dir();
    let best = mounts
        .lines()
        .filter_map(|line| {
            let mut fields = line.split(' ');
            let (_, path, kind) = (fields.next()?, fields.next()?, fields.next()?);
            temp.starts_with(path).then_some((path.len(), kind))
        })
        .max();
    best.map_or("an unknown file system", |(_, kind)| kind).to_string()
}
