//! A source tree, the same each time: as many and as long files as in a kernel's, some in C.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

/// Directories, in three levels.
const DIRECTORIES: usize = 240;
/// Files that are not compiled.
const FILES: usize = 4_500;
/// Files that are.
const C_FILES: usize = 60;
/// Where they lie.
pub const C_DIRECTORY: &str = "compiled";

/// xorshift64 (Marsaglia 2003).
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }

    /// Mean 13 KB, as in Linux 2.6.14 (§5.2.1: 249 MB in 19,577 files); half below 5 KB.
    fn len_bytes(&mut self) -> u64 {
        match self.below(100) {
            0..50 => 200 + self.below(5_000),
            50..90 => 5_000 + self.below(15_000),
            _ => 20_000 + self.below(110_000),
        }
    }
}

/// Makes the tree at `root`; how many bytes it has.
pub fn make(root: &Path) -> u64 {
    let mut dice = Dice(0x7f5_2007);
    let mut directories = vec![root.to_owned()];
    fs::create_dir(root).expect("a directory");
    for n in 0..DIRECTORIES {
        let above = directories[dice.below(directories.len().min(40) as u64) as usize].clone();
        let directory = above.join(format!("directory{n}"));
        fs::create_dir(&directory).expect("a directory");
        directories.push(directory);
    }
    let mut bytes = 0;
    for n in 0..FILES {
        let directory = &directories[dice.below(directories.len() as u64) as usize];
        let len = dice.len_bytes() as usize;
        let mut text = String::with_capacity(len + 16);
        while text.len() < len {
            let _ = writeln!(text, "{:x} {n}", dice.below(1 << 60));
        }
        fs::write(directory.join(format!("file{n}.txt")), &text).expect("a file");
        bytes += text.len() as u64;
    }
    let compiled = root.join(C_DIRECTORY);
    fs::create_dir(&compiled).expect("a directory");
    for n in 0..C_FILES {
        let text = c_file(n, &mut dice);
        fs::write(compiled.join(format!("part{n}.c")), &text).expect("a file");
        bytes += text.len() as u64;
    }
    bytes
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
