//! Publishers in Python, with the library that engines use.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};

static SKIPPED: AtomicUsize = AtomicUsize::new(0);

/// A Python with pyzmq and msgspec; none where there is none to be had, which is said and counted, and fails in CI.
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

/// The environment in `.tools/zmq`, made where it is missing.
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
    // Made elsewhere first: two test binaries may come here at once.
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

/// How a publisher is set up.
#[derive(Clone, Copy)]
pub struct Spec {
    pub has_replay: bool,
    /// Frames of a replayed batch, behind the client's.
    pub framing: u8,
    /// Batches that can be replayed.
    pub buffer: usize,
    /// An answer of the replay socket leaves out so many batches behind as many; 0 gives all.
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
    /// A publisher that replays nothing.
    pub fn without_replay() -> Self {
        Self {
            has_replay: false,
            ..Self::default()
        }
    }
}

/// A process with publishers.
pub struct Publishers {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    specs: Vec<Spec>,
    /// Ports of each: its own, and that of its replay socket.
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

    /// The text for `--engine`.
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

    /// A batch that subscribers never see.
    pub fn publish_lost(&mut self, engine: usize, events: &Value) -> u64 {
        self.command(&json!({"engine": engine, "events": events, "lost": true}))
    }

    /// Waits until the engine knows of a subscription that it did not know of before.
    pub fn wait_for_subscriber(&mut self, engine: usize) {
        self.command(&json!({"engine": engine, "wait": true}));
    }

    pub fn publish_raw(&mut self, engine: usize, payload: &str) -> u64 {
        self.command(&json!({"engine": engine, "raw": payload}))
    }

    /// Makes the engine another process behind the same sockets: it counts anew, and answers so many questions more.
    pub fn count_anew(&mut self, engine: usize, answers: usize) {
        self.command(&json!({"engine": engine, "anew": answers}));
    }

    /// Makes the engine another process behind the same sockets, whose batches `lost` are never seen and whose batch `seen` is: nobody asks
    /// in between.
    pub fn become_another(&mut self, engine: usize, lost: &[Value], seen: &Value) {
        self.command(&json!({"engine": engine, "another": lost, "events": seen}));
    }

    /// A batch under another topic.
    pub fn publish_under(&mut self, engine: usize, topic: &str, events: &Value) -> u64 {
        self.command(&json!({"engine": engine, "topic": topic, "events": events}))
    }

    /// An envelope as Dynamo's event plane sends it.
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
