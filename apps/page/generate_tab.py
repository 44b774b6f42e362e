"""The Generate tab: a video, what it cost, and everything this visit has made."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import gradio as gr

from vidsparse.apps.page import draw
from vidsparse.apps.page.desk import Desk, alert, toast
from vidsparse.apps.page.form import Form
from vidsparse.apps.page.queue import Job
from vidsparse.apps.page.tasks import Clip, make_clip
from vidsparse.apps.page.visits import Visit
from vidsparse.apps.page.workbench import Workbench


class GenerateTab:
    """Controls and events of the tab; ``history`` is shared with the others.

    Args:
        desk: where jobs go.
        form: what is asked for.
    """

    def __init__(self, desk: Desk, form: Form) -> None:
        self._desk = desk
        self._form = form
        with gr.Row(elem_classes="vs-run"):
            self.run = gr.Button("Generate", variant="primary", elem_id="generate", scale=3)
            self.stop = gr.Button("Cancel", elem_id="cancel-generate", scale=1)
        self.status = gr.HTML(
            draw.note("Generate makes one video. Compare shows it beside the dense one."),
            elem_id="generate-status",
        )
        self.video = gr.Video(
            label="Video",
            interactive=False,
            autoplay=True,
            loop=True,
            height=420,
            buttons=["download"],
            visible=False,
            elem_id="video",
        )
        self.facts = gr.HTML(elem_id="generate-facts")
        with gr.Row(visible=False) as self.actions:
            self.links = gr.HTML()
            self.reuse = gr.Button(
                "Use these settings", size="md", scale=0, min_width=180, elem_id="use-settings"
            )
        self.history = gr.Gallery(
            label="This visit",
            columns=4,
            fit_columns=False,
            height="auto",
            object_fit="cover",
            allow_preview=False,
            interactive=False,
            buttons=[],
            visible=False,
            elem_id="history",
        )
        with gr.Accordion("Record", open=False):
            self.record = gr.JSON(show_label=False, elem_id="record")

    def connect(self) -> None:
        """Attach the events, once every control of the page is there."""
        self.run.click(
            self.generate,
            inputs_kwargs=self._form.controls,
            outputs=[
                self.status, self.video, self.facts, self.actions, self.links, self.history,
                self.record,
            ],
            show_progress="hidden",
            api_name="generate",
            api_description="Make a video. The record is the last of the answers.",
        )  # fmt: skip
        self.stop.click(
            self.cancel,
            outputs=[self.status],
            show_progress="hidden",
            api_name="cancel",
            api_description="Stop what this session has running or waiting.",
        )
        self.history.select(
            self.show,
            outputs=[self.video, self.facts, self.actions, self.links, self.record],
            # a second choice while the first is answered counts; gradio would drop it.
            trigger_mode="multiple",
            show_progress="hidden",
            api_visibility="private",
        )

    async def generate(self, request: gr.Request, **values: Any) -> AsyncIterator[dict[Any, Any]]:
        """Make one video and tell how it goes."""
        visit = self._desk.visit(request)
        try:
            asked, warnings = self._form.request(values, visit.images)
            job: Job[Workbench, Clip] = Job(make_clip(asked, visit.next_stem(asked.prompt)))
            async with aclosing(self._desk.follow(request, "generate", job)) as snapshots:
                async for snapshot in snapshots:
                    if not snapshot.finished:
                        yield {self.status: draw.status(snapshot, warnings=warnings)}
            if job.error is not None:
                raise job.error
        except Exception as error:
            yield {self.status: alert(error)}
            raise toast(error) from error
        status = draw.status(job.snapshot(), "Your video is ready", warnings)
        if job.result is None:
            yield {self.status: status}
            return
        visit.remember(job.result)
        yield {self.status: status, **self.shown(visit, job.result), **self.history_update(visit)}

    def cancel(self, request: gr.Request) -> Any:
        """Stop what this visit has running or waiting in this tab."""
        asked = self._desk.cancel(self._desk.visit(request), "generate")
        return gr.skip() if asked else draw.note("Nothing is running.")

    def show(self, request: gr.Request, event: gr.SelectData) -> dict[Any, Any]:
        """Show a video of the history again."""
        visit = self._desk.visit(request)
        index = event.index
        if not isinstance(index, int) or not 0 <= index < len(visit.clips):
            return {self.record: gr.skip()}
        return self.shown(visit, visit.clips[index])

    def shown(self, visit: Visit, clip: Clip) -> dict[Any, Any]:
        """The updates that show ``clip``."""
        visit.shown = clip
        return {
            self.video: gr.update(value=str(clip.video), visible=True),
            self.facts: draw.clip_facts(clip, visit.dense_seconds(clip.request))
            + draw.note(f"{clip.request.prompt} — {draw.settings_line(clip.request)}"),
            self.actions: gr.update(visible=True),
            self.links: draw.links(
                [
                    ("Download video", clip.video),
                    ("Download record", clip.video.with_suffix(".json")),
                ]
            ),
            self.record: clip.record,
        }

    def history_update(self, visit: Visit) -> dict[Any, Any]:
        """The updates that bring the history up to date."""
        return {
            self.history: gr.update(
                value=[(str(clip.poster), draw.clip_caption(clip)) for clip in visit.clips],
                visible=bool(visit.clips),
                selected_index=None,
            )
        }
