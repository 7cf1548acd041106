"""Command lines of all models of the trainer, on data that their tasks generate."""

from benchmarks.on_gpu.part import Setting

LAST_200 = ["--maxlen", "200", "--last-items-only"]
PAIRS = ["--loss", "bpr", "--embed-dim", "64"]
MODELS: dict[str, list[str]] = {
    "harnet": ["--task", "har"],
    "tinyhar": ["--task", "har", "--model", "tinyhar"],
    "deepconvlstm": ["--task", "har", "--model", "deepconvlstm"],
    "sasrec": ["--task", "seqrec", "--no-time", *LAST_200],
    "tisasrec": ["--task", "seqrec", *LAST_200],
    "tisasrec with mhc": ["--task", "seqrec", "--mhc", *LAST_200],
    "kgat": ["--task", "kgat", "--model", "kgat", *PAIRS, "--kg-batch-ratio", "2"],
    "kg-lightgcn": ["--task", "kgat", "--model", "kg-lightgcn", *PAIRS, "--num-layers", "3"],
    "lightgcn": ["--task", "kgat", "--model", "lightgcn", *PAIRS, "--num-layers", "3"],
    "bprmf": ["--task", "kgat", "--model", "bprmf", *PAIRS],
    "plmu": ["--task", "speech"],
    "plmu streaming": ["--task", "speech", "--streaming"],
    "lmu": ["--task", "speech", "--model", "lmu"],
    "nano": ["--task", "tabular", "--num-val-tables", "4"],
    "tabicl": ["--task", "tabular", "--model", "tabicl", "--num-val-tables", "4"],
}
"""Flags of each model, by its name in the results."""

HAVE_DROPOUT = frozenset(MODELS) - {"kg-lightgcn", "lightgcn", "bprmf", "nano", "tabicl"}

SLOW_ON_CPU = ("deepconvlstm", "lmu", "tabicl")


def chosen(setting: Setting, on_cpu: str) -> list[str]:
    """Returns the models that a part measures: all models on a GPU, a fast model on the CPU."""
    if not setting.is_gpu:
        return [on_cpu]
    return [name for name in MODELS if not setting.is_small or name not in SLOW_ON_CPU]


def without_dropout(name: str) -> list[str]:
    """Returns a model's command line without dropout, because dropout masks differ between CPU and GPU."""
    return [*MODELS[name], *(["--dropout", "0"] if name in HAVE_DROPOUT else [])]


BATCH_SIZES = {"har": 256, "seqrec": 128, "kgat": 1024, "speech": 32, "tabular": 16}
"""Batch size of speed measurements, by task."""
