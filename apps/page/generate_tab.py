"""The Generate tab: a video, what it cost, and everything this visit has made."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr

from vidsparse.apps.page import draw
from vidsparse.apps.page.desk import Desk, cancel_button
from vidsparse.apps.page.errands import Errand, Place, Updates
from vidsparse.apps.page.form import Form
from vidsparse.apps.page.gallery import MOST_SHOWN, Kept
from vidsparse.apps.page.opening import opening
from vidsparse.apps.page.queue import Job
from vidsparse.apps.page.tasks import Clip, make_clips
from vidsparse.apps.page.values import check_seed, shown, whole
from vidsparse.apps.page.visits import Visit
from vidsparse.errors import OptionError

# of one click, with a seed each.
MOST_VIDEOS = 8


def count_of(videos: object) -> int:
    """How many videos are asked for.

    Raises:
        OptionError: more or fewer than one click makes.
    """
    count = whole("videos", videos)
    if count is None or not 1 <= count <= MOST_VIDEOS:
        raise OptionError(f"videos must be a number from 1 to {MOST_VIDEOS}, got {shown(videos)}")
    return count


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
            self.stop = cancel_button("cancel-generate")
            self.outlook = gr.HTML(elem_id="generate-outlook", elem_classes="vs-expect")
        self.status = gr.HTML(elem_id="generate-status")
        self._place = Place("generate", self.status, self.stop)
        self.opening = gr.HTML(draw.opening(opening()), elem_id="opening")
        self.video = gr.Video(
            label="Video",
            # it would lie over the picture
            show_label=False,
            interactive=False,
            autoplay=True,
            loop=True,
            height=420,
            # its download is among the links
            buttons=[],
            visible=False,
            elem_id="video",
        )
        self.facts = gr.HTML(elem_id="generate-facts")
        # the video that this window shows: another one of the visitor may have made a later one.
        self.named = gr.Textbox("", visible="hidden", show_label=False)
        with gr.Row(visible=False, elem_classes="vs-actions") as self.actions:
            self.links = gr.HTML()
            self.reuse = gr.Button("Use these settings", size="md", elem_id="use-settings")
            self.compare = gr.Button("Compare this one", size="md", elem_id="compare-this")
        self.search = gr.Textbox(
            label="Find a video",
            placeholder="words of its prompt, or a method",
            visible=False,
            elem_id="search",
        )
        self.history = gr.Gallery(
            label="Your videos",
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
        with gr.Accordion("Record", open=False, visible=False) as self.told:
            self.record = gr.JSON(show_label=False, elem_id="record")

    def connect(self, page: gr.Blocks) -> None:
        """Attach the events, once every control of the page is there."""
        result = [
            self.video, self.facts, self.actions, self.links, self.opening, self.told, self.record,
            self.named,
        ]  # fmt: skip
        generated = self._form.once_pictures_are_in(self.run).success(
            self.generate,
            inputs_kwargs={**self._form.controls, "videos": self._form.videos},
            outputs=[self.status, self.stop, *result],
            # more may be asked for while one runs; they wait in the queue.
            trigger_mode="multiple",
            show_progress="hidden",
            api_name="generate",
            api_description="Make a video. The record is among the answers.",
        )
        self.then_find(generated)
        resumed = page.load(
            self.resume,
            outputs=[self.status, self.stop, *result, self.history, self.search],
            show_progress="hidden",
            api_visibility="private",
        )
        self.then_find(resumed)
        self.stop.click(
            self.cancel,
            inputs=[self.status],
            outputs=[self.status],
            # a click is not lost because the one before it is still being answered.
            trigger_mode="multiple",
            show_progress="hidden",
            api_name="cancel",
            api_description="Stop the first of what this session has running or waiting.",
        )
        self.history.select(
            self.show,
            outputs=result,
            # a second choice while the first is answered counts; gradio would drop it.
            trigger_mode="multiple",
            show_progress="hidden",
            api_visibility="private",
        )
        self.search.change(
            self.find,
            inputs=[self.search],
            outputs=[self.history, self.search],
            trigger_mode="always_last",
            show_progress="hidden",
            api_visibility="private",
        )

    async def generate(
        self, request: gr.Request, videos: Any, **values: Any
    ) -> AsyncIterator[Updates]:
        """Make a video, or some with a seed each, and tell how it goes."""

        def ask(visit: Visit) -> Errand:
            first, warnings = self._form.request(values, self._desk.images(request))
            count = count_of(videos)
            check_seed(first.seed + count - 1)
            asked = [
                (replace(first, seed=first.seed + place), visit.next_stem(first.prompt))
                for place in range(count)
            ]
            made: list[Clip] = []

            def keep(clip: Clip) -> None:
                visit.shown = clip
                made.append(clip)

            return Errand(
                place=self._place,
                job=Job(
                    make_clips(asked, keep),
                    parts=count,
                    expected=self._desk.seconds([each for each, _ in asked]),
                ),
                done="Your video is ready" if count == 1 else f"Your {count} videos are ready",
                show=lambda clips: self.shown(clips[-1]),
                warnings=warnings,
                so_far=lambda: (len(made), lambda: self.shown(made[-1]) if made else {}),
            )

        async with aclosing(self._desk.run(request, self._place, ask)) as updates:
            async for update in updates:
                yield update

    async def resume(self, request: gr.Request) -> AsyncIterator[Updates]:
        """What a page that is opened again shows: the videos, the last one, and what runs."""
        visit = self._desk.visit(request)
        shown = {} if visit.shown is None else self.shown(visit.shown)
        yield {**self._found_update(visit, ""), **shown}
        async with aclosing(self._desk.resume(request, "generate")) as updates:
            async for update in updates:
                yield update

    def cancel(self, request: gr.Request, status: Any = None) -> Any:
        """Stop the job that the tab shows, one of several that run or wait."""
        return self._desk.cancel(request, "generate", status)

    def then_find(self, event: Any) -> None:
        """Once ``event`` has ended, show what it made among what was searched for."""
        event.then(
            self.find,
            inputs=[self.search],
            outputs=[self.history, self.search],
            show_progress="hidden",
            api_visibility="private",
        )

    def find(self, request: gr.Request, search: Any) -> Updates:
        """Show the kept videos that a search finds."""
        return self._found_update(self._desk.visit(request), search)

    def show(self, request: gr.Request, event: gr.SelectData) -> Updates:
        """Show a kept video again."""
        visit = self._desk.visit(request)
        # by its picture: the place counts among what an earlier search may have found.
        kept = None
        match event.value:
            case {"image": {"path": str(picture)}}:
                kept = visit.gallery.by_stem().get(Path(picture).stem)
        clip = None if kept is None else visit.gallery.clip(kept)
        if clip is None:
            return {self.record: gr.skip()}
        visit.shown = clip
        return self.shown(clip)

    def shown(self, clip: Clip) -> Updates:
        """The updates that show ``clip``."""
        return {
            # it has made its point once there is a video of one's own.
            self.opening: gr.update(value="", visible=False),
            self.video: gr.update(value=str(clip.video), visible=True),
            self.facts: draw.clip_facts(clip)
            + draw.note(f"{clip.request.prompt} — {draw.settings_line(clip.request)}"),
            self.actions: gr.update(visible=True),
            self.links: draw.links(
                [
                    ("Download video", clip.video),
                    ("Download record", clip.video.with_suffix(".json")),
                ]
            ),
            self.told: gr.update(visible=True),
            self.record: clip.record,
            self.named: clip.video.stem,
        }

    def _found(self, visit: Visit, search: Any) -> list[Kept]:
        return visit.gallery.find(search if isinstance(search, str) else "")

    def _found_update(self, visit: Visit, search: Any) -> Updates:
        found = self._found(visit, search)
        more = f", {MOST_SHOWN} of {len(found)} shown" if len(found) > MOST_SHOWN else ""
        # a search that finds nothing stays, to be changed.
        there = bool(found) or bool(search)
        return {
            self.history: gr.update(
                value=[
                    (str(each.record.with_suffix(".jpg")), draw.kept_caption(each))
                    for each in found[:MOST_SHOWN]
                ],
                label=f"Your videos{more}" if found else "No video is like that",
                visible=there,
                selected_index=None,
            ),
            self.search: gr.update(visible=there),
        }
