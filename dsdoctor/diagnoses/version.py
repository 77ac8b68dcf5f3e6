"""Libraries whose versions cannot work together."""

from __future__ import annotations

from dsdoctor.case import Case
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.forms import Form, TextDiagnosis
from dsdoctor.finding import Fix
from dsdoctor.frames import innermost
from dsdoctor.runs.facts import Failure

_LIBRARIES = (
    r"(?:torch|deepspeed|transformers|accelerate|peft|trl|numpy|pydantic|huggingface_hub|lightning|apex|triton)"
)


class Incompatible(TextDiagnosis):
    """One library asks another for something that its installed version does not have.

    What it is: DeepSpeed, Transformers, Accelerate, torch, NumPy and pydantic move at their own pace; an import of a
    name that was removed (or not yet there) fails while a library is loaded.

    What proves it: an ImportError or AttributeError about another library, raised in the code of a library.

    When it could be wrong: a file of yours that is called like a library hides it; a broken installation looks
    the same.

    What to do: upgrade the older of the two; install a set of versions known to work together.
    """

    id = "version/incompatible"
    severity = "error"
    title = "two libraries do not go together"
    forms = (
        Form(
            types=("ImportError",), message=rf"cannot import name '(?P<what>\w+)' from '(?P<where>{_LIBRARIES}[\w.]*)'"
        ),
        Form(types=("ModuleNotFoundError",), message=rf"No module named '(?P<what>{_LIBRARIES}\.[\w.]+)'(?P<where>)"),
        Form(
            types=("AttributeError",),
            message=rf"module '(?P<where>{_LIBRARIES}[\w.]*)' has no .*'(?P<what>\w+)'",
        ),
        Form(
            types=("RuntimeError", "ImportError"), message=r"(?P<what>(?:PyTorch|torch) version mismatch!)(?P<where>)"
        ),
        Form(types=("ImportError",), message=rf"(?P<what>{_LIBRARIES})[<>=!]+[\d.]+ is required(?P<where>)"),
    )
    confidence = 0.85
    cause = "{what} is not in the installed version of {where}"
    fixes = (
        Fix(text="upgrade the older of the two libraries, or install versions that are known to work together"),
        Fix(text="see that no file of yours is called like the library"),
    )

    def applies(self, failure: Failure, case: Case) -> bool:
        return innermost(failure.frames) in ("deepspeed", "torch", "library")


DIAGNOSES: tuple[Diagnosis, ...] = (Incompatible(),)
