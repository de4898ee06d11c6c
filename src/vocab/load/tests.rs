//! Tests with files of each format, and with files of no known format.

use proptest::prelude::*;

use super::*;
use crate::{TOKEN_BYTES_MAX, TokenId};

fn parse(content: &str) -> (Vec<Vec<u8>>, VocabularyFormat) {
    let (vocabulary, format) = Vocabulary::parse(content.as_bytes(), None).unwrap();
    (
        vocabulary.iter().map(|(_, bytes)| bytes.to_vec()).collect(),
        format,
    )
}

fn refused(content: &str) -> LoadError {
    Vocabulary::parse(content.as_bytes(), None).unwrap_err()
}

/// Requires that a file with this content is refused with this error.
macro_rules! assert_refused {
    ($content:expr, $pattern:pat $(if $guard:expr)?) => {
        match refused($content) {
            $pattern $(if $guard)? => {}
            other => panic!("{}: {other}", $content),
        }
    };
}

#[test]
fn a_byte_level_tokenizer() {
    let (tokens, format) = parse(
        r#"{"added_tokens": [{"id": 3, "content": "<s>", "special": true}, {"id": 4, "content": "é ", "special": false}],
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split"}, {"type": "ByteLevel"}]},
            "decoder": {"type": "ByteLevel"},
            "model": {"type": "BPE", "vocab": {"a": 0, "Ġa": 1, "Ã©": 2, "<s>": 3}, "merges": ["Ġ a"]}}"#,
    );
    assert_eq!(format, VocabularyFormat::HuggingFace);
    let expected = [&b"a"[..], b" a", "é".as_bytes(), b"", "é ".as_bytes()];
    assert_eq!(tokens, expected);
}

#[test]
fn a_tokenizer_in_the_manner_of_sentencepiece() {
    let (tokens, _) = parse(
        r#"{"model": {"type": "BPE", "byte_fallback": true, "vocab": {"<0x0A>": 0, "▁the": 1, "é": 2, "<0xzz>": 3}}}"#,
    );
    assert_eq!(tokens, [&b"\n"[..], b" the", "é".as_bytes(), b"<0xzz>"]);
    let (tokens, _) = parse(r#"{"model": {"type": "Unigram", "vocab": [["<0x0A>", -1.5], ["▁", 0.0]]}}"#);
    assert_eq!(tokens, [&b"<0x0A>"[..], b" "]);
}

/// Returns a file with this decoder, the tokens `a` and `▁`, and the added token `added`.
fn with_decoder(decoder: &str, added: &str) -> String {
    format!(
        r#"{{"added_tokens": [{{"id": 2, "content": "{added}", "special": false}}], "decoder": {decoder},
            "model": {{"type": "BPE", "byte_fallback": true, "vocab": {{"a": 0, "<0x0A>": 1}}}}}}"#
    )
}

#[test]
fn an_added_token_is_what_the_decoder_makes_of_it() {
    let blanks = r#"{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}"#;
    let gemma = format!(
        r#"{{"type": "Sequence", "decoders": [{blanks}, {{"type": "ByteFallback"}}, {{"type": "Fuse"}}]}}"#
    );
    assert_eq!(parse(&with_decoder(&gemma, "▁▁")).0, [&b"a"[..], b"\n", b"  "]);
    assert_eq!(parse(&with_decoder(&gemma, "<0x41>")).0, [&b"a"[..], b"\n", b"A"]);
    let llama = format!(
        r#"{{"type": "Sequence", "decoders": [{blanks}, {{"type": "ByteFallback"}}, {{"type": "Fuse"}},
            {{"type": "Strip", "content": " ", "start": 1, "stop": 0}}]}}"#
    );
    assert_eq!(parse(&with_decoder(&llama, "▁a")).0, [&b"a"[..], b"\n", b" a"]);
    // The decoder turns no text into a byte, although the model falls back to bytes.
    let metaspace = r#"{"type": "Metaspace", "replacement": "_"}"#;
    assert_eq!(
        parse(&with_decoder(metaspace, "_▁")).0,
        [&b"a"[..], b"<0x0A>", " ▁".as_bytes()]
    );
    let byte_level = r#"{"type": "ByteLevel"}"#;
    assert_eq!(parse(&with_decoder(byte_level, "Ġé")).0[2], b" \xe9");
    assert_eq!(parse(&with_decoder(byte_level, "é ▁")).0[2], "é ▁".as_bytes());
}

#[test]
fn what_a_decoder_does_that_is_not_known_is_refused() {
    for (decoder, step) in [
        (r#"{"type": "BPEDecoder", "suffix": "</w>"}"#, "BPEDecoder"),
        (r#"{"type": "WordPiece"}"#, "WordPiece"),
        (r#"{"type": "CTC"}"#, "CTC"),
        (
            r#"{"type": "Replace", "pattern": {"Regex": "_+"}, "content": " "}"#,
            "Replace",
        ),
        (
            r#"{"type": "Replace", "pattern": {"String": ""}, "content": " "}"#,
            "Replace",
        ),
        // This step would strip each token, and not the whole text.
        (
            r#"{"type": "Strip", "content": " ", "start": 1, "stop": 0}"#,
            "Strip",
        ),
        (
            r#"{"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Replace", "pattern": {"String": "ab"}, "content": "c"}]}"#,
            "Replace",
        ),
        (
            r#"{"type": "Sequence", "decoders": [{"type": "ByteLevel"}, {"type": "Replace", "pattern": {"String": "é"}, "content": "e"}]}"#,
            "Replace",
        ),
    ] {
        let content = with_decoder(decoder, "b");
        assert_refused!(&content, LoadError::UnsupportedDecoder { step: named } if named == step);
    }
    for mark in ["end_of_word_suffix", "continuing_subword_prefix"] {
        let content = format!(r#"{{"model": {{"type": "BPE", "{mark}": "@", "vocab": {{"a@": 0}}}}}}"#);
        assert_refused!(&content, LoadError::UnsupportedDecoder { step } if step == mark);
    }
}

#[test]
fn a_tiktoken_file() {
    let (tokens, format) = parse("IQ== 0\nIGE= 2\r\n\n");
    assert_eq!(format, VocabularyFormat::Tiktoken);
    assert_eq!(tokens, [&b"!"[..], b"", b" a"]);
    // The last token of Whisper's file is written like this.
    assert_eq!(parse("IQ== 0\n= 1\n").0, [&b"!"[..], b""]);
}

#[test]
fn a_tekken_file() {
    let (tokens, format) = parse(
        r#"{"config": {"default_vocab_size": 5, "default_num_special_tokens": 2, "version": "v3"},
            "vocab": [{"rank": 1, "token_bytes": "IGE=", "token_str": " a"},
                      {"rank": 0, "token_bytes": "AA==", "token_str": null},
                      {"rank": 3, "token_bytes": "not read", "token_str": "beyond"}]}"#,
    );
    assert_eq!(format, VocabularyFormat::Tekken);
    assert_eq!(tokens, [&b""[..], b"", b"\0", b" a", b""]);
}

#[test]
fn a_file_of_no_known_format_is_refused() {
    let nested = format!("{}{}", r#"{"model": "#, "[".repeat(100_000));
    for content in ["", "{}", "\u{0}", &nested] {
        assert_refused!(content, LoadError::UnknownFormat);
    }
}

#[test]
fn hostile_tokenizers_are_refused() {
    assert_refused!(
        r#"{"model": 3}"#,
        LoadError::Json {
            format: VocabularyFormat::HuggingFace,
            ..
        }
    );
    assert_refused!(
        r#"{"model": {"type": "WordPiece", "vocab": {}}}"#,
        LoadError::UnsupportedModel { model } if model == "WordPiece"
    );
    assert_refused!(
        r#"{"model": {"vocab": {"a": 16777216}}}"#,
        LoadError::Vocabulary(VocabularyError::IdTooLarge { id: 16_777_216 })
    );
    assert_refused!(
        r#"{"model": {"vocab": {"a": 1, "b": 1}}}"#,
        LoadError::Vocabulary(VocabularyError::IdTwice { id: TokenId(1) })
    );
    assert_refused!(
        r#"{"model": {"vocab": {"▁": 7}}, "decoder": {"type": "ByteLevel"}}"#,
        LoadError::NotByteLevel { id: 7, .. }
    );
    let long = "a".repeat(TOKEN_BYTES_MAX + 1);
    assert_refused!(
        &format!(r#"{{"model": {{"vocab": {{"{long}": 0}}}}}}"#),
        LoadError::Vocabulary(VocabularyError::TokenTooLong {
            id: TokenId(0),
            bytes: 1025
        })
    );
}

#[test]
fn hostile_tiktoken_files_are_refused() {
    for line in ["IQ==1", "IQ= 1", "IQ== +1", "IQ== 18446744073709551616"] {
        assert_refused!(&format!("IQ== 0\n{line}\n"), LoadError::Line { line: 2 });
    }
    assert_refused!(
        "IQ== 0\nIQ== 18446744073709551615\n",
        LoadError::Vocabulary(VocabularyError::IdTooLarge { id: u64::MAX })
    );
}

#[test]
fn hostile_tekken_files_are_refused() {
    let sized = |size: u64, special: u64, vocab: &str| {
        format!(
            r#"{{"config": {{"default_vocab_size": {size}, "default_num_special_tokens": {special}}}, "vocab": [{vocab}]}}"#
        )
    };
    assert_refused!(&sized(1, 2, ""), LoadError::Config { special: 2, size: 1 });
    assert_refused!(
        &sized(u64::MAX, 0, ""),
        LoadError::Vocabulary(VocabularyError::IdTooLarge { .. })
    );
    assert_refused!(
        &sized(9, 0, r#"{"rank": 0, "token_bytes": "!"}"#),
        LoadError::Base64 { id: 0 }
    );
    assert_refused!(
        r#"{"config": {}, "vocab": []}"#,
        LoadError::Json {
            format: VocabularyFormat::Tekken,
            ..
        }
    );
}

#[test]
fn formats_have_names() {
    for format in VocabularyFormat::ALL {
        assert_eq!(format.as_str().parse::<VocabularyFormat>().unwrap(), format);
    }
    assert!("sentencepiece".parse::<VocabularyFormat>().is_err());
    let missing = Vocabulary::load(Path::new("no/such/file"), None).unwrap_err();
    assert!(matches!(missing, LoadError::Io(_)));
}

proptest! {
    /// Checks that a whole file is read back unchanged, and that loading the beginning of a file never panics.
    #[test]
    fn tiktoken_files_come_back(tokens in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..9), 1..30), cut in 0..400_usize) {
        let lines: String = tokens
            .iter()
            .enumerate()
            .map(|(rank, bytes)| format!("{} {rank}\n", STANDARD.encode(bytes)))
            .collect();
        let (vocabulary, _) = Vocabulary::parse(lines.as_bytes(), Some(VocabularyFormat::Tiktoken)).unwrap();
        for (rank, bytes) in (0..).zip(&tokens) {
            prop_assert_eq!(vocabulary.bytes(TokenId(rank)), Some(bytes.as_slice()));
        }
        let _ = Vocabulary::parse(lines.as_bytes().get(..cut).unwrap_or_default(), None);
    }

    #[test]
    fn any_content_gives_an_answer(content in prop::collection::vec(any::<u8>(), 0..100), format in 0..4_usize) {
        let _ = Vocabulary::parse(&content, VocabularyFormat::ALL.get(format).copied());
    }
}
