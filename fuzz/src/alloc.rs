//! An allocator that knows how much a thread holds at most while one input is decoded.
//!
//! A decoder that believes a length of 2^32 in a message of ten bytes asks for that much
//! memory; this is where it is seen.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

/// Forgets what was counted on this thread.
pub(crate) fn start() {
    HELD.set(0);
    PEAK.set(0);
}

/// The most this thread held at once since [`start`], beyond what it held then.
pub(crate) fn peak_bytes() -> usize {
    usize::try_from(PEAK.get()).unwrap_or(0)
}

fn count(change: isize) {
    // A thread that is ending may free memory after its counters are gone.
    let _ = HELD.try_with(|held| {
        held.set(held.get() + change);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(held.get())));
    });
}

// SAFETY: every call is passed on unchanged to the system allocator, which upholds the
// contract; counting touches only plain thread-local integers and allocates nothing.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's obligations are the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's obligations are the system allocator's.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as isize - layout.size() as isize);
        // SAFETY: the caller's obligations are the system allocator's.
        unsafe { System.realloc(pointer, layout, size) }
    }
}
