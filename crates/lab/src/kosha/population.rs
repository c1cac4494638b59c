//! A synthetic file system of many users.
//!
//! | what | from |
//! |---|---|
//! | users, files, bytes in all | the paper (§6.2): 130, 221,000, 17.9 GB |
//! | which directory a new one lies in | one that has C subdirectories with probability in proportion to C + 2 (N. Agrawal, W. Bolosky, J. Douceur, J. Lorch, "A Five-Year Study of File-System Metadata", FAST 2007) |
//! | files in a directory | n with probability in proportion to (n + 2.36)⁻² (N. Agrawal, A. and R. Arpaci-Dusseau, "Generating Realistic Impressions for File-System Benchmarking", FAST 2009), at most 1,500: 10 on average, as there |
//! | sizes of files | log-normal with the median of 4 KB that J. Douceur and W. Bolosky found ("A Large-Scale Study of File-System Contents", SIGMETRICS 1999) and the σ = 2.4566 of Agrawal and others (2009), whose tail of six files in 100,000 from 512 MiB on is left out; then all multiplied by one number so that their sum is the paper's |
//!
//! The first directories are the users' homes, and take part in the growth as any other: the users' shares of the whole
//! follow from it, and are uneven. What the fits do not have, this has not either: projects of several users, large files
//! that lie together, names. No two directories have one name here, so that the paper's rule, which
//! hashes names alone, never puts two directories on one node for having the same name.

use atoll_env::{Env, random_below};

use crate::churn::LogNormal;

/// How large a file system is to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Size {
    pub users: usize,
    pub files: usize,
    pub bytes: u64,
}

impl Size {
    /// The paper's.
    pub(super) const PAPER: Size = Size { users: 130, files: 221_000, bytes: 17_900_000_000 };
    /// That of a quick run: a tenth.
    pub(super) const QUICK: Size = Size { users: 40, files: 22_100, bytes: 1_790_000_000 };
}

/// A directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Directory {
    /// `None` of a user's home.
    pub parent: Option<usize>,
    /// A home has depth 1, as in the paper's distribution levels.
    pub depth: usize,
}

/// A file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct File {
    pub directory: usize,
    pub bytes: u64,
}

/// See the module.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Population {
    /// Home by home, each followed by what lies below it, as a copy of the tree makes them.
    pub directories: Vec<Directory>,
    /// In the order of their directories.
    pub files: Vec<File>,
}

/// Of the inverse polynomial of files in a directory.
const FILES_OFFSET: f64 = 2.36;
const MOST_FILES: usize = 1500;
/// Natural logarithms of bytes; the median is 4 KiB.
const FILE_BYTES: LogNormal = LogNormal { mu: 8.318, sigma: 2.4566 };
const MOST_BYTES: f64 = (1u64 << 29) as f64;

impl Population {
    /// Draws one.
    pub(super) fn new(size: Size, random: &Env) -> Population {
        let counts = FileCounts::new();
        let mut tree = Tree::default();
        let mut files_left = size.files;
        let mut files_of = Vec::new();
        while files_left > 0 {
            let parent = match tree.parents.len() < size.users {
                true => None,
                false => Some(tree.urn[random_below(&**random, tree.urn.len() as u64) as usize]),
            };
            tree.add(parent);
            let count = counts.draw(random).min(files_left);
            files_left -= count;
            files_of.push(count);
        }
        let draws = std::iter::repeat_with(|| FILE_BYTES.draw(random));
        let drawn: Vec<f64> = draws.filter(|bytes| *bytes < MOST_BYTES).take(size.files).collect();
        let scale = size.bytes as f64 / drawn.iter().sum::<f64>();
        let mut lens = drawn.iter().map(|bytes| (bytes * scale).round() as u64);
        let order = tree.depth_first();
        let mut place = vec![0; order.len()];
        order.iter().enumerate().for_each(|(at, made)| place[*made] = at);
        let mut directories: Vec<Directory> = Vec::with_capacity(order.len());
        let mut files = Vec::with_capacity(size.files);
        for made in &order {
            let parent = tree.parents[*made].map(|parent| place[parent]);
            let depth = parent.map_or(1, |parent| directories[parent].depth + 1);
            let directory = directories.len();
            directories.push(Directory { parent, depth });
            let lens = lens.by_ref().take(files_of[*made]);
            files.extend(lens.map(|bytes| File { directory, bytes }));
        }
        Population { directories, files }
    }

    /// For each directory the one at `level` or above with which it stays, itself perhaps: at distribution level L directories
    /// of a depth of at most L are distributed, and deeper ones are where their parent is (§3.2).
    pub(super) fn anchors(&self, level: usize) -> Vec<usize> {
        let mut anchors: Vec<usize> = Vec::with_capacity(self.directories.len());
        for (at, Directory { parent, depth }) in self.directories.iter().enumerate() {
            let stays = parent.filter(|_| *depth > level);
            anchors.push(stays.map_or(at, |parent| anchors[parent]));
        }
        anchors
    }
}

/// Directories in the order in which they grow.
#[derive(Default)]
struct Tree {
    parents: Vec<Option<usize>>,
    /// Each directory twice, and once more for each subdirectory.
    urn: Vec<usize>,
}

impl Tree {
    fn add(&mut self, parent: Option<usize>) {
        let new = self.parents.len();
        self.parents.push(parent);
        self.urn.extend([new, new]);
        self.urn.extend(parent);
    }

    fn depth_first(&self) -> Vec<usize> {
        let mut children = vec![Vec::new(); self.parents.len()];
        let mut next: Vec<usize> = Vec::new();
        for (at, parent) in self.parents.iter().enumerate() {
            match parent {
                Some(parent) => children[*parent].push(at),
                None => next.push(at),
            }
        }
        next.reverse();
        let mut order = Vec::with_capacity(self.parents.len());
        while let Some(at) = next.pop() {
            order.push(at);
            next.extend(children[at].iter().rev());
        }
        order
    }
}

/// How many files a directory has.
struct FileCounts {
    /// Of at most so many files, not divided by the last one.
    cumulative: Vec<f64>,
}

impl FileCounts {
    fn new() -> FileCounts {
        let weights = (0..=MOST_FILES).map(|count| (count as f64 + FILES_OFFSET).powi(-2));
        let cumulative = weights.scan(0.0, |sum, weight| {
            *sum += weight;
            Some(*sum)
        });
        FileCounts { cumulative: cumulative.collect() }
    }

    fn draw(&self, random: &Env) -> usize {
        let all = self.cumulative[MOST_FILES];
        let at = all * (random.random_u64() >> 11) as f64 / (1u64 << 53) as f64;
        self.cumulative.partition_point(|below| *below <= at).min(MOST_FILES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::statistics::{percentile, summary};
    use atoll_sim::{Sim, SimConfig};

    fn drawn(size: Size, seed: u64) -> Population {
        Population::new(size, &Sim::new(SimConfig { seed, ..SimConfig::default() }).outside())
    }

    #[test]
    fn a_population_has_what_was_asked_for() {
        let population = drawn(Size::QUICK, 1);
        let homes = population.directories.iter().filter(|at| at.parent.is_none()).count();
        assert_eq!((homes, population.files.len()), (Size::QUICK.users, Size::QUICK.files));
        let bytes: u64 = population.files.iter().map(|file| file.bytes).sum();
        assert!(bytes.abs_diff(Size::QUICK.bytes) < Size::QUICK.files as u64, "{bytes}");
        for (at, directory) in population.directories.iter().enumerate() {
            let above = directory.parent.map_or(0, |parent| population.directories[parent].depth);
            assert_eq!(directory.depth, above + 1);
            assert!(directory.parent.is_none_or(|parent| parent < at));
        }
        let in_order = population.files.windows(2).all(|two| two[0].directory <= two[1].directory);
        assert!(in_order);
    }

    /// FAST 2009: 10.2 files a directory; SIGMETRICS 1999: a median of 4 KB. Scaling moves the median: it is what the paper's mean of
    /// 81 KB leaves of it.
    #[test]
    fn directories_and_files_are_as_large_as_the_fits_say() {
        let population = drawn(Size::QUICK, 2);
        let each = population.files.len() as f64 / population.directories.len() as f64;
        assert!((8.0..13.0).contains(&each), "{each} files a directory");
        let mut sizes: Vec<f64> = population.files.iter().map(|file| file.bytes as f64).collect();
        sizes.sort_by(f64::total_cmp);
        let median = percentile(&sizes, 0.5);
        assert!((2000.0..8000.0).contains(&median), "{median}");
        let depth = summary(
            population.files.iter().map(|f| population.directories[f.directory].depth as f64),
        );
        assert!((3.0..7.0).contains(&depth.mean) && depth.most > 9.0, "{depth:?}");
    }

    #[test]
    fn below_the_level_directories_stay_with_their_parents() {
        let population = drawn(Size { users: 3, files: 500, bytes: 1_000_000 }, 3);
        for level in 1..5 {
            let anchors = population.anchors(level);
            for (at, directory) in population.directories.iter().enumerate() {
                match directory.depth <= level {
                    true => assert_eq!(anchors[at], at),
                    false => assert_eq!(Some(anchors[at]), directory.parent.map(|p| anchors[p])),
                }
            }
        }
    }
}
