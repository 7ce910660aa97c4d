"""The cache of built things: one folder an entry, whole or not there at all.

An entry is a folder ``<cache>/<stem>-<12 hex>/`` with the files that a build left and build.json.
It is built beside its final place and renamed into it when complete, so no process ever sees half
of one; build.json holds the hash of every file and of itself, so a damaged entry is noticed,
reported once and built again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasim import settings
from fasim.errors import MissingToolError

FORMAT = 4  # of an entry; part of every key
RECORD = "build.json"
STALE_S = 24 * 3600.0  # a build folder this old was left by a process that was killed

Facts = Mapping[str, Any]

log = logging.getLogger("fasim")


@dataclass(frozen=True)
class Entry:
    """The place of one built thing.

    ``key`` is ``key_of`` everything that decides its bytes; ``files`` are the names that it keeps
    of what its build leaves, where they exist.
    """

    stem: str
    key: str
    files: tuple[str, ...]

    @property
    def path(self) -> Path:
        return settings.CACHE_DIR.value / f"{self.stem}-{self.key[:12]}"

    def get(self, build: Callable[[Path], Facts]) -> tuple[Facts, bool]:
        """The facts recorded with the entry, and whether it was here already.

        What is not here or damaged is built: ``build`` fills the folder that it is given and
        returns what is worth knowing besides the files, as JSON-able values. Raises
        MissingToolError when the cache cannot be written, and what ``build`` raises.
        """
        known, facts = os.path.exists(self.path), self.load()
        if facts is not None:
            return facts, True
        if known:
            log.warning("%s was damaged; it is built again", self.path)
        with _build_folder(self.path.parent) as folder:
            started = time.perf_counter()
            facts = build(folder)
            self._seal(folder, {**facts, "seconds": round(time.perf_counter() - started, 3)})
            return self._install(folder), False

    def load(self) -> Facts | None:
        """The facts of a whole entry; None if there is none or any byte of it changed."""
        try:
            record = json.loads((self.path / RECORD).read_text())
            facts: Facts = record["facts"]
            whole = record == self._record(self.path, record["files"], facts)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return facts if whole else None

    def keep_failed(self, folder: Path) -> Path:
        """Copies what a failed build left beside the entry, for its user to read; the folder."""
        failed = self.path.with_name(f"{self.path.name}.failed")
        failed.mkdir(exist_ok=True)
        for name in self.files:
            with suppress(FileNotFoundError):
                shutil.copy(folder / name, failed)
        return failed

    def _seal(self, folder: Path, facts: Facts) -> None:
        """Removes what is not kept and writes the record of what is."""
        for path in folder.iterdir():
            if path.name not in self.files:
                path.unlink()
        names = sorted(path.name for path in folder.iterdir())
        (folder / RECORD).write_text(json.dumps(self._record(folder, names, facts), indent=2))

    def _record(self, folder: Path, names: Iterable[str], facts: Facts) -> dict[str, Any]:
        files = {name: sha256((folder / name).read_bytes()) for name in names}
        record = {"key": self.key, "facts": facts, "files": files}
        return {**record, "sha256": key_of(**record)}

    def _install(self, folder: Path) -> Facts:
        """Renames a complete build into its place. Of two processes the second discards its own; a
        damaged entry is moved out of the way first."""
        if not _rename(folder, self.path) and self.load() is None:
            damaged = folder.with_name(f"{folder.name}-damaged")
            _rename(self.path, damaged)
            shutil.rmtree(damaged, ignore_errors=True)
            _rename(folder, self.path)
        facts = self.load()
        if facts is None:
            raise OSError(f"{self.path.name} cannot be replaced")
        return facts


def key_of(**parts: Any) -> str:
    """The key of an entry from everything that decides its bytes: JSON-able values, by name."""
    return sha256(json.dumps({"format": FORMAT, **parts}, sort_keys=True).encode())


def sha256(data: bytes) -> str:
    """The hash of some bytes, in hex."""
    return hashlib.sha256(data).hexdigest()


@contextmanager
def _build_folder(cache: Path) -> Iterator[Path]:
    """A folder in the cache that is gone afterwards, unless it was renamed into an entry."""
    folder = cache / f".build-{uuid.uuid4().hex}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _sweep(cache)
        folder.mkdir()
        yield folder
    except OSError as error:
        raise MissingToolError(
            f"cannot build in the cache {cache}",
            why=error.strerror or str(error),
            hint="set FASIM_CACHE_DIR to a folder that you can write to",
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(cache: Path) -> None:
    """Removes what killed processes and failed builds left a day ago."""
    for path in (*cache.glob(".build-*"), *cache.glob("*.failed")):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_S:
                shutil.rmtree(path)


def _rename(source: Path, target: Path) -> bool:
    try:
        source.rename(target)
    except OSError:
        return False
    return True
