"""What every visitor of the page has made and has running. Files stay when a visit ends."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from vidsparse.apps.page.gallery import Gallery
from vidsparse.apps.page.tasks import make_folder_of
from vidsparse.apps.runs.prompts import slug
from vidsparse.errors import OptionError
from vidsparse.files import unwritten

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vidsparse.apps.page.errands import Errand, Updates
    from vidsparse.apps.page.tasks import Clip, Pair
    from vidsparse.probe import CellRecord

# visits that never said goodbye that are remembered.
MOST_VISITS = 500

# of one visit's: several windows may show one each. Maps of a large model's cell take megabytes.
MOST_PAIRS, MOST_CELLS, MOST_WINDOWS = 8, 4, 100

T = TypeVar("T")


class Latest(Generic[T]):
    """Things by name, the latest few: what windows show may be another than the very last.

    Args:
        most: that are remembered.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._things: OrderedDict[str, T] = OrderedDict()
        # jobs remember what they made in threads of their own.
        self._lock = threading.Lock()

    def put(self, name: str, thing: T) -> None:
        """Remember a thing as the last one, in the place of any other of that name."""
        with self._lock:
            self._things[name] = thing
            self._things.move_to_end(name)
            while len(self._things) > self._most:
                self._things.popitem(last=False)

    def get(self, name: str) -> T | None:
        """The thing of that name, None where it is not remembered any more."""
        return self._things.get(name)

    def backwards(self) -> list[T]:
        """Those that are remembered, the last one first."""
        with self._lock:
            return list(reversed(self._things.values()))

    @property
    def last(self) -> T | None:
        """The last one, None where there was none."""
        return next(iter(self.backwards()), None)


@dataclass(frozen=True, slots=True)
class Cell:
    """A recorded cell.

    Args:
        pair: the name of its comparison.
        record: what it looked like.
    """

    pair: str
    record: CellRecord

    @property
    def name(self) -> str:
        """What a window calls it."""
        return f"{self.pair} {self.record.step} {self.record.layer}"


@dataclass
class Visit:
    """One visitor: a browser, for as long as it keeps its key, or a script's session.

    Args:
        folder: where the visit's files go.
        returns: whether the visitor can come back to it.
        errands: what was asked for, by tab, in order: all that waits or runs, and what ended last.
        present: how many of its windows are open, and how many listen to how a job goes.
        times: how often one came.
        pairs: comparisons, by their names.
        cells: recorded cells, by their names.
        report: draws the last report.
        shown: the video that a page shows first which is opened again.
        images: by window, pictures that were uploaded there, decoded and written anew, by their
            names in a request.
    """

    folder: Path
    returns: bool = False
    errands: dict[str, list[Errand]] = field(default_factory=dict)
    present: int = 0
    times: int = 0
    pairs: Latest[Pair] = field(default_factory=lambda: Latest(MOST_PAIRS))
    cells: Latest[Cell] = field(default_factory=lambda: Latest(MOST_CELLS))
    report: Callable[[], Updates] | None = None
    shown: Clip | None = None
    images: Latest[Mapping[str, Path]] = field(default_factory=lambda: Latest(MOST_WINDOWS))
    _number: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.gallery = Gallery(self.folder)

    def come(self) -> None:
        """A window is opened, or somebody listens to how a job goes."""
        self.present += 1
        self.times += 1

    def leave(self) -> None:
        """It is closed, or somebody listens no longer."""
        self.present -= 1

    def next_stem(self, prompt: str) -> Path:
        """The path, less its suffix, of the next video's files.

        Who comes back may have another page open that writes to the same folder, which is then
        made at once, to keep the number.

        Raises:
            OutputError: the number cannot be kept there.
        """
        with self._lock:
            self._number = max(self._number, self._last_number()) + 1
            while self.returns and not self._keep(self._number):
                self._number += 1
            number = self._number
        return self.folder / f"{number:04d}-{slug(prompt)}"

    def video(self, name: str) -> Clip:
        """The video of that name, as a window shows it.

        Raises:
            OptionError: its files are gone.
        """
        kept = self.gallery.by_stem().get(name)
        clip = None if kept is None else self.gallery.clip(kept)
        if clip is None:
            raise OptionError("the video that is shown here is gone. Hint: choose another one.")
        return clip

    def compared(self, name: str) -> Pair:
        """The comparison with dense of that name, or the last one for a script, which names none.

        Raises:
            OptionError: there is none, or it was too long ago.
        """
        pair = self.pairs.get(name) if name else self.pairs.last
        if pair is None and name:
            raise OptionError(
                "the comparison that is shown here was too long ago. Hint: compare once more."
            )
        if pair is None or not pair.timed:
            raise OptionError(
                "there is no comparison with dense yet. Hint: compare with dense first."
            )
        return pair

    def cell_of(self, pair: Pair) -> Cell | None:
        """The cell that was recorded last of a comparison, None where none is remembered."""
        return next((cell for cell in self.cells.backwards() if cell.pair == pair.name), None)

    def add(self, errand: Errand) -> None:
        """Remember what a tab has asked for; of what has ended, only the last."""
        tab = errand.place.tab
        with self._lock:
            mine = self.errands.get(tab, [])
            ended = [each for each in mine if each.job.snapshot().finished]
            self.errands[tab] = [*(each for each in mine if each not in ended[:-1]), errand]

    def open(self, tab: str | None = None) -> list[Errand]:
        """What waits or runs for ``tab``, or for all."""
        return [
            errand
            for name, mine in tuple(self.errands.items())
            if tab is None or name == tab
            for errand in mine
            if not errand.job.snapshot().finished
        ]

    def last(self, tab: str) -> Errand | None:
        """What ended last for ``tab``."""
        mine = self.errands.get(tab, ())
        return next((each for each in reversed(mine) if each.job.snapshot().finished), None)

    def cancel(self) -> None:
        """Ask all its jobs to stop."""
        for errand in self.open():
            errand.job.cancel()

    def _keep(self, number: int) -> bool:
        """Whether a number is this page's from now on, and not another's already."""
        kept = self.folder / f".{number:04d}"
        make_folder_of(kept)
        try:
            kept.touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError as error:
            raise unwritten(kept, error) from None
        return True

    def _last_number(self) -> int:
        """The highest number in the folder, which the visit may have come back to."""
        if not self.folder.is_dir():
            return 0
        numbers = (path.name.lstrip(".").partition("-")[0] for path in self.folder.iterdir())
        return max((int(each) for each in numbers if each.isascii() and each.isdigit()), default=0)


class Visits:
    """The visitors by their browser's key, or by the session that Gradio gives a script.

    Args:
        out: the output folder; every visit gets a folder in it, whose name tells neither of them.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self._visits: OrderedDict[str, Visit] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, session: str, key: str | None = None) -> Visit:
        """The visit of a key, or else of a session; begun if it is new."""
        name = f"key {key}" if key else f"session {session}"
        with self._lock:
            visit = self._visits.get(name)
            if visit is None:
                visit = self._visits[name] = Visit(self._folder(key), returns=key is not None)
            self._visits.move_to_end(name)
            while len(self._visits) > MOST_VISITS:
                # those that have nothing running go first: new visits are free to begin, and must
                # not end what others wait for.
                idle = (name for name, each in self._visits.items() if not each.open())
                self._visits.pop(next(idle, next(iter(self._visits)))).cancel()
        return visit

    def end(self, session: str) -> None:
        """Forget a session's visit and stop what it has running."""
        with self._lock:
            visit = self._visits.pop(f"session {session}", None)
        if visit is not None:
            visit.cancel()

    def _folder(self, key: str | None) -> Path:
        if key is None:
            return self._out / f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(8)}"
        # of a key comes a part of the name by which the folder is found again, and never the other
        # way: who is sent the address of a file learns no key. Nothing else: several pages may
        # write to one output folder, and meet the same new visitor before any has made a folder.
        own = sha256(key.encode()).hexdigest()[:16]
        # older versions put a date before it.
        return min(self._out.glob(f"*-{own}"), default=self._out / f"visitor-{own}")
