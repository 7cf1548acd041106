"""The workloads that come with the trainer. Each is imported when it is chosen, with its part of models/ and data/."""

TASKS = {
    "har": "tasks.har:HarTask",
    "seqrec": "tasks.seqrec:SeqrecTask",
    "kgat": "tasks.kgat:KgatTask",
    "speech": "tasks.speech:SpeechTask",
    "tabular": "tasks.tabular:TabularTask",
}
"""By the name that `--task` takes; the first is its default."""
