"""Custom logger, in a single file, that posts the scores and the final state of a run to the webhook of a chat.

WEBHOOK_URL=https://... python main.py --logger examples/notify.py:Notify --save-dir checkpoints/notified
"""

import json
import os
from urllib.request import Request, urlopen

from lockstep import LoggedRun, Logger, Record


class Notify(Logger):
    def start(self, run: LoggedRun) -> None:
        self.run, self.url = run, os.environ["WEBHOOK_URL"]

    def metrics(self, record: Record) -> None:
        if record.event == "result":
            self.post(record.text)

    def end(self, state: str) -> None:
        self.post(state)

    def post(self, text: str) -> None:
        message = json.dumps({"text": f"{self.run.directory} ({self.run.id}): {text}"})
        urlopen(Request(self.url, message.encode(), {"Content-Type": "application/json"}), timeout=10).close()
