"""What a publisher counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PublisherCounters:
    """What a publisher has done since it was started.

    :param batches_sent: without heartbeats.
    :param batches_failed: batches that NATS did not take; daemons notice the gap and ask for them.
    :param batches_refused: batches, and heartbeats, that were sent and that the server refused. They are counted on a connection of
        :func:`kvatlas.connect` only. Publishers of several ranks of one worker on one connection share the number.
    :param calls_dropped: calls that :meth:`Publisher.aclose` had no time for.
    :param queue_waits: calls that had to wait for room in the queue.
    :param queue_refusals: calls that were refused for want of room.
    :param answers_missing: daemons that were given the batches they missed.
    :param answers_full: daemons that were given the full state.
    :param answers_refused: daemons that could not be helped.
    """

    batches_sent: int = 0
    heartbeats_sent: int = 0
    batches_failed: int = 0
    batches_refused: int = 0
    calls_dropped: int = 0
    queue_waits: int = 0
    queue_refusals: int = 0
    answers_missing: int = 0
    answers_full: int = 0
    answers_refused: int = 0
