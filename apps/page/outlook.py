"""What a run will take and its place in line, said beside each button before it is started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gradio as gr

from vidsparse.apps.page import draw
from vidsparse.apps.page.compare_tab import CompareTab, made_for
from vidsparse.apps.page.desk import Desk
from vidsparse.apps.page.form import Form
from vidsparse.apps.page.generate_tab import GenerateTab, count_of
from vidsparse.apps.page.report_tab import ReportTab
from vidsparse.apps.page.uploads import read_prompt_lines
from vidsparse.errors import VidsparseError
from vidsparse.pipelines.request import GenerateRequest

# seconds between two looks while there is a line to wait in; else nobody is asked. The first look
# is when a job that was just asked for is in the line, or one that was called off has stopped.
LOOK_AGAIN, LOOK_FIRST = 5, 1

# what changes nothing of how much there is to compute.
_NO_MATTER = ("prompt", "negative_prompt", "seed", "fps")


class Outlook:
    """Events that keep the line beside the buttons true.

    Args:
        desk: whose devices have measured what was made.
        form: the settings.
        generate: its button, and how many videos it makes.
        compare: its button and sides.
        report: its button, prompts and settings.
    """

    def __init__(
        self, desk: Desk, form: Form, generate: GenerateTab, compare: CompareTab, report: ReportTab
    ) -> None:
        self._desk = desk
        self._form = form
        self._tabs = (generate, compare, report)
        self._asked = {
            **form.controls, "videos": form.videos, **compare.sides, **report.own,
        }  # fmt: skip
        self._timer = gr.Timer(LOOK_AGAIN, active=False)
        # not the line itself: the job need not be in the queue yet, nor out of it. Without the
        # server, and before the tabs' own events: gradio begins a click's next event when the one
        # before has ended.
        gr.on(
            [button.click for tab in self._tabs for button in (tab.run, tab.stop)],
            None,
            js=f"() => ({{ __type__: 'update', value: {LOOK_FIRST}, active: true }})",
            outputs=[self._timer],
            show_progress="hidden",
            api_visibility="private",
        )

    def connect(self, page: gr.Blocks) -> None:
        """Attach the events, once every control of the page is there."""
        generate, compare, report = self._tabs
        every = self._form.controls.items()
        controls = [control for name, control in every if name not in _NO_MATTER]
        controls += [self._form.videos, *compare.sides.values(), *report.own.values()]
        gr.on(
            [
                *(control.change for control in controls),
                self._timer.tick,
                page.load,
                # what was made is measured, and its place in line is free.
                *(area.change for area in (generate.facts, compare.facts, report.summary)),
            ],
            self.tell,
            inputs_kwargs=self._asked,
            outputs=[*(tab.outlook for tab in self._tabs), self._timer],
            # of many changes at once, as another model brings them, the last one is answered.
            trigger_mode="always_last",
            show_progress="hidden",
            api_visibility="private",
        )
        # each job brings its own news, and what one that ends says of Cancel can come after what
        # the next one says: then nothing else would ever put it right.
        self._timer.tick(
            self._desk.cancels,
            outputs=[tab.stop for tab in self._tabs],
            show_progress="hidden",
            api_visibility="private",
        )

    def tell(
        self,
        videos: Any,
        side_a: Any,
        side_b: Any,
        prompt_lines: Any,
        vary: Any,
        over: Any,
        **values: Any,
    ) -> dict[Any, Any]:
        """Time, memory and place in line of what each button would start now."""
        ahead, wait = self._desk.queue.outlook()
        generate, compare, report = self._tabs

        def said(make: Any) -> str:
            try:
                made: Sequence[GenerateRequest] = make()
            except VidsparseError:
                # the button says what is wrong, and once is enough.
                return ""
            if not made:
                return ""
            return draw.outlook(self._desk.estimate(made), len(made), ahead, wait)

        def settings() -> GenerateRequest:
            # what a picture shows takes no longer than what another does.
            return self._form.settings({**values, "prompt": ""}, None)

        def over_prompts() -> list[GenerateRequest]:
            most = self._desk.host.limits.prompts
            prompts = read_prompt_lines(str(prompt_lines or ""), most=most)
            return report.made_for(report.settings(values, vary, over, None), len(prompts))

        return {
            generate.outlook: said(lambda: [settings()] * count_of(videos)),
            compare.outlook: said(lambda: made_for(side_a, side_b, settings())),
            report.outlook: said(over_prompts),
            # a model that loads is nobody's job, and yet there is something to wait for.
            self._timer: gr.Timer(LOOK_AGAIN, active=ahead > 0 or wait is None),
        }
