"""A bare subscriber of NATS: count_nats.py PORT N. Says when it hears of a clear, and when N stored events have come."""

import socket
import sys

CLEARED, STORED = b"\xa7cleared", b"\xa6stored"


def main(port: int, count: int) -> None:
    """Counts in what comes over the connection, and reads nothing else of it."""
    with socket.create_connection(("127.0.0.1", port)) as server:
        server.sendall(b'CONNECT {"verbose":false,"pedantic":false}\r\nSUB kvatlas.v1.events.> 1\r\nPING\r\n')
        seen = b""
        while b"PONG\r\n" not in seen:
            seen += server.recv(1 << 16)
        print("subscribed", flush=True)
        follows, seen = False, b""
        while count > 0:
            # An event may begin in one piece and end in the next.
            kept = seen[1 - len(CLEARED) :]
            received = server.recv(1 << 18)
            if not received:
                sys.exit("the server has ended the connection")
            if received.endswith(b"PING\r\n"):
                server.sendall(b"PONG\r\n")
            seen = kept + received
            if not follows and CLEARED in seen:
                follows = True
                print("follows", flush=True)
            count -= seen.count(STORED) - kept.count(STORED)
        print("done", flush=True)


main(int(sys.argv[1]), int(sys.argv[2]))
