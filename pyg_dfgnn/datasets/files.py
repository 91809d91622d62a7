"""Search for the raw files of published data sets, and a cache of graphs made from them."""

from __future__ import annotations

import filecmp
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from filelock import FileLock
from torch import Tensor
from torch_geometric.data import Data

from pyg_dfgnn.errors import check_bool

log = logging.getLogger(__name__)

Loaded = TypeVar("Loaded")
Folders = Sequence[str | Path]
Packed = dict[str, tuple[Tensor, Tensor]]
"""By attribute: the values of all graphs in one tensor, and how many values each graph has."""

SEARCH: Folders = (os.environ.get("PYG_DFGNN_DATA", "data"), "data", "../shared/data")
CACHE = os.environ.get("PYG_DFGNN_CACHE", "~/.cache/pyg_dfgnn")


@dataclass(frozen=True)
class RawFiles:
    """The raw files of a data set.

    Args:
        name: Name of the data set.
        files: Names of the files, all of which are needed.
        places: Folders below each folder of `search` that may hold the files, in this order.
        search: Folders to search, in this order.
        hint: Last line of the error for missing files.
    """

    name: str
    files: Sequence[str]
    places: Sequence[str]
    search: Folders
    hint: str = ""

    def find(self) -> Path | None:
        """Return the first folder that holds all files."""
        return next((folder for folder in self._folders() if self.are_in(folder)), None)

    def are_in(self, folder: Path) -> bool:
        """Return whether a folder holds all files."""
        return not self._missing(folder)

    def need(self) -> Path:
        """Return the first folder that holds all files.

        Raises:
            FileNotFoundError: The files are missing; the message says where to put them.
        """
        folder = self.find()
        if folder is None:
            raise self.not_found()
        return folder

    def sizes(self, folder: Path) -> list[int]:
        """Return the bytes of each file in a folder, which tell apart files of the same name."""
        return [(folder / file).stat().st_size for file in self.files]

    def load(self, raw: Path, download: bool, make: Callable[[], Loaded]) -> Loaded:
        """Call a dataset class of PyG after local files were copied to where it looks, so that it need not download.

        Args:
            raw: Folder where the class looks for raw files.
            download: Whether the class may download missing files.
            make: Function that makes the dataset.

        Raises:
            FileNotFoundError: The files are missing, and the download is not wanted or failed.
            ValueError: The files cannot be read; the message says where they are.
        """
        check_bool("download", download)
        local = self.find()
        if local is None and not download and not self.are_in(raw):
            raise self.not_found()
        raw.mkdir(parents=True, exist_ok=True)
        # One process of a distributed run copies, downloads and processes while the others wait.
        with FileLock(raw.parent / ".lock"):
            if local is not None:
                self._copy(local, raw)
            try:
                with self.reading(raw.parent if local is None else f"{local}, copied to {raw.parent},"):
                    return make()
            except Exception as error:
                if self.are_in(raw):
                    raise
                failed = f"The download failed: {type(error).__name__}: {error}"
                raise FileNotFoundError(f"{self.not_found()}\n{failed}") from error

    @contextmanager
    def reading(self, folder: str | Path) -> Iterator[None]:
        """A block that reads the files of a folder and whose errors say that the files may be damaged.

        Raises:
            ValueError: The files cannot be read.
        """
        try:
            yield
        except (ImportError, MemoryError, OSError):
            # These errors do not come from the content of the files.
            raise
        except Exception as error:
            damaged = f"the files of {self.name} in {folder} may be damaged; replace or remove them"
            raise ValueError(f"{damaged}: {error!r}") from error

    def not_found(self) -> FileNotFoundError:
        """Return the error that says where to put which file."""
        lines = [f"the raw files of {self.name} were not found. Put {', '.join(self.files)} into one of"]
        for folder in self._folders():
            missing = self._missing(folder)
            lines.append(f"  {folder.resolve()}" + (f" (lacks {', '.join(missing)})" if folder.is_dir() else ""))
        lines.append(f"or name a folder that holds {self.places[0]} in the environment variable PYG_DFGNN_DATA.")
        return FileNotFoundError("\n".join([*lines, *([self.hint] if self.hint else [])]))

    def _copy(self, local: Path, raw: Path) -> None:
        """Copy files that are missing or differ, and remove what was processed from others."""
        changed = [file for file in self.files if not _is_copy(raw / file, local / file)]
        if changed:
            shutil.rmtree(raw.parent / "processed", ignore_errors=True)
        for file in changed:
            # A file appears whole or not at all, since an interrupted copy would pass for the file.
            shutil.copy2(local / file, raw / f"{file}.partial")
            os.replace(raw / f"{file}.partial", raw / file)

    def _folders(self) -> list[Path]:
        roots = dict.fromkeys(Path(folder).expanduser() for folder in self.search)
        return [root / place for root in roots for place in self.places]

    def _missing(self, folder: Path) -> list[str]:
        return [file for file in self.files if not (folder / file).is_file()]


def _is_copy(file: Path, source: Path) -> bool:
    return file.is_file() and filecmp.cmp(file, source)


def cached(
    cache: str | Path | None, name: str, parameters: Mapping[str, Any], make: Callable[[], dict[str, list[Data]]]
) -> dict[str, list[Data]]:
    """Return the graphs that `make` returns, which a file on disk keeps under the name and the parameters.

    One process writes the file, whole or not at all, while others wait. Tensors are mapped from the file, so that they
    are read at their first use.

    Args:
        cache: Folder of the file; None: the graphs are not kept.
        name: Start of the file's name.
        parameters: Plain values of everything that decides the graphs.
        make: Function that makes the graphs, by split.
    """
    if cache is None:
        return make()
    text = json.dumps(parameters, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    file = Path(cache).expanduser() / "made" / f"{name}-{digest}.pt"
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_suffix(".lock")):
        if file.is_file():
            try:
                return _read(file)
            except (MemoryError, OSError):
                raise
            # Of a damaged file, torch raises errors of many kinds.
            except Exception as error:
                log.warning("%s is damaged (%s) and is made anew", file, " ".join(str(error).split())[:200])
        packed = {split: pack(graphs) for split, graphs in make().items()}
        partial = file.with_suffix(".partial")
        torch.save({"parameters": text, "splits": packed}, partial)
        os.replace(partial, file)
        return _read(file)


def _read(file: Path) -> dict[str, list[Data]]:
    splits = torch.load(file, mmap=True, weights_only=True)["splits"]
    return {split: unpack(packed) for split, packed in splits.items()}


def pack(graphs: Sequence[Data]) -> Packed:
    """Return one tensor per attribute of graphs with the same attributes; the graphs are emptied to save memory."""
    packed = {}
    for key in graphs[0].keys():
        values = [graph[key] for graph in graphs]
        dim = _dim(key)
        packed[key] = torch.cat(values, dim), torch.tensor([value.size(dim) for value in values])
        for graph in graphs:
            del graph[key]
    return packed


def unpack(packed: Packed) -> list[Data]:
    """Return the graphs as views of the packed tensors."""
    columns: Iterable[tuple[Tensor, ...]] = [
        values.split(sizes.tolist(), _dim(key)) for key, (values, sizes) in packed.items()
    ]
    return [Data(**dict(zip(packed, row))) for row in zip(*columns)]


def _dim(key: str) -> int:
    return 1 if key == "edge_index" else 0
