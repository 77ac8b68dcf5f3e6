"""Exceptions out of tracebacks: interleaved, chained, ignored, survived."""

from dsdoctor.logs.read import read_logs

HEAD = "Traceback (most recent call last):\n"
USER = '  File "/home/u/train.py", line 7, in main\n    loss = step(x)\n           ^^^^^^^\n'
INNER = '  File "/env/lib/python3.11/site-packages/torch/nn/functional.py", line 9, in embedding\n    return f(x)\n'


def facts(tmp_path, text):
    path = tmp_path / "a.log"
    path.write_text(text)
    return read_logs([path])


def ranked(rank, text):
    return "".join(f"[rank{rank}]: {line}\n" for line in text.splitlines())


def test_type_message_frames_and_line(tmp_path):
    (failure,) = facts(tmp_path, "start\n" + HEAD + USER + INNER + "KeyError: 'label'\n").failures
    assert (failure.type, failure.message, failure.line) == ("KeyError", "'label'", 8)
    assert [(f.file, f.line, f.function, f.text) for f in failure.frames] == [
        ("/home/u/train.py", 7, "main", "loss = step(x)"),
        ("/env/lib/python3.11/site-packages/torch/nn/functional.py", 9, "embedding", "return f(x)"),
    ]


def test_every_rank_has_its_own(tmp_path):
    zero = ranked(0, HEAD + USER + "KeyError: 'a'").splitlines()
    one = ranked(1, HEAD + USER + "ValueError: b").splitlines()
    text = "\n".join(line for pair in zip(zero, one, strict=True) for line in pair)
    got = facts(tmp_path, text)
    assert {(f.rank, f.type, len(f.frames)) for f in got.failures} == {(0, "KeyError", 1), (1, "ValueError", 1)}
    assert got.ranks == (0, 1)


def test_interleaved_without_any_prefix(tmp_path):
    """Two processes write into one pipe: the exceptions are two, whatever became of their frames."""
    text = HEAD + USER + HEAD + USER + "RuntimeError: one\n" + INNER + "RuntimeError: two\n"
    assert [f.message for f in facts(tmp_path, text).failures] == ["one", "two"]


def test_a_message_of_many_lines_keeps_them_with_their_places(tmp_path):
    text = HEAD + USER + "RuntimeError: Error(s) in loading:\n\tsize mismatch for a\n\tsize mismatch for b\n\nnext\n"
    (failure,) = facts(tmp_path, text).failures
    assert failure.message.splitlines()[2] == "\tsize mismatch for b"
    assert failure.message_lines == (5, 6, 7)


def test_a_chain_is_one_failure(tmp_path):
    text = (
        HEAD + USER + "OSError: disk\n\nDuring handling of the above exception, another exception occurred:\n\n"
        + HEAD + USER + "RuntimeError: save failed\n"
    )  # fmt: skip
    (failure,) = facts(tmp_path, text).failures
    assert failure.type == "RuntimeError"
    assert [(c.type, c.message) for c in failure.chain] == [("OSError", "disk")]


def test_destructors_end_nothing(tmp_path):
    text = "Exception ignored in: <function A.__del__ at 0x7f>\n" + HEAD + USER + "AttributeError: no 'ds_opt_adam'\n"
    assert facts(tmp_path, text).failures == ()


def test_destructors_end_nothing_behind_a_prefix_that_is_not_known(tmp_path):
    text = f"Exception ignored in: <function f.__del__ at 0x7f>\n{HEAD}{USER}AttributeError: gone\n"
    assert facts(tmp_path, "".join(f"[x] [INFO] {line}\n" for line in text.splitlines())).failures == ()


def test_the_launchers_own_traceback_is_no_failure_of_the_job(tmp_path):
    launcher = '  File "/env/lib/python3.11/site-packages/torch/distributed/run.py", line 9, in main\n    run(args)\n'
    text = HEAD + launcher + "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n=====\n"
    assert facts(tmp_path, text).failures == ()


def test_training_that_goes_on_clears_a_traceback(tmp_path):
    handled = HEAD + USER + "OSError: retrying\n"
    after = "".join(f"step {i} loss 2.{i}\n" for i in range(1, 9))
    assert facts(tmp_path, handled + after).failures == ()
    assert len(facts(tmp_path, after + handled).failures) == 1


def test_one_more_line_of_another_rank_does_not_clear_it(tmp_path):
    text = "step 1 loss 2.0\n" + ranked(3, HEAD + USER + "ValueError: bad") + "step 2 loss 1.9\n"
    assert len(facts(tmp_path, text).failures) == 1


def test_a_ranks_exception_whose_traceback_was_cut_off(tmp_path):
    text = "[rank5]: torch.distributed.DistBackendError: NCCL error\n[rank5]: ncclRemoteError: A call failed\n"
    (failure,) = facts(tmp_path, text).failures
    assert (failure.rank, failure.type) == (5, "torch.distributed.DistBackendError")
    assert "ncclRemoteError" in failure.message


def test_a_traceback_in_a_box(tmp_path):
    """As rich draws it."""
    text = (
        "╭──────── Traceback (most recent call last) ────────╮\n"
        "│ /home/u/train.py:72 in main                       │\n"
        "│                                                   │\n"
        "│   71 │   batch = next(it)                         │\n"
        "│ ❱ 72 │   loss = step(batch)                       │\n"
        "╰───────────────────────────────────────────────────╯\n"
        "KeyError: 'label'\n"
    )
    (failure,) = facts(tmp_path, text).failures
    assert (failure.type, failure.line) == ("KeyError", 7)
    assert (failure.frames[-1].file, failure.frames[-1].line) == ("/home/u/train.py", 72)
    assert failure.frames[-1].text == "loss = step(batch)"


def test_prose_about_errors_is_none(tmp_path):
    text = "RuntimeError: CUDA out of memory means that no block was found.\nError: see the manual\n\nChapter 2\n"
    assert facts(tmp_path, text).failures == ()


def test_the_last_line_alone_is_an_exception_where_the_log_ends_with_it(tmp_path):
    """People paste no more than that; in the middle of a log a script prints so what it has caught."""
    line = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    (failure,) = facts(tmp_path, "Trying batch size 16\n" + line).failures
    assert (failure.type, failure.line, failure.frames) == ("torch.OutOfMemoryError", 2, ())
    assert facts(tmp_path, line + "\nTrying batch size 8\n").failures == ()


def test_an_excerpt_may_begin_in_the_middle_of_a_traceback(tmp_path):
    (failure,) = facts(tmp_path, INNER + "RuntimeError: lost\n").failures
    assert (failure.message, [f.function for f in failure.frames]) == ("lost", ["embedding"])


def test_a_stack_without_an_exception_is_none(tmp_path):
    """As `traceback.print_stack` and warnings print it."""
    text = USER + INNER + "A word in between\nWarning: the cache is cold\nValueError: caught\n\nstep 3 done\n"
    assert facts(tmp_path, text).failures == ()


def test_the_head_of_a_warning_s_stack_does_not_swallow_the_traceback_behind_it(tmp_path):
    text = "Error detected in LogBackward0. Traceback of forward call that caused the error:\n" + INNER + HEAD + USER
    (failure,) = facts(tmp_path, text + "RuntimeError: nan\n").failures
    assert [f.function for f in failure.frames] == ["main"]


def test_ipython(tmp_path):
    """A notebook prints the type in front of the head, and no frame as Python does."""
    text = (
        "---------------------------------------------------------------------------\n"
        "RuntimeError                              Traceback (most recent call last)\n"
        "Cell In[3], line 1\n----> 1 trainer.train()\n\n"
        "File /env/lib/python3.11/site-packages/transformers/trainer.py:2245, in Trainer.train(self, **kwargs)\n"
        "   2243         hf_hub_utils.enable_progress_bars()\n-> 2245     return inner_training_loop(\n\n"
        "RuntimeError: Error building extension 'cpu_adam'\n"
    )
    (failure,) = facts(tmp_path, text).failures
    assert (failure.type, failure.message) == ("RuntimeError", "Error building extension 'cpu_adam'")
    assert [(f.line, f.function) for f in failure.frames] == [(2245, "Trainer.train")]


def test_labels_between_the_frames_are_no_exceptions(tmp_path):
    text = HEAD + USER + "Loss: 2.3\nstage: 1\nKeyError: 'x'\n"
    assert [f.type for f in facts(tmp_path, text).failures] == ["KeyError"]


def test_a_message_ends_where_a_code_block_does(tmp_path):
    text = f"I get this:\n```\n{HEAD}{USER}AssertionError\n```\nWhat can I do?\n"
    (failure,) = facts(tmp_path, text).failures
    assert (failure.type, failure.message) == ("AssertionError", "")


def test_a_message_that_a_terminal_broke(tmp_path):
    """Only the exception is as long as the terminal is wide; its next line goes on within a word."""
    line = "RuntimeError: " + "x" * 100 + " the cause"
    (failure,) = facts(tmp_path, f"{HEAD}{line[:80]}\n{line[80:]}\n".replace(HEAD, HEAD + USER)).failures
    assert failure.message == line.removeprefix("RuntimeError: ")


def test_a_box_with_other_times_before_each_line(tmp_path):
    lines = (
        "╭── Traceback (most recent call last) ──╮",
        "│ /x/site-packages/torch/func.py:9 in   │",
        "│ embedding                             │",
        "╰───────────────────────────────────────╯",
        "KeyError: 'label'",
    )
    text = "".join(f"2025-03-10T13:52:1{at}Z {line}\n" for at, line in enumerate(lines))
    (failure,) = facts(tmp_path, text).failures
    assert [frame.function for frame in failure.frames] == ["embedding"]


def test_rich_breaks_the_message(tmp_path):
    lines = (
        "╭─────── Traceback (most recent call last) ───────╮",
        "│ /home/u/train.py:72 in main                     │",
        "╰─────────────────────────────────────────────────╯",
        "AssertionError: The batch size is not the product",
        "of micro batch, accumulation and ranks",
        "See the docs",
    )
    (failure,) = facts(tmp_path, "\n".join(lines) + "\n").failures
    assert failure.message == ("The batch size is not the product of micro batch, accumulation and ranks\nSee the docs")
    assert failure.message_lines == (4, 6)
    at_80 = (lines[0].replace("──╮", "─" * 51 + "╮"), "KeyError: " + "x" * 65, "'label' is not there")
    (failure,) = facts(tmp_path, "\n".join((at_80[0], *lines[1:3], *at_80[1:])) + "\n").failures
    assert failure.message.endswith("x 'label' is not there")


def test_a_message_of_several_lines_between_heads(tmp_path):
    """Two ranks write their heads first; what follows the exception of one is no code of the other."""
    text = f"{HEAD}{USER}{HEAD}pydantic.ValidationError: 1 validation error\naio\n  extra fields not permitted\n"
    (failure,) = facts(tmp_path, text).failures
    assert failure.message == "1 validation error\naio\n  extra fields not permitted"


def test_the_exception_of_a_worker_of_ray(tmp_path):
    lines = (
        "ray.exceptions.RayTaskError(ValueError): ray::Worker.init() (pid=7, ip=10.0.0.3)",
        '  File "/home/u/workers.py", line 101, in init',
        "    raise ValueError('no such size')",
        "ValueError: no such size",
        "of the batch",
    )
    (failure,) = facts(tmp_path, HEAD + USER + "\n".join(lines) + "\n").failures
    assert (failure.type, failure.message, failure.line) == ("ValueError", "no such size\nof the batch", 8)
    assert [(frame.file, frame.text) for frame in failure.frames] == [
        ("/home/u/workers.py", "raise ValueError('no such size')")
    ]
