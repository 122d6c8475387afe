"""Our own counts, against those of the client library."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from inferplane_server.tallies import Durations, Tally

BOUNDS_S = (0.01, 0.5, 1.0)


def lines_of(registry: CollectorRegistry) -> list[str]:
    """Without the moments of creation, which only the library's own metrics have."""
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


@given(
    st.lists(
        st.tuples(st.one_of(st.sampled_from([0.0, *BOUNDS_S]), st.floats(0, 3)), st.integers(0, 3)),
        max_size=8,
    )
)
def test_they_render_as_the_librarys_metrics_do(observed):
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("wait_seconds", "Waits.", buckets=BOUNDS_S, registry=theirs)
    counter = Counter("waits", "Number.", registry=theirs)
    durations, tally = Durations("wait_seconds", "Waits.", BOUNDS_S), Tally("waits", "Number.")
    ours.register(durations)
    ours.register(tally)
    for seconds, count in observed:
        durations.observe(seconds, count)
        tally.add(count)
        for _ in range(count):
            histogram.observe(seconds)
        counter.inc(count)
    expected, rendered = lines_of(theirs), lines_of(ours)
    is_sum = "wait_seconds_sum"
    assert [x for x in rendered if is_sum not in x] == [x for x in expected if is_sum not in x]
    sums = [float(x.split()[1]) for lines in (expected, rendered) for x in lines if x.startswith(is_sum)]
    assert abs(sums[0] - sums[1]) < 1e-9
