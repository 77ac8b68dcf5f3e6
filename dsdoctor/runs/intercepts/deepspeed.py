"""`deepspeed.initialize`: our config in place of the script's, the facts of the model, and an observed engine.

Runs in rank processes only; patched right after the script has imported DeepSpeed, before it can use a name of it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from dsdoctor.runs import engine_facts, rank_process, run_config
from dsdoctor.runs.containment import Containment
from dsdoctor.runs.engine_facts import Framework
from dsdoctor.runs.facts import EngineFacts, ModelFacts
from dsdoctor.runs.imports import ImportHooks
from dsdoctor.runs.intercepts import config_notes, detector, fp16_on_cpu, fp32, resume, without_deepspeed
from dsdoctor.runs.observe import Observer
from dsdoctor.runs.session import RankSession
from dsdoctor.runs.stopping import StopRule

_CONFIG_PARAMETERS = ("config", "config_params")
_CONFIG_ARGUMENTS = ("deepspeed_config", "deepscale_config")


def install(session: RankSession, hooks: ImportHooks, containment: Containment) -> None:
    hooks.after_import("deepspeed", lambda module: Intercept(session, containment, module).attach())


class Intercept:
    """Stands in for `deepspeed.initialize` (and the config of `zero.Init`) of one run."""

    def __init__(self, session: RankSession, containment: Containment, module: ModuleType) -> None:
        self._session = session
        self._containment = containment
        self._deepspeed = module
        self._original = module.initialize
        self._signature = inspect.signature(self._original)
        self._rule = StopRule(session, rank_process.end_after)
        self._observer = Observer(session, self._rule)
        self._building = False
        """DeepSpeed is inside `initialize`, where it calls `zero.Init` itself, with the config of its engine."""

    def attach(self) -> None:
        @functools.wraps(self._original)
        def initialize(*args: Any, **kwargs: Any) -> Any:
            return self._initialize(dict(self._signature.bind(*args, **kwargs).arguments))

        session = self._session
        session.patch(self._deepspeed, "initialize", initialize)
        if session.spec.engine == "plain":
            without_deepspeed.attach(session, self._deepspeed)
        else:
            self._replace_config_of_zero_init()

    def _initialize(self, call: dict[str, Any]) -> Any:
        """What the script calls. Returns what DeepSpeed (or the plain engine) returns."""
        session = self._session
        in_call = any(call.get(name) is not None for name in _CONFIG_PARAMETERS)
        config, framework = self._config_for(call)
        if getattr(call.get("args"), "device_rank", 0) is None:  # Lightning's number of a CPU, which has none
            call["args"].device_rank = session.local_rank
        if session.spec.precision == "fp32":
            fp32.cast_model(session, call.get("model"))
        if session.spec.engine == "plain":
            config = run_config.without_zero(config)
        model, facts = self._record(call, config, framework)
        if session.spec.probe:
            self._rule.stop("probe")
        start = self._start_plain if session.spec.engine == "plain" else self._start_deepspeed
        # a config in `args` beside one in the call is the script's mistake, and DeepSpeed's to refuse
        with contextlib.nullcontext() if in_call else _without_config_arguments(call.get("args")):
            result = start(call, config)
        if not self._observer.watching:  # the checkpoint is of the first engine
            resume.load(session, result[0])
        self._watch(result[0], model, facts)
        return result

    def _config_for(self, call: dict[str, Any]) -> tuple[dict[str, Any], Framework]:
        """Take the script's config out of the call; the one to use instead, and who calls.

        A config that came from us and that a framework filled in since ("auto") is the one to use.
        """
        passed = _passed_config(call)
        for name in _CONFIG_PARAMETERS:
            call.pop(name, None)
        framework = self._session.filled_in_by(passed)
        with self._session.guard("compare the script's config with the given one"):
            if framework is not None:
                config_notes.say_filled_in(self._session, passed, framework)
            elif passed is None:
                self._session.note("the script passes no config to deepspeed.initialize: the given one is used")
            else:
                config_notes.say_differences(self._session, passed)
        if framework is not None:
            return dict(passed), framework
        return self._session.config(), "deepspeed"

    def _record(
        self, call: dict[str, Any], config: dict[str, Any], framework: Framework
    ) -> tuple[ModelFacts, EngineFacts] | tuple[None, None]:
        session = self._session
        with session.guard("describe the model"):
            optimizer = call.get("optimizer")
            facts = engine_facts.engine_facts(
                config, framework=framework, optimizer=optimizer, world_size=session.world_size
            )
            model = engine_facts.model_facts(call["model"], call.get("model_parameters"), optimizer)
            if not self._observer.watching:
                session.trace.initialize(model, facts)
            return model, facts
        return None, None

    def _start_plain(self, call: dict[str, Any], config: dict[str, Any]) -> Any:
        from dsdoctor.runs import plain

        stage = run_config.zero_stage(self._session.spec.config)
        result = plain.initialize(**call, config=config, zero_stage=stage)
        for note in result[0].notes:
            self._session.note(note)
        return result

    def _start_deepspeed(self, call: dict[str, Any], config: dict[str, Any]) -> Any:
        session = self._session
        config = run_config.with_visible_overflows(config)
        session.note("DeepSpeed's log level is raised to info in the copy of the config, to show skipped steps")
        with session.guard("raise DeepSpeed's log level"):
            set_level = getattr(self._deepspeed.utils, "set_log_level_from_string", None)
            if set_level is not None:
                set_level(config["log_level"])
        with session.guard("contain DeepSpeed's monitors"):
            self._containment.contain_config(config)
        with session.guard("allow fp16 on this device"):
            fp16_on_cpu.allow(session, self._deepspeed, config)
        self._building = True
        try:
            return self._original(**call, config=config)
        finally:
            self._building = False

    def _watch(self, engine: Any, model: ModelFacts | None, facts: EngineFacts | None) -> None:
        session = self._session

        def chosen() -> None:
            if model is not None and facts is not None:
                session.trace.initialize(model, facts)
            if session.spec.detector:
                detector.attach(session, engine)

        cast = fp32.input_cast(session) if session.spec.precision == "fp32" else None
        with session.guard("observe the engine"):
            first = self._observer.adopt(engine, facts, cast, chosen)
            self._containment.contain_engine(engine)
            if first and session.spec.detector:
                detector.attach(session, engine)

    def _replace_config_of_zero_init(self) -> None:
        """`zero.Init` reads precision and offload from a config too: it must be the one of this run."""
        session = self._session
        kind = self._deepspeed.zero.Init
        original: Callable[..., None] = kind.__init__
        signature = inspect.signature(original)

        @functools.wraps(original)
        def init(this: Any, *args: Any, **kwargs: Any) -> None:
            call = signature.bind(this, *args, **kwargs)
            with session.guard("replace the config of zero.Init"):
                for name in ("config_dict_or_path", "config"):
                    passed = call.arguments.get(name)
                    own = self._building or session.filled_in_by(passed) is not None
                    if passed is not None and not own:
                        call.arguments[name] = session.config()
                if session.spec.precision == "fp32" and call.arguments.get("dtype") is not None:
                    call.arguments["dtype"] = fp32.dtype()
                fp16_on_cpu.allow(session, self._deepspeed, session.config())
            original(*call.args, **call.kwargs)

        session.patch(kind, "__init__", init)


def _passed_config(call: dict[str, Any]) -> Any:
    """The config that the script passes, in DeepSpeed's own order of precedence."""
    passed = [call.get(name) for name in _CONFIG_PARAMETERS]
    passed += [getattr(call.get("args"), name, None) for name in _CONFIG_ARGUMENTS]
    return next((value for value in passed if value is not None), None)


@contextlib.contextmanager
def _without_config_arguments(args: Any) -> Iterator[None]:
    """Make way for the config that we put into the call; the script's own is put back afterwards."""
    held = {name: getattr(args, name) for name in _CONFIG_ARGUMENTS if getattr(args, name, None) is not None}
    for name in held:
        setattr(args, name, None)
    try:
        yield
    finally:
        for name, value in held.items():
            setattr(args, name, value)
