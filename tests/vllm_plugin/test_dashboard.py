"""The Grafana dashboard queries counters that exist."""

import json
import re
from pathlib import Path

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana.json"


def test_the_dashboard_queries_exactly_our_counters():
    source = (Path(__file__).resolve().parents[2] / "src/reprieve/vllm_plugin/metrics.py").read_text()
    asked = set(re.findall(r"vllm:reprieve_\w+", DASHBOARD.read_text()))
    there = {f"{name}_total" for name in re.findall(r'"(vllm:reprieve_\w+)"', source)}
    assert asked == there
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
