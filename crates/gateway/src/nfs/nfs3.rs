//! The types of NFS version 3 (RFC 1813) and of its mount protocol (appendix I), as data.
//!
//! Names are the RFC's, without their number; a result is [`Reply`]: what succeeded, or a status with what a failure
//! carries. What the RFC has without limit (names, paths) has one here, so that a peer cannot make much of it; a name that is
//! longer than a file system allows is told by the procedures, as `NFS3ERR_NAMETOOLONG`.

use atoll_vfs::{Errno, FileKind, FileTime};
use bytes::Bytes;

use super::xdr::{Opaque, Reader, Writer, Xdr, XdrError, xdr_enum, xdr_struct};

/// `NFS_PROGRAM` and its version.
pub const NFS: (u32, u32) = (100_003, 3);
/// `MOUNT_PROGRAM` and its version.
pub const MOUNT: (u32, u32) = (100_005, 3);

/// The longest name of a call, bytes (Linux `PATH_MAX`).
pub const MAX_NAME_BYTES: usize = 4096;
/// The longest target of a symbolic link or path, bytes.
pub const MAX_PATH_BYTES: usize = 4096;
/// Most bytes of one READ or WRITE.
pub const MAX_DATA_BYTES: usize = 1 << 20;

/// A name in a directory.
pub type Name = Opaque<MAX_NAME_BYTES>;
/// The target of a symbolic link.
pub type Path = Opaque<MAX_PATH_BYTES>;
/// A file handle (`nfs_fh3`).
pub type FileHandle = Opaque<64>;
/// `cookieverf3`, `createverf3`, `writeverf3`.
pub type Verifier = [u8; 8];

xdr_enum! {
    /// The procedures of NFS.
    Procedure {
        /// Does nothing.
        Null = 0,
        /// Attributes.
        GetAttr = 1,
        /// Changes attributes.
        SetAttr = 2,
        /// Finds a name.
        Lookup = 3,
        /// What the caller may do.
        Access = 4,
        /// Target of a symbolic link.
        ReadLink = 5,
        /// Reads a file.
        Read = 6,
        /// Writes a file.
        Write = 7,
        /// Makes a file.
        Create = 8,
        /// Makes a directory.
        MkDir = 9,
        /// Makes a symbolic link.
        SymLink = 10,
        /// Makes a special file.
        MkNod = 11,
        /// Removes a name.
        Remove = 12,
        /// Removes a directory.
        RmDir = 13,
        /// Renames.
        Rename = 14,
        /// Makes another name.
        Link = 15,
        /// Lists names.
        ReadDir = 16,
        /// Lists names with attributes and handles.
        ReadDirPlus = 17,
        /// Sizes of the file system.
        FsStat = 18,
        /// Limits of the server.
        FsInfo = 19,
        /// Limits of the file system.
        PathConf = 20,
        /// Makes what was written durable.
        Commit = 21,
    }
    /// The procedures of the mount protocol.
    MountProcedure {
        /// Does nothing.
        Null = 0,
        /// The handle of an export.
        Mnt = 1,
        /// Who has mounted what.
        Dump = 2,
        /// Forgets a mount.
        Umnt = 3,
        /// Forgets all mounts of a client.
        UmntAll = 4,
        /// The exports.
        Export = 5,
    }
    /// `nfsstat3`.
    Status {
        /// Success.
        Ok = 0,
        /// Not the owner.
        Perm = 1,
        /// No such name.
        NoEnt = 2,
        /// An error of the disk or the network behind.
        Io = 5,
        /// No such device.
        NxIo = 6,
        /// Not permitted.
        Acces = 13,
        /// The name exists.
        Exist = 17,
        /// Another file system.
        XDev = 18,
        /// No such device.
        NoDev = 19,
        /// Not a directory.
        NotDir = 20,
        /// A directory.
        IsDir = 21,
        /// Invalid argument.
        Inval = 22,
        /// Too large.
        FBig = 27,
        /// No space left.
        NoSpc = 28,
        /// Read-only.
        RoFs = 30,
        /// Too many links.
        MLink = 31,
        /// The name is too long.
        NameTooLong = 63,
        /// The directory is not empty.
        NotEmpty = 66,
        /// Over the quota.
        DQuot = 69,
        /// The file is gone.
        Stale = 70,
        /// No handle of this server.
        BadHandle = 10_001,
        /// The file has changed since.
        NotSync = 10_002,
        /// The cookie means nothing any more.
        BadCookie = 10_003,
        /// Not supported.
        NotSupp = 10_004,
        /// The buffer is too small.
        TooSmall = 10_005,
        /// The server is at fault.
        ServerFault = 10_006,
        /// This kind of file cannot be made.
        BadType = 10_007,
        /// Try again later.
        Jukebox = 10_008,
    }
    /// `ftype3`.
    FileType {
        /// Regular file.
        Reg = 1,
        /// Directory.
        Dir = 2,
        /// Block device.
        Blk = 3,
        /// Character device.
        Chr = 4,
        /// Symbolic link.
        Lnk = 5,
        /// Socket.
        Sock = 6,
        /// FIFO.
        Fifo = 7,
    }
    /// `stable_how`: how durable a write is.
    Stable {
        /// At COMMIT.
        Unstable = 0,
        /// The data is durable.
        DataSync = 1,
        /// All is.
        FileSync = 2,
    }
}

xdr_struct! {
    /// `nfstime3`.
    Time {
        /// Seconds since 1970.
        seconds: u32,
        /// Nanoseconds.
        nseconds: u32,
    }
    /// `specdata3`: a device's numbers.
    SpecData {
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    }
    /// `fattr3`.
    Attributes {
        /// What the file is.
        kind: FileType,
        /// Permission bits, with set-id and sticky bits.
        mode: u32,
        /// Number of names.
        nlink: u32,
        /// Owner.
        uid: u32,
        /// Group.
        gid: u32,
        /// Length, bytes.
        size: u64,
        /// Space taken, bytes.
        used: u64,
        /// Of a device.
        rdev: SpecData,
        /// Number of the file system.
        fsid: u64,
        /// Number of the file.
        fileid: u64,
        /// Last access.
        atime: Time,
        /// Last change of contents.
        mtime: Time,
        /// Last change of contents or attributes.
        ctime: Time,
    }
    /// `wcc_attr`: by what clients tell that a file has not changed.
    WccAttr {
        /// Length, bytes.
        size: u64,
        /// Last change of contents.
        mtime: Time,
        /// Last change of contents or attributes.
        ctime: Time,
    }
    /// `wcc_data`: a file before and after a change, where nothing came between.
    #[derive(Default)]
    WccData {
        /// Before.
        before: Option<WccAttr>,
        /// After.
        after: Option<Attributes>,
    }
    /// `diropargs3`: a name in a directory.
    DirOp {
        /// The directory.
        dir: FileHandle,
        /// The name.
        name: Name,
    }
    /// `sattr3`: what to change.
    SetAttributes {
        /// Permission bits.
        mode: Option<u32>,
        /// Owner.
        uid: Option<u32>,
        /// Group.
        gid: Option<u32>,
        /// Length, bytes.
        size: Option<u64>,
        /// Access time.
        atime: SetTime,
        /// Time of the contents.
        mtime: SetTime,
    }
    /// Of SETATTR.
    SetAttrArgs {
        /// Which file.
        object: FileHandle,
        /// What to change.
        changes: SetAttributes,
        /// Only if this is the file's `ctime`.
        guard: Option<Time>,
    }
    /// Of ACCESS.
    AccessArgs {
        /// Which file.
        object: FileHandle,
        /// What is asked for.
        access: u32,
    }
    /// Of READ.
    ReadArgs {
        /// Which file.
        file: FileHandle,
        /// From where.
        offset: u64,
        /// How many bytes at most.
        count: u32,
    }
    /// Of WRITE.
    WriteArgs {
        /// Which file.
        file: FileHandle,
        /// Where to.
        offset: u64,
        /// How many bytes.
        count: u32,
        /// How durable.
        stable: Stable,
        /// The bytes.
        data: Opaque<MAX_DATA_BYTES>,
    }
    /// Of CREATE.
    CreateArgs {
        /// Where.
        at: DirOp,
        /// What if the name exists.
        how: CreateHow,
    }
    /// Of MKDIR.
    MkDirArgs {
        /// Where.
        at: DirOp,
        /// Its attributes.
        attributes: SetAttributes,
    }
    /// Of SYMLINK.
    SymLinkArgs {
        /// Where.
        at: DirOp,
        /// Its attributes.
        attributes: SetAttributes,
        /// Its target.
        target: Path,
    }
    /// Of MKNOD.
    MkNodArgs {
        /// Where.
        at: DirOp,
        /// What.
        what: MkNodData,
    }
    /// Of RENAME.
    RenameArgs {
        /// The name.
        from: DirOp,
        /// What it becomes.
        to: DirOp,
    }
    /// Of LINK.
    LinkArgs {
        /// Which file.
        file: FileHandle,
        /// Its new name.
        link: DirOp,
    }
    /// Of READDIR.
    ReadDirArgs {
        /// Which directory.
        dir: FileHandle,
        /// After which entry; 0: from the beginning.
        cookie: u64,
        /// What came with the cookie.
        verifier: Verifier,
        /// How long the reply may be, bytes.
        count: u32,
    }
    /// Of READDIRPLUS.
    ReadDirPlusArgs {
        /// Which directory.
        dir: FileHandle,
        /// After which entry; 0: from the beginning.
        cookie: u64,
        /// What came with the cookie.
        verifier: Verifier,
        /// How long names, numbers and cookies may be in all, bytes.
        dir_count: u32,
        /// How long the reply may be, bytes.
        max_count: u32,
    }
    /// Of COMMIT.
    CommitArgs {
        /// Which file.
        file: FileHandle,
        /// From where.
        offset: u64,
        /// How many bytes; 0: all that follow.
        count: u32,
    }
    /// Reply of LOOKUP.
    LookupOk {
        /// The file.
        object: FileHandle,
        /// Its attributes.
        attributes: Option<Attributes>,
        /// The directory's.
        dir: Option<Attributes>,
    }
    /// Reply of CREATE, MKDIR, SYMLINK and MKNOD.
    Created {
        /// What was made.
        object: Option<FileHandle>,
        /// Its attributes.
        attributes: Option<Attributes>,
        /// The directory.
        dir: WccData,
    }
    /// Reply of WRITE.
    WriteOk {
        /// The file.
        file: WccData,
        /// How many bytes were taken.
        count: u32,
        /// How durable they are.
        committed: Stable,
        /// Changes when unstable writes may be lost.
        verifier: Verifier,
    }
    /// Reply of COMMIT.
    CommitOk {
        /// The file.
        file: WccData,
        /// As in WRITE.
        verifier: Verifier,
    }
    /// Reply of FSSTAT.
    FsStatOk {
        /// Of the root.
        attributes: Option<Attributes>,
        /// Bytes in all.
        total_bytes: u64,
        /// Free.
        free_bytes: u64,
        /// Free for the caller.
        available_bytes: u64,
        /// Files in all.
        total_files: u64,
        /// That could be made.
        free_files: u64,
        /// By the caller.
        available_files: u64,
        /// For how many seconds this will hold.
        invarsec: u32,
    }
    /// Reply of FSINFO.
    FsInfoOk {
        /// Of the root.
        attributes: Option<Attributes>,
        /// Longest READ.
        rtmax: u32,
        /// Best READ.
        rtpref: u32,
        /// READs should be multiples of it.
        rtmult: u32,
        /// Longest WRITE.
        wtmax: u32,
        /// Best WRITE.
        wtpref: u32,
        /// WRITEs should be multiples of it.
        wtmult: u32,
        /// Best READDIR.
        dtpref: u32,
        /// Longest file, bytes.
        max_file_bytes: u64,
        /// How exactly times are kept.
        time_delta: Time,
        /// [`HAS_LINKS`] and so on.
        properties: u32,
    }
    /// Reply of PATHCONF.
    PathConfOk {
        /// Of the file.
        attributes: Option<Attributes>,
        /// Most names of a file.
        link_max: u32,
        /// Longest name, bytes.
        name_max: u32,
        /// Longer names are refused, not cut.
        no_trunc: bool,
        /// Only root changes owners.
        chown_restricted: bool,
        /// `A` and `a` are one name.
        case_insensitive: bool,
        /// Names keep their case.
        case_preserving: bool,
    }
}

/// Properties of FSINFO: hard links, symbolic links, one PATHCONF for all files, times can be set.
pub const HAS_LINKS: u32 = 0x1;
#[allow(missing_docs)]
pub const HAS_SYMLINKS: u32 = 0x2;
#[allow(missing_docs)]
pub const IS_HOMOGENEOUS: u32 = 0x8;
#[allow(missing_docs)]
pub const CAN_SET_TIME: u32 = 0x10;

/// Rights of ACCESS.
pub mod access {
    #![allow(missing_docs)]
    pub const READ: u32 = 0x01;
    pub const LOOKUP: u32 = 0x02;
    pub const MODIFY: u32 = 0x04;
    pub const EXTEND: u32 = 0x08;
    pub const DELETE: u32 = 0x10;
    pub const EXECUTE: u32 = 0x20;
}

/// `set_atime`, `set_mtime`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SetTime {
    /// Stays.
    Leave,
    /// The server's time.
    ServerTime,
    /// This time.
    To(Time),
}

impl Xdr for SetTime {
    fn read(from: &mut Reader) -> Result<SetTime, XdrError> {
        match from.take::<u32>()? {
            0 => Ok(SetTime::Leave),
            1 => Ok(SetTime::ServerTime),
            2 => Ok(SetTime::To(from.take()?)),
            _ => Err(XdrError::Invalid),
        }
    }

    fn write(&self, to: &mut Writer) {
        match self {
            SetTime::Leave => to.put(&0u32),
            SetTime::ServerTime => to.put(&1u32),
            SetTime::To(time) => to.put(&2u32).put(time),
        };
    }
}

/// `createhow3`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CreateHow {
    /// A file that exists is taken.
    Unchecked(SetAttributes),
    /// A file that exists is an error.
    Guarded(SetAttributes),
    /// The same, but for a file that a call with this verifier has made.
    Exclusive(Verifier),
}

impl Xdr for CreateHow {
    fn read(from: &mut Reader) -> Result<CreateHow, XdrError> {
        match from.take::<u32>()? {
            0 => Ok(CreateHow::Unchecked(from.take()?)),
            1 => Ok(CreateHow::Guarded(from.take()?)),
            2 => Ok(CreateHow::Exclusive(from.take()?)),
            _ => Err(XdrError::Invalid),
        }
    }

    fn write(&self, to: &mut Writer) {
        match self {
            CreateHow::Unchecked(attributes) => to.put(&0u32).put(attributes),
            CreateHow::Guarded(attributes) => to.put(&1u32).put(attributes),
            CreateHow::Exclusive(verifier) => to.put(&2u32).put(verifier),
        };
    }
}

/// `mknoddata3`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MkNodData {
    /// A device.
    Device(FileType, SetAttributes, SpecData),
    /// A socket or FIFO.
    Plain(FileType, SetAttributes),
    /// Another kind, which MKNOD does not make.
    Other(FileType),
}

impl Xdr for MkNodData {
    fn read(from: &mut Reader) -> Result<MkNodData, XdrError> {
        Ok(match from.take()? {
            kind @ (FileType::Chr | FileType::Blk) => {
                MkNodData::Device(kind, from.take()?, from.take()?)
            }
            kind @ (FileType::Sock | FileType::Fifo) => MkNodData::Plain(kind, from.take()?),
            kind => MkNodData::Other(kind),
        })
    }

    fn write(&self, to: &mut Writer) {
        match self {
            MkNodData::Device(kind, attributes, device) => to.put(kind).put(attributes).put(device),
            MkNodData::Plain(kind, attributes) => to.put(kind).put(attributes),
            MkNodData::Other(kind) => to.put(kind),
        };
    }
}

/// A result: what succeeded, or a status and what comes with a failure.
pub type Reply<T, F> = Result<T, (Status, F)>;

impl<T: Xdr, F: Xdr> Xdr for Reply<T, F> {
    fn read(from: &mut Reader) -> Result<Reply<T, F>, XdrError> {
        Ok(match from.take()? {
            Status::Ok => Ok(from.take()?),
            status => Err((status, from.take()?)),
        })
    }

    fn write(&self, to: &mut Writer) {
        match self {
            Ok(value) => to.put(&Status::Ok).put(value),
            Err((status, value)) => to.put(status).put(value),
        };
    }
}

/// Reply of READ. The bytes are sent from where they lie.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReadOk {
    /// Of the file.
    pub attributes: Option<Attributes>,
    /// Whether it ends here.
    pub is_end: bool,
    /// The bytes.
    pub data: Bytes,
}

impl Xdr for ReadOk {
    fn read(from: &mut Reader) -> Result<ReadOk, XdrError> {
        let attributes = from.take()?;
        let (count, is_end): (u32, bool) = (from.take()?, from.take()?);
        let Opaque(data) = from.take::<Opaque<MAX_DATA_BYTES>>()?;
        if data.len() != count as usize {
            return Err(XdrError::Invalid);
        }
        Ok(ReadOk { attributes, is_end, data })
    }

    fn write(&self, to: &mut Writer) {
        let count = u32::try_from(self.data.len()).expect("at most a MiB");
        to.put(&self.attributes).put(&count).put(&self.is_end).payload(self.data.clone());
    }
}

impl Time {
    /// Of a file's time; what 32 bits of seconds cannot hold becomes the nearest that they can.
    pub fn of(time: FileTime) -> Time {
        let seconds = u32::try_from(time.secs.max(0)).unwrap_or(u32::MAX);
        let nseconds = if i64::from(seconds) == time.secs { time.nanos } else { 0 };
        Time { seconds, nseconds }
    }

    /// As a file's time.
    pub fn to_file_time(&self) -> FileTime {
        FileTime { secs: i64::from(self.seconds), nanos: self.nseconds.min(999_999_999) }
    }
}

impl FileType {
    /// Of a file.
    pub fn of(kind: FileKind) -> FileType {
        match kind {
            FileKind::Regular => FileType::Reg,
            FileKind::Directory => FileType::Dir,
            FileKind::Symlink => FileType::Lnk,
            FileKind::Fifo => FileType::Fifo,
            FileKind::Socket => FileType::Sock,
            FileKind::CharDevice => FileType::Chr,
            FileKind::BlockDevice => FileType::Blk,
        }
    }
}

impl Status {
    /// What a client is told of an error. The RFC has few of them.
    pub fn of(errno: Errno) -> Status {
        match errno {
            Errno::EPERM => Status::Perm,
            Errno::ENOENT => Status::NoEnt,
            Errno::ENXIO => Status::NxIo,
            Errno::EACCES => Status::Acces,
            Errno::EEXIST => Status::Exist,
            Errno::EXDEV => Status::XDev,
            Errno::ENOTDIR => Status::NotDir,
            Errno::EISDIR => Status::IsDir,
            Errno::EINVAL | Errno::ELOOP => Status::Inval,
            Errno::EFBIG | Errno::EOVERFLOW => Status::FBig,
            Errno::ENOSPC => Status::NoSpc,
            Errno::EROFS => Status::RoFs,
            Errno::EMLINK => Status::MLink,
            Errno::ENAMETOOLONG => Status::NameTooLong,
            Errno::ENOTEMPTY => Status::NotEmpty,
            Errno::EDQUOT => Status::DQuot,
            Errno::ESTALE => Status::Stale,
            Errno::EOPNOTSUPP | Errno::ENOSYS => Status::NotSupp,
            Errno::EAGAIN | Errno::EBUSY | Errno::ENOLCK => Status::Jukebox,
            // Nobody knows whether it was done: what clients are told depends on whether it was to change something.
            Errno::ETIMEDOUT | Errno::EHOSTUNREACH => Status::ServerFault,
            _ => Status::Io,
        }
    }
}
