//! One question to a worker's endpoint `worker_kv_query_source_…`, over Dynamo's request plane.
//!
//! ```text
//! bridge ── request: TCP, or NATS ──▶ worker
//!    ▲ ◀────── acknowledgement ────────┤
//!    └──── answer: the worker connects ┘
//! ```
//!
//! For each question, the bridge listens for the answer at its own address in the connection to the worker, or to NATS.
//! The question names a subject that nobody can guess. A peer that connects without naming this subject is turned away.
//! The listener's port is any free one, or one of the given ports. At most one large answer is in memory at a time;
//! others wait for it.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use async_nats::Client;
use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use kvatlas_process::dynamo::{HEAD_BYTES, Lengths, two_parts};

use super::ports::{AnswerPorts, Port};
use super::records::{SourceRecord, Target};

/// Maximum size of an answer, in bytes. JSON takes about a hundred bytes for a block.
pub(super) const ANSWER_BYTES_MAX: usize = 128 << 20;
/// Size above which an answer counts as large, in bytes.
const LARGE_BYTES: usize = 1 << 20;
/// Maximum size of a message's header, in bytes.
const HEADER_BYTES_MAX: usize = 64 << 10;
/// Maximum time for an answer, in multiples of the patience for a connection. A worker makes one full answer at a time.
const ANSWER_PATIENCES: u32 = 15;

/// Error that leaves a question without an answer.
#[derive(Debug, thiserror::Error)]
pub(in super::super) enum QuestionError {
    /// A connection failed.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The request could not be sent over NATS.
    #[error("the request over NATS: {0}")]
    Nats(String),
    /// No answer came within this time.
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
    /// The path is longer than the protocol allows.
    #[error("the path of the endpoint has {0} bytes")]
    Path(usize),
    /// The answer ends before it is whole.
    #[error("the answer was cut off")]
    Cut,
    /// A message is larger than the bound.
    #[error("the answer has more than {ANSWER_BYTES_MAX} bytes")]
    TooLarge,
    /// The checksum does not match the message.
    #[error("the checksum of the answer is another")]
    Checksum,
    /// A message does not have the form of a part of an answer.
    #[error("the answer is of another form")]
    Form,
    /// The worker's runtime has refused the question.
    #[error("the worker refuses: {0}")]
    Refused(String),
}

/// Permit to receive a large answer. One question at a time has it. Dropping the value gives the permit back.
#[derive(Debug, Default)]
pub(super) struct Room(Option<OwnedSemaphorePermit>);

/// Asks workers questions over Dynamo's request plane.
#[derive(Clone)]
pub(super) struct Asker {
    /// Connection to the NATS server of the request plane.
    nats: Client,
    /// Maximum time to make a connection, and to wait for an acknowledgement.
    patience: Duration,
    large: Arc<Semaphore>,
    ports: AnswerPorts,
}

impl Asker {
    pub(super) fn new(nats: Client, patience: Duration, ports: AnswerPorts) -> Self {
        Self {
            nats,
            patience,
            ports,
            large: Arc::new(Semaphore::new(1)),
        }
    }

    /// Asks a worker for its events from event `start` on, or for everything without `start`. Returns the answer as
    /// JSON. For a large answer, first waits for the permit, and stores it in `room`.
    pub(super) async fn ask(
        &self,
        record: &SourceRecord,
        start: Option<u64>,
        room: &mut Room,
    ) -> Result<Bytes, QuestionError> {
        let question = json!({
            "worker_id": record.id, "dp_rank": record.rank, "start_event_id": start, "end_event_id": null,
            "supports_tree_dump_failed": true, "kind": "recovery",
        });
        let patience = self.patience * ANSWER_PATIENCES;
        let asking = async {
            match &record.target {
                Target::Tcp { address, path } => self.ask_over_tcp(address, path, &question, room).await,
                Target::Nats(subject) => self.ask_over_nats(subject, &question, room).await,
            }
        };
        let answered = timeout(patience, asking).await;
        answered.map_err(|_| QuestionError::TimedOut(patience))?
    }

    async fn ask_over_tcp(
        &self,
        address: &str,
        path: &str,
        question: &Value,
        room: &mut Room,
    ) -> Result<Bytes, QuestionError> {
        let mut worker = self.in_time(TcpStream::connect(address)).await??;
        worker.set_nodelay(true)?;
        let place = AnswerListener::new(worker.local_addr()?.ip(), self.ports.take().await).await?;
        let (headers, request) = (place.headers(path), place.request(question));
        let length = |part: &[u8]| u16::try_from(part.len()).map_err(|_| QuestionError::Path(path.len()));
        let payload_length = u32::try_from(request.len()).map_err(|_| QuestionError::TooLarge)?;
        let mut message = Vec::new();
        for part in [path.as_bytes(), headers.as_bytes()] {
            message.extend(length(part)?.to_be_bytes());
            message.extend(part);
        }
        message.extend(payload_length.to_be_bytes());
        message.extend(&request);
        self.in_time(worker.write_all(&message)).await??;
        // An acknowledgement is empty, so that its length is 0.
        if self.in_time(worker.read_u32()).await?? != 0 {
            return Err(QuestionError::Form);
        }
        let stream = place.greeted(self.patience).await?;
        self.read_answer(stream, room).await
    }

    async fn ask_over_nats(
        &self,
        subject: &str,
        question: &Value,
        room: &mut Room,
    ) -> Result<Bytes, QuestionError> {
        // The NATS server tells by which address this machine is reached.
        let own = self.nats.server_info().client_ip.parse();
        let own =
            own.map_err(|_| QuestionError::Nats("the server does not tell the client's address".to_owned()))?;
        let place = AnswerListener::new(own, self.ports.take().await).await?;
        let asking = self.nats.request(subject.to_owned(), place.request(question));
        let asked = self.in_time(asking).await?;
        asked.map_err(|error| QuestionError::Nats(error.to_string()))?;
        let stream = place.greeted(self.patience).await?;
        self.read_answer(stream, room).await
    }

    /// Reads the messages after the greeting: the prologue, the answer, and the end message. If the prologue has an
    /// error, the worker has refused the question.
    async fn read_answer(&self, mut stream: TcpStream, room: &mut Room) -> Result<Bytes, QuestionError> {
        let (prologue, _) = read_message(&mut stream, HEADER_BYTES_MAX).await?;
        let prologue: Prologue = serde_json::from_slice(&prologue).map_err(|_| QuestionError::Form)?;
        if let Some(error) = prologue.error {
            return Err(QuestionError::Refused(error));
        }
        let mut answer = None;
        loop {
            let lengths = read_lengths(&mut stream, ANSWER_BYTES_MAX).await?;
            if lengths.body > LARGE_BYTES && room.0.is_none() {
                // The semaphore is never closed.
                room.0 = Arc::clone(&self.large).acquire_owned().await.ok();
            }
            let (_, body) = read_parts(&mut stream, lengths).await?;
            if body.is_empty() {
                // An empty body before the end message means that the answer was cut off.
                return Err(QuestionError::Cut);
            }
            let told: Body<'_> = serde_json::from_slice(&body).map_err(|_| QuestionError::Form)?;
            match (told.data, told.complete_final, &answer) {
                (None, true, Some(_)) => return answer.ok_or(QuestionError::Cut),
                (Some(data), false, None) => answer = Some(body.slice_ref(data.get().as_bytes())),
                _ => return Err(QuestionError::Form),
            }
        }
    }

    async fn in_time<T>(&self, work: impl Future<Output = T>) -> Result<T, QuestionError> {
        let done = timeout(self.patience, work).await;
        done.map_err(|_| QuestionError::TimedOut(self.patience))
    }
}

/// Place where one answer is received.
struct AnswerListener {
    listener: TcpListener,
    address: SocketAddr,
    /// Subject of the answer: a random name that nobody can guess.
    subject: String,
    _port: Port,
}

impl AnswerListener {
    /// Makes a listener that workers reach at the address `own`.
    async fn new(own: IpAddr, port: Port) -> io::Result<Self> {
        let listener = match TcpListener::bind((own, port.number)).await {
            // Behind an address translation, the machine does not have that address.
            Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {
                let any: IpAddr = match own {
                    IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
                    IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
                };
                TcpListener::bind((any, port.number)).await?
            }
            bound => bound?,
        };
        let address = SocketAddr::new(own, listener.local_addr()?.port());
        let subject = random_name()?;
        Ok(Self {
            listener,
            address,
            subject,
            _port: port,
        })
    }

    /// Returns the headers of a request over TCP.
    fn headers(&self, path: &str) -> String {
        json!({"x-endpoint-path": path, "request-id": self.subject}).to_string()
    }

    /// Returns the request with `question`, which tells the worker to send its answer to this listener.
    fn request(&self, question: &Value) -> Bytes {
        let info = json!({
            "address": self.address.to_string(), "subject": self.subject, "context": self.subject, "stream_type": "response",
        });
        let control = json!({
            "id": self.subject, "request_type": "single_in", "response_type": "many_out", "payload_codec": "json",
            "connection_info": {"transport": "tcp_server", "info": info.to_string()},
        });
        two_parts(control.to_string().as_bytes(), question.to_string().as_bytes())
    }

    /// Waits until the worker connects to send its answer, and returns the connection. Turns away a peer that does not
    /// name the subject within `patience`.
    async fn greeted(self, patience: Duration) -> io::Result<TcpStream> {
        loop {
            let (mut stream, _) = self.listener.accept().await?;
            let greeted = timeout(patience, read_message(&mut stream, HEADER_BYTES_MAX)).await;
            if greeted.is_ok_and(|greeting| greeting.is_ok_and(|(hello, _)| self.is_greeting(&hello))) {
                return Ok(stream);
            }
        }
    }

    fn is_greeting(&self, hello: &[u8]) -> bool {
        let hello: Option<Value> = serde_json::from_slice(hello).ok();
        hello.is_some_and(|hello| hello.get("subject").and_then(Value::as_str) == Some(&self.subject))
    }
}

/// Returns a random name that nobody can guess.
fn random_name() -> io::Result<String> {
    use ring::rand::SecureRandom;

    let mut bytes = [0; 16];
    let filled = ring::rand::SystemRandom::new().fill(&mut bytes);
    filled.map_err(|_| io::Error::other("the system has no random numbers"))?;
    Ok(format!("{:032x}", u128::from_be_bytes(bytes)))
}

/// The body of a stream's messages.
#[derive(Deserialize)]
struct Body<'a> {
    #[serde(borrow)]
    data: Option<&'a RawValue>,
    #[serde(default)]
    complete_final: bool,
}

/// The first message after the greeting, which may report an error.
#[derive(Deserialize)]
struct Prologue {
    error: Option<String>,
}

/// Reads header and body of the next message.
async fn read_message(stream: &mut TcpStream, body_max: usize) -> Result<(Bytes, Bytes), QuestionError> {
    let lengths = read_lengths(stream, body_max).await?;
    read_parts(stream, lengths).await
}

async fn read_lengths(stream: &mut TcpStream, body_max: usize) -> Result<Lengths, QuestionError> {
    let mut head = [0; HEAD_BYTES];
    match stream.read_exact(&mut head).await {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(QuestionError::Cut),
        read => read?,
    };
    let lengths = Lengths::read(&head).ok_or(QuestionError::TooLarge)?;
    match lengths.header > HEADER_BYTES_MAX || lengths.body > body_max {
        true => Err(QuestionError::TooLarge),
        false => Ok(lengths),
    }
}

async fn read_parts(stream: &mut TcpStream, lengths: Lengths) -> Result<(Bytes, Bytes), QuestionError> {
    let whole = lengths.header + lengths.body;
    let mut message = Vec::with_capacity(whole.min(64 << 10));
    let read = stream.take(whole as u64).read_to_end(&mut message).await?;
    if read < whole {
        return Err(QuestionError::Cut);
    }
    let mut header = Bytes::from(message);
    let body = header.split_off(lengths.header);
    match lengths.is_sum_of(&header, &body) {
        true => Ok((header, body)),
        false => Err(QuestionError::Checksum),
    }
}
