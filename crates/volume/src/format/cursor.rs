//! Reading numbers and slices off a block, and writing them.
//!
//! All numbers are big-endian.

use atoll_key::BlockHash;
use atoll_vfs::FileTime;
use bytes::Bytes;

use super::FormatError;

/// Fields from this tag on must be known to read what has them.
const FIRST_REQUIRED_TAG: u8 = 128;

/// What is left of a block that is being read. Slices share the block's memory.
pub(crate) struct Cursor {
    rest: Bytes,
}

impl Cursor {
    pub(crate) fn new(block: &Bytes) -> Cursor {
        Cursor { rest: block.clone() }
    }

    /// Checks the first five bytes: the block's magic and layout 1.
    pub(crate) fn header(
        block: &Bytes,
        magic: &[u8; 4],
        name: &'static str,
    ) -> Result<Cursor, FormatError> {
        let mut cursor = Cursor::new(block);
        if cursor.rest.len() < 4 || &cursor.rest[..4] != magic {
            return Err(FormatError::WrongMagic(name));
        }
        cursor.take(4)?;
        match cursor.u8()? {
            1 => Ok(cursor),
            other => Err(FormatError::UnknownLayout(other)),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.rest.len()
    }

    pub(crate) fn take(&mut self, count: usize) -> Result<Bytes, FormatError> {
        if count > self.rest.len() {
            return Err(FormatError::Truncated);
        }
        Ok(self.rest.split_to(count))
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], FormatError> {
        let Some(bytes) = self.rest.first_chunk::<N>() else {
            return Err(FormatError::Truncated);
        };
        let bytes = *bytes;
        bytes::Buf::advance(&mut self.rest, N);
        Ok(bytes)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, FormatError> {
        Ok(self.array::<1>()?[0])
    }

    pub(crate) fn u16(&mut self) -> Result<u16, FormatError> {
        Ok(u16::from_be_bytes(self.array()?))
    }

    pub(crate) fn u32(&mut self) -> Result<u32, FormatError> {
        Ok(u32::from_be_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, FormatError> {
        Ok(u64::from_be_bytes(self.array()?))
    }

    pub(crate) fn hash(&mut self) -> Result<BlockHash, FormatError> {
        Ok(BlockHash(self.array()?))
    }

    /// A hash, or all zeros for none.
    pub(crate) fn optional_hash(&mut self) -> Result<Option<BlockHash>, FormatError> {
        Ok(Some(self.hash()?).filter(|hash| hash.0 != [0; 32]))
    }

    pub(crate) fn mode(&mut self) -> Result<u32, FormatError> {
        match self.u16()? {
            mode if mode <= 0o7777 => Ok(u32::from(mode)),
            mode => Err(FormatError::BadMode(mode)),
        }
    }

    pub(crate) fn time(&mut self) -> Result<FileTime, FormatError> {
        let secs = i64::from_be_bytes(self.array()?);
        match self.u32()? {
            nanos if nanos < 1_000_000_000 => Ok(FileTime { secs, nanos }),
            nanos => Err(FormatError::BadTime(nanos)),
        }
    }

    /// Text of at most 255 bytes behind its length.
    pub(crate) fn text(&mut self) -> Result<String, FormatError> {
        let len = usize::from(self.u8()?);
        let text = std::str::from_utf8(&self.take(len)?).map(str::to_owned);
        text.map_err(|_| FormatError::BadReference("a label is not text"))
    }

    /// Reads tagged fields to the end: 1 tag, 2 length, value; tags strictly ascending.
    pub(crate) fn fields(
        mut self,
        mut take: impl FnMut(u8, &Bytes) -> Result<(), FormatError>,
    ) -> Result<(), FormatError> {
        let mut last_tag = 0;
        while self.len() > 0 {
            let tag = self.u8()?;
            let len = usize::from(self.u16()?);
            let value = self.take(len)?;
            if tag <= last_tag {
                return Err(FormatError::BadReference("the root's fields are out of order"));
            }
            last_tag = tag;
            take(tag, &value)?;
        }
        Ok(())
    }

    pub(crate) fn end(self) -> Result<(), FormatError> {
        match self.rest.len() {
            0 => Ok(()),
            left => Err(FormatError::TrailingBytes(left)),
        }
    }
}

/// Reads a field's value to its end.
pub(crate) fn whole<T>(
    value: &Bytes,
    take: impl FnOnce(&mut Cursor) -> Result<T, FormatError>,
) -> Result<T, FormatError> {
    let mut cursor = Cursor::new(value);
    let taken = take(&mut cursor)?;
    cursor.end()?;
    Ok(taken)
}

/// Passes over a field that is not known, if it may be passed over.
pub(crate) fn skip_field(tag: u8) -> Result<(), FormatError> {
    if tag < FIRST_REQUIRED_TAG { Ok(()) } else { Err(FormatError::UnknownFeature(tag)) }
}

pub(crate) fn put_field(out: &mut Vec<u8>, tag: u8, value: &[u8]) {
    out.push(tag);
    out.extend_from_slice(&(value.len() as u16).to_be_bytes());
    out.extend_from_slice(value);
}

/// The first five bytes of a block.
pub(crate) fn put_header(out: &mut Vec<u8>, magic: &[u8; 4]) {
    out.extend_from_slice(magic);
    out.push(1);
}

pub(crate) fn put_mode(out: &mut Vec<u8>, mode: u32) {
    out.extend_from_slice(&((mode & 0o7777) as u16).to_be_bytes());
}

pub(crate) fn put_time(out: &mut Vec<u8>, time: FileTime) {
    out.extend_from_slice(&time.secs.to_be_bytes());
    out.extend_from_slice(&time.nanos.to_be_bytes());
}

pub(crate) fn put_u64(out: &mut Vec<u8>, number: u64) {
    out.extend_from_slice(&number.to_be_bytes());
}

pub(crate) fn put_hash(out: &mut Vec<u8>, hash: Option<&BlockHash>) {
    out.extend_from_slice(hash.map_or(&[0; 32], |hash| &hash.0));
}
