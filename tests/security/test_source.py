"""What the source never calls: code that unpickles, runs strings or shells, or trusts the code of a model's folder."""

from __future__ import annotations

import ast
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
#: Loaders of what the program has just written.
OWN = {("remind/train_pra/export.py", "kind"), ("experiments/cost/flops.py", "AutoConfig")}


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a name or attribute; an attribute of another expression begins with a dot."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def offences(tree: ast.Module, file: str = "") -> set[str]:
    """Imports and calls that must not be."""
    bad: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            bad |= {alias.name for alias in node.names} & IMPORTS
        # the error alone is what refuses a file
        elif isinstance(node, ast.ImportFrom) and {alias.name for alias in node.names} != {"UnpicklingError"}:
            bad |= {node.module or ""} & IMPORTS
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            options = {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}
            bad |= {name} & CALLS
            if name == "torch.load" and options.get("weights_only") is not True:
                bad.add(name)
            bad |= {f"{name}({option})" for option, value in KEYWORDS if option in options and options[option] is value}
            kind = name.split(".")[0]
            if name.endswith(".from_pretrained") and (file, kind) not in OWN:
                if (kind.startswith("Auto") or kind == "loader") and options.get("trust_remote_code") is not False:
                    bad.add(f"{name} without trust_remote_code=False")
                if kind in MODELS and options.get("use_safetensors") is not True:
                    bad.add(f"{name} without use_safetensors=True")
    return bad


def test_nothing_is_unpickled_or_run_from_text() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in files}
    assert {file: bad for file, tree in found.items() if (bad := offences(tree, file))} == {}
