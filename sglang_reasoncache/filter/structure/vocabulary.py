# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF001, SIM905 - mathematical signs look alike on purpose; word lists stay readable
"""What the mathematical signs are called: one label for all spellings.

Tables only. LaTeX command names stand without their backslash.
"""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """Kind of a token that reaches the expression parser."""

    NUMBER = 0
    NAME = 1
    """Variable, constant or any other leaf."""
    OPERATOR = 2
    SCRIPT = 3
    """``^`` or ``_``."""
    OPEN = 4
    CLOSE = 5
    SEPARATOR = 6
    """Comma, column or row mark, or prose between two formal parts."""
    FUNCTION = 7
    """``sin`` and the like: takes one operand, with or without brackets."""
    COMMAND = 8
    """LaTeX command with braced arguments, such as ``frac``."""


Token = tuple[Kind, str]
SEPARATOR: Token = (Kind.SEPARATOR, ",")


# Canonical label by spelling, then binding strength by label.
OPERATORS: dict[str, str] = {
    "−": "-", "–": "-", "·": "*", "×": "*", "∙": "*", "∗": "*", "÷": "/", "∕": "/",
    "≤": "<=", "≥": ">=", "≠": "!=", "==": "=", "→": "->", "⇒": "=>", "⇔": "<=>",
    "⟹": "=>", "⟺": "<=>", "↔": "<->", "==>": "=>", "∼": "~", "≈": "~=",
}  # fmt: skip

LEVELS: dict[str, int] = {
    label: level
    for level, group in enumerate(
        (
            "-> => <=> <-> ↦ ∧ ∨ ∴ ∵",
            "= < > <= >= != ≡ ~ ~= ≅ ∝ ∈ ∉ ∋ ⊂ ⊆ ⊃ ⊇ ⊥ ∥ ∣ ∤ := : ≪ ≫ ≺ ≻ \\mid",
            "+ - ± ∓ ∪ ∩ ⊕ ∖",
            "* / ∘ ⊗ // mod",
        ),
        start=1,
    )
    for label in group.split()
}

PREFIXES = frozenset({"-", "+", "±", "∓", "√", "¬", "∂", "∇", "∀", "∃"})
PRODUCT_LEVEL = LEVELS["*"]

# Operators that make a neighbouring word an operand: "speed = distance / time".
STRONG = frozenset(LEVELS) - {"-", "~", ":", "∣", "\\mid", "mod"}

FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp "
    "sqrt gcd lcm max min lim sup inf det deg dim ker arg floor ceil abs Re Im".split()
)

# LaTeX commands with braced arguments: canonical label and how many.
COMMANDS: dict[str, tuple[str, int]] = {
    "frac": ("/", 2), "dfrac": ("/", 2), "tfrac": ("/", 2), "cfrac": ("/", 2),
    "binom": ("binom", 2), "dbinom": ("binom", 2), "tbinom": ("binom", 2),
    "sqrt": ("sqrt", 1), "boxed": ("boxed", 1), "overline": ("overline", 1),
    "underline": ("underline", 1), "vec": ("vec", 1), "hat": ("hat", 1),
    "widehat": ("hat", 1), "bar": ("overline", 1), "tilde": ("tilde", 1),
    "dot": ("dot", 1), "ddot": ("ddot", 1), "pmod": ("pmod", 1),
    "overrightarrow": ("vec", 1), "stackrel": ("stackrel", 2),
    "overset": ("overset", 2), "underset": ("underset", 2),
    "cancel": ("cancel", 1), "xrightarrow": ("->", 1),
}  # fmt: skip

LATEX_OPERATORS: dict[str, str] = {
    "cdot": "*", "times": "*", "ast": "*", "star": "*", "div": "/", "pm": "±",
    "mp": "∓", "le": "<=", "leq": "<=", "leqslant": "<=", "ge": ">=", "geq": ">=",
    "geqslant": ">=", "ne": "!=", "neq": "!=", "lt": "<", "gt": ">", "equiv": "≡",
    "approx": "~=", "sim": "~", "simeq": "≅", "cong": "≅", "propto": "∝", "in": "∈",
    "notin": "∉", "ni": "∋", "subset": "⊂", "subseteq": "⊆", "supset": "⊃",
    "supseteq": "⊇", "cup": "∪", "cap": "∩", "setminus": "∖", "to": "->",
    "rightarrow": "->", "longrightarrow": "->", "Rightarrow": "=>", "implies": "=>",
    "Longrightarrow": "=>", "iff": "<=>", "Leftrightarrow": "<=>", "mapsto": "↦",
    "leftrightarrow": "<->", "land": "∧", "wedge": "∧", "lor": "∨", "vee": "∨",
    "neg": "¬", "lnot": "¬", "circ": "∘", "oplus": "⊕", "otimes": "⊗", "perp": "⊥",
    "parallel": "∥", "mid": "\\mid", "nmid": "∤", "ll": "≪", "gg": "≫", "bmod": "mod",
    "therefore": "∴", "because": "∵", "partial": "∂", "nabla": "∇", "forall": "∀",
    "exists": "∃", "coloneqq": ":=",
}  # fmt: skip

LATEX_NAMES: dict[str, str] = dict(
    zip(
        "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa "
        "lambda mu nu xi pi rho sigma tau upsilon phi varphi chi psi omega Gamma Delta "
        "Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega infty sum prod int ell ldots "
        "dots cdots angle triangle degree emptyset varnothing prime".split(),
        "α β γ δ ε ε ζ η θ θ ι κ λ μ ν ξ π ρ σ τ υ φ φ χ ψ ω Γ Δ "
        "Θ Λ Ξ Π Σ Υ Φ Ψ Ω ∞ ∑ ∏ ∫ ℓ … … … ∠ △ ° ∅ ∅ ′".split(),
        strict=True,
    )
)

LATEX_BRACKETS: dict[str, tuple[Kind, str]] = {
    "{": (Kind.OPEN, "\\{"), "}": (Kind.CLOSE, "\\}"),
    "lfloor": (Kind.OPEN, "⌊"), "rfloor": (Kind.CLOSE, "⌋"),
    "lceil": (Kind.OPEN, "⌈"), "rceil": (Kind.CLOSE, "⌉"),
    "langle": (Kind.OPEN, "⟨"), "rangle": (Kind.CLOSE, "⟩"),
}  # fmt: skip

# Size, spacing and style: they say nothing about structure.
LATEX_IGNORED = frozenset(
    "left right middle big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr "
    "quad qquad displaystyle textstyle scriptstyle limits nolimits hspace vspace "
    "phantom mathstrut nonumber hline , ; : ! > . -".split()
) | {" "}

# Commands whose argument is one name or a few words, kept as one leaf.
LATEX_TEXT = (
    "text|textbf|textit|textrm|mbox|mathrm|mathbf|mathit|mathsf|mathbb|mathcal|"
    "operatorname|begin|end|label|tag"
)

SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ", "0123456789+-()ni")
SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₙᵢ", "0123456789+-()ni")
