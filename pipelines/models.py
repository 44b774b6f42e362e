"""Finding and loading models: bundled ones by name, diffusers folders, hub ids.

Weights are read from safetensors only and no code comes with a model: every component must be a
class of diffusers or transformers.
"""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from vidsparse.dtypes import DTYPES
from vidsparse.errors import ModelError, OptionError, UnsupportedError, listed
from vidsparse.logs import logger
from vidsparse.pipelines.cards import CARD, GUIDER, checked_defaults, read_card, read_json
from vidsparse.pipelines.compilation import compile_blocks, require_compiler
from vidsparse.pipelines.families import FAMILIES, image_pipelines
from vidsparse.pipelines.family import Defaults, Family
from vidsparse.pipelines.linear import LinearFacts, fuse_lora, quantize_linear
from vidsparse.pipelines.placement import (
    OFFLOADS,
    check_choice,
    check_device,
    check_dtype,
    check_linear,
)
from vidsparse.pipelines.quiet import quiet_hosts
from vidsparse.pipelines.weights import lora_hash, weights_hash

MODELS: Final[Mapping[str, Path]] = MappingProxyType(
    {name: Path(__file__).parent / "models" / name for name in ("shapes", "shapes-joint", "scenes")}
)
"""The bundled models, the default first, and their folders."""

_HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+")
_MODULAR_INDEX: Final = "modular_model_index.json"
_TRANSFORMERS: Final = ("transformer", "transformer_2")
_LIBRARIES: Final = ("diffusers", "transformers")


@dataclass(frozen=True, kw_only=True)
class ModelRef:
    """A model that has been found, not loaded.

    Args:
        name: as given: a bundled name, a folder, or a hub id.
        source: ``bundled``, ``folder`` or ``hub``.
        location: the folder, resolved, or the hub id.
        pipeline_class: its diffusers class.
        text_class: the class that makes videos from text alone, None if none does.
        image_class: the class that makes videos from an image, None if none does.
        takes_last_image: whether that class takes the last frame too.
        takes_keyframes: whether it takes frames between them too.
        family: its family.
        defaults: settings for requests that leave them open, and its units.
        transformers: what the ``config.json`` of each of its transformers says.
        description: one sentence, empty if the model brings none.
        license: of the weights, empty if the model does not say.
        vocabulary: the words it knows; empty means any.
        example_prompts: prompts to try.
    """

    name: str
    source: str
    location: str
    pipeline_class: str
    text_class: str | None
    image_class: str | None
    takes_last_image: bool
    takes_keyframes: bool
    family: Family
    defaults: Defaults
    transformers: tuple[Mapping[str, Any], ...] = ()
    description: str = ""
    license: str = ""
    vocabulary: tuple[str, ...] = ()
    example_prompts: tuple[str, ...] = ()

    @property
    def needs_last_image(self) -> bool:
        """Whether it works between two images only, as Wan 2.1's model that embeds both at once."""
        return any(each.get("pos_embed_seq_len") is not None for each in self.transformers)


@dataclass(frozen=True, kw_only=True)
class LoadedPipeline:
    """A pipeline on its device, with what a record of its runs must say about it.

    ``takes_image`` says whether it makes videos from an image or from text alone; ``weights_hash``
    is the SHA-256 over the names and contents of its safetensors files, as they were before linear
    layers were put into another format (``linear_facts``). ``lora_hash`` is that of the LoRA's
    file, or of the weights in its folder; a LoRA of the hub has its folder in the hub's cache.
    """

    pipe: Any
    ref: ModelRef
    device: str
    dtype: str
    offload: str
    compile: bool
    lora: str | None
    takes_image: bool
    weights_hash: str
    load_seconds: float
    linear: str = "none"
    linear_facts: LinearFacts | None = None
    lora_hash: str | None = None

    @property
    def defaults(self) -> Defaults:
        """Settings for requests that leave them open."""
        return self.ref.defaults


def describe(name: str) -> dict[str, Any]:
    """What ``vidsparse models`` prints about one model, as JSON values.

    Raises:
        ModelError: no such model.
    """
    ref = resolve_model(name)
    return {
        "name": ref.name,
        "description": ref.description,
        "license": ref.license,
        "pipeline": ref.pipeline_class,
        "frames": ref.defaults.frames,
        "size": f"{ref.defaults.width}x{ref.defaults.height}",
        "on_cpu": dict(ref.defaults.on_cpu),
        "steps": ref.defaults.steps,
        "guidance": ref.defaults.guidance,
        "fps": ref.defaults.fps,
        "order": ref.defaults.order,
        "dense_steps": ref.defaults.dense_steps,
        "vocabulary": list(ref.vocabulary),
        "example_prompts": list(ref.example_prompts),
    }


def model_folder(model: str | os.PathLike[str]) -> Path:
    """The folder of a bundled model, or ``model`` itself as a path.

    Whether there is a folder is not checked: of a hub id the path does not exist.

    Raises:
        ModelError: no folder can have such a name.
    """
    name = os.fspath(model)
    if name in MODELS:
        return MODELS[name]
    try:
        folder = Path(name).expanduser()
        # asks the system, which refuses names that are too long.
        folder.exists()
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"{name[:60]!r} cannot be the folder of a model: {reason}") from None
    return folder


def resolve_model(model: str | os.PathLike[str]) -> ModelRef:
    """Find a model by bundled name, folder or hub id; reads configuration files only.

    Raises:
        ModelError: it is not there, or its pipeline is not one that can be run.
    """
    name = os.fspath(model)
    if name in MODELS:
        folder = MODELS[name]
        if not (folder / "model_index.json").is_file():
            raise ModelError(
                f"the files of the bundled model {name!r} are missing from {folder}. "
                "Hint: reinstall vidsparse, or give --model a folder."
            )
        return _read_ref(name, "bundled", folder)
    folder = model_folder(name)
    if folder.is_dir():
        return _read_ref(name, "folder", folder.resolve())
    if folder.exists():
        raise ModelError(
            f"model {name!r} is a file. Hint: give the folder that holds model_index.json."
        )
    if _HUB_ID.fullmatch(name) and not name.startswith("."):
        return _read_ref(name, "hub", _fetch_configs(name))
    raise ModelError(
        f"there is no model {name!r}. Hint: give a bundled name ({', '.join(MODELS)}), "
        "a diffusers folder, or a hub id like owner/name."
    )


def load(
    model: str | os.PathLike[str] | ModelRef,
    *,
    device: str | None = None,
    dtype: str | None = None,
    offload: str = "none",
    lora: str | None = None,
    compile: bool = False,
    linear: str = "none",
    image: bool = False,
) -> LoadedPipeline:
    """Load a model onto a device, ready to generate.

    Args:
        model: what ``resolve_model`` takes, or the ``ModelRef`` that it returned.
        device: ``cpu``, ``cuda`` or ``cuda:N``; CUDA where there is any, by default.
        dtype: ``fp32``, ``bf16`` or ``fp16``; bf16 on CUDA and fp32 on the CPU by default. Wan's
            VAE stays in fp32, as the model's instructions say.
        offload: ``none``, ``model`` or ``group`` (CUDA only).
        lora: a LoRA file, folder or hub id to put on the transformer.
        compile: compile the transformer's blocks when they first run.
        linear: ``none``, or ``fp8``, ``int8`` or ``bf16`` for the transformers' large linear
            layers; a LoRA is then added to the weights first.
        image: load it for videos that begin with an image.

    Raises:
        ModelError: it is not there, or its files cannot be loaded.
        OptionError: the device or number format does not exist here, or the model takes no image.
        UnsupportedError: LoRA, compilation or layers in another format lack a package or the
            hardware they need, or memory is too small.
    """
    began = time.perf_counter()
    device = check_device(device)
    dtype = check_dtype(dtype, device)
    check_choice("offload", offload, OFFLOADS)
    if offload != "none" and device == "cpu":
        raise OptionError(f"offload {offload} needs a CUDA device. Hint: use --offload none.")
    check_linear(linear, device, dtype)
    if compile:
        require_compiler(device)
    if lora is not None and importlib.util.find_spec("peft") is None:
        raise UnsupportedError("a LoRA needs peft. Hint: pip install 'vidsparse[lora]'.")

    ref = model if isinstance(model, ModelRef) else resolve_model(model)
    name = check_takes(ref, image=image)
    # outside the quiet: a download of many gigabytes should show its progress.
    folder = _folder_of(ref)
    _check_weight_files(ref, folder)
    with quiet_hosts(), memory_hint():
        pipe = _from_folder(ref, name, folder, dtype)
        if lora is not None:
            _put_lora(pipe, lora)
        facts = None
        if linear != "none":
            if lora is not None:
                fuse_lora(pipe)
            rest = None if offload == "none" else "cpu"
            facts = quantize_linear(pipe, linear, device=device, rest=rest)
        _place(pipe, device, offload)
        if hasattr(pipe.vae, "enable_slicing"):
            # one video of a batch at a time: same frames, and memory does not grow with the batch.
            pipe.vae.enable_slicing()
        if ref.family.vae_tiling:
            pipe.vae.enable_tiling()
        if compile:
            compile_blocks(pipe)
    loaded = LoadedPipeline(
        pipe=pipe,
        ref=ref,
        device=device,
        dtype=dtype,
        offload=offload,
        compile=compile,
        lora=lora,
        takes_image=image,
        weights_hash=weights_hash(folder),
        load_seconds=time.perf_counter() - began,
        linear=linear,
        linear_facts=facts,
        lora_hash=None if lora is None else lora_hash(lora),
    )
    logger.info("loaded %s in %.1f s on %s (%s)", ref.name, loaded.load_seconds, device, dtype)
    return loaded


def check_takes(
    ref: ModelRef, *, image: bool, last_image: bool = False, keyframes: bool = False
) -> str:
    """The pipeline class of ``ref`` for videos from an image (and others), or from text alone.

    Raises:
        OptionError: the model makes no such videos.
    """
    if image and ref.image_class is None:
        raise OptionError(
            f"{ref.name} makes videos from text alone. "
            f"Hint: leave the image out, or choose a model of {image_pipelines()}."
        )
    if not image and ref.text_class is None:
        raise OptionError(
            f"{ref.name} makes videos from an image and none was given. Hint: add --image FILE."
        )
    if last_image and not ref.takes_last_image:
        raise OptionError(
            f"{ref.name} takes no last image. "
            "Hint: choose a first-last-frame model of Wan, or LTX-2."
        )
    if keyframes and not ref.takes_keyframes:
        able = listed([family.name for family in FAMILIES if family.keyframes])
        raise OptionError(f"{ref.name} takes no keyframes. Hint: choose a model of {able}.")
    name = ref.image_class if image else ref.text_class
    assert name is not None
    return name


_NO_MEMORY: Final = re.compile(r"can't allocate memory|not enough memory|bad_alloc")


@contextmanager
def memory_hint(
    what: str = "this model", smaller: str = "", *, offloads: bool = True
) -> Iterator[None]:
    """Turn memory that has run out, a GPU's or this machine's, into a sentence with a hint.

    Args:
        what: what does not fit, in words.
        smaller: what would need less memory, in words.
        offloads: whether to hint at ``--offload``.

    Raises:
        UnsupportedError: memory ran out.
    """
    import torch

    try:
        yield
        return
    except torch.OutOfMemoryError:
        offload = "use --offload model or group" if offloads else ""
        whose, hints = "the GPU's memory", [offload, smaller]
    except MemoryError:
        whose, hints = "the memory of this machine", [smaller]
    except RuntimeError as error:
        # all that torch says of it on a CPU.
        if not _NO_MEMORY.search(str(error)):
            raise
        whose, hints = "the memory of this machine", [smaller]
    hint = ", or ".join(filter(None, hints))
    raise UnsupportedError(f"{whose} is too small for {what}{f'. Hint: {hint}.' if hint else '.'}")


def unknown_words(ref: ModelRef, prompt: str) -> list[str]:
    """The words of ``prompt`` outside the model's vocabulary, each once, in order."""
    if not ref.vocabulary:
        return []
    words = re.findall(r"\w+", prompt.lower())
    return list(dict.fromkeys(word for word in words if word not in ref.vocabulary))


def weights_of(ref: ModelRef) -> str:
    """``weights_hash`` of a model that need not be loaded, but is downloaded where it is missing.

    Raises:
        ModelError: it cannot be downloaded.
    """
    return weights_hash(_folder_of(ref))


def _read_ref(name: str, source: str, folder: Path) -> ModelRef:
    _check_index(str(folder), folder, f"supported pipelines are {_runnable()}")
    index = read_json(folder / "model_index.json")
    pipeline_class = index.get("_class_name")
    family = next(
        (f for f in FAMILIES if pipeline_class in f.text_to_video + f.image_to_video), None
    )
    if family is None:
        raise ModelError(
            f"{name} holds a {pipeline_class}, which cannot be run here. "
            f"Hint: supported pipelines are {_runnable()}."
        )
    for component, value in index.items():
        library = value[0] if isinstance(value, list) and value else None
        if library is not None and library not in (*_LIBRARIES, *family.libraries):
            raise ModelError(
                f"{name} wants to load its {component} from {library!r}; only components of "
                f"{' and '.join(_LIBRARIES)} are loaded, never code that comes with a model."
            )
    card = read_card(folder / CARD) if (folder / CARD).is_file() else {}
    from_text = pipeline_class in family.text_to_video
    twin = family.image_twin if index.get(family.image_twin_if or "_class_name") else None
    image_class = twin if from_text else str(pipeline_class)
    # with a timestep for every token, Wan's pipeline fixes the first frame and forgets the last.
    per_token = bool(index.get("expand_timesteps"))
    return ModelRef(
        name=name,
        source=source,
        location=name if source == "hub" else str(folder),
        pipeline_class=str(pipeline_class),
        text_class=str(pipeline_class) if from_text else None,
        image_class=image_class,
        takes_last_image=image_class is not None
        and image_class == family.last_image
        and not per_token,
        takes_keyframes=image_class is not None and image_class == family.keyframes,
        family=family,
        defaults=checked_defaults(family, folder, index, card),
        transformers=tuple(
            read_json(file)
            for name in _TRANSFORMERS
            if (file := folder / name / "config.json").is_file()
        ),
        description=card.get("description", ""),
        license=card.get("license", ""),
        vocabulary=tuple(card.get("vocabulary", ())),
        example_prompts=tuple(card.get("example_prompts", ())),
    )


def _runnable() -> str:
    return ", ".join(
        name for family in FAMILIES for name in family.text_to_video + family.image_to_video
    )


def _fetch_configs(hub_id: str) -> Path:
    """The hub's configuration files for a model; a few kilobytes, cached by the hub's client."""
    from huggingface_hub import snapshot_download

    parts = [f"{name}/config.json" for name in ("vae", *_TRANSFORMERS)]
    names = ["model_index.json", _MODULAR_INDEX, *parts, GUIDER, CARD]
    with _hub_errors(hub_id):
        folder = Path(snapshot_download(hub_id, allow_patterns=names))
    hint = "many models have a second repository whose name ends in -Diffusers"
    _check_index(hub_id, folder, hint)
    return folder


def _check_index(name: str, folder: Path, hint: str) -> None:
    if (folder / "model_index.json").is_file():
        return
    if (folder / _MODULAR_INDEX).is_file():
        raise ModelError(
            f"{name} is a modular pipeline, and commands run none. "
            "Hint: load it in Python and give it to sparsify; docs/models.md shows how."
        )
    raise ModelError(f"{name} is no diffusers model: it has no model_index.json. Hint: {hint}.")


@contextmanager
def _hub_errors(hub_id: str, *, what: str = "model", option: str = "--model") -> Iterator[None]:
    """Turn the hub client's errors into a sentence that says what to do.

    Args:
        hub_id: the repository that is fetched.
        what: what it holds, in words.
        option: the flag that takes a local path instead.
    """
    from huggingface_hub import errors

    # of whichever library the hub's client speaks HTTP with; some of its own errors come through.
    transport: type[Exception] = errors.HfHubHTTPError.__mro__[1]
    try:
        yield
    except errors.GatedRepoError:
        raise ModelError(
            f"access to {hub_id} must be granted first. Hint: accept its terms on "
            f"https://huggingface.co/{hub_id} and log in with 'hf auth login'."
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"there is no {what} {hub_id!r}, neither as a folder here nor on the hub. "
            "Hint: check the spelling; a private one needs 'hf auth login'."
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError) as error:
        raise _not_reached(hub_id, option, error) from None
    except (OSError, errors.HFValidationError) as error:
        raise ModelError(f"{hub_id} could not be downloaded: {error}") from None
    except transport as error:
        raise _not_reached(hub_id, option, error) from None


def _not_reached(hub_id: str, option: str, error: Exception) -> ModelError:
    return ModelError(
        f"{hub_id} is not in the local hub cache, and the hub cannot be reached "
        f"({type(error).__name__}). Hint: connect once to download it, or fetch it elsewhere "
        f"with 'hf download {hub_id}' and give {option} the folder."
    )


def _folder_of(ref: ModelRef) -> Path:
    if ref.source != "hub":
        return Path(ref.location)
    from diffusers import DiffusionPipeline

    with _hub_errors(ref.location):
        return Path(DiffusionPipeline.download(ref.location, use_safetensors=True))


def _check_weight_files(ref: ModelRef, folder: Path) -> None:
    """Refuse pickled weights with a sentence, before the host does it with a traceback."""
    for component in sorted(path for path in folder.iterdir() if path.is_dir()):
        pickled = [p.name for p in component.iterdir() if p.suffix in (".bin", ".pt", ".ckpt")]
        if pickled and not list(component.glob("*.safetensors")):
            raise ModelError(
                f"{ref.name} holds its {component.name} in {pickled[0]}, which can run code when "
                "loaded. Hint: convert it to safetensors."
            )


def _from_folder(ref: ModelRef, name: str, folder: Path, dtype: str) -> Any:
    import diffusers
    import torch
    from safetensors import SafetensorError

    cls = getattr(diffusers, name)
    dtypes = {"default": getattr(torch, DTYPES[dtype])}
    if ref.family.vae_fp32:
        dtypes["vae"] = torch.float32
    try:
        return cls.from_pretrained(
            folder,
            torch_dtype=dtypes,
            use_safetensors=True,
            low_cpu_mem_usage=True,
            local_files_only=True,
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ModelError(f"{ref.name} could not be loaded as {name}: {error}") from error


def _put_lora(pipe: Any, lora: str) -> None:
    if not hasattr(pipe, "load_lora_weights"):
        raise UnsupportedError(
            f"diffusers cannot load a LoRA into a {type(pipe).__name__}. Hint: leave --lora out."
        )
    path = Path(lora).expanduser()
    try:
        if path.is_file():
            if path.suffix != ".safetensors":
                raise ModelError(f"a LoRA must be a .safetensors file, got {lora}")
            pipe.load_lora_weights(path.parent, weight_name=path.name, use_safetensors=True)
        elif path.is_dir() or not _HUB_ID.fullmatch(lora):
            files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
            if len(files) != 1:
                raise ModelError(
                    f"{lora} must be a LoRA file, a folder with one .safetensors file, or a hub id"
                )
            pipe.load_lora_weights(path, weight_name=files[0].name, use_safetensors=True)
        else:
            with _hub_errors(lora, what="LoRA", option="--lora"):
                pipe.load_lora_weights(lora, use_safetensors=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"the LoRA {lora} does not fit this model: {error}") from error
    # a file without one matching key loads without complaint and does nothing.
    if not pipe.get_active_adapters():
        raise ModelError(f"the LoRA {lora} has no weights for this model")


def _place(pipe: Any, device: str, offload: str) -> None:
    if offload == "model":
        pipe.enable_model_cpu_offload(device=device)
    elif offload == "group":
        import torch

        # the VAE is small and decodes by calls that leaf hooks do not see.
        pipe.enable_group_offload(
            onload_device=torch.device(device),
            offload_device=torch.device("cpu"),
            offload_type="leaf_level",
            use_stream=True,
            exclude_modules=["vae"],
        )
    else:
        pipe.to(device)
