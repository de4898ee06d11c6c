"""Runs kvatlas with a real Kubernetes API: a bridge that finds pods, and the chart.

    python3 tests/kubernetes FOLDER [--short] [--only pods | chart] [--keep FOLDER]

FOLDER has kube-apiserver, etcd, kubectl and helm. Wants KVATLAS_ENGINES (see ../engines/fetch.py), KVATLAS_CHART_VALUES (what
`deploy/test-helm.py --print-values` prints), KVATLAS_BIN, NATS_SERVER_BIN and KVATLAS_SHARED where they are not where
deploy/scenario-kubernetes.sh has them. Prints a line a check, with what was measured. Ends with 1 where one has failed.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engines"))

# The modules behind this are those of tests/engines, and those that import them.
from chart import RELEASE, Chart  # noqa: E402
from cluster import NAMESPACE, Cluster  # noqa: E402
from pods import Pods  # noqa: E402
from pools import Pools  # noqa: E402
from report import Report  # noqa: E402
from site_of_pods import Site  # noqa: E402


def play(binaries: Path, folder: Path, short: bool, only: str) -> Report:
    """All checks that are asked for."""
    report = Report()
    cluster = Cluster(binaries, folder / "cluster")
    try:
        cluster.make_namespace(NAMESPACE)
        chart = Chart(report, cluster, binaries, folder)
        # The bridge of the pods has the account and the rights that the chart makes.
        chart.install()
        if only in ("", "pods"):
            site = Site(cluster, folder)
            try:
                site.start()
                Pools(report, cluster, site, folder, f"{RELEASE}-bridge").play()
                Pods(report, cluster, site, folder, f"{RELEASE}-bridge", 8 if short else 60).play()
            finally:
                site.stop()
        if only in ("", "chart"):
            chart.upgrade()
            chart.within_another()
            chart.apply_all(short)
    finally:
        cluster.stop()
    return report


def main() -> int:
    """Plays the checks that are asked for."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("binaries", type=Path)
    arguments.add_argument("--short", action="store_true", help="the API is away for 8 s instead of a minute, and every tenth chart is applied")
    arguments.add_argument("--only", choices=("pods", "chart"), default="")
    arguments.add_argument("--keep", help="a folder that keeps the logs")
    given = arguments.parse_args()
    # What was started ends, too, when this is told to.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(given.keep or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        report = play(given.binaries.resolve(), folder, given.short, given.only)
    print(f"{report.failed} of {report.checked} checks failed" if report.failed else f"all {report.checked} checks passed")
    return min(report.failed, 1)


sys.exit(main())
