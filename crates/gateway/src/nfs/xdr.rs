//! External data representation (RFC 4506): the bytes of Sun RPC and NFS.
//!
//! Everything is big-endian and a multiple of four bytes long. [`Reader`] takes values from the bytes of one
//! record, and [`Writer`] makes them. The types of a protocol are declared as data, by [`xdr_struct!`] and [`xdr_enum!`].
//!
//! Invariants:
//!
//! - A length that a peer claims is checked against its limit and against the bytes that are there before anything
//!   is taken or allocated: a value never takes more memory than the record that it came in.
//! - Opaque bytes are not copied, in either direction: what is read shares the record's memory, and what is written
//!   by [`Writer::payload`] is sent from where it lies.
//! - Padding must be zero, and what follows the last value is an error ([`Reader::end`]): one value has one form.

use bytes::{Buf, BufMut, Bytes, BytesMut};

/// Why bytes are no value of a type.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum XdrError {
    /// The record ends before the value does.
    Short,
    /// A length is beyond what the type allows.
    TooLong,
    /// A number stands for nothing, or padding is not zero.
    Invalid,
    /// The record does not end with the value.
    Trailing,
}

/// Takes values from the bytes of a record.
#[derive(Clone, Debug)]
pub struct Reader(Bytes);

impl Reader {
    /// Of these bytes.
    pub fn new(bytes: Bytes) -> Reader {
        Reader(bytes)
    }

    /// The next value.
    pub fn take<T: Xdr>(&mut self) -> Result<T, XdrError> {
        T::read(self)
    }

    /// The next `len` bytes and their padding.
    fn bytes(&mut self, len: usize) -> Result<Bytes, XdrError> {
        let padded = len.checked_next_multiple_of(4).ok_or(XdrError::TooLong)?;
        if self.0.len() < padded {
            return Err(XdrError::Short);
        }
        let mut bytes = self.0.split_to(padded);
        let padding = bytes.split_off(len);
        if padding.iter().any(|byte| *byte != 0) {
            return Err(XdrError::Invalid);
        }
        Ok(bytes)
    }

    /// What is left.
    pub fn rest(&self) -> &Bytes {
        &self.0
    }

    /// Nothing may be left.
    pub fn end(&self) -> Result<(), XdrError> {
        if self.0.is_empty() { Ok(()) } else { Err(XdrError::Trailing) }
    }
}

/// The bytes of values, in pieces that are sent one after the other.
#[derive(Debug, Default)]
pub struct Writer {
    done: Vec<Bytes>,
    piece: BytesMut,
}

impl Writer {
    /// Adds a value.
    pub fn put<T: Xdr>(&mut self, value: &T) -> &mut Writer {
        value.write(self);
        self
    }

    /// Adds opaque bytes of variable length without copying them, for the data of a read.
    pub fn payload(&mut self, bytes: Bytes) {
        self.put(&u32::try_from(bytes.len()).expect("a record is shorter than 4 GiB"));
        let padding = bytes.len().next_multiple_of(4) - bytes.len();
        self.done.push(self.piece.split().freeze());
        self.done.push(bytes);
        self.piece.put_bytes(0, padding);
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.done.iter().map(Bytes::len).sum::<usize>() + self.piece.len()
    }

    /// Whether nothing was added.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The pieces.
    pub fn into_pieces(mut self) -> Vec<Bytes> {
        self.done.push(self.piece.freeze());
        self.done
    }

    /// The bytes in one piece, copied where there were several.
    pub fn into_bytes(self) -> Bytes {
        let mut pieces = self.into_pieces();
        if pieces.len() == 1 {
            return pieces.remove(0);
        }
        let mut all = BytesMut::with_capacity(pieces.iter().map(Bytes::len).sum());
        pieces.iter().for_each(|piece| all.extend_from_slice(piece));
        all.freeze()
    }
}

/// A type that has a form in XDR.
pub trait Xdr: Sized {
    /// The value that comes next.
    fn read(from: &mut Reader) -> Result<Self, XdrError>;

    /// Adds the value.
    fn write(&self, to: &mut Writer);
}

impl Xdr for u32 {
    fn read(from: &mut Reader) -> Result<u32, XdrError> {
        from.0.try_get_u32().map_err(|_| XdrError::Short)
    }

    fn write(&self, to: &mut Writer) {
        to.piece.put_u32(*self);
    }
}

impl Xdr for u64 {
    fn read(from: &mut Reader) -> Result<u64, XdrError> {
        from.0.try_get_u64().map_err(|_| XdrError::Short)
    }

    fn write(&self, to: &mut Writer) {
        to.piece.put_u64(*self);
    }
}

impl Xdr for bool {
    fn read(from: &mut Reader) -> Result<bool, XdrError> {
        match from.take::<u32>()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(XdrError::Invalid),
        }
    }

    fn write(&self, to: &mut Writer) {
        u32::from(*self).write(to);
    }
}

/// Opaque bytes of fixed length.
impl<const N: usize> Xdr for [u8; N] {
    fn read(from: &mut Reader) -> Result<[u8; N], XdrError> {
        let bytes = from.bytes(N)?;
        Ok(bytes[..].try_into().expect("as long as was asked for"))
    }

    fn write(&self, to: &mut Writer) {
        to.piece.put_slice(self);
        to.piece.put_bytes(0, N.next_multiple_of(4) - N);
    }
}

/// A value that may be missing: `union switch (bool)`, and the links of a list.
impl<T: Xdr> Xdr for Option<T> {
    fn read(from: &mut Reader) -> Result<Option<T>, XdrError> {
        Ok(if from.take()? { Some(from.take()?) } else { None })
    }

    fn write(&self, to: &mut Writer) {
        to.put(&self.is_some());
        if let Some(value) = self {
            to.put(value);
        }
    }
}

/// Two values, one after the other.
impl<A: Xdr, B: Xdr> Xdr for (A, B) {
    fn read(from: &mut Reader) -> Result<(A, B), XdrError> {
        Ok((from.take()?, from.take()?))
    }

    fn write(&self, to: &mut Writer) {
        to.put(&self.0).put(&self.1);
    }
}

/// Nothing.
impl Xdr for () {
    fn read(_: &mut Reader) -> Result<(), XdrError> {
        Ok(())
    }

    fn write(&self, _: &mut Writer) {}
}

/// Opaque bytes or text of variable length, at most `MAX` bytes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Opaque<const MAX: usize>(pub Bytes);

impl<const MAX: usize> Xdr for Opaque<MAX> {
    fn read(from: &mut Reader) -> Result<Opaque<MAX>, XdrError> {
        let len = usize::try_from(from.take::<u32>()?).map_err(|_| XdrError::TooLong)?;
        if len > MAX {
            return Err(XdrError::TooLong);
        }
        Ok(Opaque(from.bytes(len)?))
    }

    fn write(&self, to: &mut Writer) {
        to.put(&u32::try_from(self.0.len()).expect("a record is shorter than 4 GiB"));
        to.piece.put_slice(&self.0);
        to.piece.put_bytes(0, self.0.len().next_multiple_of(4) - self.0.len());
    }
}

impl<const MAX: usize> From<&[u8]> for Opaque<MAX> {
    fn from(bytes: &[u8]) -> Opaque<MAX> {
        Opaque(Bytes::copy_from_slice(bytes))
    }
}

/// An array of variable length, at most `MAX` values.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct List<T, const MAX: usize>(pub Vec<T>);

impl<T: Xdr, const MAX: usize> Xdr for List<T, MAX> {
    fn read(from: &mut Reader) -> Result<List<T, MAX>, XdrError> {
        let len = usize::try_from(from.take::<u32>()?).map_err(|_| XdrError::TooLong)?;
        // A value takes at least four bytes of the record.
        if len > MAX || len > from.0.len() / 4 {
            return Err(if len > MAX { XdrError::TooLong } else { XdrError::Short });
        }
        (0..len).map(|_| from.take()).collect::<Result<_, _>>().map(List)
    }

    fn write(&self, to: &mut Writer) {
        to.put(&u32::try_from(self.0.len()).expect("few"));
        self.0.iter().for_each(|value| value.write(to));
    }
}

/// Declares a struct whose fields follow one another.
macro_rules! xdr_struct {
    ($($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident: $type:ty,)* })*) => {
        $($(#[$meta])*
        #[derive(Clone, PartialEq, Eq, Debug)]
        pub struct $name {
            $($(#[$field_meta])* pub $field: $type,)*
        }

        impl $crate::nfs::xdr::Xdr for $name {
            fn read(from: &mut $crate::nfs::xdr::Reader) -> Result<$name, $crate::nfs::xdr::XdrError> {
                Ok($name { $($field: from.take()?,)* })
            }

            fn write(&self, to: &mut $crate::nfs::xdr::Writer) {
                $(to.put(&self.$field);)*
            }
        })*
    };
}

/// Declares an enumeration.
macro_rules! xdr_enum {
    ($($(#[$meta:meta])* $name:ident { $($(#[$value_meta:meta])* $value:ident = $number:literal,)* })*) => {
        $($(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[repr(u32)]
        pub enum $name {
            $($(#[$value_meta])* $value = $number,)*
        }

        impl $crate::nfs::xdr::Xdr for $name {
            fn read(from: &mut $crate::nfs::xdr::Reader) -> Result<$name, $crate::nfs::xdr::XdrError> {
                match from.take::<u32>()? {
                    $($number => Ok($name::$value),)*
                    _ => Err($crate::nfs::xdr::XdrError::Invalid),
                }
            }

            fn write(&self, to: &mut $crate::nfs::xdr::Writer) {
                to.put(&(*self as u32));
            }
        })*
    };
}

pub(super) use {xdr_enum, xdr_struct};

#[cfg(test)]
mod tests {
    use super::*;

    fn read<T: Xdr>(bytes: &[u8]) -> Result<T, XdrError> {
        let mut reader = Reader::new(Bytes::copy_from_slice(bytes));
        let value = reader.take()?;
        reader.end()?;
        Ok(value)
    }

    fn written<T: Xdr>(value: &T) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.put(value);
        writer.into_bytes().to_vec()
    }

    #[test]
    fn opaque_bytes_are_padded_to_four_with_zeros() {
        // RFC 4506, section 4.10.
        let value = Opaque::<8>::from(&b"hello"[..]);
        assert_eq!(written(&value), b"\0\0\0\x05hello\0\0\0");
        assert_eq!(read::<Opaque<8>>(b"\0\0\0\x05hello\0\0\0"), Ok(value));
        assert_eq!(read::<Opaque<8>>(b"\0\0\0\x05hello\0\0\x01"), Err(XdrError::Invalid));
        assert_eq!(
            read::<Opaque<8>>(b"\0\0\0\x05hello"),
            Err(XdrError::Short),
            "without its padding"
        );
        assert_eq!(written(&[1u8, 2, 3, 4, 5]), [1, 2, 3, 4, 5, 0, 0, 0]);
    }

    #[test]
    fn lengths_that_are_claimed_take_no_memory() {
        assert_eq!(read::<Opaque<{ usize::MAX }>>(&[0xff; 4]), Err(XdrError::Short));
        assert_eq!(read::<Opaque<16>>(b"\0\0\0\x11"), Err(XdrError::TooLong));
        assert_eq!(read::<List<u32, { usize::MAX }>>(&[0xff; 8]), Err(XdrError::Short));
        assert_eq!(read::<List<u32, 16>>(b"\0\0\0\x11\0\0\0\0"), Err(XdrError::TooLong));
    }

    #[test]
    fn a_value_has_one_form() {
        assert_eq!(read::<bool>(b"\0\0\0\x02"), Err(XdrError::Invalid));
        assert_eq!(read::<u32>(b"\0\0\0\x02\0"), Err(XdrError::Trailing));
        assert_eq!(read::<Option<u64>>(b"\0\0\0\x01\0\0\0\0\0\0\0\x07"), Ok(Some(7)));
        assert_eq!(written(&Some(7u64)), b"\0\0\0\x01\0\0\0\0\0\0\0\x07");
        assert_eq!(written(&None::<u64>), b"\0\0\0\0");
        assert_eq!(written(&List::<u32, 2>(vec![1, 2])), b"\0\0\0\x02\0\0\0\x01\0\0\0\x02");
    }

    #[test]
    fn a_payload_is_sent_from_where_it_lies() {
        let data = Bytes::from_static(b"data!");
        let mut writer = Writer::default();
        writer.put(&1u32).payload(data.clone());
        writer.put(&2u32);
        assert_eq!(writer.len(), 4 + 4 + 8 + 4);
        let pieces = writer.into_pieces();
        assert!(pieces.iter().any(|piece| piece.as_ptr() == data.as_ptr()));
        assert_eq!(pieces.concat(), b"\0\0\0\x01\0\0\0\x05data!\0\0\0\0\0\0\x02");
    }
}
