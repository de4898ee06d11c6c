"""What can go wrong, one class a failure."""

from __future__ import annotations


class KvatlasError(Exception):
    """Any failure of this package."""


class InvalidValueError(KvatlasError, ValueError):
    """A value that the contract does not allow: a name, a hash, a position, an event or a query."""


class ConnectionFailedError(KvatlasError):
    """The connection to NATS failed."""


class ClientError(KvatlasError):
    """Why a request has no answer."""


class NoDaemonError(ClientError):
    """Nobody subscribes to the subject."""

    def __init__(self, subject: str) -> None:
        super().__init__(
            f"no kvatlas daemon listens on {subject}; start one, or a gateway if there are only shards; or check the subject prefix"
        )
        self.subject = subject


class NotPermittedError(ClientError, PermissionError):
    """The NATS server refuses a message, or the subscription to its answer. A connection of :func:`kvatlas.connect` hears of that."""

    def __init__(self, subject: str, words: str) -> None:
        super().__init__(f"no message on {subject}: {words}; give the user the right to it")
        self.subject = subject
        self.words = words


class TimedOutError(ClientError, TimeoutError):
    """No answer came in time."""

    def __init__(self, subject: str, patience: float) -> None:
        super().__init__(f"no answer on {subject} within {patience} s")
        self.subject = subject
        self.patience = patience


class UndecodableError(ClientError):
    """The answer is not one of this contract."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the answer cannot be decoded: {reason}")


class RequestTooLargeError(ClientError):
    """The request is larger than the NATS server takes; nothing was sent."""

    def __init__(self, subject: str, size: int, size_max: int) -> None:
        super().__init__(
            f"the message to {subject} has {size} bytes, and the NATS server takes at most {size_max}; "
            "split it, or raise max_payload in the server's configuration"
        )
        self.subject = subject
        self.size = size
        self.size_max = size_max


class RefusedError(ClientError):
    """The daemon answered with an error. :attr:`code` is its number, :attr:`text` says what to change."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"the daemon refused: {text} (error {code})")
        self.code = code
        self.text = text


class BadRequestError(RefusedError):
    """400: the request cannot be decoded or contradicts itself."""


class UnknownNamespaceError(RefusedError):
    """404: no worker of the namespace has been heard of, and no configuration names it."""


class LimitExceededError(RefusedError):
    """413: the request, or the reply it would have, exceeds a limit of the daemon."""


class UnavailableError(RefusedError):
    """503: the daemon or gateway cannot answer just now; ask again."""


class UnsupportedVersionError(RefusedError):
    """505: the request speaks another version of the contract."""


_REFUSALS: dict[int, type[RefusedError]] = {
    400: BadRequestError,
    404: UnknownNamespaceError,
    413: LimitExceededError,
    503: UnavailableError,
    505: UnsupportedVersionError,
}


def refusal(code: int, text: str) -> RefusedError:
    """The error that a daemon's error number stands for."""
    return _REFUSALS.get(code, RefusedError)(code, text)


class PublisherError(KvatlasError):
    """Why something was not published."""


class QueueFullError(PublisherError):
    """Batches come faster than NATS takes them, or the connection is down."""

    def __init__(self, queued_max: int, bytes_max: int) -> None:
        super().__init__(
            f"the queue of {queued_max} batches or {bytes_max} bytes is full; publish less, wait for room, or raise "
            "queue_batches_max or queue_bytes_max"
        )
        self.queued_max = queued_max
        self.bytes_max = bytes_max


class BatchTooLargeError(PublisherError):
    """The events of one call do not fit into one message."""

    def __init__(self, size: int, size_max: int) -> None:
        super().__init__(
            f"the events take about {size} bytes; at most {size_max} fit into a batch, split them"
        )
        self.size = size
        self.size_max = size_max


class TooManyEventsError(PublisherError):
    """There are more events in one call than a batch may have."""

    def __init__(self, events: int, events_max: int) -> None:
        super().__init__(f"{events} events are too many for one batch; publish at most {events_max} at once")
        self.events = events
        self.events_max = events_max


class StoppedError(PublisherError):
    """The publisher has said goodbye, was closed, or has ended by an error, which is the cause of this one."""

    def __init__(self, fault: Exception | None = None) -> None:
        why = "" if fault is None else f" by an error ({type(fault).__name__}: {fault})"
        super().__init__(f"the publisher has stopped{why}; start another one")
        self.__cause__ = fault


class NotSentError(PublisherError, ConnectionFailedError):
    """A batch could not be sent. Daemons notice the gap and ask for what is missing."""
