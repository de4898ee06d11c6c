//! Tests of files that are refused, and of the errors about them.

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
    let errors = refuse(
        &[("snapshots.keep", "-1"), ("nats.url", "localhost")],
        &variables,
        text,
    );
    assert_unknown(&errors, "snapshot", "nats, subjects", Some("snapshots"));
    assert_unknown(&errors, "snapshot", "namespaces", Some("snapshots"));
    assert_value(
        &errors,
        "events.lanes",
        "a whole number from 0 to 256",
        "\"four\"",
    );
    assert_value(
        &errors,
        "events.lane_queue_bytes",
        "from 64 KiB to 4 GiB",
        "\"64 KB\"",
    );
    let meant = "max_message_bytes";
    assert_unknown(&errors, "events.max_mesage_bytes", meant, Some(meant));
    assert_value(&errors, "queries.max_batch", "from 1 to 65536", "0");
    let (key, allowed) = ("namespaces.llama.blocksize", "block_size, hashing");
    assert_unknown(&errors, key, allowed, Some("block_size"));
    assert_value(
        &errors,
        "namespaces.llama.hashing",
        "one of engine, recompute",
        "\"none\"",
    );
    assert_value(&errors, "namespaces.no good", "named with 1 to 64", "");
    assert_value(&errors, "admin.listen", "an IP address and a port", "true");
    assert_value(&errors, "KVATLAS_LOGGING_LEVEL", "a level", "kvatlas=loud");
    let meant = "KVATLAS_LOGGING_FORMAT";
    assert_unknown(&errors, "KVATLAS_LOGGING_COLOR", meant, Some(meant));
    assert_value(&errors, "snapshots-keep", "from 1 to 1000", "\"-1\"");
    assert_value(&errors, "nats-url", "nats:// or tls://", "localhost");
    assert_combination(&errors, "nats.user", "nats.user needs nats.password beside it");
    assert_eq!(errors.len(), 14, "{errors:#?}");
    assert_eq!((errors[0].line(), errors[1].line()), (Some(2), Some(4)));
}

#[test]
fn a_wrong_value_is_reported_even_when_covered() {
    let errors = refuse(
        &[("events.lanes", "2")],
        &[("KVATLAS_EVENTS_LANES", "x")],
        "events.lanes = 999",
    );
    assert_value(&errors, "events.lanes", "", "999");
    assert_value(&errors, "KVATLAS_EVENTS_LANES", "", "x");
    assert_eq!(errors[0].line(), Some(1));
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
        let errors = refuse(&[], &[], text);
        assert!(
            matches!(errors[..], [ConfigError::Syntax { line: at, .. }] if at == line),
            "{text:?}: {errors:#?}"
        );
    }
}

#[test]
fn a_text_without_quotes_is_called_that() {
    for line in ["url = nats://a:4222", "url = a:4222 # ours", "user = me"] {
        let errors = refuse(&[], &[], &format!("[nats]\n{line}\n"));
        let quoted = "the value is a text, which needs quotes: u";
        let is_meant = |error: &ConfigError| matches!(error, ConfigError::Syntax { line: 2, reason, .. } if reason.starts_with(quoted));
        assert_one(&errors, "", is_meant);
    }
}

#[test]
fn a_broken_file_does_not_hide_other_errors() {
    let errors = refuse(
        &[("events.lanes", "x")],
        &[],
        "[nats]\nuser = \"a\nprefix = = 3\n[admin",
    );
    assert!(errors.len() >= 3, "{errors:#?}");
    assert_one(&errors, "", |error| {
        matches!(error, ConfigError::Syntax { line: 2, .. })
    });
    assert_value(&errors, "events-lanes", "", "x");
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
    let errors = refuse(&[], &[], "nats = 3\nnamespaces = []\n");
    assert_value(&errors, "nats", "a table of settings", "of type integer");
    assert_value(&errors, "namespaces", "", "array");
    assert_eq!((errors[0].line(), errors[1].line()), (Some(1), Some(2)));
    let errors = refuse(&[], &[], "[namespaces]\nllama = 3\n");
    assert_value(&errors, "namespaces.llama", "a table", "");
}

#[test]
fn settings_for_dynamo_that_would_do_nothing_are_refused() {
    let component = ("dynamo.components", "dynamo.backend");
    let discovery = ("dynamo.discovery", "file:/dyn");
    let listen = ("dynamo.listen", "127.0.0.1:5599");
    let errors = refuse(&[listen, discovery], &[], "");
    for (key, name) in [
        ("dynamo.listen", "dynamo-listen"),
        ("dynamo.discovery", "dynamo-discovery"),
    ] {
        assert_combination(&errors, name, &format!("{key} needs dynamo.components beside it"));
    }
    let errors = refuse(&[component, ("dynamo.advertise", "here")], &[], "");
    assert_combination(&errors, "dynamo-advertise", "needs dynamo.listen");
    assert!(load(&[component, discovery, listen], &[], "").is_ok());

    let twice = (
        "dynamo.components",
        "dynamo.backend=a,dynamo.other,dynamo.backend=b",
    );
    let errors = refuse(&[twice], &[], "");
    assert_combination(&errors, "dynamo-components", "dynamo.backend is there twice");
}

#[test]
fn routers_of_dynamo_are_told_no_address_that_is_none() {
    let with = |listen| {
        [
            ("dynamo.components", "dynamo.backend"),
            ("dynamo.discovery", "file:/dyn"),
            ("dynamo.listen", listen),
        ]
    };
    for listen in ["0.0.0.0:5598", "[::]:5598"] {
        let errors = refuse(&with(listen), &[], "");
        assert_combination(&errors, "dynamo-listen", "needs dynamo.advertise");
        let told = [&with(listen)[..], &[("dynamo.advertise", "here.example")]].concat();
        assert!(load(&told, &[], "").is_ok());
    }
    assert!(load(&with("127.0.0.1:5598"), &[], "").is_ok());
}

#[test]
fn the_doctor_is_told_no_address_at_which_nobody_listens() {
    let advertise = ("admin.advertise", "vm.local");
    for listen in [None, Some("off"), Some("127.0.0.1:9470"), Some("[::1]:9470")] {
        let listen = listen.map(|address| ("admin.listen", address));
        let given: Vec<_> = listen.into_iter().chain([advertise]).collect();
        let errors = refuse(&given, &[], "");
        assert_combination(&errors, "admin-advertise", "needs an admin.listen");
    }
    assert!(load(&[advertise, ("admin.listen", "0.0.0.0:9470")], &[], "").is_ok());
}

#[test]
fn names_have_room_for_the_doctors_own() {
    let errors = refuse(&[("limits.max_name_bytes", "13")], &[], "");
    assert_value(&errors, "limits-max-name-bytes", "from 16 to 64", "13");
    let least = load(&[("limits.max_name_bytes", "16")], &[], "").unwrap();
    assert!(kvatlas_core::wire::PROBE_NAME.len() <= least.limits.max_name_bytes);
}

/// A test that clients refuse what the daemon refuses, of the variables that they read. Kubernetes' variables of services
/// stay.
#[test]
fn misspelt_variables_of_clients_are_mistakes() {
    let refused = |name: &str| {
        let environment = [
            (name, "1"),
            ("KVATLAS_EVENTS_LANES", "x"),
            ("KVATLAS_OTHER", "x"),
            ("KVATLAS_NATS_SERVICE_HOST", "10.0.0.1"),
            ("KVATLAS_NATS_PORT_4222_TCP", "tcp://10.0.0.1:4222"),
        ];
        let own = |(name, text): (&str, &str)| (name.to_owned(), text.to_owned());
        let environment = || environment.into_iter().map(own);
        let loaded = [
            Config::load_for_client(BTreeMap::new(), environment()),
            Config::load_for_bridge(BTreeMap::new(), environment()),
        ];
        loaded.map(|loaded| loaded.map_or_else(|errors| errors.as_slice().to_vec(), |_| Vec::new()))
    };
    assert_eq!(refused("KVATLAS_METRICS_PORT"), [vec![], vec![]], "a daemon's");
    for (name, meant) in [
        ("KVATLAS_NATS_TLS_REQUIERD", "KVATLAS_NATS_TLS_REQUIRED"),
        ("KVATLAS_SUBJECT_PREFIX", "KVATLAS_SUBJECTS_PREFIX"),
    ] {
        for errors in refused(name) {
            assert_eq!(errors.len(), 1, "{errors:?}");
            assert_unknown(&errors, name, "", Some(meant));
        }
    }
}
