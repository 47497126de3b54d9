# SPDX-License-Identifier: Apache-2.0
"""Tests the fidelity harness on a small Llama with random weights: a forward over an editable KV cache must
equal transformers' own forward. Also tests the files that the harness reads and writes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.tasks.longbench.metrics import qa_f1_score
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Pooling, Transformer
from transformers import (  # type: ignore[attr-defined]
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertModel,
    BertTokenizerFast,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
)

from eval import command
from eval.fidelity import (
    bound,
    diversity,
    documents,
    encoders,
    heatmap,
    passages,
    replay,
    samkv,
    selection,
    summary,
)
from eval.fidelity.__main__ import Options, work
from eval.fidelity.arms import default_name, parse, parse_all
from eval.fidelity.cache import Reader
from eval.fidelity.replay import Replay, compare
from eval.fidelity.responses import read
from eval.tiny_reasoner import CHECKPOINT
from eval.tiny_reasoner.task import generate
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.filter.matcher import BlockPair
from sglang_reasoncache.filter.segment import Step
from sglang_reasoncache.filter.vocabulary import vocabulary_of
from tests.eval.peer import write_rows

STEP = "We add three and four and get seven, so the sum is seven.\n\n"
OTHER = "Now we look at another way to write the same thing: {} of them.\n\n"
ARMS = ["newest-runs-8-age0", "oldest-runs-8", "newest-random-8-age0", "random-evict", "keydiff"]
#: Arms (ways to edit a KV cache) that share nothing: p0 accepts no KV distance, age1000 needs older blocks.
NOTHING = ["newest-runs-8-age0-p0", "newest-runs-8-age1000"]
CHOOSING = ["query:.2", "deviation:.2"]
TOKENIZER = AutoTokenizer.from_pretrained(CHECKPOINT)
TOKENS = torch.randint(0, 40, (50,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    sizes: Any = dict(hidden_size=64, intermediate_size=96, max_position_embeddings=1024)
    sizes |= dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    made = LlamaForCausalLM(LlamaConfig(vocab_size=len(TOKENIZER), **sizes)).eval()
    for weight in made.parameters():
        # Larger weights sharpen attention, so that a wrong key changes the logits.
        weight.data *= 4
    return made


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    model.save_pretrained(made)
    TOKENIZER.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def reader(folder: Path) -> Reader:
    return Reader(LlamaForCausalLM.from_pretrained(folder))


def forward(model: Any, tokens: list[int], mask: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens]), attention_mask=mask).logits[0]


def test_a_row_is_transformers_forward_and_evicted_positions_are_masked_keys(
    model: Any, reader: Reader
) -> None:
    cache = reader.cache(2, 50)
    first = reader.forward(cache, TOKENS[:20])
    assert cache.branch() == 1
    rest = reader.forward(cache, TOKENS[20:40])
    torch.testing.assert_close(rest[1], rest[0], atol=1e-5, rtol=1e-5)
    both = torch.cat((first[0], rest[0]))
    torch.testing.assert_close(both, forward(model, TOKENS[:40]), atol=1e-4, rtol=1e-4)
    cache.visible[1, 5:12] = False
    found = reader.forward(cache, TOKENS[40:])
    mask = torch.zeros(50, 50).masked_fill(torch.ones(50, 50).triu(1) > 0, -torch.inf)
    for row in (0, 1):
        wanted = forward(model, TOKENS, mask[None, None])[40:]
        torch.testing.assert_close(found[row], wanted, atol=1e-4, rtol=1e-4)
        mask[40:, 5:12] = -torch.inf
    assert compare(found, [*TOKENS[41:], 0])[1, 1] > 1e-3


def test_a_rotated_key_is_the_recomputed_one_of_layer_0(reader: Reader) -> None:
    cache = reader.cache(2, 16)
    reader.forward(cache, TOKENS[:8] * 2)
    row = cache.branch()
    before = cache.keys.clone()
    cache.redirect(row, [(at, at) for at in range(16)], reader.rotation)
    torch.testing.assert_close(cache.keys, before)
    cache.redirect(row, [(at, at + 8) for at in range(8)], reader.rotation)
    torch.testing.assert_close(cache.keys[0, row], before[0, 0], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(cache.keys[1, row, :, :8], before[1, 0, :, :8], atol=1e-3)
    torch.testing.assert_close(cache.values[:, row, :, :8], cache.values[:, 0, :, 8:])
    cache.redirect(row, [(0, 8)], None)
    torch.testing.assert_close(cache.keys[:, row, :, 0], before[:, 0, :, 8])


def test_random_sharing_hurts_more_than_equal_blocks(model: Any, reader: Reader) -> None:
    text = "".join(STEP + OTHER.format(i % 3) for i in range(12))
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    arms = parse_all([*ARMS, *NOTHING], ARMS[0])
    found = Replay(reader, vocabulary_of(TOKENIZER), arms, ARMS[0]).scores(tokens, 6)
    assert found["dense"]["kl"] == 0 and found["dense"]["top1"] == 1
    wanted = -forward(model, tokens).log_softmax(-1)[5:-1]
    nll = wanted.gather(1, torch.tensor(tokens[6:])[:, None]).mean()
    assert found["dense"]["nll"] == pytest.approx(float(nll), abs=1e-4)
    newest, oldest, random, evicted, keydiff = (found[name] for name in ARMS)
    for score in (newest, oldest):
        assert score["saved"] > 0.5
        assert 0 < score["kl"] / score["saved"] < random["kl"] / random["saved"]
    assert evicted["saved"] == keydiff["saved"] == pytest.approx(newest["saved"], abs=0.1)
    for name in NOTHING:
        assert found[name] == found["dense"]


def test_an_arm_that_needs_less_shares_less_the_nearest_first(reader: Reader) -> None:
    text = "".join(STEP + OTHER.format(i % 3) for i in range(12))
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    arms = parse_all([ARMS[0], f"{ARMS[0]}-need5", f"{ARMS[0]}-need100"], ARMS[0])
    found = Replay(reader, vocabulary_of(TOKENIZER), arms, ARMS[0]).scores(tokens, 6)
    every, some, all_ = (found[arm.name] for arm in arms)
    assert all_ == every
    block = 8 / (len(tokens) - 6)
    assert 0.05 - block < some["saved"] < 0.05 + block
    assert 0 < some["kl"] / some["saved"] < every["kl"] / every["saved"]


def test_a_response_that_quotes_its_prompt_reads_it(reader: Reader) -> None:
    said = "".join(OTHER.format(i) for i in range(9))
    ids = TOKENIZER([said, STEP], add_special_tokens=False)["input_ids"]
    tokens = ids[0] + ids[1] + ids[0]
    names = ["newest-runs-8-age0", "newest-runs-8-age0-quotes", "random-evict"]
    arms = parse_all(names, names[1])
    found = Replay(reader, vocabulary_of(TOKENIZER), arms, names[1]).scores(tokens, len(ids[0]))
    alone, quoting, evicted = (found[name] for name in names)
    assert alone["saved"] + 0.3 < quoting["saved"] < 0.95
    assert evicted["saved"] == pytest.approx(quoting["saved"], abs=0.1)
    assert 0 < quoting["kl"] < evicted["kl"]


def test_memshare_pairs_the_blocks_whose_kv_is_nearest(reader: Reader) -> None:
    """The blocks of a step come again in another order. MemShare finds each; pairing by index finds none."""
    words = [i for i in range(len(TOKENIZER)) if "\n" not in TOKENIZER.decode([i])]
    blocks = [words[:8], words[8:16], words[16:24]]
    blank = TOKENIZER("\n\n", add_special_tokens=False)["input_ids"]
    tokens: list[int] = []
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        tokens += [token for i in order for token in blocks[i]] + blank
    tokens += words[24:40]
    names = [f"memshare:block=8:align={align}" for align in ("nearest", "index")]
    arms = parse_all(names, names[0])
    found = Replay(reader, vocabulary_of(TOKENIZER), arms, names[0]).scores(tokens, 0)
    near, index = (found[name] for name in names)
    # The second and the third step, three blocks each, read earlier slots.
    assert near["saved"] == index["saved"] == pytest.approx(48 / len(tokens))
    assert 0 < near["kl"] < index["kl"] / 2


def test_quest_reads_the_pages_that_may_have_the_greatest_logits(
    model: Any, reader: Reader
) -> None:
    """With pages of one position the bound is the logit itself. Layers before the third read everything."""
    torch.manual_seed(2)
    query = torch.randn(4, 5, 8)
    key = torch.randn(2, 21, 8)
    visible = torch.ones(5, 21).tril(16).bool()
    quest = selection.Quest(1, prompt=17)
    quest.skip = 6
    assert quest.visible(1, query, key, visible).sum() == 4 * visible.sum() and quest.saved == 0
    read = quest.visible(2, query, key, visible)
    # The first query is of the prompt. The others read what their logits choose, and their own position.
    assert read[:, 0].equal(visible[0].expand(4, -1))
    for head in range(4):
        logits = query[head] @ key[head // 2].T
        for token in range(1, 5):
            before = logits[token, : 16 + token]
            best = before.topk(17 + token - 6 - 1).indices.tolist()
            assert read[head, token].nonzero()[:, 0].tolist() == sorted([*best, 16 + token])
    assert quest.saved == 3  # six in layer 2, none in layer 1
    pages = selection.Quest(4, prompt=0)
    pages.skip = 8
    read = pages.visible(2, query, key, visible)
    for token in range(5):
        own = (16 + token) // 4
        count = -(-(17 + token - 8) // 4)
        of_pages = read[:, token, : own * 4].unflatten(1, (-1, 4))
        assert (
            of_pages.all(-1).equal(of_pages.any(-1))
            and (of_pages.any(-1).sum(1) == count - 1).all()
        )
        assert read[:, token, own * 4 : 17 + token].all() and not read[:, token, 17 + token :].any()


def test_quest_and_policies_by_head_save_as_much_as_an_arm_that_shares(reader: Reader) -> None:
    text = "".join(STEP + OTHER.format(i % 3) for i in range(12))
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    names = [ARMS[0], "quest:4", "keydiff", "keydiff-by-head", "random-by-head-evict"]
    found = Replay(reader, vocabulary_of(TOKENIZER), parse_all(names, ARMS[0]), ARMS[0]).scores(
        tokens, 6
    )
    saved = found[ARMS[0]]["saved"]
    for name in ("keydiff", "keydiff-by-head", "random-by-head-evict"):
        assert found[name]["saved"] == pytest.approx(saved, abs=0.1) and found[name]["kl"] > 0
    assert found["keydiff"] != found["keydiff-by-head"]
    # This model has two layers, in which Quest reads everything.
    assert found["quest:4"] == found["dense"]


def test_quest_saves_as_much_and_each_head_draws_for_itself() -> None:
    """On the embedded reasoner, of whose four layers Quest reads two whole."""
    trained = Reader(AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32))
    text = "".join(STEP + OTHER.format(i) for i in range(8)) + 4 * STEP
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    names = [ARMS[0], "quest:4", "random-evict", "random-by-head-evict"]
    found = Replay(trained, vocabulary_of(TOKENIZER), parse_all(names, ARMS[0]), ARMS[0]).scores(
        tokens, 6
    )
    saved = found[ARMS[0]]["saved"]
    assert 0.4 < saved < 0.75
    assert found["quest:4"]["saved"] == pytest.approx(min(saved, 0.5), abs=0.05)
    assert found["quest:4"]["kl"] > 0
    assert found["random-evict"]["kl"] != found["random-by-head-evict"]["kl"]


def test_a_policy_by_head_chooses_as_if_the_head_were_alone(reader: Reader) -> None:
    cache = reader.cache(2, 50)
    arm = replay.ArmCache(parse("keydiff:recent=1-by-head"), reader, cache, 4)
    reader.forward(cache, TOKENS)
    arm.evict(11, seed=0)
    assert arm.saved == 11
    for layer in range(2):
        for head in range(2):
            keys = cache.keys[layer, arm.row, head, :50]
            likeness = torch.cosine_similarity(keys, keys.mean(0, keepdim=True), dim=-1)
            wanted = sorted((likeness[4:49].topk(11).indices + 4).tolist())
            gone = arm._selection.gone[layer, head]  # type: ignore[union-attr]
            assert np.flatnonzero(gone).tolist() == wanted


def test_distances_by_cosine(reader: Reader) -> None:
    """They do not depend on the length of keys and values."""
    cache = reader.cache(2, 50)
    reader.forward(cache, TOKENS)
    pairs = [BlockPair(24, 3), BlockPair(40, 16)]
    arm = replay.ArmCache(parse("reasoncache:block=8:metric=cosine"), reader, cache, 0)
    distances = arm._distances(pairs)
    for pair, distance in zip(pairs, distances, strict=True):
        apart = []
        for layer in range(2):
            dst, src = (slice(at, at + 8) for at in pair)
            keys = cache.keys[layer, 0].transpose(0, 1)
            shift = torch.full((8,), pair.dst_start - pair.src_start)
            values = cache.values[layer, 0].transpose(0, 1)
            for one, two in (
                (keys[dst], reader.rotation.rotate(keys[src], shift)),
                (values[dst], values[src]),
            ):
                apart.append(1 - torch.cosine_similarity(one.flatten(), two.flatten(), dim=0))
        assert distance == pytest.approx(float(sum(apart)) / 4, abs=1e-6)
    cache.values *= 3
    assert arm._distances(pairs) == pytest.approx(distances, abs=1e-6)


@given(
    seed=st.integers(0, 10_000),
    far=st.floats(0, 3),
    size=st.floats(0.1, 4),
    places=st.sets(st.integers(0, 11), max_size=6),
)
@settings(max_examples=60, deadline=None)
def test_no_change_exceeds_the_bound_of_the_theorem(
    seed: int, far: float, size: float, places: set[int]
) -> None:
    random = torch.Generator().manual_seed(seed)
    query = size * torch.randn(4, 3, 8, generator=random)
    before = [torch.randn(2, 12, 8, generator=random) for _ in range(2)]
    after = [part.clone() for part in before]
    for part in after:
        part[:, [*places]] += far * torch.randn(2, len(places), 8, generator=random)
    visible = torch.ones(3, 12).tril(9).bool()
    keys, values = zip(before, after, strict=True)
    found = bound.changes(query, keys, values, visible)
    for name in ("weights", "output"):
        assert (found[name] <= found[f"{name}_bound"] + 1e-5).all()
    # The first query does not see the last two positions.
    if places <= {10, 11}:
        assert not found["weights_bound"][:, 0].any() and not found["output"][:, 0].any()


def test_blocks_of_similar_steps_are_nearer_in_the_picture_and_in_the_theorem(
    reader: Reader, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [problem.response.replace("\n\n", " ") + "\n\n" for problem in generate(5, 4)]
    text = "".join(step[:160].rstrip() + "\n\n" for step in steps * 2)
    path = write_rows(tmp_path / "rows.jsonl", {"question": "1?", "response": text})
    arguments = [str(folder), str(path), "--cap", "900", "--limit", "1", "--out"]
    found = heatmap.work(command.parse(heatmap.Options, [*arguments, str(tmp_path / "heat.png")]))
    assert "pairs of similar blocks are nearer" in capsys.readouterr().out
    assert (tmp_path / "heat.png").read_bytes()[:4] == b"\x89PNG"
    for row in found:
        assert row["K similar"] < row["K other"] and row["V similar"] < row["V other"]
    # In layer 0, K and V depend on the token alone.
    assert found[0]["K similar"] == pytest.approx(0, abs=2e-3) and found[0]["V similar"] == 0
    rows = bound.work(command.parse(bound.Options, [*arguments, str(tmp_path / "bound.csv")]))
    for row in rows:
        assert row["weights, within"] == row["output, within"] == 1
    assert rows[0]["weights, most"] < 1e-4 < rows[1]["weights, most"]
    cached = bound.work(
        command.parse(bound.Options, [*arguments, str(tmp_path / "cached.csv"), "--as-cached"])
    )
    assert cached[0]["weights, most"] > 1e-2, "keys keep the earlier position"
    write_rows(path, {"question": "1?", "response": OTHER.format(4)})
    for program in (heatmap, bound):
        with pytest.raises(ValueError, match="no response with similar steps"):
            program.work(
                command.parse(program.Options, [str(folder), str(path), "--shortest", "1"])
            )


def test_distances_by_norms_lose_their_digits_where_blocks_are_nearly_equal(reader: Reader) -> None:
    cache = reader.cache(2, 50)
    reader.forward(cache, TOKENS)
    pairs = [BlockPair(24, 3), BlockPair(40, 16)]
    names = ("reasoncache:block=8", "reasoncache:block=8:metric=norms")
    exact, by_norms = (replay.ArmCache(parse(name), reader, cache, 0) for name in names)
    assert by_norms._distances(pairs) == pytest.approx(exact._distances(pairs), rel=1e-3)
    cache.keys = (0 * cache.keys + 3).bfloat16()
    cache.values = cache.keys.clone()
    cache.values[:, :, :, 3, 0] += 0.02
    apart = replay.ArmCache(
        parse("reasoncache:block=8:metric=norms:positions=as-cached"), reader, cache, 0
    )
    [near, _] = apart._distances(pairs)
    # bf16 makes 0.0156 of 0.02. Only V differs, in one of 16 dims of each of two heads.
    wanted = 2**0.5 * 0.015625 / (2 * 2 * 8)
    assert near == 0 or near > 10 * wanted


def test_what_keydiff_keeps_spans_more_than_what_a_window_keeps(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "".join(problem.response for problem in generate(5, 6))
    path = write_rows(tmp_path / "rows.jsonl", {"question": "1?", "response": text})
    policies = "keydiff:recent=1:prompt=true,keydiff:recent=1:prompt=true-by-head,streamingllm"
    words = [str(folder), str(path), "--budgets", "64,128", "--cap", "400", "--shortest", "100"]
    words += ["--policies", policies, "--out", str(tmp_path / "found.csv")]
    few, more = diversity.work(command.parse(diversity.Options, words))
    assert (few["held"], more["held"]) == (64 / 400, 128 / 400)
    head = "keydiff:recent=1:prompt=true"
    for row in (few, more):
        assert row[f"{head}-by-head"] > row["streamingllm"] and row[head] > row["streamingllm"]
    operations = few["KeyDiff, operations a head"]
    assert operations == (12 * 16 + 97) * 64 + 3 * 16 + 94 == diversity.flops(64, 16)
    assert "log-determinants" in capsys.readouterr().out
    # Equal keys span nothing; an orthonormal basis spans most.
    assert diversity.diversity(torch.ones(1, 9, 4)) < diversity.diversity(torch.eye(4)[None])


WORDS = ["we", "add", "three", "and", "four", "get", "seven", "so", "the", "sum", "is", "numbers"]


@pytest.fixture(scope="module")
def sentence_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a Sentence-BERT model with random weights, as the library writes it."""
    home = tmp_path_factory.mktemp("bert")
    (home / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])
    )
    BertTokenizerFast(str(home / "vocab.txt")).save_pretrained(home / "bert")
    sizes: Any = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    BertModel(BertConfig(vocab_size=99, num_attention_heads=2, **sizes)).save_pretrained(
        home / "bert"
    )
    bert = Transformer(str(home / "bert"))
    pooling = Pooling(bert.get_embedding_dimension())
    SentenceTransformer(modules=[bert, pooling]).save(str(home / "whole"))
    return home / "whole"


def test_encoders_find_steps_that_counts_of_tokens_do_not(
    reader: Reader, sentence_bert: Path
) -> None:
    ids = TOKENIZER("three and four", add_special_tokens=False)["input_ids"]
    one, two, far = (
        Step.build(0, tokens, text)
        for tokens, text in (
            (ids, "we add three and four"),
            ([*ids, ids[0]], "we add four and three"),
            ([*range(20, 40)], "numbers"),
        )
    )
    table = reader.model.get_input_embeddings().weight.detach()
    for name in ("embedding", str(sentence_bert)):
        encode = encoders.encoder(name, reader)
        index = encoders.DenseIndex(encode, 2, length_factor=False)
        for step in (two, far, two):
            index.add(step)
        assert len(index) == 2 and index[0] is far
        near = index.similarities(one)
        wanted = [
            np.clip(encode(step) @ encode(one), 0, None)
            / np.linalg.norm(encode(step))
            / np.linalg.norm(encode(one))
            for step in (far, two)
        ]
        assert near == pytest.approx(wanted, abs=1e-5) and near[1] > 0.8 > 0.5 > near[0] - 0.5
        lengths = encoders.DenseIndex(encode, 2)
        lengths.add(far)
        assert lengths.similarities(one) == pytest.approx(near[:1] * 7 / 21, abs=1e-6)
    mean = table[torch.tensor(ids)].mean(0).numpy()
    assert encoders.encoder("embedding", reader)(one) == pytest.approx(mean, abs=1e-5)


def test_an_arm_with_an_encoder(reader: Reader, sentence_bert: Path, tmp_path: Path) -> None:
    text = "".join(STEP + OTHER.format(i % 3) for i in range(12))
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    preset = "memshare:block=8:align=index:encoder"
    names = [f"{preset}=embedding", f"{preset}={sentence_bert}"]
    found = Replay(reader, vocabulary_of(TOKENIZER), parse_all(names, names[0]), names[0]).scores(
        tokens, 6
    )
    for name in names:
        assert found[name]["saved"] > 0.5 and found[name]["kl"] > 0
    for name, said in (("bert", "or a folder, got 'bert'"), (str(tmp_path), "cannot be read")):
        with pytest.raises(ValueError, match=said):
            encoders.encoder(name, reader)


def test_a_pool_in_fp8_rounds_what_its_arm_writes(reader: Reader) -> None:
    text = "".join(STEP + OTHER.format(i % 3) for i in range(12))
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    names = ["e4m3", "e5m2", ARMS[0], f"{ARMS[0]}-e5m2"]
    found = Replay(reader, vocabulary_of(TOKENIZER), parse_all(names, ARMS[0]), ARMS[0]).scores(
        tokens, 6
    )
    finer, coarser, shared, both = (found[name] for name in names)
    assert finer["saved"] == coarser["saved"] == 0 < both["saved"] == shared["saved"]
    assert 0 < finer["kl"] < coarser["kl"] < both["kl"]


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("newest-runs-8", (8, ReasonCacheConfig.min_age, "runs", "newest", True, 100)),
        ("oldest-steps-16", (16, 0, "steps", "oldest", True, 100)),
        ("oldest-cached-steps-8", (8, 0, "steps", "oldest", False, 100)),
        ("newest-steps-4-age64-cached-p80", (4, 64, "steps", "newest", False, 80)),
        ("memshare", (16, 0, "steps", "oldest", True, 100)),
        ("reasoncache:align=index", (16, 0, "steps", "oldest", True, 80)),
        ("p50:positions=as-cached:block=8", (8, 0, "steps", "oldest", False, 50)),
    ],
)
def test_names(name: str, knobs: tuple[object, ...]) -> None:
    arm = parse(name)
    rule = parse(name).filter
    assert rule is not None
    found = rule.block, rule.min_age, rule.match, rule.direction, arm.corrected, arm.percentile
    assert found == knobs


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["newest-8"], "'newest-8': an arm that shares is newest or oldest"),
        (["newest-runs-0"], "--reasoncache-block must be between 1 and 1024, got 0"),
        (["fastest"], "'fastest' is neither .* nor a policy"),
        (["memshare:align=both"], "'memshare:align=both': --reasoncache-set align must be one of"),
        (["memshare:index"], "'memshare:index': .* must be key=value"),
        (["h2o"], "reads queries"),
        (["keydiff", "keydiff"], "--arms must name none twice"),
        (["keydiff"], "--like must be an arm that shares"),
        (["quest"], "--like must be an arm that shares"),
        (["quest:0"], "'quest:0' is neither .*; nor quest or quest:PAGE; nor a policy"),
        (["memshare:metric=angle"], "metric must be one of euclidean, cosine"),
        (["reasoncache:match=runs:encoder=embedding"], "encoder needs match=steps, got runs"),
        (["newest-steps-8-quotes"], "--reasoncache-set reads_prompt"),
        (["newest-runs-8-need0"], "needN must be between 1 and 100, got 0"),
    ],
)
def test_bad_names(names: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_all(names, "newest-runs-8")


def main(arguments: list[str]) -> None:
    command.run(Options, work, arguments)


def test_the_program(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "".join(STEP + OTHER.format(i) * (i % 2) for i in range(8))
    rows = [{"question": f"{i}?", "response": f"{i}. {text}", "correct": i < 2} for i in range(4)]
    for name in ("a", "b"):
        write_rows(tmp_path / f"{name}.jsonl", *rows)
    out = tmp_path / "out" / "fidelity.json"
    arms = ["newest-runs-8-age0", "streamingllm"]
    arguments = [str(folder), str(tmp_path), f"--out={out}", "--cap=400", "--shortest=50"]
    arguments += ["--threads=1", f"--arms={','.join(arms)}", f"--like={arms[0]}"]
    lines = out.with_suffix(".jsonl")
    main([*arguments, "--limit=1"])
    [first, second] = lines.read_text().splitlines()
    # The second record is cut, as if the process had died. Responses with whole records are not measured again.
    lines.write_text(first + "\n" + second[:40])
    main(arguments)
    # Both input files have the same four questions. Each question is measured once.
    assert len(lines.read_text().splitlines()) == 4 and lines.read_text().startswith(first)
    assert "| right   | newest-runs-8-age0 |" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert found["default"] == default_name()
    wanted = [(arm, group, 2) for group in ("right", "loops") for arm in arms]
    assert [(row["arm"], row["group"], row["responses"]) for row in found["rows"]] == wanted
    for row in found["rows"]:
        for name in ("saved", "kl", "nll", "top1"):
            low, high = row[f"{name}_95"]
            assert low - 1e-9 <= row[name] <= high + 1e-9


def test_one_response_has_no_interval() -> None:
    score = dict(saved=0.2, kl=0.01, nll=1.1, top1=0.9)
    record = {"group": "right", "arms": {"dense": {**score, "nll": 1.0}, "an": score}}
    (row,) = summary.rows([record])
    assert row["nll"] == pytest.approx(0.1) and row["kl_per_saved"] == pytest.approx(0.05)
    assert row["nll_95"] is None
    assert "| right   | an    | 1           | 20.0%   | 0.0100 |" in summary.table([row])


def test_what_cannot_be_read(folder: Path, tmp_path: Path, model: Any) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1?", "response": 3}\n')
    with pytest.raises(ValueError, match=r"rows.jsonl:1: field 'response' is no text"):
        list(read(path, AutoTokenizer.from_pretrained(folder), 100, 1))
    with pytest.raises(SystemExit, match="eval.fidelity: error: the tokenizer of"):
        main([str(tmp_path), str(path)])
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config = LlamaConfig(**{**model.config.to_dict(), "rope_parameters": rope})
    with pytest.raises(ValueError, match="one plain rotary embedding"):
        Reader(LlamaForCausalLM(config))


def test_repairs_compute_again_what_the_query_or_the_deviation_chooses(folder: Path) -> None:
    prompt = documents.Prompt("", "", (*TOKENS, *range(3, 13)), 6, (18, 30, 44), 54)
    repairs = {name: documents.parse(name) for name in ("none", *CHOOSING, "first:99", "query:1")}
    reader = Reader(LlamaForCausalLM.from_pretrained(folder))
    measured = documents.Documents(reader, repairs, [prompt])
    found = measured.scores(prompt)
    again = {name: round(38 * score["recomputed"]) for name, score in found.items()}
    assert again == dict(zip(found, (38, 0, 8, 8, 26, 26), strict=True))
    # ``first:99`` and ``query:1`` recompute all documents but the first, so their caches equal a full prefill.
    assert max(found[name]["kl"] for name in ("full", "first:99", "query:1")) < 1e-5
    assert min(found[name]["kl"] for name in ("none", *CHOOSING)) > 1e-3
    # ``query`` chooses tokens with most attention, ``deviation`` tokens with KV farthest from full prefill's.
    cache = measured.caches["none"]
    known = DynamicCache()
    for layer in range(2):
        known.update(cache.keys[layer, :, :, :44], cache.values[layer, :, :, :44], layer)
    eager = LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        asked = torch.tensor([prompt.tokens[44:54]])
        seen = eager(asked, past_key_values=known, output_attentions=True).attentions
        full = eager(torch.tensor([prompt.tokens[:44]]), use_cache=True).past_key_values.layers[1]
    received = sum(weights.sum((0, 1, 2)) for weights in seen)[18:44]
    pairs = (full.keys, cache.keys[1]), (full.values, cache.values[1])
    apart = [(one[0] - two[0, :, :44])[:, 6:].norm(dim=(0, 2)) for one, two in pairs]
    deviation = sum(far / far.mean() for far in apart)[12:]
    for name, scores in zip(CHOOSING, (received, deviation), strict=True):
        wanted = sorted((scores.argsort()[-8:] + 18).tolist())
        assert measured.chosen(name, prompt) == wanted


def test_samkv_reads_the_ends_and_what_it_selects_and_computes_ends_again(reader: Reader) -> None:
    prompt = documents.Prompt("", "", (*TOKENS, *range(3, 13)), 6, (18, 30, 44), 54)
    names = ["none", "samkv-select:99", *(f"{name}:2" for name in documents.SAMKV)]
    measured = documents.Documents(reader, {one: documents.parse(one) for one in names}, [prompt])
    found = measured.scores(prompt)
    # A block of 99 tokens holds a whole document, so no token is left out.
    assert found["samkv-select:99"] == found["none"] and found["none"]["read"] == 1
    selected = measured.caches["samkv-select:2"].visible[0, :44]
    ends = [at for a, b in ((6, 18), (18, 30), (30, 44)) for at in (a, a + 1, *range(b - 4, b))]
    assert selected[:6].all() and selected[ends].all()
    # Between their ends the documents have 3, 3 and 4 blocks. At most 4 are selected: the mean, rounded up.
    assert len(ends) <= int(selected[6:].sum()) <= len(ends) + 2 * 4
    for name in names[2:]:
        assert found[name]["read"] == pytest.approx(int(selected[6:].sum()) / 38)
    assert found["samkv-select:2"]["recomputed"] == 0
    again = measured.chosen("samkv:2", prompt)
    asked = prompt.tokens[44:53]
    assert set(ends[6:]) <= set(again) and selected[again].all()
    assert found["samkv:2"]["recomputed"] == len(again) / 38
    new, old, mixed = (measured.caches[one] for one in ("samkv:2", "none", "samkv-fusion:2"))
    one = new.values[1, 0, 1, again[0]]
    two = old.values[1, 0, 1, again[0]]
    theta = torch.cosine_similarity(one, two, dim=0)
    wanted = theta * one + (1 - theta) * two
    torch.testing.assert_close(mixed.values[1, 0, 1, again[0]], wanted)
    # Tokens that were not selected are not read, so spoiling their keys changes nothing.
    for name in names[2:]:
        cache = measured.caches[name]
        before = reader.forward(cache, asked)
        cache.keys[:, 0, :, :44][:, :, ~selected] = 1e3
        cache.length = 44
        torch.testing.assert_close(reader.forward(cache, asked), before)


def test_infllm_reads_in_each_layer_the_blocks_that_the_question_asks_for(reader: Reader) -> None:
    prompt = documents.Prompt("", "", (*TOKENS, *range(3, 13)), 6, (18, 30, 44), 54)
    names = ["none", "infllm:1", "infllm:.3"]
    measured = documents.Documents(reader, {one: documents.parse(one) for one in names}, [prompt])
    found = measured.scores(prompt)
    assert found["infllm:1"]["kl"] == pytest.approx(found["none"]["kl"], abs=1e-6)
    assert found["infllm:1"]["read"] == 1 and found["infllm:.3"]["recomputed"] == 0
    # Documents of 12, 12 and 14 tokens are one block each. One is read.
    assert found["infllm:.3"]["read"] == pytest.approx(1 / 3)
    assert found["infllm:.3"]["kl"] > found["none"]["kl"]
    cache = measured.caches["infllm:.3"]
    blocks = [range(6, 18), range(18, 30), range(30, 44)]
    asked = prompt.tokens[44:54]
    read = list[int]()

    def watch(layer: int, query: torch.Tensor, _: torch.Tensor) -> None:
        visible = torch.ones(10, 54).tril(44).bool()
        mask = cache.by_head[0](layer, query, cache.keys[layer, 0, :, :54], visible)
        seen = [bool(mask[0, -1, block.start]) for block in blocks]
        assert sum(seen) == 1 and mask[:, -1, :6].all() and mask[:, -1, 44:54].all()
        assert mask[0, -1, blocks[seen.index(True)]].all()
        read.append(seen.index(True))

    before = reader.forward(cache, asked, watch=watch)
    assert len(read) == 2
    # What a layer does not read may be anything.
    for layer, chosen in enumerate(read):
        for number, block in enumerate(blocks):
            if number != chosen:
                cache.values[layer, 0, :, block.start : block.stop] = 1e3
    cache.length = 44
    torch.testing.assert_close(reader.forward(cache, asked), before)
    for name, said in (("infllm:0", "at most 1, got 0.0"), ("infllm:x", "must be of .*infllm")):
        with pytest.raises(ValueError, match=said):
            documents.parse(name)


def test_f1_of_what_the_model_says(reader: Reader, model: Any) -> None:
    prompt = documents.Prompt("", "", (*TOKENS, *range(3, 13)), 6, (18, 30, 44), 54)
    given = torch.tensor([prompt.tokens[:54]])
    said = model.generate(given, max_new_tokens=6 + documents.MORE, do_sample=False)[
        0, 54:
    ].tolist()
    repairs = {"none": documents.parse("none")}
    for answer, wanted in ((said[:6], None), ([21, 20, 24, 22, 23, 25], None)):
        asked = prompt._replace(tokens=(*prompt.tokens[:54], *answer))
        measured = documents.Documents(reader, repairs, [asked], TOKENIZER)
        found = measured.scores(asked)["full"]
        texts = [
            str(TOKENIZER.decode(ids, skip_special_tokens=True)).strip().partition("\n")[0]
            for ids in (said, answer)
        ]
        assert found["f1"] == pytest.approx(qa_f1_score(*texts))
        assert wanted is None or found["f1"] == wanted
        # The answer that was generated is not kept.
        assert measured.caches["full"].length == 44


def test_stable_layers_are_those_that_rank_the_best_block_as_the_others_do(model: Any) -> None:
    ranks = torch.tensor([[0.0, 1, 2]] * 19 + [[2.0, 1, 0]])
    assert samkv.outliers(ranks).tolist() == [0.0] * 19 + [1.0]
    assert not samkv.outliers(torch.tensor([[0.0, 1], [1.0, 0], [0.0, 1]])).any()
    deep = LlamaConfig(**{**model.config.to_dict(), "num_hidden_layers": 16})
    torch.manual_seed(0)
    reader = Reader(LlamaForCausalLM(deep).eval())
    prompt = documents.Prompt("", "", (*TOKENS, *range(3, 13)), 6, (30, 44), 54)
    found = samkv.calibrate(reader, [prompt], 2)
    # Two of the last four.
    assert len(found) == 2 and set(found) <= {12, 13, 14, 15} and found == sorted(found)
    arms = {name: documents.parse(name) for name in ("none", "samkv:2", "samkv-calibrated:2")}
    measured = documents.Documents(reader, arms, [prompt])
    scores = measured.scores(prompt)
    assert (scores["samkv:2"] == scores["samkv-calibrated:2"]) or found != [14, 15]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samkv, "calibrate", lambda *_: [14, 15])
        measured = documents.Documents(reader, arms, [prompt])
        scores = measured.scores(prompt)
    assert scores["samkv:2"] == scores["samkv-calibrated:2"]


def test_samkv_selects_the_block_whose_keys_the_others_ask_for(reader: Reader) -> None:
    prompt = documents.Prompt("", "", (*TOKENS, *range(3, 13)), 6, (30, 44), 54)
    measured = documents.Documents(reader, {"none": documents.parse("none")}, [prompt])
    measured.scores(prompt)
    cache, (first, second) = measured.caches["none"], samkv.profiles(reader, prompt, 2, [1])
    towards = second.query[1].unflatten(0, (2, 2)).sum(1)
    for sign, block in ((1e3, first.middle[4]), (-1e3, first.middle[1])):
        place = torch.tensor(block.start)
        cache.keys[1, 0, :, block.start] = reader.rotation.rotate(sign * towards, place)
    for sign, most, least in ((1e3, 4, 1), (-1e3, 1, 4)):
        # ``select`` multiplies the second document's query by a cosine's absolute value, which keeps ``sign``.
        asked = [one._replace(query=0 * one.query) for one in (first, second)]
        asked[0] = asked[0]._replace(most=[most], least=[least])
        asked[1] = asked[1]._replace(query=sign * second.query)
        samkv.select(reader, cache, prompt, asked, [1])
        assert cache.visible[0, first.middle[most]].all()
        assert not cache.visible[0, first.middle[least]].any()


def test_passages_of_longbench_become_documents(tmp_path: Path) -> None:
    context = (
        "Passage 1:\nBorges\nHe was born in 1899.\n\nPassage 2:\nRulfo\nSee Passage 1: not here.\n"
    )
    row = {
        "input": "When?",
        "context": context,
        "answers": ["1899", "in 1899"],
        "dataset": "2wikimqa",
    }
    source, target = (tmp_path / name for name in ("2wikimqa.jsonl", "rows.jsonl"))
    write_rows(source, row, row, row)
    passages.work(command.parse(passages.Options, [str(source), str(target), "--limit", "2"]))
    made, _ = documents.read(target, TOKENIZER, 4000)
    assert (made.group, len(made.ends)) == ("2wikimqa", 2)
    [first, _] = map(json.loads, target.read_text().splitlines())
    assert first["documents"] == ["Borges\nHe was born in 1899.", "Rulfo\nSee Passage 1: not here."]
    assert first["question"].endswith("Question: When?\nAnswer:") and first["answer"] == "1899"
    for fault, said in (
        ({"context": "No passages."}, "field 'context' has no passages"),
        ({"answers": []}, "field 'answers' is no list"),
        ({"answers": [3]}, r"field 'answers\[0\]' is no text"),
    ):
        write_rows(source, {**row, **fault})
        with pytest.raises(ValueError, match=said):
            passages.work(passages.Options(source, target))
    with pytest.raises(ValueError, match="is what is read"):
        passages.work(passages.Options(source, source))


def test_the_program_with_documents(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"system": "Add.", "documents": [STEP, OTHER.format(3), STEP[:40]], "question": "Sum?"}
    rows = [{**row, "lead": "It is", "answer": f" {i}."} for i in range(3)]
    path = write_rows(tmp_path / "rows.jsonl", *rows)
    out = tmp_path / "out.json"
    arguments = [str(folder), f"--out={out}", "--threads=1", "--cap=1000", f"--documents={path}"]
    before = path.read_bytes()
    with pytest.raises(
        SystemExit, match=r"--out .*rows.json: its records go to .*rows.jsonl, which"
    ):
        main([*arguments, f"--out={path.with_suffix('.json')}"])
    assert path.read_bytes() == before
    main([*arguments, "--limit=2"])
    assert "| all     | deviation:.15 | 2 " in capsys.readouterr().out
    found = json.loads(out.read_text())["rows"]
    assert [row["arm"] for row in found] == ["full", *documents.ARMS]
    assert found[0]["kl"] == 0 < found[1]["kl"] and found[0]["recomputed"] == 1
    assert found[1]["recomputed"] == 0 and 0.1 < found[3]["recomputed"] < 0.2
    for fault, said in (
        ({"documents": ["a", 3]}, r"field 'documents\[1\]' is no text"),
        ({"documents": "a"}, "field 'documents' is no list"),
        ({"answer": STEP * 200}, "--cap is 1000"),
    ):
        write_rows(path, rows[0], {**rows[0], **fault})
        with pytest.raises(SystemExit, match=rf"rows.jsonl:2: .*{said}"):
            main(arguments)
    with pytest.raises(SystemExit, match="--arms must be of .* got 'deviation:2'"):
        main([*arguments, "--arms=deviation:2"])
    with pytest.raises(SystemExit, match="2"):
        main([str(folder)])
