//! Publishers in Python, which use the ZeroMQ library of real engines.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};

static SKIPPED: AtomicUsize = AtomicUsize::new(0);

/// Returns the path of a Python that has pyzmq and msgspec; `None` if the machine has no such Python. The function then
/// counts the test as skipped, and fails the test in CI.
pub fn python() -> Option<PathBuf> {
    static FOUND: OnceLock<Option<PathBuf>> = OnceLock::new();
    let found = FOUND.get_or_init(prepare).clone();
    if found.is_none() {
        let skipped = SKIPPED.fetch_add(1, Ordering::Relaxed) + 1;
        let text = "no Python with pyzmq and msgspec: the bridge is not tested";
        assert!(std::env::var_os("CI").is_none(), "{text}");
        eprintln!("SKIPPED ({skipped}): {text}");
    }
    found
}

fn has_modules(python: &Path) -> bool {
    let tried = Command::new(python)
        .args(["-c", "import zmq, msgspec"])
        .stderr(Stdio::null())
        .status();
    tried.is_ok_and(|status| status.success())
}

/// Returns the Python environment in `.tools/zmq`. Makes it if it is missing.
fn prepare() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("KVATLAS_TEST_PYTHON").map(PathBuf::from) {
        return has_modules(&named).then_some(named);
    }
    let tools = Path::new(env!("CARGO_MANIFEST_DIR")).join(".tools");
    let folder = tools.join("zmq");
    let python = folder.join("bin/python");
    if has_modules(&python) {
        return Some(python);
    }
    // The environment is made under another name first, because two test binaries may do this at the same time.
    std::fs::create_dir_all(&tools).ok()?;
    let fresh = tools.join(format!("zmq-{}", std::process::id()));
    let made = Command::new("python3").args(["-m", "venv"]).arg(&fresh).status();
    let packages = ["-m", "pip", "install", "-q", "pyzmq", "msgspec"];
    let installed = made.is_ok_and(|status| status.success())
        && Command::new(fresh.join("bin/python"))
            .args(packages)
            .status()
            .is_ok_and(|status| status.success());
    if installed && std::fs::rename(&fresh, &folder).is_err() {
        let _ = std::fs::remove_dir_all(&fresh);
    }
    has_modules(&python).then_some(python)
}

/// Properties of a publisher.
#[derive(Clone, Copy)]
pub struct Spec {
    pub has_replay: bool,
    /// Number of frames of a replayed batch after the client's frame: 3, or 4 with the topic.
    pub framing: u8,
    /// Number of batches that the replay socket keeps.
    pub buffer: usize,
    /// Number of batches in a group. Each answer of the replay socket leaves out every second group; if the number is
    /// 0, the answer is complete.
    pub torn: usize,
}

impl Default for Spec {
    fn default() -> Self {
        Self {
            has_replay: true,
            framing: 3,
            buffer: 10_000,
            torn: 0,
        }
    }
}

impl Spec {
    /// Returns the default properties, but without a replay socket.
    pub fn without_replay() -> Self {
        Self {
            has_replay: false,
            ..Self::default()
        }
    }

    /// Returns the default properties, but with a replay socket that keeps `buffer` batches.
    pub fn with_buffer(buffer: usize) -> Self {
        Self {
            buffer,
            ..Self::default()
        }
    }
}

/// Process with several publishers.
pub struct Publishers {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    specs: Vec<Spec>,
    /// Ports of each publisher: the port of its events, and the port of its replay socket.
    ports: Vec<Vec<u16>>,
}

impl Publishers {
    pub fn start(python: &Path, specs: &[Spec]) -> Self {
        Self::start_on(python, specs, &vec![vec![0, 0]; specs.len()])
    }

    fn start_on(python: &Path, specs: &[Spec], ports: &[Vec<u16>]) -> Self {
        let list: Vec<Value> = specs
            .iter()
            .zip(ports)
            .map(|(spec, ports)| {
                let replay = spec.has_replay.then(|| ports.get(1));
                json!({"pub": ports[0], "replay": replay, "framing": spec.framing, "buffer": spec.buffer, "torn": spec.torn})
            })
            .collect();
        let script = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/integration/bridge/publishers.py"
        );
        let mut process = Command::new(python)
            .arg(script)
            .arg(Value::from(list).to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = process.stdin.take().unwrap();
        let mut output = BufReader::new(process.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        Self {
            process,
            input,
            output,
            specs: specs.to_vec(),
            ports: serde_json::from_str(&line).unwrap(),
        }
    }

    /// Kills the process, and starts another one on the same ports.
    pub fn restart(mut self, python: &Path) -> Self {
        let (specs, ports) = (self.specs.clone(), self.ports.clone());
        self.kill();
        drop(self);
        Self::start_on(python, &specs, &ports)
    }

    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    pub fn pid(&self) -> i32 {
        i32::try_from(self.process.id()).unwrap()
    }

    /// Returns the text that describes an engine for `--engine`.
    pub fn flag(&self, engine: usize, name: &str) -> String {
        let ports = &self.ports[engine];
        let replay = ports
            .get(1)
            .map_or(String::new(), |port| format!(",replay=tcp://127.0.0.1:{port}"));
        format!("{name}=tcp://127.0.0.1:{}{replay}", ports[0])
    }

    pub fn endpoint(&self, engine: usize) -> String {
        format!("tcp://127.0.0.1:{}", self.ports[engine][0])
    }

    pub fn replay(&self, engine: usize) -> Option<String> {
        self.ports[engine]
            .get(1)
            .map(|port| format!("tcp://127.0.0.1:{port}"))
    }

    pub fn publish(&mut self, engine: usize, events: &Value) -> u64 {
        self.command(&json!({"engine": engine, "events": events}))
    }

    /// Gives a batch its number and puts it into the replay socket's buffer, but does not send it to subscribers.
    /// Returns the number.
    pub fn publish_lost(&mut self, engine: usize, events: &Value) -> u64 {
        self.command(&json!({"engine": engine, "events": events, "lost": true}))
    }

    /// Waits until a new subscription reaches the engine.
    pub fn wait_for_subscriber(&mut self, engine: usize) {
        self.command(&json!({"engine": engine, "wait": true}));
    }

    pub fn publish_raw(&mut self, engine: usize, payload: &str) -> u64 {
        self.command(&json!({"engine": engine, "raw": payload}))
    }

    /// Turns the engine into another process on the same sockets. Its batch numbers begin again at 0, and its replay
    /// socket answers `answers` more questions and then no others.
    pub fn count_anew(&mut self, engine: usize, answers: usize) {
        self.command(&json!({"engine": engine, "anew": answers}));
    }

    /// Turns the engine into another process on the same sockets. The new process publishes the batches `lost`, which
    /// do not reach subscribers, and then the batch `seen`, which does. Meanwhile the replay socket answers no
    /// questions.
    pub fn become_another(&mut self, engine: usize, lost: &[Value], seen: &Value) {
        self.command(&json!({"engine": engine, "another": lost, "events": seen}));
    }

    /// Publishes a batch under another topic.
    pub fn publish_under(&mut self, engine: usize, topic: &str, events: &Value) -> u64 {
        self.command(&json!({"engine": engine, "topic": topic, "events": events}))
    }

    /// Publishes an envelope of Dynamo's event plane.
    pub fn publish_plane(&mut self, engine: usize, envelope: &[u8]) {
        let digits: String = envelope.iter().map(|byte| format!("{byte:02x}")).collect();
        self.command(&json!({"engine": engine, "plane": digits}));
    }

    fn command(&mut self, command: &Value) -> u64 {
        writeln!(self.input, "{command}").unwrap();
        self.input.flush().unwrap();
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().parse().unwrap()
    }
}

impl Drop for Publishers {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
