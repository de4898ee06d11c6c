use std::time::Duration;

use super::*;

const GUESS: &str =
    r#"{"PodIdentifier":"10.0.0.2:8000","DeviceTier":"","Speculative":true,"HasGroup":false,"GroupIdx":0}"#;
const ENGINES: &str = r#"{"PodIdentifier":"10.0.0.2:8000","DeviceTier":"gpu","Speculative":false,"HasGroup":false,"GroupIdx":0}"#;

/// Client in these tests: its session, and the commands and replies that answer it.
struct Client {
    commands: Commands,
    session: RedisSession,
    replies: ReplyBuffer,
}

impl Client {
    fn new(token: Option<&str>) -> Self {
        let commands = Commands {
            token: token.map(TokenFile::of),
            guesses: Guesses::new(Duration::from_secs(2), 1 << 20),
            metrics: RedisMetrics::new(),
        };
        let session = RedisSession {
            number: 7,
            shown: None,
        };
        Self {
            commands,
            session,
            replies: ReplyBuffer::default(),
        }
    }

    fn send(&mut self, words: &[&str]) -> String {
        let words: Vec<&[u8]> = words.iter().map(|word| word.as_bytes()).collect();
        self.replies.clear(0);
        if self.commands.admits(&self.session, words[0], &mut self.replies) {
            let now = Instant::now();
            self.commands
                .carry_out(&mut self.session, &words, now, &mut self.replies);
        }
        String::from_utf8(self.replies.bytes().to_vec()).unwrap()
    }
}

#[test]
fn a_password_that_has_been_replaced_no_longer_counts() {
    let mut client = Client::new(Some("first"));
    assert_eq!(client.send(&["auth", "first"]), "+OK\r\n");
    assert_eq!(client.send(&["ping"]), "+PONG\r\n");
    client.commands.token.as_ref().unwrap().replace("second");
    assert!(client.send(&["ping"]).starts_with("-NOAUTH"));
    assert!(client.send(&["auth", "first"]).starts_with("-WRONGPASS"));
    assert_eq!(client.send(&["auth", "second"]), "+OK\r\n");
    assert_eq!(client.send(&["ping"]), "+PONG\r\n");
}

#[test]
fn a_client_and_its_version_are_greeted() {
    let mut client = Client::new(None);
    assert_eq!(client.send(&["PING"]), "+PONG\r\n");
    assert_eq!(client.send(&["ping", "x"]), "$1\r\nx\r\n");
    assert!(client.send(&["hello"]).starts_with("*14\r\n$6\r\nserver\r\n"));
    let hello = client.send(&["hello", "3", "SETNAME", "epp"]);
    assert!(
        hello.starts_with("%7\r\n$6\r\nserver\r\n$5\r\nredis\r\n"),
        "{hello}"
    );
    assert!(
        hello.ends_with("$5\r\nproto\r\n:3\r\n$2\r\nid\r\n:7\r\n$4\r\nmode\r\n$10\r\nstandalone\r\n$4\r\nrole\r\n$6\r\nmaster\r\n$7\r\nmodules\r\n*0\r\n"),
        "{hello}"
    );
    assert!(client.send(&["hello", "4"]).starts_with("-NOPROTO"));
    assert_eq!(client.send(&["select", "0"]), "+OK\r\n");
    assert!(client.send(&["select", "1"]).starts_with("-ERR"));
    assert_eq!(
        client.send(&["client", "setinfo", "LIB-VER", "9"]),
        "-ERR unknown subcommand 'setinfo'. Try CLIENT HELP.\r\n"
    );
}

#[test]
fn nothing_is_answered_without_the_password() {
    let mut client = Client::new(Some("s3cret"));
    for words in [&["ping"][..], &["hset", "1", GUESS, ""], &["hello", "3"]] {
        assert!(client.send(words).starts_with("-NOAUTH"), "{words:?}");
    }
    assert!(client.send(&["auth", "s3creT"]).starts_with("-WRONGPASS"));
    assert!(
        client
            .send(&["hello", "3", "auth", "default", "x"])
            .starts_with("-WRONGPASS")
    );
    assert!(client.send(&["ping"]).starts_with("-NOAUTH"));
    assert!(
        client
            .send(&["hello", "3", "auth", "default", "s3cret"])
            .starts_with("%7")
    );
    assert_eq!(client.send(&["ping"]), "+PONG\r\n");
    let mut other = Client::new(Some("s3cret"));
    assert_eq!(other.send(&["AUTH", "s3cret"]), "+OK\r\n");
}

#[test]
fn guesses_are_written_and_taken_back() {
    let mut client = Client::new(None);
    assert_eq!(client.send(&["hset", "5", GUESS, ""]), ":1\r\n");
    assert_eq!(client.send(&["hset", "5", GUESS, ""]), ":0\r\n");
    let run = ["evalsha", PRUNE_KEY, "1", "5"];
    assert_eq!(client.send(&run), ":0\r\n");
    assert_eq!(
        client.send(&["scan", "0", "match", "*", "count", "1024"]),
        "*2\r\n$1\r\n0\r\n*1\r\n$1\r\n5\r\n"
    );
    assert_eq!(client.send(&["hdel", "5", GUESS, ENGINES]), ":1\r\n");
    assert_eq!(client.send(&run), ":1\r\n");
    assert_eq!(
        client.send(&["evalsha", PRUNE_ENGINE_KEY, "2", "engine:9", "5"]),
        ":1\r\n"
    );
    assert_eq!(client.send(&["scan", "0"]), "*2\r\n$1\r\n0\r\n*0\r\n");
}

#[test]
fn scripts_are_known_by_their_digests() {
    let mut client = Client::new(None);
    let exists = client.send(&["script", "exists", PRUNE_KEY, "0"]);
    assert_eq!(exists, "*2\r\n:1\r\n:0\r\n");
    assert!(
        client
            .send(&["evalsha", &"0".repeat(40), "0"])
            .starts_with("-NOSCRIPT")
    );
    assert!(client.send(&["eval", "return 1", "0"]).starts_with("-NOSCRIPT"));
    assert!(client.send(&["script", "load", "return 1"]).starts_with("-ERR"));
    for words in [
        &["evalsha", PRUNE_KEY][..],
        &["evalsha", PRUNE_KEY, "2", "1"],
        &["evalsha", PRUNE_KEY, "0"],
    ] {
        assert!(client.send(words).starts_with("-ERR"), "{words:?}");
    }
    assert_eq!(digest_of(b"abc"), "a9993e364706816aba3e25717850c26c9cd0d89d");
}

#[test]
fn what_is_no_guess_is_refused() {
    let mut client = Client::new(None);
    for words in [
        &["hset", "5", ENGINES, ""][..],
        &["hset", "5", GUESS, "", ENGINES, ""],
        &["zadd", "engine:5", "0", "5"],
        &["zrange", "engine:5", "0", "-1"],
    ] {
        let reply = client.send(words);
        assert!(
            reply.starts_with("-ERR kvatlas follows the engines itself"),
            "{reply}"
        );
    }
    for words in [
        &["hset", "x", GUESS, ""][..],
        &["hset", "-1", GUESS, ""],
        &["hset", "18446744073709551616", GUESS, ""],
        &["hset", "5", "x", ""],
        &["hset", "5", GUESS],
        &["hset", "5"],
        &["hset"],
        &["hdel", "5"],
        &["scan", "0", "match", "5*"],
        &["scan", "x"],
        &["flushall"],
        &["get", "5"],
        &["nothing\r\n+OK"],
    ] {
        let reply = client.send(words);
        assert!(reply.starts_with("-ERR"), "{words:?}: {reply}");
        assert_eq!(reply.lines().count(), 1, "{reply:?}");
    }
    assert!(!client.commands.guesses.has_any([5], Instant::now()));
}
