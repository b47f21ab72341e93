"""The metrics of all models in one text."""

from __future__ import annotations

from router.front.metrics import FrontMetrics, merged
from router.metrics import Metrics


def test_each_series_gets_its_model_and_each_family_one_head() -> None:
    own = FrontMetrics()
    for name in ("a", 'b"c'):
        own.add_values("model", [name])
    own.count_starts("a", 2, 1, 3.0)
    own.set_states(["loaded", "failed", "loaded"])
    own.set_waiting("a", 4)
    models = Metrics()
    models.count("tgi_request_refused", reason="unauthorized")
    text = merged(own.render(), {"a": models.render(), 'b"c': models.render()}).decode()
    lines = text.splitlines()
    for line in (
        'tgi_models{state="loaded"} 2',
        'tgi_model_starts{model="a",outcome="loaded"} 2',
        'tgi_model_starts{model="a",outcome="failed"} 1',
        'tgi_model_start_duration_count{model="a"} 1',
        'tgi_model_requests_waiting{model="a"} 4',
        'tgi_queue_size{model="a"} 0',
        'tgi_queue_size{model="b\\"c"} 0',
        'tgi_request_refused{reason="unauthorized"} 0',
        'tgi_request_refused{model="a",reason="unauthorized"} 1',
        'tgi_key_requests{model="a",key="other"} 0',
    ):
        assert line in lines
    assert 'tgi_key_requests{key="other"} 0' not in lines  # counted by the models' routers
    heads = [line for line in lines if line.startswith("# HELP ")]
    assert len(heads) == len(set(heads))
    families = [line.split()[2] for line in heads]
    for line in lines:  # in one block each
        if line and not line.startswith("#"):
            assert line.startswith(tuple(families))
