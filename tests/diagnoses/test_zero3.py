"""What only ZeRO-3 punishes, and what autograd refuses."""

from dataclasses import replace

import pytest

from dsdoctor.diagnoses import context
from dsdoctor.runs.facts import Frame
from tests.diagnoses.examples import found
from tests.diagnoses.making import (
    ENGINE,
    MODULE,
    TORCH,
    USER,
    event,
    failed,
    failure,
    healthy,
    log,
    log_failure,
)

EMPTY = "The size of tensor a (16) must match the size of tensor b (0) at non-singleton dimension 1"
LOADING = (
    "Error(s) in loading state_dict for LM:\n\tsize mismatch for w: copying a param with shape torch.Size([{}]) "
    "from checkpoint, the shape in current model is torch.Size([{}])."
)
WEIGHT = "'weight' must be 2-D"
SET = (
    'Trying to set a tensor of shape torch.Size([{}]) in "weight" (which has shape torch.Size([{}])), this looks wrong.'
)
FETCH = Frame(file="/env/lib/python3.11/site-packages/deepspeed/runtime/zero/partitioned_param_coordinator.py", line=3,
              function="fetch_sub_module")  # fmt: skip
BACK = Frame(file="/env/lib/python3.11/site-packages/deepspeed/runtime/engine.py", line=9, function="backward",
             text="assert maybe_loss_for_backward(")  # fmt: skip
SCALAR = "loss must be a scalar tensor. If you need to pass output gradients, backward() of output tensors"
TWICE = (
    "The parameter blocks.2.down.bias has already been reduced.         Gradient computed twice for this partition.  "
)
DIRECT = (
    "Direct calls to tensor.backward() are not supported in this configuration. This occurs when either: (1) your "
    "PyTorch version lacks required internal APIs, or (2) using ZeRO stage 0. Please use engine.backward(loss) instead."
)

STAGE3 = {"config": {"zero_optimization": {"stage": 3}}}
LATE = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete"
GONE = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.4]:31544"
GATHER = replace(FETCH, function="all_gather_coalesced")
REDUCE = Frame(file="/env/lib/python3.11/site-packages/deepspeed/runtime/zero/stage3.py", line=4,
               function="__avg_scatter_grads")  # fmt: skip
ACTIVE = "Cannot free a ZeRO-3 parameter while it is still active in submodules. This can happen if: (1) submodules"

POSITIVE = {
    "zero3/empty-weights-in-model": [
        failed("RuntimeError", EMPTY, USER, stage=3),
        failed("RuntimeError", WEIGHT, USER, ENGINE, USER, TORCH, stage=3),
        failed("RuntimeError", LOADING.format("512, 256", "0"), USER, stage=3),
        log_failure("RuntimeError", WEIGHT, USER, TORCH),
        log_failure("RuntimeError", LOADING.format("512, 256", "0"), USER),  # the stage is not known
        log_failure("ValueError", SET.format("512, 256", "0"), USER),
        log(event("empty-in-model")),
    ],
    "zero3/empty-weights-in-checkpoint": [
        log_failure("ValueError", SET.format("0", "512, 256"), USER),
        log_failure("RuntimeError", LOADING.format("1", "512, 256") * 2, USER),  # releases before 0.5
        log(event("empty-in-file")),
        failed("RuntimeError", LOADING.format("0", "512, 256"), USER, MODULE, stage=3),
        log_failure("RuntimeError", LOADING.format("0", "512, 256"), USER),
    ],
    "zero3/module-outside-engine": [
        failed("RuntimeError", WEIGHT, USER, MODULE, USER, TORCH, stage=3),
        log_failure("RuntimeError", WEIGHT, USER, MODULE, TORCH),
        log_failure("RuntimeError", WEIGHT),  # all that was pasted
    ],
    "zero3/inflight-params": [
        failed("RuntimeError", "still have inflight params [{'id': 3}]", USER, ENGINE, stage=3),
        failed("AssertionError", "{'id': 1, 'status': 'NOT_AVAILABLE', 'numel': 0}", USER, ENGINE, stage=3),
        failed("IndexError", "pop from an empty deque", USER, ENGINE, FETCH, stage=3),
    ],
    "zero3/branch-hang": [
        failed("RuntimeError", "Detected a disagreement on list contents between rank0 and rank1", USER, stage=3),
        failed("RuntimeError", "disagreement between rank0 and rank1: rank0: [0, 1], rank1: [0, 2]", USER, stage=3),
    ],
    "zero3/tied-or-resized": [failed("AttributeError", "'Parameter' object has no attribute 'ds_id'", USER, stage=3)],
    "config/zero3-load-conflict": [
        failed("ValueError", "DeepSpeed Zero-3 is not compatible with `low_cpu_mem_usage=True` or with passing a "
               "`device_map`.", USER, stage=3),
    ],
    "autograd/direct-backward": [failed("RuntimeError", DIRECT, USER, TORCH, BACK)],
    "autograd/reduced-twice": [failed("AssertionError", TWICE, USER, BACK)],
    "autograd/recompute-mismatch": [
        failed("torch.utils.checkpoint.CheckpointError", "Recomputed values for the following tensors have different "
               "metadata than during the forward pass.", USER),
    ],
    "autograd/no-grad": [
        failed("RuntimeError", "element 0 of tensors does not require grad and does not have a grad_fn", USER),
        log(event("checkpoint-no-grad"), failures=log_failure("AssertionError", SCALAR, USER, BACK).logs.failures),
    ],
    "autograd/attention-dtype": [failed("RuntimeError", "FlashAttention only support fp16 and bf16 data type", USER)],
}  # fmt: skip
NEGATIVE = {
    "zero3/empty-weights-in-model": [
        failed("RuntimeError", EMPTY, USER, stage=2),
        log_failure("RuntimeError", EMPTY, USER),
        failed("RuntimeError", LOADING.format("0", "512, 256"), USER, stage=3),
        failed("RuntimeError", WEIGHT, USER, MODULE, USER, TORCH, stage=3),
        failed("RuntimeError", "The size of tensor a (16) must match the size of tensor b (8)", USER, stage=3),
    ],
    "zero3/empty-weights-in-checkpoint": [
        failed("RuntimeError", LOADING.format("512, 256", "0"), USER, stage=3),
        failed("RuntimeError", LOADING.format("512, 256", "128, 256"), USER, stage=3),
    ],
    "zero3/module-outside-engine": [
        failed("RuntimeError", WEIGHT, USER, ENGINE, MODULE, USER, TORCH, stage=3),
        failed("RuntimeError", WEIGHT, USER, MODULE, TORCH, stage=1),
    ],
    "zero3/inflight-params": [failed("AssertionError", "batch is not available", USER, stage=3), healthy()],
    "zero3/branch-hang": [failed("RuntimeError", "disagreement", USER, stage=3)],
    "zero3/tied-or-resized": [
        failed("AttributeError", "'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'", USER, stage=3),
        failed("AttributeError", "'Dataset' object has no attribute 'ids'", USER, stage=3),
    ],
    "config/zero3-load-conflict": [failed("ValueError", "device_map is unknown", USER, stage=3), healthy()],
    "autograd/direct-backward": [failed("RuntimeError", "Direct calls", USER, BACK), healthy()],
    "autograd/reduced-twice": [failed("AssertionError", "already done", USER), healthy()],
    "autograd/recompute-mismatch": [failed("RuntimeError", "metadata", USER)],
    "autograd/no-grad": [
        failed("AssertionError", SCALAR, USER, BACK),
        log(event("checkpoint-no-grad")),
    ],
    "autograd/attention-dtype": [log(), healthy()],
}


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in POSITIVE.items() for c in cases])
def test_positive(identifier, case):
    assert len(found(case, identifier)) == 1
    assert not found(case, "launch/user-exception")


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in NEGATIVE.items() for c in cases])
def test_negative(identifier, case):
    assert not found(case, identifier)


def test_misuse_under_stage_3_names_the_stage_as_its_key():
    (finding,) = found(POSITIVE["zero3/empty-weights-in-model"][0], "zero3/empty-weights-in-model")
    assert finding.keys == ("zero_optimization.stage",)


def test_the_stage_comes_from_the_engine():
    assert context.stage(healthy(stage=3)) == 3


def test_a_rank_at_the_gradients_when_the_one_at_the_weights_gave_up():
    """The reduction of a step comes after all its gathers on every rank, so these two ran different modules."""
    late = failure("RuntimeError", LATE, USER, FETCH, TORCH, rank=1)
    gone = failure("RuntimeError", GONE, USER, REDUCE, TORCH, rank=0)
    (finding,) = found(log(failures=(late, gone), **STAGE3), "zero3/branch-hang")
    assert {evidence.rank for evidence in finding.evidence} == {0, 1}


def test_a_rank_that_came_too_late_to_the_gather_ran_nothing_else():
    late = failure("RuntimeError", LATE, USER, FETCH, TORCH, rank=1)
    gone = failure("RuntimeError", GONE, USER, GATHER, TORCH, rank=0)
    assert not found(log(failures=(late, gone), **STAGE3), "zero3/branch-hang")


def test_parameters_gathered_in_the_forward_pass_that_uses_them():
    """DeepSpeed's message names two reasons; the order of modules is none of them."""
    (finding,) = found(log_failure("RuntimeError", ACTIVE, USER, FETCH), "zero3/inflight-params")
    assert "GatheredParameters" in finding.fixes[0].text
    assert "still worked with it" in finding.cause
