//! An Andrew-style workload: what a programmer does with a source tree, in phases.
//!
//! The benchmark of Howell, Kazar, Menees and others ("Scale and performance in a distributed file
//! system", 1988) makes a source tree's directories again, copies its files, looks at their
//! attributes, reads them and compiles them. The TFS paper (§5.2.1) adds the removal of the copy;
//! the Pastis paper (§5) imitates the compiler, for its files were in no mounted file system.
//!
//! One description serves both kinds of run: [`SourceTree`] is what is worked on, the functions here
//! are the phases, and [`Files`] is where: any [`atoll_vfs::FileSystem`], in the simulator as well
//! ([`InFileSystem`]), or a directory of this machine, so any mount ([`InDirectory`]). The phases
//! take no time themselves: their caller has a clock.

mod files;
mod source;

use atoll_vfs::Errno;

pub use files::{Below, Files, InDirectory, InFileSystem, Kind};
pub use source::{C_DIRECTORY, SourceTree, TreeSize};

/// Where the source tree lies, and where its copy.
pub const SOURCE: &str = "source";
/// Where the copy lies.
pub const COPY: &str = "copy";

/// What a phase did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Done {
    /// Directories and files that were worked on.
    pub count: u64,
    /// Bytes read and written.
    pub bytes: u64,
}

impl Done {
    fn add(&mut self, bytes: usize) {
        self.count += 1;
        self.bytes += bytes as u64;
    }
}

/// What a tree holds, by paths relative to its root.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Names {
    /// Each before what is in it.
    pub directories: Vec<String>,
    /// All that is not a directory.
    pub files: Vec<String>,
}

/// `name` in directory `above`; either may be the root, which has no name.
fn joined(above: &str, name: &str) -> String {
    match (above, name) {
        ("", path) | (path, "") => path.to_owned(),
        _ => format!("{above}/{name}"),
    }
}

impl Names {
    /// Those of a source tree.
    pub fn of_tree(tree: &SourceTree) -> Names {
        let files = tree.files.iter().map(|(path, _)| path.clone()).collect();
        Names { directories: tree.directories.clone(), files }
    }

    /// Lists a tree.
    pub async fn of(files: &impl Files, root: &str) -> Result<Names, Errno> {
        let mut names = Names::default();
        let mut pending = vec![String::new()];
        while let Some(relative) = pending.pop() {
            for (name, kind) in files.list(&joined(root, &relative)).await? {
                let path = joined(&relative, &name);
                if kind == Kind::Directory {
                    names.directories.push(path.clone());
                    pending.push(path);
                } else {
                    names.files.push(path);
                }
            }
        }
        Ok(names)
    }
}

/// Puts the source tree in place, which is no phase.
pub async fn plant(files: &impl Files, tree: &SourceTree) -> Result<Done, Errno> {
    let mut done = Done::default();
    files.make_directory(SOURCE).await?;
    for path in &tree.directories {
        files.make_directory(&joined(SOURCE, path)).await?;
    }
    for (path, text) in &tree.files {
        files.write(&joined(SOURCE, path), text).await?;
        done.add(text.len());
    }
    Ok(done)
}

/// The first phase: makes the directories of the source again.
pub async fn make_directories(files: &impl Files, names: &Names) -> Result<Done, Errno> {
    let mut done = Done::default();
    files.make_directory(COPY).await?;
    done.add(0);
    for path in &names.directories {
        files.make_directory(&joined(COPY, path)).await?;
        done.add(0);
    }
    Ok(done)
}

/// The second: copies the files, one after the other.
pub async fn copy(files: &impl Files, names: &Names) -> Result<Done, Errno> {
    let mut done = Done::default();
    for path in &names.files {
        let bytes = files.read(&joined(SOURCE, path)).await?;
        files.write(&joined(COPY, path), &bytes).await?;
        done.add(2 * bytes.len());
    }
    Ok(done)
}

/// The second where the source lies outside the file system, as in the Pastis paper (§5): writes the
/// files, one after the other.
pub async fn copy_in(files: &impl Files, tree: &SourceTree) -> Result<Done, Errno> {
    let mut done = Done::default();
    for (path, text) in &tree.files {
        files.write(&joined(COPY, path), text).await?;
        done.add(text.len());
    }
    Ok(done)
}

/// The third: lists a tree and looks at each file's attributes.
pub async fn stat(files: &impl Files, root: &str) -> Result<(Done, Names), Errno> {
    let names = Names::of(files, root).await?;
    let mut done = Done::default();
    for path in names.directories.iter().chain(&names.files) {
        files.stat(&joined(root, path)).await?;
        done.add(0);
    }
    Ok((done, names))
}

/// The fourth: reads each file.
pub async fn read(files: &impl Files, root: &str, names: &Names) -> Result<Done, Errno> {
    let mut done = Done::default();
    for path in &names.files {
        done.add(files.read(&joined(root, path)).await?.len());
    }
    Ok(done)
}

/// The fifth, as the Pastis paper imitates it: for each C file all headers beside it are read, then
/// the file, and an object file as long is written; in the end all object files are read, and a
/// program as long as they are is written. (A run on a real mount calls the compiler instead.)
pub async fn compile(files: &impl Files, names: &Names) -> Result<Done, Errno> {
    let mut done = Done::default();
    let directory_of = |path: &str| path.rsplit_once('/').map_or("", |(above, _)| above).to_owned();
    let mut objects = Vec::new();
    for path in names.files.iter().filter(|path| path.ends_with(".c")) {
        let beside = directory_of(path);
        let is_beside = |other: &&String| other.ends_with(".h") && directory_of(other) == beside;
        for header in names.files.iter().filter(is_beside) {
            done.add(files.read(&joined(COPY, header)).await?.len());
        }
        let text = files.read(&joined(COPY, path)).await?;
        let object = format!("{}.o", path.trim_end_matches(".c"));
        files.write(&joined(COPY, &object), &text).await?;
        done.add(2 * text.len());
        objects.push(object);
    }
    let mut program = Vec::new();
    for object in &objects {
        program.extend(files.read(&joined(COPY, object)).await?);
    }
    files.write(&joined(COPY, "program"), &program).await?;
    done.add(2 * program.len());
    Ok(done)
}

/// The last: removes the copy with what was compiled.
pub async fn delete(files: &impl Files) -> Result<Done, Errno> {
    let names = Names::of(files, COPY).await?;
    let mut done = Done::default();
    for path in &names.files {
        files.remove(&joined(COPY, path), Kind::File).await?;
        done.add(0);
    }
    for path in names.directories.iter().rev() {
        files.remove(&joined(COPY, path), Kind::Directory).await?;
        done.add(0);
    }
    files.remove(COPY, Kind::Directory).await?;
    done.add(0);
    Ok(done)
}
