//! Tests of files that are refused, and of the messages about them.

use super::*;

#[test]
fn every_error_is_reported_at_once() {
    let text = r#"
snapshot = 1
[events]
lanes = "four"
lane_queue_bytes = "64 KB"
max_mesage_bytes = 1
[queries]
max_batch = 0
[namespaces.llama]
blocksize = 1
hashing = "none"
[namespaces."no good"]
[admin]
listen = true
[nats]
user = "only"
"#;
    let variables = [
        ("KVATLAS_LOGGING_LEVEL", "kvatlas=loud"),
        ("KVATLAS_LOGGING_COLOR", "always"),
    ];
    let messages = refuse(
        &[("snapshots.keep", "-1"), ("nats.url", "localhost")],
        &variables,
        text,
    );
    assert_one(
        &messages,
        &[
            "line 2, key snapshot:",
            "allowed here: nats, subjects",
            "namespaces",
        ],
    );
    assert_one(
        &messages,
        &[
            "line 4, key events.lanes: must be a whole number from 0 to 256",
            "\"four\"",
        ],
    );
    assert_one(
        &messages,
        &[
            "key events.lane_queue_bytes:",
            "from 64 KiB to 4 GiB",
            "\"64 KB\"",
        ],
    );
    assert_one(&messages, &["key events.max_mesage_bytes:", "max_message_bytes"]);
    assert_one(&messages, &["key queries.max_batch:", "from 1 to 65536; it is 0"]);
    assert_one(
        &messages,
        &["key namespaces.llama.blocksize:", "block_size, hashing"],
    );
    assert_one(
        &messages,
        &[
            "key namespaces.llama.hashing:",
            "one of engine, recompute",
            "\"none\"",
        ],
    );
    assert_one(&messages, &["key namespaces.no good: must be named with 1 to 64"]);
    assert_one(
        &messages,
        &["key admin.listen:", "an IP address and a port", "it is true"],
    );
    assert_one(
        &messages,
        &["environment KVATLAS_LOGGING_LEVEL:", "must be a level"],
    );
    assert_one(
        &messages,
        &["environment KVATLAS_LOGGING_COLOR:", "KVATLAS_LOGGING_FORMAT"],
    );
    assert_one(
        &messages,
        &["flag --snapshots-keep:", "from 1 to 1000; it is \"-1\""],
    );
    assert_one(&messages, &["flag --nats-url:", "nats:// or tls://"]);
    assert_one(
        &messages,
        &["key nats.user: nats.user needs nats.password beside it"],
    );
    assert_eq!(messages.len(), 14, "{messages:#?}");
    assert!(
        messages[0].contains("line 2,") && messages[1].contains("line 4,"),
        "{messages:#?}"
    );
}

#[test]
fn a_wrong_value_is_reported_even_when_covered() {
    let messages = refuse(
        &[("events.lanes", "2")],
        &[("KVATLAS_EVENTS_LANES", "x")],
        "events.lanes = 999",
    );
    assert_one(&messages, &["line 1, key events.lanes:"]);
    assert_one(&messages, &["environment KVATLAS_EVENTS_LANES:"]);
}

#[test]
fn a_broken_line_is_one_error() {
    for (text, line) in [
        ("[nats]\nurl \"nats://a\"\n", 2),
        ("url\n", 1),
        ("= 3\n", 1),
        ("[nats]\n= \"nats://a\"\n", 2),
        ("[]\nuser = \"a\"\n", 1),
        ("[namespaces.llama]\nblock_size\n", 2),
        ("[nats\nuser = \"a\"\npassword = \"b\"\n", 1),
    ] {
        let messages = refuse(&[], &[], text);
        let expected = format!("line {line}: not valid TOML");
        assert!(
            messages.len() == 1 && messages[0].contains(&expected),
            "{text:?}: {messages:#?}"
        );
    }
}

#[test]
fn a_text_without_quotes_is_called_that() {
    for line in ["url = nats://a:4222", "url = a:4222 # ours", "user = me"] {
        let messages = refuse(&[], &[], &format!("[nats]\n{line}\n"));
        assert_one(
            &messages,
            &["line 2: not valid TOML: the value is a text, which needs quotes: u"],
        );
    }
}

#[test]
fn a_broken_file_does_not_hide_other_errors() {
    let messages = refuse(
        &[("events.lanes", "x")],
        &[],
        "[nats]\nuser = \"a\nprefix = = 3\n[admin",
    );
    assert!(messages.len() >= 3, "{messages:#?}");
    assert_one(&messages, &["line 2: not valid TOML"]);
    assert_one(&messages, &["flag --events-lanes:"]);
    let missing = Path::new("/nonexistent/kvatlas.toml");
    let flags = BTreeMap::from([("events.lanes".to_owned(), "x".to_owned())]);
    let errors = Config::load(flags, std::iter::empty(), Some(missing)).unwrap_err();
    assert!(matches!(
        errors.as_slice(),
        [ConfigError::Unreadable { .. }, ConfigError::Value { .. }]
    ));
    assert!(
        errors
            .to_string()
            .starts_with("2 errors in the configuration:\n  - file \"/nonexistent")
    );
}

#[test]
fn a_section_must_be_a_table() {
    let messages = refuse(&[], &[], "nats = 3\nnamespaces = []\n");
    assert_one(
        &messages,
        &["line 1, key nats: must be a table of settings; it is of type integer"],
    );
    assert_one(&messages, &["line 2, key namespaces:", "array"]);
    let messages = refuse(&[], &[], "[namespaces]\nllama = 3\n");
    assert_one(&messages, &["key namespaces.llama: must be a table"]);
}
