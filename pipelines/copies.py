"""No copies of what is sparse: a copy would share its pipeline's state."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Final

from torch import nn

from vidsparse.errors import UnsupportedError

PROCESSOR_COPIED: Final = (
    "a sparse processor cannot be copied or saved, because the copy would share its "
    "pipeline's state. Hint: remove() the handle first, and sparsify() again afterwards."
)


def refuse_copies(transformer: nn.Module) -> Callable[[], None]:
    """Have copies of the module, and saving it whole, end in an ``UnsupportedError``.

    Returns what undoes it.
    """
    reference = weakref.ref(transformer)

    def refuse(protocol: int) -> None:
        raise UnsupportedError(
            "a sparse pipeline cannot be copied or saved whole, because the copy would share "
            "its state. Hint: remove() the handle first; state_dict() and save_pretrained() "
            "work all the same."
        )

    def forget() -> None:
        if (module := reference()) is not None:
            vars(module).pop("__reduce_ex__", None)

    # both look on the object itself before they look at its class.
    vars(transformer)["__reduce_ex__"] = refuse
    return forget
