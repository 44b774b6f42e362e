"""The page as a whole: header, form, tabs, look, and the server under it."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from vidsparse._version import __version__
from vidsparse.apps.page import draw, studies
from vidsparse.apps.page.choices import Choices
from vidsparse.apps.page.compare_tab import DENSE, FORM, CompareTab
from vidsparse.apps.page.desk import Desk, toast
from vidsparse.apps.page.fields import IMAGES
from vidsparse.apps.page.form import Form
from vidsparse.apps.page.generate_tab import GenerateTab
from vidsparse.apps.page.guard import Guard
from vidsparse.apps.page.headers import PageHeaders
from vidsparse.apps.page.listeners import Ears, LettingGo
from vidsparse.apps.page.logins import SlowLogins
from vidsparse.apps.page.offers import examples_of, takes
from vidsparse.apps.page.outlook import Outlook
from vidsparse.apps.page.report_tab import ReportTab
from vidsparse.apps.page.returns import Returns
from vidsparse.apps.page.speeds import first_speed, speed_text
from vidsparse.apps.page.start import THIS_MACHINE
from vidsparse.apps.page.uploads import CLEAN_AFTER, CLEAN_EVERY, kept_picture, rewrite_image
from vidsparse.apps.page.values import shown
from vidsparse.errors import OptionError, UnsupportedError, VidsparseError
from vidsparse.logs import logger

_HERE = Path(__file__).parent
# where a page with a public address has its scripts from, as gradio has written it.
SHARED_FROM = "https://gradio.s3-us-west-2.amazonaws.com"
# gradio keeps all controls of a session, half a megabyte, until so many others have come after it;
# ten thousand by its own default. A session that comes back later begins with fresh ones.
MOST_SESSIONS = 200
# seconds between two looks of gradio for calls. By its own default it looks a thousand times a
# second, for which a page that nobody uses takes a twentieth of a core.
_LOOKS_EVERY = 0.02
# what gradio says of a value that its session has no choice for: of a window whose session gave way
# to others it knows only what a new one is offered.
_NO_CHOICE = re.compile(
    r"Value:? (.*?) (?:\(.*\) )?is (?:not in the list of|[a-z]+ than m)", re.DOTALL
)
_SYSTEM_FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
_MONO_FONTS = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"]


class Blocks(gr.Blocks):  # type: ignore[misc]
    """Gradio's page, where a call that makes no sense is a line in the log and no traceback."""

    async def preprocess_data(self, *args: Any, **kwargs: Any) -> Any:
        """As Gradio does it; what fails here the caller sent, and is no traceback in the log."""
        try:
            return await super().preprocess_data(*args, **kwargs)
        except Exception as error:
            text = "the values do not fit what this page asks for"
            if isinstance(error, gr.Error):
                text = error.message
            if value := _NO_CHOICE.match(text):
                text = (
                    f"{html.escape(shown(value[1]), quote=False)} is none of the choices that this "
                    "page knows of this window. Hint: reload the page; your videos, settings and "
                    "jobs are kept."
                )
            line = " ".join(str(error).split())[:200]
            logger.info("values were not understood: %s: %s", type(error).__name__, line)
            raise gr.Error(text, print_exception=False) from None

    async def call_function(self, block_fn: Any, *args: Any, **kwargs: Any) -> Any:
        """As Gradio does it; what runs in browsers alone has no function to call."""
        if not block_fn.fn:
            raise toast(OptionError("this step runs in its browser, and answers nobody"))
        return await super().call_function(block_fn, *args, **kwargs)


def build(desk: Desk) -> gr.Blocks:
    """The page, ready to be served.

    Args:
        desk: the host's settings, the queue and the visits.
    """
    with Blocks(
        title="vidsparse",
        analytics_enabled=False,
        fill_width=False,
        delete_cache=(CLEAN_EVERY, CLEAN_AFTER),
    ) as page:
        gr.HTML(draw.head(studies=f"./{studies.PATH}"))
        with gr.Row(equal_height=False, elem_id="work"):
            with gr.Column(scale=4, min_width=330, elem_id="form"):
                gr.HTML(draw.fold(), elem_id="fold")
                form = Form(desk.host)
                first = desk.host.models[0]
                form.speed.value = first_speed(form, first)
                form.speed_facts.value = draw.note(speed_text(form, first, form.speed.value))
            with gr.Column(scale=7, min_width=330), gr.Tabs(elem_id="tabs") as tabs:
                with gr.Tab("Generate", id="generate"):
                    generate = GenerateTab(desk, form)
                with gr.Tab("Compare", id="compare") as compare_tab:
                    compare = CompareTab(desk, form, generate, compare_tab)
                with gr.Tab("Report", id="report"):
                    report = ReportTab(desk, form)
        gr.HTML(draw.note(_footer(desk)), elem_id="foot")
        outlook = Outlook(desk, form, generate, compare, report)
        for tab in (generate, compare, report, outlook):
            tab.connect(page)
        _connect_form(page, desk, form, generate, report)
        _connect_compare_this(desk, generate, compare, tabs)
        page.unload(_ender(desk))
    with page.route("Studies", f"/{studies.PATH}", show_in_navbar=False):
        gr.HTML(draw.head(back="./"))
        gr.HTML(studies.studies_page(form), elem_id="studies")
        gr.HTML(draw.note(_footer(desk)))
    for event in page.fns.values():
        # what is to be seen of a job the page draws itself. A browser finds all that may show
        # gradio's progress anew at every event, though it is hidden there.
        event.show_progress_on = []
    # every job waits in the desk's queue; gradio's own only carries the answers.
    page.queue(default_concurrency_limit=None, api_open=False)
    page._queue.sleep_when_free = _LOOKS_EVERY
    return page


def _footer(desk: Desk) -> str:
    limits, devices = desk.host.limits, ", ".join(desk.host.devices)
    return (
        f"vidsparse {__version__} on {devices}, one job at a time on each. At most "
        f"{limits.frames} frames, {limits.side} pixels a side, {limits.steps} steps, "
        f"{limits.prompts} prompts a report. Videos stay in the output folder."
    )


def _connect_form(
    page: gr.Blocks, desk: Desk, form: Form, generate: GenerateTab, report: ReportTab
) -> None:
    choices = Choices(desk, form, report)
    choices.connect(page, generate.reuse, generate.named)

    samples = {each.name: [sample[0] for sample in examples_of(each)] for each in desk.host.models}
    form.examples.click(
        # without the server, whose answer a click on Generate would overtake.
        None,
        js=f"(place, model, prompt) => ({json.dumps(samples)})[model]?.[place] ?? prompt",
        inputs=[form.examples, form.controls["model"], form.controls["prompt"]],
        outputs=[form.controls["prompt"]],
        show_progress="hidden",
        api_visibility="private",
    )
    for name, (upload, preview) in form.images.items():
        place = json.dumps(name)
        taken = upload.change(
            image_taker(desk, name),
            # whoever presses a button meanwhile is to have this picture in what is made.
            js=f"(file) => vidsparseLooking({place}, file)",
            inputs=[upload],
            outputs=[preview],
            show_progress="hidden",
            api_name=name,
            api_description=f"Take a picture as this session's {IMAGES[name].lower()}.",
        )
        taken.success(
            None,
            js=f"(shown) => {{ vidsparseLooked({place}, true, shown); }}",
            inputs=[preview],
            api_visibility="private",
        )
        # what was refused is not to stand there as if it were used.
        taken.failure(
            None,
            js=f"() => {{ vidsparseLooked({place}, false); return null; }}",
            outputs=[upload],
            api_visibility="private",
        )


def _connect_compare_this(
    desk: Desk, generate: GenerateTab, compare: CompareTab, tabs: gr.Tabs
) -> None:
    """The shown video becomes a side of the comparison: A, and then B beside it."""

    def choose(request: gr.Request, name: Any, side_a: Any, side_b: Any) -> dict[Any, Any]:
        visit = desk.visit(request)
        try:
            name = visit.video(name).video.stem
        except OptionError as error:
            raise toast(error) from error
        side = "side_a" if side_a in (DENSE, FORM, name) else "side_b"
        held = {"side_a": side_a, "side_b": side_b}
        offered = compare.offered(visit, held=held, **{side: name})
        return {tabs: gr.update(selected="compare"), **offered}

    sides = compare.sides
    generate.compare.click(
        choose,
        inputs=[generate.named, *sides.values()],
        outputs=[tabs, *sides.values()],
        show_progress="hidden",
        api_visibility="private",
    )


def image_taker(desk: Desk, name: str) -> Callable[[gr.Request, Any], Iterator[Any]]:
    """The event of an upload, ``name`` one of ``IMAGES``: the picture is that of its window."""

    def take(request: gr.Request, file: Any) -> Iterator[Any]:
        visit = desk.visit(request)
        kept = kept_picture(Path(file), visit.folder) if isinstance(file, str) else None
        if kept is not None:
            # as it is: a PNG may have more bytes than the upload that it was made of.
            desk.keep_images(request, {**desk.images(request), name: kept})
            yield gr.update(visible=True, value=str(kept))
            return
        others = {each: path for each, path in desk.images(request).items() if each != name}
        # neither stays when its upload is refused: the picture before, and what shows it.
        desk.keep_images(request, others)
        yield gr.update(visible=False, value=None)
        if not isinstance(file, str):
            return
        try:
            if not any(takes(model)[name] for model in desk.host.models):
                raise OptionError(
                    "no model of this page takes such a picture. Hint: leave the upload out."
                )
            target = visit.next_stem(IMAGES[name]).with_suffix(".png")
            limit = desk.host.limits.upload
            made = rewrite_image(Path(file), target, megabytes=limit)
            desk.keep_images(request, {**desk.images(request), name: made})
        except VidsparseError as error:
            raise toast(error) from error
        yield gr.update(visible=True, value=str(target))

    return take


def _ender(desk: Desk) -> Any:
    def end(request: gr.Request) -> None:
        desk.visits.end(request.session_hash or "")
        desk.queue.forget_cancelled()

    return end


def _theme() -> gr.themes.Default:
    theme = gr.themes.Default(
        primary_hue=gr.themes.colors.teal,
        neutral_hue=gr.themes.colors.zinc,
        font=_SYSTEM_FONTS,
        font_mono=_MONO_FONTS,
    )
    # small print is grey on grey in the stock theme, too faint to read.
    return theme.set(
        body_background_fill="#f6f6f3",
        body_background_fill_dark="#121317",
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_400",
        block_info_text_color="*neutral_600",
        block_info_text_color_dark="*neutral_400",
        block_label_text_color="*neutral_600",
        block_title_text_color="*neutral_700",
        block_title_text_color_dark="*neutral_200",
        # white on these is 5.5:1 and 7.6:1; the stock ones are too pale to read.
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_hover_dark="*primary_800",
        button_primary_text_color="white",
        button_primary_text_color_dark="white",
        block_radius="10px",
        button_large_radius="10px",
    )


@dataclass(frozen=True, slots=True)
class Served:
    """A running page: its address, a public one where it is shared, and the way to stop it."""

    url: str
    public_url: str | None
    page: gr.Blocks

    def close(self) -> None:
        """Stop serving."""
        self.page.close(verbose=False)


def _asked_for_by(hosts: Sequence[str], listen: bool, share: bool) -> list[str]:
    """The names in a call's Host that are answered.

    Any site can have its name resolved to this machine and then read the page's answers as its own.
    Behind a password that gets it nowhere, and a public address has a name that nobody chose.
    """
    if share or (listen and not hosts):
        return ["*"]
    return [*THIS_MACHINE, *hosts]


def _script(name: str) -> str:
    """A script of the page's own."""
    return (_HERE / name).read_text(encoding="utf-8")


def _middleware(
    desk: Desk, names: Sequence[str], hosts: Sequence[str], share: bool
) -> list[Middleware]:
    """What stands before the page, the first to hear a call first."""
    folder, limits = desk.host.folder, desk.host.limits
    outside = SHARED_FROM if share else ""
    return [
        Middleware(
            PageHeaders,
            folder=folder,
            scripts=[_script("viewer.js")],
            outside=outside,
            first=_script("still.js"),
        ),
        Middleware(TrustedHostMiddleware, allowed_hosts=names, www_redirect=False),
        Middleware(Guard, upload=limits.upload, hosts=hosts),
        Middleware(SlowLogins),
        Middleware(Returns, name=desk.cookie),
        Middleware(Ears, listeners=desk.listeners, window=desk.window),
        Middleware(LettingGo),
    ]


def serve(
    desk: Desk,
    *,
    port: int | None = None,
    listen: bool = False,
    share: bool = False,
    auth: tuple[str, str] | None = None,
    hosts: Sequence[str] = (),
) -> Served:
    """Serve the page from a thread of its own.

    Args:
        desk: the host's settings, the queue and the visits.
        port: to listen on; the first free one from 7860 by default.
        listen: answer other machines too, not this one alone.
        share: make a public address through Gradio's tunnel.
        auth: name and password that visitors need.
        hosts: more names that this machine is asked for by. Where only this machine is answered, or
            where some are given for others, a call that asks for another name is refused.

    Raises:
        UnsupportedError: the port is taken.
    """
    page, names = build(desk), _asked_for_by(hosts, listen, share)
    try:
        _, url, public = page.launch(
            server_name="0.0.0.0" if listen else "127.0.0.1",
            server_port=port,
            share=share,
            auth=auth,
            prevent_thread_lock=True,
            quiet=True,
            show_error=False,
            state_session_capacity=MOST_SESSIONS,
            max_file_size=desk.host.limits.upload * 2**20,
            allowed_paths=[str(desk.host.folder)],
            # where versions before 0.2 kept uploads, which may lie there still.
            blocked_paths=[str(desk.host.folder / "gradio")],
            app_kwargs={"middleware": _middleware(desk, names, hosts, share)},
            enable_monitoring=False,
            footer_links=[],
            run_history=False,
            mcp_server=False,
            ssr_mode=False,
            theme=_theme(),
            css=(_HERE / "page.css").read_text(encoding="utf-8"),
            head=f"<script>{_script('viewer.js')}</script>",
        )
    except OSError:
        taken = "no port from 7860 on is free" if port is None else f"port {port} is taken"
        raise UnsupportedError(f"{taken}. Hint: give another --port.") from None
    return Served(url, public, page)
