"""Whether heads pass between this project and the two whose layouts it reads and writes, by their own code.

    python -m benchmarks.public_heads [--quick] [--json FILE] [--model DIR_OR_ID] [--torch torch==2.13.0+cpu]
                                      [--positions 67] [--env-speculators DIR] [--env-specforge DIR] [--verbose]

`speculators` and `specforge` are installed from PyPI, each in an environment of its own, which is removed afterwards;
with `--env-…` the one in that folder is used, or made there and kept. `--torch` should be a build for CPUs, from an
index that `PIP_EXTRA_INDEX_URL` may name: PyPI's own takes 4 GB.

Ours, for each combination of switches: a random draft is written in the project's layout, loaded with its own loader,
and computed as its trainer computes. Theirs: the project makes and saves a head by its own code, and we import it. The
yardstick is `Eagle3Draft`, one chain of three proposals after the other as in service, in float32, over random features
and tokens. What is written and read back here must be equal bit by bit.

Targets: every head loads that its project has the switches for, all likeliest tokens are the same, logits differ by no
more than float32 rounds, and all tensors are equal.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.common import peer_heads
from benchmarks.common.peer_environments import DEFAULT_TORCH, PROJECTS, environment, run_in
from benchmarks.common.peer_heads import STEPS, randomize
from benchmarks.common.report import Target, finish, parser
from slipstream.models import resolve_model
from speculator.draft.checkpoint import (
    SWITCHES,
    apply_state,
    draft_config_json,
    draft_state,
    read_target_tensor,
    write_folder,
)
from speculator.draft.eagle3 import DraftConfig, Eagle3Draft
from speculator.draft.initialization import fresh_draft
from speculator.draft.public_heads import as_speculators, check_sglang_layout, read_public_head
from speculator.errors import SlipstreamError
from speculator.target_folder import EMBEDDING

_LACKS: dict[str, dict[tuple[str, ...], str]] = {
    "speculators": {("fc_norm", "norm_before_fc"): "it refuses both norms together"},
    "specforge": {
        ("norm_before_residual",): "it has no such residual",
        ("norm_before_fc",): "it has no input_norm",
        ("norm_output",): "its trainer feeds back what the norm has not seen",
    },
}
"""What a project does not compute, by what a combination contains."""
_TOLERANCE = 1e-4
"""Of the largest logit."""


@dataclass(frozen=True)
class Head:
    project: str
    switches: tuple[str, ...]
    is_ours: bool
    seed: int
    is_windowed: bool = False
    is_whole: bool = False
    """Of the target's whole vocabulary."""

    @property
    def name(self) -> str:
        return f"{self.project}-{self.seed}"

    @property
    def lack(self) -> str | None:
        """Why the project computes it otherwise, where it does."""
        return next((why for lacking, why in _LACKS[self.project].items() if {*lacking} <= {*self.switches}), None)

    def __str__(self) -> str:
        marks = [", whole vocabulary"] * self.is_whole + [", its default window"] * self.is_windowed
        return f"{'ours' if self.is_ours else 'theirs'}, {' + '.join(self.switches) or 'none'}{''.join(marks)}"


@dataclass(frozen=True)
class Outcome:
    text: str
    is_good: bool
    same_argmax: tuple[int, ...] = ()
    """By step, of `num_rows`."""
    num_rows: int = 0
    difference: float = 0.0
    bit_equal: bool = False


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    model_dir = resolve_model(arguments.model)
    outcomes: dict[Head, Outcome] = {}
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="public-heads-") as scratch:
        for project in PROJECTS:
            kept: Path | None = getattr(arguments, f"env_{project}")
            python = environment(kept or Path(scratch) / project, project, arguments.torch)
            heads = list(_heads(project, quick=arguments.quick))
            folder = Path(scratch) / "heads"
            exchange = _Exchange(folder, model_dir, num_positions=arguments.positions)
            versions[project], found = exchange.run(project, python, heads, verbose=arguments.verbose)
            outcomes |= found
            shutil.rmtree(folder)
            if kept is None:
                shutil.rmtree(Path(scratch) / project)
    rows: list[tuple[str, object]] = [("project, whose head, switches", "outcome")]
    rows += [(f"{head.project} {versions[head.project]}, {head}", each.text) for head, each in outcomes.items()]
    document = {
        "versions": versions,
        "heads": [{**asdict(head), **asdict(outcome)} for head, outcome in outcomes.items()],
    }
    finish(rows, _targets(outcomes), document, arguments.json)


def _heads(project: str, *, quick: bool) -> Iterator[Head]:
    combinations = [chosen for count in range(len(SWITCHES) + 1) for chosen in itertools.combinations(SWITCHES, count)]
    if quick:
        combinations = [(), ("fc_norm",), SWITCHES[1:]]
    seeds = itertools.count()
    for is_ours in (True, False):
        for chosen in combinations:
            head = Head(project, chosen, is_ours, next(seeds))
            # What the project does not compute is a question only of what we write.
            if is_ours or head.lack is None:
                yield head
        yield Head(project, (), is_ours, next(seeds), is_whole=True)
    if project == "speculators":
        yield Head(project, SWITCHES[1:], is_ours=False, seed=next(seeds), is_windowed=True)


class _Exchange:
    """Heads of a folder, written by one side and read by the other."""

    def __init__(self, folder: Path, model_dir: Path, *, num_positions: int) -> None:
        self._folder, self._model_dir = folder, model_dir
        self._embedding = read_target_tensor(model_dir, EMBEDDING).float()
        self._num_rows = num_positions - STEPS
        folder.mkdir()
        draft = fresh_draft(model_dir, seed=0)
        state, generator = draft_state(draft), torch.Generator().manual_seed(7)
        sizes = torch.tensor([1.0, 4.0, 16.0]).repeat_interleave(draft.config.hidden_size)
        self._inputs = {
            "aux": torch.randn(num_positions, len(sizes), generator=generator) * sizes,
            "tokens": torch.randint(draft.config.vocab_size, (num_positions + STEPS,), generator=generator),
            "embedding": self._embedding,
        }
        save_file(self._inputs, folder / "inputs.safetensors")
        save_file({name: state[name] for name in ("d2t", "t2d")}, folder / "vocabulary.safetensors")

    def run(
        self, project: str, python: Path, heads: Sequence[Head], *, verbose: bool
    ) -> tuple[str, dict[Head, Outcome]]:
        """The project's version, and what came of each head."""
        refused = {head: why for head in heads if head.is_ours and (why := self._write(head)) is not None}
        jobs = [self._job(head) for head in heads if head not in refused]
        (self._folder / "jobs.json").write_text(json.dumps(jobs))
        run_in(python, Path(peer_heads.__file__), project, self._folder, verbose=verbose)
        answers = json.loads((self._folder / "answers.json").read_text())
        outcomes = {
            head: Outcome(f"not written: {refused[head]}", head.lack is not None)
            if head in refused
            else self._compared(head, answers["errors"].get(head.name), answers["left_out"].get(head.name, []))
            for head in heads
        }
        return answers["version"], outcomes

    def _job(self, head: Head) -> dict[str, Any]:
        own = {"name": head.name, "head": str(self._folder / head.name), "makes": not head.is_ours}
        return {**asdict(head), **own, "all_switches": SWITCHES, "target": str(self._model_dir)}

    def _draft(self, head: Head) -> Eagle3Draft:
        """Random weights that bfloat16 holds, the same for a seed."""
        size = len(self._embedding) if head.is_whole else None
        draft = fresh_draft(self._model_dir, seed=head.seed, switches=head.switches, draft_vocab_size=size)
        randomize(draft.parameters(), head.seed)
        return draft

    def _write(self, head: Head) -> str | None:
        """Write our draft in the project's layout; returns why we do not."""
        draft, folder = self._draft(head), self._folder / head.name
        values, tensors = draft_config_json(draft.config), draft_state(draft)
        try:
            if head.project == "speculators":
                values, tensors = as_speculators(draft.config, tensors, self._model_dir, str(self._model_dir))
            else:
                check_sglang_layout(draft.config)
        except SlipstreamError as error:
            return str(error).partition(":")[0]
        write_folder(folder, tensors, values)
        return None

    def _compared(self, head: Head, error: str | None, left_out: Sequence[str]) -> Outcome:
        if error is not None:
            return Outcome(f"not loaded there: {head.lack or error}", head.lack is not None)
        try:
            read = read_public_head(self._folder / head.name, self._model_dir)
        except SlipstreamError as refusal:
            return Outcome(f"not read here: {refusal}", is_good=False)
        draft = Eagle3Draft(read.config, self._embedding, read.state["d2t"])
        apply_state(draft, read.state)
        bit_equal = _are_equal(read.state, draft_state(self._draft(head)) if head.is_ours else self._saved(head))
        logits = load_file(self._folder / f"{head.name}.safetensors")["logits"][:, : self._num_rows]
        expected = _chains(draft, self._inputs, self._num_rows)
        same = tuple((expected.argmax(-1) == logits.argmax(-1)).sum(-1).tolist())
        difference = float((expected - logits).abs().max() / expected.abs().max())
        is_same = sum(same) == STEPS * self._num_rows and difference < _TOLERANCE
        notes = [note for note in read.notes if "sees" in note]
        notes += [head.lack] if head.lack else []
        notes += [f"its loader drops {', '.join(left_out)}"] if left_out else []
        figures = (
            f"loads, argmax equal {' + '.join(map(str, same))} of {STEPS} × {self._num_rows}, logits differ by "
            f"{difference:.0e}, tensors {'bit-equal' if bit_equal else 'DIFFER'}"
        )
        return Outcome(
            "; ".join([figures, *notes]),
            is_good=bit_equal and _has_switches(read.config, head) and (is_same or head.lack is not None),
            same_argmax=same,
            num_rows=self._num_rows,
            difference=difference,
            bit_equal=bit_equal,
        )

    def _saved(self, head: Head) -> dict[str, Tensor]:
        """The tensors of a head of theirs by the names of a draft file, without the target's own."""
        tensors = load_file(self._folder / head.name / "model.safetensors")
        return {
            name.replace("layers.0.", "midlayer."): tensor
            for name, tensor in tensors.items()
            if "embed_tokens" not in name
        }


def _has_switches(config: DraftConfig, head: Head) -> bool:
    return all(getattr(config, name) == (name in head.switches) for name in SWITCHES)


def _are_equal(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """A file of the whole vocabulary need not have its map."""
    missing = ours.keys() - theirs.keys() - ({"d2t", "t2d"} if len(ours["d2t"]) == len(ours["t2d"]) else set())
    return not missing and all(torch.equal(ours[name], tensor.to(ours[name])) for name, tensor in theirs.items())


@torch.no_grad()
def _chains(draft: Eagle3Draft, inputs: Mapping[str, Tensor], num_rows: int) -> Tensor:
    """Logits [STEPS, num_rows, D] of the chains behind each position, each computed anew from all that it reads."""
    fused, tokens = draft.fuse(inputs["aux"]), inputs["tokens"]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    logits = torch.empty(STEPS, num_rows, draft.config.draft_vocab_size)
    for row in range(num_rows):
        features = fused[: row + 1]
        for step in range(STEPS):
            positions = torch.arange(len(features))[None]
            output = draft(tokens[None, 1 : len(features) + 1], features[None], positions, attend)[0, -1:]
            logits[step, row] = draft.logits(output)[0]
            features = torch.cat([features, output])
    return logits


def _targets(outcomes: Mapping[Head, Outcome]) -> list[Target]:
    targets = []
    for project, is_ours in itertools.product(PROJECTS, (True, False)):
        good = [each.is_good for head, each in outcomes.items() if (head.project, head.is_ours) == (project, is_ours)]
        whose = "of ours it computes as we do" if is_ours else "of its own we compute as it does"
        targets.append(Target(f"{project}: share of heads {whose}", sum(good) / len(good), 1.0))
    return targets


def _arguments() -> argparse.Namespace:
    options = parser("Whether heads pass between this project and SpecForge and speculators", has_prompts=False)
    options.add_argument("--torch", default=DEFAULT_TORCH, help="what pip installs as PyTorch")
    options.add_argument("--positions", type=int, help="of random features and tokens; 19 or 67")
    options.add_argument("--verbose", action="store_true", help="show what the projects print")
    for project in PROJECTS:
        options.add_argument(f"--env-{project}", type=Path, metavar="DIR", help=f"an environment with {project}")
    arguments = options.parse_args()
    if arguments.positions is None:
        arguments.positions = 19 if arguments.quick else 67
    return arguments


if __name__ == "__main__":
    main()
