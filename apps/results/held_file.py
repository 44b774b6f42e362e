"""One process at a time that works on a file for a long while before it writes it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vidsparse.errors import OptionError
from vidsparse.files import unwritten


@contextmanager
def held_file(path: Path, doing: str, other: str, *, make_folder: bool = False) -> Iterator[None]:
    """Keep other processes out while this one works on ``path``, by a lock beside it.

    What the file holds is to be looked at again within: until it was ours, another process may have
    written it.

    Args:
        path: the file; it need not exist.
        doing: what is done for it, for the error: "measuring".
        other: how to choose another file, for the hints: "name another file".
        make_folder: make the file's folder if it is missing; it goes again if nothing comes into
            it.

    Raises:
        OptionError: another process holds the file.
        OutputError: its folder is missing or cannot be written to.
    """
    from filelock import FileLock, Timeout

    folder = path.parent
    made = [one for one in (folder, *folder.parents) if not one.exists()] if make_folder else []
    lock = FileLock(folder / f".{path.name}.lock")
    try:
        if make_folder:
            folder.mkdir(parents=True, exist_ok=True)
        # better known now than after an hour of work.
        with tempfile.TemporaryFile(dir=folder):
            pass
        lock.acquire(timeout=0)
    except Timeout:
        raise OptionError(
            f"another process is {doing} into {path}. Hint: wait until it ends, or {other}."
        ) from None
    except OSError as error:
        raise unwritten(path, error, f"Hint: {other}, in another folder.") from None
    try:
        yield
    finally:
        # still under the lock, so that no other process can take hold of a file that is about to
        # go. the folder may be gone by now; what ended the run is the news, not that.
        with suppress(OSError):
            Path(lock.lock_file).unlink()
            # a run that wrote nothing leaves nothing; a folder with files in it stays.
            for one in made:
                one.rmdir()
        lock.release()
