"""Records with known laws whose runs differ in length, as in a sweep at the best sizes."""

from kit.report_records import DENSE, KINDS, make_record

NOISE = 0.0005
WIDTHS = (64, 96, 128, 192)  # of dense


def macs_of(kind, width):
    return make_record(kind, width, 0, steps=40).counts.macs


def widths_of(kind):
    """Widths at which a structure costs about as much as dense."""
    choices = {width: macs_of(kind, width) for width in range(32, 1024, 32)}
    wanted = [macs_of(DENSE, width) for width in WIDTHS]
    return [min(choices, key=lambda width: abs(choices[width] - macs)) for macs in wanted]


def ragged_records(noise=NOISE, kinds=KINDS[:4], seeds=2):
    """Runs whose steps grow with their multiply-adds, from 230 to 1,800; half of that for btt."""
    found = []
    for kind in kinds:
        for width in widths_of(kind):
            steps = 230 * macs_of(kind, width) / macs_of(DENSE, WIDTHS[0])
            length = {"steps": round(steps / (2 if kind == KINDS[1] else 1))}
            fixed = {"eval_spacing": "fixed", "eval_points": 8, "noise": noise}
            found += [make_record(kind, width, s, **length, **fixed) for s in range(seeds)]
    return found
