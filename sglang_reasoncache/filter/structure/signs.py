# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF001, SIM905 - mathematical signs look alike on purpose; word lists stay readable
"""Parser tokens of the mathematical signs: one label for all spellings. Tables only."""

from __future__ import annotations

from typing import Literal

Kind = Literal[
    "number", "name", "operator", "script", "open", "close", "separator", "function", "command"
]
"""Of a token of the expression parser. ``name``: any leaf but a number. ``separator``: comma,
column, row, or prose between two formal parts. ``function``: takes one operand, as ``sin``.
``command``: LaTeX with one or two braced arguments, as ``frac``."""

Token = tuple[Kind, str]
SEPARATOR: Token = ("separator", ",")
# Mark of a column in a LaTeX table; a separator unless it aligns a relation.
COLUMN: Token = ("separator", "&")


def _tokens(kind: Kind, table: str) -> dict[str, Token]:
    """Token by spelling, out of rows of a label and its spellings."""
    rows = (row.split() for row in table.split(";"))
    return {spelling: (kind, label) for label, *spellings in rows for spelling in spellings}


# Binding strength by label.
LEVELS = {
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
RELATIONS = {("operator", sign) for sign in LEVELS if LEVELS[sign] == LEVELS["="] and sign != ":"}

# Spellings of operators in text: the longer ones in the order in which they are tried.
LONG_OPERATORS = ("<=>", "<->", "==>", *"== => -> <= >= != := ** __ //".split())
SHORT_OPERATORS = "-+*/^_=<>~−–·×∙∗÷∕±∓≤≥≠≈≡∼≅∝∈∉∋⊂⊆⊃⊇⊥∥∣∤≪≫≺≻∪∩⊕∖∘⊗∧∨¬→⇒⇔⟹⟺↔↦∴∵√∂∇∀∃"

_FUNCTIONS: dict[str, Token] = {
    name: ("function", name)
    for name in (
        "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp "
        "sqrt gcd lcm max min lim sup inf det deg dim ker arg floor ceil abs Re Im"
    ).split()
}

# Of operators, words and, inside a formula, punctuation that are not leaves of their own name.
WRITTEN: dict[str, Token] = {
    **{sign: ("operator", sign) for sign in (*LONG_OPERATORS, *SHORT_OPERATORS, ":", "mod")},
    **_tokens(
        "operator",
        "- − –; * · × ∙ ∗; / ÷ ∕; <= ≤; >= ≥; != ≠; = ==; -> →; => ⇒ ⟹ ==>; <=> ⇔ ⟺; <-> ↔; ~ ∼;"
        "~= ≈",
    ),
    **_tokens("script", "^ ^ **; _ _ __"),
    **_FUNCTIONS,
    **dict.fromkeys(",;.?", SEPARATOR),
    "&": COLUMN,
}

# Signs that make a neighbouring word an operand: "speed = distance / time".
_STRONG_LABELS = LEVELS.keys() - {"-", "~", ":", "∣", "\\mid", "mod"} | {"^", "_", "√"}
STRONG = frozenset(sign for sign, (_, label) in WRITTEN.items() if label in _STRONG_LABELS)

# Of LaTeX commands, without their backslash. Empty: size, spacing and style, which say nothing
# about structure.
LATEX: dict[str, Token | None] = {
    **_tokens(
        "name",
        "α alpha; β beta; γ gamma; δ delta; ε epsilon varepsilon; ζ zeta; η eta; θ theta vartheta;"
        "ι iota; κ kappa; λ lambda; μ mu; ν nu; ξ xi; π pi; ρ rho; σ sigma; τ tau; υ upsilon;"
        "φ phi varphi; χ chi; ψ psi; ω omega; Γ Gamma; Δ Delta; Θ Theta; Λ Lambda; Ξ Xi; Π Pi;"
        "Σ Sigma; Υ Upsilon; Φ Phi; Ψ Psi; Ω Omega; ∞ infty; ∑ sum; ∏ prod; ∫ int; ℓ ell;"
        "… ldots dots cdots; ∠ angle; △ triangle; ° degree; ∅ emptyset varnothing; ′ prime",
    ),
    # Row mark, a lone backslash, delimiters of a formula that have no counterpart.
    **dict.fromkeys(("\\", "", *"()[]"), SEPARATOR),
    **_FUNCTIONS,
    **_tokens("open", "\\{ {; ⌊ lfloor; ⌈ lceil; ⟨ langle"),
    **_tokens("close", "\\} }; ⌋ rfloor; ⌉ rceil; ⟩ rangle"),
    **_tokens(
        "operator",
        "* cdot times ast star; / div; ± pm; ∓ mp; <= le leq leqslant; >= ge geq geqslant; != ne neq;"
        "< lt; > gt; ≡ equiv; ~= approx; ~ sim; ≅ simeq cong; ∝ propto; ∈ in; ∉ notin; ∋ ni; ⊂ subset;"
        "⊆ subseteq; ⊃ supset; ⊇ supseteq; ∪ cup; ∩ cap; ∖ setminus; -> to rightarrow longrightarrow;"
        "=> Rightarrow implies Longrightarrow; <=> iff Leftrightarrow; ↦ mapsto; <-> leftrightarrow;"
        "∧ land wedge; ∨ lor vee; ¬ neg lnot; ∘ circ; ⊕ oplus; ⊗ otimes; ⊥ perp; ∥ parallel;"
        "\\mid mid; ∤ nmid; ≪ ll; ≫ gg; mod bmod; ∴ therefore; ∵ because; ∂ partial; ∇ nabla;"
        "∀ forall; ∃ exists; := coloneqq",
    ),
    **_tokens(
        "command",
        "sqrt sqrt; boxed boxed; overline overline bar; underline underline; hat hat widehat;"
        "vec vec overrightarrow; tilde tilde; dot dot; ddot ddot; pmod pmod; cancel cancel;"
        "-> xrightarrow; / frac dfrac tfrac cfrac; binom binom dbinom tbinom; stackrel stackrel;"
        "overset overset; underset underset",
    ),
    **dict.fromkeys(
        (
            "left right middle big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr "
            "quad qquad displaystyle textstyle scriptstyle limits nolimits hspace vspace "
            "phantom mathstrut nonumber hline , ; : ! > . -"
        ).split()
    ),
    " ": None,
}
TWO_ARGUMENTS = frozenset({"/", "binom", "stackrel", "overset", "underset"})

SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ", "0123456789+-()ni")
SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₙᵢ", "0123456789+-()ni")
