//! Tags: what ties the bytes of a transparent block to its file and place.

/// The tag of a block: the first eight bytes of a BLAKE3 hash keyed with the file system's
/// own secret, so that no user can write an ordinary file that passes for transparent data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tag(pub [u8; 8]);

/// The file of a block, and which of the file's blocks it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Belongs {
    /// Inode of the file.
    pub inode: u32,
    /// Its generation.
    pub generation: u32,
    /// Block within the file.
    pub logical: u32,
}

impl Tag {
    /// Of a whole block.
    pub fn of(key: &[u8; 32], belongs: Belongs, block: &[u8]) -> Tag {
        let mut prefix = [0; 16];
        prefix[..4].copy_from_slice(&belongs.inode.to_le_bytes());
        prefix[4..8].copy_from_slice(&belongs.generation.to_le_bytes());
        prefix[8..12].copy_from_slice(&belongs.logical.to_le_bytes());
        let mut hasher = blake3::Hasher::new_keyed(key);
        hasher.update(&prefix);
        hasher.update(block);
        Tag(hasher.finalize().as_bytes()[..8].try_into().expect("eight bytes"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_ties_bytes_to_key_file_and_place() {
        let belongs = Belongs { inode: 12, generation: 7, logical: 3 };
        let block = vec![5; 4096];
        let tag = Tag::of(&[1; 32], belongs, &block);
        assert_eq!(tag, Tag::of(&[1; 32], belongs, &block));
        let mut other = block.clone();
        other[4095] = 4;
        for (key, belongs, block) in [
            ([2; 32], belongs, &block),
            ([1; 32], Belongs { inode: 13, ..belongs }, &block),
            ([1; 32], Belongs { generation: 8, ..belongs }, &block),
            ([1; 32], Belongs { logical: 2, ..belongs }, &block),
            ([1; 32], belongs, &other),
        ] {
            assert_ne!(tag, Tag::of(&key, belongs, block));
        }
    }
}
