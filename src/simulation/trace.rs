//! The Mooncake trace format: one JSON object a line.
//!
//! ```json
//! {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}
//! ```
//!
//! `timestamp` is in milliseconds since an arbitrary time: the earliest request arrives at the beginning of the
//! simulated time. Each of `hash_ids` names one block of 512 tokens (the last may be shorter) together with its
//! prefix. `output_length` is the number of tokens for which a worker is busy with the answer, 0 if it is absent. The
//! text of an answer matters only if a later request of the trace repeats it in its prompt. Other keys and empty
//! lines are ignored. The format and the traces are those of "Mooncake: Trading More Storage for Less Computation"
//! (FAST '25).

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::request::{Request, chain_of};

/// The longest line, in bytes.
const LINE_BYTES_MAX: u64 = 1 << 20;
/// Maximum number of blocks of one request. A query for so many blocks fits into 1 MiB, the default limit of NATS
/// servers.
const REQUEST_BLOCKS_MAX: usize = 32_768;
/// Maximum number of blocks of all requests together. So many blocks take half a gibibyte of memory.
const TRACE_BLOCKS_MAX: usize = 1 << 26;

/// Reason why a trace can't be used.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file can't be opened.
    #[error("cannot open the trace {path}: {source}")]
    Open {
        /// Path of the file.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// The file can't be read.
    #[error("cannot read line {line} of the trace: {source}")]
    Read {
        /// Number of the line, from 1.
        line: u64,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// A line is too long.
    #[error(
        "line {line} of the trace is longer than {bytes_max} bytes; is this a trace with one request a line?"
    )]
    LineTooLong {
        /// Number of the line, from 1.
        line: u64,
        /// Maximum length of a line, in bytes.
        bytes_max: u64,
    },
    /// A line of the file does not describe a request.
    #[error(
        "line {line} of the trace is no request: {source}; expected an object with timestamp and hash_ids"
    )]
    Syntax {
        /// Number of the line, from 1.
        line: u64,
        /// The parser's error. Its columns count within the line.
        source: serde_json::Error,
    },
    /// A request has too many blocks.
    #[error("line {line} of the trace has {blocks} hash_ids; at most {blocks_max} are allowed")]
    RequestTooLong {
        /// Number of the line, from 1.
        line: u64,
        /// Number of blocks of the request.
        blocks: usize,
        /// Maximum number of blocks that is allowed.
        blocks_max: usize,
    },
    /// The requests have too many blocks together.
    #[error("with line {line} the trace has more than {blocks_max} blocks; read fewer with --limit-requests")]
    TraceTooLong {
        /// Number of the line, from 1.
        line: u64,
        /// Maximum number of blocks that is allowed.
        blocks_max: usize,
    },
    /// The trace has no request to replay.
    #[error("the trace has no request")]
    Empty,
}

/// One line of the trace. Keys that are not named here are ignored.
#[derive(Deserialize)]
struct TraceLine {
    timestamp: u64,
    hash_ids: Vec<u64>,
    #[serde(default)]
    output_length: u64,
}

/// Reads the requests of a trace file, at most `requests_max` if that is given.
///
/// # Errors
///
/// Any [`TraceError`]. After an error, none of the requests is returned.
pub fn read_trace(path: &Path, requests_max: Option<usize>) -> Result<Vec<Request>, TraceError> {
    let file = File::open(path).map_err(|source| TraceError::Open {
        path: path.to_owned(),
        source,
    })?;
    parse_trace(BufReader::new(file), requests_max)
}

/// Reads the requests of a trace as [`read_trace`] does, from any input.
pub fn parse_trace(mut input: impl BufRead, requests_max: Option<usize>) -> Result<Vec<Request>, TraceError> {
    let requests_max = requests_max.unwrap_or(usize::MAX);
    let (mut requests, mut blocks) = (Vec::new(), 0_usize);
    let mut text = Vec::new();
    let mut line = 0;
    while requests.len() < requests_max {
        line += 1;
        if !read_line(&mut input, line, &mut text)? {
            break;
        }
        let Some(request) = parse_line(line, &text)? else {
            continue;
        };
        blocks += request.chain.len();
        if blocks > TRACE_BLOCKS_MAX {
            return Err(TraceError::TraceTooLong {
                line,
                blocks_max: TRACE_BLOCKS_MAX,
            });
        }
        requests.push(request);
    }
    let arrivals = requests.iter().map(|request| request.arrival_ms);
    let first_ms = arrivals.min().ok_or(TraceError::Empty)?;
    for request in &mut requests {
        request.arrival_ms -= first_ms;
    }
    Ok(requests)
}

/// Reads the next line into `text`. Returns whether there was a line.
fn read_line(input: &mut impl BufRead, line: u64, text: &mut Vec<u8>) -> Result<bool, TraceError> {
    text.clear();
    let read = input
        .take(LINE_BYTES_MAX + 1)
        .read_until(b'\n', text)
        .map_err(|source| TraceError::Read { line, source })?;
    if u64::try_from(read).is_ok_and(|read| read > LINE_BYTES_MAX) {
        return Err(TraceError::LineTooLong {
            line,
            bytes_max: LINE_BYTES_MAX,
        });
    }
    Ok(read > 0)
}

fn parse_line(line: u64, text: &[u8]) -> Result<Option<Request>, TraceError> {
    if text.trim_ascii().is_empty() {
        return Ok(None);
    }
    let parsed: TraceLine =
        serde_json::from_slice(text).map_err(|source| TraceError::Syntax { line, source })?;
    let blocks = parsed.hash_ids.len();
    if blocks > REQUEST_BLOCKS_MAX {
        return Err(TraceError::RequestTooLong {
            line,
            blocks,
            blocks_max: REQUEST_BLOCKS_MAX,
        });
    }
    Ok(Some(Request {
        arrival_ms: parsed.timestamp,
        chain: chain_of(&parsed.hash_ids),
        output_tokens: parsed.output_length,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Vec<Request>, TraceError> {
        parse_trace(text.as_bytes(), None)
    }

    #[test]
    fn requests_are_read_in_order() {
        let text = concat!(
            r#"{"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]}"#,
            "\n\n",
            r#"{"hash_ids": [0, 2], "timestamp": 3000, "session": {"user": "u"}}"#,
        );
        let requests = parse(text).unwrap();
        let arrivals: Vec<_> = requests.iter().map(|request| request.arrival_ms).collect();
        assert_eq!(arrivals, [0, 3000]);
        assert_eq!(requests[0].chain, chain_of(&[0, 1]));
        assert_eq!(requests[1].chain, chain_of(&[0, 2]));
        assert_eq!((requests[0].output_tokens, requests[1].output_tokens), (5, 0));
    }

    #[test]
    fn the_simulated_time_begins_with_the_earliest_request() {
        let line = |timestamp: u64| format!("{{\"timestamp\":{timestamp},\"hash_ids\":[]}}\n");
        let text = [1_700_000_000_020, 1_700_000_000_000, 1_700_000_003_000].map(line);
        let requests = parse(&text.concat()).unwrap();
        let arrivals: Vec<_> = requests.iter().map(|request| request.arrival_ms).collect();
        assert_eq!(arrivals, [20, 0, 3000]);
    }

    #[test]
    fn the_limit_ends_reading() {
        let text = "{\"timestamp\":1,\"hash_ids\":[]}\n{\"timestamp\":2,\"hash_ids\":[7]}\nnot read\n";
        assert_eq!(parse_trace(text.as_bytes(), Some(2)).unwrap().len(), 2);
        assert!(parse(text).is_err());
    }

    #[test]
    fn a_mistake_names_its_line() {
        let good = "{\"timestamp\":1,\"hash_ids\":[1]}\n";
        for bad in [
            "{",
            "[]",
            "{\"timestamp\":1}",
            "{\"timestamp\":-1,\"hash_ids\":[]}",
            "{\"timestamp\":1,\"hash_ids\":[\"a\"]}",
            "{\"timestamp\":1,\"hash_ids\":[18446744073709551616]}",
        ] {
            let error = parse(&format!("{good}{bad}\n{good}")).unwrap_err();
            assert!(
                matches!(error, TraceError::Syntax { line: 2, .. }),
                "{bad}: {error}"
            );
        }
    }

    #[test]
    fn lines_and_requests_are_bounded() {
        let long = format!("{{\"timestamp\":1,\"hash_ids\":[]{}", " ".repeat(1 << 20));
        assert!(matches!(
            parse(&long),
            Err(TraceError::LineTooLong { line: 1, .. })
        ));
        let ids = vec!["1"; REQUEST_BLOCKS_MAX + 1].join(",");
        let wide = format!("{{\"timestamp\":1,\"hash_ids\":[{ids}]}}");
        assert!(matches!(
            parse(&wide),
            Err(TraceError::RequestTooLong { line: 1, .. })
        ));
    }

    #[test]
    fn nothing_to_replay_is_an_error() {
        assert!(matches!(parse("\n \n"), Err(TraceError::Empty)));
        let missing = read_trace(Path::new("/nonexistent/trace"), None).unwrap_err();
        assert!(matches!(missing, TraceError::Open { .. }));
    }
}
