"""The workloads that come with the trainer, each imported with its part of models/ and data/ when chosen."""

TASKS = {
    "har": f"{__name__}.har:HarTask",
    "seqrec": f"{__name__}.seqrec:SeqrecTask",
    "kgat": f"{__name__}.kgat:KgatTask",
    "speech": f"{__name__}.speech:SpeechTask",
    "tabular": f"{__name__}.tabular:TabularTask",
}
"""Workloads by name for `--task`; the first is the default."""
