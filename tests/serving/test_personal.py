"""Personal data that has a form: what is found, what is not taken for it, and what the recorder does with it."""

from __future__ import annotations

import time

import numpy as np
import pytest

from serving.personal import KINDS, REASONS, PersonalData, kinds_in
from serving.recorder import DROP_REASONS, TraceRecorder
from tests.toy import ALPHABET, toy_tokenizer
from tests.traces import make_trace
from tests.waiting import wait_until

HELD = {
    "email": [
        "write to jane.doe@example.com today",
        "JANE_DOE+news@mail.example.co.uk",
        "<o'neil-2@sub.example.org>",
        "mailto:a@b.io",
        "contact: müller@example.de",
    ],
    "card": [
        "my card is 4111 1111 1111 1111, thanks",
        "5555555555554444",
        "378282246310005",
        "3782 822463 10005",
        "6011-1111-1111-1117",
        "Visa:4012888888881881.",
        "4111 1111 1111 1111 12/27",
        "3782 822463 10005 1234",
    ],
    "iban": [
        "DE89 3704 0044 0532 0130 00",
        "GB29NWBK60161331926819",
        "pay FR14 2004 1010 0505 0001 3M02 606 please",
        "NL91ABNA0417164300",
        "CH9300762011623852957",
        "BE68539007547034 EUR 20",
        "NL91 ABNA 0417 1643 00 BIC ABNANL2A",
    ],
    "phone": [
        "call +1 415 555 2671",
        "+49 30 901820",
        "tel. (415) 555-2671",
        "415-555-2671",
        "0171 2345678 oder 030/901820",
        "+44 20 7946 0958",
        "0033 1 42 68 53 00",
        "01 42 68 53 00",
        "+919876543210",
        "+44(0)2079460958",
    ],
}
UNSEEN = {
    "email": [
        "Reach me at first.last@sub.domain.travel!",
        "my email:john99@gmail.com",
        "JOHN@EXAMPLE.COM",
        "x_y-z@co.jp, and",
        "sales@münchen.de",
        "jane at example dot com",
    ],
    "phone": [
        "phone: 4155552671",
        "(0)30 123456",
        "+1-202-555-0143",
        "202.555.0143",
        "+44 (0)20 7946 0958",
        "tel +33142685300",
        "089/123456-78",
        "+81 3-1234-5678",
        "+55 11 91234-5678",
        "04 78 12 34 56",
        "my number is 07911 123456",
        "+7 (495) 123-45-67",
    ],
    "card": [
        "4111-1111-1111-1111",
        "card 4242424242424242 exp 12/29",
        "6011 0009 9013 9424",
        "5105105105105100",
        "3530111333300000",
        "4111.1111.1111.1111",
    ],
    "iban": [
        "IBAN: ES91 2100 0418 4502 0005 1332",
        "IT60X0542811101000000123456",
        "BE68 5390 0754 7034",
        "AT61 1904 3002 3457 3201",
        "de89370400440532013000",
        "PL61109010140000071219812874",
    ],
}
"""Written after the patterns, which were not changed for them."""
NOT_HELD = [
    "the loop runs 1234567890123456 times",
    "pi is 3.14159265358979323846264338327950288",
    "2024-01-31 12:30:45, ISO 8601",
    "version 10.2.3.4 of a library, commit 4f2a9c81d0e5",
    "x = 415 + 555 - 2671",
    "192.168.100.200 port 8080",
    "SELECT id, name FROM users WHERE total > 100000 LIMIT 250",
    "4111 1111 1111 1112 has a wrong check digit",
    "0000 0000 0000 0000",
    "GB29NWBK60161331926818 has one, too",
    "a @ b, user@localhost, @decorator",
    "def f(a: int = 1_000_000) -> None: return a % 97",
    "f(1, 2, 3) == [100, 200, 300, 400]",
    "ISBN 978-3-16-148410-0",
    "from 03-11-2000 until 06-04-2020 12 of them, 04/05/2021",
    "the years 1914 1918 1939 1945",
    "1,234,567.89 dollars",
    "0.1 0.2 0.3 0.4 0.55 0.66",
    "UTF-8 U+0041 0x7fff5fbff8a0",
]


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in HELD.items() for text in texts])
def test_what_is_found(kind: str, text: str) -> None:
    assert kind in set(kinds_in(text))


def test_the_share_that_is_found_is_the_documented_one() -> None:
    asked = [(kind, text) for kind, texts in UNSEEN.items() for text in texts]
    found = [text for kind, text in asked if kind in set(kinds_in(text))]
    assert (len(found), len(asked)) == (24, 30)


@pytest.mark.parametrize("text", NOT_HELD)
def test_what_is_not_taken_for_it(text: str) -> None:
    assert list(kinds_in(text)) == []


def test_a_long_text_of_one_kind_of_character_is_no_trap() -> None:
    """Nothing here may take a time that grows with more than the text."""
    for piece in ("a", "1", "1 ", "a.", "+1", "AB12 ", "(0", "1-", "@a."):
        assert len(list(kinds_in(piece * (20_000 // len(piece))))) <= len(KINDS)


@pytest.mark.parametrize("start", ["+1", "001", "4", "01", "DE89"])
def test_runs_of_digits_that_are_nothing_cost_little(start: str) -> None:
    """A pattern that may cut them anywhere takes 10 s here, and no other thread runs meanwhile."""
    text = f"{start}{'1' * 30}a " * 6000
    began_s = time.process_time()
    assert list(kinds_in(text)) == []
    assert time.process_time() - began_s < 3


def test_the_recorder_drops_and_counts_it() -> None:
    """In the thread of the recorder; everything else is written."""
    tokenizer = toy_tokenizer()
    ids = {character: tokenizer.convert_tokens_to_ids(character) for character in ALPHABET}
    written: list[str] = []

    class Stream:
        max_bytes = 1 << 20

        def append(self, payload: bytes, *, trace_id: str) -> str:
            written.append(trace_id)
            return "1-0"

    def trace(text: str, trace_id: str) -> object:
        made = make_trace(T=len(text), trace_id=trace_id)
        made.token_ids[:] = np.array([ids[character] for character in text], np.int32)
        return made

    decode = tokenizer.backend_tokenizer.decode
    recorder = TraceRecorder(Stream, max_buffer_bytes=1 << 30, reason_to_drop=PersonalData(decode).reason)
    recorder.submit(trace("my card is 4111 1111 1111 1111.", "card"))  # type: ignore[arg-type]
    recorder.submit(trace("the answer is 42, as it always was.", "plain"))  # type: ignore[arg-type]
    recorder.submit(trace("call 01 42 68 53 00 please", "phone"))  # type: ignore[arg-type]
    wait_until(lambda: recorder.stats().pending == 0)
    assert written == ["plain"]
    assert recorder.stats().dropped_by_reason == {"personal_card": 1, "personal_phone": 1}
    assert set(REASONS) <= set(DROP_REASONS)
    recorder.close(5)
