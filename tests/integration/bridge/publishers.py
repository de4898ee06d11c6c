"""Publishers as vLLM and SGLang have them: a PUB socket and a ROUTER for replays each, driven by JSON lines on standard input.

The first argument is a JSON list of publishers: {"pub": PORT, "replay": PORT or null, "framing": 3 or 4, "buffer": BATCHES, "torn": EVERY}. Port 0 takes
a free one. The first line of the output has the ports. Then each line of the input is a command, answered by one line:

    {"engine": 0, "events": [...], "lost": false}   publish; a lost batch has a number and is in the buffer, but is not sent
    {"engine": 0, "raw": "hex"}                     publish these bytes as the payload
    {"engine": 0, "plane": "hex"}                   publish this envelope as Dynamo's event plane does
    {"engine": 0, "wait": true}                     wait until somebody subscribes
    {"engine": 0, "events": [...], "topic": "kv"}   publish under this topic
    {"engine": 0, "another": [[...]], "events": []} be another process behind the same sockets: lose these batches, and publish the last one
    {"engine": 0, "anew": 1}                        be another process behind the same sockets: count anew, and answer so many questions more
"""

import collections
import json
import sys
import time

import msgspec
import zmq

END = (-1).to_bytes(8, "big", signed=True)


class Publisher:
    def __init__(self, context, spec):
        # As PUB, and shows who subscribes.
        self.pub = context.socket(zmq.XPUB)
        self.pub.setsockopt(zmq.SNDHWM, 100_000)
        self.framing = spec["framing"]
        self.buffer = collections.deque(maxlen=spec["buffer"])
        # An answer of the replay socket ends behind so many batches, and goes on behind as many further ones; 0 gives all.
        self.torn = spec["torn"]
        self.seq = 0
        # How many questions will be answered; none bounds them.
        self.answers = None
        self.ports = [self.bind(self.pub, spec["pub"])]
        self.replay = None
        if spec["replay"] is not None:
            self.replay = context.socket(zmq.ROUTER)
            self.ports.append(self.bind(self.replay, spec["replay"]))

    @staticmethod
    def bind(socket, port):
        if port == 0:
            return socket.bind_to_random_port("tcp://127.0.0.1")
        socket.bind(f"tcp://127.0.0.1:{port}")
        return port

    def publish(self, command):
        if "raw" in command:
            payload = bytes.fromhex(command["raw"])
        else:
            payload = msgspec.msgpack.encode([time.time(), command["events"], 0])
        if not command.get("lost"):
            topic = command.get("topic", "kv-events").encode()
            self.pub.send_multipart((topic, self.seq.to_bytes(8, "big"), payload))
        self.buffer.append((self.seq, payload))
        self.seq += 1

    def publish_plane(self, envelope):
        head = b"\x01" + len(envelope).to_bytes(4, "big")
        number = self.seq.to_bytes(8, "big")
        self.pub.send_multipart((b"kv-events", number, number, head + envelope))
        self.seq += 1

    def serve_replay(self):
        client, empty, start = self.replay.recv_multipart()
        start = int.from_bytes(start, "big")
        if self.answers is not None:
            if self.answers == 0:
                return
            self.answers -= 1
        due = [(seq, payload) for seq, payload in self.buffer if seq >= start]
        for place, (seq, payload) in enumerate(due):
            if not self.torn or place // self.torn % 2 == 0:
                self.answer(client, seq.to_bytes(8, "big"), payload)
        self.answer(client, END, b"")

    def answer(self, client, number, payload):
        topic = (b"kv-events",) if self.framing == 4 else ()
        self.replay.send_multipart((client, b"", *topic, number, payload))


def main():
    context = zmq.Context()
    publishers = [Publisher(context, spec) for spec in json.loads(sys.argv[1])]
    print(json.dumps([publisher.ports for publisher in publishers]), flush=True)
    poller = zmq.Poller()
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    for publisher in publishers:
        if publisher.replay is not None:
            poller.register(publisher.replay, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        for publisher in publishers:
            if publisher.replay in ready:
                publisher.serve_replay()
        if sys.stdin.fileno() in ready:
            line = sys.stdin.buffer.raw.readline()
            if not line:
                return
            command = json.loads(line)
            publisher = publishers[command["engine"]]
            if "wait" in command:
                while publisher.pub.recv()[:1] != b"\x01":
                    pass
                print(0, flush=True)
                continue
            if "anew" in command:
                publisher.seq, publisher.answers = 0, command["anew"]
                publisher.buffer.clear()
                print(0, flush=True)
                continue
            if "another" in command:
                publisher.seq = 0
                publisher.buffer.clear()
                for events in command["another"]:
                    publisher.publish({"events": events, "lost": True})
            if "plane" in command:
                publisher.publish_plane(bytes.fromhex(command["plane"]))
            else:
                publisher.publish(command)
            print(json.dumps(publisher.seq - 1), flush=True)


main()
