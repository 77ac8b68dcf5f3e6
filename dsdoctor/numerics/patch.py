"""The ready-to-paste patches of a module's forward: text only. No torch.

They import inside their functions, so that they can be pasted into a function that uses torch already.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import Template

from dsdoctor.numerics.events import Event

_LIMITS = {"float16": 65504.0}
"""Types whose range float32 exceeds, with their largest number. bfloat16 ends where float32 does."""
Call = tuple[str, str | None]
"""A module to keep in float32, and the type that its outputs are cast back to; None: they stay in float32."""

_TEMPLATE = Template('''\
$comment
# Paste this after the model is built (before deepspeed.initialize, or on engine.module after it).
# The weights stay $dtype; they are cast for the time of the forward, so ZeRO and the optimizer do not notice.
def keep_in_fp32(model, path, back_to="$dtype"):
    """Run `path` of `model` with inputs and weights in float32, then cast its outputs to `back_to`.

    What does not fit `back_to` is clamped to its limit, so that the modules behind see finite values. back_to=None
    keeps the outputs in float32, which loses nothing but asks that whatever takes them accepts float32.
    """
    import functools

    import torch

    narrow = getattr(torch, back_to) if back_to is not None else None

    def to_fp32(value):
        if torch.is_tensor(value) and value.is_floating_point():
            return value.float()
        return value

    def back(value):
        if narrow is None or not torch.is_tensor(value) or not value.is_floating_point():
            return value
        limit = torch.finfo(narrow).max
        return value.clamp(-limit, limit).to(narrow)

    def each(function, value):
        if isinstance(value, dict):
            return type(value)({key: each(function, item) for key, item in value.items()})
        if isinstance(value, (tuple, list)):
            items = [each(function, item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return function(value)

    def wrap(module, outermost):
        forward = module.forward

        @functools.wraps(forward)
        def forward_in_fp32(*args, **kwargs):
            weights = {name: weight for name, weight in module._parameters.items() if weight is not None}
            buffers = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
            wide = {name: to_fp32(value) for name, value in {**weights, **buffers}.items()}
            module.__dict__.update(wide)  # found before the registered ones
            device = next((a.device.type for a in args if torch.is_tensor(a)), "cpu")
            try:
                with torch.autocast(device_type=device, enabled=False):
                    output = forward(*each(to_fp32, args), **each(to_fp32, kwargs))
            finally:
                for name in wide:
                    module.__dict__.pop(name, None)
            with torch.no_grad():
                for name, buffer in buffers.items():
                    if wide[name] is not buffer:  # running statistics
                        buffer.copy_(wide[name])
            return each(back, output) if outermost else output

        module.forward = forward_in_fp32

    root = model.get_submodule(path)
    for module in root.modules():
        wrap(module, outermost=module is root)


$calls
''')


def island(calls: Sequence[Call], dtype: str, comment: str) -> str:
    """Source text that keeps modules in float32; it expects `model`, the user's module. `dtype` is the model's."""
    targets = ((path, f'"{back}"' if back else None) for path, back in calls)
    lines = (f'keep_in_fp32(model, "{path}", back_to={back})' for path, back in targets)
    remark = "\n".join(f"# {line}" for line in comment.splitlines())
    return _TEMPLATE.substitute(comment=remark, dtype=dtype, calls="\n".join(lines))


def limit_of(dtype: str) -> float | None:
    """The largest number of a type whose range float32 exceeds, None for the others."""
    return _LIMITS.get(dtype)


def fp32_patch(event: Event, class_name: str) -> str:
    """Source text that keeps the event's module in float32; it expects `model`, the user's module.

    Empty where that would not help: the value is no overflow, or the type reaches as far as float32. Nothing is known
    of the modules behind, so the outputs are clamped and cast back.
    """
    limit = _LIMITS.get(event.dtype)
    if limit is None or event.phase != "forward" or event.origin.cause not in ("overflow", "cast-overflow"):
        return ""
    what = f"{event.module} ({class_name})" if event.module else f"the whole model ({class_name})"
    comment = f"Keeps {what} in float32: its {event.tensor} passed the largest {event.dtype} value ({limit:g})."
    return island([(event.module, event.dtype)], event.dtype, comment)
