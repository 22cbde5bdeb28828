"""prepare: encode texts of any size into a folder of tokens, once.

Documents are read one after the other and grouped into chunks. Processes encode each chunk into a
part, a file that appears whole or not at all; at the end the parts are joined. A part holds a hash
of its chunk and settings, so that a second start reuses the parts that are still right and gives
the same result as one uninterrupted run.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path

from einlinear.data.documents import Reading, Source, find_sources, read_documents, size_of
from einlinear.data.token_folder import INFO, SourceFacts, TokenInfo, read_info
from einlinear.data.token_parts import (
    PARTS,
    Chunk,
    TokenSettings,
    join_parts,
    part_path,
    read_part,
    write_part,
)
from einlinear.data.tokens import SHARE, check_validation_share
from einlinear.data.vocabulary import check_rule, open_vocabulary
from einlinear.data.workers import count_processes, worker_pool
from einlinear.errors import EinlinearError, cannot_write, shorten
from einlinear.files.whole import as_path
from einlinear.show.progress import Progress
from einlinear.structures.values import whole_number

CHUNK = 4 * 2**20
"""About how many bytes of text go into a part."""

_LONGEST_CHUNK = 2**30
_MEGABYTE = 10**6


def prepare(
    sources: Source | Sequence[Source],
    out: str | Path,
    *,
    validation: Source | Sequence[Source] | None = None,
    vocabulary: str = "ascii",
    rule: str = "drop",
    validation_share: float = SHARE,
    processes: int | None = None,
    chunk_bytes: int = CHUNK,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> TokenInfo:
    """Encode texts into a folder of tokens, which the task `text` maps into memory.

    Interrupt it at any time and make the same call again to resume; if the folder is complete, the
    call does nothing. A script that calls this with more than one process must guard its own work
    with `if __name__ == "__main__":`, because the processes import it.

    Args:
        sources: text files (.txt, .jsonl, either with .gz), folders of them, or hub:owner/name.
        out: the folder for the tokens; it needs room for them twice.
        validation: texts for validation; by default a part of the documents, chosen by a hash, or
            the end of the last document if there are too few.
        vocabulary: "ascii" (96 symbols) or "gpt2" (50,257 byte pairs).
        rule: for characters outside "ascii": "drop" the document or "fold" them.
        validation_share: share of the documents for validation.
        processes: how many encode at once; by default one per core.
        chunk_bytes: bytes of text in a part.
        on_progress: called at the start and after every part, with megabytes read.
    """
    share = None if validation is not None else check_validation_share(validation_share)
    settings = TokenSettings(open_vocabulary(vocabulary).name, check_rule(rule), share)
    processes = count_processes(os.cpu_count() or 1 if processes is None else processes)
    chunk_bytes = whole_number(chunk_bytes, "chunk_bytes", 1, _LONGEST_CHUNK)
    uses = [("train", source) for source in find_sources(sources)]
    if validation is not None:
        uses += [("validation", source) for source in find_sources(validation)]
    out = as_path(out, "the folder for tokens")
    if os.path.exists(out / INFO):
        return _noted(_finished(out, settings, uses), out)
    sizes = [size_of(source) for _, source in uses]
    total = 0 if None in sizes else sum(size or 0 for size in sizes)

    def report(bytes_read: int) -> None:
        share = bytes_read / total if total else 0.0
        on_progress(Progress(bytes_read // _MEGABYTE, total // _MEGABYTE, share))

    try:
        info = _make(out, settings, uses, chunk_bytes, processes, report)
    except OSError as error:
        raise cannot_write(out, error) from error
    done = sum(source.size for source in info.sources) // _MEGABYTE
    on_progress(Progress(done, done, 1.0))
    return _noted(info, out)


def _noted(info: TokenInfo, out: Path) -> TokenInfo:
    """The same, after a warning if there is nothing to validate with."""
    if not info.validation.tokens:
        warnings.warn(
            f"{out} has no tokens for validation\n"
            "  rule: einlinear train needs a text for validation that is longer than its context\n"
            "  fix:  give longer texts, a larger validation share, or texts for validation",
            stacklevel=3,
        )
    return info


def _finished(out: Path, settings: TokenSettings, uses: Sequence[tuple[str, Source]]) -> TokenInfo:
    """Return the contents of a complete folder, if they are what the call asks for."""
    info = read_info(out)
    held = TokenSettings(info.vocabulary, check_rule(info.rule), info.validation_share)
    made = (out / INFO).stat().st_mtime
    known = [(facts.use, facts.name) for facts in info.sources]
    asked = [(use, _name(source)) for use, source in uses]
    is_changed = any(
        size_of(source) not in (None, facts.size) or _time_of(source) > made
        for (_, source), facts in zip(uses, info.sources, strict=False)
    )
    if held != settings or known != asked or is_changed:
        raise EinlinearError(
            what=f"{out} holds tokens of {_names(known)} with {_shown(held)}, not of "
            f"{_names(asked)} with {_shown(settings)}"
            + (", which have changed since" if is_changed else ""),
            rule="a complete folder is not written again",
            fix="choose another folder, or delete this one",
        )
    return info


def _names(uses: Sequence[tuple[str, str]]) -> str:
    return shorten(", ".join(name for _, name in uses))


def _shown(settings: TokenSettings) -> str:
    share = "given" if settings.share is None else f"{settings.share:g}"
    return shorten(f"vocabulary {settings.vocabulary}, rule {settings.rule}, validation {share}")


def _name(source: Source) -> str:
    return str(source) if size_of(source) is None else Path(source).name


def _time_of(source: Source) -> float:
    return 0.0 if size_of(source) is None else Path(source).stat().st_mtime


def _make(
    out: Path,
    settings: TokenSettings,
    uses: Sequence[tuple[str, Source]],
    chunk_bytes: int,
    processes: int,
    report: Callable[[int], None],
) -> TokenInfo:
    """Make the parts and join them."""
    (out / PARTS).mkdir(parents=True, exist_ok=True)
    readings = [Reading(_name(source)) for _, source in uses]
    chunks = read_chunks(uses, readings, chunk_bytes)
    count = _make_parts(chunks, settings, out, processes, report)
    facts = [
        SourceFacts(reading.source, reading.bytes_read, reading.digest.hexdigest(), use)
        for (use, _), reading in zip(uses, readings, strict=True)
    ]
    return join_parts(out, count, settings, facts)


def read_chunks(
    uses: Sequence[tuple[str, Source]], readings: Sequence[Reading], chunk_bytes: int
) -> Iterator[Chunk]:
    """Group the documents of all sources into chunks; keeps the readings up to date."""
    held: list[bytes] = []
    index, size, before, use = 0, 0, 0, ""
    for (next_use, source), reading in zip(uses, readings, strict=True):
        if held and next_use != use:
            yield Chunk(index, use, tuple(held), before)
            index, held, size = index + 1, [], 0
        use = next_use
        for document in read_documents(source, reading):
            held.append(document)
            size += len(document)
            if size >= chunk_bytes:
                yield Chunk(index, use, tuple(held), before + reading.bytes_read)
                index, held, size = index + 1, [], 0
        before += reading.bytes_read
    if held:
        yield Chunk(index, use, tuple(held), before)


def _make_parts(
    chunks: Iterator[Chunk],
    settings: TokenSettings,
    out: Path,
    processes: int,
    report: Callable[[int], None],
) -> int:
    """Make the missing parts, a few chunks at a time; return the number of all parts."""
    report(0)
    count = 0
    with worker_pool(processes, _start, (settings.vocabulary,)) as pool:
        running: dict[Future[None], int] = {}
        for chunk in chunks:
            count += 1
            path, digest = part_path(out, chunk.index), chunk.digest(settings)
            if read_part(path, digest) is not None:
                report(chunk.bytes_read)
            elif processes == 1:
                write_part(path, digest, chunk, settings)
                report(chunk.bytes_read)
            else:
                running[pool.submit(write_part, path, digest, chunk, settings)] = chunk.bytes_read
            while len(running) > 2 * processes:
                _collect(running, report)
        while running:
            _collect(running, report)
    return count


def _start(vocabulary: str) -> None:
    """Prepare a process: the ranks of byte pairs take a moment to load."""
    open_vocabulary(vocabulary)


def _collect(running: dict[Future[None], int], report: Callable[[int], None]) -> None:
    """Wait for at least one part."""
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        bytes_read = running.pop(future)
        future.result()
        report(bytes_read)
