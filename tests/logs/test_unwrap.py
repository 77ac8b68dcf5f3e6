"""What is around a line, and whose line it is."""

import pytest

from dsdoctor.logs.unwrap import apart, unwrap

LINE = "RuntimeError: it broke"


@pytest.mark.parametrize(
    ("prefix", "rank"),
    [
        ("", None),
        ("[rank3]: ", 3),
        ("[default2]:", 2),
        ("12: ", 12),
        ("[1,5]<stdout>:", 5),
        ("worker-0: ", None),
        ("worker-1: [rank6]: ", 6),
        ("10.0.8.21: ", None),
        ("c3n07: ", None),
        ("rank 4: ", 4),
        ("(TrainWorker pid=123, ip=10.0.0.1) ", None),
        ("trainer-1  | ", None),
        ("\x1b[36mtrainer-1  | \x1b[0m", None),
        ("[pod/job-0/main] ", None),
        ("2026-05-20T11:06:11.999Z ", None),
        ("2026-05-20 11:06:11.999 [INFO] [Driver] [rank1]: ", 1),
        ("> > ", None),
        ("\x1b]0;title\x07", None),
    ],
)
def test_prefixes_in_any_stack(prefix, rank):
    got = unwrap(prefix + LINE)
    assert (got.text, got.rank) == (LINE, rank)


@pytest.mark.parametrize(
    "line",
    [
        "step 12: loss 3.2",
        "[2026-05-20 10:59:31,369] [INFO] [config.py:678:print] x",
        "10:59:31 loss",
        '  File "train.py", line 3, in main',
        "{'loss': 1.0}",
        "Epoch 1: 12%",
        "rank 1: 388 samples, 194 batches",
        "torch.cuda.OutOfMemoryError: CUDA out of memory",
    ],
)
def test_what_is_no_prefix_stays(line):
    assert unwrap(line).text == line


def test_indentation_after_a_prefix_stays():
    assert unwrap('[rank0]:   File "a.py", line 1').text == '  File "a.py", line 1'


def test_a_box_is_taken_off():
    assert unwrap("│ ValueError: bad        │").text == "ValueError: bad"


def test_control_characters_do_not_survive():
    assert "\x1b" not in unwrap("\x1b[31mred\x1b[0m \x1b]52;c;aGk=\x07text\x07").text


@pytest.mark.parametrize(
    ("line", "text", "host"),
    [
        ("worker-0: RuntimeError: x", "RuntimeError: x", "worker-0"),
        ("May  1 10:11:01 gpu07 train.sh[412]: step 1", "step 1", "gpu07"),
        ("10.0.8.21: [rank1]: RuntimeError: x", "RuntimeError: x", "10.0.8.21"),
        ("node01:12:34 [0] NCCL INFO x", "node01:12:34 [0] NCCL INFO x", "node01"),
        ("c3n07: node01:12:34 [0] NCCL INFO x", "c3n07: node01:12:34 [0] NCCL INFO x", None),
        ("worker-1: node01:12:34 [0] NCCL INFO x", "node01:12:34 [0] NCCL INFO x", "node01"),
        ("RuntimeError: x", "RuntimeError: x", None),
    ],
)
def test_the_host_is_kept(line, text, host):
    got = unwrap(line)
    assert (got.text, got.host) == (text, host)


@pytest.mark.parametrize(
    ("glued", "count"),
    [
        ("{'loss': 1.0}{'loss': 2.0}", 2),
        ("[rank0]: x[rank1]: y", 2),
        ("reducing to 8[2024-03-20 12:15:47,438] [INFO] [a.py:1:f] y", 2),
        ("3/30 [00:04<00:05,  8.90it/s]Traceback (most recent call last):", 2),
        ("'text\\nTraceback (most recent call last):'", 1),
        ("[rank0]: [2024-03-20 12:15:47,438] [INFO] [a.py:1:f] y", 1),
        ("> [rank1]: Traceback (most recent call last):", 1),
    ],
)
def test_texts_in_one_line(glued, count):
    assert len(apart(glued)) == count
    assert "".join(apart(glued)) == glued
