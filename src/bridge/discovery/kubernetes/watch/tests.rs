//! Tests of a watch with an API in this process, which has an answer for each question.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame};
use hyper::{Request, Response};
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kvatlas_telemetry::BridgeMetrics;
use kvatlas_telemetry::labels::EngineSource;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tonic::codegen::Service;

use super::super::Objects;
use super::*;

/// Parts of a body. After them, the body ends, breaks or stays open.
struct Answer {
    code: u16,
    parts: VecDeque<Bytes>,
    end: Option<io::Result<()>>,
}

impl Answer {
    fn new(code: u16, part: &Value) -> Self {
        Self {
            code,
            parts: VecDeque::from([Bytes::from(format!("{part}\n"))]),
            end: Some(Ok(())),
        }
    }

    /// A list of these pods, at version 1.
    fn list(pods: &[Value]) -> Self {
        let list = json!({"apiVersion": "v1", "kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": pods});
        Self::new(200, &list)
    }

    /// A page of a list at version `version`, behind which the list goes on at `next`.
    fn page(pods: &[Value], version: &str, next: &str) -> Self {
        let metadata = json!({"resourceVersion": version, "continue": next});
        Self::new(
            200,
            &json!({"apiVersion": "v1", "kind": "PodList", "metadata": metadata, "items": pods}),
        )
    }

    /// A refusal, as the answer to a question.
    fn refusal(code: u16) -> Self {
        Self::new(code, &status(code))
    }

    /// The beginning of a watch, which stays open.
    fn watch(events: &[Value]) -> Self {
        let parts = events.iter().map(|event| Bytes::from(format!("{event}\n")));
        Self {
            code: 200,
            parts: parts.collect(),
            end: None,
        }
    }

    /// A watch that breaks after `events`.
    fn broken_watch(events: &[Value]) -> Self {
        Self {
            end: Some(Err(io::Error::other("broken"))),
            ..Self::watch(events)
        }
    }

    /// A watch that ends at once.
    fn ended_watch() -> Self {
        Self {
            end: Some(Ok(())),
            ..Self::watch(&[])
        }
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        if let Some(part) = self.parts.pop_front() {
            return Poll::Ready(Some(Ok(Frame::data(part))));
        }
        match self.end.take() {
            None => Poll::Pending,
            Some(Ok(())) => Poll::Ready(None),
            Some(Err(error)) => Poll::Ready(Some(Err(error))),
        }
    }
}

/// An API that gives these answers, and notes the questions: their queries, and whether each was for a list.
#[derive(Clone)]
struct FakeApi {
    answers: Arc<Mutex<VecDeque<Answer>>>,
    lists: Arc<Mutex<Vec<bool>>>,
    queries: Arc<Mutex<Vec<String>>>,
}

impl Service<Request<kube::client::Body>> for FakeApi {
    type Response = Response<Answer>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Response<Answer>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<kube::client::Body>) -> Self::Future {
        let query = request.uri().query().unwrap_or_default();
        self.lists.lock().push(!query.contains("watch="));
        self.queries.lock().push(query.to_owned());
        let answer = self.answers.lock().pop_front().unwrap();
        let mut response = Response::new(answer);
        *response.status_mut() = hyper::StatusCode::from_u16(response.body().code).unwrap();
        std::future::ready(Ok(response))
    }
}

fn status(code: u16) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "no", "reason": "no", "code": code})
}

fn pod(name: &str, version: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "uid": name, "resourceVersion": version}})
}

fn event(kind: &str, object: &Value) -> Value {
    json!({"type": kind, "object": object})
}

/// A watch of pods' names.
struct Site {
    api: FakeApi,
    reports: Reports,
    scope: ObjectScope,
    taken: Mutex<Vec<Vec<String>>>,
}

impl Site {
    fn new(answers: impl IntoIterator<Item = Answer>) -> Self {
        let metrics = Arc::new(BridgeMetrics::new());
        let (reports, _) = Reports::new("kubernetes:app=vllm", EngineSource::Kubernetes, &metrics);
        Self {
            api: FakeApi {
                answers: Arc::new(Mutex::new(answers.into_iter().collect())),
                lists: Arc::default(),
                queries: Arc::default(),
            },
            reports,
            scope: ObjectScope {
                objects: Objects::Pods,
                namespace: "llm".to_owned(),
            },
            taken: Mutex::default(),
        }
    }

    /// Runs `watching` with a watcher of the pods.
    async fn watch(&self, watching: impl AsyncFnOnce(&mut Watcher<'_, Pod, String>)) {
        let client = Client::new(self.api.clone(), "llm");
        let read = |pod: &Pod| pod.name_any();
        let mut take = |known: &KnownObjects<String>| {
            self.reports.know(Vec::new());
            self.taken.lock().push(known.values().cloned().collect());
        };
        let mut watcher = Watcher::new(Watched {
            api: Api::namespaced(client, "llm"),
            selected: ListParams::default(),
            scope: &self.scope,
            reports: &self.reports,
            read: &read,
            take: &mut take,
        });
        watching(&mut watcher).await;
    }

    fn last_error(&self) -> Option<String> {
        self.reports.state().last_error
    }

    fn taken(&self) -> Vec<Vec<String>> {
        std::mem::take(&mut self.taken.lock())
    }
}

#[tokio::test]
async fn failures_are_counted_until_a_watch_stands() {
    let refused = [403, 403, 403].map(Answer::refusal);
    let site =
        Site::new(
            refused
                .into_iter()
                .chain([Answer::list(&[]), Answer::refusal(403), Answer::watch(&[])]),
        );
    site.watch(async |watcher| {
        for failures in 1..=4 {
            watcher.go_on().await;
            assert_eq!(watcher.failures, failures);
            assert!(site.last_error().unwrap().contains("RoleBinding"));
        }
        // The objects stay listed while the watch is refused.
        assert_eq!(*site.api.lists.lock(), [true, true, true, true, false]);
        let standing = async {
            while site.taken.lock().len() < 2 {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            () = watcher.go_on() => panic!("the watch stays open"),
            () = standing => {}
        }
        assert_eq!((watcher.failures, site.last_error()), (0, None));
    })
    .await;
}

#[tokio::test]
async fn a_watch_that_ends_at_once_is_a_failure() {
    let answers = [Answer::list(&[]), Answer::ended_watch(), Answer::ended_watch()];
    let site = Site::new(answers);
    site.watch(async |watcher| {
        for failures in 1..=2 {
            watcher.go_on().await;
            assert_eq!(watcher.failures, failures);
            assert!(site.last_error().unwrap().contains("ends"));
        }
        assert_eq!(*site.api.lists.lock(), [true, false, false]);
    })
    .await;
}

#[tokio::test]
async fn a_change_just_before_a_break_is_reported() {
    let gone = [event("ADDED", &pod("b", "2")), event("DELETED", &pod("a", "3"))];
    let answers = [Answer::list(&[pod("a", "1")]), Answer::broken_watch(&gone)];
    let site = Site::new(answers);
    site.watch(async |watcher| {
        watcher.go_on().await;
        assert_eq!(site.taken(), [["a"], ["b"]]);
        assert!(site.last_error().is_some());
        assert_eq!(watcher.version.as_deref(), Some("3"));
    })
    .await;
}

#[tokio::test]
async fn objects_are_listed_anew_when_their_version_is_gone_and_after_a_time() {
    let list = || Answer::list(&[pod("a", "1")]);
    let gone = Answer::watch(&[event("ERROR", &status(410))]);
    let answers = [
        list(),
        Answer::refusal(410),
        list(),
        gone,
        list(),
        Answer::ended_watch(),
    ];
    let site = Site::new(answers.into_iter().chain([list(), Answer::ended_watch()]));
    site.watch(async |watcher| {
        for _ in 0..3 {
            watcher.go_on().await;
        }
        assert_eq!(*site.api.lists.lock(), [true, false, true, false, true, false]);
        watcher.list_at = Instant::now();
        watcher.go_on().await;
        assert_eq!(site.api.lists.lock()[6..], [true, false]);
        assert_eq!(site.taken(), [["a"], ["a"], ["a"], ["a"]]);
    })
    .await;
}

#[tokio::test]
async fn a_list_replaces_the_objects() {
    let gone = Answer::watch(&[event("ERROR", &status(410))]);
    let answers = [Answer::list(&[pod("a", "1"), pod("b", "1")]), gone];
    let site = Site::new(
        answers
            .into_iter()
            .chain([Answer::list(&[pod("b", "1")]), Answer::ended_watch()]),
    );
    site.watch(async |watcher| {
        watcher.go_on().await;
        watcher.go_on().await;
        assert_eq!(site.taken(), [vec!["a", "b"], vec!["b"]]);
    })
    .await;
}

#[tokio::test]
async fn a_list_is_reported_when_all_its_pages_are_read() {
    let first = || Answer::page(&[pod("a", "1")], "7", "next");
    let answers = [first(), Answer::refusal(403), first()];
    let site = Site::new(
        answers
            .into_iter()
            .chain([Answer::page(&[pod("b", "1")], "7", ""), Answer::ended_watch()]),
    );
    site.watch(async |watcher| {
        watcher.go_on().await;
        assert_eq!(site.taken(), Vec::<Vec<String>>::new());
        watcher.go_on().await;
        assert_eq!(site.taken(), [["a", "b"]]);
        assert_eq!(*site.api.lists.lock(), [true, true, true, true, false]);
        let queries = site.api.queries.lock();
        let goes_on = |query: &String| query.contains("continue=next");
        let expected = [false, true, false, true, false];
        assert!(queries.iter().map(goes_on).eq(expected), "{queries:?}");
        assert!(queries[4].contains("resourceVersion=7"), "{queries:?}");
    })
    .await;
}

#[tokio::test]
async fn a_bookmark_moves_the_version() {
    let mark = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"resourceVersion": "8"}});
    let answers = [
        Answer::list(&[]),
        Answer::broken_watch(&[event("BOOKMARK", &mark)]),
        Answer::ended_watch(),
    ];
    let site = Site::new(answers);
    site.watch(async |watcher| {
        watcher.go_on().await;
        watcher.go_on().await;
        assert_eq!(site.taken(), [Vec::<String>::new()]);
        let queries = site.api.queries.lock();
        assert!(queries[2].contains("resourceVersion=8"), "{queries:?}");
    })
    .await;
}

#[tokio::test]
async fn an_object_that_cannot_be_read_does_not_stop_the_others() {
    let odd = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": 5, "resourceVersion": "3"}});
    let events = [
        event("ADDED", &pod("b", "2")),
        event("ADDED", &odd),
        json!("no event"),
        event("ADDED", &pod("c", "4")),
        event(
            "MODIFIED",
            &json!({"metadata": {"name": 5, "resourceVersion": "5"}}),
        ),
    ];
    let answers = [Answer::list(&[pod("a", "1"), odd]), Answer::broken_watch(&events)];
    let site = Site::new(answers);
    site.watch(async |watcher| {
        watcher.list().await.unwrap();
        assert_eq!(site.taken(), [["a"]]);
        assert!(site.last_error().unwrap().contains("invalid type"));
        watcher.version = Some("1".to_owned());
        watcher.go_on().await;
        assert_eq!(site.taken(), [["a", "b", "c"]]);
        assert_eq!(watcher.version.as_deref(), Some("5"));
        assert_eq!(*site.api.lists.lock(), [true, false]);
    })
    .await;
}

#[test]
fn a_new_object_may_have_the_name_of_one_that_goes() {
    let pod = |uid: &str| -> Pod {
        serde_json::from_value(json!({"metadata": {"name": "b", "uid": uid}})).unwrap()
    };
    let uid = |pod: &Pod| pod.uid().unwrap();
    let uids = |known: &KnownObjects<String>| known.values().cloned().collect::<Vec<_>>();
    let mut known = KnownObjects(BTreeMap::new());
    // A pod of a StatefulSet comes back under its name before the API tells that the old pod is gone.
    known.put(&pod("2"), &uid);
    known.put(&pod("3"), &uid);
    known.remove(&pod("2"));
    assert_eq!(uids(&known), ["3"]);
    known.remove(&pod("3"));
    assert_eq!(uids(&known), Vec::<String>::new());
}
