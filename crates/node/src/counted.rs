//! Numbers of things, as people write them.

/// `1 node`, `2 nodes`.
pub fn counted(count: u64, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}
