"""Which weights a model's folder holds: digests of what it is loaded from."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Final

from vidsparse.errors import ModelError
from vidsparse.files import file_hash
from vidsparse.pipelines.cards import CARD, PRESETS


def weights_hash(folder: Path) -> str:
    """SHA-256 over the names and contents of the safetensors files of a model's parts."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.safetensors")):
        # numbers that were found with the weights.
        if path.parent.name == PRESETS:
            continue
        digest.update(path.relative_to(folder).as_posix().encode())
        digest.update(_file_hash(path).encode())
    return digest.hexdigest()


_READ_QUICKLY: Final = 2**26


def files_stamp(folder: Path) -> str:
    """SHA-256 over what a model is loaded from, without the minutes that large weights take.

    Of files up to 64 MiB the contents count, of larger ones the size and the time of their last
    change.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        # a card's numbers, and presets, are in the requests that follow them.
        if path.parent.name == PRESETS or path.name == CARD or not path.is_file():
            continue
        if path.suffix not in (".json", ".safetensors"):
            continue
        stat = path.stat()
        large = stat.st_size > _READ_QUICKLY
        digest.update(path.relative_to(folder).as_posix().encode())
        said = f"{stat.st_size} {stat.st_mtime_ns}" if large else _file_hash(path)
        digest.update(said.encode())
    return digest.hexdigest()


def lora_stamp(lora: str) -> str:
    """SHA-256 of a LoRA's file, or of the weights in its folder; a hub id as it is."""
    path = Path(lora).expanduser()
    if path.is_file():
        return _file_hash(path)
    return weights_hash(path) if path.is_dir() else lora


def lora_hash(lora: str) -> str:
    """``lora_stamp`` of a LoRA that was loaded; of a hub id, that of its folder in the hub's cache.

    Nothing is fetched. The id remains where the cache does not have it.
    """
    from huggingface_hub import snapshot_download

    stamp = lora_stamp(lora)
    if stamp != lora:
        return stamp
    try:
        # no file of it has to be there: the folder is asked for, with what was loaded.
        folder = Path(snapshot_download(lora, local_files_only=True, allow_patterns=[]))
    except (OSError, ValueError):
        return lora
    return weights_hash(folder) if any(folder.rglob("*.safetensors")) else lora


_FILE_HASHES: Final[dict[tuple[str, int, int], str]] = {}


def _file_hash(path: Path) -> str:
    # the hub's cache names large files by their own hash, which saves reading them again.
    target = path.resolve()
    if target.parent.name == "blobs" and re.fullmatch(r"[0-9a-f]{64}", target.name):
        return target.name
    stat = target.stat()
    key = (str(target), stat.st_mtime_ns, stat.st_size)
    if key not in _FILE_HASHES:
        try:
            _FILE_HASHES[key] = file_hash(target)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
    return _FILE_HASHES[key]
