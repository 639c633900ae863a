"""The documents name no option of SGLang that it does not have."""

from __future__ import annotations

import argparse

from sglang.srt.server_args import ServerArgs

from docs.names import FLAGS_OF_OTHERS


def test_sglang_has_the_flags_that_the_documents_name() -> None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    assert [flag for flag in FLAGS_OF_OTHERS["sglang"] if flag not in parser._option_string_actions] == []
