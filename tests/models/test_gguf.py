"""Models stored as GGUF become plain folders with the same answers; what cannot be read is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from remind.core.errors import ModelError
from remind.models import backbone as ours
from remind.models.backbone import load_backbone

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed: pip install 'remind-toolkit[smollm2]'")

LETTERS = [*(chr(code) for code in range(33, 127)), "Ġ", "og"]


def write_gguf(path: Path, model, architecture: str = "llama") -> Path:
    """A Llama model as llama.cpp stores it: rows of the query and key projections interleaved by halves of a head."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*LETTERS, "<end>"])
    writer.add_token_types([1] * len(LETTERS) + [3])
    writer.add_token_merges(["o g"])
    writer.add_eos_token_id(len(LETTERS))
    writer.add_bos_token_id(len(LETTERS))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        for heads, part in ((config.num_attention_heads, "q_proj"), (config.num_key_value_heads, "k_proj")):
            if part in name:
                tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": len(LETTERS) + 1, "max_position_embeddings": 256}
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)).eval()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(ours.gguf_folder, "__defaults__", (tmp_path / "cache",))
    return tmp_path / "cache"


def test_a_converted_model_computes_what_the_original_computes(llama, tmp_path, cache):
    file = write_gguf(tmp_path / "tiny.gguf", llama)
    backbone = load_backbone(str(file))
    assert backbone.kind == "causal"
    ids = backbone.tokenizer("a dog, said Bob", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(backbone.model(ids).logits, llama(ids).logits)


@pytest.mark.parametrize("fault", ["cut", "architecture", "missing"])
def test_what_cannot_be_read_is_one_line_and_leaves_nothing(llama, tmp_path, cache, fault):
    file = tmp_path / "model.gguf"
    if fault == "architecture":
        write_gguf(file, llama, "rwkv9")
    elif fault != "missing":
        data = write_gguf(file, llama).read_bytes()
        file.write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError) as error:
        load_backbone(str(file))
    assert "\n" not in str(error.value)
    assert str(file) in str(error.value)
    assert not cache.is_dir() or not [path for path in cache.iterdir() if path.is_dir()]
