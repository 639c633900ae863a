"""Does a text hold personal data of a kind that has a form? Such traces are not to leave the process.

Patterns, and check digits where a kind has them: e-mail addresses, phone numbers that are written as such, payment
cards (Luhn), IBANs (ISO 13616, modulo 97). Names, addresses and everything else that takes an understanding of the text
is not found: this lowers what is kept, it does not anonymise.

Why not a library: Presidio and scrubadub bring spaCy or scikit-learn for the names, into every engine process;
commonregex is one file of patterns without check digits, last changed in 2014; phonenumbers needs a region to tell a
national number from any other, which traffic of many countries does not have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenizers import Tokenizer

from speculator.errors import ConfigError
from speculator.trace import Trace

KINDS = ("email", "card", "iban", "phone")
REASONS = tuple(f"personal_{kind}" for kind in KINDS)
"""Why a trace is dropped, as the recorder counts it."""

_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,24}\b")
# Runs of digits are not to be cut anywhere, here and below: there are too many ways.
_CARD = re.compile(r"(?<![\w.,+-])[2-6]\d{3}(?:\d{2,15})?(?:[ -]\d{2,15}){0,4}(?![\w])")
_IBAN = re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b")
_PHONE = re.compile(
    r"(?<![\w.,+-])(?:"
    r"(?:\+|00)[1-9]\d{0,14}(?:(?:[ .\-/]\(?|\(|(?<=\)))\d{1,15}\)?){0,6}"  # with the country's code
    r"|\(?[2-9]\d{2}\)?[ .-]{1,2}\d{3}[ .-]\d{4}"  # North America
    r"|\(?0\d{1,5}\)?(?: ?[/-] ?| )\d{2,4}(?:[ -]?\d{2,5}){1,4}"  # a national prefix, and groups
    r")(?![\w])"
)
_DATE = re.compile(r"\d{2}[/-]\d{2}[/-](?:19|20)?\d{2}\b")
_MAX_PHONE_DIGITS = 15


def kinds_in(text: str) -> Iterator[str]:
    """Of KINDS, those that occur, each at most once."""
    if _EMAIL.search(text):
        yield "email"
    if any(_is_card(_digits(part)) for found in _CARD.finditer(text) for part in _without_code(found[0])):
        yield "card"
    if any(_is_iban(part) for found in _IBAN.finditer(text) for part in _beginnings(found[0])):
        yield "iban"
    if any(_is_phone(found[0]) for found in _PHONE.finditer(text)):
        yield "phone"


class PersonalData:
    """Looks into traces, with the target's tokenizer."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode

    @classmethod
    def of_model(cls, model_dir: Path) -> PersonalData:
        """Raises ConfigError where the model's folder has no tokenizer.json."""
        try:
            return cls(Tokenizer.from_file(str(model_dir / "tokenizer.json")).decode)
        except Exception as error:  # the library raises nothing more precise
            raise ConfigError(
                f"{model_dir} has no readable tokenizer.json: personal data cannot be looked for, give another --model "
                "or leave --drop-personal-data out"
            ) from error

    def reason(self, trace: Trace) -> str | None:
        """Of REASONS, the first that applies to the prompt's kept tail and the answer."""
        kind = next(kinds_in(self._decode(trace.token_ids.tolist())), None)
        return None if kind is None else f"personal_{kind}"


def _digits(text: str) -> str:
    return "".join(filter(str.isdecimal, text))


def _without_code(text: str) -> Iterator[str]:
    """The text, and its beginning of 15 or 16 digits where more follow: the date or the code that is beside them."""
    yield text
    for end in (found.start() for found in re.finditer("[ -]", text)):
        if len(_digits(text[:end])) in (15, 16):
            yield text[:end]


def _beginnings(text: str) -> Iterator[str]:
    """The text, and the text without its last one, two … words: a neighbour in capitals looks like more of an IBAN."""
    while text:
        yield text
        text = text.rpartition(" ")[0]


def _is_phone(text: str) -> bool:
    """With its country's code a number has at least 8 digits; without one it takes more to be told from others."""
    least = 8 if text.startswith(("+", "00")) else 9
    return least <= len(_digits(text)) <= _MAX_PHONE_DIGITS and not _DATE.match(text)


def _is_card(digits: str) -> bool:
    """12 to 19 digits, not all alike, whose Luhn sum is a multiple of ten."""
    if not 12 <= len(digits) <= 19 or len(set(digits)) == 1:
        return False
    doubled = (sum(divmod(2 * int(digit), 10)) for digit in digits[-2::-2])
    return (sum(map(int, digits[-1::-2])) + sum(doubled)) % 10 == 0


def _is_iban(text: str) -> bool:
    compact = text.replace(" ", "")
    if not 15 <= len(compact) <= 34:
        return False
    return int("".join(str(int(character, 36)) for character in compact[4:] + compact[:4])) % 97 == 1
