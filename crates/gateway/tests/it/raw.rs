//! System calls that no crate of ours has a safe form of.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// What direct input and output wants: memory that begins at a page, and whole pages of it.
#[repr(C, align(4096))]
#[derive(Clone)]
pub struct Page(pub [u8; 4096]);

/// `struct iocb` (io_submit(2)).
#[repr(C)]
#[derive(Default)]
struct Request {
    data: u64,
    key: u32,
    rw_flags: i32,
    opcode: u16,
    priority: i16,
    file: u32,
    buffer: u64,
    len: u64,
    offset: i64,
    unused: u64,
    flags: u32,
    event_file: u32,
}

/// `struct io_event`.
#[repr(C)]
#[derive(Default)]
struct Event {
    data: u64,
    request: u64,
    result: i64,
    result2: i64,
}

const PWRITE: u16 = 1;

fn checked(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Writes a page by `io_submit(2)`, and waits until that is done.
#[allow(unsafe_code)]
pub fn write_asynchronously(file: &File, page: &Page, offset: i64) -> io::Result<usize> {
    let mut context: libc::c_ulong = 0;
    let mut request = Request {
        opcode: PWRITE,
        file: file.as_raw_fd() as u32,
        buffer: page.0.as_ptr() as u64,
        len: page.0.len() as u64,
        offset,
        ..Request::default()
    };
    let mut list = [&raw mut request];
    let mut event = Event::default();
    // SAFETY: the structures are laid out as the kernel's, and they, the page and the file live
    // until io_getevents has returned the only request's event, or io_destroy has waited for it.
    unsafe {
        checked(libc::syscall(libc::SYS_io_setup, 1, &raw mut context))?;
        let submitted = checked(libc::syscall(libc::SYS_io_submit, context, 1, list.as_mut_ptr()));
        let no_limit = std::ptr::null::<libc::timespec>();
        let done = submitted.and_then(|_| {
            let into = &raw mut event;
            checked(libc::syscall(libc::SYS_io_getevents, context, 1, 1, into, no_limit))
        });
        checked(libc::syscall(libc::SYS_io_destroy, context))?;
        done?;
    }
    match usize::try_from(event.result) {
        Ok(written) => Ok(written),
        Err(_) => Err(io::Error::from_raw_os_error(-event.result as i32)),
    }
}
