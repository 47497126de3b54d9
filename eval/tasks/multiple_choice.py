# SPDX-License-Identifier: Apache-2.0
"""Reads which choice a response to a multiple-choice question gives as its answer.

The question asks for a last line ``Answer: X``. Models also write ``\\boxed{B}``, ``**B**`` or "The correct
answer is B.", so :func:`chosen_letter` reads these too. As responses may be hostile, one pass of a regular
expression that cannot backtrack cuts the text into words and signs; what follows looks at a bounded number of
places, and at a bounded number of words around each."""

import itertools
import re
import unicodedata
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from eval.tasks.grading import Documents, Responses, last_box

LETTERS = "ABCD"
_MAX_PLACES = 100  # the last statements, bold texts or lines that are looked at
_MAX_CHOICE_CHARS = 1000  # of a text that is compared with the choices
_REACH = 16  # tokens between "answer" and the letter
_MAX_REMARK = 30  # tokens of a remark between the letter and "is correct"
_SEVERAL = "?"  # what is read where a response names several letters


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Nouns and verbs that announce an answer, and adjectives that make a letter the answer.
_ANSWER = _words("answer ans antwort lösung 答案")
_OPTION = _words("option choice letter 选项 選項")
_CHOOSE = _words("choose select pick wähle 选择 選擇 应选 應選 故选 故選 选 選")
_RIGHT = _words("correct right richtig korrekt 正确 正確")
# An option is an answer if one of these words stands before it: "the best option is B".
_BEST = _words(
    "correct right best final only my our likely plausible appropriate suitable accurate richtige korrekte "
    "beste 正确 正確"
)
# Words before "answer" and "choose" that do not change what is said.
_ATTRIBUTES = _BEST | _words(
    "the most true actual so therefore thus hence then i we would will must should can die der das finale "
    "endgültige 最终 最終 的 应该 因此 所以"
)
# One of these is needed between the noun and the letter: "Answer A is wrong" gives no answer.
_CONNECT = _words(
    ": = - > \u2013 \u2014 \u2192 \u21d2 => -> is are be was ist lautet wäre 是 为 為"
)
# Others may stand there too.
_FILL = _CONNECT | _ATTRIBUTES | _OPTION | _words(
    "( [ , answer it it's clearly indeed definitely probably simply just have to appears seems either both "
    "antwort 答案"
)  # fmt: skip
_OF = _words("to for of in on among from between here zu auf")
_IS = _words("is are was must be seems remains ist sind 是 为 為")
_ADVERBS = _words("clearly indeed definitely therefore thus hence thereby also")
_IF = _words("if whether suppose supposing assume assuming unless wenn falls ob 如果")
# Words that deny the noun or letter behind them, and words that deny the letter before them.
_NOT = _words(
    "not never nor neither no isn't don't can't cannot than except unlike wrong incorrect false nicht kein "
    "weder noch falsche 不 不是 非 错误 錯誤"
)
_WRONG = _words("wrong incorrect false isn't can't cannot falsch 不 不是 错误 錯誤")
_BUT = _words("but sondern rather 而是")
_AND = _words("and und & 和")
_OR = _words("or nor oder noch / | 或 或者")
# Words that may follow "A" and lower-case letters. Before any other word, "A" may be the article.
_FOLLOWERS = _AND | _OR | _BUT | _OF | _words(
    "because since as is was due which where with not given based by denn weil da nicht"
)  # fmt: skip
_OPENERS = _OPTION | _words("( [ the that only either both")
_CLOSERS = _words(") ]")
_PUNCTUATION = _CLOSERS | _words(". , : ! - \u2013 \u2014")
_ENDS = frozenset(".;!?\n")
_STOPS = _ENDS | _AND | _OR | _words(", because since weil")
_OPERATORS = _words("= + < > ^ / | % & \\ ° · ± ≈ ≠ ≤ ≥ \u00d7 \u2190 \u2192 => ->")

_MARKUP = re.compile(
    r"\\(?:boxed|fbox|text|textbf|textit|textrm|textsf|texttt|mathrm|mathbf|mathit|mathsf|mathtt|bf|rm|bm"
    r"|boldsymbol|emph|underline|left|right|big|Big|large|Large|displaystyle|quad|qquad)(?![A-Za-z])"
    r"|\\[()\[\],;:! $\\]"
    r"|</?(?:b|i|u|em|strong|code|span|div|p|br) ?/?>"
    r"|[*_`${}\"'«»~#\u2018\u2019\u201c\u201d\u201e]"
)
_ALNUM = r"[A-Za-z0-9\u00c0-\u024f]"
_TOKEN = re.compile(
    # "A's", "A-ring", "B_1" and "C^2" are words of their own.
    rf"(?P<word>{_ALNUM}++(?:['\u2019_^\-]{_ALNUM}++)*+"
    r"|答案|选项|選項|选择|選擇|应选|應選|故选|故選|应该|正确|正確|最终|最終|因此|所以|如果|或者|不是|而是|错误|錯誤)"
    rf"|(?P<markup>{_MARKUP.pattern})"
    r"|(?P<sign>\n|</|=>|->|\S)"
)
_WORD = re.compile(_ALNUM)
_BOLD = re.compile(
    r"(?P<mark>\*\*|__)(?P<marked>[^*_\n]{1,200}+)(?P=mark)"
    r"|\\(?:textbf|mathbf|boldsymbol|bm) ?\{(?P<braced>[^{}\n]{1,200}+)\}"
    r"|<(?P<tag>b|strong)>(?P<tagged>[^<\n]{1,200}+)</(?P=tag)>"
)


def letters(responses: Responses, docs: Documents) -> list[list[str]]:
    """Returns the answer of each response, a letter or "" (see :func:`chosen_letter`)."""
    rows = zip(responses, docs, strict=True)
    return [[chosen_letter(text, doc["choices"]) for text in row] for row, doc in rows]


def chosen_letter(text: str, choices: Sequence[str]) -> str:
    r"""Returns the letter of the choice that ``text`` gives as its answer, or "" if it gives none or several.

    The first of these kinds that names a choice counts:

    1. the last statement: "Answer: B", "the correct option is (B)", "B is the answer". If the last statement
       names several letters ("A or B"), only the text behind it counts, and no other statement.
    2. the last ``\boxed{}``;
    3. "B is correct" and "I choose B"; 4. bold text; 5. a line of its own. Those of the same kind must agree.

    Instead of the letter a response may have the choice's text, if no other choice has that text.
    Time and memory are linear in the length of ``text``.
    """
    return _Response(text, choices).answer()


def _ascii_forms() -> Mapping[int, str]:
    """Code point -> ASCII text of the same letter or sign: bold letters, letters in circles, wide signs."""
    forms = {0x3002: ".", 0x3001: ",", 0x200B: "", 0x2060: "", 0xFEFF: "", 0xFE0F: ""}
    blocks = (
        range(0x2100, 0x2150), range(0x2460, 0x2500), range(0xFF01, 0xFF5F),
        range(0x1D400, 0x1D800), range(0x1F110, 0x1F14A),
    )  # fmt: skip
    for block in blocks:
        for point in block:
            form = unicodedata.normalize("NFKC", chr(point))
            if form.isascii():
                forms[point] = form
    return forms


_ASCII_FORMS = _ascii_forms()


def _plain(text: str) -> str:
    """The text without markup, spaces, case and final punctuation, to compare it with other such texts."""
    bare = _MARKUP.sub("", text.translate(_ASCII_FORMS))
    return "".join(bare.split()).casefold().rstrip(".,;:!")


def _agreed(letters: Iterable[str]) -> str:
    """The only letter among ``letters``; "" if there are none or several."""
    different = {letter for letter in letters if letter}
    return different.pop() if len(different) == 1 and _SEVERAL not in different else ""


class _Token(NamedTuple):
    """A word, sign or end of line of the response. Markup makes no tokens."""

    text: str
    word: str  # the text in lower case
    start: int
    end: int


class _Response:
    """A response as tokens. Methods that take an index of a token accept every integer: behind the last token,
    and before the first, there are ends of lines."""

    def __init__(self, text: str, choices: Sequence[str]) -> None:
        self._text = text.translate(_ASCII_FORMS)
        self._letters = LETTERS[: len(choices)]
        self._choices = [_plain(choice) for choice in choices]
        self._tokens = [
            _Token(match[0], match[0].lower(), match.start(), match.end())
            for match in _TOKEN.finditer(self._text)
            if match.lastgroup != "markup"
        ]

    def answer(self) -> str:
        """See :func:`chosen_letter`."""
        first = 0  # the first token that counts
        for i in self._last(_ANSWER | _OPTION, first):
            stated = self._stated(i) or self._claimed(i)
            if stated == _SEVERAL:
                first = i
                break
            if stated:
                return stated
        claims = (self._claimed(i) or self._stated(i) for i in self._last(_RIGHT | _CHOOSE, first))
        return (
            self._boxed(first)
            or _agreed(claims)
            or _agreed(self._bold(first))
            or _agreed(self._lines(first))
        )

    # -- statements --------------------------------------------------------------------------------------------

    def _stated(self, i: int) -> str:
        """What the statement says whose noun or verb is token ``i``: "the answer is B", "choose B"."""
        before = self._past(i - 1, _ATTRIBUTES, -1)
        attributes = {self._word(k) for k in range(before + 1, i)}
        if self._word(before) in _IF | _NOT:
            return ""
        if self._word(i) not in _ANSWER | _CHOOSE and not attributes & _BEST:
            return ""
        # A heading "Final answer" announces what is on the next lines.
        heading = self._word(before) == self._word(i + 1) == "\n"
        connected = heading or self._word(i) in _CHOOSE
        aside = self._word(i + 1) in _OF  # "the answer to this question is B"
        k = i + 1
        while k < min(i + 1 + _REACH, len(self._tokens)):
            word = self._word(k)
            if connected and (letter := self._named(k)):
                return letter
            if word in _CONNECT:
                connected = True
                aside = False
            elif word in _NOT:
                # "is not A but B"
                connected = True
                k = self._behind_but(k)
            elif not (
                word in _FILL or (aside and word not in _ENDS) or (connected and word == "\n")
            ):
                break
            k += 1
        if self._word(i) in _CHOOSE and self._word(self._past(k + 1, _CLOSERS)) not in _STOPS:
            # "we choose B along z" is no answer.
            return ""
        return self._read(k) if connected else ""

    def _behind_but(self, i: int) -> int:
        """The token "but" in "not A but B", where ``i`` is "not"; without one, the end of the tokens."""
        for k in range(i + 1, i + 6):
            if self._word(k) in _BUT:
                return k
        return len(self._tokens)

    def _read(self, i: int) -> str:
        """The letter at token ``i``, if what follows allows that it is an answer."""
        letter = self._letter(i)
        if not letter:
            return ""
        behind = self._past(i + 1, _CLOSERS)
        follower = self._word(behind)
        if self._joined(i) or self._is_letter_name(behind):
            return _SEVERAL
        if self._denied_behind(behind) or follower in _OPERATORS or follower == "?":
            return ""
        # "A" before a word may be the article, and a lower-case letter may be a word or a symbol.
        plain = behind == i + 1 and self._word(i - 1) not in _OPTION
        doubtful = plain and self._written(i) not in self._letters[1:]
        if doubtful and _WORD.match(follower) and follower not in _FOLLOWERS:
            return ""
        return letter

    # -- "B is correct" ----------------------------------------------------------------------------------------

    def _claimed(self, i: int) -> str:
        """The letter that is called the answer, or right, where token ``i`` is this noun or adjective."""
        if self._word(i) in _CHOOSE or self._word(i + 1) == "?":
            return ""
        k = self._past(i - 1, _ATTRIBUTES | _IS | _ADVERBS, -1)
        verbs = _IS.intersection(self._word(between) for between in range(k + 1, i))
        if not verbs and self._word(i) not in ("正确", "正確"):
            return ""
        subject = self._subject(k)
        before = self._past(subject - 1, _OPENERS, -1)
        if self._word(before) in _IF | _NOT or self._joined(subject):
            return ""
        return self._letter(subject) if self._is_letter_name(subject) else ""

    def _subject(self, i: int) -> int:
        """The letter that ends at token ``i``, perhaps with a remark: "B", "(B)", "B (4 eV)", "B, 4 eV,"."""
        if self._letter(i):
            return i
        opening = {")": "(", "]": "[", ",": ","}.get(self._word(i))
        if opening is None:
            return -1
        if self._letter(i - 1):
            return i - 1
        for k in range(i - 1, i - _MAX_REMARK, -1):
            if self._word(k) == opening:
                return k - 2 if self._word(k - 1) in _CLOSERS else k - 1
        return -1

    # -- boxes, bold texts and lines ---------------------------------------------------------------------------

    def _boxed(self, first: int) -> str:
        box = last_box(self._text)
        if box is None:
            return ""
        start = self._token_from(box.start)
        end = self._token_from(box.stop)
        if start < first:
            return ""
        letter = self._alone(start, end)
        if letter:
            return letter
        start = self._past(start, _FILL)
        letter = self._read(start) if start < end else ""
        return "" if letter == _SEVERAL else letter

    def _bold(self, first: int) -> Iterator[str]:
        # Markup before the first token counts.
        start = self._tokens[first].start if first else 0
        for match in deque(_BOLD.finditer(self._text, start), maxlen=_MAX_PLACES):
            group = next(name for name in ("marked", "braced", "tagged") if match[name] is not None)
            i = self._token_from(match.start(group))
            end = self._token_from(match.end(group))
            if not self._denied_behind(end) and self._word(end) != "?":
                yield self._alone(i, end)

    def _lines(self, first: int) -> Iterator[str]:
        ends = [i for i, token in enumerate(self._tokens) if token.word == "\n"]
        edges = [-1, *ends, len(self._tokens)]
        lines = [(a + 1, b) for a, b in itertools.pairwise(edges) if b > a + 1]
        for start, end in lines[-_MAX_PLACES:]:
            # "Option A:" is a heading.
            if start >= first and self._word(end - 1) != ":":
                yield self._alone(start, end)

    def _alone(self, start: int, end: int) -> str:
        """The letter named by the tokens from ``start`` to ``end - 1``, if they name nothing else."""
        if start >= end or end - start > _MAX_CHOICE_CHARS:
            return ""
        letter = self._equal(self._tokens[start].start, self._tokens[end - 1].end)
        if letter:
            return letter
        start = self._past(start, _FILL)
        letter = self._letter(start)
        denied = self._word(self._past(start - 1, _OPENERS, -1)) in _NOT
        if start >= end or not letter or denied or self._joined(start):
            return ""
        rest = self._past(start + 1, _PUNCTUATION)
        if (
            rest < end
            and self._equal(self._tokens[rest].start, self._tokens[end - 1].end) != letter
        ):
            return ""
        return letter

    # -- tokens and texts --------------------------------------------------------------------------------------

    def _last(self, words: frozenset[str], first: int) -> Iterator[int]:
        """The last places of ``words`` from token ``first`` on, the last first."""
        places = (i for i in range(first, len(self._tokens)) if self._tokens[i].word in words)
        return reversed(deque(places, maxlen=_MAX_PLACES))

    def _word(self, i: int) -> str:
        return self._tokens[i].word if 0 <= i < len(self._tokens) else "\n"

    def _written(self, i: int) -> str:
        return self._tokens[i].text if 0 <= i < len(self._tokens) else "\n"

    def _token_from(self, start: int) -> int:
        """The first token at or behind the character ``start``."""
        return bisect_left(self._tokens, start, key=lambda token: token.start)

    def _letter(self, i: int) -> str:
        letter = self._written(i).upper()
        return letter if len(letter) == 1 and letter in self._letters else ""

    def _is_letter_name(self, i: int) -> bool:
        """Whether token ``i`` names a choice anywhere in a sentence: in upper case, or in brackets."""
        return bool(self._letter(i)) and (
            self._written(i) in self._letters or self._word(i + 1) in _CLOSERS
        )

    def _past(self, i: int, words: frozenset[str], step: int = 1) -> int:
        """The first token from ``i`` on that is none of ``words``; backwards if ``step`` is -1. After
        ``_REACH`` tokens it is the next token, whichever that is."""
        for _ in range(_REACH):
            if self._word(i) not in words:
                break
            i += step
        return i

    def _denied_behind(self, i: int) -> bool:
        """Whether what was named before token ``i`` is denied there: "is wrong", "is not", "cannot"."""
        linked = self._word(i) in _IS
        word = self._word(i + linked)
        return word in _WRONG or (linked and word in ("not", "nicht"))

    def _joined(self, i: int) -> bool:
        """Whether the letter ``i`` is one of several: "A or B", "A and B", "A/B", "A, B"."""
        before = self._past(i - 1, _OPENERS | {","}, -1)
        if self._word(before) in _AND | _OR:
            return self._is_letter_name(self._past(before - 1, _CLOSERS | {","}, -1))
        join = self._past(i + 1, _CLOSERS | {"("})
        if self._word(join) == "," and self._word(join + 1) in _AND | _OR:
            join += 1
        if self._word(join) not in _AND | _OR | {","}:
            return False
        other = self._past(join + 1, _OPENERS)
        if not self._is_letter_name(other) and not (
            self._letter(other) and self._written(i).islower()
        ):
            return False
        # "B, A is wrong" and "B and A is wrong" name one answer.
        end = self._word(self._past(other + 1, _CLOSERS))
        return self._word(join) in _OR or end in _STOPS

    def _named(self, i: int) -> str:
        """The choice whose text is the rest of the line, or of the sentence, from token ``i`` on."""
        start = self._tokens[i].start
        line = self._text[start : start + _MAX_CHOICE_CHARS].partition("\n")[0]
        sentence = line.partition(". ")[0]
        return self._equal(start, start + len(line)) or self._equal(start, start + len(sentence))

    def _equal(self, start: int, end: int) -> str:
        """The only choice whose text is that from ``start`` to ``end``. A letter alone is no choice's text."""
        if end - start > _MAX_CHOICE_CHARS:
            return ""
        plain = _plain(self._text[start:end])
        if not plain or plain.upper() in self._letters:
            return ""
        same = (i for i, choice in enumerate(self._choices) if choice == plain)
        return _agreed(self._letters[i] for i in same)
