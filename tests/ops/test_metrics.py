from __future__ import annotations

import pytest

from common.metrics import Metrics
from decoded.metrics import DecodeMetrics
from prefilld.metrics import PrefillMetrics


def test_process_and_build_metrics_are_there() -> None:
    text = Metrics("decoded", "1.2").render().decode()
    assert 'prfaas_build_info{daemon="decoded",version="1.2"} 1.0' in text
    for name in ("process_resident_memory_bytes", "process_open_fds", "process_cpu_seconds_total", "python_info"):
        assert f"\n{name}" in text


def test_help_says_unit_and_sample() -> None:
    metrics = Metrics("decoded", "1")
    sent = metrics.counter(
        "prfaas_test_bytes_total", "State bytes sent", unit="bytes", sample="one piece", labels=["peer"]
    )
    sent.labels("a").inc(3)
    metrics.histogram("prfaas_test_seconds", "Waiting", sample="one request").observe(0.3)
    text = metrics.render().decode()
    assert "# HELP prfaas_test_bytes_total State bytes sent. Unit: bytes. One sample: one piece." in text
    assert 'prfaas_test_bytes_total{peer="a"} 3.0' in text
    assert 'prfaas_test_seconds_bucket{le="0.5"} 1.0' in text
    assert "_created" not in text
    assert "# HELP prfaas_build_info Always 1; the labels say what runs.\n" in text


@pytest.mark.parametrize("name", ["requests_total", "prfaas_Requests_total", "prfaas-x_total", "prfaas_x"])
def test_counter_names_outside_the_conventions(name: str) -> None:
    with pytest.raises(ValueError, match=r"must be lower case|does not end in _total"):
        Metrics("d", "1").counter(name, "x")


def test_histograms_end_in_their_unit() -> None:
    with pytest.raises(ValueError, match="does not end in its unit _seconds"):
        Metrics("d", "1").histogram("prfaas_wait", "x", sample="one")


@pytest.mark.parametrize("own", [DecodeMetrics, PrefillMetrics])
def test_the_daemons_metrics_keep_the_conventions(own: type) -> None:
    metrics = Metrics("d", "1")
    own(metrics.registry)
    assert metrics.check() == []
    assert metrics.render()


def test_the_model_and_what_it_is_computed_with_are_labels() -> None:
    metrics = Metrics("decoded", "1")
    metrics.tell_model("tiny", {"dtype": "float32", "kv_dtype": "bfloat16", "weights": "int8", "threads": "2"})
    wanted = 'prfaas_model_info{dtype="float32",kv_dtype="bfloat16",model="tiny",weights="int8"} 1.0'
    assert wanted in metrics.render().decode()


@pytest.mark.parametrize(
    ("own", "lines"),
    [
        (
            DecodeMetrics,
            [
                'prfaas_shed_total{gate="queued_tokens"} 0.0',
                'prfaas_fallback_total{reason="attempts_spent"} 0.0',
                'prfaas_routes_total{reason="above_threshold",route="remote"} 0.0',
                'prfaas_requests_total{outcome="error",route="remote"} 0.0',
                'prfaas_requests_total{outcome="invalid",route="none"} 0.0',
                "prfaas_preemptions_total 0.0",
                "prfaas_mixed_prefill_tokens_total 0.0",
                "prfaas_mixed_step_seconds_total 0.0",
                'prfaas_request_seconds_count{route="local"} 0.0',
            ],
        ),
        (PrefillMetrics, ['prfaas_prefills_total{outcome="lost"} 0.0', 'prfaas_refused_total{gate="deadline"} 0.0']),
    ],
)
def test_the_first_event_is_seen_by_rate(own: type, lines: list[str]) -> None:
    """Known label values are there from the start, at 0."""
    metrics = Metrics("d", "1")
    own(metrics.registry)
    text = metrics.render().decode().splitlines()
    assert set(lines) <= set(text)
