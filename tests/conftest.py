"""What all tests share: ops are compiled in dsdoctor's own cache, where the lock of a killed build cannot hang them."""

import os
import signal
from collections.abc import Iterator

import pytest

from dsdoctor.runs import extensions

os.environ[extensions.VARIABLE] = str(extensions.prepared(extensions.cache_folder()))


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> Iterator[None]:
    """Tests interrupt processes. A shell that starts pytest in the background has it ignore that, and all it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
