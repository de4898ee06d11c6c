"""The chart on a real API: installed by Helm, upgraded, and every variant of it applied by kubectl."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

from cluster import NAMESPACE, Cluster
from processes import REPOSITORY
from report import Report, demand

CHART = REPOSITORY / "deploy/helm/kvatlas"
RELEASE = "kvatlas"
# What the Prometheus operator brings: the forms are its own.
OPERATOR = {"ServiceMonitor": "servicemonitors", "PodMonitor": "podmonitors", "PrometheusRule": "prometheusrules"}


def values_of_page() -> str:
    """The values that deploy/kubernetes.md takes a new user through."""
    page = (REPOSITORY / "deploy/kubernetes.md").read_text()
    found = re.search(r"```yaml\n(# values\.yaml\n.*?)```", page, re.DOTALL)
    assert found, "deploy/kubernetes.md has no values.yaml"
    return found[1]


class Chart:
    """The chart, and one release of it in the namespace of the pods."""

    def __init__(self, report: Report, cluster: Cluster, binaries: Path, folder: Path) -> None:
        self._report, self._cluster, self._binaries, self._folder = report, cluster, binaries, folder
        self._values = folder / "values.yaml"
        self._values.write_text(values_of_page())
        self._version = str(cluster.ask("GET", "/version")["gitVersion"])
        self._environment = {**os.environ, "KUBECONFIG": str(cluster.administrator), "HOME": str(folder)}

    def _run(self, command: str, *arguments: str, text: str | None = None) -> str:
        done = subprocess.run(
            [str(self._binaries / command), *arguments], input=text, env=self._environment, capture_output=True, text=True, check=False
        )
        demand(done.returncode == 0, f"{command} {' '.join(arguments)}: {done.stderr.strip()[-1500:]}")
        return done.stdout

    def _helm(self, action: str, *arguments: str) -> str:
        return self._run("helm", action, RELEASE, str(CHART), "--namespace", NAMESPACE, "--values", str(self._values), *arguments)

    def _of_release(self, kind: str) -> list[str]:
        listed = self._run(
            "kubectl", "get", kind, "--namespace", NAMESPACE, "--selector", f"app.kubernetes.io/instance={RELEASE}", "--output", "json"
        )
        return sorted(item["metadata"]["name"] for item in json.loads(listed)["items"])

    def install(self) -> None:
        """The values of the page, as a new user installs them."""
        with self._report.check("helm install, the values of deploy/kubernetes.md") as notes:
            self._helm("install", "--dry-run=server")
            demand(not self._of_release("statefulset"), "a dry run has made something")
            self._helm("install")
            made = {kind: self._of_release(kind) for kind in ("statefulset", "deployment", "service", "role", "rolebinding", "networkpolicy")}
            notes.append(", ".join(f"{kind} {' '.join(names)}" for kind, names in made.items()))
            demand(made["role"] == [f"{RELEASE}-bridge"], made)

    def upgrade(self) -> None:
        """To two shards and back; and what was deleted by hand comes back."""
        expected = {"0": ["kvatlas"], "1": ["kvatlas-shard-0"], "2": ["kvatlas-shard-0", "kvatlas-shard-1"]}
        for before, after in (("0", "1"), ("1", "2"), ("2", "1"), ("1", "0")):
            with self._report.check(f"helm upgrade, from {before} shards to {after}") as notes:
                arguments = ("--set", f"shards={after}")
                self._helm("upgrade", "--dry-run=server", *arguments)
                self._helm("upgrade", *arguments)
                made = self._of_release("statefulset")
                demand(made == expected[after], made)
                gateways = [name for name in self._of_release("deployment") if name.endswith("-gateway")]
                demand(bool(gateways) == (after != "0"), gateways)
                notes.append(" ".join(made + gateways))
        with self._report.check("helm upgrade, a RoleBinding that was deleted comes back") as notes:
            self._run("kubectl", "delete", "rolebinding", f"{RELEASE}-bridge", "--namespace", NAMESPACE)
            self._helm("upgrade")
            notes.append(" ".join(self._of_release("rolebinding")))
        with self._report.check("helm uninstall") as notes:
            self._run("helm", "uninstall", RELEASE, "--namespace", NAMESPACE)
            left = {kind: self._of_release(kind) for kind in ("statefulset", "deployment", "service", "role", "serviceaccount")}
            demand(not any(left.values()), left)
            notes.append("nothing is left")

    def within_another(self) -> None:
        """As a dependency of a chart that brings other things, too, as deploy/kubernetes.md says."""
        with self._report.check("helm install, as a dependency of another chart") as notes:
            outer = self._folder / "outer"
            outer.mkdir()
            dependency = {"name": "kvatlas", "version": "0.1.0", "repository": f"file://{CHART}"}
            chart = {"apiVersion": "v2", "name": "outer", "version": "0.1.0", "dependencies": [dependency]}
            (outer / "Chart.yaml").write_text(json.dumps(chart))
            indented = "\n".join("  " + line for line in self._values.read_text().splitlines())
            (outer / "values.yaml").write_text(f"kvatlas:\n{indented}\n")
            self._run("helm", "dependency", "build", str(outer))
            self._cluster.make_namespace("outer")
            self._run("helm", "install", "site", str(outer), "--namespace", "outer")
            listed = self._run("kubectl", "get", "statefulset,deployment", "--namespace", "outer", "--output", "name")
            notes.append(listed.replace("\n", " ").strip())
            demand("statefulset.apps/site-kvatlas" in listed, listed)

    def apply_all(self, short: bool) -> None:
        """Every variant of the chart that deploy/test-helm.py renders, rendered by Helm and applied on the server's side."""
        variants: list[dict[str, Any]] = json.loads(Path(os.environ["KVATLAS_CHART_VALUES"]).read_text())
        self._make_operator_kinds()
        self._cluster.make_namespace("other")
        chosen = variants[:: 10 if short else 1]
        with self._report.check(f"kubectl apply --server-side, {len(chosen)} of {len(variants)} variants of the chart") as notes:
            kinds: set[str] = set()
            began = time.monotonic()
            for number, values in enumerate(chosen):
                kinds |= self._apply(f"variant-{number}", values)
            notes.append(f"{(time.monotonic() - began) / len(chosen):.2f} s each; {' '.join(sorted(kinds))}")

    def _apply(self, namespace: str, values: dict[str, Any]) -> set[str]:
        self._cluster.make_namespace(namespace)
        file = self._folder / "variant.json"
        file.write_text(json.dumps(values))
        of = ("--namespace", namespace, "--values", str(file), "--kube-version", self._version)
        rendered = self._run("helm", "template", "prod", str(CHART), *of)
        # Not by --namespace: a Role may be in the namespace of pods elsewhere.
        config = self._folder / "kubeconfig-of-variant"
        config.write_text(self._cluster.administrator.read_text().replace("namespace: default", f"namespace: {namespace}"))
        arguments = ("apply", "--kubeconfig", str(config), "--server-side", "--filename", "-", "--output", "name")
        try:
            applied = self._run("kubectl", *arguments, text=rendered)
        except Exception as error:
            raise type(error)(f"{error}\nvalues: {json.dumps(values)}") from None
        return {line.partition(".")[0].partition("/")[0] for line in applied.splitlines()}

    def _make_operator_kinds(self) -> None:
        for kind, plural in OPERATOR.items():
            schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
            definition = {
                "apiVersion": "apiextensions.k8s.io/v1",
                "kind": "CustomResourceDefinition",
                "metadata": {"name": f"{plural}.monitoring.coreos.com"},
                "spec": {
                    "group": "monitoring.coreos.com",
                    "scope": "Namespaced",
                    "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
                    "versions": [{"name": "v1", "served": True, "storage": True, "schema": schema}],
                },
            }
            self._run("kubectl", "apply", "--filename", "-", text=json.dumps(definition))
            self._run("kubectl", "wait", "--for=condition=Established", f"crd/{plural}.monitoring.coreos.com", "--timeout=60s")
