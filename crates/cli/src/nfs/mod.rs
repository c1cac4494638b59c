//! `atoll nfs`: volumes and transparent file systems for clients of NFS.
//!
//! One process serves all that it is given on one port, like a mount's (see [`crate::mount_server`]), and tells of itself in
//! the node's directory (`servers`), where `atoll nfs` and `atoll status` read it.

mod export;
mod fstab;
mod mount_line;
pub(crate) mod servers;

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use atoll_gateway::nfs::{self, HandleKey, LIMIT, Network, Options, Service, port_mapper};
use atoll_node::{create_atomically, read_secret, shell_word};
use tokio::net::{TcpListener, UdpSocket};
use tokio::sync::watch;

use self::export::{Exported, OpenExport};
use self::servers::{ExportRecord, Server, ServerRecord};
use crate::connection;
use crate::failure::{Exit, Failure};
use crate::global::{self, Global};
use crate::heap;
use crate::interrupt::Signals;
use crate::messages::note;
use crate::mount_server;
use crate::output;
use crate::pool;
use crate::read_key::{self, Given, ReadKeyArgs};
use crate::runtime::until_done;
use crate::served_volume::VolumeArgs;
use crate::tfs;
use crate::volume_target::Target;

/// How often a server tells of itself.
const TELL_EVERY: Duration = Duration::from_secs(1);
/// How often `--stop` looks whether a server has ended.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// The user and group of those who are nobody.
const NOBODY: u32 = nfs::exports::NOBODY;

/// Arguments of `atoll nfs`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll nfs work
  atoll nfs work team@2026-11-20T12:00 atoll:KEY
  atoll nfs ./disk.img --squash none
  atoll nfs work --listen 192.0.2.7:2049 --allow 192.0.2.0/24
  atoll nfs
  atoll nfs --stop
  sudo atoll nfs work --install /srv/work

Serves NFS version 3, with which every Unix mounts; the command prints how. WHAT is the name of a
volume or a pool of this node or the address of any volume (as for `atoll mount`), or, with a slash, the image or
the device of a TFS that is not mounted. A pool and a TFS need no node. A client can mount a directory below it, too.
One process serves them all, until `--stop`; it survives restarts of the node. Without WHAT, what is served
from this directory is listed.

Only this machine may use it, unless --allow says otherwise. NFS believes the machine that asks who its users
are, and sends everything in the clear: allow machines that you trust, on a network that you trust. Calls must come
from ports below 1024, which only root may use, or each user could call as any other. Root of a
client is nobody unless --squash none is given. What a client has written and not yet synced waits in the server's
memory; `fsync` on the client makes it durable: on the disk of a TFS or a pool, on the ring for a volume. Names and
attributes survive a crash of this machine as soon as they are changed. Other mounts of a
shared volume see it after that, or two seconds after the last write. Programs on one client lock each other;
those on different machines do not: they use `atoll mount`.")]
pub(crate) struct Args {
    /// Volumes by name or address, perhaps with @TIME; pools by name; a TFS by the path of its image or device, with a slash
    #[arg(value_name = "WHAT", value_parser = Exported::parser())]
    what: Vec<Exported>,

    /// Address and port
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:2049")]
    listen: SocketAddr,

    /// The path by which clients mount it, beginning with a slash [default: the name] (only with one WHAT)
    #[arg(long = "as", value_name = "PATH")]
    path: Option<String>,

    /// Machines that may use it, in place of this one: an address, or a network as ADDR/BITS
    #[arg(long, value_name = "ADDR[/BITS]")]
    allow: Vec<Allowed>,

    /// Whose users become nobody
    #[arg(long, value_name = "WHO", value_enum, default_value = "root")]
    squash: Squash,

    /// The user and group that stand for nobody
    #[arg(long, value_name = "UID:GID", default_value_t = Anonymous(NOBODY, NOBODY))]
    anonymous: Anonymous,

    /// Also be the port mapper, on port 111, for clients that are given no port, as Windows'
    #[arg(long)]
    port_mapper: bool,

    /// Refuse all changes
    #[arg(long)]
    read_only: bool,

    /// Answer calls from ports of 1024 and above too: any user of a client can then call as any other whom --squash lets in
    #[arg(long)]
    any_port: bool,

    /// Answer changes of names and attributes before they would survive a crash of this machine; faster, and those of the last
    /// second may be lost
    #[arg(long = "async")]
    answers_early: bool,

    #[command(flatten)]
    volume: VolumeArgs,

    #[command(flatten)]
    read_key: ReadKeyArgs,

    /// Serve here, until Ctrl-C
    #[arg(long)]
    foreground: bool,

    /// End the server on the address of --listen; what clients have written is stored first
    #[arg(long, conflicts_with_all = ["what", "install"])]
    stop: bool,

    /// Write the line that mounts it on MNT into /etc/fstab, and serve nothing (only with one WHAT)
    #[arg(long, value_name = "MNT", requires = "what")]
    install: Option<PathBuf>,

    /// The list of servers as JSON
    #[arg(long, conflicts_with = "what")]
    json: bool,

    /// The table of file systems that --install writes
    #[arg(long, hide = true, value_name = "FILE", default_value = "/etc/fstab")]
    fstab: PathBuf,

    /// Say on standard output when it is served, in a session of its own
    #[arg(long, hide = true, requires = "foreground")]
    announce: bool,
}

impl Args {
    /// Whether this process is to serve.
    pub(crate) fn is_served_here(&self) -> bool {
        self.foreground && !self.what.is_empty()
    }

    /// Lines that say how an export is mounted.
    fn described(&self, address: SocketAddr, path: &str) -> Vec<String> {
        let mut lines = mount_line::described(address, path);
        if self.port_mapper {
            lines.push(mount_line::windows(address, path));
        }
        lines
    }

    fn has_volume(&self) -> bool {
        self.what.iter().any(|what| matches!(what, Exported::Volume(_)))
    }

    /// Whether a volume is to be served that a node has: not a pool, which is on this machine's disk.
    fn needs_node(&self, global: &Global) -> Result<bool, Failure> {
        for what in &self.what {
            if let Exported::Volume(target) = what
                && !pool::is_pool_of_one(target, global)?
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The path by which clients mount an export.
    fn path_of(&self, what: &Exported) -> Result<String, Failure> {
        let refused = |why: String| {
            let failure = Failure::new(Exit::Usage, format!("cannot serve {what}"));
            Err(failure.because(why).advice("--as PATH gives it another path."))
        };
        let path = match (&self.path, what.path()) {
            (Some(path), _) => path.clone(),
            (None, Some(path)) => path,
            (None, None) => return refused("its name is no text".into()),
        };
        let is_path = path.starts_with('/') && path.len() <= MAX_PATH_BYTES;
        match is_path && !path.contains(|c: char| c.is_control()) {
            true => Ok(path),
            false => refused(format!(
                "{} is no path: one begins with / and is at most {MAX_PATH_BYTES} bytes long",
                output::escaped(path.as_bytes())
            )),
        }
    }
}

/// The longest path of an export, bytes: the mount protocol has 1024, with room for a directory below it.
const MAX_PATH_BYTES: usize = 255;

/// Whose users become nobody.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Squash {
    /// Root of a client
    Root,
    /// Everybody
    All,
    /// Nobody
    None,
}

/// Machines.
#[derive(Clone, Copy, Debug)]
struct Allowed(Network);

impl FromStr for Allowed {
    type Err = String;

    fn from_str(text: &str) -> Result<Allowed, String> {
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits)),
            None => (text, None),
        };
        let wrong = || "it is an address, as 192.0.2.7, or a network, as 192.0.2.0/24".to_owned();
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let whole = if address.is_ipv4() { 32 } else { 128 };
        let bits = bits.map_or(Ok(whole), str::parse).map_err(|_| wrong())?;
        Network::new(address, bits).map(Allowed).ok_or_else(wrong)
    }
}

/// User and group of those who are nobody.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Anonymous(u32, u32);

impl fmt::Display for Anonymous {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.0, self.1)
    }
}

impl FromStr for Anonymous {
    type Err = String;

    fn from_str(text: &str) -> Result<Anonymous, String> {
        let numbers = text.split_once(':').map(|(uid, gid)| (uid.parse(), gid.parse()));
        match numbers {
            Some((Ok(uid), Ok(gid))) => Ok(Anonymous(uid, gid)),
            _ => Err("it is two numbers, as 65534:65534".to_owned()),
        }
    }
}

/// Serves, lists, stops or installs.
pub(crate) fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    if args.stop {
        return stop(&global.dir()?, args.listen);
    }
    if args.what.is_empty() {
        return list(args, &global.dir()?);
    }
    check(args)?;
    if let Some(directory) = &args.install {
        return install(args, directory);
    }
    match args.foreground {
        true => mount_server::run(args.announce, serve(args, global)),
        false => in_background(args, global),
    }
}

/// Refuses arguments that contradict each other.
fn check(args: &Args) -> Result<(), Failure> {
    let wrong = |why: &str| {
        Failure::new(Exit::Usage, format!("cannot serve {}", args.what[0])).because(why)
    };
    if args.what.len() > 1 && args.path.is_some() {
        return Err(wrong("--as goes with one volume or TFS"));
    }
    if args.what.len() > 1 && args.install.is_some() {
        return Err(wrong("--install goes with one volume or TFS"));
    }
    if !args.listen.ip().is_loopback() && args.allow.is_empty() && args.install.is_none() {
        return Err(wrong(
            "other machines can connect to that address, and none of them is allowed",
        )
        .advice("Name those that are: --allow 192.0.2.0/24."));
    }
    let this_machine = args.listen.ip();
    let is_for_this = args.allow.iter().any(|Allowed(network)| network.contains(this_machine));
    if this_machine.is_loopback()
        && !args.allow.is_empty()
        && !is_for_this
        && args.install.is_none()
    {
        return Err(wrong("no machine that is allowed can connect to a loopback address")
            .advice("Name the address that they use: --listen 192.0.2.7:2049."));
    }
    if args.listen.port() == 0 && !args.foreground {
        return Err(wrong("without --foreground clients must know the port").advice("Name one."));
    }
    let mut paths: Vec<String> = Vec::new();
    for what in &args.what {
        let path = args.path_of(what)?;
        if paths.contains(&path) {
            return Err(wrong(&format!("two would be mounted as {path}")));
        }
        paths.push(path);
        if let Exported::Volume(target) = what {
            args.volume.check(target, &format!("cannot serve {what}"))?;
        }
    }
    if !args.has_volume() && args.volume.is_any_given() {
        return Err(wrong("it is a TFS, and that option is for volumes"));
    }
    Ok(())
}

// --- in the server ---------------------------------------------------------------------

async fn serve(args: &Args, global: &Global) -> Result<(), Failure> {
    let what = format!("cannot serve on {}", args.listen);
    let dir = global.dir()?;
    let listener = listen(&dir, args.listen, &what).await?;
    let address = listener.local_addr().map_err(|error| Failure::io(&what, &error))?;
    let told = args.what.iter().map(|what| {
        let path = args.path_of(what)?;
        Ok(ExportRecord { path, what: what.to_string(), read_only: args.read_only, status: None })
    });
    let port_mapper = match args.port_mapper {
        true => Some(bind_port_mapper(address.ip()).await?),
        false => None,
    };
    let server = Server::claim(&dir, address, told.collect::<Result<_, Failure>>()?, &what)?;
    let key = handle_key(&dir, &what)?;
    let is_of_address = |what: &Exported| matches!(what, Exported::Volume(Target::Address(_)));
    let read_key = match args.what.iter().any(is_of_address) {
        true => args.read_key.given()?,
        false => Given::default(),
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    // Another one at each start.
    let verifier = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
    let service = Service::new(Options { key, verifier, limit: LIMIT });
    let mut open: Vec<OpenExport> = Vec::new();
    let served = async {
        for what in &args.what {
            open.push(OpenExport::open(what, args, &read_key, global).await?);
        }
        for (at, export) in open.iter().enumerate() {
            if let Some(same) = open[..at].iter().find(|other| other.id() == export.id()) {
                let what = format!("cannot serve {}", export.path());
                return Err(Failure::new(Exit::Failed, what).because(format!(
                    "it is the same volume or TFS as {}, or a copy of it",
                    same.path()
                )));
            }
            service.add(export.export());
        }
        if args.announce {
            mount_server::announce_ready();
        } else {
            let described = |export: &OpenExport| args.described(address, export.path());
            for line in open.iter().flat_map(described) {
                note!("{line}");
            }
            note!("Ctrl-C ends it");
        }
        until_told(&service, (listener, port_mapper), &server, &open)
            .await
            .map_err(|error| Failure::io(format!("serving on {address} failed"), &error))
    };
    let mut ended = served.await;
    for export in open {
        let end = export.end().await;
        ended = ended.and(end);
    }
    ended
}

/// Serves until a signal comes; a second one ends the process.
async fn until_told(
    service: &std::sync::Arc<Service>,
    (listener, port_mapper): (TcpListener, Option<(TcpListener, UdpSocket)>),
    server: &Server,
    open: &[OpenExport],
) -> std::io::Result<()> {
    let (end, ended) = watch::channel(false);
    let mut signals = Signals::new();
    let telling = async {
        let mut every = tokio::time::interval(TELL_EVERY);
        loop {
            every.tick().await;
            let exports = futures_util::future::join_all(open.iter().map(OpenExport::told)).await;
            server.tell(exports, &service.clients());
        }
    };
    // Each READ takes a buffer of up to a mebibyte, many at a time.
    heap::keep();
    let trimming = tokio::spawn(heap::give_back());
    let port = listener.local_addr()?.port();
    if let Some(sockets) = port_mapper {
        let mapping = port_mapper::serve_port_mapper(service.clone(), sockets, port, ended.clone());
        tokio::spawn(mapping);
    }
    let serving = nfs::serve(service.clone(), listener, ended);
    let served = async {
        tokio::pin!(serving);
        tokio::select! {
            served = &mut serving => return served,
            () = signals.next() => {}
        }
        signals.exit_at_next();
        end.send_replace(true);
        serving.await
    };
    let served = tokio::select! {
        served = served => served,
        never = telling => never,
    };
    trimming.abort();
    served
}

/// Takes the address, or says who has it.
async fn listen(dir: &Path, address: SocketAddr, what: &str) -> Result<TcpListener, Failure> {
    match TcpListener::bind(address).await {
        Ok(listener) => Ok(listener),
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
            let running = servers::running(dir).into_iter().find(|other| other.listen == address);
            let failure = Failure::new(Exit::Failed, what);
            Err(match running {
                Some(other) => failure
                    .because(format!("`atoll nfs` serves {} there already", other.paths()))
                    .advice(format!(
                        "`atoll nfs --stop --listen {address}` ends it; one command can serve all."
                    )),
                None => failure
                    .because("another program uses that port, perhaps the kernel's NFS server")
                    .advice(format!("Take another one: --listen {}:20049", address.ip())),
            })
        }
        Err(error) => Err(Failure::io(what, &error)),
    }
}

/// Binds the TCP and UDP sockets of the port mapper.
async fn bind_port_mapper(address: IpAddr) -> Result<(TcpListener, UdpSocket), Failure> {
    let at = SocketAddr::new(address, port_mapper::PORT);
    let bound = async { Ok((TcpListener::bind(at).await?, UdpSocket::bind(at).await?)) };
    bound.await.map_err(|error: std::io::Error| {
        let failure = Failure::io(format!("cannot serve on {at}"), &error);
        match error.kind() {
            std::io::ErrorKind::AddrInUse => failure.advice(
                "Another port mapper (rpcbind) runs; without --port-mapper clients name ports.",
            ),
            std::io::ErrorKind::PermissionDenied => failure.advice("Ports below 1024 are root's."),
            _ => failure,
        }
    })
}

/// The secret with which handles are sealed: clients go on with theirs after a restart.
fn handle_key(dir: &Path, what: &str) -> Result<HandleKey, Failure> {
    let path = servers::place(dir).join("handles.key");
    let failed = |error: &dyn fmt::Display| Failure::new(Exit::Failed, what).because(error);
    let found = read_secret(&path).map_err(|error| failed(&error))?;
    let secret = match found {
        Some(secret) => secret,
        None => {
            let secret = tfs::random_bytes::<32>()?.to_vec();
            create_atomically(&path, &secret).map_err(|error| failed(&error))?;
            secret
        }
    };
    let secret = secret.try_into().map_err(|_| {
        failed(&format!("{} is damaged", path.display()))
            .advice("Remove it; clients then mount anew.")
    })?;
    Ok(HandleKey::new(secret))
}

// --- in the command --------------------------------------------------------------------

fn in_background(args: &Args, global: &Global) -> Result<(), Failure> {
    let what = format!("cannot serve on {}", args.listen);
    if args.needs_node(global)? {
        until_done(async {
            let connected = connection::impatient(global).await.map(drop);
            connected.map_err(|failure| export::file_of_that_name(failure, &args.what[0]))
        })?;
    }
    let dir = global.dir()?;
    let failed = |error: &std::io::Error| Failure::io(&what, error);
    let program = std::env::current_exe().map_err(|error| failed(&error))?;
    let mut command = Command::new(program);
    command.arg("--dir").arg(&dir).args(["nfs", "--foreground", "--announce"]);
    command.arg("--listen").arg(args.listen.to_string());
    command.args(args.path.iter().flat_map(|path| ["--as", path]));
    for Allowed(network) in &args.allow {
        command.arg("--allow").arg(network.to_string());
    }
    let squash = clap::ValueEnum::to_possible_value(&args.squash).expect("none is skipped");
    command.args(["--squash", squash.get_name(), "--anonymous", &args.anonymous.to_string()]);
    command.args(args.read_only.then_some("--read-only"));
    command.args(args.any_port.then_some("--any-port"));
    command.args(args.answers_early.then_some("--async"));
    command.args(args.port_mapper.then_some("--port-mapper"));
    command.args(args.volume.to_arguments());
    command.args(std::iter::repeat_n("-v", global.verbose.into()));
    // The server's arguments and environment can be looked at for as long as it runs.
    command.env_remove(read_key::VARIABLE);
    let key_text = export::read_key_for(&args.what, &args.read_key, &what)?;
    if key_text.is_some() {
        command.args(["--read-key", "-", "--read-key-optional"]);
    }
    command.arg("--");
    for what in &args.what {
        command.arg(what.argument().map_err(|error| failed(&error))?);
    }
    let place = args.listen.to_string();
    let (log_path, log) = mount_server::open_log(&dir, "nfs", place.as_bytes());
    let advice = match log {
        Ok(log) => {
            command.stderr(Stdio::from(log));
            format!("The server's log is {}.", log_path.display())
        }
        Err(error) => {
            command.stderr(Stdio::null());
            note!("it is served without its log {}: {error}", log_path.display());
            "`--foreground` shows what it has to say.".to_owned()
        }
    };
    mount_server::start(command, key_text.unwrap_or_default().as_bytes(), &what, &advice)?;
    if !global.quiet {
        let lines = args.what.iter().map(|what| {
            let path = args.path_of(what)?;
            Ok(args.described(args.listen, &path))
        });
        for line in lines.collect::<Result<Vec<_>, Failure>>()?.concat() {
            note!("{line}");
        }
    }
    Ok(())
}

fn list(args: &Args, dir: &Path) -> Result<(), Failure> {
    let running = servers::running(dir);
    let none = || "nothing is served; `atoll nfs NAME` serves a volume".to_owned();
    let lines = match running.is_empty() {
        true => vec![none()],
        false => running.iter().flat_map(ServerRecord::lines).collect(),
    };
    output::show(args.json, &running, lines)
}

fn stop(dir: &Path, address: SocketAddr) -> Result<(), Failure> {
    let what = format!("nothing is served on {address}");
    let running = servers::running(dir);
    let Some(server) = running.iter().find(|server| server.listen == address) else {
        let failure = Failure::new(Exit::NotFound, what);
        let others: Vec<String> = running.iter().map(|server| server.listen.to_string()).collect();
        return Err(match others.first() {
            None => failure,
            Some(other) => failure
                .because(format!("there are servers on {}", others.join(", ")))
                .advice(format!("atoll nfs --stop --listen {other}")),
        });
    };
    let pid = rustix::process::Pid::from_raw(server.pid.cast_signed());
    let pid = pid.ok_or_else(|| Failure::new(Exit::Failed, "the server told no process"))?;
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).map_err(|error| {
        Failure::io(format!("cannot end process {}", server.pid), &error.into())
    })?;
    let mut is_said = false;
    let begin = std::time::Instant::now();
    while servers::running(dir).iter().any(|other| other.pid == server.pid) {
        if !is_said && begin.elapsed() > Duration::from_secs(2) {
            note!("waiting until what clients have written is stored");
            is_said = true;
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

fn install(args: &Args, directory: &Path) -> Result<(), Failure> {
    let path = args.path_of(&args.what[0])?;
    let directory = std::path::absolute(directory)
        .map_err(|error| Failure::io(format!("cannot find {}", directory.display()), &error))?;
    let line = mount_line::fstab(args.listen, &path, &directory);
    fstab::add(&args.fstab, &directory, &line)?;
    let shown = shell_word(&directory.display().to_string());
    note!("{}: {line}", args.fstab.display());
    note!("while `atoll nfs {}` runs, `mount {shown}` mounts it", args.what[0]);
    Ok(())
}

/// Makes the directory where servers tell of themselves.
fn make_place(dir: &Path, what: &str) -> Result<(), Failure> {
    global::make_private(&servers::place(dir), what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_and_nobodies_are_read() {
        for good in ["192.0.2.7", "192.0.2.0/24", "::1", "fd00::/8", "0.0.0.0/0"] {
            good.parse::<Allowed>().expect(good);
        }
        for bad in ["", "host", "192.0.2.0/33", "192.0.2.0/", "/24", "192.0.2"] {
            bad.parse::<Allowed>().expect_err(bad);
        }
        assert_eq!("0:5".parse(), Ok(Anonymous(0, 5)));
        for bad in ["", "1", "a:b", "-1:0", "1:2:3"] {
            bad.parse::<Anonymous>().expect_err(bad);
        }
    }
}
