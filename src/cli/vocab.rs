//! `kvatlas vocab`: answers questions about a model's tokens.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use kvatlas_vocab::{
    LoadError, RegexAutomaton, RegexLimits, State, TokenId, TokenMask, TokenTrie, TransitionTable,
    Vocabulary, VocabularyFormat,
};
use serde_json::{Value, json};

use super::failure::Failure;
use super::output::{print, print_json};
use super::table::TextTable;
use super::text::counted;

pub(super) const EXAMPLES: &str = "\
A token is allowed if the prefix, the token, and something (maybe nothing) after it together match all of the expression. \
Tokens that no text stands for, such as special ones, are never allowed.

Examples:
  kvatlas vocab mask --vocab tokenizer.json --regex '[0-9]{1,5}'
  kvatlas vocab mask --vocab tekken.json --regex '\\{\"name\": \"[^\"]*\"\\}' --prefix '{\"na'
  kvatlas vocab mask --vocab o200k_base.tiktoken --regex '(yes|no)' --json";

/// Command for vocabularies.
#[derive(Debug, Args)]
pub(crate) struct VocabArguments {
    #[command(subcommand)]
    command: VocabCommand,
}

#[derive(Debug, Subcommand)]
enum VocabCommand {
    /// Say which tokens may come next under a regular expression.
    #[command(after_help = EXAMPLES)]
    Mask(MaskArguments),
}

#[derive(Debug, Args)]
struct MaskArguments {
    /// The vocabulary: a Hugging Face tokenizer.json, a tiktoken file, or a tekken.json.
    #[arg(long, value_name = "FILE")]
    vocab: PathBuf,
    /// The expression that the whole text must match, in the syntax of Rust's regex crate.
    #[arg(long, value_name = "RE")]
    regex: String,
    /// Format of the file: hugging-face, tiktoken or tekken [default: found out].
    #[arg(long, value_name = "FORMAT")]
    format: Option<VocabularyFormat>,
    /// The text so far.
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    prefix: String,
    /// How many of the allowed tokens to show.
    #[arg(long, value_name = "TOKENS", default_value_t = 20)]
    sample: usize,
    /// Print one JSON object, with all allowed tokens.
    #[arg(long)]
    json: bool,
}

/// Runs the chosen command.
pub(crate) fn vocab(arguments: &VocabArguments) -> Result<(), Failure> {
    match &arguments.command {
        VocabCommand::Mask(arguments) => mask(arguments),
    }
}

/// Facts about the allowed tokens. The output is made from them.
struct MaskAnswer<'a> {
    vocabulary: &'a Vocabulary,
    format: VocabularyFormat,
    nodes: usize,
    states: usize,
    mask: TokenMask,
    may_end: bool,
}

fn mask(arguments: &MaskArguments) -> Result<(), Failure> {
    let automaton = RegexAutomaton::new(&arguments.regex, RegexLimits::default()).map_err(Failure::usage)?;
    let state = state_after(automaton.table(), &arguments.prefix)?;
    let (vocabulary, format) = load(arguments)?;
    let trie = TokenTrie::new(&vocabulary);
    let mut mask = trie.empty_mask();
    trie.allow_by_table(automaton.table(), state, &mut mask)
        .map_err(Failure::failed)?;
    let answer = MaskAnswer {
        vocabulary: &vocabulary,
        format,
        nodes: trie.len(),
        states: automaton.table().states(),
        mask,
        may_end: automaton.table().is_match(state),
    };
    if arguments.json {
        print_json(&mask_json(&answer, arguments.sample))
    } else {
        print(&render(&answer, arguments.sample))
    }
}

fn state_after(table: &TransitionTable, prefix: &str) -> Result<State, Failure> {
    let start = table
        .start()
        .ok_or_else(|| Failure::usage("no text at all matches the expression; correct --regex"))?;
    table.advance(start, prefix.as_bytes()).ok_or_else(|| {
        Failure::failed(format_args!(
            "no text that begins with {prefix:?} matches the expression; correct --prefix or --regex"
        ))
    })
}

fn load(arguments: &MaskArguments) -> Result<(Vocabulary, VocabularyFormat), Failure> {
    let path = &arguments.vocab;
    Vocabulary::load(path, arguments.format).map_err(|error| {
        let text = format!("{}: {error}", path.display());
        match error {
            LoadError::Io(_) => Failure::usage(text),
            _ => Failure::failed(text),
        }
    })
}

fn render(answer: &MaskAnswer<'_>, sample: usize) -> String {
    let allowed = answer.mask.count();
    let size = answer.vocabulary.size();
    let share = 100.0 * allowed as f64 / size.max(1) as f64;
    let mut text = format!(
        "{} vocabulary of {}, {} without text; {}\n{} allowed ({share:.2} %); the text {} end here\n",
        answer.format.as_str(),
        counted(size as u64, "token", "tokens"),
        answer.vocabulary.without_bytes(),
        counted(
            answer.states as u64,
            "state of the expression",
            "states of the expression"
        ),
        counted(allowed as u64, "token", "tokens"),
        if answer.may_end { "may" } else { "may not" },
    );
    let mut table = TextTable::new(&[">TOKEN", "TEXT"]);
    for token in answer.mask.iter().take(sample) {
        table.push(vec![token.to_string(), text_of(answer.vocabulary, token)]);
    }
    if sample.min(allowed) > 0 {
        text.push_str(&table.render());
    }
    match allowed.saturating_sub(sample) {
        0 => {}
        more => text.push_str(&format!("and {more} more\n")),
    }
    text
}

/// Returns a token's bytes in quotation marks. Bytes that are no text are escaped.
fn text_of(vocabulary: &Vocabulary, token: TokenId) -> String {
    let bytes = vocabulary.bytes(token).unwrap_or_default();
    let mut text = String::from('"');
    for chunk in bytes.utf8_chunks() {
        text.extend(chunk.valid().escape_debug());
        text.push_str(&chunk.invalid().escape_ascii().to_string());
    }
    text.push('"');
    text
}

/// Returns the answer about the allowed tokens, as JSON.
fn mask_json(answer: &MaskAnswer<'_>, sample: usize) -> Value {
    let shown = answer.mask.iter().take(sample);
    let shown = shown.map(|token| json!({ "token": token.0, "text": text_of(answer.vocabulary, token) }));
    json!({
        "format": answer.format.as_str(),
        "vocabulary_size": answer.vocabulary.size(),
        "tokens_without_text": answer.vocabulary.without_bytes(),
        "trie_nodes": answer.nodes,
        "expression_states": answer.states,
        "text_may_end": answer.may_end,
        "allowed_count": answer.mask.count(),
        "allowed": answer.mask.iter().map(|token| token.0).collect::<Value>(),
        "sample": shown.collect::<Value>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_shows_what_is_no_text() {
        let (vocabulary, _) = Vocabulary::parse(b"w6kK4paB 0\n", None).unwrap();
        assert_eq!(text_of(&vocabulary, TokenId(0)), r#""é\n▁""#);
        let (vocabulary, _) = Vocabulary::parse(b"w6n/Iik= 0\n", None).unwrap();
        assert_eq!(text_of(&vocabulary, TokenId(0)), r#""é\xff\")""#);
        assert_eq!(text_of(&vocabulary, TokenId(9)), r#""""#);
    }
}
