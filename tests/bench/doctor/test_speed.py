import pytest

from einlinear.bench.doctor import speed
from kit.doctor import check, subject


def clock(monkeypatch, dense, structured):
    def times(actions, repeats, on_progress=None):
        for action in actions.values():
            action()
        return dict(zip(actions, ([1e-3 * t for t in dense], structured), strict=True))

    structured = [1e-3 * t for t in structured]
    monkeypatch.setattr(speed, "interleaved", times)
    monkeypatch.setattr(speed, "rounds_for", lambda actions, on_progress: len(dense))


@pytest.mark.parametrize("name", ["speed", "speed-training"])
def test_a_ratio_with_its_interval(monkeypatch, name):
    clock(monkeypatch, [6.0, 6.6, 6.0, 5.4, 6.0], [3.0] * 5)
    found = check(name, "ready")
    assert found.note == "6.00 ms -> 3.00 ms, 2.00 x the speed (1.88 to 2.12 x)"
    assert (found.status, found.numbers["rounds"]) == ("works", 5)
    assert found.numbers["speed"] == pytest.approx(2)


@pytest.mark.parametrize(
    ("dense", "note"),
    [
        ([3.03] * 5, "about as fast (1.01 to 1.01 x)"),
        ([2.1, 2.2, 2.5, 3.1, 3.3], "no difference beyond the noise (0.713 to 1.07 x)"),
        ([1.0, 3.0, 3.0, 3.0, 9.0], "about as fast (0.600 to 2.20 x); the machine is busy, "),
        ([1.5] * 5, "0.500 x the speed (0.500 to 0.500 x); einlinear recommend --model kit.doct"),
    ],
)
def test_words_for_a_ratio(monkeypatch, dense, note):
    clock(monkeypatch, dense, [3.0] * 5)
    assert note in check("speed", "ready").note


def test_models_take_turns():
    shown = []
    found = speed.check_speed(
        subject("ready", "numbers"), has_backward=True, on_progress=shown.append
    )
    assert shown[:3] == [
        "warming up",
        f"round 1 of {found.numbers['rounds']}, dense",
        f"round 1 of {found.numbers['rounds']}, structured",
    ]
    assert 9 <= found.numbers["rounds"] <= 101
    assert found.numbers["low"] <= found.numbers["speed"] <= found.numbers["high"]
