# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF001 (the responses have letters and signs that look like others)
"""Tests multiple-choice questions: how GPQA's are asked, and which letter is read from a response."""

import csv
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.tasks.harness import EvalTask, Source, TaskError, _after_thinking
from eval.tasks.multiple_choice import chosen_letter
from tests.eval.peer import write_rows

CHOICES = ("-1.5 eV", "4.2 eV", "$10^{-4}$ eV", "A proton and a pion")

#: Letter -> responses to a question with the choices above. "" stands for no answer.
READ: dict[str, list[str]] = {
    "A": [
        "Answer: A",
        "answer: a",
        "The answer is A.",
        "The answer is A because (B) violates parity.",
        "The best choice is (a).",
        "A is correct.",
        "(A)",
        "The answer is not B but A.",
        "The answer is -1.5 eV.",
        "\\boxed{A} The other choices are too large.",
        "\\boxed{-1.5\\,\\text{eV}}",
        "Answer: A\n\nB is wrong.",
        "Answer: **A** - the lowest",
        "Answer: A (the lowest)",
        "The correct answer is option A considering parity.",
        "答案是A因为其他选项不对",
    ],
    "B": [
        # The format that the question asks for, and its neighbours.
        "Answer: B",
        "Energy is 4.2 eV.\n\nAnswer: B",
        "ANSWER:B",
        "Answer:   b",
        "Answer: B.",
        "Answer: B)",
        "Answer: (B)",
        "Answer: [B]",
        "Answer: $B$",
        "Answer: 'B'",
        'Answer: "B".',
        "Answer: `B`",
        "Answer: B. because the others violate parity",
        "Answer: B) 4.2 eV",
        "Answer: (B) 4.2 eV",
        "Answer: B - 4.2 eV",
        "Answer: B (not A)",
        "Answer: B, not A",
        "Answer: option B",
        "Answer: choice (B)",
        "Answer - B",
        "Answer = B",
        "Answer is: B",
        "Answer:\nB",
        "Answer:\n\n(B) 4.2 eV",
        "Answer: B\n",
        "Answer: B ✅",
        "'Answer: B'",
        "> Answer: B",
        # Markdown.
        "**Answer: B**",
        "**Answer:** B",
        "**Answer**: B",
        "Answer: **B**",
        "Answer: **(B)**",
        "Answer: **B) 4.2 eV**",
        "Answer: __B__",
        "Answer: *B*",
        "**Final Answer:** B",
        "**Final Answer**\n\n**B**",
        "## Final Answer\n\nB",
        "### Final Answer:\n\n(B) 4.2 eV",
        "```\nAnswer: B\n```",
        "```text\nB\n```",
        '```json\n{"answer": "B"}\n```',
        "<answer>B</answer>",
        "Answer: <b>B</b>",
        "**B**",
        "The energy is **(B)**.",
        "The energy is therefore **B. 4.2 eV**",
        "**A** is wrong, and **C** cannot be; so **B**",
        # LaTeX.
        "\\boxed{B}",
        "$\\boxed{B}$",
        "\\[\\boxed{\\text{B}}\\]",
        "\\boxed{\\text{(B)}}",
        "\\boxed{\\mathbf{B}}",
        "\\boxed{\\mathrm{B}.}",
        "\\boxed{\\text{B) } 4.2\\ \\text{eV}}",
        "\\boxed{\\textbf{Option B}}",
        "\\boxed{4.2~\\text{eV}}",
        "\\fbox{B}",
        "\\boxed{B",
        "\\boxed{A}, no: \\boxed{B}",
        "The final answer is $\\boxed{B}$.",
        "Answer: \\text{B}",
        "Answer: $\\mathbf{B}$",
        "Answer: \\(B\\)",
        "$\\mathbf{B}$",
        "so it must be $\\textbf{B}$",
        "\\boxed{\\text{Answer: B}}",
        "The answer is $\\boxed{\\textbf{(B)}\\ 4.2\\ \\text{eV}}$.",
        "The final answer is:\n\n$$\n\\boxed{B}\n$$",
        # Sentences.
        "The correct answer is B.",
        "The correct answer is **B**.",
        "The correct answer is: (B) 4.2 eV.",
        "the answer is (b)",
        "the answer is b.",
        "So the answer must be option B, since A is negative.",
        "The answer to this question is B.",
        "The answer should be B rather than A.",
        "The correct option is B.",
        "The most likely choice is (B).",
        "If x = 2, the answer is B.",
        "I choose option B.",
        "I would select (B).",
        "B is the answer.",
        "Therefore, B must be the correct option.",
        "(B) is right because (A) and (C) are not.",
        "Option B is correct.",
        "**B** is correct; **A** is wrong.",
        "**A)** wrong\n**B)** right\n**C)** wrong\n\nSo B is correct.",
        "B (4.2 eV) is correct.",
        "B, 4.2 eV, is correct.",
        "Only (B) is right.",
        "Unlike A, B is correct.",
        "B is correct and A is wrong.",
        "The answer is B and A is wrong.",
        "The answer is B. A is wrong.",
        "The answer is 4.2 eV.",
        "The answer is 4.2 eV. The others violate parity.",
        "Final answer: 4.2 eV",
        # Lines.
        "B",
        " b ",
        "B.",
        "B)",
        "(B)",
        "[B]",
        "option B",
        "Option (B).",
        "choice (B)",
        "Answer B",
        "Final answer (B)",
        "Therefore, (B).",
        "B. 4.2 eV",
        "4.2 eV",
        "- **A**: no\n- **B**: yes\n- **C**: no\n\n**B**",
        "The energy follows from Bohr's formula.\n\nB",
        # Several statements: the last counts.
        "The answer is A. No, wait: the answer is B.",
        "Answer: A\nAnswer: C\nAnswer: B",
        "A common wrong answer is C. Answer: B",
        "Answer: (A) or (B)? The mass decides. Answer: B",
        "A) -1.5 eV: no\nB) 4.2 eV: yes\n\n**Answer: B**\n\nA and C violate parity.",
        "The answer is (B).\n\nFinal Answer: The final answer is $B$. I hope it is correct.",
        "Answer: B\nA wrong answer is C.",
        "The answer is B. The answer is not A.",
        "If the answer is A, energy is lost. So the answer is B. If the answer were C, too.",
        "The answer is B. Is the answer A?",
        "A or C? Answer: B",
        "The answer is A or B. More precisely: \\boxed{B}",
        # Kinds: a statement counts before a box, a box before bold, bold before a line.
        "Answer: B\n\\boxed{C}",
        "\\boxed{B}\n**C**",
        "**B**\n\nC",
        "(C) is correct about the mass. \\boxed{B}",
        # Unicode.
        "Answer: 𝐁",
        "Answer: 𝗕",
        "**𝑩**",
        "Answer：（B）",
        "Ｂ",
        "Answer: Ⓑ",
        "Answer:\u00a0B\u200b",
        # Other languages.
        "答案：B",
        "答案:B。",
        "本题答案为 **B**。",
        "正确答案是 B。",
        "因此，答案为（B）。",
        "故选B。",
        "选项B是正确的。",
        "B正确",
        "答案不是A，而是B。",
        "Antwort: B",
        "Die richtige Antwort ist B.",
        "Die Antwort lautet (B).",
        "Antwort B ist richtig.",
        # The reasoning is cut.
        "<think>The answer is A.</think>Answer: B",
        "<think>Answer: A</think>\n\n**B**",
        "Answer: A</think>The correct answer is B.",
    ],
    "C": ["Answer: C", "The answer is $10^{-4}$ eV", "Answer: 10^-4 eV", "\\boxed{10^{-4}\\,eV}"],
    "D": [
        "Answer: D",
        "The answer is D as A and B violate parity.",
        "The answer is a proton and a pion.",
        "A proton and a pion",
        "**a proton and a pion**",
    ],
    "": [
        "",
        " \n ",
        "I do not know.",
        "not A",
        "A is wrong.",
        "**A** is wrong.",
        "A is not correct.",
        "The answer is not A.",
        "The answer isn't A.",
        "The answer cannot be A.",
        "Answer A is wrong.",
        "Answer: A is wrong.",
        "Option A is incorrect.",
        "I would not choose A.",
        "If A is correct, energy is lost.",
        "Is the answer A?",
        "The answer is A?",
        "Which is correct, A or B?",
        "Neither A nor B is correct.",
        "A and B are correct.",
        "A is correct. B is correct.",
        "A or B",
        "Answer: A or B",
        "Answer: a or b",
        "Answer: A, B",
        "Answer: A, B, or C",
        "Answer: A/B",
        "Answer: A and B",
        "Answer: (A) or (B)",
        "Answer: A (or B)",
        "Answer: both A and C",
        "The answer is either A or C.",
        "The answer is between A and C.",
        "The answer is A or B. Both fit.",
        "The answer is A. The answer is A or B.",
        "\\boxed{A}, but the answer is B or C.",
        "A is correct, but the answer is B or C.",
        "**A**: the answer is B or C.",
        "A\n\nThe answer is B or C.",
        "\\boxed{A} or \\boxed{B}",
        "\\boxed{A, C}",
        "\\boxed{A \\text{ or } B}",
        "\\boxed{}",
        "\\boxed{E}",
        "**A** or **B**",
        "**A**\n**B**",
        "A\nB\nC\nD",
        "(A) -1.5 eV\n(B) 4.2 eV\n(C) $10^{-4}$ eV\n(D) A proton and a pion",
        "Option A:\nThis violates parity.",
        "Answer: X",
        "Answer: $LETTER",
        "Answer: E",
        "Answer: ABCD",
        "Answer: I",
        "I",
        "I think that a proton is emitted.",
        "A proton is emitted.",
        "The answer is a proton.",
        "The answer is A proton.",
        "Answer: A single photon",
        "The answer is B12.",
        "The answer is the A-ring.",
        "The answer is B's mass.",
        "The answer is B = 3 T.",
        "The answer is C^2.",
        "The answer is 4.3 eV.",
        "We choose B along z.",
        "B field, A band, vitamin C",
        "the right side of (A) and of (B)",
        "答案不是A。",
        "答案是A或B",
        "Antwort A ist falsch.",
        "<think>Answer: B",
        "<think>Answer: B</think>",
    ],
}


@pytest.mark.parametrize(
    ("response", "letter"),
    [(response, letter) for letter, responses in READ.items() for response in responses],
)
def test_spellings(response: str, letter: str) -> None:
    assert chosen_letter(_after_thinking(response, False), CHOICES) == letter


def test_equal_texts_of_choices_name_none() -> None:
    assert chosen_letter("The answer is 4 eV.", ("4 eV", "5 eV", "4 eV", "6 eV")) == ""
    assert chosen_letter("The answer is 5 eV.", ("4 eV", "5 eV", "4 eV", "6 eV")) == "B"
    # A choice may have a letter as its text. The letter still names the choice of that letter.
    assert chosen_letter("The answer is B.", ("B", "A", "C", "D")) == "B"


#: What a response repeats, up to 100,000 characters.
HOSTILE = (
    "a", " ", "\n", "B-", "(B", "B, ", "A or B or ", "not ", "**B", "_*", "\\boxed{", "\\textbf{", "answer",
    "answer: ", "answer\n", "answer is the ", "answer is not A but ", "answer: A or ", "answer: 4.2 eV, ",
    "the best option is ", "is correct ", "B, is correct, ", "choose B. ", "\u0345\u0316", "\ufdfa",
)  # fmt: skip


def _lines_run(text: str) -> int:
    """How many lines of Python run while an answer is read from ``text``."""
    count = 0

    def trace(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        chosen_letter(text, CHOICES)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("piece", HOSTILE)
def test_work_is_linear_in_a_hostile_text(piece: str) -> None:
    """Twice the text takes at most twice the steps, and a character takes few. Steps of regular expressions are
    not counted; one that backtracked would not end here."""
    text = piece * (100_000 // len(piece))
    half = _lines_run(text[:50_000])
    whole = _lines_run(text)
    assert whole <= 2 * half + 100
    assert whole <= 12 * len(text)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from((*HOSTILE, "A", "C.", "D", "or", "?", "i", "\n\n")), max_size=30))
def test_any_text_gets_a_letter_or_none(pieces: list[str]) -> None:
    assert chosen_letter("".join(pieces), CHOICES) in ("", "A", "B", "C", "D")


ROW = {
    "Record ID": "rec1",
    "Question": " Which energy? ",
    "Correct Answer": "4.2 eV\n",
    "Incorrect Answer 1": "1 eV",
    "Incorrect Answer 2": "2 eV",
    "Incorrect Answer 3": "3 eV",
}


def _prompts(task: EvalTask) -> list[str]:
    return [problem.messages[0]["content"] for problem in task.problems]


def _right(prompt: str) -> str:
    """The letter of the choice 4.2 eV."""
    return prompt[prompt.index(") 4.2 eV") - 1]


def test_how_a_question_is_asked_and_graded(tmp_path: Path) -> None:
    rows = [{**ROW, "Record ID": f"rec{i}", "Question": f"Which energy, {i}?"} for i in range(40)]
    file = str(write_rows(tmp_path / "gpqa.jsonl", *rows))
    task = EvalTask("gpqa_diamond", Source(file=file, seed=1))
    prompts = _prompts(task)
    assert [problem.id for problem in task.problems] == [row["Record ID"] for row in rows]
    instruction, question, choices = prompts[7].split("\n\n")
    assert "'Answer: $LETTER' (without quotes) where LETTER is one of ABCD" in instruction
    assert question == "Which energy, 7?"
    letters = [line[:3] for line in choices.split("\n")]
    assert letters == ["A) ", "B) ", "C) ", "D) "]
    assert sorted(line[3:] for line in choices.split("\n")) == ["1 eV", "2 eV", "3 eV", "4.2 eV"]
    # Seed and question alone decide the order.
    assert _prompts(EvalTask("gpqa_diamond", Source(file=file, seed=1, limit=5))) == prompts[:5]
    swapped = str(write_rows(tmp_path / "swapped.jsonl", *reversed(rows)))
    assert _prompts(EvalTask("gpqa_diamond", Source(file=swapped, seed=1))) == prompts[::-1]
    assert _prompts(EvalTask("gpqa_diamond", Source(file=file, seed=2))) != prompts
    assert {_right(prompt) for prompt in prompts} == {"A", "B", "C", "D"}
    # Odd problems are answered rightly.
    answers = []
    for i, prompt in enumerate(prompts):
        right = _right(prompt)
        wrong = "A" if right != "A" else "B"
        answers.append(
            f"Answer: {wrong}</think>The correct answer is **{right if i % 2 else wrong}**."
        )
    grades = task.evaluate(answers, True)
    for i, prompt in enumerate(prompts):
        grade = grades[f"rec{i}"]
        assert grade.score == i % 2
        assert (grade.extracted == _right(prompt)) is (i % 2 == 1)
    assert {grade.extracted for grade in task.evaluate(["no idea"] * 40, False).values()} == {""}


def test_the_order_of_choices_is_that_of_every_run(tmp_path: Path) -> None:
    """Results of two runs can be compared only if a later version or another Python asks the same."""
    file = str(write_rows(tmp_path / "gpqa.jsonl", ROW))
    asked = {
        seed: _prompts(EvalTask("gpqa_diamond", Source(file=file, seed=seed))) for seed in (0, 1)
    }
    assert [_right(prompts[0]) for prompts in asked.values()] == ["B", "C"]


def test_the_hubs_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of that name in the working folder stands for the repository on the hub."""
    folder = tmp_path / "Idavidrein" / "gpqa"
    folder.mkdir(parents=True)
    configs = "configs:\n- config_name: gpqa_diamond\n  data_files: gpqa_diamond.csv\n"
    (folder / "README.md").write_text(f"---\n{configs}---\n")
    with (folder / "gpqa_diamond.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["Subdomain", *ROW])
        writer.writeheader()
        writer.writerow({**ROW, "Subdomain": "Optics"})
        writer.writerow({**ROW, "Record ID": "rec2"})
    monkeypatch.chdir(tmp_path)
    task = EvalTask("gpqa_diamond", Source())
    assert [problem.id for problem in task.problems] == ["rec1", "rec2"]
    assert ") 4.2 eV" in _prompts(task)[1]


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"Question": None}, "field 'Question' is no text, or empty"),
        ({"Incorrect Answer 3": " "}, "field 'Incorrect Answer 3' is no text, or empty"),
        ({"Correct Answer": 4}, "field 'Correct Answer' is no text, or empty"),
    ],
)
def test_a_bad_row_is_named(fields: dict[str, Any], fault: str, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "gpqa.jsonl", ROW, {**ROW, "Record ID": "rec2", **fields})
    with pytest.raises(TaskError) as caught:
        EvalTask("gpqa_diamond", Source(file=str(file)))
    assert f"{file}:2: {fault}" in str(caught.value)
