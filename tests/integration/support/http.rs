//! Small HTTP/1.1 client that keeps its connection.

use std::collections::HashMap;
use std::net::SocketAddr;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use super::PATIENCE;

/// One answer to a request.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    /// Headers by their names in lower case.
    pub headers: HashMap<String, String>,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| {
            panic!("no JSON: {error}: {}", String::from_utf8_lossy(&self.body));
        })
    }

    /// Returns the header `x-kvatlas-exact`: whether the server calls the whole answer certain.
    pub fn is_exact(&self) -> bool {
        match self.headers.get("x-kvatlas-exact").map(String::as_str) {
            Some("true") => true,
            Some("false") => false,
            other => panic!("x-kvatlas-exact is {other:?}"),
        }
    }
}

/// Connection to a server.
pub struct HttpClient {
    stream: BufReader<TcpStream>,
    token: Option<String>,
}

impl HttpClient {
    pub async fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        // A request's body would wait until the server has acknowledged the head.
        stream.set_nodelay(true).unwrap();
        Self {
            stream: BufReader::new(stream),
            token: None,
        }
    }

    pub fn with_token(mut self, token: &str) -> Self {
        self.token = Some(token.to_owned());
        self
    }

    pub async fn get(&mut self, path: &str) -> Answer {
        self.ask("GET", path, b"").await
    }

    pub async fn post(&mut self, path: &str, body: &Value) -> Answer {
        self.ask("POST", path, body.to_string().as_bytes()).await
    }

    pub async fn ask(&mut self, method: &str, path: &str, body: &[u8]) -> Answer {
        let token = self.token.as_ref();
        let token = token.map_or(String::new(), |token| {
            format!("Authorization: Bearer {token}\r\n")
        });
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n{token}\r\n"
        );
        self.send(head.as_bytes()).await;
        self.send(body).await;
        self.answer().await
    }

    pub async fn send(&mut self, bytes: &[u8]) {
        // A server that has refused the request may have closed the connection. Its answer is read all the same.
        let _ = self.stream.get_mut().write_all(bytes).await;
    }

    /// Reads the next answer.
    pub async fn answer(&mut self) -> Answer {
        tokio::time::timeout(PATIENCE, self.read())
            .await
            .expect("an answer in time")
    }

    /// Waits until the server closes the connection or sends something. Returns whether it has closed the connection.
    pub async fn is_closed(&mut self) -> bool {
        let mut byte = [0];
        let read = tokio::time::timeout(PATIENCE, self.stream.read(&mut byte)).await;
        !matches!(read.expect("closed in time"), Ok(1))
    }

    async fn read(&mut self) -> Answer {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(self.stream.read_u8().await.unwrap());
        }
        let head = String::from_utf8(head).unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let headers: HashMap<String, String> = head
            .lines()
            .filter_map(|line| line.split_once(": "))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
            .collect();
        let is_chunked = headers
            .get("transfer-encoding")
            .is_some_and(|coding| coding == "chunked");
        let mut body = Vec::new();
        if is_chunked {
            loop {
                let size = usize::from_str_radix(&self.line().await, 16).unwrap();
                self.read_into(&mut body, size).await;
                assert_eq!(self.line().await, "");
                if size == 0 {
                    break;
                }
            }
        } else if let Some(length) = headers.get("content-length") {
            self.read_into(&mut body, length.parse().unwrap()).await;
        }
        Answer {
            status,
            headers,
            body,
        }
    }

    async fn line(&mut self) -> String {
        let mut line = Vec::new();
        while !line.ends_with(b"\r\n") {
            line.push(self.stream.read_u8().await.unwrap());
        }
        String::from_utf8(line).unwrap().trim_end().to_owned()
    }

    async fn read_into(&mut self, body: &mut Vec<u8>, bytes: usize) {
        let start = body.len();
        body.resize(start + bytes, 0);
        self.stream.read_exact(&mut body[start..]).await.unwrap();
    }
}
