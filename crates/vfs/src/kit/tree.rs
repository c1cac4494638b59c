//! A tree of files as data: what a file system under test should hold. Large contents
//! are a function of the offset, not bytes in memory.

use std::collections::BTreeMap;
use std::ops::Range;

use bytes::Bytes;

use crate::FileTime;

/// Entries of the largest directory of [`Tree::fixture`].
pub const BIG_DIRECTORY_ENTRIES: usize = 3000;

/// Levels of the deepest directory of [`Tree::fixture`].
const DEEP_LEVELS: usize = 60;

/// A tree of files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tree {
    /// The root, a directory.
    pub root: Node,
}

/// One file of a [`Tree`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Permission bits, `0o7777` at most. Of no meaning for a symbolic link.
    pub mode: u32,
    /// Last change of contents.
    pub mtime: FileTime,
    /// Extended attributes.
    pub xattrs: BTreeMap<Bytes, Bytes>,
    /// What it is and holds.
    pub body: Body,
}

/// What a [`Node`] is and holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// A regular file.
    File(Content),
    /// A directory and what is in it.
    Directory(BTreeMap<Bytes, Node>),
    /// A symbolic link to this target.
    Symlink(Bytes),
}

/// What a regular file holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// These bytes.
    Bytes(Bytes),
    /// `len_bytes` bytes that look random and are fixed by the seed.
    Pattern {
        /// Which bytes.
        seed: u64,
        /// How many.
        len_bytes: u64,
    },
    /// As a pattern within `data`, a hole elsewhere.
    Sparse {
        /// Which bytes.
        seed: u64,
        /// Length of the file.
        len_bytes: u64,
        /// Where there is data: ascending, without overlap, within the length.
        data: Vec<Range<u64>>,
    },
}

impl Content {
    /// Length of the file.
    pub fn len_bytes(&self) -> u64 {
        match self {
            Content::Bytes(bytes) => bytes.len() as u64,
            Content::Pattern { len_bytes, .. } | Content::Sparse { len_bytes, .. } => *len_bytes,
        }
    }

    /// Where there is data.
    pub fn data_ranges(&self) -> Vec<Range<u64>> {
        match self {
            Content::Sparse { data, .. } => data.clone(),
            _ => std::iter::once(0..self.len_bytes()).collect(),
        }
    }

    /// Up to `len` bytes at `offset`; fewer at the end of the file.
    pub fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let end = offset.saturating_add(len as u64).min(self.len_bytes());
        let start = offset.min(end);
        let at = |offset: u64| (offset - start) as usize;
        match self {
            Content::Bytes(bytes) => bytes[start as usize..end as usize].to_vec(),
            Content::Pattern { seed, .. } => {
                let mut out = vec![0; at(end)];
                fill_pattern(*seed, start, &mut out);
                out
            }
            Content::Sparse { seed, data, .. } => {
                let mut out = vec![0; at(end)];
                for range in data {
                    let (from, to) = (range.start.max(start), range.end.min(end));
                    if from < to {
                        fill_pattern(*seed, from, &mut out[at(from)..at(to)]);
                    }
                }
                out
            }
        }
    }
}

/// The step of SplitMix64 (Steele, Lea, Flood 2014): a number that looks random.
pub(super) fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn fill_pattern(seed: u64, offset: u64, out: &mut [u8]) {
    let word = |at: u64| mix(seed ^ mix(at / 8)).to_le_bytes();
    let lead = ((8 - offset % 8) % 8).min(out.len() as u64) as usize;
    let (head, body) = out.split_at_mut(lead);
    let bytes = word(offset);
    let skip = (offset % 8) as usize;
    for (place, byte) in head.iter_mut().zip(&bytes[skip..]) {
        *place = *byte;
    }
    for (index, chunk) in body.chunks_mut(8).enumerate() {
        let bytes = word(offset + lead as u64 + index as u64 * 8);
        chunk.copy_from_slice(&bytes[..chunk.len()]);
    }
}

impl Node {
    /// A regular file with mode `0o644`.
    pub fn file(content: Content) -> Node {
        Node::with(0o644, Body::File(content))
    }

    /// A regular file that holds `bytes`.
    pub fn bytes(bytes: &[u8]) -> Node {
        Node::file(Content::Bytes(Bytes::copy_from_slice(bytes)))
    }

    /// An empty directory with mode `0o755`.
    pub fn directory() -> Node {
        Node::with(0o755, Body::Directory(BTreeMap::new()))
    }

    /// A symbolic link.
    pub fn symlink(target: &[u8]) -> Node {
        Node::with(0o777, Body::Symlink(Bytes::copy_from_slice(target)))
    }

    fn with(mode: u32, body: Body) -> Node {
        let mtime = FileTime { secs: 1_000_000_000, nanos: 0 };
        Node { mode, mtime, xattrs: BTreeMap::new(), body }
    }

    /// This with other permission bits.
    pub fn mode(mut self, mode: u32) -> Node {
        self.mode = mode;
        self
    }

    /// This with another time.
    pub fn mtime(mut self, secs: i64, nanos: u32) -> Node {
        self.mtime = FileTime { secs, nanos };
        self
    }

    /// This with an extended attribute more.
    pub fn xattr(mut self, name: &[u8], value: &[u8]) -> Node {
        self.xattrs.insert(Bytes::copy_from_slice(name), Bytes::copy_from_slice(value));
        self
    }

    /// What a directory holds.
    pub fn children(&self) -> Option<&BTreeMap<Bytes, Node>> {
        match &self.body {
            Body::Directory(children) => Some(children),
            _ => None,
        }
    }

    /// What a regular file holds.
    pub fn content(&self) -> Option<&Content> {
        match &self.body {
            Body::File(content) => Some(content),
            _ => None,
        }
    }
}

impl Default for Tree {
    fn default() -> Tree {
        Tree::new()
    }
}

impl Tree {
    /// An empty root.
    pub fn new() -> Tree {
        Tree { root: Node::directory() }
    }

    /// Puts `node` at `path` (names with `/` between), making directories on the way.
    ///
    /// # Panics
    /// If something on the way is not a directory.
    pub fn put(&mut self, path: impl AsRef<[u8]>, node: Node) {
        let mut names: Vec<&[u8]> = path.as_ref().split(|&b| b == b'/').collect();
        let last = names.pop().expect("split gives at least one");
        let mut at = &mut self.root;
        for name in names.into_iter().chain([last]) {
            let Body::Directory(children) = &mut at.body else {
                panic!("{name:?} would lie in a file that is not a directory");
            };
            at = children.entry(Bytes::copy_from_slice(name)).or_insert_with(Node::directory);
        }
        *at = node;
    }

    /// The node at `path`; the root at the empty path.
    pub fn get(&self, path: impl AsRef<[u8]>) -> Option<&Node> {
        let names = path.as_ref().split(|&b| b == b'/').filter(|name| !name.is_empty());
        names.into_iter().try_fold(&self.root, |node, name| node.children()?.get(name))
    }

    /// Every node with its path, parents before children.
    pub fn nodes(&self) -> Vec<(Bytes, &Node)> {
        let mut found = vec![(Bytes::new(), &self.root)];
        let mut next = 0;
        while let Some((path, node)) = found.get(next).cloned() {
            next += 1;
            for (name, child) in node.children().into_iter().flatten() {
                found.push((join(&path, name), child));
            }
        }
        found
    }

    /// A few files, directories and a link.
    pub fn small() -> Tree {
        let mut tree = Tree::new();
        tree.put("file", Node::bytes(b"some bytes\n"));
        tree.put("directory/inner", Node::bytes(b"inner"));
        tree.put("directory/below/deeper", Node::bytes(b"deeper"));
        tree.put("empty", Node::directory());
        tree.put("link", Node::symlink(b"file"));
        tree
    }

    /// A tree with all that is hard: names, sizes, times, holes, links, depth, breadth.
    pub fn fixture() -> Tree {
        let mut tree = Tree::small();
        names(&mut tree);
        sizes(&mut tree);
        holes(&mut tree);
        metadata(&mut tree);
        links(&mut tree);
        for index in 0..BIG_DIRECTORY_ENTRIES {
            let path = format!("big/entry-{index:05}");
            tree.put(&path, Node::bytes(path.as_bytes()));
        }
        for index in 0..37 {
            tree.put(format!("paged/{index}"), Node::bytes(b""));
        }
        let deep = "deep/".repeat(DEEP_LEVELS);
        tree.put(format!("{deep}bottom"), Node::bytes(b"far down"));
        tree
    }
}

/// `path` and `name` with a `/` between, unless `path` is the root.
pub(super) fn join(path: &[u8], name: &[u8]) -> Bytes {
    if path.is_empty() {
        return Bytes::copy_from_slice(name);
    }
    Bytes::from([path, b"/", name].concat())
}

fn names(tree: &mut Tree) {
    let longest = [b'n'; 255];
    let longest_unicode = "é".repeat(127);
    let all: [&[u8]; 18] = [
        b" ",
        b" leading and trailing ",
        b"-rf",
        b"--",
        b"...",
        b"..hidden",
        b".hidden",
        b"new\nline",
        b"tab\tand\x01control\x7f",
        b"back\\slash",
        b"\"quotes\" and 'quotes'",
        b"*?[glob]$HOME`~#!;&|<>",
        b"not UTF-8 \xff\xfe\x80",
        "caf\u{e9} composed".as_bytes(),
        "cafe\u{301} composed".as_bytes(),
        "\u{1f40b}\u{200b}\u{202e}".as_bytes(),
        &longest,
        longest_unicode.as_bytes(),
    ];
    for name in all {
        tree.put([b"names/", name].concat(), Node::bytes(name));
    }
    for name in ["Case", "case", "CASE"] {
        tree.put(format!("names/{name}"), Node::bytes(name.as_bytes()));
    }
    tree.put([b"names in names/".as_slice(), &longest, b"/", &longest].concat(), Node::directory());
}

fn sizes(tree: &mut Tree) {
    const MIB: u64 = 1 << 20;
    let around = [512, 4096, 65_536, MIB].map(|block| [block - 1, block, block + 1]);
    let others = [0, 1, 2, 100, 1000, 3 * 65_536 - 1, 5 * MIB + 3];
    for len_bytes in around.into_iter().flatten().chain(others) {
        let content = Content::Pattern { seed: len_bytes, len_bytes };
        tree.put(format!("sizes/{len_bytes}"), Node::file(content));
    }
}

fn holes(tree: &mut Tree) {
    const MIB: u64 = 1 << 20;
    let mut put = |name: &str, len_bytes, data: &[(u64, u64)]| {
        let data = data.iter().map(|&(from, to)| from..to).collect();
        let content = Content::Sparse { seed: len_bytes, len_bytes, data };
        tree.put(format!("holes/{name}"), Node::file(content));
    };
    put("nothing but a hole", 3 * MIB, &[]);
    put("hole at the start", 2 * MIB + 10, &[(2 * MIB, 2 * MIB + 10)]);
    put("hole at the end", 2 * MIB + 10, &[(0, 10)]);
    let spread = [(0, 70_000), (2 * MIB, 2 * MIB + 70_000), (4 * MIB, 5 * MIB)];
    put("hole in the middle", 5 * MIB, &spread);
    put("one byte late", 16 * MIB, &[(16 * MIB - 1, 16 * MIB)]);
}

fn metadata(tree: &mut Tree) {
    for mode in [0o400, 0o600, 0o640, 0o755, 0o777, 0o4755, 0o2755, 0o6711] {
        tree.put(format!("modes/file {mode:o}"), Node::bytes(b"m").mode(mode));
    }
    for mode in [0o700, 0o750, 0o1777, 0o2775] {
        tree.put(format!("modes/directory {mode:o}/in"), Node::bytes(b"m"));
        tree.put(format!("modes/directory {mode:o}"), Node::directory().mode(mode));
    }
    let times = [
        ("epoch", 0, 0),
        ("nanoseconds", 1_700_000_000, 123_456_789),
        ("last nanosecond", 1_700_000_000, 999_999_999),
        ("just before 1970", -1, 999_999_999),
        ("1969", -1, 0),
        ("1950", -631_152_000, 500_000_001),
        ("1902", -2_145_916_800, 1),
        ("after 2038", 2_147_483_648, 7),
        ("2106", 4_294_967_296, 0),
    ];
    for (name, secs, nanos) in times {
        tree.put(format!("times/{name}"), Node::bytes(b"t").mtime(secs, nanos));
        tree.put(format!("times/directory {name}"), Node::directory().mtime(secs, nanos));
        tree.put(format!("times/link {name}"), Node::symlink(b"t").mtime(secs, nanos));
    }
    let with_xattrs = |node: Node| {
        node.xattr(b"user.comment", b"a comment")
            .xattr(b"user.binary", &[0, 255, 10, 0])
            .xattr(b"user.empty", b"")
            .xattr(b"user.long", &[b'x'; 2000])
    };
    tree.put("xattrs/file", with_xattrs(Node::bytes(b"x")));
    tree.put("xattrs/directory", with_xattrs(Node::directory()));
    tree.put("xattrs/none", Node::bytes(b"x"));
}

fn links(tree: &mut Tree) {
    let long = [b"t/".repeat(500), b"t".to_vec()].concat();
    let targets: [(&str, &[u8]); 9] = [
        ("to a file", b"../file"),
        ("to a directory", b"../directory"),
        ("absolute", b"/etc/hostname"),
        ("dangling", b"no/such/file"),
        ("to itself", b"to itself"),
        ("up and up", b"../../../../../../../.."),
        ("not UTF-8", b"\xff\xfe"),
        ("odd", b" //./x\n "),
        ("long", &long),
    ];
    for (name, target) in targets {
        tree.put(format!("links/{name}"), Node::symlink(target));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_is_the_same_however_it_is_cut() {
        let content = Content::Pattern { seed: 3, len_bytes: 1000 };
        let whole = content.read(0, 2000);
        assert_eq!(whole.len(), 1000);
        for (offset, len) in
            [(0, 1), (1, 6), (1, 7), (1, 8), (5, 900), (8, 16), (999, 5), (1000, 1)]
        {
            let end = (offset + len).min(1000);
            assert_eq!(content.read(offset as u64, len), whole[offset..end], "{offset} {len}");
        }
        assert!(content.read(u64::MAX, 5).is_empty());
        assert_ne!(Content::Pattern { seed: 4, len_bytes: 1000 }.read(0, 1000), whole);
    }

    #[test]
    fn a_sparse_file_is_zero_outside_its_data() {
        let content = Content::Sparse { seed: 1, len_bytes: 100, data: vec![10..20, 90..100] };
        let whole = content.read(0, 100);
        assert!(whole[..10].iter().chain(&whole[20..90]).all(|&b| b == 0));
        assert!(whole[10..20].iter().any(|&b| b != 0));
        assert_eq!(content.read(15, 80), whole[15..95]);
    }

    #[test]
    fn what_was_put_is_found() {
        let tree = Tree::fixture();
        assert_eq!(tree.get("").unwrap(), &tree.root);
        assert_eq!(tree.get("directory/below/deeper").unwrap(), &Node::bytes(b"deeper"));
        assert!(tree.get("directory/below/shallower").is_none());
        assert!(tree.get("file/below").is_none());
        assert!(tree.nodes().len() > BIG_DIRECTORY_ENTRIES + DEEP_LEVELS);
        for (path, node) in tree.nodes() {
            assert_eq!(tree.get(&path), Some(node));
        }
    }
}
