//! Constrained decoding: finds the tokens that may come next, so that the text stays a weight in kilograms.
//!
//! `cargo run -p kvatlas-vocab --example mask`

use kvatlas_vocab::{RegexAutomaton, RegexLimits, TokenTrie, VocabularyBuilder};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // `Vocabulary::load` reads a model's own file; these few tokens stand for one.
    let mut builder = VocabularyBuilder::new();
    for (id, text) in ["1", "2", "12", " ", " kg", "k", "g", "lb", "kg!"]
        .iter()
        .enumerate()
    {
        builder.insert(id as u64, text.as_bytes().to_vec())?;
    }
    let vocabulary = builder.build()?;
    let trie = TokenTrie::new(&vocabulary);
    let weight = RegexAutomaton::new("[0-9]{1,3} kg", RegexLimits::default())?;

    let table = weight.table();
    let mut state = table.start().ok_or("no text matches the expression")?;
    let mut mask = trie.empty_mask();
    for chosen in ["12", " kg"] {
        mask.clear();
        trie.allow_by_table(table, state, &mut mask)?;
        let allowed: Vec<_> = mask
            .iter()
            .filter_map(|token| vocabulary.bytes(token))
            .map(String::from_utf8_lossy)
            .collect();
        println!("may come next: {allowed:?}; chosen: {chosen:?}");
        state = table
            .advance(state, chosen.as_bytes())
            .ok_or("a token that was not allowed")?;
    }
    println!("the text may end here: {}", table.is_match(state));
    Ok(())
}
