"""What all tests share: ops are compiled in dsdoctor's own cache, where the lock of a killed build cannot hang them."""

import os

from dsdoctor.runs import extensions

os.environ[extensions.VARIABLE] = str(extensions.prepared(extensions.cache_folder()))
