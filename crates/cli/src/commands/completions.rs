//! `atoll completions`: a shell's completion script.

use clap::Command;
use clap_complete::Shell;

use crate::failure::Failure;
use crate::output::Output;

/// Arguments of `atoll completions`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll completions bash > ~/.local/share/bash-completion/completions/atoll
  atoll completions zsh > ~/.zfunc/_atoll
  atoll completions fish > ~/.config/fish/completions/atoll.fish")]
pub(crate) struct Args {
    /// Which shell
    shell: Shell,
}

/// Prints the script for this command line.
pub(crate) fn run(args: &Args, tree: &Command) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut shown(tree), "atoll", &mut script);
    let mut output = Output::new();
    output.bytes(&script)?;
    output.flush()
}

/// The command line without what is hidden, which clap_complete would offer.
fn shown(tree: &Command) -> Command {
    without_hidden(tree).version(env!("CARGO_PKG_VERSION")).propagate_version(true)
}

fn without_hidden(command: &Command) -> Command {
    let below = command.get_subcommands().filter(|below| !below.is_hide_set());
    // Clap wants names that live as long as the program, which ends when it has printed.
    Command::new(&*command.get_name().to_owned().leak())
        .about(command.get_about().cloned().unwrap_or_default())
        .args(command.get_arguments().filter(|argument| !argument.is_hide_set()).cloned())
        .subcommands(below.map(without_hidden))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::arguments::Arguments;

    #[test]
    fn what_is_hidden_is_not_completed() {
        let mut script = Vec::new();
        let mut shown = shown(&Arguments::command());
        clap_complete::generate(Shell::Bash, &mut shown, "atoll", &mut script);
        let script = String::from_utf8(script).expect("scripts are text");
        assert!(script.contains("atoll,publish") && script.contains("--dir"), "{script}");
        assert!(script.contains("--read-key ") && script.contains("lab,run"));
        for hidden in ["atoll,compare", "--announce", "--read-key-optional"] {
            assert!(!script.contains(hidden), "{hidden}");
        }
    }
}
