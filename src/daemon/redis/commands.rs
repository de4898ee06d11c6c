//! Answers to all commands except `HKEYS`, without I/O. (`connection` turns consecutive `HKEYS` commands into one
//! search.)
//!
//! | command | answer |
//! |---|---|
//! | `HELLO`, `AUTH`, `PING`, `ECHO`, `SELECT 0`, `QUIT` | as Redis answers |
//! | `HSET`, `HDEL` of guesses (predictions by a router of where blocks will be) | kept for a short time; removed |
//! | `EVALSHA`, `EVAL`, `SCRIPT LOAD` of llm-d's two scripts | whether the keys have guesses; nothing is pruned |
//! | `SCAN` | the keys that have guesses |
//! | commands that write an engine's blocks | refused, because kvatlas follows the engines itself |
//! | everything else | refused |

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Instant;

use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};

use crate::http::TokenFile;
use kvatlas_config::Secret;
use kvatlas_telemetry::RedisMetrics;
use kvatlas_telemetry::labels::{RedisCommand, RedisRefusal};

use super::entry::{FIELD_BYTES_MAX, Word, word_of};
use super::guesses::Guesses;
use super::resp::ReplyBuffer;

/// SHA-1 of llm-d's script that deletes a key's hash if the hash has no entries. The script returns 1 if there are no
/// entries.
const PRUNE_KEY: &str = "5fe1918cd9f14ea60dc41ffade94683bd8e522af";
/// SHA-1 of llm-d's script that deletes an engine's key. The script returns 1 if none of its keys has entries, except
/// perhaps the first key, which it does not check.
const PRUNE_ENGINE_KEY: &str = "8ca33a56678aac75b55d3b36907c43b67947d809";
/// Release of Redis whose answers have been compared with the answers here.
const VERSION: &str = "7.0.15";
/// Number of keys in one page of the answer to `SCAN`, if the client asks for no other number.
const PAGE_KEYS: usize = 10;
const PAGE_KEYS_MAX: usize = 1024;

const NO_AUTH: &str = "NOAUTH Authentication required.";
const WRONG_PASSWORD: &str = "WRONGPASS invalid username-password pair or user is disabled.";
const WORDS: &str = "ERR wrong number of arguments";
const NO_KEY: &str = "ERR keys are block hashes in decimal digits";
const ENGINES_OWN: &str = "ERR kvatlas follows the engines itself and keeps speculative entries only; switch off the router's own subscription (kvEventsConfig)";

/// Whether a connection goes on after a command, or ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Goes {
    On,
    /// Connection ends when the reply has been sent.
    Away,
}

/// State of a connection that its commands can change.
#[derive(Debug)]
pub(super) struct RedisSession {
    /// Number of the connection. The reply to `HELLO` tells it to the client.
    pub(super) number: u64,
    /// Password that the client has shown; `None` if it has shown none that was right.
    pub(super) shown: Option<Arc<Secret>>,
}

/// State and settings that commands use, shared by all connections.
pub(super) struct Commands {
    pub(super) token: Option<TokenFile>,
    pub(super) guesses: Guesses,
    pub(super) metrics: RedisMetrics,
}

/// Command that is being carried out: its arguments, and the state that it uses.
struct Doing<'a> {
    commands: &'a Commands,
    words: &'a [&'a [u8]],
    replies: &'a mut ReplyBuffer,
    now: Instant,
}

/// Reads a key, which is a number written in decimal digits.
pub(super) fn key_of(word: &[u8]) -> Option<u64> {
    let digits = word.iter().all(u8::is_ascii_digit).then_some(word)?;
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// Whether `word` is `expected`, regardless of case.
pub(super) fn is(word: &[u8], expected: &str) -> bool {
    word.eq_ignore_ascii_case(expected.as_bytes())
}

impl Commands {
    /// Whether the client has shown the password, or needs none. A password that a reload has replaced does not count.
    pub(super) fn knows(&self, session: &RedisSession) -> bool {
        let is_shown = |token: &TokenFile| {
            session
                .shown
                .as_ref()
                .is_some_and(|shown| token.is_present(shown))
        };
        self.token.as_ref().is_none_or(is_shown)
    }

    /// Whether this client's command may be answered. If not, writes the refusal.
    pub(super) fn admits(&self, session: &RedisSession, word: &[u8], replies: &mut ReplyBuffer) -> bool {
        let opens = ["hello", "auth", "quit"].iter().any(|opening| is(word, opening));
        let is_admitted = opens || self.knows(session);
        if !is_admitted {
            self.refuse(RedisRefusal::Unauthenticated, NO_AUTH, replies);
        }
        is_admitted
    }

    /// Refuses a command, that is, counts the refusal and writes `text` as the error.
    pub(super) fn refuse(&self, reason: RedisRefusal, text: &str, replies: &mut ReplyBuffer) {
        self.metrics.refused(reason, &text);
        replies.error(text);
    }

    /// Carries out a command other than `HKEYS`. `words` are its name and its arguments.
    pub(super) fn carry_out(
        &self,
        session: &mut RedisSession,
        words: &[&[u8]],
        now: Instant,
        replies: &mut ReplyBuffer,
    ) -> Goes {
        let Some((name, words)) = words.split_first() else {
            return Goes::On;
        };
        let mut doing = Doing {
            commands: self,
            words,
            replies,
            now,
        };
        let lower = name.to_ascii_lowercase();
        let done = match lower.as_slice() {
            b"ping" => doing.ping(),
            b"echo" => doing.echo(),
            b"hello" => doing.hello(session),
            b"auth" => doing.auth(session),
            b"select" => doing.select(),
            b"client" => doing.client(),
            b"hset" => doing.set(),
            b"hdel" => doing.delete(),
            b"evalsha" => doing.run_by_digest(),
            b"eval" => doing.run_by_text(),
            b"script" => doing.script(),
            b"scan" => doing.scan(),
            b"zadd" | b"zrange" => Err((RedisRefusal::EngineEntry, ENGINES_OWN.to_owned())),
            b"quit" => {
                doing.replies.simple("OK");
                Ok(RedisCommand::Connection)
            }
            _ => Err(unknown(name)),
        };
        match done {
            Ok(command) => self.metrics.commands.get(command).increment(1),
            Err((reason, text)) => self.refuse(reason, &text, replies),
        }
        match lower.as_slice() {
            b"quit" => Goes::Away,
            _ => Goes::On,
        }
    }
}

/// Result of a command: its label, or the reason and text of its refusal.
type Done = Result<RedisCommand, (RedisRefusal, String)>;

fn refused(reason: RedisRefusal, text: &str) -> Done {
    Err((reason, text.to_owned()))
}

fn bad(text: &str) -> Done {
    refused(RedisRefusal::BadRequest, text)
}

fn unknown(name: &[u8]) -> (RedisRefusal, String) {
    let name = String::from_utf8_lossy(name.get(..name.len().min(64)).unwrap_or_default());
    let text = format!(
        "ERR unknown command '{name}': kvatlas answers HKEYS, and HSET and HDEL of speculative entries, as llm-d's router sends them"
    );
    (RedisRefusal::UnknownCommand, text)
}

impl Doing<'_> {
    fn ping(&mut self) -> Done {
        match self.words {
            [] => self.replies.simple("PONG"),
            [text] => self.replies.text(text),
            _ => return bad(WORDS),
        }
        Ok(RedisCommand::Connection)
    }

    fn echo(&mut self) -> Done {
        let [text] = self.words else {
            return bad(WORDS);
        };
        self.replies.text(text);
        Ok(RedisCommand::Connection)
    }

    /// Answers `HELLO`: agrees on a version of the protocol, and checks the client's password if the command has one.
    fn hello(&mut self, session: &mut RedisSession) -> Done {
        let mut words = self.words.iter();
        let is_third = match words.next() {
            None => self.replies.is_third,
            Some(&b"2") => false,
            Some(&b"3") => true,
            Some(_) => return bad("NOPROTO unsupported protocol version"),
        };
        while let Some(option) = words.next() {
            if is(option, "auth") {
                let (Some(_), Some(password)) = (words.next(), words.next()) else {
                    return bad(WORDS);
                };
                self.show(session, password)?;
            } else if is(option, "setname") && words.next().is_some() {
                // The client's name is ignored.
            } else {
                return bad("ERR syntax error in HELLO");
            }
        }
        if !self.commands.knows(session) {
            return refused(RedisRefusal::Unauthenticated, NO_AUTH);
        }
        self.replies.is_third = is_third;
        self.replies.map(7);
        for (key, value) in [("server", "redis"), ("version", VERSION)] {
            self.replies.text(key.as_bytes());
            self.replies.text(value.as_bytes());
        }
        self.replies.text(b"proto");
        self.replies.number(if is_third { 3 } else { 2 });
        self.replies.text(b"id");
        self.replies.number(session.number);
        for (key, value) in [("mode", "standalone"), ("role", "master")] {
            self.replies.text(key.as_bytes());
            self.replies.text(value.as_bytes());
        }
        self.replies.text(b"modules");
        self.replies.list(0);
        Ok(RedisCommand::Connection)
    }

    fn auth(&mut self, session: &mut RedisSession) -> Done {
        let password = match self.words {
            [password] | [_, password] => password,
            _ => return bad(WORDS),
        };
        self.show(session, password)?;
        self.replies.simple("OK");
        Ok(RedisCommand::Connection)
    }

    /// Checks a client's password. The user's name is ignored.
    fn show(&self, session: &mut RedisSession, password: &[u8]) -> Done {
        if let Some(token) = &self.commands.token {
            let Some(shown) = token.accept(password) else {
                return refused(RedisRefusal::Unauthenticated, WRONG_PASSWORD);
            };
            session.shown = Some(shown);
        }
        Ok(RedisCommand::Connection)
    }

    fn select(&mut self) -> Done {
        match self.words {
            [b"0"] => self.replies.simple("OK"),
            [_] => return bad("ERR DB index is out of range"),
            _ => return bad(WORDS),
        }
        Ok(RedisCommand::Connection)
    }

    /// Refuses `CLIENT` commands, by which clients describe themselves. Redis before 7.2 refuses them as well,
    /// and clients go on without them.
    fn client(&mut self) -> Done {
        let [subcommand, ..] = self.words else {
            return bad(WORDS);
        };
        let subcommand = subcommand.get(..subcommand.len().min(64)).unwrap_or_default();
        let subcommand = String::from_utf8_lossy(subcommand);
        // Every client sends this command, so the refusal is not counted.
        self.replies.error(&format!(
            "ERR unknown subcommand '{subcommand}'. Try CLIENT HELP."
        ));
        Ok(RedisCommand::Connection)
    }

    /// Keeps the guesses (a router's predictions of where blocks will be) of one `HSET` command. If one of them is
    /// refused, none is kept.
    fn set(&mut self) -> Done {
        let Some((key, pairs)) = self.words.split_first() else {
            return bad(WORDS);
        };
        let (pairs, []) = pairs.as_chunks::<2>() else {
            return bad(WORDS);
        };
        if pairs.is_empty() {
            return bad(WORDS);
        }
        let Some(key) = key_of(key) else {
            return bad(NO_KEY);
        };
        for [field, _] in pairs {
            match word_of(field) {
                Some(Word::Guess) => {}
                Some(Word::Engine) => return refused(RedisRefusal::EngineEntry, ENGINES_OWN),
                None => {
                    let text = format!(
                        "ERR a field is the JSON of an entry of llm-d, of {FIELD_BYTES_MAX} bytes at most"
                    );
                    return Err((RedisRefusal::BadRequest, text));
                }
            }
        }
        let guesses = &self.commands.guesses;
        let added = pairs
            .iter()
            .filter(|[field, _]| guesses.add(key, field, self.now))
            .count();
        self.replies.number(added as u64);
        Ok(RedisCommand::Write)
    }

    fn delete(&mut self) -> Done {
        let [key, fields @ ..] = self.words else {
            return bad(WORDS);
        };
        if fields.is_empty() {
            return bad(WORDS);
        }
        let Some(key) = key_of(key) else {
            return bad(NO_KEY);
        };
        let guesses = &self.commands.guesses;
        let removed = fields
            .iter()
            .filter(|field| guesses.remove(key, field, self.now))
            .count();
        self.replies.number(removed as u64);
        Ok(RedisCommand::Write)
    }

    fn run_by_digest(&mut self) -> Done {
        match self.words {
            [digest, rest @ ..] => self.run(&digest.to_ascii_lowercase(), rest),
            [] => bad(WORDS),
        }
    }

    fn run_by_text(&mut self) -> Done {
        match self.words {
            [text, rest @ ..] => self.run(digest_of(text).as_bytes(), rest),
            [] => bad(WORDS),
        }
    }

    /// Carries out one of llm-d's two scripts.
    fn run(&mut self, digest: &[u8], rest: &[&[u8]]) -> Done {
        let Some((count, keys)) = rest.split_first() else {
            return bad(WORDS);
        };
        let count = key_of(count).and_then(|count| usize::try_from(count).ok());
        let Some(keys) = count.and_then(|count| keys.get(..count)) else {
            return bad("ERR Number of keys can't be greater than number of args");
        };
        let keys = match (digest, keys) {
            (digest, [_]) if digest == PRUNE_KEY.as_bytes() => keys,
            (digest, [_, keys @ ..]) if digest == PRUNE_ENGINE_KEY.as_bytes() => keys,
            (digest, _)
                if [PRUNE_KEY, PRUNE_ENGINE_KEY]
                    .iter()
                    .any(|known| known.as_bytes() == digest) =>
            {
                return bad(WORDS);
            }
            _ => {
                return refused(
                    RedisRefusal::UnknownScript,
                    "NOSCRIPT No matching script. Please use EVAL.",
                );
            }
        };
        let keys = keys.iter().filter_map(|key| key_of(key));
        let has_any = self.commands.guesses.has_any(keys, self.now);
        self.replies.number(u64::from(!has_any));
        Ok(RedisCommand::Script)
    }

    /// Answers `SCRIPT EXISTS`, and `SCRIPT LOAD` if it brings one of llm-d's two scripts.
    fn script(&mut self) -> Done {
        let is_known = |digest: &[u8]| {
            [PRUNE_KEY, PRUNE_ENGINE_KEY]
                .iter()
                .any(|known| is(digest, known))
        };
        match self.words {
            [subcommand, text] if is(subcommand, "load") => {
                let digest = digest_of(text);
                if !is_known(digest.as_bytes()) {
                    let text = "ERR kvatlas knows the two scripts of llm-d's index and no others";
                    return refused(RedisRefusal::UnknownScript, text);
                }
                self.replies.text(digest.as_bytes());
            }
            [subcommand, digests @ ..] if is(subcommand, "exists") => {
                self.replies.list(digests.len());
                for digest in digests {
                    self.replies.number(u64::from(is_known(digest)));
                }
            }
            _ => return bad("ERR kvatlas answers SCRIPT LOAD and SCRIPT EXISTS"),
        }
        Ok(RedisCommand::Script)
    }

    /// Answers `SCAN` with one page of the keys that have guesses, that is, predictions by routers of where blocks will
    /// be.
    fn scan(&mut self) -> Done {
        let Some((cursor, options)) = self.words.split_first() else {
            return bad(WORDS);
        };
        let Some(cursor) = key_of(cursor) else {
            return bad("ERR invalid cursor");
        };
        let (options, []) = options.as_chunks::<2>() else {
            return bad(WORDS);
        };
        let mut count = PAGE_KEYS;
        for [option, value] in options {
            match key_of(value) {
                Some(number @ 1..) if is(option, "count") => {
                    count = usize::try_from(number).unwrap_or(usize::MAX).min(PAGE_KEYS_MAX);
                }
                _ if is(option, "match") && **value == *b"*" => {}
                _ => return bad("ERR kvatlas scans with MATCH * and COUNT only"),
            }
        }
        let (keys, next) = self.commands.guesses.keys(cursor, count, self.now);
        self.replies.list(2);
        self.replies.text(next.to_string().as_bytes());
        self.replies.list(keys.len());
        for key in keys {
            self.replies.text(key.to_string().as_bytes());
        }
        Ok(RedisCommand::Scan)
    }
}

/// Returns the SHA-1 of a script in hexadecimal. Redis names a script by this digest.
fn digest_of(text: &[u8]) -> String {
    let digest = digest(&SHA1_FOR_LEGACY_USE_ONLY, text);
    let write = |mut text: String, byte: &u8| {
        // Writing to a text cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    };
    digest.as_ref().iter().fold(String::new(), write)
}

#[cfg(test)]
mod tests;
