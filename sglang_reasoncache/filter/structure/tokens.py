# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF001 - some mathematical signs below look like other characters on purpose
"""Extracts the formal content (mathematics, code) of a step as tokens. ``<=`` and ``≤`` become the same token.

Most models write mathematics without mark-up ("so x + 1 = 2"), so this module decides for every word of
plain text whether it is formal. In doubt a word counts as formal: at worst, a block is not shared.

* Numbers, scripts (x², x_1), LaTeX commands, mathematical signs and *names* count. Names are single letters,
  two to six capitals, functions, and words right after a digit (3rd) or before a digit, script or bracket.
* ``a``, ``A`` and ``I`` count next to a number, an operator or a single letter, and where they cannot be
  English words. Other words count beside an operator other than ``-`` and ``~``: Area = 3.
* A hyphen counts beside a number, name or bracket, but not as a list bullet; Markdown does not
  count. A pair of brackets counts if it holds something formal.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator

from sympy.printing.pretty.pretty_symbology import greek_unicode

Token = tuple[str, str]
"""Kind and label. Kinds: ``leaf`` (number, name or other sign), ``operator``, ``script``, ``open``,
``close``, ``root``, ``fraction``, ``separator`` (of columns, rows, list items; also stands for prose)."""

_SEPARATOR: Token = ("separator", ",")

# One string per binding strength, weakest first. ``;`` separates operators: first the label, then synonyms.
_OPERATORS = (
    r"-> → \to \rightarrow; => ==> ⇒ ⟹ \Rightarrow \implies; <=> ⇔ ⟺ \iff",
    r"= ==; != ≠ \ne \neq; < \lt; <= ≤ \le \leq; > \gt; >= ≥ \ge \geq; ≈ \approx; ≡ \equiv; ~ ∼ \sim;"
    r"∈ \in; := ; :",
    r"+; - − –; ± \pm",
    r"* · × ∙ ∗ \cdot \times; / ÷ ∕ \div",
)
#: Binding strength of an operator by its label.
LEVELS = {
    row.split()[0]: level for level, rows in enumerate(_OPERATORS, 1) for row in rows.split(";")
}
_KINDS = {
    "operator": ";".join(_OPERATORS),
    "script": "^ **; _ __",
    "root": r"√ \sqrt",
    "fraction": r"\frac \dfrac \tfrac \cfrac",
    "open": r"(;[;{;⌊;⌈;⟨;\{",
    "close": r");];};⌋;⌉;⟩;\}",
    "separator": r", . ? & \\ \( \) \[ \]" + " \\",
}
_ROWS = [(kind, row.split()) for kind, rows in _KINDS.items() for row in rows.split(";")]
_WRITTEN: dict[str, Token] = {sign: (kind, row[0]) for kind, row in _ROWS for sign in row}
_WRITTEN[";"] = _SEPARATOR
_SIGNS = [re.escape(sign) for sign in _WRITTEN if sign[0] not in "\\:*_,;.?&()[]{}⌊⌋⌈⌉⟨⟩"]
# Asterisks and underscores are Markdown if they touch a word or bracket on one side only.
_UNMARKED = (
    r"(?<=[^\W_]|[)\]}])(?:\*\*?+|__?+)(?=[^\W_]|[(\[{\\])"
    r"|(?<![^\W_])(?<![)\]}*_])(?:\*\*?+|__?+)(?![^\W_]|[*_(\[{\\])"
)
_OPERATOR = "|".join([*sorted(_SIGNS, key=len, reverse=True), _UNMARKED])
_SUP = "²³¹⁰ⁱ⁴-ⁿ"
_SUB = "₀-₎"
_LETTER = rf"[^\W\d_{_SUP}{_SUB}]"
_END = rf"(?![’']?{_LETTER})"
_FUNCTION = "sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|log|ln|lg|exp|sqrt|mod|gcd|lcm|max|min|lim|det|deg"
# ``a`` before one of these words counts as a variable, because an article rarely stands there.
_NO_ARTICLE = "is|and|or|equals|be|was|to|plus|minus|times|over|has|gives|must|can|so|then|by|as"
# No two alternatives inside a repetition can match the same text, so matching
# is linear. Digits stay text: no number is ever converted.
_SCANNER = re.compile(
    r"(?P<number>\d+(?:,\d{3}(?!\d))*(?:\.\d+)?|\.\d+)"
    rf"|(?P<name>(?<=\d){_LETTER}++|{_LETTER}++(?=[\d(\[{{⌊⌈⟨{_SUP}{_SUB}])"
    rf"|(?:(?![aAI]){_LETTER}|[A-Z]{{2,6}}|{_FUNCTION}){_END}|I{_END}(?![ \t]+{_LETTER}{{2}})"
    rf"|[aA]{_END}(?![ \t]+(?!(?:{_NO_ARTICLE}){_END}){_LETTER}{{2}}))"
    rf"|(?P<article>[aAI]{_END})|(?P<word>{_LETTER}+(?:['’]{_LETTER}+)*)"
    rf"|(?P<sup>[{_SUP}]+)|(?P<sub>[{_SUB}]+)|(?P<operator>{_OPERATOR})"
    r"|(?P<symbol>[∑∏∫∞°%∠△∅|∪∩⊕∖∘⊗∧∨¬∂∇∀∃∴∵∝∉∋⊂⊆⊃⊇⊥∥∣∤≪≫≺≻↦↔≅∓]"
    rf"|(?<=[\d)\]])(?:!|['′’]+)|(?<=\b{_LETTER})(?:!|['′’]+))"
    r"|(?P<open>[(\[{⌊⌈⟨])|(?P<close>[)\]}⌋⌉⟩])"
    # Commands for size, spacing and style are skipped, because they say nothing about structure.
    r"|(?P<skip>\\(?:[ ,;:!>.-]|(?:left|right|middle|[bB]igg?[lr]?|q?quad|displaystyle|textstyle"
    r"|limits|hline)(?![A-Za-z])))"
    r"|(?P<command>\\(?:(?:text|math|mbox|operatorname|begin|end|tag)[a-z]*\*?\{[^{}]*\}"
    r"|[A-Za-z]+|.|$))|(?P<newline>\n)|(?P<other>\S)",
    re.DOTALL,
)
# To keep matching linear, the search for a formula's end stops where another begins. An unclosed code fence
# ends with the text. As in Pandoc, LaTeX in single dollars has no space just inside and no digit behind.
_REGION = re.compile(
    r"```(?:[ \t]*+\S*+[ \t\r]*+\n)?(?P<code>.*?)(?:```|\Z)|`(?P<code1>[^`\n]+)`"
    r"|\\\[(?P<latex>(?:[^\\]|\\[^][])*+)\\\]|\\\((?P<latex1>(?:[^\\]|\\[^()])*+)\\\)"
    r"|\$\$(?P<latex2>[^$]+)\$\$|\$(?P<latex3>(?!\s)[^$\n]++(?<!\s))\$(?!\d)",
    re.DOTALL,
)

_WEAK = frozenset("-−–~∼")  # operators that also punctuate prose
_OPERANDS = frozenset({"number", "sup", "sub", "name", "close"})
_BESIDE = _OPERANDS | {"open", "command"}
_ALWAYS = _BESIDE | {"skip", "operator", "symbol"}
_BULLET = re.compile(r"^[ \t]*[-−–*][ \t]", re.MULTILINE)


def regions(text: str) -> Iterator[tuple[str, str]]:
    """Split a step into parts: the kind (``plain``, ``latex`` or ``code``) and the text without delimiters."""
    start = 0
    for match in _REGION.finditer(text):
        yield "plain", text[start : match.start()]
        start = match.end()
        yield (match.lastgroup or "").rstrip("123"), match[match.lastgroup or 0]
    yield "plain", text[start:]


def parser_tokens(text: str, latex: bool) -> list[Token]:
    """The tokens of a LaTeX formula, or those of plain text, in which separators replace the prose.
    Brackets come in pairs. An empty pair, or a bracket without its match, becomes a separator."""
    tokens: list[Token] = []
    opened: list[int] = []
    for token in _read(_scan(text) if latex else _formal(_scan(_BULLET.sub("\n", text)))):
        last = tokens[-1] if tokens else _SEPARATOR
        if token[0] == "open":
            opened.append(len(tokens))
        elif token[0] == "close":
            at = opened.pop() if opened else len(tokens)
            if at >= len(tokens) - 1 - (last == _SEPARATOR):
                del tokens[at:]
                token = _SEPARATOR
        elif token == last == _SEPARATOR:
            continue
        tokens.append(token)
    for at in opened:
        tokens[at] = _SEPARATOR
    return tokens


def _scan(text: str) -> list[Token]:
    return [(match.lastgroup or "", match[0]) for match in _SCANNER.finditer(text)]


def _read(pieces: Iterable[Token]) -> Iterator[Token]:
    for group, text in pieces:
        if group == "sup" or group == "sub":
            # x² becomes x^{2}, and x⁻¹ becomes x^{-1}.
            yield "script", "^" if group == "sup" else "_"
            yield "open", "{"
            yield from _read(_scan(unicodedata.normalize("NFKC", text)))
            yield "close", "}"
        elif text in _WRITTEN:
            yield _WRITTEN[text]
        elif group == "command":
            yield "leaf", greek_unicode.get(text[1:].removeprefix("var"), text[1:])
        elif group != "newline" and group != "skip":
            yield "leaf", text


def _formal(pieces: list[Token]) -> Iterator[Token]:
    """The pieces of plain text, with a comma in place of each piece that is not formal."""
    near = [("", ""), *pieces, ("", "")]
    for i in range(1, len(near) - 1):
        # In "word - a better way" the article does not make the dash a minus sign.
        is_sign = near[i - 1][0] in _OPERANDS or near[i + 1][0] in _BESIDE
        if near[i][1] in _WEAK and not is_sign:
            near[i] = "other", near[i][1]
    for before, (group, text), after in zip(near, near[1:], near[2:], strict=False):
        if group == "word":
            is_formal = any(x[0] == "operator" and x[1] not in _WEAK for x in (before, after))
        elif group == "article":
            is_letter = before[0] == "name" and len(before[1]) == 1
            is_formal = is_letter or before[0] in ("operator", "number", "sup", "sub")
        else:
            is_formal = group in _ALWAYS
        yield (group, text) if is_formal else ("other", ",")
