"""The command line: its help, what it lists, and what it says where it cannot start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from vidsparse.apps.cli import main
from vidsparse.apps.terminal.options import without_own_cache
from vidsparse.methods import METHODS
from vidsparse.pipelines import models as modelling

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["bench", "--help"], []])
def test_help_and_version_import_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from vidsparse.apps.cli import main\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "except SystemExit as stop:\n"
        "    heavy = {'torch', 'diffusers', 'rich', 'numpy', 'jinja2'} & set(sys.modules)\n"
        "    sys.exit(str(heavy) if heavy else stop.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("count", "said"),
    [("9" * 400, "--gpus"), ("1000", "starts 1000 processes, and this machine has room for")],
)
def test_no_more_processes_are_started_than_a_machine_has_room_for(
    count: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "p.txt").write_text("a red circle\n", encoding="utf-8")
    given = ["generate", str(tmp_path / "p.txt"), "--device", "cpu", "--gpus", count]
    done = CliRunner().invoke(main, [*given, "--out", str(tmp_path / "o")])
    assert done.exit_code == 2
    assert said in done.output
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("command", ["generate", "compare"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--gpus", "2", "--ring", "2"], "GPUs for each guidance branch, 1"),
        (["--gpus", "3"], "an even number of GPUs for each video, got 3"),
        ([], "an even number of GPUs for each video, got 1"),
        (["--gpus", "4", "--gpus-per-video", "2"], "leave --gpus-per-video and --engine out"),
        (["--gpus", "2", "--cache", "taylorseer"], "does not work with the step cache taylorseer"),
        (["--gpus", "2", "--cache", "guidance"], "does not work with the step cache guidance"),
    ],
)
def test_what_guidance_branches_apart_cannot_do_is_said(
    command: str, given: list[str], said: str, tmp_path: Path
) -> None:
    (tmp_path / "p.txt").write_text("a red circle\n", encoding="utf-8")
    words = [command, str(tmp_path / "p.txt"), "--device", "cpu", "--apart", *given]
    done = CliRunner().invoke(main, [*words, "--out", str(tmp_path / "o")])
    assert done.exit_code == 2
    assert said in done.output
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("given", "cache"),
    [({}, "none"), ({"cache": "guidance"}, "guidance"), ({"speed": "high"}, "none")],
)
def test_a_model_s_own_cache_stays_off_where_none_can_be(
    given: dict[str, str], cache: str | None
) -> None:
    options = {"cache": None, "speed": None, **given}
    without_own_cache(options)
    assert options["cache"] == cache


@pytest.mark.slow
def test_a_command_keeps_what_libraries_say_of_themselves_off_standard_error() -> None:
    pytest.importorskip("torchao")
    code = (
        "import sys\n"
        "from vidsparse.apps.cli import main\n"
        "try:\n"
        "    main(['methods'])\n"
        "except SystemExit:\n"
        # as a command does that records calls of a model, or builds one.
        "    from diffusers import WanPipeline\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_threads_that_wait_leave_their_core() -> None:
    # it must stand in the environment before torch is imported, and a user's own choice stays.
    code = (
        "import os, sys\n"
        "from vidsparse.apps.cli import main\n"
        "try:\n"
        "    main(['--version'])\n"
        "except SystemExit:\n"
        "    print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    for own, policy in (({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment | own
        )
        assert done.stdout.splitlines()[-1] == f"{policy} False"


def test_module_and_version() -> None:
    command = [sys.executable, "-m", "vidsparse", "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("vidsparse ")


@pytest.mark.parametrize("command", ["generate", "compare"])
def test_help_groups_options_by_method_and_shows_examples(command: str) -> None:
    text = CliRunner().invoke(main, [command, "--help"], terminal_width=100).output
    fg, rest = text.split("Options of --method spargeattn (SpargeAttn)")
    fg = fg.split("Options of --method fg-attn (FG-Attn)")[1]
    sparge = rest.split("How to run")[0]
    assert "--top-p" in fg
    assert "16x16" in fg
    assert "--tau" in sparge
    assert "128x64" in sparge
    assert "--top-p" not in sparge
    assert f"vidsparse {command} prompts.txt" in text


def options_of(
    command: click.Command, name: str = "vidsparse"
) -> Iterator[tuple[str, click.Option]]:
    """Every option of ``command`` and those below it, with the name of its command."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for each in command.list_commands(context):
            below = command.get_command(context, each)
            assert below is not None
            yield from options_of(below, f"{name} {each}")
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            yield name, parameter


def test_every_option_says_what_it_is() -> None:
    told = [(name, option.opts[0], option.help or "") for name, option in options_of(main)]
    assert len(told) > 100
    # a default alone is no help.
    silent = [(name, flag) for name, flag, text in told if not text.split("[default")[0].strip()]
    assert silent == []


def test_every_option_of_the_issue_is_there() -> None:
    text = CliRunner().invoke(main, ["generate", "--help"], terminal_width=100).output
    flags = (
        "--model --method --top-p --tile --order --dense-steps --dense-last-steps --dense-layers "
        "--dense-last-layers --reuse --merge --steps --frames --size --fps --guidance "
        "--negative-prompt --seed --device --dtype --offload --speed --linear --cache "
        "--cache-threshold --compile --lora --implementation "
        "--out --overwrite --tau --theta --verbose --quiet"
    )
    assert [flag for flag in flags.split() if flag not in text] == []


def test_no_method_takes_a_flag_of_the_request() -> None:
    from vidsparse.apps.terminal.options import MethodOption
    from vidsparse.methods import METHODS

    command = main.get_command(click.Context(main), "generate")
    assert command is not None
    shared = [one for one in command.params if not isinstance(one, MethodOption)]
    flags = {flag for one in shared for flag in (*one.opts, *one.secondary_opts)}
    assert "--steps" in flags
    for name, cls in METHODS.items():
        for field in cls.option_fields():
            assert field.metadata["flag"] not in flags, f"{field.name} of {name}"


def test_no_command_of_that_name() -> None:
    done = CliRunner().invoke(main, ["genrate"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "Error: there is no command 'genrate'. Hint: did you mean generate?\n"


def test_exit_code_of_the_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vidsparse", "generate", str(tmp_path / "none.txt")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["--version"]])
def test_help_that_cannot_be_printed_is_one_sentence(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "vidsparse", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 2
    assert done.stderr == (
        "Error: standard output cannot be written to: No space left on device.\n"
    )


@pytest.fixture
def bundled(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny model in place of the bundled one."""
    import shutil

    folder = tmp_path / "bundled"
    shutil.copytree(tiny_model, folder)
    card = {
        "description": "draws moving shapes",
        "license": "CC0",
        "vocabulary": ["red", "circle"],
        "example_prompts": ["a red circle"],
    }
    (folder / "vidsparse.json").write_text(json.dumps(card), encoding="utf-8")
    monkeypatch.setattr(modelling, "MODELS", {"shapes": folder})
    return folder


def test_doctor_finds_what_runs_and_why_the_rest_does_not(bundled: Path) -> None:
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 0, done.output
    assert "generate will work here." in done.output
    for words in ("torch", "ffmpeg", "Kernels on cpu", "fp32", "bf16", "not triton", "shapes"):
        assert words in done.output


def test_doctor_without_a_model_says_so_and_fails(bundled: Path) -> None:
    (bundled / "model_index.json").unlink()
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 1
    assert "Problem: the files of the bundled model" in done.output


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("doctor", {"sections", "problems"}),
        ("models", {"bundled", "families"}),
    ],
)
def test_what_lists_things_has_a_json_form(bundled: Path, command: str, names: set[str]) -> None:
    done = CliRunner().invoke(main, [command, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout).keys() == names


def test_methods_in_json_name_every_option() -> None:
    document = json.loads(CliRunner().invoke(main, ["methods", "--json"]).stdout)
    assert [each["name"] for each in document] == list(METHODS)
    options = {each["name"]: {one["flag"] for one in each["options"]} for each in document}
    assert "--top-p" in options["fg-attn"]


def test_shells_complete_commands_and_options() -> None:
    asked = {"COMP_WORDS": "vidsparse generate --spe", "COMP_CWORD": "2"}
    done = subprocess.run(
        [str(Path(sys.executable).with_name("vidsparse"))],
        env={**os.environ, **asked, "_VIDSPARSE_COMPLETE": "bash_complete"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["plain,--speed"]


def test_methods_lists_papers_and_defaults() -> None:
    done = CliRunner().invoke(main, ["methods"])
    assert done.exit_code == 0
    for words in ("fg-attn", "spargeattn", "--top-p P", "[default: 16x16]", "2502.18137"):
        assert words in done.output


def test_what_stands_for_no_number_is_said_as_it_is_typed() -> None:
    document = json.loads(CliRunner().invoke(main, ["methods", "--json"]).stdout)
    defaults = {
        f"{each['name']} {one['flag']}": one["default"]
        for each in document
        for one in each["options"]
    }
    for option in ("foresight --rows", "foresight --reach"):
        assert defaults[option] == "auto"
    assert defaults["fg-attn --topk"] == "none"
    refused = CliRunner().invoke(main, ["generate", "-", "--reach", "1.5"], input="a ball\n")
    assert refused.exit_code == 2
    assert "Hint: auto is the default." in " ".join(refused.output.split())


def test_models_lists_words_prompts_and_families(bundled: Path) -> None:
    done = CliRunner().invoke(main, ["models"])
    assert done.exit_code == 0, done.output
    for words in ("draws moving shapes", "red, circle", "a red circle", "WanPipeline", "CC0"):
        assert words in done.output


@pytest.mark.slow
def test_libraries_say_nothing_while_a_model_is_loaded(tiny_model: Path) -> None:
    # a process of its own: they speak when they are first imported.
    code = (
        "import sys; from vidsparse.pipelines.models import load; load(sys.argv[1], device='cpu')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_model)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
