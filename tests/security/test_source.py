"""What the source never calls: code that unpickles, runs strings or shells, or trusts the code of a model's folder."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("remind", "sae", "scripts", "experiments", "benchmarks")
IMPORTS = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.hub.load", "torch.jit.load"}
CALLS |= {"yaml.unsafe_load", "yaml.full_load", "pd.read_pickle"}
#: Keywords with a value that must not stand in any call.
KEYWORDS = {("trust_remote_code", True), ("shell", True), ("allow_pickle", True), ("weights_only", False)}
#: Loaders of transformers that must be told to run no code; with weights, that they are safetensors.
MODELS = {"AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText", "CLIPModel", "loader"}
#: Unpickles texts, numbers, lists and dictionaries, and refuses whatever names a class: tests/data has a bomb for it.
PLAIN = "remind/data/readers/dialsim.py"
#: Loaders of what the program has just written.
OWN = {("remind/train_pra/export.py", "kind"), ("experiments/cost/flops.py", "AutoConfig")}


def dotted(node: ast.AST) -> str:
    """The name of a function as it is called; of a value that has none, nothing."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def offences(tree: ast.Module, file: str) -> Iterator[str]:
    """Imports and calls that must not be."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from {alias.name for alias in node.names} & IMPORTS - ({"pickle"} if file == PLAIN else set())
        # the error alone is what refuses a file
        elif isinstance(node, ast.ImportFrom) and {alias.name for alias in node.names} != {"UnpicklingError"}:
            yield from {node.module or ""} & IMPORTS
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            kind = name.split(".")[0]
            options = {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}
            wanted = {"weights_only": True} if name == "torch.load" else {}
            if name.endswith(".from_pretrained") and (file, kind) not in OWN:
                wanted |= {"trust_remote_code": False} if kind.startswith("Auto") or kind == "loader" else {}
                wanted |= {"use_safetensors": True} if kind in MODELS else {}
            if name in CALLS or KEYWORDS & {*options.items()} or any(options.get(k) is not wanted[k] for k in wanted):
                yield ast.unparse(node)


def test_nothing_is_unpickled_or_run_from_text() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in files}
    assert {file: bad for file, tree in found.items() if (bad := [*offences(tree, file)])} == {}
