"""Open the models that a command line names, on the device that it selects."""

import argparse
from typing import TYPE_CHECKING

from castiron.pipelines.cli.options import prefix_store
from castiron.pipelines.terminal import Progress

if TYPE_CHECKING:
    from castiron.pipelines.engine.engine import Engine
    from castiron.vmfb.bundle.bundle import Bundle


def open_model(model: str, args: argparse.Namespace, one_sequence: bool = False, draft: bool = False) -> "Bundle":
    """Return the bundle `model`, or one that is compiled from the checkpoint `model`."""
    from castiron.pipelines.compile.open_model import is_bundle, open_or_compile
    from castiron.vmfb.targets import TARGET_OF_DRIVER

    device, target = getattr(args, "device", None), "host"
    driver = (device or "cpu").partition(":")[0]
    if driver in TARGET_OF_DRIVER and not is_bundle(model):
        from castiron.vmfb.device.gpus import find_device

        # Before the compilation, which takes long.
        find_device(driver, device)
        target = TARGET_OF_DRIVER[driver]
    bundle = open_or_compile(
        model, announce=True, full_check=args.trust == "never", one_sequence=one_sequence, draft=draft, target=target
    )
    context = getattr(args, "context", None)
    return with_device(bundle if context is None else bundle.with_context(context), device)


def with_device(bundle: "Bundle", device: str | None) -> "Bundle":
    """Return a copy of the bundle for a device such as "vulkan:1"; None: the default one."""
    progress = Progress()

    def report(done: int, total: int) -> None:
        progress("uploading the weights", done / total)
        if done == total:
            progress.close()

    return bundle.on_device(device, report)


def open_engine(args: argparse.Namespace) -> "tuple[Bundle, Engine]":
    """Return (bundle, its engine) for `castiron run` and `castiron chat`."""
    from castiron.pipelines.compile.open_model import check_draft_model, require_generation
    from castiron.pipelines.engine.engine import Engine
    from castiron.pipelines.engine.memory import mapped_weights, warn_of_shortage

    if args.draft_model is not None:
        check_draft_model(args.draft_model, args.bundle)
    one_sequence = args.draft_model is args.speculative is args.prefix_cache is None
    bundle, draft = require_generation(open_model(args.bundle, args, one_sequence)), None
    store = prefix_store(args, bundle.manifest)
    if args.draft_model is not None:
        from castiron.pipelines.text.generate import open_draft

        draft = open_draft(open_model(args.draft_model, args, draft=True), bundle, args.threads)
    manifests = [bundle.manifest, *([draft.session.manifest] if draft else [])]
    warn_of_shortage(mapped_weights(*manifests))
    return bundle, Engine(bundle, args.threads, single=True, store=store, draft=draft, ngrams=args.speculative == "ngram")
