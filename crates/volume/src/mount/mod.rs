//! One front for all file systems of this crate: it answers a front end's calls
//! (`atoll_vfs::FileSystem`) over an engine, which knows one kind of volume.
//!
//! ```text
//! gateway ─► FileSystem ─► mount (calls, deadlines, errno, listings, user.atoll.status) ─► engine
//! ```
//!
//! The engines are the published volume (read-only), the volume that one mount writes, the shared
//! volume, and the past states of a shared volume. Each keeps its inodes and its opens in an
//! `atoll_vfs::InodeTable` under its own lock, since most calls need both and its own state
//! together.
//!
//! Invariants:
//!
//! - Each call ends within 60 seconds.
//! - An engine's fault becomes an errno in one place, and only there is it logged.
//! - A listing never ends with an empty page while names follow, and never because one file's
//!   attributes cannot be read.
//! - `user.atoll.status` of the root directory can be read while nothing else can be.
//!
//! It does not know what a volume consists of, which version a call sees, or how long an answer
//! stays true: an engine says all of that.
