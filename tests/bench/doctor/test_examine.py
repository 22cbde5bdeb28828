import torch

from einlinear.bench.doctor.examine import (
    CHECKS,
    Check,
    CheckResult,
    checks_for,
    conclusion,
    diagnose,
    examine,
    results_table,
)
from einlinear.bench.doctor.reasons import CheckSkippedError, Note, plain_reason
from einlinear.errors import EinlinearError
from kit.doctor import subject


def works(subject):
    return Note("fine", {"one": 1})


def breaks(subject, **_):
    try:
        raise KeyError("deep")
    except KeyError as error:
        raise RuntimeError("first line\nsecond line") from error


def skips(subject):
    raise CheckSkippedError("pip install it")


def test_a_failure_does_not_stop_the_others():
    checks = [
        Check("forward", works),
        Check("compile", breaks, has_plain=True, hint="; slow"),
        Check("onnx", skips),
        Check("save", works),
    ]
    shown = []
    found = diagnose(checks, subject("ready"), lambda case: shown.append(case))
    assert [r.status for r in found] == ["works", "failed", "skipped", "works"]
    assert found[1].note == "KeyError: 'deep'. The model fails before conversion, too"
    assert found[0].numbers == {"one": 1}
    assert shown[1] == "check 2 of 4: compile; slow"
    assert conclusion(found) == "1 of 4 checks failed: compile. Skipped: onnx."


def test_without_a_conversion_there_is_nothing_to_check():
    found = diagnose(CHECKS, subject("normed"))
    assert (found[0].name, found[0].status) == ("convert", "failed")
    assert {r.status for r in found[1:]} == {"skipped"}
    assert {r.note for r in found[1:]} == {"needs a converted model"}
    assert len(found) == len(CHECKS)


def test_which_checks_are_made():
    names = [check.name for check in checks_for(subject("ready"), ["compile", "speed"])]
    assert names == "convert project forward backward export onnx save mup speed-training".split()


def test_reasons_in_one_line():
    assert plain_reason(RuntimeError("\n  a  b\nc")) == "RuntimeError: a b"
    assert plain_reason(RuntimeError("")) == "RuntimeError: RuntimeError"
    ours = EinlinearError(what="this", rule="that", fix="do it")
    outside = RuntimeError("outside")
    outside.__cause__ = ours
    assert plain_reason(outside) == "this. Rule: that. Fix: do it"
    memory = plain_reason(RuntimeError("CUDA out of memory. Tried to allocate"))
    assert memory.endswith("Tried to allocate. Fix: give a smaller input with --inputs")
    assert len(plain_reason(RuntimeError("long " * 1000))) <= 240


def test_random_numbers_of_the_caller_stay():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    examine(Check("forward", lambda subject: Note(str(torch.randn(1)))), subject("ready"))
    assert torch.equal(before, torch.get_rng_state())


def test_the_table_and_what_to_remember():
    results = [
        CheckResult("convert", "works", "2 layers", 0.04),
        CheckResult("mup", "failed", "no rate; see below", 0.1, {}, "paste:\n\ncode"),
        CheckResult("speed", "works", "2 x", 1.0, {"speed": 2.0}),
    ]
    assert results_table(results, 70).splitlines() == [
        "check    result  notes                 s",
        "----------------------------------------",
        "convert  works   2 layers            0.0",
        "mup      failed  no rate; see below  0.1",
        "speed    works   2 x                 1.0",
        "speed: before / after, measured in turns: the median over rounds and,",
        "in brackets, the middle four fifths of them; s: seconds that the check",
        "took",
        "",
        "mup: paste:",
        "",
        "code",
    ]
    assert conclusion(results) == "1 of 3 checks failed: mup."
    assert conclusion(results[:1]) == "1 check passed."
    assert conclusion(results[::2]) == "All 2 checks passed."
