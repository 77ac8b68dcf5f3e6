"""Environment variables: what is shown, what is hidden, what is left out."""

import doctest

from dsdoctor.machine import variables


def test_doctests():
    assert doctest.testmod(variables).failed == 0


def test_what_changes_a_job_is_shown():
    given = {"NCCL_SOCKET_IFNAME": "eth0", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    assert variables.select(given | {"HOME": "/home/u", "PATH": "/bin"}) == given


def test_nothing_private_is_shown():
    private = {"HF_TOKEN": "hf_abc", "WANDB_API_KEY": "abc", "https_proxy": "http://me:pw@proxy", "DS_SECRET": "abc"}
    assert set(variables.select(private).values()) == {"(set)"}
    assert variables.select({"AWS_SECRET_ACCESS_KEY": "abc", "MY_CUDA_HOME": "x"}) == {}
