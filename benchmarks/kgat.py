"""KGAT as shipped here, against LunaBlack's KGAT-pytorch, or against a reference of that form.

    python benchmarks/kgat.py --data-dir lfm1m.zip --lunablack KGAT-pytorch --lunablack-python venv/bin/python
    python benchmarks/kgat.py --data-dir lfm1m.zip --exact

Each side runs in a process of its own, and works only while the other waits: blocks of steps in turns, each figure
the median of the blocks, or of the ratios of neighbouring ones. A step has the drawing of its batch in it. The epoch is
put together from its steps and the refresh of the attention; what this side draws for an epoch as a whole is added.
Peak memory is that of the whole process from its start, as the kernel counts it (VmHWM); that needs Linux.

LunaBlack's repository is brought by the user, with a Python that has what it needs: torch, pandas, scipy, scikit-learn
and tqdm. Nothing of it is changed but what benchmarks/kgat_lunablack.py lists, which the output repeats. Without it
the reference is benchmarks/kgat_reference.py. Both train on train.txt alone and rank for the users of test.txt, with
the published sizes: so does this side, by --select-on-test.

--exact compares results instead, in float64 with equal weights and batches and without dropout: both losses and their
gradients, with the Laplacian and with attention; the attention itself, in both forms of the softmax; recall, precision
and NDCG of the test.

Without --data-dir the data have the numbers of lfm1m (LFM-1b with Freebase), and random edges.
"""

import argparse
import json
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.turns import SideProcess, Turn, compare

NUM_USERS, NUM_ITEMS, NUM_ENTITIES, NUM_RELATIONS = 5_941, 10_303, 27_580, 6
NUM_TRAIN, NUM_TEST, NUM_TRIPLES = 738_345, 217_212, 70_953
"""Those of lfm1m."""

PARTS = {"attention": (3, (1, 2)), "cf": (1, (1, 4)), "kg": (1, (4, 16)), "evaluation": (3, (1, 2))}
"""How many times fewer turns than --repeats, and the calls in a turn of each side. The attention first, so that steps
propagate by it, as in all epochs but the first."""
SPEED_TARGETS = {"cf": 5.4, "kg": 14, "attention": 10, "evaluation": 25, "epoch": 6}
MEMORY_TARGET_MIB = 900
"""Against LunaBlack, on a graph of the size of lfm1m."""

EXACT_CASES = (
    ("bi-interaction", "random-walk", "coalesced"),
    ("bi-interaction", "random-walk", "separate"),
    ("bi-interaction", "reference", "coalesced"),
    ("bi-interaction", "symmetric", "separate"),
    ("gcn", "random-walk", "coalesced"),
    ("gcn", "random-walk", "separate"),
    ("graphsage", "random-walk", "coalesced"),
    ("graphsage", "random-walk", "separate"),
)
"""Aggregator, Laplacian, softmax."""
LARGEST_DIFFERENCE, LARGEST_DIFFERENCE_OF_METRICS = 1e-10, 1e-6
"""LunaBlack's metrics are means in float32."""


# Data


def kgat_folder(data: Path | None, scratch: Path) -> Path:
    """The folder with train.txt, of a folder or a zip, or generated."""
    if data is None:
        return generated(scratch / "generated")
    if data.is_file():
        data = unpacked(data, scratch / "unpacked")
    found = sorted([*data.glob("train.txt"), *data.glob("*/train.txt")])
    if not found:
        sys.exit(f"--data-dir {data}: has no train.txt; give data in KGAT's layout")
    return found[0].parent.resolve()


def unpacked(archive: Path, folder: Path) -> Path:
    """The files that are needed, whatever folder they are in."""
    folder.mkdir()
    with zipfile.ZipFile(archive) as parts:
        for name in parts.namelist():
            if (own := name.rpartition("/")[2]) in ("train.txt", "test.txt", "kg_final.txt"):
                (folder / own).write_bytes(parts.read(name))
    return folder


def generated(folder: Path) -> Path:
    """As many users, items, entities, interactions and triples as lfm1m; some users and items have more than others."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    users, items = (np.exp(rng.normal(0, spread, size)) for spread, size in ((0.6, NUM_USERS), (1.0, NUM_ITEMS)))
    wanted = NUM_TRAIN + NUM_TEST
    drawn = [rng.choice(len(weights), 3 * wanted, p=weights / weights.sum()) for weights in (users, items)]
    pairs = rng.permutation(np.unique(drawn[0] * NUM_ITEMS + drawn[1]))[:wanted]
    for name, part in (("train", pairs[:NUM_TRAIN]), ("test", pairs[NUM_TRAIN:])):
        owner, item = np.divmod(np.sort(part), NUM_ITEMS)
        rows = np.split(item, np.flatnonzero(np.diff(owner)) + 1)
        lines = (" ".join(map(str, [user, *row.tolist()])) for user, row in zip(np.unique(owner), rows, strict=True))
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    # Every item is a head, and every other entity a tail.
    heads = np.concatenate([np.arange(NUM_ITEMS), rng.integers(0, NUM_ITEMS, 2 * NUM_TRIPLES)])
    tails = np.concatenate([np.arange(NUM_ITEMS, NUM_ENTITIES), rng.integers(0, NUM_ENTITIES, 2 * NUM_TRIPLES)])
    heads, tails = heads[: 2 * NUM_TRIPLES], tails[: 2 * NUM_TRIPLES]
    triples = np.stack([heads, rng.integers(0, NUM_RELATIONS, len(heads)), tails], axis=1)
    _, first = np.unique(triples, axis=0, return_index=True)
    triples = triples[np.sort(first)[:NUM_TRIPLES]]
    np.savetxt(folder / "kg_final.txt", triples, fmt="%d")
    return folder


# Speed and memory


def speed(reference: SideProcess, lockstep: SideProcess, repeats: int) -> dict[str, Any]:
    theirs, ours = (side.result("facts") for side in (reference, lockstep))
    check_sizes(theirs, ours)
    result: dict[str, Any] = {}
    for action, (fewer, counts) in PARTS.items():
        result[action] = compare(reference, lockstep, action, -(-repeats // fewer), counts)
        show(action, result[action])
    for phase in ("cf", "kg"):
        times = {name: side.turn(f"{phase}_sampling", 5).wall for name, side in named(reference, lockstep)}
        result[phase] |= {f"{name}_sampling_s": round(time, 5) for name, time in times.items()}
    result["epoch"] = whole_epoch(result, theirs, ours, lockstep.turn("first_batches", 3))
    show("epoch", result["epoch"])
    result["peak_mib"] = {name: mib(side.result("peak")) for name, side in named(reference, lockstep)}
    result["loading_s"] = {name: round(side.loading.wall, 1) for name, side in named(reference, lockstep)}
    print(f"  peak memory, MiB: {result['peak_mib']}; seconds of loading: {result['loading_s']}")
    return {"sizes": ours, "changes": theirs.get("changes", [])} | result


def named(reference: SideProcess, lockstep: SideProcess) -> list[tuple[str, SideProcess]]:
    return [("reference", reference), ("lockstep", lockstep)]


def check_sizes(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    for name in ("num_nodes", "num_edges", "num_relations", "num_parameters"):
        if ours[name] != theirs[name]:
            sys.exit(f"the two sides do not train the same: {name} is {ours[name]} here and {theirs[name]} there")


def whole_epoch(result: dict[str, Any], theirs: dict[str, Any], ours: dict[str, Any], first: Turn) -> dict[str, Any]:
    """Put together from medians. first: this side's first batches, which draw for the epoch as a whole."""
    found: dict[str, Any] = {}
    for clock, drawn in (("s", first.wall), ("cpu_s", first.cpu)):
        slow, fast = (
            facts["cf_steps"] * result["cf"][f"{side}_{clock}"]
            + facts["kg_steps"] * result["kg"][f"{side}_{clock}"]
            + result["attention"][f"{side}_{clock}"]
            for side, facts in (("reference", theirs), ("lockstep", ours))
        )
        fast += drawn
        found |= {f"reference_{clock}": round(slow, 2), f"lockstep_{clock}": round(fast, 2)}
        found["ratio" if clock == "s" else "cpu_ratio"] = round(slow / fast, 2)
    return found | {"lockstep_first_batches_s": round(first.wall, 4)}


def mib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else round(num_bytes / 2**20, 1)


def with_targets(result: dict[str, Any]) -> dict[str, Any]:
    """Adds the targets to a result against LunaBlack on a graph of lfm1m's size."""
    for name, target in SPEED_TARGETS.items():
        result[name] |= {"target": target, "met": result[name]["ratio"] >= target}
        print(f"  {name}: target {target}, {'met' if result[name]['met'] else 'MISSED'}")
    peak = result["peak_mib"]["lockstep"]
    if peak is not None:
        result["peak_mib"] |= {"target": MEMORY_TARGET_MIB, "met": peak <= MEMORY_TARGET_MIB}
        print(f"  peak memory: target {MEMORY_TARGET_MIB} MiB, {'met' if peak <= MEMORY_TARGET_MIB else 'MISSED'}")
    return result


def show(name: str, result: dict[str, Any]) -> None:
    print(f"  {name}: reference {result['reference_s']} s, Lockstep {result['lockstep_s']} s:", end=" ")
    print(f"{result['ratio']} times faster ({result['cpu_ratio']} in CPU seconds)", flush=True)


# Equality


def exact(references: dict[str, SideProcess], lockstep: SideProcess, scratch: Path) -> dict[str, Any]:
    """The largest relative difference of results in each case, by the reference that they are compared with.

    A gradient's difference is relative to that gradient's largest element, a matrix's to its largest entry.
    """
    found: dict[str, Any] = {}
    metrics: list[float] = []
    request, answer = str(scratch / "request.pt"), str(scratch / "answer.pt")
    for case in EXACT_CASES:
        asked = dict(zip(("aggregator", "laplacian", "softmax"), case, strict=True))
        references["reference"].turn("request", path=request, **asked)
        lockstep.turn("exact", request=request, answer=answer)
        ours = torch.load(answer, weights_only=True)
        found[", ".join(case)] = {}
        for name, side in references.items():
            if name == "lunablack" and (asked["softmax"] == "separate" or asked["laplacian"] == "symmetric"):
                continue  # which it has not
            side.turn("exact", request=request, answer=answer)
            theirs = torch.load(answer, weights_only=True)
            differences = compared(ours, theirs)
            found[", ".join(case)][name] = max(differences.values())
            metrics.append(max(abs(ours["metrics"][name] / value - 1) for name, value in theirs["metrics"].items()))
            print(f"  {', '.join(case)}, against {name}: {differences}, metrics {metrics[-1]:.1e}", flush=True)
    largest = max(value for case in found.values() for value in case.values())
    met = largest < LARGEST_DIFFERENCE and max(metrics) < LARGEST_DIFFERENCE_OF_METRICS
    return found | {"largest": largest, "largest_of_metrics": float(f"{max(metrics):.1e}"), "met": met}


def compared(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    differences = {name: difference_of_matrices(ours[name], theirs[name]) for name in ("laplacian", "attention")}
    for part in ("cf", "cf_with_attention", "kg"):
        assert theirs[part].keys() <= ours[part].keys()
        for name, values in ours[part].items():
            other = theirs[part].get(name, torch.zeros_like(values))
            kind = f"{part}_{'loss' if name == 'loss' else 'gradients'}"
            differences[kind] = max(differences.get(kind, 0.0), relative(values - other, other))
    return {name: float(f"{value:.1e}") for name, value in differences.items()}


def difference_of_matrices(ours: Tensor, theirs: Tensor) -> float:
    return relative((ours - theirs).coalesce().values(), theirs.coalesce().values())


def relative(differences: Tensor, values: Tensor) -> float:
    """The largest difference, relative to the largest value where there is one but 0."""
    largest, scale = (float(x.abs().max()) if len(x) else 0.0 for x in (differences.flatten(), values.flatten()))
    return largest / scale if scale > 0 else largest


# The command line


def sides(args: argparse.Namespace, folder: Path) -> dict[str, SideProcess]:
    """Those that are needed, each in its process."""
    here = Path(__file__).resolve().parent
    commands = {
        "lockstep": [sys.executable, here / "kgat_lockstep.py", folder, args.num_threads],
        "reference": [sys.executable, here / "kgat_reference.py", folder],
        "lunablack": [args.lunablack_python, here / "kgat_lunablack.py", args.lunablack, folder],
    }
    if args.lunablack is None:
        del commands["lunablack"]
    elif not args.exact:
        del commands["reference"]
    return {name: SideProcess([str(word) for word in command], args.num_threads) for name, command in commands.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="folder or zip in KGAT's layout, with a graph")
    parser.add_argument("--lunablack", type=Path, help="folder of LunaBlack's repository")
    parser.add_argument("--lunablack-python", default=sys.executable, help="Python that runs it (default: this one)")
    parser.add_argument("--num-threads", type=int, default=1, help="CPU threads of each side")
    parser.add_argument("--repeats", type=int, default=9, help="turns of each side; a third for refresh and evaluation")
    parser.add_argument("--exact", action="store_true", help="compare results instead of speed")
    args = parser.parse_args()
    if args.lunablack and not (args.lunablack / "main_kgat.py").exists():
        parser.error(f"--lunablack {args.lunablack}: has no main_kgat.py; give the folder of the repository")
    result: dict[str, Any] = {
        "data": args.data_dir.name if args.data_dir else "generated",
        "reference": "LunaBlack's KGAT-pytorch" if args.lunablack else "benchmarks/kgat_reference.py",
        "num_threads": args.num_threads,
        "torch": torch.__version__,
    }
    with tempfile.TemporaryDirectory() as scratch:
        processes = sides(args, kgat_folder(args.data_dir, Path(scratch)))
        lockstep = processes.pop("lockstep")
        if args.exact:
            result |= exact(processes, lockstep, Path(scratch))
        else:
            (reference,) = processes.values()
            result |= speed(reference, lockstep, args.repeats)
            if args.lunablack and result["sizes"]["num_edges"] == 2 * (NUM_TRAIN + NUM_TRIPLES):
                result = with_targets(result)
        for process in (lockstep, *processes.values()):
            process.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
