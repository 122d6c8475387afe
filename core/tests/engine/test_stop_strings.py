from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from inferplane.engine.stop_strings import StopStrings

# few letters, so that stops overlap, repeat and contain each other
TEXT = st.text("ab", max_size=6)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def first_stop(pieces: list[str], stops: list[str], num_unsearched: int = 0) -> tuple[int, str, int] | None:
    """Brute force: after each piece look at all of the text so far. (start, stop, pieces read)"""
    floor = len("".join(pieces[:num_unsearched]))
    for num_read in range(num_unsearched + 1, len(pieces) + 1):
        text = "".join(pieces[:num_read])
        ends = [
            (start, index)
            for index, stop in enumerate(stops)
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > floor
        ]
        if ends:
            start, index = min(ends)
            return start, stops[index], num_read
    return None


@given(
    pieces=st.lists(TEXT, max_size=8), stops=STOPS, include=st.booleans(), num_unsearched=st.integers(0, 3)
)
@example(pieces=["aba", "b"], stops=["abab"], include=False, num_unsearched=0)
def test_text_ends_at_the_first_stop(
    pieces: list[str], stops: list[str], include: bool, num_unsearched: int
) -> None:
    watch = StopStrings(stops, include_in_output=include)
    shown = ""
    expected = first_stop(pieces, stops, num_unsearched)
    for index, piece in enumerate(pieces):
        shown += watch.push(piece, is_searched=index >= num_unsearched)
        text = "".join(pieces[: index + 1])
        if watch.found is not None:
            assert expected is not None
            start, stop, num_read = expected
            assert (watch.found, index + 1) == (stop, num_read)
            assert shown == (text[: start + len(stop)] if include else text[:start])
            return
        assert text.startswith(shown)
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops), (
            "only the start of a stop is held back"
        )
        longer = [
            text[i:]
            for i in range(len(shown))
            if any(s.startswith(text[i:]) and s != text[i:] for s in stops)
        ]
        assert not longer, "all that may become a stop is held back"
    assert expected is None
    assert shown + watch.finish() == "".join(pieces)


def test_nothing_of_a_stop_is_shown_before_it_is_complete() -> None:
    watch = StopStrings(["</answer>"])
    assert [watch.push(piece) for piece in ("42 <", "/ans", "wer", "> tail")] == ["42 ", "", "", ""]
    assert watch.found == "</answer>"


def test_without_stops_text_passes_through() -> None:
    watch = StopStrings([])
    assert watch.push("anything") == "anything"
    assert watch.finish() == ""
