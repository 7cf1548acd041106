"""The workloads that come with the trainer. Each is imported when it is chosen, with its part of models/ and data/."""

TASKS = {
    "har": f"{__name__}.har:HarTask",
    "seqrec": f"{__name__}.seqrec:SeqrecTask",
    "kgat": f"{__name__}.kgat:KgatTask",
    "speech": f"{__name__}.speech:SpeechTask",
    "tabular": f"{__name__}.tabular:TabularTask",
}
"""By the name that `--task` takes; the first is its default."""
