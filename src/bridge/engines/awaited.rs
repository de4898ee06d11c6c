//! Engines whose servers have not told yet how to follow them. Nobody knows which blocks such an engine has. So the
//! bridge announces the engine to daemons as out of sight. Without the announcement, daemons would give exact answers
//! that leave the engine out.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_nats::Client;
use kvatlas_client::publish::PublisherError;
use tokio_util::sync::CancellationToken;

use kvatlas_process::registry::{EngineKey, NewEngine, ServerKey};

use super::super::check::check_block_size;
use super::super::progress::log_untold;
use super::super::server::ServerHandle;
use super::servers::AskedServer;
use super::{Bridge, BridgeState, Inner, has_other_size};

/// Report to daemons that the state of an engine is not known. The bridge repeats the report until the server that the
/// engine runs in has told how to follow the engine's events.
#[derive(Debug)]
pub(super) struct Announcement {
    key: EngineKey,
    stop: CancellationToken,
    says_goodbye: Arc<AtomicBool>,
    /// Token that is cancelled once the task of this report has ended.
    ended: CancellationToken,
}

impl Announcement {
    /// Ends the report. With `says_goodbye`, daemons forget the engine. Returns the token that is cancelled once the
    /// report's task has ended.
    pub(super) fn end(self, says_goodbye: bool) -> CancellationToken {
        self.says_goodbye.store(says_goodbye, Ordering::Release);
        self.stop.cancel();
        self.ended
    }
}

impl Bridge {
    /// Reports the engine of a server to daemons as out of sight. Does nothing if it is reported already, or if its
    /// model or block size is not given.
    pub(crate) fn announce(&self, handle: &ServerHandle) {
        let mut state = self.inner.state.lock();
        let key = handle.server.key();
        let asked = state.servers.get(&key);
        if asked.is_some_and(|asked| asked.handle.is_same(handle)) {
            self.announce_server(&mut state, &key);
        }
    }

    pub(super) fn announce_server(&self, state: &mut BridgeState, key: &ServerKey) {
        let (Some(nats), false) = (state.nats.clone(), state.is_stopping) else {
            return;
        };
        let Some(engine) = state.servers.get(key).and_then(AskedServer::awaited) else {
            return;
        };
        let namespaces = self.inner.options.namespaces.as_ref();
        let is_refused = namespaces.is_some_and(|namespaces| check_block_size(&engine, namespaces).is_err());
        if is_refused
            || state.engines.contains_key(&engine.key)
            || state
                .staying(&|_| false)
                .any(|other| has_other_size(other, &engine))
        {
            return;
        }
        if let Some(asked) = state.servers.get_mut(key) {
            let (stop, ended) = (CancellationToken::new(), CancellationToken::new());
            let announcement = Announcement {
                key: engine.key.clone(),
                stop,
                says_goodbye: Arc::default(),
                ended,
            };
            self.spawn_announcement(&announcement, engine, nats);
            asked.announcement = Some(announcement);
        }
    }

    fn spawn_announcement(&self, announcement: &Announcement, engine: NewEngine, nats: Client) {
        let inner = Arc::clone(&self.inner);
        let (stop, says_goodbye) = (announcement.stop.clone(), Arc::clone(&announcement.says_goodbye));
        let ended = announcement.ended.clone().drop_guard();
        let task = async move {
            let _ended = ended;
            if let Err(error) = inner.tell_awaited(&engine, nats, stop, &says_goodbye).await {
                log_untold(&engine, &error);
            }
        };
        self.inner.tasks.spawn_on(task, &self.inner.runtime);
    }

    /// Ends the announcement of a server's engine, and waits for its end. Daemons forget the engine, unless its key is
    /// among those in `told`, which the server has told and which are followed next.
    pub(crate) async fn end_announcement(&self, handle: &ServerHandle, told: &[EngineKey]) {
        let ended = {
            let mut state = self.inner.state.lock();
            let asked = state.servers.get_mut(&handle.server.key());
            let asked = asked.filter(|asked| asked.handle.is_same(handle));
            let announcement = asked.and_then(|asked| asked.announcement.take());
            announcement.map(|announcement| {
                let is_told = told.contains(&announcement.key);
                announcement.end(!is_told)
            })
        };
        if let Some(ended) = ended {
            ended.cancelled().await;
        }
    }
}

impl BridgeState {
    /// Ends the announcement of an engine that is followed from now on, whether its server or another source has told
    /// how.
    pub(super) fn end_announcement_of(&mut self, key: &EngineKey) {
        for asked in self.servers.values_mut() {
            let is_it = |announcement: &mut Announcement| announcement.key == *key;
            if let Some(announcement) = asked.announcement.take_if(is_it) {
                announcement.end(false);
            }
        }
    }
}

impl Inner {
    /// Tells daemons that an engine is out of sight, until `stop`.
    async fn tell_awaited(
        &self,
        engine: &NewEngine,
        nats: Client,
        stop: CancellationToken,
        says_goodbye: &AtomicBool,
    ) -> Result<(), String> {
        let in_words = |error: PublisherError| error.to_string();
        let holder = self.own_holder(engine)?;
        // A relay begins out of sight.
        let mut relay = self.relay(engine, holder.worker, holder.rank, nats).await?;
        let trouble = "its server has not told how to follow it";
        relay.explain(Some(trouble)).await.map_err(in_words)?;
        stop.cancelled().await;
        let ending = match says_goodbye.load(Ordering::Acquire) {
            true => relay.say_goodbye().await,
            false => relay.fall_silent().await,
        };
        ending.map_err(in_words)
    }
}
