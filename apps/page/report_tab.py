"""The Report tab: a table and a curve over many prompts, and the command line's own report."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import gradio as gr

from vidsparse.apps.page import draw
from vidsparse.apps.page.desk import Desk, cancel_button, toast
from vidsparse.apps.page.errands import Errand, Place, Updates
from vidsparse.apps.page.form import Form
from vidsparse.apps.page.queue import Job
from vidsparse.apps.page.tasks import ReportFiles, report
from vidsparse.apps.page.uploads import read_prompt_file, read_prompt_lines
from vidsparse.apps.page.values import check_text, parameter, shown
from vidsparse.apps.page.visits import Visit
from vidsparse.apps.runs.comparison import dense_side
from vidsparse.errors import OptionError
from vidsparse.methods import METHODS
from vidsparse.pipelines.request import GenerateRequest
from vidsparse.report import PromptComparison

NOTHING = "nothing"


class ReportTab:
    """Controls and events of the tab.

    Args:
        desk: where jobs go.
        form: what is asked for; its prompt is not used here.
    """

    def __init__(self, desk: Desk, form: Form) -> None:
        self._desk = desk
        self._form = form
        examples = desk.host.models[0].example_prompts[:2]
        self.prompts = gr.Textbox(
            label="Prompts, one a line",
            info="the report is about these, with the form's settings; the form's own prompt is "
            "not used",
            value="\n".join(examples),
            lines=4,
            max_lines=12,
            elem_id="prompts",
            # for the page's script, by the name that errors call it and the one that it is kept by.
            elem_classes=["vs-field-prompts", "vs-field-prompt_lines"],
        )
        self.upload = gr.UploadButton(
            "Take them from a file", file_types=[".txt"], size="sm", elem_id="prompt-file"
        )
        with gr.Row():
            self.vary = gr.Dropdown(
                [NOTHING, *_options_of(form.controls["method"].value, calibrated=False)],
                value=NOTHING,
                label="Vary",
                info="one of the method's own options, to see a curve",
                min_width=140,
                elem_id="vary",
            )
            self.over = gr.Textbox(
                value="",
                label="Over",
                info="its values, with commas between",
                placeholder="0.5, 0.7, 0.9",
                min_width=140,
                visible=False,
                elem_id="over",
            )
        self.own = {"prompt_lines": self.prompts, "vary": self.vary, "over": self.over}
        with gr.Row(elem_classes="vs-run"):
            self.run = gr.Button("Make the report", variant="primary", elem_id="report", scale=3)
            self.stop = cancel_button("cancel-report")
            self.outlook = gr.HTML(elem_id="report-outlook", elem_classes="vs-expect")
        self.status = gr.HTML(
            draw.note(
                "Makes every prompt dense and with the form's settings, or with several values of "
                "one option, and draws quality over the attention computed. It ends with one page "
                "that holds all videos, to keep or to send."
            ),
            elem_id="report-status",
        )
        self._place = Place("report", self.status, self.stop)
        self.summary = gr.HTML(elem_id="report-summary")
        self.curve = gr.HTML(elem_id="report-curve")
        self.table = gr.HTML(elem_id="report-table")
        self.links = gr.HTML(elem_id="report-links")

    def connect(self, page: gr.Blocks) -> None:
        """Attach the events, once every control of the page is there."""
        shown = [self.status, self.stop, self.summary, self.curve, self.table, self.links]
        self._form.once_pictures_are_in(self.run).success(
            self.report,
            inputs_kwargs={**self._form.controls, **self.own},
            outputs=shown,
            show_progress="hidden",
            api_name="report",
            api_description="Compare over many prompts; `prompt` itself is not used.",
        )
        page.load(self.resume, outputs=shown, show_progress="hidden", api_visibility="private")
        self.vary.change(
            # hidden, it would be sent all the same, and refused where nobody sees it.
            lambda vary: (
                gr.update(visible=False, value="") if vary == NOTHING else gr.update(visible=True)
            ),
            inputs=[self.vary],
            outputs=[self.over],
            show_progress="hidden",
            api_visibility="private",
        )
        self.stop.click(
            self.cancel,
            inputs=[self.status],
            outputs=[self.status],
            # a click is not lost because the one before it is still being answered.
            trigger_mode="multiple",
            show_progress="hidden",
            api_visibility="private",
        )
        self.upload.upload(
            self.take_file,
            inputs=[self.upload],
            outputs=[self.prompts, self.status],
            show_progress="hidden",
            api_name="prompt_file",
            api_description="Read an uploaded prompt file.",
        )

    def vary_update(self, method: str, *, calibrated: bool) -> Any:
        """The options that can be varied, when another method or preset was chosen."""
        names = _options_of(method, calibrated=calibrated)
        # the browser keeps the one that was chosen where it is offered still.
        return gr.update(choices=[NOTHING, *names])

    def restored(
        self, values: Mapping[str, Any], method: str, *, calibrated: bool
    ) -> dict[Any, Any]:
        """The updates that put back what a browser kept of the tab's own fields."""
        vary = values.get("vary")
        if vary not in _options_of(method, calibrated=calibrated):
            vary = NOTHING
        updates = {
            self.vary: {**self.vary_update(method, calibrated=calibrated), "value": vary},
            self.over: gr.update(value=values.get("over") or "", visible=vary != NOTHING),
        }
        if isinstance(values.get("prompt_lines"), str):
            updates[self.prompts] = values["prompt_lines"]
        return updates

    def take_file(self, file: Any) -> dict[Any, Any]:
        """Put the prompts of an uploaded file into the box."""
        limits = self._desk.host.limits
        try:
            if not isinstance(file, str):
                raise OptionError("there is no file. Hint: upload a text file.")
            prompts = read_prompt_file(Path(file), megabytes=limits.upload, most=limits.prompts)
        except OptionError as error:
            raise toast(error) from error
        return {self.prompts: "\n".join(prompts), self.status: ""}

    async def report(
        self,
        request: gr.Request,
        prompt_lines: Any,
        vary: Any,
        over: Any,
        **values: Any,
    ) -> AsyncIterator[Updates]:
        """Run both sides over all prompts and tell how it goes."""

        def ask(visit: Visit) -> Errand:
            check_text("prompts", str(prompt_lines or ""))
            prompts = read_prompt_lines(
                str(prompt_lines or ""), most=self._desk.host.limits.prompts
            )
            settings = self.settings(values, vary, over, self._desk.images(request))
            about = draw.about_report(settings[0][1], len(prompts))
            rows: list[tuple[str, PromptComparison]] = []
            written: list[ReportFiles] = []

            def now() -> Updates:
                if written:
                    return self._shown(written[0], rows, about)
                return self._rows(rows[:], about)

            def announce(label: str, found: list[PromptComparison]) -> None:
                rows.extend((label, each) for each in found)
                # from the first on: whatever becomes of it, what is finished is there.
                visit.report = now

            folder = visit.next_stem("report")
            return Errand(
                place=self._place,
                job=Job(
                    report(settings, prompts, folder, announce, written.append),
                    parts=(len(prompts) + 1) * 2 * len(settings),
                    expected=self._desk.seconds(self.made_for(settings, len(prompts))),
                ),
                done="The report is ready",
                show=lambda _: now(),
                so_far=lambda: (len(rows), now),
            )

        async with aclosing(self._desk.run(request, self._place, ask)) as updates:
            async for update in updates:
                yield update

    async def resume(self, request: gr.Request) -> AsyncIterator[Updates]:
        """What a page that is opened again shows: the last report, and what runs."""
        visit = self._desk.visit(request)
        # gradio empties what an event that says nothing would have told.
        yield {self.status: gr.skip()} if visit.report is None else visit.report()
        async with aclosing(self._desk.resume(request, "report")) as updates:
            async for update in updates:
                yield update

    def cancel(self, request: gr.Request, status: Any = None) -> Any:
        """Stop the job that the tab shows, one of several that run or wait."""
        return self._desk.cancel(request, "report", status)

    def _shown(
        self, files: ReportFiles, rows: list[tuple[str, PromptComparison]], about: str
    ) -> Updates:
        """The updates that show a finished report, or how far it came and that it ended there."""
        ended = draw.note(f"{files.ended} They stand here and in the files below.")
        return {
            **self._rows(rows, about),
            self.summary: (ended if files.ended else "")
            + draw.report_summary(files.reports, about),
            self.links: draw.links(
                [
                    ("Download the report, one page", files.page),
                    ("Download everything, a zip", files.archive),
                ]
            ),
        }

    def _rows(self, rows: list[tuple[str, PromptComparison]], about: str) -> Updates:
        if not rows:
            return {}
        return {
            self.table: draw.report_table(rows, about),
            self.curve: draw.report_curve(rows, about),
            # those of an earlier report are not of these rows.
            self.summary: "",
            self.links: "",
        }

    def made_for(
        self, settings: Sequence[tuple[str, GenerateRequest]], prompts: int
    ) -> list[GenerateRequest]:
        """The videos that a report makes: every prompt dense once, and with each setting."""
        own = [request for _, request in settings]
        return [dense_side(own[0]), *own] * prompts

    def settings(
        self, values: Mapping[str, Any], vary: Any, over: Any, images: Mapping[str, Path] | None
    ) -> list[tuple[str, GenerateRequest]]:
        """The settings to report on, with their names.

        Raises:
            OptionError: a value that cannot be used.
        """
        method = str(values.get("method"))
        if method == "dense":
            raise OptionError("dense against dense shows nothing. Hint: choose a sparse method.")
        if vary in (None, "", NOTHING):
            if str(over or "").strip():
                raise OptionError(
                    f"there are values to vary over ({shown(over)}) and no option to vary. Hint: "
                    "choose one under Vary, or leave Over empty."
                )
            return [(method, self._form.settings({**values, "prompt": ""}, images))]
        names = _options_of(method, calibrated=bool(values.get("preset")))
        if method in METHODS and vary not in names:
            raise OptionError(
                f"{method} has no option {vary!r} to vary. Hint: choose from {', '.join(names)}."
            )
        if not str(over or "").strip():
            raise OptionError(f"there are no values for {vary}. Hint: write some under Over.")
        texts = list(dict.fromkeys(text.strip() for text in str(over).split(",") if text.strip()))
        most = self._desk.host.limits.settings
        if len(texts) > most:
            raise OptionError(
                f"a curve can have at most {most} settings here, got {len(texts)}. "
                "Hint: the host of the page sets this limit."
            )
        return [
            (
                f"{vary} {text}",
                self._form.settings(
                    {**values, "prompt": "", parameter(method, vary): text}, images
                ),
            )
            for text in texts
        ]


def _options_of(method: Any, *, calibrated: bool) -> list[str]:
    """The options that may be changed, by hand or beside a preset."""
    if method not in METHODS:
        return []
    if calibrated:
        return list(METHODS[method].free_options)
    return [field.name for field in METHODS[method].option_fields()]
