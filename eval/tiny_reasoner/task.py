# SPDX-License-Identifier: Apache-2.0
"""The task of the tiny reasoner: a chain of assignments modulo 10, solved once, then verified in rounds.

A draft is a value in the prompt that may be wrong. Every word is a token, also "\\n\\n", which ends a step."""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

STEP_END = "\n\n"
LETTERS = tuple("abcdefghijklmnopqrst")
DIGITS = tuple("0123456789")
OPERATORS = ("+", "-")
PAD = "<pad>"
EOS = "<eos>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
THINK = "<think>"
THINK_END = "</think>"
BOX = "\\boxed{"
BOX_END = "}"
SPECIAL = (PAD, EOS, USER, ASSISTANT, THINK, THINK_END, STEP_END, BOX, BOX_END)
FORMAL = frozenset((*DIGITS, *LETTERS, *OPERATORS, "="))
ORDINALS = ("one", "two", "three", "four")

# A step computes one variable, whose letter determines the step's wording, so greedy decoding has one right
# continuation. The variables of a problem have distinct styles, so no two steps of the first pass are worded
# alike. ``v = u o y`` is an assignment of the problem, x is the value of u, and r is the result.
LONG_STYLES = (
    "{v} = {u} {o} {y} . here {u} {x} , so work it out : {x} {o} {y} = {r} , now {v} {r} .",
    "{v} = {u} {o} {y} ; we know {u} {x} which then makes {x} {o} {y} = {r} "
    "and so gives us {v} {r}",
    "{v} = {u} {o} {y} to find ; then take {u} {x} yields {x} {o} {y} = {r} , the value of {v} {r}",
    "{v} = {u} {o} {y} look up {u} {x} and put that in place {x} {o} {y} = {r} "
    "the result {v} {r} ,",
    "{v} = {u} {o} {y} needs {u} {x} where it stands , compute {x} {o} {y} = {r} "
    "thus we say {v} {r} holds",
)
BRIEF_STYLES = (
    "{v} short : {x} {o} {y} is {r} .",
    "{v} again {x} {o} {y} , {r} right",
    "{v} from {x} {o} {y} leads to {r}",
    "{v} quick {x} {o} {y} ; hence {r}",
    "{v} {x} {o} {y} means {r} fine ,",
)
TAILS = {"solve": "go on .", "redo": "same as before .", "back": "fits too .", "brief": ""}
CHANGED_TAIL = "but not as before !"
FIX_STEP = "wrong was {v} {old} , fix it ."
HEADERS = {
    "solve": "first solve each line in turn .",
    "redo": "wait , check {k} : let me verify by doing it all over .",
    "back": "now check {k} goes backwards from the end .",
    "brief": "check {k} : all in brief .",
}
FINAL_STEP = "done , {v} {r} ."
ANSWER = "the answer is \\boxed{{ {r} }} ."
PROMPT_WORDS = "draft find plan redo back brief"


def _vocabulary() -> tuple[str, ...]:
    """All words, in a fixed order. Skips the fields of templates, such as ``{v}``: they are not words."""
    words = dict.fromkeys((*SPECIAL, *DIGITS, *LETTERS, *OPERATORS, "=", *ORDINALS))
    texts = (*LONG_STYLES, *BRIEF_STYLES, *TAILS.values(), CHANGED_TAIL, FIX_STEP)
    for text in (*texts, *HEADERS.values(), FINAL_STEP, ANSWER, PROMPT_WORDS):
        words |= dict.fromkeys(w for w in text.split() if not w.startswith("{") and w != "}}")
    words.pop("\\boxed{{", None)
    return tuple(words)


VOCABULARY = _vocabulary()


@dataclass(frozen=True)
class Problem:
    """A problem with its reference response."""

    prompt: str  # content of the user message
    answer: str  # the right final answer, one digit
    error: bool  # whether the prompt has a wrong draft value, which the response has to correct
    response: str  # from <think> to the sentence with the answer


@dataclass(frozen=True)
class Difficulty:
    """Size of problems, and how often they have drafts and wrong drafts. The evaluation uses the defaults."""

    min_variables: int = 3
    max_variables: int = 5
    min_rounds: int = 3
    max_rounds: int = 4
    draft_rate: float = 0.8
    wrong_rate: float = 0.5


@dataclass(frozen=True)
class _Line:
    """An assignment ``name = operand op constant``."""

    name: str
    operand: str
    op: str
    constant: str

    def result(self, values: dict[str, int]) -> int:
        x = values[self.operand]
        y = int(self.constant)
        return (x + y if self.op == "+" else x - y) % 10

    def render(self, styles: tuple[str, ...], values: dict[str, int], result: int) -> str:
        """The words of a step that computes the variable ``name``, in the style of this letter."""
        style = styles[LETTERS.index(self.name) % len(styles)]
        u = self.operand
        o = self.op
        y = self.constant
        return style.format(v=self.name, u=u, o=o, y=y, x=values[u], r=result)


def _plan(rng: random.Random, rounds: int) -> tuple[str, ...]:
    """Draws the kinds of the rounds. ``redo`` is first, because ``back`` would not correct all wrong values."""
    if rounds <= 1:
        return ("redo",) * rounds
    rest = ["brief"] + [rng.choice(("redo", "back")) for _ in range(rounds - 2)]
    if rounds == 2:
        rest = [rng.choice(("redo", "back", "brief"))]
    elif rounds == 4 and rng.random() < 0.3:
        rest[-1] = "brief"
    rng.shuffle(rest)
    return ("redo", *rest)


def _chain(rng: random.Random, count: int) -> tuple[str, int, list[_Line]]:
    """Draws the given variable, its value, and ``count`` lines. Each line uses the previous line's variable."""
    styles = len(LONG_STYLES)
    names = [
        LETTERS[s + styles * rng.randrange(len(LETTERS) // styles)]
        for s in rng.sample(range(styles), count)
    ]
    first = rng.choice([c for c in LETTERS if c not in names])
    lines = []
    previous = first
    for name in names:
        lines.append(_Line(name, previous, rng.choice(OPERATORS), rng.choice(DIGITS)))
        previous = name
    return first, rng.randrange(10), lines


def make_problem(rng: random.Random, difficulty: Difficulty = Difficulty()) -> Problem:
    first, start, lines = _chain(
        rng, rng.randint(difficulty.min_variables, difficulty.max_variables)
    )
    plan = _plan(rng, rng.randint(difficulty.min_rounds, difficulty.max_rounds))
    true = {first: start}
    for line in lines:
        true[line.name] = line.result(true)

    drafted = ""
    draft_value = 0
    # Without a round that verifies it, a wrong draft would make the reference answer wrong.
    if plan and rng.random() < difficulty.draft_rate:
        drafted = rng.choice(lines).name
        draft_value = true[drafted]
        if rng.random() < difficulty.wrong_rate:
            draft_value = (draft_value + rng.randint(1, 9)) % 10
    error = bool(drafted) and draft_value != true[drafted]

    target = lines[-1].name
    facts = [f"{first} {start}", *(f"{t.name} = {t.operand} {t.op} {t.constant}" for t in lines)]
    rng.shuffle(facts)
    parts = [" , ".join(facts), f"find {target}"]
    rounds = list(zip(ORDINALS, plan, strict=False))
    if drafted:
        parts.insert(rng.randrange(2), f"draft {drafted} {draft_value}")
    if plan:
        parts.append("plan " + " ".join(f"{ordinal} {kind}" for ordinal, kind in rounds))

    # First pass: the draft replaces the computed result, and later lines use the draft.
    values = {first: start}
    steps = [f"{THINK} {HEADERS['solve']}"]
    for line in lines:
        result = draft_value if line.name == drafted else line.result(values)
        steps.append(f"{line.render(LONG_STYLES, values, result)} {TAILS['solve']}")
        values[line.name] = result
    for ordinal, kind in rounds:
        steps.append(HEADERS[kind].format(k=ordinal))
        styles = BRIEF_STYLES if kind == "brief" else LONG_STYLES
        for line in reversed(lines) if kind == "back" else lines:
            old = values[line.name]
            result = line.result(values)
            tail = TAILS[kind] if result == old else CHANGED_TAIL
            steps.append(f"{line.render(styles, values, result)} {tail}".strip())
            if result != old:
                steps.append(FIX_STEP.format(v=line.name, old=old))
            values[line.name] = result
    assert values == true
    answer = str(true[target])
    steps += [f"{FINAL_STEP.format(v=target, r=answer)} {THINK_END}", ANSWER.format(r=answer)]
    response = f" {STEP_END} ".join(steps)
    prompt = " . ".join(parts) + " ."
    return Problem(prompt, answer, error, response)


def split_of(prompt: str) -> str:
    """``"test"`` for about one prompt in 16, chosen by the prompt's hash; ``"train"`` for all others."""
    return "test" if hashlib.sha256(prompt.encode()).digest()[0] < 16 else "train"


def generate(
    seed: int,
    count: int,
    split: str = "test",
    make: Callable[[random.Random], Problem] = make_problem,
) -> list[Problem]:
    """Draws ``count`` distinct problems of a split. Equal arguments give equal problems."""
    rng = random.Random(f"{split}-{seed}")
    problems: dict[str, Problem] = {}
    while len(problems) < count:
        problem = make(rng)
        if split_of(problem.prompt) == split:
            problems.setdefault(problem.prompt, problem)
    return list(problems.values())
