"""Backward passes that autograd or DeepSpeed's reduction refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from dsdoctor.case import Case
from dsdoctor.diagnoses import before_run, context
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.forms import Form, TextDiagnosis
from dsdoctor.finding import Finding, Fix
from dsdoctor.logs.facts import LogEvent
from dsdoctor.runs.facts import Failure


class ReducedTwice(TextDiagnosis):
    """A parameter got two gradients in one backward pass.

    What it is: ZeRO-1/2 reduces each gradient once, as soon as it is there. Re-entrant activation checkpointing of a
    module that is used twice, or two forward passes before one backward, produce a second one.

    What proves it: DeepSpeed's assertion, which names the parameter.

    When it could be wrong: it is not; only which of the two reasons it is has to be seen in the script.

    What to do: non-re-entrant checkpointing at stages 1 and 2 (`gradient_checkpointing_kwargs={"use_reentrant": False}`
    with the Trainer), or one forward and one backward a micro-batch. Under ZeRO-3 with frozen weights the advice is the
    opposite: see `autograd/recompute-mismatch`.
    """

    id = "autograd/reduced-twice"
    severity = "error"
    title = "a parameter was reduced twice in one backward pass"
    forms = (
        Form(message=r"The parameter (?P<name>\S+) has already been reduced\.\s+Gradient computed twice"),
        Form(message=r"Expected to mark a variable ready only once"),
    )
    cause = "a parameter got two gradients in one backward pass"
    fixes = (
        Fix(text="use non-re-entrant checkpointing: use_reentrant=False"),
        Fix(text="or make one forward and one backward pass a micro-batch"),
    )

    def tell(self, groups: Mapping[str, str]) -> str:
        return f"{self.cause}: {groups['name']}" if groups.get("name") else self.cause


_EMPTIED = re.compile(r"saved metadata: .*Size\(\[[1-9].*\n.*recomputed metadata: .*Size\(\[0\]\)")
_SHAPES = re.compile(r"recomputed metadata: .*Size\(\[")
_SAME_TWICE = Fix(
    text="where no weight is empty, make the forward pass the same twice: no cache (use_cache=False), no branch on "
    "data that changes, no state that it alters"
)


class RecomputeMismatch(TextDiagnosis):
    """The recomputed forward pass of a checkpoint saw other tensors than the first one.

    What it is: non-re-entrant checkpointing compares the metadata of what it saves and recomputes. Under ZeRO-3 with
    frozen parameters a weight may be gathered in one pass and empty in the other (`[N]` against `[0]`).

    What proves it: torch's CheckpointError.

    When it could be wrong: real non-determinism in forward (dropout without a preserved state, data-dependent branches)
    gives the same error, with other shapes.

    What to do: re-entrant checkpointing under ZeRO-3 (the opposite of the advice for ZeRO-1/2):
    `gradient_checkpointing_kwargs={"use_reentrant": True}` with the Trainer. Where no shape is `[0]`, make the forward
    pass the same twice.
    """

    id = "autograd/recompute-mismatch"
    severity = "error"
    title = "recomputed activations do not match"
    forms = (
        Form(message=r"Recomputed values for the following tensors have different metadata"),
        Form(types=("CheckpointError",)),
    )
    cause = "the recomputed forward pass of a checkpoint produced tensors of other shapes than the first one"
    fixes = (Fix(text="under ZeRO-3 use re-entrant checkpointing: use_reentrant=True"), _SAME_TWICE)

    def told(self, case: Case, claimed: list[Failure], events: list[LogEvent]) -> Finding:
        """Which of the two reasons it is, where the shapes tell."""
        found = super().told(case, claimed, events)
        if _EMPTIED.search(claimed[0].message) is not None:
            return replace(found, cause=f"{self.cause}: a weight that was whole is empty, which only ZeRO-3 does")
        if _SHAPES.search(claimed[0].message) is None or context.stage(case) == 3:
            return found
        return replace(found, fixes=(_SAME_TWICE,), caveat="No weight is empty, so ZeRO-3 is not the reason.")

    def examine(self, case: Case) -> Iterator[Finding]:
        yield from super().examine(case)
        yield from before_run.recomputes_partitioned(self, case)


class NoGrad(TextDiagnosis):
    """Nothing that the loss depends on requires a gradient.

    What it is: LoRA with frozen embeddings and re-entrant checkpointing: the inputs of the checkpointed blocks require
    no gradient, so autograd records nothing. Or every parameter is frozen.

    What proves it: "does not require grad and does not have a grad_fn". DeepSpeed 0.19 says "loss must be a scalar
    tensor" in the same situation.

    When it could be wrong: a forward pass under `torch.no_grad()` gives the same error; and DeepSpeed's wording also
    stands for a loss that really is no scalar.

    What to do: `model.enable_input_require_grads()`, or `use_reentrant=False`.
    """

    id = "autograd/no-grad"
    severity = "error"
    title = "the loss has no gradient"
    forms = (
        Form(message=r"does not require grad and does not have a grad_fn"),
        Form(types=("AssertionError",), message=r"loss must be a scalar tensor", frames=r"requires_grad|backward"),
    )
    confidence = 0.85
    cause = "the loss depends on nothing that requires a gradient"
    fixes = (
        Fix(text="with LoRA and checkpointing: model.enable_input_require_grads(), or use_reentrant=False"),
        Fix(text="see that parameters are trainable and that forward is not under torch.no_grad()"),
    )
    kinds = ("checkpoint-no-grad",)

    def applies(self, failure: Failure, case: Case) -> bool:
        """DeepSpeed's wording is ambiguous: it needs the checkpoint's warning about requires_grad beside it."""
        if "loss must be a scalar tensor" not in failure.message:
            return True
        return case.logs is not None and any(case.logs.of_kind("checkpoint-no-grad"))

    def examine(self, case: Case) -> Iterator[Finding]:
        """The warning alone is no failure."""
        if any(self.claims(failure, case) for failure in context.failures(case)):
            yield from super().examine(case)
        yield from before_run.gradients_shut_out(self, case)


class AttentionDtype(TextDiagnosis):
    """Flash attention was given fp32 tensors.

    What it is: the kernel takes fp16 and bf16 only; norms or embeddings kept in fp32 (k-bit training, fp32 islands)
    hand it fp32.

    What proves it: its error. The *warning* of Transformers with similar words, printed before an engine casts the
    model, proves nothing.

    When it could be wrong: it is not.

    What to do: run forward under `torch.autocast("cuda", dtype=torch.bfloat16)`, cast the inputs of the attention, or
    load the model in the precision of the engine (`dtype=torch.bfloat16`); `attn_implementation="sdpa"` takes fp32.
    """

    id = "autograd/attention-dtype"
    severity = "error"
    title = "flash attention was given fp32"
    forms = (Form(message=r"(?i)flash ?-?attention only supports? (?:fp16|float16|half)"),)
    cause = "flash attention was given fp32 tensors; it takes fp16 and bf16 only"
    fixes = (Fix(text="run the forward pass under autocast, or cast query, key and value to the model's dtype"),)


class DirectBackward(TextDiagnosis):
    """A backward pass that did not go through `engine.backward` reached an engine that refuses it.

    What it is: without ZeRO (stage 0) DeepSpeed reduces the gradients in `engine.backward` alone. `loss.backward()`, or
    the backward pass of another engine whose loss was computed with this one (GAN, distillation), would skip that.

    What proves it: DeepSpeed's message; before a run the calls in the script's text.

    When it could be wrong: with a very old torch the same message comes at every stage.

    What to do: call `engine.backward(loss)`; ZeRO stages 1 to 3 also take `loss.backward()`. A network that another
    engine's loss only passes through has to be called as `engine.module`.
    """

    id = "autograd/direct-backward"
    severity = "error"
    title = "a backward pass went around engine.backward"
    forms = (Form(message=r"Direct calls to tensor\.backward\(\) are not supported in this configuration"),)
    cause = (
        "a backward pass reached the engine without engine.backward, which DeepSpeed refuses at ZeRO stage 0; the "
        "script is what to mend"
    )
    fixes = (
        Fix(text="call engine.backward(loss), or use ZeRO stage 1", patch={"zero_optimization": {"stage": 1}}),
        Fix(text="if another engine's loss passes through this network, call engine.module instead of the engine"),
    )
    keys = ("zero_optimization.stage",)

    def examine(self, case: Case) -> Iterator[Finding]:
        yield from super().examine(case)
        yield from before_run.backward_around_engine(self, case)


DIAGNOSES: tuple[Diagnosis, ...] = (
    ReducedTwice(),
    RecomputeMismatch(),
    NoGrad(),
    AttentionDtype(),
    DirectBackward(),
)
