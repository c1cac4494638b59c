//! A network interface whose packets a program reads and writes.

use std::fs::{File, OpenOptions};
use std::io;

use rustix::ioctl::{Opcode, Setter, ioctl};

/// `TUNSETIFF` of Linux' `if_tun.h`.
const TUNSETIFF: Opcode = 0x4004_54ca;
/// Packets of IP, without a header of Ethernet or of the driver.
const IFF_TUN_NO_PI: i16 = 0x0001 | 0x1000;
const MAX_NAME_BYTES: usize = 15;

/// `struct ifreq` of Linux: a name, and here the flags.
#[repr(C)]
struct Request {
    name: [u8; 16],
    flags: i16,
    unused: [u8; 22],
}

/// Makes an interface in this process's network namespace; it goes when the file is closed.
pub(crate) fn open(name: &str) -> io::Result<File> {
    assert!(name.len() <= MAX_NAME_BYTES, "{name} is too long for an interface");
    let file = OpenOptions::new().read(true).write(true).open("/dev/net/tun")?;
    let mut request = Request { name: [0; 16], flags: IFF_TUN_NO_PI, unused: [0; 22] };
    request.name[..name.len()].copy_from_slice(name.as_bytes());
    set_interface(&file, request)?;
    Ok(file)
}

#[allow(unsafe_code)]
fn set_interface(file: &File, request: Request) -> io::Result<()> {
    // SAFETY: TUNSETIFF reads a `struct ifreq`, 40 bytes on 64-bit Linux, which `Request`
    // is laid out as, with a name that ends in a zero; it writes nothing beyond it.
    unsafe { ioctl(file, Setter::<TUNSETIFF, Request>::new(request)) }?;
    Ok(())
}
