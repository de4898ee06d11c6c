//! `kvatlas query`: asks which workers hold leading blocks of a prompt.

use std::collections::BTreeMap;
use std::io::Read;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use clap::{ArgGroup, Args};
use kvatlas_client::{ClientError, QueryClient, unix_time_us};
use kvatlas_core::hash::{BlockHash, Position, PositionalLineageHash, SequenceHash, Token};
use kvatlas_core::wire::{BatchReply, PROTOCOL_VERSION, QueryKey, QueryOptions, SingleQuery, WorkerName};
use serde::de::IgnoredAny;

use super::connect::{ConnectionArguments, NatsConnection};
use super::failure::Failure;
use super::lines::{numbered, open};
use super::namespace::CacheArguments;
use super::output::{print, print_json};
use super::query_report::{check_results, render_reply, render_results};
use super::status_report::render_status;

pub(super) const EXAMPLES: &str = r#"A hash is 16 hexadecimal digits (32 for a lineage hash), or 0x and fewer.
A line of --file is an object such as
  {"tokens":[1,2,3],"lora_name":"my-lora","limit":3}
  {"sequence_hashes":["ea06fc71a5ee6e88"],"workers":["gpu-0"],"min_blocks":1,"explain":true}

Examples:
  kvatlas query --namespace llama --tokens-file prompt.txt
  kvatlas query --namespace llama --sequence-hashes ea06fc71a5ee6e88,ad01835a37dd294c --explain
  kvatlas query --namespace llama --positions 0,63 \
      --sequence-hashes ea06fc71a5ee6e88,ad01835a37dd294c
  kvatlas query --namespace llama --file queries.jsonl --limit 3 --json
  kvatlas query --model meta-llama/Llama-3.1-8B-Instruct --status"#;

/// Largest file of tokens, in bytes.
const TOKENS_FILE_BYTES_MAX: u64 = 256 << 20;

/// Question to ask, and the form in which the answer is printed.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("asked").required(true))]
pub(crate) struct QueryArguments {
    #[command(flatten)]
    connection: ConnectionArguments,
    #[command(flatten)]
    cache: CacheArguments,
    /// Ask how far the daemon has followed each worker.
    #[arg(long, group = "asked", conflicts_with_all = ["workers", "limit", "min_blocks", "explain", "tiers", "predicted"])]
    status: bool,
    /// Ask for a prompt's tokens, joined by commas.
    #[arg(long, group = "asked", value_name = "NUMBERS", value_delimiter = ',', value_parser = parse_token)]
    tokens: Option<Vec<Token>>,
    /// Ask for the tokens in a file, between spaces, commas or brackets; - is standard input.
    #[arg(long, group = "asked", value_name = "FILE")]
    tokens_file: Option<PathBuf>,
    /// Ask for block hashes, joined by commas.
    #[arg(long, group = "asked", value_name = "HASHES", value_delimiter = ',')]
    block_hashes: Option<Vec<BlockHash>>,
    /// Ask for sequence hashes, joined by commas.
    #[arg(long, group = "asked", value_name = "HASHES", value_delimiter = ',')]
    sequence_hashes: Option<Vec<SequenceHash>>,
    /// Ask for lineage hashes, joined by commas.
    #[arg(long, group = "asked", value_name = "HASHES", value_delimiter = ',')]
    lineage_hashes: Option<Vec<PositionalLineageHash>>,
    /// Send only the first hash, every COUNT-th after it, and the last; the answer then gives bounds on the number of
    /// matching blocks.
    #[arg(long, value_name = "COUNT", conflicts_with_all = WHOLE_FORMS, value_parser = parse_stride)]
    every: Option<NonZeroUsize>,
    /// Positions of the hashes, joined by commas, if they are not the whole chain; the answer then gives bounds on the
    /// number of matching blocks.
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', conflicts_with_all = WHOLE_FORMS,
        conflicts_with = "every", value_parser = parse_position)]
    positions: Option<Vec<Position>>,
    /// Ask all queries in a file at once, one JSON object a line; - is standard input.
    #[arg(long, group = "asked", value_name = "FILE")]
    file: Option<PathBuf>,
    /// LoRA adapter that the tokens are for.
    #[arg(long, value_name = "NAME", conflicts_with_all = HASH_FORMS)]
    lora_name: Option<String>,
    /// Salt of the cache that the tokens are for.
    #[arg(long, value_name = "TEXT", conflicts_with_all = HASH_FORMS)]
    cache_salt: Option<String>,
    /// Number of tokens of the prompt whose hashes are given; the block with its last token is not usable.
    #[arg(long, value_name = "COUNT", conflicts_with_all = ["tokens", "file"])]
    token_count: Option<u64>,
    /// Answer only for these workers, joined by commas.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    workers: Option<Vec<WorkerName>>,
    /// Show at most so many workers, the best first.
    #[arg(long, value_name = "COUNT")]
    limit: Option<u32>,
    /// Leave out workers that hold fewer leading blocks than this.
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    min_blocks: u32,
    /// Say at which block each worker drops out, and how many other workers have that block.
    #[arg(long)]
    explain: bool,
    /// Say how many of its blocks each worker has on the device, and how many on device and host together.
    #[arg(long)]
    tiers: bool,
    /// Also list the workers that will have more of the prompt soon, according to routers' hints.
    #[arg(long)]
    predicted: bool,
    /// Ask all shards, and merge their answers; without this flag, one daemon or gateway is asked.
    #[arg(long)]
    gather: bool,
    /// Print one JSON object, with the keys of the wire contract and hashes in hexadecimal.
    #[arg(long)]
    json: bool,
}

/// Flags that cannot be combined with `--every` and `--positions`. Most of them need the whole chain of blocks.
/// `--file` cannot be combined because each query in the file gives its own positions.
const WHOLE_FORMS: [&str; 8] = [
    "status",
    "tokens",
    "tokens_file",
    "block_hashes",
    "file",
    "explain",
    "tiers",
    "predicted",
];

/// Flags that cannot be combined with `--lora-name` and `--cache-salt`. Hashes already depend on the adapter and the
/// salt. Each query in a `--file` names both itself.
const HASH_FORMS: [&str; 5] = [
    "status",
    "block_hashes",
    "sequence_hashes",
    "lineage_hashes",
    "file",
];

/// Asks the query or the queries, and prints the answer.
pub(crate) async fn query(mut arguments: QueryArguments) -> Result<(), Failure> {
    if arguments.status {
        return status(&arguments).await;
    }
    match arguments.file.take() {
        Some(path) => query_batch(&arguments, &path).await,
        None => query_one(arguments).await,
    }
}

/// Connects. Returns a client, and its connection with the subjects that the client asks on.
async fn client(arguments: &QueryArguments) -> Result<(QueryClient, NatsConnection), Failure> {
    let patience = arguments.connection.timeout;
    let mut connection = arguments.connection.connect().await?;
    let client = QueryClient::new(connection.nats.clone(), connection.subjects.clone());
    let client = client.with_patience(patience);
    if !arguments.gather {
        return Ok((client, connection));
    }
    connection.subjects = connection.subjects.of_shards();
    Ok((client.gathering().await?, connection))
}

async fn status(arguments: &QueryArguments) -> Result<(), Failure> {
    let namespace = arguments.cache.namespace()?;
    let (client, connection) = client(arguments).await?;
    let subject = connection.subjects.status(&namespace);
    let status = connection.unless_refused(&subject, client.status(&namespace));
    let status = status.await?.map_err(|error| arguments.failure(error))?;
    if arguments.json {
        print_json(&status)
    } else {
        print(&render_status(&namespace, &status, unix_time_us()))
    }
}

async fn query_one(mut arguments: QueryArguments) -> Result<(), Failure> {
    let query = arguments.take_query()?;
    let namespace = arguments.cache.namespace()?;
    let (client, connection) = client(&arguments).await?;
    let subject = connection.subjects.query(&namespace);
    let reply = connection.unless_refused(&subject, client.query(&namespace, query));
    let reply = reply.await?.map_err(|error| arguments.failure(error))?;
    if arguments.json {
        print_json(&reply)
    } else {
        print(&render_reply(&reply, &arguments.options()))
    }
}

async fn query_batch(arguments: &QueryArguments, path: &Path) -> Result<(), Failure> {
    let options = arguments.options();
    let namespace = arguments.cache.namespace()?;
    let mut queries = Vec::new();
    for line in numbered(open(path)?) {
        let line = line?;
        let query = parse_query(&line.text, &options);
        queries.push(query.map_err(|error| Failure::failed(format_args!("line {}: {error}", line.number)))?);
    }
    if queries.is_empty() {
        let rule = "there is no query in the file; write one JSON object a line";
        return Err(Failure::failed(rule));
    }
    let asked: Vec<QueryOptions> = queries.iter().map(|query| query.options.clone()).collect();
    let (client, connection) = client(arguments).await?;
    let subject = connection.subjects.query(&namespace);
    let results = connection.unless_refused(&subject, client.query_batch(&namespace, queries));
    let results = results.await?.map_err(|error| arguments.failure(error))?;
    let reply = BatchReply {
        v: PROTOCOL_VERSION,
        results,
    };
    if arguments.json {
        print_json(&reply)?;
    } else {
        print(&render_results(&reply.results, &asked))?;
    }
    check_results(&reply.results, asked.len())
}

impl QueryArguments {
    /// Returns the failure for a client's error. If nobody listens to a query with `--gather`, the failure says that no
    /// shard runs. A daemon that is no shard may run nevertheless.
    fn failure(&self, error: ClientError) -> Failure {
        match error {
            ClientError::NoDaemon { subject } if self.gather => Failure::unavailable(format_args!(
                "no shard listens on {subject}; start the shards, or leave --gather out where one daemon follows all workers"
            )),
            error => error.into(),
        }
    }

    fn options(&self) -> QueryOptions {
        QueryOptions {
            workers: self.workers.clone(),
            limit: self.limit,
            min_blocks: self.min_blocks,
            explain: self.explain,
            tiers: self.tiers,
            predicted: self.predicted,
        }
    }

    /// Returns the query that the flags give. Moves the hashes or tokens out of the arguments, because they can be
    /// large.
    fn take_query(&mut self) -> Result<SingleQuery, Failure> {
        let key = self.take_key()?;
        let options = self.options();
        if let Some(stride) = self.every {
            let query = SingleQuery::compressed(key, stride).map_err(Failure::usage)?;
            return Ok(SingleQuery {
                options,
                token_count: self.token_count,
                ..query
            });
        }
        let query = SingleQuery {
            key,
            positions: self.positions.take(),
            token_count: self.token_count,
            options,
        };
        query.check().map_err(Failure::usage)?;
        Ok(query)
    }

    /// Returns the query's key: the hashes or tokens that the flags give. The command line allows exactly one form.
    fn take_key(&mut self) -> Result<QueryKey, Failure> {
        if let Some(hashes) = self.block_hashes.take() {
            return Ok(QueryKey::BlockHashes(hashes));
        }
        if let Some(hashes) = self.sequence_hashes.take() {
            return Ok(QueryKey::SequenceHashes(hashes));
        }
        if let Some(hashes) = self.lineage_hashes.take() {
            return Ok(QueryKey::LineageHashes(hashes));
        }
        let tokens = match &self.tokens_file {
            Some(path) => read_tokens(path)?,
            None => self.tokens.take().unwrap_or_default(),
        };
        Ok(QueryKey::Tokens {
            tokens,
            lora_name: self.lora_name.take(),
            cache_salt: self.cache_salt.take(),
        })
    }
}

/// Parses one line of `--file`. Options of the reply that the line leaves out are taken from `defaults`.
fn parse_query(line: &str, defaults: &QueryOptions) -> Result<SingleQuery, String> {
    let mut query: SingleQuery = serde_json::from_str(line).map_err(|error| error.to_string())?;
    let said: BTreeMap<String, Option<IgnoredAny>> =
        serde_json::from_str(line).map_err(|error| error.to_string())?;
    let is_left_out = |key: &str| said.get(key).is_none_or(Option::is_none);
    let options = &mut query.options;
    if is_left_out("workers") {
        options.workers.clone_from(&defaults.workers);
    }
    if is_left_out("limit") {
        options.limit = defaults.limit;
    }
    if is_left_out("min_blocks") {
        options.min_blocks = defaults.min_blocks;
    }
    if is_left_out("explain") {
        options.explain = defaults.explain;
    }
    if is_left_out("tiers") {
        options.tiers = defaults.tiers;
    }
    if is_left_out("predicted") {
        options.predicted = defaults.predicted;
    }
    query.check().map_err(|error| error.to_string())?;
    Ok(query)
}

/// Parses the number of `--every`.
fn parse_stride(text: &str) -> Result<NonZeroUsize, String> {
    text.trim()
        .parse()
        .map_err(|_| "write a whole number from 1".to_owned())
}

/// Parses one position of `--positions`.
fn parse_position(text: &str) -> Result<Position, String> {
    let number = text
        .trim()
        .parse()
        .map_err(|_| "write whole numbers, joined by commas".to_owned())?;
    Position::new(number).map_err(|error| error.to_string())
}

fn read_tokens(path: &Path) -> Result<Vec<Token>, Failure> {
    let mut text = String::new();
    let read = open(path)?
        .take(TOKENS_FILE_BYTES_MAX + 1)
        .read_to_string(&mut text);
    let bytes = read.map_err(|error| Failure::failed(format_args!("cannot read {path:?}: {error}")))?;
    if bytes as u64 > TOKENS_FILE_BYTES_MAX {
        let rule =
            format_args!("{path:?} has more than {TOKENS_FILE_BYTES_MAX} bytes; name a file of tokens")
                .to_string();
        return Err(Failure::failed(rule));
    }
    parse_tokens(&text).map_err(|error| Failure::failed(format_args!("{path:?}: {error}")))
}

/// Parses one token of `--tokens`.
fn parse_token(text: &str) -> Result<Token, String> {
    text.trim()
        .parse()
        .map_err(|_| "write whole numbers below 2^32, joined by commas; or use --tokens-file".to_owned())
}

/// Parses whole numbers that are separated by blanks, commas or brackets.
fn parse_tokens(text: &str) -> Result<Vec<Token>, String> {
    let is_separator = |character: char| character.is_whitespace() || matches!(character, ',' | '[' | ']');
    let words = text.split(is_separator).filter(|word| !word.is_empty());
    let parse = |(index, word): (usize, &str)| {
        let shown: String = word.chars().take(20).collect();
        word.parse()
            .map_err(|_| format!("token {}, {shown:?}, is not a whole number below 2^32", index + 1))
    };
    words.enumerate().map(parse).collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Example {
        #[command(flatten)]
        query: QueryArguments,
    }

    fn parse(arguments: &[&str]) -> Result<QueryArguments, clap::Error> {
        let always = ["example", "--namespace", "llama"];
        Example::try_parse_from(always.iter().chain(arguments)).map(|example| example.query)
    }

    #[test]
    fn faults_are_told_in_plain_words() {
        assert_eq!(parse_stride("0"), Err("write a whole number from 1".to_owned()));
        assert_eq!(parse_stride("2").map(NonZeroUsize::get), Ok(2));
        let failure = |more: &[&str]| {
            let always = ["example", "--namespace", "llama", "--status"];
            let parsed = Example::try_parse_from(always.iter().chain(more)).unwrap();
            let subject = "kvatlas.v1.shards.query".to_owned();
            parsed
                .query
                .failure(ClientError::NoDaemon { subject })
                .to_string()
        };
        assert!(failure(&["--gather"]).contains("leave --gather out"));
        assert!(!failure(&[]).contains("--gather"));
    }

    #[test]
    fn flags_spell_one_query() {
        let mut arguments = parse(&[
            "--sequence-hashes",
            "ea06fc71a5ee6e88,0x2",
            "--workers",
            "a,b",
            "--limit",
            "3",
        ])
        .unwrap();
        let query = arguments.take_query().unwrap();
        let hashes = vec![SequenceHash(0xea06_fc71_a5ee_6e88), SequenceHash(2)];
        assert_eq!(query.key, QueryKey::SequenceHashes(hashes));
        assert_eq!(query.options.workers.map(|workers| workers.len()), Some(2));
        assert_eq!((query.options.limit, query.options.min_blocks), (Some(3), 1));
        let mut arguments = parse(&["--tokens", "1,2,3", "--cache-salt", "a"]).unwrap();
        let key = arguments.take_query().unwrap().key;
        assert!(matches!(key, QueryKey::Tokens { tokens, cache_salt: Some(_), .. } if tokens == [1, 2, 3]));
    }

    #[test]
    fn chosen_blocks_have_positions() {
        let positions = |arguments: &[&str]| -> Result<Vec<u32>, Failure> {
            let query = parse(arguments).unwrap().take_query()?;
            assert_eq!(query.options.min_blocks, 1);
            Ok(query
                .positions
                .unwrap()
                .iter()
                .map(|position| position.as_u32())
                .collect())
        };
        let hashes = ["--sequence-hashes", "0x1,0x2,0x3,0x4,0x5,0x6"];
        let every = |stride| positions(&[hashes[0], hashes[1], "--every", stride]).unwrap();
        assert_eq!((every("2"), every("9")), (vec![0, 2, 4, 5], vec![0, 5]));
        let chosen = positions(&["--sequence-hashes", "0x1,0x2", "--positions", "4,64"]);
        assert_eq!(chosen.unwrap(), [4, 64]);
        assert!(positions(&["--sequence-hashes", "0x1,0x2", "--positions", "4"]).is_err());
        for refused in [
            ["--block-hashes", "0x1", "--every", "2"],
            ["--tokens", "1", "--positions", "0"],
        ] {
            assert!(parse(&refused).is_err(), "{refused:?}");
        }
    }

    #[test]
    fn contradictions_are_refused() {
        let refused: [&[&str]; 6] = [
            &[],
            &["--tokens", "1", "--status"],
            &["--status", "--limit", "1"],
            &["--block-hashes", "0x1", "--lora-name", "a"],
            &["--file", "a", "--cache-salt", "b"],
            &["--block-hashes", "12"],
        ];
        for arguments in refused {
            assert!(parse(arguments).is_err(), "{arguments:?}");
        }
    }

    #[test]
    fn a_line_covers_the_defaults() {
        let defaults = QueryOptions {
            limit: Some(9),
            explain: true,
            tiers: true,
            ..QueryOptions::default()
        };
        let line = r#"{"tokens":[],"limit":2,"workers":["a"],"min_blocks":3,"explain":false,"tiers":false}"#;
        let expected = QueryOptions {
            workers: Some(vec![WorkerName::new("a").unwrap()]),
            limit: Some(2),
            min_blocks: 3,
            explain: false,
            tiers: false,
            predicted: false,
        };
        assert_eq!(parse_query(line, &defaults).unwrap().options, expected);
        let options = parse_query(r#"{"tokens":[]}"#, &defaults).unwrap().options;
        assert_eq!(
            (options.limit, options.explain, options.tiers),
            (Some(9), true, true)
        );
        let error = parse_query(r#"{"sequence_hashes":["0x1"],"positions":[1]}"#, &defaults).unwrap_err();
        assert!(error.contains("explain needs"), "{error}");
        let error = parse_query("[[1]]", &defaults).unwrap_err();
        assert!(error.contains("expected an object"), "{error}");
    }

    #[test]
    fn tokens_may_have_spaces_between_them() {
        let query = parse(&["--tokens", "1, 2"]).unwrap().take_query().unwrap();
        assert!(matches!(query.key, QueryKey::Tokens { tokens, .. } if tokens == [1, 2]));
        for wrong in ["", "1,,2", "x", "4294967296", "-1"] {
            let error = parse(&[&format!("--tokens={wrong}")]).unwrap_err().to_string();
            assert!(error.contains("below 2^32"), "{error}");
        }
    }

    #[test]
    fn tokens_are_read_however_they_are_listed() {
        assert_eq!(parse_tokens("[1, 2,\n3]\n"), Ok(vec![1, 2, 3]));
        assert_eq!(parse_tokens("1 2\t4294967295"), Ok(vec![1, 2, Token::MAX]));
        assert_eq!(parse_tokens(" \n"), Ok(Vec::new()));
        let error = parse_tokens("1 2 x3").unwrap_err();
        assert!(error.contains("token 3, \"x3\""), "{error}");
        assert!(parse_tokens("4294967296").is_err() && parse_tokens("-1").is_err());
    }
}
