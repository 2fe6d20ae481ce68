"""The one-off process before producers start: token dataset, `target_io.safetensors`, `eval.safetensors` and,
for a drafter that starts from the target's layers, `drafter_init.safetensors`.

    python -P -m producer.setup ARGS.json

It gets a local model folder and resolves nothing itself. What is there and current is left alone; the target is
loaded only when something must be made from it. Progress goes to stdout line by line; exit code 0 when all files are
there, 2 with one line when the request was wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import msgspec
import torch
import transformers

from producer.checked import FILE_NAME, LEAST_COSINE, SelfCheck, read_self_check
from producer.drafter_init import init_fingerprint, write_drafter_init
from producer.evalshard import held_out_prompts, shard_fingerprint, write_eval_shard
from producer.keepsakes import Keepsakes
from producer.locate import read_target_facts, target_fingerprint
from producer.prepare import prepare, report_of
from producer.preparing import describe
from producer.ranks import loaded
from producer.samples import SampleMaker
from producer.selfcheck import self_check, some_samples
from producer.setup_args import Resumed, SetupArgs
from producer.target import Target, stop_ids
from producer.target_io import write_target_io
from producer.template import load_tokenizer
from protocol.cache import Cache
from protocol.child import run_child
from protocol.cursor import check_fit, decode_cursor
from protocol.dataset import TokenDataset
from protocol.errors import RequestError
from protocol.plan import Plan

Say = Callable[[str], None]


def run_setup(args: SetupArgs, say: Say) -> TokenDataset:
    """Makes what is missing, in the order of its cost, and returns the dataset. Raises RequestError."""
    with ExitStack() as stack:

        @cache
        def target() -> Target:
            if args.cached_only:
                raise RequestError(
                    f"cache.mode = only: {args.cache_dir} lacks what is made with the target for this configuration: "
                    "`draftwire cache build CONFIG` adds it"
                )
            say(f"loading the target from {args.target_dir} on {' and '.join(args.devices)}")
            log_path = Path(args.run_dir) / "log" / "setup.log"
            return stack.enter_context(loaded(Path(args.target_dir), args.target, args.devices, log_path))

        return _make_what_is_missing(args, target, say)


def _make_what_is_missing(args: SetupArgs, target: Callable[[], Target], say: Say) -> TokenDataset:
    folder, run_dir = Path(args.target_dir), Path(args.run_dir)
    facts = read_target_facts(folder)
    wrong = [tap for tap in args.taps if not 0 <= tap < facts["num_layers"]]
    if wrong:
        raise RequestError(f"drafter.taps: {wrong[0]} is not a layer; {folder.name} has 0 to {facts['num_layers'] - 1}")
    tokenizer = load_tokenizer(folder, args.target.trust_remote_code)
    dataset = prepare(args.data, tokenizer, facts, Path(args.dataset_dir), say)
    for line in describe(report_of(dataset)):
        say(line)
    held = int(Cache.open(Path(args.cache_dir)).held(dataset).sum()) if args.cache_dir is not None else 0
    if args.cached_only:
        say(f"cache: {held} of the {len(dataset)} samples are in {args.cache_dir}")
    computes = not args.cached_only and held < len(dataset)
    if args.resumed is not None:
        _check_resumable(args.resumed, dataset)
    weights = target_fingerprint(folder, args.target, args.devices[0])
    run_dir.mkdir(parents=True, exist_ok=True)
    io_path, eval_path = run_dir / "target_io.safetensors", run_dir / "eval.safetensors"
    kept = Keepsakes(Path(args.cache_dir) if args.cache_dir is not None else None, say)
    if not kept.is_current(io_path, weights):
        write_target_io(io_path, target(), weights)
        kept.keep(io_path, weights)
        say(f"wrote {io_path}")
    init_path = run_dir / "drafter_init.safetensors"
    init = init_fingerprint(weights, args.init_layers)
    if args.init_layers and not kept.is_current(init_path, init):
        write_drafter_init(init_path, target(), args.init_layers, weights, say)
        kept.keep(init_path, init)
        say(f"wrote {init_path}")
    if not args.data.eval:
        say("data.eval is not set: no evaluation shard, acceptance length will not be measured")
        if computes:
            _check_target(args, dataset, weights, target, say)
        return dataset
    fingerprint = shard_fingerprint(
        args.data, dataset.fingerprint, weights, args.taps, args.eval_prompts, args.eval_max_new_tokens
    )
    if not kept.is_current(eval_path, fingerprint):
        maker = SampleMaker(tokenizer, int(facts["vocab_size"]), int(dataset.meta["max_length"]))
        prompts = held_out_prompts(args.data, maker, args.eval_prompts, say)
        rows = write_eval_shard(
            eval_path,
            target(),
            args.taps,
            prompts,
            stop_ids=stop_ids(target(), tokenizer),
            max_new_tokens=args.eval_max_new_tokens,
            fingerprint=fingerprint,
            say=say,
        )
        kept.keep(eval_path, fingerprint)
        say(f"wrote {eval_path}: {rows} prompts with the target's own answers")
    if computes:
        _check_target(args, dataset, weights, target, say)
    return dataset


def _check_target(args: SetupArgs, dataset: TokenDataset, weights: str, target: Callable[[], Target], say: Say) -> None:
    """The self-check, last of all: it may leave the layers compiled. Where a cache holds everything there is no
    target to check."""
    run_dir, compiled = Path(args.run_dir), args.target.compiles_on(args.devices[0])
    devices = " + ".join(torch.cuda.get_device_name(each) if each != "cpu" else each for each in args.devices)
    software = f"torch {torch.__version__}, transformers {transformers.__version__}, compiled {compiled}"
    fingerprint = f"{weights}, taps {args.taps}, data {dataset.fingerprint}, {devices}, {software}"
    before = read_self_check(run_dir)
    if before is not None and before.fingerprint == fingerprint:
        return
    say("self-check: a padded batch of samples against each alone" + (", compiled" if compiled else ""))
    padding_mask, taps = self_check(target(), args.taps, some_samples(dataset), compiled)
    for check in taps:
        say(str(check))
    if noisy := [check.tap for check in taps if check.floor_cosine < LEAST_COSINE]:
        say(
            f"rounding alone turns the states of tap {noisy[0]} further than a cosine of {LEAST_COSINE}, without any "
            f"padding: a server's features will differ as much; target.compile = false may make it less"
        )
    say(f"self-check passed; batches run {'with' if padding_mask else 'without'} their padding mask")
    found = SelfCheck(fingerprint=fingerprint, padding_mask=padding_mask, taps=taps)
    part = run_dir / f"{FILE_NAME}.part"
    part.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    part.rename(run_dir / FILE_NAME)


def _check_resumable(resumed: Resumed, dataset: TokenDataset) -> None:
    """Refuses (RequestError) another plan than the checkpoint's before any file of the run is replaced."""
    plan = Plan(dataset.lengths, dataset.eligible, resumed.plan, dataset.fingerprint)
    path = Path(resumed.checkpoint) / "cursor.json"
    check_fit(resumed.checkpoint, decode_cursor(path.read_bytes(), str(path)), plan)


def main(path: str) -> None:
    """Runs the set-up that the JSON file `path` describes. Raises RequestError."""
    try:
        args = msgspec.json.decode(Path(path).read_bytes(), type=SetupArgs)
    except (OSError, msgspec.MsgspecError) as error:
        raise RequestError(f"{path}: {error}") from None
    run_setup(args, lambda line: print(line, flush=True))


if __name__ == "__main__":
    run_child("setup", lambda: main(sys.argv[1]))
