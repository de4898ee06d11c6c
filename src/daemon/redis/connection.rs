//! One connection of a Redis client. It reads as much of a pipeline (commands sent without waiting for replies) as has
//! arrived. It answers the commands in order, and writes replies as fast as the client takes them.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use kvatlas_config::RedisConfig;
use kvatlas_process::listener::Place;
use kvatlas_telemetry::labels::{RedisCommand, RedisRefusal};

use super::commands::{Commands, Goes, RedisSession, is, key_of};
use super::prefixes::{PipelinePart, Prefixes, PromptChain};
use super::resp::{ParsedCommand, ReadCommand, ReplyBuffer, read_command};

/// Length of the collected replies at which they are sent to the client, in bytes.
const PIECE_BYTES: usize = 64 << 10;
/// Number of bytes that are read in one step. Each connection has this much memory of its own.
const READ_BYTES: usize = 16 << 10;
/// Time for which a part of a pipeline waits for further keys, where these may add blocks to the answer. A client that has
/// more to send has begun already: its pipeline comes in several segments.
pub(super) const MORE_PATIENCE: Duration = Duration::from_millis(3);
/// Time for which a connection may go on after the daemon is told to stop.
pub(super) const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);
/// Number of bytes that one permit of the semaphore `room` (memory for commands) stands for.
const ROOM_UNIT: usize = 1 << 10;

/// State and settings that all connections share.
pub(super) struct RedisDoor {
    pub(super) commands: Commands,
    pub(super) prefixes: Prefixes,
    /// Memory for long commands, shared by all connections. Each connection has [`READ_BYTES`] of its own, and needs the
    /// shared memory for more. One permit stands for [`ROOM_UNIT`] bytes.
    pub(super) room: Arc<Semaphore>,
    /// Memory for long answers that are being taken, of the same size. It is apart, so that clients that take their answers
    /// slowly keep nobody from asking.
    pub(super) answer_room: Arc<Semaphore>,
    /// Time to wait for further keys, [`MORE_PATIENCE`] except in tests.
    pub(super) more_patience: Duration,
    pub(super) config: RedisConfig,
}

impl RedisDoor {
    /// Creates shared memory, `bytes` in size, as a semaphore.
    pub(super) fn room(bytes: usize) -> Arc<Semaphore> {
        Arc::new(Semaphore::new((bytes / ROOM_UNIT).min(Semaphore::MAX_PERMITS)))
    }

    /// Reserves `units` times [`ROOM_UNIT`] bytes of the shared memory. `None` if there is not enough.
    fn try_reserve(&self, units: usize) -> Option<OwnedSemaphorePermit> {
        let units = u32::try_from(units).unwrap_or(u32::MAX);
        Arc::clone(&self.room).try_acquire_many_owned(units).ok()
    }

    /// Reserves memory for a long answer of `bytes`. Waits for it as long as for a request. `None` if there is not enough
    /// then.
    async fn answer_room(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        if bytes > self.config.max_receiving_bytes {
            return None;
        }
        let units = u32::try_from(bytes / ROOM_UNIT).ok()?;
        let acquired = Arc::clone(&self.answer_room).acquire_many_owned(units);
        timeout(self.config.request_timeout, acquired).await.ok()?.ok()
    }
}

/// Serves a client until one of these happens: the client leaves or breaks a limit, the connection gives way to a new one (is
/// displaced), or the daemon stops.
pub(super) async fn serve(
    door: Arc<RedisDoor>,
    stream: TcpStream,
    place: Place,
    number: u64,
    stopping: CancellationToken,
) {
    let mut connection = RedisConnection {
        session: RedisSession { number, shown: None },
        door,
        stream,
        place: &place,
        stopping: stopping.clone(),
        input: BytesMut::new(),
        bytes_min: 0,
        due: None,
        keys: Vec::new(),
        room: None,
        replies: ReplyBuffer::default(),
        chain: PromptChain::default(),
    };
    let drained = async {
        stopping.cancelled().await;
        tokio::time::sleep(DRAIN_TIMEOUT).await;
    };
    tokio::select! {
        ended = connection.run() => {
            if let Err(error) = ended {
                tracing::debug!(%error, "a connection of a router of llm-d has ended");
            }
        }
        () = place.displaced() => {}
        () = drained => {}
    }
}

/// Whether a pipeline ends after the keys that have been collected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ends {
    /// Another command follows, or the keys cannot wait for more.
    Here,
    /// Nothing has come after the keys yet.
    Perhaps,
}

struct RedisConnection<'p> {
    door: Arc<RedisDoor>,
    stream: TcpStream,
    place: &'p Place,
    stopping: CancellationToken,
    session: RedisSession,
    /// Bytes that have arrived and have not been answered.
    input: BytesMut,
    /// Number of bytes of `input` without which no command can be whole.
    bytes_min: usize,
    /// Time by which the command that has begun to arrive must have arrived in full; `None` between two commands.
    due: Option<tokio::time::Instant>,
    /// Keys of the last `HKEYS` commands. They wait for the rest of their pipeline while it arrives.
    keys: Vec<u64>,
    /// Share of the common memory that the connection uses in addition to its own memory.
    room: Option<OwnedSemaphorePermit>,
    replies: ReplyBuffer,
    chain: PromptChain,
}

impl RedisConnection<'_> {
    async fn run(&mut self) -> io::Result<()> {
        while self.receive().await? {
            self.place.note_waits(false);
            let goes = self.answer().await?;
            self.place.note_waits(true);
            if goes == Goes::Away {
                break;
            }
        }
        Ok(())
    }

    /// Waits for more bytes, and reads the part of the pipeline that has arrived. Returns false if the connection must
    /// end.
    async fn receive(&mut self) -> io::Result<bool> {
        if !self.reserve() {
            let text = "ERR too many bytes of commands wait; ask again later";
            self.cut(RedisRefusal::TooLarge, text).await?;
            return Ok(false);
        }
        let due = self.due.unwrap_or_else(|| now() + self.door.config.idle_timeout);
        let read = timeout_at(due, self.stream.read_buf(&mut self.input));
        let read = match self.stopping.run_until_cancelled(read).await {
            None => return Ok(false),
            Some(Err(_)) => return Err(io::ErrorKind::TimedOut.into()),
            Some(Ok(read)) => read?,
        };
        if read == 0 {
            return Ok(false);
        }
        let timeout = self.door.config.request_timeout;
        self.due.get_or_insert_with(|| now() + timeout);
        // Further bytes that have come already most likely belong to the same pipeline.
        while self.bytes_waiting() < self.command_bytes_max() && self.reserve() {
            match self.stream.try_read_buf(&mut self.input) {
                Ok(1..) => {}
                Ok(0) => break,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Returns the maximum length of a command, in bytes. It is smaller before the client has shown the password.
    fn command_bytes_max(&self) -> usize {
        let bytes_max = self.door.config.max_command_bytes;
        match self.door.commands.knows(&self.session) {
            true => bytes_max,
            false => bytes_max.min(READ_BYTES),
        }
    }

    /// Returns the length of all that has arrived and has not been answered: bytes, and the keys of `HKEYS` commands.
    fn bytes_waiting(&self) -> usize {
        self.input.len() + size_of_val(self.keys.as_slice())
    }

    /// Reserves memory to read more bytes after the bytes that have arrived. Returns false if there is not enough
    /// shared memory.
    fn reserve(&mut self) -> bool {
        let units = self.bytes_waiting().div_ceil(ROOM_UNIT);
        let held = self.room.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        if units > held {
            let Some(permit) = self.door.try_reserve(units - held) else {
                return false;
            };
            match &mut self.room {
                Some(room) => room.merge(permit),
                None => self.room = Some(permit),
            }
        }
        self.input.reserve(READ_BYTES);
        true
    }

    /// Frees memory that is not needed once all commands are answered.
    fn release(&mut self) {
        if self.input.is_empty() && self.keys.is_empty() {
            self.input = BytesMut::new();
            self.room = None;
        }
        self.replies.clear(PIECE_BYTES);
    }

    /// Answers all commands that have arrived in full, except the last `HKEYS` commands of a pipeline that still arrives.
    async fn answer(&mut self) -> io::Result<Goes> {
        let mut goes = Goes::On;
        if self.input.len() >= self.bytes_min {
            // The bytes are not copied: a client may send a long command in many small parts.
            let mut input = std::mem::take(&mut self.input);
            let answered;
            (answered, goes) = self.answer_whole(&input).await?;
            input.advance(answered);
            self.input = input;
            if answered > 0 && self.keys.is_empty() {
                self.due = (!self.input.is_empty()).then(|| now() + self.door.config.request_timeout);
            }
        }
        if goes == Goes::On && self.input.len() >= self.command_bytes_max() {
            self.look_up(Ends::Here).await?;
            self.cut(RedisRefusal::TooLarge, "ERR a command is too long")
                .await?;
            return Ok(Goes::Away);
        }
        self.release();
        Ok(goes)
    }

    /// Answers the commands of `input` that are whole. Returns their length in bytes, and whether the connection goes
    /// on. Notes how many bytes the next command needs.
    ///
    /// If `input` ends inside a command, the pipeline goes on, so the keys of the last `HKEYS` commands wait for it. If it
    /// ends between two commands, they wait for a moment where further keys may change the answer. A search for the
    /// beginning of a prompt may find nothing at a holder of windows or states that has the whole prompt.
    async fn answer_whole(&mut self, input: &[u8]) -> io::Result<(usize, Goes)> {
        let (mut at, mut goes) = (0, Goes::On);
        self.bytes_min = 0;
        while goes == Goes::On {
            let ParsedCommand { words, bytes } = match read_command(input.get(at..).unwrap_or_default()) {
                Ok(ReadCommand::Whole(command)) => command,
                Ok(ReadCommand::Part { bytes_min }) => {
                    self.bytes_min = bytes_min;
                    break;
                }
                Err(error) => {
                    self.look_up(Ends::Here).await?;
                    self.cut(RedisRefusal::Protocol, &format!("ERR {error}")).await?;
                    return Ok((input.len(), Goes::Away));
                }
            };
            at += bytes;
            let Some(name) = words.first() else {
                continue;
            };
            if let ([_, key], true) = (words.as_slice(), is(name, "hkeys"))
                && self.door.commands.knows(&self.session)
                && let Some(key) = key_of(key)
            {
                self.keys.push(key);
                continue;
            }
            self.look_up(Ends::Here).await?;
            // A look-up after another command belongs to another prompt.
            self.chain.end();
            goes = self.carry_out(&words);
            if self.replies.bytes().len() >= PIECE_BYTES {
                self.write().await?;
            }
        }
        let rest = input.len() - at;
        if rest + self.bytes_waiting() >= self.command_bytes_max() {
            self.look_up(Ends::Here).await?;
        } else if rest == 0 {
            self.look_up(Ends::Perhaps).await?;
        }
        self.write().await?;
        Ok((at, goes))
    }

    /// Carries out any command but a valid `HKEYS`, which looks up a block. Refuses an `HKEYS` that is not valid.
    fn carry_out(&mut self, words: &[&[u8]]) -> Goes {
        let commands = &self.door.commands;
        let name = words.first().copied().unwrap_or_default();
        if !commands.admits(&self.session, name, &mut self.replies) {
            // A client that has shown a password that no longer counts shows the present one on its next connection only.
            return match self.session.shown {
                Some(_) => Goes::Away,
                None => Goes::On,
            };
        }
        if is(name, "hkeys") {
            let text = "ERR HKEYS takes one key, a block hash in decimal digits";
            commands.refuse(RedisRefusal::BadRequest, text, &mut self.replies);
            return Goes::On;
        }
        commands.carry_out(&mut self.session, words, Instant::now(), &mut self.replies)
    }

    /// Looks up the collected keys of a pipeline in one search, and writes the reply to each key. If the pipeline `ends`
    /// perhaps later, and further keys may add blocks to the answer, waits a moment for them. If they come, the keys are
    /// kept, and looked up with them.
    async fn look_up(&mut self, ends: Ends) -> io::Result<()> {
        let keys = std::mem::take(&mut self.keys);
        if keys.is_empty() {
            return Ok(());
        }
        let part = self.door.prefixes.ask(&mut self.chain, &keys).await;
        if part.may_rise && ends == Ends::Perhaps && self.more_comes().await? {
            self.chain.forget(&part);
            self.keys = keys;
            return Ok(());
        }
        self.door.prefixes.count(&part);
        self.reply(&keys, &part).await
    }

    /// Whether further bytes come within the patience. A client that has ended its side sends none.
    async fn more_comes(&self) -> io::Result<bool> {
        match timeout(self.door.more_patience, self.stream.peek(&mut [0])).await {
            Ok(bytes) => Ok(bytes? > 0),
            Err(_) => Ok(false),
        }
    }

    /// Writes the replies to `keys`, which are those of `part`. The replies are made in pieces, each when the client has
    /// taken the one before. Making a piece takes less than a millisecond. While the client has pieces to take, the part
    /// has shared memory.
    async fn reply(&mut self, keys: &[u64], part: &PipelinePart) -> io::Result<()> {
        let door = Arc::clone(&self.door);
        let mut room = None;
        let guesses = &door.commands.guesses;
        let are_guessed = guesses.has_any(keys.iter().copied(), Instant::now());
        for (place, key) in keys.iter().enumerate() {
            // Guesses are looked up for one key at a time: a key may have a thousand guesses, and a pipeline may repeat
            // the key many times.
            let own = match are_guessed {
                true => guesses.of(*key, Instant::now()),
                false => Vec::new(),
            };
            part.reply(place, &own, &mut self.replies);
            if self.replies.bytes().len() >= PIECE_BYTES {
                if room.is_none() {
                    room = door.answer_room(part.bytes()).await;
                    if room.is_none() {
                        let text = "ERR too many bytes of answers wait to be taken; ask again later";
                        self.cut(RedisRefusal::TooLarge, text).await?;
                        return Err(io::Error::other(
                            "no room for a long answer (redis.max_receiving_bytes)",
                        ));
                    }
                }
                self.write().await?;
                // A client that takes its replies at once would keep the thread from others.
                tokio::task::yield_now().await;
            }
        }
        let count = u64::try_from(keys.len()).unwrap_or(u64::MAX);
        let answered = &door.commands.metrics.commands;
        answered.get(RedisCommand::Hkeys).increment(count);
        Ok(())
    }

    /// Writes the replies that have been made so far to the client.
    async fn write(&mut self) -> io::Result<()> {
        if self.replies.bytes().is_empty() {
            return Ok(());
        }
        // Until the client takes the replies, the connection counts as waiting for it, and may have to give way.
        self.place.note_waits(true);
        let writing = self.stream.write_all(self.replies.bytes());
        timeout(self.door.config.request_timeout, writing).await??;
        self.place.note_waits(false);
        self.replies.clear(PIECE_BYTES);
        Ok(())
    }

    /// Writes a refusal, after which the caller ends the connection.
    async fn cut(&mut self, reason: RedisRefusal, text: &str) -> io::Result<()> {
        self.door.commands.refuse(reason, text, &mut self.replies);
        self.write().await
    }
}

fn now() -> tokio::time::Instant {
    tokio::time::Instant::now()
}
