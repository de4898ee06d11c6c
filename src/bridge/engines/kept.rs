//! State of engines that outlives the bridge: the list of registered engines, and the engines' files.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvatlas_process::registry::NewEngine;

use super::{Bridge, Inner};
use crate::state::Registered;

/// Time between two looks for files of engines that have not been followed for long.
const CLEANED_AFTER: Duration = Duration::from_secs(3600);
/// Minimum pause between two looks at a state directory.
const PAUSE_MIN: Duration = Duration::from_millis(50);

impl Bridge {
    /// Follows the engines that were registered with an earlier bridge, as the state directory lists them. Call it
    /// before discovery begins, and after the engines of flags and files were given, because these have priority.
    pub fn take_up_registered(&self) {
        let kept = std::mem::take(&mut self.inner.state.lock().kept);
        for engine in kept {
            let name = engine.instance().to_owned();
            if let Err(refusal) = self.follow_registered(&engine) {
                tracing::warn!(engine = name, %refusal, "an engine that was registered before is not followed");
            }
        }
        self.keep_registered();
    }

    /// Writes the list of registered engines to the state directory, so that the next bridge follows them, too.
    pub(super) fn keep_registered(&self) {
        if let Some(registered) = &self.inner.registered {
            registered.keep(|| self.inner.state.lock().registered(), &self.inner.metrics);
        }
    }

    /// Tends a state directory until the bridge stops. Reads or writes the list of registered engines again if that failed.
    /// Removes files of engines that have not been followed for long.
    pub(super) async fn tend_state(self) {
        let Some(registered) = &self.inner.registered else {
            return;
        };
        let pause = registered.interval().max(PAUSE_MIN);
        let mut cleaned_at = Instant::now();
        loop {
            tokio::time::sleep(pause).await;
            let (is_behind, is_due) = (registered.is_behind(), cleaned_at.elapsed() >= CLEANED_AFTER);
            if is_due {
                cleaned_at = Instant::now();
            }
            if is_behind || is_due {
                let bridge = self.clone();
                let tending = tokio::task::spawn_blocking(move || {
                    if is_behind {
                        bridge.catch_up_registered();
                    }
                    if is_due {
                        bridge.remove_forgotten();
                    }
                });
                // A thread that has failed has logged that.
                let _ = tending.await;
            }
        }
    }

    /// Reads or writes the list of registered engines, because that failed before. Blocks the thread.
    fn catch_up_registered(&self) {
        let inner = &self.inner;
        let late = inner.registered.as_ref().and_then(Registered::read_late);
        inner.state.lock().kept.extend(late.unwrap_or_default());
        self.take_up_registered();
    }

    /// Removes files of engines that have not been followed for long. Blocks the thread.
    fn remove_forgotten(&self) {
        let inner = &self.inner;
        let Some(directory) = &inner.options.state else {
            return;
        };
        let state = inner.state.lock();
        let engines = state.engines.values().map(|followed| &followed.engine);
        let followed: Vec<_> = engines
            .filter_map(|engine| inner.own_holder(engine).ok())
            .collect();
        drop(state);
        directory.remove_forgotten(&followed, &inner.metrics);
    }
}

impl Inner {
    /// Removes the saved state of an engine that was unregistered. Does nothing if the engine is followed again.
    pub(in super::super) async fn forget_unless_followed(&self, engine: &NewEngine) {
        if self.state.lock().engines.contains_key(&engine.key) {
            return;
        }
        if let (Some(directory), Ok(holder)) = (self.options.state.clone(), self.own_holder(engine)) {
            let metrics = Arc::clone(&self.metrics);
            let removing = tokio::task::spawn_blocking(move || directory.forget_engine(&holder, &metrics));
            // A thread that has failed has logged that.
            let _ = removing.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use kvatlas_core::wire::Subjects;
    use kvatlas_process::broker::embedded::{EmbeddedBroker, find_nats_server};
    use kvatlas_process::registry::{EngineRegistry, GivenEngine};

    use super::super::BridgeOptions;
    use super::*;
    use crate::state::StateDirectory;
    use crate::{EngineDefaults, parse_engine};

    #[tokio::test]
    async fn a_registration_that_was_not_written_is_written_later() {
        let server = find_nats_server(None).unwrap();
        let broker = EmbeddedBroker::start(&server).await.unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let state = StateDirectory::open(&path, Duration::ZERO).unwrap();
        let options = BridgeOptions {
            state: Some(state),
            ..BridgeOptions::default()
        };
        let bridge = Bridge::new(Subjects::new("kvatlas").unwrap(), options);
        bridge.start(&async_nats::connect(broker.url()).await.unwrap());
        std::fs::remove_dir_all(&path).unwrap();
        let defaults = EngineDefaults {
            model: Some("m".to_owned()),
            ..EngineDefaults::default()
        };
        let given = parse_engine("gpu-0=tcp://127.0.0.1:1", &defaults)
            .unwrap()
            .remove(0);
        let GivenEngine::Publisher(engine) = given else {
            panic!("no publisher");
        };
        bridge.register(engine).unwrap();
        assert!(bridge.inner.registered.as_ref().unwrap().is_behind());
        std::fs::create_dir(&path).unwrap();
        let written = async {
            while !path.join("registered").exists() {
                tokio::time::sleep(PAUSE_MIN).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), written)
            .await
            .unwrap();
        bridge.stop(false).await;
    }
}
