# SPDX-License-Identifier: Apache-2.0
"""The loop whose heads choose for themselves: against Hugging Face, and by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from eval.bench import per_head
from eval.bench.per_head import (
    DECODE,
    DENSE,
    PER_HEAD,
    PREFILL,
    TOKEN,
    Bench,
    Trial,
    plan,
    respond,
    rows_of,
    schedule_of,
    table,
)
from eval.bench.per_head_decoder import (
    RULES,
    WINDOW,
    Schedule,
    WatchedDecoder,
    evict,
    keydiff,
    l2norm,
    streamingllm,
)
from eval.tiny_reasoner import CHECKPOINT
from eval.tiny_reasoner.model import encode
from eval.tiny_reasoner.task import generate
from sglang_reasoncache.eviction.policies.keydiff import similarity
from sglang_reasoncache.eviction.policies.l2norm import relative_norms

LAYERS, HEADS = 4, 2


@pytest.fixture(scope="module")
def model() -> Any:
    loaded: Any = AutoModelForCausalLM
    return loaded.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()


@torch.no_grad()
def fed(model: Any, tokens: torch.Tensor, dropped: dict[int, list[int]]) -> torch.Tensor:
    """Logits after each token; positions given up in all heads before that step."""
    decoder = WatchedDecoder(model, len(tokens), tokens.shape[1])
    out = []
    for position in range(tokens.shape[1]):
        decoder.held[..., dropped.get(position, [])] = False
        out.append(decoder.step(tokens[:, position], position))
    assert float(decoder.mass.sum()) == pytest.approx(
        tokens.numel() * LAYERS * HEADS, rel=1e-4
    )  # Each query gives away a weight of 1.
    return torch.stack(out, 1)


@torch.no_grad()
def test_the_loop_is_the_model_with_masked_attention(model: Any) -> None:
    tokens = torch.randint(9, 60, (2, 24), generator=torch.Generator().manual_seed(1))
    mask = torch.full((24, 24), float("-inf")).triu(1)
    torch.testing.assert_close(fed(model, tokens, {}), model(tokens).logits, rtol=1e-3, atol=1e-3)
    mask[10:, [2, 3]] = mask[20:, [11]] = float("-inf")
    wanted = model(tokens, attention_mask=mask.expand(2, 1, 24, 24)).logits
    got = fed(model, tokens, {10: [2, 3], 20: [11]})
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(got, model(tokens).logits, atol=0.1)


def test_each_head_gives_up_its_own_and_the_token_form_the_same(model: Any) -> None:
    decoder = WatchedDecoder(model, 2, 8)
    decoder.held[..., :6] = True
    decoder.held[..., 1] = False
    scores = torch.zeros(LAYERS, 2, HEADS, 6)
    scores[..., 1] = 99.0
    scores[0, :, 0, 2] = 4.0
    scores[1:, :, :, 4] = 3.0
    scores[..., 5] = 50.0
    stays = torch.tensor([[False] * 5 + [True]] * 2)
    apart, together = decoder.held.clone(), decoder.held.clone()
    excess = torch.tensor([1, 0])
    decoder.held = apart
    evict(decoder, scores, stays, excess, per_head=True)
    gone = [
        [int((~apart[layer, 0, head, :6]).nonzero()[-1]) for head in (0, 1)] for layer in (0, 1)
    ]
    # Layer 0, head 1 has nothing but ties: the oldest entry it holds.
    assert gone == [[2, 1], [4, 4]] and not apart[0, 0, 1, 0]
    decoder.held = together
    evict(decoder, scores, stays, excess, per_head=False)
    assert together[:, 0, :, :6].tolist() == [[[True, False, True, True, False, True]] * 2] * LAYERS
    for held in (apart, together):
        # Already given up, protected, or not too many.
        assert held[:, 1, :, :6].sum(-1).unique().tolist() == [5]
        assert held[:, 0, :, :6].sum(-1).unique().tolist() == [4]
        assert bool(held[..., 5].all())


def test_when_and_how_many() -> None:
    share = Schedule(share=0.5, slack=4)
    prompt, held = torch.tensor([10, 30]), torch.tensor([20, 20])
    assert share.excess(20, prompt, held).tolist() == [10, 0]
    assert share.excess(29, prompt, held).tolist() == [5, 0]
    assert share.excess(31, prompt, held).tolist() == [0, 0]
    assert share.stays(34, prompt)[0].tolist() == [True] * 34
    assert share.stays(50, prompt).sum(-1).tolist() == [10 + 32, 50]

    budget = Schedule(budget=8, block=16, slack=4, recent=2, keep_prompt=False)
    prompt, held = torch.tensor([20, 40]), torch.tensor([14, 14])
    assert budget.excess(15, prompt, held).tolist() == [0, 0]
    assert budget.excess(16, prompt, held).tolist() == [6, 6]
    assert budget.excess(20, prompt, held).tolist() == [6, 0]
    assert budget.excess(21, prompt, torch.tensor([12, 14])).tolist() == [0, 0]
    assert budget.excess(21, prompt, torch.tensor([13, 14])).tolist() == [5, 0]
    assert budget.excess(16, prompt, torch.tensor([7, 7])).tolist() == [0, 0]
    assert budget.stays(16, prompt).sum(-1).tolist() == [2, 2]


@pytest.mark.parametrize("per_head_", [True, False])
@pytest.mark.parametrize("name", RULES)
def test_memory_never_exceeds_budget_and_block(name: str, per_head_: bool, model: Any) -> None:
    """KeyDiff's procedure: at most N + B entries, N of them after each block."""
    budget, block = 24, 16
    seen: list[int] = []

    def watching(decoder: WatchedDecoder, written: int) -> torch.Tensor:
        seen.append(int(decoder.held.sum(-1).max()))
        counts = decoder.held.sum(-1)
        # Every head of a row holds as many.
        assert bool((counts == counts[:1, :, :1]).all())
        return RULES[name](decoder, written)

    schedule = Schedule(budget=budget, block=block, slack=4, recent=4, keep_prompt=False)
    prompts = [
        encode(p.response.split(" "))[:length]
        for p, length in zip(generate(0, 2), (75, 90), strict=True)
    ]
    found = respond(model, prompts, -1, 20, watching, schedule, per_head_)
    assert [len(one.tokens) for one in found] == [95, 110]
    assert [len(one.saved) for one in found] == [20, 20]
    assert seen and max(seen) <= budget + block
    # The first decode step sees the budget, of 75 or 90 positions.
    assert [one.saved[1] for one in found] == pytest.approx([1 - 25 / 76, 1 - 25 / 91])


def test_scores_of_policies_pass_over_what_is_not_held(model: Any) -> None:
    decoder = WatchedDecoder(model, 3, 20)
    decoder.keys[..., :16, :] = torch.randn(decoder.keys[..., :16, :].shape)
    decoder.held[..., :16] = True
    decoder.held[..., [0, 5, 9]] = False
    kept = decoder.held[0, 0, 0, :16]
    for rule, score in ((keydiff, lambda k: similarity(k, "mean_raw")), (l2norm, relative_norms)):
        got = rule(decoder, 16)[..., kept]
        for layer, row, head in ((0, 0, 0), (3, 2, 1)):
            keys = decoder.keys[layer, row, head, :16][kept]
            wanted = score(keys[:, None])[:, 0]
            scale = wanted[0] / got[layer, row, head, 0]
            torch.testing.assert_close(got[layer, row, head] * scale, wanted)
    assert bool(keydiff(decoder, 16)[..., kept].abs().max() <= 1 + 1e-5)


def test_sinks_and_window() -> None:
    class Shape:
        held = torch.zeros(LAYERS, 1, HEADS, 9)

    order = streamingllm(Shape, 9)[0, 0, 0].argsort(descending=True)  # type: ignore[arg-type]
    assert order[:5].tolist() == [4, 5, 6, 7, 8]


def test_the_window_holds_the_newest_queries(model: Any) -> None:
    decoder = WatchedDecoder(model, 1, WINDOW + 8)
    before = torch.zeros(())
    with torch.no_grad():
        for position in range(WINDOW + 8):
            if position == 8:
                before = decoder.mass.clone()
            decoder.step(torch.tensor([20]), position)
    torch.testing.assert_close(decoder.window.sum(-2), decoder.mass - before, rtol=1e-4, atol=1e-5)


def test_nothing_given_up_is_dense(model: Any) -> None:
    prompts = [encode(["<|user|>", *p.prompt.split(" "), "<|assistant|>"]) for p in generate(0, 2)]
    dense = respond(model, prompts, -1, 30)
    roomy = respond(model, prompts, -1, 30, RULES["h2o"], Schedule(budget=1000), True)
    assert [one.tokens for one in dense] == [one.tokens for one in roomy]
    wanted = model.generate(
        torch.tensor(prompts[:1]), attention_mask=torch.ones(1, len(prompts[0])),
        do_sample=False, max_new_tokens=30,
    )[0]  # fmt: skip
    assert dense[0].tokens[: len(wanted)] == wanted.tolist()
    assert set(dense[0].saved) == {0.0}


def test_trials_are_kept_and_tabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(per_head, "_LIMITS", {DECODE: 60, PREFILL: 8})
    monkeypatch.setattr(per_head, "SHARES", (0.5,))
    names = plan(["keydiff", "streamingllm"], [DECODE])
    assert [name[1:3] for name in names] == [
        (DENSE, ""),
        ("keydiff", PER_HEAD),
        ("keydiff", TOKEN),
        ("streamingllm", TOKEN),
    ]
    path = tmp_path / "trials.jsonl"
    bench = Bench(2, path)
    trials = [bench.trial(*name) for name in names]
    assert trials[0].saved == 0 and 0.05 < trials[1].saved < 0.5
    assert trials[1].saved == pytest.approx(trials[2].saved, abs=0.05)
    with path.open("a") as file:
        file.write('{"part": "dec')
    again = Bench(2, path)
    monkeypatch.setattr(again, "_measure", None)
    assert [again.trial(*name) for name in names] == trials

    rows = rows_of(trials)
    assert {"policy", "form", "setting", "saved", "accuracy", "accuracy_error"} <= set(rows[0])
    text = table(rows, DECODE)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert [line[:2] for line in lines if line][2:] == [
        ["dense", "0"],
        ["keydiff", "0.5"],
        ["streamingllm", "0.5"],
    ]
    assert lines[-3][3:5] == ["-", "-"] and "positions alone decide" in text


def test_accuracy_is_held_against_dense() -> None:
    dense = Trial(PREFILL, DENSE, "", 0.0, 0.0, [True] * 4, [9] * 4)
    worse = Trial(PREFILL, "h2o", TOKEN, 128.0, 0.6, [True, False] * 2, [9] * 4)
    row = rows_of([dense, worse])[1]
    assert (row["accuracy"], row["saved"], row["problems"]) == (0.5, 0.6, 4)
    assert 0.2 < row["accuracy_error"] < 0.6


def test_snapkv_keeps_its_window_and_others_nothing() -> None:
    snap, other = schedule_of(PREFILL, "snapkv", 256), schedule_of(PREFILL, "keydiff", 256)
    assert snap is not None and other is not None
    assert (snap.recent, other.recent, snap.budget, other.keep_prompt) == (32, 1, 256, False)
    assert schedule_of(DECODE, DENSE, 0) is None
    half = schedule_of(PREFILL, "h2o", 256)
    assert half is not None and int(half.stays(300, torch.tensor([300])).sum()) == 128
    half = schedule_of(DECODE, "h2o", 0.8)
    assert half is not None and int(half.stays(300, torch.tensor([40])).sum()) == 40 + 120


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--rules", "rkv"], "unknown 'rkv'"),
        (["--parts", "x"], "unknown 'x'"),
        (["--problems", "1"], "at least 2"),
    ],
)
def test_bad_commands_are_refused(
    given: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        per_head.main(given)
    assert stopped.value.code == 2 and told in capsys.readouterr().err
