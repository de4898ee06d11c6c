//! The claim on an Object Store bucket, which says that only the replicas of one deployment use it.
//!
//! Daemons that follow different workers must not share a bucket. Each would remove the other's snapshots as outdated,
//! and a fresh daemon would start from a snapshot without its own workers. So an object without content, the claim,
//! names the deployment to which the bucket belongs.
//!
//! - The claim's metadata name the deployment, and the daemon that wrote the claim last.
//! - The claim is written again with every snapshot that is sent. In a bucket whose objects expire, the claim expires
//!   with the last snapshot.
//! - The server takes a claim only if no other daemon has written one since this daemon read it. So only one of two
//!   deployments gets the bucket.

use std::collections::HashMap;
use std::fmt;

use async_nats::header::NATS_ROLLUP;
use async_nats::jetstream::Context;
use async_nats::jetstream::context::PublishErrorKind;
use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::object_store::ObjectInfo;
use async_nats::jetstream::stream::LastRawMessageErrorKind;

use kvatlas_core::wire::Shard;

use super::object_store::{ObjectStoreError, failed};
use kvatlas_process::storage::shown;

/// Name of the object that says to which deployment a bucket of the Object Store belongs.
const OBJECT: &str = "deployment";
/// Base64 form of [`OBJECT`], the name of the claim object. Subjects of the Object Store have names in this form.
const OBJECT_TOKEN: &str = "ZGVwbG95bWVudA==";
/// Key in the claim object's metadata for the name of the deployment.
const DEPLOYMENT: &str = "deployment";
/// Key in the claim object's metadata for the name of the daemon that wrote it.
const INSTANCE: &str = "instance";
/// Digest of an empty object, as the Object Store writes it.
const DIGEST_OF_NOTHING: &str = "SHA-256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU=";
/// Value of the header `Nats-Rollup` that makes a message replace the earlier messages on its subject.
const ROLLUP_OF_SUBJECT: &str = "sub";
/// Maximum number of tries to write the claim object while other replicas write it, too.
const TRIES_MAX: u32 = 8;

/// Deployment: all replicas that follow the same workers. The fields say which workers these are.
#[derive(Debug, Clone)]
pub struct Deployment {
    /// Prefix of the deployment's subjects.
    pub prefix: String,
    /// Shard whose workers are followed. `None` means all workers.
    pub shard: Option<Shard>,
}

impl fmt::Display for Deployment {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.shard {
            Some(shard) => write!(formatter, "shard {shard} of {}", self.prefix),
            None => write!(formatter, "all workers of {}", self.prefix),
        }
    }
}

/// Claim of a daemon to a bucket of the Object Store. It says which deployment uses the bucket.
#[derive(Debug, Clone)]
pub(super) struct Claim {
    bucket: String,
    deployment: String,
    instance: String,
}

impl Claim {
    /// Makes a daemon's claim to `bucket`. `instance` is the daemon's name, and `deployment` the set of workers that it follows.
    pub(super) fn new(bucket: &str, deployment: &Deployment, instance: String) -> Self {
        Self {
            bucket: bucket.to_owned(),
            deployment: deployment.to_string(),
            instance,
        }
    }

    /// Claims the bucket, or renews this deployment's claim. Returns the server's time of the claim, in microseconds
    /// since the Unix epoch. The bucket must exist.
    pub(super) async fn stake(&self, jetstream: &Context) -> Result<u64, ObjectStoreError> {
        for _ in 0..TRIES_MAX {
            let last_sequence = self.check(jetstream).await?.map_or(0, |(sequence, _)| sequence);
            if self.write(jetstream, last_sequence).await?
                && let Some((_, taken_us)) = self.check(jetstream).await?
            {
                return Ok(taken_us);
            }
        }
        Err(self.failed(&"others write to it all the time"))
    }

    /// Returns the present claim: its sequence number in the bucket's stream, and its time in microseconds since the
    /// Unix epoch. `None` if there is no claim. A claim of another deployment is an error.
    async fn check(&self, jetstream: &Context) -> Result<Option<(u64, u64)>, ObjectStoreError> {
        let stream = jetstream.get_stream_no_info(format!("OBJ_{}", self.bucket));
        let stream = stream.await.map_err(|error| self.failed(&error))?;
        let message = match stream.get_last_raw_message_by_subject(&self.subject()).await {
            Ok(message) => message,
            Err(error) if error.kind() == LastRawMessageErrorKind::NoMessageFound => return Ok(None),
            Err(error) => return Err(self.failed(&error)),
        };
        let object: Option<ObjectInfo> = serde_json::from_slice(&message.payload).ok();
        let of = |key: &str| object.as_ref().and_then(|object| object.metadata.get(key));
        if object.as_ref().is_some_and(|object| object.deleted) || of(DEPLOYMENT) == Some(&self.deployment) {
            let taken_us = u64::try_from(message.time.unix_timestamp_nanos() / 1000).unwrap_or_default();
            return Ok(Some((message.sequence, taken_us)));
        }
        let words = |key, otherwise| of(key).map_or(String::from(otherwise), |text| shown(text));
        Err(ObjectStoreError::Taken {
            bucket: self.bucket.clone(),
            deployment: words(DEPLOYMENT, "something else"),
            instance: words(INSTANCE, "somebody"),
            own: self.deployment.clone(),
        })
    }

    /// Writes the claim if the present claim has the sequence number `last_sequence` in the bucket's stream. Returns
    /// whether the claim was written.
    async fn write(&self, jetstream: &Context, last_sequence: u64) -> Result<bool, ObjectStoreError> {
        let object = ObjectInfo {
            name: OBJECT.to_owned(),
            description: Some("whose snapshots these are".to_owned()),
            metadata: HashMap::from([
                (DEPLOYMENT.to_owned(), self.deployment.clone()),
                (INSTANCE.to_owned(), self.instance.clone()),
            ]),
            headers: None,
            options: None,
            bucket: self.bucket.clone(),
            nuid: OBJECT.to_owned(),
            size: 0,
            chunks: 0,
            modified: None,
            digest: Some(DIGEST_OF_NOTHING.to_owned()),
            deleted: false,
        };
        let payload = serde_json::to_vec(&object).map_err(|error| self.failed(&error))?;
        let message = PublishMessage::build()
            .header(NATS_ROLLUP, ROLLUP_OF_SUBJECT)
            .expected_last_subject_sequence(last_sequence)
            .payload(payload.into());
        let sent = jetstream.send_publish(self.subject(), message).await;
        match sent.map_err(|error| self.failed(&error))?.await {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == PublishErrorKind::WrongLastSequence => Ok(false),
            Err(error) => Err(self.failed(&error)),
        }
    }

    fn subject(&self) -> String {
        format!("$O.{}.M.{OBJECT_TOKEN}", self.bucket)
    }

    fn failed(&self, error: &dyn fmt::Display) -> ObjectStoreError {
        failed("claim the Object Store bucket", &self.bucket, error)
    }
}
