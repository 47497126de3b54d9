# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF001, SIM905 - mathematical signs look alike on purpose; word lists stay readable
"""What the mathematical signs are called: one label for all spellings.

Tables only. LaTeX command names stand without their backslash.
"""

from __future__ import annotations

from typing import Literal

Kind = Literal[
    "number", "name", "operator", "script", "open", "close", "separator", "function", "command"
]
"""Of a token of the expression parser. ``name``: any leaf but a number. ``separator``: comma,
column, row, or prose between two formal parts. ``function``: takes one operand, as ``sin``.
``command``: LaTeX with braced arguments, as ``frac``."""

Token = tuple[Kind, str]
SEPARATOR: Token = ("separator", ",")


def _labels(table: str) -> dict[str, str]:
    """Label by spelling, out of rows of a label and its spellings."""
    rows = (row.split() for row in table.split(";"))
    return {spelling: label for label, *spellings in rows for spelling in spellings}


OPERATORS = _labels(
    "- − –; * · × ∙ ∗; / ÷ ∕; <= ≤; >= ≥; != ≠; = ==; -> →; => ⇒ ⟹ ==>; <=> ⇔ ⟺; <-> ↔; ~ ∼; ~= ≈"
)

# Binding strength by label.
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

PREFIXES = frozenset("-+±∓√¬∂∇∀∃")
PRODUCT_LEVEL = LEVELS["*"]

# Operators that make a neighbouring word an operand: "speed = distance / time".
STRONG = frozenset(LEVELS) - {"-", "~", ":", "∣", "\\mid", "mod"}

FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp "
    "sqrt gcd lcm max min lim sup inf det deg dim ker arg floor ceil abs Re Im".split()
)

# LaTeX commands with one and with two braced arguments: canonical label and how many.
COMMANDS: dict[str, tuple[str, int]] = {
    name: (label, num_arguments)
    for num_arguments, table in enumerate(
        (
            "sqrt sqrt; boxed boxed; overline overline bar; underline underline; hat hat widehat;"
            "vec vec overrightarrow; tilde tilde; dot dot; ddot ddot; pmod pmod; cancel cancel;"
            "-> xrightarrow",
            "/ frac dfrac tfrac cfrac; binom binom dbinom tbinom; stackrel stackrel;"
            "overset overset; underset underset",
        ),
        start=1,
    )
    for name, label in _labels(table).items()
}

LATEX_OPERATORS = _labels(
    "* cdot times ast star; / div; ± pm; ∓ mp; <= le leq leqslant; >= ge geq geqslant; != ne neq;"
    "< lt; > gt; ≡ equiv; ~= approx; ~ sim; ≅ simeq cong; ∝ propto; ∈ in; ∉ notin; ∋ ni; ⊂ subset;"
    "⊆ subseteq; ⊃ supset; ⊇ supseteq; ∪ cup; ∩ cap; ∖ setminus; -> to rightarrow longrightarrow;"
    "=> Rightarrow implies Longrightarrow; <=> iff Leftrightarrow; ↦ mapsto; <-> leftrightarrow;"
    "∧ land wedge; ∨ lor vee; ¬ neg lnot; ∘ circ; ⊕ oplus; ⊗ otimes; ⊥ perp; ∥ parallel;"
    "\\mid mid; ∤ nmid; ≪ ll; ≫ gg; mod bmod; ∴ therefore; ∵ because; ∂ partial; ∇ nabla;"
    "∀ forall; ∃ exists; := coloneqq"
)

LATEX_NAMES = _labels(
    "α alpha; β beta; γ gamma; δ delta; ε epsilon varepsilon; ζ zeta; η eta; θ theta vartheta;"
    "ι iota; κ kappa; λ lambda; μ mu; ν nu; ξ xi; π pi; ρ rho; σ sigma; τ tau; υ upsilon;"
    "φ phi varphi; χ chi; ψ psi; ω omega; Γ Gamma; Δ Delta; Θ Theta; Λ Lambda; Ξ Xi; Π Pi;"
    "Σ Sigma; Υ Upsilon; Φ Phi; Ψ Psi; Ω Omega; ∞ infty; ∑ sum; ∏ prod; ∫ int; ℓ ell;"
    "… ldots dots cdots; ∠ angle; △ triangle; ° degree; ∅ emptyset varnothing; ′ prime"
)

LATEX_BRACKETS: dict[str, Token] = {
    "{": ("open", "\\{"), "}": ("close", "\\}"),
    "lfloor": ("open", "⌊"), "rfloor": ("close", "⌋"),
    "lceil": ("open", "⌈"), "rceil": ("close", "⌉"),
    "langle": ("open", "⟨"), "rangle": ("close", "⟩"),
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

# Spellings of operators in text: the longer ones in the order in which they are tried.
LONG_OPERATORS = ("<=>", "<->", "==>", *"== => -> <= >= != := ** __ //".split())
SHORT_OPERATORS = "-+*/^_=<>~−–·×∙∗÷∕±∓≤≥≠≈≡∼≅∝∈∉∋⊂⊆⊃⊇⊥∥∣∤≪≫≺≻∪∩⊕∖∘⊗∧∨¬→⇒⇔⟹⟺↔↦∴∵√∂∇∀∃"
