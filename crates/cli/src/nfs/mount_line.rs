//! How a client mounts an export, in words for people and as a line of `/etc/fstab`.

use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use atoll_node::shell_word;

/// The host that a client names: this machine's name, where all its addresses are listened on.
fn host(address: SocketAddr) -> String {
    if address.ip().is_unspecified() {
        return rustix::system::uname().nodename().to_string_lossy().into_owned();
    }
    match address {
        SocketAddr::V4(address) => address.ip().to_string(),
        SocketAddr::V6(address) => format!("[{}]", address.ip()),
    }
}

/// Options of Linux. There is no lock manager: programs on one client lock each other.
fn linux_options(address: SocketAddr) -> String {
    let proto = if address.is_ipv4() { "tcp" } else { "tcp6" };
    let port = address.port();
    format!("vers=3,proto={proto},mountproto={proto},port={port},mountport={port},nolock")
}

/// Lines that say how an export is mounted.
pub(super) fn described(address: SocketAddr, path: &str) -> Vec<String> {
    let source = shell_word(&format!("{}:{path}", host(address)));
    let port = address.port();
    vec![
        format!("{path} is served on {address}; a client mounts it, as root, with"),
        format!("  Linux  mount -t nfs -o {} {source} MNT", linux_options(address)),
        format!(
            "  macOS  mount -t nfs -o vers=3,tcp,resvport,port={port},mountport={port},locallocks {source} MNT"
        ),
    ]
}

/// How Windows mounts it, whose client asks the port mapper.
pub(super) fn windows(address: SocketAddr, path: &str) -> String {
    let path = path.trim_start_matches('/').replace('/', "\\");
    format!("  Windows  mount -o anon,nolock \\\\{}\\{path} Z:", host(address))
}

/// The line of `/etc/fstab` that mounts it.
pub(super) fn fstab(address: SocketAddr, path: &str, directory: &Path) -> String {
    let source = field(format!("{}:{path}", host(address)).as_bytes());
    let directory = field(directory.as_os_str().as_bytes());
    // The server may not be there yet when the machine starts.
    let when = "_netdev,nofail,x-systemd.automount";
    format!("{source} {directory} nfs {},{when} 0 0", linux_options(address))
}

/// A field of `/etc/fstab`, in which blanks are written in octal (`getmntent(3)`).
pub(super) fn field(bytes: &[u8]) -> String {
    let mut field = String::new();
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            match c {
                ' ' | '\t' | '\n' | '\\' | '#' => field += &format!("\\{:03o}", c as u32),
                c => field.push(c),
            }
        }
        field.extend(chunk.invalid().iter().map(|byte| format!("\\{byte:03o}")));
    }
    field
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_what_mount_and_fstab_take() {
        let local: SocketAddr = "127.0.0.1:2049".parse().expect("an address");
        let lines = described(local, "/work").join("\n");
        let linux = "mount -t nfs -o vers=3,proto=tcp,mountproto=tcp,port=2049,mountport=2049,nolock \
                     127.0.0.1:/work MNT";
        assert!(lines.contains(linux), "{lines}");
        assert_eq!(
            fstab("[::1]:20049".parse().expect("an address"), "/a b", Path::new("/srv/a b")),
            "[::1]:/a\\040b /srv/a\\040b nfs vers=3,proto=tcp6,mountproto=tcp6,port=20049,\
             mountport=20049,nolock,_netdev,nofail,x-systemd.automount 0 0"
        );
        assert!(windows(local, "/work/docs").ends_with(r"nolock \\127.0.0.1\work\docs Z:"));
        assert!(!described("0.0.0.0:1".parse().expect("an address"), "/x")[1].contains("0.0.0.0"));
    }
}
