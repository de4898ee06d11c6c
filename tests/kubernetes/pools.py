"""InferencePools and EndpointSlices, made as a Gateway and the controllers of Kubernetes make them."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster import MERGE, NAMESPACE, Cluster, Object
from engines import MODEL
from processes import Process, free_ports, kvatlas, wait_until
from report import Report, demand
from site_of_pods import LIMIT, Site

GROUP = "inference.networking.k8s.io"
POOLS = f"/apis/{GROUP}/v1/namespaces/{NAMESPACE}/inferencepools"
SLICES = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
RIGHTS = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}"
# Addresses of documentation: the API refuses those of this machine in slices.
NOBODY = "198.51.100"
# Until a bridge tries again what was refused, with its longest pause.
PAUSE = 5.0


def definition() -> Object:
    """The form of InferencePools, as far as the API needs it."""
    free = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": free}}
    names = {"kind": "InferencePool", "listKind": "InferencePoolList", "plural": "inferencepools", "singular": "inferencepool"}
    annotations = {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/gateway-api-inference-extension/pull/1173"}
    return {
        "metadata": {"name": f"inferencepools.{GROUP}", "annotations": annotations},
        "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }


class Pools:
    """The checks, each with a bridge of its own that has the chart's account."""

    def __init__(self, report: Report, cluster: Cluster, site: Site, folder: Path, account: str) -> None:
        self._report, self._cluster, self._site, self._folder, self._account = report, cluster, site, folder, account
        [self._admin] = free_ports(1)

    def play(self) -> None:
        """All checks."""
        self._cluster.put_pods([(f"a-{number}", f"127.1.0.{number + 1}", 8000) for number in range(3)], "a")
        self._cluster.put_pods([(f"b-{number}", f"127.1.1.{number + 1}", 8000) for number in range(5)], "b")
        self._site.write_token(self._cluster.token_of(self._account))
        self._pool()
        self._slices()
        for group in ("a", "b"):
            self._cluster.delete_pods(group)

    @contextmanager
    def _bridge(self, source: str) -> Iterator[None]:
        listen, nats = f"127.0.0.1:{self._admin}", self._site.nats_url
        command = [kvatlas(), "bridge", "--nats-url", nats, "--admin-listen", listen, "--tenant", "pools", "--model", MODEL]
        bridge = Process([*command, "--discover", source], self._folder / "pools.log")
        bridge.start()
        try:
            yield
        finally:
            bridge.kill()

    def _shown(self) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._admin, timeout=10)
        try:
            connection.request("GET", "/workers?limit=10000")
            return json.loads(connection.getresponse().read())
        except OSError:
            return {"sources": [{"engines": -1, "last_error": None}], "servers": []}
        finally:
            connection.close()

    def _says(self, words: str) -> None:
        wait_until(f"the bridge says {words}", lambda: words in (self._shown()["sources"][0]["last_error"] or ""), 3 * PAUSE)

    def _knows(self, engines: set[str], limit: float = LIMIT) -> str:
        """Waits until just these are known, by address and port."""
        began = time.monotonic()
        known = lambda: {server["url"].removeprefix("http://") for server in self._shown()["servers"]}
        wait_until(f"{len(engines)} engines are known", lambda: known() == engines, 3 * PAUSE)
        took = time.monotonic() - began
        demand(took <= limit, f"{len(engines)} engines were known after {took:.2f} s")
        return f"{len(engines)} engines after {took:.2f} s"

    def _grant(self, name: str, group: str, resource: str) -> None:
        rule = {"apiGroups": [group], "resources": [resource], "verbs": ["get", "list", "watch"]}
        subject = {"kind": "ServiceAccount", "name": self._account, "namespace": NAMESPACE}
        self._cluster.ask("POST", f"{RIGHTS}/roles", {"metadata": {"name": name}, "rules": [rule]})
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
        self._cluster.ask("POST", f"{RIGHTS}/rolebindings", {"metadata": {"name": name}, "roleRef": role, "subjects": [subject]})

    def _pool(self) -> None:
        a = {f"127.1.0.{number + 1}:8000" for number in range(3)}
        b = {f"127.1.1.{number + 1}:9000" for number in range(5)}
        with self._report.check("InferencePool, without rights and definition, and as it changes") as notes, self._bridge("inferencepool:llama"):
            self._says("inferencepools")
            self._grant("pools", GROUP, "inferencepools")
            self._says("install their definition")
            self._cluster.ask("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition())
            self._says("there is no InferencePool llama")
            spec = {"selector": {"matchLabels": {"app": "vllm", "group": "a"}}, "targetPorts": [{"number": 8000}]}
            pool = {"apiVersion": f"{GROUP}/v1", "kind": "InferencePool", "metadata": {"name": "llama"}, "spec": spec}
            self._cluster.ask("POST", POOLS, pool)
            notes.append(self._knows(a))
            changed = {"spec": {"selector": {"matchLabels": {"group": "b"}}, "targetPorts": [{"number": 9000}]}}
            self._cluster.ask("PATCH", f"{POOLS}/llama", changed, MERGE)
            notes.append(f"{self._knows(b)} of another selector and port")
            ranks = {"spec": {"targetPorts": [{"number": 9000}, {"number": 9001}]}}
            self._cluster.ask("PATCH", f"{POOLS}/llama", ranks, MERGE)
            notes.append(f"{self._knows(b | {engine.replace(':9000', ':9001') for engine in b})} at two ports")
            names = {server["instance"] for server in self._shown()["servers"]}
            demand(names == {f"b-{pod}-rank-{port}" for pod in range(5) for port in range(2)}, f"the engines are called {names}")
            self._cluster.ask("PATCH", f"{POOLS}/llama", changed, MERGE)
            self._knows(b)
            self._cluster.delete_pod("b-0")
            notes.append(f"{self._knows(b - {'127.1.1.1:9000'})} when a pod is deleted")
            self._cluster.ask("DELETE", f"{POOLS}/llama")
            notes.append(f"{self._knows(set())} when the pool is")
            self._says("there is no InferencePool llama")

    def _slices(self) -> None:
        with self._report.check("EndpointSlices of a Service") as notes, self._bridge("endpointslices:vllm"):
            self._says("endpointslices")
            self._grant("slices", "discovery.k8s.io", "endpointslices")
            endpoints = [
                {
                    "addresses": [f"{NOBODY}.{number + 1}"],
                    "conditions": {"ready": number == 0},
                    "targetRef": {"kind": "Pod", "namespace": NAMESPACE, "name": f"a-{number}", "uid": self._cluster.uid_of(f"a-{number}")},
                }
                for number in range(3)
            ]
            labels = {"kubernetes.io/service-name": "vllm"}
            made = {"metadata": {"name": "vllm-x", "labels": labels}, "addressType": "IPv4", "endpoints": endpoints, "ports": [{"port": 8000}]}
            self._cluster.ask("POST", SLICES, made)
            notes.append(self._knows({f"{NOBODY}.{number + 1}:8000" for number in range(3)}, PAUSE + LIMIT))
            identities = {server["identity"] for server in self._shown()["servers"]}
            demand(identities == {self._cluster.uid_of(f"a-{number}") for number in range(3)}, "the identities are not the pods' UIDs")
            endpoints[1]["conditions"] = {"ready": False, "serving": True, "terminating": True}
            self._cluster.ask("PATCH", f"{SLICES}/vllm-x", {"endpoints": endpoints}, MERGE)
            notes.append(f"{self._knows({f'{NOBODY}.1:8000', f'{NOBODY}.3:8000'})} when one is terminating")
            self._cluster.ask("DELETE", f"{SLICES}/vllm-x")
            notes.append(f"{self._knows(set())} when the slice is gone")
