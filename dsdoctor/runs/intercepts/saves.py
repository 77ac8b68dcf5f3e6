"""The functions by which libraries write and read checkpoints, led into the run's folder."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from dsdoctor.runs.containment import Containment
from dsdoctor.runs.imports import ImportHooks


@dataclass(frozen=True)
class _Function:
    """A function of a module, or a method of the class `owner` in it; `argument` is its path."""

    module: str
    owner: str | None
    name: str
    argument: str
    makes_folders: bool = True

    @property
    def what(self) -> str:
        return f"{self.owner or self.module}.{self.name}"


_WRITES = (
    _Function("torch.serialization", None, "save", "f", makes_folders=False),
    _Function("safetensors.torch", None, "save_file", "filename", makes_folders=False),
    _Function("safetensors.torch", None, "save_model", "filename", makes_folders=False),
    _Function("torch.utils.tensorboard.writer", "SummaryWriter", "__init__", "log_dir"),
    _Function("tensorboardX.writer", "SummaryWriter", "__init__", "logdir"),
    _Function("transformers.modeling_utils", "PreTrainedModel", "save_pretrained", "save_directory"),
    _Function("transformers.tokenization_utils_base", "PreTrainedTokenizerBase", "save_pretrained", "save_directory"),
    _Function("transformers.configuration_utils", "PretrainedConfig", "save_pretrained", "save_directory"),
    _Function("transformers.configuration_utils", "PreTrainedConfig", "save_pretrained", "save_directory"),
    _Function("transformers.generation.configuration_utils", "GenerationConfig", "save_pretrained", "save_directory"),
    _Function("transformers.processing_utils", "ProcessorMixin", "save_pretrained", "save_directory"),
    _Function("peft.peft_model", "PeftModel", "save_pretrained", "save_directory"),
    _Function("accelerate.accelerator", "Accelerator", "save_state", "output_dir"),
    _Function("accelerate.accelerator", "Accelerator", "save_model", "save_directory"),
)
_READS = (
    _Function("torch.serialization", None, "load", "f"),
    _Function("safetensors.torch", None, "load_file", "filename"),
    _Function("safetensors.torch", None, "load_model", "filename"),
    _Function("transformers.modeling_utils", "PreTrainedModel", "from_pretrained", "pretrained_model_name_or_path"),
    _Function(
        "transformers.tokenization_utils_base",
        "PreTrainedTokenizerBase",
        "from_pretrained",
        "pretrained_model_name_or_path",
    ),
    _Function("accelerate.accelerator", "Accelerator", "load_state", "input_dir"),
)


def install(hooks: ImportHooks, containment: Containment) -> None:
    for module in sorted({function.module for function in (*_WRITES, *_READS)}):
        hooks.after_import(module, lambda imported: _contain(imported, containment))


def _contain(module: ModuleType, containment: Containment) -> None:
    for function in _WRITES:
        owner = _owner(module, function)
        if owner is not None:
            containment.redirect(
                owner, function.name, function.argument, function.what, makes_folders=function.makes_folders
            )
    for function in _READS:
        owner = _owner(module, function)
        if owner is not None:
            containment.resolve(owner, function.name, function.argument)


def _owner(module: ModuleType, function: _Function) -> object | None:
    """The class or module to patch; None where the function is another module's or this release has none."""
    if function.module != module.__name__:
        return None
    return module if function.owner is None else getattr(module, function.owner, None)
