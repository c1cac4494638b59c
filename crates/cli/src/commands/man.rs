//! `atoll man`: the manual, made from the same tree as the help.

use std::fs;
use std::path::PathBuf;

use clap::Command;
use clap_mangen::Man;

use crate::failure::Failure;
use crate::output::Output;

/// Arguments of `atoll man`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll man | man -l -
  atoll man ~/.local/share/man/man1 && man atoll-publish")]
pub(crate) struct Args {
    /// Write one page per command into this directory, which is made if need be
    #[arg(value_name = "DIR")]
    into: Option<PathBuf>,
}

/// Prints or writes the pages of this command line.
pub(crate) fn run(args: &Args, tree: Command) -> Result<(), Failure> {
    let mut tree = tree.disable_help_subcommand(true);
    tree.build();
    let Some(dir) = &args.into else {
        let mut output = Output::new();
        output.bytes(page(tree).1.as_bytes())?;
        return output.flush();
    };
    let failed = |error: std::io::Error| {
        Failure::io(format!("cannot write the manual into {}", dir.display()), &error)
    };
    fs::create_dir_all(dir).map_err(failed)?;
    for command in with_subcommands(&tree) {
        let (name, text) = page(command);
        fs::write(dir.join(name), text).map_err(failed)?;
    }
    Ok(())
}

/// A command and all below it that are shown, each to have its page.
fn with_subcommands(command: &Command) -> Vec<Command> {
    let shown = command.get_subcommands().filter(|below| !below.is_hide_set());
    let mut all: Vec<Command> = shown.flat_map(with_subcommands).collect();
    all.push(command.clone());
    all
}

/// A page and its file's name.
fn page(command: Command) -> (String, String) {
    let man =
        Man::new(command).source(concat!("atoll ", env!("CARGO_PKG_VERSION"))).manual("Atoll");
    let mut page = Vec::new();
    man.render(&mut page).expect("a Vec takes everything");
    let page = String::from_utf8(page).expect("help is text");
    // The text after the options has no title of its own in clap's tree.
    let page = page
        .replace(".SH EXTRA\nExamples:\n", ".SH EXAMPLES\n")
        .replace(".SH EXTRA\nExit codes:\n", ".SH \"EXIT STATUS\"\n");
    (man.get_filename(), keep_columns(&page))
}

/// Keeps lines that begin with spaces (examples, the table of exit codes) as they are:
/// a manual page otherwise fills and justifies them.
fn keep_columns(page: &str) -> String {
    let mut out = String::with_capacity(page.len() + 64);
    let mut kept = false;
    for line in page.lines() {
        if line.starts_with(' ') != kept {
            kept = !kept;
            out.push_str(if kept { ".nf\n" } else { ".fi\n" });
        }
        out.push_str(line);
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_keep_their_columns_and_prose_is_filled() {
        let page = ".SH EXAMPLES\n  a    one\n  b    two\n\nProse.\n";
        let kept = ".SH EXAMPLES\n.nf\n  a    one\n  b    two\n.fi\n\nProse.\n";
        assert_eq!(keep_columns(page), kept);
    }
}
