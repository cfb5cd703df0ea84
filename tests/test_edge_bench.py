"""edge_bench.py and standin.py: a short run of the command. Its goals are for a machine that does nothing else."""

import json
import os

from specdec.cli import main
from specdec.edge_bench import _quantile_ms


def test_a_short_run_measures_each_thing(tmp_path, capsys):
    out = tmp_path / "edge.json"
    argv = ["--requests", "10", "--streams", "8", "--many", "16", "--seconds", "1.5", "--rounds", "1"]
    assert main(["bench", "edge", *argv, "--json", "--out", str(out)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert json.loads(out.read_text()) == result
    assert result["command"].startswith("specdec bench edge --requests 10 ")
    assert {"specdec", "aiohttp"} <= result["versions"].keys()
    assert result["machine"]["cores"] == os.cpu_count()
    assert "commit" in result
    assert result["failed"] == 0
    assert 0 < result["added_ttft_ms"] < 100
    assert 0.5 < result["throughput"] < 1.5
    assert 80 < result["events_s"]["direct"] < 200  # 8 streams of 20 events a second
    assert 0 < result["lag_p99_ms"] < 1000


def test_the_quantile_is_the_end_of_its_bucket():
    lags = [(0.001, 50.0), (0.01, 98.0), (0.1, 99.0), (float("inf"), 100.0)]
    assert [_quantile_ms(lags, share) for share in (0.5, 0.9, 0.99)] == [1.0, 10.0, 100.0]
