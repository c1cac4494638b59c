//! System calls that no crate of ours has a safe form of.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// What direct input and output wants: memory that begins at a page, and whole pages of it.
#[repr(C, align(4096))]
#[derive(Clone)]
pub(crate) struct Page(pub [u8; 4096]);

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
pub(crate) fn write_asynchronously(file: &File, page: &Page, offset: i64) -> io::Result<usize> {
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

/// `struct file_handle` (open_by_handle_at(2)), as large as any.
#[repr(C)]
pub(crate) struct FileHandle {
    len: u32,
    kind: i32,
    bytes: [u8; 128],
}

/// The handle of a file.
#[allow(unsafe_code)]
pub(crate) fn handle_of(path: &Path) -> io::Result<FileHandle> {
    let path = CString::new(path.as_os_str().as_bytes()).unwrap();
    let mut handle = FileHandle { len: 128, kind: 0, bytes: [0; 128] };
    let mut mount = 0i32;
    // SAFETY: the path ends with a zero; the kernel writes at most as many bytes as `len` says,
    // which is what the handle has room for, and one number.
    checked(unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            libc::AT_FDCWD,
            path.as_ptr(),
            &raw mut handle,
            &raw mut mount,
            0,
        )
    })?;
    Ok(handle)
}

/// Opens a file of the file system of `mount` for reading.
#[allow(unsafe_code)]
pub(crate) fn open_handle(mount: &File, handle: &FileHandle) -> io::Result<File> {
    // SAFETY: the kernel reads as many bytes as `len` says, which the handle has; what it
    // returns is a file descriptor that no other code has.
    let opened = unsafe {
        let handle = std::ptr::from_ref(handle);
        let fd = libc::syscall(
            libc::SYS_open_by_handle_at,
            mount.as_raw_fd(),
            handle,
            libc::O_RDONLY | libc::O_CLOEXEC,
        );
        OwnedFd::from_raw_fd(checked(fd)? as i32)
    };
    Ok(opened.into())
}

/// Which of the commands of fcntl(2) that set locks.
#[derive(Clone, Copy)]
pub(crate) enum LockBy {
    /// `F_SETLK`.
    Process,
    /// `F_SETLKW`.
    ProcessWaiting,
    /// `F_OFD_SETLK`.
    OpenFile,
}

fn flock_of(kind: i32, first: i64, len: i64) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: first,
        l_len: len,
        l_pid: 0,
    }
}

/// Sets a lock (`F_RDLCK`, `F_WRLCK`, `F_UNLCK`) on a range of bytes.
#[allow(unsafe_code)]
pub(crate) fn set_lock(file: &File, by: LockBy, kind: i32, first: i64, len: i64) -> io::Result<()> {
    let command = match by {
        LockBy::Process => libc::F_SETLK,
        LockBy::ProcessWaiting => libc::F_SETLKW,
        LockBy::OpenFile => libc::F_OFD_SETLK,
    };
    let lock = flock_of(kind, first, len);
    // SAFETY: the kernel reads one structure, which lives until it returns.
    let set = unsafe { libc::fcntl(file.as_raw_fd(), command, &raw const lock) };
    checked(set.into()).map(drop)
}

/// What keeps this process from a lock: its type, range and process.
#[allow(unsafe_code)]
pub(crate) fn conflict(
    file: &File,
    kind: i32,
    first: i64,
    len: i64,
) -> Option<(i32, i64, i64, i32)> {
    let mut lock = flock_of(kind, first, len);
    // SAFETY: the kernel reads and writes one structure, which lives until it returns.
    let asked = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETLK, &raw mut lock) };
    checked(asked.into()).unwrap();
    let kind = i32::from(lock.l_type);
    (kind != libc::F_UNLCK).then_some((kind, lock.l_start, lock.l_len, lock.l_pid))
}
