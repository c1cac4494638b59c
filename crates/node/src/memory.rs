//! How much memory there is, and how much of it this process has. Linux tells in `/proc`;
//! elsewhere nothing is known.

use std::fs;

/// This process's resident memory, bytes; 0 where the system does not tell.
pub(crate) fn resident_bytes() -> u64 {
    line("/proc/self/status", "VmRSS:").unwrap_or(0)
}

/// The machine's memory, bytes, if the system tells.
pub(crate) fn total_bytes() -> Option<u64> {
    line("/proc/meminfo", "MemTotal:").filter(|bytes| *bytes > 0)
}

/// The number of bytes behind `name` in a file whose lines are `name   123 kB`.
fn line(path: &str, name: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read() {
        let total = total_bytes().expect("tests run on Linux");
        assert!(resident_bytes() > 1 << 20 && resident_bytes() < total);
        assert_eq!(line("/proc/meminfo", "NoSuchLine:"), None);
        assert_eq!(line("/no/such/file", "MemTotal:"), None);
    }
}
