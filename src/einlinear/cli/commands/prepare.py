"""The command prepare."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from einlinear.cli.terminal import console
from einlinear.show.numbers import counted

if TYPE_CHECKING:
    from einlinear.data.tokens import TokenCounts

_TEXTS = tyro.conf.arg(metavar="TEXT [TEXT ...]", help_behavior_hint="(required)")


def prepare(
    sources: Annotated[tuple[str, ...], tyro.conf.Positional, _TEXTS],
    /,
    *,
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")],
    validation: tuple[str, ...] = (),
    vocabulary: Literal["ascii", "gpt2"] = "ascii",
    rule: Literal["drop", "fold"] = "drop",
    validation_share: float | None = None,
    processes: int | None = None,
) -> None:
    """Tokenize texts of any size once, for training on them many times.

    Interrupt it at any time and rerun it to resume.

    Args:
        sources: Text files (.txt or .jsonl, either with .gz), folders of them, or hub:owner/name.
        out: Folder for the tokens, which you give to einlinear train as --data.
        validation: Texts for validation; by default, some of the documents, or the end of the last
            one if there are too few.
        vocabulary: Use 96 ASCII symbols, or the byte pairs of GPT-2.
        rule: Drop a document with a character outside of ASCII, or fold the character to a
            similar one.
        validation_share: Share of the documents to use for validation.
        processes: Number of processes; by default, one for each core.
    """
    from einlinear.cli.progress import progress_bar
    from einlinear.data.prepare import prepare as run_prepare

    given: Any = {} if validation_share is None else {"validation_share": validation_share}
    with progress_bar(console(), "MB") as show:
        info = run_prepare(
            sources,
            out,
            validation=validation or None,
            vocabulary=vocabulary,
            rule=rule,
            processes=processes,
            on_progress=show,
            **given,
        )
    for name, stream in (("training", info.train), ("validation", info.validation)):
        print(f"{counted(stream.tokens, 'token')} for {name}")
    print(kept_text(info.counts))
    print(f"wrote {out}")


def kept_text(counts: TokenCounts) -> str:
    """How many documents and characters were dropped."""
    return (
        f"{counted(counts.documents, 'document')}, {counts.documents_dropped:,} dropped; "
        f"{counted(counts.characters_dropped, 'character')} dropped"
    )
