"""What needs a package that not everyone has says which extra brings it; each is blocked in turn."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from remind.core import EXTRAS
from remind.core.errors import ModelError

ROOT = Path(__file__).parents[2]


def four_bits(_: Path) -> None:
    from remind.train_pra.run import nf4

    nf4("float32")


def eight_bits(folder: Path) -> None:
    from remind import PRAConfig, PRATrainer

    PRATrainer("nano-untrained", PRAConfig(str(folder), optim="adamw_torch_8bit"))


def gguf(folder: Path) -> None:
    from remind.models.gguf import gguf_folder

    (folder / "model.gguf").write_bytes(b"GGUF")
    gguf_folder(folder / "model.gguf", folder / "cache")


def kappa(_: Path) -> None:
    from remind.refmem.agreement import fleiss

    fleiss([("x", "y")])


def reinforcement(_: Path) -> None:
    sys.modules.pop("remind.memory_training.trainer", None)
    import_module("remind.memory_training.trainer")


def engine(_: Path) -> None:
    from remind.evaluation.config import VLLMConfig
    from remind.evaluation.vllm_answers import VLLMAnswers

    VLLMAnswers("nano", 4, "float32", VLLMConfig())


def mem0(_: Path) -> None:
    from remind.memory.systems import make_system

    make_system("mem0_today").about()


def langmem(_: Path) -> None:
    from remind.memory.systems import make_system

    make_system("langmem").about()


NEEDS: dict[str, Callable[[Path], None]] = {
    "bitsandbytes": four_bits,
    "gguf": gguf,
    "langchain_openai": langmem,
    "langmem": langmem,
    "mem0": mem0,
    "statsmodels": kappa,
    "torchao": eight_bits,
    "trl": reinforcement,
    "vllm": engine,
}


@pytest.mark.parametrize("package", EXTRAS)
def test_a_missing_package_is_named_with_its_extra(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModelError, match=rf"{package}.*'remind-toolkit\[{EXTRAS[package]}\]'") as error:
        NEEDS[package](tmp_path)
    assert "weights" not in str(error.value)


def test_extras_hold_the_packages_and_nothing_else_imports_them() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for module, extra in EXTRAS.items():
        package = {"mem0": "mem0ai"}.get(module, module.replace("_", "-"))
        assert any(re.match(f"{package}[>=]=", line) for line in extras[extra])
    listed = {re.split("[>=]=", line)[0].replace("-", "_") for lines in extras.values() for line in lines}
    optional = {*listed, *EXTRAS} - {"transformers"}
    for file in [*(ROOT / "remind").rglob("*.py"), *(ROOT / "sae").rglob("*.py")]:
        names: set[str] = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.split(".")[0])
        assert not names & optional, file
