"""Files of rows: none is replaced unasked, mixed with another machine's, or written by two."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from vidsparse.apps.bench.gpus_rows import COLUMNS, GpusRow, gpus_file
from vidsparse.apps.bench.gpus_settings import Sharing
from vidsparse.apps.bench.model_settings import EXACT, settings_of
from vidsparse.apps.cli import main
from vidsparse.apps.results.row_file import RowFile
from vidsparse.errors import OptionError

DOCS = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
TENSORS = ("--seq-len", "512", "--heads", "2", "--head-dim", "32", "--repeats", "1")

# of each benchmark that fills a file anew: what measures, and a run of one case.
FILLED = {
    "attention": ("measure_cases", ("--kept", "0.5")),
    "calls": ("measure_calls_of", ("--case", "fg-attn top_p=0.5")),
    "gates": ("measure_gates", ("--case", "bsfa keep=0.3")),
    "masks": ("measure_masks", ("--method", "fg-attn")),
}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments])


def bench(name: str, *arguments: str) -> Result:
    return run(name, *TENSORS, *FILLED[name][1], "--device", "cpu", *arguments)


def refused(result: Result, says: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stderr.count("Error:") == 1
    assert says in " ".join(result.stderr.split())


@pytest.fixture(params=FILLED)
def unmeasured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a benchmark that fails where it begins to measure."""

    def measure(*_: Any, **__: Any) -> None:
        raise AssertionError("measured before the file was looked at")

    name: str = request.param
    command = import_module(f"vidsparse.apps.commands.bench_{name}")
    monkeypatch.setattr(command, FILLED[name][0], measure)
    return name


def test_rows_that_are_there_are_not_replaced_unasked(unmeasured: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    shutil.copy(DOCS / f"{unmeasured}-h200.json", file)
    before = file.read_bytes()
    refused(bench(unmeasured, "--json", str(file)), "has rows already. Hint: --overwrite replaces")
    assert file.read_bytes() == before


@pytest.mark.parametrize("answer", [(), ("--json",), ("--show", __file__)])
def test_there_is_nothing_to_overwrite_without_a_file(
    answer: tuple[str, ...], unmeasured: str
) -> None:
    refused(bench(unmeasured, "--overwrite", *answer), "--overwrite was given without a file")


@pytest.mark.parametrize("text", ["a letter", '{"format": "vidsparse-gpus/1", "rows": []}'])
def test_what_is_no_file_of_such_rows_is_never_replaced(
    text: str, unmeasured: str, tmp_path: Path
) -> None:
    file = tmp_path / "precious.txt"
    file.write_text(text, encoding="utf-8")
    refused(bench(unmeasured, "--json", str(file), "--overwrite"), "Hint: name another file.")
    assert file.read_text(encoding="utf-8") == text


def test_rows_without_a_format_are_replaced_only_where_they_are_of_the_benchmark(
    tmp_path: Path,
) -> None:
    file = tmp_path / "rows.json"
    file.write_text('{"rows": [{"mine": 1}]}', encoding="utf-8")
    refused(bench("attention", "--json", str(file), "--overwrite"), "holds no attention benchmark")


def test_a_folder_that_is_missing_is_known_before_measuring(
    unmeasured: str, tmp_path: Path
) -> None:
    refused(bench(unmeasured, "--json", str(tmp_path / "no" / "rows.json")), "cannot be written")
    assert not (tmp_path / "no").exists()


def test_a_file_that_another_process_measures_into_is_refused(
    unmeasured: str, tmp_path: Path
) -> None:
    file = tmp_path / "rows.json"
    with RowFile(file, "other/1", "other file").held():
        refused(bench(unmeasured, "--json", str(file)), "another process is measuring into")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", FILLED)
def test_asked_to_overwrite_it_replaces_the_rows_of_the_benchmark(
    name: str, tmp_path: Path
) -> None:
    file = tmp_path / "rows.json"
    shutil.copy(DOCS / f"{name}-h200.json", file)
    done = bench(name, "--json", str(file), "--overwrite")
    assert done.exit_code == 0, done.output
    written = json.loads(file.read_text(encoding="utf-8"))
    assert {row["seq_len"] for row in written["rows"]} == {512}
    assert "CPU" in written["hardware"]
    # no lock stays behind.
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]


SMALL = ("--family", "wan-1.3b", "--device", "cpu", "--size", "128x128", "--frames", "9")


@pytest.mark.parametrize(
    ("committed", "arguments"),
    [("models-h200.json", ()), ("speeds-h200.json", ("--speed", "balanced"))],
)
def test_rows_of_other_hardware_are_not_taken_for_ones_own(
    committed: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "rows.json"
    shutil.copy(DOCS / committed, file)
    before = file.read_bytes()
    done = run("model", *SMALL, "--layers", "1", *arguments, "--json", str(file))
    refused(done, "rows.json holds rows of NVIDIA H200 in bf16, not of")
    assert "CPU" in done.stderr
    assert file.read_bytes() == before
    # whoever only looks at them may do so anywhere.
    assert run("model", "--show", str(file)).exit_code == 0


HERE = {"hardware": "x86_64 CPU, 2 threads", "dtype": "fp32"}


def rows_of(path: Path, header: dict[str, Any]) -> RowFile:
    file = RowFile(path, "some/1", "rows of a test")
    file.go_on(header)
    file.add({"a": 1})
    return RowFile(path, "some/1", "rows of a test")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"hardware": "x86_64 CPU, 8 threads"}, "2 threads in fp32, not of x86_64 CPU, 8 threads"),
        ({"dtype": "bf16"}, "in fp32, not of x86_64 CPU, 2 threads in bf16"),
        ({"model": {"weights_hash": "beef"}}, "weights cafe, not of a model with weights beef"),
        ({"prompts_hash": "beef"}, "prompts with hash f00d, not of prompts with hash beef"),
    ],
)
def test_a_file_takes_rows_of_one_origin(
    changed: dict[str, Any], says: str, tmp_path: Path
) -> None:
    header = {**HERE, "model": {"weights_hash": "cafe"}, "prompts_hash": "f00d"}
    file = rows_of(tmp_path / "rows.json", header)
    with pytest.raises(OptionError, match=f"{says}.*Hint: name another file"):
        file.check_origin({**header, **changed})
    with pytest.raises(OptionError):
        file.go_on({**header, **changed})
    assert file.header == header
    file.go_on({**header, "date": "today"})
    assert file.header["date"] == "today"


def test_what_a_file_does_not_say_of_its_rows_stays_unsaid(tmp_path: Path) -> None:
    file = rows_of(tmp_path / "rows.json", {"hardware": HERE["hardware"]})
    with pytest.raises(OptionError, match=r"in fp32, not of .* in bf16"):
        file.go_on({**HERE, "dtype": "bf16"}, {"dtype": "fp32"})
    file.go_on(HERE, {"dtype": "fp32"})
    assert file.header == {"hardware": HERE["hardware"]}


def test_rows_that_another_process_wrote_before_the_file_was_ours_stay(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    mine, other = (RowFile(path, "some/1", "rows of a test") for _ in range(2))
    with other.held():
        other.go_on(HERE)
        other.add({"a": 1})
    with mine.held():
        mine.go_on(HERE)
        mine.add({"a": 2})
    assert [row["a"] for row in RowFile(path, "some/1", "rows of a test").rows] == [1, 2]


def test_a_folder_made_for_rows_goes_where_none_was_written(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "new" / "rows.json", "some/1", "rows of a test")
    with file.held(make_folder=True):
        assert (tmp_path / "new").is_dir()
    assert not (tmp_path / "new").exists()


def covers(asked: tuple[int, int] | None, implementation: str, **changed: Any) -> bool:
    row: GpusRow = gpus_file(DOCS / "multi-gpu-h200.json").typed(GpusRow)[0]
    (setting,) = settings_of(
        ("wan-14b",),
        None,
        None,
        None,
        None,
        None,
        tiles=() if asked is None else (asked,),
        quantize=(EXACT,),
        steps=50,
        implementation=implementation,
    )
    return Sharing(kind="even").covers(replace(row, **changed), setting, "none", False, 2)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"study": "newer"}, "has rows of the study 'newer', which this version of vidsparse does"),
        ({"method": "newer"}, "has rows of the method 'newer', which this version of vidsparse"),
        ({"psnr_mean": None}, "holds no quality study"),
        ({"identical": None}, "holds no quality study"),
    ],
)
def test_rows_of_a_study_that_are_not_known_here_are_refused_before_anything_is_measured(
    changed: dict[str, str | None], says: str, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle\n", encoding="utf-8")
    document = json.loads((DOCS / "quality-small.json").read_text(encoding="utf-8"))
    row = document["rows"][0] | changed
    absent = {name for name, value in changed.items() if value is None}
    document["rows"] = [{name: value for name, value in row.items() if name not in absent}]
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    before = file.read_bytes()
    for show in ((), ("--limit-rows", "0", "--table")):
        refused(run("quality", str(prompts), "--out", str(file), *show), says)
    assert file.read_bytes() == before


def test_rows_of_several_gpus_are_of_one_tile_and_kernel() -> None:
    assert covers(None, "auto")
    assert covers((32, 32), "gluon")
    assert not covers((128, 128), "auto")
    assert not covers(None, "torch")
    assert covers((128, 128), "auto", tile="128x128")
    assert not covers(None, "auto", tile="128x128")


def test_rows_of_several_gpus_show_their_tile() -> None:
    row: GpusRow = gpus_file(DOCS / "multi-gpu-h200.json").typed(GpusRow)[0]
    tiles = [COLUMNS["tile"](replace(row, tile=tile)) for tile in (None, "128x128")]
    assert tiles == ["32x32", "128x128"]


@pytest.fixture
def quality(tiny_model: Path, tmp_path: Path) -> Callable[..., Result]:
    """``bench quality`` of a tiny model and the prompts in p.txt, at most one row."""
    arguments = ["--frames", "9", "--size", "128x128", "--steps", "3", "--device", "cpu"]
    arguments += ["--batch", "2", "--commit", "c0ffee", "--study", "tiles", "--limit-rows", "1"]
    arguments += ["--model", str(tiny_model), "--out", str(tmp_path / "q.json")]
    (tmp_path / "p.txt").write_text("a red circle\na blue square\n", encoding="utf-8")

    def one_more(*options: str) -> Result:
        return run("quality", str(tmp_path / "p.txt"), *arguments, *options)

    return one_more


def change(path: Path, **changed: Any) -> None:
    """Write a file's header anew; what is None is left out."""
    document = json.loads(path.read_text(encoding="utf-8")) | changed
    told = {name: value for name, value in document.items() if value is not None}
    path.write_text(json.dumps(told), encoding="utf-8")


@pytest.mark.usefixtures("one_thread")
def test_a_study_takes_no_rows_of_other_prompts_weights_or_hardware(
    quality: Callable[..., Result], tmp_path: Path
) -> None:
    assert quality().exit_code == 0
    file, prompts = tmp_path / "q.json", tmp_path / "p.txt"
    first = file.read_bytes()
    header = json.loads(first)
    model = header["model"]

    prompts.write_text("a green ring\na blue square\n", encoding="utf-8")
    refused(quality(), "holds rows of prompts with hash")
    assert file.read_bytes() == first
    prompts.write_text("a red circle\na blue square\n", encoding="utf-8")

    change(file, model={**model, "weights_hash": "cafe"})
    refused(quality(), "holds rows of a model with weights cafe, not of a model with weights")

    change(file, model=model, dtype="bf16")
    refused(quality("--overwrite"), "in bf16, not of")

    h200 = {"kind": "cuda", "name": "NVIDIA H200", "threads": None}
    change(file, dtype="fp32", hardware=h200)
    changed = file.read_bytes()
    refused(quality(), "holds rows of NVIDIA H200 in fp32, not of")
    assert file.read_bytes() == changed
    looked_at = quality("--limit-rows", "0", "--table")
    assert looked_at.exit_code == 0, looked_at.output


@pytest.mark.usefixtures("one_thread")
def test_rows_of_a_study_that_does_not_name_its_prompts_are_known_by_their_number(
    quality: Callable[..., Result], tmp_path: Path
) -> None:
    assert quality().exit_code == 0
    file = tmp_path / "q.json"
    change(file, prompts_hash=None)
    refused(quality("--prompts", "1"), "holds rows of 2 prompts and does not say which")
    done = quality()
    assert done.exit_code == 0, done.output
    assert "1 of 20 rows are there already" in done.stderr
    document = json.loads(file.read_text(encoding="utf-8"))
    assert len(document["rows"]) == 2
    assert "prompts_hash" not in document


@pytest.mark.usefixtures("one_thread")
def test_a_study_s_file_is_measured_into_by_one_process(
    quality: Callable[..., Result], tmp_path: Path
) -> None:
    with RowFile(tmp_path / "q.json", "other/1", "other file").held():
        refused(quality(), "another process is measuring into")
    assert not (tmp_path / "q.json").exists()
