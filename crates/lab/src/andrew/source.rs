//! The source trees, the same each time.

use std::fmt::Write as _;

/// Where the files lie that a compiler takes.
pub const C_DIRECTORY: &str = "compiled";

/// Directories of the large tree, in three levels, and its files that are not compiled and that are.
const LARGE_DIRECTORIES: usize = 240;
const LARGE_FILES: usize = 4_500;
const LARGE_C_FILES: usize = 60;

/// Pastis §5: "two subdirectories and 26 C source and header files, for a total size of 190 Kb".
const SMALL_FILES: usize = 26;
const SMALL_BYTES: usize = 190_000;
/// How many of them are headers. A guess.
const SMALL_HEADERS: usize = 8;

/// Which tree.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TreeSize {
    /// 26 files, 190 KB, in two directories: that of the Pastis paper (§5).
    Small,
    /// 4,560 files, 60 MB, in 241 directories: as long files as in a kernel's source, a quarter of
    /// the TFS paper's tree (§5.2.1: 249 MB in 19,577 files).
    Large,
}

/// A tree of directories and files with their contents.
#[derive(Clone, Debug, Default)]
pub struct SourceTree {
    /// Each before what is in it.
    pub directories: Vec<String>,
    /// Paths and texts.
    pub files: Vec<(String, Vec<u8>)>,
}

/// xorshift64 (Marsaglia 2003).
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }

    /// Mean 13 KB, as in Linux 2.6.14; half below 5 KB.
    fn len_bytes(&mut self) -> u64 {
        match self.below(100) {
            0..50 => 200 + self.below(5_000),
            50..90 => 5_000 + self.below(15_000),
            _ => 20_000 + self.below(110_000),
        }
    }
}

impl SourceTree {
    /// The tree of this size.
    pub fn new(size: TreeSize) -> SourceTree {
        match size {
            TreeSize::Small => small(),
            TreeSize::Large => large(),
        }
    }

    /// The bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|(_, text)| text.len() as u64).sum()
    }
}

fn small() -> SourceTree {
    let mut dice = Dice(0x9a57_2004);
    let directories = ["include", C_DIRECTORY].map(str::to_owned).to_vec();
    // Shares of the bytes, one to nine parts each.
    let parts: Vec<u64> = (0..SMALL_FILES).map(|_| 1 + dice.below(9)).collect();
    let all: u64 = parts.iter().sum();
    let mut tree = SourceTree { directories, files: Vec::new() };
    let mut left = SMALL_BYTES;
    for (n, part) in parts.iter().enumerate() {
        let is_last = n + 1 == SMALL_FILES;
        let len = if is_last { left } else { SMALL_BYTES * *part as usize / all as usize };
        left -= len;
        let path = match n {
            0..SMALL_HEADERS => format!("include/part{n}.h"),
            _ => format!("{C_DIRECTORY}/part{n}.c"),
        };
        let mut text = String::with_capacity(len + 64);
        while text.len() < len {
            let _ = writeln!(text, "/* {:x} */ extern int value_{n};", dice.below(1 << 60));
        }
        text.truncate(len);
        tree.files.push((path, text.into_bytes()));
    }
    tree
}

fn large() -> SourceTree {
    let mut dice = Dice(0x7f5_2007);
    let mut directories = vec![String::new()];
    for n in 0..LARGE_DIRECTORIES {
        let above = &directories[dice.below(directories.len().min(40) as u64) as usize];
        directories.push(super::joined(above, &format!("directory{n}")));
    }
    let mut files = Vec::new();
    for n in 0..LARGE_FILES {
        let directory = &directories[dice.below(directories.len() as u64) as usize];
        let len = dice.len_bytes() as usize;
        let mut text = String::with_capacity(len + 16);
        while text.len() < len {
            let _ = writeln!(text, "{:x} {n}", dice.below(1 << 60));
        }
        files.push((super::joined(directory, &format!("file{n}.txt")), text.into_bytes()));
    }
    for n in 0..LARGE_C_FILES {
        files.push((format!("{C_DIRECTORY}/part{n}.c"), c_file(n, &mut dice).into_bytes()));
    }
    directories.remove(0);
    directories.push(C_DIRECTORY.to_owned());
    SourceTree { directories, files }
}

fn c_file(n: usize, dice: &mut Dice) -> String {
    let mut text = String::from("#include <stdio.h>\n#include <string.h>\n");
    for function in 0..30 {
        let (a, b) = (dice.below(1000), dice.below(1000) + 1);
        let _ = writeln!(
            text,
            "int part{n}_{function}(int x) {{\n    int sum = {a};\n    for (int i = 0; i < x; i++)\n        \
             sum += (i * {b}) ^ (sum >> 3);\n    return sum;\n}}"
        );
    }
    if n == 0 {
        text.push_str("int main(void) { printf(\"%d\\n\", part0_1(7)); return 0; }\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_small_tree_is_that_of_the_pastis_paper() {
        let tree = SourceTree::new(TreeSize::Small);
        assert_eq!((tree.directories.len(), tree.files.len(), tree.bytes()), (2, 26, 190_000));
        assert!(tree.files.iter().all(|(_, text)| !text.is_empty()));
    }

    #[test]
    fn the_large_tree_is_sixty_megabytes_of_small_files() {
        let tree = SourceTree::new(TreeSize::Large);
        assert_eq!((tree.directories.len(), tree.files.len()), (241, 4_560));
        let megabytes = tree.bytes() / 1_000_000;
        assert!((55..65).contains(&megabytes), "{megabytes} MB");
        let small = tree.files.iter().filter(|(_, text)| text.len() < 5_300).count();
        assert!((2_000..2_600).contains(&small), "{small} files are below 5.3 KB");
    }
}
