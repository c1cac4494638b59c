//! The allocator's free memory: kept while there is work, given back to the system again and again.
//!
//! A node allocates buffers of up to a mebibyte for the messages that it receives, and frees them
//! within milliseconds. The allocator of glibc gives the system the end of a heap back each time
//! some mebibytes of it are free, and the next message faults each page in anew.

use std::time::Duration;

/// How often memory is given back. A guess: soon enough for who looks, too rare to cost anything.
const TRIM_EVERY: Duration = Duration::from_secs(10);

/// Free bytes at the end of a heap that are kept until the next [`give_back`]: all, as a heap has
/// at most as many.
const KEPT_BYTES: i32 = 64 << 20;
/// Allocations above this are mapped, and unmapped when they are freed; glibc takes no more.
const MAPPED_BYTES: i32 = 32 << 20;
/// A heap grows by so much at once.
const GROWN_BYTES: i32 = 1 << 20;

/// Keeps free memory for the next allocations. A process that calls this also runs [`give_back`].
#[cfg(target_env = "gnu")]
#[allow(unsafe_code)]
pub(crate) fn keep() {
    // The numbers of parameters in malloc.h, as in mallopt(3).
    const M_TRIM_THRESHOLD: i32 = -1;
    const M_TOP_PAD: i32 = -2;
    const M_MMAP_THRESHOLD: i32 = -3;
    unsafe extern "C" {
        fn mallopt(parameter: i32, value: i32) -> i32;
    }
    let values = [
        (M_TRIM_THRESHOLD, KEPT_BYTES),
        (M_MMAP_THRESHOLD, MAPPED_BYTES),
        (M_TOP_PAD, GROWN_BYTES),
    ];
    for (parameter, value) in values {
        // SAFETY: mallopt(3) takes a lock of the allocator and changes how it gets memory, not the
        // memory that it has given out. A value that it refuses changes nothing.
        unsafe { mallopt(parameter, value) };
    }
}

#[cfg(not(target_env = "gnu"))]
pub(crate) fn keep() {}

/// Gives memory back that is free, again and again. Small things that stay stand in the heap between
/// others that were freed; the allocator of glibc keeps that memory, unless it is told not to.
pub(crate) async fn give_back() {
    loop {
        tokio::time::sleep(TRIM_EVERY).await;
        trim();
    }
}

#[cfg(target_env = "gnu")]
#[allow(unsafe_code)]
fn trim() {
    unsafe extern "C" {
        fn malloc_trim(pad: usize) -> i32;
    }
    // SAFETY: malloc_trim(3) may be called by any thread at any time, and frees no allocation.
    unsafe { malloc_trim(0) };
}

#[cfg(not(target_env = "gnu"))]
fn trim() {}
