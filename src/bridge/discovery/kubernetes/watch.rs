//! Watch of the objects of one kind: a list, and then one watch behind another. Each watch begins at the version up to
//! which the objects are known.
//!
//! | the API | this module |
//! |---|---|
//! | tells changes | reports the objects, once for all changes within [`GATHERED_FOR`] |
//! | ends a watch, after [`STANDS_AFTER`] or later | begins the next watch |
//! | ends a watch at once, or fails | begins the next watch after a pause, which grows with each failure |
//! | no longer has the version (410) | lists the objects anew |
//! | tells an object that cannot be read | reports a failure, and reads on |
//!
//! The objects are also listed anew every [`LISTED_FOR`], because versions may have begun anew, as after a restore of
//! etcd. No watch tells that.

use std::collections::BTreeMap;
use std::fmt;
use std::pin::pin;
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use kube::api::{ListParams, WatchParams};
use kube::core::{ObjectList, Request, WatchEvent};
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::{Instant, sleep, timeout_at};

use super::super::reports::{FOUND_MAX, Reports};
use super::{BACKOFF, KubernetesError, ObjectScope};

/// Time for which the API answers one watch, in seconds. The watch is then renewed.
const WATCH_SECONDS: u32 = 60;
/// Time for which changes are gathered, so that many changes in a short time are reported together.
const GATHERED_FOR: Duration = Duration::from_millis(20);
/// Time after which a watch that has not ended counts as a success.
const STANDS_AFTER: Duration = Duration::from_secs(1);
/// Time after which objects are listed anew, with the next watch.
const LISTED_FOR: Duration = Duration::from_secs(300);
/// Maximum number of objects in one answer of the API. A list may take several answers.
const PAGE_OBJECTS: u32 = 500;

/// Known objects by their names. An entry has the object's UID, and the value that was read from the object.
pub(super) struct KnownObjects<T>(BTreeMap<String, (Option<String>, T)>);

impl<T> KnownObjects<T> {
    fn put<K: Resource>(&mut self, object: &K, read: &dyn Fn(&K) -> T) {
        let name = object.name_any();
        if self.0.len() <= FOUND_MAX || self.0.contains_key(&name) {
            self.0.insert(name, (object.uid(), read(object)));
        }
    }

    fn remove<K: Resource>(&mut self, object: &K) {
        let name = object.name_any();
        // A new object may have the same name.
        if self.0.get(&name).is_some_and(|(uid, _)| *uid == object.uid()) {
            self.0.remove(&name);
        }
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &T> {
        self.0.values().map(|(_, value)| value)
    }
}

/// Objects to watch, and what is done with them.
pub(super) struct Watched<'a, K, T> {
    pub(super) api: Api<K>,
    /// Selectors of the objects.
    pub(super) selected: ListParams,
    pub(super) scope: &'a ObjectScope,
    pub(super) reports: &'a Reports,
    /// Function that reads a value from an object.
    pub(super) read: &'a (dyn Fn(&K) -> T + Sync),
    /// Function that takes the values of all known objects, after each change.
    pub(super) take: &'a mut (dyn FnMut(&KnownObjects<T>) + Send),
}

impl<K, T: Send> Watched<'_, K, T>
where
    K: Resource + Clone + DeserializeOwned + fmt::Debug + Send + 'static,
{
    /// Watches the objects for ever.
    pub(super) async fn run(self) {
        let mut watcher = Watcher::new(self);
        loop {
            watcher.go_on().await;
            if watcher.failures > 0 {
                sleep(BACKOFF.pause(watcher.failures)).await;
            }
        }
    }
}

/// State of watching objects.
struct Watcher<'a, K, T> {
    watched: Watched<'a, K, T>,
    known: KnownObjects<T>,
    /// Version up to which the objects are known; `None` if they have to be listed.
    version: Option<String>,
    /// Time from which on the objects are to be listed anew.
    list_at: Instant,
    /// Number of failures since a watch stood last.
    failures: u32,
}

impl<'a, K, T: Send> Watcher<'a, K, T>
where
    K: Resource + Clone + DeserializeOwned + fmt::Debug + Send + 'static,
{
    fn new(watched: Watched<'a, K, T>) -> Self {
        Self {
            watched,
            known: KnownObjects(BTreeMap::new()),
            version: None,
            list_at: Instant::now(),
            failures: 0,
        }
    }

    /// Lists the objects if that is due, and follows one watch to its end. Counts and reports a failure.
    async fn go_on(&mut self) {
        let Err(error) = self.follow().await else {
            return;
        };
        self.failures = self.failures.saturating_add(1);
        if error.is_gone() {
            self.version = None;
        }
        self.watched.reports.fail(&error);
    }

    async fn follow(&mut self) -> Result<(), KubernetesError> {
        let version = match self.version.take_if(|_| Instant::now() < self.list_at) {
            Some(version) => version,
            None => self.list().await?,
        };
        let ListParams {
            label_selector,
            field_selector,
            ..
        } = self.watched.selected.clone();
        let parameters = WatchParams {
            label_selector,
            field_selector,
            timeout: Some(WATCH_SECONDS),
            ..WatchParams::default()
        };
        self.version = Some(version.clone());
        // The API, or a proxy, may hold an answer back until the first event, or until the end.
        let stands_at = Instant::now() + STANDS_AFTER;
        let events = watch(&self.watched.api, &parameters, &version).await;
        let mut events = pin!(events.map_err(|error| self.watched.scope.error(error))?);
        let mut stands = false;
        loop {
            let first = match stands {
                true => events.next().await,
                false => match timeout_at(stands_at, events.next()).await {
                    Ok(event) => event,
                    Err(_) => {
                        stands = true;
                        self.stand();
                        continue;
                    }
                },
            };
            match self.gather(first, &mut events).await? {
                true => {}
                false if stands => return Ok(()),
                false if Instant::now() >= stands_at => {
                    self.stand();
                    return Ok(());
                }
                false => return Err(KubernetesError::Ended),
            }
        }
    }

    /// Notes that a watch counts as a success, which ends earlier failures.
    fn stand(&mut self) {
        self.failures = 0;
        (self.watched.take)(&self.known);
    }

    /// Lists the objects. Returns the version of the list.
    async fn list(&mut self) -> Result<String, KubernetesError> {
        let mut parameters = self.watched.selected.clone().limit(PAGE_OBJECTS);
        let (mut listed, mut unread) = (KnownObjects(BTreeMap::new()), None);
        loop {
            let page = page(&self.watched.api, &parameters).await;
            let page = page.map_err(|error| self.watched.scope.error(error))?;
            for object in page.items {
                match serde_json::from_value::<K>(object) {
                    Ok(object) => listed.put(&object, self.watched.read),
                    Err(error) => unread = Some(kube::Error::SerdeError(error)),
                }
            }
            let is_told = |text: &String| !text.is_empty();
            parameters.continue_token = page.metadata.continue_.filter(is_told);
            if parameters.continue_token.is_none() {
                let version = page.metadata.resource_version.filter(is_told);
                let version = version.ok_or(KubernetesError::NoVersion)?;
                self.known = listed;
                self.list_at = Instant::now() + LISTED_FOR;
                (self.watched.take)(&self.known);
                if let Some(error) = unread {
                    self.watched.reports.fail(&error);
                }
                return Ok(version);
            }
        }
    }

    /// Applies `first` and the events that come soon after it, and reports the objects if they have changed. Returns
    /// whether the watch goes on.
    ///
    /// # Errors
    ///
    /// The error that has ended the watch. Events before it are applied and reported. An event that cannot be read does
    /// not end the watch: a new watch would begin with the same event.
    async fn gather(
        &mut self,
        first: Option<kube::Result<WatchEvent<Value>>>,
        events: &mut (impl Stream<Item = kube::Result<WatchEvent<Value>>> + Unpin + Send),
    ) -> Result<bool, KubernetesError> {
        let until = Instant::now() + GATHERED_FOR;
        let (mut next, mut has_changed, mut unread) = (first, false, None);
        let ended = loop {
            let applied = match next {
                Some(Ok(event)) => self.apply(event),
                Some(Err(error)) => Err(self.watched.scope.error(error)),
                None => break Ok(false),
            };
            match applied {
                Ok(is_change) => has_changed |= is_change,
                Err(error) if error.is_unreadable() => unread = Some(error),
                Err(error) => break Err(error),
            }
            match timeout_at(until, events.next()).await {
                Ok(event) => next = event,
                Err(_) => break Ok(true),
            }
        };
        if has_changed {
            (self.watched.take)(&self.known);
        }
        if let Some(error) = unread {
            self.watched.reports.fail(&error);
        }
        ended
    }

    /// Applies an event. Returns whether an object has changed.
    fn apply(&mut self, event: WatchEvent<Value>) -> Result<bool, KubernetesError> {
        let (object, is_gone) = match event {
            WatchEvent::Added(object) | WatchEvent::Modified(object) => (object, false),
            WatchEvent::Deleted(object) => (object, true),
            WatchEvent::Bookmark(mark) => {
                self.know_until(Some(mark.metadata.resource_version));
                return Ok(false);
            }
            WatchEvent::Error(status) => return Err(self.watched.scope.error(kube::Error::Api(status))),
        };
        let version = object.pointer("/metadata/resourceVersion");
        self.know_until(version.and_then(Value::as_str).map(str::to_owned));
        let object: K = serde_json::from_value(object).map_err(kube::Error::SerdeError)?;
        match is_gone {
            true => self.known.remove(&object),
            false => self.known.put(&object, self.watched.read),
        }
        Ok(true)
    }

    /// Notes the version up to which the objects are known. Without a version, the objects are listed with the next
    /// watch.
    fn know_until(&mut self, version: Option<String>) {
        self.version = version.filter(|version| !version.is_empty());
    }
}

/// Asks for one page of a list. Its objects are not decoded yet, so that one that cannot be read does not stop the
/// others.
async fn page<K: Resource + Clone>(api: &Api<K>, parameters: &ListParams) -> kube::Result<ObjectList<Value>> {
    let request = Request::new(api.resource_url()).list(parameters);
    let request = request.map_err(kube::Error::BuildRequest)?;
    api.clone().into_client().request(request).await
}

/// Begins a watch behind `version`. As in [`page`], the objects are not decoded yet.
async fn watch<K: Resource + Clone>(
    api: &Api<K>,
    parameters: &WatchParams,
    version: &str,
) -> kube::Result<impl Stream<Item = kube::Result<WatchEvent<Value>>> + use<K>> {
    let request = Request::new(api.resource_url()).watch(parameters, version);
    let request = request.map_err(kube::Error::BuildRequest)?;
    api.clone().into_client().request_events(request).await
}

#[cfg(test)]
mod tests;
