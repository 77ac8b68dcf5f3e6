# ruff: noqa: E501
"""Logs about partitioned parameters and backward passes, in the words of several releases and libraries."""

from tests.logs_real.written.parts import (
    SITE,
    WrittenLog,
    ds,
    falling,
    launched,
    log,
    stopped,
    torchrun_failed,
    traceback,
    trainer,
    watchdog,
)

ZERO3 = ds("Creating torch.bfloat16 ZeRO stage 3 optimizer")
CALL = (f"{SITE}/torch/nn/modules/module.py", 1532, "_call_impl", "return forward_call(*args, **kwargs)")
ENGINE = (f"{SITE}/deepspeed/runtime/engine.py", 1822, "forward", "loss = self.module(*inputs, **kwargs)")
LINEAR = (f"{SITE}/torch/nn/modules/linear.py", 116, "forward", "return F.linear(input, self.weight, self.bias)")
EMBED = (f"{SITE}/torch/nn/functional.py", 2237, "embedding", "return torch.embedding(weight, input, padding_idx)")
LOAD = (f"{SITE}/torch/nn/modules/module.py", 2189, "load_state_dict", "raise RuntimeError(")
FETCH = (
    f"{SITE}/deepspeed/runtime/zero/partitioned_param_coordinator.py",
    310,
    "fetch_sub_module",
    "assert param.ds_status == ZeroParamStatus.AVAILABLE, param.ds_summary()",
)
BACKWARD = (f"{SITE}/torch/autograd/__init__.py", 267, "backward", "_engine_run_backward(")


def both(kind: str, message: str, *frames: tuple[str, int, str, str], head: tuple[str, ...] = (ZERO3,)) -> str:
    ranks = [line for rank in range(2) for line in traceback(kind, message, *frames, prefix=f"[rank{rank}]: ")]
    return log(launched(), head, ranks, torchrun_failed(1, rank=0, others=(1,)))


def old_one_element() -> str:
    """Releases before 0.5 left one element of a partitioned parameter, not none."""
    message = """Error(s) in loading state_dict for BartModel:
\tsize mismatch for decoder.layers.0.self_attn.k_proj.weight: copying a param with shape torch.Size([1]) from checkpoint, the shape in current model is torch.Size([768, 768]).
\tsize mismatch for decoder.layers.0.self_attn.k_proj.bias: copying a param with shape torch.Size([1]) from checkpoint, the shape in current model is torch.Size([768])."""
    return log(traceback("RuntimeError", message, LOAD))


def set_empty_tensor() -> str:
    """Accelerate's words, on loading what was saved under ZeRO-3."""
    message = 'Trying to set a tensor of shape torch.Size([0]) in "weight" (which has shape torch.Size([64000, 7168])), this look incorrect.'
    return log(
        traceback(
            "ValueError",
            message,
            (f"{SITE}/accelerate/utils/modeling.py", 285, "set_module_tensor_to_device", "raise ValueError("),
        )
    )


def set_in_empty() -> str:
    message = 'Trying to set a tensor of shape torch.Size([43176, 8192]) in "weight" (which has shape torch.Size([0])), this look incorrect.'
    return log(
        traceback(
            "ValueError",
            message,
            (f"{SITE}/accelerate/utils/modeling.py", 285, "set_module_tensor_to_device", "raise ValueError("),
            prefix="[rank0]: ",
        )
    )


def model_is_empty() -> str:
    """No stage in the log, but which side is empty says it."""
    message = """Error(s) in loading state_dict for LlamaForCausalLM:
\tsize mismatch for model.embed_tokens.weight: copying a param with shape torch.Size([32001, 4096]) from checkpoint, the shape in current model is torch.Size([0]).
\tsize mismatch for lm_head.weight: copying a param with shape torch.Size([32001, 4096]) from checkpoint, the shape in current model is torch.Size([0]).
\tYou may consider adding `ignore_mismatched_sizes=True` in the model `from_pretrained` method."""
    return log(
        traceback(
            "RuntimeError",
            message,
            (f"{SITE}/transformers/modeling_utils.py", 4120, "_load_pretrained_model", "raise RuntimeError("),
            prefix="[rank0]: ",
        )
    )


def other_vocabulary() -> str:
    """An ordinary mismatch: nothing is empty."""
    message = """Error(s) in loading state_dict for LlamaForCausalLM:
\tsize mismatch for model.embed_tokens.weight: copying a param with shape torch.Size([32000, 4096]) from checkpoint, the shape in current model is torch.Size([32001, 4096])."""
    return both("RuntimeError", message, LOAD)


def ignored_mismatch() -> str:
    """The warning that is easy to miss: every weight is new."""
    return log(
        launched(),
        "Some weights of LlamaForCausalLM were not initialized from the model checkpoint at out/checkpoint-500 and are newly initialized because the shapes did not match:",
        "- model.embed_tokens.weight: found shape torch.Size([32000, 4096]) in the checkpoint and torch.Size([0]) in the model instantiated",
        "- model.norm.weight: found shape torch.Size([4096]) in the checkpoint and torch.Size([0]) in the model instantiated",
        "You should probably TRAIN this model on a down-stream task to be able to use it for predictions and inference.",
        trainer(falling(10, 11.2, 10.9)),
    )


def reference_model() -> str:
    """TRL's frozen copy: its module is called directly."""
    return both(
        "RuntimeError",
        "'weight' must be 2-D",
        ("ppo.py", 210, "batched_forward_pass", "logits = ref_model(**batch).logits"),
        CALL,
        EMBED,
    )


def norm_of_second_model() -> str:
    message = "Given normalized_shape=[1024], expected weight to be of same shape as normalized_shape, but got weight of shape [0] and normalized_shape = [1024]"
    return both(
        "RuntimeError",
        message,
        ("distill.py", 77, "step", "hidden = teacher.encoder(ids)"),
        CALL,
        (f"{SITE}/torch/nn/functional.py", 2546, "layer_norm", "return torch.layer_norm("),
    )


def convolution_of_tower() -> str:
    message = "weight should have at least three dimensions"
    return both(
        "RuntimeError",
        message,
        ("vlm.py", 77, "encode_images", "features = self.vision(images)"),
        CALL,
        (f"{SITE}/torch/nn/modules/conv.py", 456, "_conv_forward", "return F.conv2d("),
    )


def penalty_on_weights() -> str:
    message = "The size of tensor a (0) must match the size of tensor b (4096) at non-singleton dimension 0"
    return both(
        "RuntimeError",
        message,
        ENGINE,
        CALL,
        ("model.py", 51, "forward", "penalty = (self.proj.weight - self.anchor).pow(2).sum()"),
    )


def empty_batch() -> str:
    """ZeRO-2: a size of 0 is the batch, no parameter."""
    message = "The size of tensor a (0) must match the size of tensor b (8) at non-singleton dimension 0"
    return both(
        "RuntimeError",
        message,
        ("train.py", 51, "loss_of", "(logits - labels).pow(2)"),
        head=(ds("Creating torch.bfloat16 ZeRO stage 2 optimizer"),),
    )


def inflight_status() -> str:
    message = "{'id': 419, 'status': 'INFLIGHT', 'numel': 16777216, 'ds_numel': 16777216, 'shape': (8192, 2048), 'ds_shape': (8192, 2048), 'requires_grad': True, 'grad_shape': None, 'persist': False, 'active_sub_modules': {425}, 'ds_tensor.shape': torch.Size([4194304])}"
    return both("AssertionError", message, ENGINE, CALL, FETCH)


def still_active() -> str:
    message = "{'id': 0, 'status': 'AVAILABLE', 'numel': 131072000, 'ds_numel': 131072000, 'shape': (32000, 4096), 'ds_shape': (32000, 4096), 'requires_grad': True, 'grad_shape': None, 'persist': False, 'active_sub_modules': {2}, 'ds_tensor.shape': torch.Size([16384000])}"
    free = (
        f"{SITE}/deepspeed/runtime/zero/partition_parameters.py",
        285,
        "free_param",
        "assert not param.ds_active_sub_modules, param.ds_summary()",
    )
    return both(
        "AssertionError", message, ("save.py", 18, "save", "with deepspeed.zero.GatheredParameters(params):"), free
    )


def empty_queue() -> str:
    pop = (
        f"{SITE}/deepspeed/runtime/zero/partitioned_param_coordinator.py",
        318,
        "fetch_sub_module",
        "discarded_from_prefetch_queue.add(self.__param_queue.popleft())",
    )
    return both("IndexError", "pop from an empty deque", ENGINE, CALL, pop)


def disagreement() -> str:
    """0.8 to 0.17: the lists themselves."""
    message = "disagreement between rank0 and rank1: rank0: [0, 1, 2, 3, 4], rank1: [0, 1, 5, 6, 7]"
    check = (
        f"{SITE}/deepspeed/runtime/zero/utils.py",
        88,
        "assert_ints_same_as_other_ranks",
        'raise RuntimeError(f"disagreement between rank0 and rank{dist.get_rank()}: "',
    )
    return both("RuntimeError", message, ENGINE, CALL, check)


def disagreement_new() -> str:
    message = "Detected a disagreement on list length between rank0 and rank1: len=3, but rank0 has 5"
    check = (f"{SITE}/deepspeed/runtime/zero/utils.py", 78, "assert_lst_len_same_as_other_ranks", "raise RuntimeError(")
    return both("RuntimeError", message, ENGINE, CALL, check)


def ops_differ() -> str:
    """A vision tower that only some samples use: gathers on one rank, the reduction on the other."""
    return log(
        ZERO3,
        trainer(falling(20)),
        "Invalidate trace cache @ step 421 and module 907: cache has only 907 modules",
        watchdog(0, 2110, "_ALLGATHER_BASE", numel=2359296, out=18874368),
        watchdog(1, 2110, "_REDUCE_SCATTER_BASE", numel=18874368, out=2359296),
        torchrun_failed(-6, rank=0, others=(1,), name="SIGABRT"),
    )


def parameter_without_id() -> str:
    where = (
        f"{SITE}/deepspeed/runtime/zero/parameter_offload.py",
        240,
        "_convert_to_zero_parameters",
        "if hasattr(p, 'ds_id')]",
    )
    return both("AttributeError", "'Parameter' object has no attribute 'ds_numel'", where)


def module_without_count() -> str:
    where = (
        f"{SITE}/deepspeed/runtime/zero/parameter_offload.py",
        431,
        "_post_backward_module_hook",
        "module.ds_grads_remaining = 0",
    )
    return both("AttributeError", "'Linear' object has no attribute 'ds_grads_remaining'", ENGINE, CALL, where)


def device_map_refused() -> str:
    message = "DeepSpeed Zero-3 is not compatible with `low_cpu_mem_usage=True` or with passing a `device_map`."
    return both(
        "ValueError",
        message,
        (f"{SITE}/transformers/modeling_utils.py", 2890, "from_pretrained", "raise ValueError("),
        head=(),
    )


def other_shapes_recomputed() -> str:
    """No ZeRO-3: the forward pass itself depends on something that changed."""
    message = """torch.utils.checkpoint: Recomputed values for the following tensors have different metadata than during the forward pass.
tensor at position 25:
saved metadata: {'shape': torch.Size([1, 8, 24920, 128]), 'dtype': torch.bfloat16, 'device': device(type='cuda', index=2)}
recomputed metadata: {'shape': torch.Size([1, 8, 12460, 128]), 'dtype': torch.bfloat16, 'device': device(type='cuda', index=2)}"""
    where = (f"{SITE}/torch/utils/checkpoint.py", 903, "check_recomputed_tensors_match", "raise CheckpointError(")
    return both("torch.utils.checkpoint.CheckpointError", message, where, head=())


def other_number_recomputed() -> str:
    message = """torch.utils.checkpoint: A different number of tensors was saved during the original forward and recomputation.
Number of tensors saved during forward: 22
Number of tensors saved during recomputation: 13"""
    where = (f"{SITE}/torch/utils/checkpoint.py", 871, "check_recomputed_tensors_match", "raise CheckpointError(")
    return both("torch.utils.checkpoint.CheckpointError", message, where)


def lora_without_inputs() -> str:
    """Only the tail: no warning before it."""
    message = "element 0 of tensors does not require grad and does not have a grad_fn"
    return log(traceback("RuntimeError", message, BACKWARD, prefix="[rank0]: "), stopped(1))


def marked_twice() -> str:
    message = "Expected to mark a variable ready only once. This error is caused by one of the following reasons: 1) Use of a module parameter outside the `forward` function. 2) Reused parameters in multiple reentrant backward passes."
    return both("RuntimeError", message, BACKWARD, head=())


def reduced_of_name() -> str:
    message = "The parameter model.layers.3.mlp.up_proj.weight has already been reduced. Gradient computed twice for this partition. Multiple gradient reductions are currently not supported"
    return both(
        "AssertionError",
        message,
        (
            f"{SITE}/deepspeed/runtime/zero/stage_1_and_2.py",
            928,
            "reduce_independent_p_g_buckets_and_remove_grads",
            "assert",
        ),
        head=(),
    )


def flash_attention() -> str:
    where = (
        f"{SITE}/flash_attn/flash_attn_interface.py",
        51,
        "_flash_attn_forward",
        "out, q, k, v = flash_attn_cuda.fwd(",
    )
    return both("RuntimeError", "FlashAttention only support fp16 and bf16 data type", ENGINE, CALL, where, head=())


def direct_backward() -> str:
    message = "Direct calls to tensor.backward() are not supported in this configuration. Please use engine.backward(loss) instead."
    return both("RuntimeError", message, ("train.py", 90, "step", "loss.backward()"), head=())


def inside_deepspeed() -> str:
    where = (
        f"{SITE}/deepspeed/runtime/zero/stage_1_and_2.py",
        1411,
        "flatten_dense_tensors_aligned",
        "padding = alignment - remaining[shape[0]]",
    )
    return both(
        "TypeError",
        "unsupported operand type(s) for -: 'int' and 'NoneType'",
        (f"{SITE}/deepspeed/__init__.py", 171, "initialize", "engine = DeepSpeedEngine("),
        where,
        head=(),
    )


CASES = (
    WrittenLog(name="old-one-element", text=old_one_element(), primary="zero3/empty-weights-in-checkpoint", absent=("zero3/empty-weights-in-model", "launch/user-exception")),
    WrittenLog(name="set-empty-tensor", text=set_empty_tensor(), primary="zero3/empty-weights-in-checkpoint", absent=("zero3/empty-weights-in-model", "launch/user-exception")),
    WrittenLog(name="set-in-empty", text=set_in_empty(), primary="zero3/empty-weights-in-model", absent=("zero3/empty-weights-in-checkpoint", "launch/user-exception")),
    WrittenLog(name="model-is-empty", text=model_is_empty(), primary="zero3/empty-weights-in-model", absent=("zero3/empty-weights-in-checkpoint", "launch/user-exception")),
    WrittenLog(name="other-vocabulary", text=other_vocabulary(), primary="launch/user-exception", absent=("zero3/empty-weights-in-model", "zero3/empty-weights-in-checkpoint")),
    WrittenLog(name="ignored-mismatch", text=ignored_mismatch(), primary="zero3/empty-weights-in-model", line="torch.Size([0])"),
    WrittenLog(name="reference-model", text=reference_model(), primary="zero3/module-outside-engine", absent=("zero3/empty-weights-in-model", "launch/user-exception")),
    WrittenLog(name="norm-of-second-model", text=norm_of_second_model(), primary="zero3/module-outside-engine", absent=("zero3/empty-weights-in-model",)),
    WrittenLog(name="convolution-of-tower", text=convolution_of_tower(), primary="zero3/module-outside-engine", absent=("launch/user-exception",)),
    WrittenLog(name="penalty-on-weights", text=penalty_on_weights(), primary="zero3/empty-weights-in-model", absent=("zero3/module-outside-engine",)),
    WrittenLog(name="empty-batch", text=empty_batch(), primary="launch/user-exception", absent=("zero3/empty-weights-in-model", "zero3/module-outside-engine")),
    WrittenLog(name="inflight-status", text=inflight_status(), primary="zero3/inflight-params", absent=("launch/user-exception", "deepspeed/internal-error")),
    WrittenLog(name="still-active", text=still_active(), primary="zero3/inflight-params", absent=("launch/user-exception", "deepspeed/internal-error")),
    WrittenLog(name="empty-queue", text=empty_queue(), primary="zero3/inflight-params", absent=("launch/user-exception", "deepspeed/internal-error")),
    WrittenLog(name="disagreement", text=disagreement(), primary="zero3/branch-hang", absent=("launch/user-exception", "deepspeed/internal-error")),
    WrittenLog(name="disagreement-new", text=disagreement_new(), primary="zero3/branch-hang", absent=("launch/user-exception", "deepspeed/internal-error")),
    WrittenLog(name="ops-differ", text=ops_differ(), primary="zero3/branch-hang", accept=("comm/collective-mismatch",), absent=("comm/timeout", "launch/abort")),
    WrittenLog(name="parameter-without-id", text=parameter_without_id(), primary="zero3/tied-or-resized", absent=("deepspeed/internal-error",)),
    WrittenLog(name="module-without-count", text=module_without_count(), primary="zero3/tied-or-resized", absent=("deepspeed/internal-error",)),
    WrittenLog(name="device-map-refused", text=device_map_refused(), primary="config/zero3-load-conflict", absent=("launch/user-exception",)),
    WrittenLog(name="other-shapes-recomputed", text=other_shapes_recomputed(), primary="autograd/recompute-mismatch", absent=("launch/user-exception",)),
    WrittenLog(name="other-number-recomputed", text=other_number_recomputed(), primary="autograd/recompute-mismatch", absent=("launch/user-exception",)),
    WrittenLog(name="lora-without-inputs", text=lora_without_inputs(), primary="autograd/no-grad", absent=("launch/user-exception",)),
    WrittenLog(name="marked-twice", text=marked_twice(), primary="autograd/reduced-twice", absent=("launch/user-exception",)),
    WrittenLog(name="reduced-of-name", text=reduced_of_name(), primary="autograd/reduced-twice"),
    WrittenLog(name="flash-attention", text=flash_attention(), primary="autograd/attention-dtype", absent=("launch/user-exception",)),
    WrittenLog(name="direct-backward", text=direct_backward(), primary="autograd/direct-backward", absent=("launch/user-exception",)),
    WrittenLog(name="inside-deepspeed", text=inside_deepspeed(), primary="deepspeed/internal-error", absent=("launch/user-exception",)),
)  # fmt: skip
