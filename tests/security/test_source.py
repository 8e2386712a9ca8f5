"""What the source never calls: code that unpickles, runs strings or shells, trusts remote code, or fetches."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path
    for folder in ("remind", "sae", "scripts", "experiments", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)
#: Modules that run what they read, or speak to a network.
IMPORTS = {
    "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "code", "pty",
    "requests", "urllib3", "httpx", "aiohttp", "http.client", "urllib.request", "ftplib", "smtplib", "telnetlib",
    "xmlrpc.client", "webbrowser", "ctypes", "multiprocessing.connection", "xml.etree.ElementTree",
}  # fmt: skip
#: Calls by the end of their dotted name.
CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "os.execv", "os.spawnl", "os.startfile",
    "pickle.load", "pickle.loads", "torch.load", "torch.hub.load", "torch.save", "torch.jit.load", "yaml.load",
    "yaml.unsafe_load", "yaml.full_load", "np.loadtxt", "pandas.read_pickle", "pd.read_pickle", "hf_hub_download",
    "snapshot_download", "load_dataset", "urlopen", "urlretrieve", "tempfile.mktemp", "socket.create_connection",
    "create_server",
}  # fmt: skip
#: Keywords with a value that must not stand in any call.
KEYWORDS = {
    ("trust_remote_code", True),
    ("verify", False),
    ("shell", True),
    ("allow_pickle", True),
    ("weights_only", False),
}
NUMPY = ("np.load", "numpy.load", "np.save", "numpy.save")
#: Loaders of transformers that must be given use_safetensors. A pickle is read where safetensors are not asked for.
MODELS = {"AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText", "CLIPModel", "loader"}
#: Loaders that read a folder the program has just written, or one of the package.
OWN = {
    ("remind/train_pra/export.py", "kind"): "the export just written, opened again to check it",
    ("remind/train_pra/export.py", "PeftModel"): "the adapter just written, put on its model again to check it",
    ("experiments/cost/flops.py", "AutoConfig"): "the folder of the MiniLM package; and a folder, without its code",
    ("remind/models/backbone.py", "Qwen2VLImageProcessorPil"): "a class of the library, which runs no code of a folder",
}


@cache
def trees() -> tuple[tuple[str, ast.Module], ...]:
    return tuple((str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))) for path in FILES)


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a name or attribute; an attribute of another expression begins with a dot."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def imported(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def starts_python(call: ast.Call, tree: ast.Module) -> bool:
    """Whether a process is this Python: its line, or every value of the name it has, begins with sys.executable."""
    values = call.args[:1]
    if values and isinstance(values[0], ast.Name):
        assignments = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
        values = [node.value for node in assignments if dotted(node.targets[0]) == dotted(call.args[0])]
    firsts = [value.elts[0] if isinstance(value, ast.List) and value.elts else value for value in values]
    return bool(firsts) and all(dotted(first) == "sys.executable" for first in firsts)


def offences(tree: ast.Module) -> set[str]:
    """Imports and calls that must not be."""
    bad = {name for name in imported(tree) if name in IMPORTS or name.startswith("subprocess.")}
    # re.compile and the like are other functions than the built-in ones
    last_parts = {call for call in CALLS if "." not in call} - {"compile", "eval", "exec"}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        options = {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}
        if name in CALLS or name.rpartition(".")[2] in last_parts:
            bad.add(name)
        bad |= {f"{name}({option})" for option, value in KEYWORDS if option in options and options[option] is value}
        if name.startswith("subprocess.") and not starts_python(node, tree):
            bad.add(f"{name} of another program")
        if name in NUMPY and options.get("allow_pickle") is not False:
            bad.add(f"{name} without allow_pickle=False")
        if (name.endswith("Image.open") or name == "Pillow.open") and "formats" not in options:
            bad.add(f"{name} without formats")
    return bad


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from urllib.request import urlopen",
        "import http.client as h",
        "torch.load('x', weights_only=True)",
        "eval('1')",
        "os.system('ls')",
        "subprocess.run(['git', 'log'])",
        "subprocess.run(command)",
        "from subprocess import run",
        "yaml.load(open('x'))",
        "f(trust_remote_code=True)",
        "np.load('x')",
        "Image.open('x')",
    ],
)
def test_the_scan_finds(text: str) -> None:
    assert offences(ast.parse(text))


def test_the_scan_passes_what_is_harmless() -> None:
    text = "re.compile('x')\nmodel.eval()\nyaml.safe_load('x')\nline = [sys.executable, 'x']\nsubprocess.run(line)"
    assert offences(ast.parse(text)) == set()


def test_nothing_is_unpickled_run_from_text_or_fetched() -> None:
    offending = {file: offences(tree) for file, tree in trees()}
    # a function of the C library that is loaded anyway, to give memory back; text without types; a local folder, of
    # which datasets runs no script since version 4
    known = {"core/processes": "ctypes", "data/readers/mapping": "yaml.load", "states/dataset": "load_dataset"}
    for file, what in known.items():
        offending[f"remind/{file}.py"].remove(what)
    # torch's archives, of which nothing but tensors and plain values is unpickled, and the error that says so
    offending["sae/files.py"] -= {"pickle", "torch.load", "torch.save"}
    assert (ROOT / "sae" / "files.py").read_text().count("weights_only=True") == 1
    assert {file: bad for file, bad in offending.items() if bad} == {}


def test_no_module_opens_a_socket() -> None:
    sockets = {"socket", "socketserver", "asyncio", "multiprocessing.managers"}
    assert {(file, name) for file, tree in trees() for name in imported(tree) & sockets} == set()


def test_every_loader_reads_safetensors_and_runs_no_code() -> None:
    for file, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and dotted(node.func).endswith(".from_pretrained"):
                kind = dotted(node.func).split(".")[0]
                options = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
                own = (file, kind) in OWN
                if not own and (kind.startswith("Auto") or kind == "loader"):
                    assert options.get("trust_remote_code") is False, f"{file}:{node.lineno}: {kind}"
                if not own and kind in MODELS:
                    assert options.get("use_safetensors") is True, f"{file}:{node.lineno}: {kind}"


def test_the_chat_client_alone_speaks_to_a_server() -> None:
    """The package openai is the one way out: by our client, and by the meter that foreign packages are given."""
    users = {file for file, tree in trees() if any(name.split(".")[0] == "openai" for name in imported(tree))}
    assert users == {"remind/llm/client.py", "remind/memory/packages.py"}
