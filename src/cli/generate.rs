//! `kvatlas completions` and `kvatlas man`: shell completions and manual pages, made from the definition of the command
//! line.

use std::path::{Path, PathBuf};

use clap::{Args, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;

use super::Cli;
use super::failure::Failure;
use super::output::print;

pub(super) const COMPLETIONS_EXAMPLES: &str = "\
Examples:
  kvatlas completions bash > /etc/bash_completion.d/kvatlas
  kvatlas completions zsh > /usr/local/share/zsh/site-functions/_kvatlas
  kvatlas completions fish > ~/.config/fish/completions/kvatlas.fish";

pub(super) const MAN_EXAMPLES: &str = "\
Examples:
  kvatlas man | man -l -
  kvatlas man --directory /usr/local/share/man/man1";

/// The name of the program.
const PROGRAM: &str = "kvatlas";

/// Shell for which the completions are.
#[derive(Debug, Args)]
pub(crate) struct CompletionsArguments {
    /// The shell. The scripts for bash, zsh and fish are tested.
    #[arg(value_enum)]
    shell: Shell,
}

/// Prints the completions for a shell.
pub(crate) fn completions(arguments: &CompletionsArguments) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut Cli::command(), PROGRAM, &mut script);
    print(&String::from_utf8_lossy(&script))
}

/// Place to write the manual pages to.
#[derive(Debug, Args)]
pub(crate) struct ManArguments {
    /// Write a page for the program and one for each command into this directory, and print nothing.
    #[arg(long, value_name = "DIRECTORY")]
    directory: Option<PathBuf>,
}

/// Prints the program's page, or writes all pages.
pub(crate) fn man(arguments: &ManArguments) -> Result<(), Failure> {
    let mut command = Cli::command();
    let Some(directory) = &arguments.directory else {
        return print(&page(&Man::new(command))?);
    };
    command = command.disable_help_subcommand(true);
    command.build();
    write_pages(command, directory)
}

/// Writes the page of a command and those of its subcommands.
fn write_pages(command: clap::Command, directory: &Path) -> Result<(), Failure> {
    let subcommands = command.get_subcommands().filter(|command| !command.is_hide_set());
    for subcommand in subcommands.cloned() {
        write_pages(subcommand, directory)?;
    }
    let man = Man::new(command);
    std::fs::write(directory.join(man.get_filename()), page(&man)?)
        .map_err(|error| Failure::failed(format_args!("cannot write to {directory:?}: {error}")))
}

/// Returns a manual page. Its lines are not adjusted to the margin on the right, because examples have words as long as
/// a line.
fn page(man: &Man) -> Result<String, Failure> {
    let mut page = Vec::new();
    let rendered = man.render(&mut page);
    rendered.map_err(|error| Failure::failed(format_args!("cannot render the page: {error}")))?;
    let page = String::from_utf8_lossy(&page);
    Ok(match page.split_once("\n.SH ") {
        Some((head, sections)) => format!("{head}\n.na\n.SH {sections}"),
        None => page.into_owned(),
    })
}
