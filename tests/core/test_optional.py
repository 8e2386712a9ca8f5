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


def lora(_: Path) -> None:
    from remind.alignment.config import LoraConfig
    from remind.alignment.model import trainable
    from remind.models.load import load_backbone

    trainable(load_backbone("nano-untrained").model, LoraConfig(r=2))


def four_bits(_: Path) -> None:
    from remind.alignment.model import quantise
    from remind.models.load import load_backbone

    quantise(load_backbone("nano-untrained").model, "cpu")


def gguf(folder: Path) -> None:
    from remind.models.gguf import gguf_folder

    (folder / "model.gguf").write_bytes(b"GGUF")
    gguf_folder(folder / "model.gguf", folder / "cache")


def reply(_: Path) -> None:
    from remind.llm.structured import _problem

    _problem({}, {})


def server(_: Path) -> None:
    from remind.llm.client import OpenAIChat
    from remind.llm.endpoints import EndpointConfig
    from remind.llm.ledger import Ledger

    OpenAIChat(EndpointConfig(model="m", base_url="http://localhost:1", key_env=None), None, Ledger())


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


def image(folder: Path) -> None:
    from PIL import Image

    from remind.models.images import _qwen_vl_utils, read_image

    _qwen_vl_utils.cache_clear()
    Image.new("RGB", (64, 64)).save(folder / "a.png")
    read_image({"type": "image", "image": str(folder / "a.png")}, 16)


def mem0(_: Path) -> None:
    from remind.memory.systems import make_system

    make_system("mem0_today").about()


def langmem(_: Path) -> None:
    from remind.memory.systems import make_system

    make_system("langmem").about()


NEEDS: dict[str, Callable[[Path], None]] = {
    "bitsandbytes": four_bits,
    "gguf": gguf,
    "jsonschema": reply,
    "langchain_openai": langmem,
    "langmem": langmem,
    "mem0": mem0,
    "openai": server,
    "peft": lora,
    "qwen_vl_utils": image,
    "statsmodels": kappa,
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
        # the chat client names its extra itself, since it needs the type of what it imports
        allowed = {"openai"} if file.name == "client.py" else set()
        assert names & optional <= allowed, file
