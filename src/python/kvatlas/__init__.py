"""Client of kvatlas: publish what an inference worker caches, ask which workers hold a prompt.

.. code-block:: python

    connection = await kvatlas.connect("nats://127.0.0.1:4222")
    async with await kvatlas.Publisher.start(connection, "llama", "gpu-0") as publisher:
        chain = kvatlas.sequence_hashes(kvatlas.block_hashes(tokens))
        await publisher.publish(kvatlas.Stored(chain))
        await publisher.publish(kvatlas.Removed(chain[2:]))

    client = kvatlas.QueryClient(connection)
    reply = await client.query("llama", kvatlas.Query.by_tokens(tokens))
    for holder in reply.holders:
        print(holder.worker, holder.matched_blocks, holder.exact)

:mod:`kvatlas.sync` has the same without ``await``.
"""

from ._publish.counters import PublisherCounters
from ._publish.options import Acknowledged, PublisherOptions
from .client import QueryClient, connect
from .errors import (
    BadRequestError,
    BatchTooLargeError,
    ClientError,
    ConnectionFailedError,
    InvalidValueError,
    KvatlasError,
    LimitExceededError,
    NoDaemonError,
    NotPermittedError,
    NotSentError,
    PublisherError,
    QueueFullError,
    RefusedError,
    RequestTooLargeError,
    StoppedError,
    TimedOutError,
    TooManyEventsError,
    UnavailableError,
    UndecodableError,
    UnknownNamespaceError,
    UnsupportedVersionError,
)
from .events import (
    Cleared,
    Cursor,
    Doubted,
    Event,
    Goodbye,
    Removed,
    Resumable,
    Stored,
    StoredByLineage,
    Tier,
    encode_batch,
    resumable_runs,
)
from .hashing import (
    BLOCK_SIZE,
    LineageHash,
    block_hashes,
    cache_seed,
    lineage_hashes,
    sequence_hashes,
)
from .models import ModelKey, instance_of_worker, worker_of_instance
from .profile import Profile
from .publisher import Publisher
from .queries import Query
from .subjects import Subjects, shard_of
from .wire import (
    DropOut,
    Gathered,
    Hint,
    HolderMatch,
    HolderStatus,
    Outcome,
    Predicted,
    QueryReply,
    StatusReply,
)

__version__ = "0.1.0"

__all__ = [
    "BLOCK_SIZE",
    "Acknowledged",
    "BadRequestError",
    "BatchTooLargeError",
    "Cleared",
    "ClientError",
    "ConnectionFailedError",
    "Cursor",
    "Doubted",
    "DropOut",
    "Event",
    "Gathered",
    "Goodbye",
    "Hint",
    "HolderMatch",
    "HolderStatus",
    "InvalidValueError",
    "KvatlasError",
    "LimitExceededError",
    "LineageHash",
    "ModelKey",
    "NoDaemonError",
    "NotPermittedError",
    "NotSentError",
    "Outcome",
    "Predicted",
    "Profile",
    "Publisher",
    "PublisherCounters",
    "PublisherError",
    "PublisherOptions",
    "Query",
    "QueryClient",
    "QueryReply",
    "QueueFullError",
    "RefusedError",
    "Removed",
    "RequestTooLargeError",
    "Resumable",
    "StatusReply",
    "StoppedError",
    "Stored",
    "StoredByLineage",
    "Subjects",
    "Tier",
    "TimedOutError",
    "TooManyEventsError",
    "UnavailableError",
    "UndecodableError",
    "UnknownNamespaceError",
    "UnsupportedVersionError",
    "block_hashes",
    "cache_seed",
    "connect",
    "encode_batch",
    "instance_of_worker",
    "lineage_hashes",
    "resumable_runs",
    "sequence_hashes",
    "shard_of",
    "worker_of_instance",
]
