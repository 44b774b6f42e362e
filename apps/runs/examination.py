"""What this machine has, what will run on it, and why the rest will not."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vidsparse._version import __version__

if TYPE_CHECKING:
    import torch

REQUIRED = (
    "torch",
    "diffusers",
    "transformers",
    "accelerate",
    "safetensors",
    "numpy",
    "scikit-image",
    "imageio-ffmpeg",
    "jinja2",
)
# package, and what it is for: shown as missing without making the machine unfit.
OPTIONAL = (
    ("triton", "the GPU kernels"),
    ("peft", "--lora; pip install vidsparse[lora]"),
    ("gradio", "the web page; pip install vidsparse[ui]"),
)
HEAD_DIMS = (64, 96, 128)


@dataclass(slots=True)
class Findings:
    """What the examination prints, and what keeps ``generate`` from working."""

    sections: list[tuple[str, list[tuple[str, str]]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, title: str, rows: list[tuple[str, str]]) -> None:
        """Append a section."""
        self.sections.append((title, rows))


def examine() -> Findings:
    """Look at everything that ``generate`` needs; changes nothing and downloads nothing."""
    findings = Findings()
    findings.add("Versions", list(_versions(findings.problems)))
    torch: Any = _import("torch", findings.problems)
    if torch is not None:
        findings.add("Devices", list(_devices(torch)))
        for device in _device_names(torch):
            findings.add(f"Kernels on {device}", list(_kernels(torch, device, findings.problems)))
    findings.add("Video", [("ffmpeg", _ffmpeg(findings.problems))])
    findings.add("Models", list(_models(findings.problems)))
    return findings


def _import(name: str, problems: list[str]) -> Any | None:
    try:
        return importlib.import_module(name)
    except Exception as error:
        problems.append(f"{name} cannot be imported: {error}")
        return None


def _versions(problems: list[str]) -> Iterator[tuple[str, str]]:
    yield "vidsparse", __version__
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.platform != "linux":
        yield "platform", "only Linux is tested; the CPU path is meant to work here too"
    for package in REQUIRED:
        version = _version(package)
        yield package, version or "missing"
        if version is None:
            problems.append(f"{package} is not installed. Hint: pip install vidsparse")
    for package, purpose in OPTIONAL:
        yield package, _version(package) or f"not installed (for {purpose})"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices(torch: Any) -> Iterator[tuple[str, str]]:
    memory = _host_memory()
    size = f", {_gib(memory)} memory" if memory else ""
    yield "cpu", f"{torch.get_num_threads()} threads{size}"
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = f"built for {built}, no device found" if built else "this PyTorch is built for CPU"
        yield "cuda", f"not available: {why}"
        return
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        free, _ = torch.cuda.mem_get_info(index)
        yield (
            f"cuda:{index}",
            f"{facts.name}, compute capability {facts.major}.{facts.minor}, "
            f"{_gib(facts.total_memory)} memory, {_gib(free)} free",
        )


def _device_names(torch: Any) -> list[str]:
    # equal cards run equal kernels: the first one stands for all.
    return ["cpu", "cuda:0"] if torch.cuda.is_available() else ["cpu"]


def _kernels(torch: Any, device: str, problems: list[str]) -> Iterator[tuple[str, str]]:
    from vidsparse.kernels import IMPLEMENTATIONS, choose, support

    dtypes: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
    reasons: dict[str, dict[str, list[str]]] = {name: {} for name in IMPLEMENTATIONS}
    for label, dtype in dtypes.items():
        chosen = {dim: choose("auto", device, dtype, dim) for dim in HEAD_DIMS}
        if len(set(chosen.values())) == 1:
            yield label, f"{chosen[HEAD_DIMS[0]]} for head dims {', '.join(map(str, HEAD_DIMS))}"
        else:
            yield label, ", ".join(f"head dim {dim}: {name}" for dim, name in chosen.items())
        for name in IMPLEMENTATIONS:
            for dim in HEAD_DIMS:
                reason = support(name, device, dtype, dim)
                if reason is not None and label not in reasons[name].setdefault(reason, []):
                    reasons[name][reason].append(label)
    for name, why in reasons.items():
        for reason, labels in why.items():
            yield f"not {name}", f"{', '.join(labels)}: {reason}"


def _ffmpeg(problems: list[str]) -> str:
    try:
        import imageio_ffmpeg

        return f"{imageio_ffmpeg.get_ffmpeg_version()}, {imageio_ffmpeg.get_ffmpeg_exe()}"
    except Exception as error:
        problems.append(f"no ffmpeg to write mp4 files with: {error}")
        return "missing"


def _models(problems: list[str]) -> Iterator[tuple[str, str]]:
    from vidsparse.errors import VidsparseError
    from vidsparse.pipelines.models import MODELS, resolve_model

    for name in MODELS:
        try:
            resolve_model(name)
        except VidsparseError as error:
            problems.append(str(error))
            yield name, "missing"
        else:
            yield name, "bundled, ready"


def _host_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
