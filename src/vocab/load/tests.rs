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

fn refused(content: &str) -> String {
    Vocabulary::parse(content.as_bytes(), None)
        .unwrap_err()
        .to_string()
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
        let refusal = refused(&with_decoder(decoder, "b"));
        assert!(
            refusal.contains(&format!("decoder has \"{step}\"")),
            "{decoder}: {refusal}"
        );
    }
    for mark in ["end_of_word_suffix", "continuing_subword_prefix"] {
        let content = format!(r#"{{"model": {{"type": "BPE", "{mark}": "@", "vocab": {{"a@": 0}}}}}}"#);
        assert!(refused(&content).contains(mark));
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
fn hostile_files_are_refused() {
    let long = format!(
        r#"{{"model": {{"vocab": {{"{}": 0}}}}}}"#,
        "a".repeat(TOKEN_BYTES_MAX + 1)
    );
    for (content, reason) in [
        ("", "not known to be a vocabulary"),
        ("{}", "not known to be a vocabulary"),
        ("\u{0}", "not known to be a vocabulary"),
        (r#"{"model": 3}"#, "is not a hugging-face file"),
        (
            r#"{"model": {"type": "WordPiece", "vocab": {}}}"#,
            "\"WordPiece\" are not supported",
        ),
        (
            r#"{"model": {"vocab": {"a": 16777216}}}"#,
            "token 16777216 is beyond",
        ),
        (
            r#"{"model": {"vocab": {"a": 1, "b": 1}}}"#,
            "token 1 is there twice",
        ),
        (
            r#"{"model": {"vocab": {"▁": 7}}, "decoder": {"type": "ByteLevel"}}"#,
            "token 7 has the character",
        ),
        (&long, "token 0 has 1025 bytes"),
        ("IQ== 0\nIQ==1\n", "line 2 is not"),
        ("IQ== 0\nIQ= 1\n", "line 2 is not"),
        ("IQ== 0\nIQ== +1\n", "line 2 is not"),
        ("IQ== 0\nIQ== 18446744073709551616\n", "line 2 is not"),
        (
            "IQ== 0\nIQ== 18446744073709551615\n",
            "token 18446744073709551615 is beyond",
        ),
        (
            r#"{"config": {"default_vocab_size": 1, "default_num_special_tokens": 2}, "vocab": []}"#,
            "2 special tokens in a vocabulary of 1",
        ),
        (
            r#"{"config": {"default_vocab_size": 18446744073709551615, "default_num_special_tokens": 0}, "vocab": []}"#,
            "is beyond",
        ),
        (
            r#"{"config": {"default_vocab_size": 9, "default_num_special_tokens": 0}, "vocab": [{"rank": 0, "token_bytes": "!"}]}"#,
            "token 0 are not base64",
        ),
        (r#"{"config": {}, "vocab": []}"#, "is not a tekken file"),
    ] {
        let refusal = refused(content);
        assert!(refusal.contains(reason), "{content}: {refusal}");
    }
    let nested = format!("{}{}", r#"{"model": "#, "[".repeat(100_000));
    assert!(refused(&nested).contains("not known"));
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
