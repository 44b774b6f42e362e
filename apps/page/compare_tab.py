"""The Compare tab: dense and sparse in step, where they differ, and a look into one cell."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import Any

import gradio as gr

from vidsparse.apps.page import draw
from vidsparse.apps.page.desk import Desk, cancel_button, toast
from vidsparse.apps.page.errands import Errand, Place, Updates, and_keep
from vidsparse.apps.page.form import Form
from vidsparse.apps.page.gallery import MOST_SHOWN
from vidsparse.apps.page.generate_tab import GenerateTab
from vidsparse.apps.page.queue import Job
from vidsparse.apps.page.tasks import (
    TURNS,
    Clip,
    Pair,
    compare,
    compare_sides,
    make_in_turns,
    record_cell,
)
from vidsparse.apps.page.values import form_number, shown, whole
from vidsparse.apps.page.visits import Cell, Visit
from vidsparse.apps.page.workbench import Workbench
from vidsparse.apps.runs.comparison import dense_side
from vidsparse.errors import OptionError
from vidsparse.pipelines.request import GenerateRequest
from vidsparse.probe import CellRecord

# a cell chosen in the density map is an event of the component around it, which puts the cell into
# the fields below without asking the server: answers to quick choices could come out of turn.
_FORWARD_CELL = """
element.addEventListener('vs-cell', () => trigger('select'));
"""
_CHOSEN_CELL = "() => document.querySelector('#heat vs-heat').chosen.map((place) => place + 1)"


# what a side can be beside a kept video, whose name begins with its number.
DENSE, FORM = "dense", "form"
_FIRST_A = [("dense, made beside B", DENSE), ("the form's settings", FORM)]
_FIRST_B = [("the form's settings", FORM)]


def made_for(side_a: object, side_b: object, asked: GenerateRequest) -> list[GenerateRequest]:
    """The videos that a comparison makes: those of its sides that are not kept ones."""
    if side_a == DENSE:
        return [dense_side(asked), asked] if side_b == FORM else []
    return [asked] * ((side_a == FORM) + (side_b == FORM))


class CompareTab:
    """Controls and events of the tab.

    Args:
        desk: where jobs go.
        form: what is asked for.
        generate: whose history the two videos join.
        tab: whose controls these are.
    """

    def __init__(self, desk: Desk, form: Form, generate: GenerateTab, tab: gr.Tab) -> None:
        self.tab = tab
        self._desk = desk
        self._form = form
        self._generate = generate
        with gr.Row():
            self.sides = {
                "side_a": gr.Dropdown(
                    _FIRST_A, value=DENSE, label="A", min_width=220, elem_id="side-a"
                ),
                "side_b": gr.Dropdown(
                    _FIRST_B, value=FORM, label="B", min_width=220, elem_id="side-b"
                ),
            }
        with gr.Row(elem_classes="vs-run"):
            self.run = gr.Button("Compare", variant="primary", elem_id="compare", scale=3)
            self.stop = cancel_button("cancel-compare")
            self.outlook = gr.HTML(elem_id="compare-outlook", elem_classes="vs-expect")
        self.status = gr.HTML(
            draw.note(
                "Makes the form's video dense and sparse from one seed and plays both in step: "
                "what differs, its PSNR, and where attention was sparse. A and B can also be any "
                "two of your videos."
            ),
            elem_id="compare-status",
        )
        self._place = Place("compare", self.status, self.stop)
        # what this window shows: another one of the visitor may have made a later comparison.
        self.named = gr.Textbox("", visible="hidden", show_label=False)
        self.named_cell = gr.Textbox("", visible="hidden", show_label=False)
        self.facts = gr.HTML(elem_id="compare-facts")
        with gr.Row(visible=False, elem_classes="vs-actions") as self.timing:
            self.time = gr.Button("Time both in turns", size="md", elem_id="time-pair")
            gr.Markdown(
                f"Makes both videos {TURNS} times more, dense and sparse in turns, for a speed "
                "with its range.",
                elem_classes="note",
            )
        self.viewer = gr.HTML(elem_id="viewer")
        self.links = gr.HTML()
        with gr.Column(visible=False) as self.inside:
            gr.Markdown("### Where attention was sparse")
            self.heat = gr.HTML(elem_id="heat", js_on_load=_FORWARD_CELL)
            gr.Markdown("### Inside a cell")
            gr.Markdown(
                "Choose a cell above, or type it. Recording makes the video again up to that "
                "step and keeps samples of every head's map.",
                elem_classes="note",
            )
            with gr.Row(equal_height=False):
                self.step = gr.Number(value=1, label="Step", step=1, min_width=90, elem_id="step")
                self.layer = gr.Number(
                    value=1, label="Layer", step=1, min_width=90, elem_id="layer"
                )
                self.record = gr.Button("Record this cell", size="md", elem_id="record-cell")
            self.cell_status = gr.HTML(elem_id="cell-status")
            with gr.Row(visible=False) as self.cell_controls:
                self.head = gr.Slider(
                    1, 2, value=1, step=1, label="Head", buttons=[], elem_id="head"
                )
                self.order = gr.Radio(
                    [("Hilbert", "hilbert"), ("raster", "rowmajor")],
                    value="hilbert",
                    label="Order of the map",
                    elem_id="map-order",
                )
            self.cell = gr.HTML(elem_id="cell")

    def connect(self, page: gr.Blocks) -> None:
        """Attach the events, once every control of the page is there."""
        # the name before the controls, whose change asks for the map of the cell that is named.
        cell = [
            self.cell_status, self.named_cell, self.cell_controls, self.head, self.order, self.cell,
        ]  # fmt: skip
        shown = [
            self.facts, self.timing, self.viewer, self.links, self.inside, self.heat, self.named,
            *cell,
        ]  # fmt: skip
        pair = [self.status, self.stop, *shown]
        compared = self._form.once_pictures_are_in(self.run).success(
            self.compare,
            inputs_kwargs={**self._form.controls, **self.sides},
            outputs=pair,
            trigger_mode="multiple",
            show_progress="hidden",
            api_name="compare",
            api_description="Make a video dense and sparse, and measure how far apart they are; or "
            "measure two of this session's videos.",
        )
        self._generate.then_find(compared)
        offering = {
            "fn": self.offer,
            "inputs": list(self.sides.values()),
            "outputs": list(self.sides.values()),
            "show_progress": "hidden",
            "api_visibility": "private",
        }
        compared.then(**offering)
        self.tab.select(**offering)
        page.load(**offering)
        resumed = page.load(
            self.resume,
            outputs=pair,
            show_progress="hidden",
            api_visibility="private",
        )
        self._generate.then_find(resumed)
        self.stop.click(
            self.cancel,
            inputs=[self.status, self.cell_status],
            outputs=[self.status],
            # a click is not lost because the one before it is still being answered.
            trigger_mode="multiple",
            show_progress="hidden",
            api_visibility="private",
        )
        self.time.click(
            self.time_again,
            inputs=[self.named],
            outputs=pair,
            show_progress="hidden",
            api_name="time_in_turns",
            api_description="Make a comparison again, in turns, for a speed: this session's last.",
        )
        self.heat.select(
            None,
            js=_CHOSEN_CELL,
            outputs=[self.step, self.layer],
            show_progress="hidden",
            api_visibility="private",
        )
        self.record.click(
            self.record_cell,
            inputs=[self.step, self.layer, self.named],
            outputs=[self.stop, *shown],
            show_progress="hidden",
            api_name="record_cell",
            api_description="Record one attention call of this session's last comparison.",
        )
        # one event for both: answers to two could overtake each other.
        gr.on(
            [self.head.change, self.order.change],
            self.draw_cell,
            inputs=[self.head, self.order, self.named_cell],
            outputs=[self.cell],
            trigger_mode="always_last",
            show_progress="hidden",
            api_visibility="private",
        )

    async def compare(
        self, request: gr.Request, side_a: Any, side_b: Any, **values: Any
    ) -> AsyncIterator[Updates]:
        """Compare two videos, making what is not there yet, and tell how it goes."""

        def ask(visit: Visit) -> Errand:
            asked: GenerateRequest | None = None
            warnings: list[str] = []
            if FORM in (side_a, side_b):
                asked, warnings = self._form.request(values, self._desk.images(request))

            def keep(pair: Pair) -> None:
                visit.pairs.put(pair.name, pair)

            if side_a == DENSE and asked is not None:
                if asked.method == "dense":
                    raise OptionError(
                        "dense against dense shows nothing. Hint: choose a sparse method."
                    )
                parts, work = 2, compare(asked, visit.next_stem(asked.prompt))
            else:
                parts, work = 1, self._two(visit, side_a, side_b, asked)
            expected = None
            if asked is not None:
                expected = self._desk.seconds(made_for(side_a, side_b, asked))
            return Errand(
                place=self._place,
                job=Job(and_keep(work, keep), parts=parts, expected=expected),
                done="Both videos are ready",
                show=self._shown,
                warnings=warnings,
            )

        async with aclosing(self._desk.run(request, self._place, ask)) as updates:
            async for update in updates:
                yield update

    def _two(
        self, visit: Visit, side_a: Any, side_b: Any, asked: GenerateRequest | None
    ) -> Callable[[Workbench, Job[Workbench, Any]], Pair]:
        """The job that compares kept videos with each other, or with the form's settings.

        Raises:
            OptionError: the sides cannot be compared.
        """
        if side_a == side_b:
            raise OptionError("both sides are the same. Hint: choose another video as A or B.")
        if side_a == DENSE:
            raise OptionError(
                "a dense side can only be made for the form's settings. Hint: show the video in "
                "Generate, take its settings, and choose the form's settings as B."
            )
        kept = visit.gallery.by_stem()
        sides: list[Clip | GenerateRequest] = []
        names = []
        for letter, name in zip("AB", (side_a, side_b), strict=True):
            if name == FORM and asked is not None:
                sides.append(asked)
                names.append(f"{letter}: {asked.method} · seed {asked.seed}")
                continue
            clip = visit.gallery.clip(kept[name]) if name in kept else None
            if clip is None:
                raise OptionError(f"there is no video {shown(name)}. Hint: choose {letter} anew.")
            sides.append(clip)
            names.append(f"{letter}: {draw.kept_name(kept[name])}")
        one, other = (each.request if isinstance(each, Clip) else each for each in sides)
        sizes = [f"{each.frames} frames of {each.width}x{each.height}" for each in (one, other)]
        if sizes[0] != sizes[1]:
            raise OptionError(
                f"A has {sizes[0]} and B {sizes[1]}. Hint: choose two of one size and length."
            )
        stem = visit.next_stem(other.prompt)
        return compare_sides((sides[0], sides[1]), (names[0], names[1]), stem)

    def offer(self, request: gr.Request, side_a: Any, side_b: Any) -> Updates:
        """Offer what the visit has made by now as sides."""
        held = {"side_a": side_a, "side_b": side_b}
        return self.offered(self._desk.visit(request), held=held)

    def offered(
        self, visit: Visit, *, held: Mapping[str, Any] = MappingProxyType({}), **chosen: str
    ) -> Updates:
        """The updates that offer the visit's videos.

        Args:
            visit: whose videos: the latest, and those that are a side, however old.
            held: what the sides are; a video that is gone gives way to what stands there at first.
            chosen: what they become.
        """
        sides = {**held, **chosen}
        kept = [
            (draw.kept_choice(each), each.record.stem)
            for place, each in enumerate(visit.gallery.find())
            if place < MOST_SHOWN or each.record.stem in sides.values()
        ]
        updates = {}
        for name, first in (("side_a", _FIRST_A), ("side_b", _FIRST_B)):
            choices = [*first, *kept]
            value = chosen.get(name)
            if value is None and name in held and all(held[name] != each for _, each in choices):
                value = first[0][1]
            update = {} if value is None else {"value": value}
            updates[self.sides[name]] = gr.update(choices=choices, **update)
        return updates

    async def time_again(self, request: gr.Request, shown: Any) -> AsyncIterator[Updates]:
        """Make both sides of the shown comparison again, in turns, and tell the speed."""

        def ask(visit: Visit) -> Errand:
            pair = visit.compared(shown)

            def keep(timed: Pair) -> None:
                visit.pairs.put(timed.name, timed)

            return Errand(
                place=self._place,
                job=Job(
                    and_keep(make_in_turns(pair), keep),
                    parts=2 * TURNS,
                    expected=self._desk.seconds([pair.dense.request, pair.sparse.request] * TURNS),
                ),
                done=f"Timed {TURNS} times in turns",
                # all of it: a window that was opened meanwhile may show another one.
                show=lambda timed: self._shown(timed, visit.cell_of(timed)),
            )

        async with aclosing(self._desk.run(request, self._place, ask)) as updates:
            async for update in updates:
                yield update

    async def resume(self, request: gr.Request) -> AsyncIterator[Updates]:
        """What a page that is opened again shows: the last comparison, and what runs."""
        visit = self._desk.visit(request)
        pair = visit.pairs.last
        # gradio empties what an event that says nothing would have told.
        yield ({self.status: gr.skip()} if pair is None else self._shown(pair, visit.cell_of(pair)))
        async with aclosing(self._desk.resume(request, "compare")) as updates:
            async for update in updates:
                yield update

    def cancel(self, request: gr.Request, status: Any = None, cell_status: Any = None) -> Any:
        """Stop the job that the tab shows, one of several that run or wait."""
        return self._desk.cancel(request, "compare", status, cell_status)

    async def record_cell(
        self, request: gr.Request, step: Any, layer: Any, shown: Any
    ) -> AsyncIterator[Updates]:
        """Record one cell of the shown comparison and tell how it goes."""
        place = Place("compare", self.cell_status, self.stop)

        def ask(visit: Visit) -> Errand:
            pair = visit.compared(shown)
            at = _place("step", step, len(pair.heads))
            of = _place("layer", layer, max(map(len, pair.heads), default=0))

            def keep(record: CellRecord) -> None:
                cell = Cell(pair.name, record)
                visit.cells.put(cell.name, cell)

            job: Job[Workbench, CellRecord] = Job(
                and_keep(record_cell(pair.sparse.request, at, of), keep),
                # up to that step, and all of it at the most.
                expected=self._desk.seconds([pair.sparse.request]),
            )

            def show(record: CellRecord) -> Updates:
                done = "Recorded"
                if record.step != at:
                    done = f"Recorded step {record.step + 1}, whose plan serves step {at + 1}"
                # timed again meanwhile, it has more figures.
                now = visit.pairs.get(pair.name) or pair
                return {
                    **self._shown(now, Cell(pair.name, record)),
                    self.cell_status: draw.status(job.snapshot(), done),
                }

            return Errand(place=place, job=job, done="Recorded", show=show)

        async with aclosing(self._desk.run(request, place, ask)) as updates:
            async for update in updates:
                yield update

    def _shown(self, pair: Pair, cell: Cell | None = None) -> Updates:
        """The updates that show a comparison, and a cell of it that was recorded."""
        # two chosen videos have neither.
        beside = bool(pair.timed)
        hidden = {
            self.named_cell: "", self.cell_controls: gr.update(visible=False), self.cell: "",
        }  # fmt: skip
        return {
            self.facts: draw.pair_facts(pair),
            self.timing: gr.update(visible=beside),
            self.viewer: draw.viewer(pair),
            self.links: draw.links(
                [
                    (f"Download {name.lower() if beside else name.partition(':')[0]}", clip.video)
                    for name, clip in zip(pair.names, (pair.dense, pair.sparse), strict=True)
                ]
            ),
            self.inside: gr.update(visible=beside),
            self.heat: draw.heat(pair),
            self.named: pair.name,
            self.cell_status: "",
            **(hidden if cell is None else self._cell_shown(cell)),
        }

    def _cell_shown(self, cell: Cell) -> Updates:
        """The updates that show a recorded cell, its first head."""
        record = cell.record
        order = "rowmajor" if record.order == "rowmajor" else "hilbert"
        return {
            self.named_cell: cell.name,
            self.cell_controls: gr.update(visible=True),
            self.head: gr.update(maximum=max(2, record.heads), value=1),
            self.order: order,
            self.cell: draw.cell_map(record, 0, order),
        }

    def draw_cell(self, request: gr.Request, head: Any, order: Any, shown: Any) -> Any:
        """Draw the shown cell's map of another head, or along another order."""
        cell = self._desk.visit(request).cells.get(shown)
        try:
            place = int(form_number("head", head) or 1)
            if cell is None and shown:
                raise OptionError("this cell was recorded too long ago. Hint: record it once more.")
        except OptionError as error:
            raise toast(error) from error
        if cell is None or order not in cell.record.maps:
            return gr.skip()
        return draw.cell_map(cell.record, min(max(place, 1), cell.record.heads) - 1, order)


def _place(name: str, value: object, count: int) -> int:
    """A number counted from 1, as an index.

    Raises:
        OptionError: not one of ``count``.
    """
    found = whole(name, value)
    if found is None or not 1 <= found <= count:
        raise OptionError(f"{name} must be a number from 1 to {count}, got {shown(value)}")
    return found - 1
