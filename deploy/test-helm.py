#!/usr/bin/env python3
"""Lints the Helm chart, renders it with many values (with --all: every combination of them), and checks each result.

- Every rendered object has the form that Kubernetes' published schemas want, strictly; of a ServiceMonitor and a PrometheusRule, the form
  that their operator documents.
- Every selector finds what it is for, every volume and port that is named is there, every container is without rights. So it is whatever
  the release is called, and all names of Services are such as Kubernetes takes.
- Every workload has the checksum of its configuration.
- The NATS server of the chart's own takes its configuration, and all others are told of it.
- The daemon takes the configuration, environment and arguments of every container: `kvatlas serve --check-config`.
- The sidecar of deploy/README.md has the form that Kubernetes wants in the pods of engines, and the bridge takes its arguments.
- The bridge takes its arguments, starts with them, and is registered at where that is meant. It may read pods where it finds engines among
  them, and nothing else.
- Values that would not work are refused by the chart's schema: of settings those that the chart sets itself, of engines, their formats
  and where they are found what the bridge refuses. All other settings of deploy/settings.md are let through.

With --print-values it prints the combinations as JSON, and checks nothing: deploy/scenario-kubernetes.sh installs them on a real API.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Iterator

import helm_python as helm
import kubernetes_validate  # type: ignore[import-untyped]
import yaml

# The safe loader in C, where PyYAML has it: several times as fast.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# The schemas are read once: the definitions of a version of Kubernetes are megabytes, and every object refers to them.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)

CHART = Path(__file__).resolve().parent / "helm/kvatlas"
KVATLAS = os.environ["KVATLAS_BIN"]
FETCHED = Path(__file__).resolve().parents[1] / ".tools/nats-server"
NATS_SERVER = os.environ.get("NATS_SERVER_BIN") or shutil.which("nats-server") or str(FETCHED)
KUBERNETES = ["1.27", "1.37"]
# From the first on that has sidecars, as init containers that are restarted.
WITH_SIDECARS = ["1.29", "1.37"]
PAGE = CHART.parent.parent / "README.md"
SETTINGS = CHART.parent.parent / "settings.md"
ALERTS = yaml.safe_load((CHART.parent.parent / "prometheus/alerts.yml").read_text())

Values = dict[str, Any]

# Each dimension is what people choose independently of the others.
DIMENSIONS: list[list[Values]] = [
    [{}, {"replicas": 3, "fullnameOverride": "map"}],
    [
        {},
        {"nats": {"auth": {"kind": "user", "secret": "nats-user", "userKey": "name"}}},
        {"nats": {"auth": {"kind": "token", "secret": "nats-token"}}},
        {
            "nats": {
                "url": "tls://one:4222,tls://two:4222",
                "auth": {"kind": "credentials", "secret": "nats-creds"},
                "inboxPrefix": "_INBOX_DAEMON",
                "tls": {"required": True, "caSecret": "nats-ca"},
            }
        },
        {"nats": {"enabled": True}},
        {
            "nats": {
                "enabled": True,
                "auth": {"kind": "user", "secret": "nats-user", "passwordKey": "word"},
                "image": {"repository": "mirror/nats", "tag": "2"},
                "storage": {"size": "1Gi", "storageClass": "fast"},
                "from": [{"namespaceSelector": {}}],
            }
        },
    ],
    [{}, {"transport": "jetstream", "snapshots": {"objectStore": "kvatlas", "storageClass": "fast"}}, {"snapshots": {"enabled": False}}],
    [
        {},
        {"http": {"enabled": True, "service": {"type": "LoadBalancer", "annotations": {"a": "b"}}}},
        {"http": {"enabled": True, "tokenSecret": "http-token"}},
        {"http": {"enabled": True}, "redis": {"enabled": True, "passwordSecret": "redis", "service": {"type": "LoadBalancer", "annotations": {"a": "b"}}}},
        {
            "grpc": {"enabled": True, "tokenSecret": "grpc-token", "service": {"port": 50052}},
            "dynamo": {"enabled": True, "service": {"annotations": {"a": "b"}}},
            "config": {"dynamo": {"components": "dynamo.backend,dynamo.other", "discovery": "etcd:http://etcd:2479"}},
        },
        {"shards": 3, "gateway": {"auth": {"kind": "user", "secret": "gateway"}, "inboxPrefix": "_INBOX_GATEWAY"}},
        {"shards": 2, "http": {"enabled": True, "tokenSecret": "http-token"}},
        {"shards": 2, "redis": {"enabled": True, "passwordSecret": "redis"}, "dynamo": {"enabled": True}, "config": {"dynamo": {"components": "a.b", "max_connections": 2000}}},
        {"shards": 2, "config": {"dynamo": {"components": "a.b", "discovery": "etcd:http://etcd:2379"}}},
    ],
    [{}, {"admin": {"bind": "loopback"}}, {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}, "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}}}],
    [
        {},
        {"bridge": {"enabled": True, "engines": ["gpu-0=tcp://vllm-0:5557,replay=tcp://vllm-0:5558"], "model": "meta-llama/Llama-3.1-8B-Instruct"}},
        {"bridge": {"enabled": True, "engines": ["a=tcp://a:5557,model=m"], "auth": {"kind": "user", "secret": "bridge"}, "inboxPrefix": "_INBOX_B"}},
        {"bridge": {"enabled": True, "http": {"enabled": True}}},
        {"bridge": {"enabled": True, "discover": ["kubernetes:app=vllm", "kubernetes:app=sglang@other:30000", "dns:vllm-headless:8000"], "blockSize": 32, "podLabels": ["role", "topology.kubernetes.io/zone"]}},
        {"bridge": {"enabled": True, "discover": ["inferencepool:llama", "endpointslices:other/vllm:8000", "inferencepool:other/a"], "scheme": "llm-d-cbor-fnv:42"}},
        {
            "bridge": {
                "enabled": True,
                "engines": ["a=nats://b:4222,topic=namespace.n.component.c.kv-events,model=m"],
                "format": "dynamo",
                "http": {"enabled": True, "port": 8190, "tokenSecret": "bridge-token", "service": {"type": "LoadBalancer", "annotations": {"a": "b"}}},
            }
        },
    ],
    [{}, {"podDisruptionBudget": {"enabled": False}, "networkPolicy": {"enabled": False}, "serviceAccount": {"create": False}}],
]
# What people add to all pods.
EXTRAS: Values = {
    "podAnnotations": {"a": "b"},
    "podLabels": {"c": "d"},
    "podSecurityContext": {"fsGroup": 1000, "supplementalGroups": [2000]},
    "extraEnv": [{"name": "RUST_BACKTRACE", "value": "1"}],
    "extraVolumes": [{"name": "extra", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "extra", "mountPath": "/extra"}],
    "updateStrategy": {"type": "OnDelete"},
    "gateway": {"updateStrategy": {"rollingUpdate": {"maxSurge": 2}}},
}
# What the chart says of all pods, and what OpenShift wants: it chooses these itself.
SECURITY = {"runAsNonRoot": True, "runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532, "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"}}
BY_OPENSHIFT = {"runAsUser": None, "runAsGroup": None, "fsGroup": None}
# Who may scrape unless said otherwise.
MONITORING = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
# Where people have all pods go.
PLACES: Values = {
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
    "nodeSelector": {"a": "b"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "priorityClassName": "high",
    "imagePullSecrets": [{"name": "registry"}],
}
# The same for the NATS server of the chart's own, which has none of the others'.
NATS_POD: Values = {name: EXTRAS[name] for name in ("podAnnotations", "podLabels", "podSecurityContext", "extraEnv")} | {name: PLACES[name] for name in PLACES if name != "topologySpreadConstraints"}
# Values that meet the templates once, with the defaults for the rest.
ONCE: list[Values] = [
    {"resources": {"limits": {"memory": "16Gi"}}, "config": {"limits": {"max_bytes_total": "8 GiB", "max_workers_per_namespace": 1000}, "namespaces": {"llama-70b": {"block_size": 64, "hashing": "recompute"}}}},
    {"config": {"logging": {"format": "json", "level": "info,kvatlas=debug"}, "events": {"stream_create": False}}},
    {"image": {"digest": "sha256:" + "0" * 64}},
    PLACES,
    PLACES | {"shards": 2, "bridge": {"enabled": True, "enginesConfigMap": "engines"}},
    {"nats": {"enabled": True} | NATS_POD},
    EXTRAS | {"nats": {"enabled": True}},
    EXTRAS,
    EXTRAS | {"shards": 2},
    EXTRAS | {"bridge": {"enabled": True, "enginesConfigMap": "engines"}},
    {"resources": {"requests": {"memory": "1Gi"}, "limits": None}},
    {"nats": {"url": "nats://a:4333,nats://b:4334/,nats://c"}},
    {"networkPolicy": {"natsPort": 4444}},
    {"podMonitor": {"enabled": True, "labels": {"release": "prometheus"}}, "prometheusRule": {"enabled": True}},
    {"bridge": {"enabled": True, "discover": ["dynamo:etcd:http://etcd:2379,component=dynamo.backend"], "answerPorts": "7300-7315"}},
    {"bridge": {"enabled": True, "engines": ["grpc://vllm-0:50051"], "answerPorts": "7300"}, "networkPolicy": {"answersFrom": [{"namespaceSelector": {}}]}},
    {"bridge": {"enabled": True, "discover": ["dns:vllm-headless:8000"], "republish": {"enabled": True}}},
    {
        "bridge": {
            "enabled": True,
            "discover": ["dns:a:8000"],
            "answerPorts": "7300-7315",
            "replicas": 2,
            "state": {"bucket": "kept"},
            "republish": {"enabled": True, "port": 5700, "engines": 3, "everything": True, "maxBytes": 4294967296, "service": {"type": "LoadBalancer", "annotations": {"a": "b"}}},
        },
        "networkPolicy": {"republishFrom": [{"namespaceSelector": {}}]},
    },
    {"bridge": {"enabled": True, "discover": ["dns:a:8000"], "republish": {"enabled": True}}, "networkPolicy": {"republishFrom": []}},
    {"networkPolicy": {"metricsFrom": [], "httpFrom": []}, "http": {"enabled": True}},
    {"networkPolicy": {"redisFrom": []}, "redis": {"enabled": True, "port": 6380}},
    {"networkPolicy": {"grpcFrom": []}, "grpc": {"enabled": True}, "config": {"grpc": {"namespace": "m_ssglang", "writing": "open"}}},
    {"networkPolicy": {"grpcFrom": [{"namespaceSelector": {}}]}, "grpc": {"enabled": True}, "shards": 2, "config": {"grpc": {"namespace": "m_ssglang"}}},
    {"networkPolicy": {"dynamoFrom": []}, "dynamo": {"enabled": True, "port": 7401}, "config": {"dynamo": {"components": "dynamo.backend"}}},
    {"config": {"dynamo": {"components": "dynamo.backend", "discovery": "file:/run/dynamo"}}},
    {"shards": 2, "gateway": {"autoscaling": {"enabled": True, "maxReplicas": 20}, "resources": {"requests": {"cpu": "500m"}}}, "http": {"enabled": True}},
    {"bridge": {"enabled": True, "engines": ["a=tcp://a:5557"], "model": "m", "replicas": 2}},
    {"bridge": {"enabled": True, "discover": ["dns:a:8000"], "replicas": 3, "updateStrategy": {"type": "Recreate"}}, "podDisruptionBudget": {"maxUnavailable": "50%"}},
    {"bridge": {"enabled": True, "discover": ["dns:a:8000"], "updateStrategy": {"type": "Recreate"}}},
    {"bridge": {"enabled": True, "engines": ["a=tcp://a:5557"], "model": "m", "state": {"existingClaim": "kept"}}},
    {"transport": "jetstream", "bridge": {"enabled": True, "discover": ["dns:a:8000"], "state": {"existingClaim": "kept"}}},
    {"nats": {"enabled": True}, "bridge": {"enabled": True, "discover": ["dns:a:8000"], "state": {"bucket": ""}}},
    {"bridge": {"enabled": True, "engines": ["a=tcp://a:5557"], "model": "m", "state": {"enabled": False}}},
    {"bridge": {"enabled": True, "discover": ["dns:a:8000"], "replicas": 2, "state": {"bucket": "kept"}}},
    {"networkPolicy": {"registerFrom": []}, "http": {"enabled": True}, "bridge": {"enabled": True, "http": {"enabled": True}}},
    {"nats": {"enabled": True, "auth": {"kind": "token", "secret": "nats-token"}, "from": []}, "bridge": {"enabled": True, "discover": ["dns:a:8000"]}},
    {
        "config": {"traces": {"endpoint": "http://collector:4318/v1/traces"}, "admin": {"commands": False}, "nats": {"tls_first": True}},
        "networkPolicy": {"egress": [{"ports": [{"protocol": "TCP", "port": 4318}]}]},
    },
]
REFUSED: list[tuple[str, Values]] = [
    ("a word that is no value", {"replica": 2}),
    ("a name that is too long for a label", {"nameOverride": "a" * 64}),
    ("a URL without a scheme", {"nats": {"url": "nats:4222"}}),
    ("a password in the URL", {"nats": {"url": "nats://me:secret@nats:4222"}}),
    ("no secret for a user", {"nats": {"auth": {"kind": "user"}}}),
    ("credentials that the chart's own server does not know", {"nats": {"enabled": True, "auth": {"kind": "credentials", "secret": "a"}}}),
    ("TLS to the chart's own server", {"nats": {"enabled": True, "tls": {"required": True}}}),
    ("a section that the daemon does not have", {"config": {"trace": {}}}),
    ("a scrape of the loopback address", {"admin": {"bind": "loopback"}, "serviceMonitor": {"enabled": True}}),
    ("alerts on what nobody scrapes", {"admin": {"bind": "loopback"}, "prometheusRule": {"enabled": True}}),
    ("a listener for Dynamo's routers of no component", {"dynamo": {"enabled": True}}),
    ("gateways that do not know about what SGLang's routers ask", {"shards": 2, "grpc": {"enabled": True}}),
    ("reports to gateways", {"shards": 2, "config": {"grpc": {"namespace": "m", "writing": "open"}}}),
    ("gateways that scale by requests that they do not make", {"shards": 2, "gateway": {"autoscaling": {"enabled": True}}}),
    ("a bucket that has no room for the shard in its name", {"shards": 2, "snapshots": {"objectStore": "b" * 48}}),
    ("a bridge without engines", {"bridge": {"enabled": True}}),
    ("bridges that share a volume", {"bridge": {"enabled": True, "engines": ["a=tcp://a:5557"], "model": "m", "replicas": 2, "state": {"existingClaim": "kept"}}}),
    ("state in a volume and in JetStream", {"bridge": {"enabled": True, "discover": ["dns:a:8000"], "state": {"existingClaim": "a", "bucket": "b"}}}),
    ("a bridge that starts before the old one has ended", {"bridge": {"enabled": True, "discover": ["dns:a:8000"], "updateStrategy": {"type": "RollingUpdate"}}}),
    ("a bridge at which nobody registers engines", {"bridge": {"enabled": True, "http": {"enabled": False, "tokenSecret": "t"}}}),
    ("an engine without a model", {"bridge": {"enabled": True, "engines": ["a=tcp://a:5557,model=m", "b=tcp://b:5557"]}}),
    ("a port out of range", {"admin": {"port": 70000}}),
    ("a PodMonitor of the loopback address", {"admin": {"bind": "loopback"}, "podMonitor": {"enabled": True}}),
    ("ports for no engine", {"bridge": {"enabled": True, "discover": ["dns:a:8000"], "republish": {"enabled": True, "engines": 0}}}),
    ("bridges that would give an engine different ports", {"bridge": {"enabled": True, "discover": ["dns:a:8000"], "replicas": 2, "republish": {"enabled": True}}}),
    ("a NATS server that pods with IPv6 addresses alone do not reach", {"listenAddress": "[::]", "nats": {"enabled": True}}),
    ("a name in the place of an address", {"listenAddress": "localhost"}),
    ("a word that is no flag", {"bridge": {"enabled": True, "discover": ["dns:a:8000"], "extraArgs": ["forget"]}}),
    ("ports that are no range", {"bridge": {"enabled": True, "discover": ["dns:a:8000"], "answerPorts": "any"}}),
]
# What a schema cannot see: the templates do not render it.
UNRENDERED: list[tuple[str, Values]] = [
    ("indexes that take more than their share of memory", {"config": {"limits": {"max_bytes_total": "3 GiB"}}}),
    ("the same as a number", {"config": {"limits": {"max_bytes_total": 3221225472}}}),
    ("memory in words", {"resources": {"limits": {"memory": "much"}}}),
]
# All that can listen, where pods have IPv6 addresses alone.
IPV6: Values = {
    "listenAddress": "[::]",
    "nats": {"enabled": True, "listenAddress": "[::]"},
    **{name: {"enabled": True} for name in ("http", "grpc", "redis", "dynamo")},
    "config": {"dynamo": {"components": "a.b"}},
    "bridge": {"enabled": True, "http": {"enabled": True}, "republish": {"enabled": True}},
}
ALL_LISTEN = {
    "daemon": {f"KVATLAS_{name}_LISTEN" for name in ("ADMIN", "HTTP", "GRPC", "REDIS", "DYNAMO")},
    "bridge": {"KVATLAS_ADMIN_LISTEN", "KVATLAS_HTTP_LISTEN"},
}
ONCE.append(IPV6)
ONCE += [
    {"podSecurityContext": BY_OPENSHIFT, "nats": {"enabled": True, "podSecurityContext": BY_OPENSHIFT}},
    {"podSecurityContext": {"runAsUser": 0, "fsGroup": 0}, "nats": {"enabled": True, "podSecurityContext": {"runAsGroup": 0}}},
]
ONCE += [
    {"http": {"enabled": True}, "config": {"shutdown": {"drain_seconds": 120}}},
    {"http": {"enabled": True}, "shards": 2, "preStopSeconds": 30, "terminationGracePeriodSeconds": 60},
    {"http": {"enabled": True}, "preStopSeconds": 0},
]
# Names of releases, and overrides, that Services cannot have as they are, or only in part.
NAMES: list[tuple[str, Values]] = [
    ("1a", {}),
    ("a.b", {}),
    ("a" * 53, {}),
    ("9." + "b" * 51, {}),
    ("a" * 37 + "---" + "b" * 13, {}),
    ("prod", {"fullnameOverride": "0.map"}),
    ("prod", {"nameOverride": "x.y"}),
]
# As in --engine; whether each is one is for the bridge to say.
ENGINES = [
    "http://h:8000",
    "https://h",
    "a=http://h:8000",
    "a=https://h:8000,model=m,block_size=32",
    "a=grpcs://h:50051",
    "grpc://h:50051",
    "grpc://h:50051,format=tensorrt-llm",
    "a=tcp://h:5557",
    "a=tcp://[::1]:5557,replay=tcp://[::1]:5558,ranks=2,block_size=32,tenant=t,topic=kv",
    "a=http://h:8000,format=tensorrt-llm",
    "a=http://h,format=tensorrt-llm",
    "a=nats://h:4222,format=dynamo,topic=namespace.n.component.c.kv-events",
    "a=tcp://h:5557,format=mooncake",
    "a=tcp://h:5557,format=dynamo,discovery=etcd:http://e:2379",
    "a=tcp://h:5557,format=sglang,model=x=y",
    "a",
    "a=h:5557",
    "=tcp",
    "a=https://h:8000,format=tensorrt-llm",
    "a=tls://h:4222,format=dynamo,topic=n",
    "a=ipc:///tmp/x",
    "a=inproc://x",
    "a=tcp://h:5557,colour=red",
    "a=tcp://h:5557,replay",
]
# As in --discover.
SOURCES = [
    "kubernetes:app=vllm",
    "kubernetes:app.kubernetes.io/name=vllm,role in (decode, mixed)@llm:8000",
    "dns:vllm-headless.llm.svc",
    "dns:_http._tcp.vllm.llm.svc.cluster.local.:8000",
    "file:/etc/kvatlas/engines",
    "inferencepool:llama",
    "inferencepool:llm/llama.8b",
    "endpointslices:llm/vllm:8000",
    "dynamo:etcd:http://etcd:2379",
    "dynamo:file:/run/dynamo,nats=nats://nats:4222,component=dynamo.backend",
    "dynamo:etcd:etcd:2379",
    "dynamo:file:/run/dynamo,component=dynamo",
    "inferencepool:a:8000",
    "endpointslices:",
    "endpointslices:a/b/c",
    "kubernetes:",
    "kubernetes:app=vllm@a/b",
    "dns:",
    "dns:a b",
    "etcd:a",
    "vllm",
]


def merged(below: Values, above: Values) -> Values:
    both = {**below, **above}
    return {key: merged(below[key], above[key]) if isinstance(below.get(key), dict) and isinstance(above.get(key), dict) else item for key, item in both.items()}


def choices() -> Iterator[tuple[int, ...]]:
    """Indexes into the dimensions: such that any two choices of two dimensions meet. With --all, every combination."""
    sizes = [len(dimension) for dimension in DIMENSIONS]
    if "--all" in sys.argv:
        yield from itertools.product(*map(range, sizes))
        return
    pairs = itertools.combinations(range(len(sizes)), 2)
    left = {((one, a), (other, b)) for one, other in pairs for a in range(sizes[one]) for b in range(sizes[other])}
    while left:
        # The first pair that has not met, and for each other dimension, the largest first, the choice that meets most.
        chosen = dict(min(left))
        for place in sorted(set(range(len(sizes))) - set(chosen), key=lambda place: -sizes[place]):
            meets = [sum(tuple(sorted([(place, index), other])) in left for other in chosen.items()) for index in range(sizes[place])]
            chosen[place] = meets.index(max(meets))
        choice = tuple(chosen[place] for place in range(len(sizes)))
        left -= set(itertools.combinations(enumerate(choice), 2))
        yield choice


def combinations() -> Iterator[Values]:
    for choice in choices():
        values: Values = {}
        for dimension, index in zip(DIMENSIONS, choice):
            values = merged(values, dimension[index])
        yield values
    yield from ONCE


@functools.cache
def documents(text: str) -> list[dict[str, Any]]:
    """The objects of a rendered template: many values render the same."""
    return [document for document in yaml.load_all(text, LOADER) if document]


def objects(rendered: dict[str, str]) -> list[dict[str, Any]]:
    return [item for name, text in rendered.items() if name.endswith(".yaml") for item in documents(text)]


def check_scraped_namespaces(rules: list[dict[str, Any]]) -> None:
    """Alerts go by the namespace of kvatlas. Prometheus' operator gives each target the label namespace, so Prometheus renames that of a sample."""
    for scraped, kept in [
        ({"namespace": "llm-team", "exported_namespace": "llama"}, {"namespace": "llama"}),
        ({"namespace": "llm-team"}, {"namespace": "llm-team"}),
    ]:
        labels = dict(scraped)
        for rule in rules:
            if rule.get("action", "replace") == "labeldrop":
                labels = {name: value for name, value in labels.items() if not re.fullmatch(rule["regex"], name)}
                continue
            source = ";".join(labels.get(name, "") for name in rule["sourceLabels"])
            if re.fullmatch(rule["regex"], source):
                labels[rule["targetLabel"]] = source
        assert labels == kept, (rules, labels)


def check_form(item: dict[str, Any]) -> None:
    if item["kind"] in ("ServiceMonitor", "PodMonitor"):
        [endpoint] = item["spec"]["endpoints" if item["kind"] == "ServiceMonitor" else "podMetricsEndpoints"]
        assert item["apiVersion"] == "monitoring.coreos.com/v1", item
        assert set(endpoint) == {"port", "path", "interval", "metricRelabelings"}, item
        check_scraped_namespaces(endpoint["metricRelabelings"])
        return
    if item["kind"] == "PrometheusRule":
        # What promtool has checked, word for word: the operator hands it to Prometheus as it is.
        assert item["apiVersion"] == "monitoring.coreos.com/v1" and item["spec"] == ALERTS, item
        return
    for version in KUBERNETES:
        kubernetes_validate.validate(item if version != "1.27" else without_sleep(item), version, strict=True)


def without_sleep(item: dict[str, Any]) -> dict[str, Any]:
    """The object as the chart makes it for versions before 1.30: see check_versions."""
    if "template" not in item.get("spec", {}):
        return item
    text: dict[str, Any] = json.loads(json.dumps(item))
    for container in text["spec"]["template"]["spec"]["containers"]:
        container.pop("lifecycle", None)
    return text


def pods(items: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for item in items:
        if item["kind"] in ("StatefulSet", "Deployment"):
            yield item, item["spec"]["template"]


def own_pods(items: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Those in which kvatlas runs."""
    return ((owner, template) for owner, template in pods(items) if template["metadata"]["labels"]["app.kubernetes.io/name"] != "nats")


def own_policies(items: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Those of kvatlas's pods."""
    return (item for item in items if item["kind"] == "NetworkPolicy" and item["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/name"] != "nats")


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def check_references(items: list[dict[str, Any]]) -> None:
    """What is named is there."""
    names = [(item["kind"], item["metadata"]["name"]) for item in items]
    named = set(names)
    placed = {(*name, item["metadata"].get("namespace")) for name, item in zip(names, items)}
    assert len(placed) == len(items), "two objects have one name"
    labels = [template["metadata"]["labels"] for _, template in pods(items)]
    for item in items:
        spec = item.get("spec", {})
        if item["kind"] == "Service":
            found = [template for _, template in pods(items) if selects(spec["selector"], template["metadata"]["labels"])]
            assert found, item
            ports = {port["name"] for template in found for container in template["spec"]["containers"] for port in container["ports"]}
            # Those of engines that are republished have no names: see check_republish.
            assert {port["targetPort"] for port in spec["ports"] if isinstance(port["targetPort"], str)} <= ports, item
        if item["kind"] == "HorizontalPodAutoscaler":
            target = spec["scaleTargetRef"]
            assert (target["kind"], target["name"]) in named, item
            [owner] = [each for each in items if each["kind"] == target["kind"] and each["metadata"]["name"] == target["name"]]
            assert "replicas" not in owner["spec"], "two say how many there are"
        if item["kind"] == "PodDisruptionBudget":
            assert sum(selects(spec["selector"]["matchLabels"], each) for each in labels) == 1, item
        if item["kind"] == "NetworkPolicy":
            meant = [template for _, template in pods(items) if selects(spec["podSelector"]["matchLabels"], template["metadata"]["labels"])]
            ports = {port["name"] for template in meant for container in template["spec"]["containers"] for port in container["ports"]}
            assert {port["port"] for rule in spec["ingress"] or [] for port in rule["ports"] if "endPort" not in port} <= ports, item
        if item["kind"] == "PodMonitor":
            meant = [template for _, template in own_pods(items) if selects(spec["selector"]["matchLabels"], template["metadata"]["labels"])]
            assert len(meant) == len(list(own_pods(items))), item
            # As the alerts name the job.
            assert {template["metadata"]["labels"][spec["jobLabel"]] for template in meant} == {"kvatlas"}, item
        if item["kind"] == "ServiceMonitor":
            services = [each for each in items if each["kind"] == "Service" and selects(spec["selector"]["matchLabels"], each["metadata"]["labels"])]
            assert services[0]["metadata"]["labels"][spec["jobLabel"]] == "kvatlas", item
            assert len(services) == 1 and spec["endpoints"][0]["port"] in {port["name"] for port in services[0]["spec"]["ports"]}, item
    policies = [item["spec"]["podSelector"]["matchLabels"] for item in items if item["kind"] == "NetworkPolicy"]
    assert not policies or all(sum(selects(policy, each) for policy in policies) == 1 for each in labels), policies
    for owner, template in pods(items):
        spec = template["spec"]
        assert re.fullmatch("[0-9a-f]{64}", template["metadata"]["annotations"]["kvatlas/config"]), owner["metadata"]
        assert selects(owner["spec"]["selector"]["matchLabels"], template["metadata"]["labels"]), owner["metadata"]
        if owner["kind"] == "StatefulSet":
            assert ("Service", owner["spec"]["serviceName"]) in named
        claims = {claim["metadata"]["name"] for claim in owner["spec"].get("volumeClaimTemplates", [])}
        volumes = {volume["name"] for volume in spec.get("volumes", [])} | claims
        for container in spec["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", [])} == volumes, owner["metadata"]
            check_security(container)
        assert spec["securityContext"]["runAsNonRoot"]


def rights(source: str) -> tuple[str, list[tuple[str, str]]]:
    """The namespace in which a source looks, and what it reads there; nothing of those that do not ask the API."""
    kind, _, rest = source.partition(":")
    pods, pools, slices = ("", "pods"), ("inference.networking.k8s.io", "inferencepools"), ("discovery.k8s.io", "endpointslices")
    read = {"kubernetes": [pods], "inferencepool": [pods, pools], "endpointslices": [slices]}.get(kind, [])
    named = rest.partition("@")[2].partition(":")[0] if kind == "kubernetes" else rest.rpartition("/")[0]
    return named or "inference", read


def check_rights(items: list[dict[str, Any]], values: Values) -> None:
    """A bridge that asks the API for engines may read what tells of them, in the namespaces that are named. Nobody else has a token."""
    bridge = values.get("bridge", {})
    wanted: dict[str, set[tuple[str, str]]] = {}
    for namespace, read in map(rights, bridge.get("discover", []) if bridge.get("enabled") else []):
        if read:
            wanted.setdefault(namespace, set()).update(read)
    accounts = {item["metadata"]["name"] for item in items if item["kind"] == "ServiceAccount"}
    for owner, template in pods(items):
        finds = bool(wanted) and owner["metadata"]["name"].endswith("-bridge")
        assert template["spec"]["automountServiceAccountToken"] is finds, owner["metadata"]
        assert not finds or template["spec"]["serviceAccountName"] in accounts
    roles = {item["metadata"]["namespace"]: item for item in items if item["kind"] == "Role"}
    bindings = {item["metadata"]["namespace"]: item for item in items if item["kind"] == "RoleBinding"}
    assert set(roles) == set(bindings) == set(wanted), (set(roles), wanted)
    for namespace, granted in wanted.items():
        rules = roles[namespace]["rules"]
        assert all(rule["verbs"] == ["get", "list", "watch"] for rule in rules)
        assert {(group, resource) for rule in rules for group in rule["apiGroups"] for resource in rule["resources"]} == granted, rules
        assert bindings[namespace]["roleRef"]["name"] == roles[namespace]["metadata"]["name"]
        [subject] = bindings[namespace]["subjects"]
        assert subject["name"] in accounts and subject["namespace"] == "inference"


def check_exposure(items: list[dict[str, Any]], values: Values) -> None:
    """The admin listener is reached by whom it is meant for, and by probes."""
    is_loopback = values.get("admin", {}).get("bind") == "loopback"
    for owner, template in own_pods(items):
        for container in template["spec"]["containers"]:
            listen = next(item["value"] for item in container["env"] if item["name"] == "KVATLAS_ADMIN_LISTEN")
            assert listen.startswith("127.0.0.1:" if is_loopback else "0.0.0.0:") or "listenAddress" in values, owner["metadata"]
            told = [item["valueFrom"]["fieldRef"]["fieldPath"] for item in container["env"] if item["name"] == "KVATLAS_ADMIN_ADVERTISE"]
            assert told == ["status.podIP"] * (not is_loopback), owner["metadata"]
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                assert ("exec" in container[probe]) == is_loopback and ("httpGet" in container[probe]) != is_loopback
    for policy in own_policies(items):
        admin = [rule for rule in policy["spec"].get("ingress") or [] if any(port["port"] == "admin" for port in rule["ports"])]
        own = [{"podSelector": {"matchLabels": policy["spec"]["podSelector"]["matchLabels"]}}]
        others = values.get("networkPolicy", {}).get("metricsFrom", MONITORING)
        assert [rule["from"] for rule in admin] == [own + others] * (not is_loopback), policy
        reached = [rule["to"] for rule in policy["spec"]["egress"] if {"protocol": "TCP", "port": "admin"} in rule.get("ports", [])]
        assert reached == [own] * (not is_loopback), policy
        register = [rule for rule in policy["spec"].get("ingress") or [] if any(port["port"] == "register" for port in rule["ports"])]
        assert bool(register) == (takes_engines(values) and values.get("networkPolicy", {}).get("registerFrom") != []), policy
        assert all(rule["from"] for rule in register), "the bridge is open to all"
    services = [item for item in items if item["kind"] == "Service" and any(port["targetPort"] == "register" for port in item["spec"]["ports"])]
    assert len(services) == int(takes_engines(values)), values


def check_addresses(items: list[dict[str, Any]], values: Values) -> None:
    """All that listens for others does so at the address that is given: 0.0.0.0 has no IPv6."""
    for owner, template in pods(items):
        [container] = template["spec"]["containers"]
        texts = [item.get("value", "") for item in container["env"]] + container.get("args", [])
        texts += [item["data"]["nats.conf"] for item in items if item["kind"] == "ConfigMap" and "nats.conf" in item["data"]]
        found = set(re.findall(r"0\.0\.0\.0(?=:)|\[::\](?=:)", " ".join(texts)))
        assert found <= {values.get("listenAddress", "0.0.0.0")}, (owner["metadata"], found)
        named = {item["name"]: item["value"] for item in container["env"] if item["name"].endswith("_LISTEN")}
        assert set(named) == ALL_LISTEN.get(component(template["metadata"]["labels"]), set(named)) or values != IPV6, named


def check_listeners(items: list[dict[str, Any]], values: Values) -> None:
    """Who answers for all workers has a Service for each listener that is wanted, and is reached by whom it is meant for."""
    whole = "gateway" if values.get("shards") else "daemon"
    for name in ("http", "grpc", "redis", "dynamo"):
        is_on = values.get(name, {}).get("enabled", False)
        services = [item for item in items if item["kind"] == "Service" and any(port["targetPort"] == name for port in item["spec"]["ports"])]
        assert [item["spec"]["selector"]["app.kubernetes.io/component"] for item in services] == [whole] * is_on, services
        for policy in own_policies(items):
            rules = [rule for rule in policy["spec"].get("ingress") or [] if any(port["port"] == name for port in rule["ports"])]
            assert bool(rules) == (is_on and values.get("networkPolicy", {}).get(f"{name}From") != []), policy
            assert all(rule["from"] for rule in rules), f"the listener {name} is open to all"
    check_dynamo(items, values)


def check_dynamo(items: list[dict[str, Any]], values: Values) -> None:
    """Who is asked by Dynamo's routers may answer them, over a connection of its own, and reach etcd; its record has the pod's address."""
    asked = values.get("config", {}).get("dynamo", {})
    told = [asked.get("discovery", ""), *(values.get("bridge", {}).get("discover", []) if values.get("bridge", {}).get("enabled") else [])]
    for policy in own_policies(items):
        everywhere = [rule for rule in policy["spec"]["egress"] if "ports" not in rule]
        assert all(rule["to"] for rule in everywhere), "all may be reached"
        assert len(everywhere) == int("components" in asked and values.get("networkPolicy", {}).get("dynamoFrom") != []), policy
        for port in re.findall(r"etcd:http://\w+:(\d+)", " ".join(told)):
            assert any({"protocol": "TCP", "port": int(port)} in rule.get("ports", []) for rule in policy["spec"]["egress"]), policy
    for _, template in own_pods(items):
        [container] = template["spec"]["containers"]
        advertised = [item["valueFrom"]["fieldRef"]["fieldPath"] for item in container["env"] if item["name"] == "KVATLAS_DYNAMO_ADVERTISE"]
        listens = any(item["name"] == "KVATLAS_DYNAMO_LISTEN" for item in container["env"])
        assert advertised == ["status.podIP"] * listens, container["env"]


def check_notes(rendered: dict[str, str], items: list[dict[str, Any]]) -> None:
    """What is said after an installation names the Service of each listener, with its port, and a bridge that nothing outlives."""
    [notes] = [text for name, text in rendered.items() if name.endswith("kvatlas/templates/NOTES.txt")]
    for item in items:
        if item["kind"] == "Service" and item["metadata"]["labels"]["app.kubernetes.io/name"] != "nats" and "clusterIP" not in item["spec"]:
            port = item["spec"]["ports"][0]
            address = f"{item['metadata']['name']}.inference:{port['port']}"
            wanted = "find the daemons by etcd:" if port["name"] == "dynamo" and "etcd:" in notes else address
            assert wanted in notes, f"{wanted} is not in {notes}"
    commands = [line for line in notes.splitlines() if line.startswith("  kubectl ")]
    assert commands and all(line.startswith("  kubectl --namespace inference ") for line in commands), notes
    bridges = [template["spec"] for _, template in own_pods(items) if template["spec"]["containers"][0]["args"][0] == "bridge"]
    kept = [any("persistentVolumeClaim" in volume for volume in spec.get("volumes", [])) or "--state=nats:" in str(spec["containers"]) for spec in bridges]
    assert ("A rollout of the bridge loses what it knows" in notes) == (kept == [False]), notes


def component(labels: dict[str, str]) -> str:
    return labels["app.kubernetes.io/component"]


def check_strategies(items: list[dict[str, Any]], values: Values) -> None:
    """Workloads of several pods have a budget, unless none is wanted; a bridge without a second one is never there twice."""
    several = {component(template["metadata"]["labels"]) for owner, template in own_pods(items) if owner["spec"].get("replicas") != 1}
    budgets = [item["spec"] for item in items if item["kind"] == "PodDisruptionBudget"]
    wanted = several if values.get("podDisruptionBudget", {}).get("enabled", True) else set()
    assert sorted(component(budget["selector"]["matchLabels"]) for budget in budgets) == sorted(wanted), budgets
    bridge = values.get("bridge", {})
    for strategy in [item["spec"]["strategy"] for item in items if item["metadata"]["name"].endswith("-bridge") and item["kind"] == "Deployment"]:
        own = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}} if bridge.get("replicas", 1) > 1 else {"type": "Recreate"}
        assert strategy == bridge.get("updateStrategy", own), strategy


def check_ends(items: list[dict[str, Any]], values: Values) -> None:
    """Who answers over Services goes on until these send it nothing more; nobody is killed before it has drained."""
    drain = values.get("config", {}).get("shutdown", {}).get("drain_seconds", 10)
    wanted = values.get("preStopSeconds", 5) if any(values.get(name, {}).get("enabled") for name in ("http", "grpc", "redis", "dynamo")) else 0
    whole = "gateway" if values.get("shards") else "daemon"
    for owner, template in own_pods(items):
        [container] = template["spec"]["containers"]
        sleep = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        assert sleep == (wanted if component(template["metadata"]["labels"]) == whole else 0), (owner["metadata"], values)
        grace = template["spec"]["terminationGracePeriodSeconds"]
        assert grace == max(values.get("terminationGracePeriodSeconds", 30), drain + wanted + 10), (grace, values)


def check_versions() -> None:
    """Where Helm is: a Kubernetes that knows no sleep is given none."""
    command = os.environ.get("HELM_BIN") or shutil.which("helm") or str(FETCHED.parent / "kubernetes/helm")
    for version, sleeps in (("1.29.9", False), ("1.30.0-gke.1", True)) if Path(command).exists() else ():
        arguments = ["template", "prod", str(CHART), "--set", "http.enabled=true", "--kube-version", version]
        rendered = subprocess.run([command, *arguments], capture_output=True, text=True)
        assert rendered.returncode == 0 and ("preStop" in rendered.stdout) is sleeps, (version, rendered.stderr)


def check_extras(items: list[dict[str, Any]], values: Values) -> None:
    """What is added to all pods is in all, but for the NATS server's, which has its own; and the indexes have their share of memory."""
    for owner, template in pods(items):
        is_nats = template["metadata"]["labels"]["app.kubernetes.io/name"] == "nats"
        added = {name: item for name, item in (values.get("nats", {}) if is_nats else values).items() if name in EXTRAS or name in PLACES}
        [container] = template["spec"]["containers"]
        assert added.get("podLabels", {}).items() <= template["metadata"]["labels"].items(), owner["metadata"]
        assert added.get("podAnnotations", {}).items() <= template["metadata"]["annotations"].items(), owner["metadata"]
        security = {name: item for name, item in (SECURITY | added.get("podSecurityContext", {})).items() if item is not None}
        assert template["spec"]["securityContext"] == security, owner["metadata"]
        places = {place: template["spec"][place] for place in PLACES if place in template["spec"] and (place != "affinity" or place in added)}
        assert places == {place: added[place] for place in PLACES if place in added}, owner["metadata"]
        assert [item for item in container["env"] if item in EXTRAS["extraEnv"]] == added.get("extraEnv", []), owner["metadata"]
        assert all(item in container["volumeMounts"] for item in added.get("extraVolumeMounts", [])), owner["metadata"]
    for policy in own_policies(items):
        bridge = values.get("bridge", {})
        ranges = [rule for rule in policy["spec"].get("ingress") or [] if any("endPort" in port for port in rule["ports"])]
        assert all(rule["from"] for rule in ranges), policy
        wanted = [bridge["answerPorts"].partition("-")] if bridge.get("answerPorts") else []
        if values.get("networkPolicy", {}).get("republishFrom") != []:
            wanted += [ports.partition("-") for ports in republished(items)]
        assert [rule["ports"] for rule in ranges] == [[{"protocol": "TCP", "port": int(first), "endPort": int(last or first)}] for first, _, last in wanted], ranges
    toml = next(item["data"]["kvatlas.toml"] for item in items if item["kind"] == "ConfigMap" and "kvatlas.toml" in item["data"])
    bound = re.search(r'max_bytes_total = "(.*)"', toml)
    if "resources" not in values and "limits" not in values.get("config", {}):
        assert bound and bound[1] == "2457 MiB", toml
    if values.get("resources", {}).get("limits", {}) is None:
        assert not bound, toml


def check_state(items: list[dict[str, Any]], values: Values) -> None:
    """What the bridge knows outlives its pod where JetStream is there, or a claim; where nothing keeps it, the notes say so."""
    bridge, nats = values.get("bridge", {}), values.get("nats", {})
    given = bridge.get("state", {})
    streams = nats.get("enabled") or (values.get("transport") == "jetstream" and "auth" not in bridge)
    for owner, template in own_pods(items):
        [container] = template["spec"]["containers"]
        if container["args"][0] != "bridge":
            continue
        places = [word.removeprefix("--state=") for word in container["args"] if word.startswith("--state=")]
        kinds = ["emptyDir" if "emptyDir" in volume else "claim" for volume in template["spec"].get("volumes", []) if volume["name"] == "state"]
        bucket = given.get("bucket", f"inference-{owner['metadata']['name']}" if streams and "existingClaim" not in given else "")
        if not given.get("enabled", True):
            assert not places and not kinds, container["args"]
        elif bucket:
            assert places == [f"nats:{bucket}/{owner['metadata']['name'].removesuffix('-bridge')}"] and not kinds, (places, kinds, values)
        else:
            assert places == ["/var/lib/kvatlas/state"] and kinds == ["claim" if "existingClaim" in given else "emptyDir"], (places, kinds, values)


def check_flags(chart: helm.Chart) -> None:
    """The bridge doubts a stranger after as long as daemons remove who is silent, unless it is told otherwise; it has further flags at the end."""
    for more, extra, wanted in [
        ({}, [], []),
        ({"remove_after_ms": 0}, [], []),
        ({"remove_after_ms": 60000}, [], ["--give-up-after=60000ms"]),
        ({"remove_after_ms": 60000}, ["--logging-json", "--give-up-after=30"], ["--logging-json", "--give-up-after=30"]),
        ({"remove_after_ms": 2500}, ["--max-engines=2000", "--forget"], ["--give-up-after=2500ms", "--max-engines=2000", "--forget"]),
    ]:
        bridge = {"enabled": True, "discover": ["dns:a:8000"], "extraArgs": extra}
        items = objects(chart.render({"bridge": bridge, "config": {"namespace_defaults": more}}, name="prod", namespace="inference"))
        [arguments] = [template["spec"]["containers"][0]["args"] for owner, template in own_pods(items) if owner["metadata"]["name"].endswith("-bridge")]
        found = arguments[arguments.index("--discover=dns:a:8000") + 1 :]
        assert found == wanted, found
        assert takes("--discover=dns:a:8000", *found), found


def republished(items: list[dict[str, Any]]) -> list[str]:
    """The ranges of ports at which bridges republish engines."""
    arguments = [word for _, template in own_pods(items) for word in template["spec"]["containers"][0]["args"]]
    return [word.rpartition(":")[2] for word in arguments if word.startswith("--republish=")]


def check_republish(items: list[dict[str, Any]], values: Values) -> None:
    """Where engines are republished, a Service has the ports of as many as are wanted, and they are those that the bridge gives."""
    given = values.get("bridge", {}).get("republish", {})
    services = [item for item in items if item["kind"] == "Service" and item["metadata"]["name"].endswith("-republish")]
    ranges = republished(items)
    assert len(services) == len(ranges) == int(given.get("enabled", False)), values
    for service, ports in zip(services, ranges):
        first, last = map(int, ports.split("-"))
        assert (first, last - first + 1) == (given.get("port", 5600), 2 * given.get("engines", 16)), ports
        listed = service["spec"]["ports"]
        assert [port["port"] for port in listed] == [port["targetPort"] for port in listed] == list(range(first, last + 1)), listed
        assert [port["name"].partition("-")[0] for port in listed] == ["events", "replay"] * (len(listed) // 2), listed
        assert service["spec"]["selector"]["app.kubernetes.io/component"] == "bridge", service
        assert service["spec"]["type"] == given.get("service", {}).get("type", "ClusterIP"), service
        [arguments] = [template["spec"]["containers"][0]["args"] for _, template in own_pods(items) if f"--republish=tcp://{values.get('listenAddress', '0.0.0.0')}:{ports}" in template["spec"]["containers"][0]["args"]]
        assert ("--republish-everything" in arguments) == given.get("everything", False), arguments
        assert f"--republish-max-bytes={given.get('maxBytes', 1 << 27)}" in arguments, arguments


def check_names(with_nats: helm.Chart) -> None:
    """Services have names that Kubernetes takes. Those of StatefulSets leave room for the hash that it adds."""
    for name, values in NAMES:
        for shards in (0, 2):
            more: Values = {"http": {"enabled": True}, "nats": {"enabled": True}, "shards": shards, "redis": {"enabled": True}, "grpc": {"enabled": shards == 0}}
            meant = merged(more | {"bridge": {"enabled": True, "http": {"enabled": True}, "replicas": 2, "state": {"bucket": "kept"}, "republish": {"enabled": True}}}, values)
            items = objects(with_nats.render(meant, name=name, namespace="inference"))
            for item in items:
                check_form(item)
                if item["kind"] in ("Service", "StatefulSet", "Deployment"):
                    assert re.fullmatch("[a-z]([-a-z0-9]{0,50}[a-z0-9])?", item["metadata"]["name"]), f"{name}: {item['metadata']['name']}"
            check_references(items)
            check_nats(items, meant)


def check_checksums(chart: helm.Chart) -> None:
    """The checksum of the bridge follows what is told to it, and nothing else."""

    def checksum(more: Values) -> str:
        bridge: Values = {"bridge": {"enabled": True, "enginesConfigMap": "engines"}}
        items = objects(chart.render(merged(bridge, more), name="prod", namespace="inference"))
        [template] = [template for owner, template in own_pods(items) if owner["metadata"]["name"].endswith("-bridge")]
        return str(template["metadata"]["annotations"]["kvatlas/config"])

    plain = checksum({})
    for same in ({"replicas": 3}, {"podLabels": {"a": "b"}}, {"bridge": {"resources": {"limits": {"memory": "1Gi"}}}}):
        assert checksum(same) == plain, same
    for other in ({"bridge": {"blockSize": 32}}, {"bridge": {"engines": ["http://h:8000"]}}, {"nats": {"url": "nats://other"}}, {"extraEnv": [{"name": "A", "value": "b"}]}):
        assert checksum(other) != plain, other


def check_buckets(chart: helm.Chart) -> None:
    """Shards of each division have buckets of their own: one that another division has claimed is refused by a daemon, for good."""
    seen: set[str] = set()
    for shards in (0, 1, 2, 3):
        items = objects(chart.render({"shards": shards, "snapshots": {"objectStore": "b" * 47}}, name="prod", namespace="inference"))
        entries = [item for _, template in own_pods(items) for item in template["spec"]["containers"][0]["env"]]
        named = [item["value"] for item in entries if item["name"] == "KVATLAS_SNAPSHOTS_OBJECT_STORE"]
        assert len(set(named)) == max(shards, 1) and not seen & set(named), (seen, named)
        seen |= set(named)


def takes_engines(values: Values) -> bool:
    """Whether the bridge is to have engines registered."""
    bridge = values.get("bridge", {})
    return bool(bridge.get("enabled") and bridge.get("http", {}).get("enabled"))


def check_nats(items: list[dict[str, Any]], values: Values) -> None:
    """The server of the chart's own takes its configuration; daemons, gateways and bridge are told of it, may reach it, and are its users."""
    own = values.get("nats", {})
    servers = [item for item in items if item["kind"] == "StatefulSet" and item["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"] == "nats"]
    assert len(servers) == int(own.get("enabled", False)), values
    url = own.get("url", "nats://nats:4222")
    for server in servers:
        [service] = [item for item in items if item["kind"] == "Service" and item["metadata"]["name"] == server["spec"]["serviceName"]]
        url = f"nats://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
        [container] = server["spec"]["template"]["spec"]["containers"]
        check_nats_server(items, container)
    given = values.get("networkPolicy", {}).get("natsPort")
    ports = [int(found) for found in re.findall(r":(\d+)", url)] + [4222] * url.endswith("//c")
    for policy in own_policies(items):
        reached = {port["port"] for rule in policy["spec"]["egress"] for port in rule.get("ports", [])}
        assert {given} if given else set(ports) <= reached, policy
    for _, template in own_pods(items):
        [container] = template["spec"]["containers"]
        assert {"name": "KVATLAS_NATS_URL", "value": url} in container["env"], container["env"]
        if servers:
            assert secrets(container) == secrets(server["spec"]["template"]["spec"]["containers"][0]), container["env"]


def check_roles(items: list[dict[str, Any]], values: Values) -> None:
    """Gateways and bridge show NATS who they are by values of their own, where they have some and the server is not the chart's own."""
    nats = values.get("nats", {})
    for _, template in own_pods(items):
        kind = component(template["metadata"]["labels"])
        own = values.get(kind, {})
        auth = own["auth"] if "auth" in own and not nats.get("enabled") else nats.get("auth", {})
        [container] = template["spec"]["containers"]
        mounted = [volume["secret"]["secretName"] for volume in template["spec"].get("volumes", []) if volume["name"] == "nats"]
        assert {key["name"] for key in secrets(container)} | set(mounted) == ({auth["secret"]} if "secret" in auth else set()), (kind, values)
        prefix = own.get("inboxPrefix", nats.get("inboxPrefix", "_INBOX"))
        assert {"name": "KVATLAS_NATS_INBOX_PREFIX", "value": prefix} in container["env"], container["env"]


def secrets(container: dict[str, Any]) -> list[dict[str, str]]:
    """The keys of secrets from which the variables about NATS come."""
    keys = [item["valueFrom"]["secretKeyRef"] for item in container["env"] if "NATS" in item["name"] and "secretKeyRef" in item.get("valueFrom", {})]
    return sorted(keys, key=lambda key: key["key"])


def check_nats_server(items: list[dict[str, Any]], container: dict[str, Any]) -> None:
    """A real server takes the configuration, and lets in whom the secret names, and nobody else. Users and passwords are as awkward as they may be."""
    [config] = [item["data"]["nats.conf"] for item in items if item["kind"] == "ConfigMap" and "nats.conf" in item["data"]]
    assert 'ping_interval: "2s"' in config and "ping_max: 2" in config, "a machine that vanishes is noticed within seconds"
    assert container["args"] == ["--config=/etc/nats/nats.conf"], "whoever sees processes sees secrets"
    serve_nats(config, json.dumps(container["env"]))


@functools.cache
def serve_nats(config: str, variables: str) -> None:
    """Starts the server with the variables of its container, as Kubernetes fills them in, and connects."""
    said = {"NATS_USER": "1e3", "NATS_PASSWORD": '12" $x #;{ 0 $(NATS_USER)', "NATS_TOKEN": "$2a$11 }\\"}
    secret = {item["name"]: said[item["name"]] for item in json.loads(variables) if "secretKeyRef" in item.get("valueFrom", {})}
    plain = {item["name"]: item["value"] for item in json.loads(variables) if "value" in item}
    environment = secret | {name: re.sub(r"\$\((\w+)\)", lambda found: secret[found[1]], value) for name, value in plain.items()}
    names = {"NATS_USER": "user", "NATS_PASSWORD": "pass", "NATS_TOKEN": "auth_token"}
    right = {names[name]: value for name, value in secret.items()}
    with tempfile.TemporaryDirectory() as folder:
        own = re.sub(r"(0\.0\.0\.0|\[::\]):(4222|8222)", r"\1:-1", config)
        (Path(folder) / "nats.conf").write_text(own.replace("/data", folder))
        arguments = [NATS_SERVER, f"--config={folder}/nats.conf", f"--ports_file_dir={folder}"]
        with (Path(folder) / "log").open("wb") as log:
            server = subprocess.Popen(arguments, env=environment, stdout=log, stderr=log)
        try:
            address = nats_address(server, Path(folder))
            assert nats_says(address, right) == "PONG", (config, environment)
            if right:
                assert "Authorization Violation" in nats_says(address, {name: value + "0" for name, value in right.items()}), config
        finally:
            server.kill()
            server.wait()


def nats_address(server: subprocess.Popen[bytes], folder: Path) -> tuple[str, int]:
    """Where the server listens, which it writes into a file."""
    deadline = time.monotonic() + 30
    while not (found := re.findall(r'"nats": *\[\s*"([^"]+)"', "".join(file.read_text() for file in folder.glob("*.ports")))):
        assert server.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.01)
    [url] = found
    return "127.0.0.1", int(url.rpartition(":")[2])


def nats_says(address: tuple[str, int], who: dict[str, str]) -> str:
    """What a server answers to a client that tells who it is."""
    with socket.create_connection(address, timeout=10) as connection, connection.makefile("rwb") as stream:
        stream.readline()
        stream.write(f"CONNECT {json.dumps({'verbose': False} | who)}\r\nPING\r\n".encode())
        stream.flush()
        return stream.readline().decode().strip()


def check_daemon(items: list[dict[str, Any]], checked: set[str]) -> None:
    """kvatlas takes the configuration of each container. Files of secrets are made up."""
    files = next(item["data"] for item in items if item["kind"] == "ConfigMap" and "kvatlas.toml" in item["data"])
    for _, template in own_pods(items):
        [container] = template["spec"]["containers"]
        if container["args"][0] != "serve":
            continue
        with tempfile.TemporaryDirectory() as directory:
            place = Path(directory)
            config = container["args"][container["args"].index("--config") + 1]
            toml = files[Path(config).name]
            (place / "kvatlas.toml").write_text(toml)
            environment = {"KVATLAS_CONFIG": str(place / "kvatlas.toml")}
            for item in container["env"]:
                value = item.get("value", "made-up")
                if value.startswith("/etc/kvatlas/"):
                    (place / item["name"]).write_text("made up")
                    value = str(place / item["name"])
                environment[item["name"]] = value
            arguments = [word for word in container["args"] if word not in ("--config", config)]
            described = toml + str(container["args"]) + str(container["env"])
            if described in checked:
                continue
            checked.add(described)
            said = subprocess.run([KVATLAS, *arguments, "--check-config"], env=environment, capture_output=True, text=True)
            assert said.returncode == 0, f"{said.stderr}\n{container['env']}\n{toml}"


def start_bridge(arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    """A bridge without NATS, which it goes on trying to reach."""
    command = [KVATLAS, "bridge", *({"--logging-json"} - set(arguments)), *arguments, "--nats-url=nats://127.0.0.1:1"]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def address_in(lines: Iterator[str], message: str) -> str:
    """Where a bridge says that it listens; an error where it ends before."""
    said = []
    for line in lines:
        said.append(line)
        if line.startswith("{") and (told := json.loads(line))["message"] == message:
            return str(told["local_addr"])
    raise AssertionError("".join(said))


def register(address: str, token: str | None) -> int:
    """The status of a registration."""
    body = {"instance_id": "gpu-9", "endpoint": "tcp://127.0.0.1:1", "modelname": "m", "block_size": 16, "dp_rank": 0}
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    request = urllib.request.Request(f"http://{address}/register", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def check_bridge(items: list[dict[str, Any]], values: Values, checked: set[str]) -> None:
    """A bridge as in its container starts, on free ports, and has engines registered by whoever has the token. Secrets are made up."""
    for _, template in own_pods(items):
        [container] = template["spec"]["containers"]
        described = str(container["args"]) + str(container["env"])
        if container["args"][0] != "bridge" or described in checked:
            continue
        checked.add(described)
        mounts = tuple(mount["mountPath"] + "/" for mount in container.get("volumeMounts", []))
        with tempfile.NamedTemporaryFile("w") as secret, tempfile.TemporaryDirectory() as folder:
            secret.write("made-up\n")
            secret.flush()
            environment = {}
            state = [word.removeprefix("--state=") for word in container["args"] if word.startswith("--state=")]
            assert all(place.startswith(("nats:", *mounts)) for place in state), f"{state} is not in {mounts}"
            arguments = [re.sub(r"^--state=/.*", f"--state={folder}", word) for word in container["args"][1:]]
            # Of how to reach NATS there is no more to see than with a daemon.
            # Nor is an address told of a listener that only this machine reaches.
            is_told = re.compile("KVATLAS_NATS_|KVATLAS_ADMIN_ADVERTISE$").match
            for item in (item for item in container["env"] if not is_told(item["name"])):
                value = re.sub(r"^(0\.0\.0\.0|127\.0\.0\.1|\[::\]):\d+$", "127.0.0.1:0", item.get("value", "made-up"))
                if value.startswith("/"):
                    assert value.startswith(mounts), f"{value} is not in {mounts}"
                    value = secret.name
                environment[item["name"]] = value
            bridge = start_bridge(arguments, environment)
            try:
                assert bridge.stderr
                address_in(bridge.stderr, "admin listener started")
                if takes_engines(values):
                    address = address_in(bridge.stderr, "query listener started")
                    assert register(address, "made-up") == 200
                    assert register(address, None) == (401 if values["bridge"]["http"].get("tokenSecret") else 200)
            finally:
                bridge.kill()
                bridge.communicate()


def takes(*flags: str) -> bool:
    """Whether the bridge starts with these flags."""
    bridge = start_bridge([*flags, "--model=m", "--admin-listen=127.0.0.1:0"], {})
    try:
        assert bridge.stderr
        address_in(bridge.stderr, "admin listener started")
        return True
    except AssertionError:
        assert bridge.wait() == 64, flags
        return False
    finally:
        bridge.kill()
        bridge.communicate()


def check_security(container: dict[str, Any]) -> None:
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"] and security["capabilities"]["drop"] == ["ALL"], container


def check_sidecar() -> None:
    """The sidecar of the page is one in a pod of an engine, whoever makes that; the bridge takes its arguments, with the pod's name and address."""
    [snippet] = re.findall(r"^```yaml\n(initContainers:\n.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    labels = {"app": "vllm"}
    spec = yaml.safe_load(snippet) | {"containers": [{"name": "vllm", "image": "vllm", "ports": [{"name": "http", "containerPort": 8000}]}]}
    template = {"metadata": {"labels": labels}, "spec": spec}
    for kind, more in {"Deployment": {}, "StatefulSet": {"serviceName": "vllm"}}.items():
        whole = {"selector": {"matchLabels": labels}, "template": template} | more
        for version in WITH_SIDECARS:
            kubernetes_validate.validate({"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": "vllm"}, "spec": whole}, version, strict=True)
    [sidecar] = spec["initContainers"]
    assert sidecar["restartPolicy"] == "Always" and sidecar["args"][0] == "bridge", sidecar
    assert sidecar["securityContext"]["runAsNonRoot"], sidecar
    check_security(sidecar)
    pod = {"metadata.name": "vllm-0", "status.podIP": "10.0.0.9"}
    told = {item["name"]: pod[item["valueFrom"]["fieldRef"]["fieldPath"]] for item in sidecar["env"] if "valueFrom" in item}
    arguments = [re.sub(r"\$\((\w+)\)", lambda found: told[found[1]], word) for word in sidecar["args"]]
    assert "--engine=vllm-0=http://127.0.0.1:8000,address=10.0.0.9:8000" in arguments, arguments
    assert takes(*arguments[1:]), arguments
    settings = {item["name"]: item["value"] for item in sidecar["env"] if item["name"].startswith("KVATLAS_")}
    assert set(settings) == {"KVATLAS_NATS_URL"} and settings["KVATLAS_NATS_URL"].startswith("nats://"), settings


def lets_through(chart: helm.Chart, values: Values) -> bool:
    try:
        chart.validate_schema(values)
    except helm.HelmError:
        return False
    return True


def renders(chart: helm.Chart, values: Values) -> bool:
    try:
        chart.render(values, name="prod", namespace="inference")
    except helm.HelmError:
        return False
    return True


def check_engines(chart: helm.Chart) -> None:
    """The schema takes the engines, formats and sources that the bridge takes."""
    given = [("engines", "--engine", engine) for engine in ENGINES] + [("discover", "--discover", source) for source in SOURCES]
    for value, flag, text in given:
        taken = lets_through(chart, {"bridge": {"enabled": True, value: [text], "model": "m"}})
        assert taken == takes(f"{flag}={text}"), f"the chart's schema {'takes' if taken else 'refuses'} {text!r}, and the bridge does not"
    refused = subprocess.run([KVATLAS, "bridge", "--format=none"], capture_output=True, text=True).stderr
    formats = re.findall(r"[\w-]+", refused.partition("known are ")[2].partition("\n")[0])
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert formats and sorted(schema["properties"]["bridge"]["properties"]["format"]["enum"]) == sorted(formats), formats


def check_settings(chart: helm.Chart, variables: set[str]) -> int:
    """Under `config`, the schema takes the settings of deploy/settings.md, and refuses those of which the chart sets the variables."""
    settings = re.findall(r"^\| `(\w+)\.(\w+)`<br>.*<br>`(KVATLAS_\w+)` \| (\S+)", SETTINGS.read_text(), re.MULTILINE)
    sections = set(re.findall(r"^## (\w+)$", SETTINGS.read_text(), re.MULTILINE))
    assert sections == {section for section, _, _, _ in settings}, "deploy/settings.md has another form than this reads"
    for section, name, variable, default in settings:
        plain = default.strip("`")
        value: Any = {"true": True, "false": False}.get(plain, int(plain) if plain.isdigit() else "text")
        taken = lets_through(chart, {"config": {section: {name: value}}})
        assert taken != (variable in variables), f"config.{section}.{name}: the schema {'takes' if taken else 'refuses'} it, while the chart sets {sorted(variables)}"
    return len(settings)


def main() -> None:
    if "--print-values" in sys.argv:
        json.dump(list(combinations()), sys.stdout)
        return
    findings = [message for message in helm.lint(str(CHART))["messages"] if message.get("severity") not in ("INFO", 1, "info")]
    assert not findings, findings
    checked: set[str] = set()
    bridges: set[str] = set()
    seen: set[str] = set()
    # What only a flag sets.
    variables = {"KVATLAS_GATEWAY_ENABLED"}
    number = 0
    # Rendered once without its own NATS server, a chart has none any more.
    with helm.Chart.load(str(CHART)) as chart, helm.Chart.load(str(CHART)) as with_nats:
        for values in combinations():
            number += 1
            chart.validate_schema(values)
            meant = with_nats if values.get("nats", {}).get("enabled") else chart
            rendered = meant.render(values, name="prod", namespace="inference")
            items = objects(rendered)
            for item in items:
                text = json.dumps(item)
                if text not in seen:
                    seen.add(text)
                    check_form(item)
            check_references(items)
            check_exposure(items, values)
            check_addresses(items, values)
            check_listeners(items, values)
            check_notes(rendered, items)
            check_extras(items, values)
            check_strategies(items, values)
            check_ends(items, values)
            check_republish(items, values)
            check_state(items, values)
            check_rights(items, values)
            check_nats(items, values)
            check_roles(items, values)
            check_daemon(items, checked)
            check_bridge(items, values, bridges)
            variables |= {item["name"] for _, template in own_pods(items) for container in template["spec"]["containers"] for item in container["env"]}
        check_names(with_nats)
        check_checksums(chart)
        check_buckets(chart)
        check_versions()
        check_flags(chart)
        for what, values in REFUSED:
            assert not lets_through(chart, values), f"the chart's schema lets through {what}: {values}"
        for what, values in UNRENDERED:
            assert not renders(chart, values), f"the chart renders {what}: {values}"
        check_sidecar()
        check_engines(chart)
        settings = check_settings(chart, variables)
    print(
        f"{number} combinations of values rendered; {len(seen)} different objects, {len(checked)} configurations and {len(bridges)} bridges are "
        f"sound; {len(REFUSED) + len(UNRENDERED)} mistakes refused; {len(ENGINES)} engines, {len(SOURCES)} sources and {settings} settings are taken where the program takes them"
    )


if __name__ == "__main__":
    main()
