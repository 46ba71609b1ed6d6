"""The Grafana dashboard asks for counters that there are."""

import json
import re
from pathlib import Path

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana.json"


def test_the_dashboard_asks_for_our_counters_by_their_names():
    source = (Path(__file__).resolve().parents[2] / "src/reprieve/vllm_plugin/numbers.py").read_text()
    asked = set(re.findall(r"vllm:reprieve_\w+", DASHBOARD.read_text()))
    there = {f"{name}_total" for name in re.findall(r'"(vllm:reprieve_\w+)"', source)}
    assert asked == there
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
