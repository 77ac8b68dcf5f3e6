"""Libraries whose versions cannot work together."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dsdoctor.case import Case
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.forms import Form, TextDiagnosis
from dsdoctor.finding import Fix
from dsdoctor.frames import innermost
from dsdoctor.runs.facts import Failure

_LIBRARIES = (
    r"(?:torch|deepspeed|transformers|accelerate|peft|trl|numpy|pydantic|huggingface_hub|lightning|apex|triton)"
)
_REMOVED = (
    Form(
        types=("ImportError", "RuntimeError"),
        message=rf"cannot import name '(?P<what>\w+)' from '(?P<where>{_LIBRARIES}[\w.]*)'",
    ),
    Form(
        types=("ModuleNotFoundError", "RuntimeError"),
        message=rf"No module named '(?P<what>(?P<where>{_LIBRARIES})\.[\w.]+)'",
    ),
    Form(types=("AttributeError",), message=rf"module '(?P<where>{_LIBRARIES}[\w.]*)' has no .*'(?P<what>\w+)'"),
    Form(types=("AttributeError",), message=r"`(?P<what>np\.\w+)` was (?:removed|a deprecated).*?(?P<where>NumPy)"),
)
"""A name that the other library does not have, or has no more."""
_REQUIRED = (
    Form(types=("ImportError",), message=rf"(?P<asked>{_LIBRARIES}[<>=!]+[\d.]+) is required"),
    Form(types=("ImportError",), message=rf"requires `(?P<asked>{_LIBRARIES}[<>=!~]+[\d.]+)`"),
)
"""A library says which release of another one it needs."""
_WHILE_LOADING = ("ImportError", "OSError", "RuntimeError")
"""What is raised while a library is loaded; Transformers wraps it into a RuntimeError ("Failed to import ...")."""
_COMPILED = (
    Form(types=("RuntimeError", "ImportError"), message=r"(?P<binary>(?:PyTorch|torch) version mismatch!)"),
    Form(types=_WHILE_LOADING, message=r"(?P<binary>[\w.-]+\.so)[\d.]*: undefined symbol"),
    Form(
        types=_WHILE_LOADING,
        message=r"version `(?:GLIBCXX|CXXABI)_[\d.]+' not found .*?(?P<binary>[\w.-]+\.so)",
    ),
    Form(message=r"(?P<binary>operator torchvision::\w+) does not exist"),
    Form(message=r"(?P<binary>no kernel image) is available for execution on the device"),
)
"""Compiled code of one library that was made for another release of torch, or for another GPU."""
_CHANGED = (
    Form(types=("PydanticUserError",), message=r"(?P<changed>[\w`]+)"),
    Form(types=("TypeError",), message=r"^(?P<changed>\w+)\.__init__\(\) got an unexpected keyword argument"),
    Form(
        types=("UnpicklingError",),
        message=r"(?P<changed>Weights only) load failed",
        frames=r"(?:deepspeed|transformers|accelerate|lightning\w*)[/\\]",
    ),
)
"""A library calls another one in a way that it does not take any more."""


class Incompatible(TextDiagnosis):
    """One library does not go together with the installed release of another.

    What it is: DeepSpeed, Transformers, Accelerate, torch, NumPy and pydantic move at their own pace. A name that was
    removed (or is not there yet), an argument that is not taken any more, or compiled code that was made for another
    torch fails, mostly while a library is loaded.

    What proves it: an error about another library, raised in the code of a library; or a library's own message about
    the release that it needs.

    When it could be wrong: a file of yours that is called like a library hides it (its path is in the message); a
    broken installation, or two of them on one path, looks the same.

    What to do: `pip list | grep -iE 'torch|deepspeed|transformers|accelerate|numpy|pydantic'` and `pip check`; then
    upgrade the older of the two, or install releases known to work together in a fresh environment. What is compiled
    (flash-attn, apex, torchvision) has to be installed anew after every change of torch.
    """

    id = "version/incompatible"
    severity = "error"
    title = "two libraries do not go together"
    forms = (*_REMOVED, *_REQUIRED, *_COMPILED, *_CHANGED)
    confidence = 0.85
    fixes = (
        Fix(text="upgrade the older of the two libraries, or install versions that are known to work together"),
        Fix(text="see that no file of yours is called like the library"),
    )

    def applies(self, failure: Failure, case: Case) -> bool:
        if re.search(r"torch_extensions|/deepspeed/ops/", failure.message):
            return False  # DeepSpeed's own extensions: build/stale-extension
        if re.search(r" is required for a normal functioning of this module", failure.message):
            return True  # said by Transformers alone, whoever called it
        of_library = ("torch", "library") if self._calls_wrongly(failure) else ("deepspeed", "torch", "library")
        return innermost(failure.frames) in of_library

    def _calls_wrongly(self, failure: Failure) -> bool:
        """True for a wrong argument: what DeepSpeed hands on comes out of the ds_config, which is another matter."""
        return failure.type == "TypeError"

    def tell(self, groups: Mapping[str, str]) -> str:
        if "where" in groups:
            return f"{groups['what']} is not in the installed version of {groups['where']}"
        if "asked" in groups:
            return f"a library needs {groups['asked']}, and another version is installed"
        if "binary" in groups:
            return f"compiled code was made for another torch, libstdc++ or GPU ({groups['binary']})"
        return f"a library calls another one in a way that its installed version does not take ({groups['changed']})"

    def remedies(self, groups: Mapping[str, str]) -> tuple[Fix, ...]:
        if "binary" in groups:
            return (
                Fix(text="install the compiled package anew for the installed torch (and this GPU)"),
                *self.fixes[:1],
            )
        return self.fixes


DIAGNOSES: tuple[Diagnosis, ...] = (Incompatible(),)
