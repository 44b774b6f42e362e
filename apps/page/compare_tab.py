"""The Compare tab: dense and sparse in step, where they differ, and a look into one cell."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import gradio as gr

from vidsparse.apps.page import draw
from vidsparse.apps.page.desk import Desk, alert, toast
from vidsparse.apps.page.form import Form, number, shown, whole
from vidsparse.apps.page.generate_tab import GenerateTab
from vidsparse.apps.page.queue import Job
from vidsparse.apps.page.tasks import Pair, compare, record_cell
from vidsparse.apps.page.workbench import Workbench
from vidsparse.errors import OptionError
from vidsparse.probe import CellRecord

# a cell chosen in the density map is an event of the component around it, which puts the cell into
# the fields below without asking the server: answers to quick choices could come out of turn.
_FORWARD_CELL = """
element.addEventListener('vs-cell', () => trigger('select'));
"""
_CHOSEN_CELL = "() => document.querySelector('vs-heat').chosen.map((place) => place + 1)"


class CompareTab:
    """Controls and events of the tab.

    Args:
        desk: where jobs go.
        form: what is asked for.
        generate: whose history the two videos join.
    """

    def __init__(self, desk: Desk, form: Form, generate: GenerateTab) -> None:
        self._desk = desk
        self._form = form
        self._generate = generate
        with gr.Row(elem_classes="vs-run"):
            self.run = gr.Button(
                "Compare with dense", variant="primary", elem_id="compare", scale=3
            )
            self.stop = gr.Button("Cancel", elem_id="cancel-compare", scale=1)
        self.status = gr.HTML(elem_id="compare-status")
        self.facts = gr.HTML(elem_id="compare-facts")
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
            with gr.Row(equal_height=True):
                self.step = gr.Number(value=1, label="Step", step=1, min_width=90, elem_id="step")
                self.layer = gr.Number(
                    value=1, label="Layer", step=1, min_width=90, elem_id="layer"
                )
                self.record = gr.Button("Record this cell", elem_id="record-cell")
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

    def connect(self) -> None:
        """Attach the events, once every control of the page is there."""
        self.run.click(
            self.compare,
            inputs_kwargs=self._form.controls,
            outputs=[
                self.status, self.facts, self.viewer, self.links, self.inside, self.heat,
                self.cell_controls, self.cell, self.cell_status, self._generate.history,
            ],
            show_progress="hidden",
            api_name="compare",
            api_description="Make a video dense and sparse, and measure how far apart they are.",
        )  # fmt: skip
        self.stop.click(
            self.cancel,
            outputs=[self.status],
            show_progress="hidden",
            api_visibility="private",
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
            inputs=[self.step, self.layer],
            outputs=[
                self.cell_status, self.cell_controls, self.head, self.order, self.cell,
            ],
            show_progress="hidden",
            api_name="record_cell",
            api_description="Record one attention call of this session's last comparison.",
        )  # fmt: skip
        for control in (self.head, self.order):
            control.change(
                self.draw_cell,
                inputs=[self.head, self.order],
                outputs=[self.cell],
                show_progress="hidden",
                api_visibility="private",
            )

    async def compare(self, request: gr.Request, **values: Any) -> AsyncIterator[dict[Any, Any]]:
        """Make both videos and tell how it goes."""
        visit = self._desk.visit(request)
        try:
            asked, warnings = self._form.request(values, visit.images)
            if asked.method == "dense":
                raise OptionError(
                    "dense against dense shows nothing. Hint: choose a sparse method."
                )
            work = compare(asked, visit.next_stem(asked.prompt))
            job: Job[Workbench, Pair] = Job(work, parts=2)
            async with aclosing(self._desk.follow(request, "compare", job)) as snapshots:
                async for snapshot in snapshots:
                    if not snapshot.finished:
                        yield {self.status: draw.status(snapshot, warnings=warnings)}
            if job.error is not None:
                raise job.error
        except Exception as error:
            yield {self.status: alert(error)}
            raise toast(error) from error
        status = draw.status(job.snapshot(), "Both videos are ready", warnings)
        pair = job.result
        if pair is None:
            yield {self.status: status}
            return
        visit.pair, visit.cell = pair, None
        visit.remember(pair.dense)
        visit.remember(pair.sparse)
        yield {
            self.status: status,
            self.facts: draw.pair_facts(pair),
            self.viewer: draw.viewer(pair),
            self.links: draw.links(
                [("Download dense", pair.dense.video), ("Download sparse", pair.sparse.video)]
            ),
            self.inside: gr.update(visible=True),
            self.heat: draw.heat(pair),
            self.cell_controls: gr.update(visible=False),
            self.cell: "",
            self.cell_status: "",
            **self._generate.history_update(visit),
        }

    def cancel(self, request: gr.Request) -> Any:
        """Stop what this visit has running or waiting in this tab."""
        asked = self._desk.cancel(self._desk.visit(request), "compare")
        return gr.skip() if asked else draw.note("Nothing is running.")

    async def record_cell(
        self, request: gr.Request, step: Any, layer: Any
    ) -> AsyncIterator[dict[Any, Any]]:
        """Record one cell of the last comparison and tell how it goes."""
        visit = self._desk.visit(request)
        try:
            pair = visit.pair
            if pair is None:
                raise OptionError("there is no comparison yet. Hint: compare with dense first.")
            at = _place("step", step, len(pair.heads))
            of = _place("layer", layer, max(map(len, pair.heads), default=0))
            job: Job[Workbench, CellRecord] = Job(record_cell(pair.sparse.request, at, of))
            async with aclosing(self._desk.follow(request, "compare", job)) as snapshots:
                async for snapshot in snapshots:
                    if not snapshot.finished:
                        yield {self.cell_status: draw.status(snapshot)}
            if job.error is not None:
                raise job.error
        except Exception as error:
            yield {self.cell_status: alert(error)}
            raise toast(error) from error
        record = job.result
        if record is None:
            yield {self.cell_status: draw.status(job.snapshot())}
            return
        visit.cell = record
        order = "rowmajor" if record.order == "rowmajor" else "hilbert"
        done = "Recorded"
        if record.step != at:
            done = f"Recorded step {record.step + 1}, whose plan serves step {at + 1}"
        yield {
            self.cell_status: draw.status(job.snapshot(), done),
            self.cell_controls: gr.update(visible=True),
            self.head: gr.update(maximum=max(2, record.heads), value=1),
            self.order: order,
            self.cell: draw.cell_map(record, 0, order),
        }

    def draw_cell(self, request: gr.Request, head: Any, order: Any) -> Any:
        """Draw the recorded cell's map of another head, or along another order."""
        record = self._desk.visit(request).cell
        try:
            place = int(number("head", head) or 1)
        except OptionError as error:
            raise toast(error) from error
        if record is None or order not in record.maps:
            return gr.skip()
        return draw.cell_map(record, min(max(place, 1), record.heads) - 1, order)


def _place(name: str, value: object, count: int) -> int:
    """A number counted from 1, as an index.

    Raises:
        OptionError: not one of ``count``.
    """
    found = whole(name, value)
    if found is None or not 1 <= found <= count:
        raise OptionError(f"{name} must be a number from 1 to {count}, got {shown(value)}")
    return found - 1
