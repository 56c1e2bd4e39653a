"""Each option is defined once, beside its core; the frontends' signatures, docstrings and stubs are made from that."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ocomm.optim
from ocomm.docstrings import documented
from ocomm.errors import NotInitializedError
from ocomm.optim.core import Core
from ocomm.optim.options import Options, option
from ocomm.training.common import Common
from tools import stubs

#: Arguments of a frontend that are no options, and have no twin in the other.
OWN = {
    "ocomm_torch": {
        "optimizer",
        "named_parameters",
        "named_buffers",
        "warm_start",
        "process_set",
        "mesh",
        "data",
        "offload",
        "free_gradients",
    },
    "ocomm_tf.keras": {"optimizer", "variables", "buffers", "warm_start", "names", "process_set"},
}
#: Arguments that differ from their definition: Keras has a Lion of its own, whose betas count.
DIFFERENT = {("ocomm_tf.keras", "Lion", "betas"): ("tuple[float, float] | None", None)}
#: Options that an optimizer has no use for.
WITHOUT = {"DiLoCo": {*Common.texts()} - {"block_size", "hierarchical"}}


def cores(base: type[Core] = Core) -> Iterator[type[Core]]:
    for module in pkgutil.iter_modules(ocomm.optim.__path__):
        importlib.import_module(f"ocomm.optim.{module.name}")
    for core in base.__subclasses__():
        yield core
        yield from cores(core)


#: Averages in codes, whose options follow from ``compression``.
WITHOUT_OPTIONS = {"Optimizer", "GradientTape"}
CORES = {core.kind: core for core in cores() if getattr(core, "kind", None) not in {None, *WITHOUT_OPTIONS}}


def options_of(kind: str) -> dict[str, dataclasses.Field[Any]]:
    core = CORES[kind]
    found = {f.name: f for owner in (core.options_class, Common) for f in dataclasses.fields(owner)}
    return {name: f for name, f in found.items() if name not in {*core.fixed_options, *WITHOUT.get(kind, ())}}


def wrapper_of(frontend: str, kind: str) -> Callable[..., Any]:
    pytest.importorskip(frontend.partition("_")[2].partition(".")[0].replace("tf", "tensorflow"))
    return getattr(importlib.import_module(frontend), f"Distributed{kind}")


def entries(doc: str) -> dict[str, str]:
    """Of ``Args:``, by name."""
    lines = re.search(r"^Args:\n((?:    .*\n|\n)*)", inspect.cleandoc(doc) + "\n", re.MULTILINE)
    assert lines, doc
    found = re.findall(r"^    (\w+): ((?:.*\n)(?:        .*\n)*)", lines[1], re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def words(text: str) -> str:
    return " ".join(text.split())


def test_there_are_the_optimizers_that_we_know() -> None:
    known = {"Birder", "DiLoCo", "EFSGD", "Lion", "OneBitAdam", "OneBitLamb", "SoftSignSGD", "ZeroOneAdam"}
    assert known <= CORES.keys()


def test_lists_of_all_optimizers_have_each() -> None:
    """DiLoCo's steps are of another sort: trainers do not know it, and it has tests of its own."""
    pytest.importorskip("torch")
    from ocomm_torch.trainers import WRAPPERS
    from tests.frontends.every_kind import KINDS

    wrappers = {wrapper_of("ocomm_torch", kind) for kind in CORES.keys() - {"DiLoCo"}}
    assert wrappers <= {*WRAPPERS.values()}
    assert wrappers == {kind.wrapper for kind in KINDS.values()}
    root = Path(__file__).parents[2]
    page = (root / "docs/trainers/lightning.md").read_text()
    assert not [name for name in WRAPPERS if f'"{name}"' not in page]
    for name in ("docs/gpu.md", "docs/choosing.md", "docs/api/torch.md", "docs/api/keras.md"):
        page = (root / name).read_text()
        missing = [kind for kind in CORES if kind != "SoftSignSGD" and f"Distributed{kind}" not in page]
        assert not missing, f"{name} does not name {missing}"
    for name in ("on_fake_gpu.py", "test_tf_options.py"):
        page = (root / "tests/frontends" / name).read_text()
        without = {"DiLoCo", "OneBitLamb"} if name == "on_fake_gpu.py" else {"DiLoCo"}
        assert not [kind for kind in CORES.keys() - without if f"hvd.Distributed{kind}(" not in page], name


@pytest.mark.parametrize("frontend", OWN)
@pytest.mark.parametrize("kind", CORES)
def test_a_signature_has_the_options_of_the_definition(frontend: str, kind: str) -> None:
    parameters = inspect.signature(wrapper_of(frontend, kind)).parameters
    options = options_of(kind)
    assert parameters.keys() - OWN[frontend] == options.keys()
    for name, f in options.items():
        expected = DIFFERENT.get((frontend, kind, name), (f.type, f.default))
        assert (parameters[name].annotation, parameters[name].default) == expected, name
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY, name


@pytest.mark.parametrize("frontend", OWN)
@pytest.mark.parametrize("kind", CORES)
def test_a_docstring_has_one_entry_per_argument_with_the_text_of_the_definition(frontend: str, kind: str) -> None:
    wrapper = wrapper_of(frontend, kind)
    doc = wrapper.__doc__
    assert doc is not None
    found = entries(doc)
    assert list(found) == [name for name in found if name in inspect.signature(wrapper).parameters]
    assert found.keys() == inspect.signature(wrapper).parameters.keys()
    for name, f in options_of(kind).items():
        if (frontend, kind, name) not in DIFFERENT:
            assert found[name] == words(f.metadata["text"]), name
    assert "Raises:" in doc and "{" not in doc


@pytest.mark.parametrize("frontend", OWN)
@pytest.mark.parametrize("kind", CORES)
def test_every_argument_reaches_the_options(frontend: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper, chosen = wrapper_of(frontend, kind), object()
    given: dict[str, Any] = {}

    def note(cls: type[Options], arguments: dict[str, Any]) -> Options:
        given.update({f.name: arguments[f.name] for f in dataclasses.fields(cls) if f.name in arguments})
        return cls()

    monkeypatch.setattr(Options, "of", classmethod(note))
    names = options_of(kind).keys()
    with contextlib.suppress(NotInitializedError):
        wrapper(_an_optimizer(frontend, kind), **dict.fromkeys(names, chosen))
    assert {name: given[name] for name in names} == dict.fromkeys(names, chosen)


def _an_optimizer(frontend: str, kind: str) -> Any:
    name = "Adam" if any(word in kind for word in ("Adam", "Lamb")) else "SGD"
    if frontend == "ocomm_torch":
        import torch

        return getattr(torch.optim, name)([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    import keras

    return getattr(keras.optimizers, name)()


@pytest.mark.parametrize("frontend", OWN)
def test_stubs_say_the_same(frontend: str) -> None:
    """Else run tools/stubs.py."""
    wrapper_of(frontend, "Lion")  # is skipped without the framework
    assert stubs.path_of(frontend).read_text() == stubs.stub(frontend)


@pytest.mark.parametrize("kind", CORES)
def test_what_the_ranks_compare_is_plain(kind: str) -> None:
    """It is saved, and read again by other releases."""
    for options in (CORES[kind].options_class(), Common()):
        agreed = options.agreed()
        assert json.loads(json.dumps(agreed)) == agreed
        assert set(options.fixed()) <= agreed.keys()


def test_numbers_of_numpy_are_compared_as_pythons() -> None:
    agreed = Common(block_size=np.int64(32), max_grad_norm=np.float32(0.5)).agreed()  # type: ignore[arg-type]
    assert type(agreed["block_size"]) is int and type(agreed["max_grad_norm"]) is float
    assert "verify" not in agreed, "it changes no bit"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example(Options):
    rate: float = option(0.5, "How\n   much.", fixed=True)
    quiet: bool = option(False, "Whether " + 40 * "long " + "so.", agree=False)


def test_a_definition_knows_its_texts_and_what_is_agreed() -> None:
    assert Example.texts()["rate"] == "How much."
    assert Example.fixed() == ["rate"] and Example(rate=1.0).agreed() == {"rate": 1.0}
    assert Example.of({"rate": 2.0, "other": 1}) == Example(rate=2.0)


def test_a_docstring_keeps_its_own_entries() -> None:
    @documented({"size": "Of it.", **Example.texts()})
    def shown(size: int, rate: float = 0.5, quiet: bool = False) -> None:
        """Does it.

        Args:
            rate: As here.
            {arguments}

        Returns:
            Nothing.
        """

    assert shown.__doc__ is not None
    assert list(entries(shown.__doc__)) == ["rate", "size", "quiet"]
    assert entries(shown.__doc__)["rate"] == "As here."
    assert max(map(len, shown.__doc__.splitlines())) <= 118
    assert shown.__doc__.endswith("Returns:\n    Nothing.")
