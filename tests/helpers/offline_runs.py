"""Reads what Weights & Biases writes offline, for which its library has no reader; the messages are its own."""

import json
import time

import pytest


def wandb_records(file):
    """Return the messages of a run: a file of blocks of 32 kB, in which each part has a head of 7 bytes."""
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data, place, part, records = file.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if -place % 32768 < 7:
            place += -place % 32768
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        part, place = part + data[place + 7 : place + 7 + size], place + 7 + size
        if kind in (1, 4):  # complete
            records.append(messages.Record.FromString(part))
            part = b""
    if any(record.HasField("exit") for record in records):
        return records
    time.sleep(0.1)  # another process writes the file
    return wandb_records(file)


def history(record):
    """Return the values of a message by name; of a picture or a table, one of its fields."""
    return {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
