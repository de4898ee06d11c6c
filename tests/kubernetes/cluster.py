"""A real Kubernetes API, started by ../shared/kubernetes/start.sh: etcd and the API server. No kubelet and no controllers run, so pods are what
a test makes of them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import ssl
import subprocess
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from processes import REPOSITORY, free_ports, wait_until

NAMESPACE = "llm"
# Requests beside each other where many pods are made at once.
AT_ONCE = 8
MERGE = "application/merge-patch+json"

Object = dict[str, Any]


def started_by() -> Path:
    """The script that starts the API."""
    shared = os.environ.get("KVATLAS_SHARED", str(REPOSITORY.parent / "shared"))
    return Path(shared, "kubernetes/start.sh")


class Refused(Exception):
    """The API has answered with an error."""


class Cluster:
    """The API server and its etcd, and an administrator's requests to it."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        self.binaries, self.folder = binaries, folder
        self.port, etcd, _ = free_ports(3)
        subprocess.run(
            [str(started_by()), str(binaries), str(folder), str(self.port), str(etcd)], check=True, stdout=subprocess.DEVNULL
        )
        self._etcd, self._server = (int(line) for line in (folder / "pids").read_text().split())
        self._command = Path(f"/proc/{self._server}/cmdline").read_text().split("\0")[:-1]
        self._child: subprocess.Popen[bytes] | None = None
        self._context = ssl.create_default_context(cafile=str(self.authority))
        self._of_thread = threading.local()

    @property
    def authority(self) -> Path:
        """The certificate by which the API server is known."""
        return self.folder / "certificates/apiserver.crt"

    @property
    def administrator(self) -> Path:
        """A kubeconfig that may do everything."""
        return self.folder / "kubeconfig"

    def stop(self) -> None:
        """Ends both at once: without etcd, the API server takes minutes on a milder signal."""
        self.kill_server()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._etcd, signal.SIGKILL)

    def kill_server(self) -> None:
        """SIGKILL to the API server; etcd keeps what it knows."""
        if self._child:
            self._child.kill()
            self._child.wait()
            self._child = None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._server, signal.SIGKILL)

    def start_server(self) -> None:
        """Starts the API server again, and waits until it is ready."""
        with (self.folder / "api.log").open("ab") as log:
            self._child = subprocess.Popen(self._command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_until("the API is ready", self._is_ready, 60)

    def _is_ready(self) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException, Refused):
            self.ask("GET", "/readyz")
            return True
        return False

    def ask(self, method: str, path: str, body: Object | None = None, kind: str = "application/json") -> Any:
        """The answer to an administrator's request; an error where the API refuses it."""
        payload = None if body is None else json.dumps(body)
        headers = {"Authorization": "Bearer admin-token", "Content-Type": kind}
        for is_last in (False, True):
            connection = getattr(self._of_thread, "connection", None)
            if connection is None:
                connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=30, context=self._context)
                self._of_thread.connection = connection
            try:
                connection.request(method, path, payload, headers)
                response = connection.getresponse()
                text = response.read()
                break
            except (OSError, http.client.HTTPException):
                # The connection is from before a restart.
                connection.close()
                self._of_thread.connection = None
                if is_last:
                    raise
        if response.status >= 300:
            raise Refused(f"{method} {path}: {response.status} {text[:500].decode(errors='replace')}")
        return json.loads(text) if text[:1] in (b"{", b"[") else None

    def make_namespace(self, name: str) -> None:
        """Makes a namespace, unless it is there."""
        with contextlib.suppress(Refused):
            self.ask("POST", "/api/v1/namespaces", {"metadata": {"name": name}})

    def token_of(self, account: str, namespace: str = NAMESPACE) -> str:
        """A token of a service account."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        answer = self.ask("POST", path, {"spec": {"expirationSeconds": 3600}})
        return str(answer["status"]["token"])

    def kubeconfig(self, path: Path, port: int, token: Path, namespace: str = NAMESPACE) -> None:
        """Writes a kubeconfig of a service account, with the token in a file as a pod has it, and the API at a port of this machine."""
        cluster = {"server": f"https://127.0.0.1:{port}", "certificate-authority": str(self.authority)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "bridge", "user": {"tokenFile": str(token)}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "bridge", "namespace": namespace}}],
        }
        path.write_text(json.dumps(config))

    def put_pod(self, name: str, address: str, port: int, group: str = "engines") -> float:
        """Makes a pod that runs at an address. Returns when it had that."""
        container = {"name": "vllm", "image": "vllm", "ports": [{"name": "http", "containerPort": port}]}
        pod = {
            "metadata": {"name": name, "labels": {"app": "vllm", "group": group}},
            "spec": {"nodeName": "node-0", "containers": [container]},
        }
        self.ask("POST", _pods(), pod)
        conditions = [{"type": "Ready", "status": "True"}]
        status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": conditions}
        self.ask("PATCH", f"{_pods(name)}/status", {"status": status}, MERGE)
        return time.monotonic()

    def put_pods(self, pods: Iterable[tuple[str, str, int]], group: str) -> None:
        """Makes many pods, several at once."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda pod: self.put_pod(pod[0], pod[1], pod[2], group), pods))

    def fail_pod(self, name: str) -> float:
        """The pod has ended, and its object stays, with the address that it had."""
        self.ask("PATCH", f"{_pods(name)}/status", {"status": {"phase": "Failed"}}, MERGE)
        return time.monotonic()

    def delete_pod(self, name: str, grace_seconds: int = 0) -> float:
        """Deletes a pod. With a grace it stays, «Terminating»: no kubelet says that it has ended."""
        self.ask("DELETE", f"{_pods(name)}?gracePeriodSeconds={grace_seconds}")
        return time.monotonic()

    def delete_pods(self, group: str) -> float:
        """Deletes all pods of a group."""
        self.ask("DELETE", f"{_pods()}?labelSelector=group%3D{group}&gracePeriodSeconds=0")
        return time.monotonic()

    def uid_of(self, name: str) -> str:
        """The UID of a pod."""
        return str(self.ask("GET", _pods(name))["metadata"]["uid"])


def _pods(name: str = "") -> str:
    return f"/api/v1/namespaces/{NAMESPACE}/pods{'/' if name else ''}{name}"
