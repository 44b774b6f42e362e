"""What ``vidsparse generate`` refuses in one sentence, without a trace in the output folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from filelock import FileLock
from prompt_runs import Machine, Run

from vidsparse.apps.cli import main
from vidsparse.pipelines import models as modelling

pytest_plugins = ["prompt_runs"]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "videos"


def test_a_negative_prompt_that_is_no_text_is_refused(generate: Run, out: Path) -> None:
    # how Python hands over a byte of the command line that is no UTF-8.
    _assert_refused(generate("--negative-prompt", "grey\udcff"), out, "not valid Unicode text at")


def test_a_second_run_in_one_folder_is_refused(generate: Run, machine: Machine, out: Path) -> None:
    generate()
    (folder,) = out.iterdir()
    with FileLock(folder / ".vidsparse.lock"):
        done = generate("--overwrite")
    assert done.exit_code == 2
    assert str(folder) in done.stderr
    assert len(machine.made) == 2


def _assert_refused(done: Result, out: Path, words: str) -> None:
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("Error: ")
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.output
    assert words in done.stderr
    assert done.stdout == ""
    assert not out.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no prompt"),
        (b"# only\n\n   \n# comments", "holds no prompt"),
        # as two files are that were joined, each with the mark that some editors begin it with.
        ("\ufeff# one\n\ufeff# another\n\ufeff\n".encode(), "holds no prompt"),
        (b"a red circle\n\xff\xfe broken", "not UTF-8 text (line 2"),
        ("a red circle".encode("utf-16"), "not UTF-8"),
        (b"fine\n" + b"x" * 10_001, "line 2"),
        (b"nul \0 inside", "NUL"),
    ],
)
def test_bad_prompt_files(
    generate: Run, prompts: Path, out: Path, content: bytes, words: str
) -> None:
    prompts.write_bytes(content)
    _assert_refused(generate(), out, words)


def test_a_prompt_of_just_ten_thousand_characters_is_taken(
    generate: Run, machine: Machine, prompts: Path
) -> None:
    prompts.write_text("x" * 10_000, encoding="utf-8")
    assert generate().exit_code == 0


def test_missing_prompt_file(generate: Run, out: Path, tmp_path: Path) -> None:
    _assert_refused(generate(file=str(tmp_path / "none.txt")), out, "there is no prompt file")


def test_a_prompt_file_without_a_name(out: Path) -> None:
    _assert_refused(CliRunner().invoke(main, ["generate", ""]), out, "has no name")


@pytest.mark.skipif(os.name != "posix", reason="closes a descriptor with a shell")
def test_a_closed_standard_input_is_one_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -m vidsparse generate - <&-', sys.executable],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: standard input is closed. Hint: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_folder_is_no_prompt_file(generate: Run, out: Path, tmp_path: Path) -> None:
    _assert_refused(generate(file=str(tmp_path)), out, "is a folder")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--frames 8", "Hint: use 9"),
        ("--size 32x33", "multiple of 16"),
        ("--size 32", "WIDTHxHEIGHT"),
        ("--size 0x32", "at least 1"),
        ("--steps 0", "steps must be at least 1"),
        ("--seed abc", "not a valid integer"),
        ("--seed -1", "seed must be"),
        ("--fps 0", "fps must be at least 0.1"),
        ("--fps 1e-300", "fps must be at least 0.1"),
        ("--fps 1e20", "fps must be at most 1000"),
        ("--guidance 1e300", "guidance must be at most 100"),
        ("--steps 100000", "steps must be at most 1,000"),
        ("--size 16000x16000", "width must be at most 8,192"),
        ("--fps fast", "not a number"),
        ("--guidance -1", "guidance"),
        ("--method nearest", "fg-attn, spargeattn"),
        ("--method nearest --tau 0.5", "unknown method"),
        ("--tile 5x16", "Hint: 16x16"),
        ("--tile big", "MxN"),
        ("--top-p 0", "(0, 1]"),
        ("--top-p 1.5", "(0, 1]"),
        ("--top-p nan", "(0, 1]"),
        ("--top-p most", "cannot be 'most'"),
        ("--tau 0.5", "option of spargeattn, xattention, sale and sol-attn, not of fg-attn"),
        ("--method spargeattn --top-p 0.5", "option of fg-attn, not of spargeattn"),
        ("--top-p 0.5 --topk 0.3", "selects by top_p or by topk"),
        ("--topk some", "cannot be 'some'"),
        ("--method xattention --stride 3", "stride must be one of 4, 8, 16, 64"),
        ("--method xattention --blocks 1.5", "--blocks cannot be '1.5'"),
        ("--method sale --local 0", "local must be"),
        (f"--method sale --local {10**25}", "local must be below 2^31"),
        (f"--method xattention --blocks {10**25}", "blocks must be below 2^31"),
        (f"--frames {10**400}", "frames must be at most 10,000"),
        (
            "--method dense --tile 16x16",
            "not of dense. Hint: add --method fg-attn",
        ),
        ("--merge nicely", "xor"),
        ("--order spiral", "hilbert"),
        ("--dense-steps 1.5", "dense_steps"),
        ("--dense-steps few", "neither a count"),
        ("--reuse 0", "reuse"),
        ("--refresh 1.5", "refresh"),
        ("--device tpu", "cpu, cuda"),
        ("--dtype fp64", "fp32"),
        ("--dtype fp16", "fp32 or bf16"),
        ("--offload disk", "none, model, group"),
        ("--linear int4", "none, fp8, int8, bf16"),
        ("--linear fp8 --device cpu", "compute capability 8.9"),
        ("--linear bf16 --device cpu --dtype bf16", "linear bf16 needs"),
        ("--cache teacache", "none, first-block, taylorseer, guidance"),
        ("--cache-threshold 0.1", "without a cache"),
        ("--speed ludicrous", "exact, high, balanced, fast"),
        ("--implementation magic", "auto"),
        ("--nonsense", "No such option"),
        ("--model nowhere", "there is no model"),
        ("--model ~nobody-here/model", "cannot be the folder of a model"),
        (f"--model {'x' * 5000}", "cannot be the folder of a model: File name too long"),
    ],
)
def test_bad_options(generate: Run, out: Path, options: str, words: str) -> None:
    _assert_refused(generate(*options.split()), out, words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--implementation triton", "implementation triton was asked for, and it runs on CUDA"),
        ("--implementation gluon", "implementation gluon was asked for, and it runs on CUDA"),
        ("--dense-kernel gluon", "dense_kernel gluon was asked for, and it runs on CUDA devices"),
        ("--method dense --dense-kernel gluon", "dense_kernel gluon was asked for"),
    ],
)
def test_kernels_that_do_not_run_on_the_device(
    generate: Run, out: Path, options: str, words: str
) -> None:
    result = generate(*options.split(), "--device", "cpu")
    _assert_refused(result, out, words)
    # loading a model may take minutes.
    assert "Loading" not in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_cuda_asked_for_and_absent(generate: Run, out: Path, device: str) -> None:
    _assert_refused(generate("--device", device), out, "no CUDA device")


@pytest.mark.parametrize("index", [None, "not json", "[]", '{"_class_name": "FluxPipeline"}'])
def test_a_folder_without_a_known_pipeline(
    generate: Run, out: Path, tmp_path: Path, index: str | None
) -> None:
    folder = tmp_path / "strange"
    folder.mkdir()
    if index is not None:
        (folder / "model_index.json").write_text(index, encoding="utf-8")
    _assert_refused(generate("--model", str(folder)), out, "")


def test_an_output_folder_that_cannot_be(generate: Run, machine: Machine, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way", encoding="utf-8")
    _assert_refused(generate("--out", str(blocked)), blocked / "x", "cannot be written to")
    assert machine.loads == 0


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_output_folder(generate: Run, machine: Machine, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    _assert_refused(generate("--out", str(closed)), closed / "x", "cannot be written to")


def test_a_model_that_does_not_load_leaves_nothing(
    generate: Run, tiny_model: Path, tmp_path: Path, out: Path
) -> None:
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    next((broken / "transformer").glob("*.safetensors")).write_bytes(b"no weights")
    done = generate("--model", str(broken))
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1].startswith("Error: ")
    assert list(out.iterdir()) == []


def test_defects_say_how_to_get_a_traceback(
    generate: Run, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fall_over(*_: Any, **__: Any) -> None:
        raise KeyError("surprise")

    monkeypatch.setattr(modelling, "load", fall_over)
    done = generate()
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1] == (
        "Error: KeyError: 'surprise'. Hint: run with -vv for the traceback."
    )
    assert "Traceback" not in done.output
    assert "Traceback" in generate("-vv").stderr


def test_verbose_shows_the_traceback_of_bad_input_too(generate: Run) -> None:
    done = generate("--steps", "0", "-v", "-v")
    assert done.exit_code == 2
    assert "Traceback" in done.stderr
