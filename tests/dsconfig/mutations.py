"""Generated ds_configs: every key of a release's schema, mutated by type, range and name, and keys put together.

The order is fixed (a seeded generator), so that a disagreement with DeepSpeed can be found again by its number.
"""

import random

from dsdoctor.dsconfig import keys, patch
from dsdoctor.dsconfig.schema import schema_for

BASE = {"train_micro_batch_size_per_gpu": 1}
ZERO = "zero_optimization"
VALUES = (
    *(None, True, False),
    *(0, 1, 2, 3, 4, -1, 16, 1_000_000_007),
    *(0.0, 0.5, 1.0, -0.5, 1e8, 1e20, float("nan"), float("inf")),
    *(
        "",
        "auto",
        "true",
        "False",
        "maybe",
        "3",
        " 3 ",
        "1e8",
        "0.5",
        "1_000",
        "fp16",
        "bfloat16",
        "cpu",
        "nvme",
        "warn",
    ),
    *([], [1], ["a"], {}, {"enabled": True}, {"x": 1}),
)
_LISTS = ([0.9, 0.99], ["a", "b"], [[1]], [None])
_CONTEXT = {  # what a section needs before its keys are looked at
    ZERO: {"stage": 2},
    "fp16": {"enabled": True},
    "bf16": {"enabled": True},
    "torch_autocast": {"enabled": True},
}


def configs(release):
    """All generated configs for a release, a few thousand."""
    chance = random.Random(20)
    made = [*_by_value(release), *_by_name(release, chance), *_together(release, chance)]
    return [BASE | config for config in made]


def _paths(release):
    return [key.path for section in schema_for(release).sections.values() for key in section.keys.values()]


def _by_value(release):
    """Each key with each value, alone and (in a section with a switch) beside the switch."""
    for path in _paths(release):
        section, _, name = path.partition(".")
        for value in (*VALUES, *_LISTS):
            alone = _set(path, value)
            yield alone
            if name and section in _CONTEXT and path != f"{section}.{next(iter(_CONTEXT[section]))}":
                yield {section: _CONTEXT[section] | alone[section]}


def _by_name(release, chance):
    """Each key misspelt, under its other spelling, one level up, and in another section."""
    schema = schema_for(release)
    sections = [path for path in schema.sections if path]
    for path in _paths(release):
        section, _, name = path.rpartition(".")
        value = schema.key(path).default
        value = 1 if value is None else value
        at = chance.randrange(len(name))
        dropped, doubled = name[:at] + name[at + 1 :], name[:at] + name[at] + name[at:]
        for other in (dropped or "x", doubled, name.upper(), name.replace("_", "-"), schema.key(path).also or name):
            yield _set(f"{section}.{other}" if section else other, value)
        yield _set(name, value)
        yield _set(f"{chance.choice(sections)}.{name}", value)


def _together(release, chance, count=1500):
    """Several keys at once, each with a value that it would take, or nearly."""
    schema = schema_for(release)
    paths = _paths(release)
    for _ in range(count):
        config = {ZERO: {"stage": chance.randrange(4)}} if chance.random() < 0.7 else {}
        for path in chance.sample(paths, chance.randrange(2, 6)):
            config = patch.apply(config, keys.as_patch(path, _fitting(schema.key(path), chance)))
        yield config


def _fitting(key, chance):
    choices = {
        "bool": (True, False),
        "int": (0, 1, 2, 8, 500_000_000),
        "float": (0, 0.5, 1.0, 2),
        "str": ("fp16", "cpu", "none", "x", "sum"),
        "list": ([], ["a"]),
        "dict": ({}, {"x": 1}),
        "section": ({}, {"enabled": True}),
        "any": (None, "a", 1),
    }[key.kind]
    return chance.choice(key.choices or choices)


def _set(path, value):
    """The config with one dotted key; unlike a merge patch it can hold null."""
    for part in reversed(path.split(".")):
        value = {part: value}
    return value
