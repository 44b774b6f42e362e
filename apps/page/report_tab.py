"""The Report tab: a table and a curve over many prompts, and the command line's own report."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import gradio as gr

from vidsparse.apps.page import draw
from vidsparse.apps.page.desk import Desk, alert, toast
from vidsparse.apps.page.form import Form, check_text, parameter
from vidsparse.apps.page.queue import Job
from vidsparse.apps.page.tasks import ReportFiles, report
from vidsparse.apps.page.uploads import read_prompt_file, read_prompts
from vidsparse.apps.page.workbench import Workbench
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
            value="\n".join(examples),
            lines=4,
            max_lines=12,
            elem_id="prompts",
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
                elem_id="over",
            )
        with gr.Row(elem_classes="vs-run"):
            self.run = gr.Button("Make the report", variant="primary", elem_id="report", scale=3)
            self.stop = gr.Button("Cancel", elem_id="cancel-report", scale=1)
        self.status = gr.HTML(elem_id="report-status")
        self.summary = gr.HTML(elem_id="report-summary")
        self.curve = gr.HTML(elem_id="report-curve")
        self.table = gr.HTML(elem_id="report-table")
        self.links = gr.HTML(elem_id="report-links")

    def connect(self) -> None:
        """Attach the events, once every control of the page is there."""
        own = {"prompt_lines": self.prompts, "vary": self.vary, "over": self.over}
        self.run.click(
            self.report,
            inputs_kwargs={**self._form.controls, **own},
            outputs=[self.status, self.summary, self.curve, self.table, self.links],
            show_progress="hidden",
            api_name="report",
            api_description="Compare over many prompts; `prompt` itself is not used.",
        )
        self.stop.click(
            self.cancel,
            outputs=[self.status],
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
        return gr.update(choices=[NOTHING, *names], value=NOTHING)

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
    ) -> AsyncIterator[dict[Any, Any]]:
        """Run both sides over all prompts and tell how it goes."""
        visit = self._desk.visit(request)
        rows: list[tuple[str, PromptComparison]] = []
        shown = 0
        try:
            check_text("prompts", str(prompt_lines or ""))
            prompts = read_prompts(str(prompt_lines or ""), most=self._desk.host.limits.prompts)
            settings = self._settings(values, vary, over, visit.images)

            def announce(place: int, found: list[PromptComparison]) -> None:
                rows.extend((settings[place][0], each) for each in found)

            requests = [one for _, one in settings]
            folder = visit.next_stem("report")
            parts = (len(prompts) + 1) * 2 * len(requests)
            job: Job[Workbench, list[ReportFiles]] = Job(
                report(requests, prompts, folder, announce), parts=parts
            )
            async with aclosing(self._desk.follow(request, "report", job)) as snapshots:
                async for snapshot in snapshots:
                    update: dict[Any, Any] = {self.status: draw.status(snapshot)}
                    if len(rows) > shown:
                        shown = len(rows)
                        update |= self._rows(rows[:shown])
                    if not snapshot.finished:
                        yield update
            if job.error is not None:
                raise job.error
        except Exception as error:
            yield {self.status: alert(error)}
            raise toast(error) from error
        status = {self.status: draw.status(job.snapshot(), "The report is ready")}
        if job.result is None:
            yield {**status, **self._rows(rows)}
            return
        visit.reports = job.result
        named = list(zip([label for label, _ in settings], job.result, strict=True))
        yield {
            **status,
            **self._rows(rows),
            self.summary: draw.report_summary(named),
            self.links: draw.links(
                [
                    (f"{path.name}{f' ({label})' if len(named) > 1 else ''}", path)
                    for label, made in named
                    for path in made.paths
                ]
            ),
        }

    def cancel(self, request: gr.Request) -> Any:
        """Stop what this visit has running or waiting in this tab."""
        asked = self._desk.cancel(self._desk.visit(request), "report")
        return gr.skip() if asked else draw.note("Nothing is running.")

    def _rows(self, rows: list[tuple[str, PromptComparison]]) -> dict[Any, Any]:
        if not rows:
            return {}
        return {self.table: draw.report_table(rows), self.curve: draw.report_curve(rows)}

    def _settings(
        self, values: Mapping[str, Any], vary: Any, over: Any, images: Mapping[str, Path]
    ) -> list[tuple[str, GenerateRequest]]:
        """The settings to report on, with their names.

        Raises:
            OptionError: a value that cannot be used.
        """
        method = str(values.get("method"))
        if method == "dense":
            raise OptionError("dense against dense shows nothing. Hint: choose a sparse method.")
        if vary in (None, "", NOTHING) or not str(over or "").strip():
            return [(method, self._form.settings({**values, "prompt": ""}, images))]
        names = _options_of(method, calibrated=bool(values.get("preset")))
        if method in METHODS and vary not in names:
            raise OptionError(
                f"{method} has no option {vary!r} to vary. Hint: choose from {', '.join(names)}."
            )
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
