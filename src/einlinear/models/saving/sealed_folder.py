"""FolderFormat: a folder of two files, tensors and a description that is sealed with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from einlinear.errors import EinlinearError, cannot_write, quote
from einlinear.files.seals import sealed, unseal_
from einlinear.files.tensors import load_tensors, write_tensors
from einlinear.files.whole import checked_reading, parse_object, write_whole
from einlinear.version import __version__

_WRITTEN = "a folder is read as it was written"

_Header = TypeVar("_Header")


@dataclass(frozen=True, slots=True)
class FolderFormat:
    """What tells folders of one kind from others, and what messages call them.

    name, schema: the format, which the description states. A change that older versions cannot
        read needs a new number.
    weights, description: the names of the two files.
    noun, content: what such a folder is, and what it holds: "saved model", "model".
    saved_by, loaded_by: the functions that write and read it: "el.save", "el.load".
    """

    name: str
    schema: int
    weights: str
    description: str
    noun: str
    content: str
    saved_by: str
    loaded_by: str

    @property
    def _next(self) -> str:
        """The file of new weights, until the new description is in place."""
        return f"{self.weights}.next"

    @property
    def _again(self) -> str:
        return f"save the {self.content} again, or restore the folder from a copy"

    def write(self, folder: Path, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Write both files; if this is interrupted, the folder holds what it held before."""
        self._check_folder(folder)
        seal = write_tensors(folder / self._next, {name: t.cpu() for name, t in tensors.items()})
        # Until the next line is done, the folder holds what it held before; after it, the new.
        head = {"format": self.name, "schema": self.schema, "einlinear": __version__}
        write_whole(folder / self.description, sealed({**head, **values, "weights_seal": seal}))
        try:
            (folder / self._next).replace(folder / self.weights)
        except OSError as error:
            raise cannot_write(folder / self.weights, error) from error

    def read(
        self, folder: Path, parse: Callable[[dict[str, Any]], _Header]
    ) -> tuple[_Header, dict[str, Tensor]]:
        """Read what `write` was given, the values through `parse`, which may raise ValueErrors."""
        path = folder / self.description
        if not path.is_file():
            is_hugging_face = (folder / "config.json").is_file()
            raise EinlinearError(
                what=f"{folder} is not a {self.noun}: it has no {self.description}",
                rule=f"{self.loaded_by} reads a folder that {self.saved_by} wrote",
                fix="this folder is for Hugging Face: AutoModel.from_pretrained(path)"
                if is_hugging_face
                else f"give the folder that you gave to {self.saved_by}",
            )
        with checked_reading(path, rule=_WRITTEN, fix=self._again):
            values = parse_object(path.read_bytes())
            self._check_format(path, values)
            unseal_(values)
            seal = values.pop("weights_seal", None)
            if not isinstance(seal, str):
                raise ValueError(f"its weights_seal is {quote(seal)}")
            known = ("format", "schema", "einlinear")
            header = parse({name: values[name] for name in values if name not in known})
        return header, self._read_weights(folder, seal)

    def _read_weights(self, folder: Path, seal: str) -> dict[str, Tensor]:
        """Read the weights; those of a save that was interrupted just before its end, too."""
        path = folder / self.weights
        with checked_reading(path, rule=_WRITTEN, fix=self._again):
            try:
                return load_tensors(path, seal)
            except (OSError, ValueError):
                if not (folder / self._next).is_file():
                    raise
                return load_tensors(folder / self._next, seal)

    def _check_folder(self, folder: Path) -> None:
        """Refuse to write among other files."""
        try:
            found = sorted(item.name for item in folder.iterdir()) if folder.exists() else []
        except OSError as error:
            raise cannot_write(folder, error) from error
        main = {self.weights, self.description}
        own = main | {self._next, f"{self._next}.part", f"{self.description}.part"}
        is_ours = self.description in found and self._is_ours(folder / self.description)
        strange = [name for name in found if name not in own or name in main]
        if strange and not is_ours:
            raise EinlinearError(
                what=f"{folder} holds other files: {', '.join(strange[:5])}",
                rule=f"{self.saved_by} writes to a new or empty folder, or over one that it wrote",
                fix="give the path of a new folder",
            )

    def _is_ours(self, path: Path) -> bool:
        try:
            return bool(parse_object(path.read_bytes()).get("format") == self.name)
        except (OSError, ValueError):
            return False

    def _check_format(self, path: Path, values: dict[str, Any]) -> None:
        found, schema = values.get("format"), values.get("schema")
        if found != self.name:
            raise EinlinearError(
                what=f"{path} has the format {quote(found)}",
                rule=f'the description of a {self.noun} has the format "{self.name}"',
                fix=f"give the folder that you gave to {self.saved_by}",
            )
        if schema != self.schema:
            raise EinlinearError(
                what=f"{path} has the schema {quote(schema)}, written by einlinear "
                f"{quote(values.get('einlinear'))}",
                rule=f"einlinear {__version__} reads schema {self.schema}",
                fix="install the version of einlinear that wrote it, or a later one",
            )
