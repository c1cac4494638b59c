//! A device in memory that takes little room for what is the same throughout, so that tests
//! can have disks of many block groups full of data.

use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};

use atoll_tfs::device::Device;
use tempfile::NamedTempFile;

const CHUNK_BYTES: usize = 4096;

#[derive(Clone, Debug)]
enum Chunk {
    Uniform(u8),
    Bytes(Box<[u8; CHUNK_BYTES]>),
}

/// A device in memory, of zeros in the beginning. Clones are handles to the same one.
#[derive(Clone, Debug)]
pub(crate) struct SparseDevice {
    chunks: Arc<Mutex<Vec<Chunk>>>,
}

impl SparseDevice {
    pub(crate) fn new(len_bytes: usize) -> SparseDevice {
        assert_eq!(len_bytes % CHUNK_BYTES, 0, "whole chunks");
        let chunks = vec![Chunk::Uniform(0); len_bytes / CHUNK_BYTES];
        SparseDevice { chunks: Arc::new(Mutex::new(chunks)) }
    }

    /// Another device that holds the same.
    pub(crate) fn copy(&self) -> SparseDevice {
        let chunks = self.chunks.lock().unwrap().clone();
        SparseDevice { chunks: Arc::new(Mutex::new(chunks)) }
    }

    /// The device as an image file, but for data of `data_byte`s alone, which stay zeros.
    pub(crate) fn image_without(&self, data_byte: impl Fn(u8) -> bool) -> NamedTempFile {
        let mut image = NamedTempFile::new().unwrap();
        let chunks = self.chunks.lock().unwrap();
        image.as_file().set_len((chunks.len() * CHUNK_BYTES) as u64).unwrap();
        for (chunk, at) in chunks.iter().zip((0..).step_by(CHUNK_BYTES)) {
            match chunk {
                Chunk::Uniform(byte) if *byte == 0 || data_byte(*byte) => {}
                Chunk::Uniform(byte) => {
                    image.as_file().write_all_at(&[*byte; CHUNK_BYTES], at).unwrap();
                }
                Chunk::Bytes(bytes) => image.as_file().write_all_at(&bytes[..], at).unwrap(),
            }
        }
        image.flush().unwrap();
        image
    }
}

impl Device for SparseDevice {
    fn len_bytes(&self) -> u64 {
        (self.chunks.lock().unwrap().len() * CHUNK_BYTES) as u64
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let chunks = self.chunks.lock().unwrap();
        let mut at = offset as usize;
        let mut rest = buffer;
        while !rest.is_empty() {
            let within = at % CHUNK_BYTES;
            let len = rest.len().min(CHUNK_BYTES - within);
            let (part, later) = rest.split_at_mut(len);
            match chunks.get(at / CHUNK_BYTES) {
                Some(Chunk::Uniform(byte)) => part.fill(*byte),
                Some(Chunk::Bytes(bytes)) => part.copy_from_slice(&bytes[within..within + len]),
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
            rest = later;
            at += len;
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut chunks = self.chunks.lock().unwrap();
        let mut at = offset as usize;
        let mut rest = data;
        while !rest.is_empty() {
            let within = at % CHUNK_BYTES;
            let (part, later) = rest.split_at(rest.len().min(CHUNK_BYTES - within));
            let Some(chunk) = chunks.get_mut(at / CHUNK_BYTES) else {
                return Err(io::ErrorKind::UnexpectedEof.into());
            };
            // All the same: each byte equals the one before.
            let uniform = part[1..] == part[..part.len() - 1];
            match chunk {
                Chunk::Uniform(byte) if uniform && *byte == part[0] => {}
                _ if uniform && part.len() == CHUNK_BYTES => *chunk = Chunk::Uniform(part[0]),
                Chunk::Uniform(byte) => {
                    let mut bytes = Box::new([*byte; CHUNK_BYTES]);
                    bytes[within..within + part.len()].copy_from_slice(part);
                    *chunk = Chunk::Bytes(bytes);
                }
                Chunk::Bytes(bytes) => bytes[within..within + part.len()].copy_from_slice(part),
            }
            rest = later;
            at += part.len();
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}
