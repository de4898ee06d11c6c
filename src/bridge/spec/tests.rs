//! Engines as people write them, right and wrong.

use kvatlas_engines::GroupKind;

use super::*;

/// Returns the publishers that the text of one `--engine` names.
fn publishers(text: &str, defaults: &EngineDefaults) -> Vec<NewEngine> {
    let engines = parse_engine(text, defaults).unwrap().into_iter();
    let of_sockets = |engine| match engine {
        GivenEngine::Publisher(engine) => engine,
        GivenEngine::Server(server) => panic!("{server:?}"),
    };
    engines.map(of_sockets).collect()
}

/// Returns the server that the text of one `--engine` names.
fn server(text: &str, defaults: &EngineDefaults) -> NewServer {
    match parse_engine(text, defaults).unwrap().remove(0) {
        GivenEngine::Server(server) => server,
        GivenEngine::Publisher(engine) => panic!("{engine:?}"),
    }
}

fn defaults() -> EngineDefaults {
    EngineDefaults {
        model: Some("o/m".to_owned()),
        ..EngineDefaults::default()
    }
}

#[test]
fn a_flag_names_an_engine() {
    let text = "gpu-0=tcp://host:5557,replay=tcp://host:5558,rank=2,format=sglang,block_size=32,topic=kv,\
                address=10.0.0.7:8000,label=role:prefill,label=image:a:b";
    let engines = publishers(text, &defaults());
    let expected = NewEngine {
        key: EngineKey {
            instance: "gpu-0".to_owned(),
            model: ModelKey::new("o/m"),
            rank: 2,
        },
        endpoint: "tcp://host:5557".to_owned(),
        replay: Some("tcp://host:5558".to_owned()),
        format: Format::Sglang,
        block_size: 32,
        topic: "kv".to_owned(),
        beside: BesideEvents::default(),
        groups: GroupFacts::default(),
        profile: Profile {
            address: Address::new("10.0.0.7:8000").ok(),
            labels: serde_json::from_str(r#"{"role":"prefill","image":"a:b"}"#).unwrap(),
        },
        discovery: None,
        ttl: None,
    };
    assert_eq!(engines, [expected]);
}

#[test]
fn an_engine_without_a_scheme_has_that_of_all() {
    let all = EngineDefaults {
        scheme: read_scheme("sglang").ok(),
        ..defaults()
    };
    let scheme_of = |text: &str| publishers(text, &all).remove(0).key.model.scheme;
    assert_eq!(scheme_of("a=tcp://h:1,format=sglang"), all.scheme);
    assert_eq!(
        scheme_of("a=tcp://h:1,scheme=llm-d-xxh64:7"),
        read_scheme("llm-d-xxh64:7").ok()
    );
    assert_eq!(server("http://h:1", &all).scheme, all.scheme);
    // Servers that discovery finds get these settings.
    assert_eq!(all.server().scheme, all.scheme);
    // The scheme needs the names that SGLang gives to pages, and this engine's format is another one.
    assert!(parse_engine("a=tcp://h:1", &all).is_err());
}

#[test]
fn a_flag_states_what_events_do_not_tell_of_groups() {
    let text = "a=tcp://h:1,groups=full/window:128/state,hybrid=true,eagle=false,divergent_hits=true";
    let engines = publishers(text, &defaults());
    let expected = GroupFacts {
        kinds: vec![GroupKind::Main, GroupKind::Window(128), GroupKind::State],
        is_hybrid: true,
        has_eagle_drop: false,
        has_divergent_hits: true,
    };
    assert_eq!(engines[0].groups, expected);
}

#[test]
fn an_engine_feeds_a_namespace_of_each_scheme() {
    let namespace = |text: &str| {
        let engines = publishers(text, &defaults());
        engines[0].key.model.namespace().unwrap().to_string()
    };
    assert_eq!(namespace("a=tcp://h:1"), "o__m");
    let with_seed = "a=tcp://h:1,scheme=llm-d-xxh64:42";
    assert_eq!(namespace(with_seed), "o__m_sllm-d-xxh64_c42");
}

#[test]
fn an_address_of_a_server_is_enough() {
    let unsaid = EngineDefaults::default();
    let asked = server("http://[fd00::1]:8000", &unsaid);
    assert_eq!(
        (asked.instance.as_str(), asked.url.as_str()),
        ("[fd00::1]:8000", "http://[fd00::1]:8000")
    );
    assert_eq!((asked.model, asked.block_size), (None, None));
    assert_eq!((asked.scheme, asked.profile), (None, Profile::default()));
    let asked = server(
        "a=https://h,model=m,tenant=t,block_size=64,format=sglang,hybrid=true,scheme=llm-d-xxh64:42,\
         address=10.0.0.7:8000,label=role:prefill",
        &unsaid,
    );
    assert_eq!((asked.instance.as_str(), asked.url.as_str()), ("a", "https://h"));
    assert_eq!((asked.model.as_deref(), asked.tenant.as_str()), (Some("m"), "t"));
    assert_eq!((asked.block_size, asked.format), (Some(64), Format::Sglang));
    assert!(asked.groups.is_hybrid);
    assert_eq!(asked.scheme, read_scheme("llm-d-xxh64:42").ok());
    let expected = Profile {
        address: Address::new("10.0.0.7:8000").ok(),
        labels: serde_json::from_str(r#"{"role":"prefill"}"#).unwrap(),
    };
    assert_eq!(asked.profile, expected);
}

#[test]
fn a_server_over_grpc_is_asked_the_rest_as_well() {
    let unsaid = EngineDefaults::default();
    for format in ["vllm", "sglang", "tokenspeed", "tensorrt-llm"] {
        let asked = server(&format!("grpc://h:50051,format={format}"), &unsaid);
        assert_eq!(
            (asked.instance.as_str(), asked.url.as_str()),
            ("h:50051", "grpc://h:50051")
        );
        assert_eq!((asked.model, asked.block_size), (None, None));
    }
    assert_eq!(server("a=grpcs://h:443", &unsaid).instance, "a");
}

#[test]
fn sources_are_named_by_their_format() {
    for text in [
        "a=http://h:8000,format=tensorrt-llm",
        "a=tcp://h:5557,format=dynamo",
        "a=nats://h:4222,format=dynamo,topic=namespace.n.component.c.kv-events",
        "a=tcp://h:5557,format=mooncake",
        "a=tcp://h:5557,format=dynamo,discovery=etcd:http://e:2379",
    ] {
        parse_engine(text, &defaults()).unwrap();
    }
}

#[test]
fn ranks_have_ports_of_their_own() {
    let text = "a=tcp://[::1]:5557,replay=tcp://[::1]:6557,ranks=3,model=x,tenant=t";
    let engines = publishers(text, &EngineDefaults::default());
    let listed: Vec<_> = engines
        .iter()
        .map(|engine| {
            (
                engine.key.rank,
                engine.endpoint.as_str(),
                engine.replay.as_deref(),
            )
        })
        .collect();
    assert_eq!(
        listed,
        [
            (0, "tcp://[::1]:5557", Some("tcp://[::1]:6557")),
            (1, "tcp://[::1]:5558", Some("tcp://[::1]:6558")),
            (2, "tcp://[::1]:5559", Some("tcp://[::1]:6559")),
        ]
    );
    assert_eq!(engines[0].key.model, ModelKey::of_tenant("x", "t"));
}

/// Why a flag is refused, without the form that each refusal of a flag shows.
fn reason(text: &str, defaults: &EngineDefaults) -> String {
    match parse_engine(text, defaults) {
        Err(SpecError::Flag { reason, .. }) => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn mistakes_are_named() {
    for (text, part) in [
        ("gpu-0", "missing"),
        ("a=host:5557", "tcp://HOST:PORT"),
        ("a=tcp://*:5557", "tcp://HOST:PORT"),
        ("a=tcp://host:0", "tcp://HOST:PORT"),
        ("a=ipc:///tmp/x", "tcp://HOST:PORT"),
        ("a=tcp://h:1,rank=x", "no number"),
        ("a=tcp://h:1,rank=1,rank=2", "twice"),
        ("a=tcp://h:1,rank=1,ranks=2", "not both"),
        ("a=tcp://h:65535,ranks=2", "no port"),
        ("a=tcp://h:1,ranks=0", "from 1 to"),
        ("a=tcp://h:1,color=red", "unknown field `color`"),
        ("a=tcp://h:1,labels=role", "label=KEY:VALUE"),
        ("a=tcp://h:1,endpoint=tcp://h:2", "no key endpoint"),
        ("a=tcp://h:1,hybrid=yes", "true or false"),
        ("a=tcp://h:1,format=x", "known are"),
        ("a=tcp://h:1,block_size=0", "block_size"),
        ("a=tcp://h:1,adapters=sql", "NUMBER:NAME"),
        ("a=tcp://h:1,address=h", "HOST:PORT"),
        ("a=tcp://h:1,label=role", "KEY:VALUE"),
        ("a=tcp://h:1,label=a:b,label=a:c", "twice"),
        ("a=tcp://h:1,format=dynamo,address=h:1", "many workers"),
        ("a=tcp://h:1,salts=told", "untold"),
        ("a=tcp://h:1,lookahead=1", "untold"),
        ("a=tcp://h:1,format=tensorrt-llm", "http://HOST:PORT"),
        ("a=http://h:1,format=tensorrt-llm,replay=tcp://h:2", "no replay"),
        ("a=nats://h:1,format=dynamo", "topic="),
        ("a=tcp://h:1,format=dynamo,discovery=x", "file:DIRECTORY"),
        ("a=tcp://h:1,discovery=file:/d", "dynamo only"),
        ("http://h:1,discovery=file:/d", "leave discovery out"),
        (
            "a=nats://me:secret@h:1,format=dynamo,topic=kv",
            "nats://HOST:PORT",
        ),
        ("a=http://h:1,replay=tcp://h:2", "leave replay out"),
        ("http://h:1,ranks=2", "leave ranks out"),
        ("grpc://h:1,rank=1", "leave rank out"),
        ("grpc://h", "grpc://HOST:PORT"),
        ("a=grpc://h:1/x", "grpc://HOST:PORT"),
        ("a=grpc://h:1,format=mooncake", "not served over gRPC"),
        ("a=http://h:1/v1", "http://HOST:PORT"),
        ("a=http://me@h:1", "http://HOST:PORT"),
        ("http://h:1,block_size=0", "block_size"),
        ("http://h:1,address=h", "HOST:PORT"),
        ("http://h:1,scheme=md5", "known are llm-d-xxh64"),
        ("a=tcp://h:1,scheme=md5", "known are llm-d-xxh64"),
        (
            "a=tcp://h:1,scheme=llm-d-xxh64,format=mooncake",
            "tells no tokens",
        ),
        ("=tcp://h:1", "instance"),
    ] {
        let reason = reason(text, &defaults());
        assert!(reason.contains(part), "{text}: {reason}");
    }
    let reason = reason("a=tcp://h:1", &EngineDefaults::default());
    assert!(reason.contains("--model"), "{reason}");
}

#[test]
fn a_file_lists_engines() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("engines.toml");
    std::fs::write(
        &path,
        "[[engine]]\nname = \"a\"\nendpoint = \"tcp://h:1\"\n[[engine]]\nname = \"b\"\nendpoint = \"tcp://h:5\"\nranks = 2\naddress = \"h:80\"\nlabels = { zone = \"a\" }\n",
    )
    .unwrap();
    assert_eq!(parse_engines_file(&path, &defaults()).unwrap().len(), 3);
    for text in [
        "[[engine]]\nname = \"a\"\n",
        "[[engine]]\nname = \"a\"\nendpoint = \"tcp://h:1\"\nx = 1\n",
        "x",
    ] {
        std::fs::write(&path, text).unwrap();
        assert!(
            matches!(
                parse_engines_file(&path, &defaults()),
                Err(SpecError::File { .. })
            ),
            "{text}"
        );
    }
    std::fs::remove_file(&path).unwrap();
    assert!(matches!(
        parse_engines_file(&path, &defaults()),
        Err(SpecError::Read { .. })
    ));
}
