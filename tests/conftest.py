"""What all tests share: compiled ops come from dsdoctor's own cache, so that a build somebody killed cannot hang them."""

import os

from dsdoctor.runs import extensions

os.environ[extensions.VARIABLE] = str(extensions.prepared(extensions.cache_folder()))
