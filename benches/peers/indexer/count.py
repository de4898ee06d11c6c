"""A bare subscriber of pyzmq: count.py ENDPOINT N. Says when something comes, and when N batches of three frames have come."""

import sys

import zmq


def main(endpoint: str, count: int) -> None:
    """Counts, and does nothing else."""
    subscriber = zmq.Context().socket(zmq.SUB)
    subscriber.set_hwm(0)
    subscriber.subscribe(b"")
    subscriber.connect(endpoint)
    frames = subscriber.recv_multipart()
    print("follows", flush=True)
    while count:
        count -= len(frames) == 3
        if count:
            frames = subscriber.recv_multipart()
    print("done", flush=True)


main(sys.argv[1], int(sys.argv[2]))
